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
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import FullStateDictConfig, RaggedStateDictConfig, StateDictSettings, StateDictType
from fsdp.checkpoint.chunks import chunk_of, one_chunk_each
from fsdp.checkpoint.moves import Item, Mover, Span
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.flat.flat_param import FlatParamHandle, parameter_views
from fsdp.flat.layout import FlatLayout
from fsdp.flat.ownership import WRAPPED_MODULE, own_modules
from fsdp.runtime.agreement import GATHER
from fsdp.runtime.context import RootContext
from fsdp.runtime.unit import Phase, Unit

CHECKPOINTED = "_checkpoint_wrapped_module"


class Wrapper(Protocol):
    """A wrapped module, as far as its state is concerned."""

    _fsdp_unit: Unit
    _device_mesh: DeviceMesh | None

    @property
    def module(self) -> nn.Module: ...

    @property
    def _state_dict_settings(self) -> StateDictSettings: ...

    def _join_context(self) -> RootContext: ...


def wrappers_in(module: nn.Module) -> list[Any]:
    """Every wrapped module in ``module``, itself included, depth first."""
    return [m for m in module.modules() if "_fsdp_unit" in m.__dict__]


# -- one unit ----------------------------------------------------------------------------------------------------------


class Saving:
    """One unit while ``nn.Module`` collects its state; this class makes full state dicts.

    Attributes:
        opener: the unit's outermost module that is walked; with it the unit is through.
    """

    def __init__(self, wrapper: Wrapper, opener: nn.Module) -> None:
        """Shows the stand-ins.

        Raises:
            RuntimeError: the unit is running.
        """
        self.opener = opener
        self.unit = wrapper._fsdp_unit
        self.context = wrapper._join_context()
        self.config = wrapper._state_dict_settings.state_dict_config
        self._wrapper = wrapper
        check_at_rest(self.unit, "state_dict()")
        with torch.no_grad():
            self.unit.follow_parameters()
            self.show()

    def show(self) -> None:
        self._ours: dict[int, bool] = {}  # storage -> whether it is in the result
        for bucket, (views, values) in enumerate(zip(self.unit.views, self.wholes(copy=True))):
            if values is None:
                views.show_stand_ins(self.unreadable(bucket))
                continue
            leaves = views.handle.leaves
            views.show_stand_ins([nn.Parameter(v, requires_grad=leaf.requires_grad) for v, leaf in zip(values, leaves)])
            self._ours.update({_storage(value): False for value in values})

    def hide(self) -> None:
        for views in self.unit.views:
            views.drop_stand_ins()

    def collect(self, destination: dict[str, Any], prefix: str) -> None:
        """Put into ``destination`` what belongs there in place of the stand-ins, and the unit's buffers as asked."""
        for key, value in list(destination.items()):
            if self._is_ours(value):
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
                key = prefix + clean_path(f"{path}.{name}" if path else name)
                if buffer is None or key not in destination:
                    continue
                if self.receives:
                    device = "cpu" if self.config.offload_to_cpu else None
                    destination[key] = destination[key].to(
                        device=device, dtype=self.unit.precision.original_dtype(buffer)
                    )
                else:
                    del destination[key]

    @property
    def receives(self) -> bool:
        """Whether this rank's result has the unit's state."""
        if not (isinstance(self.config, FullStateDictConfig) and self.config.rank0_only):
            return True
        groups = self.unit.groups
        return (groups.shard_rank if groups.sharded else groups.replica_rank) == 0

    def wholes(self, *, copy: bool) -> list[list[torch.Tensor] | None]:
        """By bucket, the whole parameters, in the shards' dtype; None where this rank is not to have them.

        With ``copy`` each in memory of its own, on CPU if the options say so.
        """
        unit = self.unit
        wholes: list[list[torch.Tensor] | None]
        if unit.phase is Phase.SUMMONED:  # what is shown counts, with the changes made to it
            shown = [[param.detach() for _, param in views.shown()] for views in unit.views]
            wholes = [values if values and self.receives else None for values in shown]
        else:
            everywhere = not getattr(self.config, "rank0_only", False)
            apart = _Apart(unit, everywhere=everywhere)
            if copy and apart.pays:
                return apart.gather(self.context, receives=self.receives)
            gathered = unit.gather_shards(self.context, everywhere=everywhere)
            wholes = [
                parameter_views(handle.layout, full) if full is not None and self.receives else None
                for handle, full in zip(unit.handles, gathered)
            ]
        if not copy:
            return wholes
        device = torch.device("cpu") if self.config.offload_to_cpu else unit.device
        return [[v.to(device, copy=True) for v in values] if values is not None else None for values in wholes]

    def unreadable(self, bucket: int) -> list[RaggedTensor]:
        """A stand-in for each parameter, known by ``(self, bucket, index)``: what this rank's shard holds of it."""
        handle = self.unit.handles[bucket]
        return shard_parts(handle, [(self, bucket, index) for index in range(len(handle.layout.params))])

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, RaggedTensor) and isinstance(value.origin, tuple) and value.origin[0] is self

    def stand_ins_in(self, destination: dict[str, Any]) -> list[tuple[str, RaggedTensor]]:
        return [(key, value) for key, value in destination.items() if self._is_ours(value)]


class SavingSharded(Saving):
    """Each rank gets its rows of every parameter."""

    def show(self) -> None:
        for bucket, views in enumerate(self.unit.views):
            views.show_stand_ins(self.unreadable(bucket))

    def collect(self, destination: dict[str, Any], prefix: str) -> None:
        wholes = self.wholes(copy=False)
        mesh = self._wrapper._device_mesh
        for key, stand_in in self.stand_ins_in(destination):
            _, bucket, index = stand_in.origin
            values = wholes[bucket]
            if values is None:
                raise RuntimeError(
                    f"a sharded state dict of {self.unit.name} inside summon_full_params(rank0_only=True): this rank "
                    "has no part of the values that are shown"
                )
            destination[key] = chunk_of(
                values[index], self.unit.groups.shard, mesh=mesh, offload=self.config.offload_to_cpu
            )
        self._collect_buffers(destination, prefix)


class SavingRagged(SavingSharded):
    """Each rank gets what its shard holds anyway, in the shard's own memory unless it is moved to CPU."""

    def show(self) -> None:
        _refuse_summoned(self.unit, "a state dict without communication")
        super().show()

    def collect(self, destination: dict[str, Any], prefix: str) -> None:
        for key, part in self.stand_ins_in(destination):
            local = part.local.cpu() if self.config.offload_to_cpu else part.local
            destination[key] = RaggedTensor(local, part.shape, part.start, part.stride())
        self._collect_buffers(destination, prefix)


class SavingLocal(Saving):
    """Each rank gets its shard of each flat parameter without padding, in the shard's own memory."""

    def show(self) -> None:
        _refuse_summoned(self.unit, "a local state dict")
        home = flat_home(self._wrapper, self.opener)
        for bucket, views in enumerate(self.unit.views):
            start, local = unpadded(views.handle)
            stand_in = RaggedTensor(local, (views.handle.layout.numel,), start, None, (self, bucket))
            views.show_flat_stand_in(home, flat_name(bucket), stand_in)

    def collect(self, destination: dict[str, Any], prefix: str) -> None:
        for key, part in self.stand_ins_in(destination):
            handle = self.unit.handles[part.origin[1]]
            local = part.local.cpu() if self.config.offload_to_cpu else part.local
            destination[key] = one_chunk_each(local, flat_ranges(handle.layout), part.shape, handle.groups.shard)
        self._collect_buffers(destination, prefix)


class _Apart:
    """A unit's parameters, gathered each into memory of its own: what is large travels without being copied.

    Attributes:
        pays: whether any is that large, and the unit's group moves large messages best so. The same on all ranks.
    """

    def __init__(self, unit: Unit, *, everywhere: bool) -> None:
        """On all ranks of the shard group, or on its rank 0 alone."""
        groups = unit.groups
        self._unit = unit
        self._mover = Mover(groups.shard, groups.shard_rank, groups.shard_size, unit.device)
        self._params = [(handle, index) for handle in unit.handles for index in range(len(handle.layout.params))]
        self._items = []
        for handle, index in self._params:
            holds = [Span(*owned) for owned in handle.layout.owners(index)]
            needs = None if everywhere else [Span(0, 0, handle.layout.params[index].numel)]
            self._items.append(Item(handle.layout.dtype, holds, needs))
        self.pays = groups.sharded and any(
            self._mover.goes_directly(item, held) for item in self._items for held in item.holds
        )

    def gather(self, context: RootContext, *, receives: bool) -> list[list[torch.Tensor] | None]:
        """By bucket, the parameters; None where this rank does not receive them."""
        if not receives:
            self._move(context, [])
            return [None for _ in self._unit.handles]
        records = [handle.layout.params[index] for handle, index in self._params]
        values = [
            torch.empty_strided(record.shape, record.stride, dtype=item.dtype, device=self._unit.device)
            for record, item in zip(records, self._items)
        ]
        self._move(context, [value.as_strided((value.numel(),), (1,)) for value in values])
        arrived = iter(values)
        return [[next(arrived) for _ in handle.layout.params] for handle in self._unit.handles]

    def _move(self, context: RootContext, goals: list[torch.Tensor]) -> None:
        rank = self._unit.groups.shard_rank

        def read(number: int, start: int, end: int) -> torch.Tensor:
            handle, index = self._params[number]
            first = handle.layout.piece(index, rank).shard_offset  # all of a piece goes at once
            return handle.shard[first : first + end - start]

        def write(number: int, start: int, values: torch.Tensor) -> None:
            goals[number][start : start + values.numel()].copy_(values)

        def place(number: int, start: int, end: int) -> torch.Tensor:
            return goals[number][start:end]

        ticket = context.about_to(GATHER, self._unit)
        label = f"gather {self._unit.name}"
        self._mover.move(self._items, read, write, label, place=place, watch=ticket)
        self._mover.flush()


def shard_parts(handle: FlatParamHandle, origins: list[Any] | None = None) -> list[RaggedTensor]:
    """What this rank's shard holds of each parameter, in the shard's own memory."""
    layout = handle.layout
    pieces = layout.pieces(handle.groups.shard_rank)
    return [
        RaggedTensor(
            handle.shard[piece.shard_offset : piece.shard_offset + piece.numel],
            record.shape,
            piece.start,
            record.stride,
            origins[index] if origins is not None else None,
        )
        for index, (record, piece) in enumerate(zip(layout.params, pieces))
    ]


def flat_ranges(layout: FlatLayout) -> list[tuple[int, int]]:
    """Every rank's (start, end) in the flat vector without the padding behind the last parameter."""
    ranges = [layout.shard_range(rank) for rank in range(layout.world_size)]
    return [(min(start, layout.numel), min(end, layout.numel)) for start, end in ranges]


def unpadded(handle: FlatParamHandle) -> tuple[int, torch.Tensor]:
    """Where this rank's shard starts in the flat vector, and the shard without the padding at the end."""
    start, end = flat_ranges(handle.layout)[handle.groups.shard_rank]
    return start, handle.shard[: end - start]


def flat_name(bucket: int) -> str:
    return f"_flat_param_{bucket}" if bucket else "_flat_param"


def flat_home(wrapper: Wrapper, opener: nn.Module) -> nn.Module:
    """The module that flat parameters are registered on.

    Raises:
        RuntimeError: ``opener`` is a part of the unit without it.
    """
    home = wrapper.module
    if all(home is not module for module in opener.modules()):
        raise RuntimeError(
            f"LOCAL_STATE_DICT holds whole units, and {type(opener).__name__} is a part of {wrapper._fsdp_unit.name}: "
            "ask the wrapped module, or choose another kind of state dict"
        )
    return home


def check_at_rest(unit: Unit, what: str) -> None:
    if unit.phase not in (Phase.IDLE, Phase.SUMMONED):
        raise RuntimeError(
            f"{what} in the middle of the {unit.phase.name.lower()} of {unit.name}: call it before or after"
        )


def _refuse_summoned(unit: Unit, what: str) -> None:
    if unit.phase is Phase.SUMMONED:
        raise RuntimeError(
            f"{what} of {unit.name} inside summon_full_params, where the shards may be out of date: take it outside"
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def clean_path(path: str) -> str:
    """A name without the parts that this package's and torch's checkpoint wrappers hide."""
    return ".".join(part for part in path.split(".") if part not in (WRAPPED_MODULE, CHECKPOINTED))


@contextlib.contextmanager
def calling(call: str, module: nn.Module) -> Iterator[None]:
    """Inside, ``call``, which all ranks have to make."""
    with contextlib.ExitStack() as calls:
        for context in dict.fromkeys(wrapper._join_context() for wrapper in wrappers_in(module)):
            calls.enter_context(context.calling(call))
        yield


def begin_saving(wrapper: Wrapper, opener: nn.Module) -> Saving:
    """Start to collect the state of ``wrapper``'s unit from ``opener`` on, in the form that its settings ask for."""
    settings = wrapper._state_dict_settings
    unit, kind, config = wrapper._fsdp_unit, settings.state_dict_type, settings.state_dict_config
    if kind is StateDictType.LOCAL_STATE_DICT and wrapper._device_mesh is not None:
        raise RuntimeError("DeviceMesh is not compatible with LOCAL_STATE_DICT; use SHARDED_STATE_DICT")
    if isinstance(config, RaggedStateDictConfig):
        return SavingRagged(wrapper, opener)
    if kind is StateDictType.FULL_STATE_DICT or not unit.handles:
        return Saving(wrapper, opener)
    if not unit.groups.sharded:
        warnings.warn(
            f"{kind} of {unit.name}, which is not sharded (NO_SHARD): its full state dict is returned", stacklevel=2
        )
        return Saving(wrapper, opener)
    if kind is StateDictType.LOCAL_STATE_DICT:
        return SavingLocal(wrapper, opener)
    return SavingSharded(wrapper, opener)


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
        for owner in dict.fromkeys(owner for _, owner in own_modules(wrapper._fsdp_unit.module)):
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
            self._saving = begin_saving(wrapper, module)

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
    settings = wrapper._state_dict_settings
    alone = ", rank0_only" if getattr(settings.state_dict_config, "rank0_only", False) else ""
    try:
        with wrapper._join_context().calling(f"state_dict() ({settings.state_dict_type.name}{alone})"):
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
