"""Model state as it comes back: what ``load_state_dict()`` of a wrapped module does with what it is given.

[Note: All or nothing]
``nn.Module`` walks the modules and copies as it goes; what does not fit it reports at the end. So that nothing is
loaded unless everything fits, on every rank, it meets recorders in place of the parameters. They have the shapes of the
whole parameters, note what is to be copied into them, and hold no memory. When the outermost module is through and all
ranks are content, each rank copies its own part of what was noted into its shard. Where everybody has the whole values
that takes no communication and no unit's memory; rows of torch's sharded tensors are exchanged unit by unit.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp.api import FullStateDictConfig, StateDictType
from fsdp.checkpoint.chunks import Rows
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.state_dict import (
    CHECKPOINTED,
    Wrapper,
    check_at_rest,
    clean_path,
    flat_home,
    flat_name,
    flat_ranges,
    shard_parts,
    unpadded,
    wrappers_in,
)
from fsdp.comm.collectives import broadcast
from fsdp.flat.flat_param import FlatParamHandle, parameter_views
from fsdp.flat.ownership import WRAPPED_MODULE, own_modules
from fsdp.flat.views import BucketViews, register_instead, registered_params
from fsdp.runtime.context import Idle
from fsdp.runtime.unit import Phase, Unit


class Recorder(torch.Tensor):
    """Stands for a parameter while a state dict is loaded: ``copy_`` notes its argument as ``source``."""

    source: torch.Tensor | None
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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], Recorder):
            into, source = args[0], args[1]
            if into.shape != source.shape:
                raise RuntimeError(f"a tensor of shape {tuple(source.shape)} for one of shape {tuple(into.shape)}")
            if source is not into:
                into.source = source.detach()
            return into
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} on a parameter while a state dict is loaded into a sharded module: only copy_() of the whole "
            "parameter is possible. For more, load inside FullyShardedDataParallel.summon_full_params"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorder(shape={tuple(self.shape)}, dtype={self.dtype})"


class Opaque(torch.Tensor):
    """A ``ShardedTensor`` as ``nn.Module`` may look at it: that type warns when it is asked for its shape."""

    sharded: ShardedTensor

    @staticmethod
    def __new__(cls, sharded: ShardedTensor) -> Opaque:
        metadata = sharded.metadata()
        opaque: Opaque = torch.Tensor._make_wrapper_subclass(
            cls, metadata.size, dtype=metadata.tensor_properties.dtype, device=torch.device("cpu")
        )
        opaque.sharded = sharded
        return opaque

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Opaque(args[0].sharded)
        raise RuntimeError(f"{func} on a ShardedTensor that is being loaded")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Opaque(ShardedTensor of shape {tuple(self.shape)})"


# -- one unit ----------------------------------------------------------------------------------------------------------


class UnitLoading:
    """What is to be loaded into one unit. The parameters' parts are in ``parts``, by bucket and index."""

    def __init__(self, wrapper: Wrapper, opener: nn.Module) -> None:
        """Registers recorders in place of the parameters."""
        self.unit = wrapper._fsdp_unit
        self.sources: list[dict[int, torch.Tensor]] = []
        with torch.no_grad():
            self.unit.follow_parameters()
        self.recorders = [self._show(bucket, views) for bucket, views in enumerate(self.unit.views)]

    def _show(self, bucket: int, views: BucketViews) -> list[Recorder]:
        handle = views.handle
        recorders = [
            Recorder(handle.layout.dtype, record.shape, handle.device, requires_grad=leaf.requires_grad)
            for record, leaf in zip(handle.layout.params, handle.leaves)
        ]
        views.show_stand_ins(recorders)
        return recorders

    def parts(self, handle: FlatParamHandle) -> list[RaggedTensor]:
        return shard_parts(handle)

    def names(self, handle: FlatParamHandle) -> list[str]:
        return [record.name for record in handle.layout.params]

    def registered(self, bucket: int) -> list[torch.Tensor | None]:
        return self.unit.views[bucket].registered()

    def hide(self) -> None:
        for views in self.unit.views:
            views.drop_stand_ins()

    def take_sources(self) -> None:
        """Note what was copied or assigned; the parameters are registered again."""
        self.sources = []
        for bucket, recorders in enumerate(self.recorders):
            sources = {}
            for index, (recorder, current) in enumerate(zip(recorders, self.registered(bucket))):
                source = current.detach() if current is not None and current is not recorder else recorder.source
                if source is not None:
                    sources[index] = source.sharded if isinstance(source, Opaque) else source
            self.sources.append(sources)
        self.hide()

    def problems(self, *, assign: bool) -> Iterator[str]:
        """What cannot be loaded, in words."""
        for handle, sources in zip(self.unit.handles, self.sources):
            parts, names = self.parts(handle), self.names(handle)
            for index, source in sources.items():
                problem = self._problem(source, parts[index], handle, assign)
                if problem is not None:
                    yield f"While copying the parameter named {names[index]!r} of {self.unit.name}: {problem}."

    def _problem(self, source: torch.Tensor, part: RaggedTensor, handle: FlatParamHandle, assign: bool) -> str | None:
        dtype = source.metadata().tensor_properties.dtype if isinstance(source, ShardedTensor) else source.dtype
        if assign and dtype != handle.layout.dtype:
            return (
                f"assign=True would make it {dtype}, and the parameters it is sharded with are "
                f"{handle.layout.dtype}; use assign=False"
            )
        if isinstance(source, RaggedTensor):
            if not source.same_interval(part):
                return (
                    f"this rank has its elements {part.start} to {part.end} and was given {source.start} to "
                    f"{source.end}; let torch.distributed.checkpoint load into the state dict of this model instead"
                )
        elif isinstance(source, (ShardedTensor, DTensor)):
            return self._problem_of_rows(source, handle)
        elif source.layout != torch.strided or source.is_meta:
            return f"expected a dense tensor with values, but got {source.layout} on {source.device}"
        return None

    def _problem_of_rows(self, source: torch.Tensor, handle: FlatParamHandle) -> str | None:
        if not handle.groups.sharded:
            return f"a {type(source).__name__}, and the unit is not sharded (NO_SHARD); load whole tensors"
        try:
            Rows(source, handle.groups.shard)
        except AssertionError as error:
            return str(error)
        return None

    def commit(self) -> None:
        """Copy this rank's parts into its shards."""
        for bucket, (handle, sources) in enumerate(zip(self.unit.handles, self.sources)):
            parts = self.parts(handle)
            rows = {}
            for index, source in sources.items():
                if isinstance(source, RaggedTensor):
                    parts[index].local.copy_(source.local)
                elif isinstance(source, (ShardedTensor, DTensor)):
                    rows[index] = Rows(source, handle.groups.shard)
                else:
                    parts[index].fill_from(source)
            if rows:
                self._exchange(bucket, rows, parts)

    def _exchange(self, bucket: int, rows: dict[int, Rows], parts: list[RaggedTensor]) -> None:
        """Gather every rank's ``rows`` and take this rank's ``parts`` of them: one collective."""
        unit, layout, groups = self.unit, self.unit.handles[bucket].layout, self.unit.groups
        lengths = [
            [(end - start) * item.numel_of_row for item in rows.values() for start, end in [item.ranges[rank]]]
            for rank in range(groups.shard_size)
        ]
        longest = max(sum(by_param) for by_param in lengths)
        message = torch.zeros(longest, dtype=layout.dtype, device=unit.device)
        own = message.split([*lengths[groups.shard_rank], longest - sum(lengths[groups.shard_rank])])
        for item, place in zip(rows.values(), own):
            place.copy_(item.local.reshape(-1))
        gathered = torch.empty(groups.shard_size * longest, dtype=layout.dtype, device=unit.device)
        unit.gather_now(bucket, gathered, message)
        messages = gathered.view(groups.shard_size, longest)
        offsets = [0] * groups.shard_size
        for position, (index, item) in enumerate(rows.items()):
            chunks = []
            for rank, offset in enumerate(offsets):
                chunks.append(messages[rank, offset : offset + lengths[rank][position]])
                offsets[rank] += lengths[rank][position]
            parts[index].fill_from(torch.cat(chunks).view(item.shape))


class LocalUnitLoading(UnitLoading):
    """The same with whole flat parameters, of which each rank is given its own part."""

    def __init__(self, wrapper: Wrapper, opener: nn.Module) -> None:
        self._home = flat_home(wrapper, opener)
        super().__init__(wrapper, opener)

    def _show(self, bucket: int, views: BucketViews) -> list[Recorder]:
        handle = views.handle
        requires_grad = handle.flat_param.requires_grad
        recorder = Recorder(handle.layout.dtype, (handle.layout.numel,), handle.device, requires_grad=requires_grad)
        views.show_flat_stand_in(self._home, flat_name(bucket), recorder)
        return [recorder]

    def parts(self, handle: FlatParamHandle) -> list[RaggedTensor]:
        start, local = unpadded(handle)
        return [RaggedTensor(local, (handle.layout.numel,), start)]

    def names(self, handle: FlatParamHandle) -> list[str]:
        return [flat_name(self.unit.handles.index(handle))]

    def registered(self, bucket: int) -> list[torch.Tensor | None]:
        return [dict(registered_params(self._home)).get(flat_name(bucket))]

    def _problem(self, source: torch.Tensor, part: RaggedTensor, handle: FlatParamHandle, assign: bool) -> str | None:
        problem = super()._problem(source, part, handle, assign)
        if problem is None and isinstance(source, ShardedTensor):
            expected = flat_ranges(handle.layout)
            found = Rows(source, handle.groups.shard).ranges
            if [found[rank] for rank, (start, end) in enumerate(expected) if start < end] != [
                (start, end) for start, end in expected if start < end
            ]:
                problem = (
                    f"the ranks have its elements {expected} and were given {found}: a local state dict fits only the "
                    "model it was made from, at the same number of ranks; use a sharded or full one"
                )
        return problem

    def commit(self) -> None:
        for handle, sources in zip(self.unit.handles, self.sources):
            (part,) = self.parts(handle)
            for source in sources.values():
                if not isinstance(source, ShardedTensor):
                    part.fill_from(source)
                elif part.local.numel():
                    part.local.copy_(source.local_shards()[0].tensor)


# -- the rest of the tree ----------------------------------------------------------------------------------------------


class RestLoading:
    """What no unit owns below a module: recorders for the parameters, copies of the buffers to go back to."""

    def __init__(self, opener: nn.Module) -> None:
        modules = list(opener.modules())
        self.params = [
            (
                module,
                attribute,
                param,
                Recorder(param.dtype, param.shape, param.device, requires_grad=param.requires_grad),
            )
            for module in modules
            for attribute, param in registered_params(module)
            if not isinstance(param, Recorder) and not is_lazy(param)
        ]
        for module, attribute, _, recorder in self.params:
            register_instead(module, attribute, recorder)
        self._buffers = [
            (module, attribute, buffer, buffer.detach().clone())
            for module in modules
            for attribute, buffer in persistent_buffers(module)
        ]
        self.sources: list[torch.Tensor | None] = []

    def take_sources(self) -> None:
        self.sources = []
        for module, attribute, _, recorder in self.params:
            current: torch.Tensor | None = dict(registered_params(module)).get(attribute)
            self.sources.append(recorder.source if current is recorder else current)
        self.hide()

    def hide(self) -> None:
        for module, attribute, param, _ in self.params:
            register_instead(module, attribute, param)

    def commit(self, *, assign: bool) -> None:
        for (module, attribute, param, _), source in zip(self.params, self.sources):
            if source is None:
                continue
            if assign:
                setattr(module, attribute, source)
            else:
                param.copy_(source)

    def undo(self) -> None:
        """Give the buffers back what they had."""
        for module, attribute, buffer, values in self._buffers:
            if buffer.shape == values.shape:
                module._buffers[attribute] = buffer.copy_(values)
            else:
                module._buffers[attribute] = values


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


class Mismatch(RuntimeError, AssertionError):
    """A sharded or local state dict does not fit: an error of the one kind in FSDP1, of the other in ``nn.Module``."""


# -- a whole load ------------------------------------------------------------------------------------------------------


class Loading:
    """One call of ``load_state_dict()``, from ``opener``, the outermost module that is a wrapper or in a unit.

    Attributes:
        strict: whether missing and unexpected keys are errors; None if that is for the caller alone to know.
        alone: the other ranks wait for what this one has to load: nothing is agreed on, and nothing is written.
    """

    def __init__(self, opener: nn.Module, strict: bool | None = None, *, assign: bool = False, alone: bool = False):
        self.opener, self.strict, self.assign, self.alone = opener, strict, assign, alone
        self.error_messages: list[str] | None = None
        self.units: list[UnitLoading] = []
        self._hooks: list[LoadingHooks] = []
        self._rest: RestLoading | None = None
        self._shown = False

    def begin(self, wrappers: list[Any]) -> None:
        """Register the recorders.

        Raises:
            RuntimeError: a unit is running.
        """
        for wrapper in wrappers:
            wrapper._join_context()
            check_at_rest(wrapper._fsdp_unit, "load_state_dict()")
            wrapper._fsdp_loading.abandon()
        self._shown = True
        for wrapper in wrappers:
            hooks = wrapper._fsdp_loading
            hooks.active = self
            self._hooks.append(hooks)
            if wrapper._fsdp_unit.phase is Phase.SUMMONED:
                continue  # the whole parameters are there, and nn.Module copies into them
            local = wrapper._state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
            kind = LocalUnitLoading if local and wrapper._fsdp_unit.groups.sharded else UnitLoading
            self.units.append(kind(wrapper, self.opener))
        self._rest = RestLoading(self.opener)

    def close(self) -> None:
        """Register the parameters again; idempotent."""
        if self._shown:
            self._shown = False
            for unit in self.units:
                unit.hide()
            if self._rest is not None:
                self._rest.hide()
                with torch.no_grad():
                    self._rest.undo()
        for hooks in self._hooks:
            hooks.active = None

    def finish(self, missing: list[str], unexpected: list[str]) -> None:
        """``nn.Module`` is through: write what was noted if every rank can; else add to the error messages."""
        messages = self.error_messages
        assert messages is not None and self._rest is not None
        missing[:] = [self.clean(key) for key in missing]
        unexpected[:] = [self.clean(key) for key in unexpected]
        for unit in self.units:
            unit.take_sources()
        self._rest.take_sources()
        self._shown = False
        messages += [problem for unit in self.units for problem in unit.problems(assign=self.assign)]
        messages[:] = [m.replace(f"{WRAPPED_MODULE}.", "").replace(f"{CHECKPOINTED}.", "") for m in messages]
        words = list(messages)
        if self.strict:
            words += [f'Missing key(s) in state_dict: "{key}"' for key in missing]
            words += [f'Unexpected key(s) in state_dict: "{key}"' for key in unexpected]
        elsewhere = None if self.alone else problem_of_others([u.unit for u in self.units], "; ".join(words))
        with torch.inference_mode(False), torch.no_grad():
            if words or elsewhere is not None:
                self._rest.undo()
                if not words:
                    messages.append(f"Nothing was loaded, because on another rank: {elsewhere}")
            elif not self.alone:
                self.write()
        self.close()

    def write(self) -> None:
        assert self._rest is not None
        for unit in self.units:
            unit.commit()
            _forget_gathered(unit.unit)
        self._rest.commit(assign=self.assign)

    def clean(self, key: str) -> str:
        """``key`` without the parts that wrappers between it and the root have added."""
        module: nn.Module | None = self.opener
        parts, kept = key.split("."), []
        for part in parts:
            child = module._modules.get(part) if module is not None else None
            if child is None or part not in (WRAPPED_MODULE, CHECKPOINTED):
                kept.append(part)
            module = child
        return ".".join(kept)


def _forget_gathered(unit: Unit) -> None:
    """What was gathered ahead is out of date."""
    context = unit.context
    if context is not None and context.idle.get(unit) is Idle.AHEAD:
        unit.reshard(context)


def problem_of_others(units: list[Unit], problem: str) -> str | None:
    """A problem that some other rank of a unit's group has, or None; ``problem`` is this rank's own, "" for none."""
    theirs: str | None = None
    asked: set[tuple[int, int]] = set()
    for unit in units:
        groups = unit.groups
        key = (id(groups.shard), id(groups.replica))
        if groups.data_parallel_size == 1 or key in asked:
            continue
        asked.add(key)
        said = share(unit, (problem or theirs or "").encode() or None)
        if said is not None and not problem:
            theirs = said.decode()
    return theirs


def share(unit: Unit, data: bytes | None) -> bytes | None:
    """What the first of the unit's ranks that has something has; None if none has."""
    groups = unit.groups
    size, rank = groups.data_parallel_size, groups.replica_rank * groups.shard_size + groups.shard_rank
    votes = torch.tensor([size - rank if data else 0], device="cpu")
    unit.agree_on_maximum(votes)
    if int(votes) == 0:
        return None
    speaks = data is not None and rank == size - int(votes)
    length = torch.tensor([len(data) if speaks and data is not None else 0], device="cpu")
    unit.agree_on_maximum(length)
    letters = torch.zeros(int(length), dtype=torch.int64, device="cpu")
    if speaks and data is not None:
        letters.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    unit.agree_on_maximum(letters)
    return bytes(letters.tolist())


# -- the hooks ---------------------------------------------------------------------------------------------------------


class LoadingHooks:
    """Lets ``load_state_dict()`` of a wrapped module, of a parent, and of every module in its unit load what
    ``state_dict()`` of the same module gives."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.active: Loading | None = None
        for owner in dict.fromkeys([wrapper, *(owner for _, owner in own_modules(wrapper._fsdp_unit.module))]):
            owner.register_load_state_dict_pre_hook(self._before)
            owner.register_load_state_dict_post_hook(self._after)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadingHooks:
        """Those of the wrapper's copy, which is under way."""
        copied = memo[id(self)] = LoadingHooks.__new__(LoadingHooks)
        wrapper = self._wrapper()
        copied._wrapper, copied.active = weakref.ref(memo.get(id(wrapper), wrapper)), None
        return copied

    def _before(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_messages: list[str],
    ) -> None:
        wrapper = self._wrapper()
        if wrapper is None:
            return
        if self.active is not None and self.active.opener is module and self.active.error_messages is not None:
            self.abandon()  # that one ended in an exception
        if self.active is None:
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            Loading(module, assign=assign).begin(list(dict.fromkeys([wrapper, *wrappers_in(module)])))
        assert self.active is not None
        if self.active.error_messages is None:
            self.active.error_messages = error_messages
            for key, value in state_dict.items():
                if isinstance(value, ShardedTensor):
                    state_dict[key] = Opaque(value)
        if module is wrapper:  # the names that nn.Module goes by have the wrapper's part
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{WRAPPED_MODULE}.{key.removeprefix(prefix)}"] = state_dict.pop(key)

    def abandon(self) -> None:
        """Let go of a load that ended in an exception, if there is one."""
        if self.active is not None:
            self.active.close()

    def _after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.active is not None and self.active.opener is module:
            self.active.finish(incompatible_keys.missing_keys, incompatible_keys.unexpected_keys)


def load(
    wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """``wrapper.load_state_dict(state_dict, strict, assign)``; ``into_module`` is that of ``nn.Module``."""
    units = [inner._fsdp_unit for inner in wrappers_in(wrapper)]
    wrapper._join_context()
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    settings = wrapper._state_dict_settings
    if isinstance(settings.state_dict_config, FullStateDictConfig) and settings.state_dict_config.rank0_only:
        empty = torch.tensor([int(not state_dict)], device="cpu")
        units[0].agree_on_maximum(empty)
        if int(empty):
            return load_from_first(wrapper, into_module, state_dict, strict)
    loading = Loading(wrapper, strict, assign=assign)
    with contextlib.closing(loading):
        loading.begin(wrappers_in(wrapper))
        try:
            return into_module(state_dict, strict, assign)
        except RuntimeError as error:
            if type(error) is RuntimeError and settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
                raise Mismatch(str(error)) from error
            raise


# -- from rank 0 alone -------------------------------------------------------------------------------------------------


def load_from_first(wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load what rank 0 of the units' group has; the others' dicts are not looked at. One scatter per bucket."""
    units: list[Unit] = [inner._fsdp_unit for inner in wrappers_in(wrapper)]
    root = units[0]
    if any(unit.groups != root.groups for unit in units):
        raise RuntimeError(
            "loading a state dict that only rank 0 has needs all units to be sharded over the same group; pass the "
            "dict on every rank"
        )
    first = root.groups.shard_rank == 0 and root.groups.replica_rank == 0
    loading = Loading(wrapper, strict, alone=True)
    plan: Any = None
    if first:
        with contextlib.closing(loading):
            loading.begin(wrappers_in(wrapper))
            plan = _plan(loading, into_module, state_dict, strict)
    said = share(root, pickle.dumps(plan) if first else None)
    assert said is not None
    plan = pickle.loads(said)
    if isinstance(plan, str):
        raise RuntimeError(plan)
    incompatible, present, rest = plan
    with torch.inference_mode(False), torch.no_grad():
        for position, unit in enumerate(units):
            for bucket, indices in enumerate(present[position]):
                sources = loading.units[position].sources[bucket] if first else {}
                _scatter(unit, bucket, indices, sources)
            _forget_gathered(unit)
        if first and loading._rest is not None:
            loading._rest.commit(assign=False)
        tensors = [tensor for name, tensor in rest_of(wrapper) if name in rest]
        for group in (root.groups.shard, root.groups.replica):
            if group is not None:
                broadcast(tensors, group)
    return incompatible


def _plan(
    loading: Loading, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool
) -> str | tuple[Any, list[list[list[int]]], set[str]]:
    """What is to be loaded: the keys that do not fit, the parameters by unit and bucket, and the names of the rest; or
    why it cannot be."""
    try:
        incompatible = into_module(state_dict, strict)
    except RuntimeError as error:
        return str(error)
    extra = [key for key in state_dict if key.endswith("_extra_state")]
    if extra:
        return f"{', '.join(extra)}: extra state cannot be loaded from one rank alone; pass the dict on every rank"
    for unit in loading.units:
        for handle, sources in zip(unit.unit.handles, unit.sources):
            for index, source in sources.items():
                if isinstance(source, (ShardedTensor, DTensor, RaggedTensor)):
                    return f"{unit.names(handle)[index]!r} of {unit.unit.name} is sharded, and only rank 0 has a dict"
    present = [[sorted(sources) for sources in unit.sources] for unit in loading.units]
    return incompatible, present, {name for name, _ in rest_of(loading.opener) if name in state_dict}


def rest_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters below ``module`` that no unit owns, and of its persistent buffers."""
    owned = {
        id(visible.param) for inner in wrappers_in(module) for v in inner._fsdp_unit.views for visible in v.visible
    }
    found: list[tuple[str, torch.Tensor]] = []
    for path, owner in module.named_modules():
        tensors = [*registered_params(owner), *persistent_buffers(owner)]
        named = [(clean_path(f"{path}.{name}" if path else name), tensor) for name, tensor in tensors]
        found += [(name, tensor.detach()) for name, tensor in named if id(tensor) not in owned]
    return found


def _scatter(unit: Unit, bucket: int, indices: list[int], sources: dict[int, torch.Tensor]) -> None:
    """Give every rank its part of the parameters ``indices``, whose values the first rank has in ``sources``."""
    if not indices:
        return
    handle, groups = unit.handles[bucket], unit.groups
    layout = handle.layout
    received = torch.empty(layout.shard_numel, dtype=layout.dtype, device=unit.device)
    if groups.replica_rank == 0:
        full = None
        if groups.shard_rank == 0:
            full = torch.zeros(layout.padded_numel, dtype=layout.dtype, device=unit.device)
            views = parameter_views(layout, full)
            for index, source in sources.items():
                views[index].copy_(source)
        received = unit.scatter_from_first(bucket, full)
    if groups.replica is not None:
        broadcast([received], groups.replica)
    for index in indices:
        piece = layout.piece(index, groups.shard_rank)
        place = slice(piece.shard_offset, piece.shard_offset + piece.numel)
        handle.shard[place].copy_(received[place])
