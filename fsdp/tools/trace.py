"""``with fsdp.trace(model) as t:``: a view of the profiler's ranges of one rank, unit by unit.

The engine marks forwards, backward hooks, collectives and waits by profiler ranges (``runtime/ranges.py``). On a CPU
the ranges have the host's times. On an accelerator the profiler projects them onto the device, and these times count.
"""

from __future__ import annotations

import contextlib
import html
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp.comm.recording import tell
from fsdp.runtime.unit import Unit, units_in
from fsdp.tools.text import Table, in_bytes

LANES = ("compute", "gathers", "reductions", "waits")
_COLORS = {"forward": "#4c9f70", "backward": "#3d6cb9", "gather": "#e0a030", "reduce": "#c0504d", "wait": "#999999"}
_LEGEND = [*_COLORS.items(), ("pale: with nested units", "#b7d8c5")]
_PREFIX = "FullyShardedDataParallel."


class Event(NamedTuple):
    """One span of time of this rank.

    Attributes:
        unit: the path of the unit's module in the model; "" for the root.
        phase: ``forward``, with nested units; ``backward``, from the first hook of the unit until the last gradient is
            complete; ``gather`` or ``reduce``, from the start of the collective until this rank has waited for it;
            ``wait``, the part of a collective that no computation hides.
        start, end: seconds since the trace began.
        nbytes: bytes received by a ``gather`` or ``reduce``.
        of: ``gather`` or ``reduce`` for a ``wait``.
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


class _Span(NamedTuple):
    """One profiler range: the kind of work, the unit or the collective, seconds."""

    what: str
    of: str
    start: float
    end: float


class Trace:
    """The result of :func:`trace`. ``events`` are complete after the context, in the order of their starts.

    Attributes:
        rank: this rank in the group that the root is sharded or replicated over.
    """

    def __init__(self, model: nn.Module) -> None:
        self.events: list[Event] = []
        self._model = model
        root = next(units_in(model))[1]
        self.rank = root.groups.replica_rank * root.groups.shard_size + root.groups.shard_rank

    def span(self, what: str, of: str) -> contextlib.AbstractContextManager[Any]:
        """Return the profiler range for one span of the engine, waits included."""
        return record_function(f"{_PREFIX}{what} {of}")

    def _read(self, spans: Sequence[_Span], *, on_host: bool) -> None:
        """Make events of the profiler's ranges."""
        units = {unit.name: (path, unit) for path, unit, _ in units_in(self._model)}
        begun: dict[str, float] = {}  # start of each collective and backward in flight, by label
        ended: dict[str, Event] = {}
        for what, of, start, end in sorted(spans, key=lambda span: span.end):
            kind, _, name = of.partition(" ")
            if what in ("gather", "prefetch", "reduce") and of in units:
                kind, (path, unit) = "reduce" if what == "reduce" else "gather", units[of]
                if on_host:  # it ends with the wait
                    begun[f"{kind} {of}"] = start
                    ended.pop(f"{kind} {of}", None)
                else:
                    self.events.append(Event(path, kind, start, end, _received(unit, kind)))
            elif what == "wait" and on_host and kind in ("gather", "reduce") and name in units:
                path, unit = units[name]
                self.events.append(Event(path, "wait", start, end, of=kind))
                if of in begun:
                    if of in ended:  # the last of several buckets ends it
                        self.events.remove(ended[of])
                    ended[of] = Event(path, kind, begun[of], end, _received(unit, kind))
                    self.events.append(ended[of])
            elif of in units and what == "forward":
                self.events.append(Event(units[of][0], what, start, end))
            elif of in units and what == "_pre_backward_hook":
                begun.setdefault(f"backward {of}", start)
            elif of in units and what == "_post_backward_hook" and f"backward {of}" in begun:
                self.events.append(Event(units[of][0], "backward", begun.pop(f"backward {of}"), end))
        if not on_host:
            self.events += _exposed(self.events)
        self.events.sort(key=lambda event: (event.start, -event.end))

    def exposed(self, unit: str, of: str) -> float:
        """Return the seconds that no compute hides of a unit's gathers (``of="gather"``) or reductions."""
        waits = [event for event in self.events if (event.unit, event.phase, event.of) == (unit, "wait", of)]
        return sum(event.end - event.start for event in waits)

    @property
    def table(self) -> Table:
        """One row per unit: milliseconds of forward and backward, collectives, bytes received, exposed milliseconds."""
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
        return Table(head, rows)

    def summary(self) -> str:
        """Return the table as text."""
        return str(self.table)

    def _repr_markdown_(self) -> str:
        return self.table.markdown()

    def to_json(self) -> str:
        """Return the events as JSON: a list of objects with the fields of :class:`Event`."""
        return json.dumps([event._asdict() for event in self.events], indent=2)

    def save(self, path: str | Path) -> Path:
        """Write the events of this rank to a file and return its path.

        ``.json`` is for Perfetto (https://ui.perfetto.dev), with lanes for compute, gathers, reductions and waits;
        ``.svg`` is a picture. Ranks from 1 on write ``name.rank1.json`` and so on.

        Raises:
            ValueError: the name has another ending.
            RuntimeError: no forward ran inside the context.
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
        """Return the names of all rows, and each event with its row. Overlapping events of a lane get further rows,
        except nested compute."""
        rows: dict[str, list[Event]] = {}
        placed = []
        for event in self.events:
            number = 1
            while True:
                row = event.lane if number == 1 else f"{event.lane}, overlapping{' ' * (number - 2)}"
                open_ones = [other for other in rows.setdefault(row, []) if other.end > event.start]
                if all(event.lane == "compute" and other.end >= event.end for other in open_ones):
                    break
                number += 1
            rows[row] = [*open_ones, event]
            placed.append((row, event))
        return sorted(rows, key=lambda row: (LANES.index(row.split(",")[0]), row)), placed

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
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})

    def _as_svg(self) -> str:
        rows, placed = self._rows()
        first, last = min(e.start for e in self.events), max(e.end for e in self.events)
        left, top, height, scale = 140, 26, 24, 860 / max(last - first, 1e-9)
        bottom = top + height * len(rows)
        waiting = sum(event.end - event.start for event in self.events if event.phase == "wait")
        title = f"rank {self.rank}: {1000 * (last - first):.1f} ms, of which {1000 * waiting:.1f} ms are exposed waits"
        parts = [f'<text x="4" y="16" font-weight="bold">{title}</text>']
        parts += [f'<text x="4" y="{top + height * i + 16}">{row.strip()}</text>' for i, row in enumerate(rows)]
        for tick in _ticks(last - first):
            x = left + tick * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 4}" stroke="#dddddd"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{1000 * tick:g} ms</text>')
        for row, event in placed:
            x, width = left + (event.start - first) * scale, max((event.end - event.start) * scale, 0.5)
            around = event.lane == "compute" and any(_within(other, event) for _, other in placed)
            name = _fitting("" if event.lane == "waits" else event.unit or "root", width)
            tip = html.escape(f"{event.title}: {1000 * (event.end - event.start):.2f} ms")
            y = top + height * rows.index(row) + 2
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height - 4}" fill="{_COLORS[event.phase]}" '
                f'fill-opacity="{0.35 if around else 1}" stroke="white"><title>{tip}</title></rect>'
            )
            if not around and name:
                place = f'x="{x + width / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="white" pointer-events="none"'
                parts.append(f"<text {place}>{html.escape(name)}</text>")
        for number, (phase, color) in enumerate(_LEGEND):
            parts.append(f'<text x="{left + 80 * number}" y="{bottom + 34}" fill="{color}">&#9632; {phase}</text>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="1020" height="{bottom + 40}" font-family="sans-serif" '
            f'font-size="11">\n<path d="M0 0h1020v{bottom + 40}H0z" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
        )


def _exposed(events: Sequence[Event]) -> list[Event]:
    """Return the parts of collectives during which no unit computes, as waits."""
    compute = sorted((event.start, event.end) for event in events if event.lane == "compute")
    waits = []
    for event in events:
        if event.lane == "compute":
            continue
        free = event.start
        for start, end in [*compute, (event.end, event.end)]:
            if min(start, event.end) > free:
                waits.append(Event(event.unit, "wait", free, min(start, event.end), of=event.phase))
            free = max(free, end)
    return waits


def _fitting(path: str, width: float) -> str:
    """Return the longest ending of a unit's path, cut at dots, that fits ``width`` pixels; "" if none does."""
    parts = path.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ending for ending in endings if 7 * len(ending) + 4 < width), "")


def _within(event: Event, other: Event) -> bool:
    """Return True if ``event`` lies inside ``other`` in the same lane."""
    return event is not other and event.lane == other.lane and other.start <= event.start and event.end <= other.end


def _ticks(seconds: float) -> list[float]:
    """Return 5 to 10 round times from 0 to ``seconds``."""
    step = 10.0 ** math.floor(math.log10(max(seconds, 1e-9)))
    step *= next(part for part in (0.1, 0.2, 0.5, 1) if seconds / (part * step) < 10)
    return [number * step for number in range(int(seconds / step) + 1)]


def _received(unit: Unit, kind: str) -> int:
    """Return the bytes that this rank receives in a gather or reduction of ``unit``."""
    size, replicas = unit.groups.shard_size, unit.groups.replica_size
    if kind == "gather":
        return unit.full_nbytes * (size - 1) // size
    trained = [gradients.handle for gradients in unit.gradients.buckets if gradients.trainable]
    shards = [handle.layout.shard_numel * handle.reduce_dtype.itemsize for handle in trained]
    return sum(shard * (size - 1) + 2 * shard * (replicas - 1) // replicas for shard in shards)


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what each unit of ``model`` does on this rank inside the context.

    Recorded are forwards, backwards, gathers and reductions, and the time that this rank waits for collectives. Any
    number of ranks may trace, without communication. The context runs ``torch.profiler``, which slows a step down a
    little. ::

        with fsdp.trace(model) as t:
            model(batch).sum().backward()
        print(t.summary())
        t.save("step.svg")

    Raises:
        ValueError: no module in ``model`` is wrapped.
        RuntimeError: another trace or profiler is active.
    """
    units = [unit for _, unit, _ in units_in(model)]
    if not units:
        raise ValueError(
            f"trace() is for wrapped models, and nothing in this {type(model).__name__} is: wrap it with FSDP"
        )
    recorded = Trace(model)
    on_host = all(unit.device.type == "cpu" for unit in units)
    activities = [ProfilerActivity.CPU]
    if not on_host:
        activities.append(getattr(ProfilerActivity, units[0].device.type.upper(), ProfilerActivity.PrivateUse1))
    tell(recorded)
    try:
        with profile(activities=activities) as profiler:
            yield recorded
    finally:
        tell(None)
    spans = []
    for event in profiler.events() or ():
        if event.name.startswith(_PREFIX) and (event.device_type == DeviceType.CPU) is on_host:
            what, _, of = event.name.removeprefix(_PREFIX).partition(" ")
            spans.append(_Span(what, of, event.time_range.start / 1e6, event.time_range.end / 1e6))
    recorded._read(spans, on_host=on_host)
