"""Loading checkpoints: at any number of ranks, or whole and without a model.

Each rank reads the elements that it needs, in blocks that are verified as they arrive. An error on one rank is an
error on all.

[Note: Two passes]
The blocks of sharded parameters and of existing states are verified through one small buffer. When all ranks have
verified theirs, the blocks are read again from the same open files, mostly from the page cache, into the tensors
themselves, and compared with the checksums once more. So a load takes a few megabytes. The second pass costs less time
than new memory of the size of the shards, whose pages have to be mapped and cleared.

A failure in the first pass changes nothing. A failure in the second leaves old and new values. With
``in_place=False`` there is one pass, into new memory, so that the old values stay until all ranks have verified the new
ones. Values that do not exist yet (states of a new optimizer), and values of the model that no unit shards, which
a module may change as it loads them, are read so in any case.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from fsdp.checkpoint import by_name, files, index
from fsdp.checkpoint.files import Manifest
from fsdp.checkpoint.forms import is_distributed, parts_of
from fsdp.checkpoint.keys import CLASSES, EXTRA, GROUPS, MODEL, OTHERS, STATE, param_and_state
from fsdp.checkpoint.load_state_dict import Loading, prepare
from fsdp.checkpoint.optim_dtypes import with_classes
from fsdp.checkpoint.optim_load import Whole
from fsdp.checkpoint.progress import bar
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.rank_file import Copy, RankFile
from fsdp.checkpoint.save_checkpoint import classes_of
from fsdp.checkpoint.snapshot import Snapshot
from fsdp.checkpoint.values import torch_dtype
from fsdp.comm import host_memory
from fsdp.comm.consensus import Ranks
from fsdp.flat.unwritten import warn_of_unwritten
from fsdp.placement.boxes import Box, Part, same_cover


class Plain(NamedTuple):
    """A checkpoint as whole values.

    Attributes:
        model: whole tensors in CPU memory, and the values of the model's state dict that are no tensors, by name.
        optimizer: ``{"state": {name: ...}, "param_groups": [...]}`` by name of parameter; None if none was saved.
        extra: the ``extra`` of each rank that saved, by rank.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: list[Any]

    def __repr__(self) -> str:
        states = "no optimizer state" if self.optimizer is None else f"states of {len(self.optimizer['state'])}"
        return f"Plain({len(self.model)} entries of the model, {states}, the extra of {len(self.extra)} ranks)"


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    strict: bool = True,
    trusted: bool = False,
    in_place: bool = True,
    process_group: Any = None,
    progress: bool = True,
) -> Any:
    """Load a checkpoint into ``model``, at any number of ranks. All ranks have to call.

    Each rank reads the parts of tensors that it needs, and verifies every block that it reads; sizes of all files are
    compared with the manifest. Once all ranks have verified everything, they read the blocks again, into the parameters
    and optimizer states themselves (``in_place``). Values of the model get the dtypes of the model. Where the
    parameters have the dtypes that they had, optimizer states are bit for bit those that were saved, in the same memory
    order. If another job saves into the directory meanwhile and removes this checkpoint, the newest is loaded.

    Args:
        path: a directory of checkpoints, whose latest is loaded, or one checkpoint; as for :func:`save`.
        model: as for :func:`save`, wrapped in any way, or plain.
        optimizer: as for :func:`save`; None leaves the saved optimizer state alone.
        strict: names that only the model or only the checkpoint has are errors; without it they are left alone.
        trusted: load pickled objects that were saved with ``trusted=True``. The author of the files may run code here.
        in_place: read into the sharded parameters and existing optimizer states themselves, which takes about 16 MB of
            memory. All blocks are verified first, so their files are read twice. If a file changes or cannot be read
            any more after the first pass, the model and the optimizer hold old and new values, with an error on all
            ranks that says so. A dict of ``optimizer.state_dict()`` from before holds the same tensors.
            ``load_state_dict()`` of an optimizer with states is called before and after the second pass. False: read
            once, into memory of the size of the shards, so that the old values stay until all ranks have verified the
            new ones.
        process_group: the ranks that load; None for the default group, or for this process alone if there is none.
        progress: as for :func:`save`.

    Returns:
        the ``extra`` that this rank has saved, with tensors on CPU; None if it has saved none. If more ranks load than
        saved, rank ``r`` gets that of rank ``r % saved``. (States of random generators repeat then.)

    Raises, on every rank if on one, with the model as it was, unless the text says that it has to be loaded again:
        FileNotFoundError: there is no checkpoint, and none was there at the call.
        RuntimeError: a file is damaged or missing, with the path; or the second pass of ``in_place`` has failed, and
            the model has to be loaded again; or names or shapes do not fit the model, with all of them; or a value can
            only be loaded with ``trusted``; or there is no optimizer state, or some that no ``optimizer`` takes, or
            that of an optimizer of another class; or a forward or backward is under way; or another rank is gone or was
            interrupted.
        OSError: a file cannot be read, with the path.
        ValueError: an optimizer has parameters in one group that were saved with different settings.
    """
    ranks = Ranks.of(process_group)
    reading = Reading(strict, trusted, in_place, progress and ranks.rank == 0)
    with ranks.call("fsdp.checkpoint.load()"):
        return _load(ranks, Path(path), model, optimizer, reading)


def load_plain(path: str | Path, *, trusted: bool = False, progress: bool = True) -> Plain:
    """Return a checkpoint, or the latest in a directory of them, as whole tensors in this process.

    It needs no model and no process group. Everything is verified.

    Args: as for :func:`load`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: a file is damaged or missing, with the path; or a value can only be loaded with ``trusted``.
    """
    reading = Reading(trusted=trusted, progress=progress)

    def read(directory: Path, manifest: Manifest) -> Plain:
        with Contents(directory, manifest, reading) as contents:
            tensors = {key: contents.empty(key) for key in contents.tensors}
            contents.read(contents.find(tensors))
            found = {**tensors, **contents.values(contents.others)}
            model = {key.removeprefix(MODEL): found[key] for key in contents.table if key.startswith(MODEL)}
            extras = [contents.extra(rank) for rank in range(manifest.ranks)]
            return Plain(model, _optimizer_state(found) if GROUPS in found else None, extras)

    return files.read_latest(Path(path), read, files.find)


class Reading(NamedTuple):
    """The options of a load; see :func:`load`."""

    strict: bool = True
    trusted: bool = False
    in_place: bool = False
    progress: bool = False


class Needed(NamedTuple):
    """The state to load: of the model, to load into, and the names of each optimizer's parameters."""

    model: dict[str, Any]
    trained: Sequence[Collection[str]] | None

    @property
    def params(self) -> set[str]:
        """The names of all optimizers' parameters."""
        return {name for names in self.trained or () for name in names}


class Found(NamedTuple):
    """The result of reading on one rank.

    Attributes:
        model: the model's state; sharded tensors are the model's own with ``in_place``.
        optimizers: the optimizers, and the states to load into them.
        again: reads the tensors that existed before; none without ``in_place``. Returns whether states are among them.
        extra: the value to return.
    """

    model: dict[str, Any]
    optimizers: list[tuple[Optimizer, dict[str, Any]]]
    again: Callable[[], bool]
    extra: Any


# Returns each optimizer and the dict to load into it, from the optimizer's state in a checkpoint.
Plan = Callable[["Contents"], list[tuple[Optimizer, dict[str, Any]]]]


def _load(
    ranks: Ranks, path: Path, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None, reading: Reading
) -> Any:
    several = [] if optimizer is None else by_name.as_list(optimizer)
    settings, strict = by_name.ragged(), reading.strict

    def check() -> Needed:
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a model to load into, a torch.nn.Module, but got {type(model).__name__}")
        values = by_name.model_state(model, settings)
        return Needed(values, None if optimizer is None else by_name.trained_names(model, several))

    def plan(contents: Contents) -> list[tuple[Optimizer, dict[str, Any]]]:
        if optimizer is None:
            return []
        state = contents.optimizer_state(needed.params)
        _check_classes(several, state["param_groups"], contents.values([CLASSES]).get(CLASSES, []), needed)
        return by_name.optimizers_to_load(model, several, state, strict=strict)

    with ExitStack() as stack:
        needed = ranks.together("check what is to be loaded", check)
        found = fetched(ranks, path, needed, plan, reading, stack)

        def attempt() -> Loading:
            loading: Loading = by_name.load_model_state(prepare, model, found.model, settings, strict=strict)
            undo.callback(loading.undo)
            load_optimizers()
            return loading

        def load_optimizers() -> None:
            for one, loadable in found.optimizers:
                _load_optimizer(one, loadable)

        with Snapshot(optimizers=[one for one, _ in found.optimizers]), ExitStack() as undo:
            loading = ranks.together("load what was read", attempt)
            undo.pop_all()

        def overwrite() -> None:
            if found.again():
                load_optimizers()  # which may have copied the states, for another dtype or class

        if reading.in_place:
            try:
                ranks.together("load what was verified", overwrite)
            except Exception as error:  # of any class: it reached this rank after a peer has begun to overwrite
                raise RuntimeError(
                    "the checkpoint was verified, but the load has failed in the second pass, so the model and the "
                    "optimizer hold old and new values: load again, this checkpoint or another, before they are used. "
                    f"(With in_place=False they keep the old values in such a case.) {error}"
                ) from error
        loading.write()
        warn_of_unwritten(model, "fsdp.checkpoint.load()")
        return found.extra


def _load_optimizer(optimizer: Optimizer, loadable: dict[str, Any]) -> None:
    """Load state that an optimizer of the same class has saved.

    ``load_state_dict`` adds the options that older versions of a class did not save. With the groups of another class
    options are missing afterwards: the first step would fail, or train with the learning rate of that class.
    """
    defaults = getattr(optimizer, "defaults", {})
    options = [name for name in defaults if all(name in group for group in optimizer.param_groups)]

    def lacking(groups: Iterable[Mapping[str, Any]]) -> list[str]:
        return list(dict.fromkeys(name for group in groups for name in options if name not in group))

    failure: KeyError | None = None
    try:
        optimizer.load_state_dict(with_classes(optimizer, loadable))
        missing = lacking(optimizer.param_groups)
    except KeyError as error:  # of a state or an option that the class in the checkpoint does not have
        failure, missing = error, lacking(loadable["param_groups"])
        if not missing:
            raise
    if missing:
        saved = dict.fromkeys(name for group in loadable["param_groups"] for name in group if name != "params")
        raise RuntimeError(
            f"the checkpoint was saved with another optimizer than {type(optimizer).__name__}, which needs the options "
            f"{', '.join(map(repr, missing))}: its parameter groups have {', '.join(map(repr, saved))}. Nothing was "
            "loaded. Load with the optimizer that saved, or without one to begin with new optimizer state"
        ) from failure


def _check_classes(
    optimizers: Iterable[Optimizer],
    groups: list[dict[str, Any]],
    saved: list[list[str]],
    needed: Needed,
) -> None:
    """Refuse the state of another of torch's optimizer classes, which may have options of the same names."""
    by_name = {name: classes for group, classes in zip(groups, saved) for name in group["params"]}
    for optimizer, names in zip(optimizers, needed.trained or ()):
        own = classes_of(optimizer)
        for name in names:
            classes = by_name.get(name, [])
            if own and classes and not {*own} & {*classes}:
                raise RuntimeError(
                    f"the checkpoint was saved with another optimizer than {type(optimizer).__name__}: {name!r} was "
                    f"trained by {classes[-1]}. Nothing was loaded. Load with the optimizer that saved, or without one "
                    "to begin with new optimizer state"
                )


# -- finding and reading -----------------------------------------------------------------------------------------------


def fetched(ranks: Ranks, path: Path, needed: Needed, plan: Plan, reading: Reading, stack: ExitStack) -> Found:
    """Find the checkpoint, and read and verify everything that this rank needs. ``stack`` keeps the files open."""

    def find(path: Path) -> tuple[Path, Manifest]:
        def found() -> tuple[Path, Manifest, str]:
            directory, manifest = files.find(path.absolute())
            return directory, manifest._replace(files={}), str(path)  # each rank reads the files itself

        directory, manifest, given = ranks.first("find a checkpoint", found)
        files.warn_of_path(str(path), given)
        return directory, manifest

    def read(directory: Path, of_first: Manifest) -> Found:
        own = ranks.rank % of_first.ranks

        def look() -> Contents:
            manifest = files.find(directory)[1]
            if manifest.checksum != of_first.checksum:
                raise files.damage(f"{directory / files.MANIFEST} is another file on rank 0")
            for name in sorted(manifest.files)[ranks.rank :: ranks.size]:  # this rank's share
                files.check_size(directory / name, manifest.files[name])
            contents = stack.enter_context(Contents(directory, manifest, reading))
            contents.check_fits(needed)
            return contents

        contents = ranks.together("look for what to read", look)
        return ranks.together("read a checkpoint", lambda: _read_parts(contents, needed, plan, own))

    return files.read_latest(path, read, find)


def _read_parts(contents: Contents, needed: Needed, plan: Plan, own: int) -> Found:
    likes = {MODEL + name: like for name, like in needed.model.items()}
    in_model = {key: likes[key] for key in contents.tensors if key in likes}
    live: dict[str, torch.Tensor] = {  # not of other classes: load hooks of modules may change the values of those
        key: like
        for key, like in in_model.items()
        if contents.reading.in_place and isinstance(like, RaggedTensor) and contents.has_parts_of(key, like)
    }
    new = contents.shadow({key: like for key, like in in_model.items() if key not in live})
    found = {**live, **new, **contents.values(key for key in contents.others if key in likes)}
    optimizers = plan(contents)
    for key, whole in contents.states.items():
        if whole.target is not None:
            (live if whole.exists else new)[key] = whole.target
    of_live, of_new = contents.find(live), contents.find(new)
    contents.read(of_live, verify_only=True)
    contents.read(of_new)

    def again() -> bool:
        contents.read(of_live)
        return any(whole.exists for whole in contents.states.values())

    model = {key.removeprefix(MODEL): value for key, value in found.items()}
    return Found(model, optimizers, again, contents.extra(own))


class Contents(ExitStack):
    """A checkpoint that is being read; the context closes the files.

    Attributes:
        table: the index.
        tensors, others: the keys of tensors, and of values that are no tensors.
        states: the tensors of ``optimizer_state`` that have dimensions.
    """

    def __init__(self, directory: Path, manifest: Manifest, reading: Reading) -> None:
        """Read the index."""
        super().__init__()
        self.directory, self.reading, self._records = directory, reading, manifest.files
        path = directory / files.INDEX
        content = files.read_verified(path, manifest.files[files.INDEX])
        with files.of_ours(path):
            nbytes = sum(record.size for record in manifest.files.values())
            self.table = index.unpacked(content, manifest.ranks, nbytes)
        self.tensors = [key for key, saved in self.table.items() if saved.dtype]
        self.others = [key for key, saved in self.table.items() if not saved.dtype]
        self.states: dict[str, Whole] = {}
        self._open: dict[int, RankFile] = {}

    def _file(self, rank: int) -> RankFile:
        if rank not in self._open:
            name = files.rank_name(rank)
            self._open[rank] = self.enter_context(RankFile(self.directory / name, self._records[name]))
        return self._open[rank]

    def check_fits(self, needed: Needed) -> None:
        """Check names and shapes."""
        saved = {key.removeprefix(MODEL): of for key, of in self.table.items() if key.startswith(MODEL)}
        strict = self.reading.strict
        if problems := "; ".join(_misfits(saved, needed.model, strict=strict)):
            raise RuntimeError(
                f"the checkpoint {self.directory} does not fit the model, and nothing was loaded: {problems}"
            )
        if needed.trained is None:
            return
        if GROUPS not in self.table:
            raise RuntimeError(
                f"the checkpoint {self.directory} has no optimizer state, and nothing was loaded. Load without an "
                "optimizer to begin with new optimizer state"
            )
        names = [param_and_state(key)[0] for key in self.table if key.startswith(STATE)]
        trained = needed.params
        left = list(dict.fromkeys(name for name in names if name not in trained))
        if left and strict:
            raise RuntimeError(
                f"the checkpoint {self.directory} has optimizer state of {', '.join(map(repr, left))}, which no "
                "optimizer given holds: pass those that were saved, or strict=False to leave the others out"
            )

    def has_parts_of(self, key: str, like: Any) -> bool:
        """True if this rank needs only the part of the tensor that it holds of ``like``."""
        return is_distributed(like) and like.shape == self._shape(key)

    def shadow(self, likes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Make CPU memory for tensors: for this rank's part, where ``like`` is distributed and of the same shape."""

        def memory(key: str, like: Any) -> torch.Tensor:
            dtype, cpu = self._dtype(key), torch.device("cpu")
            if not self.has_parts_of(key, like):
                return self.empty(key)
            if isinstance(like, RaggedTensor):
                return like.with_local(host_memory.empty(like.local.numel(), dtype=dtype, device=cpu))
            return torch.empty_like(like, dtype=dtype, device=cpu)

        return {key: memory(key, like) for key, like in likes.items()}

    def empty(self, key: str) -> torch.Tensor:
        """Make CPU memory for a whole tensor."""
        shape = self._shape(key)
        return host_memory.empty(shape.numel(), dtype=self._dtype(key), device=torch.device("cpu")).view(shape)

    def _shape(self, key: str) -> torch.Size:
        return torch.Size(self.table[key].shape)

    def _dtype(self, key: str) -> torch.dtype:
        return torch_dtype(self.table[key].dtype)

    def find(self, targets: Mapping[str, torch.Tensor]) -> dict[int, list[Copy]]:
        """Find the elements of ``targets``; return copies for ``read``, by the rank of the file."""
        parts = {key: parts_of(target) for key, target in targets.items()}
        by_rank: dict[int, dict[str, list[Part]]] = {}
        for key, several in parts.items():
            for rank in self.table[key].holders(box for box, _ in several):
                by_rank.setdefault(rank, {})[key] = several
        copies: dict[int, list[Copy]] = {}
        found: dict[str, list[Box]] = {key: [] for key in parts}
        for rank, wanted in sorted(by_rank.items()):
            file = self._file(rank)
            with files.of_ours(file.path):
                copies[rank], in_file = file.find(wanted)
            for key, boxes in in_file.items():
                found[key] += boxes
        for key, several in parts.items():
            needed = [box for box, _ in several]
            if not same_cover(found[key], needed):
                here, numel = (sum(box.numel for box in boxes) for boxes in (found[key], needed))
                twice = ", but some of them twice and others not at all" if here == numel else ""
                words = f"{here} of {numel} elements of {key!r} for this rank{twice}"
                raise files.damage(f"{self.directory} has {words}")
        return copies

    def read(self, copies: Mapping[int, list[Copy]], *, verify_only: bool = False) -> None:
        """Read what ``find`` has found, or with ``verify_only`` compare the checksums of the blocks."""
        nbytes = sum(copy.nbytes for of_rank in copies.values() for copy in of_rank)
        with bar("verifying" if verify_only else "loading", nbytes, self.reading.progress) as advance, torch.no_grad():
            for rank, of_rank in copies.items():
                file = self._file(rank)
                with files.of_ours(file.path):
                    file.read(of_rank, advance, verify_only=verify_only)

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read values that are no tensors, from the file of rank 0; of ``keys``, those that it has."""
        file = self._file(0)
        return {key: self._value(file, key) for key in keys if key in file.keys}

    def extra(self, rank: int) -> Any:
        """Read the ``extra`` of a rank; None if there is none."""
        file = self._file(rank)
        return self._value(file, EXTRA) if EXTRA in file.keys else None

    def _value(self, file: RankFile, key: str) -> Any:
        try:
            return file.value(key, trusted=self.reading.trusted)
        except pickle.UnpicklingError as error:
            raise RuntimeError(
                f"{key!r} holds more than tensors and plain values, and loading it could run any code. If you trust "
                "whoever saved it, load it with trusted=True"
            ) from error

    def optimizer_state(self, trained: Collection[str]) -> dict[str, Any]:
        """Return the optimizer's state dict, with tensors that have dimensions as ``Whole``, to be read later."""

        def wanted(key: str) -> bool:
            return key.startswith(STATE) and param_and_state(key)[0] in trained

        keys = [*filter(wanted, self.tensors)]
        scalars = {key: self.empty(key) for key in keys if not self._shape(key)}
        self.states = {key: self._whole(key) for key in keys if key not in scalars}
        self.read(self.find(scalars))
        values = self.values([*filter(wanted, self.others), GROUPS, OTHERS])
        return _optimizer_state({key: (scalars | self.states)[key] for key in keys} | values)

    def _whole(self, key: str) -> Whole:
        """Describe a state that is read later."""
        state, param = self.table[key], self.table.get(MODEL + param_and_state(key)[0])
        usual = tuple(range(len(state.shape))) if param is None or param.shape != state.shape else param.order
        order = None if state.order == usual else state.order
        return Whole(self._dtype(key), state.shape, order, self.reading.in_place)


def _optimizer_state(found: Mapping[str, Any]) -> dict[str, Any]:
    states: dict[str, dict[Any, Any]] = {}
    for key, value in found.items():
        if key.startswith(STATE):
            name, state = param_and_state(key)
            states.setdefault(name, {})[state] = value
    return {"state": states | found.get(OTHERS, {}), "param_groups": found[GROUPS]}


def _misfits(saved: dict[str, index.Saved], needed: dict[str, Any], *, strict: bool) -> Iterator[str]:
    for where, names, others in (("checkpoint", needed, saved), ("model", saved, needed)) if strict else ():
        if missing := [repr(name) for name in names if name not in others]:
            yield f"missing in the {where}: {', '.join(missing)}"
    for name, value in needed.items():
        found = saved.get(name)
        if found is None or name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX:  # a module takes any extra state
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        in_file = found.shape if found.dtype else None
        if shape != in_file:
            yield f"{name!r} has shape {in_file} in the checkpoint and {shape} in the model"
