"""DistributedDataParallel's names on a wrapped model: each works, or is refused with the remedy."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from fsdp.names.fsdp2 import FSDP2Names

Constructor = TypeVar("Constructor", bound=Callable[..., None])

ARGUMENTS = {  # of DDP's constructor, that FullyShardedDataParallel does not have
    "device_ids": "device_id= is the one device of this process; on CPU leave both out",
    "output_device": "outputs stay where the module computes",
    "dim": "inputs are not scattered",
    "bucket_cap_mb": "what is reduced together is a unit: choose them by auto_wrap_policy=",
    "find_unused_parameters": "reduce_unused=True lets ranks use different parts of the model",
    "check_reduction": "it does nothing in DistributedDataParallel either",
    "gradient_as_bucket_view": "gradients are always views of what was reduced",
    "static_graph": "nothing has to be promised about the graph",
    "init_sync": "sync_module_states=True gives all ranks the values of rank 0",
    "forward_sync_buffers": "broadcast_buffers=True sends rank 0's when a forward begins",
    "skip_all_reduce_unused_params": "with reduce_unused=True what no rank used is not reduced",
}
_REMOVED = {  # arguments of earlier versions
    "coalesce_nbytes": "FullyShardedDataParallel.group([...]) or a size policy makes one unit of several modules",
    "keep_gathered_nbytes": "set_reshard_after_forward(False) keeps single units gathered, best those that run last",
}
JOIN_REMEDY = (
    "Write `for batch in fsdp.join(model, loader):`. A context around the loop, as DDP's, cannot step the optimizer "
    "for the shards of a rank whose loop is over"
)
_ATTRIBUTES = ARGUMENTS | {  # of DDP's instances
    "join": JOIN_REMEDY,
    "_set_static_graph": ARGUMENTS["static_graph"],
    "reducer": "gradients are reduced unit by unit",
}


def refuse_unknown_arguments(constructor: Constructor) -> Constructor:
    """Decorate the wrapper's constructor: raise TypeError for unknown keywords, with the remedy.

    A list in the place of ``process_group``, DDP's ``device_ids``, is refused as well. Type checkers see the signature
    of ``constructor``.
    """
    names = [name for name in inspect.signature(constructor).parameters if name != "self"]

    @functools.wraps(constructor)
    def check_and_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - set(names):
            if name in ARGUMENTS:
                raise TypeError(
                    f"{name}= is an argument of DistributedDataParallel, and not of FullyShardedDataParallel: leave it "
                    f"out; {ARGUMENTS[name]}"
                )
            if name in _REMOVED:
                raise TypeError(f"{name}= was removed: {_REMOVED[name]}")
            near = difflib.get_close_matches(name, names, n=1)
            raise TypeError(
                f"FullyShardedDataParallel.__init__() got an unexpected keyword argument {name!r}"
                + "".join(f". Did you mean {each!r}?" for each in near)
            )
        process_group = kwargs.get("process_group", args[1] if len(args) > 1 else None)
        if isinstance(process_group, list):
            raise TypeError(
                f"process_group must be a process group or None, got {process_group}: that looks like the device_ids "
                f"of DistributedDataParallel; {ARGUMENTS['device_ids']}"
            )
        constructor(self, *args, **kwargs)

    return check_and_construct  # type: ignore[return-value]


def refused_attribute(name: str) -> str:
    """Return the error message for an attribute of DDP's instances; "" for other names."""
    if name not in _ATTRIBUTES:
        return ""
    return f"FullyShardedDataParallel has no {name!r} as DistributedDataParallel has. {_ATTRIBUTES[name]}"


class DDPNames(FSDP2Names):
    """Mixin: DDP's attributes of the wrapper."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward reduces this unit's gradients. Assigning calls ``set_requires_gradient_sync``."""
        return all(unit.synchronize for unit in self._units(False))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.set_requires_gradient_sync(value)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse DDP around a wrapped model: DDP's constructor reads this attribute before it communicates."""
        caller = sys._getframe(1)
        if caller.f_code.co_name == "__init__" and caller.f_globals.get("__name__") == "torch.nn.parallel.distributed":
            raise TypeError(
                "DistributedDataParallel was given a FullyShardedDataParallel module, whose gradients are reduced "
                "already, and whose parameters are this rank's shards: use the module as it is"
            )
        raise AttributeError("_ddp_params_and_buffers_to_ignore")
