"""One unit's life: gathered before it computes, resharded when nothing will read it again.

See [Note: When a unit's backward is over] in ``backward.py``.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import StateDictType, as_state_dict_settings
from fsdp.comm.recording import NOTHING
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.names import members_of, plain_children, unit_name, unit_of
from fsdp.runtime import hooks
from fsdp.runtime.agreement import REDUCE
from fsdp.runtime.arrivals import Arrivals
from fsdp.runtime.backward import (
    ForwardCall,
    Place,
    Running,
    close_passed,
    gradients_arrived,
    leaf_reached,
    outside_gradient_arrived,
)
from fsdp.runtime.comm_hook import CommHook
from fsdp.runtime.context import RootContext, backward_of_summoned
from fsdp.runtime.nested import tensors_in
from fsdp.runtime.outside import OutsideUses
from fsdp.runtime.precision import cast_floating
from fsdp.runtime.ranges import communicates, profiled, ranged
from fsdp.runtime.reduction import BucketGradients
from fsdp.runtime.residency import Residence
from fsdp.runtime.unit_buffers import Summoned, UnitBuffers

_waits_of: Callable[[BucketGradients], bool] = operator.attrgetter("waits")
_reduces: Callable[[BucketGradients], bool] = operator.attrgetter("reduces")


class Phase(Enum):
    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    SUMMONED = auto()  # its parameters are shown whole; forwards inside leave it so


@dataclass(eq=False)
class Unit(UnitBuffers):
    """One wrapped module and the parameters it owns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.comm_hook: CommHook | None = None  # the user's reduction, in the place of the communicator's
        keep_low = self.precision.asked.keep_low_precision_grads
        finds = self.policy.tree.reduce_unused
        self.gradients = [  # one per bucket
            BucketGradients(views, keep_low_precision=keep_low, finds_unused=finds) for views in self.views
        ]
        self.all_reduce_hook: Callable[[torch.Tensor], Any] | None = None  # what else is done to reduced gradients
        self.follow_divisor()
        self.membership: Callable[[], Any] = lambda: None  # its place in its tree, which its wrapper holds
        self.parent_is_built = False  # what is done to modules around it is not meant for it now
        self.has_parent = False  # one of this package's
        self.mesh: DeviceMesh | None = None  # that it was made with
        self.state_settings = as_state_dict_settings(StateDictType.FULL_STATE_DICT)  # of what it makes and takes
        self.ref = weakref.ref(self)
        self._depth = 0  # forwards of this unit under way
        self._changed_by: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}  # of its modules those that have come
        self._ran = dict.fromkeys(members_of(self.module), -1)  # its modules, and in which forward of the tree each ran
        outside = OutsideUses(self.views, functools.partial(outside_gradient_arrived, self.ref))
        self.arrivals = Arrivals(
            self.handles,
            functools.partial(leaf_reached, self.ref),
            functools.partial(gradients_arrived, self.ref),
            outside,
        )
        self._open_calls: set[ForwardCall] = set()  # entered by a backward that is not behind them yet
        hooks.units.add(self)
        hooks.watch_optimizers()

    # -- the tree ------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> RootContext | None:
        """That of its tree."""
        tree: RootContext | None = self._tree()
        return tree

    def signature(self, group: Any) -> str:
        if not self.groups.sharded:
            kind = "NO_SHARD"
        else:
            ranks = f", resharded over {self.policy.reshard_ranks} ranks" if self.policy.reshard_ranks else ""
            kind = "SHARD_GRAD_OP" if self.policy.reshard_after_forward is False else f"FULL_SHARD{ranks}"
        layouts = [handle.layout for handle in self.handles]
        buckets = [
            f"{layout.numel} elements ({layout.shard_numel} per rank) of {layout.dtype}, computed in "
            f"{layout.compute_dtype}, reduced in {layout.reduce_dtype}"
            for layout in layouts
        ]
        if self.policy.tree.reduce_unused:
            kind += ", reduced where unused"
        if self.groups.sharded and self.groups.replica is not None:
            kind += f", replicated {self.groups.replica_size} times"
            if group is self.groups.replica:
                kind += f", part {self.groups.shard_rank} of {self.groups.shard_size}"
        by = ", by a communication hook" if self.comm_hook is not None else ""
        return f"{kind}, {self.policy.order_in_words()}, {'; '.join(buckets) or 'no parameters'}{by}"

    def reduction(self) -> str:
        trainable = [str(bucket) for bucket, gradients in enumerate(self.gradients) if gradients.trainable]
        if not self.synchronize or not trainable:
            return "reduces nothing (no_sync)" if not self.synchronize else "reduces nothing (frozen)"
        policy = self.policy
        divided = "" if policy.gradient_divide_factor is None else f", divided by {policy.gradient_divide_factor}"
        partly = "" if policy.requires_all_reduce else ", but not over replicas"
        return f"reduces bucket {' and '.join(trainable)}{divided}{partly}"

    @property
    def lacks_gradients(self) -> bool:
        return any(gradients.used for gradients in self.gradients) and any(each.lacks for each in self.gradients)

    def used(self) -> torch.Tensor:
        flags = [index in each.used for each in self.gradients for index in range(len(each.handle.leaves))]
        return torch.tensor(flags, dtype=torch.uint8, device="cpu")

    def note_used(self, flags: list[int]) -> None:
        its = iter(flags)
        for each in self.gradients:
            each.note_used({index for index in range(len(each.handle.leaves)) if next(its)})

    def check_gradients(self, call: str) -> None:
        """Raises RuntimeError if gradients of backwards that are over wait to be reduced, or to be shown."""
        context = self.context
        under_way = context is not None and context.reductions.outlast_backward
        if under_way or any(gradients.accumulates for gradients in self.gradients):
            raise RuntimeError(
                f"{call}: {self.name} has unsharded gradients from no_sync(), or some whose reduction is not over: run "
                "a backward that reduces and shows them before, or set them to None"
            )

    @property
    def phase(self) -> Phase:
        """The phase of the unit; a backward that raised is cleaned up first."""
        context = self.context
        if context is not None and context.is_on_thread and hooks.current_backward() == hooks.NO_BACKWARD:
            context.reset_failed_backward()
        if self._depth > 0:
            return Phase.FORWARD
        if self._open_calls or self.arrivals.pending:
            return Phase.BACKWARD
        return Phase.SUMMONED if self.summoned is not None else Phase.IDLE

    def choose(self, **choices: Any) -> None:
        """Change fields of the unit's policy, or of the tree's where these count for this unit alone."""
        self.policy = self.policy.replaced(**choices)

    def follow_divisor(self) -> None:
        """What gradients are divided by has changed, or what is done to them besides."""
        for gradients in self.gradients:
            gradients.altered = self.policy.gradient_divide_factor is not None or self.all_reduce_hook is not None
        if self.communicator is not None:
            self.communicator.divisor = self.policy.gradient_divide_factor

    def use_hook(self, hook: CommHook) -> None:
        """Reduce gradients by ``hook`` from now on."""
        self.comm_hook = hook
        for gradients in self.gradients:
            gradients.use_hook(hook)

    def take_part(self, kind: str, *, full_precision: bool) -> None:
        context, communicator = self.context, self.communicator
        assert context is not None and communicator is not None
        if kind == REDUCE:
            if self.phase is Phase.IDLE:
                context.residency.cast_parameters(self, full_precision)
            with context.joined():
                self._reduce(context)
            return
        with context.streams.on_gather_stream():
            parts = [handle.part_for_others(context.streams, full_precision=full_precision) for handle in self.handles]
            pending = communicator.gather(parts, self.gather_tags[0])
        pending.wait()  # on the compute stream: whoever writes to the shard next must not overtake it

    def check_idle(self, words: str, kind: type[Exception] = RuntimeError) -> None:
        """Raises ``kind``, with ``words``, if the unit is running or shown whole."""
        if self.phase is not Phase.IDLE:
            raise kind(f"{self.name} is in {self.phase.name}: {words}")

    def check_can_change(self) -> None:
        """Raises RuntimeError if the unit is running or shown whole, or holds unsharded gradients of ``no_sync``."""
        self.check_idle("it can be moved or cast only while it does not run, or with all units in it while summoned")
        self.check_gradients("moving or casting a module")

    def apply_to_shards(
        self, change: Callable[[torch.Tensor], torch.Tensor], only: FlatParamHandle | None = None
    ) -> torch.device:
        """Replace each shard, and each gradient of a shard, by ``change`` of it, as ``nn.Module._apply`` does with
        parameters. Visible parameters stay the same objects. Returns the device that the unit computes on from here
        on: that of the shards, or with ``only`` one bucket's the one before."""
        context = self.context
        if context is not None:
            context.residency.cast_parameters(self, False)
            context.residency.forget_output(self)
            context.residency.reshard(self)
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

    def change_shard(self, handle: FlatParamHandle, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the shard of one bucket, and its gradients, by ``change`` of them."""
        self.check_can_change()
        with torch.no_grad():
            self.apply_to_shards(change, handle)

    def changes_shards(self, change: Callable[[torch.Tensor], torch.Tensor], member: str) -> bool:
        """``nn.Module._apply`` has come to ``member`` with ``change``: whether the shards are to be changed, which they
        are not where it has come to another of the unit's modules with the same before."""
        first = member in self._changed_by or change not in self._changed_by.values()
        self._changed_by = {member: change} if first else {**self._changed_by, member: change}
        if len(self._changed_by) == len(self._ran):
            self._changed_by = {}
        return first

    # -- gathered by hand ----------------------------------------------------------------------------------------------

    def unshard_by_hand(self, context: RootContext) -> Callable[[], None]:
        """Start gathering for the next forward, which will use it: what changes a shard in between comes too late for
        it. Returns what waits for the gather.

        Raises:
            AssertionError: a forward or backward of the unit is under way.
        """
        self.check_idle("Cannot manually unshard parameters during forward/backward", AssertionError)
        self.follow_parameters()
        if self.gathers:
            context.residency.gather_by_hand(self)
        return self.wait

    # -- forward -------------------------------------------------------------------------------------------------------

    def pre_forward(self, context: RootContext, inputs: Any) -> tuple[ForwardCall | None, Any]:
        """Gather, and prefetch; returns the call to hand to ``post_forward``, and the inputs, cast."""
        if self.summoned is Summoned.PARTLY:
            raise RuntimeError(
                f"forward of {self.name} inside summon_full_params with rank0_only or offload_to_cpu: the full "
                "parameters are not on every rank's device. Run it outside, or summon without these options"
            )
        if peek_interpreter_stack() is not None and self.gathers:
            raise RuntimeError(
                f"{self.name} is called inside of torch.vmap or a transform of torch.func, which sharded parameters do "
                "not support. Transform functions inside of its forward, or call the plain module"
            )
        context.enter_forward(self)
        self._depth += 1
        try:
            start = hooks.next_node_number()
            if self.summoned is not None:
                return self._begin_summoned_forward(context, start), inputs
            precision, asked = self.precision, self.precision.asked
            full_precision = precision.full_in_eval and precision.wants_full
            if not full_precision and asked.param_dtype is not None:
                as_root = asked.cast_root_forward_inputs and self is context.root
                if as_root or (asked.cast_forward_inputs and self.handles):
                    inputs = cast_floating(inputs, asked.param_dtype)
            recomputing = hooks.current_backward() != hooks.NO_BACKWARD
            with hooks.own_operations() if hooks.count_of_modes() else NOTHING:
                if recomputing:
                    close_passed(Place.now())
                if self.full_precision is not full_precision or asked.buffer_dtype is not None:
                    context.residency.compute_in(self, full_precision)
                context.residency.unshard(self, refill=not recomputing)
                if not recomputing:
                    context.residency.prefetch(self, begins=True)
            if not torch.is_grad_enabled():
                return None, inputs
            marks = [view.marks() for view in self.views]
            call = ForwardCall(self, context, start, marks, full_precision=full_precision)
            args, kwargs = inputs
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    call.hook_input(value)
            return call, inputs
        except BaseException:
            self.abort_forward(context)
            raise

    def _begin_summoned_forward(self, context: RootContext, start: int) -> ForwardCall | None:
        """Begin a forward inside ``summon_full_params``, which computes with the parameters and in the dtypes that are
        registered; a backward of it is refused."""
        self.precision.cast_buffers(self.device, full_precision=True)
        if not torch.is_grad_enabled():
            return None
        return ForwardCall(self, context, start, [], full_precision=True, in_summon=True)

    @ranged("_post_forward", "name")
    def post_forward(self, context: RootContext, running: Running, output: Any, member: str = "") -> Any:
        """``member`` has run: reshard unless others of the unit's modules are to come, or the backward follows at once;
        and hook the outputs, which are returned."""
        running.end()
        call = running.call
        if self.summoned is None:
            for view in self.views:
                view.check_leaves()
        output_dtype = self.precision.asked.output_dtype
        if output_dtype is not None and self.summoned is None and not self.precision.wants_full:
            output = cast_floating(output, output_dtype)
        outputs = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        differentiable = [tensor for tensor in outputs if tensor.requires_grad] if call is not None else []
        for handle in self.handles:
            if handle.holds_any(outputs):
                self.in_output = True
        if call is not None:
            call.hook_outputs(differentiable)
        residency = context.residency
        with hooks.own_operations() if hooks.count_of_modes() else NOTHING:
            self._leave_forward(context)
            if hooks.current_backward() == hooks.NO_BACKWARD and self._depth == 0 and self.summoned is None:
                follows = residency.expects_backward
                self._ran[member] = residency.generation
                if len(self._ran) > 1 and any(ran != residency.generation for ran in self._ran.values()):
                    residency.keep_to_others(self)
                elif not (follows and residency.keep_to_backward(self)):
                    residency.reshard(self, backward_follows=follows)
                residency.prefetch(self)
            if self._depth == 0:  # last: what fails before it is aborted
                context.exit_forward(self, backward_follows=bool(differentiable))
        return output

    @hooks.untraced
    def abort_forward(self, context: RootContext, running: Running | None = None) -> None:
        """The wrapped module raised, or ``post_forward``. Checkpointing ends a recomputation early that way, which is
        no fault."""
        if running is not None:
            running.end()
        self._leave_forward(context)
        if hooks.current_backward() == hooks.NO_BACKWARD:
            context.passes.failed = True
        if self._depth == 0:
            context.exit_forward(self, backward_follows=True, failed=True)

    def _leave_forward(self, context: RootContext) -> None:
        self._depth = max(0, self._depth - 1)  # a failed backward inside a forward has reset it
        if self._depth > 0:
            return
        if hooks.current_backward() != hooks.NO_BACKWARD and not self._in_backward:
            context.residency.becomes(self, Residence.RECOMPUTED)

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def _in_backward(self) -> bool:
        return bool(self._open_calls) or self.arrivals.pending

    def backward_reached(self, call: ForwardCall) -> None:
        """The gradient of an output of ``call`` is there: gather, and note what this backward will bring."""
        if call.in_summon:
            raise backward_of_summoned(self.name)
        context: RootContext = self._tree() or call.context
        if torch.is_grad_enabled() and self.gathers:  # in a hook: whether the backward was started with create_graph
            if not hooks.goes_on():
                return  # the gradient of an output, asked for by autograd.grad(), enters nothing of the unit
            raise RuntimeError(
                f"a backward with create_graph=True reached {self.name}: gradients of gradients of sharded parameters "
                "are not supported. Compute such terms on the plain module, or use ShardingStrategy.NO_SHARD"
            )
        context.enter_backward(self)
        if self.full_precision is not call.full_precision or self.precision.asked.buffer_dtype is not None:
            context.residency.compute_in(self, call.full_precision)
        self._open_calls.add(call)
        call.enter()
        self.arrivals.enter()
        if self.policy.unshard_in_backward or self.is_gathered:  # what is recomputed inside uses the leaves
            context.residency.unshard(self, refill=False)
        for bucket, (views, before) in enumerate(zip(self.views, call.marks)):  # with what was replaced taken over
            if views.marks() != before:
                expected = self.arrivals.enter()
                views.check_unchanged(before, {index for of, index in expected if of == bucket})
        context.residency.prefetch(self, begins=True)

    def backward_reached_leaf(self, context: RootContext) -> None:
        """Enter the backward of the running graph task, which has reached a leaf before an output of the unit."""
        context.enter_backward(self)
        self.arrivals.enter()

    def gradients_arrived(self, context: RootContext) -> None:
        """Copy the gradients that have arrived into their slots. With the last expected one, reduce."""
        self._copy_gradients(context)
        if self.arrivals.pending:
            return
        context.residency.prefetch(self)  # before the reduction: a gather is waited for sooner
        with profiled("_post_backward_hook", self.name):
            self.finish_gradients(context, at_end=False)
            if self._maybe_reshard(context):
                context.residency.prefetch(self)

    def _copy_gradients(self, context: RootContext) -> None:
        grads_of = self.arrivals.take()
        for bucket, grads in grads_of.items():
            self.gradients[bucket].check(grads, reads_parameters=self.policy.unshard_in_backward)
        for bucket, grads in sorted(grads_of.items()):
            gradients = self.gradients[bucket]
            if gradients.target is None:
                gradients.open(context.reductions, synchronize=self.synchronize)
            if self.gradient_weight:  # else their slots count as unwritten
                gradients.add(grads, self.gradient_weight)

    def take_outside(self, context: RootContext, bucket: int, index: int, grad: torch.Tensor) -> None:
        """Take the gradient of a parameter that was used outside of forward; see ``outside.py``."""
        gradients, grads = self.gradients[bucket], {index: grad}
        gradients.check(grads, reads_parameters=False)
        context.enter_backward(self)
        if gradients.target is None:
            gradients.open(context.reductions, synchronize=self.synchronize)
        if self.gradient_weight:
            gradients.add(grads, self.gradient_weight, outside=True)

    def backward_left(self, call: ForwardCall) -> None:
        """The backward is at an argument of ``call``, which it is behind of: gather what comes next."""
        try:
            (self.context or call.context).residency.prefetch(self)
        except BaseException as error:
            self.backward_failed(error, "end of backward")
            raise

    def backward_passed(self, call: ForwardCall) -> None:
        """The backward is behind ``call``; of several modules others may be to come, for what they share or have of
        their own."""
        context: RootContext = self._tree() or call.context
        self._open_calls.discard(call)
        if not self._maybe_reshard(context) and len(self._ran) > 1 and not self._open_calls and self._depth == 0:
            context.residency.keep_to_others(self)

    def _maybe_reshard(self, context: RootContext) -> bool:
        """Reshard if the backward is over for the unit; returns whether it is."""
        if self._open_calls or self._depth > 0 or self.arrivals.pending:
            return False
        context.residency.end_backward(self)
        return True

    def _forget_backward(self) -> None:
        self.arrivals.forget()
        for call in self._open_calls:
            call.entered = None
        self._open_calls.clear()

    @property
    def _has_written(self) -> bool:
        """Whether the slots of a bucket have something that is neither reduced nor shown."""
        for gradients in self.gradients:
            if gradients.target is not None:
                return True
        return False

    def finish_gradients(self, context: RootContext, *, at_end: bool) -> None:
        """Reduce what this backward has written; what is not to be reduced is shown as it is at the end."""
        if not self._has_written:
            return
        if self.synchronize and any(map(_reduces, self.gradients)):
            context.passes.about_to(REDUCE, self)
            residency = context.residency
            with communicates("reduce", self.name, residency.generation, logged=residency.logged):
                self._reduce(context)
        elif at_end:
            for gradients in self.gradients:
                if gradients.trainable:
                    if gradients.target is None:
                        gradients.open(context.reductions, synchronize=False)
                    gradients.expose(complete=self.synchronize)

    def _reduce(self, context: RootContext) -> None:
        """Start to reduce what this backward has written so far, and zeros where that is nothing."""
        # A bucket that is unused, but not on all ranks, is reduced as zeros, on every rank alike. So is one that was
        # frozen after a backward without synchronization.
        buckets = [
            bucket
            for bucket, gradients in enumerate(self.gradients)
            if gradients.target is not None or gradients.trainable or gradients.accumulates
        ]
        self.reduce_buckets(context, buckets)

    def reduce_buckets(self, context: RootContext, buckets: Iterable[int]) -> None:
        """Start to reduce the gradients of these buckets: what this backward has written, else what earlier ones have
        accumulated, else zeros."""
        assert self.communicator is not None
        for bucket in buckets:
            gradients = self.gradients[bucket]
            if gradients.target is None:
                gradients.open(context.reductions, synchronize=True)
            gradients.reduce(
                self.communicator,
                context.reductions,
                self.reduce_tags[bucket],
                to_replicas=self.policy.requires_all_reduce,
                hook=self.all_reduce_hook,
            )

    def backward_failed(self, error: BaseException, event: str) -> None:
        """A hook of the unit raises ``error``: the backward ends here."""
        hooks.report(error, self.name, event)
        context = self.context
        if context is not None:
            context.passes.failed = True

    def end_backward(self) -> None:
        context: RootContext = self._tree()
        busy = self._depth or self._open_calls or self.arrivals.held
        if not (busy or self.arrivals.pending or any(map(_waits_of, self.gradients))):
            self.arrivals.forget()  # nearly always: it is through
            if not self.groups.sharded or context.residency.of(self) is not Residence.SHARDED:
                context.residency.end_backward(self)
            return
        if self.arrivals.held:
            self._copy_gradients(context)
        if self.synchronize and not self._has_written:
            for gradients in self.gradients:  # not reached now, but in a backward that was not synchronised
                if gradients.accumulates:
                    gradients.open(context.reductions, synchronize=True)
        self.finish_gradients(context, at_end=True)
        self._forget_backward()
        if self._depth == 0:  # a backward may run inside a forward, whose unit goes on computing
            context.residency.end_backward(self)

    def reset(self) -> None:
        """Forget a forward or backward that failed. A gather under way keeps its buffer until somebody waits for it."""
        context = self.context
        assert context is not None
        for gradients in self.gradients:
            gradients.abandon(context.reductions)
        self._depth = 0
        self._forget_backward()
        if self.is_gathering:
            self.use_resting()
            context.residency.becomes(self, Residence.PREFETCHED)
        else:
            context.residency.reshard(self)

    def shards_were_written(self) -> None:
        """On some rank, if not on this one: what has been gathered for a forward to come is out of date on all."""
        context = self.context
        if context is not None and context.residency.of(self) is Residence.PREFETCHED:
            context.residency.reshard(self)

    @property
    def is_sharded(self) -> bool:
        """Whether what an optimizer holds of it are parts."""
        return self.groups.sharded or any(handle.tp_group is not None for handle in self.handles)

    def before_step(self) -> None:
        """An optimizer is about to change the shards."""
        self.kept_versions = None  # it may write past what counts versions
        if self.phase is Phase.IDLE and not all(views.is_as_left for views in self.views):
            self.follow_parameters()


def every_unit() -> list[Unit]:
    """Those of this process, in no order."""
    return list(hooks.units)


def units_in(module: nn.Module) -> Iterator[tuple[str, Unit, frozenset[int]]]:
    """Every unit in ``module``, depth first, children in registration order, each once.

    As (name, unit, numbers in this order of the units around it). Names are paths from ``module`` in the plain model;
    where a unit has several modules, the paths of all of them.

    Raises:
        TypeError: it is no module.
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        kind = f"the class {given.__name__}: make one" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(f"expected a model, an nn.Module, but got {kind}")
    return _walk(module, "", frozenset(), {}, set())


def units_of(module: nn.Module) -> list[Unit]:
    """Every unit in ``module``, in the order of ``units_in``."""
    return [unit for _, unit, _ in units_in(module)]


def units_below(root: Unit) -> Iterator[tuple[str, Unit, frozenset[int]]]:
    """As ``units_in``, of ``root`` and of the module that it is of."""
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
