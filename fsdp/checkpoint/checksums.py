"""Sizes and checksums of files: made while they are written, and compared before or while they are read.

[Note: Blocks]
A file is hashed in blocks, so that whoever needs a part of it can verify that part while reading it. The checksum of a
file of several blocks is that of their checksums, with the size of a block in front: ``4194304:<SHA-256>``. Checksums
of blocks are in the index of the rank that wrote the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Advance = Callable[[int], object]  # of so many more bytes that are written or read
_PIECE = 1 << 18  # bytes that are hashed as soon as they are read, while the processor's cache has them


def no_progress(nbytes: int) -> None:
    """Nobody wants to know."""


@contextlib.contextmanager
def with_path(path: Path) -> Iterator[None]:
    """Put ``path`` into errors of the file system that name no file, as those of reads and writes."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def checksum_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Entry(NamedTuple):
    """What the manifest says of one file: its size in bytes and its SHA-256 in hexadecimal; see [Note: Blocks]."""

    size: int
    checksum: str

    @property
    def block(self) -> int:
        """How many bytes are hashed together."""
        return int(self.checksum.rpartition(":")[0] or max(self.size, 1))


class Hash:
    """The checksums of consecutive bytes, one per block."""

    def __init__(self, block: int) -> None:
        self.size = 0
        self._block, self._done, self._open = block, list[str](), hashlib.sha256()

    def update(self, data: memoryview) -> None:
        while data:
            room = self._block - self.size % self._block
            self._open.update(data[:room])
            self.size += len(data[:room])
            if len(data) >= room:
                self._done.append(self._open.hexdigest())
                self._open = hashlib.sha256()
            data = data[room:]

    def blocks(self) -> list[str]:
        whole = self.size > 0 and self.size % self._block == 0
        return self._done if whole else [*self._done, self._open.hexdigest()]

    def entry(self) -> Entry:
        return Entry(self.size, self.checksum(self.blocks(), self._block))

    @staticmethod
    def checksum(blocks: list[str], block: int) -> str:
        """Of a file of these."""
        return blocks[0] if len(blocks) == 1 else f"{block}:{checksum_of(''.join(blocks))}"


class Verified(io.RawIOBase):
    """A file that is being read, of which each block is compared with its checksum before a read of it returns.

    What is read from its beginning to its end, in parts that may begin with their ends, is read once.
    """

    def __init__(self, path: Path, entry: Entry, blocks: list[str]) -> None:
        """
        Raises:
            RuntimeError: it is missing, or of another size; or ``blocks`` are not those of the file.
        """
        self._path, self._entry, self._blocks, self._position = path, entry, blocks, 0
        self._kept: dict[int, memoryview] = {}  # the last blocks, by number
        if Hash.checksum(blocks, entry.block) != entry.checksum:
            raise _damage([f"the checksums of the blocks of {path} are not those that the manifest stands for"])
        if (problem := _wrong_size(path, entry)) is not None:
            raise _damage([problem])
        self._stream = path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._entry.size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        into = into[: max(self._entry.size - self._position, 0)]
        nbytes = len(into)
        while into:
            number, begin = divmod(self._position, self._entry.block)
            size = min(self._entry.block, self._entry.size - number * self._entry.block)
            if begin == 0 and len(into) > size and number not in self._kept:  # not by way of other memory
                part = self._fill(into[:size], number)
            else:
                part = self._read(number, size)[begin : begin + len(into)]
                into[: len(part)] = part
            into, self._position = into[len(part) :], self._position + len(part)
        return nbytes

    def _read(self, number: int, size: int) -> memoryview:
        if number not in self._kept:
            memory = memoryview(b"")
            if len(self._kept) > 1:
                memory = self._kept.pop(min(self._kept))  # who reads the end first comes to it again
            self._kept[number] = self._fill(memory if len(memory) == size else memoryview(bytearray(size)), number)
        return self._kept[number]

    def _fill(self, block: memoryview, number: int) -> memoryview:
        found, rest = hashlib.sha256(), block
        with with_path(self._path):
            self._stream.seek(number * self._entry.block)
            while rest and (nbytes := self._stream.readinto(rest[:_PIECE])):
                found.update(rest[:nbytes])
                rest = rest[nbytes:]
        if found.hexdigest() != self._blocks[number]:
            raise _damage([_other_checksum(self._path)])
        return block


def verify(directory: Path, files: dict[str, Entry], advance: Advance = no_progress) -> None:
    """
    Raises:
        RuntimeError: files are not what was written, with the path and what is wrong with each.
    """
    problems = [
        problem for name, entry in files.items() if (problem := _problem(directory / name, entry, advance)) is not None
    ]
    if problems:
        raise _damage(problems)


def _damage(problems: list[str]) -> RuntimeError:
    return RuntimeError("the checkpoint is damaged, and nothing was loaded: " + "; ".join(problems))


def _wrong_size(path: Path, entry: Entry) -> str | None:
    if not path.exists():
        return f"{path} is missing"
    size = path.stat().st_size
    return f"{path} has {size} bytes instead of {entry.size}" if size != entry.size else None


def read_verified(path: Path, entry: Entry) -> bytes:
    """Read a file once, and return the bytes that were compared with the checksum.

    Raises:
        RuntimeError: as ``verify``.
    """
    if (problem := _wrong_size(path, entry)) is not None:
        raise _damage([problem])
    with with_path(path):
        content = path.read_bytes()
    found = Hash(entry.block)
    found.update(memoryview(content))
    if found.entry() != entry:
        raise _damage([_other_checksum(path)])
    return content


def _problem(path: Path, entry: Entry, advance: Advance) -> str | None:
    if (problem := _wrong_size(path, entry)) is not None:
        return problem
    found, block = Hash(entry.block), memoryview(bytearray(1 << 20))
    with with_path(path), open(path, "rb", buffering=0) as stream:
        while nbytes := stream.readinto(block):
            found.update(block[:nbytes])
            advance(nbytes)
    return None if found.entry() == entry else _other_checksum(path)


def _other_checksum(path: Path) -> str:
    return f"{path} has another checksum than when it was written"
