"""Agreement of the ranks on the states of an optimizer: names, dtypes, and values without elements.

An optimizer has only this rank's part of each state. Before tensors move, the ranks exchange descriptions of their
states as objects. Then every rank can compute every message.
"""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp.checkpoint.optim_dtypes import dequantized, is_quantized
from fsdp.checkpoint.optim_names import Holder, ModelParams, StateInfo
from fsdp.comm.consensus import TrainingRanks, all_gather_object, ranks_of
from fsdp.comm.groups import group_ranks

_CPU = torch.device("cpu")
_LABEL = "agree on the optimizer's states"
_EXPECTED = "expected all ranks' optimizers to hold the same parameters, so that each rank has the states of its part"


class Scalar(NamedTuple):
    """A tensor without dimensions, by its bits."""

    dtype: torch.dtype
    bits: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> Scalar:
        return Scalar(tensor.dtype, bytes(tensor.detach().cpu().reshape(1).view(torch.uint8).tolist()))

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.bits), dtype=self.dtype).reshape(())


States = dict[str, Any]  # one parameter's states by name: StateInfo, Scalar, or a plain value


def _described(holder: Holder, state: Mapping[str, Any], problems: list[str], known: dict[Any, States]) -> States:
    """Describe ``state``, this rank's state of ``holder``. Unsupported states are appended to ``problems``. Equal
    descriptions are one object, found in ``known``: most parameters have the same one, and pickle writes it once."""
    found: States = {}
    for name, value in state.items():
        order = holder.order_of(value) if isinstance(value, torch.Tensor) else None
        fits_order = order is None or holder.any_shape
        if not isinstance(value, torch.Tensor):
            found[name] = value
            has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
            if has_tensors and holder.sharded and not holder.any_shape:
                problems.append(f"state {name!r} of {holder} is a {type(value).__name__} of tensors")
        elif tuple(value.shape) == holder.local_shape and (value.dim() > 0 or not holder.sharded) and fits_order:
            found[name] = StateInfo(value.dtype, () if holder.is_flat else holder.members[0].shape, order)
        elif value.dim() == 0:
            found[name] = Scalar.of(value)
        elif holder.any_shape:
            found[name] = StateInfo(value.dtype, tuple(value.shape), order)
        elif holder.is_whole:
            found[name] = value  # equal on every rank
        else:
            problems.append(
                f"state {name!r} of {holder} has shape {tuple(value.shape)}, and this rank's part of the parameter has "
                f"{holder.local_shape}"
            )
    try:
        return known.setdefault(tuple((name, type(value), value) for name, value in found.items()), found)
    except TypeError:  # a value that cannot be hashed
        return found


def _merged(holder: Holder, by_rank: Mapping[int, States | None], problems: list[Exception]) -> States | None:
    """Merge the descriptions of the ranks that own elements of ``holder``; None without state.

    Optimizers may also hold state on ranks without elements, but never step it.

    Args:
        by_rank: descriptions by global rank, in the order of the shard group.
        problems: errors of disagreements are appended to this list.
    """
    items = [*by_rank.items()]
    owners = [items[place] for place in holder.owners]
    if all(states is None for _, states in owners):
        return None
    merged: States = {}
    for _, states in owners:
        merged = (states or {}) | merged
    for rank, states in owners:
        if missing := sorted(map(repr, merged.keys() - (states or {}).keys())):
            lacking = f"rank {rank} is missing {f'state {missing[0]}' if states else 'all states'} of {holder}"
            problems.append(RuntimeError(f"{_EXPECTED}, but {lacking}"))
            continue
        for name, value in (states or {}).items():
            other = merged[name]
            if other is not value and (type(other) is not type(value) or other != value):
                here, there = (repr(without_elements(one, to_cpu=True)) for one in (value, other))
                words = f"state {name!r} of {holder} is {here} on rank {rank} and {there} on others"
                problems.append(AssertionError(f"expected states without elements to agree, but {words}"))
    return merged


def agree(
    params: ModelParams, state_of: Mapping[nn.Parameter, Mapping[str, Any]], check_known: Callable[[], None]
) -> tuple[dict[Holder, States], bool]:
    """Return the states of every parameter that has any, equal on all ranks: one exchange of objects per shard group.
    The second value is True if a rank has states in a quantized class.

    Args:
        check_known: raises KeyError if this rank's optimizer holds other parameters than the model's.

    Raises, on every rank:
        KeyError: of ``check_known``.
        NotImplementedError: a state is neither a scalar nor element-wise, or cannot be pickled.
        RuntimeError: some ranks lack states, or replicas differ.
        AssertionError: states differ between ranks.
    """
    quantized = any(is_quantized(value) for state in state_of.values() for value in state.values())
    ranks = TrainingRanks(ranks_of(params.units).groups, params.device, params.units)
    problems = list[Exception]()
    of_shards, of_tp = defaultdict[Any, list[Holder]](list), defaultdict[Any, list[Holder]](list)
    for holder in params.holders.values():
        of_shards[holder.unit.groups.shard if holder.handle.layout.world_size > 1 else None].append(holder)
        if holder.is_short:
            of_tp[holder.unit.groups.tp].append(holder)
    agreed = ranks.together(_LABEL, lambda: _all_described(params, state_of, check_known))

    def gathered(holders: list[Holder], group: Any) -> Iterator[tuple[Holder, dict[int, States | None]]]:
        """Yield each of ``holders`` with the descriptions by rank of ``group``."""
        nonlocal quantized
        everyone, names = [([agreed[holder] for holder in holders], quantized)], [0]
        if group is not None:
            everyone, names = all_gather_object(everyone[0], group, _LABEL, params.device), group_ranks(group)
        quantized = any(has_quantized for _, has_quantized in everyone)
        yield from ((holder, dict(zip(names, each))) for holder, *each in zip(holders, *(of for of, _ in everyone)))

    for group, holders in of_shards.items():
        for holder, by_rank in gathered(holders, group):
            agreed[holder] = _merged(holder, by_rank, problems)
    for group, holders in of_tp.items():  # to the ranks of tensor parallelism that have no part, and so no state
        for holder, by_rank in gathered(holders, group):
            agreed[holder] = next(iter(by_rank.values()))

    def check() -> None:
        if problems:
            raise problems[0]

    ranks.together(_LABEL, check, lambda _: {group: list(_words(agreed, group)) for group in ranks.groups})
    return {holder: states for holder, states in agreed.items() if states is not None}, quantized


def _all_described(
    params: ModelParams, state_of: Mapping[nn.Parameter, Mapping[str, Any]], check_known: Callable[[], None]
) -> dict[Holder, States | None]:
    """Describe the states of every parameter on this rank; None without state.

    Raises: as :func:`agree`.
    """
    check_known()
    problems, known = list[str](), dict[Any, States]()
    described: dict[Holder, States | None] = {
        holder: _described(holder, state_of[param], problems, known) if param in state_of else None
        for param, holder in params.holders.items()
    }
    try:
        pickle.dumps([described[one] for one in described if one.handle.layout.world_size > 1 or one.is_short])
    except Exception as error:  # a value's own __reduce__ may raise any exception
        problems.append(f"a state cannot be pickled: {error}")
    if problems:
        expected = (
            "only states that are scalars, or that have one element per element of the parameter, can leave a sharded "
            "optimizer (factored and block-quantized ones cannot)"
        )
        remedy = (
            "To resume on as many ranks, save each rank's optimizer.state_dict() in a file. Of the 8-bit optimizers, "
            "those with states in a class with dequantize() can be saved, such as torchao's, and those of bitsandbytes "
            "whose states have the parameter's size, such as AdamW8bit"
        )
        raise NotImplementedError(f"{expected}, but {'; '.join(problems)}. {remedy}")
    return described


def _words(agreed: Mapping[Holder, States | None], group: Any) -> Iterator[str]:
    """Describe the states that the ranks of ``group`` must have alike: replicas, and ranks of tensor parallelism."""
    for holder, states in agreed.items():
        alike = group in (holder.unit.groups.replica, holder.unit.groups.tp)
        for name, value in (states or {}).items() if alike else ():
            described = value if isinstance(value, (StateInfo, Scalar)) else type(value).__name__
            yield f"state {name!r} of {holder}: {described}"


def without_elements(value: Any, *, to_cpu: bool) -> Any:
    """Copy a state that has no elements on other ranks; a ``Scalar`` becomes a tensor."""
    if isinstance(value, Scalar):
        return value.tensor()
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = dequantized(value)
    return value.detach().to(_CPU, copy=True) if to_cpu else value.detach().clone()
