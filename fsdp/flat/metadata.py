"""Descriptions of a wrapped model: units, buckets and the offset of each parameter, for users and for FSDP1's tools."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp.flat.layout import FlatLayout, ParamRecord, Piece


@dataclass(frozen=True)
class BucketInfo:
    """The parameters of a unit that share a dtype and were all trainable, or all frozen, at wrapping.

    Attributes:
        layout: names (relative to the unit), shapes, strides, offsets, padding and every rank's ranges.
        rank: this process's rank in the shard group; ``layout.world_size`` is the group's size.
        flat_param: 1-D, ``layout.shard_numel`` elements: this rank's shard, padding included.
        params: the parameters that users and optimizers hold: with ``use_orig_params=True`` one per entry of
            ``layout.params``, else the flat parameter alone.
    """

    layout: FlatLayout
    rank: int
    flat_param: nn.Parameter = field(repr=False)
    params: tuple[nn.Parameter, ...] = field(repr=False)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The half-open range of each entry of ``layout.params`` that this rank owns, with the offset in the shard."""
        return self.layout.pieces(self.rank)


@dataclass(frozen=True)
class UnitInfo:
    """One unit.

    Attributes:
        name: the path of the unit's module in the described model, without wrapper parts ("" for the model). The paths
            of several modules are joined by ", ".
        path: the path that the names in the layouts are relative to: of the module, or of the module around several.
        shares_memory: whether the ranks of the shard group communicate through shared memory, which they decide at the
            first collective.
    """

    name: str
    path: str
    buckets: tuple[BucketInfo, ...]
    shares_memory: bool = False

    def full_name(self, record: ParamRecord) -> str:
        """Return the name of a parameter in the described model."""
        return f"{self.path}.{record.name}" if self.path else record.name


class ShardParamInfo(NamedTuple):
    """The part of a parameter in a rank's shard, in FSDP1's form. ``intra_param_end_idx`` is the index of the last
    element. Without elements, all fields but ``in_shard`` are None."""

    in_shard: bool
    offset_in_shard: int | None = None
    numel_in_shard: int | None = None
    intra_param_start_idx: int | None = None
    intra_param_end_idx: int | None = None


class ParamInfo(NamedTuple):
    """The registration of a parameter, in FSDP1's form: ``module.<param_name>``. ``module_name`` is the path of the
    module in the unit."""

    param_name: str
    module: nn.Module | None
    module_name: str


class SharedParamInfo(NamedTuple):
    """Another registration of a shared parameter, and the first one, in FSDP1's form."""

    param_name: str
    module: nn.Module | None
    module_name: str
    prim_param_name: str
    prim_module: nn.Module | None
    prim_module_name: str


class Infos(Sequence[Any]):
    """The :class:`ParamInfo` of each parameter, or the :class:`SharedParamInfo` of each other registration, without
    references that keep modules alive."""

    def __init__(self, kind: Callable[..., Any], sites: Iterable[Sequence[Any]]) -> None:
        """Each info is about one or two sites, with ``module``, ``attribute`` and ``name`` in the unit."""
        self._kind = kind
        self._sites = [[(weakref.ref(site.module), site.attribute, site.name) for site in each] for each in sites]

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return self._info(index, lambda module: module())

    def __reduce__(self) -> Any:
        return list, ([self._info(index, lambda module: None) for index in range(len(self))],)

    def _info(self, index: int, module_of: Callable[[Any], nn.Module | None]) -> Any:
        fields = [
            (attribute, module_of(module), name.removesuffix(attribute).removesuffix("."))
            for module, attribute, name in self._sites[index]
        ]
        return self._kind(*itertools.chain(*fields))


def for_tools(layout: FlatLayout, rank: int) -> dict[str, Any]:
    """Return the attributes of a flat parameter that tools read, by FSDP1's names; all sizes in elements."""
    known = layout.once(("for tools", rank), lambda: _for_tools(layout, rank))
    return {**known, **{name: list(value) for name, value in known.items() if isinstance(value, list)}}


def _for_tools(layout: FlatLayout, rank: int) -> dict[str, Any]:
    spans = [(record.offset, record.end, False) for record in layout.params]
    spans += [(start, end, True) for start, end in layout.gaps if start < layout.numel]
    spans.sort()  # by offset
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
