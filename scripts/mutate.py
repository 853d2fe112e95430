"""Mutation testing: break one line at a time and see a test fail.

    python scripts/mutate.py [--only SUBSTRING] [--list] [--jobs N]

Applies each mutation of `mutations.py` to a temporary copy of the repository and runs the tests it names. A mutation
that no test notices is a survivor: either a test is missing, or the line does nothing. Exits with 0 only if there are
no survivors, every mutation still matches its file exactly once, and the tests pass without any mutation.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).resolve().parents[1]
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


def run_tests(root: Path, tests: tuple[str, ...], timeout: float) -> tuple[int | None, float, str]:
    """pytest's exit code (None: timeout), the seconds it took, and the last lines of its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", *tests]
    # The copy comes before an installed package, in the tests and in the processes they start.
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    tail = [line for line in output.splitlines() if line.strip()][-3:]
    return code, time.monotonic() - start, "\n".join(tail)


def try_mutation(mutation: Mutation) -> Outcome:
    fault = find_fault(mutation, REPOSITORY)
    if fault is not None:
        return Outcome(mutation, "INVALID", fault)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder) / "repository"
        shutil.copytree(REPOSITORY, root, ignore=SKIPPED)
        path = root / mutation.file
        path.write_text(path.read_text().replace(mutation.old, mutation.new))
        code, seconds, tail = run_tests(root, mutation.tests, TIMEOUT)
    if code == 1:
        failed = [line for line in tail.splitlines() if line.startswith("FAILED")]
        return Outcome(mutation, "noticed", f"{seconds:.0f} s  {failed[0] if failed else tail}")
    if code is None:
        return Outcome(mutation, "noticed", f"by a timeout after {TIMEOUT:g} s")
    if code == 0:
        return Outcome(mutation, "SURVIVED", f"{seconds:.0f} s  {', '.join(mutation.tests)}")
    return Outcome(mutation, "INVALID", f"pytest ended with {code}: {tail}")


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
    code, seconds, tail = run_tests(REPOSITORY, every, TIMEOUT * len(files))
    if code != 0:
        print(f"the tests must pass before they can judge: pytest ended with {code}\n{tail}")
        return 2
    print(f"{len(chosen)} mutations; the unmutated tests pass in {seconds:.0f} s", flush=True)
    bad = []
    with ThreadPoolExecutor(arguments.jobs) as executor:
        for outcome in executor.map(try_mutation, chosen):
            print(f"{outcome.verdict:9s} {outcome.mutation}\n          {outcome.detail}", flush=True)
            if outcome.verdict != "noticed":
                bad.append(outcome)
    print(f"\n{len(chosen) - len(bad)} of {len(chosen)} noticed")
    for outcome in bad:
        print(f"{outcome.verdict} {outcome.mutation}: {outcome.detail}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
