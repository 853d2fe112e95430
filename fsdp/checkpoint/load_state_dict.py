"""``load_state_dict()`` of a wrapped module: all or nothing, with a dict on every rank or with one on rank 0 alone.

[Note: All or nothing]
``nn.Module`` walks the modules and copies as it goes; what does not fit it reports at the end. So that nothing is
loaded unless everything fits, on every rank, it meets recorders in place of the parameters. They have the shapes of the
whole parameters, note what is to be copied into them, and hold no memory. When the outermost module is through and all
ranks are content, each rank copies its own part of what was noted into its shard. Where everybody has the whole values
that takes no communication and no unit's memory; rows of torch's sharded tensors are exchanged unit by unit.

Where rank 0 alone has a dict, it loads like any rank but writes nothing; it tells the others what it found, and then
hands out the values, a unit at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp.api import FullStateDictConfig, StateDictType
from fsdp.checkpoint.forms import fill_from_first
from fsdp.checkpoint.placeholders import Recorder, RestLoading, UnitLoading, persistent_buffers
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.state_dict import Key, StateHooks, check_idle, held_tensors
from fsdp.comm.collectives import broadcast
from fsdp.comm.consensus import Failure, broadcast_object, failures_in
from fsdp.comm.groups import default_group, group_ranks
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.names import (
    CHECKPOINTED_MODULE,
    WRAPPED_MODULE,
    clean,
    clean_text,
    joined,
    unit_of,
    wrappers_in,
)
from fsdp.flat.registration import registered_params
from fsdp.placement.redistribute import Channels
from fsdp.runtime.build import join
from fsdp.runtime.unit import Phase, Unit, units_of

_T = TypeVar("_T")


class Mismatch(RuntimeError, AssertionError):
    """A sharded or local state dict does not fit: an error of the one kind in FSDP1, of the other in ``nn.Module``."""


def load(
    wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """``wrapper.load_state_dict(state_dict, strict, assign)``; ``into_module`` is that of ``nn.Module``."""
    unit = unit_of(wrapper)
    settings = unit.state_settings
    with join(unit).calling("load_state_dict()"):
        if isinstance(settings.state_dict_config, FullStateDictConfig) and settings.state_dict_config.rank0_only:
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
            if "Missing key" in str(error) and state_dict and all(str(key).startswith("module.") for key in state_dict):
                error.args = (
                    f'{error}\n\tAll keys begin with "module.", as those of DistributedDataParallel: take it away by '
                    'torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "module.")',
                )
            elif "Missing key" in str(error) and any(_is_flat(key) for key in state_dict):
                error.args = (
                    f"{error}\n\tThe state dict has flat parameters, so it is of the type LOCAL_STATE_DICT: load it "
                    "inside FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)",
                )
            if type(error) is RuntimeError and settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
                raise Mismatch(str(error)) from error
            raise


def _is_flat(key: Any) -> bool:
    return str(key).rpartition(".")[2].startswith("_flat_param")


def _warn_of_other_names(keys: Sequence[Any], names: Sequence[str]) -> None:
    """Warn that a load with ``strict=False`` has used none of ``keys``, where the model has ``names``."""
    prefixes = {str(key).removesuffix(name) for key in keys for name in names if str(key).endswith(f".{name}")}
    remedy = f": take the prefix {prefixes.pop()!r} away" if len(prefixes) == 1 else ""
    warn_user(
        f"load_state_dict(strict=False) has loaded nothing: none of the {len(keys)} names in the state dict, such as "
        f"{keys[0]!r}, is one of the model's, such as {names[0]!r}{remedy}"
    )


def load_alike(model: nn.Module, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool) -> Any:
    """``model.load_state_dict(state_dict, strict)`` on all ranks that share a unit, or on none. ``into_module`` is
    that of ``nn.Module``."""
    with alike_on_all_ranks(units_of(model)) as (given, undo):
        try:
            loading = prepare(model, into_module, state_dict, strict)
        except RuntimeError as error:
            if state_dict or "Missing key" not in str(error):
                raise
            raise RuntimeError(
                f"The state dict is empty on rank {default_group().rank()}. If only rank 0 has it, load inside "
                "FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)); "
                f"else pass it on every rank. {error}"
            ) from error
        undo.callback(loading.undo)
        given.update(loading.given())
    loading.write()
    return loading.incompatible


def prepare(model: nn.Module, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool) -> Loading:
    """All of ``model.load_state_dict(state_dict, strict)`` that can fail, for a model that is wrapped or contains what
    is; ``into_module`` is that of ``nn.Module``. This rank alone, without communication.

    Returns:
        what then has to ``write()``, which changes parameters and cannot fail, or to ``undo()``.

    Raises: as ``load_state_dict``, with the model as it was.
    """
    loading = Loading(model, _hooks_in(model), alone=True)
    try:
        try:
            found = loading.incompatible = into_module(state_dict, strict=strict)
        except RuntimeError as error:
            if type(error) is not RuntimeError or loading.error_messages is not None:
                raise
            lines = [line if "Unexpected key(s)" in line else clean_text(line) for line in str(error).split("\n")]
            raise RuntimeError("\n".join(lines)) from error
        if loading.error_messages is None:  # the model is not a part of a unit, and has none of our hooks
            loading.error_messages = []
            loading.finish(found.missing_keys, found.unexpected_keys)
            if loading.error_messages:
                raise RuntimeError("; ".join(loading.error_messages))
    except BaseException:
        loading.abandon()
        raise
    return loading


# -- a whole load ------------------------------------------------------------------------------------------------------


class Loading:
    """One call of ``load_state_dict()``, from ``opener``, the outermost module that is a wrapper or in a unit.

    Attributes:
        assign: parameters that no unit owns become what the dict has for them.
        alone: the other ranks wait for what this one has to load: nothing is agreed on, and nothing is written.
        incompatible: what ``load_state_dict`` returns, once it is through.
    """

    assign = False
    incompatible: Any = None

    def __init__(self, opener: nn.Module, hooks_of_units: list[LoadingHooks], *, alone: bool) -> None:
        """Registers the recorders.

        Raises:
            RuntimeError: a unit is running.
        """
        self.opener, self.alone = opener, alone
        self.error_messages: list[str] | None = None  # those of nn.Module, once it has come to the opener
        self.prefix = ""  # of the opener, in the names that nn.Module goes by
        self.units: list[UnitLoading] = []
        self.rest = RestLoading({})
        self._hooks = list(dict.fromkeys(hooks_of_units))  # one for each unit
        for hooks in self._hooks:
            join(hooks.unit)
            check_idle([hooks.unit], "load_state_dict()", Phase.SUMMONED)
            hooks.abandon()
        try:
            for hooks in self._hooks:
                hooks.active = self
                if hooks.unit.phase is not Phase.SUMMONED:  # else nn.Module copies into the whole parameters
                    self.units.append(UnitLoading(hooks.unit, opener))
            self.rest = RestLoading(dict(opener.named_modules()))
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Register the parameters again, with nothing loaded; idempotent."""
        for unit in self.units:
            unit.restore()
        self.rest.restore()
        self.undo()
        for hooks in self._hooks:
            hooks.active = None

    def finish(self, missing: list[str], unexpected: list[str]) -> None:
        """``nn.Module`` is through: register the parameters again, and write what was noted if every rank can; else add
        to the error messages."""
        messages = self.error_messages
        assert messages is not None
        missing[:] = [self.clean(key) for key in missing]
        unexpected[:] = [self.clean(key) for key in unexpected]
        for unit in self.units:
            unit.take_sources()
        self.rest.take_sources()
        for hooks in self._hooks:
            hooks.active = None
        messages += [problem for unit in self.units for problem in unit.problems(assign=self.assign)]
        messages += self.rest.problems(assign=self.assign)
        messages[:] = map(clean_text, messages)
        if self.alone:
            return
        error = RuntimeError("; ".join(messages)) if messages else None
        elsewhere = problem_elsewhere([hooks.unit for hooks in self._hooks], error, self.given())
        if messages or elsewhere is not None:
            self.undo()
            if not messages:
                messages.append(f"Nothing was loaded, because on another rank: {elsewhere}")
        else:
            self.write()

    def given(self) -> dict[Unit, list[str]]:
        """A parameter of which one rank would load its part and another would not is a problem as well."""
        return {unit.unit: list(unit.given()) for unit in self.units}

    def write(self) -> None:
        """Write what was noted."""
        with torch.inference_mode(False), torch.no_grad():
            for unit in self.units:
                unit.commit()
                unit.unit.shards_were_written()
            self.rest.commit(assign=self.assign)

    def undo(self) -> None:
        """Take back what was loaded without being noted: buffers and extra state."""
        with torch.inference_mode(False), torch.no_grad():
            self.rest.undo()

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
        unit.announce()
        for group in (unit.groups.shard, unit.groups.replica, unit.groups.tp):
            alike.setdefault(group, []).extend(given.get(unit, ()))
    device = next((unit.device for unit in units), torch.device("cpu"))
    failures = failures_in(list(alike), error, "load a state dict", device, alike)
    return next((failure.text for failure in failures.values()), None)


@contextlib.contextmanager
def alike_on_all_ranks(units: Collection[Unit]) -> Iterator[tuple[dict[Unit, list[str]], contextlib.ExitStack]]:
    """What raises inside on one rank of the units' groups raises on all, after the callbacks of the stack that is
    yielded. So does what differs between ranks in the dict: what each was given for each unit, in words."""
    given: dict[Unit, list[str]] = {}
    for unit in units:  # one that no other rank comes to raises here, and asks nobody
        unit.announce()
    with contextlib.ExitStack() as undo:
        try:
            yield given, undo
        except BaseException as error:
            problem_elsewhere(units, error, given)
            raise
        problem = problem_elsewhere(units, None, given)
        if problem is not None:
            raise RuntimeError(f"Nothing was loaded, because on another rank: {problem}")
        undo.pop_all()


def watched(group: Any, units: Iterable[Unit]) -> Any:
    """The group over which the units communicate, if it has the ranks of ``group``: what its ranks wait for is watched,
    so that one which gives up holds nobody."""
    own = dict.fromkeys(each for unit in units for each in (unit.groups.shard, unit.groups.replica) if each is not None)
    return next((each for each in own if group_ranks(each) == group_ranks(group)), group)


def on_first(action: Callable[[], _T], groups: Sequence[Any], units: Collection[Unit], label: str) -> _T:
    """What ``action`` returns, or raises, on rank 0 of ``groups``, over which, one after the other, it comes to all."""
    for unit in units:
        unit.announce()
    device = next((unit.device for unit in units), torch.device("cpu"))
    value: Any = None
    failure: Failure | None = None
    try:
        if all(group.rank() == 0 for group in groups):
            value = action()
    except BaseException as error:
        failure = Failure.of(error)
        raise
    finally:
        for group in groups:
            value, failure = broadcast_object((value, failure), group, label, device)
    if failure is not None:
        raise failure.as_error(failure.text)
    return value


# -- the hooks ---------------------------------------------------------------------------------------------------------


class LoadingHooks(StateHooks):
    """Lets ``load_state_dict()`` of a wrapped module, of a parent, and of every module in its unit load what
    ``state_dict()`` of the same module gives."""

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
            self.abandon()  # that one ended in an exception
        if self.active is None:
            Loading(module, [self, *_hooks_in(module)], alone=False)
        assert self.active is not None
        self.active.assign = bool(local_metadata.get("assign_to_params_buffers", False))
        if self.active.opener is module:
            *_, self.active.error_messages = rest
            self.active.prefix = prefix
        for key, value in state_dict.items():
            if isinstance(value, ShardedTensor):
                state_dict[key] = Recorder.of(value)
        if unit_of(module) is not None:  # a wrapper: the names that nn.Module goes by have the wrapper's part
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{WRAPPED_MODULE}.{key.removeprefix(prefix)}"] = state_dict.pop(key)

    def abandon(self) -> None:
        """Let go of a load that ended in an exception, if there is one."""
        if self.active is not None:
            self.active.abandon()

    def _after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.active is not None and self.active.opener is module:
            self.active.finish(incompatible_keys.missing_keys, incompatible_keys.unexpected_keys)


def _hooks_in(model: nn.Module) -> list[LoadingHooks]:
    return [wrapper._fsdp_loading for wrapper in wrappers_in(model)]


# -- from rank 0 alone -------------------------------------------------------------------------------------------------


def load_from_first(model: nn.Module, into_module: Callable[..., Any], state_dict: Any, strict: bool) -> Any:
    """``model.load_state_dict(state_dict, strict)`` with the dict of rank 0 of the units' group, or of the default one
    where there are no units; the others' are not looked at. One collective per unit.

    Raises, on every rank, before anything is loaded: as ``prepare`` does on rank 0.
    """
    units = units_of(model)
    tp = _tp_of(units)
    check_idle(units, "loading what only rank 0 has")
    groups = _ranks_of(model, units)
    loading: Loading | None = None
    with contextlib.ExitStack() as undo:

        def plan() -> Any:
            nonlocal loading
            loading = prepare(model, into_module, state_dict, strict)
            undo.callback(loading.undo)
            kinds = (ShardedTensor, DTensor, RaggedTensor)
            if sharded := [key for key, value in state_dict.items() if isinstance(value, kinds)]:
                raise RuntimeError(f"{', '.join(map(repr, sharded))}: sharded, and only rank 0 has a dict")
            extra = {k: v for k, v in state_dict.items() if k.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX}
            return loading.incompatible, [list(unit.sources) for unit in loading.units], set(state_dict), extra

        incompatible, present, given, extra = on_first(plan, groups, units, "tell what state rank 0 has")
        with alike_on_all_ranks(units):
            if loading is None and extra:
                undo.callback(prepare(model, into_module, extra, False).undo)
        undo.pop_all()
    with torch.inference_mode(False), torch.no_grad():
        for position, unit in enumerate(units):
            _scatter(unit, present[position], loading.units[position].sources if loading is not None else {}, tp)
            unit.shards_were_written()
        if loading is not None:
            loading.rest.commit(assign=False)
        tensors = [tensor for name, tensor in rest_of(model) if name in given]
        for group in groups:
            broadcast(tensors, group)
    return incompatible


def _ranks_of(model: nn.Module, units: list[Unit]) -> list[Any]:
    """The groups over which, one after the other, what rank 0 has comes to all."""
    if not units:
        return [default_group()]
    root, tp = replace(units[0].groups, tp=None), _tp_of(units)
    ranks = root.data_parallel_size * (tp.size() if tp is not None else 1)
    if any(replace(unit.groups, tp=None) != root for unit in units) or (
        unit_of(model) is None and ranks != default_group().size()
    ):
        raise RuntimeError(
            "loading a state dict that only rank 0 has needs all units to be sharded over the same group, and over all "
            "ranks where the model itself is not wrapped; pass the dict on every rank"
        )
    return [group for group in (root.shard, root.replica, tp) if group is not None and group.size() > 1]


def _tp_of(units: Iterable[Unit]) -> Any | None:
    """The ranks of their tensor parallelism, of which units without such parameters know nothing."""
    return next((unit.groups.tp for unit in units if unit.groups.tp is not None), None)


def rest_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters below ``module`` that no unit owns, and of its persistent buffers."""
    owned = {id(visible.param) for unit in units_of(module) for views in unit.views for visible in views.visible}
    found: list[tuple[str, torch.Tensor]] = []
    for path, owner in module.named_modules():
        tensors = [*registered_params(owner), *persistent_buffers(owner)]
        named = [(clean(joined(path, name)), tensor) for name, tensor in tensors]
        found += [(name, tensor.detach()) for name, tensor in named if id(tensor) not in owned]
    return found


def _scatter(unit: Unit, present: list[Key], sources: Mapping[Key, torch.Tensor], tp: Any | None) -> None:
    """Give every rank its part of the parameters ``present``, whose values the first rank has in ``sources``."""
    held, channels = held_tensors(unit), Channels()
    if unit.groups.replica_rank == 0:
        unit.announce()
    values = [(held[key], sources.get(key)) for key in present]
    fill_from_first(values, unit, channels, f"scatter {unit.name}", tp=tp)
    channels.flush()
    for bucket, views in enumerate(unit.views):
        views.note_writes([index for its, index in present if its == bucket])
