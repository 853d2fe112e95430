"""Experts: a unit over fewer ranks than the root, in whose place other ranks hold other parameters.

The reference is one process with all experts and the whole batch, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from fsdp import FullyShardedDataParallel, StateDictType
from fsdp.checkpoint import StateDictOptions, save, set_model_state_dict
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP

EXPERTS, TOKENS, WIDTH = 4, 8, 5  # tokens of each rank; an equal part of them goes to each expert


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, received = group, torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllToAll.apply(grad, ctx.group), None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


class Mixture(nn.Module):
    """A layer, experts, and a head. With a group, each of its ranks has an equal part of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.experts = Experts()
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)).view(EXPERTS, -1, WIDTH)
        if self.group is None:
            return self.head(self.experts(x))
        ranks = self.group.size()
        x = _AllToAll.apply(x, self.group).view(ranks, EXPERTS // ranks, -1, WIDTH)
        y = self.experts(x.transpose(0, 1).reshape(EXPERTS // ranks, -1, WIDTH))
        y = y.view(EXPERTS // ranks, ranks, -1, WIDTH).transpose(0, 1).reshape(EXPERTS, -1, WIDTH)
        return self.head(_AllToAll.apply(y, self.group))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def built(ep: int, root: Any, inner: Any, use_orig_params: bool) -> tuple[Mixture, Any, slice]:
    """Return the plain mixture, the same with its experts over ``ep`` ranks, and which of them this rank has."""
    torch.manual_seed(0)
    plain, world = Mixture(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    each, place = EXPERTS // ep, mesh.get_local_rank("ep")
    mine = slice(place * each, (place + 1) * each)
    model = copy.deepcopy(plain)
    model.group = mesh.get_group("ep")
    model.experts.weight = nn.Parameter(model.experts.weight.detach()[mine].clone())
    model.experts = wrap(model.experts, inner, use_orig_params, wrap_policy=None, process_group=mesh.get_group("dp"))
    options = {"device_mesh": init_device_mesh("cpu", (2, 2))} if root is HYBRID_SHARD else {}
    return plain, wrap(model, root, use_orig_params, wrap_policy=None, **options), mine


def step(model: nn.Module, optimizer: Any, number: int, ranks: list[int], norm_type: float, clip: Any) -> Any:
    """Train by the mean loss of ``ranks`` over two batches, the first without synchronization; return the norm."""
    for micro, rank in itertools.product(range(2), ranks):
        unsynchronized = model.no_sync() if micro == 0 and hasattr(model, "no_sync") else contextlib.nullcontext()
        with unsynchronized:
            (model(batch(2 * number + micro, rank)).square().mean() / len(ranks)).backward()
    norm = clip(0.01, norm_type)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def check(ep: int, root: Any, inner: Any, use_orig_params: bool, norm_type: float) -> None:
    plain, model, mine = built(ep, root, inner, use_orig_params)
    of_plain = torch.optim.SGD(plain.parameters(), lr=10.0, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
    for number in range(3):

        def clip_plain(*arguments: float) -> Any:
            return nn.utils.clip_grad_norm_(plain.parameters(), *arguments)

        everyone = list(range(dist.get_world_size()))
        expected = step(plain, of_plain, number, everyone, norm_type, clip_plain)
        norm = step(model, optimizer, number, [dist.get_rank()], norm_type, model.clip_grad_norm_)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    with FullyShardedDataParallel.summon_full_params(model):
        for name, param in plain.named_parameters():
            found = model.module.get_parameter(name.replace("experts.", "experts._fsdp_wrapped_module."))
            value = param[mine] if name.startswith("experts") else param
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_experts_of_two_ranks_train_like_all_experts_in_one_process() -> None:
    for use_orig_params, norm_type in itertools.product((True, False), (2.0, 1.0, math.inf)):
        check(2, FULL_SHARD, FULL_SHARD, use_orig_params, norm_type)
    check(2, NO_SHARD, NO_SHARD, True, 2.0)


@pytest.mark.parametrize("ep", [2, 4])
@on_ranks(4)
def test_experts_of_four_ranks_train_like_all_experts_in_one_process(ep: int) -> None:
    """With two replicas of each expert, sharded or not, and with one; under hybrid sharding of the rest as well."""
    check(ep, FULL_SHARD, FULL_SHARD, True, 2.0)
    check(ep, SHARD_GRAD_OP, NO_SHARD, False, 2.0)
    check(ep, HYBRID_SHARD, FULL_SHARD, True, 1.0)
    check(ep, HYBRID_SHARD, FULL_SHARD, False, math.inf)


@pytest.mark.parametrize("ep", [2, 4])
@on_ranks(4)
def test_mean_over_the_tokens_of_ranks_with_experts(ep: int) -> None:
    """Ranks have other numbers of tokens, of which one has none; also by a divisor that all units have."""
    counts = [TOKENS, 3, 0, 5]
    for root, inner, divisor in [
        (FULL_SHARD, FULL_SHARD, None),
        (HYBRID_SHARD, NO_SHARD, None),
        (NO_SHARD, FULL_SHARD, 3),
    ]:
        plain, model, mine = built(ep, root, inner, True)
        if divisor is not None:
            model.set_gradient_divide_factor(divisor, recurse=True)
        rank = dist.get_rank()
        for micro in range(2):
            losses = model(batch(micro, rank)).square().sum(dim=-1).flatten()[: counts[rank]]
            (losses.sum() * fsdp.mean_factor(model, 2 * counts[rank])).backward()
            for other, count in enumerate(counts):
                losses = plain(batch(micro, other)).square().sum(dim=-1).flatten()[:count]
                (losses.sum() / (2 * sum(counts))).backward()
        for (name, param), of_plain in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert of_plain.grad is not None
            expected = of_plain.grad[mine] if "experts" in name else of_plain.grad
            torch.testing.assert_close(fsdp.full_grad(param), expected, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_describe_shows_the_divisor_of_experts() -> None:
    _, model, _ = built(2, FULL_SHARD, FULL_SHARD, True)
    for _ in range(2):
        units = fsdp.describe(model).units
        assert [unit.divisor for unit in units] == [2, 2]
        assert "gradients divided by 2" in str(fsdp.describe(model))
        model(batch(0, dist.get_rank()))
    model.module.experts.set_gradient_divide_factor(1)
    assert fsdp.describe(model).units[1].divisor == 1


@on_ranks(4)
def test_ranks_of_tensor_parallelism_are_no_holders_of_other_experts() -> None:
    """They see the same data: a unit over the ranks of data parallelism inside of a root over all ranks. A warning
    asks for a declaration."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    inner = parallelize_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh["tp"], plan)
    inner = wrap(inner, FULL_SHARD, True, wrap_policy=None, device_mesh=mesh["dp"])
    beside = wrap(nn.Linear(8, 8), FULL_SHARD, True, wrap_policy=None, device_mesh=mesh["dp"])
    model = wrap(nn.Sequential(nn.Linear(8, 8), inner, beside), FULL_SHARD, True, wrap_policy=None)
    twin = copy.deepcopy(model)
    assert [unit.divisor for unit in fsdp.describe(model).units] == [4, 2, 2]
    assert sum(unit.numel for unit in fsdp.describe(model).units) == 4 * (8 * 8 + 8)
    with pytest.warns(
        UserWarning, match=r"unit '1' has DTensors over .*shard_experts.*set_gradient_divide_factor\(2\)"
    ):
        model(torch.ones(2, 8)).sum().backward()
    assert model.state_dict()
    twin.module[1].set_gradient_divide_factor(2)
    twin(torch.ones(2, 8))


@on_ranks(2)
def test_states_that_would_lack_the_experts_of_other_ranks_are_refused(tmp_path: Path) -> None:
    """On every rank, with a remedy; before anything is written or returned, also before the first forward."""
    rank, from_rank0 = dist.get_rank(), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for use_orig_params, kind in itertools.product((True, False), StateDictType):
        _, model, _ = built(2, FULL_SHARD, FULL_SHARD, use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        calls = {
            "state_dict": model.state_dict,
            "optim_state_dict": lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),  # noqa: B023
            "state_dict of a save": lambda: save(tmp_path / "saved", model, optimizer),  # noqa: B023
            "save_safetensors": lambda: fsdp.export.save_safetensors(model, tmp_path / "exported"),  # noqa: B023
            "weights": lambda: fsdp.export.weights(model, to=0),  # noqa: B023
            "fsdp.export.changes": lambda: fsdp.export.snapshot(model),  # noqa: B023
            "set_model_state_dict": lambda: set_model_state_dict(model, {}, options=from_rank0),  # noqa: B023
        }
        local = kind is StateDictType.LOCAL_STATE_DICT
        for _ in range(2):
            for name, call in calls.items():
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    if local and name == "state_dict":
                        with warnings.catch_warnings():
                            warnings.filterwarnings("ignore", r"StateDictType.LOCAL_STATE_DICT of unit 'experts'")
                            assert call()
                        continue
                    words = rf"{name.split()[0]}.*unit 'experts' is over 1 of the 2 ranks.*LOCAL_STATE_DICT"
                    with pytest.raises(NotImplementedError, match=words):
                        call()
            model(batch(0, rank)).square().mean().backward()
            optimizer.step()
        assert not list(tmp_path.iterdir())
        assert model.module.experts.state_dict()["weight"].shape == (EXPERTS // 2, WIDTH, WIDTH)
        model.module.experts.set_gradient_divide_factor(1)
        assert model.state_dict()
