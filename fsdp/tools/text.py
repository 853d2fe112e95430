"""Numbers and tables for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def in_bytes(nbytes: float) -> str:
    """Three digits and a decimal unit: ``1.25 GB``."""
    for unit, size in _UNITS:
        if abs(nbytes) >= 0.9995 * size:
            return f"{nbytes / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{nbytes:.0f} B"


def in_dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under ``head``; the first on the left, the others, of numbers, on the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)
