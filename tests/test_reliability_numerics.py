"""Numerical guarantees: uninitialized memory, padding and unusual parameters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import fsdp
from fsdp import ShardingStrategy
from tests.harness.models import ZOO, Batch, Case, Net, Unit
from tests.harness.oracle import (
    OPTIMIZERS,
    Schedule,
    Step,
    assert_bit_equal,
    assert_close_ulp,
    assert_same_steps,
    flatten_state,
    rank_batch,
    run_plain,
    sgd_of_halves,
)
from tests.harness.poison import poisoned_memory
from tests.harness.pool import on_ranks
from tests.harness.sharded import finish_step, full_parameters, run_fsdp, wrap
from tests.harness.versions import needs

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
MODES = (True, False)


def ways(strategies: Sequence[str] = STRATEGIES) -> list[tuple[str, bool]]:
    """Return each strategy in one mode, by turns: on 2 ranks in the mode that other numbers of ranks leave out."""
    first = dist.get_world_size() == 2
    return [(strategy, MODES[(number + first) % 2]) for number, strategy in enumerate(strategies)]


def buckets_of(model: nn.Module) -> list[fsdp.BucketInfo]:
    return [bucket for unit in fsdp.shard_info(model) for bucket in unit.buckets]


# -- memory that nobody wrote, and padding -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "strategy", "name", "mode"),
    [
        (2, "SHARD_GRAD_OP", "segment-reentrant", False),
        (3, "FULL_SHARD", "unused", True),
        (2, "FULL_SHARD", "lora", False),
        (3, "NO_SHARD", "lora", True),
    ],
)
@on_ranks("world_size")
def test_training_does_not_read_uninitialized_memory(world_size: int, strategy: str, name: str, mode: bool) -> None:
    """With fresh memory full of NaN, 4 steps equal those without it; padding is zero at the start and at the end."""
    os.environ["FSDP_COLLECTIVES"] = "direct"
    torch.use_deterministic_algorithms(True)  # poisoning needs deterministic kernels, so both runs use them
    case, what = ZOO[name], f"{name} {mode}"
    clean = train_checking_padding(case, strategy, mode, what)
    with poisoned_memory():
        poisoned = train_checking_padding(case, strategy, mode, what)
    assert_same_steps(poisoned, clean, what)
    for step in poisoned:
        for part in (step.grads, step.params, flatten_state(step.optim)):
            assert all(value is None or value.isfinite().all() for value in part.values()), what


def train_checking_padding(case: Case, strategy: str, mode: bool, what: str) -> list[Step]:
    schedule, rank, world_size = Schedule(4), dist.get_rank(), dist.get_world_size()
    model = wrap(case, ShardingStrategy[strategy], mode)
    optim = OPTIMIZERS["adamw"](model.parameters())
    assert_padding_is_zero(model, optim, f"{what} after init")
    steps = []
    for step in range(schedule.steps):
        loss = case.loss(model, rank_batch(case, schedule, step, 0, rank, world_size))
        loss.backward()
        assert_padding_is_zero(model, optim, f"{what} step {step}, with gradients")
        steps.append(finish_step(model, optim, loss))
    assert_padding_is_zero(model, optim, f"{what} after training")
    return steps


def padding_of(bucket: fsdp.BucketInfo) -> list[slice]:
    """Return this rank's padding, as slices of the shard."""
    first, last = bucket.layout.shard_range(bucket.rank)
    ranges = [(max(start, first) - first, min(end, last) - first) for start, end in bucket.layout.gaps]
    return [slice(start, end) for start, end in ranges if start < end]


def assert_padding_is_zero(model: nn.Module, optimizer: Optimizer, what: str) -> None:
    """Check the shards and, where the optimizer holds flat parameters, their gradients and optimizer state."""
    for bucket in buckets_of(model):
        flat = bucket.flat_param
        held = {"shard": flat.data, "gradient": flat.grad, **optimizer.state.get(flat, {})}
        for kind, value in held.items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                for part in padding_of(bucket):
                    found = value[part]
                    assert not found.view(torch.uint8).any(), f"{what}: padding {part} of the {kind} is {found}"


# -- tied weights in one unit --------------------------------------------------------------------------------------


def make_vectors(generator: torch.Generator, size: int) -> Batch:
    return Batch((torch.randn(size, 5, generator=generator),), torch.randn(size, 5, generator=generator))


# -- parameters of every kind ----------------------------------------------------------------------------------------


class OddCase(Case):
    """A model whose parameters keep their initial dtypes."""

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return self.model()


def mixed() -> Net:
    """Build five kinds of parameters in one unit: three dtypes, two of them with a frozen part."""

    def forward(m: Any, x: Tensor) -> Tensor:
        narrow = (x.bfloat16() @ m.narrow + m.narrow_frozen).float()
        return torch.tanh(x @ m.usual + m.frozen) * m.wide.sum().float() + narrow

    return Net(
        forward,
        wide=nn.Parameter(torch.randn(3, dtype=torch.float64)),
        usual=nn.Parameter(torch.randn(5, 5)),
        frozen=nn.Parameter(torch.randn(5), requires_grad=False),
        narrow=nn.Parameter(torch.randn(5, 5).bfloat16()),
        narrow_frozen=nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False),
    )


def few_elements() -> Net:
    """Build parameters without a dimension, without an element, with one element: used and not used.

    One unit has no element, except for those of the nested block.
    """
    inner = Unit(lambda m, x: x * m.weight, weight=nn.Parameter(torch.tensor(0.5)))
    nothing = nn.Parameter(torch.empty(0, 5))
    empty = Unit(lambda m, x: m.inner(torch.cat([x, m.nothing])), nothing=nothing, inner=inner)
    return Net(
        lambda m, x: torch.sin(m.empty(x) * m.scalar + m.none.sum()) * m.one,
        empty=empty,
        scalar=nn.Parameter(torch.tensor(0.7)),
        none=nn.Parameter(torch.empty(3, 0)),
        unused_none=nn.Parameter(torch.empty(0)),
        one=nn.Parameter(torch.tensor([[1.3]])),
    )


def strided() -> Net:
    """Build parameters that are not row-major. The leaves have the strides of the originals if those are dense."""

    def forward(m: Any, x: Tensor) -> Tensor:
        assert m.conv.weight.stride() == (27, 1, 9, 3) and m.transposed.stride() == (1, 5)
        assert m.permuted.stride() == (5, 1, 15)
        features = m.conv(x[:, None, :, None].expand(-1, 3, -1, 5)).mean(dim=(1, 2))
        return (features @ (m.transposed * m.sliced)) @ m.transposed.t() + m.permuted.sum(dim=(0, 2))

    conv = nn.Conv2d(3, 5, 3, padding=1)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return Net(
        forward,
        conv=conv,
        transposed=nn.Parameter(torch.randn(7, 5).t()),
        permuted=nn.Parameter(torch.randn(2, 3, 5).permute(1, 2, 0)),
        sliced=nn.Parameter(torch.randn(5, 14)[:, ::2]),
    )


def integers() -> Net:
    """Build frozen integer parameters beside trained ones."""
    frozen = {
        "order": torch.tensor([4, 2, 0, 1, 3]),
        "mask": torch.tensor([True, False, True, True, True]),
        "shift": torch.tensor([-1, 0, 1, 2, 3], dtype=torch.int8),
    }
    return Net(
        lambda m, x: (x[:, m.order] * m.mask + m.shift) @ m.weight,
        **{name: nn.Parameter(value, requires_grad=False) for name, value in frozen.items()},
        weight=nn.Parameter(torch.randn(5, 5)),
    )


def complex_numbers() -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        z = x.to(torch.complex64) @ m.first
        return ((z / (1 + z.abs())) @ m.second).real

    first, second = (nn.Parameter(torch.randn(*shape, dtype=torch.complex64)) for shape in ((5, 7), (7, 5)))
    return Net(forward, first=first, second=second)


def of_dtype(dtype: torch.dtype) -> Net:
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).to(dtype)
    return Net(lambda m, x: m.layers(x.to(dtype)).float(), layers=layers)


def odd(name: str, model: Callable[[], nn.Module], *blocks: type[nn.Module]) -> OddCase:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output[: len(target)], target)

    return OddCase(name, model, make_vectors, loss, frozenset(blocks))


ODD = {
    case.name: case
    for case in [
        odd("mixed dtypes", mixed),
        odd("few elements", few_elements, Unit),
        odd("strided", strided),
        odd("integers", integers),
        odd("complex64", complex_numbers),
        odd("float64", partial(of_dtype, torch.float64), nn.Linear),
        odd("bfloat16", partial(of_dtype, torch.bfloat16), nn.Linear),
    ]
}


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (1, "few elements"),
        *((size, name) for place, name in enumerate(ODD) for size in (2, 1 + 2 * (place % 2)) if name != "complex64"),
        *(pytest.param(size, "complex64", marks=needs(2, 7, "rounds them differently")) for size in (1, 2)),
    ],
)
@on_ranks("world_size")
def test_parameters_of_every_kind_train_like_plain_ones(world_size: int, name: str) -> None:
    """Bit for bit, except where the mean of three bfloat16 gradients may be rounded twice."""
    os.environ["FSDP_COLLECTIVES"] = "direct"
    case, schedule, make_optimizer = ODD[name], Schedule(4), sgd_of_halves
    # With `rank0_only`, rank 0 has the steps of all ranks, and compares them.
    plain = run_plain(case, make_optimizer, world_size, schedule) if dist.get_rank() == 0 else []
    plain = [_comparable(step) for step in plain]
    originals = dict(case.build().named_parameters())
    for strategy, mode in ways(STRATEGIES if world_size < 3 else ("FULL_SHARD", "NO_SHARD")):
        what = f"{name} {strategy} {mode}"
        model = wrap(case, ShardingStrategy[strategy], mode)
        start = full_parameters(model)
        assert_bit_equal(start, originals, what)
        assert all(start[n].stride() == p.stride() for n, p in originals.items() if n != "sliced" and p.numel()), what
        options: dict[str, Any] = {"strategy": ShardingStrategy[strategy], "use_orig_params": mode, "rank0_only": True}
        steps = [_comparable(step) for step in run_fsdp(case, make_optimizer, schedule, **options)]
        if dist.get_rank() > 0:
            continue
        if world_size < 3 or (strategy != "NO_SHARD" and name not in ("bfloat16", "mixed dtypes")):
            assert_same_steps(steps, plain, what)
        else:
            # Two sums of three terms, divided: 3 units of the terms. A step moves by an eighth of the gradient, and
            # each side rounds three times on the way.
            ours, theirs = steps[0], plain[0]
            terms = {n: p if (t := theirs.summed.get(n)) is None else p.abs() + t for n, p in theirs.params.items()}
            assert_close_ulp(ours.grads, theirs.grads, 3, f"{what} grads", summed=theirs.summed)
            assert_close_ulp(ours.params, theirs.params, 3, f"{what} params", summed=terms)


def _comparable(step: Step) -> Step:
    """Represent complex numbers as pairs, and drop gradients and state of empty parameters, which no rank holds."""
    names = [name for name, value in step.params.items() if value.numel()]
    grads = {name: _real(step.grads[name]) for name in names}
    params = {name: _real(value) for name, value in step.params.items()}
    optim = {n: {key: _real(value) for key, value in step.optim[n].items()} for n in names if n in step.optim}
    summed = {name: _real(step.summed[name]) for name in names if name in step.summed}
    return dataclasses.replace(step, grads=grads, params=params, optim=optim, summed=summed)


def _real(value: Any) -> Any:
    return torch.view_as_real(value) if value is not None and value.is_complex() else value


@on_ranks(1, 2)
def test_an_overlapping_parameter_becomes_a_dense_one(world_size: int) -> None:

    def overlapping(*, dense: bool) -> Net:
        weight = torch.randn(5, 1).expand(5, 5)
        return Net(lambda m, x: torch.sin(x @ m.weight), weight=nn.Parameter(weight.contiguous() if dense else weight))

    case, dense = (odd("overlapping", partial(overlapping, dense=dense)) for dense in (False, True))
    for mode in MODES:
        steps = run_fsdp(case, OPTIMIZERS["sgd"], Schedule(3), use_orig_params=mode)
        assert_same_steps(steps, run_plain(dense, OPTIMIZERS["sgd"], dist.get_world_size(), Schedule(3)), str(mode))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_a_sparse_parameter_is_refused_by_name(mode: bool) -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    module[1].register_parameter("sparse", nn.Parameter(torch.eye(5).to_sparse()))
    with pytest.raises(ValueError, match=r"'1.sparse' of .* has layout torch.sparse_coo"):
        wrap(module, ShardingStrategy.NO_SHARD, mode)
    assert all(type(param) is nn.Parameter for param in module.parameters()) and len(list(module.parameters())) == 5
