"""Backwards: the gradients that arrive at the leaves of a unit, up to the reduction."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch

from fsdp.runtime import hooks
from fsdp.runtime.arrivals import Arrivals
from fsdp.runtime.context import RootContext
from fsdp.runtime.outside import OutsideUses
from fsdp.runtime.ranges import profiled
from fsdp.runtime.unit import Unit


def watch_leaves(unit: Unit) -> Arrivals:
    """Hook the leaves of ``unit``, which the hooks refer to weakly."""
    unit_ref = weakref.ref(unit)
    outside = OutsideUses(unit.views, functools.partial(_outside_gradient_arrived, unit_ref))
    reached, copy = functools.partial(_leaf_reached, unit_ref), functools.partial(_gradients_arrived, unit_ref)
    return Arrivals(unit.handles, reached, copy, outside)


def _context_of(unit: Unit) -> RootContext:
    """Return the context of the tree that ``unit``, which has gradients to reduce, is in.

    Raises:
        RuntimeError: no wrapped module has run a forward in which it could join a tree.
    """
    context: RootContext | None = unit.position.context()
    if context is None:
        raise RuntimeError(
            f"a backward reached parameters of {unit.name} before its first forward, without which gradients are not "
            "reduced: call the wrapped model itself, model(x), and not a module inside of it (model.module(x))"
        )
    return context


@hooks.untraced
def _leaf_reached(unit_ref: Callable[[], Unit | None]) -> None:
    """Let the running graph task enter a unit through a leaf."""
    unit = unit_ref()
    assert unit is not None  # the ``Arrivals`` exist
    try:
        _context_of(unit).enter_backward(unit)
        unit.arrivals.enter()
    except BaseException as error:
        unit.fail(error, "gradient of a parameter")
        raise


@hooks.untraced
def _gradients_arrived(unit_ref: Callable[[], Unit | None]) -> None:
    """Copy the gradients of a unit that are held into their slots. After the last expected one, reduce the unit."""
    unit = unit_ref()
    assert unit is not None  # the ``Arrivals`` exist
    try:
        context = _context_of(unit)
        with context.joined():
            unit.gradients.copy(unit.arrivals.take(), context.reductions)
            if unit.arrivals.pending:
                return
            context.unsharder.prefetch(unit)  # before the reduction: a gather is waited for sooner
            with profiled("_post_backward_hook", unit.name):
                context.reduce(unit)
                if not unit.is_running:
                    context.unsharder.end_backward(unit)
                    context.unsharder.prefetch(unit)
    except BaseException as error:
        unit.fail(error, "gradient of a parameter")
        raise


def _outside_gradient_arrived(unit_ref: Callable[[], Unit | None], bucket: int, index: int, grad: torch.Tensor) -> None:
    """Take ``grad``, of a parameter that was used outside of forward, by bucket and index; see ``outside.py``."""
    unit = unit_ref()
    if unit is None:
        raise RuntimeError("a backward reached a parameter whose unit was deleted: keep the wrapped model till its end")
    try:
        context = _context_of(unit)
        with torch.no_grad(), context.joined():
            context.enter_backward(unit)
            unit.gradients.add_outside(bucket, index, grad, context.reductions)
    except BaseException as error:
        unit.fail(error, "gradient of a parameter")
        raise
