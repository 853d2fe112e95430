"""The mutations that `mutate.py` tries: each breaks something that the named tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old` stands exactly once in `file`; `tests` are arguments for pytest that must then fail."""

    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


LAYOUT = ("tests/test_layout.py",)

MUTATIONS = [
    Mutation(
        "fsdp/flat/layout.py",
        "offset=_round_up(numel, param_multiple)",
        "offset=numel",
        "parameters start where the previous one ends, aligned or not",
        LAYOUT,
    ),
    Mutation(
        "fsdp/flat/layout.py",
        "shard_numel=_round_up(-(-numel // world_size), shard_multiple)",
        "shard_numel=_round_up(numel // world_size, shard_multiple)",
        "the shards are too short for a vector that does not divide",
        LAYOUT,
    ),
    Mutation(
        "fsdp/flat/layout.py",
        "end = _clamp(shard_end - param.offset, param.numel)",
        "end = _clamp(shard_end - param.offset, param.numel - 1)",
        "the last element of a parameter belongs to nobody",
        LAYOUT,
    ),
]
