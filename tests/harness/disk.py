"""A disk that fails, or loses power, at a chosen operation of a checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

from fsdp.checkpoint import files
from fsdp.checkpoint.files import Disk


def on_disk(disk: Disk) -> Any:
    return mock.patch.object(files, "disk", disk)


class Killed(BaseException):
    """The simulated end of the process."""


class FaultyDisk(Disk):
    """A disk that fails at operation number `at`, counted from 0: with `error` once, or from there on if it is
    `lasting`. Without an error it fails for good, as at a power loss.

    A write fails halfway. Data that were not synced are half there; names in directories that were not synced are as
    before, or lost.
    """

    def __init__(self, at: int = -1, error: BaseException | None = None, *, lasting: bool = False) -> None:
        self.at, self.error, self.lasting, self.count = at, error, lasting, 0
        self.unsynced: dict[BinaryIO, Path] = {}
        self.names: list[tuple[Path, Any]] = []  # the directory, and the function that makes the rename durable

    def _step(self, path: Path | None = None) -> None:
        number, self.count = self.count, self.count + 1
        if number < self.at or self.at < 0:
            return
        if self.error is None:
            raise Killed
        if number == self.at or self.lasting:
            if isinstance(self.error, OSError):
                self.error.filename = self.error.filename or path
            raise self.error

    def lose_power(self, names: str) -> None:
        for stream, path in self.unsynced.items():
            stream.close()
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        undone = [undo for _, undo in self.names]
        if names == "a rename lost":  # file systems may keep later operations
            undone = [undo for undo in undone if undo.__name__ == "rename_back"][:1]
        for undo in reversed(undone) if names != "names kept" else ():
            undo()

    def make_directory(self, path: Path) -> None:
        self._step(path)
        super().make_directory(path)
        self.names.append((path.parent, lambda: shutil.rmtree(path)))

    def create(self, path: Path) -> BinaryIO:
        self._step(path)
        stream = super().create(path)
        self.unsynced[stream] = path
        self.names.append((path.parent, path.unlink))
        return stream

    def write(self, stream: BinaryIO, data: Any, offset: int) -> None:
        if self.count == self.at:
            super().write(stream, data[: len(data) // 2], offset)
        self._step()
        super().write(stream, data, offset)

    def sync(self, stream: BinaryIO) -> None:
        self._step()
        super().sync(stream)
        del self.unsynced[stream]

    def sync_directory(self, path: Path) -> None:
        self._step(path)
        super().sync_directory(path)
        self.names = [(directory, undo) for directory, undo in self.names if directory != path]

    def rename(self, old: Path, new: Path) -> None:
        self._step(old)
        replaced = new.read_bytes() if new.is_file() else None
        super().rename(old, new)
        self.names = [(new / d.relative_to(old) if d.is_relative_to(old) else d, undo) for d, undo in self.names]

        def rename_back() -> None:
            os.replace(new, old)
            if replaced is not None:
                new.write_bytes(replaced)

        self.names.append((new.parent, rename_back))
        for stream, path in self.unsynced.items():
            if path.is_relative_to(old):
                self.unsynced[stream] = new / path.relative_to(old)

    def remove(self, path: Path) -> None:
        self._step(path)
        super().remove(path)
