"""Search for tensors in nested inputs and outputs, and rebuilding of nests; no ranks needed."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from fsdp.runtime.nested import map_tensors, tensors_in, to_device
from fsdp.runtime.precision import cast_floating


class NamedList(list[Any]):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Pair(tuple[Any, ...]):
    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class NamedPair(NamedTuple):
    x: Any
    y: int = 2


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    losses: list[Any] = dataclasses.field(default_factory=list, init=False)
    size: int = 3


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is an ordered dictionary of fields that are not None, like Hugging Face's `ModelOutput`."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not for an output")

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def named(x: Tensor) -> NamedList:
    result = NamedList("mine")
    result.append(x)
    return result


def batch(x: Tensor) -> Batch:
    result = Batch(x)
    result.losses.append("kept")
    return result


KINDS: dict[str, Any] = {
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, None),
    "named tuple": lambda x: NamedPair(x),
    "tuple with a constructor of its own": lambda x: Pair(x, 1),
    "list with a constructor of its own": named,
    "set": lambda x: {x, 1},
    "frozenset": lambda x: frozenset((x, 1)),
    "deque": lambda x: collections.deque([x], maxlen=2),
    "dict": lambda x: {"x": x, "y": "text"},
    "OrderedDict": lambda x: collections.OrderedDict(x=x),
    "defaultdict": lambda x: collections.defaultdict(list, x=x),
    "UserDict": lambda x: collections.UserDict(x=x),
    "output": lambda x: Output(loss=x),
    "dataclass": batch,
    "result of torch.max": lambda x: torch.max(x.reshape(1, -1), dim=1),
    "packed sequence": lambda x: pack_sequence([x]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilt_containers_keep_type_and_attributes(kind: str) -> None:
    original = KINDS[kind](torch.randn(3))
    before = list(tensors_in(original))
    cast = cast_floating(original, torch.bfloat16)
    assert type(cast) is type(original) and cast is not original
    assert [t.dtype for t in tensors_in(cast) if t.is_floating_point()] == [torch.bfloat16]
    assert all(old is now for old, now in zip(before, tensors_in(original), strict=True))
    if kind == "list with a constructor of its own":
        assert cast.name == "mine"
    elif kind == "dataclass":
        assert cast.losses is original.losses and cast.size == 3
    elif kind == "deque":
        assert cast.maxlen == 2
    elif kind == "output":
        assert cast.loss is cast["loss"] and cast.logits is None
    assert cast_floating(cast, torch.bfloat16) is cast  # without a change the caller's own object is returned
    assert to_device(original, torch.device("cpu")) is original


def test_objects_that_cannot_be_rebuilt_are_left_alone() -> None:
    x = torch.randn(2)
    frozen, thing = types.MappingProxyType({"x": x}), types.SimpleNamespace(x=x)
    assert cast_floating(frozen, torch.bfloat16) is frozen
    assert cast_floating(thing, torch.bfloat16) is thing and thing.x is x


def test_shared_containers_stay_shared_and_cycles_end() -> None:
    shared = [torch.randn(2)]
    both = cast_floating({"a": shared, "b": shared, "c": [1]}, torch.bfloat16)
    assert both["a"] is both["b"] and both["a"][0].dtype == torch.bfloat16
    shared.append(shared)
    assert cast_floating(shared, torch.bfloat16)[0].dtype == torch.bfloat16
    assert len(list(tensors_in(shared))) == 1
    calls = []
    x = torch.randn(2)
    map_tensors(lambda tensor: calls.append(tensor) or tensor.double(), [x, (x,)])
    assert len(calls) == 1


def test_deep_nests_and_objects_are_walked_without_recursion() -> None:
    x = torch.randn(2)
    chain = last = types.SimpleNamespace()
    for _ in range(3000):
        last.next = types.SimpleNamespace()
        last = last.next
    last.x = x
    assert [tensor is x for tensor in tensors_in(chain)] == [True]
    assert cast_floating(chain, torch.bfloat16) is chain  # inputs inside of objects are not cast
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep, 1]
    assert cast_floating([deep], torch.bfloat16)[0] is deep
    assert list(tensors_in(deep)) == []


def test_tensors_are_found_in_the_order_of_the_nest() -> None:
    tensors = [torch.full((1,), float(i)) for i in range(5)]
    nest = [tensors[0], {"a": (tensors[1], [tensors[2]])}, types.SimpleNamespace(b=tensors[3], c=[tensors[4]])]
    assert [int(tensor) for tensor in tensors_in(nest)] == [0, 1, 2, 3, 4]
    assert [int(tensor) for tensor in tensors_in(nest, objects=False)] == [0, 1, 2]
