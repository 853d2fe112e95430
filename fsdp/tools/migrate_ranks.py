"""Branches of a script that some ranks run alone, and the calls in them that need all ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fsdp.tools.migrate_flow import Flow
from fsdp.tools.migrate_source import FUNCTIONS, Source

_SOME_RANKS = re.compile(  # conditions that differ between ranks
    r"""(?ix)
    (?<!lora_)rank[\]'()]*(\s%\s\d+)? \s (==|!=|<|<=|>)\s(\d|[\w.]*rank) | rank\s(not\s)?in\s[\[({]  # rank == 0
    | \b0\s(==|!=)\s[\w.]*rank\b | \bnot\s[\w.]*rank\b
    | \b(?!n_|num_)(\w+_)?(gpu|device|replica|process|worker)(_?(id|index))?\s(==|!=)\s'?0
    | \bis_?(\w+_)?(main|master|chief|leader|root|primary|zero) | \b(master|chief)\b | rank_?zero
    | (main|master|chief|primary|leader)_?(process|rank|proc|worker|node)
    """
)
_LEAVE = (ast.Return, ast.Continue, ast.Break)


def _of_some_ranks(test: ast.expr) -> bool:
    return bool(_SOME_RANKS.search(ast.unparse(test)))


def _branch_of(node: ast.AST, source: Source) -> tuple[int, str] | None:
    """Return line and condition of the innermost branch around ``node``, in its function, that some ranks run alone."""
    for inner, outer in source.around(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test and _of_some_ranks(outer.test):
            return outer.lineno, f"if {ast.unparse(outer.test)}"
        for block in (getattr(outer, field, None) for field in ("body", "orelse", "finalbody")):
            for before in block[: block.index(inner)] if isinstance(block, list) and inner in block else ():
                if isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVE) and _of_some_ranks(before.test):
                    return before.lineno, f"if {ast.unparse(before.test)}"
        if isinstance(outer, FUNCTIONS):
            break
    return None


def findings_about_ranks(source: Source, flow: Flow) -> Iterator[tuple[int, str]]:
    """Yield lines and advice for the branches of some ranks that lead to calls for all ranks."""
    needed: dict[tuple[int, str], dict[str, None]] = {}
    for call in flow.calls:
        if (branch := _branch_of(call, source)) is None:
            continue
        if inner := next((each for each in flow.reached(call) if flow.needs_all_ranks(each)), None):
            function = getattr(source.function_of(inner), "name", "")
            way = "" if inner is call else f" (which leads to {ast.unparse(inner.func)}() in {function})"
            needed.setdefault(branch, {})[f"{ast.unparse(call.func)}(){way}"] = None
    for (line, condition), calls in needed.items():
        yield (
            line,
            f"`{condition}` lets some ranks alone call {', '.join(calls)}, and all ranks have to: let all come here, "
            "and keep the condition for what prints or writes",
        )
