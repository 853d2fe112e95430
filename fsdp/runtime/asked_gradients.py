"""Gradients of chosen parameters: ``backward(inputs=...)`` and ``torch.autograd.grad()``.

A forward computes with leaves. The graph does not lead to the tensors that ``parameters()`` yields, and a backward that
is asked for these alone runs no node and no hook: without this file it would leave out all gradients silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from fsdp import patches
from fsdp.runtime.hooks import breaks_graph, units


def follow_inputs() -> None:
    """Let parameters among the ``inputs`` of a backward stand for their leaves from now on, and let
    ``torch.autograd.grad()`` raise where it would return None for one.

    Programs import both functions under many names. So the function that both call, by a name in torch's module, is
    wrapped.
    """
    patches.BACKWARD.install(_following_inputs)


def _following_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
    @breaks_graph
    @functools.wraps(run)
    def run_for_parameters(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        asked = [tensor for tensor in inputs if getattr(tensor, "_fsdp_flattened", False)]
        if not asked:
            return run(outputs, *args, **kwargs)
        if kwargs.get("accumulate_grad", True):
            return run(outputs, *args[:3], (*inputs, *_leaves_of(asked)), *args[4:], **kwargs)
        try:
            grads = run(outputs, *args, **kwargs)
        except RuntimeError as error:
            if "used in the graph" in str(error):
                _refuse(asked, error)
            raise
        missing = [tensor for tensor, grad in zip(inputs, grads) if grad is None and any(tensor is p for p in asked)]
        if missing:
            _refuse(missing, None)
        return grads

    return run_for_parameters


def _leaves_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that require grad and stand for ``params`` in forwards."""
    ids = set(map(id, params))
    return [
        leaf
        for unit in units
        for views in unit.views
        for visible in views.visible
        if id(visible.param) in ids
        for index, leaf in views.handle.all_leaves
        if index in visible.members and leaf.requires_grad
    ]


def _refuse(params: Sequence[Any], cause: RuntimeError | None) -> NoReturn:
    others = f" and {len(params) - 1} others" if len(params) > 1 else ""
    raise RuntimeError(
        f"torch.autograd.grad() gives no gradient of {getattr(params[0], '_fsdp_owner', 'a flat parameter')}{others}: "
        "forward computes with gathered parameters, and not with those that parameters() yields. Call "
        "loss.backward(), or loss.backward(inputs=...), and read .grad, which is reduced over the ranks; or call "
        "autograd.grad() on the plain module"
    ) from cause
