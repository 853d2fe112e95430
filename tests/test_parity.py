"""Sharded training equals plain training: losses, gradients, parameters and optimizer state at every step.

Every run of 3 steps (some of 10, in which optimizers and micro-batches accumulate) is compared at each step with the
first of these references, and some with the second:

* **The plain model in the same order of arithmetic** (`run_plain(order="ranks")`): gradients of each rank's batch,
summed in rank order and divided by the number of ranks.

* **DDP**, which divides before it sums, for every second model on 2 ranks. For the others test_harness.py compares it
with the plain model.

Comparisons are *bit for bit* where the order of arithmetic is the same. It is the plain model's on 1 rank and,
because sums of two terms have one order, on 2 ranks. On 3 and 4 ranks the direct exchange sums sharded gradients in
rank order and then divides, and 2 replicas of 2 shards have sums of two terms. DDP's order is the same on 1 and 2
ranks, because division by a power of two commutes with rounding. Forward and backward are bit-equal because leaves
have the shapes and strides of the originals.

Native collectives have an unknown order. Such runs and their references are in float64 and may differ by rounding
only (`assert_equivalent`), also from **the plain model on the concatenated batch**. Models with BatchNorm are exempt
from the latter, because statistics are local.

AdamW divides by the root of the second moment plus eps. With eps of 1e-8 a gradient of pure rounding noise takes a
full step in a random direction. So eps is 1e-3 here, without effect on the bit-equal comparisons.

An unused parameter in a used unit has a gradient of zeros, not None, and weight decay moves it. The plain reference
does the same. DDP leaves such parameters alone, so that comparison omits them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

import fsdp
from fsdp import FlatLayout, ShardingStrategy
from fsdp.flat import ownership
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import ZOO, Case, LoraBlock, MlpBlock
from tests.harness.oracle import (
    Schedule,
    Step,
    assert_same_steps,
    run_ddp,
    run_plain,
    sgd,
)
from tests.harness.pool import on_ranks
from tests.harness.sharded import BLOCKS, run_fsdp, wrap


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
POLICIES: dict[str, Any] = {
    "blocks": BLOCKS,
    "one unit": None,
    "linears": ModuleWrapPolicy({nn.Linear}),
    "nested": ModuleWrapPolicy({nn.Linear, MlpBlock, LoraBlock}),
}


@dataclass(frozen=True)
class Run:
    """One training run to compare. `collectives` is FSDP_COLLECTIVES; `shard_alignment` is in bytes."""

    world_size: int
    case: str
    optimizer: str
    strategy: str
    use_orig_params: bool
    collectives: str = "auto"
    policy: str = "blocks"
    micro: int = 1
    reduce_each: bool = False
    shard_alignment: int = 1
    mesh: str = ""  # of hybrid sharding: the number of replicas, and of the ranks that each is sharded over
    steps: int = 3

    def __str__(self) -> str:
        mode = "originals" if self.use_orig_params else "flat"
        parts = [f"{self.world_size}r", self.case, self.optimizer, self.strategy, mode, self.collectives]
        parts += [self.policy] * (self.policy != "blocks") + [f"micro{self.micro}"] * (self.micro > 1)
        parts += ["each"] * self.reduce_each + [f"align{self.shard_alignment}"] * (self.shard_alignment > 1)
        parts += [self.mesh] * bool(self.mesh)
        parts += [f"{self.steps}steps"] * (self.steps != 3)
        return "-".join(parts)

    @property
    def same_order(self) -> bool:
        """Return whether the engine adds gradients in the order of `run_plain(order="ranks")`."""
        sharded = self.strategy != "NO_SHARD" and self.mesh != "4x1"
        return self.world_size <= 2 or (sharded and self.collectives == "direct")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.same_order else torch.float64


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
COMBINATIONS = [(strategy, opt, mode) for mode in (True, False) for opt in OPTIMIZERS for strategy in STRATEGIES]


def by_turns(world_size: int, collectives: str, first: int) -> list[Run]:
    """Return a run of each of 11 models, with the 12 combinations of strategy, optimizer and mode by turns."""
    runs = []
    for i in range(len(ZOO)):
        strategy, optimizer, mode = COMBINATIONS[(first + i) % len(COMBINATIONS)]
        transport = "auto" if strategy == "NO_SHARD" else collectives
        runs.append(Run(world_size, list(ZOO)[i], optimizer, strategy, mode, transport))
    return runs


BASIC_RUNS = [
    *by_turns(1, "auto", 0)[::3],
    *by_turns(2, "auto", 7),
    *by_turns(3, "direct", 5)[1::2],
    *by_turns(4, "direct", 2)[2::4],
]
BASIC_RUNS.sort(key=lambda run: (run.world_size, list(ZOO).index(run.case), run.optimizer))  # by reference
WITH_DDP = [run for run in BASIC_RUNS if run.world_size == 2 and run.case in [*ZOO][1::2]]
RUNS = [
    *BASIC_RUNS,
    # Native and direct collectives.
    Run(2, "encoder-decoder", "adamw", "FULL_SHARD", True, "direct"),
    Run(2, "segment-reentrant", "sgd", "SHARD_GRAD_OP", False, "direct"),
    Run(3, "tied-transformer", "adamw", "FULL_SHARD", False, "native"),
    Run(4, "unused", "sgd", "FULL_SHARD", False, "native"),
    Run(4, "mlp", "adamw", "NO_SHARD", True, "native", steps=10),
    # Any choice of units.
    Run(2, "mlp", "sgd", "FULL_SHARD", True, policy="one unit", steps=10),
    Run(3, "lora", "adamw", "FULL_SHARD", False, "direct", policy="linears"),
    Run(3, "mlp", "adamw", "FULL_SHARD", True, "direct", policy="nested"),
    # Three micro-batches per step: summed and reduced once (under `no_sync`), or reduced each.
    *(
        Run(world_size, case, opt, strategy, mode, collectives, micro=3, reduce_each=each, steps=steps)
        for each in (False, True)
        for world_size, case, opt, strategy, mode, collectives, steps in [
            (2, "tied-transformer", "adamw", "SHARD_GRAD_OP", not each, "auto", 3 if each else 10),
            (2, "segment-reentrant", "adamw", "FULL_SHARD", each, "auto", 3),
            (2, "unused", "sgd", "NO_SHARD", not each, "auto", 3),
            (3, "used-twice", "sgd", "FULL_SHARD", each, "direct", 10 if each else 3),
        ]
    ),
    # The alignment of accelerators: shards are multiples of 16 bytes, not of one element.
    Run(2, "mlp", "adamw", "FULL_SHARD", False, shard_alignment=16),
    Run(4, "unused", "adamw", "FULL_SHARD", True, "direct", shard_alignment=16),
    # Shards and replicas on meshes of every shape; with one rank per shard group, replicas average gradients.
    *(
        Run(4, case, opt, strategy, mode, "direct", mesh=mesh, micro=micro)
        for mesh, case, opt, strategy, mode, micro in [
            ("2x2", "tied-transformer", "adamw", "HYBRID_SHARD", True, 1),
            ("2x2", "unused", "sgd", "_HYBRID_SHARD_ZERO2", False, 3),
            ("2x2", "segment-reentrant", "adamw", "HYBRID_SHARD", False, 3),
            ("1x4", "lora", "sgd", "HYBRID_SHARD", False, 1),
            ("1x4", "mlp", "adamw", "_HYBRID_SHARD_ZERO2", True, 1),
        ]
    ),
    *(
        Run(4, case, opt, strategy, mode, "native", mesh=mesh, micro=micro, reduce_each=micro > 1)
        for mesh, case, opt, strategy, mode, micro in [
            ("2x2", "used-twice", "sgd", "HYBRID_SHARD", True, 3),
            ("4x1", "mlp", "sgd", "HYBRID_SHARD", True, 1),
            ("4x1", "lora", "adamw", "_HYBRID_SHARD_ZERO2", False, 3),
        ]
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
@on_ranks("run.world_size")
def test_parity(run: Run) -> None:
    """Train `run`, and compare with every reference on rank 0."""
    os.environ["FSDP_COLLECTIVES"] = run.collectives
    options: dict[str, Any] = {
        "strategy": ShardingStrategy[run.strategy],
        "use_orig_params": run.use_orig_params,
        "wrap_policy": POLICIES[run.policy],
    }
    if run.mesh:
        options["device_mesh"] = init_device_mesh("cpu", tuple(map(int, run.mesh.split("x"))))
    with shard_alignment(run.shard_alignment):
        if run.shard_alignment > 1:
            check_alignment(ZOO[run.case], run, options)
        schedule = Schedule(run.steps, micro=run.micro, reduce_each=run.reduce_each)
        trained = ZOO[run.case], OPTIMIZERS[run.optimizer], schedule
        steps = run_fsdp(*trained, dtype=run.dtype, rank0_only=True, **options)
    ddp = run_ddp(*trained, dtype=run.dtype) if run in WITH_DDP else None
    if dist.get_rank() == 0:
        compare_with_plain(run, steps)
        if ddp is not None:
            assert_same_steps(steps, ddp, f"{run}, against DDP", without=ZOO[run.case].unused)


@contextmanager
def shard_alignment(nbytes: int) -> Iterator[None]:
    """Build units with shards of a multiple of `nbytes`, as on accelerators."""

    class Aligned:
        @staticmethod
        def build(specs: Any, **options: Any) -> FlatLayout:
            return FlatLayout.build(specs, **{**options, "param_alignment": nbytes, "shard_alignment": nbytes})

    if nbytes == 1:
        yield
    else:
        with mock.patch.object(ownership, "FlatLayout", Aligned):
            yield


def check_alignment(case: Case, run: Run, options: dict[str, Any]) -> None:
    """Assert that shards have the alignment, and that it changes a layout."""
    model = wrap(case, options["strategy"], run.use_orig_params, wrap_policy=options["wrap_policy"])
    layouts = [bucket.layout for unit in fsdp.shard_info(model) for bucket in unit.buckets]
    assert all(layout.shard_numel * layout.dtype.itemsize % run.shard_alignment == 0 for layout in layouts)
    assert any(layout.shard_numel > -(-layout.numel // layout.world_size) for layout in layouts)


def zero_grads(case: Case, policy: str) -> list[str]:
    """Return unused parameters in used units."""
    model = case.build()
    blocks = [name for name, module in model.named_modules() if type(module) in case.blocks and policy != "one unit"]

    def unit_of(name: str) -> str:
        return max((block for block in blocks if name.startswith(block + ".")), key=len, default="")

    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    used = {unit_of(name) for name in trainable if not name.startswith(case.unused)}
    return [name for name in trainable if name.startswith(case.unused) and unit_of(name) in used]


@lru_cache(maxsize=4)
def plain_steps(
    case: str,
    optimizer: str,
    policy: str,
    steps: int,
    micro: int,
    reduce_each: bool,
    order: Any,
    dtype: torch.dtype,
    shard_size: int | None = None,
) -> list[Step]:
    zeros = zero_grads(ZOO[case], policy)
    options = {"order": order, "dtype": dtype, "zero_grads": zeros, "shard_size": shard_size}
    schedule = Schedule(steps, micro=micro, reduce_each=reduce_each)
    return run_plain(ZOO[case], OPTIMIZERS[optimizer], dist.get_world_size(), schedule, **options)


def compare_with_plain(run: Run, steps: list[Step]) -> None:
    reference = (run.case, run.optimizer, run.policy, run.steps, run.micro, run.reduce_each)
    shard_size = int(run.mesh[-1]) if run.mesh else None
    plain = plain_steps(*reference, "ranks", run.dtype, shard_size)
    assert_same_steps(steps, plain, f"{run}, against the plain model by ranks", same_order=run.same_order)
    if not run.same_order and not ZOO[run.case].local_statistics:
        whole, what = plain_steps(*reference, "batch", run.dtype), f"{run}, against the concatenated batch"
        assert_same_steps(steps, whole, what, same_order=False, by_rank=False)
