"""The arithmetic of ``fsdp.plan``: the units of a plain model, their memory and their traffic.

[Note: The peak of a step]
The peak is a closed form, evaluated when the backward computes each unit. It adds, in bytes:

* full buffers of the unit, of the units around it, and of earlier units that stay gathered; two more for prefetching
  and for memory that the pool keeps;
* reduce buffers: two, and those of outer units with gradients both before and after; with gloo also the memory that a
  direct exchange receives into; the largest gradient of one parameter in the unit;
* gradients of units that the backward has passed, and activations of units that it has not reached.

With a ``HostOptimizer`` these are bytes of the device: of the gradients the two largest, on the way to host memory, and
of the shards the largest, on the way back. On the late device of ``tests/device`` this is within 20 %.

Otherwise, if the optimizer's step takes more, the peak is there: gradients and temporary tensors. The latter are found
by trial. Adam makes two elements for each element of a parameter in torch's loop, and keeps one for each of the
parameter before; with ``foreach`` as many as all parameters have; with ``fused`` none.

Not counted: temporary memory of operations and of collectives, memory that the allocator keeps or adds by rounding, and
CUDA's context. On two CPU ranks without shared memory the peak is within 10 % of the bytes that tensors take
(``test_plan.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fsdp.api import MixedPrecision, ShardingStrategy, as_mixed_precision
from fsdp.comm.groups import Groups
from fsdp.flat.layout import FlatLayout
from fsdp.flat.names import members_of
from fsdp.flat.ownership import Ignored, OwnedParam, owned_params
from fsdp.runtime.hooks import around_forward, on_saved
from fsdp.wrap import choose_units

_RING_SEGMENT = 1 << 20  # bytes; the largest message of gloo's all-reduce


@dataclass(eq=False)
class ModelUnit:
    """A unit that the wrapper would make of modules of a plain model.

    Attributes:
        module: the module, or the group of modules.
        index: the number in the order of the modules, depth first; 0 is the root.
        around: the indices of the units around it.
        precision: the dtypes of the unit.
        strategy: the strategy that the policy gives this unit; None for the model's.
        names: the paths of the modules.
        is_open_early: the unit has trained parameters before and after those of other units, so that the reduce buffer
            is open during their whole backward.
        activation_nbytes: the bytes that autograd saves in the unit's forward.
        expert_ranks: the number of ranks with other experts each; 1 for a unit without experts.
    """

    module: nn.Module
    index: int
    around: set[int]
    precision: MixedPrecision
    strategy: ShardingStrategy | None
    names: list[str] = field(default_factory=list)
    owned: list[OwnedParam] = field(default_factory=list)
    is_open_early: bool = False
    activation_nbytes: int = 0
    expert_ranks: int = 1


def find_units(model: nn.Module, policy: Any, precision: MixedPrecision) -> list[ModelUnit]:
    """Return the units that the wrapper would make of ``model``, in the order of the modules."""
    options: dict[str, Any] = {"mixed_precision": precision, "sharding_strategy": None}
    targets, groups = choose_units(model, policy, set(), set(), options)
    chosen = {model: (model, options), **{module: (module, arguments) for module, arguments in targets.items()}}
    chosen |= {member: (group, arguments) for group, arguments in groups for member in members_of(group).values()}
    units: dict[nn.Module, ModelUnit] = {}
    begun: list[tuple[str, ModelUnit]] = []  # with the paths of the modules, in their order
    for path, module in model.named_modules():
        if module in chosen:
            whole, arguments = chosen[module]
            around = {unit.index for outer, unit in begun if not outer or path.startswith(f"{outer}.")}
            dtypes, strategy = as_mixed_precision(arguments["mixed_precision"]), arguments["sharding_strategy"]
            unit = units.setdefault(whole, ModelUnit(whole, len(units), around, dtypes, strategy))
            unit.names.append(path)
            begun.append((path, unit))
    place = {param: number for number, param in enumerate(model.parameters())}
    nested: set[nn.Parameter] = set()
    for unit in reversed(units.values()):
        ignored = Ignored(params=frozenset(nested))
        unit.owned = owned_params(unit.module, ignored, f"the {type(unit.module).__name__} unit")
        nested.update(item.param for item in unit.owned)
        places = {place[item.param] for item in unit.owned}
        trained = [place[item.param] for item in unit.owned if item.param.requires_grad]
        unit.is_open_early = bool(trained) and not places.issuperset(range(min(trained), max(trained)))
    for unit in units.values():
        if len(unit.names) > 1:  # a group is gathered around the units between its first and its last module
            numbers = [number for number, (_, each) in enumerate(begun) if each is unit]
            for _, other in begun[numbers[0] : numbers[-1]]:
                other.around |= {unit.index} - {other.index}
    return list(units.values())


def try_forward(model: nn.Module, units: Sequence[ModelUnit], inputs: Any) -> None:
    """Run ``model`` on the meta device, and count the activations of each unit.

    Raises:
        ValueError: the model does not run with ``inputs``: a sequence, a mapping of keywords, or the only tensor.
    """
    running: list[ModelUnit] = []
    kept: dict[int, torch.Tensor] = {}  # by storage; held, so that the number is not reused

    def save(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept[storage._cdata] = tensor
            running[-1].activation_nbytes += storage.nbytes()

    def leave(*_: Any) -> None:
        running.pop()

    def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor.to("meta", dtype if tensor.is_floating_point() else None)

    for unit in units:
        for module in members_of(unit.module).values():
            around_forward(module, lambda *_, unit=unit: running.append(unit), leave)
        for item in unit.owned:
            param = nn.Parameter(cast(item.param.detach(), unit.precision.param_dtype), item.param.requires_grad)
            kept[param.untyped_storage()._cdata] = param
            for site in item.sites:
                setattr(site.module, site.attribute, param)
    inputs = tree_map_only(torch.Tensor, lambda tensor: cast(tensor, units[0].precision.param_dtype), inputs)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    try:
        with on_saved(save), torch.enable_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run with this batch, on the meta device: {type(error).__name__}: "
            f"{error}. Pass the arguments of its forward as inputs=(...), or no batch: activations are not counted then"
        ) from error


@dataclass
class UnitMemory:
    """Bytes of a unit on one rank under one strategy.

    Attributes:
        stays: the unit stays gathered from forward to backward.
        offloaded: shards and gradients are in host memory.
        params, grads, optim: of the shards, their gradients and the optimizer's state.
        full: of the full buffers that have memory of their own.
        uploaded: of offloaded shards on the device, in their own and in the compute dtype.
        reduce: of the reduce buffers; without sharding these become the gradients.
        receive: of the separate memory that a reduction receives into (gloo).
        reduced: of the reduced gradients, in the reduce dtype.
        leaf: of the largest gradient of one parameter.
        gathered, received: bytes that a gather and a reduction receive from other ranks.
        reductions: the number of collectives of a reduction.
    """

    unit: ModelUnit
    stays: bool
    offloaded: bool
    params: int = 0
    grads: int = 0
    optim: int = 0
    full: int = 0
    uploaded: int = 0
    reduce: int = 0
    receive: int = 0
    reduced: int = 0
    leaf: int = 0
    gathered: int = 0
    received: int = 0
    reductions: int = 0

    def add(self, layout: FlatLayout, groups: Groups, optim: int | None, *, on_cpu: bool) -> None:
        """Add a bucket. ``optim`` is the optimizer's state in bytes, and None if the bucket is frozen."""
        ranks, replicas = groups.shard_size, groups.replica_size
        shard, full = (numel * layout.compute_dtype.itemsize for numel in (layout.shard_numel, layout.padded_numel))
        self.params += layout.shard_numel * layout.dtype.itemsize
        is_cast = layout.compute_dtype != layout.dtype
        self.full += full if groups.sharded or is_cast or self.offloaded else 0
        if self.offloaded and (groups.sharded or is_cast):
            self.uploaded += layout.shard_numel * layout.dtype.itemsize + shard * (groups.sharded and is_cast)
        self.gathered += shard * (ranks - 1)
        if optim is None:
            return
        reduced = layout.shard_numel * layout.reduce_dtype.itemsize
        self.grads += layout.shard_numel * layout.dtype.itemsize
        self.optim += optim
        self.reduced += reduced
        self.reduce += reduced * ranks if groups.sharded or self.offloaded else 0
        self.leaf = max(self.leaf, *(record.numel * layout.compute_dtype.itemsize for record in layout.params))
        self.received += reduced * (ranks - 1) + 2 * reduced * (replicas - 1) // replicas  # a ring, there and back
        self.reductions += (ranks > 1) + (replicas > 1)
        if on_cpu:
            self.receive += reduced * (ranks - 1) + (replicas > 1) * 2 * min(reduced // replicas, _RING_SEGMENT)


def peaks(units: Sequence[UnitMemory]) -> tuple[int, int]:
    """Return the largest working set, and the largest sum of working set, gradients and activations.

    [Note: The peak of a step] has the formula. ``units`` are in the order of the forward.
    """
    spare = sorted((each.full for each in units if not each.stays), reverse=True)[:2]
    reduces = sorted((each.reduce + each.receive for each in units if not each.unit.is_open_early), reverse=True)[:2]
    uploaded = max((each.uploaded for each in units if not each.stays), default=0)
    working = most = 0
    for number, each in enumerate(units):
        begun = units[: number + 1]
        around = [other for other in begun if other.unit.index in each.unit.around]
        full = sum(other.full for other in begun if other.stays) + sum(o.full for o in around if not o.stays)
        opened = sum(other.reduce for other in [each, *around] if other.unit.is_open_early)
        held = full + sum(spare) + uploaded + opened + sum(reduces) + each.leaf
        working = max(working, held)
        grads = [other.reduced for other in units[number:]]
        if each.offloaded:
            grads = sorted(max(other.reduced, other.grads) for other in units[number:])[-2:]
        most = max(most, held + sum(grads) + sum(other.unit.activation_nbytes for other in begun))
    return working, most


def gathers(units: Sequence[UnitMemory]) -> list[int]:
    """Return how often a step gathers each unit: a second time if a backward reaches it after it was resharded."""
    first = next((number for number, each in enumerate(units) if each.grads), len(units))
    reached = {index for each in units[first:] for index in (each.unit.index, *each.unit.around)}
    return [
        bool(each.gathered) + bool(each.gathered and not each.stays and each.unit.index in reached) for each in units
    ]
