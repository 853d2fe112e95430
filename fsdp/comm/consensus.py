"""Agreement among ranks: an action succeeds on all ranks, or all of them raise the errors of the ranks that failed.

:class:`Agreement` has three calls: ``together`` runs an action on every rank, ``first`` on the first rank for all, and
``round`` has the first rank make one result of those of all ranks. There are two places for them:

* :class:`TrainingRanks`, in the groups and the thread of the training: one vote if all is well.
* :class:`Ranks`, next to the training, as for a checkpoint that is being written: round after round over a side group.

[Note: A group of its own]
A call next to the training must not get between the collectives of the training, which all ranks issue in one order. It
therefore uses gloo groups of its own, from one thread at a time, through the group objects: ``torch.distributed`` may
destroy the groups meanwhile, and the round still ends.

[Note: A tree of ranks]
In a round the values of ranks go up a tree to rank 0, joined on the way, and the answer goes down. Each child of a rank
stands for a range of the following ranks, so joined values are in rank order. A rank connects to its parent, its
siblings and its children only: a parent and its children are one gloo group. So a rank has few connections in a group
of any size. For the tables of a checkpoint of 80 layers on 1,024 ranks, rank 0 receives 0.5 MB in 8 messages, and the
longest path takes 0.2 s of processor time. Without the tree it would be 24 MB over 1,023 connections, and 2.1 s.

[Note: Meetings]
Each call begins with a meeting of all ranks at the store. A rank that waits there sees ranks whose process has ended,
and ranks in another call (:mod:`fsdp.comm.waiting.waits`). Within a call all ranks are present, and messages are
waited for to the end.

[Note: Spoiled groups]
A rank may leave a call in another way than by an agreed error: it is interrupted, or fails between two rounds. It then
ends the sequence of calls with the reason, and closes its connections. A rank that waits for it sees the connection
end, reads the reason, raises, and closes its own connections, until all ranks have the reason. The next call connects
anew, under the next generation. A call counts as two things of the sequence, so that an end after a call is one before
the next: a rank that has completed the call which another one left goes on without an error.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from concurrent import futures
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp.comm import threads
from fsdp.comm.collectives import agree, gather_values
from fsdp.comm.groups import default_group, group_ranks, group_store, group_timeout
from fsdp.comm.lane.history import hash_of
from fsdp.comm.lane.lane import Lane
from fsdp.comm.threads import in_thread, reported_if_long
from fsdp.comm.waiting.board import Board
from fsdp.comm.waiting.waits import BESIDE, REMEDY, Count, Sequence, Wait, ranks_as_text
from fsdp.comm.waiting.work import OutOfStep

SLOWEST = timedelta(days=1)  # how long a rank may take in a round; the end of a process is noticed at once
FAN_OUT = 8  # children of a rank in the tree

CPU = torch.device("cpu")

_T = TypeVar("_T")
_U = TypeVar("_U")
_Texts = Mapping[Any, Several[str]]  # by group


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
        kind, text = type(error).__name__, str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        return Failure(kind, None, text if isinstance(error, Exception) and text else f"{kind} {text}")

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
    for rank, failure in sorted(failures.items()):
        by_text.setdefault(failure.text, []).append(rank)
    each = [
        f"{'on all ranks' if len(ranks) == size else ranks_as_text(ranks)}: {text}" for text, ranks in by_text.items()
    ]
    return failures[min(failures)].as_error("; ".join(each))


class _Round(NamedTuple):
    """One exchange, as a rank takes part in it."""

    label: str
    failures: dict[int, Failure]  # of this rank
    texts: _Texts  # equal on all ranks of a group
    share: Any = None  # the value of this rank, if values are joined
    join: Callable[[list[Any]], Any] | None = None
    then: Callable[[Any], Any] | None = None  # runs on the first rank, on the joined values


class Agreement:
    """Ranks that agree. All of them make the same calls in the same order, each with the same ``label``.

    ``first`` and ``round`` raise as ``together`` does.

    Attributes:
        rank: this rank, in errors.
    """

    rank: int
    _reported: type[BaseException] = Exception  # errors of actions that other ranks are told

    def together(self, label: str, action: Callable[[], _T], same: Callable[[_T], _Texts] | None = None) -> _T:
        """Run ``action`` on every rank; each returns the local result.

        Args:
            same: gives texts for each group that have to be equal on all of its ranks. :class:`Ranks` compares those of
                None, which follow "is in the call with".

        Raises:
            Exception: on every rank, if ``action`` failed on any, or if texts differ.
            RuntimeError: a rank has ended, has left the call, or is in a different one.
        """
        result: _T = self._round(label, action, same=same)[0]
        return result

    def first(self, label: str, action: Callable[[], _T]) -> _T:
        """Run ``action`` on the rank that is first in every group; return the result on every rank."""
        result: _T = self._round(label, lambda: None, then=lambda _: action())[1]
        return result

    def round(
        self,
        label: str,
        mine: Callable[[], _T],
        then: Callable[[_T], _U],
        join: Callable[[list[_T]], _T],
    ) -> _U:
        """Run ``mine`` on every rank, and ``then`` on the first one; return the result of ``then`` on every rank.

        Args:
            then: takes the joined results of ``mine``.
            join: makes one result of a list of results, in rank order; called on several ranks.
        """
        result: _U = self._round(label, mine, join=join, then=then)[1]
        return result

    def _round(
        self,
        label: str,
        mine: Callable[[], Any],
        *,
        same: Callable[[Any], _Texts] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        then: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, Any]:
        """Return the results of ``mine`` and ``then``."""

        def run() -> tuple[Any, _Texts]:
            value = mine()
            return value, {} if same is None else same(value)

        self._announce()
        found, failures, error = self._try(run)
        value, texts = found or (None, {})
        share = None if join is None else value
        answer, failures, late = self._exchange(_Round(label, failures, texts, share, join, then))
        if failures:
            try:
                raise self._joint(failures, error or late)
            finally:
                del error, late  # which would keep this frame, and the frame them
        return value, answer

    def _try(self, action: Callable[[], _T]) -> tuple[_T | None, dict[int, Failure], BaseException | None]:
        """Run ``action``; return the result, or else the failure and the error."""
        try:
            return action(), {}, None
        except self._reported as error:
            return None, {self.rank: Failure.of(error)}, error

    def _announce(self) -> None:
        """Announce the call that communicates next."""

    def _exchange(self, what: _Round) -> tuple[Any, dict[int, Failure], BaseException | None]:
        """Exchange failures. If there are none, join the values, run ``then``, and send the answer to all ranks.

        Returns:
            the answer; or else the failures of all ranks, and the error of ``join`` or ``then`` if it was raised here.
        """
        raise NotImplementedError

    def _joint(self, failures: dict[int, Failure], own: BaseException | None) -> BaseException:
        """Return the error to raise for ``failures``, where ``own`` was raised on this rank."""
        raise NotImplementedError


# -- in the groups of the training -------------------------------------------------------------------------------------


class TrainingRanks(Agreement):
    """The ranks of several process groups, which agree in the groups and the thread of the training.

    A rank that has failed raises its own error.

    Attributes:
        groups: without duplicates.
    """

    _reported = BaseException  # interrupts as well: the other ranks would wait

    def __init__(
        self, groups: Several[ProcessGroup], device: torch.device, units: Collection[Any] = (), *, loads: bool = False
    ) -> None:
        """
        Args:
            groups: None stands for this rank alone.
            device: where the models compute.
            units: announced before each communication.
            loads: whether failures of other ranks are raised as ``NotLoaded``.
        """
        self.groups = [group for group in dict.fromkeys(groups) if group is not None]
        self.rank = dist.get_rank() if self.groups else 0
        self._device, self._units, self._loads = device, units, loads

    def _announce(self) -> None:
        for unit in self._units:
            unit.announce()

    def _joint(self, failures: dict[int, Failure], own: BaseException | None) -> BaseException:
        if own is not None:
            return own
        joint = joint_error(failures)
        return NotLoaded(f"Nothing was loaded, because of {joint}") if self._loads else joint

    def _exchange(self, what: _Round) -> tuple[Any, dict[int, Failure], BaseException | None]:
        self._announce()
        for group in [*self.groups, *self.groups[-2::-1]]:  # and back: the first group gets the errors of the last
            what.failures.update(self._failures_in(group, what))
        share, then = what.share, what.then
        if what.failures or then is None:
            return None, what.failures, None
        for group in self.groups:
            if what.join is not None:
                share = what.join(all_gather_object(share, group, what.label, self._device))

        def run() -> tuple[Any, bytes]:
            answer = then(share)
            return answer, _packed((answer, {}), what.label) if self.groups else b""

        is_first = all(group.rank() == 0 for group in self.groups)
        found, failures, error = self._try(run) if is_first else (None, {}, None)
        answer, packed = found or (None, pickle.dumps((None, failures)) if failures else b"")
        for group in self.groups:
            message = _padded(packed, group, what.label, self._device)
            agree(message, group, self._device, what.label)  # all ranks but one contribute zeros
            packed = message.numpy().tobytes()
        if not is_first:
            answer, failures = pickle.loads(packed)
        return answer, failures, error

    def _failures_in(self, group: ProcessGroup, what: _Round) -> dict[int, Failure]:
        """Return the failures of all ranks of ``group``; if there are none, ranks with other texts have failed."""
        texts = [*what.texts.get(group, ())]
        digest = hash_of("\n".join([what.label, *texts]))
        failed = len(what.failures)
        if group.size() == 1 or Lane.of(group, self._device).ask(what.label, digest, largest=failed).result() == 0:
            return {}
        said = all_gather_object((what.failures, texts), group, what.label, self._device)
        found = {rank: failure for theirs, _ in said for rank, failure in theirs.items()}
        if not found:
            first, *others = group_ranks(group)
            for rank, (_, theirs) in zip(others, said[1:]):
                if theirs != said[0][1]:
                    different = ", ".join(sorted({*theirs} ^ {*said[0][1]})) or "the order"
                    found[rank] = Failure("RuntimeError", None, f"it differs from rank {first} in {different}")
        return found


def all_gather_object(value: object, group: ProcessGroup, label: str, device: torch.device) -> list[Any]:
    """Return the ``value`` of every rank (anything that pickles), in rank order.

    ``device`` is where the models compute.

    Raises:
        OutOfStep: on every rank, if they do not have the same ``label``.
    """
    rows = gather_values(_padded(_packed(value, label), group, label, device), group, device, label)
    return [pickle.loads(row.numpy().tobytes()) for row in rows]


def _packed(value: object, label: str) -> bytes:
    """Pickle ``value``; raise TypeError if it does not pickle."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # the constructor of the class may raise
        words = f"what rank {dist.get_rank()} has cannot be sent to the other ranks"
        raise TypeError(f"{label}: {words}: {type(error).__name__}: {error}") from error


def _padded(data: bytes, group: ProcessGroup, label: str, device: torch.device) -> torch.Tensor:
    """Pad ``data``, a pickle, to the number of bytes of the longest of all ranks."""
    lane = Lane.of(group, device)
    nbytes = lane.ask(label, hash_of(label), largest=len(data)).result()
    if nbytes is None:
        raise lane.misunderstanding(f"is about to {label}")
    return torch.frombuffer(bytearray(data.ljust(nbytes or 1, b"\0")), dtype=torch.uint8)


class NotLoaded(RuntimeError):
    """No rank has loaded, because the state does not fit on some rank."""


def ranks_of(units: Collection[Any], groups: Several[ProcessGroup] | None = None) -> TrainingRanks:
    """Return the ranks of ``groups``. None: of all groups of the units, for a load; failures are ``NotLoaded``."""

    device = next((unit.device for unit in units), CPU)
    of_units = [group for unit in units for group in (unit.groups.shard, unit.groups.replica, unit.groups.tp)]
    return TrainingRanks(of_units if groups is None else groups, device, units, loads=groups is None)


# -- next to the training ----------------------------------------------------------------------------------------------


class _Gone(Exception):
    """The connection to a rank has ended."""


class _LeftBefore(Exception):
    """A rank has left an earlier call."""


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


class Ranks(Agreement):
    """The ranks of a process group, or this process alone, which communicate next to the training over a side group.

    All ranks raise the messages of all ranks that have failed, as an error of the type of the first. A rank whose
    process ends before the answer is there fails the next round, not this one.

    Attributes:
        size: the number of ranks.
        side: their connections; None for this process alone.
        underway: the latest call in the background. The next call waits for it.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Take ``group``; None for this process alone.

        Raises:
            RuntimeError: ``group`` has no store for the ranks.
        """
        self.rank = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.underway: futures.Future[Any] | None = None
        self.side = None if group is None else SideGroup(group)
        self._doing = self._place = ""  # the call, and the latest round in it, as text
        self._in_foreground = True  # whether the caller waits; else a thread of a save in the background
        self._agreed: list[BaseException] = []  # errors of this call that all ranks have raised

    @property
    def members(self) -> list[int]:
        """The global ranks, in order."""
        if self.side is None:
            return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
        return self.side.global_ranks

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
        self._doing = self._place = doing
        try:
            if self.side is not None and not resumed:
                self.side.join(doing)
            yield
        except BaseException as error:
            if self.side is not None and not any(error is agreed for agreed in self._agreed):
                self.side.spoil(f"rank {self.rank} left {self._place}: {Failure.of(error).text}")
            raise
        finally:
            self._agreed.clear()

    def _joint(self, failures: dict[int, Failure], own: BaseException | None) -> BaseException:
        if self.side is None and own is not None:
            return own
        joint = joint_error(failures, self.size)
        joint.__cause__ = own
        self._agreed.append(joint)
        return joint

    def _exchange(self, what: _Round) -> tuple[Any, dict[int, Failure], BaseException | None]:
        """Send the values up the tree, and the answer down. See [Note: A tree of ranks]."""
        self._place = f"{self._doing} ({what.label})"
        waits = f"in {self._place} for other ranks, which are in it as well"
        if self.side is None:
            return self._through_tree(what, None)
        try:
            with reported_if_long(self.rank, waits) if self._in_foreground else contextlib.nullcontext():
                return self._through_tree(what, self.side)
        except _Gone as gone:
            reason = self.side.reason_to_leave()
            self.side.spoil(f"rank {self.rank} left {self._place}: {gone}")
            raise RuntimeError(f"{self._place}: {reason or gone}") from gone

    def _through_tree(self, what: _Round, side: Any) -> tuple[Any, dict[int, Failure], BaseException | None]:
        parent, children = tree(self.rank, self.size)
        here = _, own = self._place, ", ".join(what.texts.get(None, ()))
        shares: list[Any] = [(what.share, what.failures, {here: self.rank})]
        shares += (side.receive(child[0]) for child in children)
        failures = {rank: failure for _, theirs, _ in shares for rank, failure in theirs.items()}
        places = {place: rank for _, _, theirs in reversed(shares) for place, rank in theirs.items()}
        then, join, value, answer, error = what.then, what.join, None, None, None
        if join is not None and not failures and len(places) == 1:
            values = [value for value, _, _ in shares]
            value, failures, error = self._try(lambda: join(values))
        if parent is not None:
            side.send(parent, (value, failures, places))
            answer, failures = side.receive(parent)
        elif not failures:
            places.pop(here)
            for (place, given), rank in places.items():
                call = f"it is in {place}, and rank 0 in {self._place}: the ranks do not make the same calls. {REMEDY}"
                text = f"it is in {self._doing} with {given}, and rank 0 with {own}: all ranks have to pass the same"
                failures[rank] = Failure("RuntimeError", None, text if place == self._place else call)
            if then is not None and not failures:
                answer, failures, error = self._try(lambda: then(value))
        for child in children:
            with contextlib.suppress(_Gone):  # the next round fails
                side.send(child[0], (answer, failures))
        return answer, failures, error


class SideGroup:
    """The connections of :class:`Ranks`; see [Note: A group of its own] and [Note: Spoiled groups]."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self._size, self._timeout = group.rank(), group.size(), group_timeout(group)
        store = group_store(group)
        if store is None:
            raise RuntimeError(f"the ranks of {group} cannot talk to each other: it is not a real process group")
        self._store, self._board = dist.PrefixStore("fsdp beside/", store), Board(group, "beside")
        self.global_ranks = group_ranks(group)
        self._groups: dict[int, tuple[Any, int]] = {}  # by connected rank: the group, and the place of the rank in it
        self._pairs: dict[tuple[int, int], Any] = {}  # groups of two connected ranks
        self._connected = -1  # the generation of these groups
        self._calls = Sequence(group, BESIDE, step=2)  # see [Note: Spoiled groups]
        self._tags: dict[int, int] = {}  # of the last message to or from each rank: separates late messages

    def join(self, doing: str) -> None:
        """Wait until all ranks have arrived at the call ``doing``, and connect if need be.

        Raises:
            OutOfStep: other ranks make other calls, or the process of one has ended.
            RuntimeError: not all ranks came, or one has left this call already.
        """
        self._calls.does(f"has called {doing}")
        while True:
            self._calls.note_end()
            with contextlib.suppress(_LeftBefore):
                return self._meet(self._calls.begin())

    def _meet(self, count: Count) -> None:
        """Wait for all ranks at this call, and connect if need be.

        Raises:
            _LeftBefore: a rank has left an earlier call, so that all ranks come to this one in the next generation.
        """
        wait = Wait(self._calls, count, self._calls.doing)

        def look() -> None:
            self._check()
            wait.look(self._timeout.total_seconds())

        try:
            self._board.meet(f"{count.generation}/{count.number}", look)
            self._check()
            if self._connected != count.generation:
                self._groups, self._pairs, self._tags = {}, {}, {}
                self._connect(wait.look)
                self._connected = count.generation
        finally:
            wait.over()

    def _check(self) -> None:
        if reason := self.reason_to_leave():
            raise OutOfStep(reason)
        if self._calls.has_ended:
            raise _LeftBefore

    def reason_to_leave(self) -> str:
        """Return why another rank has left this call; "" if none has."""
        self._calls.note_end()
        return self._calls.reason if self._calls.ended_here else ""

    def _connect(self, look: Callable[[], None]) -> None:
        """Connect the parent and the children of this rank as gloo groups; see [Note: A tree of ranks]."""
        parent, children = tree(self.rank, self._size)
        for head in (parent, self.rank if children else None):  # the parent's first: avoids a cycle of waits
            if head is None:
                continue
            members = [head, *(child[0] for child in tree(head, self._size)[1])]
            connected = self._connected_as(str(head), members, look)
            for at, rank in enumerate(members):
                if head in (self.rank, rank):
                    self._groups[rank] = connected.result(), at
            del connected  # an error would keep the group and its connections open

    def _connected_as(self, name: str, members: list[int], look: Callable[[], None]) -> futures.Future[Any]:
        """Return the future, which is done, of a gloo group of ``members``; ``name`` tells it from other groups."""
        # not new_group(): it takes all ranks of the default group, and keeps each group for ever
        prefixed = dist.PrefixStore(f"{self._calls.generation}/{name}/", self._store)
        place = prefixed, members.index(self.rank), len(members), self._timeout
        connected = in_thread(functools.partial(dist.ProcessGroupGloo, *place))  # not interrupted there
        while not futures.wait([connected], threads.PATIENCE.total_seconds()).done:
            look()
        if (error := connected.exception()) is not None:
            raise RuntimeError(f"the ranks cannot connect for {self._calls.doing}: {error}") from error
        return connected

    def connect_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of ranks, of which this rank is one, for :meth:`message`; both ranks call, inside a round."""
        for pair in sorted({*pairs} - {*self._pairs}):  # in one order on all ranks: avoids a cycle of waits
            wait = Wait(self._calls, self._calls.count, self._calls.doing)
            try:
                self._pairs[pair] = self._connected_as("{} to {}".format(*pair), [*pair], wait.look).result()
            finally:
                wait.over()

    def message(self, pair: tuple[int, int], data: torch.Tensor, tag: int, *, sends: bool) -> Any:
        """Begin to send, or to receive, bytes of the first rank of a connected pair for the second.

        Returns:
            the work, which keeps the connection open: drop it where an error ends the transfer, so that the other rank
            does not wait.
        """
        if sends:
            return self._pairs[pair].send([data], 1, tag)
        return self._pairs[pair].recv([data], 0, tag)

    def spoil(self, words: str) -> None:
        """Close the connections, and have the other ranks raise ``words``, or the reason that this rank has raised."""
        self._calls.end(words)
        self._groups, self._pairs, self._connected = {}, {}, -1

    def send(self, rank: int, value: object) -> None:
        """Send ``value`` to ``rank``; raise _Gone if the connection has ended."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._finish("send", torch.tensor([data.numel()], device="cpu"), rank)
        self._finish("send", data, rank)

    def receive(self, rank: int) -> Any:
        """Receive a value from ``rank``; raise _Gone if the connection has ended."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._finish("recv", size, rank)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._finish("recv", data, rank)
        return pickle.loads(data.numpy().tobytes())

    def _finish(self, how: str, message: torch.Tensor, rank: int) -> None:
        place = self._groups[rank][1]  # no local variable for the group, as in ``_connect``
        self._tags[rank] = tag = self._tags.get(rank, 0) + 1
        try:
            getattr(self._groups[rank][0], how)([message], place, tag).wait(SLOWEST)
        except RuntimeError as error:
            raise _Gone(f"waiting for rank {rank}, which is gone or does not come: {error}") from error


_alone = Ranks()
_known: weakref.WeakKeyDictionary[ProcessGroup, Ranks] = weakref.WeakKeyDictionary()
