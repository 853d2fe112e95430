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
from fsdp.flat.names import clean, joined, path_of
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
        if not self.unit.policy.tree.use_orig_params:
            return full[: self.handle.layout.numel]
        local, tp = parameter_views(self.handle.layout, full)[self.position], self.tp
        return local if tp is None else tp.around(local, requires_grad=False).full_tensor()

    @property
    def tp(self) -> TensorParallel | None:
        """How tensor parallelism has placed the parameter, if it has; a flat one has local tensors of many."""
        return self.handle.tp[self.position] if self.unit.policy.tree.use_orig_params else None

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
                    _places[id(visible.param)] = _Place(weakref.ref(unit), bucket, position)
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
    return torch.Size(
        layout.params[place.position].shape if place.unit.policy.tree.use_orig_params else (layout.numel,)
    )


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


Rule = Callable[[str, torch.Size], Mapping[str, Any]]


def param_groups(
    module: nn.Module, rule: Rule | None = None, *, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: parameters with equal options are one group.

    Training scripts choose groups by ``p.dim()``, which sharded parameters have lost; names and whole shapes remain.
    Parameters that require no grad are left out. A flat parameter (``use_orig_params=False``) is in one group, so the
    parameters in it need equal options: wrap the model with ``flat_param_key``, which divides flat parameters.

        model = FSDP(model, auto_wrap_policy=policy, flat_param_key=lambda name, param: param.dim() > 1)
        optimizer = AdamW(fsdp.param_groups(model, weight_decay=0.1))
        optimizer = AdamW(fsdp.param_groups(model, lambda name, shape: {"lr": 1e-4 if "head" in name else 1e-3}))

    Args:
        rule: returns the options of the parameter with this name in the plain model and this whole shape; the same on
            every rank.
        weight_decay: stands for a rule that gives this weight decay to parameters of two or more dimensions, and none
            to biases and norms. The group with weight decay is the first.

    Raises:
        TypeError: both or none of ``rule`` and ``weight_decay`` were given; or ``rule`` returned no dict of options.
        ValueError: parameters of one flat parameter have different options.
    """
    paths = {unit: path_of(unit, name) for name, unit, _ in units_in(module)}
    if (rule is None) is (weight_decay is None):
        got = "none" if rule is None else "both"
        raise TypeError(f"param_groups() takes either a rule or weight_decay=, and got {got} of them")
    choose: Rule = rule or (lambda name, shape: {"weight_decay": weight_decay if len(shape) > 1 else 0.0})
    groups: list[dict[str, Any]] = []
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        several = [(each, _options(choose, each, shape)) for each, shape in _wholes_of(name, param, paths)]
        first, options = several[0]
        for other, others in several:
            if others != options:
                raise ValueError(
                    f"{first!r} and {other!r} are in one flat parameter, {clean(name)!r}, which can have one set of "
                    f"options, and the rule gives {dict(options)} and {dict(others)}: wrap with flat_param_key=, which "
                    "divides flat parameters, or with use_orig_params=True"
                )
        group = next((group for group in groups if {**group, "params": None} == {**options, "params": None}), None)
        if group is None:
            groups.append({**options, "params": [param]})
        else:
            group["params"].append(param)
    if weight_decay is not None:
        groups.sort(key=lambda group: group["weight_decay"] != weight_decay)
    return groups


def _options(rule: Rule, name: str, shape: torch.Size) -> Mapping[str, Any]:
    options = rule(name, shape)
    if not isinstance(options, Mapping) or "params" in options:
        raise TypeError(
            "expected the rule of param_groups() to return a dict of options without 'params', such as "
            f"{{'weight_decay': 0.0}}, but for {name!r} it returned {options!r}"
        )
    return options


def _wholes_of(name: str, param: nn.Parameter, paths: Mapping[Unit, str]) -> list[tuple[str, torch.Size]]:
    """Return the name and whole shape of each original parameter that ``param`` stands for. ``paths`` has the path of
    each unit in the model."""
    place = _place_of(param)
    if place is None or place.unit.policy.tree.use_orig_params:
        return [(clean(name), global_shape(param))]
    prefix, handle = paths.get(place.unit, ""), place.handle
    return [
        (clean(joined(prefix, record.name)), torch.Size((tp or record).shape))
        for tp, record in zip(handle.tp, handle.layout.params)
    ]
