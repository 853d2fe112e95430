"""Gradients are those of the plain model, whatever the order of forwards and backwards.

Bit-equal to plain replicas whose gradients are averaged in rank order, where nothing is said: the same kernels see the
same values, a leaf's gradients are added in the order in which autograd delivers them, and the sum over 2 ranks has one
order. On 3 ranks the direct exchange sums in rank order too, while the all-reduce of NO_SHARD does not.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.runtime import hooks
from fsdp.runtime.unit import Unit, units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import (
    CLEAR,
    STEP,
    Data,
    Reference,
    assert_at_rest,
)
from tests.harness.meter import Meter, meter_available
from tests.harness.models import BlockWithUnused, LoraBlock, MlpBlock, SegmentBlock
from tests.harness.poison import poisoned_memory
from tests.harness.pool import run_ranks
from tests.harness.process_groups import CollectiveLog, record_collectives
from tests.harness.sharded import full_parameters, wrap

Mode = tuple[ShardingStrategy, bool]
FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
MODES = [(strategy, orig) for strategy in (FULL, GRAD_OP, NONE) for orig in (True, False)]
KINDS = ("none", "non-reentrant", "reentrant")


def by_turns(number: int) -> list[Mode]:
    """Each strategy, in one of the two modes: cases that are numbered have the one and the other by turns."""
    return [(strategy, (number + index) % 2 == 0) for index, strategy in enumerate((FULL, GRAD_OP, NONE))]


WIDTH = 7


def describe(mode: Mode) -> str:
    return f"{mode[0].name}, use_orig_params={mode[1]}"


def wrapped(build: Callable[[], nn.Module], mode: Mode, *blocks: type[nn.Module]) -> FullyShardedDataParallel:
    return wrap(build(), *mode, wrap_policy=ModuleWrapPolicy(set(blocks)))


def seeded(make: Callable[..., nn.Module], *args: Any) -> Callable[[], nn.Module]:
    """A builder of equal models."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return make(*args)

    return build


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def clear(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


# -- orders of forwards and backwards ----------------------------------------------------------------------------


class Chain(nn.Module):
    """Parameters of the root before and after the blocks, which may be checkpointed inside and outside."""

    def __init__(self, segment: str, outer: str) -> None:
        super().__init__()
        self.outer = outer
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([SegmentBlock(WIDTH, segment) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.outer == "none" else checkpoint(block, x, use_reentrant=self.outer == "reentrant")
        return self.head(x)


def one_pass(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    loss_of(model, x).backward()
    yield {"x": x.grad}


def two_passes(model: nn.Module, data: Data) -> Iterator[Any]:
    """Forward, forward, backward, backward."""
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 2, WIDTH)
    first, second = loss_of(model, x), loss_of(model, y)
    first.backward()
    yield {"x": x.grad}
    second.backward()
    yield {"y": y.grad}


def used_twice(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    loss_of(model, model(x)).backward()
    yield {"x": x.grad}


def two_losses(model: nn.Module, data: Data) -> Iterator[Any]:
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 2, WIDTH)
    (loss_of(model, x) + loss_of(model, y)).backward()
    yield {"x": x.grad, "y": y.grad}


def backward_twice(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    yield {"x": x.grad}
    loss.backward()
    yield {"x": x.grad}


def last_first(model: nn.Module, data: Data) -> Iterator[Any]:
    """Three forwards, whose backwards come in another order."""
    inputs = [data.tensor(i, 2 + i, WIDTH) for i in range(3)]
    losses = [loss_of(model, x) for x in inputs]
    for index in (2, 0, 1):
        losses[index].backward()
        yield {"x": inputs[index].grad}


def interleaved(model: nn.Module, data: Data) -> Iterator[Any]:
    """Forward-backward pairs that overlap."""
    x, y, z = (data.tensor(i, 3, WIDTH) for i in range(3))
    first, second = loss_of(model, x), loss_of(model, y)
    first.backward()
    yield {"x": x.grad}
    third = loss_of(model, z)
    second.backward()
    yield {"y": y.grad}
    third.backward()
    yield {"z": z.grad}


def retained(model: nn.Module, data: Data) -> Iterator[Any]:
    """Two graphs that are kept, each gone through twice, by turns."""
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 3, WIDTH)
    first, second = loss_of(model, x), loss_of(model, y)
    for _ in range(2):
        for loss, leaf in ((first, x), (second, y)):
            loss.backward(retain_graph=True)
            yield {"grad": leaf.grad}


def of_inputs_only(model: nn.Module, data: Data) -> Iterator[Any]:
    """Gradients with respect to inputs leave none on parameters; between them, normal passes."""
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 3, WIDTH)
    loss = loss_of(model, x)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    yield {"grad": grad}
    loss.backward()
    yield {"x": x.grad}
    (grad,) = torch.autograd.grad(loss_of(model, y), y)
    yield {"grad": grad}
    loss_of(model, y).backward(inputs=[y])
    yield {"y": y.grad}
    loss_of(model, y).backward()
    yield {"y": y.grad}


def forward_only(model: nn.Module, data: Data) -> Iterator[Any]:
    """Forwards whose backward comes late or never, and forwards without gradients in between, by turns."""
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 3, WIDTH)
    dropped = model(x).detach()
    late = loss_of(model, y)
    loss = loss_of(model, x)
    with torch.no_grad():
        first, second = model(y), model(x)
    loss.backward()
    yield {"x": x.grad, "first": first, "second": second, "dropped": dropped}
    model.eval()
    with torch.no_grad():
        first = model(y)
    with torch.inference_mode():
        second = model(x)
    model.train()
    loss_of(model, x).backward()
    yield {"x": x.grad, "first": first, "second": second}
    late.backward()
    yield {"y": y.grad}


SKETCH = (one_pass, two_passes, used_twice, two_losses, backward_twice)
MORE = (last_first, interleaved, retained, forward_only)


def _check_chain(
    segment: str, outer: str, programs: Sequence[Callable[..., Any]], modes: Sequence[Mode], debug: bool = False
) -> None:
    if "reentrant" in (segment, outer):  # of a segment inside another one's forward, or with gradients disabled
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    build = seeded(Chain, segment, outer)
    references = [Reference(build, program) for program in programs]
    # A reentrant checkpoint delivers a block's leaves once per call of the block, in tasks of their own, and each is
    # reduced for itself: (a + b) / 2 + (c + d) / 2, where the plain model has ((a + c) + (b + d)) / 2.
    reassociated = (used_twice, two_losses) if outer == "reentrant" else ()
    for mode in modes:
        with environment(FSDP_DEBUG="1" if debug else "0"):
            model = wrapped(build, mode, SegmentBlock)
            for reference, program in zip(references, programs):  # one model for all: nothing may be left behind
                what = f"{program.__name__}, {segment} in {outer}, {describe(mode)}, debug={debug}"
                ring = mode[0] is NONE and dist.get_world_size() > 2  # the all-reduce has an order of its own
                reference.check(model, what, ulps=8 if ring or program in reassociated else 0)
                clear(model)


def _sketch(outer: str) -> None:
    for number, segment in enumerate(KINDS, start=KINDS.index(outer)):
        _check_chain(segment, outer, SKETCH, by_turns(number))


@pytest.mark.parametrize("outer", KINDS)
def test_checkpointing_inside_and_outside(outer: str) -> None:
    """R20, R25, R26: the unit checkpointed, and segments of it, under five patterns; everything at rest after each."""
    run_ranks(2, _sketch, outer)


def _sketch_poisoned() -> None:
    for number, (segment, outer) in enumerate(itertools.product(KINDS, KINDS)):
        _check_chain(segment, outer, SKETCH, by_turns(number)[:2], debug=True)


def test_results_are_the_same_with_poison_on_release() -> None:
    """R21: a read of a released buffer would be NaN."""
    run_ranks(2, _sketch_poisoned)


def _more_orders() -> None:
    for number, outer in enumerate(KINDS):
        _check_chain("none", outer, MORE, by_turns(number))
    for outer in ("none", "non-reentrant"):  # the other kind refuses autograd.grad
        _check_chain(outer, outer, [of_inputs_only], by_turns(outer == "none"))
    _check_chain("non-reentrant", "reentrant", MORE, [(FULL, True)], debug=True)


def test_more_orders_of_passes() -> None:
    """R25, R26, R28: three at a time, overlapping pairs, kept graphs, no backward, gradients of inputs alone."""
    run_ranks(2, _more_orders)


def _three_ranks() -> None:
    with environment(FSDP_COLLECTIVES="direct"):
        for number, (segment, outer) in enumerate((("none", "none"), ("reentrant", "non-reentrant"))):
            _check_chain(segment, outer, (*SKETCH, interleaved), by_turns(number))


def test_orders_of_passes_on_three_ranks() -> None:
    run_ranks(3, _three_ranks)


class _Random:
    """A program of random passes: forwards that wait, backwards in any order, kept graphs, clearing, no gradients."""

    def __init__(self, seed: int) -> None:
        self.__name__ = f"random program {seed}"
        generator = torch.Generator().manual_seed(seed)
        self.choices = torch.randint(0, 1 << 20, (14, 2), generator=generator).tolist()

    def __call__(self, model: nn.Module, data: Data) -> Iterator[Any]:
        waiting: list[tuple[Tensor, Tensor]] = []
        for index, (what, which) in enumerate(self.choices):
            x = data.tensor(index, 2 + which % 3, WIDTH)
            kind = what % 8
            if kind < 3 or not waiting:
                waiting.append((x, loss_of(model, model(x) if kind == 0 else x)))
            elif kind < 6:
                leaf, loss = waiting[which % len(waiting)]
                if kind != 3:
                    waiting.pop(which % len(waiting))
                loss.backward(retain_graph=kind == 3)
                yield {"leaf": leaf.grad}
            elif kind == 6:
                with torch.no_grad():
                    model(x)
                waiting = waiting[-3:]
            else:
                yield CLEAR
        for leaf, loss in waiting:
            loss.backward()
            yield {"leaf": leaf.grad}


def _random_programs() -> None:
    for seed, (segment, outer) in enumerate([("none", "none"), ("reentrant", "none"), ("none", "non-reentrant")]):
        for i in range(2):
            _check_chain(segment, outer, [_Random(10 * seed + i)], by_turns(i))


def test_random_orders_of_passes() -> None:
    run_ranks(2, _random_programs)


# -- how often, and in what state --------------------------------------------------------------------------------


def counts(log: CollectiveLog, unit: str) -> tuple[float, int]:
    """(gathers, reductions) of a unit with a frozen bucket, which is gathered like the other and never reduced."""
    return log.count(label=f"gather {unit}") / 2, log.count(label=f"reduce {unit}")


def _count_collectives() -> None:
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    block = "unit 'blocks.0'"
    # (gathers, reductions) of a block: one gather per forward and one per backward, one reduction per backward. A
    # recomputation's gather is that of the backward; a reentrant one makes a backward of each call.
    plain = {one_pass: (2, 1), two_passes: (4, 2), used_twice: (3, 1), two_losses: (3, 1), backward_twice: (3, 2)}
    each_call = {used_twice: (4, 2), two_losses: (4, 2)}
    # The root is kept from its last forward to the end of the next backward, and gathered anew by each forward.
    roots = {one_pass: (1, 1), two_passes: (3, 2), used_twice: (2, 1), two_losses: (2, 1), backward_twice: (2, 2)}
    for segment, outer in itertools.product(KINDS, KINDS):
        build = seeded(Chain, segment, outer)
        model = wrapped(build, (FULL, True), SegmentBlock)
        for program in SKETCH:
            for attempt in range(2):  # with the recorded order of another program, and with its own
                with record_collectives() as log:
                    for _ in program(model, Data(dist.get_rank(), 2)):
                        pass
                wanted = {**plain, **(each_call if outer == "reentrant" else {})}[program]
                what = f"{program.__name__}, {segment} in {outer}, attempt {attempt}"
                assert counts(log, block) == wanted, f"{what}: {counts(log, block)}, expected {wanted}"
                ours = log.count(label="gather the root unit"), log.count(label="reduce the root unit")
                assert ours == roots[program], f"{what}, root: {ours}, expected {roots[program]}"


def test_checkpointed_units_gather_and_reduce_as_often_as_the_formula_says() -> None:
    """R20"""
    run_ranks(2, _count_collectives)


class Mlp(nn.Module):
    """Blocks with a parameter of one element; the root has parameters too. Width 7 at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([MlpBlock(WIDTH, 13), MlpBlock(13, 11), MlpBlock(11, WIDTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gathered(model: nn.Module) -> set[str]:
    """Names of the units whose full buffers have memory now ("" is the root)."""
    return {name for name, unit, _ in units_in(model) for h in unit.handles if h.full.untyped_storage().nbytes()}


def _rest_without_backward() -> None:
    x = torch.randn(3, WIDTH)
    for mode in MODES:
        if mode[0] is NONE:
            continue
        model = wrapped(seeded(Mlp), mode, MlpBlock)
        shards = [id(param) for param in model.parameters()]
        seen: list[set[str]] = []
        probe = model.head.register_forward_hook(lambda *args: seen.append(gathered(model)))  # noqa: B023
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                model(x)
                model(x)
            assert seen[-1] == {""}, f"after the blocks: {seen[-1]}, {describe(mode)}"  # whatever the strategy keeps
            assert_at_rest(model, f"{describe(mode)}, {context.__name__}")
        probe.remove()
        output = model(x)
        everything = {name for name, _, _ in units_in(model)}
        assert gathered(model) == ({""} if mode[0] is FULL else everything), describe(mode)
        assert [id(param) for param in model.parameters()] == shards, describe(mode)
        with torch.no_grad():
            model(x)
        assert_at_rest(model, f"{describe(mode)}, a forward without gradients after one with them")
        output.sum().backward()
        assert_at_rest(model, f"{describe(mode)}, backward after that")
        set_requires_grad(model, "", False)
        model(x)  # gradients are enabled, and nothing has one
        assert_at_rest(model, f"{describe(mode)}, a forward of frozen parameters")


def test_nothing_is_gathered_after_a_forward_without_gradients() -> None:
    """R28, Y59: with gradients, only what the strategy keeps for the backward, if there is one."""
    run_ranks(2, _rest_without_backward)


def _refused_second_order(model: nn.Module, x: Tensor, how: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        if how == "backward":
            loss_of(model, x).backward(create_graph=True)
        else:
            (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
            grad.square().sum().backward()


class Normed(nn.Module):
    """Its backward reads the weight by an operator that does not look at the size of the storage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


def _second_order() -> None:
    build = seeded(lambda: nn.Sequential(Normed(), Normed(), nn.Linear(WIDTH, WIDTH)))
    reference = Reference(build, one_pass)
    for mode, how in itertools.product(MODES, ("backward", "grad of inputs")):
        if mode[0] is NONE and how == "grad of inputs":
            continue  # nothing is ever released: the gradients are right, see below
        model = wrapped(build, mode, Normed)
        held = [(name, p, p.detach().clone()) for name, p in model.named_parameters()]
        x = torch.randn(3, WIDTH, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"(the root unit|parameter '\w+.\w+').*gradients of gradients"):
            _refused_second_order(model, x, how)
        for name, p, before in held:
            assert p.grad is None and torch.equal(p, before), f"{name}, {how}, {describe(mode)}"
        reference.check(model, f"the step after, {describe(mode)}, {how}")


def _of_parameters() -> None:
    reference = Reference(seeded(Mlp), one_pass)
    for mode in MODES:
        model = wrapped(seeded(Mlp), mode, MlpBlock)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss_of(model, torch.randn(3, WIDTH)), list(model.parameters()))
        reference.check(model, f"the step after, {describe(mode)}")


def test_gradients_of_shards_are_no_part_of_the_graph() -> None:
    """W7: torch says so, and the next step is right."""
    run_ranks(2, _of_parameters)


def test_gradients_of_gradients_are_refused_by_name_before_damage() -> None:
    """R26: `create_graph=True`, in `backward` and in `autograd.grad` of the inputs."""
    run_ranks(2, _second_order)


def _penalty(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    (grad.square().sum() + loss_of(model, x)).backward()
    yield {"x": x.grad}


def _penalty_unsharded() -> None:
    reference = Reference(seeded(Mlp), _penalty)
    for orig in (True, False):
        reference.check(wrapped(seeded(Mlp), (NONE, orig), MlpBlock), f"use_orig_params={orig}", ulps=8)


def test_gradient_penalty_without_sharding() -> None:
    run_ranks(2, _penalty_unsharded)


# -- structures --------------------------------------------------------------------------------------------------


class Level(nn.Module):
    """Units in units, each with parameters before and after the inner one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.inner = Level(depth - 1) if depth else None
        self.leaf = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.after(torch.tanh(self.before(x)))
        if self.inner is not None:
            y = y + self.inner(y) * self.leaf.mean() + self.inner(x)
        return x + self.after(self.before(y)) * self.leaf.sum()


class Shared(nn.Module):
    """One unit called three times in a forward, others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = MlpBlock(WIDTH, WIDTH), MlpBlock(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.other(self.shared(self.other(self.shared(x)))))


class Repeated(nn.Module):
    """One unit three times in a row, each a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MlpBlock(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


class Straddling(nn.Module):
    """A weight is used inside and outside of a reentrant segment, whose backward delivers its gradient by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(self.linear(y)), self.linear(x), use_reentrant=True)


class CheckpointedTwice(nn.Module):
    def __init__(self, inner: bool, outer: bool) -> None:
        super().__init__()
        self.reentrant = inner, outer
        self.first, self.block = MlpBlock(WIDTH, WIDTH), SegmentBlock(WIDTH, "non-reentrant")

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.reentrant
        return checkpoint(lambda y: checkpoint(self.block, y, use_reentrant=inner), self.first(x), use_reentrant=outer)


class Energy(nn.Module):
    """Takes a gradient of itself inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = Mlp()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            position = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.potential(position).sum(), position)
        return self.potential(x - force) * self.scale


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().abs() * 5).long().clamp(max=10)
        return self.out(self.table(tokens).sum(dim=1) + x)


class Auxiliary(nn.Module):
    """Blocks that leave a second loss in an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AuxiliaryBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + sum(block.loss for block in self.blocks)


class AuxiliaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        routes = torch.softmax(self.router(x), dim=-1)
        self.loss = routes.square().sum()
        return x + self.expert(x) * routes[:, :1]


class OddBlock(nn.Module):
    """A recurrent block, a convolution kept in channels-last order, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lstm(x.unsqueeze(1))[0].squeeze(1)
        image = hidden.reshape(1, 1, -1, WIDTH).expand(1, 3, -1, WIDTH)
        return hidden + self.conv(image).sum() + self.empty.sum()


def _sequence(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return seeded(lambda: nn.Sequential(*(make() for make in makers)))


class Structure(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    blocks: tuple[type[nn.Module], ...]
    ulps: float = 0


STRUCTURES = [
    # An input that several units share: its gradient is the sum of each unit's own sum.
    Structure("nested three deep", seeded(Level, 3), (Level,), ulps=64),
    Structure("one unit used three times", seeded(Shared), (MlpBlock,)),
    # Reduced three times: the mean of each call's gradients is taken before they are added up.
    Structure("one unit reduced three times in a row", seeded(Repeated), (MlpBlock,), ulps=8),
    Structure("a weight on both sides of a segment", _sequence(Straddling, Straddling), (Straddling,)),
    Structure(
        "a root without parameters", _sequence(lambda: MlpBlock(WIDTH, 5), lambda: MlpBlock(5, WIDTH)), (MlpBlock,)
    ),
    Structure("gradient inside the forward", seeded(Energy), (MlpBlock,)),
    Structure("gradient inside the forward of a nested unit", _sequence(Energy, Mlp), (Energy, MlpBlock)),
    Structure("sparse gradients", _sequence(SparseEmbedding, SparseEmbedding), (SparseEmbedding,)),
    Structure("second losses in attributes", seeded(Auxiliary), (AuxiliaryBlock,)),
    Structure("odd parameters", _sequence(OddBlock, OddBlock), (OddBlock,)),
]


def _check_structures() -> None:
    for structure in STRUCTURES:
        for number, program in enumerate((one_pass, used_twice)):
            reference = Reference(structure.build, program)
            for mode in by_turns(number):
                model = wrapped(structure.build, mode, *structure.blocks)
                for turn in range(2):  # the second one follows a recorded order
                    what = f"{structure.name}, {program.__name__}, {describe(mode)}, turn {turn}"
                    reference.check(model, what, ulps=structure.ulps)
                    clear(model)


def test_structures() -> None:
    """Nested, shared, parameterless, sparse, ... each once and twice in a pass, in all modes."""
    run_ranks(2, _check_structures)


def _nested_checkpoints() -> None:
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    for inner, outer in itertools.product((True, False), (True, False)):
        build = seeded(CheckpointedTwice, inner, outer)
        for number, program in enumerate((one_pass, two_passes, backward_twice), start=inner + outer):
            reference = Reference(build, program)
            for mode in by_turns(number):
                model = wrapped(build, mode, MlpBlock, SegmentBlock)
                reference.check(model, f"reentrant={(inner, outer)}, {program.__name__}, {describe(mode)}")


def test_a_unit_wrapped_twice_in_checkpoints() -> None:
    """R20"""
    run_ranks(2, _nested_checkpoints)


def _child_before(model: nn.Module, data: Data) -> Iterator[Any]:
    """A child is called by itself before the root ever ran; its graph lives on over the root's first pass."""
    x, y = data.tensor(0, 3, 13), data.tensor(1, 3, WIDTH)
    first, second = (loss_of(model.blocks[1], x) for _ in range(2))
    first.backward()
    yield {"x": x.grad}
    loss_of(model, y).backward()
    yield {"y": y.grad}
    second.backward()
    yield {"x": x.grad}


def _child_after(model: nn.Module, data: Data) -> Iterator[Any]:
    """A child is called by itself after the root, alone and between the root's forward and backward."""
    x, y = data.tensor(0, 3, 13), data.tensor(1, 3, WIDTH)
    loss_of(model, y).backward()
    yield {"y": y.grad}
    loss_of(model.blocks[1], x).backward()
    yield {"x": x.grad}
    whole, part = loss_of(model, y), loss_of(model.blocks[1], x)
    with torch.no_grad():
        alone = model.blocks[2](torch.tanh(x[:, :11]))
    whole.backward()
    yield {"y": y.grad, "alone": alone}
    part.backward()
    yield {"x": x.grad}
    (loss_of(model, y) + loss_of(model.blocks[0], y) + model.blocks[1](x).sum()).backward()
    yield {"x": x.grad, "y": y.grad}


def _children() -> None:
    for program in (_child_before, _child_after):
        reference = Reference(seeded(Mlp), program)
        for mode in MODES:
            reference.check(wrapped(seeded(Mlp), mode, MlpBlock), f"{program.__name__}, {describe(mode)}")


def test_a_child_called_directly() -> None:
    """Y63"""
    run_ranks(2, _children)


# -- frozen and unused -------------------------------------------------------------------------------------------


def set_requires_grad(model: nn.Module, prefix: str, flag: bool) -> None:
    """Freeze or unfreeze the parameters whose name starts with `prefix`, on what users hold of them."""
    found = 0
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            names = [unit.full_name(record) for record in bucket.layout.params]
            if bucket.params[0] is bucket.flat_param:
                names = [names[0]] if all(name.startswith(prefix) for name in names) else []
            for name, param in zip(names, bucket.params):
                if name.startswith(prefix):
                    param.requires_grad_(flag)
                    found += 1
    if not fsdp.shard_info(model):
        for name, param in model.named_parameters():
            if name.startswith(prefix):
                param.requires_grad_(flag)
                found += 1
    assert found, prefix


class _Freezing:
    """Steps in which `prefix` is frozen and unfrozen by turns, and is no member of the optimizer's step when frozen."""

    def __init__(self, prefix: str, *, starts: bool = True, need_input: bool = True) -> None:
        self.prefix, self.starts, self.need_input = prefix, starts, need_input

    def __call__(self, model: nn.Module, data: Data) -> Iterator[Any]:
        for step in range(6):
            if step % 2 == 0:
                set_requires_grad(model, self.prefix, self.starts == (step % 4 == 0))
            x = data.tensor(step, 3, WIDTH)
            if not self.need_input:
                x = x.detach()
            loss_of(model, x).backward()
            yield {"x": x.grad}
            if step == 4:
                loss_of(model, x).backward()
                yield {"x": x.grad}
            yield STEP


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 13).requires_grad_(False)
        self.blocks = nn.ModuleList([LoraBlock(13) for _ in range(3)])
        self.head = nn.Linear(13, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _freeze(debug: str) -> None:
    cases: list[tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...], _Freezing, bool]] = [
        # (model, its units, what is done, whether flat parameters can do it)
        (seeded(Mlp), (MlpBlock,), _Freezing("blocks.1."), True),
        (seeded(Mlp), (MlpBlock,), _Freezing("blocks.", need_input=False), True),
        (seeded(Mlp), (MlpBlock,), _Freezing("", starts=False), True),
        (seeded(Mlp), (MlpBlock,), _Freezing("blocks.1.linear.weight", starts=False), False),
        (seeded(Mlp), (MlpBlock,), _Freezing("embed.bias"), False),
        (seeded(Lora), (LoraBlock,), _Freezing("blocks.1.base.", starts=False), True),
        (seeded(Lora), (LoraBlock,), _Freezing("embed.", starts=False, need_input=False), True),
    ]
    with environment(FSDP_DEBUG=debug):
        for number, (build, blocks, program, flat_too) in enumerate(cases):
            reference = Reference(build, program)
            modes = by_turns(number) if flat_too else [mode for mode in MODES if mode[1]]
            for mode in modes[: 3 if debug == "0" else 1]:
                what = f"{program.prefix!r} starts {program.starts}, {describe(mode)}, debug={debug}"
                reference.check(wrapped(build, mode, *blocks), what)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_freezing_and_unfreezing(debug: str) -> None:
    """R29, R30, G14, AA12: whole units and parts of them, later and from the start; frozen ones have no gradient."""
    run_ranks(2, _freeze, debug)


class Probed(nn.Module):
    """Notes which units are gathered when the gradient of each block's input is there."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(5)])
        self.head = nn.Linear(13, WIDTH)
        self.seen: dict[int, set[str]] = {}

    def forward(self, x: Tensor, look: Callable[[], set[str]]) -> Tensor:
        for index, block in enumerate(self.blocks):
            if x.requires_grad:
                x.register_hook(lambda grad, index=index: self.seen.update({index: look()}))
            x = block(x)
        return self.head(x)


def _frozen_memory() -> None:
    for frozen, orig in itertools.product((True, False), (True, False)):
        build = seeded(Probed, lambda: nn.Sequential(MlpBlock(13, 13)).requires_grad_(not frozen))  # noqa: B023
        model = wrapped(build, (FULL, orig), nn.Sequential)
        for _ in range(3):
            with record_collectives() as log:
                x = torch.randn(3, 13, requires_grad=True)
                model(x, lambda: gathered(model)).square().mean().backward()  # noqa: B023
            for index in range(5):  # the block whose backward begins there, and the one that is gathered ahead
                allowed = {"", f"blocks.{index - 1}", f"blocks.{index - 2}"}
                if index == 0:  # no unit lies before it that would tell: it goes with the backward
                    allowed = {"", "blocks.0"}
                assert model.seen[index] <= allowed, f"at the input of block {index}: {model.seen[index]}"
            assert log.count("all_gather") == 2 * 5 + 1
            assert log.count("reduce_scatter") == (1 if frozen else 6)
            clear(model)
        for unit in fsdp.shard_info(model):
            for bucket in unit.buckets:
                assert all(param.grad is None for param in bucket.params)


def test_frozen_units_are_released_in_backward_and_never_reduced() -> None:
    """R29, R30"""
    run_ranks(2, _frozen_memory)


def _lora_traffic() -> None:
    for orig in (True, False):
        model = wrapped(seeded(Lora), (FULL, orig), LoraBlock)
        buckets = [bucket for unit in fsdp.shard_info(model) for bucket in unit.buckets]
        trained = sum(bucket.layout.padded_numel for bucket in buckets if bucket.flat_param.requires_grad)
        with record_collectives() as log:
            loss_of(model, torch.randn(3, WIDTH)).backward()
        assert log.count("reduce_scatter") == 4  # one per trained bucket
        assert log.nbytes("reduce_scatter") == 4 * trained, (log.nbytes("reduce_scatter"), trained)


def test_reductions_of_a_lora_model_carry_the_adapters_alone() -> None:
    """R30"""
    run_ranks(2, _lora_traffic)


class Switch(nn.Module):
    """Two branches, and a bucket of its own that the right one uses alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor, which: str) -> Tensor:
        if which == "right":
            x = x * self.precise.sum().float()
        return torch.tanh(getattr(self, which)(x))


class Switched(nn.Module):
    """Blocks of which each pass uses one branch, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Switch() for _ in range(3)])
        self.plain = BlockWithUnused(WIDTH)

    def forward(self, x: Tensor, branches: Sequence[str]) -> Tensor:
        for block, branch in zip(self.blocks, branches):
            if branch != "skip":
                x = block(x, branch)
        return self.plain(x)


def _switching(model: nn.Module, data: Data) -> Iterator[Any]:
    for index, branches in enumerate(
        [("left", "left", "left"), ("right", "left", "right"), ("skip", "right", "left"), ("left", "skip", "skip")] * 2
    ):
        x = data.tensor(index, 3, WIDTH)
        model(x, branches).square().mean().backward()
        yield {"x": x.grad}
        if index % 3 != 1:
            yield CLEAR


def _unused() -> None:
    reference = Reference(seeded(Switched), _switching)
    for mode in MODES:
        debug = str(int(mode in by_turns(1)))
        with environment(FSDP_DEBUG=debug):
            model = wrapped(seeded(Switched), mode, Switch, BlockWithUnused)
            reference.check(model, f"{describe(mode)}, debug={debug}")
    with poisoned_memory():
        for mode in by_turns(0):
            model = wrapped(seeded(Switched), mode, Switch, BlockWithUnused)
            reference.check(model, f"{describe(mode)}, fresh memory is NaN")


def test_unused_parameters_get_zeros_and_unused_units_nothing() -> None:
    """R31, R18, G12: no slot carries the bytes of an earlier pass, of another unit, or of fresh memory."""
    run_ranks(2, _unused)


# -- outputs and inputs ------------------------------------------------------------------------------------------


class Two(NamedTuple):
    wide: Tensor
    narrow: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    wide: Tensor
    narrow: Tensor
    note: str = "text"
    nothing: Any = None


class ModelOutput(collections.OrderedDict[str, Any]):
    """A dictionary whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Holder:
    def __init__(self, wide: Tensor, narrow: Tensor) -> None:
        self.inner = [wide, {"narrow": narrow}]
        self.itself = self


class Slotted:
    __slots__ = ("narrow", "unset", "wide")

    def __init__(self, wide: Tensor, narrow: Tensor) -> None:
        self.wide, self.narrow = wide, narrow


PACKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, None, b),
    "list": lambda a, b: [1, a, b, "text"],
    "dict": lambda a, b: {"a": a, 3: b, "nothing": None},
    "OrderedDict": lambda a, b: collections.OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=[a], b=[b]),
    "ModelOutput": lambda a, b: ModelOutput(wide=a, narrow=b, flag=True),
    "named tuple": Two,
    "set": lambda a, b: {a, b},
    "frozenset": lambda a, b: frozenset((a, b)),
    "deque": lambda a, b: collections.deque([a, b]),
    "dataclass": Record,
    "dataclass class in a list": lambda a, b: [Record, Record(a, b)],
    "nested": lambda a, b: ({"x": [(a,), Two(b, b)]}, [[]], {"y": Record(a, b)}),
    "object": Holder,
    "object with slots": lambda a, b: (Slotted(a, b),),
}


def unpack(value: Any) -> tuple[Tensor, Tensor]:
    """The wide and the narrow tensor in a nest, told apart by their last dimension."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()

    def walk(item: Any) -> None:
        if isinstance(item, Tensor):
            found[item.shape[-1]] = item
            return
        if id(item) in seen or isinstance(item, (str, type, type(None), int)):
            return
        seen.add(id(item))
        if isinstance(item, dict):
            item = list(item.values())
        elif not isinstance(item, (list, tuple, set, frozenset, collections.deque)):
            names = getattr(type(item), "__slots__", None) or vars(item)
            item = [getattr(item, name, None) for name in names]
        for part in item:
            walk(part)

    walk(value)
    return found[WIDTH], found[3]


class PackedBlock(nn.Module):
    """Takes and returns two tensors in a container. Keeps its output, so that callers can see whether it is theirs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

    def forward(self, packed: Any) -> Any:
        wide, narrow = unpack(packed)
        wide = torch.tanh(self.wide(wide))
        narrow = torch.tanh(self.narrow(narrow)) + wide[:, :3]
        self.kept = PACKS[self.kind](wide, narrow)
        self.kept_nodes = [t.grad_fn for t in unpack(self.kept)]
        return self.kept


class PackedModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([PackedBlock(kind) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, side: Any) -> Any:
        value = PACKS[self.kind](x, unpack(side)[1])
        for block in self.blocks:
            output = block(value)
            if output is not block.kept or [t.grad_fn for t in unpack(output)] != block.kept_nodes:
                raise AssertionError(f"{self.kind}: the output is not what the module returned")
            value = output
        wide, narrow = unpack(value)
        self.kept = PACKS[self.kind](self.head(wide), narrow * 2)
        return self.kept


def _packed_program(kind: str) -> Callable[[nn.Module, Data], Iterator[Any]]:
    def program(model: nn.Module, data: Data) -> Iterator[Any]:
        x, y = data.tensor(0, 4, WIDTH), data.tensor(1, 4, 3)

        def call(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            output = model(x, side=PACKS[kind](x, y))
            kept = next(m for m in model.modules() if isinstance(m, PackedModel)).kept
            assert output is kept
            return unpack(output)

        wide, narrow = call(x, y)
        (wide.square().mean() + narrow.square().mean()).backward()  # everything is used
        yield {"x": x.grad, "y": y.grad}
        wide, narrow = call(x, y.detach())  # one output is not used, one input needs no gradient
        wide.square().mean().backward()
        yield {"x": x.grad, "y": y.grad}
        wide, narrow = call(x.detach(), y)  # the root's own parameters are not reached
        narrow.square().mean().backward()
        yield {"x": x.grad, "y": y.grad}
        wide, narrow = call(x.detach(), y.detach())
        wide.mul_(2.0)  # callers change outputs in place, a leaf of the graph or not
        narrow.add_(1.0)
        (wide.square().mean() + narrow.square().mean()).backward()
        yield {"wide": wide.detach()}

    program.__name__ = kind
    return program


def _outputs() -> None:
    for number, kind in enumerate(PACKS):
        build = seeded(PackedModel, kind)
        reference = Reference(build, _packed_program(kind))
        for mode in by_turns(number):
            reference.check(wrapped(build, mode, PackedBlock), f"{kind}, {describe(mode)}")


def test_outputs_and_inputs_in_containers() -> None:
    """R32, AA16: found wherever they are, the same objects as the module returned, changed in place, unused."""
    run_ranks(2, _outputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, Any]:
        return self.lstm(packed)


class RecurrentModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Recurrent(), Recurrent()])

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, Any]:
        for block in self.blocks:
            packed, state = block(packed)
        return packed, state


def _sequences(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 5, 3, WIDTH)
    for lengths, part in (([2, 5, 3], "data"), ([5, 1, 4], "state"), ([1, 2, 5], "both")):
        packed, (hidden, cell) = model(pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False))
        loss = packed.data.square().mean() if part != "state" else hidden.sum()
        (loss + cell.sum() if part == "both" else loss).backward()
        yield {"x": x.grad}


def _packed_sequences() -> None:
    reference = Reference(seeded(RecurrentModel), _sequences)
    for mode in MODES:
        reference.check(wrapped(seeded(RecurrentModel), mode, Recurrent), describe(mode))


def test_packed_sequences() -> None:
    """R32"""
    run_ranks(2, _packed_sequences)


class InPlace(nn.Module):
    """Changes its input, returns it, returns views of it, and has several inputs that require grad."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
        if self.how == "input changed":
            x.mul_(2.0)
            return torch.tanh(self.linear(x)) * self.gain, y
        if self.how == "view of the input changed":
            x[:, 1:3].add_(y[:, 1:3] * self.gain[1:3])
            return self.linear(x), y
        if self.how == "input returned":
            return x, self.linear(y) * self.gain
        if self.how == "changed input returned":
            return x.add_(self.linear(y)), y * self.gain
        if self.how == "view of the input returned":
            return x.view(-1, WIDTH), self.linear(x + y) * self.gain
        if self.how == "output a view":
            both = torch.cat([self.linear(x), self.linear(y) * self.gain])
            return both[: len(x)], both[len(x) :]
        if self.how == "detached":
            return self.linear(x.detach()) * self.gain + y, y
        if self.how == "input unused":
            return self.linear(y) * self.gain, y * 2
        if self.how == "mask":
            assert mask is not None
            return torch.where(mask, self.linear(x), y) * self.gain * scale, y
        assert self.how == "output changed"
        return self.linear(x) * self.gain, self.linear(y)


class InPlaceModel(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList([InPlace(how) for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x * 1.0, y * 1.0  # leaves may not be changed in place
        for block in self.blocks:
            if self.how == "mask":
                x, y = block(x, y, x.detach() > 0, scale=0.5)
            else:
                x, y = block(x, y)
            if self.how == "output changed":
                x.mul_(0.5).relu_()
                y += x
            elif self.how == "output a view":
                x = x * 2
                y = torch.sin(y)
        return x, y


def _two_inputs(model: nn.Module, data: Data) -> Iterator[Any]:
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 3, WIDTH)
    for first, second, use in ((x, y, 3), (x.detach(), y, 3), (x, y.detach(), 1), (x, x, 3), (x, y, 2)):
        a, b = model(first, second)
        (a.square().mean() * (use & 1) + b.sin().mean() * (use >> 1)).backward()
        yield {"x": x.grad, "y": y.grad, "a": a.detach()}
    a, b = model(x, y)
    _, d = model(y, x)
    (a.sum() + d.square().sum()).backward()
    yield {"x": x.grad, "y": y.grad}


IN_PLACE = (
    "input changed",
    "view of the input changed",
    "input returned",
    "changed input returned",
    "view of the input returned",
    "output a view",
    "detached",
    "input unused",
    "mask",
    "output changed",
)


def _in_place() -> None:
    for number, how in enumerate(IN_PLACE):
        build = seeded(InPlaceModel, how)
        reference = Reference(build, _two_inputs)
        for mode in by_turns(number):
            reference.check(wrapped(build, mode, InPlace), f"{how}, {describe(mode)}")


def test_inputs_and_outputs_changed_in_place_or_passed_through() -> None:
    """R32, AA16"""
    run_ranks(2, _in_place)


class GivesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.linear.weight


class TiedOutside(nn.Module):
    """A unit hands its weight to the parent, which computes with it; the root hands out a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GivesWeight(), MlpBlock(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, weight = self.first(x)
        return F.linear(self.second(h), weight, self.bias), self.bias, weight


def _weights_out(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    output, _, _ = model(x)
    output.square().mean().backward()
    yield {"x": x.grad}
    output, bias, weight = model(x)
    (output.square().mean() + bias.square().sum()).backward()
    yield {"x": x.grad}
    _, bias, _ = model(x)
    bias.sum().backward()
    yield {}
    _, _, weight = model(x)
    torch.autograd.backward([weight], [torch.full((WIDTH, WIDTH), 2.0)])
    yield {}
    output, _, _ = model(x)
    output.sum().backward()
    yield {"x": x.grad}


def _parameters_out() -> None:
    build = seeded(TiedOutside)
    reference = Reference(build, _weights_out)
    for mode in MODES:
        # What was handed out stays readable until the next forward, so its unit is not at rest.
        model = wrapped(build, mode, GivesWeight, MlpBlock)
        reference.check(model, describe(mode), at_rest=False)
        with torch.no_grad():
            model.second(torch.randn(3, WIDTH))
        assert_at_rest(model, describe(mode))


def test_outputs_that_are_parameters() -> None:
    """R32, AA16: of the root, and of a nested unit, read after the unit's forward."""
    run_ranks(2, _parameters_out)


# -- stale copies ------------------------------------------------------------------------------------------------


def _debugged_read() -> None:
    def refuses(weight: Tensor) -> None:
        for read in (Tensor.isnan, lambda weight: weight @ torch.ones(13)):
            with pytest.raises(RuntimeError, match=r"parameter 'linear\.weight' of unit 'blocks\.1' is sharded"):
                read(weight)

    with environment(FSDP_DEBUG="1"):
        for strategy, orig in MODES:
            if strategy is NONE:
                continue
            model = wrapped(seeded(Mlp), (strategy, orig), MlpBlock)
            kept: list[Tensor] = []
            block = model.blocks[1].module
            block.register_forward_hook(lambda module, args, output: kept.append(module.linear.weight))  # noqa: B023
            loss = loss_of(model, torch.randn(3, WIDTH))
            weight = kept[0]
            assert weight.shape == (11, 13)
            if strategy is FULL:
                refuses(weight)
            else:
                assert not weight.isnan().any()
            loss.backward()
            refuses(weight)
            with torch.no_grad():
                model(torch.randn(3, WIDTH))
            assert kept[1] is weight
            refuses(weight)


def test_a_weight_kept_over_the_reshard_is_refused_in_debug_mode() -> None:
    """R22"""
    run_ranks(2, _debugged_read)


def _repeated_calls() -> None:
    for strategy, orig in MODES:
        model = wrapped(seeded(Mlp), (strategy, orig), MlpBlock)
        loss_of(model, torch.randn(3, WIDTH)).backward()
        unit: Unit = model.blocks[1]._fsdp_unit
        context = unit.context
        assert context is not None
        full = seeded(Mlp)().blocks[1].linear.weight
        with record_collectives() as log:
            unit.reshard(context)
            unit.reshard(context)
            assert log.count("all_gather") == 0
            for _ in range(2):
                unit.unshard(context, refill=False)
                assert torch.equal(model.blocks[1].module.linear.weight, full)
            assert log.count("all_gather") == (0 if strategy is NONE else 1)
            unit.reshard(context)
            unit.reshard(context)
            unit.unshard(context, refill=True)
            assert torch.equal(model.blocks[1].module.linear.weight, full)
            unit.reshard(context)
            assert log.count("all_gather") == (0 if strategy is NONE else 2)
        assert_at_rest(model, describe((strategy, orig)))


def test_unshard_and_reshard_are_idempotent() -> None:
    """R23: twice, and one before the other, without another collective."""
    run_ranks(2, _repeated_calls)


Params = list[nn.Parameter]


def _step(params: Params, factor: float) -> None:
    for p in params:
        p.grad = p.detach() * (1 - factor)  # exact, as is the step
    torch.optim.SGD(params, lr=1.0).step()
    for p in params:
        p.grad = None


@torch.no_grad()
def _scale_in_place(params: Params, factor: float) -> None:
    for p in params:
        p.mul_(factor)


def _scale_data(params: Params, factor: float) -> None:
    for p in params:
        p.data.mul_(factor)


@torch.no_grad()
def _copy(params: Params, factor: float) -> None:
    for p in params:
        p.copy_(p * factor)


def _assign_data(params: Params, factor: float) -> None:
    for p in params:
        p.data = p.data * factor


@torch.no_grad()
def _foreach(params: Params, factor: float) -> None:
    torch._foreach_mul_(params, factor)


WRITES = (_step, _scale_in_place, _scale_data, _copy, _foreach)
BEFORE = ("no_grad", "inference_mode", "grad, no backward", "eval", "backward")


def _stale_reads(wrap_model: Callable[[nn.Module], nn.Module], writes: Sequence[Callable[..., None]]) -> set[str]:
    """Which forwards used other parameters than those that were written to the shards since the forward before."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    plain, model = seeded(Mlp)(), wrap_model(seeded(Mlp)())
    with torch.no_grad():  # inference mode first has a test of its own
        model(x)
    wrong = set()
    for write, before, factor in itertools.product(writes, BEFORE, (0.5, 4.0, 0.5)):
        for each in (plain, model):
            each.train(before != "eval")
            if before == "inference_mode":
                with torch.inference_mode():
                    each(x)
            elif before == "backward":
                each(x).sum().backward()
            else:
                with torch.set_grad_enabled(before.startswith("grad")):
                    each(x)
        held = [list(each.parameters()) for each in (plain, model)]
        for params in held:
            write(params, factor)
        with torch.set_grad_enabled(factor == 0.5):
            output = model(x)
            if not torch.equal(output, plain(x)):
                wrong.add(f"{write.__name__} after {before}, grad {torch.is_grad_enabled()}")
        del output
        for each in held:
            for p in each:
                p.grad = None
    return wrong


def _no_stale_copies() -> None:
    for mode in MODES:
        wrong = _stale_reads(
            lambda module: wrap(module, *mode, wrap_policy=ModuleWrapPolicy({MlpBlock})),  # noqa: B023
            (*WRITES, _assign_data)[mode in by_turns(0) :: 2],
        )
        assert not wrong, f"{describe(mode)}: {sorted(wrong)}"


def test_no_forward_uses_a_copy_from_before_the_parameters_changed() -> None:
    """Y59, G18: written by an optimizer, in place, by `copy_`, by `.data`, after forwards of every kind."""
    run_ranks(2, _no_stale_copies)


def _stale_copies_of_torch() -> list[set[str]]:
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

    warnings.simplefilter("ignore")
    return [
        _stale_reads(
            lambda module: TorchFSDP(
                module,
                auto_wrap_policy=TorchPolicy({MlpBlock}),
                sharding_strategy=strategy,  # noqa: B023
                device_id=torch.device("cpu"),
                use_orig_params=True,
            ),
            (_scale_in_place,),
        )
        for strategy in (TorchStrategy.FULL_SHARD, TorchStrategy.SHARD_GRAD_OP)
    ]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the defect is known of this version of torch")
def test_the_check_for_stale_copies_finds_those_of_torch() -> None:
    """Y59: torch's FSDP1 keeps its root gathered after a forward without gradients, and SHARD_GRAD_OP every unit."""
    for wrong in run_ranks(2, _stale_copies_of_torch)[0]:
        assert {"_scale_in_place after no_grad, grad True", "_scale_in_place after eval, grad False"} <= wrong, wrong


def _written_inside_autocast() -> None:
    x = torch.randn(3, WIDTH)
    for mode, grads in itertools.product(MODES, (True, False)):
        if mode[0] is NONE:
            continue  # the parameters are the forward's own, and autocast keeps their casts as it does plain ones
        plain, model = seeded(Mlp)(), wrapped(seeded(Mlp), mode, MlpBlock)
        held = list(model.parameters())
        outputs = []
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grads):
            for _ in range(3):
                outputs.append(model(x))
                _scale_in_place(held, 0.5)
        for index, output in enumerate(outputs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(output, plain(x)), f"forward {index}, gradients {grads}, {describe(mode)}"
            _scale_in_place(list(plain.parameters()), 0.5)


def test_no_forward_uses_a_cast_from_before_the_parameters_changed() -> None:
    """Y59: written between forwards inside one block of autocast, which keeps a cast of each weight."""
    run_ranks(2, _written_inside_autocast)


def _memory_inside_autocast() -> None:
    width, count, meter = 500, 6, Meter()
    unit, cast = 4 * width * width, 2 * width * width  # float32, bfloat16
    x = torch.randn(2, width)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    for orig in (True, False):
        blocks = seeded(lambda: nn.Sequential(*(MlpBlock(width, width) for _ in range(count))))
        model = wrapped(blocks, (FULL, orig), MlpBlock)
        seen: list[int] = []
        model[-1].module.register_forward_hook(lambda *args: seen.append(meter.live()))  # noqa: B023
        for _ in range(2):  # the first time, caches are filled and the order of the units becomes known
            with autocast():
                loss_of(model, x).backward()
                clear(model)
                with torch.no_grad():
                    model(x)
        base = meter.at_rest()
        with autocast():
            with torch.no_grad():
                model(x)
            held = {"in the last unit's forward": seen[-1] - base - 2 * unit, "after it": meter.at_rest() - base}
            loss_of(model, x).backward()
            clear(model)
            held["after a backward"] = meter.at_rest() - base
        assert all(nbytes < 1.5 * cast for nbytes in held.values()), f"use_orig_params={orig}: {held}, a cast is {cast}"


@pytest.mark.skipif(not meter_available(), reason="needs glibc's mallinfo2")
def test_autocast_keeps_no_cast_of_a_unit_that_was_resharded() -> None:
    """R28: inside one block of autocast, which would keep one of each until it ends."""
    run_ranks(2, _memory_inside_autocast)


def _inference_first(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    with torch.inference_mode():
        first = model(x)
    for _ in range(3):
        loss_of(model, x).backward()
        yield {"x": x.grad, "first": first}
        with torch.inference_mode():
            model.eval()
            first = model(x)
            model.train()
        yield STEP


def _inference() -> None:
    reference = Reference(seeded(Mlp), _inference_first)
    for mode in MODES:
        reference.check(wrapped(seeded(Mlp), mode, MlpBlock), f"then trained, {describe(mode)}", ulps_after_step=64)
        with torch.inference_mode():
            model = wrapped(seeded(Mlp), mode, MlpBlock)
        assert not any(p.is_inference() for p in model.parameters())


def test_inference_mode_first() -> None:
    """Y67, W6: training after it is right. Built inside it, the parameters are ordinary ones."""
    run_ranks(2, _inference)


# -- faults ------------------------------------------------------------------------------------------------------


class Fault(Exception):
    pass


class Trap:
    """Raises `Fault` at a place when it is passed for the `count`-th time after being set; on every rank alike."""

    place, count = "", 0

    @classmethod
    def set(cls, place: str, count: int = 1) -> None:
        cls.place, cls.count = place, count

    @classmethod
    def passed(cls, place: str) -> None:
        if place == cls.place:
            cls.count -= 1
            if cls.count == 0:
                cls.place = ""
                raise Fault(place)


class TrapInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Trap.passed(ctx.place)
        return grad, None


class Trapped(nn.Module):
    def __init__(self, index: int, width: int = WIDTH) -> None:
        super().__init__()
        self.index = index
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        Trap.passed(f"forward {self.index}")
        return self.second(TrapInBackward.apply(x, f"backward {self.index}"))


class TrappedModel(nn.Module):
    def __init__(self, outer: str, width: int = WIDTH) -> None:
        super().__init__()
        self.outer = outer
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Trapped(i, width) for i in range(3)])
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        Trap.passed("forward before")
        x = TrapInBackward.apply(x, "backward last")
        for block in self.blocks:
            x = block(x) if self.outer == "none" else checkpoint(block, x, use_reentrant=self.outer == "reentrant")
        Trap.passed("forward after")
        return self.head(TrapInBackward.apply(x, "backward first"))


PLACES = ["before", "after", *range(3)]
FAULTS = [(f"forward {place}", 1) for place in PLACES]
FAULTS += [(f"backward {place}", 1) for place in ("first", 2, 1, 0, "last")]
RECOMPUTED = [(f"forward {index}", 2) for index in range(3)]  # passed in forward, raises when recomputed


def _faulty(faults: Sequence[tuple[str, int]]) -> Callable[[nn.Module, Data], Iterator[Any]]:
    """A step after each fault, whose gradients are cleared as a training loop would; the last fault has another pass
    waiting, whose backward comes after it."""

    def program(model: nn.Module, data: Data) -> Iterator[Any]:
        for step, fault in enumerate(faults):
            x, y = data.tensor(step, 3, WIDTH), data.tensor(100 + step, 2, WIDTH)
            waiting = loss_of(model, y) if step % 2 else None
            Trap.set(*fault)
            before = [id(param) for param in model.parameters()]
            try:
                loss_of(model, x).backward()
            except Fault:
                pass
            else:
                raise AssertionError(f"{fault} did not happen")
            assert [id(param) for param in model.parameters()] == before, f"parameters() after {fault}"
            yield CLEAR
            x.grad = None
            if waiting is not None:  # its graph is whole
                waiting.backward()
                yield {"y": y.grad}
            loss_of(model, x).backward()
            yield {"x": x.grad}
            if step % 3 == 2:
                yield STEP

    return program


def _faults(debug: str) -> None:
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    with environment(FSDP_DEBUG=debug):
        for number, outer in enumerate(KINDS):
            build = seeded(TrappedModel, outer)
            faults = FAULTS if outer == "none" else RECOMPUTED + FAULTS[-3:] + RECOMPUTED
            reference = Reference(build, _faulty(faults))
            for mode in by_turns(number)[: 3 if debug == "0" else 1]:
                reference.check(wrapped(build, mode, Trapped), f"{outer}, {describe(mode)}", ulps_after_step=64)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_retry_after_an_exception_is_as_if_it_had_not_happened(debug: str) -> None:
    """R48: in forward, backward and recomputation, before, in and after each unit; other graphs stay usable."""
    run_ranks(2, _faults, debug)


def _gathers_after_faults() -> None:
    x = torch.randn(3, WIDTH)
    for mode in MODES[:3]:
        model = wrapped(seeded(TrappedModel, "none"), mode, Trapped)

        def gathers() -> int:
            with record_collectives() as log:
                loss_of(model, x).backward()  # noqa: B023
            clear(model)  # noqa: B023
            return log.count("all_gather")

        usual = [gathers(), gathers()]
        for fault in FAULTS:
            Trap.set(*fault)
            with pytest.raises(Fault):
                loss_of(model, x).backward()
            clear(model)
            assert gathers() == usual[1] == usual[0], f"after {fault}, {describe(mode)}"


def test_a_step_after_an_exception_gathers_as_often_as_any_other() -> None:
    """R48: what was left is cleared by the next forward, and not only by its backward."""
    run_ranks(2, _gathers_after_faults)


_ends: list[Callable[[], None]] = []  # of the backwards so far, if someone holds them


def _after_a_late_end(model: nn.Module, data: Data) -> Iterator[Any]:
    """The graph task of a backward that failed goes away in the middle of the next one."""
    Trap.set("backward 1")
    with pytest.raises(Fault):
        loss_of(model, data.tensor(0, 3, WIDTH)).backward()
    yield CLEAR

    def let_go(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: _ends.clear())

    x = data.tensor(1, 3, WIDTH)
    handle = model.blocks[1].register_forward_hook(let_go)
    loss_of(model, x).backward()
    handle.remove()
    yield {"x": x.grad}


def _late_ends() -> None:
    reference = Reference(seeded(TrappedModel, "none"), _after_a_late_end)
    queue = hooks.at_end_of_backward

    def queue_and_hold(end: Callable[[], None]) -> None:
        _ends.append(end)
        queue(end)

    with mock.patch.object(hooks, "at_end_of_backward", queue_and_hold):
        for mode in MODES:
            reference.check(wrapped(seeded(TrappedModel, "none"), mode, Trapped), describe(mode))


def test_a_failed_backward_may_go_away_late() -> None:
    """R48: a device's thread can hold it while the next pass is under way, which is not disturbed."""
    run_ranks(2, _late_ends)


class Catches(nn.Module):
    """A model that handles an exception of one of its parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Trapped(i) for i in range(3)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except Fault:
                x = x * self.scale
        return x * self.scale


def _handled_program(model: nn.Module, data: Data) -> Iterator[Any]:
    for index in (1, 0, 2):
        x, y = data.tensor(index, 3, WIDTH), data.tensor(10 + index, 3, WIDTH)
        Trap.set(f"forward {index}")
        first = loss_of(model, x)
        second = loss_of(model, y)
        second.backward()
        yield {"y": y.grad}
        first.backward()
        yield {"x": x.grad}


def _handled() -> None:
    reference = Reference(seeded(Catches), _handled_program)
    for mode in MODES:
        reference.check(wrapped(seeded(Catches), mode, Trapped), describe(mode))


def test_an_exception_that_the_model_handles() -> None:
    """R48"""
    run_ranks(2, _handled)


def _growth() -> None:
    width, meter = 300, Meter()
    for mode in MODES:
        model = wrapped(seeded(TrappedModel, "none", width), mode, Trapped)
        held = list(model.parameters())
        x = torch.randn(3, width)

        before = 0

        def growth() -> int:
            # torch's flight recorder keeps about 1 KiB of each of the last 2000 collectives, and gloo's threads hold
            # what they have sent for a little longer. A unit's buffer has 720 KB.
            deadline = time.monotonic() + 2.0
            while (found := meter.live() - before) > 500_000 and time.monotonic() < deadline:  # noqa: B023
                time.sleep(0.01)
            return found

        for cycle in range(3):  # the first one fills the caches of what is called
            for fault in FAULTS:
                Trap.set(*fault)
                with pytest.raises(Fault):
                    loss_of(model, x).backward()
                with torch.no_grad():
                    model(x)
                if cycle:
                    assert growth() < 500_000, f"{growth():,} bytes more after {fault}, {describe(mode)}"
            loss_of(model, x).backward()
            for param in held:
                param.grad = None
            if cycle == 0:
                before = meter.at_rest()
        assert growth() < 500_000, f"{growth():,} bytes more after faults, {describe(mode)}"


@pytest.mark.serial  # it waits a limited time for what threads hold
@pytest.mark.skipif(not meter_available(), reason="needs glibc's mallinfo2")
def test_faults_leave_no_memory_behind() -> None:
    """R48"""
    run_ranks(2, _growth)


# -- parameters that users replace -------------------------------------------------------------------------------


def _block(model: nn.Module) -> Any:
    """The block in the middle, unwrapped."""
    block = model.blocks[1]
    return block.module if isinstance(block, FullyShardedDataParallel) else block


def _replaced() -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for strategy in (FULL, GRAD_OP, NONE):
        plain, model = seeded(Mlp)(), wrapped(seeded(Mlp), (strategy, True), MlpBlock)
        block = _block(model)
        original = block.linear.weight
        # a new object in its place: it is the parameter from then on
        block.linear.weight = replacing = nn.Parameter(original.detach() * 0.5)
        block.linear.bias.data = block.linear.bias.data * 0.25  # other memory, the same object
        model.embed.weight.data = model.embed.weight.data * 2.0
        model.embed.bias = nn.Parameter(model.embed.bias.detach() * 2.0)
        with torch.no_grad():
            _block(plain).linear.weight.mul_(0.5)
            _block(plain).linear.bias.mul_(0.25)
            plain.embed.weight.mul_(2.0)
            plain.embed.bias.mul_(2.0)
            assert torch.equal(model(x), plain(x)), strategy
        original, before = block.linear.weight, original
        assert original is replacing and before.data_ptr() != original.data_ptr()  # as in the plain module
        for name, full in full_parameters(model).items():
            assert torch.equal(full, dict(plain.named_parameters())[name]), (name, strategy)
        with torch.no_grad():
            before.zero_()
            original.mul_(4.0)  # what is registered is what is trained
            _block(plain).linear.weight.mul_(4.0)
            assert torch.equal(model(x), plain(x)), strategy
        # of another shape: refused before anything runs, and right again once it is undone
        for bad in (torch.zeros(5), torch.zeros(2, 3)):
            block.linear.weight = nn.Parameter(bad)
            with pytest.raises(RuntimeError, match=r"Cannot writeback 'linear.weight'.*shape"):
                model(x)
            block.linear.weight = original
        # a slot that holds nothing is left alone: the module would have to do without
        block.linear.bias = None
        with torch.no_grad():
            model(x)
        loss_of(model, x).backward()
        assert_at_rest(model, str(strategy))


def test_replaced_parameters_are_written_back() -> None:
    """G16: the object or its data replaced, with the shape that it has between steps."""
    run_ranks(2, _replaced)


def _replaced_flat() -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for strategy in (FULL, GRAD_OP, NONE):
        plain, model = seeded(Mlp)(), wrapped(seeded(Mlp), (strategy, False), MlpBlock)
        for param in model.parameters():
            param.data = param.data * 0.5
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
            assert torch.equal(model(x), plain(x)), strategy
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(2.0)
            assert torch.equal(model(x), plain(x)), strategy
        flat = model.blocks[1]._flat_param
        kept = flat.data
        for bad in (torch.zeros(len(kept) + 1), kept.double()):
            flat.data = bad
            with pytest.raises(RuntimeError, match="Cannot writeback"):
                model(x)
        flat.data = kept
        loss_of(model, x).backward()
        assert flat.grad is not None and flat.grad.shape == kept.shape


def test_a_replaced_flat_parameter_is_written_back() -> None:
    """G16"""
    run_ranks(2, _replaced_flat)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _replaced_shared() -> None:
    x = torch.randn(3, WIDTH)
    for strategy in (FULL, GRAD_OP, NONE):
        model = wrap(seeded(Tied)(), strategy, True)
        shared = model.first.weight
        assert model.second.weight is shared
        model.second.weight = nn.Parameter(shared.detach().clone())
        with pytest.raises(NotImplementedError, match=r"Cannot writeback 'second.weight'.*shared"):
            model(x)
        model.second.weight = shared
        shared.data = shared.data * 0.5  # the data of both is another thing
        plain = seeded(Tied)()
        with torch.no_grad():
            plain.first.weight.mul_(0.5)
            assert torch.equal(model(x), plain(x))


def test_replacing_one_registration_of_a_shared_parameter_is_refused() -> None:
    """G16"""
    run_ranks(2, _replaced_shared)


def _unchecked() -> None:
    with environment(FSDP_SKIP_WRITEBACK_CHECK="1"):
        model = wrapped(seeded(Mlp), (FULL, True), MlpBlock)
    plain, x = seeded(Mlp)(), torch.randn(3, WIDTH)
    _block(model).linear.weight = nn.Parameter(torch.zeros(5))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_the_check_for_replaced_parameters_can_be_skipped() -> None:
    """G16"""
    run_ranks(2, _unchecked)
