"""The flat parameters of torch's FSDP1 in old checkpoints, cut into the model's parameters.

FSDP1 makes one vector of the parameters that a wrapped module owns: in the order of ``named_modules()``, a shared one
once, in memory order. Each rank has an equal part, and the end is padded. With ``use_orig_params=True`` each parameter
begins at a multiple of 16 bytes of the compute dtype. No file names that dtype, so all alignments are tried
(:meth:`Wrapping.layout`). Such vectors are in a LOCAL_STATE_DICT and in ``optimizer.state_dict()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp.checkpoint.old_tensors import Chunk, OldTensor
from fsdp.flat.names import joined
from fsdp.placement.boxes import Box, box_view, rectangles
from fsdp.wrap import choose_units

_FLAT = ("_flat_param", "flat_param")
_ALIGNMENTS = (1, 2, 4, 8, 16)  # elements; 1 with use_orig_params=False


class Member(NamedTuple):
    """A parameter that begins at element ``start`` of a flat one. The optimizer's is the first of ``names``."""

    names: tuple[str, ...]
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + torch.Size(self.shape).numel()

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of elements of the flat parameter that both have; (0, 0) if none."""
        first, last = max(begin, self.start), min(end, self.end)
        return (first, last) if first < last else (0, 0)


Layout = dict[str, list[Member]]  # by path of the wrapped module, outermost first
Numbers = dict[int, list[str]]  # the names of the parameters that an optimizer's parameter stands for


class Wrapping:
    """The modules that FSDP1 had wrapped.

    Attributes:
        units: their paths, as far as a checkpoint has named them.
    """

    def __init__(self, model: nn.Module | None, policy: Any) -> None:
        self.model, self._policy = model, policy
        self.units: set[str] | None = None

    def layout(self, what: str, fits: Callable[[Layout, int], bool]) -> tuple[Layout, int]:
        """Return the layout and the alignment for which ``fits(layout, alignment)`` is true.

        Raises:
            ValueError: there is no model, or none or several fit.
        """
        if self.model is None:
            raise ValueError(f"{what}: pass model=, the plain model, for the names and sizes of the parameters in them")
        units = self.units
        if units is None:
            chosen, _ = choose_units(self.model, self._policy, set(), set(), {})
            units = {path for path, module in self.model.named_modules() if module in chosen or not path}
        layouts = {alignment: _layout(self.model, units, alignment) for alignment in _ALIGNMENTS}
        found = [(layout, alignment) for alignment, layout in layouts.items() if fits(layout, alignment)]
        if any(layout != found[0][0] for layout, _ in found):
            raise ValueError(f"{what}, whose sizes several alignments have: save a full state dict with torch's FSDP1")
        if not found:
            sizes = {path: members[-1].end for path, members in layouts[1].items()}
            by = "auto_wrap_policy says" if self.units is None else "the keys say"
            raise ValueError(f"{what}, and the model given, wrapped as {by}, has {sizes} (without padding)")
        return found[0]


def _layout(model: nn.Module, units: set[str], alignment: int) -> Layout:
    wrapped = {path: module for path, module in model.named_modules(remove_duplicate=False) if path in units}
    modules = set(wrapped.values())
    several = {path: _members(module, path, modules - {module}, alignment) for path, module in wrapped.items()}
    return {path: members for path, members in several.items() if members}


def _members(unit: nn.Module, path: str, nested: set[nn.Module], alignment: int) -> list[Member]:
    names: dict[nn.Parameter, list[str]] = {}

    def visit(module: nn.Module, at: str) -> None:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(param, []).append(joined(at, name))
        for name, child in module._modules.items():
            if child is not None and child not in nested:
                visit(child, joined(at, name))

    visit(unit, path)
    members, end = list[Member](), 0
    for param, several in names.items():
        start = -(-end // alignment) * alignment
        members.append(Member(tuple(several), start, tuple(param.shape), param.stride()))
        end = members[-1].end
    return members


def _cut(member: Member, dtype: torch.dtype, parts: Iterable[Chunk]) -> OldTensor:
    """Return ``member`` as a tensor; ``parts`` are those of the flat parameter."""
    chunks: list[Chunk] = []
    for number, part, read in parts:
        begin = part.offsets[0]
        first, last = member.within(begin, begin + part.numel)
        if first == last:
            continue
        position = first - begin
        for box in rectangles(member.shape, first - member.start, last - member.start, member.stride):
            chunks.append(Chunk(number, box, partial(_view, read, box, position, member.stride)))
            position += box.numel
    return OldTensor(dtype, member.shape, chunks)


def _view(read: Callable[[], torch.Tensor], box: Box, position: int, stride: Any) -> torch.Tensor:
    return box_view(read(), box, position, stride)


# -- the model ---------------------------------------------------------------------------------------------------------


def is_flat(name: str) -> bool:
    return name.rpartition(".")[2] in _FLAT


def of_local_model(state: Mapping[str, Any], wrapping: Wrapping) -> dict[str, Any]:
    """Return a state dict with flat parameters as one with the model's parameters."""
    flats: dict[str, OldTensor] = {name.rpartition(".")[0]: state[name] for name in state if is_flat(name)}
    wrapping.units = set(flats)
    sizes = {path: flat.shape[0] for path, flat in flats.items()}

    def fits(layout: Layout, alignment: int) -> bool:
        def size(path: str) -> int:
            end, shard = layout[path][-1].end, max(chunk.box.numel for chunk in flats[path].chunks)
            ranks = -(-sizes[path] // shard)  # aligned ones are padded to a multiple of the ranks
            return end if alignment == 1 else -(-end // ranks) * ranks

        return layout.keys() == flats.keys() and all(sizes[path] == size(path) for path in flats)

    layout, _ = wrapping.layout(f"the state has FSDP1's flat parameters with {sizes} elements", fits)
    found: dict[str, Any] = {}
    for path, members in layout.items():
        flat = flats[path]
        for member in members:
            found.update(dict.fromkeys(member.names, _cut(member, flat.dtype, flat.chunks)))
    # with use_orig_params=True there are this rank's parts under the parameters' names besides
    return {name: value for name, value in state.items() if not is_flat(name)} | found


# -- optimizers --------------------------------------------------------------------------------------------------------


def of_local_optimizer(
    states: Mapping[int, dict[str, Any]],
    groups: Sequence[Sequence[int]],
    count: int,
    wrapping: Wrapping,
    names: Callable[[], list[list[str]]],
) -> tuple[Numbers, dict[str, dict[str, Any]]] | None:
    """Return the names for each number, and the states by name, of FSDP1's ``optimizer.state_dict()`` on ``count``
    ranks; None if the states are those of whole parameters. ``names()`` returns those of whole parameters, for each
    group."""
    order = [number for group in groups for number in group]
    cut = {
        (number, name): value
        for number, parts in states.items()
        for name, value in parts.items()
        if isinstance(value, OldTensor) and value.is_plain and value.shape
    }
    if count == 1 or not cut or _are_whole(cut.values(), len(order), count, wrapping.model):
        return None

    def held_by(layout: Layout, alignment: int) -> dict[int, _Held]:
        several = _of_groups(layout, count, None if alignment == 1 else names())
        return dict(zip(order, itertools.chain(*several))) if [*map(len, several)] == [*map(len, groups)] else {}

    def fits(layout: Layout, alignment: int) -> bool:
        held = held_by(layout, alignment)
        return bool(held) and all(
            chunk.box.numel == part.box.numel
            for (number, _), tensor in cut.items()
            for chunk, part in zip(tensor.chunks, held[number].parts(tensor))
        )

    held = held_by(*wrapping.layout("the optimizer has the parts of FSDP1's parameters on each rank", fits))
    found: dict[str, dict[str, Any]] = {}
    for number, parts in states.items():
        for member in held[number].members:
            own = found[member.names[0]] = dict(parts)
            for name, tensor in parts.items():
                if (number, name) in cut:
                    own[name] = _cut(member, tensor.dtype, held[number].parts(tensor))
    return {number: [member.names[0] for member in held[number].members] for number in order}, found


class _Held(NamedTuple):
    """The parameters in a parameter that FSDP1's optimizer holds: the original one, or all of a flat one (``is_flat``).
    Each rank has ``shard`` elements of the flat one."""

    members: list[Member]
    shard: int
    is_flat: bool

    def parts(self, tensor: OldTensor) -> list[Chunk]:
        """Return the chunks of a state with their places in the flat parameter."""
        found = []
        for number, _, read in tensor.chunks:
            start, end = number * self.shard, (number + 1) * self.shard
            if not self.is_flat:
                start, end = self.members[0].within(start, end)
            found.append(Chunk(number, Box((start,), (end - start,)), read))
        return found


def _of_groups(layout: Layout, count: int, names: list[list[str]] | None) -> list[list[_Held]]:
    """Return what each group of an optimizer holds: the parameters called so, or one group with all flat ones."""
    if names is None:
        return [[_Held(members, -(-members[-1].end // count), True) for members in layout.values()]]
    by_name = {
        name: _Held([member], -(-members[-1].end // count), False)
        for members in layout.values()
        for member in members
        for name in member.names
    }
    return [[by_name[name] for name in group if name in by_name] for group in names]


def _are_whole(tensors: Iterable[OldTensor], params: int, count: int, model: nn.Module | None) -> bool:
    """True if all ``count`` ranks have states of one shape, that of a parameter, for each parameter of the model."""
    if any(len(one.chunks) < count or len({chunk.box for chunk in one.chunks}) > 1 for one in tensors):
        return False
    named = [] if model is None else list(model.parameters())
    numbers = {len(named), sum(param.requires_grad for param in named)}
    return model is None or (params in numbers and {one.shape for one in tensors} <= {(*p.shape,) for p in named})
