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

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from fsdp.checkpoint import by_name, files, index
from fsdp.checkpoint.files import Manifest
from fsdp.checkpoint.forms import is_distributed, parts_of
from fsdp.checkpoint.index import CLASSES, EXTRA, GROUPS, MODEL, OTHERS, STATE, VERSIONS, param_and_state
from fsdp.checkpoint.load_state_dict import Backup, Loading, prepare
from fsdp.checkpoint.local import Found, Gathering, Local, look
from fsdp.checkpoint.optim_dtypes import with_classes
from fsdp.checkpoint.optim_load import UnreadState
from fsdp.checkpoint.progress import bar
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.rank_file import PieceRead, RankFile
from fsdp.checkpoint.save_checkpoint import Optimizers, classes_of, count_of
from fsdp.checkpoint.values import torch_dtype
from fsdp.comm import host_memory
from fsdp.comm.consensus import Ranks
from fsdp.comm.user_warnings import warn_user
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


def load(
    path: str | Path | Local | Sequence[str | Path | Local],
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
        path: a directory of checkpoints, whose latest is loaded, or one checkpoint; as for :func:`save`. Or a list of
            such paths and of :class:`~fsdp.checkpoint.Local`: the newest checkpoint, by the time of the save, that is
            whole is loaded, with a warning that says why a newer one of the hosts was not; None is returned if there
            is none.
        model: as for :func:`save`, wrapped in any way, or plain.
        optimizer: as for :func:`save`; None leaves the saved optimizer state alone.
        strict: names that only the model or only the checkpoint has are errors; without it they are not changed.
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
            that of an optimizer of another class; or the ranks pass different numbers of optimizers (``strict``); or a
            forward or backward is under way; or another rank is gone or was interrupted.
        OSError: a file cannot be read, with the path.
        ValueError: an optimizer has parameters in one group that were saved with different settings.
    """
    ranks = Ranks.of(process_group)
    reading = Reading(strict, trusted, in_place, progress and ranks.rank == 0)
    loading = _Load(model, optimizer, reading)
    with ranks.call("fsdp.checkpoint.load()"):
        if isinstance(path, (str, Path)):
            return _load(ranks, partial(_read_latest, ranks, Path(path), loading), loading)
        return _load_newest(ranks, [path] if isinstance(path, Local) else path, loading)


def load_plain(path: str | Path, *, trusted: bool = False, progress: bool = True) -> Plain:
    """Return a checkpoint, or the latest in a directory of them, as whole tensors in this process.

    It needs no model and no process group. Everything is verified.

    Args: as for :func:`load`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: a file is damaged or missing, with the path; or a value can only be loaded with ``trusted``.
    """
    reading = Reading(trusted=trusted, progress=progress)

    def read(manifest: Manifest) -> Plain:
        with Contents(manifest, reading) as contents:
            found = {**contents.whole(contents.tensors), **contents.values(contents.others)}
            model = {key.removeprefix(MODEL): found[key] for key in contents.table if key.startswith(MODEL)}
            extras = [contents.values([EXTRA], rank).get(EXTRA) for rank in range(manifest.ranks)]
            return Plain(model, _optimizer_state(found) if GROUPS in found else None, extras)

    return files.read_latest(Path(path), read, files.find)


class Reading(NamedTuple):
    """The options of a load; see :func:`load`."""

    strict: bool = True
    trusted: bool = False
    in_place: bool = False
    progress: bool = False


class _Load:
    """One load on this rank.

    Attributes:
        likes, versions: the model's state to load into, by key, and the versions of its modules.
        trained: the names of each optimizer's parameters.
        contents: the files.
        live, new: the tensors to read by key: those that exist, which are read twice with ``in_place``, and others.
        model_state, optimizers: the state to load into the model, and into each optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers, reading: Reading) -> None:
        self.model, self.reading = model, reading
        self.several = None if optimizer is None else by_name.as_list(optimizer)
        self.likes: dict[str, Any] = {}
        self.versions: dict[str, Any] | None = None
        self.trained: list[list[str]] = []
        self.contents: Contents
        self.live, self.new = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self.model_state: dict[str, Any] = {}
        self.optimizers: list[tuple[Optimizer, dict[str, Any]]] = []
        self._of_live, self._of_new = dict[int, list[PieceRead]](), dict[int, list[PieceRead]]()

    def look_at_model(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"expected a model to load into, a torch.nn.Module, but got {type(self.model).__name__}")
        state = by_name.model_state(self.model, by_name.ragged())
        self.likes = {MODEL + name: like for name, like in state.items()}
        self.versions = by_name.versions_of(state)
        self.trained = by_name.trained_names(self.model, self.several or ())

    def open(self, manifest: Manifest, stack: ExitStack) -> None:
        """Open a checkpoint, and check that it fits the model. ``stack`` closes the files."""
        self.contents = stack.enter_context(Contents(manifest, self.reading))
        self.contents.check_fits(self.likes, None if self.several is None else {*chain(*self.trained)})

    def plan(self) -> None:
        """Find everything that this rank needs. A second call is for other files, or for a newer checkpoint."""
        contents, self.live, self.new = self.contents, {}, {}
        likes = {key: self.likes[key] for key in contents.tensors if key in self.likes}
        for key, like in likes.items():  # load hooks of modules may change the values of other classes
            if self.reading.in_place and isinstance(like, RaggedTensor):
                self.live[key] = like
            else:
                self.new[key] = contents.shadow(key, like)
        found = {**self.live, **self.new, **contents.values(key for key in contents.others if key in self.likes)}
        versions = contents.values([VERSIONS]).get(VERSIONS, self.versions)
        self.model_state = by_name.with_versions(
            {key.removeprefix(MODEL): value for key, value in found.items()}, versions, self.model
        )
        if self.several is not None:
            state = contents.optimizer_state({*chain(*self.trained)}, self._place_state)
            self._check_classes(state["param_groups"], contents.values([CLASSES]).get(CLASSES, []))
            how, settings = {"strict": self.reading.strict, "together": False}, by_name.ragged()
            self.optimizers = by_name.optimizers_to_load(self.model, self.several, state, settings, **how)
        self._of_live, self._of_new = contents.find(self.live), contents.find(self.new)

    def read(self, rank: int) -> Any:
        """Verify and read what :meth:`plan` has found; return the ``extra`` of the saved ``rank``."""
        self.contents.read(self._of_live, verify_only=True)
        self.contents.read(self._of_new)
        return self.contents.values([EXTRA], rank).get(EXTRA)

    def _place_state(self, key: str, memory: torch.Tensor, exists: bool) -> None:
        (self.live if exists else self.new)[key] = memory

    def _check_classes(self, groups: list[dict[str, Any]], saved: list[list[str]]) -> None:
        """Refuse the state of another of torch's optimizer classes, which may have options of the same names."""
        by_param = {name: classes for group, classes in zip(groups, saved) for name in group["params"]}
        for optimizer, names in zip(self.several or (), self.trained):
            own = {*classes_of(optimizer)}
            for name in names:
                classes = by_param.get(name, [])
                if own and classes and own.isdisjoint(classes):
                    raise _other_optimizer(optimizer, f": {name!r} was trained by {classes[-1]}")

    def prepare(self, undo: ExitStack) -> Loading:
        """Do everything that can fail; ``undo`` gets a call that restores what was loaded at once."""
        settings, strict = by_name.ragged(), self.reading.strict
        loading: Loading = by_name.load_model_state(prepare, self.model, self.model_state, settings, strict=strict)
        undo.callback(loading.undo)
        self.load_optimizers()
        return loading

    def load_optimizers(self) -> None:
        for optimizer, loadable in self.optimizers:
            _load_optimizer(optimizer, loadable)

    def overwrite(self) -> None:
        """Make the second pass."""
        self.contents.read(self._of_live)
        if any(key.startswith(STATE) for key in self.live):
            self.load_optimizers()  # load_state_dict() may have copied the states, for another dtype or class


def _load_newest(ranks: Ranks, sources: Sequence[str | Path | Local], load: _Load) -> Any:
    """Load the newest checkpoint in ``sources`` that is whole."""

    def found() -> set[Found]:
        return {each for number, source in enumerate(sources) for each in _found(ranks, number, source)}

    problems: list[str] = []
    several = ranks.round("find checkpoints", found, lambda found: found, lambda several: set().union(*several))
    for each in sorted(several, key=lambda each: (each.time, each), reverse=True):
        source = sources[each.source]
        if isinstance(source, Local):
            gathering = Gathering(ranks, source, each)
            if gathering.problem:
                problems.append(f"{each.name} of the hosts was not loaded: {gathering.problem}")
                continue
            read = partial(_read, ranks, gathering.directory, each.checksum, load, gathering=gathering)
        else:
            read = partial(_read_latest, ranks, Path(source), load)
        if problems and ranks.rank == 0:
            warn_user(f"an older checkpoint is loaded, {each.name}: {'; '.join(problems)}")
        return _load(ranks, read, load)
    if problems:
        raise RuntimeError(f"there is no checkpoint that is whole: {'; '.join(problems)}")
    return None


def _found(ranks: Ranks, number: int, source: str | Path | Local) -> list[Found]:
    """Return the checkpoints in ``source``: those of this host, or on rank 0 the latest in a shared directory."""
    if isinstance(source, Local):
        return look(number, source)
    if ranks.rank > 0:
        return []
    try:
        manifest = files.find(Path(source).absolute())
    except FileNotFoundError:
        return []
    except RuntimeError:  # the load will raise it, if there is nothing newer
        return [Found(number, str(source), 0.0, "")]
    return [Found(number, str(manifest.directory), manifest.time, manifest.checksum)]


def _load(ranks: Ranks, read: Callable[[ExitStack], Any], load: _Load) -> Any:
    with ExitStack() as stack:
        alike = count_of(load.several) if load.reading.strict else {}  # else ranks may load different modules
        ranks.together("check what is to be loaded", load.look_at_model, lambda _: alike)
        extra = read(stack)
        with Backup(optimizers=[one for one, _ in load.optimizers]), ExitStack() as undo:
            loading = ranks.together("load what was read", lambda: load.prepare(undo))
            undo.pop_all()
        if load.reading.in_place:
            try:
                ranks.together("load what was verified", load.overwrite)
            except Exception as error:  # of any class: it reached this rank after a peer has begun to overwrite
                raise RuntimeError(
                    "the checkpoint was verified, but the load has failed in the second pass, so the model and the "
                    "optimizer hold old and new values: load again, this checkpoint or another, before they are used. "
                    f"(With in_place=False they keep the old values in such a case.) {error}"
                ) from error
        loading.write()
        warn_of_unwritten(load.model, "fsdp.checkpoint.load()")
        return extra


def _read_latest(ranks: Ranks, path: Path, load: _Load, stack: ExitStack) -> Any:
    """Find the checkpoint in a directory that all ranks see, and read it; as ``_read``."""

    def found() -> tuple[Manifest, str]:
        return files.find(path.absolute())._replace(files={}), str(path)  # each rank reads the files itself

    def find(path: Path) -> Manifest:
        manifest, given = ranks.first("find a checkpoint", found)
        files.warn_of_path(str(path), given)
        return manifest

    return files.read_latest(path, lambda it: _read(ranks, it.directory, it.checksum, load, stack), find)


def _read(
    ranks: Ranks, directory: Path, checksum: str, load: _Load, stack: ExitStack, gathering: Gathering | None = None
) -> Any:
    """Read and verify everything that this rank needs of a checkpoint; return this rank's ``extra``.

    Args:
        checksum: of the manifest.
        stack: keeps the files open.
        gathering: copies files that ``directory`` of this host lacks; None if all ranks see the same directory.
    """

    def look() -> None:
        manifest = files.find(directory)
        if manifest.checksum != checksum:
            raise files.damage(f"{directory / files.MANIFEST} is another file on rank 0")
        for name in sorted(manifest.files)[ranks.rank :: ranks.size] if gathering is None else ():  # this rank's share
            files.check_size(directory / name, manifest.files[name])
        load.open(manifest, stack)

    def lacked() -> Sequence[str]:
        try:
            load.plan()
            load.contents.require([number])
        except files.MissingFiles as missing:
            return missing.names
        return ()

    def read() -> Any:
        if gathering is None:
            load.plan()
        return load.read(number)

    ranks.together("look for what to read", look)
    number = ranks.rank % load.contents.manifest.ranks
    if gathering is not None:
        gathering.fetch(lacked)
    return ranks.together("read a checkpoint", read)


def _load_optimizer(optimizer: Optimizer, loadable: dict[str, Any]) -> None:
    """Load state that an optimizer of the same class has saved.

    ``load_state_dict`` adds the options that older versions of a class did not save. With the groups of another class
    options are missing afterwards: the first step would fail, or train with the learning rate of that class.
    """
    groups = optimizer.param_groups
    options = [name for name in getattr(optimizer, "defaults", {}) if all(name in group for group in groups)]
    failure: KeyError | None = None
    try:
        optimizer.load_state_dict(with_classes(optimizer, loadable))
        missing = [name for name in options if any(name not in group for group in optimizer.param_groups)]
    except KeyError as error:  # of a state or an option that the class in the checkpoint does not have
        failure, missing = error, [*error.args]
    if missing:
        saved = dict.fromkeys(name for group in loadable["param_groups"] for name in group if name != "params")
        lacking, has = (", ".join(map(repr, names)) for names in (missing, saved))
        raise _other_optimizer(optimizer, f", which needs {lacking}: its parameter groups have {has}") from failure


def _other_optimizer(optimizer: Optimizer, words: str) -> RuntimeError:
    return RuntimeError(
        f"the checkpoint was saved with another optimizer than {type(optimizer).__name__}{words}. Nothing was loaded. "
        "Load with the optimizer that saved, or without one to begin with new optimizer state"
    )


# -- the files ---------------------------------------------------------------------------------------------------------


class Contents(ExitStack):
    """A checkpoint that is being read; the context closes the files.

    Attributes:
        manifest, table: the manifest, and the index.
        tensors, others: the keys of tensors, and of values that are no tensors.
    """

    def __init__(self, manifest: Manifest, reading: Reading) -> None:
        """Read the index."""
        super().__init__()
        self.manifest, self.directory, self.reading = manifest, manifest.directory, reading
        path = self.directory / files.INDEX
        content = files.read_verified(path, manifest.files[files.INDEX])
        with files.of_ours(path):
            nbytes = sum(record.size for record in manifest.files.values())
            self.table = index.unpacked(content, manifest.ranks, nbytes)
        self.tensors = [key for key, saved in self.table.items() if saved.dtype]
        self.others = [key for key, saved in self.table.items() if not saved.dtype]
        self._open: dict[int, RankFile] = {}

    def require(self, ranks: Iterable[int]) -> None:
        """Raise :class:`~fsdp.checkpoint.files.MissingFiles` if files of ``ranks`` are not there."""
        names = [files.rank_name(rank) for rank in ranks if rank not in self._open]
        if missing := [name for name in names if not (self.directory / name).is_file()]:
            raise files.MissingFiles(self.directory, missing)

    def _file(self, rank: int) -> RankFile:
        if rank not in self._open:
            self.require([rank])
            name = files.rank_name(rank)
            self._open[rank] = RankFile(self.directory / name, self.manifest.files[name], self)
        return self._open[rank]

    def check_fits(self, likes: Mapping[str, Any], trained: Collection[str] | None) -> None:
        """Check names and shapes of the model, and the names of the optimizers' parameters, if any."""
        strict = self.reading.strict
        if problems := "; ".join(_misfits(self.table, likes, strict=strict)):
            raise RuntimeError(
                f"the checkpoint {self.directory} does not fit the model, and nothing was loaded: {problems}"
            )
        if trained is None:
            return
        if GROUPS not in self.table:
            raise RuntimeError(
                f"the checkpoint {self.directory} has no optimizer state, and nothing was loaded. Load without an "
                "optimizer to begin with new optimizer state"
            )
        names = [param_and_state(key)[0] for key in self.table if key.startswith(STATE)]
        left = list(dict.fromkeys(name for name in names if name not in trained))
        if left and strict:
            raise RuntimeError(
                f"the checkpoint {self.directory} has optimizer state of {', '.join(map(repr, left))}, which no "
                "optimizer given holds: pass those that were saved, or strict=False to leave the others out"
            )

    def shadow(self, key: str, like: Any) -> torch.Tensor:
        """Make CPU memory for a tensor: for this rank's part, if ``like`` is distributed."""
        if not is_distributed(like):
            return self._empty(key)
        dtype, cpu = torch_dtype(self.table[key].dtype), torch.device("cpu")
        if isinstance(like, RaggedTensor):
            return like.with_local(host_memory.empty(like.local.numel(), dtype=dtype, device=cpu))
        return torch.empty_like(like, dtype=dtype, device=cpu)

    def _empty(self, key: str) -> torch.Tensor:
        """Make CPU memory for a whole tensor."""
        shape, dtype = self.table[key].shape, torch_dtype(self.table[key].dtype)
        return host_memory.empty(math.prod(shape), dtype=dtype, device=torch.device("cpu")).view(shape)

    def whole(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read whole tensors."""
        tensors = {key: self._empty(key) for key in keys}
        self.read(self.find(tensors))
        return tensors

    def find(self, targets: Mapping[str, torch.Tensor]) -> dict[int, list[PieceRead]]:
        """Find the elements of ``targets``; return copies for ``read``, by the rank of the file."""
        parts = {key: parts_of(target) for key, target in targets.items()}
        by_rank: dict[int, dict[str, list[Part]]] = {}
        for key, several in parts.items():
            for rank in self.table[key].holders(box for box, _ in several):
                by_rank.setdefault(rank, {})[key] = several
        self.require(sorted(by_rank))
        copies: dict[int, list[PieceRead]] = {}
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

    def read(self, copies: Mapping[int, list[PieceRead]], *, verify_only: bool = False) -> None:
        """Read what ``find`` has found, or with ``verify_only`` compare the checksums of the blocks."""
        nbytes = sum(copy.nbytes for of_rank in copies.values() for copy in of_rank)
        with bar("verifying" if verify_only else "loading", nbytes, self.reading.progress) as advance, torch.no_grad():
            for rank, of_rank in copies.items():
                file = self._file(rank)
                with files.of_ours(file.path):
                    file.read(of_rank, advance, verify_only=verify_only)

    def values(self, keys: Iterable[str], rank: int = 0) -> dict[str, Any]:
        """Read values that are no tensors, from the file of ``rank``; of ``keys``, those that it has."""
        file, trusted = self._file(rank), self.reading.trusted
        return {key: file.value(key, trusted=trusted) for key in keys if key in file.packed}

    def optimizer_state(
        self, trained: Collection[str], place: Callable[[str, torch.Tensor, bool], None]
    ) -> dict[str, Any]:
        """Return the optimizer's state dict, with ``UnreadState`` for tensors that have dimensions. ``place`` gets the
        key and the memory of each, and whether it is a present state."""

        def wanted(key: str) -> bool:
            return key.startswith(STATE) and param_and_state(key)[0] in trained

        keys = [*filter(wanted, self.tensors)]
        scalars = self.whole(key for key in keys if not self.table[key].shape)
        found: dict[str, Any] = {key: scalars[key] if key in scalars else self._unread(key, place) for key in keys}
        return _optimizer_state(found | self.values([*filter(wanted, self.others), GROUPS, OTHERS]))

    def _unread(self, key: str, place: Callable[[str, torch.Tensor, bool], None]) -> UnreadState:
        state, param = self.table[key], self.table.get(MODEL + param_and_state(key)[0])
        usual = tuple(range(len(state.shape))) if param is None or param.shape != state.shape else param.order
        order, in_place = None if state.order == usual else state.order, self.reading.in_place
        return UnreadState(torch_dtype(state.dtype), state.shape, order, in_place=in_place, place=partial(place, key))


def _optimizer_state(found: Mapping[str, Any]) -> dict[str, Any]:
    states: dict[str, dict[Any, Any]] = {}
    for key, value in found.items():
        if key.startswith(STATE):
            name, state = param_and_state(key)
            states.setdefault(name, {})[state] = value
    return {"state": states | found.get(OTHERS, {}), "param_groups": found[GROUPS]}


def _misfits(table: index.Table, likes: Mapping[str, Any], *, strict: bool) -> Iterator[str]:
    saved = {key: of for key, of in table.items() if key.startswith(MODEL)}
    for where, keys, others in (("checkpoint", likes, saved), ("model", saved, likes)) if strict else ():
        if missing := [repr(key.removeprefix(MODEL)) for key in keys if key not in others]:
            yield f"missing in the {where}: {', '.join(missing)}"
    for key, value in likes.items():
        found = saved.get(key)
        if found is None or key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX:  # a module takes any extra state
            continue
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        in_file = found.shape if found.dtype else None
        if shape != in_file:
            yield f"{key.removeprefix(MODEL)!r} has shape {in_file} in the checkpoint and {shape} in the model"
