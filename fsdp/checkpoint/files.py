"""Checkpoints as directories: published whole or not at all.

``fsdp/checkpoint/README.md`` describes the files. ``.checkpoint_00000004.tmp`` is an unfinished save or removal.

[Note: Ownership of files]
A checkpoint is a directory with such a name and a valid manifest. Hidden directories with the name of an unfinished one
belong to this package, with everything in them. The removal of a checkpoint first renames it to such a name, so that
half a checkpoint is never taken for one, and the next save that removes checkpoints repeats a failed removal. Links to
directories are read, but a removal never enters them.

[Note: Atomic publishing]
A checkpoint is written under a temporary name. When every file and the directory are on the disk, one rename gives it
the final name, and another rename replaces ``latest``. Wherever a writer dies, ``latest`` names a whole checkpoint: the
one before or the new one. Published files are never written to again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fsdp.checkpoint import old_sources
from fsdp.checkpoint.checksums import sha256
from fsdp.comm.user_warnings import warn_user

MANIFEST, LATEST, INDEX = "manifest.json", "latest", "index.json"
FORMAT, VERSION = "fsdp checkpoint", 1
NAME = re.compile(r"checkpoint_(\d{8,})")
UNFINISHED = re.compile(r"\.checkpoint_(\d{8,})\.tmp")
_LATEST = re.compile(rf"({NAME.pattern}) ([0-9a-f]{{64}})\n")
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # from file systems that cannot sync directories

Advance = Callable[[int], object]  # called with the number of bytes that were written or read
FORGED = ArithmeticError, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError
"""Errors of a reader on content that this package has not written."""


class FileRecord(NamedTuple):
    """The size of a file in bytes, and a SHA-256: of the header of a rank's file, else of the whole file."""

    size: int
    checksum: str


def no_progress(nbytes: int) -> None:
    """Show no progress."""


class Disk:
    """The operations of saves and loads on a file system. A power failure may undo an operation that is not synced."""

    def make_directory(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """Open an empty file for writing, without a buffer."""
        return open(path, "wb", buffering=0)

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading, without a buffer."""
        return open(path, "rb", buffering=0)

    def write(self, stream: BinaryIO, data: Any, offset: int) -> None:
        """Write all of ``data`` (bytes) at ``offset``."""
        data = memoryview(data)
        while data:
            nbytes = os.pwrite(stream.fileno(), data, offset)
            data, offset = data[nbytes:], offset + nbytes

    def read(self, number: int, memory: memoryview, offset: int) -> int:
        """Read from the open file ``number`` at ``offset``; return the number of bytes, 0 at the end of the file."""
        return os.preadv(number, [memory], offset)

    def sync(self, stream: BinaryIO) -> None:
        """Bring the content of a file to the disk."""
        os.fsync(stream.fileno())

    def sync_directory(self, path: Path) -> None:
        """Bring the names in a directory to the disk, where the file system supports it."""
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                error.filename = str(path)
                raise
        finally:
            os.close(number)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a directory and its content. Links in it are not followed, and a link as ``path`` is an error."""
        shutil.rmtree(path)


disk = Disk()


def rank_name(rank: int) -> str:
    return f"rank_{rank}.safetensors"


@contextlib.contextmanager
def with_path(path: Path) -> Iterator[None]:
    """Put ``path`` into file system errors that name no file, such as those of reads and writes."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def of_ours(path: Path) -> Iterator[None]:
    """Turn errors about the content of ``path`` into a ``RuntimeError`` with the path."""
    try:
        yield
    except FORGED as error:
        raise RuntimeError(f"{path} is damaged, or was not written by this package: {error}") from error


def fill(stream: BinaryIO, memory: memoryview, offset: int) -> None:
    """Fill ``memory`` with the bytes of a file from ``offset`` on.

    Raises:
        RuntimeError: the file has become shorter.
    """
    with with_path(Path(stream.name)):
        while memory:
            nbytes = disk.read(stream.fileno(), memory, offset)
            if nbytes == 0:
                raise damage(f"{stream.name} ends before its byte {offset}: it has become shorter")
            memory, offset = memory[nbytes:], offset + nbytes


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file; afterwards the content is on the disk."""
    with with_path(path), disk.create(path) as stream:
        disk.write(stream, content, 0)
        disk.sync(stream)


def warn_of_path(here: str, first: str) -> None:
    """Warn if the path that this rank was given, ``here``, is not that of rank 0, which all ranks use. The text "None"
    stands for no path."""
    if here not in (first, "None"):
        warn_user(
            f"the ranks were given different paths of one checkpoint: {first!r} on rank 0, which all ranks use, "
            f"and {here!r} on this rank, which is not used. Pass the same path on all ranks"
        )


# -- writing -----------------------------------------------------------------------------------------------------------


def make_directories(root: Path) -> None:
    """Make ``root``, and the directories around it that are missing."""
    for missing in reversed([path for path in (root, *root.parents) if not path.is_dir()]):
        with contextlib.suppress(FileExistsError):  # another saver was faster; if it is a file, the next step fails
            disk.make_directory(missing)
            disk.sync_directory(missing.parent)


def begin(root: Path) -> Path:
    """Make an empty directory for the next checkpoint in ``root``, and ``root``. No two savers get the same."""
    make_directories(root)
    newest = next((number for number, path in reversed(numbered(root, NAME)) if _is_checkpoint(path)), 0)
    latest = root / LATEST
    if latest.is_dir() or (newest == 0 and latest.exists() and not latest.read_bytes().startswith(b"checkpoint_")):
        text = "expected a file that names the latest checkpoint; move it, or save into another directory"
        raise FileExistsError(errno.EEXIST, text, str(latest))
    number = 1 + max([newest, *(number for number, _ in numbered(root, UNFINISHED))])
    while True:
        final = numbered_path(root, number)
        temporary = temporary_of(final)
        with contextlib.suppress(FileExistsError):  # another saver was faster
            disk.make_directory(temporary)
            if not os.path.lexists(final):
                return temporary
            disk.remove(temporary)  # the final one is of another saver that was faster, or of a user
        number += 1


def manifest(records: Mapping[str, FileRecord], ranks: int) -> bytes:
    """Return the content of the manifest of a checkpoint of now that ``ranks`` ranks have saved in these files."""
    content = {"format": FORMAT, "version": VERSION, "ranks": ranks, "time": time.time()}
    content["files"] = dict(sorted(records.items()))
    return _dumped({"checksum": sha256(_dumped(content)), **content})


def _dumped(content: Mapping[str, Any]) -> bytes:
    """Return JSON with each file of a manifest on a line."""
    files = ",\n".join(f"{json.dumps(name)}:{json.dumps(record)}" for name, record in content["files"].items())
    rest = json.dumps({key: value for key, value in content.items() if key != "files"})
    return f'{rest[:-1]}, "files": {{\n{files}\n}}}}\n'.encode()


def publish(temporary: Path, table: bytes, manifest: bytes) -> Path:
    """Add index and manifest to the files in ``temporary``, which are on the disk, and make them the latest checkpoint.

    Returns:
        the new path.
    """
    root, final = temporary.parent, final_of(temporary)
    latest = f"{final.name} {json.loads(manifest)['checksum']}\n".encode()
    for name, content in ((INDEX, table), (MANIFEST, manifest), (LATEST, latest)):
        write_durably(temporary / name, content)
    disk.sync_directory(temporary)
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "another job has made it meanwhile", str(final))
    disk.rename(temporary, final)
    disk.sync_directory(root)
    disk.rename(final / LATEST, root / LATEST)
    disk.sync_directory(root)
    return final


def discard(temporary: Path) -> None:
    """Remove the files of a failed save, unless they are the latest checkpoint already.

    An error is ignored: the save raises the first error, and no file refers to these files.
    """
    root, final = temporary.parent, final_of(temporary)
    with contextlib.suppress(OSError):
        if temporary.exists():
            disk.remove(temporary)
            return
        named = (root / LATEST).read_bytes() if (root / LATEST).exists() else b""
        if not named.startswith(f"{final.name} ".encode()) and _is_checkpoint(final):
            disk.remove(final)


def remove_older(newest: Path, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints up to ``newest``, and older saves and removals that died.

    Warn of directories that cannot be removed, after the removal of all that can.
    """
    root = newest.parent
    with _as_warning(newest):
        unfinished = _below(root, UNFINISHED, newest)
        older = [*filter(_is_checkpoint, _below(root, NAME, newest))]
        for directory in unfinished:
            with _as_warning(newest):
                disk.remove(directory)
        for directory in older[: max(len(older) + 1 - keep, 0)]:
            with _as_warning(newest):
                disk.rename(directory, leaving := temporary_of(directory))
                disk.sync_directory(root)
                disk.remove(leaving)


@contextlib.contextmanager
def _as_warning(newest: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn_user(f"{newest} is saved, but something older could not be removed: {error}")


def numbered(root: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """List the paths in ``root``, if it exists, with names that match, in the order of their numbers."""
    names = os.listdir(root) if root.is_dir() else ()
    return sorted((int(match[1]), root / name) for name in names if (match := pattern.fullmatch(name)))


def _below(root: Path, pattern: re.Pattern[str], newest: Path) -> list[Path]:
    """List the directories, without links, that match and have a smaller number than ``newest``."""
    limit = int(newest.name.removeprefix("checkpoint_"))
    below = [path for number, path in numbered(root, pattern) if number < limit]
    return [path for path in below if path.is_dir() and not path.is_symlink()]


def _is_checkpoint(path: Path) -> bool:
    with contextlib.suppress(OSError, RuntimeError):
        return bool(read_manifest(path / MANIFEST))
    return False


def numbered_path(root: Path, number: int) -> Path:
    return root / f"checkpoint_{number:08d}"


def temporary_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def final_of(temporary: Path) -> Path:
    return temporary.parent / temporary.name.removeprefix(".").removesuffix(".tmp")


# -- reading -----------------------------------------------------------------------------------------------------------


def damage(problem: str) -> RuntimeError:
    """Return the error for files that differ from what was saved."""
    return RuntimeError(f"the checkpoint is damaged: {problem}")


class MissingFiles(RuntimeError):
    """The error of a checkpoint of which ``names``, files in ``directory``, are not there."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        super().__init__(str(damage(f"{', '.join(str(directory / name) for name in names)} is missing")))
        self.names = names


def check_size(path: Path, record: FileRecord) -> None:
    """Check that a file exists and has the size in the manifest."""
    if not path.is_file():
        raise damage(f"{path} is missing")
    if (size := path.stat().st_size) != record.size:
        raise damage(f"{path} has {size} bytes instead of {record.size}")


def read_verified(path: Path, record: FileRecord) -> bytes:
    """Read a file once, and compare it with the manifest."""
    check_size(path, record)
    with with_path(path):
        content = path.read_bytes()
    if sha256(content) != record.checksum:
        raise damage(f"{path} has another checksum than when it was written")
    return content


def is_ours(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of this package, or a directory of such."""
    return (path / MANIFEST).is_file() or (path / LATEST).is_file()


class Manifest(NamedTuple):
    """The content of a checkpoint's manifest.

    Attributes:
        directory: the checkpoint.
        ranks: the number of ranks that saved.
        time: of the save, in seconds since the epoch by the clock of rank 0; 0.0 if unknown.
        files: sizes and checksums by name.
        checksum: the SHA-256 of the manifest itself, which tells checkpoints apart.
    """

    directory: Path
    ranks: int
    time: float
    files: dict[str, FileRecord]
    checksum: str


def find(path: Path) -> Manifest:
    """Return the manifest of the checkpoint ``path``, or of the latest one in ``path``.

    Raises:
        FileNotFoundError: there is none.
        RuntimeError: ``latest`` or the manifest is damaged, with the path.
    """
    if (path / MANIFEST).is_file():
        return read_manifest(path / MANIFEST)
    with contextlib.suppress(OSError, RuntimeError):
        return _latest(path)
    return _latest(path)  # once more, for another job may have replaced the latest checkpoint meanwhile


def _latest(root: Path) -> Manifest:
    try:
        text = (root / LATEST).read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError) as error:
        if not numbered(root, NAME) and (kind := old_sources.kinds_of(old_sources.find_sources(root))):
            raise FileNotFoundError(
                f"{root} is no checkpoint of this package, but {kind}: convert it by `fsdp convert {root} NEW` or "
                "fsdp.checkpoint.convert(), and load NEW (see Old checkpoints in fsdp/checkpoint/README.md)"
            ) from error
        raise FileNotFoundError(
            f"{root} is no checkpoint, for it has no file {MANIFEST!r}, and no directory of checkpoints, for it "
            f"has no file {LATEST!r}: nothing was saved there, or the file is lost"
        ) from error
    match = _LATEST.fullmatch(text)
    if match is None or not (root / match[1]).is_dir():
        raise RuntimeError(
            f"{root / LATEST} is damaged: it holds {text!r}. The other checkpoints there can be loaded by their paths"
        )
    directory = root / match[1]
    manifest = read_manifest(directory / MANIFEST)
    if manifest.checksum != match[3]:
        raise RuntimeError(
            f"{root / LATEST} and {directory / MANIFEST} do not belong together: one of them was damaged or exchanged. "
            "The checkpoints next to them can be loaded by their own paths"
        )
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read and verify a manifest."""
    try:
        with with_path(path):
            text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise RuntimeError(f"{path} is missing: the checkpoint is damaged") from error
    with of_ours(path):
        content = json.loads(text)
        checksum = str(content.pop("checksum"))
        if text != _dumped({"checksum": checksum, **content}) or checksum != sha256(_dumped(content)):
            raise ValueError("it is damaged, for its checksum is not that of its content")
        files = {name: FileRecord(int(size), str(checksum)) for name, (size, checksum) in content["files"].items()}
        version, ranks, saved = content["version"], len(files) - len([INDEX]), float(content.get("time", 0.0))
    if version != VERSION or content.get("format") != FORMAT:
        raise RuntimeError(f"{path} has version {version}, and this package reads version {VERSION}")
    return Manifest(path.parent, ranks, saved, files, checksum)


_T = TypeVar("_T")


def read_latest(path: Path, read: Callable[[Manifest], _T], find: Callable[[Path], Manifest]) -> _T:
    """Call ``read`` with the checkpoint that ``find`` finds, and once more with the next one if another job has removed
    it meanwhile. A removed file is a RuntimeError; a FileNotFoundError means that there was no checkpoint at the call.
    """
    found = newer = find(path)
    try:
        return _read_whole(read, found)
    except RuntimeError:
        with contextlib.suppress(FileNotFoundError):  # there was one
            newer = find(path)
        if newer.directory == found.directory:
            raise
    return _read_whole(read, newer)


def _read_whole(read: Callable[[Manifest], _T], manifest: Manifest) -> _T:
    try:
        return read(manifest)
    except FileNotFoundError as error:
        raise RuntimeError(f"{manifest.directory} was removed while it was read: {error}") from error
