"""Values beside tensors in a checkpoint: checks that ``torch.load(weights_only=True)`` accepts them.

A save refuses a value that the default load would refuse, and names the place. NumPy scalars become Python numbers,
because learning rates are NumPy scalars as soon as a schedule uses NumPy.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def without_numpy_scalars(value: Any) -> Any:
    """Copy lists, tuples and dicts in ``value``, and replace each NumPy scalar in them by the equal Python value."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return value
    return tree_map(lambda leaf: leaf.item() if isinstance(leaf, numpy.generic) else leaf, value)


def check_loadable(values: Mapping[str, Any], remedy: str = "") -> None:
    """Check that all of ``values`` can be loaded without running code from the file.

    Args:
        values: values by the words that name each of them in an error.
        remedy: an additional remedy, appended to the error.

    Raises:
        TypeError: a value is refused; the message has the path, the type and a remedy.
    """
    if _is_loadable(dict(values)):
        return
    for name, value in values.items():
        if (found := _first_refused(value, name)) is not None:
            path, refused = found
            advice = _advice(path, refused) + remedy
            raise TypeError(f"{path} is {_type_of(refused)}, which a checkpoint cannot hold safely: {advice}")
    raise TypeError(f"{', '.join(values)} cannot be loaded again with torch.load(weights_only=True)")


def _is_loadable(value: Any) -> bool:
    """Return True if ``torch.load(weights_only=True)`` accepts a saved ``value``. Tensors are not copied."""
    buffer = io.BytesIO()
    try:
        torch.save(tree_map(_without_elements, value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):
        return False
    return True


def _without_elements(value: Any) -> Any:
    return None if type(value) in (torch.Tensor, nn.Parameter) and not value.is_quantized else value


def _first_refused(value: Any, path: str) -> tuple[str, Any] | None:
    """Return the innermost value that is refused, in the order of the values, and the path to it; None without one."""
    if _is_loadable(value):
        return None
    for inner_path, inner in _inner(value, path):
        if (found := _first_refused(inner, inner_path)) is not None:
            return found
    return path, value


def _inner(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"the key {key!r} of {path}", key
            yield f"{path}[{key!r}]", inner
    elif isinstance(value, (list, tuple, collections.deque)):
        for number, inner in enumerate(value):
            yield f"{path}[{number}]", inner
    elif isinstance(value, (set, frozenset)):
        for inner in value:
            yield f"an element of {path}", inner


def _type_of(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


_ADVICE: list[tuple[Callable[[Any], bool], str]] = [
    (lambda value: isinstance(value, enum.Enum), "pass {path}.name"),
    (lambda value: isinstance(value, pathlib.PurePath), "pass str({path})"),
    (lambda value: isinstance(value, slice), "pass its start, stop and step as a tuple"),
    (lambda value: isinstance(value, Mapping), "pass dict({path})"),
    (lambda value: isinstance(value, (range, collections.deque, frozenset, set, list, tuple)), "pass list({path})"),
    (
        lambda value: isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)),
        "pass its name",
    ),
    (lambda value: type(value).__module__ == "numpy" and hasattr(value, "dtype"), "pass torch.as_tensor({path})"),
    (lambda value: dataclasses.is_dataclass(value), "pass dataclasses.asdict({path})"),
    (lambda value: hasattr(value, "__dict__") and bool(vars(value)), "pass vars({path})"),
]


def _advice(path: str, value: Any) -> str:
    found = next((text.format(path=path) for holds, text in _ADVICE if holds(value)), "leave it out")
    return f"{found}, or numbers, strings, lists, dicts and tensors"
