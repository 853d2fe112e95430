"""Ordering of streams, checked without an accelerator: see `tests.harness.stream_tracer`.

The engine runs without a race; leaving out a synchronization is detected, so each is needed; independent work may
overlap; and the host does not wait. The tracer is tested in `test_stream_tracer.py`.
"""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.flat.memory as memory_module
from fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, full_params
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.optim import WholeParamOptimizer
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import ZOO
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, ZERO2
from tests.harness.stream_tracer import PACKAGE, SimulatedStream, StreamTracer, Sync, trace_streams
from tests.harness.traced import WIDTH, Block, BlockTower, Chain, Training
from tests.harness.versions import needs_swaps

# -- traced programs ---------------------------------------------------------------------------------------------------

Part = Callable[[Training], None]
PARTS: tuple[Part, ...] = (
    Training.steps,
    Training.accumulation,
    Training.evaluation,
    Training.several_forwards,
    Training.input_gradients,
    Training.checkpointing,
    Training.skipping,
    Training.changing,
    Training.failures,
    Training.clipping,
    Training.freezing,
    Training.summoning,
    Training.unsharding,
    Training.moving,
    Training.switching,
    Training.deletion,
)


class Setting(NamedTuple):
    ranks: int
    strategy: ShardingStrategy
    use_orig_params: bool
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    forward_prefetch_distance: int = 1
    backward_prefetch_distance: int = 1
    limit_all_gathers: bool = True

    def __str__(self) -> str:
        prefetch = getattr(self.backward_prefetch, "name", "no prefetch")
        words = [self.strategy.name, "original" if self.use_orig_params else "flat", prefetch, str(self.ranks)]
        words += ["bf16"] * (self.mixed_precision is not None) + ["unlimited"] * (not self.limit_all_gathers)
        distances = (self.forward_prefetch_distance, self.backward_prefetch_distance)
        return "-".join(words + ["{}/{}".format(*distances)] * (distances != (1, 1)))


SETTINGS = (
    Setting(1, FULL_SHARD, False, backward_prefetch=BackwardPrefetch.BACKWARD_POST),
    Setting(2, FULL_SHARD, False),
    Setting(1, FULL_SHARD, True, backward_prefetch=None, forward_prefetch_distance=0),
    Setting(1, FULL_SHARD, True, forward_prefetch_distance=3, backward_prefetch_distance=2),
    Setting(1, FULL_SHARD, False, forward_prefetch_distance=2, limit_all_gathers=False),
    Setting(1, SHARD_GRAD_OP, False),
    Setting(1, FULL_SHARD, True, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)),
    Setting(1, SHARD_GRAD_OP, False, mixed_precision=MixedPrecision(torch.bfloat16)),
    Setting(2, NO_SHARD, False, mixed_precision=MixedPrecision(torch.bfloat16)),
    Setting(2, HYBRID_SHARD, True),
    Setting(2, ZERO2, False, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)),
)


def parts_of(setting: Setting) -> list[Part]:
    """Return all parts for one setting of full sharding, and a fraction of them by turns for the other settings."""
    if setting is SETTINGS[0]:
        return list(PARTS)
    is_full = setting.strategy is FULL_SHARD
    turn = [other for other in SETTINGS if (other.strategy is FULL_SHARD) is is_full].index(setting) + 1
    turns = 6 if is_full else 3
    return [part for place, part in enumerate(PARTS) if place % turns == turn % turns]


# -- no races ----------------------------------------------------------------------------------------------------------


def force_sharded() -> None:
    """Set the mode in which one rank communicates with itself, in separate buffers."""
    os.environ["FSDP_FORCE_SHARDED"] = "1"


def replicas() -> tuple[Any, Any]:
    """Return two groups: every rank is sharded over itself alone, and all are replicas."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()], dist.group.WORLD


def assert_clean(tracer: StreamTracer, training: Training, parts: Iterable[Part]) -> None:
    """Run `parts`, without a race or a wait of the host after the first step, in which the units' order is recorded."""
    __tracebackhide__ = True
    logging.getLogger("fsdp").setLevel(logging.CRITICAL)  # some parts fail on purpose
    training.step()
    tracer.host_synchronisations.clear()
    for part in parts:
        part(training)
    assert not tracer.races, "\n".join(tracer.races)
    assert not tracer.host_synchronisations, "\n".join(tracer.host_synchronisations)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@on_ranks("setting.ranks")
def test_training_has_no_race_and_no_host_wait(setting: Setting) -> None:
    force_sharded()
    options: dict[str, Any] = dict(zip(("sharding_strategy", *Setting._fields[2:]), setting[1:]))
    if setting.strategy in (HYBRID_SHARD, ZERO2):
        options["process_group"] = replicas()
    with trace_streams(check=False) as tracer:
        assert_clean(tracer, Training(tracer, BlockTower(), **options), parts_of(setting))


@on_ranks(2)
def test_an_all_reduce_hook_runs_on_the_given_stream() -> None:
    """`set_all_reduce_hook(stream=...)`: the stream follows the reduction, and `.grad` follows the stream."""
    used = set()
    with trace_streams(check=False) as tracer:
        training = Training(tracer, BlockTower((7, 13, 5, 7)))

        def hook(shard: Tensor) -> None:
            used.add(tracer.current.name)
            shard.mul_(2)

        training.model.set_all_reduce_hook(hook, stream=SimulatedStream("user"), recurse=True)
        assert_clean(tracer, training, [Training.steps])
    assert used == {"user"}


@on_ranks(4)
def test_no_race_when_units_reshard_over_some_ranks() -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    parts = (Training.steps, Training.checkpointing, Training.failures, Training.deletion)
    with trace_streams(check=False) as tracer:
        training = Training(tracer, BlockTower((7, 13, 5)), reshard_after_forward=2, mixed_precision=precision)
        assert_clean(tracer, training, parts)


def offloaded_gradients() -> Any:
    return mock.patch.object(FlatParamHandle, "keeps_gradients_on_host", True)


@contextmanager
def memory(kind: str) -> Iterator[None]:
    """Set the source of full buffers' memory: "pooled", "resized" (if storages cannot be exchanged) or "poisoned"; or
    "offloaded", as if gradients moved to the host.
    """
    os.environ["FSDP_DEBUG"] = "1" if kind == "poisoned" else "0"
    swaps = mock.patch.object(memory_module, "STORAGES_SWAP", memory_module.STORAGES_SWAP and kind != "resized")
    with swaps, offloaded_gradients() if kind == "offloaded" else nullcontext():
        yield


PROGRAMS: dict[str, tuple[str, type[nn.Module], tuple[Part, ...]]] = {
    "pooled": (
        "pooled",
        BlockTower,
        (Training.steps, Training.several_forwards, Training.skipping, Training.summoning, Training.deletion),
    ),
    "equal": ("pooled", Chain, (Training.steps, Training.several_forwards)),
    "resized": ("resized", BlockTower, (Training.steps, Training.skipping, Training.deletion)),
    "poisoned": ("poisoned", BlockTower, (Training.steps, Training.skipping)),
    "offloaded": ("offloaded", BlockTower, (Training.steps, Training.failures)),
    "hooks": ("pooled", BlockTower, (Training.hooks,)),
}


def trace_program(name: str, drop: tuple[Sync, ...] = ()) -> StreamTracer:
    force_sharded()
    kind, model, parts = PROGRAMS[name]
    with memory(kind), trace_streams(drop=drop, check=False) as tracer:
        training = Training(tracer, model())
        for part in parts:
            if not tracer.races:
                part(training)
        del training
    return tracer


@on_ranks(1)
def test_no_race_with_each_memory_pool() -> None:
    races = {name: trace_program(name).races for name in PROGRAMS}
    assert not any(races.values()), races


# -- streams of users, and other models --------------------------------------------------------------------------------


def on_a_stream_of_the_user(tracer: StreamTracer) -> Training:
    training = Training(tracer, BlockTower())
    training.step()
    with tracer.streams.joined(SimulatedStream("user")):
        training.steps()
        training.accumulation()
    training.steps()
    return training


def assert_hooks_on(stream: SimulatedStream, model: nn.Module) -> None:
    """Check that autograd runs the hooks of all leaves on `stream`."""
    accumulators = [(unit, node) for _, unit, _ in units_in(model) for _, node in unit.arrivals._accumulators.values()]
    assert not [unit.name for unit, node in accumulators if node.metadata["stream"] is not stream]


def wrapped_on_another_stream(tracer: StreamTracer) -> Training:
    """Autograd runs a leaf's hook on the stream on which the accumulator was made; the engine makes it anew."""
    with tracer.streams.joined(SimulatedStream("wrapping")):
        training = Training(tracer, BlockTower(), use_orig_params=True)
    training.steps()
    assert_hooks_on(tracer.compute, training.model)
    training.accumulation()
    # the graphs hold the nodes of the stream on which they were made
    first, pending = training.loss(), training.loss()
    with tracer.streams.joined(SimulatedStream("third")):
        for name, param in training.model.named_parameters():
            if "base" in name:
                param.requires_grad_(True)
        first.backward()
        with tracer.on(tracer.compute):  # reuses memory freed by the backward
            torch.zeros(100)
        training.loss().backward()
        pending.backward()
        del first, pending
        training.steps()
        training.failures()
    training.steps()
    training.accumulation()
    assert_hooks_on(tracer.compute, training.model)
    return training


def unsharded_on_a_side_stream(tracer: StreamTracer) -> Training:
    """A side stream has waited for the gather, and the forward's stream has not."""
    training = Training(tracer, BlockTower())
    training.steps()
    before = tracer.streams.record()
    with tracer.on(SimulatedStream("side")):
        tracer.streams.wait(before)
        training.model._unshard(async_op=True).wait()
    training.steps()
    return training


def joined_to_another_tree(tracer: StreamTracer) -> Training:
    inner = FSDP(Block(13), sharding_strategy=SHARD_GRAD_OP)
    tracer.watch(inner)
    x = torch.randn(4, WIDTH)
    inner(x).sum().backward()
    inner(x)
    training = Training(tracer, nn.Sequential(FSDP(Block(7)), inner, FSDP(Block(7))), auto_wrap_policy=None)
    training.steps()
    return training


def of_the_zoo(tracer: StreamTracer, name: str) -> FSDP:
    case = ZOO[name]
    model = FSDP(case.build(), auto_wrap_policy=ModuleWrapPolicy(case.blocks), use_orig_params=True)
    tracer.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        case.loss(model, case.make_batch(seed, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


USES: dict[str, Callable[[StreamTracer], Any]] = {
    "on a stream of the user": on_a_stream_of_the_user,
    "wrapped on another stream": wrapped_on_another_stream,
    "unsharded on a side stream": unsharded_on_a_side_stream,
    "joined to another tree": joined_to_another_tree,
    **{name: partial(of_the_zoo, name=name) for name in ZOO},
}


@pytest.mark.parametrize("use", USES)
@on_ranks(1)
def test_no_race_with_streams_of_users_and_in_other_models(use: str) -> None:
    force_sharded()
    with trace_streams() as tracer:  # raises on a race
        _kept = USES[use](tracer)  # memory of the model may be freed on any stream


# -- each synchronization is needed ------------------------------------------------------------------------------------


def lines_that_synchronize() -> set[tuple[str, int]]:
    """Return the engine's lines that call `record()` and `wait()`; exchanges are below."""
    found = set()
    for path in (path for path in Path(PACKAGE).rglob("*.py") if path.parent.name != "placement"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "streams." in text else ():
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if call.endswith(("streams.record", "streams.wait")):
                found.add((path.relative_to(PACKAGE).as_posix(), node.lineno))
    return found


def find_needless(
    traces: Iterable[Callable[..., StreamTracer]], choose: Callable[[Sync], bool] = lambda sync: True
) -> tuple[set[Sync], list[str]]:
    """Return the synchronizations in `traces`, and those that can be left out in each without a race on any rank."""
    found, needed = set[Sync](), set[str]()
    for trace in traces:
        own = {sync for syncs in of_all_ranks(trace().syncs) for sync in syncs if choose(sync)}
        for sync in sorted(own):
            if str(sync) not in needed and any(of_all_ranks(trace((sync,)).races)):
                needed.add(str(sync))
        found |= own
    return found, [str(sync) for sync in found if str(sync) not in needed]


@needs_swaps
@on_ranks(1)
def test_leaving_out_any_synchronization_is_detected_as_a_race() -> None:
    found, needless = find_needless(partial(trace_program, name) for name in PROGRAMS)
    lines = {(site.file, site.line) for sync in found for site in (sync.recorded, sync.waited)}
    assert lines_that_synchronize() == lines, "some are not exercised here"
    assert needless == []


@pytest.mark.parametrize("kind", ["pooled", "offloaded"])
@on_ranks(2)
def test_leaving_out_a_synchronization_with_replicas_is_detected(kind: str) -> None:
    """The mean over replicas follows the reduction, and precedes reading the gradient."""
    force_sharded()
    logging.getLogger("fsdp").setLevel(logging.CRITICAL)  # a part fails on purpose
    group = replicas()

    def trace(drop: tuple[Sync, ...] = ()) -> StreamTracer:
        with memory(kind), trace_streams(drop=drop, check=False) as tracer:
            training = Training(tracer, BlockTower((7, 13)), process_group=group, sharding_strategy=HYBRID_SHARD)
            for part in (Training.steps, Training.failures):
                if not tracer.races:
                    part(training)
            del training
        return tracer

    found, needless = find_needless([trace], lambda sync: "replica" in (sync.by, sync.on))
    assert len(found) >= 2 and needless == []


@on_ranks(2)
def test_reductions_do_not_wait_for_replicas() -> None:
    force_sharded()
    with trace_streams(check=False) as tracer:
        training = Training(tracer, BlockTower((7,) * 4), process_group=replicas(), sharding_strategy=HYBRID_SHARD)
        training.steps()
        tracer.collectives.clear()
        training.step()
    replica = tracer.streams.replica
    averages = [c for c in tracer.collectives if c.stream is replica]
    reductions = [c for c in tracer.collectives if c.stream is tracer.streams.reduce]
    assert len(averages) == len(reductions) == 5
    waited = [c.label for c in reductions if c.clock.get(replica, 0) >= averages[0].time]
    assert not waited, waited


# -- memory of the host ----------------------------------------------------------------------------------------------


def trace_offloaded(strategy: ShardingStrategy, use_orig_params: bool, broken: str | None) -> list[str]:
    """Return the races with shards and gradients in the host's memory, optionally with a wait left out."""
    force_sharded()
    with trace_streams(check=False) as tracer, offloaded_gradients():
        if broken == "settle":
            tracer.streams.settle = lambda: None  # type: ignore[method-assign]
        elif broken == "on_host":
            tracer.streams.on_host = lambda event: tracer.on_host({})  # type: ignore[method-assign]
        options = {"cpu_offload": CPUOffload(True), "mixed_precision": MixedPrecision(torch.bfloat16)}
        options |= {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        training = Training(tracer, BlockTower(), **options)

        def update(change: Callable[[], None]) -> None:
            with tracer.on_host({}):
                change()

        def average() -> None:
            for param in training.model.parameters():
                param.data.mul_(0.9)

        with tracer.on_host(tracer.compute.clock):
            pass
        for step in range(4):
            if tracer.races:
                break
            training.loss().backward()
            training.loss().backward()  # added to the existing gradient
            update(training.optimizer.step)
            update(lambda: training.optimizer.zero_grad(set_to_none=step % 2 == 0))  # noqa: B023
            with torch.no_grad():
                training.loss()
            update(average)
            training.model.module.skipped = {step}
        if broken is None:
            for read in (
                training.loss,  # no backward follows
                lambda: training.model._unshard(async_op=True).wait(),
                lambda: [param.sum() for _, param in full_params(training.model)],
                training.model.state_dict,
                partial(read_summoned, training.model),
            ):
                read()
                update(average)
    return tracer.races


def read_summoned(model: FSDP) -> None:
    with FSDP.summon_full_params(model, writeback=False):
        pass


@pytest.mark.parametrize(("strategy", "use_orig_params"), [(FULL_SHARD, True), (SHARD_GRAD_OP, False)])
@on_ranks(1)
def test_the_host_waits_before_it_accesses_offloaded_tensors(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Gradients arrive before the optimizer reads them; shards are read before a write."""
    assert trace_offloaded(strategy, use_orig_params, None) == []
    for broken in ("settle", "on_host"):
        assert trace_offloaded(strategy, use_orig_params, broken) != [], broken


# -- overlap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@on_ranks(1)
def test_communication_overlaps_with_compute(strategy: ShardingStrategy) -> None:
    force_sharded()
    count = 4
    with trace_streams(check=False) as tracer:
        training = Training(tracer, BlockTower((7,) * count), sharding_strategy=strategy)
        training.steps()
        for index, block in enumerate(training.blocks):
            for what in ("forward", "backward"):
                block.at_end[what] = partial(tracer.mark, f"{what} of {index}")
        tracer.collectives.clear()
        training.step()
    compute, reduce = tracer.compute, tracer.streams.reduce
    issued = {what: [c for c in tracer.collectives if c.label.startswith(what)] for what in ("gather", "reduce")}
    found = []
    passes = [("forward", range(count), issued["gather"])]
    if strategy is FULL_SHARD:  # gathered again
        passes.append(("backward", reversed(range(count)), list(reversed(issued["gather"]))))
    for kind, order, gathers in passes:
        for before, index in pairwise(order):
            gather = next(c for c in gathers if f"'blocks.{index}'" in c.label)
            if gather.clock.get(compute, 0) >= tracer.marks[f"{kind} of {before}"][compute]:
                found.append(f"the gather of {index} waits for the {kind} of {before}")
    for before, index in pairwise(reversed(range(count))):
        reduction = next(c for c in issued["reduce"] if f"'blocks.{before}'" in c.label)
        if tracer.marks[f"backward of {index}"].get(reduce, 0) >= reduction.time:
            found.append(f"the backward of {index} waits for the reduction of {before}")
    assert not found, found


# -- exchanges between shards and owners of whole parameters -----------------------------------------------------------

UNITS, STEPS = 3, 2
EXCHANGE = "WholeParamOptimizer"


def trace_exchanges(drop: tuple[Sync, ...] = ()) -> StreamTracer:
    """Trace steps with owners, without the synchronisations of `drop`."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH + unit, WIDTH + unit + 1) for unit in range(UNITS)))
    with trace_streams(drop=drop, check=False) as tracer:
        model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
        tracer.watch(model)
        sgd = partial(torch.optim.SGD, lr=0.1)
        optimizer = WholeParamOptimizer(model, sgd, select=lambda name, shape: len(shape) == 2, rest=sgd)
        for _ in range(STEPS):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer
    return tracer


@on_ranks(2)
def test_exchanges_run_beside_the_computation_without_a_race() -> None:
    """Each is issued on the gather stream, and does not come after the unit that is stepped meanwhile."""
    tracer = trace_exchanges()
    assert tracer.races == []
    exchanges = [each for each in tracer.collectives if each.label == EXCHANGE]
    assert len(exchanges) == UNITS + STEPS * 2 * UNITS  # the first ones show the values to the inner optimizer
    assert {each.stream for each in exchanges} == {tracer.streams.gather}


@on_ranks(2)
def test_each_synchronisation_of_an_exchange_is_needed() -> None:
    found, needless = find_needless([trace_exchanges], lambda sync: sync.recorded.file == "placement/redistribute.py")
    assert len(found) == 2 and needless == []
