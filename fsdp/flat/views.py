"""The parameters of one bucket that users and optimizers hold ("visible" ones), and their gradients.

Two classes, one per value of ``use_orig_params``, chosen once per bucket. ``registration.py`` registers the tensors,
``params.py`` takes over what users write to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.flat.flat_param import FlatParamHandle, assign_grad
from fsdp.flat.full_copy import BufferState, SlotBuffer, parameter_views, point_at
from fsdp.flat.ownership import OwnedParam
from fsdp.flat.registration import Guard, Layer, Registration, ShardedPlaceholder, Site
from fsdp.flat.snapshot import hooks_of
from fsdp.flat.tensor_parallel import local_of

RefuseForward = Callable[[nn.Module, Callable[[], str]], Guard]  # the guard of a module, and its words


class Visible(NamedTuple):
    """A parameter that users and optimizers hold."""

    name: str
    param: nn.Parameter
    members: Sequence[int]  # the indices of its leaves
    absent: bool  # whether this rank's shard has no element of it


class CommonViews:
    """The visible parameters of one bucket.

    Attributes:
        visible: one per parameter of the layout, or the flat parameter.
        present: the positions in ``visible`` of parameters with elements in this rank's shard.
        params: the tensors of ``visible``.
        shows_grads: whether full gradients are summoned.
    """

    def __init__(self, handle: FlatParamHandle, registration: Registration, visible: list[Visible]) -> None:
        self.handle, self.registration, self.visible = handle, registration, visible
        self.present = [position for position, each in enumerate(visible) if not each.absent]
        self.params: list[Any] = [each.param for each in visible]
        self.shows_grads = False
        self._ended: Layer | None = None  # the layer of full parameters, while ``end_summon`` takes over the changes

    def take_changes(self, layer: Layer, found: Sequence[Any], written: Iterable[int]) -> None:
        """Take over gradients and ``requires_grad`` from ``found``, the tensors that were in the place of those of
        ``layer``, and count the writes to the parameters ``written``."""
        self.note_writes(written)
        with torch.no_grad():
            for index, tensor in enumerate(found):
                if tensor is not None and tensor.grad is not None:
                    self.take_grad(index, tensor.grad)
        flags = [None if tensor is None else tensor.requires_grad for tensor in found]
        if any(flag not in (None, before) for flag, before in zip(flags, layer.before.flags)):
            self.take_flags(flags)

    def note_writes(self, indices: Iterable[int]) -> None:
        """Let the version of each visible parameter grow of which a parameter of the layout was written."""
        changed = set(indices)
        params = [visible.param for visible in self.visible if not changed.isdisjoint(visible.members)]
        if params:
            torch.autograd.graph.increment_version(params)

    def unite_flags(self) -> None:
        """Freeze and unfreeze parameters that have one ``requires_grad``, as one of them was."""

    def take_flags(self, flags: Sequence[bool | None]) -> None:
        """Freeze or unfreeze each parameter of the layout; None leaves it as it is."""
        summoned = self.registration.summoned
        for tensor, flag in zip(summoned.tensors if summoned else self.params, flags):
            if flag is not None:
                tensor.requires_grad_(flag)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def set_grad(self, position: int, grad: torch.Tensor | None) -> None:
        """Make ``grad``, sharded or in full shape, the gradient of visible parameter ``position``."""
        visible = self.visible[position]
        assign_grad(visible.param, grad)

    def take_grad(self, index: int, whole: torch.Tensor) -> None:
        """Copy ``whole`` to the gradient of parameter ``index``."""
        whole = local_of(whole)
        visible = next(visible for visible in self.visible if index in visible.members)
        if visible.absent:
            return
        if visible.param.grad is None:
            visible.param.grad = torch.zeros_like(visible.param)
        part = self._part_of_grad(visible, index)
        part.copy_(whole if part.shape == whole.shape else self.handle.part_of(index, whole))

    def _part_of_grad(self, visible: Visible, index: int) -> torch.Tensor:
        """Return the part of parameter ``index`` in the gradient of ``visible``."""
        grad: Any = visible.param.grad
        if len(visible.members) == 1:
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

    def _pop_summoned(self) -> Layer | None:
        """Register the layer below the summoned one. Return that, also if an interrupt ended ``end_summon`` before."""
        self._ended = self.registration.summoned or self._ended
        self.registration.pop_summoned()
        return self._ended

    def drop_casts(self) -> None:
        """Let summoned parameters that were cast or moved show their memory again; their values are not kept."""
        layer = self.registration.summoned
        assert layer is not None and layer.memory is not None
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
        # while summoned: the gradients of the shards, and at the end those that users have left
        self._hidden_grads: list[torch.Tensor | None] | None = None
        self._left_grads: list[torch.Tensor | None] | None = None
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
        old, summoned = self.params[index], self.registration.summoned
        if summoned is not None:
            summoned.tensors[index] = new
        if isinstance(new, DTensor):  # the user's plain tensor stays the parameter while it is sharded
            return
        new._fsdp_owner, new._fsdp_flattened, new._fsdp_replaced = old._fsdp_owner, True, False
        old._fsdp_flattened, old._fsdp_replaced = False, True
        point_at([old, new], [old.data.clone(), memory])
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

    def summon(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """Register parameters over ``values``, in their true shapes, until ``end_summon``; with ``grads`` or, if None,
        the present gradients."""
        self._hidden_grads, self.shows_grads = [original.grad for original in self.params], grads is not None
        point_at(self.params, values)
        for original, grad in zip(self.params, grads or ()):
            original.grad = None  # of another shape
            original.grad = grad
        shown = [self._summoned(index, original) for index, original in enumerate(self.params)]
        self.registration.push(Layer(shown, values), summoned=True)

    def _summoned(self, index: int, original: Any) -> Any:
        """Return the user's own parameter, or a ``DTensor`` in its memory if tensor parallelism has placed it."""
        tp = self.handle.tp[index]
        if tp is None:
            return original
        shown = tp.around(original.detach(), requires_grad=original.requires_grad)
        if self.shows_grads and original.grad is not None:
            shown.grad = tp.around(original.grad, requires_grad=False).detach()
        return shown

    def end_summon(self, *, write_grads: bool) -> None:
        """Register the base again, with the gradients that users have set if ``write_grads``.

        Completes a call of this, or of ``summon``, that an interrupt has ended; else idempotent.
        """
        hidden, layer, with_grads = self._hidden_grads, self._pop_summoned(), self.shows_grads
        if hidden is None:
            return
        if self._left_grads is None:
            tensors = layer.tensors if with_grads and layer is not None else self.params
            self._left_grads = hidden if layer is None else [local_of(tensor.grad) for tensor in tensors]
        shown = self._left_grads
        for original, tensor in zip(self.params, self.params if layer is None else layer.tensors):
            original.grad = None
            original.requires_grad_(tensor.requires_grad)
        point_at(self.params, [memory for memory in self.registration.base.memory or () if memory is not None])
        for index, (before, now) in enumerate(zip(hidden, shown)):
            sharded = [tensor.shape for tensor in (self.params[index], before) if tensor is not None]
            if now is None:
                self.set_grad(index, None if write_grads or not with_grads else before)
            elif not with_grads and now.shape in sharded:
                self.set_grad(index, now)
            else:
                self.set_grad(index, before)
                if write_grads and now is not before:
                    self.take_grad(index, now)
        self._hidden_grads = self._left_grads = self._ended = None
        self.shows_grads = False


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
            self._part_of_grad(self.visible[0], index).zero_()
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

    def summon(self, values: list[torch.Tensor], grads: list[torch.Tensor | None] | None) -> None:
        """Register new parameters over ``values``, under the original names, until ``end_summon``."""
        requires_grad = self.handle.flat_param.requires_grad
        params = self._parameters_over(values, [requires_grad] * len(values))
        self.registration.push(Layer(params, values), summoned=True)

    def end_summon(self, *, write_grads: bool) -> None:
        """Register the base again, as ``OriginalViews.end_summon`` does."""
        layer = self._pop_summoned()
        if layer is None:
            return
        if write_grads:
            self.take_changes(layer, layer.tensors, layer.written(layer.tensors))
        else:
            self.take_flags([tensor.requires_grad for tensor in layer.tensors])
        self._ended = None


BucketViews = OriginalViews | FlatViews


def stepped_params(optimizer: Any) -> list[Any]:
    """Return the parameters of which ``optimizer`` reads ``.grad``.

    For ``fsdp.optim.WholeParamOptimizer`` these are the model's parameters, not those in its groups.
    """
    own = getattr(optimizer, "stepped_params", None)
    return [param for group in optimizer.param_groups for param in group["params"]] if own is None else list(own())
