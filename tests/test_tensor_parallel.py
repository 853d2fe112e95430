"""Tensor parallelism on one dimension of a mesh, and sharding, replicas or both on the remaining ones."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import (
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    checkpoint,
    full_grad,
    full_tensor,
    global_shape,
    num_params,
)
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.optim_states import load_model, model_state, save
from tests.harness.oracle import adamw, assert_bit_equal, assert_equivalent, clean_name, flatten_state, sgd_of_halves
from tests.harness.pool import on_ranks
from tests.harness.small import torchs
from tests.harness.tensor_parallel import (
    WIDTH,
    WORDS,
    Block,
    Layout,
    Transformer,
    by_number,
    local_of,
    loss_of,
    parallel,
    sharded,
    summoned,
    train,
    train_by_hand,
    values_of,
    whole,
)
from tests.harness.versions import needs

HIDDEN = 2 * WIDTH


def wrapped(net: Transformer, world: Layout, **options: Any) -> FSDP:
    return sharded(parallel(net, world.tp), world, {Block}, **options)


Expected = tuple[dict[str, Tensor], dict[str, Tensor]]  # losses and values


def by_hand(world: Layout, steps: int, micro: int = 1) -> Expected:
    plain = parallel(Transformer(dtype=torch.float64), world.tp)
    return by_number(train_by_hand(plain, world, steps, micro)), values_of(plain)


def compare(world: Layout, expected: Expected, uop: bool, *, micro: int = 1, **options: Any) -> None:
    """Train, and compare losses and values with the tensor-parallel model whose gradients are averaged by hand."""
    recomputes = options.pop("recomputes", False)
    what = f"{world.options}, {options}, use_orig_params={uop}, {micro=}, {recomputes=}"
    net = parallel(Transformer(dtype=torch.float64, recomputes=recomputes), world.tp)
    model = sharded(net, world, {Block}, use_orig_params=uop, **options)
    losses = train(model, world, len(expected[0]) // micro, micro)
    # more than two terms are added in a different order
    check = assert_bit_equal if world.data.size() < 3 else assert_equivalent
    check(by_number(losses), expected[0], what)
    check(summoned(model), expected[1], what)


@on_ranks(4)
def test_training_equals_the_tensor_parallel_model() -> None:
    """With shards, replicas and both, and with accumulation and recomputation."""
    world = Layout.of(2, 2)
    compare(world, by_hand(world, 1, 2), True, micro=2, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    expected = by_hand(world, 2)
    of_group = {"device_mesh": None, "process_group": world.data}
    compare(world, expected, True, sharding_strategy=ShardingStrategy.NO_SHARD, **of_group)
    for recomputes, uop, *shape in ((True, True, 2, 1, 2), (False, False, 1, 2, 2)):
        compare(Layout.of(*shape, number=world.number), expected, uop, recomputes=recomputes)


# -- summoning, clipping, precision ------------------------------------------------------------------------------------


def leaves_are_dtensors(model: FSDP, dtype: torch.dtype) -> list[Any]:
    """Check at each forward that the parameters of a block are DTensors of `dtype`."""
    seen: list[Any] = []

    def look(module: Any, args: Any) -> None:
        weight = module.inner.up.weight
        seen.append((type(weight), isinstance(weight, nn.Parameter), weight.placements, weight.dtype, weight.shape))
        seen.append((type(model.gate.weight), model.gate.weight.dtype))

    model.blocks[1].module.register_forward_pre_hook(look)
    return [(DTensor, True, (Shard(0),), dtype, (HIDDEN, WIDTH)), (nn.Parameter, dtype)], seen


def _start(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.5)


@needs(2, 11, "cannot recompute a sharded embedding")
@on_ranks(4)
def test_leaves_are_dtensors_in_the_dtype_of_mixed_precision_and_of_casts() -> None:
    world, low = Layout.of(2, 2), torch.bfloat16
    expected = loss_of(parallel(Transformer(dtype=low), world.tp), world, 0)
    model = wrapped(Transformer(), world, mixed_precision=MixedPrecision(low, torch.float32))
    looks, seen = leaves_are_dtensors(model, low)
    loss = loss_of(model, world, 0)
    assert seen == looks and torch.equal(loss, expected)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad and p.numel())
    # moved and cast after it was wrapped and used
    net = parallel(Transformer(dtype=low), world.tp)
    train_by_hand(net, world, 1)
    model = wrapped(Transformer(), world, use_orig_params=True)
    looks, seen = leaves_are_dtensors(model, low)
    loss_of(model, world, 0).backward()
    model.zero_grad()
    model.bfloat16()
    seen.clear()
    assert_bit_equal(by_number(train(model, world, 1)), by_number([expected]), "cast")
    assert seen == looks
    assert_bit_equal(summoned(model), values_of(net), "cast")


def norm_of(net: nn.Module) -> float:
    grads = [whole(param.grad).double() for param in net.parameters() if param.grad is not None]
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads))


@on_ranks(4)
def test_gradients_of_ignored_parameters_count_in_the_norm() -> None:
    """The user averages them."""
    world = Layout.of(2, 2)
    net = parallel(Transformer(), world.tp)
    train_by_hand(net, world, 1)
    norm = norm_of(net)
    for uop in (False, True):
        net = parallel(Transformer(), world.tp)
        ignored = [net.blocks[0].norm.weight, net.blocks[1].inner.up.weight, net.gate.weight]
        model = sharded(net, world, {Block}, use_orig_params=uop, ignored_states=ignored)
        loss_of(model, world, 0).backward()
        for param in ignored:
            local = local_of(param.grad)
            dist.all_reduce(local, group=world.data)
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

    def forward(self, x: Tensor) -> Tensor:
        inner = DTensor.from_local(x * self.plain * self.scales.mean(), self.tp[0], [Replicate()])
        inner = torch.tanh(torch.nn.functional.linear(inner, self.weight)).redistribute(placements=[Replicate()])
        return torch.nn.functional.linear(inner, self.single).full_tensor()


@on_ranks(4)
def test_parts_of_different_sizes_are_summoned_and_clipped() -> None:
    world = Layout.of(2, 2)
    plain = Odd(world.tp)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(world.index))
    plain(x).sum().backward()
    for uop in (False, True):
        model = FSDP(Odd(world.tp), use_orig_params=uop, **world.options)
        model(x).sum().backward()
        total = 0.0
        for param in plain.parameters():
            grad = whole(param.grad).clone()
            dist.all_reduce(grad, group=world.data)
            total += float((grad / 2).double().square().sum())
        assert float(model.clip_grad_norm_(1.0)) == pytest.approx(math.sqrt(total), rel=1e-6)
        assert_bit_equal(summoned(model), values_of(plain), "odd sizes")


@on_ranks(4)
def test_dtensors_that_cannot_be_sharded_are_refused() -> None:
    world = Layout.of(2, 2)
    tp, dp, mesh = world.tp, world.options["device_mesh"], world.mesh
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
    model = FSDP(parallel(Transformer(), tp), process_group=world.data)
    with (
        FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(NotImplementedError, match=r"LOCAL_STATE_DICT of .* parameters of tensor parallelism"),
    ):
        model.state_dict()


@on_ranks(4)
def test_summoning_clipping_and_copies() -> None:
    world = Layout.of(2, 2)
    tp, net = world.tp, parallel(Transformer(), world.tp)
    train_by_hand(net, world, 1)
    grads = {name: whole(param.grad) for name, param in net.named_parameters() if param.grad is not None}
    values = values_of(net)
    norm = norm_of(net)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for uop in (False, True):
        # sync_module_states gives all replicas the values of the first
        model = wrapped(Transformer(seed=world.index), world, use_orig_params=uop, sync_module_states=True)
        expected, seen = leaves_are_dtensors(model, torch.float32)
        twin = copy.deepcopy(model)
        train(model, world, 1)
        assert seen == expected
        assert_bit_equal(summoned(model), values, "synchronised")
        # the norm counts each part once, and is the same on all ranks
        for order, is_norm, most in ((math.inf, largest, 1e3), (2, norm, 1e-3)):
            found = model.clip_grad_norm_(most, order)
            assert float(found) == pytest.approx(is_norm, rel=1e-6)
            several = [torch.zeros(()) for _ in range(4)]
            dist.all_gather(several, found)
            assert all(torch.equal(one, found) for one in several)
        train(model := copy.deepcopy(twin), world, 1)
        assert_bit_equal(summoned(model), values, "a copy")
        # full values and gradients of sharded parameters
        assert num_params(model) == sum(param.numel() for param in Transformer().parameters())
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
                up = model.blocks[1].inner.up
                up.weight.grad.mul_(2)
                up.bias.grad = distribute_tensor(torch.ones(HIDDEN), tp, [Shard(0)])
            doubled = {clean_name(name): full_grad(param) for name, param in model.named_parameters()}
            assert torch.equal(doubled["blocks.1.inner.up.weight"], 2 * grads["blocks.1.inner.up.weight"])
            assert torch.equal(doubled["blocks.1.inner.up.bias"], torch.ones(HIDDEN))
        # values written to summoned parameters, and replacements of them, stay
        with FSDP.summon_full_params(model), torch.no_grad():
            model.blocks[1].inner.down.weight.mul_(2)
            model.blocks[1].inner.up.bias = nn.Parameter(distribute_tensor(torch.ones(HIDDEN), tp, [Shard(0)]))
        now = summoned(model)
        assert torch.equal(now["blocks.1.inner.down.weight"], 2 * values["blocks.1.inner.down.weight"])
        assert torch.equal(now["blocks.1.inner.up.bias"], torch.ones(HIDDEN))
        if uop:
            with pytest.raises(NotImplementedError, match=r"'inner.up.bias' of .*a DTensor while it is sharded"):
                twin.blocks[1].inner.up.bias = nn.Parameter(distribute_tensor(torch.ones(HIDDEN), tp, [Shard(0)]))
                loss_of(twin, world, 0)
    model = wrapped(Transformer(), world, sharding_strategy=ShardingStrategy.NO_SHARD)
    loss_of(model, world, 0).backward()
    assert float(model.clip_grad_norm_(1e-3)) == pytest.approx(norm, rel=1e-6)
    with torch.device("meta"):
        net = Transformer()
        parallel(net, tp)
    model = sharded(net, world, {Block}, use_orig_params=True, param_init_fn=_start, device_id="cpu")
    halves = {name: torch.full_like(value, 0.5) for name, value in values.items()}
    assert_bit_equal(summoned(model), halves, "from meta")


# -- state -------------------------------------------------------------------------------------------------------------


def assert_like(found: Any, expected: Any, what: str) -> None:
    """Check that two tensors of state dicts agree in type, placement, dtype and values."""
    assert type(found) is type(expected), f"{what}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, DTensor):
        assert found.placements == expected.placements, f"{what}: {found.placements}, {expected.placements}"
        assert found.device_mesh == expected.device_mesh, what
        assert (found.shape, found.stride()) == (expected.shape, expected.stride()), what
        found, expected = found.to_local(), expected.to_local()
    if isinstance(expected, Tensor):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype), what
        assert torch.equal(found, expected), f"{what}: {found} instead of {expected}"
    else:
        assert found == expected, what


def trained_with(model: Any, world: Layout) -> torch.optim.Optimizer:
    optimizer = adamw(model.parameters())
    for step in range(2):
        loss_of(model, world, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def check_files(path: Path, world: Layout, model: FSDP, optimizer: Any, values: Any, of_all: Any) -> None:
    """Load checkpoints from 2 x 2 ranks into 2 x 2 and 4 ranks and into plain models, and back."""
    checkpoint.async_save(path / "first", model, optimizer).result()
    found = checkpoint.load_plain(path / "first", progress=False)
    assert_bit_equal(found.model, values, "load_plain")
    assert found.optimizer is not None
    for name, key in of_all:
        assert_like(found.optimizer["state"][name][key], of_all[name, key], f"load_plain: {key} of {name}")
    flat = FSDP(Transformer(1).requires_grad_(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    of_flat = adamw(flat.parameters())
    checkpoint.load(path / "first", flat, of_flat, progress=False)
    assert_bit_equal(summoned(flat), values, "loaded by four ranks")
    checkpoint.save(path / "second", flat, of_flat, progress=False)
    uop = not model.blocks[0]._fsdp_unit.policy.tree.use_orig_params
    back = wrapped(Transformer(2).requires_grad_(), world, use_orig_params=uop)
    of_back = adamw(back.parameters())
    checkpoint.load(path / "second", back, of_back, progress=False)
    assert_bit_equal(summoned(back), values, "loaded from four ranks")
    again = save(FSDP, back, of_back, "FULL_STATE_DICT")["state"]
    for name, key in of_all:
        assert_like(again[name][key], of_all[name, key], f"loaded from four ranks: {key} of {name}")


@on_ranks(4)
def test_state_equals_torchs_and_loads_at_any_number_of_ranks(tmp_path: Path) -> None:
    world = Layout.of(2, 2)
    module = parallel(Transformer().requires_grad_(), world.tp)
    theirs = torchs(module, blocks={Block}, device_mesh=world.options["device_mesh"])
    their_optimizer = trained_with(theirs, world)
    kinds = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
    expected = {kind: model_state(TorchFSDP, theirs, kind) for kind in kinds}
    values = {name: whole(value) for name, value in expected[kinds[0]].items()}
    moments = {kind: save(TorchFSDP, theirs, their_optimizer, kind) for kind in kinds}
    of_all = {
        (name, key): whole(value) for name, its in moments[kinds[0]]["state"].items() for key, value in its.items()
    }
    for uop in (False, True):
        model = wrapped(Transformer().requires_grad_(), world, use_orig_params=uop)
        optimizer = trained_with(model, world)
        full, sharded = (model_state(FSDP, model, kind) for kind in kinds)
        assert list(full) == list(expected[kinds[0]]) and list(sharded) == list(full)
        for name in full:  # torch's full values are DTensors of tensor parallelism
            assert_like(full[name], values[name], f"full {name}")
            assert_like(sharded[name], expected[kinds[1]][name], f"sharded {name}")
        alone = model_state(FSDP, model, kinds[0], rank0_only=True, offload_to_cpu=True)
        assert set(alone) == (set(full) if world.index == 0 else set())
        for name in alone:
            assert_like(alone[name], values[name], f"rank0_only {name}")
        with FSDP.summon_full_params(model):
            for name, value in model_state(FSDP, model, kinds[1]).items():
                assert_like(value, expected[kinds[1]][name], f"sharded while it is summoned {name}")
        # Each library loads the state of the two.
        givens = [(kinds[0], full), (kinds[0], expected[kinds[0]]), (kinds[1], sharded)]
        for kind, given in givens[uop::2]:
            noise = wrapped(Transformer(1).requires_grad_(), world, use_orig_params=uop)
            load_model(FSDP, noise, kind, given)
            assert_bit_equal(summoned(noise), values, f"loaded from {kind}")
        load_model(TorchFSDP, theirs, kinds[1], sharded)
        # optimizer state
        alone = save(FSDP, model, optimizer, kinds[0], rank0_only=True)
        if dist.get_rank() == 0:
            for name, key in of_all:
                assert_like(alone["state"][name][key], of_all[name, key], f"rank0_only, {key} of {name}")
        else:
            assert alone == {}
        for kind in kinds:
            found = save(FSDP, model, optimizer, kind)
            assert {(name, key) for name, its in found["state"].items() for key in its} == set(of_all)
            for name, key in of_all:
                value, theirs_value = found["state"][name][key], moments[kind]["state"][name][key]
                assert_like(value, of_all[name, key] if kind == kinds[0] else theirs_value, f"{kind}, {key} of {name}")
            if kind != kinds[uop]:
                continue
            other = wrapped(Transformer(1).requires_grad_(), world, use_orig_params=not uop)
            fresh = adamw(other.parameters())
            with FSDP.state_dict_type(other, StateDictType[kind]):
                fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, found))
            again = save(FSDP, other, fresh, kinds[0])["state"]
            for name, key in of_all:
                assert_like(again[name][key], of_all[name, key], f"loaded from {kind}, {key} of {name}")
    check_files(tmp_path, world, model, optimizer, values, of_all)


def make_narrow(world: Layout, seed: int = 0) -> nn.Module:
    """Build a model in which the second rank of tensor parallelism has no elements of one layer."""

    def forward(m: Any, words: Tensor) -> Tensor:
        x = torch.tanh(m.down(m.up(m.embed(words))))
        return x.repeat(1, 1, 4) * m.single(x)

    plan = {
        # local tensors of different sizes do not determine the global shape
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
        "single": ColwiseParallel(output_layouts=Replicate()),
    }
    torch.manual_seed(seed)
    embed, up, down = nn.Embedding(WORDS, 3), nn.Linear(3, 5), nn.Linear(5, 3)
    return parallelize_module(Net(forward, embed=embed, up=up, down=down, single=nn.Linear(3, 1)), world.tp, plan)


def wrap_apart(world: Layout, seed: int, embed: dict[str, Any], *, whole: bool) -> nn.Module:
    """Wrap the embedding with separate options, and the model if `whole`."""
    net = make_narrow(world, seed)
    net.embed = FSDP(net.embed, **embed)
    if whole:
        return FSDP(net, **world.options)
    for name in ("up", "down", "single"):
        setattr(net, name, FSDP(getattr(net, name), **world.options))
    return net


@on_ranks(4)
def test_a_unit_outside_tensor_parallelism_is_saved_once(tmp_path: Path) -> None:
    root = str(tmp_path)
    world = Layout.of(2, 2)
    ways: list[tuple[str, dict[str, Any], bool]] = [
        ("over the ranks of data parallelism", world.options, False),
        ("sharded over all ranks", {}, False),
        ("replicated over all ranks", {"sharding_strategy": ShardingStrategy.NO_SHARD}, True),
    ]
    for way, embed, one_root in ways:
        path = Path(root, f"{way}, {one_root}")
        model = wrap_apart(world, 0, embed, whole=one_root)
        optimizer = sgd_of_halves(model.parameters())
        train(model, world, 1, optimizer=optimizer)
        checkpoint.save(path / "first", model, optimizer, progress=False)
        other = wrap_apart(world, 1, embed, whole=one_root)
        of_other = sgd_of_halves(other.parameters())
        checkpoint.load(path / "first", other, of_other, progress=False)
        checkpoint.save(path / "second", other, of_other, progress=False)
        first, second = (checkpoint.load_plain(path / name, progress=False) for name in ("first", "second"))
        assert_bit_equal(first.model, summoned(model), path.name)
        assert_bit_equal(second.model, first.model, f"{path.name}, loaded")
        assert first.optimizer is not None and second.optimizer is not None
        momenta, again = (flatten_state(each.optimizer["state"]) for each in (first, second))
        assert len(momenta) == len(first.model)
        assert_bit_equal(again, momenta, f"{path.name}, loaded state")
