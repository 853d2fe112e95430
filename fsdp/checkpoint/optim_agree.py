"""Agreement of the ranks on the states of an optimizer: names, dtypes, and values without elements.

An optimizer has only this rank's part of each state. Before tensors move, the ranks exchange descriptions of their
states as objects. Then every rank can compute every message.
"""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp.checkpoint.optim_dtypes import dequantized, is_quantized
from fsdp.checkpoint.optim_names import Holder, ModelParams
from fsdp.comm.consensus import Failure, TrainingRanks, all_gather_object, joint_error
from fsdp.comm.groups import group_ranks

_CPU = torch.device("cpu")
_LABEL = "agree on the optimizer's states"


class Elementwise(NamedTuple):
    """A tensor state that the ranks hold by elements.

    Attributes:
        shape: None for the parameter's shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None


class Scalar(NamedTuple):
    """A tensor without dimensions, by its bits."""

    dtype: torch.dtype
    bits: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> Scalar:
        return Scalar(tensor.dtype, bytes(tensor.detach().cpu().reshape(1).view(torch.uint8).tolist()))

    def tensor(self) -> torch.Tensor:
        """Make a new tensor on CPU."""
        return torch.frombuffer(bytearray(self.bits), dtype=self.dtype).reshape(())


States = dict[str, Any]  # one parameter's states by name: Elementwise, Scalar, or a plain value


def _described(holder: Holder, state: Mapping[str, Any], problems: list[str], known: dict[Any, States]) -> States:
    """Describe ``state``, this rank's state of ``holder``. Unsupported states are appended to ``problems``. Equal
    descriptions are one object, found in ``known``: most parameters have the same one, and pickle writes it once."""
    found: States = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
            if has_tensors and holder.sharded and not holder.any_shape:
                problems.append(f"state {name!r} of {holder} is a {type(value).__name__} of tensors")
        elif tuple(value.shape) == holder.local_shape and (value.dim() > 0 or not holder.sharded):
            found[name] = Elementwise(value.dtype)
        elif value.dim() == 0:
            found[name] = Scalar.of(value)
        elif holder.any_shape:
            found[name] = Elementwise(value.dtype, tuple(value.shape))
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


def _merged(
    holder: Holder, by_rank: Sequence[States | None], ranks: Sequence[int], missing: list[str], different: list[str]
) -> States | None:
    """Merge the descriptions of the ranks that own elements of ``holder``; None without state.

    Optimizers may also hold state on ranks without elements, but never step it.

    Args:
        by_rank: descriptions by rank of the shard group.
        ranks: global ranks of the shard group.
        missing, different: disagreements are appended to these lists.
    """
    owners = {rank: by_rank[rank] for rank in holder.owners}
    if all(states is None for states in owners.values()):
        return None
    merged: States = {}
    for states in owners.values():
        merged = (states or {}) | merged
    for rank, states in owners.items():
        if states is None:
            missing.append(f"rank {ranks[rank]} is missing all states of {holder}")
            continue
        for name, value in merged.items():
            if name not in states:
                missing.append(f"rank {ranks[rank]} is missing state {name!r} of {holder}")
            elif states[name] is not value and (type(states[name]) is not type(value) or states[name] != value):
                here, there = (repr(without_elements(one, to_cpu=True)) for one in (states[name], value))
                different.append(f"state {name!r} of {holder} is {here} on rank {ranks[rank]} and {there} on others")
    return merged


def agree(
    params: ModelParams, state_of: Mapping[nn.Parameter, Mapping[str, Any]], unknown: str | None
) -> tuple[dict[Holder, States], bool]:
    """Return the states of every parameter that has any, equal on all ranks: one exchange of objects per shard group.
    The second value is True if a rank has states in a quantized class.

    With several groups, the ranks then exchange failures, since some ranks may be in one group only, and compare the
    descriptions of replicas.

    Args:
        unknown: an error about the parameters that this rank's optimizer holds, if any.

    Raises, on every rank:
        KeyError: ``unknown``.
        NotImplementedError: a state is neither a scalar nor element-wise, or cannot be pickled.
        RuntimeError: some ranks lack states.
        AssertionError: states differ between ranks.
    """
    exchange = _Exchange(params, state_of, unknown)
    exchange.over_shard_groups()
    exchange.over_tensor_parallel_groups()
    several = params.groups

    def check() -> dict[Any, list[str]]:
        exchange.check()
        return {group: list(_words(exchange.agreed, group)) for group in several}

    if len(several) > 1:
        TrainingRanks(several, params.device).together(_LABEL, check, lambda texts: texts)
    else:
        check()
    agreed = {holder: states for holder, states in exchange.agreed.items() if states is not None}
    return agreed, exchange.quantized


class _Exchange:
    """The exchange of descriptions.

    Attributes:
        agreed: the description of each parameter's states, which the ranks that hold elements have in common; None
            without state. In the order of the parameters.
        quantized: True if a rank has states in a quantized class.
    """

    def __init__(
        self, params: ModelParams, state_of: Mapping[nn.Parameter, Mapping[str, Any]], unknown: str | None
    ) -> None:
        self._device, self._unknown, self._rank = params.device, unknown, dist.get_rank()
        self._problems: list[str] = []
        self._missing: list[str] = []
        self._different: list[str] = []
        known: dict[Any, States] = {}
        self._local = {
            holder: _described(holder, state_of[param], self._problems, known) if param in state_of else None
            for param, holder in params.holders.items()
        }
        self.agreed: dict[Holder, States | None] = dict.fromkeys(self._local)
        self.quantized = any(is_quantized(value) for state in state_of.values() for value in state.values())
        failure = _failure(unknown, self._problems)
        self._failures = {} if failure is None else {self._rank: failure}

    def over_shard_groups(self) -> None:
        """Agree in each group over which parameters are sharded."""
        by_group = defaultdict[Any, list[Holder]](list)
        for holder in self._local:
            by_group[holder.unit.groups.shard if holder.handle.layout.world_size > 1 else None].append(holder)
        for group, holders in by_group.items():
            if group is not None:
                holders[0].unit.announce()
            by_rank = self._gathered(self._local, holders, group)
            for holder, *of_ranks in zip(holders, *by_rank.values()) if by_rank else ():
                self.agreed[holder] = _merged(holder, of_ranks, [*by_rank], self._missing, self._different)

    def over_tensor_parallel_groups(self) -> None:
        """Send descriptions to ranks of tensor parallelism that have no part of a parameter, and so no state."""
        by_group = defaultdict[Any, list[Holder]](list)
        for holder in self._local:
            if holder.tp_owners:
                by_group[holder.unit.groups.tp].append(holder)
        for group, holders in by_group.items():
            by_rank = self._gathered(self.agreed, holders, group)
            for holder, *of_ranks in zip(holders, *by_rank.values()) if by_rank else ():
                self.agreed[holder] = of_ranks[holder.tp_owners[0]]

    def _gathered(
        self, of: Mapping[Holder, States | None], holders: list[Holder], group: Any
    ) -> dict[int, list[States | None]]:
        """Return the descriptions of ``holders`` by rank of ``group``; empty if a rank has failed."""
        own = [of.get(holder) for holder in holders]
        everyone = {self._rank: (own, self._failures, self.quantized)}
        if group is not None:
            try:
                packed = pickle.dumps((own, self._failures, self.quantized))
            except Exception as error:  # a value's own __reduce__ may raise any exception
                failure = _failure(self._unknown, [*self._problems, f"a state cannot be pickled: {error}"])
                packed = pickle.dumps(([], {self._rank: failure}, False))
            packed_by_rank = all_gather_object(packed, group, _LABEL, self._device)
            everyone = dict(zip(group_ranks(group), map(pickle.loads, packed_by_rank)))
        for _, failures, quantized in everyone.values():
            self._failures.update(failures)
            self.quantized |= quantized
        return {} if self._failures else {rank: states for rank, (states, _, _) in everyone.items()}

    def check(self) -> None:
        """Check that no rank has failed, and that the descriptions agree; raises as :func:`agree`."""
        if self._failures:
            raise joint_error(dict(sorted(self._failures.items())))
        if self._missing:
            raise RuntimeError(
                "expected the optimizers of all ranks to hold the same parameters, so that each rank has the states of "
                "its part, but " + "; ".join(self._missing)
            )
        if self._different:
            raise AssertionError("expected states without elements to agree, but " + "; ".join(self._different))


def _words(agreed: Mapping[Holder, States | None], group: Any) -> Iterator[str]:
    """Describe the states that the ranks of ``group`` must have alike: replicas, and ranks of tensor parallelism."""
    for holder, states in agreed.items():
        alike = group in (holder.unit.groups.replica, holder.unit.groups.tp)
        for name, value in (states or {}).items() if alike else ():
            described = value if isinstance(value, (Elementwise, Scalar)) else type(value).__name__
            yield f"state {name!r} of {holder}: {described}"


def _failure(unknown: str | None, problems: list[str]) -> Failure | None:
    if unknown is not None:
        return Failure("KeyError", None, unknown)
    if not problems:
        return None
    expected = (
        "only states that are scalars, or that have one element per element of the parameter, can leave a sharded "
        "optimizer (factored and block-quantized ones cannot)"
    )
    remedy = (
        "To resume on as many ranks, save each rank's optimizer.state_dict() in a file. Of the 8-bit optimizers, those "
        "with states in a class with dequantize() can be saved, such as torchao's, and those of bitsandbytes "
        "whose states have the parameter's size, such as AdamW8bit"
    )
    return Failure("NotImplementedError", None, f"{expected}, but {'; '.join(problems)}. {remedy}")


def without_elements(value: Any, *, to_cpu: bool) -> Any:
    """Copy a state that has no elements on further ranks; a ``Scalar`` becomes a tensor."""
    if isinstance(value, Scalar):
        return value.tensor()
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = dequantized(value)
    return value.detach().to(_CPU, copy=True) if to_cpu else value.detach().clone()
