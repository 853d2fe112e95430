"""Numerical guarantees: uninitialized memory, padding, tied and unusual parameters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import fsdp
from fsdp import ShardingStrategy
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import ZOO, Batch, Case, Gain, Net, Unit, cross_entropy
from tests.harness.oracle import (
    OPTIMIZERS,
    Schedule,
    Step,
    assert_bit_equal,
    assert_close_ulp,
    assert_equivalent,
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


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "SHARD_GRAD_OP"), (3, "FULL_SHARD"), (3, "NO_SHARD")])
@on_ranks("world_size")
def test_training_does_not_read_uninitialized_memory(world_size: int, strategy: str) -> None:
    """With fresh memory full of NaN, 4 steps equal those without it, and padding is zero at the start and at the end.

    Each combination trains two of the three models, by turns.
    """
    os.environ["FSDP_COLLECTIVES"] = "direct"
    torch.use_deterministic_algorithms(True)  # poisoning needs deterministic kernels, so both runs use them
    cases = [("unused", "adamw", True), ("segment-reentrant", "sgd", False), ("lora", "sgd", True)]
    cases.pop((dist.get_world_size() + STRATEGIES.index(strategy)) % len(cases))
    for name, optimizer, mode in cases:
        case, what = ZOO[name], f"{name} {optimizer} {mode}"
        clean = train_checking_padding(case, optimizer, strategy, mode, what)
        with poisoned_memory():
            poisoned = train_checking_padding(case, optimizer, strategy, mode, what)
        assert_same_steps(poisoned, clean, what)
        for step in poisoned:
            for part in (step.grads, step.params, flatten_state(step.optim)):
                assert all(value is None or value.isfinite().all() for value in part.values()), what


def train_checking_padding(case: Case, optimizer: str, strategy: str, mode: bool, what: str) -> list[Step]:
    schedule, rank, world_size = Schedule(4), dist.get_rank(), dist.get_world_size()
    model = wrap(case, ShardingStrategy[strategy], mode)
    optim = OPTIMIZERS[optimizer](model.parameters())
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

ROWS, WIDTH = 37, 6  # no number of ranks here divides 37 rows


def tied() -> Unit:
    """Build an embedding and an output layer with one weight, which the forward checks."""

    def forward(m: Any, words: Tensor) -> Tensor:
        assert m.head.weight is m.tokens.weight and m.head.weight.shape == (ROWS, WIDTH)
        return m.head(torch.tanh(m.mix(m.tokens(words))))

    tokens, mix, head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
    head.weight = tokens.weight
    return Unit(forward, tokens=tokens, mix=mix, head=head)


def make_tokens(generator: torch.Generator, size: int) -> Batch:
    tokens = torch.randint(ROWS, (size, 5), generator=generator)
    return Batch((tokens,), tokens.roll(1, dims=1))


TIED = {
    prefix: Case("tied", model, make_tokens, cross_entropy, frozenset({Unit}))
    # a nested unit that holds both names, beside a parameter of the root
    for prefix, model in {"": tied, "0.": lambda: nn.Sequential(tied(), Gain())}.items()
}


@pytest.mark.parametrize(("world_size", "prefix"), [(2, ""), (2, "0."), *zip((1, 3, 4), ("0.", "", "0."))])
@on_ranks("world_size")
def test_tied_weights_of_one_unit_stay_one_parameter(world_size: int, prefix: str) -> None:
    """It stays one after wrapping, backward, step and a change of dtype, and every row trains as in the plain model."""
    os.environ["FSDP_COLLECTIVES"] = "direct"
    case, schedule, make_optimizer, rank = TIED[prefix], Schedule(4, batch=8), OPTIMIZERS["adamw"], dist.get_rank()
    for strategy, mode in ways():
        what = f"{prefix} {strategy} {mode}"
        # An all-reduce adds in a different order.
        same_order = strategy != "NO_SHARD" or world_size <= 2
        dtype = torch.float32 if same_order else torch.float64
        start = case.build(dtype=dtype).get_parameter(prefix + "tokens.weight").detach()
        # A unit that is the root itself is not built twice.
        policy = ModuleWrapPolicy(case.blocks) if prefix else None
        model = wrap(case, ShardingStrategy[strategy], mode, wrap_policy=policy, dtype=dtype)
        optimizer = make_optimizer(model.parameters())
        assert_tied(model, mode, what)
        steps = []
        for step in range(schedule.steps):
            loss = case.loss(model, rank_batch(case, schedule, step, 0, rank, world_size))
            loss.backward()
            assert_tied(model, mode, what)
            steps.append(finish_step(model, optimizer, loss))
            assert_tied(model, mode, what)
        moved = (steps[-1].params[prefix + "tokens.weight"] != start).any(dim=1)
        assert moved.all(), f"{what}: rows {(~moved).nonzero().flatten().tolist()} never moved"
        plain = run_plain(case, make_optimizer, world_size, schedule, dtype=dtype)
        if same_order:
            assert_same_steps(steps, plain, what)
        else:
            assert_equivalent(steps[-1].params, plain[-1].params, what)
        model.double()
        assert_tied(model, mode, f"{what} in float64")
        case.loss(model, rank_batch(case, schedule, 0, 0, rank, world_size)).backward()
        wide = {name: value.double() for name, value in steps[-1].params.items()}
        assert_bit_equal(full_parameters(model), wide, f"{what} in float64")


def assert_tied(model: nn.Module, mode: bool, what: str) -> None:
    """Check that there is one parameter, one record of it with both names, and the same object in both modules."""
    inner: Any = next(module for module in model.modules() if isinstance(module, Unit))
    assert inner.head.weight is inner.tokens.weight, what
    records = [record for bucket in buckets_of(model) for record in bucket.layout.params]
    weight = [record for record in records if record.name.endswith("tokens.weight")]
    assert len(weight) == 1 and weight[0].aliases == ("head.weight",), what
    assert sum(record.numel for record in records if "weight" in record.name) == ROWS * WIDTH + WIDTH * WIDTH, what
    if mode:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert sum(name.endswith("head.weight") for name in names) == 1, what
        assert sum(name.endswith("tokens.weight") for name in names) == 1, what


def make_vectors(generator: torch.Generator, size: int) -> Batch:
    return Batch((torch.randn(size, 5, generator=generator),), torch.randn(size, 5, generator=generator))


# -- more units at work at once than there are buffers ---------------------------------------------------------------


def link() -> Unit:
    """Build a unit that calls the next unit of a chain, which it does not contain, in the middle of its forward."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.before(x))
        for following in m.next:
            x = x + following(x)
        return torch.sin(m.after(x))

    return Unit(forward, before=nn.Linear(5, 5), after=nn.Linear(5, 5), next=[])  # a list hides modules from the tree


def chain() -> Net:
    """Build six units of one size, each running until the last one ends; none contains another unit."""
    links = nn.ModuleList([link() for _ in range(6)])
    join(links)
    return Net(lambda m, x: m.head(m.links[0](x)), links=links, head=nn.Linear(5, 5))


def join(links: nn.ModuleList) -> None:
    for one, following in pairwise(list(links)):
        getattr(one, "module", one).next = [following]


CHAIN = Case("chain", chain, make_vectors, F.mse_loss, frozenset({Unit}))


@on_ranks(1, 2, 3)
def test_units_called_within_units_keep_their_buffers(world_size: int) -> None:
    """Every unit of the chain is gathered at once, whatever the bound on idle gathered units."""
    os.environ["FSDP_COLLECTIVES"] = "direct"
    schedule, make_optimizer = Schedule(3), OPTIMIZERS["sgd"]
    rank = dist.get_rank()
    plain = run_plain(CHAIN, make_optimizer, world_size, schedule)
    for strategy, mode in ways(STRATEGIES[:2]):
        model: Any = wrap(CHAIN, ShardingStrategy[strategy], mode)
        join(model.module.links)  # they are wrapped by now
        units = [unit for _, unit, _ in units_in(model)]
        gathered: list[int] = []
        model.module.links[-1].module.register_forward_hook(  # in the innermost of the nested calls
            lambda *_, units=units, gathered=gathered: gathered.append(sum(unit.is_gathered for unit in units))
        )
        optimizer = make_optimizer(model.parameters())
        steps = []
        for step in range(schedule.steps):
            loss = CHAIN.loss(model, rank_batch(CHAIN, schedule, step, 0, rank, world_size))
            loss.backward()
            steps.append(finish_step(model, optimizer, loss))
        assert_same_steps(steps, plain, f"chain {strategy} {mode}")
        assert gathered == [7] * schedule.steps, f"chain {strategy} {mode}: {gathered}"


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
    for strategy, mode in ways():
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
