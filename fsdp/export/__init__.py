"""Export of weights: streams for inference engines, changes since a snapshot, and safetensors files."""

from fsdp.export.changes import Changes, Snapshot, apply_changes, changes, snapshot
from fsdp.export.lora import lora
from fsdp.export.safetensors import load_safetensors, save_safetensors
from fsdp.export.weights import Bucket, TensorInfo, WeightStream, weights

__all__ = [
    "Bucket",
    "Changes",
    "Snapshot",
    "TensorInfo",
    "WeightStream",
    "apply_changes",
    "changes",
    "load_safetensors",
    "lora",
    "save_safetensors",
    "snapshot",
    "weights",
]
