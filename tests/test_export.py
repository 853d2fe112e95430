"""`fsdp.export.weights`: a stream of all weights, unit by unit, in the dtype of an inference engine."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.export
from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.exports import build, copied, expected, train
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pairs import pairwise
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_parameters, wrap
from tests.harness.strategies import FULL, HYBRID, NONE

CASES = [
    *((*case, FULL) for case in pairwise([1, 2, 3], [True, False], [None, torch.bfloat16])),
    (2, True, torch.bfloat16, NONE),
    (4, True, torch.bfloat16, HYBRID),
]


@pytest.mark.parametrize("world_size, use_orig_params, dtype, strategy", CASES)
@on_ranks("world_size")
def test_weights_equal_the_full_state_dict_in_the_dtype(
    world_size: int, use_orig_params: bool, dtype: torch.dtype | None, strategy: ShardingStrategy
) -> None:
    """Bit for bit, with all names of tied weights, buffers and ignored parameters.

    As tensors, as buckets, and on one rank alone.
    """
    options: dict[str, Any] = {}
    if strategy is HYBRID:
        options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = build(use_orig_params, strategy, **options)
    train(model)
    stream = fsdp.export.weights(model, dtype=dtype)
    assert_bit_equal(copied(stream), expected(model, dtype))
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream] == stream.metadata()
    from_buckets = {}
    for bucket in stream.buckets():
        buffer = bucket.buffer.clone()
        for name, shape, kind, start, end, stride in bucket.tensors:
            assert buffer.dtype == kind
            from_buckets[name] = buffer[start:end].as_strided(shape, stride)
    assert_bit_equal(from_buckets, expected(model, dtype))
    last = world_size - 1
    alone = copied(fsdp.export.weights(model, dtype=dtype, to=last))
    if dist.get_rank() == last:
        assert_bit_equal(alone, from_buckets)
    else:
        assert not alone
    train(model)


def wide() -> nn.Module:
    layers = (nn.Linear(64, 64, bias=False) for _ in range(6))
    return wrap(nn.Sequential(*layers), FULL, True, wrap_policy=ModuleWrapPolicy({nn.Linear}))


@on_ranks(2)
def test_stream_moves_the_bytes_of_the_dtype_and_holds_two_units() -> None:
    model = wide()
    numel = 64 * 64
    for dtype, itemsize in ((None, 4), (torch.bfloat16, 2)):
        with record_collectives() as log:
            for _ in fsdp.export.weights(model, dtype=dtype):
                pass
        gathers = [c for c in log.records if str(c.label).startswith("gather")]
        assert [c.output_nbytes for c in gathers] == [numel * itemsize] * 6
        with record_collectives() as log:
            for _ in fsdp.export.weights(model, dtype=dtype, to=0):
                pass
        moved = [c for c in log.records if c.op == "all_to_all"]
        received = sum(c.output_nbytes for c in moved)
        assert received == (6 * numel * itemsize if dist.get_rank() == 0 else 0)
        assert sum(c.input_nbytes for c in moved) == 6 * numel * itemsize // dist.get_world_size()
    stream = fsdp.export.weights(model, dtype=torch.bfloat16)
    stream_of_all = iter(stream)
    first = next(stream_of_all)[1].untyped_storage()
    blocks = {first.data_ptr()} | {tensor.untyped_storage().data_ptr() for _, tensor in stream_of_all}
    assert len(blocks) == 2 and first.nbytes() == numel * 2
    with record_collectives() as log:
        assert len(stream.metadata()) == 6
    assert not log.records


# -- unfinished loops --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_model_is_usable_after_an_unfinished_loop() -> None:
    model = build(True)
    before = full_parameters(model)
    for _ in itertools.islice(fsdp.export.weights(model), 3):
        pass
    assert_bit_equal(full_parameters(model), before)
    train(model)
    with pytest.raises(ZeroDivisionError):
        for _ in fsdp.export.weights(model):
            raise ZeroDivisionError
    stream = iter(fsdp.export.weights(model))
    for number, _ in enumerate(stream):
        if dist.get_rank() == 1 and number == 2:  # on one rank only
            break
    del stream
    train(model)
    assert_bit_equal(copied(fsdp.export.weights(model)), expected(model, None))


@on_ranks(1)
def test_export_inside_a_forward_or_of_a_plain_model_is_refused() -> None:

    def forward(m: Any, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match=r"FORWARD: iterate over fsdp\.export\.weights"):
            next(iter(fsdp.export.weights(outer)))
        return x

    outer = wrap(nn.Sequential(nn.Linear(3, 3), Net(forward)), FULL, True)
    outer(torch.ones(1, 3))
    with pytest.raises(ValueError, match="expected a model with wrapped modules"):
        fsdp.export.weights(nn.Linear(2, 2))
    for rank in (1, -1):
        with pytest.raises(ValueError, match=rf"to must be a rank of the default group, 0 to 0, or None, got {rank}"):
            fsdp.export.weights(outer, to=rank)


# -- adapters ----------------------------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """A layer like PEFT's of this kind."""

    def __init__(self, base: nn.Linear, *, transposed: bool = False) -> None:
        super().__init__()
        self.base_layer, self.fan_in_fan_out = base, transposed
        rows, columns = base.weight.shape if not transposed else base.weight.shape[::-1]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, 2, bias=False), "other": nn.Linear(columns, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, rows, bias=False), "other": nn.Linear(2, rows)})
        self.scaling, self.active_adapters = {"default": 0.5, "other": 3.0}, ["default"]
        base.requires_grad_(False)

    def delta(self) -> Tensor:
        product = self.lora_B["default"].weight @ self.lora_A["default"].weight * 0.5
        return product.T if self.fan_in_fan_out else product

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.base_layer.weight + self.delta(), self.base_layer.bias)


def adapted() -> nn.Module:
    inner = nn.Sequential(
        OrderedDict(first=LoraLinear(nn.Linear(5, 7)), second=LoraLinear(nn.Linear(7, 7), transposed=True))
    )
    return nn.Sequential(OrderedDict(base_model=nn.Sequential(OrderedDict(model=inner))))


@on_ranks(2)
def test_adapters_are_merged_into_the_gathered_copy_only() -> None:
    for policy in (None, ModuleWrapPolicy({LoraLinear})):
        torch.manual_seed(2)
        plain: Any = adapted().double()
        inner: Any = plain.base_model.model
        merged = {}
        for name in ("first", "second"):
            layer = getattr(inner, name)
            merged[f"{name}.weight"] = (layer.base_layer.weight + layer.delta()).detach()
            merged[f"{name}.bias"] = layer.base_layer.bias.detach()
        torch.manual_seed(2)
        model = wrap(adapted().double(), FULL, True, wrap_policy=policy)
        before = full_parameters(model)
        stream = fsdp.export.weights(model, merge=fsdp.export.lora)
        assert_bit_equal(copied(stream), merged)
        assert {info.name: info.shape for info in stream.metadata()} == {n: tuple(t.shape) for n, t in merged.items()}
        slices = [one for bucket in stream.buckets() for one in bucket.tensors]
        assert {one.name for one in slices} == set(merged)
        assert_bit_equal(full_parameters(model), before, "the shards")
        low = copied(fsdp.export.weights(model, dtype=torch.bfloat16, merge=fsdp.export.lora))
        rounded = plain.bfloat16().float().base_model.model  # all are cast first, and then the sum is
        for name in ("first", "second"):
            layer = getattr(rounded, name)
            merged[f"{name}.weight"] = layer.base_layer.weight + layer.delta()
        assert_bit_equal(low, {name: tensor.detach().bfloat16() for name, tensor in merged.items()})
    torch.manual_seed(2)
    model = wrap(adapted(), FULL, True, wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with pytest.raises(RuntimeError, match=r"'base_model.model.first.lora_A.default.weight' is not in the unit of"):
        for _ in fsdp.export.weights(model, merge=fsdp.export.lora):
            pass


@on_ranks(1)
def test_disabled_and_merged_adapters_are_not_merged_again() -> None:
    for name, value in (("disable_adapters", True), ("merged_adapters", ["default"])):
        model = wrap(adapted(), FULL, True)
        base = full_parameters(model)["base_model.model.first.base_layer.weight"]
        setattr(model.module.base_model.model.first, name, value)
        merged = copied(fsdp.export.weights(model, merge=fsdp.export.lora))
        assert torch.equal(merged["first.weight"], base), name


@on_ranks(1)
def test_adapters_of_another_kind_are_refused() -> None:
    """Their base weights would be exported without the adapters."""
    # A layer like PEFT's IA3.
    scaled = Net(base_layer=nn.Linear(3, 3), ia3_l=nn.ParameterDict({"default": torch.ones(3, 1)}))
    model = wrap(nn.Sequential(scaled), FULL, True)
    with pytest.raises(NotImplementedError, match="0 is a Net, whose adapters are not LoRA"):
        fsdp.export.weights(model, merge=fsdp.export.lora).metadata()
