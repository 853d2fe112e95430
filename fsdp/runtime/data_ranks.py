"""The number of ranks of a tree that see other data each, by which the gradients of experts are divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fsdp.comm.groups import group_ranks, rank_names
from fsdp.comm.user_warnings import warn_user
from fsdp.runtime.unit import Unit, units_in


def data_ranks(units: Sequence[Unit]) -> int:
    """Return the number of ranks of the tree of ``units``, the root first, that see other data each: all ranks of the
    root, or if these include the ranks of tensor parallelism, which see the same data, a part of them."""
    groups = units[0].groups
    over = groups.shard if groups.sharded else groups.replica
    members = set() if over is None else set(rank_names(over))
    inside = [unit.groups.tp for unit in units if unit.groups.tp is not None and unit.groups.experts is None]
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


def check_experts(tree: Sequence[tuple[str, Unit]]) -> None:
    """Check the number of ranks of declared experts. Warn of ``DTensor`` s that may be undeclared ones.

    Raises:
        ValueError: the root is over fewer or more ranks than hold the experts.
    """
    (_, root), ranks = tree[0], data_ranks([unit for _, unit in tree])
    for name, unit in tree:
        groups, own = unit.groups, unit.groups.data_parallel_size
        if groups.experts is not None and root.groups.experts is None and groups.data_ranks != ranks:
            raise ValueError(
                f"{name} has experts on {groups.data_ranks} ranks that see different data, {own} of them with the same "
                f"ones, and the root unit is over {ranks} such ranks; expected all of the same ranks. Wrap the root "
                "without device_mesh, or with HYBRID_SHARD over the mesh of both dimensions, and the experts with the "
                "dimension other than theirs (device_mesh=mesh['dp'])"
            )
        undeclared = groups.tp is not None and groups.experts is None and unit.policy.gradient_divide_factor is None
        if undeclared and ranks < root.groups.data_parallel_size:
            warn_user(  # once in a tree
                f"{name} has DTensors over the ranks {group_ranks(groups.tp)}, which the root unit is over. These are "
                "taken to see the same data (tensor parallelism). If each has tokens of its own, declare experts "
                "before wrapping: fsdp.shard_experts(module, mesh['ep']). If not, set_gradient_divide_factor"
                f"({own}) of the unit says so"
            )
            return
