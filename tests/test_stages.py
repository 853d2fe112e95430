"""The stage table: allocated bytes at each stage of a unit's life.

The bytes reported by the allocator are compared with formulas over the numbers of elements of the plain model. With N
ranks, a root of R bytes (parameters outside of units), n units of U bytes each and P = R + n * U, the sharded
strategies hold

    built                   P/N                                    the shards
    forward of a unit       P/N + R + gathered                     the full buffers of the root and of units
    between the passes      P/N + R + gathered
    backward of a unit      P/N + gathered + reducing              the root's backward is over by then
    after the backward      P/N + P/N                              only the shards and the gradients' shards
    after one in no_sync    P/N + P                                the shards and the unsharded gradients
    without gradients       P/N                                    as soon as the forward is over

`gathered` is U for each block of the gather pool. FULL_SHARD has one block for the unit and one for the next unit (none
before an order is recorded), kept between the passes. SHARD_GRAD_OP has one for each unit that has run and one for the
next; in backward one for each unit that is not over, and up to two kept ones. With a prefetch distance d there are d
blocks instead of one for the next unit, and 1 + d kept ones.

`reducing` is the unit's slots U, the reduced shards so far, and two buffers of the one reduction in flight: the input
(U, or R for the root) and the receive buffer of a direct exchange ((N - 1) / N of the input). NO_SHARD holds P, and in
backward one more vector per unit, which becomes the gradient. `Formulas` has the details.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.comm import host_memory
from fsdp.comm.versions import STORAGES_SWAP
from fsdp.runtime.policy import TreePolicy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.meter import Meter, needs_meter
from tests.harness.pool import on_ranks
from tests.harness.process_groups import current_label
from tests.harness.sharded import handles_of, wrap
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

WIDTH, HIDDEN, UNITS = 511, 513, 3
GATHERED = 2  # units at a time, with one prefetched
# Activations of one sample, the graph, hooks and tensor headers: below the smallest term of a formula, U / 3.
NOISE = 384 * 1024


# -- observing -----------------------------------------------------------------------------------------------------

Observer = Callable[[str], None]
_observer: Observer | None = None


def observe(stage: str) -> None:
    if _observer is not None:
        _observer(stage)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


class Quiet:
    """Waits for natively issued collectives, so that gloo's scratch memory on other threads is not measured.

    The package's buffers are unaffected, since the package does not learn of this wait. Direct exchanges need no
    scratch memory (and can be waited for only once).
    """

    NAMES = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    NAMES += ("all_reduce",)

    def __init__(self) -> None:
        self._works: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in (name for name in self.NAMES if hasattr(dist, name)):
                stack.enter_context(mock.patch.object(dist, name, self._noting(getattr(dist, name))))
            yield

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._works.append(result)
            return result

        return noting

    def settle(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()  # the works hold the tensors of their collectives


# -- the model -----------------------------------------------------------------------------------------------------


class Filled(nn.Linear):
    """A linear layer filled with a constant: random values for as many elements take longer than a step."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.01)


class Block(nn.Module):
    """Two layers and a parameter of one element, observed between the layers in forward and in backward."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.first, self.second = Filled(WIDTH, HIDDEN), Filled(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(sum(more, x)))
        observe(f"forward {self.index}")
        if hidden.requires_grad:
            index = self.index
            hidden.register_hook(lambda grad: observe(f"backward {index}"))
        return self.second(hidden) * self.scale


def make_net() -> nn.Sequential:
    """Build units of one size and a root with one layer, larger than two units: the pool never keeps such a block."""
    return nn.Sequential(*(Block(index) for index in range(UNITS)), Filled(WIDTH, 2300))


def nbytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def build(strategy: ShardingStrategy, use_orig_params: bool, distance: int = 1) -> FullyShardedDataParallel:
    distances = {"forward_prefetch_distance": distance, "backward_prefetch_distance": distance}
    return wrap(make_net(), strategy, use_orig_params, wrap_policy=ModuleWrapPolicy({Block}), **distances)


# -- bytes ---------------------------------------------------------------------------------------------------------


def measure(
    strategy: ShardingStrategy, use_orig_params: bool, distance: int, expected: dict[str, int]
) -> dict[str, int]:
    """Return the bytes beyond those before the model was built, by stage. Step 0 has no recorded order."""
    os.environ["FSDP_COLLECTIVES"] = "direct"
    meter, quiet = Meter(), Quiet()
    measured: dict[str, int] = {}
    base, step = 0, "new"
    patience = 400

    def note(stage: str) -> None:
        nonlocal patience
        quiet.settle()
        name = f"{step}: {stage}"
        measured[name] = meter.live() - base
        while measured[name] > expected[name] + NOISE and patience > 0:
            patience -= 1  # a backend thread releases a finished collective a moment after its end
            time.sleep(0.005)
            measured[name] = meter.live() - base

    def train(model: FullyShardedDataParallel, name: str) -> None:
        nonlocal step
        step = name
        loss = model(torch.ones(1, WIDTH)).sum()
        note("between")
        loss.backward()
        del loss
        note("after")

    def clear(model: FullyShardedDataParallel) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        del parameter
        note("cleared")

    # The second model is measured: the first one fills all caches.
    with quiet.watching(), observing(note):
        for steps in (1, 2):
            gc.collect()
            base, patience, step = meter.at_rest(), 400 if steps > 1 else 0, "new"
            model = build(strategy, use_orig_params, distance)
            note("built")
            for number in range(steps):
                train(model, f"step {number}")
                clear(model)
            with model.no_sync():
                train(model, "unsynced")
                train(model, "unsynced again")
                clear(model)
                train(model, "unsynced")
            train(model, "synced")
            clear(model)
            step = "evaluated"
            with torch.no_grad():
                model(torch.ones(1, WIDTH))
            note("after")
            del model
    return measured


@dataclass
class Formulas:
    """The terms of the bytes at a stage; `ahead` units are prefetched, none before an order is recorded."""

    strategy: ShardingStrategy
    world_size: int
    distance: int
    unit: int
    root: int

    @property
    def whole(self) -> int:
        return self.root + UNITS * self.unit

    @property
    def shards(self) -> int:
        return self.whole if self.strategy is NO_SHARD else self.whole // self.world_size

    @property
    def kept_unsynced(self) -> int:
        """Return the bytes that stay gathered from an unsynchronized backward to the next forward."""
        return self.whole if self.strategy is SHARD_GRAD_OP else 0

    def gathered_in_forward(self, index: int, ahead: int, *, kept: bool = False) -> int:
        """Return the gathered bytes; ``kept``: the previous backward was unsynchronized."""
        if self.strategy is NO_SHARD:
            return 0
        if kept and self.kept_unsynced:
            return self.kept_unsynced
        if self.strategy is FULL_SHARD:
            return self.root + (1 + ahead) * self.unit
        return self.root + min(index + 1 + ahead, UNITS) * self.unit

    def gathered_between(self, ahead: int) -> int:
        """Return the gathered bytes in backward. Under FULL_SHARD the units' blocks are kept by the pool and unused."""
        return self.gathered_in_forward(UNITS - 1, ahead)

    def gathered_in_backward(self, over: int, ahead: int, *, unsynced: bool = False) -> int:
        """Return the gathered bytes; the root's call spans those of all units, so its buffer stays."""
        if self.strategy is NO_SHARD:
            return 0
        if unsynced and self.kept_unsynced:
            return self.kept_unsynced
        if self.strategy is FULL_SHARD:
            return self.root + (1 + ahead) * self.unit
        return self.root + (UNITS - over + min(over, 1 + self.distance)) * self.unit

    def written(self, over: int) -> int:
        """Return the bytes of the unsharded gradients of the root, of the finished units and of the running unit."""
        return self.root + (over + 1) * self.unit

    def reducing(self, over: int) -> int:
        """Return the bytes of the slots, of the reduction in flight and of reduced shards."""
        if self.strategy is NO_SHARD:
            return self.written(over)  # reduced in place
        under_way = self.unit if over else self.root
        return self.unit + under_way + self.received(under_way) + (self.written(over) - self.unit) // self.world_size

    def reducing_accumulated(self, over: int) -> int:
        """Return `reducing` for accumulated gradients: each is freed once it is not among the last two."""
        if self.strategy is NO_SHARD:
            return self.whole
        begun = [self.root] + over * [self.unit]
        over_and_gone, under_way = begun[: -TreePolicy.reduce_buffers], begun[-TreePolicy.reduce_buffers :]
        return self.whole - sum(over_and_gone) + self.received(sum(under_way)) + sum(begun) // self.world_size

    def received(self, nbytes: int) -> int:
        """Return the receive buffer's bytes of a direct exchange of `nbytes`."""
        return nbytes * (self.world_size - 1) // self.world_size


def expect(strategy: ShardingStrategy, world_size: int, distance: int) -> dict[str, int]:
    """Apply the formulas to the stages of `measure`."""
    with torch.device("meta"):
        net = make_net()
    is_sharded = strategy is not NO_SHARD and world_size > 1
    f = Formulas(strategy if is_sharded else NO_SHARD, world_size, distance, nbytes_of(net[0]), nbytes_of(net[-1]))
    expected = {"new: built": f.shards}
    for step in ("step 0", "step 1", "unsynced", "unsynced again", "synced"):
        ahead = 0 if step == "step 0" else distance
        accumulated = f.whole if step in ("unsynced again", "synced") else 0
        unsynced, kept = step.startswith("unsynced"), "sync" in step  # the last step of each kind is measured
        for index in range(UNITS):
            gathered = f.gathered_in_forward(index, ahead, kept=kept)
            expected[f"{step}: forward {index}"] = f.shards + gathered + accumulated
        expected[f"{step}: between"] = f.shards + f.gathered_between(ahead) + accumulated
        for over, index in enumerate(reversed(range(UNITS))):
            if step == "unsynced":
                gradients = f.written(over)
            elif step == "unsynced again":
                gradients = f.whole
            elif step == "synced":
                gradients = f.reducing_accumulated(over)
            else:
                gradients = f.reducing(over)
            gathered = f.gathered_in_backward(over, ahead, unsynced=unsynced)
            expected[f"{step}: backward {index}"] = f.shards + gathered + gradients
        kept_after = f.kept_unsynced if unsynced else 0
        expected[f"{step}: after"] = f.shards + kept_after + (f.whole if unsynced else f.shards)
        expected[f"{step}: cleared"] = f.shards + kept_after
    f.strategy = FULL_SHARD if is_sharded else NO_SHARD  # without grad, no memory is kept for a backward
    for index in range(UNITS):
        expected[f"evaluated: forward {index}"] = f.shards + f.gathered_in_forward(index, distance)
    expected["evaluated: after"] = f.shards
    return expected


# On one rank all strategies are equal.
MEASURED = [(1, FULL_SHARD, False, 1), (2, FULL_SHARD, False, 1), (2, FULL_SHARD, True, 0)]
MEASURED += [(3, SHARD_GRAD_OP, True, 2), (2, NO_SHARD, False, 1)]


@needs_meter
@pytest.mark.skipif(not STORAGES_SWAP, reason="the pools of this torch keep no memory, which the formulas count")
@pytest.mark.parametrize(("world_size", "strategy", "use_orig_params", "distance"), MEASURED)
@on_ranks("world_size")
@mock.patch.object(host_memory, "_MAY_BE_HUGE", False)  # the meter sees allocated, not mapped, memory
@mock.patch.object(host_memory, "_RECYCLED", 1 << 62)
def test_bytes_at_each_stage(world_size: int, strategy: ShardingStrategy, use_orig_params: bool, distance: int) -> None:
    """The allocated bytes differ from the formulas by less than NOISE."""
    expected = expect(strategy, world_size, distance)
    measured = measure(strategy, use_orig_params, distance, expected)
    wrong = [
        f"{stage}: {nbytes:,} bytes, expected {expected[stage]:,} ({nbytes - expected[stage]:+,})"
        for stage, nbytes in measured.items()
        if abs(nbytes - expected[stage]) > NOISE
    ]
    assert not wrong, f"{len(wrong)} of {len(measured)} stages are off by more than {NOISE:,}:\n" + "\n".join(wrong)


# -- how many units are gathered at a time -------------------------------------------------------------------------


STEM = 713
STACKED = GATHERED + 1


class Adapted(Block):
    """A frozen block, used first in forward and so read last in backward, and a small trained adapter."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return super().forward(x, *more) + self.up(self.down(x))


class Stack(nn.Module):
    """Units behind a trained layer of the root, so that frozen units have gradients to pass on.

    With `shared`, that layer's output is an input of every unit, as an encoder's output is of every decoder block. Its
    gradient is then complete only after the last of them.
    """

    def __init__(self, kind: str, shared: bool, checkpointing: str, reentrant: bool, use_orig_params: bool) -> None:
        super().__init__()
        self.stem = Filled(STEM, WIDTH)
        self.shared, self.checkpointing, self.reentrant = shared, checkpointing, reentrant
        self.units = nn.ModuleList()
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for index in range(STACKED):
            unit: nn.Module = Adapted(index) if kind == "adapted" else Block(index)
            if kind == "frozen":
                unit.requires_grad_(False)
            if checkpointing == "inside":
                unit = checkpoint_wrapper(unit, checkpoint_impl=impl)
            unit = wrap(unit, FULL_SHARD, use_orig_params)
            if checkpointing == "outside":
                unit = checkpoint_wrapper(unit, checkpoint_impl=impl)
            self.units.append(unit)

    def run(self, x: Tensor) -> Tensor:
        shared = (x,) if self.shared else ()
        for unit in self.units:
            x = unit(x, *shared)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.checkpointing == "segment":
            return checkpoint(self.run, x, use_reentrant=self.reentrant)
        return self.run(x)


@dataclass
class Peak:
    """The largest number of units with memory at a time, and of bytes, over all gathers and observations."""

    units: int
    nbytes: int
    observations: int
    at_rest: int
    frozen_grads: int


WAYS = [("none", False)] + [(where, how) for where in ("inside", "outside", "segment") for how in (True, False)]


# Per form of checkpointing, one kind has separate inputs and the second kind an input that all units share, by turns.
SHARING = [
    (kind, *way, kind != "frozen" and (number + index) % 2 == 0)
    for index, kind in enumerate(["frozen", "adapted", "trained"])
    for number, way in enumerate(WAYS)
    if number in {"frozen": (0, 2, 3, 6), "adapted": (0, 2, 4, 6), "trained": (1, 3, 5)}[kind]  # by turns
]


@needs_meter
@pytest.mark.parametrize(("kind", "checkpointing", "reentrant", "shared"), SHARING)
@on_ranks(2)
@mock.patch.object(host_memory, "_MAY_BE_HUGE", False)
@mock.patch.object(host_memory, "_RECYCLED", 1 << 62)
def test_live_units_are_bounded(kind: str, checkpointing: str, reentrant: bool, shared: bool) -> None:
    """At most two units beside the root have memory, with frozen and checkpointed units, and with an input that all
    units share. A unit ends when its part of that gradient is passed on, not when the sum is complete.

    Where all large parameters are frozen there are no large gradients: then the bytes show it as well as the count.
    """
    with torch.device("meta"):
        block: nn.Module = Adapted(0) if kind == "adapted" else Block(0)
        unit, root = nbytes_of(block), nbytes_of(nn.Linear(STEM, WIDTH))
        frozen = 0 if kind == "trained" else nbytes_of(Block(0))
    shards, gradients = (root + STACKED * unit) // 2, (root + STACKED * (unit - frozen)) // 2
    most = shards + root + GATHERED * unit
    use_orig_params = reentrant
    os.environ["FSDP_COLLECTIVES"] = "direct"
    meter = Meter()
    peaks: list[Peak] = []
    base = 0
    fulls: list[Tensor] = []

    def note(stage: str) -> None:
        peak = peaks[-1]
        peak.units = max(peak.units, sum(full.untyped_storage().nbytes() > 0 for full in fulls))
        peak.nbytes = max(peak.nbytes, meter.live() - base)
        peak.observations += stage != "issued"

    issue = dist.batch_isend_irecv

    def noting(*args: Any) -> Any:
        works = issue(*args)
        if str(current_label()).startswith("gather"):
            note("issued")
        return works

    with mock.patch.object(dist, "batch_isend_irecv", noting), observing(note):
        for steps in (1, 2):  # the second model is measured, with filled caches
            fulls.clear()
            peaks.clear()
            gc.collect()
            base = meter.at_rest()
            stack = Stack(kind, shared, checkpointing, reentrant, use_orig_params)
            model = wrap(stack, FULL_SHARD, use_orig_params)
            for unit in (m for m in model.modules() if isinstance(m, FullyShardedDataParallel) and m is not model):
                fulls.append(handles_of(unit)[-1].full)  # the frozen buckets come after the trained ones
            frozen = [p for p in model.parameters() if not p.requires_grad]
            for _ in range(steps):
                peaks.append(Peak(0, 0, 0, 0, 0))
                model(torch.ones(1, STEM)).sum().backward()
                peaks[-1].at_rest = meter.live() - base
                peaks[-1].frozen_grads = sum(p.grad is not None for p in frozen)
                assert all(full.untyped_storage().nbytes() == 0 for full in fulls)
                model.zero_grad()
            del stack, model, frozen, unit
    for step, peak in enumerate(peaks):
        what = f"step {step}"
        assert peak.observations == (2 + (checkpointing != "none")) * STACKED, what
        assert peak.units <= GATHERED, f"{what}: {peak.units} units at a time"
        assert peak.frozen_grads == 0, what
        assert abs(peak.at_rest - shards - gradients) <= NOISE, f"{what}: {peak.at_rest:,} bytes at rest"
        if kind != "trained":
            assert peak.nbytes <= most + NOISE, f"{what}: {peak.nbytes:,} bytes, allowed {most:,}"
