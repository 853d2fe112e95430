"""Under which keys a checkpoint has what: the model's state by its own keys, the optimizer's by names of parameters.

``model.<key>``, ``optim.state.<parameter>.<state>``, ``optim.param_groups``, and ``optim.others`` for what belongs to
no parameter. Names of states may be any strings and integers: these are written ``%i<number>``, and dots and percent
signs in strings ``%2E`` and ``%25``, so that what stands behind the last dot is always all of the state's name.
"""

from __future__ import annotations

import re
from typing import Any

MODEL, STATE, GROUPS, OTHERS = "model.", "optim.state.", "optim.param_groups", "optim.others"
_NUMBER = re.compile(r"%i(-?\d+)")


def state_key(param: str, state: Any) -> str:
    """The key of a state of a parameter.

    Raises:
        TypeError: the state's name is neither a string nor a number.
    """
    if type(state) is int:
        return f"{STATE}{param}.%i{state}"
    if not isinstance(state, str):
        raise TypeError(
            f"names of states have to be strings or integers to be saved, but {param!r} has one called {state!r}"
        )
    return f"{STATE}{param}.{state.replace('%', '%25').replace('.', '%2E')}"


def param_and_state(key: str) -> tuple[str, Any]:
    """What ``state_key`` made a key of."""
    param, _, state = key.removeprefix(STATE).rpartition(".")
    number = _NUMBER.fullmatch(state)
    return param, int(number[1]) if number else state.replace("%2E", ".").replace("%25", "%")
