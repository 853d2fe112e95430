"""The number of ranks of a tree that see other data each, by which the gradients of experts are divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fsdp.comm.groups import group_ranks, rank_names
from fsdp.runtime.unit import Unit, units_in


def data_ranks(units: Sequence[Unit]) -> int:
    """Return the number of ranks of the tree of ``units``, the root first, that see other data each: all ranks of the
    root, or if these include the ranks of tensor parallelism, which see the same data, a part of them."""
    groups = units[0].groups
    over = groups.shard if groups.sharded else groups.replica
    members = set() if over is None else set(rank_names(over))
    inside = [unit.groups.tp for unit in units if unit.groups.tp is not None]
    same = max((tp.size() for tp in inside if members.issuperset(group_ranks(tp))), default=1)
    return groups.data_parallel_size // same


def with_data_ranks(module: nn.Module) -> Iterator[tuple[str, Unit, int]]:
    """Iterate like ``units_in``, with ``data_ranks`` of the tree that the outermost unit in ``module`` makes."""
    trees: dict[int, list[tuple[str, Unit]]] = {}  # by the place of the root
    for place, (name, unit, around) in enumerate(units_in(module)):
        trees.setdefault(min(around, default=place), []).append((name, unit))
    for tree in trees.values():
        ranks = data_ranks([unit for _, unit in tree])
        yield from ((name, unit, ranks) for name, unit in tree)
