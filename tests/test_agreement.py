"""Ranks that disagree: an error in words on every rank, instead of a hang, an abort or wrong numbers.

Most tests let one rank of three do something else, over a group of the test's own, since it is of no use afterwards.
Where the ranks are all alive they have to find out by themselves, long before a collective times out. They look what
the others do more often than usual (`impatient`), so that the tests take less time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.checkpoint.load_state_dict as loading
import fsdp.checkpoint.optim_state as optim_state
from fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from fsdp.checkpoint import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fsdp.comm import waiting
from fsdp.comm.versions import ALL_GATHER
from fsdp.runtime.agreement import Agreement
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import ZOO
from tests.harness.pool import Died, run_fresh, run_ranks
from tests.harness.process_groups import CollectiveLog, record_collectives
from tests.harness.sharded import wrap

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
RANKS = 3
ODD = 1  # the rank that does something else
WIDTH = 6
EQUAL, UNEQUAL = (5, 5, 5), (5, 7, 11)  # of the units
PATIENT = 30.0  # seconds that a collective may take where nothing should end that way
SHORT = 4.0  # where it has to
OUT_OF_STEP = "Forward order differs across ranks"


F = TypeVar("F", bound=Callable[..., Any])


def impatient(function: F) -> F:
    """`function` with ranks that soon look what the others do while they wait."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        usual, waiting.PATIENCE = waiting.PATIENCE, timedelta(seconds=0.1)
        try:
            return function(*args, **kwargs)
        finally:
            waiting.PATIENCE = usual

    return run  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Units one after the other, in an order that can be changed, and a root with a layer of its own."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for width in widths])
        self.head = nn.Linear(WIDTH, 3)
        self.order = list(range(len(widths)))
        self.between: Callable[[int, Tensor], Tensor] = lambda position, x: x  # applied to what each unit gets

    def forward(self, x: Tensor) -> Tensor:
        for position, index in enumerate(self.order):
            x = self.blocks[index](self.between(position, x))
        return self.head(x)


class Fork(nn.Module):
    """Two units side by side, with an output each: the order of their backwards is the caller's."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.left, self.right = Block(widths[0]), Block(widths[1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def new_group(seconds: float = PATIENT, ranks: list[int] | None = None) -> Any:
    """A group that may be broken, of all ranks or of `ranks`; all ranks have to make it."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
    dist.barrier()
    _kept.append(group)
    return group


_kept: list[Any] = []  # the end of a group whose ranks parted waits until its last collectives have timed out


def build(module: nn.Module, group: Any, strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Any:
    """`module` wrapped over `group`, each block a unit."""
    return wrap(module, strategy, process_group=group, wrap_policy=ModuleWrapPolicy({Block}), **options)


def train(model: Any) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, WIDTH))


def summon(model: Any) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        pass


# -- different models ----------------------------------------------------------------------------------------------


def frozen(chain: Chain) -> Chain:
    """Half of a unit is frozen, and so in another bucket."""
    chain.blocks[1].up.requires_grad_(False)
    return chain


# What the odd rank builds, and what the error says of it and of the usual chain. Listed in the units' order: the root,
# then the blocks.
LAYOUTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "size": (lambda group: build(Chain((5, 7, 12)), group), "unit 'blocks.2'", "162 elements (54 per rank)"),
    "dtype": (lambda group: build(Chain(UNEQUAL).double(), group), "of torch.float32", "of torch.float64"),
    "kept": (lambda group: build(Chain(UNEQUAL), group, SHARD_GRAD_OP), "resharded after", "kept after"),
    "not sharded": (lambda group: build(Chain(UNEQUAL), group, NO_SHARD), "resharded after", "not sharded"),
    "fewer units": (lambda group: build(Chain((5, 7)), group), "unit 'blocks.2'", "no such unit"),
    "more units": (lambda group: build(Chain((*UNEQUAL, 5)), group), "no such unit", "unit 'blocks.3'"),
    "order of units": (lambda group: build(Chain((7, 5, 11)), group), "71 elements", "97 elements"),
    "units": (lambda group: wrap(Chain(UNEQUAL), wrap_policy=None, process_group=group), "21 elements", "338 elements"),
    "frozen": (lambda group: build(frozen(Chain(UNEQUAL)), group), "97 elements", "; 49 elements"),
}
FIRST_USES: dict[str, Callable[[Any], None]] = {"train": train, "evaluate": evaluate, "summon": summon}


def use_first(layout: str, use: str) -> list[str]:
    """The errors of the first uses."""
    make = LAYOUTS[layout][0] if dist.get_rank() == ODD else partial(build, Chain(UNEQUAL))
    model = make(new_group())
    errors = []
    for _ in range(2):
        with record_collectives() as log, pytest.raises(RuntimeError) as caught:
            FIRST_USES[use](model)
        said = [str(record.label) for record in log.records]
        assert all(label.startswith("agree on ") for label in said), "data moved before the ranks agreed"
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize(
    "layout, use", [(layout, "train") for layout in LAYOUTS] + [("size", "evaluate"), ("size", "summon")]
)
def test_different_layouts(layout: str, use: str) -> None:
    """Every rank raises at first use, whatever that is, and says what differs first; so it does the next time (R36)."""
    by_rank = run_ranks(RANKS, use_first, layout, use)
    errors = {error for errors in by_rank for error in errors}
    assert len(errors) == 1, errors
    error = errors.pop()
    assert error.startswith("the ranks have wrapped different models. The first difference is at unit "), error
    _, usual, odd = LAYOUTS[layout]
    first, second = error.split("rank 0 has ")[1].split("; rank 1 has ")
    assert usual in first and odd in second, error


class Renamed(Chain):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(widths)
        self.layers = self.blocks
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Reordered(Chain):
    """The same units run in the same order, but registered in another one."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(widths)
        blocks = list(self.blocks)
        self.blocks = nn.ModuleList([blocks[1], blocks[0], *blocks[2:]])
        self.order = [1, 0, 2]


def train_as(kind: str) -> list[float]:
    """The losses of some steps; the odd rank has a chain of another kind."""
    torch.manual_seed(0)
    chain = {"renamed": Renamed, "chain": Chain}[kind](UNEQUAL) if dist.get_rank() == ODD else Chain(UNEQUAL)
    return losses_of(build(chain, new_group()))


def losses_of(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_names_may_differ() -> None:
    """What the collectives do not depend on is no error, and changes nothing (AA4)."""
    renamed = run_ranks(RANKS, train_as, "renamed")
    assert renamed == run_ranks(RANKS, train_as, "chain")
    assert renamed[0][2] < renamed[0][0] / 2


@impatient
def train_reordered(widths: tuple[int, ...]) -> str:
    model = build((Reordered if dist.get_rank() == ODD else Chain)(widths), new_group())
    with pytest.raises(RuntimeError) as caught:
        train(model)
    return str(caught.value)


@pytest.mark.parametrize("widths", [EQUAL, UNEQUAL])
def test_registration_order(widths: tuple[int, ...]) -> None:
    """Another order of registration: a different layout, or if the sizes do not tell, another order (R36)."""
    for error in run_ranks(RANKS, train_reordered, widths):
        assert error.startswith(OUT_OF_STEP if widths == EQUAL else "the ranks have wrapped different models"), error
        assert "unit 'blocks.0'" in error and (widths != EQUAL or "unit 'blocks.1'" in error), error


@impatient
def train_frozen_whole() -> str:
    chain = Chain(EQUAL)
    if dist.get_rank() == ODD:
        chain.blocks[1].requires_grad_(False)
    model = build(chain, new_group())
    with pytest.raises(RuntimeError) as caught:
        train(model)
    return str(caught.value)


def test_unit_frozen_on_one_rank() -> None:
    """The layout is the same, since freezing may come later: it is the backward that differs (AA4)."""
    for error in run_ranks(RANKS, train_frozen_whole):
        assert error.startswith(OUT_OF_STEP) and "in the backward" in error and "reduce unit 'blocks.1'" in error, error


class Expert(nn.Module):
    """A root's own layer, and a unit that is each group's own."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.head, self.expert = nn.Linear(WIDTH, WIDTH), expert

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.head(x))


def train_experts() -> tuple[list[str | None], list[str | None], list[str | None]]:
    """Labels of what the model of a single rank, a mixture of experts, and a model that one rank lacks say."""
    rank, everyone = dist.get_rank(), new_group()
    alone = [new_group(ranks=[r]) for r in range(RANKS)][rank]
    pair, ends = new_group(ranks=[0, 1]), new_group(ranks=[0, 2])
    logs: list[CollectiveLog] = []

    def train_and_record(model: Any) -> None:
        with record_collectives() as log:
            for _ in range(3):
                train(model)
                evaluate(model)
        logs.append(log)

    train_and_record(build(Chain(UNEQUAL if rank else EQUAL), alone))
    expert = build(Block(4), pair) if rank < 2 else build(Block(9), alone)
    train_and_record(wrap(Expert(expert), process_group=everyone, wrap_policy=None))
    if rank != ODD:
        train_and_record(build(Chain(UNEQUAL), ends))
    else:
        logs.append(CollectiveLog())
    single, mixture, partial_ = ([record.label for record in log.records] for log in logs)
    return single, mixture, partial_


def test_groups_that_differ() -> None:
    """A group of one rank asks nothing; experts and their groups may differ; a rank may lack a model (AA4)."""
    results = run_ranks(RANKS, train_experts)
    for rank, (single, mixture, lacking) in enumerate(results):
        assert single == []
        assert mixture.count("agree on the layout") == (2 if rank < 2 else 1)
        assert mixture.count("reduce unit 'expert'") == (3 if rank < 2 else 0)
        assert lacking.count("agree on the layout") == (0 if rank == ODD else 1)


class Mixture(nn.Module):
    """An expert that only some ranks share, between two layers that all of them do."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.head, self.expert, self.tail = nn.Linear(WIDTH, WIDTH), expert, nn.Linear(WIDTH, WIDTH)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.tail(x if self.skips else self.expert(x))


# What the ranks do in each step: the usual, an evaluation or a step of the expert alone where two ranks share it, or a
# step without it on these two. The third rank has an expert of its own, which it always uses.
DOINGS = ["usual", "alone", "skip", "usual", "evaluate alone", "usual", "skip", "alone", "alone", "usual"]


def train_mixture(strategy: ShardingStrategy, way: str) -> list[tuple[float, float]]:
    """Losses of the mixture and of a plain one whose gradients are averaged by hand."""
    os.environ["FSDP_COLLECTIVES"] = way
    rank, everyone = dist.get_rank(), new_group()
    alone, pair = [new_group(ranks=[r]) for r in range(RANKS)][rank], new_group(ranks=[0, 2])
    shares = rank != ODD
    torch.manual_seed(0)
    expert: Any = Block(5) if shares else Chain(UNEQUAL)
    if not shares:
        expert.head = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(1)
    plain = Mixture(expert)
    module = copy.deepcopy(plain)
    module.expert = build(module.expert, pair if shares else alone, strategy)
    module.tail = wrap(module.tail, strategy, process_group=everyone, wrap_policy=None)
    model = wrap(module, strategy, process_group=everyone, wrap_policy=None)
    losses = []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (model, plain)]
    for step, what in enumerate(DOINGS):
        x = torch.full((2, WIDTH), 0.1 * (rank + step))
        found = []
        for m, chain, optimizer in zip((model, plain), (module, plain), optimizers):
            chain.skips = shares and what == "skip"
            if shares and what == "evaluate alone":
                with torch.no_grad():
                    chain.expert(x)
            if shares and what == "alone":
                chain.expert(x).square().mean().backward()
            loss = m(x).square().mean()
            loss.backward()
            if m is plain:
                for name, param in plain.named_parameters():
                    if param.grad is not None and (shares or not name.startswith("expert")):
                        group = pair if name.startswith("expert") else everyone
                        dist.all_reduce(param.grad, group=group)
                        param.grad /= group.size()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append((found[0], found[1]))
    os.environ["FSDP_COLLECTIVES"] = "auto"
    return losses


@pytest.mark.parametrize("strategy, way", [(FULL_SHARD, "native"), (FULL_SHARD, "direct"), (NO_SHARD, "native")])
def test_group_that_is_used_now_and_then(strategy: ShardingStrategy, way: str) -> None:
    """An expert is called alone, or skipped by the ranks that share it; trees and numbers of units differ (AA4)."""
    for rank, losses in enumerate(run_ranks(RANKS, train_mixture, strategy, way)):
        for step, (sharded, plain) in enumerate(losses):
            assert sharded == pytest.approx(plain, rel=1e-5), f"rank {rank}, step {step}: {DOINGS[step]}"


# -- debug level DETAIL --------------------------------------------------------------------------------------------


@contextmanager
def detail() -> Iterator[None]:
    """Groups made inside check each collective."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@impatient
def train_in_detail(reduce_unused: bool) -> tuple[list[CollectiveLog], str]:
    """What is called in an evaluation, two training steps and another evaluation; then the error of an odd first step
    of another model."""
    with detail():
        model = build(frozen(Chain(UNEQUAL)), new_group(), reduce_unused=reduce_unused)
        logs = []
        for training in (False, True, True, False):
            model.train(training)
            with record_collectives() as log:
                (train if training else evaluate)(model)
            logs.append(log)
        model = build(Chain(UNEQUAL), new_group())
        with pytest.raises(RuntimeError) as caught:
            (swap if dist.get_rank() == ODD else train)(model)
    return logs, str(caught.value)


@pytest.mark.parametrize("reduce_unused", [False, True])
def test_detail(reduce_unused: bool) -> None:
    """At DETAIL, each gather of the first training forward alone is preceded by two gathers of numbers: how many
    handles, and which (AA21, Y54)."""
    for logs, error in run_ranks(RANKS, train_in_detail, reduce_unused):
        assert error.startswith(OUT_OF_STEP) and "unit 'blocks.0'" in error and "unit 'blocks.1'" in error, error
        numbers = [
            [record for record in log.records if record.op == "all_gather" and record.dtype is torch.int64]
            for log in logs
        ]
        assert [len(records) for records in numbers] == [0, 8, 0, 0]
        calls = [record for record in logs[1].records if record.op == "all_gather" or record.dtype is not torch.int64]
        gathers = [index for index, record in enumerate(calls) if str(record.label).startswith("gather")]
        for index in gathers[:3] + gathers[4:5]:  # the fourth is of the same unit's other bucket
            before = calls[index - 2 : index]
            handles = 2 if calls[index].label == "gather unit 'blocks.1'" else 1
            assert [record.label for record in before] == [f"agree to {calls[index].label}"] * 2
            assert [record.numel for record in before] == [RANKS, RANKS * handles]
        assert not any(str(record.label).startswith("agree to gather") for record in calls[gathers[4] :])


def test_detail_compares_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gathers of numbers bring is compared, and zeros from a group that changes nothing agree (AA20, AA21)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with detail():
            train(build(Chain(UNEQUAL), None))
            model = build(Chain(UNEQUAL), None)
            real = getattr(dist, ALL_GATHER)

            def gather(output: Tensor, *args: Any, **kwargs: Any) -> Any:
                assert output.dtype is not torch.int64 or not output.any()
                work = real(output, *args, **kwargs)
                if output.dtype is torch.int64:
                    output.copy_(torch.tensor([1, 1, 1, 2])[: output.numel()])
                return work

            monkeypatch.setattr(dist, ALL_GATHER, gather)
            with pytest.raises(RuntimeError, match=rf"^{OUT_OF_STEP}.*rank 3 gathers handles \[2\]"):
                train(model)
    finally:
        dist.destroy_process_group()


# -- another order -------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How a run ended on one rank."""

    step: int  # the last
    error: str | None
    seconds: float  # that the last step took


Step = Callable[[Any], Any]


def swap(model: Any) -> None:
    model.module.order[:2] = model.module.order[1], model.module.order[0]
    train(model)


def swap_once(model: Any) -> None:
    swap(model)
    model.module.order[:2] = model.module.order[1], model.module.order[0]


def skip_unit(model: Any) -> None:
    del model.module.order[1]
    train(model)


def skip_last_unit(model: Any) -> None:
    del model.module.order[2]
    train(model)


def repeat_unit(model: Any) -> None:
    model.module.order.insert(1, 0)
    train(model)


def cut_graph(model: Any) -> None:
    model.module.between = lambda position, x: x.detach() if position == 1 else x
    train(model)


def swap_and_evaluate(model: Any) -> None:
    model.module.order[:2] = model.module.order[1], model.module.order[0]
    evaluate(model)


def evaluate_too(model: Any) -> None:
    evaluate(model)
    train(model)


def forward_too(model: Any) -> None:
    model(torch.ones(2, WIDTH))
    train(model)


def train_and_raise(model: Any, position: int, *, backward: bool = False) -> None:
    """A step that fails in a unit's forward, or after its backward; whoever called it deals with that."""

    def fail(grad: Tensor | None = None) -> None:
        raise ValueError("a bad batch")

    def between(at: int, x: Tensor) -> Tensor:
        if at == position and backward:
            x.register_hook(fail)
        elif at == position:
            fail()
        return x

    model.module.between = between
    with pytest.raises(ValueError, match="a bad batch"):
        train(model)
    model.module.between = lambda position, x: x


def raise_and_go_on(model: Any, position: int, *, backward: bool = False) -> None:
    train_and_raise(model, position, backward=backward)
    train(model)


def step_fork(model: Any, *, reverse: bool = False) -> None:
    outputs = model(torch.ones(2, WIDTH))
    for output in reversed(outputs) if reverse else outputs:
        output.sum().backward()


STEPS: dict[str, Step] = {
    "swap": swap,
    "swap once": swap_once,
    "skip a unit": skip_unit,
    "skip the last unit": skip_last_unit,
    "repeat a unit": repeat_unit,
    "cut the graph": cut_graph,
    "swap in eval": swap_and_evaluate,
    "eval": evaluate,
    "one eval more": evaluate_too,
    "one forward more": forward_too,
    "one summon more": lambda model: (summon(model), train(model)),
    "another model": lambda model: (model(torch.ones(2, WIDTH)), evaluate(build(Chain((5,)), model.process_group))),
    "nothing": lambda model: None,
    "no backward": lambda model: model(torch.ones(2, WIDTH)),
    "raise early": partial(raise_and_go_on, position=1),
    "raise late": partial(raise_and_go_on, position=2),
    "raise in backward": partial(raise_and_go_on, position=1, backward=True),
    "raise and stop": partial(train_and_raise, position=1),
    "late": lambda model: (time.sleep(0.5), train(model)),
    "train": train,
    "fork": step_fork,
    "fork reversed": partial(step_fork, reverse=True),
}


@impatient
def play(
    odd: str,
    widths: tuple[int, ...],
    at: int,
    *,
    others: str = "train",
    usual: str = "train",
    strategy: ShardingStrategy = FULL_SHARD,
    way: str = "auto",
    seconds: float = PATIENT,
) -> Outcome:
    """Usual steps, until in step `at` the odd rank does one thing and the others another."""
    os.environ["FSDP_COLLECTIVES"] = way
    group = new_group(seconds)
    model = build((Fork if usual == "fork" else Chain)(widths), group, strategy)
    for step in range(at + 3):
        started = time.monotonic()
        name = usual if step != at else odd if dist.get_rank() == ODD else others
        try:
            STEPS[name](model)
        except RuntimeError as error:
            return Outcome(step, str(error), time.monotonic() - started)
    return Outcome(step, None, 0.0)


def assert_out_of_step(outcomes: list[Outcome], at: int, *words: str) -> None:
    """Every rank was told, in step `at`, what the ranks do differently, and not by a timeout."""
    __tracebackhide__ = True
    for rank, (step, error, seconds) in enumerate(outcomes):
        assert error is not None, f"rank {rank} noticed nothing in {step + 1} steps"
        assert OUT_OF_STEP in error and "timed out" not in error, f"rank {rank}: {error}"
        assert step == at and seconds < PATIENT / 2, (
            f"rank {rank} noticed in step {step}, after {seconds:.1f} s: {error}"
        )
        for word in words:
            assert word in error, f"rank {rank}: no word of {word!r} in: {error}"


SIZES = pytest.mark.parametrize("widths", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
FIRST_OR_LATER = pytest.mark.parametrize("at", [0, 3])


@SIZES
@FIRST_OR_LATER
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_another_order(strategy: ShardingStrategy, widths: tuple[int, ...], at: int) -> None:
    """One rank runs two units the other way round (R33). Every rank raises within the step and names both."""
    outcomes = run_ranks(RANKS, play, "swap", widths, at, strategy=strategy)
    assert_out_of_step(outcomes, at, "unit 'blocks.0'", "unit 'blocks.1'")


@SIZES
@FIRST_OR_LATER
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
    "raise early": ("rank 1 gave up the forward of the root unit",),
    "raise late": (),  # in the first step "gave up", later one pass further: all gathers were under way
    "raise in backward": ("rank 1 gave up the backward",),
}


@SIZES
@FIRST_OR_LATER
@pytest.mark.parametrize("odd", DEVIATIONS)
def test_different_units(odd: str, widths: tuple[int, ...], at: int) -> None:
    """One rank skips a branch, or has another one, or runs once more (R34)."""
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
def test_fd25_call_on_one_rank(reduce_unused: bool) -> None:
    """FD25: an error on all ranks that names the call that one rank made, never an abort."""
    for rank, found in enumerate(run_ranks(2, call_alone, reduce_unused)):
        for name, when, seconds, error in found:
            where = f"rank {rank}, {name}, {when}: {error}"
            assert seconds < PATIENT / 2 and f"rank 0 runs the {CALLS[name][1]}" in error, where
            assert " runs the forward of the root unit" in error, where


@impatient
def fail_alike(reduce_unused: bool) -> list[str]:
    """Each kind of failure on all ranks, each kind of call after it, and then the next steps, which are right."""
    done = []
    for error in (torch.OutOfMemoryError("no memory"), KeyboardInterrupt()):
        for backward in (False, True):
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
def test_fd21_calls_after_a_failure_of_all_ranks(reduce_unused: bool) -> None:
    """FD21: the emergency save, and everything else, works after what all ranks failed at."""
    for done in run_ranks(2, fail_alike, reduce_unused):
        assert done == 4 * list(CALLS)


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
    look = Agreement.slow

    def look_once(self: Agreement) -> None:
        look(self)
        raise KeyboardInterrupt

    def look_and_tell(self: Agreement) -> None:
        store.set("looked", "")
        look(self)

    if dist.get_rank() == 1:
        store.wait(["looked"], timedelta(seconds=SHORT))
    else:
        with mock.patch.object(Agreement, "slow", look_once), pytest.raises(KeyboardInterrupt):
            state_dict_by(False)(model)
    with mock.patch.object(Agreement, "slow", look_and_tell):
        state: dict[str, Tensor] = state_dict_by(False)(model)
    train(model)
    return state


@pytest.mark.parametrize("farther", [0, 1])
def test_fd21_calls_after_failures_that_are_not_alike(farther: int) -> None:
    """FD21: a rank that has failed itself accuses nobody, and waits until all have come and issued the same."""
    torch.manual_seed(0)
    expected = Chain(UNEQUAL).state_dict()
    for state in run_ranks(2, fail_apart, farther):
        assert all(torch.equal(state[key], value) for key, value in expected.items())


@impatient
def interrupt_a_call(call: str) -> tuple[str, float]:
    """Rank 1 is interrupted in the middle of a call, where rank 0 waits to compare, collect or hear what there is."""
    torch.manual_seed(0)
    plain = Chain(UNEQUAL)
    group = new_group()
    model = build(copy.deepcopy(plain), group)
    optimizer = torch.optim.Adam(model.parameters())
    train(model)
    optimizer.step()
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    where, function, make = {
        "load_state_dict()": (loading, "failures_in", lambda: model.load_state_dict(plain.state_dict())),
        "optim_state_dict()": (
            optim_state,
            "all_gather_object",
            lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        ),
        "optim_state_dict_to_load()": (
            loading,
            "broadcast_object",
            lambda: FullyShardedDataParallel.scatter_full_optim_state_dict(full, model, optim=optimizer, group=group),
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
    if interrupted:
        with pytest.raises(RuntimeError, match="rank 1 gave up"):  # that the other one was told, too
            make()
    make()
    train(model)
    return str(caught.value), seconds


@pytest.mark.parametrize("call", ["load_state_dict()", "optim_state_dict()", "optim_state_dict_to_load()"])
def test_rank_that_is_interrupted_in_a_call(call: str) -> None:
    """The other one is told while it waits, with the name of the call; then the call works."""
    (error, seconds), _ = run_ranks(2, interrupt_a_call, call)
    assert f"rank 1 gave up the {call} of the root unit" in error and seconds < PATIENT / 2, error


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


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@pytest.mark.parametrize("good", [1, 3])
def test_fd20_rank_that_the_others_have_passed(strategy: ShardingStrategy, good: int) -> None:
    """FD20: the others had the gather that they waited for from what the odd rank gathered ahead, and are in their
    backward while it waits, in its forward, to be joined in another one."""
    outcomes = run_ranks(2, call_the_other_unit, strategy, good)
    assert_out_of_step(outcomes, 0, "unit 'l1'", "unit 'l2'")


@impatient
def drop_layers() -> tuple[list[tuple[int, int]], float, float]:
    """How much is kept of an order that changes at every step: in memory, and in the store."""
    group = new_group()
    model = build(Chain((5,) * 6), group)
    model.check_is_root()
    (agreement_,) = model._join_context().passes._by_group.values()
    store = dist.distributed_c10d._world.pg_map[group][1]
    random = torch.Generator().manual_seed(0)
    kept = []
    for _ in range(120):
        order = torch.randperm(6, generator=random)[: int(torch.randint(1, 7, (1,), generator=random))]
        model.module.order = order.tolist()
        train(model)
        kept.append((len(agreement_._record), store.num_keys()))
    return kept, float(agreement_._longest_record), 0.0


def test_fd34_order_that_changes_at_every_step() -> None:
    """FD34: what is remembered of it is bounded, and so is what is left in the store."""
    for kept, limit, _ in run_ranks(2, drop_layers):
        records, keys = zip(*kept)
        assert max(records) <= limit and records[-1] == limit, records
        assert max(keys[60:]) <= max(keys[:60]) + 4, keys


def test_another_model() -> None:
    """One rank uses a new model where the others go on with theirs: its first question meets theirs."""
    for step, error, seconds in run_ranks(RANKS, play, "another model", UNEQUAL, 2, seconds=SHORT):
        assert step == 2 and seconds < SHORT + 5 and error is not None


# What a rank does before it stays away, and what the other one of the pair then waits for, or hears.
AWAY = {
    "nothing": ((0, 1), ("gather the root unit", "Last collectives of rank 0: ")),
    "no backward": ((1, 2), ("in the backward", "Last collectives of rank 0: ")),
    "raise and stop": ((2, 0), ("unit 'blocks.", "rank 0 gave up the forward of the root unit")),
}


@impatient
def stay_away() -> Outcome:
    """Each rank stays away from the group that it has with another, and waits in the one that it has with the third."""
    rank = dist.get_rank()
    models = {}
    for name, (pair, _) in AWAY.items():
        group = new_group(SHORT, sorted(pair))
        if rank in pair:
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
    """It has one batch fewer, or raised before or in its backward: the other fails within the timeout (R34)."""
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


# -- what is no disagreement ---------------------------------------------------------------------------------------


@impatient
def wander(widths: tuple[int, ...], raises: bool) -> list[tuple[float, float]]:
    """Losses of a sharded and a plain chain while all ranks change together what they run."""
    torch.manual_seed(0)
    plain = Chain(widths)
    chain = Chain(widths)
    chain.load_state_dict(plain.state_dict())
    model = build(chain, new_group())
    models = (model, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
    losses = []
    orders = [[0, 1, 2], [1, 0, 2], [1, 0, 2], [2, 1], [0, 1, 2], [0, 0, 2, 1], [2], [0, 1, 2], [0, 1, 2]]
    for number, order in enumerate(orders):
        chain.order, plain.order = list(order), list(order)
        if raises and number in (2, 4, 7):
            train_and_raise(model, len(order) - 1, backward=number == 4)
            optimizers[0].zero_grad()
        if number % 3 == 1:
            evaluate(model)
            chain.order.reverse()
            evaluate(model)
            chain.order.reverse()
            summon(model)
        found = []
        for m, optimizer in zip(models, optimizers):
            loss = m(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append((found[0], found[1]))
    return losses


@pytest.mark.parametrize("raises", [False, True], ids=["", "with exceptions"])
@SIZES
def test_all_ranks_change_together(widths: tuple[int, ...], raises: bool) -> None:
    """Any order will do, and any exception, as long as it is every rank's; and the values are right."""
    for losses in run_ranks(RANKS, wander, widths, raises):
        for sharded, plain in losses:
            assert sharded == pytest.approx(plain, rel=1e-5)


# -- what it costs -------------------------------------------------------------------------------------------------


class CountingStore:
    """A store, and how often its methods were called from Python."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def counted(*args: Any) -> Any:
            self.calls += 1
            return method(*args)

        return counted


@contextmanager
def counted_store(group: Any) -> Iterator[CountingStore]:
    met = dist.distributed_c10d._world.pg_map
    backend, store = met[group]
    met[group] = (backend, CountingStore(store))
    try:
        yield met[group][1]
    finally:
        met[group] = (backend, store)


@impatient
def cost(strategy: ShardingStrategy) -> tuple[list[CollectiveLog], list[int]]:
    group = new_group()
    model = build(Chain(UNEQUAL), group, strategy)
    logs, calls = [], []
    with counted_store(group) as store:
        for _ in range(5):
            before = store.calls
            with record_collectives() as log:
                train(model)
            logs.append(log)
            calls.append(store.calls - before)
        with pytest.raises(RuntimeError):  # that the store would be counted
            STEPS["skip a unit" if dist.get_rank() == ODD else "train"](model)
        calls.append(store.calls)
    return logs, calls


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
def test_cost(strategy: ShardingStrategy) -> None:
    """The first step asks before every collective; from the third on there is a question for each pass that has any
    collectives, none for a single collective, and the store is left alone (AA20)."""
    for logs, calls in run_ranks(RANKS, cost, strategy):
        for log in logs:
            for record in log.records:
                control = str(record.label).startswith("agree ")
                assert control == (record.dtype is torch.int64), record
                if control:
                    assert record.function == "all_reduce" and record.reduce_op == "MAX" and record.numel <= 3, record
        labels = [str(label) for label in logs[0].labels()]
        assert labels[0] == "agree on the layout"
        for index, label in enumerate(labels):
            if not label.startswith("agree "):
                assert labels[index - 1] == f"agree to {label}", labels
        for log in logs[2:]:
            asked = [str(label) for label in log.labels() if str(label).startswith("agree ")]
            assert len(asked) == (1 if strategy is NO_SHARD else 2), asked
            assert not any(label.startswith(("agree to gather", "agree to reduce")) for label in asked), asked
        *steps, at_last = calls
        assert not any(steps[2:]) and at_last > 0, calls


def test_group_that_changes_nothing() -> None:
    """A group of 8 ranks in one process, whose collectives do nothing, agrees with itself (AA20)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
            model = build(Chain(UNEQUAL), None, strategy)
            with record_collectives() as log:
                for _ in range(3):
                    train(model)
                    evaluate(model)
                    model.module.order.reverse()
                summon(model)
            train_and_raise(model, 1)
            train(model)
            assert (
                log.count("reduce_scatter" if strategy is not NO_SHARD else "all_reduce", "reduce unit 'blocks.1'") == 3
            )
            for record in log.records:
                assert record.op == "all_reduce" or not str(record.label).startswith("agree"), record
    finally:
        dist.destroy_process_group()


# -- dead ranks ----------------------------------------------------------------------------------------------------


class Uncaught(BaseException):
    """Ends a rank's process as an exception that nobody catches."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_forward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.module.between = lambda position, x: die() if position == 1 else x
    train(model)


def die_in_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.module.between = lambda position, x: x if position != 1 else x.register_hook(lambda grad: die()) and x
    train(model)


def die_in_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: die())
    train(model)
    optimizer.step()


DEATHS = [die_in_forward, die_in_backward, die_in_step]
FRESH = 1 + len(DEATHS)


def record_zoo(name: str) -> list[tuple[str, str, int]]:
    case = ZOO[name]
    model = wrap(case)
    with record_collectives() as log:
        for step in range(3):
            case.loss(model, case.make_batch(step, 2)).backward()
    return [(str(record.label), record.op, record.nbytes) for record in log.records]


@impatient
def die_one_by_one(folder: Path) -> None:
    """Every rank notes its collectives. Then the last of the ranks that are left dies in step 2 of a group of rank 0, 1
    and itself, in the manner of `DEATHS`. The others of the group note what they saw. Rank 0 is left, and ends with an
    exception that nobody catches."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    noted: dict[str, Any] = {"hash": hash("a string"), "collectives": record_zoo("encoder-decoder"), "deaths": {}}
    groups = [(death, sorted({0, 1, FRESH - 1 - number})) for number, death in enumerate(DEATHS)]
    for (death, ranks), group in zip(groups, [new_group(SHORT, ranks) for _, ranks in groups]):
        if rank not in ranks:
            continue
        store.set(f"{death.__name__}/{rank}", "here")
        store.wait([f"{death.__name__}/{other}" for other in ranks])
        model = build(Chain(UNEQUAL), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank == ranks[-1]:
            (folder / f"{rank}.json").write_text(json.dumps(noted))
        try:
            for step in range(5):
                started = time.monotonic()
                if step == 2 and rank == ranks[-1]:
                    death(model, optimizer)
                train(model)
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            noted["deaths"][death.__name__] = (step, str(error), time.monotonic() - started)
    (folder / f"{rank}.json").write_text(json.dumps({**noted, "ended": time.time()}))
    os.dup(int(sys.argv[1]))  # the pipe to the test closes when the process has ended, and not a moment before
    raise Uncaught


class Fresh(NamedTuple):
    """What became of processes of the test's own."""

    ends: list[Any]
    notes: list[dict[str, Any]]
    now: float


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("notes")
    ends = run_fresh(FRESH, die_one_by_one, folder)
    return Fresh(ends, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(FRESH)], time.time())


def test_hash_seeds(fresh: Fresh) -> None:
    """Neighbouring ranks hash otherwise; the collectives are the same (R36)."""
    assert all(one["hash"] != other["hash"] for one, other in itertools.pairwise(fresh.notes))
    first = fresh.notes[0]["collectives"]
    assert first and all(noted["collectives"] == first for noted in fresh.notes)


def test_killed_ranks(fresh: Fresh) -> None:
    """The survivors raise in time, with the unit that waited and the last units of the ranks, and end by themselves
    (R35)."""
    assert fresh.ends == [Died(1)] + [Died(-signal.SIGKILL)] * len(DEATHS)
    assert fresh.now - fresh.notes[0]["ended"] < PATIENT, "the interpreter took long to exit"
    for rank, count in ((0, len(DEATHS)), (1, len(DEATHS) - 1)):
        deaths = fresh.notes[rank]["deaths"]
        assert list(deaths) == [death.__name__ for death in DEATHS[:count]]
        for name, (step, error, seconds) in deaths.items():
            assert step == (3 if name == die_in_step.__name__ else 2), f"{name}: {error}"
            assert seconds < SHORT + 5, f"{name}: {error}"
            assert "unit '" in error or "the root unit" in error, f"{name}: {error}"
            assert "Last collectives of rank 0: " in error and "rank 1: " in error, f"{name}: {error}"
