"""Fewer cases than a product has, in which still every two values meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def by_turns(longer: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of each value of `longer` with one of each other axis, whose values take turns."""
    return [(value, *(axis[place % len(axis)] for axis in others)) for place, value in enumerate(longer)]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of the product of `axes`, in its order, in which any two values of different axes stand together.

    Most mistakes show where two choices meet, few need three of a kind. Each row is one that has most pairs which no
    row before has.
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
