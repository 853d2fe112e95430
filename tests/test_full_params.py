"""`summon_full_params` and `full_params`: values, names, write-back, errors, and training afterwards.

The reference is a plain model that takes the same steps on the batches of all ranks.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp
from fsdp import FullyShardedDataParallel, shard_info
from fsdp.api import TrainingState
from tests.harness.lockstep import assert_at_rest
from tests.harness.meter import NOISE, Meter, needs_meter
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_parameters
from tests.harness.small import WIDTH, batch, error_of, values
from tests.harness.strategies import FULL_SHARD, NO_SHARD, Mode
from tests.harness.summoned import (
    Problem,
    backward,
    build,
    enter,
    make_twin,
    modes,
    modes_of_two_ranks,
    net,
    pieces,
    summon,
)

# -- values and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "mode"), modes(True))
@on_ranks("world_size")
def test_summon_shows_full_parameters_and_restores_shards(world_size: int, mode: Mode) -> None:
    """Between steps, for a wrapped model and for a parent module; gradients are hidden with flat parameters."""
    module = net()
    module.layers[1] = checkpoint_wrapper(module.layers[1])
    originals = list(module.parameters())
    twin = make_twin(mode, module)
    model, plain = twin.model, twin.plain
    resting = {name: p for name, p in model.named_parameters()}  # noqa: C416
    for step in range(3):
        twin.train(step)
        grads = {name: p.grad for name, p in model.named_parameters()}
        expected = twin.values()
        for module_ in (model, nn.Sequential(model)):
            with summon(module_):
                assert_bit_equal(values(model), expected, f"step {step}")
                params = list(model.parameters())
                assert all(type(p) is nn.Parameter and p.is_leaf for p in params)
                assert [p.requires_grad for p in params] == [p.requires_grad for p in plain.parameters()]
                assert [p.stride() for p in params] == [p.stride() for p in plain.parameters()]
                if mode.use_orig_params:
                    assert all(p.grad is grad for p, grad in zip(params, grads.values(), strict=True))
                    assert all(a is b for a, b in zip(params, originals, strict=True))
                else:
                    assert all(p.grad is None for p in params)
                    assert not any(isinstance(p, fsdp.FlatParameter) for p in params)
                assert model.gain is model.module.gain and any(model.gain is p for p in params)
                states = {unit.training_state for unit in FullyShardedDataParallel.fsdp_modules(model)}
                assert states == {TrainingState.SUMMON_FULL_PARAMS}
        assert_at_rest(model, str(mode))
        now = dict(model.named_parameters())
        assert list(now) == list(resting) and all(now[name] is p for name, p in resting.items())
        assert all(now[name].grad is grad for name, grad in grads.items())
    twin.check()


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_summoned_parameters_have_clean_names(mode: Mode) -> None:
    """Only names of the summoned units are clean; parents and inner units keep the wrapper's prefix."""
    module = net()
    module.layers[0].register_buffer("note", torch.ones(1))
    inner_first, buffers = list(dict(module.named_parameters())), list(dict(module.named_buffers()))
    model: Any = build(mode, module)
    parent = nn.Sequential(model)
    wrapped = {"0._fsdp_wrapped_module." + part for part in ("gain", "layers.0._fsdp_wrapped_module.weight")}
    with summon(parent):
        assert [name for name, _ in model.named_parameters()] == inner_first
        assert [name for name, _ in model.named_parameters(prefix="top")] == ["top." + name for name in inner_first]
        assert [name for name, _ in model.named_buffers()] == buffers
        assert wrapped <= {name for name, _ in parent.named_parameters()}
        assert "layers.0._fsdp_wrapped_module.weight" in dict(model.module.named_parameters())
        assert "weight" in dict(model.layers[0].named_parameters())
    with summon(model, recurse=False):  # names of this unit's own parameters are clean
        names = {name for name, _ in model.named_parameters()}
        assert {"gain", "never", "shift"} <= names
    assert all("_fsdp_wrapped_module." in name for name, _ in model.named_parameters())
    assert "_fsdp_wrapped_module.scale" in dict(model.named_buffers())


@pytest.mark.parametrize("mode", modes_of_two_ranks(False))
@on_ranks(2)
def test_summon_of_single_units_and_refusal_of_nested_summons(mode: Mode) -> None:
    """`recurse=False` shows one unit. A unit that is summoned already, or in a forward or backward, is refused."""
    twin = make_twin(mode)
    model = twin.model
    expected = twin.values()
    sharded = mode.strategy is not NO_SHARD
    with summon(model, recurse=False):
        assert torch.equal(model.gain, expected["gain"])
        layer = model.layers[0]
        assert layer.training_state is TrainingState.IDLE and model.training_state is TrainingState.SUMMON_FULL_PARAMS
        if mode.use_orig_params and sharded:
            assert layer.weight.dim() == 1
        with summon(layer):  # another instance
            assert torch.equal(layer.weight, expected["layers.0.weight"])
        assert_bit_equal({"gain": model.gain}, {"gain": expected["gain"]})
        for unit in (model, layer):
            message = error_of(enter, model if unit is model else nn.Sequential(model))
            assert message.startswith("AssertionError") and "Cannot manually unshard parameters" in message, message
    with summon(nn.Sequential(model), recurse=False):  # the parent is not a unit
        assert model.training_state is TrainingState.IDLE
    with summon(model.layers):  # a container between units
        assert torch.equal(model.layers[1].weight, expected["layers.1.weight"])
        assert model.training_state is TrainingState.IDLE
    assert_at_rest(model, str(mode))

    found: list[str] = []
    words_of = lambda *_: found.append(error_of(enter, model))  # noqa: E731
    handle = model.layers[2].register_forward_hook(words_of)
    output = model(batch(0))
    handle.remove()
    output.register_hook(words_of)
    model.zero_grad()
    output.sum().backward()
    assert found[0].startswith("AssertionError: ")
    assert "Cannot manually unshard parameters during forward/backward" in found[0]
    twin.train(0)


# -- write-back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "mode"), modes(True))
@on_ranks("world_size")
def test_writeback(world_size: int, mode: Mode) -> None:
    rank, sharded = dist.get_rank(), mode.strategy is not NO_SHARD and dist.get_world_size() > 1
    twin = make_twin(mode)
    model = twin.model
    twin.train(0)
    before = full_parameters(model)

    def change(module: nn.Module, by: float) -> None:
        with torch.no_grad():
            for index, param in enumerate(module.parameters()):
                if index % 2:
                    param.add_(by)
                else:
                    param.data = param.data + by  # replaces the summoned tensor

    with summon(model):
        change(model, 1)
        inside = values(model)
    assert_bit_equal(full_parameters(model), {name: value + 1 for name, value in before.items()}, "written back")
    assert_bit_equal(full_parameters(model), inside)

    with summon(model, writeback=False):
        change(model, 1)
        assert torch.equal(model.gain, before["gain"] + 1 + 1)
    for name, value in full_parameters(model).items():  # without sharding the summoned tensor is the parameter
        assert torch.equal(value, before[name] + 1 if sharded else before[name] + 1 + 1), f"writeback=False: {name}"

    with summon(model), torch.no_grad():  # each rank's own part is kept, and nothing is exchanged
        for param in model.parameters():
            param.fill_(rank)
    if sharded:
        whole = {name: torch.full_like(value, rank) for name, value in before.items()}
        held = {
            unit.full_name(record): bucket.flat_param[piece.shard_offset : piece.shard_offset + piece.numel]
            for unit in shard_info(model)
            for bucket in unit.buckets
            for record, piece in zip(bucket.layout.params, bucket.pieces, strict=True)
        }
        assert_bit_equal({n: v.detach() for n, v in held.items()}, pieces(model, whole))
        for unit in shard_info(model):
            for bucket in unit.buckets:
                layout = bucket.layout
                start, end = layout.shard_range(bucket.rank)
                for gap_start, gap_end in layout.gaps:
                    gap = bucket.flat_param[max(gap_start - start, 0) : max(min(gap_end, end) - start, 0)]
                    assert not gap.any(), "padding has to stay zero"

    # The next step starts from the written values.
    with summon(model), torch.no_grad():
        for ours, theirs in zip(model.parameters(), twin.plain.parameters(), strict=True):
            ours.copy_(theirs)
    for step in range(2):
        twin.train(step)


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_errors_before_and_inside_summon(mode: Mode) -> None:
    """After an error all units are resharded, and values written before the error are kept."""
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    try:
        with summon(model):
            with torch.no_grad():
                model.gain.fill_(7)
            raise Problem
    except Problem:
        pass
    assert_at_rest(model, str(mode))
    assert full_parameters(model)["gain"].unique().tolist() == [7]
    with torch.no_grad():
        plain.gain.fill_(7)

    def put_another_shape() -> None:
        with summon(model):
            model.gain.data = torch.ones(WIDTH + 1)

    message = error_of(put_another_shape)
    assert message.startswith("RuntimeError: Cannot writeback") and str((WIDTH + 1,)) in message, message
    assert_at_rest(model, str(mode))
    assert "no error" in error_of(enter, model)

    for options, kind in [  # before anything is gathered
        ({"with_grads": True, "offload_to_cpu": True}, "NotImplementedError"),
        ({"rank0_only": True}, "NotImplementedError"),
    ]:
        message = error_of(enter, model, **options)
        assert message.startswith(kind) and "is not supported" in message, message
    not_for_flat = error_of(enter, model, with_grads=True)
    assert ("is not supported" in not_for_flat) is not mode.use_orig_params
    offload = error_of(enter, model, offload_to_cpu=True)
    assert ("is not supported" in offload) is (mode.strategy is NO_SHARD)
    assert_at_rest(model, str(mode))

    # After a failed forward the model stays summoned, and later forwards run.
    def fail(*args: Any) -> None:
        raise Problem

    with summon(model):
        handle = model.layers[1].register_forward_pre_hook(fail)
        assert error_of(model, batch(0)).startswith("Problem")
        handle.remove()
        assert_bit_equal(values(model), twin.values())
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert_at_rest(model, str(mode))
    twin.train(0)


# -- on rank 0, on the CPU, with gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_rank0_only(mode: Mode) -> None:
    """The remaining ranks keep shards, and a forward is refused on every rank."""
    twin = make_twin(mode)
    model = twin.model
    sharded = mode.strategy is not NO_SHARD
    for step in range(2):
        twin.train(step)
        resting = [p for p in model.parameters()]  # noqa: C416
        for offload in (False, True) if sharded else (False,):
            with summon(model, rank0_only=True, writeback=False, offload_to_cpu=offload):
                if dist.get_rank() == 0 or not sharded:
                    assert_bit_equal(values(model), twin.values())
                    with torch.no_grad():
                        model.gain.add_(0)
                else:
                    assert all(a is b for a, b in zip(model.parameters(), resting, strict=True))
                    assert all(p.dim() == 1 for p in model.parameters())
                message = error_of(model, batch(0))
                assert message.startswith("RuntimeError") and "rank0_only" in message, message
            assert_at_rest(model, str(mode))
    twin.check()


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_offload_of_parameters_on_the_cpu_shares_their_memory(use_orig_params: bool) -> None:
    """torch frees this memory inside the context and aborts."""
    twin = make_twin(Mode(FULL_SHARD, use_orig_params))
    model, plain = twin.model, twin.plain
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with summon(model, offload_to_cpu=True):
            assert_bit_equal(values(model), twin.values())
            assert all(p.device.type == "cpu" for p in model.parameters())
            with torch.no_grad():
                model.gain.add_(1)
                plain.gain.add_(1)
    assert [w.filename for w in caught] == [__file__]
    twin.train(0)
    (message,) = [str(w.message) for w in caught]
    assert "rank0_only" in message


@pytest.mark.parametrize(("world_size", "mode"), modes(False))
@on_ranks("world_size")
def test_with_grads_shows_and_writes_back_gradients(world_size: int, mode: Mode) -> None:
    """They have full shapes, with zeros from ranks without one, and are written back when replaced or dropped, too."""
    mode = mode._replace(use_orig_params=True)  # flat parameters show no gradients
    rank, sharded = dist.get_rank(), mode.strategy is not NO_SHARD and dist.get_world_size() > 1
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    backward(model, 0)
    twin.backward_plain(0)
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in plain.named_parameters()}
    if rank == 0:
        model.layers[1].weight.grad = None  # this rank's part has no gradient: zeros
    elif model.layers[1].weight.grad is not None and not sharded:
        model.layers[1].weight.grad = None
    before = {name: p.grad for name, p in model.named_parameters()}
    with summon(model, with_grads=True):
        shown = {clean_name(name): p.grad for name, p in model.named_parameters()}
        for name, grad in grads.items():
            if name != "layers.1.weight":
                assert_bit_equal({name: shown[name]}, {name: grad})
        some = shown["layers.1.weight"]
        assert (some is None) is not sharded
        if some is not None:
            record = next(r for u in shard_info(model) if u.name == "layers.1" for r in u.buckets[0].layout.params[:1])
            piece = next(u.buckets[0].layout.piece(0, 0) for u in shard_info(model) if u.name == "layers.1")
            assert record.name == "weight" and not some.flatten()[piece.start : piece.end].any()
            assert torch.equal(some.flatten()[piece.end :], grads["layers.1.weight"].flatten()[piece.end :])
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(2)
        model.never.grad = None
        model.layers[0].bias.grad = torch.full((WIDTH,), 3.0)
        message = error_of(backward, model, 1)
        assert message.startswith("RuntimeError: a backward of the root unit inside summon_full_params"), message
    assert model.never.grad is None
    now = {clean_name(name): p.grad for name, p in model.named_parameters()}
    for name, part in pieces(model, grads).items():
        grad = now[name]
        if name == "layers.0.bias":
            assert grad is None or grad.unique().tolist() == [3], name
        elif name not in ("layers.1.weight", "never") and grad is not None:
            assert torch.equal(grad, 2 * part if sharded else 2 * grads[name]), name

    model.zero_grad()
    backward(model, 1)
    before = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: None if grad is None else grad.clone() for name, grad in before.items()}
    with summon(model, with_grads=True, writeback=False):
        for param in model.parameters():
            if param.grad is not None:
                param.grad.zero_()
    for name, param in model.named_parameters():
        assert param.grad is before[name], name
        if kept[name] is not None:  # unsharded gradients are shown in place
            assert torch.equal(param.grad, kept[name] if sharded else torch.zeros_like(kept[name])), name


@pytest.mark.parametrize("mode", modes_of_two_ranks(False))
@on_ranks(2)
def test_unsharded_gradients_survive_summon(mode: Mode) -> None:
    """Gradients of `no_sync` are kept by `summon_full_params`, `apply` and `full_params`."""
    for use in (enter, lambda m: m.apply(lambda module: None), lambda m: list(fsdp.full_params(m))):
        twin = make_twin(mode)
        model, plain = twin.model, twin.plain
        with model.no_sync():
            backward(model, 0)
        before = {name: p.grad for name, p in model.named_parameters()}
        use(model)
        assert all(p.grad is before[name] for name, p in model.named_parameters())
        if mode.use_orig_params and mode.strategy is not NO_SHARD:
            message = error_of(enter, model, with_grads=True)
            assert message.startswith("RuntimeError") and "no_sync" in message, message
        backward(model, 1)
        twin.backward_plain(run=lambda rank: [backward(plain, step, rank) for step in (0, 1)])  # noqa: B023
        assert_bit_equal(full_gradients(model), twin.grads())


# -- forward and backward inside -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "mode"), modes(False))
@on_ranks("world_size")
def test_forward_inside_summon_gathers_nothing(world_size: int, mode: Mode) -> None:
    """A forward inside uses the summoned values as they are at that moment."""
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    for step in range(3):
        twin.train(step)
        with summon(model), record_collectives() as log:
            with torch.no_grad():
                assert torch.equal(model(batch(step)), plain(batch(step)))
                model.gain.mul_(0.5)
                plain.gain.mul_(0.5)
                model.layers[1].bias.data = plain.layers[1].bias.data = torch.full((WIDTH,), 0.25)
            for context in (torch.no_grad, torch.enable_grad):
                with context():
                    assert torch.equal(model.eval()(batch(step)), plain(batch(step)))
            assert_bit_equal(values(model), twin.values())
            model.train()
        assert not log.units("gather")
        assert_at_rest(model, str(mode))
        twin.check(f"step {step}")
    with summon(model, recurse=False), torch.no_grad():  # the units inside gather for themselves
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert_at_rest(model, str(mode))


@pytest.mark.parametrize(("world_size", "mode"), modes(True))
@on_ranks("world_size")
def test_backward_inside_summon_is_refused(world_size: int, mode: Mode) -> None:
    """Gradients would not be reduced, wherever the forward ran. Training goes on afterwards."""
    twin = make_twin(mode)
    model = twin.model
    message = "RuntimeError: a backward of the root unit inside summon_full_params, or of a forward inside"
    with summon(model):
        assert error_of(backward, model, 0).startswith(message)
        assert_bit_equal(values(model), twin.values())
        loss = model(batch(0)).square().mean()
    assert error_of(loss.backward).startswith(message)
    loss = model(batch(0)).square().mean()
    with summon(model):
        assert error_of(loss.backward).startswith(message)
    assert all(param.grad is None for param in model.parameters())
    assert_at_rest(model, str(mode))
    for step in range(2):
        twin.train(step)


@on_ranks(2)
def test_a_flat_parameter_and_its_attributes_are_frozen_together() -> None:
    """Users freeze one of them, and summoned parameters follow as well."""
    model = build(Mode(FULL_SHARD, False))
    layer = model.layers[0]
    for by_attributes, wanted in itertools.product((False, True), (False, True)):
        for param in (layer.weight, layer.bias) if by_attributes else (layer._flat_param,):
            param.requires_grad_(wanted)
        for _ in range(2):
            with summon(model):
                assert layer.weight.requires_grad is wanted and layer.bias.requires_grad is wanted
                assert model.layers[1].weight.requires_grad
            model(batch(0)).sum().backward()
            assert (layer._flat_param.grad is not None) is wanted
            assert layer.weight.requires_grad is layer._flat_param.requires_grad is wanted
            model.zero_grad()
    for wanted in (False, True):
        with summon(model, writeback=False):
            layer.requires_grad_(wanted)
        assert layer._flat_param.requires_grad is wanted
    layer = build(Mode(FULL_SHARD, True)).layers[0]
    with summon(layer):  # a frozen parameter in the place of a trained one
        layer.module.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    assert layer.bias.requires_grad and not layer.weight.requires_grad


# -- unit by unit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "mode"), modes(False))
@on_ranks("world_size")
def test_full_params_yields_one_unit_at_a_time(world_size: int, mode: Mode) -> None:
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    twin.train(0)
    expected = twin.values()
    shown = {}
    for name, param in fsdp.full_params(nn.Sequential(model)):
        assert type(param) is nn.Parameter
        shown[name.removeprefix("0.")] = param.detach().clone()
        running = [
            u for u in FullyShardedDataParallel.fsdp_modules(model) if u.training_state is not TrainingState.IDLE
        ]
        assert len(running) == 1
        if mode.strategy is not NO_SHARD and dist.get_world_size() > 1:
            with torch.no_grad():
                param.zero_()  # not written back
    assert_bit_equal(shown, expected)
    assert_at_rest(model, str(mode))
    for name, param in fsdp.full_params(model, writeback=True):
        with torch.no_grad():
            param.mul_(len(name))
    changed = {name: value * len(name) for name, value in expected.items()}
    assert_bit_equal(full_parameters(model), changed)
    for _ in fsdp.full_params(model):
        break  # the generator is closed at once
    assert_at_rest(model, str(mode))
    for param, value in zip(plain.parameters(), changed.values(), strict=True):
        param.data.copy_(value)
    twin.train(1)
    assert list(fsdp.full_params(nn.Linear(2, 2))) == []


COUNT, BIG = 6, 511


@needs_meter
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_full_params_holds_memory_of_one_unit(use_orig_params: bool) -> None:
    """Beside the shards; `summon_full_params` holds the whole model."""
    meter = Meter()
    unit = (BIG + 1) * BIG * 4
    peaks: list[int] = []
    for _ in range(2):  # the first time fills caches
        module = nn.Sequential(*(nn.Linear(BIG, BIG) for _ in range(COUNT)))
        model = build(Mode(FULL_SHARD, use_orig_params), module)
        del module
        model.check_is_root()
        base = meter.baseline()
        peaks = [meter.beyond(base, unit + 4 * NOISE) for _ in fsdp.full_params(model, writeback=True)]
        peaks.append(meter.beyond(base, 4 * NOISE))
        with summon(model):
            peaks.append(meter.beyond(base, COUNT * unit + 4 * NOISE))
        peaks.append(meter.beyond(base, 4 * NOISE))
    expected = [*(2 * COUNT) * [unit], 0, COUNT * unit, 0]
    assert all(abs(a - b) < 4 * NOISE for a, b in zip(peaks, expected, strict=True)), (peaks, expected)
