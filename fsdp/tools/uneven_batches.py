"""Training loops in which some ranks have more batches than others: ``fsdp.join()``.

DDP's ``model.join()`` is a context around the loop: a rank whose loop is over answers the reductions of active ranks,
and gets their model at the end. With sharding no other rank has a copy of its shards. A rank without batches has to
step the optimizer by gradients that active ranks reduce to local shards, and to clip, schedule and accumulate like
them. A context cannot do that. So here the loop itself continues: on stand-ins for batches, whose gradients do not
count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from fsdp.comm.collectives import gather_values
from fsdp.comm.consensus import all_gather_object
from fsdp.comm.lane.issuing import REDUCE
from fsdp.names.ddp import JOIN_REMEDY
from fsdp.runtime import build
from fsdp.runtime.nested import tensors_in, to_device
from fsdp.runtime.undo import undone_by
from fsdp.runtime.unit import Unit, units_of

_Batch = TypeVar("_Batch")
_NOTHING: Any = object()  # in place of a batch


@dataclass(eq=False, repr=False)
class UnevenBatches(Generic[_Batch]):
    """The batches of one rank, followed by stand-ins; see :func:`join`.

    Attributes:
        active: the latest batch is one of this rank's own, not a stand-in.
        num_active: the number of ranks with a batch of their own in this step.
    """

    _model: nn.Module
    _batches: Iterable[_Batch]
    _divides_by_all: bool
    active: bool = field(default=True, init=False)
    num_active: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[_Batch]:
        own, latest = iter(self._batches), _NOTHING
        while True:
            batch = next(own, _NOTHING)
            self.active = batch is not _NOTHING
            if self.active:
                latest = batch
            latest, size = self._meet(latest)
            if not self.num_active:
                return
            weight = 0.0 if not self.active else 1.0 if self._divides_by_all else size / self.num_active
            yield from self._weighted(latest, weight)

    def _meet(self, latest: Any) -> tuple[Any, int]:
        """Count the ranks with a batch. Return a batch and the number of ranks; the batch is ``latest``, or another
        rank's if this rank never had any."""
        context = build.join(_first_unit(self._model))
        root, size, lacking = context.root, 1, int(latest is _NOTHING)
        self.num_active = int(self.active)
        with context.calling("join(): the next batch", often=True, gathers=False):
            for group in root.groups_for(REDUCE):
                context.passes.announce(group)
                counts = torch.tensor([self.num_active, size, lacking])
                every = gather_values(counts, group, root.device, "agree on the next batch")
                self.num_active, size, lacking = (int(total) for total in every.sum(dim=0))
                if lacking and self.num_active:
                    latest = _from_another(latest, every[:, 0], group, root.device)
        return latest, size

    def _weighted(self, batch: Any, weight: float) -> Iterator[Any]:
        """Yield ``batch``, whose gradients count ``weight`` times. With weight zero, restore the buffers afterwards."""
        before = {} if weight else {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        units = units_of(self._model)

        def undo() -> None:
            for unit in units:
                unit.set_weight(1.0)
            for name, buffer in self._model.named_buffers() if before else ():
                if name in before:
                    with torch.no_grad():
                        buffer.copy_(before[name])

        with undone_by(undo):
            for unit in units:
                unit.set_weight(weight)
            yield batch


def _from_another(latest: Any, active: torch.Tensor, group: Any, device: torch.device) -> Any:
    """Return ``latest``, or, if there is none, the batch of the first rank of ``group`` that is ``active``."""
    first = int(active.nonzero()[0])
    sends = group.rank() == first
    on_device = sends and any(tensor.device.type != "cpu" for tensor in tensors_in(latest))
    message = (to_device(latest, torch.device("cpu")), on_device) if sends else None
    batch, on_device = all_gather_object(message, group, "send a batch to stand in", device)[first]
    if latest is not _NOTHING:
        return latest
    return to_device(batch, device) if on_device else batch


def _first_unit(model: nn.Module) -> Unit:
    units = units_of(model)
    if not units:
        raise ValueError(f"join() needs a model with FullyShardedDataParallel in it, got {type(model).__name__}")
    return units[0]


def join(
    model: nn.Module, batches: Iterable[_Batch] | None = None, divide_by_initial_world_size: bool = True
) -> UnevenBatches[_Batch]:
    """Iterate over ``batches``, on every rank for as many steps as the rank with the most batches has.

    For training with uneven inputs, in place of DDP's ``with model.join():``. ::

        for batch in fsdp.join(model, loader):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    A rank that has run out of batches gets the last one again, as a stand-in. Gradients of stand-ins count as zeros for
    the parameters of ``model``, whether they are reduced in this step or accumulated. The model's buffers are restored
    after the step. The loop itself has to treat stand-ins otherwise: the result's ``active`` is False for them (a mean
    of losses should leave them out), and ``num_active`` is the number of ranks with a batch of their own. Gradients of
    parameters that no unit manages are not changed. A rank that never had a batch gets one from another rank, by
    pickle.

    The ranks exchange a few bytes per step. Their hosts wait for each other then, but not for accelerators.

    Args:
        model: a wrapped model, or a module with wrapped models in it, which communicate over the ranks of the first.
        batches: any iterable, which may be empty; it is iterated anew with each loop.
        divide_by_initial_world_size: True: divide the sum of the gradients by the number of ranks; False: by the number
            of ranks that have a batch of their own in this step.

    Returns:
        an iterable with the attributes ``active`` and ``num_active``.

    Raises:
        TypeError: ``batches`` is missing, or is not iterable.
        ValueError: no module in ``model`` is wrapped.
    """
    if batches is None or not isinstance(batches, Iterable):
        raise TypeError(f"join() takes the loop's batches, got {type(batches).__name__}. {JOIN_REMEDY}")
    _first_unit(model)
    return UnevenBatches(model, batches, divide_by_initial_world_size)
