"""Ranks that diverge: every rank gets an error soon that names both sides, and the same loop goes on afterwards."""

from __future__ import annotations

import contextlib
import gc
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.comm.lane import history
from tests.harness.agreeing import (
    CALLS,
    EQUAL,
    ODD,
    RANKS,
    BadBatchError,
    Outcome,
    Row,
    Run,
    assert_told,
    impatient,
    interrupted_after,
    perform,
    raises_soon,
    run_row,
)
from tests.harness.oracle import assert_bit_equal
from tests.harness.pairs import by_turns
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.strategies import HYBRID_SHARD, NO_SHARD

OTHER_ORDER = "Forward order differs across ranks"
UNITS_0_AND_1 = (OTHER_ORDER, "unit 'blocks.0'", "unit 'blocks.1'")
BOTH_SIDES = (OTHER_ORDER, "in the backward", "unit 'left'", "unit 'right'")
AHEAD = ("rank 1 runs the forward of the root unit", " the backward")
FAILED = "rank 1 failed in the "

ONLY_UNIT_1 = ("only unit 1, train", ("unit 'blocks.1'", "end the pass"))

# One rank of three orders, skips or repeats units, runs another pass, or fails.
PASSES = [
    Row("swap, train", UNITS_0_AND_1, 0, widths=EQUAL),
    Row("swap, train", UNITS_0_AND_1, 2, strategy=NO_SHARD),
    Row("fork reversed", BOTH_SIDES, 0, widths=EQUAL, usual="fork", others="fork"),
    Row("skip unit 1, train", ("unit 'blocks.1'", "unless the model is wrapped with reduce_unused=True"), widths=EQUAL),
    Row("skip unit 2, train", ("unit 'blocks.1'", "unit 'blocks.2'"), 2, way="direct"),
    Row("repeat unit 0, train", ("unit 'blocks.0'",), ranks=2),
    Row("cut the graph, train", ("in the backward", "unit 'blocks.0'", "end the pass"), 2, widths=EQUAL),
    Row("freeze unit 1, train", (OTHER_ORDER, "in the backward", "reduce unit 'blocks.1'"), ranks=2, widths=EQUAL),
    # Peers used a gather that rank 1 had prefetched, and are in their backward while it waits in its forward.
    Row(*ONLY_UNIT_1, 1, 2, usual="only unit 0, train", others="only unit 0, train"),
    # Natively gloo ends the process where messages of different sizes meet.
    Row("eval, train", (*AHEAD, "If one rank evaluates alone, evaluate on all ranks"), 2, way="native"),
    Row("forward, train", (*AHEAD, "loop with `for batch in fsdp.join(model, loader)`"), 2, 2),
    # Units that were prefetched in the usual order are no error; the next step is.
    Row("swap, eval", UNITS_0_AND_1, 2, 2, others="eval", noticed=1),
    # Rank 1 cannot meet its peer any more, and says why.
    Row("destroy the group, train", ("rank 1 failed in the backward",), 1, 2, then="stop", silent=True),
    # The gather in flight never ends, and must not prevent the cast back.
    Row("cast, train", ("(48 bytes)", "(96 bytes)"), 1, 2, then="cast back, train"),
    Row("forward, another model", ("rank 1 is about to begin the first pass or call of a model",), 2, 2, then="stop"),
]

# The failures of some ranks. The first error of the others names one of the ranks that failed, and the pass.
FAILURES = [
    Row("fail at 1, train", (f"{FAILED}forward of the root unit",), 0),
    Row("fail at 2, train", (), 2, widths=EQUAL),  # all gathers were in flight
    Row("fail at 0, train", (f"{FAILED}forward",), 0, ranks=2),
    Row("fail in backward, train", (f"{FAILED}backward",), 2, way="native"),
    Row("fail at 2, train", ("rank ",), 2, odd_ranks=(0, 2), way="direct"),
    Row("fail at 1, train", (), 2, others="fail at 2, train", then="state_dict", way="native"),
    Row("fail at the head, eval", (f"{FAILED}forward",), 2, usual="eval", others="eval", noticed=1),
    Row("fail at the head, eval, train", (f"{FAILED}forward",), 2, usual="eval, train", others="eval, train"),
]


# One rank, a shard group and a replica group diverge, by turns.
HYBRID = {
    "swap, train": ("unit 'blocks.0'", "unit 'blocks.1'"),
    "fail at 1, train": ("failed in the forward of the root unit",),
    "skip unit 1, train": ("unit 'blocks.1'",),
    "fail in backward, train": ("failed in the backward",),
}
ODD_RANKS = [(1,), (2, 3), (0, 2)]
REPLICAS = [
    Row(odd, HYBRID[odd], 2 * (n % 2), 4, odd_ranks, strategy=HYBRID_SHARD)
    for n, (odd, odd_ranks) in enumerate(by_turns([*HYBRID], ODD_RANKS))
]
EVALUATES = "eval, train"
REPLICAS += [
    Row(f"fail at the head, {EVALUATES}", (FAILED,), 2, 4, usual=EVALUATES, others=EVALUATES, strategy=HYBRID_SHARD)
]


@pytest.mark.parametrize("row", [*PASSES, *FAILURES, *REPLICAS], ids=str)
def test_deviation_in_a_pass_raises_on_every_rank(row: Row, tmp_path: Path) -> None:
    """Also on ranks that share no group with a deviating rank. The loop goes on in the same process."""
    assert_told(row, run_ranks(row.ranks, run_row, row, str(tmp_path)))


# Calls of both kinds: with shared memory and units that may be unused, and without.
BY_TURNS = [("native", False, [*CALLS][::2]), ("auto", True, [*CALLS][1::2])]


@pytest.mark.parametrize(("way", "unused", "calls"), BY_TURNS)
@on_ranks(2)
@impatient
def test_call_of_one_rank_alone_raises(way: str, unused: bool, calls: list[str], tmp_path: Path) -> None:
    """Rank 0 makes a call while its peer evaluates; the error names both. Then the ranks go on with the same model."""
    run = Run(Row("", ranks=2, way=way, options={"reduce_unused": unused}), str(tmp_path))
    perform(run, "train, eval, train, eval")
    for call in calls:
        with raises_soon() as caught:
            perform(run, f"train, {call}, eval" if dist.get_rank() == 0 else "train, eval")
        error = str(caught.value)
        assert f"rank 0 has called {CALLS[call]}" in error, (call, error)
        assert "rank 1 runs the forward of the root unit" in error, (call, error)
    run.optimizer.zero_grad()
    assert run.go_on() == ""


OTHERS = {"train": "the forward of the root unit", "a second model": "the first pass or call of a model", **CALLS}

# One rank saves or loads, while its peers train or make another call.
SAVES = [
    Row(
        call,
        (f"rank {alone} has called fsdp.checkpoint.{call}()", OTHERS[other], "if rank == 0", "fsdp.join"),
        at=1,
        ranks=ranks,
        odd_ranks=(alone,),
        usual="train, save" if before else "train",
        others=other,
        then="train, save, load, state_dict" if ranks == 2 else "train, save",
    )
    for ranks, call, other, alone, before in [
        (2, "save", "train", 0, False),
        (3, "load", "train", 1, True),
        (2, "load", "clip", 0, True),
        (3, "async_save", "summon", 0, False),
        (3, "save", "a second model", 1, False),
    ]
]

SUMMONS = "train, summon, eval"
OTHER_CALLS = [
    Row(
        "train, summon with_grads",  # gradients are gathered in separate collectives
        ("summon_full_params(with_grads=True)", "summon_full_params()"),
        2,
        2,
        others="train, summon",
        then="train, summon with_grads",
    ),
    Row("train, eval", (f"has called {CALLS['summon']}", " runs the forward"), 2, 2, usual=SUMMONS, others=SUMMONS),
    Row("save over all ranks", (), 1, 2, (0,), then="train, state_dict"),
    # Ranks 0 and 1 learn of the end of the save from a lane in which rank 3 is not.
    Row("save over all ranks", (), 1, 4, (3,), strategy=HYBRID_SHARD, then="train, save over all ranks"),
    Row(
        "new model from rank 0, train",
        ("rank 0 is about to begin the first", "rank 1 is about to begin a model with the values of rank 0"),
        1,
        others="new model, train",
        then="new model",
    ),
]


@pytest.mark.parametrize("row", [*SAVES, *OTHER_CALLS], ids=str)
def test_different_calls_raise_on_every_rank(row: Row, tmp_path: Path) -> None:
    """The error of every rank names the calls of both sides and the remedy; then the calls work."""
    assert_told(row, run_ranks(row.ranks, run_row, row, str(tmp_path)))


# -- after the error ---------------------------------------------------------------------------------------------------

FOLLOWED = [
    Row("skip unit 1, train", at=2, then="new model from rank 0", way="native"),
    Row("eval, train", at=2, ranks=2, then="new model", way="direct"),
    Row("fail in backward, train", at=2, then="new model from rank 0"),
    Row("forward", at=2, then="new model from rank 0", silent=True, options={"use_orig_params": False}),
]


@pytest.mark.parametrize("row", FOLLOWED, ids=str)
def test_new_model_trains_after_a_divergence(row: Row, tmp_path: Path) -> None:
    """In the same group or another one, also where the odd rank has not noticed that it differs."""
    assert_told(row, run_ranks(row.ranks, run_row, row, str(tmp_path)))


@pytest.mark.parametrize(("error", "reduce_unused"), [("run out of memory", False), ("interrupt backward", True)])
@on_ranks(2)
@impatient
def test_calls_work_after_a_failure_of_all_ranks(error: str, reduce_unused: bool, tmp_path: Path) -> None:
    """Each kind of call, the emergency save above all, and the next step, over the connections that exist."""
    row = Row(error, ranks=2, options={"reduce_unused": reduce_unused})
    run = Run(row, str(tmp_path))
    perform(run, "train, save")
    run.optimizer.step()
    run.train_plain()
    run.optimizer.zero_grad()
    expected = {name: value.clone() for name, value in run.state_dict().items()}
    with mock.patch.object(dist, "ProcessGroupGloo", side_effect=AssertionError("connects again")):
        for call in (*CALLS, "save", "load"):
            with pytest.raises((torch.OutOfMemoryError, KeyboardInterrupt)):
                perform(run, f"{error}, train")
            run.model.module.reset()
            perform(run, call)
            run.optimizer.zero_grad()
            assert_bit_equal(run.state_dict(), expected, call)
    assert run.go_on() == ""


# -- ranks that are late, or were interrupted, and do not differ -------------------------------------------------------


@pytest.mark.parametrize("row", [Row("sleep, train"), Row("sleep, train", at=2)], ids=str)
def test_slow_rank_causes_no_error(row: Row, tmp_path: Path) -> None:
    for outcome in run_ranks(row.ranks, run_row, row, str(tmp_path)):
        assert outcome == Outcome()


@pytest.mark.parametrize("before", ["rank 0 fails later", "rank 1 fails later"])
@on_ranks(2)
@impatient
def test_interrupted_wait_is_repeated(before: str, tmp_path: Path) -> None:
    """Rank 0 is interrupted while it waits for rank 1. That is no difference: neither when rank 0 repeats the pass or
    call, nor when rank 1 is the first one in another call."""
    run, rank = Run(Row("", ranks=2), str(tmp_path)), dist.get_rank()
    perform(run, "train, train")
    with pytest.raises(BadBatchError):
        perform(run, f"fail at {2 if before.startswith(f'rank {rank}') else 1}, train")
    run.model.module.reset()
    for _ in range(2):
        if rank == 0:
            with interrupted_after(0.4):
                perform(run, "state_dict")
    dist.barrier()
    if rank == 0:
        time.sleep(0.4)
    perform(run, "save")  # rank 1 waits here
    perform(run, "state_dict")
    run.optimizer.zero_grad()
    assert run.go_on() == ""


@pytest.mark.parametrize("odd", ["fail in backward, train", "forward"])
@on_ranks(RANKS)
@impatient
def test_rank_that_is_slow_at_the_meeting_after_a_divergence_is_waited_for(odd: str, tmp_path: Path) -> None:
    """Ranks that connect, or send, sooner do not take it for a rank that waits elsewhere."""
    run, rank = Run(Row(odd, way="native"), str(tmp_path)), dist.get_rank()
    perform(run, "train")
    with contextlib.suppress(RuntimeError, BadBatchError):
        perform(run, odd if rank == ODD else "train")
    with contextlib.suppress(RuntimeError) if rank == ODD and odd == "forward" else contextlib.nullcontext():
        perform(run, "new model from rank 0")  # the odd rank has left out a backward, and learns of it here
    if run.model is None:
        perform(run, "new model from rank 0")
    slow = "all_reduce" if odd == "forward" else "ProcessGroupGloo"
    usual, delays = getattr(dist, slow), iter([1.0] if (rank == 0) is (odd == "forward") else [])

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(next(delays, 0.0))
        return usual(*args, **options)

    with mock.patch.object(dist, slow, late):
        perform(run, "train")
    run.optimizer.zero_grad()
    assert run.go_on() == ""


# -- memory ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@impatient
def test_records_of_changing_orders_are_bounded(tmp_path: Path) -> None:
    """The memory of the ranks' agreement, and the keys of the store."""
    run = Run(Row("", ranks=2, widths=(5,) * 6), str(tmp_path))
    store = dist.distributed_c10d._world.pg_map[run.group][1]
    random = torch.Generator().manual_seed(0)
    agreement = tracemalloc.Filter(True, str(Path(fsdp.__file__).parent / "comm" / "*"))
    kept = []
    tracemalloc.start()
    for step in range(60):
        order = torch.randperm(6, generator=random)[: int(torch.randint(1, 7, (1,), generator=random))]
        run.model.module.order = order.tolist()
        with mock.patch.object(history, "_CAPACITY", 100):
            perform(run, "train")
        if step in (35, 59):
            gc.collect()
            found = tracemalloc.take_snapshot().filter_traces([agreement])
            kept.append((sum(trace.size for trace in found.traces), store.num_keys()))
    tracemalloc.stop()
    (nbytes, keys), (nbytes_later, keys_later) = kept
    assert nbytes_later <= nbytes + (8 << 10) and keys_later <= keys + 4, kept
