"""What this rank has issued in each group, so that ranks which have parted can come together again.

Collectives of a group are matched by their order. A rank that fails, or is refused, in the middle of a pass has issued
fewer of them than others, whose last ones wait for it; whatever it issued next would be taken for those. So before
anything else it takes part in them, with memory that nobody reads: see :func:`catch_up`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER

_KEPT = 64  # of the latest of each group: ranks that agree are never so far apart


class Issued(NamedTuple):
    """One collective, or an exchange of messages, in a form that JSON holds."""

    name: str  # of the function
    dtype: str
    numels: Sequence[int]  # of its tensors
    detail: Any  # the operation, or the rank that all send to or receive from; for messages see ``Letter``


class _Ledger:
    def __init__(self) -> None:
        self.count = 0
        self.latest: deque[Issued] = deque(maxlen=_KEPT)


_ledgers: weakref.WeakKeyDictionary[Any, _Ledger] = weakref.WeakKeyDictionary()


def note(group: Any, name: str, dtype: torch.dtype | str, numels: Sequence[int], detail: Any = None) -> None:
    """This rank is about to issue it in ``group``."""
    ledger = _ledgers.get(group)
    if ledger is None:
        ledger = _ledgers[group] = _Ledger()
    ledger.count += 1
    ledger.latest.append(Issued(name, str(dtype), numels, detail))


def told(group: Any) -> list[Any]:
    """How much this rank has issued, and the latest of it: for the others."""
    ledger = _ledgers.get(group) or _Ledger()
    return [ledger.count, list(ledger.latest)]


def catch_up(group: Any, device: torch.device, by_rank: Mapping[int, list[Any]]) -> list[tuple[Any, str]]:
    """Issue what other ranks of ``group`` have issued and this one has not; returns works to wait for, with words.

    Args:
        device: where the group communicates.
        by_rank: what each rank has ``told``.

    Raises:
        RuntimeError: the ranks have issued different things, or something that only its caller can complete.
    """
    rank, works = group.rank(), []
    count = by_rank[rank][0]
    own = _by_number(by_rank[rank])
    theirs = {other: _by_number(said) for other, said in by_rank.items() if other != rank}
    for other, issued in theirs.items():
        for number in issued.keys() & own.keys():
            if list(issued[number][:3]) != list(own[number][:3]):
                raise RuntimeError(
                    f"rank {other} has issued {issued[number][0]} where rank {rank} has issued {own[number][0]}: this "
                    "process group is of no use any more. Make a new one, and wrap the model on it"
                )
    for number in range(count, max(said[0] for said in by_rank.values())):
        ahead = {other: issued.get(number) for other, issued in theirs.items() if by_rank[other][0] > number}
        if None in ahead.values():
            raise RuntimeError(f"rank {rank} is too far behind the others to catch up with them: start anew")
        first = Issued(*next(iter(ahead.values())))  # type: ignore[misc]
        works += [(work, f"catch up with {first.name}") for work in _issue(first, group, device, ahead)]
        if first.name != "messages":
            note(group, first.name, first.dtype, first.numels, first.detail)
        else:
            note(group, first.name, "", ())
    return works


def _by_number(said: list[Any]) -> dict[int, Any]:
    count, latest = said
    return dict(zip(range(count - len(latest), count), latest))


def _issue(what: Issued, group: Any, device: torch.device, ahead: Mapping[int, Any]) -> Sequence[Any]:
    """With memory of its own."""
    if what.name == "messages":
        return _answer_messages(group, device, ahead)
    tensors = [torch.zeros(numel, dtype=_dtype(what.dtype), device=device) for numel in what.numels]
    if what.name in (REDUCE_SCATTER, "all_reduce"):
        work = getattr(dist, what.name)(*tensors, op=getattr(dist.ReduceOp, what.detail), group=group, async_op=True)
    elif what.name == ALL_GATHER:
        work = getattr(dist, what.name)(*tensors, group=group, async_op=True)
    elif what.name in ("gather", "scatter"):
        pieces = [torch.zeros_like(tensors[0]) for _ in range(group.size())] if dist.get_rank() == what.detail else None
        end = {"dst" if what.name == "gather" else "src": what.detail}
        work = getattr(dist, what.name)(tensors[0], pieces, group=group, async_op=True, **end)
    else:
        raise RuntimeError(
            f"rank {group.rank()} has left the others in the middle of {what.name}, which cannot be completed: this "
            "process group is of no use any more. Make a new one, and wrap the model on it"
        )
    return [work] if work is not None else []


def _answer_messages(group: Any, device: torch.device, ahead: Mapping[int, Any]) -> Sequence[Any]:
    """Send what those ``ahead`` expect of this rank, and receive what they send to it."""
    operations = []
    for other, issued in ahead.items():
        for sent, rank, numel, dtype, tag in issued[3]:
            if rank == group.rank():
                tensor = torch.zeros(numel, dtype=_dtype(dtype), device=device)
                peer = dist.get_global_rank(group, other)
                operations.append(dist.P2POp(dist.irecv if sent else dist.isend, tensor, peer, group, tag))
    return dist.batch_isend_irecv(operations) if operations else ()


def _dtype(words: str) -> torch.dtype:
    found = getattr(torch, words.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
