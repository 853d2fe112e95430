"""The ranks that save or load together: what one does and the others learn, errors included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fsdp.checkpoint.outcome import Outcome
from fsdp.comm.collectives import default_group
from fsdp.comm.objects import SideGroup, side_group

_T = TypeVar("_T")
_U = TypeVar("_U")


class _Failure(NamedTuple):
    """An exception on its way to other ranks."""

    kind: str
    number: int | None  # of an OSError
    text: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, OSError) and error.errno is not None:
            where = f": {error.filename}" if error.filename is not None else ""
            return _Failure("OSError", error.errno, f"{error.strerror}{where}")
        return _Failure(type(error).__name__, None, str(error))

    def as_error(self, text: str) -> Exception:
        if self.number is not None:
            return OSError(self.number, text)  # an instance of the fitting subclass
        kinds = (TypeError, ValueError, NotImplementedError, FileNotFoundError, OSError)
        return {kind.__name__: kind for kind in kinds}.get(self.kind, RuntimeError)(text)


class _Share(NamedTuple):
    """What one rank has to say in a round, or has been told: a value, or why there is none."""

    value: Any
    failures: dict[int, _Failure]  # by rank

    @staticmethod
    def of(rank: int, action: Callable[[], Any]) -> tuple[_Share, Exception | None]:
        try:
            return _Share(action(), {}), None
        except Exception as error:
            return _Share(None, {rank: _Failure.of(error)}), error


class Ranks:
    """The ranks of a process group, or this process alone. They talk over a side group, so also beside the training.

    Attributes:
        saving: the save that goes on in the background, or that did and whose outcome nobody has asked for.
    """

    def __init__(self) -> None:
        self._side: SideGroup | None = None  # this process alone
        self.saving: Outcome | None = None

    @property
    def rank(self) -> int:
        return 0 if self._side is None else self._side.rank

    @property
    def size(self) -> int:
        return 1 if self._side is None else self._side.size

    @staticmethod
    def of(process_group: Any) -> Ranks:
        """Those of ``process_group``; None for the default group, or for this process alone if there is none. All of
        them have to call. Returns when what they saved in the background has ended: one conversation at a time."""
        if process_group is None:
            process_group = default_group() if dist.is_available() and dist.is_initialized() else None
        several = process_group is not None and process_group.size() > 1
        ranks = _known.setdefault(process_group, Ranks()) if several else _alone
        if ranks.saving is not None:
            futures.wait([ranks.saving])
        if several:  # only now: if it failed, all ranks need a new one
            ranks._side = side_group(process_group)
        return ranks

    def round(self, what: str, mine: Callable[[], _T], then: Callable[[list[_T]], Sequence[_U]]) -> _U:
        """Every rank does ``mine``; then rank 0 makes of all results, by rank, one for each rank.

        Returns:
            this rank's.

        Raises:
            Exception: on every rank, if ``mine`` failed on one or ``then`` did: an error of the kind that the first of
                them met, with all their words.
        """
        share, error = _Share.of(self.rank, mine)
        if self._side is None:
            if error is not None:
                raise error
            return then([share.value])[0]
        shares: list[_Share] | None = self._side.collect(share, what)
        answers: list[_Share] | None = None
        if shares is not None:
            failures = {rank: failure for theirs in shares for rank, failure in theirs.failures.items()}
            result = _Share(None, failures)
            if not failures:
                result, error = _Share.of(0, lambda: then([theirs.value for theirs in shares]))
            values = result.value if result.value is not None else [None] * self.size
            answers = [_Share(value, result.failures) for value in values]
        answer: _Share = self._side.deal(answers, what)
        if answer.failures:
            text = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in answer.failures.items())
            raise next(iter(answer.failures.values())).as_error(text) from error
        result_of_mine: _U = answer.value
        return result_of_mine

    def together(self, what: str, action: Callable[[], Any]) -> None:
        """Do something on every rank.

        Raises: as ``round``.
        """
        self.round(what, action, lambda results: [None] * self.size)

    def first(self, what: str, action: Callable[[], _T]) -> _T:
        """Do something on rank 0; every rank gets the result.

        Raises: as ``round``.
        """
        return self.round(what, lambda: None, lambda results: [action()] * self.size)


_alone = Ranks()
_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
