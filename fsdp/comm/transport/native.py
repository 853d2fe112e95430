"""The collectives of ``torch.distributed`` as a lane starts them, and the process group that carries them.

Functions are looked up in ``torch.distributed`` at each call, so that profilers, recorders and mocks that replace
them see the call. In a pass that begins while all of them are torch's own, the methods of the group are called instead:
checks of arguments in ``torch.distributed`` take 15 % of the host time of a unit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from fsdp.comm import threads
from fsdp.comm.groups import backend_of, control_device, group_ranks, is_registered, make_control_group, make_group
from fsdp.comm.threads import in_thread
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.comm.waiting.work import HostWork, TimedOut, Watch, Work

NEW_GROUP = "make a new process group (torch.distributed.new_group()), and wrap the model on that"

_REPLACEABLE = ALL_GATHER, REDUCE_SCATTER, "batch_isend_irecv", "all_reduce"
_ORIGINALS = [getattr(distributed_c10d, name) for name in _REPLACEABLE]
_TAG_BASE = 1 << 20  # separates our message tags from the tags of a user's own sends
_CLOSED = "connection closed", "connection reset", "timed out", "pair closure"  # in errors of gloo
_CPU = torch.device("cpu")


def are_replaced() -> bool:
    """Return whether a recorder, profiler or test has replaced the functions that gather, reduce and vote."""
    return [getattr(dist, name) for name in _REPLACEABLE] != _ORIGINALS


# The method of a group behind each function, and the class of its options. Older versions of torch differ.
_METHODS: dict[str, tuple[str, Any]] = {}
if hasattr(ProcessGroup, ALL_GATHER):
    _METHODS[ALL_GATHER] = ALL_GATHER, distributed_c10d.AllgatherOptions
    _METHODS[REDUCE_SCATTER] = REDUCE_SCATTER, distributed_c10d.ReduceScatterOptions
    _METHODS["all_reduce"] = "allreduce", distributed_c10d.AllreduceOptions


def method_of(name: str, group: ProcessGroup, *, asynchronous: bool, op: Any = None) -> tuple[str, Any]:
    """Return the method of ``group`` behind the function ``name``, and the options of a call; ("", None) if unknown."""
    if name not in _METHODS or not isinstance(group, ProcessGroup):
        return "", None
    method, kind = _METHODS[name]
    options = kind()
    options.asyncOp = asynchronous
    if op is not None:
        options.reduceOp = op
    return method, options


class Route(NamedTuple):
    """How one kind of collective is called: over a side group or the carrier, and by which method of the group.

    Attributes:
        blocks: whether the host waits although the tensors are on an accelerator, as with gloo.
    """

    beside: ProcessGroup | None
    ends_alone: bool
    blocks: bool
    method: str
    options: Any


class Carrier:
    """A process group that carries the collectives of one lane: the user's, or a later one over the same ranks.

    Once only some ranks have issued a collective, or the backend has closed the connections, the next carrier takes the
    place of this one. Works in flight here are abandoned then.

    Attributes:
        number: the number of carriers before this one.
        replacement: the group, if it is not the user's.
        closed: the message of the error of every later collective; empty if there is none.
        messages: the latest exchanges.
        routes: see :meth:`new_route`; by name, whether on the host, control, asynchronous, and operation.
    """

    def __init__(self, group: ProcessGroup, number: int = 0, replacement: ProcessGroup | None = None) -> None:
        """Take the user's ``group``."""
        self.number, self.replacement = number, replacement
        self.closed = ""
        self.routes: dict[tuple[str, bool, bool, bool, Any], Route] = {}
        self._users: Callable[[], Any] = weakref.ref(group)
        self._next: futures.Future[ProcessGroup] | None = None
        self._control: ProcessGroup | None = None
        self._backends: dict[str, str] = {}  # by type of device
        self.messages: deque[weakref.ref[HostWork]] = deque(maxlen=64)
        self._held: list[HostWork] = []  # exchanges in flight when a pass failed

    @property
    def group(self) -> Any:
        """The group that serves the devices of the user's group."""
        return self._users() if self.replacement is None else self.replacement

    @property
    def is_destroyed(self) -> bool:
        """Whether the program has destroyed the replacement, as by destroying all groups."""
        return self.replacement is not None and not is_registered(self.replacement)

    def new_route(self, key: tuple[str, bool, bool, bool, Any], device: torch.device) -> Route:
        """Find how a kind of collective is called here; see ``routes``."""
        name, _, control, asynchronous, op = key
        group = self._serving(device, control=control)
        backend = backend_of(group, device)
        ends_alone = backend == "fake" or (backend == "gloo" and name != REDUCE_SCATTER)
        beside = None if group is self.group else group  # the user's group is not kept alive here
        blocks = backend == "gloo" and device.type != "cpu"
        method = method_of(name, group, asynchronous=asynchronous or blocks, op=op)
        route = self.routes[key] = Route(beside, ends_alone, blocks, *method)
        return route

    def _serving(self, device: torch.device, *, control: bool) -> ProcessGroup:
        """Return the group for tensors on ``device``.

        A ``control`` message on CPU goes over a side group where the user's group serves accelerators only. The first
        such message makes the side group, on all ranks.
        """
        group = self.group
        if not control or device.type != "cpu" or backend_of(group, device) != "unknown":
            return group
        if control_device(group, torch.device("meta")).type != "cpu":  # no store to make one
            return group
        if self._control is None:
            self._control = make_control_group(group, device, self.number)
        return self._control

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend that serves ``device``."""
        found = self._backends.get(device.type)
        if found is None:
            found = self._backends[device.type] = backend_of(self.group, device)
        return found

    # -- the end -------------------------------------------------------------------------------------------------------

    def hold_messages(self) -> None:
        """Keep the messages in flight: gloo closes a connection when a message arrives whose memory is gone."""
        self._held += [work for work in (reference() for reference in self.messages) if work is not None]
        self.messages.clear()

    def finish_messages(self, watch: Watch) -> None:
        """Wait for the messages that were held: all ranks have issued the same."""
        for work in self._held:
            Work([work], watch, "finish messages", ends_alone=True).wait()
        self._held.clear()

    def note_error(self, error: Exception, timeout: float) -> str:
        """Note that gloo has closed the connections, as it does for good when a collective timed out.

        Returns words for the error message, or "" if ``error`` has a different cause.
        """
        says_so = isinstance(error, TimedOut) or any(words in str(error).lower() for words in _CLOSED)
        if not says_so or self.backend(_CPU) != "gloo":
            return ""
        why = (
            "the connections of this process group are closed, for a rank has failed, or came later than the group's "
            f"timeout ({timeout:.0f} s)"
        )
        self.closed = f"{why}: {NEW_GROUP}; or start again, and resume from the last checkpoint"
        return f". From now on {why}. The next forward or call of the model, on all ranks, makes new ones"

    def abort(self, words: str) -> None:
        """End the collectives in flight on this rank; later ones raise OutOfStep with these ``words``."""
        self.closed = words
        abort = getattr(self.group, "abort", None)
        if abort is not None:
            abort()

    def connect_next(self, look: Callable[[], None]) -> Carrier:
        """Connect a new group over the same ranks, which all call; return the next carrier.

        ``look`` is called while the ranks connect. A call after an interrupt continues.

        Raises:
            RuntimeError: the ranks cannot connect.
        """
        group, number = self._users(), self.number + 1
        self._next = self._next or in_thread(lambda: make_group([group_ranks(group)], group, f"after failure {number}"))
        while not futures.wait([self._next], threads.PATIENCE.total_seconds()).done:
            look()
        try:
            return Carrier(group, number, self._next.result())
        except (NotImplementedError, OSError, RuntimeError) as error:
            self._next = None
            why = f"the ranks were out of step, and cannot connect anew over the same ranks: {error}"
            raise RuntimeError(f"{why}. Therefore {NEW_GROUP}") from error


class Gather(NamedTuple):
    """One vector to gather.

    Attributes:
        full: receives the whole vector.
        shard: this rank's shard of it.
        cut: returns cached views of ``full`` by rank, for a number of ranks; optional.
    """

    full: torch.Tensor
    shard: torch.Tensor
    cut: Callable[[int], Sequence[torch.Tensor]] | None = None

    def pieces(self, ranks: int) -> Sequence[torch.Tensor]:
        """Return views of ``full`` by rank."""
        return self.full.view(ranks, self.shard.numel()).unbind() if self.cut is None else self.cut(ranks)


class Transfer(NamedTuple):
    """A message of an exchange: a tensor to send to, or to receive from, a rank of the group.

    Attributes:
        number: tag of the message, the same at both ends.
    """

    sent: bool
    rank: int
    tensor: torch.Tensor
    number: int


def start_transfers(transfers: Sequence[Transfer], group: ProcessGroup) -> list[Any]:
    """Start all ``transfers`` at once; return the handles to wait for."""
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
    return list(dist.batch_isend_irecv(operations)) if operations else []


def coalesces(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend makes one collective of several on the current stream."""
    if type(group) is not ProcessGroup:
        return False
    backend = group._get_backend(device)
    return bool(getattr(backend, "supports_coalescing", backend.name() == "nccl"))  # torch 2.6 does not say


def start_coalesced_gathers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: ProcessGroup) -> None:
    """Start one collective that gathers the second tensor of each pair into the first, as bytes."""
    with distributed_c10d._coalescing_manager(group):
        for full, shard in pairs:
            getattr(dist, ALL_GATHER)(full.view(torch.uint8), shard.view(torch.uint8), group=group)
