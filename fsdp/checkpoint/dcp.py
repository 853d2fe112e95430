"""Model and optimizer state with the signatures of ``torch.distributed.checkpoint.state_dict``.

The same calls serve wrapped, partly wrapped and plain models; keys are the plain model's, without what
``DistributedDataParallel`` and ``torch.compile`` add. What comes out of ``get_state_dict`` can be saved, and loaded
into, by ``torch.distributed.checkpoint``, and goes back by ``set_state_dict``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
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
from fsdp.checkpoint.forms import is_sharded
from fsdp.checkpoint.load_state_dict import prepare
from fsdp.checkpoint.loading import Loading, alike_on_all_ranks
from fsdp.checkpoint.optim_dtypes import keep_dtypes
from fsdp.checkpoint.optim_groups import lay_out
from fsdp.checkpoint.optim_load import optim_state_dict_to_load
from fsdp.checkpoint.optim_params import ModelParams, param_to_name, params_by_id, rekey
from fsdp.checkpoint.optim_state import optim_state_dict, wanted
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.state_dict import calling, held_params
from fsdp.comm.consensus import broadcast_object
from fsdp.comm.groups import default_group
from fsdp.flat.names import PlainNames, clean, inside, plain_modules, unit_of
from fsdp.flat.ownership import torchs_own
from fsdp.runtime.unit import Unit, units_of


@dataclass
class StateDictOptions:
    """As torch's, whose instances are taken as well.

    Attributes:
        full_state_dict: whole tensors instead of sharded ones.
        cpu_offload: tensors in CPU memory; with ``full_state_dict`` only on rank 0, and ``{}`` elsewhere.
        ignore_frozen_params: leave out parameters that do not require grad.
        keep_submodule_prefixes: whether the names of what ``submodules`` selects stay as they are in the model.
        strict: missing and unexpected keys are errors, and so is a trained parameter that the dict does not know.
        broadcast_from_rank0: only rank 0 has the dicts to load; with ``full_state_dict``.
        flatten_optimizer_state_dict: one flat dict, ``"state.<name>.<state>"`` and ``"param_groups.<name>.<key>"``.
        dsd_fqn_modifiers: accepted, and not looked at.
        ragged: sharded values are :class:`fsdp.checkpoint.ragged.RaggedTensor`, which takes no communication, and which
            can be saved and loaded into at any number of ranks. (``ShardedTensor`` values of which a rank has no rows
            are loaded by ``torch.distributed.checkpoint.load`` only with
            ``planner=DefaultLoadPlanner(flatten_sharded_tensors=False)``.) Not among torch's options.
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
        """
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

    def settings(self, *, loading: bool) -> StateDictSettings:
        """The kind of state dict that these ask for."""
        cpu = self.cpu_offload
        if self.ragged:
            ragged = RaggedStateDictConfig(cpu), RaggedOptimStateDictConfig(cpu)
            return StateDictSettings(StateDictType.SHARDED_STATE_DICT, *ragged)
        if not self.full_state_dict:
            configs: tuple[Any, Any] = ShardedStateDictConfig(cpu), ShardedOptimStateDictConfig(cpu)
            return StateDictSettings(StateDictType.SHARDED_STATE_DICT, *configs)
        one_rank = self.broadcast_from_rank0 if loading else cpu
        configs = FullStateDictConfig(cpu, one_rank), FullOptimStateDictConfig(cpu, one_rank)
        return StateDictSettings(StateDictType.FULL_STATE_DICT, *configs)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(:func:`get_model_state_dict`, :func:`get_optimizer_state_dict`)."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The model's state by the plain model's names; all ranks have to call.

    Args:
        submodules: only what is in these.
        options: :class:`StateDictOptions`, ours or torch's.
    """
    options = StateDictOptions.of(options)
    model = _entered(model, options)
    names = PlainNames(model)
    with _kind(model, options.settings(loading=False)):
        state = {names.plain(key): value for key, value in _method(model, "state_dict")().items()}
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
    if options.full_state_dict and _rank() != 0:
        return {}
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """The optimizers' state by the plain model's names, as one dict; all ranks have to call.

    For an optimizer that has not stepped yet, the state that a step without gradients would make, so that there is
    something to load into; the optimizer itself stays as it is.

    Args:
        submodules: not looked at; the optimizers say which parameters.
        options: :class:`StateDictOptions`, ours or torch's.

    Raises: as ``FullyShardedDataParallel.optim_state_dict``, and
        ValueError: what would not come back: entries that belong to no parameter, if there are several optimizers or
            the dict is to be flattened, and then also names of states that are no strings.
    """
    options = StateDictOptions.of(options)
    several = _several(optimizers)
    with calling("get_optimizer_state_dict()", model), contextlib.ExitStack() as stack:
        elsewhere = _held_elsewhere(model)
        for optimizer in several:
            stack.enter_context(_initialised(optimizer, elsewhere))
        return optimizer_state_as_it_is(model, several, options)


def optimizer_state_as_it_is(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """As :func:`get_optimizer_state_dict`, but with no state for an optimizer that has none: one that goes on from what
    a first step would make, would not do what a new one does."""
    model = _entered(model, options)
    plain = PlainNames(model).plain
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    several = _several(optimizers)
    for optimizer in several:
        raw = _method(optimizer, "state_dict")()
        _check_joinable(raw, len(several), options)
        saved = _saved(model, optimizer, raw, options)
        joined["state"].update((plain(name), state) for name, state in saved.get("state", {}).items())
        for group in saved.get("param_groups", ()):
            joined["param_groups"].append({**group, "params": [plain(name) for name in group["params"]]})
    if options.full_state_dict and options.cpu_offload and _rank() != 0:
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
    """:func:`set_optimizer_state_dict` and :func:`set_model_state_dict`; returns what the latter does. If one of them
    raises, the model and the optimizers are as they were, on all ranks."""
    optimizers = _several(optimizers)
    with calling("set_state_dict()", model), kept_if_it_fails(optimizers):
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return set_model_state_dict(model, model_state_dict, options=options)


def set_model_state_dict(model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None) -> Any:
    """Load what :func:`get_model_state_dict` gives, or a plain model's. All ranks have to call.

    Nothing is loaded unless everything fits, on every rank that shares a wrapped module. Only what a module's own
    ``set_extra_state`` or ``_load_from_state_dict`` has done cannot always be taken back; a warning says so.

    Returns:
        the missing and unexpected keys.

    Raises: as ``load_state_dict()`` of a wrapped module.
    """
    options = StateDictOptions.of(options)
    model = _entered(model, options)
    with calling("set_model_state_dict()", model), _kind(model, options.settings(loading=True)):
        if unit_of(model) is not None:
            now = PlainNames(model).now
            state = {now(key): value for key, value in model_state_dict.items()}
            return _method(model, "load_state_dict")(state, strict=options.strict)
        if options.broadcast_from_rank0 and torch.distributed.is_initialized():
            return _hand_out(model, model_state_dict, options)
        loading = _prepared_alike(model, model_state_dict, options)
        loading.write()
        plain, (missing, unexpected) = PlainNames(model).plain, loading.incompatible
        return type(loading.incompatible)([plain(key) for key in missing], [plain(key) for key in unexpected])


def _prepared_alike(model: nn.Module, model_state_dict: Mapping[str, Any], options: StateDictOptions) -> Loading:
    """:func:`prepare_model_state_dict` on all ranks that share a wrapped module, or an error on all of them."""
    with contextlib.ExitStack() as undo:
        with alike_on_all_ranks(units_of(model)) as given:
            loading = prepare_model_state_dict(model, model_state_dict, options=options)
            undo.callback(loading.undo)
            given.update({unit.unit: list(unit.given()) for unit in loading.units})
        undo.pop_all()
    return loading


def prepare_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> Loading:
    """All of :func:`set_model_state_dict` that can fail, on this rank alone; see
    :func:`fsdp.checkpoint.load_state_dict.prepare`."""
    options = StateDictOptions.of(options)
    model = _entered(model, options)
    own = functools.partial(nn.Module.load_state_dict, model)
    with _kind(model, options.settings(loading=True)):
        now = PlainNames(model).now
        state = {now(key): value for key, value in model_state_dict.items()}
        into_module = own if unit_of(model) is not None else _method(model, "load_state_dict")
        return prepare(model, into_module, state, strict=options.strict)


@contextlib.contextmanager
def kept_if_it_fails(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Where what is inside raises, the optimizers have the state and the groups that they had.

    ``load_state_dict`` of torch's optimizers makes new ones; what an optimizer of somebody else's writes into the
    tensors that it had stays written.
    """
    before = [
        (
            one,
            dict(one.__dict__),
            {p: dict(s) if isinstance(s, dict) else s for p, s in one.state.items()},
            [dict(group) for group in one.param_groups],
        )
        for one in optimizers
    ]
    try:
        yield
    except BaseException:
        for one, attributes, state, groups in before:
            one.__dict__.clear()
            one.__dict__.update(attributes)
            one.state.clear()
            one.state.update(state)
            for group, kept in zip(one.param_groups, groups):
                group.clear()
                group.update(kept)
        raise


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: Any = None,
) -> None:
    """Load what :func:`get_optimizer_state_dict` gives. All ranks have to call.

    Each optimizer keeps its own groups, with the hyperparameters that the dict has for their parameters. States come
    back bit for bit, in the dtypes that the dict has; what torch's own optimizers have of each element gets the
    parameter's dtype, without which they could not step. With ``strict=False`` what the dict does not know stays as it
    is. If this raises, the optimizers are as they were.

    Raises:
        ValueError, KeyError: as ``FullyShardedDataParallel.optim_state_dict_to_load``.
        RuntimeError: the dict does not know a parameter that an optimizer trains (``strict``).
    """
    optimizers = _several(optimizers)
    units = units_of(model)
    with calling("set_optimizer_state_dict()", model), kept_if_it_fails(optimizers), alike_on_all_ranks(units):
        for optimizer, loadable in optimizers_to_load(model, optimizers, optim_state_dict, options=options):
            _method(optimizer, "load_state_dict")(loadable)


def optimizers_to_load(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], optim_state_dict: dict[str, Any], *, options: Any
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """What :func:`set_optimizer_state_dict` loads into which optimizer. Nothing is loaded yet.

    Raises: as ``set_optimizer_state_dict``.
    """
    options = StateDictOptions.of(options)
    model = _entered(model, options)
    planned: list[tuple[Optimizer, dict[str, Any]]] = []
    wrapped = bool(units_of(model))
    params = ModelParams(model) if wrapped else None
    from_rank0 = options.broadcast_from_rank0
    several = _several(optimizers)
    for optimizer in several:
        given: dict[str, Any] | None = None
        error: Exception | None = None
        try:
            if not from_rank0 or _rank() == 0:
                given = _part_of(optimizer, model, params, optim_state_dict, options, alone=len(several) == 1)
        except Exception as caught:
            error = caught
        if from_rank0:
            error = told_by_rank0(error, model, "tell whether rank 0's optimizer state fits")
            given = given if wrapped else told_by_rank0(given, model, "share the state of a plain optimizer")
        if error is not None:
            raise error
        if wrapped:
            loadable = optim_state_dict_to_load(
                model, given, optim=optimizer, from_rank0=from_rank0, strict=options.strict
            )
        else:
            assert given is not None
            loadable = _plain_to_load(optimizer, model, given, strict=options.strict)
        planned.append((optimizer, loadable))
    return planned


# -- from rank 0 alone, into a module that is not wrapped itself -------------------------------------------------------


def _hand_out(model: nn.Module, given: Any, options: StateDictOptions) -> Any:
    """Load what rank 0 has: the wrapped modules in ``model`` hand out what is theirs, and the rest goes to all ranks.

    Raises, on every rank, before anything is loaded:
        RuntimeError: something does not fit, in the words of ``nn.Module``.
    """
    group, names = default_group(), PlainNames(model)
    outermost: dict[str, Any] = {}
    for path, module in model.named_modules():
        if unit_of(module) is not None and not any(f"{clean(path)}.".startswith(outer) for outer in outermost):
            outermost[f"{clean(path)}."] = module
    own: dict[str, dict[str, Any]] = {prefix: {} for prefix in ("", *outermost)}
    problems: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    expected = get_model_state_dict(model, options=StateDictOptions(ragged=True))  # takes no communication
    if group.rank() == 0 and not isinstance(given, Mapping):
        problems.append(f"Expected state_dict to be dict-like, got {type(given).__name__}.")
    elif group.rank() == 0:
        missing = [key for key in expected if key not in given]
        unexpected = [key for key in given if key not in expected]
        if options.strict and unexpected:
            problems.append(f"Unexpected key(s) in state_dict: {', '.join(map(_quoted, unexpected))}. ")
        if options.strict and missing:
            problems.append(f"Missing key(s) in state_dict: {', '.join(map(_quoted, missing))}. ")
        for key in (key for key in expected if key in given):
            name = names.now(key)
            prefix = next((prefix for prefix in outermost if name.startswith(prefix)), "")
            own[prefix][name.removeprefix(prefix)] = given[key]
            problems += _cannot_be_handed_out(key, given[key], expected[key], bool(prefix))
        if any(unit_of(wrapper).groups.data_parallel_size != group.size() for wrapper in outermost.values()):
            problems.append("a wrapped module is not sharded over all ranks; pass the dict on every rank.")
    told = told_by_rank0((problems, missing, unexpected, own[""]), model, "tell what state rank 0 has")
    problems, missing, unexpected, rest = told
    if problems:
        listed = "".join(f"\n\t{problem}" for problem in problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:{listed}")
    loading = _prepared_alike(model, rest, dataclasses.replace(options, strict=False))
    try:
        for prefix, wrapper in outermost.items():
            wrapper.load_state_dict(own[prefix], strict=False)
    except BaseException:
        loading.undo()
        raise
    loading.write()
    return type(loading.incompatible)(missing, unexpected)


def _cannot_be_handed_out(key: str, value: Any, like: Any, by_wrapper: bool) -> Iterator[str]:
    if isinstance(like, torch.Tensor) and (not isinstance(value, torch.Tensor) or value.shape != like.shape):
        found = value.shape if isinstance(value, torch.Tensor) else type(value).__name__
        yield (
            f"size mismatch for {key}: copying a param with shape {found} from checkpoint, the shape in current "
            f"model is {like.shape}."
        )
    elif is_sharded(value) or isinstance(value, RaggedTensor):
        yield f"{key} is sharded, and only rank 0 has a dict."
    elif by_wrapper and not isinstance(like, torch.Tensor):
        yield f"{key} is extra state of a wrapped module, which takes it on every rank only."


def _quoted(key: str) -> str:
    return f'"{key}"'


# -- optimizers --------------------------------------------------------------------------------------------------------


def _saved(model: nn.Module, optimizer: Optimizer, raw: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    units = units_of(model)
    if units:
        mesh = units[0].mesh
        settings = options.settings(loading=False)
        if mesh is not None and not options.full_state_dict and not options.ragged:
            settings.optim_state_dict_config = ShardedOptimStateDictConfig(options.cpu_offload, _use_dtensor=True)
        return optim_state_dict(model, optimizer, raw, wanted(settings, mesh))
    named = rekey(raw, OptimStateKeyType.PARAM_NAME, model, optimizer, None)
    if options.cpu_offload:
        named["state"] = tree_map(
            lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, named["state"]
        )
    return named


@contextlib.contextmanager
def _initialised(optimizer: Optimizer, elsewhere: Container[nn.Parameter]) -> Iterator[None]:
    """Inside, a fresh optimizer has the state that a step without gradients and with a rate of zero makes, for all but
    the parameters that are ``elsewhere``."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or any(param.grad is not None for param in params):
        yield
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    # some move parameters without a rate
    values = [] if all(rate is not None for rate in rates) else [param.detach().clone() for param in params]
    try:
        try:
            for group, rate in zip(optimizer.param_groups, rates):
                if rate is not None:
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            for param in params:
                if param.requires_grad and param not in elsewhere:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates):
                if rate is not None:
                    group["lr"] = rate
            for param in params:
                param.grad = None
            for param, value in zip(params, values):
                param.detach().copy_(value)
        yield
    finally:
        optimizer.state.clear()


def _held_elsewhere(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of which this rank's shards hold nothing, and others' do."""
    holders = ModelParams(model).holders.values() if units_of(model) else ()
    return {holder.param for holder in holders if holder.rank not in holder.owners}


def _part_of(
    optimizer: Optimizer,
    model: nn.Module,
    params: ModelParams | None,
    given: Mapping[str, Any],
    options: StateDictOptions,
    *,
    alone: bool,
) -> dict[str, Any]:
    """What of ``given`` belongs to ``optimizer``, by the names that the model has now; what belongs to no parameter if
    it is ``alone``."""
    names_of = _names_of(model, params)
    own = [name for group in optimizer.param_groups for param in group["params"] for name in names_of(param)]
    names = PlainNames(model)
    dict_of = dict(given) if "state" in given or not given else _unflattened(given, map(names.plain, own))
    groups = [{**group, "params": [names.now(name) for name in group["params"]]} for group in dict_of["param_groups"]]
    known = {name for group in groups for name in group["params"]}
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
    mine = set(own)
    for group in groups:
        group["params"] = [name for name in group["params"] if name in mine]
    groups = [
        group for group, before in zip(groups, dict_of["param_groups"]) if group["params"] or not before["params"]
    ]
    taken = {name: state for name, state in states.items() if name in mine or (alone and name in others)}
    return {"state": taken, "param_groups": groups}


def _plain_to_load(optimizer: Optimizer, model: nn.Module, given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """As ``optim_state_dict_to_load``, for the optimizer of a model without wrapped modules."""
    names_of = _names_of(model, None)
    keys = {param: key for key, param in params_by_id(model, optimizer.param_groups).items()}
    key_of = {name: key for param, key in keys.items() for name in names_of(param)}
    known = {name for group in given["param_groups"] for name in group["params"]}
    present: Mapping[Any, Any] = {} if strict else optimizer.state
    state: dict[Any, Any] = {
        keys.get(key, key): value
        for key, value in present.items()
        if not isinstance(key, nn.Parameter) or not known.issuperset(names_of(key))
    }
    state.update((key_of.get(name, name), value) for name, value in given["state"].items())
    keep_dtypes(optimizer)
    groups = lay_out(optimizer.param_groups, given["param_groups"], names_of, keys, strict=strict)
    return {"state": state, "param_groups": groups}


def trained_parts(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] | None) -> dict[str, torch.Tensor]:
    """By the plain model's names, what this rank has of each parameter that the optimizers hold: of a sharded one as
    ``RaggedTensor``."""
    model = inside(model)
    plain = PlainNames(model).plain
    several = _several(optimizers) if optimizers is not None else []
    held = [param for optimizer in several for group in optimizer.param_groups for param in group["params"]]
    if not units_of(model):
        names_of = _names_of(model, None)
        return {plain(name): param for param in held for name in names_of(param)}
    params = ModelParams(model)
    parts: dict[str, torch.Tensor] = {}
    held_of = {handle: held_params(handle) for unit in params.units for handle in unit.handles}
    for param in held:
        holder = params.holders.get(param)
        if holder is None:
            parts.update((plain(name), param) for name in params.names(param))
        else:
            of_bucket = held_of[holder.handle]
            parts.update((plain(member.name), of_bucket[member.index].part) for member in holder.members)
    return parts


def _names_of(model: nn.Module, params: ModelParams | None) -> Callable[[nn.Parameter], list[str]]:
    """The names that a parameter of the model stands for; ``params`` are a wrapped one's."""
    if params is not None:
        return params.names
    names = param_to_name(model)

    def names_of(param: nn.Parameter) -> list[str]:
        if param not in names:
            raise KeyError(f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the model")
        return [names[param]]

    return names_of


def _check_joinable(raw: Mapping[str, Any], optimizers: int, options: StateDictOptions) -> None:
    """Of one of several ``optimizers``, whose states become one dict.

    Raises:
        ValueError: something in its state would not come back.
    """
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
    """With a group for each of ``names`` that is there."""
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for name in names:
        for section, target in (("state", result["state"]), ("param_groups", None)):
            prefix = f"{section}.{name}."
            found = {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}
            if found and target is not None:
                target[name] = found
            elif found:
                result["param_groups"].append({**found, "params": [name]})
    return result


# -- names and kinds ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _kind(model: nn.Module, settings: StateDictSettings) -> Iterator[None]:
    """Inside, all units have these settings."""
    before = {unit: unit.state_settings for unit in units_of(model)}
    try:
        for unit in before:
            unit.state_settings = _as_it_can(unit, settings)
        yield
    finally:
        for unit, its in before.items():
            unit.state_settings = its


def _as_it_can(unit: Unit, settings: StateDictSettings) -> StateDictSettings:
    """``settings``; what is not sharded has full state only, and what has a device mesh uses it."""
    cpu = settings.state_dict_config.offload_to_cpu
    ragged = isinstance(settings.state_dict_config, RaggedStateDictConfig)
    if settings.state_dict_type is not StateDictType.SHARDED_STATE_DICT or ragged:
        return settings
    if not unit.groups.sharded:
        full = FullStateDictConfig(cpu), FullOptimStateDictConfig(cpu)
        return StateDictSettings(StateDictType.FULL_STATE_DICT, *full)
    uses_mesh = unit.mesh is not None
    sharded = ShardedStateDictConfig(cpu, uses_mesh), ShardedOptimStateDictConfig(cpu, uses_mesh)
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, *sharded)


def _method(of: nn.Module | Optimizer, name: str) -> Any:
    """Its method ``name``; its class's if torch's ``_patch_model_state_dict`` has put what calls us in that place."""
    method = getattr(of, name)
    patched = getattr(method, "__module__", None) == "torch.distributed.checkpoint.state_dict"
    return functools.partial(getattr(type(of), name), of) if patched else method


def _several(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _entered(model: nn.Module, options: StateDictOptions) -> nn.Module:
    """
    Raises:
        ValueError: torch's FSDP has wrapped something of it, and its state is not just the ``DTensor`` parameters that
            ``fully_shard`` makes.
    """
    foreign = torchs_own(model, fully_shard=options.full_state_dict or bool(units_of(model)))
    if foreign is not None:
        raise ValueError(
            f"{foreign}: state of such models is what torch.distributed.checkpoint.state_dict is for. A model in which "
            "this package has wrapped modules as well has no state in common"
        )
    return inside(model)


def _frozen(model: nn.Module) -> list[str]:
    """The names, all of a shared one, of the parameters that do not require grad."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    if units_of(model):
        holders = ModelParams(model).holders.values()
        names += [n for holder in holders if not holder.param.requires_grad for m in holder.members for n in m.names]
    return [clean(name) for name in names]


def told_by_rank0(value: Any, model: nn.Module, what: str) -> Any:
    """What rank 0 has as ``value``."""
    units = units_of(model)
    for unit in units:
        unit.watch_call()
    device = units[0].device if units else torch.device("cpu")
    return broadcast_object(value, default_group(), what, device)


def _rank() -> int:
    return int(default_group().rank()) if torch.distributed.is_initialized() else 0
