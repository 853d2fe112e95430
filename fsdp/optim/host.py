"""An optimizer of offloaded parameters whose steps overlap with the next forward.

[Note: Order of a step]
``step()`` is called when all gradients are reduced and clipped. It takes the hyperparameters and the gradients, and a
thread then steps one unit after the other, in the order of the model. The next forward waits for the step of a unit
when it gathers that unit, and so does each call that reads the parameters: ``Unit.settle_step``. Each unit has one call
of the unmodified optimizer's ``step``, with the same parameters, states and values in the same order: the results are
those of a plain step, bit for bit, for an optimizer that steps each parameter by itself. With ``early`` the thread has
a unit's gradients as soon as they are complete in host memory, during the backward; ``step()`` adds the other
parameters.

[Note: Parameters of the thread]
The thread steps aliases of the parameters, which have gradients of their own, so that ``zero_grad()`` may be called at
once. The states are those of the optimizer that the program's factory made.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp import environment
from fsdp.checkpoint.optim_names import ModelParams, same_value
from fsdp.flat.flat_param import assign_grad
from fsdp.optim.whole import Factory, made_by
from fsdp.runtime import hooks
from fsdp.runtime.reduction import BucketGradients
from fsdp.runtime.unit import Unit


class HostOptimizer(Optimizer):
    """An optimizer whose steps run on a thread, while the next forward begins.

    For models with ``CPUOffload(offload_params=True)``, whose parameters, gradients and optimizer states are in host
    memory: the device computes the first units of the next forward while the host steps the others::

        model = FSDP(model, auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True))
        optimizer = fsdp.optim.HostOptimizer(model, lambda params: torch.optim.AdamW(params, lr=3e-4, fused=True))
        for batch in batches:
            model(batch).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()  # returns at once
            optimizer.zero_grad()

    The results are those of the optimizer alone, bit for bit. It must step each parameter by itself: its results must
    not depend on the gradients of any other parameter. ``param_groups`` are the optimizer's own dictionaries; a step
    uses their values at the call, so schedulers may change them afterwards.

    Every call of this package that reads parameters waits for the steps: forwards, state dicts, checkpoints,
    ``summon_full_params``. Before a program itself reads a parameter, a gradient or a state between ``step()`` and the
    next forward, it has to call :meth:`synchronize`; ``optimizer.state`` and ``state_dict()`` do so. With
    ``FSDP_DEBUG=1`` a read of a parameter that is being stepped is an error.

    With ``early=True`` each unit is stepped during the backward, when its gradient is complete, so that steps overlap
    with the backward too, and no gradient outlives the step of its unit. ``optimizer.step()`` is still called after
    each backward that is not under ``no_sync()``. Nothing can be done to gradients after a backward: clipping, scalers,
    ``zero_grad()`` instead of a step, two backwards for one step, and changes of hyperparameters between a backward and
    ``step()`` raise an error. If a backward raises, some units are stepped and others are not: load a checkpoint.

    Args:
        model: a wrapped model, or a module with wrapped modules in it.
        factory: makes the optimizer for the list of parameters that require gradients, in the order of
            ``model.parameters()``. It may make groups.
        early: step each unit during the backward.

    Raises:
        TypeError: ``factory`` returns no optimizer.
        ValueError: the model has no wrapped modules, or one whose parameters are not in host memory; or the optimizer
            does not hold exactly the parameters that it was given; or ``early`` with ``reduce_unused``.
        NotImplementedError: the optimizer is LBFGS.
    """

    def __init__(self, model: nn.Module, factory: Factory, *, early: bool = False) -> None:
        params = ModelParams(model)
        if not params.units:
            raise ValueError(
                f"expected a model with FullyShardedDataParallel modules in it, but {type(model).__name__} has none: "
                "use the optimizer itself"
            )
        for unit, name in params.units.items():
            if any(handle.shard.device.type != "cpu" for handle in unit.handles):
                raise ValueError(
                    f"HostOptimizer steps parameters in host memory, but those of {name} are on {unit.device}: wrap "
                    "the model with cpu_offload=CPUOffload(offload_params=True), or use the optimizer itself"
                )
            if early and unit.policy.tree.reduce_unused:
                raise ValueError(
                    "HostOptimizer(early=True) steps gradients before the ranks agree on unused parameters: leave out "
                    "reduce_unused=True or early=True"
                )
        self._model = model  # whose deletion would end the units
        self._inner = made_by(factory, [param for param in params.in_order if param.requires_grad], "factory")
        self.inner_optimizers = [self._inner]
        self.defaults = self._inner.defaults
        self._parts = [_Part(unit, self._inner) for unit in (*params.units, None)]
        for unit in params.units:
            unit.host_optimizer = weakref.ref(self)
        by_unit = {part.unit: part for part in self._parts}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                by_unit[params.holders[param].unit if param in params.holders else None].params[number].append(param)
        self._settings: list[dict[str, Any]] = []  # of the groups, when the first unit was stepped early
        for number, part in enumerate(self._parts):
            for bucket in part.buckets:
                bucket.stepper = functools.partial(_step_early, weakref.ref(self), number, bucket) if early else None
        self._error: BaseException | None = None  # of the thread
        self._failed_at = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsdp steps")
        weakref.finalize(self, self._thread.shutdown, wait=False)
        super().__setstate__({})  # instead of super().__init__(): groups and state are the inner optimizer's own

    # -- as torch's optimizers -----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The state of the inner optimizer, after the steps under way."""
        self.synchronize()
        return self._inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the parameters are divided once, by the constructor."""
        raise RuntimeError("add_param_group() of a HostOptimizer: make the groups in `factory`")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state and groups, as ``load_state_dict`` of the base class passes them."""
        self.synchronize()
        self._inner.__setstate__(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; with ``set_to_none=False`` after the steps under way, which read them."""
        self.check_not_stepped("zero_grad() instead of step()")
        if not set_to_none:
            self.synchronize()
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Begin to step all parameters that have gradients, with the present hyperparameters.

        Returns:
            the result of ``closure``, which is called first, with gradients enabled.

        Raises:
            RuntimeError: the step before has failed; or gradients are not reduced yet; or, with ``early``,
                hyperparameters changed after the backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(bucket.stepped for part in self._parts for bucket in part.buckets):
            self._end_early_steps()
        else:
            self.synchronize()
        for part in self._parts:
            if part.unit is not None:
                part.unit.check_gradients("HostOptimizer.step()")
        for part in self._parts:
            self._begin(part)
        return loss

    def synchronize(self) -> None:
        """Return when no step is under way.

        Raises:
            RuntimeError: the last step has failed; the error of the optimizer is the cause.
        """
        for part in self._parts:
            if part.unit is not None:
                part.unit.settle_step()

    # -- for the rest of the package -----------------------------------------------------------------------------------

    def stepped_params(self) -> Iterator[nn.Parameter]:
        """The parameters in the order of the groups."""
        return (param for group in self._inner.param_groups for param in group["params"])

    def optimizer_of(self, param: Any) -> Optimizer:
        """Return the inner optimizer."""
        return self._inner

    def check_not_stepped(self, call: str) -> None:
        """Raise RuntimeError if gradients that ``call`` is about were stepped early."""
        for part in self._parts:
            for bucket in part.buckets:
                bucket.check_not_stepped(call)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _begin(self, part: _Part, *, consumes: bool = False) -> None:
        """Let the thread step the parameters of ``part`` that have gradients; if it ``consumes`` these, ``.grad`` is
        None afterwards."""
        step = part.begin(hides=environment.DEBUG.value and part.unit is not None, consumes=consumes)
        if step is None:
            return
        if part.unit is None:  # no call of the package says when these are read
            self._run(step, "")
            self._wait(part)
        else:
            part.unit.step_under_way = functools.partial(self._wait, part)
            self._thread.submit(self._run, step, part.unit.name)

    def _run(self, step: _Step, unit_name: str) -> None:
        """Run ``step``, on the thread. After an error the others are left out."""
        try:
            if self._error is None:
                step.run()
        except BaseException as error:  # an interrupt as well: the next call of the program raises it
            self._error, self._failed_at = error, unit_name
        finally:
            step.done.set()

    def _wait(self, part: _Part) -> None:
        """Wait for the steps of ``part``; raise the error of the thread once."""
        part.end()
        if self._error is not None:
            for each in self._parts:  # whose steps are left out while there is an error
                each.end()
            error, self._error = self._error, None
            raise RuntimeError(
                f"the last step of HostOptimizer has failed at {self._failed_at}: {error}. Units before it are "
                "stepped, and others are not: load a checkpoint before training goes on"
            ) from error

    def step_early(self, number: int, bucket: BucketGradients) -> None:
        """Begin to step the parameters of ``bucket``, whose gradients are complete, in the middle of a backward."""
        bucket.check_not_stepped("a second backward before step()")
        if not any(each.stepped for part in self._parts for each in part.buckets):
            self.synchronize()
            self._settings = list(map(_settings, self.param_groups))
        bucket.stepped = True
        self._begin(self._parts[number], consumes=True)

    def _end_early_steps(self) -> None:
        """Raise RuntimeError if the units that were stepped in the backward had other hyperparameters."""
        for part in self._parts:
            for bucket in part.buckets:
                bucket.stepped = False
        for number, (before, now) in enumerate(zip(self._settings, map(_settings, self.param_groups))):
            changed = [name for name in now if name not in before or not same_value(before[name], now[name])]
            if changed:
                raise RuntimeError(
                    f"{changed[0]!r} of parameter group {number} changed from {before.get(changed[0])} to "
                    f"{now[changed[0]]} after units were stepped in the backward: with HostOptimizer(early=True) set "
                    "hyperparameters before the backward"
                )


def _step_early(optimizer: weakref.ref[HostOptimizer], number: int, bucket: BucketGradients) -> None:
    """Step ``bucket`` early; the model does not keep the optimizer alive."""
    alive = optimizer()
    if alive is not None:
        alive.step_early(number, bucket)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group, which may be changed afterwards."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


class _Alias(NamedTuple):
    """A parameter, and the tensor that the thread steps in its place: the same values, and a gradient of its own."""

    param: nn.Parameter
    stepped: nn.Parameter


class _Step(NamedTuple):
    """One step of some parameters of a unit. ``done`` is set when the thread has called ``run``."""

    run: Callable[[], None]
    aliases: list[_Alias]
    done: threading.Event


class _Part:
    """The parameters of one unit, or of no unit, and an optimizer of the factory's class for them.

    Attributes:
        params: by parameter group.
        buckets: of the unit.
    """

    def __init__(self, unit: Unit | None, inner: Optimizer) -> None:
        self.unit = unit
        self.buckets = [] if unit is None else unit.gradients
        self.params: list[list[nn.Parameter]] = [[] for _ in inner.param_groups]
        self._inner, self._steps = inner, list[_Step]()
        self._optimizer: Optimizer = object.__new__(type(inner))
        self._optimizer.__dict__.update(inner.__dict__)

    def begin(self, *, hides: bool, consumes: bool) -> _Step | None:
        """Take the gradients and the hyperparameters for a step; with ``hides``, reads of the parameters are errors
        until ``end``."""
        groups, aliases = [], []
        for group, params in zip(self._inner.param_groups, self.params):
            several = []
            for param in params:
                if param.grad is not None:
                    stepped = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                    assign_grad(stepped, param.grad)
                    several.append(_Alias(param, stepped))
            if several:
                groups.append({**_settings(group), "params": [alias.stepped for alias in several]})
                aliases += several
        if not aliases:
            return None
        for param, _ in aliases:
            if consumes:
                param.grad = None
            if hides:
                param.__class__ = _Hidden
        step = _Step(functools.partial(self._run, groups, aliases), aliases, threading.Event())
        self._steps.append(step)
        return step

    def _run(self, groups: list[dict[str, Any]], aliases: list[_Alias]) -> None:
        optimizer, states = self._optimizer, self._inner.state
        optimizer.param_groups = groups
        optimizer.state = defaultdict(dict, {each.stepped: states.get(each.param, {}) for each in aliases})
        hooks.steps_no_shards(optimizer)
        optimizer.step()
        for param, stepped in aliases:
            if state := optimizer.state.get(stepped):
                states[param] = state
            stepped.grad = None
        optimizer.param_groups, optimizer.state = [], defaultdict(dict)

    def end(self) -> None:
        """Wait for the steps, and allow reads of the parameters again."""
        for step in self._steps:
            step.done.wait()
            for param, _ in step.aliases:
                param.__class__ = nn.Parameter
        self._steps = []


class _Hidden(nn.Parameter):
    """The class of a parameter while a thread steps it, with ``FSDP_DEBUG=1``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads_attribute = func.__name__ in ("__get__", "__set__", "__delete__")
        if reads_attribute and func.__self__ is not torch.Tensor.data:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise RuntimeError(
            f"{func.__name__}() of a parameter that HostOptimizer steps: call optimizer.synchronize() before the "
            "program reads parameters between step() and the next forward"
        )
