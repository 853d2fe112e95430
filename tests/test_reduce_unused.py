"""`reduce_unused=True`: ranks run different units and train as plain replicas whose skipped gradients are zeros.

The programs run in lockstep with a plain replica of every rank (see `tests.harness.lockstep`). Values and gradients are
compared bit for bit on 2 ranks. A parameter that no rank used has no gradient.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.runtime.unit import units_of
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import WIDTH, Block
from tests.harness.lockstep import REASSOCIATED, STEP, Data, Program, Reference
from tests.harness.models import Net, Unit, in_turn
from tests.harness.oracle import assert_bit_equal, assert_equivalent
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_parameters, wrap

COUNT = 4  # the blocks of a chain


def chain(*, recompute: bool = False, zeroes: bool = False) -> nn.Module:
    """Build blocks, of which the batch names those to run, in that order, possibly repeatedly.

    With `zeroes`, all blocks run in order, and the outputs of skipped blocks are multiplied by zero.
    """

    def forward(m: Any, x: Tensor, order: list[int]) -> Tensor:
        if not zeroes:
            return m.head(in_turn([m.blocks[i] for i in order], x, "non-reentrant" if recompute else "none"))
        for index, block in enumerate(m.blocks):
            ahead = block(x)
            x = ahead if index in order else x + 0 * (ahead - x)
        return m.head(x)

    return Net(forward, blocks=nn.ModuleList(Block(7) for _ in range(COUNT)), head=nn.Linear(WIDTH, 3))


def experts() -> nn.Module:
    """Build mixtures of experts with routers: each row passes through one expert of each layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        weights = m.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(m.experts):
            rows = (chosen == index).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return x + out

    def layer() -> Unit:
        router = nn.Linear(WIDTH, COUNT)
        return Unit(forward, router=router, experts=nn.ModuleList(Block(7) for _ in range(COUNT)))

    return nn.Sequential(OrderedDict(layers=nn.Sequential(layer(), layer()), head=nn.Linear(WIDTH, 3)))


# The blocks that each rank runs, step by step; rank r takes entry r.
ORDERS: list[tuple[list[int], ...]] = [
    ([0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]),  # the first is skipped, before an order is recorded
    ([0, 1, 2, 3], [0, 1, 3], [0, 2, 3]),  # a middle block is skipped
    ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2]),  # the last block is skipped
    ([0, 2], [1, 3], [3]),  # no block in common
    ([], [0, 1, 2, 3], []),
    ([0, 1, 3], [0, 1, 3], [0, 1, 3]),  # no rank uses block 2: it keeps its value, with and without momentum
    ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
    ([3, 2, 1, 0], [0, 1, 2, 3], [2, 0]),  # different orders
    ([0, 0, 1], [1, 0, 1], [3, 3, 3]),  # some blocks run repeatedly
]


def build(module: nn.Module, strategy: ShardingStrategy, use_orig_params: bool, **options: Any) -> Any:
    policy = ModuleWrapPolicy({Block, Unit})
    return wrap(module, strategy, use_orig_params, wrap_policy=policy, reduce_unused=True, **options)


def seeded(make: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(**options)  # type: ignore[no-any-return]


def run_orders(orders: list[tuple[list[int], ...]], model: nn.Module, data: Data) -> Iterator[Any]:
    for step, by_rank in enumerate(orders):
        x = data.tensor(step, 3, WIDTH)
        out = model(x, by_rank[data.rank])
        out.tanh().mean().backward()
        yield {"out": out, "x": x.grad}
        with torch.no_grad():  # evaluations may differ between ranks
            evaluated = model(x, by_rank[(data.rank + 1) % data.world_size])
        yield {"out": evaluated}
        yield STEP


def accumulate(orders: list[tuple[list[int], ...]], model: nn.Module, data: Data) -> Iterator[Any]:
    """Reduce in every third backward; a rank has unsharded gradients of units that it skips there."""
    for step in range(0, len(orders), 3):
        for micro, by_rank in enumerate(orders[step : step + 3]):
            quiet = micro < 2 and isinstance(model, FullyShardedDataParallel)
            with model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
                out = model(data.tensor(step + micro, 3, WIDTH), by_rank[data.rank])
                out.tanh().mean().backward()
        yield {"out": out}
        yield STEP


def two_graphs(orders: list[tuple[list[int], ...]], model: nn.Module, data: Data) -> Iterator[Any]:
    """Run two forwards, then the backwards in reverse order. Ranks skip different units in the second forward."""
    for step in range(0, len(orders) - 1, 2):
        outs = [model(data.tensor(at, 3, WIDTH), orders[at][data.rank]) for at in (step, step + 1)]
        for out in reversed(outs):
            out.tanh().mean().backward()
            yield {"out": out}
        yield STEP


def route(model: nn.Module, data: Data) -> Iterator[Any]:
    for step in range(5):
        x = data.tensor(step, 2, WIDTH)
        out = model(x)
        out.tanh().mean().backward()
        yield {"out": out, "x": x.grad}
        yield STEP


SOME_MODES = ((ShardingStrategy.FULL_SHARD, True), (ShardingStrategy.SHARD_GRAD_OP, False))
MORE_MODES = (*SOME_MODES, (ShardingStrategy.NO_SHARD, True))


def check(program: Program, make: Any, modes: Any = SOME_MODES, way: str = "auto", after: float | None = None) -> None:
    """Compare a program with plain replicas in float64, where rounding differences are far from wrong values.

    On 2 ranks the comparison is bit for bit, except for `after` units of rounding after the first step. On 3 ranks gloo
    chooses the order of additions.
    """
    torch.set_default_dtype(torch.float64)
    os.environ["FSDP_COLLECTIVES"] = way
    reference = Reference(make, program)
    ulps, after = (4, REASSOCIATED) if dist.get_world_size() == 3 else (0, after)
    for strategy, use_orig_params in modes:
        what = f"{way}, {strategy}, use_orig_params={use_orig_params}"
        reference.check(build(make(), strategy, use_orig_params), what, ulps=ulps, ulps_after_step=after)


@on_ranks(2, 3, timeout=120)
def test_ranks_that_skip_different_units_train_as_plain_replicas(world_size: int) -> None:
    """Some or all ranks skip units anywhere, and run them in different orders; with momentum."""
    make = partial(seeded, chain)
    check(partial(run_orders, ORDERS), make, MORE_MODES if world_size == 2 else SOME_MODES)
    if world_size == 2:
        check(partial(run_orders, ORDERS[:5]), make, [(ShardingStrategy.FULL_SHARD, False)], way="direct")
        check(partial(run_orders, ORDERS[1:]), partial(make, recompute=True), SOME_MODES[:1])


@on_ranks(2, 3, timeout=120)
def test_experts_and_accumulation_train_as_plain_replicas(world_size: int) -> None:
    """Nested units are routed by the data. Unsharded gradients exist for units that the reducing backward skips."""
    modes = MORE_MODES if world_size == 2 else SOME_MODES[:1]
    check(route, partial(seeded, experts), modes[:2])
    # A block that runs twice: (a + b) + (c + d), where the plain model has ((a + b) + c) + d.
    check(partial(accumulate, ORDERS), partial(seeded, chain), modes, after=REASSOCIATED)
    check(partial(two_graphs, ORDERS), partial(seeded, chain), modes[:1])


# -- other precisions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way, offload, reduce_dtype", [("native", False, torch.float32), ("direct", True, torch.bfloat16)]
)
@on_ranks(2)
def test_mixed_precision_equals_running_skipped_units_with_zeroed_outputs(
    way: str, offload: bool, reduce_dtype: torch.dtype
) -> None:
    """Steps in bfloat16, with evaluations in full precision and a backward through such a graph in between."""
    os.environ["FSDP_COLLECTIVES"], os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = way, "1"
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    options: dict[str, Any] = {"mixed_precision": precision, "cpu_offload": CPUOffload(offload_params=offload)}
    found = []
    for zeroes in (False, True):
        model = build(seeded(chain, zeroes=zeroes), ShardingStrategy.FULL_SHARD, True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for step, by_rank in enumerate(ORDERS[:5] + ORDERS[1:3]):
            model.train(step % 3 != 1)
            x, order = Data(dist.get_rank(), 2).tensor(step, 3, WIDTH), sorted(by_rank[dist.get_rank()])
            output = model(x, order)
            with torch.no_grad():
                model.train()(x, order)  # in bfloat16, so that the backward of an evaluation changes the precision
            output.float().tanh().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_parameters(model))
    assert_bit_equal(*found)


# -- DDP -----------------------------------------------------------------------------------------------------------


# Whether the two kinds of ranks use `at_times`, step by step; the steps of ACCUMULATED reduce nothing.
USES = [(True, False), (False, False), (True, False), (False, False), (False, False), (False, True), (True, True)]
ACCUMULATED = (2, 4)
AGREED = "agree on the parameters that are used"


@on_ranks(1, 2, 4)
def test_weight_decay_does_not_change_parameters_that_no_rank_uses(world_size: int) -> None:
    """A parameter that no rank used since the last step has no gradient, so AdamW does not change it.

    No rank uses `never`, and some ranks use `at_times`; `block`'s backward comes last.
    """

    def forward(m: Any, x: Tensor, use: bool) -> Tensor:
        x = torch.tanh(m.always(x if use else m.block(x)))
        return m.at_times(x) if use else x

    def partly() -> nn.Module:
        always, never, at_times = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        return Net(forward, always=always, never=never, at_times=at_times, block=Block(7)).double()

    for strategy, options in (
        [(ShardingStrategy.HYBRID_SHARD, {"device_mesh": init_device_mesh("cpu", (2, 2))})]
        if world_size == 4
        else [(ShardingStrategy.FULL_SHARD, {}), (ShardingStrategy.NO_SHARD, {})]
    ):
        plain = nn.parallel.DistributedDataParallel(seeded(partly), find_unused_parameters=True)
        before = {name: param.detach().clone() for name, param in plain.module.named_parameters()}
        model = build(seeded(partly), strategy, True, **options)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (plain, model)]
        data = Data(dist.get_rank(), world_size)
        for step, uses in enumerate(USES):
            what = f"{strategy}, step {step}"
            with record_collectives() as log:
                for m in (plain, model):
                    with m.no_sync() if step in ACCUMULATED else nullcontext():  # type: ignore[operator]
                        m(data.tensor(step, 3, WIDTH).double(), uses[data.rank % 2]).tanh().mean().backward()
            theirs = {name: param.grad for name, param in plain.module.named_parameters()}
            if step in ACCUMULATED:
                ours = [param.grad is None for param in model.parameters()]
                assert ours == [grad is None for grad in theirs.values()], what
                continue
            asked = [record for record in log.records if record.label == AGREED]
            groups = 0 if world_size == 1 else 2 if world_size == 4 else 1
            assert len(asked) == groups, what
            assert all(record.numel == len(theirs) and record.dtype == torch.uint8 for record in asked), asked
            grads = full_gradients(model)
            assert {name for name, grad in grads.items() if grad is None} == {
                name for name, grad in theirs.items() if grad is None
            }, what
            assert_equivalent(grads, theirs, what)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        after = full_parameters(model)
        assert_equivalent(after, {n: param.detach() for n, param in plain.module.named_parameters()}, f"{strategy}")
        for name in ("never.weight", "never.bias"):
            assert torch.equal(after[name], before[name])


# -- costs and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orders, units", [(([0, 2], [1, 3]), 4), (([1], [1, 2]), 2), (([3, 2, 0], [3, 0]), 3)])
@on_ranks(2)
def test_each_unit_that_some_rank_uses_is_gathered_twice_and_reduced_once(
    orders: tuple[list[int], ...], units: int
) -> None:
    """On every rank, once the order is known; a unit that no rank uses is neither gathered nor reduced."""
    model = build(seeded(chain), ShardingStrategy.FULL_SHARD, True)
    for step in range(3):
        with record_collectives() as log:
            model(Data(dist.get_rank(), 2).tensor(step, 3, WIDTH), orders[dist.get_rank()]).sum().backward()
        for record in log.records:
            assert str(record.label).startswith("agree ") == (record.op == "all_reduce"), record
    assert (log.count("all_gather"), log.count("reduce_scatter")) == (2 * units + 1, units + 1)


DISAGREEMENTS = {
    "frozen": (
        "Forward order differs",
        "rank 0 unit 'blocks.1': reduces bucket 0",
        "rank 1 unit 'blocks.1': reduces n",
    ),
    "no_sync": (
        "Forward order differs",
        "rank 0 the root unit: reduces bucket 0",
        "rank 1 the root unit: reduces nothing",
    ),
    "backward": ("Forward order differs", "rank 0 runs the backward; rank 1 runs the forward of the root unit"),
    "argument": ("have wrapped different models", "reduced where unused"),
}


@pytest.mark.parametrize("how", DISAGREEMENTS)
@on_ranks(2)
def test_passes_frozen_parameters_and_the_argument_must_agree_between_ranks(how: str) -> None:
    rank, net = dist.get_rank(), seeded(chain)
    options: dict[str, Any] = {"process_group": dist.new_group(), "wrap_policy": ModuleWrapPolicy({Block})}
    if how == "frozen" and rank == 1:
        net.get_submodule("blocks.1").requires_grad_(False)
    model = wrap(net, reduce_unused=how != "argument" or rank == 1, **options)
    x = torch.ones(2, WIDTH)
    with pytest.raises(RuntimeError) as caught:
        out = model(x, [0, 1])
        if how == "backward" and rank == 1:
            model(x, [0])
        with model.no_sync() if how == "no_sync" and rank == 1 else nullcontext():  # after equal forwards
            out.sum().backward()
    assert all(word in str(caught.value) for word in DISAGREEMENTS[how]), str(caught.value)


@on_ranks(2)
def test_reduce_unused_is_a_switch_of_a_built_model() -> None:
    """The model trains without it, with it, and without it again."""
    torch.set_default_dtype(torch.float64)
    make = partial(seeded, chain)
    reference = Reference(make, partial(run_orders, ORDERS[:5]))
    for strategy, use_orig_params in SOME_MODES:
        policy = ModuleWrapPolicy({Block})
        model = wrap(make(), strategy, use_orig_params, wrap_policy=policy)
        model(torch.ones(2, WIDTH), list(range(COUNT))).sum().backward()
        model.zero_grad()
        model.set_reduce_scatter_unused_params(True)
        reference.check(model, f"{strategy}, use_orig_params={use_orig_params}")
        model.set_reduce_scatter_unused_params(False)
        model(torch.ones(2, WIDTH), list(range(COUNT))).sum().backward()
        assert not any(unit.policy.tree.reduce_unused for unit in units_of(model))


@on_ranks(2)
def test_trees_of_several_groups_and_of_both_kinds_are_refused() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    net: Any = seeded(chain)
    net.blocks[0] = build(net.blocks[0], ShardingStrategy.FULL_SHARD, True, process_group=groups[0])
    model = wrap(net, use_orig_params=True, wrap_policy=None, reduce_unused=True, process_group=groups[1])
    with pytest.raises(NotImplementedError, match=r"reduce_unused=True.*one process group.*unit 'blocks.0'"):
        model(torch.ones(2, WIDTH), [0])
    net = seeded(chain)
    net.blocks[0] = build(net.blocks[0], ShardingStrategy.FULL_SHARD, True)
    model = wrap(net, use_orig_params=True, wrap_policy=None)
    with pytest.raises(ValueError, match=r"reduce_unused must be the same"):
        model(torch.ones(2, WIDTH), [0])
