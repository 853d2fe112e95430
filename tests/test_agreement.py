"""Ranks that diverge: an error in words on every rank, instead of a hang, an abort or wrong numbers.

Most tests let one rank of three deviate, over a group of the test's own, which is unusable afterwards. Where all
ranks are alive they have to find out by themselves, long before a collective times out. They inspect the remaining
ranks more often than usual (`impatient`), so that the tests take less time.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from tests.harness.agreeing import (
    EQUAL,
    ODD,
    PATIENT,
    RANKS,
    SHORT,
    UNEQUAL,
    WIDTH,
    Block,
    Chain,
    build,
    evaluate,
    first_error,
    impatient,
    new_group,
    summon,
    train,
    train_and_raise,
)
from tests.harness.models import Net
from tests.harness.pool import Died, of_all_ranks, on_ranks, run_fresh
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import wrap
from tests.harness.small import error_of
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

# -- different models ----------------------------------------------------------------------------------------------


def frozen(chain: Chain) -> Chain:
    """Freeze half of a unit, which is then in another bucket."""
    chain.blocks[1].up.requires_grad_(False)
    return chain


def rotated(model: nn.Module) -> nn.Module:
    """Register the last parameter of each module as its first."""
    for module in model.modules():
        for name in [*module._parameters][:-1]:
            module._parameters[name] = module._parameters.pop(name)
    return model


def divided(model: FullyShardedDataParallel) -> FullyShardedDataParallel:
    model.set_gradient_divide_factor(2.0, recurse=True)
    return model


# The odd rank's model, and the error's words for the usual chain and for it.
LAYOUTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "size": (lambda group: build(Chain((5, 7, 12)), group), "unit 'blocks.2'", "162 elements (54 per rank)"),
    "dtype": (lambda group: build(Chain(UNEQUAL).double(), group), "of torch.float32", "of torch.float64"),
    "kept": (lambda group: build(Chain(UNEQUAL), group, SHARD_GRAD_OP), "FULL_SHARD", "SHARD_GRAD_OP"),
    "not sharded": (lambda group: build(Chain(UNEQUAL), group, NO_SHARD), "FULL_SHARD", "NO_SHARD"),
    "fewer units": (lambda group: build(Chain((5, 7)), group), "unit 'blocks.2'", "no such unit"),
    "more units": (lambda group: build(Chain((*UNEQUAL, 5)), group), "no such unit", "unit 'blocks.3'"),
    "order of units": (lambda group: build(Chain((7, 5, 11)), group), "71 elements", "97 elements"),
    "units": (lambda group: wrap(Chain(UNEQUAL), wrap_policy=None, process_group=group), "21 elements", "338 elements"),
    "order of parameters": (lambda group: build(rotated(Chain(UNEQUAL)), group), "weight of shape", "bias of shape"),
    "divisor": (lambda group: divided(build(Chain(UNEQUAL), group)), "reduced in torch.float32", "divided by 2.0"),
    "frozen": (lambda group: build(frozen(Chain(UNEQUAL)), group), "97 elements", "; 49 elements"),
}
FIRST_USES: dict[str, Callable[[Any], None]] = {"train": train, "evaluate": evaluate, "summon": summon}


@pytest.mark.parametrize("use", FIRST_USES)
@on_ranks(RANKS)
def test_different_layouts_raise_at_first_use(use: str) -> None:
    """Every rank raises the same error, which names the first difference, at the first use and at the next."""
    for layout, (make_odd, usual, odd) in [*LAYOUTS.items()][:: 1 if use == "train" else 8]:
        make = make_odd if dist.get_rank() == ODD else partial(build, Chain(UNEQUAL))
        group = new_group()
        model, errors = make(group), []
        for _ in range(2):
            with record_collectives() as log:
                errors.append(first_error(model, FIRST_USES[use]))
            labels = [str(record.label) for record in log.records]
            assert all(label.startswith("agree on ") for label in labels), "data moved before the ranks agreed"
        torch.manual_seed(0)
        train(build(Chain(UNEQUAL), group))  # equal models work afterwards
        assert len({error for errors in of_all_ranks(errors) for error in errors}) == 1, (layout, errors)
        error = errors[0]
        assert error.startswith("the ranks have wrapped different models. The first difference is at unit "), error
        first, second = error.split("rank 0 has ")[1].split("; rank 1 has ")
        assert usual in first and odd in second, error
        assert error.endswith("Build and wrap the same model on every rank"), error


@on_ranks(2)
def test_different_models_raise_before_the_values_of_rank_0_are_sent() -> None:
    """Messages of other sizes would abort the process."""
    make = partial(FullyShardedDataParallel, sync_module_states=True, process_group=new_group())
    error = error_of(make, nn.Linear(4, 4, bias=dist.get_rank() == 0))
    assert "rank 0 has the Linear unit with bias of shape (4,)" in error, error
    assert "rank 1 has the Linear unit with no more parameters" in error, error
    model = make(nn.Linear(4, 4))  # equal models work afterwards
    assert len(set(of_all_ranks(model.state_dict()["weight"].sum().item()))) == 1


@on_ranks(2)
def test_ranks_that_wrap_over_different_groups_hear_which() -> None:
    here, there = groups = new_group(), new_group()
    model = build(Chain(UNEQUAL), groups[dist.get_rank()])
    error = first_error(model, train)
    assert f"over the process group {here.group_name!r}; rank 1" in error, error
    assert f"over the process group {there.group_name!r}. Call" in error, error


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# A step is usual, or the two ranks that share the expert first evaluate or train it alone, or skip it. The third rank
# has an expert of its own, which it always uses.
USES = ["usual", "alone", "skip", "usual", "evaluate alone", "usual", "skip", "alone", "alone", "usual"]


@pytest.mark.parametrize("strategy, way", [(FULL_SHARD, "direct"), (NO_SHARD, "native")])
@on_ranks(RANKS)
def test_group_may_be_used_in_some_steps_only(strategy: ShardingStrategy, way: str) -> None:
    """An expert is called alone, or skipped by the ranks that share it; trees and numbers of units differ."""
    os.environ["FSDP_COLLECTIVES"] = way
    rank, everyone = dist.get_rank(), new_group()
    alone, pair = [new_group(ranks=[r]) for r in range(RANKS)][rank], new_group(ranks=[0, 2])
    shares = rank != ODD
    torch.manual_seed(0)
    expert: Any = Block(5) if shares else Chain(UNEQUAL)
    if not shares:
        expert.head = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(1)
    plain: Any = Net(  # an expert that only some ranks share, between two layers that all ranks share
        lambda m, x: m.tail(m.head(x) if m.skips else m.expert(m.head(x))),
        head=nn.Linear(WIDTH, WIDTH),
        expert=expert,
        tail=nn.Linear(WIDTH, WIDTH),
        skips=False,
    )
    module = copy.deepcopy(plain)
    module.expert = build(module.expert, pair if shares else alone, strategy)
    module.expert.set_gradient_divide_factor(2 if shares else 1, recurse=True)
    module.tail = wrap(module.tail, strategy, process_group=everyone, wrap_policy=None)
    model = wrap(module, strategy, process_group=everyone, wrap_policy=None)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (model, plain)]
    for number, use in enumerate(USES):
        x = torch.full((2, WIDTH), 0.1 * (rank + number))
        found = []
        for m, chain, optimizer in zip((model, plain), (module, plain), optimizers):
            chain.skips = shares and use == "skip"
            if shares and use == "evaluate alone":
                with torch.no_grad():
                    chain.expert(x)
            if shares and use == "alone":
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
        assert found[0] == pytest.approx(found[1], rel=1e-5), f"step {number}: {use}"


# -- changes that all ranks make -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("widths", "raises"), [(EQUAL, True), (UNEQUAL, False)])
@on_ranks(RANKS)
@impatient
def test_ranks_may_change_order_together(widths: tuple[int, ...], raises: bool) -> None:
    """Any order and any exception is allowed if all ranks have it, and losses equal the plain model's."""
    torch.manual_seed(0)
    plain = Chain(widths)
    chain = Chain(widths)
    chain.load_state_dict(plain.state_dict())
    model = build(chain, new_group())
    models = (model, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
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
        sharded, reference = (step(m, optimizer, torch.ones(2, WIDTH)) for m, optimizer in zip(models, optimizers))
        assert sharded == pytest.approx(reference, rel=1e-5)


# -- number of collectives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@on_ranks(RANKS)
def test_agreement_costs_one_collective_per_pass(strategy: ShardingStrategy) -> None:
    """From the third step on; the first step agrees before every collective."""
    model, logs = build(Chain(UNEQUAL), new_group(), strategy), []
    for _ in range(5):
        with record_collectives() as log:
            train(model)
        logs.append(log)
    for log in logs:
        for record in log.records:
            control = str(record.label).startswith("agree ")
            assert control == (record.dtype is torch.int64), record
            if control:
                assert record.function == "all_reduce" and record.reduce_op == "MAX" and record.numel <= 4, record
    labels = [str(label) for label in logs[0].labels()]
    assert labels[0] == "agree on the layout"
    for index, label in enumerate(labels):
        if not label.startswith("agree "):
            assert labels[index - 1] == f"agree to {label}", labels
    for log in logs[2:]:
        agreements = [str(label) for label in log.labels() if str(label).startswith("agree ")]
        assert len(agreements) == (1 if strategy is NO_SHARD else 2), agreements
        assert not any(label.startswith(("agree to gather", "agree to reduce")) for label in agreements), agreements


# -- dead ranks ----------------------------------------------------------------------------------------------------


class Uncaught(BaseException):
    """Uncaught exception, which ends a rank's process."""


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


@impatient
def die_one_by_one(folder: Path) -> None:
    """Let ranks die one by one.

    The last remaining rank dies in step 2 of a group of rank 0, rank 1 and itself, in the manner of `DEATHS`. The
    group's survivors record their errors. Rank 0 remains, and ends with an uncaught exception.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    noted: dict[str, Any] = {"deaths": {}}
    groups = [(death, sorted({0, 1, FRESH - 1 - number})) for number, death in enumerate(DEATHS)]
    for (death, ranks), group in zip(groups, [new_group(SHORT, ranks) for _, ranks in groups]):
        if rank not in ranks:
            continue
        store.set(f"{death.__name__}/{rank}", "here")
        store.wait([f"{death.__name__}/{member}" for member in ranks])
        torch.manual_seed(0)  # ranks have made different numbers of models before
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
    os.dup(int(sys.argv[1]))  # keeps the pipe to the test open until the process has ended
    raise Uncaught


def test_survivors_of_killed_ranks_raise_and_exit(tmp_path: Path) -> None:
    """The error comes within the timeout and names the waiting unit and the ranks that it waits for."""
    ends = run_fresh(FRESH, die_one_by_one, tmp_path)
    assert ends == [Died(1)] + [Died(-signal.SIGKILL)] * len(DEATHS)
    notes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(FRESH)]
    assert time.time() - notes[0]["ended"] < PATIENT, "the interpreter took long to exit"
    for rank, count in ((0, len(DEATHS)), (1, len(DEATHS) - 1)):
        deaths = notes[rank]["deaths"]
        assert list(deaths) == [death.__name__ for death in DEATHS[:count]]
        for name, (step, error, seconds) in deaths.items():
            assert step == (3 if name == die_in_step.__name__ else 2), f"{name}: {error}"
            assert seconds < SHORT + 5, f"{name}: {error}"
            where = "unit '", "the root unit", "at the end of the backward"
            assert any(words in error for words in where), f"{name}: {error}"
            waits = f"rank {rank} waits in the " in error and " for rank" in error
            assert waits or " has ended, and rank " in error, f"{name}: {error}"
