"""Tensors inside nested inputs and outputs: finding them, and rebuilding the containers with changed tensors."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)
_PLAIN_TYPES = frozenset(_PLAIN)  # looked up first: a container may hold many numbers


def tensors_in(value: Any, *, objects: bool = True) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested lists, tuples (named ones too), sets, mappings, dataclasses and, with
    ``objects``, the attributes of other objects, in order.

    The depth is unlimited, and a container may contain itself. Unknown objects are searched in a unit's output, because
    the backward of a tensor that is missed there would run on released parameters.
    """
    if isinstance(value, torch.Tensor):  # the usual case, next to a tuple of a few tensors
        yield value
        return
    seen: set[int] = set()
    waiting: list[Iterator[Any]] = [iter((value,))]
    while waiting:
        for item in waiting[-1]:
            if type(item) in _PLAIN_TYPES:
                continue
            if isinstance(item, torch.Tensor):
                yield item
            elif not isinstance(item, _PLAIN) and id(item) not in seen:
                seen.add(id(item))
                waiting.append(iter(_inside(item, objects)))
                break
        else:
            waiting.pop()


def _inside(value: Any, objects: bool) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):  # a PackedSequence is a named tuple
        return list(value)
    if isinstance(value, nn.Module) or callable(value):  # the tensors in it are no outputs
        return ()
    if objects:
        slots = (getattr(value, name, None) for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
        return (*getattr(value, "__dict__", {}).values(), *slots)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to each tensor in a list, tuple, set, mapping or dataclass.

    Unchanged containers are the caller's own. Changed ones are shallow copies of the same type, with all
    attributes. Containers that cannot be copied in this way stay as they are, and so do other objects.
    """
    changed: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(value, objects=False):
        if id(tensor) not in changed and (new := change(tensor)) is not tensor:
            changed[id(tensor)] = new
    return _rebuilt(value, changed, {}) if changed else value


def _rebuilt(value: Any, changed: dict[int, torch.Tensor], done: dict[int, Any]) -> Any:
    """Return ``value`` with the tensors of ``changed``, given by id. ``done`` maps the ids of containers to their
    copies, so that a container in two places stays one. A container that contains itself stays as it is there."""
    if isinstance(value, torch.Tensor):
        return changed.get(id(value), value)
    if isinstance(value, (*_PLAIN, nn.Module)):
        return value
    if id(value) not in done:
        done[id(value)] = value
        done[id(value)] = _rebuilt_container(value, lambda item: _rebuilt(item, changed, done))
    return done[id(value)]


def _rebuilt_container(value: Any, rebuild: Callable[[Any], Any]) -> Any:
    if isinstance(value, PackedSequence):
        data, sizes, *indices = value
        if rebuild(data) is data:
            return value
        return PackedSequence(rebuild(data), sizes, *map(rebuild, indices))  # the batch sizes stay on CPU
    if isinstance(value, Mapping):
        items = {key: new for key, item in value.items() if (new := rebuild(item)) is not item}
        return _with(value, items, operator.setitem) if hasattr(value, "__setitem__") else value
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        parts = [rebuild(item) for item in value]
        return value if all(new is old for new, old in zip(parts, value)) else _with_parts(value, parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        attributes = {name: new for name, item in before.items() if (new := rebuild(item)) is not item}
        return _with(value, attributes, object.__setattr__)  # it may be frozen
    return value


def _with(original: Any, changes: dict[Any, Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """Return a copy into which ``changes`` are ``put``. ``dataclasses.replace()`` would leave out attributes that the
    constructor does not take."""
    result = copy.copy(original) if changes else original
    for key, item in changes.items():
        put(result, key, item)
    return result


def _with_parts(container: Any, parts: list[Any]) -> Any:
    kind: Any = type(container)
    if hasattr(kind, "n_sequence_fields"):  # of torch.max(), for example
        return kind(parts)
    if isinstance(container, (tuple, frozenset)):
        result = (tuple if isinstance(container, tuple) else frozenset).__new__(kind, parts)
        getattr(result, "__dict__", {}).update(getattr(container, "__dict__", {}))
        return result
    result = copy.copy(container)  # with all attributes of the type
    result.clear()
    (result.update if isinstance(container, set) else result.extend)(parts)
    return result


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with the tensors on ``device``. The caller may change the originals at once: the host waits for
    copies from page-locked memory, and for copies that it will read itself."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device.type != "cpu" and not tensor.is_pinned())

    return map_tensors(move, value)
