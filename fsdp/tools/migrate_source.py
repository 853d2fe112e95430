"""A parsed script: full names of imported names, positions in the text, and edits of it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Edit(NamedTuple):
    """A replacement of the text from byte ``start`` to byte ``end``."""

    start: int
    end: int
    text: str


class Source:
    """The text of a script, with its tree.

    Attributes:
        nodes: statements, expressions and comprehensions.
        aliases: full names of imported names.

    Raises:
        SyntaxError: the text is no Python.
    """

    def __init__(self, text: str, name: str) -> None:
        self._bytes = text.encode()
        lengths = [len(line) for line in self._bytes.splitlines(keepends=True)]
        self._line_starts = [0, *itertools.accumulate(lengths)]
        self.tree = ast.parse(text, name)
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.nodes = [n for n in ast.walk(self.tree) if isinstance(n, (ast.stmt, ast.expr, ast.comprehension))]
        self.aliases: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.split(".")[0]
                    self.aliases[alias.asname or package] = alias.name if alias.asname else package
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                self.aliases.update(names)

    def full(self, node: ast.AST) -> str:
        """Return ``torch.nn.Linear`` for ``nn.Linear``; "" for names that are not imported."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def parent(self, node: ast.AST) -> ast.AST:
        return self._parents[node]

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) pairs from ``node`` outward."""
        while (outer := self._parents.get(node)) is not None:
            yield node, outer
            node = outer

    def function_of(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost function around ``node``; None at module level."""
        return next((outer for _, outer in self.around(node) if isinstance(outer, FUNCTIONS)), None)

    def replace(self, node: Any, text: str) -> Edit:
        start = self.line_start(node.lineno) + node.col_offset
        return Edit(start, self.line_start(node.end_lineno) + node.end_col_offset, text)

    def text_of(self, node: ast.AST) -> str:
        start, end, _ = self.replace(node, "")
        return self._bytes[start:end].decode()

    def line_start(self, line: int) -> int:
        """Return the first byte of a line, counted from 1."""
        return self._line_starts[line - 1]

    def edited(self, edits: list[Edit]) -> str:
        """Return the text after all edits, which do not overlap."""
        text = self._bytes
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text.decode()
