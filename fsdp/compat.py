"""On request only: torch's own functions for state dicts treat models of this package as they treat torch's FSDP.

``torch.distributed.checkpoint.state_dict`` knows a sharded model by its class. Without help it takes a model of this
package for a plain one, and the optimizer's flat parts for whole tensors. After :func:`enable_dcp` it hands models with
wrapped modules in them to :mod:`fsdp.checkpoint`, whose functions have the same signatures and results. All other
models, those of torch's FSDP and DDP among them, stay with torch.

What is replaced are that module's inner functions, not the public ones: these look the inner ones up when they are
called, so that it makes no difference when and how a program imported ``get_state_dict``.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.state_dict as torchs
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp.checkpoint import dcp, dcp_optim
from fsdp.checkpoint.load_state_dict import on_first
from fsdp.comm.groups import default_group
from fsdp.flat.names import clean, plain_modules
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.runtime.unit import units_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of functions that it compiles
    import torch.distributed.optim as torchs_optim

__all__ = ["disable_dcp", "enable_dcp"]


def enable_dcp() -> None:
    """Let torch's functions for state dicts take models of this package, in this process, until :func:`disable_dcp`.

    These are ``get_state_dict``, ``get_model_state_dict``, ``get_optimizer_state_dict`` and their ``set_`` counterparts
    in ``torch.distributed.checkpoint.state_dict``, however they were imported, and ``load_state_dict()`` of torch's
    ``_NamedOptimizer``. They do what :mod:`fsdp.checkpoint` does under the same names, with torch's
    ``StateDictOptions``. Calling it again changes nothing. All ranks have to: one that has not cannot take part in the
    others' collectives.

    Raises:
        RuntimeError: this version of torch lacks some of what would be replaced; nothing was.
    """
    if _undo:
        return
    wrong = [problem for detour in _DETOURS if (problem := _misfit(detour))]
    info = vars(torchs).get("_StateDictInfo")
    fields = {field.name for field in dataclasses.fields(info)} if info is not None else set()
    wrong += [f"_StateDictInfo.{name}" for name in _ASKED if name not in fields]
    if wrong:
        raise RuntimeError(
            f"enable_dcp() does not fit this version of torch, {torch.__version__}, which lacks {', '.join(wrong)}. "
            "Nothing was changed; get_state_dict and set_state_dict of fsdp.checkpoint do the same"
        )
    for detour in _DETOURS:
        theirs = getattr(detour.owner, detour.name)
        mine = _either(detour, theirs)
        setattr(detour.owner, detour.name, mine)
        _undo.append((detour, theirs, mine))


def disable_dcp() -> None:
    """Give torch back exactly what :func:`enable_dcp` replaced, if it did.

    Raises:
        RuntimeError: something else was put in its place since, and would be lost. Nothing was changed.
    """
    foreign = [detour.name for detour, _, mine in _undo if getattr(detour.owner, detour.name) is not mine]
    if foreign:
        raise RuntimeError(
            f"disable_dcp(): torch's {', '.join(foreign)} was replaced again after enable_dcp(); undo that first"
        )
    while _undo:
        detour, theirs, _ = _undo.pop()
        setattr(detour.owner, detour.name, theirs)


# -- what is done for models of this package: called as torch's functions of these names are ---------------------------


def _get_model_state_dict(model: nn.Module, info: Any) -> Any:
    prefixes = {clean(prefix.removesuffix(".")) for prefix in info.submodule_prefixes}
    submodules = {module for path, module in plain_modules(model) if path in prefixes}
    return dcp.get_model_state_dict(model, submodules=submodules, options=info)


def _load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
    # set_state_dict() has looked here, and not on rank 0, whether there is a model's state to load
    asked = [default_group()], units_of(model), "tell whether there is any"
    if info.broadcast_from_rank0 and not on_first(lambda: info.handle_model, *asked):
        return _IncompatibleKeys([], [])
    # a dict of dicts by submodule has come to the submodules' names, with our wrappers in them
    return dcp.set_model_state_dict(model, {clean(key): v for key, v in state_dict.items()}, options=info)


def _get_optim_state_dict(model: nn.Module, optimizers: Any, info: Any) -> Any:
    return dcp_optim.get_optimizer_state_dict(model, optimizers, options=info)


def _load_optim_state_dict(model: nn.Module, optimizers: Any, state_dict: dict[str, Any], info: Any) -> None:
    dcp_optim.set_optimizer_state_dict(model, optimizers, state_dict, options=info)


def _pre_load_state_dict(self: Any, state_dict: dict[str, Any]) -> Any:
    return FullyShardedDataParallel.optim_state_dict_to_load(
        self.module, self._optimizer, state_dict, is_named_optimizer=True
    )


def _has_model(model: nn.Module, *rest: Any) -> bool:
    return (rest[-1].handle_model or rest[-1].broadcast_from_rank0) and bool(units_of(model))


def _has_optimizer(model: nn.Module, *rest: Any) -> bool:
    return rest[-1].handle_optim and bool(units_of(model))


def _has_wrapper(self: Any, state_dict: dict[str, Any]) -> bool:
    return isinstance(self.module, FullyShardedDataParallel)


# -- how it gets there -------------------------------------------------------------------------------------------------


class _Detour(NamedTuple):
    """What is called in place of a function of torch's with the same name and parameters, and when."""

    owner: Any
    mine: Callable[..., Any]
    applies: Callable[..., bool]

    @property
    def name(self) -> str:
        return self.mine.__name__


_DETOURS = [
    _Detour(torchs, _get_model_state_dict, _has_model),
    _Detour(torchs, _load_model_state_dict, _has_model),
    _Detour(torchs, _get_optim_state_dict, _has_optimizer),
    _Detour(torchs, _load_optim_state_dict, _has_optimizer),
    _Detour(torchs_optim._NamedOptimizer, _pre_load_state_dict, _has_wrapper),
]
_ASKED = ("handle_model", "handle_optim", "submodule_prefixes", "broadcast_from_rank0")  # of what torch calls `info`
_undo: list[tuple[_Detour, Callable[..., Any], Callable[..., Any]]] = []  # torch's function, and what is there now


def _either(detour: _Detour, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any) -> Any:
        return (detour.mine if detour.applies(*args) else theirs)(*args)

    return chosen


def _misfit(detour: _Detour) -> str | None:
    """What torch lacks for it."""
    wanted, theirs = inspect.signature(detour.mine), getattr(detour.owner, detour.name, None)
    if theirs is not None and list(inspect.signature(theirs).parameters) == list(wanted.parameters):
        return None
    return f"{detour.name}({', '.join(wanted.parameters)})"
