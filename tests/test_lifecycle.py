"""From the first step to deletion: nothing accumulates, nothing is left, and what was interrupted harms nobody.

Bytes are the allocator's. The garbage collector is off while they are measured: what needs it to be freed is not freed.
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
import time
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
from fsdp.flat.memory import MemoryPool, SharedPool
from fsdp.runtime import unit as units
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient, new_group
from tests.harness.lockstep import STEP, Data, Reference, assert_at_rest
from tests.harness.meter import NOISE, Meter, meter_available
from tests.harness.models import ZOO
from tests.harness.oracle import adamw, assert_bit_equal, sgd
from tests.harness.pairs import by_turns, pairwise
from tests.harness.pool import run_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_parameters, wrap

# torch notes its last 2000 native collectives, about 1 KiB each, which looks like a leak until they are there. Set
# before any rank starts: they inherit it.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
needs_meter = pytest.mark.skipif(not meter_available(), reason="no byte meter: needs glibc 2.33")


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def excess(meter: Meter, base: int, patience: float = 1.0) -> int:
    """Bytes beyond `base`, once they are within the noise or for good: a thread of the backend lets go of its last call
    a moment after that is over."""
    deadline = time.monotonic() + patience
    while meter.resting() - base > NOISE and time.monotonic() < deadline:
        time.sleep(0.002)
    return meter.live() - base


# -- deletion ------------------------------------------------------------------------------------------------------

WIDTH = 300  # units of 362 kB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 151), nn.Linear(151, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def build(strategy: ShardingStrategy, use_orig_params: bool) -> FullyShardedDataParallel:
    return wrap(Net(), strategy, use_orig_params, wrap_policy=ModuleWrapPolicy({Block}))


def do_nothing(model: nn.Module) -> None:
    pass


def train(model: nn.Module) -> None:
    optimizer = adamw(model.parameters())
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()


def only_forward(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH)).sum()


def train_then_forward(model: nn.Module) -> None:
    train(model)
    only_forward(model)


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
        # autograd keeps what was still queued of a backward that raised, on a plain model too, until the next one
        torch.ones(1, requires_grad=True).sum().backward()
        return
    raise AssertionError("the hook should have raised")


def save_and_load(model: nn.Module) -> None:
    """In every kind of state, with the optimizer's, and through a directory."""
    train(model)
    assert isinstance(model, FullyShardedDataParallel)
    optimizer = adamw(model.parameters())
    optimizer.step()
    sharded = StateDictType.SHARDED_STATE_DICT
    alive = []
    for kind in ((StateDictType.FULL_STATE_DICT,), (sharded,), (sharded, RaggedStateDictConfig())):
        with warnings.catch_warnings(), FullyShardedDataParallel.state_dict_type(model, *kind):
            warnings.filterwarnings("ignore", "StateDictType.* which is not sharded", UserWarning)
            state, saved = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
            model.load_state_dict(state)
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
            alive += [weakref.ref(value) for value in [*state.values(), *saved["state"]["head.weight"].values()]]
            del state, saved
    folder = [tempfile.mkdtemp()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(folder)
    checkpoint.save(folder[0], model, optimizer)
    checkpoint.load(folder[0], model, optimizer)
    if dist.get_world_size() > 1:
        dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    assert not any(value() is not None for value in alive)
    gc.collect()  # torch's own checkpoints leave cycles: classes that are made in functions, no tensors


LIVES: dict[str, Callable[[nn.Module], None]] = {
    "never used": do_nothing,
    "trained": train,
    "one forward": only_forward,
    "trained, then a forward": train_then_forward,
    "evaluated": evaluate,
    "accumulated": accumulate,
    "failed in forward": raise_in_forward,
    "failed in backward": raise_in_backward,
    "saved and loaded": save_and_load,
}


def delete_after(life: str, strategies: list[ShardingStrategy], use_orig_params: bool) -> list[str]:
    """What went wrong: bytes that were not given back, objects that still live."""
    meter = Meter()
    wrong = []
    with no_collection():
        for attempt, strategy in enumerate([strategies[0], *strategies]):  # the first one fills caches
            base = meter.at_rest()
            model = build(strategy, use_orig_params)
            LIVES[life](model)
            held = meter.live() - base
            block = model.module.blocks[0]
            context = block._fsdp_unit.context
            holders = [] if context is None else list(context.passes._by_group.values())  # of lanes
            parts = (model, model.module, block, block._fsdp_unit, block._handle, model.params[0], *holders)
            alive = [weakref.ref(part) for part in parts]
            del model, block, parts, context, holders
            left = excess(meter, base, patience=1.0 if attempt else 0.02)
            if attempt:
                wrong += [f"{strategy}: {type(x()).__name__} lives" for x in alive if x() is not None]
                if left > NOISE or held < 4 * NOISE:
                    wrong.append(f"{strategy}: {left:,} of {held:,} bytes are left")
    return wrong


@needs_meter
@pytest.mark.parametrize(("life", "use_orig_params"), by_turns([*LIVES], [False, True]))
def test_deletion_frees_everything(life: str, use_orig_params: bool) -> None:
    """Without the garbage collector, whatever the model has been through."""
    turn = list(LIVES).index(life) // 2 % 2
    assert run_ranks(2, delete_after, life, [STRATEGIES[use_orig_params], STRATEGIES[1 + turn]], use_orig_params) == [
        [],
        [],
    ]
    if turn:
        assert run_ranks(1, delete_after, life, [NO_SHARD], use_orig_params) == [[]]


def outlived_by_its_graph(use_orig_params: bool) -> list[str]:
    meter = Meter()
    wrong = []
    for attempt in range(2):
        with no_collection():
            base = meter.at_rest()
            model = build(FULL_SHARD, use_orig_params)
            parameters = list(model.parameters())
            x = torch.ones(1, WIDTH, requires_grad=True)
            loss = model(x).sum()
            del model
            loss.backward()
            if any(p.grad is None for p in parameters if p.numel()) or x.grad is None:
                wrong.append("no gradient")
            del loss, parameters, x
            left = excess(meter, base, patience=(0.02, 1.0)[attempt])
            if attempt == 1 and left > NOISE:
                wrong.append(f"{left:,} bytes are left")
    return wrong


@needs_meter
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_graph_outlives_the_model(use_orig_params: bool) -> None:
    """Its backward works, and then everything is freed."""
    assert run_ranks(2, outlived_by_its_graph, use_orig_params) == [[], []]


# -- long runs -----------------------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    descriptors = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    return descriptors, threading.active_count()


def build_two(strategy: ShardingStrategy, use_orig_params: bool) -> FullyShardedDataParallel:
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    return wrap(net, strategy, use_orig_params, wrap_policy=lambda module, recurse, **_: recurse or module is net[0])


def run_long(strategy: ShardingStrategy, use_orig_params: bool, way: str) -> tuple[list[int], int, bool]:
    """Bytes at the end of every tenth step, objects that only the collector could free, and whether anything else
    grew."""
    os.environ["FSDP_COLLECTIVES"] = way
    meter = Meter()
    model = build_two(strategy, use_orig_params)
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
        if step % 11 == 10:
            model(x)  # and no backward
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0)

    for step in range(40):  # until caches of the allocator and of the backend are full
        one_step(step)
    before = resources()
    with no_collection():
        base = meter.at_rest()
        for step in range(100):
            one_step(step)
            if step % 10 == 9:
                growth.append(excess(meter, base))
        found = gc.collect()
    return growth, found, resources() == before


LONG_RUNS = [(FULL_SHARD, False, "direct"), (SHARD_GRAD_OP, True, "auto")]


@needs_meter
@pytest.mark.parametrize(("strategy", "use_orig_params", "way"), LONG_RUNS)
def test_a_hundred_steps_leave_memory_flat(strategy: ShardingStrategy, use_orig_params: bool, way: str) -> None:
    """A few hundred bytes kept per step would show, or one reference cycle."""
    for growth, cycles, same_resources in run_ranks(2, run_long, strategy, use_orig_params, way):
        assert max(growth) < NOISE, growth
        assert cycles == 0, f"{cycles} objects in reference cycles"
        assert same_resources, "file descriptors or threads"


def build_and_delete() -> tuple[list[int], bool]:
    """Growth over the first six of 30 cycles, which are of all strategies and modes, and whether anything else grew."""
    meter = Meter()
    live = [meter.at_rest()]
    before = resources()
    with no_collection():
        for cycle in range(30):
            model = build(STRATEGIES[cycle % 3], cycle % 2 > 0)
            train(model)
            del model
            live.append(live[-1] + excess(meter, live[-1]))
    return [nbytes - min(live[1:7]) for nbytes in live[7:]], resources() == before


@needs_meter
def test_build_train_delete_again_and_again() -> None:
    for growth, same_resources in run_ranks(2, build_and_delete):
        assert max(growth) < NOISE, growth
        assert same_resources, "file descriptors or threads"


# -- tensors that outlive a forward --------------------------------------------------------------------------------


def hooks_of(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ())


def reuse_an_input(strategy: ShardingStrategy, use_orig_params: bool) -> tuple[list[int], list[int], bool]:
    """Hooks on an input that is used in every forward; gradients arrive in it as they would without wrapping."""
    case = ZOO["mlp"]
    model, plain = wrap(case, strategy, use_orig_params), case.build()
    x = case.make_batch(0, 2).inputs[0].requires_grad_()
    y = x.detach().clone().requires_grad_()
    meter = Meter()
    passed: list[bool] = []
    model.module.register_forward_pre_hook(lambda module, args: passed.append(args[0] is x))
    counted, growth, base = [], [], 0
    with no_collection():
        for step in range(30):
            if step % 2:
                model(x).sum().backward()
                plain(y).sum().backward()
            else:
                model(x)  # the graph is dropped
            model.zero_grad()
            counted.append(hooks_of(x))
            if step == 9:
                base = meter.at_rest()
            elif step > 9:
                growth.append(excess(meter, base))
    return counted, growth, all(passed) and torch.equal(x.grad, y.grad)


@needs_meter
@pytest.mark.parametrize(("strategy", "use_orig_params"), by_turns(STRATEGIES, [False, True]))
def test_a_reused_input_collects_no_hooks(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    for counted, growth, same in run_ranks(2, reuse_an_input, strategy, use_orig_params):
        assert max(counted) <= 1, counted
        assert max(growth) < NOISE, growth
        assert same


class Weighted(nn.Module):
    """Returns a parameter of its own, as regularisers and tied heads make models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Weighted()
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = self.inner(x)
        return self.head(x), weight


def build_penalised() -> nn.Module:
    torch.manual_seed(0)
    return Penalised()


def penalise(model: nn.Module, batches: Data) -> Iterator[Any]:
    for step in range(3):
        x = batches.tensor(step, 2, 7)
        output, weight = model(x)
        (output.sum() + weight.square().sum()).backward()
        yield {"input": x.grad}
    yield STEP
    _, weight = model(batches.tensor(9, 2, 7))
    weight.square().sum().backward()  # the parameter alone
    yield {}


def return_a_parameter(strategy: ShardingStrategy, use_orig_params: bool) -> tuple[list[int], list[int]]:
    policy = ModuleWrapPolicy({Weighted})
    reference = Reference(build_penalised, penalise)
    model = wrap(build_penalised(), strategy, use_orig_params, wrap_policy=policy)
    reference.check(model, "a returned parameter", at_rest=False)  # what was returned stays readable
    model = wrap(build_penalised(), strategy, use_orig_params, wrap_policy=policy)
    meter = Meter()
    counted, growth, base = [], [], 0
    with no_collection():
        for step in range(30):
            output, weight = model(torch.ones(2, 7))
            counted.append(hooks_of(weight))
            if step % 2:
                (output.sum() + weight.sum()).backward()
                model.zero_grad()
            del output, weight
            if step == 9:
                base = meter.at_rest()
            elif step > 9:
                growth.append(excess(meter, base))
    return counted, growth


@needs_meter
@pytest.mark.parametrize(("strategy", "use_orig_params"), by_turns(STRATEGIES, [True, False]))
def test_a_returned_parameter_collects_no_hooks(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """It has none, for it outlives the graphs that return it; and gradients are as without wrapping."""
    for counted, growth in run_ranks(2, return_a_parameter, strategy, use_orig_params):
        assert max(counted) == 0, counted
        assert max(growth) < NOISE, growth


# -- passes that have no end, or are inside each other -------------------------------------------------------------


def build_mlp() -> nn.Module:
    return ZOO["mlp"].build()


def skip_backwards(model: nn.Module, batches: Data) -> Iterator[Any]:
    """Forwards of every kind without a backward, then a step as usual."""
    kept: list[Tensor] = []
    for step in range(8):
        model(batches.tensor(100 + step, 2, 7))  # dropped at once
        if step % 2:
            kept.append(model(batches.tensor(200 + step, 2, 7)))  # its graph lives on
        with torch.no_grad():
            model(batches.tensor(300 + step, 2, 7))
            if step % 3 == 2:
                model(batches.tensor(400 + step, 3, 7))
        x = batches.tensor(step, 2, 7)
        output = model(x)
        output.square().mean().backward()
        yield {"output": output, "input": x.grad}
        yield STEP


def forward_without_backward(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    Reference(build_mlp, skip_backwards).check(wrap(ZOO["mlp"], strategy, use_orig_params), "no backward")
    model = wrap(ZOO["mlp"], strategy, use_orig_params)
    x = torch.ones(2, 7)
    moved = []
    for forwards in (1, 1, 3):
        for _ in range(forwards - 1):
            model(x)
        with record_collectives() as log:
            model(x).sum().backward()
        moved.append([(r.label, r.nbytes) for r in log.records if r.dtype is not None and r.dtype.is_floating_point])
    assert moved[2] == moved[1], "what earlier forwards left saved a gather, or cost one"
    model(x)
    with torch.no_grad():
        model(x)
    assert_at_rest(model, "after a forward without gradients")


WORLDS = pairwise([1, 2], STRATEGIES, [False, True])


@pytest.mark.parametrize(("world_size", "strategy", "use_orig_params"), WORLDS)
def test_forward_without_backward(world_size: int, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """The next step is what it would have been, with as many collectives, and ends at rest."""
    run_ranks(world_size, forward_without_backward, strategy, use_orig_params)


class ForceField(nn.Module):
    """An energy and its negative gradient with respect to positions, taken inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 11), nn.Linear(11, 11)])
        self.energy = nn.Linear(11, 1)
        self.checks: list[Callable[[], None]] = []

    def forward(self, positions: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        x = positions
        for layer in self.layers:
            x = torch.tanh(layer(x))
        energy = self.energy(x).sum()
        (gradient,) = torch.autograd.grad(energy, positions, retain_graph=keep)
        for check in self.checks:
            check()
        shift = self.energy.bias + self.energy.weight.mean()  # the root goes on computing with its parameters
        return energy + shift.sum(), -gradient


def build_force_field() -> nn.Module:
    torch.manual_seed(0)
    return ForceField()


def units_of(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or (isinstance(module, nn.Linear) and module.out_features == 11)


def simulate(model: nn.Module, batches: Data) -> Iterator[Any]:
    for step in range(6):
        positions = batches.tensor(step, 4, 3).detach()
        if step % 3 == 1:
            _, forces = model(positions, False)  # forces alone, no training
            yield {"forces": forces}
        energy, forces = model(positions, True)
        energy.backward()
        yield {"energy": energy, "forces": forces}
        yield STEP


def differentiate_inside(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    reference = Reference(build_force_field, simulate)
    model = wrap(build_force_field(), strategy, use_orig_params, wrap_policy=units_of)
    parameters = list(model.parameters())

    def no_gradients() -> None:
        assert all(p.grad is None for p in parameters), "autograd.grad left a gradient on a parameter"

    model.module.checks.append(no_gradients)
    reference.check(model, "forces", at_rest=False)
    assert_at_rest(model, "at the end")


@pytest.mark.parametrize(("world_size", "strategy", "use_orig_params"), WORLDS)
def test_backward_inside_a_forward(world_size: int, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    run_ranks(world_size, differentiate_inside, strategy, use_orig_params)


# -- an interrupt while a collective is issued -------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer, whose output can be stored, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.stored = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.stored = self.frozen(x)
        return x + self.trained(torch.tanh(self.stored))


@contextmanager
def interrupted(kind: str, at: int, *, issued: bool) -> Iterator[list[Tensor]]:
    """Inside, the collective of that kind in that place is interrupted: before or after it is ``issued``. Gives the
    full vectors that it fills or reads."""
    function, places, held = getattr(Communicator, kind), itertools.count(), list[Tensor]()

    def interrupt(self: Communicator, first: Any, second: Any, *args: Any, **options: Any) -> Any:
        if next(places) != at:
            return function(self, first, second, *args, **options)
        if issued:
            function(self, first, second, *args, **options)
        held.extend([second] if kind == "reduce" else [part.full for part in first])
        raise KeyboardInterrupt

    with mock.patch.object(Communicator, kind, interrupt), pytest.raises(KeyboardInterrupt):
        yield held


@impatient
def interrupt_collectives(way: str) -> None:
    os.environ["FSDP_COLLECTIVES"] = way
    torch.manual_seed(0)
    plain = nn.Sequential(Adapted(), Adapted(), nn.Linear(4, 3))
    model = wrap(copy.deepcopy(plain), wrap_policy=ModuleWrapPolicy({Adapted}), process_group=new_group())
    its = [sgd(trained.parameters()) for trained in (plain, model)]

    def step(number: int) -> None:
        for trained, optimizer in zip((plain, model), its):
            trained(torch.full((2, 4), 0.1 * number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values()):
            assert torch.equal(value, expected), (number, name)

    step(0)
    step(1)
    places = [("gather", number) for number in range(5)] + [("reduce", number) for number in range(3)]
    for (kind, number), issued in itertools.product(places, (False, True)):
        with interrupted(kind, number, issued=issued) as held:
            model(torch.ones(2, 4)).sum().backward()
        for full in held:  # it may still be under way
            assert full.untyped_storage().nbytes() >= full.nbytes
        model.zero_grad()
        step(2 + number)
        for gradients in (gradients for unit in units.units_of(model) for gradients in unit.gradients.buckets):
            assert gradients._scratch is None or not gradients._scratch.flat.untyped_storage().nbytes()
    # graphs of before have saved memory that is not filled any more
    x = torch.ones(2, 4, requires_grad=True)
    output, stored = model(x), model.module[0].stored
    with interrupted("gather", 1, issued=True):
        model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stored.sum().backward()
    with pytest.raises(RuntimeError, match="run the forward again"):
        output.sum().backward()
    step(9)


@pytest.mark.parametrize("way", ["native", "shared"])
def test_an_interrupt_while_a_collective_is_issued(way: str) -> None:
    run_ranks(2, interrupt_collectives, way)


@contextmanager
def interrupted_giving_back(at: int) -> Iterator[None]:
    """Inside, what gives a buffer's memory back for the time of that number is interrupted when it has done so."""
    frees, places = MemoryPool.free, itertools.count()

    def interrupt(self: MemoryPool, *args: Any) -> None:
        kind(self, *args)
        if next(places) == at:
            raise KeyboardInterrupt

    kind = SharedPool.free if os.environ["FSDP_COLLECTIVES"] == "shared" else frees
    owner = SharedPool if kind is SharedPool.free else MemoryPool
    with mock.patch.object(owner, "free", interrupt), pytest.raises(KeyboardInterrupt):
        yield


@impatient
def interrupt_giving_back(way: str) -> None:
    os.environ["FSDP_COLLECTIVES"] = way
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(4)])
    policy = ModuleWrapPolicy({nn.Sequential})
    model = wrap(copy.deepcopy(plain), wrap_policy=policy, process_group=new_group())
    its = [sgd(trained.parameters()) for trained in (plain, model)]
    for number in range(12):
        for trained, optimizer in zip((plain, model), its):
            trained(torch.full((2, 4), 0.1 * number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values()):
            assert torch.equal(value, expected), (number, name)
        with interrupted_giving_back(number):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("way", ["native", "shared"])
def test_an_interrupt_while_memory_is_given_back(way: str) -> None:
    """Giving a buffer back may wait for slow ranks; where the user interrupts that, the next steps are as before."""
    run_ranks(2, interrupt_giving_back, way)


# -- copies --------------------------------------------------------------------------------------------------------


def outlive_the_group(ways: tuple[str, ...]) -> list[str]:
    """The ways to communicate after which a group stays, though nobody has it any more."""
    found = []
    for way in ways:
        os.environ["FSDP_COLLECTIVES"] = way
        group = dist.new_group()
        model = wrap(build_mlp(), process_group=group)
        model(torch.ones(2, 7)).sum().backward()
        model.state_dict()
        reference = weakref.ref(group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group, model
        gc.collect()
        if reference() is not None:
            found.append(way)
    return found


def test_groups_end_with_the_models_that_used_them() -> None:
    """A group has connections, and with gloo threads that do not rest."""
    assert run_ranks(2, outlive_the_group, ("shared", "direct", "native")) == [[], []]


class Scaled(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


def copy_without_dimensions(use_orig_params: bool) -> None:
    model = wrap(Scaled(), ShardingStrategy.NO_SHARD, use_orig_params)
    copied = copy.deepcopy(model)
    for module in (model, copied):
        module(torch.ones(2, 3)).sum().backward()
    assert_bit_equal(full_parameters(copied), full_parameters(model))
    assert_bit_equal(full_gradients(copied), full_gradients(model))
    shapes = [param.shape for param in model.parameters()]
    assert [param.shape for param in copied.parameters()] == shapes


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_copies_of_parameters_without_dimensions(use_orig_params: bool) -> None:
    """copy.deepcopy() of a unit that is not sharded keeps them, and the copy trains."""
    run_ranks(2, copy_without_dimensions, use_orig_params)


def pickle_and_go_on(use_orig_params: bool) -> str:
    """What is said."""
    model = wrap(ZOO["mlp"], use_orig_params=use_orig_params)
    x = torch.ones(2, 7)
    model(x).sum().backward()
    with pytest.raises(TypeError) as caught:
        pickle.dumps(model)
    model.zero_grad()
    expected = wrap(ZOO["mlp"], use_orig_params=use_orig_params)
    for module in (model, expected):
        module(x).sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert_at_rest(model, "after the refusal")
    return str(caught.value)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_pickling_is_refused(use_orig_params: bool) -> None:
    """In words that say so, and the model is none the worse."""
    for words in run_ranks(2, pickle_and_go_on, use_orig_params):
        assert words.startswith("a FullyShardedDataParallel module cannot be pickled") and "state_dict()" in words
