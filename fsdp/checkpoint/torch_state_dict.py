"""State dicts by the functions of ``torch.distributed.checkpoint.state_dict``: of the model, of optimizers, and of
both.

The same calls serve wrapped, partly wrapped and plain models. Keys are those of the plain model, without the prefixes
of ``DistributedDataParallel`` and ``torch.compile``. ``torch.distributed.checkpoint`` saves the dicts of
``get_state_dict`` and loads into them; ``set_state_dict`` loads them back into the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.checkpoint.forms import Form
from fsdp.checkpoint.load_state_dict import Loading, load_alike, load_from_first, prepare, ranks_of
from fsdp.checkpoint.optim_dtypes import first_step, with_values
from fsdp.checkpoint.optim_load import optim_state_dict_to_load
from fsdp.checkpoint.optim_names import ModelParams, rekey
from fsdp.checkpoint.optim_state import optim_state_dict
from fsdp.checkpoint.snapshot import Snapshot
from fsdp.checkpoint.state_dict import calling, check_no_experts
from fsdp.comm.groups import default_group
from fsdp.flat.names import PlainNames, clean, inside, plain_modules, unit_of
from fsdp.flat.ownership import torchs_own
from fsdp.flat.views import stepped_params
from fsdp.runtime.unit import units_of


@dataclass
class StateDictOptions:
    """Options with torch's names; instances of torch's class are accepted as well.

    Attributes:
        full_state_dict: whole tensors instead of sharded ones.
        cpu_offload: tensors in CPU memory; with ``full_state_dict`` only on rank 0, and ``{}`` elsewhere.
        ignore_frozen_params: leave out parameters that do not require grad.
        keep_submodule_prefixes: keep the model's names for the entries that ``submodules`` selects.
        strict: missing and unexpected keys are errors, and so is a trained parameter that is not in the dict.
        broadcast_from_rank0: only rank 0 has the dicts to load; with ``full_state_dict``.
        flatten_optimizer_state_dict: one flat dict, ``"state.<name>.<state>"`` and ``"param_groups.<name>.<key>"``.
        dsd_fqn_modifiers: accepted and ignored.
        ragged: sharded values are :class:`fsdp.checkpoint.ragged.RaggedTensor`, which need no communication and can be
            saved and loaded into at any number of ranks. Not one of torch's options.
            (``torch.distributed.checkpoint.load`` loads ``ShardedTensor`` values of which a rank has no rows only with
            ``planner=DefaultLoadPlanner(flatten_sharded_tensors=False)``.)
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"
    ragged: bool = False

    @staticmethod
    def of(value: Any) -> StateDictOptions:
        """Convert ``value``, options of torch or of this package or None.

        Raises:
            TypeError: ``value`` is no ``StateDictOptions``.
            ValueError: ``broadcast_from_rank0`` without ``full_state_dict``, or ``ragged`` with it.
        """
        if value is None:
            return StateDictOptions()
        if all(base.__name__ != StateDictOptions.__name__ for base in type(value).__mro__):
            raise TypeError(f"options must be StateDictOptions or None, but got {type(value).__name__}")
        names = [field.name for field in dataclasses.fields(StateDictOptions)]
        options = StateDictOptions(**{name: getattr(value, name) for name in names if hasattr(value, name)})
        if options.broadcast_from_rank0 and not options.full_state_dict:
            raise ValueError("full_state_dict must be True when broadcast_from_rank0 is True.")
        if options.ragged and options.full_state_dict:
            raise ValueError("a full state dict cannot be ragged: pass one of full_state_dict and ragged")
        return options

    def settings(self, *, sharded: bool = True) -> StateDictSettings:
        """Return the corresponding settings of a unit; a unit that is not ``sharded`` has full state only."""
        cpu, kind = self.cpu_offload, StateDictType.SHARDED_STATE_DICT
        if self.ragged:
            return StateDictSettings(kind, RaggedStateDictConfig(cpu), RaggedOptimStateDictConfig(cpu))
        if sharded and not self.full_state_dict:
            return StateDictSettings(kind, ShardedStateDictConfig(cpu), ShardedOptimStateDictConfig(cpu))
        one_rank = self.full_state_dict and cpu
        full = FullStateDictConfig(cpu, one_rank), FullOptimStateDictConfig(cpu, one_rank)
        return StateDictSettings(StateDictType.FULL_STATE_DICT, *full)


# -- the model -------------------------------------------------------------------------------------------------------


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the model's state by the plain model's names. All ranks have to call.

    Args:
        submodules: include only the state of these modules.
        options: :class:`StateDictOptions`, this package's or torch's.
    """
    options = StateDictOptions.of(options)
    model = entered(model, options)
    names = PlainNames(model)
    with _kind(model, options):
        state = {names.plain(key): value for key, value in own_method(model, "state_dict")().items()}
    if submodules:
        prefixes = [f"{path}." if path else "" for path, module in plain_modules(model) if module in submodules]
        found = [(key, prefix) for key in state for prefix in prefixes if key.startswith(prefix)]
        keep = options.keep_submodule_prefixes
        state = {key if keep else key.removeprefix(prefix): state[key] for key, prefix in found}
    if options.ignore_frozen_params:
        for name in _frozen(model):
            state.pop(names.plain(name), None)
    if not options.cpu_offload:
        return state
    if options.full_state_dict and default_rank() != 0:
        return {}
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def set_model_state_dict(model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None) -> Any:
    """Load a dict of :func:`get_model_state_dict`, or of a plain model. All ranks have to call.

    Either all ranks that share a wrapped module load, or none. Only effects of a module's own ``set_extra_state`` or
    ``_load_from_state_dict`` cannot always be undone; a warning is given then.

    Returns:
        the missing and unexpected keys.

    Raises: as ``load_state_dict()`` of a wrapped module.
    """
    options = StateDictOptions.of(options)
    plain = PlainNames(entered(model, options)).plain
    with calling("set_model_state_dict()", model):
        from_first = options.broadcast_from_rank0 and torch.distributed.is_initialized()
        if from_first:
            check_no_experts(model, "set_model_state_dict(broadcast_from_rank0)")
        found = _loaded(load_from_first if from_first else load_alike, model, model_state_dict, options)
        return type(found)(*(list(map(plain, keys)) for keys in found))


def prepare_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> Loading:
    """Do all of :func:`set_model_state_dict` that can fail, on this rank alone; see
    :func:`fsdp.checkpoint.load_state_dict.prepare`."""
    loading: Loading = _loaded(prepare, model, model_state_dict, StateDictOptions.of(options))
    return loading


def _loaded(load: Callable[..., Any], model: nn.Module, state: Any, options: StateDictOptions) -> Any:
    """Return the result of ``load(model, into_module, state, strict)`` for a ``state`` by the plain model's names.
    ``into_module`` is the ``load_state_dict`` of the module's class, or that of ``nn.Module`` for a wrapper."""
    model = entered(model, options)
    into_module = functools.partial(nn.Module.load_state_dict, model)
    if unit_of(model) is None:
        into_module = own_method(model, "load_state_dict")
    if isinstance(state, Mapping):
        now = PlainNames(model).now
        state = {now(key): value for key, value in state.items()}
    with _kind(model, options):
        return load(model, into_module, state, options.strict)


# -- names and kinds ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _kind(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    before = {unit: unit.state_settings for unit in units_of(model)}
    try:
        for unit in before:
            unit.set_state_settings(options.settings(sharded=unit.groups.sharded))
        yield
    finally:
        for unit, settings in before.items():
            unit.set_state_settings(settings)


def own_method(of: nn.Module | Optimizer, name: str) -> Any:
    """Return the method ``name`` of ``of``; the class's if torch's ``_patch_model_state_dict`` has replaced it by a
    call of this package."""
    method = getattr(of, name)
    patched = getattr(method, "__module__", None) == "torch.distributed.checkpoint.state_dict"
    return functools.partial(getattr(type(of), name), of) if patched else method


def entered(model: nn.Module, options: StateDictOptions) -> nn.Module:
    """Return the module inside the outer wrappers (DDP, compiled modules)."""
    foreign = torchs_own(model, fully_shard=options.full_state_dict or bool(units_of(model)))
    if foreign is not None:
        raise ValueError(
            f"{foreign}: state of such models is what torch.distributed.checkpoint.state_dict is for. A model in which "
            "this package has wrapped modules as well has no state in common"
        )
    return inside(model)


def _frozen(model: nn.Module) -> list[str]:
    """List the names of the parameters that do not require grad; all names of a shared one."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    holders = ModelParams(model).holders.values()
    names += [n for holder in holders if not holder.param.requires_grad for m in holder.members for n in m.names]
    return [clean(name) for name in names]


def default_rank() -> int:
    return int(default_group().rank()) if torch.distributed.is_initialized() else 0


# -- optimizers -----------------------------------------------------------------------------------------


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (:func:`get_model_state_dict`, :func:`get_optimizer_state_dict`)."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """Return the optimizers' state by the plain model's names, as one dict. All ranks have to call.

    For an optimizer that has not stepped yet, the dict has the state after a step without gradients, so that values can
    be loaded into it. The optimizer itself does not change.

    Args:
        submodules: ignored; the optimizers determine the parameters.
        options: :class:`StateDictOptions`, this package's or torch's.

    Raises: as ``FullyShardedDataParallel.optim_state_dict``, and
        ValueError: entries that could not be loaded back. These are entries of no parameter, if there are several
            optimizers or the dict is flattened, and names of states that are no strings in a flattened dict.
    """
    options = StateDictOptions.of(options)
    several = as_list(optimizers)
    with calling("get_optimizer_state_dict()", model), contextlib.ExitStack() as stack:
        params = ModelParams(model, _groups_of(several))
        for optimizer in several:
            stack.enter_context(initialised(optimizer, params))
        return optimizer_state_as_it_is(model, several, options)


def optimizer_state_as_it_is(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """Return :func:`get_optimizer_state_dict`, but without state for an optimizer that has none: state of an
    imaginary first step would change the steps after a resume."""
    model = entered(model, options)
    plain = PlainNames(model).plain
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    several = as_list(optimizers)
    for optimizer in several:
        raw = own_method(optimizer, "state_dict")()
        _check_joinable(raw, len(several), options)
        saved = _saved(model, optimizer, raw, options)
        joined["state"].update((plain(name), state) for name, state in saved.get("state", {}).items())
        for group in saved.get("param_groups", ()):
            joined["param_groups"].append({**group, "params": [plain(name) for name in group["params"]]})
    if options.full_state_dict and options.cpu_offload and default_rank() != 0:
        return {}
    return _flattened(joined) if options.flatten_optimizer_state_dict else joined


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: Any = None,
) -> Any:
    """Call :func:`set_optimizer_state_dict` and :func:`set_model_state_dict`; return the result of the latter. If
    one of them raises, the model and the optimizers are unchanged on all ranks."""
    optimizers = as_list(optimizers)
    with calling("set_state_dict()", model), Snapshot(optimizers=optimizers):
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return set_model_state_dict(model, model_state_dict, options=options)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: Any = None,
) -> None:
    """Load a dict of :func:`get_optimizer_state_dict`. All ranks have to call.

    Each optimizer keeps its own groups, with the hyperparameters that the dict has for their parameters. States are
    loaded bit for bit, in the dtypes of the dict. Element-wise states of torch's own optimizers get the parameter's
    dtype, without which those optimizers could not step. With ``strict=False`` parameters that are not in the dict keep
    their state. If this raises, the optimizers are unchanged.

    Raises:
        ValueError, KeyError: as ``FullyShardedDataParallel.optim_state_dict_to_load``.
        RuntimeError: a parameter that an optimizer trains is not in the dict (``strict``).
    """
    optimizers = as_list(optimizers)

    def load_each() -> None:
        for optimizer, loadable in optimizers_to_load(model, optimizers, optim_state_dict, options=options):
            own_method(optimizer, "load_state_dict")(loadable)

    with calling("set_optimizer_state_dict()", model), Snapshot(optimizers=optimizers):
        ranks_of(units_of(model)).together("load optimizer state", load_each)


def optimizers_to_load(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: Any,
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return the dict that :func:`set_optimizer_state_dict` would load into each optimizer, without loading it."""
    options = StateDictOptions.of(options)
    model = entered(model, options)
    several = as_list(optimizers)
    params, alone = ModelParams(model, _groups_of(several)), len(several) == 1

    def loadable(optimizer: Optimizer) -> dict[str, Any]:
        return optim_state_dict_to_load(
            model,
            lambda: _part_of(optimizer, model, params, optim_state_dict, options, alone=alone),
            optimizer.param_groups,
            optim=optimizer,
            from_rank0=options.broadcast_from_rank0,
            strict=options.strict,
        )

    return [(optimizer, loadable(optimizer)) for optimizer in several]


def _saved(model: nn.Module, optimizer: Optimizer, raw: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    units = units_of(model)
    if units:
        form = Form.of(options.settings().optim_state_dict_config)
        return optim_state_dict(model, optimizer.param_groups, raw, form)
    named = rekey(raw, OptimStateKeyType.PARAM_NAME, model, optimizer.param_groups)
    if options.ragged:
        named = with_values(named)
    if options.cpu_offload:
        named["state"] = tree_map(
            lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, named["state"]
        )
    return named


@contextlib.contextmanager
def initialised(optimizer: Optimizer, of_model: ModelParams) -> Iterator[None]:
    """Give a fresh optimizer the state of a step without gradients and with a rate of zero, inside the context.

    Parameters of which this rank's shards hold no elements get none if another rank holds some.
    """
    elsewhere = {holder.param for holder in of_model.holders.values() if holder.rank not in holder.owners}
    if optimizer.state or any(param.grad is not None for param in stepped_params(optimizer)):
        yield
        return
    with first_step(optimizer, elsewhere):
        yield


def _part_of(
    optimizer: Optimizer,
    model: nn.Module,
    params: ModelParams,
    given: Mapping[str, Any],
    options: StateDictOptions,
    *,
    alone: bool,
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
    if unknown and options.strict:
        raise RuntimeError(
            f"the optimizer trains {', '.join(map(repr, unknown))}, which no parameter group of the state dict has; "
            "pass StateDictOptions(strict=False) to load the others"
        )
    states = {names.now(name): state for name, state in dict_of.get("state", {}).items()}
    others = [name for name in states if name not in known]
    if others and not alone and options.strict:
        raise RuntimeError(
            f"the state dict has {', '.join(map(repr, others))}, which belongs to no parameter, and it is not known to "
            "which of the optimizers; load each optimizer's own state"
        )
    taken = {name: state for name, state in states.items() if name in mine or (alone and name in others)}
    return {"state": taken, "param_groups": groups}


def trained_names(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[str]]:
    """Return for each optimizer the plain model's names of the parameters that it holds."""
    model, several = inside(model), list(optimizers)
    plain, params = PlainNames(model).plain, ModelParams(model, _groups_of(several))
    return [
        [plain(name) for group in one.param_groups for param in group["params"] for name in params.names(param)]
        for one in several
    ]


def _check_joinable(raw: Mapping[str, Any], optimizers: int, options: StateDictOptions) -> None:
    """Check that the state of one of several ``optimizers`` can be joined with the others into one dict."""
    trained = {key for group in raw["param_groups"] for key in group["params"]}
    others = [key for key in raw["state"] if key not in trained]
    if others and (optimizers > 1 or options.flatten_optimizer_state_dict):
        raise ValueError(
            f"the optimizer's state has {', '.join(map(repr, others))}, which belongs to no parameter. That comes back "
            "only from the state of one optimizer by itself, and not flattened: remove it, or save it apart"
        )
    if options.flatten_optimizer_state_dict:
        names = [name for key in trained & raw["state"].keys() for name in raw["state"][key]]
        if odd := [name for name in names if not isinstance(name, str)]:
            raise ValueError(f"in a flattened state dict names of states have to be strings, but one is {odd[0]!r}")


def _flattened(joined: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{name}.{key}": value for name, state in joined["state"].items() for key, value in state.items()}
    for group in joined["param_groups"]:
        for name in group["params"]:
            flat.update((f"param_groups.{name}.{key}", value) for key, value in group.items() if key != "params")
    return flat


def _unflattened(flat: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Undo ``_flattened`` for the parameters ``names``, with a group for each of them that the dict contains."""
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


def _groups_of(several: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in several for group in optimizer.param_groups]


def as_list(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
