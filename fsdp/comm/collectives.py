"""How gathered and reduced bytes move: the algorithm for each backend and size.

:mod:`fsdp.comm.ledger` issues them, and :mod:`fsdp.comm.consensus` what gathers objects. They are called as attributes
of ``torch.distributed`` at call time, so whoever replaces them (profilers, recorders) sees every call.

[Note: Direct exchange]
On gloo the native all-gather and reduce-scatter move large messages several times slower than the links allow. There
every rank sends each peer its piece and receives the peers' pieces, all at once, with a tag of (unit, bucket, pass):
messages of different sizes that meet under one tag abort the process, tagged ones match or time out. A reduction sums
the received pieces in rank order 0..N-1, low precision in float32, so its result does not depend on timing. For small
messages the native calls win.

Where all ranks of such a group are on one host, nothing is sent: what they gather and reduce goes through memory that
they share, :mod:`fsdp.comm.shared_memory`. ``FSDP_COLLECTIVES`` chooses otherwise: ``native`` and ``direct``; and with
``shared`` it is an error where ``auto`` would go on without shared memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS as LOW_PRECISION_HOOKS
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp.comm.groups import Groups, backend_of, control_device
from fsdp.comm.ledger import Gather as Gather
from fsdp.comm.ledger import Issuer, are_torchs_own, issue, issue_gathers, issue_in_memory, issue_transfers, issue_vote
from fsdp.comm.ledger import Transfer as Transfer
from fsdp.comm.ledger import current_label as current_label
from fsdp.comm.shared_memory import PARTS, Channel, Posts, channel_of, connect, why_not
from fsdp.comm.streams import Event, Streams, streams_for
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.comm.waiting import OutOfStep as OutOfStep
from fsdp.comm.waiting import Work, watcher
from fsdp.environment import COLLECTIVES

DIRECT_MIN_NBYTES = 1 << 20  # messages below this go native even on gloo
_NEVER = math.inf
_full_nbytes_of: Callable[[Gather], int] = operator.attrgetter("full.nbytes")
_TRAVEL_AS_THEY_ARE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_TRAVEL_AS_THEY_ARE |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}


class Tag(NamedTuple):
    """Whom a message is for: words for people, a number that both ends of a message agree on."""

    label: str
    number: int


class Pending:
    """A collective under way. ``wait()`` before its result is used: on CPU the host waits, else the current stream, as
    every stream has to that uses it."""

    __slots__ = ("_event", "_finish", "_quotient", "_streams", "_work")

    def __init__(
        self,
        work: Work | None,
        streams: Streams,
        finish: Callable[[], object] | None = None,
        quotient: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """``work`` is None where nothing travels. ``finish`` is called when it is over, and then the first of the
        ``quotient`` is divided by the second."""
        self._work, self._finish, self._quotient, self._streams = work, finish, quotient, streams
        self._event: Event = None if streams.asynchronous_work else streams.record()
        if self._event is not None and work is not None and work.watch is not None:
            if streams.is_capturing():
                watcher.pause()
            else:
                watcher.follow(self._event, work, streams.look_beside_captures)

    def extend(self) -> None:
        """What the current stream has been given since belongs to it as well."""
        if not self._streams.asynchronous_work:
            self._event = self._streams.record()

    def wait(self) -> None:
        """Where it is interrupted, or the ranks are out of step, this is still under way: memory stays in use."""
        self.wait_for_sum()
        if self._quotient is not None:
            Pending.divide([self])

    def wait_for_sum(self) -> None:
        """As ``wait``, for whoever calls ``divide`` before the result is used."""
        if self._work is not None:
            self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        if self._event is not None:
            self._streams.wait(self._event)

    @staticmethod
    def divide(several: Iterable[Pending]) -> None:
        """What they have summed becomes means, of all together: small tensors cost their calls."""
        by_divisor: dict[float, list[torch.Tensor]] = {}
        for pending in several:
            quotient, pending._quotient = pending._quotient, None
            if quotient is not None:
                by_divisor.setdefault(quotient[1], []).append(quotient[0])
        for divisor, tensors in by_divisor.items():
            torch._foreach_div_(tensors, divisor)


class Communicator:
    """Gathers and reduces one unit's flat vectors over its groups; the algorithm is chosen at first use."""

    def __init__(self, groups: Groups, streams: Streams) -> None:
        self.groups = groups
        self.streams, self._on_host = streams, streams.asynchronous_work
        self.divisor: float | None = None  # of the sum over all ranks, instead of their number
        self.is_chosen = not groups.sharded  # whether what comes next is known
        # by what they are for and what is gathered, or reduced, with what that is divided by before and after
        self._gathers: dict[Any, Issuer] = {}
        self._reductions: dict[Any, tuple[Issuer, float, float]] = {}
        self._averages: dict[Any, tuple[Issuer, float, float]] = {}
        self._direct_min = _NEVER  # messages of so many bytes go direct
        self._channel: Channel | None = None  # to the memory that the ranks share

    def choose(self, device: torch.device) -> None:
        """Have the algorithm been chosen for tensors on ``device``. All ranks have to come the first time.

        Raises:
            RuntimeError: they do not, or cannot do what ``FSDP_COLLECTIVES`` says.
        """
        if self.is_chosen:
            return
        if self._on_host and self.groups.shard_size > 1:
            self._channel = shared_channel(self.groups.shard, device)
            self._direct_min = direct_threshold(self.groups.shard, device)
        self.is_chosen = True

    # -- the two collectives -------------------------------------------------------------------------------------------

    def gather(self, parts: Sequence[Gather], tag: Tag, *, to_write: bool = False) -> Pending | Work:
        """Start filling each ``full`` of ``parts`` (shard_size * n elements) with every rank's ``shard`` of it (n), in
        rank order: as one collective, of which each part comes to its place. The numbers from that of the ``tag`` on
        are the parts'.

        Runs on the current stream; no tensor may be touched before ``wait()``. What is ``full`` may only be read after
        that, as others may still do; unless it is ``to_write``, on all ranks.
        """
        group = self.groups.shard
        if not self.groups.sharded:
            for part in parts:
                part.full.copy_(part.shard)
            return Pending(None, self.streams)
        if not self.is_chosen:
            self.choose(parts[0].full.device)
        if self._channel is not None and (channel := self._memory(tag)) is not None:
            starts = []
            for i in range(0, len(parts), PARTS):
                what = parts[i : i + PARTS], tag.label, tag.number + i
                starts.append(functools.partial(channel.gather, *what, until_read=to_write))
            work = issue_in_memory(starts, parts[0].full.device, group, tag.label)
        elif self._direct_min < _NEVER and sum(map(_full_nbytes_of, parts)) >= self._direct_min:
            work = self._direct_gather(parts, tag)
        elif len(parts) == 1:
            full, shard, _ = parts[0]
            if full.dtype not in _TRAVEL_AS_THEY_ARE:
                full, shard = _wire(full), _wire(shard)
            key = tag, full.dtype, full.numel()
            issuer = self._gathers.get(key)
            if issuer is None:
                issuer = Issuer(ALL_GATHER, (full, shard), group, tag.label, asynchronous=self._on_host)
                self._gathers[key] = issuer
            work = issuer(full, shard)
        else:
            wired = [(_wire(full), _wire(shard)) for full, shard, _ in parts]
            work = issue_gathers(wired, group, tag.label, asynchronous=self._on_host)
        return work if self._on_host else Pending(work, self.streams)

    def reduce(self, out: torch.Tensor, full: torch.Tensor, tag: Tag, *, to_write: bool = False) -> Pending:
        """Start writing this rank's piece of the mean of every rank's ``full`` into ``out``. ``full`` is used up. With
        ``divisor`` it is the sum, divided by that, and so on. ``to_write``: as for ``gather``.

        Sharded: ``out`` has ``full.numel() / shard_size`` elements, and the mean is that of the shard group; where
        there are replicas, ``average`` comes next. Not sharded: ``out`` is ``full``, which is averaged.
        Runs on the current stream; neither tensor may be touched before ``wait()``.
        """
        if not self.groups.sharded:
            return self.average(full, tag)
        if not self.is_chosen:
            self.choose(full.device)
        key = tag, full.dtype, self.divisor
        issuer, before, after = self._reductions.get(key) or self._new_reduction(key, out, full)
        if before != 1:
            full.div_(before)
        if self._channel is not None and (channel := self._memory(tag)) is not None:
            add_up = functools.partial(sum_in_rank_order, divisor=after)
            what = out, full, tag.label, tag.number, add_up
            start = functools.partial(channel.reduce, *what, until_read=to_write)
            return Pending(issue_in_memory([start], full.device, self.groups.shard, tag.label), self.streams)
        if self._direct_min < _NEVER and full.nbytes >= self._direct_min:
            return self._direct_reduce(out, full, tag, after)
        work = issuer(out, full) if full.dtype in _TRAVEL_AS_THEY_ARE else issuer(_wire(out), _wire(full))
        return Pending(work, self.streams) if after == 1 else self._divided(work, out, after)

    def _new_reduction(self, key: Any, out: torch.Tensor, full: torch.Tensor) -> tuple[Issuer, float, float]:
        op, before, after = _averaging(self.groups.shard, self.groups.shard_size, full, self.divisor)
        tensors, label = (_wire(out), _wire(full)), key[0].label
        issuer = Issuer(REDUCE_SCATTER, tensors, self.groups.shard, label, asynchronous=self._on_host, op=op)
        self._reductions[key] = issuer, before, after
        return issuer, before, after

    def average(self, values: torch.Tensor, tag: Tag) -> Pending:
        """Start replacing ``values`` by the mean of every replica's. Runs on the current stream; they may not be
        touched before ``wait()``."""
        group, divisor = self.groups.replica, self.divisor
        if divisor is not None and self.groups.sharded:
            divisor = 1.0  # ``reduce`` has divided
        if group is None:  # one replica alone: the mean is what it has
            if divisor is not None and divisor != 1:
                values.div_(divisor)
            return Pending(None, self.streams)
        key = tag, values.dtype, divisor
        issuer, before, after = self._averages.get(key) or self._new_average(key, values)
        if before != 1:
            values.div_(before)
        work = issuer(values if values.dtype in _TRAVEL_AS_THEY_ARE else _wire(values))
        return Pending(work, self.streams) if after == 1 else self._divided(work, values, after)

    def _new_average(self, key: Any, values: torch.Tensor) -> tuple[Issuer, float, float]:
        (tag, _, divisor), group = key, self.groups.replica
        op, before, after = _averaging(group, self.groups.replica_size, values, divisor)
        issuer = Issuer("all_reduce", (_wire(values),), group, tag.label, asynchronous=self._on_host, op=op)
        self._averages[key] = issuer, before, after
        return issuer, before, after

    def _divided(self, work: Work, out: torch.Tensor, after: float) -> Pending:
        """``out`` is what becomes of ``work``, and is then divided by ``after``."""
        if self._on_host:
            return Pending(work, self.streams, quotient=(out, after))
        out.div_(after)
        return Pending(work, self.streams)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _memory(self, tag: Tag) -> Channel | None:
        """The memory that the ranks share, if their next collective goes through it."""
        channel = self._channel
        if channel is None or not channel.usable:
            return None
        return channel if _go_through(channel.collectives, self.groups.shard, tag.label) else None

    def _exchange(self, tag: Tag, several: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Work:
        """Of each (sends, receives) send ``sends[i]`` to and receive ``receives[i]`` from each other rank i, all at
        once."""
        rank, size = self.groups.shard_rank, self.groups.shard_size
        transfers = []
        for distance in range(1, size):  # each rank starts with another peer
            to, source = (rank + distance) % size, (rank - distance) % size
            for number, (sends, receives) in enumerate(several, tag.number):
                transfers.append(Transfer(True, to, sends[to], number))
                transfers.append(Transfer(False, source, receives[source], number))
        return issue_transfers(transfers, self.groups.shard, tag.label, several[0][0][rank].device)

    def _direct_gather(self, parts: Sequence[Gather], tag: Tag) -> Work:
        several = []
        for full, shard, _ in parts:
            pieces, source = list(_wire(full).view(self.groups.shard_size, -1).unbind()), _wire(shard)
            pieces[self.groups.shard_rank].copy_(source)
            several.append(([source] * self.groups.shard_size, pieces))
        return self._exchange(tag, several)

    def _direct_reduce(self, out: torch.Tensor, full: torch.Tensor, tag: Tag, after: float) -> Pending:
        rank = self.groups.shard_rank
        pieces = list(full.view(self.groups.shard_size, -1).unbind())
        staging = full.new_empty(self.groups.shard_size - 1, out.numel())
        received = list(staging.unbind())
        received.insert(rank, pieces[rank])
        work = self._exchange(tag, [([_wire(piece) for piece in pieces], [_wire(piece) for piece in received])])
        return Pending(work, self.streams, functools.partial(sum_in_rank_order, out, received, divisor=after))


def _go_through(posts: Posts, group: Any, label: str) -> bool:
    """Whether what all ranks of ``group`` do next is posted, and not done by calling ``torch.distributed``."""
    if are_torchs_own():
        return True
    issue_in_memory([posts.propose_elsewhere], torch.device("cpu"), group, label).wait()
    return not posts.goes_elsewhere()


def _averaging(group: Any, size: int, values: torch.Tensor, divisor: float | None) -> tuple[Any, float, float]:
    """How ``group``, of ``size`` ranks, averages such ``values``, or divides their sum by ``divisor``: (operation,
    divisor of them, divisor of the result).

    Averaging belongs into the collective or into the small result. float16 alone is divided before as well, by
    about the root of the total, because the sum of many ranks' gradients overflows it. NCCL multiplies by 1 / size
    in the dtype of the message, which in 16 bits is off by up to 0.2 % where the size is no power of two.
    """
    dtype, by = values.dtype, float(size) if divisor is None else divisor
    if dtype == torch.float16:
        before = predivisor(size)
        return dist.ReduceOp.SUM, before, by / before
    is_exact = dtype.itemsize > 2 or size & (size - 1) == 0
    averages = size > 1 and by == size and dtype.is_floating_point and is_exact
    if averages and values.device.type != "cpu" and backend_of(group, values.device) == "nccl":
        return dist.ReduceOp.AVG, 1.0, 1.0
    return dist.ReduceOp.SUM, 1.0, by


def predivisor(size: int) -> float:
    """What gradients of ``size`` ranks are divided by before they are summed, where they are: about the root of it."""
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before)


def send_and_receive(
    transfers: list[Transfer], group: Any, streams: Streams, label: str, device: torch.device
) -> Pending:
    """Start all ``transfers`` at once, from and to memory on ``device``. No tensor may be touched before ``wait()``."""
    return Pending(issue_transfers(transfers, group, label, device), streams)


def sum_in_rank_order(out: torch.Tensor, pieces: Sequence[torch.Tensor], *, divisor: float = 1.0) -> None:
    """Write the sum of ``pieces``, added one after the other, divided by ``divisor`` in the end, into ``out``.

    16-bit pieces are summed in float32 and rounded once at the end. A backend's own reduction in 16 bits rounds at each
    of N - 1 additions, so its error may reach (N - 1) / 2 units in the last place of the largest partial sum.
    """
    part = _IN_CACHE * torch.get_num_threads()
    if out.numel() > part:
        for its, *several in zip(out.split(part), *(piece.split(part) for piece in pieces)):
            sum_in_rank_order(its, several, divisor=divisor)
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


_IN_CACHE = 1 << 16  # elements per thread, of which the partial sums are still in its cache when they are added to


# torch's communication hooks that reduce in 16 bits, and the dtype of their messages.
COMPRESSING_HOOKS = {default_hooks.fp16_compress_hook: torch.float16, default_hooks.bf16_compress_hook: torch.bfloat16}


def reduce_compressed(
    hook: Callable[..., Any], state: Any, full: torch.Tensor, shard: torch.Tensor | None = None
) -> None:
    """What ``hook``, one of ``COMPRESSING_HOOKS``, computes with its ``state``: reduce ``full`` in 16 bits into
    ``shard``, or in place, in two divisions, and cast up afterwards.

    torch's own two do not run on CPU, and on accelerators they have the allocator track streams, which makes memory
    differ from step to step.
    """
    low = full.to(COMPRESSING_HOOKS[hook])
    if shard is None:
        default_hooks.allreduce_hook(state, low)
        full.copy_(low.to(state.parameter_type))
    else:
        low_shard = torch.empty_like(shard, dtype=low.dtype)
        default_hooks.reduce_scatter_hook(state, low, low_shard)
        shard.copy_(low_shard.to(state.parameter_type))


def agree(values: torch.Tensor, group: Any, device: torch.device, label: str) -> None:
    """Replace ``values`` (integers, on CPU) by the largest of ``group``'s ranks, element by element. The host waits.

    ``device`` is where the ranks' models compute.
    """
    on_device = values.to(control_device(group, device))
    combine(on_device, group, streams_for(on_device.device), label, largest=True)
    values.copy_(on_device)


def gather_values(values: torch.Tensor, group: Any, device: torch.device, label: str) -> torch.Tensor:
    """Every rank's ``values`` (1-D, equally many, on CPU), a row per rank; zeros from a group that changes nothing. The
    host waits."""
    own = values.to(control_device(group, device))
    every = own.new_zeros(group.size() * own.numel())
    on_host = own.device.type == "cpu"
    issue(ALL_GATHER, every, own, group=group, label=label, asynchronous=on_host, control=True).wait()
    return every.cpu().view(group.size(), -1)


class Vote:
    """Whether all ranks have the same number, and the largest of another one: asked now, answered later.

    Every vote is as long: different ones may meet where ranks are out of step, and gloo aborts the process where
    lengths differ.
    """

    def __init__(
        self,
        number: int,
        group: Any,
        device: torch.device,
        label: str,
        *,
        largest: int = 0,
        issuers: dict[str, Issuer] | None = None,
    ) -> None:
        """``device`` is where the ranks' models compute; ``issuers`` are kept by whoever asks again and again."""
        self._largest: Callable[[], int | None]  # once the work is over
        channel = channel_of(group)
        on = None if channel is None else control_device(group, device)
        if channel is not None and on is not None and on.type == "cpu" and _go_through(channel.questions, group, label):
            said: list[tuple[int, int]] = []  # by all ranks
            ask = functools.partial(channel.ask, number, largest, label, said)
            self._work = issue_in_memory([ask], on, group, label)
            self._largest = lambda: max(each for _, each in said) if {other for other, _ in said} == {number} else None
            return
        numbers = number, -number, largest
        votes, self._work = issue_vote(numbers, group, device, label, {} if issuers is None else issuers)

        def from_votes() -> int | None:
            *numbers, found = votes.tolist()
            return int(found) if numbers == [number, -number] else None

        self._largest = from_votes

    def is_completed(self) -> bool:
        """Whether nobody has to wait for the result."""
        return self._work.is_completed()

    def result(self) -> int | None:
        """The ``largest`` of all ranks; None if some rank has another number. The host waits."""
        self._work.wait()
        return self._largest()


def combine(values: torch.Tensor, group: Any, streams: Streams, label: str, *, largest: bool = False) -> None:
    """Replace ``values`` by their sum over ``group``'s ranks, or with ``largest`` by the largest, element by element.

    On CPU the host waits, else the current stream does. ``streams`` are those of the device of ``values``.
    """
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    host_waits = streams.asynchronous_work
    issue("all_reduce", values, group=group, label=label, asynchronous=host_waits, control=True, op=op).wait()


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
            on_host, label = message.device.type == "cpu", "broadcast"
            issue(label, _wire(message), group=group, label=label, asynchronous=on_host, src=source).wait()
            for tensor, part in zip(batch, message.split([tensor.numel() for tensor in batch])):
                tensor.copy_(part.view(tensor.shape))


def exchange(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_nbytes: list[int],
    sent_nbytes: list[int],
    group: Any,
    streams: Streams,
    label: str,
) -> Pending:
    """Start sending each rank of ``group`` its piece of ``sent`` and receiving a piece of ``received`` from each.

    Both are 1-D and uint8; the pieces, of so many bytes, lie in them in rank order. Neither may be touched before
    ``wait()``.
    """
    pieces = received_nbytes, sent_nbytes
    options = {"group": group, "label": label, "asynchronous": streams.asynchronous_work}
    return Pending(issue("all_to_all_single", received, sent, *pieces, **options), streams)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, 1-D, as every backend knows it: complex numbers travel as pairs, and what some backend has no type
    for (float8, int16, uint16 to uint64) as bytes. Frozen parameters and buffers have these; nothing adds them up."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1)
    return tensor if tensor.dtype in _TRAVEL_AS_THEY_ARE else tensor.view(torch.uint8)


def debug_detail() -> bool:
    """Whether torch's debug level is DETAIL, now (it can change): then torch checks each collective it knows."""
    level: Any = dist.get_debug_level()
    return bool(level == dist.DebugLevel.DETAIL)


def may_share(group: Any, device: torch.device) -> bool:
    """Whether ranks of ``group`` that share memory are to communicate through it."""
    return COLLECTIVES.value in ("auto", "shared") and backend_of(group, device) == "gloo"


def shared_channel(group: Any, device: torch.device) -> Channel | None:
    """The memory that the ranks of ``group`` share; None if they share none, or are not to use it. The first time all
    of them have to ask.

    Raises:
        RuntimeError: on every rank, if ``FSDP_COLLECTIVES=shared`` asks for it and they share none, with why.
    """
    if not may_share(group, device):
        return None
    channel = None if debug_detail() else connect(group)
    if channel is None and COLLECTIVES.value == "shared":
        why = "torch's debug level DETAIL checks its own calls alone" if debug_detail() else why_not(group)
        raise RuntimeError(
            f"FSDP_COLLECTIVES=shared asks for memory that the ranks of a group share, and these share none: {why}. "
            "With FSDP_COLLECTIVES=auto, on all ranks, they communicate in another way"
        )
    return channel


def direct_threshold(group: Any, device: torch.device) -> float:
    """From how many bytes on the direct exchange is used in ``group``."""
    choice = COLLECTIVES.value
    if choice == "native" or backend_of(group, device) != "gloo" or debug_detail():
        return _NEVER
    return 0 if choice == "direct" else DIRECT_MIN_NBYTES
