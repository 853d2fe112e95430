"""An optimizer of offloaded parameters whose steps overlap with the next forward.

[Note: Order of a step]
``step()`` is called when all gradients are reduced and clipped. It takes the hyperparameters and the gradients, and a
thread then steps one unit after the other, in the order of the model. The next forward waits for the step of a unit
when it gathers that unit, and so does each call that reads the parameters: ``Unit.settle_step``. Each unit has one call
of the unmodified optimizer's ``step``, with the same parameters, states and values in the same order: the results are
those of a plain step, bit for bit, for an optimizer that steps each parameter by itself.

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
from fsdp.checkpoint.optim_names import ModelParams
from fsdp.flat.flat_param import assign_grad
from fsdp.optim.whole import Factory, made_by
from fsdp.runtime import hooks
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

    Args:
        model: a wrapped model, or a module with wrapped modules in it.
        factory: makes the optimizer for the list of parameters that require gradients, in the order of
            ``model.parameters()``. It may make groups.

    Raises:
        TypeError: ``factory`` returns no optimizer.
        ValueError: the model has no wrapped modules, or one whose parameters are not in host memory; or the optimizer
            does not hold exactly the parameters that it was given.
        NotImplementedError: the optimizer is LBFGS.
    """

    def __init__(self, model: nn.Module, factory: Factory) -> None:
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
        self._model = model  # whose deletion would end the units
        self._inner = made_by(factory, [param for param in params.in_order if param.requires_grad], "factory")
        self.inner_optimizers = [self._inner]
        self.defaults = self._inner.defaults
        self._parts = [_Part(unit, self._inner) for unit in (*params.units, None)]
        by_unit = {part.unit: part for part in self._parts}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                by_unit[params.holders[param].unit if param in params.holders else None].params[number].append(param)
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
        if not set_to_none:
            self.synchronize()
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Begin to step all parameters that have gradients, with the present hyperparameters.

        Returns:
            the result of ``closure``, which is called first, with gradients enabled.

        Raises:
            RuntimeError: the step before has failed; or gradients are not reduced yet.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        for part in self._parts:
            if part.unit is not None:
                part.unit.check_gradients("HostOptimizer.step()")
        for part in self._parts:
            part.prepare(hides=environment.DEBUG.value and part.unit is not None)
            if part.unit is None:  # no call of the package says when these are read
                part.step()
                part.show()
            else:
                part.unit.step_under_way = functools.partial(self._wait, part)
        self._thread.submit(self._run)
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

    # -- a step --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Step the units, on the thread. After an error the others are left as they are."""
        for part in self._parts:
            if part.unit is not None:
                try:
                    if self._error is None:
                        part.step()
                except BaseException as error:  # an interrupt as well: the next call of the program raises it
                    self._error, self._failed_at = error, part.unit.name
                finally:
                    part.done.set()

    def _wait(self, part: _Part) -> None:
        """Wait for the step of ``part``; raise the error of the thread once."""
        part.done.wait()
        part.show()
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(
                f"the last step of HostOptimizer has failed at {self._failed_at}: {error}. Units before it are "
                "stepped, and others are not: load a checkpoint before training goes on"
            ) from error


class _Alias(NamedTuple):
    """A parameter, and the tensor that the thread steps in its place: the same values, and a gradient of its own."""

    param: nn.Parameter
    stepped: nn.Parameter


class _Part:
    """The parameters of one unit, or of no unit, in an optimizer of the factory's class.

    Attributes:
        params: by parameter group.
        done: the thread has stepped them.
    """

    def __init__(self, unit: Unit | None, inner: Optimizer) -> None:
        self.unit, self.done = unit, threading.Event()
        self.params: list[list[nn.Parameter]] = [[] for _ in inner.param_groups]
        self._inner, self._aliases = inner, list[_Alias]()
        self._optimizer: Optimizer = object.__new__(type(inner))
        self._optimizer.__dict__.update(inner.__dict__)

    def prepare(self, *, hides: bool) -> None:
        """Take the gradients and the hyperparameters; with ``hides``, reads of the parameters are errors until
        ``show``."""
        self.done.clear()
        groups = []
        for group, params in zip(self._inner.param_groups, self.params):
            aliases = []
            for param in params:
                if param.grad is not None:
                    stepped = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                    assign_grad(stepped, param.grad)
                    aliases.append(_Alias(param, stepped))
            if aliases:
                settings = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in group.items()}
                groups.append({**settings, "params": [alias.stepped for alias in aliases]})
            self._aliases += aliases
        self._optimizer.param_groups = groups
        hooks.steps_no_shards(self._optimizer)
        for param, _ in self._aliases if hides else ():
            param.__class__ = _Hidden

    def step(self) -> None:
        """Step the parameters."""
        if not self._aliases:
            return
        states = self._inner.state
        self._optimizer.state = defaultdict(dict, {each.stepped: states.get(each.param, {}) for each in self._aliases})
        self._optimizer.step()
        for param, stepped in self._aliases:
            if state := self._optimizer.state.get(stepped):
                states[param] = state

    def show(self) -> None:
        """Allow reads of the parameters again, and drop the gradients."""
        for param, _ in self._aliases:
            param.__class__ = nn.Parameter
        self._aliases, self._optimizer.param_groups, self._optimizer.state = [], [], defaultdict(dict)


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
