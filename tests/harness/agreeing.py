"""Loops in which some ranks deviate from their peers in one step, and the models that they train.

A `Row` says what the odd ranks do instead, and what the error of every rank must say. `run_row` runs the loop, which
goes on after the error, and `assert_told` checks the outcome.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType, checkpoint, full_grad
from fsdp.checkpoint import StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from fsdp.comm import threads
from fsdp.comm.transport import channel
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD

RANKS = 3
ODD = 1  # the rank that deviates
WIDTH = 6
EQUAL, UNEQUAL = (5, 5, 5), (5, 7, 11)  # of the units
PATIENT = 30.0  # timeout of collectives where no timeout is expected, in seconds
SHORT = 4.0  # timeout where one is expected
SOON = 10.0  # seconds within which every rank must have an error


F = TypeVar("F", bound=Callable[..., Any])


def impatient(function: F) -> F:
    """Decorate `function` so that waiting ranks check their peers soon."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        patience = mock.patch.object(threads, "PATIENCE", timedelta(seconds=0.1))
        # Memory whose readers diverged is abandoned after this wait.
        with patience, mock.patch.object(channel, "_FOR_READERS", 1):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Units in a variable order under a root with a layer."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for width in widths])
        self.head = nn.Linear(WIDTH, 3)
        self.reset()

    def reset(self) -> None:
        self.requires_grad_(True)
        self.order = list(range(len(self.blocks)))
        self.between: Callable[[int, Tensor], Tensor] = lambda position, x: x  # applied to the input of each unit

    def forward(self, x: Tensor) -> Tensor:
        for position, index in enumerate(self.order):
            x = self.blocks[index](self.between(position, x))
        return self.head(self.between(len(self.order), x))


def fork(widths: tuple[int, ...]) -> Net:
    """Build two units side by side with separate outputs: the caller orders the backwards."""
    return Net(lambda m, x: (m.left(x), m.right(x)), left=Block(widths[0]), right=Block(widths[1]), reset=lambda: None)


def new_group(seconds: float = PATIENT, ranks: list[int] | None = None) -> Any:
    """Create a group that may be broken, of all ranks or of `ranks`. All ranks must call this."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
    dist.barrier()
    _kept.append(group)
    return group


def new_pair(shard_size: int = 2, seconds: float = PATIENT) -> tuple[Any, Any]:
    """Create groups for hybrid sharding that may be broken. All ranks must call this.

    Consecutive ranks shard, ranks of equal position replicate.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = [new_group(seconds, [*range(first, first + shard_size)]) for first in range(0, size, shard_size)]
    replicas = [new_group(seconds, [*range(place, size, shard_size)]) for place in range(shard_size)]
    return shards[rank // shard_size], replicas[rank % shard_size]


_kept: list[Any] = []  # destroying a diverged group waits for timeouts of its last collectives


def build(module: nn.Module, group: Any, strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Any:
    """Wrap `module` over `group` with each block as a unit."""
    return wrap(module, strategy, process_group=group, wrap_policy=ModuleWrapPolicy({Block}), **options)


def train(model: Any) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))


def summon(model: Any, **options: Any) -> None:
    with FullyShardedDataParallel.summon_full_params(model, **options):
        pass


class BadBatchError(Exception):
    """An error of the user's program."""


def fail_at(model: Any, position: int, *, backward: bool = False, error: BaseException | None = None) -> None:
    """Let the next steps of `model` fail before a unit of its chain, or after the backward of that unit."""

    def fail(grad: Tensor | None = None) -> None:
        raise error or BadBatchError("a bad batch")

    def between(at: int, x: Tensor) -> Tensor:
        if at == position and backward:
            x.register_hook(fail)
        elif at == position:
            fail()
        return x

    model.module.between = between


def train_and_raise(model: Any, position: int, *, backward: bool = False) -> None:
    """Run a step that fails in a unit's forward, or after its backward, and catch the failure."""
    fail_at(model, position, backward=backward)
    with pytest.raises(BadBatchError, match="a bad batch"):
        train(model)
    model.module.between = lambda position, x: x


@contextmanager
def raises_soon(expected: type[BaseException] = RuntimeError) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of the block long before a rank that waits would time out."""
    started = time.monotonic()
    with pytest.raises(expected) as caught:
        yield caught
    assert time.monotonic() - started < PATIENT / 2, caught.value


def first_error(model: Any, use: Callable[[Any], Any] = train) -> str:
    """Use the model, which must raise a `RuntimeError`, and return its message."""
    with pytest.raises(RuntimeError) as caught:
        use(model)
    return str(caught.value)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block after some seconds, as Ctrl-C does, and catch it."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- loops ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A loop of steps, in one of which some ranks deviate.

    An action is a list of names of `ACTIONS`, separated by ", ".
    """

    odd: str  # the action of the odd ranks in step `at`
    words: tuple[
        str, ...
    ] = ()  # texts in the error of every rank, except for errors that the odd ranks raise themselves
    at: int = 0  # the first step, or a later one, in an order that the ranks have learned
    ranks: int = RANKS
    odd_ranks: tuple[int, ...] = (ODD,)
    way: str = "auto"  # FSDP_COLLECTIVES
    widths: tuple[int, ...] = UNEQUAL  # of units of equal size, no message has an unexpected size
    strategy: ShardingStrategy = FULL_SHARD
    options: dict[str, Any] = field(default_factory=dict)  # of the model
    usual: str = "train"  # the action in other steps
    others: str = "train"  # the action of the peers in step `at`
    then: str = ""  # the action of all ranks after the step that fails; "stop" ends the loop
    noticed: int = 0  # the number of steps after `at` in which the peers have the error
    silent: bool = False  # whether the odd ranks get their error only in `then`
    seconds: float = PATIENT  # timeout of the group; where it is short, the odd ranks come too late

    def __str__(self) -> str:
        """Return a name for the test."""
        place = f"{self.ranks} ranks {self.way} step {self.at}"
        others = [text for text in (self.others, self.usual) if text != "train"][:1]
        return " - ".join([self.odd, *others, place, *([f"then {self.then}"] if self.then else [])])


class Run:
    """A model with an optimizer in a loop, and a plain replica of it."""

    def __init__(self, row: Row, folder: str, group: Any = None) -> None:
        os.environ["FSDP_COLLECTIVES"] = row.way
        self.row, self.folder = row, folder
        self.group = group or (new_pair() if row.strategy is HYBRID_SHARD else new_group(row.seconds))
        self.new_model()

    def new_model(self, **options: Any) -> None:
        self.model = self.optimizer = None  # the earlier ones are freed first
        torch.manual_seed(0)  # one rank alone may have made more random numbers
        self.plain = (fork if "fork" in self.row.usual else Chain)(self.row.widths)
        options = {"use_orig_params": True, **self.row.options, **options}
        self.model = build(copy.deepcopy(self.plain), self.group, self.row.strategy, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.05, momentum=0.5)

    def outputs(self, model: Any, rank: int | None = None) -> Any:
        return model(torch.full((2, WIDTH), 1.0 + (dist.get_rank() if rank is None else rank)))

    def train(self, *, reverse: bool = False) -> None:
        outputs = self.outputs(self.model)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for output in reversed(outputs) if reverse else outputs:
            output.square().mean().backward()

    def train_plain(self) -> None:
        """Train the replica with the batches of all ranks, in the order of this rank's last step."""
        if isinstance(self.plain, Chain):
            self.plain.order = [*self.model.module.order]
        for rank in range(self.row.ranks):
            outputs = self.outputs(self.plain, rank)
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                (output.square().mean() / self.row.ranks).backward()
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()

    def go_on(self) -> str:
        """Train two steps more; return the first parameter that differs from the plain replica's."""
        for _ in range(2):
            self.train()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.train_plain()
        return self.first_difference()

    def first_difference(self) -> str:
        with FullyShardedDataParallel.summon_full_params(self.model):
            pairs = zip(self.model.module.named_parameters(), self.plain.parameters(), strict=True)
            return next((name for (name, p), q in pairs if not torch.allclose(p, q, rtol=1e-5, atol=1e-6)), "")

    def change_order(self, change: Callable[[list[int]], Any]) -> None:
        change(self.model.module.order)

    def cut_graph(self) -> None:
        self.model.module.between = lambda position, x: x.detach() if position == 1 else x

    def state_dict(self, *, rank0_only: bool = False) -> Any:
        config = FullStateDictConfig(rank0_only=rank0_only)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            return self.model.state_dict()

    def load_from_rank_0(self) -> None:
        config = FullStateDictConfig(rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, config):
            self.model.load_state_dict(self.plain.state_dict())

    def set_optimizer(self) -> None:
        """Load from rank 0 with no communication except that of the call."""
        names = [name for name, _ in self.plain.named_parameters()]
        state = {"state": {}, "param_groups": [{**self.optimizer.state_dict()["param_groups"][0], "params": names}]}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        set_optimizer_state_dict(self.model, optimizer, state, options=options)

    def set_model(self) -> None:
        """Load into a parent module that is not wrapped."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = nn.ModuleList([self.plain]).state_dict()
        set_model_state_dict(nn.ModuleList([self.model]), state, options=options)

    def freeze(self) -> None:
        self.model.module.blocks[1].requires_grad_(False)

    def save(self, function: Callable[..., Any] = checkpoint.save) -> None:
        done = function(self.folder, self.model, self.optimizer, process_group=self.group)
        if function is checkpoint.async_save:
            done.result()

    def load(self) -> None:
        checkpoint.load(self.folder, self.model, self.optimizer, process_group=self.group)


ACTIONS: dict[str, Callable[[Run], Any]] = {
    "train": Run.train,
    "eval": lambda run: evaluate(run.model),
    "forward": lambda run: run.outputs(run.model),
    "nothing": lambda run: None,
    "fork": Run.train,
    "fork reversed": lambda run: run.train(reverse=True),
    # changes of the next step
    "swap": lambda run: run.change_order(lambda order: order.insert(0, order.pop(1))),
    "skip unit 1": lambda run: run.change_order(lambda order: order.pop(1)),
    "skip unit 2": lambda run: run.change_order(lambda order: order.pop(2)),
    "only unit 0": lambda run: run.change_order(lambda order: order.__delitem__(slice(1, None))),
    "only unit 1": lambda run: run.change_order(lambda order: order.__setitem__(slice(None), [1])),
    "repeat unit 0": lambda run: run.change_order(lambda order: order.insert(1, 0)),
    "cut the graph": Run.cut_graph,
    "freeze unit 1": Run.freeze,
    "fail at 0": lambda run: fail_at(run.model, 0),
    "fail at 1": lambda run: fail_at(run.model, 1),
    "fail at 2": lambda run: fail_at(run.model, 2),
    "fail at the head": lambda run: fail_at(run.model, 3),
    "fail in backward": lambda run: fail_at(run.model, 1, backward=True),
    "run out of memory": lambda run: fail_at(run.model, 1, error=torch.OutOfMemoryError("no memory")),
    "destroy the group": lambda run: dist.destroy_process_group(run.group),
    "cast": lambda run: run.model.double(),
    "cast back": lambda run: run.model.float(),
    "interrupt backward": lambda run: fail_at(run.model, 1, backward=True, error=KeyboardInterrupt()),
    # models
    "new model": Run.new_model,
    "new model from rank 0": lambda run: run.new_model(sync_module_states=True),
    "another model": lambda run: evaluate(build(Chain((5,)), run.group)),
    "a second model": lambda run: train(build(Chain(UNEQUAL), run.group)),
    # calls
    "sleep": lambda run: time.sleep(0.5),
    "state_dict": Run.state_dict,
    "state_dict for rank 0": lambda run: run.state_dict(rank0_only=True),
    "state_dict of the inner module": lambda run: run.model.module.state_dict(),
    "optim_state_dict": lambda run: FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer),
    "get_optimizer": lambda run: get_optimizer_state_dict(run.model, torch.optim.Adam(run.model.parameters())),
    "set_optimizer": Run.set_optimizer,
    "set_model": Run.set_model,
    "summon": lambda run: summon(run.model),
    "summon with_grads": lambda run: summon(run.model, with_grads=True),
    "load_state_dict": lambda run: nn.Sequential(run.model).load_state_dict(nn.Sequential(run.plain).state_dict()),
    "load from rank 0": Run.load_from_rank_0,
    "full_grad": lambda run: full_grad(next(run.model.parameters())),
    "clip": lambda run: run.model.clip_grad_norm_(1e6),
    "reduce_gradients": lambda run: run.model.reduce_gradients(),
    "save": Run.save,
    "save over all ranks": lambda run: checkpoint.save(run.folder, run.model, progress=False),
    "async_save": lambda run: run.save(checkpoint.async_save),
    "load": Run.load,
}

# The names in errors of calls that all ranks have to make.
CALLS = {
    "state_dict": "state_dict() (FULL_STATE_DICT) of the root unit",
    "state_dict for rank 0": "state_dict() (FULL_STATE_DICT, rank0_only) of the root unit",
    "state_dict of the inner module": "state_dict() of a module in the root unit",
    "optim_state_dict": "optim_state_dict() of the root unit",
    "get_optimizer": "get_optimizer_state_dict() of the root unit",
    "set_optimizer": "set_optimizer_state_dict() of the root unit",
    "set_model": "set_model_state_dict() of the root unit",
    "summon": "summon_full_params() of the root unit",
    "load_state_dict": "load_state_dict() of the root unit",
    "load from rank 0": "load_state_dict() of the root unit",
    "full_grad": "full_grad() of the root unit",
    "clip": "clip_grad_norm_(norm_type=2.0) of the root unit",
    "reduce_gradients": "reduce_gradients() of the root unit",
}


class Told(NamedTuple):
    """An error of one step on one rank."""

    text: str
    seconds: float
    own: bool  # the rank's own failure


@dataclass
class Outcome:
    """The loop on one rank."""

    errors: dict[int, Told] = field(default_factory=dict)  # by step
    wrong: str = ""  # the first parameter that differs from the plain replica's


FAILURES = (BadBatchError, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt)


@impatient
def run_row(row: Row, folder: str, fault: Callable[[], Any] = contextlib.nullcontext) -> Outcome:
    """Run the loop on this rank; a step that fails is left out. The odd ranks are under `fault` in step `at`."""
    run, outcome, rank = Run(row, folder), Outcome(), dist.get_rank()
    for step in range(row.at + row.noticed + 3):
        odd = step == row.at and rank in row.odd_ranks
        action = row.odd if odd else row.others if step == row.at else row.usual
        started = time.monotonic()
        try:
            with fault() if odd else contextlib.nullcontext():
                perform(run, action)
            run.optimizer.step()
            if {"train", "fork"} & set(action.split(", ")):
                run.train_plain()
        except (RuntimeError, *FAILURES) as error:
            own = isinstance(error, FAILURES)
            outcome.errors[step] = Told(f"{type(error).__name__}: {error}", time.monotonic() - started, own)
        if run.model is not None:  # its constructor may have raised
            run.optimizer.zero_grad()
            run.model.module.reset()
        if step == row.at + row.noticed and row.then == "stop":
            return outcome
        if step == row.at + row.noticed and row.then:
            try:
                perform(run, row.then)
            except RuntimeError:
                if not (row.silent and rank in row.odd_ranks):
                    raise
                perform(run, row.then)
            run.optimizer.zero_grad()
    outcome.wrong = run.first_difference()
    return outcome


def perform(run: Run, action: str) -> None:
    for name in action.split(", "):
        ACTIONS[name](run)


def assert_told(row: Row, outcomes: Sequence[Outcome]) -> None:
    """Assert that every rank has an error soon, in one step alone, that says `row.words`, and trains right after it."""
    __tracebackhide__ = True
    for rank, outcome in enumerate(outcomes):
        story = f"rank {rank} of {row}: {outcome}"
        noticed = row.at + row.noticed
        told = [error for step, error in outcome.errors.items() if step in (row.at, noticed)]
        assert told or (row.silent and rank in row.odd_ranks), f"no error in step {noticed}: {story}"
        assert len(told) == len(outcome.errors), f"errors in other steps: {story}"
        for error in told:
            assert error.seconds < SOON, f"the error came after {error.seconds:.1f} s: {story}"
            if error.own or (row.silent and rank in row.odd_ranks):
                continue
            missing = [word for word in row.words if word not in error.text]
            assert not missing, f"{missing} is missing: {story}"
            named = ranks_named_in(error.text)
            assert named & set(row.odd_ranks) and named - set(row.odd_ranks), f"one side is not named: {story}"
        assert not outcome.wrong, f"{outcome.wrong} is wrong after the error: {story}"


def ranks_named_in(text: str) -> set[int]:
    """Return the ranks in "rank 1" and "ranks 0-2 and 4"."""
    named = set[int]()
    for several in re.findall(r"\branks? (\d+(?:(?:-|, | and )\d+)*)", text):
        for span in re.split(", | and ", several):
            first, _, last = span.partition("-")
            named.update(range(int(first), int(last or first) + 1))
    return named
