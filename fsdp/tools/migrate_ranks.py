"""Branches of a script that some ranks run alone, and the calls in them that need all ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from fsdp.tools.migrate_flow import Flow
from fsdp.tools.migrate_source import FUNCTIONS, Source

_CHIEF_ONLY = re.compile(r"(?i)(rank|main|master|chief)\w*(only|zero|0)|(on|only)\w*(rank|main|master|chief)")
_WRITES = re.compile(
    r"(os|shutil)\.\w+|(.*\.)?\w*(save|print|dump|write|log|open|mkdir|link|upload|add_\w|info|warn)\w*"
)
_LEAVE = (ast.Return, ast.Continue, ast.Break)


class Branch(NamedTuple):
    """Statements that some ranks run alone.

    Attributes:
        line: the line of the condition.
        condition: ``if rank == 0`` or ``@rank_zero_only``.
        statements: the statements under it.
    """

    line: int
    condition: str
    statements: list[ast.stmt]


def branch_of(node: ast.AST, source: Source, flow: Flow) -> Branch | None:
    """Return the innermost branch around ``node``, in its function, that some ranks run alone."""
    for inner, outer in source.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test:
            some = flow.of_some_ranks(outer.test)
            is_else = inner is outer.orelse or (isinstance(outer, ast.If) and inner in outer.orelse)
            block: list[ast.stmt] = [] if isinstance(outer, ast.IfExp) else outer.orelse if is_else else outer.body
            if some:
                return Branch(outer.lineno, f"if {_negated(outer.test) if is_else else some}", block)
        for field in ("body", "orelse", "finalbody"):
            siblings = getattr(outer, field, [])
            place = siblings.index(inner) if isinstance(siblings, list) and inner in siblings else 0
            for number in range(place):
                before = siblings[number]
                if isinstance(before, ast.If) and _leaves(before, flow):
                    return Branch(before.lineno, f"if {_negated(before.test)}", siblings[number + 1 :])
        if isinstance(outer, FUNCTIONS):
            shown = [d for d in outer.decorator_list if inner is not d and _CHIEF_ONLY.search(ast.unparse(d))]
            return Branch(shown[0].lineno, f"@{ast.unparse(shown[0])}", outer.body) if shown else None
    return None


def _leaves(statement: ast.If, flow: Flow) -> bool:
    """Return True for ``if rank != 0: return``."""
    return isinstance(statement.body[-1], _LEAVE) and bool(flow.of_some_ranks(statement.test))


def _negated(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp):
        return ast.unparse(test.operand)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        other = ast.NotEq() if isinstance(test.ops[0], ast.Eq) else ast.Eq()
        return ast.unparse(ast.Compare(test.left, [other], test.comparators))
    return f"not ({ast.unparse(test)})"


def findings_about_ranks(source: Source, flow: Flow) -> Iterator[tuple[int, str]]:
    """Yield lines and advice for the branches of some ranks that lead to calls for all ranks."""
    branches: dict[tuple[int, str], Branch] = {}
    needed: dict[tuple[int, str], dict[str, None]] = {}
    for call in flow.calls:
        if (branch := branch_of(call, source, flow)) and (for_all := _for_all_ranks(call, flow)):
            inner = for_all[0]
            function = getattr(source.function_of(inner), "name", "")
            way = "" if inner is call else f" (which leads to {ast.unparse(inner.func)}() in {function})"
            branches[branch[:2]] = branch
            needed.setdefault(branch[:2], {})[f"{ast.unparse(call.func)}(){way}"] = None
    for place, (line, condition, statements) in branches.items():
        yield (
            line,
            f"`{condition}` lets some ranks alone call {', '.join(needed[place])}, and all ranks have to: let all come "
            "here, and keep the condition for what prints or writes",
        )
        for line_below, earlier in _writes(statements, flow, set()):
            before = f"call {earlier} first on all ranks, and " if earlier else ""
            yield line_below, f"{before}keep this under `{condition}`, when all ranks come here"


def _for_all_ranks(call: ast.Call, flow: Flow) -> list[ast.Call]:
    return [each for each in flow.reached(call) if flow.needs_all_ranks(each)]


def _writes(statements: list[ast.stmt], flow: Flow, seen: set[Any]) -> Iterator[tuple[int, str]]:
    """Yield the lines in ``statements`` that print or write, and the calls in these lines that all ranks have to make.

    The functions that lead to calls for all ranks are searched as well.
    """
    for statement in statements:
        if isinstance(statement, ast.If) and flow.of_some_ranks(statement.test):
            if _leaves(statement, flow):
                return
            continue
        blocks = [getattr(statement, field, []) for field in ("body", "orelse", "handlers", "finalbody")]
        inside = {node for block in blocks for each in block for node in ast.walk(each)}
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node not in inside]
        writing = [call for call in calls if isinstance(statement, (ast.Expr, ast.With)) and _is_write(call, flow)]
        if writing:
            yield statement.lineno, ", ".join(f"{ast.unparse(c.func)}()" for c in calls if _for_all_ranks(c, flow))
        for call in calls:
            for function in flow.targets(call) if _for_all_ranks(call, flow) else ():
                if function not in seen:
                    seen.add(function)
                    yield from _writes(function.body, flow, seen)
        for block in blocks if not writing else ():
            yield from _writes(block, flow, seen)


def _is_write(call: ast.Call, flow: Flow) -> bool:
    """Return True if ``call`` prints or writes, and does not lead to calls for all ranks."""
    return not _for_all_ranks(call, flow) and any(_WRITES.fullmatch(ast.unparse(c.func)) for c in flow.reached(call))
