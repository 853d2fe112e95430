"""Models with a variable order of units, and steps in which one rank deviates from its peers."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.comm import channel, threads
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL_SHARD

RANKS = 3
ODD = 1  # the rank that deviates
WIDTH = 6
EQUAL, UNEQUAL = (5, 5, 5), (5, 7, 11)  # of the units
PATIENT = 30.0  # timeout of collectives where no timeout is expected, in seconds
SHORT = 4.0  # timeout where one is expected
OUT_OF_STEP = "Forward order differs across ranks"


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
        self.order = list(range(len(widths)))
        self.between: Callable[[int, Tensor], Tensor] = lambda position, x: x  # applied to the input of each unit

    def forward(self, x: Tensor) -> Tensor:
        for position, index in enumerate(self.order):
            x = self.blocks[index](self.between(position, x))
        return self.head(x)


def fork(widths: tuple[int, ...]) -> Net:
    """Build two units side by side with separate outputs: the caller orders the backwards."""
    return Net(lambda m, x: (m.left(x), m.right(x)), left=Block(widths[0]), right=Block(widths[1]))


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


def summon(model: Any) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        pass


class Outcome(NamedTuple):
    """The end of a run on one rank."""

    step: int  # the last
    error: str | None
    seconds: float  # of the last step


Step = Callable[[Any], Any]


def swap(model: Any, use: Callable[[Any], Any] = train) -> None:
    model.module.order[:2] = model.module.order[1], model.module.order[0]
    use(model)


def cut_graph(model: Any) -> None:
    model.module.between = lambda position, x: x.detach() if position == 1 else x
    train(model)


def train_and_raise(model: Any, position: int, *, backward: bool = False) -> None:
    """Run a step that fails in a unit's forward, or after its backward, and catch the failure."""

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
    "swap once": lambda model: (swap(model), swap(model, use=lambda model: None)),
    "skip a unit": lambda model: (model.module.order.pop(1), train(model)),
    "skip the last unit": lambda model: (model.module.order.pop(2), train(model)),
    "repeat a unit": lambda model: (model.module.order.insert(1, 0), train(model)),
    "cut the graph": cut_graph,
    "swap in eval": partial(swap, use=evaluate),
    "eval": evaluate,
    "one eval more": lambda model: (evaluate(model), train(model)),
    "one forward more": lambda model: (model(torch.ones(2, WIDTH)), train(model)),
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
    way: str | None = None,
    seconds: float = PATIENT,
    odd_ranks: tuple[int, ...] = (ODD,),
) -> Outcome:
    """Run usual steps until step `at`, in which odd ranks and peers run different actions."""
    if way is not None:
        os.environ["FSDP_COLLECTIVES"] = way
    group = new_pair() if strategy is ShardingStrategy.HYBRID_SHARD else new_group(seconds)
    model = build((fork if usual == "fork" else Chain)(widths), group, strategy)
    for step in range(at + 3):
        started = time.monotonic()
        name = usual if step != at else odd if dist.get_rank() in odd_ranks else others
        try:
            STEPS[name](model)
        except RuntimeError as error:
            return Outcome(step, str(error), time.monotonic() - started)
    return Outcome(step, None, 0.0)


@contextmanager
def raises_soon(expected: type[BaseException] = RuntimeError) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of the block long before a rank that waits would time out."""
    started = time.monotonic()
    with pytest.raises(expected) as caught:
        yield caught
    assert time.monotonic() - started < PATIENT / 2, caught.value


def first_error(model: Any, use: Step = train) -> str:
    """Use the model, which must raise a `RuntimeError`, and return its message."""
    with pytest.raises(RuntimeError) as caught:
        use(model)
    return str(caught.value)


def assert_out_of_step(outcomes: list[Outcome], at: int, *words: str) -> None:
    """Assert that every rank reported the difference in step `at`, without a timeout."""
    __tracebackhide__ = True
    for rank, (step, error, seconds) in enumerate(outcomes):
        assert error is not None, f"rank {rank} raised no error in {step + 1} steps"
        assert OUT_OF_STEP in error and "timed out" not in error, f"rank {rank}: {error}"
        assert step == at and seconds < PATIENT / 2, (
            f"rank {rank} noticed in step {step}, after {seconds:.1f} s: {error}"
        )
        for word in words:
            assert word in error, f"rank {rank}: {word!r} is missing in: {error}"


SIZES = pytest.mark.parametrize("widths", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
