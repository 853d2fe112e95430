"""``summon_full_params``: show full parameters inside a context, and write changes back.

Each unit's parameters are gathered into memory of their own, and parameters over it are registered on the modules. A
forward inside computes with these. On exit each rank copies its part back into the shard.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp.comm.user_warnings import warn_user
from fsdp.flat.flat_param import assign_grad
from fsdp.flat.full_copy import parameter_views
from fsdp.flat.names import joined, path_of
from fsdp.flat.params import ParamGuard
from fsdp.flat.views import BucketViews
from fsdp.runtime.build import join
from fsdp.runtime.context import RootContext
from fsdp.runtime.undo import undone_by
from fsdp.runtime.unit import Unit, units_in

_Grads = list[list[torch.Tensor | None]]  # by bucket and parameter, in full shape


@dataclass(frozen=True)
class SummonOptions:
    """See ``FullyShardedDataParallel.summon_full_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    @property
    def call(self) -> str:
        """The call, with the argument that determines the collectives."""
        return "summon_full_params(with_grads=True)" if self.with_grads else "summon_full_params()"

    def check(self, unit: Unit) -> None:
        """Raise NotImplementedError if options conflict."""
        sharded = unit.groups.sharded
        for conflict, words in (
            (self.with_grads and not unit.policy.tree.use_orig_params, "with_grads=True with use_orig_params=False"),
            (self.with_grads and self.offload_to_cpu, "with_grads=True with offload_to_cpu=True"),
            (self.offload_to_cpu and not sharded, "offload_to_cpu=True with NO_SHARD"),
            (self.writeback and self.rank0_only, "writeback=True with rank0_only=True"),
        ):
            if conflict:
                raise NotImplementedError(f"summon_full_params: {words} is not supported")


@contextlib.contextmanager
def summon(units: Sequence[tuple[Unit, RootContext]], options: SummonOptions) -> Iterator[None]:
    """Show the full parameters of ``units`` inside the context, which all ranks of the groups must enter alike.

    Raises:
        AssertionError: a unit runs, or is summoned already.
    """
    if options.offload_to_cpu and not options.rank0_only:
        warn_user(
            "summon_full_params(offload_to_cpu=True) without rank0_only=True makes a CPU copy of the full parameters "
            "on every rank"
        )
    for unit, _ in units:
        unit.check_idle(
            "Cannot manually unshard parameters during forward/backward, nor while they are shown already",
            AssertionError,
        )
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as calls:
            for context in dict.fromkeys(context for _, context in units):
                calls.enter_context(context.calling(options.call, often=True))
            for unit, context in units:
                values, grads = _gather_values(unit, context, options)
                stack.enter_context(undone_by(functools.partial(_end_summon, unit, values, options)))
                _begin_summon(unit, values, grads, options)
        yield


def is_device(device: torch.device) -> bool:
    """Whether ``device`` has memory apart from the host's."""
    return device.type != "cpu"


def _gather_values(
    unit: Unit, context: RootContext, options: SummonOptions
) -> tuple[list[torch.Tensor], _Grads | None]:
    """Return the vectors to show, none where this rank shows none, and the full gradients."""
    unit.follow_parameters()
    with torch.no_grad():
        full_grads = _full_grads(unit) if options.with_grads else None
        context.unsharder.reshard(unit)
        values = unit.gather_vectors([handle.shard for handle in unit.handles])
    if options.rank0_only and unit.groups.shard_rank != 0:
        values = []
    elif options.offload_to_cpu and is_device(unit.device):
        values = [value.to("cpu", copy=True) for value in values]
    return values, full_grads


def _begin_summon(unit: Unit, values: list[torch.Tensor], grads: _Grads | None, options: SummonOptions) -> None:
    offloaded = options.offload_to_cpu and is_device(unit.device)
    unit.begin_summon(everywhere=not (offloaded or options.rank0_only))
    for position, (views, value) in enumerate(zip(unit.views, values)):
        views.begin_summon(parameter_views(views.handle.layout, value), None if grads is None else grads[position])


def _end_summon(unit: Unit, values: list[torch.Tensor], options: SummonOptions) -> None:
    writes = options.writeback or not unit.groups.sharded  # parameters that are not sharded are shown themselves
    with torch.no_grad(), contextlib.ExitStack() as undo:  # all callbacks run, even if one raises
        undo.callback(unit.end_summon)
        for views, guard, value in reversed(list(zip(unit.views, unit.guards, values))):  # in reverse
            undo.callback(_end_summon_of_bucket, views, guard, value, writes=writes, casts=options.writeback)


def _end_summon_of_bucket(
    views: BucketViews, guard: ParamGuard, value: torch.Tensor, *, writes: bool, casts: bool
) -> None:
    """Register shards again, and with ``writes`` copy this rank's part of ``value``, the shown vector, to its shard.

    With ``casts``, parameters that users have cast or moved count as well.
    """
    handle = views.handle
    try:
        if views.is_summoned and not casts:
            views.drop_casts()
        if views.is_summoned and writes:
            guard.take_over()
            if value is not handle.shard:
                start, end = handle.layout.shard_range(handle.groups.shard_rank)
                handle.shard.copy_(value[start:end])
    finally:
        views.end_summon(write_grads=writes)


@contextlib.contextmanager
def without_shards(unit: Unit) -> Iterator[None]:
    """Hide shards, and gradients of shards, on the modules of a summoned ``unit`` inside the context.

    The modules show full parameters and gradients only. Buffers have their own dtypes.
    """
    unit.precision.release_buffers(unit.device)
    hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
    for views in unit.views:
        if views.registration.summoned is None:
            views.registration.unregister()
        elif views.summon is None or not views.summon.with_grads:
            hidden += [(param, param.grad) for param in views.params if param.grad is not None]
    for param, _ in hidden:
        param.grad = None
    try:
        yield
    finally:
        for views in unit.views:
            views.registration.show()
        for param, grad in hidden:
            assign_grad(param, grad)


def _full_grads(unit: Unit) -> _Grads:
    """Return each bucket's gradients in full shape; zeros from ranks without one, and None if no rank has one."""
    result = []
    for bucket, handle in enumerate(unit.handles):
        if not handle.groups.sharded:
            result.append([visible.param.grad for visible in unit.views[bucket].visible])
            continue
        full, present = gather_grads(unit, bucket, "summon_full_params(with_grads=True)")
        result.append([view if there else None for view, there in zip(parameter_views(handle.layout, full), present)])
    return result


def gather_grads(unit: Unit, bucket: int, call: str) -> tuple[torch.Tensor, list[int]]:
    """Gather the full gradient vector of a bucket, with zeros from ranks without a gradient.

    Returns the vector, and for each visible parameter whether some rank has a gradient.

    Raises:
        RuntimeError: gradients are not reduced yet.
    """
    unit.check_gradients(call)
    handle = unit.handles[bucket]
    params = [visible.param for visible in unit.views[bucket].visible]
    present = torch.tensor([param.grad is not None for param in params], dtype=torch.int64, device="cpu")
    if handle.groups.sharded:
        unit.agree_on_maximum(present, replicas=False)
    local = torch.zeros_like(handle.shard, device=handle.device)
    for param, part in zip(params, unit.views[bucket].sharded_grads(local)):
        if param.grad is not None:
            part.copy_(param.grad)
    return unit.gather_vectors([local])[0], present.tolist()


def full_params(module: nn.Module, writeback: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over (clean name, full parameter) of the units in ``module``, and gather one unit at a time.

    A parameter is valid until the next iteration. With ``writeback`` changes of it are written back. All ranks must run
    the loop to the end.
    """
    for name_of_unit, unit, _ in list(units_in(module)):
        with torch.inference_mode(False):
            context = join(unit)
        with summon([(unit, context)], SummonOptions(writeback)):
            for views in unit.views:
                for name, param in views.summoned():
                    yield joined(path_of(unit, name_of_unit), name), param
