"""The index of a checkpoint: which tensors there are, and which ranks hold which elements.

[Note: Runs of ranks]
The index has no entry for each tensor on each rank: at thousands of ranks no process could read it. A rank holds a
*span* of a tensor, from the first element to the last in memory order. Consecutive ranks mostly hold spans of one
length, one after the other. These are one :class:`Run`, so a tensor has about three runs at any number of ranks. Each
rank describes the tensors that it has written, and the runs are joined on the way to rank 0. A reader opens the files
of those ranks whose spans meet the elements that it needs. A span may have gaps, such as columns of a matrix, so it
says only in which files to look.

[Note: Keys]
Keys of a checkpoint: the model's state under names of parameters, the optimizer's under those and names of states.

``model.<key>``, ``optim.state.<parameter>.<state>``, ``optim.param_groups``, ``optim.classes`` (for each group the
names of torch's classes that the optimizer had), ``optim.others`` for entries that belong to no parameter,
``versions`` (of the model's modules, where they are not 1), and ``extra``. Names of states may be strings and integers.
Integers are written ``%i<number>``, and dots and percent signs in strings ``%2E`` and ``%25``, so the part after the
last dot is always the whole name of the state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint.values import torch_dtype
from fsdp.placement.boxes import Box

MODEL, STATE, GROUPS, OTHERS = "model.", "optim.state.", "optim.param_groups", "optim.others"
CLASSES, EXTRA, VERSIONS = "optim.classes", "extra", "versions"
_NUMBER = re.compile(r"%i(-?\d+)")


def state_key(param: str, state: Any) -> str:
    """Return the key of a parameter's state."""
    if type(state) is int:
        return f"{STATE}{param}.%i{state}"
    if not isinstance(state, str):
        raise TypeError(
            f"names of states have to be strings or integers to be saved, but {param!r} has one called {state!r}"
        )
    return f"{STATE}{param}.{state.replace('%', '%25').replace('.', '%2E')}"


def param_and_state(key: str) -> tuple[str, Any]:
    """Split a key of ``state_key`` into the parameter's name and the state's name."""
    param, _, state = key.removeprefix(STATE).rpartition(".")
    number = _NUMBER.fullmatch(state)
    return param, int(number[1]) if number else state.replace("%2E", ".").replace("%25", "%")


class Run(NamedTuple):
    """Ranks ``rank`` to ``rank + ranks`` with spans of a tensor, and ``numel`` elements each.

    The first span is from element ``start`` to ``end`` (half-open), each next one ``step`` elements later.
    """

    rank: int
    ranks: int
    start: int
    end: int
    step: int
    numel: int

    def with_next(self, other: Run) -> Run | None:
        """Return this run and ``other``, of the ranks after it, as one run, or None."""
        step = self.step if self.ranks > 1 else other.start - self.start
        alike = (self.end - self.start, self.numel) == (other.end - other.start, other.numel)
        follows = self.rank + self.ranks == other.rank and self.start + self.ranks * step == other.start
        if not (alike and follows and step > 0 and (other.ranks == 1 or other.step == step)):
            return None
        return self._replace(ranks=self.ranks + other.ranks, step=step)

    def meeting(self, start: int, end: int) -> Iterable[int]:
        """Return the ranks that may hold elements between ``start`` and ``end``."""
        if start >= end:
            return ()
        first, last = 0, self.ranks - 1
        if self.step > 0:
            first, last = max(0, -((self.end - start - 1) // self.step)), min(last, (end - 1 - self.start) // self.step)
        elif self.end <= start or end <= self.start:
            return ()
        return range(self.rank + first, self.rank + last + 1)


class Saved(NamedTuple):
    """A tensor, or any other value if ``dtype`` is empty. ``order`` lists the dimensions, outermost in memory first."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    runs: tuple[Run, ...]

    def span(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        """Return the span of a box: the first element, and the last plus one."""
        if 0 in sizes:
            return 0, 0
        first = last = 0
        for dim in self.order:
            first = first * self.shape[dim] + offsets[dim]
            last = last * self.shape[dim] + offsets[dim] + sizes[dim] - 1
        return first, last + 1

    def holders(self, boxes: Iterable[Box]) -> set[int]:
        """Return the ranks whose files may hold elements of ``boxes``."""
        return {rank for box in boxes for span in [self.span(*box)] for run in self.runs for rank in run.meeting(*span)}


Table = dict[str, Saved]  # by key


def of_value(rank: int) -> Saved:
    """Describe a value that is no tensor."""
    return Saved("", (), (), (Run(rank, 1, 0, 1, 0, 1),))


def of_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], order: Iterable[int], boxes: Sequence[Box], rank: int
) -> Saved:
    """Describe a tensor of which ``rank`` has written ``boxes``."""
    saved = Saved(str(dtype).removeprefix("torch."), shape, tuple(order), ())
    spans = [saved.span(*box) for box in boxes]
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    return saved._replace(runs=(Run(rank, 1, start, end, 0, sum(box.numel for box in boxes)),))


def joined(tables: Sequence[Table]) -> Table:
    """Join the tables of several ranks, in the order of ranks."""
    result: Table = dict(tables[0])
    for table in tables[1:]:
        for key, saved in table.items():
            known = result.setdefault(key, saved)
            if known is saved:
                continue
            if known[:3] != saved[:3]:
                kinds = [f"{one.dtype or 'no tensor'} of shape {one.shape}" for one in (known, saved)]
                ranks = f"rank {known.runs[0].rank} and {kinds[1]} on rank {saved.runs[0].rank}"
                raise ValueError(f"{key!r} is {kinds[0]} on {ranks}: all ranks have to save the same tensor")
            both = known.runs[-1].with_next(saved.runs[0])
            runs = (*known.runs, *saved.runs) if both is None else (*known.runs[:-1], both, *saved.runs[1:])
            result[key] = known._replace(runs=runs)
    return result


def check_complete(table: Table, keys: Iterable[str] = ()) -> None:
    """Check that the ranks together hold ``keys``, and every element once."""
    if missing := [key for key in keys if key not in table]:
        raise ValueError(
            f"no rank holds elements of {missing[0]!r} ({len(missing)} in all): let all ranks save together"
        )
    for key, saved in table.items():
        numel = math.prod(saved.shape)
        found = sum(run.ranks * run.numel for run in saved.runs)
        if found != numel:
            raise ValueError(f"{key!r} has {numel} elements, and the ranks together have {found} of them")


def packed(table: Table) -> bytes:
    """Return the content of ``index.json``: ``{key: [dtype, shape, order, runs]}``."""
    return json.dumps(table, separators=(",", ":")).encode()


def unpacked(content: bytes, ranks: int, nbytes: int) -> Table:
    """Read the content of ``index.json``.

    Args:
        ranks: the number of ranks that saved, by the manifest.
        nbytes: the size of all files together, which bounds the memory for a tensor.

    Raises:
        ArithmeticError, AttributeError, KeyError, TypeError, ValueError: :func:`packed` has not written it.
    """
    table: Table = {}
    for key, (dtype, shape, order, runs) in json.loads(content).items():
        shape, order = tuple(map(int, shape)), tuple(map(int, order))
        saved = table[key] = Saved(dtype, shape, order, tuple(Run(*map(int, run)) for run in runs))
        itemsize = torch_dtype(dtype).itemsize if dtype else 0
        if not 0 <= math.prod(shape) * itemsize <= nbytes:
            raise ValueError(f"{key!r} of shape {shape} and {dtype} is not in files of {nbytes} bytes")
        for run in saved.runs:
            if not 0 <= run.rank < run.rank + run.ranks <= ranks:
                raise ValueError(f"{key!r} is on {run.ranks} ranks from {run.rank}, and {ranks} have saved")
    return table
