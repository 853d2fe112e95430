"""Sharding on one dimension of a mesh and tensor parallelism on another: ``parallelize_module`` on a transformer with
sequence parallelism of the norms, compared with torch's DDP and the same tensor parallelism.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import (
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    checkpoint,
)
from fsdp.api import FullOptimStateDictConfig, FullStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.mesh_names import numbers
from tests.harness.oracle import assert_bit_equal, assert_equivalent, clean_name, sgd_of_halves
from tests.harness.pool import on_ranks

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
WORDS, WIDTH, HEADS, LENGTH = 12, 8, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x))]
        return self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.inner = nn.LayerNorm(WIDTH), Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(1))
        self.recomputes = recomputes
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = recomputed(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x))


def parallel(net: Transformer, tp: DeviceMesh) -> Transformer:
    cut, everywhere = Shard(1), Replicate()  # along the sequence, as for embedding, norms and residuals
    gathers = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(everywhere,))
    of_net = {
        "embed": RowwiseParallel(input_layouts=everywhere, output_layouts=cut),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=everywhere),
    }
    of_block = {
        "norm1": SequenceParallel(),
        "attention": gathers,
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=cut),
        "norm2": SequenceParallel(),
        "inner": gathers,
        "inner.up": ColwiseParallel(),
        "inner.down": RowwiseParallel(output_layouts=cut),
    }
    parallelize_module(net, tp, of_net)
    for block in net.blocks:
        parallelize_module(block, tp, of_block)
    return net


def local_of(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Layout(NamedTuple):
    """A mesh whose last dimension is tensor parallelism, this rank's data-parallel group, and options."""

    data: Any
    index: int
    tp: DeviceMesh
    options: dict[str, Any]

    @classmethod
    def of(cls, *shape: int) -> Layout:
        number = next(numbers)
        names = tuple(f"{name}{number}" for name in ("replicate", "shard", "tp")[-len(shape) :])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if len(shape) == 2:
            data, options = mesh[names[0]], {}
        else:
            data = mesh[names[:2]]
            options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        flat = data if data.ndim == 1 else data._flatten(f"data{number}")
        return cls(flat.get_group(), flat.get_local_rank(), mesh[names[-1]], {"device_mesh": data, **options})


class Local(nn.Module):
    """The local tensors of a tensor-parallel model, in a form that DDP can train."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.params: dict[str, Any] = dict(net.named_parameters())
        self.local_parts = nn.ParameterList(local_of(param.detach()).clone() for param in self.params.values())
        self.net = [net]

    def around(self, values: Iterable[Tensor]) -> dict[str, Any]:
        """Return the parameters, or given tensors for each of them, as ``DTensor`` s."""
        found: dict[str, Any] = {}
        for value, (name, param) in zip(values, self.params.items()):
            found[name] = value
            if isinstance(param, DTensor):
                placed, shape = (param.device_mesh, param.placements), {"shape": param.shape, "stride": param.stride()}
                found[name] = DTensor.from_local(value, *placed, run_check=False, **shape)
        return found

    def forward(self, *args: Any) -> Any:
        return torch.func.functional_call(self.net[0], self.around(self.local_parts), args)


def train(model: nn.Module, world: Layout, steps: int, optimizer: Any = None) -> list[Tensor]:
    """Train and return the losses."""
    optimizer, losses = optimizer or sgd_of_halves(model.parameters()), []
    for step in range(steps):
        random = torch.Generator().manual_seed(step * world.data.size() + world.index)
        words = torch.randint(WORDS, (2, LENGTH + 1), generator=random)
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def local_parts(model: FSDP) -> dict[str, Tensor]:
    """Return this rank's tensor-parallel parts of all parameters."""
    with FSDP.summon_full_params(model):
        params: dict[str, Any] = {clean_name(name): param for name, param in model.named_parameters()}
        return {name: local_of(param.detach()).clone() for name, param in params.items()}


def by_ddp(world: Layout, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    local = Local(parallel(Transformer(), world.tp))
    losses = train(DistributedDataParallel(local, process_group=world.data), world, steps)
    return losses, dict(zip(local.params, (param.detach() for param in local.local_parts)))


def sharded(net: nn.Module, world: Layout, kinds: set[type[nn.Module]], **options: Any) -> FSDP:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the group has one rank")
        return FSDP(net, auto_wrap_policy=ModuleWrapPolicy(kinds), **world.options, **options)


def compare(
    world: Layout, steps: int, expected: Any, uop: bool, *, recomputes: bool = False, compiles: bool = False
) -> None:
    """Train, and compare losses and values with DDP's."""
    what = f"{world.options}, use_orig_params={uop}, recomputes={recomputes}, compiles={compiles}"
    net = parallel(Transformer(recomputes=recomputes), world.tp)
    if compiles:
        net.blocks[0].inner.compile(backend="aot_eager", fullgraph=True)
    model = sharded(net, world, {Block}, use_orig_params=uop)
    with warnings.catch_warnings():
        # a question of torch's compiler
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        losses = train(model, world, steps)
    # DDP adds more than two terms in a different order
    check = assert_bit_equal if world.data.size() < 3 else assert_equivalent
    by_step = [{str(step): loss for step, loss in enumerate(its)} for its in (losses, expected[0])]
    check(*by_step, what)
    check(local_parts(model), expected[1], what)


@on_ranks(4)
def test_training_equals_ddp_with_the_same_tensor_parallelism() -> None:
    world = Layout.of(2, 2)
    expected = by_ddp(world, 5)
    compare(world, 5, expected, False)
    compare(world, 5, expected, True, recomputes=True)
    of_two = by_ddp(world, 2)  # the same with replicas, with shards, and with both
    for recomputes, uop, *shape in (
        (False, True, 4, 1),
        (True, False, 1, 4),
        (True, False, 2, 1, 2),
        (False, True, 1, 2, 2),
    ):
        world = Layout.of(*shape)
        compare(world, 2, of_two if world.data.size() == 2 else by_ddp(world, 2), uop, recomputes=recomputes)


@on_ranks(2)
def test_compiled_layers_of_tensor_parallelism_train_as_uncompiled_ones() -> None:
    with mock.patch.dict(os.environ, FSDP_FORCE_SHARDED="1"):
        world = Layout.of(1, 2)  # as few ranks as possible, since the compiler takes seconds on each
        compare(world, 2, by_ddp(world, 2), True, compiles=True)


# -- state -------------------------------------------------------------------------------------------------------------


FORMS: list[tuple[Any, ...]] = [
    (FULL, FullStateDictConfig(), FullOptimStateDictConfig()),
    (FULL, FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True)),
    (SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    (SHARDED, RaggedStateDictConfig(), RaggedOptimStateDictConfig()),
]


class NarrowLayers(nn.Module):
    """A model in which the second rank of tensor parallelism has no elements of one layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.up, self.down = nn.Embedding(WORDS, 3), nn.Linear(3, 5), nn.Linear(5, 3)
        self.single = nn.Linear(3, 1)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.down(self.up(self.embed(words))))
        return x.repeat(1, 1, 4) * self.single(x)


def make_narrow(world: Layout, seed: int = 0) -> NarrowLayers:
    plan = {
        # local tensors of different sizes do not determine the global shape
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
        "single": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(NarrowLayers(seed), world.tp, plan)


def check_forms(
    path: Path,
    world: Layout,
    uop: bool,
    forms: list[tuple[Any, ...]],
    values: dict[str, Tensor],
    momenta: dict[str, Tensor],
) -> None:
    def made(seed: int, uop: bool) -> tuple[FSDP, Any]:
        model = sharded(make_narrow(world, seed), world, {nn.Linear}, use_orig_params=uop)
        return model, sgd_of_halves(model.parameters())

    what = f"{world.options}, use_orig_params={uop}"
    model, optimizer = made(0, uop)
    train(model, world, 2, optimizer)
    assert not uop or all(param.numel() for param in optimizer.state), f"{what}: state without elements"
    for kind, *configs in forms:
        with FSDP.state_dict_type(model, kind, *configs):
            state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        model, optimizer = made(1, uop)  # the next form saves this model
        with FSDP.state_dict_type(model, kind, *configs):
            model.load_state_dict(state)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim))
        check_whole(model, optimizer, values, momenta, f"{what}, {configs}")
    checkpoint.save(path, model, optimizer, progress=False)
    model, optimizer = made(1, not uop)
    checkpoint.load(path, model, optimizer, progress=False)
    check_whole(model, optimizer, values, momenta, f"{what}, files")
    assert_bit_equal(checkpoint.load_plain(path, progress=False).model, values, f"{what}, load_plain")


def check_whole(model: FSDP, optimizer: Any, values: Any, momenta: Any, what: str) -> None:
    with FSDP.state_dict_type(model, FULL):
        assert_bit_equal(model.state_dict(), values, what)
        found = FSDP.optim_state_dict(model, optimizer)["state"]
    assert_bit_equal({name: its["momentum_buffer"] for name, its in found.items()}, momenta, what)


@on_ranks(4)
def test_a_rank_without_elements_of_a_parameter_saves_and_loads(tmp_path: Path) -> None:
    root = str(tmp_path)
    replicated = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    for shape, more, modes in (
        ((2, 2), {}, {False: FORMS, True: FORMS[::2]}),
        ((2, 2), replicated, {False: FORMS[:1]}),
        ((1, 2, 2), {}, {True: FORMS[1::2]}),
    ):
        world = Layout.of(*shape)
        world = world._replace(options={**world.options, **more})
        local = Local(make_narrow(world))
        optimizer = sgd_of_halves(local.parameters())
        train(DistributedDataParallel(local, process_group=world.data), world, 2, optimizer)
        values = {name: whole(value) for name, value in local.around(local.local_parts).items()}
        moments = [optimizer.state[param]["momentum_buffer"] for param in local.local_parts]
        momenta = {name: whole(value) for name, value in local.around(moments).items()}
        for uop, forms in modes.items():
            check_forms(Path(root, f"{shape}{more}{uop}"), world, uop, forms, values, momenta)


@on_ranks(8)
def test_optimizer_state_is_saved_where_another_mesh_has_the_same_tensor_parallel_ranks() -> None:
    """DTensor caches one spec for equal meshes, so the model's spec refers to the mesh of the first use."""
    other = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))["tp"]
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    beside = parallelize_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), other, plan)
    beside(torch.ones(2, 8)).sum().backward()
    torch.manual_seed(0)
    net = parallelize_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh["tp"], plan)
    model = FSDP(net, device_mesh=mesh["shard"], use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    assert {name: states["exp_avg"].shape for name, states in saved["state"].items()} == {
        name: param.shape for name, param in nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).named_parameters()
    }


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
    ways: dict[str, dict[str, Any]] = {
        "over the ranks of data parallelism": world.options,
        "sharded over all ranks": {},
        "replicated over all ranks": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    }
    values = {name: whole(param) for name, param in make_narrow(world).named_parameters()}
    for (way, embed), one_root in itertools.product(ways.items(), (True, False)):
        path = Path(root, f"{way}, {one_root}")
        checkpoint.save(path, wrap_apart(world, 0, embed, whole=one_root), progress=False)
        assert_bit_equal(checkpoint.load_plain(path, progress=False).model, values, path.name)
        model = wrap_apart(world, 1, embed, whole=one_root)
        checkpoint.load(path, model, progress=False)
        checkpoint.save(path, model, progress=False)
        assert_bit_equal(checkpoint.load_plain(path, progress=False).model, values, f"{path.name}, loaded")
