"""``offload`` and ``onload``: free the device between the phases of a program, such as training and generation."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fsdp.comm.streams import StreamEvent, Streams
from fsdp.runtime.build import join
from fsdp.runtime.context import RootContext
from fsdp.runtime.unit import Unit, units_of

_CALL = "the model is offloaded: call fsdp.onload(model, optimizer) before"
# The states of each optimizer that are offloaded: (parameter, name).
_states: weakref.WeakKeyDictionary[Optimizer, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def offload(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] = ()) -> None:
    """Move everything that a training step keeps on the device into page-locked host memory::

        fsdp.offload(model, optimizer)
        generate()                       # has the device's memory
        fsdp.onload(model, optimizer)

    Shards, ``.grad`` and the optimizer's tensors move; parameters stay the same objects, and scalars such as ``step``
    stay where they are. Full buffers, reduce buffers and the pools that they come from are released. Buffers of modules
    stay. On CPU only the pools are released. All ranks have to call; they meet if the model was not used before. Until
    :func:`onload`, every call that communicates is an error, also on ranks that are not offloaded: forwards, steps,
    state dicts, clipping, checkpoints.

    Args:
        model: a wrapped model, or a module with wrapped modules in it.
        optimizer: one or several of the model's optimizers; none to move the model alone.

    Raises:
        ValueError: ``model`` has no wrapped modules in it.
        RuntimeError: a forward or backward is under way; or the graph of a forward waits for its backward; or there are
            gradients from ``no_sync()``; or the model is offloaded already.
    """
    units, contexts = _checked(model)
    for context in contexts:
        context.passes.check_available()
        context.check_no_backward_follows("fsdp.offload()")
    for unit in units:
        unit.check_can_change()
        unit.follow_parameters()
    for context in contexts:
        context.passes.join()
    events: list[tuple[Streams, StreamEvent]] = []

    def to_host(streams: Streams) -> Callable[[torch.Tensor], torch.Tensor]:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor
            host, event = streams.fetch(tensor.detach(), streams.host_memory(tensor.nbytes, pinned=True))
            events.append((streams, event))
            return host

        return move

    for unit in units:
        unit.reshard_by_hand()
        unit.forget_initial_values()
        for handle in unit.handles:
            if handle.shard.device.type != "cpu":
                unit.change_shard(handle, to_host(join(unit).streams))
    for one in _several(optimizer):
        _states[one] = [
            (param, name)
            for param, states in one.state.items()
            for name, value in (states.items() if isinstance(states, dict) else ())
            if _moves(value)
        ]
        for param, name in _states[one]:
            one.state[param][name] = tree_map(_each(to_host(contexts[0].streams)), one.state[param][name])
    for streams, event in events:
        with streams.on_host(event):
            pass
    for context in contexts:
        context.unsharder.trim()
        context.reductions.pool.trim()
        context.passes.suspend(_CALL)


def onload(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] = ()) -> None:
    """Move everything back to the device. Training goes on bit for bit as without :func:`offload`.

    Raises:
        ValueError: ``model`` has no wrapped modules in it.
        RuntimeError: the model is not offloaded.
    """
    units, contexts = _checked(model)
    if any(not context.passes.suspended for context in contexts):
        raise RuntimeError("fsdp.onload(): the model is not offloaded")
    for context in contexts:
        context.passes.suspend("")
    for unit in units:
        for handle in unit.handles:
            if handle.shard.device != unit.device and not handle.offload.offload_params:
                unit.change_shard(handle, _to(unit.device))
    for one in _several(optimizer):
        for param, name in _states.pop(one, []):
            one.state[param][name] = tree_map(_each(_to(param.device)), one.state[param][name])


@contextlib.contextmanager
def offloaded(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] = ()) -> Iterator[None]:
    """:func:`offload` before the block, and :func:`onload` after it, also after an exception."""
    offload(model, optimizer)
    try:
        yield
    finally:
        onload(model, optimizer)


def _checked(model: nn.Module) -> tuple[list[Unit], list[RootContext]]:
    units = units_of(model)
    if not units:
        raise ValueError(f"expected a model with wrapped modules in it, but {type(model).__name__} has none")
    return units, list(dict.fromkeys(map(join, units)))


def _several(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _is_movable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _moves(value: Any) -> bool:
    found: list[bool] = []
    tree_map(lambda leaf: found.append(_is_movable(leaf) and leaf.device.type != "cpu"), value)
    return any(found)


def _each(move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda leaf: move(leaf) if _is_movable(leaf) else leaf


def _to(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=True)
