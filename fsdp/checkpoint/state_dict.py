"""Model state as it leaves: what ``state_dict()`` of a wrapped module holds. :mod:`fsdp.checkpoint.loading` is the way
back.

[Note: Stand-ins]
``nn.Module`` walks the modules, and users' modules and hooks have their say in it; so names and order are its, here as
for a plain model. While it walks a unit's modules, stand-ins are registered on them in place of the parameters, in the
parameters' places and under their names. For a full state dict those are copies of the whole parameters, which go into
the result as they are. Otherwise they hold nothing that could be read, and when the unit's last module is through they
are found in the result, under whatever name, and replaced. So a unit is gathered at most once, and for no longer than
it takes to copy out what the result needs: the peak is the result and one unit.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.forms import Full, Held, Leaving, Local, Ragged, Rows, Wanted, export
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.redistribute import Channel
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.names import WRAPPED_MODULE, clean, joined, own_modules, unit_of, wrappers_in
from fsdp.runtime.agreement import GATHER
from fsdp.runtime.build import inside_checkpoint, join
from fsdp.runtime.unit import Phase, Unit, units_of

# -- one unit ----------------------------------------------------------------------------------------------------------


class Saving:
    """One unit while ``nn.Module`` collects its state.

    Attributes:
        opener: the unit's outermost module that is walked; with it the unit is through.
    """

    def __init__(self, unit: Unit, opener: nn.Module, wanted: Wanted) -> None:
        """Shows the stand-ins.

        Raises:
            RuntimeError: the unit is running.
        """
        self.opener, self.unit, self._wanted = opener, unit, wanted
        self._context = join(unit)
        self._home = flat_home(unit, opener) if wanted.form is Local else None
        self._ours: dict[int, bool] = {}  # storage -> whether it is in the result
        check_at_rest(self.unit, "state_dict()")
        if wanted.form in (Local, Ragged) and self.unit.phase is Phase.SUMMONED:
            what = "a local state dict" if wanted.form is Local else "a state dict without communication"
            raise RuntimeError(
                f"{what} of {self.unit.name} inside summon_full_params, where the shards may be out of date: take it "
                "outside"
            )
        with torch.no_grad():
            self.unit.follow_parameters()
            self._show()

    def _show(self) -> None:
        leaving = self._export() if self._wanted.form is Full else {}
        for bucket, views in enumerate(self.unit.views):
            if self._home is not None:
                (stand_in,) = self._unreadable(bucket)
                views.show_flat_stand_in(self._home, flat_name(bucket), stand_in)
                continue
            if (bucket, 0) not in leaving:
                views.show_stand_ins(self._unreadable(bucket))
                continue
            values = [
                nn.Parameter(leaving[bucket, index].value(), requires_grad=leaf.requires_grad)
                for index, leaf in enumerate(views.handle.leaves)
            ]
            views.show_stand_ins(values, keep_writes=not self._wanted.rank0_only)
            self._ours.update({_storage(value): False for value in values})

    def hide(self) -> None:
        for views in self.unit.views:
            views.drop_stand_ins()

    def collect(self, destination: dict[str, Any], prefix: str) -> None:
        """Put into ``destination`` what belongs there in place of the stand-ins, and the unit's buffers as asked."""
        leaving = self._export() if self._wanted.form is not Full else {}
        taken: set[Any] = set()
        for key, value in list(destination.items()):
            if isinstance(value, RaggedTensor) and isinstance(value.origin, tuple) and value.origin[0] is self:
                place = value.origin[1:]
                if leaving:
                    destination[key] = leaving[place].value(again=place in taken)
                    taken.add(place)
                else:
                    del destination[key]
            elif type(value) in (torch.Tensor, nn.Parameter) and _storage(value) in self._ours:
                # a tied parameter has several names, and each a tensor of its own
                tied, self._ours[_storage(value)] = self._ours[_storage(value)], True
                destination[key] = value.detach().clone() if tied else value.detach()
        self._collect_buffers(destination, prefix)

    def _collect_buffers(self, destination: dict[str, Any], prefix: str) -> None:
        """In their original dtype, and on CPU or not at all if the options say so; else they are the live tensors."""
        for path, owner in own_modules(self.opener):
            for name, buffer in owner._buffers.items():
                key = prefix + clean(joined(path, name))
                if buffer is None or key not in destination:
                    continue
                if self._receives:
                    device = "cpu" if self._wanted.offload_to_cpu else None
                    destination[key] = destination[key].to(
                        device=device, dtype=self.unit.precision.original_dtype(buffer)
                    )
                else:
                    del destination[key]

    @property
    def _receives(self) -> bool:
        """Whether this rank's result has the unit's state."""
        groups = self.unit.groups
        return not self._wanted.rank0_only or (groups.shard_rank if groups.sharded else groups.replica_rank) == 0

    def _export(self) -> dict[tuple[int, int], Leaving]:
        """What this rank's result has, by bucket and index: in the shards' dtype, by one collective."""
        unit, groups = self.unit, self.unit.groups
        place = (groups.shard, groups.shard_rank, groups.shard_size)
        if not groups.sharded:
            place = (groups.replica, groups.replica_rank, groups.replica_size)
        channel = Channel(*place, unit.device)
        form, watch = self._wanted.of_unit(unit, channel, first=0), None
        if unit.phase is Phase.SUMMONED:
            held = self._shown()
        else:
            held = {(bucket, i): its for bucket in range(len(unit.handles)) for i, its in enumerate(self._held(bucket))}
            if groups.sharded and self._wanted.form in (Full, Rows):
                watch = self._context.about_to(GATHER, unit)
        leaving = export(held.values(), form, channel, f"gather {unit.name}", watch=watch)
        channel.flush()
        return dict(zip(held, leaving)) if self._receives else {}

    def _shown(self) -> dict[tuple[int, int], Held]:
        """What summoned parameters show, with the changes made to it; on ranks where they do."""
        held = {
            (bucket, index): Held(RaggedTensor.of_whole(param.detach(), views.handle.layout.params[index].stride), None)
            for bucket, views in enumerate(self.unit.views)
            for index, (_, param) in enumerate(views.shown())
        }
        if not held and self._wanted.form is Rows:
            raise RuntimeError(
                f"a sharded state dict of {self.unit.name} inside summon_full_params(rank0_only=True): this rank "
                "has no part of the values that are shown"
            )
        return held

    def _held(self, bucket: int) -> list[Held]:
        """What the shard holds: of each parameter, or of the flat vector."""
        handle = self.unit.handles[bucket]
        return [held_flat(handle)] if self._home is not None else held_params(handle)

    def _unreadable(self, bucket: int) -> list[RaggedTensor]:
        """A stand-in for each tensor, known by ``(self, bucket, index)``: what this rank's shard holds of it."""
        parts = [held.part for held in self._held(bucket)]
        for index, part in enumerate(parts):
            part.origin = (self, bucket, index)
        return parts


def held_params(handle: FlatParamHandle) -> list[Held]:
    """What the ranks' shards hold of each parameter, in the shard's own memory."""
    layout, shard = handle.layout, handle.shard
    held = []
    for index, (record, piece) in enumerate(zip(layout.params, layout.pieces(handle.groups.shard_rank))):
        local = shard[piece.shard_offset : piece.shard_offset + piece.numel]
        spans = layout.owners(index) if handle.groups.sharded else None
        held.append(Held(RaggedTensor(local, record.shape, piece.start, record.stride), spans))
    return held


def held_flat(handle: FlatParamHandle) -> Held:
    """What the ranks' shards hold of the flat vector, without the padding behind the last parameter."""
    layout = handle.layout
    ranges = (layout.shard_range(rank) for rank in range(layout.world_size))
    spans = [(rank, min(start, layout.numel), min(end, layout.numel)) for rank, (start, end) in enumerate(ranges)]
    _, start, end = spans[handle.groups.shard_rank]
    return Held(RaggedTensor(handle.shard[: end - start], (layout.numel,), start), spans)


def flat_name(bucket: int) -> str:
    return f"_flat_param_{bucket}" if bucket else "_flat_param"


def flat_home(unit: Unit, opener: nn.Module) -> nn.Module:
    """The module that flat parameters are registered on.

    Raises:
        RuntimeError: ``opener`` is a part of the unit without it.
    """
    home = inside_checkpoint(unit.module)
    if all(home is not module for module in opener.modules()):
        raise RuntimeError(
            f"LOCAL_STATE_DICT holds whole units, and {type(opener).__name__} is a part of {unit.name}: "
            "ask the wrapped module, or choose another kind of state dict"
        )
    return home


def check_at_rest(unit: Unit, what: str) -> None:
    if unit.phase not in (Phase.IDLE, Phase.SUMMONED):
        raise RuntimeError(
            f"{what} in the middle of the {unit.phase.name.lower()} of {unit.name}: call it before or after"
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def calling(call: str, module: nn.Module) -> Iterator[None]:
    """Inside, ``call``, which all ranks have to make."""
    with contextlib.ExitStack() as calls:
        for context in dict.fromkeys(map(join, units_of(module))):
            calls.enter_context(context.calling(call))
        yield


def begin_saving(unit: Unit, opener: nn.Module) -> Saving:
    """Start to collect the state of ``unit`` from ``opener`` on, in the form that its settings ask for."""
    settings = unit.state_settings
    wanted = Wanted.of(settings.state_dict_type, settings.state_dict_config, unit.mesh)
    if wanted.form in (Rows, Local) and not (unit.groups.sharded and unit.handles):
        if unit.handles:
            warnings.warn(
                f"{settings.state_dict_type} of {unit.name}, which is not sharded (NO_SHARD): its full state dict is "
                "returned",
                stacklevel=2,
            )
        wanted = replace(wanted, form=Full)
    return Saving(unit, opener, wanted)


def copied_ref(wrapper: Any, memo: dict[int, Any]) -> Callable[[], Any]:
    """What leads to ``wrapper``'s copy in ``memo``; to nothing where it is not copied."""
    copied = memo.get(id(wrapper))
    return weakref.ref(copied) if copied is not None else _nothing


def _nothing() -> None:
    return None


# -- the hooks ---------------------------------------------------------------------------------------------------------


class SavingHooks:
    """Lets ``state_dict()`` of a wrapped module, and of every module in its unit, return whole or sharded tensors under
    the original names."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper: Callable[[], Any] = weakref.ref(wrapper)
        self._saving: Saving | None = None

        after = _After(self)
        for owner in dict.fromkeys(owner for _, owner in own_modules(unit_of(wrapper).module)):
            owner.register_state_dict_pre_hook(self._before)
            owner.register_state_dict_post_hook(after)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavingHooks:
        """Those of the wrapper's copy, which is under way; of a module that is copied alone, none."""
        copied = memo[id(self)] = SavingHooks.__new__(SavingHooks)
        copied._wrapper, copied._saving = copied_ref(self._wrapper(), memo), None
        return copied

    def _before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        wrapper = self._wrapper()
        if wrapper is None:
            return
        if self._saving is not None and module in (self._saving.opener, wrapper.module):
            self.abandon()  # the last walk ended in an exception
        if self._saving is None:
            self._saving = begin_saving(unit_of(wrapper), module)

    def after(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        saving = self._saving
        if saving is None or saving.opener is not module:
            return
        self.abandon()
        with torch.no_grad():
            saving.collect(destination, prefix)

    def abandon(self) -> None:
        """Register the parameters again where they are not, as after an exception."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.hide()


class _After:
    """``SavingHooks.after`` as ``nn.Module`` wants it, which marks what it is given; a method takes no marks."""

    def __init__(self, hooks: SavingHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        self._hooks.after(module, destination, prefix)


@contextlib.contextmanager
def collecting(wrapper: Any) -> Iterator[None]:
    """Inside, ``wrapper``'s state is collected, on all ranks alike; where that raises, every unit has its parameters
    back."""
    unit = unit_of(wrapper)
    settings = unit.state_settings
    alone = ", rank0_only" if getattr(settings.state_dict_config, "rank0_only", False) else ""
    try:
        with join(unit).calling(f"state_dict() ({settings.state_dict_type.name}{alone})"):
            yield
    except BaseException:
        for inner in wrappers_in(wrapper):
            inner._fsdp_saving.abandon()
        raise


def strip_wrapper(destination: dict[str, Any], prefix: str) -> None:
    """Take the wrapper's own part out of the names below ``prefix``, in place and in order."""
    added = f"{prefix}{WRAPPED_MODULE}."
    for key in [key for key in destination if key.startswith(added)]:
        destination[prefix + key.removeprefix(added)] = destination.pop(key)
    versions = getattr(destination, "_metadata", None)
    if versions is not None:
        for key in [key for key in versions if f"{key}.".startswith(added)]:
            versions[(prefix + f"{key}.".removeprefix(added)).removesuffix(".")] = versions.pop(key)
