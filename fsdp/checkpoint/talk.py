"""What ranks tell each other about a state dict, in words: small all-reduces of integers, in the units' own groups."""

from __future__ import annotations

import torch

from fsdp.runtime.unit import Unit


def problem_of_others(units: list[Unit], problem: str) -> str | None:
    """A problem that some other rank of a unit's group has, or None; ``problem`` is this rank's own, "" for none."""
    theirs: str | None = None
    asked: set[tuple[int, int]] = set()
    for unit in units:
        groups = unit.groups
        key = (id(groups.shard), id(groups.replica))
        if groups.data_parallel_size == 1 or key in asked:
            continue
        asked.add(key)
        said = share(unit, (problem or theirs or "").encode() or None)
        if said is not None and not problem:
            theirs = said.decode()
    return theirs


def share(unit: Unit, data: bytes | None) -> bytes | None:
    """What the first of the unit's ranks that has something has; None if none has."""
    groups = unit.groups
    size, rank = groups.data_parallel_size, groups.replica_rank * groups.shard_size + groups.shard_rank
    votes = torch.tensor([size - rank if data else 0], device="cpu")
    unit.agree_on_maximum(votes)
    if int(votes) == 0:
        return None
    speaks = data is not None and rank == size - int(votes)
    length = torch.tensor([len(data) if speaks and data is not None else 0], device="cpu")
    unit.agree_on_maximum(length)
    letters = torch.zeros(int(length), dtype=torch.int64, device="cpu")
    if speaks and data is not None:
        letters.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    unit.agree_on_maximum(letters)
    return bytes(letters.tolist())
