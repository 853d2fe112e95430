"""Use of an accelerator, tested on CPU: the meta device, or a recorder, stands for the accelerator."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fsdp.comm.collectives as collectives_module
import fsdp.comm.groups as groups_module
import fsdp.comm.transport.native as native_module
import fsdp.comm.waiting.work as work_module
import fsdp.flat.ownership as ownership_module
from fsdp import CPUOffload
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm import host_memory, threads
from fsdp.comm.collectives import Event, combine
from fsdp.comm.host_memory import HostBuffers
from fsdp.comm.lane.lane import Lane
from fsdp.comm.streams import HostStreams
from fsdp.comm.waiting.waits import Wait
from fsdp.comm.waiting.work import OutOfStep, Watcher, Work
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.ownership import Ignored, move_to, owned_params
from fsdp.runtime.nested import to_device
from fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.harness.agreeing import new_group
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.stream_tracer import trace_streams

CPU, AWAY = torch.device("cpu"), torch.device("meta")


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, exact", [(1, False), (2, True), (3, False), (6, False), (7, False), (8, True)])
def test_nccl_averages_low_precision_only_where_it_is_exact(size: int, exact: bool) -> None:
    """NCCL multiplies by bf16(1/n), which is off by 0.195 % for n = 3, 6, 12, 24, and by -0.195 % for 7."""
    nccl: Any = mock.Mock()
    nccl.carrier.backend.return_value = "nccl"
    sums = collectives_module._averaging(nccl, size, torch.empty(0, device=AWAY), None, sums_only=True)
    assert sums == (dist.ReduceOp.SUM, 1.0, float(size))
    low = collectives_module._averaging(nccl, size, torch.empty(0, dtype=torch.bfloat16, device=AWAY), None)
    high = collectives_module._averaging(nccl, size, torch.empty(0, device=AWAY), None)
    by_hand = (dist.ReduceOp.SUM, 1.0, float(size))
    assert low == ((dist.ReduceOp.AVG, 1.0, 1.0) if exact else by_hand)
    assert high == ((dist.ReduceOp.AVG, 1.0, 1.0) if size > 1 else by_hand)


@on_ranks(2)
def test_control_messages_stay_off_the_device() -> None:
    """On NCCL they would run on the compute stream, and the host that waits for them would drain it."""
    rank, group = dist.get_rank(), new_group()
    devices, used = set[str](), list[Any]()
    values = torch.tensor([rank, -rank])
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        devices.add(tensor.device.type)
        used.append(options["group"])
        return real(tensor, **options)

    def backend(group: Any, device: torch.device) -> str:
        return "unknown" if device.type == "cpu" else "nccl"

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))
        for module in (groups_module, native_module):
            stack.enter_context(mock.patch.object(module, "backend_of", backend))
        collectives_module.agree(values, group, AWAY, "agree")
        assert collectives_module.gather_values(torch.tensor([rank, 7]), group, AWAY, "").tolist() == [[0, 7], [1, 7]]
        lane = Lane.of(group, AWAY)
        equal, differing = (lane.ask("ask", number, largest=rank) for number in (1, rank))
        assert [equal.result(), differing.result()] == [1, None]
        assert equal.poll()
        lane.carrier = lane.carrier.connect_next(lambda: None)
        assert lane.ask("ask", 2, largest=rank).result() == 1
    assert values.tolist() == [1, 0]
    assert devices == {"cpu"} and group not in used and lane.carrier.group not in used
    assert len(set(used)) == 2, "control messages of the new group go over a side group of its own"


def event(over: bool) -> Any:
    """Return a device event; one that is never over follows a collective in which a rank does not take part."""
    return mock.Mock(query=lambda: over)


def diverge_on_the_device() -> tuple[str, bool, bool]:
    """Return the rank's error, and whether it logged a reason and aborted the group.

    Rank 1 skips a unit, and rank 0's device waits.
    """
    group = new_group()
    model = FSDP(nn.Sequential(*(FSDP(nn.Linear(3, 3), group) for _ in range(3))), group)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    context = model._join_context()
    lane, ended = Lane.of(group), threading.Event()
    watcher = Watcher()
    context.enter_forward(context.root)
    units = [unit for unit in context.units if unit.handles]
    said = mock.Mock()

    def abort(words: str) -> None:
        lane.carrier.closed = words
        ended.set()

    try:
        context.passes.about_to("gather", units[dist.get_rank()])
        lane.collectives.number += 1  # as where the gather is issued
        number = lane.collectives.number
        watcher.follow(event(over=True), Work((), lane, "earlier collective", number=number - 1, on_host=False))
        watcher.follow(event(over=False), Work((), lane, f"gather {units[0].name}", number=number, on_host=False))
        with mock.patch.object(lane.carrier, "abort", abort), mock.patch.object(work_module.logger, "error", said):
            ended.wait(30)
        combine(torch.ones(1), group, HostStreams(), "the next collective")
    except OutOfStep as error:
        return str(error), said.called, ended.is_set()
    return "no error", False, False


def test_divergence_ends_the_wait_of_the_device() -> None:
    """On NCCL the host has no work to wait for: ranks would hang until the watchdog killed them."""
    (error, *ended), (error_of_odd, *ended_by_odd) = run_ranks(2, diverge_on_the_device)
    assert error.startswith("gather unit '0': the ranks are out of step, and the group was ended")
    assert (ended, ended_by_odd) == ([True, True], [False, False])
    for words in (error, error_of_odd):
        assert "unit '0'" in words and "unit '1'" in words and "rank 1" in words


def test_watcher_is_paused_during_graph_capture() -> None:
    """A query of an event would invalidate a capture."""
    watcher, queried = Watcher(), threading.Event()
    watcher.follow(mock.Mock(query=lambda: queried.set() or False), mock.Mock())
    assert queried.wait(30)
    capturing = mock.Mock(asynchronous_work=False, is_capturing=lambda: True)
    with mock.patch.object(work_module, "watcher", watcher):
        Work((), mock.Mock(carrier=None), "gather").on(capturing)
    assert not watcher._in_flight, "neither the earlier event nor that of the captured collective is queried"


def test_watcher_thread_ends_with_the_process_and_begins_again() -> None:
    """Python would end the thread inside of a poll, which aborts the process."""
    watcher, queried = Watcher(), threading.Event()
    unfinished = mock.Mock(query=lambda: queried.set() or False)
    for _ in range(2):
        queried.clear()
        watcher.follow(unfinished, mock.Mock())
        thread = watcher._thread
        assert thread is not None and queried.wait(30)
        watcher.stop()
        thread.join(30)
        assert not thread.is_alive() and watcher._thread is None


@on_ranks(1)
def test_host_that_gloo_blocks_for_an_accelerator_looks_at_its_peers() -> None:
    """Gloo's collectives for accelerators block the host, up to the timeout of the group."""

    def wait(timeout: timedelta | None = None) -> bool:
        assert timeout is not None, "the host waits without a look at the peers"
        raise RuntimeError("timed out")

    unfinished = mock.Mock(spec=dist.Work, wait=wait, is_completed=lambda: False)
    lane = Lane(new_group(), torch.device("meta"))
    calls = mock.patch.object(dist, "all_reduce", return_value=unfinished)
    late = mock.patch.object(Wait, "look", side_effect=OutOfStep("rank 1 has ended"))
    named = mock.patch.object(native_module, "backend_of", return_value="gloo")
    with named, calls as started, late, pytest.raises(OutOfStep, match="rank 1 has ended"):
        lane.collective("all_reduce", Event("reduce unit 'a'"), torch.ones(1, device="meta"), asynchronous=False)
    assert started.call_args.kwargs["async_op"] is True


# -- copies between the host and the device ----------------------------------------------------------------------------


class Copies(TorchFunctionMode):
    """Recorder of each `Tensor.to`: the target, and whether the copy blocks the host.

    Tensors report `pinned`; copies from the meta device are ones; with `stays` no tensor moves.
    """

    def __init__(self, *, pinned: bool = False, stays: bool = False) -> None:
        super().__init__()
        self.pinned, self.stays = pinned, stays
        self.blocks: list[bool] = []
        self.targets: list[torch.device] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.is_pinned:
            return self.pinned
        if func is Tensor.to and isinstance(args[1], torch.device):
            self.blocks.append(not (kwargs or {}).get("non_blocking", False))
            self.targets.append(args[1])
            if self.stays:
                return args[0]
            if args[0].is_meta:
                return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_of_pinned_inputs_block(pinned: bool) -> None:
    """The owner may fill page-locked memory with the next batch as soon as the call returns."""
    with Copies(pinned=pinned) as copies:
        moved = to_device({"x": torch.ones(3)}, AWAY)
    assert moved["x"].is_meta and copies.blocks == [pinned]
    with Copies() as copies:
        to_device(torch.ones(3, device=AWAY), CPU)
    assert copies.blocks == [True]


def test_copy_of_the_scale_to_the_host_blocks() -> None:
    """The loss is on CPU, and the scale on the device."""
    scaler = ShardedGradScaler("cpu", init_scale=1.0)
    scaler._scale = torch.ones((), device=AWAY)
    with Copies() as copies:
        assert scaler.scale(torch.tensor(3.0)) == 3.0
    assert copies.blocks == [True]


# -- a unit's compute device -------------------------------------------------------------------------------------------


@contextmanager
def accelerator(device: torch.device) -> Iterator[None]:
    with mock.patch.object(ownership_module, "default_device", return_value=device):
        yield


def test_module_on_cpu_moves_to_the_accelerator() -> None:
    """A warning says so; with `device_id`, or without an accelerator, the module stays."""
    module = nn.Linear(3, 3)
    module.register_buffer("mean", torch.zeros(3))
    params = dict(module.named_parameters())
    owned = owned_params(module, Ignored(), "it")
    with accelerator(AWAY):
        warned = pytest.warns(UserWarning, match=r"moved to its current device, meta.*Pass device_id=")
        with warned, Copies(stays=True) as copies:
            assert move_to(module, owned, Ignored(), None) == AWAY
        assert copies.targets == [AWAY] * 3
        assert all(params[name] is param for name, param in module.named_parameters())
        assert move_to(nn.Linear(3, 3), owned_params(nn.Linear(3, 3), Ignored(), "it"), Ignored(), "cpu") == CPU
    with accelerator(CPU):
        assert move_to(nn.Linear(3, 3), owned_params(nn.Linear(3, 3), Ignored(), "it"), Ignored(), None) == CPU


@pytest.mark.parametrize("served", ["cpu", "meta", "cpu meta"])
def test_module_on_cpu_stays_if_the_group_only_supports_cpu(served: str) -> None:
    """The first forward would raise, as no backend of the group supports the accelerator."""

    def backend(device: torch.device) -> Any:
        if device.type not in served.split():
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        backend = mock.Mock()
        backend.name = lambda: "gloo"
        return backend

    module, group = nn.Linear(3, 3), mock.Mock(_get_backend=backend)
    owned = owned_params(module, Ignored(), "it")
    with accelerator(AWAY), Copies(stays=True), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert move_to(module, owned, Ignored(), None, (), group) == (CPU if served == "cpu" else AWAY)
    assert bool(warned) is (served != "cpu")


def test_unit_without_parameters_computes_on_the_device_of_nested_units() -> None:
    """A root without parameters decides the streams and the input device of the whole tree."""
    for inner in ([AWAY], [CPU, AWAY]):
        assert move_to(nn.Identity(), [], Ignored(), None, inner) == AWAY
    with accelerator(AWAY):
        assert move_to(nn.Identity(), [], Ignored(), None, [CPU]) == CPU
        assert move_to(nn.Identity(), [], Ignored(), None) == AWAY


# -- memory of the host ------------------------------------------------------------------------------------------------


def test_error_of_the_gloo_side_group_names_the_remedy() -> None:
    """Beside NCCL the ranks exchange control messages over gloo, which may need another network interface."""
    group = mock.Mock(rank=lambda: 0, size=lambda: 1)
    fails = mock.Mock(side_effect=RuntimeError("Unable to find address for: eth9"))
    with (
        mock.patch.object(groups_module, "group_store", return_value=dist.HashStore()),
        mock.patch.object(groups_module, "backend_of", return_value="unknown"),
        mock.patch.object(groups_module, "group_timeout", return_value=timedelta(seconds=5)),
        mock.patch.object(dist, "ProcessGroupGloo", fails),
        pytest.raises(RuntimeError, match=r"eth9.*GLOO_SOCKET_IFNAME.*cpu:gloo,cuda:nccl"),
    ):
        groups_module.make_control_group(group, CPU, 0)


def test_unreferenced_host_memory_is_reused() -> None:
    """Gradients on the host stay in the same memory from step to step, unless the user keeps them."""
    made: list[int] = []

    def make(nbytes: int) -> Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    buffers = HostBuffers()
    for _ in range(3):
        buffers.take(64, make).fill_(1)
    assert made == [64]
    kept = buffers.take(64, make).fill_(2)[3:5]
    for _ in range(3):
        buffers.take(64, make).fill_(1)
    assert made == [64, 64] and kept.tolist() == [2, 2]
    del kept
    held = [buffers.take(64, make) for _ in range(2)]
    assert made == [64, 64] and held[0].data_ptr() != held[1].data_ptr()
    buffers.take(32, make)
    assert made == [64, 64, 32]
    del buffers
    held[0].fill_(3)


def mapping_of(address: int) -> dict[str, str]:
    """Return the attributes of the memory mapping at `address`; empty if there is none."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word.endswith(":"):
            found[word[:-1]] = rest.strip()
        else:
            if found.get("inside"):
                return found
            start, end = (int(bound, 16) for bound in word.split("-"))
            found = {"inside": "yes"} if start <= address < end else {}
    return found if found.get("inside") else {}


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_large_host_memory_may_have_huge_pages() -> None:
    """A large block costs a page fault per 2 MiB instead of 4 KiB; the allocator serves small ones.

    Neighbouring memory keeps its flags, and the block is freed with the last tensor that refers to it.
    """

    def mapped(tensor: Any) -> str | None:
        """Return the flags of the page of the last byte."""
        return mapping_of(tensor.data_ptr() + tensor.nbytes - 1).get("VmFlags")

    huge = 1 << 21
    piece = host_memory.empty(3 * huge // 4, dtype=torch.float32, device=CPU)  # three huge pages
    assert piece.data_ptr() % huge == 0 and piece.shape == (3 * huge // 4,) and piece.dtype == torch.float32
    assert " hg" in (mapped(piece) or "")
    half = piece.fill_(2)[::2]
    del piece
    assert half.eq(2).all() and " hg" in (mapped(half) or "")
    small = host_memory.empty(huge // 8, dtype=torch.float32, device=CPU)
    assert " hg" not in (mapped(small) or "") and host_memory.empty(5, dtype=torch.int8, device=AWAY).is_meta
    gone = mock.Mock(data_ptr=mock.Mock(return_value=half.data_ptr()), nbytes=3 * huge)
    del half
    assert " hg" not in (mapped(gone) or "")


@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20])
def test_memory_of_freed_gradients_is_recycled(nbytes: int) -> None:
    """The next step's gradients take that memory, without page faults. Without a next step it is freed."""

    def take() -> Tensor:
        return host_memory.recycled(nbytes // 4, torch.empty(0)).fill_(1)

    with mock.patch.object(host_memory, "_left", host_memory._Left()), mock.patch.object(threads, "IDLE", 60.0):
        first, second = take(), take()
        part, addresses = first[5:], [first.data_ptr(), second.data_ptr()]
        del first
        third = take()
        assert third.data_ptr() not in addresses and part.eq(1).all(), "a tensor refers to that memory"
        del part, second
        again = [take(), take()]
        assert sorted(each.data_ptr() for each in again) == sorted(addresses)
        small, larger = (host_memory.recycled(n, torch.empty(0, dtype=torch.int8)) for n in (1 << 10, nbytes + 1))
        assert small.data_ptr() not in addresses and larger.data_ptr() not in addresses
    with mock.patch.object(host_memory, "_left", host_memory._Left()), mock.patch.object(threads, "IDLE", 0.05):
        take()
        deadline = time.monotonic() + 60
        while host_memory._left._spare[nbytes] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not host_memory._left._spare[nbytes], "never freed"


@pytest.mark.parametrize("pinned", [False, True])
@on_ranks(1)
def test_host_memory_honours_pin_memory(pinned: bool) -> None:
    """Offloaded gradients are page-locked only with `pin_memory`, and allocated in the first step only."""
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    with trace_streams() as tracer, mock.patch.object(FlatParamHandle, "keeps_gradients_on_host", True):
        model = FSDP(nn.Linear(3, 3), cpu_offload=CPUOffload(True, pin_memory=pinned))
        tracer.watch(model)
        counts = []
        for _ in range(4):
            for _ in range(2):  # the second gradient arrives while the user holds the first
                model(torch.ones(2, 3)).sum().backward()
            model.zero_grad()
            counts.append(len(tracer.streams.pinned))
    assert counts == [2] * 4
    assert {pinned for _, pinned in tracer.streams.pinned} == {pinned}
