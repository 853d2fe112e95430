"""Saving checkpoints: at any number of ranks, in the foreground or in the background.

Each rank writes the elements of its shards to a file of its own, without communication of tensors. A hash of the key
chooses the replica that writes a tensor, so ranks do not negotiate. They agree only on the directory and on success: an
error on one rank is an error on all. :mod:`fsdp.checkpoint.files` describes directories and publishing, and
:mod:`fsdp.checkpoint.rank_file` the files.

[Note: Staging]
A save in the background writes copies in CPU memory, which are made before the call returns. So an optimizer's step or
the deletion of the model cannot change the checkpoint. A save in the foreground writes from the shards' own memory.
"""

from __future__ import annotations

import atexit
import traceback
import warnings
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.checkpoint import by_name, files, index, rank_file
from fsdp.checkpoint.checksums import sha256
from fsdp.checkpoint.files import Advance, FileRecord, no_progress
from fsdp.checkpoint.forms import is_distributed, parts_of, replicas_of
from fsdp.checkpoint.index import CLASSES, EXTRA, GROUPS, MODEL, OTHERS, VERSIONS, state_key
from fsdp.checkpoint.progress import bar
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.rank_file import Piece
from fsdp.checkpoint.state_dict import calling
from fsdp.comm.consensus import Ranks
from fsdp.comm.streams import StreamEvent, streams_for
from fsdp.placement.boxes import Part, memory_order
from fsdp.runtime.unit import units_of

_CPU = torch.device("cpu")

Optimizers = Optimizer | Iterable[Optimizer] | None


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    trusted: bool = False,
    process_group: Any = None,
    progress: bool = True,
) -> Path:
    """Add a checkpoint to the directory ``path``, which is made if it does not exist. All ranks have to call.

    Each call makes a new directory in ``path``, and then the file ``latest`` in ``path`` names it. Until the very end,
    after any error, and after a crash or a loss of power at any moment, ``latest`` names the checkpoint before, whole.
    All ranks have to see the same directory. ``fsdp/checkpoint/README.md`` describes the files: tensors are in
    safetensors files, and there is no pickle unless ``trusted``.

    Args:
        path: relative to the working directory of rank 0 at the call. The path on rank 0 counts; a rank that is given
            another one warns.
        model: a wrapped module, a module with wrapped ones in it, or a plain one, whose parameters may be ``DTensor``
            (``fully_shard`` makes such models). Each rank writes its shards. Values that are not sharded (buffers,
            ignored parameters, extra state) are written as on rank 0.
        optimizer: an optimizer of the model's parameters, or several of different ones. States come back bit for bit,
            and those of 8-bit optimizers quantized as they were, rounded once more
            (``fsdp/checkpoint/optim_dtypes.py``).
            Entries of the state that belong to no parameter are written as on rank 0.
        extra: a value of this rank to get back from :func:`load`, such as the step, the state of random generators, or
            the position in the data: tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them,
            but no NumPy arrays and no objects of other classes. NumPy scalars become Python numbers, here and in the
            optimizer's groups. May differ from rank to rank.
        keep: the number of checkpoints to keep in ``path``, with this one; None for all. After this one is published,
            rank 0 removes the directories of older ones, with everything that was put there, and of saves that died. A
            failed removal is a warning, and the next save with ``keep`` tries again. Links are never followed. Two jobs
            may save into one directory at the same time only without it.
        trusted: extra state of modules, and entries of the optimizer, may hold objects of any class, which are pickled.
            Then only ``load(..., trusted=True)`` takes the checkpoint. Without it such objects are refused here.
        process_group: the ranks that save; None for the default group, or for this process alone if there is none.
        progress: show a bar on rank 0, if it has a terminal, when the save takes longer than some seconds.

    Returns:
        the directory of the new checkpoint, as an absolute path; the name is ``checkpoint_`` and a number.

    Raises, on every rank if on one, with the checkpoint before intact, and the model as it was:
        OSError: a file could not be written (``PermissionError``, ``FileNotFoundError`` and so on); or a file named
            ``latest`` in ``path`` is not of this package.
        TypeError: ``extra``, the optimizer or extra state holds an object that is not loaded safely, with the path to
            it; or ``model`` is no module.
        ValueError: ``keep`` is no positive number.
        RuntimeError: a forward or backward is under way; or the ranks pass different numbers of optimizers; or another
            process has removed or changed written files; or another rank is gone or was interrupted. The next save
            works.
        NotImplementedError: ranks hold different experts that were not declared (``fsdp.shard_experts``); or the
            optimizer has states that cannot leave a sharded parameter; or a tensor is sparse, quantized, nested or of a
            subclass, with the name.

    Example::

        save("checkpoints", model, optimizer, extra={"step": step}, keep=3)
        extra = load("checkpoints", model, optimizer)
    """
    saving = Save(Ranks.of(process_group), path, keep, trusted=trusted)
    return saving.now("fsdp.checkpoint.save()", model, optimizer, extra, progress=progress)


def async_save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    trusted: bool = False,
    process_group: Any = None,
) -> Future[Path]:
    """Save as :func:`save` does, but return as soon as everything is copied to CPU memory; a thread does the rest.

    The checkpoint is the model and optimizer at the call. It is published, and ``latest`` names it, when the future is
    done. One save at a time: this function, :func:`save` and :func:`load` first wait for a save in the background on
    the same ranks. A process does not end before the saves.

    Returns:
        the future of the path that ``save`` returns. ``result()`` waits, and raises the errors of ``save``. The next
        save on these ranks raises an error that no call of ``result()`` or ``exception()`` has returned, and does
        nothing else; at the process's exit such an error is a warning.

    Raises: at once, and on every rank if on one, the errors of ``save`` before it writes.
    """
    saving = Save(Ranks.of(process_group), path, keep, trusted=trusted)
    return saving.later("fsdp.checkpoint.async_save()", model, optimizer, extra)


def _without_variables(error: BaseException) -> BaseException:
    """Clear the frames of an error, which would keep the copies of the tensors as long as the error exists."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error


class Outcome(Future[Path]):
    """The future of a save in the background, which knows whether a caller has seen the error."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = False
        self.set_running_or_notify_cancel()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        atexit.register(self._warn)

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._seen = True
        atexit.unregister(self._warn)
        return error

    def unseen(self) -> BaseException | None:
        """Wait until the save has ended, and return the error that no caller has seen."""
        error = super().exception()
        return None if self._seen else error

    def _warn(self) -> None:
        warnings.warn(f"a checkpoint was not saved: {super().exception()}", stacklevel=1)


# -- one rank's share --------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """The files of some ranks, and the tensors in them."""

    records: dict[str, FileRecord]
    table: index.Table

    @staticmethod
    def joined(several: Sequence[Written]) -> Written:
        records = {name: record for one in several for name, record in one.records.items()}
        return Written(records, index.joined([one.table for one in several]))


class Share:
    """The parts of tensors, and the packed other values, that rank ``rank`` writes; ``table`` describes both."""

    def __init__(self, rank: int) -> None:
        self.rank, self.table = rank, index.Table()
        self.pieces: list[Piece] = []
        self.packed: dict[str, Any] = {}

    def add(
        self, key: str, dtype: torch.dtype, shape: tuple[int, ...], order: Sequence[int], parts: list[Part]
    ) -> None:
        """Add parts of a tensor whose dimensions have this ``order`` in memory."""
        self.pieces += [Piece(key, shape, box, values) for box, values in parts]
        if parts:
            self.table[key] = index.of_tensor(dtype, shape, order, [box for box, _ in parts], self.rank)

    def pack(self, key: str, value: Any, *, trusted: bool = False) -> None:
        """Add a value that is no tensor; ``extra`` is a value of each rank, and all others are of rank 0."""
        remedy = "; or save(..., trusted=True), and then load(..., trusted=True)" if key != EXTRA else ""
        self.packed[key], inner = rank_file.pack(key, value, remedy, trusted=trusted and key != EXTRA)
        self.pieces += inner
        if key != EXTRA:
            self.table[key] = index.of_value(self.rank)

    def write(self, directory: Path, advance: Advance = no_progress) -> Written:
        name = files.rank_name(self.rank)
        record = rank_file.write(directory / name, self.pieces, self.packed, advance)
        return Written({name: record}, self.table)


def described(written: Written, keys: Iterable[str], ranks: int) -> tuple[bytes, bytes]:
    """Check that ``ranks`` ranks have written ``keys``; return the contents of index and manifest."""
    index.check_complete(written.table, keys)
    table = index.packed(written.table)
    record = FileRecord(len(table), sha256(table))
    return table, files.manifest({**written.records, files.INDEX: record}, ranks)


def publish(directory: Path, written: Written, keys: Iterable[str], ranks: int) -> Path:
    """Complete the checkpoint that ``ranks`` ranks have written into ``directory``, and publish it."""
    return files.publish(directory, *described(written, keys, ranks))


class Save:
    """One checkpoint on the way to the disk. All ranks take the same steps, and an error on one is an error on all."""

    def __init__(self, ranks: Ranks, path: str | Path, keep: int | None, *, trusted: bool) -> None:
        self.ranks, self._keep, self._trusted = ranks, keep, trusted
        self._path, self._given = path, str(path)
        self.share = Share(ranks.rank)
        self.keys: tuple[str, ...] = ()  # all keys of the state, written by any rank
        self.directory: Path | None = None  # made by this rank
        self._device = _CPU  # from which copies were staged

    # -- the whole save ------------------------------------------------------------------------------------------------

    def now(self, call: str, model: nn.Module, optimizer: Optimizers, extra: Any, *, progress: bool) -> Path:
        """Save in ``call``, as text for errors; return the directory of the new checkpoint."""
        with self.ranks.call(call):
            self.take(model, optimizer, extra, stage=False)
            return self.write(progress=progress)

    def later(self, call: str, model: nn.Module, optimizer: Optimizers, extra: Any) -> Future[Path]:
        """Take copies, and let a thread do the rest of the save; return the future of the directory."""
        ranks, outcome = self.ranks, Outcome()

        def write() -> None:
            try:
                with streams.on_device(), ranks.call(call, resumed=True):
                    path = self.write(progress=False)
            except BaseException as error:  # an interrupt as well: the caller of result() gets it
                outcome.set_exception(_without_variables(error))
            else:
                outcome.set_result(path)

        with ranks.call(call):
            self.take(model, optimizer, extra, stage=True)
            streams = streams_for(self._device)  # a thread begins with the first device as the current one
            ranks.underway = outcome
            try:
                Thread(target=write, name=f"saving to {self._given}").start()  # the process does not end before it
            except RuntimeError as error:  # it cannot be started
                outcome.set_exception(error)
                raise
        return outcome

    # -- taking the state ----------------------------------------------------------------------------------------------

    def take(self, model: nn.Module, optimizer: Optimizers, extra: Any, *, stage: bool) -> None:
        """Take everything that is to be saved; with ``stage``, as copies.

        Raises: as ``fsdp.checkpoint.save``.
        """
        before, self.ranks.underway = self.ranks.underway, None
        state: dict[str, Any] = {}

        def take_model() -> list[Optimizer] | None:
            if isinstance(before, Outcome) and (error := before.unseen()) is not None:
                raise RuntimeError(
                    "the save in the background before this one has failed, and nobody had asked for its result; this "
                    f"one was not begun, and can be tried again: {error}"
                ) from error
            if not isinstance(model, nn.Module):
                raise TypeError(f"expected a model to save, a torch.nn.Module, but got {type(model).__name__}")
            if self._keep is not None and (not isinstance(self._keep, int) or self._keep < 1):
                raise ValueError(f"keep must be a positive number of checkpoints or None, but got {self._keep!r}")
            if self.ranks.rank == 0:
                self._path = Path(self._path).absolute()  # the working directory may change meanwhile
            if extra is not None:
                self.share.pack(EXTRA, extra)
            _note_replicas(model)
            of_model = by_name.model_state(model, by_name.ragged())
            state.update((MODEL + name, value) for name, value in of_model.items())
            state[VERSIONS] = by_name.versions_of(of_model)
            return None if optimizer is None else by_name.as_list(optimizer)

        def take_optimizer() -> None:
            if several is not None:
                with calling("fsdp.checkpoint.save()", model):
                    for unit in units_of(model):  # before a rank can fail alone: its peers then raise
                        unit.announce()
                    state.update(_optimizer_state(model, several))
            self.divide(state)
            if stage:
                self._stage()

        several = self.ranks.together("check what is to be saved", take_model, count_of)
        self.ranks.together("take what is to be saved", take_optimizer)

    def divide(self, state: dict[str, Any]) -> None:
        """Choose the tensors and values of ``state`` that this rank writes."""
        self.keys, members = tuple(state), self.ranks.members
        for key, value in state.items():
            if not self._is_mine(key, value, members):
                continue
            if not isinstance(value, torch.Tensor):
                self.share.pack(key, value, trusted=self._trusted)
                continue
            if is_distributed(value) and value.numel() == 0:
                value = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            shape, parts = tuple(value.shape), [(box, part.detach()) for box, part in parts_of(value)]
            for _, part in parts:
                _check_dense(key, part)
            self.share.add(key, value.dtype, shape, memory_order(shape, value.stride()), parts)

    def _is_mine(self, key: str, value: Any, members: list[int]) -> bool:
        """True if this rank writes ``value``: rank 0 if it is not divided, and one of the replicas otherwise."""
        if not is_distributed(value) or value.numel() == 0:
            return self.ranks.rank == 0
        if isinstance(value, RaggedTensor) and value.saved_elsewhere:
            return False
        several = sorted({*replicas_of(value)}.intersection(members))
        return not several or several[zlib.crc32(key.encode()) % len(several)] == members[self.ranks.rank]

    def _stage(self) -> None:
        """Replace tensors by copies in CPU memory, and wait until they are complete.

        Copies from an accelerator share one piece of page-locked memory.
        """
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in self.share.pieces:
            by_device.setdefault(piece.values.device, []).append(piece)
        self.share.pieces = [piece._replace(values=piece.values.clone()) for piece in by_device.pop(_CPU, ())]
        for device, pieces in by_device.items():
            self._device, streams = device, streams_for(device)
            room = streams.host_memory(sum(aligned(piece.values.nbytes) for piece in pieces), pinned=True)
            event: StreamEvent = None
            for piece in pieces:
                size = aligned(piece.values.nbytes)
                copied, event = streams.fetch(piece.values, room[:size])
                self.share.pieces.append(piece._replace(values=copied))
                room = room[size:]
            with streams.on_host(event):  # the last one follows all copies
                pass

    # -- writing files -------------------------------------------------------------------------------------------------

    def write(self, *, progress: bool) -> Path:
        """Write and publish the checkpoint, and drop everything that was taken.

        Returns:
            the directory of the new checkpoint.

        Raises: as ``fsdp.checkpoint.save``.
        """
        try:
            path = self.published(progress=progress)
        except BaseException:
            if self.directory is not None:
                self.discard(self.directory)
            raise
        finally:
            self.share = Share(self.ranks.rank)  # drops everything that was taken
        if self._keep is not None and self.directory is not None:
            files.remove_older(path, self._keep)  # the other ranks do not wait
        return path

    def published(self, *, progress: bool) -> Path:
        """Write and publish the checkpoint; return the directory."""

        def begun() -> tuple[Path, str]:
            self.directory = files.begin(Path(self._path))
            return self.directory, self._given

        directory, given = self.ranks.first("begin a checkpoint", begun)
        files.warn_of_path(self._given, given)
        return self.ranks.round(
            "write a checkpoint",
            lambda: self.written(directory, progress=progress),
            lambda written: publish(directory, written, self.keys, self.ranks.size),
            Written.joined,
        )

    def discard(self, directory: Path) -> None:
        """Remove the files of this save, which has failed."""
        files.discard(directory)

    def written(self, directory: Path, *, progress: bool) -> Written:
        """Write the file of this rank."""
        nbytes = sum(piece.values.nbytes for piece in self.share.pieces)
        with bar("saving", nbytes, progress and self.ranks.rank == 0) as advance:
            written = self.share.write(directory, advance)
        files.disk.sync_directory(directory)
        return written


def count_of(optimizers: Sequence[Optimizer] | None) -> dict[None, list[str]]:
    """Return the text that has to be equal on all ranks; see ``Agreement.together``."""
    number = len(optimizers or ())
    return {None: [f"{number} optimizer{'s' * (number != 1)}"]}


def _optimizer_state(model: nn.Module, several: Sequence[Optimizer]) -> dict[str, Any]:
    given = by_name.optimizer_state(model, several, by_name.ragged())
    trained = {name for group in given["param_groups"] for name in group["params"]}
    state = {
        state_key(name, part): value
        for name, states in given["state"].items()
        if name in trained
        for part, value in states.items()
    }
    if others := {name: value for name, value in given["state"].items() if name not in trained}:
        state[OTHERS] = others
    classes = [classes_of(one) for one in several for _ in one.param_groups]
    return {**state, CLASSES: classes, GROUPS: given["param_groups"]}


def classes_of(optimizer: Optimizer) -> list[str]:
    """List the names of torch's optimizer classes that ``optimizer`` is an instance of."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    names = {kind.__name__ for kind in kinds} - {"Optimizer"}
    return sorted(names | {"Adam"} if "AdamW" in names else names)  # their states are alike


def _check_dense(key: str, value: torch.Tensor) -> None:
    """Check that a tensor of the checkpoint has rows of bytes to write."""
    subclass = hasattr(value, "__tensor_flatten__") and not is_distributed(value)
    if value.layout != torch.strided or value.is_quantized or value.is_nested or subclass:
        kind = type(value).__name__ if subclass else "tensor"
        raise NotImplementedError(
            f"{key} is a {kind} of dtype {value.dtype} and layout {value.layout}, and a checkpoint holds "
            "dense tensors alone: register it with persistent=False if it is a buffer that can be made again, or keep "
            "it as a dense tensor"
        )


def _note_replicas(model: nn.Module) -> None:
    """Note the replicas of units without tensor parallelism, in all trees of ``model``."""
    handles = [handle for unit in units_of(model) for handle in unit.handles]
    for tp_group in {handle.tp_group: None for handle in handles if handle.tp_group is not None}:
        for handle in handles:
            handle.note_replicas(tp_group)


def aligned(nbytes: int) -> int:
    """Round up to where the next tensor of any dtype may begin."""
    return -(-nbytes // 64) * 64
