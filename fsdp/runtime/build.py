"""Construction: of a unit from a module, of a copy from a unit, and of the tree from units."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp.comm.groups import Groups
from fsdp.comm.lane.lane import PARAMETERS, Lane
from fsdp.comm.transport.shared_memory import known_channel
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.flat_param import FlatParamHandle, shard_of
from fsdp.flat.initial_values import InitialValues, sample
from fsdp.flat.metadata import BucketInfo, UnitInfo
from fsdp.flat.names import CHECKPOINTED_MODULE, members_of, path_of
from fsdp.flat.ownership import (
    Ignored,
    OwnedParam,
    bucket_layouts,
    count_writes,
    materialize,
    move_to,
    own_buffers,
    owned_params,
    synchronize,
)
from fsdp.flat.views import BucketViews, FlatViews, OriginalViews
from fsdp.runtime.context import RootContext
from fsdp.runtime.data_ranks import check_experts
from fsdp.runtime.half_migrated import refuse_torchs_methods
from fsdp.runtime.hooks import forward_refused, own_operations
from fsdp.runtime.mistakes import check_variables, warn_of_hooks
from fsdp.runtime.options import WrapOptions
from fsdp.runtime.policy import TreePolicy
from fsdp.runtime.precision import UnitPrecision
from fsdp.runtime.unit import Unit, units_below, units_in, units_of


def inside_checkpoint(module: nn.Module) -> nn.Module:
    """Return the module inside torch's checkpoint wrapper, if ``module`` is one, else ``module``."""
    return getattr(module, CHECKPOINTED_MODULE, module)


def outermost_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules that the unit of ``module`` is called by, without torch's checkpoint wrappers. The first one
    has the flat parameters."""
    return [inside_checkpoint(member) for member in members_of(module).values()]


def warn_without_forward(module: nn.Module) -> None:
    """Warn the caller of the wrapper's constructor if it wraps a container that has no forward."""
    for called in outermost_of(module):
        if isinstance(called, (nn.ModuleList, nn.ModuleDict)):
            warn_user(
                f"FullyShardedDataParallel wraps a {type(called).__name__}, which has no forward: its parameters would "
                "never be gathered. Wrap its elements, or the module that calls them"
            )


def build_unit(module: nn.Module, name: str, ignored: Ignored, options: WrapOptions) -> Unit:
    """Return the unit of ``module``: initialize, move, flatten and shard the parameters. The wrapper's constructor
    calls this, and raises the same errors."""
    check_variables()
    use_orig_params = options.use_orig_params
    inner = units_of(module)
    with contextlib.ExitStack() as stack:
        for unit in inner:
            stack.enter_context(unit.membership().building_parent())
        materialize(module, ignored, options.param_init_fn, options.device_id, name)
    owned = owned_params(module, ignored, name, options.groups)
    for unit in inner:
        unit.membership().note_parent()
    count_writes(owned)
    group = options.groups.shard or options.groups.replica
    device = move_to(module, owned, ignored, options.device_id, [unit.device for unit in inner], group)
    if options.sync_module_states:
        named = [(item.name, item.param.detach()) for item in owned]
        named += [("a buffer", buffer) for buffer in own_buffers(module)]
        _take_values_of_rank0(name, named, options.groups, device)
    home = None if use_orig_params else outermost_of(module)[0]
    buckets: list[BucketViews] = []
    compares = not options.sync_module_states and options.groups.data_parallel_size > 1
    initial: list[InitialValues] = []
    for layout, members in bucket_layouts(
        owned,
        options.groups.shard_size,
        device.type == "cpu",
        options.precision,
        use_orig_params=use_orig_params,
        key=options.flat_param_key,
    ):
        params, placed = [item.param for item in members], [item.tp for item in members]
        samples = sample(params) if compares else []
        handle = FlatParamHandle(
            layout,
            shard_of(layout, params, options.groups.shard_rank, device),
            params,
            options.groups,
            device,
            options.cpu_offload,
            placed,
            with_whole=not use_orig_params,
        )
        views: BucketViews
        if home is None:
            views = OriginalViews(handle, members, forward_refused)
        else:
            views = FlatViews(handle, [item.sites for item in members], home)
        buckets.append(views)
        if compares:
            initial.append(InitialValues(views, samples))
    _mark(owned, name, use_orig_params=use_orig_params)
    precision = UnitPrecision(
        module, options.precision, ignored.modules, full_in_eval=options.policy.tree.use_full_prec_in_eval
    )
    for submodule in module.modules():  # torch.compile and tools look for these two
        if submodule not in ignored.modules:
            submodule.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=use_orig_params)
    tp = next((item.tp for item in owned if item.tp is not None), None)
    groups = (
        options.groups if tp is None else replace(options.groups, tp=tp.group, experts=tp.group if tp.experts else None)
    )
    return Unit(module, name, buckets, groups, device, options.policy, precision, initial=initial)


def _take_values_of_rank0(
    unit_name: str, named: Sequence[tuple[str, torch.Tensor]], groups: Groups, device: torch.device
) -> None:
    """Take the values of rank 0 for the tensors of a unit, once all ranks have the same: messages have their sizes."""
    several = [f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype}" for name, tensor in named]
    layout = [f"{unit_name}: takes the values of rank 0{PARAMETERS}{'; '.join(several)}"]
    lanes = [Lane.of(group, device) for group in (groups.replica, groups.shard) if group is not None]
    for lane in lanes:
        lane.prepare("a model with the values of rank 0")
        lane.compare(layout)
    synchronize([tensor for _, tensor in named], groups)
    for lane in lanes:
        lane.settle()


def _mark(owned: list[OwnedParam], unit_name: str, *, use_orig_params: bool) -> None:
    """Mark the tensors of parameters that were flattened, and release those that are replaced."""
    for item in owned:
        name = f"{item.name!r} of {unit_name}"
        if not use_orig_params and item.param._backward_hooks:
            warn_of_hooks(name)
        registered: Any = item.dtensor if item.dtensor is not None else item.param
        for param in {item.param, registered}:
            param._fsdp_flattened, param._fsdp_owner = True, name
        if not use_orig_params or item.dtensor is not None:
            registered._fsdp_replaced = True
            item.dtensor = None
        if not use_orig_params:
            item.param = None  # type: ignore[assignment]


def copy_unit(unit: Unit, copy_module: Callable[[], nn.Module], memo: dict[int, Any]) -> Unit:
    """Return a copy of ``unit`` around ``copy_module()``, with the same values, without gradients, in no tree.

    The copy has separate shards over the same ranks. Before the module is copied, ``memo``, where ``deepcopy`` looks
    first, gets the counterparts of the registered parameters. So an optimizer that is copied together with the model
    holds the parameters of the copy. The copy synchronizes gradients, even if it is made inside ``no_sync()``. It
    shares the communication hook and the hook's state.

    Raises:
        RuntimeError: ``unit`` runs, or is summoned, or a state dict of it is being made.
    """
    unit.check_idle("a wrapped model can be copied only while it does not run, and outside of summon_full_params()")
    if any(views.registration.placeholders is not None for views in unit.views):
        raise RuntimeError(
            f"the state dict of {unit.name} is being made: a wrapped model cannot be copied in its hooks"
        )
    unit.follow_parameters()
    for group in (unit.groups.shard, unit.groups.replica):
        memo[id(group)] = group
    handles = [handle.clone() for handle in unit.handles]
    for handle, views in zip(handles, unit.views):
        views.announce_copies(handle, memo)
    module = copy_module()
    views_of_copy = [views.copied(handle, memo) for handle, views in zip(handles, unit.views)]
    precision = unit.precision.copied(module, memo)
    copied = Unit(module, unit.name, views_of_copy, unit.groups, unit.device, unit.policy, precision)
    copied.set_state_settings(copy.copy(unit.state_settings))
    return copied


def shard_info(module: nn.Module) -> list[UnitInfo]:
    """Return every unit in ``module`` (depth first) with the buckets: names, shapes, offsets, and this rank's
    ranges."""
    return [
        UnitInfo(
            name,
            path_of(unit, name),
            tuple(
                BucketInfo(
                    handle.layout, unit.groups.shard_rank, handle.flat_param, tuple(v.param for v in views.visible)
                )
                for handle, views in zip(unit.handles, unit.views)
            ),
            known_channel(unit.groups.shard) is not None,
        )
        for name, unit, _ in units_in(module)
    ]


# -- the tree ----------------------------------------------------------------------------------------------------------


class Membership:
    """The membership of a unit in a tree. The wrapper alone holds it; that of a root keeps the tree's context alive.

    Attributes:
        is_root: the unit is the outermost one of the tree; None while that is undecided.
        has_parent: the unit lies in another wrapped module.
        parent_is_built: a unit around this one is being constructed.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.is_root: bool | None = None
        self.has_parent = self.parent_is_built = False
        self._context: RootContext | None = None  # of the tree below, if this is its root
        unit.set_membership(weakref.ref(self))

    def copied(self, unit: Unit) -> Membership:
        """Return the membership of ``unit``, a copy of this one's unit."""
        result = Membership(unit)
        result.has_parent = self.has_parent
        return result

    def note_parent(self) -> None:
        """Note that the unit lies in another wrapped module."""
        self.has_parent = True

    @contextlib.contextmanager
    def building_parent(self) -> Iterator[None]:
        """Enclose the construction of a unit around this one, which changes modules of that unit alone."""
        self.parent_is_built = True
        try:
            yield
        finally:
            self.parent_is_built = False

    def leave(self) -> None:
        """Leave the tree: it is undecided again if the unit is a root."""
        self._context = self.is_root = None

    def join(self) -> RootContext:
        """Return the context of the unit's tree. Without a tree, the unit becomes the root of the units below it."""
        context: RootContext | None = self.unit.context
        if context is None or (self._context is None and self.is_root is None):
            with own_operations():
                context = self._become_root()
            refuse_torchs_methods()  # again, since the program may have imported torch's FSDP1 after the wrapping
        return context

    def _become_root(self) -> RootContext:
        tree = list(units_below(self.unit))
        units = [unit for _, unit, _ in tree]
        for unit in units:
            _check_optimizer_in_backward(unit)
        TreePolicy.check_equal(unit.policy.tree for unit in units)
        if self.unit.policy.tree.reduce_unused:
            _check_one_group([(name, unit.groups) for name, unit, _ in tree])
        check_experts([(f"unit {name!r}" if name else "the root unit", unit) for name, unit, _ in tree])
        context = RootContext(self.unit, tree)  # it takes the units from their former contexts, which have to be alive
        for unit in units:
            if (other := unit.membership()) is not None:
                other._context, other.is_root = None, False
        self._context, self.is_root = context, True
        return context


def join(unit: Unit) -> RootContext:
    """Return the context of the tree of ``unit``; see :meth:`Membership.join`."""
    membership: Membership = unit.membership()  # the wrapper is alive
    return membership.join()


def _check_one_group(groups_of: list[tuple[str, Groups]]) -> None:
    """Raise NotImplementedError if units communicate over different groups: a rank that waits in one cannot take part
    in another."""
    names: dict[tuple[int | None, int | None], str] = {}
    for name, groups in groups_of:
        pair = groups.shard if groups.shard_size > 1 else None, groups.replica
        if pair != (None, None):
            names.setdefault((id(pair[0]), id(pair[1])), f"unit {name!r}" if name else "the root unit")
    if len(names) > 1:
        raise NotImplementedError(
            "reduce_unused=True needs a tree whose units communicate over one process group, or one pair of them, and "
            f"these are the first of each: {', '.join(names.values())}. Pass the same process_group to all of them. "
            "With experts leave reduce_unused out, and run all units on every rank: experts without tokens on an empty "
            "batch, or on one whose output is multiplied by zero"
        )


def _check_optimizer_in_backward(unit: Unit) -> None:
    """Raise RuntimeError if an optimizer of torch's ``_apply_optimizer_in_backward`` would never step."""
    for visible in (visible for views in unit.views for visible in views.visible):
        if hasattr(visible.param, "_in_backward_optimizers") and not unit.policy.tree.use_orig_params:
            raise RuntimeError(
                f"{visible.name!r} has an optimizer in backward, which is only supported with use_orig_params=True"
            )
