"""The collectives of ``torch.distributed`` as a lane starts them, and the process group that carries them.

Functions are looked up in ``torch.distributed`` at each call, so that profilers, recorders and mocks that replace
them see the call. In a pass that begins while all of them are torch's own, the methods of the group are called instead:
checks of arguments in ``torch.distributed`` take 15 % of the host time of a unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp.comm.groups import backend_of, control_device, group_ranks, is_registered, make_control_group, make_group
from fsdp.comm.threads import in_thread
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER

_REPLACEABLE = ALL_GATHER, REDUCE_SCATTER, "batch_isend_irecv", "all_reduce"
_ORIGINALS = [getattr(distributed_c10d, name) for name in _REPLACEABLE]
_TAG_BASE = 1 << 20  # separates our message tags from the tags of a user's own sends
_CPU = torch.device("cpu")


def are_replaced() -> bool:
    """Return whether a recorder, profiler or test has replaced the functions that gather, reduce and vote."""
    return [getattr(dist, name) for name in _REPLACEABLE] != _ORIGINALS


# The method of a group behind each function, and the class of its options. Older versions of torch differ.
_METHODS: dict[str, tuple[str, Any]] = {}
if hasattr(dist.ProcessGroup, ALL_GATHER):
    _METHODS[ALL_GATHER] = ALL_GATHER, distributed_c10d.AllgatherOptions
    _METHODS[REDUCE_SCATTER] = REDUCE_SCATTER, distributed_c10d.ReduceScatterOptions
    _METHODS["all_reduce"] = "allreduce", distributed_c10d.AllreduceOptions


def method_of(name: str, group: Any, *, asynchronous: bool, op: Any = None) -> tuple[str, Any]:
    """Return the method of ``group`` behind the function ``name``, and the options of a call; ("", None) if unknown."""
    if name not in _METHODS or not isinstance(group, dist.ProcessGroup):
        return "", None
    method, kind = _METHODS[name]
    options = kind()
    options.asyncOp = asynchronous
    if op is not None:
        options.reduceOp = op
    return method, options


class Carrier:
    """The process group that carries the collectives of one lane.

    This is the user's group. Once only some ranks have issued a collective, or the backend has closed the connections,
    a new group over the same ranks replaces it.

    Attributes:
        number: the number of replacements.
        replacement: the latest group that replaces the user's group.
    """

    def __init__(self, group: Any) -> None:
        self.number = 0
        self._users = weakref.ref(group)
        self.replacement: Any = None
        self._making: futures.Future[Any] | None = None
        self._control: Any = None
        self._backends: dict[str, str] = {}  # by type of device

    @property
    def group(self) -> Any:
        """The group that serves the devices of the user's group."""
        return self._users() if self.replacement is None else self.replacement

    @property
    def is_destroyed(self) -> bool:
        """Whether the program has destroyed the replacement, as by destroying all groups."""
        return self.replacement is not None and not is_registered(self.replacement)

    def serving(self, device: torch.device, *, control: bool) -> Any:
        """Return the group for tensors on ``device``.

        A ``control`` message on CPU goes over a side group where the user's group serves accelerators only. The first
        such message makes the side group, on all ranks.
        """
        group = self.group
        if not control or device.type != "cpu" or backend_of(group, device) != "unknown":
            return group
        if control_device(group, torch.device("meta")).type != "cpu":  # no store to make one
            return group
        if self._control is None:
            self._control = make_control_group(group, device, self.number)
        return self._control

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend that serves ``device``."""
        found = self._backends.get(device.type)
        if found is None:
            found = self._backends[device.type] = backend_of(self.group, device)
        return found

    def replace(self, name: str) -> futures.Future[Any]:
        """Start to connect a new group over the same ranks; :meth:`use` puts it in place once the future is done.

        All ranks have to call, with the same ``name``. A call after an interrupted wait returns the same future.
        """
        if self._making is None:
            group = self._users()
            self._making = in_thread(lambda: make_group(group_ranks(group), group, name))
        return self._making

    def use(self, made: futures.Future[Any]) -> None:
        """Carry collectives by the group ``made``.

        Raises:
            RuntimeError: the ranks could not connect.
        """
        self._making = None
        self.replacement = made.result()
        self.number += 1
        self._control = None
        self._backends.clear()

    def abort(self) -> None:
        """End the collectives in flight on this rank; the group is of no use any more."""
        abort = getattr(self.group, "abort", None)
        if abort is not None:
            abort()


class Gather(NamedTuple):
    """One vector to gather.

    Attributes:
        full: receives the whole vector.
        shard: this rank's shard of it.
        cut: returns cached views of ``full`` by rank, for a number of ranks; optional.
    """

    full: torch.Tensor
    shard: torch.Tensor
    cut: Callable[[int], Sequence[torch.Tensor]] | None = None

    def pieces(self, ranks: int) -> Sequence[torch.Tensor]:
        """Return views of ``full`` by rank."""
        return self.full.view(ranks, self.shard.numel()).unbind() if self.cut is None else self.cut(ranks)


class Transfer(NamedTuple):
    """A message of an exchange: a tensor to send to, or to receive from, a rank of the group.

    Attributes:
        number: tag of the message, the same at both ends.
    """

    sent: bool
    rank: int
    tensor: torch.Tensor
    number: int


def start_transfers(transfers: Sequence[Transfer], group: Any) -> list[Any]:
    """Start all ``transfers`` at once; return the handles to wait for."""
    operations = [
        dist.P2POp(
            dist.isend if transfer.sent else dist.irecv,
            transfer.tensor,
            dist.get_global_rank(group, transfer.rank),
            group,
            _TAG_BASE + transfer.number,
        )
        for transfer in transfers
    ]
    return list(dist.batch_isend_irecv(operations)) if operations else []


def coalesces(group: Any, device: torch.device) -> bool:
    """Return whether the backend makes one collective of several on the current stream."""
    if type(group) is not dist.ProcessGroup:
        return False
    backend = group._get_backend(device)
    return bool(getattr(backend, "supports_coalescing", backend.name() == "nccl"))  # torch 2.6 does not say


def start_coalesced_gathers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: Any) -> None:
    """Start one collective that gathers the second tensor of each pair into the first, as bytes."""
    with distributed_c10d._coalescing_manager(group):
        for full, shard in pairs:
            getattr(dist, ALL_GATHER)(full.view(torch.uint8), shard.view(torch.uint8), group=group)
