"""A shard's part of a tensor as rectangles: sharded state without communication.

A rank's shard of a flat vector contains one interval of a parameter's elements, which is a few rectangles of the
parameter (see :mod:`fsdp.placement.boxes`). ``torch.distributed.checkpoint`` saves rectangles, and loads any rectangle
from any set of rectangles that covers it. So each rank writes its own elements and reads the elements that it needs,
without communication of tensor data. :class:`RaggedTensor` is the value in a state dict for such a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from fsdp.flat.layout import contiguous_stride
from fsdp.placement.boxes import Box, Part, box_view, rectangles

if TYPE_CHECKING:  # imports torch's FSDP; the callers of the methods below have imported it
    import torch.distributed.checkpoint
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class RaggedTensor(torch.Tensor):
    """A tensor of which this rank holds the elements of one flat interval, counted in memory order.

    Shape, dtype and device are those of the whole tensor; ``local`` (1-D) contains the elements ``start`` to ``end``.
    ``torch.distributed.checkpoint`` saves the rectangles in ``boxes`` and loads into the memory of ``local``. Copies
    (``detach``, ``clone``, ``to``, ``copy_`` from a tensor of the same interval, ``copy.deepcopy``) work on ``local``.
    Every other operation raises, since the other elements are elsewhere.

    With tensor parallelism the interval counts the elements of the box ``within``, a part of the whole tensor.
    ``saved_elsewhere`` is true on all but the first of the ranks of tensor parallelism that hold equal values.
    ``replicas`` are the global ranks that hold the same interval.
    """

    local: torch.Tensor
    start: int
    boxes: tuple[Box, ...]
    origin: Any
    within: Box
    saved_elsewhere: bool
    replicas: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        shape: Sequence[int],
        start: int,
        stride: Sequence[int] | None = None,
        origin: Any = None,
        *,
        within: Box | None = None,
        saved_elsewhere: bool = False,
        replicas: tuple[int, ...] = (),
    ) -> RaggedTensor:
        """Wrap ``local``, which is kept, not copied.

        Args:
            stride: strides of the whole tensor; None means row-major.
            origin: any object that identifies the tensor for the maker; copies keep it.

        Raises:
            ValueError: ``local`` is not 1-D, or the interval does not lie in the tensor.
        """
        if local.dim() != 1:
            raise ValueError(
                f"expected the elements of a flat interval, but got a tensor of shape {tuple(local.shape)}"
            )
        shape = tuple(shape)
        strides = contiguous_stride(shape) if stride is None else tuple(stride)
        within = within or Box.whole(shape)
        boxes = rectangles(shape, start, start + local.numel(), strides, within)
        self: RaggedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, 0, dtype=local.dtype, device=local.device
        )
        self.local, self.start, self.boxes, self.origin = local.detach(), start, boxes, origin
        self.within, self.saved_elsewhere, self.replicas = within, saved_elsewhere, replicas
        return self

    def with_local(self, local: torch.Tensor, origin: Any = None) -> RaggedTensor:
        """Return a tensor of the same interval whose elements on this rank are ``local``."""
        place: Any = {"within": self.within, "saved_elsewhere": self.saved_elsewhere, "replicas": self.replicas}
        return RaggedTensor(local, self.shape, self.start, self.stride(), origin, **place)

    @property
    def end(self) -> int:
        return self.start + self.local.numel()

    @property
    def interval(self) -> tuple[Any, ...]:
        """The identity of these elements: shape, memory order and box of the tensor, start and end."""
        return self.shape, self.stride(), self.within, self.start, self.end

    @property
    def parts(self) -> list[Part]:
        """Each box of ``boxes`` with a view of ``local`` in the shape of the box."""
        starts = accumulate((box.numel for box in self.boxes), initial=0)
        return [(box, box_view(self.local, box, start, self.stride())) for box, start in zip(self.boxes, starts)]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):  # the staging copy of async_save
            func, args = _aten.empty_like.default, args[:1]
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        ragged: list[RaggedTensor] = [value for value in tensors if isinstance(value, RaggedTensor)]
        alike = len(ragged) == len(tensors) and all(other.interval == ragged[0].interval for other in ragged)
        if func not in _ELEMENTWISE or not alike:
            raise RuntimeError(
                f"{func} on a RaggedTensor of shape {tuple(ragged[0].shape)}: this rank holds only its elements "
                f"{ragged[0].start} to {ragged[0].end}, in .local. Save it with torch.distributed.checkpoint, or ask "
                "for a full state dict"
            )
        if kwargs.get("memory_format") is not None:
            kwargs["memory_format"] = torch.preserve_format
        local = func(*tree_map(lambda v: v.local if isinstance(v, RaggedTensor) else v, args), **kwargs)
        if func is torch.ops.aten.copy_.default:
            return ragged[0]
        return ragged[0].with_local(local, ragged[0].origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"elements {self.start} to {self.end})"
        )

    # -- the protocol of torch.distributed.checkpoint ------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        metadata, planner = torch.distributed.checkpoint.metadata, torch.distributed.checkpoint.planner
        properties = metadata.TensorProperties.create_from_tensor(self.local)
        items: list[WriteItem] = []
        for chunk in [] if self.saved_elsewhere else self.__create_chunk_list__():
            index = metadata.MetadataIndex(fqn, chunk.offsets)
            data = planner.TensorWriteData(chunk, properties, torch.Size(self.shape))
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = torch.distributed.checkpoint.metadata.ChunkStorageMetadata
        return [chunk(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in self._saved_parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, view in self._saved_parts:
            if index.offset is None or torch.Size(box.offsets) == index.offset:
                return view
        raise ValueError(f"{index.fqn!r}: no part of it on this rank starts at {index.offset}")

    @property
    def _saved_parts(self) -> list[Part]:
        """``parts``, or one empty part for a tensor without elements, so that a checkpoint contains it."""
        return self.parts if self.numel() else [(Box.whole(self.shape), self.local.view(self.shape))]


_aten = torch.ops.aten
_ELEMENTWISE: set[Callable[..., Any]] = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.zero_.default,
}
