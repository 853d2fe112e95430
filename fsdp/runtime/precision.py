"""The dtypes in which one unit computes: those of its inputs, outputs and buffers, and when all of them are full ones.

The parameters' own dtypes are the layout's. In full precision nothing is cast: inside ``summon_full_params``, and with
``FSDP_USE_FULL_PREC_IN_EVAL=1`` while the module is in eval mode. A backward computes in the precision of the forward
that made its graph; one backward cannot need both.
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
    """What one unit casts.

    Attributes:
        asked: what the user asked for when the unit was made; a copy, which nobody else changes.
        full_in_eval: whether the unit computes in full precision while its module is in eval mode.
    """

    def __init__(
        self, module: nn.Module, asked: MixedPrecision, ignored: Collection[nn.Module], *, full_in_eval: bool
    ) -> None:
        """``ignored`` modules keep their buffers as they are."""
        self.asked = dataclasses.replace(asked)
        self.casts = asked.param_dtype is not None  # parameters, unless in full precision
        self.full_in_eval = full_in_eval
        self._module = module
        self._ignored = ignored
        self._original_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}  # of the buffers that were cast
        self._full_buffers: bool | None = None  # whether the buffers are in those dtypes; None: not placed yet

    def copied(self, module: nn.Module, memo: dict[int, Any]) -> UnitPrecision:
        """The same for ``module``, a copy of this one's, with the copies that ``memo`` has of what is in it."""
        ignored = frozenset(memo.get(id(owner), owner) for owner in self._ignored)
        result = UnitPrecision(module, self.asked, ignored, full_in_eval=self.full_in_eval)
        result._full_buffers = self._full_buffers
        result._original_dtypes = {(memo[id(owner)], name): d for (owner, name), d in self._original_dtypes.items()}
        return result

    @property
    def wants_full(self) -> bool:
        """Whether a forward now is to compute in full precision."""
        return self.full_in_eval and not self._module.training

    # -- buffers -------------------------------------------------------------------------------------------------------

    def place_buffers(self, device: torch.device, *, full_precision: bool) -> None:
        """Bring the buffers of the unit's modules to ``device``, in ``buffer_dtype`` or in their own dtypes; each stays
        the same object. Nothing happens to those that are there already."""
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
        """Let the buffers follow a change of precision: a graph may hold them, and reads them again in backward."""
        if self.asked.buffer_dtype is not None and full_precision is not self._full_buffers:
            self.place_buffers(device, full_precision=full_precision)

    def release_buffers(self, device: torch.device) -> None:
        """Give the buffers their own dtypes back, and forget these: somebody is about to change them."""
        if self._original_dtypes:
            self.place_buffers(device, full_precision=True)
            self._original_dtypes.clear()

    def original_dtype(self, buffer: torch.Tensor) -> torch.dtype:
        """The dtype that ``buffer`` had before it was cast, which is the one of state dicts; for a buffer that took the
        place of one that was cast, that one's."""
        found = (dtype for (owner, name), dtype in self._original_dtypes.items() if owner._buffers.get(name) is buffer)
        return next(found, buffer.dtype)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating point tensors in ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
