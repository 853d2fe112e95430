"""How state leaves a model and its optimizer, and how it comes back."""

from typing import TYPE_CHECKING, Any

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
    from fsdp.checkpoint.load_checkpoint import Plain, load, load_plain
    from fsdp.checkpoint.save_checkpoint import async_save, save

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
]


def __getattr__(name: str) -> Any:
    """What loads ``torch.distributed.checkpoint``, which loads torch's own FSDP: when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp.checkpoint import load_checkpoint, save_checkpoint

    globals()[name] = getattr(load_checkpoint if name in ("Plain", "load", "load_plain") else save_checkpoint, name)
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names, including those that are not imported yet."""
    return sorted(__all__)
