"""Agreement among ranks: an action succeeds on all ranks, or all of them raise the errors of the ranks that failed.

There are two ways to agree, for two places:

* :class:`TrainingRanks`, in the groups and the thread of the training: one all-reduce of three numbers if all is well.
* :class:`Ranks`, next to the training, as for a checkpoint that is being written: round after round over a side group.

Both have ``together(label, action)``, run on every rank, and ``first(label, action)``, run on rank 0 for all.

Both number and label their messages, so that a message of one call is never taken for an answer in a later one.

[Note: A group of its own]
A call next to the training must not get between the collectives of the training, which all ranks issue in one order. It
therefore uses a gloo group of its own, from one thread at a time, through the group object: ``torch.distributed`` may
destroy the groups meanwhile, and the round still ends.

[Note: A tree of ranks]
In a round the values of ranks go up a tree to rank 0, joined on the way, and the answers go down. Each child of a rank
stands for a range of the following ranks, so joined values are in rank order. A rank connects to its parent, its
siblings and its children only: a parent and its children are one gloo group. So a rank has few connections in a group
of any size.

[Note: Meetings]
Each call begins with a meeting of all ranks at the store. A rank that waits there sees ranks whose process has ended,
and ranks in another call (:mod:`fsdp.comm.waiting.waits`). Within a call all ranks are present, and messages are
waited for to the end.

[Note: Spoiled groups]
A rank may leave a call in another way than by an agreed error: it is interrupted, or fails between two rounds. It then
writes the reason into the store, and closes its side group. A rank that waits for it sees the connection end, reads the
reason, raises, and closes its own side group, until all ranks have the reason. The next call makes a new side group.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Several
from concurrent import futures
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp.comm import threads
from fsdp.comm.collectives import agree, gather_values
from fsdp.comm.groups import default_group, group_ranks, group_store, group_timeout
from fsdp.comm.lane.history import hash_of
from fsdp.comm.lane.lane import Lane
from fsdp.comm.threads import in_thread, reported_if_long
from fsdp.comm.waiting.board import Board
from fsdp.comm.waiting.waits import BESIDE, REMEDY, Sequence, Wait, ranks_as_text

HEARING = timedelta(seconds=10)  # how long ranks that have failed wait for the errors of their peers
SLOWEST = timedelta(days=1)  # how long a rank may take in a round; the end of a process is noticed at once
FAN_OUT = 8  # children of a rank in the tree

CPU = torch.device("cpu")

_T = TypeVar("_T")
_U = TypeVar("_U")


class Failure(NamedTuple):
    """An exception in a form that travels between ranks."""

    kind: str
    number: int | None  # of an OSError
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        if isinstance(error, OSError) and error.errno is not None:
            where = f": {error.filename}" if error.filename is not None else ""
            return Failure("OSError", error.errno, f"{error.strerror}{where}")
        kind = type(error).__name__
        return Failure(kind, None, str(error) if isinstance(error, Exception) and str(error) else f"{kind} {error}")

    def as_error(self, text: str) -> Exception:
        if self.number is not None:
            return OSError(self.number, text)  # an instance of the fitting subclass
        kinds = (TypeError, ValueError, KeyError, NotImplementedError, AssertionError, FileNotFoundError, OSError)
        return {kind.__name__: kind for kind in kinds}.get(self.kind, RuntimeError)(text)


def joint_error(failures: Mapping[int, Failure], size: int = 0) -> Exception:
    """Return an error of the type of the first rank's, with the messages of all ranks; equal messages appear once.

    Args:
        failures: by rank.
        size: the number of ranks, for the words "on all ranks".
    """
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.text, []).append(rank)
    each = [
        f"{'on all ranks' if len(ranks) == size else ranks_as_text(ranks)}: {text}" for text, ranks in by_text.items()
    ]
    return next(iter(failures.values())).as_error("; ".join(each))


# -- in the groups of the training -------------------------------------------------------------------------------------


def failures_in(
    groups: Several[Any],
    error: BaseException | None,
    label: str,
    device: torch.device,
    alike: Mapping[Any, Several[str]] | None = None,
) -> dict[int, Failure]:
    """Exchange the errors of all ranks of ``groups``, which all have to call; return those of the peers, by rank.

    Args:
        groups: None stands for a group of one rank.
        error: this rank's, or None.
        label: identifies the call.
        device: where the models compute.
        alike: by group, names that have to be equal on all ranks; a difference is a failure if no rank has failed.
    """
    several = [group for group in dict.fromkeys(groups) if group is not None]
    if all(group.size() == 1 for group in several):
        return {}
    failures = {} if error is None else {dist.get_rank(): Failure.of(error)}
    for number, group in enumerate(
        [*several, *several[-2::-1]]
    ):  # and back: the first group gets the errors of the last
        if group.size() > 1:
            names = (alike or {}).get(group, ()) if number < len(several) else ()
            failures.update(_failures_of(group, failures, list(names), label, device))
    return {rank: failure for rank, failure in sorted(failures.items()) if rank != dist.get_rank()}


def _failures_of(
    group: Any, failures: dict[int, Failure], names: list[str], label: str, device: torch.device
) -> dict[int, Failure]:
    number = Lane.of(group, device).issued  # equal on all ranks that do the same, and never again
    digest = hash_of("\n".join([label, str(number), *names]))
    votes = torch.tensor([int(bool(failures)), digest, -digest], device="cpu")
    agree(votes, group, device, label)
    if votes.tolist() == [0, digest, -digest]:
        return {}
    # through the store, which is separate from all collectives
    board, key = Board(group, "consensus"), "/".join(map(str, votes.tolist()))
    own = [label, number, list(failures.items()), names]
    board.post(key, own)
    by_place = {group.rank(): own} | board.wait_for_posts(key, HEARING, lambda said: len(said) == group.size())
    said = {rank: by_place[place] for place, rank in enumerate(group_ranks(group)) if place in by_place}
    found = {rank: Failure(*failure) for words in said.values() for rank, failure in words[2]}
    if not found:
        for rank, (at, count, _, theirs) in said.items():
            if (at, count) != (label, number):
                text = f"in {at!r}, collective {count}, while others are in {label!r}, collective {number}"
                found[rank] = Failure("RuntimeError", None, text)
            elif theirs != names:
                found[rank] = Failure("RuntimeError", None, _differences(names, theirs))
    silent = next((rank for rank in group_ranks(group) if rank not in said), dist.get_rank())
    return found or {silent: Failure("RuntimeError", None, f"it failed, or does something else than {label!r}")}


def _differences(here: list[str], theirs: list[str]) -> str:
    different = [*(name for name in theirs if name not in here), *(name for name in here if name not in theirs)]
    if not different:
        return "the state dict has the same in another order"
    return f"the state dict differs from that here in {', '.join(different)}"


def all_gather_object(value: Any, group: Any, label: str, device: torch.device = CPU) -> list[Any]:
    """Return the ``value`` of every rank (anything that pickles), in rank order.

    ``device`` is where the models compute.
    """
    rows = gather_values(_padded(pickle.dumps(value), group, label, device), group, device, label)
    return [pickle.loads(row.numpy().tobytes()) for row in rows]


def broadcast_object(value: Any, group: Any, label: str, device: torch.device = CPU) -> Any:
    """Return the ``value`` (anything that pickles) of rank 0 of ``group``. ``device`` is where the models compute.

    Raises:
        TypeError: on every rank, if the value does not pickle.
    """
    first, packed, problem = group.rank() == 0, b"", ""
    try:
        packed = pickle.dumps(value) if first else b""
    except Exception as error:  # the constructor of the class may raise
        problem = f"{label}: what rank 0 has cannot be sent to the other ranks: {type(error).__name__}: {error}"
    message = _padded(pickle.dumps((packed, problem)) if first else b"", group, label, device)
    agree(message, group, device, label)  # the peers contribute zeros
    packed, problem = pickle.loads(message.numpy().tobytes())
    if problem:
        raise TypeError(problem)
    return value if first else pickle.loads(packed)


def _padded(data: bytes, group: Any, label: str, device: torch.device) -> torch.Tensor:
    """Pad ``data``, a pickle, to the number of bytes of the longest of all ranks."""
    nbytes = Lane.of(group, device).ask(label, hash_of(label), largest=len(data)).result()
    if nbytes is None:
        raise RuntimeError(f"{label}: other ranks do something else")
    return torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)


class TrainingRanks:
    """The ranks of several process groups, which agree in the groups and the thread of the training.

    All ranks of the groups make the same calls in the same order, each with the same ``label``.
    """

    def __init__(
        self,
        groups: Several[Any],
        device: torch.device,
        *,
        announce: Callable[[], None] = lambda: None,
        error: Callable[[Mapping[int, Failure]], Exception] = joint_error,
    ) -> None:
        """
        Args:
            groups: None stands for this rank alone.
            device: where the models compute.
            announce: called before each communication.
            error: makes the exception for failures of peers.
        """
        self.groups = [group for group in dict.fromkeys(groups) if group is not None]
        self._device, self._announce, self._error = device, announce, error

    def together(
        self, label: str, action: Callable[[], _T], same: Callable[[_T], Mapping[Any, Several[str]]] | None = None
    ) -> _T:
        """Run ``action`` on every rank; each returns the local result.

        Args:
            same: gives texts for each group that have to be equal on all of its ranks.

        Raises:
            BaseException: the error of ``action`` on this rank.
            Exception: ``error`` of the failures of peers, or of different texts.
        """
        self._announce()
        try:
            result = action()
            texts = same(result) if same is not None else {}
        except BaseException as error:
            self._announce()
            failures_in(self.groups, error, label, self._device)
            raise
        self._announce()
        if failures := failures_in(self.groups, None, label, self._device, texts):
            raise self._error(failures)
        return result

    def first(self, label: str, action: Callable[[], _T]) -> _T:
        """Run ``action`` on the rank that is first in every group; every rank gets the result, or the error.

        The result is broadcast over the groups in turn.
        """
        self._announce()
        value: Any = None
        failure: Failure | None = None
        try:
            if all(group.rank() == 0 for group in self.groups):
                value = action()
        except BaseException as error:
            failure = Failure.of(error)
            raise
        finally:
            for group in self.groups:
                value, failure = broadcast_object((value, failure), group, label, self._device)
        if failure is not None:
            raise failure.as_error(failure.text)
        result: _T = value
        return result


class NotLoaded(RuntimeError):
    """No rank has loaded, because the state does not fit on some rank."""


def ranks_of(units: Collection[Any], groups: Several[Any] | None = None) -> TrainingRanks:
    """Return the ranks of ``groups`` (None: all groups of the units), for agreement on a load."""

    def announce() -> None:
        for unit in units:
            unit.announce()

    def error(failures: Mapping[int, Failure]) -> Exception:
        return NotLoaded(f"Nothing was loaded, because on another rank: {next(iter(failures.values())).text}")

    device = next((unit.device for unit in units), CPU)
    of_units = [group for unit in units for group in (unit.groups.shard, unit.groups.replica, unit.groups.tp)]
    return TrainingRanks(of_units if groups is None else groups, device, announce=announce, error=error)


# -- next to the training ----------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The progress of a rank: the number of the call, the number of the round, and both as text."""

    call: int
    round: int
    doing: str
    label: str

    def __str__(self) -> str:
        return f"{self.doing} ({self.label})" if self.label else self.doing


class _Gone(Exception):
    """The connection to a rank has ended."""


class _Share(NamedTuple):
    """The message up the tree in a round, for a rank and the ranks behind it."""

    value: Any  # joined
    failures: dict[int, Failure]  # by rank; without a value then
    places: dict[_Place, int]  # the progress of these ranks, each with the first rank there


class _Answer(NamedTuple):
    """The message down the tree at the end of a round, for a rank and the ranks behind it."""

    call: int
    values: Several[Any]  # one per rank
    failures: dict[int, Failure]  # of all ranks; without values then


def tree(rank: int, size: int) -> tuple[int | None, list[range]]:
    """Return the parent of a rank, and for each child the range of ranks that it stands for, itself first."""
    parent, ranks = None, range(size)
    while True:
        rest = ranks[1:]
        width = -(-len(rest) // FAN_OUT) or 1
        children = [rest[at : at + width] for at in range(0, len(rest), width)]
        if rank == ranks[0]:
            return parent, children
        parent, ranks = ranks[0], children[(rank - rest[0]) // width]


class Ranks:
    """The ranks of a process group, or this process alone, which communicate next to the training over a side group.

    Attributes:
        underway: the latest call in the background. The next call waits for it.
    """

    def __init__(self, group: Any = None) -> None:
        """Take ``group``; None for this process alone.

        Raises:
            RuntimeError: ``group`` has no store for the ranks.
        """
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.underway: futures.Future[Any] | None = None
        self._side = None if group is None else _SideGroup(group)
        self._place = _Place(0, 0, "", "")
        self._in_foreground = True  # whether the caller waits; else a thread of a save in the background
        self._agreed: list[Exception] = []  # errors of this call that all ranks have raised

    @property
    def members(self) -> list[int]:
        """The global ranks, in order."""
        if self._side is None:
            return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
        return self._side.global_ranks

    @staticmethod
    def of(process_group: Any) -> Ranks:
        """Return the ranks of ``process_group``; None: of the default group, or this process if there is none."""
        if process_group is None:
            process_group = default_group() if dist.is_available() and dist.is_initialized() else None
        if process_group is None or process_group.size() == 1:
            return _alone
        if process_group not in _known:
            _known[process_group] = Ranks(process_group)
        return _known[process_group]

    @contextlib.contextmanager
    def call(self, doing: str, *, resumed: bool = False) -> Iterator[None]:
        """Make one call, with all its rounds, inside the context; all ranks have to.

        Waits for the call in the background first. A rank that leaves by an error of its own reports it to its peers;
        see [Note: Spoiled groups].

        Args:
            doing: the call, as text, such as "fsdp.checkpoint.save()".
            resumed: whether this continues a call in another thread.

        Raises:
            OutOfStep: other ranks make other calls.
        """
        if not resumed and self.underway is not None:
            with reported_if_long(self.rank, f"in {doing} for the save in the background to end"):
                futures.wait([self.underway])
        self._in_foreground = not resumed
        try:
            if not resumed:
                call = self._place.call + 1
                if self._side is not None and (reason := self._side.reason_of_missed_call()):
                    self._side.spoil(call, reason)  # for ranks that wait there, and have not heard of it
                    call += 1
                self._place = _Place(call, 0, doing, "")
                if self._side is not None:
                    self._side.join(self._place.call, doing)
            yield
        except BaseException as error:
            if self._side is not None and not any(error is agreed for agreed in self._agreed):
                words = f"rank {self.rank} left {self._place}: {Failure.of(error).text}"
                self._side.spoil(self._place.call, words)
            raise
        finally:
            self._agreed.clear()

    def round(
        self,
        label: str,
        mine: Callable[[], _T],
        then: Callable[[Any], Several[_U]],
        join: Callable[[list[_T]], _T] | None = None,
    ) -> _U:
        """Run ``mine`` on every rank; rank 0 turns the results into one for each rank. See [Note: A tree of ranks].

        A rank whose process ends before the result is there fails the next round, not this one.

        Args:
            then: takes the list of results, by rank, or the joined result.
            join: makes one result of a list of results, in rank order; called on every inner rank of the tree.

        Returns:
            the result of this rank.

        Raises:
            Exception: on every rank, if ``mine`` or ``then`` failed on any: an error of the type of the first, with all
                messages.
            RuntimeError: a rank has ended, has left the call, or is in a different one.
        """
        self._place = self._place._replace(round=self._place.round + 1, label=label)
        joined: Callable[[list[Any]], Any] = join or (lambda several: [value for values in several for value in values])
        value, failures, error = self._try(lambda: mine() if join else [mine()])
        if self._side is None:
            if error is not None:
                raise error
            return then(value)[0]
        share = _Share(value, failures, {self._place: self.rank})
        waits = f"in {self._place} for other ranks, which are in it as well"
        try:
            with reported_if_long(self.rank, waits) if self._in_foreground else contextlib.nullcontext():
                answer, failed = self._exchange(self._side, share, joined, then)
        except _Gone as gone:
            said = self._side.why()
            self._side.spoil(self._place.call, f"rank {self.rank} left {self._place}: {gone}")
            raise RuntimeError(f"{self._place}: {gone if said is None else said[1]}") from gone
        if answer.failures:
            self._agreed.append(joint_error(answer.failures, self.size))
            raise self._agreed[-1] from (error or failed)
        result: _U = answer.values[0]
        return result

    def _try(self, action: Callable[[], _T]) -> tuple[_T | None, dict[int, Failure], Exception | None]:
        """Run ``action``; return the result, or else the failure and the error."""
        try:
            return action(), {}, None
        except Exception as error:
            return None, {self.rank: Failure.of(error)}, error

    def _exchange(
        self, side: _SideGroup, share: _Share, join: Callable[[list[Any]], Any], then: Callable[[Any], Several[Any]]
    ) -> tuple[_Answer, Exception | None]:
        """Send the share up, and the answer down; return the answer, with the error of ``join`` or ``then``."""
        parent, children = tree(self.rank, self.size)
        shares = [share, *(side.receive(child[0]) for child in children)]
        failures = {rank: failure for theirs in shares for rank, failure in theirs.failures.items()}
        places = {place: rank for theirs in reversed(shares) for place, rank in theirs.places.items()}
        value, error = None, None
        if not failures and len(places) == 1:
            value, failures, error = self._try(lambda: join([theirs.value for theirs in shares]))
        if parent is not None:
            side.send(parent, _Share(value, failures, places))
            answer: _Answer = side.receive(parent)
        else:
            for place, rank in places.items():
                if place != self._place and not failures:
                    text = f"it is in {place}, and rank 0 in {self._place}: the ranks do not make the same calls"
                    failures[rank] = Failure("RuntimeError", None, f"{text}. {REMEDY}")
            values: Several[Any] | None = None
            if not failures:
                values, failures, error = self._try(lambda: then(value))
            answer = _Answer(max(place.call for place in places), values or [None] * self.size, failures)
        self._place = self._place._replace(call=answer.call)  # equal on all ranks, even after a call that some left out
        for child in children:
            theirs = answer.values[child[0] - self.rank : child[-1] + 1 - self.rank]
            with contextlib.suppress(_Gone):  # the next round fails
                side.send(child[0], answer._replace(values=theirs))
        return answer, error

    def together(self, label: str, action: Callable[[], _T]) -> _T:
        """Run ``action`` on every rank; return the result of this rank.

        Raises: as ``round``.
        """
        own: list[_T] = []
        self.round(label, lambda: own.append(action()), lambda results: [None] * self.size)
        return own[0]

    def first(self, label: str, action: Callable[[], _T]) -> _T:
        """Run ``action`` on rank 0; return the result on every rank.

        Raises: as ``round``.
        """
        return self.round(label, lambda: None, lambda results: [action()] * self.size)


class _SideGroup:
    """The connections of :class:`Ranks`; see [Note: A group of its own] and [Note: Spoiled groups]."""

    def __init__(self, group: Any) -> None:
        self._rank, self._size, self._timeout = group.rank(), group.size(), group_timeout(group)
        store = group_store(group)
        if store is None:
            raise RuntimeError(f"the ranks of {group} cannot talk to each other: it is not a real process group")
        self._store, self._board = dist.PrefixStore("fsdp beside/", store), Board(group, "beside")
        self.global_ranks = group_ranks(group)
        self._groups: dict[int, tuple[Any, int]] = {}  # by connected rank: the group, and the place of the rank in it
        self._number = 0  # of the first group that is not spoiled
        self._count = 0  # of calls of this rank with this group
        self._calls = Sequence(group, BESIDE)
        self._tags: dict[int, int] = {}  # of the last message to or from each rank: separates late messages

    def reason_of_missed_call(self) -> str:
        """Return the error of this rank for a call that others made and this rank did not; "" if there is none."""
        return self._calls.reason if self._calls.has_missed else ""

    def join(self, call: int, doing: str) -> None:
        """Wait until all ranks have arrived at this call, and connect if need be.

        Args:
            call: the number of the call.
            doing: the call, as text.

        Raises:
            OutOfStep: other ranks make other calls, or the process of one has ended.
            RuntimeError: not all ranks came, or one has left this call already.
        """
        self._calls.does(f"has called {doing}")
        while not self._meet():
            if (said := self.why()) is not None and said[0] == call:
                self._calls.note_end()
                raise RuntimeError(said[1])
            self._number, self._count, self._groups = self._number + 1, 0, {}
        if self._groups:
            return
        parent, children = tree(self._rank, self._size)
        for head in (parent, self._rank if children else None):  # the parent's first: avoids a cycle of waits
            if head is not None:
                members = [head, *(child[0] for child in tree(head, self._size)[1])]
                group = self._connect(head, members, doing)
                self._groups |= {rank: (group, at) for at, rank in enumerate(members) if head in (self._rank, rank)}
        self._tags = {}

    def _connect(self, head: int, members: list[int], doing: str) -> Any:
        """Connect ``members``, the first of which is ``head``, as a gloo group."""
        # not new_group(): it takes all ranks of the default group, and keeps each group for ever
        prefixed = dist.PrefixStore(f"{self._number}/{head}/", self._store)
        place = prefixed, members.index(self._rank), len(members), self._timeout
        connected = in_thread(lambda: dist.ProcessGroupGloo(*place))  # not interrupted there
        wait = Wait(self._calls, self._calls.count, f"has called {doing}")
        try:
            while not futures.wait([connected], threads.PATIENCE.total_seconds()).done:
                wait.look()
            return connected.result()
        except RuntimeError as error:
            raise RuntimeError(f"the ranks cannot connect for {doing}: {error}") from error
        finally:
            wait.over()

    def _meet(self) -> bool:
        """Wait for all ranks at the next call of the current side group; return False if the group is spoiled."""
        if self.why() is not None:
            return False
        self._count += 1
        count = self._calls.begin(self._count, generation=self._number)
        wait = Wait(self._calls, count, self._calls.doing)

        def look() -> None:
            wait.look()
            if wait.seconds > self._timeout.total_seconds():
                raise RuntimeError(f"{wait.report(f'waited {wait.seconds:.0f} s')}. {REMEDY}")

        try:
            self._board.meet(f"{self._number}/{self._count}", look)
        finally:
            wait.over()
        return self.why() is None

    def why(self) -> tuple[int, str] | None:
        """Return the call in which the side group was spoiled, and the reason; None if it was not."""
        found = self._board.read(f"{self._number}/spoiled")
        return None if found is None else (found[0], found[1])

    def spoil(self, call: int, words: str) -> None:
        """Close the connections, and write the reason for the peers, unless one is there."""
        if self.why() is None:
            self._board.write(f"{self._number}/spoiled", [call, words])
            for count in (self._count, self._count + 1):  # a rank may be one call ahead
                self._board.release(f"{self._number}/{count}")
        self._groups = {}

    def send(self, rank: int, value: Any) -> None:
        """Send ``value`` to ``rank``.

        Raises:
            _Gone: the connection has ended.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device="cpu")
        self._finish("send", size, rank)
        self._finish("send", data, rank)

    def receive(self, rank: int) -> Any:
        """Receive a value from ``rank``.

        Raises:
            _Gone: the connection has ended, or the rank is missing.
        """
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._finish("recv", size, rank)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._finish("recv", data, rank)
        return pickle.loads(data.numpy().tobytes())

    def _finish(self, how: str, message: torch.Tensor, rank: int) -> None:
        place = self._groups[rank][1]  # no local variable: an error would keep the group and its connections open
        self._tags[rank] = tag = self._tags.get(rank, 0) + 1
        try:
            getattr(self._groups[rank][0], how)([message], place, tag).wait(SLOWEST)
        except RuntimeError as error:
            raise _Gone(f"waiting for rank {rank}, which is gone or does not come: {error}") from error


_alone = Ranks()
_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
