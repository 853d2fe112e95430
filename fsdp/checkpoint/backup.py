"""Backups of state that a load changes at once, so that a load that fails changes no state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fsdp.checkpoint.targets import Target
from fsdp.flat.registration import register_instead, registered_params
from fsdp.flat.tensor_parallel import local_of


class Backup:
    """Parameters, persistent buffers and extra state of modules, and the state and groups of optimizers.

    Targets, which stand for the parameters of units, are left out. Copies of values are in CPU memory. Optimizers are
    kept without copies, because ``load_state_dict`` of torch's optimizers makes new tensors. Writes of other optimizers
    into their existing tensors are not undone.

    Used as a context manager it restores the state if the body raises.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()) -> None:
        modules = list(modules)
        self._params = [
            (module, attribute, param, _copy(param))
            for module in modules
            for attribute, param in registered_params(module)
            if not isinstance(param, Target) and not is_lazy(param)
        ]
        self._buffers = [
            (module, attribute, buffer, _copy(buffer))
            for module in modules
            for attribute, buffer in persistent_buffers(module)
        ]
        self._optimizers = [
            (
                one,
                dict(one.__dict__),
                {param: dict(state) if isinstance(state, dict) else state for param, state in one.state.items()},
                [dict(group) for group in one.param_groups],
            )
            for each in optimizers
            for one in getattr(each, "inner_optimizers", [each])
        ]
        self._extra_state = [
            (module, _copied_if_possible(module.get_extra_state())) for module in filter(_has_extra_state, modules)
        ]

    def __enter__(self) -> Backup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.restore()

    def restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for module, attribute, param, values in self._params:
                register_instead(module, attribute, param)
                if values is not None:
                    local_of(param.detach()).copy_(values)
            for module, state in self._extra_state:
                _restore_extra_state(module, state)
            for module, attribute, buffer, values in self._buffers:
                if values is not None:
                    buffer = buffer.copy_(values) if buffer.shape == values.shape else values.to(buffer.device)
                module._buffers[attribute] = buffer
        for one, attributes, states, groups in self._optimizers:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            one.state.clear()
            one.state.update(states)
            for group, settings in zip(one.param_groups, groups):
                group.clear()
                group.update(settings)


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy this rank's values to the CPU; None for a tensor on the meta device."""
    local: torch.Tensor = local_of(tensor.detach())
    return None if local.is_meta else local.to("cpu", copy=True)


def _has_extra_state(module: nn.Module) -> bool:
    own, base = type(module), nn.Module
    return own.get_extra_state is not base.get_extra_state and own.set_extra_state is not base.set_extra_state


def _copied_if_possible(state: Any) -> Any:
    """Return a copy of an extra state, or the state itself if it refuses to be copied, as one with a lock in it does:
    then a module that changes it in place keeps the change after a failed load."""
    try:
        return copy.deepcopy(state)
    except (NotImplementedError, RuntimeError, TypeError):
        return state


def _restore_extra_state(module: nn.Module, state: Any) -> None:
    try:
        module.set_extra_state(state)
    except Exception as error:  # the module's own
        warnings.warn(
            f"a state dict was not loaded, but the extra state of {type(module).__name__} has changed: its "
            f"set_extra_state() refuses what its get_extra_state() had returned before: {error}",
            stacklevel=3,
        )


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List (attribute, buffer) of the buffers that state dicts contain."""
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
