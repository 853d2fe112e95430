"""Tensors inside nested inputs and outputs: find them, or rebuild the nest with each one changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of lists, tuples (named ones too), sets, mappings, dataclasses and packed sequences."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):  # a PackedSequence is a named tuple
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


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
    if isinstance(value, (list, tuple, set, frozenset)):
        changed = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(changed, value)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        after = {name: map_tensors(change, item) for name, item in before.items()}
        if all(after[name] is item for name, item in before.items()):
            return value
        return dataclasses.replace(value, **after)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``; copies do not block the host where memory allows it."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return map_tensors(move, value)
