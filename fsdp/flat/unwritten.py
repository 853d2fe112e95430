"""Buffers that were allocated from the meta device and that nobody has written: they hold arbitrary memory.

A buffer that is not persistent, such as a table of positions, is in no file. ``to_empty()`` gives it memory, and its
values are lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp.comm.user_warnings import warn_user
from fsdp.flat.names import clean

_MARK = "_fsdp_unwritten"  # an attribute of tensors; a write in place counts up the tensor's version
_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}


class MarkEmpty(TorchDispatchMode):
    """A mode in which tensors that are allocated without values are marked as unwritten."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            setattr(result, _MARK, True)
        return result


def is_unwritten(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, _MARK) and not tensor.is_inference() and tensor._version == 0


def moved(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``buffer`` on ``device``, with the mark if it is unwritten."""
    result = buffer.to(device)
    if is_unwritten(buffer):
        setattr(result, _MARK, True)
    return result


def warn_of_unwritten(model: nn.Module, call: str) -> None:
    """Warn of the unwritten buffers of ``model`` after ``call``, which has loaded it."""
    buffers = model.named_buffers()
    if names := [repr(clean(name)) for name, buffer in buffers if buffer.numel() and is_unwritten(buffer)]:
        warn_user(
            f"{call}: the files do not have the buffers {', '.join(names)}, and they hold arbitrary values, for nobody "
            "has written them since param_init_fn gave them memory. Compute them there, or before the model is used, "
            "as the constructors of their modules do"
        )
