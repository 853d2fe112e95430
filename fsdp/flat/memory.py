"""Permanent tensors of full and reduce buffers, and the pools that lend them memory.

See [Note: Permanent tensors, pooled memory] in ``full_copy.py``. This file alone resizes or exchanges storages;
``released.py`` sets up storages without memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from fsdp import environment
from fsdp.comm import host_memory
from fsdp.comm.collectives import may_share
from fsdp.comm.streams import StreamEvent, Streams
from fsdp.comm.transport import shared_memory
from fsdp.comm.transport.channel import Channel
from fsdp.comm.versions import STORAGES_SWAP
from fsdp.flat.released import guard_released

_ALWAYS_KEPT = 1 << 20  # bytes: new shared memory costs more than keeping these


class PooledTensor:
    """A 1-D tensor with permanent identity and views, whose memory a :class:`MemoryPool` lends."""

    __slots__ = ("_block", "_storage", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take ``tensor`` over and release the memory; the values are lost."""
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()
        self._block: torch.UntypedStorage | None = None
        self._storage: Any = tensor.untyped_storage()
        self._storage.resize_(0)
        if STORAGES_SWAP and self.nbytes:
            guard_released(tensor, self.nbytes)

    def attach(self, block: torch.UntypedStorage) -> None:
        """Use the memory of ``block``."""
        # in one line: an interrupt must leave both or neither
        _, self._block = self._storage._swap_data_ptr_(block), block

    def detach(self) -> torch.UntypedStorage | None:
        """Return the block in use, which has its memory again; None without one. Idempotent."""
        block = self._block
        if block is not None:
            _, self._block = self._storage._swap_data_ptr_(block), None
        return block

    @property
    def has_memory(self) -> bool:
        return self._block is not None if STORAGES_SWAP else self._storage.nbytes() > 0


class MemoryPool:
    """A pool that allocates memory for :class:`PooledTensor` s and keeps a bounded amount of returned memory.

    All calls are made on the stream that owns the pool. It waits for the last use of a returned block before the next
    use (see [Note: Memory across streams]). Fresh memory costs page faults on CPU, several times the price of a reused
    block.

    Attributes:
        kept_nbytes: the bytes of returned memory to keep.
        kept_block_nbytes: the largest block to keep; larger ones fit few buffers.
        exchanges_blocks: whether buffers get returned blocks; else storages are resized, and no memory is kept.
    """

    def __init__(self, device: torch.device, streams: Streams, group: ProcessGroup | None = None) -> None:
        """The ranks of ``group`` may read the memory."""
        self.kept_nbytes = self.kept_block_nbytes = 0
        self.exchanges_blocks = STORAGES_SWAP
        self._device = device
        self._streams = streams
        self._group = group
        self._free: list[tuple[torch.UntypedStorage, int, StreamEvent]] = []  # blocks, bytes and last use, oldest first
        self._free_nbytes = 0

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
        # With a small buffer in a large block, the next large buffer would need new memory.
        needed = buffer.nbytes
        best = limit = 2 * needed + 1
        chosen = 0
        if self._free and self._free[0][1] == needed:  # nearly always
            best = needed
        else:
            for position, (_, nbytes, _) in enumerate(self._free):
                if needed <= nbytes < best:
                    best, chosen = nbytes, position
        if best < limit:
            block, _, last_use = self._free.pop(chosen)
            self._free_nbytes -= best
            if last_use is not None:
                self._streams.wait(last_use)
        else:
            self._shrink_to(self.kept_nbytes - needed)
            block = host_memory.empty(needed, dtype=torch.uint8, device=self._device).untyped_storage()
        buffer.attach(block)

    def may_refill(self, buffer: PooledTensor) -> bool:
        """Whether ``buffer`` may be filled again in the same memory, which no peer reads any more."""
        lent = shared_memory.lent_at(buffer.tensor.data_ptr())
        return lent is None or lent.is_read

    def free(self, buffer: PooledTensor, last_use: StreamEvent) -> None:
        """Take the memory of ``buffer`` back, which a stream has used until ``last_use``. Idempotent: after an
        interrupt, which may happen while a pool waits for peers, the call is repeated."""
        if buffer.nbytes == 0:
            return
        if not self.exchanges_blocks:
            self._streams.wait(last_use)  # the allocator may hand it out on this stream at once
            buffer.tensor.untyped_storage().resize_(0)
            return
        block = buffer.detach()
        if block is None:
            return
        nbytes = block.nbytes()
        self._free.append((block, nbytes, last_use))
        self._free_nbytes += nbytes
        if nbytes > self.kept_block_nbytes or self._free_nbytes > self.kept_nbytes:
            self._shrink_to(self.kept_nbytes)

    def trim(self) -> None:
        """Return the kept blocks to the allocator, and shared memory that the peers have read to the system. The
        ranks of the group trim at the same point."""
        self._shrink_to(0)
        if self._device.type == "cpu" and (segment := shared_memory.segment()) is not None:
            segment.trim(shared_memory.known_channel(self._group))

    def rest(self) -> None:
        """Trim at the end of a pass. Memory for the next pass may stay for a while."""
        self.trim()

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a tensor of the same kind of memory, for users to hold."""
        return host_memory.empty(numel, dtype=dtype, device=device)

    def _shrink_to(self, nbytes: int) -> None:
        too_large = [i for i, (_, each, _) in enumerate(self._free) if each > self.kept_block_nbytes]
        while too_large or (self._free and self._free_nbytes > nbytes):
            # first the blocks that are too large to keep, then the oldest
            _, freed, last_use = self._free.pop(too_large.pop() if too_large else 0)
            self._streams.wait(last_use)  # the allocator may hand it out on this stream at once
            self._free_nbytes -= freed


class SharedPool(MemoryPool):
    """A pool of memory that the peers in a group can read, once they share memory. The segment keeps the blocks,
    because it tracks which ranks still read them."""

    def __init__(self, device: torch.device, streams: Streams, group: ProcessGroup | None) -> None:
        super().__init__(device, streams, group)
        self._channel: Channel | None = None  # once the group's ranks have agreed on one

    @property
    def _readers(self) -> Channel | None:
        """The ranks, if they share memory."""
        channel = self._channel
        if channel is None:
            channel = self._channel = shared_memory.known_channel(self._group)
        return channel if channel is not None and channel.usable else None

    def allocate(self, buffer: PooledTensor) -> None:
        readers = self._readers
        if readers is None or buffer.nbytes == 0:
            super().allocate(buffer)
        else:
            buffer.attach(readers.segment.allocate(buffer.nbytes, readers))

    def rest(self) -> None:
        if self._readers is None:
            self.trim()

    def free(self, buffer: PooledTensor, last_use: StreamEvent) -> None:
        if buffer.nbytes and (readers := self._readers) is not None:
            if (block := buffer.detach()) is not None:
                readers.segment.free(block)
            # twice as much, for the pool of the tree's reductions
            nbytes, block_nbytes = max(2 * self.kept_nbytes, _ALWAYS_KEPT), max(self.kept_block_nbytes, _ALWAYS_KEPT)
            readers.segment.keep(nbytes, block_nbytes, readers)
        else:
            super().free(buffer, last_use)

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        readers = self._readers
        if readers is None or numel == 0:
            return super().empty(numel, dtype=dtype, device=device)
        storage = readers.segment.allocate(numel * dtype.itemsize, readers)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,))  # type: ignore[call-overload]


class PoisoningPool(MemoryPool):
    """A pool for debugging (``FSDP_DEBUG=1``): returned buffers keep their memory, filled with NaN. A use after release
    shows as NaN, instead of a crash or another unit's weights."""

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


def pool_for(device: torch.device, streams: Streams, group: ProcessGroup | None) -> MemoryPool:
    """Make a pool for ``device``, of memory that the ranks of ``group`` (None: of no group) may share; a poisoning one
    under ``FSDP_DEBUG=1``."""
    if environment.DEBUG.value:
        return PoisoningPool(device, streams)
    if group is not None and STORAGES_SWAP and streams.asynchronous_work and may_share(group, device):
        return SharedPool(device, streams, group)
    return MemoryPool(device, streams)
