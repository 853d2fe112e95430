"""Experts: a unit over fewer ranks than the root, in whose place other ranks hold other parameters; undeclared, or
declared by `fsdp.shard_experts`.

The reference is one process with all experts and the whole batch, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from fsdp import FullyShardedDataParallel, StateDictType
from fsdp.checkpoint import StateDictOptions, load, load_plain, save, set_model_state_dict
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.mesh_names import mesh_of
from tests.harness.oracle import assert_bit_equal, flatten_state
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
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

        self.computes_with: type[Tensor] = nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is self.computes_with and isinstance(self.weight, nn.Parameter)
        return torch.bmm(x, self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight)


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


class Way(NamedTuple):
    """The number of ranks with different experts, the strategies of the root and of the experts, and the way in which
    the experts are given: undeclared, or as plain parameters or DTensors that are declared."""

    ep: int
    root: Any = FULL_SHARD
    inner: Any = FULL_SHARD
    use_orig_params: bool = True
    given: str = "undeclared"

    def built(self, seed: int = 0) -> tuple[Mixture, Any, slice]:
        """Return the plain mixture, the same with its experts over ``ep`` ranks, and which of them this rank has."""
        torch.manual_seed(seed)
        plain, mesh = Mixture(), mesh_of((dist.get_world_size() // self.ep, self.ep))
        dp, ep = (mesh[name] for name in mesh.mesh_dim_names or ())
        each, place = EXPERTS // self.ep, ep.get_local_rank()
        mine = slice(place * each, (place + 1) * each)
        model = copy.deepcopy(plain)
        model.group, weight = ep.get_group(), model.experts.weight.detach()
        if self.given == "DTensors":
            model.experts.weight = nn.Parameter(distribute_tensor(weight, ep, [Shard(0)]))
            model.experts.computes_with = DTensor
        else:
            model.experts.weight = nn.Parameter(weight[mine].clone())
        options: dict[str, Any] = {"process_group": dp.get_group()}
        if self.given != "undeclared":
            model.experts = copy.deepcopy(fsdp.shard_experts(model.experts, ep))
            options = {"device_mesh": dp}
        model.experts = wrap(model.experts, self.inner, self.use_orig_params, wrap_policy=None, **options)
        options = {"device_mesh": mesh if self.ep == 2 else mesh_of((2, 2))} if self.root is HYBRID_SHARD else {}
        return plain, wrap(model, self.root, self.use_orig_params, wrap_policy=None, **options), mine


def built(ep: int, root: Any, inner: Any, use_orig_params: bool) -> tuple[Mixture, Any, slice]:
    return Way(ep, root, inner, use_orig_params).built()


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
    for number in range(2):

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
    for use_orig_params, norm_type in ((True, 2.0), (False, 1.0), (True, math.inf)):
        check(2, FULL_SHARD, FULL_SHARD, use_orig_params, norm_type)
    check(2, NO_SHARD, NO_SHARD, True, 2.0)


@pytest.mark.parametrize("ep", [2, 4])
@on_ranks(4)
def test_experts_of_four_ranks_train_like_all_experts_in_one_process(ep: int) -> None:
    """With two replicas of each expert, sharded or not, and with one; under hybrid sharding of the rest as well."""
    check(ep, FULL_SHARD, FULL_SHARD, True, 2.0)
    check(ep, SHARD_GRAD_OP, NO_SHARD, False, 2.0)
    check(ep, HYBRID_SHARD, FULL_SHARD, *((True, 1.0) if ep == 2 else (False, math.inf)))


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
                    words = (
                        rf"{name.split()[0]}.*unit 'experts' is over 1 of the 2 ranks.*'experts.weight'.*"
                        "shard_experts.*LOCAL_STATE_DICT"
                    )
                    with pytest.raises(NotImplementedError, match=words):
                        call()
            model(batch(0, rank)).square().mean().backward()
            optimizer.step()
        assert not list(tmp_path.iterdir())
        assert model.module.experts.state_dict()["weight"].shape == (EXPERTS // 2, WIDTH, WIDTH)
        model.module.experts.set_gradient_divide_factor(1)
        assert model.state_dict()


# -- declared experts --------------------------------------------------------------------------------------------------


DECLARED = {
    2: [Way(2, given="plain parameters"), Way(2, NO_SHARD, NO_SHARD, False, "DTensors")],
    4: [
        Way(2, FULL_SHARD, FULL_SHARD, True, "plain parameters"),
        Way(2, HYBRID_SHARD, FULL_SHARD, False, "DTensors"),
        Way(4, FULL_SHARD, FULL_SHARD, False, "plain parameters"),
        Way(4, FULL_SHARD, FULL_SHARD, True, "DTensors"),
        Way(2, SHARD_GRAD_OP, NO_SHARD, True, "DTensors"),
        Way(4, HYBRID_SHARD, NO_SHARD, True, "plain parameters"),
    ],
}


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(whole(found), expected.detach(), rtol=1e-9, atol=1e-12)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, plain: Mixture, of_plain: Any, steps: int) -> None:
    """Train on this rank's batches, and `plain` on those of all ranks; compare losses, gradients and norms."""
    for number in range(steps):
        loss = model(batch(number, dist.get_rank())).square().mean()
        losses = [plain(batch(number, rank)).square().mean() for rank in range(dist.get_world_size())]
        loss.backward()
        torch.stack(losses).mean().backward()
        close(loss, losses[dist.get_rank()])
        its = model.module.experts._fsdp_unit.policy.tree.use_orig_params
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True) if its else ():
            close(fsdp.full_grad(param), expected.grad)
        close(model.clip_grad_norm_(0.05), nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
        for each in (optimizer, of_plain):
            each.step()
            each.zero_grad()


def state_of(model: Any, optimizer: Any, kind: StateDictType = FULL, *configs: Any) -> tuple[Any, Any]:
    with FullyShardedDataParallel.state_dict_type(model, kind, *configs):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def values_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return everything, whole."""
    values, states = state_of(model, optimizer)
    return {**values, **flatten_state(states["state"])}


def train_declared(ranks: int, tmp_path: Path) -> None:
    alone = fsdp.FullStateDictConfig(True, True), fsdp.FullOptimStateDictConfig(True, True)
    for number, way in enumerate(DECLARED[ranks]):
        plain, model, _ = way.built()
        optimizer, of_plain = adamw(model), adamw(plain)
        train(model, optimizer, plain, of_plain, 10 if number == 0 else 2)
        expected: dict[str, Tensor] = {**plain.state_dict()}
        for name, param in plain.named_parameters():
            expected |= flatten_state({name: of_plain.state[param]})
        values = values_of(model, optimizer)
        assert set(values) == set(expected)
        for name, value in expected.items():
            close(values[name], value)
        with FullyShardedDataParallel.summon_full_params(model):
            for name, param in model.named_parameters():
                assert_bit_equal({name: whole(param)}, {name: values[name.replace("_fsdp_wrapped_module.", "")]})
        found, states = state_of(model, optimizer, FULL, *alone)
        if dist.get_rank() == 0:
            assert_bit_equal({**found, **flatten_state(states["state"])}, values)
        else:
            assert not states and not [name for name in found if "experts" in name or way.root is not HYBRID_SHARD]
        save(tmp_path / str(number), model, optimizer, progress=False)
        saved = load_plain(tmp_path / str(number), progress=False)
        assert saved.optimizer is not None
        assert_bit_equal({**saved.model, **flatten_state(saved.optimizer["state"])}, values)


@on_ranks(2)
def test_declared_experts_of_two_ranks_train_and_are_saved_like_those_of_one_process(tmp_path: Path) -> None:
    train_declared(2, tmp_path)


@on_ranks(4)
def test_declared_experts_of_four_ranks_train_and_are_saved_like_those_of_one_process(tmp_path: Path) -> None:
    train_declared(4, tmp_path)


def fresh(way: Way, seed: int) -> tuple[Any, Any]:
    """Return a model of other values, with its optimizer."""
    _, model, _ = way.built(seed)
    return model, adamw(model)


@on_ranks(4)
def test_declared_experts_are_loaded_at_another_number_of_ranks(tmp_path: Path) -> None:
    """From full state dicts and from files; from sharded state dicts by as many ranks. One of the ways has all experts
    on each rank."""
    plain = Way(1)
    for number, way in [*enumerate(DECLARED[4])][::2]:  # and loaded into the others
        model, optimizer = fresh(way, 1)
        model(batch(7, dist.get_rank())).square().mean().backward()
        optimizer.step()
        values, full = values_of(model, optimizer), state_of(model, optimizer)
        save(tmp_path / str(number), model, optimizer, progress=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not sharded .NO_SHARD.: its full state dict is")
            sharded = state_of(model, optimizer, SHARDED)
        others = [plain, DECLARED[4][number - 1]]
        for other, kind, (state, states) in ((way, SHARDED, sharded), (others[number // 2 % 2], FULL, full)):
            model, optimizer = fresh(other, 2)
            with FullyShardedDataParallel.state_dict_type(model, kind):
                model.load_state_dict(state)
                given = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states)
                optimizer.load_state_dict(given)
            assert_bit_equal(values_of(model, optimizer), values, f"{kind} of {way} in {other}")
        other = others[number // 2 % 2 - 1]
        model, optimizer = fresh(other, 2)
        load(tmp_path / str(number), model, optimizer, progress=False)
        assert_bit_equal(values_of(model, optimizer), values, f"file of {way} in {other}")


@on_ranks(4)
def test_plan_and_describe_count_the_part_of_the_experts_on_a_rank() -> None:
    policy = ModuleWrapPolicy({Experts})
    for way in DECLARED[4][:4]:
        _, model, _ = way.built()
        described = fsdp.describe(model)
        planned = fsdp.plan(
            Mixture,
            world_size=4,
            policy=policy,
            strategy=FULL_SHARD,
            experts=Experts,
            expert_ranks=way.ep,
            device="cpu",
        )
        assert planned.numel == described.numel == sum(param.numel() for param in Mixture().parameters())
        if (way.root, way.inner, way.use_orig_params) == (FULL_SHARD, FULL_SHARD, False):
            assert planned[FULL_SHARD].param_nbytes == sum(unit.param_nbytes for unit in described.units)
            assert f"FULL_SHARD, experts over {way.ep} ranks, gradients divided by 4" in str(described) or way.ep == 4
    with pytest.raises(ValueError, match="world_size 4 is not a multiple of expert_ranks 3"):
        fsdp.plan(Mixture, world_size=4, policy=policy, experts=Experts, expert_ranks=3)
    with pytest.raises(ValueError, match="expert_ranks=2 needs units of experts"):
        fsdp.plan(Mixture, world_size=4, experts=Experts, expert_ranks=2)
    single, kinds = nn.Sequential(nn.ParameterDict({"scale": torch.tensor(1.0)})), ModuleWrapPolicy({nn.ParameterDict})
    with pytest.raises(ValueError, match=r"expected \[experts, ...\], but 'scale' of ParameterDict has no dimension"):
        fsdp.plan(single, world_size=4, policy=kinds, experts=nn.ParameterDict, expert_ranks=2)


@on_ranks(4)
def test_ranks_may_have_unequal_numbers_of_declared_experts_and_none() -> None:
    """As many as torch.chunk gives each of four ranks: 2, 2, 1 and 0."""
    dp, ep = (mesh[name] for mesh in [mesh_of((1, 4))] for name in mesh.mesh_dim_names or ())
    weight = torch.arange(15.0).view(5, 3)
    module = nn.ParameterDict({"weight": weight[2 * dist.get_rank() :][:2].clone()})
    fsdp.shard_experts(module, ep)
    model = wrap(nn.Sequential(module, nn.Linear(3, 3)), wrap_policy=None, ignored_modules=[module])
    model.module[0] = wrap(module, wrap_policy=None, device_mesh=dp)
    for _ in range(2):  # the first one compares values that a hook might have written, and changes none
        assert torch.equal(model.state_dict()["0.weight"], weight)
    model.load_state_dict({**model.state_dict(), "0.weight": 2 * weight})
    assert torch.equal(model.state_dict()["0.weight"], 2 * weight)


@on_ranks(4)
def test_declared_experts_next_to_tensor_parallelism_are_counted_and_saved_once(tmp_path: Path) -> None:
    dp, tp = (mesh[name] for mesh in [mesh_of((2, 2))] for name in mesh.mesh_dim_names or ())
    torch.manual_seed(0)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tp, plan)
    experts = fsdp.shard_experts(nn.Linear(4, 4), dp)  # with other values on each rank of dp
    experts = wrap(experts, wrap_policy=None, use_orig_params=True, process_group=dist.new_subgroups(1)[0])
    model = wrap(nn.Sequential(parallel, experts), wrap_policy=None, use_orig_params=True, device_mesh=dp)
    model(torch.ones(2, 4) * (1 + dp.get_local_rank())).sum().backward()
    grads = [fsdp.full_grad(param) for param in model.parameters()]
    norms = torch.stack([grad.norm() for grad in grads if grad is not None])
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norms.norm())
    save(tmp_path, model, progress=False)
    assert_bit_equal(load_plain(tmp_path, progress=False).model, model.state_dict())
    assert model.state_dict()["1.weight"].shape == (8, 4)


@on_ranks(4)
def test_wrong_declarations_of_experts_are_refused_on_every_rank() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    dp, ep = (mesh[name] for name in mesh.mesh_dim_names or ())

    def placed(where: Any, *placements: Any) -> nn.Module:
        return nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(torch.ones(4, 3), where, placements))})

    last = ep.get_local_rank() == 1
    for module, words in (
        (nn.ReLU(), "ReLU has no parameters"),
        (nn.ParameterDict({"scale": torch.tensor(1.0)}), "'scale' has no dimension"),
        (placed(dp, Shard(0)), "'weight' is a DTensor placed as .*; expected"),
        (placed(ep, Shard(1)) if last else placed(ep, Shard(0)), f"on rank {rank | 1}: .*'weight' is a DTensor placed"),
        (nn.Linear(3 + last, 2), r"rank \d has 'weight' of shape \(2, 3\).* and rank \d has 'weight' of shape \(2, 4"),
        (nn.Linear(3, 2, bias=last), "expected the same parameters on all ranks.* has None"),
        (nn.Linear(3, 2).requires_grad_(last), "requires_grad=False and rank . has .*requires_grad=True"),
        (nn.Linear(3, 1 + last), r"have \[1, 2\] rows of parameter 'weight'; expected equally many"),
        (wrap(nn.Linear(3, 4), wrap_policy=None), "is sharded already"),
    ):
        before = dict(module.named_parameters())
        with pytest.raises(ValueError, match=f"shard_experts.*{words}"):
            fsdp.shard_experts(module, ep)
        assert all(param is before[name] for name, param in module.named_parameters())
    with pytest.raises(ValueError, match="needs one dimension of a mesh"):
        fsdp.shard_experts(nn.Linear(3, 4), mesh)
    with pytest.raises(TypeError, match="needs one dimension of a mesh"):
        fsdp.shard_experts(nn.Linear(3, 4), ep.get_group())
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    fsdp.shard_experts(module[0], ep)
    module[1].weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), ep, [Shard(0)]))
    with pytest.raises(NotImplementedError, match=r"'0.bias' over .* \(experts\), '1.weight' over"):
        wrap(module, wrap_policy=None, device_mesh=dp)


@on_ranks(4)
def test_misuse_of_declared_experts_is_refused(tmp_path: Path) -> None:
    mesh = mesh_of((2, 2))
    dp, ep = (mesh[name] for name in mesh.mesh_dim_names or ())
    x, from_rank0 = torch.ones(2, 4), StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def made(beside: bool = False, **options: Any) -> nn.Module:
        experts: Any = fsdp.shard_experts(nn.Sequential(nn.Linear(4, 4)), ep)
        experts.append(nn.Linear(4, 4) if beside else nn.ReLU())
        return nn.Sequential(nn.Linear(4, 4), wrap(experts, wrap_policy=None, device_mesh=dp, **options))

    model = wrap(made(), wrap_policy=None, device_mesh=dp)
    with pytest.raises(
        ValueError, match=r"unit '1' has experts on 4 ranks .* the root unit is over 2 such ranks.*HYBRID"
    ):
        model(x)
    model = wrap(made(reduce_unused=True), wrap_policy=None, reduce_unused=True)
    with pytest.raises(NotImplementedError, match=r"reduce_unused=True.*With experts .*multiplied by zero"):
        model(x)
    model = wrap(made(beside=True), wrap_policy=None)
    model(x).sum().backward()
    with pytest.raises(NotImplementedError, match=r"other ranks hold another '1\.1\.weight'"):
        save(tmp_path, model)
    model = wrap(made(), wrap_policy=None)
    with pytest.raises(RuntimeError, match="needs all units to be sharded over the same group"):
        set_model_state_dict(model, {}, options=from_rank0)
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(RuntimeError, match=r"forward of unit '1' inside summon_full_params.*this rank's experts"),
    ):
        model(x)
    for export in (fsdp.export.save_safetensors, lambda model, path: fsdp.export.snapshot(model)):
        with pytest.raises(NotImplementedError, match="unit '1' has experts or parameters of tensor parallelism"):
            export(model, tmp_path / "exported")
    model(x).sum().backward()
    assert [unit.divisor for unit in fsdp.describe(model).units] == [4, 4]
    alone: Any = made()[1]  # type: ignore[index]
    alone(x).sum().backward()
    assert fsdp.describe(alone).units[0].divisor == 4
    with pytest.raises(NotImplementedError, match=r"clip_grad_norm_.*of whose experts other ranks have others"):
        alone.clip_grad_norm_(1.0)
