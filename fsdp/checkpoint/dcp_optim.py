"""Optimizer state with the signatures of ``torch.distributed.checkpoint.state_dict``, by itself and with the model's.

See :mod:`fsdp.checkpoint.dcp`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fsdp.api import OptimStateKeyType
from fsdp.checkpoint.dcp import (
    StateDictOptions,
    default_rank,
    entered,
    get_model_state_dict,
    own_method,
    set_model_state_dict,
)
from fsdp.checkpoint.forms import Form
from fsdp.checkpoint.load_state_dict import alike_on_all_ranks
from fsdp.checkpoint.optim_load import optim_state_dict_to_load
from fsdp.checkpoint.optim_names import ModelParams, rekey
from fsdp.checkpoint.optim_state import optim_state_dict
from fsdp.checkpoint.state_dict import calling, held_param
from fsdp.flat.names import PlainNames, inside
from fsdp.runtime.unit import units_of


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
        params = ModelParams(model, [optimizer.param_groups for optimizer in several])
        for optimizer in several:
            stack.enter_context(initialised(optimizer, params))
        return optimizer_state_as_it_is(model, several, options)


def optimizer_state_as_it_is(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """As :func:`get_optimizer_state_dict`, but with no state for an optimizer that has none: one that goes on from what
    a first step would make, would not do what a new one does."""
    model = entered(model, options)
    plain = PlainNames(model).plain
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    several = _several(optimizers)
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
    """:func:`set_optimizer_state_dict` and :func:`set_model_state_dict`; returns what the latter does. If one of them
    raises, the model and the optimizers are as they were, on all ranks."""
    optimizers = _several(optimizers)
    with calling("set_state_dict()", model), kept_if_it_fails(optimizers):
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return set_model_state_dict(model, model_state_dict, options=options)


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
            own_method(optimizer, "load_state_dict")(loadable)


def optimizers_to_load(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], optim_state_dict: dict[str, Any], *, options: Any
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """What :func:`set_optimizer_state_dict` loads into which optimizer. Nothing is loaded yet.

    Raises: as ``set_optimizer_state_dict``.
    """
    options = StateDictOptions.of(options)
    model = entered(model, options)
    planned: list[tuple[Optimizer, dict[str, Any]]] = []
    several = _several(optimizers)
    params = ModelParams(model, [optimizer.param_groups for optimizer in several])
    for optimizer in several:
        alone = len(several) == 1
        part = functools.partial(_part_of, optimizer, model, params, optim_state_dict, options, alone=alone)
        loadable = optim_state_dict_to_load(
            model, part, optim=optimizer, from_rank0=options.broadcast_from_rank0, strict=options.strict
        )
        planned.append((optimizer, loadable))
    return planned


def _saved(model: nn.Module, optimizer: Optimizer, raw: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    units = units_of(model)
    if units:
        return optim_state_dict(model, optimizer, raw, Form.of(options.settings().optim_state_dict_config))
    named = rekey(raw, OptimStateKeyType.PARAM_NAME, model, optimizer, None)
    if options.cpu_offload:
        named["state"] = tree_map(
            lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, named["state"]
        )
    return named


@contextlib.contextmanager
def initialised(optimizer: Optimizer, of_model: ModelParams) -> Iterator[None]:
    """Inside, a fresh optimizer has the state that a step without gradients and with a rate of zero makes, for all but
    the parameters of which this rank's shards hold nothing, and others' do."""
    elsewhere = {holder.param for holder in of_model.holders.values() if holder.rank not in holder.owners}
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
            for unit in of_model.units:
                unit.follow_parameters()  # so that what a run is of has none either
            for param, value in zip(params, values):
                param.detach().copy_(value)
        yield
    finally:
        optimizer.state.clear()


def _part_of(
    optimizer: Optimizer,
    model: nn.Module,
    params: ModelParams,
    given: Mapping[str, Any],
    options: StateDictOptions,
    *,
    alone: bool,
) -> dict[str, Any]:
    """What of ``given`` belongs to ``optimizer``, by the names that the model has now; what belongs to no parameter if
    it is ``alone``."""
    own = [name for group in optimizer.param_groups for param in group["params"] for name in params.names(param)]
    names, mine = PlainNames(model), set(own)
    dict_of = dict(given) if "state" in given or not given else _unflattened(given, map(names.plain, own))
    groups: list[dict[str, Any]] = []
    known: set[str] = set()
    for group in dict_of["param_groups"]:
        its = [names.now(name) for name in group["params"]]
        known.update(its)
        if not its or not mine.isdisjoint(its):
            groups.append({**group, "params": [name for name in its if name in mine]})
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


def trained_parts(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer] | None) -> dict[str, torch.Tensor]:
    """By the plain model's names, what this rank has of each parameter that the optimizers hold: of a sharded one as
    ``RaggedTensor``."""
    model = inside(model)
    plain = PlainNames(model).plain
    several = _several(optimizers) if optimizers is not None else []
    held = [param for optimizer in several for group in optimizer.param_groups for param in group["params"]]
    params = ModelParams(model, [optimizer.param_groups for optimizer in several])
    parts: dict[str, torch.Tensor] = {}
    for param in held:
        holder = params.holders.get(param)
        if holder is None:
            parts.update((plain(name), param) for name in params.names(param))
        else:
            for member in holder.members:
                parts[plain(member.name)] = held_param(holder.handle, member.index).part
    return parts


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


def _several(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
