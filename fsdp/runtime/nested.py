"""Tensors inside nested inputs and outputs: find them, or rebuild the nest with each one changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of lists, tuples (named ones too), sets, mappings, dataclasses and other objects.

    A tensor that is missed here would have its backward run on released parameters, so unknown objects are searched.
    """
    if isinstance(value, torch.Tensor):  # most values are one, or a tuple of a few
        yield value
    elif not isinstance(value, _LEAVES):
        yield from _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):  # a PackedSequence is a named tuple
        inside = value
    elif isinstance(value, nn.Module) or callable(value):  # holds tensors of its own, which are no outputs
        return
    else:
        slots = (getattr(value, name, None) for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
        inside = (*getattr(value, "__dict__", {}).values(), *slots)
    seen.add(id(value))
    for item in inside:
        yield from _tensors_in(item, seen)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``change`` applied to each tensor. Containers in which nothing changed are returned as they
    are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data = change(value.data)
        indices = [None if index is None else change(index) for index in (value.sorted_indices, value.unsorted_indices)]
        # the batch sizes stay where they are: on CPU
        return value if data is value.data else PackedSequence(data, value.batch_sizes, *indices)
    if isinstance(value, Mapping):
        items = {key: map_tensors(change, item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if isinstance(value, collections.OrderedDict):
            rebuilt = type(value)()
            rebuilt.update(items)
            return rebuilt
        return items
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        changed = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(changed, value)):
            return value
        if isinstance(value, collections.deque):
            return collections.deque(changed, value.maxlen)
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        after = {name: map_tensors(change, item) for name, item in before.items()}
        if all(after[name] is item for name, item in before.items()):
            return value
        return dataclasses.replace(value, **after)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``. Whoever had them may change them at once: the host waits for a copy of
    page-locked memory, and for one that it will read itself."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device.type != "cpu" and not tensor.is_pinned())

    return map_tensors(move, value)
