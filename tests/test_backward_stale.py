"""No pass uses a copy of parameters from before a change or a replacement."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.runtime.unit import Unit
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import (
    STEP,
    Data,
    Reference,
    assert_at_rest,
)
from tests.harness.meter import Meter, meter_available
from tests.harness.models import MlpBlock
from tests.harness.passes import (
    FULL,
    GRAD_OP,
    MODES,
    NONE,
    WIDTH,
    Mlp,
    by_turns,
    clear,
    describe,
    environment,
    loss_of,
    seeded,
    wrapped,
)
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_parameters, wrap

# -- stale copies ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_debug_mode_refuses_reads_of_resharded_weights() -> None:
    def refuses(weight: Tensor) -> None:
        for read in (Tensor.isnan, lambda weight: weight @ torch.ones(13)):
            with pytest.raises(RuntimeError, match=r"parameter 'linear\.weight' of unit 'blocks\.1' is sharded"):
                read(weight)

    with environment(FSDP_DEBUG="1"):
        for strategy, orig in MODES:
            if strategy is NONE:
                continue
            model = wrapped(seeded(Mlp), (strategy, orig), MlpBlock)
            kept: list[Tensor] = []
            block = model.blocks[1].module
            block.register_forward_hook(lambda module, args, output: kept.append(module.linear.weight))  # noqa: B023
            loss = loss_of(model, torch.randn(3, WIDTH))
            weight = kept[0]
            assert weight.shape == (11, 13)
            if strategy is FULL:
                refuses(weight)
            else:
                assert not weight.isnan().any()
            loss.backward()
            refuses(weight)
            with torch.no_grad():
                model(torch.randn(3, WIDTH))
            assert kept[1] is weight
            refuses(weight)


@on_ranks(2)
def test_unshard_and_reshard_are_idempotent() -> None:
    """A second call runs no collective, in any order of calls."""
    for strategy, orig in MODES:
        model = wrapped(seeded(Mlp), (strategy, orig), MlpBlock)
        loss_of(model, torch.randn(3, WIDTH)).backward()
        unit: Unit = model.blocks[1]._fsdp_unit
        context = unit.context
        assert context is not None
        full = seeded(Mlp)().blocks[1].linear.weight
        with record_collectives() as log:
            context.unsharder.reshard(unit)
            context.unsharder.reshard(unit)
            assert log.count("all_gather") == 0
            for _ in range(2):
                context.unsharder.unshard(unit, refill=False)
                assert torch.equal(model.blocks[1].module.linear.weight, full)
            assert log.count("all_gather") == (0 if strategy is NONE else 1)
            context.unsharder.reshard(unit)
            context.unsharder.reshard(unit)
            context.unsharder.unshard(unit, refill=True)
            assert torch.equal(model.blocks[1].module.linear.weight, full)
            context.unsharder.reshard(unit)
            assert log.count("all_gather") == (0 if strategy is NONE else 2)
        assert_at_rest(model, describe((strategy, orig)))


Params = list[nn.Parameter]


def _step(params: Params, factor: float) -> None:
    for p in params:
        p.grad = p.detach() * (1 - factor)  # exact, as is the step
    torch.optim.SGD(params, lr=1.0).step()
    for p in params:
        p.grad = None


@torch.no_grad()
def _scale_in_place(params: Params, factor: float) -> None:
    for p in params:
        p.mul_(factor)


def _scale_data(params: Params, factor: float) -> None:
    for p in params:
        p.data.mul_(factor)


@torch.no_grad()
def _copy(params: Params, factor: float) -> None:
    for p in params:
        p.copy_(p * factor)


def _assign_data(params: Params, factor: float) -> None:
    for p in params:
        p.data = p.data * factor


@torch.no_grad()
def _foreach(params: Params, factor: float) -> None:
    torch._foreach_mul_(params, factor)


WRITES = (_step, _scale_in_place, _scale_data, _copy, _foreach)
BEFORE = ("no_grad", "inference_mode", "grad, no backward", "eval", "backward")


def _stale_reads(wrap_model: Callable[[nn.Module], nn.Module], writes: Sequence[Callable[..., None]]) -> set[str]:
    """Return the forwards that did not use the parameters written to the shards before."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    plain, model = seeded(Mlp)(), wrap_model(seeded(Mlp)())
    with torch.no_grad():  # `test_training_after_inference_mode` begins with inference mode
        model(x)
    wrong = set()
    for write, before, factor in itertools.product(writes, BEFORE, (0.5, 4.0, 0.5)):
        for each in (plain, model):
            each.train(before != "eval")
            if before == "inference_mode":
                with torch.inference_mode():
                    each(x)
            elif before == "backward":
                each(x).sum().backward()
            else:
                with torch.set_grad_enabled(before.startswith("grad")):
                    each(x)
        held = [list(each.parameters()) for each in (plain, model)]
        for params in held:
            write(params, factor)
        with torch.set_grad_enabled(factor == 0.5):
            output = model(x)
            if not torch.equal(output, plain(x)):
                wrong.add(f"{write.__name__} after {before}, grad {torch.is_grad_enabled()}")
        del output
        for each in held:
            for p in each:
                p.grad = None
    return wrong


@on_ranks(2)
def test_forward_uses_parameters_written_since_the_last_forward() -> None:
    """Written by an optimizer, in place, by `copy_`, by `.data`, after forwards of every kind."""
    for mode in MODES:
        wrong = _stale_reads(
            lambda module: wrap(module, *mode, wrap_policy=ModuleWrapPolicy({MlpBlock})),  # noqa: B023
            (*WRITES, _assign_data)[mode in by_turns(0) :: 2],
        )
        assert not wrong, f"{describe(mode)}: {sorted(wrong)}"


def _stale_copies_of_torch() -> list[set[str]]:
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

    warnings.simplefilter("ignore")
    return [
        _stale_reads(
            lambda module: TorchFSDP(
                module,
                auto_wrap_policy=TorchPolicy({MlpBlock}),
                sharding_strategy=strategy,  # noqa: B023
                device_id=torch.device("cpu"),
                use_orig_params=True,
            ),
            (_scale_in_place,),
        )
        for strategy in (TorchStrategy.FULL_SHARD, TorchStrategy.SHARD_GRAD_OP)
    ]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the defect is known of this version of torch")
def test_check_for_stale_copies_finds_those_of_torch() -> None:
    """Torch's FSDP1 keeps its root gathered after a forward without gradients, and SHARD_GRAD_OP every unit."""
    for wrong in run_ranks(2, _stale_copies_of_torch)[0]:
        assert {"_scale_in_place after no_grad, grad True", "_scale_in_place after eval, grad False"} <= wrong, wrong


@on_ranks(2)
def test_autocast_uses_parameters_written_since_the_last_forward() -> None:
    """One block of autocast spans several forwards, and keeps a cast of each weight."""
    x = torch.randn(3, WIDTH)
    for mode, grads in itertools.product(MODES, (True, False)):
        if mode[0] is NONE:
            continue  # autocast keeps casts of these parameters as of a plain model's
        plain, model = seeded(Mlp)(), wrapped(seeded(Mlp), mode, MlpBlock)
        held = list(model.parameters())
        outputs = []
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(grads):
            for _ in range(3):
                outputs.append(model(x))
                _scale_in_place(held, 0.5)
        for index, output in enumerate(outputs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(output, plain(x)), f"forward {index}, gradients {grads}, {describe(mode)}"
            _scale_in_place(list(plain.parameters()), 0.5)


@pytest.mark.skipif(not meter_available(), reason="needs glibc's mallinfo2")
@on_ranks(2)
def test_autocast_keeps_no_cast_of_a_resharded_unit() -> None:
    """Autocast would keep a cast of each weight until the block ends."""
    width, count, meter = 500, 6, Meter()
    unit, cast = 4 * width * width, 2 * width * width  # float32, bfloat16
    x = torch.randn(2, width)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    for orig in (True, False):
        blocks = seeded(lambda: nn.Sequential(*(MlpBlock(width, width) for _ in range(count))))
        model = wrapped(blocks, (FULL, orig), MlpBlock)
        seen: list[int] = []
        model[-1].module.register_forward_hook(lambda *args: seen.append(meter.live()))  # noqa: B023
        for _ in range(2):  # the first pass fills caches and records the order of the units
            with autocast():
                loss_of(model, x).backward()
                clear(model)
                with torch.no_grad():
                    model(x)
        base = meter.at_rest()
        with autocast():
            with torch.no_grad():
                model(x)
            held = {"in the last unit's forward": seen[-1] - base - 2 * unit, "after it": meter.at_rest() - base}
            loss_of(model, x).backward()
            clear(model)
            held["after a backward"] = meter.at_rest() - base
        assert all(nbytes < 1.5 * cast for nbytes in held.values()), f"use_orig_params={orig}: {held}, a cast is {cast}"


def _inference_first(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    with torch.inference_mode():
        first = model(x)
    for _ in range(3):
        loss_of(model, x).backward()
        yield {"x": x.grad, "first": first}
        with torch.inference_mode():
            model.eval()
            first = model(x)
            model.train()
        yield STEP


@on_ranks(2)
def test_training_after_inference_mode() -> None:
    """Gradients equal the plain model's, and parameters of a model wrapped in inference mode are ordinary ones."""
    reference = Reference(seeded(Mlp), _inference_first)
    for mode in MODES:
        reference.check(wrapped(seeded(Mlp), mode, MlpBlock), f"then trained, {describe(mode)}")
        with torch.inference_mode():
            model = wrapped(seeded(Mlp), mode, MlpBlock)
            params = list(seeded(Mlp)().parameters())
        assert not any(p.is_inference() for p in model.parameters()) and params[0].is_inference()
        reference.check(model, f"made in inference mode, {describe(mode)}")


# -- parameters that users replace -------------------------------------------------------------------------------


def _block(model: nn.Module) -> Any:
    """Return the unwrapped block in the middle."""
    block = model.blocks[1]
    return block.module if isinstance(block, FullyShardedDataParallel) else block


@on_ranks(2)
def test_replaced_parameters_are_written_back() -> None:
    """The object or its data replaced, with the shape that it has between steps."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for strategy in (FULL, GRAD_OP, NONE):
        plain, model = seeded(Mlp)(), wrapped(seeded(Mlp), (strategy, True), MlpBlock)
        block = _block(model)
        original = block.linear.weight
        # a new object, which is the parameter from now on
        block.linear.weight = replacing = nn.Parameter(original.detach() * 0.5)
        block.linear.bias.data = block.linear.bias.data * 0.25  # new memory of the same object
        model.embed.weight.data = model.embed.weight.data * 2.0
        model.embed.bias = nn.Parameter(model.embed.bias.detach() * 2.0)
        with torch.no_grad():
            _block(plain).linear.weight.mul_(0.5)
            _block(plain).linear.bias.mul_(0.25)
            plain.embed.weight.mul_(2.0)
            plain.embed.bias.mul_(2.0)
            assert torch.equal(model(x), plain(x)), strategy
        original, before = block.linear.weight, original
        assert original is replacing and before.data_ptr() != original.data_ptr()  # as in the plain module
        for name, full in full_parameters(model).items():
            assert torch.equal(full, dict(plain.named_parameters())[name]), (name, strategy)
        with torch.no_grad():
            before.zero_()
            original.mul_(4.0)  # the registered object is trained
            _block(plain).linear.weight.mul_(4.0)
            assert torch.equal(model(x), plain(x)), strategy
        # another shape: refused before the forward begins, and right once undone
        for bad in (torch.zeros(5), torch.zeros(2, 3)):
            block.linear.weight = nn.Parameter(bad)
            with pytest.raises(RuntimeError, match=r"Cannot writeback 'linear.weight'.*shape"):
                model(x)
            block.linear.weight = original
        # a registration of None is left alone, and the module runs without a bias
        block.linear.bias = None
        with torch.no_grad():
            model(x)
        loss_of(model, x).backward()
        assert_at_rest(model, str(strategy))


@on_ranks(2)
def test_replaced_data_of_a_flat_parameter_is_written_back() -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for strategy in (FULL, GRAD_OP, NONE):
        plain, model = seeded(Mlp)(), wrapped(seeded(Mlp), (strategy, False), MlpBlock)
        for param in model.parameters():
            param.data = param.data * 0.5
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
            assert torch.equal(model(x), plain(x)), strategy
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(2.0)
            assert torch.equal(model(x), plain(x)), strategy
        flat = model.blocks[1]._flat_param
        kept = flat.data
        for bad in (torch.zeros(len(kept) + 1), kept.double()):
            flat.data = bad
            with pytest.raises(RuntimeError, match="Cannot writeback"):
                model(x)
        flat.data = kept
        loss_of(model, x).backward()
        assert flat.grad is not None and flat.grad.shape == kept.shape


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@on_ranks(2)
def test_replacing_one_registration_of_a_shared_parameter_is_refused() -> None:
    x = torch.randn(3, WIDTH)
    for strategy in (FULL, GRAD_OP, NONE):
        model = wrap(seeded(Tied)(), strategy, True)
        shared = model.first.weight
        assert model.second.weight is shared
        model.second.weight = nn.Parameter(shared.detach().clone())
        with pytest.raises(NotImplementedError, match=r"Cannot writeback 'second.weight'.*shared"):
            model(x)
        model.second.weight = shared
        shared.data = shared.data * 0.5  # new data for both registrations is allowed
        plain = seeded(Tied)()
        with torch.no_grad():
            plain.first.weight.mul_(0.5)
            assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_check_for_replaced_parameters_can_be_skipped() -> None:
    with environment(FSDP_SKIP_WRITEBACK_CHECK="1"):
        model = wrapped(seeded(Mlp), (FULL, True), MlpBlock)
    plain, x = seeded(Mlp)(), torch.randn(3, WIDTH)
    _block(model).linear.weight = nn.Parameter(torch.zeros(5))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
