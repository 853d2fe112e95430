"""Choices of the program: of one unit (``UnitPolicy``) and of a whole tree (``TreePolicy``). Both are immutable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp import environment
from fsdp.api import BackwardPrefetch, as_count, as_resharding
from fsdp.comm.groups import Groups
from fsdp.comm.nodes import nearby_group
from fsdp.runtime.comm_hook import CommHook


@dataclass(frozen=True)
class TreePolicy:
    """Choices that all units of one tree share.

    Every wrapper is given one; all wrappers under one root need equal ones, except for the two fields that count for
    the root alone.

    Attributes:
        use_orig_params: the modules have the user's own parameters, not flat ones.
        limit_all_gathers: at most the full buffers of the running unit and of the prefetched ones exist. Without it no
            gather is delayed, and no idle unit is resharded, for want of room.
        reduce_unused: a rank may skip a unit that peers run. Units are then not prefetched, because the next unit may
            differ from the one of the last pass.
        broadcast_buffers: forwards begin with the buffers of rank 0.
        use_full_prec_in_eval: units compute in full precision while their module is in eval mode.
        is_last_backward: backwards wait for their reductions. The root's counts.
        reduce_buffers: number of full gradients that may wait for their reduction. The root's counts.
    """

    use_orig_params: bool = False
    limit_all_gathers: bool = True
    reduce_unused: bool = False
    broadcast_buffers: bool = False
    use_full_prec_in_eval: bool = field(default_factory=lambda: environment.USE_FULL_PREC_IN_EVAL.value)
    is_last_backward: bool = field(default=True, compare=False)
    reduce_buffers: int = field(default=2, compare=False)

    @staticmethod
    def check_equal(policies: Iterable[TreePolicy]) -> None:
        """Raise ValueError, naming the first field that differs, unless all ``policies`` are equal."""
        policies = list(policies)
        for each in dataclasses.fields(TreePolicy):
            values = {getattr(policy, each.name) for policy in policies}
            if each.compare and len(values) > 1:
                raise ValueError(
                    f"{each.name} must be the same for all FullyShardedDataParallel instances under one root, got "
                    f"{sorted(values)}"
                )


_TREE_FIELDS = [each.name for each in dataclasses.fields(TreePolicy)]


@dataclass(frozen=True)
class UnitPolicy:
    """When one unit is gathered, resharded and reduced.

    Attributes:
        tree: the choices of the unit's tree.
        reshard_after_forward: the unit is gathered again for the backward; None: unless it is the root.
        reshard_ranks: number of consecutive ranks that the unit stays sharded over after forward; 0: all.
        reshard_after_backward: the unit is always gathered again for the next forward. Without it, only where a shard
            was written in between.
        unshard_in_backward: the backward reads parameters.
        forward_prefetch, backward_prefetch: number of following units to gather ahead. The default is 1. A gather of 0
            units ahead starts after the unit before it was resharded, takes that unit's memory, and so waits for the
            compute, even where the host runs ahead.
        prefetch_after_gradients: in backward, prefetch only when the running unit's gradients are complete.
        gradient_divide_factor: divisor of the sum of gradients over all ranks; None: the number of ranks.
        force_sum_reduction: collectives are plain sums, divided before or after, never averages.
        requires_all_reduce: reductions go on to the replicas.
        comm_hook: the user's reduction in place of the communicator's.
        all_reduce_hook: is called with each reduced gradient.
        prefetch_lists: returns the units that the user has listed for prefetching in forward, or with True in
            backward; None where there is no list, and the recorded order counts.
    """

    tree: TreePolicy
    reshard_after_forward: bool | None = None
    reshard_ranks: int = 0
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    prefetch_after_gradients: bool = False
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    requires_all_reduce: bool = True
    comm_hook: CommHook | None = None
    all_reduce_hook: Callable[[torch.Tensor], Any] | None = None
    prefetch_lists: Callable[[bool], list[Any] | None] | None = None

    @property
    def changes_gradients(self) -> bool:
        """Whether a hook or a divisor of the user changes what a reduction would attach."""
        chosen = self.comm_hook, self.all_reduce_hook, self.gradient_divide_factor
        return chosen != (None, None, None)

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> UnitPolicy:
        """Return the policy that the wrapper's ``arguments`` ask for.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind, or two arguments contradict each other.
        """
        prefetch = arguments["backward_prefetch"]
        ahead = as_count(arguments["forward_prefetch_distance"], "forward_prefetch_distance", "units")
        behind = as_count(arguments["backward_prefetch_distance"], "backward_prefetch_distance", "units")
        if prefetch is None and behind > 1:
            raise ValueError(
                f"backward_prefetch=None gathers nothing ahead, and backward_prefetch_distance is {behind}"
            )
        if arguments["forward_prefetch"] and ahead == 0:
            raise ValueError("forward_prefetch=True asks for a prefetch, and forward_prefetch_distance is 0")
        reshards, ranks = as_resharding(arguments["reshard_after_forward"], arguments["sharding_strategy"])
        return UnitPolicy(
            TreePolicy(**{name: arguments[name] for name in _TREE_FIELDS if name in arguments}),
            reshard_after_forward=reshards,
            reshard_ranks=ranks,
            forward_prefetch=ahead,
            backward_prefetch=0 if prefetch is None else behind,
            prefetch_after_gradients=prefetch is BackwardPrefetch.BACKWARD_POST,
        )

    def replaced(self, **choices: Any) -> UnitPolicy:
        """Return this policy with ``choices``, of the unit or of the tree, by the names of their fields."""
        of_tree = {name: choices.pop(name) for name in _TREE_FIELDS if name in choices}
        tree = dataclasses.replace(self.tree, **of_tree) if of_tree else self.tree
        return dataclasses.replace(self, tree=tree, **choices)

    def within(self, groups: Groups) -> UnitPolicy:
        """Return this policy for a unit that is sharded over ``groups``, and create the group of ``reshard_ranks``.

        Raises:
            ValueError: ``reshard_ranks`` does not divide the shard group's size.
            NotImplementedError: ``reshard_ranks`` with ``reduce_unused``.
        """
        ranks, size = self.reshard_ranks, groups.shard_size
        if ranks and size % ranks:
            raise ValueError(
                f"reshard_after_forward={ranks}: a number of ranks must be a factor of the {size} that the parameters "
                "are sharded over"
            )
        if ranks in (0, size):
            return dataclasses.replace(self, reshard_ranks=0)
        if self.tree.reduce_unused:
            raise NotImplementedError(
                f"reshard_after_forward={ranks} with reduce_unused=True, where ranks agree over one group on every "
                "gather; pass reshard_after_forward=True"
            )
        nearby_group(groups.shard, ranks)
        return self

    def order_in_words(self) -> str:
        """Describe the choices that the order of collectives depends on."""
        when = "BACKWARD_POST" if self.prefetch_after_gradients else "BACKWARD_PRE"
        prefetch = "no backward_prefetch"
        if self.backward_prefetch:
            prefetch = f"{when}, {self.backward_prefetch} ahead" if self.backward_prefetch > 1 else when
        limited = "" if self.tree.limit_all_gathers else ", not limited"
        broadcast = ", buffers broadcast" if self.tree.broadcast_buffers else ""
        return f"{prefetch}{limited}{broadcast}"
