"""What ranks tell each other about a state dict, in words: small all-reduces of integers, in the units' own groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from fsdp.runtime.unit import Unit


def problem_of_others(
    units: Iterable[Unit], problem: str, given: Mapping[Unit, Iterable[str]] | None = None
) -> str | None:
    """A problem that some other rank of a unit's group has, or None; ``problem`` is this rank's own, "" for none.

    It is one, too, if the ranks were given different things: ``given`` names what this rank has for each unit, and is
    compared where no rank has a problem of its own.
    """
    theirs: str | None = None
    alike: dict[tuple[int, int], list[Unit]] = {}
    for unit in units:
        if unit.groups.data_parallel_size > 1:
            alike.setdefault((id(unit.groups.shard), id(unit.groups.replica)), []).append(unit)
    for of_group in alike.values():
        names = [name for unit in of_group for name in (given or {}).get(unit, ())]
        own = (problem or theirs or "").encode() or None
        digest = int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "big")
        votes = torch.tensor([_vote(of_group[0], own), digest, -digest], device="cpu")
        of_group[0].agree_on_maximum(votes)
        said = None
        if int(votes[0]) > 0:
            said = _heard(of_group[0], own, int(votes[0]))
        elif int(votes[1]) != -int(votes[2]):
            said = _differences(of_group[0], names)
        if said is not None and not problem:
            theirs = said.decode()
    return theirs


def share(unit: Unit, data: bytes | None) -> bytes | None:
    """What the first of the unit's ranks that has something has; None if none has."""
    votes = torch.tensor([_vote(unit, data)], device="cpu")
    unit.agree_on_maximum(votes)
    return _heard(unit, data, int(votes)) if int(votes) > 0 else None


def _rank(unit: Unit) -> int:
    return unit.groups.replica_rank * unit.groups.shard_size + unit.groups.shard_rank


def _vote(unit: Unit, data: bytes | None) -> int:
    """The first rank that has something has the largest."""
    return unit.groups.data_parallel_size - _rank(unit) if data else 0


def _heard(unit: Unit, data: bytes | None, largest: int) -> bytes:
    """What the rank with the ``largest`` vote has."""
    speaks = data if data is not None and largest == _vote(unit, data) else b""
    length = torch.tensor([len(speaks)], device="cpu")
    unit.agree_on_maximum(length)
    letters = torch.zeros(int(length), dtype=torch.int64, device="cpu")
    if speaks:
        letters.copy_(torch.frombuffer(bytearray(speaks), dtype=torch.uint8))
    unit.agree_on_maximum(letters)
    return bytes(letters.tolist())


def _differences(unit: Unit, names: list[str]) -> bytes:
    """In what the ranks' ``names`` differ, which they do: between the first rank and the first that differs from it."""
    first = share(unit, "\n".join(["", *names]).encode() if _rank(unit) == 0 else None)
    assert first is not None
    theirs = first.decode().split("\n")[1:]
    different = [*(name for name in theirs if name not in names), *(name for name in names if name not in theirs)]
    said = share(
        unit, f"the state dict differs from that here in {', '.join(different)}".encode() if different else None
    )
    return said or b"the state dict has the same in another order"
