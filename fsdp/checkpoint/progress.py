"""A bar for what takes long: on one rank, on a terminal, and only if it does take long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm

DELAY = 3.0  # seconds before a bar appears


@contextlib.contextmanager
def bar(words: str, nbytes: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Inside, what to call for bytes that are done, of ``nbytes`` in all."""
    hidden = None if shown else True  # None: unless it is no terminal
    with tqdm(
        desc=words,
        total=nbytes,
        unit="B",
        unit_scale=True,
        delay=DELAY,
        disable=hidden,
        leave=False,
        dynamic_ncols=True,
    ) as shows:

        def told(more: int) -> None:
            shows.update(more)

        yield told
