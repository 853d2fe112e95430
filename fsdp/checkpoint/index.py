"""Where which tensor of a checkpoint lies in its files, as JSON; ``torch.distributed.checkpoint`` keeps it in a pickle.

A pickle runs whatever code its author chose, so ``.metadata`` is written for other readers, and not read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp.checkpoint.files import INDEX, Manifest


def packed(metadata: Metadata) -> bytes:
    """The file's content: ``{"tensors": {key: {"dtype", "shape", "chunks": [[offsets, sizes, *place]]}}, "values":
    {key: place}}``, where a place is a file, an offset and a length in bytes."""
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for key, what in metadata.state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            chunks = [[[*chunk.offsets], [*chunk.sizes], *_place(places[key, chunk.offsets])] for chunk in what.chunks]
            dtype = str(what.properties.dtype).removeprefix("torch.")
            tensors[key] = {"dtype": dtype, "shape": [*what.size], "chunks": chunks}
        else:
            values[key] = _place(places[key, None])
    return json.dumps({"tensors": tensors, "values": values}, separators=(",", ":")).encode()


def _place(info: _StorageInfo) -> list[Any]:
    return [info.relative_path, info.offset, info.length]


def read(directory: Path, manifest: Manifest, *, trusted: bool) -> Metadata | None:
    """What is in the checkpoint; None if only ``.metadata`` tells, which may be read if it is ``trusted``.

    Raises:
        RuntimeError: the file is not what :func:`packed` makes, or names files that are not in ``manifest``.
    """
    path = directory / INDEX
    if INDEX not in manifest.files:
        if trusted:
            return None
        raise RuntimeError(
            f"{directory} was written by an earlier version of this package, whose index is a pickle, and reading a "
            "pickle can run any code: if you trust whoever wrote it, load it with trusted=True"
        )
    try:
        content = json.loads(path.read_bytes())
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for key, what in content["tensors"].items():
            chunks = []
            for offsets, sizes, *place in what["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                metadata.storage_data[MetadataIndex(key, chunks[-1].offsets)] = _info(place, manifest)
            dtype = getattr(torch, what["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{what['dtype']!r} is no dtype")
            size = torch.Size(what["shape"])
            metadata.state_dict_metadata[key] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
        for key, place in content["values"].items():
            metadata.storage_data[MetadataIndex(key)] = _info(place, manifest)
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{path} is no index of a checkpoint of this package: {error}") from error
    return metadata


def _info(place: Any, manifest: Manifest) -> _StorageInfo:
    file, offset, length = place
    if file not in manifest.files:
        raise ValueError(f"it refers to {file!r}, which the manifest does not list")
    return _StorageInfo(str(file), int(offset), int(length))
