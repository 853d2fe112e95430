"""Which parameters users and optimizers hold ("visible" ones), their gradients, and what users write to them.

What is written is taken over at the next entry (a forward, a summon, a state dict, an optimizer's step, a copy): each
tensor that stands for a parameter has memory that its values belong in, and whatever users have put in the place of the
tensor or of its data is copied there. ``registration.py`` knows what stands where.

Two classes, one per mode (``use_orig_params``), chosen once per bucket.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.flat.common_views import CommonViews
from fsdp.flat.flat_param import FlatParamHandle, assign_grad, take_over_data
from fsdp.flat.full_copy import BufferState, SlotBuffer, point_at
from fsdp.flat.ownership import OwnedParam
from fsdp.flat.registration import Home, Layer, Registration, ShardedPlaceholder, Write
from fsdp.flat.tensor_parallel import local_of
from fsdp.flat.visible import Visible, address_of, flag_of, flags_of, looks_of

_hooks_of: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")
Guard = Callable[[nn.Module, Callable[[], str]], Write]  # refuses forwards of the module, in these words


class OriginalViews(CommonViews):
    """``use_orig_params=True``: the user's own parameters, each over its part of the shard, stay registered."""

    def __init__(self, handle: FlatParamHandle, owned: list[OwnedParam], guard: Guard) -> None:
        """``guard``: parameters that are themselves read between steps are their shards, and what computes with them
        must not."""
        self._originals: list[Any] = [item.param for item in owned]
        self._guard = guard
        visible = []
        for index, (item, piece) in enumerate(zip(owned, handle.layout.pieces(handle.groups.shard_rank))):
            somewhere = handle.layout.params[index].numel > 0 or handle.is_cut(index)  # else all ranks have all of it
            absent = handle.groups.sharded and piece.numel == 0 and somewhere
            visible.append(Visible(item.name, item.param, (index,), absent))
        self._see(visible)
        rests = [handle.groups.sharded or tp is not None for tp in handle.tp]  # in another shape than it computes in
        owners = {p.module: index for index, item in enumerate(owned) for p in item.places if rests[index]}
        guards = [guard(module, functools.partial(handle.describe_sharded, index)) for module, index in owners.items()]
        super().__init__(handle, Registration(handle, owned, None, guards))
        handle.flat_param._params = self._originals
        self._hidden_grads: list[torch.Tensor | None] | None = None  # of the shards, while summoned
        self.shows_grads = False  # whether full gradients are summoned
        self.follow_shard()
        if any(rests):
            self.registration.forbid_copies()

    def _resting(self, values: list[torch.Tensor]) -> list[Any]:
        point_at(self._originals, values)
        # Nearly what ``CommonViews`` compares, and sooner looked at: an address is 0 where there are no elements.
        self._addresses = list(map(address_of, values))
        self._empty = [
            (position, self._originals[position].untyped_storage())  # the same as long as somebody holds it
            for position, address in enumerate(self._addresses)
            if not address
        ]
        return self._originals

    @property
    def is_as_left(self) -> bool:
        """Whether users have done nothing to the parameters that the next ``refresh`` follows, as far as that can be
        seen at once."""
        if self.handle.has_tp or not self.flags_are_as_left:
            return False
        if not self.check_writeback:
            return self.registration.placeholders is None
        if list(map(address_of, self.params)) != self._addresses or not self.registration.rests:
            return False
        for position, storage in self._empty:
            if self.params[position].untyped_storage() is not storage:
                return False
        return True

    @property
    def flags_are_as_left(self) -> bool:
        return list(map(flag_of, self.params)) == self.handle.copy.flags

    def grad_parts(self, *, cut: bool = False) -> list[torch.Tensor]:
        """The gradients that this rank has, without padding and without empty tensors, of parameters that tensor
        parallelism has ``cut``, or of the others; what changes them in place changes ``.grad``."""
        grads = [each.param.grad for index, each in enumerate(self.visible) if self.handle.is_cut(index) is cut]
        return [grad for grad in grads if grad is not None and grad.numel()]

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        super().announce_copies(handle, memo)
        for original in self._originals:
            empty = original.detach().new_empty(0)
            copied: Any = torch.Tensor._make_subclass(type(original), empty, original.requires_grad)
            copied.__dict__.update(original.__dict__)
            memo[id(original)] = copied

    def copied(self, handle: FlatParamHandle, memo: dict[int, Any]) -> BucketViews:
        """The same for ``handle``, and for the copies of the modules that ``memo`` has."""
        owned, _ = self.registration.copied(memo)
        for item, original in zip(owned, self._originals):
            item.param = memo[id(original)]
        return OriginalViews(handle, owned, self._guard)

    @property
    def has_hooks(self) -> bool:
        return self.handle.has_tp or any(map(_hooks_of, self._originals))

    def hooked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if self.handle.tp[index] is not None:
            grad = super().hooked(index, grad)
        hooks = self._originals[index]._backward_hooks
        for hook in tuple(hooks.values()) if hooks else ():
            changed = hook(grad)
            if changed is not None:
                if changed.shape != grad.shape:
                    raise RuntimeError(
                        f"a hook on parameter {self.visible[index].name!r} returned a gradient of shape "
                        f"{tuple(changed.shape)}, and got one of {tuple(grad.shape)}"
                    )
                grad = changed
        return grad

    def full_grads(self, buffer: SlotBuffer) -> list[torch.Tensor]:
        """Each visible parameter's part of an unsharded gradient, in its true shape."""
        return buffer.slots

    def sharded_grads(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        """Each visible parameter's part of a sharded gradient, in the shape that its data has now."""
        return self.handle.sharded_views(flat_shard)

    def set_grad(self, position: int, grad: torch.Tensor | None) -> None:
        if assign_grad(self.params[position], grad):
            self._on_new_accumulator(position, self.params[position])

    def _attributes_of(self, index: int) -> torch.Tensor:
        original: torch.Tensor = self._originals[index]
        return original

    def summon(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """Parameters that hold ``values`` (in their true shapes) are registered until ``end_summon``; so are ``grads``,
        or the gradients that there are."""
        self._hidden_grads, self.shows_grads = [original.grad for original in self._originals], grads is not None
        point_at(self._originals, values)
        for original, grad in zip(self._originals, grads or ()):
            original.grad = None  # of another shape
            original.grad = grad
        shown = self._originals
        if self.handle.has_tp:  # DTensors are shown, in the memory of the user's own
            shown = [self._shown(index, original) for index, original in enumerate(self._originals)]
        self.registration.cover(Layer(shown, values), summoned=True)

    def _shown(self, index: int, original: Any) -> Any:
        """What is summoned of one of the user's parameters."""
        tp = self.handle.tp[index]
        if tp is None:
            return original
        shown = tp.around(original.detach(), requires_grad=original.requires_grad)
        if self.shows_grads and original.grad is not None:
            shown.grad = tp.around(original.grad, requires_grad=False).detach()
        return shown

    def end_summon(self, *, write_grads: bool) -> None:
        """Register what rests there again. Gradients that users have set meanwhile are taken over with ``write_grads``.

        Raises:
            RuntimeError: parameters of one flat parameter were frozen or unfrozen, and others of it not.
        """
        hidden, with_grads = self._hidden_grads or [], self.shows_grads
        self._hidden_grads, self.shows_grads = None, False
        layer = self._uncover_summoned()
        shown = [local_of(tensor.grad) for tensor in (layer.tensors if with_grads else self._originals)]
        for original, tensor in zip(self._originals, layer.tensors):
            original.grad = None
            original.requires_grad_(tensor.requires_grad)
        point_at(self._originals, self._values or ())
        for index, (before, now) in enumerate(zip(hidden, shown)):
            sharded = [tensor.shape for tensor in (self._originals[index], before) if tensor is not None]
            if now is None:
                self.set_grad(index, None if write_grads or not with_grads else before)
            elif not with_grads and now.shape in sharded:
                self.set_grad(index, now)
            else:
                self.set_grad(index, before)
                if write_grads and now is not before:
                    self._take_grad(index, now)

    def _adopt(self, index: int, new: Any, memory: torch.Tensor) -> None:
        """``new`` is the user's parameter from here on; the one before is a tensor of its own."""
        old, summoned = self._originals[index], self.registration.summoned
        if summoned is not None:
            summoned.tensors[index] = new
        if isinstance(new, DTensor):  # what stands for it while it is sharded is the parameter
            return
        new._fsdp_owner, new._fsdp_flattened, new._fsdp_replaced = old._fsdp_owner, True, False
        old._fsdp_flattened, old._fsdp_replaced = False, True
        point_at([old, new], [old.data.clone(), memory])
        self._originals[index] = new
        self._see([each._replace(param=new) if i == index else each for i, each in enumerate(self.visible)])
        self.registration.rest(self._originals)
        self._on_new_accumulator(index, new)


class FlatViews(CommonViews):
    """``use_orig_params=False``: the flat parameter is registered; the originals' names lead to plain attributes."""

    shows_grads = False

    def __init__(self, handle: FlatParamHandle, owned: list[OwnedParam], home: Home) -> None:
        registration = Registration(handle, owned, home)
        self._see([Visible(registration.name, handle.flat_param, range(len(handle.copy.all_leaves)), False)])
        self._runs = handle.layout.shard_runs(handle.groups.shard_rank)
        super().__init__(handle, registration)
        handle.flat_param._params = None
        registration.forbid_copies()
        self.follow_shard()

    def _resting(self, values: list[torch.Tensor]) -> list[Any]:
        """What the original names lead to while the unit does not run."""
        handle = self.handle
        if handle.groups.sharded:
            self._values = None
            return [ShardedPlaceholder(handle, index) for index in range(len(handle.leaves))]
        if handle.state is BufferState.RESIDENT:
            return list(handle.leaves)
        return self._parameters_of(values, [leaf.requires_grad for leaf in handle.leaves])

    def _parameters_of(self, values: list[torch.Tensor], flags: Sequence[bool]) -> list[Any]:
        """Make parameters that hold ``values``, one per parameter of the layout, with the attributes that users set."""
        params = [
            nn.Parameter(value, flag) if tp is None else tp.around(value, requires_grad=flag)
            for tp, value, flag in zip(self.handle.tp, values, flags)
        ]
        for index, param in enumerate(params):
            param.__dict__.update(self.user_attributes(index))
        return params

    def copied(self, handle: FlatParamHandle, memo: dict[int, Any]) -> BucketViews:
        owned, home = self.registration.copied(memo)
        assert home is not None
        return FlatViews(handle, owned, home)

    def full_grads(self, buffer: SlotBuffer) -> list[torch.Tensor]:
        layout = self.handle.layout
        return [buffer.flat[: layout.numel] if self.handle.groups.sharded else buffer.flat]

    def sharded_grads(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        return [flat_shard]

    def grad_parts(self, *, cut: bool = False) -> list[torch.Tensor]:
        handle, grad = self.handle, self.handle.flat_param.grad
        runs = self._runs
        if handle.has_tp:
            pieces = enumerate(handle.layout.pieces(handle.groups.shard_rank))
            chosen = [piece for index, piece in pieces if handle.is_cut(index) is cut and piece.numel]
            runs = tuple((piece.shard_offset, piece.shard_offset + piece.numel) for piece in chosen)
        elif cut:
            runs = ()
        return [] if grad is None else [grad[start:end] for start, end in runs]

    def summon(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """New parameters are registered, under the original names."""
        requires_grad = self.handle.flat_param.requires_grad
        params = self._parameters_of(values, [requires_grad] * len(values))
        self.registration.cover(Layer(params, values, before=(looks_of(params), flags_of(params))), summoned=True)

    def end_summon(self, *, write_grads: bool) -> None:
        layer = self._uncover_summoned()
        if write_grads:
            self._take_changes(layer, layer.tensors)
        else:
            self._take_flags(flags_of(layer.tensors))

    def _take_flags(self, flags: Sequence[bool | None]) -> None:
        """The flat parameter has one for all of them."""
        if self.registration.summoned is not None:
            super()._take_flags(flags)
            return
        wanted = set(flags) - {None}
        if len(wanted) > 1:
            raise RuntimeError(
                f"{', '.join(repr(record.name) for record in self.handle.layout.params)} of {self.handle.unit_name} "
                "are one flat parameter, and so are frozen or unfrozen together: by requires_grad_() on all of them "
                "or on the flat parameter. Pass use_orig_params=True to freeze them one by one"
            )
        for flag in wanted:
            self.handle.flat_param.requires_grad_(flag)

    @property
    def flags_are_as_left(self) -> bool:
        flag = self.handle.flat_param.requires_grad
        flags = [*self.handle.copy.flags, *map(flag_of, self.registration.resting)]
        return flags.count(flag) == len(flags)

    @property
    def is_as_left(self) -> bool:
        handle = self.handle
        if self._values is not None or not self.flags_are_as_left:
            return False
        if not self.check_writeback:
            return self.registration.placeholders is None
        return handle.flat_param.data_ptr() == handle.shard.data_ptr() and self.registration.rests

    def take_over(self) -> None:
        handle = self.handle
        if self.registration.summoned is None and handle.flat_param.data_ptr() != handle.shard.data_ptr():
            take_over_data(handle.flat_param, handle.shard, f"the flat parameter of {handle.unit_name}")
        super().take_over()

    def follow_flags(self) -> bool:
        whole = self.handle.copy.whole
        assert whole is not None
        flags = flags_of(self.registration.resting)
        if self.registration.summoned is None and set(flags) != {whole.requires_grad}:
            self._take_flags(flags)
        return super().follow_flags()

    def _adopt(self, index: int, new: Any, memory: torch.Tensor) -> None:
        """It is another parameter from here on, which has no gradient."""
        if self.handle.flat_param.grad is not None:
            self._grad_of(self.visible[0], index).zero_()
        summoned = self.registration.summoned
        if summoned is None:
            torch.autograd.graph.increment_version(self.handle.flat_param)
            self.registration.put_back(index, self.registration.resting[index])
        else:
            summoned.tensors[index] = new


BucketViews = OriginalViews | FlatViews
