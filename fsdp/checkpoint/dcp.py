"""Model state with the signatures of ``torch.distributed.checkpoint.state_dict``; :mod:`fsdp.checkpoint.dcp_optim` has
optimizer state.

The same calls serve wrapped, partly wrapped and plain models; keys are the plain model's, without what
``DistributedDataParallel`` and ``torch.compile`` add. What comes out of ``get_state_dict`` can be saved, and loaded
into, by ``torch.distributed.checkpoint``, and goes back by ``set_state_dict``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.checkpoint.load_state_dict import Loading, load_alike, load_from_first, prepare
from fsdp.checkpoint.optim_names import ModelParams
from fsdp.checkpoint.state_dict import calling
from fsdp.comm.groups import default_group
from fsdp.flat.names import PlainNames, clean, inside, plain_modules, unit_of
from fsdp.flat.ownership import torchs_own
from fsdp.runtime.unit import units_of


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

    def settings(self, *, sharded: bool = True) -> StateDictSettings:
        """The kind of state dict that these ask for; what is not ``sharded`` has full state only."""
        cpu, kind = self.cpu_offload, StateDictType.SHARDED_STATE_DICT
        if self.ragged:
            return StateDictSettings(kind, RaggedStateDictConfig(cpu), RaggedOptimStateDictConfig(cpu))
        if sharded and not self.full_state_dict:
            return StateDictSettings(kind, ShardedStateDictConfig(cpu), ShardedOptimStateDictConfig(cpu))
        one_rank = self.full_state_dict and cpu
        full = FullStateDictConfig(cpu, one_rank), FullOptimStateDictConfig(cpu, one_rank)
        return StateDictSettings(StateDictType.FULL_STATE_DICT, *full)


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The model's state by the plain model's names; all ranks have to call.

    Args:
        submodules: only what is in these.
        options: :class:`StateDictOptions`, ours or torch's.
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
    """Load what :func:`get_model_state_dict` gives, or a plain model's. All ranks have to call.

    Nothing is loaded unless everything fits, on every rank that shares a wrapped module. Only what a module's own
    ``set_extra_state`` or ``_load_from_state_dict`` has done cannot always be taken back; a warning says so.

    Returns:
        the missing and unexpected keys.

    Raises: as ``load_state_dict()`` of a wrapped module.
    """
    options = StateDictOptions.of(options)
    plain = PlainNames(entered(model, options)).plain
    with calling("set_model_state_dict()", model):
        from_first = options.broadcast_from_rank0 and torch.distributed.is_initialized()
        found = _loaded(load_from_first if from_first else load_alike, model, model_state_dict, options)
        return type(found)(*(list(map(plain, keys)) for keys in found))


def prepare_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> Loading:
    """All of :func:`set_model_state_dict` that can fail, on this rank alone; see
    :func:`fsdp.checkpoint.load_state_dict.prepare`."""
    loading: Loading = _loaded(prepare, model, model_state_dict, StateDictOptions.of(options))
    return loading


def _loaded(way: Callable[..., Any], model: nn.Module, state: Any, options: StateDictOptions) -> Any:
    """What ``way`` returns that loads ``state``, which is by the plain model's names, by its ``load_state_dict``; by
    that of ``nn.Module`` if it is wrapped."""
    model = entered(model, options)
    into_module = functools.partial(nn.Module.load_state_dict, model)
    if unit_of(model) is None:
        into_module = own_method(model, "load_state_dict")
    if isinstance(state, Mapping):
        now = PlainNames(model).now
        state = {now(key): value for key, value in state.items()}
    with _kind(model, options):
        return way(model, into_module, state, options.strict)


# -- names and kinds ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _kind(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    """Inside, all units have the settings that the options ask for."""
    before = {unit: unit.state_settings for unit in units_of(model)}
    try:
        for unit in before:
            unit.state_settings = options.settings(sharded=unit.groups.sharded)
        yield
    finally:
        for unit, its in before.items():
            unit.state_settings = its


def own_method(of: nn.Module | Optimizer, name: str) -> Any:
    """Its method ``name``; its class's if torch's ``_patch_model_state_dict`` has put what calls us in that place."""
    method = getattr(of, name)
    patched = getattr(method, "__module__", None) == "torch.distributed.checkpoint.state_dict"
    return functools.partial(getattr(type(of), name), of) if patched else method


def entered(model: nn.Module, options: StateDictOptions) -> nn.Module:
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
    holders = ModelParams(model).holders.values()
    names += [n for holder in holders if not holder.param.requires_grad for m in holder.members for n in m.names]
    return [clean(name) for name in names]


def default_rank() -> int:
    return int(default_group().rank()) if torch.distributed.is_initialized() else 0
