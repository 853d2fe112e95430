"""A unit: one wrapped module with the parameters it owns, and the state of forwards and backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import StateDictType, as_state_dict_settings
from fsdp.comm import host_memory
from fsdp.comm.collectives import Communicator, Gather, agree
from fsdp.comm.groups import Groups
from fsdp.comm.lane.issuing import GATHER, GATHER_NEARBY, REDUCE, Event
from fsdp.comm.lane.lane import PARAMETERS
from fsdp.comm.nodes import nearby_group
from fsdp.comm.streams import Streams
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import BufferState
from fsdp.flat.initial_values import InitialValues
from fsdp.flat.names import members_of, plain_children, unit_name, unit_of
from fsdp.flat.params import ParamGuard
from fsdp.flat.views import BucketViews
from fsdp.runtime import hooks
from fsdp.runtime.arrivals import Arrivals
from fsdp.runtime.policy import UnitPolicy
from fsdp.runtime.precision import UnitPrecision
from fsdp.runtime.reduction import BucketGradients, ReductionQueue

if TYPE_CHECKING:
    from fsdp.runtime.call import ForwardCall, Place
    from fsdp.runtime.context import RootContext


class Summoned(Enum):
    """Where a unit inside ``summon_full_params`` shows full parameters."""

    EVERYWHERE = auto()  # every rank shows the full parameters on the device: forwards compute with them
    PARTLY = auto()  # the full parameters are in host memory, or on one rank only: forwards are refused


class Phase(Enum):
    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    SUMMONED = auto()  # the full parameters are shown; forwards inside leave it so


@dataclass(frozen=True)
class Position:
    """The position of a unit in a tree, and the unit's communicators there.

    Attributes:
        context: a weak reference to the tree's ``RootContext``; returns None outside of a tree.
        index: the number of the unit in the tree.
        ancestors: the indices of the units around it.
        communicator: of the unit's groups; None outside of a tree.
        nearby: of the consecutive ranks that the unit stays sharded over after forward, if the policy names a number.
        ranks: the number of ranks of the tree that see other data each, see ``data_ranks``; 0 outside of a tree.
    """

    context: Callable[[], RootContext | None] = lambda: None
    index: int = 0
    ancestors: frozenset[int] = frozenset()
    communicator: Communicator | None = None
    nearby: Communicator | None = None
    ranks: int = 0


class Members:
    """The modules of one unit: several, where the program declared a group.

    Attributes:
        are_several: the unit is a group of modules.
    """

    __slots__ = ("_changed_by", "_ran", "are_several")

    def __init__(self, module: nn.Module) -> None:
        self._ran = dict.fromkeys(members_of(module), -1)  # the last forward of the tree in which each module ran
        self.are_several = len(self._ran) > 1
        self._changed_by: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}  # see ``is_first_to_change``

    def note_ran(self, module: str, generation: int) -> bool:
        """Note that ``module`` has run in this forward of the tree; return whether all modules have."""
        self._ran[module] = generation
        return set(self._ran.values()) == {generation}

    def is_first_to_change(self, change: Callable[[torch.Tensor], torch.Tensor], module: str) -> bool:
        """Note that ``nn.Module._apply`` has reached ``module`` with ``change``; return whether the shards are to be
        changed. They are not if it has reached another module of the unit with the same ``change`` before."""
        first = module in self._changed_by or change not in self._changed_by.values()
        self._changed_by = {module: change} if first else {**self._changed_by, module: change}
        if len(self._changed_by) == len(self._ran):
            self._changed_by = {}
        return first


class Unit:
    """One wrapped module and the parameters that it owns.

    ``Unsharder`` gathers and reshards it, ``ForwardCall`` runs it, ``RootContext`` reduces it.

    Attributes:
        module: the wrapped module.
        name: is used in errors; the path in the tree once there is one.
        views: what users hold, one per bucket; so are ``handles`` and ``gradients``.
        groups: the ranks the unit is sharded and replicated over.
        device: where the unit computes.
        policy: when the unit is gathered, resharded and reduced.
        precision: the dtypes that the unit computes in.
        gradients: slots, reductions and accumulated gradients.
        synchronize: backwards reduce the gradients; read when a backward runs.
        weight: factor of this rank's gradients, as they are written.
        arrivals: the gradients that backwards under way still have to deliver.
        members: the unit's modules.
        calls: the ``ForwardCall`` s of the unit's modules that are under way.
        open_calls: the ``ForwardCall`` s that a backward has entered and not passed, with the ``Place`` of entry.
        position: in the tree.
        summoned: where full parameters are shown; None outside of ``summon_full_params``.
        step_under_way: waits for a thread that steps the parameters; None if there is none.
        host_optimizer: a weak reference to the ``HostOptimizer`` of the parameters; returns None if there is none.
        initial: digests of the buckets' first values; empty if all ranks have those of rank 0.
        state_settings: of the state dicts that the unit makes and loads.
        membership: a weak reference to the ``Membership`` that the unit's wrapper holds.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        views: Sequence[BucketViews],
        groups: Groups,
        device: torch.device,
        policy: UnitPolicy,
        precision: UnitPrecision,
        *,
        initial: Sequence[InitialValues] = (),
    ) -> None:
        self.module, self.views, self.groups, self.device = module, views, groups, device
        self.handles: list[FlatParamHandle] = [each.handle for each in views]
        self.guards = [ParamGuard(each) for each in views]
        self.policy, self.precision = policy, precision
        keep_low_precision = precision.asked.keep_low_precision_grads
        self.gradients = [BucketGradients(each, policy, keep_low_precision=keep_low_precision) for each in views]
        self.synchronize, self.weight = True, 1.0
        self.members = Members(module)
        self.calls: set[ForwardCall] = set()
        self.open_calls: dict[ForwardCall, Place] = {}
        self.position = Position()
        self.initial = initial
        self.state_settings = as_state_dict_settings(StateDictType.FULL_STATE_DICT)
        self.membership: Callable[[], Any] = lambda: None
        self.summoned: Summoned | None = None
        self.step_under_way: Callable[[], None] | None = None
        self.host_optimizer: Callable[[], Any] = lambda: None
        self.set_name(name)
        self.arrivals = Arrivals(views, weakref.ref(self))
        hooks.units.add(self)
        hooks.watch_optimizers()

    # -- the tree ------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> RootContext | None:
        """The ``RootContext`` of the unit's tree, if there is one."""
        return self.position.context()

    @property
    def tree(self) -> RootContext:
        """The ``RootContext`` of the unit's tree, which takes the gradients.

        Raises:
            RuntimeError: no wrapped module has run a forward in which the unit could join a tree.
        """
        context = self.position.context()
        if context is None:
            raise RuntimeError(
                f"a backward reached parameters of {self.name} before its first forward, without which gradients are "
                "not reduced: call the wrapped model itself, model(x), and not a module inside of it (model.module(x))"
            )
        return context

    def join(
        self, tree: RootContext, streams: Streams, index: int, name: str, ancestors: frozenset[int], ranks: int
    ) -> None:
        """Become unit ``index`` of ``tree``, which is held weakly; see ``Position``."""
        before = self.context
        if before is not None and before is not tree:
            before.release(self)
        self.forget_slices()
        nearby = None
        if self.policy.reshard_ranks:
            group = nearby_group(self.groups.shard, self.policy.reshard_ranks)
            nearby = Communicator(Groups.of(group, replicate=False), streams)
        communicator = Communicator(self.groups, streams)
        self.position = Position(weakref.ref(tree), index, ancestors, communicator, nearby, ranks)
        self._follow_policy()
        self.set_name(name)
        self.precision.place_buffers(self.device, full_precision=self.precision.wants_full)

    def set_name(self, name: str) -> None:
        """Use ``name`` in errors."""
        self.name = name
        for handle in self.handles:
            handle.set_unit_name(name)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the unit's groups."""
        communicator = self.position.communicator
        assert communicator is not None  # the unit is in a tree
        return communicator

    def set_membership(self, membership: Callable[[], Any]) -> None:
        """Refer to the wrapper's ``Membership``, weakly."""
        self.membership = membership

    # -- what the ranks compare ----------------------------------------------------------------------------------------

    @property
    def is_mixed(self) -> bool:
        """Whether messages have lower dtypes than the parameters, unless the unit computes in full precision."""
        return any(handle.is_mixed for handle in self.handles)

    def groups_for(self, kind: str) -> list[ProcessGroup]:
        """Return the groups that a collective of this kind runs over, in order."""
        shard, replica = self.groups.shard, self.groups.replica
        if kind == GATHER_NEARBY:
            nearby = self.position.nearby
            return [nearby.groups.shard] if nearby is not None else []
        sharded = [shard] if self.groups.shard_size > 1 else []
        return [*sharded, replica] if kind == REDUCE and replica is not None else sharded

    def signature(self, group: ProcessGroup) -> str:
        """Describe what has to be equal on the ranks of ``group``: facts of the collectives, and the parameters."""
        if not self.groups.sharded:
            kind = "NO_SHARD"
        else:
            ranks = f", resharded over {self.policy.reshard_ranks} ranks" if self.policy.reshard_ranks else ""
            kind = "SHARD_GRAD_OP" if self.policy.reshard_after_forward is False else f"FULL_SHARD{ranks}"
        layouts = [handle.layout for handle in self.handles]
        if self.policy.tree.reduce_unused:
            kind += ", reduced where unused"
        if self.groups.sharded and self.groups.replica is not None:
            kind += f", replicated {self.groups.replica_size} times"
            if group is self.groups.replica:
                kind += f", part {self.groups.shard_rank} of {self.groups.shard_size}"
        factor = self.policy.gradient_divide_factor
        by = ", by a communication hook" if self.policy.comm_hook else f", divided by {factor}" if factor else ""
        buckets = "; ".join(layout.facts for layout in layouts) or "no parameters"
        facts = f"{kind}, {self.policy.order_in_words()}, {buckets}{by}"
        params = [f"{param.name} of shape {param.shape}" for layout in layouts for param in layout.params]
        return f"{facts}{PARAMETERS}{'; '.join(params)}"

    def reduction(self) -> str:
        """Describe the collectives that a backward which begins now would reduce the unit by."""
        trainable = [str(number) for number, bucket in enumerate(self.gradients) if bucket.trainable]
        if not self.synchronize or not trainable:
            return "reduces nothing (no_sync)" if not self.synchronize else "reduces nothing (frozen)"
        policy = self.policy
        divisor = self.divisor(self.position.ranks)
        divided = "" if divisor is None else f", divided by {divisor}"
        partly = "" if policy.requires_all_reduce else ", but not over replicas"
        return f"reduces bucket {' and '.join(trainable)}{divided}{partly}"

    def fail(self, error: BaseException, event: str) -> None:
        """Report ``error``, which a hook of the unit raises: the backward ends here."""
        hooks.report(error, self.name, event)
        if (context := self.context) is not None:
            context.fail()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the unit; a backward that raised is cleaned up first."""
        context = self.context
        if context is not None and context.is_on_thread and hooks.current_backward() == hooks.NO_BACKWARD:
            context.reset_failed_backward()
        if self.calls:
            return Phase.FORWARD
        if self.is_running:
            return Phase.BACKWARD
        return Phase.IDLE if self.summoned is None else Phase.SUMMONED

    @property
    def is_running(self) -> bool:
        """Whether a forward, or a backward that needs the unit, is under way."""
        return bool(self.calls or self.open_calls) or self.arrivals.pending

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters that an optimizer holds are parts."""
        return self.groups.sharded or any(handle.tp_group is not None for handle in self.handles)

    def versions(self) -> list[list[int]]:
        """Return the versions of the shards and the visible parameters of each bucket."""
        return [views.versions() for views in self.views]

    def check_idle(self, words: str, kind: type[Exception] = RuntimeError) -> None:
        """Raise ``kind``, with ``words``, if the unit is running or summoned."""
        if self.phase is not Phase.IDLE:
            raise kind(f"{self.name} is in {self.phase.name}: {words}")

    def check_gradients(self, call: str) -> None:
        """Raise RuntimeError if gradients of earlier backwards are not reduced, or not attached, or were stepped."""
        context = self.context
        in_flight = context is not None and context.reductions.outlasts_backward
        if in_flight or any(bucket.accumulates for bucket in self.gradients):
            raise RuntimeError(
                f"{call}: {self.name} has unsharded gradients from no_sync(), or some whose reduction is not over: run "
                "a backward that reduces and shows them before, or set them to None"
            )
        for bucket in self.gradients:
            bucket.check_not_stepped(call)

    def check_can_change(self) -> None:
        """Raise RuntimeError if the unit is running or summoned, or holds unsharded gradients of ``no_sync``."""
        self.check_idle("it can be moved or cast only while it does not run, or with all units in it while summoned")
        self.check_gradients("moving or casting a module")

    # -- settings ------------------------------------------------------------------------------------------------------

    def choose(self, **choices: Any) -> None:
        """Change fields of the unit's policy, or of the tree's where these count for this unit alone."""
        self.policy = self.policy.replaced(**choices)
        self._follow_policy()

    def divisor(self, ranks: int) -> float | None:
        """Return the divisor of the sum of gradients in a tree with ``ranks`` of ``data_ranks``; None for the number of
        the unit's own ranks.

        A unit over fewer ranks holds experts: other ranks hold other parameters in its place, and the loss of each of
        all ``ranks`` has a part in its gradient. Declared experts have these ranks also in a tree of their own.
        """
        chosen, own = self.policy.gradient_divide_factor, self.groups.data_parallel_size
        ranks = max(ranks, self.groups.data_ranks)
        return float(ranks) if chosen is None and ranks > own else chosen

    def holds_experts(self, ranks: int) -> bool:
        """Whether other ranks of a tree with ``ranks`` of ``data_ranks`` hold other parameters in the place of the
        unit's, and not copies, as the program says by the number of the unit's own ranks as the divisor."""
        own = self.groups.data_parallel_size
        return self.groups.experts is not None or (own < ranks and self.divisor(ranks) != own)

    def _follow_policy(self) -> None:
        policy = self.policy.replaced(gradient_divide_factor=self.divisor(self.position.ranks))
        for bucket in self.gradients:
            bucket.follow(policy)
        if self.position.communicator is not None:
            self.position.communicator.divide_by(policy.gradient_divide_factor, sums_only=policy.force_sum_reduction)

    def set_synchronize(self, synchronize: bool) -> None:
        """Let backwards reduce the gradients, or accumulate them."""
        self.synchronize = synchronize

    def set_weight(self, weight: float) -> None:
        """Multiply this rank's gradients by ``weight`` from now on."""
        self.weight = weight

    def set_state_settings(self, settings: Any) -> None:
        """Make and load state dicts by these settings."""
        self.state_settings = settings

    def set_mesh(self, mesh: DeviceMesh | None) -> None:
        """Let ``mesh`` be the mesh of the unit's groups in state dicts."""
        self.groups = replace(self.groups, mesh=mesh)

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device`` from now on."""
        self.device = device

    # -- full buffers --------------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Whether the full buffers have memory of their own."""
        for handle in self.handles:
            if handle.copy.pooled is not None:
                return True
        return False

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full buffers, that have memory of their own."""
        return sum(handle.full_nbytes for handle in self.handles)

    @property
    def has_slices(self) -> bool:
        """Whether the next gather reads the slices that the nearby ranks have kept."""
        return bool(self.handles) and all(handle.has_slice for handle in self.handles)

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is under way."""
        return any(handle.copy.state is BufferState.GATHERING for handle in self.handles)

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffers have memory (a gather may still be under way). Always true of a unit that is not
        sharded."""
        for handle in self.handles:
            if handle.copy.state is BufferState.SHARDED:
                return False
        return True

    @property
    def has_memory(self) -> bool:
        """Whether a pool has lent memory to a full buffer."""
        return any(handle.copy.pooled is not None and handle.copy.pooled.has_memory for handle in self.handles)

    def wait(self) -> None:
        """Wait until the full buffers are filled (for the current stream)."""
        for handle in self.handles:
            handle.copy.wait()

    def forget_slices(self) -> None:
        """Let the next gather read the shards, which may have changed."""
        for handle in self.handles:
            handle.forget_slice()

    # -- parameters ----------------------------------------------------------------------------------------------------

    def visible_params(self) -> Iterator[torch.Tensor]:
        """Iterate over the unit's parameters as optimizers hold them."""
        return (visible.param for views in self.views for visible in views.visible)

    def settle_step(self) -> None:
        """Wait for a thread that steps the parameters; raise its error."""
        step, self.step_under_way = self.step_under_way, None
        if step is not None:
            step()

    def follow_parameters(self, *, settles: bool = True) -> None:
        """Take over what users did to the visible parameters. Unless it ``settles``, a thread may step them still."""
        if settles and self.step_under_way is not None:
            self.settle_step()
        changed = False
        for guard in self.guards:
            changed = guard.enter() or changed
        if changed:
            self.arrivals.watch()

    def follow_flags(self) -> bool:
        """Freeze and unfreeze the leaves like the visible parameters, as a backward begins; return whether some
        changed. ``check_unfrozen`` finds the gradients for which this came too late."""
        changed = False
        for guard in self.guards:
            changed = guard.follow_flags() or changed
        if changed:
            self.arrivals.watch(awaits_unfrozen=True)
        return changed

    def check_unfrozen(self) -> None:
        """Raise RuntimeError if the backward that ends has dropped the gradient of a leaf.

        Autograd drops the gradient of a leaf that is frozen when it arrives. The leaves follow the visible parameters
        only when the backward first reaches an output of a unit.
        """
        for bucket, index in sorted(self.arrivals.lost):
            raise RuntimeError(
                f"the gradient of parameter {self.handles[bucket].name_of(index)!r} of {self.name} is lost. The "
                "parameter was frozen during the last forward and unfrozen after it, and the backward reached the "
                "parameter before it reached an output of a wrapped module: through a tensor that the forward stored, "
                "or that a hook took. Return that tensor, or mark it inside the forward by "
                "fsdp.mark_side_output(tensor); or unfreeze the parameter before the last forward"
            )

    def before_step(self) -> None:
        """Follow users' changes before an optimizer writes the shards.

        Raises:
            RuntimeError: passes and calls of the tree are suspended.
        """
        if (context := self.context) is not None:
            context.passes.check_available()
            context.unsharder.outdate(self)  # the optimizer may write past the version counters
        if self.phase is Phase.IDLE:
            self.follow_parameters()

    def shards_were_written(self) -> None:
        """Drop what was gathered for the next forward: on some rank, if not on this one, a shard was written."""
        context = self.context
        if context is not None:
            context.unsharder.drop_prefetched(self)

    def reshard_by_hand(self) -> None:
        """Give the memory of the full buffers back, even if they are to be kept.

        Raises:
            RuntimeError: a forward or backward of the unit is under way, or the unit is summoned.
        """
        self.check_idle("call reshard() outside of that")
        context = self.context
        if context is not None:
            context.unsharder.reshard(self)

    def begin_summon(self, *, everywhere: bool) -> None:
        """Enter ``summon_full_params``; ``everywhere``: the device of each rank has the full parameters."""
        self.forget_slices()  # users are about to write parameters
        self.summoned = Summoned.EVERYWHERE if everywhere else Summoned.PARTLY

    def end_summon(self) -> None:
        """Leave ``summon_full_params``. A forward inside has cast the buffers to their own dtypes."""
        self.summoned = None
        self.precision.cast_buffers(self.device, full_precision=self.precision.wants_full)

    def apply_to_shards(
        self, change: Callable[[torch.Tensor], torch.Tensor], only: FlatParamHandle | None = None
    ) -> torch.device:
        """Replace each shard, and each gradient of a shard, by ``change`` of it, as ``nn.Module._apply`` does with
        parameters. Visible parameters stay the same objects.

        Returns:
            the device that the unit computes on from here on: of the shards; with ``only``, the one before.
        """
        context = self.context
        if context is not None:
            context.unsharder.cast_parameters(self, False)
            # no rank uses a gather that a failed pass has left in flight, and its work holds the memory
            context.unsharder.reshard(self, waits=not context.passes.given_up)
        for handle, views, gradients in zip(self.handles, self.views, self.gradients):
            if only not in (None, handle):
                continue
            grads = [visible.param.grad for visible in views.visible]
            for visible in views.visible:
                visible.param.grad = None
            new = change(handle.flat_param).detach()
            if new.data_ptr() != handle.shard.data_ptr() or new.dtype != handle.shard.dtype:
                stays = only is not None or handle.offload.offload_params
                self.device = handle.device if stays else new.device
                handle.replace_shard(new, self.device, self.precision.asked)
                gradients.forget_buffers()
            views.follow_shard()
            for visible, grad in zip(views.visible, grads):
                visible.param.grad = None if grad is None else change(grad).detach()
        self.arrivals.renew()
        return self.device

    def forget_initial_values(self) -> None:
        """Release the samples by which ranks compare the values that they began with."""
        self.initial = ()

    def change_shard(self, handle: FlatParamHandle, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the shard of one bucket, and the gradients, by ``change`` of them."""
        self.check_can_change()
        with torch.no_grad():
            self.apply_to_shards(change, handle)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def reduce(self, queue: ReductionQueue, event: Event, buckets: Sequence[int] | None = None) -> None:
        """Start to reduce these buckets: what this backward has written, else accumulated gradients, else zeros.

        By default all buckets that have gradients, or may have some on peers because they are trainable. The numbers
        from that of the ``event`` on are those of the buckets.
        """
        for number, bucket in enumerate(self.gradients):
            has_some = bucket.slots is not None or bucket.trainable or bucket.accumulates
            if has_some if buckets is None else number in buckets:
                bucket.reduce(self.communicator, queue, Event(event.label, event.number + number))

    # -- communicating outside of a step -------------------------------------------------------------------------------

    def gather_vectors(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather vectors, of each of which a rank gives one of ``shards``, as one collective, outside of the step's
        schedule and into new memory. Return the shards, on the unit's device, if the unit is not sharded."""
        if not (shards and self.groups.sharded):
            return [shard.to(self.device) for shard in shards]
        context, communicator, ranks = self.context, self.communicator, self.groups.shard_size
        assert context is not None
        event = context.passes.about_to(GATHER, self)
        vectors = [host_memory.empty(each.numel() * ranks, dtype=each.dtype, device=self.device) for each in shards]
        context.unsharder.gathers_follow_compute()
        with communicator.streams.on_gather_stream():
            uploaded = map(communicator.streams.upload, shards)
            work = communicator.gather(list(map(Gather, vectors, uploaded)), event)
        work.wait()
        context.unsharder.settle_offloaded()
        return vectors

    def announce(self, *, replicas: bool = True) -> None:
        """Announce that the call under way communicates over the unit's groups, except by ``gather``; without
        ``replicas``, over the shard group alone. See ``Passes.announce``."""
        context = self.context
        if context is not None:
            for group in self.groups_for(REDUCE if replicas else GATHER):
                context.passes.announce(group)

    def agree_on_maximum(self, values: torch.Tensor, *, replicas: bool = True) -> None:
        """Give ``values`` (integers) their maximum over the ranks of the unit's groups, element by element; without
        ``replicas``, over the shard group alone."""
        self.announce(replicas=replicas)
        for group in self.groups_for(REDUCE if replicas else GATHER):
            agree(values, group, self.device, f"agree on {self.name}")


def every_unit() -> list[Unit]:
    """Return the units of this process, in no order."""
    return list(hooks.units)


def units_in(module: nn.Module) -> Iterator[tuple[str, Unit, frozenset[int]]]:
    """Iterate over the units in ``module``, depth first, children in registration order, each once.

    Yields (name, unit, indices in this order of the units around it). Names are paths from ``module`` in the plain
    model; where a unit has several modules, the paths of all of them.

    Raises:
        TypeError: ``module`` is not a module.
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        kind = f"the class {given.__name__}: make one" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(f"expected a model, an nn.Module, but got {kind}")
    return _walk(module, "", frozenset(), {}, set())


def units_of(module: nn.Module) -> list[Unit]:
    """Return every unit in ``module``, in the order of ``units_in``."""
    return [unit for _, unit, _ in units_in(module)]


def units_below(root: Unit) -> Iterator[tuple[str, Unit, frozenset[int]]]:
    """Iterate like ``units_in`` over ``root`` and the units in the root's module."""
    yield "", root, frozenset()
    yield from _walk(root.module, "", frozenset({0}), {root: 0}, set())


def _walk(
    module: nn.Module, path: str, around: frozenset[int], seen: dict[Unit, int], visited: set[nn.Module]
) -> Iterator[tuple[str, Unit, frozenset[int]]]:
    unit = unit_of(module)
    if unit is not None:
        if module in visited:
            return
        visited.add(module)
        if unit not in seen:
            seen[unit] = len(seen)
            yield unit_name(module, path), unit, around
        around = around | {seen[unit]}
    for _, inside, child in plain_children(module, path):
        yield from _walk(child, inside, around, seen, visited)
