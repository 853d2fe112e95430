"""The parameters of one bucket that users and optimizers hold ("visible" ones), and their gradients.

Two classes, one per value of ``use_orig_params``, chosen once per bucket. ``registration.py`` registers the tensors,
``params.py`` takes over what users write to them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.comm.versions import set_versions
from fsdp.flat.flat_param import FlatParamHandle, assign_grad
from fsdp.flat.full_copy import BufferState, SlotBuffer, parameter_views, point_at
from fsdp.flat.ownership import OwnedParam
from fsdp.flat.registration import Guard, Layer, Registration, ShardedPlaceholder, Site
from fsdp.flat.snapshot import hooks_of, version_of
from fsdp.flat.tensor_parallel import local_of

RefuseForward = Callable[[nn.Module, Callable[[], str]], Guard]  # the guard of a module, and its words


class Visible(NamedTuple):
    """A parameter that users and optimizers hold."""

    name: str
    param: nn.Parameter
    members: Sequence[int]  # the indices of its leaves
    absent: bool  # whether this rank's shard has no element of it


@dataclass(slots=True)
class Summon:
    """``summon_full_params`` of one bucket, until its end is complete.

    Attributes:
        grads: the gradients of the visible parameters before.
        with_grads: whether full gradients are shown; else those of before.
        layer: the full parameters; None until all modules show them.
    """

    grads: list[torch.Tensor | None]
    with_grads: bool
    layer: Layer | None = None


class CommonViews(ABC):
    """The visible parameters of one bucket.

    Attributes:
        visible: one per parameter of the layout, or the flat parameter.
        present: the positions in ``visible`` of parameters with elements in this rank's shard.
        params: the tensors of ``visible``.
        summon: the record of ``summon_full_params``; None outside.
    """

    def __init__(self, handle: FlatParamHandle, registration: Registration, visible: list[Visible]) -> None:
        self.handle, self.registration, self.visible = handle, registration, visible
        self.present = [position for position, each in enumerate(visible) if not each.absent]
        self.params: list[Any] = [each.param for each in visible]
        self.summon: Summon | None = None

    def versions(self) -> list[int]:
        """Return the versions of the shard and the visible parameters. Each in-place write and each replacement changes
        a version; a write through ``.data`` does not."""
        return list(map(version_of, [self.handle.shard, *self.params]))

    def take_changes(self, layer: Layer, found: Sequence[torch.Tensor | None], written: Iterable[int]) -> None:
        """Take over gradients and ``requires_grad`` from ``found``, the tensors that were in the place of those of
        ``layer``, and count the writes to the parameters ``written``."""
        self.note_writes(written)
        with torch.no_grad():
            for index, tensor in enumerate(found):
                if tensor is not None and tensor.grad is not None:
                    param = self._visible(index).param
                    assign_grad(param, self._with_part(index, param.grad, local_of(tensor.grad)))
        flags = [None if tensor is None else tensor.requires_grad for tensor in found]
        if any(flag not in (None, before) for flag, before in zip(flags, layer.before.flags)):
            self.take_flags(flags)

    def note_writes(self, indices: Iterable[int]) -> None:
        """Let the version of each visible parameter grow of which a parameter of the layout was written."""
        changed = set(indices)
        params = [visible.param for visible in self.visible if not changed.isdisjoint(visible.members)]
        if params:
            torch.autograd.graph.increment_version(params)

    def unite_flags(self) -> None:  # noqa: B027 - a parameter of its own has nothing to unite with
        """Freeze and unfreeze parameters that have one ``requires_grad``, as one of them was."""

    def take_flags(self, flags: Sequence[bool | None]) -> None:
        """Freeze or unfreeze each parameter of the layout; None leaves it as it is."""
        for tensor, flag in zip(self.registration.holder.tensors, flags):
            if flag is not None:
                tensor.requires_grad_(flag)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def set_grad(self, position: int, grad: torch.Tensor | None) -> None:
        """Make ``grad``, sharded or in full shape, the gradient of visible parameter ``position``."""
        visible = self.visible[position]
        assign_grad(visible.param, grad)

    def _visible(self, index: int) -> Visible:
        """Return the visible parameter that has parameter ``index``."""
        return next(visible for visible in self.visible if index in visible.members)

    def _with_part(self, index: int, grad: torch.Tensor | None, whole: torch.Tensor) -> torch.Tensor | None:
        """Copy ``whole`` to the part of parameter ``index`` in ``grad``, a gradient of the visible parameter, or in a
        new one. Return that, or None if this rank has no part."""
        visible = self._visible(index)
        if visible.absent:
            return grad
        if grad is None:
            grad = torch.zeros_like(visible.param)
        part = self._part_of_grad(index, grad)
        part.copy_(whole if part.shape == whole.shape else self.handle.part_of(index, whole))
        return grad

    def _part_of_grad(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the part of parameter ``index`` in ``grad``, a gradient of the visible parameter."""
        if len(self._visible(index).members) == 1:
            return grad
        sharded = grad.shape == self.handle.shard.shape
        return (self.handle.sharded_views(grad) if sharded else parameter_views(self.handle.layout, grad))[index]

    def used_outside(self) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors that a program may compute with outside of the unit's forward and that are no leaves.

        Each is returned with the index of the leaf for the same values. There are none if the bucket is sharded.
        """
        if self.handle.groups.sharded:
            return []
        leaves = {id(leaf) for _, leaf in self.handle.all_leaves}
        return [(i, tensor) for i, tensor in enumerate(self.registration.base.tensors) if id(tensor) not in leaves]

    @property
    def has_hooks(self) -> bool:
        """Whether ``hooked`` changes gradients now."""
        return self.handle.has_tp

    def hooked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the result of the user's hooks on ``grad``, the whole gradient of parameter ``index`` on this rank; of
        a parameter of tensor parallelism, for which ranks may communicate, this rank's part."""
        tp = self.handle.tp[index] if index < len(self.handle.tp) else None
        return grad if tp is None else tp.local_gradient(grad)

    # -- full parameters -----------------------------------------------------------------------------------------------

    def begin_summon(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """Register parameters over ``values``, in their true shapes, until ``end_summon``; with ``grads`` or, if None,
        the present gradients."""
        self.summon = Summon([param.grad for param in self.params], grads is not None)
        layer = Layer(self._full_params(values, grads), values)
        self.registration.push(layer, summoned=True)
        self.summon.layer = layer

    def end_summon(self, *, write_grads: bool) -> None:
        """Register the base again, with the gradients that users have set if ``write_grads``.

        Completes a call of this, or of ``begin_summon``, that an interrupt has ended; else idempotent.
        """
        if self.summon is not None:
            self.registration.pop_summoned()
            self._take_back(self.summon, write_grads=write_grads)
            self.summon = None

    @property
    def is_summoned(self) -> bool:
        """Whether all modules show full parameters; an interrupt may have ended their begin, or begun their end."""
        layer = self.registration.summoned
        return layer is not None and self.summon is not None and self.summon.layer is layer

    def drop_casts(self) -> None:
        """Let summoned parameters that were cast or moved show their memory again; their values are not kept."""
        layer = self.registration.holder
        assert layer.memory is not None
        for tensor, memory in zip(map(local_of, layer.tensors), layer.memory):
            if memory is not None and (tensor.dtype, tensor.device) != (memory.dtype, memory.device):
                point_at([tensor], [memory])

    def summoned(self) -> list[tuple[str, nn.Parameter]]:
        """Return the name in the unit and the tensor of each summoned parameter."""
        layer = self.registration.summoned
        return list(zip((record.name for record in self.handle.layout.params), layer.tensors if layer else ()))

    def user_attributes(self, index: int) -> dict[str, Any]:
        """Return the attributes that users have set on parameter ``index`` of the layout."""
        own = vars(self._attributes_of(index))
        return {name: value for name, value in own.items() if not name.startswith("_fsdp_")}

    def _attributes_of(self, index: int) -> torch.Tensor:
        """Return the tensor that has the attributes of parameter ``index``."""
        return self.handle.leaves[index]

    @abstractmethod
    def _full_params(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> list[Any]:
        """Return the parameters over ``values`` to register."""

    @abstractmethod
    def _take_back(self, summon: Summon, *, write_grads: bool) -> None:
        """Take over users' changes of gradients and ``requires_grad``; called again after an interrupt."""

    # -- copies --------------------------------------------------------------------------------------------------------

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        """Fill the ``memo`` of a ``deepcopy`` of the modules, for which ``handle`` was copied."""
        self.registration.announce_copies(handle, memo)


class OriginalViews(CommonViews):
    """``use_orig_params=True``: the user's own parameters, each over a part of the shard, stay registered."""

    def __init__(self, handle: FlatParamHandle, owned: list[OwnedParam], refuse: RefuseForward) -> None:
        """``refuse`` makes the guards of modules whose parameters are shards between steps."""
        self._refuse = refuse
        visible = []
        for index, (item, piece) in enumerate(zip(owned, handle.layout.pieces(handle.groups.shard_rank))):
            has_elements = handle.layout.params[index].numel > 0 or handle.is_cut(index)
            absent = handle.groups.sharded and piece.numel == 0 and has_elements
            visible.append(Visible(item.name, item.param, (index,), absent))
        changed = [handle.groups.sharded or tp is not None for tp in handle.tp]  # whether the base has another shape
        owners = {p.module: index for index, item in enumerate(owned) for p in item.sites if changed[index]}
        guards = [refuse(module, functools.partial(handle.describe_sharded, index)) for module, index in owners.items()]
        registration = Registration(handle, [item.sites for item in owned], None, guards)
        super().__init__(handle, registration, visible)
        handle.flat_param._params = self.params
        self.follow_shard()
        if any(changed):
            registration.forbid_copies()

    def follow_shard(self) -> None:
        """Register tensors over the shard, which is new, or has moved or changed its dtype."""
        values = self.handle.sharded_views(self.handle.shard)
        point_at(self.params, values)
        self.registration.set_base(Layer(self.params, values))

    def adopt(self, index: int, new: Any, memory: torch.Tensor) -> None:
        """Let ``new``, by which a user has replaced parameter ``index``, be the parameter. Its values are in ``memory``
        already. The former tensor becomes independent."""
        old = self.params[index]
        self.registration.holder.tensors[index] = new
        if isinstance(new, DTensor):  # the user's plain tensor stays the parameter while it is sharded
            return
        new._fsdp_owner, new._fsdp_flattened, new._fsdp_replaced = old._fsdp_owner, True, False
        old._fsdp_flattened, old._fsdp_replaced = False, True
        point_at([old, new], [old.data.clone(), memory])
        set_versions((new,), (max(old._version, new._version) + 1,))  # the replacement counts as a write
        self.visible[index], self.params[index] = self.visible[index]._replace(param=new), new
        self.registration.replace_base(index, new)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def grad_parts(self, *, cut: bool = False) -> list[torch.Tensor]:
        """Return this rank's gradients, without padding and empty tensors; an in-place change changes ``.grad``.

        With ``cut`` only those of parameters that tensor parallelism has cut, else only the rest.
        """
        grads = [each.param.grad for index, each in enumerate(self.visible) if self.handle.is_cut(index) is cut]
        return [grad for grad in grads if grad is not None and grad.numel()]

    @property
    def has_hooks(self) -> bool:
        return self.handle.has_tp or any(map(hooks_of, self.params))

    def hooked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        grad = super().hooked(index, grad)
        hooks = self.params[index]._backward_hooks
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
        """Return each visible parameter's part of an unsharded gradient, in the true shape."""
        return buffer.slots

    def sharded_grads(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        """Return each visible parameter's part of a sharded gradient, in the shape of the present data."""
        return self.handle.sharded_views(flat_shard)

    # -- copies --------------------------------------------------------------------------------------------------------

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        super().announce_copies(handle, memo)
        for original in self.params:
            empty = original.detach().new_empty(0)
            copied: Any = torch.Tensor._make_subclass(type(original), empty, original.requires_grad)
            copied.__dict__.update(original.__dict__)
            memo[id(original)] = copied

    def copied(self, handle: FlatParamHandle, memo: dict[int, Any]) -> BucketViews:
        """Return the views of ``handle``, a copy, over the copies of the modules in ``memo``."""
        sites, _ = self.registration.copied(memo)
        owned = [OwnedParam(memo[id(original)], its) for original, its in zip(self.params, sites)]
        return OriginalViews(handle, owned, self._refuse)

    def _attributes_of(self, index: int) -> torch.Tensor:
        param: torch.Tensor = self.params[index]
        return param

    # -- full parameters -----------------------------------------------------------------------------------------------

    def _full_params(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> list[Any]:
        """Return the user's own parameters, now over ``values``, or ``DTensor`` s in their memory where tensor
        parallelism has placed them."""
        point_at(self.params, values)
        for original, grad in zip(self.params, grads or ()):
            assign_grad(original, grad)
        shown = list(self.params)
        for index, (tp, original) in enumerate(zip(self.handle.tp, self.params)):
            if tp is not None:
                shown[index] = tp.around(original.detach(), requires_grad=original.requires_grad)
                if grads is not None and original.grad is not None:
                    shown[index].grad = tp.around(original.grad, requires_grad=False).detach()
        return shown

    def _take_back(self, summon: Summon, *, write_grads: bool) -> None:
        """Let the parameters be shards again, each with the gradient that the user has left."""
        layer = summon.layer
        point_at(self.params, [memory for memory in self.registration.base.memory or () if memory is not None])
        shown = self.params if layer is None else layer.tensors
        for index, (original, tensor, before) in enumerate(zip(self.params, shown, summon.grads)):
            original.requires_grad_(tensor.requires_grad)
            left = local_of(tensor.grad) if summon.with_grads else original.grad
            shapes = [each.shape for each in (original, before) if each is not None]
            if not summon.with_grads and (left is None or left.shape in shapes):
                continue  # none, or one that fits as it is
            if layer is None or not write_grads:
                self.set_grad(index, before)
            else:  # in one assignment: after an interrupt ``left`` is the result
                self.set_grad(index, None if left is None else self._with_part(index, before, left))


class FlatViews(CommonViews):
    """``use_orig_params=False``: the flat parameter is registered; the originals' names lead to plain attributes."""

    def __init__(self, handle: FlatParamHandle, sites: list[list[Site]], home: nn.Module) -> None:
        registration = Registration(handle, sites, home)
        self._runs = handle.layout.shard_runs(handle.groups.shard_rank)
        flat = Visible(registration.name, handle.flat_param, range(len(handle.copy.all_leaves)), False)
        super().__init__(handle, registration, [flat])
        handle.flat_param._params = None
        registration.forbid_copies()  # ``deepcopy`` is to find this before the placeholders
        self.follow_shard()

    def follow_shard(self) -> None:
        """Register tensors over the shard, which is new, or has moved or changed its dtype."""
        handle = self.handle
        values = handle.sharded_views(handle.shard)
        memory: list[torch.Tensor | None] = [*values]
        if handle.groups.sharded:
            memory = [None] * len(values)
            tensors: list[Any] = [ShardedPlaceholder(handle, index) for index in range(len(handle.leaves))]
        elif handle.copy.state is BufferState.RESIDENT:
            tensors = list(handle.leaves)
        else:
            tensors = self._parameters_over(values, [leaf.requires_grad for leaf in handle.leaves])
        layer = Layer([*tensors, handle.flat_param], [*memory, handle.shard], hidden=True)
        self.registration.set_base(layer)

    def _parameters_over(self, values: list[torch.Tensor], flags: Sequence[bool]) -> list[Any]:
        """Make a parameter over each of ``values``, with the attributes that users have set."""
        params = [
            nn.Parameter(value, flag) if tp is None else tp.around(value, requires_grad=flag)
            for tp, value, flag in zip(self.handle.tp, values, flags)
        ]
        for index, param in enumerate(params):
            param.__dict__.update(self.user_attributes(index))
        return params

    def adopt(self, index: int, new: Any, memory: torch.Tensor) -> None:
        """Drop the gradient: the parameter is another one."""
        if self.handle.flat_param.grad is not None:
            self._part_of_grad(index, self.handle.flat_param.grad).zero_()
        summoned = self.registration.summoned
        if summoned is None:
            torch.autograd.graph.increment_version(self.handle.flat_param)
            self.registration.put_back(index)
        else:
            summoned.tensors[index] = new

    def unite_flags(self) -> None:
        """Freeze or unfreeze the flat parameter as users did with the plain attributes."""
        whole = self.handle.copy.all_leaves[-1]
        flags = [tensor.requires_grad for tensor in self.registration.base.tensors[:-1]]
        if self.registration.summoned is None and set(flags) != {whole.requires_grad}:
            self.take_flags(flags)

    def take_flags(self, flags: Sequence[bool | None]) -> None:
        """Freeze or unfreeze the flat parameter.

        Raises:
            RuntimeError: the flags differ.
        """
        if self.registration.summoned is not None:
            super().take_flags(flags)
            return
        chosen = set(flags) - {None}
        if len(chosen) > 1:
            raise RuntimeError(
                f"{', '.join(repr(record.name) for record in self.handle.layout.params)} of {self.handle.unit_name} "
                "are one flat parameter, and so are frozen or unfrozen together: by requires_grad_() on all of them "
                "or on the flat parameter. Pass use_orig_params=True to freeze them one by one"
            )
        for flag in chosen:
            self.handle.flat_param.requires_grad_(flag)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def grad_parts(self, *, cut: bool = False) -> list[torch.Tensor]:
        """Return this rank's gradients, as ``OriginalViews.grad_parts`` does."""
        handle, grad = self.handle, self.handle.flat_param.grad
        runs = self._runs
        if handle.has_tp:
            pieces = enumerate(handle.layout.pieces(handle.groups.shard_rank))
            chosen = [piece for index, piece in pieces if handle.is_cut(index) is cut and piece.numel]
            runs = tuple((piece.shard_offset, piece.shard_offset + piece.numel) for piece in chosen)
        elif cut:
            runs = ()
        return [] if grad is None else [grad[start:end] for start, end in runs]

    def full_grads(self, buffer: SlotBuffer) -> list[torch.Tensor]:
        """Return the unsharded gradient of the flat parameter."""
        layout = self.handle.layout
        return [buffer.flat[: layout.numel] if self.handle.groups.sharded else buffer.flat]

    def sharded_grads(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the sharded gradient of the flat parameter."""
        return [flat_shard]

    # -- copies and full parameters ------------------------------------------------------------------------------------

    def copied(self, handle: FlatParamHandle, memo: dict[int, Any]) -> BucketViews:
        """Return the views of ``handle``, a copy, over the copies of the modules in ``memo``."""
        sites, home = self.registration.copied(memo)
        assert home is not None
        return FlatViews(handle, sites, home)

    def _full_params(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> list[Any]:
        """Return new parameters over ``values``, which the modules get under the original names."""
        return self._parameters_over(values, [self.handle.flat_param.requires_grad] * len(values))

    def _take_back(self, summon: Summon, *, write_grads: bool) -> None:
        """Let the flat parameter have the changes of the full ones."""
        layer = summon.layer
        if layer is not None and write_grads:
            self.take_changes(layer, layer.tensors, layer.written(layer.tensors))
        elif layer is not None:
            self.take_flags([tensor.requires_grad for tensor in layer.tensors])


BucketViews = OriginalViews | FlatViews


def stepped_params(optimizer: Any) -> list[Any]:
    """Return the parameters of which ``optimizer`` reads ``.grad``.

    For ``fsdp.optim.WholeParamOptimizer`` these are the model's parameters, not those in its groups.
    """
    own = getattr(optimizer, "stepped_params", None)
    return [param for group in optimizer.param_groups for param in group["params"]] if own is None else list(own())
