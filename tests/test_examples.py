"""The example and the scripts as a user starts them: as commands, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--steps", "25", "--width", "32", "--depth", "2", "--context", "32", "--batch", "4"]
LOSSES = ("training text (end: mean of 10)", "held-out text")


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root, with any GPUs hidden."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def train(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run(*launcher, "examples/train_gpt.py", *SMALL, *options)


def numbers(report: str, row: str) -> list[float]:
    """The numbers that stand in the line of ``report`` that begins with ``row``."""
    line = re.search(rf"^  {re.escape(row)}(.*)$", report, re.MULTILINE)
    assert line is not None, f"no line {row!r} in\n{report}"
    return [float(word.replace(",", "").rstrip("%")) for word in line[1].split() if word[0].isdigit()]


@pytest.fixture(scope="module")
def sharded() -> str:
    """The report of a run on two ranks with everything sharded."""
    result = train(2)
    assert result.returncode == 0, result.stderr
    assert not re.search(r"[Ww]arn|\[W", result.stderr), result.stderr
    return result.stdout


def test_training_reports_what_happened(sharded: str) -> None:
    assert "2 x cpu (gloo), full_shard" in sharded
    for row in LOSSES:
        start, end = numbers(sharded, row)
        assert 5 < start < 6, "an untrained model knows next to nothing of a byte: ln 256 is 5.55"
        assert end < start - 1
    for row in ("parameters", "gradients", "optimizer state"):
        mine, whole, percent = numbers(sharded, row)
        assert whole > 4 * 30_000 and mine == pytest.approx(whole / 2, rel=2e-2) and 49 < percent < 51
    gradients = numbers(sharded, "gradients")[0]
    assert gradients == numbers(sharded, "parameters")[0]
    # The root's unit is gathered once, each of the two blocks for forward and again for backward; each is reduced once.
    calls, received = numbers(sharded, "all_gather_")
    assert calls == 1 + 2 + 2 and gradients < received < 2 * gradients
    assert numbers(sharded, "reduce_scatter_") == [1 + 2, gradients]
    # Besides, only the few bytes by which the ranks see that they are in step.
    total_calls, total_received = numbers(sharded, "total")
    assert total_calls <= calls + 3 + 2 and total_received <= received + gradients + 64
    assert "\n  | def " in sharded


def test_training_without_sharding_holds_everything_and_learns_the_same(sharded: str) -> None:
    result = train(2, "--strategy", "no_shard")
    assert result.returncode == 0, result.stderr
    for row in ("parameters", "gradients"):
        mine, whole, percent = numbers(result.stdout, row)
        assert mine == whole and percent == 100
    for row in LOSSES:
        assert numbers(result.stdout, row) == pytest.approx(numbers(sharded, row), abs=5e-3)
    calls, received = numbers(result.stdout, "all_reduce")
    assert 3 <= calls <= 3 + 2 and 0 <= received - numbers(result.stdout, "gradients")[0] <= 64
    assert numbers(result.stdout, "total") == [calls, received]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--steps", "many"], "argument --steps: invalid positive value: 'many'"),
        (["--strategy", "half"], "argument --strategy: invalid choice: 'half'"),
        (["--width", "20", "--heads", "3"], "--width 20 is not a multiple of twice --heads 3"),
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


def test_training_must_be_started_by_torchrun() -> None:
    result = run(sys.executable, "examples/train_gpt.py")
    assert result.returncode == 1
    assert result.stderr.strip().startswith("train_gpt.py: start it with torchrun")


def test_demo_help_and_bad_options_need_no_environment() -> None:
    result = run("bash", "scripts/demo.sh", "--steps", "3", "--help", timeout=10)
    assert result.returncode == 0
    for option in ("--steps", "--strategy", "--ranks", "--help"):
        assert option in result.stdout
    for arguments in (["--ranks"], ["--ranks", "0"], ["--ranks=two"]):
        result = run("bash", "scripts/demo.sh", *arguments, timeout=10)
        assert result.returncode == 2
        assert "demo.sh: --ranks" in result.stderr


def test_gpu_check_says_that_there_is_no_accelerator() -> None:
    result = run(sys.executable, "scripts/gpu_check.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "gpu_check.py: there is no accelerator here, nothing is checked\n"


def test_gpu_check_compares_with_a_plain_model() -> None:
    """What of it can run without an accelerator: parity, in a group of one and of two."""
    result = run(sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 40 and all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == "gpu_check.py: all checks passed"


def test_readme_example_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0])
    result = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert result.returncode == 0, result.stderr


def test_readme_draws_every_file_of_the_package() -> None:
    picture = re.findall(r"```\nfsdp/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    drawn = set(re.findall(r"^ +(\w+\.py) ", picture, re.MULTILINE))
    assert drawn == {path.name for path in (ROOT / "fsdp").rglob("*.py")} - {"__init__.py"}
