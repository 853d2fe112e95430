"""Where a bucket's parameters are registered on the modules, and what is registered there now.

[Note: What is registered]
Leaves while the unit computes. While it does not, whatever is uppermost of: placeholders, while a state dict is made or
loaded; parameters in full shape, while they are summoned; and what *rests* there: the user's own parameters, which
hold the shard (``use_orig_params=True``), or :class:`ShardedPlaceholder` s beside a flat parameter (False).

``views.py`` says what users do to it. This file alone writes ``module._parameters``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import FullCopy
from fsdp.flat.metadata import ParamInfos
from fsdp.flat.names import own_modules
from fsdp.flat.ownership import OwnedParam, Place

Write = tuple[Any, Any, Any]  # what is put where: dictionary, key, value


class ShardedPlaceholder(torch.Tensor):
    """Stands on a module for a parameter that is not gathered: has its shape, dtype and device, and no values."""

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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class _InUnit:
    """Stands in the ``__dict__`` of a module that owns parameters of a unit, where a copy of the module alone would not
    have them: ``copy.deepcopy`` comes by here, unless the unit is being copied, and it is refused."""

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


class Slot:
    """One registration: the dictionary that holds it, and the parameter of the layout that it is of."""

    __slots__ = ("attribute", "index", "module", "name", "owner", "plain")

    def __init__(self, place: Place, index: int, *, hidden: bool) -> None:
        """``hidden``: ``parameters()`` does not show what is there, a plain attribute."""
        self.module, self.attribute, self.name, self.index = place.module, place.attribute, place.name, index
        self.owner: dict[str, Any] = place.module.__dict__ if hidden else place.module._parameters
        # A class with a __setattr__ of its own (torch's RNNs) keeps books that a dictionary write would pass by.
        self.plain = type(place.module).__setattr__ is nn.Module.__setattr__

    def current(self) -> Any:
        """What stands there now: users assign parameters, which ``nn.Module`` registers wherever we had put ours."""
        registered = self.module._parameters.get(self.attribute)
        return registered if registered is not None else self.owner.get(self.attribute)

    def put(self, value: Any) -> None:
        if not self.plain:
            setattr(self.module, self.attribute, value)
            for home in (self.module._parameters, self.module.__dict__):
                home.pop(self.attribute, None)
        elif self.owner is not self.module._parameters:
            self.module._parameters.pop(self.attribute, None)
        self.owner[self.attribute] = value


@dataclass(frozen=True)
class Home:
    """The module that a unit's flat parameters are registered on, and the order of what each of its modules had
    registered before the first bucket changed it."""

    module: nn.Module
    orders: dict[nn.Module, list[str]]

    @staticmethod
    def of(unit_module: nn.Module, module: nn.Module) -> Home:
        return Home(module, {owner: [*owner._parameters.keys()] for _, owner in own_modules(unit_module)})

    def free_name(self) -> str:
        """The first of ``_flat_param``, ``_flat_param_1``, ... that is free."""
        names = itertools.chain(["_flat_param"], (f"_flat_param_{count}" for count in itertools.count(1)))
        return next(name for name in names if name not in self.module._parameters)


class _Writes:
    """Tensors, and the places (dictionaries and keys) that they are put in, all at once."""

    __slots__ = ("_by_owner", "_careful", "_each", "tensors")

    def __init__(
        self,
        places: Sequence[tuple[dict[str, Any], str]],
        tensors: Sequence[Any],
        careful: Sequence[tuple[Slot, Any]] = (),
    ) -> None:
        """``careful``: slots that have to be told of their tensors."""
        self.tensors, self._careful = tensors, careful
        self._each: list[tuple[dict[str, Any], str, Any]] = []
        by_owner: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for (owner, key), tensor in zip(places, tensors, strict=True):
            self._each.append((owner, key, tensor))
            by_owner.setdefault(id(owner), (owner, {}))[1][key] = tensor
        self._by_owner = list(by_owner.values())

    def put(self) -> None:
        for owner, its in self._by_owner:
            owner |= its
        for slot, tensor in self._careful:
            slot.put(tensor)

    def there(self) -> list[Any]:
        """What stands in each of the places now."""
        return [owner.get(key) for owner, key, _ in self._each]

    def are_there(self) -> bool:
        for owner, key, tensor in self._each:
            if owner.get(key) is not tensor:
                return False
        return True


@dataclass(eq=False)
class Layer:
    """Tensors that are registered over what rests there, one per parameter of the layout."""

    tensors: list[Any]
    values: Sequence[torch.Tensor] | None = None  # the parameters' memory; what users put in their places goes there
    flat: tuple[nn.Module, str] | None = None  # where the only tensor is, if it stands for the whole flat vector
    before: tuple[list[Any], list[Any]] | None = None  # looks and flags; None where changes do not count
    compared: bool = False  # whether a change of values counts that nothing else shows, as through ``.data``


class Registration:
    """The places of one bucket's parameters; see [Note: What is registered].

    Attributes:
        name: the flat parameter's.
        resting: what rests there, one tensor per parameter of the layout.
        summoned, placeholders: what is registered over it, if something is.
    """

    def __init__(
        self, handle: FlatParamHandle, owned: list[OwnedParam], home: Home | None, guards: Sequence[Write] = ()
    ) -> None:
        """``home`` is for buckets that show a flat parameter; ``guards`` are put while what rests there is registered,
        and taken away else."""
        self.handle = handle
        self._home, self._guards = home, guards
        self._slots = [
            Slot(place, index, hidden=home is not None) for index, item in enumerate(owned) for place in item.places
        ]
        first = (item.places[0] for item in owned)
        handle.flat_param._param_infos = ParamInfos((place.module, place.attribute, place.name) for place in first)
        self._slots_of: dict[int, list[Slot]] = {}  # by parameter of the layout
        for slot in self._slots:
            self._slots_of.setdefault(slot.index, []).append(slot)
            if home is not None:
                del slot.module._parameters[slot.attribute]
            if isinstance(slot.module, nn.RNNBase):  # it would move the leaves' memory into a buffer of its own
                slot.module.__dict__["flatten_parameters"] = _keep_layout
        self.name = "" if home is None else home.free_name()
        self._orders = {} if home is None else {slot.module: home.orders[slot.module] for slot in self._slots}
        self._copy: FullCopy | None = None  # whose leaves the next line holds
        self._leaf_writes = _Writes([], [])
        self.resting: list[Any] = []
        self._resting_writes = _Writes([], [])
        self.summoned: Layer | None = None
        self.placeholders: Layer | None = None
        self._shown: Any = None  # of writes or layers that which was registered last
        # where users would register what takes the place of a plain attribute, and nothing is
        hidden = [(slot.module._parameters, slot.attribute) for slot in self._slots if home is not None]
        self._free: _Writes = _Writes(hidden, [None] * len(hidden))

    def _writes(self, tensors: Sequence[Any], flat: Any) -> _Writes:
        places: list[tuple[dict[str, Any], str]] = [(slot.owner, slot.attribute) for slot in self._slots]
        values = [tensors[slot.index] for slot in self._slots]
        if self._home is not None:
            places.append((self._home.module._parameters, self.name))
            values.append(flat)
        return _Writes(places, values, [(slot, tensors[slot.index]) for slot in self._slots if not slot.plain])

    # -- switching -----------------------------------------------------------------------------------------------------

    def rest(self, tensors: list[Any]) -> None:
        """``tensors`` rest in the parameters' places from here on."""
        self.resting = tensors
        self._resting_writes = self._writes(tensors, self.handle.flat_param)

    def use_resting(self) -> None:
        """The modules show what they do while the unit does not run. Where they do already, what users have put there
        since stays, and is taken over later."""
        layer = self.placeholders or self.summoned
        if self._shown is (layer or self._resting_writes):
            return
        if layer is not None:
            self._register(layer)
            return
        self._shown = self._resting_writes
        self._resting_writes.put()
        for dictionary, key, guard in self._guards:
            dictionary[key] = guard

    def use_leaves(self, take_over: Callable[[], None] | None) -> None:
        """The modules compute with the full parameters from here on; ``take_over`` is called before, if users have put
        something in the place of what was registered. If a gather was started before, it counts from the next one on.
        """
        copy = self.handle.copy
        if copy is not self._copy:
            self._copy, self._leaf_writes = copy, self._writes(copy.leaves, copy.whole)
        if take_over is not None and not self._resting_writes.are_there():
            ours = zip(self._leaf_writes.there(), self._leaf_writes.tensors, self._resting_writes.tensors)
            if any(current is not leaf and current is not resting for current, leaf, resting in ours):
                take_over()
        self._shown = self._leaf_writes
        self._leaf_writes.put()
        self._unguard()

    def _unguard(self) -> None:
        try:
            for dictionary, key, _ in self._guards:
                del dictionary[key]
        except KeyError:  # not all of them were there
            for dictionary, key, _ in self._guards:
                dictionary.pop(key, None)

    def unregister(self) -> None:
        """Nothing of the bucket is registered until ``use_resting``."""
        self._shown = None
        if self._home is not None:
            self._home.module._parameters[self.name] = None
            return
        for slot in self._slots:
            if slot.attribute in slot.module._parameters:
                slot.module._parameters[slot.attribute] = None  # which nn.Module passes over, and which keeps the place

    def cover(self, layer: Layer, *, summoned: bool) -> None:
        """Register ``layer`` over what is there until ``uncover``."""
        if summoned:
            self.summoned = layer
        else:
            self.placeholders = layer
        self._register(layer)

    def uncover(self, layer: Layer) -> list[torch.Tensor | None]:
        """Register what is below ``layer``, the uppermost; returns what was registered."""
        found = self.registered()
        if layer is self.placeholders:
            self.placeholders = None
        else:
            self.summoned = None
        if layer.flat is not None:
            module, name = layer.flat
            del module._parameters[name]
        elif self._home is not None:
            self._unregister_originals()
        self.use_resting()
        return found

    def _unregister_originals(self) -> None:
        for slot in self._slots:
            slot.module._parameters.pop(slot.attribute, None)

    def _register(self, layer: Layer) -> None:
        if layer.flat is not None:
            self.unregister()
            layer.flat[0]._parameters[layer.flat[1]] = layer.tensors[0]
            self._shown = layer
            return
        if self._home is not None:
            self._home.module._parameters.pop(self.name, None)
        for slot in self._slots:
            if self._home is not None:
                slot.owner.pop(slot.attribute, None)
            slot.module._parameters[slot.attribute] = layer.tensors[slot.index]
        for module, order in self._orders.items():  # as the plain module has them
            here = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: here.pop(name) for name in order if name in here})
            module._parameters.update(here)
        if layer is self.summoned:
            self._unguard()
        self._shown = layer

    # -- what users have put there -------------------------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        """Whether nothing is registered but what rests there."""
        if self.placeholders is not None or self.summoned is not None or not self._resting_writes.are_there():
            return False
        return self._home is None or self._free.are_there()

    def registered(self) -> list[torch.Tensor | None]:
        """What is registered in the (first) place of each parameter of the layout now."""
        first = [self._slots_of[index][0] for index in range(len(self._slots_of))]
        return [slot.module._parameters.get(slot.attribute) for slot in first]

    def replaced(self) -> Iterator[tuple[int, Any]]:
        """(index, the user's) of each parameter that is not what we have registered.

        Raises:
            NotImplementedError: one registration of a shared parameter was replaced.
            RuntimeError: it was replaced by a parameter of another unit.
        """
        ours = self.resting if self.summoned is None else self.summoned.tensors
        if self.rests:  # nearly always
            return
        strange = {
            slot.index: (slot.name, current)
            for slot in self._slots
            if (current := slot.current()) is not ours[slot.index]
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

    def renormalizes(self, index: int) -> bool:
        """Whether a module that has parameter ``index`` rescales it in its forward."""
        modules = [slot.module for slot in self._slots_of.get(index, ())]
        return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None for m in modules)

    def put_back(self, index: int, tensor: Any) -> None:
        """Put ``tensor`` in the places of parameter ``index``."""
        for slot in self._slots_of[index]:
            slot.put(tensor)

    def put_back_leaves(self) -> list[int]:
        """Put leaves where users have put something else while they are registered; returns the indices of those."""
        if self._leaf_writes.are_there():
            return []
        found = []
        for slot in self._slots:
            leaf, current = self.handle.leaves[slot.index], slot.current()
            if current is not leaf and current is not None:
                found.append(slot.index)
                slot.put(leaf)
        return found

    # -- copies --------------------------------------------------------------------------------------------------------

    def forbid_copies(self) -> None:
        """Modules that own parameters of the bucket can be copied with their unit only, or while it is summoned."""
        for module, index in {slot.module: slot.index for slot in self._slots}.items():
            module.__dict__[_InUnit.ATTRIBUTE] = _InUnit(self, module, index)

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        """See ``CommonViews.announce_copies``."""
        memo[id(self.handle.flat_param)] = handle.flat_param
        memo.update({id(slot.module.__dict__.get(_InUnit.ATTRIBUTE)): None for slot in self._slots})
        if self._home is not None:
            memo.update({id(tensor): tensor for tensor in self.resting})  # until they are replaced

    def copied(self, memo: dict[int, Any]) -> tuple[list[OwnedParam], Home | None]:
        """The places in the copies that ``memo`` has of the modules, without parameters; what is in the way of a new
        registration is gone."""
        unknown: Any = None
        owned = [OwnedParam(unknown, []) for _ in self.handle.layout.params]
        for slot in self._slots:
            owned[slot.index].places.append(Place(memo[id(slot.module)], slot.attribute, slot.name))
        if self._home is None:
            return owned, None
        home = memo[id(self._home.module)]
        del home._parameters[self.name]
        for place in (place for item in owned for place in item.places):
            place.module.__dict__.pop(place.attribute)
            place.module._parameters[place.attribute] = None
        return owned, Home(home, {memo[id(module)]: order for module, order in self._orders.items()})


def registered_params(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What ``module`` itself has registered, by attribute; what is registered as None is left out."""
    return [(attribute, param) for attribute, param in module._parameters.items() if param is not None]


def register_instead(module: nn.Module, attribute: str, placeholder: torch.Tensor) -> None:
    """Register ``placeholder`` as ``attribute`` of ``module``, in the place of what is there."""
    module._parameters[attribute] = placeholder  # type: ignore[assignment]


def drop_gradients(model: nn.Module) -> bool:
    """Set the gradients of all parameters of ``model`` to None. ``nn.Module.zero_grad`` does the same, and makes names
    and paths for that. Returns False, with nothing done, where a module says itself which modules it has."""
    if type(model).parameters is not nn.Module.parameters:
        return False
    modules, seen = [model], {model}
    for module in modules:
        if type(module).named_modules is not nn.Module.named_modules:
            return False
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    for module in modules:
        for param in module._parameters.values():
            if param is not None and param.grad is not None:
                param.grad = None
    return True


def _keep_layout() -> None:
    """Takes the place of ``flatten_parameters`` on RNNs."""
