"""Copies of files between the directories of ranks, in blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint import files
from fsdp.checkpoint.safetensors import memory_of
from fsdp.comm.consensus import SLOWEST, Ranks

_BLOCK = 1 << 22  # bytes of a message


class Route(NamedTuple):
    """The way of the file ``name`` from one rank's directory to another's. The ranks are numbers in the group."""

    source: int
    target: int
    name: str


def copy_files(ranks: Ranks, routes: Collection[Route], sizes: Mapping[str, int], directory: Path) -> None:
    """Copy a file along each route; the same routes, in the same order, on all ranks of them.

    A disk's error is raised when all messages of this rank are through, because the other ranks wait for them. A file
    has its name only once it is whole.

    Args:
        sizes: in bytes, by name.
        directory: this rank's.

    Raises:
        OSError, RuntimeError: a file could not be read or written on this rank, or another rank is gone.
    """
    own = [route for route in routes if ranks.rank in route[:2]]
    ranks.connect((route.source, route.target) for route in own)
    tags: Counter[tuple[int, int]] = Counter()
    with ExitStack() as stack:
        copies = []
        for route in own:
            tags[route[:2]] += 1
            copy = Copy(ranks, route, tags[route[:2]], sizes[route.name], directory)
            copies.append(stack.enter_context(copy))
        under_way = copies
        while under_way:
            works = []
            try:
                for copy in under_way:
                    works.append(copy.begin_block())
                for work in works:
                    work.wait(SLOWEST)
            finally:
                works.clear()  # a work that is left in the frame of an error would keep the connection open
            for copy in under_way:
                copy.end_block()
            under_way = [copy for copy in under_way if copy.left]
        for copy in copies:
            copy.finish()


class Copy(ExitStack):
    """One file on its way, on one of the two ranks. The context closes the file.

    Attributes:
        left: bytes that are not through.
    """

    def __init__(self, ranks: Ranks, route: Route, tag: int, nbytes: int, directory: Path) -> None:
        super().__init__()
        self.left, self._offset = nbytes, 0
        self._ranks, self._route, self._tag = ranks, route, tag
        self._sends = route.source == ranks.rank
        self._buffer = torch.empty(min(_BLOCK, nbytes), dtype=torch.uint8, device="cpu")
        self._error: Exception | None = None
        self._path, self._partial = directory / route.name, directory / f".{route.name}.tmp"
        self._try(self._open)

    def _try(self, action: Callable[[], object]) -> None:
        """Run ``action``; after an error nothing more is read or written, and only the messages go on."""
        if self._error is None:
            try:
                with files.with_path(self._path):
                    action()
            except (OSError, RuntimeError) as error:
                self._error = error

    def _open(self) -> None:
        stream = files.disk.open(self._path) if self._sends else files.disk.create(self._partial)
        self._stream = self.enter_context(stream)

    @property
    def _block(self) -> torch.Tensor:
        return self._buffer[: self.left]

    def begin_block(self) -> Any:
        """Begin to send or to receive the next block; return the work."""
        if self._sends:
            self._try(self._read)
        return self._ranks.message(self._route[:2], self._block, self._tag, sends=self._sends)

    def _read(self) -> None:
        memory, offset = memory_of(self._block), self._offset
        while memory:
            nbytes = files.disk.read(self._stream.fileno(), memory, offset)
            if nbytes == 0:
                raise files.damage(f"{self._path} ends before its byte {offset}: it has become shorter")
            memory, offset = memory[nbytes:], offset + nbytes

    def end_block(self) -> None:
        """Note that the block is through."""
        if not self._sends:
            self._try(lambda: files.disk.write(self._stream, memory_of(self._block), self._offset))
        nbytes = self._block.numel()
        self.left, self._offset = self.left - nbytes, self._offset + nbytes

    def finish(self) -> None:
        """Give the file its name, or raise the error of this rank."""
        if not self._sends:
            self._try(self._publish)
        if self._error is not None:
            raise self._error

    def _publish(self) -> None:
        files.disk.sync(self._stream)
        files.disk.rename(self._partial, self._path)
