"""Detection of races between streams without an accelerator.

`trace_streams()` gives the engine simulated streams. All work runs at once on the CPU in the host's order, so
results are right whatever the synchronization. Each stream keeps a vector clock: `record()` takes a snapshot of the
current stream's clock, `wait()` merges a snapshot, and only these two order streams. Each aten and c10d call that
touches memory, in forward, backward and optimizer, is stamped with the clock of the current stream. Three kinds of
errors are reported:

* a race: accesses of one block of memory from two streams, at least one of them a write, without an order.
Allocating is a write. * a use after free: memory belongs to the stream on which it was allocated. Once freed, it may
serve the next allocation on that stream, as in torch's caching allocator without `record_stream`. Accesses by
further streams must happen before that allocation, and all must be ordered when the context ends. * a host
synchronization: a call that on an accelerator would block the host or read device memory, and a collective that
returns a work object.

Offloaded memory belongs to the host, which is one more stream. The host waits for fetched copies and for the gather
stream, and work launched after host work follows it. `upload()` reads host memory on the current stream, and the
host waits for it only on request.

Autograd runs a node and its hooks on the stream that was current when the node was made, and orders nodes on
different streams. `AccumulateGrad` nodes are made by `hooks.accumulator_of` on any stream. Autograd protects their
inputs from reuse, and only the caller of the backward waits for their outputs, at its end. The tracer does the same.

Collectives of one group run in issue order on any streams. Clocks of collectives include this order to judge
overlap, but accesses are not ordered by it.

A block of memory is identified by its address while it is held, so memory that moves between storages
(`_swap_data_ptr_`) stays one block. Parts of a block are not distinguished.

`Sync` is one ordering of streams: the line that recorded the event and the line that waited.
`trace_streams(drop=...)` ignores some of them, which shows whether they are needed.
"""

from __future__ import annotations

import bisect
import linecache
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp.placement.redistribute as redistribute_module
import fsdp.runtime.context as context_module
import fsdp.runtime.hooks as hooks_module
from fsdp.comm import collectives
from fsdp.comm.host_memory import place
from fsdp.runtime.unit import units_in

PACKAGE = Path(context_module.__file__).parents[1]

# Collectives in the dispatcher: written and read arguments.
_COLLECTIVES = {
    "_allgather_base_": (("output_tensor",), ("input_tensor",)),
    "alltoall_base_": (("output",), ("input",)),
    "_reduce_scatter_base_": (("output_tensor",), ("input_tensor",)),
    "allreduce_": (("tensors",), ("tensors",)),
    "broadcast_": (("tensors",), ("tensors",)),
}
_COPY = torch.ops.aten.copy_.default
# Operations with a data-dependent size or a host value as the result: the host would wait for the device.
_READ_BY_HOST = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_dim",
    "_unique",
    "_unique2",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with a mask the host waits, too
# Operations that read only a tensor's shape.
_LIKE = {
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "zeros_like",
    "new_zeros",
    "ones_like",
    "full_like",
    "new_full",
}


class Site(NamedTuple):
    """A line of the package."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(str(PACKAGE / self.file), self.line).strip()
        return f"{self.file}:{self.line} in {self.function}: {text}"


class Sync(NamedTuple):
    """Events recorded at one line on one stream, and waited for at another line."""

    recorded: Site
    waited: Site
    by: str  # the stream that waits
    on: str  # the recorded stream

    def __str__(self) -> str:
        return f"{self.by} waits for {self.on}: [{self.recorded}] -> [{self.waited}]"


class SimulatedStream:
    """A queue of work. `clock` has the latest ordered operation of each stream.

    Compares like `torch.Stream`, which is neither equal nor unequal to None and other types.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[SimulatedStream, int] = {self: 0}

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and self is not other

    __hash__ = object.__hash__

    @property
    def time(self) -> int:
        return self.clock[self]

    def advance(self) -> None:
        self.clock[self] += 1

    def follow(self, clock: dict[SimulatedStream, int]) -> None:
        """Wait for the operations in `clock`."""
        for other, time in clock.items():
            self.clock[other] = max(self.clock.get(other, -1), time)

    def follows(self, access: Access) -> bool:
        """Return whether the stream's next operation happens after `access`."""
        return self.clock.get(access.stream, -1) >= access.time


class _Event:
    """The result of `record()`, without a way for the host to wait."""

    __slots__ = ("clock", "site", "stream")

    def __init__(self, stream: SimulatedStream, site: Site) -> None:
        self.stream, self.clock, self.site = stream, dict(stream.clock), site

    def query(self) -> bool:
        return True


class Access(NamedTuple):
    """One operation on one block. `storage` is the address of the accessed storage object."""

    stream: SimulatedStream
    time: int
    operation: str
    storage: int


class Collective(NamedTuple):
    """One collective with its label, the clock of its stream at issue, and earlier collectives of its group."""

    label: str
    stream: SimulatedStream
    clock: dict[SimulatedStream, int]

    @property
    def time(self) -> int:
        return self.clock[self.stream]


class _Block:
    """Memory of one allocation: owner, holders, and the last accesses from each stream."""

    __slots__ = ("address", "freed", "holder", "owner", "reads", "writes")

    def __init__(self, address: int, owner: SimulatedStream, storage: torch.UntypedStorage) -> None:
        self.address = address
        self.owner: SimulatedStream | None = owner
        self.holder = StorageWeakRef(storage)
        self.freed = False
        self.writes: dict[SimulatedStream, Access] = {}
        self.reads: dict[SimulatedStream, Access] = {}

    @property
    def is_free(self) -> bool:
        if not self.freed:
            storage = torch.UntypedStorage._new_with_weak_ptr(self.holder.cdata)
            self.freed = storage is None or not storage.nbytes() or storage.data_ptr() != self.address
        return self.freed

    @property
    def foreign(self) -> Iterable[Access]:
        return [a for accesses in (self.writes, self.reads) for a in accesses.values() if a.stream is not self.owner]


class StreamRace(AssertionError):
    """Streams with unordered accesses."""


class TracingStreams:
    """Stand-in for an accelerator's streams; see the module's docstring."""

    asynchronous_work = False

    def __init__(self, tracer: StreamTracer) -> None:
        self._tracer = tracer
        self.gather, self.reduce = SimulatedStream("gather"), SimulatedStream("reduce")
        self.replica = SimulatedStream("replica")
        self.pinned: list[tuple[int, bool]] = []  # requested bytes of host memory, and whether pinned

    def on_gather_stream(self) -> Any:
        return self._tracer.on(self.gather)

    def on_reduce_stream(self) -> Any:
        return self._tracer.on(self.reduce)

    def on_replica_stream(self) -> Any:
        return self._tracer.on(self.replica)

    def current(self) -> SimulatedStream:
        return self._tracer.current

    @contextmanager
    def joined(self, stream: SimulatedStream | None) -> Iterator[None]:
        before = self._tracer.current
        if stream is None or stream is before:
            yield
            return
        stream.follow(before.clock)
        try:
            with self._tracer.on(stream):
                yield
        finally:
            before.follow(stream.clock)

    def is_capturing(self) -> bool:
        return False

    def look_beside_captures(self) -> None:
        return None

    def record(self) -> _Event:
        return _Event(self._tracer.current, _site(sys._getframe(1)))

    def wait(self, event: _Event | None) -> None:
        stream = self._tracer.current
        if event is None or event.stream is stream:
            return
        sync = Sync(event.site, _site(sys._getframe(1)), stream.name, event.stream.name)
        self._tracer.syncs.add(sync)
        if sync not in self._tracer.drop:
            stream.follow(event.clock)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self._tracer.is_offloaded(tensor) else tensor

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._tracer.is_host_memory(memory)
        self.pinned.append((nbytes, pinned))
        return memory

    def fetch(self, tensor: Tensor, into: Tensor) -> tuple[Tensor, _Event]:
        self._tracer.is_host_memory(into)  # may be lent again as another storage
        copy = place(into, tensor)
        copy.copy_(tensor)
        return copy, self.record()

    def on_host(self, event: _Event) -> Any:
        return self._tracer.on_host(event.clock)

    def settle(self) -> None:
        self.gather.advance()
        self._tracer.host.follow(self.gather.clock)


def _site(frame: FrameType) -> Site:
    return Site(_short_name(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


@cache
def _short_name(file: str) -> str:
    path = Path(file)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else file


class _Schema(NamedTuple):
    """Name, read arguments and written arguments of an operation that touches memory."""

    operation: str
    is_read_by_host: bool
    takes_indices: bool
    reads: list[tuple[int, str]]
    writes: list[tuple[int, str]]


class StreamTracer(TorchDispatchMode):
    """The object that `trace_streams()` yields."""

    def __init__(self, drop: Collection[Sync] = ()) -> None:
        super().__init__()
        self.drop = frozenset(drop)
        self.compute = SimulatedStream("compute")
        self.host = SimulatedStream("host")
        self._stack: list[tuple[SimulatedStream, Any]] = [(self.compute, None)]  # with the running node
        self._since: list[tuple[int, SimulatedStream]] = [
            (0, self.compute)
        ]  # sequence number -> current stream from then on
        self._node: Any = None  # the last observed node of autograd
        self._node_stream = self.compute  # stream of that node
        self._before_node = self.compute  # stream of the last node with successors
        self._leaf_streams: set[SimulatedStream] = set()  # of this backward: the caller waits for them at the end
        self.streams = TracingStreams(self)
        self.syncs: set[Sync] = set()
        self.races: list[str] = []
        self.host_synchronisations: list[str] = []
        self.collectives: list[Collective] = []
        self._issued: dict[str, dict[SimulatedStream, int]] = {}  # group -> clock of the latest collective
        self.marks: dict[str, dict[SimulatedStream, int]] = {}  # name -> the compute stream's clock
        self._reported: set[tuple[str, str, str, str]] = set()
        self._models: list[weakref.ref[nn.Module]] = []
        self._offloading: list[weakref.ref[nn.Module]] = []  # watched units with shards in host memory
        self._blocks: dict[int, _Block] = {}
        self._shared: list[_Block] = []  # blocks used by a stream other than the owner
        self._schemas: dict[Any, _Schema] = {}

    # -- for the program that is traced --------------------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Name the buffers of units of `model` in reports."""
        self._models.append(weakref.ref(model))
        if any(handle.offload.offload_params for _, unit, _ in units_in(model) for handle in unit.handles):
            self._offloading.append(weakref.ref(model))

    def is_host_memory(self, tensor: Tensor) -> None:
        """Return whether `tensor` lies in host memory, whose reuse is not traced."""
        self._find(tensor.untyped_storage()).owner = None

    def is_offloaded(self, tensor: Tensor) -> bool:
        """Return whether `tensor` lies in a watched unit's shard in host memory."""
        address = tensor.untyped_storage()._cdata
        return any(
            handle.offload.offload_params and handle.shard.untyped_storage()._cdata == address
            for model in filter(None, (reference() for reference in self._offloading))
            for _, unit, _ in units_in(model)
            for handle in unit.handles
        )

    def mark(self, name: str) -> None:
        """Store the compute stream's clock under `name`."""
        self.marks[name] = dict(self.compute.clock)

    def check(self) -> None:
        """Raise StreamRace if errors were found so far."""
        __tracebackhide__ = True
        if self.races:
            more = f"\n  and {len(self.races) - 5} more" if len(self.races) > 5 else ""
            raise StreamRace("streams are not ordered:\n  " + "\n  ".join(self.races[:5]) + more)

    @property
    def current(self) -> SimulatedStream:
        node = torch._C._current_autograd_node()
        stream, under = self._stack[-1]
        if node is None:
            if self._node is not None:  # the backward is over
                for leaf_stream in self._leaf_streams:
                    stream.follow(leaf_stream.clock)
                self._leaf_streams.clear()
                self._node, self._before_node = None, stream
            self._before_node = stream
            return stream
        if node is not self._node:
            self._node = node
            self._run(node)
        return stream if node is under else self._node_stream

    def _run(self, node: Any) -> None:
        """Handle the start of `node` in autograd."""
        stream = self._node_stream = self._stream_of(node)
        if stream is not self._before_node:
            stream.follow(self._before_node.clock)
        if _accumulates(node):
            self._leaf_streams.add(stream)
        else:
            self._before_node = stream

    def _stream_of(self, node: Any) -> SimulatedStream:
        if _accumulates(node):
            return node.metadata.get("stream") or self._stack[0][0]
        number = node._sequence_nr()
        return self._since[bisect.bisect(self._since, number, key=lambda since: since[0]) - 1][1]

    def made_accumulator(self, node: Any) -> None:
        """Handle a possibly new node that accumulates a leaf's gradient."""
        node.metadata.setdefault("stream", self.current)

    def accumulated(self, leaf: Tensor) -> None:
        """Handle inputs of an accumulation, which autograd protects from reuse on another stream."""
        if leaf.grad is not None and self._before_node is not self.current:
            storage = _storage(leaf.grad)
            if storage is not None:
                self.is_host_memory(leaf.grad)

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        self._stack.append((stream, torch._C._current_autograd_node()))
        self._note_since(stream)
        try:
            yield
        finally:
            self._stack.pop()
            self._note_since(self.current)

    def _note_since(self, stream: SimulatedStream) -> None:
        number = torch.autograd._get_sequence_nr()
        while self._since and self._since[-1][0] >= number:
            self._since.pop()
        self._since.append((number, stream))

    @contextmanager
    def on_host(self, after: dict[SimulatedStream, int]) -> Iterator[None]:
        """Run host work after `after`; later launches follow it."""
        self.host.follow(after)
        with self.on(self.host):
            yield
        for stream in (self.compute, self.streams.gather, self.streams.reduce):
            stream.follow(self.host.clock)

    # -- operations ----------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a tenth of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.races and self.drop:  # the dropped wait has shown: skip further checks
            return func(*args, **kwargs)
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = _schema_of(func)
        stream = self.current
        stream.advance()
        operation = schema.operation
        if func.namespace == "c10d":
            operation = self._note_collective(func, args, kwargs)
        elif schema.is_read_by_host or (schema.takes_indices and _has_mask(args[1])):
            self._note_host(operation)
        for write, arguments in ((False, schema.reads), (True, schema.writes)):
            for position, name in arguments:
                for tensor in _tensors(args[position] if position < len(args) else kwargs.get(name)):
                    storage = _storage(tensor)
                    if storage is not None:
                        self._access(stream, self._find(storage), storage, operation, write=write)
        if func is _COPY and self._offloading and self.is_offloaded(args[1]) and not (args + (False,))[2]:
            self.host.follow(stream.clock)  # the host waits for a copy from host memory
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage is not None and not self._is_known(storage):
                self._allocate(stream, storage, operation)
        return result

    def _note_collective(self, func: Any, args: Any, kwargs: Any) -> str:
        label = collectives.current_label() or "no unit"
        operation = f"{_name(func)} ({label})"
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        waits = "async_op" in names and given.get("async_op", True)  # older versions of torch do not say it
        if waits and not label.startswith("agree"):  # numbers in host memory
            self._note_host(f"{operation} hands out a work object")
        clock = dict(self.current.clock)
        issued = self._issued.setdefault(_group_name(given), {})
        for stream, time in issued.items():
            clock[stream] = max(clock.get(stream, -1), time)
        issued.update(clock)
        self.collectives.append(Collective(label, self.current, clock))
        return operation

    def _note_host(self, operation: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and Path(frame.f_code.co_filename) == Path(__file__):
            frame = frame.f_back
        inside = frame
        while inside is not None and not Path(inside.f_code.co_filename).is_relative_to(PACKAGE):
            inside = inside.f_back
        frame = inside or frame
        self.host_synchronisations.append(f"{operation} at {_site(frame)}" if frame is not None else operation)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        block = self._blocks.get(storage.data_ptr())
        return block is not None and block.holder.cdata == storage._cdata and not block.freed

    def _find(self, storage: torch.UntypedStorage) -> _Block:
        """Return the block of `storage`; memory from before the trace belongs to the compute stream."""
        if not self._is_known(storage):
            self._blocks[storage.data_ptr()] = _Block(storage.data_ptr(), self.compute, storage)
        return self._blocks[storage.data_ptr()]

    def _allocate(self, stream: SimulatedStream, storage: torch.UntypedStorage, operation: str) -> None:
        """Handle new memory of `storage` from the allocator of the current `stream`."""
        self._settle(stream)
        block = self._blocks[storage.data_ptr()] = _Block(storage.data_ptr(), stream, storage)
        self._access(stream, block, storage, f"allocation by {operation}", write=True)

    def _settle(self, stream: SimulatedStream) -> None:
        """Allow reuse of freed memory of `stream`; accesses by further streams must be ordered before."""
        for block in [block for block in self._shared if block.owner is stream and block.is_free]:
            self._shared.remove(block)
            for access in block.foreign:
                if not stream.follows(access):
                    self._report("use after free", access, Access(stream, stream.time, "reuse of freed memory", 0))

    def _access(
        self, stream: SimulatedStream, block: _Block, storage: torch.UntypedStorage, operation: str, *, write: bool
    ) -> None:
        access = Access(stream, stream.time, operation, storage._cdata)
        for earlier in (*block.writes.values(), *(block.reads.values() if write else ())):
            if not stream.follows(earlier):
                self._report("race", earlier, access)
        if stream is not block.owner and block.owner is not None and not any(block is other for other in self._shared):
            self._shared.append(block)
        (block.writes if write else block.reads)[stream] = access

    def _swapped(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Handle an exchange of the storages' memory."""
        for storage, new_holder in ((one, other), (other, one)):
            if storage.nbytes():  # released memory has no address
                if not self._is_known(storage):
                    self.current.advance()
                    self._allocate(self.current, storage, "a storage's constructor")
                self._blocks[storage.data_ptr()].holder = StorageWeakRef(new_holder)

    def _resizing(self, storage: torch.UntypedStorage) -> None:
        """Handle a release of the storage's memory."""
        if storage.nbytes():
            self._find(storage).freed = True

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            self.current.advance()
            self._allocate(self.current, storage, "resize_")

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self, kind: str, earlier: Access, later: Access) -> None:
        key = (kind, earlier.operation, later.operation, f"{earlier.stream.name}/{later.stream.name}")
        if key in self._reported:
            return
        self._reported.add(key)
        roles = self._roles()
        first, second = (
            f"{access.operation} on the {access.stream.name} stream"
            + (f", as {roles.get(access.storage, 'memory of no unit')}" if access.storage else "")
            for access in (earlier, later)
        )
        self.races.append(f"{kind}: {first}; then, without waiting for it, {second}")

    def _roles(self) -> dict[int, str]:
        """Return descriptions of the watched models' storages by address."""
        roles: dict[int, str] = {}
        for model in filter(None, (reference() for reference in self._models)):
            for _, unit, _ in units_in(model):
                for handle, gradients in zip(unit.handles, unit.gradients):
                    parts = {"full buffer": handle.full, "shard": handle.shard}
                    for buffer in (gradients._scratch, gradients.slots and gradients.slots.buffer):
                        if buffer is not None:
                            parts["reduce buffer"] = buffer.flat
                    for visible in gradients.views.visible:
                        if visible.param.grad is not None:
                            parts[f"gradient of {visible.name}"] = visible.param.grad
                    for what, tensor in parts.items():
                        roles.setdefault(tensor.untyped_storage()._cdata, f"{what} of {unit.name}")
        return roles


@contextmanager
def trace_streams(*, drop: Collection[Sync] = (), check: bool = True) -> Iterator[StreamTracer]:
    """Trace streams of models that are wrapped and run inside, on one thread.

    Leaving the context raises StreamRace on errors; with `check=False` they are only stored in `races`.
    """
    __tracebackhide__ = True
    tracer = StreamTracer(drop)
    with ExitStack() as stack:
        for module in (context_module, redistribute_module):
            _replace(stack, module, "streams_for", lambda device: tracer.streams)
        _wrap_storage(stack, "_swap_data_ptr_", tracer._swapped, None)
        _wrap_storage(stack, "resize_", lambda storage, size: tracer._resizing(storage), tracer._resized)
        for module in (torch.accelerator, torch.cuda):
            _replace(stack, module, "synchronize", lambda *_: tracer._note_host("synchronize"))
        _replace(stack, hooks_module, "accumulator_of", _announced(hooks_module.accumulator_of, tracer))
        _replace(stack, hooks_module, "on_accumulated", _told(hooks_module.on_accumulated, tracer))
        with tracer:
            yield tracer
        for stream in {block.owner for block in tracer._shared if block.owner is not None}:
            stream.advance()
            tracer._settle(stream)
    if check:
        tracer.check()


def _announced(accumulator_of: Callable[[Tensor], Any], tracer: StreamTracer) -> Callable[[Tensor], Any]:
    def make(leaf: Tensor) -> Any:
        node = accumulator_of(leaf)
        tracer.made_accumulator(node)
        return node

    return make


def _told(on_accumulated: Callable[..., Any], tracer: StreamTracer) -> Callable[..., Any]:
    def register(leaf: Tensor, callback: Callable[[Tensor], None]) -> Any:
        def tell(leaf: Tensor) -> None:
            tracer.accumulated(leaf)
            callback(leaf)

        return on_accumulated(leaf, tell)

    return register


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _wrap_storage(
    stack: ExitStack, name: str, before: Callable[..., None], after: Callable[[torch.UntypedStorage], None] | None
) -> None:
    """Announce calls of a storage method that torch defines in a base class."""
    real = getattr(torch.UntypedStorage, name, None)
    if real is None:
        return

    def method(self: torch.UntypedStorage, *args: Any) -> Any:
        before(self, *args)
        result = real(self, *args)
        if after is not None:
            after(self)
        return result

    setattr(torch.UntypedStorage, name, method)
    stack.callback(delattr, torch.UntypedStorage, name)


# -- reading operations ------------------------------------------------------------------------------------------------


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _accumulates(node: Any) -> bool:
    return "AccumulateGrad" in node.name()


def _group_name(given: dict[str, Any]) -> str:
    return str(dist.ProcessGroup.unbox(given["process_group"]).group_name)


def _schema_of(func: Any) -> _Schema:
    name = _name(func)
    return _Schema(str(func), name in _READ_BY_HOST, name in _INDEXING, *_read_and_written(func))


def _read_and_written(func: Any) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    arguments = list(enumerate(argument.name for argument in func._schema.arguments))
    if func.namespace == "c10d":
        if _name(func) not in _COLLECTIVES:
            raise NotImplementedError(f"the stream tracer does not know {func}")
        written, read = _COLLECTIVES[_name(func)]
        return [a for a in arguments if a[1] in read], [a for a in arguments if a[1] in written]
    is_written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    if not any(is_written):
        if any(r.alias_info is not None for r in func._schema.returns) or _name(func) in _LIKE:
            return [], []  # a view touches no memory
        return arguments, []
    return arguments, [a for a, written in zip(arguments, is_written) if written]


def _has_mask(indices: Any) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(indices))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor with memory."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None
