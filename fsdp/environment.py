"""The environment variables of the package, with their values. Only this file reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

PREFIX = "FSDP_"
# Variables of other programs: accelerate's launcher sets the first ones, and torch's FSDP1 reads the last.
FOREIGN = {
    "FSDP_ACTIVATION_CHECKPOINTING",
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH",
    "FSDP_BACKWARD_PREFETCH_POLICY",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "FSDP_FORWARD_PREFETCH",
    "FSDP_MIN_NUM_PARAMS",
    "FSDP_OFFLOAD_PARAMS",
    "FSDP_RESHARD_AFTER_FORWARD",
    "FSDP_SHARDING_STRATEGY",
    "FSDP_STATE_DICT_TYPE",
    "FSDP_SYNC_MODULE_STATES",
    "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "FSDP_USE_ORIG_PARAMS",
    "FSDP_VERSION",
    "FSDP_USE_FAKE_ALL_GATHER",
    "FSDP_USE_FAKE_REDUCE",
    "FSDP_USE_UNSAFE_SETATTR",
}


VARIABLES: list[Variable[Any]] = []  # every one


class Variable(Generic[_T]):
    """One environment variable. It is read at each use; an empty value counts as not set.

    Attributes:
        name: the variable's name.
        alike: True if all ranks need the same value.
    """

    def __init__(self, name: str, default: _T, parse: Callable[[str], _T], values: str, *, alike: bool = True) -> None:
        """``values`` describes the allowed values in error messages; ``parse`` raises ValueError or KeyError for
        the rest."""
        self.name, self.alike = name, alike
        self._default, self._parse, self._values = default, parse, values
        VARIABLES.append(self)

    @property
    def value(self) -> _T:
        """Parse the variable's value.

        Raises:
            ValueError: the value is not allowed.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self._default
        try:
            return self._parse(text)
        except (KeyError, ValueError):
            raise ValueError(f"{self.name} is {text!r}; it may be {self._values}") from None


def _flag(name: str, *, alike: bool = True) -> Variable[bool]:
    return Variable(name, False, {"0": False, "1": True}.__getitem__, "0 or 1", alike=alike)


COLLECTIVES = Variable(
    "FSDP_COLLECTIVES",
    "auto",
    {value: value for value in ("auto", "native", "direct", "shared")}.__getitem__,
    "auto, native, direct or shared",
)
FORCE_SHARDED = _flag("FSDP_FORCE_SHARDED")
USE_FULL_PREC_IN_EVAL = _flag("FSDP_USE_FULL_PREC_IN_EVAL")
SKIP_WRITEBACK_CHECK = _flag("FSDP_SKIP_WRITEBACK_CHECK", alike=False)
SHARD_ALIGNMENT: Variable[int | None] = Variable(
    "FSDP_SHARD_ALIGNMENT",
    None,
    {str(2**power): 2**power for power in range(31)}.__getitem__,
    "a number of bytes that is a power of two, such as 16",
)
DEBUG = _flag("FSDP_DEBUG", alike=False)
HOST = Variable("FSDP_HOST", "", str, "any name", alike=False)


def check() -> None:
    """Parse all variables.

    Raises:
        ValueError: a value is not allowed.
    """
    for variable in VARIABLES:
        variable.value  # noqa: B018, the property raises


def unknown() -> list[str]:
    """Return a message for each variable that begins with ``FSDP_`` and is unknown."""
    names = [variable.name for variable in VARIABLES]
    found = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in FOREIGN.union(names))
    known = ", ".join(names)
    return [f"the environment variable {name} is none of fsdp's, and is ignored: there are {known}" for name in found]


def alike() -> dict[str, str]:
    """Map each variable that needs the same value on all ranks to the value as text; "" if unset."""
    words: dict[object, str] = {None: "", False: "0", True: "1"}
    values = {variable.name: variable.value for variable in VARIABLES if variable.alike}
    return {name: value if isinstance(value, str) else words.get(value, str(value)) for name, value in values.items()}
