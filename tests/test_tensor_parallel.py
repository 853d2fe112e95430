"""Tensor parallelism on one dimension of a mesh, sharding on the other: 2 x 2 ranks."""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_api
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchKind
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import (
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    api,
    checkpoint,
    full_grad,
    full_tensor,
    global_shape,
    num_params,
)
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.mesh_names import numbers
from tests.harness.oracle import adamw, assert_bit_equal, clean_name, sgd_of_halves
from tests.harness.pool import on_ranks

WIDTH, HIDDEN, LENGTH = 6, 10, 4


class Block(nn.Module):
    """A transformer block without softmax. Some parameters are not split by tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.sequence: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x
        for cut in self.sequence:
            inner = cut(inner)
        return x + self.gate(self.down(torch.tanh(self.up(self.norm(inner)))))


class Net(nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SequenceParallelStyle:
    """Splits activations along the sequence dimension for the sequence-parallel modules."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(x, self.mesh, [Replicate()])

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallelStyle:
        return self


def make_mesh() -> DeviceMesh:
    number = next(numbers)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"dp{number}", f"tp{number}"))


def dp_tp(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[0]], mesh[mesh.mesh_dim_names[1]]


def parallel(net: Net, tp: DeviceMesh) -> Net:
    plan = {
        "norm": SequenceParallel(sequence_dim=1),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    for block in net.blocks:
        parallelize_module(block, tp, plan)
        block.sequence.append(SequenceParallelStyle(tp))
    return net


def wrapped(net: Net, mesh: DeviceMesh, **options: Any) -> FSDP:
    options = {"device_mesh": mesh, **options}
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def batch(step: int, replica: int) -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica))


def loss_of(model: nn.Module, step: int, replica: int) -> torch.Tensor:
    x = batch(step, replica).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def train_by_hand(net: Net, dp: DeviceMesh, steps: int, micro: int = 1) -> list[torch.Tensor]:
    """Train the tensor-parallel model with gradients averaged over `dp` by hand, and return the losses."""
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer, losses = sgd_of_halves(params), []
    for step in range(steps):
        sums: list[Any] = [None] * len(params)
        for part in range(micro):
            losses.append(loss_of(net, micro * step + part, dp.get_local_rank()))
            grads: Any = torch.autograd.grad(losses[-1], params)
            for index, (param, grad) in enumerate(zip(params, grads)):
                if isinstance(param, DTensor):
                    grad = grad.redistribute(placements=param.placements)
                sums[index] = grad if part == 0 else sums[index] + grad
        for param, total in zip(params, sums):
            local = total.to_local() if isinstance(total, DTensor) else total
            dist.all_reduce(local, group=dp.get_group())
            local.div_(2)
            param.grad = total
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def values_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(param) for name, param in net.named_parameters()}


def trained(model: FSDP, replica: int, steps: int, micro: int = 1) -> list[torch.Tensor]:
    """Train and return the losses; the last gradients stay."""
    optimizer, losses = sgd_of_halves([p for p in model.parameters() if p.requires_grad]), []
    for step in range(steps):
        for part in range(micro):
            with model.no_sync() if part < micro - 1 else nullcontext():
                losses.append(loss_of(model, micro * step + part, replica))
                losses[-1].backward()
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return losses


def summoned(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        return {clean_name(name): whole(param).clone() for name, param in model.named_parameters()}


def assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, list):
        found, expected = ({str(index): value for index, value in enumerate(each)} for each in (found, expected))
    assert_bit_equal(found, expected, what)


@on_ranks(4)
def test_training_equals_the_tensor_parallel_model_bit_for_bit() -> None:
    mesh = make_mesh()
    dp, tp = dp_tp(mesh)
    replica = dp.get_local_rank()
    strategies: list[dict[str, Any]] = [
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"device_mesh": None, "process_group": dp.get_group()},
    ]
    both = [*itertools.product((False, True), [{}])]
    by_turns = [*zip(itertools.cycle((False, True)), strategies)]
    for steps, micro, ways in ((5, 1, both), (3, 2, both), (2, 1, by_turns)):
        net = parallel(Net(), tp)
        losses = train_by_hand(net, dp, steps, micro)
        expected = values_of(net)
        for uop, options in ways:
            what = f"use_orig_params={uop}, {options}, {micro} backwards a step"
            model = wrapped(parallel(Net(), tp), dp, use_orig_params=uop, **options)
            assert_same(trained(model, replica, steps, micro), losses, what)
            assert_same(summoned(model), expected, what)


# -- summoning, clipping, precision ------------------------------------------------------------------------------------


def leaves_are_dtensors(model: FSDP, dtype: torch.dtype) -> list[Any]:
    """Check at each forward that the parameters of a block are DTensors of `dtype`."""
    seen: list[Any] = []

    def look(module: Any, args: Any) -> None:
        weight = module.up.weight
        seen.append((type(weight), isinstance(weight, nn.Parameter), weight.placements, weight.dtype, weight.shape))
        seen.append((type(module.gate.weight), module.gate.weight.dtype))

    model.blocks[0].module.register_forward_pre_hook(look)
    return [(DTensor, True, (Shard(0),), dtype, (HIDDEN, WIDTH)), (nn.Parameter, dtype)], seen


def _start(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.5)


def check_precision(dp: DeviceMesh, tp: DeviceMesh) -> None:
    low, high, replica = torch.bfloat16, torch.float64, dp.get_local_rank()
    expected = loss_of(parallel(Net(dtype=low), tp), 0, replica)
    net = parallel(Net(dtype=high), tp)
    losses = train_by_hand(net, dp, 2)
    for uop in (False, True):
        mixed = MixedPrecision(low, torch.float32)
        model = wrapped(parallel(Net(), tp), dp, use_orig_params=uop, mixed_precision=mixed)
        looks, seen = leaves_are_dtensors(model, low)
        loss = loss_of(model, 0, replica)
        assert seen == looks and torch.equal(loss, expected)
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad and p.numel())
        # moved and cast after it was wrapped and used
        model = wrapped(parallel(Net(), tp), dp, use_orig_params=uop)
        looks, seen = leaves_are_dtensors(model, high)
        loss_of(model, 0, replica).backward()
        model.zero_grad()
        model.double()
        seen.clear()
        assert_same(trained(model, replica, 2), losses, "in double precision")
        assert seen == looks * 2
        assert_same(summoned(model), values_of(net), "in double precision")


def check_ignored(dp: DeviceMesh, tp: DeviceMesh, norm: float) -> None:
    """Gradients of ignored parameters are averaged by the user, and count in the norm."""
    replica = dp.get_local_rank()
    for uop in (False, True):
        net = parallel(Net(), tp)
        ignored = [net.blocks[0].norm.weight, net.blocks[1].up.weight, net.blocks[0].gate.weight]
        model = wrapped(net, dp, use_orig_params=uop, ignored_states=ignored)
        loss_of(model, 0, replica).backward()
        for param in ignored:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            dist.all_reduce(local, group=dp.get_group())
            local.div_(2)
        assert model.blocks[0].norm.weight is ignored[0]
        assert float(model.clip_grad_norm_(1e-3)) == pytest.approx(norm, rel=1e-6)
        assert float(model.clip_grad_norm_(1e-3)) == pytest.approx(1e-3, rel=1e-3)


class Odd(nn.Module):
    """A layer whose parts differ in size; one of them is empty."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tp = [tp]
        self.scales = nn.Parameter(torch.rand(12))  # each rank of tensor parallelism shards it differently
        self.weight = nn.Parameter(distribute_tensor(torch.randn(5, 3), tp, [Shard(0)]))
        self.single = nn.Parameter(distribute_tensor(torch.randn(1, 5), tp, [Shard(0)]))
        self.plain = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = DTensor.from_local(x * self.plain * self.scales.mean(), self.tp[0], [Replicate()])
        inner = torch.tanh(torch.nn.functional.linear(inner, self.weight)).redistribute(placements=[Replicate()])
        return torch.nn.functional.linear(inner, self.single).full_tensor()


def check_odd(dp: DeviceMesh, tp: DeviceMesh) -> None:
    plain = Odd(tp)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dp.get_local_rank()))
    plain(x).sum().backward()
    for uop in (False, True):
        model = FSDP(Odd(tp), device_mesh=dp, use_orig_params=uop)
        model(x).sum().backward()
        total = 0.0
        for param in plain.parameters():
            grad = whole(param.grad).clone()
            dist.all_reduce(grad, group=dp.get_group())
            total += float((grad / 2).double().square().sum())
        assert float(model.clip_grad_norm_(1.0)) == pytest.approx(math.sqrt(total), rel=1e-6)
        assert_same(summoned(model), values_of(plain), "odd sizes")


def check_refused(mesh: DeviceMesh, dp: DeviceMesh, tp: DeviceMesh) -> None:
    for where, placements, error, words in (
        (dp, [Shard(0)], ValueError, r"'weight' of the Linear unit is a DTensor on the ranks \[\d, \d\], and its unit"),
        (mesh, [Replicate(), Shard(0)], NotImplementedError, "'weight' of the Linear unit .* one dimension of a mesh"),
    ):
        linear = nn.Linear(4, 4)
        linear.weight = weight = nn.Parameter(distribute_tensor(linear.weight.detach(), where, placements))
        with pytest.raises(error, match=words):
            FSDP(linear, device_mesh=dp)
        assert linear.weight is weight and not getattr(weight, "_fsdp_flattened", False)
    linear = nn.Linear(3, 5)
    local = DTensor.from_local(torch.ones(2 + tp.get_local_rank(), 3), tp, [Shard(0)], shape=(5, 3), stride=(3, 1))
    linear.weight = nn.Parameter(local)
    with pytest.raises(ValueError, match=r"expected the chunks of torch\.chunk"):
        FSDP(linear, device_mesh=dp)
    model = FSDP(parallel(Net(), tp), process_group=dp.get_group())
    with (
        FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(NotImplementedError, match=r"LOCAL_STATE_DICT of .* parameters of tensor parallelism"),
    ):
        model.state_dict()


@on_ranks(4)
def test_summoning_clipping_copies_precision_and_ignored_parameters() -> None:
    mesh = make_mesh()
    dp, tp = dp_tp(mesh)
    replica, everyone = dp.get_local_rank(), dist.group.WORLD
    net = parallel(Net(), tp)
    train_by_hand(net, dp, 1)
    grads = {name: whole(param.grad) for name, param in net.named_parameters() if param.grad is not None}
    values = values_of(net)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for uop in (False, True):
        # sync_module_states gives all replicas the values of the first
        model = wrapped(parallel(Net(seed=replica), tp), dp, use_orig_params=uop, sync_module_states=True)
        expected, seen = leaves_are_dtensors(model, torch.float32)
        twin = copy.deepcopy(model)
        trained(model, replica, 1)
        assert seen == expected
        assert_same(summoned(model), values, "synchronised")
        # the norm counts each part once, and is the same on all ranks
        for order, is_norm in ((2, norm), (math.inf, largest)):
            found = model.clip_grad_norm_(1e-3, order)
            assert float(found) == pytest.approx(is_norm, rel=1e-6)
            several = [torch.zeros(()) for _ in range(4)]
            dist.all_gather(several, found, group=everyone)
            assert all(torch.equal(one, found) for one in several)
            trained(model := copy.deepcopy(twin), replica, 1)
            assert_same(summoned(model), values, "a copy")
        # full values and gradients of sharded parameters
        assert num_params(model) == sum(param.numel() for param in Net().parameters())
        if uop:
            for name, param in model.named_parameters():
                assert type(param) is nn.Parameter and param.dim() == 1
                assert global_shape(param) == values[clean_name(name)].shape
                assert torch.equal(full_tensor(param), values[clean_name(name)])
                if param.requires_grad:
                    assert torch.equal(full_grad(param), grads[clean_name(name)])
            with FSDP.summon_full_params(model, with_grads=True):
                for name, param in model.named_parameters():
                    assert param.grad is None or torch.equal(whole(param.grad), grads[clean_name(name)])
                up = model.blocks[0].up
                up.weight.grad.mul_(2)
                up.bias.grad = distribute_tensor(torch.ones(HIDDEN), tp, [Shard(0)])
            doubled = {clean_name(name): full_grad(param) for name, param in model.named_parameters()}
            assert torch.equal(doubled["blocks.0.up.weight"], 2 * grads["blocks.0.up.weight"])
            assert torch.equal(doubled["blocks.0.up.bias"], torch.ones(HIDDEN))
        # values written to summoned parameters, and replacements of them, stay
        with FSDP.summon_full_params(model), torch.no_grad():
            model.blocks[1].down.weight.mul_(2)
            model.blocks[1].up.bias = nn.Parameter(distribute_tensor(torch.ones(HIDDEN), tp, [Shard(0)]))
        now = summoned(model)
        assert torch.equal(now["blocks.1.down.weight"], 2 * values["blocks.1.down.weight"])
        assert torch.equal(now["blocks.1.up.bias"], torch.ones(HIDDEN))
        if uop:
            with pytest.raises(NotImplementedError, match=r"'up.bias' of .*a DTensor while it is sharded"):
                twin.blocks[0].up.bias = nn.Parameter(distribute_tensor(torch.ones(HIDDEN), tp, [Shard(0)]))
                twin(batch(0, 0))
        model = wrapped(parallel(Net(), tp), dp, use_orig_params=uop, sharding_strategy=ShardingStrategy.NO_SHARD)
        loss_of(model, 0, replica).backward()
        assert float(model.clip_grad_norm_(1e-3)) == pytest.approx(norm, rel=1e-6)
        with mock.patch.dict(os.environ, {"FSDP_DEBUG": "1"}):  # leaves check that they are gathered
            model = wrapped(parallel(Net(), tp), dp, use_orig_params=uop)
            trained(model, replica, 1)
            assert_same(summoned(model), values, "checked leaves")
        with torch.device("meta"):
            net = parallel(Net(), tp)
        model = wrapped(net, dp, use_orig_params=uop, param_init_fn=_start, device_id="cpu")
        assert_same(summoned(model), {name: torch.full_like(value, 0.5) for name, value in values.items()}, "from meta")
    check_precision(dp, tp)
    check_ignored(dp, tp, norm)
    check_odd(dp, tp)
    check_refused(mesh, dp, tp)


# -- state -------------------------------------------------------------------------------------------------------------


@contextmanager
def kind_of(library: Any, model: Any, kind: str, **config: Any) -> Iterator[None]:
    """Set the kind of state dicts of a model of ours or of torch's FSDP1."""
    kinds, configs = (StateDictType, api) if library is FSDP else (TorchKind, torch_api)
    made = getattr(configs, "FullStateDictConfig" if kind == "FULL_STATE_DICT" else "ShardedStateDictConfig")(**config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with library.state_dict_type(model, kinds[kind], made):
            yield


def state_of(library: Any, model: Any, kind: str, **config: Any) -> dict[str, Any]:
    with kind_of(library, model, kind, **config):
        return dict(model.state_dict())


def load_state(library: Any, model: Any, kind: str, state: dict[str, Any]) -> None:
    with kind_of(library, model, kind):
        assert model.load_state_dict(state) == ([], [])


def optim_state(library: Any, model: Any, optimizer: Any, kind: str) -> dict[str, dict[str, Any]]:
    with kind_of(library, model, kind):
        return library.optim_state_dict(model, optimizer)


def assert_like(found: Any, expected: Any, what: str) -> None:
    """Check that two tensors of state dicts agree in type, placement, dtype and values."""
    assert type(found) is type(expected), f"{what}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, DTensor):
        assert found.placements == expected.placements, f"{what}: {found.placements}, {expected.placements}"
        assert found.device_mesh == expected.device_mesh, what
        assert (found.shape, found.stride()) == (expected.shape, expected.stride()), what
        found, expected = found.to_local(), expected.to_local()
    if isinstance(expected, torch.Tensor):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype), what
        assert torch.equal(found, expected), f"{what}: {found} instead of {expected}"
    else:
        assert found == expected, what


def trained_with(model: Any, replica: int, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    for step in range(steps):
        loss_of(model, step, replica).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def check_files(
    path: Path, model: FSDP, optimizer: Any, values: Any, of_all: Any, dp: DeviceMesh, tp: DeviceMesh
) -> None:
    """Load checkpoints from 2 x 2 ranks into 2 x 2 and 4 ranks and into plain models, and back."""
    checkpoint.async_save(path / "first", model, optimizer).result()
    found = checkpoint.load_plain(path / "first", progress=False)
    assert_same(found.model, values, "load_plain")
    assert found.optimizer is not None
    for name, key in of_all:
        assert_like(found.optimizer["state"][name][key], of_all[name, key], f"load_plain: {key} of {name}")
    replica = dp.get_local_rank()
    flat = FSDP(Net(1).requires_grad_(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    of_flat = trained_with(flat, replica, steps=1)
    checkpoint.load(path / "first", flat, of_flat, progress=False)
    assert_same(summoned(flat), values, "loaded by four ranks")
    checkpoint.save(path / "second", flat, of_flat, progress=False)
    uop = not model.blocks[0]._fsdp_unit.policy.tree.use_orig_params
    back = wrapped(parallel(Net(2).requires_grad_(), tp), dp, use_orig_params=uop)
    of_back = trained_with(back, replica, steps=1)
    checkpoint.load(path / "second", back, of_back, progress=False)
    assert_same(summoned(back), values, "loaded from four ranks")
    again = optim_state(FSDP, back, of_back, "FULL_STATE_DICT")["state"]
    for name, key in of_all:
        assert_like(again[name][key], of_all[name, key], f"loaded from four ranks: {key} of {name}")


@on_ranks(4)
def test_state_equals_torchs_and_loads_at_any_number_of_ranks(tmp_path: Path) -> None:
    mesh = make_mesh()
    dp, tp = dp_tp(mesh)
    replica = dp.get_local_rank()
    theirs = TorchFSDP(
        parallel(Net().requires_grad_(), tp),
        device_mesh=dp,
        auto_wrap_policy=TorchPolicy({Block}),
        device_id=torch.device("cpu"),
    )
    their_optimizer = trained_with(theirs, replica)
    kinds = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
    expected = {kind: state_of(TorchFSDP, theirs, kind) for kind in kinds}
    values = {name: whole(value) for name, value in expected[kinds[0]].items()}
    moments = {kind: optim_state(TorchFSDP, theirs, their_optimizer, kind) for kind in kinds}
    of_all = {
        (name, key): whole(value) for name, its in moments[kinds[0]]["state"].items() for key, value in its.items()
    }
    for uop in (False, True):
        model = wrapped(parallel(Net().requires_grad_(), tp), dp, use_orig_params=uop)
        optimizer = trained_with(model, replica)
        full, sharded = (state_of(FSDP, model, kind) for kind in kinds)
        assert list(full) == list(expected[kinds[0]]) and list(sharded) == list(full)
        for name in full:  # torch's full values are DTensors of tensor parallelism
            assert_like(full[name], values[name], f"full {name}")
            assert_like(sharded[name], expected[kinds[1]][name], f"sharded {name}")
        alone = state_of(FSDP, model, kinds[0], rank0_only=True, offload_to_cpu=True)
        assert set(alone) == (set(full) if replica == 0 else set())
        for name in alone:
            assert_like(alone[name], values[name], f"rank0_only {name}")
        with FSDP.summon_full_params(model):
            for name, value in state_of(FSDP, model, kinds[1]).items():
                assert_like(value, expected[kinds[1]][name], f"sharded while it is summoned {name}")
        # Each library loads the state of the two.
        plain = {name: value.clone() for name, value in values.items()}
        givens = [(kinds[0], full), (kinds[0], plain), (kinds[1], sharded), (kinds[0], expected[kinds[0]])]
        for kind, given in givens[uop::2]:
            noise = wrapped(parallel(Net(1).requires_grad_(), tp), dp, use_orig_params=uop)
            load_state(FSDP, noise, kind, given)
            assert_same(summoned(noise), values, f"loaded from {kind}")
        load_state(TorchFSDP, theirs, kinds[1], sharded)
        # optimizer state
        for kind in kinds:
            found = optim_state(FSDP, model, optimizer, kind)
            assert {(name, key) for name, its in found["state"].items() for key in its} == set(of_all)
            for name, key in of_all:
                value, theirs_value = found["state"][name][key], moments[kind]["state"][name][key]
                assert_like(value, of_all[name, key] if kind == kinds[0] else theirs_value, f"{kind}, {key} of {name}")
            other = wrapped(parallel(Net(1).requires_grad_(), tp), dp, use_orig_params=not uop)
            fresh = trained_with(other, replica, steps=1)
            with FSDP.state_dict_type(other, StateDictType[kind]):
                fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, found))
            again = optim_state(FSDP, other, fresh, kinds[0])["state"]
            for name, key in of_all:
                assert_like(again[name][key], of_all[name, key], f"loaded from {kind}, {key} of {name}")
        check_files(tmp_path / str(uop), model, optimizer, values, of_all, dp, tp)
