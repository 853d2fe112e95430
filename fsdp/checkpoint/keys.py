"""Keys of a checkpoint: the model's state under names of parameters, the optimizer's under those and names of states.

``model.<key>``, ``optim.state.<parameter>.<state>``, ``optim.param_groups``, ``optim.classes`` (for each group the
names of torch's classes that the optimizer had), ``optim.others`` for entries that belong to no parameter, and
``extra``. Names of states may be strings and integers. Integers are written ``%i<number>``, and dots and percent signs
in strings ``%2E`` and ``%25``, so the part after the last dot is always the whole name of the state.
"""

from __future__ import annotations

import re
from typing import Any

MODEL, STATE, GROUPS, OTHERS = "model.", "optim.state.", "optim.param_groups", "optim.others"
CLASSES, EXTRA = "optim.classes", "extra"
_NUMBER = re.compile(r"%i(-?\d+)")


def state_key(param: str, state: Any) -> str:
    """Return the key of a parameter's state."""
    if type(state) is int:
        return f"{STATE}{param}.%i{state}"
    if not isinstance(state, str):
        raise TypeError(
            f"names of states have to be strings or integers to be saved, but {param!r} has one called {state!r}"
        )
    return f"{STATE}{param}.{state.replace('%', '%25').replace('.', '%2E')}"


def param_and_state(key: str) -> tuple[str, Any]:
    """Split a key of ``state_key`` into the parameter's name and the state's name."""
    param, _, state = key.removeprefix(STATE).rpartition(".")
    number = _NUMBER.fullmatch(state)
    return param, int(number[1]) if number else state.replace("%2E", ".").replace("%25", "%")
