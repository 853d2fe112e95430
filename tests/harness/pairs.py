"""Few cases of a product in which any two values still occur together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def by_turns(longer: Sequence[Any], *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of each value of `longer` with one value of each further axis, by turns."""
    return [(value, *(axis[row % len(axis)] for axis in axes)) for row, value in enumerate(longer)]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of the product of `axes`, in order, so that any two values of different axes share a row.

    Most mistakes show where two choices meet; few need three. Each row adds the largest number of new pairs.
    """
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [tuple(axis[index] for axis, index in zip(axes, row)) for row in sorted(chosen)]
