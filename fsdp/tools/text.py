"""Numbers and tables for people to read."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def in_bytes(nbytes: float) -> str:
    """Format with three digits and a decimal unit: ``1.25 GB``."""
    for unit, size in _UNITS:
        if abs(nbytes) >= 0.9995 * size:
            return f"{nbytes / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{nbytes:.0f} B"


def in_dtype(dtype: object) -> str:
    """Format a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def counted(number: int, noun: str) -> str:
    """Format a count: ``1 unit``, ``2 units``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Format columns of text: the first is aligned to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)
