"""The file of one rank: tensors and values, written in one pass, and read by blocks straight to their destinations.

A file is a safetensors file (:mod:`fsdp.checkpoint.safetensors`). A tensor of the checkpoint lies in it as one or more
boxes. ``fsdp/checkpoint/README.md`` describes the metadata in the header. The manifest has the SHA-256 of the header,
and the header has the checksums of the data, so both are verified.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint import files, safetensors, values
from fsdp.checkpoint.checksums import BLOCK, DIGITS, block_checksum, sha256
from fsdp.checkpoint.files import Advance, FileRecord, no_progress
from fsdp.checkpoint.safetensors import SafetensorsFile, memory_of
from fsdp.placement.boxes import Box, Part, rectangles

_WIDEST = 16  # bytes of the largest element
_STAGED = 1 << 25  # bytes that are copied from an accelerator at a time


class Piece(NamedTuple):
    """A box of the tensor ``key``, of which ``values`` are the elements. ``shape`` is that of the tensor."""

    key: str
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor


# -- writing -----------------------------------------------------------------------------------------------------------


def pack(key: str, value: Any, remedy: str, *, trusted: bool) -> tuple[Any, list[Piece]]:
    """Return a value as JSON can hold it, and the pieces of the tensors in it; see :func:`values.pack`."""
    content, tensors = values.pack(value, key, remedy, trusted=trusted)
    return content, [Piece(f"{key}#{number}", t.shape, Box.whole(t.shape), t) for number, t in enumerate(tensors)]


def write(path: Path, pieces: Iterable[Piece], packed: Mapping[str, Any], advance: Advance = no_progress) -> FileRecord:
    """Write the file of this rank, of pieces and packed values; afterwards it is on the disk.

    Each block is checked and written from the tensors' own memory. Blocks that hold several tensors are copied together
    first.
    """

    def alignment(piece: Piece) -> int:
        return _WIDEST if piece.values.nbytes % _WIDEST == 0 else piece.values.dtype.itemsize

    # every element begins at a multiple of its size, because sizes that are no multiple of the widest come last
    ordered = sorted(pieces, key=alignment, reverse=True)
    entries, boxes, dtypes = _laid_out(ordered)
    nbytes = entries[-1].end if entries else 0
    metadata = {"format": "pt", "fsdp.version": str(files.VERSION), "fsdp.block": str(BLOCK)}
    for name, content in {"boxes": boxes, "dtypes": dtypes, "values": packed}.items():
        metadata[f"fsdp.{name}"] = json.dumps(content, separators=(",", ":"))
    metadata["fsdp.checksums"] = "0" * DIGITS * -(-nbytes // BLOCK)  # the length alone is known
    with SafetensorsFile.create(path, entries, metadata) as file:
        checksums, position = list[str](), 0
        for block in _blocks(ordered):
            checksums.append(block_checksum(block))
            file.write(block, position)
            position += len(block)
            advance(len(block))
        file.finish({**metadata, "fsdp.checksums": "".join(checksums)})
        return FileRecord(len(file.header) + nbytes, sha256(file.header))


def _laid_out(pieces: Iterable[Piece]) -> tuple[list[safetensors.Entry], dict[str, Any], dict[str, str]]:
    """Return the tensors of the file, the boxes of those that are parts, and the dtypes of those stored as bytes."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    boxes: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for key, shape, box, tensor in pieces:
        name = key
        if box != Box.whole(shape):
            name = f"{key}[{','.join(f'{start}:{start + size}' for start, size in zip(*box))}]"
        while name in kinds or name == "__metadata__":
            name += "'"
        if name != key:
            boxes[name] = [key, box.offsets]
        if not safetensors.is_supported(tensor.dtype):
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        kinds[name] = tensor.dtype, box.sizes
    return safetensors.laid_out((name, *kind) for name, kind in kinds.items()), boxes, dtypes


def _blocks(pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """Cut the bytes of the pieces into blocks; a block is valid until the next one."""
    buffer, filled = memoryview(bytearray(BLOCK)), 0
    for piece in pieces:
        for chunk in _chunks(piece.values):
            while chunk:
                if filled == 0 and len(chunk) >= BLOCK:
                    yield chunk[:BLOCK]
                    chunk = chunk[BLOCK:]
                    continue
                size = min(BLOCK - filled, len(chunk))
                buffer[filled : filled + size] = chunk[:size]
                chunk, filled = chunk[size:], filled + size
                if filled == BLOCK:
                    yield buffer
                    filled = 0
    if filled:
        yield buffer[:filled]


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Return the bytes of a tensor in row-major order: the tensor's memory, or copies of parts from an accelerator."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        yield memory_of(flat)
        return
    for part in flat.split(_STAGED):
        yield memory_of(part.cpu())


# -- reading -----------------------------------------------------------------------------------------------------------


class StoredPiece(NamedTuple):
    """A box of a tensor, from byte ``begin`` of the data on."""

    box: Box
    dtype: torch.dtype
    begin: int


class PieceRead:
    """The way of elements from a stored box to a destination.

    Attributes:
        begin, end: the range of the data's bytes that holds all of the elements.
        nbytes: the bytes of the elements alone.
    """

    def __init__(self, stored: StoredPiece, box: Box, target: torch.Tensor) -> None:
        """``box`` lies in the stored one, and ``target``, of the same shape, is the destination of the elements."""
        self._stored, self._box, self._target = stored, box, target
        first = last = 0
        for outer, size, offset, inner in zip(stored.box.offsets, stored.box.sizes, *box):
            first = first * size + offset - outer
            last = last * size + offset - outer + inner - 1
        self._itemsize = stored.dtype.itemsize
        self.nbytes = box.numel * self._itemsize
        self.begin = stored.begin + first * self._itemsize
        self.end = stored.begin + (last + 1) * self._itemsize
        in_order = last + 1 - first == box.numel and target.is_contiguous()
        self._flat = target.view(-1) if in_order else None

    @cached_property
    def memory(self) -> memoryview | None:
        """The destination as bytes, if the file has the same bytes; else None."""
        flat = self._flat
        if flat is None or flat.dtype != self._stored.dtype or flat.device.type != "cpu":
            return None
        return memory_of(flat)

    def put(self, block: torch.Tensor, begin: int) -> None:
        """PieceRead the elements that are in ``block``, bytes of the data from ``begin`` on."""
        first, last = max(self.begin, begin), min(self.end, begin + block.numel())
        elements = block[first - begin : last - begin].view(self._stored.dtype)
        if self._flat is not None:
            at = (first - self.begin) // self._itemsize
            self._flat[at : at + elements.numel()].copy_(elements)
            return
        at, position = (first - self._stored.begin) // self._itemsize, 0
        for inner in rectangles(self._stored.box.sizes, at, at + elements.numel()):
            box = inner.shifted(self._stored.box.offsets)
            values, position = elements[position : position + box.numel].view(box.sizes), position + box.numel
            if (both := box.overlap(self._box)) is not None:
                self._box.cut(both, self._target).copy_(box.cut(both, values))


class RankFile:
    """A rank's file that is being read. Each block is verified before a read returns.

    Attributes:
        packed: the values by key, without their tensors.
    """

    def __init__(self, path: Path, record: FileRecord, stack: ExitStack) -> None:
        """Open the file, which ``stack`` closes, and verify the header."""
        self.path = path
        files.check_size(path, record)
        with files.of_ours(path):
            self._file = stack.enter_context(SafetensorsFile.open(path))
            if sha256(self._file.header) != record.checksum:
                raise ValueError("it has another header than when it was written")
            entries, metadata = self._file.parse()
            boxes, dtypes = json.loads(metadata["fsdp.boxes"]), json.loads(metadata["fsdp.dtypes"])
            self.packed: dict[str, Any] = json.loads(metadata["fsdp.values"])
            self._checksums, self._block = metadata["fsdp.checksums"], int(metadata["fsdp.block"])
            self._size = record.size - len(self._file.header)
            self._stored: dict[str, list[StoredPiece]] = defaultdict(list)
            for name, dtype, shape, begin, _ in entries:
                if name in dtypes:
                    dtype, shape = values.torch_dtype(dtypes[name]), shape[:-1]
                key, offsets = boxes.get(name, (name, (0,) * len(shape)))
                self._stored[key].append(StoredPiece(Box(tuple(offsets), shape), dtype, begin))

    def value(self, key: str, *, trusted: bool) -> Any:
        """Read a value; see :func:`fsdp.checkpoint.values.unpack`."""
        with files.of_ours(self.path):
            return values.unpack(self.packed[key], key, lambda number: self._tensor(f"{key}#{number}"), trusted=trusted)

    def _tensor(self, key: str) -> torch.Tensor:
        (stored,) = self._stored[key]
        tensor = torch.empty(stored.box.sizes, dtype=stored.dtype, device="cpu")
        self.read(self.find({key: [(stored.box, tensor)]})[0])
        return tensor

    def find(self, targets: Mapping[str, Sequence[Part]]) -> tuple[list[PieceRead], dict[str, list[Box]]]:
        """Find the elements of ``targets`` that are in this file.

        Args:
            targets: by key, destinations and the boxes that they are: of any device and dtype, in any memory order.

        Returns:
            copies for ``read``, and the boxes found, by key.
        """
        copies, found = list[PieceRead](), defaultdict[str, list[Box]](list)
        for key, parts in targets.items():
            for stored in self._stored.get(key, ()):
                for box, memory in parts:
                    if (both := stored.box.overlap(box)) is not None:
                        copies.append(PieceRead(stored, both, box.cut(both, memory)))
                        found[key].append(both)
        return sorted(copies, key=lambda copy: copy.begin), found

    def verify(self) -> None:
        """Compare the checksums of all blocks."""
        scratch = torch.empty(min(self._block, self._size), dtype=torch.uint8, device="cpu")
        for number, begin in enumerate(range(0, self._size, self._block)):
            self._read_block(number, begin, min(begin + self._block, self._size), [], scratch)

    def read(self, copies: Iterable[PieceRead], advance: Advance = no_progress, *, verify_only: bool = False) -> None:
        """Read blocks, compare their checksums, and copy from them; with ``verify_only`` without writes."""
        waiting = deque(copies)
        scratch = torch.empty(min(self._block, self._size), dtype=torch.uint8, device="cpu")
        open_copies: list[PieceRead] = []
        number = 0
        while waiting or open_copies:
            if not open_copies:
                number = waiting[0].begin // self._block
            begin = number * self._block
            end = min(begin + self._block, self._size)
            while waiting and waiting[0].begin < end:
                open_copies.append(waiting.popleft())
            self._read_block(number, begin, end, [] if verify_only else open_copies, scratch)
            advance(end - begin)
            open_copies = [copy for copy in open_copies if copy.end > end]
            number += 1

    def _read_block(self, number: int, begin: int, end: int, copies: list[PieceRead], scratch: torch.Tensor) -> None:
        """Read one block: into a destination that takes all of it, or into ``scratch``, and from there."""
        direct = next((copy for copy in copies if copy.begin <= begin and copy.end >= end and copy.memory), None)
        if direct is not None and direct.memory is not None:
            block = direct.memory[begin - direct.begin : end - direct.begin]
        else:
            block = memory_of(scratch)[: end - begin]
        for tries_left in (2, 1, 0):  # a disk, or a network before it, may fail once
            try:
                self._file.read(block, begin)
                if block_checksum(block) != self._checksums[number * DIGITS : (number + 1) * DIGITS]:
                    raise files.damage(f"{self.path} has another checksum than when it was written")
                break
            except (OSError, RuntimeError):
                if not tries_left:
                    raise
        others = [copy for copy in copies if copy is not direct]
        if others:
            source = scratch[: end - begin] if direct is None else torch.frombuffer(block, dtype=torch.uint8)
            for copy in others:
                copy.put(source, begin)
