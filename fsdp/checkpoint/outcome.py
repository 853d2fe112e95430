"""What becomes of a save in the background."""

from __future__ import annotations

import atexit
import warnings
from concurrent.futures import Future
from pathlib import Path


class Outcome(Future[Path]):
    """The new checkpoint's directory, or an error that somebody will be told of: whoever asks, or else the next save,
    or else whoever reads what the process says at its exit."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self.set_running_or_notify_cancel()
        atexit.register(self._tell)
        self.add_done_callback(self._need_not_tell)

    def result(self, timeout: float | None = None) -> Path:
        try:
            return super().result(timeout)
        finally:
            self._is_asked()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._is_asked()

    def unasked(self) -> BaseException | None:
        """The error that nobody has asked for, if there is one. Waits until the save has ended."""
        error = super().exception()
        return None if self._asked else error

    def _is_asked(self) -> None:
        if self.done():
            self._asked = True
            atexit.unregister(self._tell)

    def _need_not_tell(self, ended: Future[Path]) -> None:
        if self.unasked() is None:
            atexit.unregister(self._tell)

    def _tell(self) -> None:
        if (error := self.unasked()) is not None:
            warnings.warn(f"a checkpoint was not saved: {error}", stacklevel=1)
