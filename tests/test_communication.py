"""Collectives, counted exactly: number, size, order and time.

Per step, for a unit whose bucket has F bytes (padded to a multiple of the N ranks), in collectives and (input bytes,
output bytes) of each, natively:

                    gathers                 reductions                 under no_sync       without gradients
    FULL_SHARD      2 of (F/N, F); root 1   1 reduce-scatter (F, F/N)  as many gathers     1 gather
    SHARD_GRAD_OP   1                       1                          1 gather            1 gather
    NO_SHARD        0                       1 all-reduce (F, F)        0                   0

No gradient is reduced under no_sync. A unit that SHARD_GRAD_OP gathered there stays gathered until after the next
synchronised backward, or the next forward without gradients, and is not gathered again before.

A frozen bucket is gathered like a trained one and never reduced; a unit that no gradient reaches is gathered in forward
only. By the direct exchange each collective is one exchange of ((N - 1) F/N, (N - 1) F/N). At world size 1 there is
none. Small all-reduces of integers, by which ranks agree, are not counted.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.comm.collectives import PARTS, Communicator, Event, Gather
from fsdp.comm.groups import Groups
from fsdp.comm.lane.lane import Lane
from fsdp.comm.streams import streams_for
from fsdp.comm.transport import native
from fsdp.comm.transport.shared_memory import Sharing
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import new_group
from tests.harness.lockstep import STEP, Data, Reference, assert_at_rest
from tests.harness.models import ZOO, Net
from tests.harness.oracle import Schedule, adamw, assert_same_steps
from tests.harness.pairs import by_turns, pairwise
from tests.harness.pool import on_ranks
from tests.harness.process_groups import Collective, CollectiveLog, delay_collectives, record_collectives
from tests.harness.sharded import run_fsdp, wrap
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, STRATEGIES

ROOT = "the root unit"

# number of collectives by (label, operation, input bytes, output bytes)
Counts = Counter[tuple[str, str, int, int]]


def data(log: CollectiveLog) -> list[Collective]:
    """Select the collectives of parameters and gradients; check that the remaining ones are small and of integers."""
    moved = []
    for record in log.records:
        if record.op == "exchange" or (record.dtype is not None and record.dtype.is_floating_point):
            moved.append(record)
        else:
            assert record.op == "all_reduce" and record.nbytes <= 1024, f"unexpected: {record}"
    return moved


def counts(log: CollectiveLog) -> Counts:
    return Counter((str(r.label), r.op, r.input_nbytes, r.output_nbytes) for r in data(log))


def order(log: CollectiveLog, kind: str = "") -> list[str]:
    """Return labels of the collectives, or with `kind` ("gather") the names of their units."""
    labels = [str(r.label) for r in data(log)]
    return [label.removeprefix(kind + " ") for label in labels if label.startswith(kind)]


def differences(found: Counts, expected: Counts) -> str:
    lines = [f"\n  {found[key]} of {key}, expected {expected[key]}" for key in sorted(found | expected)]
    return "".join(line for line, key in zip(lines, sorted(found | expected)) if found[key] != expected[key])


# -- the formulas --------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """A unit of odd sizes with the given buckets: parameters, in order, by (dtype, trained)."""

    def __init__(self, *buckets: tuple[torch.dtype, bool]) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for number, (dtype, trained) in enumerate(buckets or ((torch.float32, True),)):
            self.weights.append(nn.Parameter(torch.full((5, 5), 0.1, dtype=dtype), requires_grad=trained))
            self.weights.append(nn.Parameter(torch.full((number + 1,), 0.1, dtype=dtype), requires_grad=trained))

    def forward(self, x: Tensor) -> Tensor:
        for matrix, vector in zip(self.weights[0::2], self.weights[1::2]):
            x = torch.tanh(x @ matrix.to(x.dtype)) + vector.sum().to(x.dtype)
        return x


def chain(*units: nn.Module) -> nn.Module:
    """Build units in sequence, and a root with a layer at the end."""
    return nn.Sequential(OrderedDict(units=nn.Sequential(*units), head=nn.Linear(5, 3)))


class Formula:
    """The expected collectives of each unit, from the plain model's parameters alone."""

    def __init__(self, strategy: ShardingStrategy, world_size: int, use_orig_params: bool, way: str) -> None:
        self.strategy = strategy if world_size > 1 else NO_SHARD
        self.world_size, self.use_orig_params, self.way = world_size, use_orig_params, way

    def nbytes(self, parameters: list[nn.Parameter]) -> int:
        """Return the size of a bucket's vector.

        Original parameters start at multiples of 16 bytes, and the end is padded to equal shards.
        """
        itemsize = parameters[0].element_size()
        alignment = 16 // itemsize if self.use_orig_params else 1
        end = 0
        for parameter in parameters:
            end = -(-end // alignment) * alignment + parameter.numel()
        ranks = 1 if self.strategy is NO_SHARD else self.world_size
        return -(-end // ranks) * ranks * itemsize

    def unit(self, name: str, parameters: list[nn.Parameter], gathers: int, reductions: int) -> Counts:
        """Return the collectives of one unit with so many gathers and reductions of each bucket."""
        buckets: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            buckets.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        found: Counts = Counter()
        exchanged = 0  # bytes of all buckets' gathers
        for (_, trained), members in buckets.items():
            whole = self.nbytes(members)
            part = whole // self.world_size
            remote = (self.world_size - 1) * part
            if self.strategy is NO_SHARD:
                forms = (None, ("all_reduce", whole, whole))
            elif self.way == "direct":
                forms, exchanged = (None, ("exchange", remote, remote)), exchanged + remote
            else:
                forms = (("all_gather", part, whole), ("reduce_scatter", whole, part))
            if forms[0] is not None:
                found[(f"gather {name}", *forms[0])] += gathers
            if trained and self.world_size > 1:
                found[(f"reduce {name}", *forms[1])] += reductions
        if exchanged:
            found[f"gather {name}", "exchange", exchanged, exchanged] += gathers
        return +found

    def gathers(self, is_root: bool, reached: bool, kept: bool) -> int:
        """Return the gathers of one step; `reached` by the backward, and `kept` gathered by the step before."""
        if kept and self.strategy is SHARD_GRAD_OP:
            return 0
        return 2 if self.strategy is FULL_SHARD and reached and not is_root else 1

    def step(self, model: Any, kind: str, before: str | None, unreached: tuple[int, ...] = ()) -> Counts:
        """Return the collectives of a step of this kind after one of kind `before`.

        Kinds are "step", "no_sync", "no_grad", and "forward" for one with gradients and without a backward.
        The gradient never reaches the `unreached` units.
        """
        total: Counts = Counter()
        parts: list[tuple[str, nn.Module]] = [(f"unit 'units.{i}'", unit) for i, unit in enumerate(model.units)]
        for index, (name, module) in enumerate([*parts, (ROOT, model.head)]):
            reached = kind in ("step", "no_sync") and index not in unreached
            gathers = self.gathers(name == ROOT, reached, before == "no_sync")
            total += self.unit(name, list(module.parameters()), gathers, int(kind == "step" and reached))
        return total


def step_of(model: FullyShardedDataParallel, kind: str, x: Tensor) -> None:
    if kind == "no_grad":
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    elif kind == "forward":
        model(x)
    else:
        with model.no_sync() if kind == "no_sync" else nullcontext():
            model(x).sum().backward()


KINDS = ["step", "step", "no_grad", "no_sync", "no_sync", "step", "no_grad", "step", "forward", "forward", "step"]
KINDS += ["forward", "no_grad"]


def check_formulas(
    units: list[Piece],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    kinds: list[str],
    *,
    unreached: tuple[int, ...] = (),
    way: str = "native",
) -> None:
    __tracebackhide__ = True
    formula = Formula(strategy, dist.get_world_size(), use_orig_params, way)
    pairs = zip(kinds, [None, *kinds])
    expected = [formula.step(chain(*units), kind, before, unreached) for kind, before in pairs]
    os.environ["FSDP_COLLECTIVES"] = way
    model = wrap(chain(*units), strategy, use_orig_params, wrap_policy=ModuleWrapPolicy({Piece}))
    for number, kind in enumerate(kinds):
        with record_collectives() as log:
            step_of(model, kind, torch.ones(2, 5))
        assert model.world_size > 1 or not log.records
        wrong = differences(counts(log), expected[number])
        assert not wrong, f"step {number} ({kind}):{wrong}"
        if kind != "forward":
            assert_at_rest(model, kind)


@pytest.mark.parametrize(("world_size", "strategy", "use_orig_params"), pairwise([1, 2, 3], STRATEGIES, [False, True]))
@on_ranks("world_size")
def test_collectives_per_step(world_size: int, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """The first step and later ones, with and without synchronisation, gradients and backward; none on one rank."""
    check_formulas([Piece(), Piece(), Piece()], strategy, use_orig_params, KINDS)


@pytest.mark.parametrize(("strategy", "use_orig_params"), by_turns(STRATEGIES, [False, True]))
@on_ranks(2)
def test_collectives_of_several_buckets(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """One gather for each dtype and for frozen parameters, and one reduction for each dtype of trained ones."""
    mixed = Piece((torch.float32, True), (torch.float64, True), (torch.float32, False), (torch.float32, True))
    check_formulas([Piece(), mixed, Piece()], strategy, use_orig_params, ["step", "step", "no_sync", "step"])


@pytest.mark.parametrize(("strategy", "use_orig_params"), by_turns(STRATEGIES, [True, False]))
@on_ranks(2)
def test_collectives_of_frozen_units(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """A frozen unit is gathered for backward only if gradients pass through it."""
    frozen = (torch.float32, False)
    units = [Piece(frozen), Piece(frozen), Piece(), Piece(frozen), Piece()]
    check_formulas(units, strategy, use_orig_params, ["step", "step", "no_sync", "step"], unreached=(0, 1))


@pytest.mark.parametrize(("world_size", "strategy"), [(2, FULL_SHARD), (3, SHARD_GRAD_OP)])
@on_ranks("world_size")
def test_collectives_by_direct_exchange(world_size: int, strategy: ShardingStrategy) -> None:
    """Every rank sends and receives (N - 1) / N of the vector; one exchange gathers all buckets of a unit."""
    units, kinds = [Piece(), Piece(*BUCKETS), Piece()], ["step", "step", "no_sync", "step"]
    check_formulas(units, strategy, True, kinds, way="direct")


BUCKETS = [(dtype, trained) for dtype in (torch.float32, torch.float64, torch.bfloat16) for trained in (True, False)]


@on_ranks(2)
def test_buckets_are_gathered_together() -> None:
    """By one collective of a backend that coalesces, or by posts of up to ``PARTS`` buckets."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = new_group()

    def parts_of(dtypes: list[torch.dtype]) -> list[Gather]:
        shards = [torch.arange(3 + i).to(dtype) + 100 * rank for i, dtype in enumerate(dtypes)]
        return [Gather(torch.empty(size * shard.numel(), dtype=shard.dtype), shard) for shard in shards]

    def check(parts: list[Gather]) -> None:
        for full, shard, _ in parts:
            numbers = torch.arange(shard.numel())
            assert torch.equal(full, torch.cat([numbers + 100 * source for source in range(size)]).to(full.dtype))

    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.int16, torch.float64]
    for way, count in (("native", 6), ("direct", 1), ("shared", None)):
        os.environ["FSDP_COLLECTIVES"] = way
        communicator = Communicator(Groups.of(group, replicate=False), streams_for(torch.device("cpu")))
        parts = parts_of(dtypes)
        if count is None:
            communicator.gather(parts[:PARTS], Event("gather", 7)).wait()
            check(parts[:PARTS])
            channel = Sharing.of(group).channel
            assert channel is not None and channel.collectives.number == 1
            parts = parts_of(dtypes)
            communicator.gather(parts, Event("gather", 7)).wait()
            assert channel.collectives.number == 3
        else:
            with record_collectives() as log:
                communicator.gather(parts, Event("gather", 7)).wait()
            assert len(log.records) == count
            for part in parts_of(dtypes):
                communicator.gather([part], Event("gather", 7)).wait()
                check([part])
        check(parts)
    lane = Lane.of(group)
    with mock.patch.object(native, "coalesces", lambda *_: True):  # gloo supports it, without a gain
        parts, count = parts_of(dtypes), lane.issued
        lane.gather([part[:2] for part in parts], Event("gather"), asynchronous=False)
        check(parts)
        assert lane.issued == count + 1, "one collective"


@on_ranks(2)
def test_complex_gradients_become_means() -> None:
    """Over shards and over replicas, on every transport."""
    rank, values = dist.get_rank(), torch.arange(4.0)
    for way in ("native", "direct", "shared"):
        os.environ["FSDP_COLLECTIVES"] = way
        group = new_group()
        communicator = Communicator(Groups(group, rank, 2, group, rank, 2), streams_for(torch.device("cpu")))
        out = torch.empty(2, dtype=torch.complex64)
        Lane.of(group, torch.device("cpu")).begin_pass()  # by the methods of the group, as in training
        communicator.reduce(out, torch.complex(values + rank, -values), Event("reduce", 1)).wait()
        means = torch.complex(values + 0.5, -values)
        assert torch.equal(out, means[2 * rank : 2 * rank + 2]), way
        communicator.average(out, Event("average", 2)).wait()
        assert torch.equal(out, (means[:2] + means[2:]) / 2), way


@on_ranks(2)
def test_large_messages_use_the_direct_exchange() -> None:
    """From 1 MiB on, unless the environment chooses the transport."""
    mebibyte = 2**18  # elements
    native, direct = ["all_gather", "reduce_scatter"], ["exchange", "exchange"]
    for numel, way, expected in (
        (mebibyte, "", direct),
        (mebibyte - 2, "", native),
        (mebibyte, "native", native),
        (16, "direct", direct),
        (mebibyte, "auto", direct),
    ):
        with mock.patch.dict(os.environ, FSDP_COLLECTIVES=way):
            model = wrap(nn.Linear(numel, 1, bias=False))
            with record_collectives() as log:
                model(torch.ones(1, numel)).sum().backward()
        assert [record.op for record in data(log)] == expected, (numel, way)


# -- an order that changes -----------------------------------------------------------------------------------------


USUAL = [0, 1, 2, 3, 4]
PLANS = {
    "skip": [0, 1, 3, 4],
    "swap": [0, 2, 1, 3, 4],
    "reverse": [4, 3, 2, 1, 0],
    "repeat": [0, 1, 1, 2, 3, 4],
    "early exit": [0, 1],
}


def planned(plans: list[list[int]]) -> Callable[[nn.Module, Data], Iterator[Any]]:
    def program(model: nn.Module, batches: Data) -> Iterator[Any]:
        for step, plan in enumerate(plans):
            x = batches.tensor(step, 2, 7)
            output = model(x, plan)
            output.square().mean().backward()
            yield {"output": output, "input": x.grad}
            yield STEP

    return program


def build_planned() -> nn.Module:
    """Build a model with an order of units chosen by the caller."""

    def forward(m: Any, x: Tensor, plan: list[int]) -> Tensor:
        for index in plan:
            x = torch.tanh(m.units[index](x))
        return m.head(x)

    torch.manual_seed(0)
    return Net(forward, units=nn.ModuleList([nn.Linear(7, 7) for _ in range(5)]), head=nn.Linear(7, 3))


def change_order(plans: list[list[int]], strategy: ShardingStrategy, use_orig_params: bool) -> list[tuple[int, int]]:
    """Compare training with the plain model's, and return the gathers in forward and backward of each step."""
    program = planned(plans)
    reference = Reference(build_planned, program)
    model = wrap(build_planned(), strategy, use_orig_params, wrap_policy=units_of)
    reference.check(model, "parity")  # at rest after every backward, too
    model = wrap(build_planned(), strategy, use_orig_params, wrap_policy=units_of)
    found = []
    for plan in plans:
        x = torch.ones(2, 7)
        with record_collectives() as ahead:
            output = model(x, plan)
        kept = {""} | {f"units.{index}" for index in plan if strategy is SHARD_GRAD_OP}
        gathered = {name for name, unit, _ in units_in(model) if unit.handles[0].full.untyped_storage().nbytes()}
        assert gathered == kept, f"{plan}: a unit that was prefetched and not used is kept for the backward"
        with record_collectives() as back:
            output.sum().backward()
        found.append((len(order(ahead, "gather")), len(order(back, "gather"))))
        assert_at_rest(model, str(plan))
    return found


def units_of(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or (isinstance(module, nn.Linear) and module.out_features == 7)


@pytest.mark.parametrize(
    ("change", "strategy"), by_turns([*PLANS], [FULL_SHARD, SHARD_GRAD_OP, FULL_SHARD, FULL_SHARD, SHARD_GRAD_OP])
)
@on_ranks(2)
def test_change_of_order_costs_at_most_one_gather_in_each_pass(change: str, strategy: ShardingStrategy) -> None:
    """From one step to the next, for good and back again."""
    plan = PLANS[change]
    plans = [USUAL, USUAL, plan, plan, USUAL, plan]
    found = change_order(plans, strategy, strategy is FULL_SHARD)
    for step, (current, (forward, backward)) in enumerate(zip(plans, found)):
        changed = int(step > 0 and plans[step - 1] != current)
        # Every forward of a unit and every unit's backward needs one, and the root one for both.
        needed, back = len(current) + 1, len(set(current))
        if strategy is SHARD_GRAD_OP:
            needed, back = len(set(current)) + 1, 0
        assert needed <= forward <= needed + changed, f"step {step}, forward: {forward} gathers, needs {needed}"
        assert back <= backward <= back + changed, f"step {step}, backward: {backward} gathers, needs {back}"


# -- late collectives ----------------------------------------------------------------------------------------------


DELAYED = [
    ("mlp", NO_SHARD, False, "native"),
    ("used-twice", FULL_SHARD, False, "direct"),
    ("lora", SHARD_GRAD_OP, False, "native"),
    ("segment-reentrant", FULL_SHARD, True, "native"),
]


@pytest.mark.parametrize(("name", "strategy", "use_orig_params", "way"), DELAYED)
@on_ranks(2)
def test_no_result_is_read_before_the_wait(
    name: str, strategy: ShardingStrategy, use_orig_params: bool, way: str
) -> None:
    """Collectives that start late and deliver only in `wait()` change no bit."""
    os.environ["FSDP_COLLECTIVES"] = way
    case, schedule = ZOO[name], Schedule(steps=2, micro=2)
    arguments: dict[str, Any] = {"strategy": strategy, "use_orig_params": use_orig_params, "no_sync": [True, False]}
    usual = run_fsdp(case, adamw, schedule, **arguments)
    assert all(step.loss.isfinite() for step in usual), "poison in the usual run"
    with delay_collectives(1, max_ms=1.0):
        delayed = run_fsdp(case, adamw, schedule, **arguments)
    assert_same_steps(delayed, usual)
