"""What a wrapped model looks like from outside: every unit, its buckets, and where each parameter lies in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp.flat.layout import FlatLayout, ParamRecord, Piece


@dataclass(frozen=True)
class BucketInfo:
    """The parameters of a unit that share a dtype and were all trainable, or all frozen, when it was wrapped.

    Attributes:
        layout: names (relative to the unit), shapes, strides, offsets, padding and every rank's ranges.
        rank: this process's rank in the shard group; ``layout.world_size`` is the group's size.
        flat_param: 1-D, ``layout.shard_numel`` elements: this rank's shard, padding included.
        params: what users and optimizers hold: with ``use_orig_params=True`` one ``nn.Parameter`` per entry of
            ``layout.params``, else the flat parameter alone.
    """

    layout: FlatLayout
    rank: int
    flat_param: nn.Parameter
    params: tuple[nn.Parameter, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """For each entry of ``layout.params``, the half-open range of it that this rank owns and where it lies in the
        shard."""
        return self.layout.pieces(self.rank)


@dataclass(frozen=True)
class UnitInfo:
    """One unit. ``name`` is the path of its module in the model asked about, without wrapper parts ("" for the
    model)."""

    name: str
    buckets: tuple[BucketInfo, ...]

    def full_name(self, record: ParamRecord) -> str:
        """A parameter's name in the model asked about."""
        return f"{self.name}.{record.name}" if self.name else record.name


def full_values(layout: FlatLayout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each parameter of ``layout`` (by its name in the unit) as a view of ``flat`` (``layout.numel`` or more
    elements)."""
    start = flat.storage_offset()
    return {p.name: flat.as_strided(p.shape, p.stride, start + p.offset) for p in layout.params}
