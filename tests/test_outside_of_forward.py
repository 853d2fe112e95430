"""Parameters of unsharded units, used outside of their unit's forward.

Such parameters always hold their values, so programs may use them as with ``DistributedDataParallel``: a head tied
to an embedding, an inner module called directly, a penalty.
"""

from __future__ import annotations

import copy
import gc
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
from tests.harness.models import MlpBlock, Net
from tests.harness.passes import GRAD_OP, NONE, WIDTH, mlp, seeded, wrapped
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, full_parameters, wrap


def unsharded_model(kind: str, use_orig_params: bool, build: Callable[[], nn.Module], **options: Any) -> Any:
    """Wrap a model whose ranks all hold full parameters, by NO_SHARD or by the mesh."""
    policy = ModuleWrapPolicy({MlpBlock})
    if kind == "NO_SHARD":
        return wrap(build(), NONE, use_orig_params, wrap_policy=policy, **options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hybrid = ShardingStrategy.HYBRID_SHARD
        return wrap(build(), hybrid, use_orig_params, wrap_policy=policy, device_mesh=mesh, **options)


MLP = seeded(mlp)
KINDS = [(kind, orig) for kind in ("NO_SHARD", "hybrid with one rank per shard group") for orig in (True, False)]


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def tied_head(model: nn.Module, data: Data) -> Iterator[Any]:
    """Use a weight of the root and one of a unit after the forward."""
    for step in range(3):
        x = data.tensor(step, 3, WIDTH)
        hidden = model(x)
        head = F.linear(hidden, model.embed.weight) + model.blocks[0].scale
        loss_of(head).backward()
        yield {"x": x.grad}
        yield STEP


def tied_tail(model: nn.Module, data: Data) -> Iterator[Any]:
    """Use both before the forward, so their gradients arrive last."""
    for step in range(3):
        x = data.tensor(step, 3, WIDTH).double().detach().requires_grad_()
        loss_of(model(F.linear(x, model.head.weight) * model.blocks[0].scale)).backward()
        yield {"x": x.grad}
        yield STEP


def inner_module(model: nn.Module, data: Data) -> Iterator[Any]:
    """Call a module of the root and one of a unit besides the model, and alone."""
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
    """Add a penalty, weighted differently on each rank, to the loss, and run a separate backward of it."""
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
    """Hook a weight: autograd's hooks see the local gradient, post-accumulate hooks the reduced one, once."""
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


def check_averages(
    program: Program, build: Callable[[], nn.Module] = MLP, kinds: Any = KINDS, **bounds: Any
) -> Reference:
    reference = Reference(build, program)
    for kind, use_orig_params in kinds:
        model = unsharded_model(kind, use_orig_params, build)
        reference.check(model, f"{kind}, use_orig_params={use_orig_params}", **bounds)
    return reference


@pytest.mark.parametrize("program", [tied_head, inner_module, penalty])
@on_ranks(2)
def test_gradients_of_parameters_used_outside_of_forward_are_averaged(program: Program) -> None:
    """Every path to such a parameter counts, as with DistributedDataParallel."""
    check_averages(program)


@on_ranks(2)
def test_gradients_that_arrive_after_the_reduction_are_averaged() -> None:
    """A parameter used before the forward receives the last gradient of the unit."""
    check_averages(tied_tail, lambda: MLP().double(), ulps=16, ulps_after_step=REASSOCIATED)


@on_ranks(2)
def test_hooks_see_gradients_of_parameters_used_outside_of_forward_once() -> None:
    """Gradient hooks see the plain model's gradients; post-accumulate hooks see the average."""
    check_averages(hooked, kinds=[kind for kind in KINDS if kind[1]])


def norm_of(model: nn.Module) -> Tensor:
    return torch.stack([param.square().sum() for param in model.parameters()]).sum()


@on_ranks(2)
def test_gradients_of_parameters_used_outside_of_forward_accumulate() -> None:
    """Inside no_sync() they add up until a backward synchronizes; otherwise each backward reduces them."""
    for kind, use_orig_params in KINDS:
        model = unsharded_model(kind, use_orig_params, MLP)
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


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_gradients_of_parameters_used_outside_of_a_forward_in_mixed_precision(
    reduce_dtype: torch.dtype, keep: bool
) -> None:
    """Averaged although forward computes with low precision copies, for every dtype of gradients."""
    precision = MixedPrecision(torch.bfloat16, reduce_dtype, keep_low_precision_grads=keep)
    weight = 1.0 + dist.get_rank()
    for kind, use_orig_params in KINDS:
        model = unsharded_model(kind, use_orig_params, MLP, mixed_precision=precision)
        x = torch.ones(2, WIDTH)
        model(x)
        for step in range(3):
            case_of_step = f"{kind}, use_orig_params={use_orig_params}, {reduce_dtype}, step {step}"
            with model.no_sync() if step == 1 else nullcontext():
                (weight * model.embed.weight.float().square().sum()).backward()
            model.zero_grad() if step == 1 else None
            if step != 1:
                grad = full_gradients(model)["embed.weight"]
                assert grad is not None, case_of_step
                expected = 3 * full_parameters(model)["embed.weight"]
                torch.testing.assert_close(grad.float(), expected, rtol=2e-2, atol=0.0, msg=case_of_step)
                model.zero_grad()
            head = F.linear(model(x).float(), model.embed.weight.float())
            (weight * head.square().mean()).backward()
            for name, grad in full_gradients(model).items():  # compares both ranks
                assert grad is not None and grad.any(), f"{case_of_step}, {name}"
            model.zero_grad()


@on_ranks(2)
def test_gradients_of_replaced_or_cast_parameters_used_outside_of_forward() -> None:
    """After unfreezing, replacing, casting and copying."""
    weight = 1.0 + dist.get_rank()
    model = unsharded_model("NO_SHARD", True, MLP)
    x = torch.ones(2, WIDTH)
    model.head.weight.requires_grad_(False)
    model(x).sum().backward()
    model.zero_grad()

    def check(case: str) -> None:
        (weight * model.head.weight.square().sum()).backward()
        grad = full_gradients(model)["head.weight"]
        assert grad is not None, case
        torch.testing.assert_close(grad, 3 * model.head.weight.detach(), msg=case)
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
def test_backward_before_the_first_forward_is_refused() -> None:
    """The error names the unit and the remedy."""
    for kind, use_orig_params in KINDS:
        model = unsharded_model(kind, use_orig_params, MLP)
        x = torch.ones(2, WIDTH)
        with pytest.raises(RuntimeError, match=r"the Net unit before its first forward.*call the wrapped model itself"):
            model.module.head(x).sum().backward()
        (model(x).sum() + model.module.head(x).sum()).backward()
        assert all(grad is not None for grad in full_gradients(model).values())


def recomputed(model: nn.Module, data: Data) -> Iterator[Any]:
    if isinstance(model, FullyShardedDataParallel):
        model.set_unshard_in_backward(False)
    for step in range(3):
        x = data.tensor(step, 3, WIDTH)
        loss_of(model(x)).backward()
        yield {"x": x.grad}
        yield STEP


@on_ranks(2)
def test_recomputation_without_unshard_in_backward() -> None:
    """set_unshard_in_backward(False) on an unsharded unit changes no gradient of recomputed modules."""
    build = seeded(
        lambda: Net(
            lambda m, x: m.last(checkpoint(m.inner, x, use_reentrant=True)),
            inner=mlp(),
            last=nn.Linear(WIDTH, WIDTH),
        )
    )
    reference = check_averages(recomputed, build)
    for use_orig_params in (True, False):
        model = wrapped(build, (GRAD_OP, use_orig_params), MlpBlock)
        model.set_reshard_after_forward(False, recurse=False)
        reference.check(model, f"SHARD_GRAD_OP, use_orig_params={use_orig_params}")


@on_ranks(2)
def test_backward_to_parameters_whose_wrapper_was_deleted_raises() -> None:
    model = wrap(nn.Linear(WIDTH, 2), NONE, True)
    loss = model.module.weight.square().sum()
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="whose unit was deleted: keep the wrapped model"):
        loss.backward()
