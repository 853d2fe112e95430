"""Ranks that disagree: an error in words on every rank, instead of a hang, an abort or wrong numbers.

Most tests let one rank of three do something else, over a group of the test's own, since it is of no use afterwards.
Where the ranks are all alive they have to find out by themselves, long before a collective times out. They look what
the others do more often than usual (`impatient`), so that the tests take less time.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardingStrategy
from fsdp.comm.versions import ALL_GATHER
from tests.harness import pool
from tests.harness.agreeing import (
    EQUAL,
    FULL_SHARD,
    NO_SHARD,
    ODD,
    OUT_OF_STEP,
    PATIENT,
    RANKS,
    SHARD_GRAD_OP,
    SHORT,
    SIZES,
    STEPS,
    UNEQUAL,
    WIDTH,
    Block,
    Chain,
    build,
    evaluate,
    impatient,
    new_group,
    summon,
    swap,
    train,
    train_and_raise,
)
from tests.harness.models import ZOO
from tests.harness.pool import Died, run_fresh, run_ranks
from tests.harness.process_groups import CollectiveLog, record_collectives
from tests.harness.sharded import wrap

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
    "kept": (lambda group: build(Chain(UNEQUAL), group, SHARD_GRAD_OP), "FULL_SHARD", "SHARD_GRAD_OP"),
    "not sharded": (lambda group: build(Chain(UNEQUAL), group, NO_SHARD), "FULL_SHARD", "NO_SHARD"),
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
    """Every rank raises at first use, whatever that is, and says what differs first; so it does the next time."""
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
    """Differences that no collective depends on, such as names, are no error."""
    renamed = run_ranks(RANKS, train_as, "renamed")
    assert renamed == run_ranks(RANKS, train_as, "chain")
    assert renamed[0][2] < renamed[0][0] / 2


@impatient
def train_reordered(widths: tuple[int, ...]) -> str:
    model = build((Reordered if dist.get_rank() == ODD else Chain)(widths), new_group())
    warnings.filterwarnings("ignore", "The ranks began with different values")  # as modules are made in another order
    with pytest.raises(RuntimeError) as caught:
        train(model)
    return str(caught.value)


@pytest.mark.parametrize("widths", [EQUAL, UNEQUAL])
def test_registration_order(widths: tuple[int, ...]) -> None:
    """Another order of registration: a different layout, or if the sizes do not tell, another order."""
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
    """The layout is the same, since freezing may come later: it is the backward that differs."""
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
    torch.manual_seed(0)
    expert = build(Block(4), pair) if rank < 2 else build(Block(9), alone)
    torch.manual_seed(0)
    train_and_record(wrap(Expert(expert), process_group=everyone, wrap_policy=None))
    if rank != ODD:
        train_and_record(build(Chain(UNEQUAL), ends))
    else:
        logs.append(CollectiveLog())
    single, mixture, partial_ = ([record.label for record in log.records] for log in logs)
    return single, mixture, partial_


def test_groups_that_differ() -> None:
    """A group of one rank asks nothing; experts and their groups may differ; a rank may lack a model."""
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
    """An expert is called alone, or skipped by the ranks that share it; trees and numbers of units differ."""
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
    handles, and which."""
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
    """What the gathers of numbers bring is compared, and zeros from a group that changes nothing agree."""
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
    collectives, none for a single collective, and the store is left alone."""
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
    """A group of 8 ranks in one process, whose collectives do nothing, agrees with itself."""
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
        torch.manual_seed(0)  # not all ranks have made the models before
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
    """Neighbouring ranks hash otherwise; the collectives are the same."""
    if pool.TEMPLATES == 1:
        pytest.skip("all ranks come from one template, as RANK_TEMPLATES says")
    assert all(one["hash"] != other["hash"] for one, other in itertools.pairwise(fresh.notes))
    first = fresh.notes[0]["collectives"]
    assert first and all(noted["collectives"] == first for noted in fresh.notes)


def test_killed_ranks(fresh: Fresh) -> None:
    """The survivors raise in time, with the unit that waited and the last units of the ranks, and end by themselves
    ."""
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
