"""Gradients of parameters that a program uses outside of their unit's forward.

A unit that is not sharded shows all parameter values between forwards, and a program may compute with them: a
head tied to an embedding, an inner module called by itself, a penalty. The graph leads to the tensors that users hold
and not to the leaves, and autograd would add the gradient of this rank to their ``.grad``. Hooks take the gradient
before that, and the unit reduces it: with the remaining gradients, or at the end of the backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp.flat.views import BucketViews
from fsdp.runtime import hooks


class OutsideUses:
    """The hooks on the tensors that users hold of one unit, where it is not sharded."""

    def __init__(self, views: Sequence[BucketViews], unit_ref: Callable[[], Any]) -> None:
        """``unit_ref`` is a weak reference to the unit, whose tree takes the gradients."""
        self._views, self._unit_ref = views, unit_ref
        # (tensor, accumulator) by bucket and index. A reference keeps the accumulator and the hook alive.
        self._hooked: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        for bucket, its in enumerate(views):  # which this refers to
            its.notify_of_accumulators(functools.partial(_hook_again, weakref.ref(self), bucket))

    def watch(self) -> None:
        """Hook the tensors that require grad now and are not hooked."""
        for bucket, views in enumerate(self._views):
            for index, tensor in views.used_outside():
                hooked = self._hooked.get((bucket, index))
                if hooked is None or hooked[0] is not tensor:
                    self.hook(bucket, index, tensor)

    def renew(self) -> None:
        """Hook all tensors again: the dtype, device or stream has changed, and the old accumulators do not fit."""
        self._hooked.clear()
        self.watch()

    def hook(self, bucket: int, index: int, tensor: torch.Tensor) -> None:
        """Hook the accumulator that autograd uses for ``tensor`` now, if there is one."""
        self._hooked.pop((bucket, index), None)
        if tensor.requires_grad:
            with torch.inference_mode(False), torch.enable_grad():
                node = hooks.accumulator_of(tensor)
            hooks.instead_of_accumulating(tensor, node, functools.partial(_arrive, self._unit_ref, bucket, index))
            self._hooked[bucket, index] = tensor, node


def _hook_again(uses_ref: Callable[[], OutsideUses | None], bucket: int, index: int, tensor: torch.Tensor) -> None:
    uses = uses_ref()
    if uses is not None:
        uses.hook(bucket, index, tensor)


def _arrive(unit_ref: Callable[[], Any], bucket: int, index: int, grad: torch.Tensor) -> None:
    unit = unit_ref()
    if unit is None:
        raise RuntimeError("a backward reached a parameter whose unit was deleted: keep the wrapped model till its end")
    unit.tree.outside_gradient_arrived(unit, bucket, index, grad)
