"""A hint under an uncaught error of torch that a sharded parameter has caused.

Between steps a parameter with ``use_orig_params=True`` is an ordinary one that holds this rank's shard. An operation on
the full shape fails with a message of torch, and so does a backward that reads a released parameter. The hint is
computed from the traceback when Python prints an uncaught error, without cost before.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdp.flat.full_copy import RELEASED_VERSION, BufferState
from fsdp.flat.names import WRAPPED_MODULE
from fsdp.flat.registration import registered_params
from fsdp.runtime.unit import every_unit

_CHAIN = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+|\[\w+\])*")  # a name, and attributes and constant indices of it
_RELEASED = re.compile(rf"\[\S+ \[([\d, ]*)\]\].* is at version {RELEASED_VERSION}\b")
_SHOWN = 4  # parameters that may be meant


@functools.cache
def explain_uncaught_errors() -> None:
    """Print the hint of ``explain`` after each uncaught error from now on."""
    shows: Callable[..., Any] = sys.excepthook

    def explain_and_show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        shows(kind, error, where)
        hint = explain(error)
        if hint:
            print(f"fsdp: {hint}", file=sys.stderr)

    sys.excepthook = explain_and_show


def explain(error: BaseException) -> str:
    """Return the hint for the uncaught ``error``; "" if no sharded parameter explains it."""
    released = _RELEASED.search(str(error))
    if released is not None:
        return _released([int(size) for size in released[1].split(",") if size.strip()])
    if "Weights only load failed" in str(error) and "sharded_tensor.api.ShardedTensor" in str(error):
        return (
            "the file holds a SHARDED_STATE_DICT, whose ShardedTensors torch.load() builds with weights_only=False "
            "alone, for the same number of ranks. Save and load sharded state by fsdp.checkpoint.save() and load() or "
            "by torch.distributed.checkpoint, or save a FULL_STATE_DICT"
        )
    for where in reversed(list(_traceback(error))):
        frame = where.tb_frame
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package == "fsdp":
            return ""  # an error of this package explains itself
        optimizer = frame.f_locals.get("self")
        if isinstance(optimizer, Optimizer) and frame.f_code.co_name == "load_state_dict":
            return _of_another_optimizer(optimizer)
        for tensor in _tensors_named(_source(where), frame):
            hint = _used(tensor)
            if hint:
                return hint
        if package != "torch":
            break  # the program's own line
    return ""


def _traceback(error: BaseException) -> Iterator[TracebackType]:
    where = error.__traceback__
    while where is not None:
        yield where
        where = where.tb_next


def _source(where: TracebackType) -> str:
    """Return the lines of the expression that failed."""
    code, first, last = where.tb_frame.f_code, where.tb_lineno, where.tb_lineno
    if sys.version_info >= (3, 11):
        position = next(itertools.islice(code.co_positions(), where.tb_lasti // 2, None), None)
        if position is not None and position[0] is not None and position[1] is not None:
            first, last = position[0], position[1]
    lines = [linecache.getline(code.co_filename, n, where.tb_frame.f_globals) for n in range(first, last + 1)]
    return "".join(lines)


def _tensors_named(source: str, frame: FrameType) -> Iterator[torch.Tensor]:
    """Find the tensors of the names in ``source`` in ``frame``, without calling properties or methods."""
    for chain in _CHAIN.findall(source):
        first, *rest = re.findall(r"\w+", chain)
        value = frame.f_locals.get(first, frame.f_globals.get(first))
        for name in rest:
            if isinstance(value, torch.Tensor):
                break
            value = _attribute(value, name)
        if isinstance(value, torch.Tensor):
            yield value


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, nn.Module):
        inner = value._modules.get(WRAPPED_MODULE)
        if inner is not None and (name == "module" or name not in value._modules):
            return inner if name == "module" else _attribute(inner, name)
        for home in (dict(registered_params(value)), value._modules):
            if name in home:
                return home[name]
    return getattr(value, "__dict__", {}).get(name)


def _used(tensor: torch.Tensor) -> str:
    """Describe the contents of ``tensor`` if it is a sharded parameter, else return ""."""
    for unit in every_unit():
        for views in unit.views if unit.is_sharded else ():
            for visible in views.visible if views.registration.summoned is None else ():
                if visible.param is tensor:
                    handle = views.handle
                    records = [handle.layout.params[i] for i in visible.members if i < len(handle.layout.params)]
                    return (
                        f"parameter {visible.name!r} of {handle.unit_name} is sharded. Outside of its unit's forward "
                        f"it is 1-D and holds this rank's part, {tensor.numel()} of "
                        f"{sum(record.numel for record in records)} elements, and so does its gradient, which is None "
                        "where the rank has no part. Compute with it in the forward of the module that owns it; read "
                        "or write the whole inside FSDP.summon_full_params(model); initialise before wrapping; its "
                        "shape is fsdp.global_shape(p)"
                    )
    return ""


def _released(shape: list[int]) -> str:
    """Name the parameters of ``shape``, or transposed, that a backward may have read after their release."""
    names = sorted(
        f"{handle.name_of(index)!r} of {handle.unit_name}"
        for unit in every_unit()
        for handle in unit.handles
        for index, leaf in enumerate(handle.leaves)
        if sorted(leaf.shape) == sorted(shape) and handle.copy.state is BufferState.SHARDED
    )
    more = [f"{len(names) - _SHOWN} others of that shape"] if len(names) > _SHOWN else []
    which = " or ".join([*names[:_SHOWN], *more]) or f"a parameter of shape {tuple(shape)}"
    return (
        f"the backward needs {which}, which is sharded, and reached it by a way that did not gather it: through a "
        "tensor that the unit's forward stored instead of returning (pass that through fsdp.mark_side_output(tensor) "
        "inside of the forward), or in a unit with set_unshard_in_backward(False) (set it to True)"
    )


def _of_another_optimizer(optimizer: Optimizer) -> str:
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in params for unit in every_unit() if unit.is_sharded for param in unit.visible_params()):
        return ""
    return (
        f"{type(optimizer).__name__} holds sharded parameters, of which an optimizer of the plain model knows nothing: "
        "load what FSDP.optim_state_dict_to_load(model, optimizer, saved) makes of a full optimizer state dict"
    )
