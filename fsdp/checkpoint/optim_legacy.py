"""FSDP1's older calls for optimizer state: methods for one form of state each, ``optim_input``, and ids for names.

New code uses ``optim_state_dict`` and ``optim_state_dict_to_load``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.api import OptimStateKeyType
from fsdp.checkpoint import optim_names
from fsdp.checkpoint.forms import Form, Full, Rows
from fsdp.checkpoint.optim_dtypes import is_marked, keep_dtypes, with_classes
from fsdp.checkpoint.optim_load import optim_state_dict_to_load
from fsdp.checkpoint.optim_names import Group
from fsdp.checkpoint.optim_state import optim_state_dict
from fsdp.checkpoint.state_dict import calling

OptimInput = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class LegacyOptimMethods:
    """Mixin of the wrapper with the older optimizer calls of FSDP1."""

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return ``optim_state_dict`` with whole tensors on CPU, regardless of ``state_dict_type``."""
        return saved(model, groups_of(optim, optim_input), optim.state_dict(), Full(rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """Return ``optim_state_dict`` with sharded tensors on CPU, regardless of ``state_dict_type``."""
        return saved(model, optim.param_groups, optim.state_dict(), Rows(), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return ``optim_state_dict_to_load`` of a full dict that every rank has. Without ``optim``, the result is
        for an optimizer built from ``optim_input``, or from ``model.parameters()``."""
        return to_load(full_optim_state_dict, model, groups_of(optim, optim_input), optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Return ``optim_state_dict_to_load`` of a sharded dict."""
        return to_load(sharded_optim_state_dict, model, optim.param_groups, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return ``shard_full_optim_state_dict`` of a full dict on rank 0 of ``group`` (None: the default group);
        the other ranks pass None."""
        own = groups_of(optim, optim_input)
        return to_load(full_optim_state_dict, model, own, optim, from_rank0=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert a full dict with names to one with ids, or the reverse; return the same object if its keys are right
        already.

        Ids are positions in ``optim``, else in ``optim_input``, else in ``model.parameters()``. To load a full dict
        into a plain model's optimizer: ``PARAM_ID``, the plain model, its optimizer. For the reverse: ``PARAM_NAME``
        with the same two, and then ``optim_state_dict_to_load``. The names in each group are sorted.

        Raises:
            ValueError: names and ids are mixed.
            RuntimeError: parameters of ``model`` stand for several (``use_orig_params=False``).
            KeyError: a key belongs to no parameter of this model and optimizer.
        """
        rekeyed = optim_names.rekey(optim_state_dict, optim_state_key_type, model, groups_of(optim, optim_input))
        if optim is not None and is_marked(rekeyed) and optim_state_key_type is OptimStateKeyType.PARAM_ID:
            keep_dtypes(optim)
            rekeyed = with_classes(optim, rekeyed)
        return rekeyed


def saved(
    model: nn.Module, own: Sequence[Group] | None, raw: dict[str, Any], form: Form, group: Any = None
) -> dict[str, Any]:
    """Return the optimizer's state ``raw`` in this form; ``own`` are the optimizer's groups."""
    with calling("optim_state_dict()", model, wrapped=True):
        return optim_state_dict(model, own, raw, form, group=group)


def to_load(
    state: dict[str, Any] | None,
    model: nn.Module,
    own: Sequence[Group] | None,
    optim: Optimizer | None,
    *,
    is_named: bool = False,
    from_rank0: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """Convert a full or sharded dict to one that the optimizer with the groups ``own`` loads."""
    with calling("optim_state_dict_to_load()", model, wrapped=True):
        return optim_state_dict_to_load(
            model, lambda: state, own, optim=optim, is_named=is_named, from_rank0=from_rank0, group=group
        )


def groups_of(optim: Optimizer | None, optim_input: OptimInput | None) -> Sequence[Group] | None:
    """Return the parameter groups of ``optim``, or of an optimizer built from ``optim_input``; None if both are None.

    Raises:
        TypeError: ``optim_input`` is not iterable, or mixes parameters and groups, or a group has no "params".
        ValueError: ``optim_input`` is empty.
    """
    if optim_input is None:
        return None if optim is None else optim.param_groups
    warnings.warn(
        "The `optim_input` argument is deprecated: pass `optim` instead, or neither", FutureWarning, stacklevel=3
    )
    expected = (
        "optim_input should be an iterable of parameters or of parameter groups (dicts), as given to the optimizer"
    )
    if not isinstance(optim_input, Iterable):
        raise TypeError(f"{expected}, but got {type(optim_input)}")
    given: list[Any] = list(optim_input)
    if not given:
        raise ValueError(f"{expected}, but it is empty")
    if all(isinstance(item, torch.Tensor) for item in given):
        return [{"params": given}]
    if not all(isinstance(item, dict) and "params" in item for item in given):
        kinds = sorted({type(item).__name__ for item in given})
        raise TypeError(f'{expected}, each group with "params", but got {kinds}')
    return [{**group, "params": list(group["params"])} for group in given]
