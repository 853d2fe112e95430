"""Conversion of this package's checkpoints: to one safetensors file, and for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import inspect
import secrets
import stat
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from fsdp.checkpoint import files
from fsdp.checkpoint.files import Manifest
from fsdp.checkpoint.index import MODEL
from fsdp.checkpoint.load_checkpoint import Contents, Reading, load_plain
from fsdp.checkpoint.safetensors import SafetensorsFile, laid_out, memory_of
from fsdp.checkpoint.values import torch_dtype


def to_safetensors(path: str | Path, file: str | Path) -> Path:
    """Write the model's tensors of a checkpoint to one safetensors file, under the names of the plain model.

    One tensor at a time is in memory. The file appears under this name when it is complete. Extra state of the model,
    the optimizer and ``extra`` are left out.

    Args:
        path: a directory of checkpoints, whose latest is taken, or one checkpoint.
        file: the file to write, usually ``model.safetensors``. A file of this name is replaced, and keeps its mode.
            Its directory is made if it is missing.

    Returns:
        ``file``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: a file is damaged or missing, with the path.
        OSError: the file cannot be written, with the path.
    """

    def convert(manifest: Manifest) -> Path:
        with Contents(manifest, Reading()) as contents:
            saved = {key: contents.table[key] for key in contents.tensors if key.startswith(MODEL)}
            kinds = {key.removeprefix(MODEL): (torch_dtype(of.dtype), of.shape) for key, of in saved.items()}
            return write_safetensors(Path(file), kinds, lambda name: contents.whole([MODEL + name])[MODEL + name])

    return files.read_latest(Path(path), convert, files.find)


def write_safetensors(
    file: Path, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], read: Callable[[str], torch.Tensor]
) -> Path:
    """Write the tensors that ``read`` returns for these names, dtypes and shapes, one after the other. ``file`` is
    replaced at the end."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.incomplete")
    names = sorted(kinds, key=lambda name: -kinds[name][0].itemsize)  # so that all are aligned
    entries = laid_out((name, *kinds[name]) for name in names)
    files.make_directories(file.parent)
    try:
        with SafetensorsFile.create(temporary, entries, {"format": "pt"}) as out:
            if file.exists():
                temporary.chmod(stat.S_IMODE(file.stat().st_mode))
            for entry in entries:
                out.write(memory_of(read(entry.name).view(-1)), entry.begin)
            out.finish()
            files.disk.rename(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file


def to_dcp(path: str | Path, directory: str | Path, *, trusted: bool = False) -> Path:
    """Write a checkpoint as one of ``torch.distributed.checkpoint``, in this process.

    The result has ``{"model": ..., "optim": ...}`` with the keys of ``get_state_dict`` of torch and of this package, so
    ``torch.distributed.checkpoint.load`` loads it into the state dicts of any sharded or plain model. ``extra`` is left
    out. The whole state is in memory.

    Args:
        path: a directory of checkpoints, whose latest is taken, or one checkpoint.
        directory: the directory to write, which is made.
        trusted: as for :func:`load`.

    Returns:
        ``directory``.

    Raises: as :func:`load_plain`, and
        OSError: the directory cannot be made, with the path.
    """
    plain = load_plain(path, trusted=trusted, progress=False)
    Path(directory).mkdir(parents=True, exist_ok=True)  # torch's own error has no path
    state: dict[str, Any] = {"model": plain.model}
    if plain.optimizer is not None:
        state["optim"] = plain.optimizer
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        if "no_dist" in inspect.signature(dcp.save).parameters:
            dcp.save(state, checkpoint_id=Path(directory), no_dist=True)
        else:  # torch 2.6
            warnings.filterwarnings("ignore", "`save_state_dict` is deprecated")
            dcp.save_state_dict(state, dcp.FileSystemWriter(directory), no_dist=True)
    return Path(directory)
