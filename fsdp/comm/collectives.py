"""Gathers and reductions of flat vectors: the algorithm for each backend and message size.

[Note: Direct exchange]
The all-gather and reduce-scatter of gloo move large messages several times slower than the links allow. There every
rank sends each peer its piece and receives the pieces of the peers, all at once. Each message has the tag of its event:
messages of different sizes under one tag abort the process, tagged messages match or time out. A reduction
sums the received pieces in rank order 0..N-1, low precision in float32, so the result does not depend on timing. For
small messages the native calls are faster.

If all ranks of such a group are on one host, they communicate through memory that they share
(:mod:`fsdp.comm.transport.shared_memory`). ``FSDP_COLLECTIVES`` overrides the choice: ``native``, ``direct``, or
``shared``. The last one raises an error if the ranks cannot share memory, where ``auto`` uses another transport.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS as LOW_PRECISION_HOOKS
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp.comm.groups import Groups, backend_of, control_device
from fsdp.comm.lane.issuing import Event as Event
from fsdp.comm.lane.issuing import current_label as current_label
from fsdp.comm.lane.lane import Lane
from fsdp.comm.streams import Streams, streams_for
from fsdp.comm.transport.channel import PARTS, Channel
from fsdp.comm.transport.native import Gather as Gather
from fsdp.comm.transport.native import Transfer as Transfer
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.comm.waiting.work import OutOfStep as OutOfStep
from fsdp.comm.waiting.work import Work as Work
from fsdp.environment import COLLECTIVES

DIRECT_MIN_NBYTES = 1 << 20  # smaller messages go native even on gloo
_NEVER = math.inf
_NATIVE_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NATIVE_DTYPES |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}


class Communicator:
    """Gathers and reduces the flat vectors of one unit over its groups. The algorithm is chosen at first use.

    Attributes:
        divisor: divides the sum over all ranks; None: the number of ranks.
        sums_only: reductions never average in the collective, but divide before or after it.
        is_chosen: whether the algorithm is chosen.
    """

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self.groups = groups
        self.streams, self._on_host = streams, streams.asynchronous_work
        self.divisor: float | None = None
        self.sums_only = False
        self.is_chosen = not groups.sharded
        self._shard_lane: Lane | None = None
        self._replica_lane: Lane | None = None
        self._direct_min = _NEVER  # messages of so many bytes go direct
        self._shares_memory = False

    def divide_by(self, divisor: float | None, *, sums_only: bool) -> None:
        """Set the divisor of reductions, and whether the collectives must be plain sums."""
        self.divisor, self.sums_only = divisor, sums_only

    def choose(self, device: torch.device) -> Lane:
        """Choose the algorithm of a sharded unit for tensors on ``device``; return the lane of the shard group. All
        ranks have to call.

        Raises:
            RuntimeError: a rank is late, or the ranks do not support the value of ``FSDP_COLLECTIVES``.
        """
        lane = Lane.of(self.groups.shard, device)
        if self._on_host and self.groups.shard_size > 1:
            self._shares_memory = shared_channel(lane, device) is not None
            self._direct_min = direct_threshold(self.groups.shard, device)
        self._shard_lane, self.is_chosen = lane, True
        return lane

    # -- the two collectives -------------------------------------------------------------------------------------------

    def gather(self, parts: Sequence[Gather], event: Event) -> Work:
        """Start filling each ``full`` of ``parts`` (shard_size * n elements) with every rank's ``shard`` (n elements).

        Runs on the current stream as one collective; no tensor may be touched before ``wait()``. Afterwards peers
        may still read a ``full``, so it must not be written unless it was allocated for this gather alone. The numbers
        from that of the ``event`` on are those of the parts.
        """
        if not self.groups.sharded:
            for part in parts:
                part.full.copy_(part.shard)
            return Work.done(self.streams)
        lane = self._shard_lane or self.choose(parts[0].full.device)
        channel = lane.memory() if self._shares_memory else None
        if channel is not None:
            starts = []
            for i in range(0, len(parts), PARTS):
                arguments = parts[i : i + PARTS], event.label, event.number + i
                starts.append(functools.partial(channel.gather, *arguments))
            work = lane.in_memory(event, starts)
        elif self._direct_min < _NEVER and sum(part.full.nbytes for part in parts) >= self._direct_min:
            work = self._direct_gather(lane, parts, event)
        elif len(parts) == 1:
            full, shard, _ = parts[0]
            if full.dtype not in _NATIVE_DTYPES:
                full, shard = _wire(full), _wire(shard)
            work = lane.collective(ALL_GATHER, event, full, shard, asynchronous=self._on_host)
        else:
            pairs = [(_wire(full), _wire(shard)) for full, shard, _ in parts]
            work = lane.gather(pairs, event, asynchronous=self._on_host)
        return work if self._on_host else work.on(self.streams)

    def reduce(self, out: torch.Tensor, full: torch.Tensor, event: Event, *, to_write: bool = False) -> Work:
        """Start writing this rank's piece of the mean of every rank's ``full`` into ``out``.

        With ``divisor`` it is the sum, divided by that. If sharded, ``out`` has ``full.numel() / shard_size`` elements
        and the mean is over the shard group; with replicas ``average`` follows. Otherwise ``out`` is ``full``, and
        is averaged. Runs on the current stream. Neither tensor may be touched before ``wait()``; the content of
        ``full`` is lost.

        ``to_write``: whether ``full`` will be written after ``wait()``, which so waits for all readers.
        """
        if not self.groups.sharded:
            return self.average(full, event)
        lane = self._shard_lane or self.choose(full.device)
        op, before, after = _averaging(lane, self.groups.shard_size, full, self.divisor, sums_only=self.sums_only)
        if before != 1:
            full.div_(before)
        channel = lane.memory() if self._shares_memory else None
        if channel is not None:
            add_up = functools.partial(sum_in_rank_order, divisor=after)
            arguments = out, full, event.label, event.number, add_up
            return lane.in_memory(event, [functools.partial(channel.reduce, *arguments, until_read=to_write)])
        if full.nbytes >= self._direct_min:
            return self._direct_reduce(lane, out, full, event, after)
        if not self._on_host and lane.carrier.backend(full.device) == "gloo":
            # gloo makes an all-reduce of this reduce-scatter, with a handle that cannot be waited for in steps
            work = lane.collective("all_reduce", event, full, asynchronous=False)
            out.copy_(full.view(self.groups.shard_size, -1)[self.groups.shard_rank])
            return self._divided(work, out, after)
        sent, received = (full, out) if full.dtype in _NATIVE_DTYPES else (_wire(full), _wire(out))
        work = lane.collective(REDUCE_SCATTER, event, received, sent, asynchronous=self._on_host, op=op)
        return self._divided(work, out, after)

    def average(self, values: torch.Tensor, event: Event) -> Work:
        """Start replacing ``values`` by the mean over the replicas.

        Runs on the current stream; ``values`` may not be touched before ``wait()``.
        """
        group, divisor = self.groups.replica, self.divisor
        if divisor is not None and self.groups.sharded:
            divisor = 1.0  # ``reduce`` has divided
        if group is None:  # a single replica
            if divisor is not None and divisor != 1:
                values.div_(divisor)
            return Work.done(self.streams)
        lane = self._replica_lane = self._replica_lane or Lane.of(group, values.device)
        op, before, after = _averaging(lane, self.groups.replica_size, values, divisor, sums_only=self.sums_only)
        if before != 1:
            values.div_(before)
        sent = values if values.dtype in _NATIVE_DTYPES else _wire(values)
        work = lane.collective("all_reduce", event, sent, asynchronous=self._on_host, op=op)
        return self._divided(work, values, after)

    def _divided(self, work: Work, out: torch.Tensor, divisor: float) -> Work:
        """Divide ``out``, the result of ``work``, by ``divisor``."""
        if divisor != 1 and self._on_host:
            work.then(functools.partial(out.div_, divisor))
        elif divisor != 1:
            out.div_(divisor)
        return work.on(self.streams)

    # -- the direct exchange -------------------------------------------------------------------------------------------

    def _exchange(
        self, lane: Lane, event: Event, several: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]
    ) -> Work:
        """Send ``sends[i]`` to, and receive ``receives[i]`` from, each peer i, for each (sends, receives)."""
        rank, size = self.groups.shard_rank, self.groups.shard_size
        transfers = []
        for distance in range(1, size):  # each rank starts with another peer
            to, source = (rank + distance) % size, (rank - distance) % size
            for number, (sends, receives) in enumerate(several, event.number):
                transfers.append(Transfer(True, to, sends[to], number))
                transfers.append(Transfer(False, source, receives[source], number))
        return lane.transfer(transfers, event, several[0][0][rank].device)

    def _direct_gather(self, lane: Lane, parts: Sequence[Gather], event: Event) -> Work:
        several = []
        for full, shard, _ in parts:
            pieces, source = list(_wire(full).view(self.groups.shard_size, -1).unbind()), _wire(shard)
            pieces[self.groups.shard_rank].copy_(source)
            several.append(([source] * self.groups.shard_size, pieces))
        return self._exchange(lane, event, several)

    def _direct_reduce(self, lane: Lane, out: torch.Tensor, full: torch.Tensor, event: Event, divisor: float) -> Work:
        rank = self.groups.shard_rank
        pieces = list(full.view(self.groups.shard_size, -1).unbind())
        staging = full.new_empty(self.groups.shard_size - 1, out.numel())
        received = list(staging.unbind())
        received.insert(rank, pieces[rank])
        work = self._exchange(lane, event, [([_wire(piece) for piece in pieces], [_wire(piece) for piece in received])])
        return work.then(functools.partial(sum_in_rank_order, out, received, divisor=divisor)).on(self.streams)


def _averaging(
    lane: Lane, size: int, values: torch.Tensor, divisor: float | None, *, sums_only: bool = False
) -> tuple[Any, float, float]:
    """Choose how ``lane`` averages ``values``: the operation, a divisor before it, and a divisor of the result.

    The average belongs into the collective, or to the small result. Only float16 is divided before as well, by about
    the root of the total, because the sum of many ranks' gradients overflows it. NCCL multiplies by 1 / size in the
    dtype of the message, which in 16 bits is off by up to 0.2 % where the size is no power of two.

    Args:
        size: the number of ranks.
        divisor: divides the sum instead of ``size``.
        sums_only: the operation has to be a sum.
    """
    dtype, by = values.dtype, float(size) if divisor is None else divisor
    if dtype == torch.float16:
        before = predivisor(size)
        return dist.ReduceOp.SUM, before, by / before
    is_exact = dtype.itemsize > 2 or size & (size - 1) == 0
    averages = size > 1 and by == size and dtype.is_floating_point and is_exact and not sums_only
    if averages and not values.is_cpu and lane.carrier.backend(values.device) == "nccl":
        return dist.ReduceOp.AVG, 1.0, 1.0
    return dist.ReduceOp.SUM, 1.0, by


def predivisor(size: int) -> float:
    """Return the divisor of float16 gradients of ``size`` ranks before their sum: about the root of ``size``."""
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a dtype that every backend has: complex as pairs; float8, int16, uint16 to uint64 as bytes.

    Only frozen parameters and buffers have these dtypes, which are never summed.
    """
    if tensor.dtype in _NATIVE_DTYPES:
        return tensor
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(torch.uint8)


def sum_in_rank_order(out: torch.Tensor, pieces: Sequence[torch.Tensor], *, divisor: float = 1.0) -> None:
    """Write the sum of ``pieces``, added in their order and divided by ``divisor`` in the end, into ``out``.

    16-bit pieces are summed in float32 and rounded once at the end. A backend's own reduction in 16 bits rounds at each
    of N - 1 additions, so the error may reach (N - 1) / 2 units in the last place of the largest sum.
    """
    part = _IN_CACHE * torch.get_num_threads()
    if out.numel() > part:
        for partial_out, *several in zip(out.split(part), *(piece.split(part) for piece in pieces)):
            sum_in_rank_order(partial_out, several, divisor=divisor)
    else:
        total = torch.empty_like(out, dtype=torch.float32) if out.dtype in (torch.float16, torch.bfloat16) else out
        first, *others = pieces
        if others and first.dtype == total.dtype:
            torch.add(first, others.pop(0), out=total)
        else:
            total.copy_(first)
        for piece in others:
            total.add_(piece)
        if total is not out:
            out.copy_(total)
        if divisor != 1:
            out.div_(divisor)


_IN_CACHE = 1 << 16  # elements per thread whose partial sums stay in the cache


# torch's communication hooks that reduce in 16 bits, and the dtype of their messages.
COMPRESSING_HOOKS = {default_hooks.fp16_compress_hook: torch.float16, default_hooks.bf16_compress_hook: torch.bfloat16}


def reduce_compressed(
    hook: Callable[..., Any], state: Any, full: torch.Tensor, shard: torch.Tensor | None = None
) -> None:
    """Compute as ``hook``, one of ``COMPRESSING_HOOKS``, does with its ``state``.

    Reduces ``full`` in 16 bits into ``shard``, or in place, in two divisions, and casts up afterwards. The hooks of
    torch do not run on CPU, and on accelerators they make memory differ from step to step by ``record_stream``.
    """
    low = full.to(COMPRESSING_HOOKS[hook])
    if shard is None:
        default_hooks.allreduce_hook(state, low)
        full.copy_(low.to(state.parameter_type))
    else:
        low_shard = torch.empty_like(shard, dtype=low.dtype)
        default_hooks.reduce_scatter_hook(state, low, low_shard)
        shard.copy_(low_shard.to(state.parameter_type))


# -- collectives of control values -------------------------------------------------------------------------------------


def combine(values: torch.Tensor, group: ProcessGroup, streams: Streams, label: str, *, largest: bool = False) -> None:
    """Replace ``values`` by their sum over the ranks of ``group``, or by the ``largest``, element by element.

    On CPU the host waits, else the current stream does.
    """
    lane, op = Lane.of(group, values.device), dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    asynchronous = streams.asynchronous_work
    lane.collective("all_reduce", Event(label), values, asynchronous=asynchronous, control=True, op=op).wait()


def broadcast(tensors: list[torch.Tensor], group: ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of rank 0 of ``group``, in messages of up to 250 MB. The host waits."""
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
            lane, on_host = Lane.of(group, message.device), message.device.type == "cpu"
            event = Event("broadcast")
            lane.collective("broadcast", event, _wire(message), asynchronous=on_host, src=source).wait()
            for tensor, part in zip(batch, message.split([tensor.numel() for tensor in batch])):
                tensor.copy_(part.view(tensor.shape))


def exchange(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_nbytes: list[int],
    sent_nbytes: list[int],
    group: ProcessGroup,
    streams: Streams,
    label: str,
) -> Work:
    """Start sending each rank of ``group`` its piece of ``sent``, and receiving a piece of ``received`` from each.

    Both are 1-D and uint8; the pieces, of so many bytes, lie in rank order. Neither may be touched before ``wait()``.
    """
    tensors = received, sent, received_nbytes, sent_nbytes
    lane, asynchronous = Lane.of(group, received.device), streams.asynchronous_work
    return lane.collective("all_to_all_single", Event(label), *tensors, asynchronous=asynchronous).on(streams)


def send_and_receive(
    transfers: list[Transfer], group: ProcessGroup, streams: Streams, label: str, device: torch.device
) -> Work:
    """Start all ``transfers``, from and to memory on ``device``. No tensor may be touched before ``wait()``."""
    return Lane.of(group, device).transfer(transfers, Event(label), device).on(streams)


def agree(values: torch.Tensor, group: ProcessGroup, device: torch.device, label: str) -> None:
    """Replace ``values`` (integers, on CPU) by the largest of the ranks of ``group``, element by element.

    The host waits. ``device`` is where the models of the ranks compute.
    """
    Lane.of(group, device)
    on_device = values.to(control_device(group, device))
    combine(on_device, group, streams_for(on_device.device), label, largest=True)
    values.copy_(on_device)


def gather_values(values: torch.Tensor, group: ProcessGroup, device: torch.device, label: str) -> torch.Tensor:
    """Return the ``values`` (1-D, on CPU, equally many) of every rank, a row per rank. The host waits.

    A fake group, without communication, returns zeros. ``device`` is where the models of the ranks compute.
    """
    own = values.to(control_device(group, device))
    every = own.new_zeros(group.size() * own.numel())
    options = {"asynchronous": own.device.type == "cpu", "control": True}
    Lane.of(group, device).collective(ALL_GATHER, Event(label), every, own, **options).wait()
    return every.cpu().view(group.size(), -1)


# -- the choice of the transport ---------------------------------------------------------------------------------------


def debug_detail() -> bool:
    """Return whether the debug level of torch is DETAIL now: then torch checks each of its own collectives."""
    level: Any = dist.get_debug_level()
    return bool(level == dist.DebugLevel.DETAIL)


def may_share(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether ranks of ``group`` that can share memory have to communicate through it."""
    return COLLECTIVES.value in ("auto", "shared") and backend_of(group, device) == "gloo"


def shared_channel(lane: Lane, device: torch.device) -> Channel | None:
    """Return the memory that the ranks of ``lane`` share; None if they share none, or must not use it.

    The first time all ranks have to call.

    Raises:
        RuntimeError: on every rank, with the reason, if ``FSDP_COLLECTIVES=shared`` and they share none.
    """
    group = lane.group
    if not may_share(group, device):
        return None
    channel = None if debug_detail() else lane.connect()
    if channel is None and COLLECTIVES.value == "shared":
        why = "torch's debug level DETAIL checks its own calls alone" if debug_detail() else lane.sharing.why_not
        raise RuntimeError(
            f"FSDP_COLLECTIVES=shared asks for memory that the ranks of a group share, and these share none: {why}. "
            "With FSDP_COLLECTIVES=auto, on all ranks, they communicate in another way"
        )
    return channel


def direct_threshold(group: ProcessGroup, device: torch.device) -> float:
    """Return the number of bytes from which on ``group`` uses the direct exchange."""
    choice = COLLECTIVES.value
    if choice == "native" or backend_of(group, device) != "gloo" or debug_detail():
        return _NEVER
    return 0 if choice == "direct" else DIRECT_MIN_NBYTES
