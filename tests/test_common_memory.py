"""Full buffers that ranks have in common (``FSDP_COLLECTIVES=common``): the values of private ones, in fewer copies.

What may be written has memory of its own; and whoever chooses, releases or writes other than the rest is named.
"""

from __future__ import annotations

import contextlib
import functools
import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.comm import common_memory, shared_memory
from fsdp.comm.collectives import Tag
from fsdp.comm.common_memory import CommonBlock, CommonMemory, Sharers
from fsdp.comm.groups import group_store
from fsdp.flat import flat_param
from fsdp.flat.full_copy import BufferState
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient, new_group
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import run_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_parameters, wrap
from tests.test_shared_memory import HEADERS, held_at_rest, own_segment, share

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
_NEVER = 1 << 61
LOW = MixedPrecision(param_dtype=torch.bfloat16)


class Layer(nn.Module):
    """With parameters of two dtypes, one of them frozen; it may be recomputed."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.linear, self.again = nn.Linear(40, 40), again
        self.gain = nn.Parameter(torch.ones(40, dtype=torch.float64), requires_grad=False)
        self.inside: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.again and self.training else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.inside()
        return torch.tanh(self.linear(x) * self.gain.to(x.dtype))


def make(way: str, group: Any = None, **options: Any) -> FullyShardedDataParallel:
    os.environ["FSDP_COLLECTIVES"] = way
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer(again=i == 2) for i in range(5)), nn.Linear(40, 3))
    return wrap(net, wrap_policy=ModuleWrapPolicy({Layer}), process_group=group or new_group(), **options)


def train(model: FullyShardedDataParallel, steps: int) -> list[dict[str, torch.Tensor]]:
    """With an evaluation, an accumulation and a look at all parameters now and then."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for number in range(steps):
        x = torch.randn(2, 40, generator=torch.Generator().manual_seed(number + 100 * dist.get_rank()))
        if number % 4 == 1:
            with torch.no_grad():
                model.eval()(x)
            model.train()
        if number % 4 == 2:
            with model.no_sync():
                model(x).square().sum().backward()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.detach()})
        if number % 4 == 3:
            with model.summon_full_params(model), torch.no_grad():  # each rank writes all of it
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            found.append(full_parameters(model))
    return found


def common_blocks(model: nn.Module) -> list[CommonBlock]:
    """Those that full buffers have now."""
    handles = [handle for _, unit, _ in units_in(model) for handle in unit.handles]
    filled = [handle.full for handle in handles if handle.state is not BufferState.SHARDED]
    found = [own_segment().lent_at(full.data_ptr()) for full in filled]
    return [block for block in found if isinstance(block, CommonBlock)]


CASES: list[tuple[Any, dict[str, Any]]] = [
    (FULL_SHARD, {}),
    (FULL_SHARD, {"mixed_precision": LOW, "use_orig_params": True}),
    (SHARD_GRAD_OP, {}),
]


def train_in_common_memory() -> None:
    share()
    ranks = dist.get_world_size()
    for strategy, options in {2: CASES, 3: CASES[1:2], 4: CASES[:1]}[ranks]:
        private = train(make("shared", strategy=strategy, **options), 8)
        model = make("common", strategy=strategy, **options)
        for expected, values in zip(private, train(model, 8)):
            assert_bit_equal(values, expected, f"{strategy}, {options}")
        assert held_at_rest() <= HEADERS


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bits_of_private_buffers(world_size: int) -> None:
    """Over eight steps, with prefetching, recomputation, accumulation, evaluations, frozen parameters of another dtype,
    and ``summon_full_params`` with ranks that write all of what it shows."""
    run_ranks(world_size, train_in_common_memory)


# -- where it is used ----------------------------------------------------------------------------------------------


def seen_inside(model: FullyShardedDataParallel) -> list[tuple[int, set[int | None]]]:
    """Of each layer in a step: how many blocks full buffers have in common, and on whose memory."""
    seen = []

    def look() -> None:
        blocks = common_blocks(model)
        seen.append((len(blocks), {block.owner for block in blocks}))

    for unit in list(model.module)[:5]:
        unit.module.inside = look
    model(torch.ones(2, 40)).sum().backward()
    model.zero_grad()
    return seen


def use_it_where_nobody_writes() -> None:
    share("common")
    group, rank = new_group(), dist.get_rank()
    model = make("common", group)
    for recorded in ([], [0, 1], [1], []):  # on one rank alone it sees nothing, as elsewhere
        with record_collectives() if rank in recorded else nullcontext() as log:
            seen = seen_inside(model)
        if recorded == [0, 1]:
            assert not any(count for count, _ in seen) and log.count("all_gather") > 3
        else:
            assert all(count >= 3 for count, _ in seen) and set.union(*(owners for _, owners in seen)) == {0, 1}, seen
    held = []
    list(model.module)[3].module.inside = lambda: held.append(own_segment().held_nbytes)
    held_at_rest()
    before = own_segment().held_nbytes
    with torch.no_grad():
        model(torch.ones(2, 40))
    total = torch.tensor(held[-1:]) - before
    dist.all_reduce(total)
    unit = 5 * 4096  # its two buckets, in pages, and a page in front of each
    assert 2 * unit < total.item() < 4 * unit, f"{total.item()} bytes on both ranks together"
    with model.summon_full_params(model):
        assert not common_blocks(model)
    for way, options, environment in (
        ("auto", {}, {}),
        ("common", {"reduce_unused": True}, {}),
        ("common", {}, {"FSDP_SKIP_WRITEBACK_CHECK": "1"}),
        ("common", {}, {"FSDP_DEBUG": "1"}),
    ):
        with mock.patch.dict(os.environ, environment):
            private = make(way, **options)
            assert not any(count for count, _ in seen_inside(private)), (way, options, environment)


def test_buffers_that_others_may_write_are_private() -> None:
    """So are those of gathers that somebody records, which go another way."""
    run_ranks(2, use_it_where_nobody_writes)


# -- ranks that part -----------------------------------------------------------------------------------------------


@impatient
def part() -> None:
    share("common")
    rank, expected = dist.get_rank(), train(make("shared"), 4)
    model = make("common")
    layers: list[Any] = [unit.module for unit in list(model.module)[:5]]

    def write() -> None:
        with torch.no_grad():
            layers[1].linear.weight.mul_(2)

    layers[1].inside = write
    with pytest.raises(RuntimeError, match=r"linear\.weight' of unit '1' was changed in place"):
        model(torch.ones(2, 40))
    layers[1].inside = lambda: None

    model(torch.ones(2, 40))  # which leaves three blocks of each size
    (memory,) = next(iter(units_in(model)))[1].context.residency.pool._in_common.values()
    for block in memory._free if rank == 1 else ():  # as if it had released them in another order
        block.turn = -block.turn
    with pytest.raises(RuntimeError, match="out of step"):
        model(torch.ones(2, 40))
    for values, own in zip(expected, train(model, 4)):  # after they have met
        assert_bit_equal(own, values)
    assert held_at_rest() <= HEADERS


def test_ranks_that_write_or_choose_another_block_are_told() -> None:
    run_ranks(2, part)


@impatient
def read_for_long() -> None:
    """Rank 1 reads what rank 0 has released, and is about to gather into again."""
    share("common")
    group, rank = new_group(), dist.get_rank()
    model = make("common", group)
    seen_inside(model)
    unit: Any = list(units_in(model))[1][1]
    handle, pool = unit.handles[0], unit.context.residency.pool
    gather = functools.partial(flat_param.gather, [handle], pool, unit.communicator)
    store = dist.PrefixStore("long", group_store(dist.group.WORLD))
    with mock.patch.object(common_memory, "_JUST_NOW", 0):
        gather(Tag("gather", 1))
        handle.wait()
        before = handle.full.clone()
        (block,) = common_blocks(model)
        if rank == 1:
            with contextlib.suppress(RuntimeError):  # it has to wait for this rank
                store.wait(["written"], timedelta(seconds=0.3))
            assert torch.equal(handle.full, before)
            assert block._reading(_NEVER) == [0], "rank 0 is not there yet"
        handle.release(pool, None)
        handle.shard.add_(1)
        gather(Tag("gather", 2))
        assert common_blocks(model) == [block]
        if rank == 0:
            store.set("written", "")
        handle.wait()
        numel = handle.layout.numel
        assert torch.equal(handle.full[:numel], before[:numel] + 1)
        handle.release(pool, None)
    pool.trim()
    assert held_at_rest() <= HEADERS


def test_nobody_writes_where_another_rank_still_reads() -> None:
    run_ranks(2, read_for_long)


def keep_a_block_over_a_meeting() -> None:
    group = new_group()
    model = make("common", group)
    with torch.no_grad():
        model(torch.ones(2, 40))
    channel = shared_memory.channel_of(group)
    assert channel is not None
    memory, sharers = CommonMemory(), Sharers(channel, group, "a test")
    before = memory.allocate(4096, sharers)
    dist.barrier()
    channel.renew()
    dist.barrier()
    after = memory.allocate(4096, sharers)
    assert before is not None and after is not None
    del before
    assert not memory._free
    del after
    assert len(memory._free) == 1
    memory.keep(0, 0)


def test_a_block_of_before_a_meeting_is_used_no_more() -> None:
    """Another rank may have given it up already, or still reads it."""
    run_ranks(2, keep_a_block_over_a_meeting)
