"""What users write to the parameters that they hold, and their gradients: what both modes of ``views.py`` share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp import environment
from fsdp.flat.flat_param import LOST_WRITE, RENORMALIZES, FlatParamHandle, assign_grad
from fsdp.flat.full_copy import FullCopy, parameter_views, point_at
from fsdp.flat.registration import Layer, Registration
from fsdp.flat.tensor_parallel import local_of
from fsdp.flat.visible import Visible, flags_of, looks_of, memories_of, version_of

# of each visible parameter which one it is, and how often it was changed in place
Versions = tuple[Sequence[int], list[int]]
Marks = tuple[FullCopy, Versions]  # of a bucket: its full copy, and these


class CommonViews:
    """Of one bucket."""

    visible: Sequence[Visible]

    def _see(self, visible: Sequence[Visible]) -> None:
        """Users hold these from here on."""
        self.visible = visible
        self.present = [position for position, each in enumerate(visible) if not each.absent]
        self.params = [each.param for each in visible]
        self._ids = [id(param) for param in self.params]

    def __init__(self, handle: FlatParamHandle, registration: Registration) -> None:
        self.handle, self.registration = handle, registration
        # the memory of what rests on the modules, if that has values, and where it is
        self._values: list[torch.Tensor] | None = None
        self._pointers: list[int] = []
        self._on_new_accumulator: Callable[[int, torch.Tensor], None] = lambda index, tensor: None
        self.check_writeback = not environment.SKIP_WRITEBACK_CHECK.value
        self._compares_kept = self.check_writeback and environment.DEBUG.value

    # -- versions ------------------------------------------------------------------------------------------------------

    @property
    def versions(self) -> Versions:
        """The identity and version of each visible parameter. They change when a parameter is replaced or written in
        place, but not when it is written through ``.data``."""
        return self._ids, list(map(version_of, self.params))

    def marks(self) -> Marks:
        """What ``check_unchanged`` compares with."""
        if not self.check_writeback:
            return self.handle.copy, ((), [])
        return self.handle.copy, self.versions

    def check_unchanged(self, before: Marks, expected: Collection[int]) -> None:
        """Raises RuntimeError if a backward from a forward in which these marks were made would compute with other
        values than that: what it computes the gradients of, the leaves ``expected``, must be as it was then. What is
        written through ``.data`` leaves no mark, as with plain parameters."""
        copy, versions = self.marks()
        if copy is not before[0]:
            raise RuntimeError(
                f"{self.handle.unit_name} was moved or cast between a forward and its backward, or a gather of it "
                "failed, and the values are gone: call .to(), .half() and the like after the backward; or run the "
                "forward again"
            )
        for visible, now, then in zip(self.visible, zip(*versions), zip(*before[1])):
            if now != then and any(member in expected for member in visible.members):
                raise RuntimeError(
                    f"{visible.name!r} of {self.handle.unit_name} was changed in place, or replaced, between a forward "
                    "and its backward, which would compute with other values than the forward did. Change parameters, "
                    "and step optimizers, after the backward; or run the forward again"
                )

    def note_writes(self, indices: Iterable[int]) -> None:
        """The values of these parameters of the layout were changed: users have the versions of theirs grow, too."""
        changed = set(indices)
        params = [visible.param for visible in self.visible if not changed.isdisjoint(visible.members)]
        if params:
            torch.autograd.graph.increment_version(params)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def set_grad(self, position: int, grad: torch.Tensor | None) -> None:
        """Make ``grad``, sharded or in full shape, the gradient of visible parameter ``position``."""
        if assign_grad(self.visible[position].param, grad):
            visible = self.visible[position]
            self._on_new_accumulator(visible.members[-1], visible.param)

    def notify_of_accumulators(self, callback: Callable[[int, torch.Tensor], None]) -> None:
        """Call ``callback`` with what ``used_outside`` has of a tensor when autograd has lost its accumulator."""
        if not self.handle.groups.sharded:
            self._on_new_accumulator = callback

    def used_outside(self) -> list[tuple[int, torch.Tensor]]:
        """The tensors that a program computes with outside of the unit's forward and that are no leaves, each with the
        index of the leaf that stands for the same values. None where they are shards."""
        if self.handle.groups.sharded:
            return []
        leaves = {id(leaf) for _, leaf in self.handle.all_leaves}
        resting = [(i, tensor) for i, tensor in enumerate(self.registration.resting) if id(tensor) not in leaves]
        flat = self.visible[0]
        return resting if len(flat.members) == 1 else [*resting, (flat.members[-1], flat.param)]

    @property
    def has_hooks(self) -> bool:
        """Whether ``hooked`` makes a difference now."""
        return self.handle.has_tp

    def hooked(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """``grad``, the whole gradient of parameter ``index`` on this rank, as the user's hooks change it."""
        return self.local_gradient(index, grad)

    def local_gradient(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """With tensor parallelism this rank's part of ``grad``, the gradient of parameter ``index``, for which ranks
        may have to communicate; else ``grad`` itself."""
        tp = self.handle.tp[index] if index < len(self.handle.tp) else None
        return grad if tp is None else tp.local_gradient(grad)

    def _take_grad(self, index: int, whole: torch.Tensor) -> None:
        """Make ``whole`` the gradient of parameter ``index``."""
        whole = local_of(whole)
        visible = next(visible for visible in self.visible if index in visible.members)
        if visible.absent:
            return
        if visible.param.grad is None:
            visible.param.grad = torch.zeros_like(visible.param)
        target = self._grad_of(visible, index)
        target.copy_(whole if target.shape == whole.shape else self.handle.part_of(index, whole))

    def _grad_of(self, visible: Visible, index: int) -> torch.Tensor:
        """The part of parameter ``index`` in the gradient that ``visible`` has."""
        grad: Any = visible.param.grad
        if len(visible.members) == 1:
            return grad
        sharded = grad.shape == self.handle.shard.shape
        return (self.handle.sharded_views(grad) if sharded else parameter_views(self.handle.layout, grad))[index]

    # -- what users write ----------------------------------------------------------------------------------------------

    def check_leaves(self) -> None:
        """Raise RuntimeError where a forward has written to a leaf, whose memory is about to be released.

        A write through ``.data`` is found with ``FSDP_DEBUG=1`` only, when it happens.
        """
        if not self.check_writeback:
            return
        found = self.handle.copy.undo_writes()
        if replaced := self.registration.put_back_leaves():
            found += [(index, "replaced") for index in replaced]
        if found:
            index, what = found[0]
            remedy = RENORMALIZES if self.registration.renormalizes(index) else LOST_WRITE
            raise RuntimeError(
                f"parameter {self.handle.name_of(index)!r} of {self.handle.unit_name} was {what} inside of a forward "
                f"or backward, {remedy}"
            )

    def check_kept(self) -> None:
        """Raise RuntimeError where a full copy that was kept from pass to pass has other values than the shard.

        The values are compared with ``FSDP_DEBUG=1`` only, which waits for the device.
        """
        if not self._compares_kept or self.handle.copy.keeps_writes:
            return
        index = self.handle.first_difference()
        if index is not None:
            raise RuntimeError(
                f"parameter {self.handle.name_of(index)!r} of {self.handle.unit_name} was changed through .data while "
                "it stays gathered from pass to pass (inside no_sync() under SHARD_GRAD_OP, or by "
                "set_reshard_after_backward(False)), and nothing tells of that: change it in place (param.copy_() and "
                "the like under torch.no_grad())"
            )

    def take_over(self) -> None:
        """Take over the values of what users have put in the place of parameters or of their data.

        Raises:
            RuntimeError: it cannot be, as it has another shape for instance. Nothing of that parameter is changed.
            NotImplementedError: one registration of a shared parameter was replaced.
        """
        summoned = self.registration.summoned
        ours: Sequence[Any] = self.registration.resting
        values: Sequence[torch.Tensor] | None = self._values
        pointers = self._pointers
        if summoned is not None:
            ours, values = summoned.tensors, summoned.values
            pointers = memories_of(values or ())
        if replaced := list(self.registration.replaced()):
            with torch.no_grad():
                for index, new in replaced:
                    self._check_fits(index, new, values[index] if values is not None else ours[index])
                    self._adopt(index, new, self._write(index, new))
        if values is None or (found := memories_of(ours)) == pointers:
            return
        with torch.no_grad():
            for index, (tensor, memory, pointer) in enumerate(zip(ours, found, pointers)):
                if memory != pointer:
                    self._check_fits(index, tensor, values[index], cast=summoned is not None)
                    local = local_of(tensor)
                    point_at([local], [values[index].copy_(local)])

    def _check_fits(self, index: int, new: torch.Tensor, like: torch.Tensor, *, cast: bool = False) -> None:
        """Raises where ``new`` cannot stand for parameter ``index``, whose values lie in ``like``; with ``cast`` it may
        have another dtype or device."""
        record = self.handle.layout.params[index]
        name = f"{record.name!r} of {self.handle.unit_name}"
        if not isinstance(new, nn.Parameter):
            raise TypeError(f"Cannot writeback {name}: assign a torch.nn.Parameter, not a {type(new).__name__}")
        if isinstance(new, DTensor) and self.registration.summoned is None:
            raise NotImplementedError(
                f"Cannot writeback {name}: it became a DTensor while it is sharded. Assign one inside "
                "summon_full_params(), or a plain torch.nn.Parameter of this rank's part"
            )
        new = local_of(new)
        if new.shape != like.shape:
            what = "the parameter" if like.shape == record.shape else "this rank's part of it"
            remedy = "" if like.shape == record.shape else "; write the whole inside FSDP.summon_full_params(model)"
            raise RuntimeError(
                f"Cannot writeback {name}: its shape became {tuple(new.shape)}, and {what} has "
                f"{tuple(like.shape)}{remedy}"
            )
        if not cast and (new.dtype, new.device.type) != (like.dtype, like.device.type):
            raise RuntimeError(
                f"Cannot writeback {name}: it became {new.dtype} on {new.device}, and is sharded as {like.dtype} on "
                f"{like.device}. Move or cast the wrapped module instead, all of it: .to(), .half() and the like"
            )

    def _write(self, index: int, new: torch.Tensor) -> torch.Tensor:
        """Make the values of ``new``, a whole parameter or this rank's part of it, those of parameter ``index``: where
        it is summoned, if it is, else in the shard. Returns that memory."""
        target, new = self._target(index), local_of(new)
        return target.copy_(new if new.shape == target.shape else self.handle.part_of(index, new))

    def _target(self, index: int) -> torch.Tensor:
        """Where the values of parameter ``index`` are, or this rank's part of them."""
        summoned = self.registration.summoned
        values = self.handle.sharded_views(self.handle.shard) if summoned is None else summoned.values
        assert values is not None
        return values[index]

    def _differs(self, index: int, new: torch.Tensor | None) -> bool:
        """Whether ``new`` has other values than parameter ``index``."""
        target = self._target(index)
        if new is None:
            return False
        new = local_of(new).detach()
        new = new if new.shape == target.shape else self.handle.part_of(index, new)
        both = (target, new.to(target.device, target.dtype))
        return not torch.equal(*(values.reshape(-1).view(torch.uint8) for values in both))

    def _adopt(self, index: int, new: Any, memory: torch.Tensor) -> None:
        """The user has replaced parameter ``index`` by ``new``, whose values have been written to ``memory``."""
        raise AssertionError("each mode has its own")

    # -- what is registered in the parameters' places ------------------------------------------------------------------

    def _uncover_summoned(self) -> Layer:
        layer = self.registration.summoned
        assert layer is not None
        self.registration.uncover(layer)
        return layer

    def drop_casts(self) -> None:
        """Show the memory of summoned parameters again that were cast or moved, whose values are not to be kept."""
        layer = self.registration.summoned
        assert layer is not None and layer.values is not None
        for tensor, value in zip(map(local_of, layer.tensors), layer.values):
            if (tensor.dtype, tensor.device) != (value.dtype, value.device):
                point_at([tensor], [value])

    def summoned(self) -> list[tuple[str, nn.Parameter]]:
        """While summoned: (name in the unit, full parameter)."""
        layer = self.registration.summoned
        return list(zip((record.name for record in self.handle.layout.params), layer.tensors if layer else ()))

    def user_attributes(self, index: int) -> dict[str, Any]:
        """Return the attributes that users have set on parameter ``index`` of the layout."""
        own = vars(self._attributes_of(index))
        return {name: value for name, value in own.items() if not name.startswith("_fsdp_")}

    def _attributes_of(self, index: int) -> torch.Tensor:
        """Return the tensor that has the attributes of parameter ``index``."""
        return self.handle.leaves[index]

    def put_placeholders(
        self,
        placeholders: Sequence[torch.Tensor],
        *,
        flat: tuple[nn.Module, str] | None = None,
        keep_writes: bool = False,
        compared: bool = False,
    ) -> None:
        """Register these, one per parameter of the layout, in the parameters' places until ``drop_placeholders``; or
        with ``flat`` (where, and as what) one for the whole bucket. With ``keep_writes``, which they are whole on all
        ranks for, what users do to them is done to the parameters; ``compared``: also what only their values show."""
        keep_writes = keep_writes and not torch.is_inference_mode_enabled()  # there nothing counts writes
        before = (looks_of(placeholders), flags_of(placeholders)) if keep_writes else None
        layer = Layer(list(placeholders), flat=flat, before=before, compared=compared)
        self.registration.cover(layer, summoned=False)

    def drop_placeholders(self) -> None:
        """Register what belongs there again; idempotent."""
        layer = self.registration.placeholders
        if layer is not None:
            found = self.registration.uncover(layer)
            if layer.before is not None:
                self._take_changes(layer, found)

    def _take_changes(self, layer: Layer, whole: Sequence[Any]) -> None:
        """Take over what users did to the tensors of ``layer``, in whose places ``whole`` were in the end."""
        assert layer.before is not None
        looks, flags = layer.before
        changed = [index for index, look in enumerate(looks_of(whole)) if look not in (None, looks[index])]
        with torch.no_grad():
            if layer.compared:
                changed = [i for i, tensor in enumerate(whole) if i in changed or self._differs(i, tensor)]
            for index in changed if layer.values is None else ():
                self._check_fits(index, whole[index], layer.tensors[index], cast=True)
                self._write(index, whole[index])
            self.note_writes(changed)
            for index, tensor in enumerate(whole):
                if tensor is not None and tensor.grad is not None:
                    self._take_grad(index, tensor.grad)
        if flags_of(whole) != flags:
            self._take_flags(flags_of(whole))

    def _take_flags(self, flags: Sequence[bool | None]) -> None:
        """Freeze or unfreeze the parameters of the layout, one by one; None leaves one as it is."""
        summoned = self.registration.summoned
        for tensor, flag in zip(summoned.tensors if summoned else [v.param for v in self.visible], flags):
            if flag is not None:
                tensor.requires_grad_(flag)

    # -- copies and changes ------------------------------------------------------------------------------------------

    def announce_copies(self, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        """The modules are about to be copied; ``handle`` is the copy of this one's. Says what to put for what is on
        them."""
        self.registration.announce_copies(handle, memo)

    def follow_shard(self) -> None:
        """The shard is new, or has moved or changed its dtype: so does what rests on the modules."""
        self._values = self.handle.sharded_views(self.handle.shard)
        self.registration.rest(self._resting(self._values))
        self._pointers = memories_of(self._values or ())
        self.registration.use_resting()

    def _resting(self, values: list[torch.Tensor]) -> list[Any]:
        raise AssertionError("each mode has its own")

    @property
    def is_as_left(self) -> bool:
        raise AssertionError("each mode has its own")

    @property
    def flags_are_as_left(self) -> bool:
        """Whether the leaves have the ``requires_grad`` of the parameters that users hold."""
        raise AssertionError("each mode has its own")

    def refresh(self) -> bool:
        """Follow what the user did to the parameters since the last forward; True if some ``requires_grad`` changed.

        Raises:
            RuntimeError, NotImplementedError: see ``take_over``.
        """
        if self.registration.placeholders is not None:  # left there by something that raised
            self.drop_placeholders()
        if self.is_as_left:
            return False
        if self.check_writeback:
            self.take_over()
        return self.follow_flags()

    def follow_flags(self) -> bool:
        """Freeze and unfreeze the leaves as the parameters are that users hold; True if some ``requires_grad``
        changed.

        Raises:
            RuntimeError: parameters that have to be frozen together were not.
        """
        leaves, changed = self.handle.copy.all_leaves, False
        for visible in self.visible:
            flag = visible.param.requires_grad
            for index in visible.members:
                if leaves[index].requires_grad is not flag:
                    self.handle.set_requires_grad(index, flag)
                    changed = True
        if changed:
            wanted = [visible.param.requires_grad for visible in self.visible for _ in visible.members]
            self.handle.flat_param.requires_grad_(any(wanted))
            for tensor, flag in zip(self.registration.resting, wanted):
                tensor.requires_grad_(flag)
        return changed
