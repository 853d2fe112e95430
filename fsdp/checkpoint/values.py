"""Values next to tensors in a checkpoint, as JSON: options of optimizers, extra state, and a user's ``extra``.

Numbers, strings, None, lists and dicts with string keys are plain JSON. A value of another type is a dict with one
key: the type after a ``$``. Tensors, bytes and long sequences of numbers, such as the order of the data, go to the
file's tensors, and a number refers to them. NumPy scalars
become Python numbers, because a learning rate is one as soon as a schedule uses NumPy. An object of another class is
refused with the path to it, or pickled if the user trusts the files.
"""

from __future__ import annotations

import array
import collections
import contextlib
import io
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

Tensors = list[torch.Tensor]  # those of a value, by number

_LONG = 256  # numbers, from which on a sequence goes to the file's tensors

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[type, str] = {tuple: "$tuple", set: "$set", torch.Size: "$size"}
_MAPPINGS: dict[type, str] = {dict: "$dict", collections.OrderedDict: "$OrderedDict", collections.Counter: "$Counter"}


def pack(value: Any, path: str, remedy: str = "", *, trusted: bool = False) -> tuple[Any, Tensors]:
    """Return ``value`` as something that JSON can hold, and the tensors in it.

    Args:
        path: the name of the value in errors.
        remedy: the end of the error's message.
        trusted: pickle objects of other classes.

    Raises:
        TypeError: the value holds an object of another class; with the path, the type and a remedy.
    """
    tensors: Tensors = []

    def refer(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    def inner(value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list or kind in _SEQUENCES:
            of = "an element of {}" if kind is set else "{}[{}]"
            content: Any
            if (numbers := _numbers(value)) is not None:
                content = {"$numbers": refer(numbers)}
            else:
                content = [inner(each, of.format(path, number)) for number, each in enumerate(value)]
            return content if kind is list else {_SEQUENCES[kind]: content}
        if kind in _MAPPINGS:
            if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
                return {key: inner(each, f"{path}[{key!r}]") for key, each in value.items()}
            pairs = [(inner(k, f"the key {k!r} of {path}"), inner(v, f"{path}[{k!r}]")) for k, v in value.items()]
            return {_MAPPINGS[kind]: pairs}
        if kind in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            return {"$tensor": refer(value.detach())}
        if kind in (bytes, bytearray):
            return {f"${kind.__name__}": refer(_tensor_of(value))}
        if kind is complex:
            return {"$complex": [value.real, value.imag]}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$device": str(value)}
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value.item(), numpy.generic):
            return inner(value.item(), path)
        if trusted:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return {"$pickle": refer(_tensor_of(buffer.getvalue()))}
        raise TypeError(
            f"{path} is of type {torch.typename(kind)}, which a checkpoint cannot hold safely: pass numbers, "
            f"strings, bytes, lists, tuples, sets, dicts or dense tensors in its place{remedy}"
        )

    return inner(value, path), tensors


def _numbers(value: Collection[Any]) -> torch.Tensor | None:
    """Return a long sequence of integers, or of floats, as a tensor, which takes less room than JSON; otherwise
    None."""
    kinds = set(map(type, value)) if len(value) >= _LONG else set()
    with contextlib.suppress(OverflowError):  # integers of more than 64 bits
        if kinds == {int}:
            return torch.frombuffer(array.array("q", value), dtype=torch.int64)
        if kinds == {float}:
            return torch.frombuffer(array.array("d", value), dtype=torch.float64)
    return None


def _tensor_of(content: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[:-1]  # an empty buffer is refused


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        TypeError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


_MAKERS: dict[str, Callable[[Any], Any]] = {  # of a value from the content
    "$tuple": tuple,
    "$set": set,
    "$size": torch.Size,
    "$dict": dict,
    "$OrderedDict": collections.OrderedDict,
    "$Counter": lambda pairs: collections.Counter(dict(pairs)),
    "$complex": lambda parts: complex(*parts),
    "$dtype": torch_dtype,
    "$device": torch.device,
}

_OF_TENSOR: dict[str, Callable[[torch.Tensor], Any]] = {
    "$tensor": lambda tensor: tensor,
    "$numbers": lambda tensor: tensor.tolist(),
    "$bytes": lambda tensor: tensor.numpy().tobytes(),
    "$bytearray": lambda tensor: bytearray(tensor.numpy()),
}


def unpack(value: Any, path: str, tensor: Callable[[int], torch.Tensor], *, trusted: bool) -> Any:
    """Return the value that :func:`pack` was given, from what it returned.

    Args:
        path: the name of the value in errors.
        tensor: reads the tensor of a number, into CPU memory.
        trusted: load pickled objects, which can run any code.

    Raises:
        RuntimeError: there is a pickled object, and the file is not trusted.
        AttributeError, KeyError, IndexError, TypeError, ValueError: :func:`pack` has not written it.
    """

    def inner(value: Any) -> Any:
        return unpack(value, path, tensor, trusted=trusted)

    if isinstance(value, list):
        return [inner(each) for each in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if not name.startswith("$"):
        return {key: inner(each) for key, each in value.items()}
    (content,) = value.values()
    if name in _MAKERS:
        return _MAKERS[name](inner(content))
    if name in _OF_TENSOR:
        return _OF_TENSOR[name](tensor(content))
    if name != "$pickle":
        raise ValueError(f"no value is written as {name!r}")
    if not trusted:
        raise RuntimeError(
            f"{path!r} holds more than tensors and plain values, and loading it could run any code. If you trust "
            "whoever saved it, load it with trusted=True"
        )
    return torch.load(io.BytesIO(tensor(content).numpy().tobytes()), map_location="cpu", weights_only=False)
