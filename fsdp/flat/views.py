"""Which parameters users and optimizers hold ("visible" ones), their gradients, and what users write to them.

Two classes, one per mode (``use_orig_params``), chosen once per bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp.flat.flat_param import LOST_WRITE, FlatParamHandle, assign_grad, collect
from fsdp.flat.full_copy import BufferState, FullCopy, SlotBuffer, parameter_views, point_at
from fsdp.flat.ownership import OwnedParam
from fsdp.flat.registration import AtRest, Registration, ShardedPlaceholder, Slot

# of a bucket: its full copy; and of each visible parameter which one it is, and how often it was changed in place
Marks = tuple[FullCopy, list[tuple[int, int]]]


@dataclass(frozen=True)
class Visible:
    """A parameter that users and optimizers hold, and the parameters of the layout (by index) that it stands for."""

    name: str
    param: nn.Parameter
    members: Sequence[int]
    absent: bool  # this rank's shard holds nothing of it


def _shape(tensor: torch.Tensor | None) -> torch.Size | None:
    return tensor.shape if tensor is not None else None


class _BucketViews(Registration):
    """What both modes share: the visible parameters, their gradients, and what users write to them."""

    visible: list[Visible]

    def __init__(self, handle: FlatParamHandle, slots: list[Slot]) -> None:
        super().__init__(handle, slots)
        self._shown_values: list[torch.Tensor] = []
        # stand-ins whose values are all here, and what tells whether they were changed: version, memory, requires_grad
        self._stand_ins: list[tuple[torch.Tensor, tuple[int, int, bool]]] = []

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Others when a visible parameter is replaced or written in place; past it, through its ``.data`` for instance,
        nobody sees it."""
        return [(id(visible.param), visible.param._version) for visible in self.visible]

    def marks(self) -> Marks:
        """What ``changed_since`` and ``moved_since`` compare with."""
        return self.handle.copy, self.versions if self.check_writeback else []

    def changed_since(self, before: Marks) -> list[int]:
        """The positions of the visible parameters that users have changed in place or replaced since these marks were
        made. What they wrote through ``.data`` leaves none, as with plain parameters."""
        return [i for i, (one, other) in enumerate(zip(self.marks()[1], before[1])) if one != other]

    def moved_since(self, before: Marks) -> bool:
        """Whether the shard got another dtype or device since these marks were made: a graph of then is over memory
        that is gone."""
        return self.handle.copy is not before[0]

    def note_writes(self, indices: Iterable[int]) -> None:
        """The values of these parameters of the layout were changed: users have the versions of theirs grow, too."""
        changed = set(indices)
        params = [visible.param for visible in self.visible if not changed.isdisjoint(visible.members)]
        if params:
            torch.autograd.graph.increment_version(params)

    def grad(self, position: int) -> torch.Tensor | None:
        """The gradient that belongs to visible parameter ``position``."""
        return self.visible[position].param.grad

    def set_grad(self, position: int, grad: torch.Tensor | None) -> None:
        """Make ``grad``, sharded or in full shape, the gradient of visible parameter ``position``."""
        param = self.visible[position].param
        if grad is None or (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device):
            param.grad = grad
        else:
            assign_grad(param, grad)

    def hooked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """``grad``, the whole gradient of parameter ``index`` on this rank, as the user's hooks change it."""
        return grad

    def grad_parts(self) -> list[torch.Tensor]:
        """The gradients that this rank has, without padding and without empty tensors; what changes them in place
        changes ``.grad``."""
        grads = [visible.param.grad for visible in self.visible]
        return [grad for grad in grads if grad is not None and grad.numel()]

    @property
    def shows_grads(self) -> bool:
        """Whether full gradients are summoned."""
        return False

    def take_over(self) -> None:
        """Take over the values of what users have put in the place of parameters or of their data.

        Raises:
            RuntimeError: it cannot be, as it has another shape for instance. Nothing of that parameter is changed.
            NotImplementedError: one registration of a shared parameter was replaced.
        """
        if self._shown is not None:
            with torch.no_grad():
                for index, new in self._replaced():
                    self._take_shown(index, new)
                collect(self._shown, self._shown_values)

    def _take_shown(self, index: int, new: torch.Tensor) -> None:
        """``new`` is registered in the place of what is shown of parameter ``index``."""
        value = self._shown_values[index]
        self._check_fits(index, new, value, "the parameter shown has")
        value.copy_(new)

    def _replaced(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(index, the user's) of each parameter that is not what we have registered."""
        shown = self._shown
        strange = {
            slot.index: (slot.name, current)
            for slot in self._slots
            if (current := slot.current()) is not (slot.sharded if shown is None else shown[slot.index])
            and current is not None  # the module has to do without
            and not self.handle.is_leaf(current, slot.index)
        }
        for index, (name, new) in strange.items():
            slots = self._slots_of[index]
            if any(slot.current() is not new for slot in slots):
                raise NotImplementedError(
                    f"Cannot writeback {name!r}: it is one registration of a shared parameter "
                    f"({', '.join(slot.name for slot in slots)}); change the parameter in place instead, or replace "
                    "all of them by the same one"
                )
            if getattr(new, "_fsdp_flattened", False) and not getattr(new, "_fsdp_replaced", False):
                raise RuntimeError(
                    f"Cannot writeback {name!r} of {self.handle.unit_name}: it was replaced by "
                    f"{getattr(new, '_fsdp_owner', 'a flat parameter')}, which is sharded already. Share parameters "
                    "before wrapping"
                )
            yield index, new

    def _check_fits(self, index: int, new: torch.Tensor, like: torch.Tensor, hint: str) -> None:
        """Raises where ``new`` cannot stand for parameter ``index``, whose values lie in ``like``."""
        name = f"{self.handle.layout.params[index].name!r} of {self.handle.unit_name}"
        if not isinstance(new, nn.Parameter):
            raise TypeError(f"Cannot writeback {name}: assign a torch.nn.Parameter, not a {type(new).__name__}")
        if new.shape != like.shape:
            raise RuntimeError(
                f"Cannot writeback {name}: its shape became {tuple(new.shape)}, and {hint} {tuple(like.shape)}"
            )
        if (new.dtype, new.device.type) != (like.dtype, like.device.type):
            raise RuntimeError(
                f"Cannot writeback {name}: it became {new.dtype} on {new.device}, and is sharded as {like.dtype} on "
                f"{like.device}. Move or cast the wrapped module instead, all of it: .to(), .half() and the like"
            )

    def check_leaves(self) -> None:
        """To be called when a forward is over, while the leaves have their memory.

        Raises:
            RuntimeError: inside, something was written that goes with that memory.
        """
        if not self.check_writeback:
            return
        found = self.handle.copy.undo_writes()
        if any(owner.get(attribute) is not leaf for owner, attribute, leaf in self._leaf_writes):
            for slot in self._slots:
                leaf, current = self.handle.leaves[slot.index], slot.current()
                if current is not leaf and current is not None:
                    found.append((slot.index, "replaced"))
                    slot.put(leaf)
        if found:
            index, what = found[0]
            raise RuntimeError(
                f"parameter {self.handle.name_of(index)!r} of {self.handle.unit_name} was {what} inside of a forward "
                f"or backward, {LOST_WRITE}"
            )

    def shown(self) -> list[tuple[str, nn.Parameter]]:
        """While summoned: (name in the unit, full parameter)."""
        return [(record.name, param) for record, param in zip(self.handle.layout.params, self._shown or ())]

    def show_stand_ins(self, stand_ins: Sequence[torch.Tensor], *, keep_writes: bool = False) -> None:
        """Register these, one per parameter of the layout, in the parameters' places until ``drop_stand_ins``. With
        ``keep_writes``, which they are whole on all ranks for, what users do to them is done to the parameters."""
        keep_writes = keep_writes and not torch.is_inference_mode_enabled()  # there nothing counts writes
        self._stand_ins = [(each, _look_of(each)) for each in stand_ins] if keep_writes else []
        self._drop = self._hide_originals
        self._register_originals(stand_ins)

    def drop_stand_ins(self) -> None:
        """Register what belongs there again; idempotent."""
        drop, self._drop = self._drop, None
        if drop is None:
            return
        stand_ins, self._stand_ins = self._stand_ins, []
        pairs = zip(self.registered(), stand_ins)
        changed = [
            (index, now)
            for index, (now, (then, look)) in enumerate(pairs)
            if now is not None
            and now is not self._slots_of[index][0].sharded  # which something that raised has registered again
            and (now is not then or now.grad is not None or _look_of(now) != look)
        ]
        flags = [now.requires_grad for now in self.registered() if now is not None] if changed else []
        drop()
        with torch.no_grad():
            for index, now in changed:
                self._take_whole(index, now)
        if changed:
            self._take_flags(flags)

    def _take_whole(self, index: int, whole: torch.Tensor) -> None:
        """Make the values of ``whole``, and its gradient if it has one, those of parameter ``index``."""
        record = self.handle.layout.params[index]
        if whole.shape != record.shape:
            raise RuntimeError(
                f"Cannot writeback {record.name!r} of {self.handle.unit_name}: its shape became {tuple(whole.shape)} "
                f"while its state dict was made, and it has {tuple(record.shape)}"
            )
        if self._shown is not None:
            self._shown_values[index].copy_(whole)
        else:
            self.handle.sharded_views(self.handle.shard)[index].copy_(self.handle.part_of(index, whole))
        self.note_writes([index])
        if whole.grad is not None:
            self._take_grad(index, whole.grad)

    def _take_flags(self, flags: Sequence[bool]) -> None:
        """Freeze or unfreeze what users see of the parameters, one by one."""
        for visible, flag in zip(self._shown or [visible.param for visible in self.visible], flags):
            visible.requires_grad_(flag)

    def _take_grad(self, index: int, whole: torch.Tensor | None) -> None:
        raise AssertionError("each mode has its own")


def _look_of(tensor: torch.Tensor) -> tuple[int, int, bool]:
    return tensor._version, tensor.data_ptr(), tensor.requires_grad


class OriginalViews(_BucketViews):
    """``use_orig_params=True``: the user's own parameters, each over its part of the shard, stay registered."""

    def __init__(self, handle: FlatParamHandle, owned: list[OwnedParam]) -> None:
        self._owned = owned
        self._originals = [item.param for item in owned]
        handle.point_at_shard(self._originals)
        self._pointers = [original.data_ptr() for original in self._originals]
        pieces = handle.layout.pieces(handle.groups.shard_rank)
        self.visible = [
            Visible(item.name, item.param, (index,), piece.numel == 0 and handle.groups.sharded)
            for index, (item, piece) in enumerate(zip(owned, pieces))
        ]
        super().__init__(
            handle,
            [
                Slot(place.module._parameters, place, index, item.param)
                for index, item in enumerate(owned)
                for place in item.places
            ],
        )
        handle.flat_param._params = self._originals
        self._hidden_grads: list[torch.Tensor | None] = []  # of the shards, while summoned
        self._shown_grads: list[torch.Tensor | None] | None = None
        # Parameters that are themselves read between steps are their shards. What computes with them must not.
        self._guards = [
            (module._forward_pre_hooks, AtRest(handle, index))
            for module, index in {p.module: index for index, item in enumerate(owned) for p in item.places}.items()
            if handle.groups.sharded
        ]
        self._guard()
        if handle.groups.sharded:
            self._forbid_copies()

    def _guard(self) -> None:
        for pre_hooks, guard in self._guards:
            pre_hooks[AtRest.KEY] = guard  # type: ignore[index]

    def _unguard(self) -> None:
        for pre_hooks, _ in self._guards:
            pre_hooks.pop(AtRest.KEY, None)  # type: ignore[call-overload]

    def use_leaves(self) -> None:
        super().use_leaves()
        self._unguard()

    def use_sharded(self) -> None:
        super().use_sharded()
        self._guard()

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        super().announce_copies(handle, memo)
        for original in self._originals:
            copied: Any = torch.Tensor._make_subclass(type(original), original.detach()[:0], original.requires_grad)
            copied.__dict__.update(original.__dict__)
            memo[id(original)] = copied

    def copied(self, handle: FlatParamHandle, memo: dict[int, Any]) -> BucketViews:
        """The same for ``handle``, and for the copies of the modules that ``memo`` has."""
        owned = self._owned_in(memo)
        for item, original in zip(owned, self._originals):
            item.param = memo[id(original)]
        return OriginalViews(handle, owned)

    def follow(self) -> None:
        """The shard has moved or changed its dtype: point the originals at it."""
        self.handle.point_at_shard(self._originals)
        self._pointers = [original.data_ptr() for original in self._originals]
        self.use_sharded()

    def hooked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        for hook in tuple((self._originals[index]._backward_hooks or {}).values()):
            changed = hook(grad)
            if changed is not None:
                if changed.shape != grad.shape:
                    raise RuntimeError(
                        f"a hook on parameter {self._owned[index].name!r} returned a gradient of shape "
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

    @property
    def shows_grads(self) -> bool:
        return self._shown_grads is not None

    def grad(self, position: int) -> torch.Tensor | None:
        return self._hidden_grads[position] if self.shows_grads else super().grad(position)

    def set_grad(self, position: int, grad: torch.Tensor | None) -> None:
        if self._shown is not None:
            self._hidden_grads[position] = grad
        if not self.shows_grads:
            super().set_grad(position, grad)

    def show_full(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """The originals hold ``values`` (in their true shapes) until ``hide_full``, and ``grads``, or the gradients
        that they have."""
        self._hidden_grads = [original.grad for original in self._originals]
        self._shown_values, self._shown_grads = values, grads
        self.handle.copy.keeps_writes = True
        point_at(self._originals, values)
        for original, grad in zip(self._originals, grads or ()):
            original.grad = None  # of another shape
            original.grad = grad
        self._shown = self._originals
        self._register_shown(self._originals)

    def hide_full(self, *, write_grads: bool) -> None:
        """Hold the shards again. Gradients that users have set meanwhile are taken over with ``write_grads``."""
        shown_grads, with_grads = [original.grad for original in self._originals], self.shows_grads
        self._shown = self._shown_grads = None
        self.handle.copy.keeps_writes = self.handle.state is BufferState.RESIDENT
        for original in self._originals:
            original.grad = None
        self.handle.point_at_shard(self._originals)
        for index, (hidden, shown) in enumerate(zip(self._hidden_grads, shown_grads)):
            sharded = self.visible[index].param.shape
            if not with_grads and (shown is hidden or shown is None or shown.shape in (sharded, _shape(hidden))):
                self.set_grad(index, shown)
                continue
            self.set_grad(index, hidden)
            if write_grads and not self.visible[index].absent:
                self._take_grad(index, shown)
        self._hidden_grads, self._shown_values = [], []
        self.use_sharded()

    def _take_grad(self, index: int, whole: torch.Tensor | None) -> None:
        """Make this rank's part of a gradient in full shape that of original ``index``."""
        original = self._originals[index]
        if whole is None or not self.handle.groups.sharded:
            original.grad = whole
        elif original.grad is None:
            original.grad = self.handle.part_of(index, whole).clone()
        else:
            original.grad.copy_(self.handle.part_of(index, whole))

    def _register_shown(self, shown: list[nn.Parameter]) -> None:
        super().use_sharded()  # the same objects
        self._unguard()

    def refresh(self) -> bool:
        """Follow what the user did to the parameters since the last forward; True if some ``requires_grad`` changed.

        Raises:
            RuntimeError, NotImplementedError: see ``take_over``.
        """
        self.drop_stand_ins()  # left there by something that raised
        if self.check_writeback:
            self.take_over()
        changed = False
        for index, (original, leaf) in enumerate(zip(self._originals, self.handle.leaves)):
            if original.requires_grad is not leaf.requires_grad:
                self.handle.set_requires_grad(index, original.requires_grad)
                changed = True
        if changed:
            self.handle.flat_param.requires_grad_(any(original.requires_grad for original in self._originals))
        return changed

    def take_over(self) -> None:
        super().take_over()
        if self._shown is not None:
            return
        part = "this rank's part of it has"
        with torch.no_grad():
            for index, new in self._replaced():
                target = self.handle.sharded_views(self.handle.shard)[index]
                self._check_fits(index, new, target, part)
                target.copy_(new)
                self._adopt(index, new, target)
            for index, (original, pointer) in enumerate(zip(self._originals, self._pointers)):
                if original.data_ptr() != pointer:
                    target = self.handle.sharded_views(self.handle.shard)[index]
                    self._check_fits(index, original, target, part)
                    target.copy_(original)
                    point_at([original], [target])

    def _take_shown(self, index: int, new: torch.Tensor) -> None:
        super()._take_shown(index, new)
        self._adopt(index, new, self._shown_values[index])

    def _adopt(self, index: int, new: Any, data: torch.Tensor) -> None:
        """``new`` is the user's parameter from here on, over ``data``; the one before is a tensor of its own."""
        old: Any = self._originals[index]
        new._fsdp_owner, new._fsdp_flattened, new._fsdp_replaced = old._fsdp_owner, True, False
        old._fsdp_flattened, old._fsdp_replaced = False, True
        point_at([old, new], [old.data.clone(), data])
        self._originals[index] = self._owned[index].param = new
        self.visible[index] = replace(self.visible[index], param=new)
        for slot in self._slots_of[index]:
            slot.sharded = new
        self._note_sharded()


class FlatViews(_BucketViews):
    """``use_orig_params=False``: the flat parameter is registered; the originals' names lead to plain attributes."""

    def __init__(
        self,
        handle: FlatParamHandle,
        owned: list[OwnedParam],
        module: nn.Module,
        orders: dict[nn.Module, list[str]],
    ) -> None:
        """``orders``: what was registered on each module, in its order, before the unit's first bucket changed it."""
        self._orders = {place.module: orders[place.module] for item in owned for place in item.places}
        slots = []
        for index, (item, resting) in enumerate(zip(owned, self._resting(handle))):
            for place in item.places:  # one object at all of them, so that a tie can be seen
                del place.module._parameters[place.attribute]
                slots.append(Slot(place.module.__dict__, place, index, resting))
        name = "_flat_param"
        count = 0
        while name in module._parameters:
            count += 1
            name = f"_flat_param_{count}"
        self._home, self._name = module, name
        self._requires_grad = handle.flat_param.requires_grad  # as users were last told
        module._parameters[name] = handle.flat_param
        self.visible = [Visible(name, handle.flat_param, range(len(handle.leaves)), False)]
        self._runs = handle.layout.shard_runs(handle.groups.shard_rank)
        super().__init__(handle, slots)
        self._forbid_copies()
        self.use_sharded()

    def _resting(self, handle: FlatParamHandle) -> list[torch.Tensor]:
        """What the original names lead to while the unit does not run."""
        if handle.state is BufferState.RESIDENT:
            return list(handle.leaves)
        if not handle.groups.sharded:
            values = handle.sharded_views(handle.shard)
            return [nn.Parameter(value, leaf.requires_grad) for value, leaf in zip(values, handle.leaves)]
        return [ShardedPlaceholder(handle, index) for index in range(len(handle.leaves))]

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        super().announce_copies(handle, memo)
        for slot in self._slots:
            memo[id(slot.sharded)] = slot.sharded  # until it is replaced

    def copied(self, handle: FlatParamHandle, memo: dict[int, Any]) -> BucketViews:
        owned, home = self._owned_in(memo), memo[id(self._home)]
        del home._parameters[self._name]
        for place in (place for item in owned for place in item.places):
            place.module.__dict__.pop(place.attribute)
            place.module._parameters[place.attribute] = None
        return FlatViews(handle, owned, home, {memo[id(module)]: order for module, order in self._orders.items()})

    def show_full(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """New parameters with ``values`` (in their true shapes) are registered under the original names."""
        self._shown_values = values
        self.handle.copy.keeps_writes = True
        requires_grad = self.handle.flat_param.requires_grad
        self._shown = [nn.Parameter(value, requires_grad=requires_grad) for value in values]
        self._shown_versions = [param._version for param in self._shown]
        self._register_shown(self._shown)

    def _take_shown(self, index: int, new: Any) -> None:
        super()._take_shown(index, new)
        assert self._shown is not None
        if new is not self._shown[index]:
            self._drop_grad(index)
        self._shown[index] = new

    def _drop_grad(self, index: int) -> None:
        """Parameter ``index`` is another one from here on, which has no gradient."""
        if self.handle.flat_param.grad is not None:
            self._grad_of(index).zero_()

    def _take_grad(self, index: int, whole: torch.Tensor | None) -> None:
        """Make a gradient in full shape that of parameter ``index``."""
        if whole is None:
            return
        if self.handle.flat_param.grad is None:
            self.handle.flat_param.grad = torch.zeros_like(self.handle.shard)
        target = self._grad_of(index)
        target.copy_(whole if target.shape == whole.shape else self.handle.part_of(index, whole))

    def _grad_of(self, index: int) -> torch.Tensor:
        """The part of parameter ``index`` in the gradient of the flat parameter."""
        grad = self.handle.flat_param.grad
        sharded = grad.shape == self.handle.shard.shape
        return (self.handle.sharded_views(grad) if sharded else parameter_views(self.handle.layout, grad))[index]

    def hide_full(self, *, write_grads: bool) -> None:
        """The flat parameter is registered again.

        Raises:
            RuntimeError: some of what was shown was frozen or unfrozen, and some not.
        """
        shown = self._shown or ()
        flags = {param.requires_grad for param in shown}
        if write_grads:
            self.note_writes(i for i, param in enumerate(shown) if param._version != self._shown_versions[i])
            for index, param in enumerate(shown):
                self._take_grad(index, param.grad)
        self._shown, self._shown_values = None, []
        self.handle.copy.keeps_writes = self.handle.state is BufferState.RESIDENT
        self._hide_originals()
        self._follow_flags(flags)

    def _take_flags(self, flags: Sequence[bool]) -> None:
        if self._shown is None:
            self._follow_flags(set(flags))
        else:
            super()._take_flags(flags)

    def _follow_flags(self, flags: set[bool]) -> None:
        """``flags``: those of what stands for the parameters. The flat parameter has one for all of them."""
        if len(flags) > 1:
            raise RuntimeError(
                f"{', '.join(repr(record.name) for record in self.handle.layout.params)} of {self.handle.unit_name} "
                "are one flat parameter, and so are frozen or unfrozen together: by requires_grad_() on all of them "
                "or on the flat parameter. Pass use_orig_params=True to freeze them one by one"
            )
        if flags:
            self.handle.flat_param.requires_grad_(flags.pop())

    def _unregister_originals(self) -> None:
        for slot in self._slots:
            slot.module._parameters.pop(slot.attribute, None)

    def _hide_originals(self) -> None:
        self._unregister_originals()
        self.use_resting()

    def show_flat_stand_in(self, home: nn.Module, name: str, stand_in: torch.Tensor) -> None:
        self._drop = self.use_resting
        home._parameters[name] = stand_in  # type: ignore[assignment]

    def _register_shown(self, shown: list[nn.Parameter]) -> None:
        self._register_originals(shown)

    def _register_originals(self, tensors: Sequence[torch.Tensor]) -> None:
        self._home._parameters.pop(self._name, None)
        for slot in self._slots:
            slot.owner.pop(slot.attribute, None)
            slot.module._parameters[slot.attribute] = tensors[slot.index]  # type: ignore[assignment]
        for module, order in self._orders.items():  # as the plain module has them
            here = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: here.pop(name) for name in order if name in here})
            module._parameters.update(here)

    def use_leaves(self) -> None:
        if self._shown is not None:  # a forward inside: the plain attributes come before registered parameters
            self._unregister_originals()
        super().use_leaves()
        assert self.handle.copy.whole is not None
        self._home._parameters[self._name] = self.handle.copy.whole

    def unregister(self) -> None:
        self._home._parameters[self._name] = None

    def follow(self) -> None:
        """The shard has moved or changed its dtype: so have the placeholders."""
        self._home._parameters[self._name] = self.handle.flat_param
        resting = self._resting(self.handle)
        for slot in self._slots:
            slot.sharded = resting[slot.index]
        self._note_sharded()
        self.use_sharded()

    def use_resting(self) -> None:
        if self._shown is None:
            self._home._parameters[self._name] = self.handle.flat_param
        super().use_resting()

    def full_grads(self, buffer: SlotBuffer) -> list[torch.Tensor]:
        layout = self.handle.layout
        return [buffer.flat[: layout.numel] if self.handle.groups.sharded else buffer.flat]

    def sharded_grads(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        return [flat_shard]

    def grad_parts(self) -> list[torch.Tensor]:
        return [grad[start:end] for grad in super().grad_parts() for start, end in self._runs]

    def refresh(self) -> bool:
        self.drop_stand_ins()  # left there by something that raised
        if self.check_writeback:
            self.take_over()
        wanted = self.handle.flat_param.requires_grad
        changed = False
        for index, leaf in enumerate(self.handle.copy.all_leaves):
            if leaf.requires_grad is not wanted:
                self.handle.set_requires_grad(index, wanted)
                changed = True
        if changed:
            for slot in self._slots:
                slot.sharded.requires_grad_(wanted)
        self._requires_grad = wanted
        return changed

    def take_over(self) -> None:
        super().take_over()
        if self._shown is not None:
            return
        self.handle.write_back_flat()
        with torch.no_grad():
            for index, new in self._replaced():
                slots = self._slots_of[index]
                self._check_fits(index, new, slots[0].sharded, "the parameter has")
                self.handle.sharded_views(self.handle.shard)[index].copy_(self.handle.part_of(index, new))
                torch.autograd.graph.increment_version(self.handle.flat_param)  # as that of another parameter
                self._drop_grad(index)
                for slot in slots:
                    slot.put(slot.sharded)
            if not self.handle.groups.sharded:  # then they have values, of which users may have changed the data
                resting = [slots[0].sharded for slots in self._slots_of.values()]
                values = self.handle.sharded_views(self.handle.shard)
                collect(resting, values)
                point_at(resting, values)
        flags = {slot.sharded.requires_grad for slot in self._slots}
        if flags != {self._requires_grad}:
            self._follow_flags(flags)


BucketViews = OriginalViews | FlatViews
