"""An error where a program imports from this package in one file, and in another one still from torch's FSDP1."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp import patches
from fsdp.flat.ownership import torchs_base_of
from fsdp.runtime.unit import units_of


def refuse_torchs_methods() -> None:
    """Let methods of torch's FSDP1, if the program has imported it, raise TypeError for models of this package from now
    on. Without that some do nothing, such as ``summon_full_params``."""
    is_done = bool(patches.TORCHS_FSDP1[0])
    if not is_done and not patches.FSDP1:  # of compat.patch(): torch's names are those of this package
        for patch in patches.TORCHS_FSDP1:
            patch.install(functools.partial(_refusing_our_models, patch.what))


def _refusing_our_models(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def for_torchs_models(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith("torch."):  # torch.distributed.checkpoint asks each model for its fsdp_modules()
            for each in (*args, *kwargs.values()):
                if isinstance(each, nn.Module) and not torchs_base_of(type(each), fully_shard=False) and units_of(each):
                    raise TypeError(
                        f"{name}(): this model belongs to the package fsdp: import from fsdp in this file too, or call "
                        "fsdp.compat.patch()"
                    )
        return method(*args, **kwargs)

    return for_torchs_models
