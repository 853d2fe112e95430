"""A transformer under tensor parallelism, meshes, and training with gradients that are averaged by hand."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.mesh_names import numbers
from tests.harness.models import in_turn
from tests.harness.oracle import clean_name, sgd_of_halves

WORDS, WIDTH, HEADS, LENGTH = 12, 8, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x))]
        return self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Transformer(nn.Module):
    """A block of attention and one of linear layers. Tensor parallelism leaves out `gate` and `frozen`, which is not
    trained.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        inner = nn.Sequential(OrderedDict(up=up, tanh=nn.Tanh(), down=down))
        self.blocks = nn.ModuleList([Block(Attention()), Block(inner)])
        self.gate, self.frozen = nn.Linear(WORDS, WORDS), nn.Parameter(torch.rand(WORDS), requires_grad=False)
        self.recomputes = recomputes
        self.to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        x = in_turn(self.blocks, self.embed(words), "non-reentrant" if self.recomputes else "none")
        return self.gate(self.head(self.norm(x))) * self.frozen


def parallel(net: Transformer, tp: DeviceMesh) -> Transformer:
    cut, everywhere = Shard(1), Replicate()  # along the sequence, as for embedding, norms and residuals
    gathers = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(everywhere,))
    plan = {
        "embed": RowwiseParallel(input_layouts=everywhere, output_layouts=cut),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.inner": gathers,
        **{f"blocks.0.inner.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.0.inner.o": RowwiseParallel(output_layouts=cut),
        "blocks.1.inner.up": ColwiseParallel(),
        "blocks.1.inner.down": RowwiseParallel(output_layouts=cut),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=everywhere),
    }
    parallelize_module(net, tp, plan)
    return net


def local_of(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def values_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in net.named_parameters()}


def summoned(model: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model):
        return {clean_name(name): whole(param).clone() for name, param in model.named_parameters()}


class Layout(NamedTuple):
    """A mesh whose last dimension is tensor parallelism, this rank's data-parallel group, and options."""

    mesh: DeviceMesh
    data: Any
    index: int
    tp: DeviceMesh
    options: dict[str, Any]
    number: int

    @classmethod
    def of(cls, *shape: int, number: int | None = None) -> Layout:
        """Make a mesh. With the `number` of another one of this job torch reuses results of its operators."""
        number = next(numbers) if number is None else number
        names = tuple(f"{name}{number}" for name in ("replicate", "shard", "tp")[-len(shape) :])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if len(shape) == 2:
            data, options = mesh[names[0]], {}
        else:
            data = mesh[names[:2]]
            options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        flat = data if data.ndim == 1 else data._flatten(f"data{number}")
        return cls(
            mesh, flat.get_group(), flat.get_local_rank(), mesh[names[-1]], {"device_mesh": data, **options}, number
        )


def sharded(net: nn.Module, world: Layout, kinds: set[type[nn.Module]], **options: Any) -> FSDP:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the group has one rank")
        return FSDP(net, auto_wrap_policy=ModuleWrapPolicy(kinds), **{**world.options, **options})


def loss_of(model: nn.Module, world: Layout, step: int) -> Tensor:
    """Return the loss of this rank's batch, which is that of all ranks of tensor parallelism."""
    random = torch.Generator().manual_seed(step * world.data.size() + world.index)
    words = torch.randint(WORDS, (2, LENGTH + 1), generator=random)
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def train_by_hand(
    net: nn.Module, world: Layout, steps: int, micro: int = 1, optimizer: Optimizer | None = None
) -> list[Tensor]:
    """Train the tensor-parallel model with gradients averaged by hand, and return the losses; the last gradients
    stay.
    """
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer, losses = optimizer or sgd_of_halves(params), []
    for step in range(steps):
        optimizer.zero_grad()
        sums: list[Any] = [None] * len(params)
        for part in range(micro):
            losses.append(loss_of(net, world, micro * step + part))
            grads: Any = torch.autograd.grad(losses[-1], params)
            for index, (param, grad) in enumerate(zip(params, grads)):
                if isinstance(param, DTensor):
                    grad = grad.redistribute(placements=param.placements)
                sums[index] = grad if part == 0 else sums[index] + grad
        for param, total in zip(params, sums):
            if (local := local_of(total)).numel():
                dist.all_reduce(local, group=world.data)
                local.div_(world.data.size())
            param.grad = total
        optimizer.step()
    return [loss.detach() for loss in losses]


def train(model: FSDP, world: Layout, steps: int, micro: int = 1, optimizer: Optimizer | None = None) -> list[Tensor]:
    """Train and return the losses; the last gradients stay."""
    optimizer, losses = optimizer or sgd_of_halves([p for p in model.parameters() if p.requires_grad]), []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            with model.no_sync() if part < micro - 1 else nullcontext():
                losses.append(loss_of(model, world, micro * step + part))
                losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses]


def by_number(losses: list[Tensor]) -> dict[str, Tensor]:
    return {str(number): loss for number, loss in enumerate(losses)}
