"""Memory, hooks and process groups from the first step to deletion, and training after interrupts.

Bytes are the allocator's. The garbage collector is off while they are measured, so reference cycles count as leaks.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, RaggedStateDictConfig, ShardingStrategy, StateDictType, checkpoint
from fsdp.comm.collectives import Communicator
from fsdp.runtime import unit as units
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient, new_group
from tests.harness.lockstep import assert_at_rest
from tests.harness.meter import NOISE, Meter, needs_meter
from tests.harness.models import ZOO, Unit
from tests.harness.oracle import adamw, assert_bit_equal, sgd
from tests.harness.pairs import by_turns
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, STRATEGIES


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- deletion ------------------------------------------------------------------------------------------------------

WIDTH = 300  # units of 362 kB


def build(strategy: ShardingStrategy, use_orig_params: bool) -> FullyShardedDataParallel:
    def forward(m: Any, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return m.second(torch.tanh(m.first(x)))

    units = [Unit(forward, first=nn.Linear(WIDTH, 151), second=nn.Linear(151, WIDTH)) for _ in range(3)]
    net = nn.Sequential(*units, nn.Linear(WIDTH, 200))
    return wrap(net, strategy, use_orig_params, wrap_policy=ModuleWrapPolicy({Unit}))


def train(model: nn.Module) -> None:
    optimizer = adamw(model.parameters())
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    with torch.inference_mode():
        model(torch.ones(1, WIDTH))


def accumulate(model: nn.Module) -> None:
    assert isinstance(model, FullyShardedDataParallel)
    with model.no_sync():
        model(torch.ones(1, WIDTH)).sum().backward()


def raise_in_forward(model: nn.Module) -> None:
    train(model)
    try:
        model(torch.full((1, WIDTH), float("nan")))
    except ValueError:
        return
    raise AssertionError("the block should have raised")


def raise_in_backward(model: nn.Module) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("enough")

    x = torch.ones(1, WIDTH, requires_grad=True)
    x.register_hook(fail)
    try:
        model(x).sum().backward()
    except ValueError:
        # autograd keeps the queue of a failed backward until the next one, for plain models too
        torch.ones(1, requires_grad=True).sum().backward()
        return
    raise AssertionError("the hook should have raised")


def save_and_load(model: nn.Module) -> None:
    """Save and load every kind of state with the optimizer's, and a checkpoint directory."""
    train(model)
    assert isinstance(model, FullyShardedDataParallel)
    optimizer = adamw(model.parameters())
    optimizer.step()
    sharded = StateDictType.SHARDED_STATE_DICT
    references = []
    for kind in ((StateDictType.FULL_STATE_DICT,), (sharded,), (sharded, RaggedStateDictConfig())):
        with warnings.catch_warnings(), FullyShardedDataParallel.state_dict_type(model, *kind):
            warnings.filterwarnings("ignore", "StateDictType.* which is not sharded", UserWarning)
            state, saved = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
            model.load_state_dict(state)
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
            references += [weakref.ref(value) for value in [*state.values(), *saved["state"]["3.weight"].values()]]
            del state, saved
    folder = [tempfile.mkdtemp()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(folder)
    checkpoint.save(folder[0], model, optimizer)
    checkpoint.load(folder[0], model, optimizer)
    if dist.get_world_size() > 1:
        dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    assert not any(value() is not None for value in references)
    gc.collect()  # torch's checkpoints leave cycles of local classes, without tensors


HISTORIES: dict[str, Callable[[nn.Module], Any]] = {
    "never used": lambda model: None,
    "trained": train,
    "one forward": lambda model: model(torch.ones(1, WIDTH)).sum(),
    "trained, then a forward": lambda model: (train(model), model(torch.ones(1, WIDTH)).sum()),
    "evaluated": evaluate,
    "accumulated": accumulate,
    "failed in forward": raise_in_forward,
    "failed in backward": raise_in_backward,
    "saved and loaded": save_and_load,
}


def memory_after_deletion(history: str, strategies: list[ShardingStrategy], use_orig_params: bool) -> list[str]:
    """Return descriptions of bytes that were not freed and of objects that are still referenced."""
    meter = Meter()
    problems = []
    with collector_off():
        for attempt, strategy in enumerate([strategies[0], *strategies]):  # the first one fills caches
            base = meter.baseline()
            model = build(strategy, use_orig_params)
            HISTORIES[history](model)
            held = meter.live() - base
            block = model.module[0]
            context = block._fsdp_unit.context
            holders = [] if context is None else list(context.passes._by_group.values())  # of lanes
            parts = (model, model.module, block, block._fsdp_unit, block._handle, model.params[0], *holders)
            references = [weakref.ref(part) for part in parts]
            del model, block, parts, context, holders
            remaining = meter.beyond(base, patience=1.0 if attempt else 0.02)
            if attempt:
                problems += [f"{strategy}: {type(x()).__name__} lives" for x in references if x() is not None]
                if remaining > NOISE or held < 4 * NOISE:
                    problems.append(f"{strategy}: {remaining:,} of {held:,} bytes are left")
    return problems


@needs_meter
@pytest.mark.parametrize(("history", "use_orig_params"), by_turns([*HISTORIES], [False, True]))
def test_deletion_frees_all_memory_without_collection(history: str, use_orig_params: bool) -> None:
    """After every history of a model."""
    turn = list(HISTORIES).index(history) // 2 % 2
    strategies = [STRATEGIES[use_orig_params], STRATEGIES[1 + turn]]
    assert run_ranks(2, memory_after_deletion, history, strategies, use_orig_params) == [[], []]
    if turn:
        assert run_ranks(1, memory_after_deletion, history, [NO_SHARD], use_orig_params) == [[]]


@needs_meter
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_backward_after_the_model_was_deleted(use_orig_params: bool) -> None:
    """Gradients arrive, and afterwards all memory is freed."""
    meter = Meter()
    problems = []
    for attempt in range(2):
        with collector_off():
            base = meter.baseline()
            model = build(FULL_SHARD, use_orig_params)
            parameters = list(model.parameters())
            x = torch.ones(1, WIDTH, requires_grad=True)
            loss = model(x).sum()
            del model
            loss.backward()
            if any(p.grad is None for p in parameters if p.numel()) or x.grad is None:
                problems.append("no gradient")
            del loss, parameters, x
            remaining = meter.beyond(base, patience=(0.02, 1.0)[attempt])
            if attempt == 1 and remaining > NOISE:
                problems.append(f"{remaining:,} bytes are left")
    assert problems == []


# -- long runs -----------------------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    descriptors = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    return descriptors, threading.active_count()


def build_two(strategy: ShardingStrategy, use_orig_params: bool) -> FullyShardedDataParallel:
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    return wrap(net, strategy, use_orig_params, wrap_policy=lambda module, recurse, **_: recurse or module is net[0])


LONG_RUNS = [(FULL_SHARD, False, "direct"), (SHARD_GRAD_OP, True, "auto")]


@needs_meter
@pytest.mark.parametrize(("strategy", "use_orig_params", "transport"), LONG_RUNS)
@on_ranks(2)
def test_memory_stays_flat_over_a_hundred_steps(
    strategy: ShardingStrategy, use_orig_params: bool, transport: str
) -> None:
    """Detects a few hundred bytes per step, or one reference cycle. Between passes the pools keep no private memory."""
    os.environ["FSDP_COLLECTIVES"] = transport
    meter = Meter()
    model = build_two(strategy, use_orig_params)
    unit: Any = model._fsdp_unit
    optimizer = sgd(model.parameters())
    x = torch.ones(2, 7)
    growth, base = [], 0

    def one_step(step: int) -> None:
        if step % 5 == 4:
            with model.no_sync():
                model(x).sum().backward()
        if step % 7 == 6:
            with torch.no_grad():
                model(x)
            assert not unit.context.unsharder.pool._free
        if step % 11 == 10:
            model(x)  # and no backward
        model(x).sum().backward()
        assert not unit.context.unsharder.pool._free and not unit.context.reductions.pool._free
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0)

    for step in range(20):  # fills caches of the allocator and of the backend
        one_step(step)
    before = resources()
    with collector_off():
        base = meter.baseline()
        for step in range(100):
            one_step(step)
            if step % 10 == 9:
                growth.append(meter.beyond(base))
        cycles = gc.collect()
    assert max(growth) < NOISE, growth
    assert cycles == 0, f"{cycles} objects in reference cycles"
    assert resources() == before, "file descriptors or threads"


# -- tensors that outlive a forward --------------------------------------------------------------------------------


def max_over_thirty_steps(step: Callable[[int], int]) -> int:
    """Return the largest result of the steps, whose memory must not grow from the tenth on."""
    meter, counted, growth, base = Meter(), [], [], 0
    with collector_off():
        for number in range(30):
            counted.append(step(number))
            if number == 9:
                base = meter.baseline()
            elif number > 9:
                growth.append(meter.beyond(base))
    assert max(growth) < NOISE, growth
    return max(counted)


@needs_meter
@pytest.mark.parametrize(("strategy", "use_orig_params"), by_turns(STRATEGIES, [False, True]))
@on_ranks(2)
def test_hooks_do_not_accumulate_on_a_reused_input(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """The input of every forward receives the plain model's gradient."""
    case = ZOO["mlp"]
    model, plain = wrap(case, strategy, use_orig_params), case.build()
    x = case.make_batch(0, 2).inputs[0].requires_grad_()
    y = x.detach().clone().requires_grad_()
    passed: list[bool] = []
    model.module.register_forward_pre_hook(lambda module, args: passed.append(args[0] is x))

    def step(number: int) -> int:
        if number % 2:
            model(x).sum().backward()
            plain(y).sum().backward()
        else:
            model(x)  # the graph is dropped
        model.zero_grad()
        return len(x._backward_hooks or ())

    assert max_over_thirty_steps(step) <= 1
    assert all(passed) and torch.equal(x.grad, y.grad)


# -- an interrupt while a collective is issued -------------------------------------------------------------------------


def adapted() -> Unit:
    """Build a frozen layer, whose output is stored, and a trained one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.stored = m.frozen(x)
        return x + m.trained(torch.tanh(m.stored))

    return Unit(forward, frozen=nn.Linear(4, 4).requires_grad_(False), trained=nn.Linear(4, 4))


def steps_of_both(plain: nn.Module, model: nn.Module) -> Callable[[int], None]:
    """Return a function that trains both models for one step, after which they must be equal."""
    optimizers = [sgd(trained.parameters()) for trained in (plain, model)]

    def step(number: int) -> None:
        for trained, optimizer in zip((plain, model), optimizers):
            trained(torch.full((2, 4), 0.1 * number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values()):
            assert torch.equal(value, expected), (number, name)

    return step


@contextmanager
def interrupted(kind: str, index: int, *, issued: bool) -> Iterator[list[Tensor]]:
    """Interrupt the collective of this kind and index, before or after it is ``issued``; yield its full vectors."""
    function, counter, held = getattr(Communicator, kind), itertools.count(), list[Tensor]()

    def interrupt(self: Communicator, first: Any, second: Any, *args: Any, **options: Any) -> Any:
        if next(counter) != index:
            return function(self, first, second, *args, **options)
        if issued:
            function(self, first, second, *args, **options)
        held.extend([second] if kind == "reduce" else [part.full for part in first])
        raise KeyboardInterrupt

    with mock.patch.object(Communicator, kind, interrupt), pytest.raises(KeyboardInterrupt):
        yield held


@pytest.mark.parametrize("transport", ["native", "shared"])
@on_ranks(2)
@impatient
def test_training_resumes_after_an_interrupt_in_a_collective(transport: str) -> None:
    os.environ["FSDP_COLLECTIVES"] = transport
    torch.manual_seed(0)
    plain = nn.Sequential(adapted(), adapted(), nn.Linear(4, 3))
    model = wrap(copy.deepcopy(plain), wrap_policy=ModuleWrapPolicy({Unit}), process_group=new_group())
    step = steps_of_both(plain, model)
    step(0)
    step(1)
    counter = [("gather", number) for number in range(5)] + [("reduce", number) for number in range(3)]
    for turn, (kind, number) in enumerate(counter):
        issued = turn % 2 == (transport == "native")  # with the other transport the other way round
        with interrupted(kind, number, issued=issued) as held:
            model(torch.ones(2, 4)).sum().backward()
        for full in held:  # the collective may still be in flight
            assert full.untyped_storage().nbytes() >= full.nbytes
        model.zero_grad()
        step(2 + number)
        for gradients in (gradients for unit in units.units_of(model) for gradients in unit.gradients):
            assert gradients._scratch is None or not gradients._scratch.flat.untyped_storage().nbytes()
    # saved tensors of earlier graphs are not gathered again
    x = torch.ones(2, 4, requires_grad=True)
    output, stored = model(x), model.module[0].stored
    with interrupted("gather", 1, issued=True):
        model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stored.sum().backward()
    with pytest.raises(RuntimeError, match="run the forward again"):
        output.sum().backward()
    step(9)


@on_ranks(2)
def test_a_backward_past_the_outputs_is_refused_after_a_cast_as_well() -> None:
    model = wrap(nn.Sequential(adapted(), nn.Linear(4, 3)), wrap_policy=ModuleWrapPolicy({Unit}))
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
        model.to(dtype)(x).sum().backward()
        model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model.module[0].stored.sum().backward()


# -- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared", "direct", "native"])
@on_ranks(2)
def test_destroyed_groups_are_freed_after_their_models(transport: str) -> None:
    """A group holds connections, and gloo's groups have busy threads."""
    os.environ["FSDP_COLLECTIVES"] = transport
    group = dist.new_group()
    model = wrap(ZOO["mlp"], process_group=group)
    model(torch.ones(2, 7)).sum().backward()
    model.state_dict()
    reference = weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group, model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_pickling_is_refused_and_training_goes_on(use_orig_params: bool) -> None:
    model = wrap(ZOO["mlp"], use_orig_params=use_orig_params)
    x = torch.ones(2, 7)
    model(x).sum().backward()
    with pytest.raises(TypeError) as caught:
        pickle.dumps(model)
    model.zero_grad()
    expected = wrap(ZOO["mlp"], use_orig_params=use_orig_params)
    for module in (model, expected):
        module(x).sum().backward()
    assert_bit_equal(full_gradients(model), full_gradients(expected))
    assert_at_rest(model, "after the refusal")
    words = str(caught.value)
    assert words.startswith("a FullyShardedDataParallel module cannot be pickled") and "state_dict()" in words


@on_ranks(2)
def test_a_unit_that_joins_another_tree_is_resharded_by_the_former_one() -> None:
    inner = wrap(nn.Linear(7, 3), SHARD_GRAD_OP, True, wrap_policy=None)
    inner(torch.ones(2, 7))  # leaves it gathered for a backward
    former = inner._fsdp_unit.context
    assert list(former.unsharder) == [inner._fsdp_unit]
    model = wrap(nn.Sequential(inner), SHARD_GRAD_OP, True, wrap_policy=None)
    model(torch.ones(2, 7)).sum().backward()
    assert inner._fsdp_unit.context is not former and not list(former.unsharder)
    assert_at_rest(model, "in the other tree")
