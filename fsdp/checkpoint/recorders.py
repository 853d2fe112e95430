"""What ``nn.Module`` meets while it loads a state dict: stand-ins for parameters, and for what it would trip over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

_SAME_VALUES: tuple[Any, ...] = (getattr(torch.Tensor.data, "__get__"), torch.Tensor.detach)  # noqa: B009, mypy


class Recorder(torch.Tensor):
    """Stands for a parameter while a state dict is loaded: ``copy_`` notes its argument as ``source``."""

    source: torch.Tensor | None
    _is_param: bool

    @staticmethod
    def __new__(
        cls, dtype: torch.dtype, shape: Sequence[int], device: torch.device, *, requires_grad: bool
    ) -> Recorder:
        recorder: Recorder = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        recorder.source = None
        recorder._is_param = True  # an nn.Parameter, as far as nn.Module is concerned
        return recorder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], Recorder):
            into, source = args[0], args[1]
            if into.shape != source.shape:
                raise RuntimeError(f"a tensor of shape {tuple(source.shape)} for one of shape {tuple(into.shape)}")
            if source is not into:
                into.source = torch.detach(source)  # what is not loaded yet has no such method
            return into
        if func in _SAME_VALUES:  # what is copied into these counts as well
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} on a parameter while a state dict is loaded into a sharded module: only copy_() of the whole "
            "parameter is possible. For more, load inside FullyShardedDataParallel.summon_full_params"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorder(shape={tuple(self.shape)}, dtype={self.dtype})"


class Opaque(torch.Tensor):
    """A ``ShardedTensor`` as ``nn.Module`` may look at it: that type warns when it is asked for its shape."""

    sharded: ShardedTensor

    @staticmethod
    def __new__(cls, sharded: ShardedTensor) -> Opaque:
        metadata = sharded.metadata()
        opaque: Opaque = torch.Tensor._make_wrapper_subclass(
            cls, metadata.size, dtype=metadata.tensor_properties.dtype, device=torch.device("cpu")
        )
        opaque.sharded = sharded
        return opaque

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Opaque(args[0].sharded)
        raise RuntimeError(f"{func} on a ShardedTensor that is being loaded")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Opaque(ShardedTensor of shape {tuple(self.shape)})"
