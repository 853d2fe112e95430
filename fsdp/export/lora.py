"""``lora``: merge low-rank adapters into the gathered weights of their base layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp.flat.names import plain_modules

_BASE, _ORIGINAL, _SAVED = ".base_layer.", ".original_module.", ".modules_to_save."
_PREFIX = "base_model.model."


def lora(model: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge the active LoRA adapters of PEFT's layers, for ``merge=`` of :func:`fsdp.export.weights`.

    A base weight becomes ``base + scaling * B @ A``. The three are gathered in the dtype of the stream, the sum is
    computed in float32 (float64 for float64 weights), and the result is rounded to the dtype of the stream. So a bf16
    stream of float32 weights may differ in the last place from ``merge_and_unload().bfloat16()``; for equal bits,
    stream without ``dtype``, and cast what comes. The gathered copy is changed; shards stay as they are. Names are
    those of the base model. Adapters are left out, and layers that were trained whole (``modules_to_save``) take the
    place of the originals. Adapters that are disabled, or that PEFT has merged into the base weights already, are not
    added.

    Args:
        model: a model with layers of PEFT: ``base_layer``, ``lora_A``, ``lora_B``, ``scaling``, ``active_adapters``.
        tensors: the gathered tensors of a unit. A layer's base weight and adapters have to be in one unit.

    Raises:
        NotImplementedError: an adapter is of another kind than LoRA for linear layers and embeddings.
        RuntimeError: a layer's adapters are in another unit than the base weight.
    """
    adapted = {path: module for path, module in plain_modules(model) if hasattr(module, "base_layer")}
    layers = {path: module for path, module in adapted.items() if hasattr(module, "lora_A")}
    for name, tensor in tensors.items():
        path, base, rest = name.partition(_BASE)
        if base and path in layers:
            if rest == "weight":
                _merge(path, layers[path], tensor, tensors)
            yield _plain(f"{path}.{rest}"), tensor
        elif base and path in adapted:
            raise NotImplementedError(f"{path} is a {type(adapted[path]).__name__}, whose adapters are not LoRA")
        elif _SAVED in name:
            path, _, rest = name.partition(_SAVED)
            adapter, _, rest = rest.partition(".")
            if adapter in _active(dict(plain_modules(model))[path]):
                yield _plain(f"{path}.{rest}"), tensor
        elif _ORIGINAL not in name and not any(name.startswith(f"{path}.lora_") for path in layers):
            yield _plain(name), tensor


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _active(layer: Any) -> list[str]:
    active = getattr(layer, "active_adapters", None) or getattr(layer, "active_adapter", [])
    return [active] if isinstance(active, str) else list(active)


def _merge(path: str, layer: Any, base: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add the products of the active adapters to ``base``, the gathered weight of the layer at ``path``."""
    if getattr(layer, "disable_adapters", False):
        return
    wide = torch.float64 if base.dtype == torch.float64 else torch.float32
    total = base.to(wide)
    for adapter in _active(layer):
        if adapter in getattr(layer, "merged_adapters", ()):
            continue  # the base weight has it already
        transposed = bool(getattr(layer, "fan_in_fan_out", False))
        a, b = f"{path}.lora_A.{adapter}.weight", f"{path}.lora_B.{adapter}.weight"
        if adapter in getattr(layer, "lora_embedding_A", {}):
            a, b, transposed = f"{path}.lora_embedding_A.{adapter}", f"{path}.lora_embedding_B.{adapter}", True
        elif adapter not in layer.lora_A:
            continue
        if a not in tensors or b not in tensors:
            raise RuntimeError(
                f"{a!r} is not in the unit of {path + _BASE}weight, so it cannot be merged: wrap so that the layer is "
                "in one unit as a whole, by ModuleWrapPolicy({Block}) for instance"
            )
        variant = getattr(layer, "use_dora", {}).get(adapter, False) or f"{path}.lora_B.{adapter}.bias" in tensors
        if variant or tensors[a].dim() != 2:
            raise NotImplementedError(f"the adapter {adapter!r} of {path} is not LoRA of a linear layer or embedding")
        product = tensors[b].to(wide) @ tensors[a].to(wide) * layer.scaling[adapter]
        total = total + (product.T if transposed else product)
    base.copy_(total)
