"""Neighbours in a shard that an optimizer holds as one parameter: what ``fsdp.flat_param_groups`` makes.

[Note: Runs]
A run is some neighbouring original parameters of a bucket, the same ones on every rank, and one ``nn.Parameter`` over
this rank's part of them, gaps between them included. Values need no care: the run and its members view the same shard.
``.grad`` does, since either side's can be set to None, replaced or accumulated by whoever holds it: ``follow`` brings
them in step, wherever the engine is about to read or has written gradients, and before each step of an optimizer. What
is set on one side since then is done to the other. Members' gradients that do not lie one behind the other in one
vector are put into a new one; nearly always they do, as parts of what the unit has reduced.

The bucket has a run for as long as somebody holds its parameter.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp.flat.flat_param import FlatParamHandle, assign_grad, take_over_data
from fsdp.flat.full_copy import point_at
from fsdp.flat.layout import FlatLayout
from fsdp.flat.visible import grad_of


def span(layout: FlatLayout, members: Sequence[int], rank: int) -> tuple[int, int]:
    """From where to where ``members`` of the layout lie in the shard of ``rank``; (0, 0) where none does."""
    pieces = [piece for index in members if (piece := layout.piece(index, rank)).numel]
    return (pieces[0].shard_offset, pieces[-1].shard_offset + pieces[-1].numel) if pieces else (0, 0)


class Run:
    """See [Note: Runs].

    Attributes:
        members: its parameters, by their index in the layout.
        start, end: where they lie in this rank's shard.
        missing: the name of a member that has no gradient where others have; None else.
    """

    def __init__(self, handle: FlatParamHandle, members: range, param: nn.Parameter, home: Runs) -> None:
        """``home`` has it for as long as ``param`` is held."""
        layout, rank = handle.layout, handle.groups.shard_rank
        self._handle, self.members = handle, members
        self.start, self.end = span(layout, members, rank)
        self.missing: str | None = None
        self._pieces = layout.pieces(rank)[members.start : members.stop]
        self._here = [position for position, piece in enumerate(self._pieces) if piece.numel]
        inside = [(max(start, self.start), min(end, self.end)) for start, end in layout.shard_runs(rank)]
        self._solid = [(start - self.start, end - self.start) for start, end in inside if start < end]
        self._trained = param.requires_grad
        self._grad: torch.Tensor | None = None  # as they were when they were in step
        self._grads: list[torch.Tensor | None] = [None] * len(members)
        self._param = weakref.ref(param, functools.partial(_forget, weakref.ref(home), weakref.ref(self)))
        home.append(self)
        self.point()

    @property
    def param(self) -> Any:
        """What optimizers hold."""
        return self._param()

    @property
    def absent(self) -> bool:
        """Whether this rank's shard holds nothing of it."""
        return self.start == self.end

    def __str__(self) -> str:
        names = [self._handle.name_of(index) for index in (self.members[0], self.members[-1])]
        return " to ".join(map(repr, dict.fromkeys(names)))

    # -- values --------------------------------------------------------------------------------------------------------

    def point(self) -> None:
        """The shard is new, or has moved: so does the parameter."""
        point_at([self.param], [self._handle.shard[self.start : self.end]])
        self._pointer = self.param.data_ptr()

    def take_over(self) -> None:
        """Take over the values of what the user has put in the place of the parameter's data."""
        if self.param.data_ptr() != self._pointer and not self.absent:
            shard, name = self._handle.shard[self.start : self.end], f"{self} of {self._handle.unit_name}"
            take_over_data(self.param, shard, name)

    def follow_flags(self, params: Sequence[nn.Parameter]) -> None:
        """Freeze or unfreeze the run with its members, or these with the run. ``params`` are all of the bucket.

        Raises:
            RuntimeError: some were frozen or unfrozen, and others not.
        """
        params = [params[index] for index in self.members]
        flags = [param.requires_grad for param in params]
        if flags.count(self._trained) == len(flags) and self.param.requires_grad is self._trained:
            return
        odd = [self._handle.name_of(i) for i, flag in zip(self.members, flags) if flag is not self._trained]
        if 0 < len(odd) < len(flags):
            raise RuntimeError(
                f"{', '.join(map(repr, odd))} of {self._handle.unit_name} got requires_grad={not self._trained} while "
                f"an optimizer holds it as one parameter with its neighbours ({self}). Freeze or unfreeze these "
                "together; or delete the optimizer, and build one from flat_param_groups() afterwards"
            )
        self._trained = not self._trained
        for param in (self.param, *params):
            param.requires_grad_(self._trained)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def in_step(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether nobody has set its data, or a ``.grad`` of it or its members, since they were brought in step."""
        param: Any = self._param()
        if param.grad is not self._grad or param.data_ptr() != self._pointer or self.missing is not None:
            return False
        grads = map(grad_of, params[self.members.start : self.members.stop])
        return all(map(operator.is_, grads, self._grads))

    def follow(self, params: Sequence[nn.Parameter]) -> None:
        """Bring ``.grad`` and that of the members in step. ``params`` are all of the bucket."""
        params = params[self.members.start : self.members.stop]
        grad, grads = self.param.grad, [param.grad for param in params]
        if grad is self._grad and all(map(operator.is_, grads, self._grads)):
            return
        with torch.no_grad():
            if grad is not self._grad:
                for position, (param, now, before) in enumerate(zip(params, grads, self._grads)):
                    if now is before and (grad is None or position in self._here):
                        assign_grad(param, None if grad is None else self._part(grad, position))
            self._grad = self._joined(params)
            assign_grad(self.param, self._grad)
        self._grads = [param.grad for param in params]

    def _place(self, position: int, grad: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """Where the gradient of a member, or of this rank's part of it, begins in the flat vector, and its strides."""
        record = self._handle.layout.params[self.members[position]]
        if grad.shape == record.shape:
            return record.offset, record.stride
        return record.offset + self._pieces[position].start, (1,)

    def _part(self, grad: torch.Tensor, position: int) -> torch.Tensor:
        """A member's part of a gradient of this rank's part of the run."""
        piece, record = self._pieces[position], self._handle.layout.params[self.members[position]]
        shape, stride = ((piece.numel,), (1,)) if self._handle.groups.sharded else (record.shape, record.stride)
        return grad.as_strided(shape, stride, grad.storage_offset() + piece.shard_offset - self.start)

    def _joined(self, params: Sequence[nn.Parameter]) -> torch.Tensor | None:
        """The members' gradients as one vector, which they are views of afterwards, if they were not. Those of
        ``no_sync`` are of whole parameters, also of what other ranks hold."""
        present = [(param, grad) for param in params if (grad := param.grad) is not None]
        absent = [position for position in self._here if params[position].grad is None]
        self.missing = self._handle.name_of(self.members[absent[0]]) if absent and present else None
        if not present:
            return None
        places = [self._place(position, p.grad) for position, p in enumerate(params) if p.grad is not None]
        first, begin, end = present[0][1], places[0][0], places[-1][0] + present[-1][1].numel()
        homes, in_order = set(), True
        for (_, grad), (start, stride) in zip(present, places):
            homes.add((grad.untyped_storage()._cdata, grad.dtype, start - grad.storage_offset()))
            in_order = in_order and grad.stride() == stride
        if len(homes) == 1 and in_order:
            return first.as_strided((end - begin,), (1,))
        vector = first.new_zeros(end - begin)
        for (param, grad), (start, stride) in zip(present, places):
            assign_grad(param, vector.as_strided(grad.shape, stride, start - begin).copy_(grad))
        return vector

    def grad_parts(self) -> list[torch.Tensor]:
        """Its gradient, if it has one, without the gaps between its members."""
        return [] if self._grad is None else [self._grad[start:end] for start, end in self._solid]


class Runs(list[Run]):
    """The runs of a bucket."""

    def follow(self, params: Sequence[nn.Parameter]) -> None:
        """Bring the gradients of runs and of the bucket's ``params`` in step."""
        for run in self:
            run.follow(params)

    def hold(self, handle: FlatParamHandle, labels: Mapping[int, Any]) -> dict[int, nn.Parameter]:
        """Let neighbours with equal labels, by position, be held as one: what tensor parallelism has cut apart from
        what it has not, and parameters without elements, on any rank, which nobody steps, each by itself. Returns each
        position's; ``follow`` is to be called then.

        Raises:
            ValueError: somebody holds other neighbours as one.
        """
        wholes = [tp or record for tp, record in zip(handle.tp, handle.layout.params)]
        keys = {i: (label, handle.is_cut(i)) for i, label in labels.items() if wholes[i].numel}
        ranges: list[range] = []
        for position in sorted(labels):
            before = ranges[-1] if ranges else range(-1)
            if before.stop == position and position in keys and keys[position] == keys.get(position - 1):
                ranges[-1] = range(before.start, position + 1)
            else:
                ranges.append(range(position, position + 1))
        known = {run.members: run for run in self}
        taken = {index: run for run in self for index in run.members}
        for run in (run for members in ranges if members not in known for i in members if (run := taken.get(i))):
            raise ValueError(
                f"{run}, of {handle.unit_name}, is held as one parameter by an optimizer of flat_param_groups() that "
                "is still there: delete that one first, or pass the same rule, and freeze nothing in between"
            )
        held: dict[int, nn.Parameter] = {}
        for members in ranges:
            one: Any = known[members].param if members in known else None
            if one is None:
                one = nn.Parameter(handle.shard[:0])
                one._fsdp_flattened = True
                one._fsdp_owner = f"a run of {handle.unit_name}"
                Run(handle, members, one, self)
            held.update(dict.fromkeys(members, one))
        return held

    def announce_copies(self, memo: dict[int, Any]) -> None:
        """Says what to put for their parameters in a copy of whoever holds them."""
        for run in self:
            memo[id(run.param)] = nn.Parameter(run.param.detach()[:0], run.param.requires_grad)

    def copy_to(self, copies: Runs, handle: FlatParamHandle, memo: dict[int, Any]) -> None:
        """``copies`` has the same for ``handle``, with the parameters that ``memo`` has."""
        for run in self:
            Run(handle, run.members, memo[id(run.param)], copies)


def _forget(home: weakref.ref[Runs], run: weakref.ref[Run], _: Any) -> None:
    runs, gone = home(), run()
    if runs is not None and gone is not None:
        runs.remove(gone)
