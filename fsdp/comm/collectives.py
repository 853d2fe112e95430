"""How gathered and reduced bytes move: the groups, and the algorithm for each backend and size.

This is the only file that calls ``torch.distributed``'s collectives. They are called as attributes of
``torch.distributed`` at call time, so whoever replaces them (profilers, recorders) sees every call.

[Note: Direct exchange]
On gloo the native all-gather and reduce-scatter move large messages several times slower than the links allow. There
every rank sends each peer its piece and receives the peers' pieces, all at once, with a tag of (unit, bucket, pass):
messages of different sizes that meet under one tag abort the process, tagged ones match or time out. A reduction sums
the received pieces in rank order 0..N-1, low precision in float32, so its result does not depend on timing. For small
messages the native calls win. ``FSDP_COLLECTIVES=native|direct|auto`` overrides the choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp.comm.streams import Event, Streams, default_device
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER

DIRECT_MIN_NBYTES = 1 << 20  # messages below this go native even on gloo
_TAG_BASE = 1 << 20  # keeps our tags away from those of a user's own sends

# What the collective being issued is for ("gather blocks.3", ...), or None; recorders read it.
current_label: str | None = None


class Tag(NamedTuple):
    """Whom a message is for: words for people, a number that both ends of a message agree on."""

    label: str
    number: int


@dataclass(frozen=True)
class Groups:
    """The ranks a unit is sharded over and the ranks it is replicated over. A group of one rank has no process group.

    Sharding strategies are facts of this class: a shard group of one rank means the parameters are not sharded, a
    replica group of several that gradients are reduced across replicas.
    """

    shard: Any | None
    shard_rank: int
    shard_size: int
    replica: Any | None
    replica_rank: int
    replica_size: int
    forced: bool = False  # communicate and keep separate buffers even in a shard group of one rank

    @property
    def sharded(self) -> bool:
        return self.shard_size > 1 or self.forced

    @property
    def data_parallel_size(self) -> int:
        return self.shard_size * self.replica_size

    @property
    def reduces(self) -> bool:
        """Whether a gradient has to be communicated at all."""
        return self.sharded or self.replica_size > 1

    @staticmethod
    def of(process_group: Any, *, replicate: bool) -> Groups:
        """One group that the parameters are sharded over, or with ``replicate`` replicated over.

        Asks the group for ``rank()`` and ``size()`` only.
        """
        rank, size = process_group.rank(), process_group.size()
        if replicate:
            return Groups(None, 0, 1, process_group if size > 1 else None, rank, size)
        forced = os.environ.get("FSDP_FORCE_SHARDED", "0") == "1"
        return Groups(process_group, rank, size, None, 0, 1, forced)


def default_group() -> Any:
    """The default process group; RuntimeError with the remedy where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group, and torch.distributed's default one does not exist: call "
            "torch.distributed.init_process_group() first (under torchrun without arguments), or pass process_group="
        )
    return dist.group.WORLD


class Pending:
    """A collective under way. ``wait()`` once, before its result is used: on CPU the host waits, else the current
    stream."""

    __slots__ = ("_event", "_finish", "_label", "_streams", "_works")

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], None] | None, event: Event, streams: Streams, label: str
    ) -> None:
        self._works, self._finish, self._event, self._streams, self._label = works, finish, event, streams, label

    def wait(self) -> None:
        works, self._works = self._works, ()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self._label}: the collective failed or timed out: {error}") from error
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        event, self._event = self._event, None
        self._streams.wait(event)


class Communicator:
    """Gathers and reduces one unit's flat vectors over its groups; the algorithm is chosen at first use."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self.groups = groups
        self.streams = streams
        self._direct_min: float | None = None  # messages of so many bytes go direct

    # -- the two collectives -------------------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Pending:
        """Start filling ``full`` (shard_size * n elements) with every rank's ``shard`` (n), in rank order.

        Runs on the current stream; neither tensor may be touched before ``wait()``.
        """
        if self._goes_direct(full):
            works, finish = self._direct_gather(full, shard, tag), None
        else:
            works, finish = self._issue(tag, ALL_GATHER, _wire(full), _wire(shard), group=self.groups.shard), None
        return Pending(works, finish, self.streams.record(), self.streams, tag.label)

    def reduce(self, out: torch.Tensor, full: torch.Tensor, tag: Tag) -> Pending:
        """Start writing this rank's piece of the mean of every rank's ``full`` into ``out``. ``full`` is used up.

        Sharded: ``out`` has ``full.numel() / shard_size`` elements. Not sharded: ``out`` is ``full``.
        Runs on the current stream; neither tensor may be touched before ``wait()``.
        """
        groups = self.groups
        op, before, after = self._averaging(full.dtype)
        if before != 1:
            full.div_(before)
        finish: Callable[[], None] | None = None
        if not groups.sharded:
            works = self._issue(tag, "all_reduce", _wire(full), op=op, group=groups.replica)
        elif self._goes_direct(full):
            works, finish = self._direct_reduce(out, full, tag)
        else:
            works = self._issue(tag, REDUCE_SCATTER, _wire(out), _wire(full), op=op, group=groups.shard)

        def complete() -> None:
            if finish is not None:
                finish()
            if after != 1:
                out.div_(after)

        if self.streams.asynchronous_work:
            return Pending(works, complete, None, self.streams, tag.label)
        complete()
        return Pending((), None, self.streams.record(), self.streams, tag.label)

    def maximum(self, values: torch.Tensor, label: str) -> None:
        """Replace ``values`` (int64, on CPU) by the largest of all ranks, element by element. The host waits."""
        for group in (self.groups.shard, self.groups.replica):
            if group is not None and group.size() > 1:
                agree(values, group, label)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _averaging(self, dtype: torch.dtype) -> tuple[Any, float, float]:
        """(operation, divisor of the full gradient, divisor of the result).

        Averaging belongs into the collective or into the small result. float16 alone is divided before as well, by
        about the root of the total, because the sum of many ranks' gradients overflows it.
        """
        size = self.groups.data_parallel_size
        if dtype == torch.float16:
            before = 1
            while size % before == 0 and size / before > before:
                before *= 2
            return dist.ReduceOp.SUM, float(before), size / before
        group = self.groups.shard if self.groups.sharded else self.groups.replica
        if size > 1 and dtype.is_floating_point and _backend(group) == "nccl":
            return dist.ReduceOp.AVG, 1.0, 1.0
        return dist.ReduceOp.SUM, 1.0, float(size)

    def _issue(self, tag: Tag, name: str, *tensors: torch.Tensor, **options: Any) -> Sequence[Any]:
        global current_label
        current_label = tag.label
        try:
            work = getattr(dist, name)(*tensors, async_op=self.streams.asynchronous_work, **options)
        finally:
            current_label = None
        return (work,) if work is not None else ()

    def _goes_direct(self, full: torch.Tensor) -> bool:
        if self._direct_min is None:
            self._direct_min = _direct_threshold(self.groups.shard) if self.streams.asynchronous_work else float("inf")
        return full.numel() * full.element_size() >= self._direct_min and self.groups.shard_size > 1

    def _exchange(self, tag: Tag, sends: list[torch.Tensor], receives: list[torch.Tensor]) -> Sequence[Any]:
        """Send ``sends[i]`` to and receive ``receives[i]`` from each other rank i, all at once."""
        global current_label
        group: Any = self.groups.shard
        rank = self.groups.shard_rank
        number = _TAG_BASE + tag.number
        operations = []
        for distance in range(1, self.groups.shard_size):  # each rank starts with another peer
            to, source = (rank + distance) % self.groups.shard_size, (rank - distance) % self.groups.shard_size
            operations.append(dist.P2POp(dist.isend, sends[to], dist.get_global_rank(group, to), group, number))
            operations.append(
                dist.P2POp(dist.irecv, receives[source], dist.get_global_rank(group, source), group, number)
            )
        current_label = tag.label
        try:
            return dist.batch_isend_irecv(operations)
        finally:
            current_label = None

    def _direct_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Sequence[Any]:
        pieces = list(_wire(full).view(self.groups.shard_size, -1).unbind())
        source = _wire(shard)
        pieces[self.groups.shard_rank].copy_(source)
        return self._exchange(tag, [source] * self.groups.shard_size, pieces)

    def _direct_reduce(
        self, out: torch.Tensor, full: torch.Tensor, tag: Tag
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        rank = self.groups.shard_rank
        pieces = list(full.view(self.groups.shard_size, -1).unbind())
        staging = full.new_empty(self.groups.shard_size - 1, out.numel())
        received = list(staging.unbind())
        received.insert(rank, pieces[rank])
        works = self._exchange(tag, [_wire(piece) for piece in pieces], [_wire(piece) for piece in received])

        def sum_in_rank_order() -> None:
            wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
            total = out if wide == out.dtype else torch.empty_like(out, dtype=wide)
            total.copy_(received[0])
            for piece in received[1:]:
                total.add_(piece)
            if total is not out:
                out.copy_(total)

        return works, sum_in_rank_order


def agree(values: torch.Tensor, group: Any, label: str) -> None:
    """Replace ``values`` (int64, on CPU) by the largest of ``group``'s ranks, element by element. The host waits."""
    global current_label
    on_device = values.to(control_device(group))
    current_label = label
    try:
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
    finally:
        current_label = None
    values.copy_(on_device)


def control_device(group: Any) -> torch.device:
    """Where ``group`` takes small control messages: on CPU if its backend can, else on the accelerator."""
    return default_device() if _backend(group) in ("nccl", "xccl", "hccl") else torch.device("cpu")


def broadcast(tensors: list[torch.Tensor], group: Any) -> None:
    """Overwrite ``tensors`` with what rank 0 of ``group`` has in them, in messages of up to 250 MB. The host waits."""
    if group.size() == 1:
        return
    limit = 250 << 20
    source = dist.get_global_rank(group, 0)
    batches: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for tensor in tensors:
        several = batches.setdefault((tensor.dtype, tensor.device), [[]])
        if sum(other.nbytes for other in several[-1]) + tensor.nbytes > limit and several[-1]:
            several.append([])
        several[-1].append(tensor)
    with torch.no_grad():
        for batch in (batch for several in batches.values() for batch in several):
            message = torch.cat([tensor.reshape(-1) for tensor in batch])
            dist.broadcast(_wire(message), src=source, group=group)
            for tensor, part in zip(batch, message.split([tensor.numel() for tensor in batch])):
                tensor.copy_(part.view(tensor.shape))


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the backends know it: complex numbers travel as pairs."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _backend(group: Any) -> str:
    """The group's backend name; a stand-in that torch.distributed does not know is none of ours."""
    try:
        return str(dist.get_backend(group))
    except (ValueError, TypeError, KeyError):
        return "unknown"


def _debug_detail() -> bool:
    """Whether torch's debug level is DETAIL, now (it can change): then torch checks each collective it knows."""
    level: Any = dist.get_debug_level()
    return bool(level == dist.DebugLevel.DETAIL)


def _direct_threshold(group: Any) -> float:
    """From how many bytes on the direct exchange is used in ``group``."""
    choice = os.environ.get("FSDP_COLLECTIVES", "auto")
    if choice not in ("auto", "native", "direct"):
        raise ValueError(f"FSDP_COLLECTIVES is {choice!r}; it may be auto, native or direct")
    if choice == "native" or _backend(group) != "gloo" or _debug_detail():
        return float("inf")
    return 0 if choice == "direct" else DIRECT_MIN_NBYTES
