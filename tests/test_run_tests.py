"""`scripts/run_tests.py`: every test runs once and is counted; failures are shown and end in a non-zero exit code."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.pool import REPOSITORY

CONFIGURATION = "[pytest]\naddopts = -p no:cacheprovider\nmarkers = serial\n"
GOOD = """
import os, pathlib, pytest
LOG = pathlib.Path(__file__).with_name("log")
def note(text):
    with open(LOG, "a") as log:
        log.write(f"{text}\\n")
@pytest.mark.serial
def test_alone(): note("serial")
def test_one(): note("one")
def test_skipped(): pytest.skip("no such library")
@pytest.mark.xfail(strict=True)
def test_known(): assert False
"""
OTHER = "from test_good import note\ndef test_two(): note('two')\ndef test_three(): note('three')\n"
BAD = """
import pytest
def test_fails():
    print("said before")
    assert 1 == 2
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
def test_error(broken): pass
"""
DIES = "import os\ndef test_exits(): os._exit(3)\ndef test_never(): pass\n"


MEETS = """
import pathlib, time
def test_meets():
    print("said by", __name__)
    FOLDER = pathlib.Path(__file__).parent
    (FOLDER / f"{__name__}.is_here").touch()
    while len(list(FOLDER.glob("*.is_here"))) < 2: time.sleep(0.01)
    print("and then by", __name__)
    assert False
"""
WAITS = """
import os, pathlib, time
def test_waits():
    pathlib.Path(__file__).with_name("waiting").write_text(str(os.getpid()))
    time.sleep(60)
"""


def run_suite(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    with start_suite(folder, files, *options) as process:
        output, _ = process.communicate(timeout=60)
    return process.returncode, output


def start_suite(folder: Path, files: dict[str, str], *options: str) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "pytest.ini").write_text(CONFIGURATION)
    for name, text in files.items():
        (folder / name).write_text(text)
    command = [sys.executable, str(REPOSITORY / "scripts" / "run_tests.py"), "--no-types", *options, str(folder)]
    # A process that a shell starts in the background ignores Ctrl-C, and so do its children.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed)


def test_everything_runs_once_and_serial_tests_last(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path / "a", {"test_good.py": GOOD, "test_other.py": OTHER})
    assert code == 0, output
    assert " 4 passed, 1 skipped, 1 xfailed in " in output.splitlines()[-1], output
    assert "SKIPPED [1] test_good.py: Skipped: no such library" in output
    log = (tmp_path / "a" / "log").read_text().split()
    assert sorted(log) == ["one", "serial", "three", "two"] and log[-1] == "serial"


def test_failures_errors_and_a_dead_process_are_shown_and_the_rest_runs(tmp_path: Path) -> None:
    files = {"test_bad.py": BAD, "test_dies.py": DIES, "test_good.py": GOOD, "test_other.py": OTHER}
    code, output = run_suite(tmp_path / "a", files)
    assert code == 1
    assert " 4 passed, 1 failed, 1 error, 1 skipped, 1 xfailed in " in output.splitlines()[-1], output
    for text in ("assert 1 == 2", "said before", "RuntimeError: no fixture"):
        assert text in output, output
    lines = output.splitlines()
    for line in (
        "FAILED test_bad.py::test_fails",
        "ERROR test_bad.py::test_error",
        "ERROR pytest ended with code 3 in test_dies.py::test_exits",
        "ERROR 2 collected tests did not run",
    ):
        assert line in lines, output


def test_parallel_processes_capture_their_output_separately(tmp_path: Path) -> None:
    code, output = run_suite(tmp_path / "a", {"test_a.py": MEETS, "test_b.py": MEETS})
    assert code == 1
    for name in ("test_a", "test_b"):
        assert output.count(f"said by {name}\nand then by {name}\n") == 1, output


def test_an_interrupted_run_reports_it_and_leaves_no_process(tmp_path: Path) -> None:
    with start_suite(tmp_path / "a", {"test_waits.py": WAITS, "test_other.py": "def test(): pass\n"}) as process:
        waiting = tmp_path / "a" / "waiting"
        while not waiting.exists() or not waiting.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "\ninterrupted\n" in output, output
    with pytest.raises(ProcessLookupError):
        os.kill(int(waiting.read_text()), 0)


def test_exitfirst_ends_the_run_at_the_first_failure(tmp_path: Path) -> None:
    files = {"test_a_bad.py": BAD, **{f"test_{i}.py": "def test(): pass\n" for i in range(3)}}
    code, output = run_suite(tmp_path / "a", files, "-x", "--workers", "1")
    assert code == 1
    assert "stopped early: 4 of 5 tests were run" in output and "no fixture" not in output, output


def test_named_test_files_exist() -> None:
    command = [sys.executable, "-c", "import run_tests; print(*run_tests.COSTS, *run_tests.QUICK)"]
    named = subprocess.run(
        command, cwd=REPOSITORY / "scripts", capture_output=True, text=True, check=True
    ).stdout.split()
    assert named and [name for name in named if not (REPOSITORY / name).exists()] == []


def test_a_run_that_collects_no_tests_or_cannot_collect_fails(tmp_path: Path) -> None:
    code, output = run_suite(
        tmp_path / "a", {"test_wrong.py": "import no_such_module\n", "test_other.py": "def test(): pass\n"}
    )
    assert code == 1 and "while it collected the tests" in output and "No module named 'no_such_module'" in output, (
        output
    )
    code, output = run_suite(tmp_path / "b", {})
    assert code == 1 and " no tests ran in " in output, output
