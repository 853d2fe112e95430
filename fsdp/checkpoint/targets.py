"""Placeholders of parameters while a state dict is loaded, and the values that they receive.

[Note: Received values]
``nn.Module`` copies values one by one, before it is known whether all of them fit on all ranks. Values in rows, and
values on rank 0 alone, can only be copied when all ranks take part. So a target keeps a reference to the value that is
copied into it, which takes no memory, and the unit's shards are written at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp.checkpoint.forms import Form, Source, distribution, is_part, read
from fsdp.checkpoint.sharded_tensors import check_no_mesh, kind_of
from fsdp.checkpoint.state_dict import Key, UnitTensors
from fsdp.checkpoint.transfers import fill_each
from fsdp.flat.registration import registered_params
from fsdp.flat.tensor_parallel import local_of
from fsdp.placement.redistribute import Channels
from fsdp.runtime.unit import Unit

_SAME_VALUES: tuple[Any, ...] = (getattr(torch.Tensor.data, "__get__"), torch.Tensor.detach)  # noqa: B009, mypy
# module_load() instead of copy_() under torch.__future__.set_swap_module_params_on_conversion(True)
_LOADS: tuple[Any, ...] = (torch.Tensor.copy_, torch.Tensor.module_load)


class _Shape(torch.Tensor):
    """A tensor with a shape and a dtype, and without elements."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} on a parameter, or a ShardedTensor, while a state dict is loaded into a sharded module: only "
            "copy_() of the whole parameter is possible. For more, load inside "
            "FullyShardedDataParallel.summon_full_params"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class StandIn(_Shape):
    """A stand-in for ``value``, a sharded tensor of a state dict. A target receives the value; a parameter that no unit
    shards refuses it. (``nn.Module`` reads ``shape``, and ``ShardedTensor`` warns that this is deprecated.)"""

    value: Any

    @staticmethod
    def __new__(cls, value: Any) -> StandIn:
        dtype, shape = kind_of(value)
        part: StandIn = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        part.value = value
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOADS and isinstance(args[0], Target):
            return Target.__torch_function__(func, types, args, kwargs)
        if func in (*_LOADS, *_SAME_VALUES):
            value = next(arg for arg in args if isinstance(arg, StandIn)).value
            raise ValueError(f"no unit shards it, and a {type(value).__name__} was given")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Target(_Shape):
    """A placeholder of a parameter; ``copy_`` and ``module_load`` pass the argument to ``receive``."""

    receive: Callable[..., None]
    _is_param: bool

    @staticmethod
    def __new__(cls, param: torch.Tensor, device: torch.device, requires_grad: bool, receive: Any) -> Target:
        target: Target = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=device, requires_grad=requires_grad
        )
        target.receive = receive
        target._is_param = True  # isinstance(target, nn.Parameter)
        return target

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOADS and isinstance(args[0], Target):
            target, source = args[0], args[1]
            if target.shape != source.shape:
                raise RuntimeError(f"a tensor of shape {tuple(source.shape)} for one of shape {tuple(target.shape)}")
            if source is not target:
                target.receive(source, **(kwargs or {}) if func is torch.Tensor.module_load else {})
            if func is torch.Tensor.module_load:  # nn.Module swaps the target and the result
                target = Target(target, target.device, target.requires_grad, target.receive)
            return target
        if func in _SAME_VALUES:  # a copy into these is a copy into the target
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *, assign: bool) -> None:
    """Replace sharded values in ``state_dict`` by stand-ins where a target or a parameter of ``module`` needs that."""
    for key, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            state_dict[key] = StandIn(value)
    for attribute, param in registered_params(module):
        key = prefix + attribute
        value = state_dict.get(key)
        if type(param) is nn.Parameter and isinstance(value, torch.Tensor) and not isinstance(value, StandIn):
            if not is_part(value):
                state_dict[key] = local_of(value)
            elif not (assign and isinstance(value, DTensor)):
                state_dict[key] = StandIn(value)


class UnitLoading(UnitTensors):
    """The load of one unit.

    Attributes:
        values: the received values, by bucket and index.
    """

    def __init__(self, unit: Unit, opener: nn.Module) -> None:
        """Register targets in place of the parameters."""
        self._flat = Form.of(unit.state_settings.state_dict_config).is_flat and unit.groups.sharded
        if self._flat:
            check_no_mesh(unit)
        super().__init__(unit, opener, flat=self._flat)
        self.values: dict[Key, Any] = {}
        self._sources: dict[Key, Source] = {}
        self._held = self.held
        self._targets: dict[Key, Target] = {}
        self._flags: dict[int, list[bool | None]] = {}  # by bucket, where modules freeze or unfreeze as they load
        for key, held in self._held.items():
            device, requires_grad = unit.handles[key[0]].device, self.requires_grad(key)
            self._targets[key] = Target(held.part, device, requires_grad, partial(self._receive, key))
        self.register(self._targets)

    def restore(self) -> None:
        super().restore()
        self._targets.clear()  # they refer to this object, which would keep the values until garbage is collected

    def _receive(self, key: Key, value: Any, *, assign: bool = False) -> None:
        if assign and value.dtype != (own := self._held[key].part.dtype):
            raise ValueError(
                f"assign=True would make it {value.dtype}, and the parameters it is sharded with are {own}; use "
                "assign=False"
            )
        value = value.value if isinstance(value, StandIn) else torch.detach(value)
        self._sources[key] = read(value, self._held[key], self.unit.groups, flat=self._flat)
        self.values[key] = value

    def finish(self, *, assign: bool) -> Iterator[str]:
        """Register the parameters again. Values that were registered in place of targets are received as well.

        Yields:
            errors of such values. With ``assign`` they must have the dtype of the parameter.
        """
        registered = self.registered()
        for bucket in range(0 if self._flat else len(self.unit.views)):
            keys = [key for key in registered if key[0] == bucket]
            flags = [None if tensor is None else tensor.requires_grad for tensor in map(registered.get, keys)]
            if any(flag not in (None, self.requires_grad(key)) for key, flag in zip(keys, flags)):
                self._flags[bucket] = flags
        for key, current in registered.items():
            if current is None or current is self._targets[key]:
                continue
            try:
                self._receive(key, current, assign=assign)
            except (AssertionError, ValueError) as error:
                yield f"While copying the parameter named {self.name(key)!r} of {self.unit.name}: {error}."
        self.restore()

    def given(self) -> Iterator[str]:
        """Describe the received values, as text that must be equal on all ranks that exchange them."""
        for key, value in self.values.items():
            yield f"{self.name(key)!r} of {self.unit.name}{distribution(value, self.unit.groups)}"

    def write(self) -> None:
        """Copy this rank's parts into the shards; values in rows travel in one collective."""
        unit, channels = self.unit, Channels()
        for bucket, flags in self._flags.items():
            unit.views[bucket].take_flags(flags)
        if any(source.placement is not None for source in self._sources.values()):
            unit.announce()
        arriving = [(self._held[key], source) for key, source in self._sources.items()]
        fill_each(arriving, unit, channels, f"gather {unit.name}")
        channels.flush()
        written = {bucket for bucket, _ in self.values}
        for bucket, views in enumerate(unit.views):
            views.note_writes(range(len(views.handle.layout.params)) if bucket in written else ())
