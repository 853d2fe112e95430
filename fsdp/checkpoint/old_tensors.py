"""Reading checkpoints of other programs: the tensors as boxes that are read when they are needed.

Files of ``torch.save`` and safetensors are mapped into memory, and items of ``torch.distributed.checkpoint`` are read
one by one. No process group is needed, and no code of a pickle runs: besides tensors and plain values a file may hold
the classes that are listed here, most of which are replaced by a :class:`_Record`.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp.checkpoint import old_sources
from fsdp.checkpoint.old_sources import Source
from fsdp.checkpoint.safetensors import SafetensorsFile
from fsdp.checkpoint.sharded_tensors import box_at, cut_dims
from fsdp.placement.boxes import Box


class Chunk(NamedTuple):
    """A box of a tensor in file ``number`` of a checkpoint. ``read`` returns the elements."""

    number: int
    box: Box
    read: Callable[[], torch.Tensor]


class OldTensor(NamedTuple):
    """A tensor of an old checkpoint.

    Attributes:
        is_plain: each rank's file has a plain tensor, which says nothing about the other ranks' tensors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]
    is_plain: bool = False


Keys = tuple[Any, ...]  # of nested dicts, and indices of lists
Leaves = dict[Keys, Any]


def read(source: Source) -> Leaves:
    """Return the tensors and other values of a checkpoint by their paths in its nested dicts and lists.

    Raises:
        ValueError: files are missing, or hold other objects than tensors and plain values; or ranks differ.
        RuntimeError: a file is damaged.
    """
    old_sources.check_all_there(source)
    if source.kind == old_sources.DCP:
        return _of_dcp(source.files[0].path)
    found: Leaves = {}
    for file in source.files:
        is_rank = source.kind == old_sources.RANKS
        content = _of_safetensors(file.path) if source.kind == old_sources.SAFETENSORS else _loaded(file.path)
        number = file.number if is_rank else source.files.index(file)
        for path, value in _walk(content, ()):
            if not isinstance(value, torch.Tensor):
                found.setdefault(path, value)
                continue
            tensor = _described(value, number, file.path)
            known = found.setdefault(path, tensor)
            if known is tensor:
                continue
            if not is_rank:
                raise ValueError(f"{file.path} and a file before it have a tensor {text_of(path)}")
            if known.dtype != tensor.dtype or (
                known.shape != tensor.shape and not (known.is_plain and tensor.is_plain)
            ):
                kinds = f"{known.dtype} of shape {known.shape} in files before, and {tensor.dtype} of {tensor.shape}"
                raise ValueError(f"{text_of(path)} is {kinds} in {file.path}")
            known.chunks.extend(tensor.chunks)
    return found


def text_of(path: Keys) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _walk(tree: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    is_extra = bool(path) and str(path[-1]).endswith(_EXTRA_STATE_KEY_SUFFIX)
    if isinstance(tree, Mapping) and tree and not is_extra:
        for key, value in tree.items():
            yield from _walk(value, (*path, key))
    elif isinstance(tree, list) and tree and all(isinstance(each, dict) for each in tree):
        for index, value in enumerate(tree):
            yield from _walk(value, (*path, index))
    else:
        yield path, tree


# -- torch.save --------------------------------------------------------------------------------------------------------


class _Record:
    """The state of an object of another class."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
        for part in state if isinstance(state, tuple) else (state,):  # the second part has slots
            if isinstance(part, dict):
                self.__dict__.update(part)


class _ShardedTensor(torch.Tensor):
    """A ``ShardedTensor`` without a process group."""

    shards: list[Any]
    metadata: Any

    def __setstate__(self, state: Any) -> None:
        self.shards, self.metadata = state[:2]

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> Any:
        raise NotImplementedError  # no operation is needed, and torch asks for this method


def _member(owner: Any, name: str) -> type[_Record]:
    """Stand for ``getattr``, by which a pickle names members of an enum and nested classes."""
    return _Record


_SHARD = "torch.distributed._shard"
_RECORDS = [
    f"{_SHARD}.metadata.ShardMetadata",
    f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARD}.sharded_tensor.metadata.TensorProperties",
    f"{_SHARD}.sharded_tensor.shard.Shard",
    f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec",
    f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    "torch.distributed.remote_device._remote_device",
]
_GLOBALS: list[Any] = [  # in addition to DTensor with its parts, which torch allows by itself
    *((_Record, name) for name in _RECORDS),
    (_ShardedTensor, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_member, "builtins.getattr"),
]


_torchs_log = logging.getLogger("torch.distributed.device_mesh")  # tells of each mesh that it has no process groups


def _loaded(file: Path | io.BytesIO, of: Path | None = None) -> Any:
    """Load what ``torch.save`` has written; ``of`` is the path of a file in memory."""
    path = file if isinstance(file, Path) else of
    was_disabled, _torchs_log.disabled = _torchs_log.disabled, True
    try:
        with torch.serialization.safe_globals(_GLOBALS):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path) or None)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds other objects than tensors, containers and numbers, and a pickle of those can run any code. "
            f"Save the state dicts by themselves with the program that made them. {error}"
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise RuntimeError(f"{path} cannot be read, or is damaged or truncated: {error}") from error
    finally:
        _torchs_log.disabled = was_disabled


def _described(value: torch.Tensor, number: int, path: Path) -> OldTensor:
    """Describe a tensor in the file of rank ``number``."""
    if isinstance(value, _ShardedTensor):
        parts = [(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor) for s in value.shards]
        dtype, shape, is_plain = value.metadata.tensor_properties.state[0], tuple(value.metadata.size), False
    elif isinstance(value, DTensor):
        dtype, shape, is_plain = value.dtype, tuple(value.shape), False
        mesh: Any = value.device_mesh.mesh
        where = (mesh == number).nonzero().tolist()
        kinds = {type(placement).__name__ for placement in value.placements}
        if len(where) != 1 or not kinds <= {"Shard", "Replicate", "_StridedShard"}:
            raise ValueError(
                f"{path}, of rank {number}, has a DTensor over {mesh.tolist()} placed as {value.placements}"
            )
        # a strided shard is cut after the shards to the right of it
        dims = sorted(cut_dims(value), key=lambda dim: type(value.placements[dim]).__name__ == "_StridedShard")
        boxes = box_at(value, dict(enumerate(where[0])), dims)
        parts = [(box, value._local_tensor) for box in boxes]
    else:
        dtype, shape, is_plain = value.dtype, tuple(value.shape), True
        parts = [(Box.whole(shape), value.detach())]
    for box, tensor in parts:
        if tuple(tensor.shape) != box.sizes:
            raise ValueError(f"{path} has a tensor of shape {tuple(tensor.shape)} instead of {box.sizes}")
    return OldTensor(dtype, shape, [Chunk(number, box, partial(torch.Tensor.detach, t)) for box, t in parts], is_plain)


# -- safetensors -------------------------------------------------------------------------------------------------------


def _of_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with SafetensorsFile.open(path) as file:
            entries, begin = file.parse()[0], len(file.header)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{path} is damaged, truncated or no safetensors file: {error}") from error
    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[begin:]

    def tensor(dtype: torch.dtype, part: torch.Tensor) -> torch.Tensor:
        return (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)

    return {entry.name: tensor(entry.dtype, data[entry.begin : entry.end]).view(entry.shape) for entry in entries}


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


class _Metadata(pickle.Unpickler):
    """The reader of ``.metadata``, which runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module.startswith("torch.distributed.checkpoint.") or full == "pathlib.PosixPath":
            return _Record
        if full in ("torch.Size", "torch.serialization._get_layout") or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        if full == "builtins.getattr":
            return _member
        raise pickle.UnpicklingError(f"GLOBAL {full}")


def _of_dcp(folder: Path) -> Leaves:
    try:
        metadata = _Metadata(io.BytesIO((folder / ".metadata").read_bytes())).load()
        paths, described, stored = metadata.planner_data, metadata.state_dict_metadata, metadata.storage_data
    except Exception as error:  # of any class: damaged pickles raise many
        raise ValueError(f"{folder / '.metadata'} is damaged, or of an unknown version: {error}") from error
    names = sorted({info.relative_path for info in stored.values()})
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in names}
    if lost := sorted({i.relative_path for i in stored.values() if i.offset + i.length > sizes[i.relative_path]}):
        raise ValueError(f"{folder} has files that are missing or truncated: {', '.join(lost)}; of {', '.join(names)}")
    found: Leaves = {}
    for index, info in stored.items():
        path = paths.get(index.fqn, (index.fqn,)) if isinstance(paths, dict) else (index.fqn,)
        kind, file = described[index.fqn], folder / info.relative_path
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{file} is compressed ({info.transform_descriptors}), which is not supported")
        item = partial(_item, file, info.offset, info.length)
        if not hasattr(kind, "chunks"):
            found[path] = item()
            continue
        tensor = found.setdefault(path, OldTensor(kind.properties.state[0], tuple(kind.size), []))
        boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in kind.chunks}
        box = Box(tuple(index.offset), boxes[tuple(index.offset)])
        tensor.chunks.append(Chunk(names.index(info.relative_path), box, item))
    for fqn in described.keys() - {index.fqn for index in stored}:
        raise ValueError(f"{folder} has no data of {fqn!r}, which its .metadata lists")
    return found


def _item(file: Path, offset: int, length: int) -> Any:
    with open(file, "rb") as stream:
        stream.seek(offset)
        return _loaded(io.BytesIO(stream.read(length)), file)
