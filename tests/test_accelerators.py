"""What the engine asks of an accelerator, shown on CPU: the meta device, or a recorder, stands for it."""

from __future__ import annotations

import contextlib
import mmap
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

import fsdp.checkpoint.save_checkpoint as save_module
import fsdp.comm.collectives as collectives_module
import fsdp.comm.groups as groups_module
import fsdp.comm.issuing as issuing_module
import fsdp.comm.native as native_module
import fsdp.comm.work as work_module
import fsdp.flat.ownership as ownership_module
from fsdp import CPUOffload
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import async_save
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.comm import host_memory, threads
from fsdp.comm.collectives import Communicator, Event, combine
from fsdp.comm.consensus import Ranks
from fsdp.comm.groups import Groups
from fsdp.comm.host_memory import HostBuffers, locked_pages, place
from fsdp.comm.lane import Lane
from fsdp.comm.streams import AcceleratorStreams, HostStreams
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.comm.work import OutOfStep, Watcher, Work
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.ownership import Ignored, move_to, owned_params
from fsdp.runtime.nested import to_device
from fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.harness.agreeing import new_group
from tests.harness.pool import run_ranks
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


def talk_beside_nccl() -> list[Any]:
    """What ranks say to each other in a group that does not serve CPU."""
    rank, group = dist.get_rank(), new_group()
    calls: list[Any] = []
    values = torch.tensor([rank, -rank])
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        calls.append((tensor.device.type, options["group"] is group))
        return real(tensor, **options)

    def backend(group: Any, device: torch.device) -> str:
        return "unknown" if device.type == "cpu" else "nccl"

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))
        for module in (groups_module, native_module, issuing_module):
            stack.enter_context(mock.patch.object(module, "backend_of", backend))
        collectives_module.agree(values, group, AWAY, "agree")
        every = collectives_module.gather_values(torch.tensor([rank, 7]), group, AWAY, "gather").tolist()
        same, other = (Lane.of(group, AWAY).ask("ask", number, largest=rank) for number in (1, rank))
        answers = [same.result(), other.result()]
        done = same.poll()
    return [values.tolist(), every, answers, done, set(calls)]


def test_control_messages_stay_off_the_device() -> None:
    """On NCCL alone they ran on the compute stream, and the host that waited for them drained it."""
    said = [[1, 0], [[0, 7], [1, 7]], [1, None], True, {("cpu", False)}]
    assert run_ranks(2, talk_beside_nccl) == [said, said]


class NeverOver:
    """The event after a collective whose other ranks do not come."""

    def query(self) -> bool:
        return False


class Over(NeverOver):
    def query(self) -> bool:
        return True


def leave_the_order() -> tuple[str, int]:
    """What each rank is told, and how many groups it ended: rank 1 skips a unit, and rank 0's device waits for it."""
    group = new_group()
    model = FSDP(nn.Sequential(*(FSDP(nn.Linear(3, 3), group) for _ in range(3))), group)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    context = model._join_context()
    lane, ended = Lane.of(group), threading.Event()
    watcher = Watcher()
    context.enter_forward(context.root)
    units = [unit for unit in context.units if unit.handles]
    try:
        context.passes.about_to("gather", units[dist.get_rank()])
        watcher.follow(Over(), Work((), lane, "what is over", on_host=False))
        watcher.follow(NeverOver(), Work((), lane, f"gather {units[0].name}", on_host=False))
        with mock.patch.object(lane.carrier, "abort", ended.set):
            ended.wait(30)
        combine(torch.ones(1), group, HostStreams(), "the next collective")
    except OutOfStep as error:
        return str(error), int(ended.is_set())
    return "nothing", 0


def test_a_rank_that_leaves_the_order_ends_the_others_wait() -> None:
    """On NCCL there is no work to wait for: the others hung until the watchdog killed them."""
    (here, ended), (there, alone) = run_ranks(2, leave_the_order)
    assert here.startswith("gather unit '0': the ranks are out of step, and the group was ended")
    assert (ended, alone) == (1, 0)
    for words in (here, there):
        assert "unit '0'" in words and "unit '1'" in words and "rank 1" in words


class Fake:
    """A process group that torch does not know."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def test_gathers_and_reductions_are_looked_after() -> None:
    """Both, as a program may wait for the device right after the last reduction of a backward."""
    streams = mock.Mock(asynchronous_work=False, is_capturing=lambda: False)
    group = Fake(2)
    communicator = Communicator(Groups(group, 0, 2, None, 0, 1), streams)
    with (
        mock.patch.multiple(dist, **{name: mock.Mock(return_value=None) for name in (ALL_GATHER, REDUCE_SCATTER)}),
        mock.patch.object(work_module, "watcher") as watcher,
    ):
        part = collectives_module.Gather(torch.ones(4), torch.ones(2))
        works = [
            communicator.gather([part], Event("gather", 0)),
            communicator.reduce(torch.ones(2), torch.ones(4), Event("reduce", 1)),
        ]
    assert [call.args[1] for call in watcher.follow.call_args_list] == works


def test_nothing_is_looked_at_while_a_graph_is_captured() -> None:
    """Asking for an event spoils a capture."""
    watcher, looked = Watcher(), threading.Event()
    event = mock.Mock(query=lambda: looked.set() or False)
    watcher.follow(event, mock.Mock())
    assert looked.wait(30)
    watcher.pause()
    assert not watcher._in_flight


def test_a_graph_may_be_captured_while_earlier_collectives_are_looked_after() -> None:
    """CUDA forbids other threads to ask for events meanwhile, unless they have said that captures do not concern them.
    The thread says so before its first look; and it wakes up once for many collectives."""
    watcher, over = Watcher(), threading.Event()
    calls: list[str] = []
    events = [mock.Mock(query=lambda number=number: calls.append(f"look {number}") or True) for number in range(3)]
    events[-1].query = lambda: calls.append("look 2") or over.set() or True
    for event in events:
        watcher.follow(event, mock.Mock(), lambda: calls.append("prepare"))
    assert over.wait(30)
    assert calls[0] == "prepare" and calls.count("prepare") == 1 and calls[-1] == "look 2"


def test_gathers_and_reductions_have_one_priority() -> None:
    """A communicator keeps the order of its collectives: a gather waits behind a reduction that is starved."""
    with mock.patch("torch.Stream") as stream:
        AcceleratorStreams(torch.device("cuda", 0))
    assert [call.kwargs for call in stream.call_args_list] == [{"priority": -1}] * 2


# -- copies between the host and the device ----------------------------------------------------------------------------


class Copies(TorchFunctionMode):
    """Notes where each ``Tensor.to`` leads, and whether it blocks the host; what is ``pinned`` says so, what is away
    comes as ones, and with ``stays`` nothing goes there."""

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
def test_inputs_may_be_refilled_at_once(pinned: bool) -> None:
    """A copy of page-locked memory goes on while its owner fills it with the next batch."""
    with Copies(pinned=pinned) as copies:
        moved = to_device({"x": torch.ones(3)}, AWAY)
    assert moved["x"].is_meta and copies.blocks == [pinned]
    with Copies() as copies:
        to_device(torch.ones(3, device=AWAY), CPU)
    assert copies.blocks == [True]


def test_a_scale_that_goes_to_the_host_is_waited_for() -> None:
    """The loss is on CPU, and the scale on the device."""
    scaler = ShardedGradScaler("cpu", init_scale=1.0)
    scaler._scale = torch.ones((), device=AWAY)
    with Copies() as copies:
        assert scaler.scale(torch.tensor(3.0)) == 3.0
    assert copies.blocks == [True]


# -- where a unit computes ---------------------------------------------------------------------------------------------


@contextmanager
def accelerator(device: torch.device) -> Iterator[None]:
    with mock.patch.object(ownership_module, "default_device", return_value=device):
        yield


def test_a_module_on_cpu_goes_to_the_accelerator() -> None:
    """Torch computes on the current device; nothing here trained on CPU without a word."""
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
def test_a_module_on_cpu_stays_there_where_its_group_serves_the_cpu_alone(served: str) -> None:
    """Its first forward would raise, as no backend of the group takes tensors of the accelerator."""

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


def test_a_unit_without_parameters_computes_where_those_in_it_do() -> None:
    """Its streams and the device of its inputs are those of the whole tree if it is the root."""
    for inner in ([AWAY], [CPU, AWAY]):
        assert move_to(nn.Identity(), [], Ignored(), None, inner) == AWAY
    with accelerator(AWAY):
        assert move_to(nn.Identity(), [], Ignored(), None, [CPU]) == CPU
        assert move_to(nn.Identity(), [], Ignored(), None) == AWAY


# -- memory of the host ------------------------------------------------------------------------------------------------


def test_pages_are_locked_while_something_holds_them() -> None:
    """An allocator of page-locked memory rounds up to a power of two, and gives nothing back."""
    locked: dict[int, int] = {}
    memory = locked_pages(1 << 20 | 1, locked.__setitem__, locked.__delitem__)
    assert memory.numel() == (1 << 20) + 1 and list(locked) == [memory.data_ptr()]
    assert sum(locked.values()) == (1 << 20) + 1
    param = nn.Parameter(memory[:16].view(torch.float32))
    del memory
    assert len(locked) == 1
    del param
    assert not locked
    with pytest.raises(MemoryError, match="on purpose"):
        locked_pages(10, mock.Mock(side_effect=MemoryError("on purpose")), locked.__delitem__)


def test_pages_stay_locked_while_the_device_copies_them() -> None:
    """Torch's allocator does not know them, so nothing else keeps them until a copy that is queued is over."""
    locked: dict[int, int] = {}
    over, asked = threading.Event(), threading.Event()

    def query() -> bool:
        asked.set()
        return over.is_set()

    uses = [mock.Mock(query=lambda: True), mock.Mock(query=query)]
    with mock.patch.object(host_memory, "_dropped", host_memory._Dropped()), mock.patch.object(threads, "IDLE", 0.05):
        memory = locked_pages(1 << 20, locked.__setitem__, locked.__delitem__, lambda: uses)
        address = memory.data_ptr()
        del memory
        assert locked and mapping_of(address), "given back while the device copies"
        for _ in range(2):  # a thread looks again and again
            asked.clear()
            assert asked.wait(30)
        assert locked
        over.set()
        deadline = time.monotonic() + 60
        while (locked or mapping_of(address)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not locked and not mapping_of(address), "they stay for ever"


def test_the_side_group_of_gloo_names_what_it_needs() -> None:
    """Beside a group of NCCL alone the ranks exchange control messages over gloo, which takes another interface."""
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


def _makes_side_groups() -> None:
    rank, kind = dist.get_rank(), dist.ProcessGroupGloo
    made: Any = mock.Mock(wraps=kind.create_device)
    eager: Any = mock.Mock(side_effect=TypeError)  # as before torch 2.8
    for number, make in enumerate((made, eager)):
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"), mock.patch.object(kind, "create_device", make):
            side: Any = groups_module.make_control_group(dist.group.WORLD, CPU, number)
        values = torch.zeros(2)
        side._allgather_base(values, torch.ones(1) + rank).wait()
        assert values.tolist() == [1, 2] and make.call_args == mock.call(interface="lo", lazy_init=True)
    with (
        mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="nonsense"),
        pytest.raises(RuntimeError, match=r"nonsense.*GLOO_SOCKET_IFNAME"),
    ):
        groups_module.make_control_group(dist.group.WORLD, CPU, 2)


def test_the_side_group_of_gloo_connects_at_the_first_message() -> None:
    """A rank of a large job opens a socket per rank that it sends to, not one per rank, where torch can do that."""
    run_ranks(2, _makes_side_groups)


def test_a_save_uses_the_streams_of_the_models_device() -> None:
    """Streams of the accelerator open a context there, which a training on CPU has no use for."""
    assert save_module._device_of(nn.Linear(2, 2)) == CPU == save_module._device_of(nn.ReLU())
    assert save_module._device_of(nn.Linear(2, 2, device="meta")) == CPU
    away = torch.device("cuda", 1)
    with mock.patch.object(save_module, "units_of", return_value=[mock.Mock(device=CPU), mock.Mock(device=away)]):
        assert save_module._device_of(nn.Linear(2, 2)) == away  # though offloaded parameters are on CPU


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_locked_pages_are_not_in_forks_and_may_be_huge() -> None:
    """With a copy in a child, the next write would go to other pages than the device reads. Huge pages take a tenth of
    the time to lock."""
    memory = locked_pages(5 << 20, lambda address, nbytes: None, lambda address: None)
    flags = mapping_of(memory.data_ptr())["VmFlags"].split()
    assert "dc" in flags and "hg" in flags


def test_host_memory_is_used_again_when_nobody_holds_it() -> None:
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
    """What the system says of the pages there."""
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
def test_large_pieces_of_host_memory_may_have_huge_pages() -> None:
    """What is given back after a step and needed in the next costs a fault per 2 MiB, not per 4 KiB; small pieces are
    the allocator's. Nothing outside of the piece is touched, and it goes with the last tensor that holds it."""

    def mapped(tensor: Any) -> str | None:
        """The flags of the pages of its last byte."""
        return mapping_of(tensor.data_ptr() + tensor.nbytes - 1).get("VmFlags")

    huge = 1 << 21
    piece = host_memory.empty(3 * huge // 4, dtype=torch.float32, device=CPU)  # three of them
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


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="the system has no memory that may be taken back later")
@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20])
def test_what_a_step_leaves_serves_the_next(nbytes: int) -> None:
    """Gradients lie where those of the step before did, once nothing holds these, and cost no page fault. Meanwhile the
    system may have that memory, and it goes where no step comes."""

    def take() -> Tensor:
        return host_memory.recycled(nbytes // 4, torch.empty(0)).fill_(1)

    def lazy(address: int) -> int:
        return int(mapping_of(address)["LazyFree"].split()[0]) << 10

    with mock.patch.object(host_memory, "_left", host_memory._Left()), mock.patch.object(threads, "IDLE", 60.0):
        first, second = take(), take()
        part, places = first[5:], [first.data_ptr(), second.data_ptr()]
        del first
        third = take()
        assert third.data_ptr() not in places and part.eq(1).all(), "somebody holds that memory"
        del part, second
        # half of it at least: what is no huge page is a mapping of its own
        assert lazy(places[0]) >= nbytes // 2, "the system could not have it"
        again = [take(), take()]
        assert sorted(each.data_ptr() for each in again) == sorted(places)
        if places[1] - places[0] not in (nbytes, -nbytes):  # else one mapping
            assert lazy(places[0]) == 0
        small, of_another = (host_memory.recycled(n, torch.empty(0, dtype=torch.int8)) for n in (1 << 10, nbytes + 1))
        assert small.data_ptr() not in places and of_another.data_ptr() not in places
    with mock.patch.object(host_memory, "_left", host_memory._Left()), mock.patch.object(threads, "IDLE", 0.05):
        place = take().data_ptr()
        deadline = time.monotonic() + 60
        while host_memory._left._spare[nbytes] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not host_memory._left._spare[nbytes] and "LazyFree" not in mapping_of(place), "it stays for ever"


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_honours_pin_memory(pinned: bool) -> None:
    """With ``CPUOffload(pin_memory=False)`` gradients were page-locked all the same."""
    assert run_ranks(1, offloaded_memory, pinned) == [(True, {pinned}, 2)]


def offloaded_memory(pinned: bool) -> tuple[bool, set[bool], int]:
    """Whether steps after the first ask for no memory, whether what they ask for is pinned, how often per bucket."""
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    with trace_streams() as tracer, mock.patch.object(FlatParamHandle, "keeps_gradients_on_host", True):
        model = FSDP(nn.Linear(3, 3), cpu_offload=CPUOffload(True, pin_memory=pinned))
        tracer.watch(model)
        counts = []
        for _ in range(4):
            for _ in range(2):  # the second gradient comes while the user has the first
                model(torch.ones(2, 3)).sum().backward()
            model.zero_grad()
            counts.append(len(tracer.streams.pinned))
    return len(set(counts)) == 1, {pinned for _, pinned in tracer.streams.pinned}, counts[-1]


class HostOfAccelerator:
    """Stands for the streams of an accelerator: notes the memory that is asked for, and what is copied into it."""

    def __init__(self) -> None:
        self.rooms: list[Tensor] = []
        self.waited = 0

    def host_memory(self, nbytes: int, *, pinned: bool) -> Tensor:
        self.rooms.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.rooms[-1]

    def fetch(self, tensor: Tensor, into: Tensor) -> tuple[Tensor, int]:
        return place(into, tensor).fill_(1), 0

    @contextmanager
    def on_host(self, event: int) -> Iterator[None]:
        self.waited += 1
        yield


def test_a_save_stages_into_one_piece_of_host_memory() -> None:
    """A piece per tensor, each rounded up, would be kept for ever."""
    saving = save_module.Save(Ranks.of(None), "", None, trusted=False)
    saving.share(
        {
            "a": torch.empty(5, dtype=torch.bfloat16, device=AWAY),
            "e": RaggedTensor(torch.empty(6, device=AWAY), (4, 6), 0),
            "f": torch.empty(0, device=AWAY),
        }
    )
    saving.pack("b", {"c": [torch.empty(3, 7, device=AWAY), torch.ones(2)], "d": 3})
    streams = HostOfAccelerator()
    with mock.patch.object(save_module, "streams_for", return_value=streams):
        saving._stage()
    assert [room.numel() for room in streams.rooms] == [64 + 128 + 64] and streams.waited == 4
    room = streams.rooms[0].untyped_storage()._cdata
    (_, (inner, own)), pieces = saving._packed["b"], {piece.key: piece.values for piece in saving._pieces}
    copies = [pieces["a"], inner, pieces["e"]]
    assert all(copy.untyped_storage()._cdata == room and bool((copy == 1).all()) for copy in copies)
    assert [tuple(copy.shape) for copy in copies] == [(5,), (3, 7), (1, 6)]
    assert pieces["f"].shape == (0,) and torch.equal(own, torch.ones(2))


def save_beside_an_accelerator(path: str) -> list[str]:
    """The devices that are made current in the thread that writes."""
    streams = HostStreams()
    entered: list[str] = []

    @contextmanager
    def on_device() -> Iterator[None]:
        entered.append(threading.current_thread().name)
        yield

    fails = mock.Mock(side_effect=AssertionError("a save of what is staged waits for the device"))
    with (
        mock.patch.object(streams, "on_device", on_device),
        mock.patch.object(save_module, "streams_for", return_value=streams),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.distributed.checkpoint.filesystem._OverlappingCpuLoader", fails),
    ):
        async_save(path, nn.Linear(3, 3)).result()
    return entered


def test_a_save_in_the_background_leaves_the_device_alone(tmp_path: Path) -> None:
    """Torch's loader opens streams and contexts on the first device, and waits for the training's work there."""
    (entered,) = run_ranks(1, save_beside_an_accelerator, str(tmp_path))
    assert len(entered) == 1 and entered[0].startswith("saving to ")
