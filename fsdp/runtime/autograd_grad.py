"""An error where ``torch.autograd.grad()`` is asked for gradients of the visible parameters of a wrapped module.

A forward computes with the leaves. The graph does not lead to the tensors that ``parameters()`` yields, so torch
returns None for them, or reports that they were not used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fsdp.runtime.hooks import breaks_graph, units


@functools.cache
def watch_autograd_grad() -> None:
    """Let ``torch.autograd.grad()`` raise from now on where it would return None for a parameter that the graph uses.

    Programs import the function under many names. So the function that it calls last, by a name in torch's module, is
    wrapped.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    @breaks_graph
    @functools.wraps(run)
    def run_and_check(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad", True) or len(args) < 4:
            return run(outputs, *args, **kwargs)
        try:
            grads = run(outputs, *args, **kwargs)
        except RuntimeError as error:
            if "used in the graph" in str(error):
                _refuse(outputs, args[3], error)
            raise
        if any(grad is None for grad in grads):
            _refuse(outputs, [tensor for tensor, grad in zip(args[3], grads) if grad is None], None)
        return grads

    autograd._engine_run_backward = run_and_check


def _refuse(outputs: Iterable[Any], inputs: Sequence[Any], cause: RuntimeError | None) -> None:
    """Raise if one of ``inputs``, which have no gradients, stands for a leaf that ``outputs`` depend on."""
    asked = {id(tensor) for tensor in inputs if getattr(tensor, "_fsdp_flattened", False)}
    used = _leaves_of(outputs) if asked else set()
    names = [
        f"{visible.name} of {unit.name}"
        for unit in units
        for handle, views in zip(unit.handles, unit.views)
        for visible in views.visible
        if id(visible.param) in asked
        and any(id(leaf) in used for index, leaf in handle.all_leaves if index in visible.members)
    ]
    if names:
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        raise RuntimeError(
            f"torch.autograd.grad() gives no gradient of {names[0]}{others}, though the outputs depend on it: forward "
            "computes with gathered parameters, and not with those that parameters() yields. Call loss.backward() and "
            "read .grad, which is reduced over the ranks; or call autograd.grad() on the plain module"
        ) from cause


def _leaves_of(outputs: Iterable[Any]) -> set[int]:
    """Return the ids of the leaves that require grad and that ``outputs`` (tensors, or edges of the graph) depend
    on."""
    nodes = [getattr(output, "node", None) or getattr(output, "grad_fn", None) for output in outputs]
    seen, found = set(nodes), set[int]()
    for node in nodes:  # the loop adds nodes
        if node is None:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        following = [edge[0] for edge in node.next_functions if edge[0] not in seen]
        seen.update(following)
        nodes += dict.fromkeys(following)
    return found
