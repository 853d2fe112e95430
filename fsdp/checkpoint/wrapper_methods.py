"""Methods of the wrapper that save and load state dicts, and that choose the form of state dicts."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.api import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    as_state_dict_settings,
)
from fsdp.checkpoint.forms import Form, Full, Rows
from fsdp.checkpoint.load_state_dict import load
from fsdp.checkpoint.optim_dtypes import is_marked, keep_dtypes, with_classes
from fsdp.checkpoint.optim_load import optim_state_dict_to_load
from fsdp.checkpoint.optim_names import Group, rekey
from fsdp.checkpoint.optim_state import optim_state_dict
from fsdp.checkpoint.sharded_tensors import check_no_mesh
from fsdp.checkpoint.state_dict import calling, collecting, strip_wrapper
from fsdp.flat.names import WRAPPED_MODULE, unit_of, wrappers_in
from fsdp.runtime.unit import Phase, Unit, units_in, units_of

_TORCHS = "torch.distributed.checkpoint.state_dict"


def refuse_torchs_functions(frame: FrameType | None) -> None:
    """Raise RuntimeError if ``frame`` is of a function of torch for state dicts, and ``fsdp.compat.enable_dcp()`` has
    not been called."""
    while frame is not None and frame.f_globals.get("__name__") == _TORCHS:
        original = frame.f_globals["_get_optim_state_dict"].__module__ == _TORCHS  # and was not replaced
        name = frame.f_code.co_name  # get_model_state_dict() calls our state_dict()
        if original and name[0] != "_" and name.endswith("state_dict") and name != "get_model_state_dict":
            raise RuntimeError(
                f"{name}() of {_TORCHS} does not know this package's FullyShardedDataParallel: "
                "call fsdp.compat.enable_dcp() first, or use the function of that name in fsdp.checkpoint"
            )
        frame = frame.f_back


class StateDictMethods(nn.Module):
    """Mixin of ``FullyShardedDataParallel``: state dicts of the model and of optimizers."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate as ``nn.Module.named_parameters``; inside ``summon_full_params`` without the names that wrapping
        added."""
        return self._cleaned(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate as ``nn.Module.named_buffers``; inside ``summon_full_params`` without the names that wrapping
        added."""
        return self._cleaned(super().named_buffers(*args, **kwargs))

    def _cleaned(self, named: Iterator[Any]) -> Iterator[Any]:
        summoned = unit_of(self).phase is Phase.SUMMONED
        return ((name.replace(f"{WRAPPED_MODULE}.", ""), tensor) for name, tensor in named) if summoned else named

    @property
    def _state_dict_type(self) -> StateDictType:
        return unit_of(self).state_settings.state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return _settings_of(unit_of(self)).state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return _settings_of(unit_of(self)).optim_state_dict_config

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state of the wrapped module under the original names, in the form that ``set_state_dict_type``
        chose.

        All ranks have to call it alike, outside of forward and backward. ``state_dict()`` of a module that contains
        this one, or of one inside, gives the same values. Parameters have their sharded dtype (full precision). Buffers
        and parameters that no unit owns are the live tensors.

        * ``FULL_STATE_DICT``: whole tensors, copied. With ``rank0_only`` the other ranks get only parameters and
          buffers that no unit owns. One gather per unit; the peak is the result and one unit.
        * ``SHARDED_STATE_DICT``: each rank's rows, copied, as ``ShardedTensor``, or as ``DTensor`` if a device mesh was
          given. One exchange per unit.
        * ``SHARDED_STATE_DICT`` with :class:`RaggedStateDictConfig`: the elements in each rank's shard, for
          ``torch.distributed.checkpoint``. No communication. The values are the live ones: loading into them by
          ``torch.distributed.checkpoint`` changes the model.
        * ``LOCAL_STATE_DICT``: each rank's part of each flat parameter, live, as ``ShardedTensor``. No communication.
          It fits only the same number of ranks and the same wrapping.

        The last four give a full state dict, with a warning, where no parameter is sharded (``NO_SHARD``).

        Raises:
            RuntimeError: a forward or backward is running; or ``LOCAL_STATE_DICT`` with a device mesh.
            NotImplementedError: ranks hold different experts; declared ones (``fsdp.shard_experts``) have all kinds
                but ``LOCAL_STATE_DICT``, which others have alone.
        """
        with collecting(self) as walk:
            state: dict[str, Any] = super().state_dict(
                *args,
                destination=destination,  # type: ignore[arg-type]  # torch's own default is None
                prefix=prefix,
                keep_vars=keep_vars,
            )
            walk.finish(self, state)
        strip_wrapper(state, args[1] if len(args) > 1 and not prefix else prefix)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a dict of ``state_dict()``, of a plain module, or of torch's FSDP1.

        Whole tensors need no communication: each rank copies its part, so every rank must have them. Under
        ``FullStateDictConfig(rank0_only=True)`` the other ranks may pass an empty dict; rank 0 then scatters the
        values unit by unit. Rows (``DTensor`` or ``ShardedTensor``) may be on any of the ranks that share the unit,
        however it is sharded and replicated. Parameters stay the same objects, and keep their dtype and device.

        Either all ranks load, or none: every value must fit on every rank, and all ranks must have the same parameters
        of a unit (keys, shapes and kinds of tensor). A module that is not wrapped but contains this one loads its own
        parameters at once and cannot restore them; ``fsdp.checkpoint.set_model_state_dict`` can.

        Args:
            strict: missing and unexpected keys are errors.
            assign: parameters that no unit owns, and buffers, become the dict's tensors. Sharded ones are copied, and
                must have their dtype already.

        Returns:
            the missing and unexpected keys, by their original names.

        Raises:
            RuntimeError: a value does not fit here or on another rank, in the words of ``nn.Module``; or a forward or
                backward is running.
        """
        return load(self, super().load_state_dict, state_dict, strict, assign)

    @property
    def _fqn_modifiers(self) -> Any:
        """The wrapped module's attribute, which torch's functions for state dicts read on every module before anything
        else.

        Those functions would take this rank's parts for whole parameters and optimizer states, and read no other
        attribute of a wrapper. So this property is the place to refuse them.

        Raises:
            RuntimeError: ``fsdp.compat.enable_dcp()`` has not been called.
        """
        refuse_torchs_functions(sys._getframe(1))
        raise AttributeError("_fqn_modifiers")  # __getattr__ asks the wrapped module

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the kind of state dict that the instances in ``module`` save and load, with options; None without
        instances.

        Raises:
            AssertionError: the instances differ.
            RuntimeError: the kind is ``LOCAL_STATE_DICT``, and the instances have a device mesh.
        """
        settings = _settings_in(module)
        if settings is not None and Form.of(settings.state_dict_config).is_flat:
            for unit in units_of(module):
                check_no_mesh(unit)
        return settings

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the kind of state dict that the instances in ``module`` save and load, with options (None: the
        defaults).

        Returns:
            the previous settings; the fields are None where ``module`` has no instances.

        Raises:
            RuntimeError: a config belongs to another kind.
            AssertionError: the instances have different settings now.
        """
        settings = as_state_dict_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before: Any = _settings_in(module)
        for unit in units_of(module):
            unit.set_state_settings(copy.copy(settings))
        return before if before is not None else StateDictSettings(*[None] * 3)  # type: ignore[arg-type]

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Apply ``set_state_dict_type`` inside the context, and restore the previous settings, also after an exception.

        Raises:
            ValueError: ``module`` has no instance.
        """
        if not wrappers_in(module):
            raise ValueError(f"state_dict_type: there is no FullyShardedDataParallel in this {type(module).__name__}")
        before = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for unit in units_of(module):
                unit.set_state_settings(copy.copy(before))

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: Any = None
    ) -> dict[str, Any]:
        """Return the optimizer's state by parameter name: ``{"state": {name: {...}}, "param_groups": [...]}``.

        Names are those of the plain model. Tensors have the parameters' shapes, and are whole or sharded as
        ``state_dict_type`` chose. They are copies, on CPU unless the config has ``offload_to_cpu=False``. With
        ``rank0_only``, ranks other than rank 0 of ``group`` (None: the default group) get ``{}``. All ranks have to
        call.

        Args:
            optim_state_dict: the dict to transform; None means ``optim.state_dict()``. Keys that are names are taken
                for those of a named optimizer.

        Raises:
            ValueError: ``model`` has no instances in it.
            KeyError: the optimizer holds parameters that are not in the model.
            RuntimeError: the optimizers of some ranks lack states.
            AssertionError: the ranks have different values of a state that has one value.
            NotImplementedError: a state is neither a scalar nor has one element per element of the parameter; or ranks
                hold different experts that were not declared (``fsdp.shard_experts``).
        """
        raw = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return _saved(model, optim.param_groups, raw, _optim_form(model), group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert a dict by parameter names, full or sharded, to one for ``optim.load_state_dict`` on this rank.

        The dict may be from any number of ranks, any wrapping, or a plain model (after ``rekey_optim_state_dict``). If
        ``state_dict_type`` has ``rank0_only``, only rank 0 of ``group`` (None: the default group) needs the dict. All
        ranks have to call: they compare which states they have.

        States and settings are matched by the names of parameters, in any order of groups and parameters. When
        ``optim`` loads the result, states keep the dtypes that they have in it. Element-wise states of torch's own
        optimizers get the parameter's dtype, without which those optimizers could not step. A parameter of ``optim``
        that is in no group of the dict is in no group of the result: ``optim.load_state_dict`` refuses that, unless the
        program adds the parameter.

        Args:
            is_named_optimizer: the keys of ``optim`` are names.
            load_directly: also load the result.

        Raises:
            ValueError: there is no "state", its keys are not names, a state does not fit its parameter, or groups with
                different settings have those of one group.
            KeyError: a parameter group names parameters that the optimizer does not hold.
            AssertionError: sharded values that are not in chunks of rows, over ranks that share the unit.
            RuntimeError: another rank cannot load, or its dict has states of other parameters.
        """
        from_rank0, own = _optim_form(model).rank0_only, optim.param_groups
        how = {"is_named": is_named_optimizer, "from_rank0": from_rank0, "group": group}
        loadable = _to_load(optim_state_dict, model, own, optim, **how)
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    # -- FSDP1's older calls: one form of state each, ``optim_input``, and ids for names. ------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """Return ``optim_state_dict`` with whole tensors on CPU, regardless of ``state_dict_type``."""
        return _saved(model, _groups_of(optim, optim_input), optim.state_dict(), Full(rank0_only), group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """Return ``optim_state_dict`` with sharded tensors on CPU, regardless of ``state_dict_type``."""
        return _saved(model, optim.param_groups, optim.state_dict(), Rows(), group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> dict[str, Any]:
        """Return ``optim_state_dict_to_load`` of a full dict that every rank has, without communication: ranks are not
        compared. Without ``optim``, the result is for an optimizer built from ``optim_input``, or from
        ``model.parameters()``."""
        return _to_load(full_optim_state_dict, model, _groups_of(optim, optim_input), optim, together=False)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Return ``optim_state_dict_to_load`` of a sharded dict."""
        return _to_load(sharded_optim_state_dict, model, optim.param_groups, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return ``shard_full_optim_state_dict`` of a full dict on rank 0 of ``group`` (None: the default group);
        the other ranks pass None."""
        own = _groups_of(optim, optim_input)
        return _to_load(full_optim_state_dict, model, own, optim, from_rank0=True, group=group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert a full dict with names to one with ids, or the reverse; return the same object if its keys are right
        already.

        Ids are positions in ``optim``, else in ``optim_input``, else in ``model.parameters()``. To load a full dict
        into a plain model's optimizer: ``PARAM_ID``, the plain model, its optimizer. For the reverse: ``PARAM_NAME``
        with the same two, and then ``optim_state_dict_to_load``. The names in each group are sorted.

        Raises:
            ValueError: names and ids are mixed.
            RuntimeError: parameters of ``model`` stand for several (``use_orig_params=False``).
            KeyError: a key belongs to no parameter of this model and optimizer.
        """
        rekeyed = rekey(optim_state_dict, optim_state_key_type, model, _groups_of(optim, optim_input))
        if optim is not None and is_marked(rekeyed) and optim_state_key_type is OptimStateKeyType.PARAM_ID:
            keep_dtypes(optim)
            rekeyed = with_classes(optim, rekeyed)
        return rekeyed


def _settings_of(unit: Unit) -> StateDictSettings:
    """Return the unit's own settings. With a device mesh the sharded configs announce ``DTensor`` values."""
    own = unit.state_settings
    for config in (own.state_dict_config, own.optim_state_dict_config):
        if unit.groups.mesh is not None and hasattr(config, "_use_dtensor"):
            config._use_dtensor = True
    return own


def _settings_in(module: nn.Module) -> StateDictSettings | None:
    """Return the settings of the instances in ``module``; None without instances."""
    found = {name: _settings_of(unit) for name, unit, _ in units_in(module)}
    first = next(iter(found.values()), None)
    if different := [(name, settings) for name, settings in found.items() if settings != first]:
        raise AssertionError(
            f"All FSDP instances must have the same state dict settings, but {different[0][0]!r} has "
            f"{different[0][1]} and others have {first}: set them once, on the root"
        )
    return copy.copy(first)


def _optim_form(model: nn.Module) -> Form:
    settings = StateDictMethods.get_state_dict_type(model)
    return Full() if settings is None else Form.of(settings.optim_state_dict_config)


def _saved(
    model: nn.Module, own: Sequence[Group] | None, raw: dict[str, Any], form: Form, group: Any = None
) -> dict[str, Any]:
    """Return the optimizer's state ``raw`` in this form; ``own`` are the optimizer's groups."""
    with calling("optim_state_dict()", model, wrapped=True):
        return optim_state_dict(model, own, raw, form, group=group)


def _to_load(
    state: dict[str, Any] | None, model: nn.Module, own: Sequence[Group] | None, optim: Optimizer | None, **how: Any
) -> dict[str, Any]:
    """Convert a full or sharded dict to one that the optimizer with the groups ``own`` loads."""
    with calling("optim_state_dict_to_load()", model, wrapped=True):
        return with_classes(optim, optim_state_dict_to_load(model, lambda: state, own, optim=optim, **how))


def _groups_of(optim: Optimizer | None, optim_input: Any) -> Sequence[Group] | None:
    """Return the parameter groups of ``optim``, or of an optimizer built from ``optim_input``; None if both are None.

    Raises:
        TypeError: ``optim_input`` is not iterable, or mixes parameters and groups, or a group has no "params".
        ValueError: ``optim_input`` is empty.
    """
    if optim_input is None:
        return None if optim is None else optim.param_groups
    warnings.warn(
        "The `optim_input` argument is deprecated: pass `optim` instead, or neither", FutureWarning, stacklevel=3
    )
    given: list[Any] = list(optim_input) if isinstance(optim_input, Iterable) else [optim_input]
    if given and all(isinstance(item, torch.Tensor) for item in given):
        return [{"params": given}]
    if given and all(isinstance(item, dict) and "params" in item for item in given):
        return [{**group, "params": list(group["params"])} for group in given]
    raise (TypeError if given else ValueError)(
        'optim_input should be an iterable of parameters, or of parameter groups with "params", as given to the '
        f"optimizer, but got {sorted({type(item).__name__ for item in given})}"
    )
