"""Gathers and reductions through memory that the ranks of one host share.

The direct exchange is the reference: shared memory must give the same bits. The remaining tests concern the memory:
ranks that die, diverge, run out of room or fork, and memory that is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, shard_info
from fsdp.comm import threads
from fsdp.comm.collectives import Communicator, Event, Gather
from fsdp.comm.groups import Groups, group_store
from fsdp.comm.lane.lane import Lane
from fsdp.comm.streams import streams_for
from fsdp.comm.transport import shared_memory
from fsdp.comm.transport.channel import Channel
from fsdp.comm.transport.segment import HEADER, Mapping, Segment
from fsdp.comm.transport.shared_memory import Sharing
from fsdp.comm.versions import STORAGES_SWAP
from fsdp.comm.waiting.board import Board
from fsdp.comm.waiting.work import OutOfStep
from fsdp.flat.memory import SharedPool, pool_for
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient, new_group
from tests.harness.models import ZOO
from tests.harness.oracle import Schedule, adamw, assert_bit_equal, assert_same_steps
from tests.harness.pool import Died, on_ranks, run_fresh
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_parameters, run_fsdp, wrap
from tests.harness.strategies import FULL_SHARD, SHARD_GRAD_OP
from tests.harness.versions import needs_swaps

CPU = torch.device("cpu")
HEADERS = 64 * 4096  # bytes that a segment may hold at rest: a few pages for each group that was ever used


_held_before = 0  # bytes still held by groups that an earlier test has broken in this process


def enable_shared_memory() -> None:
    global _held_before
    os.environ["FSDP_COLLECTIVES"] = "shared"
    gc.collect()  # models of earlier tests, with their memory
    if shared_memory.segment() is not None:
        _held_before = held_nbytes_at_rest()


def channel_of(group: Any) -> Channel:
    channel = Sharing.of(group).channel
    assert channel is not None, "the ranks share no memory"
    return channel


def own_segment() -> Segment:
    segment = shared_memory.segment()
    assert segment is not None
    return segment


def communicator_of(group: Any) -> Communicator:
    return Communicator(Groups.of(group, replicate=False), streams_for(CPU))


def held_nbytes() -> int:
    """Return the bytes allocated in the segment, beyond those of earlier tests."""
    return own_segment().held_nbytes - _held_before


def held_nbytes_at_rest() -> int:
    """Return `held_nbytes()` once all ranks are at rest."""
    dist.barrier()
    own_segment().trim()
    return held_nbytes()


def unit() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 151), nn.Tanh(), nn.Linear(151, 200))


def make_model(group: Any = None, **options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(unit(), unit(), unit(), nn.Linear(200, 3))
    return wrap(net, wrap_policy=ModuleWrapPolicy({nn.Sequential}), process_group=group, **options)


def step(model: nn.Module, value: float = 0.1) -> None:
    model(torch.full((2, 200), value * (1 + dist.get_rank()))).square().sum().backward()


# -- the same bits -------------------------------------------------------------------------------------------------


LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
HALF = MixedPrecision(reduce_dtype=torch.float16)
CASES: list[tuple[str, ShardingStrategy, bool, MixedPrecision | None]] = [
    ("mlp", FULL_SHARD, False, None),
    ("tied-transformer", SHARD_GRAD_OP, True, None),
    ("lora", FULL_SHARD, True, None),
    ("used-twice", FULL_SHARD, True, LOW),
    ("unused", FULL_SHARD, False, HALF),
]


@on_ranks(2, 3)
def test_training_through_shared_memory_equals_the_direct_exchange_bit_for_bit(world_size: int) -> None:
    """Train in every precision, with and without accumulation; at rest no bytes are held."""
    enable_shared_memory()
    schedule = Schedule(steps=2, micro=2)
    for name, strategy, use_orig_params, precision in CASES[world_size - 2 :: 2]:  # by turns
        steps = []
        for way in ("direct", "shared"):
            os.environ["FSDP_COLLECTIVES"] = way
            group = new_group()
            options = {"strategy": strategy, "use_orig_params": use_orig_params, "mixed_precision": precision}
            options["no_sync"] = [name != "lora", False]  # accumulators are not in the segment
            steps.append(run_fsdp(ZOO[name], adamw, schedule, process_group=group, **options))
        assert channel_of(group).collectives.number >= 4, "nothing went through shared memory"
        assert_same_steps(*steps, name)
    assert held_nbytes_at_rest() <= HEADERS


@on_ranks(2)
def test_memory_is_reused_only_after_all_ranks_have_read_it() -> None:
    """One rank waits for a collective after issuing five more; its peer waits at once."""
    enable_shared_memory()
    group, rank = new_group(), dist.get_rank()
    communicator = communicator_of(group)
    under_way: list[tuple[Any, torch.Tensor, float]] = []

    def wait_for_oldest() -> None:
        pending, result, expected = under_way.pop(0)
        pending.wait()
        assert result.tolist() == [expected] * result.numel()

    for number in range(200):
        full, numel = torch.empty(2 * (100 + 40 * (number % 7))), 100 + 40 * (number % 7)
        if number % 2:
            shard = torch.full((numel,), float(number))
            gathered = communicator.gather([Gather(full, shard)], Event(f"gather {number}", number))
            under_way.append((gathered, full, float(number)))
        else:
            out = torch.empty(numel)
            pending = communicator.reduce(out, full.fill_(number + rank), Event(f"reduce {number}", number))
            under_way.append((pending, out, number + 0.5))
        while len(under_way) > (5 if rank else 0):
            wait_for_oldest()
        if number == 100:
            dist.barrier()
    while under_way:
        wait_for_oldest()
    assert held_nbytes_at_rest() <= HEADERS


@on_ranks(2)
@impatient
def test_a_rank_that_reads_late_does_not_see_later_writes() -> None:
    """Rank 0 writes to summoned parameters, and to gradients of `no_sync` that were reduced."""
    enable_shared_memory()
    group, rank = new_group(), dist.get_rank()
    model = make_model(group)
    step(model)
    before = full_parameters(model)
    several: list[Any] = [unit for _, unit, _ in units_in(model)]
    own, unit = several[:2]

    def late(gather: Any, shards: Any) -> Any:
        vectors = gather(shards)
        with contextlib.suppress(RuntimeError):  # rank 0 has to wait for this rank
            if rank == 1:
                store.wait(["written"], timedelta(seconds=0.5))
        return vectors

    store = dist.PrefixStore("late", group_store(dist.group.WORLD))
    root: Any = model
    delayed = mock.patch.object(own, "gather_vectors", functools.partial(late, own.gather_vectors))
    with delayed, root.summon_full_params(root, recurse=False):
        for name, parameter in own.views[0].summoned():
            parameter.data.mul_(2)
            assert torch.equal(parameter.data, before[name] * 2), name
        store.set("written", "")
    for name, after in full_parameters(model).items():
        factor = 2 if name in ("3.weight", "3.bias") else 1
        assert torch.equal(after, before[name] * factor), name
    full, total = unit.context.unsharder.pool.empty(16, dtype=torch.float32, device=CPU).fill_(1 + rank), torch.empty(8)
    pending = unit.communicator.reduce(total, full, Event("reduce", 4), to_write=True)
    if rank == 1:
        with contextlib.suppress(RuntimeError):
            store.wait(["overwritten"], timedelta(seconds=0.5))
    pending.wait()
    full.zero_()
    store.set("overwritten", "")
    assert total.tolist() == [1.5] * 8


# -- ranks that part, fail and die ---------------------------------------------------------------------------------


@on_ranks(2)
def test_diverged_ranks_raise_at_once_and_can_continue() -> None:
    enable_shared_memory()
    group, rank = new_group(), dist.get_rank()
    communicator = communicator_of(group)
    words = []
    for what, size in (("another unit", 4), ("another size", 4 + rank)):
        shard, full = torch.ones(size), torch.empty(2 * size)
        name, number = (f"gather {what} {rank}", rank) if what == "another unit" else (f"gather {what}", 7)
        started = time.monotonic()
        with pytest.raises(OutOfStep) as error:
            communicator.gather([Gather(full, shard)], Event(name, number)).wait()
        assert time.monotonic() - started < 5
        words.append(str(error.value))
        Lane.of(group).begin("the next gather")
        shard, full = torch.full((3,), float(rank)), torch.empty(6)
        communicator.gather([Gather(full, shard)], Event("gather", 1)).wait()
        assert full.tolist() == [0.0] * 3 + [1.0] * 3
    (unit, size) = words
    assert f"rank {rank} is at 'gather another unit {rank}'" in unit
    assert f"rank {1 - rank} is at 'gather another unit {1 - rank}'" in unit
    assert "(16 bytes)" in size and "(20 bytes)" in size


def raise_value_error(*_: object) -> None:
    raise ValueError("not a number")


@on_ranks(2)
@impatient
def test_ranks_train_correctly_after_a_failure() -> None:
    """Let each rank fail in the forward of a different unit; afterwards the ranks train as if no error had occurred."""
    enable_shared_memory()
    found = []
    for fails in (False, True):
        model = make_model(new_group())
        optimizer = adamw(model.parameters())
        for number in range(4):
            if fails and number in (1, 2):
                unit: Any = model.module[abs(dist.get_rank() - number + 1)]
                hook = unit.module[0].register_forward_hook(raise_value_error)
                with pytest.raises((ValueError, RuntimeError)):
                    step(model)
                hook.remove()
                optimizer.zero_grad()
            step(model, 0.1 * (1 + number))
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_parameters(model))
    assert_bit_equal(found[1], found[0])
    assert held_nbytes_at_rest() <= HEADERS


def die_in_a_forward() -> tuple[str, float]:
    enable_shared_memory()
    started = time.monotonic()
    model = make_model(new_group(20))
    step(model)
    if dist.get_rank() == 1:
        unit: Any = model.module[1]
        unit.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError) as error:
        step(model)
    return str(error.value), time.monotonic() - started


def test_a_dead_rank_is_named_at_once_with_the_unit_that_waits_for_it() -> None:
    words, died = run_fresh(2, die_in_a_forward)
    assert died == Died(-signal.SIGKILL)
    ended = "the process of rank 1 has ended: it failed, or left out this call, which takes all ranks"
    assert "gather unit" in words[0] and ended in words[0], words[0]
    assert words[1] < 10, words[1]  # half of the timeout of collectives


# -- memory --------------------------------------------------------------------------------------------------------


@on_ranks(2)
@impatient
def test_a_full_segment_raises_an_error_and_does_not_crash() -> None:
    enable_shared_memory()
    group = new_group()
    model = make_model(group)
    step(model)
    model.zero_grad()
    expected = full_parameters(model)

    def full_system(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.dict(os.environ, FSDP_DEBUG="1"):  # full buffers are outside of the segment
        debugged = make_model(group)
        step(debugged)
    debugged.zero_grad()
    for tried in (model, debugged):
        held_nbytes_at_rest()  # release the memory of the last step, so that the next step must allocate
        no_room = pytest.raises(OSError, match="bytes that the ranks of this host share")
        with mock.patch.object(os, "posix_fallocate", full_system), no_room as error:
            step(tried)
        assert error.value.errno == errno.ENOSPC
        tried.zero_grad()
        step(tried)
        assert_bit_equal(full_parameters(tried), expected)
    assert held_nbytes_at_rest() <= HEADERS


@on_ranks(2)
def test_memory_has_no_file_name_and_is_released_at_rest() -> None:
    before = set(os.listdir("/dev/shm"))
    enable_shared_memory()
    model = make_model(new_group())
    step(model)
    segment, files = own_segment(), len(os.listdir("/proc/self/fd"))
    state = os.fstat(segment.file)
    assert state.st_nlink == 0 and not os.get_inheritable(segment.file) and set(os.listdir("/dev/shm")) <= before
    with torch.no_grad():
        model(torch.ones(2, 200))
    for _ in range(3):
        model = make_model(new_group())
        step(model)
        del model
    assert held_nbytes_at_rest() <= HEADERS
    assert len(os.listdir("/proc/self/fd")) <= files + 3 * 8  # files of the groups
    for number in range(20):  # a destroyed group leaves only its header, of two pages
        group = dist.new_group()
        full = torch.empty(2)
        communicator = communicator_of(group)
        for again in range(number % 3 * 40):
            communicator.gather([Gather(full, torch.full((1,), float(number)))], Event(f"gather {again}", again)).wait()
            assert full.tolist() == [number, number]
        if number % 5 == 4:
            Sharing.of(group).renew()
        assert Lane.of(group).ask("the same", number, largest=dist.get_rank()).result() == 1
        if number == 4:
            held_nbytes, files = held_nbytes_at_rest(), len(os.listdir("/proc/self/fd"))
        del communicator
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    assert held_nbytes_at_rest() <= held_nbytes + 15 * HEADER and len(os.listdir("/proc/self/fd")) <= files
    pieces = torch.full((2 * 10,), 3.0)
    communicator = communicator_of(new_group())
    storage = segment.allocate(pieces.nbytes)
    address = storage.data_ptr()
    assert segment.lent_at(address) is not None
    out = torch.empty(10)
    communicator.reduce(out, pieces, Event("reduce", 1)).wait()
    del storage  # an unreferenced storage is released automatically
    assert out.tolist() == [3.0] * 10 and held_nbytes_at_rest() <= HEADERS and segment.lent_at(address) is None


@on_ranks(1)
def test_groups_that_threads_use_first_at_the_same_time_have_posts_of_their_own() -> None:
    """Else ranks take the collective of one model for that of another."""
    reserve, segments, headers = os.posix_fallocate, [], []

    def reserve_slowly(*args: Any) -> None:
        time.sleep(0.01)
        reserve(*args)

    def use() -> None:
        segments.append(shared_memory._own_segment())
        headers.append(segments[-1].new_header())

    several = [threading.Thread(target=use) for _ in range(4)]
    with mock.patch.object(os, "posix_fallocate", reserve_slowly):
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()
    assert len(set(headers)) == len(several) and len(set(map(id, segments))) == 1, headers


@on_ranks(2)
def test_a_forked_process_cannot_use_the_segment_or_the_model() -> None:
    enable_shared_memory()
    group = new_group()
    model = make_model(group)
    step(model)
    channel, before = channel_of(group), own_segment().held_nbytes
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):  # the caller would take the child for a rank
            with pytest.raises(RuntimeError, match="forked from a rank"):  # at once, not after the timeout
                step(model)
            alone = shared_memory.segment() is None and not channel.usable and Sharing.of(group).channel is None
            os._exit(0 if alone and threads.in_thread(lambda: 5).result(10) == 5 else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert channel.usable and own_segment().held_nbytes == before
    step(model)


@on_ranks(2)
def test_a_forked_process_has_separate_gradients() -> None:
    """A forked data loader may change accumulated gradients or delete the model."""
    enable_shared_memory()

    def drop() -> None:
        model.zero_grad()

    def delete() -> None:
        del built[:]
        gc.collect()

    def overwrite() -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.zero_()

    for what in (drop, overwrite, delete):
        built = [wrap(nn.Linear(300, 300), use_orig_params=True, process_group=new_group())]
        model: Any = built[0]
        with model.no_sync():
            model(torch.ones(2, 300)).sum().backward()
        before = {name: param.grad.clone() for name, param in model.named_parameters()}
        child = os.fork()
        if child == 0:
            seen = all(torch.equal(param.grad, before[name]) for name, param in model.named_parameters())
            del model
            model = built[0] if what is not delete else None
            what()
            os._exit(0 if seen else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, what
        for name, param in model.named_parameters():
            assert torch.equal(param.grad, before[name]), f"{name}, {what}"
        model(torch.ones(2, 300)).sum().backward()
        assert all(torch.equal(p.grad, torch.full_like(p, 4.0)) for p in model.parameters() if p.numel())


def make_wide_units(count: int) -> tuple[list[nn.Sequential], FullyShardedDataParallel, int]:
    """Return units, the model of them, and the bytes of a unit."""
    units = [nn.Sequential(nn.Linear(300, 300)) for _ in range(count)]
    policy = ModuleWrapPolicy({nn.Sequential})
    return units, wrap(nn.Sequential(*units), wrap_policy=policy, process_group=new_group()), 301 * 300 * 4


@on_ranks(2)
def test_a_fast_rank_waits_for_a_slow_one_before_it_takes_more_memory() -> None:
    enable_shared_memory()
    communicator, numel = communicator_of(new_group()), 1 << 15
    communicator.gather([Gather(torch.empty(2), torch.ones(1))], Event("first", 0)).wait()
    before, under_way = held_nbytes_at_rest(), []
    time.sleep(0.3 * dist.get_rank())
    for number in range(1, 7):
        under_way.append(communicator.reduce(torch.empty(numel), torch.ones(2 * numel), Event("reduce", number)))
        if dist.get_rank() == 1:
            under_way[-1].wait()
    assert held_nbytes() - before <= 2 * 8 * numel
    for pending in under_way:
        pending.wait()


@needs_swaps
@on_ranks(3)
def test_memory_of_a_backward_is_bounded() -> None:
    """Two gathered units, one written gradient, one in reduction; and the accumulators, which users hold."""
    enable_shared_memory()
    units, model, whole = make_wide_units(8)
    found: list[int] = []
    for unit in units:
        unit[0].register_full_backward_hook(lambda *_: found.append(held_nbytes()))
    for _ in range(5):
        model(torch.ones(2, 300, requires_grad=True)).sum().backward()
        model.zero_grad()
    assert len(found) > 30
    assert 3 * whole < max(found) < 5 * whole + HEADERS, (max(found) / whole, whole)
    for dropped in (True, False):
        with model.no_sync():
            model(torch.ones(2, 300, requires_grad=True)).sum().backward()
        accumulated = held_nbytes_at_rest()
        assert 8 * whole <= accumulated < 8 * whole + HEADERS, accumulated / whole
        if dropped:
            model.zero_grad()
            assert held_nbytes_at_rest() < HEADERS
    found.clear()
    model(torch.ones(2, 300, requires_grad=True)).sum().backward()
    assert max(found) < 10 * whole + HEADERS, max(found) / whole  # reduction inputs are not copied
    assert held_nbytes_at_rest() <= HEADERS


@needs_swaps
@on_ranks(2)
def test_memory_kept_for_the_next_step_is_released_when_no_step_follows() -> None:
    """Steps that follow each other hardly allocate or release."""
    enable_shared_memory()
    _, model, whole = make_wide_units(6)

    def step() -> None:
        model(torch.ones(2, 300)).sum().backward()

    step()
    gradients = held_nbytes_at_rest()  # users hold the gradients
    with mock.patch.object(threads, "IDLE", 0.2):
        step()
        deadline = time.monotonic() + 60
        while held_nbytes() > gradients and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held_nbytes() == gradients, "nothing is given back by itself"
    with mock.patch.object(threads, "IDLE", 5.0):
        for _ in range(3):  # a rank that is ahead may need more than a slower one
            step()
        assert whole < held_nbytes() - gradients < 5 * whole + HEADERS
        dist.barrier()
        with mock.patch.object(Segment, "_give_back", autospec=True) as give_back:
            step()
        assert len(give_back.call_args_list) <= 2, "memory comes and goes"
    assert held_nbytes_at_rest() == gradients


@on_ranks(2)
def test_garbage_collection_of_a_model_during_a_wait_does_not_deadlock() -> None:
    enable_shared_memory()
    group, piece, calls = new_group(), Mapping.piece, list[int]()
    model = make_model(group)
    model.itself = [model]  # only the garbage collector can free the cycle
    step(model)

    def interrupted(self: Mapping, *where: Any) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 1 and dist.get_rank() == 0:
            gc.collect()
            assert reference() is None
        elif len(calls) == 1:
            time.sleep(0.5)  # rank 0 has posted, and this rank has not read
        return piece(self, *where)

    full = torch.empty(2 * 1000)
    communicator, reference = communicator_of(group), weakref.ref(model)
    gc.disable()
    del model
    pending = communicator.gather([Gather(full, torch.full((1000,), 1.0 + dist.get_rank()))], Event("gather", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mapping, "piece", interrupted)
        pending.wait()
    assert calls == [0], "it was read in the middle of being read"
    assert full.tolist() == [1.0] * 1000 + [2.0] * 1000


@on_ranks(2)
def test_a_rank_interrupted_during_the_decision_uses_the_transport_of_its_peers() -> None:
    enable_shared_memory()
    group, rank, tell = new_group(10), dist.get_rank(), Board.exchange
    if rank == 1:
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupted(board: Board, key: str, value: Any, look: Any) -> dict[int, Any]:
            values = tell(board, key, value, look)
            if key.startswith("opened"):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return values

        with mock.patch.object(Board, "exchange", interrupted), pytest.raises(KeyboardInterrupt):
            Sharing.of(group).connect()
            time.sleep(1)  # the interrupt arrives late here
        signal.signal(signal.SIGINT, usual)
    full = torch.empty(4)
    communicator = communicator_of(group)
    communicator.gather([Gather(full, torch.full((2,), float(rank)))], Event("gather", 1)).wait()
    assert full.tolist() == [0.0, 0.0, 1.0, 1.0] and channel_of(group).collectives.number == 1


# -- when it is used -----------------------------------------------------------------------------------------------


def refusals() -> dict[str, tuple[str, list[Any]]]:
    """Return, by what prevents shared memory, the words of the error and the patches that simulate it."""
    denied = PermissionError(errno.EACCES, "Permission denied")
    no_file = mock.patch.object(os, "memfd_create", side_effect=PermissionError(errno.EPERM, "Operation not permitted"))
    anew = mock.patch.object(shared_memory, "_segments", [])
    return {
        "the host": (
            "its ranks are on different hosts, or in different containers",
            [mock.patch.object(shared_memory, "machine", lambda: "another")],
        ),
        "the mapping": (
            "rank 1 cannot open the memory of another one: .*Permission denied",
            [mock.patch.object(shared_memory, "_peer", side_effect=denied)],
        ),
        "the system": ("rank 1 has none: only Linux on x86-64", [mock.patch.object(shared_memory, "SUPPORTED", False)]),
        "the file": ("rank 1 has none: .*Operation not permitted", [no_file, anew]),
    }


@on_ranks(2)
def test_shared_memory_is_used_only_if_all_ranks_support_it() -> None:
    """Shared memory requires one host, no debug checks of torch and no recorder of collectives, on all ranks.

    A request by name reports the reason of a refusal.
    """
    rank = dist.get_rank()
    for what, (why, patches) in refusals().items():  # the refusal is on one rank alone
        for way in (None, "shared"):
            os.environ.pop("FSDP_COLLECTIVES", None)
            if way is not None:
                os.environ["FSDP_COLLECTIVES"] = way
            model = make_model(new_group())
            apart = what == "the host"  # then no rank reads the statements of all peers: there may be thousands
            untold = mock.patch.object(shared_memory, "_own_row", side_effect=AssertionError)
            with untold if apart else contextlib.nullcontext(), contextlib.ExitStack() as refused:
                for patch in patches if rank == 1 else ():
                    refused.enter_context(patch)
                if way is None:
                    step(model)
                else:
                    for _ in range(2):
                        with pytest.raises(RuntimeError, match=f"^FSDP_COLLECTIVES=shared asks .* none: {why}.*auto"):
                            step(model)
            assert not any(unit.shares_memory for unit in shard_info(model)), what
    del os.environ["FSDP_COLLECTIVES"]
    group = new_group()
    model = make_model(group)
    assert not any(unit.shares_memory for unit in shard_info(model)), "known before the first collective"
    for recorded in ([], [0, 1], [1], [], [0], [0, 1], []):
        posts = channel_of(group).collectives.number if Sharing.of(group).channel is not None else 0
        with record_collectives() if rank in recorded else contextlib.nullcontext() as log:
            step(model)
            assert model.clip_grad_norm_(1.0).isfinite()  # these collectives use the group, not shared memory
        moved = channel_of(group).collectives.number - posts
        if recorded == [0, 1]:
            assert moved == 0 and log.count("all_gather") > 3 and log.count("reduce_scatter") == 4
        else:
            assert moved > 7, recorded
    assert all(unit.shares_memory for unit in shard_info(model))
    assert isinstance(pool_for(CPU, streams_for(CPU), group), SharedPool) is STORAGES_SWAP
    with_streams = mock.Mock(asynchronous_work=False)  # events of streams are not supported in a block of the segment
    assert not isinstance(pool_for(CPU, with_streams, group), SharedPool)
    with mock.patch.dict(os.environ, FSDP_COLLECTIVES="direct"):
        assert not isinstance(pool_for(CPU, streams_for(CPU), group), SharedPool)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    checked = make_model(new_group())
    step(checked)
    assert not any(unit.shares_memory for unit in shard_info(checked))
    os.environ["FSDP_COLLECTIVES"] = "shared"
    with pytest.raises(RuntimeError, match="share none: torch's debug level DETAIL"):
        step(make_model(new_group()))
