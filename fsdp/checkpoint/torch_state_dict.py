"""State dicts by the functions of ``torch.distributed.checkpoint.state_dict``: of the model, of optimizers, and of
both.

The same calls serve wrapped, partly wrapped and plain models. Keys are those of the plain model, without the prefixes
of ``DistributedDataParallel`` and ``torch.compile``. ``torch.distributed.checkpoint`` saves the dicts of
``get_state_dict`` and loads into them; ``set_state_dict`` loads them back into the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.api import StateDictSettings
from fsdp.checkpoint import by_name
from fsdp.checkpoint.by_name import Optimizers, as_list, groups_of, own_method, settings_of
from fsdp.checkpoint.forms import Full, Ragged, Rows
from fsdp.checkpoint.load_state_dict import Backup, load_alike, load_from_first
from fsdp.checkpoint.optim_dtypes import first_step, with_classes
from fsdp.checkpoint.optim_names import ModelParams
from fsdp.checkpoint.state_dict import calling, check_no_experts, versioned
from fsdp.comm.consensus import ranks_of
from fsdp.comm.groups import default_group
from fsdp.flat.names import PlainNames, clean, inside, plain_modules
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

    @property
    def settings(self) -> StateDictSettings:
        """The corresponding settings of the units."""
        cpu = self.cpu_offload
        if self.full_state_dict:
            return settings_of(Full, cpu, rank0_only=cpu)
        return settings_of(Ragged if self.ragged else Rows, cpu)

    @property
    def has_result(self) -> bool:
        """False on the ranks that get ``{}``."""
        on_rank0 = self.full_state_dict and self.cpu_offload and torch.distributed.is_initialized()
        return not on_rank0 or default_group().rank() == 0


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
    state = by_name.model_state(model, options.settings)
    versions = getattr(state, "_metadata", {})
    if submodules:
        modules = plain_modules(inside(model))
        prefixes = [f"{path}." if path else "" for path, module in modules if module in submodules]
        found = [(key, prefix) for key in state for prefix in prefixes if key.startswith(prefix)]
        keep = options.keep_submodule_prefixes
        state = {key if keep else key.removeprefix(prefix): state[key] for key, prefix in found}
    if options.ignore_frozen_params:
        for name in _frozen(inside(model)):
            state.pop(name, None)
    if not options.has_result:
        return {}
    to_cpu = options.cpu_offload
    state = {k: v.cpu() if to_cpu and isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return versioned(state, versions) if versions and not submodules else state


def set_model_state_dict(model: nn.Module, model_state_dict: dict[str, Any], *, options: Any = None) -> Any:
    """Load a dict of :func:`get_model_state_dict`, or of a plain model. All ranks have to call.

    A dict ``{submodule: its state dict}``, which is deprecated in torch, is accepted as well.

    Either all ranks that share a wrapped module load, or none. Only effects of a module's own ``set_extra_state`` or
    ``_load_from_state_dict`` cannot always be undone; a warning is given then.

    Returns:
        the missing and unexpected keys.

    Raises: as ``load_state_dict()`` of a wrapped module, and
        ValueError: a key is a module that is not in the model.
    """
    options = StateDictOptions.of(options)
    with calling("set_model_state_dict()", model):
        from_first = options.broadcast_from_rank0 and torch.distributed.is_initialized()
        if from_first:
            check_no_experts(model, "set_model_state_dict(broadcast_from_rank0)")
        load = load_from_first if from_first else load_alike
        state = _with_names(model, model_state_dict)
        found = by_name.load_model_state(load, model, state, options.settings, strict=options.strict)
        plain = PlainNames(inside(model)).plain
        return type(found)(*(list(map(plain, keys)) for keys in found))


def _with_names(model: nn.Module, state: Any) -> Any:
    """Replace submodules, as the keys of state dicts in ``state``, by the plain model's names."""
    if not isinstance(state, Mapping) or not any(isinstance(key, nn.Module) for key in state):
        return state
    prefixes = {module: f"{path}." if path else "" for path, module in plain_modules(inside(model))}
    if unknown := [type(key).__name__ for key in state if key not in prefixes]:
        raise ValueError(f"each key has to be a module in the model, but a {unknown[0]} is not in it")
    return {prefixes[key] + name: value for key, values in state.items() for name, value in values.items()}


def _frozen(model: nn.Module) -> list[str]:
    """List the plain names of the parameters that do not require grad; all names of a shared one."""
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    holders = ModelParams(model).holders.values()
    names += [n for holder in holders if not holder.param.requires_grad for m in holder.members for n in m.names]
    return [*map(PlainNames(model).plain, map(clean, names))]


# -- optimizers -----------------------------------------------------------------------------------------


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (:func:`get_model_state_dict`, :func:`get_optimizer_state_dict`)."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None, options: Any = None
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
        params = ModelParams(model, groups_of(several))
        for optimizer in several:
            stack.enter_context(initialised(optimizer, params))
            _check_joinable(optimizer, len(several), options)
        joined = by_name.optimizer_state(model, several, options.settings)
    if not options.has_result:
        return {}
    return _flattened(joined) if options.flatten_optimizer_state_dict else joined


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: Any = None,
) -> Any:
    """Call :func:`set_optimizer_state_dict` and :func:`set_model_state_dict`; return the result of the latter. If
    one of them raises, the model and the optimizers are unchanged on all ranks."""
    optimizers = as_list(optimizers)
    with calling("set_state_dict()", model), Backup(optimizers=optimizers):
        set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return set_model_state_dict(model, model_state_dict, options=options)


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: dict[str, Any], *, options: Any = None
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
    optimizers, options = as_list(optimizers), StateDictOptions.of(options)
    how = {"strict": options.strict, "from_rank0": options.broadcast_from_rank0}

    def load_each() -> None:
        several = by_name.optimizers_to_load(model, optimizers, optim_state_dict, options.settings, **how)
        for optimizer, loadable in several:
            own_method(optimizer, "load_state_dict")(with_classes(optimizer, loadable))

    with calling("set_optimizer_state_dict()", model), Backup(optimizers=optimizers):
        ranks_of(units_of(model)).together("load optimizer state", load_each)


def initialised(optimizer: Optimizer, of_model: ModelParams) -> contextlib.AbstractContextManager[None]:
    """Give a fresh optimizer the state of a step without gradients and with a rate of zero, inside the context.

    Parameters of which this rank's shards hold no elements get none if another rank holds some.
    """
    elsewhere = {holder.param for holder in of_model.holders.values() if holder.rank not in holder.owners}
    has_begun = optimizer.state or any(param.grad is not None for param in stepped_params(optimizer))
    return contextlib.nullcontext() if has_begun else first_step(optimizer, elsewhere)


def _check_joinable(optimizer: Optimizer, optimizers: int, options: StateDictOptions) -> None:
    """Check that the state of one of several ``optimizers`` can be joined with the others into one dict."""
    trained = {param for group in optimizer.param_groups for param in group["params"]}
    others = [key for key in optimizer.state if key not in trained]
    if others and (optimizers > 1 or options.flatten_optimizer_state_dict):
        raise ValueError(
            f"the optimizer's state has {', '.join(map(repr, others))}, which belongs to no parameter. That comes back "
            "only from the state of one optimizer by itself, and not flattened: remove it, or save it apart"
        )
    if options.flatten_optimizer_state_dict:
        names = [name for param in trained & optimizer.state.keys() for name in optimizer.state[param]]
        if odd := [name for name in names if not isinstance(name, str)]:
            raise ValueError(f"in a flattened state dict names of states have to be strings, but one is {odd[0]!r}")


def _flattened(joined: dict[str, Any]) -> dict[str, Any]:
    flat = {f"state.{name}.{key}": value for name, state in joined["state"].items() for key, value in state.items()}
    for group in joined["param_groups"]:
        for name in group["params"]:
            flat.update((f"param_groups.{name}.{key}", value) for key, value in group.items() if key != "params")
    return flat
