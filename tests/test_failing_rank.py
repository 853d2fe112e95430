"""One rank fails where all ranks have agreed on a collective: every rank raises soon, and training resumes right."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel
from fsdp.comm.collectives import Communicator
from fsdp.comm.lane.issuing import Issuer
from fsdp.comm.transport.channel import Posts
from fsdp.flat.memory import MemoryPool, SharedPool
from tests.harness.agreeing import (
    ODD,
    UNEQUAL,
    BadBatchError,
    Chain,
    build,
    evaluate,
    fail_at,
    impatient,
    new_group,
    new_pair,
    train,
)
from tests.harness.pool import on_ranks
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD

SOON = 10.0  # seconds

# Where a rank raises: in the allocation before a collective, before that is issued, or while it is started.
POSITIONS: dict[str, list[tuple[type, str]]] = {
    "allocation": [(MemoryPool, "allocate"), (SharedPool, "allocate")],
    "gather": [(Communicator, "gather")],
    "reduction": [(Communicator, "reduce")],
    "average": [(Communicator, "average")],
    "issue": [(Issuer, "issue")],
    "post": [(Posts, "post")],
}
FORWARD, BACKWARD = ("allocation", 2), ("reduction", 2)


@contextlib.contextmanager
def failing(position: str, count: int, error: type[BaseException]) -> Iterator[None]:
    """Raise `error` when a function of `position` is called for the `count`-th time."""
    left = [count]

    def failing_once(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise error("there is no more")
            return real(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for owner, name in POSITIONS[position]:
            stack.enter_context(mock.patch.object(owner, name, failing_once(vars(owner)[name])))
        yield


def assert_trains_right(model: Any, plain: Chain) -> None:
    """Load the values of `plain`, and train both."""
    reference = copy.deepcopy(plain)
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for _ in range(2):
        for each, optimizer in zip((model, reference), optimizers):
            optimizer.zero_grad()
            train(each)
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, ours), theirs in zip(model.module.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
    model.zero_grad()


@pytest.mark.parametrize(
    ("size", "way", "cases"),
    [
        (2, "auto", [FORWARD, BACKWARD, ("allocation", 6), ("gather", 3), ("post", 2), ("post", 9)]),
        (2, "native", [FORWARD, FORWARD, ("allocation", 6), ("gather", 1), ("issue", 12)]),
        (2, "direct", [BACKWARD, ("gather", 6), ("issue", 11)]),
        (3, "auto", [("gather", 2), ("reduction", 4), ("post", 3)]),
        (3, "direct", [("allocation", 3), ("reduction", 1)]),
        (4, "direct", [("average", 1), ("average", 4)]),
    ],
)
@on_ranks("size")
@impatient
def test_error_of_one_rank_between_agreement_and_collective_reaches_all_ranks(
    size: int, way: str, cases: list[tuple[str, int]]
) -> None:
    """Out of memory or interrupted, by turns in a later step and in the first, where ranks vote on each collective.

    The error of the other ranks names the rank that failed, the pass, and the unit. Four ranks are two replicas.
    """
    os.environ["FSDP_COLLECTIVES"] = way
    odd, hybrid = dist.get_rank() == ODD, size == 4
    torch.manual_seed(0)
    plain = Chain(UNEQUAL)
    for number, (position, count) in enumerate(cases):
        later, error = number % 2 == 0, (MemoryError, KeyboardInterrupt)[number // 2 % 2]
        group, strategy = (new_pair(), HYBRID_SHARD) if hybrid else (new_group(), FULL_SHARD)
        model = build(copy.deepcopy(plain), group, strategy)
        for _ in range(2 if later else 0):
            train(model)
            model.zero_grad()
        started = time.monotonic()
        fault = failing(position, count, error) if odd else contextlib.nullcontext()
        with fault, pytest.raises(error if odd else RuntimeError) as caught:
            train(model)
        what, words = f"{error.__name__} at {position} {count}, {later=}", str(caught.value)
        assert time.monotonic() - started < SOON, f"{what}: {words}"
        if not odd:
            assert f"rank {ODD} failed in the " in words and "unit" in words, f"{what}: {words}"
        assert_trains_right(model, plain)


# The call of all ranks after an evaluation in which one rank failed.
NEXT: dict[str, Callable[[Any], object]] = {
    "train": train,
    "evaluate": evaluate,
    "state_dict": lambda model: model.state_dict(),
}


@pytest.mark.parametrize(
    ("call", "way", "barrier"),
    [("train", "auto", True), ("evaluate", "direct", False), ("state_dict", "native", True)],
)
@on_ranks(3)
@impatient
def test_error_of_one_rank_after_the_last_collective_reaches_all_ranks_in_the_next_call(
    call: str, way: str, barrier: bool
) -> None:
    """Also if the other ranks wait in a barrier of the program from then on. Training goes on in step."""
    os.environ["FSDP_COLLECTIVES"] = way
    odd, plain = dist.get_rank() == ODD, Chain(UNEQUAL)
    model = build(copy.deepcopy(plain), new_group())
    for _ in range(2):
        train(model)
        evaluate(model)
        model.zero_grad()
    if odd:
        fail_at(model, len(UNEQUAL))
    with pytest.raises(BadBatchError) if odd else contextlib.nullcontext():
        evaluate(model)
    model.module.reset()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {ODD} failed in the forward of the root unit"):
        NEXT[call](model)
    assert time.monotonic() - started < SOON
    if barrier:
        dist.barrier()
    model.zero_grad()
    assert_trains_right(model, plain)
