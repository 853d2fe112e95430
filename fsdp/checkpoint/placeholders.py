"""What ``nn.Module`` meets in the places of parameters while it loads a state dict, and what becomes of what it puts
there: for a unit, and for what no unit owns."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp.api import StateDictType
from fsdp.checkpoint.forms import Local, fill_each, form_of, read
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.sharded_tensors import check_no_mesh, is_sharded, kind_of
from fsdp.checkpoint.state_dict import Key, UnitTensors
from fsdp.flat.names import joined
from fsdp.flat.registration import register_instead, registered_params
from fsdp.flat.tensor_parallel import local_of
from fsdp.placement.redistribute import Channels
from fsdp.runtime.unit import Unit

_SAME_VALUES: tuple[Any, ...] = (getattr(torch.Tensor.data, "__get__"), torch.Tensor.detach)  # noqa: B009, mypy


class Recorder(torch.Tensor):
    """Stands for a parameter while a state dict is loaded: ``copy_`` notes its argument as ``source``. Or for a
    ``ShardedTensor`` in the dict, its source: that type warns when ``nn.Module`` asks it for its shape."""

    source: Any
    _is_param: bool

    @staticmethod
    def __new__(
        cls, dtype: torch.dtype, shape: Sequence[int], device: torch.device, *, requires_grad: bool
    ) -> Recorder:
        recorder: Recorder = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        recorder.source = None
        recorder._is_param = True  # an nn.Parameter, as far as nn.Module is concerned
        return recorder

    @staticmethod
    def of(sharded: ShardedTensor) -> Recorder:
        recorder = Recorder(*kind_of(sharded), torch.device("cpu"), requires_grad=False)
        recorder.source = sharded
        return recorder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], Recorder):
            into, source = args[0], args[1]
            if into.shape != source.shape:
                raise RuntimeError(f"a tensor of shape {tuple(source.shape)} for one of shape {tuple(into.shape)}")
            if source is not into:
                into.source = _values(source)
            return into
        if func in _SAME_VALUES:  # what is copied into these counts as well
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} on a parameter, or a ShardedTensor, while a state dict is loaded into a sharded module: only "
            "copy_() of the whole parameter is possible. For more, load inside "
            "FullyShardedDataParallel.summon_full_params"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorder(shape={tuple(self.shape)}, dtype={self.dtype})"


# -- one unit ----------------------------------------------------------------------------------------------------------


class UnitLoading(UnitTensors):
    """What is to be loaded into one unit: ``sources``, by bucket and index."""

    def __init__(self, unit: Unit, opener: nn.Module) -> None:
        """Registers recorders in place of the parameters.

        Raises:
            RuntimeError: it would take flat parameters, and has a device mesh; see also ``UnitTensors``.
        """
        self._is_local = unit.state_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and unit.groups.sharded
        if self._is_local:
            check_no_mesh(unit)
        super().__init__(unit, opener, flat=self._is_local)
        self.sources: dict[Key, torch.Tensor] = {}
        self._recorders: dict[Key, Recorder] = {}
        for key, held in self.held.items():
            device, requires_grad = unit.handles[key[0]].device, self.requires_grad(key)
            self._recorders[key] = Recorder(held.part.dtype, held.part.shape, device, requires_grad=requires_grad)
        self.register(self._recorders)

    def take_sources(self) -> None:
        """Note what was copied or assigned; the parameters are registered again."""
        for key, current in self.registered().items():
            recorder = self._recorders[key]
            source = _values(current) if current is not None and current is not recorder else recorder.source
            if source is not None:  # of what is whole on this rank, the values
                self.sources[key] = source if is_sharded(source) else local_of(source)
        self.restore()

    def given(self) -> Iterator[str]:
        """What this rank was given, in words: equal on all ranks, which then exchange alike."""
        for key, source in self.sources.items():
            kind = "rows of " if isinstance(source, (ShardedTensor, DTensor)) else ""
            place = ""
            if isinstance(source, DTensor):  # the ranks of a shard group have meshes of tensor parallelism of their own
                mesh = source.device_mesh if source.device_mesh.ndim > 1 or self.unit.groups.tp is None else "a mesh"
                place = f" ({source.placements} on {mesh})"
            yield f"{kind}{self.name(key)!r} of {self.unit.name}{place}"

    def problems(self, *, assign: bool) -> Iterator[str]:
        """What cannot be loaded, in words."""
        held, groups = self.held, self.unit.groups
        for key, source in self.sources.items():
            dtype, own = kind_of(source)[0], held[key].part.dtype
            try:
                if assign and dtype != own:
                    raise ValueError(
                        f"assign=True would make it {dtype}, and the parameters it is sharded with are {own}; use "
                        "assign=False"
                    )
                (Local if self._is_local else form_of(source)).read(source, held[key], groups)
            except (AssertionError, ValueError) as error:
                yield f"While copying the parameter named {self.name(key)!r} of {self.unit.name}: {error}."

    def commit(self) -> None:
        """Copy this rank's parts into its shards, by one collective where ranks have been given rows."""
        unit, held, channels = self.unit, self.held, Channels()
        arriving = [(held[key], read(source, held[key], unit.groups)) for key, source in self.sources.items()]
        if any(source.placement is not None for _, source in arriving):
            unit.announce()
        fill_each(arriving, unit, channels, f"gather {unit.name}")
        channels.flush()
        written = {bucket for bucket, _ in self.sources}
        for bucket, views in enumerate(unit.views):
            views.note_writes(range(len(views.handle.layout.params)) if bucket in written else ())


def _values(given: torch.Tensor) -> Any:
    """What was in the state dict, without its history."""
    return given.source if isinstance(given, Recorder) else torch.detach(given)  # which may have no method detach()


# -- the rest of the tree ----------------------------------------------------------------------------------------------


class RestLoading:
    """What no unit owns of some modules: recorders for the parameters, and copies of what is loaded at once, to go back
    to: buffers, extra state, and parameters that others look after (DTensors, modules that load themselves)."""

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        self._names = {module: name for name, module in named.items()}
        modules = list(self._names)
        self.params: list[tuple[nn.Module, str, torch.Tensor, Recorder]] = []
        self._others: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        for module, (attribute, param) in [(m, each) for m in modules for each in registered_params(m)]:
            if isinstance(param, Recorder) or is_lazy(param):
                continue
            if _loads_itself(module, param):
                self._others.append((module, attribute, param, local_of(param.detach()).to("cpu", copy=True)))
            else:
                recorder = Recorder(param.dtype, param.shape, param.device, requires_grad=param.requires_grad)
                for name, value in vars(param).items():  # as in a unit
                    recorder.__dict__.setdefault(name, value)
                self.params.append((module, attribute, param, recorder))
                register_instead(module, attribute, recorder)
        self._buffers = [
            (module, attribute, buffer, buffer.detach().clone())
            for module in modules
            for attribute, buffer in persistent_buffers(module)
        ]
        self.sources: list[torch.Tensor | None] = []
        self._extra_state: list[tuple[nn.Module, Any]] = []  # as it was, of what has been given another
        self._noted = [module for module in modules if _takes_extra_state(module)]
        for module in self._noted:
            module.__dict__["set_extra_state"] = functools.partial(self._set_extra_state, module)

    def _set_extra_state(self, module: nn.Module, state: Any) -> None:
        before = module.get_extra_state()
        try:
            before = copy.deepcopy(before)
        except (NotImplementedError, RuntimeError, TypeError):  # some cannot be copied
            pass
        self._extra_state.append((module, before))
        type(module).set_extra_state(module, state)

    def take_sources(self) -> None:
        registered = {module: dict(registered_params(module)) for module in {module for module, *_ in self.params}}
        found = [registered[module].get(attribute) for module, attribute, *_ in self.params]
        self.sources = [its[-1].source if now is its[-1] else now for its, now in zip(self.params, found)]
        self.restore()

    def restore(self) -> None:
        for module, attribute, param, _ in self.params:
            register_instead(module, attribute, param)
        for module in self._noted:
            module.__dict__.pop("set_extra_state", None)

    def problems(self, *, assign: bool) -> Iterator[str]:
        """What cannot be loaded, in words."""
        for (module, attribute, *_), source in zip(self.params, self.sources):
            if isinstance(source, (ShardedTensor, RaggedTensor, Recorder)) or (not assign and is_sharded(source)):
                given = type(source.source if isinstance(source, Recorder) else source).__name__
                name = joined(self._names[module], attribute)
                yield f"While copying the parameter named {name!r}: no unit shards it, and a {given} was given."

    def commit(self, *, assign: bool) -> None:
        for (module, attribute, param, _), source in zip(self.params, self.sources):
            if source is None:
                continue
            if assign:
                setattr(module, attribute, source)
            else:
                param.copy_(local_of(source))

    def undo(self) -> None:
        """Give back what was loaded at once."""
        for owner, attribute, param, values in self._others:
            register_instead(owner, attribute, param)
            local_of(param.detach()).copy_(values)
        while self._extra_state:
            module, state = self._extra_state.pop()
            try:
                module.set_extra_state(state)
            except Exception as error:  # the module's own
                warnings.warn(
                    f"a state dict was not loaded, but the extra state of {type(module).__name__} has changed: its "
                    f"set_extra_state() refuses what its get_extra_state() had returned before: {error}",
                    stacklevel=2,
                )
        for module, attribute, buffer, values in self._buffers:
            module._buffers[attribute] = buffer.copy_(values) if buffer.shape == values.shape else values


def _loads_itself(module: nn.Module, param: torch.Tensor) -> bool:
    """Whether a recorder in the place of ``param`` would be in somebody's way."""
    method = type(module)._load_from_state_dict
    return isinstance(param, DTensor) or method.__module__.partition(".")[0] != "torch"


def _takes_extra_state(module: nn.Module) -> bool:
    own, base = type(module), nn.Module
    overridden = own.get_extra_state is not base.get_extra_state and own.set_extra_state is not base.set_extra_state
    return overridden and "set_extra_state" not in module.__dict__


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
