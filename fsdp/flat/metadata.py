"""What a wrapped model looks like from outside: every unit, its buckets, and where each parameter lies in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    flat_param: nn.Parameter = field(repr=False)
    params: tuple[nn.Parameter, ...] = field(repr=False)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """For each entry of ``layout.params``, the half-open range of it that this rank owns and where it lies in the
        shard."""
        return self.layout.pieces(self.rank)


@dataclass(frozen=True)
class UnitInfo:
    """One unit.

    Attributes:
        name: the path of its module in the model asked about, without wrapper parts ("" for the model); of several
            modules, the paths of all, with ", " between them.
        path: what the layouts' names are relative to: the same, but for several modules that around all of them.
        shares_memory: whether the ranks of its shard group communicate through memory that they share; they decide when
            they first communicate.
    """

    name: str
    path: str
    buckets: tuple[BucketInfo, ...]
    shares_memory: bool = False

    def full_name(self, record: ParamRecord) -> str:
        """A parameter's name in the model asked about."""
        return f"{self.path}.{record.name}" if self.path else record.name


class ShardParamInfo(NamedTuple):
    """What a rank's shard has of a parameter, as FSDP1 tells it. ``intra_param_end_idx`` is the last element's; where
    there is none, all but ``in_shard`` are None."""

    in_shard: bool
    offset_in_shard: int | None = None
    numel_in_shard: int | None = None
    intra_param_start_idx: int | None = None
    intra_param_end_idx: int | None = None


class ParamInfo(NamedTuple):
    """Where a parameter is registered, as FSDP1 tells it: ``module.<param_name>``, a module that is ``module_name`` in
    its unit."""

    param_name: str
    module: nn.Module | None
    module_name: str


class ParamInfos(Sequence[ParamInfo]):
    """One per parameter of a flat one, which must not keep its modules alive."""

    def __init__(self, places: Iterable[tuple[nn.Module, str, str]]) -> None:
        """``places``: of each its module, its attribute there, and its name in the unit."""
        self._places = [(weakref.ref(module), attribute, name) for module, attribute, name in places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        module, attribute, name = self._places[index]
        return ParamInfo(attribute, module(), name[: -len(attribute)].removesuffix("."))

    def __reduce__(self) -> Any:
        return list, ([info._replace(module=None) for info in self],)


def for_tools(layout: FlatLayout, rank: int) -> dict[str, Any]:
    """What tools read of a flat parameter, by FSDP1's names; all sizes in elements."""
    known = layout.once(("for tools", rank), lambda: _for_tools(layout, rank))
    return {**known, **{name: list(value) for name, value in known.items() if isinstance(value, list)}}


def _for_tools(layout: FlatLayout, rank: int) -> dict[str, Any]:
    spans = [(record.offset, record.end, False) for record in layout.params]
    spans += [(start, end, True) for start, end in layout.gaps if start < layout.numel]
    spans.sort()  # by place, and told whether it is padding
    start, stop = (min(bound, layout.numel) for bound in layout.shard_range(rank))
    return {
        "_fqns": [record.name for record in layout.params],
        "_num_params": len(layout.params),
        "_shapes": tuple(torch.Size(record.shape) for record in layout.params),
        "_strides": tuple(tuple(record.stride) for record in layout.params),
        "_numels": tuple(record.numel for record in layout.params),
        "_numels_with_padding": tuple(end - start for start, end, _ in spans),
        "_is_padding_mask": [is_padding for *_, is_padding in spans],
        "_unpadded_unsharded_size": torch.Size([layout.numel]),
        "_padded_unsharded_size": torch.Size([layout.padded_numel]),
        "_sharded_size": torch.Size([layout.shard_numel]),
        "_shard_numel_padded": layout.shard_numel - (stop - start),
        "_shard_param_infos": tuple(
            ShardParamInfo(True, piece.shard_offset, piece.numel, piece.start, piece.end - 1)
            if piece.numel
            else ShardParamInfo(False)
            for piece in layout.pieces(rank)
        ),
    }
