"""Training sharded gives what training plain gives: losses, gradients, parameters and optimizer state at every step.

Every run of 3 steps is compared at each step with two references, and some of 10 steps, in which optimizers and
micro-batches add up:

* **The plain model in the same order of arithmetic** (`run_plain(order="ranks")`): each rank's batch by itself, the
  gradients summed in rank order and divided by the number of ranks.
* **DDP**, which divides before it sums, in runs of the usual units, alignment, prefetching and mesh.

*Bit for bit* where the engine's order is theirs. It is the plain model's

- on 1 rank, where nothing is reduced;
- on 2 ranks with any collective, since the sum of two terms has one order, and halving is exact;
- on 3 and 4 ranks where parameters are sharded and reductions go by direct exchange, which sums in rank order and then
  divides;
- where 4 ranks are 2 replicas of 2 shards: each sum has two terms;

and DDP's on 1 and 2 ranks (it is division by a power of two that commutes with rounding). The forward and backward
themselves are bit-equal because the leaves have the shapes and strides of the originals.

A backend's own collectives sum in an order of their own. There the runs and both references are in float64, and differ
by nothing but rounding (`assert_equivalent`), as from a third reference, **the plain model on the concatenated batch**.
Models with BatchNorm are left out of that: their statistics are those of the local batch. test_harness.py shows that
the references are equivalent to each other, so each comparison is one with all of them.

AdamW divides by the root of the second moment plus eps; with the usual 1e-8 a gradient that is nothing but rounding
noise takes a step of full size in a direction of its own. So eps is 1e-3 here, which changes nothing in what the
bit-equal comparisons can see.

A parameter that no forward uses, in a unit that is used, has a gradient of zeros and not None, and weight decay moves
it. The plain reference is told so; DDP leaves such parameters alone, and they are left out of that comparison.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

import fsdp
from fsdp import BackwardPrefetch, FlatLayout, ShardingStrategy
from fsdp.flat import ownership
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import ZOO, Case, LoraBlock, MlpBlock
from tests.harness.oracle import (
    Schedule,
    Step,
    assert_bit_equal,
    assert_equivalent,
    flatten_state,
    run_ddp,
    run_plain,
    sgd,
)
from tests.harness.pool import run_ranks
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
    """One training run to compare. `collectives` is the value of FSDP_COLLECTIVES; `shard_alignment` is in bytes."""

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
    prefetch: str = "1 BACKWARD_PRE 1"  # distance in forward, kind and distance in backward
    mesh: str = ""  # of hybrid sharding: the number of replicas, and of the ranks that each is sharded over
    steps: int = 3

    def __str__(self) -> str:
        mode = "originals" if self.use_orig_params else "flat"
        words = [f"{self.world_size}r", self.case, self.optimizer, self.strategy, mode, self.collectives]
        words += [self.policy] * (self.policy != "blocks") + [f"micro{self.micro}"] * (self.micro > 1)
        words += ["each"] * self.reduce_each + [f"align{self.shard_alignment}"] * (self.shard_alignment > 1)
        words += [self.prefetch.replace(" ", "-")] * (self.prefetch != "1 BACKWARD_PRE 1") + [self.mesh] * bool(
            self.mesh
        )
        words += [f"{self.steps}steps"] * (self.steps != 3)
        return "-".join(words)

    @property
    def same_order(self) -> bool:
        """Whether the engine adds up gradients in the order of `run_plain(order="ranks")`."""
        sharded = self.strategy != "NO_SHARD" and self.mesh != "4x1"
        return self.world_size <= 2 or (sharded and self.collectives == "direct")

    @property
    def same_as_ddp(self) -> bool:
        """Whether DDP's order is the same, too. With `reduce_each` it reduces again what it has reduced before."""
        return self.world_size <= 2 and not self.reduce_each

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.same_order else torch.float64


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
COMBINATIONS = [(strategy, opt, mode) for mode in (True, False) for opt in OPTIMIZERS for strategy in STRATEGIES]


def by_turns(world_size: int, collectives: str, first: int) -> list[Run]:
    """A run of each model, with the combinations of strategy, optimizer and mode one after the other from `first` on.

    There are 11 models and 12 combinations, so the two do not come round together."""
    runs = []
    for i in range(len(ZOO)):
        strategy, optimizer, mode = COMBINATIONS[(first + i) % len(COMBINATIONS)]
        how = "auto" if strategy == "NO_SHARD" else collectives
        runs.append(Run(world_size, list(ZOO)[i], optimizer, strategy, mode, how))
    return runs


RUNS = [
    *by_turns(1, "auto", 0)[::2],
    *by_turns(2, "auto", 7),
    *by_turns(3, "direct", 5)[1::2],
    *by_turns(4, "direct", 2)[2::4],
]
RUNS.sort(key=lambda run: (run.world_size, list(ZOO).index(run.case), run.optimizer))  # those of one reference together


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_parity(run: Run) -> None:
    run_ranks(run.world_size, compare, run)


@pytest.mark.parametrize(
    "run",
    [
        Run(2, "encoder-decoder", "adamw", "FULL_SHARD", True, "direct"),
        Run(2, "segment-reentrant", "sgd", "SHARD_GRAD_OP", False, "direct"),
        Run(3, "tied-transformer", "adamw", "FULL_SHARD", False, "native"),
        Run(3, "mlp", "sgd", "SHARD_GRAD_OP", True, "native"),
        Run(4, "unused", "sgd", "FULL_SHARD", False, "native"),
        Run(4, "encoder-decoder", "adamw", "NO_SHARD", True, "native"),
    ],
    ids=str,
)
def test_parity_with_either_kind_of_collective(run: Run) -> None:
    run_ranks(run.world_size, compare, run)


@pytest.mark.parametrize(
    "run",
    [
        Run(2, "mlp", "sgd", "FULL_SHARD", True, policy="one unit"),
        Run(2, "unused", "adamw", "FULL_SHARD", False, policy="one unit"),
        Run(3, "lora", "adamw", "FULL_SHARD", False, "direct", policy="linears"),
        Run(2, "encoder-decoder", "sgd", "SHARD_GRAD_OP", False, policy="linears"),
        Run(3, "mlp", "adamw", "FULL_SHARD", True, "direct", policy="nested"),
        Run(2, "lora", "sgd", "SHARD_GRAD_OP", True, policy="nested"),
        Run(2, "used-twice", "adamw", "FULL_SHARD", False, policy="nested"),
    ],
    ids=str,
)
def test_parity_however_the_model_is_cut_into_units(run: Run) -> None:
    run_ranks(run.world_size, compare, run)


@pytest.mark.parametrize(
    "run",
    [
        Run(world_size, case, opt, strategy, mode, collectives, micro=3, reduce_each=each, steps=steps)
        for each in (False, True)
        for world_size, case, opt, strategy, mode, collectives, steps in [
            (2, "tied-transformer", "adamw", "SHARD_GRAD_OP", not each, "auto", 3 if each else 10),
            (2, "segment-reentrant", "adamw", "FULL_SHARD", each, "auto", 3),
            (2, "unused", "sgd", "NO_SHARD", not each, "auto", 3),
            (3, "used-twice", "sgd", "FULL_SHARD", each, "direct", 10 if each else 3),
        ]
    ],
    ids=str,
)
def test_parity_with_accumulated_gradients(run: Run) -> None:
    """Three micro-batches per step: summed on each rank and reduced once (under `no_sync`), or reduced each."""
    run_ranks(run.world_size, compare, run)


@pytest.mark.parametrize(
    "run",
    [
        Run(2, "mlp", "adamw", "FULL_SHARD", False, shard_alignment=16),
        Run(3, "tied-transformer", "sgd", "FULL_SHARD", True, "direct", shard_alignment=16),
        Run(3, "conv-batchnorm", "sgd", "SHARD_GRAD_OP", False, "direct", shard_alignment=16),
        Run(4, "unused", "adamw", "FULL_SHARD", True, "direct", shard_alignment=16),
    ],
    ids=str,
)
def test_parity_with_the_shard_alignment_of_accelerators(run: Run) -> None:
    """Every run above has the alignment of CPUs, one element. Here shards are multiples of 16 bytes."""
    run_ranks(run.world_size, compare, run)


@pytest.mark.parametrize(
    "run",
    [
        Run(2, "mlp", "sgd", "FULL_SHARD", True, prefetch="1 BACKWARD_POST 1"),
        Run(3, "encoder-decoder", "sgd", "FULL_SHARD", False, "direct", prefetch="2 BACKWARD_POST 2"),
        Run(2, "segment-reentrant", "sgd", "FULL_SHARD", False, prefetch="0 None 1"),
        Run(3, "used-twice", "sgd", "FULL_SHARD", True, "direct", prefetch="1 None 1"),
        Run(2, "lora", "sgd", "FULL_SHARD", True, policy="nested", prefetch="3 BACKWARD_PRE 2"),
    ],
    ids=str,
)
def test_parity_whatever_is_gathered_ahead(run: Run) -> None:
    run_ranks(run.world_size, compare, run)


@pytest.mark.parametrize(
    "run",
    [
        *(
            Run(4, case, opt, strategy, mode, "direct", mesh=mesh, micro=micro)
            for mesh, case, opt, strategy, mode, micro in [
                ("2x2", "tied-transformer", "adamw", "HYBRID_SHARD", True, 1),
                ("2x2", "unused", "sgd", "_HYBRID_SHARD_ZERO2", False, 3),
                ("2x2", "segment-reentrant", "adamw", "HYBRID_SHARD", False, 3),
                ("2x2", "segment-non-reentrant", "sgd", "_HYBRID_SHARD_ZERO2", True, 1),
                ("1x4", "lora", "sgd", "HYBRID_SHARD", False, 1),
                ("1x4", "encoder-decoder", "adamw", "_HYBRID_SHARD_ZERO2", True, 1),
            ]
        ),
        *(
            Run(4, case, opt, strategy, mode, "native", mesh=mesh, micro=micro, reduce_each=micro > 1)
            for mesh, case, opt, strategy, mode, micro in [
                ("2x2", "used-twice", "sgd", "HYBRID_SHARD", True, 3),
                ("2x2", "mlp", "adamw", "_HYBRID_SHARD_ZERO2", False, 1),
                ("4x1", "mlp", "sgd", "HYBRID_SHARD", True, 1),
                ("4x1", "lora", "adamw", "_HYBRID_SHARD_ZERO2", False, 3),
            ]
        ),
    ],
    ids=str,
)
def test_parity_of_shards_and_replicas(run: Run) -> None:
    """Of every shape of mesh; over one rank to shard over, gradients are averaged over the replicas."""
    run_ranks(run.world_size, compare, run)


# -- in the rank processes ---------------------------------------------------------------------------------------


def compare(run: Run) -> None:
    """Train as `run` says and under DDP, and on rank 0 compare with every reference."""
    os.environ["FSDP_COLLECTIVES"] = run.collectives
    forward, kind, backward = run.prefetch.split()
    options: dict[str, Any] = {
        "strategy": ShardingStrategy[run.strategy],
        "use_orig_params": run.use_orig_params,
        "wrap_policy": POLICIES[run.policy],
        "forward_prefetch_distance": int(forward),
        "backward_prefetch": None if kind == "None" else BackwardPrefetch[kind],
        "backward_prefetch_distance": int(backward),
    }
    if run.mesh:
        options["device_mesh"] = init_device_mesh("cpu", tuple(map(int, run.mesh.split("x"))))
    with shard_alignment(run.shard_alignment):
        if run.shard_alignment > 1:
            check_alignment(ZOO[run.case], run, options)
        steps = run_fsdp(
            ZOO[run.case],
            OPTIMIZERS[run.optimizer],
            Schedule(run.steps, micro=run.micro, reduce_each=run.reduce_each),
            dtype=run.dtype,
            rank0_only=True,
            **options,
        )
    usual = replace(run, policy="blocks", shard_alignment=1, prefetch=Run.prefetch, mesh="") == run
    with_ddp = usual and (run.same_as_ddp or not run.same_order)
    schedule = (run.steps, run.micro, run.reduce_each)
    ddp = ddp_steps(run.case, run.optimizer, *schedule, run.dtype) if with_ddp else []
    if dist.get_rank() == 0:
        compare_with_plain(run, steps)
        if with_ddp:
            compare_with_ddp(run, steps, ddp)


@contextmanager
def shard_alignment(nbytes: int) -> Iterator[None]:
    """Units built inside have shards of a multiple of so many bytes, as on accelerators."""

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
    """The alignment is what was asked for, and makes a difference."""
    model = wrap(case, options["strategy"], run.use_orig_params, wrap_policy=options["wrap_policy"])
    layouts = [bucket.layout for unit in fsdp.shard_info(model) for bucket in unit.buckets]
    assert all(layout.shard_numel * layout.dtype.itemsize % run.shard_alignment == 0 for layout in layouts)
    assert any(layout.shard_numel > -(-layout.numel // layout.world_size) for layout in layouts)


def zero_grads(case: Case, policy: str) -> list[str]:
    """The parameters that no forward uses in units that are used."""
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


@lru_cache(maxsize=2)
def ddp_steps(case: str, optimizer: str, steps: int, micro: int, reduce_each: bool, dtype: torch.dtype) -> list[Step]:
    """Every rank asks for the same runs, so that a cached one is so on all."""
    return run_ddp(ZOO[case], OPTIMIZERS[optimizer], Schedule(steps, micro=micro, reduce_each=reduce_each), dtype=dtype)


def compare_with_plain(run: Run, steps: list[Step]) -> None:
    reference = (run.case, run.optimizer, run.policy, run.steps, run.micro, run.reduce_each)
    shard_size = int(run.mesh[-1]) if run.mesh else None
    plain = [parts_of(step) for step in plain_steps(*reference, "ranks", run.dtype, shard_size)]
    compare_steps([parts_of(step) for step in steps], plain, run.same_order, f"{run}, against the plain model by ranks")
    if not run.same_order and not ZOO[run.case].local_statistics:
        whole = [parts_of(step, by_rank=False) for step in plain_steps(*reference, "batch", run.dtype)]
        ours = [parts_of(step, by_rank=False) for step in steps]
        compare_steps(ours, whole, False, f"{run}, against the concatenated batch")


def compare_with_ddp(run: Run, steps: list[Step], ddp: list[Step]) -> None:
    unused = ZOO[run.case].unused
    ours, theirs = [parts_of(step, unused) for step in steps], [parts_of(step, unused) for step in ddp]
    compare_steps(ours, theirs, run.same_as_ddp, f"{run}, against DDP")


Part = Mapping[str, Tensor | None]
Parts = dict[str, Part]


def parts_of(step: Step, without: tuple[str, ...] = (), by_rank: bool = True) -> Parts:
    """What there is to compare, in groups of one kind and magnitude; `without` are prefixes of parameter names."""
    state = flatten_state(step.optim)
    groups: Parts = {
        "losses": {str(rank): loss for rank, loss in enumerate(step.rank_losses)} if by_rank else {},
        "loss": {"mean": step.loss},
        "gradients": step.grads,
        "parameters": step.params,
        "buffers": step.buffers,
    }
    for key in sorted({name.rpartition("/")[2] for name in state}):
        groups[f"optimizer state {key}"] = {n: value for n, value in state.items() if n.endswith(f"/{key}")}
    return {
        group: {name: value for name, value in part.items() if not name.startswith(without or ("//",))}
        for group, part in groups.items()
    }


def compare_steps(actual: list[Parts], expected: list[Parts], same_order: bool, what: str) -> None:
    __tracebackhide__ = True
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert list(ours) == list(theirs), f"{what}, step {index}"
        for group in theirs:
            where = f"{what}, step {index}, {group}"
            if same_order:
                assert_bit_equal(ours[group], theirs[group], where)
            else:
                assert_equivalent(ours[group], theirs[group], where)
