"""Issuing the collectives of one process group: their numbering, their start, and the choice of the transport.

A collective goes through memory that the ranks share, if they do, else through the carrier of the lane
(:class:`~fsdp.comm.transport.native.Carrier`). Where the functions of ``torch.distributed`` were replaced on all ranks,
by a recorder for instance, everything goes through these functions. That is asked once per pass or call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from concurrent import futures
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fsdp.comm import threads
from fsdp.comm.groups import backend_of, control_device, group_timeout
from fsdp.comm.transport import native
from fsdp.comm.transport.channel import Channel
from fsdp.comm.transport.native import Carrier, Transfer
from fsdp.comm.transport.shared_memory import Sharing
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.comm.waiting.waits import Sequence
from fsdp.comm.waiting.work import HostWork, OutOfStep, TimedOut, Watch, Work

KINDS = GATHER, REDUCE, GATHER_NEARBY = "gather", "reduce", "gather from nearby"
MAX_BUCKETS = 64  # of a unit
PER_UNIT = len(KINDS) * 2 * MAX_BUCKETS  # numbers of events; the number after those of all units ends the pass
NEW_GROUP = "make a new process group (torch.distributed.new_group()), and wrap the model on that"
_CLOSED = "connection closed", "connection reset", "timed out", "pair closure"  # in errors of gloo


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


class Question:
    """A vote in flight: whether all ranks have the same number, and the largest value of another number.

    Attributes:
        place: the number of the vote among the collectives of the lane.
    """

    def __init__(self, work: Work, read: Callable[[], int | None], place: int) -> None:
        """``read`` returns the result once ``work`` is over."""
        self._work, self._read, self.place = work, read, place

    def poll(self) -> bool:
        """Return whether the result is there."""
        return self._work.poll()

    def result(self) -> int | None:
        """Wait on the host; return the ``largest`` value of all ranks, or None if their numbers differ."""
        self._work.wait()
        return self._read()

    def telling(self, listener: Callable[[int], None]) -> Question:
        """Return this vote so that ``result`` also calls ``listener`` with the ``largest`` value, if there is one."""

        def read() -> int | None:
            largest = self._read()
            if largest is not None:
                listener(largest)
            return largest

        return Question(self._work, read, self.place)


class _Route(NamedTuple):
    """How one kind of collective is called: over a side group or the carrier, and by which method of the group.

    Attributes:
        blocks: whether the host waits although the tensors are on an accelerator, as with gloo.
    """

    beside: Any
    ends_alone: bool
    blocks: bool
    method: str
    options: Any


class Issuer(Watch):
    """Issues the collectives of one process group, without a check of their order; a lane adds that, and the waits.

    Attributes:
        device: the device on which the models compute.
        timeout: seconds that a collective may take.
        carrier: the group that carries the collectives.
        collectives: counts the collectives that this rank has issued, on any transport.
        sharing: the memory that the ranks share, if they do.
        issued: the number of collectives that this rank has issued on the carrier.
        epoch: the number of times that the collectives in flight were abandoned.
        due: what the ranks have agreed on last is still to be issued.
        in_doubt: a collective raised while it was started, so that the peers may have a part of it.
        broken: the error of every later collective, until the carrier is replaced.
        visible: whether collectives go through ``torch.distributed`` although the ranks share memory.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self.device = device
        self.timeout = group_timeout(group).total_seconds()
        self.carrier = Carrier(group)
        self.collectives = Sequence(group, "collectives")
        self.sharing = Sharing.of(group)
        self.issued = 0
        self.epoch = 0
        self.due = self.in_doubt = False
        self.broken: OutOfStep | None = None
        self.visible = False
        self._routes: dict[tuple[str, bool, bool, bool, Any], _Route] = {}  # see ``_new_route``
        self._bypasses = False  # whether this pass calls the group's methods instead of torch.distributed's functions
        self._in_pass = self._way_is_chosen = False  # see ``_is_visible``
        self._messages: deque[weakref.ref[HostWork]] = deque(maxlen=64)  # the latest exchanges
        self._held: list[HostWork] = []  # exchanges in flight when a pass failed

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
        if not in_memory:
            if self.broken is not None:
                raise OutOfStep(str(self.broken))
            self.in_doubt = True
        _label.text = event.label
        try:
            handle = start()
            if handle is not None and not asynchronous:
                handle.wait()
                handle = None
        except RuntimeError as error:
            if not in_memory and (closed := self._note_closed(error)):
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
                self._messages.extend(map(weakref.ref, work.host_works))
            self.issued, self.in_doubt = self.issued + 1, False
        self.due = False
        return work

    def collective(
        self, name: str, event: Event, *tensors: Any, asynchronous: bool, control: bool = False, **options: Any
    ) -> Work:
        """Issue the collective ``name`` of ``torch.distributed`` with these ``tensors`` and ``options``.

        ``asynchronous``: whether to wait for a handle; else the current stream waits. ``control``: see
        :meth:`Carrier.serving`.
        """
        on_host = tensors[0].is_cpu
        key = name, on_host, control, asynchronous, options.get("op")
        route = self._routes.get(key) or self._new_route(key, tensors[0].device)
        waits_here, asynchronous = route.blocks and not asynchronous, route.blocks or asynchronous
        group = route.beside or self.carrier.replacement or self._group()
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

    def _new_route(self, key: tuple[str, bool, bool, bool, Any], device: torch.device) -> _Route:
        """Find how a kind of collective is called; the result serves until the carrier is replaced."""
        name, _, control, asynchronous, op = key
        group = self.carrier.serving(device, control=control)
        backend = backend_of(group, device)
        ends_alone = backend == "fake" or (backend == "gloo" and name != REDUCE_SCATTER)
        beside = None if group is self.carrier.group else group  # the user's group is not kept alive here
        blocks = backend == "gloo" and device.type != "cpu"
        method = native.method_of(name, group, asynchronous=asynchronous or blocks, op=op)
        route = _Route(beside, ends_alone, blocks, *method)
        self._routes[key] = route
        return route

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

    def ask(self, label: str, number: int, *, largest: int = 0) -> Question:
        """Start a vote: do all ranks have the same ``number``, and what is the ``largest`` value of any rank?

        Every vote has the same length: votes of ranks that are out of sync may meet, and gloo aborts the process where
        lengths differ.
        """
        event, on = Event(label), control_device(self.group, self.device)
        channel = self.sharing.resume() if on.type == "cpu" else None
        if channel is not None and not self._is_visible(channel):
            found: list[tuple[int, int]] = []  # the number and the value of each rank
            work = self.in_memory(event, [functools.partial(channel.ask, number, largest, label, found)])

            def from_memory() -> int | None:
                return max(value for _, value in found) if {other for other, _ in found} == {number} else None

            return Question(work, from_memory, self.collectives.number)
        votes = torch.tensor([number, -number, largest], device="cpu").to(on)

        def from_votes() -> int | None:
            *numbers, value = votes.tolist()
            return int(value) if numbers == [number, -number] else None

        op = dist.ReduceOp.MAX
        work = self.collective("all_reduce", event, votes, asynchronous=True, control=True, op=op)
        return Question(work, from_votes, self.collectives.number)

    def memory(self) -> Channel | None:
        """Return the memory that the ranks share, if the next collective goes through it."""
        channel = self.sharing.channel
        return None if channel is None or self._is_visible(channel) else channel

    def _is_visible(self, channel: Channel) -> bool:
        """Return whether the next collective goes through ``torch.distributed``, although the ranks share memory.

        That is so if the functions were replaced on all ranks. It is asked at the first collective of a pass or call,
        where all ranks ask, and at each collective outside of passes.
        """
        if not (self._in_pass and self._way_is_chosen):
            self._way_is_chosen, self.visible = True, False
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
        self._in_pass, self._way_is_chosen = True, False
        self._bypasses = not native.are_replaced()

    def end_pass(self) -> None:
        """Choose the transport at each collective."""
        self._in_pass = self._bypasses = False

    # -- connections ---------------------------------------------------------------------------------------------------

    def hold_messages(self) -> None:
        """Keep the messages in flight: gloo closes a connection when a message arrives whose memory is gone."""
        self._held += [work for work in (reference() for reference in self._messages) if work is not None]
        self._messages.clear()

    def finish_messages(self) -> None:
        """Wait for the messages that were held: all ranks have issued the same."""
        for work in self._held:
            Work([work], self, "finish messages", ends_alone=True).wait()
        self._held.clear()

    def replace_carrier(self, look: Callable[[], None]) -> None:
        """Connect a new group over the same ranks, which all call; ``look`` is called while they connect.

        Raises:
            RuntimeError: the ranks cannot connect.
        """
        made = self.carrier.replace(f"after failure {self.carrier.number + 1}")
        while not futures.wait([made], threads.PATIENCE.total_seconds()).done:
            look()
        try:
            self.carrier.use(made)
        except (NotImplementedError, OSError, RuntimeError) as error:
            why = f"the ranks were out of step, and cannot connect anew over the same ranks: {error}"
            raise RuntimeError(f"{why}. Therefore {NEW_GROUP}") from error
        self._routes.clear()
        self.epoch += 1
        self.broken, self.in_doubt = None, False
        self._held.clear()

    def _note_closed(self, error: Exception) -> str:
        """Note that gloo has closed the connections, as it does for good when a collective timed out.

        Returns words for the error message, or "" if ``error`` has a different cause.
        """
        says_so = isinstance(error, TimedOut) or any(words in str(error).lower() for words in _CLOSED)
        if not says_so or self.carrier.backend(torch.device("cpu")) != "gloo":
            return ""
        why = (
            "the connections of this process group are closed, for a rank has failed, or came later than the group's "
            f"timeout ({self.timeout:.0f} s)"
        )
        self.broken = OutOfStep(f"{why}: {NEW_GROUP}; or start again, and resume from the last checkpoint")
        return f". From now on {why}. The next forward or call of the model, on all ranks, makes new ones"

    def abort(self, words: str) -> None:
        """End the collectives in flight; the next one raises OutOfStep with these ``words``, until the ranks met."""
        self.broken = OutOfStep(words)
        self.carrier.abort()
