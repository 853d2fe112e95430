"""An exception at a chosen line of the package, as an interrupt from the keyboard raises it."""

from __future__ import annotations

import functools
import opcode
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fsdp

_PACKAGE = str(Path(fsdp.__file__).parent)


class Lines:
    """Counts the lines of the package that this thread executes, and raises ``error`` at number ``at``, from 0 on.

    With a ``folder`` of the package, lines of that are counted, each only once: ranks wait in loops of any length.

    Attributes:
        count: the number of lines so far.
        place: file, line and function where ``error`` was raised; "" before that.
    """

    def __init__(self, at: int = -1, error: type[BaseException] = KeyboardInterrupt, folder: str = "") -> None:
        self.count, self.place = 0, ""
        self._seen: set[tuple[str, int]] | None = set() if folder else None
        self._folder = str(Path(_PACKAGE) / folder)
        self._at, self._error = at, error

    @contextmanager
    def traced(self) -> Iterator[Lines]:
        """Count inside the context."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._folder) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and not _leaves_with(frame.f_code, frame.f_lasti) and self._is_new(frame):
            number, self.count = self.count, self.count + 1
            if number == self._at:
                code = frame.f_code
                self.place = f"{code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno} {code.co_qualname}"
                sys.settrace(None)
                raise self._error(self.place)
        return self._line

    def _is_new(self, frame: FrameType) -> bool:
        if self._seen is None:
            return True
        line, count = (frame.f_code.co_filename, frame.f_lineno), len(self._seen)
        self._seen.add(line)
        return len(self._seen) > count


@functools.cache
def _leaves_with(code: CodeType, at: int) -> bool:
    """Whether the line is that of a ``with`` statement which is being left: Python lets no signal in between there."""
    loads = [code.co_code[at + 2 * number : at + 2 * number + 2] for number in range(3)]
    return code.co_code[at] == opcode.opmap["LOAD_CONST"] and loads[0] == loads[1] == loads[2]
