"""States of bitsandbytes' 8-bit optimizers as tensors of a quantized class.

Such a state is several plain tensors: ``state1`` has the codes, ``qmap1`` the value of each code, in order, and
``absmax1`` the scale of each block of 256 elements. ``state2`` is alike. ``state_dict()`` of these optimizers hides the
tensors in a dict within the state.

A loaded block gets its largest magnitude for a scale, as in the optimizer's step, so values round once more. In code
books with a sign the greatest value is 1 and the least is -0.993: a block whose largest magnitude was negative gets a
scale that is smaller by 0.7 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

BLOCK = 256
_HIDDEN = "__bnb_optimizer_quant_state__"


class Blocks(torch.Tensor):
    """A state in codes of 8 bits as one tensor of float32, with the methods of a quantized class.

    Attributes:
        parts: the codes, the code book and the scales, by their names in the optimizer.
    """

    parts: dict[str, torch.Tensor]

    @staticmethod
    def __new__(cls, parts: dict[str, torch.Tensor]) -> Blocks:
        codes, _, scales = parts.values()
        made: Blocks = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=scales.device)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a quantized state: use dequantize()")

    def dequantize(self) -> torch.Tensor:
        """Return the values, on the device of the scales."""
        codes, book, scales = self.parts.values()
        values = book[codes.to(scales.device).flatten().int()]  # paged codes are a tensor of the CPU
        return values.mul_(scales.repeat_interleave(BLOCK)[: len(values)]).view(codes.shape)

    def copy_(self, values: torch.Tensor, non_blocking: bool = False) -> Blocks:
        """Quantize ``values`` to the nearest codes, each block with its largest magnitude for a scale."""
        codes, book, scales = self.parts.values()
        flat = values.to(scales).flatten()
        blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True)
        found = torch.bucketize(blocks / largest.where(largest > 0, 1.0), (book[1:] + book[:-1]) / 2, out_int32=True)
        codes.copy_(found.flatten()[: len(flat)].view(codes.shape))
        scales.copy_(largest.flatten())
        return self


def as_tensors(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's states with :class:`Blocks` in place of codes, code books and scales. Hidden tensors stay
    hidden if their codes have another layout."""
    hidden = state.get(_HIDDEN, {})
    found = {name: value for name, value in {**state, **hidden}.items() if name != _HIDDEN}
    for number in ("1", "2"):
        parts = {name: found[name] for kind in ("state", "qmap", "absmax") if (name := kind + number) in found}
        if len(parts) == 3 and _is_known(*parts.values()):
            found = {name: value for name, value in found.items() if name not in parts or name == f"state{number}"}
            found[f"state{number}"] = Blocks(parts)
    return state if any(found[name].dtype == torch.uint8 for name in hidden if name in found) else found


def _is_known(codes: Any, book: Any, scales: Any) -> bool:
    """Return True if the tensors are a state in blocks of 256 elements."""
    shapes = [tuple(book.shape), tuple(scales.shape)]
    blocks = -(-codes.numel() // BLOCK)
    return codes.dtype == torch.uint8 and codes.is_contiguous() and shapes == [(256,), (blocks,)]


def as_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`as_tensors`."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        found.update(value.parts if isinstance(value, Blocks) else {name: value})
    return found
