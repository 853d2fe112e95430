"""Checkpoints as directories: written whole or not at all, and verified before they are read.

::

    checkpoints/
      00000003/            one checkpoint
        __0_0.distcp         tensors, as torch.distributed.checkpoint writes them: one file per rank
        .metadata            where which tensor is in them
        extra_0.pt           what a rank added
        manifest             size and checksum of each of these files
      .00000004.tmp/       one that is being written, or was when its writer died
      latest               the name of the newest whole checkpoint, and its manifest's checksum

[Note: Never torn]
A checkpoint is written under a temporary name. When every file and the directory itself are on the disk, one rename
gives it its own name; then ``latest`` is replaced, by a rename as well. Wherever a writer dies, ``latest`` names a
whole checkpoint: the one before, or the new one. Nothing that it names is written to again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MANIFEST, LATEST = "manifest", "latest"
_VERSION = 1
_WHOLE, _UNFINISHED = re.compile(r"\d{8}"), re.compile(r"\.\d{8}\.tmp")


class Disk:
    """All that a save does to a file system. What a method did may be lost with the power until it is synced."""

    def make_directory(self, path: Path) -> None:
        """
        Raises:
            FileExistsError: it is there.
        """
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        return open(path, "wb")

    def write(self, stream: BinaryIO, data: Any) -> int:
        return stream.write(data)

    def sync(self, stream: BinaryIO) -> None:
        stream.flush()
        os.fsync(stream.fileno())

    def sync_directory(self, path: Path) -> None:
        """The names in it."""
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """A directory with all that is in it."""
        shutil.rmtree(path)


disk = Disk()

Told = Callable[[int], object]  # of so many more bytes that are written or read


def nobody(nbytes: int) -> None:
    """Nobody wants to know."""


class Entry(NamedTuple):
    """What the manifest says of one file: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    checksum: str


class _Checked(io.RawIOBase):
    """A file that is being written; counts and hashes what it is given.

    Attributes:
        error: what went wrong first. ``torch.save`` tells of something else then.
    """

    error: BaseException | None = None

    def __init__(self, stream: BinaryIO, told: Told) -> None:
        self._stream, self._told, self._size, self._hash = stream, told, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if self.error is not None:
            raise self.error
        try:
            disk.write(self._stream, data)
        except BaseException as error:
            self.error = error
            raise
        self._hash.update(data)
        self._size += len(data)
        self._told(len(data))
        return len(data)

    def tell(self) -> int:
        return self._size

    def entry(self) -> Entry:
        return Entry(self._size, self._hash.hexdigest())


@contextlib.contextmanager
def durable(path: Path, entries: dict[str, Entry], told: Told = nobody) -> Iterator[io.RawIOBase]:
    """A new file to write into. Afterwards its content is on the disk, and ``entries`` has what it should be."""
    with disk.create(path) as stream:
        checked = _Checked(stream, told)
        try:
            yield checked
        except Exception:
            if checked.error is not None:
                raise checked.error from None
            raise
        disk.sync(stream)
    entries[path.name] = checked.entry()


def write_durably(path: Path, content: bytes, entries: dict[str, Entry], told: Told = nobody) -> None:
    with durable(path, entries, told) as stream:
        stream.write(content)


# -- writing -----------------------------------------------------------------------------------------------------------


def begin(root: Path) -> Path:
    """Make an empty directory for the next checkpoint in ``root``, which is made too; no two savers get the same."""
    for missing in reversed([path for path in (root, *root.parents) if not path.is_dir()]):
        with contextlib.suppress(FileExistsError):  # another saver was faster, or it is a file, as is seen below
            disk.make_directory(missing)
            disk.sync_directory(missing.parent)
    number = 1 + max([0, *_numbered(root).values()])
    while True:
        temporary = root / f".{number:08d}.tmp"
        try:
            disk.make_directory(temporary)
        except FileExistsError:  # another saver was faster
            number += 1
            continue
        if not (root / f"{number:08d}").exists():
            return temporary
        disk.remove(temporary)  # another saver was faster, and is through
        number += 1


def publish(temporary: Path, entries: dict[str, Entry], ranks: int, keep: int | None) -> Path:
    """Make the checkpoint in ``temporary`` the latest, and remove all but the last ``keep``. Its files are on the disk.

    Returns:
        where it is.
    """
    root, final = temporary.parent, temporary.parent / temporary.name[1:9]
    content = {"version": _VERSION, "ranks": ranks, "files": {name: entries[name] for name in sorted(entries)}}
    text = json.dumps(content, indent=1)
    checksum = _checksum(text)
    own: dict[str, Entry] = {}
    write_durably(temporary / MANIFEST, f"{checksum}\n{text}\n".encode(), own)
    write_durably(temporary / LATEST, f"{final.name} {checksum}\n".encode(), own)
    disk.sync_directory(temporary)
    disk.rename(temporary, final)
    disk.sync_directory(root)
    disk.rename(final / LATEST, root / LATEST)
    disk.sync_directory(root)
    if keep is not None:
        _remove_older(final, keep)
    return final


def discard(temporary: Path) -> None:
    """Remove what a save that failed left, unless it is the latest already.

    As far as it can be removed: that would not be the error to tell of, and nothing refers to it.
    """
    root, name = temporary.parent, temporary.name[1:9]
    with contextlib.suppress(OSError):
        if not (root / LATEST).exists() or (root / LATEST).read_bytes()[:8] != name.encode():
            for path in (temporary, root / name):
                if path.exists():
                    disk.remove(path)


def _remove_older(newest: Path, keep: int) -> None:
    """All but the last ``keep`` checkpoints up to ``newest``, and what older saves left when they died."""
    root = newest.parent
    older = [name for name, number in _numbered(root).items() if number < int(newest.name)]
    whole = sorted(name for name in older if _WHOLE.fullmatch(name))
    removed = [name for name in older if name not in whole] + whole[: max(len(whole) + 1 - keep, 0)]
    for name in removed:
        try:
            if name in whole:  # so that no half of it looks like a checkpoint
                disk.rename(root / name, root / f".{name}.tmp")
                name = f".{name}.tmp"
            disk.remove(root / name)
        except OSError as error:
            warnings.warn(f"{newest} is saved, but the older {root / name} could not be removed: {error}", stacklevel=2)


def _numbered(root: Path) -> dict[str, int]:
    """The names of checkpoints in ``root``, unfinished ones too, and their numbers."""
    names = [name for name in os.listdir(root) if _WHOLE.fullmatch(name) or _UNFINISHED.fullmatch(name)]
    return {name: int(name.removeprefix(".").removesuffix(".tmp")) for name in names}


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- reading -----------------------------------------------------------------------------------------------------------


class Manifest(NamedTuple):
    """What a checkpoint consists of: ``ranks`` is how many saved it, ``files`` what is in its directory."""

    ranks: int
    files: dict[str, Entry]


def find(path: Path) -> tuple[Path, Manifest]:
    """The directory and manifest of the checkpoint ``path``, or of the latest in ``path``.

    Raises:
        FileNotFoundError: there is none.
        RuntimeError: ``latest`` or the manifest is damaged, with its path.
    """
    if (path / MANIFEST).exists():
        return path, _read_manifest(path)[0]
    if not (path / LATEST).exists():
        raise FileNotFoundError(
            f"{path} is no checkpoint, for it has no file {MANIFEST!r}, and no directory of checkpoints, for it has no "
            f"file {LATEST!r}: nothing was saved there, or the file is lost"
        )
    text = (path / LATEST).read_bytes().decode(errors="replace")
    match = re.fullmatch(r"(\d{8}) ([0-9a-f]{64})\n", text)
    if match is None or not (path / match[1]).is_dir():
        raise RuntimeError(
            f"{path / LATEST} is damaged: it holds {text!r}. The checkpoints beside it can be loaded by their own paths"
        )
    directory = path / match[1]
    manifest, checksum = _read_manifest(directory)
    if checksum != match[2]:
        raise RuntimeError(
            f"{path / LATEST} and {directory / MANIFEST} do not belong together: one of them was damaged or exchanged. "
            "The checkpoints beside them can be loaded by their own paths"
        )
    return directory, manifest


def _read_manifest(directory: Path) -> tuple[Manifest, str]:
    path = directory / MANIFEST
    if not path.exists():
        raise RuntimeError(f"{path} is missing: the checkpoint is damaged")
    checksum, _, text = path.read_bytes().decode(errors="replace").partition("\n")
    if not text.endswith("\n") or checksum != _checksum(text[:-1]):
        raise RuntimeError(f"{path} is damaged: its checksum is not that of its content")
    content = json.loads(text)
    if content["version"] != _VERSION:
        raise RuntimeError(f"{path} has version {content['version']}, and this package reads version {_VERSION}")
    return Manifest(content["ranks"], {name: Entry(*entry) for name, entry in content["files"].items()}), checksum


def verify(directory: Path, files: dict[str, Entry], told: Told = nobody) -> None:
    """
    Raises:
        RuntimeError: files are not what was written, with the path and what is wrong with each.
    """
    problems = [
        problem for name, entry in files.items() if (problem := _problem(directory / name, entry, told)) is not None
    ]
    if problems:
        raise RuntimeError("the checkpoint is damaged, and nothing was loaded: " + "; ".join(problems))


def _problem(path: Path, entry: Entry, told: Told) -> str | None:
    if not path.exists():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry.size:
        return f"{path} has {size} bytes instead of {entry.size}"
    found, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as stream:
        while nbytes := stream.readinto(block):
            found.update(block[:nbytes])
            told(nbytes)
    return None if found.hexdigest() == entry.checksum else f"{path} has another checksum than when it was written"
