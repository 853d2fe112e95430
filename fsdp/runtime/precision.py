"""The dtypes that one unit computes in: of inputs, outputs and buffers, and when the unit computes in full precision.

The layout has the parameters' own dtypes. In full precision there are no casts: inside ``summon_full_params``, and with
``FSDP_USE_FULL_PREC_IN_EVAL=1`` while the module is in eval mode. A backward computes in the precision of the forward
that made its graph. One backward cannot need both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from fsdp.api import MixedPrecision
from fsdp.flat.full_copy import point_at
from fsdp.flat.names import own_modules
from fsdp.runtime.nested import map_tensors


class UnitPrecision:
    """The mixed precision of one unit.

    Attributes:
        asked: the user's ``MixedPrecision``, copied when the unit was made.
        is_full: the unit computes and reduces in the parameters' own dtypes now.
        full_in_eval: the unit computes in full precision while the module is in eval mode.
    """

    def __init__(
        self, module: nn.Module, asked: MixedPrecision, ignored: Collection[nn.Module], *, full_in_eval: bool
    ) -> None:
        """``ignored`` modules keep their buffers as they are."""
        self.asked = dataclasses.replace(asked)
        self.full_in_eval = full_in_eval
        self.is_full = False
        self._module = module
        self._ignored = ignored
        self._original_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}  # of the buffers that were cast
        self._full_buffers: bool | None = None  # whether the buffers are in those dtypes; None: not placed yet

    def copied(self, module: nn.Module, memo: dict[int, Any]) -> UnitPrecision:
        """Return the precision of ``module``, a copy of this module. ``memo`` maps submodules to their copies."""
        ignored = frozenset(memo.get(id(owner), owner) for owner in self._ignored)
        result = UnitPrecision(module, self.asked, ignored, full_in_eval=self.full_in_eval)
        result._full_buffers = self._full_buffers
        result._original_dtypes = {(memo[id(owner)], name): d for (owner, name), d in self._original_dtypes.items()}
        return result

    @property
    def wants_full(self) -> bool:
        """Whether a forward that begins now computes in full precision."""
        return self.full_in_eval and not self._module.training

    def set_full(self, full: bool) -> None:
        """Note whether the unit computes in the parameters' own dtypes from here on."""
        self.is_full = full

    def cast_inputs(self, inputs: Any, *, is_root: bool, has_params: bool) -> Any:
        """Return ``inputs`` of a forward in mixed precision, cast as the user asked for."""
        asked = self.asked
        as_root = asked.cast_root_forward_inputs and is_root
        if asked.param_dtype is not None and (as_root or (asked.cast_forward_inputs and has_params)):
            return cast_floating(inputs, asked.param_dtype)
        return inputs

    # -- buffers -------------------------------------------------------------------------------------------------------

    def place_buffers(self, device: torch.device, *, full_precision: bool) -> None:
        """Move the buffers of the unit's modules to ``device``, in ``buffer_dtype`` or in their own dtypes. Each buffer
        stays the same object. Buffers that are there already stay as they are."""
        self._full_buffers = full_precision
        buffers = [
            (owner, name, buffer)
            for _, owner in own_modules(self._module)
            if owner not in self._ignored
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        for owner, name, buffer in buffers:
            wanted = self._original_dtypes.get((owner, name), buffer.dtype)
            if buffer.is_floating_point() and self.asked.buffer_dtype is not None and not full_precision:
                self._original_dtypes[owner, name] = wanted
                wanted = self.asked.buffer_dtype
            if (buffer.dtype, buffer.device) != (wanted, device):
                with torch.inference_mode(False), torch.no_grad():
                    point_at([buffer], [buffer.to(device=device, dtype=wanted)])

    def cast_buffers(self, device: torch.device, *, full_precision: bool) -> None:
        """Cast the buffers after a change of precision: a graph may hold them, and reads them again in backward."""
        if self.asked.buffer_dtype is not None and full_precision is not self._full_buffers:
            self.place_buffers(device, full_precision=full_precision)

    def release_buffers(self, device: torch.device) -> None:
        """Cast the buffers back to their own dtypes, and forget these: they are about to be changed."""
        if self._original_dtypes:
            self.place_buffers(device, full_precision=True)
            self._original_dtypes.clear()

    def original_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        """Return the dtype of ``buffer`` before it was cast, which state dicts have. For a buffer that replaced a cast
        one, return the dtype of that one."""
        found = (dtype for (owner, name), dtype in self._original_dtypes.items() if owner._buffers.get(name) is buffer)
        return next(found, buffer.dtype)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with the floating point tensors in ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
