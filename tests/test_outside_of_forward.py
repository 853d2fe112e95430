"""Parameters of unsharded units, used outside of their unit's forward.

Such parameters always hold their values, but nothing reduces a gradient that arrives past the forward of the unit: of a
head tied to an embedding, an inner module called directly, a penalty.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import STEP, Data, Reference
from tests.harness.models import MlpBlock
from tests.harness.passes import WIDTH, mlp, seeded
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import NONE


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
        loss_of(F.linear(model(x), model.embed.weight) + model.blocks[0].scale).backward()
        yield {"x": x.grad}
        yield STEP


@on_ranks(2)
def test_original_names_in_flat_mode_lead_to_leaves_whose_gradients_are_averaged() -> None:
    reference = Reference(MLP, tied_head)
    for kind in ("NO_SHARD", "hybrid with one rank per shard group"):
        reference.check(unsharded_model(kind, False, MLP), kind)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a tied head": lambda model, x: loss_of(F.linear(model(x), model.module.embed.weight)),
    "an inner module, besides": lambda model, x: loss_of(model(x)) + loss_of(model.module.head(x)),
    "an inner module, alone": lambda model, x: loss_of(model.module.head(x)),
    "a penalty": lambda model, x: loss_of(model(x)) + sum(param.square().sum() for param in model.parameters()),
}


@pytest.mark.parametrize("after", ["wrapping", "a step", "no_sync()", "replacing", "casting", "copying"])
@on_ranks(2)
def test_gradients_of_parameters_used_outside_of_forward_are_refused(after: str) -> None:
    """The gradient would be that of one rank. The next step is right, on the same model."""
    uses = [*USES.items()][:: 1 if after == "no_sync()" else 3]  # elsewhere only the first and the last one
    for (kind, use_orig_params), (how, use) in itertools.product(KINDS[(len(after) + 1) % 2 :: 2], uses):
        if not use_orig_params and how != "a penalty":
            continue  # the originals' names lead to the leaves
        case, x = f"{kind}, use_orig_params={use_orig_params}, {how}", torch.ones(3, WIDTH)
        model = unsharded_model(kind, use_orig_params, MLP)
        if after != "wrapping":
            model(x).sum().backward()
            model.zero_grad()
        if after == "no_sync()":
            with model.no_sync():
                model(x).sum().backward()
        elif after == "replacing" and use_orig_params:
            model.module.head.weight = nn.Parameter(model.module.head.weight.detach().clone())
            model.module.embed.weight = nn.Parameter(model.module.embed.weight.detach().clone())
            model(x)
        elif after == "casting":
            model, x = model.double(), x.double()
        elif after == "copying":
            model = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match=r"a backward reached parameter '.*' of .* past the forward"):
            use(model, x).backward()
            pytest.fail(case)
        model.zero_grad()
        torch.manual_seed(dist.get_rank())
        loss_of(model(torch.randn(3, WIDTH, dtype=x.dtype))).backward()
        assert all(grad is not None for grad in full_gradients(model).values()), case
