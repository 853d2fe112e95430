"""pytest plugin of `scripts/run_tests.py`: pytest processes that take files from an external queue.

Loaded with `-p tests.harness.handout`. One process collects the tests and runs none: it is a `template` from which
pytest processes are forked, so torch and the tests are imported once. All share templates of ranks. Each forked
process lists the parts, requests one part after another, runs it like pytest, and reports results. A part is a
file's tests in order without those marked `serial`, or only these, which need an idle machine.

Messages to the parent are `Collected`, `Ask` (answered with a part's name, or None at the end), `Started`, `Report`
and `Done`.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest

from tests.harness import template

COMPILER = "torch._inductor.compile_fx"  # ranks of a few files import it, which takes a second each
SERIAL = "serial"  # the marker, and the suffix of such parts


@dataclass(frozen=True)
class Collected:
    parts: dict[str, int]  # number of tests by the name of their part


@dataclass(frozen=True)
class Ask:
    pass


@dataclass(frozen=True)
class Started:
    test: str


@dataclass(frozen=True)
class Report:
    """One outcome that counts, in pytest's words: "passed", "failed", "error", "skipped", "xfailed", "xpassed"."""

    test: str
    outcome: str
    text: str  # pytest's text of a failure, or the reason of a skip
    seconds: float


@dataclass(frozen=True)
class Done:
    part: str


class Handout:
    pipe: Connection

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._requests = template.control()
        self._at_end: Callable[[], object] = bool
        self._seconds = 0.0  # of the running test

    def pytest_collection(self) -> None:
        pool = sys.modules.get("tests.harness.pool")
        if pool is not None:  # imported by a `conftest`: tests with ranks
            pool.start_templates(also=[COMPILER])  # templates import beside the collection
            self._at_end = pool.end_templates

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        parts: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            parts.setdefault(part_of(item), []).append(item)
        self._fork()
        self.pipe.send(Collected({name: len(items) for name, items in parts.items()}))
        while (name := self._ask()) is not None:
            items = parts[name]
            for item, following in zip(items, [*items[1:], None]):
                self.pipe.send(Started(item.nodeid))
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
            self.pipe.send(Done(name))
        return True

    def _fork(self) -> None:
        """Serve requests for processes. Return in forked processes, which capture output in files of their own."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        _, (pipe,) = template.serve(self._requests, self._at_end)
        capture.start_global_capturing()
        capture.suspend_global_capture(in_=True)
        faulthandler.enable()
        self.pipe = Connection(pipe)

    def _ask(self) -> str | None:
        self.pipe.send(Ask())
        return self.pipe.recv()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None]:
        yield
        self._seconds = report.duration + (0.0 if report.when == "setup" else self._seconds)
        outcome, _, _ = self.config.hook.pytest_report_teststatus(report=report, config=self.config)
        if outcome:
            self.pipe.send(Report(report.nodeid, outcome, _text(report), self._seconds))


def part_of(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    return f"{file} {SERIAL}" if item.get_closest_marker(SERIAL) else file


def _text(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    sections = "".join(f"\n--- {title} ---\n{content.rstrip()}" for title, content in report.sections)
    return report.longreprtext + sections


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("collectonly"):
        config.pluginmanager.register(Handout(config), "handout")
