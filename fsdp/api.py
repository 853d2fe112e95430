"""The configuration types: sharding strategies, prefetching, precision, offload and kinds of state dict.

Names, members, values, fields and defaults are those of ``torch.distributed.fsdp``: callers build members from integers
(``ShardingStrategy(1)``) and from names (``ShardingStrategy["FULL_SHARD"]``).

The ``as_*`` functions convert a caller's argument to these types. They also accept torch's own enum members and
dataclasses, recognised by class name and by member or field names, because a program may have imported torch's types
before this package. For anything else they raise an error that names the argument.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "RaggedOptimStateDictConfig",
    "RaggedStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(enum.Enum):
    """The sharding of parameters, gradients and optimizer state, and the lifetime of gathered parameters.

    * ``FULL_SHARD``: parameters, gradients and optimizer state are sharded; the gathered parameters are released after
      forward and gathered again for backward.
    * ``SHARD_GRAD_OP``: as ``FULL_SHARD``, but parameters stay gathered from forward until the end of backward.
    * ``NO_SHARD``: everything is replicated; gradients are all-reduced.
    * ``HYBRID_SHARD``: ``FULL_SHARD`` inside a shard group, replicated across the replica groups.
    * ``_HYBRID_SHARD_ZERO2``: ``SHARD_GRAD_OP`` inside a shard group, replicated across the replica groups.
    """

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


class BackwardPrefetch(enum.Enum):
    """The time when backward gathers the next unit: before the current unit's gradients are computed (``BACKWARD_PRE``,
    most overlap and most memory) or after (``BACKWARD_POST``)."""

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


@dataclasses.dataclass
class MixedPrecision:
    """The dtypes of compute, reduction and buffers. ``None`` leaves the respective dtype alone.

    Attributes:
        param_dtype: dtype of the gathered parameters, and so of forward, backward and all-gather. The sharded
            parameters that the optimizer sees keep their own dtype.
        reduce_dtype: dtype of the gradient reduction; ``None`` means ``param_dtype``, else the parameters' own.
        buffer_dtype: dtype that floating point buffers are cast to, once.
        keep_low_precision_grads: leave ``.grad`` in ``param_dtype`` instead of casting it to the parameter's dtype.
        cast_forward_inputs: each unit casts its own floating point inputs to its ``param_dtype``.
        cast_root_forward_inputs: the root casts its floating point inputs to its ``param_dtype``.
        _module_classes_to_ignore: modules of these classes are kept in full precision when a policy wraps the model.
        output_dtype: dtype of the floating point tensors in the unit's output. It applies to the module being wrapped
            and not to units that a policy makes inside it.

    Two objects are equal if their fields are. :meth:`validate` checks the fields; the constructor does not. A unit
    reads the object when it is built; later changes have no effect.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Collection[type[nn.Module]] = (_BatchNorm,)
    output_dtype: torch.dtype | None = None

    def validate(self) -> None:
        """Check all fields.

        Raises:
            TypeError: a dtype is not a ``torch.dtype``, or ``_module_classes_to_ignore`` holds something else than
                classes.
            ValueError: a dtype is not a (real) floating point dtype.
        """
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"MixedPrecision.{name} must be a torch.dtype or None, but got {_described(dtype)}")
            if not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecision.{name} must be a floating point dtype such as torch.bfloat16, but got {dtype}"
                )
        classes = self._module_classes_to_ignore
        if not isinstance(classes, Collection) or not all(isinstance(cls, type) for cls in classes):
            raise TypeError(
                "MixedPrecision._module_classes_to_ignore must hold module classes, such as (nn.LayerNorm,), "
                f"but got {_described(classes)}"
            )

    def compute_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the compute dtype of parameters of ``dtype``. Only floating point parameters are cast."""
        return (self.param_dtype or dtype) if dtype.is_floating_point else dtype

    def reduce_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the reduction dtype for gradients of parameters of ``dtype``."""
        return (self.reduce_dtype or self.param_dtype or dtype) if dtype.is_floating_point else dtype


@dataclasses.dataclass
class CPUOffload:
    """The tensors kept in CPU memory while the unit does not compute. Units that compute on the CPU ignore it.

    Attributes:
        offload_params: keep the shards there; the optimizer then steps on the CPU.
        offload_gradients: keep the reduced gradients there; None means as ``offload_params``. Torch's optimizers need
            a parameter and its gradient on one device, and so None.
        pin_memory: use page-locked memory, which is copied without blocking the host. The allocator of torch rounds the
            size of each shard up to a power of two, and keeps the memory for later requests. In torch 2.13
            ``PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1`` limits the rounding to sizes up to 1 MB.
    """

    offload_params: bool = False
    offload_gradients: bool | None = None
    pin_memory: bool = True

    @property
    def gradients(self) -> bool:
        """True if reduced gradients are offloaded."""
        return self.offload_params if self.offload_gradients is None else self.offload_gradients


class StateDictType(enum.Enum):
    """The form of ``state_dict()``: full tensors under the original names (``FULL_STATE_DICT``), the flat shards of
    this rank (``LOCAL_STATE_DICT``), or sharded tensors under the original names (``SHARDED_STATE_DICT``)."""

    FULL_STATE_DICT = 1
    LOCAL_STATE_DICT = 2
    SHARDED_STATE_DICT = 3


@dataclasses.dataclass
class StateDictConfig:
    """Options of all forms of model state dicts. ``offload_to_cpu``: return tensors in CPU memory."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a full state dict. ``rank0_only``: return the parameters on rank 0 only."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict: the common ones."""


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a sharded state dict. ``_use_dtensor``: values are ``DTensor``, not ``ShardedTensor``; set for models
    that were wrapped with a device mesh."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class RaggedStateDictConfig(ShardedStateDictConfig):
    """Options of a sharded state dict that needs no communication, under every strategy.

    Each value is a :class:`fsdp.checkpoint.ragged.RaggedTensor` with the part of the parameter in this rank's shard.
    ``torch.distributed.checkpoint`` saves it, and loads into it at any number of ranks. Values share memory with model
    and optimizer unless ``offload_to_cpu`` copies them from an accelerator: save or copy them before the next step.
    ``_use_dtensor`` has no effect.
    """


@dataclasses.dataclass
class OptimStateDictConfig:
    """Options of all forms of optimizer state dicts. Tensors go to CPU by default, unlike the model's."""

    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of a full optimizer state dict. ``rank0_only``: return the state on rank 0 only."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of a local optimizer state dict. Tensors stay on their device by default."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of a sharded state dict. ``_use_dtensor``: values are ``DTensor``, not ``ShardedTensor``; set for models
    that were wrapped with a device mesh."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class RaggedOptimStateDictConfig(ShardedOptimStateDictConfig):
    """Options of an optimizer state dict without communication; see :class:`RaggedStateDictConfig`."""


@dataclasses.dataclass
class StateDictSettings:
    """The form of state dict in force, with its options for the model and for the optimizer."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(enum.Enum):
    """The keys of parameters in an optimizer state dict: full names, or positions as in plain optimizers."""

    PARAM_NAME = 1
    PARAM_ID = 2


class TrainingState(enum.Enum):
    """The activity of a wrapped module."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


class HandleTrainingState(enum.Enum):
    """The activity that uses a flat parameter."""

    IDLE = 1
    FORWARD = 2
    BACKWARD_PRE = 3
    BACKWARD_POST = 4
    SUMMON_FULL_PARAMS = 5


class HandleShardingStrategy(enum.Enum):
    """A flat parameter's strategy: the members of :class:`ShardingStrategy`, one for one."""

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


def as_sharding_strategy(value: Any) -> ShardingStrategy:
    """Convert ``value`` to a strategy; None is ``FULL_SHARD``. Errors: see the module's docstring."""
    return ShardingStrategy.FULL_SHARD if value is None else _as_member(ShardingStrategy, value, "sharding_strategy")


def as_backward_prefetch(value: Any) -> BackwardPrefetch | None:
    """Convert ``value`` to a kind of prefetch; None means no prefetch. Errors: see the module's docstring."""
    return None if value is None else _as_member(BackwardPrefetch, value, "backward_prefetch")


def as_flag(value: Any, argument: str) -> bool:
    """Convert ``value`` to a bool.

    Raises:
        TypeError: ``value`` is neither a bool nor equal to one.
    """
    if isinstance(value, torch.Tensor) or value not in (False, True):
        raise TypeError(f"{argument} must be a bool, but got {_described(value)}")
    return bool(value)


def as_resharding(value: Any, strategy: ShardingStrategy) -> tuple[bool | None, int]:
    """Convert ``reshard_after_forward`` to the pair (units are resharded after forward, number of ranks).

    The strategy decides if ``value`` is None. In the result None means all units except the root, and 0 all ranks.

    Raises:
        TypeError: ``value`` is no bool, no number and not None.
        ValueError: ``value`` contradicts ``strategy``, or is less than one rank.
    """
    keeps = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    if value is None:
        return (False if keeps else None), 0
    ranks = 0
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"reshard_after_forward must be a bool or a number of ranks, 1 or more, but got {value}")
        ranks = value
    reshards = ranks > 1 if ranks else as_flag(value, "reshard_after_forward")
    if reshards and keeps:
        raise ValueError(f"reshard_after_forward={value} contradicts {strategy}, which keeps units after forward")
    return reshards, ranks if reshards else 0


def as_count(value: Any, argument: str, of: str, least: int = 0) -> int:
    """Check a number of units or bytes (``of``) and return it.

    Raises:
        TypeError: ``value`` is no integer.
        ValueError: ``value`` is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, a number of {of}, but got {_described(value)}")
    if value < least:
        raise ValueError(f"{argument} must be a number of {of}, {least} or more, but got {value}")
    return value


def as_nbytes(value: int | str, argument: str) -> int:
    """Convert ``80GB``, ``80 GiB``, ``512MB`` or a number of bytes to bytes.

    Raises:
        ValueError: ``value`` is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{argument} must be a number of bytes, such as 80GB, 80GiB or 512MB, but got {value!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


FlatParamKey = Callable[[str, nn.Parameter], Hashable]  # the label of a parameter, given its name in the unit


def as_flat_param_key(value: Any, use_orig_params: bool) -> FlatParamKey | None:
    """Return ``value``, validated.

    Raises:
        TypeError: it is neither None nor callable.
        ValueError: there are no flat parameters to divide.
    """
    if value is not None and not callable(value):
        raise TypeError(
            f"flat_param_key must be callable, such as lambda name, param: param.dim() > 1, but got {_described(value)}"
        )
    if value is not None and use_orig_params:
        raise ValueError(
            "flat_param_key divides the flat parameters of use_orig_params=False, and with use_orig_params=True there "
            "are none: leave one of the two out"
        )
    key: FlatParamKey | None = value
    return key


def as_mixed_precision(value: Any) -> MixedPrecision:
    """Convert ``value`` to a validated :class:`MixedPrecision`; None gives all defaults.

    Raises:
        TypeError, ValueError: see :meth:`MixedPrecision.validate`; TypeError for another type.
    """
    precision = MixedPrecision() if value is None else _as_record(MixedPrecision, value, "mixed_precision")
    precision.validate()
    return precision


def as_cpu_offload(value: Any) -> CPUOffload:
    """Convert ``value`` to a :class:`CPUOffload`; None is no offload."""
    return CPUOffload() if value is None else _as_record(CPUOffload, value, "cpu_offload")


_STATE_DICT_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def as_state_dict_settings(state_dict_type: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """Convert a form of state dict and its two configurations; None for a configuration means all defaults.

    Raises:
        TypeError, ValueError: ``state_dict_type`` is no member of :class:`StateDictType`.
        RuntimeError: a configuration belongs to another form.
    """
    kind = _as_member(StateDictType, state_dict_type, "state_dict_type")
    configs: list[Any] = []
    for cls, value, argument in zip(
        _STATE_DICT_CONFIGS[kind], (config, optim_config), ("state_dict_config", "optim_state_dict_config")
    ):
        try:
            configs.append(cls() if value is None else _as_record(cls, value, argument))
        except TypeError as error:
            raise RuntimeError(f"Expected {argument} of type {cls} but got {type(value)}, for {kind}") from error
    return StateDictSettings(kind, *configs)


_Member = TypeVar("_Member", bound=enum.Enum)
_Record = TypeVar("_Record")


def _as_member(cls: type[_Member], value: Any, argument: str) -> _Member:
    """Convert ``value`` to a member of ``cls``. A member of another enum with the same class name counts by name."""
    if isinstance(value, cls):
        return value
    expected = f"{argument} must be a {cls.__name__} ({', '.join(cls.__members__)})"
    if not isinstance(value, enum.Enum) or type(value).__name__ != cls.__name__:
        raise TypeError(f"{expected}, but got {_described(value)}")
    if value.name not in cls.__members__:
        raise ValueError(f"{expected}, but got {value}, which is not one of these")
    return cls[value.name]


def _as_record(cls: type[_Record], value: Any, argument: str) -> _Record:
    """Convert ``value`` to the dataclass ``cls``.

    An instance of another dataclass with the same class name, or of a subclass of one, is copied field by field. Fields
    that it lacks keep their defaults.
    """
    if isinstance(value, cls):
        return value
    names = [base.__name__ for base in type(value).__mro__]
    if cls.__name__ not in names or not dataclasses.is_dataclass(value):
        hint = f"; pass {cls.__name__}(...), not the class" if isinstance(value, type) else ""
        raise TypeError(f"{argument} must be a {cls.__name__} or None, but got {_described(value)}{hint}")
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    unknown = sorted(fields.keys() - cls.__dataclass_fields__.keys())  # type: ignore[attr-defined]
    if unknown:
        raise ValueError(
            f"{argument} is a {type(value).__module__}.{type(value).__name__} with fields that fsdp's {cls.__name__} "
            f"does not have: {', '.join(unknown)}"
        )
    return cls(**fields)


def _described(value: Any) -> str:
    return f"{value!r} of type {type(value).__module__}.{type(value).__qualname__}"
