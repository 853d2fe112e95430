"""The tensors that are registered on the modules as the parameters of one bucket: a stack of layers.

[Note: Registration layers]
The uppermost layer of a bucket is registered on the modules. From bottom to top:

1. The base, which holds the shard: the user's own parameters (``use_orig_params=True``), or
   :class:`ShardedPlaceholder` s as plain attributes next to the registered flat parameter (False).
2. The leaves over the full buffer, while the unit computes.
3. The full parameters, inside ``summon_full_params``.
4. Placeholders, while a state dict is made or loaded.

Each layer is pushed when the use begins, and popped when it ends. Users may assign parameters at any time, which
``params.py`` takes over. This file alone writes ``module._parameters``. A parameter with values that is a plain
attribute has no entry there: ``torch.func.functional_call`` would write to the entry, which the attribute hides. That
function restores a leaf as an entry, which ``show`` removes. ``Site.order`` is the plain module's order of entries.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.metadata import Infos, ParamInfo, SharedParamInfo
from fsdp.flat.snapshot import Snapshot, changed, flag_of, pointers_of, version_of

Guard = tuple[Any, Any, Any]  # an entry that refuses forwards of a module: dictionary, key, value


class ShardedPlaceholder(torch.Tensor):
    """A stand-in for a sharded parameter: it has the shape, dtype and device, and no values."""

    _handle: FlatParamHandle
    _index: int  # of the parameter in the handle's layout

    @staticmethod
    def __new__(cls, handle: FlatParamHandle, index: int) -> ShardedPlaceholder:
        leaf, dtype = handle.leaves[index], handle.layout.dtype
        placeholder = torch.Tensor._make_wrapper_subclass(
            cls, leaf.shape, leaf.stride(), 0, dtype=dtype, device=leaf.device, requires_grad=leaf.requires_grad
        )
        placeholder._handle, placeholder._index = handle, index
        return placeholder

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, cls):
                raise RuntimeError(f"{func}: {value._handle.describe_sharded(value._index)}")
        raise AssertionError("dispatched without a placeholder")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class _InUnit:
    """An entry in the ``__dict__`` of a module that owns parameters of a unit: it refuses ``copy.deepcopy`` of the
    module alone, which would copy shards. While the unit itself is copied, ``deepcopy`` finds it in the memo."""

    ATTRIBUTE = "_fsdp_in_unit"

    def __init__(self, registration: Registration, module: nn.Module, index: int) -> None:
        self._registration, self._kind, self._index = weakref.ref(registration), type(module).__name__, index

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        registration = self._registration()
        if registration is not None and registration.summoned is None:
            handle = registration.handle
            raise RuntimeError(
                f"copy.deepcopy of the {self._kind} alone would be without its parameters: parameter "
                f"{handle.name_of(self._index)!r} of {handle.unit_name} belongs to the unit. Copy the wrapped model, "
                "copy.deepcopy(model), which copies shards; or copy inside summon_full_params(model), which gives a "
                "plain module"
            )


@dataclass(slots=True)
class Site:
    """One registration of a parameter: ``module.<attribute>``, known in the unit as ``name``. ``order`` are the names
    of all parameters of the module."""

    module: nn.Module
    attribute: str
    name: str
    order: list[str]

    @property
    def is_plain(self) -> bool:
        """Whether a dictionary write is enough. A class with a ``__setattr__`` of its own (torch's RNNs) keeps records,
        which a dictionary write would bypass."""
        return type(self.module).__setattr__ is nn.Module.__setattr__

    def current(self) -> Any:
        """Return the tensor that is here now. ``nn.Module`` registers a parameter that a user assigns."""
        registered = self.module._parameters.get(self.attribute)
        return registered if registered is not None else self.module.__dict__.get(self.attribute)

    def put(self, tensor: Any, *, hidden: bool) -> None:
        """Register ``tensor`` here, or make it a plain attribute if it is ``hidden``."""
        registered = self.module._parameters
        if not self.is_plain:
            before = dict(registered)
            registered.pop(self.attribute, None)  # nn.Module takes no plain tensor in the place of a parameter
            setattr(self.module, self.attribute, tensor)
            registered.clear()
            registered.update(before)
        here, other = (self.module.__dict__, registered) if hidden else (registered, self.module.__dict__)
        other.pop(self.attribute, None)
        here[self.attribute] = tensor

    def restore_order(self) -> None:
        """Sort the registered parameters of the module as they were in the plain module."""
        registered = self.module._parameters
        later = [name for name in registered if name not in self.order]
        for name in [*self.order, *later]:
            if name in registered:
                registered[name] = registered.pop(name)


class _Entries:
    """Tensors and the dictionary entries that they are written to."""

    __slots__ = ("_by_owner", "_keys", "_owners", "_puts", "_tensors")

    def __init__(
        self,
        each: Sequence[tuple[dict[str, Any], str, Any]],
        puts: Sequence[Callable[[], None]] = (),
        free: Sequence[tuple[dict[str, Any], str]] = (),
    ) -> None:
        """``each`` entry is an owner, a key and a tensor. ``puts`` write tensors that need more than that. ``free`` are
        owners and keys that hold no tensor while the entries are written."""
        self._puts = puts
        present = [*each, *((owner, key, None) for owner, key in free)]
        self._owners, self._keys = [owner for owner, _, _ in present], [key for _, key, _ in present]
        self._tensors = [tensor for _, _, tensor in present]
        by_owner: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for owner, key, tensor in each:
            by_owner.setdefault(id(owner), (owner, {}))[1][key] = tensor
        self._by_owner = list(by_owner.values())

    def write(self) -> None:
        for owner, entries in self._by_owner:
            owner |= entries
        for put in self._puts:
            put()

    @property
    def are_there(self) -> bool:
        """Whether each entry holds the tensor now, and each free key none."""
        return all(map(operator.is_, map(dict.get, self._owners, self._keys), self._tensors))


_NO_ENTRIES = _Entries(())


class Layer:
    """Tensors to register, one per parameter of the layout; behind them the flat parameter, where it is registered.

    Attributes:
        tensors: in the order of the layout.
        memory: the memory that the values of each tensor belong in. None for the tensors of a state dict, and for a
            placeholder.
        before: a snapshot of ``tensors`` without changes of users; empty if these do not count.
        compares_values: whether values are compared as well, for writes without a trace, as through ``.data``.
        hidden: whether the tensors become plain attributes, which ``parameters()`` does not return, except the flat
            parameter.
        keeps_writes: whether changes of users are taken over when the layer is popped.
        flat_place: the module and the name for the only tensor of the layer, which stands for the flat vector.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        memory: Sequence[torch.Tensor | None] | None = None,
        *,
        hidden: bool = False,
        keeps_writes: bool = False,
        compares_values: bool = False,
        flat_place: tuple[nn.Module, str] | None = None,
    ) -> None:
        self.tensors, self.memory, self.flat_place = list(tensors), memory, flat_place
        self.hidden, self.keeps_writes, self.compares_values = hidden, keeps_writes, compares_values
        self.before = Snapshot(self.tensors if keeps_writes or memory is not None else ())
        self.entries = _NO_ENTRIES  # while it is in a registration

    def written(self, found: Sequence[torch.Tensor | None]) -> set[int]:
        """Return the indices of the tensors that were replaced or written, where ``found`` are registered now, or None
        for a deleted one."""
        tensors = [before if tensor is None else tensor for before, tensor in zip(self.tensors, found)]
        replaced = changed(list(map(id, self.tensors)), list(map(id, tensors)))
        return {*replaced, *changed(self.before.versions, list(map(version_of, tensors))), *self.moved(tensors)}

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of the tensors with other memory than in the snapshot, as after ``tensor.data = new``."""
        return changed(self.before.pointers, pointers_of(tensors))

    @property
    def has_flags_of_before(self) -> bool:
        """Whether each tensor has the ``requires_grad`` of the snapshot."""
        return list(map(flag_of, self.tensors)) == self.before.flags

    def accept_flags(self) -> None:
        """Let the snapshot have the present ``requires_grad`` of each tensor."""
        self.before.flags = list(map(flag_of, self.tensors))


class Registration:
    """The registrations of one bucket's parameters; see [Note: Registration layers].

    Attributes:
        name: the name of the flat parameter; "" without one.
        base: the lowest layer.
        leaves: the layer of leaves, of the full buffer that was used last.
        shows_leaves: whether it is on the stack.
        summoned: the layer of full parameters; None outside of ``summon_full_params``.
        placeholders: the layer for a state dict; None if no state dict is made or loaded.
    """

    def __init__(
        self, handle: FlatParamHandle, sites: list[list[Site]], home: nn.Module | None, guards: Sequence[Guard] = ()
    ) -> None:
        """``sites`` are those of each parameter. ``home`` is the module that gets the flat parameter, for buckets that
        register one. ``guards`` are in place while the modules cannot compute with the registered tensors."""
        self.handle = handle
        self._home, self._guards = home, guards
        self._sites = sites
        self._each = [(index, site) for index, several in enumerate(sites) for site in several]
        for _, site in self._each:
            if isinstance(site.module, nn.RNNBase):  # it would move the leaves' memory into a buffer of its own
                site.module.__dict__["flatten_parameters"] = _keep_layout
        further = [(site, several[0]) for several in sites for site in several[1:]]
        handle.flat_param._param_infos = Infos(ParamInfo, [several[:1] for several in sites])
        handle.flat_param._shared_param_infos = Infos(SharedParamInfo, further) if further else ()
        self.name = ""
        if home is not None:
            names = itertools.chain(["_flat_param"], (f"_flat_param_{count}" for count in itertools.count(1)))
            self.name = next(name for name in names if name not in home._parameters)
        # the entries that ``_parameters`` lacks while the base and the leaves are plain attributes
        hidden = self._each if home is not None else []
        self._free = [(site.module._parameters, site.attribute) for _, site in hidden]
        self.base = Layer([])
        self.leaves, self._leaves_of = Layer([]), list[Any]()  # and the list of the full buffer that they are from
        self.shows_leaves = False
        self.summoned: Layer | None = None
        self.placeholders: Layer | None = None
        self._written: Layer | None = None  # the layer that the modules show

    # -- the stack -----------------------------------------------------------------------------------------------------

    def set_base(self, layer: Layer) -> None:
        """Register ``layer`` as the base, and drop the layer of leaves, which may keep a former full buffer alive."""
        self._make_entries(layer)
        self.base = layer
        if not self.shows_leaves:
            self.leaves, self._leaves_of = Layer([]), []
        self.show()

    def replace_base(self, index: int, tensor: torch.Tensor) -> None:
        """Let ``tensor``, over the same memory, be the base of parameter ``index``."""
        self.base.tensors[index] = tensor
        self._make_entries(self.base)

    def push_leaves(self) -> None:
        """Register the leaves of the full buffer in use."""
        leaves = self.handle.copy.all_leaves
        if leaves is not self._leaves_of:
            layer = Layer(leaves, hidden=self._home is not None)
            self._make_entries(layer)
            self.leaves, self._leaves_of = layer, leaves
        self.shows_leaves = True
        self.show()

    def pop_leaves(self) -> None:
        """Register the layer below the leaves; idempotent. Parameters that users have assigned since stay."""
        self.shows_leaves = False
        self.show()

    @property
    def holder(self) -> Layer:
        """The layer that holds the parameters' values between passes: the full parameters, else the base."""
        return self.summoned or self.base

    def push(self, layer: Layer, *, summoned: bool = False) -> None:
        """Register ``layer``, of full parameters if ``summoned``, else of placeholders."""
        self._make_entries(layer)
        if summoned:
            self.summoned = layer
        else:
            self.placeholders = layer
        self.show()

    def pop(self, layer: Layer) -> list[Any]:
        """Remove ``layer``, of placeholders, and return the tensors that were registered in the end."""
        found = self.registered() if self._written is layer else layer.tensors  # an interrupt may have ended ``push``
        self.placeholders = None
        if layer.flat_place is not None:
            module, name = layer.flat_place
            del module._parameters[name]
        self.show()
        return found

    def pop_summoned(self) -> None:
        """Remove the layer of full parameters; idempotent."""
        self.summoned = None
        self.show()

    def unregister(self) -> None:
        """Remove the registrations of the bucket until ``show``."""
        self._written = None
        if self._home is not None:
            self._home._parameters[self.name] = None
            return
        for _, site in self._each:
            site.module._parameters[site.attribute] = None

    def show(self) -> None:
        """Write the uppermost layer to the modules, unless they show it."""
        layer = self.placeholders or self.summoned or (self.leaves if self.shows_leaves else self.base)
        if self._written is layer:
            return
        self._written = None  # an interrupt leaves a part of either
        shown = () if self._home is None or layer.hidden or layer.flat_place is not None else self._each
        if layer.hidden:
            for entries, name in self._free:
                entries.pop(name, None)
                if layer is self.base and self.handle.groups.sharded:
                    entries[name] = None  # functions of torch find the name, and then a placeholder
        elif self._home is not None:
            self._home._parameters.pop(self.name, None)
        for _, site in shown:
            site.module.__dict__.pop(site.attribute, None)
        layer.entries.write()
        for _, site in shown:
            site.restore_order()
        if layer is self.base:
            for dictionary, key, guard in self._guards:
                dictionary[key] = guard
        elif layer is not self.placeholders:  # the modules can compute
            for dictionary, key, _ in self._guards:
                dictionary.pop(key, None)
        self._written = layer

    def _make_entries(self, layer: Layer) -> None:
        hidden, tensors = layer.hidden, layer.tensors
        each: list[tuple[dict[str, Any], str, Any]] = []
        if self._home is not None and hidden:
            each.append((self._home._parameters, self.name, tensors[-1]))
        if layer.flat_place is not None:
            each += [(site.module._parameters, site.attribute, None) for _, site in self._each]
            module, name = layer.flat_place
            layer.entries = _Entries([*each, (module._parameters, name, tensors[0])])
            return
        each += [
            (site.module.__dict__ if hidden else site.module._parameters, site.attribute, tensors[index])
            for index, site in self._each
        ]
        puts = [functools.partial(s.put, tensors[index], hidden=hidden) for index, s in self._each if not s.is_plain]
        layer.entries = _Entries(each, puts, self._free if hidden else ())

    # -- assignments of users ------------------------------------------------------------------------------------------

    @property
    def base_is_intact(self) -> bool:
        """Whether the base is the uppermost layer, and exactly those tensors are registered."""
        if self.shows_leaves or self.summoned is not None or self.placeholders is not None:
            return False
        return self.base.entries.are_there

    def registered(self) -> list[torch.Tensor | None]:
        """Return the tensor that is registered in the first place of each parameter of the layout."""
        return [several[0].module._parameters.get(several[0].attribute) for several in self._sites]

    def replaced(self) -> Iterator[tuple[int, Any]]:
        """Yield the index and the new tensor of each parameter that a user has replaced.

        Raises:
            NotImplementedError: one registration of a shared parameter was replaced.
            RuntimeError: a parameter was replaced by one of another unit, or by a parametrization.
        """
        for _, site in self._each:
            if site.current() is None and is_parametrized(site.module, site.attribute):
                raise RuntimeError(
                    f"parameter {site.name!r} of {self.handle.unit_name} was given a parametrization after wrapping: "
                    "its module would compute with another tensor than the unit's. Call "
                    "register_parametrization() before wrapping"
                )
        ours = self.holder.tensors
        assigned = {
            index: (site.name, current)
            for index, site in self._each
            if (current := site.current()) is not ours[index]
            and current is not None  # a user has deleted it
            and not self.handle.is_leaf(current, index)
        }
        for index, (name, new) in assigned.items():
            if any(site.current() is not new for site in self._sites[index]):
                raise NotImplementedError(
                    f"Cannot writeback {name!r}: it is one registration of a shared parameter "
                    f"({', '.join(site.name for site in self._sites[index])}); change the parameter in place instead, "
                    "or replace all of them by the same one"
                )
            if getattr(new, "_fsdp_flattened", False) and not getattr(new, "_fsdp_replaced", False):
                raise RuntimeError(
                    f"Cannot writeback {name!r} of {self.handle.unit_name}: it was replaced by "
                    f"{getattr(new, '_fsdp_owner', 'a flat parameter')}, which is sharded already. Share parameters "
                    "before wrapping"
                )
            yield index, new

    def hide_base(self) -> None:
        """Make plain attributes of the base's tensors again if a program has registered them, or removed them."""
        if self._home is not None and self._written is self.base:
            self._written = None
            self.show()

    def put_back(self, index: int) -> None:
        """Register the tensor of the base again that a user has replaced."""
        for site in self._sites[index]:
            site.put(self.base.tensors[index], hidden=self._home is not None)

    def put_back_leaves(self) -> list[int]:
        """Register leaves again that a user has replaced, and return the indices of their parameters."""
        found = []
        for index, site in self._each:
            leaf, current = self.handle.leaves[index], site.current()
            if current is not None:
                if current is not leaf:
                    found.append(index)
                site.put(leaf, hidden=self._home is not None)
        return found

    def renormalizes(self, index: int) -> bool:
        """Whether the forward of a module with parameter ``index`` rescales its rows."""
        modules = [site.module for of, site in self._each if of == index]
        return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None for m in modules)

    # -- copies --------------------------------------------------------------------------------------------------------

    def forbid_copies(self) -> None:
        """Refuse copies of modules with parameters of the bucket, except with the unit, or while it is summoned."""
        for module, index in {site.module: index for index, site in self._each}.items():
            module.__dict__[_InUnit.ATTRIBUTE] = _InUnit(self, module, index)

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        """Fill the ``memo`` of a ``deepcopy`` of the modules, for which ``handle`` was copied."""
        memo.update({id(site.module.__dict__.get(_InUnit.ATTRIBUTE)): None for _, site in self._each})
        if self._home is not None:
            memo.update({id(tensor): tensor for tensor in self.base.tensors})  # until they are replaced
        memo[id(self.handle.flat_param)] = handle.flat_param

    def copied(self, memo: dict[int, Any]) -> tuple[list[list[Site]], nn.Module | None]:
        """Return the sites in the copies of the modules, and the copy of the module with the flat parameter, which is
        removed there. ``memo`` has the copies."""
        home = None if self._home is None else memo[id(self._home)]
        if home is not None:
            del home._parameters[self.name]
        copies = [[replace(site, module=memo[id(site.module)]) for site in several] for several in self._sites]
        return copies, home


def registered_params(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the name and tensor of each parameter that ``module`` itself has registered, except None."""
    return [(attribute, param) for attribute, param in module._parameters.items() if param is not None]


def register_instead(module: nn.Module, attribute: str, placeholder: torch.Tensor) -> None:
    """Register ``placeholder`` as ``attribute`` of ``module``, in place of the present tensor."""
    module._parameters[attribute] = placeholder  # type: ignore[assignment]


def drop_gradients(model: nn.Module) -> bool:
    """Set the gradients of all parameters of ``model`` to None, as ``nn.Module.zero_grad`` does, without names.

    Returns False, and does nothing, if the class of a module overrides ``named_modules`` or ``parameters``.
    """
    modules, seen = [model], {model}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    classes = {type(module) for module in modules}
    if type(model).parameters is not nn.Module.parameters or any(
        kind.named_modules is not nn.Module.named_modules for kind in classes
    ):
        return False
    for module in modules:
        for param in module._parameters.values():
            if param is not None and param.grad is not None:
                param.grad = None
    return True


def _keep_layout() -> None:
    """Replace ``flatten_parameters`` of RNNs."""
