"""The methods of the wrapper that make and take state dicts, choose their kind, and name what is in it; thin over this
floor's rooms."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
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
from fsdp.checkpoint import optim_load, optim_names, optim_state
from fsdp.checkpoint.forms import Form, Full, Rows
from fsdp.checkpoint.load_state_dict import load
from fsdp.checkpoint.sharded_tensors import check_no_mesh
from fsdp.checkpoint.state_dict import calling, collecting, strip_wrapper
from fsdp.flat.names import WRAPPED_MODULE, unit_of, wrappers_in
from fsdp.runtime.unit import Phase, Unit, units_in, units_of

_TORCHS = "torch.distributed.checkpoint.state_dict"
_STOPPED = {  # all but get_model_state_dict, which asks us for state_dict()
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
}


class StateDictMethods(nn.Module):
    """What ``FullyShardedDataParallel`` has from here."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``; inside ``summon_full_params`` without the parts that wrapping added."""
        return self._cleaned(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``nn.Module.named_buffers``; inside ``summon_full_params`` without the parts that wrapping added."""
        return self._cleaned(super().named_buffers(*args, **kwargs))

    def _cleaned(self, named: Iterator[Any]) -> Iterator[Any]:
        summoned = unit_of(self).phase is Phase.SUMMONED
        return ((name.replace(f"{WRAPPED_MODULE}.", ""), its) for name, its in named) if summoned else named

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
        """The state of the wrapped module under its original names, in the form that ``set_state_dict_type`` chose.

        All ranks have to call it alike, and not in the middle of a forward or backward. ``state_dict()`` of a module
        that contains this one, or of one inside, gives the same values. Parameters have their sharded dtype (full
        precision), and buffers and parameters that no unit owns are the live tensors.

        * ``FULL_STATE_DICT``: whole tensors, copied. With ``rank0_only`` other ranks get only what no unit owns. One
          gather per unit; the peak is the result and one unit.
        * ``SHARDED_STATE_DICT``: each rank's rows, copied, as ``ShardedTensor``, or as ``DTensor`` if a device mesh was
          given. One exchange per unit.
        * ``SHARDED_STATE_DICT`` with :class:`RaggedStateDictConfig`: what each rank's shard holds, for
          ``torch.distributed.checkpoint``. No communication. The values are the live ones: loading into them by
          ``torch.distributed.checkpoint`` changes the model.
        * ``LOCAL_STATE_DICT``: each rank's part of each flat parameter, live, as ``ShardedTensor``. No communication,
          and of use only at the same number of ranks and with the same wrapping.

        The last four give a full state dict, with a warning, where nothing is sharded (``NO_SHARD``).

        Raises:
            RuntimeError: a forward or backward is under way; or ``LOCAL_STATE_DICT`` with a device mesh.
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
        """Load what ``state_dict()`` gives, or a plain module's or torch's FSDP1's.

        Whole tensors take no communication: each rank copies its own part, so all of them have to have them. Under
        ``FullStateDictConfig(rank0_only=True)`` the other ranks may pass an empty dict; rank 0 then hands out its
        values unit by unit. Rows (``DTensor`` or ``ShardedTensor``) may be of any of the ranks that share the unit,
        however it is sharded over them and replicated. Parameters stay the same objects, and keep their dtype and
        device.

        Nothing is loaded unless everything fits on every rank, and all were given the same parameters of a unit: keys,
        shapes and kinds of tensor. (A module that is not wrapped but contains this one loads its own parameters as it
        goes, and cannot take back what this one refuses: ``fsdp.checkpoint.set_model_state_dict`` can.)

        Args:
            strict: whether missing and unexpected keys are errors.
            assign: parameters that no unit owns, and buffers, become the dict's tensors. Sharded ones are copied, and
                have to have their dtype already.

        Returns:
            the missing and unexpected keys, by their original names.

        Raises:
            RuntimeError: something does not fit here or on another rank, in the words of ``nn.Module``; or a forward
                or backward is under way.
        """
        return load(self, super().load_state_dict, state_dict, strict, assign)

    @property
    def _fqn_modifiers(self) -> Any:
        """What torch's functions for state dicts look for on every module before they do anything.

        The wrapped module's. They would take this rank's parts for whole parameters and optimizer states, and ask a
        wrapper for nothing else: so it is here that they are stopped.

        Raises:
            RuntimeError: ``fsdp.compat.enable_dcp()`` has not been called.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == _TORCHS:
            theirs = frame.f_globals["_get_optim_state_dict"].__module__ == _TORCHS  # and was not replaced
            if theirs and frame.f_code.co_name in _STOPPED:
                raise RuntimeError(
                    f"{frame.f_code.co_name}() of {_TORCHS} does not know this package's FullyShardedDataParallel: "
                    "call fsdp.compat.enable_dcp() first, or use the function of that name in fsdp.checkpoint"
                )
            frame = frame.f_back
        raise AttributeError("_fqn_modifiers")  # __getattr__ asks the wrapped module

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """The kind of state dict that the instances in ``module`` make and take, with its options; None without
        instances.

        Raises:
            AssertionError: they differ.
            RuntimeError: it is ``LOCAL_STATE_DICT``, and they have a device mesh.
        """
        settings = _settings_in(module)
        if settings is not None and settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
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
        """Let the instances in ``module`` make and take this kind of state dict, with these options (None: its
        defaults).

        Returns:
            the settings before; their fields are None where ``module`` has no instances.

        Raises:
            RuntimeError: a config that belongs to another kind.
            AssertionError: the instances have different settings now.
        """
        settings = as_state_dict_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before: Any = _settings_in(module)
        for unit in units_of(module):
            unit.state_settings = copy.copy(settings)
        return before if before is not None else StateDictSettings(*[None] * 3)  # type: ignore[arg-type]

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """``set_state_dict_type`` inside; the settings before are back afterwards, also after an exception.

        Raises:
            ValueError: ``module`` has no instance, so there is nothing to set.
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
                unit.state_settings = copy.copy(before)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name: ``{"state": {name: {...}}, "param_groups": [...]}``.

        Names are those of the plain model. Tensors have the parameters' shapes, and are whole or sharded as
        ``state_dict_type`` says; they are copies, on CPU unless its config says otherwise. With ``rank0_only``, ranks
        other than rank 0 of ``group`` (None: the default group) get ``{}``. All ranks have to call.

        Args:
            optim_state_dict: what to transform; None means ``optim.state_dict()``. Keys that are names are taken for
                those of a named optimizer.

        Raises:
            ValueError: ``model`` has no instances in it.
            KeyError: the optimizer holds parameters that are not in the model.
            RuntimeError: the optimizers of some ranks lack states that others have.
            AssertionError: the ranks have different values of a state that has one value.
            NotImplementedError: a state is neither a scalar nor has one element per element of its parameter.
        """
        form = _wanted(model)
        raw = optim.state_dict() if optim_state_dict is None else optim_state_dict
        with _calling("optim_state_dict()", model):
            return optim_state.optim_state_dict(model, optim, raw, form, group=group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """A dict by parameter names, full or sharded, as one for ``optim.load_state_dict`` on this rank.

        The dict may come from any number of ranks, any wrapping, or a plain model (after ``rekey_optim_state_dict``).
        If ``state_dict_type`` says ``rank0_only``, only rank 0 of ``group`` (None: the default group) need have it.

        States and settings are matched by the names of parameters, whatever the order of the groups and of the
        parameters in them. When ``optim`` loads the result, states keep the dtypes that they have in it; but what
        torch's own optimizers have of each element gets its parameter's, without which they could not step. A parameter
        of ``optim`` that no group of the dict has is in no group of the result: ``optim.load_state_dict`` refuses that,
        unless the program adds it.

        Args:
            is_named_optimizer: ``optim`` goes by names.
            load_directly: load it as well.

        Raises:
            ValueError: there is no "state", its keys are not names, a state does not fit its parameter, or groups with
                different settings have those of one group.
            KeyError: a parameter group names parameters that the optimizer does not hold.
            AssertionError: sharded values that are not in chunks of rows, over ranks that share the unit.
        """
        loadable = StateDictMethods._optim_state_dict_to_load_impl(
            optim_state_dict,
            model,
            optim=optim,
            rank0_only=_wanted(model).rank0_only,
            is_named_optimizer=is_named_optimizer,
            group=group,
        )
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """``optim_state_dict`` with whole tensors on CPU, whatever ``state_dict_type`` says."""
        return StateDictMethods._optim_state_dict_impl(
            model, optim, optim.state_dict(), optim_input, rank0_only, group=group
        )

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """``optim_state_dict`` with sharded tensors on CPU, whatever ``state_dict_type`` says."""
        return StateDictMethods._optim_state_dict_impl(
            model, optim, optim.state_dict(), rank0_only=False, full_state_dict=False, group=group
        )

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict_to_load`` of a full dict that every rank has. Without ``optim``, for one that was built
        from ``optim_input``, or from ``model.parameters()``."""
        return StateDictMethods._optim_state_dict_to_load_impl(full_optim_state_dict, model, optim_input, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """``optim_state_dict_to_load`` of a sharded dict."""
        return StateDictMethods._optim_state_dict_to_load_impl(
            sharded_optim_state_dict, model, optim=optim, full_state_dict=False
        )

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """``shard_full_optim_state_dict`` of a full dict that rank 0 of ``group`` (None: the default group) has; the
        others pass None."""
        return StateDictMethods._optim_state_dict_to_load_impl(
            full_optim_state_dict, model, optim_input, optim, rank0_only=True, group=group
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """A full dict with names as one with ids, or the other way round; the same object if its keys are right.

        Ids are positions in ``optim``, else in ``optim_input``, else in ``model.parameters()``. To load a full dict
        into a plain model's optimizer: ``PARAM_ID``, the plain model, its optimizer. The other way: ``PARAM_NAME``
        with the same two, and then ``optim_state_dict_to_load``. The names in each group come sorted.

        Raises:
            ValueError: names and ids are mixed.
            RuntimeError: parameters of ``model`` stand for several (``use_orig_params=False``).
            KeyError: a key is not one of this model and optimizer.
        """
        StateDictMethods._warn_optim_input(optim_input)
        return optim_names.rekey(optim_state_dict, optim_state_key_type, model, optim, optim_input)

    @staticmethod
    def _optim_state_dict_impl(
        model: nn.Module,
        optim: Optimizer | None,
        optim_state_dict: dict[str, Any],
        optim_input: Any = None,
        rank0_only: bool = True,
        full_state_dict: bool = True,
        group: Any = None,
        cpu_offload: bool = True,
        *,
        _stacklevel: int = 1,
    ) -> dict[str, Any]:
        """What the methods that make a dict of a given form share."""
        StateDictMethods._warn_optim_input(optim_input, stacklevel=_stacklevel + 1)
        form = (Full if full_state_dict else Rows)(rank0_only and full_state_dict, cpu_offload)
        with _calling("optim_state_dict()", model):
            return optim_state.optim_state_dict(
                model, optim, optim_state_dict, form, optim_input=optim_input, group=group
            )

    @staticmethod
    def _optim_state_dict_to_load_impl(
        optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        full_state_dict: bool = True,
        rank0_only: bool = False,
        is_named_optimizer: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What the methods that take a dict share; full and sharded ones are told apart by what is in them."""
        StateDictMethods._warn_optim_input(optim_input, stacklevel=2)
        with _calling("optim_state_dict_to_load()", model):
            return optim_load.optim_state_dict_to_load(
                model,
                lambda: optim_state_dict,
                optim=optim,
                optim_input=optim_input,
                is_named=is_named_optimizer,
                from_rank0=rank0_only,
                group=group,
            )

    @staticmethod
    def _warn_optim_input(optim_input: Any, *, stacklevel: int = 1) -> None:
        if optim_input is not None:
            warnings.warn(
                "The `optim_input` argument is deprecated: pass `optim` instead, or neither",
                FutureWarning,
                stacklevel=stacklevel + 2,
            )

    @staticmethod
    def _is_using_optim_input(optim_input: Any, optim: Optimizer | None) -> bool:
        """Whether ids are positions in ``optim_input`` (or ``model.parameters()``) rather than in ``optim``."""
        return optim_input is not None or optim is None


def _settings_of(unit: Unit) -> StateDictSettings:
    """Its own, which tell whether sharded values are ``DTensor``: so they are with a device mesh."""
    own = unit.state_settings
    for config in (own.state_dict_config, own.optim_state_dict_config):
        if unit.mesh is not None and hasattr(config, "_use_dtensor"):
            config._use_dtensor = True
    return own


def _settings_in(module: nn.Module) -> StateDictSettings | None:
    """Those of the instances in ``module``; None without instances, AssertionError if they differ."""
    settings: StateDictSettings | None = None
    for name, unit, _ in units_in(module):
        own = _settings_of(unit)
        if settings is not None and own != settings:
            raise AssertionError(
                f"All FSDP instances must have the same state dict settings, but {name!r} has {own} and others "
                f"have {settings}: set them once, on the root"
            )
        settings = copy.copy(own)
    return settings


def _wanted(model: nn.Module) -> Form:
    """The form of optimizer state that is in force."""
    settings = StateDictMethods.get_state_dict_type(model)
    return Full() if settings is None else Form.of(settings.optim_state_dict_config)


@contextlib.contextmanager
def _calling(call: str, model: nn.Module) -> Iterator[None]:
    """Inside, ``call`` of a model that has instances in it."""
    if not units_of(model):
        raise ValueError(
            f"expected a model with FullyShardedDataParallel modules in it, but {type(model).__name__} has none; the "
            "optimizer state of a plain model is optimizer.state_dict()"
        )
    with calling(call, model):
        yield
