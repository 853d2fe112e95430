"""State dicts and checkpoints of models and optimizers."""

from typing import TYPE_CHECKING, Any

from fsdp.checkpoint.load_checkpoint import Plain, load, load_plain
from fsdp.checkpoint.local import Local
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
    from fsdp.checkpoint.incoming import convert
    from fsdp.checkpoint.outgoing import to_dcp, to_safetensors

__all__ = [
    "Local",
    "Plain",
    "StateDictOptions",
    "async_save",
    "convert",
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
    if name not in ("convert", "to_dcp", "to_safetensors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp.checkpoint import incoming, outgoing

    globals().update(convert=incoming.convert, to_dcp=outgoing.to_dcp, to_safetensors=outgoing.to_safetensors)
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names, including those that are not imported yet."""
    return sorted(__all__)
