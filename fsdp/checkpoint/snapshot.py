"""Snapshots of state that a load changes at once, so that a load that fails changes no state."""

from __future__ import annotations

import copy
import functools
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


class Snapshot:
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
        self._extra_state: list[tuple[nn.Module, Any]] = []  # previous values, in the order of the changes
        self._watched = [module for module in modules if _has_extra_state(module)]
        for module in self._watched:
            module.__dict__["set_extra_state"] = functools.partial(self._set_extra_state, module)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.close()
        if kind is not None:
            self.restore()

    def close(self) -> None:
        """Stop to note changes of extra state; idempotent."""
        for module in self._watched:
            module.__dict__.pop("set_extra_state", None)

    def restore(self) -> None:
        """Restore the state."""
        with torch.inference_mode(False), torch.no_grad():
            for module, attribute, param, values in self._params:
                register_instead(module, attribute, param)
                if values is not None:
                    local_of(param.detach()).copy_(values)
            self._restore_extra_state()
            for module, attribute, buffer, values in self._buffers:
                if values is not None:
                    buffer = buffer.copy_(values) if buffer.shape == values.shape else values.to(buffer.device)
                module._buffers[attribute] = buffer
        for one, attributes, state, groups in self._optimizers:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            one.state.clear()
            one.state.update(state)
            for group, settings in zip(one.param_groups, groups):
                group.clear()
                group.update(settings)

    def _set_extra_state(self, module: nn.Module, state: Any) -> None:
        before = module.get_extra_state()
        try:
            before = copy.deepcopy(before)
        except (NotImplementedError, RuntimeError, TypeError):  # cannot be copied
            pass
        self._extra_state.append((module, before))
        type(module).set_extra_state(module, state)

    def _restore_extra_state(self) -> None:
        while self._extra_state:
            module, state = self._extra_state.pop()
            try:
                module.set_extra_state(state)
            except Exception as error:  # the module's own
                warnings.warn(
                    f"a state dict was not loaded, but the extra state of {type(module).__name__} has changed: its "
                    f"set_extra_state() refuses what its get_extra_state() had returned before: {error}",
                    stacklevel=2,
                )


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy this rank's values to the CPU; None for a tensor on the meta device."""
    local: torch.Tensor = local_of(tensor.detach())
    return None if local.is_meta else local.to("cpu", copy=True)


def _has_extra_state(module: nn.Module) -> bool:
    own, base = type(module), nn.Module
    overridden = own.get_extra_state is not base.get_extra_state and own.set_extra_state is not base.set_extra_state
    return overridden and "set_extra_state" not in module.__dict__


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List (attribute, buffer) of the buffers that state dicts contain."""
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
