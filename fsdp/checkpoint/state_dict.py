"""Saving the model's state: ``state_dict()`` of wrapped modules. :mod:`fsdp.checkpoint.load_state_dict` is the reverse.

[Note: Placeholders]
``nn.Module`` walks the modules and calls users' hooks, which decide on names and order, as for a plain model. During
the walk of a unit's modules, placeholders are registered in place of the parameters and under their names. For a full
state dict the placeholders are copies of the whole parameters and become values of the result. Otherwise they have no
readable elements. After the unit's last module they are found in the result, under any name, and replaced. So a unit is
gathered at most once: the peak is the result and the batches in flight.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.forms import Form, Held
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.transfers import Export, export, finish
from fsdp.comm.lane.issuing import GATHER
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.names import WRAPPED_MODULE, clean, joined, members_of, own_modules, unit_of, wrappers_in
from fsdp.flat.registration import registered_params
from fsdp.flat.tensor_parallel import local_of
from fsdp.placement.boxes import Box, dense_stride, elements_of, memory_order
from fsdp.placement.redistribute import Channels
from fsdp.runtime.build import Membership, inside_checkpoint, join, outermost_of
from fsdp.runtime.context import RootContext
from fsdp.runtime.data_ranks import with_data_ranks
from fsdp.runtime.unit import Phase, Unit, units_of

# -- one unit ----------------------------------------------------------------------------------------------------------


Key = tuple[int, int]  # bucket of a unit, position of the tensor in it


class UnitTensors:
    """The tensors of one unit in state dicts: its parameters, or with ``flat`` the flat vector of each bucket.

    Attributes:
        held: each tensor as the ranks' shards hold it.
    """

    def __init__(self, unit: Unit, opener: nn.Module, *, flat: bool) -> None:
        """Prepare the unit for a walk that reaches it at ``opener``, the outermost of its modules in the walk."""
        self.unit = unit
        self._home = flat_home(unit, opener) if flat else None
        with torch.no_grad():
            unit.follow_parameters()
        self.held = held_tensors(unit, flat=flat)

    def name(self, key: Key) -> str:
        return flat_name(key[0]) if self._home is not None else self.unit.handles[key[0]].layout.params[key[1]].name

    def requires_grad(self, key: Key) -> bool:
        handle = self.unit.handles[key[0]]
        return handle.flat_param.requires_grad if self._home is not None else handle.leaves[key[1]].requires_grad

    def register(self, placeholders: Mapping[Key, torch.Tensor], **counts: bool) -> None:
        """Register ``placeholders`` in place of the tensors until ``restore``; see ``put_placeholders``. They get
        the parameters' attributes, because modules that save or load themselves read those."""
        for (bucket, index), placeholder in placeholders.items() if self._home is None else ():
            for name, value in self.unit.views[bucket].user_attributes(index).items():
                placeholder.__dict__.setdefault(name, value)
        for bucket, guard in enumerate(self.unit.guards):
            of_bucket = [placeholder for key, placeholder in placeholders.items() if key[0] == bucket]
            flat = None if self._home is None else (self._home, flat_name(bucket))
            guard.put_placeholders(of_bucket, flat=flat, **counts)

    def registered(self) -> dict[Key, torch.Tensor | None]:
        """Return the tensors that are registered now in place of the unit's."""
        if self._home is not None:
            present = dict(registered_params(self._home))
            return {key: present.get(self.name(key)) for key in self.held}
        return dict(zip(self.held, chain(*(views.registration.registered() for views in self.unit.views)), strict=True))

    def restore(self) -> None:
        """Register the unit's own tensors again; idempotent."""
        for guard in self.unit.guards:
            guard.drop_placeholders()


def held_tensors(unit: Unit, *, flat: bool = False) -> dict[Key, Held]:
    """Return each of the unit's parameters as the ranks' shards hold it, or with ``flat`` each bucket's flat vector."""
    held: dict[Key, Held] = {}
    for bucket, handle in enumerate(unit.handles):
        several = [held_flat(handle)] if flat else [held_param(handle, i) for i in range(len(handle.layout.params))]
        held.update({(bucket, index): one for index, one in enumerate(several)})
    return held


class _Walk:
    """State that the units of a tree share while ``state_dict()`` collects them.

    Attributes:
        root: the module whose ``state_dict()`` was called; None if it is no wrapper.
        channels: shared, so that units reuse the message buffers.
        settled: values in the result by id, which later units need not look at.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        self.root, self.channels, self.settled = root, Channels(), dict[int, Any]()

    def finish(self, module: nn.Module, destination: dict[str, Any]) -> None:
        """Finish the units that wait for the root, if ``module`` is the root."""
        for wrapper in wrappers_in(module) if module is self.root else ():
            wrapper._fsdp_saving.finish(destination)


class UnitSaving(UnitTensors):
    """One unit while ``nn.Module`` collects its state.

    Attributes:
        opener: the outermost of the unit's modules in the walk; None between two modules of a module group.
        waits_for_root: the unit has several modules, so that it is finished at the end of the root's walk.
    """

    def __init__(self, unit: Unit, opener: nn.Module) -> None:
        """Register placeholders of the form that the unit's settings choose."""
        settings, has_parts = unit.state_settings, unit.groups.has_parts and bool(unit.handles)
        form = Form.of(settings.state_dict_config)
        if form.is_cut and unit.handles and not has_parts:
            warnings.warn(
                f"{settings.state_dict_type} of {unit.name}, which is not sharded (NO_SHARD): its full state dict is "
                "returned",
                stacklevel=2,
            )
        form = form.within(unit, cut=has_parts)
        self.opener: nn.Module | None = opener
        self._form, self._context = form, join(unit)
        self._walk = _walks.get(self._context) or _Walk()
        groups = [[*members_of(unit.module).values()], outermost_of(unit.module)]
        is_in_group = any(len(several) > 1 and opener in several for several in groups)
        self.waits_for_root = is_in_group and self._walk.root is not None
        self._ours: dict[int, bool] = {}  # storage -> whether it is in the result
        check_idle([unit], "state_dict()", Phase.SUMMONED)
        if form.stays and unit.phase is Phase.SUMMONED:
            raise RuntimeError(
                f"{form.called} of {unit.name} inside summon_full_params, where the shards may be out of "
                "date: take it outside"
            )
        super().__init__(unit, opener, flat=form.is_flat)
        with torch.no_grad():
            self._register_placeholders()

    def _register_placeholders(self) -> None:
        leaving = self._export() if self._form.is_readable else {}
        placeholders: dict[Key, torch.Tensor] = {}
        for key, one in leaving.items():
            value = one.value()
            self._ours[_storage(value)] = False
            placeholders[key] = nn.Parameter(value, requires_grad=self.requires_grad(key))
        for key, held in self.held.items() if not leaving else ():
            # ``origin`` identifies the placeholder in the result. A new tensor, for ``held`` would make a cycle.
            placeholders[key] = held.part.with_local(held.part.local, origin=(self, key))
        whole = bool(leaving) and not self._form.rank0_only
        hooks = (h for _, m in own_modules(self.unit.module) for h in (m._state_dict_pre_hooks, m._state_dict_hooks))
        hooked = whole and any(len(one) > 1 for one in hooks)  # users' hooks next to ours
        self.register(placeholders, keep_writes=whole, compared=hooked)

    def collect(self, destination: dict[str, Any]) -> None:
        """Replace the placeholders in ``destination`` by the values."""
        leaving = self._export() if not self._form.is_readable else {}
        settled, taken = self._walk.settled, set[Key]()
        for key, value in [item for item in destination.items() if id(item[1]) not in settled]:
            origin = getattr(value, "origin", None)
            if isinstance(origin, tuple) and origin[0] is self:
                ours = origin[1]
                if leaving:
                    destination[key] = value = leaving[ours].value(again=ours in taken)
                    settled[id(value)] = value
                    taken.add(ours)
                else:
                    del destination[key]
            elif type(value) in (torch.Tensor, nn.Parameter) and _storage(value) in self._ours:
                # a tied parameter has several names, each with a tensor of its own
                tied, self._ours[_storage(value)] = self._ours[_storage(value)], True
                destination[key] = value = value.detach().clone() if tied else value.detach()
                settled[id(value)] = value

    def collect_buffers(self, opener: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Replace the buffers below ``opener`` by copies in their original dtype, on CPU if the settings have
        ``offload_to_cpu``. On ranks without a result they are removed."""
        device = "cpu" if self._form.offload_to_cpu else None
        for path, owner in own_modules(opener):
            for name, buffer in owner._buffers.items():
                key = prefix + clean(joined(path, name))
                if buffer is None or key not in destination:
                    continue
                if self._receives:
                    dtype = self.unit.precision.original_dtype(buffer)
                    destination[key] = destination[key].to(device=device, dtype=dtype)
                else:
                    del destination[key]

    @property
    def _receives(self) -> bool:
        """True if this rank's result includes the unit's state."""
        groups = self.unit.groups
        first = (groups.shard_rank if groups.sharded else groups.replica_rank) == 0
        if groups.experts is not None:  # ranks of the same root, unlike those of tensor parallelism
            first = first and groups.experts.rank() == 0
        return first or not self._form.rank0_only

    def _export(self) -> dict[Key, Export]:
        """Collect the unit's values on the ranks that receive them, in the shards' dtype, by one collective."""
        unit, groups = self.unit, self.unit.groups
        channel = self._walk.channels.over(groups.shard if groups.sharded else groups.replica, unit.device)
        held = self._shown() if unit.phase is Phase.SUMMONED else self.held
        if unit.phase is not Phase.SUMMONED and groups.sharded and not self._form.stays:
            words = f"state_dict() of a module in {unit.name}"  # outside of the call of a wrapper
            with self._context.passes.calling("state_dict()", words, often=True):
                self._context.passes.about_to(GATHER, unit)
        label = f"gather {unit.name}"
        leaving = export(held.values(), self._form, channel, label)
        finish(leaving, self._walk.channels, label)
        return dict(zip(held, leaving)) if self._receives else {}

    def _shown(self) -> dict[Key, Held]:
        """Return the summoned parameters, with users' changes, on the ranks that have them."""
        held = {
            (bucket, index): held_param(views.handle, index, local_of(param.detach()), shown=True)
            for bucket, views in enumerate(self.unit.views)
            for index, (_, param) in enumerate(views.summoned())
        }
        if not held and self._form.is_cut:
            raise RuntimeError(
                f"{self._form.called} of {self.unit.name} inside summon_full_params(rank0_only=True): this rank "
                "has no part of the values that are shown"
            )
        return held


def held_param(handle: FlatParamHandle, index: int, values: torch.Tensor | None = None, *, shown: bool = False) -> Held:
    """Describe one parameter on the ranks, by default with the shard's own memory.

    Args:
        values: another tensor with one element per element of the parameter: this rank's elements (1-D).
        shown: ``values`` is whole, in the parameter's shape, on every rank.
    """
    layout, groups, tp = handle.layout, handle.groups, handle.tp[index]
    record, start = layout.params[index], 0
    spans = partial(layout.owners, index) if groups.sharded and not shown else None
    if shown:
        assert values is not None
        values = elements_of(values, record.stride)
    else:
        piece = layout.piece(index, groups.shard_rank)
        start = piece.start
        if values is None:
            values = handle.shard[piece.shard_offset : piece.shard_offset + piece.numel]
    # replicated over the ranks of tensor parallelism, whose shard groups may cut it differently
    tp_group = (None if handle.is_cut(index) else handle.tp_group) or handle.replicated_over
    elsewhere = tp_group is not None and tp_group.rank() > 0
    shape, stride, within = record.shape, record.stride, None
    if tp is not None:
        rank = tp.group.rank()
        shape, within = tp.shape, Box(tp.offsets(rank), tp.local_shape(rank))
        stride = dense_stride(shape, memory_order(record.shape, record.stride))
    part = RaggedTensor(
        values, shape, start, stride, within=within, saved_elsewhere=elsewhere, replicas=groups.replica_ranks
    )
    return Held(part, spans, tp)


def held_flat(handle: FlatParamHandle) -> Held:
    """Describe a flat vector on the ranks, in the shards' memory, without the padding after the last parameter."""
    layout = handle.layout
    if any(handle.tp):
        raise NotImplementedError(
            f"LOCAL_STATE_DICT of {handle.unit_name}, which has parameters of tensor parallelism or declared experts: "
            "use another kind"
        )
    ranges = (layout.shard_range(rank) for rank in range(layout.world_size))
    spans = [(rank, min(start, layout.numel), min(end, layout.numel)) for rank, (start, end) in enumerate(ranges)]
    _, start, end = spans[handle.groups.shard_rank]
    return Held(RaggedTensor(handle.shard[: end - start], (layout.numel,), start), lambda: spans)


def flat_name(bucket: int) -> str:
    return f"_flat_param_{bucket}" if bucket else "_flat_param"


def flat_home(unit: Unit, opener: nn.Module) -> nn.Module:
    """Return the module on which flat parameters are registered."""
    home, *others = outermost_of(unit.module)
    if all(home is not module for module in opener.modules()) and inside_checkpoint(opener) not in others:
        raise RuntimeError(
            f"LOCAL_STATE_DICT holds whole units, and {type(opener).__name__} is a part of {unit.name}: "
            "ask the wrapped module, or choose another kind of state dict"
        )
    return home


def check_idle(units: Iterable[Unit], what: str, *allowed: Phase) -> None:
    """Check that all units are idle or in an ``allowed`` phase; ``what`` is the call in errors."""
    for unit in units:
        if unit.phase not in (Phase.IDLE, *allowed):
            raise RuntimeError(f"{what} in the middle of the {unit.phase.name.lower()} of {unit.name}: call it outside")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def check_no_experts(model: nn.Module, call: str) -> None:
    """Raise NotImplementedError if ``call`` would take the experts of one rank for those of all, under equal names,
    because they were not declared by ``fsdp.shard_experts``.

    Frozen units over fewer ranks than the unit around them count as copies.
    """
    for name, unit, ranks in with_data_ranks(model):
        own, trained = unit.groups.data_parallel_size, [each.handle for each in unit.gradients if each.trainable]
        placed = [(joined(name, handle.name_of(i)), tp) for handle in trained for i, tp in enumerate(handle.tp)]
        undeclared = next((param for param, tp in placed if tp is None or not tp.experts), None)
        if undeclared is not None and unit.holds_experts(ranks):
            raise NotImplementedError(
                f"{call}: unit {name!r} is over {own} of the {ranks} ranks that the model is over, so other ranks hold "
                f"another {undeclared!r}, and the result would have that of one rank. Before wrapping, declare experts "
                "by fsdp.shard_experts(module, mesh['ep']), and leave other parameters to a unit around them. Or save "
                "on each rank, for the same ranks, the local state (StateDictType.LOCAL_STATE_DICT, with process_group "
                "instead of device_mesh) and optimizer.state_dict(). If the other ranks hold copies, say so by "
                f"set_gradient_divide_factor({own}) of that unit"
            )


@contextlib.contextmanager
def calling(call: str, module: nn.Module, *, wrapped: bool = False) -> Iterator[None]:
    """Mark ``call``, which all ranks have to make, as running in all trees of ``module``. With ``wrapped`` there has to
    be one."""
    units = units_of(module)
    if wrapped and not units:
        raise ValueError(
            f"expected a model with FullyShardedDataParallel modules in it, but {type(module).__name__} has none; the "
            "optimizer state of a plain model is optimizer.state_dict()"
        )
    with contextlib.ExitStack() as calls:
        for context in dict.fromkeys(map(join, units)):
            calls.enter_context(context.calling(call))
        yield


# -- the hooks ---------------------------------------------------------------------------------------------------------


class StateHooks:
    """Hooks on a unit's modules that ``nn.Module`` calls while it walks them for a state dict.

    Attributes:
        active: the walk in progress, if any.
    """

    active: Any = None
    _belongs_to: Callable[[], Membership | None] = staticmethod(lambda: None)

    def __init__(self, membership: Membership, modules: list[nn.Module]) -> None:
        """Register the hooks on ``modules``, which are the unit's, each once."""
        self.belong_to(membership)
        self.register([owner for owner in modules if not isinstance(owner, torch.jit.ScriptModule)])  # no hooks there

    def belong_to(self, membership: Membership) -> None:
        """Make the hooks serve the unit of ``membership`` as long as a wrapper holds it."""
        self._belongs_to = weakref.ref(membership)

    @property
    def unit(self) -> Unit:
        membership = self._belongs_to()
        assert membership is not None  # a wrapper holds it
        return membership.unit

    def register(self, modules: list[nn.Module]) -> None:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHooks:
        """Copy the hooks without a unit. A copied unit calls ``belong_to``; for a module copied alone the hooks do
        nothing."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        return copied


class SavingHooks(StateHooks):
    """Hooks that let ``state_dict()`` of a wrapped module, and of every module in its unit, return whole or sharded
    tensors under the original names."""

    def register(self, modules: list[nn.Module]) -> None:
        after = partial(self._after)  # nn.Module sets an attribute on the hook, which a method does not allow
        for module in modules:
            module.register_state_dict_pre_hook(self._before)
            module.register_state_dict_post_hook(after)

    def _before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._belongs_to() is None:
            return
        saving: UnitSaving | None = self.active
        if saving is not None and saving.opener is None:
            saving.opener = module
        elif saving is not None and module in (saving.opener, *outermost_of(self.unit.module)):
            self.abandon()  # the last walk ended in an exception
        if self.active is None:
            self.active = UnitSaving(self.unit, module)

    def _after(self, module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        saving: UnitSaving | None = self.active
        if saving is None or saving.opener is not module:
            return
        with torch.no_grad():
            saving.collect_buffers(module, destination, prefix)
        saving.opener = None
        if not saving.waits_for_root:
            self.finish(destination)

    def finish(self, destination: dict[str, Any]) -> None:
        """Put the unit's values into ``destination``, as far as the walk has reached it."""
        saving = self.active
        self.abandon()
        if saving is not None:
            with torch.no_grad():
                saving.collect(destination)

    def abandon(self) -> None:
        """Register the unit's own parameters again if they are not, as after an exception."""
        saving, self.active = self.active, None
        if saving is not None:
            saving.restore()


@contextlib.contextmanager
def collecting(wrapper: Any) -> Iterator[_Walk]:
    """Collect the state of ``wrapper``, on all ranks alike, inside the context. If the body raises, every unit
    registers the parameters again."""
    unit = unit_of(wrapper)
    settings = unit.state_settings
    alone = ", rank0_only" if Form.of(settings.state_dict_config).rank0_only else ""
    context = join(unit)
    outermost = context not in _walks
    try:
        with context.calling(f"state_dict() ({settings.state_dict_type.name}{alone})"):
            if outermost and not Form.of(settings.state_dict_config).is_flat:  # the local state
                check_no_experts(wrapper, "state_dict()")
            yield _walks.setdefault(context, _Walk(wrapper))
    except BaseException:
        for inner in wrappers_in(wrapper):
            inner._fsdp_saving.abandon()
        raise
    finally:
        if outermost:
            _walks.pop(context, None)


# the trees whose state is being collected
_walks: weakref.WeakKeyDictionary[RootContext, _Walk] = weakref.WeakKeyDictionary()


def strip_wrapper(destination: dict[str, Any], prefix: str) -> None:
    """Remove the wrapper's own part from the names below ``prefix``, in place and in order.

    Below a plain parent, versions of modules stay under the names with that part as well: ``load_state_dict()`` of the
    parent looks for those.
    """
    added = f"{prefix}{WRAPPED_MODULE}."
    for key in [key for key in destination if key.startswith(added)]:
        destination[prefix + key.removeprefix(added)] = destination.pop(key)
    versions = getattr(destination, "_metadata", None)
    if versions is not None:
        for key in [key for key in versions if f"{key}.".startswith(added)]:
            plain = prefix + f"{key}.".removeprefix(added).replace(f"{WRAPPED_MODULE}.", "")
            versions[plain.removesuffix(".")] = versions[key] if prefix else versions.pop(key)


def versioned(state: Mapping[str, Any], versions: Mapping[str, dict[str, Any]]) -> Any:
    """Return ``state`` with the ``versions`` of modules by name, as ``nn.Module`` reads and writes them."""
    found: Any = OrderedDict(state)
    found._metadata = versions
    return found
