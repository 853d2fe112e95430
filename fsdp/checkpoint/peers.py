"""Copies of files between the directories of ranks, in blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def copy_files(ranks: Ranks, routes: Sequence[Route], sizes: Mapping[str, int], directory: Path) -> None:
    """Copy a file along each route; the same routes, in the same order, on all ranks.

    A disk's error is raised when all messages of this rank are through, because the other ranks wait for them. A file
    has its name only once it is whole.

    Args:
        sizes: in bytes, by name.
        directory: this rank's.

    Raises:
        OSError, RuntimeError: a file could not be read or written on this rank, or another rank is gone.
    """
    side = ranks.side
    if side is None:  # one process has no routes
        return
    own = {route: tag for tag, route in enumerate(routes) if ranks.rank in route[:2]}
    buffers = {route: torch.empty(min(_BLOCK, sizes[route.name]), dtype=torch.uint8, device="cpu") for route in own}
    streams: dict[Route, Any] = {}
    errors: list[Exception] = []

    def attempt(route: Route, action: Callable[..., object], *args: Any) -> None:
        """Run ``action`` for the file of ``route``. After an error of any file only the messages go on."""
        if not errors:
            try:
                with files.with_path(directory / route.name):
                    action(*args)
            except (OSError, RuntimeError) as error:
                errors.append(error)

    def incomplete(route: Route) -> Path:
        return directory / f".{route.name}.tmp"

    def begin(route: Route) -> None:
        if route.source == ranks.rank:
            stream = files.disk.open(directory / route.name)
        else:
            files.make_directories(directory)
            stream = files.disk.create(incomplete(route))
        streams[route] = stack.enter_context(stream)

    def publish(route: Route) -> None:
        files.disk.sync(streams[route])
        files.disk.rename(incomplete(route), directory / route.name)

    side.connect_pairs(route[:2] for route in own)
    with ExitStack() as stack:
        for route in own:
            attempt(route, begin, route)
        for offset in range(0, max((sizes[route.name] for route in own), default=0), _BLOCK):
            lengths = {route: sizes[route.name] - offset for route in own}
            blocks = {route: buffers[route][:length] for route, length in lengths.items() if length > 0}
            works = []
            try:
                for route, block in blocks.items():
                    sends = route.source == ranks.rank
                    if sends:
                        attempt(route, files.fill, streams.get(route), memory_of(block), offset)
                    works.append(side.message(route[:2], block, own[route], sends=sends))
                for work in works:
                    work.wait(SLOWEST)
            finally:
                works.clear()  # a work that is left in the frame of an error would keep the connection open
            for route, block in blocks.items():
                if route.target == ranks.rank:
                    attempt(route, files.disk.write, streams.get(route), memory_of(block), offset)
        for route in own:
            if route.target == ranks.rank:
                attempt(route, publish, route)
    if errors:
        raise errors[0]
