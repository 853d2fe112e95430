"""``fsdp.describe(model)``: the units of a wrapped model as a table, and remarks on probable mistakes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fsdp.flat.names import members_of, unit_of, wrappers_in
from fsdp.runtime.data_ranks import with_data_ranks
from fsdp.runtime.tensors import num_params
from fsdp.runtime.unit import Unit, units_in
from fsdp.tools.text import Report, counted, in_bytes, in_dtype

TINY_NBYTES = 100_000  # full parameters of a unit; a gather of less takes as long
_MOST = 0.5  # share of the parameters in one unit that is remarked on
_REMEDY = "auto_wrap_policy=ModuleWrapPolicy({Layer}) makes a unit of each module of a class"


@dataclass(frozen=True)
class UnitDescription:
    """One unit. All numbers of bytes are this rank's.

    Attributes:
        name: path of the module in the model ("" for the model), without wrapper parts.
        kind: class of the module.
        depth: number of units around it.
        strategy: sharding strategy, and how the unit deviates from it.
        shards: number of ranks that the unit is sharded over.
        divisor: the number that the sum of the ranks' gradients is divided by.
        numel: elements of the parameters over all ranks, without padding; ``frozen_numel`` of them require no grad.
        padding: elements of padding over all ranks.
        dtypes: dtypes of parameters, compute and reduction, per bucket.
        param_nbytes, grad_nbytes: bytes of the shards and of their gradients.
        full_nbytes: bytes of the full buffers that have memory of their own.
    """

    name: str
    kind: str
    depth: int
    strategy: str
    shards: int
    divisor: float
    numel: int
    frozen_numel: int
    padding: int
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    param_nbytes: int
    grad_nbytes: int
    full_nbytes: int


@dataclass(frozen=True, repr=False)
class Description(Report):
    """The result of :func:`describe`. It prints as a table with the remarks below.

    Attributes:
        units: the units, depth first.
        unmanaged_numel: elements of parameters that no unit owns; every rank has all of them.
        remarks: sentences about probable mistakes.
    """

    units: tuple[UnitDescription, ...]
    unmanaged_numel: int
    remarks: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the parameters of all units."""
        return sum(unit.numel for unit in self.units)

    def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        head = ["unit", "parameters", "share", "padding", "frozen", "strategy", "ranks"]
        head += ["dtypes", "shard", "gradients", "gathered"]
        rows = [head]
        for _, alike in itertools.groupby(self.units, key=lambda unit: dataclasses.replace(unit, name="")):
            unit, *rest = alike  # neighbours that differ only by name share a row
            label = f"{unit.name} to {rest[-1].name}: {len(rest) + 1} x" if rest else unit.name or "(root)"
            dtypes = [" -> ".join(map(in_dtype, each if len(set(each)) > 1 else each[:1])) for each in unit.dtypes]
            rows.append(
                [
                    f"{'  ' * unit.depth}{label} {unit.kind}",
                    f"{unit.numel:,}",
                    f"{unit.numel / max(self.numel, 1):.1%}",
                    f"{unit.padding:,}",
                    f"{unit.frozen_numel / max(unit.numel, 1):.0%}",
                    unit.strategy,
                    str(unit.shards),
                    ", ".join(dict.fromkeys(dtypes)) or "-",
                    *map(in_bytes, (unit.param_nbytes, unit.grad_nbytes, unit.full_nbytes)),
                ]
            )
        shards, grads = (sum(getattr(unit, held) for unit in self.units) for held in ("param_nbytes", "grad_nbytes"))
        total = [counted(len(self.units), "unit"), f"{self.numel:,}", *[""] * 6, in_bytes(shards), in_bytes(grads), ""]
        return [], [*rows, total], [f"* {remark}" for remark in self.remarks]


def describe(model: nn.Module) -> Description:
    """Describe the units of ``model`` with their memory on this rank, and remark on probable mistakes.

    Remarks: a policy without a match, one unit with most of the parameters, tiny units, parameters without a unit.
    There is no communication; any rank may call it at any time. It waits for the steps of a ``HostOptimizer``, and
    gives the bytes of the states. ::

        print(fsdp.describe(model))

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no module in ``model`` is wrapped.
    """
    found = list(units_in(model))
    if not found:
        raise ValueError(
            f"describe() is for wrapped models, and nothing in this {type(model).__name__} is: wrap it with "
            "FullyShardedDataParallel, or call fsdp.plan(model, world_size=...) to see the units that it would make"
        )
    strategies = {unit_of(wrapper): wrapper.sharding_strategy.name for wrapper in wrappers_in(model)}
    ranks = {unit: ranks for _, unit, ranks in with_data_ranks(model)}
    units = tuple(_described(name, unit, len(around), strategies[unit], ranks[unit]) for name, unit, around in found)
    unmanaged = num_params(model) - sum(unit.numel for unit in units)
    return Description(units, unmanaged, tuple(_remarks(units, unmanaged)))


def _described(name: str, unit: Unit, depth: int, strategy: str, ranks: int) -> UnitDescription:
    """Describe ``unit``, in a tree with ``ranks`` of ``data_ranks``."""
    layouts = [handle.layout for handle in unit.handles]
    records = [record for layout in layouts for record in layout.params]
    numel, frozen, grads = 0, 0, 0
    for handle, views in zip(unit.handles, unit.views):
        numels = [(tp or record).numel for tp, record in zip(handle.tp, handle.layout.params)]
        numel += sum(numels)
        members = {i for visible in views.visible if not visible.param.requires_grad for i in visible.members}
        frozen += sum(count for index, count in enumerate(numels) if index in members)
        grads += handle.shard.nbytes if any(visible.param.requires_grad for visible in views.visible) else 0
    if strategy in ("FULL_SHARD", "HYBRID_SHARD") and unit.policy.reshard_after_forward is False:
        strategy += ", kept after forward"
    if unit.groups.experts is not None:
        strategy += f", experts over {unit.groups.experts.size()} ranks"
    divisor = unit.divisor(ranks) or unit.groups.data_parallel_size
    if divisor != unit.groups.data_parallel_size:
        strategy += f", gradients divided by {divisor:g}"
    if (optimizer := unit.host_optimizer()) is not None:
        states = [optimizer.state.get(param, {}) for param in unit.visible_params()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        strategy += f", stepped on the host ({in_bytes(sum(value.nbytes for value in tensors))} of states)"
    return UnitDescription(
        name=name,
        kind=", ".join(dict.fromkeys(type(member).__name__ for member in members_of(unit.module).values())),
        depth=depth,
        strategy=strategy,
        shards=unit.groups.shard_size,
        divisor=divisor,
        numel=numel,
        frozen_numel=frozen,
        padding=sum(layout.padded_numel for layout in layouts) - sum(record.numel for record in records),
        dtypes=tuple((layout.dtype, layout.compute_dtype, layout.reduce_dtype) for layout in layouts),
        param_nbytes=sum(handle.shard.nbytes for handle in unit.handles),
        grad_nbytes=grads,
        full_nbytes=unit.full_nbytes,
    )


def _remarks(units: tuple[UnitDescription, ...], unmanaged: int) -> Iterator[str]:
    numel = sum(unit.numel for unit in units)
    largest = max(units, key=lambda unit: unit.numel)
    if any(unit.full_nbytes for unit in units):  # else no unit is ever gathered
        if len(units) == 1:
            what = "all that is wrapped" if unmanaged else "the whole model"
            yield f"{what} is one unit, gathered at once: no policy, or none that matched; {_REMEDY}"
        elif largest.numel > _MOST * numel:
            where = f"{largest.name!r} holds" if largest.name else "the root holds, outside of the units in it,"
            yield (
                f"{where} {largest.numel / numel:.0%} of the parameters, and most of the model is gathered at once: "
                f"wrap more of the modules in it; {_REMEDY}"
            )
    tiny = [unit.name for unit in units if 0 < unit.full_nbytes < TINY_NBYTES and unit.name]
    if len(tiny) > 1:
        yield (
            f"{len(tiny)} units are below {in_bytes(TINY_NBYTES)} ({', '.join(tiny[:3])}{', ...' * (len(tiny) > 3)}): "
            "gathering so little takes as long as gathering more; wrap the modules around them instead"
        )
    if unmanaged:
        yield (
            f"{unmanaged:,} numbers are in parameters that no unit owns: every rank holds all of them, and nothing "
            "averages their gradients"
        )
