"""The flat parameters of torch's FSDP1 in old checkpoints, cut into the model's parameters.

[Note: Flat parameters of FSDP1]
With ``use_orig_params=False`` FSDP1 makes one vector of the parameters that a wrapped module owns: in the order of
``named_modules()``, a shared one once, each in memory order. Each rank has an equal part, and the end is padded. With
``use_orig_params=True`` each rank has an interval of each parameter, which may be empty. So in both cases the parts of
the ranks, joined in the order of ranks, are a vector of all elements. Such parts are in a LOCAL_STATE_DICT and in
``optimizer.state_dict()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp.checkpoint.old_tensors import Chunk, OldTensor
from fsdp.flat.names import joined
from fsdp.placement.boxes import Box, box_view, rectangles

_FLAT = ("_flat_param", "flat_param")


class Member(NamedTuple):
    """A parameter that begins at element ``start`` of a vector. The optimizer's is the first of ``names``."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)


def members_of(model: nn.Module, units: Collection[nn.Module]) -> dict[str, list[Member]]:
    """Return the parameters in the vector of each unit, by the path of the unit, outermost first."""
    owners: dict[str, str] = {}  # path of the unit, by path of a module
    paths: dict[nn.Module, str] = {}
    names: dict[str, dict[nn.Parameter, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_unit = not path or module in units
        owners[path] = unit = paths.setdefault(module, path) if is_unit else owners[path.rpartition(".")[0]]
        of_unit = names.setdefault(unit, {})
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            of_unit.setdefault(param, []).append(joined(path, name))
    found: dict[str, list[Member]] = {}
    for unit, of_unit in names.items():
        starts = accumulate((param.numel() for param in of_unit), initial=0)
        members = [Member(tuple(n), (*p.shape,), p.stride(), start) for (p, n), start in zip(of_unit.items(), starts)]
        found |= {unit: members} if members else {}
    return found


Way = dict[int, list[Member]]  # the parameters in each parameter of an optimizer


def is_flat(name: str) -> bool:
    return name.rpartition(".")[2] in _FLAT


def fits(tensor: OldTensor, members: list[Member], ranks: int) -> bool:
    """True if ``tensor`` is whole, or the parts of it on ``ranks`` ranks are the vector of ``members``. That of several
    parameters, with the state of an optimizer, is padded to a multiple of the ranks."""
    sizes = [chunk.box.sizes for chunk in tensor.chunks]
    numel, end = sum(map(math.prod, sizes)), members[-1].end
    padded = -(-end // ranks) * ranks
    return _is_whole(tensor, members) or (all(len(each) == 1 for each in sizes) and numel in (end, padded))


def _is_whole(tensor: OldTensor, members: list[Member]) -> bool:
    return len(members) == 1 and all(chunk.box.sizes == members[0].shape for chunk in tensor.chunks)


def divided(tensor: OldTensor, members: list[Member]) -> Iterator[tuple[Member, OldTensor]]:
    """Divide a tensor that ``fits`` into the parameters."""
    starts = [*accumulate((chunk.box.numel for chunk in tensor.chunks), initial=0)]
    for member in members:
        if _is_whole(tensor, members):
            yield member, tensor
            continue
        chunks = [part for chunk, begin in zip(tensor.chunks, starts) for part in _overlap(chunk, begin, member)]
        yield member, OldTensor(tensor.dtype, member.shape, chunks)


def _overlap(chunk: Chunk, begin: int, member: Member) -> Iterator[Chunk]:
    """Cut the elements of ``member`` out of a part that begins at element ``begin`` of the vector."""
    first, last = max(begin, member.start), min(begin + chunk.box.numel, member.end)
    position = first - begin
    for box in (
        rectangles(member.shape, first - member.start, last - member.start, member.stride) if first < last else ()
    ):
        yield Chunk(chunk.number, box, partial(_view, chunk.read, box, position, member.stride))
        position += box.numel


def _view(read: Callable[[], torch.Tensor], box: Box, position: int, stride: Any) -> torch.Tensor:
    return box_view(read(), box, position, stride)


def of_local_model(state: Mapping[str, Any], model: nn.Module | None) -> tuple[dict[str, Any], list[nn.Module]]:
    """Return a state dict with flat parameters as one with the model's parameters, and the modules that were wrapped.

    Raises:
        ValueError: there is no model, or one of other sizes.
    """
    flats = {name.rpartition(".")[0]: state[name] for name in state if is_flat(name)}
    found = {name: value for name, value in state.items() if not is_flat(name)}
    words = (
        f"the state has FSDP1's flat parameters with { {path: flat.shape[0] for path, flat in flats.items()} } elements"
    )
    if model is None:
        raise ValueError(f"{words}: pass model=, the plain model, for the names and sizes of the parameters in them")
    units = [module for path, module in model.named_modules() if path in flats]
    layout = members_of(model, units)
    for path, members in layout.items():
        vectors = [(flats.get(path), members)]
        if all(member.names[0] in found for member in members):  # use_orig_params=True
            vectors = [(found[member.names[0]], [member._replace(start=0)]) for member in members]
        for tensor, own in vectors:
            if tensor is None or not fits(tensor, own, 1):
                sizes = {path: members[-1].end for path, members in layout.items()}
                raise ValueError(
                    f"{words}, and the model given, wrapped as the keys say, has {sizes} (without padding)"
                )
            for member, part in divided(tensor, own):
                found.update(dict.fromkeys(member.names, part))
    return found, units
