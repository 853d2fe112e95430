"""Runs the test suite in three pytest processes side by side, with the type checker beside them.

    python scripts/run_tests.py [-x] [--quick] [--workers N] [--no-types] [FILE ...]

Most of the suite's time is waiting: ranks wait for each other and for time limits. So files are distributed to several
pytest processes, one more than a machine of two cores has, and the longest first. Each process keeps the ranks' pool
from file to file. All are forked from one process, which has collected the tests (`tests/harness/handout.py`).

Tests marked `serial` run last, one at a time. A failure is shown in full as soon as it happens; the run continues,
unless -x ends it there. The last line counts as pytest's does. Exits with 0 only if at least one test passed, none
failed, every collected test ran, and the type checker found no error.

For one file or one test use pytest itself: `bash scripts/test.sh tests/test_layout.py -k gaps`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.harness.handout import SERIAL, Ask, Collected, Done, Report, Started  # noqa: E402
from tests.harness.template import Forked, Request, Template  # noqa: E402

# Seconds of the files that take longest, roughly: only their order matters. A file that is not here counts as SHORT.
COSTS: dict[str, float] = {
    "tests/test_backward.py": 50,
    "tests/test_examples.py": 50,
    "tests/test_streams.py": 50,
    "tests/test_checkpoints.py": 45,
    "tests/test_out_of_step.py": 45,
    "tests/test_parity.py": 45,
    "tests/test_waits.py": 44,
    "tests/test_device_mesh.py": 40,
    "tests/test_reliability_numerics.py": 40,
    "tests/test_compile.py": 35,
    "tests/test_async_save.py": 33,
    "tests/test_communication.py": 32,
    "tests/test_lifecycle.py": 32,
    "tests/test_stages.py": 28,
    "tests/test_tensor_parallel.py": 40,
    "tests/test_plan.py": 22,
    "tests/test_run_tests.py": 22,
    "tests/test_store.py": 21,
    "tests/test_hybrid.py": 20,
    "tests/test_reduce_unused.py": 20,
    "tests/test_shared_memory.py": 20,
    "tests/test_whole_params.py": 20,
    "tests/test_differing_ranks.py": 19,
    "tests/test_accumulation.py": 18,
    "tests/test_backward_end.py": 18,
    "tests/test_clients.py": 18,
    "tests/test_agreement.py": 17,
    "tests/test_precision_values.py": 17,
    "tests/test_state_dict.py": 17,
    "tests/test_uneven_batches.py": 17,
    "tests/test_comm_hooks.py": 16,
    "tests/test_compat.py": 16,
    "tests/test_optim_state.py": 16,
    "tests/test_precision.py": 16,
    "tests/test_writes.py": 16,
    "tests/test_full_params.py": 15,
    "tests/test_reliability_faults.py": 15,
    "tests/test_short_examples.py": 15,
    "tests/test_clip.py": 14,
    "tests/test_harness.py": 14,
    "tests/test_module_groups.py": 14,
    "tests/test_optim_round_trip.py": 14,
    "tests/test_optim_state_costs.py": 14,
    "tests/test_patch.py": 14,
    "tests/test_backward_faults.py": 12,
    "tests/test_fuzz_backward.py": 12,
    "tests/test_reduce_gradients.py": 12,
    "tests/test_store_promises.py": 12,
    "tests/test_switches.py": 12,
    "tests/test_by_hand.py": 11,
    "tests/test_precision_casts.py": 11,
    "tests/test_prefetch.py": 11,
    "tests/test_threads.py": 11,
    "tests/test_interplay.py": 10,
    "tests/test_outside_of_forward.py": 10,
    "tests/test_backward_outputs.py": 9,
    "tests/test_write_table.py": 9,
    "tests/test_architecture.py": 8,
    "tests/test_backward_frozen.py": 8,
    "tests/test_dcp.py": 8,
    "tests/test_documents.py": 8,
    "tests/test_from_ddp.py": 8,
    "tests/test_grad_scaler.py": 8,
    "tests/test_libraries.py": 8,
    "tests/test_mistakes.py": 8,
    "tests/test_store_scale.py": 8,
    "tests/test_versions.py": 8,
    "tests/test_backward_stale.py": 7,
    "tests/test_instruments.py": 7,
    "tests/test_layout.py": 7,
    "tests/test_ownership.py": 7,
    "tests/test_reshard_ranks.py": 7,
    "tests/test_host_cost.py": 6,
    "tests/test_lane.py": 6,
    "tests/test_state_dict_costs.py": 6,
    "tests/test_wrapper.py": 6,
}
SHORT = 5.0

# The tests of `--quick`, which takes a minute: those that most mistakes break first.
QUICK = [
    "tests/test_architecture.py",
    "tests/test_api.py",
    "tests/test_layout.py",
    "tests/test_members.py",
    "tests/test_wrap.py",
    "tests/test_wrapper.py",
    "tests/test_ownership.py",
    "tests/test_errors.py",
    "tests/test_optim_state.py",
    "tests/test_state_dict.py",
    "tests/test_consensus.py",
    "tests/test_nested.py",
    "tests/test_ragged.py",
    "tests/test_names.py",
]

PATIENCE = 15.0  # seconds that a pytest process gets to end after it was interrupted


class Queue:
    """The parts of the suite that wait for a process. Serial parts run one by one, when no other part runs."""

    def __init__(self, busy: int = 0) -> None:
        self._changed = threading.Condition()
        self._parts: dict[str, int] | None = None  # all, with their numbers of tests
        self._parallel: list[str] = []
        self._serial: list[str] = []
        self._busy = busy  # running parts, and other work that must not run beside serial tests
        self.stopped = False

    def offer(self, parts: dict[str, int]) -> None:
        with self._changed:
            if self._parts is None:
                self._parts = parts
                self._serial = sorted(name for name in parts if name.endswith(f" {SERIAL}"))
                rest = sorted(set(parts) - set(self._serial))
                self._parallel = sorted(rest, key=lambda name: COSTS.get(name, SHORT), reverse=True)

    def take(self) -> str | None:
        with self._changed:
            while not self.stopped and not self._parallel and self._serial and self._busy:
                self._changed.wait()
            waiting = self._parallel or self._serial
            if self.stopped or not waiting:
                return None
            self._busy += 1
            return waiting.pop(0)

    def done(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    @property
    def left(self) -> bool:
        """True until everything has been handed out, and before anything is known."""
        with self._changed:
            return not self.stopped and (self._parts is None or bool(self._parallel or self._serial))

    def number_of_parts(self) -> int:
        with self._changed:
            return len(self._parts or {})

    def number_of_tests(self) -> int:
        with self._changed:
            return sum((self._parts or {}).values())


@dataclass
class Results:
    """Results of tests, counted and printed. Methods may be called from any thread."""

    stop_at_failure: bool
    queue: Queue
    outcomes: Counter[str] = field(default_factory=Counter)
    tests: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)  # one line each
    skips: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)
    _printing: threading.Lock = field(default_factory=threading.Lock)

    def report(self, report: Report) -> None:
        with self._printing:
            self.outcomes[report.outcome] += 1
            self.tests.add(report.test)
            self.slowest = sorted([*self.slowest, (report.seconds, report.test)], reverse=True)[:10]
            if report.outcome == "skipped":
                self.skips[f"{report.test.partition('::')[0]}: {report.text}"] += 1
        if report.outcome in ("failed", "error", "xpassed"):
            self.fail(f"{report.outcome.upper()} {report.test}", report.text or "it passed, marked as a known failure")

    def fail(self, line: str, text: str) -> None:
        with self._printing:
            self.failures.append(line)
            print(f"\n{_rule(line, '_')}\n{text}\n", flush=True)
        if self.stop_at_failure:
            self.queue.stop()

    def finished(self, part: str, outcomes: Counter[str], seconds: float) -> None:
        with self._printing:
            self.costs[part] = seconds
            total = str(self.queue.number_of_parts())
            print(
                f"[{len(self.costs):{len(total)}}/{total}] {part:<42} {_count(outcomes)} in {seconds:.1f} s", flush=True
            )

    def conclude(self) -> int:
        """Print the summary; the exit code."""
        ran, collected = len(self.tests), self.queue.number_of_tests()
        if ran < collected and not self.queue.stopped:
            self.failures.append(f"ERROR {collected - ran} collected tests did not run")
        print(_rule("slowest tests", "="))
        for seconds, test in self.slowest:
            print(f"{seconds:8.1f} s  {test}")
        if self.skips or self.failures:
            print(_rule("short test summary", "="))
        for reason, count in sorted(self.skips.items()):
            print(f"SKIPPED [{count}] {reason}")
        print(*self.failures, sep="\n", end="\n" if self.failures else "")
        if self.queue.stopped:
            print(f"stopped early: {ran} of {collected} tests were run")
        seconds = time.monotonic() - self.start
        minutes = f" ({int(seconds) // 60}:{int(seconds) % 60:02d})" if seconds >= 60 else ""
        print(_rule(f"{_count(self.outcomes)} in {seconds:.2f}s{minutes}", "="), flush=True)
        if not self.outcomes["passed"]:
            print("no test passed: nothing has been shown")
        return int(bool(self.failures) or not self.outcomes["passed"] or self.queue.stopped)


def _count(outcomes: Counter[str]) -> str:
    order = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    found = [
        f"{outcomes[kind]} {kind}{'s' * (kind == 'error' and outcomes[kind] > 1)}" for kind in order if outcomes[kind]
    ]
    return ", ".join(found) or "no tests ran"


def _rule(text: str, line: str) -> str:
    return f" {text} ".center(100, line)


class Collector:
    """The process that collects the tests and forks the test processes."""

    def __init__(self, queue: Queue, results: Results, arguments: Sequence[str]) -> None:
        self._queue, self._results = queue, results
        self._failing = threading.Lock()
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        # a fork has no threads of the parent
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the same files
        command = ["-m", "pytest", "-q", "--tb=auto", "-p", "tests.harness.handout", *arguments]
        self._template = Template(command, environment)

    def fork(self, pipe: int, output: int) -> Forked | None:
        """A pytest process, once the tests are collected. None if they are not."""
        try:
            return self._template.fork(Request((), {}, (), ""), [pipe], output)
        except RuntimeError:
            with self._failing:
                if not self._queue.stopped:
                    how = _how_it_ended(self._template.process.wait())
                    self._results.fail(
                        f"ERROR pytest {how} while it collected the tests", self._template.said()[-20_000:]
                    )
                    self._queue.stop()
            return None

    def interrupt(self) -> None:
        """End the collection, if it is not over."""
        self._template.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self._template.close()


class Worker:
    """One place for a pytest process: a new one takes over where one died."""

    def __init__(self, number: int, queue: Queue, results: Results, collector: Collector, folder: Path) -> None:
        self._number, self._queue, self._results = number, queue, results
        self._collector, self._log = collector, folder / f"worker{number}.log"
        self._process: Forked | None = None
        self._begun = False
        self._part: str | None = None
        self._test = ""

    def run(self) -> None:
        try:
            while self._queue.left and self._run_process():
                pass
        except Exception as error:  # an error of a thread is shown and ends the run as a failed test does
            self._results.fail(f"ERROR worker {self._number}", repr(error))
            self._queue.stop()

    def _run_process(self) -> bool:
        """One pytest process from start to end. False if another one is not needed, or would have no better luck."""
        ours, theirs = socket.socketpair()
        with theirs, open(self._log, "wb") as log:
            self._process = self._collector.fork(theirs.fileno(), log.fileno())
        if self._process is None:
            ours.close()
            return False
        self._begun, self._part, self._test = False, None, ""
        with Connection(ours.detach()) as pipe:
            try:
                self._serve(pipe)
            except (EOFError, ConnectionError):
                pass
        code = self._process.wait()
        if self._part is not None:
            self._queue.done()
        if self._queue.stopped or (code in (0, 1) and self._part is None):  # 0: all passed, 1: some failed
            return False
        doing = f"in {self._test}" if self._test else f"in {self._part}" if self._part else "between files"
        text = self._log.read_text(errors="replace")[-20_000:]
        self._results.fail(f"ERROR pytest {_how_it_ended(code)} {doing}", text)
        return self._begun

    def _serve(self, pipe: Connection) -> None:
        outcomes: Counter[str] = Counter()
        start = time.monotonic()
        while True:
            message = pipe.recv()
            match message:
                case Collected():
                    self._queue.offer(message.parts)
                    self._begun = True
                case Ask():
                    self._part, self._test = self._queue.take(), ""
                    outcomes, start = Counter(), time.monotonic()
                    pipe.send(self._part)
                case Started():
                    self._test = message.test
                case Report():
                    outcomes[message.outcome] += 1
                    self._results.report(message)
                case Done():
                    assert self._part is not None
                    self._results.finished(self._part, outcomes, time.monotonic() - start)
                    self._part, self._test = None, ""
                    self._queue.done()

    def interrupt(self) -> None:
        """End the process as Ctrl-C does, so that it ends its ranks and removes their files; if that fails, kill it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def check_types(queue: Queue, results: Results) -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        results.fail("ERROR mypy", done.stdout + done.stderr)
    else:
        print(f"mypy: {done.stdout.strip()}", flush=True)
    queue.done()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-x", "--exitfirst", action="store_true", help="end the run at the first failure")
    parser.add_argument("--quick", action="store_true", help="a choice of files that takes about a minute")
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="pytest processes side by side (3)")
    parser.add_argument("--no-types", action="store_true", help="without the type checker")
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files (default: all)")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if options.quick and options.files:
        parser.error("--quick chooses the files itself")
    return options


def main() -> int:
    options = parse()
    chosen = QUICK if options.quick else options.files
    arguments = [*chosen, *(["-x"] if options.exitfirst else [])]
    queue = Queue(busy=0 if options.no_types else 1)
    results = Results(options.exitfirst, queue)
    with tempfile.TemporaryDirectory(prefix="run-tests-") as folder:
        collector = Collector(queue, results, arguments)
        workers = [Worker(i, queue, results, collector, Path(folder)) for i in range(options.workers)]
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
        if not options.no_types:
            threads.append(threading.Thread(target=check_types, args=(queue, results), daemon=True))
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not queue.stopped:
                threads[0].join(0.2) if threads[0].is_alive() else time.sleep(0.2)
        except KeyboardInterrupt:
            results.failures.append("interrupted")
            queue.stop()
        if queue.stopped:
            collector.interrupt()
            for worker in workers:
                worker.interrupt()
        for thread in threads:
            thread.join()
        collector.close()
    return results.conclude()


if __name__ == "__main__":
    sys.exit(main())
