"""Checkpoints as directories: written whole or not at all, and verified before they are read.

::

    checkpoints/
      checkpoint_00000003/        one checkpoint
        __0_0.distcp                tensors, as torch.distributed.checkpoint writes them: one file per rank
        tensors_0.json              where which tensor is in it
        tensors.json                on which ranks which tensor is, in a few lines for however many ranks
        extra_0.pt                  what a rank added
        manifest                    size and checksum of each of these files
      .checkpoint_00000004.tmp/   one that is being written, or was when its writer died
      latest                      the name of the newest whole checkpoint, and its manifest's checksum

[Note: What is ours]
A checkpoint is a directory that has such a name and a valid manifest; an unfinished one is a directory that has such a
name and holds files that a save writes. Links with these names are read, but never removed or entered by a removal.
Removing a checkpoint begins by renaming its manifest to ``retired``, so that no half of a checkpoint looks like one.
Then the files with names that a save uses are removed, and the directory if it is empty. Other files stay in it, under
the same name. An empty directory with the name of a checkpoint is what a removal left that died. A removal that failed
is repeated by the next save that removes checkpoints.

[Note: Never torn]
A checkpoint is written under a temporary name. When every file and the directory itself are on the disk, one rename
gives it its own name; then ``latest`` is replaced, by a rename as well. Wherever a writer dies, ``latest`` names a
whole checkpoint: the one before, or the new one. Nothing that it names is written to again.

[Note: No pickle]
Where which tensor lies is in files of JSON. ``torch.distributed.checkpoint`` keeps it in a pickle, which runs whatever
code its author chose.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fsdp.checkpoint.checksums import Advance, Entry, Hash, checksum_of, no_progress, with_path

MANIFEST, LATEST, INDEX, RETIRED = "manifest", "latest", "tensors.json", "retired"
VERSION = 3
_NAME = re.compile(r"checkpoint_(\d{8,})")
_UNFINISHED = re.compile(r"\.checkpoint_(\d{8,})\.tmp")
_PARTS = re.compile(rf"__\d+_\d+\.distcp|extra_\d+\.pt|tensors(_\d+)?\.json|{MANIFEST}|{LATEST}")
_TRIES = 20  # to read what is replaced meanwhile
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # of file systems on which directories are not synced
_MOST_RANKS = 1 << 20  # that a manifest is believed
BLOCK = 1 << 22  # bytes of files that are hashed together


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
        """Sync the names in a directory, where the file system can."""
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
        """A directory with all that is in it."""
        shutil.rmtree(path)

    def remove_file(self, path: Path) -> None:
        """Remove a file or a link, unless it is gone already. Fail if the directory that holds it is a link."""
        try:
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.unlink(path.name, dir_fd=directory)
            finally:
                os.close(directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            error.filename = str(path)
            raise

    def remove_empty(self, path: Path) -> None:
        """A directory, unless there is still something in it, or it is gone already."""
        try:
            path.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


disk = Disk()


def data_name(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"__{rank}_0.distcp"


def is_data(name: str) -> bool:
    """Whether it is such a file."""
    return name.endswith(".distcp")


def part_name(rank: int) -> str:
    """The file that tells what is in it."""
    return f"tensors_{rank}.json"


def extra_name(rank: int) -> str:
    """The file of what a rank added."""
    return f"extra_{rank}.pt"


class _Checked(io.RawIOBase):
    """A file that is being written; counts and hashes what it is given.

    Attributes:
        error: what went wrong first. ``torch.save`` tells of something else then.
    """

    error: BaseException | None = None

    def __init__(self, stream: BinaryIO, advance: Advance) -> None:
        self._stream, self._advance, self.hash = stream, advance, Hash(BLOCK)

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
        self.hash.update(data)
        self._advance(len(data))
        return len(data)

    def tell(self) -> int:
        return self.hash.size


@contextlib.contextmanager
def durable(
    path: Path, entries: dict[str, Entry], advance: Advance = no_progress, blocks: dict[str, list[str]] | None = None
) -> Iterator[io.RawIOBase]:
    """A new file to write into. Afterwards its content is on the disk, and ``entries`` has what it should be, and
    ``blocks`` the checksums of its blocks."""
    with with_path(path), disk.create(path) as stream:
        checked = _Checked(stream, advance)
        try:
            yield checked
        except Exception:
            if checked.error is not None:
                raise checked.error from None
            raise
        disk.sync(stream)
    entries[path.name] = checked.hash.entry()
    if blocks is not None:
        blocks[path.name] = checked.hash.blocks()


def write_durably(path: Path, content: bytes, entries: dict[str, Entry], advance: Advance = no_progress) -> None:
    with durable(path, entries, advance) as stream:
        stream.write(content)


# -- writing -----------------------------------------------------------------------------------------------------------


def begin(root: Path) -> Path:
    """Make an empty directory for the next checkpoint in ``root``, which is made too; no two savers get the same.

    Raises:
        IsADirectoryError: ``latest`` is somebody else's.
    """
    for missing in reversed([path for path in (root, *root.parents) if not path.is_dir()]):
        with contextlib.suppress(FileExistsError):  # another saver was faster, or it is a file, as is seen below
            disk.make_directory(missing)
            disk.sync_directory(missing.parent)
    if (root / LATEST).is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a file that names the latest checkpoint", str(root / LATEST))
    whole = sorted(_numbered(root, _NAME).items(), key=lambda item: -item[1])
    newest = next((number for name, number in whole if _is_checkpoint(root / name)), 0)
    number = 1 + max([newest, *_unfinished(root).values()])
    while True:
        final = root / f"checkpoint_{number:08d}"
        temporary = root / f".{final.name}.tmp"
        number += 1
        if os.path.lexists(final):
            continue
        try:
            disk.make_directory(temporary)
        except FileExistsError:  # another saver was faster
            continue
        if not os.path.lexists(final):
            return temporary
        disk.remove(temporary)  # another saver was faster, and is through


def seal(temporary: Path, entries: dict[str, Entry], ranks: int) -> None:
    """Write what makes a checkpoint of the files in ``temporary``, which are on the disk."""
    content = {"version": VERSION, "ranks": ranks, "files": {name: entries[name] for name in sorted(entries)}}
    text = json.dumps(content, indent=1)
    checksum = checksum_of(text)
    own: dict[str, Entry] = {}
    write_durably(temporary / MANIFEST, f"{checksum}\n{text}\n".encode(), own)
    write_durably(temporary / LATEST, f"{_final(temporary).name} {checksum}\n".encode(), own)
    disk.sync_directory(temporary)


def publish(temporary: Path) -> Path:
    """Make the sealed checkpoint in ``temporary`` the latest.

    Returns:
        where it is.
    """
    root, final = temporary.parent, _final(temporary)
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, "somebody else has made it meanwhile", str(final))
    disk.rename(temporary, final)
    disk.sync_directory(root)
    disk.rename(final / LATEST, root / LATEST)
    disk.sync_directory(root)
    return final


def discard(temporary: Path) -> None:
    """Remove what a save that failed left, unless it is the latest already.

    As far as it can be removed: that would not be the error to tell of, and nothing refers to it.
    """
    root, final = temporary.parent, _final(temporary)
    with contextlib.suppress(OSError):
        if temporary.exists():
            disk.remove(temporary)
            return
        named = (root / LATEST).read_bytes() if (root / LATEST).exists() else b""
        if not named.startswith(f"{final.name} ".encode()) and _is_checkpoint(final):
            disk.remove(final)


Share = list[tuple[Path, list[str]]]  # directories, and names of files in each


def retire(newest: Path, keep: int, ranks: int) -> list[Share]:
    """Turn all but the last ``keep`` checkpoints up to ``newest`` into retired ones. See [Note: What is ours].

    Warns of checkpoints that cannot be retired.

    Returns:
        by rank, the files that it is to remove: of checkpoints that are or were retired, and of saves that died.
    """
    shares: list[Share] = [[] for _ in range(ranks)]
    root, number = newest.parent, _numbered(newest.parent, _NAME)[newest.name]
    older = [name for name, its in _directories(root, _NAME) if its < number]
    whole = [root / name for name in older if _is_checkpoint(root / name)]
    leaving = [root / name for name in older if _is_retired(root / name)]
    leaving += [root / name for name, its in _unfinished(root).items() if its < number]
    for directory in whole[: max(len(whole) + 1 - keep, 0)]:
        try:
            disk.rename(directory / MANIFEST, directory / RETIRED)
            disk.sync_directory(directory)
        except OSError as error:
            _warn_of_older(newest, directory, error)
        else:
            leaving.append(directory)
    for directory in leaving:
        try:
            names = sorted(_own_files(directory))
        except OSError as error:
            _warn_of_older(newest, directory, error)
            continue
        for rank, share in enumerate(shares):
            share.append((directory, names[rank::ranks]))
    return shares


def remove_older(newest: Path, share: Share) -> None:
    """Remove a rank's share of what was retired; the last rank removes the directories. Warns of what it cannot remove,
    after it has tried to remove everything else."""
    for directory, names in share:
        errors = []
        for name in names:
            try:
                disk.remove_file(directory / name)
            except OSError as error:
                errors.append(error)
        try:
            if not _own_files(directory):
                disk.remove_file(directory / RETIRED)
                disk.remove_empty(directory)
        except FileNotFoundError:  # another rank was faster
            pass
        except OSError as error:
            errors.append(error)
        if errors:
            _warn_of_older(newest, directory, errors[0])


def _warn_of_older(newest: Path, older: Path, error: OSError) -> None:
    warnings.warn(f"{newest} is saved, but the older {older} could not be removed: {error}", stacklevel=3)


def _numbered(root: Path, pattern: re.Pattern[str]) -> dict[str, int]:
    return {name: int(match[1]) for name in os.listdir(root) if (match := pattern.fullmatch(name))}


def _directories(root: Path, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """The names that match the pattern, and their numbers, in the order of the numbers. Links to directories are left
    out."""
    with os.scandir(root) as found:
        names = {entry.name for entry in found if entry.is_dir(follow_symlinks=False)}
    numbered = [(name, number) for name, number in _numbered(root, pattern).items() if name in names]
    return sorted(numbered, key=lambda item: item[1])


def _own_files(directory: Path) -> list[str]:
    """The names of files in ``directory`` that a save writes."""
    with os.scandir(directory) as found:
        return [each.name for each in found if _PARTS.fullmatch(each.name) and not each.is_dir(follow_symlinks=False)]


def _unfinished(root: Path) -> dict[str, int]:
    """The directories of saves that are under way or died, and their numbers. Those that this user may not read are
    left out."""
    found = {}
    for name, number in _directories(root, _UNFINISHED):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            if _own_files(root / name) or not os.listdir(root / name):
                found[name] = number
    return found


def _is_checkpoint(path: Path) -> bool:
    return _read_if_valid(path / MANIFEST) is not None


def _is_retired(path: Path) -> bool:
    """Whether a removal of this checkpoint has begun; the last file that it removes is the retired manifest."""
    try:
        empty = not os.listdir(path)
    except OSError:  # this user may not read it, or another saver was faster
        return False
    return empty or _read_if_valid(path / RETIRED) is not None


def _read_if_valid(path: Path) -> Manifest | None:
    try:
        return _read_manifest(path)
    except (OSError, RuntimeError):
        return None


def _final(temporary: Path) -> Path:
    return temporary.parent / temporary.name.removeprefix(".").removesuffix(".tmp")


# -- reading -----------------------------------------------------------------------------------------------------------


class Manifest(NamedTuple):
    """The content of a checkpoint's manifest.

    Attributes:
        ranks: the number of ranks that saved.
        writers: the number of ranks that wrote tensors.
        files: sizes and checksums by name; on a rank that loads, only of the files that it needs.
        checksum: of the manifest itself. It tells checkpoints apart.
    """

    ranks: int
    writers: int
    files: dict[str, Entry]
    checksum: str


def find(path: Path) -> tuple[Path, Manifest]:
    """The directory and manifest of the checkpoint ``path``, or of the latest in ``path``.

    Raises:
        FileNotFoundError: there is none.
        RuntimeError: ``latest`` or the manifest is damaged, with its path.
    """
    if (path / MANIFEST).is_file():
        return path, _read_manifest(path / MANIFEST)
    for _ in range(_TRIES):
        try:
            text = (path / LATEST).read_bytes().decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(
                f"{path} is no checkpoint, for it has no file {MANIFEST!r}, and no directory of checkpoints, for it "
                f"has no file {LATEST!r}: nothing was saved there, or the file is lost"
            ) from error
        try:
            return _named_by(path, text)
        except (OSError, RuntimeError) as error:
            if (path / LATEST).read_bytes().decode(errors="replace") == text:
                raise RuntimeError(str(error)) from error
    raise RuntimeError(f"{path / LATEST} changes faster than the checkpoint that it names can be read")


def _named_by(root: Path, text: str) -> tuple[Path, Manifest]:
    match = re.fullmatch(rf"({_NAME.pattern}) ([0-9a-f]{{64}})\n", text)
    if match is None or not (root / match[1]).is_dir():
        raise RuntimeError(
            f"{root / LATEST} is damaged: it holds {text!r}. The checkpoints beside it can be loaded by their own paths"
        )
    directory = root / match[1]
    manifest = _read_manifest(directory / MANIFEST)
    if manifest.checksum != match[3]:
        raise RuntimeError(
            f"{root / LATEST} and {directory / MANIFEST} do not belong together: one of them was damaged or exchanged. "
            "The checkpoints beside them can be loaded by their own paths"
        )
    return directory, manifest


def _read_manifest(path: Path) -> Manifest:
    """
    Raises:
        RuntimeError: the file is missing or damaged, with its path.
    """
    if not path.is_file():
        raise RuntimeError(f"{path} is missing: the checkpoint is damaged")
    with with_path(path):
        checksum, _, text = path.read_bytes().decode(errors="replace").partition("\n")
    if not text.endswith("\n") or checksum != checksum_of(text[:-1]):
        raise RuntimeError(f"{path} is damaged: its checksum is not that of its content")
    try:
        content = json.loads(text)
        version, ranks = content["version"], int(content["ranks"])
        files = {name: Entry(int(size), str(checksum)) for name, (size, checksum) in content["files"].items()}
        if any(entry.block < 1 or entry.size < 0 for entry in files.values()):
            raise ValueError("a file or a block of a file has no bytes")
        if not 0 < ranks <= _MOST_RANKS:
            raise ValueError(f"{ranks} ranks cannot have saved it")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise RuntimeError(f"{path} is no manifest of this package: {error}") from error
    if version != VERSION:
        raise RuntimeError(f"{path} has version {version}, and this package reads version {VERSION}")
    if strange := [name for name in files if not _PARTS.fullmatch(name)]:
        raise RuntimeError(f"{path} lists {', '.join(map(repr, strange))}, which no save writes")
    if INDEX not in files:
        raise RuntimeError(f"{path} lists no {INDEX}, which every save writes")
    writers = sum(is_data(name) for name in files)
    return Manifest(ranks, writers, files, checksum)


_T = TypeVar("_T")


def read_latest(path: Path, read: Callable[[Path, Manifest], _T], find: Callable[[Path], tuple[Path, Manifest]]) -> _T:
    """``read`` of what ``find`` finds in ``path``; again if another job has replaced it meanwhile, and removed it.

    Raises:
        FileNotFoundError: there is none, and was none when this was called.
        RuntimeError, OSError: what ``find`` and ``read`` raise; a file that is gone is a RuntimeError.
    """
    directory, manifest = find(path)
    for _ in range(_TRIES):
        try:
            return read(directory, manifest)
        except (RuntimeError, FileNotFoundError) as error:
            failed, before = error, directory
            if isinstance(error, FileNotFoundError):
                failed = RuntimeError(f"{directory} was removed while it was read: {error}")
            try:
                directory, manifest = find(path)
            except FileNotFoundError:  # there was one
                raise failed from None
            if directory == before:
                raise failed from error.__cause__
    raise RuntimeError(f"{path}: another job replaces the latest checkpoint faster than it can be read")
