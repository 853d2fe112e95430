"""State of a model and of its optimizers by the names of the plain model.

Keys have no prefixes of ``DistributedDataParallel`` and ``torch.compile``. The same calls serve wrapped, partly wrapped
and plain models. The store and the functions with torch's names are made of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fsdp.api import StateDictSettings, StateDictType
from fsdp.checkpoint.forms import Form, Full, Ragged
from fsdp.checkpoint.optim_load import optim_state_dict_to_load
from fsdp.checkpoint.optim_names import ModelParams
from fsdp.checkpoint.optim_state import optim_state_dict
from fsdp.checkpoint.state_dict import versioned
from fsdp.flat.names import PlainNames, clean, inside, plain_modules, unit_of
from fsdp.flat.ownership import torchs_own
from fsdp.runtime.unit import units_of

Optimizers = Optimizer | Iterable[Optimizer]


def settings_of(form: type[Form], cpu: bool, **options: bool) -> StateDictSettings:
    """Return the settings that choose ``form`` for the model and for optimizers, with tensors on CPU or not."""
    kind = StateDictType.FULL_STATE_DICT if form is Full else StateDictType.SHARDED_STATE_DICT
    of_model, of_optimizer = form.configs[:2]
    return StateDictSettings(kind, of_model(cpu, **options), of_optimizer(cpu, **options))


def ragged() -> StateDictSettings:
    """Return the settings for values without communication."""
    return settings_of(Ragged, False)


def model_state(model: nn.Module, settings: StateDictSettings) -> dict[str, Any]:
    """Return the model's state, with the versions of modules. All ranks have to call."""
    model = entered(model, settings)
    with _in_force(model, settings):
        return _renamed(own_method(model, "state_dict")(), PlainNames(model).plain)


def load_model_state(
    load: Callable[..., Any], model: nn.Module, state: Any, settings: StateDictSettings, *, strict: bool
) -> Any:
    """Return the result of ``load(model, into_module, state, strict)``, with the names that the model has now.
    ``into_module`` is the ``load_state_dict`` of the module's class, or that of ``nn.Module`` for a wrapper."""
    model = entered(model, settings)
    into_module = functools.partial(nn.Module.load_state_dict, model)
    if unit_of(model) is None:
        into_module = own_method(model, "load_state_dict")
    if isinstance(state, Mapping):
        state = _renamed(state, PlainNames(model).now)
    with _in_force(model, settings):
        return load(model, into_module, state, strict)


def _renamed(state: Mapping[str, Any], rename: Callable[[Any], Any]) -> dict[str, Any]:
    renamed, versions = {rename(key): value for key, value in state.items()}, getattr(state, "_metadata", None)
    return renamed if versions is None else versioned(renamed, {rename(name): of for name, of in versions.items()})


def versions_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the versions of the model's modules in ``state``, except versions of 1; None if ``state`` has none."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return None
    return {name: of.get("version") for name, of in versions.items() if clean(name) == name and of.get("version") != 1}


def with_versions(state: dict[str, Any], versions: dict[str, Any] | None, model: nn.Module) -> dict[str, Any]:
    """Return ``state``, to be loaded into ``model``, with versions of :func:`versions_of`."""
    if versions is None:
        return state
    return versioned(state, {name: {"version": versions.get(name, 1)} for name, _ in plain_modules(inside(model))})


def optimizer_state(model: nn.Module, optimizers: Iterable[Optimizer], settings: StateDictSettings) -> dict[str, Any]:
    """Return the optimizers' state as one dict. All ranks have to call."""
    form, model = Form.of(settings.optim_state_dict_config), entered(model, settings)
    plain = PlainNames(model).plain
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        saved = optim_state_dict(model, optimizer.param_groups, own_method(optimizer, "state_dict")(), form)
        joined["state"].update((plain(name), state) for name, state in saved.get("state", {}).items())
        for group in saved.get("param_groups", ()):
            joined["param_groups"].append({**group, "params": [plain(name) for name in group["params"]]})
    return joined


def optimizers_to_load(
    model: nn.Module,
    optimizers: list[Optimizer],
    state: Mapping[str, Any],
    settings: StateDictSettings,
    *,
    strict: bool,
    **how: bool,
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return the part of ``state`` that each optimizer loads, without loading it. All ranks have to call.

    Args:
        state: ``{"state": ..., "param_groups": ...}`` as of :func:`optimizer_state`, or a flat dict.
        strict: a parameter of an optimizer that is not in the dict is an error.
        how: ``from_rank0`` and ``together`` as for :func:`optim_state_dict_to_load`.
    """
    model = entered(model, settings)
    params, alone = ModelParams(model, groups_of(optimizers)), len(optimizers) == 1
    found: list[tuple[Optimizer, dict[str, Any]]] = []
    for one in optimizers:
        given = functools.partial(_part_of, one, model, params, state, strict=strict, alone=alone)
        loadable = optim_state_dict_to_load(model, given, one.param_groups, optim=one, strict=strict, **how)
        found.append((one, loadable))
    return found


def _part_of(
    optimizer: Optimizer, model: nn.Module, params: ModelParams, given: Mapping[str, Any], *, strict: bool, alone: bool
) -> dict[str, Any]:
    """Return the part of ``given`` for ``optimizer``, by the names that the model has now. Entries of no parameter
    are included if the optimizer is ``alone``."""
    own = [name for group in optimizer.param_groups for param in group["params"] for name in params.names(param)]
    names, mine = PlainNames(model), set(own)
    dict_of = dict(given) if "state" in given or not given else _unflattened(given, map(names.plain, own))
    groups: list[dict[str, Any]] = []
    known: set[str] = set()
    for group in dict_of["param_groups"]:
        members = [names.now(name) for name in group["params"]]
        known.update(members)
        if not members or not mine.isdisjoint(members):
            groups.append({**group, "params": [name for name in members if name in mine]})
    unknown = [name for name in own if name not in known]
    if unknown and strict:
        raise RuntimeError(
            f"the optimizer trains {', '.join(map(repr, unknown))}, which no parameter group of the state dict has; "
            "pass StateDictOptions(strict=False) to load the others"
        )
    states = {names.now(name): state for name, state in dict_of.get("state", {}).items()}
    others = [name for name in states if name not in known]
    if others and not alone and strict:
        raise RuntimeError(
            f"the state dict has {', '.join(map(repr, others))}, which belongs to no parameter, and it is not known to "
            "which of the optimizers; load each optimizer's own state"
        )
    taken = {name: state for name, state in states.items() if name in mine or (alone and name in others)}
    return {"state": taken, "param_groups": groups}


def _unflattened(flat: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a dict of states and groups for the parameters ``names`` from a flat one, ``"state.<name>.<state>"`` and
    ``"param_groups.<name>.<key>"``, with a group for each of them that the dict contains."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    names = dict.fromkeys(names)
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        if kind not in found:
            continue
        end = rest.find(".")
        while end >= 0:  # names of parameters and of states may contain dots
            if rest[:end] in names:
                found[kind].setdefault(rest[:end], {})[rest[end + 1 :]] = value
            end = rest.find(".", end + 1)
    states, groups = ({name: part[name] for name in names if name in part} for part in found.values())
    return {"state": states, "param_groups": [{**group, "params": [name]} for name, group in groups.items()]}


def trained_names(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[str]]:
    """Return for each optimizer the plain model's names of the parameters that it holds."""
    model, several = inside(model), list(optimizers)
    plain, params = PlainNames(model).plain, ModelParams(model, groups_of(several))
    return [
        [plain(name) for group in one.param_groups for param in group["params"] for name in params.names(param)]
        for one in several
    ]


@contextlib.contextmanager
def _in_force(model: nn.Module, settings: StateDictSettings) -> Iterator[None]:
    """Apply ``settings`` to all units; a unit that is not sharded has full state in place of chunks."""
    before = {unit: unit.state_settings for unit in units_of(model)}
    form = Form.of(settings.state_dict_config)
    unsharded = settings_of(Full, form.offload_to_cpu) if form.is_cut else settings
    try:
        for unit in before:
            unit.set_state_settings(settings if unit.groups.sharded else unsharded)
        yield
    finally:
        for unit, own in before.items():
            unit.set_state_settings(own)


def own_method(of: nn.Module | Optimizer, name: str) -> Any:
    """Return the method ``name`` of ``of``; the class's if torch's ``_patch_model_state_dict`` has replaced it by a
    call of this package."""
    method = getattr(of, name)
    patched = getattr(method, "__module__", None) == "torch.distributed.checkpoint.state_dict"
    return functools.partial(getattr(type(of), name), of) if patched else method


def entered(model: nn.Module, settings: StateDictSettings) -> nn.Module:
    """Return the module inside the outer wrappers (DDP, compiled modules).

    Raises:
        ValueError: torch's own FSDP has wrapped a module, or, for full state, ``fully_shard`` has.
    """
    is_full = isinstance(Form.of(settings.state_dict_config), Full)
    wrapped = torchs_own(model, fully_shard=is_full or bool(units_of(model)))
    if wrapped is not None:
        raise ValueError(
            f"{wrapped}: state of such models is what torch.distributed.checkpoint.state_dict is for. A model in which "
            "this package has wrapped modules as well has no state in common"
        )
    return inside(model)


def groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
