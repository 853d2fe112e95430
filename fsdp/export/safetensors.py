"""Safetensors files of Hugging Face's layout: ``model.safetensors``, or several files and an index.

Each rank writes files of whole tensors, and reads only the byte ranges of the shards that it holds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fsdp.api import as_nbytes
from fsdp.checkpoint.files import FORGED, disk, write_durably
from fsdp.checkpoint.forms import Held
from fsdp.checkpoint.safetensors import Entry, SafetensorsFile, is_supported, laid_out, memory_of, pack_header
from fsdp.checkpoint.state_dict import calling, check_no_experts
from fsdp.comm.consensus import Ranks
from fsdp.export.weights import ModelTensor, tensors_of
from fsdp.flat.layout import contiguous_stride
from fsdp.flat.unwritten import warn_of_unwritten
from fsdp.placement.boxes import Box, Placement, elements_of
from fsdp.placement.redistribute import Channels, Item, redistribute
from fsdp.runtime.unit import Unit

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(eq=False)
class _File:
    """A file to write, and the rank that writes it."""

    tensors: dict[str, ModelTensor] = field(default_factory=dict)  # by the name in the file
    nbytes: int = 0
    name: str = SINGLE
    owner: int = 0

    @property
    def entries(self) -> list[Entry]:
        return laid_out((name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items())


# -- writing -----------------------------------------------------------------------------------------------------------


def save_safetensors(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    rename: Callable[[str], str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the weights of ``model`` as safetensors files into the directory ``path``. All ranks have to call.

    Each file is written by one rank, which receives whole tensors, one unit at a time; so no rank holds the whole
    model. The files are the same as from one process: ``model.safetensors``, or
    ``model-00001-of-0000N.safetensors`` and so on with ``model.safetensors.index.json``. They have temporary names
    until all are complete. A tied parameter is written once, under the first name. Persistent buffers are written as
    the rank of their file has them.

    Args:
        model: a wrapped model, or a module with wrapped modules in it.
        path: a directory that all ranks see; it is made if need be, and files in it stay.
        dtype: of floating-point tensors; None for the dtypes that they have.
        max_shard_size: bytes of tensors per file, as a number or as "5GB" or "500MiB". A larger tensor has a file of
            its own.
        rename: maps a name in the model to the name in the file.
        metadata: strings for the headers; None for ``{"format": "pt"}``.

    Returns:
        the files, with the index last, on every rank.

    Raises, on every rank if on one, and then no file has its final name:
        FileExistsError: ``path`` has safetensors files of a model.
        OSError: a file could not be written.
        ValueError: the size cannot be read; or ``rename`` gives two tensors one name; or a dtype has no name in the
            format.
        NotImplementedError: a parameter is placed by tensor parallelism, or ranks hold different experts.
        RuntimeError: a forward or backward is under way; or some ranks do not call.
    """
    ranks, path = Ranks.of(None), Path(path)
    suffix, strings = "", dict(metadata or {"format": "pt"})

    def plan() -> list[_File]:
        check_no_experts(model, "save_safetensors()")
        tensors = tensors_of(model, "save_safetensors()", dtype)
        limit = as_nbytes(max_shard_size, "max_shard_size")
        files = _divided(tensors, limit, rename, ranks.size)
        for file in files:
            pack_header(file.entries, strings)  # raises before anything is sent if a name or string is no JSON
        return files

    def begin() -> str:
        path.mkdir(parents=True, exist_ok=True)
        if found := sorted(each.name for each in path.iterdir() if _SHARD.fullmatch(each.name)):
            words = f"{path} has {found[0]} already: remove it, or choose another directory"
            raise FileExistsError(errno.EEXIST, words)
        return f".{secrets.token_hex(4)}.incomplete"

    def publish() -> list[Path]:
        final, index = [path / file.name for file in files], path / INDEX
        try:
            if len(files) > 1:
                write_durably(_temporary(index, suffix), _index_of(files))
                final.append(index)
            for target in final:
                os.replace(_temporary(target, suffix), target)
        finally:
            _temporary(index, suffix).unlink(missing_ok=True)
        disk.sync_directory(path)
        return final

    with ranks.call("fsdp.export.save_safetensors()"):
        files = ranks.together("plan the files", plan)
        suffix = ranks.first("begin to write files", begin)
        try:
            own = [file for file in files if file.owner == ranks.rank]
            writing = _Writing(path, suffix, own, strings)
            with calling("save_safetensors()", model):
                _send(files, writing)
            ranks.together("write the files", writing.finish)
            return ranks.first("publish the files", publish)
        finally:
            for file in files:
                if file.owner == ranks.rank:
                    _temporary(path / file.name, suffix).unlink(missing_ok=True)


def _divided(tensors: list[ModelTensor], limit: int, rename: Callable[[str], str] | None, ranks: int) -> list[_File]:
    """Divide the tensors among files of up to ``limit`` bytes, and the files among ranks; the same on all ranks."""
    files = [_File()]
    names: dict[str, str] = {}
    for tensor in tensors:
        name = tensor.names[0] if rename is None else rename(tensor.names[0])
        if name in names:
            raise ValueError(f"rename() gives {names[name]!r} and {tensor.names[0]!r} the same name {name!r}")
        if not is_supported(tensor.dtype):
            raise ValueError(f"{tensor.names[0]!r} is of {tensor.dtype}, which safetensors files cannot hold")
        names[name] = tensor.names[0]
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if files[-1].tensors and files[-1].nbytes + nbytes > limit:
            files.append(_File())
        files[-1].tensors[name] = tensor
        files[-1].nbytes += nbytes
    load = [0] * ranks
    for number, file in enumerate(files, 1):
        if len(files) > 1:
            file.name = f"model-{number:05}-of-{len(files):05}.safetensors"
        file.owner = min(range(ranks), key=load.__getitem__)
        load[file.owner] += file.nbytes
    return files


def _index_of(files: list[_File]) -> bytes:
    where = {name: file.name for file in files for name in file.tensors}
    index = {"metadata": {"total_size": sum(file.nbytes for file in files)}, "weight_map": where}
    return json.dumps(index, indent=2, sort_keys=True).encode()


class _Writing:
    """This rank's files while they are written. An error is kept until all ranks ask for it."""

    def __init__(self, path: Path, suffix: str, files: list[_File], metadata: Mapping[str, str]) -> None:
        self._open: dict[_File, SafetensorsFile] = {}
        self._error: OSError | None = None
        with self._error_kept():
            for file in files:
                there = _temporary(path / file.name, suffix)
                self._open[file] = SafetensorsFile.create(there, file.entries, metadata)

    @contextlib.contextmanager
    def _error_kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error

    def write(self, file: _File, entry: Entry, values: torch.Tensor) -> None:
        """Write a whole tensor, which is contiguous and on CPU, to the place in the file."""
        if self._error is None:
            with self._error_kept():
                self._open[file].write(memory_of(values.view(-1)), entry.begin)

    def finish(self) -> None:
        """Complete the files, and raise the first error since they were begun."""
        try:
            if self._error is not None:
                raise self._error
            for file in self._open.values():
                file.finish()
        finally:
            while self._open:
                self._open.popitem()[1].close()


def _send(files: list[_File], writing: _Writing) -> None:
    """Send each tensor to the rank that writes it, one unit in flight, and write it there."""
    me = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    by_unit: dict[Unit, list[tuple[Held, Entry, _File]]] = {}
    for file in files:
        for tensor, entry in zip(file.tensors.values(), file.entries):
            if tensor.unit is not None and tensor.held is not None:
                by_unit.setdefault(tensor.unit, []).append((tensor.held, entry, file))
            elif tensor.value is not None and file.owner == me:
                writing.write(file, entry, tensor.value.detach().to("cpu", tensor.dtype).contiguous())
    channels = Channels()
    for unit, tensors in by_unit.items():
        groups = unit.groups
        items, arriving = list[Item](), list[tuple[_File, Entry, torch.Tensor]]()
        for held, entry, file in tensors:
            target = _rank_in(unit, file.owner)
            if target is None:
                continue  # the ranks of another replica send it
            whole = Placement.whole(entry.shape, groups.shard_size, only=target)
            outputs = []
            if target == groups.shard_rank:
                values = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                arriving.append((file, entry, values))
                outputs = [(Box.whole(entry.shape), values)]
            source, stride = held.placement(groups.shard_size) or whole, held.part.stride()
            items.append(Item(entry.dtype, stride, source, whole, held.part.parts, outputs))
        channel = channels.over(groups.shard if groups.sharded else None, unit.device)
        unit.announce(replicas=False)
        redistribute(items, channel, "save_safetensors()")
        channel.flush()
        for file, entry, values in arriving:
            writing.write(file, entry, values)


def _rank_in(unit: Unit, owner: int) -> int | None:
    """The rank in the shard group of ``unit`` that stands for rank ``owner`` of the default group; None if another
    replica has that one."""
    if not torch.distributed.is_initialized():
        return 0
    if not unit.groups.sharded:
        return 0 if torch.distributed.get_rank() == owner else None
    ranks = torch.distributed.get_process_group_ranks(unit.groups.shard)
    return ranks.index(owner) if owner in ranks else None


# -- reading -----------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A tensor in a file."""

    file: SafetensorsFile
    entry: Entry


def load_safetensors(
    model: nn.Module, path: str | Path, *, strict: bool = True, rename: Callable[[str], str] | None = None
) -> None:
    """Load safetensors files into ``model``. All ranks have to call.

    Each rank reads the byte ranges of its shards. Values are cast to the model's dtypes. The model changes only when
    every rank has read everything. Until then the new shards lie next to the old ones. A model that was built on the
    meta device is wrapped with ``param_init_fn=lambda module: module.to_empty(device=..., recurse=False)``. Buffers
    that no file has, such as a table of positions, have lost their values then: a warning names those that neither
    ``param_init_fn`` nor the program has written. It knows nothing of a ``to_empty()`` before wrapping, or without it.

    Args:
        model: a wrapped model, a module with wrapped modules in it, or a plain one.
        path: a file, or a directory with ``model.safetensors`` or ``model.safetensors.index.json``.
        strict: names that only the model or only the files have are errors; else these are not changed.
        rename: maps a name in the model to the name in the file.

    Raises, on every rank if on one, with the model as it was:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged, or no safetensors file.
        RuntimeError: names, shapes or kinds of dtypes do not fit, with all of them; or a file becomes shorter while it
            is read; or a forward or backward is under way; or some ranks do not call.
        NotImplementedError: a parameter is placed by tensor parallelism.
    """
    ranks, path = Ranks.of(None), Path(path)

    def look() -> list[tuple[ModelTensor, _Found]]:
        tensors = tensors_of(model, "load_safetensors()")
        return _matched(tensors, _opened(path, stack), rename, strict=strict)

    with contextlib.ExitStack() as stack, ranks.call("fsdp.export.load_safetensors()"):
        pairs = ranks.together("look at the files", look)
        values = ranks.together("read the files", lambda: [(tensor, _read(tensor, found)) for tensor, found in pairs])
        with torch.no_grad():
            for unit in dict.fromkeys(tensor.unit for tensor, _ in values if tensor.unit is not None):
                unit.before_step()
                unit.shards_were_written()
            for tensor, value in values:
                target = tensor.value if tensor.held is None else tensor.held.part.local
                assert target is not None
                target.copy_(value)
    warn_of_unwritten(model, "fsdp.export.load_safetensors()")


def _opened(path: Path, stack: contextlib.ExitStack) -> dict[str, _Found]:
    """Open the files at ``path`` until the end of ``stack``, and return the tensors in them, by name."""
    if path.is_dir():
        index = path / INDEX
        if not index.exists():
            if not (path / SINGLE).exists():
                raise FileNotFoundError(f"{path} has neither {INDEX} nor {SINGLE}")
            return _open(path / SINGLE, stack)
        try:
            where = json.loads(index.read_bytes())["weight_map"]
            names = sorted({str(name) for name in where.values()})
        except FORGED as error:
            raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index} names {outside[0]!r}, which is no file next to it")
        found: dict[str, _Found] = {}
        for name in names:
            found.update(_open(path / name, stack))
        if missing := [name for name in where if name not in found]:
            raise ValueError(f"{index} names {', '.join(map(repr, missing))}, which the files do not have")
        return {name: found[name] for name in where}
    return _open(path, stack)


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, _Found]:
    try:
        file = stack.enter_context(SafetensorsFile.open(path))
        entries, _ = file.parse()
    except FORGED as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error
    return {entry.name: _Found(file, entry) for entry in entries}


def _matched(
    tensors: list[ModelTensor], found: dict[str, _Found], rename: Callable[[str], str] | None, *, strict: bool
) -> list[tuple[ModelTensor, _Found]]:
    """Find the place of each tensor in the files."""
    pairs, problems, missing, known = list[tuple[ModelTensor, _Found]](), list[str](), list[str](), set[str]()
    for tensor in tensors:
        names = [name if rename is None else rename(name) for name in tensor.names]
        known.update(names)
        there = next((name for name in names if name in found), None)
        if there is None:
            missing.append(tensor.names[0])
            continue
        (_, dtype, shape, _, _), file = found[there].entry, found[there].file.path.name
        if shape != tensor.shape:
            problems.append(f"{there!r} has shape {shape} in {file} and {tensor.shape} in the model")
        elif tensor.value is not None and tensor.value.is_meta:
            remedy = "call to_empty() of the module before, and compute the buffers that no file has"
            problems.append(f"{tensor.names[0]!r} is on the meta device: {remedy}")
        elif _kind(dtype) != _kind(tensor.dtype):
            problems.append(f"{there!r} is of {dtype} in {file} and of {tensor.dtype} in the model")
        pairs.append((tensor, found[there]))
    if strict:
        if missing:
            problems.append(f"missing in the files: {', '.join(map(repr, missing))}")
        if unexpected := [name for name in found if name not in known]:
            problems.append(f"missing in the model: {', '.join(map(repr, unexpected))}")
    if problems:
        raise RuntimeError(f"the files do not fit the model, and nothing was loaded: {'; '.join(problems)}")
    return pairs


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of values of a dtype; a cast to another kind would lose them."""
    if dtype.is_complex:
        return "complex"
    return "floating-point" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _read(tensor: ModelTensor, found: _Found) -> torch.Tensor:
    """Read this rank's part of a tensor, in the dtype of the file: 1-D in memory order, or all of it."""
    entry, numel = found.entry, math.prod(found.entry.shape)

    def elements(start: int, end: int) -> torch.Tensor:
        memory = torch.empty(end - start, dtype=entry.dtype, device="cpu")
        found.file.read(memory_of(memory), entry.begin + start * entry.dtype.itemsize)
        return memory

    if tensor.held is None:
        return elements(0, numel).view(entry.shape)
    held = tensor.held.part
    if not held.local.numel() or held.stride() == contiguous_stride(tuple(held.shape)):
        return elements(held.start, held.start + held.local.numel())
    return elements_of(elements(0, numel).view(entry.shape), held.stride())[held.start : held.end]


# -- files -------------------------------------------------------------------------------------------------------------


def _temporary(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")
