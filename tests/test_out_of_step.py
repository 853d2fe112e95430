"""Ranks that diverge: every rank gets an error soon that names both sides, and training resumes afterwards."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.checkpoint.optim_agree as optim_agree
import fsdp.placement.redistribute as redistribute
from fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType, checkpoint, full_grad
from fsdp.checkpoint import StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from fsdp.comm import consensus, native
from fsdp.comm.calls import BESIDE, TREES, Calls
from fsdp.comm.lane import Lane
from tests.harness.agreeing import (
    EQUAL,
    ODD,
    PATIENT,
    RANKS,
    SHORT,
    SIZES,
    STEPS,
    UNEQUAL,
    Block,
    Chain,
    Outcome,
    assert_out_of_step,
    build,
    first_error,
    impatient,
    new_group,
    play,
    raises_soon,
    summon,
    train,
    train_and_raise,
)
from tests.harness.models import Net
from tests.harness.pool import Died, on_ranks, run_fresh, run_ranks
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

UNITS_0_AND_1 = ("unit 'blocks.0'", "unit 'blocks.1'")
AHEAD = ("rank 1 runs the forward of the root unit", "runs the backward")
FORK = {"others": "fork", "usual": "fork"}  # a model whose caller orders the backwards
DIRECT = {"way": "direct"}  # messages carry tags: on a mismatch ranks wait and read each other's progress

# The odd rank's action, sizes of units, the step, texts that every rank's error must contain, and further arguments.
DEVIATIONS: list[tuple[str, tuple[int, ...], int, tuple[str, ...], dict[str, Any]]] = [
    ("swap", EQUAL, 0, UNITS_0_AND_1, {}),
    ("swap", UNEQUAL, 3, UNITS_0_AND_1, {"strategy": NO_SHARD}),
    ("swap", UNEQUAL, 0, UNITS_0_AND_1, DIRECT),
    ("swap", UNEQUAL, 3, UNITS_0_AND_1, DIRECT),
    ("fork reversed", EQUAL, 0, ("in the backward", "unit 'left'", "unit 'right'"), FORK),
    ("fork reversed", UNEQUAL, 3, ("in the backward", "unit 'left'", "unit 'right'"), FORK),
    ("skip a unit", EQUAL, 0, ("unit 'blocks.1'", "unless the model is wrapped with reduce_unused=True"), {}),
    ("skip the last unit", UNEQUAL, 3, ("unit 'blocks.2'",), {}),
    ("skip the last unit", UNEQUAL, 3, ("unit 'blocks.1'", "unit 'blocks.2'"), DIRECT),
    ("repeat a unit", UNEQUAL, 0, ("unit 'blocks.0'",), {}),
    ("cut the graph", EQUAL, 3, ("in the backward", "unit 'blocks.0'", "end the pass"), {}),
    ("one eval more", EQUAL, 0, (*AHEAD, "If one rank evaluates alone, evaluate on all ranks"), {}),
    ("one forward more", UNEQUAL, 3, (*AHEAD, "loop with `for batch in fsdp.join(model, loader)`"), {}),
    ("raise early", UNEQUAL, 0, ("rank 1 failed in the forward of the root unit",), {}),
    ("raise late", EQUAL, 3, (), {}),  # later steps fail one pass further: all gathers were in flight
    ("raise in backward", EQUAL, 0, ("rank 1 failed in the backward",), {}),
]


@pytest.mark.parametrize(("odd", "widths", "step", "words", "options"), DEVIATIONS)
def test_one_rank_runs_other_units(
    odd: str, widths: tuple[int, ...], step: int, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    """One rank orders, skips or repeats units, runs one more pass, or fails: every rank raises within the step."""
    assert_out_of_step(run_ranks(RANKS, play, odd, widths, step, **options), step, *words)


@SIZES
def test_another_unit_order_in_eval_fails_at_the_next_step(widths: tuple[int, ...]) -> None:
    """Units that were prefetched in the usual order are no error."""
    outcomes = run_ranks(RANKS, play, "swap in eval", widths, 3, others="eval")
    assert_out_of_step(outcomes, 4, *UNITS_0_AND_1)


def state_dict_by(rank_0: bool) -> Callable[[Any], Any]:
    """Return a call of ``state_dict()`` for rank 0 only or for all ranks."""

    def call(model: Any) -> Any:
        config = FullStateDictConfig(rank0_only=rank_0)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return model.state_dict()

    return call


def load_from_rank_0(model: Any) -> None:
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    ):
        model.load_state_dict(Chain(UNEQUAL).state_dict())


def optim_state_dict(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def get_optimizer(model: Any) -> Any:
    return get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))


def set_optimizer(model: Any) -> None:
    """Load from rank 0 with no communication except that of the call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in Chain(UNEQUAL).named_parameters()]
    state = {"state": {}, "param_groups": [{**optimizer.state_dict()["param_groups"][0], "params": names}]}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def set_model(model: Any) -> None:
    """Load into a parent module that is not wrapped."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(nn.ModuleList([model]), nn.ModuleList([Chain(UNEQUAL)]).state_dict(), options=options)


# Calls of all ranks, and their names in errors.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "state_dict": (state_dict_by(False), "state_dict() (FULL_STATE_DICT) of the root unit"),
    "state_dict for rank 0": (state_dict_by(True), "state_dict() (FULL_STATE_DICT, rank0_only) of the root unit"),
    "state_dict of the inner module": (
        lambda model: model.module.state_dict(),
        "state_dict() of a module in the root unit",
    ),
    "optim_state_dict": (optim_state_dict, "optim_state_dict() of the root unit"),
    "get_optimizer": (get_optimizer, "get_optimizer_state_dict() of the root unit"),
    "set_optimizer": (set_optimizer, "set_optimizer_state_dict() of the root unit"),
    "set_model": (set_model, "set_model_state_dict() of the root unit"),
    "summon": (summon, "summon_full_params() of the root unit"),
    "load": (lambda model: model.load_state_dict(Chain(UNEQUAL).state_dict()), "load_state_dict() of the root unit"),
    "load from rank 0": (load_from_rank_0, "load_state_dict() of the root unit"),
    "full_grad": (lambda model: full_grad(next(model.parameters())), "full_grad() of the root unit"),
    "clip": (lambda model: model.clip_grad_norm_(1.0), "clip_grad_norm_(norm_type=2.0) of the root unit"),
    "reduce_gradients": (lambda model: model.reduce_gradients(), "reduce_gradients() of the root unit"),
}


@pytest.mark.parametrize("reduce_unused", [False, True])
@on_ranks(2)
@impatient
def test_call_by_one_rank_is_named_on_all_ranks(reduce_unused: bool) -> None:
    """Peers run the next forward, once after steps without the call and once after steps in which all ranks made it.

    Without shared memory, gloo would end the process where messages of different sizes meet.
    """
    os.environ["FSDP_COLLECTIVES"] = "auto" if reduce_unused else "native"
    found = []
    for name, (call, _) in CALLS.items():
        for habit in (False, True) if name in ("summon", "clip") else (False,):
            torch.manual_seed(0)  # one rank alone has made more random numbers
            model = build(Chain(UNEQUAL), new_group(), reduce_unused=reduce_unused)
            for _ in range(2 if habit else 1):
                train(model)
                if habit:
                    call(model)
            if habit:
                train(model)
            with raises_soon() as caught:
                if dist.get_rank() == 0:
                    call(model)
                train(model)
            found.append((name, "after it" if habit else "first", str(caught.value)))
    for name, when, error in found:
        case = f"{name}, {when}: {error}"
        assert f"rank 0 has called {CALLS[name][1]}" in error, case
        assert " runs the forward of the root unit" in error, case


@pytest.mark.parametrize("reduce_unused", [False, True])
@on_ranks(2)
@impatient
def test_calls_work_after_a_failure_of_all_ranks(reduce_unused: bool) -> None:
    """Each kind of call, the emergency save above all, and the gradients of the next step."""
    done = []
    for error in (torch.OutOfMemoryError("no memory"), KeyboardInterrupt()):
        for backward in (isinstance(error, KeyboardInterrupt) != reduce_unused,):
            torch.manual_seed(0)
            plain = Chain(UNEQUAL)
            model = build(copy.deepcopy(plain), new_group(), reduce_unused=reduce_unused, use_orig_params=True)

            def between(position: int, x: Tensor) -> Tensor:
                def fail(grad: Tensor) -> None:
                    raise error  # noqa: B023

                if position == 1 and backward:  # noqa: B023
                    x.register_hook(fail)
                elif position == 1:
                    raise error  # noqa: B023
                return x

            train(model)
            model.zero_grad()
            for name, (call, _) in CALLS.items():
                model.module.between = between
                with pytest.raises(type(error)):
                    train(model)
                model.module.between = lambda position, x: x
                state = call(model)
                if name == "state_dict":
                    for key, value in plain.state_dict().items():
                        assert torch.equal(state[key], value), key
                done.append(name)
                model.load_state_dict(plain.state_dict())
                model.zero_grad()
            train(model)
            train(plain)
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                for (key, got), expected in zip(model.module.named_parameters(), plain.parameters()):
                    torch.testing.assert_close(got.grad, expected.grad, msg=key)
    assert done == 2 * list(CALLS)


@pytest.mark.parametrize("farther", [0, 1])
@on_ranks(2)
@impatient
def test_calls_work_after_failures_at_different_units(farther: int) -> None:
    """A failed rank blames no peer, and waits until all ranks have met and issued the same collectives.

    Rank `farther` fails one unit later; rank 0 is interrupted in the call and repeats it.
    """
    group = new_group()
    store = dist.distributed_c10d._world.pg_map[group][1]
    torch.manual_seed(0)
    chain = Chain(UNEQUAL)
    expected = copy.deepcopy(chain.state_dict())
    model = build(chain, group)
    for _ in range(2):
        train(model)
    train_and_raise(model, 2 if dist.get_rank() == farther else 1)
    look = Lane.slow

    def look_once(self: Lane) -> None:
        look(self)
        raise KeyboardInterrupt

    def look_and_tell(self: Lane) -> None:
        store.set("looked", "")
        look(self)

    if dist.get_rank() == 1:
        store.wait(["looked"], timedelta(seconds=SHORT))
    else:
        with mock.patch.object(Lane, "slow", look_once), pytest.raises(KeyboardInterrupt):
            state_dict_by(False)(model)
    with mock.patch.object(Lane, "slow", look_and_tell):
        state = state_dict_by(False)(model)
    train(model)
    assert all(torch.equal(state[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    "call", ["load_state_dict()", "optim_state_dict()", "full optim_state_dict()", "optim_state_dict_to_load()"]
)
@on_ranks(2)
@impatient
def test_interrupt_in_a_call_reaches_the_waiting_rank(call: str) -> None:
    """The message on rank 0, which waits for the call's communication, names it; afterwards the call works."""
    torch.manual_seed(0)
    plain = Chain(UNEQUAL)
    model = build(copy.deepcopy(plain), new_group())
    optimizer = torch.optim.Adam(model.parameters())
    train(model)
    optimizer.step()
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    case, function, make = {
        "load_state_dict()": (consensus, "failures_in", lambda: model.load_state_dict(plain.state_dict())),
        "optim_state_dict()": (
            optim_agree,
            "all_gather_object",
            lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        ),
        "full optim_state_dict()": (
            redistribute,
            "exchange",
            lambda: FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=True),
        ),
        "optim_state_dict_to_load()": (
            consensus,
            "broadcast_object",
            lambda: FullyShardedDataParallel.scatter_full_optim_state_dict(full, model, optim=optimizer),
        ),
    }[call]
    interrupted = dist.get_rank() == 1
    with contextlib.ExitStack() as stack:
        if interrupted:
            stack.enter_context(mock.patch.object(case, function, side_effect=KeyboardInterrupt))
        with raises_soon(KeyboardInterrupt if interrupted else RuntimeError) as caught:
            make()
    make()
    train(model)
    if not interrupted:
        error, failure = str(caught.value), f"rank 1 failed in the {call.removeprefix('full ')} of the root unit"
        assert failure in error, error


@pytest.mark.parametrize(("strategy", "good"), [(FULL_SHARD, 1), (SHARD_GRAD_OP, 3)])
@on_ranks(2)
@impatient
def test_rank_behind_the_backward_of_its_peers(strategy: ShardingStrategy, good: int) -> None:
    """Peers used a gather that the odd rank had prefetched, and are in their backward while it waits in its forward."""
    root = Net(lambda m, x: m.l2(x) if m.swapped else m.l1(x), l1=Block(5), l2=Block(5), swapped=False)
    model = build(root, new_group(), strategy, use_orig_params=False)
    for _ in range(good):
        train(model)
    model.module.swapped = dist.get_rank() == ODD
    started = time.monotonic()
    error = first_error(model)
    assert_out_of_step([Outcome(0, error, time.monotonic() - started)], 0, "unit 'l1'", "unit 'l2'")


@on_ranks(2)
@impatient
def test_records_of_changing_orders_are_bounded() -> None:
    """The lane's history and the store's keys."""
    group = new_group()
    model = build(Chain((5,) * 6), group)
    model.check_is_root()
    history = Lane.of(group)._history
    store = dist.distributed_c10d._world.pg_map[group][1]
    random = torch.Generator().manual_seed(0)
    kept = []
    for _ in range(80):
        order = torch.randperm(6, generator=random)[: int(torch.randint(1, 7, (1,), generator=random))]
        model.module.order = order.tolist()
        train(model)
        kept.append((len(history._followers), store.num_keys()))
    records, keys = zip(*kept)
    assert max(records) == records[-1] == history._capacity == 64 * (1 + 7), records  # 64 for each unit
    assert max(keys[40:]) <= max(keys[:40]) + 4, keys


def test_one_rank_trains_another_model() -> None:
    for step, error, seconds in run_ranks(RANKS, play, "another model", UNEQUAL, 2, seconds=SHORT):
        assert step == 2 and seconds < SHORT + 5 and error is not None
        assert "rank 1 is about to begin the first pass or call of a model" in error


# Name: (waiting rank, absent rank), texts of the waiting rank's error.
ABSENCES = {
    "nothing": ((0, 1), ("gather the root unit", "Last collectives of rank 0: ")),
    "no backward": ((1, 2), ("in the backward", "Last collectives of rank 1: ")),
    "raise and stop": ((2, 0), ("unit 'blocks.", "rank 0 failed in the forward of the root unit")),
}


@impatient
def errors_of_absent_ranks() -> Outcome:
    """Leave one group early and wait in another: each rank is absent once and waits once."""
    rank = dist.get_rank()
    models = {}
    for name, (pair, _) in ABSENCES.items():
        group = new_group(SHORT, sorted(pair))
        if rank in pair:
            torch.manual_seed(0)  # the third rank is not in this group
            models[name] = build(Chain(UNEQUAL), group)
            for _ in range(2):
                train(models[name])
    for name, ((_, odd), _) in ABSENCES.items():
        if rank == odd:
            STEPS[name](models[name])
    (waiting,) = (models[name] for name, ((waits, _), _) in ABSENCES.items() if rank == waits)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(waiting)
    return Outcome(2, str(caught.value), time.monotonic() - started)


def test_absent_rank_ends_the_wait_within_the_timeout() -> None:
    """The absent rank has fewer batches, or failed before or in the backward."""
    for (_, error, seconds), ((waits, _), waiting_for) in zip(
        run_ranks(RANKS, errors_of_absent_ranks), ABSENCES.values(), strict=True
    ):
        assert seconds < SHORT + 5, f"rank {waits}: {error}"
        assert error is not None and all(words in error for words in waiting_for), error


def test_slow_rank_causes_no_error() -> None:
    for step, error, _ in run_ranks(RANKS, play, "late", UNEQUAL, 3):
        assert error is None and step == 5, error


@on_ranks(RANKS)
@impatient
def test_slow_rank_before_the_first_pass_causes_no_error() -> None:
    chain = build(Chain(UNEQUAL), dist.group.WORLD)
    for late in (False, True):
        if late and dist.get_rank() == 0:
            time.sleep(0.5)
        with FullyShardedDataParallel.summon_full_params(chain):
            pass


@on_ranks(2)
def test_counts_of_destroyed_groups_are_not_compared() -> None:
    """The counts of a divergence stay posted for a while, also where the program makes a new group meanwhile."""
    rank, group = dist.get_rank(), dist.new_group()
    first_uses, passes = Calls(group, TREES), Calls(group, "a tree")
    first_uses.began([1 + rank], "is about to begin the first pass or call of a model")
    passes.began([3 - rank], "runs the backward")
    if rank == 0:
        passes.post()
    dist.barrier()
    if rank == 1:
        assert "The ranks do not make the same calls" in str(first_uses.difference())
    dist.barrier()
    dist.destroy_process_group(group)
    later = Calls(dist.new_group(), TREES)
    if rank == 0:
        later.began([1], "is about to begin the first pass or call of a model")
        assert later.difference() is None
    dist.barrier()


@on_ranks(2)
@impatient
def test_an_interrupted_first_use_is_not_held_against_ranks_that_did_not_come() -> None:
    """Rank 0 is ahead only until it is interrupted; later rank 1 is ahead in another call."""
    group, rank = new_group(), dist.get_rank()
    lane, saves = Lane.of(group, torch.device("cpu")), Calls(group, BESIDE)
    if rank == 0:
        interrupt = mock.patch.object(lane.arrivals, "slow", side_effect=KeyboardInterrupt)
        with interrupt, pytest.raises(KeyboardInterrupt):
            lane.begin("the first pass or call of a model")
    saves.began([1 + rank], "has called fsdp.checkpoint.save()")
    saves.post()
    dist.barrier()
    assert saves.difference() is None
    dist.barrier()


# Actions of one rank, and whether the next model is synchronized from rank 0.
BEFORE_ANOTHER = [
    ("swap", False),
    ("skip a unit", True),
    ("one eval more", False),
    ("raise early", False),
    ("raise in backward", True),
    ("no backward", False),
    ("no backward", True),
]


def new_model(group: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return build(Chain(UNEQUAL), group, **options)


def three_steps(model: Any) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model)
        optimizer.step()
    return torch.cat([param.detach() for param in model.parameters()])


@pytest.mark.parametrize("transport", ["auto", "native", "direct"])
@on_ranks(RANKS)
@impatient
def test_new_model_after_divergence_trains_to_the_same_bits(transport: str) -> None:
    """Whether the ranks noticed the divergence or not. Situations alternate between transports."""
    os.environ["FSDP_COLLECTIVES"] = transport
    found, expected = list[str](), three_steps(new_model(new_group()))
    turns = {"auto": BEFORE_ANOTHER[::2], "native": BEFORE_ANOTHER[1::2], "direct": BEFORE_ANOTHER[::3]}
    for odd, synchronized in turns[transport]:
        group = new_group(12.0)
        model = new_model(group)
        with contextlib.suppress(RuntimeError):
            train(model)
            train(model)
            STEPS[odd if dist.get_rank() == ODD else "train"](model)
        del model
        model = new_model(group, sync_module_states=synchronized)
        if not torch.equal(three_steps(model), expected):
            found.append(odd)
    assert found == []


@on_ranks(RANKS)
@impatient
def test_a_rank_that_connects_slowly_after_a_divergence_is_waited_for() -> None:
    """Peers that already use the new connections do not mistake it for a rank that waits at a later meeting."""
    os.environ["FSDP_COLLECTIVES"] = "native"
    group, connect = new_group(), native.make_group

    def connect_slowly(*args: Any) -> Any:
        made = connect(*args)
        time.sleep(0 if dist.get_rank() == 0 else 1)
        return made

    with contextlib.suppress(RuntimeError):
        model = new_model(group)
        train(model)
        STEPS["raise in backward" if dist.get_rank() == ODD else "train"](model)
    del model
    with mock.patch.object(native, "make_group", connect_slowly):
        train(new_model(group, sync_module_states=True))
    assert Lane.of(group).carrier.number == 1, Lane.of(group).carrier.number


@on_ranks(RANKS)
@impatient
def test_passes_before_a_divergence_are_not_compared_after_the_ranks_have_met() -> None:
    """Two ranks, whose last passes differ, wait for the third before the first pass of the next model."""
    os.environ["FSDP_COLLECTIVES"] = "native"
    group, ask = new_group(), Lane.ask

    def ask_late(lane: Lane, label: str, *args: Any, **options: Any) -> Any:
        time.sleep(1 if dist.get_rank() == 0 and label == "agree on the layout" else 0)
        return ask(lane, label, *args, **options)

    with contextlib.suppress(RuntimeError):
        model = new_model(group)
        train(model)
        STEPS["no backward" if dist.get_rank() == ODD else "train"](model)
    del model
    with mock.patch.object(Lane, "ask", ask_late):
        train(new_model(group))


@impatient
def error_of_a_model_on_some_ranks(deviation: str) -> str:
    """Build a model in a group while the odd rank synchronizes another, raises, or exits."""
    group = new_group(1.0 if deviation == "nothing" else PATIENT)
    train(new_model(group))
    odd = dist.get_rank() == ODD
    if odd and deviation == "ends":
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        if odd and deviation == "nothing":
            raise RuntimeError(deviation)
        train(new_model(group, sync_module_states=odd))
    return str(caught.value)


def test_new_model_on_some_ranks_is_an_error() -> None:
    for error in run_ranks(RANKS, error_of_a_model_on_some_ranks, "synchronizes"):
        assert "do not make the same calls: rank 0 is about to begin the first" in error, error
        assert "rank 1 is about to begin a model with the values of rank 0" in error
    for error in run_ranks(RANKS, error_of_a_model_on_some_ranks, "nothing")[::2]:
        assert "timed out: within 1 s rank 1 did not come" in error, error
    first, died, last = run_fresh(RANKS, error_of_a_model_on_some_ranks, "ends")
    assert died == Died(3)
    assert all(
        "the process of rank 1 has ended" in error and "make a new process group" in error for error in (first, last)
    )


# Calls that rank 0 alone makes after the last step of rank 1, and their names in errors.
AT_THE_END: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "step": (lambda model, folder: train(model), "gather the root unit"),
    "state_dict": (lambda model, folder: model.state_dict(), CALLS["state_dict"][1]),
    "save": (
        lambda model, folder: checkpoint.save(folder, model, process_group=model.process_group, progress=False),
        "fsdp.checkpoint.save()",
    ),
}


@impatient
def calls_of_the_last_rank(folder: Path) -> dict[str, str]:
    models = {name: build(Chain(UNEQUAL), new_group()) for name in AT_THE_END}
    for model in models.values():
        train(model)
    if dist.get_rank() == 1:
        os._exit(0)
    return {name: first_error(models[name], partial(call, folder=folder)) for name, (call, _) in AT_THE_END.items()}


def test_a_call_after_the_end_of_another_rank_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """A rank with fewer batches ends, while another trains on, gathers the state, or saves."""
    errors, died = run_fresh(2, calls_of_the_last_rank, tmp_path / "saved")
    assert died == Died(0)
    for name, error in errors.items():
        assert AT_THE_END[name][1] in error and "the process of rank 1 has ended" in error, error
        assert "left out" in error and "fsdp.join(model, loader)" in error, error
    assert not (tmp_path / "saved").exists()


@impatient
def reports_of_a_waiting_rank() -> list[str | None]:
    """Return reports on a peer that waits at the store with as many collectives issued, and with fewer."""
    group = new_group()
    train(new_model(group))
    lane = Lane.of(group)
    arrivals, issued = lane.arrivals, lane._progress()
    reports = []
    for less in (0, 1):
        if dist.get_rank() == ODD:
            arrivals.board.post("here", [arrivals.count, "a model", [issued[0] - less, *issued[1:]], True])
        dist.barrier()
        reports.append(arrivals.gone_on(issued))
        dist.barrier()
    return [*reports, arrivals.gone_on(issued, lambda: False), arrivals.gone_on(issued, lambda: True)]


def test_rank_that_is_ahead_is_not_reported_as_diverged() -> None:
    words = "rank 1 is about to begin a model"
    assert run_ranks(RANKS, reports_of_a_waiting_rank)[::2] == [[None, words, words, None]] * 2


@on_ranks(2)
@impatient
def test_training_resumes_after_one_rank_alone_has_saved(tmp_path: Path) -> None:
    """The rank learns in its call, which is beside the training, that the peer is in a pass."""
    model = build(Chain(UNEQUAL), new_group(), use_orig_params=True)
    train(model)
    with pytest.raises(RuntimeError):
        if dist.get_rank() == 0:
            checkpoint.save(tmp_path, model, progress=False)
        train(model)
    for _ in range(2):
        train(model)
        model.state_dict()
    assert Lane.of(model.process_group)._history.meetings == 1
