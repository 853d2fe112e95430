"""The safetensors format: a file of tensors that many programs can open, and the class that writes and reads it.

A file holds 8 bytes with the length of the header (little-endian), the header, and the tensors' bytes. The header is
JSON: for each tensor ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}``, and ``"__metadata__"``, which
maps strings to strings. Tensors are row-major and fill the rest of the file without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from fsdp.checkpoint import files

LENGTH = 8  # bytes in front of the header
_ALIGNMENT = 64  # bytes; where the tensors begin

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Entry(NamedTuple):
    """A tensor of a file: ``begin`` and ``end`` are bytes after the header.

    A dtype that the format lacks is written as bytes, with one more dimension for the bytes of an element.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def is_supported(dtype: torch.dtype) -> bool:
    """True if the format has a name for ``dtype``."""
    return dtype in _NAMES


def laid_out(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[Entry]:
    """Return the places of tensors (name, dtype, shape) that follow each other."""
    entries, position = list[Entry](), 0
    for name, dtype, shape in tensors:
        begin, position = position, position + math.prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, tuple(shape), begin, position))
    return entries


def pack_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the start of a file: the length, and the header, padded with spaces."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for name, dtype, shape, begin, end in entries:
        if dtype not in _NAMES:
            dtype, shape = torch.uint8, (*shape, dtype.itemsize)
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-(LENGTH + len(text)) // _ALIGNMENT) * _ALIGNMENT - LENGTH
    return size.to_bytes(LENGTH, "little") + text.ljust(size)


def parse_header(content: bytes, file_size: int) -> tuple[list[Entry], dict[str, str]]:
    """Read what :func:`pack_header` or another program has written; tensors of bytes stay such.

    Raises:
        ArithmeticError, AttributeError, KeyError, TypeError, ValueError: it is no such header, or does not fit the
            file.
    """
    header = json.loads(content[LENGTH:])
    metadata = header.pop("__metadata__", {})
    entries = []
    for name, found in header.items():
        dtype, shape = _DTYPES[found["dtype"]], tuple(map(int, found["shape"]))
        begin, end = map(int, found["data_offsets"])
        if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} of shape {shape} and {dtype} does not have the bytes {begin} to {end}")
        entries.append(Entry(name, dtype, shape, begin, end))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise ValueError(f"{entry.name!r} does not begin where the tensor before it ends")
        position = entry.end
    if len(content) + position != file_size:
        raise ValueError(f"its tensors have {position} bytes, and it has {file_size - len(content)} for them")
    return entries, metadata


def memory_of(flat: torch.Tensor) -> memoryview:
    """View the memory of a dense 1-D tensor on the CPU as bytes."""
    return flat.view(torch.uint8).numpy().data


class SafetensorsFile(ExitStack):
    """An open file, which is written (:meth:`create`, :meth:`write`, :meth:`finish`) or read (:meth:`open`,
    :meth:`parse`, :meth:`read`). Offsets are bytes after the header. Errors of the file system name the file.

    Attributes:
        header: the bytes before the tensors, of the length that they will have if the file is being written.
    """

    def __init__(self, path: Path, stream: BinaryIO, header: bytes = b"", entries: Sequence[Entry] = ()) -> None:
        super().__init__()
        self.path, self.header, self._entries = path, header, entries
        self._stream = self.enter_context(stream)

    # -- writing -------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> SafetensorsFile:
        """Create a file for these tensors."""
        header = pack_header(entries, metadata)
        return cls(path, files.disk.create(path), header, entries)

    def write(self, data: Any, begin: int) -> None:
        """Write bytes of the tensors at ``begin``."""
        with files.with_path(self.path):
            files.disk.write(self._stream, data, len(self.header) + begin)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Write the header, with ``metadata`` of the same length in place of that of ``create``, and sync the file."""
        if metadata is not None:
            self.header = pack_header(self._entries, metadata)
        with files.with_path(self.path):
            files.disk.write(self._stream, self.header, 0)
            files.disk.sync(self._stream)

    # -- reading -------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Open a file, and read the header without parsing it.

        Raises:
            ValueError: no safetensors file begins so.
        """
        with ExitStack() as stack:
            stream = stack.enter_context(files.disk.open(path))
            size = os.fstat(stream.fileno()).st_size
            start = bytearray(min(LENGTH, size))
            files.fill(stream, memoryview(start), 0)
            length = LENGTH + int.from_bytes(start, "little")
            if len(start) < LENGTH or length > size:
                raise ValueError("it does not begin with the length of a header")
            header = bytearray(length)
            files.fill(stream, memoryview(header), 0)
            stack.pop_all()
        return cls(path, stream, bytes(header))

    def parse(self) -> tuple[list[Entry], dict[str, str]]:
        """Return the tensors and the metadata of the header.

        Raises: as :func:`parse_header`.
        """
        return parse_header(self.header, os.fstat(self._stream.fileno()).st_size)

    def read(self, memory: memoryview, begin: int) -> None:
        """Fill ``memory`` with the bytes of the tensors from ``begin`` on.

        Raises:
            RuntimeError: the file has become shorter.
        """
        files.fill(self._stream, memory, len(self.header) + begin)
