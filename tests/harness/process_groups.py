"""Record, delay and poison the collectives that a program issues.

Both context managers replace functions of `torch.distributed`, so they see every collective that is called as an
attribute of that module (`dist.all_reduce(...)`). They miss calls from C++ (DDP's reducer), functional collectives
and functions imported by name. They nest in either order.

`record_collectives()` yields a `CollectiveLog` with issued collectives in order and the times of their waits.

`delay_collectives(seed)` makes a missing wait visible. Outputs of a collective in flight are filled with 0xFF bytes
(NaN in every floating dtype, -1 in signed integers), and only `wait()` delivers the result. The real call starts
late, at a random time, but in issue order on every rank and without blocking, so a correct program cannot deadlock.
Inputs are copied at the call. `wait()` raises if memory or content of an input or output changed in flight, because
a real collective may read or write at any time.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d  # keeps the real functions

# -- what there is to call ---------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """How to read one function's arguments: the recorded name, written and read tensors."""

    op: str
    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


_FORMS = {
    "all_gather_single": _Form("all_gather", ("output_tensor",), ("input_tensor",)),
    "all_gather_into_tensor": _Form("all_gather", ("output_tensor",), ("input_tensor",)),
    "all_gather": _Form("all_gather", ("tensor_list",), ("tensor",)),
    "reduce_scatter_single": _Form("reduce_scatter", ("output",), ("input",)),
    "reduce_scatter_tensor": _Form("reduce_scatter", ("output",), ("input",)),
    "reduce_scatter": _Form("reduce_scatter", ("output",), ("input_list",)),
    "all_reduce": _Form("all_reduce", ("tensor",), ("tensor",)),
    "reduce": _Form("reduce", ("tensor",), ("tensor",)),
    "broadcast": _Form("broadcast", ("tensor",), ("tensor",)),
    "gather": _Form("gather", ("gather_list",), ("tensor",)),
    "scatter": _Form("scatter", ("tensor",), ("scatter_list",)),
    "all_to_all_single": _Form("all_to_all", ("output",), ("input",)),
    "all_to_all": _Form("all_to_all", ("output_tensor_list",), ("input_tensor_list",)),
    "isend": _Form("send", (), ("tensor",)),
    "send": _Form("send", (), ("tensor",)),
    "irecv": _Form("recv", ("tensor",), ()),
    "recv": _Form("recv", ("tensor",), ()),
    "barrier": _Form("barrier"),
    "batch_isend_irecv": _Form("exchange"),
    # Recorded, and delayed only until all earlier calls have started.
    "monitored_barrier": _Form("barrier"),
    "all_gather_object": _Form("object"),
    "broadcast_object_list": _Form("object"),
    "gather_object": _Form("object"),
    "scatter_object_list": _Form("object"),
    "send_object_list": _Form("object"),
    "recv_object_list": _Form("object"),
    "all_reduce_coalesced": _Form("coalesced"),
    "all_gather_coalesced": _Form("coalesced"),
}
_ASYNC_TWIN = {"send": "isend", "recv": "irecv"}  # of functions without an `async_op` argument


# -- the log -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One issued collective. A `batch_isend_irecv` is one, with the op "exchange".

    `op` is the same for functions with the same effect (all_gather_single and all_gather_into_tensor are
    "all_gather"), and `function` is the called one. `input_nbytes` are bytes sent by this rank and `output_nbytes`
    bytes received. `label` names the unit, if the package gave a label.
    """

    index: int
    op: str
    function: str
    label: str | None
    group: tuple[int, ...]
    dtype: torch.dtype | None
    input_numel: int
    output_numel: int
    input_nbytes: int
    output_nbytes: int
    async_op: bool
    reduce_op: str | None

    @property
    def numel(self) -> int:
        """Return the number of elements of the full message: the gathered vector, or the scattered one."""
        return max(self.input_numel, self.output_numel)

    @property
    def nbytes(self) -> int:
        return max(self.input_nbytes, self.output_nbytes)


@dataclass
class CollectiveLog:
    """Every collective since the context was entered, in order.

    `events` lists issues, waits and marks: ("issue", index), ("wait", index), ("mark", text). `on_issue` is called
    with each collective before it runs.
    """

    records: list[Collective] = field(default_factory=list)
    events: list[tuple[str, int | str]] = field(default_factory=list)
    on_issue: Callable[[Collective], None] | None = None

    def select(self, op: str | None = None, label: str | None = None) -> list[Collective]:
        return [r for r in self.records if (op is None or r.op == op) and (label is None or r.label == label)]

    def count(self, op: str | None = None, label: str | None = None) -> int:
        return len(self.select(op, label))

    def nbytes(self, op: str | None = None, label: str | None = None) -> int:
        return sum(r.nbytes for r in self.select(op, label))

    def ops(self) -> list[str]:
        return [r.op for r in self.records]

    def labels(self, op: str | None = None) -> list[str | None]:
        return [r.label for r in self.select(op)]

    def units(self, verb: str, op: str | None = None) -> list[str]:
        """Return the units that were gathered or reduced, as `verb` says, in order: "the root unit", "unit 'a'"."""
        return [each.removeprefix(f"{verb} ") for each in self.labels(op) if each and each.startswith(f"{verb} ")]

    def mark(self, text: str) -> None:
        """Log an event of the program, such as the start of a computation."""
        self.events.append(("mark", text))

    def clear(self) -> None:
        self.records.clear()
        self.events.clear()


@contextmanager
def record_collectives() -> Iterator[CollectiveLog]:
    """Record this rank's collectives, which run unchanged."""
    log = CollectiveLog()
    with _interposed():
        _logs.append(log)
        try:
            yield log
        finally:
            _logs.remove(log)


@contextmanager
def delay_collectives(seed: int = 0, max_ms: float = 3.0) -> Iterator[None]:
    """Delay and poison this rank's collectives (see the module's docstring). CPU tensors only.

    Starts are delayed by 0 to `max_ms` milliseconds, drawn from `seed` and the rank. Leaving the context without an
    exception raises RuntimeError for collectives without a wait.
    """
    global _delayer
    if _delayer is not None:
        raise RuntimeError("collectives are delayed already")
    with _interposed():
        _delayer = delayer = _Delayer(random.Random(f"{seed}/{dist.get_rank()}"), max_ms / 1000)
        try:
            yield
        finally:
            _delayer = None
            delayer.close()
    if delayer.in_flight:
        names = ", ".join(str(pending) for pending in delayer.in_flight)
        for pending in delayer.in_flight:
            pending.finish()
        raise RuntimeError(f"never waited for: {names}")


# -- replacing the functions -------------------------------------------------------------------------------------

_logs: list[CollectiveLog] = []
_delayer: _Delayer | None = None
_depth = 0
_installed = ExitStack()


@contextmanager
def _interposed() -> Iterator[None]:
    global _depth
    if _depth == 0:
        _install()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _installed.close()


def _install() -> None:
    originals: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name in _FORMS:
        real = getattr(dist, name, None)
        if real is not None:
            wrapper = _wrap(name, real)
            originals[wrapper] = real
            _replace(name, wrapper)

    class P2POp(dist.P2POp):  # torch compares its function with its own isend and irecv by identity
        def __new__(cls, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls, originals.get(op, op), *args, **kwargs)

        def __init__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(originals.get(op, op), *args, **kwargs)

    _replace("P2POp", P2POp)


def _replace(name: str, value: Any) -> None:
    _installed.callback(setattr, dist, name, getattr(dist, name))
    setattr(dist, name, value)


_signature_of = functools.cache(inspect.signature)


def _wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    signature = _signature_of(real)

    @functools.wraps(real)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _Call(name, real, bound.arguments)
        if not call.in_group:
            return real(*args, **kwargs)
        open_in = [(log, call.note(log)) for log in _logs]
        result = real(*args, **kwargs) if _delayer is None else _delayer.submit(call)
        if not call.asynchronous:
            _note_wait(open_in)
            return result
        if isinstance(result, list):
            return [_NotedWork(work, open_in) for work in result]
        return _NotedWork(result, open_in)

    return wrapper


def _note_wait(open_in: list[tuple[CollectiveLog, int]]) -> None:
    for log, index in open_in:
        log.events.append(("wait", index))
    open_in.clear()


class _NotedWork:
    """A proxy of a `Work` that supports only `wait`; logs the first wait."""

    def __init__(self, work: Any, open_in: list[tuple[CollectiveLog, int]]) -> None:
        self._work, self._open_in = work, open_in

    def wait(self, *timeout: Any) -> bool:
        _note_wait(self._open_in)
        return self._work.wait(*timeout)


def current_label() -> str | None:
    """Return the package's label of the current communication, if there is one."""
    package = sys.modules.get("fsdp.comm.collectives")
    return None if package is None else package.current_label()


class _Call:
    """One call of a function: group, written tensors and read tensors."""

    def __init__(self, name: str, real: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.name, self.real, self.arguments, self.form = name, real, arguments, _FORMS[name]
        self.p2p: list[dist.P2POp] = list(arguments["p2p_op_list"]) if name == "batch_isend_irecv" else []
        self.group = (self.p2p[0].group if self.p2p else arguments.get("group")) or dist.group.WORLD
        self.in_group = dist.get_rank(self.group) >= 0
        if self.p2p:
            self.outputs = [p.tensor for p in self.p2p if p.op is c10d.irecv]
            self.inputs = [p.tensor for p in self.p2p if p.op is c10d.isend]
        else:
            self.outputs = _tensors(arguments[key] for key in self.form.outputs)
            self.inputs = _tensors(arguments[key] for key in self.form.inputs)
        if self.form.op == "broadcast" and self.in_group:  # the source reads, its peers write
            source = arguments["src"]
            if source is None:
                source = dist.get_global_rank(self.group, arguments["group_src"])
            if dist.get_rank() == source:
                self.outputs = []
            else:
                self.inputs = []

    @property
    def asynchronous(self) -> bool:
        return bool(self.arguments.get("async_op", self.name in ("isend", "irecv", "batch_isend_irecv")))

    @property
    def can_be_asynchronous(self) -> bool:
        return "async_op" in self.arguments or self.asynchronous or self.name in _ASYNC_TWIN

    def start(self, private: dict[int, Tensor]) -> list[Any]:
        """Call asynchronously with `private[id(tensor)]` in place of each tensor; return the works."""
        if self.p2p:
            ops = [
                c10d.P2POp(p.op, private[id(p.tensor)], group=p.group, tag=p.tag, group_peer=p.group_peer)
                for p in self.p2p
            ]
            return self.real(ops)
        arguments = dict(self.arguments)
        for key in {*self.form.outputs, *self.form.inputs}:
            value = arguments[key]
            if isinstance(value, Tensor):
                arguments[key] = private[id(value)]
            elif value is not None:
                arguments[key] = [private[id(tensor)] for tensor in value]
        if self.name in _ASYNC_TWIN:
            return [getattr(c10d, _ASYNC_TWIN[self.name])(**arguments)]
        if "async_op" in arguments:
            arguments["async_op"] = True
        return [self.real(**arguments)]

    def note(self, log: CollectiveLog) -> int:
        dtypes = {t.dtype for t in self.outputs + self.inputs}
        reduce_op = self.arguments.get("op")
        index = len(log.records)
        log.records.append(
            Collective(
                index=index,
                op=self.form.op,
                function=self.name,
                label=current_label(),
                group=tuple(dist.get_process_group_ranks(self.group)),
                dtype=dtypes.pop() if len(dtypes) == 1 else None,
                input_numel=sum(t.numel() for t in self.inputs),
                output_numel=sum(t.numel() for t in self.outputs),
                input_nbytes=sum(t.nbytes for t in self.inputs),
                output_nbytes=sum(t.nbytes for t in self.outputs),
                async_op=self.asynchronous,
                reduce_op=None if reduce_op is None else str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2],
            )
        )
        log.events.append(("issue", index))
        if log.on_issue is not None:
            log.on_issue(log.records[index])
        return index


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if value is not None:
            found += [value] if isinstance(value, Tensor) else list(value)
    return found


# -- delaying ----------------------------------------------------------------------------------------------------


class _Memory:
    """The bytes under a contiguous CPU tensor, accessed without autograd, as a real collective does.

    Ordinary copies would bump version counters and fail on inference tensors.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"only contiguous CPU tensors can be delayed, got {tensor.device} {tensor.stride()}")
        self._tensor = tensor.detach()  # shares the storage, also after `.data` of the original is replaced
        self.start, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self.end = self.start + self.nbytes

    def intact(self) -> bool:
        """Return whether the memory is unchanged and still allocated."""
        storage = self._tensor.untyped_storage()
        needed = self._tensor.storage_offset() * self._tensor.element_size() + self.nbytes
        return storage.nbytes() >= needed and self._tensor.data_ptr() == self.start

    def read(self) -> bytes:
        return ctypes.string_at(self.start, self.nbytes)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.start, data, self.nbytes)

    def overlaps(self, other: _Memory) -> bool:
        return self.start < other.end and other.start < self.end

    def private_copy(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.empty(self._tensor.shape, dtype=self._tensor.dtype)
        _Memory(copy).write(self.read())
        return copy


class _Part:
    """The tensors behind one work object, as they were at the call."""

    def __init__(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        self.outputs = [(_Memory(t), t) for t in outputs]
        self.inputs = [(_Memory(t), t) for t in inputs]
        self.contents = [memory.read() for memory, _ in self.inputs]
        self.delivered = False


class _Pending:
    """One collective in flight on private copies: one part per message of an exchange, otherwise one part."""

    def __init__(self, call: _Call, label: str | None, due: float) -> None:
        self._call, self._label, self.due = call, label, due
        if call.p2p:
            self.parts = [_Part([], [p.tensor]) if p.op is c10d.isend else _Part([p.tensor], []) for p in call.p2p]
        else:
            self.parts = [_Part(call.outputs, call.inputs)]
        self._outputs = [output for part in self.parts for output in part.outputs]
        inputs = [source for part in self.parts for source in part.inputs]
        self._private = {id(t): memory.private_copy() for memory, t in self._outputs + inputs}
        for memory, _ in self._outputs:
            memory.write(b"\xff" * memory.nbytes)
        self._started = threading.Event()
        self._works: list[Any] = []
        self._error: BaseException | None = None

    def __str__(self) -> str:
        return self._call.name if self._label is None else f"{self._call.name} of {self._label}"

    def start(self) -> None:
        try:
            self._works = self._call.start(self._private)
        except BaseException as error:  # raised at the program's wait
            self._error = error
        self._started.set()

    def finish(self) -> None:
        """Wait for the real collective without delivery: dropping a message in flight breaks the connection."""
        for work, part in zip(self._works, self.parts, strict=True):
            if not part.delivered:
                work.wait()

    def deliver(self, index: int) -> None:
        """Wait for one part, check that its tensors are unchanged, and copy the result."""
        part = self.parts[index]
        if part.delivered:
            return
        self._started.wait()
        if self._error is not None:
            raise self._error
        self._works[index].wait()
        part.delivered = True
        for (memory, _), before in zip(part.inputs, part.contents, strict=True):
            if not memory.intact():
                raise RuntimeError(f"{self}: an input's memory was given back before wait()")
            # Inputs that overlap an output are poisoned, and checked as outputs.
            if memory.read() != before and not any(memory.overlaps(output) for output, _ in self._outputs):
                raise RuntimeError(f"{self}: an input was written before wait()")
        for memory, tensor in part.outputs:
            if not memory.intact():
                raise RuntimeError(f"{self}: an output's memory was given back before wait()")
            if memory.read() != b"\xff" * memory.nbytes:
                raise RuntimeError(f"{self}: an output was written before wait()")
            memory.write(_Memory(self._private[id(tensor)]).read())


class _DelayedWork:
    """The work object of one part of a collective in flight."""

    def __init__(self, delayer: _Delayer, pending: _Pending, index: int) -> None:
        self._delayer, self._pending, self._index = delayer, pending, index

    def wait(self, *timeout: Any) -> bool:
        self._pending.deliver(self._index)
        self._delayer.forget(self._pending)
        return True


class _Delayer:
    """A thread that starts submitted calls in order, each at a random time or later."""

    def __init__(self, generator: random.Random, longest: float) -> None:
        self._generator, self._longest = generator, longest
        self.in_flight: list[_Pending] = []
        self._queue: deque[_Pending] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="delayed collectives", daemon=True)
        self._thread.start()

    def submit(self, call: _Call) -> Any:
        """Return work objects of an asynchronous call; wait for a synchronous one."""
        if not call.can_be_asynchronous:
            self._drain()
            return call.real(**call.arguments)
        if c10d._world.pg_coalesce_state.get(call.group):
            raise NotImplementedError("collectives inside a coalescing manager cannot be delayed")
        pending = _Pending(call, current_label(), time.monotonic() + self._generator.uniform(0, self._longest))
        with self._changed:
            self._queue.append(pending)
            self._changed.notify_all()
        if not call.asynchronous:
            return pending.deliver(0)
        self.in_flight.append(pending)
        works = [_DelayedWork(self, pending, index) for index in range(len(pending.parts))]
        return works if call.p2p else works[0]

    def forget(self, pending: _Pending) -> None:
        """Drop a collective whose parts have all been waited for."""
        if pending in self.in_flight and all(part.delivered for part in pending.parts):
            self.in_flight.remove(pending)

    def _drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._queue)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                pending = self._queue[0]
            if not self._closing:
                time.sleep(max(0.0, pending.due - time.monotonic()))
            pending.start()
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def close(self) -> None:
        """Start the remaining calls without delay and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
