"""One forward of a unit, as its backward needs to know it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from fsdp.runtime import hooks
from fsdp.runtime.context import RootContext


class Waiting(Protocol):
    """Whoever waits for the gradients of a forward's inputs: a unit."""

    def input_ready(self, call: ForwardCall, index: int) -> None: ...


class ForwardCall:
    """One forward of a unit, as its backward needs to know it: which inputs' gradients end it.

    Lives as long as the graph that the forward built, and keeps the tree's context alive with it.
    """

    __slots__ = ("__weakref__", "_handles", "context", "full_precision", "inputs", "waiting")

    def __init__(self, context: RootContext, *, full_precision: bool) -> None:
        self.context = context
        self.full_precision = full_precision  # in which copy of the parameters its graph lies
        self.inputs: list[Any] = []  # the graph nodes behind which the inputs' gradients are complete
        self.waiting: set[int] = set()  # the inputs whose gradients this backward has still to compute
        self._handles: list[Any] = []

    def watch(self, tensor: torch.Tensor, unit: Waiting) -> None:
        """Have the unit told when ``tensor``'s gradient is complete."""
        index, call_ref, unit_ref = len(self.inputs), weakref.ref(self), weakref.ref(unit)

        def door() -> None:
            call, unit = call_ref(), unit_ref()
            if call is not None and unit is not None:
                unit.input_ready(call, index)

        self.inputs.append(hooks.gradient_node(tensor))
        # What the input is the output of begins its backward there, and finds this unit's memory given back.
        self._handles.append(hooks.on_gradient(tensor, door, first=True))

    def forget(self, node: Any) -> None:
        """Stop waiting for an input that is an output as well: its gradient is there when the backward begins, and
        keeping its node here would tie the graph into a circle that nobody frees."""
        for index, kept in enumerate(self.inputs):
            if kept is node:
                self.inputs[index] = None

    def __del__(self) -> None:
        for handle in self._handles:  # a leaf input outlives the graph
            handle.remove()
