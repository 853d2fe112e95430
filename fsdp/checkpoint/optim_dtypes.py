"""Dtypes and classes of optimizer states on the way into state dicts and back.

[Note: Dtypes of loaded states]
``Optimizer.load_state_dict`` casts each state to the dtype of the parameter. That is wrong for scalars (NAdam's
``mu_product``, ASGD's ``eta`` and ``mu`` are always float32), and for optimizers that keep float32 states for
parameters of 16 bits: bits are lost without an error. A string is lost as well: torch takes it for a sequence of
states and returns the text of a generator. So states keep the dtypes of the state dict.

The cast is right for element-wise states of torch's own optimizers, which must have the parameter's dtype in a step. If
the dtype of the parameter has changed since the save, only the cast lets the optimizer step.

[Note: Quantized states]
8-bit optimizers have states in a subclass of ``torch.Tensor`` with a ``dequantize()`` and a ``copy_()`` of its own;
those of bitsandbytes are put into one (:mod:`fsdp.checkpoint.optim_blocks`). A shard's blocks and scales fit that shard
alone. So state dicts and checkpoints hold the dequantized values, which can be cut in any way and take memory during a
save, and the parameter groups have a mark. Before an optimizer loads marked groups, it makes empty states by a step
with zero gradients, and the values are copied into those. So the states have the class that they had before the save.
(A hook of ``load_state_dict`` would be too late: that of bitsandbytes runs none.)

The copy quantizes once more. The codes are those that were saved if the class can represent the largest value of each
block, and if the blocks are cut alike. Otherwise a value changes by at most the error of one quantization, as in a step
of the optimizer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from fsdp.checkpoint.optim_blocks import as_parts, as_tensors
from fsdp.flat.views import stepped_params
from fsdp.runtime import hooks

QUANTIZED = "fsdp_quantized"  # key of parameter groups in state dicts, if states had a quantized class
_CAST_RIGHTLY = "step"  # only if ``capturable`` or ``fused``, which need it in float32 on the parameter's device

_kept: weakref.WeakSet[Optimizer] = weakref.WeakSet()


# -- quantized states --------------------------------------------------------------------------------------------------


def is_quantized(value: Any) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor of a quantized class."""
    return isinstance(value, torch.Tensor) and type(value).dequantize is not torch.Tensor.dequantize


def dequantized(value: Any) -> Any:
    """Return the values of a state in a quantized class as a plain tensor of the same dtype; any other state
    itself."""
    return value.dequantize().to(value.dtype) if is_quantized(value) else value


def with_values(state_dict: Any) -> Any:
    """Return a state dict by parameter names with a mark and dequantized values, if states are of a quantized class, as
    those of a plain model's optimizer are; otherwise ``state_dict`` itself."""
    states = {
        key: as_tensors(state) if isinstance(state, Mapping) else state
        for key, state in (state_dict or {}).get("state", {}).items()
    }
    if not any(is_quantized(leaf) for leaf in tree_leaves(states)):
        return state_dict
    found = {**state_dict, "state": tree_map(dequantized, states)}
    if "param_groups" in found:
        found["param_groups"] = marked(found["param_groups"])
    return found


def is_marked(state_dict: Mapping[str, Any]) -> bool:
    """Return True if parameter groups have the mark."""
    return any(QUANTIZED in group for group in state_dict.get("param_groups", ()))


def marked(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups of a state dict with the mark that states had a quantized class."""
    return [{**group, QUANTIZED: True} for group in groups]


@torch.no_grad()
def with_classes(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict``, which ``optimizer`` is about to load, without the mark. If there was one, states of which
    the optimizer makes a quantized class are of that class."""
    optimizer = _unwrapped(optimizer)
    if optimizer is None or not is_marked(state_dict):
        return state_dict
    groups = [{key: value for key, value in group.items() if key != QUANTIZED} for group in state_dict["param_groups"]]
    keys = [key for group in groups for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    key_of = {param: key for key, param in zip(keys, params) if key in state_dict["state"]}
    states = dict(state_dict["state"])
    with first_step(optimizer, without={*params} - key_of.keys()):
        for param, key in key_of.items():
            made = as_tensors(optimizer.state.get(param, {}))
            states[key] = as_parts({name: _like(made.get(name), value) for name, value in states[key].items()})
    return {**state_dict, "state": states, "param_groups": groups}


def _like(made: Any, value: Any) -> Any:
    """Return ``value`` in the quantized class of ``made``, in the memory of ``made``; otherwise ``value`` itself."""
    plain = isinstance(value, torch.Tensor) and not is_quantized(value) and value.is_floating_point()
    return made.copy_(value) if is_quantized(made) and plain and made.shape == value.shape else value


@contextlib.contextmanager
def first_step(optimizer: Optimizer, without: Collection[torch.Tensor]) -> Iterator[None]:
    """Give an optimizer the state of a first step with zero gradients and a rate of zero, in the context.

    Args:
        without: parameters that get no state.
    """
    params = stepped_params(optimizer)
    states, grads = dict(optimizer.state), [param.grad for param in params]
    rates = [group.get("lr") for group in optimizer.param_groups]
    # without a rate an optimizer may move parameters
    values = [] if all(rate is not None for rate in rates) else [param.detach().clone() for param in params]
    try:
        optimizer.state.clear()
        try:
            for group, rate in zip(optimizer.param_groups, rates):
                if rate is not None:
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            for param in params:
                param.grad = torch.zeros_like(param) if param.requires_grad and param not in without else None
            with hooks.own_step(optimizer):
                optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates):
                if rate is not None:
                    group["lr"] = rate
            for param, grad in zip(params, grads):
                param.grad = grad
            for param, value in zip(params, values):
                param.detach().copy_(value)
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(states)


# -- Optimizer.load_state_dict -----------------------------------------------------------------------------------------


def keep_dtypes(optimizer: Any) -> None:
    """Make ``optimizer`` keep the dtypes of states that it loads.

    States still move to the parameters' devices, and ``step`` becomes the tensor that ``capturable`` and ``fused``
    optimizers need.
    """
    own = _unwrapped(optimizer)
    if own is not None and own not in _kept:
        _kept.add(own)
        own.register_load_state_dict_pre_hook(_with_dtypes_kept)


def _unwrapped(optimizer: Any) -> Optimizer | None:
    """Return the torch optimizer inside of ``optimizer``, which may wrap it; None if there is none."""
    while optimizer is not None and "_optimizer_load_state_dict_pre_hooks" not in vars(optimizer):
        optimizer = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
    return optimizer


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
