"""Instruments of the harness, shown on plain torch: measurements in further tests depend on them."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.versions import ALL_GATHER
from tests.harness import pool
from tests.harness.meter import Meter, needs_meter
from tests.harness.models import ZOO
from tests.harness.oracle import (
    OPTIMIZERS,
    Schedule,
    Step,
    assert_bit_equal,
    assert_close_ulp,
    assert_equivalent,
    assert_same_steps,
    run_ddp,
    run_plain,
)
from tests.harness.poison import poisoned_memory
from tests.harness.pool import Died, RankFailure, on_ranks, run_fresh, run_ranks
from tests.harness.process_groups import delay_collectives
from tests.harness.versions import needs_swaps

# -- pool --------------------------------------------------------------------------------------------------------


def rank_and_sum(value: float) -> tuple[int, int, float]:
    total = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), total[0].item()


@pytest.mark.parametrize("world_size", [1, 3])
def test_pool_returns_results_by_rank_and_keeps_its_processes(world_size: int) -> None:
    pool.shutdown()  # a used pool may be replaced any time
    first = run_ranks(world_size, rank_and_sum, 2.0)
    second = run_ranks(world_size, rank_and_sum, value=2.0)
    assert [rank for _, rank, _ in first] == list(range(world_size))
    assert {total for _, _, total in first} == {world_size * (world_size + 1.0)}
    assert first == second
    assert os.getpid() not in {pid for pid, _, _ in first}


@on_ranks(2)
def fail_first_on_rank_one() -> None:
    rank = dist.get_rank()
    time.sleep(0.3 * (1 - rank))
    wanted, found = rank, rank + 7
    assert wanted == found


def test_pool_reports_the_first_failure_in_time() -> None:
    before = {pid for pid, _, _ in run_ranks(2, rank_and_sum, 1.0)}
    with pytest.raises(RankFailure) as caught:
        fail_first_on_rank_one()
    text = str(caught.value)
    assert caught.value.rank == 1 and caught.value.kind == "AssertionError"
    assert text.startswith("rank 1 of 2 failed:\nTraceback")
    assert "in fail_first_on_rank_one" in text and "assert wanted == found" in text
    assert "where wanted = 1" in text and "where found = 8" in text
    assert re.search(r"\n\nrank 0 failed \d.\d s later: AssertionError \(pool.py:\d+ > test_harness.py:\d+\)", text)
    assert "worker.py" not in text
    assert not any(_is_running(pid) for pid in before)
    assert before.isdisjoint(pid for pid, _, _ in run_ranks(2, rank_and_sum, 1.0))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fail_alone_in_a_collective() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no batch left")
    dist.all_reduce(torch.ones(1))


def kill_rank_one() -> str:
    if dist.get_rank() == 1:
        os.write(2, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "survivor raised"
    return "nothing noticed"


def wait_forever_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


ENDS = {
    fail_alone_in_a_collective: (
        r"rank 1 of 2 failed:(?s:.*)ValueError: no batch left(?s:.*)"
        r"rank 0 was still running:\n(?s:.*) in fail_alone_in_a_collective"
    ),
    kill_rank_one: r"rank 1 of 2 was killed by SIGKILL\n(  . \[Gloo\].*\n)?  . last words",
    wait_forever_on_rank_one: (
        r"^timeout: rank 1 of 2 still running after 4 s\n\nrank 1:\n(?s:.*)in wait_forever_on_rank_one"
    ),
}


@pytest.mark.serial  # it has a time limit
@pytest.mark.parametrize("job", ENDS)
def test_pool_does_not_wait_for_peers_and_shows_where_each_rank_is(job: Callable[[], Any]) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=ENDS[job]):
        run_ranks(2, job, timeout=4)
    assert time.monotonic() - start < 10


def test_fresh_pool_reports_a_dead_rank_as_a_result() -> None:
    results = run_fresh(2, kill_rank_one, group_timeout=5)
    assert results == ["survivor raised", Died(-signal.SIGKILL)]


def change_settings() -> None:
    os.environ["LEFT_BEHIND"] = "yes"
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    dist.new_group(list(range(dist.get_world_size())))


def read_settings() -> list[object]:
    return [
        os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        len(dist.distributed_c10d._world.pg_map),
        torch.get_num_threads(),
        torch.rand(1).item(),
        random.random(),
    ]


def test_pool_restores_settings_and_seeds_between_jobs() -> None:
    before = run_ranks(2, read_settings)
    run_ranks(2, change_settings)
    assert run_ranks(2, read_settings) == before


def warn(text: str, category: type[Warning]) -> str:
    warnings.warn(text, category, stacklevel=1)
    return "passed"


def test_pool_treats_warnings_as_the_session_does() -> None:
    allowed = "`torch.distributed.all_gather_into_tensor` is deprecated"
    assert run_ranks(1, warn, allowed, FutureWarning) == ["passed"]
    with pytest.raises(RankFailure, match="UserWarning: careless"):
        run_ranks(1, warn, "careless", UserWarning)


def out_of_step() -> None:
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), src=0, async_op=True)


def test_pool_refuses_a_job_that_leaves_the_group_out_of_step() -> None:
    with pytest.raises(RankFailure, match="different numbers of collectives on the default group: "):
        run_ranks(2, out_of_step)


def test_shutdown_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pool, "_pools", {})
    pids = [pid for pid, _, _ in run_ranks(2, rank_and_sum, 1.0)]
    assert list(tmp_path.iterdir())
    pool.shutdown()
    assert not any(_is_running(pid) for pid in pids) and not list(tmp_path.iterdir())


# -- models and oracle -------------------------------------------------------------------------------------------

SHORT = Schedule(steps=3, micro=2)


def ddp_steps(name: str, optimizer: str, schedule: Schedule) -> list[Step]:
    return run_ddp(ZOO[name], OPTIMIZERS[optimizer], schedule)


@pytest.mark.parametrize("name", [*ZOO][::2])
def test_oracle_in_rank_order_equals_ddp_bit_for_bit_on_two_ranks(name: str) -> None:
    optimizer = "adamw" if len(name) % 2 else "sgd"
    plain = run_plain(ZOO[name], OPTIMIZERS[optimizer], 2, SHORT)
    assert_same_steps(run_ranks(2, ddp_steps, name, optimizer, SHORT)[0], plain)


def test_comparisons_name_the_parameter_and_the_worst_element() -> None:
    expected = {"a": torch.tensor([[1.0, 2.0], [3.0, -4.0]]), "b": None, "c": torch.zeros(2)}
    assert_bit_equal(expected, expected)
    assert_close_ulp(expected, expected, 0)
    off = {**expected, "a": torch.tensor([[1.0, 2.0], [3.0, -4.0 - 2**-20]])}
    with pytest.raises(AssertionError, match=r"w: 1 of 3 not bit-equal:\n  a: 1 of 4 differ, worst at \(1, 1\)"):
        assert_bit_equal(off, expected, "w")
    assert_close_ulp(off, expected, 2)
    with pytest.raises(AssertionError, match=r"a: off by 2.0 ulp, allowed 1, worst at \(1, 1\) -4.00000095"):
        assert_close_ulp(off, expected, 1)
    for name, value in [("b", torch.zeros(1)), ("c", None), ("c", torch.zeros(3)), ("d", torch.zeros(1))]:
        for compare in (assert_bit_equal, lambda a, e: assert_close_ulp(a, e, 1e9)):
            with pytest.raises(AssertionError, match=f"1 of 3 not comparable:\n  {name}: "):
                compare({**expected, name: value}, expected)
    with pytest.raises(AssertionError, match="c: off by"):
        assert_close_ulp({**expected, "c": torch.tensor([float("nan"), 0.0])}, expected, 1e9)
    with pytest.raises(AssertionError, match="c: 1 of 2 differ"):
        assert_bit_equal({**expected, "c": torch.tensor([0.0, -0.0])}, expected)


def test_equivalence_allows_only_rounding() -> None:
    wide = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": None, "c": torch.tensor([1e-14]).double()}
    assert_equivalent({**wide, "a": wide["a"] * (1 + 2.0**-24), "c": -wide["c"]}, wide)
    for name, value in (("a", wide["a"] * (1 + 2.0**-22)), ("c", wide["c"] + 2.0**-38)):
        with pytest.raises(AssertionError, match=f"1 of 3 not equivalent:\n  {name}: off by"):
            assert_equivalent({**wide, name: value}, wide)
    with pytest.raises(AssertionError, match="b: a tensor, expected the opposite"):
        assert_equivalent({**wide, "b": wide["a"]}, wide)


# -- process groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("input written", f"{ALL_GATHER}: an input was written before wait()"),
        ("output written", f"{ALL_GATHER}: an output was written before wait()"),
        ("input freed", f"{ALL_GATHER}: an input's memory was given back before wait()"),
        pytest.param(
            *("output swapped", f"{ALL_GATHER}: an output's memory was given back before wait()"), marks=needs_swaps
        ),
        ("forgotten", f"never waited for: {ALL_GATHER}"),
        ("a part forgotten", "never waited for: batch_isend_irecv"),
    ],
)
@on_ranks(2)
def test_delayed_collectives_detect_tensors_used_in_flight(kind: str, message: str) -> None:
    source, target = torch.ones(4), torch.zeros(4 * dist.get_world_size())
    before, other = (source._version, target._version), 1 - dist.get_rank()
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"), delay_collectives(max_ms=0):
        work = getattr(dist, ALL_GATHER)(target, source, async_op=True)
        assert (source._version, target._version) == before
        if kind == "input written":
            source.zero_()
        elif kind == "output written":
            target.zero_()
        elif kind == "input freed":
            source.untyped_storage().resize_(0)
        elif kind == "output swapped":
            target.untyped_storage()._swap_data_ptr_(torch.zeros_like(target).untyped_storage())
        elif kind == "a part forgotten":
            ops = [dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, torch.ones(2), other)]
            dist.batch_isend_irecv(ops)[1].wait()
        if kind != "forgotten":
            work.wait()


# -- memory ------------------------------------------------------------------------------------------------------

MIB = 2**20


@needs_meter
@pytest.mark.parametrize("nbytes", [MIB, 40 * MIB])  # below and above the size from which malloc always maps
def test_meter_counts_every_kind_of_allocation_and_release(nbytes: int) -> None:
    meter = Meter()
    full = torch.empty(nbytes // 4)
    with meter.delta() as delta:
        full.untyped_storage().resize_(0)
    delta.assert_is(-nbytes)
    with meter.delta() as delta:
        full.untyped_storage().resize_(nbytes)
    delta.assert_is(nbytes)
    with meter.delta() as delta:
        view = torch.ones(nbytes // 4)[:10]
    delta.assert_is(nbytes)
    with meter.delta() as delta:
        del view
    delta.assert_is(-nbytes)
    with pytest.raises(AssertionError, match=r"full buffer: .* expected 70,000 \(\+-65,536\)"):
        delta.assert_is(70_000, what="full buffer")


def test_poison_fills_fresh_memory_and_stops_at_the_end() -> None:
    functions = torch.UntypedStorage.__init__, torch.UntypedStorage.resize_
    with poisoned_memory():
        grown = torch.ones(2)
        grown.untyped_storage().resize_(4 * 64)
        whole = torch.empty(0).set_(grown.untyped_storage())
        storage = torch.UntypedStorage(32)
        fresh = [
            torch.empty(9, dtype=torch.bfloat16),
            torch.empty_like(grown),
            torch.empty(0, dtype=torch.float16).set_(storage),
            whole[2:],
        ]
        assert all(tensor.numel() and tensor.isnan().all() for tensor in fresh)
        assert torch.equal(whole[:2], torch.ones(2))
        assert (torch.empty(5, dtype=torch.uint8) == 255).all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.UntypedStorage.__init__, torch.UntypedStorage.resize_) == functions
