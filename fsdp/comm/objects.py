"""Python objects from rank to rank: what ranks tell each other besides tensors. The host waits.

[Note: A group of its own]
What goes on beside the training (a checkpoint that is being written) must not get between the training's collectives,
which all ranks issue in one order. So it talks over a gloo group of its own, from any one thread at a time, through the
group object itself: ``torch.distributed`` may be told to destroy its groups meanwhile, and whoever holds a
:class:`SideGroup` can still end what it began.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp.comm import collectives
from fsdp.comm.collectives import group_store, group_timeout


@contextlib.contextmanager
def _labelled(label: str) -> Iterator[None]:
    collectives.current_label = label
    try:
        yield
    finally:
        collectives.current_label = None


def all_gather_object(value: Any, group: Any, label: str) -> list[Any]:
    """Every rank's ``value`` (anything that pickles), in rank order."""
    values: list[Any] = [None] * group.size()
    with _labelled(label):
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: Any, label: str) -> Any:
    """What rank 0 of ``group`` has as ``value`` (anything that pickles).

    Raises, on every rank:
        TypeError: it does not pickle, as rank 0 alone can notice.
    """
    first, packed, problem = group.rank() == 0, b"", ""
    try:
        packed = pickle.dumps(value) if first else b""
    except Exception as error:  # whatever its class does
        problem = f"{label}: what rank 0 has cannot be sent to the other ranks: {type(error).__name__}: {error}"
    values: list[Any] = [packed, problem]
    with _labelled(label):
        dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    packed, problem = values
    if problem:
        raise TypeError(problem)
    return value if first else pickle.loads(packed)


class SideGroup:
    """The ranks of a process group, once more; see [Note: A group of its own].

    Only rank 0 ever has what all of them said.
    """

    def __init__(self, group: Any) -> None:
        """All ranks of ``group`` have to call. Waits take as long as those of ``group`` may.

        Raises:
            RuntimeError: not all ranks came; or ``group`` is a stand-in, whose ranks have no store to meet at.
        """
        self.rank: int = group.rank()
        self.size: int = group.size()
        store, number = group_store(group), _made.get(group, 0)
        if store is None:
            raise RuntimeError(f"the ranks of {group} cannot talk to each other: it is not a real process group")
        # not new_group(): that wants all ranks of the default group, and remembers what it makes for ever
        prefixed = dist.PrefixStore(f"fsdp beside {number}/", store)
        try:
            self._group: Any = dist.ProcessGroupGloo(prefixed, self.rank, self.size, group_timeout(group))
        except RuntimeError as error:
            raise RuntimeError(f"waiting for all {self.size} ranks to meet, and some do not come: {error}") from error
        _made[group] = number + 1
        self._tag = 0  # a new one for every message, so that a late one is not taken for another

    def collect(self, value: Any, label: str) -> list[Any] | None:
        """On rank 0 every rank's ``value`` (anything that pickles), in rank order; None on the others.

        Raises:
            RuntimeError: a rank did not come, or is gone.
        """
        self._tag += 2
        if self.rank != 0:
            self._send(value, 0, label)
            return None
        return [value, *(self._receive(rank, label) for rank in range(1, self.size))]

    def deal(self, values: Sequence[Any] | None, label: str) -> Any:
        """On each rank its element of ``values``, which rank 0 has.

        Raises:
            RuntimeError: rank 0 did not come, or a rank is gone.
        """
        self._tag += 2
        if values is None:
            return self._receive(0, label)
        for rank in range(1, self.size):
            self._send(values[rank], rank, label)
        return values[0]

    def _send(self, value: Any, rank: int, label: str) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._finish(
            lambda: self._group.send([torch.tensor([data.numel()], device="cpu")], rank, self._tag), rank, label
        )
        self._finish(lambda: self._group.send([data], rank, self._tag + 1), rank, label)

    def _receive(self, rank: int, label: str) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._finish(lambda: self._group.recv([size], rank, self._tag), rank, label)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self._finish(lambda: self._group.recv([data], rank, self._tag + 1), rank, label)
        return pickle.loads(data.numpy().tobytes())

    def _finish(self, message: Callable[[], Any], rank: int, label: str) -> None:
        try:
            message().wait()
        except RuntimeError as error:
            for group in [group for group, side in _sides.items() if side is self]:
                del _sides[group]  # who knows what is still on its way
            self._group = None  # so that the connections end, and with them the wait of other ranks for this one
            raise RuntimeError(f"{label}: waiting for rank {rank}, which is gone or does not come: {error}") from error


_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_sides: weakref.WeakKeyDictionary[Any, SideGroup] = weakref.WeakKeyDictionary()


def side_group(group: Any) -> SideGroup:
    """The side group of ``group``, which is made when it is first asked for: all its ranks have to come then."""
    if group not in _sides:
        _sides[group] = SideGroup(group)
    return _sides[group]
