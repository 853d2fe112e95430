"""The full buffers of one unit: for which forward they were filled, and what keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp.comm.collectives import Communicator, Event
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import BufferState
from fsdp.flat.snapshot import Values


class FullBuffers:
    """The full buffers of one unit, one per bucket. ``Unsharder`` fills and releases them.

    Attributes:
        communicator: of the unit's groups; None before the unit is in a tree.
        nearby: of the consecutive ranks that the unit stays sharded over after forward, if the policy names a number.
        events: of the gather, by bucket; the first one also of the gather of all buckets together.
        generation: the forward of the tree for which the buffers were filled last.
        kept: the values of the shards when a backward left the buffers gathered; else None.
        in_output: the last forward returned a parameter, which has to stay readable.
    """

    def __init__(self, handles: Sequence[FlatParamHandle]) -> None:
        self.communicator: Communicator | None = None
        self.nearby: Communicator | None = None
        self.events: list[Event] = []
        self.generation = -1
        self.kept: list[Values] | None = None
        self.in_output = False
        self._handles = handles
        self._lists: Callable[[bool], list[Any] | None] | None = None

    def connect(self, communicator: Communicator, nearby: Communicator | None) -> None:
        """Gather over these communicators."""
        self.communicator, self.nearby = communicator, nearby

    def set_events(self, events: list[Event]) -> None:
        """Gather under these events."""
        self.events = events

    def set_lists(self, lists: Callable[[bool], list[Any] | None]) -> None:
        """Prefetch the units that ``lists`` returns for the forward, or with True for the backward; with None, the
        recorded ones."""
        self._lists = lists

    def listed(self, backward: bool) -> list[Any] | None:
        """Return the units that the user has listed for prefetching; None where there is no list."""
        return None if self._lists is None else self._lists(backward)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Whether the full buffers have memory of their own."""
        for handle in self._handles:
            if handle.copy.pooled is not None:
                return True
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffers, as far as they have memory of their own."""
        return sum(handle.full_nbytes for handle in self._handles)

    @property
    def has_nearby_source(self) -> bool:
        """Whether the next gather reads the slices that the nearby ranks have kept."""
        return self.nearby is not None and bool(self._handles) and all(handle.has_slice for handle in self._handles)

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is under way."""
        return any(handle.copy.state is BufferState.GATHERING for handle in self._handles)

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffers have memory (a gather may still be under way). Always true of a unit that is not
        sharded."""
        for handle in self._handles:
            if handle.copy.state is BufferState.SHARDED:
                return False
        return True

    # -- changes -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the full buffers are filled (for the current stream)."""
        for handle in self._handles:
            handle.wait()

    def note_filled(self, generation: int) -> None:
        """Note that the buffers are filled for forward ``generation``."""
        self.generation, self.kept = generation, None

    def note_current(self, generation: int) -> None:
        """Note that the values are those of forward ``generation`` as well."""
        self.generation = generation

    def note_kept(self, values: list[Values]) -> None:
        """Note that the buffers stay filled with these ``values``, one per bucket."""
        self.kept = values

    def has_kept(self, values: list[Values]) -> bool:
        """Whether the buffers stayed filled with these ``values``."""
        return self.kept is not None and all(now.are_those_in(then) for now, then in zip(values, self.kept))

    def distrust(self) -> None:
        """Let the next forward gather again, even if no version has changed."""
        self.kept = None

    def set_in_output(self, in_output: bool) -> None:
        """Note whether an output of the last forward lies in the buffers."""
        self.in_output = in_output

    def forget_sources(self) -> None:
        """Let the next gather read the shards, which may have changed."""
        for handle in self._handles:
            handle.forget_source()
