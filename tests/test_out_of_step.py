"""Ranks that do different things: every rank is told soon, in words, and they go on together afterwards."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.checkpoint.optim_agree as optim_agree
import fsdp.placement.redistribute as redistribute
from fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from fsdp.checkpoint import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fsdp.comm import consensus
from fsdp.comm.lane import Lane
from tests.harness.agreeing import (
    EQUAL,
    FULL_SHARD,
    NO_SHARD,
    ODD,
    PATIENT,
    RANKS,
    SHARD_GRAD_OP,
    SHORT,
    SIZES,
    STEPS,
    UNEQUAL,
    Block,
    Chain,
    Outcome,
    assert_out_of_step,
    build,
    impatient,
    new_group,
    play,
    summon,
    train,
    train_and_raise,
)
from tests.harness.pool import Died, run_fresh, run_ranks


def first_and_later(turn: int = 0) -> list[Any]:
    """In the first step with units of one kind of sizes, and in a later one with those of the other; by turns."""
    sizes = [("equal", EQUAL), ("unequal", UNEQUAL)]
    return [
        pytest.param(sizes[(turn + n) % 2][1], at, id=f"{sizes[(turn + n) % 2][0]}-{at}") for n, at in ((0, 0), (1, 3))
    ]


@pytest.mark.parametrize(
    ("strategy", "widths", "at"),
    [
        pytest.param(strategy, *param.values, id=f"{strategy}-{param.id}")
        for turn, strategy in enumerate([FULL_SHARD, NO_SHARD])
        for param in first_and_later()[turn:][:1]
    ],
)
def test_another_order(strategy: ShardingStrategy, widths: tuple[int, ...], at: int) -> None:
    """One rank runs two units the other way round. Every rank raises within the step and names both."""
    outcomes = run_ranks(RANKS, play, "swap", widths, at, strategy=strategy)
    assert_out_of_step(outcomes, at, "unit 'blocks.0'", "unit 'blocks.1'")


@pytest.mark.parametrize(("widths", "at"), first_and_later())
def test_another_order_in_backward(widths: tuple[int, ...], at: int) -> None:
    outcomes = run_ranks(RANKS, play, "fork reversed", widths, at, others="fork", usual="fork")
    assert_out_of_step(outcomes, at, "in the backward", "unit 'left'", "unit 'right'")


@SIZES
def test_another_order_in_eval(widths: tuple[int, ...]) -> None:
    """Units that were gathered ahead, in the usual order, are no reason to fail; the next step is."""
    outcomes = run_ranks(RANKS, play, "swap in eval", widths, 3, others="eval")
    assert_out_of_step(outcomes, 4, "unit 'blocks.0'", "unit 'blocks.1'")


@pytest.mark.parametrize("odd, at", [("swap", 0), ("swap", 3), ("skip the last unit", 3)])
def test_another_order_by_direct_exchange(odd: str, at: int) -> None:
    """Messages carry tags: what does not match is waited for, and the ranks look around meanwhile."""
    outcomes = run_ranks(RANKS, play, odd, UNEQUAL, at, way="direct")
    assert_out_of_step(outcomes, at, "unit 'blocks.1'", "unit 'blocks.0'" if odd == "swap" else "unit 'blocks.2'")


# What the odd rank does, and what every rank's error has to speak of.
DEVIATIONS = {
    "skip a unit": ("unit 'blocks.1'",),
    "skip the last unit": ("unit 'blocks.2'",),
    "repeat a unit": ("unit 'blocks.0'",),
    "cut the graph": ("in the backward", "unit 'blocks.0'", "end the pass"),
    "one eval more": ("rank 1 runs the forward of the root unit", "runs the backward"),
    "one forward more": ("rank 1 runs the forward of the root unit", "runs the backward"),
    "raise early": ("rank 1 failed in the forward of the root unit",),
    "raise late": (),  # in the first step "failed in", later one pass further: all gathers were under way
    "raise in backward": ("rank 1 failed in the backward",),
}


@pytest.mark.parametrize(
    ("odd", "widths", "at"),
    [
        pytest.param(odd, *param.values, id=f"{odd}-{param.id}")
        for turn, odd in enumerate(DEVIATIONS)
        for param in first_and_later(turn // 2)[turn % 2 :][:1]
    ],
)
def test_different_units(odd: str, widths: tuple[int, ...], at: int) -> None:
    """One rank skips a branch, or has another one, or runs once more."""
    assert_out_of_step(run_ranks(RANKS, play, odd, widths, at), at, *DEVIATIONS[odd])


def state_dict_by(rank_0: bool) -> Callable[[Any], Any]:
    """``state_dict()``, for rank 0 alone or on all ranks."""

    def call(model: Any) -> Any:
        config = FullStateDictConfig(rank0_only=rank_0)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return model.state_dict()

    return call


def optim_state_dict(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def get_optimizer(model: Any) -> Any:
    return get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))


def set_optimizer(model: Any) -> None:
    """What takes no communication but that of the call: rank 0 has it all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in Chain(UNEQUAL).named_parameters()]
    state = {"state": {}, "param_groups": [{**optimizer.state_dict()["param_groups"][0], "params": names}]}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def set_model(model: Any) -> None:
    """Into what is not wrapped itself."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(nn.ModuleList([model]), nn.ModuleList([Chain(UNEQUAL)]).state_dict(), options=options)


# What all ranks have to call, how errors name it, and whether the ranks have done it before.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "state_dict": (state_dict_by(False), "state_dict() (FULL_STATE_DICT) of the root unit"),
    "state_dict for rank 0": (state_dict_by(True), "state_dict() (FULL_STATE_DICT, rank0_only) of the root unit"),
    "optim_state_dict": (optim_state_dict, "optim_state_dict() of the root unit"),
    "get_optimizer": (get_optimizer, "get_optimizer_state_dict() of the root unit"),
    "set_optimizer": (set_optimizer, "set_optimizer_state_dict() of the root unit"),
    "set_model": (set_model, "set_model_state_dict() of the root unit"),
    "summon": (summon, "summon_full_params() of the root unit"),
    "load": (lambda model: model.load_state_dict(Chain(UNEQUAL).state_dict()), "load_state_dict() of the root unit"),
    "clip": (lambda model: model.clip_grad_norm_(1.0), "clip_grad_norm_(norm_type=2.0) of the root unit"),
}


@impatient
def call_alone(reduce_unused: bool) -> list[tuple[str, str, float, str]]:
    """What is raised where one rank makes a call, and the others go on with the next forward; after steps that did not
    have it, and after steps that all had it. Then whether they go on."""
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
            started = time.monotonic()
            with pytest.raises(RuntimeError) as caught:
                if dist.get_rank() == 0:
                    call(model)
                train(model)
            found.append((name, "after it" if habit else "first", time.monotonic() - started, str(caught.value)))
    return found


@pytest.mark.parametrize("reduce_unused", [False, True])
def test_call_on_one_rank(reduce_unused: bool) -> None:
    """An error on all ranks that names the call that one rank made, never an abort."""
    for rank, found in enumerate(run_ranks(2, call_alone, reduce_unused)):
        for name, when, seconds, error in found:
            where = f"rank {rank}, {name}, {when}: {error}"
            assert seconds < PATIENT / 2 and f"rank 0 has called {CALLS[name][1]}" in error, where
            assert " runs the forward of the root unit" in error, where


@impatient
def fail_alike(reduce_unused: bool) -> list[str]:
    """Each kind of failure on all ranks, in one of the passes, each kind of call after it, and then the next steps,
    which are right."""
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
    return done


@pytest.mark.parametrize("reduce_unused", [False, True])
def test_calls_after_a_failure_of_all_ranks(reduce_unused: bool) -> None:
    """The emergency save, and everything else, works after what all ranks failed at."""
    for done in run_ranks(2, fail_alike, reduce_unused):
        assert done == 2 * list(CALLS)


@impatient
def fail_apart(farther: int) -> dict[str, Tensor]:
    """Each rank fails by itself, rank `farther` a unit later; rank 0 looks around, is interrupted, and comes again."""
    group = new_group()
    store = dist.distributed_c10d._world.pg_map[group][1]
    torch.manual_seed(0)
    model = build(Chain(UNEQUAL), group)
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
        state: dict[str, Tensor] = state_dict_by(False)(model)
    train(model)
    return state


@pytest.mark.parametrize("farther", [0, 1])
def test_calls_after_failures_that_are_not_alike(farther: int) -> None:
    """A rank that has failed itself accuses nobody, and waits until all have come and issued the same."""
    torch.manual_seed(0)
    expected = Chain(UNEQUAL).state_dict()
    for state in run_ranks(2, fail_apart, farther):
        assert all(torch.equal(state[key], value) for key, value in expected.items())


@impatient
def interrupt_a_call(call: str) -> tuple[str, float]:
    """Rank 1 is interrupted in the middle of a call, where rank 0 waits to compare, collect or hear what there is."""
    torch.manual_seed(0)
    plain = Chain(UNEQUAL)
    model = build(copy.deepcopy(plain), new_group())
    optimizer = torch.optim.Adam(model.parameters())
    train(model)
    optimizer.step()
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    where, function, make = {
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
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if interrupted:
            stack.enter_context(mock.patch.object(where, function, side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt if interrupted else RuntimeError) as caught:
            make()
    seconds = time.monotonic() - started
    make()
    train(model)
    return str(caught.value), seconds


@pytest.mark.parametrize(
    "call", ["load_state_dict()", "optim_state_dict()", "full optim_state_dict()", "optim_state_dict_to_load()"]
)
def test_rank_that_is_interrupted_in_a_call(call: str) -> None:
    """The other one is told while it waits, with the name of the call; then the call works."""
    (error, seconds), _ = run_ranks(2, interrupt_a_call, call)
    assert f"rank 1 failed in the {call.removeprefix('full ')} of the root unit" in error and seconds < PATIENT / 2, (
        error
    )


class Late(nn.Module):
    """A root that uses its layer last, so that it is the last unit that comes."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = Block(5), Block(5)
        self.swapped = False

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(x) if self.swapped else self.l1(x)


@impatient
def call_the_other_unit(strategy: ShardingStrategy, good: int) -> Outcome:
    model = build(Late(), new_group(), strategy, use_orig_params=False)
    for _ in range(good):
        train(model)
    model.module.swapped = dist.get_rank() == ODD
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(model)
    return Outcome(0, str(caught.value), time.monotonic() - started)


@pytest.mark.parametrize(("strategy", "good"), [(FULL_SHARD, 1), (SHARD_GRAD_OP, 3)])
def test_rank_that_the_others_have_passed(strategy: ShardingStrategy, good: int) -> None:
    """The others had the gather that they waited for from what the odd rank gathered ahead, and are in their
    backward while it waits, in its forward, to be joined in another one."""
    outcomes = run_ranks(2, call_the_other_unit, strategy, good)
    assert_out_of_step(outcomes, 0, "unit 'l1'", "unit 'l2'")


@impatient
def drop_layers() -> tuple[list[tuple[int, int]], float, float]:
    """How much is kept of an order that changes at every step: in memory, and in the store."""
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
    return kept, float(history._capacity), 0.0


def test_order_that_changes_at_every_step() -> None:
    """The record of the passes and the keys in the store are bounded."""
    for kept, limit, _ in run_ranks(2, drop_layers):
        records, keys = zip(*kept)
        assert max(records) <= limit and records[-1] == limit, records
        assert max(keys[40:]) <= max(keys[:40]) + 4, keys


def test_another_model() -> None:
    """One rank uses a new model where the others go on with theirs: its first question meets theirs."""
    for step, error, seconds in run_ranks(RANKS, play, "another model", UNEQUAL, 2, seconds=SHORT):
        assert step == 2 and seconds < SHORT + 5 and error is not None
        assert "rank 1 is about to begin the first pass or call of a model" in error


# What a rank does before it stays away, and what the other one of the pair then waits for, or hears (global ranks).
AWAY = {
    "nothing": ((0, 1), ("gather the root unit", "Last collectives of rank 0: ")),
    "no backward": ((1, 2), ("in the backward", "Last collectives of rank 1: ")),
    "raise and stop": ((2, 0), ("unit 'blocks.", "rank 0 failed in the forward of the root unit")),
}


@impatient
def stay_away() -> Outcome:
    """Each rank stays away from the group that it has with another, and waits in the one that it has with the third."""
    rank = dist.get_rank()
    models = {}
    for name, (pair, _) in AWAY.items():
        group = new_group(SHORT, sorted(pair))
        if rank in pair:
            torch.manual_seed(0)  # the third rank does without
            models[name] = build(Chain(UNEQUAL), group)
            for _ in range(2):
                train(models[name])
    for name, ((_, odd), _) in AWAY.items():
        if rank == odd:
            STEPS[name](models[name])
    (waiting,) = (models[name] for name, ((waits, _), _) in AWAY.items() if rank == waits)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train(waiting)
    return Outcome(2, str(caught.value), time.monotonic() - started)


def test_rank_that_stays_away() -> None:
    """It has one batch fewer, or raised before or in its backward: the other fails within the timeout."""
    for (_, error, seconds), ((waits, _), waiting_for) in zip(run_ranks(RANKS, stay_away), AWAY.values(), strict=True):
        assert seconds < SHORT + 5, f"rank {waits}: {error}"
        assert error is not None and all(words in error for words in waiting_for), error


def test_late_rank() -> None:
    """Slow is not wrong."""
    for step, error, _ in run_ranks(RANKS, play, "late", UNEQUAL, 3):
        assert error is None and step == 5, error


@impatient
def show_late() -> None:
    chain = build(Chain(UNEQUAL), dist.group.WORLD)
    for late in (False, True):
        if late and dist.get_rank() == 0:
            time.sleep(0.5)
        with FullyShardedDataParallel.summon_full_params(chain):
            pass


def test_late_rank_before_the_first_pass() -> None:
    """Nor then."""
    run_ranks(RANKS, show_late)


# What one rank does with a model, and whether the next one is wrapped with the values of rank 0.
BEFORE_ANOTHER = [
    ("swap", False),
    ("skip a unit", True),
    ("one eval more", False),
    ("raise early", False),
    ("raise in backward", True),
    ("no backward", False),
    ("no backward", True),
]


@impatient
def begin_another(way: str) -> list[str]:
    """The situations after which a new model on the same group does not train as one on a fresh group does; all of them
    where the ranks choose the way, and by turns where it is given."""
    os.environ["FSDP_COLLECTIVES"] = way
    found, expected = list[str](), three_steps(new_model(new_group()))
    turns = {"auto": BEFORE_ANOTHER, "native": BEFORE_ANOTHER[::2], "direct": BEFORE_ANOTHER[1::2]}
    for odd, synchronized in turns[way]:
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
    return found


def new_model(group: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return build(Chain(UNEQUAL), group, **options)


def three_steps(model: Any) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model)
        optimizer.step()
    return torch.cat([param.detach() for param in model.parameters()])


@pytest.mark.parametrize("way", ["auto", "native", "direct"])
def test_another_model_after_ranks_were_out_of_step(way: str) -> None:
    """It begins where the ranks have come together, whether they noticed or not, and trains to the same bits."""
    assert run_ranks(RANKS, begin_another, way) == [[]] * RANKS


@impatient
def begin_alone(how: str) -> str:
    """Something begins in a group, and the odd rank does something else, or nothing, or ends."""
    group = new_group(1.0 if how == "nothing" else PATIENT)
    train(new_model(group))
    odd = dist.get_rank() == ODD
    if odd and how == "ends":
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        if odd and how == "nothing":
            raise RuntimeError(how)
        train(new_model(group, sync_module_states=odd))
    return str(caught.value)


def test_another_model_on_some_ranks() -> None:
    for error in run_ranks(RANKS, begin_alone, "synchronizes"):
        assert "do not make the same calls: rank 0 is about to begin the first" in error, error
        assert "rank 1 is about to begin a model with the values of rank 0" in error
    for error in run_ranks(RANKS, begin_alone, "nothing")[::2]:
        assert "timed out: within 1 s rank 1 did not come" in error, error
    first, died, last = run_fresh(RANKS, begin_alone, "ends")
    assert died == Died(3)
    assert all(
        "the process of rank 1 has ended" in error and "make a new process group" in error for error in (first, last)
    )


@impatient
def wait_at_a_beginning() -> list[str | None]:
    """What a rank is told of another one that waits for it, having issued as much, and less; at the store until all
    have met there, and as they have."""
    group = new_group()
    train(new_model(group))
    lane = Lane.of(group)
    arrivals, issued = lane.arrivals, lane._progress()
    told = []
    for less in (0, 1):
        if dist.get_rank() == ODD:
            arrivals.board.post("here", [arrivals.count, "a model", [issued[0] - less, *issued[1:]], True])
        dist.barrier()
        told.append(arrivals.gone_on(issued))
        dist.barrier()
    return [*told, arrivals.gone_on(issued, lambda: False), arrivals.gone_on(issued, lambda: True)]


def test_a_rank_that_is_ahead_has_not_gone_on() -> None:
    """Slow is not wrong, here either."""
    words = "rank 1 is about to begin a model"
    assert run_ranks(RANKS, wait_at_a_beginning)[::2] == [[None, words, words, None]] * 2
