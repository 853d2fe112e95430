"""Parameters of units that are not sharded, used outside of their unit's forward.

Between forwards such a unit's parameters have all of their values, so a program may compute with them as with those of
``DistributedDataParallel``: a head that is tied to an embedding, an inner module that is called by itself, a penalty.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import CLEAR, REASSOCIATED, STEP, Data, Program, Reference
from tests.harness.models import MlpBlock
from tests.harness.passes import GRAD_OP, NONE, WIDTH, Mlp, seeded, wrapped
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.sharded import full_gradients, full_parameters, wrap


def not_sharded(kind: str, use_orig_params: bool, build: Callable[[], nn.Module], **options: Any) -> Any:
    """A wrapped model on ranks that all have the whole parameters, by the strategy of that name or by the mesh."""
    policy = ModuleWrapPolicy({MlpBlock})
    if kind == "NO_SHARD":
        return wrap(build(), NONE, use_orig_params, wrap_policy=policy, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            build(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh,
            auto_wrap_policy=policy,
            use_orig_params=use_orig_params,
            **options,
        )


KINDS = [(kind, orig) for kind in ("NO_SHARD", "hybrid with one rank per shard group") for orig in (True, False)]


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def tied_head(model: nn.Module, data: Data) -> Iterator[Any]:
    """A weight of the root and one of a unit are used again after the forward."""
    for step in range(3):
        x = data.tensor(step, 3, WIDTH)
        hidden = model(x)
        head = F.linear(hidden, model.embed.weight) + model.blocks[0].scale
        loss_of(head).backward()
        yield {"x": x.grad}
        yield STEP


def tied_tail(model: nn.Module, data: Data) -> Iterator[Any]:
    """They are used before the forward, and so their gradients come last."""
    for step in range(3):
        x = data.tensor(step, 3, WIDTH).double().detach().requires_grad_()
        loss_of(model(F.linear(x, model.head.weight) * model.blocks[0].scale)).backward()
        yield {"x": x.grad}
        yield STEP


def inner_module(model: nn.Module, data: Data) -> Iterator[Any]:
    """A plain module inside of the root, and one inside of a unit, are called besides the model, and alone."""
    for step in range(3):
        x = data.tensor(step, 3, WIDTH)
        (loss_of(model(x)) + loss_of(model.head(x)) + loss_of(model.blocks[0].linear(x))).backward()
        yield {"x": x.grad}
        yield STEP
        loss_of(model.head(x)).backward()
        yield {"x": x.grad}
        loss_of(model.blocks[0].linear(x)).backward()
        yield {"x": x.grad}
        yield CLEAR


def penalty(model: nn.Module, data: Data) -> Iterator[Any]:
    """Each rank's penalty has a weight of its own; it is part of the loss, and has a backward of its own."""
    for step in range(3):
        x = data.tensor(step, 3, WIDTH)
        weight = data.tensor(step + 10, 1).detach()
        (loss_of(model(x)) + weight * sum(param.square().sum() for param in model.parameters())).backward()
        yield {"x": x.grad}
        yield STEP
        loss_of(model(x)).backward()
        yield {"x": x.grad}
        (weight * sum(param.square().sum() for param in model.parameters())).backward()
        yield {}
        yield STEP


def hooked(model: nn.Module, data: Data) -> Iterator[Any]:
    """The program's hooks see each gradient once: those of autograd this rank's, those behind the accumulation the
    reduced one."""
    seen: list[int] = []
    weight = model.head.weight
    weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is not None))
    for step in range(2):
        x = data.tensor(step, 3, WIDTH)
        loss_of(F.linear(model(x), weight)).backward()
        yield {"x": x.grad}
        loss_of(F.linear(x, weight)).backward()
        yield {"x": x.grad}
        yield STEP
    assert seen == [True] * 4, seen


def _averaged(program: Program, kinds: list[tuple[str, bool]] = KINDS) -> None:
    build = seeded(Mlp)
    reference = Reference(build, program)
    for kind, use_orig_params in kinds:
        reference.check(not_sharded(kind, use_orig_params, build), f"{kind}, use_orig_params={use_orig_params}")


@pytest.mark.parametrize("program", [tied_head, inner_module, penalty])
def test_gradients_of_parameters_used_outside_of_forward_are_averaged(program: Program) -> None:
    """As with DistributedDataParallel, whatever leads to a parameter of a unit that is not sharded."""
    run_ranks(2, _averaged, program)


@on_ranks(2)
def test_gradients_that_come_after_a_unit_was_reduced_are_averaged() -> None:
    """A parameter that was used before the forward has a gradient after all others of its unit."""

    def build() -> nn.Module:
        return seeded(Mlp)().double()

    reference = Reference(build, tied_tail)
    for kind, use_orig_params in KINDS:
        model = not_sharded(kind, use_orig_params, build)
        what = f"{kind}, use_orig_params={use_orig_params}"
        reference.check(model, what, ulps=16, ulps_after_step=REASSOCIATED)


def test_hooks_see_gradients_of_parameters_used_outside_of_forward_once() -> None:
    """Hooks on original parameters see what the plain model's see, and those behind the accumulation the average."""
    run_ranks(2, _averaged, hooked, [kind for kind in KINDS if kind[1]])


def norm_of(model: nn.Module) -> Tensor:
    return torch.stack([param.square().sum() for param in model.parameters()]).sum()


@on_ranks(2)
def test_gradients_of_parameters_used_outside_of_forward_accumulate() -> None:
    """Inside no_sync() they add up with others, and are reduced by the backward that synchronizes; else each time."""
    for kind, use_orig_params in KINDS:
        model = not_sharded(kind, use_orig_params, seeded(Mlp))
        model(torch.ones(1, WIDTH)).sum().backward()
        for inside in (True, False):
            model.zero_grad()
            for _ in range(2):
                with model.no_sync() if inside else nullcontext():
                    (norm_of(model) * (1.0 + dist.get_rank())).backward()
            (norm_of(model) * (1.0 + dist.get_rank())).backward()
            for name, grad in full_gradients(model).items():
                assert grad is not None, name
                torch.testing.assert_close(grad, 9 * full_parameters(model)[name], msg=name)


class WithHead(nn.Module):
    """A trunk that is computed in low precision, and a plain head that reads a weight of it."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.trunk(x)
        return F.linear(hidden.float(), self.trunk.embed.weight.float())


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_gradients_of_parameters_used_outside_of_a_forward_in_mixed_precision(
    reduce_dtype: torch.dtype, keep: bool
) -> None:
    """They are averaged where forward computes with copies in low precision, whatever dtype gradients have."""
    precision = MixedPrecision(torch.bfloat16, reduce_dtype, keep_low_precision_grads=keep)
    weight = 1.0 + dist.get_rank()
    for kind, use_orig_params in KINDS:
        model = not_sharded(kind, use_orig_params, seeded(Mlp), mixed_precision=precision)
        x = torch.ones(2, WIDTH)
        model(x)
        for step in range(3):
            where = f"{kind}, use_orig_params={use_orig_params}, {reduce_dtype}, step {step}"
            with model.no_sync() if step == 1 else nullcontext():
                (weight * model.embed.weight.float().square().sum()).backward()
            model.zero_grad() if step == 1 else None
            if step != 1:
                grad = full_gradients(model)["embed.weight"]
                assert grad is not None, where
                expected = 3 * full_parameters(model)["embed.weight"]
                torch.testing.assert_close(grad.float(), expected, rtol=2e-2, atol=0.0, msg=where)
                model.zero_grad()
            head = WithHead(model)
            (weight * head(x).square().mean()).backward()
            for name, grad in full_gradients(model).items():  # which looks at both ranks
                assert grad is not None and grad.any(), f"{where}, {name}"
            model.zero_grad()


@on_ranks(2)
def test_gradients_of_parameters_that_were_changed_by_hand() -> None:
    """A parameter that was unfrozen, replaced, cast or copied is used outside of forward as it was before."""
    weight = 1.0 + dist.get_rank()
    model = not_sharded("NO_SHARD", True, seeded(Mlp))
    x = torch.ones(2, WIDTH)
    model.head.weight.requires_grad_(False)
    model(x).sum().backward()
    model.zero_grad()

    def check(what: str) -> None:
        (weight * model.head.weight.square().sum()).backward()
        grad = full_gradients(model)["head.weight"]
        assert grad is not None, what
        torch.testing.assert_close(grad, 3 * model.head.weight.detach(), msg=what)
        model.zero_grad()

    model.head.weight.requires_grad_(True)
    model(x)
    check("unfrozen")
    model.head.weight = nn.Parameter(torch.full_like(model.head.weight, 2.0))
    model(x)
    check("replaced")
    model.double()
    check("cast")
    model = copy.deepcopy(model)
    model(x.double())
    check("copied")


@on_ranks(2)
def test_a_backward_before_the_first_forward_is_refused() -> None:
    """An inner module that is called by itself before the model was: the error names the unit and says what to call."""
    for kind, use_orig_params in KINDS:
        model = not_sharded(kind, use_orig_params, seeded(Mlp))
        x = torch.ones(2, WIDTH)
        with pytest.raises(RuntimeError, match=r"the Mlp unit before its first forward.*call the wrapped model itself"):
            model.module.head(x).sum().backward()
        (model(x).sum() + model.module.head(x).sum()).backward()
        assert all(grad is not None for grad in full_gradients(model).values())


class Recomputed(nn.Module):
    """Most of it is recomputed in a backward of its own inside of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=True))


def recomputed(model: nn.Module, data: Data) -> Iterator[Any]:
    if isinstance(model, FullyShardedDataParallel):
        model.set_unshard_in_backward(False)
    for step in range(3):
        x = data.tensor(step, 3, WIDTH)
        loss_of(model(x)).backward()
        yield {"x": x.grad}
        yield STEP


@on_ranks(2)
def test_recomputation_where_the_backward_gathers_nothing() -> None:
    """set_unshard_in_backward(False) on a unit whose parameters are there all the same: what is recomputed inside of it
    has the gradients that it has otherwise."""
    build = seeded(Recomputed)
    reference = Reference(build, recomputed)
    for kind, use_orig_params in KINDS:
        reference.check(not_sharded(kind, use_orig_params, build), f"{kind}, use_orig_params={use_orig_params}")
    for use_orig_params in (True, False):
        model = wrapped(build, (GRAD_OP, use_orig_params), MlpBlock)
        model.set_reshard_after_forward(False, recurse=False)
        reference.check(model, f"SHARD_GRAD_OP, use_orig_params={use_orig_params}")
