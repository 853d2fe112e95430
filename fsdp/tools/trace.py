"""``with fsdp.trace(model) as t:``: what each unit of a model does on this rank, and when, without a profiler."""

from __future__ import annotations

import contextlib
import html
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fsdp.comm.recording import tell
from fsdp.runtime.unit import Unit, units_in
from fsdp.tools.text import in_bytes, table

LANES = ("compute", "gathers", "reductions", "waits")
_COLORS = {"forward": "#4c9f70", "backward": "#3d6cb9", "gather": "#e0a030", "reduce": "#c0504d", "wait": "#999999"}


class Event(NamedTuple):
    """One span of this rank's time.

    Attributes:
        unit: the path of its module in the model ("" for the root).
        phase: ``forward``, with what lies inside of it; ``backward``, from when one comes to the unit until the last of
            its gradients is there; ``gather`` or ``reduce``, from when it was begun until this rank had waited for it;
            ``wait``, for one of these: communication that nothing hides.
        start, end: in seconds since the trace began.
        nbytes: received, for ``gather`` and ``reduce``.
        of: what a ``wait`` is for.
    """

    unit: str
    phase: str
    start: float
    end: float
    nbytes: int = 0
    of: str = ""

    @property
    def lane(self) -> str:
        return {"gather": "gathers", "reduce": "reductions", "wait": "waits"}.get(self.phase, "compute")

    @property
    def title(self) -> str:
        return " ".join(word for word in (self.phase, self.of and f"for {self.of}", self.unit or "(root)") if word)


class Trace:
    """What :func:`trace` records. When the context is left, ``events`` are there, in the order in which they began.

    Attributes:
        rank: this rank, in the group that the root is sharded or replicated over.
    """

    def __init__(self, model: nn.Module) -> None:
        self.events: list[Event] = []
        self._model, self._spans = model, list[tuple[str, str, float, float]]()  # (what, of, start, end)
        self._began = time.perf_counter()
        root = next(units_in(model))[1]
        self.rank = root.groups.replica_rank * root.groups.shard_size + root.groups.shard_rank

    @contextlib.contextmanager
    def span(self, what: str, of: str) -> Iterator[None]:
        """For the engine, which tells what it does."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((what, of, start - self._began, time.perf_counter() - self._began))

    def _finish(self) -> None:
        """Make events of what was told."""
        units = {unit.name: (path, unit) for path, unit, _ in units_in(self._model)}
        begun: dict[str, float] = {}  # what has begun, by its label
        ended: dict[str, Event] = {}
        for what, of, start, end in sorted(self._spans, key=lambda span: span[-1]):
            kind, _, name = of.partition(" ")
            if what in ("gather", "prefetch", "reduce") and of in units:
                label = f"{'reduce' if what == 'reduce' else 'gather'} {of}"
                begun[label] = start
                ended.pop(label, None)
            elif what == "wait" and kind in ("gather", "reduce") and name in units:
                path, unit = units[name]
                self.events.append(Event(path, "wait", start, end, of=kind))
                if of in begun:  # of several buckets the last one ends it
                    if of in ended:
                        self.events.remove(ended[of])
                    ended[of] = Event(path, kind, begun[of], end, _received(unit, kind))
                    self.events.append(ended[of])
            elif of in units and what == "forward":
                self.events.append(Event(units[of][0], what, start, end))
            elif of in units and what == "_pre_backward_hook":
                begun[f"backward {of}"] = start
            elif of in units and what == "_post_backward_hook" and f"backward {of}" in begun:
                self.events.append(Event(units[of][0], "backward", begun.pop(f"backward {of}"), end))
        self.events.sort(key=lambda event: (event.start, -event.end))

    def exposed(self, unit: str, of: str) -> float:
        """The seconds that this rank has waited for a unit's gathers (``of="gather"``) or reductions (``"reduce"``)."""
        waits = [event for event in self.events if (event.unit, event.phase, event.of) == (unit, "wait", of)]
        return sum(event.end - event.start for event in waits)

    def summary(self) -> str:
        """Per unit, as a table: milliseconds in forward and backward, collectives with what was received, and how long
        this rank waited for them, which is what compute has not hidden."""
        head = ["unit", "forward", "backward", "gathers", "received", "exposed", "reductions", "received", "exposed"]
        rows = []
        for unit, _, _ in units_in(self._model):
            own = [event for event in self.events if event.unit == unit]
            count, received = Counter[str](), Counter[str]()
            spent: defaultdict[str, float] = defaultdict(float)
            for event in own:
                spent[event.phase] += event.end - event.start
                count[event.phase] += 1
                received[event.phase] += event.nbytes
            row = [unit or "(root)", *(f"{1000 * spent[phase]:.2f} ms" for phase in ("forward", "backward"))]
            for kind in ("gather", "reduce"):
                row += [str(count[kind]), in_bytes(received[kind]), f"{1000 * self.exposed(unit, kind):.2f} ms"]
            rows.append(row)
        return table(head, rows)

    def save(self, path: str | Path) -> Path:
        """Write what was recorded on this rank: ``.json`` for Perfetto (https://ui.perfetto.dev), with lanes for
        compute, gathers, reductions and waits; ``.svg`` as a picture. Ranks other than 0 put theirs beside it, as
        ``name.rank1.json``. Returns where.

        Raises:
            ValueError: the name has another ending.
            RuntimeError: nothing was recorded.
        """
        path = Path(path)
        writers = {".json": self._as_json, ".svg": self._as_svg}
        if path.suffix not in writers:
            raise ValueError(f"expected a name that ends in .json (for Perfetto) or .svg (a picture), but got {path}")
        if not self.events:
            raise RuntimeError(
                "this trace has recorded nothing to save: run a forward of the wrapped model inside of `with "
                "fsdp.trace(model) as t:`, and save after it"
            )
        if self.rank:
            path = path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
        path.write_text(writers[path.suffix]())
        return path

    def _rows(self) -> tuple[list[str], list[tuple[str, Event]]]:
        """All rows; each event with its row: its lane, or one more where what is in that is not over or around it."""
        rows: dict[str, list[Event]] = {}
        placed = []
        for event in self.events:
            number = 1
            while True:
                row = event.lane if number == 1 else f"{event.lane} {number}"
                open_ones = [other for other in rows.setdefault(row, []) if other.end > event.start]
                if all(event.lane == "compute" and other.end >= event.end for other in open_ones):
                    break
                number += 1
            rows[row] = [*open_ones, event]
            placed.append((row, event))
        return sorted(rows, key=lambda row: (LANES.index(row.split()[0]), row)), placed

    def _as_json(self) -> str:
        rows, placed = self._rows()
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": {"name": row}}
            for number, row in enumerate(rows)
        ]
        events.append({"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}})
        for row, event in placed:
            place = {"tid": rows.index(row), "ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
            args = {"unit": event.unit, "phase": event.phase, "bytes": event.nbytes}
            events.append({"ph": "X", "name": event.title, "pid": self.rank, **place, "args": args})
        return json.dumps({"traceEvents": events})

    def _as_svg(self) -> str:
        rows, placed = self._rows()
        first, last = min(e.start for e in self.events), max(e.end for e in self.events)
        left, height, scale = 90, 24, 900 / max(last - first, 1e-9)
        bottom = height * len(rows)
        parts = [f'<text x="4" y="{height * i + 16}">{row}</text>' for i, row in enumerate(rows)]
        for tick in _ticks(last - first):
            x = left + tick * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom + 4}" stroke="#dddddd"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{1000 * tick:g} ms</text>')
        for row, event in placed:
            x, width = left + (event.start - first) * scale, max((event.end - event.start) * scale, 0.5)
            around = event.lane == "compute" and any(_within(other, event) for _, other in placed)
            name = "" if event.lane == "waits" else event.unit.rpartition(".")[2] or "root"
            title = html.escape(f"{event.title}: {1000 * (event.end - event.start):.2f} ms")
            y = height * rows.index(row) + 2
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height - 4}" fill="{_COLORS[event.phase]}" '
                f'fill-opacity="{0.35 if around else 1}" stroke="white"><title>{title}</title></rect>'
            )
            if not around and name and width > 7 * len(name) + 4:
                place = f'x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="white" pointer-events="none"'
                parts.append(f"<text {place}>{html.escape(name)}</text>")
        for number, (phase, color) in enumerate(_COLORS.items()):
            parts.append(f'<text x="{left + 80 * number}" y="{bottom + 34}" fill="{color}">&#9632; {phase}</text>')
        whole = f'width="1020" height="{bottom + 40}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {whole} font-family="sans-serif" font-size="11">\n'
            '<path d="M0 0h1020v{}H0z" fill="white"/>\n{}\n</svg>\n'.format(bottom + 40, "\n".join(parts))
        )


def _within(event: Event, other: Event) -> bool:
    """Whether ``event`` lies inside of ``other``."""
    return event is not other and event.lane == other.lane and other.start <= event.start and event.end <= other.end


def _ticks(seconds: float) -> list[float]:
    """Round times from 0 to ``seconds``, between 5 and 10 of them."""
    step = 10.0 ** math.floor(math.log10(max(seconds, 1e-9)))
    step *= next(part for part in (0.1, 0.2, 0.5, 1) if seconds / (part * step) < 10)
    return [number * step for number in range(int(seconds / step) + 1)]


def _received(unit: Unit, kind: str) -> int:
    """Bytes that this rank gets from its shard group."""
    size = unit.groups.shard_size
    if kind == "gather":
        return unit.buffers.nbytes * (size - 1) // size
    trained = [gradients.handle for gradients in unit.gradients.buckets if gradients.trainable]
    return sum(handle.layout.shard_numel * handle.reduce_dtype.itemsize for handle in trained) * (size - 1)


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Inside, record what each unit of ``model`` does on this rank: forwards, backwards, gathers, reductions, and the
    time that this rank waits for them. Any rank may, or all; nothing is communicated. Profilers see no ranges of the
    engine meanwhile. Without a trace nothing is recorded, and it costs a question per collective and phase.

    Raises:
        ValueError: nothing in ``model`` is wrapped.
        RuntimeError: another trace is under way.
        NotImplementedError: the model computes on an accelerator, whose host does not know when things happen there.
    """
    units = [unit for _, unit, _ in units_in(model)]
    if not units:
        raise ValueError(
            f"trace() is for wrapped models, and nothing in this {type(model).__name__} is: wrap it with FSDP"
        )
    if any(unit.device.type != "cpu" for unit in units):
        raise NotImplementedError(
            f"trace() records what the host does, which on {units[0].device} is not when it happens: use "
            "torch.profiler, whose ranges FullyShardedDataParallel.<what> <unit> name the units"
        )
    recorded = Trace(model)
    tell(recorded)
    try:
        yield recorded
    finally:
        tell(None)
        recorded._finish()
