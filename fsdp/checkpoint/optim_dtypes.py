"""``Optimizer.load_state_dict`` without its wrong casts: states keep the dtypes that they were saved with.

torch casts each state to its parameter's dtype, on the assumption that it has that anyway. It is not so for scalars
(NAdam's ``mu_product``, ASGD's ``eta`` and ``mu`` are float32 whatever the parameter is), nor for other people's
optimizers, which may keep float32 states for parameters of 16 bits. The bits are gone then, without an error. A string
is gone as well: torch takes it for a sequence of states, and gives back the text of a generator.

The assumption holds for what torch's own optimizers have of each element. That is cast: where the parameters had
another dtype when it was saved, they could not step with it otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

_CAST_RIGHTLY = "step"  # only if ``capturable`` or ``fused``, which need it in float32 on the parameter's device

_kept: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def keep_dtypes(optimizer: Any) -> None:
    """From now on, states that ``optimizer`` loads have the dtypes that they have in the state dict. They go to the
    parameters' devices as always, and ``step`` becomes what ``capturable`` and ``fused`` optimizers need."""
    while "_optimizer_load_state_dict_pre_hooks" not in vars(optimizer):  # what wraps an optimizer loads into that
        optimizer = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
        if optimizer is None:
            return
    if optimizer not in _kept:
        _kept.add(optimizer)
        optimizer.register_load_state_dict_pre_hook(_with_dtypes_kept)


def _with_dtypes_kept(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = dict(state_dict["state"])
    pairs = [(key, param) for key, param in zip(keys, params) if key in states]
    scalars = {
        name
        for key, param in pairs
        for name, value in states[key].items()
        if param.dim() > 0 and isinstance(value, torch.Tensor) and value.dim() == 0
    }
    torchs = type(optimizer).step.__module__.startswith("torch.optim.")

    def sealed(name: Any, value: Any, param: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return _Sealed(value) if isinstance(value, Iterable) else value
        of_elements = torchs and name not in scalars and (value.dim() > 0 or param.dim() == 0)
        return value if name == _CAST_RIGHTLY or of_elements or value.dtype == param.dtype else _Sealed(value)

    for key, param in pairs:
        states[key] = {name: sealed(name, value, param) for name, value in states[key].items()}
    return {**state_dict, "state": states}


class _Sealed(torch.Tensor):
    """A state on its way through ``Optimizer.load_state_dict``, of which ``to()`` changes the device only."""

    @staticmethod
    def __new__(cls, value: Any) -> _Sealed:
        return torch.empty(0).as_subclass(cls)

    def __init__(self, value: Any) -> None:
        self._value = value

    def to(self, *, device: torch.device, dtype: torch.dtype | None = None) -> Any:  # type: ignore[override]
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, self._value)
