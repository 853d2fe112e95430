"""Situations that ``gpu_check.py`` runs beside its parity checks: each returns a line to print, or raises.

Every rank runs them, each on one device. ``fitting`` leaves out the situations that need an accelerator, more ranks or
more devices than there are.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    RaggedStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    full_params,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import async_save
from fsdp.comm import streams as streams_module
from fsdp.comm.versions import STORAGES_SWAP
from fsdp.optim import HostOptimizer
from fsdp.wrap import ModuleWrapPolicy

WIDTH = 1024
LONG = 1_000_000_000  # device cycles: about half a second


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.skipped = False
        self.fails = ""  # in "forward" or in "backward"

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise ArithmeticError("on purpose")
        y = torch.relu(self.inner(x))
        if self.fails == "backward":
            y.register_hook(fail)
        return x if self.skipped else x + self.outer(y)


def fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("on purpose")


def tower(device: torch.device, *, wrapped: bool = True, width: int = WIDTH, **options: object) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(*(Block(width) for _ in range(4))).to(device)
    if not wrapped:
        return model
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options)


def train(model: nn.Module, device: torch.device, steps: int, width: int = WIDTH) -> Tensor:
    """Train, and return the last loss. Every rank has the same batch, so a plain model has the same gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x = torch.randn(8, width, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def expect_error(model: nn.Module, device: torch.device, words: str) -> str:
    """Train on, and expect an error with ``words`` within 20 seconds."""
    started = time.monotonic()
    try:
        for _ in range(4):
            train(model, device, 1, 64).item()
    except RuntimeError as error:
        took = time.monotonic() - started
        expect(words in str(error), f"the error does not say {words!r}: {error}")
        expect(took < 20, f"it took {took:.0f} s to say: {error}")
        return f"said after {took:.1f} s"
    raise AssertionError(f"no rank got an error that says {words!r}")


# -- without an accelerator, too ---------------------------------------------------------------------------------------


def skipping(device: torch.device) -> str:
    """Leave a unit out on one rank: every rank gets an error within seconds. The group is out of sync afterwards."""
    model = tower(device, width=64)
    train(model, device, 3, 64)
    if dist.get_rank() == dist.get_world_size() - 1:
        next(module for module in model.modules() if isinstance(module, Block)).skipped = True
    return expect_error(model, device, "unit '")


def means(device: torch.device) -> str:
    """Compare bf16 means of gradients at numbers of ranks whose inverse is no bf16 number."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = FSDP(nn.Linear(1, 6000, bias=False), device_id=device, mixed_precision=precision, use_orig_params=True)
    values = torch.linspace(1, 8, 6000, device=device).to(torch.bfloat16)
    (model(torch.ones(1, 1, device=device)) * values).sum().backward()
    (grad,) = (param.grad for param in model.parameters())
    start = -(-6000 // dist.get_world_size()) * dist.get_rank()
    own = values[start : start + grad.numel()].float()
    bias = (grad.flatten().float() / own).mean().item() - 1
    expect(abs(bias) < 5e-4, f"means are off by {bias:+.2%} on average")
    return f"off by {bias:+.3%} on average"


def kept_leaves(device: torch.device) -> str:
    """Read a parameter that was kept from inside a forward: an error or NaN, and no crash.

    Torch before 2.12 cannot guard released memory: there the read ends the process, as with torch's FSDP.
    """
    if not STORAGES_SWAP:
        return "not guarded by this version of torch"
    model, kept = tower(device, width=64), []
    handle = model.module[0].module.inner.register_forward_pre_hook(lambda module, _: kept.append(module.weight))
    train(model, device, 1, 64)
    handle.remove()
    remark = "NaN"
    try:
        value = kept[0].sum().item()
        expect(value != value, f"a sharded parameter was read, and gave {value}")
    except RuntimeError as error:
        words = ("kept from inside a forward", "memory that is not there")  # of the engine, and of a device itself
        expect(any(each in str(error) for each in words), f"the error does not say why: {error}")
        remark = "an error in words"
    train(model, device, 1, 64)
    return remark


def profiler(device: torch.device) -> str:
    """Profile with shapes and memory: released memory does not disturb the profiler."""
    model = tower(device, width=64)
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        train(model, device, 2, 64)
    return f"{len(profile.events())} events"


def killed(device: torch.device) -> str:
    """Kill the last rank in the middle of training: the remaining ranks get an error within seconds."""
    model = tower(device, width=64)
    train(model, device, 3, 64)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return expect_error(model, device, "has ended")


def no_interface(device: torch.device) -> str:
    """Train where gloo finds no network interface: it works, or an error within 10 s names the variable."""
    started = time.monotonic()
    os.environ["GLOO_SOCKET_IFNAME"] = "nonsense"
    try:
        train(tower(device, width=64), device, 3, 64).item()
    except RuntimeError as error:
        took = time.monotonic() - started
        expect("GLOO_SOCKET_IFNAME" in str(error), f"the error does not name the variable: {error}")
        expect(took < 10, f"it took {took:.0f} s to say: {error}")
        return f"an error in words after {took:.1f} s"
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    return "trains without gloo"


# -- on an accelerator -------------------------------------------------------------------------------------------------


def other_streams(device: torch.device) -> str:
    """Wrap on one stream, train on another behind a long queue, then on a third."""
    plain = tower(device, wrapped=False)
    wrapping, training, third = (torch.cuda.Stream(device) for _ in range(3))
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of accumulators on another stream
        with torch.cuda.stream(wrapping):
            model = tower(device)
        for before, stream in ((wrapping, training), (training, third)):
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
                loss = train(model, device, 4)
    torch.cuda.current_stream(device).wait_stream(third)
    expected = [train(plain, device, 4) for _ in range(2)][-1]
    difference = (loss - expected).abs().item() / expected.abs().item()
    expect(difference < 1e-4, f"the losses differ by {difference:.1e}")
    return f"the losses differ by {difference:.0e}"


def offload(device: torch.device) -> str:
    """Overwrite host memory at once: the device reads the old values, though the copy was queued late."""
    model: Any = tower(device, cpu_offload=CPUOffload(offload_params=True))
    x = torch.ones(2, WIDTH, device=device)
    real = streams_module.AcceleratorStreams.upload

    def late(self: streams_module.AcceleratorStreams, tensor: Tensor) -> Tensor:
        torch.cuda._sleep(LONG // 20)
        return real(self, tensor)

    def spoil() -> list[Tensor]:
        before = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            param.data.fill_(torch.nan)
        return before

    def summoned() -> Tensor:
        with FSDP.summon_full_params(model, writeback=False):
            return sum(param.sum() for param in model.parameters())

    def by_hand() -> Tensor:
        for block in model.module:
            block._unshard(async_op=True).wait()
        return model(x).sum()

    def gradients() -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return sum(param.grad.sum() for param in model.parameters() if param.grad is not None)

    reads: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: model(x).sum(),
        "evaluation": torch.no_grad()(lambda: model(x).sum()),
        "backward": gradients,
        "summon": summoned,
        "full parameters": lambda: sum(param.sum() for _, param in full_params(model)),
        "state dict": lambda: sum(value.sum() for value in model.state_dict().values()),
        "gather by hand": by_hand,
    }
    streams_module.AcceleratorStreams.upload = late  # type: ignore[method-assign]
    try:
        for name, read in reads.items():
            expected = read()
            torch.cuda.synchronize(device)
            result = read()
            before = spoil()
            torch.cuda.synchronize(device)
            same = torch.allclose(result, expected, rtol=1e-3)
            expect(same, f"{name}: the device read what was written to the host afterwards")
            for param, values in zip(model.parameters(), before, strict=True):
                param.data.copy_(values)
    finally:
        streams_module.AcceleratorStreams.upload = real  # type: ignore[method-assign]
    return ", ".join(reads)


def host_optimizer(device: torch.device) -> str:
    """Step offloaded parameters on a thread, behind a long queue of the device: with the norms of the last backward
    after it, or early, without norms, during the backward."""

    def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)

    last = []
    for early in (False, True):
        plain, model = (tower(device, cpu_offload=CPUOffload(offload_params=True)) for _ in range(2))
        losses: list[list[Tensor]] = [[], []]
        pairs = ((plain, adamw([*plain.parameters()])), (model, HostOptimizer(model, adamw, early=early)))
        for (each, optimizer), found in zip(pairs, losses, strict=True):
            for _ in range(5):
                torch.cuda._sleep(LONG // 10)
                loss = each(torch.ones(8, WIDTH, device=device)).square().mean()
                loss.backward()
                if not early:
                    each.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        expect(all(map(torch.equal, *losses)), f"losses of {losses[0]} with plain steps, and {losses[1]} on a thread")
        last.append(losses[0][-1].item())
    return f"the losses are equal, at last {last[0]:.3f} and {last[1]:.3f}"


def backward_on_another_stream(device: torch.device) -> str:
    """Run the forward on one stream behind a long queue, and ``backward()`` on another one."""
    plain, model = tower(device, wrapped=False), tower(device)
    forwards, backwards = torch.cuda.Stream(device), torch.cuda.Stream(device)
    forwards.wait_stream(torch.cuda.current_stream(device))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (plain, model)]
    losses: list[list[Tensor]] = [[], []]
    for each, optimizer, found in zip((plain, model), optimizers, losses, strict=True):
        for _ in range(4):
            with torch.cuda.stream(forwards):
                torch.cuda._sleep(LONG // 10)
                optimizer.zero_grad()
                loss = each(torch.ones(8, WIDTH, device=device)).square().mean()
            backwards.wait_stream(forwards)
            with torch.cuda.stream(backwards):
                loss.backward()
                optimizer.step()
            forwards.wait_stream(backwards)
            found.append(loss.detach())
    torch.cuda.current_stream(device).wait_stream(forwards)
    difference = max(((a - b).abs() / a.abs()).item() for a, b in zip(*losses, strict=True))
    expect(difference < 1e-4, f"the losses differ by {difference:.1e}")
    return f"the losses differ by {difference:.0e}"


def failing_backwards(device: torch.device) -> str:
    """Raise in 50 backwards while threads are switched often; training continues as if none had happened."""
    plain, model, x = tower(device, wrapped=False, width=64), tower(device, width=64), torch.ones(8, 64, device=device)
    block = next(module for module in model.modules() if isinstance(module, Block))
    train(plain, device, 2, 64)
    train(model, device, 2, 64)
    sizes = [param.numel() for param in model.parameters()]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for failure in range(50):
            block.fails = "backward"
            torch.cuda._sleep(failure % 3 * LONG // 100)
            try:
                model(x).square().mean().backward()
            except ArithmeticError:
                pass
            else:
                raise AssertionError("the backward did not fail")
            block.fails = ""
            for _ in range(2):
                expect([param.numel() for param in model.parameters()] == sizes, "parameters are whole after a failure")
            if failure % 2:
                with torch.no_grad():
                    model(x)
    finally:
        sys.setswitchinterval(interval)
    expected, loss = train(plain, device, 5, 64), train(model, device, 5, 64)
    difference = ((loss - expected).abs() / expected.abs()).item()
    expect(difference < 1e-4, f"the losses differ by {difference:.1e}")
    return f"50 failures, after which the losses differ by {difference:.0e}"


def failed_and_deleted(device: torch.device) -> str:
    """Delete an offloaded model right after a failed pass: the pages stay until the device has read them."""
    keep = tower(device, width=64)
    for fails in ("forward", "forward", "forward", "backward"):
        model = tower(device, cpu_offload=CPUOffload(offload_params=True))
        list(model.module)[2].module.fails = fails
        with streams_module.streams_for(device).on_gather_stream():
            torch.cuda._sleep(LONG // 4)
        with contextlib.suppress(ArithmeticError):
            model(torch.ones(2, WIDTH, device=device)).sum().backward()
        del model
        gc.collect()
        train(keep, device, 1, 64)
    torch.cuda.synchronize(device)
    return "nothing was read after it was gone"


def forked(device: torch.device) -> str:
    """Fork, as workers of a DataLoader do, and write offloaded shards: the device reads the new values."""
    results = []
    for forks in (False, True):
        model = tower(device, width=64, cpu_offload=CPUOffload(offload_params=True))
        train(model, device, 2, 64)
        child = os.fork() if forks else 0
        if forks and child == 0:
            time.sleep(10)
            os._exit(0)
        results.append(train(model, device, 3, 64))
        if forks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    expect(torch.equal(*results), f"losses of {results[0].item()} without a fork, and {results[1].item()} with one")
    return "the losses are equal"


FORMS = (
    (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
    (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)),
    (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()),
    (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)),
    (StateDictType.SHARDED_STATE_DICT, RaggedStateDictConfig()),
    (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
)


def forms_of_state(device: torch.device) -> str:
    """Move state dicts of each kind to another model, with shards on the device and on the host."""
    count = 0
    for form, uop, offloaded in itertools.product(FORMS, (False, True), (False, True)):
        offload = CPUOffload(offload_params=offloaded)
        model, other = (tower(device, width=64, use_orig_params=uop, cpu_offload=offload) for _ in range(2))
        train(model, device, 1, 64)
        with FSDP.state_dict_type(model, *form), FSDP.state_dict_type(other, *form):
            other.load_state_dict(model.state_dict())
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        expect(same, f"{form}, use_orig_params={uop}, offloaded={offloaded}: other values than were saved")
        count += 1
    return f"{count} kinds of state dicts"


def contexts() -> list[int]:
    """Return the devices on which this process has a context."""
    driver = ctypes.CDLL("libcuda.so.1")
    flags, active = ctypes.c_uint(), ctypes.c_int()
    found = []
    for index in range(torch.cuda.device_count()):
        driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
        found += [index] * bool(active.value)
    return found


def pinned_bytes() -> int:
    """Return the bytes held by torch's allocator of page-locked memory, whose blocks are powers of two and stay."""
    stats = torch.cuda.memory.host_memory_stats() if hasattr(torch.cuda.memory, "host_memory_stats") else {}
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))


def background_save(device: torch.device) -> str:
    """Save in the background: opens no context, and does not wait for queued kernels."""
    model = tower(device)
    train(model, device, 2)
    root = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(root, src=0, device=device)
    before = contexts()
    saved = async_save(Path(root[0]), model)
    torch.cuda._sleep(4 * LONG)
    queued = torch.cuda.Event()
    queued.record()
    saved.result()
    early = not queued.query()
    after = contexts()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root[0])
    expect(after == before, f"contexts on devices {before} before, {after} after")
    expect(early, "the save ended only after what the device had queued later")
    return f"contexts on {after}, {pinned_bytes():,} page-locked bytes in torch's allocator"


def allocator(device: torch.device) -> str:
    """Count retries (none) and reserved memory, which does not grow after the second step."""
    model, reserved = tower(device), []
    for _ in range(12):
        train(model, device, 1)
        reserved.append(torch.cuda.memory_reserved(device))
    stats = torch.cuda.memory_stats(device)
    expect(stats["num_alloc_retries"] == 0, f"{stats['num_alloc_retries']} allocations were retried")
    expect(len(set(reserved[2:])) == 1, f"reserved bytes from step to step: {reserved}")
    peak = torch.cuda.max_memory_allocated(device)
    return f"{reserved[-1]:,} bytes reserved, {peak:,} allocated at the peak, {pinned_bytes():,} page-locked"


def sanitized(device: torch.device) -> str:
    """Train under torch's own detector of races between streams."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    train(tower(device, width=64), device, 3, 64)
    torch.cuda.synchronize(device)
    return "no race found"


def other_device(device: torch.device) -> str:
    """Train while another device than the model's is the current one."""
    expected = train(tower(device, wrapped=False), device, 3)
    other = (device.index + 1) % torch.cuda.device_count()
    for offloaded in (False, True):
        with torch.cuda.device(other):
            model: Any = tower(device, cpu_offload=CPUOffload(offload_params=offloaded))
            loss = train(model, device, 3)
            model.clip_grad_norm_(1.0)
            expect(torch.cuda.current_device() == other, "another device is the current one afterwards")
        difference = (loss - expected).abs().item() / expected.abs().item()
        expect(difference < 1e-4, f"the losses differ by {difference:.1e}, offloaded={offloaded}")
    return f"the losses differ by {difference:.0e}"


def capture(device: torch.device) -> str:
    """Capture a forward and backward in a graph, or get a clear error; training continues in either case."""
    model, x = tower(device, width=64), torch.ones(2, 64, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.current_stream(device).wait_stream(side)
    model.zero_grad()
    remarks = set()
    for _ in range(50):  # eager steps before: a thread still polls their collectives when the capture begins
        graph, remark = torch.cuda.CUDAGraph(), "captured"
        try:
            with torch.cuda.graph(graph, stream=side):
                model(x).sum().backward()
            graph.replay()
        except RuntimeError as error:
            remark = f"refused: {str(error).splitlines()[0]}"
        torch.cuda.synchronize(device)
        remarks.add(remark)
        with contextlib.suppress(RuntimeError):
            model.zero_grad()
        train(model, device, 3, 64).item()
    expect(len(remarks) == 1, f"of 50 captures some end one way, and some another: {remarks}")
    return remarks.pop()


class Situation(NamedTuple):
    run: Callable[[torch.device], str]
    on: str = "accelerator"  # or "any" device, "nccl" for groups whose collectives it serves
    ranks: int = 1  # at least
    devices: int = 1  # at least
    alone: bool = False  # needs a device per rank
    kills: bool = False  # the last rank


TOGETHER = (
    Situation(means, "any"),
    Situation(kept_leaves, "any"),
    Situation(profiler, "any"),
    Situation(other_streams),
    Situation(backward_on_another_stream),
    Situation(failing_backwards),
    Situation(offload),
    Situation(host_optimizer),
    Situation(failed_and_deleted),
    Situation(forked),
    Situation(forms_of_state),
    Situation(background_save, "nccl", alone=True),
    Situation(allocator, "nccl"),  # gloo allocates memory of its own
    Situation(other_device, devices=2),
)
ALONE = (  # situations after which the process or the group cannot be used
    Situation(skipping, "any", ranks=2),
    Situation(killed, "any", ranks=2, kills=True),
    Situation(no_interface, "nccl"),
    Situation(capture, "nccl"),
    Situation(sanitized),
)


def fitting(situations: tuple[Situation, ...], device: torch.device, backend: str, ranks: int) -> list[Situation]:
    """Return the situations that can run with so many ranks over ``backend`` on this kind of device."""
    devices = torch.accelerator.device_count() if device.type != "cpu" else 1
    places = {"any", *(["accelerator"] if device.type == "cuda" else []), *(["nccl"] if "nccl" in backend else [])}
    return [
        s for s in situations if s.on in places and ranks >= s.ranks and devices >= (ranks if s.alone else s.devices)
    ]
