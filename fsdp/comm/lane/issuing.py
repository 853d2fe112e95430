"""Issuing the collectives of one process group: their numbering, their start, and the choice of the transport.

A collective goes through memory that the ranks share, if they do, else through the carrier of the lane
(:class:`~fsdp.comm.transport.native.Carrier`). Where the functions of ``torch.distributed`` were replaced on all ranks,
by a recorder for instance, everything goes through these functions. That is asked once per pass or call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp.comm.groups import control_device, group_timeout
from fsdp.comm.transport import native
from fsdp.comm.transport.channel import Channel
from fsdp.comm.transport.native import Carrier, Transfer
from fsdp.comm.transport.shared_memory import Sharing
from fsdp.comm.versions import ALL_GATHER
from fsdp.comm.waiting.waits import Sequence
from fsdp.comm.waiting.work import HostWork, OutOfStep, Watch, Work

KINDS = GATHER, REDUCE, GATHER_NEARBY = "gather", "reduce", "gather from nearby"
MAX_BUCKETS = 64  # of a unit
PER_UNIT = len(KINDS) * 2 * MAX_BUCKETS  # numbers of events; the number after those of all units ends the pass


class _Label(threading.local):  # a thread may be a rank
    text: str | None = None


_label = _Label()


def current_label() -> str | None:
    """Return the label of the collective that this thread is starting ("gather unit 'blocks.3'"), else None."""
    return _label.text


class Event(NamedTuple):
    """One collective, described once: for the order of the lane, for messages and posts, and for logs and errors.

    Attributes:
        label: "gather unit 'blocks.0'".
        number: equal on all ranks. The tag of messages, the event of a post in shared memory, the entry in the history.
    """

    label: str
    number: int = 0

    @staticmethod
    def of(kind: str, unit: int, name: str, *, bucket: int = 0, full_precision: bool = False) -> Event:
        """Return the event of a unit.

        Args:
            kind: one of ``KINDS``.
            unit: the index of the unit among the units of the lane, equal on all ranks.
            name: of the unit, for the label; it may differ between ranks.
            bucket: the index of the bucket.
            full_precision: whether the message has the dtype of the parameters instead of the usual one.
        """
        number = ((unit * len(KINDS) + KINDS.index(kind)) * 2 + full_precision) * MAX_BUCKETS + bucket
        return Event(f"{kind} {name}{' in full precision' if full_precision else ''}", number)

    @staticmethod
    def parts_of(number: int) -> tuple[int, str, bool]:
        """Return the index of the unit, the kind, and ``full_precision`` of an event of a unit."""
        unit, rest = divmod(number, PER_UNIT)
        kind, full_precision = divmod(rest // MAX_BUCKETS, 2)
        return unit, KINDS[kind], bool(full_precision)


_Read = Callable[[], "tuple[int, int] | None"]  # the result of a vote


class Question:
    """A vote in flight: whether all ranks have the same number, and the largest value of another number.

    Attributes:
        place: the number of the vote among the collectives of the lane.
        unanimous: whether all ranks have given the same value, once there is a result.
    """

    def __init__(self, work: Work, read: _Read, place: int, listener: Callable[[int], None] | None) -> None:
        """``read`` returns the smallest and the largest value once ``work`` is over; ``listener`` is called with the
        largest one if there is one."""
        self._work, self._read, self.place, self._listener = work, read, place, listener
        self.unanimous = False

    def poll(self) -> bool:
        """Return whether the result is there."""
        return self._work.poll()

    def result(self) -> int | None:
        """Wait on the host; return the ``largest`` value of all ranks, or None if their numbers differ."""
        self._work.wait()
        values = self._read()
        if values is None:
            return None
        smallest, largest = values
        self.unanimous = smallest == largest
        if self._listener is not None:
            self._listener(largest)
        return largest


class Issuer(Watch):
    """Issues the collectives of one process group, without a check of their order; a lane adds that, and the waits.

    Attributes:
        device: the device on which the models compute.
        timeout: seconds that a collective may take.
        carrier: the group that carries the collectives; another one after a failure.
        collectives: counts the collectives that this rank has issued, on any transport.
        sharing: the memory that the ranks share, if they do.
        issued: the number of collectives that this rank has issued on carriers.
        in_doubt: the carrier on which a collective raised while it was started: the peers may have a part of it.
        visible: whether collectives go through ``torch.distributed`` although the ranks share memory; None: to choose.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self.device = device
        self.timeout = group_timeout(group).total_seconds()
        self.carrier = Carrier(group)
        self.collectives = Sequence(group, "collectives")
        self.sharing = Sharing.of(group)
        self.issued = 0
        self.in_doubt: Carrier | None = None
        self.visible: bool | None = None
        self._bypasses = False  # whether this pass calls the group's methods instead of torch.distributed's functions
        self._in_pass = False

    @property
    def group(self) -> Any:
        """The user's process group."""
        return self._group()

    def issue(
        self,
        event: Event,
        start: Callable[[], Any],
        *,
        on_host: bool,
        ends_alone: bool = False,
        in_memory: bool = False,
        asynchronous: bool = True,
    ) -> Work:
        """Number a collective, start it, and return the wait for it.

        Args:
            event: describes the collective.
            start: starts it, and returns a handle to wait for, several of them, or None.
            on_host: whether the host waits.
            ends_alone: see :class:`~fsdp.comm.waiting.work.Work`.
            in_memory: whether it goes through shared memory, not through the carrier.
            asynchronous: whether there is a handle to wait for; else the current stream waits.

        Raises:
            OutOfStep: the ranks are out of sync since an earlier collective.
            RuntimeError: the connections are closed.
        """
        carrier = self.carrier
        if not in_memory:
            if carrier.closed:
                raise OutOfStep(carrier.closed)
            self.in_doubt = carrier
        _label.text = event.label
        try:
            handle = start()
            if handle is not None and not asynchronous:
                handle.wait()
                handle = None
        except RuntimeError as error:
            if not in_memory and (closed := carrier.note_error(error, self.timeout)):
                raise RuntimeError(f"{event.label}: {error}{closed}") from error
            raise
        finally:
            _label.text = None
        handles = () if handle is None else handle if isinstance(handle, list) else (handle,)
        self.collectives.number += 1
        number = self.collectives.number
        work = Work(handles, self, event.label, number=number, on_host=on_host, ends_alone=ends_alone)
        if not in_memory:
            if not ends_alone:
                carrier.messages.extend(map(weakref.ref, work.host_works))
            self.issued, self.in_doubt = self.issued + 1, None
        return work

    def collective(
        self, name: str, event: Event, *tensors: Any, asynchronous: bool, control: bool = False, **options: Any
    ) -> Work:
        """Issue the collective ``name`` of ``torch.distributed`` with these ``tensors`` and ``options``.

        ``asynchronous``: whether to wait for a handle; else the current stream waits. ``control``: see
        :meth:`Carrier.serving`.
        """
        on_host, carrier = tensors[0].is_cpu, self.carrier
        key = name, on_host, control, asynchronous, options.get("op")
        route = carrier.routes.get(key) or carrier.new_route(key, tensors[0].device)
        waits_here, asynchronous = route.blocks and not asynchronous, route.blocks or asynchronous
        group = route.beside or carrier.replacement or self._group()
        if route.method and self._bypasses:
            method = getattr(group, route.method)

            def start() -> Any:  # called with its arguments one by one, a method is visible to profilers
                return method(tensors[0], tensors[1], route.options) if tensors[1:] else method(tensors, route.options)
        else:
            start = functools.partial(getattr(dist, name), *tensors, group=group, async_op=asynchronous, **options)
        on_host = on_host or route.blocks
        work = self.issue(event, start, on_host=on_host, ends_alone=route.ends_alone, asynchronous=asynchronous)
        if waits_here:  # in steps, with a look at the peers between them
            work.wait()
        return work

    def gather(self, pairs: Several[tuple[torch.Tensor, torch.Tensor]], event: Event, *, asynchronous: bool) -> Work:
        """Issue the gather of the second tensor of each pair into the first: one collective if the backend can."""
        device, group = pairs[0][0].device, self.carrier.group
        if not asynchronous and native.coalesces(group, device):
            start = functools.partial(native.start_coalesced_gathers, pairs, group)
            return self.issue(event, start, on_host=device.type == "cpu")
        works = [self.collective(ALL_GATHER, event, *pair, asynchronous=asynchronous) for pair in pairs]
        return Work.joined(works)

    def transfer(self, transfers: Several[Transfer], event: Event, device: torch.device) -> Work:
        """Issue all ``transfers``, from and to memory on ``device``, at once."""
        start = functools.partial(native.start_transfers, transfers, self.carrier.group)
        return self.issue(event, start, on_host=device.type == "cpu")

    def in_memory(self, event: Event, starts: Iterable[Callable[[], HostWork]]) -> Work:
        """Issue the operations ``starts`` in the memory that the ranks share."""
        return self.issue(event, lambda: [start() for start in starts], on_host=True, ends_alone=True, in_memory=True)

    def ask(
        self, label: str, number: int, *, largest: int = 0, listener: Callable[[int], None] | None = None
    ) -> Question:
        """Start a vote: do all ranks have the same ``number``, and what is the ``largest`` value of any rank?

        Every vote has the same length: votes of ranks that are out of sync may meet, and gloo aborts the process where
        lengths differ.
        """
        event, on = Event(label), control_device(self.group, self.device)
        channel = self.sharing.resume() if on.type == "cpu" else None
        if channel is not None and not self._is_visible(channel):
            found: list[tuple[int, int]] = []  # the number and the value of each rank
            work = self.in_memory(event, [functools.partial(channel.ask, number, largest, label, found)])

            def from_memory() -> tuple[int, int] | None:
                values = [value for _, value in found]
                return (min(values), max(values)) if {other for other, _ in found} == {number} else None

            return Question(work, from_memory, self.collectives.number, listener)
        votes = torch.tensor([number, -number, -largest, largest], device=on)

        def from_votes() -> tuple[int, int] | None:
            *numbers, smallest, largest = votes.tolist()
            return (-smallest, largest) if numbers == [number, -number] else None

        op = dist.ReduceOp.MAX
        work = self.collective("all_reduce", event, votes, asynchronous=True, control=True, op=op)
        return Question(work, from_votes, self.collectives.number, listener)

    def memory(self) -> Channel | None:
        """Return the memory that the ranks share, if the next collective goes through it."""
        channel = self.sharing.channel
        return None if channel is None or self._is_visible(channel) else channel

    def _is_visible(self, channel: Channel) -> bool:
        """Return whether the next collective goes through ``torch.distributed``, although the ranks share memory.

        That is so if the functions were replaced on all ranks. It is asked at the first collective of a pass or call,
        where all ranks ask, and at each collective outside of passes.
        """
        if not self._in_pass or self.visible is None:
            self.visible = False
            if native.are_replaced():
                self.collectives.number += 1  # this rank is at the next collective, which it has yet to issue
                try:
                    number = self.collectives.number
                    proposal = [channel.propose_elsewhere()]
                    Work(proposal, self, "choose a transport", number=number, ends_alone=True).wait()
                finally:
                    self.collectives.number -= 1
                self.visible = channel.goes_elsewhere()
        return self.visible

    def begin_pass(self) -> None:
        """Choose the transport anew at the next collective, and keep it until :meth:`end_pass`."""
        self._in_pass, self.visible = True, None
        self._bypasses = not native.are_replaced()

    def end_pass(self) -> None:
        """Choose the transport at each collective."""
        self._in_pass = self._bypasses = False

    def abort(self, words: str) -> None:
        """End the collectives in flight; the next one raises OutOfStep with these ``words``, until the ranks met."""
        self.carrier.abort(words)
