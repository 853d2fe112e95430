"""A unit stays gathered until the backward has passed all its forward calls, and is then resharded.

Bit-equal to plain replicas, as in `test_backward`.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import ALL_SMALL, CLEAR, STEP, Data, Reference, assert_at_rest, gradient_sizes
from tests.harness.models import Net, Unit
from tests.harness.oracle import assert_bit_equal
from tests.harness.passes import check_parity, seeded
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import FULL, MODES, NONE, describe

WIDTH, VOCABULARY = 6, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def tokens(data: Data, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + data.rank)
    return torch.randint(VOCABULARY, (3, 5), generator=generator)


# -- kinds of arguments ------------------------------------------------------------------------------------------------


def selective_segment() -> nn.Module:
    """Build units inside one selective checkpoint, which saves a constant that the model makes.

    If the recomputation counted operations of the engine, it would get another tensor.
    """

    def run(m: Any, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = block(x) * torch.tensor(0.5)
        return x

    contexts = partial(create_selective_checkpoint_contexts, _note_and_choose)
    return Net(
        lambda m, ids: checkpoint(run, m, m.embed(ids), use_reentrant=False, context_fn=contexts),
        embed=nn.Embedding(VOCABULARY, WIDTH),
        blocks=nn.ModuleList([Block(), Block(), Block()]),
    )


_noted: set[str] = set()


def _note_and_choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Record the operation; save one kind of the operations that selective checkpointing sees."""
    _noted.add(str(operation))
    saved = operation is torch.ops.aten.lift_fresh.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _two_losses(model: nn.Module, data: Data) -> Iterator[Any]:
    """Run two passes of two forwards, so that units are prefetched in another order than they are recomputed."""
    for index in range(2):
        first, second = model(tokens(data, index)), model(tokens(data, index + 2))
        (first.square().mean() + second.square().mean()).backward()
        yield {"first": first.detach(), "second": second.detach()}
        yield STEP


@on_ranks(2)
def test_selective_checkpointing_sees_no_operation_of_the_engine() -> None:
    """Buffers, collectives and poison differ in the recomputation, and add no operations."""
    build = seeded(selective_segment)
    _noted.clear()
    reference = Reference(build, _two_losses)
    of_the_model = set(_noted)
    assert of_the_model
    for debug in ("0", "1"):
        with mock.patch.dict(os.environ, FSDP_DEBUG=debug):
            model = wrap(build(), FULL, debug == "0", wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}))
            reference.check(model, f"debug={debug}")
            apart = build()  # each becomes a root in the first forward, inside the checkpoint
            apart.embed = wrap(apart.embed, FULL, True, wrap_policy=None)
            apart.blocks = nn.ModuleList([wrap(block, FULL, True, wrap_policy=None) for block in apart.blocks])
            reference.check(apart, f"debug={debug}, no common root")
    assert _noted == of_the_model, _noted ^ of_the_model


# -- side outputs ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_unmarked_side_output_raises() -> None:
    """The error names the parameter and the remedy, instead of a gradient from released memory.

    The gradients of the sum that is kept need no weight's value, so only the weight's hook can notice.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        output = m.linear(x)
        m.kept = m.linear(x.detach())
        return output

    for orig in (True, False):
        root = nn.Sequential(Unit(forward, linear=nn.Linear(WIDTH, WIDTH)), Block())
        model = wrap(root, FULL, orig, wrap_policy=ModuleWrapPolicy({Unit, Block}))
        model(torch.randn(3, WIDTH))
        with pytest.raises(RuntimeError, match=r"parameter 'linear\.\w+' of unit '0'.*fsdp\.mark_side_output"):
            root[0].module.kept.square().mean().backward()
        F.mse_loss(model(torch.randn(3, WIDTH)), torch.zeros(3, WIDTH)).backward()  # the next step works


@on_ranks(2)
def test_no_gradient_comes_from_released_memory() -> None:
    """Also in a frozen unit, and where a view is read first.

    The unit calls a layer twice and returns the first result; backward enters the second by a stored tensor.
    Autograd detects the change of version.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        m.kept = m.layer(torch.tanh(y))
        return y

    for orig, linear, frozen in itertools.product((True, False), (True, False), (True, False)):
        layer = (nn.Linear(WIDTH, WIDTH) if linear else nn.LayerNorm(WIDTH)).requires_grad_(not frozen)
        root = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unit(forward, layer=layer), Block())
        model = wrap(root, FULL, orig, wrap_policy=ModuleWrapPolicy({Unit}))
        model(torch.randn(3, WIDTH))
        with pytest.raises(RuntimeError, match="is at version 1073741824; expected version 0"):
            root[1].module.kept.square().mean().backward()
        model(torch.randn(3, WIDTH)).sum().backward()  # the next step works


# -- other threads -----------------------------------------------------------------------------------------------------


def threaded(kind: str) -> Unit:
    """Build a unit that computes a branch, or everything, on another thread, where sequence numbers are separate."""

    def branch(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.far(m.norm(x))) @ m.near.weight.detach()

    def forward(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(branch, m, x).result()
        return result if "whole" in kind else torch.tanh(m.near(x)) + m.near(result)

    near, far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_("frozen" not in kind)
    return Unit(forward, near=near, far=far, norm=nn.LayerNorm(WIDTH).requires_grad_(False))


def steps_of_vectors(model: nn.Module, data: Data) -> Iterator[Any]:
    for index in range(2):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(tokens(data, index).sum().item()))
        model(x).square().mean().backward()
        yield {}
        yield CLEAR


@on_ranks(2)
def test_forward_may_compute_on_another_thread() -> None:
    for kind in ("branch", "branch frozen", "whole", "whole frozen"):
        build = seeded(lambda kind=kind: nn.Sequential(Block(), threaded(kind), Block(), threaded(kind)))
        check_parity(build, steps_of_vectors, Unit, modes=MODES[:2], case=kind)


@on_ranks(2)
def test_units_of_one_forward_must_run_on_one_thread() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return m.last(pool.submit(m.inner, x).result())

    net = Net(forward, inner=Block(), last=nn.Linear(WIDTH, WIDTH))
    model = wrap(net, FULL, True, wrap_policy=ModuleWrapPolicy({Block}))
    with pytest.raises(NotImplementedError, match="forward of unit 'inner' was called on another thread"):
        model(torch.randn(2, WIDTH))
    with ThreadPoolExecutor(1) as pool:  # a forward may begin on any thread
        pool.submit(model.module.inner, torch.randn(2, WIDTH)).result()


@on_ranks(2)
def test_units_reduce_once_the_backward_has_passed_them() -> None:
    """With and without unused parameters."""
    for unused, orig in itertools.product((False, True), (True, False)):
        blocks = [Block(), Block(), Block()]
        for block in blocks if unused else ():
            block.unused = nn.Parameter(torch.ones(WIDTH))
        model = wrap(nn.Sequential(*blocks), FULL, orig, wrap_policy=ModuleWrapPolicy({Block}))
        for _ in range(3):
            loss = model(torch.randn(3, WIDTH)).square().mean()
            with record_collectives() as log:
                loss.backward()
        order = [("gather", 2), ("gather", 1), ("reduce", 2), ("gather", 0), ("reduce", 1), ("reduce", 0)]
        found = [record.label for record in log.records if record.label and " unit" in record.label]
        assert found == [f"{event} unit '{index}'" for event, index in order], (unused, orig, found)


@on_ranks(2)
def test_unit_is_resharded_during_autograd_grad_of_an_input() -> None:
    """No parameter gets a gradient, although all did in earlier backwards."""
    for orig in (True, False):
        model = wrap(nn.Sequential(Block(), Block(), Block()), FULL, orig, wrap_policy=ModuleWrapPolicy({Block}))
        units = [unit for _, unit, _ in units_in(model) if unit.handles]
        gathered: list[list[bool]] = []

        def note(grad: Tensor, units: list[Any] = units, gathered: list[list[bool]] = gathered) -> None:
            gathered.append([unit.is_gathered for unit in units])

        model[1].register_forward_pre_hook(lambda module, args, note=note: args[0].register_hook(note) and None)
        for step in range(4):
            x = torch.randn(3, WIDTH, requires_grad=True)
            y = model(x)
            if step < 3:
                y.square().mean().backward()
            else:
                torch.autograd.grad(y.square().mean(), x)
                assert all(param.grad is None for param in model.parameters())
            model.zero_grad()
        assert gathered[3] == gathered[2] and not gathered[3][-1], (orig, gathered)


@on_ranks(2)
def test_gradient_hook_registered_in_a_forward_is_refused() -> None:
    """The hook would be called for unrelated gradients too, before they are reduced."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.linear.bias.register_post_accumulate_grad_hook(lambda bias: None)
        return m.linear(x)

    unit = Unit(forward, linear=nn.Linear(WIDTH, WIDTH))
    model = wrap(nn.Sequential(unit), FULL, True, wrap_policy=ModuleWrapPolicy({Unit}))
    with pytest.raises(RuntimeError, match=r"inside of the forward of a wrapped module.*Register the hook outside"):
        model(torch.randn(3, WIDTH))


def remembers(kind: str) -> Unit:
    """Build a unit that keeps a state with a graph, or a function of a weight, from one call to the next."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if kind == "state":
            m.kept = torch.tanh(m.inputs(x) + m.state(torch.zeros_like(x) + m.kept))
            return m.kept * 1.0
        if m.kept.dim() == 0:
            m.kept = m.inputs.weight / m.inputs.weight.norm()
        return m.state(x @ m.kept)

    return Unit(forward, kind=kind, inputs=nn.Linear(WIDTH, WIDTH), state=nn.Linear(WIDTH, WIDTH))


def _remembering(model: nn.Module, data: Data) -> Iterator[Any]:
    unit = next(module for module in model.modules() if isinstance(module, Unit))
    for index in range(3):
        unit.kept = torch.zeros(())
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(tokens(data, index).sum().item()))
        if unit.kind == "state":
            model(x)  # the output is dropped
        else:
            model(x).square().mean().backward(retain_graph=True)
            yield {}
        model(x * 0.5).square().mean().backward()
        yield {}
        yield CLEAR


def apart(*, in_part: bool = False) -> Unit:
    """Build a block with a branch on another thread that does not lead to the block's argument.

    With `in_part` the branch has a parameter that the first rank alone uses.
    """

    def branch(m: Any) -> Tensor:
        result = torch.tanh(m.apart(torch.ones(3, WIDTH)))
        return result * m.extra if in_part and dist.get_rank() == 0 else result

    def forward(m: Any, x: Tensor) -> Tensor:
        result = x + torch.tanh(m.linear(m.norm(x)))
        with ThreadPoolExecutor(1) as pool:
            return result + pool.submit(branch, m).result()

    unit = Unit(forward, norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH), apart=nn.Linear(WIDTH, WIDTH))
    unit.extra = nn.Parameter(torch.ones(WIDTH)) if in_part else None
    return unit


@ALL_SMALL
@on_ranks(2)
def test_unit_may_be_entered_other_than_by_the_last_output(all_small: bool) -> None:
    """Calls with a dropped output, graphs that outlive a call, branches on threads."""
    modules: list[tuple[Callable[[], nn.Module], Any]] = [
        (lambda: remembers("state"), _remembering),
        (lambda: remembers("weight"), _remembering),
        (apart, steps_of_vectors),
    ]
    kinds = ModuleWrapPolicy({Block, Unit})
    for (number, (make, program)), strategy in itertools.product(enumerate(modules), (FULL, NONE)):
        build = seeded(lambda make=make: nn.Sequential(Block(), make(), Block()))
        with gradient_sizes(all_small):
            model = wrap(build(), strategy, True, wrap_policy=kinds)
            Reference(build, program).check(model, f"{number}, {strategy.name}")


class Without(torch.autograd.Function):
    """Passes the first argument on, and has no gradient for the second one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@on_ranks(2)
def test_gradients_of_a_unit_are_reduced_if_one_of_them_never_comes() -> None:
    def build() -> nn.Module:
        scale = nn.Parameter(torch.ones(3))
        return Unit(lambda m, x: Without.apply(m.linear(x), m.scale), linear=nn.Linear(3, 3), scale=scale)

    for mode in MODES:
        torch.manual_seed(0)
        plain: Any = build()
        model = wrap(copy.deepcopy(plain), *mode)
        for net in (plain, model):
            net(torch.ones(2, 3)).square().sum().backward()
        gradients = full_gradients(model)
        for name, param in plain.linear.named_parameters(prefix="linear"):
            assert torch.equal(gradients[name], param.grad), (name, describe(mode))
        assert_at_rest(model, describe(mode))


@on_ranks(2)
def test_unit_with_late_gradients_reduces_once() -> None:
    """Late gradients arrive after the backward has passed the unit, and on one rank only."""
    for strategy in (FULL, NONE):
        kinds = ModuleWrapPolicy({Block, Unit})
        model = wrap(nn.Sequential(Block(), apart(in_part=True), Block()), strategy, True, wrap_policy=kinds)
        for step in range(3):
            with record_collectives() as log:
                model(torch.randn(3, WIDTH)).square().mean().backward()
            reduced = log.units("reduce")
            assert sorted(reduced) == ["unit '0'", "unit '1'", "unit '2'"], (strategy, step, reduced)


def penalized() -> Unit:
    """Build a unit with a weight whose penalty is differentiated by a nested backward.

    It runs after the model's backward has reached the weight and before it reaches the shift.
    """

    def forward(m: Any, x: Tensor) -> Tensor:
        shifted = x + m.shift
        if shifted.requires_grad:
            penalty = m.weight.pow(3).sum()
            shifted.register_hook(lambda grad: penalty.backward())
        return torch.tanh(shifted * m.weight)

    return Unit(forward, weight=nn.Parameter(torch.full((WIDTH,), 0.5)), shift=nn.Parameter(torch.zeros(WIDTH)))


@on_ranks(2)
def test_backward_inside_of_a_units_backward() -> None:
    """It reaches a leaf without passing an output of the unit, whose gradient is held.

    Gradients of the two backwards are kept apart, and the unit reduces after both.
    """
    build = seeded(lambda: nn.Sequential(Block(), penalized(), Block()))
    for strategy in (FULL, NONE):
        plain = build()
        model = wrap(build(), strategy, True, wrap_policy=ModuleWrapPolicy({Block, Unit}))
        for step in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
            with record_collectives() as log:
                for each in (plain, model):
                    each(x).square().mean().backward()
            reduced = log.units("reduce")
            assert reduced == ["unit '2'", "unit '1'", "unit '0'"], (strategy, step, reduced)
            expected = {name: param.grad for name, param in plain.named_parameters()}
            assert_bit_equal(full_gradients(model), expected, f"{strategy}, {step}")
            plain.zero_grad()
            model.zero_grad()
