"""The storage of ``torch.distributed.checkpoint``, with files that are durable when written and verified when read."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.utils._pytree import tree_map

from fsdp.checkpoint import files
from fsdp.checkpoint.checksums import Advance, Entry, Verified, no_progress

# Up to torch 2.6, torch's own writer asks tensors for their storage by a name that torch has deprecated. The filter is
# set once: catch_warnings() around a save in the background would change what other threads show.
warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)

# -- writing -----------------------------------------------------------------------------------------------------------


class SavePlanner(DefaultSavePlanner):
    """Has tensors written from the memory in which they lie, though that is a part of a larger one's."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, compact(object))
        return _by_itself(value.detach()) if isinstance(value, torch.Tensor) else value


def _by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, as if there were nothing else in its memory: what is written is the whole memory, and a writer of
    ``torch.distributed.checkpoint`` would copy it first. Bits that stand for an operation on it are resolved."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor
    return torch.from_dlpack(tensor.view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


class _DurableFiles(FileSystem):
    """Files whose content is on the disk once they are closed; ``entries`` and ``blocks`` have their checksums then."""

    def __init__(self, entries: dict[str, Entry], blocks: dict[str, list[str]], advance: Advance) -> None:
        super().__init__()
        self._entries, self._blocks, self._advance = entries, blocks, advance

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with files.durable(Path(path), self._entries, self._advance, self._blocks) as stream:
            yield stream


class Writer(FileSystemWriter):
    """Writes into the empty directory ``path``; ``entries`` and ``blocks`` tell what, ``advance`` is told of bytes."""

    COPIED_AHEAD = 10_000_000  # bytes of an accelerator's that are copied while others are written; 0: none

    def __init__(
        self,
        path: Path,
        is_coordinator: bool,
        advance: Advance = no_progress,
        copied_ahead: int = COPIED_AHEAD,
    ) -> None:
        super().__init__(path, sync_files=False, per_thread_copy_ahead=copied_ahead)  # the files sync themselves
        self.entries: dict[str, Entry] = {}
        self.blocks: dict[str, list[str]] = {}
        self.fs = _DurableFiles(self.entries, self.blocks, advance)
        self.set_up_storage_writer(is_coordinator)


def compact(value: Any) -> Any:
    """``value``; of tensors in it that are a part of a larger memory, a copy: a pickle would hold all of that."""

    def its(inner: Any) -> Any:
        if type(inner) not in (torch.Tensor, nn.Parameter) or inner.layout != torch.strided:
            return inner
        return inner.detach().clone() if inner.untyped_storage().nbytes() > inner.nbytes else inner

    return value if isinstance(value, torch.Tensor) else tree_map(its, value)


# -- reading -----------------------------------------------------------------------------------------------------------


class LoadPlanner(DefaultLoadPlanner):
    """Tells of the bytes of tensors that are read. Tensors within other values come to CPU memory as well, and not to
    the device on which rank 0 had them."""

    def __init__(self, advance: Advance, *, trusted: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._advance, self._trusted = advance, trusted

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=not self._trusted)
        except pickle.UnpicklingError as error:
            raise RuntimeError(
                f"{key!r} holds more than tensors and plain values, and loading it could run any code. If you trust "
                "whoever saved it, load it with trusted=True"
            ) from error

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._advance(tensor.nbytes)


class VerifiedFiles(FileSystem):
    """Files of which what is read is verified."""

    def __init__(self, entries: Mapping[str, Entry], blocks: Mapping[str, list[str]]) -> None:
        super().__init__()
        self._entries, self._blocks = entries, blocks

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = Path(path).name
        with Verified(Path(path), self._entries[name], self._blocks[name]) as stream:
            yield stream
