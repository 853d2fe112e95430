"""Saving checkpoints: at any number of ranks, waited for or in the background.

Every rank writes what its shards hold, without any communication of tensor data, through the storage of
``torch.distributed.checkpoint``. Each rank plans for itself; the ranks agree on who has what, in as few words as
[Note: Runs of ranks] tells and only where it has changed since their last save, and on whether it went well: an error
on one is an error on all.
:mod:`fsdp.checkpoint.files` tells how directories are written and verified.

[Note: Staging]
A save in the background writes copies, in CPU memory, which are made before the call returns: whatever the training
does next, an optimizer's step or the deletion of the model, it finds nothing of the checkpoint to change. A save that
is waited for writes from the shards' own memory.
"""

from __future__ import annotations

import atexit
import copy
import io
import itertools
import threading
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from fsdp.checkpoint import files, index
from fsdp.checkpoint.checksums import Entry
from fsdp.checkpoint.keys import GROUPS, MODEL, OTHERS, STATE, param_and_state, state_key
from fsdp.checkpoint.plain_values import check_loadable, without_numpy_scalars
from fsdp.checkpoint.progress import bar
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.torch_state_dict import StateDictOptions, get_model_state_dict, optimizer_state_as_it_is
from fsdp.checkpoint.torch_storage import SavePlanner, Writer, compact
from fsdp.comm.consensus import Ranks
from fsdp.comm.streams import StreamEvent, streams_for
from fsdp.flat.tensor_parallel import local_of
from fsdp.runtime.unit import units_of

_SHARDED = (RaggedTensor, DTensor)  # every rank writes what it has


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
    """Add a checkpoint to the directory ``path``, which is made if need be. All ranks have to call.

    Each call makes a new directory in ``path``, and then has the file ``latest`` in ``path`` name it. Until the very
    end, and after any error, ``latest`` names the checkpoint before, whole; so also after a crash or a loss of power at
    any moment. The directory has to be one that all ranks see.

    Args:
        path: rank 0's counts; if relative, then to what is rank 0's working directory at the call.
        model: a wrapped module, a module with wrapped ones in it, or a plain one, whose parameters may be ``DTensor``
            (``fully_shard`` makes such models). Each rank writes its shards; what is not sharded (buffers, ignored
            parameters, extra state) is written as rank 0 has it.
        optimizer: one of the model's parameters, or several of different ones. Its states come back bit for bit.
            Entries of its state that belong to no parameter are written as rank 0 has them.
        extra: what this rank wants to have back, like the step, the state of random generators, the position in the
            data: anything that ``torch.load(weights_only=True)`` takes, as there are tensors, numbers, strings, bytes,
            None, and lists, tuples, sets and dicts of them, but no NumPy arrays or objects of other classes. NumPy
            scalars become Python numbers, here and in the optimizer's groups. May differ from rank to rank.
        keep: how many checkpoints are to stay in ``path``, this one included; None for all. Older ones, and what saves
            that died have left, are removed after this one is published, each rank its part, with a warning where that
            fails; the next save with ``keep`` tries again. Other files stay, those in the directory of a checkpoint as
            well, and links are neither followed nor removed. Two jobs that save into one directory at the same time may
            do so only without it.
        trusted: extra state of modules, and what the optimizer holds beside tensors, may be objects of any class. Then
            only ``load(..., trusted=True)`` takes the checkpoint; without it such objects are refused here.
        process_group: the ranks that save; None for the default group, or for this process alone if there is none.
        progress: show a bar on rank 0, if that is at a terminal, when this takes longer than some seconds.

    Returns:
        the directory of the new checkpoint, as an absolute path; its name is ``checkpoint_`` and a number.

    Raises, on every rank if on one, with the checkpoint before intact, and the model as it was:
        OSError: something could not be written. (``PermissionError``, ``FileNotFoundError`` and so on.)
        TypeError: ``extra``, the optimizer or extra state holds an object that is not loaded safely, with its path; or
            ``model`` is no module.
        ValueError: ``keep`` is no positive number.
        RuntimeError: a forward or backward is under way; or another process has removed or changed what was written; or
            another rank is gone or was interrupted. The next save works.
        NotImplementedError: the optimizer has states that cannot leave a sharded parameter; or a tensor is sparse,
            quantized or nested, with its name.
    """
    ranks = Ranks.of(process_group)
    saving = Save(ranks, path, keep, trusted=trusted)
    with ranks.call("fsdp.checkpoint.save()"):
        saving.take(model, optimizer, extra, stage=False)
        return saving.write(progress=progress)


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
    """As :func:`save`, but returns as soon as everything is copied to CPU memory; a thread does the rest.

    The checkpoint is what model and optimizer are when this is called, whatever is done with them afterwards. It is
    published, and ``latest`` names it, when the future is done. One at a time: this, :func:`save` and :func:`load` wait
    first for a save that is still under way on the same ranks. A process does not end before its saves have.

    Returns:
        the future of what ``save`` returns; ``result()`` waits and raises what ``save`` raises. An error that nobody
        asked for is raised by the next save on these ranks, which does nothing else, or told in a warning at the
        process's exit.

    Raises: at once, and on every rank if on one, what ``save`` raises before it writes.
    """
    ranks = Ranks.of(process_group)
    saving = Save(ranks, path, keep, trusted=trusted)
    begun: Future[Outcome | None] = Future()
    streams = streams_for(_device_of(model))  # a thread begins with the first device as the current one

    def rest() -> None:
        outcome = begun.result()
        if outcome is None:  # a rank has no thread
            return
        try:
            with streams.on_device(), ranks.call("fsdp.checkpoint.async_save()", resumed=True):
                path = saving.write(progress=False)
        except BaseException as error:
            outcome.set_exception(_without_variables(error))
        else:
            outcome.set_result(path)

    outcome: Outcome | None = None
    with ranks.call("fsdp.checkpoint.async_save()"):
        saving.take(model, optimizer, extra, stage=True)
        try:
            thread = threading.Thread(target=rest, name=f"saving to {path}", daemon=False)
            ranks.together("begin to save in the background", thread.start)
            outcome = ranks.underway = Outcome()
        finally:
            begun.set_result(outcome)
    return outcome


def _device_of(model: Any) -> torch.device:
    """The accelerator device that ``model`` computes on, or the CPU where it uses none."""
    if not isinstance(model, nn.Module):
        return torch.device("cpu")  # the save refuses it
    devices = [unit.device for unit in units_of(model)] or [param.device for param in model.parameters()]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _without_variables(error: BaseException) -> BaseException:
    """The copies of what was to be saved are in them, and who asks for the error may keep it."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error


class Outcome(Future[Path]):
    """The new checkpoint's directory, or an error that somebody will be told of: whoever asks, or else the next save,
    or else whoever reads what the process says at its exit."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = False
        self.set_running_or_notify_cancel()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        atexit.register(self._tell)

    def result(self, timeout: float | None = None) -> Path:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._asked = True
        atexit.unregister(self._tell)
        return error

    def unasked(self) -> BaseException | None:
        """The error that nobody has asked for, if there is one. Waits until the save has ended."""
        error = super().exception()
        return None if self._asked else error

    def _tell(self) -> None:
        if (error := self.unasked()) is not None:
            warnings.warn(f"a checkpoint was not saved: {error}", stacklevel=1)


# -- one rank's share --------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How a rank writes what it has, for as long as that does not change; ``number`` is the same on all ranks."""

    number: int
    what: list[Any]
    mine: SavePlan
    table: index.Table  # on rank 0: of all ranks together


_plans: weakref.WeakKeyDictionary[Ranks, _Plan] = weakref.WeakKeyDictionary()  # of their last saves
_numbers = itertools.count(1)


class Save:
    """One checkpoint on its way to the disk. All ranks go through the same steps, and an error on one is one on all."""

    def __init__(self, ranks: Ranks, path: str | Path, keep: int | None, *, trusted: bool) -> None:
        self._ranks, self._path, self._keep, self._trusted = ranks, path, keep, trusted
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
            self._check_loadable()
            if stage:
                self._state = _staged(self._state)

        self._ranks.together("check what is to be saved", of_model)
        self._ranks.together("take what is to be saved", of_optimizer)

    def _check_loadable(self) -> None:
        """Turn NumPy scalars into numbers, and refuse what the default load could not take.

        Raises:
            NotImplementedError: a tensor is sparse, quantized or nested.
            TypeError: another value holds an object of a class that is not loaded safely.
        """
        others = {}
        for key, value in self._state.items():
            if not isinstance(value, torch.Tensor):
                others[key] = self._state[key] = without_numpy_scalars(value)
            elif value.layout != torch.strided or value.is_quantized or value.is_nested:
                raise NotImplementedError(
                    f"{_words_for(key)} is a tensor of dtype {value.dtype} and layout {value.layout}, and a checkpoint "
                    "holds dense tensors alone: register it with persistent=False if it is a buffer that can be made "
                    "again, or keep it as a dense tensor"
                )
        if not self._trusted:
            remedy = "; or save(..., trusted=True), and then load(..., trusted=True)"
            check_loadable({_words_for(key): value for key, value in others.items()}, remedy)

    # -- into files ----------------------------------------------------------------------------------------------------

    def write(self, *, progress: bool) -> Path:
        """Write it as a new checkpoint in rank 0's ``path``, and publish that. Nothing of what was taken is kept.

        Returns:
            where it is.

        Raises: as ``fsdp.checkpoint.save``.
        """
        planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(self._state, is_coordinator=self._ranks.rank == 0)
        try:
            plan, directory = self._planned(planner)
            path, older = self._ranks.round(
                "write a checkpoint",
                lambda: self._written(plan, directory, planner, progress=progress),
                lambda entries: self._published(plan, entries),
            )
        except BaseException:
            if self._directory is not None:
                files.discard(self._directory)
            raise
        finally:
            self._state.clear()
        files.remove_older(path, older)  # nobody waits for others
        return path

    def _planned(self, planner: DefaultSavePlanner) -> tuple[_Plan, Path]:
        """What this rank is to write, and where: as for the last save, if that had the same on every rank."""
        rank, size, what = self._ranks.rank, self._ranks.size, [_kind(*item) for item in self._state.items()]
        known = _plans.get(self._ranks)

        def unchanged() -> int:
            return known.number if known is not None and known.what == what else 0

        def begin(number: int) -> list[tuple[Path, int]]:
            self._directory = files.begin(Path(self._path))
            return [(self._directory, number)] * size

        def same(numbers: list[int]) -> int:
            return numbers[0] if len({*numbers}) == 1 else 0

        directory, number = self._ranks.round("begin a checkpoint", unchanged, begin, same)
        if known is not None and number == known.number:
            return known, directory
        local, table = SavePlan([]), index.Table()

        def describe() -> index.Table:
            nonlocal local
            local = planner.create_local_plan()
            return index.described(local.items, self._state, rank)

        def settle(whole: index.Table) -> list[tuple[int, dict[str, tuple[index.Run, ...]]]]:
            nonlocal table
            table, kept = index.settled(whole)
            return [(next(_numbers), kept)] * size

        number, kept = self._ranks.round("plan a checkpoint", describe, settle, index.joined)
        of_others = {key for key, runs in kept.items() if not index.has(runs, rank)}
        items = [item for item in local.items if item.index.fqn not in of_others]
        mine = SavePlan(items, storage_data=_StoragePrefix(f"__{rank}_"))
        plan = _plans[self._ranks] = _Plan(number, what, mine, table)
        return plan, directory

    def _written(
        self, plan: _Plan, directory: Path, planner: DefaultSavePlanner, *, progress: bool
    ) -> dict[str, Entry]:
        """This rank's files: of tensors and what is in it, if it has any, and its ``extra``."""
        nbytes, rank = len(self._extra) + sum(held_nbytes(value) for value in self._state.values()), self._ranks.rank
        with bar("saving", nbytes, progress and rank == 0) as advance:
            tensors = (value for value in tree_leaves(list(self._state.values())) if isinstance(value, torch.Tensor))
            # torch would copy what is staged ahead as well, on a stream of its own, and wait for the device
            ahead = Writer.COPIED_AHEAD if any(tensor.device.type != "cpu" for tensor in tensors) else 0
            writer = Writer(directory, rank == 0, advance, ahead)
            if plan.mine.items:
                results = writer.write_data(planner.finish_plan(plan.mine), planner).wait()
                part = index.packed_part(plan.mine.items, results, writer.blocks)
                files.write_durably(directory / files.part_name(rank), part, writer.entries)
            if self._extra:
                files.write_durably(directory / files.extra_name(rank), self._extra, writer.entries, advance)
            files.disk.sync_directory(directory)
        return writer.entries

    def _published(self, plan: _Plan, written: list[dict[str, Entry]]) -> Sequence[tuple[Path, files.Share]]:
        assert self._directory is not None
        entries = {name: entry for theirs in written for name, entry in theirs.items()}
        files.write_durably(self._directory / files.INDEX, index.packed_table(plan.table), entries)
        files.seal(self._directory, entries, len(written))
        path = files.publish(self._directory)
        older = [[]] * len(written) if self._keep is None else files.retire(path, self._keep, len(written))
        return [(path, share) for share in older]


def _kind(key: str, value: Any) -> tuple[Any, ...]:
    """What a plan depends on of a value."""
    if not isinstance(value, torch.Tensor):
        return key, None
    kind = key, type(value), value.dtype, value.shape, value.stride()
    if isinstance(value, RaggedTensor):
        return *kind, value.interval, value.saved_elsewhere
    return (*kind, value.device_mesh, value.placements) if isinstance(value, DTensor) else kind


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
    events: list[tuple[torch.device, StreamEvent]] = []

    def staged(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if isinstance(value, RaggedTensor):
            return value.with_local(staged(value.local))
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


def held_nbytes(value: Any) -> int:
    """The bytes of a tensor in a state dict that this process holds."""
    local = value.local if isinstance(value, RaggedTensor) else local_of(value)
    return local.nbytes if isinstance(local, torch.Tensor) else 0


def _words_for(key: str) -> str:
    """The name of a value of the checkpoint in an error message."""
    if key in (GROUPS, OTHERS):
        return "optimizer.param_groups" if key == GROUPS else "optimizer.state"
    if key.startswith(STATE):
        param, state = param_and_state(key)
        return f"optimizer.state[{param!r}][{state!r}]"
    name = key.removeprefix(MODEL)
    module, _, last = name.rpartition(".")
    return f"the extra state of {module or 'the model'}" if last == _EXTRA_STATE_KEY_SUFFIX else repr(name)


def _packed(extra: Any) -> bytes:
    """Pack ``extra`` into the bytes of a file; none for None.

    Raises:
        TypeError: a part of it could not be loaded safely, with its path.
    """
    if extra is None:
        return b""
    extra = without_numpy_scalars(extra)
    check_loadable({"extra": extra})
    buffer = io.BytesIO()
    torch.save(compact(extra), buffer)
    return buffer.getvalue()
