"""Loading the model's state: all or nothing, with a dict on every rank or on rank 0 alone.

[Note: All or nothing]
``nn.Module`` walks the modules, copies at once, and reports errors at the end. During the walk targets are registered
in place of the parameters of units; they keep the values (see ``targets.py``). Buffers and unowned parameters are
loaded at once, and a backup restores them if the load fails. After the walk the ranks agree that every value fits on
every rank. Then each rank copies its parts into the shards. Whole values need no communication, and no unit's full
buffer; rows of torch's sharded tensors are exchanged unit by unit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fsdp.checkpoint.forms import Form, Full, Mismatch, is_part
from fsdp.checkpoint.state_dict import Key, StateHooks, check_idle, flat_name, held_tensors, versioned
from fsdp.checkpoint.targets import Target, UnitLoading, mark_parts
from fsdp.checkpoint.transfers import fill_from_first
from fsdp.comm.collectives import broadcast
from fsdp.comm.consensus import NotLoaded, ranks_of
from fsdp.comm.groups import default_group, group_ranks
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.full_copy import undo_swap
from fsdp.flat.names import WRAPPED_MODULE, clean, clean_text, unit_of, wrappers_in
from fsdp.flat.registration import register_instead, registered_params
from fsdp.flat.tensor_parallel import local_of
from fsdp.placement.redistribute import Channels
from fsdp.runtime.build import join
from fsdp.runtime.unit import Phase, Unit, units_of


def load(
    wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """Implement ``load_state_dict`` of a wrapper; ``into_module`` is the method of ``nn.Module``."""
    unit = unit_of(wrapper)
    form = Form.of(unit.state_settings.state_dict_config)
    with join(unit).calling("load_state_dict()"):
        if form.rank0_only:
            empty = torch.tensor([int(isinstance(state_dict, Mapping) and not state_dict)], device="cpu")
            unit.agree_on_maximum(empty)
            if int(empty):
                return load_from_first(wrapper, into_module, state_dict, strict)
        try:
            found = load_alike(wrapper, functools.partial(into_module, assign=assign), state_dict, strict)
            if state_dict and found.missing_keys and len(found.unexpected_keys) == len(state_dict):
                _warn_of_other_names(list(state_dict), found.missing_keys)
            return found
        except RuntimeError as error:
            if type(error) in (RuntimeError, NotLoaded) and not isinstance(form, Full):
                raise Mismatch(str(error)) from error
            raise


def _warn_of_other_names(keys: Sequence[Any], names: Sequence[str]) -> None:
    """Warn that a load with ``strict=False`` has used no key of ``keys``; ``names`` are the model's names."""
    prefixes = {str(key).removesuffix(name) for key in keys for name in names if str(key).endswith(f".{name}")}
    remedy = f": take the prefix {prefixes.pop()!r} away" if len(prefixes) == 1 else ""
    warn_user(
        f"load_state_dict(strict=False) has loaded nothing: none of the {len(keys)} names in the state dict, such as "
        f"{keys[0]!r}, is one of the model's, such as {names[0]!r}{remedy}"
    )


def _reason(model: nn.Module, keys: Sequence[str]) -> str:
    """Return the probable reason why a state dict with these keys lacks names of ``model``."""
    if not keys:
        return (
            f"The state dict is empty on rank {default_group().rank()}. If only rank 0 has it, load inside "
            "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)); "
            "else pass it on every rank"
        )
    if all(key.startswith("module.") for key in keys):
        return (
            'All keys begin with "module.", as those of DistributedDataParallel: take it away by '
            'torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "module.")'
        )
    if any(clean(key) != key for key in keys):
        return (
            "Keys in the state dict have parts that wrappers add to names, as those of named_parameters() have: take "
            "them away, or save state_dict()"
        )
    is_local = any(Form.of(unit.state_settings.state_dict_config).is_flat for unit in units_of(model))
    if not is_local and any(flat_name(0) in key for key in keys):
        return (
            "The state dict has flat parameters, so it is of the type LOCAL_STATE_DICT: load it inside "
            "FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)"
        )
    return ""


def load_alike(model: nn.Module, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load on all ranks that share a unit, or on none.

    Args:
        into_module: ``load_state_dict`` of ``nn.Module`` for ``model``.

    Raises: as :func:`prepare`, and
        NotLoaded: another rank cannot load, or was given different parameters of a unit.
    """
    with contextlib.ExitStack() as undo:

        def attempt() -> Loading:
            try:
                loading = prepare(model, into_module, state_dict, strict)
            except RuntimeError as error:
                if "Missing key" in str(error) and (reason := _reason(model, [*map(str, state_dict)])):
                    raise RuntimeError(f"{error}\n\t{reason}") from error
                raise
            undo.callback(loading.undo)
            return loading

        loading = ranks_of(units_of(model)).together("load a state dict", attempt, Loading.given)
        undo.pop_all()
    loading.write()
    return loading.incompatible


def prepare(model: nn.Module, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool) -> Loading:
    """Do all of ``model.load_state_dict(state_dict, strict)`` that can fail, on this rank alone, without communication.

    Args:
        model: a model that is wrapped, or that contains wrapped modules, or a plain one.
        into_module: ``load_state_dict`` of ``nn.Module`` for ``model``.

    Returns:
        the load, to be completed by ``write()``, which cannot fail, or by ``undo()``.

    Raises: as ``load_state_dict``, with the model unchanged.
    """
    loading = Loading(model, prepared=True)
    try:
        try:
            loading.incompatible = into_module(_with_versions(state_dict, model), strict=strict)
        except RuntimeError as error:
            if type(error) is not RuntimeError or loading.error_messages is not None:
                raise
            raise RuntimeError(clean_text(str(error))) from error
        clean_keys(loading.incompatible)  # the hooks of a model that is no part of a unit have not done so
        if problems := loading.finish():
            raise RuntimeError("; ".join(problems))
    except BaseException:
        loading.abandon()
        raise
    return loading


def _with_versions(state_dict: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """Return ``state_dict`` with its versions of modules, if any, under the names of the modules in ``model``.

    ``_load_from_state_dict`` of a module converts values that an older version has saved.
    """
    saved = getattr(state_dict, "_metadata", None)
    if saved is None:
        return state_dict
    versions = {clean(name): of for name, of in saved.items()}  # of a wrapper and its module, the module's
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return versioned(state_dict, {name: versions[clean(name)] for name in names if clean(name) in versions})


# -- one load ----------------------------------------------------------------------------------------------------------


class Loading:
    """One call of ``load_state_dict()``.

    Parameters of units are replaced by targets, which keep the values until ``write``. Buffers and unowned parameters
    are loaded at once; a backup restores them if the load fails.

    Attributes:
        opener: the outermost module of the walk that is a wrapper or in a unit.
        prepared: :func:`prepare` completes the load; otherwise ``nn.Module.load_state_dict`` was called directly, and
            the hooks complete it.
        assign: parameters that no unit owns become the values of the dict.
        incompatible: the result of ``load_state_dict``.
        error_messages: the list in which ``nn.Module`` collects errors, once the walk has reached ``opener``.
    """

    def __init__(self, opener: nn.Module, *hooks_around: LoadingHooks, prepared: bool) -> None:
        """Register the targets. ``hooks_around`` are those of the unit that ``opener`` is a part of."""
        self.opener, self.prepared, self.assign = opener, prepared, False
        self.incompatible: Any = None
        self.error_messages: list[str] | None = None
        self._units: list[UnitLoading] = []
        self._backup = Backup()
        inside = [wrapper._fsdp_loading for wrapper in wrappers_in(opener)]
        self._hooks = list(dict.fromkeys([*hooks_around, *inside]))  # one for each unit
        for hooks in self._hooks:
            join(hooks.unit)
            check_idle([hooks.unit], "load_state_dict()", Phase.SUMMONED)
            if hooks.active is not None:  # an earlier load has ended in an exception; values may have changed since
                hooks.active.release()
        try:
            for hooks in self._hooks:
                hooks.active = self
                if hooks.unit.phase is not Phase.SUMMONED:  # otherwise nn.Module copies into the whole parameters
                    self._units.append(UnitLoading(hooks.unit, opener))
            self._backup = Backup(opener.modules())
        except BaseException:
            self.abandon()
            raise

    def release(self) -> None:
        """Register the parameters again, without the received values; idempotent."""
        for unit in self._units:
            unit.restore()
        for hooks in self._hooks:
            hooks.active = None

    def abandon(self) -> None:
        """End a load that failed: register the parameters again, and restore the values that were loaded at once."""
        self.release()
        self.undo()

    def finish(self) -> list[str]:
        """Register the parameters again after the walk; return errors of values that were assigned."""
        problems = [clean_text(problem) for unit in self._units for problem in unit.finish(assign=self.assign)]
        self.release()
        return problems

    def complete(self) -> None:
        """Write the values if all ranks can, otherwise restore and add to the error messages of ``nn.Module``."""
        messages = self.error_messages
        assert messages is not None
        messages += self.finish()

        def check() -> Loading:
            if messages:
                raise NotLoaded("; ".join(messages))
            return self

        try:
            with self._backup, join(self._hooks[0].unit).calling("load_state_dict()"):
                ranks = ranks_of([hooks.unit for hooks in self._hooks])
                ranks.together("load a state dict", check, Loading.given)
        except NotLoaded as error:
            if not messages:
                messages.append(str(error))
        else:
            self.write()

    def given(self) -> dict[Any, list[str]]:
        """Describe the received values for each group of their unit, whose ranks must have received the same."""
        return by_group({unit.unit: list(unit.given()) for unit in self._units})

    def values_of(self, unit: Unit) -> dict[Key, Any]:
        """Return the values that the parameters of ``unit`` received."""
        return next((one.values for one in self._units if one.unit is unit), {})

    def write(self) -> None:
        """Write the received values into the shards."""
        with torch.inference_mode(False), torch.no_grad():
            for unit in self._units:
                unit.write()
                unit.unit.shards_were_written()

    def undo(self) -> None:
        """Restore the values that were loaded at once."""
        self._backup.restore()


def clean_keys(incompatible: Any) -> None:
    """Remove the wrappers' parts from the missing and unexpected keys, in place."""
    for keys in incompatible:
        keys[:] = map(clean, keys)


# -- the backup --------------------------------------------------------------------------------------------------------


class Backup:
    """Parameters, persistent buffers and extra state of modules, and the state and groups of optimizers.

    Targets, which stand for the parameters of units, are left out. Copies of values are in CPU memory. Optimizers are
    kept without copies, because ``load_state_dict`` of torch's optimizers makes new tensors. Writes of other optimizers
    into their existing tensors are not undone.

    Used as a context manager it restores the state if the body raises.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()) -> None:
        modules = list(modules)
        self._tensors = [
            (module, attribute, tensor, _copy(tensor), undo_swap(tensor))
            for module in modules
            for attribute, tensor in (*registered_params(module), *persistent_buffers(module))
            if not isinstance(tensor, Target) and not is_lazy(tensor)
        ]
        self._optimizers = [
            (
                one,
                dict(one.__dict__),
                {param: dict(state) if isinstance(state, dict) else state for param, state in one.state.items()},
                [dict(group) for group in one.param_groups],
            )
            for each in optimizers
            for one in getattr(each, "inner_optimizers", [each])
        ]
        self._extra_state = [
            (module, _copied_if_possible(module.get_extra_state())) for module in filter(_has_extra_state, modules)
        ]

    def __enter__(self) -> Backup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.restore()

    def restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for module, state in self._extra_state:
                _restore_extra_state(module, state)
            for module, attribute, tensor, values, swap_back in self._tensors:
                swap_back()
                local = local_of(tensor.detach())
                if values is not None and local.shape == values.shape:
                    local.copy_(values)
                elif values is not None:  # a module has resized it
                    tensor = values.to(local.device)
                if attribute in module._buffers:
                    module._buffers[attribute] = tensor
                else:
                    register_instead(module, attribute, tensor)
        for one, attributes, states, groups in self._optimizers:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            one.state.clear()
            one.state.update(states)
            for group, settings in zip(one.param_groups, groups):
                group.clear()
                group.update(settings)


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Copy this rank's values to the CPU; None for a tensor on the meta device."""
    local: torch.Tensor = local_of(tensor.detach())
    return None if local.is_meta else local.to("cpu", copy=True)


def _has_extra_state(module: nn.Module) -> bool:
    own, base = type(module), nn.Module
    return own.get_extra_state is not base.get_extra_state and own.set_extra_state is not base.set_extra_state


def _copied_if_possible(state: Any) -> Any:
    """Return a copy of an extra state, or the state itself if it refuses to be copied, as one with a lock in it does:
    then a module that changes it in place keeps the change after a failed load."""
    try:
        return copy.deepcopy(state)
    except (NotImplementedError, RuntimeError, TypeError):
        return state


def _restore_extra_state(module: nn.Module, state: Any) -> None:
    try:
        module.set_extra_state(state)
    except Exception as error:  # the module's own
        warnings.warn(
            f"a state dict was not loaded, but the extra state of {type(module).__name__} has changed: its "
            f"set_extra_state() refuses what its get_extra_state() had returned before: {error}",
            stacklevel=3,
        )


def persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List (attribute, buffer) of the buffers that state dicts contain."""
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


# -- agreement ---------------------------------------------------------------------------------------------------------


def by_group(texts: Mapping[Unit, Iterable[str]]) -> dict[Any, list[str]]:
    """Join the texts of the units by group."""
    joined = defaultdict[Any, list[str]](list)
    for unit, of_unit in texts.items():
        for group in (unit.groups.shard, unit.groups.replica, unit.groups.tp):
            joined[group].extend(of_unit)
    return joined


def watched(group: Any, units: Iterable[Unit]) -> Any:
    """Return the group over which the units communicate if it has the ranks of ``group``, otherwise ``group``. Waits in
    the units' groups end when a rank fails."""
    own = dict.fromkeys(each for unit in units for each in (unit.groups.shard, unit.groups.replica) if each is not None)
    return next((each for each in own if group_ranks(each) == group_ranks(group)), group)


# -- the hooks ---------------------------------------------------------------------------------------------------------


class LoadingHooks(StateHooks):
    """Hooks that let ``load_state_dict()`` of a wrapped module, of a parent, and of every module in its unit load a
    dict of ``state_dict()`` of the same module."""

    active: Loading | None

    def register(self, modules: list[nn.Module]) -> None:
        for module in modules:
            module.register_load_state_dict_pre_hook(self._before)
            module.register_load_state_dict_post_hook(self._after)

    def _before(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if self._belongs_to() is None:
            return
        if self.active is not None and self.active.opener is module and self.active.error_messages is not None:
            self.active.release()  # the previous load ended in an exception
        if self.active is None:
            Loading(module, self, prepared=False)
        loading = self.active
        assert loading is not None
        loading.assign = bool(local_metadata.get("assign_to_params_buffers", False))
        if loading.opener is module:
            *_, loading.error_messages = rest
        mark_parts(module, state_dict, prefix, assign=loading.assign)
        if unit_of(module) is not None:  # a wrapper, whose part nn.Module expects in the names
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{WRAPPED_MODULE}.{key.removeprefix(prefix)}"] = state_dict.pop(key)

    def _after(self, module: nn.Module, incompatible_keys: Any) -> None:
        loading = self.active
        if loading is None or loading.opener is not module:
            return
        assert loading.error_messages is not None
        clean_keys(incompatible_keys)
        loading.error_messages[:] = map(clean_text, loading.error_messages)
        if not loading.prepared:
            loading.complete()


# -- from rank 0 alone -------------------------------------------------------------------------------------------------


def load_from_first(model: nn.Module, into_module: Callable[..., Any], state_dict: Any, strict: bool) -> Any:
    """Load the dict of rank 0 of the units' group, or of the default group without units. One collective per unit.

    Only rank 0's dict is read. Rank 0 loads like any rank, except that it scatters the received values
    instead of writing parts.

    Raises, on every rank, before values change: as ``prepare`` does on rank 0.
    """
    units = units_of(model)
    tp = next((unit.groups.tp for unit in units if unit.groups.tp is not None), None)  # plain units have none
    check_idle(units, "loading what only rank 0 has")
    groups = _groups_from_first(model, units, tp)
    loading: Loading | None = None
    with contextlib.ExitStack() as undo:

        def plan() -> Any:
            nonlocal loading
            loading = prepare(model, into_module, state_dict, strict)
            undo.callback(loading.undo)
            if sharded := [key for key, value in state_dict.items() if is_part(value)]:
                raise RuntimeError(f"{', '.join(map(repr, sharded))}: sharded, and only rank 0 has a dict")
            extra = {k: v for k, v in state_dict.items() if k.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX}
            loaded = {*state_dict}.difference(loading.incompatible.unexpected_keys)
            return loading.incompatible, [list(loading.values_of(unit)) for unit in units], loaded, extra

        def load_extra_state() -> None:
            if loading is None and extra:
                undo.callback(prepare(model, into_module, extra, False).undo)

        incompatible, present, loaded, extra = ranks_of(units, groups).first("describe rank 0's state dict", plan)
        ranks_of(units).together("load extra state", load_extra_state)
        undo.pop_all()
    with torch.inference_mode(False), torch.no_grad():
        for keys, unit in zip(present, units):
            _scatter(unit, keys, loading.values_of(unit) if loading is not None else {}, tp)
            unit.shards_were_written()
        owned = {id(visible.param) for unit in units for views in unit.views for visible in views.visible}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tensors = [each.detach() for name, each in named if clean(name) in loaded and id(each) not in owned]
        for group in groups:
            broadcast(tensors, group)
    return incompatible


def _groups_from_first(model: nn.Module, units: list[Unit], tp: Any | None) -> list[Any]:
    """Return the groups over which a value of rank 0 is broadcast, in this order, to reach all ranks."""
    if not units:
        return [default_group()]
    root, *others = (replace(unit.groups, tp=None) for unit in units)
    ranks = root.data_parallel_size * (tp.size() if tp is not None else 1)
    if any(groups != root for groups in others) or (unit_of(model) is None and ranks != default_group().size()):
        raise RuntimeError(
            "loading a state dict that only rank 0 has needs all units to be sharded over the same group, and over all "
            "ranks where the model itself is not wrapped; pass the dict on every rank"
        )
    return [group for group in (root.shard, root.replica, tp) if group is not None and group.size() > 1]


def _scatter(unit: Unit, present: list[Key], values: Mapping[Key, torch.Tensor], tp: Any | None) -> None:
    """Send every rank a part of the parameters ``present``; ``values`` are those of the first rank."""
    held, channels = held_tensors(unit), Channels()
    if unit.groups.replica_rank == 0:
        unit.announce()
    fill_from_first([(held[key], values.get(key)) for key in present], unit, channels, f"scatter {unit.name}", tp=tp)
    channels.flush()
    for bucket, views in enumerate(unit.views):
        views.note_writes([index for other, index in present if other == bucket])
