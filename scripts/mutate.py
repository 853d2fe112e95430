"""Mutation testing of a change: break one line of the diff at a time, and see a test fail.

    python scripts/mutate.py [--base REV] [--tests FILE ...] [--most N]

Each statement, condition and keyword argument on a line of the package that was added since ``--base`` (HEAD: the
uncommitted change) is mutated: the statement is deleted, the condition negated, the argument dropped. Of more than 100
mutants (``--most``) some are tried, spread over the change. The tests of the file run on a copy of the repository. A
mutant that no test notices survives: either a test is missing, or the code has no effect. It needs a test only if a
user would notice the fault. The tests of a file are those that import it, unless ``--tests`` names different ones.
Exits with 0 only if there are no survivors.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT = 300.0  # seconds for the tests of one mutant; a mutant that hangs them is noticed
SKIPPED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", ".mypy_cache", ".ruff_cache", "build")
_DELETABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Assert, ast.Continue, ast.Break)
_TYPING = ("assert isinstance", "assert_never")  # statements for the type checker alone


@dataclass(frozen=True)
class Mutant:
    """A file with one mutation: the text between two offsets is replaced."""

    file: str
    line: int
    what: str
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def mutants_of(file: str, source: str, lines: set[int]) -> Iterator[Mutant]:
    """Yield the mutants of ``source`` at the given line numbers, in the order of the source."""
    tree = ast.parse(source)
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line.encode()))
    encoded = source.encode()

    def offset(line: int, column: int) -> int:
        """Return the offset in characters; ``ast`` counts columns in bytes."""
        return len(encoded[: begins[line - 1] + column].decode())

    def mutant(node: ast.stmt | ast.expr, text: str, what: str) -> Mutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        shown = " ".join(source[start:end].split())
        return Mutant(file, node.lineno, f"{what} `{shown[:80]}`", start, end, text)

    found = []
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) not in lines:
            continue
        if isinstance(node, _DELETABLE) and not _is_inert(node):
            found.append(mutant(node, "pass", "delete"))
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            found.append(mutant(node, "return None", "return None instead of"))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            found.append(mutant(node.test, f"(not ({ast.unparse(node.test)}))", "negate"))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    rest = [other for other in node.keywords if other is not keyword]
                    without = ast.Call(node.func, node.args, rest)
                    found.append(mutant(node, ast.unparse(without), f"drop {keyword.arg}= of"))
    yield from sorted(found, key=lambda each: (each.line, each.start, each.what))


def _is_inert(node: ast.AST) -> bool:
    """Whether a statement is a docstring, or serves the type checker alone."""
    text = ast.unparse(node)
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or text.startswith(_TYPING)


def added_lines(base: str) -> dict[str, set[int]]:
    """Return the numbers of the package's lines that were added since ``base``, by file."""
    command = ["git", "diff", "--unified=0", "--no-color", base, "--", "fsdp"]
    diff = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    added: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line[6:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            if file.endswith(".py") and count:
                added.setdefault(file, set()).update(range(first, first + count))
    return added


def find_tests(file: str) -> list[str]:
    """Return the test files that import ``file`` or a name of it."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, name = module.rpartition(".")
    whole, package = re.escape(module), re.escape(parent)
    imports = re.compile(
        rf"^\s*(from {whole} import|import {whole}\b|from {package} import .*\b{name}\b)", re.MULTILINE
    )
    tests = sorted((REPOSITORY / "tests").glob("test_*.py"))
    return [f"tests/{test.name}" for test in tests if test.stem == f"test_{name}" or imports.search(test.read_text())]


def run_tests(root: Path, tests: Sequence[str]) -> int:
    """Run pytest on the copy at ``root``, and return its exit code; 1 after a timeout."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=short", *tests]
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that the tests have started
            return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="the revision that the change is relative to")
    parser.add_argument("--tests", nargs="+", help="tests to run instead of those that import the file")
    parser.add_argument("--most", type=int, default=100, help="mutants to try at most (100)")
    arguments = parser.parse_args()
    changed = added_lines(arguments.base)
    sources = {file: (REPOSITORY / file).read_text() for file in changed}
    found = [mutant for file, lines in changed.items() for mutant in mutants_of(file, sources[file], lines)]
    count = min(len(found), arguments.most)
    chosen = [found[number * len(found) // count] for number in range(count)]
    tests = {mutant.file: arguments.tests or find_tests(mutant.file) for mutant in chosen}
    if without := [file for file, its in tests.items() if not its]:
        parser.error(f"no test imports {', '.join(without)}: name some by --tests")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = Path(folder) / "copy"
        shutil.copytree(REPOSITORY, root, ignore=SKIPPED)
        every = sorted({test for several in tests.values() for test in several})
        if chosen and (code := run_tests(root, every)):
            print(f"the tests have to pass before they can judge, and pytest ended with {code}: {', '.join(every)}")
            return 2
        for mutant in chosen:
            (root / mutant.file).write_text(mutant.apply(sources[mutant.file]))
            verdict = {0: "SURVIVED", 1: "noticed"}.get(run_tests(root, tests[mutant.file]), "INVALID")
            (root / mutant.file).write_text(sources[mutant.file])
            print(f"{verdict:8s} {mutant}", flush=True)
            survivors += [mutant] if verdict == "SURVIVED" else []
    print(f"\n{len(survivors)} of {len(chosen)} mutants survived", *survivors, sep="\n")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
