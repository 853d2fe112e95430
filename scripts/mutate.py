"""Mutation testing: break one line at a time and see a test fail.

    python scripts/mutate.py [--only SUBSTRING] [--list] [--jobs N]

Applies each mutation of `mutations.py` to a temporary copy of the repository and runs the tests it names. A mutation
that no test notices is a survivor: either a test is missing, or the line does nothing. Exits with 0 only if there are
no survivors, every mutation still matches its file exactly once, and the tests pass without any mutation.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).resolve().parents[1]
IMPORTED = (  # of what tests import, all that is not the repository's
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
)
PAUSE = 0.05  # seconds between two looks at processes
TEMPLATES = "RANK_TEMPLATES"  # see `tests/harness/pool.py`
TIMEOUT = 300.0  # seconds for a mutation's tests, and for a file without any; a mutation that hangs them is noticed
SKIPPED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", ".mypy_cache", ".ruff_cache", "build")


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "noticed", "SURVIVED" or "INVALID" (the mutation says nothing about the tests)."""

    mutation: Mutation
    verdict: str
    detail: str


def find_fault(mutation: Mutation, root: Path) -> str | None:
    """Why the mutation cannot be tried, if so."""
    path = root / mutation.file
    if not path.exists():
        return "no such file"
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        return f"its old text stands {count} times in the file"
    for test in mutation.tests:
        tests, _, name = test.partition("::")
        if name and f"def {name.partition('[')[0]}(" not in (root / tests).read_text():
            return f"there is no {test}"
    try:
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    except SyntaxError as error:
        return f"the mutated file does not parse: {error}"
    return None


def run_pytest(root: Path, tests: tuple[str, ...], templates: int) -> int:
    """pytest's exit code. In a process of its own: what the repository at ``root`` has is imported."""
    os.chdir(root)
    os.environ[TEMPLATES] = str(templates)
    # The copy comes before an installed package, in the tests and in the processes they start.
    os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[0] = str(root)
    return int(pytest.main(["-x", "-q", "--no-header", "--tb=no", *tests]))


class Trial:
    """pytest in a process that is forked from this one, which has imported torch: seconds for each otherwise."""

    def __init__(self, root: Path, tests: tuple[str, ...], timeout: float, *, templates: int) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open until `result`)
        self._start = time.monotonic()
        self._timeout = timeout
        self._code: int | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            code = 3  # pytest's own for an error that is its own
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for stream in (1, 2):
                    os.dup2(self._output.fileno(), stream)
                code = run_pytest(root, tests, templates)
                sys.stdout.flush()
            finally:
                os._exit(code)

    def is_over(self) -> bool:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - self._start > self._timeout:
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            pid = self._pid
        return pid != 0

    def result(self) -> tuple[int | None, float, str]:
        while not self.is_over():
            time.sleep(PAUSE)
        return self.read()

    def read(self) -> tuple[int | None, float, str]:
        """pytest's exit code (None: timeout), the seconds it took, and the last lines of its output."""
        with self._output as output:
            output.seek(0)
            tail = [line for line in output.read().splitlines() if line.strip()][-3:]
        return self._code, time.monotonic() - self._start, "\n".join(tail)


@contextmanager
def mutated(mutation: Mutation) -> Iterator[Path]:
    """A copy of the repository with this mutation."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "repository"
        shutil.copytree(REPOSITORY, root, ignore=SKIPPED)
        path = root / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        yield root


def judge(mutation: Mutation, code: int | None, seconds: float, tail: str) -> Outcome:
    if code == 1:
        failed = [line for line in tail.splitlines() if line.startswith("FAILED")]
        return Outcome(mutation, "noticed", f"{seconds:.0f} s  {failed[0] if failed else tail}")
    if code is None:
        return Outcome(mutation, "noticed", f"by a timeout after {TIMEOUT:g} s")
    if code == 0:
        return Outcome(mutation, "SURVIVED", f"{seconds:.0f} s  {', '.join(mutation.tests)}")
    return Outcome(mutation, "INVALID", f"pytest ended with {code}: {tail}")


def try_all(mutations: Sequence[Mutation], jobs: int) -> Iterator[Outcome]:
    """What became of each, as it is known, with so many under way at a time."""
    waiting = [(mutation, 1) for mutation in mutations]  # with how many templates; one takes least
    under_way: list[tuple[Mutation, int, Trial, ExitStack]] = []
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            mutation, templates = waiting.pop(0)
            fault = find_fault(mutation, REPOSITORY)
            if fault is not None:
                yield Outcome(mutation, "INVALID", fault)
                continue
            copy = ExitStack()
            root = copy.enter_context(mutated(mutation))
            under_way.append((mutation, templates, Trial(root, mutation.tests, TIMEOUT, templates=templates), copy))
        time.sleep(PAUSE)
        for entry in [entry for entry in under_way if entry[2].is_over()]:
            under_way.remove(entry)
            mutation, templates, trial, copy = entry
            copy.close()
            outcome = judge(mutation, *trial.read())
            if outcome.verdict == "SURVIVED" and templates == 1:
                waiting.append((mutation, 2))  # it may show between ranks that hash strings otherwise
            else:
                yield outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only mutations whose file, old text or reason contains this")
    parser.add_argument("--list", action="store_true", help="list them and check that they still match; run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutations to try at a time")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in m.file + "\n" + m.old + "\n" + m.why]
    if not chosen:
        print(f"no mutation contains {arguments.only!r}")
        return 2
    if arguments.list:
        faults = [find_fault(mutation, REPOSITORY) for mutation in chosen]
        for mutation, fault in zip(chosen, faults):
            print(f"{mutation}{'' if fault is None else f'  INVALID: {fault}'}")
        return int(any(fault is not None for fault in faults))

    every = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
    files = {test.partition("::")[0] for test in every}
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the forked processes leave these pages shared
    code, seconds, tail = Trial(REPOSITORY, every, TIMEOUT * len(files), templates=2).result()
    if code != 0:
        print(f"the tests must pass before they can judge: pytest ended with {code}\n{tail}")
        return 2
    print(f"{len(chosen)} mutations; the unmutated tests pass in {seconds:.0f} s", flush=True)
    bad = []
    for outcome in try_all(chosen, arguments.jobs):
        print(f"{outcome.verdict:9s} {outcome.mutation}\n          {outcome.detail}", flush=True)
        if outcome.verdict != "noticed":
            bad.append(outcome)
    print(f"\n{len(chosen) - len(bad)} of {len(chosen)} noticed")
    for outcome in bad:
        print(f"{outcome.verdict} {outcome.mutation}: {outcome.detail}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
