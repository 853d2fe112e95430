"""Whole parameters and gradients, from the parts that users hold: shapes, values and sizes."""

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
class _Location:
    """The position of a visible parameter in the unit."""

    unit: Unit
    bucket: int
    position: int

    @property
    def handle(self) -> FlatParamHandle:
        return self.unit.handles[self.bucket]

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the parameter in a bucket's full vector, in the true shape; with tensor parallelism, for which the
        ranks communicate, a copy."""
        if not self.unit.policy.tree.use_orig_params:
            return full[: self.handle.layout.numel]
        local, tp = parameter_views(self.handle.layout, full)[self.position], self.tp
        return local if tp is None else tp.around(local, requires_grad=False).full_tensor()

    @property
    def tp(self) -> TensorParallel | None:
        """The placement of the parameter by tensor parallelism; None without one, and for a flat parameter."""
        return self.handle.tp[self.position] if self.unit.policy.tree.use_orig_params else None

    def check(self, call: str) -> None:
        """Raise RuntimeError if the shards do not have the values now."""
        if self.unit.phase is not Phase.IDLE:
            raise RuntimeError(
                f"{call} in the middle of the {self.unit.phase.name.lower()} of {self.unit.name}: call it outside; "
                "inside summon_full_params parameters are whole"
            )


# By the parameter's id, which may be another parameter's by now: unit, bucket and position.
_locations: dict[int, tuple[weakref.ref[Unit], int, int]] = {}


def _location_of(param: torch.Tensor) -> _Location | None:
    """Return the position of ``param``; None if no unit owns it. Raises TypeError if it is no tensor."""
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"expected a parameter, one of model.parameters(), but got a {type(param).__name__}")
    found = _known_location_of(param)
    if found is None and getattr(param, "_fsdp_flattened", False):
        _locations.clear()
        for unit in every_unit():
            for bucket, views in enumerate(unit.views):
                for position, visible in enumerate(views.visible):
                    _locations[id(visible.param)] = weakref.ref(unit), bucket, position
        found = _known_location_of(param)
    return found


def _known_location_of(param: torch.Tensor) -> _Location | None:
    unit_ref, bucket, position = _locations.get(id(param), (lambda: None, 0, 0))
    unit = unit_ref()
    visible = [] if unit is None else unit.views[bucket].visible
    if unit is None or position >= len(visible) or visible[position].param is not param:
        return None
    return _Location(unit, bucket, position)


def global_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape of the whole parameter of which ``param`` is this rank's part.

    ``param`` is from ``parameters()`` of a wrapped module. For a flat parameter it is that of the vector without
    padding (with tensor parallelism, of the vector of one shard group); for any other tensor the tensor's shape.
    """
    location = _location_of(param)
    if location is None:
        return param.shape
    layout = location.handle.layout
    if location.tp is not None:
        return torch.Size(location.tp.shape)
    return torch.Size(
        layout.params[location.position].shape if location.unit.policy.tree.use_orig_params else (layout.numel,)
    )


@torch.no_grad()
def full_tensor(param: torch.Tensor) -> torch.Tensor:
    """Gather the whole parameter of which ``param`` is this rank's part.

    All ranks must call it for the same parameters in the same order. It gathers the bucket of the parameter.

    Returns:
        A copy of shape ``global_shape(param)``, in the parameter's dtype, on the device of the unit. For any other
        tensor a copy, or ``DTensor.full_tensor()``.

    Raises:
        RuntimeError: a forward or backward of the unit is under way, or it is inside ``summon_full_params``.
    """
    location = _location_of(param)
    if location is None:
        return _alone(param)
    location.check("full_tensor()")
    unit = location.unit
    with join(unit).calling("full_tensor()", often=True):
        unit.follow_parameters()
        (full,) = unit.gather_vectors([location.handle.shard])
        return location.part_of(full).clone()


@torch.no_grad()
def full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Gather the whole gradient of the parameter of which ``param`` is this rank's part, like :func:`full_tensor`.

    Ranks without a gradient contribute zeros. Returns None if no rank has one; for experts (``fsdp.shard_experts``),
    which other ranks have other ones of, zeros.

    Raises:
        RuntimeError: as :func:`full_tensor`; or gradients of ``no_sync`` are not reduced yet.
    """
    location = _location_of(param)
    if location is None:
        return None if param.grad is None else _alone(param.grad)
    location.check("full_grad()")
    with join(location.unit).calling("full_grad()", often=True):
        full, there = gather_grads(location.unit, location.bucket, "full_grad()")
        all_have_to_take_part = location.tp is not None and location.tp.experts
        return location.part_of(full).clone() if there[location.position] or all_have_to_take_part else None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def num_params(module: nn.Module, *, only_trainable: bool = False) -> int:
    """Count the elements of the parameters of ``module`` over all ranks, each once; with ``only_trainable`` only those
    of parameters that require grad."""
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
        TypeError: not exactly one of ``rule`` and ``weight_decay`` was given; or ``rule`` returned no dict of options.
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
    location = _location_of(param)
    if location is None or location.unit.policy.tree.use_orig_params:
        return [(clean(name), global_shape(param))]
    prefix, handle = paths.get(location.unit, ""), location.handle
    return [
        (clean(joined(prefix, record.name)), torch.Size((tp or record).shape))
        for tp, record in zip(handle.tp, handle.layout.params)
    ]
