"""Conversion of checkpoints of other programs: to a checkpoint of this package, or to one safetensors file.

[Note: From an old checkpoint to a new one]
:mod:`fsdp.checkpoint.old_sources` recognises files by their names. :mod:`fsdp.checkpoint.old_tensors` returns their
content by paths, with tensors as boxes that are read later. This file finds the state dicts of the model and of
optimizers among the paths, and names their tensors as the plain model does.
:mod:`fsdp.checkpoint.old_flat` cuts FSDP1's flat parameters first. Everything is checked before the first file is
written. Each old file becomes the file of one rank, so no more than that is in memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from fsdp.checkpoint import files, old_sources
from fsdp.checkpoint.index import EXTRA, GROUPS, MODEL, STATE, param_and_state, state_key
from fsdp.checkpoint.old_flat import Member, Way, divided, fits, is_flat, members_of, of_local_model
from fsdp.checkpoint.old_tensors import Chunk, Keys, Leaves, OldTensor, text_of
from fsdp.checkpoint.old_tensors import read as read_source
from fsdp.checkpoint.outgoing import to_dcp, to_safetensors, write_safetensors
from fsdp.checkpoint.save_checkpoint import Share, Written, publish
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.layout import contiguous_stride
from fsdp.flat.names import plain_keys, unit_of
from fsdp.placement.boxes import Box, same_cover
from fsdp.wrap import choose_units

_OF_MODEL = ("app.model", "model", "model_state_dict", "module", "state_dict")  # keys of the model's state dict
# states of torch's optimizers that have the parameter's shape
_LIKE_PARAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_SHOWN = 10  # problems in an error


class Old(NamedTuple):
    """An old checkpoint, checked, with names of the plain model.

    Attributes:
        kinds: of its files.
        files: the number of files that a new checkpoint will have.
        tensors, values: by key of a new checkpoint.
        extra: values that belong neither to the model nor to an optimizer, as nested dicts.
        left_out: tensors that do not either.
    """

    kinds: str
    files: int
    tensors: dict[str, OldTensor]
    values: dict[str, Any]
    extra: dict[Any, Any]
    left_out: list[str]


def convert(
    old: str | Path,
    new: str | Path,
    *,
    model: nn.Module | None = None,
    auto_wrap_policy: Any = None,
    optimizer: Optimizer | None = None,
    trusted: bool = False,
) -> Path:
    """Convert a checkpoint: one of another program to this package's format, or one of this package to another format.

    ``fsdp/checkpoint/README.md``, "Old checkpoints", lists the kinds. One process converts, without a process group.
    :func:`load` loads the result at any number of ranks, with any wrapping. Everything is checked before the first file
    is written, and no code in ``old`` is run. Memory is needed for the tensors of one old file.

    Args:
        old: a file or a directory.
        new: a directory, to which a checkpoint is added as by :func:`save`, or NAME.safetensors, for the model alone.
            For an ``old`` of this package: NAME.safetensors, or a directory for ``torch.distributed.checkpoint``.
        model: the plain model (the meta device is enough), for names that ``old`` does not have: of an optimizer's
            state by number, and of FSDP1's flat parameters.
        auto_wrap_policy: that of FSDP1, if ``old`` has the flat parameters of an optimizer alone.
        optimizer: an optimizer of ``model`` with the groups that were saved, if it had several groups and its state
            goes by number.
        trusted: as for :func:`load`, for an ``old`` of this package.

    Returns:
        the new checkpoint or file.

    Raises, with nothing written:
        FileNotFoundError: ``old`` does not exist, or is none of the kinds.
        OSError: ``new`` cannot be made, as where it is a file of another kind.
        RuntimeError: a file is damaged or truncated.
        ValueError: ``new`` is ``old`` or inside of it; or files, ranks or elements are missing or there twice, or
            states do not have the shape of their parameters, with all of them; or a pickle holds code; or names need
            ``model``, or do not fit it; or there are several models.
    """
    old, new = Path(old), Path(new)
    of_model_only = new.suffix == ".safetensors"
    if old.resolve() in (new.resolve(), *new.resolve().parents):
        raise ValueError(f"{new} is the old checkpoint, or inside of it: give the new one a place of its own")
    if files.is_ours(old):
        return to_safetensors(old, new) if of_model_only else to_dcp(old, new, trusted=trusted)
    found = find_old(old, model, auto_wrap_policy, optimizer, of_model_only=of_model_only)
    if found.left_out:
        warn_user(f"{old} has tensors of neither a model nor an optimizer, which are left out: {found.left_out}")
    if not of_model_only:
        return _write(new, found)
    tensors = {key.removeprefix(MODEL): tensor for key, tensor in found.tensors.items()}
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return write_safetensors(new, kinds, lambda name: _whole(name, tensors[name]))


# -- finding the state dicts -------------------------------------------------------------------------------------------


def find_old(
    path: Path,
    model: nn.Module | None = None,
    auto_wrap_policy: Any = None,
    optimizer: Optimizer | None = None,
    *,
    of_model_only: bool = False,
) -> Old:
    """Read the names, shapes and places of an old checkpoint, and check that it is complete; see :func:`convert`."""
    if model is not None and any(unit_of(module) is not None for module in model.modules()):
        raise ValueError("expected the plain model, as it is before it is wrapped")
    sources = old_sources.find_sources(path)
    if not sources:
        found = "it has no .metadata, .safetensors or files of torch.save()" if path.exists() else "it does not exist"
        found = "it is one of this package" if files.is_ours(path) else found
        raise FileNotFoundError(f"{path} is no checkpoint of another program: {found}")
    leaves: Leaves = {}
    for source in sources:
        leaves |= {(source.name, *keys): value for keys, value in read_source(source).items()}
    numbers = [c.number for value in leaves.values() if isinstance(value, OldTensor) for c in value.chunks]
    numbers += [file.number for source in sources if source.kind == old_sources.RANKS for file in source.files]
    count = 1 + max(numbers, default=0)
    optims = list(dict.fromkeys(keys[: keys.index("param_groups")] for keys in leaves if "param_groups" in keys))
    of_optim = {
        keys for keys in leaves for p in optims if keys[: len(p)] == p and keys[len(p)] in ("state", "param_groups")
    }
    prefix = _prefix_of_model(path, leaves, of_optim)
    of_model = {
        keys[-1]: value
        for keys, value in leaves.items()
        if keys[:-1] == prefix
        and keys not in of_optim
        and (isinstance(value, OldTensor) or str(keys[-1]).endswith(_EXTRA_STATE_KEY_SUFFIX))
    }
    names = plain_keys(of_model)
    state = {names[key]: value for key, value in of_model.items()}
    may_differ, units = _may_differ(state, model), None
    if any(map(is_flat, state)):
        state, units = of_local_model(state, model)
    named = {MODEL + name: value for name, value in state.items()}
    if optims and not of_model_only:
        naming = _Naming(state, model, units, auto_wrap_policy, optimizer, count)
        groups: list[dict[str, Any]] = []
        for one in optims:
            states, own = naming.named(_nested({k[len(one) :]: v for k, v in leaves.items() if k[: len(one)] == one}))
            groups += own
            named |= {state_key(name, part): value for name, parts in states.items() for part, value in parts.items()}
        named[GROUPS] = groups
        times = Counter(name for group in groups for name in group["params"])
        if twice := [name for name in times if times[name] > 1]:
            raise ValueError(f"{path} has the state of {', '.join(map(repr, twice))} in several groups or optimizers")
    tensors = {key: value for key, value in named.items() if isinstance(value, OldTensor)}
    others = {key: value for key, value in named.items() if not isinstance(value, OldTensor)}
    _check_shapes(path, tensors)
    rest = {k: v for k, v in leaves.items() if k not in of_optim and not (k[:-1] == prefix and k[-1] in of_model)}
    left_out = [text_of(keys) for keys, value in rest.items() if isinstance(value, OldTensor)]
    extra = _nested({keys[1:]: value for keys, value in rest.items() if not isinstance(value, OldTensor) and keys[1:]})
    complete = _complete(path, tensors, may_differ)
    return Old(old_sources.kinds_of(sources), count, complete, others, extra, left_out)


def _prefix_of_model(path: Path, leaves: Leaves, of_optim: set[Keys]) -> Keys:
    """Return the path of the model's state dict."""
    found = dict.fromkeys(k[:-1] for k, v in leaves.items() if isinstance(v, OldTensor) and k not in of_optim)
    named = [keys for keys in found if keys[-1] in _OF_MODEL or (len(keys) == 1 and "model" in keys[0])]
    candidates = list(found) if len(found) == 1 else named
    if len(candidates) != 1:
        words = f"tensors in {', '.join(map(text_of, found))}" if found else "no tensors but those of an optimizer"
        raise ValueError(
            f"{path} has {words}, and expected is one state dict of a model: keep that and its optimizer's"
        )
    return candidates[0]


def _nested(leaves: Leaves) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for keys, value in leaves.items():
        at = tree
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at.setdefault(keys[-1], value)  # a dict that is empty on one rank may have values on another
    return tree


# -- optimizers --------------------------------------------------------------------------------------------------------

States = dict[Any, dict[Any, Any]]  # by number or name of parameter


class _Naming:
    """The names of the parameters in optimizers of a model."""

    def __init__(
        self,
        state: Mapping[str, Any],
        model: nn.Module | None,
        units: list[nn.Module] | None,
        policy: Any,
        optimizer: Optimizer | None,
        ranks: int,
    ) -> None:
        """``state`` is that of the model; ``units`` are the modules that FSDP1 had wrapped, if the state names them."""
        self._state, self._model, self._optimizer, self._ranks = state, model, optimizer, ranks
        if model is not None and units is None:
            units = list(choose_units(model, policy, set(), set(), {})[0])
        self._flat = [] if model is None else list(members_of(model, units or ()).values())
        tensors = {name: value for name, value in state.items() if isinstance(value, OldTensor)}
        self._members = {name: Member((name,), of.shape, contiguous_stride(of.shape)) for name, of in tensors.items()}
        for member in itertools.chain(*self._flat):
            self._members |= dict.fromkeys(member.names, member._replace(start=0))

    def named(self, optimizer: dict[str, Any]) -> tuple[States, list[dict[str, Any]]]:
        """Return the states and the groups of an optimizer's state dict by names of parameters."""
        states, groups = optimizer.get("state") or {}, list(optimizer["param_groups"].values())
        order = [param for group in groups for param in group["params"]]
        if unknown := [param for param in states if param not in order]:
            raise ValueError(f"the optimizer has states of {', '.join(map(repr, unknown))}, which no group has")
        for group in groups:
            group |= {key: _whole(key, value) for key, value in group.items() if isinstance(value, OldTensor)}
        names: dict[Any, list[str]]
        if any(isinstance(param, int) for param in order):
            held = self._by_number(states, groups)
            names = {number: [member.names[0] for member in members] for number, members in held.items()}
        else:
            held, names = Way(), {name: [plain] for name, plain in self._plain(order).items()}
        found: States = {name: dict(parts) for param, parts in states.items() for name in names[param]}
        for param, part, value in _undescribed(states) if self._fit(states, held) else ():
            for member, tensor in divided(value, held[param]):
                found[member.names[0]][part] = tensor
        settings = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
        return found, [{**one, "params": [n for param in one["params"] for n in names[param]]} for one in settings]

    def _by_number(self, states: States, groups: list[dict[str, Any]]) -> Way:
        """Return the parameters in each one of the optimizer: one, or those of a flat parameter of FSDP1."""
        sizes, names = [len(group["params"]) for group in groups], self._names(groups)
        numbers = [number for group in groups for number in group["params"]]
        members = [self._members.get(name, Member((name,), (), ())) for several in names for name in several]
        ways = [dict(zip(numbers, [[member] for member in members]))] if [*map(len, names)] == sizes else []
        flat = dict(zip(numbers, self._flat))
        if sizes == [len(self._flat)] and self._fit(states, flat):
            ways = [*(way for way in ways if self._fit(states, way)), flat]
        if not ways:
            own = "model" if self._optimizer is None else "optimizer given"
            raise ValueError(
                f"the optimizer has the state of {sum(sizes)} parameters in groups of {sizes}, and the {own} has "
                f"{len(members)} in groups of {[*map(len, names)]}, or flat ones of FSDP1 with "
                f"{[several[-1].end for several in self._flat]} elements, wrapped as auto_wrap_policy= says"
            )
        first, *others = [[member.names for several in way.values() for member in several] for way in ways]
        if others and first != others[0]:
            raise ValueError(
                "the optimizer has parts of FSDP1's parameters, whose sizes two orders of parameters have: save a full "
                "or sharded state dict with torch's FSDP1"
            )
        return ways[0]

    def _fit(self, states: States, held: Way) -> bool:
        return bool(held) and all(fits(value, held[param], self._ranks) for param, _, value in _undescribed(states))

    def _names(self, groups: list[dict[str, Any]]) -> list[list[str]]:
        """Return the names of the parameters that an optimizer had numbered, for each group."""
        model, optimizer = self._model, self._optimizer
        if all("param_names" in group for group in groups):
            names = self._plain([name for group in groups for name in group["param_names"]])
            return [[names[name] for name in group["param_names"]] for group in groups]
        if model is None:
            raise ValueError(
                "the optimizer's state is by number of the parameter: pass model=, for the order of parameters"
            )
        params = dict(model.named_parameters())
        if optimizer is not None:
            by_param = {param: name for name, param in params.items()}
            if not all(param in by_param for group in optimizer.param_groups for param in group["params"]):
                raise ValueError("expected optimizer= to be an optimizer of model=, but it has other parameters")
            return [[by_param[param] for param in group["params"]] for group in optimizer.param_groups]
        if len(groups) > 1:
            raise ValueError(
                f"the optimizer's state is by number of the parameter in {len(groups)} groups: pass optimizer=, one of "
                "the model with the same groups"
            )
        trained = [name for name, param in params.items() if param.requires_grad]
        return [trained if len(trained) == len(groups[0]["params"]) else list(params)]

    def _plain(self, keys: list[str]) -> dict[str, str]:
        """Map an optimizer's names to those of the plain model. All may be in a module that is called ``module``."""
        cut, kept = plain_keys(keys), plain_keys([*keys, ""])  # with a name that does not begin with "module."
        return {key: kept[key] if kept[key] in self._state else cut[key] for key in keys}


def _undescribed(states: States) -> Iterator[tuple[Any, Any, OldTensor]]:
    """Iterate over (parameter, name of the state, value) of tensors that may be parts."""
    for param, parts in states.items():
        for name, value in parts.items():
            if isinstance(value, OldTensor) and value.is_plain and value.shape:
                yield param, name, value


def _whole(key: str, tensor: OldTensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        Box.whole(tensor.shape).cut(chunk.box, whole).copy_(_read(key, tensor, chunk))
    return whole


# -- checking and writing ----------------------------------------------------------------------------------------------


def _check_shapes(path: Path, tensors: Mapping[str, OldTensor]) -> None:
    """Raise if states do not have the shape of their parameter: they are of one rank, or of other parameters."""
    problems = [
        f"{key!r} of shape {tensor.shape} for a parameter of {of.shape}"
        for key, tensor in tensors.items()
        if key.startswith(STATE)
        for name, part in [param_and_state(key)]
        if part in _LIKE_PARAM and (of := tensors.get(MODEL + name)) is not None and of.shape != tensor.shape
    ]
    if problems:
        raise ValueError(
            f"{path} has states of other shapes than the parameters; are they of one rank alone, or is the order of "
            f"parameters another? It has {_listed(problems)}"
        )


def _may_differ(state: Mapping[str, Any], model: nn.Module | None) -> set[str]:
    """Return the keys of the model's tensors of which each rank may have had a whole one of its own: buffers, and all
    that is not described if other tensors are described as parts."""
    of_shards = any(
        is_flat(name) or not value.is_plain for name, value in state.items() if isinstance(value, OldTensor)
    )
    buffers = state if of_shards else dict(model.named_buffers(remove_duplicate=False)) if model is not None else ()
    return {MODEL + name for name in buffers}


def _complete(path: Path, tensors: Mapping[str, OldTensor], may_differ: set[str]) -> dict[str, OldTensor]:
    """Return the tensors with each element once; equal boxes are replicas, of which the first counts.

    Raises:
        ValueError: elements are missing or in several boxes, or replicas have several values, with all keys.
    """
    found, problems = dict[str, OldTensor](), list[str]()
    for key, tensor in tensors.items():
        boxes = {chunk.box: chunk for chunk in reversed(tensor.chunks)}
        whole = Box.whole(tensor.shape)
        if whole.numel == 0:
            boxes = {whole: Chunk(0, whole, partial(torch.empty, tensor.shape, dtype=tensor.dtype))}
        if not same_cover(boxes, [whole]):
            here = sum(box.numel for box in boxes)
            several = f"the boxes {sorted(boxes)} of" if here >= whole.numel else f"{here} of {whole.numel} elements of"
            problems.append(f"{several} {key!r} of shape {tensor.shape}")
        elif tensor.is_plain and tensor.shape and key not in may_differ and not _are_equal(tensor.chunks):
            hint = " (pass model= if it is a buffer)" if key.startswith(MODEL) else ""
            problems.append(f"several values of {key!r} of shape {tensor.shape}, undescribed parts of it{hint}")
        found[key] = tensor._replace(chunks=list(boxes.values()))
    if problems:
        raise ValueError(
            f"{path} does not have each element once; are there files of all ranks, and of one run? It has "
            f"{_listed(problems)}"
        )
    return found


def _are_equal(chunks: list[Chunk]) -> bool:
    def data(chunk: Chunk) -> torch.Tensor:
        return chunk.read().reshape(-1).view(torch.uint8)  # bits, for NaN is not equal to itself

    return len(chunks) == 1 or all(torch.equal(data(chunks[0]), data(chunk)) for chunk in chunks[1:])


def _listed(problems: list[str]) -> str:
    more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _read(key: str, tensor: OldTensor, chunk: Chunk) -> torch.Tensor:
    part = chunk.read().detach()
    if part.dtype != tensor.dtype or tuple(part.shape) != chunk.box.sizes:
        kinds = f"{part.dtype} of shape {tuple(part.shape)} instead of {tensor.dtype} of {chunk.box.sizes}"
        raise RuntimeError(f"a part of {key!r} is {kinds}: the old checkpoint is damaged")
    return part


def _write(root: Path, old: Old) -> Path:
    shares = [Share(number) for number in range(old.files)]
    for key, value in old.values.items():
        shares[0].pack(key, value)
    for share in shares if old.extra else ():
        share.pack(EXTRA, old.extra)
    temporary = files.begin(root)
    try:
        written = list[Written]()
        for share in shares:
            for key, tensor in old.tensors.items():
                own = [(chunk.box, _read(key, tensor, chunk)) for chunk in tensor.chunks if chunk.number == share.rank]
                share.add(key, tensor.dtype, tensor.shape, range(len(tensor.shape)), own)
            written.append(share.write(temporary))
            share.pieces.clear()  # before the next file is read
        return publish(temporary, Written.joined(written), [*old.tensors, *old.values], old.files)
    except BaseException:
        files.discard(temporary)
        raise
