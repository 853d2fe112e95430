"""What a unit owns: the parameters of its subtree that no nested unit has, grouped into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.comm.collectives import Groups
from fsdp.comm.streams import resolve_device
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.layout import FlatLayout, ParamSpec

WRAPPED_MODULE = "_fsdp_wrapped_module"
ALIGNMENT = 16  # bytes; collectives and kernels fall back to slow paths on what is not aligned so


@dataclass
class Place:
    """One registration of a parameter: ``module.<attribute>``, known in the unit as ``name``."""

    module: nn.Module
    attribute: str
    name: str


@dataclass
class OwnedParam:
    """A parameter of the unit and every place where it is registered; the first place names it."""

    param: nn.Parameter
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.places[0].name


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) for ``module`` and its descendants, every path to each, without entering nested units."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not hasattr(child, WRAPPED_MODULE):
            yield from own_modules(child, f"{prefix}.{name}" if prefix else name)


def owned_params(module: nn.Module, ignored: Set[nn.Parameter], unit_name: str) -> list[OwnedParam]:
    """The parameters that ``module``'s unit owns, in registration order, depth first; shared ones once.

    Raises:
        ValueError: a parameter already belongs to another unit, or its kind cannot be flattened.
    """
    found: dict[nn.Parameter, OwnedParam] = {}
    for prefix, owner in own_modules(module):
        for attribute, param in owner._parameters.items():
            if param is None or param in ignored:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if param not in found:
                _check(param, name, unit_name)
                found[param] = OwnedParam(param)
            if all((place.module, place.attribute) != (owner, attribute) for place in found[param].places):
                found[param].places.append(Place(owner, attribute, name))
    return list(found.values())


def _check(param: nn.Parameter, name: str, unit_name: str) -> None:
    if getattr(param, "_fsdp_flattened", False):
        other = getattr(param, "_fsdp_owner", "another unit")
        raise ValueError(
            f"parameter {name!r} of {unit_name} is shared with {other}, which already owns it. A parameter can be "
            "sharded by one unit only: wrap the lowest module that contains both of its places as one unit, and none "
            "of the two apart"
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"parameter {name!r} of {unit_name} is a DTensor; tensor parallelism is not supported yet"
        )
    if isinstance(param, nn.UninitializedParameter):
        raise ValueError(
            f"parameter {name!r} of {unit_name} is not initialised yet (a lazy module): run one forward of the plain "
            "model before wrapping it"
        )
    if param.device.type == "meta":
        raise NotImplementedError(
            f"parameter {name!r} of {unit_name} is on the meta device; materialising it is not supported yet: "
            "materialise the module before wrapping it"
        )
    if param.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} of {unit_name} has layout {param.layout}; only strided parameters can be sharded"
        )


def _memory_order(param: torch.Tensor) -> tuple[int, ...] | None:
    """The strides to keep: those of a dense tensor that is not row-major. None stores it row-major."""
    if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param):
        return None
    return tuple(param.stride())


def build_handles(
    owned: list[OwnedParam], groups: Groups, device: torch.device, *, align_params: bool
) -> list[tuple[FlatParamHandle, list[OwnedParam]]]:
    """One handle per bucket of (dtype, ``requires_grad``), in order of first appearance, trainable ones first.

    The layout follows the accelerators' alignment rules there; on CPU shards are what ``torch.chunk`` gives, and
    ``align_params`` alone decides whether parameters start on 16-byte boundaries.
    """
    buckets: dict[tuple[torch.dtype, bool], list[OwnedParam]] = {}
    for item in owned:
        buckets.setdefault((item.param.dtype, item.param.requires_grad), []).append(item)
    on_host = device.type == "cpu"
    handles = []
    for (dtype, _), members in sorted(buckets.items(), key=lambda entry: not entry[0][1]):
        specs = [
            ParamSpec(
                name=item.name,
                shape=tuple(item.param.shape),
                stride=_memory_order(item.param),
                aliases=tuple(place.name for place in item.places[1:]),
            )
            for item in members
        ]
        layout = FlatLayout.build(
            specs,
            dtype=dtype,
            world_size=groups.shard_size,
            param_alignment=ALIGNMENT if align_params or not on_host else 1,
            shard_alignment=1 if on_host else ALIGNMENT,
        )
        handles.append((FlatParamHandle(layout, [item.param for item in members], groups, device), members))
    return handles


def move_to(module: nn.Module, owned: list[OwnedParam], device_id: int | str | torch.device | None) -> torch.device:
    """Move the unit's parameters and its modules' buffers to ``device_id`` if given; returns where the unit computes.

    Parameters stay the same objects.

    Raises:
        RuntimeError: parameters lie on several accelerator devices, or partly on one without ``device_id``.
        ValueError: they lie on another accelerator device than ``device_id``.
    """
    devices = sorted({item.param.device for item in owned}, key=str)
    away = [device for device in devices if device.type != "cpu"]
    if len(away) > 1:
        raise RuntimeError(f"a unit's parameters must lie on one device, got {', '.join(map(str, away))}")
    if device_id is None:
        if away and len(devices) > 1:
            raise RuntimeError(
                f"a unit's parameters lie on CPU and on {away[0]}: pass device_id= to move them to one device"
            )
        return away[0] if away else torch.device("cpu")
    target = resolve_device(device_id)
    if away and away[0] != target:
        raise ValueError(
            f"device_id is {target}, but parameters lie on {away[0]}: move them there first or drop device_id"
        )
    with torch.no_grad():
        for item in owned:
            item.param.data = item.param.data.to(target)
            if item.param.grad is not None:
                item.param.grad = item.param.grad.to(target)
        for _, owner in own_modules(module):
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.device.type == "cpu":
                    owner._buffers[name] = buffer.to(target)
    return target
