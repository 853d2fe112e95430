"""Loading checkpoints: at any number of ranks, whatever the number that saved them, or whole and without a model.

Files are verified before they are read, each rank reads what it needs into memory of its own, and the model is given
all of it or nothing: an error on one rank is an error on all.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from fsdp.checkpoint import checksums, files, index
from fsdp.checkpoint.checksums import Entry
from fsdp.checkpoint.files import Manifest
from fsdp.checkpoint.keys import GROUPS, MODEL, OTHERS, STATE, param_and_state
from fsdp.checkpoint.load_state_dict import Loading
from fsdp.checkpoint.progress import bar
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.save_checkpoint import held_nbytes
from fsdp.checkpoint.snapshot import Snapshot
from fsdp.checkpoint.torch_state_dict import (
    StateDictOptions,
    get_model_state_dict,
    optimizers_to_load,
    prepare_model_state_dict,
    trained_parts,
)
from fsdp.checkpoint.torch_storage import LoadPlanner, VerifiedFiles
from fsdp.comm.consensus import Ranks
from fsdp.placement.boxes import Box


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


class _Like(NamedTuple):
    """What is to be loaded into: on this rank, the model's state by its keys, and the parameters that the optimizers
    train by their names, if there are any. Sharded values are ``RaggedTensor`` or ``DTensor``; None stands for whatever
    there is."""

    model: dict[str, Any]
    trained: dict[str, Any] | None


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    strict: bool = True,
    trusted: bool = False,
    process_group: Any = None,
    progress: bool = True,
) -> Extras:
    """Load a checkpoint into ``model``, at whatever number of ranks it was saved. All ranks have to call.

    The ranks compare every file of the checkpoint with the manifest, each some of them, and each reads the parts of
    tensors that it needs, into memory of its own, on CPU and of the size of its shards; what is read is verified while
    it is read, so that where all of a checkpoint is loaded no file is read twice for it. Then the model is given all of
    it. The model's values get the dtypes that the model has; where the parameters have the dtypes that they had,
    the optimizer's states are bit for bit those that were saved. Where another job saves into the directory meanwhile
    and removes what is being read, the newest is read instead.

    Args:
        path: a directory of checkpoints, of which the latest is loaded, or one checkpoint.
        model: as for :func:`save`, wrapped in whatever way, or plain.
        optimizer: as for :func:`save`; None leaves the optimizer state that was saved alone.
        strict: names that only the model or only the checkpoint has are errors; else these are left alone.
        trusted: whoever made the files may run code here, as a pickle does: what was saved with ``trusted=True`` can be
            loaded. Without it no code in the files is run.
        process_group: the ranks that load; None for the default group, or for this process alone if there is none.
        progress: as for :func:`save`.

    Returns:
        what each rank that saved passed as ``extra``, by rank, on every rank. Tensors are on CPU. A rank has read its
        own; what was another rank's is read from the checkpoint when it is asked for. Where more ranks load than saved,
        the new ones have none: ``extras[rank % len(extras)]`` is right at any number of ranks.

    Raises, on every rank if on one, with the model as it was:
        FileNotFoundError: there is no checkpoint, and none was there when this was called.
        RuntimeError: a file is damaged or missing, with its path; or names or shapes do not fit the model, with all of
            them; or a value can only be loaded with ``trusted``; or there is no optimizer state, or some that no
            ``optimizer`` takes, or that of an optimizer of another class; or a forward or backward is under way; or
            another rank is gone or was interrupted.
        OSError: a file cannot be read, with its path.
        ValueError: an optimizer has parameters in one group that were saved with different settings.
    """
    ranks = Ranks.of(process_group)
    reading = _Reading(strict, trusted, progress and ranks.rank == 0)
    with ranks.call("fsdp.checkpoint.load()"):
        return _load(ranks, Path(path), model, optimizer, reading)


def load_plain(path: str | Path, *, trusted: bool = False, progress: bool = True) -> Plain:
    """A checkpoint, or the latest in a directory of them, as whole tensors in this process, which needs no model and no
    process group. Every file is verified first.

    Args: as for :func:`load`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: a file is damaged or missing, with its path; or a value can only be loaded with ``trusted``.
    """
    reading = _Reading(True, trusted, progress)

    def read(directory: Path, manifest: Manifest) -> Plain:
        contents = _Contents(directory, manifest, None, reading)
        _verify(directory, contents.unread(manifest.files), progress)
        return Plain(*contents.read(manifest.files), [*Extras(directory, manifest)])

    return files.read_latest(Path(path), read, files.find)


class _Reading(NamedTuple):
    """How to read; see :func:`load`."""

    strict: bool
    trusted: bool
    progress: bool


def _load(
    ranks: Ranks, path: Path, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None, reading: _Reading
) -> Extras:
    def check() -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a model to load into, a torch.nn.Module, but got {type(model).__name__}")

    def like() -> _Like:
        values = get_model_state_dict(model, options=StateDictOptions(ragged=True))
        return _Like(values, None if optimizer is None else trained_parts(model, optimizer))

    ranks.together("check what is to be loaded", check)
    (values, optimizer_state), extras = _fetched(ranks, path, like, reading)
    options = StateDictOptions(ragged=True, strict=reading.strict)

    def plan() -> list[tuple[Optimizer, dict[str, Any]]]:
        if optimizer is None or optimizer_state is None:
            return []
        return optimizers_to_load(model, optimizer, optimizer_state, options=options)

    def attempt() -> Loading:
        loading = prepare_model_state_dict(model, values, options=options)
        undo.callback(loading.undo)
        for one, loadable in planned:
            _load_optimizer(one, loadable)
        return loading

    planned = ranks.together("take the optimizer's state", plan)
    with Snapshot(optimizers=[one for one, _ in planned]), contextlib.ExitStack() as undo:
        loading = ranks.together("load what was read", attempt)
        undo.pop_all()
    loading.write()
    return extras


def _load_optimizer(optimizer: Optimizer, loadable: dict[str, Any]) -> None:
    """Load state that an optimizer of the same class has saved.

    ``load_state_dict`` adds the options that older versions of a class did not save. With the groups of another class
    options are missing afterwards: the first step would fail, or train with the other's learning rate.

    Raises:
        RuntimeError: an optimizer of another class has saved it.
    """
    defaults = getattr(optimizer, "defaults", {})
    options = [name for name in defaults if all(name in group for group in optimizer.param_groups)]

    def lacking(groups: Iterable[Mapping[str, Any]]) -> list[str]:
        return list(dict.fromkeys(name for group in groups for name in options if name not in group))

    not_saved = lacking(loadable["param_groups"])
    failure: KeyError | None = None
    try:
        optimizer.load_state_dict(loadable)
    except KeyError as error:  # of a state or an option that the other class does not have
        if not not_saved:
            raise
        failure = error
    if missing := not_saved if failure is not None else lacking(optimizer.param_groups):
        saved = dict.fromkeys(name for group in loadable["param_groups"] for name in group if name != "params")
        raise RuntimeError(
            f"the checkpoint was saved with another optimizer than {type(optimizer).__name__}, which needs the options "
            f"{', '.join(map(repr, missing))}: its parameter groups have {', '.join(map(repr, saved))}. Nothing was "
            "loaded. Load with the optimizer that saved, or without one to begin with new optimizer state"
        ) from failure


def _fetched(ranks: Ranks, path: Path, like: Callable[[], _Like], reading: _Reading) -> tuple[_Read, Extras]:
    """What this rank needs of a checkpoint. All files are verified, by some rank each."""
    whole: dict[str, Entry] = {}  # the files of the checkpoint, on rank 0

    def find(path: Path) -> tuple[Path, Manifest]:
        def found(_: Any) -> list[tuple[Path, Manifest]]:
            directory, manifest = files.find(path.absolute())
            whole.clear()
            whole.update(manifest.files)
            first = [_share(manifest, rank, ranks.size) for rank in range(ranks.size)]
            for mine in first:
                mine[files.INDEX] = whole[files.INDEX]
            return [(directory, manifest._replace(files=mine)) for mine in first]

        return ranks.round("find a checkpoint", lambda: None, found)

    def read(directory: Path, manifest: Manifest) -> tuple[_Read, Extras]:
        contents: Any = None
        extras = Extras(directory, manifest)

        def look() -> list[str]:
            nonlocal contents
            own = like()
            contents = _Contents(directory, manifest, own, reading)
            if own.trained is not None and not contents.has_optimizer:
                raise RuntimeError(
                    f"the checkpoint {directory} has no optimizer state, and nothing was loaded. Load without an "
                    "optimizer to begin with new optimizer state"
                )
            return [*contents.files, files.extra_name(ranks.rank)]

        def entries(names: list[list[str]]) -> list[dict[str, Entry]]:
            return [{name: whole[name] for name in its if name in whole} for its in names]

        def read_parts() -> _Read:
            if ranks.rank < manifest.ranks:
                extras.read(ranks.rank, needed)
            return contents.read(needed)

        needed = ranks.round("look for what to read", look, entries)
        ranks.together(
            "verify a checkpoint", lambda: _verify(directory, contents.unread(manifest.files), reading.progress)
        )
        return ranks.together("read a checkpoint", read_parts), extras

    return files.read_latest(path, read, find)


# -- what is in a checkpoint -------------------------------------------------------------------------------------------


def _verify(directory: Path, entries: dict[str, Entry], progress: bool) -> None:
    with bar("verifying", sum(entry.size for entry in entries.values()), progress) as advance:
        checksums.verify(directory, entries, advance)


def _share(manifest: Manifest, rank: int, size: int) -> dict[str, Entry]:
    """The files that a rank verifies."""
    return {name: manifest.files[name] for name in sorted(manifest.files)[rank::size]}


class Extras(Sequence[Any]):
    """The values that the ranks passed to a save as ``extra``, by rank. One is read when it is first asked for."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._ranks, self._checksum = directory, manifest.ranks, manifest.checksum
        self._values: dict[int, Any] = {}
        self._entries: dict[str, Entry] | None = None  # of all ranks; read when the first of another rank is asked for

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        """
        Raises:
            IndexError: fewer ranks saved.
            RuntimeError: its file is damaged, or the checkpoint was removed or replaced since it was loaded.
        """
        if isinstance(rank, slice):
            return [self[number] for number in range(self._ranks)[rank]]
        if not -self._ranks <= rank < self._ranks:
            raise IndexError(
                f"{self._ranks} ranks saved {self._directory}, and rank {rank} has no extra in it: use "
                "extras[rank % len(extras)], or decide what a new rank begins with"
            )
        number = range(self._ranks)[rank]
        if number not in self._values:
            if self._entries is None:
                self._entries = self._all_entries()
            self.read(number, self._entries)
        return self._values[number]

    def __eq__(self, other: object) -> bool:
        return [*self] == [*other] if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"<the extra of {self._ranks} ranks in {self._directory}>"

    def read(self, rank: int, entries: Mapping[str, Entry]) -> None:
        """Read the extra of one rank; None if it has no file among ``entries``."""
        name, value = files.extra_name(rank), None
        if name in entries:
            content = checksums.read_verified(self._directory / name, entries[name])
            value = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        self._values[rank] = value

    def _all_entries(self) -> dict[str, Entry]:
        """The files of the checkpoint, if it is still the one that was loaded."""
        remedy = "ask for the extra of other ranks before later saves remove the checkpoint"
        try:
            manifest = files.find(self._directory)[1]
        except FileNotFoundError as error:
            raise RuntimeError(f"{self._directory} was removed since it was loaded: {remedy}") from error
        if manifest.checksum != self._checksum:
            raise RuntimeError(f"{self._directory} was replaced by another checkpoint since it was loaded: {remedy}")
        return manifest.files


_Read = tuple[dict[str, Any], dict[str, Any] | None]  # the model's state, and the optimizer's if it is to be read


class _Contents:
    """What a checkpoint holds of what is ``like`` this, for new memory on CPU: of ragged tensors, and of the
    optimizer's states for them, this rank's part. None for whatever there is, whole.

    Attributes:
        has_optimizer: whether optimizer state was asked for, and there is any.
        files: what has to be read, if not everything.
    """

    def __init__(self, directory: Path, manifest: Manifest, like: _Like | None, reading: _Reading) -> None:
        """
        Raises:
            RuntimeError: names or shapes do not fit, or there is more than is trained, or the index is damaged.
        """
        self._directory, self._reading, self._reader = directory, reading, FileSystemReader(directory)
        table = self._look_up(manifest)
        self._metadata = index.metadata_of(table)
        in_file = self._metadata.state_dict_metadata
        self._of_model = {key.removeprefix(MODEL): key for key in in_file if key.startswith(MODEL)}
        self.has_optimizer = GROUPS in in_file and (like is None or like.trained is not None)
        self._of_state = {key: param_and_state(key) for key in in_file if self.has_optimizer and key.startswith(STATE)}
        if like is None:
            like = _Like(dict.fromkeys(self._of_model), {name: None for name, _ in self._of_state.values()})
        else:
            saved = {name: in_file[key] for name, key in self._of_model.items()}
            if problems := "; ".join(_misfits(saved, like.model, strict=reading.strict)):
                raise RuntimeError(
                    f"the checkpoint {directory} does not fit the model, and nothing was loaded: {problems}"
                )
        likes = [(key, like.model[name]) for name, key in self._of_model.items() if name in like.model]
        trained = like.trained or {}
        likes += [(key, trained[name]) for key, (name, _) in self._of_state.items() if name in trained]
        self._wanted = {key: _empty(in_file[key], its) for key, its in likes}
        self._wanted |= dict.fromkeys(key for key in (GROUPS, OTHERS) if self.has_optimizer and key in in_file)
        left = list(dict.fromkeys(name for name, _ in self._of_state.values() if name not in trained))
        if left and reading.strict:
            raise RuntimeError(
                f"the checkpoint {directory} has optimizer state of {', '.join(map(repr, left))}, which no optimizer "
                "given holds: pass those that were saved, or strict=False to leave the others out"
            )
        holders = {rank for key, its in self._wanted.items() for rank in table[key].holders(_boxes(its))}
        self._parts = [files.part_name(rank) for rank in sorted(holders)]
        self.files = [*self._parts, *(files.data_name(rank) for rank in sorted(holders))]

    def unread(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """Those of the files that are not verified when they are read, by this rank or others. See [Note: Blocks] in
        ``fsdp.checkpoint.checksums``."""
        if self._wanted.keys() != self._metadata.state_dict_metadata.keys():
            return entries  # nobody reads all of them
        return {name: entry for name, entry in entries.items() if not files.is_data(name)}

    def _look_up(self, manifest: Manifest) -> index.Table:
        """Read which tensors there are, and on which ranks."""
        path = self._directory / files.INDEX
        with _index_of_ours(path):
            content = checksums.read_verified(path, manifest.files[path.name])
            return index.unpacked_table(content, manifest.ranks, manifest.writers)

    def read(self, entries: Mapping[str, Entry]) -> _Read:
        """Read it, from files that are among ``entries``.

        Raises:
            RuntimeError: they are damaged, or a value could run code and nobody said that it may.
        """
        wanted, metadata = self._wanted, self._metadata
        blocks: dict[str, list[str]] = {}
        for path in (self._directory / name for name in self._parts):
            with _index_of_ours(path):
                blocks |= index.unpack_part(checksums.read_verified(path, entries[path.name]), metadata, entries)
        self._reader.fs = VerifiedFiles(entries, blocks)
        with bar("loading", sum(map(held_nbytes, wanted.values())), self._reading.progress) as advance:
            planner = LoadPlanner(advance, trusted=self._reading.trusted)
            planner.set_up_planner(wanted, metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            plan = planner.create_local_plan()
            self._check_all_is_there(plan.items)
            place = attrgetter("relative_path", "offset")
            plan.items.sort(key=lambda item: place(metadata.storage_data[item.storage_index]))
            try:
                self._reader.read_data(self._reader.prepare_local_plan(plan), planner).wait()
            except (*_FORGED, AssertionError, EOFError, IndexError, pickle.UnpicklingError) as error:
                raise RuntimeError(
                    f"the files of tensors in {self._directory} do not have what the indices beside them say: {error}"
                ) from error
        read = planner.state_dict
        values = {name: read[key] for name, key in self._of_model.items() if key in read}
        if not self.has_optimizer:
            return values, None
        states: dict[str, Any] = {}
        for key, (name, state) in self._of_state.items():
            if key in read:
                states.setdefault(name, {})[state] = read[key]
        return values, {"state": states | read.get(OTHERS, {}), "param_groups": read[GROUPS]}

    def _check_all_is_there(self, items: Iterable[ReadItem]) -> None:
        """``torch.distributed.checkpoint`` leaves memory as it is for which it finds nothing."""
        found: Counter[str] = Counter()
        for item in items:
            found[item.dest_index.fqn] += math.prod(item.lengths)
        for key, value in self._wanted.items():
            needed = sum(box.numel for box in _boxes(value))
            if isinstance(value, torch.Tensor) and found[key] != needed:
                raise RuntimeError(f"{self._directory} has {found[key]} of {needed} elements of {key!r} for this rank")


_FORGED = AttributeError, KeyError, OverflowError, TypeError, ValueError  # raised for numbers that do not fit


@contextlib.contextmanager
def _index_of_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except _FORGED as error:
        raise RuntimeError(f"{path} is no index of a checkpoint of this package: {error}") from error


def _boxes(value: Any) -> list[Box]:
    """Of a tensor, those that are here; of anything else one."""
    if isinstance(value, (RaggedTensor, DTensor)):
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.__create_chunk_list__()]
    return [Box.whole(value.shape if isinstance(value, torch.Tensor) else ())]


def _misfits(
    saved: dict[str, TensorStorageMetadata | BytesStorageMetadata], template: dict[str, Any], *, strict: bool
) -> Iterator[str]:
    for where, names, others in (("checkpoint", template, saved), ("model", saved, template)) if strict else ():
        if missing := [repr(name) for name in names if name not in others]:
            yield f"missing in the {where}: {', '.join(missing)}"
    for name, value in template.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        found = saved.get(name)
        if name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX:  # whatever it is, the module's own method takes it
            continue
        in_file = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        if found is not None and shape != in_file:
            yield f"{name!r} has shape {in_file} in the checkpoint and {shape} in the model"


def _empty(what: TensorStorageMetadata | BytesStorageMetadata, like: Any) -> Any:
    """Memory for a tensor of a checkpoint, or for this rank's part of it where ``like`` is sharded and of its shape."""
    if not isinstance(what, TensorStorageMetadata):
        return None
    if isinstance(like, RaggedTensor) and like.shape == what.size and like.dim() > 0:
        local = torch.empty(like.local.numel(), dtype=what.properties.dtype, device="cpu")
        return like.with_local(local)
    if isinstance(like, DTensor) and like.shape == what.size:
        return torch.empty_like(like, dtype=what.properties.dtype, device="cpu")
    return torch.empty(what.size, dtype=what.properties.dtype, device="cpu")
