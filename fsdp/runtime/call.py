"""The call of a unit's module: the forward, and the backwards through the graph that it built.

[Note: When a unit's backward is over] Two events end it. They are not the same. When the *last leaf that this backward
will reach* has delivered a gradient, the unit reduces. Autograd knows which leaves it will reach. The expected leaves
are kept per graph task, because reentrant checkpointing runs tasks inside an outer one; the unit is done when no task
expects anything. So an unused parameter does not block the unit, a module that is used twice reduces once, and ranks
that reach the same units start their collectives at the same places of the graph.

When the backward is *past every forward call of the unit* that it has entered, the unit reshards. That may be later: a
frozen or detached weight that was used first in forward is read last in backward, after every leaf has delivered.
Within one graph task, thread and device autograd runs nodes in decreasing order of their sequence numbers, which grow
as the graph is made. So when a node runs that is older than a call, the call is over, however the inputs entered it: as
arguments, attributes, or through nested units. The engine reads the running node's number at outputs of units, at
recomputations, and at tensors that are arguments of units, and closes the calls that are passed. Calls without such a
hook are closed at the end of the backward.

A backward enters a call through the call's outputs. A tensor that leaves the call otherwise (stored on a module, taken
by a hook) and gets its gradient before them is a *side output*, which the program has to mark:
:func:`mark_side_output`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._C._functorch import peek_interpreter_stack

from fsdp.comm.profiling import NOTHING, profiled
from fsdp.flat.params import Mark
from fsdp.runtime import hooks
from fsdp.runtime.context import RootContext, backward_of_summoned
from fsdp.runtime.nested import tensors_in, to_device
from fsdp.runtime.precision import cast_floating
from fsdp.runtime.ranges import ranged
from fsdp.runtime.unit import Summoned, Unit
from fsdp.runtime.unshard import Residence

_INPUT, _OUTPUT = "fsdp input", "fsdp output"  # keys of hooks; torch's own are integers
_NO_THREAD = -1


class Place(NamedTuple):
    """The position of a backward: the thread, the graph task, and the sequence number of the running node, or a number
    larger than any where autograd does not say."""

    thread: int
    task: int
    node: int

    @staticmethod
    def now() -> Place:
        """Return the position of the backward that runs on this thread."""
        node = hooks.current_node()
        number = sys.maxsize if node is None else node._sequence_nr()  # None: in a graph that runs compiled
        return Place(threading.get_ident(), hooks.current_backward(), number)

    def is_past(self, start: int, entered: Place) -> bool:
        """Whether the backward has passed a call that began at node ``start`` and was entered at ``entered``.

        Task numbers grow, so a task with a larger number than the running one was nested in it and is over.
        """
        if self.thread != entered.thread or self.thread == _NO_THREAD:
            return False
        return self.task < entered.task or (self.task == entered.task and self.node < start)


class ForwardCall:
    """One call of a unit's module, around the module's forward::

        try:
            inputs = call.enter(inputs)
            with call.shown:
                output = module(*inputs)
            output = call.leave(output)
        except BaseException:
            call.abort()
            raise

    With gradients enabled it lives as long as the graph that the forward built, and keeps the unit and the tree's
    context alive with it.

    Attributes:
        unit: the unit that was called.
        context: of the tree that the unit was in.
        tracked: gradients were enabled.
        full_precision: the graph uses the full-precision copy of the parameters.
        in_summon: the call was made inside ``summon_full_params``; a backward of it is refused.
        start: the sequence number of the first graph node.
        marks: by bucket, the values of the parameters in the forward; see ``ParamGuard.mark``.
        outer: the call of the unit around, inside which this one was made; None if that one is not tracked.
        is_outermost: the call begins and ends a forward of the tree, unless a backward runs, which it is a part of.
        shown: a context that profilers show, for the module's forward.
    """

    __slots__ = (
        "__weakref__",
        "_runs",
        "context",
        "full_precision",
        "in_summon",
        "is_outermost",
        "marks",
        "outer",
        "shown",
        "start",
        "tracked",
        "unit",
    )

    def __init__(self, unit: Unit, context: RootContext) -> None:
        """
        Raises:
            RuntimeError: inside ``summon_full_params`` with ``rank0_only`` or ``offload_to_cpu``, or a functional
                transform.
        """
        _check_callable(unit)
        self.unit, self.context = unit, context
        self.tracked = torch.is_grad_enabled()
        self.in_summon = unit.summoned is not None
        self.full_precision = self.in_summon or unit.precision.wants_full
        self.start = 0
        self.marks: list[Mark] = []
        self.outer = _here.innermost
        forward = context.passes.forward  # of this unit: an interrupt has ended the cleanup of an earlier call
        self.is_outermost = forward is None or forward.caller is unit
        self._runs = False
        self.shown: AbstractContextManager[Any] = NOTHING

    # -- the forward ---------------------------------------------------------------------------------------------------

    def enter(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """Gather the unit, and prefetch the next units. Return the inputs (args, kwargs), cast; those of the root
        on the device.

        Raises:
            NotImplementedError: a forward of the tree runs on another thread.
        """
        unit, context = self.unit, self.context
        context.enter_forward(unit)
        unit.calls.add(self)
        if unit is context.root:
            inputs = to_device(inputs, unit.device)
        self.start = hooks.next_node_number()
        if self.in_summon:  # it computes with the parameters and in the dtypes that are registered
            unit.precision.cast_buffers(unit.device, full_precision=True)
        else:
            if not self.full_precision:
                has_params = bool(unit.handles)
                inputs = unit.precision.cast_inputs(inputs, is_root=unit is context.root, has_params=has_params)
            self._gather()
        if self.tracked:
            args, kwargs = inputs
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    self._hook_input(value)
        self.shown = profiled("forward", unit.name)
        self._runs = self.tracked
        _here.innermost = self if self.tracked else None
        return inputs

    def _gather(self) -> None:
        unit, unsharder = self.unit, self.context.unsharder
        recomputing = hooks.current_backward() != hooks.NO_BACKWARD
        with hooks.own_operations():
            if recomputing:
                close_passed(Place.now())
            unsharder.compute_in(unit, self.full_precision)
            unsharder.unshard(unit, refill=not recomputing)
            if not recomputing:
                unsharder.prefetch(unit, begins=True)
        if self.tracked:
            self.marks = [guard.mark() for guard in unit.guards]

    @ranged("_post_forward", "unit.name")
    def leave(self, output: Any, module: str) -> Any:
        """Reshard the unit, of which ``module`` has run, unless more modules of the unit follow, or the backward needs
        it. Hook the outputs, and return them, cast."""
        _here.innermost, self._runs = self.outer, False
        unit, unsharder = self.unit, self.context.unsharder
        output_dtype = unit.precision.asked.output_dtype
        if output_dtype is not None and not (self.in_summon or unit.precision.wants_full):
            output = cast_floating(output, output_dtype)
        outputs = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        for guard in () if self.in_summon else unit.guards:
            guard.leave(outputs)
        differentiable = [tensor for tensor in outputs if tensor.requires_grad] if self.tracked else []
        self.hook_outputs(differentiable)
        with hooks.own_operations():
            unit.calls.discard(self)
            if hooks.current_backward() != hooks.NO_BACKWARD:
                self._end_recomputation()
            elif not unit.calls:
                if not self.in_summon:
                    if not unit.members.are_several or unit.members.note_ran(module, unsharder.generation):
                        unsharder.leave_forward(unit)
                    else:
                        unsharder.keep_for_group(unit)
                    unsharder.prefetch(unit)
                if self.is_outermost:  # last: an error before it is aborted
                    self.context.exit_forward(backward_of=self if differentiable else None)
        return output

    def _end_recomputation(self) -> None:
        if not self.unit.is_running:  # the unit's backward follows
            self.context.unsharder.becomes(self.unit, Residence.RECOMPUTED)

    @hooks.untraced
    def abort(self) -> None:
        """End a forward that raised, maybe as it began. Checkpointing ends a recomputation early in this way, which is
        no fault."""
        _here.innermost, self._runs = self.outer, False
        unit, context = self.unit, self.context
        if hooks.current_backward() != hooks.NO_BACKWARD:
            unit.calls.discard(self)
            self._end_recomputation()
        elif context.passes.forward is None or context.is_on_thread:
            context.fail()
            unit.calls.discard(self)
            if self.is_outermost and not unit.calls:
                context.reset()
        # else ``enter`` has refused the call, and the forward on the other thread goes on

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def hook_outputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let a backward enter the call at the gradient of any of ``tensors``, the outputs.

        Tensors that were made before the call (an argument that is passed through, an entry of a cache) do not need
        the unit, and a leaf has a hook of its own. If all outputs seem older than the call, another thread may have
        made them, whose sequence numbers are unrelated, and all are hooked.

        A view that is changed in place loses its node, and the hook with it. The base keeps both.
        """
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
            hooks.on_gradient(tensor, self.reached, _OUTPUT)

    def _hook_input(self, tensor: torch.Tensor) -> None:
        """Read the backward's position at the gradient of ``tensor``, an argument. Parameters of a unit around may come
        between that and the unit that runs next in backward."""
        hooks_of: Any = tensor._backward_hooks
        if hooks_of is not None and _OUTPUT in hooks_of:
            return  # the call that returned it has a hook there
        if tensor.requires_grad and tensor.grad_fn is not None:  # a leaf would collect hooks
            hooks.on_gradient(tensor, functools.partial(_input_reached, weakref.ref(self)), _INPUT)

    # -- a backward ----------------------------------------------------------------------------------------------------

    @ranged("_pre_backward_hook", "unit.name")
    def reached(self, grad: torch.Tensor | None = None) -> None:
        """Enter the call: a backward has reached an output."""
        try:
            self._enter()
        except BaseException as error:
            self.unit.fail(error, "start of backward")
            raise

    def _enter(self) -> None:
        unit = self.unit
        if self.in_summon:
            raise backward_of_summoned(unit.name)
        if torch.is_grad_enabled() and unit.gathers:  # in a hook: the backward has create_graph
            if not hooks.goes_on():
                return  # autograd.grad() asked for the gradient of an output, and does not need the unit
            raise RuntimeError(
                f"a backward with create_graph=True reached {unit.name}: gradients of gradients of sharded parameters "
                "are not supported. Compute such terms on the plain module, or use ShardingStrategy.NO_SHARD"
            )
        context = self._context_now()
        context.enter_backward(unit)
        unsharder = context.unsharder
        unsharder.compute_in(unit, self.full_precision)
        self._note_place()
        expected = unit.arrivals.enter()
        if unit.policy.unshard_in_backward or unit.is_gathered:  # recomputations inside use the leaves
            unsharder.unshard(unit, refill=False)
        for bucket, (guard, before) in enumerate(zip(unit.guards, self.marks)):  # after ``unshard``
            guard.check_unchanged(before, bucket, expected)
        unsharder.prefetch(unit, begins=True)

    def _note_place(self) -> None:
        """Note where the backward enters the call, and close the calls that it has passed."""
        place = Place.now()
        if place.node < self.start:  # another thread computed the output; the numbers are unrelated
            place = place._replace(thread=_NO_THREAD)
        entered = self.unit.open_calls.get(self)
        if entered is None or (entered.thread == place.thread and place.task < entered.task):
            self.unit.open_calls[self] = place
        elif entered.thread != place.thread:  # it is unknown which of the two passes the call first
            self.unit.open_calls[self] = place._replace(thread=_NO_THREAD)
        _here.entered[weakref.ref(self)] = None
        close_passed(place, but=self)
        outer = self.outer
        if outer is not None and outer not in outer.unit.open_calls and not outer._runs:
            # The graph leads on to what the outer call computed before this one. Usually that call was entered through
            # an output; here an output of the inner call was a side output of it.
            outer.reached()

    def close(self) -> None:
        """Note that the backward has passed the call, and reshard the unit if no call is open any more."""
        unit, unsharder = self.unit, self._context_now().unsharder
        unit.open_calls.pop(self, None)
        if not unit.is_running:
            unsharder.end_backward(unit)
        elif unit.members.are_several and not (unit.open_calls or unit.calls):
            unsharder.keep_for_group(unit)  # the backward of another module may follow

    def prefetch_next(self) -> None:
        """Gather the units that follow in backward, which has passed the call."""
        try:
            self._context_now().unsharder.prefetch(self.unit)
        except BaseException as error:
            self.unit.fail(error, "end of backward")
            raise

    def _context_now(self) -> RootContext:
        return self.unit.position.context() or self.context


@hooks.untraced
def _input_reached(call_ref: weakref.ref[ForwardCall], grad: torch.Tensor) -> None:
    """Close the calls that the backward has passed: the gradient of an argument of a call is there. The graph of an
    argument may outlive the call's."""
    call = call_ref()
    inside = call is not None and call in call.unit.open_calls
    place = Place.now()
    if place != _here.place:  # else an output of another unit was reached at the same node
        close_passed(place)
    if call is not None and inside and call not in call.unit.open_calls:
        call.prefetch_next()


def _check_callable(unit: Unit) -> None:
    """Raise RuntimeError if a forward of ``unit`` is not possible now."""
    if unit.summoned is Summoned.PARTLY:
        raise RuntimeError(
            f"forward of {unit.name} inside summon_full_params with rank0_only or offload_to_cpu: the full "
            "parameters are not on every rank's device. Run it outside, or summon without these options"
        )
    if unit.summoned is not None and any(tp is not None and tp.is_plain for each in unit.handles for tp in each.tp):
        raise RuntimeError(
            f"forward of {unit.name} inside summon_full_params, which shows all experts as DTensors, and the forward "
            "expects plain parameters, of this rank's experts. Run it outside"
        )
    if peek_interpreter_stack() is not None and unit.gathers:
        raise RuntimeError(
            f"{unit.name} is called inside of torch.vmap or a transform of torch.func, which sharded parameters do "
            "not support. Transform functions inside of its forward, or call the plain module"
        )


# -- the calls of a thread ---------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """The forwards and backwards of one thread.

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
        entered = None if call is None else call.unit.open_calls.get(call)
        if call is not None and entered is not None:
            if call is but or not place.is_past(call.start, entered):
                continue
            call.close()
        _here.entered.pop(reference, None)  # it was closed now, or with the backward that it was part of


def mark_side_output(tensor: torch.Tensor) -> torch.Tensor:
    """Mark ``tensor`` as an output of the wrapped module whose forward runs, although the module does not return it.

    A unit's parameters are gathered again when the gradient of an output is there. A tensor that the forward
    computes and stores (``self.aux_loss = ...``), or that a hook on an inner module takes, is an output as well. Unless
    the gradient of a returned tensor comes first, it has to be marked::

        def forward(self, x):
            y = self.attention(x)
            self.features = fsdp.mark_side_output(y)  # part of the loss, while the output may not be
            return self.head(y.detach())

    Returns ``tensor`` itself. A no-op outside of a forward of a wrapped module, without gradients, or for a tensor
    that requires none.
    """
    if _here.innermost is not None and tensor.requires_grad:
        _here.innermost.hook_outputs([tensor])
    return tensor
