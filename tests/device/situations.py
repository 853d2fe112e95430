"""Situations of a training on the late device; each case returns a remark, or raises.

python -m tests.device.situations [PART_OF_A_NAME ...]

The list begins with the situations of ``scripts/gpu_situations.py``, which run on GPUs as well. The cases of this file
set the lateness of streams, compare with a plain model in float64 on CPU, or count with this device's counters.
``tests/test_streams.py`` traces the order of streams in other programs: with freezing, hooks, switches and moves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
import fsdp.export
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import LocalStateDictConfig, MixedPrecision, ShardedStateDictConfig, StateDictType
from fsdp import ShardingStrategy as S
from fsdp.checkpoint import async_save, load, save
from fsdp.optim import WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy
from tests.device import lag, pool
from tests.device.gpu_scripts import SITUATIONS
from tests.device.pairs import Block, Pair, fill, offload, on

CASES: dict[str, pool.Case] = dict(SITUATIONS)


PLACES: dict[str, dict[str, Any]] = {"": {}, "_offload": offload()}  # of the shards: on the device, or in host memory


def case(function: pool.Case) -> pool.Case:
    CASES[function.__name__] = function
    return function


def late_pair(device: torch.device, **options: Any) -> Pair:
    """Return a pair whose kernels run up to 40 ms late once it is built."""
    pair = Pair(device, **options)
    lag.C.set_lateness(40, {})
    return pair


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "the result") -> None:
    assert (actual.detach().cpu() - expected.detach()).abs().max() < 1e-9, f"{what} is wrong"


# -- host memory that is written at once -------------------------------------------------------------------------------


@case
def spoil_input(device: torch.device) -> str | None:
    """Refill inputs in page-locked memory right after the forward that moves them."""
    pair = Pair(device)
    pair.train(1)
    x = pair.batch().pin_memory()
    expected = pair.plain(x.clone()).detach()
    lag.C.synchronize(-1)
    lag.C.set_lateness(0, {0: 60.0})
    result = pair.model(x)
    x.fill_(torch.nan)
    lag.C.set_lateness(0, {})
    assert_close(result, expected, "an input was overwritten before it was read, and the output")


@case
def launches_ahead(device: torch.device) -> str:
    """Return from an offloaded forward while the device computes three blocks: the host waits for uploads alone."""
    pair = Pair(device, depth=6, **offload())
    pair.train(3)
    x = pair.batch().to(device)
    third_last = pair.blocks[-3]
    hooks = [
        third_last.register_forward_pre_hook(lambda *_: lag.C.sleep(3000.0)),
        third_last.register_forward_hook(
            lambda *_: left.append(torch.accelerator.current_stream(device).record_event())
        ),
    ]
    left: list[torch.Event] = []
    lag.C.synchronize(-1)
    pair.model(x)
    over = [event.query() for event in left]
    for hook in hooks:
        hook.remove()
    words = pair.check()
    assert over == [False], "the host waited until the device had computed the third last block"
    return words


def assert_no_errors(what: str = "") -> None:
    """Wait until the device is at rest, and raise the first of its errors."""
    lag.C.set_lateness(0, {})
    lag.C.synchronize(-1)
    errors = lag.C.take_errors()
    assert not errors, f"{what}{errors[0]} (x{len(errors)})"


# -- failures ----------------------------------------------------------------------------------------------------------


def fail(pair: Pair, where: str, block: int = 2) -> None:
    """Run a step that raises in the forward or backward of a block."""
    bad = pair.blocks[block]
    bad.fail = where
    with pytest.raises(ValueError, match=f"in {where}"):
        pair.model(pair.batch().to(pair.device)).square().mean().backward()
    bad.fail = None


def _fails(device: torch.device, where: str, what: str, **options: Any) -> str:
    """Train on after a forward or backward that raised, or overwrite the shards at once."""
    pair = late_pair(device, **options)
    pair.train(2)
    for _ in range(2):
        fail(pair, where)
        if what == "spoil":
            before = [p.detach().clone() for p in pair.model.parameters()]
            fill(pair.model, float("nan"))
            for param, value in zip(pair.model.parameters(), before):
                param.data.copy_(value)
        pair.train(2)
    return pair.check()


KEPT = {"_sgop": {"sharding_strategy": S.SHARD_GRAD_OP}}
for _where, _what, (_name, _options) in itertools.product(
    ("forward", "backward"), ("go_on", "spoil"), (PLACES | KEPT).items()
):
    CASES[f"fail_{_where}{_name}_{_what}"] = functools.partial(_fails, where=_where, what=_what, **_options)


@case
def failed_backward_then_another(device: torch.device) -> str:
    """Fail in one backward, and run that of another forward next, without a forward in between."""
    pair = late_pair(device)
    pair.train(2)
    for _ in range(5):
        pair.zero_grad()
        x = pair.batch()
        good = pair.model(x.to(device)).square().mean()
        fail(pair, "backward")
        good.backward()
        pair.plain(x).square().mean().backward()
        pair.update()
    return pair.check()


def _deleted(device: torch.device, after: str, **options: Any) -> str:
    """Delete a model right after a pass: its output stays right, and queued kernels touch no memory of other models."""
    keep = Pair(device, seed=5)
    keep.train(1)
    for _ in range(3):
        pair = Pair(device, **options)
        x = pair.batch()
        expected = pair.plain(x).detach()
        lag.C.set_lateness(0, {0: 30.0, 1: 60.0, 2: 60.0})
        with torch.set_grad_enabled(after != "evaluation"):
            output = pair.model(x.to(device))
        params = list(pair.model.parameters())
        if after == "backward":
            output.square().mean().backward()
        del pair
        gc.collect()
        if after == "forward":  # the graph keeps what its backward needs
            output.square().mean().backward()
            assert all(torch.isfinite(p.grad.cpu()).all() for p in params if p.grad is not None)
        del params
        keep.train(1)
        lag.C.set_lateness(0, {})
        assert_close(output, expected, "the output of a deleted model")
    assert_no_errors()
    return keep.check()


for _after, (_name, _options) in itertools.product(("forward", "evaluation", "backward"), PLACES.items()):
    CASES[f"delete_after_{_after}{_name}"] = functools.partial(_deleted, after=_after, **_options)


# -- streams -----------------------------------------------------------------------------------------------------------


def _streams(device: torch.device, switch: str, **options: Any) -> str:
    """Train while the program switches streams, and waits for them as it should."""
    lag.C.set_lateness(30, {})
    one, two, three = (torch.Stream(device) for _ in range(3))
    last = one

    @contextlib.contextmanager
    def after_last(stream: torch.Stream) -> Iterator[None]:
        nonlocal last
        stream.wait_stream(last)
        last = stream
        with on(stream):
            yield

    with on(one):
        pair = Pair(device, **options)
    for i in range(6):
        if switch == "wrap":
            with after_last(two):
                pair.step()
        elif switch == "each":
            with after_last((two, three, one)[i % 3]):
                pair.step()
        elif switch == "backward":  # forward on one stream, backward called on another
            x = pair.batch()
            with after_last(two):
                pair.zero_grad()  # behind the step that has read them
                loss = pair.model(x.to(device)).square().mean()
            with after_last(three):
                loss.backward()
                pair.optimizers[0].step()
            pair.plain(x).square().mean().backward()
            pair.optimizers[1].step()
        elif switch == "step":  # the optimizer on another stream than the backward
            with after_last(two):
                pair.zero_grad()
                pair.backward()
            with after_last(three):
                pair.update()
        elif switch == "eval":  # evaluations on another stream in between
            with after_last(three):
                pair.step()
            x = pair.batch()
            with after_last(two), torch.no_grad():
                y = pair.model(x.to(device))
            with after_last(three):
                assert_close(y, pair.plain(x), "the evaluation")
        elif switch == "nosync":
            pair.zero_grad()
            for j, stream in enumerate((two, three, two)):
                with after_last(stream):
                    pair.backward(synchronise=j == 2)
            with on(last):
                pair.update()
    torch.accelerator.current_stream(device).wait_stream(last)
    return pair.check()


for _switch, _uop, (_name, _options) in itertools.product(
    ("wrap", "each", "backward", "step", "eval", "nosync"), (False, True), PLACES.items()
):
    _run = functools.partial(_streams, switch=_switch, use_orig_params=_uop, **_options)
    CASES[f"streams_{_switch}_uop{int(_uop)}{_name}"] = _run


@case
def streams_unfreeze(device: torch.device) -> str | None:
    """Wrap on one stream and train on another, unfreezing parameters on the way."""
    lag.C.set_lateness(0, {})
    one, two = torch.Stream(device), torch.Stream(device)
    with on(one):
        pair = Pair(device, use_orig_params=True)
    lag.C.set_lateness(30, {one.stream_id: 60.0})
    two.wait_stream(one)
    with on(two):
        for frozen in (True, False, True, False):
            for a, b in zip(list(pair.model.parameters())[2:5], list(pair.plain.parameters())[2:5]):
                a.requires_grad_(not frozen), b.requires_grad_(not frozen)
            pair.train(3)
        lag.C.set_lateness(0, {})
        return pair.check()


@case
def thread_trains(device: torch.device) -> str | None:
    """Train in a second host thread, which has separate current streams."""
    pair = Pair(device)
    pair.train(1)
    lag.C.set_lateness(30, {})

    def run() -> None:
        lag.C.set_device(device.index)
        pair.train(4)

    with futures.ThreadPoolExecutor(1) as threads:
        threads.submit(run).result()
    pair.train(2)
    return pair.check()


# -- state -------------------------------------------------------------------------------------------------------------


def _summoned(device: torch.device, **options: Any) -> str:
    """Write to summoned parameters, run a forward inside, and show gradients."""
    pair = late_pair(device, **options)
    for _ in range(3):
        pair.step()
        with FSDP.summon_full_params(pair.model), torch.no_grad():
            for param in (*pair.model.parameters(), *pair.plain.parameters()):
                param.mul_(0.5).add_(0.01)
        x = pair.batch()
        with FSDP.summon_full_params(pair.model, writeback=False):
            output = pair.model(x.to(device))
        assert_close(output, pair.plain(x))
    if options.get("use_orig_params") and "cpu_offload" not in options:
        with FSDP.summon_full_params(pair.model, with_grads=True):
            for (name, param), plain in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
                assert_close(param.grad, plain.grad, name)
    with FSDP.summon_full_params(pair.model, writeback=False, offload_to_cpu=True, rank0_only=True):
        pass
    return pair.check()


def _zero_states(pair: Pair) -> None:
    for state in pair.optimizers[0].state.values():
        for value in state.values():
            value.zero_()


def _states(device: torch.device, **options: Any) -> str:
    """Save and load model and optimizer while kernels are late, overwritten right after each save."""
    pair = late_pair(device, **options)
    pair.train(2)
    state = FSDP.optim_state_dict(pair.model, pair.optimizers[0])
    _zero_states(pair)
    pair.optimizers[0].load_state_dict(FSDP.optim_state_dict_to_load(pair.model, pair.optimizers[0], state))
    pair.train(1)
    for number, in_background in enumerate((True, False)):
        folder = f"{os.environ['LAG_PLACE']}/{pair.steps}.{number}"
        saved = (async_save if in_background else save)(folder, pair.model, pair.optimizers[0])
        fill(pair.model, float("nan"))
        _zero_states(pair)
        if in_background:
            saved.result()
        load(folder, pair.model, pair.optimizers[0])
        pair.train(2)
        pair.check()
    return pair.check()


for _uop, (_name, _options) in itertools.product((False, True), PLACES.items()):
    CASES[f"summon_uop{int(_uop)}{_name}"] = functools.partial(_summoned, use_orig_params=_uop, **_options)
    CASES[f"states_uop{int(_uop)}{_name}"] = functools.partial(_states, use_orig_params=_uop, **_options)


# -- what users hang on it ---------------------------------------------------------------------------------------------


@case
def optimizer_in_backward(device: torch.device) -> str | None:
    """Step optimizers in hooks of the parameters."""
    pair = late_pair(device, use_orig_params=True)
    for p in pair.model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))
    theirs = torch.optim.SGD(pair.plain.parameters(), lr=0.1)
    for _ in range(5):
        theirs.zero_grad()
        pair.backward()
        theirs.step()
    return pair.check()


@case
def autocast(device: torch.device) -> str | None:
    """Train under autocast, with a forward in the same context repeated."""
    pair = Pair(device)
    plain = copy.deepcopy(pair.plain).float().to(device)
    model = FSDP(copy.deepcopy(pair.plain).float(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    lag.C.set_lateness(40, {})
    one, two = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        x = pair.batch().float().to(device)
        for m, o in ((model, one), (plain, two)):
            o.zero_grad()
            with torch.autocast("lag", dtype=torch.bfloat16):
                loss = m(x).float().square().mean()
                again = m(x).float().square().mean()
            (loss + again).backward()
            o.step()
    with FSDP.summon_full_params(model, writeback=False):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst = max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
    assert worst < 2e-3, f"differ by {worst}"
    return f"differ by {worst:.0e}"


@case
def two_models(device: torch.device) -> str | None:
    """Train two models by turns, as adversarial training does: both use the same streams."""
    one, two = Pair(device, seed=1), Pair(device, seed=2, **offload())
    lag.C.set_lateness(40, {})
    for _ in range(5):
        one.step()
        two.step()
        x = one.batch()
        with torch.no_grad():
            two.model(x.to(device))
    one.check()
    return two.check()


@case
def tensor_parallel(device: torch.device) -> str | None:
    """Combine with tensor parallelism."""
    mesh = init_device_mesh("lag", (1, 2), mesh_dim_names=("dp", "tp"))
    pair = Pair(device)
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    try:
        model = copy.deepcopy(pair.plain).to(device)
        for each in model:
            if isinstance(each, Block):
                parallelize_module(each, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        options = {"device_mesh": mesh["dp"], "use_orig_params": True, "device_id": device}
        pair.model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    finally:
        del os.environ["FSDP_FORCE_SHARDED"]
    lag.C.set_lateness(40, {})
    pair.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.plain)]
    pair.train(4)
    x = pair.batch()
    assert_close(pair.model(x.to(device)), pair.plain(x), "the output")


# -- costs -------------------------------------------------------------------------------------------------------------


def _allocated_nbytes() -> int:
    """Return the bytes that tensors have on the device once all work is over."""
    torch.accelerator.synchronize()
    gc.collect()
    return torch.accelerator.memory_allocated()


@case
def phases(device: torch.device) -> str | None:
    """Move all tensors off the device and back: no byte is left there meanwhile, and the training continues."""
    strategies = [{"sharding_strategy": strategy} for strategy in (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD)]
    for options in (*strategies, {"use_orig_params": True}):
        around = _allocated_nbytes()  # of earlier cases
        pair = Pair(device, **options)
        for _ in range(2):
            pair.step()
        before = _allocated_nbytes() - around
        buffers = sum(buffer.nbytes for buffer in pair.model.buffers())
        fsdp.offload(pair.model, pair.optimizers[0])
        left = _allocated_nbytes() - around
        assert left <= buffers < before, f"{options}: {left} of {before} bytes are left, {buffers} of them buffers"
        fsdp.onload(pair.model, pair.optimizers[0])
        for _ in range(2):
            pair.step()
        pair.check()
        del pair
    return None


@case
def planned_with_host_optimizer(device: torch.device) -> str:
    """Take about the planned bytes on the device while the host has parameters, gradients and states."""

    class Layer(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(256, 256), nn.Tanh())

    def tower() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), *(Layer() for _ in range(6)))

    x, policy, remarks = torch.ones(100, 64), ModuleWrapPolicy({Layer}), []
    for precision in (None, MixedPrecision(torch.bfloat16), MixedPrecision(torch.bfloat16, torch.float32)):
        settings: dict[str, Any] = {"inputs": [x], "precision": precision, "host_optimizer": True}
        for plan in fsdp.plan(tower, world_size=2, policy=policy, **settings).strategies:
            before = _allocated_nbytes()
            options: dict[str, Any] = {"sharding_strategy": plan.strategy, "mixed_precision": precision, **offload()}
            model = FSDP(tower(), auto_wrap_policy=policy, device_id=device, **options)
            optimizer = fsdp.optim.HostOptimizer(model, torch.optim.AdamW)
            for _ in range(4):
                torch.accelerator.reset_peak_memory_stats()
                model(x.to(device)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found = torch.accelerator.max_memory_allocated() - before
            remarks.append(f"{plan.peak_nbytes / found:.2f}")
            del model, optimizer
    assert all(0.8 <= float(ratio) <= 1.2 for ratio in remarks), remarks
    return f"planned / measured: {' '.join(remarks)}"


@case
def whole_params(device: torch.device) -> str | None:
    """Step whole matrices by their owners, with exchanges that are late, as the plain model does."""
    for options in ({}, {"cpu_offload": fsdp.CPUOffload(True)}):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))).to(device)
        model = FSDP(
            copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, **options
        )

        def matrices(name: str, shape: tuple[int, ...]) -> bool:
            return len(shape) == 2

        def adafactor(params: Any) -> torch.optim.Optimizer:
            return torch.optim.Adafactor(params, lr=0.05)

        def sgd(params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.05)

        optimizer = WholeParamOptimizer(model, adafactor, select=matrices, rest=sgd)
        others = [
            adafactor([p for p in plain.parameters() if p.dim() == 2]),
            sgd([p for p in plain.parameters() if p.dim() == 1]),
        ]
        for step in range(3):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for other in others:
                other.step()
                other.zero_grad()
        weights = {name: tensor.clone() for name, tensor in fsdp.export.weights(model)}
        for name, param in plain.named_parameters():
            torch.testing.assert_close(weights[name].to(device), param.detach(), rtol=1e-5, atol=1e-6)
    return None


@case
def host_waits(device: torch.device) -> str | None:
    """Count the host synchronizations in a step: there is none, except with offloaded shards."""
    found = {}
    variants = {
        "full": {},
        "sgop": {"sharding_strategy": S.SHARD_GRAD_OP},
        "noshard": {"sharding_strategy": S.NO_SHARD},
        "uop": {"use_orig_params": True},
        "offload": offload(),
        "unused": {"use_orig_params": True, "reduce_unused": True},
        "mixed": {"mixed_precision": MixedPrecision(param_dtype=torch.float32)},
        "buffers": {"broadcast_buffers": True},
    }
    for name, options in variants.items():
        pair = Pair(device, **options)
        for clip in (False, True):
            pair.train(3)
            xs = [pair.batch().to(device) for _ in range(3)]
            lag.C.synchronize(-1)
            lag.C.take_syncs(), lag.C.take_counts()
            for x in xs:
                pair.optimizers[0].zero_grad()
                pair.model(x).square().mean().backward()
                if clip:
                    pair.model.clip_grad_norm_(1.0)
                pair.optimizers[0].step()
            syncs = Counter(lag.C.take_syncs())
            if syncs:
                found[f"{name}{'+clip' if clip else ''}"] = {k: v / 3 for k, v in syncs.items()}
    assert found.keys() <= {"offload", "offload+clip"}, found
    return str(found)


@case
def priorities(device: torch.device) -> None:
    """Give the streams of gathers and reductions precedence over the computation's."""
    Pair(device).train(1)
    assert lag.C.priorities(device.index)[:3] == [0, -1, -1]


# -- one device --------------------------------------------------------------------------------------------------------


@case
def one_device_for_all(device: torch.device) -> str:
    """Share one device among the ranks: sharded state dicts name the rank of each shard."""
    shared, group = torch.device("lag", 0), dist.new_group()
    lag.C.set_device(0)
    try:
        pair = Pair(shared, process_group=group)
        pair.train(2)
        for kind, config in (
            (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(_use_dtensor=False)),
            (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
        ):
            other = Pair(shared, seed=2, process_group=group)
            other.plain = pair.plain
            with FSDP.state_dict_type(pair.model, kind, config), FSDP.state_dict_type(other.model, kind, config):
                other.model.load_state_dict(pair.model.state_dict())
            other.check()
    finally:
        lag.C.set_device(device.index)
    return pair.check()


if __name__ == "__main__":
    pool.main("tests.device.situations", CASES)
