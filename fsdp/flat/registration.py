"""What is registered on the modules: leaves while a unit is gathered, and in between what ``use_orig_params`` asks for.

``views.py`` says what that is, and what users do to it. These two files alone write ``module._parameters``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import FullCopy
from fsdp.flat.names import own_modules
from fsdp.flat.ownership import OwnedParam, Place


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


class AtRest:
    """Forward pre-hook of a module that owns sharded parameters, while they are sharded: the module was called by
    itself, and would compute with this rank's part of them."""

    KEY = "fsdp_at_rest"  # torch's own keys are integers

    def __init__(self, handle: FlatParamHandle, index: int) -> None:
        self._handle, self._index = handle, index

    def __call__(self, module: nn.Module, inputs: Any) -> NoReturn:
        raise RuntimeError(
            f"a {type(module).__name__} was called by itself: {self._handle.describe_sharded(self._index)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AtRest:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle a module: {self._handle.describe_sharded(self._index)}")


class _InUnit:
    """Stands in the ``__dict__`` of a module that owns parameters of a unit, where a copy of the module alone would not
    have them: ``copy.deepcopy`` comes by here, unless the unit is being copied, and it is refused."""

    ATTRIBUTE = "_fsdp_in_unit"

    def __init__(self, views: Registration, module: nn.Module, index: int) -> None:
        self._views, self._kind, self._index = weakref.ref(views), type(module).__name__, index

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        views = self._views()
        if views is not None and not views.shows_whole:
            raise RuntimeError(
                f"copy.deepcopy of a {self._kind} alone would be without its parameters: parameter "
                f"{views.handle.name_of(self._index)!r} of {views.handle.unit_name} belongs to the unit. Copy the "
                "wrapped model, copy.deepcopy(model), which copies shards; or copy inside summon_full_params(model), "
                "which gives a plain module"
            )


class Slot:
    """One registration: the dictionary that holds it, and what goes there."""

    __slots__ = ("attribute", "index", "module", "name", "owner", "plain", "sharded")

    def __init__(self, owner: dict[str, Any], place: Place, index: int, sharded: Any) -> None:
        """``index``: of the parameter in the layout."""
        self.owner, self.module, self.attribute, self.name = owner, place.module, place.attribute, place.name
        self.index, self.sharded = index, sharded
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


class Registration:
    """The places in which a bucket's parameters are registered, and switching between what can be there."""

    def __init__(self, handle: FlatParamHandle, slots: list[Slot]) -> None:
        self.handle = handle
        self._slots = slots
        self._slots_of: dict[int, list[Slot]] = {}  # by parameter of the layout
        for slot in slots:
            self._slots_of.setdefault(slot.index, []).append(slot)
        self._copy: FullCopy | None = None  # whose leaves the next line holds
        self._leaf_writes: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._note_sharded()
        self._careful = [slot for slot in slots if not slot.plain]
        for slot in slots:
            if isinstance(slot.module, nn.RNNBase):  # it would move the leaves' memory into a buffer of its own
                slot.module.__dict__["flatten_parameters"] = _keep_layout
        self._in_unit: list[_InUnit] = []
        self._shown: list[nn.Parameter] | None = None
        self._drop: Callable[[], None] | None = None  # takes away what stands in for the parameters, if something does
        self.check_writeback = os.environ.get("FSDP_SKIP_WRITEBACK_CHECK", "0") != "1"

    def _note_sharded(self) -> None:
        """``use_sharded`` is to register what the slots have now."""
        self._sharded_writes = [(slot.owner, slot.attribute, slot.sharded) for slot in self._slots]

    def use_leaves(self) -> None:
        """The modules compute with the full parameters from here on.

        What users have put in the place of what was registered is taken over; if a gather was started before, it
        counts from the next one on.
        """
        copy = self.handle.copy
        if copy is not self._copy:
            self._copy = copy
            self._leaf_writes = [(s.owner, s.attribute, copy.leaves[s.index]) for s in self._slots]
        if self.check_writeback and self._shown is None:
            for (owner, attribute, leaf), (_, _, sharded) in zip(self._leaf_writes, self._sharded_writes):
                current = owner.get(attribute)
                if current is not sharded and current is not leaf:
                    self.take_over()
                    break
        for owner, attribute, leaf in self._leaf_writes:
            owner[attribute] = leaf
        for slot in self._careful:
            slot.put(copy.leaves[slot.index])

    def _forbid_copies(self) -> None:
        """Modules that own parameters of the bucket can be copied with their unit only, or while it is summoned."""
        for module, index in {slot.module: slot.index for slot in self._slots}.items():
            module.__dict__[_InUnit.ATTRIBUTE] = guard = _InUnit(self, module, index)
            self._in_unit.append(guard)

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        """The modules are about to be copied; ``handle`` is the copy of this one's. Says what to put for what is on
        them."""
        memo[id(self.handle.flat_param)] = handle.flat_param
        memo.update({id(guard): None for guard in self._in_unit})

    def take_over(self) -> None:
        """Take over the values of what users have put in the place of parameters or of their data."""
        raise AssertionError("said by the views")

    @property
    def shows_whole(self) -> bool:
        """Whether the parameters are summoned."""
        return self._shown is not None

    def unregister(self) -> None:
        """Nothing of the bucket is registered until ``use_resting`` (or ``follow``)."""
        for slot in self._slots:
            if slot.attribute in slot.module._parameters:
                slot.module._parameters[slot.attribute] = None  # which nn.Module passes over, and which keeps the place

    def _register_originals(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register these, one per parameter of the layout, until ``_hide_originals``."""
        for slot in self._slots:
            slot.module._parameters[slot.attribute] = tensors[slot.index]  # type: ignore[assignment]

    def _hide_originals(self) -> None:
        self.use_resting()

    def show_flat_stand_in(self, home: nn.Module, name: str, stand_in: torch.Tensor) -> None:
        """Register this alone, for the whole bucket, as ``name`` on ``home`` until ``drop_stand_ins``."""

        def drop() -> None:
            del home._parameters[name]
            self.use_resting()

        self._drop = drop
        self.unregister()
        home._parameters[name] = stand_in  # type: ignore[assignment]

    @property
    def has_stand_ins(self) -> bool:
        """Whether stand-ins are registered."""
        return self._drop is not None

    def registered(self) -> list[torch.Tensor | None]:
        """What is registered in the (first) place of each parameter of the layout now."""
        first = {slot.index: slot for slot in reversed(self._slots)}
        return [first[index].module._parameters.get(first[index].attribute) for index in range(len(first))]

    def use_resting(self) -> None:
        """The modules show what they do while the unit does not run: shards, or all of it if that was summoned."""
        if self._shown is None:
            self.use_sharded()
        else:
            self._register_shown(self._shown)

    def _register_shown(self, shown: list[nn.Parameter]) -> None:
        raise AssertionError("each mode has its own")

    def _owned_in(self, memo: dict[int, Any]) -> list[OwnedParam]:
        """Where each parameter is registered in the copies that ``memo`` has of the modules; without parameters."""
        owned: list[Any] = [OwnedParam(None, []) for _ in self.handle.layout.params]  # type: ignore[arg-type]
        for slot in self._slots:
            owned[slot.index].places.append(Place(memo[id(slot.module)], slot.attribute, slot.name))
        return owned

    def use_sharded(self) -> None:
        """The modules show what stands for the parameters while they are sharded."""
        for owner, attribute, sharded in self._sharded_writes:
            owner[attribute] = sharded
        for slot in self._careful:
            slot.put(slot.sharded)


def registered_params(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What ``module`` itself has registered, by attribute; what is registered as None is left out."""
    return [(attribute, param) for attribute, param in module._parameters.items() if param is not None]


def register_instead(module: nn.Module, attribute: str, stand_in: torch.Tensor) -> None:
    """Register ``stand_in`` as ``attribute`` of ``module``, in the place of what is there."""
    module._parameters[attribute] = stand_in  # type: ignore[assignment]


def registration_orders(module: nn.Module) -> dict[nn.Module, list[str]]:
    """The names of the parameters registered on each of the unit's modules, in order."""
    return {owner: list(owner._parameters) for _, owner in own_modules(module)}


def _keep_layout() -> None:
    """Takes the place of ``flatten_parameters`` on RNNs."""
