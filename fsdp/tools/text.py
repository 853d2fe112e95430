"""Numbers and tables for people to read."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class Report(ABC):
    """A result that prints as a table."""

    @abstractmethod
    def _parts(self) -> tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]:
        """Return the lines above the table, the rows, of which the first is the head, and the lines below."""

    def __str__(self) -> str:
        above, rows, below = self._parts()
        widths = [max(map(len, column)) for column in zip(*rows)]
        aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        return "\n".join([*above, *("  ".join(row).rstrip() for row in aligned), *below])

    __repr__ = __str__
