"""Gradients equal the plain model's in orders of forwards and backwards, and in structures, that no random program has.

Bit-equal, unless stated otherwise, to plain replicas whose gradients are averaged in rank order: the same kernels
see the same values, a leaf's gradients are added in autograd's order, and the sum over 2 ranks has one order. On 3
ranks the direct exchange sums in rank order too, while the all-reduce of NO_SHARD does not.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad as imported_grad  # imported before wrapping, as by many programs
from torch.utils.checkpoint import checkpoint

from tests.harness.lockstep import ALL_SMALL, STEP, Data, Reference, gradient_sizes
from tests.harness.models import MlpBlock, Net, SegmentBlock, Unit, in_turn
from tests.harness.passes import (
    KINDS,
    WIDTH,
    check_parity,
    clear,
    loss_of,
    mlp,
    seeded,
    wrapped,
)
from tests.harness.pool import on_ranks
from tests.harness.process_groups import CollectiveLog, record_collectives
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL, MODES, NONE, Mode, by_turns, describe

# -- orders of forwards and backwards ----------------------------------------------------------------------------


def chain(segment: str, outer: str) -> nn.Module:
    """Build a root with layers before and after the blocks, which may be checkpointed inside and outside."""
    return Net(
        lambda m, x: m.head(in_turn(m.blocks, m.embed(x), outer)),
        embed=nn.Linear(WIDTH, WIDTH),
        blocks=nn.ModuleList([SegmentBlock(WIDTH, segment) for _ in range(2)]),
        head=nn.Linear(WIDTH, WIDTH),
    )


def one_pass(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    loss_of(model, x).backward()
    yield {"x": x.grad}


def two_passes(model: nn.Module, data: Data) -> Iterator[Any]:
    """Run forward, forward, backward, backward."""
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
    """Run three forwards, and their backwards in another order."""
    inputs = [data.tensor(i, 2 + i, WIDTH) for i in range(3)]
    losses = [loss_of(model, x) for x in inputs]
    for index in (2, 0, 1):
        losses[index].backward()
        yield {"x": inputs[index].grad}


def interleaved(model: nn.Module, data: Data) -> Iterator[Any]:
    """Overlap pairs of forward and backward."""
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
    """Retain two graphs, and go through each twice, in turns."""
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 3, WIDTH)
    first, second = loss_of(model, x), loss_of(model, y)
    for _ in range(2):
        for loss, leaf in ((first, x), (second, y)):
            loss.backward(retain_graph=True)
            yield {"grad": leaf.grad}


def of_inputs_only(model: nn.Module, data: Data) -> Iterator[Any]:
    """Take gradients of inputs only, which leave none on parameters, between normal passes."""
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


def of_chosen_parameters(model: Any, data: Data) -> Iterator[Any]:
    """Take the gradients of all parameters, of those of one block, and of these and the input, by `inputs=`."""
    x, block = data.tensor(0, 3, WIDTH), list(model.blocks[1].parameters())
    loss_of(model, x).backward(inputs=list(model.parameters()))
    yield {"none": x.grad}
    yield STEP
    for inputs in (block, [*block, x]):
        torch.autograd.backward(loss_of(model, x), inputs=inputs)
        yield {"x": x.grad}


def forward_only(model: nn.Module, data: Data) -> Iterator[Any]:
    """Run forwards with a late backward or none, and forwards without gradients in between."""
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
    """Check programs on chains of one form, with `FSDP_DEBUG=1` if `debug`."""
    if "reentrant" in (segment, outer):  # a segment inside a reentrant one, or with gradients disabled
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    build = seeded(chain, segment, outer)
    references = [Reference(build, program) for program in programs]
    # A reentrant checkpoint delivers a block's leaves once per call of the block, in tasks of their own, and each is
    # reduced for itself: (a + b) / 2 + (c + d) / 2, where the plain model has ((a + c) + (b + d)) / 2.
    reassociated = (used_twice, two_losses) if outer == "reentrant" else ()
    for mode in modes:
        with mock.patch.dict(os.environ, FSDP_DEBUG="1" if debug else "0"):
            model = wrapped(build, mode, SegmentBlock)
            for reference, program in zip(references, programs):  # one model for all: no state may remain
                case = f"{program.__name__}, {segment} in {outer}, {describe(mode)}, debug={debug}"
                ring = mode[0] is NONE and dist.get_world_size() > 2  # the all-reduce has an order of its own
                reference.check(model, case, ulps=8 if ring or program in reassociated else 0)
                clear(model)


@ALL_SMALL
@on_ranks(2)
def test_orders_of_forwards_and_backwards(all_small: bool) -> None:
    """Overlapping pairs, retained graphs, no backward, gradients of inputs alone; all units rest after each.

    With and without checkpoints outside and inside of the units, and with released buffers filled with NaN.
    """
    nests = [("none", "none"), ("non-reentrant", "reentrant"), ("reentrant", "non-reentrant")]
    with gradient_sizes(all_small):
        for number, (segment, outer) in enumerate(nests):
            programs = [*SKETCH, *MORE][max(number - 1, 0) :: 1 if outer == "none" else 2]
            mode = by_turns(number + all_small)[0] if number else by_turns(1)[all_small]
            _check_chain(segment, outer, programs, [mode], debug=(number + all_small) % 2 == 0)
        for outer in ("none", "non-reentrant"):  # reentrant checkpoints refuse autograd.grad
            _check_chain(outer, outer, [of_inputs_only], by_turns(outer == "none")[all_small::2])


# -- number of collectives, and states ---------------------------------------------------------------------------


def counts(log: CollectiveLog, unit: str) -> tuple[float, int]:
    """Return (gathers, reductions) of a unit with two buckets, both gathered and one of them frozen."""
    return log.count(label=f"gather {unit}") / 2, log.count(label=f"reduce {unit}")


@on_ranks(2)
def test_number_of_gathers_and_reductions_of_checkpointed_units() -> None:
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    block = "unit 'blocks.0'"
    # (gathers, reductions) of a block: one gather per forward and one per backward, one reduction per backward. A
    # recomputation and its backward share a gather; a reentrant checkpoint runs a backward for each call.
    plain = {one_pass: (2, 1), two_passes: (4, 2), used_twice: (3, 1), two_losses: (3, 1), backward_twice: (3, 2)}
    each_call = {used_twice: (4, 2), two_losses: (4, 2)}
    # The root is kept from the last forward to the end of the next backward, and gathered anew by each forward.
    roots = {one_pass: (1, 1), two_passes: (3, 2), used_twice: (2, 1), two_losses: (2, 1), backward_twice: (2, 2)}
    for (i, segment), (j, outer) in itertools.product(enumerate(KINDS), enumerate(KINDS)):
        build = seeded(chain, segment, outer)
        model = wrapped(build, (FULL, True), SegmentBlock)
        # Every program with each segment and with each outer kind.
        for program in [each for k, each in enumerate(SKETCH) if (i + j + k) % 3 == 0]:
            for attempt in range(2):  # with the recorded order of the previous program, and with the right one
                with record_collectives() as log:
                    for _ in program(model, Data(dist.get_rank(), 2)):
                        pass
                expected = {**plain, **(each_call if outer == "reentrant" else {})}[program]
                case = f"{program.__name__}, {segment} in {outer}, attempt {attempt}"
                assert counts(log, block) == expected, f"{case}: {counts(log, block)}, expected {expected}"
                root = log.count(label="gather the root unit"), log.count(label="reduce the root unit")
                assert root == roots[program], f"{case}, root: {root}, expected {roots[program]}"


def _take_second_order(model: nn.Module, x: Tensor, how: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        if how == "backward":
            loss_of(model, x).backward(create_graph=True)
        else:
            (grad,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
            grad.square().sum().backward()


@ALL_SMALL
@on_ranks(2)
def test_backward_computes_the_gradients_of_chosen_parameters(all_small: bool) -> None:
    """The `inputs` of a backward may be parameters, all or some, with tensors of the program next to them."""
    with gradient_sizes(all_small):
        check_parity(seeded(mlp), of_chosen_parameters, MlpBlock)


@on_ranks(2)
def test_autograd_grad_of_parameters_is_refused() -> None:
    """The error names a parameter, also where torch returns None or calls it unused.

    Gradients of inputs, and of tensors computed from the sharded parameters, are allowed. The next step is right.
    """
    reference = Reference(seeded(mlp), one_pass)
    for mode in MODES:
        model = wrapped(seeded(mlp), mode, MlpBlock)
        params, x = list(model.parameters()), torch.randn(3, WIDTH, requires_grad=True)
        words = (
            r"^torch.autograd.grad\(\) gives no gradient of .+ and \d+ others.* Call loss.backward\(\), or .*, and read"
        )
        for options in ({}, {"allow_unused": True}, {"materialize_grads": True}):
            with pytest.raises(RuntimeError, match=words):
                imported_grad(loss_of(model, x), params, **options)
        with pytest.raises(RuntimeError, match=r"gives no gradient of ('embed.weight' of the|a flat parameter)[^,]*: "):
            imported_grad(loss_of(model, x), [x, params[0]], allow_unused=True)
        penalty = params[0].square().sum()  # with what parameters() yields
        assert torch.equal(imported_grad(penalty, params[0])[0], 2 * params[0])
        assert imported_grad(loss_of(model, x), x)[0].any()
        reference.check(model, f"the step after, {describe(mode)}")


@on_ranks(2)
def test_create_graph_is_refused_and_changes_nothing() -> None:
    """Both `backward` and `autograd.grad` of inputs raise with the name of a parameter or unit."""

    def normed() -> Unit:  # its backward reads the weight in an operator that does not check the size of the storage
        return Unit(lambda m, x: torch.tanh(m.norm(x)), norm=nn.LayerNorm(WIDTH))

    build = seeded(lambda: nn.Sequential(normed(), normed(), nn.Linear(WIDTH, WIDTH)))
    reference = Reference(build, one_pass)
    for mode, how in itertools.product(MODES, ("backward", "grad of inputs")):
        if mode[0] is NONE and how == "grad of inputs":
            continue  # parameters are never released, so the gradients are right: see below
        model = wrapped(build, mode, Unit)
        held = [(name, p, p.detach().clone()) for name, p in model.named_parameters()]
        x = torch.randn(3, WIDTH, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"(the root unit|parameter '\w+.\w+').*gradients of gradients"):
            _take_second_order(model, x, how)
        for name, p, before in held:
            assert p.grad is None and torch.equal(p, before), f"{name}, {how}, {describe(mode)}"
        reference.check(model, f"the step after, {describe(mode)}, {how}")


@on_ranks(2)
def test_function_transforms_are_refused() -> None:
    """The following step is right."""
    reference = Reference(seeded(mlp), one_pass)
    for mode in by_turns(0)[:2]:  # without sharding nothing is gathered
        model = wrapped(seeded(mlp), mode, MlpBlock)
        with pytest.raises(RuntimeError, match=r"inside of torch.vmap or .* Transform functions inside of its f"):
            torch.vmap(model)(torch.randn(3, WIDTH))
        reference.check(model, f"the step after, {describe(mode)}")


def _penalty_on_output(model: nn.Module, data: Data) -> Iterator[Any]:
    """Take the gradient of a function of the output with respect to that output."""
    for step in range(2):
        x = data.tensor(step, 3, WIDTH)
        output = model(x)
        (grad,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
        (grad.square().mean() + output.mean()).backward()
        yield {"x": x.grad}
        yield STEP


@on_ranks(2)
def test_create_graph_up_to_an_output_is_allowed() -> None:
    """The graph of the gradient does not enter a wrapped module."""
    check_parity(seeded(mlp), _penalty_on_output, MlpBlock)


# -- structures --------------------------------------------------------------------------------------------------


def level(depth: int) -> Unit:
    """Build nested units, each with parameters before and after the inner one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.after(torch.tanh(m.before(x)))
        if m.inner is not None:
            y = y + m.inner(y) * m.leaf.mean() + m.inner(x)
        return x + m.after(m.before(y)) * m.leaf.sum()

    before, after = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
    inner = level(depth - 1) if depth else None
    return Unit(forward, before=before, after=after, inner=inner, leaf=nn.Parameter(torch.randn(3)))


def straddling() -> Unit:
    """Build a weight used inside and outside of a reentrant segment, whose backward delivers a separate gradient."""
    return Unit(
        lambda m, x: checkpoint(lambda y: torch.tanh(m.linear(y)), m.linear(x), use_reentrant=True),
        linear=nn.Linear(WIDTH, WIDTH),
    )


def energy() -> Unit:
    """Build a module that takes a gradient of a submodule inside the forward."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            position = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(m.potential(position).sum(), position)
        return m.potential(x - force) * m.scale

    return Unit(forward, potential=mlp(), scale=nn.Parameter(torch.ones(1)))


def sparse_embedding() -> Unit:
    return Unit(
        lambda m, x: m.out(m.table((x.detach().abs() * 5).long().clamp(max=10)).sum(dim=1) + x),
        table=nn.Embedding(11, WIDTH, sparse=True),
        out=nn.Linear(WIDTH, WIDTH),
    )


def auxiliary() -> nn.Module:
    """Build blocks that store a second loss in an attribute, as mixtures of experts do."""

    def forward(m: Any, x: Tensor) -> Tensor:
        routes = torch.softmax(m.router(x), dim=-1)
        m.loss = routes.square().sum()
        return x + m.expert(x) * routes[:, :1]

    blocks = [Unit(forward, router=nn.Linear(WIDTH, 3), expert=nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return Net(lambda m, x: in_turn(m.blocks, x) + sum(block.loss for block in m.blocks), blocks=nn.ModuleList(blocks))


def _sequence(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return seeded(lambda: nn.Sequential(*(make() for make in makers)))


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], set[type[nn.Module]]]] = {
    "nested three deep": (seeded(level, 3), {Unit}),
    "one unit reduced three times in a row": (
        seeded(lambda: Net(lambda m, x: in_turn([m.block] * 3, x, "reentrant"), block=MlpBlock(WIDTH, WIDTH))),
        {MlpBlock},
    ),
    "a weight on both sides of a segment": (_sequence(straddling, straddling), {Unit}),
    "gradient inside the forward of a nested unit": (_sequence(energy, mlp), {Unit, MlpBlock}),
    "sparse gradients": (_sequence(sparse_embedding, sparse_embedding), {Unit}),
    "second losses in attributes": (seeded(auxiliary), {Unit}),
}
ULPS = {
    "nested three deep": 64,  # several units share an input, whose gradient is a sum of each unit's sum
    "one unit reduced three times in a row": 8,  # each call's gradients are averaged before they are added up
}


@pytest.mark.parametrize("name", STRUCTURES)
@on_ranks(2)
def test_structure_trains_as_the_plain_model(name: str) -> None:
    """With the model called once and twice in a pass."""
    build, blocks = STRUCTURES[name]
    for number, program in enumerate((one_pass, used_twice)):
        reference = Reference(build, program)
        for mode in by_turns(number)[: (2 if name != "nested three deep" else 3) - number]:  # NO_SHARD once
            model = wrapped(build, mode, *blocks)
            for turn in range(2):  # the second one follows a recorded order
                case = f"{program.__name__}, {describe(mode)}, turn {turn}"
                reference.check(model, case, ulps=ULPS.get(name, 0))
                clear(model)


def _child_after(model: nn.Module, data: Data) -> Iterator[Any]:
    """Call a child after the root, alone and between the root's forward and backward."""
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


@on_ranks(2)
def test_child_may_be_used_before_the_parent_is_wrapped() -> None:
    reference = Reference(seeded(mlp), one_pass)
    for mode in MODES:
        module = seeded(mlp)()
        module.blocks[1] = wrap(module.blocks[1], *mode, wrap_policy=None)
        with torch.no_grad():
            module.blocks[1](torch.randn(3, 13))
        reference.check(wrap(module, *mode, wrap_policy=None), describe(mode))


@on_ranks(2)
def test_child_may_be_called_directly() -> None:
    check_parity(seeded(mlp), _child_after, MlpBlock)
