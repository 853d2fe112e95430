"""Where which tensor of a checkpoint lies: on which ranks, and at which place in their files.

``tensors_3.json`` tells what rank 3 has written, and where in its file of tensors it begins. ``tensors.json`` tells of
all tensors together what they are, and by which ranks' files they can be found.

[Note: Runs of ranks]
Neither a plan nor an index holds an entry for each tensor on each rank: at thousands of ranks no process could. Of each
tensor a rank has a *span*, from its first to its last element in memory order. Consecutive ranks mostly have spans of
one length, one after the other: these are one :class:`Run`, so that a tensor has some three of them, over however many
ranks it is sharded. Ranks describe what they have, the runs are joined on the way to rank 0, and a reader looks into
the files of those ranks alone whose spans meet what it needs. A span may have gaps (columns of a matrix), so that it
says where to look, and the rank's own file what is there.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fsdp.checkpoint.checksums import Entry
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.placement.boxes import Box, memory_order


class Run(NamedTuple):
    """The ranks ``rank`` to ``rank + ranks``, which have spans of a tensor: the first of them from element ``start`` to
    ``end`` (half-open), each other ``step`` elements behind the one before. Each has ``numel`` elements."""

    rank: int
    ranks: int
    start: int
    end: int
    step: int
    numel: int

    def with_next(self, other: Run) -> Run | None:
        """This and ``other`` as one, if they are one."""
        step = self.step if self.ranks > 1 else other.start - self.start
        alike = (self.end - self.start, self.numel) == (other.end - other.start, other.numel)
        follows = self.rank + self.ranks == other.rank and self.start + self.ranks * step == other.start
        if not (alike and follows and step > 0 and (other.ranks == 1 or other.step == step)):
            return None
        return self._replace(ranks=self.ranks + other.ranks, step=step)

    def meeting(self, start: int, end: int) -> Iterable[int]:
        """The ranks that may have some of the elements ``start`` to ``end``."""
        if start >= end:
            return ()
        first, last = 0, self.ranks - 1
        if self.step > 0:
            first, last = max(0, -((self.end - start - 1) // self.step)), min(last, (end - 1 - self.start) // self.step)
        elif self.end <= start or end <= self.start:
            return ()
        return range(self.rank + first, self.rank + last + 1)


class Saved(NamedTuple):
    """A tensor, or where ``dtype`` is empty any other value. ``order`` are the dimensions in memory order."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    runs: tuple[Run, ...]

    def span(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """From the first element of a box to its last, half-open."""
        if 0 in sizes:
            return 0, 0
        first = last = 0
        for dim in self.order:
            first = first * self.shape[dim] + offsets[dim]
            last = last * self.shape[dim] + offsets[dim] + sizes[dim] - 1
        return first, last + 1

    def holders(self, boxes: Iterable[Box]) -> set[int]:
        """The ranks whose files may have elements of ``boxes``."""
        return {rank for box in boxes for span in [self.span(*box)] for run in self.runs for rank in run.meeting(*span)}


Table = dict[str, Saved]  # by key


# -- what is about to be written ---------------------------------------------------------------------------------------


def described(items: Iterable[WriteItem], state: Mapping[str, Any], rank: int) -> Table:
    """What this rank has: of each tensor one run of one rank."""
    table: Table = {}
    for item in items:
        key, data = item.index.fqn, item.tensor_data
        if data is None:
            table[key] = Saved("", (), (), (Run(rank, 1, 0, 1, 0, 1),))
            continue
        shape, value = tuple(data.size), state[key]
        stride = value.stride() if isinstance(value, RaggedTensor) else None
        dtype = str(data.properties.dtype).removeprefix("torch.")
        saved = table.get(key) or Saved(dtype, shape, tuple(memory_order(shape, stride)), ())
        start, end = saved.span(data.chunk.offsets, data.chunk.sizes)
        numel = math.prod(data.chunk.sizes)
        for run in saved.runs:  # another box of the same rank's
            start, end, numel = min(start, run.start), max(end, run.end), numel + run.numel
        table[key] = saved._replace(runs=(Run(rank, 1, start, end, 0, numel),))
    return table


def joined(tables: Sequence[Table]) -> Table:
    """What several ranks have, in rank order.

    Raises:
        ValueError: they do not agree on what a tensor is.
    """
    result: Table = dict(tables[0])
    for table in tables[1:]:
        for key, saved in table.items():
            known = result.setdefault(key, saved)
            if known is saved:
                continue
            if known[:3] != saved[:3]:
                what = [f"{its.dtype or 'no tensor'} of shape {its.shape}" for its in (known, saved)]
                ranks = f"rank {known.runs[0].rank} and {what[1]} on rank {saved.runs[0].rank}"
                raise ValueError(f"{key!r} is {what[0]} on {ranks}: all ranks have to save the same tensor")
            both = known.runs[-1].with_next(saved.runs[0])
            runs = (*known.runs, *saved.runs) if both is None else (*known.runs[:-1], both, *saved.runs[1:])
            result[key] = known._replace(runs=runs)
    return result


def settled(table: Table) -> tuple[Table, dict[str, tuple[Run, ...]]]:
    """The table without what several ranks have, but for one of them, and of the tensors concerned who keeps what.

    Raises:
        ValueError: elements of a tensor are on no rank.
    """
    kept: dict[str, tuple[Run, ...]] = {}
    for key, saved in table.items():
        whole = math.prod(saved.shape)
        found = sum(run.ranks * run.numel for run in saved.runs)
        if found != whole or (whole == 0 and sum(run.ranks for run in saved.runs) > 1):
            kept[key] = _once(saved.runs, whole, zlib.crc32(key.encode()))
            found = sum(run.ranks * run.numel for run in kept[key])
        if found != whole:
            raise ValueError(f"{key!r} has {whole} elements, and the ranks together have {found} of them")
    return {key: saved._replace(runs=kept.get(key, saved.runs)) for key, saved in table.items()}, kept


def _once(runs: Sequence[Run], numel: int, number: int) -> tuple[Run, ...]:
    """Of the ranks that have the same span one each, for other tensors (other ``number``) another one."""

    def chosen(runs: Iterable[Run]) -> list[Run]:
        alike: dict[tuple[int, ...], list[Run]] = {}
        for run in runs:
            alike.setdefault(run[1:], []).append(run)
        return sorted(its[number % len(its)] for its in alike.values())

    found = chosen(runs)
    if sum(run.ranks * run.numel for run in found) == numel > 0:
        return tuple(found)
    singles = [
        Run(run.rank + i, 1, run.start + i * run.step, run.end + i * run.step, 0, run.numel)
        for run in runs
        for i in range(run.ranks)
    ]
    result: list[Run] = []
    for run in chosen(singles):
        both = result[-1].with_next(run) if result else None
        result[-1:] = [both] if both is not None else [*result[-1:], run]
    return tuple(result)


def has(runs: Iterable[Run], rank: int) -> bool:
    return any(run.rank <= rank < run.rank + run.ranks for run in runs)


def packed_table(table: Table) -> bytes:
    """The content of ``tensors.json``: ``{key: [dtype, shape, order, runs]}``."""
    return json.dumps(table, separators=(",", ":")).encode()


def packed_part(items: Iterable[WriteItem], results: Iterable[WriteResult], blocks: Mapping[str, list[str]]) -> bytes:
    """The content of a rank's file: ``{"tensors": {key: {"dtype", "shape", "chunks": [[offsets, sizes, *place]]}},
    "values": {key: place}, "blocks": {file: [checksum, ...]}}``; a place is a file, an offset and a length in bytes."""
    places = {result.index: result.storage_data for result in results}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for item in items:
        key, data = item.index.fqn, item.tensor_data
        info = places[item.index]
        place = [info.relative_path, info.offset, info.length]
        if data is None:
            values[key] = place
            continue
        dtype = str(data.properties.dtype).removeprefix("torch.")
        what = tensors.setdefault(key, {"dtype": dtype, "shape": [*data.size], "chunks": []})
        what["chunks"].append([[*data.chunk.offsets], [*data.chunk.sizes], *place])
    return json.dumps({"tensors": tensors, "values": values, "blocks": blocks}, separators=(",", ":")).encode()


# -- what was written --------------------------------------------------------------------------------------------------


def unpacked_table(content: bytes, ranks: int, writers: int) -> Table:
    """Read ``tensors.json``.

    Args:
        ranks: the number of ranks that saved, by the manifest.
        writers: the number of them that have files of tensors. No run is longer, so that a forged one costs no time.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: it is not what :func:`packed_table` makes.
    """
    table: Table = {}
    for key, (dtype, shape, order, runs) in json.loads(content).items():
        saved = table[key] = Saved(dtype, _sizes(shape), tuple(map(int, order)), tuple(map(_run, runs)))
        if sorted(saved.order) != [*range(len(saved.shape))]:
            raise ValueError(f"{order} are not the dimensions of a tensor of shape {shape}")
        for run in saved.runs:
            if not 0 < run.ranks <= writers or run.rank + run.ranks > ranks:
                raise ValueError(f"{key!r} is on {run.ranks} ranks from {run.rank}, and {writers} of {ranks} wrote")
    return table


def _run(given: Sequence[Any]) -> Run:
    run = Run(*map(int, given))
    if not all(0 <= number < 1 << 62 for number in run):
        raise ValueError(f"{given} are no ranks and elements")
    return run


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    """Check that these are sizes or offsets, all together no more than a tensor can have."""
    sizes = tuple(map(int, given))
    if any(size < 0 for size in sizes) or math.prod(size for size in sizes if size) >= 1 << 62:
        raise ValueError(f"{given} are no sizes of a tensor")
    return sizes


def metadata_of(table: Table) -> Metadata:
    """What is in the checkpoint, without where."""
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    for key, saved in table.items():
        metadata.state_dict_metadata[key] = _tensor(saved.dtype, saved.shape) if saved.dtype else BytesStorageMetadata()
    return metadata


def unpack_part(content: bytes, into: Metadata, files: Mapping[str, Entry]) -> dict[str, list[str]]:
    """Add the content of a rank's file to ``into``.

    Returns:
        the checksums of the blocks of files of tensors.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: it is not what :func:`packed_part` makes, or
            refers to files that are not among ``files``, or to bytes that they do not have.
    """
    its = json.loads(content)
    for key, what in its["tensors"].items():
        shape = _sizes(what["shape"])
        known = into.state_dict_metadata.setdefault(key, _tensor(what["dtype"], shape))
        if not isinstance(known, TensorStorageMetadata):
            raise TypeError(f"{key!r} is no tensor")
        for offsets, sizes, *place in what["chunks"]:
            ends = [offset + size for offset, size in zip(offsets, _sizes(sizes), strict=True)]
            if min(offsets, default=0) < 0 or any(end > size for end, size in zip(ends, shape, strict=True)):
                raise ValueError(f"{key!r} of shape {shape} has no part at {offsets} of sizes {sizes}")
            known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            into.storage_data[MetadataIndex(key, known.chunks[-1].offsets)] = _info(place, files)
    for key, place in its["values"].items():
        into.storage_data[MetadataIndex(key)] = _info(place, files)
        into.state_dict_metadata[key] = BytesStorageMetadata()
    blocks: dict[str, list[str]] = its["blocks"]
    if any(not isinstance(checksum, str) for several in blocks.values() for checksum in several):
        raise TypeError("checksums of blocks are no strings")
    return blocks


def _tensor(dtype: str, shape: Sequence[int]) -> TensorStorageMetadata:
    its = getattr(torch, dtype)
    if not isinstance(its, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    return TensorStorageMetadata(TensorProperties(its), torch.Size(shape), [])


def _info(place: Any, files: Mapping[str, Entry]) -> _StorageInfo:
    file, offset, length = place
    if file not in files:
        raise ValueError(f"it refers to {file!r}, which the manifest does not list")
    if not 0 <= offset <= offset + length <= files[file].size:
        raise ValueError(f"it refers to the bytes {offset} to {offset + length} of {file!r}, which has fewer")
    return _StorageInfo(str(file), int(offset), int(length))
