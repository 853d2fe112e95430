"""The memory of full and reduce buffers: tensors that outlive it, and the pools that it comes from.

See [Note: Permanent tensors, pooled memory] in ``full_copy.py``. This file alone resizes or exchanges storages;
``released.py`` sets up what they hold meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp import environment
from fsdp.comm import host_memory, shared_memory
from fsdp.comm.collectives import may_share
from fsdp.comm.segment import Segment
from fsdp.comm.streams import StreamEvent, Streams
from fsdp.comm.versions import STORAGES_SWAP
from fsdp.flat.released import guard_released

_NO_MATTER = 1 << 20  # bytes: new memory that ranks share costs more than to keep these


class PooledTensor:
    """A 1-D tensor whose identity and views are permanent while its memory comes from a :class:`MemoryPool`."""

    __slots__ = ("_block", "_storage", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Takes ``tensor`` over and releases its memory; its contents are lost."""
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()
        self._block: torch.UntypedStorage | None = None
        self._storage: Any = tensor.untyped_storage()
        self._storage.resize_(0)
        if STORAGES_SWAP and self.nbytes:
            guard_released(tensor, self.nbytes)

    @property
    def has_block(self) -> bool:
        """Whether its memory is a block of a pool that exchanges them."""
        return self._block is not None

    def attach(self, block: torch.UntypedStorage) -> None:
        self._storage._swap_data_ptr_(block)
        self._block = block

    def detach(self) -> torch.UntypedStorage:
        block, self._block = self._block, None
        assert block is not None
        self._storage._swap_data_ptr_(block)
        return block


class MemoryPool:
    """Allocates memory for :class:`PooledTensor` s and keeps a bounded amount of what came back for the next one.

    All calls happen on the stream that owns the pool, which waits for a returned block's last use before using it
    again (see [Note: Memory across streams]). Fresh memory costs page faults on CPU, several times the price of a
    reused block.

    Attributes:
        kept_nbytes: how much returned memory to keep.
        kept_block_nbytes: the largest block to keep; larger ones serve hardly any buffer.
        exchanges_blocks: whether buffers get blocks that others have given back; else storages are resized, and nothing
            is kept.
    """

    def __init__(self, device: torch.device, streams: Streams, group: Any = None) -> None:
        """``group``: whose ranks may read the memory."""
        self.kept_nbytes = self.kept_block_nbytes = 0
        self.exchanges_blocks = STORAGES_SWAP
        self._device = device
        self._streams = streams
        self._group = group
        self._free: list[tuple[torch.UntypedStorage, int, StreamEvent]] = []  # blocks, bytes and last use, oldest first
        self._free_nbytes = 0  # of all these

    def keep_up_to(self, nbytes: int, *, largest_block: int) -> None:
        """Keep at most ``nbytes`` of returned memory, in blocks of at most ``largest_block`` bytes."""
        self.kept_nbytes, self.kept_block_nbytes = nbytes, largest_block

    def allocate(self, buffer: PooledTensor) -> None:
        """Give ``buffer`` memory, with undefined contents."""
        if buffer.nbytes == 0:
            return
        if not self.exchanges_blocks:
            buffer.tensor.untyped_storage().resize_(buffer.nbytes)
            return
        # A small buffer in a large block would make the next large one ask for more.
        wanted = buffer.nbytes
        fitting = largest = 2 * wanted + 1
        place = 0
        if self._free and self._free[0][1] == wanted:  # nearly always
            fitting = wanted
        else:
            for position, (_, nbytes, _) in enumerate(self._free):
                if wanted <= nbytes < fitting:
                    fitting, place = nbytes, position
        if fitting < largest:
            block, _, last_use = self._free.pop(place)
            self._free_nbytes -= fitting
            if last_use is not None:
                self._streams.wait(last_use)
        else:
            self._shrink_to(self.kept_nbytes - wanted)
            block = self._new_block(wanted)
        buffer.attach(block)

    def may_refill(self, buffer: PooledTensor) -> bool:
        """Whether nobody reads what is in ``buffer``'s memory any more; else it gets other memory first."""
        lent = shared_memory.lent_at(buffer.tensor.data_ptr())
        return lent is None or lent.is_read

    def free(self, buffer: PooledTensor, last_use: StreamEvent) -> None:
        """Take ``buffer``'s memory; other streams have used it until ``last_use``. Idempotent: whoever was interrupted
        here, where a pool may wait for other ranks, calls it again."""
        if buffer.nbytes == 0:
            return
        if not self.exchanges_blocks:
            self._streams.wait(last_use)  # the allocator may hand it out on this stream at once
            buffer.tensor.untyped_storage().resize_(0)
            return
        if not buffer.has_block:
            return
        block = buffer.detach()
        nbytes = block.nbytes()
        self._free.append((block, nbytes, last_use))
        self._free_nbytes += nbytes
        if nbytes > self.kept_block_nbytes or self._free_nbytes > self.kept_nbytes:
            self._shrink_to(self.kept_nbytes)

    def trim(self) -> None:
        """Give the kept blocks back to the allocator, and to the system what other ranks have read. Those of its
        ``group`` are about to: they trim theirs at the same place."""
        self._shrink_to(0)
        if self._device.type == "cpu" and (segment := shared_memory.segment()) is not None:
            segment.trim(patient=shared_memory.known_channel(self._group) is not None)

    def rest(self) -> None:
        """``trim``, but what the next pass will want may stay for a while."""
        self.trim()

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of such memory as the buffers have, for users to hold."""
        return host_memory.empty(numel, dtype=dtype, device=device)

    def _new_block(self, nbytes: int) -> torch.UntypedStorage:
        return host_memory.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()

    def _shrink_to(self, nbytes: int) -> None:
        too_large = [i for i, (_, each, _) in enumerate(self._free) if each > self.kept_block_nbytes]
        while too_large or (self._free and self._free_nbytes > nbytes):
            # what is too large to keep at all would only push out the others; else the oldest goes
            _, freed, last_use = self._free.pop(too_large.pop() if too_large else 0)
            self._streams.wait(last_use)  # the allocator may hand it out on this stream at once
            self._free_nbytes -= freed


class SharedPool(MemoryPool):
    """Allocates what the other ranks of a group can read, once they share memory. Its blocks know who still reads them,
    so the segment keeps them."""

    def __init__(self, device: torch.device, streams: Streams, group: Any) -> None:
        super().__init__(device, streams, group)
        self._channel: shared_memory.Channel | None = None  # once the group's ranks have decided to have one

    @property
    def _segment(self) -> Segment | None:
        """Where the memory is, if the ranks share some."""
        channel = self._channel
        if channel is None:
            channel = self._channel = shared_memory.known_channel(self._group)
        return channel.segment if channel is not None and channel.usable else None

    def allocate(self, buffer: PooledTensor) -> None:
        segment = self._segment
        if segment is None or buffer.nbytes == 0:
            super().allocate(buffer)
        else:
            buffer.attach(segment.allocate(buffer.nbytes))

    def rest(self) -> None:
        if self._segment is None:
            self.trim()

    def free(self, buffer: PooledTensor, last_use: StreamEvent) -> None:
        if buffer.nbytes and (segment := self._segment) is not None:
            if buffer.has_block:
                segment.free(buffer.detach())
            # for the pool of the tree's reductions as well
            segment.keep(max(2 * self.kept_nbytes, _NO_MATTER), max(self.kept_block_nbytes, _NO_MATTER))
        else:
            super().free(buffer, last_use)

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        segment = self._segment
        if segment is None or numel == 0:
            return super().empty(numel, dtype=dtype, device=device)
        storage = segment.allocate(numel * dtype.itemsize, keep=False)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,))  # type: ignore[call-overload]


class PoisoningPool(MemoryPool):
    """For debugging (``FSDP_DEBUG=1``): returned buffers keep their memory, filled with NaN, so that a use after
    release shows as NaN at the place that did it instead of a crash or another unit's weights."""

    def allocate(self, buffer: PooledTensor) -> None:
        if buffer.tensor.untyped_storage().nbytes() < buffer.nbytes:
            super().allocate(buffer)

    def free(self, buffer: PooledTensor, last_use: StreamEvent) -> None:
        self._streams.wait(last_use)
        tensor = buffer.tensor
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(-1 if tensor.dtype.is_signed else 1)


def pool_for(device: torch.device, streams: Streams, group: Any) -> MemoryPool:
    """A pool for ``device``, of memory that the ranks of ``group`` (None: of no group) may share; a poisoning one under
    ``FSDP_DEBUG=1``."""
    if environment.DEBUG.value:
        return PoisoningPool(device, streams)
    if group is not None and STORAGES_SWAP and streams.asynchronous_work and may_share(group, device):
        return SharedPool(device, streams, group)
    return MemoryPool(device, streams)
