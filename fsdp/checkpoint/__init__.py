"""State dicts and checkpoints of models and optimizers."""

from typing import TYPE_CHECKING, Any

from fsdp.checkpoint.load_checkpoint import Plain, load, load_plain
from fsdp.checkpoint.save_checkpoint import async_save, save
from fsdp.checkpoint.torch_state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

if TYPE_CHECKING:
    from fsdp.checkpoint.outgoing import to_dcp, to_safetensors

__all__ = [
    "Plain",
    "StateDictOptions",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "load_plain",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "to_dcp",
    "to_safetensors",
]


def __getattr__(name: str) -> Any:
    """Import the converters, which load ``torch.distributed.checkpoint`` and torch's own FSDP, at first use."""
    if name not in ("to_dcp", "to_safetensors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp.checkpoint import outgoing

    globals()[name] = getattr(outgoing, name)
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names, including those that are not imported yet."""
    return sorted(__all__)
