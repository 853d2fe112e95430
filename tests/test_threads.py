"""Ranks as threads of one process: torch's threaded group, whose works take no timeout.

Values equal those from processes, and the ranks share no state: models, optimizers, labels of collectives, checkpoints.
The jobs are small; tests with processes cover the details.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, StateDictType
from fsdp.checkpoint import load, save
from fsdp.comm import threads
from tests.harness.models import ZOO
from tests.harness.oracle import (
    Schedule,
    adamw,
    assert_bit_equal,
    assert_same_steps,
    named_grads,
    rank_batch,
    run_plain,
)
from tests.harness.pairs import by_turns
from tests.harness.pool import Died, RankFailure, on_ranks, run_fresh
from tests.harness.sharded import full_gradients, full_parameters, run_fsdp, wrap
from tests.harness.strategies import STRATEGIES
from tests.harness.threads import run_threads

MODES = {"mlp": (False, True), "segment-reentrant": (True, False)}


@pytest.mark.parametrize("case", MODES)
def test_threads_train_as_the_plain_model(case: str) -> None:
    """Compare gradients, parameters and optimizer state after each of 2 steps of 2 micro-batches."""
    schedule, names = Schedule(2, micro=2), [name for name, _ in ZOO[case].build().named_parameters()]
    unused = [name for name in names if name.startswith(ZOO[case].unused or "//")]
    plain = run_plain(ZOO[case], adamw, 2, schedule, zero_grads=unused)
    for strategy, use_orig_params in by_turns(STRATEGIES, MODES[case]):
        options: dict[str, Any] = {"strategy": strategy, "use_orig_params": use_orig_params}
        for rank, steps in enumerate(run_threads(2, run_fsdp, ZOO[case], adamw, schedule, **options)):
            assert_same_steps(steps, plain, f"{case}, {strategy}, use_orig_params={use_orig_params}, rank {rank}")


def test_threads_clip_save_and_load_as_processes(tmp_path: Path) -> None:
    """All ranks return the plain model's norm; state dicts of all kinds and a checkpoint load into a second model."""
    case = ZOO["mlp"]
    plain = case.build()
    for rank in range(2):
        (case.loss(plain, rank_batch(case, Schedule(), 0, 0, rank, 2)) / 2).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)

    def clip_and_save() -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        model = wrap(case, use_orig_params=True)
        optimizer = adamw(model.parameters())
        case.loss(model, rank_batch(case, Schedule(), 0, 0, dist.get_rank(), 2)).backward()
        found = model.clip_grad_norm_(0.01)
        grads = full_gradients(model)
        optimizer.step()
        expected = full_parameters(model)
        for kind in StateDictType:
            other = wrap(case, use_orig_params=True, seed=1)
            with FullyShardedDataParallel.state_dict_type(model, kind):
                state = model.state_dict()
            with FullyShardedDataParallel.state_dict_type(other, kind):
                other.load_state_dict(state)
            assert_bit_equal(full_parameters(other), expected, f"{kind}")
        save(tmp_path / "saved", model, optimizer)
        other = wrap(case, use_orig_params=False, seed=1)
        load(tmp_path / "saved", other, adamw(other.parameters()))
        assert_bit_equal(full_parameters(other), expected, "loaded")
        return found, grads

    for found, grads in run_threads(2, clip_and_save):
        assert torch.allclose(found, norm, rtol=1e-6)
        torch.testing.assert_close(grads, named_grads(plain), rtol=1e-5, atol=1e-9)


def stop_all(before: set[threading.Thread]) -> list[str]:
    """Stop the daemon threads that a test left, as test suites do."""
    left = sorted(set(threading.enumerate()) - before, key=lambda thread: thread.name)
    for thread in left:
        assert thread.daemon
        thread.stop()  # type: ignore[attr-defined]
        assert not thread.is_alive()
    return [thread.name for thread in left]


@on_ranks(2)
def test_stopped_threads_are_restarted() -> None:
    before = {thread for thread in threading.enumerate() if not thread.name.startswith("fsdp")}
    torch.manual_seed(0)
    model = wrap(nn.Linear(1500, 1500), use_orig_params=True, wrap_policy=None)  # large enough for recycled memory
    optimizer, states = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(4):
        model(torch.full((1, 1500), number + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(full_parameters(model)["weight"].sum().item())
        if number % 2:
            assert set(stop_all(before)) <= {
                "fsdp wait",
                "fsdp collectives",
            }  # earlier tests in this process may have started a second thread
            assert stop_all(before) == []
    assert len(set(states)) == 4


def test_a_fork_can_use_threads_whatever_its_parent_was_doing() -> None:
    """A lock that a thread of the parent holds is never released in the child."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with threads._Worker._lock:
            held.set()
            over.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if threads.in_thread(lambda: 5).result(10) == 5 else 1)
    over.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- the harness -------------------------------------------------------------------------------------------------------


def test_the_first_failing_thread_is_shown_and_ends_its_peers() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise KeyError("the reason")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 3 failed:\n.*in fail\n.*KeyError: 'the reason'") as caught:
        run_threads(3, fail)
    assert caught.value.kind == "KeyError" and "harness/threads.py" not in str(caught.value)
    assert run_threads(3, dist.get_rank) == [0, 1, 2]


def test_threads_that_never_return_are_shown_and_ended() -> None:
    def wait_alone() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    before = threading.active_count()
    with pytest.raises(RankFailure, match=r"(?s)timeout: rank 0 of 2 still running after 0.2 s.*in wait_alone"):
        run_threads(2, wait_alone, timeout=0.2)
    assert threading.active_count() == before


class Uncaught(BaseException):
    """Ends a rank, as an exception ends a program."""


def end_early(released: Path) -> None:
    """End the process while a thread, which counts as one of gloo, computes without the interpreter's lock."""

    def release() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
        released.touch()

    begun = threading.Event()
    threading.Thread(target=release, daemon=True).start()
    begun.wait()
    os.dup(int(sys.argv[1]))  # keeps the pipe to the test open until the process has ended
    raise Uncaught


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have names and states in /proc")
def test_a_program_ends_after_the_threads_of_gloo_have_released_their_tensors(tmp_path: Path) -> None:
    """A thread that needs the interpreter while it ends is ended by force, and the process with it."""
    assert run_fresh(1, end_early, tmp_path / "released") == [Died(1)]
    assert (tmp_path / "released").exists()
