"""The unsharded gradient of backwards without synchronization (``no_sync``), as users see it.

It is ``.grad`` until the next synchronized backward adds to it and reduces it. Users own it: a gradient that they set
to None is dropped, and one that they zero or change in place is changed. The sharded gradient of an earlier
synchronized backward is parked meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.utils.weak import TensorWeakRef

from fsdp.comm import host_memory
from fsdp.flat.flat_param import assign_grad
from fsdp.flat.full_copy import SlotBuffer
from fsdp.flat.views import BucketViews


class Accumulator:
    """The unsharded gradient of one bucket.

    A *position* is an index into ``views.visible``, the parameters that have a ``.grad``.

    Attributes:
        exposed: the views of the accumulator that are ``.grad`` now, by position. Users alone own them.
    """

    def __init__(self, views: BucketViews) -> None:
        self._handle, self._views = views.handle, views
        self.exposed: list[TensorWeakRef] = []
        self._shapes: list[torch.Size] = []
        self._version = 0  # of the accumulator's memory, when it was exposed
        self._parked: list[torch.Tensor | None] = []  # the sharded gradients that it hides, by position

    @property
    def is_visible(self) -> bool:
        """Whether some ``.grad`` is an unsharded gradient."""
        return bool(self.exposed and self._shown())

    def held_by(self, ids: Collection[int]) -> tuple[list[str], bool]:
        """Return the names of the parameters that show an unsharded gradient and whose ids are among ``ids``, and
        whether a user has changed some gradient in place."""
        views, grads = self._views, [grad for grad in self._grads() if grad is not None]
        shown = [views.visible[position] for position, _ in self._shown()]
        names = [each.name for each in shown if id(each.param) in ids]
        return names, any(grad._version != self._version for grad in grads)

    def forget(self) -> None:
        """Drop the gradient: the bucket has another dtype or device."""
        self.exposed, self._parked = [], []

    def expose(self, buffer: SlotBuffer, unused: set[int], *, continues: bool, hides_sharded: bool) -> None:
        """Make the slots of ``buffer`` the ``.grad`` of the parameters, except for ``unused`` leaves.

        ``continues``: the buffer's memory came from :meth:`reuse`. ``hides_sharded``: a gradient that is there already
        is a sharded one, and is parked. Otherwise it is of the same kind, and is added.
        """
        views, grads = self._views, self._views.full_grads(buffer)
        before = self._grads() if continues else [None] * len(grads)
        if not continues:
            self._parked = [None] * len(grads)
        for position, visible in enumerate(views.visible):
            current = visible.param.grad
            if current is not None and current is before[position]:
                grads[position] = current
            elif visible.param.requires_grad:
                if current is None and unused.issuperset(visible.members):
                    continue
                if current is not None and hides_sharded:
                    self._parked[position] = current
                elif current is not None:
                    grads[position].add_(current)
                assign_grad(visible.param, grads[position])
        self.exposed = [TensorWeakRef(grad) for grad in grads]
        self._shapes = [grad.shape for grad in grads]
        self._version = buffer.flat._version

    def reuse(self) -> tuple[torch.Tensor | None, set[int]]:
        """Return the flat vector, as far as the user left ``.grad`` intact, and the positions that it has gradients of.
        Return None if the user has dropped all of it."""
        shown = self._shown()
        if not shown:
            self.forget()
            return None, set()
        exposed = self._grads()
        intact = {position: grad for position, grad in shown if grad is exposed[position]}
        flat = next((grad if grad._base is None else grad._base for grad in intact.values()), None)
        for position, parked in enumerate(self._parked):
            if position not in intact:  # dropped, or replaced by the user's own gradient
                self._parked[position] = None
            elif flat is not None and flat._version != self._version and parked is not None:
                # The user changed the gradient. Where it was zeroed, the parked one is zeroed as well.
                parked.masked_fill_(intact[position].any().logical_not(), 0)
        held = any(grad is not None and self._views.visible[p].param.grad is not grad for p, grad in enumerate(exposed))
        if flat is None or held or len(intact) < len(shown):
            # A gradient was replaced, or the user keeps a gradient that was dropped, and with it the memory.
            handle = self._handle
            flat = host_memory.empty(handle.layout.padded_numel, dtype=handle.reduce_dtype, device=handle.device)
            grads = self._views.full_grads(SlotBuffer(handle.layout, flat))
            for position, grad in shown:
                grads[position].copy_(grad)
                assign_grad(self._views.visible[position].param, grads[position])
                self.exposed[position] = TensorWeakRef(grads[position])
        return flat, {position for position, _ in shown}

    def conceal(self) -> None:
        """Restore the sharded ``.grad`` that this gradient replaced."""
        for position, (exposed, parked) in enumerate(zip(self._grads(), self._parked)):
            param = self._views.visible[position].param
            if exposed is not None and param.grad is exposed:
                assign_grad(param, parked)
        self.forget()

    def _grads(self) -> list[torch.Tensor | None]:
        """Return the exposed gradients, by position; None where the user holds it no longer."""
        return [reference() for reference in self.exposed]

    def _shown(self) -> list[tuple[int, torch.Tensor]]:
        """Return (position, ``.grad``) of each visible parameter that shows an unsharded gradient: the exposed one, or
        one that the user put in its place. No sharded gradient of the same shape can be there, because only a backward
        that ends the accumulation makes one."""
        found = []
        for position, shape in enumerate(self._shapes if self.exposed else ()):
            grad = self._views.visible[position].param.grad
            if grad is not None and grad.shape == shape:
                found.append((position, grad))
        return found
