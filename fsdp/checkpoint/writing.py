"""One rank's share in a save: what it takes of model and optimizer, and the files that it writes.

[Note: Staging]
A save in the background writes copies, in CPU memory, which are made before the call returns: whatever the training
does next, an optimizer's step or the deletion of the model, it finds nothing of the checkpoint to change. A save that
is waited for writes from the shards' own memory.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from fsdp.checkpoint import files, index
from fsdp.checkpoint.dcp import StateDictOptions, get_model_state_dict
from fsdp.checkpoint.dcp_optim import optimizer_state_as_it_is
from fsdp.checkpoint.files import Entry
from fsdp.checkpoint.keys import GROUPS, MODEL, OTHERS, state_key
from fsdp.checkpoint.outcome import Outcome
from fsdp.checkpoint.progress import bar
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.comm.consensus import Ranks
from fsdp.comm.streams import Event, streams_for

_SHARDED = (RaggedTensor, DTensor)  # every rank writes what it has


def extra_name(rank: int) -> str:
    """The file of what a rank added."""
    return f"extra_{rank}.pt"


class _Task(NamedTuple):
    """What one rank has to write, and where."""

    plan: SavePlan
    directory: Path


class _Written(NamedTuple):
    """What one rank has written: where its parts of tensors are, and its files."""

    results: list[Any]
    entries: dict[str, Entry]


class Saving:
    """One checkpoint on its way to the disk. All ranks go through the same steps, and an error on one is one on all."""

    def __init__(self, ranks: Ranks, path: str | Path, keep: int | None) -> None:
        self._ranks, self._path, self._keep = ranks, path, keep
        self._state: dict[str, Any] = {}
        self._extra = b""
        self._directory: Path | None = None  # on rank 0

    # -- what is to be saved -------------------------------------------------------------------------------------------

    def take(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None, extra: Any, *, stage: bool
    ) -> None:
        """Take everything that is to be saved; with ``stage``, as copies.

        Raises: as ``fsdp.checkpoint.save``.
        """
        options = StateDictOptions(ragged=True)
        before, self._ranks.underway = self._ranks.underway, None

        def of_model() -> None:
            if isinstance(before, Outcome) and (error := before.unasked()) is not None:
                raise RuntimeError(
                    "the save in the background before this one has failed, and nobody had asked for its result; this "
                    f"one was not begun, and can be tried again: {error}"
                ) from error
            if not isinstance(model, nn.Module):
                raise TypeError(f"expected a model to save, a torch.nn.Module, but got {type(model).__name__}")
            if self._keep is not None and (not isinstance(self._keep, int) or self._keep < 1):
                raise ValueError(f"keep must be a positive number of checkpoints or None, but got {self._keep!r}")
            if self._ranks.rank == 0:
                self._path = Path(self._path).absolute()  # wherever the process goes meanwhile, or other ranks are
            self._extra = _packed(extra)
            values = get_model_state_dict(model, options=options)
            self._state.update((MODEL + name, value) for name, value in values.items())

        def of_optimizer() -> None:
            if optimizer is not None:
                given = optimizer_state_as_it_is(model, optimizer, options)
                trained = {name for group in given["param_groups"] for name in group["params"]}
                for name in [name for name in given["state"] if name in trained]:
                    states = given["state"].pop(name)
                    self._state.update((state_key(name, state), value) for state, value in states.items())
                self._state[GROUPS] = given["param_groups"]
                if given["state"]:
                    self._state[OTHERS] = given["state"]
            if self._ranks.rank != 0:  # what is not sharded is written once
                self._state = {key: value for key, value in self._state.items() if isinstance(value, _SHARDED)}
            if stage:
                self._state = _staged(self._state)

        self._ranks.together("check what is to be saved", of_model)
        self._ranks.together("take what is to be saved", of_optimizer)

    # -- into files ----------------------------------------------------------------------------------------------------

    def write(self, *, progress: bool) -> Path:
        """Write it as a new checkpoint in rank 0's ``path``, and publish that. Nothing of what was taken is kept.

        Returns:
            where it is.

        Raises: as ``fsdp.checkpoint.save``.
        """
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)

        def plan() -> SavePlan:
            planner.set_up_planner(self._state, is_coordinator=self._ranks.rank == 0)
            return planner.create_local_plan()

        def deal(plans: list[SavePlan]) -> list[_Task]:
            self._directory = files.begin(Path(self._path))
            of_ranks, self._metadata = planner.create_global_plan(plans)
            of_ranks = _Writer(self._directory, True).prepare_global_plan(of_ranks)
            return [_Task(its, self._directory) for its in of_ranks]

        try:
            task = self._ranks.round("plan a checkpoint", plan, deal)
            path = self._ranks.round(
                "write a checkpoint", lambda: self._written(task, planner, progress=progress), self._published
            )
        except BaseException:
            if self._directory is not None:
                files.discard(self._directory)
            raise
        finally:
            self._state.clear()
        if self._ranks.rank == 0 and self._keep is not None:  # the others need not wait for it
            files.remove_older(path, self._keep)
        return path

    def _written(self, task: _Task, planner: DefaultSavePlanner, *, progress: bool) -> _Written:
        """This rank's file of tensors, if it has any, and its ``extra``."""
        nbytes = len(self._extra) + sum(held_nbytes(value) for value in self._state.values())
        with bar("saving", nbytes, progress and self._ranks.rank == 0) as told:
            tensors = (value for value in tree_leaves(list(self._state.values())) if isinstance(value, torch.Tensor))
            # torch would copy what is staged ahead as well, on a stream of its own, and wait for the device
            ahead = _Writer.COPIED_AHEAD if any(tensor.device.type != "cpu" for tensor in tensors) else 0
            writer = _Writer(task.directory, self._ranks.rank == 0, told, ahead)
            plan = planner.finish_plan(task.plan)
            results = writer.write_data(plan, planner).wait() if plan.items else []
            if self._extra:
                files.write_durably(task.directory / extra_name(self._ranks.rank), self._extra, writer.entries, told)
            files.disk.sync_directory(task.directory)
        return _Written(results, writer.entries)

    def _published(self, written: list[_Written]) -> Sequence[Path]:
        assert self._directory is not None
        entries = {name: entry for theirs in written for name, entry in theirs.entries.items()}
        writer = _Writer(self._directory, True)
        writer.finish(self._metadata, [theirs.results for theirs in written])
        files.write_durably(self._directory / files.INDEX, index.packed(self._metadata), writer.entries)
        files.seal(self._directory, entries | writer.entries, len(written))
        return [files.publish(self._directory)] * len(written)


# -- copies ------------------------------------------------------------------------------------------------------------


def _staged(state: dict[str, Any]) -> dict[str, Any]:
    """A copy in CPU memory that shares nothing with ``state``. The host waits until it is complete.

    What comes from an accelerator gets one piece of page-locked memory, which goes with the copy.
    """
    nbytes: Counter[torch.device] = Counter()
    for value in tree_leaves(list(state.values())):
        local = value.local if isinstance(value, RaggedTensor) else value
        if _is_on_accelerator(local):
            nbytes[local.device] += _aligned(local.nbytes)
    room = {device: streams_for(device).host_memory(total, pinned=True) for device, total in nbytes.items()}
    events: list[tuple[torch.device, Event]] = []

    def staged(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if isinstance(value, RaggedTensor):
            return RaggedTensor(staged(value.local), value.shape, value.start, value.stride())
        if not _is_on_accelerator(value):
            return value.detach().to("cpu", copy=True)
        device, size = value.device, _aligned(value.nbytes)
        memory, room[device] = room[device][:size], room[device][size:]
        copied, event = streams_for(device).fetch(value.detach(), memory)
        events.append((device, event))
        return copied

    result = {key: tree_map(staged, value) for key, value in state.items()}
    for device, event in events:
        with streams_for(device).on_host(event):
            pass
    return result


def _is_on_accelerator(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.device.type != "cpu"


def _aligned(nbytes: int) -> int:
    """So many bytes, and the gap after which the next tensor of any dtype may begin."""
    return -(-nbytes // 64) * 64


def _compact(value: Any) -> Any:
    """``value``; of tensors in it that are a part of a larger memory, a copy: a pickle would hold all of that."""

    def compact(inner: Any) -> Any:
        if type(inner) not in (torch.Tensor, nn.Parameter) or inner.layout != torch.strided:
            return inner
        return inner.detach().clone() if inner.untyped_storage().nbytes() > inner.nbytes else inner

    return value if isinstance(value, torch.Tensor) else tree_map(compact, value)


def held_nbytes(value: Any) -> int:
    """The bytes of a tensor in a state dict that this process holds."""
    if isinstance(value, RaggedTensor):
        return value.local.nbytes
    if isinstance(value, DTensor):
        return value.to_local().nbytes
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _packed(extra: Any) -> bytes:
    """As the bytes of a file; none for None.

    Raises:
        TypeError: they could not be loaded safely.
    """
    if extra is None:
        return b""
    buffer = io.BytesIO()
    try:
        torch.save(_compact(extra), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "extra must consist of tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them, "
            f"which torch.load(weights_only=True) takes, but: {error}"
        ) from error
    return buffer.getvalue()


# -- through torch.distributed.checkpoint ------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """Has tensors written from the memory in which they lie, though that is a part of a larger one's."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, _compact(object))
        return _by_itself(value.detach()) if isinstance(value, torch.Tensor) else value


def _by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, as if there were nothing else in its memory: what is written is the whole memory, and a writer of
    ``torch.distributed.checkpoint`` would copy it first. Bits that stand for an operation on it are resolved."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor
    return torch.from_dlpack(tensor.view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)


class _DurableFiles(FileSystem):
    """Files whose content is on the disk, and whose sizes and checksums are in ``entries``, once they are closed."""

    def __init__(self, entries: dict[str, Entry], told: files.Told) -> None:
        super().__init__()
        self._entries, self._told = entries, told

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with files.durable(Path(path), self._entries, self._told) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        files.disk.rename(Path(path), Path(new_path))
        self._entries[Path(new_path).name] = self._entries.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """Writes into the empty directory ``path``; ``entries`` tells what it wrote, ``told`` is told of bytes."""

    COPIED_AHEAD = 10_000_000  # bytes of an accelerator's that are copied while others are written; 0: none

    def __init__(
        self, path: Path, is_coordinator: bool, told: files.Told = files.nobody, copied_ahead: int = COPIED_AHEAD
    ) -> None:
        super().__init__(path, sync_files=False, per_thread_copy_ahead=copied_ahead)  # the files sync themselves
        self.entries: dict[str, Entry] = {}
        self.fs = _DurableFiles(self.entries, told)
        self.set_up_storage_writer(is_coordinator)
