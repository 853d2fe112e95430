"""Ranks that disagree: an error in words on every rank, instead of a hang, an abort or wrong numbers.

Most tests let one rank of three do something else, over a group of the test's own, since it is of no use afterwards.
Where the ranks are all alive they have to find out by themselves, long before a collective times out.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
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
        assert {record.op for record in log.records} == {"all_reduce"}, "data moved before the ranks agreed"
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


def record_zoo(name: str) -> tuple[int, list[tuple[str, str, int]]]:
    case = ZOO[name]
    model = wrap(case)
    with record_collectives() as log:
        for step in range(3):
            case.loss(model, case.make_batch(step, 2)).backward()
    return hash("a string"), [(str(record.label), record.op, record.nbytes) for record in log.records]


def test_hash_seeds() -> None:
    """Every rank hashes otherwise; the collectives are the same (R36)."""
    (hash0, first), (hash1, second) = run_fresh(2, record_zoo, "encoder-decoder", env={"PYTHONHASHSEED": "random"})
    assert hash0 != hash1
    assert first and first == second


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
    "late": lambda model: (time.sleep(3), train(model)),
    "train": train,
    "fork": step_fork,
    "fork reversed": partial(step_fork, reverse=True),
}


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
        if odd in ("nothing", "no backward", "raise and stop") and step == at and dist.get_rank() == ODD:
            break  # it stays away
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


@pytest.mark.parametrize("at", [0, 2])
def test_another_order_by_direct_exchange(at: int) -> None:
    """Messages carry tags: what does not match times out, and the error has the last units of the ranks."""
    for step, error, _ in run_ranks(RANKS, play, "swap", UNEQUAL, at, way="direct", seconds=SHORT if at else PATIENT):
        assert step == at and error is not None
        assert "unit 'blocks.0'" in error and "unit 'blocks.1'" in error, error


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


def test_summon_on_one_rank() -> None:
    assert_out_of_step(run_ranks(RANKS, play, "one summon more", UNEQUAL, 0), 0, "rank 1 is at gather the root unit")


def test_another_model() -> None:
    """One rank uses a new model where the others go on with theirs: its first question meets theirs."""
    for step, error, seconds in run_ranks(RANKS, play, "another model", UNEQUAL, 2, seconds=SHORT):
        assert step == 2 and seconds < SHORT + 5 and error is not None


@pytest.mark.parametrize(
    "odd, at, waiting_for",
    [("nothing", 2, "gather the root unit"), ("no backward", 2, "backward"), ("raise and stop", 2, "unit 'blocks.")],
)
def test_rank_that_stays_away(odd: str, at: int, waiting_for: str) -> None:
    """It has one batch fewer, or raised before or in its backward: the others fail within the timeout (R34)."""
    outcomes = run_ranks(RANKS, play, odd, UNEQUAL, at, seconds=SHORT)
    for rank, (step, error, seconds) in enumerate(outcomes):
        if rank == ODD:
            assert error is None
            continue
        assert step == at and seconds < SHORT + 5
        assert error is not None and waiting_for in error and "Last collectives of rank 0: " in error, error


def test_late_rank() -> None:
    """Slow is not wrong."""
    for step, error, _ in run_ranks(RANKS, play, "late", UNEQUAL, 3):
        assert error is None and step == 5, error


# -- what is no disagreement ---------------------------------------------------------------------------------------


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
    """The first step asks before every collective; from the third on there are two questions, one for each pass, none
    of them for a single collective, and the store is left alone (AA20)."""
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
            assert len(asked) == 2, asked
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


def outlive(folder: Path) -> None:
    """Rank 2 + i dies in step 2 of a group with ranks 0 and 1, in the manner of `DEATHS[i]`. The two go from group to
    group, leave a note on what they saw, and end with an exception that nobody catches."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    groups = [new_group(SHORT, [0, 1, 2 + number]) for number in range(len(DEATHS))]
    notes = []
    for number, (group, death) in enumerate(zip(groups, DEATHS)):
        if rank not in (0, 1, 2 + number):
            continue
        store.set(f"{number}/{rank}", "here")
        store.wait([f"{number}/{other}" for other in (0, 1, 2 + number)])
        model = build(Chain(UNEQUAL), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for step in range(5):
                started = time.monotonic()
                if step == 2 and rank == 2 + number:
                    death(model, optimizer)
                train(model)
                optimizer.step()
                optimizer.zero_grad()
        except RuntimeError as error:
            notes.append((step, str(error), time.monotonic() - started))
    (folder / f"{rank}.json").write_text(json.dumps({"notes": notes, "ended": time.time()}))
    os.dup(int(sys.argv[1]))  # the pipe to the test closes when the process has ended, and not a moment before
    raise Uncaught


def test_killed_ranks(tmp_path: Path) -> None:
    """The survivors raise in time, with the unit that waited and the last units of the ranks, and end by themselves
    (R35)."""
    ends = run_fresh(2 + len(DEATHS), outlive, tmp_path)
    assert ends == [Died(1), Died(1)] + [Died(-signal.SIGKILL)] * len(DEATHS)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert time.time() - seen["ended"] < PATIENT, "the interpreter took long to exit"
        notes = seen["notes"]
        assert len(notes) == len(DEATHS)
        for death, (step, error, seconds) in zip(DEATHS, notes):
            assert step == (3 if death is die_in_step else 2), f"{death.__name__}: {error}"
            assert seconds < SHORT + 5, f"{death.__name__}: {error}"
            assert "unit '" in error or "the root unit" in error, f"{death.__name__}: {error}"
            assert "Last collectives of rank 0: " in error and "rank 1: " in error, f"{death.__name__}: {error}"
