"""Casts of mixed precision: inputs, outputs and buffers, and sums in low precision.

Also together with autocast, checkpointing and batch norms.
"""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.comm import collectives
from fsdp.comm.collectives import sum_in_rank_order
from fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, lambda_auto_wrap_policy
from tests.harness.lockstep import assert_local_gradients
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal, clean_name, named_parameters
from tests.harness.pool import on_ranks
from tests.harness.precision import BF16, FP16, FP32, FP64, WIDTH, Pair, by_foreach, loss_of, reduced, same
from tests.harness.sharded import full_gradients, full_parameters, wrap
from tests.harness.strategies import FULL, MODES, NONE, Mode
from tests.harness.versions import needs

# -- inputs and outputs --------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """A scale and a part, which may have another precision. Records the dtypes of inputs and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.part.register_forward_pre_hook(self.note)
        self.seen: list[torch.dtype] = []

    def note(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.seen += [args[0].dtype, module.weight.dtype]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.scale.dtype]
        return self.part(x * self.scale)


# Precision of the outer and of the inner unit, and the dtypes of input and parameters in both.
INPUTS = [
    (MixedPrecision(BF16), MixedPrecision(BF16), [BF16, BF16, BF16, BF16]),
    (MixedPrecision(BF16), MixedPrecision(FP16, cast_forward_inputs=True), [BF16, BF16, FP16, FP16]),
    (None, MixedPrecision(FP16, cast_forward_inputs=True), [FP32, FP32, FP16, FP16]),
    (MixedPrecision(FP16), MixedPrecision(FP32, cast_forward_inputs=True), [FP16, FP16, FP32, FP32]),
    (
        MixedPrecision(BF16, cast_root_forward_inputs=False, cast_forward_inputs=True),
        MixedPrecision(BF16, cast_forward_inputs=True),
        [BF16, BF16, BF16, BF16],
    ),
]


@on_ranks(1)
def test_forward_inputs_are_cast_as_configured() -> None:
    x = torch.ones(2, WIDTH)
    for (outer, inner, expected), mode in itertools.product(INPUTS, MODES):
        net = Chain()
        net.part = wrap(net.part, *mode, mixed_precision=inner)
        model = wrap(net, *mode, mixed_precision=outer)
        output = model(x)
        assert net.seen == expected and output.dtype == expected[-1], mode
        loss_of(output).backward()
        assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {FP32}, mode
    net = Chain()  # no unit casts the inputs of the part
    net.part = wrap(net.part, mixed_precision=MixedPrecision(FP16))
    model = wrap(net, mixed_precision=MixedPrecision(cast_root_forward_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)


@on_ranks(1)
def test_outputs_are_cast_to_output_dtype() -> None:
    """For units of the user, not of a policy. Without `output_dtype` the module's own objects are returned."""
    x = torch.ones(2, WIDTH)
    for mode, output_dtype in itertools.product(MODES, (None, FP32, FP64)):
        precision = MixedPrecision(BF16, output_dtype=output_dtype, cast_forward_inputs=True)
        net = Chain()
        net.part.register_forward_hook(lambda module, args, output, net=net: net.seen.append(output.dtype))
        model = wrap(net, *mode, wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=precision)
        output = model(x)
        assert output.dtype == (output_dtype or BF16) and net.seen[-1] == BF16, mode
        assert net.part.mixed_precision.output_dtype is None, "outputs of the policy's units stay as computed"
        loss_of(output).backward()
        inner = wrap(nn.Linear(WIDTH, WIDTH), *mode, mixed_precision=precision)
        assert inner(x).dtype == (output_dtype or BF16), mode
    values: dict[str, Any] = {}

    def forward(m: Any, x: Tensor) -> Any:
        y = values["y"] = m.linear(x)
        kept = values["kept"] = torch.ones(2, dtype=FP64)
        values["output"] = OrderedDict(y=y, kept=kept, index=torch.arange(2))
        return values["output"]

    net = Net(forward, linear=nn.Linear(WIDTH, WIDTH))
    model = wrap(deepcopy(net), use_orig_params=True, mixed_precision=MixedPrecision(BF16))
    found = model(x)
    assert found is values["output"] and found["y"] is values["y"] and found["kept"] is values["kept"]
    assert found["kept"].dtype == FP64, "outputs are as the module made them"
    model = wrap(net, use_orig_params=True, mixed_precision=MixedPrecision(BF16, output_dtype=FP32))
    found = model(x)
    assert type(found) is OrderedDict and found["y"].dtype == found["kept"].dtype == FP32
    assert found["y"].grad_fn is not None and found["index"] is values["output"]["index"]
    assert values["y"].dtype == BF16


# -- buffers -------------------------------------------------------------------------------------------------------


def with_buffers(*, parameters: bool = True) -> nn.Module:
    values = {
        "f16": torch.ones(3, dtype=FP16),
        "f32": torch.full((3,), 1 / 3),
        "count": torch.zeros(3, dtype=torch.int64),
        "mask": torch.ones(3, dtype=torch.bool),
    }
    linear = {"linear": nn.Linear(WIDTH, WIDTH)} if parameters else {}
    module = Net(lambda m, x: m.linear(x) if parameters else x, **linear, **values)
    module.register_buffer("f64", torch.ones(3, dtype=FP64), persistent=False)
    module.register_buffer("nothing", None)
    return module


OWN = {"f16": FP16, "f32": FP32, "f64": FP64, "count": torch.int64, "mask": torch.bool}


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None}


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in own_buffers(module).items()}


def original_dtypes(model: FullyShardedDataParallel, module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes that the model's unit remembers of the buffers of `module`."""
    precision = model._fsdp_unit.precision
    return {name: precision.original_dtype(buffer) for name, buffer in own_buffers(module).items()}


def cast_to(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {name: dtype if own.is_floating_point else own for name, own in OWN.items()}


@pytest.mark.parametrize("mode", MODES, ids=str)
@on_ranks(1)
def test_buffers_are_cast_once_and_stay_the_same_objects(mode: Mode) -> None:
    """Settings of inner units win, ignored modules and integers are left alone, and original dtypes are kept."""
    parts = {name: with_buffers() for name in ("plain", "unit", "other", "ignored")}
    net: Any = Net(lambda m, x: m.other(m.unit(m.plain(x))), own=torch.ones(3), **parts)
    plain, unit, other, ignored = parts.values()
    before = {module: own_buffers(module) for module in net.modules()}
    net.unit = wrap(unit, *mode, mixed_precision=MixedPrecision(buffer_dtype=FP16))
    net.other = wrap(other, *mode, mixed_precision=MixedPrecision(BF16))
    model = wrap(net, *mode, mixed_precision=MixedPrecision(buffer_dtype=BF16), ignored_modules=[ignored])
    assert dtypes(unit) == OWN, "the first forward, or whatever makes a root, casts them"
    model.check_is_root()
    for module, expected in {plain: cast_to(BF16), unit: cast_to(FP16), other: OWN, ignored: OWN}.items():
        assert dtypes(module) == expected
        assert all(before[module][name] is buffer for name, buffer in own_buffers(module).items())
    assert net.own.dtype == BF16
    plain.f32 = plain.f32 + 1  # as a forward may do
    assert original_dtypes(model, plain) == original_dtypes(net.unit, unit) == OWN
    assert original_dtypes(model, net) == {"own": FP32}
    with FullyShardedDataParallel.summon_full_params(model):
        assert dtypes(plain) == cast_to(BF16)
    copied = deepcopy(model)
    for _ in range(2):
        assert original_dtypes(copied, copied.module.plain) == OWN
        copied.check_is_root()
    assert dtypes(copied.module.plain) == cast_to(BF16)


# -- batch norms and the like --------------------------------------------------------------------------------------


class NormBlock(Net):
    """A block of which each module records the dtypes of input, parameters, statistics and output."""

    def __init__(self) -> None:
        linear, batch, layer = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        super().__init__(lambda m, x: x + m.layer(m.batch(m.linear(x))), linear=linear, batch=batch, layer=layer)
        for norm in (batch, layer):
            norm.register_forward_hook(note_dtypes)


def note_dtypes(norm: Any, args: tuple[Tensor], output: Tensor) -> None:
    held = [norm.weight, *([norm.running_mean] if isinstance(norm, nn.BatchNorm1d) else [])]
    norm.seen = [tensor.dtype for tensor in (*args, *held, output)]


@contextmanager
def warned(text: str) -> Iterator[list[bool]]:
    """Yield a list that holds afterwards whether a warning contained `text`; further warnings are dropped."""
    found: list[bool] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.append(any(text in str(warning.message) for warning in caught))


@needs(2, 7, "fails for torch's FSDP1")
@on_ranks(2)
def test_ignored_module_classes_keep_full_precision_as_in_torch() -> None:
    """Modules, dtypes, the warning and gradients equal torch's FSDP1."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(NormBlock(), NormBlock(), nn.Linear(WIDTH, 3))
    inputs = [torch.randn(4, WIDTH) for _ in range(dist.get_world_size())]
    by_class = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, NormBlock))
    everywhere = [
        (ModuleWrapPolicy({NormBlock}), TorchModuleWrapPolicy({NormBlock})),
        (by_class, by_class),
        (always_wrap_policy, always_wrap_policy),
        (None, None),
    ]
    for index, ignored in enumerate((None, (), (nn.LayerNorm,), (nn.LayerNorm, nn.BatchNorm1d))):
        fields: dict[str, Any] = {} if ignored is None else {"_module_classes_to_ignore": ignored}
        for policies in (2 * everywhere)[index : index + 2]:
            case = f"{ignored}, {policies[0]}"
            results = []
            for cls, precision, policy in (
                (FullyShardedDataParallel, MixedPrecision, policies[0]),
                (TorchFSDP, TorchMixedPrecision, policies[1]),
            ):
                net = deepcopy(plain)
                with warned("Both mixed precision and an auto_wrap_policy were") as found:
                    model: Any = cls(
                        net,
                        auto_wrap_policy=policy,
                        mixed_precision=precision(BF16, FP32, BF16, **fields),
                        device_id=torch.device("cpu"),
                        use_orig_params=True,
                    )
                    output = model(inputs[rank])
                    loss_of(output).backward()
                seen = [m.seen for m in net.modules() if hasattr(m, "seen")]
                attributes = [
                    (type(m.module).__name__, m.mixed_precision.param_dtype, m.mixed_precision.reduce_dtype)
                    for m in net.modules()
                    if isinstance(m, cls)
                ]
                if cls is FullyShardedDataParallel:
                    grads = full_gradients(model)
                else:
                    with cls.summon_full_params(model, with_grads=True):
                        names = (name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters())
                        grads = {name: p.grad.clone() for name, p in zip(names, model.parameters())}
                results.append((found, seen, attributes, output, grads))
            result, reference = results
            assert result[:3] == reference[:3], case
            assert result[0] == [policies[0] is not None and ignored != ()], case
            same(result[3], reference[3], case)
            assert_bit_equal(result[4], reference[4], case)


# -- in combination ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_autocast_applies_on_top_of_mixed_precision() -> None:
    """Autocast's cached casts end with the full parameters."""
    rank = dist.get_rank()
    for mode, param_dtype in itertools.product(MODES, (BF16, FP16, None)):
        case = f"{mode}, {param_dtype}"
        pair = Pair(*mode, MixedPrecision(param_dtype, FP32))
        for _ in range(2):
            inputs = pair.inputs()
            with torch.autocast("cpu", BF16):
                pair.model(inputs[rank])
                # Casts of NO_SHARD's own parameters are cached until the block ends, as for plain models.
                if mode.strategy is not NONE or param_dtype is not None:
                    by_foreach(list(pair.model.parameters()))
                    by_foreach(list(pair.plain.parameters()))
                output = pair.model(inputs[rank])  # new values within one autocast block
                runs = [pair.run(x, param_dtype) for x in inputs]
            same(output, runs[rank][1], case)
            loss_of(output).backward()
            for _, expected in runs:
                loss_of(expected).backward()
            by_rank = [{n: p.grad.float() for n, p in named_parameters(replica).items()} for replica, _ in runs]  # type: ignore[union-attr]
            assert_local_gradients(pair.model, pair.mean(by_rank), 0, case)
            pair.model.zero_grad()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = deepcopy(net)
    model = wrap(net, FULL, True, wrap_policy=ModuleWrapPolicy({nn.Linear}))  # the root owns no parameters
    with torch.autocast("cpu", BF16):
        model(inputs[rank])
        by_foreach(list(model.parameters()))
        by_foreach(list(plain.parameters()))
        same(model(inputs[rank]), plain(inputs[rank]), "a root without parameters")


PLACES = [("none", CheckpointImpl.NO_REENTRANT), *itertools.product(("outside", "inside"), CheckpointImpl)]


@pytest.mark.parametrize("mode", MODES, ids=str)
@on_ranks(2)
def test_checkpointing_around_and_inside_a_unit_of_another_precision(mode: Mode) -> None:
    """Recomputation casts inputs as the forward did."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    found = []
    for place, implementation in PLACES:
        checkpoint = partial(checkpoint_wrapper, checkpoint_impl=implementation)
        torch.manual_seed(0)
        net = Chain()
        part: nn.Module = checkpoint(net.part) if place == "inside" else net.part
        part = wrap(part, *mode, mixed_precision=MixedPrecision(FP16, FP32, cast_forward_inputs=True))
        net.part = checkpoint(part) if place == "outside" else part
        model = wrap(net, *mode, mixed_precision=MixedPrecision(BF16))
        for _ in range(2):
            loss_of(model(x)).backward()
        assert set(net.seen[2::2]) | set(net.seen[3::2]) == {BF16, FP16}
        grads = {clean_name(name): grad for name, grad in full_gradients(model).items()}
        found.append({**grads, "input": x.grad})
        x.grad = None
        assert_bit_equal(found[-1], found[0], f"{place}, {implementation}")


@on_ranks(2)
def test_parameters_of_several_dtypes_in_one_unit() -> None:
    """Trained parameters are reduced in their own dtypes; frozen and integer ones are only gathered."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.single(x.to(m.single.weight.dtype)))[:, m.order]
        x = x + m.frozen(x)
        return m.brain(x.to(m.brain.weight.dtype)) * m.scale

    rank = dist.get_rank()
    precisions = (MixedPrecision(), MixedPrecision(BF16, FP32), MixedPrecision(FP64), MixedPrecision(FP32))
    for mode, precision in itertools.product(MODES, precisions):
        case = f"{mode}, {precision.param_dtype}"
        torch.manual_seed(0)
        net = Net(
            forward,
            single=nn.Linear(WIDTH, WIDTH),
            brain=nn.Linear(WIDTH, WIDTH, dtype=BF16),
            frozen=nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False),
            order=nn.Parameter(torch.randperm(WIDTH), requires_grad=False),
            scale=nn.Parameter(torch.ones(3, WIDTH, dtype=BF16), requires_grad=False),
        )
        plain = deepcopy(net)
        model = wrap(net, *mode, mixed_precision=precision)
        for _ in range(2):
            inputs = [torch.randn(3, WIDTH) for _ in range(dist.get_world_size())]
            output = model(inputs[rank])
            loss_of(output).backward()
            by_rank = []
            for x in inputs:
                replica = deepcopy(plain)
                for param in replica.parameters():
                    param.data = param.data.to(precision.compute_dtype_of(param.dtype))
                expected = replica(x)
                if x is inputs[rank]:
                    same(output, expected, case)
                loss_of(expected).backward()
                by_rank.append(named_parameters(replica))
            grads: dict[str, Tensor | None] = {}
            for name, param in named_parameters(plain).items():
                dtype = precision.reduce_dtype_of(param.dtype)
                own = [r[name].grad.to(dtype) for r in by_rank] if param.requires_grad else []  # type: ignore[union-attr]
                grads[name] = reduced(own).to(param.dtype) if own else None
            assert_local_gradients(model, grads, 0, case)
            model.zero_grad()
        assert_bit_equal(full_parameters(model), {n: p.detach() for n, p in named_parameters(plain).items()}, case)


@on_ranks(2)
def test_low_precision_models_train_in_their_own_dtype() -> None:
    for mode, dtype in itertools.product(MODES, (BF16, FP16, FP64)):
        pair = Pair(*mode, MixedPrecision(), dtype=dtype)
        for step in range(3):
            pair.step(f"{mode}, {dtype}, step {step}", dtype=None)
        assert {param.dtype for param in pair.model.parameters()} == {dtype}


# -- sums over many ranks ------------------------------------------------------------------------------------------


def adversaries(count: int) -> dict[str, Tensor]:
    """Return bfloat16 values of `count` ranks (first dimension) that are lost in bfloat16 sums."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(count, 64, generator=generator)
    tiny = torch.full((count, 4), 2.0**-9)
    tiny[0] = 1.0  # every further addition is half a unit, and is rounded away
    waves = torch.tensor([256.0, 1.0, -256.0, 1.0]).repeat((count + 3) // 4)[:count, None]
    found = {
        "small after large": tiny,
        "small before large": tiny.flip(0),
        "large ones cancel": waves,
        "of many magnitudes": torch.ldexp(normal.abs(), torch.randint(-8, 8, normal.shape, generator=generator)),
        "of both signs": normal,
    }
    return {name: value.to(BF16) for name, value in found.items()}


def unit_of(values: Tensor) -> Tensor:
    """Return the bfloat16 unit in the last place of each element, in float64."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values.abs()).exponent - 8)


def test_sums_of_many_ranks_are_rounded_once() -> None:
    """512 virtual ranks stay within one bfloat16 unit of the float64 sum; sums in bfloat16 are far off."""
    for name, values in adversaries(512).items():
        exact = values.double().sum(0)
        total = torch.empty(values.shape[1], dtype=BF16)
        sum_in_rank_order(total, list(values))
        assert ((total.double() - exact).abs() <= unit_of(exact)).all(), name
        narrow = values[0].clone()
        for piece in values[1:]:
            narrow += piece
        assert ((narrow.double() - exact).abs() > unit_of(exact)).any(), f"{name} is no adversary"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.complex64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocked_sums_equal_sums_of_the_whole(dtype: torch.dtype, ranks: int) -> None:
    """Adding and dividing by blocks of cache size is bit-equal to whole operations, with a partial last block."""
    torch.manual_seed(0)
    pieces = [torch.randn(3 * collectives._IN_CACHE * torch.get_num_threads() + 7, dtype=dtype) for _ in range(ranks)]
    wide = torch.float32 if dtype == BF16 else dtype
    expected = pieces[0].to(wide)
    for piece in pieces[1:]:
        expected = expected + piece
    expected = expected.to(dtype) / 3
    kept, total = [piece.clone() for piece in pieces], torch.empty_like(pieces[0])
    sum_in_rank_order(total, pieces, divisor=3)
    assert_bit_equal({"sum": total, **dict(zip("abc", pieces))}, {"sum": expected, **dict(zip("abc", kept))})
