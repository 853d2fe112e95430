"""Where collectives are issued, and written down, so that ranks which have parted can come together again.

Collectives of a group are matched by their order. A rank that fails, or is refused, in the middle of a pass has issued
fewer of them than others, whose last ones wait for it; whatever it issued next would be taken for those. So before
anything else it takes part in them, with memory that nobody reads: see :func:`catch_up`.
"""

from __future__ import annotations

import array
import contextlib
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp.comm.groups import backend_of, control_device, serving_group
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.comm.waiting import HostWork, Work, watcher

_KEPT = 64  # of the latest of each group: ranks that agree are never so far apart
_functions = operator.attrgetter(ALL_GATHER, REDUCE_SCATTER, "batch_isend_irecv", "all_reduce")
_TORCHS_OWN = _functions(distributed_c10d)
_OPERATIONS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_TAG_BASE = 1 << 20  # keeps our tags away from those of a user's own sends


class _Label(threading.local):  # a thread may be a rank
    text: str | None = None


_label = _Label()


def current_label() -> str | None:
    """What the collective is for that this thread is issuing ("gather blocks.3", ...); None outside. For recorders."""
    return _label.text


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """What is issued inside, on this thread, is for ``label``."""
    _label.text = label
    try:
        yield
    finally:
        _label.text = None


class Issued(NamedTuple):
    """One collective, or an exchange of messages; once it is :meth:`told`, in a form that JSON holds."""

    name: str  # of the function
    device: str  # the type of device that its tensors are on
    detail: Any = None  # the operation; the rank that all receive from; all pieces' sizes; what ``Transfer`` has
    dtype: Any = ""
    numels: Sequence[int] = ()  # of its tensors, where all ranks' are alike
    control: bool = False  # whether it went over the group that serves control messages

    def told(self) -> Issued:
        """The operation and the dtype by their names; the sizes as a list, which is what they come back as."""
        operation = str(self.detail).rpartition(".")[2] if isinstance(self.detail, _OPERATIONS) else self.detail
        return self._replace(detail=operation, dtype=str(self.dtype), numels=list(self.numels))


class _Ledger:
    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)  # each what ``Issued`` has
        self.messages: deque[weakref.ref[HostWork]] = deque(maxlen=_KEPT)  # the latest waits for messages
        self.held: set[HostWork] = set()  # those that a failure has left


_ledgers: dict[int, _Ledger] = {}  # by the id of the group


def _ledger_of(group: Any) -> _Ledger:
    ledger = _ledgers.get(id(group))
    if ledger is None:
        ledger = _ledgers[id(group)] = _Ledger()
        weakref.finalize(group, _ledgers.pop, id(group))
    return ledger


def _note(
    group: Any, name: str, device: str, detail: Any, dtype: Any = "", numels: Sequence[int] = (), control: bool = False
) -> _Ledger:
    """This rank is about to issue in ``group`` what these say of it; returns where that is written."""
    ledger = _ledgers.get(id(group)) or _ledger_of(group)
    ledger.count += 1
    ledger.latest.append((name, device, detail, dtype, numels, control))
    return ledger


def _options_of(kind: Any, **attributes: Any) -> Any:
    options = kind()
    for name, value in attributes.items():
        setattr(options, name, value)
    return options


# What some of torch's functions come down to, without what they ask about their arguments at each call: the group's
# method of that name, with such options.
_DIRECT: dict[Any, tuple[str, Any]] = {}
if hasattr(dist.ProcessGroup, ALL_GATHER):
    _DIRECT[getattr(distributed_c10d, ALL_GATHER)] = ALL_GATHER, distributed_c10d.AllgatherOptions
    _DIRECT[getattr(distributed_c10d, REDUCE_SCATTER)] = REDUCE_SCATTER, distributed_c10d.ReduceScatterOptions
    _DIRECT[distributed_c10d.all_reduce] = "allreduce", distributed_c10d.AllreduceOptions


class Issuer:
    """Issues a collective of a group, as often as it is called: each time with tensors of the same sizes, dtype and
    device as the first ``tensors``. What is the same at each call is asked once."""

    __slots__ = (
        "_asynchronous",
        "_direct",
        "_ends_alone",
        "_entry",
        "_further",
        "_group",
        "_label",
        "_ledger",
        "_name",
        "_on_host",
        "_options",
        "_serving",
        "_torchs",
        "device",
    )

    def __init__(
        self,
        name: str,
        tensors: Sequence[Any],
        group: Any,
        label: str,
        *,
        asynchronous: bool,
        control: bool = False,
        **options: Any,
    ) -> None:
        """Of ``torch.distributed``'s function of that name, over ``group``, or if it is a ``control`` message over what
        serves the group on its device. Where it is not ``asynchronous`` there is nothing to wait for. Behind two
        tensors come how much of them comes from, and goes to, each rank."""
        first, pieces = tensors[0], tensors[2:]
        numels = () if pieces else tuple(tensor.numel() for tensor in tensors)
        detail = pieces or options.get("op") or options.get("src")
        self._name, self._group, self._label, self._asynchronous = name, group, label, asynchronous
        self.device, self._options, self._ledger = first.device, options, _ledger_of(group)
        self._entry = name, first.device.type, detail, first.dtype, numels, control
        self._on_host = first.device.type == "cpu"
        self._serving: Any = None if control else group  # a group that serves control messages is made when it is used
        self._ends_alone: bool | None = None  # which does not change once it has served
        self._torchs: Any = None  # torch's function, where ``_direct`` does the same if it is called with ``_further``
        self._direct: Any = None
        self._further: Any = None

    def _settle(self) -> None:
        """Before the first call."""
        if self._serving is None:
            self._serving = serving_group(self._group, self.device)
        torchs = getattr(distributed_c10d, self._name)
        if torchs in _DIRECT and isinstance(self._serving, dist.ProcessGroup):
            method, kind = _DIRECT[torchs]
            self._torchs, self._direct = torchs, getattr(self._serving, method)
            operation = {"reduceOp": self._options["op"]} if "op" in self._options else {}
            self._further = _options_of(kind, asyncOp=self._asynchronous, **operation)

    def __call__(self, first: Any, second: Any = None, *pieces: Any) -> Work:
        if watcher.any_broken:
            watcher.check(self._group)
        ledger = self._ledger
        ledger.count += 1
        ledger.latest.append(self._entry)
        settles = self._ends_alone is None
        if settles:
            self._settle()
        function = getattr(dist, self._name)
        _label.text = self._label
        try:
            if function is not self._torchs:  # looked up at each call: others may have been put in their place
                tensors = (first,) if second is None else (first, second)
                options = {"group": self._serving, "async_op": self._asynchronous, **self._options}
                work = function(*tensors, *pieces, **options)
            elif second is not None:
                work = self._direct(first, second, self._further)
            else:
                work = self._direct([first], self._further)
        except RuntimeError as error:
            _raise_if_closed(error, self._group, self._label)
            raise
        finally:
            _label.text = None
        if settles:
            backend = backend_of(self._serving, self.device)
            self._ends_alone = backend == "fake" or (backend == "gloo" and self._name != REDUCE_SCATTER)
        if work is not None and not self._asynchronous:
            work.wait()  # unless the backend has
            work = None
        return Work(() if work is None else (work,), self._group, self._label, self._on_host, self._ends_alone is True)


def _raise_if_closed(error: RuntimeError, group: Any, label: str) -> None:
    """
    Raises:
        RuntimeError: a collective could not be issued since the connections of ``group`` are closed.
    """
    if closed := watcher.closed(group, error):
        raise RuntimeError(f"{label}: {error}{closed}") from error


def issue_vote(
    numbers: Sequence[int], group: Any, device: torch.device, label: str, issuers: dict[str, Issuer]
) -> tuple[torch.Tensor, Work]:
    """Start replacing each of the ``numbers`` by the largest of all ranks; returns where they are. ``device`` is where
    the ranks' models compute, and ``issuers`` are those of ``group``'s votes so far, by label."""
    votes = torch.frombuffer(array.array("q", numbers), dtype=torch.int64)
    issuer = issuers.get(label)
    if issuer is None:
        on = votes.to(control_device(group, device))
        options: dict[str, Any] = {"asynchronous": True, "control": True, "op": dist.ReduceOp.MAX}
        issuer = issuers[label] = Issuer("all_reduce", [on], group, label, **options)
    votes = votes.to(issuer.device)
    return votes, issuer(votes)


def issue(
    name: str, *tensors: Any, group: Any, label: str, asynchronous: bool, control: bool = False, **options: Any
) -> Work:
    """What an :class:`Issuer` of these issues once."""
    return Issuer(name, tensors, group, label, asynchronous=asynchronous, control=control, **options)(*tensors)


def issue_gathers(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: Any, label: str, *, asynchronous: bool
) -> Work:
    """Gather every rank's second tensor of each pair into the first: in one collective, of bytes, where the backend
    makes one of several on the current stream; else in one after the other."""
    device = pairs[0][0].device
    if asynchronous or not _coalesces(group, device):
        works = [issue(ALL_GATHER, *pair, group=group, label=label, asynchronous=asynchronous) for pair in pairs]
        return Work.of(works)
    watcher.check(group)
    in_bytes = [[tensor.view(torch.uint8) for tensor in pair] for pair in pairs]
    numels = [tensor.numel() for pair in in_bytes for tensor in pair]
    _note(group, ALL_GATHER, device.type, None, torch.uint8, numels)
    with labelled(label), distributed_c10d._coalescing_manager(group):
        for full, shard in in_bytes:
            getattr(dist, ALL_GATHER)(full, shard, group=group)
    return Work((), group, label, device.type == "cpu")


def _coalesces(group: Any, device: torch.device) -> bool:
    return type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing


def issue_in_memory(starts: Iterable[Callable[[], HostWork]], device: torch.device, group: Any, label: str) -> Work:
    """What ``starts`` do in memory that the ranks of ``group`` share. It is not written down: nobody waits for it once
    all have met."""
    works = []
    _label.text = label
    try:
        for start in starts:
            works.append(start())
    finally:
        _label.text = None
    return Work(works, group, label, device.type == "cpu", ends_alone=True)


def are_torchs_own() -> bool:
    """Whether a gather, a reduction and a question would call ``torch.distributed``'s functions, and nobody has put
    others in their place to see them: a recorder, a profiler, a test."""
    return bool(_functions(dist) == _TORCHS_OWN)


class Gather(NamedTuple):
    """Of what is gathered: all of a vector, and this rank's shard of it; and who knows the vector's pieces by rank, of
    so many ranks, where somebody has them from before."""

    full: torch.Tensor
    shard: torch.Tensor
    cut: Callable[[int], Sequence[torch.Tensor]] | None = None

    def pieces(self, ranks: int) -> Sequence[torch.Tensor]:
        """``full``, by rank."""
        return self.full.view(ranks, self.shard.numel()).unbind() if self.cut is None else self.cut(ranks)


class Transfer(NamedTuple):
    """A tensor to send to, or to receive from, a rank of a group; ``number`` is the same at both ends."""

    sent: bool
    rank: int
    tensor: torch.Tensor
    number: int


def issue_transfers(transfers: Sequence[Transfer], group: Any, label: str, device: torch.device) -> Work:
    """Start sending and receiving them, all at once, from and to memory on ``device``."""
    operations = [
        dist.P2POp(
            dist.isend if transfer.sent else dist.irecv,
            transfer.tensor,
            dist.get_global_rank(group, transfer.rank),
            group,
            _TAG_BASE + transfer.number,
        )
        for transfer in transfers
    ]
    detail = [(sent, rank, tensor.numel(), str(tensor.dtype), number) for sent, rank, tensor, number in transfers]
    watcher.check(group)
    ledger = _note(group, "messages", device.type, detail)
    with labelled(label):
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            _raise_if_closed(error, group, label)
            raise
    work = Work(works, group, label, device.type == "cpu")
    ledger.messages.extend(weakref.ref(each) for each in work.on_host)
    return work


# -- ranks that have parted --------------------------------------------------------------------------------------------


def hold(group: Any) -> None:
    """Messages of ``group`` that this rank waits for no more, as a pass has failed, are under way until the ranks have
    caught up: gloo closes the connection where one comes for which nobody has kept memory."""
    ledger = _ledger_of(group)
    ledger.held.update(work for work in (reference() for reference in ledger.messages) if work is not None)


def issued_in(group: Any) -> int:
    """How many collectives this rank has issued."""
    return _ledger_of(group).count


def latest_issued(group: Any) -> list[Any]:
    """How many collectives this rank has issued, and the latest of them: for the others."""
    return [issued_in(group), [Issued(*what).told() for what in _ledger_of(group).latest]]


def catch_up(group: Any, device: torch.device, by_rank: Mapping[int, list[Any]]) -> None:
    """Issue what other ranks of ``group`` have issued and this one has not, and wait for it.

    Args:
        device: where the ranks' models compute.
        by_rank: the ``latest_issued`` of each rank.

    Raises:
        RuntimeError: the ranks have issued different things, or one is too far behind.
    """
    rank, under_way = group.rank(), []
    count = by_rank[rank][0]
    own = _by_number(by_rank[rank])
    theirs = {other: _by_number(said) for other, said in by_rank.items() if other != rank}
    for other, issued in theirs.items():
        for number in issued.keys() & own.keys():
            here, there = own[number], issued[number]
            if (here.name, here.numels) != (there.name, there.numels) or (here.dtype != there.dtype and here.numels):
                raise RuntimeError(
                    f"rank {other} has issued {there.name} where rank {rank} has issued {here.name}: the ranks of this "
                    "process group cannot go on together. Make a new one, and wrap the model on that"
                )
    for number in range(count, max(said[0] for said in by_rank.values())):
        ahead = {other: issued.get(number) for other, issued in theirs.items() if by_rank[other][0] > number}
        found = {other: issued for other, issued in ahead.items() if issued is not None}
        if len(found) < len(ahead):
            raise RuntimeError(f"rank {rank} is too far behind the others to catch up with them: start anew")
        what = next(iter(found.values()))
        where = torch.device("cpu") if what.device == "cpu" else device
        under_way.append(_issue_again(found, group, where, f"catch up with {what.name}"))
    held = _ledger_of(group).held
    on_host = device.type == "cpu"
    for work in [*under_way, *(Work([e], group, "catch up", on_host, ends_alone=True) for e in held)]:
        work.wait()
    held.clear()


def _by_number(said: list[Any]) -> dict[int, Issued]:
    count, latest = said
    return dict(zip(range(count - len(latest), count), (Issued(*issued) for issued in latest)))


def _issue_again(ahead: Mapping[int, Issued], group: Any, where: torch.device, label: str) -> Work:
    """What the ranks ``ahead`` have issued, with memory of its own."""
    what = next(iter(ahead.values()))
    if what.name == "messages":  # what they expect of this rank, and what they send to it
        transfers = [
            Transfer(not sent, other, torch.zeros(numel, dtype=_dtype(dtype), device=where), number)
            for other, issued in ahead.items()
            for sent, rank, numel, dtype, number in issued.detail
            if rank == group.rank()
        ]
        return issue_transfers(transfers, group, label, where)
    options: dict[str, Any] = {"asynchronous": True, "control": what.control}
    numels, pieces = what.numels, list[list[int]]()
    if what.name in (REDUCE_SCATTER, "all_reduce"):
        options["op"] = getattr(dist.ReduceOp, what.detail)
    elif what.name == "broadcast":
        options["src"] = what.detail
    elif what.name == "all_to_all_single":  # among ranks that are behind nothing is sent
        expected = [ahead[other].detail if other in ahead else None for other in range(group.size())]
        pieces = [[each[way][group.rank()] if each else 0 for each in expected] for way in (1, 0)]
        numels = [sum(each) for each in pieces]
    tensors = [torch.zeros(numel, dtype=_dtype(what.dtype), device=where) for numel in numels]
    if what.name == ALL_GATHER and len(tensors) > 2:
        return issue_gathers(list(zip(tensors[::2], tensors[1::2])), group, label, asynchronous=False)
    return issue(what.name, *tensors, *pieces, group=group, label=label, **options)


def _dtype(words: str) -> torch.dtype:
    found = getattr(torch, words.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
