"""Warnings about habits that raise no error with sharded parameters, but change the training."""

from __future__ import annotations

import functools
import gc
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from fsdp import environment
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.names import clean
from fsdp.flat.views import stepped_params

if TYPE_CHECKING:
    from fsdp.runtime.unit import Unit

_ROUNDING = {torch.bfloat16, torch.float16}
_OF_WHOLE_PARAMETERS = {  # computed with their shapes, norms or products
    "adafactor",
    "distributedshampoo",
    "fusedlamb",
    "lamb",
    "lars",
    "lbfgs",
    "muon",
    "shampoo",
    "singledevicemuon",
    "soap",
}


def warn_of_stale(optimizer: Optimizer, params: Iterable[Any]) -> None:
    """Warn if ``optimizer`` holds parameters that modules no longer have."""
    params = list(params)
    stale = [param._fsdp_owner for param in params if getattr(param, "_fsdp_replaced", False)]
    if stale:
        warn_user(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(params)} parameters from before they were wrapped, "
            f"the first one {stale[0]}, and steps nothing with them: no optimizer holds the flat parameters that took "
            "their place. Build the optimizer from the wrapped module's parameters(), or pass use_orig_params=True"
        )


def warn_of_empty_groups(optimizer: Optimizer) -> None:
    """Warn of parameter groups that are probably empty because the model is wrapped: with options of their own, or
    where flat parameters hide the parameters of inner modules."""
    groups = optimizer.param_groups
    flat = any(getattr(param, "_is_flat_param", False) for group in groups for param in group["params"])
    options = [(group.get("lr"), group.get("weight_decay")) for group in groups]
    for number, group in enumerate(groups):
        if not group["params"] and (flat or options.count(options[number]) < len(groups)):
            warn_user(
                f"parameter group {number} of {type(optimizer).__name__} is empty. Parameters of a wrapped model are "
                "1-D, so p.dim() puts all of them in one group; and with use_orig_params=False the parameters() of a "
                "module inside of a wrapped one are none. Pass use_orig_params=True; ask fsdp.global_shape(p), or make "
                "the groups by fsdp.param_groups(model, weight_decay=...)"
            )


def warn_of_habits(optimizer: Optimizer) -> None:
    """Warn at the first step of ``optimizer``, which holds shards, of uses that need whole parameters.

    Raises:
        RuntimeError: the optimizer sends parameters between ranks as if these had equal ones.
    """
    groups, kinds = optimizer.param_groups, {base.__name__.lower() for base in type(optimizer).__mro__}
    if "zeroredundancyoptimizer" in kinds:
        raise RuntimeError(
            f"{type(optimizer).__name__} divides optimizer state among ranks that hold the same parameters, but those "
            "of a wrapped model are sharded, and so is the state of any optimizer of theirs. Use the class that it was "
            "given as optimizer_class"
        )
    if kinds & _OF_WHOLE_PARAMETERS:
        warn_user(
            f"{type(optimizer).__name__} computes with the norms, shapes or products of whole parameters, and is given "
            "this rank's parts of them, as vectors: it does not train as with the plain model, nor alike on another "
            "number of ranks. Step whole parameters by fsdp.optim.WholeParamOptimizer, or use an optimizer that steps "
            "each element by itself"
        )
    params = [param for group in groups for param in group["params"]]
    for param in params:
        if getattr(param, "_is_flat_param", False) and param._backward_hooks:
            warn_of_hooks("a flat parameter")
    low = [param.dtype for param in params if getattr(param, "_fsdp_flattened", False) and param.dtype in _ROUNDING]
    if low and type(optimizer).step.__module__.startswith("torch.optim."):  # the rest may compensate
        warn_user(
            f"{type(optimizer).__name__} trains {len(low)} of {len(params)} parameters in {low[0]}: an update "
            f"of less than 1/{4 / torch.finfo(low[0]).eps:.0f} of a value is rounded away, as it would be under "
            "DistributedDataParallel. To compute in low precision and train in float32, wrap the model in float32 "
            f"(model.float() before) and pass mixed_precision=MixedPrecision(param_dtype={low[0]})"
        )


def warn_of_unowned(optimizer: Optimizer, owned: Container[int]) -> None:
    """Warn at the first step of ``optimizer``, which holds parameters of wrapped modules, of parameters with gradients
    that no unit owns. ``owned`` has the ids of the parameters that units own. Gradients of the other ones are not
    reduced, so their values differ between ranks after the step.

    Ignored parameters are not counted, and neither are DTensors and parameters under DistributedDataParallel, whose
    gradients are reduced elsewhere.
    """
    others = {
        id(param): param
        for param in stepped_params(optimizer)
        if param.grad is not None and param.numel() and id(param) not in owned and not isinstance(param, DTensor)
    }
    for mark in ("_fsdp_flattened", "_fsdp_replaced", "_fsdp_ignored"):
        others = {of: param for of, param in others.items() if not getattr(param, mark, False)}
    if not others:
        return
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]  # to find names
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            for param in module.parameters():
                others.pop(id(param), None)
    inner = {id(child) for module in modules for child in module._modules.values()}
    names: dict[int, str] = {}
    for module in modules:
        if id(module) not in inner:
            names.update((id(param), clean(name)) for name, param in module.named_parameters() if id(param) in others)
    if others:
        first, param = next(iter(others.items()))
        name = repr(names[first]) if first in names else f"one of shape {tuple(param.shape)}"
        warn_user(
            f"{type(optimizer).__name__} steps parameters that no wrapped module owns ({len(others)}: {name}"
            f"{', ...' if len(others) > 1 else ''}) besides those of wrapped modules. Nobody reduces their gradients, "
            "so their values differ between ranks after a step. Wrap a module that contains them as well, after all "
            "layers are there; or name them in ignored_states= and reduce their gradients yourself"
        )


def check_reduced(optimizer: Optimizer, units: Iterable[Unit], *, first: bool) -> None:
    """Check the gradients of ``units`` before a step of ``optimizer``.

    Gradients of replicas that were not reduced cause a warning at the ``first`` step, unless they were changed in
    place, as by a reduction of the program's own.

    Raises:
        RuntimeError: the step would apply unreduced gradients of whole parameters to shards.
    """
    ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
    of_shards, of_replicas = list[str](), list[str]()
    for unit in units:
        for bucket in unit.gradients:
            names, changed = bucket.accumulator.held_by(ids)
            if unit.groups.sharded:
                of_shards += [f"{name} of {unit.name}" for name in names]
            elif unit.groups.reduces and first and not changed:
                of_replicas += [f"{name} of {unit.name}" for name in names]
    for names in (of_shards, of_replicas):
        if not names:
            continue
        several = f"{len(names)} parameters have" if len(names) > 1 else "1 parameter has"
        words = (
            f"{several} gradients from no_sync() that were never reduced. Run the last micro-batch's backward outside "
            f"no_sync(), then step. {type(optimizer).__name__} holds {names[0]}"
            f"{' and others' if len(names) > 1 else ''}"
        )
        if names is of_shards:
            raise RuntimeError(words)
        warn_user(f"{words}: ranks step by gradients of their own, and their parameters differ from then on")


def warn_of_steps(here: int, elsewhere: int) -> None:
    """Warn that optimizers made different steps on this rank and on another one: their number since the last backward,
    or, where it is the same, their learning rates."""
    if here == elsewhere:
        found = "stepped an optimizer with other learning rates on this rank than on another one"
    else:
        found = f"made {here} optimizer steps on this rank, and {elsewhere} on another one"
    warn_user(
        f"Since the last backward the program {found}. Each rank steps its own part of every parameter, so that the "
        "model becomes a mixture. Let all ranks decide by equal numbers: average a loss over the ranks before a "
        "scheduler or a test for NaN reads it, and scale losses by fsdp.sharded_grad_scaler.ShardedGradScaler"
    )


def warn_of_hooks(name: str) -> None:
    """Warn that a hook on parameter ``name`` will never fire."""
    warn_user(
        f"a hook that was registered on {name} by register_hook() never fires: gradients of flat parameters come "
        "reduced and sharded, not from autograd. Pass use_orig_params=True, or use "
        "register_post_accumulate_grad_hook()"
    )


def warn_of_initial_values(now: Mapping[str, str | None], by_rank: Mapping[int, Sequence[str | None]]) -> None:
    """Warn if ranks wrapped parameters with different values.

    Args:
        now: by parameter a digest of the values, or None if values were loaded since.
        by_rank: the digests of each rank at the first pass or call, in the same order.
    """
    found = []
    for (name, digest), *then in zip(now.items(), *by_rank.values()):
        if None not in (digest, *then) and len(set(then)) > 1:
            found.append((name, [rank for rank, other in zip(by_rank, then) if other != then[0]]))
    if found:
        (name, ranks), *more = found
        further = f", nor were {len(more)} others" if more else ""
        warn_user(
            f"The ranks began with different values: when it was wrapped, {name} on rank {', '.join(map(str, ranks))} "
            f"was not what it was on rank {next(iter(by_rank))}{further}. Each rank has kept its own part of each "
            "parameter, so the model is a mixture, where DistributedDataParallel takes all of it from rank 0. Pass "
            "sync_module_states=True, or seed all ranks alike before the model is built, or load a checkpoint after "
            "wrapping"
        )


@functools.cache
def check_variables() -> None:
    """Check the environment, once in a process, and warn of unknown variables.

    Raises:
        ValueError: a variable has an invalid value.
    """
    environment.check()
    for message in environment.unknown():
        warn_user(message)
