"""Sharding over all ranks of data and context parallelism: ranks that hold parts of the same sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, ShardingStrategy, mean_factor
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_equivalent
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, full_parameters

WIDTH, LENGTH, SEQUENCES = 12, 8, 4


class WholeSequence(torch.autograd.Function):
    """The parts of a sequence on the ranks of a group, put together. The gradient of a part is the sum over them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    """Queries of this rank's part of the sequences attend to keys and values of all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.group = nn.Linear(WIDTH, 3 * WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        query, *others = self.project(x).chunk(3, dim=-1)
        if self.group is not None:
            others = [WholeSequence.apply(other, self.group) for other in others]
        return x + nn.functional.scaled_dot_product_attention(query, *others)


def _loss(model: nn.Module, x: Tensor, tokens: int) -> Tensor:
    """Return the sum of the tokens' losses, divided by a number of tokens."""
    return model(x).square().sum() / tokens


def _built(kind: str) -> tuple[nn.Module, Any, Callable[[Tensor], Tensor]]:
    """Return a plain model, the same over 2 x 2 ranks, and a function that returns this rank's part of a batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(3)
    plain = nn.Sequential(Attention(), Attention(), nn.Linear(WIDTH, 2)).double()
    model: Any = copy.deepcopy(plain)
    for layer in model[:2]:
        layer.group = mesh.get_group("cp")
    settings: dict[str, Any] = {"device_mesh": mesh["dp", "cp"]._flatten("dp_cp")}
    if kind == "hybrid":
        settings = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    policy = ModuleWrapPolicy({Attention})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, **settings)
    dp, cp = (mesh.get_local_rank(name) for name in ("dp", "cp"))
    return plain, model, lambda batch: batch.chunk(2)[dp].chunk(2, dim=1)[cp]


CASES = {
    "the mean of the rank's own tokens": (None, SEQUENCES * LENGTH // 4),
    "a part of the mean of its sequences": (2, SEQUENCES * LENGTH // 2),
}


@pytest.mark.parametrize(("kind", "loss"), [*zip(("flattened", "hybrid"), CASES)])
@on_ranks(4)
def test_context_parallel_ranks_train_as_one_process(loss: str, kind: str) -> None:
    """On 2 x 2 ranks. Where the context parallel ranks add up to one loss, the divisor is the number of the others."""
    plain, model, part_of = _built(kind)
    divisor, tokens = CASES[loss]
    if divisor is not None:
        model.set_gradient_divide_factor(divisor, recurse=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(SEQUENCES, LENGTH, WIDTH, dtype=torch.float64)
        _loss(model, part_of(batch), tokens).backward()
        _loss(plain, batch, SEQUENCES * LENGTH).backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        assert_equivalent(full_gradients(model), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equivalent(full_parameters(model), {name: param.detach() for name, param in plain.named_parameters()})


@pytest.mark.parametrize(("kind", "divisor"), [("flattened", 2), ("hybrid", None)])
@on_ranks(4)
def test_mean_over_the_tokens_of_context_parallel_ranks(divisor: int | None, kind: str) -> None:
    """With sequences of other lengths, whose later part may have no tokens; whatever the divisor is."""
    plain, model, part_of = _built(kind)
    model.set_gradient_divide_factor(divisor, recurse=True)
    torch.manual_seed(0)
    batch = torch.randn(SEQUENCES, LENGTH, WIDTH, dtype=torch.float64)
    counts = torch.arange(LENGTH) < torch.tensor([[8], [2], [4], [3]])  # one of the ranks has none
    losses = model(part_of(batch)).square().sum(dim=-1)[part_of(counts)]
    (losses.sum() * mean_factor(model, part_of(counts))).backward()
    plain(batch).square().sum(dim=-1)[counts].mean().backward()
    assert_equivalent(full_gradients(model), {name: param.grad for name, param in plain.named_parameters()})
