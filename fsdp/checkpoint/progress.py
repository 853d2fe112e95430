"""A progress bar for long saves and loads, on the terminal of one rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

from fsdp.checkpoint.files import Advance, no_progress

DELAY = 3.0  # seconds before a bar appears


@contextlib.contextmanager
def bar(words: str, nbytes: int, shown: bool) -> Iterator[Advance]:
    """Yield a function to call with the number of bytes that were written or read, of ``nbytes`` in all."""
    if not (shown and sys.stderr is not None and sys.stderr.isatty()):
        yield no_progress  # and no tqdm, which makes locks for all processes
        return
    with tqdm(desc=words, total=nbytes, unit="B", unit_scale=True, delay=DELAY, leave=False) as shows:
        yield shows.update
