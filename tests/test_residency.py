"""Why units are gathered: what may follow what, and which idle one goes first."""

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


def unsharder() -> Any:
    """One whose units are strings: it gathers nothing."""
    streams: Any = SimpleNamespace(asynchronous_work=True)
    nothing: Any = None
    return Unsharder(nothing, [], streams, nothing, nothing)


def test_idle_units_stand_in_the_order_in_which_they_became_so() -> None:
    residency: Any = unsharder()
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
    assert not residency.becomes("b", IN_USE)  # only a gather gives it memory
    assert residency.residence_of("b") is Residence.SHARDED


@pytest.mark.parametrize("then", [RECOMPUTED, KEPT])
def test_nothing_is_left_by_a_pass_that_was_not_gathered_for_it(then: Residence) -> None:
    residency: Any = unsharder()
    with pytest.raises(AssertionError, match=f"went from SHARDED to {then.name}"):
        residency.becomes("a", then, gathered=True)


def test_what_was_gathered_ahead_is_recomputed_only_in_use() -> None:
    residency: Any = unsharder()
    residency.becomes("a", PREFETCHED, gathered=True)
    with pytest.raises(AssertionError, match="went from PREFETCHED to RECOMPUTED"):
        residency.becomes("a", RECOMPUTED)


@pytest.mark.parametrize(("why", "looks_again"), [(PREFETCHED, True), (KEPT, True), (IN_USE, False)])
def test_what_comes_next_is_looked_at_again_once_some_of_it_has_lost_its_memory(
    why: Residence, looks_again: bool
) -> None:
    residency: Any = unsharder()
    residency.becomes("next", IN_USE if why is KEPT else why, gathered=True)
    residency.becomes("next", why)
    residency._ahead = 1
    residency.becomes("next", Residence.SHARDED)
    assert residency._ahead == (0 if looks_again else 1)
