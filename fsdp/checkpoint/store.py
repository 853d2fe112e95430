"""Save and load checkpoints: at any number of ranks, from any to any other.

Every rank writes what its shards hold, without any communication of tensor data, through the storage of
``torch.distributed.checkpoint``, which can read the result too: model state is under ``"model.<name>"``, optimizer
state under ``"optim.state.<name>.<state>"``. The ranks exchange only what they are about to write, and whether it went
well: an error on one is an error on all.
:mod:`fsdp.checkpoint.files` tells how directories are written and verified.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.optim import Optimizer

from fsdp.checkpoint import files
from fsdp.checkpoint.dcp import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fsdp.checkpoint.files import Entry, Manifest
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.state_dict import wrappers_in
from fsdp.comm.collectives import all_gather_object, default_group
from fsdp.comm.streams import streams_for

_MODEL, _STATE, _GROUPS = "model.", "optim.state.", "optim.param_groups"  # what keys begin with
_T = TypeVar("_T")


class Plain(NamedTuple):
    """A checkpoint as whole values.

    Attributes:
        model: whole tensors in CPU memory, and what else the model's state dict had, by name.
        optimizer: ``{"state": {name: ...}, "param_groups": [...]}`` by name of parameter; None if none was saved.
        extra: what each rank that saved passed as ``extra``, by rank.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: list[Any]


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    process_group: Any = None,
) -> Path:
    """Add a checkpoint to the directory ``path``, which is made if need be. All ranks have to call.

    Each call makes a new directory in ``path``, and then has the file ``latest`` in ``path`` name it. Until the very
    end, and after any error, ``latest`` names the checkpoint before, whole; so also after a crash or a loss of power at
    any moment. The directory has to be one that all ranks see.

    Args:
        model: a wrapped module, a module with wrapped ones in it, or a plain one. Each rank writes its shards; what is
            not sharded (buffers, ignored parameters, extra state) is written as rank 0 has it.
        optimizer: one of the model's parameters, or several of different ones.
        extra: what this rank wants to have back, like the step, the state of random generators, the position in the
            data: anything that ``torch.load(weights_only=True)`` takes, as there are tensors, numbers, strings, bytes,
            None, and lists, tuples, sets and dicts of them, but no NumPy arrays or objects of other classes. May
            differ from rank to rank.
        keep: how many checkpoints are to stay in ``path``, this one included; None for all. Older ones, and what saves
            that died have left, are removed after this one is published. Two jobs that save into one directory at
            the same time may do so only without it.
        process_group: the ranks that save; None for the default group, or for this process alone if there is none.

    Returns:
        the directory of the new checkpoint.

    Raises, on every rank if on one, with the checkpoint before intact, and the model as it was:
        OSError: something could not be written. (``PermissionError``, ``FileNotFoundError`` and so on.)
        TypeError: ``extra`` holds what is not loaded safely.
        ValueError: ``keep`` is no positive number.
        RuntimeError: a forward or backward is under way; or another process has removed or changed what was written.
        NotImplementedError: the optimizer has states that cannot leave a sharded parameter.
    """
    ranks = _Ranks(model, process_group)
    saving = _Saving(ranks.rank)
    ranks.together("check what is to be saved", lambda: saving.check(model, extra, keep))
    if optimizer is not None:  # its ranks tell each other what states there are, errors too
        saving.state.update(_optimizer_entries(model, optimizer))
    try:
        plans = ranks.together("plan a checkpoint", lambda: saving.plan(Path(path)))
        written = ranks.together("write a checkpoint", lambda: saving.write(plans))
        return ranks.together("publish a checkpoint", lambda: saving.publish(written, keep))[0]
    except Exception:
        if ranks.rank == 0 and saving.directory is not None:
            files.discard(saving.directory)
        raise


class _Plan(NamedTuple):
    """What one rank has to write, and on rank 0 the directory to write to."""

    items: Any
    directory: Path | None


class _Written(NamedTuple):
    """What one rank has written: where its parts of tensors are, and its files."""

    results: list[Any]
    entries: dict[str, Entry]


class _Saving:
    """One rank's share in a save, step by step; each step on all ranks before the next."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {}
        self.directory: Path | None = None
        self._rank, self._extra = rank, b""

    def check(self, model: nn.Module, extra: Any, keep: int | None) -> None:
        """Take the model's state, and refuse what cannot be saved."""
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be a positive number of checkpoints or None, but got {keep!r}")
        self._extra = _packed(extra)
        values = get_model_state_dict(model, options=StateDictOptions(ragged=True))
        self.state.update((_MODEL + name, value) for name, value in values.items())

    def plan(self, root: Path) -> _Plan:
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        first = self._rank == 0
        mine = {key: value for key, value in self.state.items() if first or isinstance(value, RaggedTensor)}
        self._planner.set_up_planner(mine, is_coordinator=first)
        items = self._planner.create_local_plan()
        if first:
            self.directory = files.begin(root)
        return _Plan(items, self.directory)

    def write(self, plans: list[_Plan]) -> _Written:
        """This rank's file of tensors, if it has any, and its ``extra``."""
        directory = plans[0].directory
        assert directory is not None
        self.directory = directory
        self._writer = _Writer(directory, self._rank == 0)
        of_ranks, self._metadata = self._planner.create_global_plan([plan.items for plan in plans])
        plan = self._planner.finish_plan(self._writer.prepare_global_plan(of_ranks)[self._rank])
        results = self._writer.write_data(plan, self._planner).wait() if plan.items else []
        if self._extra:
            files.write_durably(directory / _extra_name(self._rank), self._extra, self._writer.entries)
        files.disk.sync_directory(directory)
        return _Written(results, self._writer.entries)

    def publish(self, written: list[_Written], keep: int | None) -> Path:
        """On rank 0 only; the others learn where it is to be."""
        assert self.directory is not None
        if self._rank != 0:
            return self.directory
        self._writer.finish(self._metadata, [theirs.results for theirs in written])
        entries = {name: entry for theirs in written for name, entry in theirs.entries.items()}
        return files.publish(self.directory, entries | self._writer.entries, len(written), keep)


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    strict: bool = True,
    process_group: Any = None,
) -> list[Any]:
    """Load a checkpoint into ``model``, at whatever number of ranks it was saved. All ranks have to call.

    First the ranks compare every file of the checkpoint with the manifest, each some of them; then each reads the parts
    of tensors that it needs, into memory of its own, on CPU and of the size of its shards; and then the model is given
    all of it. Values get the dtypes that the model has. Files are trusted as those of
    ``torch.distributed.checkpoint`` are: load none that others could have made to harm you.

    Args:
        path: a directory of checkpoints, of which the latest is loaded, or one checkpoint.
        model: as for :func:`save`, wrapped in whatever way, or plain.
        optimizer: as for :func:`save`; None leaves the optimizer state that was saved alone.
        strict: names that only the model or only the checkpoint has are errors; else these are left alone.
        process_group: the ranks that load; None for the default group, or for this process alone if there is none.

    Returns:
        what each rank that saved passed as ``extra``, by rank, on every rank. Tensors are on CPU.

    Raises, on every rank if on one, with the model as it was:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: a file is damaged or missing, with its path; or names or shapes do not fit the model, with all of
            them; or there is no optimizer state; or a forward or backward is under way.
    """
    ranks = _Ranks(model, process_group)

    def look() -> tuple[Path, Manifest] | None:
        return files.find(Path(path)) if ranks.rank == 0 else None

    found = ranks.together("find a checkpoint", look)[0]
    assert found is not None
    directory, manifest = found
    mine = sorted(manifest.files)[ranks.rank :: ranks.size]
    ranks.together(
        "verify a checkpoint", lambda: files.verify(directory, {name: manifest.files[name] for name in mine})
    )

    loaded: list[tuple[dict[str, Any], dict[str, Any] | None]] = []

    def read() -> list[Any]:
        template = get_model_state_dict(model, options=StateDictOptions(ragged=True))
        loaded.append(_read(directory, template, strict=strict, optimizer=optimizer is not None))
        if optimizer is not None and loaded[0][1] is None:
            raise RuntimeError(f"the checkpoint {directory} has no optimizer state, and nothing was loaded")
        return _extras(directory, manifest) if ranks.rank == 0 else []

    extras = ranks.together("read a checkpoint", read)[0]
    ((values, optimizer_state),) = loaded
    options = StateDictOptions(ragged=True, strict=strict)
    if optimizer is not None:  # first, since it can still fail
        assert optimizer_state is not None
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    set_model_state_dict(model, values, options=options)
    return extras


def load_plain(path: str | Path) -> Plain:
    """A checkpoint, or the latest in a directory of them, as whole tensors in this process, which needs no model and no
    process group. Every file is verified first.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: a file is damaged or missing, with its path.
    """
    directory, manifest = files.find(Path(path))
    files.verify(directory, manifest.files)
    return Plain(*_read(directory, None, strict=True, optimizer=True), _extras(directory, manifest))


# -- the ranks ---------------------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """An exception on its way to other ranks."""

    kind: str
    number: int | None  # of an OSError
    text: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, OSError) and error.errno is not None:
            where = f": {error.filename}" if error.filename is not None else ""
            return _Failure("OSError", error.errno, f"{error.strerror}{where}")
        return _Failure(type(error).__name__, None, str(error))

    def as_error(self, text: str) -> Exception:
        if self.number is not None:
            return OSError(self.number, text)  # an instance of the fitting subclass
        kinds = (TypeError, ValueError, NotImplementedError, FileNotFoundError, OSError)
        return {kind.__name__: kind for kind in kinds}.get(self.kind, RuntimeError)(text)


class _Ranks:
    """The ranks that save or load together."""

    def __init__(self, model: nn.Module, process_group: Any) -> None:
        if process_group is None and dist.is_initialized():
            process_group = default_group()
        self._group = process_group
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.size: int = 1 if process_group is None else process_group.size()
        wrappers = wrappers_in(model)
        self._device = wrappers[0]._fsdp_unit.device if wrappers else torch.device("cpu")

    def together(self, what: str, action: Callable[[], _T]) -> list[_T]:
        """Do something on every rank.

        Returns:
            every rank's result, by rank.

        Raises:
            Exception: on every rank, if it failed on one: an error of the kind that the first of them met, with all
                their words.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        if self.size == 1:
            if error is not None:
                raise error
            return [result]
        told = (result, _Failure.of(error) if error is not None else None)
        with streams_for(self._device).on_device():
            everyone = all_gather_object(told, self._group, what)
        failures = {rank: failure for rank, (_, failure) in enumerate(everyone) if failure is not None}
        if not failures:
            return [theirs for theirs, _ in everyone]
        text = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failures.items())
        raise next(iter(failures.values())).as_error(text) from error


# -- what ranks add ----------------------------------------------------------------------------------------------------


def _extra_name(rank: int) -> str:
    return f"extra_{rank}.pt"


def _packed(extra: Any) -> bytes:
    """As the bytes of a file; none for None.

    Raises:
        TypeError: they could not be loaded safely.
    """
    if extra is None:
        return b""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "extra must consist of tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them, "
            f"which torch.load(weights_only=True) takes, but: {error}"
        ) from error
    return buffer.getvalue()


def _extras(directory: Path, manifest: Manifest) -> list[Any]:
    return [
        torch.load(directory / _extra_name(rank), weights_only=True, map_location="cpu")
        if _extra_name(rank) in manifest.files
        else None
        for rank in range(manifest.ranks)
    ]


# -- through torch.distributed.checkpoint ------------------------------------------------------------------------------


class _DurableFiles(FileSystem):
    """Files whose content is on the disk, and whose sizes and checksums are in ``entries``, once they are closed."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        super().__init__()
        self._entries = entries

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with files.durable(Path(path), self._entries) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        files.disk.rename(Path(path), Path(new_path))
        self._entries[Path(new_path).name] = self._entries.pop(Path(path).name)


class _Writer(FileSystemWriter):
    """Writes into the empty directory ``path``; ``entries`` tells what it wrote."""

    def __init__(self, path: Path, is_coordinator: bool) -> None:
        super().__init__(path, sync_files=False)  # the files do it themselves
        self.entries: dict[str, Entry] = {}
        self.fs = _DurableFiles(self.entries)
        self.set_up_storage_writer(is_coordinator)


def _optimizer_entries(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    given = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(ragged=True, cpu_offload=True))
    entries = {f"{_STATE}{name}.{key}": value for name, of in given["state"].items() for key, value in of.items()}
    return {**entries, _GROUPS: given["param_groups"]}


def _named_by(key: str) -> tuple[str, str | None] | None:
    """The name that a key of a checkpoint stands for, and the state of that parameter, None for its value."""
    if key.startswith(_MODEL):
        return key.removeprefix(_MODEL), None
    if key.startswith(_STATE):
        name, _, state = key.removeprefix(_STATE).rpartition(".")
        return name, state
    return None


def _read(
    directory: Path, template: dict[str, Any] | None, *, strict: bool, optimizer: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a checkpoint holds of a model with the state ``template``, in new memory on CPU; of ragged tensors, and of
    the optimizer's states for them, this rank's part. Without a template whatever there is, whole.

    Returns:
        the model's state, and the optimizer's if it is asked for and there is any.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    reader = FileSystemReader(directory)
    metadata = reader.read_metadata()
    saved = {key: (place, what) for key, what in metadata.state_dict_metadata.items() if (place := _named_by(key))}
    if template is None:
        template = {name: None for (name, state), _ in saved.values() if state is None}
    else:
        in_file = {name: what for (name, state), what in saved.values() if state is None}
        problems = list(_misfits(in_file, template, strict=strict))
        if problems:
            listed = "; ".join(problems)
            raise RuntimeError(f"the checkpoint {directory} does not fit the model, and nothing was loaded: {listed}")
    wanted = {
        key: _empty(what, template[name])
        for key, ((name, state), what) in saved.items()
        if name in template and (state is None or optimizer)
    }
    has_optimizer = optimizer and _GROUPS in metadata.state_dict_metadata
    if has_optimizer:
        wanted[_GROUPS] = None
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    of_model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for key, value in planner.state_dict.items():
        if key != _GROUPS:
            (name, state), _ = saved[key]
            if state is None:
                of_model[name] = value
            else:
                states.setdefault(name, {})[state] = value
    return of_model, {"state": states, "param_groups": planner.state_dict[_GROUPS]} if has_optimizer else None


def _misfits(
    saved: dict[str, TensorStorageMetadata | BytesStorageMetadata], template: dict[str, Any], *, strict: bool
) -> Iterator[str]:
    if strict:
        yield from _named("missing in the checkpoint", [name for name in template if name not in saved])
        yield from _named("missing in the model", [name for name in saved if name not in template])
    for name, value in template.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        found = saved.get(name)
        in_file = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        if found is not None and shape != in_file:
            yield f"{name!r} has shape {in_file} in the checkpoint and {shape} in the model"


def _named(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{what}: {', '.join(map(repr, names))}"


def _empty(what: TensorStorageMetadata | BytesStorageMetadata, like: Any) -> Any:
    """Memory for a tensor of a checkpoint, or for this rank's part of it where ``like`` is ragged and of its shape."""
    if not isinstance(what, TensorStorageMetadata):
        return None
    if isinstance(like, RaggedTensor) and like.shape == what.size and like.dim() > 0:
        local = torch.empty(like.local.numel(), dtype=what.properties.dtype)
        return RaggedTensor(local, like.shape, like.start, like.stride())
    return torch.empty(what.size, dtype=what.properties.dtype)
