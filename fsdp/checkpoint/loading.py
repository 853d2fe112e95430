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
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp.api import StateDictType
from fsdp.checkpoint.forms import Held, fill, is_sharded, kind_of, read
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.recorders import Opaque, Recorder
from fsdp.checkpoint.redistribute import Channel
from fsdp.checkpoint.state_dict import check_at_rest, copied_ref, flat_home, flat_name, held_flat, held_params
from fsdp.comm.consensus import failures_in
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.names import CHECKPOINTED_MODULE, WRAPPED_MODULE, clean_text, own_modules, unit_of, wrappers_in
from fsdp.flat.registration import register_instead, registered_params
from fsdp.flat.views import BucketViews
from fsdp.runtime.build import join
from fsdp.runtime.unit import Phase, Unit

# -- one unit ----------------------------------------------------------------------------------------------------------


class UnitLoading:
    """What is to be loaded into one unit. The parameters' parts are in ``parts``, by bucket and index."""

    def __init__(self, unit: Unit, opener: nn.Module) -> None:
        """Registers recorders in place of the parameters."""
        self.unit = unit
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

    def held(self, handle: FlatParamHandle) -> list[Held]:
        return held_params(handle)

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
                source = torch.detach(current) if current is not None and current is not recorder else recorder.source
                if source is not None:
                    sources[index] = _as_given(source)
            self.sources.append(sources)
        self.hide()

    def given(self) -> Iterator[str]:
        """What this rank was given, in words: equal on all ranks, which then exchange alike."""
        for handle, sources in zip(self.unit.handles, self.sources):
            names = self.names(handle)
            for index, source in sources.items():
                kind = "rows of " if isinstance(source, (ShardedTensor, DTensor)) else ""
                yield f"{kind}{names[index]!r} of {self.unit.name}"

    def problems(self, *, assign: bool) -> Iterator[str]:
        """What cannot be loaded, in words."""
        for handle, sources in zip(self.unit.handles, self.sources):
            held, names = self.held(handle), self.names(handle)
            for index, source in sources.items():
                problem = self._problem(source, held[index], handle, assign)
                if problem is not None:
                    yield f"While copying the parameter named {names[index]!r} of {self.unit.name}: {problem}."

    def _problem(self, source: torch.Tensor, held: Held, handle: FlatParamHandle, assign: bool) -> str | None:
        dtype, part = kind_of(source)[0], held.part
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
            read(source, handle.groups.shard)
        except AssertionError as error:
            return str(error)
        return None

    def commit(self) -> None:
        """Copy this rank's parts into its shards, by one collective where ranks have been given rows."""
        unit, groups = self.unit, self.unit.groups
        channel = Channel(groups.shard, groups.shard_rank, groups.shard_size, unit.device)
        arriving = []
        for handle, sources in zip(unit.handles, self.sources):
            held = self.held(handle)
            arriving += [(held[index], read(source, groups.shard)) for index, source in sources.items()]
        exchanged = any(source.placement is not None for _, source in arriving)
        fill(arriving, channel, f"gather {unit.name}", watch=unit.watch_call() if exchanged else None)
        channel.flush()
        for views, sources in zip(unit.views, self.sources):
            views.note_writes(range(len(views.handle.layout.params)) if sources else ())


def _as_given(source: torch.Tensor) -> torch.Tensor:
    """What stood in the state dict; of what is whole on this rank, the values."""
    if isinstance(source, Opaque):
        return source.sharded
    return source.to_local().detach() if isinstance(source, DTensor) and not is_sharded(source) else source


class LocalUnitLoading(UnitLoading):
    """The same with whole flat parameters, of which each rank is given its own part."""

    def __init__(self, unit: Unit, opener: nn.Module) -> None:
        self._home = flat_home(unit, opener)
        super().__init__(unit, opener)

    def _show(self, bucket: int, views: BucketViews) -> list[Recorder]:
        handle = views.handle
        requires_grad = handle.flat_param.requires_grad
        recorder = Recorder(handle.layout.dtype, (handle.layout.numel,), handle.device, requires_grad=requires_grad)
        views.show_flat_stand_in(self._home, flat_name(bucket), recorder)
        return [recorder]

    def held(self, handle: FlatParamHandle) -> list[Held]:
        return [held_flat(handle)]

    def names(self, handle: FlatParamHandle) -> list[str]:
        return [flat_name(self.unit.handles.index(handle))]

    def registered(self, bucket: int) -> list[torch.Tensor | None]:
        return [dict(registered_params(self._home)).get(flat_name(bucket))]

    def _problem(self, source: torch.Tensor, held: Held, handle: FlatParamHandle, assign: bool) -> str | None:
        problem = super()._problem(source, held, handle, assign)
        if problem is None and isinstance(source, ShardedTensor):
            expected, found = held.placement(handle.groups.shard_size), read(source, handle.groups.shard).placement
            if found != expected:
                problem = (
                    f"of its elements {expected}, but in what was given {found}: a local state dict fits only the "
                    "model it was made from, at the same number of ranks; use a sharded or full one"
                )
        return problem


# -- the rest of the tree ----------------------------------------------------------------------------------------------


class RestLoading:
    """What no unit owns below a module: recorders for the parameters, and copies of what is loaded at once, to go back
    to: buffers, extra state, and parameters that others look after (DTensors, modules that load themselves)."""

    def __init__(self, opener: nn.Module) -> None:
        modules = list(opener.modules())
        own = [
            (module, attribute, param)
            for module in modules
            for attribute, param in registered_params(module)
            if not isinstance(param, Recorder) and not is_lazy(param)
        ]
        self._others = [
            (module, attribute, param, _local_part(param).to("cpu", copy=True))
            for module, attribute, param in own
            if _loads_itself(module, param)
        ]
        self.params = [
            (
                module,
                attribute,
                param,
                Recorder(param.dtype, param.shape, param.device, requires_grad=param.requires_grad),
            )
            for module, attribute, param in own
            if not _loads_itself(module, param)
        ]
        for module, attribute, _, recorder in self.params:
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
        self.sources = []
        for module, attribute, _, recorder in self.params:
            current: torch.Tensor | None = dict(registered_params(module)).get(attribute)
            self.sources.append(recorder.source if current is recorder else current)
        self.hide()

    def hide(self) -> None:
        for module, attribute, param, _ in self.params:
            register_instead(module, attribute, param)
        for module in self._noted:
            module.__dict__.pop("set_extra_state", None)

    def commit(self, *, assign: bool) -> None:
        for (module, attribute, param, _), source in zip(self.params, self.sources):
            if source is None:
                continue
            if assign:
                setattr(module, attribute, source)
            else:
                param.copy_(source)

    def undo(self) -> None:
        """Give back what was loaded at once."""
        for owner, attribute, param, values in self._others:
            register_instead(owner, attribute, param)
            _local_part(param).copy_(values)
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
            if buffer.shape == values.shape:
                module._buffers[attribute] = buffer.copy_(values)
            else:
                module._buffers[attribute] = values


def _local_part(param: torch.Tensor) -> torch.Tensor:
    return param.to_local().detach() if isinstance(param, DTensor) else param.detach()


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


# -- a whole load ------------------------------------------------------------------------------------------------------


class Loading:
    """One call of ``load_state_dict()``, from ``opener``, the outermost module that is a wrapper or in a unit.

    Attributes:
        strict: whether missing and unexpected keys are errors; None if that is for the caller alone to know.
        alone: the other ranks wait for what this one has to load: nothing is agreed on, and nothing is written.
        incompatible: what ``load_state_dict`` returns, once it is through.
    """

    incompatible: Any = None

    def __init__(self, opener: nn.Module, strict: bool | None = None, *, assign: bool = False, alone: bool = False):
        self.opener, self.strict, self.assign, self.alone = opener, strict, assign, alone
        self.error_messages: list[str] | None = None
        self.prefix = ""  # of the opener, in the names that nn.Module goes by
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
            join(unit_of(wrapper))
            check_at_rest(unit_of(wrapper), "load_state_dict()")
            wrapper._fsdp_loading.abandon()
        self._shown = True
        try:
            for wrapper in wrappers:
                wrapper._fsdp_loading.active = self
                self._hooks.append(wrapper._fsdp_loading)
                unit: Unit = unit_of(wrapper)
                if unit.phase is Phase.SUMMONED:
                    continue  # the whole parameters are there, and nn.Module copies into them
                local = unit.state_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
                kind = LocalUnitLoading if local and unit.groups.sharded else UnitLoading
                self.units.append(kind(unit, self.opener))
            self._rest = RestLoading(self.opener)
        except BaseException:
            self.close()
            raise

    def hears_of(self, module: nn.Module) -> bool:
        """Whether ``module`` is a part of a unit that is loaded, so that its own hooks begin and finish the load."""
        return any(hooks.belongs_to(module) for hooks in self._hooks)

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
        messages[:] = map(clean_text, messages)
        words = list(messages)
        if self.strict:
            words += [f'Missing key(s) in state_dict: "{key}"' for key in missing]
            words += [f'Unexpected key(s) in state_dict: "{key}"' for key in unexpected]
        elsewhere = None if self.alone else self._problem_elsewhere(RuntimeError("; ".join(words)) if words else None)
        if words or elsewhere is not None:
            self.undo()
            if not words:
                messages.append(f"Nothing was loaded, because on another rank: {elsewhere}")
        elif not self.alone:
            self.write()
        self.close()

    def _problem_elsewhere(self, error: BaseException | None) -> str | None:
        """A parameter of which one rank would load its part and another would not is a problem as well."""
        given = {unit.unit: list(unit.given()) for unit in self.units}
        return problem_elsewhere([hooks.unit for hooks in self._hooks], error, given)

    def write(self) -> None:
        """Write what was noted."""
        assert self._rest is not None
        with torch.inference_mode(False), torch.no_grad():
            for unit in self.units:
                unit.commit()
                unit.unit.shards_were_written()
            self._rest.commit(assign=self.assign)

    def undo(self) -> None:
        """Take back what was loaded without being noted: buffers and extra state."""
        assert self._rest is not None
        with torch.inference_mode(False), torch.no_grad():
            self._rest.undo()

    def clean(self, key: str) -> str:
        """``key`` without the parts that wrappers between it and the root have added."""
        if not key.startswith(self.prefix):
            return key
        module: nn.Module | None = self.opener
        kept = []
        for part in key.removeprefix(self.prefix).split("."):
            child = module._modules.get(part) if module is not None else None
            if child is None or part not in (WRAPPED_MODULE, CHECKPOINTED_MODULE):
                kept.append(part)
            module = child
        return self.prefix + ".".join(kept)


def problem_elsewhere(
    units: Iterable[Unit], error: BaseException | None, given: Mapping[Unit, Iterable[str]]
) -> str | None:
    """What is wrong on some other rank of the units' groups, or None. All of their ranks have to call.

    Args:
        error: what is wrong here.
        given: names what this rank was given for each unit, which has to be the same on all ranks.
    """
    alike: dict[Any, list[str]] = {}
    for unit in units:
        unit.watch_call()
        for group in (unit.groups.shard, unit.groups.replica):
            alike.setdefault(group, []).extend(given.get(unit, ()))
    device = next((unit.device for unit in units), torch.device("cpu"))
    failures = failures_in(list(alike), error, "load a state dict", device, alike)
    return next((failure.text for failure in failures.values()), None)


@contextlib.contextmanager
def alike_on_all_ranks(units: Collection[Unit]) -> Iterator[dict[Unit, list[str]]]:
    """What raises inside on one rank of the units' groups raises on all. So does what differs between them in the dict
    that is yielded: what each was given for each unit, in words."""
    given: dict[Unit, list[str]] = {}
    for unit in units:  # one that no other rank comes to raises here, and asks nobody
        unit.watch_call()
    try:
        yield given
    except BaseException as error:
        if units:
            problem_elsewhere(units, error, given)
        raise
    problem = problem_elsewhere(units, None, given) if units else None
    if problem is not None:
        raise RuntimeError(f"Nothing was loaded, because on another rank: {problem}")


# -- the hooks ---------------------------------------------------------------------------------------------------------


class LoadingHooks:
    """Lets ``load_state_dict()`` of a wrapped module, of a parent, and of every module in its unit load what
    ``state_dict()`` of the same module gives."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper: Callable[[], Any] = weakref.ref(wrapper)
        self.active: Loading | None = None
        for owner in dict.fromkeys([wrapper, *(owner for _, owner in own_modules(unit_of(wrapper).module))]):
            owner.register_load_state_dict_pre_hook(self._before)
            owner.register_load_state_dict_post_hook(self._after)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadingHooks:
        """Those of the wrapper's copy, which is under way; of a module that is copied alone, none."""
        copied = memo[id(self)] = LoadingHooks.__new__(LoadingHooks)
        copied._wrapper, copied.active = copied_ref(self._wrapper(), memo), None
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
            self.active.error_messages, self.active.prefix = error_messages, prefix
        for key, value in state_dict.items():
            if isinstance(value, ShardedTensor):
                state_dict[key] = Opaque(value)
        if module is wrapper:  # the names that nn.Module goes by have the wrapper's part
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{WRAPPED_MODULE}.{key.removeprefix(prefix)}"] = state_dict.pop(key)

    def belongs_to(self, module: nn.Module) -> bool:
        return module is self._wrapper() or any(module is owner for _, owner in own_modules(self.unit.module))

    @property
    def unit(self) -> Unit:
        wrapper = self._wrapper()
        assert wrapper is not None  # it is being loaded
        unit: Unit = unit_of(wrapper)
        return unit

    def abandon(self) -> None:
        """Let go of a load that ended in an exception, if there is one."""
        if self.active is not None:
            self.active.close()

    def _after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.active is not None and self.active.opener is module:
            self.active.finish(incompatible_keys.missing_keys, incompatible_keys.unexpected_keys)
