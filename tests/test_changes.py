"""`fsdp.export.changes`: changed bf16 weights of a step, found by each rank alone and applied elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.export
from fsdp import ShardingStrategy
from tests.harness.exports import Model, build, copied, expected, train
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL, HYBRID, NONE


def receiver(weights: dict[str, Tensor]) -> tuple[Model, dict[str, Tensor]]:
    plain = Model().bfloat16()
    plain.load_state_dict(weights)
    for module in plain.modules():
        if isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.contiguous_format)
    return plain, plain.state_dict()


TIED = ("embed.weight", "head.weight")
CASES = [(1, FULL, True), (2, FULL, False), (3, FULL, True), (2, NONE, True), (4, HYBRID, True)]


@pytest.mark.parametrize("world_size, strategy, use_orig_params", CASES)
@on_ranks("world_size")
def test_plain_copy_follows_the_training_bit_for_bit(
    world_size: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Running statistics, tied weights, an ignored and a channels-last parameter are copied without a collective."""
    options: dict[str, Any] = {}
    if strategy is HYBRID:
        options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = build(use_orig_params, strategy, **options)
    plain, state = receiver(copied(fsdp.export.weights(model, dtype=torch.bfloat16)))
    snapshot, version = fsdp.export.snapshot(model, dtype=torch.bfloat16), 0
    for step in range(3):
        train(model)
        with record_collectives() as log:
            own = fsdp.export.changes(model, snapshot)
        assert not log.records
        assert own.version == step + 1
        parts = of_all_ranks(own)  # pickled, as by a program
        version = fsdp.export.apply_changes(state, parts, version=version)
        assert_bit_equal(dict(plain.state_dict()), expected(model, torch.bfloat16), f"step {step}")
        assert sum(part.nbytes for part in parts) > 0
        changed = sum(change.indices.numel() for part in parts for change in part.tensors)
        assert changed <= 2 * sum(tensor.numel() for tensor in state.values())
    assert not fsdp.export.changes(model, snapshot).tensors  # no step since


@on_ranks(2)
def test_changes_that_do_not_fit_are_refused_before_a_write() -> None:
    model = build(True)
    plain, state = receiver(copied(fsdp.export.weights(model, dtype=torch.bfloat16)))
    snapshot = fsdp.export.snapshot(model, dtype=torch.bfloat16)
    versions = []
    for _ in range(2):
        train(model)
        versions.append(of_all_ranks(fsdp.export.changes(model, snapshot)))
    first, second = versions
    before = {name: tensor.clone() for name, tensor in state.items()}
    damaged = [first[0], dataclasses.replace(first[1], checksum=b"")]
    low = {name: tensor.float() for name, tensor in state.items()}
    lacking = {name: tensor for name, tensor in state.items() if "embed" not in name and "head" not in name}
    repeated = {name: tensor[:1].expand_as(tensor) for name, tensor in state.items() if tensor.dim()}
    untied = {**state, "head.weight": state["head.weight"] + 1}
    for given, parts, version, words in (
        (state, second, 0, "lead to version 2, and the tensors have version 0"),
        (state, first[:1], 0, "expected the changes of ranks 0 to 1, each once, got .0."),
        (state, [first[0], first[0]], 0, "each once"),
        (state, damaged, 0, "the checksum of the changes of rank 1 is wrong"),
        (state, second, 1, "the checksum of the changes of rank 0 is wrong"),  # version 1 was never applied
        (low, first, 0, "must be a tensor of torch.bfloat16"),
        (lacking, first, 0, "have 'embed.weight' or 'head.weight', which the state dict has not"),
        (repeated, first, 0, "with memory for each element, but it has torch.bfloat16 and strides .*0"),
        (untied, first, 0, "the checksum of the changes of rank . is wrong"),
    ):
        with pytest.raises(ValueError, match=words):
            fsdp.export.apply_changes(given, parts, version=version)
        assert_bit_equal(state, before)
    version = fsdp.export.apply_changes(state, first, version=0)
    fsdp.export.apply_changes(state, second, version=version)
    assert_bit_equal(dict(plain.state_dict()), expected(model, torch.bfloat16))
    other = fsdp.export.snapshot(build(True, as_it_is=True), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="the snapshot is of another model"):
        fsdp.export.changes(model, other)


@on_ranks(2)
def test_receiver_may_have_any_strides_and_one_name_of_a_tied_parameter() -> None:
    """The receivers are clones of the weights as they came, transposed ones, and ones with either of two names."""
    model = build(True)
    sent = copied(fsdp.export.weights(model, dtype=torch.bfloat16))
    receivers = [
        sent,
        {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.clone() for name, tensor in sent.items()},
        *({name: tensor.clone() for name, tensor in sent.items() if name != other} for other in TIED),
    ]
    assert not all(tensor.is_contiguous() for tensor in sent.values())
    snapshot = fsdp.export.snapshot(model, dtype=torch.bfloat16)
    train(model)
    parts, weights = of_all_ranks(fsdp.export.changes(model, snapshot)), expected(model, torch.bfloat16)
    for state in receivers:
        assert fsdp.export.apply_changes(state, parts, version=0) == 1
        assert_bit_equal(state, {name: weights[name] for name in state})


@on_ranks(2)
def test_changes_of_float8_can_be_pickled() -> None:
    dtype = torch.float8_e4m3fn
    model = wrap(nn.Linear(5, 3), FULL, True)
    state = copied(fsdp.export.weights(model, dtype=dtype))
    snapshot = fsdp.export.snapshot(model, dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    fsdp.export.apply_changes(state, of_all_ranks(fsdp.export.changes(model, snapshot)), version=0)
    after = copied(fsdp.export.weights(model, dtype=dtype))
    assert_bit_equal(
        {n: t.view(torch.uint8) for n, t in state.items()}, {n: t.view(torch.uint8) for n, t in after.items()}
    )
