"""When a unit's backward is over: the forward calls that a backward has entered, and how far it has come.

[Note: When a unit's backward is over]
Two things end it, and they are not the same. When the *last leaf that this backward will reach* has delivered its
gradient, the unit reduces, as soon as the backward comes by it again. Autograd knows which leaves it will reach. The
expected ones are kept per graph task, because reentrant checkpointing runs tasks inside an open outer one; the unit is
done when no task expects anything. So an unused parameter blocks nothing, a module used twice reduces once, and ranks
that reach the same units start their collectives at the same places in the graph.

When, besides, the backward is *behind every forward call of the unit* that it has entered, the unit reshards: a frozen
or detached weight that was used first in forward is read last in backward, after every leaf. Of one graph task, thread
and device autograd runs nodes in decreasing order of their sequence numbers, which grow as the graph is made. So once
a node begins that is older than a call, nothing of the call is to come, whatever led into it: arguments, attributes,
nested units. Whatever of ours a backward comes by tells where it is, and closes the calls that lie behind: outputs of
units, recomputations, and tensors that are arguments of units. The rest, for lack of somebody who tells, ends with the
backward.

A call is entered through its outputs. What leaves it otherwise (stored on a module, taken by a hook) and has its
gradient before them is a *side output*, which the program has to mark: see :func:`mark_side_output`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from fsdp.comm.recording import NOTHING, Told
from fsdp.flat.common_views import Marks
from fsdp.runtime import hooks
from fsdp.runtime.arrivals import Arrivals
from fsdp.runtime.context import RootContext
from fsdp.runtime.ranges import profiled, profiler_runs, ranged


class Place(NamedTuple):
    """Where a backward is: its thread, its graph task, and the sequence number of the node that begins; larger than any
    where nobody knows."""

    thread: int
    task: int
    node: int

    @staticmethod
    def now() -> Place:
        """The place of the backward that runs on this thread."""
        node = hooks.current_node()
        number = sys.maxsize if node is None else node._sequence_nr()  # None: in a graph that runs compiled
        return _new_place((threading.get_ident(), hooks.current_backward(), number))

    def is_behind(self, start: int, entered: Place) -> bool:
        """Whether nothing is to come of a call that began at node ``start`` and whose backward began at ``entered``.

        Task numbers grow, so a task of a larger number than the one that goes on now was nested in it and is over.
        """
        if self.thread != entered.thread or self.thread == _NO_THREAD:
            return False
        return self.task < entered.task or (self.task == entered.task and self.node < start)


_INPUT, _OUTPUT = "fsdp input", "fsdp output"  # keys of hooks; torch's own are integers
_new_place: Callable[[tuple[int, int, int]], Place] = functools.partial(tuple.__new__, Place)  # as its class, but in C


class CalledUnit(Protocol):
    """What calls and leaves report a backward to: a unit."""

    name: str
    _tree: Callable[[], Any]  # its context

    arrivals: Arrivals

    def take_outside(self, context: Any, bucket: int, index: int, grad: torch.Tensor) -> None: ...

    def backward_reached_leaf(self, context: Any) -> None: ...

    def gradients_arrived(self, context: Any) -> None: ...

    def backward_failed(self, error: BaseException, event: str) -> None: ...

    def backward_reached(self, call: ForwardCall) -> None: ...

    def backward_passed(self, call: ForwardCall) -> None: ...

    def backward_left(self, call: ForwardCall) -> None: ...


class ForwardCall:
    """One forward of a unit with gradients enabled, as its backward needs to know it.

    Lives as long as the graph that the forward built, and keeps the unit and the tree's context alive with it.

    Attributes:
        full_precision: in which copy of the parameters its graph lies.
        start: the sequence number of its first graph node.
        marks: by bucket, what tells whether a parameter was changed since; see ``marks`` of the buckets' views.
        outer: the call inside which it was made, of the unit around.
        in_summon: whether it was made inside ``summon_full_params``; then a backward of it is refused.
        entered: where a backward entered it; None before that, and once the backward is behind it.
    """

    __slots__ = (
        "__weakref__",
        "_runs",
        "context",
        "entered",
        "full_precision",
        "in_summon",
        "marks",
        "outer",
        "start",
        "unit",
    )

    def __init__(
        self,
        unit: CalledUnit,
        context: RootContext,
        start: int,
        marks: list[Marks],
        *,
        full_precision: bool,
        in_summon: bool = False,
    ) -> None:
        self.unit = unit
        self.marks = marks
        self.context = context
        self.start = start
        self.full_precision, self.in_summon = full_precision, in_summon
        self.outer = _here.innermost
        self.entered: Place | None = None
        self._runs = False

    def hook_outputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Enter the call when one of their gradients is there. What was made before the call (an argument that is
        passed through, an entry of a cache) needs nothing of the unit, and a leaf has a hook of its own. If all of it
        seems so, it may be of another thread, whose numbers are others.

        A view that is changed in place loses its node, and the hook with it; what it is a view of keeps both."""
        made: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        seen = list(tensors)
        for tensor in seen:
            if tensor._base is not None:
                seen.append(tensor._base)
            node: Any = tensor.grad_fn
            if node is not None:
                (made if node._sequence_nr() >= self.start else others).append(tensor)
        for tensor in made or others:
            hooks.on_gradient(tensor, self._reached, _OUTPUT)

    @ranged("_pre_backward_hook", "unit.name")
    def _reached(self, grad: torch.Tensor | None = None) -> None:
        try:
            self.unit.backward_reached(self)
        except BaseException as error:
            self.unit.backward_failed(error, "start of backward")
            raise

    def hook_input(self, tensor: torch.Tensor) -> None:
        """Tell where the backward is when ``tensor``'s gradient is there, whoever else may have been given it: sooner
        than the unit that runs next in backward, where parameters of a unit around lie between the two."""
        hooks_of: Any = tensor._backward_hooks
        if hooks_of is not None and _OUTPUT in hooks_of:
            return  # the unit whose output it is tells the same
        if tensor.requires_grad and tensor.grad_fn is not None:  # a leaf would collect hooks
            hooks.on_gradient(tensor, functools.partial(_input_reached, weakref.ref(self)), _INPUT)

    def enter(self) -> None:
        """The backward has reached an output of the call; calls that it is behind are closed."""
        place = Place.now()
        if place.node < self.start:  # the number of another thread, which computed it, tells nothing
            place = place._replace(thread=_NO_THREAD)
        if self.entered is None:
            self.entered = place
        elif self.entered.thread != place.thread:  # nothing tells which of the two is behind it first
            self.entered = place._replace(thread=_NO_THREAD)
        elif place.task < self.entered.task:
            self.entered = place
        _here.entered[weakref.ref(self)] = None
        close_passed(place, but=self)
        outer = self.outer
        if outer is not None and outer.entered is None and not outer._runs:
            # What was made inside it leads to what was made before that, there, as well. Usually it has been entered
            # through an output; else what lies inside was a side output.
            outer._reached()


def context_of(unit: CalledUnit) -> RootContext:
    """The context of the tree that ``unit``, which has gradients to reduce, is in.

    Raises:
        RuntimeError: no wrapped module has run a forward in which it could join one.
    """
    context: RootContext | None = unit._tree()
    if context is None:
        raise RuntimeError(
            f"a backward reached parameters of {unit.name} before its first forward, without which gradients are not "
            "reduced: call the wrapped model itself, model(x), and not a module inside of it (model.module(x))"
        )
    return context


@hooks.untraced
def leaf_reached(unit_ref: Callable[[], CalledUnit | None]) -> None:
    """Let the running graph task enter a unit through one of its leaves."""
    unit = unit_ref()
    assert unit is not None  # its ``Arrivals`` are there
    try:
        unit.backward_reached_leaf(context_of(unit))
    except BaseException as error:
        unit.backward_failed(error, "gradient of a parameter")
        raise


@hooks.untraced
def gradients_arrived(unit_ref: Callable[[], CalledUnit | None]) -> None:
    """Copy the gradients of a unit that have arrived into their slots."""
    unit = unit_ref()
    assert unit is not None  # its ``Arrivals`` are there
    try:
        context = context_of(unit)
        with NOTHING if context.compute is None else context.joined():  # else there is no stream to join
            unit.gradients_arrived(context)
    except BaseException as error:
        unit.backward_failed(error, "gradient of a parameter")
        raise


def outside_gradient_arrived(
    unit_ref: Callable[[], CalledUnit | None], bucket: int, index: int, grad: torch.Tensor
) -> None:
    """Take ``grad``, of a parameter that was used outside of forward, by bucket and index; see ``outside.py``."""
    unit = unit_ref()
    if unit is None:
        raise RuntimeError("a backward reached a parameter whose unit was deleted: keep the wrapped model till its end")
    try:
        context = context_of(unit)
        with torch.no_grad(), NOTHING if context.compute is None else context.joined():
            unit.take_outside(context, bucket, index, grad)
    except BaseException as error:
        unit.backward_failed(error, "gradient of a parameter")
        raise


@hooks.untraced
def _input_reached(call_ref: weakref.ref[ForwardCall], grad: torch.Tensor) -> None:
    """The gradient of an argument of a call is there. The graph of an input may outlive the one of the call."""
    call = call_ref()
    inside = call is not None and call.entered is not None
    place = Place.now()
    if place != _here.place:  # else an output of another unit has told of it
        close_passed(place)
    if call is not None and inside and call.entered is None:
        call.unit.backward_left(call)


_NO_THREAD = -1


class _Thread(threading.local):
    """What forwards and backwards on one thread do.

    Attributes:
        innermost: the call of the unit whose module runs now.
        place: where calls were closed last.
        entered: the calls whose backward has begun here, in that order, so that all ranks close them in one order.
    """

    def __init__(self) -> None:
        self.innermost: ForwardCall | None = None
        self.place: Place | None = None
        self.entered: dict[weakref.ref[ForwardCall], None] = {}


_here = _Thread()


def close_passed(place: Place, *, but: ForwardCall | None = None) -> None:
    """Close the calls, except ``but``, that the backward on this thread has passed; it is at ``place``."""
    _here.place = place
    for reference in list(_here.entered):
        call = reference()
        if call is not None and call.entered is not None:
            if call is but or not place.is_behind(call.start, call.entered):
                continue
            call.entered = None
            call.unit.backward_passed(call)
        _here.entered.pop(reference, None)  # it was closed now, or with the backward that it was part of


class Running:
    """From its making until ``end`` the module of a unit runs in ``call``, and calls made inside know that as the one
    around them. None stands for a forward without gradients. Profilers show it as a range."""

    __slots__ = ("_before", "_range", "call")

    def __init__(self, call: ForwardCall | None, unit_name: str) -> None:
        self.call = call
        quiet = Told.recorder is None and not profiler_runs()
        self._range: AbstractContextManager[Any] | None = NOTHING if quiet else profiled("forward", unit_name)
        self._range.__enter__()
        self._before, _here.innermost = _here.innermost, call
        if call is not None:
            call._runs = True

    def end(self) -> None:
        """Idempotent."""
        if self._range is None:
            return
        shown, self._range = self._range, None
        _here.innermost = self._before
        if self.call is not None:
            self.call._runs = False
        shown.__exit__(None, None, None)


def mark_side_output(tensor: torch.Tensor) -> torch.Tensor:
    """Tell the wrapped module whose forward runs that ``tensor`` leaves it otherwise than in what it returns.

    A unit's parameters are gathered again when the gradient of one of its outputs is there. A tensor that the forward
    computes and stores (``self.aux_loss = ...``), or that a hook on an inner module takes, is an output as well, and
    where nothing is returned whose gradient comes first, the tensor has to be marked::

        def forward(self, x):
            y = self.attention(x)
            self.features = fsdp.mark_side_output(y)  # part of the loss, while the output may not be
            return self.head(y.detach())

    Returns ``tensor`` itself. Outside of a forward of a wrapped module, without gradients, and for a tensor that needs
    none, nothing happens.
    """
    if _here.innermost is not None and tensor.requires_grad:
        _here.innermost.hook_outputs([tensor])
    return tensor
