"""Whole parameters and gradients, from the parts that users hold: their shapes, values and numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import parameter_views
from fsdp.flat.names import clean
from fsdp.flat.tensor_parallel import TensorParallel
from fsdp.runtime.build import join
from fsdp.runtime.full_params import gather_grads
from fsdp.runtime.unit import Phase, Unit, every_unit, units_in, units_of


@dataclass(frozen=True)
class _Place:
    """Where a parameter that users hold is in its unit."""

    unit_ref: weakref.ref[Unit]
    bucket: int
    position: int

    def holds(self, param: torch.Tensor) -> bool:
        unit = self.unit_ref()
        visible = [] if unit is None else unit.views[self.bucket].visible
        return self.position < len(visible) and visible[self.position].param is param

    @property
    def unit(self) -> Unit:
        unit = self.unit_ref()
        assert unit is not None  # the parameter's owner is there
        return unit

    @property
    def handle(self) -> FlatParamHandle:
        return self.unit.handles[self.bucket]

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter's part of the bucket's full vector, in its true shape; with tensor parallelism, for which its
        ranks communicate, a copy."""
        if not self.unit.policy.use_orig_params:
            return full[: self.handle.layout.numel]
        local, tp = parameter_views(self.handle.layout, full)[self.position], self.tp
        return local if tp is None else tp.around(local, requires_grad=False).full_tensor()

    @property
    def tp(self) -> TensorParallel | None:
        """How tensor parallelism has placed the parameter, if it has; a flat one has local tensors of many."""
        return self.handle.tp[self.position] if self.unit.policy.use_orig_params else None

    def check(self, call: str) -> None:
        """Raises RuntimeError where the shards do not have the values."""
        if self.unit.phase is not Phase.IDLE:
            raise RuntimeError(
                f"{call} in the middle of the {self.unit.phase.name.lower()} of {self.unit.name}: call it outside; "
                "inside summon_full_params parameters are whole"
            )


_places: dict[int, _Place] = {}  # by the parameter's id; looked at anew where that is another parameter's by now


def _place_of(param: torch.Tensor) -> _Place | None:
    """None for what is no parameter of a unit. Raises TypeError for what is no tensor."""
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"expected a parameter, one of model.parameters(), but got a {type(param).__name__}")
    place = _places.get(id(param))
    if place is not None and place.holds(param):
        return place
    if getattr(param, "_fsdp_flattened", False):
        _places.clear()
        for unit in every_unit():
            for bucket, views in enumerate(unit.views):
                for position, visible in enumerate(views.visible):
                    _places[id(visible.param)] = _Place(unit.ref, bucket, position)
                if run := next((run for run in views.runs if run.param is param), None):
                    raise ValueError(
                        f"expected a parameter of the model, and got what flat_param_groups() has made of {run}, of "
                        f"{unit.name}"
                    )
        place = _places.get(id(param))
    return place if place is not None and place.holds(param) else None


def global_shape(param: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter of which ``param``, from ``parameters()`` of a wrapped module, is this rank's
    part; of a flat parameter that of its vector, without padding (with tensor parallelism of the vector that the ranks
    of one shard group share); of any other tensor its own shape."""
    place = _place_of(param)
    if place is None:
        return param.shape
    layout = place.handle.layout
    if place.tp is not None:
        return torch.Size(place.tp.shape)
    return torch.Size(layout.params[place.position].shape if place.unit.policy.use_orig_params else (layout.numel,))


@torch.no_grad()
def full_tensor(param: torch.Tensor) -> torch.Tensor:
    """The whole parameter of which ``param`` is this rank's part: a copy, of shape ``global_shape(param)``, in the
    parameter's dtype, on the device where its unit computes. All ranks have to call it for the same parameters in the
    same order; it gathers the part of the unit that has the parameter's dtype. Of any other tensor a copy
    (``DTensor.full_tensor()`` where it is one).

    Raises:
        RuntimeError: a forward or backward of its unit is under way, or it is inside ``summon_full_params``.
    """
    place = _place_of(param)
    if place is None:
        return _alone(param)
    place.check("full_tensor()")
    unit = place.unit
    with join(unit).calling("full_tensor()", often=True):
        unit.follow_parameters()
        full = unit.gather_now(place.bucket, place.handle.shard.to(unit.device))
        return place.part_of(full).clone()


@torch.no_grad()
def full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient of the parameter of which ``param`` is this rank's part, as :func:`full_tensor` has its
    values; zeros from ranks without one, and None if no rank has one.

    Raises:
        RuntimeError: as :func:`full_tensor`; or there are gradients of ``no_sync`` that are not reduced yet.
    """
    place = _place_of(param)
    if place is None:
        return None if param.grad is None else _alone(param.grad)
    place.check("full_grad()")
    with join(place.unit).calling("full_grad()", often=True):
        full, there = gather_grads(place.unit, place.bucket, "full_grad()")
        return place.part_of(full).clone() if there[place.position] else None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def num_params(module: nn.Module, *, only_trainable: bool = False) -> int:
    """How many numbers the parameters of ``module`` have, over all ranks, each counted once; with ``only_trainable``
    those that require grad."""
    several: list[tuple[int, nn.Parameter]] = []
    for unit in units_of(module):
        for handle, views in zip(unit.handles, unit.views):
            wholes = [tp or record for tp, record in zip(handle.tp, handle.layout.params)]
            for visible in views.visible:
                its = slice(visible.members[0], visible.members[-1] + 1)
                several.append((sum(whole.numel for whole in wholes[its]), visible.param))
    managed = {param for _, param in several}
    several += [(param.numel(), param) for param in module.parameters() if param not in managed]
    return sum(numel for numel, param in several if param.requires_grad or not only_trainable)


def param_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer as training scripts make them by ``p.dim()``, which sharded parameters have lost: those
    of two or more dimensions with ``weight_decay``, biases and norms with none; what requires no grad is left out.

    Raises:
        ValueError: flat parameters, which hold both kinds: pass ``use_orig_params=True`` to the wrapper.
    """
    units_in(module)  # which refuses what is no model
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, param in module.named_parameters():
        place = _place_of(param)
        if place is not None and not place.unit.policy.use_orig_params:
            raise ValueError(
                f"{name} of {place.unit.name} is a flat parameter, of weights and biases alike: pass "
                "use_orig_params=True to FullyShardedDataParallel for groups of its parameters"
            )
        if param.requires_grad:
            groups[len(global_shape(param)) < 2]["params"].append(param)
    return [group for group in groups if group["params"]]


def flat_param_groups(
    module: nn.Module, rule: Callable[[str, torch.Size], Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Groups for an optimizer of a model with ``use_orig_params=True``, which steps a few vectors instead of hundreds
    of parameters: of each unit and dtype, neighbours with the same options are one ``nn.Parameter``, 1-D, this rank's
    part of them, over the memory that the model's own have, with a ``.grad`` that is theirs. What is done to either
    side's ``.grad``, ``requires_grad`` or values is done to the other's, for gradients and ``requires_grad`` by the
    next forward, backward or step.

    For optimizers that step each element by itself, which is all of torch's but ``Adafactor``, ``Muon`` and ``LBFGS``:
    what looks at the norm, the shape or the rank of a parameter (LAMB, LARS and Shampoo, too) sees that of a vector.
    Optimizer state is saved and loaded by the parameters' names and shapes, as without this function, by the functions
    of this package (not by ``optimizer.state_dict()``, which has one rank's vectors).

        optimizer = AdamW(fsdp.flat_param_groups(model, lambda name, shape: {"weight_decay": 0.1 * (len(shape) > 1)}))

    Args:
        rule: the options of the parameter with this name in the plain model and this whole shape; the same on every
            rank. Equal options are one group, in the order of the model. None: one group without options.

    Parameters that require no grad are left out. Freezing some of a vector's members later is an error at the next
    forward or step, and gradients of some of them alone (``reduce_unused=True`` gives none to what no rank uses) are at
    the next step; all together are frozen, or have none, as ever.

    Raises:
        TypeError: ``rule`` gave no dict.
        ValueError: flat parameters, which are vectors already (pass ``model.parameters()``); or an optimizer that is
            still there holds other neighbours of the same parameters.
        RuntimeError: a forward or backward of a unit is under way, or it is inside ``summon_full_params``.
    """
    units_in(module)  # which refuses what is no model
    options: list[Mapping[str, Any]] = []
    labels: dict[tuple[Unit, int], dict[int, int]] = {}  # of each bucket's parameters the number of the group
    members: list[tuple[int, _Place | None, nn.Parameter]] = []
    for name, param in module.named_parameters():
        place = _place_of(param)
        if place is not None:
            place.check("flat_param_groups()")
            if not place.unit.policy.use_orig_params:
                raise ValueError(
                    f"{name} of {place.unit.name} is a flat parameter already: give the optimizer model.parameters(), "
                    "or pass use_orig_params=True to FullyShardedDataParallel for groups of what is in it"
                )
        if not param.requires_grad:
            continue
        given = {} if rule is None else rule(clean(name), global_shape(param))
        if not isinstance(given, Mapping) or "params" in given:
            raise TypeError(
                f"expected the rule of flat_param_groups() to return a dict of options without 'params', such as "
                f"{{'weight_decay': 0.0}}, but for {clean(name)!r} it returned {given!r}"
            )
        if given not in options:
            options.append(given)
        members.append((options.index(given), place, param))
        if place is not None:
            labels.setdefault((place.unit, place.bucket), {})[place.position] = members[-1][0]
    groups: list[dict[str, Any]] = [{**given, "params": []} for given in options]
    held: dict[tuple[Unit, int], dict[int, nn.Parameter]] = {}
    for (unit, bucket), of in labels.items():
        views = unit.views[bucket]
        held[unit, bucket] = views.runs.hold(views.handle, of)
        views.follow_runs()
    for number, place, param in members:
        one = param if place is None else held[place.unit, place.bucket][place.position]
        if not any(one is other for other in groups[number]["params"]):
            groups[number]["params"].append(one)
    return groups
