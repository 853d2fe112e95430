"""Residence of gathered units: the order in which idle units are evicted, and when prefetching looks again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp.runtime.unshard import Gathered, Residence, Unsharder

PREFETCHED, IN_USE, RECOMPUTED, KEPT = (Residence.PREFETCHED, Residence.IN_USE, Residence.RECOMPUTED, Residence.KEPT)


def make_unsharder(*units: str) -> Any:
    """Return an unsharder, which gathers nothing, of units that are strings and prefetched."""
    streams: Any = SimpleNamespace(asynchronous_work=True)
    nothing: Any = None
    unsharder: Any = Unsharder(nothing, [], streams, nothing, nothing)
    unsharder._gathered.update({unit: Gathered(PREFETCHED) for unit in units})
    return unsharder


def test_idle_units_are_listed_in_the_order_in_which_they_became_idle() -> None:
    unsharder = make_unsharder(*"abcd")
    for unit in "ac":
        unsharder.becomes(unit, IN_USE)
    unsharder.becomes("d", KEPT)
    assert unsharder.idle == ["b"]
    unsharder.becomes("a", RECOMPUTED)
    assert unsharder.idle == ["b", "a"]
    unsharder.becomes("b", Residence.SHARDED)
    assert set(unsharder) == {"a", "c", "d"}
    assert unsharder.residence_of("b") is Residence.SHARDED
    unsharder.becomes("b", IN_USE)  # only a gather provides memory
    assert unsharder.residence_of("b") is Residence.SHARDED


@pytest.mark.parametrize(("why", "looks_again"), [(PREFETCHED, True), (KEPT, True), (IN_USE, False)])
def test_the_prefetch_position_is_reset_when_a_prefetched_unit_loses_its_memory(
    why: Residence, looks_again: bool
) -> None:
    unsharder = make_unsharder("next")
    unsharder.becomes("next", why)
    unsharder._ahead = 1
    unsharder.becomes("next", Residence.SHARDED)
    assert unsharder._ahead == (0 if looks_again else 1)
