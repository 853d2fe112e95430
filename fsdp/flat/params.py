"""The parameters of one bucket that users and optimizers hold, and the guard that keeps what users write to them.

[Note: Writes of users]
Between passes users may replace parameters, give them other data, write to them in place, freeze and unfreeze them.
An in-place write changes the shard itself. Later changes are taken over by ``ParamGuard.enter``, which the runtime
calls before a pass, a step and a call: it copies the new values into the memory of the shard (or of the summoned
parameter) and lets the parameter show that memory again. While a unit computes, its leaves are gathered copies, and a
write to one would be lost with the buffer: ``ParamGuard.leave`` raises after the forward. A backward computes with the
values of its forward: ``ParamGuard.check_unchanged`` raises where they were written in between.

A write through ``param.data`` to a leaf leaves no trace, and is lost. So is one to a shard whose full buffer stays
gathered from pass to pass: the next pass computes with the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp import environment
from fsdp.flat.flat_param import LOST_WRITE, MisplacedShardError
from fsdp.flat.full_copy import BufferState, FullCopy, point_at
from fsdp.flat.registration import Layer
from fsdp.flat.snapshot import changed, version_of
from fsdp.flat.tensor_parallel import local_of
from fsdp.flat.views import BucketViews

_RENORMALIZED = (
    "by Embedding(max_norm=...), which rescales rows of its weight, here of a gathered copy: that would be lost. Pass "
    "max_norm=None, and rescale the rows between the steps, inside summon_full_params(), on all ranks alike"
)


Mark = tuple[FullCopy, list[int]]  # values of a bucket: the full buffer, and the versions of the visible parameters


class ParamGuard:
    """Detects the writes of users to the parameters of one bucket, and keeps them or raises; see [Note: Writes of
    users].

    ``FSDP_SKIP_WRITEBACK_CHECK=1`` leaves only ``requires_grad`` to be followed.
    """

    def __init__(self, views: BucketViews) -> None:
        self._views, self._handle, self._registration = views, views.handle, views.registration
        self._checks = not environment.SKIP_WRITEBACK_CHECK.value

    # -- before and after a pass ---------------------------------------------------------------------------------------

    @property
    def is_unchanged(self) -> bool:
        """Whether ``enter`` is a no-op."""
        registration = self._registration
        if not self._checks:
            return registration.placeholders is None and registration.base.has_flags_of_before
        base = registration.base
        return registration.base_is_intact and base.before.has_data_and_flags(base.tensors)

    def enter(self) -> bool:
        """Take over the writes of users, before a pass, a step or a call.

        Returns whether a parameter was replaced, or the ``requires_grad`` of a leaf changed.

        Raises:
            RuntimeError: a value has another shape, dtype or device than the parameter, or parameters of one flat
                parameter were not frozen together. The parameter is unchanged.
            TypeError, NotImplementedError: an assigned tensor cannot be a parameter of this unit.
        """
        if self._registration.placeholders is not None:  # after a state dict that raised
            self.drop_placeholders()
        if self.is_unchanged:
            return False
        replaced = self._checks and self.take_over()
        return self.follow_flags() or replaced

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError if a forward has written to a leaf, or returns one or a view of one in ``outputs``: the
        memory is about to be released."""
        copy = self._handle.copy
        if self._checks and not (copy.is_untouched and self._registration.leaves.entries.are_there):
            self._undo_writes()
        if copy.pooled is None or copy.state is BufferState.SHARDED:
            return
        start = copy.tensor.data_ptr()
        end = start + copy.pooled.nbytes
        for output in outputs:
            plain = output if type(output) is torch.Tensor else local_of(output)
            if (
                type(plain) in (torch.Tensor, nn.Parameter)
                and plain.layout == torch.strided
                and start <= plain.data_ptr() < end
            ):
                offset, params = (plain.data_ptr() - start) // copy.tensor.itemsize, self._handle.layout.params
                name = next((param.name for param in params if offset < param.end), "_flat_param")
                raise RuntimeError(
                    f"the forward of {self._handle.unit_name} returned parameter {name!r}, or a view of it, whose "
                    "memory is released once the unit has run: return a clone of it"
                )

    def _undo_writes(self) -> None:
        """Undo writes to leaves, and raise RuntimeError if one would be lost.

        Under ``no_grad()`` a module may repack its frozen parameters, as bitsandbytes' ``Linear4bit`` does on CPUs.
        The new data, if it has the size and dtype of the parameter, is copied to the shard.
        """
        shard, lost = self._handle.shard, list[tuple[int, str]]()
        for index, change, data in self._handle.copy.undo_writes():
            if data is None or torch.is_grad_enabled() or (data.dtype, data.device) != (shard.dtype, shard.device):
                lost.append((index, change))
            else:
                self._write(index, data)
        lost += [(index, "replaced") for index in self._registration.put_back_leaves()]
        if lost:
            index, change = lost[0]
            remedy = _RENORMALIZED if self._registration.renormalizes(index) else LOST_WRITE
            raise RuntimeError(
                f"parameter {self._handle.name_of(index)!r} of {self._handle.unit_name} was {change} inside of a "
                f"forward or backward, {remedy}"
            )

    def take_assigned(self) -> bool:
        """Take over parameters that were assigned since ``enter``, before leaves are registered over them. Return
        whether there were any."""
        if not self._checks or self._registration.shows_leaves or self._registration.base_is_intact:
            return False
        return self.take_over()

    # -- from forward to backward --------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Record the values that a forward computes with."""
        return self._handle.copy, self._versions()

    def _versions(self) -> list[int]:
        """Return the versions of the visible parameters, as ``CommonViews.versions`` does; none if writes are not
        checked."""
        return list(map(version_of, self._views.params)) if self._checks else []

    def check_unchanged(self, before: Mark, bucket: int, expected: AbstractSet[tuple[int, int]]) -> None:
        """Raise RuntimeError if a leaf of ``expected``, by ``bucket`` and index, was written since ``before``."""
        buffer, versions = before
        if self._handle.copy is not buffer:
            raise RuntimeError(
                f"{self._handle.unit_name} was moved or cast between a forward and its backward, or a gather of it "
                "failed, and the values are gone: call .to(), .half() and the like after the backward; or run the "
                "forward again"
            )
        now = self._versions()
        for position in changed(versions, now) if versions != now else ():
            visible = self._views.visible[position]
            if any((bucket, index) in expected for index in visible.members):
                raise RuntimeError(
                    f"{visible.name!r} of {self._handle.unit_name} was changed in place, or replaced, between a "
                    "forward and its backward, which would compute with other values than the forward did. Change "
                    "parameters, and step optimizers, after the backward; or run the forward again"
                )

    # -- requires_grad -------------------------------------------------------------------------------------------------

    def follow_flags(self) -> bool:
        """Freeze and unfreeze the leaves as users did with the parameters; return whether a leaf changed.

        Raises:
            RuntimeError: parameters of one flat parameter were not frozen together.
        """
        if self._registration.base.has_flags_of_before:
            return False
        self._views.unite_flags()
        leaves, base, changed = self._handle.copy.all_leaves, self._registration.base, False
        for visible in self._views.visible:
            flag = visible.param.requires_grad
            for index in visible.members:
                if leaves[index].requires_grad is not flag:
                    self._handle.set_requires_grad(index, flag)
                    changed = True
        if changed:
            flags = [visible.param.requires_grad for visible in self._views.visible for _ in visible.members]
            self._handle.flat_param.requires_grad_(any(flags))
            for tensor, flag in zip(base.tensors, flags):
                tensor.requires_grad_(flag)
        base.accept_flags()
        return changed

    # -- values --------------------------------------------------------------------------------------------------------

    def take_over(self) -> bool:
        """Copy values that users have assigned, as parameters or as data, to the memory of the bucket's values. Return
        whether parameters were assigned.

        Raises: as ``enter``.
        """
        layer = self._registration.holder
        may_be_cast = layer is self._registration.summoned
        assigned = list(self._registration.replaced())
        with torch.no_grad():
            for index, new in assigned:
                memory = None if layer.memory is None else layer.memory[index]
                self._check_fits(index, new, layer.tensors[index] if memory is None else memory)
                self._views.adopt(index, new, self._write(index, new))
            self._registration.hide_base()
            for index in layer.moved(layer.tensors):
                memory, tensor = self._memory_of(index), layer.tensors[index]
                self._check_fits(index, tensor, memory, cast=may_be_cast)
                point_at([local_of(tensor)], [memory.copy_(local_of(tensor))])
        return bool(assigned)

    def _memory_of(self, index: int) -> torch.Tensor:
        """Return the memory of parameter ``index``: of the summoned one, else of this rank's part in the shard."""
        layer = self._registration.holder
        memory = layer.memory[index] if layer.memory is not None else None
        return self._handle.sharded_views(self._handle.shard)[index] if memory is None else memory

    def _write(self, index: int, new: torch.Tensor) -> torch.Tensor:
        """Copy ``new``, a whole parameter or this rank's part of it, to the memory of parameter ``index``."""
        memory, new = self._memory_of(index), local_of(new)
        return memory.copy_(new if new.shape == memory.shape else self._handle.part_of(index, new))

    def _differs(self, index: int, new: torch.Tensor | None) -> bool:
        """Compare ``new`` with the values of parameter ``index``, bit by bit."""
        if new is None:
            return False
        memory, new = self._memory_of(index), local_of(new).detach()
        new = new if new.shape == memory.shape else self._handle.part_of(index, new)
        both = (memory, new.to(memory.device, memory.dtype))
        return not torch.equal(*(values.reshape(-1).view(torch.uint8) for values in both))

    def _check_fits(self, index: int, new: torch.Tensor, like: torch.Tensor, *, cast: bool = False) -> None:
        """Raise if ``new`` cannot be parameter ``index``, whose values lie in ``like``.

        With ``cast`` it may have another dtype or device.
        """
        layout, unit = self._handle.layout, self._handle.unit_name
        is_flat = index == len(layout.params)
        name = f"the flat parameter of {unit}" if is_flat else f"{layout.params[index].name!r} of {unit}"
        whole = is_flat or like.shape == layout.params[index].shape
        if not isinstance(new, nn.Parameter):
            raise TypeError(
                f"Cannot writeback {name}: assign a torch.nn.Parameter, not a {type(new).__name__}. If the tensor is "
                "from torch.func.functional_call(): that assigns to a wrapped module. Call it on a plain model that "
                "has loaded state_dict(), or in the unit's forward on a module inside the unit"
            )
        if isinstance(new, DTensor) and self._registration.summoned is None:
            raise NotImplementedError(
                f"Cannot writeback {name}: it became a DTensor while it is sharded. Assign one inside "
                "summon_full_params(), or a plain torch.nn.Parameter of this rank's part"
            )
        new = local_of(new)
        if new.shape != like.shape:
            part = "the parameter" if whole else "this rank's part of it"
            remedy = "" if whole else "; write the whole inside FSDP.summon_full_params(model)"
            raise RuntimeError(
                f"Cannot writeback {name}: its shape became {tuple(new.shape)}, and {part} has "
                f"{tuple(like.shape)}{remedy}"
            )
        if not cast and (new.dtype, new.device.type) != (like.dtype, like.device.type):
            kind = RuntimeError if new.device.type == like.device.type else MisplacedShardError
            raise kind(
                f"Cannot writeback {name}: it became {new.dtype} on {new.device}, and is sharded as {like.dtype} on "
                f"{like.device}. Move or cast the wrapped module instead, all of it: .to(), .half() and the like"
            )

    # -- placeholders of a state dict ----------------------------------------------------------------------------------

    def put_placeholders(
        self,
        placeholders: Sequence[torch.Tensor],
        *,
        flat: tuple[nn.Module, str] | None = None,
        keep_writes: bool = False,
        compared: bool = False,
    ) -> None:
        """Register ``placeholders``, one per parameter of the layout, until ``drop_placeholders``.

        Args:
            flat: a module and a name, to register one placeholder for the whole bucket there.
            keep_writes: take over what users do to the placeholders, which are whole and alike on all ranks.
            compared: compare values as well, for writes through ``.data``.
        """
        # without version counters, as in inference mode, no write is detected
        keep_writes = keep_writes and not torch.is_inference_mode_enabled()
        layer = Layer(placeholders, keeps_writes=keep_writes, compares_values=compared, flat_place=flat)
        self._registration.push(layer)

    def drop_placeholders(self) -> None:
        """Register the layer below the placeholders again, and keep what users did to these; idempotent."""
        layer = self._registration.placeholders
        if layer is None:
            return
        found = self._registration.pop(layer)
        if not layer.keeps_writes:
            return
        written = layer.written(found)
        with torch.no_grad():
            if layer.compares_values:
                written |= {index for index, tensor in enumerate(found) if self._differs(index, tensor)}
            for index in sorted(written):
                self._check_fits(index, found[index], layer.tensors[index], cast=True)
                self._write(index, found[index])
        self._views.take_changes(layer, found, written)
