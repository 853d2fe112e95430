"""Residence of gathered units: allowed transitions, and the order in which idle units are evicted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp.runtime.unshard import Residence, Unsharder

PREFETCHED, IN_USE, RECOMPUTED, KEPT = (
    Residence.PREFETCHED,
    Residence.IN_USE,
    Residence.RECOMPUTED,
    Residence.KEPT,
)


def make_unsharder() -> Any:
    """Return an make_unsharder whose units are strings and which gathers nothing."""
    streams: Any = SimpleNamespace(asynchronous_work=True)
    nothing: Any = None
    return Unsharder(nothing, [], streams, nothing, nothing)


def test_idle_units_are_listed_in_the_order_in_which_they_became_idle() -> None:
    residency: Any = make_unsharder()
    for unit in "abcd":
        residency.becomes(unit, PREFETCHED, gathered=True)
    for unit in "ac":
        assert residency.becomes(unit, IN_USE)
    residency.becomes("d", KEPT)
    assert residency.idle == ["b"]
    residency.becomes("a", RECOMPUTED)
    assert residency.idle == ["b", "a"]
    assert residency.becomes("b", Residence.SHARDED)
    assert set(residency) == {"a", "c", "d"}
    assert residency.residence_of("b") is Residence.SHARDED
    assert not residency.becomes("b", IN_USE)  # only a gather provides memory
    assert residency.residence_of("b") is Residence.SHARDED


@pytest.mark.parametrize("then", [RECOMPUTED, KEPT])
def test_a_unit_gathered_for_no_pass_cannot_become_recomputed_or_kept(then: Residence) -> None:
    residency: Any = make_unsharder()
    with pytest.raises(AssertionError, match=f"went from SHARDED to {then.name}"):
        residency.becomes("a", then, gathered=True)


def test_a_prefetched_unit_cannot_become_recomputed() -> None:
    residency: Any = make_unsharder()
    residency.becomes("a", PREFETCHED, gathered=True)
    with pytest.raises(AssertionError, match="went from PREFETCHED to RECOMPUTED"):
        residency.becomes("a", RECOMPUTED)


@pytest.mark.parametrize(("why", "looks_again"), [(PREFETCHED, True), (KEPT, True), (IN_USE, False)])
def test_the_prefetch_position_is_reset_when_a_prefetched_unit_loses_its_memory(
    why: Residence, looks_again: bool
) -> None:
    residency: Any = make_unsharder()
    residency.becomes("next", IN_USE if why is KEPT else why, gathered=True)
    residency.becomes("next", why)
    residency._ahead = 1
    residency.becomes("next", Residence.SHARDED)
    assert residency._ahead == (0 if looks_again else 1)
