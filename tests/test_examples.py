"""The examples and scripts: some as commands in processes of their own, as users start them.

Most of a command's time goes to interpreters that import torch. So the remaining ones run `main` in ranks that the
test's process has forked, with the existing process group.
"""

from __future__ import annotations

import importlib
import io
import os
import queue
import re
import runpy
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.checkpoint import load_plain
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks, run_fresh, run_ranks
from tests.harness.versions import needs_cpu_events

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--steps", "25", "--width", "32", "--depth", "2", "--context", "32", "--batch", "4"]
LOSSES = ("training text (end: mean of 10)", "held-out text")


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root, with any GPUs hidden."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def train(ranks: int, *options: str) -> str:
    """Run `examples/train_gpt.py` and return the printed text."""
    return run_ranks(ranks, run_train_gpt, [*SMALL, *options])[0]


def run_train_gpt(options: list[str]) -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    train_gpt = importlib.import_module("train_gpt")
    sys.path.pop(0)
    if not hasattr(train_gpt.read_standard_library, "cache_info"):
        train_gpt.read_standard_library = cache(train_gpt.read_standard_library)
    printed, sample = io.StringIO(), train_gpt.sample
    with (
        redirect_stdout(printed),
        mock.patch.object(sys, "argv", ["train_gpt.py", *options]),
        mock.patch.object(train_gpt, "sample", lambda model, prompt, length, *rest: sample(model, prompt, 20, *rest)),
        mock.patch.object(train_gpt, "join_ranks", lambda: torch.device("cpu")),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        train_gpt.main()
    return printed.getvalue()


class Spawned:
    """A replacement of `torch.multiprocessing` for scripts that spawn ranks: forked ranks, whose output is printed.

    `constants` replace the script's constants of these names in the ranks.
    """

    SimpleQueue = queue.SimpleQueue

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants = constants

    def get_context(self, method: str) -> Spawned:
        return self

    def spawn(
        self, function: Callable[..., Any], arguments: Sequence[Any], nprocs: int, join: bool = True
    ) -> SimpleNamespace:
        """Run the ranks to their end, and return a context without processes."""
        results = next((value for value in arguments if isinstance(value, queue.SimpleQueue)), None)
        plain = [None if value is results else value for value in arguments]
        call = function.__module__, function.__name__, plain, self.constants
        printed, values = run_fresh(nprocs, run_spawned, *call, timeout=120)[0]
        print(printed, end="")
        for value in values:
            results.put(value)  # type: ignore[union-attr]
        return SimpleNamespace(processes=[], join=lambda: True)


def run_spawned(module: str, function: str, arguments: list[Any], constants: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the function's output, and the values that it put into the queue among the arguments."""
    values: list[Any] = []
    results, printed = SimpleNamespace(put=values.append), io.StringIO()
    given = [results if value is None else value for value in arguments]
    script = importlib.import_module(module)
    with (
        redirect_stdout(printed),
        mock.patch.dict(vars(script), constants),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        getattr(script, function)(dist.get_rank(), *given)
    return printed.getvalue(), values


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `main` of a script and returns exit status and output."""

    def run_main(name: str, *options: str, **constants: Any) -> tuple[int, str]:
        monkeypatch.setenv("FSDP_FORCE_SHARDED", "")
        monkeypatch.delenv("FSDP_FORCE_SHARDED")  # the script may set it
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        monkeypatch.setattr(torch, "multiprocessing", Spawned(constants))
        status = 0
        try:
            importlib.import_module(name).main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return status, capsys.readouterr().out

    return run_main


def numbers(report: str, row: str) -> list[float]:
    """Return the numbers in the line of `report` that begins with `row`."""
    line = re.search(rf"^  {re.escape(row)}(.*)$", report, re.MULTILINE)
    assert line is not None, f"no line {row!r} in\n{report}"
    return [float(word.replace(",", "").rstrip("%")) for word in line[1].split() if word[0].isdigit()]


def held_losses(report: str) -> list[str]:
    """Return the losses on the held batch, digit by digit: at the save and after the load."""
    return re.findall(r"the loss on a held batch was (\S+) and is (\S+)$", report, re.MULTILINE)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the checkpoints of `sharded`, after step 15 and at the end."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def sharded(saved: Path) -> str:
    """Return the report of a run on two ranks under full sharding."""
    return train(2, "--save", str(saved), "--save-every", "15")


def test_training_reports_losses_memory_and_collectives(sharded: str) -> None:
    assert "2 x cpu (gloo), full_shard" in sharded
    for row in LOSSES:
        start, end = numbers(sharded, row)
        assert 5 < start < 6, "an untrained model is expected near ln 256 = 5.55"
        assert end < start - 1
    for row in ("parameters", "gradients", "optimizer state"):
        local, whole, percent = numbers(sharded, row)
        assert whole > 4 * 30_000 and local == pytest.approx(whole / 2, rel=2e-2) and 49 < percent < 51
    gradients = numbers(sharded, "gradients")[0]
    assert gradients == numbers(sharded, "parameters")[0]
    # The root's unit is gathered once, each of the two blocks for forward and again for backward; each is reduced once.
    calls, received = numbers(sharded, "all_gather_")
    assert calls == 1 + 2 + 2 and gradients < received < 2 * gradients
    assert numbers(sharded, "reduce_scatter_") == [1 + 2, gradients]
    # The remaining collectives are small: the ranks check that they are in step.
    total_calls, total_received = numbers(sharded, "total")
    assert total_calls <= calls + 3 + 2 and total_received <= received + gradients + 64
    assert "\n  | def " in sharded


def test_training_without_sharding_has_the_same_losses_and_full_memory(sharded: str) -> None:
    printed = train(2, "--strategy", "no_shard")
    for row in ("parameters", "gradients"):
        local, whole, percent = numbers(printed, row)
        assert local == whole and percent == 100
    for row in LOSSES:
        assert numbers(printed, row) == pytest.approx(numbers(sharded, row), abs=5e-3)
    calls, received = numbers(printed, "all_reduce")
    assert 3 <= calls <= 3 + 2 and 0 <= received - numbers(printed, "gradients")[0] <= 64
    assert numbers(printed, "total") == [calls, received]


def values(directory: Path) -> dict[str, Any]:
    """Return all tensors of a checkpoint, and all numbers as tensors, by name."""
    plain = load_plain(directory)
    assert plain.optimizer is not None
    state = {(name, key): value for name, states in plain.optimizer["state"].items() for key, value in states.items()}
    extra = {(rank, key): own[key] for rank, own in enumerate(plain.extra) for key in own if key != "processor"}
    extra |= {key: states[0] for key, states in extra.items() if key[1] == "random"}
    rates = {"lr": [group["lr"] for group in plain.optimizer["param_groups"]]}
    return {str(key): torch.as_tensor(value) for key, value in {**plain.model, **state, **extra, **rates}.items()}


def test_resumed_run_equals_the_uninterrupted_run(sharded: str, saved: Path, tmp_path: Path) -> None:
    """From the checkpoint of step 15 to step 25 on the same number of ranks, bit for bit."""
    assert "saved" in sharded
    printed = train(2, "--resume", str(saved / "checkpoint_00000001"), "--save", str(tmp_path))
    assert "step 15 from" in printed and "10 steps in" in printed
    saved_loss, loaded_loss = held_losses(printed)
    assert saved_loss == loaded_loss
    resumed = values(tmp_path)
    assert resumed["(1, 'step')"] == 25 and resumed["(1, 'loss')"] == resumed["(0, 'loss')"]
    assert_bit_equal(resumed, values(saved))
    assert numbers(printed, LOSSES[1])[1] == numbers(sharded, LOSSES[1])[1]


def test_training_refuses_a_directory_with_checkpoints_of_another_run(
    sharded: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharded
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--save", str(saved)])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "examples/train_gpt.py"), run_name="__main__")
    assert exit_.value.code == f"train_gpt.py: {saved} has checkpoints of another run: --resume it, or save elsewhere"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--width", "20", "--heads", "3"], "--width 20 is not a multiple of twice --heads 3"),
        (["--save-every", "2"], "--save-every needs --save"),
        (["--depht", "2"], "unrecognized arguments: --depht 2"),
    ],
)
def test_bad_options_are_named(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import train_gpt

    with pytest.raises(SystemExit) as exit_:
        train_gpt.parse_arguments(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_demo_shows_help_and_bad_options_without_an_environment() -> None:
    result = run("bash", "scripts/demo.sh", "--steps", "3", "--help", timeout=10)
    assert result.returncode == 0
    for option in ("--steps", "--strategy", "--ranks", "--trace", "--resume", "--help"):
        assert option in result.stdout
    for arguments in (["--ranks"], ["--ranks", "0"], ["--ranks=two"]):
        result = run("bash", "scripts/demo.sh", *arguments, timeout=10)
        assert result.returncode == 2
        assert "demo.sh: --ranks" in result.stderr


def test_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = train(1, "--steps", "4", "--save", str(tmp_path))
    traced = tmp_path / "traced"
    second = train(2, "--steps", "4", "--save", str(tmp_path), "--resume", str(tmp_path), "--trace", str(traced))
    assert "1 x cpu (gloo), no_shard" in first and "2 x cpu (gloo), full_shard" in second
    assert f"step 4 from {tmp_path}, saved by 1 ranks, loaded by 2" in second and "1 steps in" in second
    saved_loss, loaded_loss = held_losses(second)
    assert saved_loss == loaded_loss and f"/checkpoint_00000001, the loss on a held batch is {saved_loss}" in first
    assert load_plain(tmp_path).extra[1]["step"] == 5
    assert f"a step of rank 0, in {traced}/trace.json" in second
    assert re.search(r"^blocks\.1 +[\d.]+ ms +[\d.]+ ms +2 ", second, re.MULTILINE)
    assert sorted(os.listdir(traced)) == ["step.rank1.svg", "step.svg", "trace.json", "trace.rank1.json"]


FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 0; echo "check ${*:3}" >>calls; else echo "$*" >>calls; fi
"""


def test_demo_trains_and_then_resumes_with_one_more_process(tmp_path: Path) -> None:
    """Check the commands that it starts, in a separate repository; the tests around this one run these commands."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/demo.sh", tmp_path / "scripts/demo.sh")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (tmp_path / "scripts/env.sh").write_text(f"ensure_env() {{ python='{python}'; }}\n")
    demo = "bash", str(tmp_path / "scripts/demo.sh")
    result = run(*demo, "--resume", timeout=10)
    assert (result.returncode, result.stderr[:52]) == (2, "demo.sh: --resume finds no checkpoint in .demo (see ")
    result = run(*demo, "--steps", "4", "--ranks", "1", "--trace", timeout=10)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "\nNow with --resume, in 2 instead of 1 processes\n"
    (tmp_path / ".demo").mkdir()
    (tmp_path / ".demo/latest").touch()
    assert run(*demo, "--resume", "--trace", "--steps=4", timeout=10).returncode == 0
    start = "-m torch.distributed.run --standalone --nproc-per-node"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "check --steps 4 --save .demo",
        f"{start} 1 examples/train_gpt.py --trace .demo-trace --steps 4 --save .demo",
        f"{start} 2 examples/train_gpt.py --resume .demo --trace .demo-trace-resumed --steps 4 --save .demo",
        "check --steps=4 --save .demo",
        f"{start} 2 examples/train_gpt.py --resume .demo --trace .demo-trace --steps=4 --save .demo",
    ]


# Runs a script whose ranks are forks of itself, instead of a server that imports the same again.
FORKED = """
import multiprocessing, runpy, sys, torch._dynamo
multiprocessing.get_context = lambda method, get=multiprocessing.get_context: get("fork")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_elastic_run_survives_a_kill_and_ends_with_the_same_losses() -> None:
    """A rank of two is killed during a save; the run resumes from the last complete checkpoint on three."""
    result = run(sys.executable, "-c", FORKED, "examples/resume_elastic.py")
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        "   rank 1 does not hang, it gets the error: ",
        "   left behind: .checkpoint_00000003.tmp/rank_0.safetensors",
        "   the latest whole checkpoint: checkpoint_00000002\n",
        "   loaded the checkpoint of step 6\n",
        "the same losses, to within 1e-12\n",
    ):
        assert f"\n{line}" in result.stdout
    rows = re.findall(r"^ +(\d+)   (\S+) +(\S+) +\S+$", result.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == list(range(12))
    assert all(float(a) == pytest.approx(float(b), rel=1e-12, abs=0) for _, a, b in rows)
    assert float(rows[-1][1]) < 0.2 * float(rows[0][1])


# -- hybrid sharding -----------------------------------------------------------------------------------------------


def run_hybrid(replicas: int, steps: int, save: str = "", resume: str = "") -> list[float]:
    sys.path.insert(0, str(ROOT / "examples"))
    hybrid = importlib.import_module("hybrid")
    sys.path.pop(0)
    options = SimpleNamespace(replicas=replicas, steps=steps, save=save, resume=resume)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FullyShardedDataParallel: the group has one rank")
        losses: list[float] = hybrid.train(options, torch.device("cpu"))
    return losses


@on_ranks(4)
def test_hybrid_run_resumes_on_any_mesh(tmp_path: Path) -> None:
    """An uninterrupted run on 2 x 2 ranks; half of it, and the rest on every mesh of four ranks."""
    folder = str(tmp_path)
    whole, half = run_hybrid(2, 8), run_hybrid(2, 4, save=folder)
    resumed = [run_hybrid(replicas, 8, resume=folder) for replicas in (1, 2, 4)]
    assert half == whole[:4] and resumed[1] == whole  # bit for bit on the same mesh
    for losses in resumed:  # float64 sums in another order, as in resume_elastic.py
        assert losses == pytest.approx(whole, rel=1e-12, abs=0)
    assert whole[-1] < 0.5 * whole[0]


def test_launch_on_several_machines_starts_torchrun_with_the_rendezvous(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\n')
    torchrun.chmod(0o755)
    launch = ["bash", "examples/launch_machines.sh"]
    with mock.patch.dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"):
        done = run(*launch, "2", "8", "node0", "examples/hybrid.py", "--steps", "3")
        usage = run(*launch, "2")
    meeting = "--rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id fsdp"
    script = "examples/hybrid.py --steps 3"
    assert done.stdout == f"--nnodes 2 --nproc-per-node 8 --max-restarts 0 {meeting} {script}\n"
    assert usage.returncode == 2 and "MACHINES RANKS_PER_MACHINE FIRST_MACHINE SCRIPT" in usage.stderr


RunScript = Callable[..., tuple[int, str]]


def test_bench_scale_measures_many_ranks_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waits for a group that answers at once start no thread."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench_scale = importlib.import_module("bench_scale")
    threads = set(threading.enumerate())
    found = bench_scale.measure(512, ["fsdp"], 2, 1)
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "fsdp wait"]
    assert found["fsdp"]["bytes"] == 2 * 2 * 4  # one element of each of 2 units, as a parameter and as a gradient
    bench_scale.show(512, found)
    assert re.search(r"^512 ranks +wrap ms.*\nfsdp +[\d.]+ ", capsys.readouterr().out, re.MULTILINE)


def test_gpu_check_passes_on_cpu(run_script: RunScript) -> None:
    """Parity in a group of one and of two, and those situations that need no accelerator. One strategy of three."""
    options = ("--device", "cpu", "--steps", "2", "--brief")
    strategies = (fsdp.ShardingStrategy.FULL_SHARD,)
    status, printed = run_script("gpu_check", *options, WIDTH=33, HIDDEN=67, BLOCKS=2, STRATEGIES=strategies)
    assert status == 0, printed
    lines = printed.splitlines()
    assert len(lines) == 22 and all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == "gpu_check.py: all checks passed"


@needs_cpu_events
def test_checkpoint_benchmark_measures_every_contender(run_script: RunScript) -> None:
    small = ("--width", "16", "--depth", "1", "--vocabulary", "101", "--rounds", "1", "--device", "cpu")
    status, printed = run_script("bench_checkpoint", *small)
    assert status == 0, printed
    title, *rows = printed.strip().split("\n\n")
    assert title.endswith("million parameters, 2 ranks, gloo, cpu")
    contenders = {row.splitlines()[0]: len(row.splitlines()) - 1 for row in rows}
    assert contenders.pop("sharded save") == contenders.pop("sharded save in the background, blocked") == 7
    assert contenders.pop("sharded load, new optimizer") == 3  # FSDP1 has no such row
    assert contenders.pop("sharded load") == 11  # two ways, and the memory of hosts
    assert len(contenders) == 7 and set(contenders.values()) == {5}
