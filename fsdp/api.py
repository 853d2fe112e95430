"""What a user may ask for: sharding strategies, prefetching, precision, offload and kinds of state dict.

Names, members, values, fields and defaults are those of ``torch.distributed.fsdp``: callers build members from integers
(``ShardingStrategy(1)``) and from names (``ShardingStrategy["FULL_SHARD"]``).

The ``as_*`` functions turn what a caller passed into these types. They also take torch's own enum members and
dataclasses, recognised by class name and by member or field names, because a program may have imported those before it
imported this package. What they cannot take, they refuse with an error that names the argument.
"""

from __future__ import annotations

import dataclasses
import enum
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
    """What each rank holds, and for how long.

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
    """When backward gathers the next unit: before the current unit's gradients are computed (``BACKWARD_PRE``: most
    overlap, most memory) or after (``BACKWARD_POST``)."""

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


@dataclasses.dataclass
class MixedPrecision:
    """The dtypes of compute, reduction and buffers. ``None`` leaves the respective dtype alone.

    Attributes:
        param_dtype: dtype of the gathered parameters, so of forward, backward and the all-gather. The sharded
            parameters that the optimizer sees keep their own dtype.
        reduce_dtype: dtype of the gradient reduction; ``None`` means ``param_dtype``, else the parameters' own.
        buffer_dtype: dtype that floating point buffers are cast to, once.
        keep_low_precision_grads: leave ``.grad`` in ``param_dtype`` instead of casting it to the parameter's dtype.
        cast_forward_inputs: each unit casts its own floating point inputs to its ``param_dtype``.
        cast_root_forward_inputs: the root casts its floating point inputs to its ``param_dtype``.
        _module_classes_to_ignore: modules of these classes are kept in full precision when a policy wraps the model.
        output_dtype: dtype that the unit casts the floating point tensors of its output to. A policy gives it to no
            unit that it makes: the output of the module being wrapped is meant.

    Two values are equal if their fields are. Creating one checks nothing; :meth:`validate` does. A unit goes by what it
    was given when it was made: what is changed in it later has no effect.
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
        """Returns if every field can be used.

        Raises:
            TypeError: a dtype is not a ``torch.dtype``, or ``_module_classes_to_ignore`` does not hold classes.
            ValueError: a dtype is not a (real) floating point one.
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
        """What parameters of ``dtype`` are computed in; only floating point ones are cast."""
        return (self.param_dtype or dtype) if dtype.is_floating_point else dtype

    def reduce_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """What the gradients of parameters of ``dtype`` are reduced in."""
        return (self.reduce_dtype or self.param_dtype or dtype) if dtype.is_floating_point else dtype


@dataclasses.dataclass
class CPUOffload:
    """What lives in CPU memory while the unit does not compute. On a unit that computes on the CPU nothing changes.

    Attributes:
        offload_params: the shards, so that the optimizer steps on the CPU.
        offload_gradients: the reduced gradients; None means as ``offload_params``. The optimizers of torch want a
            parameter and its gradient on one device: use another value only with one that does not.
        pin_memory: keep them in page-locked memory, which copies without blocking the host.
    """

    offload_params: bool = False
    offload_gradients: bool | None = None
    pin_memory: bool = True

    @property
    def gradients(self) -> bool:
        """Whether reduced gradients are offloaded."""
        return self.offload_params if self.offload_gradients is None else self.offload_gradients


class StateDictType(enum.Enum):
    """What ``state_dict()`` returns: whole tensors under the original names (``FULL_STATE_DICT``), this rank's flat
    shards (``LOCAL_STATE_DICT``), or sharded tensors under the original names (``SHARDED_STATE_DICT``)."""

    FULL_STATE_DICT = 1
    LOCAL_STATE_DICT = 2
    SHARDED_STATE_DICT = 3


@dataclasses.dataclass
class StateDictConfig:
    """Options that every kind of model state dict has. ``offload_to_cpu``: the tensors returned are in CPU memory."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: only rank 0 gets the parameters."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict: the common ones."""


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """``_use_dtensor``: values are ``DTensor`` instead of ``ShardedTensor``; set where a device mesh was given."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class RaggedStateDictConfig(ShardedStateDictConfig):
    """For a sharded state dict without communication: values are :class:`fsdp.checkpoint.ragged.RaggedTensor`, each
    with the part of the parameter that lies in this rank's shard, for ``torch.distributed.checkpoint`` to save and to
    load into at any number of ranks. Under every strategy, ``NO_SHARD`` included. The values lie in the memory of model
    and optimizer unless they are moved to CPU from elsewhere: save or copy them before the next step. ``_use_dtensor``
    means nothing here.
    """


@dataclasses.dataclass
class OptimStateDictConfig:
    """Options that every kind of optimizer state dict has. The default differs from the model's: state goes to CPU."""

    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: only rank 0 gets the state."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of a local optimizer state dict. It stays where it is unless asked otherwise."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """``_use_dtensor``: values are ``DTensor`` instead of ``ShardedTensor``; set where a device mesh was given."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class RaggedOptimStateDictConfig(ShardedOptimStateDictConfig):
    """As :class:`RaggedStateDictConfig`, for the optimizer's state."""


@dataclasses.dataclass
class StateDictSettings:
    """The kind of state dict in force, with its options for the model and for the optimizer."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(enum.Enum):
    """How an optimizer state dict names parameters: by fully qualified name, or by position as plain optimizers do."""

    PARAM_NAME = 1
    PARAM_ID = 2


class TrainingState(enum.Enum):
    """What a wrapped module is doing."""

    IDLE = 1
    FORWARD_BACKWARD = 2
    SUMMON_FULL_PARAMS = 3


class HandleTrainingState(enum.Enum):
    """What a flat parameter is used for."""

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
    """The strategy that ``value`` names; ``FULL_SHARD`` for None. Errors: see the module's docstring."""
    return ShardingStrategy.FULL_SHARD if value is None else _as_member(ShardingStrategy, value, "sharding_strategy")


def as_backward_prefetch(value: Any) -> BackwardPrefetch | None:
    """The kind of prefetch that ``value`` names; None means none. Errors: see the module's docstring."""
    return None if value is None else _as_member(BackwardPrefetch, value, "backward_prefetch")


def as_flag(value: Any, argument: str) -> bool:
    """``value`` as a bool, if it equals one.

    Raises:
        TypeError: it does not.
    """
    if isinstance(value, torch.Tensor) or value not in (False, True):
        raise TypeError(f"{argument} must be a bool, but got {_described(value)}")
    return bool(value)


def as_resharding(value: Any, strategy: ShardingStrategy) -> tuple[bool | None, int]:
    """(whether units are resharded after forward, over how many ranks): what ``value`` says, or ``strategy`` where that
    is None. None: all but the root are; 0: over all ranks.

    Raises:
        TypeError: it is no bool, no number and not None.
        ValueError: it is not what ``strategy`` says, or less than one rank.
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


def as_count(value: Any, argument: str, of: str) -> int:
    """``value`` as a number of units, or of what else it counts.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, a number of {of}, but got {_described(value)}")
    if value < 0:
        raise ValueError(f"{argument} must be a number of {of}, 0 or more, but got {value}")
    return value


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
    """``value`` as a validated :class:`MixedPrecision` (one of ours is returned itself); all defaults for None.

    Raises TypeError or ValueError as :meth:`MixedPrecision.validate` does, and TypeError for another type.
    """
    precision = MixedPrecision() if value is None else _as_record(MixedPrecision, value, "mixed_precision")
    precision.validate()
    return precision


def as_cpu_offload(value: Any) -> CPUOffload:
    """``value`` as a :class:`CPUOffload` (one of ours is returned itself); no offload for None."""
    return CPUOffload() if value is None else _as_record(CPUOffload, value, "cpu_offload")


_STATE_DICT_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def as_state_dict_settings(state_dict_type: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """The kind of state dict with its options; None for either config means its defaults for that kind.

    Raises:
        TypeError, ValueError: ``state_dict_type`` is no member of :class:`StateDictType`.
        RuntimeError: a config is of another kind of state dict.
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
    """``value`` as a member of ``cls``; a member of another enum of the same class name counts by its own name."""
    if isinstance(value, cls):
        return value
    expected = f"{argument} must be a {cls.__name__} ({', '.join(cls.__members__)})"
    if not isinstance(value, enum.Enum) or type(value).__name__ != cls.__name__:
        raise TypeError(f"{expected}, but got {_described(value)}")
    if value.name not in cls.__members__:
        raise ValueError(f"{expected}, but got {value}, which is not one of these")
    return cls[value.name]


def _as_record(cls: type[_Record], value: Any, argument: str) -> _Record:
    """``value`` as an instance of the dataclass ``cls``; an instance of another dataclass of the same class name, or of
    a subclass of one, is copied field by field (fields it lacks keep our default)."""
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
