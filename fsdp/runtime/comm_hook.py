"""Users' communication hooks, which reduce a unit's gradient in place of the communicator.

[Note: Hooks that replace the memory]
A hook may assign ``.data`` of the arguments, as torch's compressing hooks do, while the engine's buffers are permanent.
So the hook gets aliases, and a result in new memory is copied into the buffer. torch's two compressing hooks are
recognized, and :func:`fsdp.comm.collectives.reduce_compressed` computes the same result.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fsdp.comm.collectives import COMPRESSING_HOOKS, reduce_compressed

if TYPE_CHECKING:
    from fsdp.runtime.unit import Unit


class CommHook:
    """A hook with a state.

    Attributes:
        state, function: the user's arguments of ``register_comm_hook``.
        compresses: the hook is one of torch's low-precision hooks, which take and return gradients in full precision.
    """

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        """Raise ValueError if ``hook`` is not callable."""
        if not callable(hook):
            raise ValueError(f"Expected the communication hook to be callable but got {hook!r} of type {type(hook)}")
        self.state, self.function = state, hook
        self._name = getattr(hook, "__qualname__", repr(hook))
        self.compresses = any(hook is known for known in COMPRESSING_HOOKS)

    def check_accepts(self, unit_name: str, *, sharded: bool) -> None:
        """Raise TypeError if the hook's signature does not accept the arguments that the unit passes."""
        arguments = (self.state, "grad", "shard") if sharded else (self.state, "grad")
        try:
            signature = inspect.signature(self.function)
        except ValueError:  # not written in Python
            return
        try:
            signature.bind(*arguments)
        except TypeError as error:
            kind = "sharded, so it is called with (state, grad, shard)" if sharded else "not sharded: (state, grad)"
            remedy = ""
            if "bucket" in signature.parameters:
                remedy = (
                    ". Hooks of DistributedDataParallel take buckets: those of the same names in "
                    "torch.distributed.algorithms._comm_hooks.default_hooks take flat gradients"
                )
            raise TypeError(
                f"communication hook {self._name}{signature}: {unit_name} is {kind}; {error}{remedy}"
            ) from error

    def reduce(self, out: torch.Tensor, full: torch.Tensor, label: str) -> None:
        """Let the hook reduce ``full`` into ``out``, the shard, or in place where ``out`` is ``full``.

        Elements that the hook does not write are NaN afterwards.

        Raises:
            RuntimeError: the hook raised.
            TypeError: the hook returned a value.
            ValueError: the hook left a tensor of another shape in place of the result.
        """
        where = f"{label}: communication hook {self._name}"
        given = [full.detach()]  # see [Note: Hooks that replace the memory]
        if out is not full:
            given.append(out.detach().fill_(math.nan))
        function = functools.partial(reduce_compressed, self.function) if self.compresses else self.function
        try:
            with torch.no_grad():
                answer = function(self.state, *given)
        except Exception as error:
            raise RuntimeError(f"{where} raised {type(error).__name__}: {error}") from error
        if answer is not None and all(answer is not tensor for tensor in given):
            raise TypeError(
                f"{where} returned a {type(answer).__name__}, and a hook returns None: it reduces "
                f"{'grad into shard' if len(given) > 1 else 'grad in place'} and waits for what it has started"
            )
        result = given[-1]
        if result.shape != out.shape or result.device != out.device:
            raise ValueError(
                f"{where} left a tensor of shape {tuple(result.shape)} on {result.device} as the reduced gradient, "
                f"which has shape {tuple(out.shape)} on {out.device}"
            )
        if result.data_ptr() != out.data_ptr() or result.dtype != out.dtype:
            with torch.no_grad():
                out.copy_(result)


def register_comm_hook(units: Sequence[Unit], state: object, hook: Callable[..., Any]) -> None:
    """Reduce the gradients of all ``units`` by ``hook``; see ``FullyShardedDataParallel.register_comm_hook``."""
    for unit in units:
        if unit.policy.comm_hook is not None:
            raise AssertionError(f"register_comm_hook(): a communication hook is already registered, at {unit.name}")
        if unit.policy.gradient_divide_factor is not None:
            raise RuntimeError(
                f"register_comm_hook(): {unit.name} divides gradients by {unit.policy.gradient_divide_factor}, and a "
                "hook divides by itself: call set_gradient_divide_factor(None) before"
            )
        if not unit.policy.requires_all_reduce:
            raise RuntimeError(
                f"register_comm_hook(): {unit.name} delays its reduction over replicas, and a hook reduces by itself: "
                "call set_requires_all_reduce(True) before"
            )
    shared = CommHook(state, hook)
    for unit in units:
        if unit.handles:
            shared.check_accepts(unit.name, sharded=unit.groups.sharded)
    for unit in units:
        unit.choose(comm_hook=shared)
