"""Parity on the late device: a sharded model there beside the plain one on CPU, in float64.

python -m tests.device.parity [PART_OF_A_NAME ...]
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy as S
from fsdp.sharded_grad_scaler import ShardedGradScaler
from fsdp.wrap import ModuleWrapPolicy
from tests.device import lag, pool
from tests.device.pairs import check_parameters, offload

WIDTH, ROWS, STEPS = 33, 6, 8  # no size divides by two; rows per rank and pass
# Which of the passes of a step are synchronised
ACCUMULATION = {"one": (True,), "nosync": (False, False, True), "sync3": (True, True, True)}
LATE_STREAMS = {"compute": {0: 40.0}, "gather": {1: 40.0}, "reduce": {2: 40.0}}  # milliseconds, by number of the stream


class Norm(nn.Module):
    """A layer norm of plain operations: the CPU's kernel supports other combinations of dtypes than a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight + self.bias


class Block(nn.Module):
    """A frozen layer that is used first, and so read last in backward, with a low-rank adapter beside it."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = Norm()
        self.base = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3), nn.Linear(3, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(F.gelu(self.base(y) + self.up(self.down(y))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Model(nn.Module):
    """A tower of blocks; ``reentrant``: of activation checkpointing, None for none."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.Sequential(*(Block(reentrant) for _ in range(4)))
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x))) * self.scale


def train(
    device: torch.device,
    *,
    late: float = 30.0,
    fixed: dict[int, float] | None = None,
    passes: tuple[bool, ...] = (True,),
    clip: bool = False,
    scaler: bool = False,
    reentrant: bool | None = None,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-9,
    set_to_none: bool = True,
    sgd: bool = False,
    **options: Any,
) -> str:
    """Train both models, and compare their parameters; the largest difference in words.

    ``late``: kernels run up to so many milliseconds after their launch, or on the streams of ``fixed`` exactly so many.
    """
    torch.manual_seed(3)
    plain = Model().to(dtype)
    sharded = Model(reentrant).to(dtype)
    sharded.load_state_dict(plain.state_dict())
    lag.C.set_lateness(late, fixed or {})
    model: Any = FSDP(sharded, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options)

    def optimizer_of(params: Any) -> torch.optim.Optimizer:
        if sgd:
            return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(params, lr=1e-3, foreach=True)

    mine, theirs = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    scaling = ShardedGradScaler(device="lag", init_scale=4.0, enabled=scaler)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        mine.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad()
        for synchronised in passes:
            x, y = (torch.randn(size * ROWS, n, generator=generator, dtype=torch.float64) for n in (5, 3))
            with contextlib.nullcontext() if synchronised else model.no_sync():
                loss = F.mse_loss(model(x[own].to(device, dtype)), y[own].to(device, dtype)) / len(passes)
                scaling.scale(loss).backward()
            (F.mse_loss(plain(x.to(dtype)), y.to(dtype)) / len(passes)).backward()
        scaling.unscale_(mine)
        if clip:
            model.clip_grad_norm_(0.05)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        scaling.step(mine)
        scaling.update()
        theirs.step()
    return check_parameters(model, plain, bound)


CASES: dict[str, pool.Case] = {}


def add(name: str, **options: Any) -> None:
    CASES[name] = lambda device: train(device, **options)


OFFLOAD = offload()
SINGLE = {"dtype": torch.float32, "bound": 2e-5}
LOW = {"dtype": torch.float32, "bound": 2e-2}

for strategy, uop, accumulation in itertools.product(
    (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD), (False, True), ACCUMULATION
):
    name = f"{strategy.name}.uop{int(uop)}.{accumulation}"
    add(name, sharding_strategy=strategy, use_orig_params=uop, passes=ACCUMULATION[accumulation])
for uop in (False, True):
    for name, options in {
        "offload": {**OFFLOAD, "passes": (False, True)},
        "offload.sgop": {**OFFLOAD, "sharding_strategy": S.SHARD_GRAD_OP},
        "offload.noshard": {**OFFLOAD, "sharding_strategy": S.NO_SHARD},
        "offload.unpinned": {"cpu_offload": CPUOffload(True, pin_memory=False)},
        "clip": {"clip": True, "passes": (False, True)},
        "offload.clip": {**OFFLOAD, "clip": True},
        "scaler": {**SINGLE, "scaler": True, "clip": True},
        "offload.scaler": {**OFFLOAD, **SINGLE, "scaler": True},
        "mixed64": {**SINGLE, "passes": (False, True), "mixed_precision": MixedPrecision(param_dtype=torch.float64)},
        "mixedbf16": {**LOW, "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        "offload.mixedbf16": {**OFFLOAD, **LOW, "mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16)},
        "checkpoint0": {"reentrant": False, "passes": (False, True)},
        "checkpoint1": {"reentrant": True, "passes": (False, True)},
        "prefetch0": {"backward_prefetch": None},
        "prefetchPOST": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        "fwdprefetch3": {"forward_prefetch": True, "forward_prefetch_distance": 3},
        "nolimit": {"limit_all_gathers": False, "forward_prefetch": True},
        "reshardint": {"reshard_after_forward": 1},
        "zerograd": {"set_to_none": False},
        "offload.zerograd": {**OFFLOAD, "set_to_none": False, "passes": (False, True)},
        "broadcastbuffers": {"broadcast_buffers": True},
        "sgd": {"sgd": True},
    }.items():
        add(f"{name}.uop{int(uop)}", use_orig_params=uop, **options)
    for name, fixed in {**LATE_STREAMS, "both": {1: 40.0, 2: 25.0}}.items():
        add(f"late_{name}.uop{int(uop)}", use_orig_params=uop, late=0.0, fixed=fixed, passes=(False, True))
        add(f"late_{name}.offload.uop{int(uop)}", use_orig_params=uop, late=0.0, fixed=fixed, **OFFLOAD)
add("reduceunused.uop1", use_orig_params=True, reduce_unused=True)

if __name__ == "__main__":
    pool.main("tests.device.parity", CASES)
