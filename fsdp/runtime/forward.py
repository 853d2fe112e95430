"""The forward of one unit: gather, run the module, reshard."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from fsdp.runtime import hooks
from fsdp.runtime.backward import ForwardCall, Place, Running, close_passed
from fsdp.runtime.context import RootContext
from fsdp.runtime.nested import tensors_in
from fsdp.runtime.precision import cast_floating
from fsdp.runtime.ranges import ranged
from fsdp.runtime.unit import Summoned, Unit


def enter(unit: Unit, context: RootContext, inputs: tuple[Any, Any]) -> tuple[Running, tuple[Any, Any]]:
    """Gather ``unit``, and prefetch the next units. Return a context for the run of the module, and the inputs (args,
    kwargs), cast. ``leave`` or ``abort`` has to follow.

    Raises:
        RuntimeError: inside ``summon_full_params`` with ``rank0_only`` or ``offload_to_cpu``, or a functional
            transform.
    """
    _check_callable(unit)
    context.enter_forward(unit)
    unit.progress.enter()
    try:
        start = hooks.next_node_number()
        if unit.summoned is not None:  # it computes with the parameters and in the dtypes that are registered
            unit.precision.cast_buffers(unit.device, full_precision=True)
            marks, full_precision = [], True
        else:
            full_precision = unit.precision.wants_full
            inputs = _gather(unit, context, inputs, full_precision=full_precision)
            marks = [guard.mark() for guard in unit.guards]
        call = None
        if torch.is_grad_enabled():
            call = ForwardCall(unit, context, start, marks, full_precision=full_precision)
            args, kwargs = inputs
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    call.hook_input(value)
        return Running(call, unit.name), inputs
    except BaseException:
        abort(unit, context)
        raise


def _gather(unit: Unit, context: RootContext, inputs: tuple[Any, Any], *, full_precision: bool) -> tuple[Any, Any]:
    """Gather ``unit``, and prefetch the next units. Return the inputs, cast."""
    if not full_precision:
        is_root, has_params = unit is context.root, bool(unit.handles)
        inputs = unit.precision.cast_inputs(inputs, is_root=is_root, has_params=has_params)
    recomputing = hooks.current_backward() != hooks.NO_BACKWARD
    with hooks.own_operations():
        if recomputing:
            close_passed(Place.now())
        context.unsharder.compute_in(unit, full_precision)
        context.unsharder.unshard(unit, refill=not recomputing)
        if not recomputing:
            context.unsharder.prefetch(unit, begins=True)
    return inputs


def _check_callable(unit: Unit) -> None:
    """Raise RuntimeError if a forward of ``unit`` is not possible now."""
    if unit.summoned is Summoned.PARTLY:
        raise RuntimeError(
            f"forward of {unit.name} inside summon_full_params with rank0_only or offload_to_cpu: the full "
            "parameters are not on every rank's device. Run it outside, or summon without these options"
        )
    if peek_interpreter_stack() is not None and unit.gathers:
        raise RuntimeError(
            f"{unit.name} is called inside of torch.vmap or a transform of torch.func, which sharded parameters do "
            "not support. Transform functions inside of its forward, or call the plain module"
        )


@ranged("_post_forward", "name")
def leave(unit: Unit, context: RootContext, call: ForwardCall | None, output: Any, module: str) -> Any:
    """Reshard ``unit``, of which ``module`` has run, unless more modules of the unit follow, or the backward needs it.
    Hook the outputs, and return them, cast."""
    for guard in unit.guards if unit.summoned is None else ():
        guard.leave()
    output_dtype = unit.precision.asked.output_dtype
    if output_dtype is not None and unit.summoned is None and not unit.precision.wants_full:
        output = cast_floating(output, output_dtype)
    outputs = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
    for handle in unit.handles:
        if handle.holds_any(outputs):
            context.unsharder.hold_output(unit)
    differentiable = [tensor for tensor in outputs if tensor.requires_grad] if call is not None else []
    if call is not None:
        call.hook_outputs(differentiable)
    with hooks.own_operations():
        if unit.progress.leave():
            if hooks.current_backward() == hooks.NO_BACKWARD and unit.summoned is None:
                unsharder, progress = context.unsharder, unit.progress
                if not progress.has_several_modules or progress.note_ran(module, unsharder.generation):
                    unsharder.leave_forward(unit)
                else:
                    unsharder.keep_to_others(unit)
                unsharder.prefetch(unit)
            context.exit_forward(unit, backward_follows=bool(differentiable))  # last: an error before it is aborted
    return output


@hooks.untraced
def abort(unit: Unit, context: RootContext) -> None:
    """End a forward of ``unit`` that raised. Checkpointing ends a recomputation early in this way, which is no
    fault."""
    outermost = unit.progress.leave()
    if hooks.current_backward() == hooks.NO_BACKWARD:
        context.fail()
    if outermost:
        context.exit_forward(unit, backward_follows=True, failed=True)
