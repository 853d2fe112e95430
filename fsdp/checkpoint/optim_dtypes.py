"""``Optimizer.load_state_dict`` without wrong casts: states keep the dtypes of the state dict.

torch casts each state to the dtype of the parameter. That is wrong for scalars (NAdam's ``mu_product``, ASGD's ``eta``
and ``mu`` are always float32), and for optimizers that keep float32 states for parameters of 16 bits: bits are lost
without an error. A string is lost as well: torch takes it for a sequence of states and returns the text of a generator.

The cast is right for element-wise states of torch's own optimizers, which must have the parameter's dtype in a step. If
the dtype of the parameter has changed since the save, only the cast lets the optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fsdp.checkpoint.optim_quantized import with_classes

_CAST_RIGHTLY = "step"  # only if ``capturable`` or ``fused``, which need it in float32 on the parameter's device

_kept: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def keep_dtypes(optimizer: Any) -> None:
    """Make ``optimizer`` keep the dtypes and quantized classes of states that it loads.

    States still move to the parameters' devices, and ``step`` becomes the tensor that ``capturable`` and ``fused``
    optimizers need.
    """
    while "_optimizer_load_state_dict_pre_hooks" not in vars(optimizer):  # a wrapper of an optimizer
        optimizer = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
        if optimizer is None:
            return
    if optimizer not in _kept:
        _kept.add(optimizer)
        optimizer.register_load_state_dict_pre_hook(_with_dtypes_kept)


def _with_dtypes_kept(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict = with_classes(optimizer, state_dict)
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

    def is_torchs(param: torch.Tensor) -> bool:
        steps = getattr(optimizer, "optimizer_of", lambda _: optimizer)(param)  # one of several inside another
        return type(steps).step.__module__.startswith("torch.optim.")

    def sealed(name: Any, value: Any, param: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return _Sealed(value) if isinstance(value, Iterable) else value
        elementwise = is_torchs(param) and name not in scalars and (value.dim() > 0 or param.dim() == 0)
        return value if name == _CAST_RIGHTLY or elementwise or value.dtype == param.dtype else _Sealed(value)

    for key, param in pairs:
        states[key] = {name: sealed(name, value, param) for name, value in states[key].items()}
    return {**state_dict, "state": states}


class _Sealed(torch.Tensor):
    """A state on its way through ``Optimizer.load_state_dict`` whose ``to()`` changes only the device."""

    @staticmethod
    def __new__(cls, value: Any) -> _Sealed:
        return torch.empty(0).as_subclass(cls)

    def __init__(self, value: Any) -> None:
        self._value = value

    def to(self, *, device: torch.device, dtype: torch.dtype | None = None) -> Any:  # type: ignore[override]
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, self._value)
