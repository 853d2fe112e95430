"""``with fsdp.trace(model) as t:``: a view of the profiler's ranges of one rank, unit by unit.

The engine marks forwards, backward hooks, collectives and waits by profiler ranges (``runtime/ranges.py``). On a CPU
the ranges have the host's times. On an accelerator the profiler projects them onto the device, and these times count.
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.autograd import DeviceType
from torch.profiler import profile

from fsdp.comm.profiling import RANGE, profiler_runs
from fsdp.runtime.unit import Unit, units_in
from fsdp.tools.text import Report, in_bytes

_COLORS = {"forward": "#4c9f70", "backward": "#3d6cb9", "gather": "#e0a030", "reduce": "#c0504d", "wait": "#777777"}
_COLLECTIVES = {"gather": "gather", "prefetch": "gather", "reduce": "reduce"}  # phases by action


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
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def computes(self) -> bool:
        """Whether the phase is a forward or backward."""
        return self.phase in ("forward", "backward")

    @property
    def title(self) -> str:
        return " ".join(word for word in (self.phase, self.of and f"for {self.of}", self.unit or "(root)") if word)


class Trace(Report):
    """The result of :func:`trace`. It prints as a table with a row per unit: forward and backward, collectives, bytes
    received, and exposed time. ``events`` are complete after the context, in the order of their starts.

    Attributes:
        rank: this rank in the group that the root is sharded or replicated over.
        units: the paths of the units in the model; "" for the root.
    """

    def __init__(self, model: nn.Module, profiler: profile) -> None:
        self.events: list[Event] = []
        self._profiler = profiler
        self.units = [path for path, _, _ in units_in(model)]
        groups = next(units_in(model))[1].groups
        self.rank = groups.replica_rank * groups.shard_size + groups.shard_rank

    def exposed(self, unit: str, of: str) -> float:
        """Return the seconds that no compute hides of a unit's gathers (``of="gather"``) or reductions."""
        return sum(event.seconds for event in self.events if (event.unit, event.phase, event.of) == (unit, "wait", of))

    def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        head = ["unit", "forward", "backward", "gathers", "received", "exposed", "reductions", "received", "exposed"]
        rows = [head]
        for unit in self.units:
            own = {phase: [e for e in self.events if (e.unit, e.phase) == (unit, phase)] for phase in _COLORS}
            row = [unit or "(root)"]
            row += [_in_ms(sum(event.seconds for event in own[phase])) for phase in ("forward", "backward")]
            for kind in ("gather", "reduce"):
                received = sum(event.nbytes for event in own[kind])
                row += [str(len(own[kind])), in_bytes(received), _in_ms(self.exposed(unit, kind))]
            rows.append(row)
        return [], rows, []

    def save(self, path: str | Path) -> Path:
        """Write the step of this rank to a file and return its path.

        ``.svg`` is a picture, in which each unit has a row; ``.json`` has all that the profiler recorded, for Perfetto
        (https://ui.perfetto.dev). Ranks from 1 on write ``name.rank1.json`` and so on.

        Raises:
            ValueError: the name has another ending.
            RuntimeError: no forward ran inside the context.
        """
        path = Path(path)
        if path.suffix not in (".json", ".svg"):
            raise ValueError(f"expected a name that ends in .json (for Perfetto) or .svg (a picture), but got {path}")
        if not self.events:
            raise RuntimeError(
                "this trace has recorded nothing to save: run a forward of the wrapped model inside of `with "
                "fsdp.trace(model) as t:`, and save after it"
            )
        if self.rank:
            path = path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
        if path.suffix == ".svg":
            path.write_text(self._as_svg())
        else:
            self._profiler.export_chrome_trace(str(path))
        return path

    def _as_svg(self) -> str:
        first, last = min(event.start for event in self.events), max(event.end for event in self.events)
        left, top, height = 8 + 7 * max(6, *map(len, self.units)), 26, 24
        bottom, width, scale = top + height * len(self.units), left + 880, 860 / max(last - first, 1e-9)
        waiting = sum(event.seconds for event in self.events if event.phase == "wait")
        title = f"rank {self.rank}: {_in_ms(last - first)}, of which {_in_ms(waiting)} are exposed waits"
        parts = [f'<text x="4" y="16" font-weight="bold">{title}</text>']
        for row, unit in enumerate(self.units):
            parts.append(f'<text x="4" y="{top + height * row + 15}">{html.escape(unit or "(root)")}</text>')
        for fifth in range(6):
            tick = f'x="{left + 172 * fifth}" y="{bottom + 16}" text-anchor="middle"'
            parts.append(f"<text {tick}>{_in_ms((last - first) * fifth / 5)}</text>")
        for event in self.events:
            x, y = left + (event.start - first) * scale, top + height * self.units.index(event.unit)
            place = f'x="{x:.1f}" y="{y + (2 if event.computes else 12)}"'
            size = f'width="{max(event.seconds * scale, 0.5):.1f}" height="9"'
            tip = f"<title>{html.escape(event.title)}: {_in_ms(event.seconds)}</title>"
            parts.append(f'<rect {place} {size} fill="{_COLORS[event.phase]}">{tip}</rect>')
        for number, (phase, color) in enumerate(_COLORS.items()):
            parts.append(f'<text x="{left + 80 * number}" y="{bottom + 34}" fill="{color}">&#9632; {phase}</text>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 40}" font-family="sans-serif" '
            f'font-size="11">\n<path d="M0 0h{width}v{bottom + 40}H0z" fill="white"/>\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )


def _in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record the work of each unit of ``model`` on this rank inside the context.

    Recorded are forwards, backwards, gathers and reductions, and the time that this rank waits for collectives. Any
    number of ranks may trace, without communication. The context runs ``torch.profiler``, which slows a step down a
    little. ::

        with fsdp.trace(model) as t:
            model(batch).sum().backward()
        print(t)
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
    if profiler_runs():
        raise RuntimeError("a trace or profiler is active already: leave it before this trace begins")
    on_host = all(unit.device.type == "cpu" for unit in units)
    with profile() as profiler:
        recorded = Trace(model, profiler)
        yield recorded
    ranges = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6, event.name.removeprefix(RANGE))
        for event in profiler.events() or ()
        if event.name.startswith(RANGE) and (event.device_type == DeviceType.CPU) is on_host
    ]
    recorded.events = _events_of(ranges, {unit.name: (path, unit) for path, unit, _ in units_in(model)}, on_host)


def _events_of(
    ranges: Iterable[tuple[float, float, str]], units: dict[str, tuple[str, Unit]], on_host: bool
) -> list[Event]:
    """Return the events of ranges (start, end, name), sorted. ``units`` has path and unit by the unit's name."""
    events: list[Event] = []
    in_flight: dict[str, int] = {}  # the event of each collective, by label
    begun: dict[str, float] = {}  # start of each backward, by unit
    for start, end, name in sorted(ranges):
        action, _, of = name.partition(" ")  # a unit, or for a wait a collective
        if action == "wait" and on_host and of in in_flight:
            collective = events[in_flight[of]]
            events[in_flight[of]] = collective._replace(end=end)  # several buckets: the last one ends it
            events.append(Event(collective.unit, "wait", start, end, of=collective.phase))
        if of not in units:
            continue
        path, unit = units[of]
        if phase := _COLLECTIVES.get(action):
            in_flight[f"{phase} {of}"] = len(events)
            events.append(Event(path, phase, start, end, _received(unit, phase)))
        elif action == "forward":
            events.append(Event(path, "forward", start, end))
        elif action == "_pre_backward_hook":
            begun.setdefault(of, start)
        elif action == "_post_backward_hook" and of in begun:
            events.append(Event(path, "backward", begun.pop(of), end))
    if not on_host:
        events += exposed_parts(events)
    return sorted(events, key=lambda event: (event.start, -event.end))


def exposed_parts(events: Sequence[Event]) -> list[Event]:
    """Return the parts of collectives during which no unit computes, as waits."""
    compute = sorted((event.start, event.end) for event in events if event.computes)
    waits = []
    for event in events:
        free = event.start
        for start, end in [] if event.computes else [*compute, (event.end, event.end)]:
            if min(start, event.end) > free:
                waits.append(Event(event.unit, "wait", free, min(start, event.end), of=event.phase))
            free = max(free, end)
    return waits


def _received(unit: Unit, kind: str) -> int:
    """Return the bytes that this rank receives in a gather or reduction of ``unit``."""
    size, replicas = unit.groups.shard_size, unit.groups.replica_size
    if kind == "gather":
        return unit.full_nbytes * (size - 1) // size
    trained = [bucket.handle for bucket in unit.gradients if bucket.trainable]
    shards = [handle.layout.shard_numel * handle.reduce_dtype.itemsize for handle in trained]
    return sum(shard * (size - 1) + 2 * shard * (replicas - 1) // replicas for shard in shards)
