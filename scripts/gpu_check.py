"""Check on an accelerator that streams are ordered correctly and that the host never waits.

    python scripts/gpu_check.py

There are three settings: one process that communicates with itself through NCCL (``FSDP_FORCE_SHARDED=1`` makes the
engine gather, reduce and keep separate buffers in a group of one), and two processes that share the device, with NCCL
and with gloo. NCCL accepts them because each claims a host of its own, and sends everything through sockets. With
several devices there are two more, with one process per device: NCCL alone, and NCCL beside gloo. In each setting, for
every sharding strategy, both values of ``use_orig_params``, with and without accumulation under ``no_sync``:

* parity: a model trains beside a plain one on the whole batch, in float64. Losses and parameters agree at every step:
  undelayed, with every block's compute delayed on the device, and with every collective delayed. A missing wait between
  streams then reads too early or overwrites too early.
* memory: the allocator's peak is the same at every step from the second; not with gloo, which allocates by itself.
* features: parity with mixed precision; with shards and gradients offloaded to the host; with clipped gradients; with
  a scaled loss that overflows now and then; with a copy of the model that replaces it half way; and with background
  saves whose source is overwritten at once.
* host (one process with NCCL): a step neither trips the synchronisation debug mode nor waits for work that was queued
  before it.

Then it runs the situations of ``gpu_situations.py``, those that break a process group in separate processes. ``--only``
selects some of them, for example to run them under a tool:

    compute-sanitizer --tool memcheck --target-processes all python scripts/gpu_check.py --only offload means

``scripts/test_device.sh`` runs the checks that need no CUDA on a device in host memory.

Prints one line per check. Exits with 1 if one failed, and with 0 if none did or if there is no accelerator, which it
prints. Without one ``--device cpu`` runs the parity checks, without delays, and the situations that need none.
"""

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_situations import ALONE, TOGETHER, Situation, expect, fitting, means
from torch import Tensor, nn

from fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import async_save, load
from fsdp.sharded_grad_scaler import ShardedGradScaler
from fsdp.wrap import ModuleWrapPolicy

WIDTH, HIDDEN, BLOCKS = 257, 515, 4  # a block is 3 MB; no size divides by two
ROWS = 32  # per rank and pass
MEMORY_STEPS = 8
BOUND = 1e-9  # float64: only the order of additions may differ
MIXED_BOUND = 1e-5  # parameters and gradients are float32, the arithmetic is float64
FEATURES = ("mixed precision", "offload", "clipping", "scaling", "copying", "saving")
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
PASSES = {"one pass": (True,), "no_sync": (False, False, True)}  # which passes of a step are synchronised
BRIEF_SLEEP, LONG_SLEEP = 2_000_000, 2_000_000_000  # device cycles: about a millisecond, about a second

compute_delay = 0  # device cycles by which each block delays its forward and its backward


class Delay(torch.autograd.Function):
    """An identity that keeps the device busy for ``compute_delay`` cycles in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(compute_delay)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        sleep(compute_delay)
        return grad


def sleep(cycles: int) -> None:
    if cycles:
        torch.cuda._sleep(cycles)


class Block(nn.Module):
    """A frozen layer that is used first, and so read last in backward, with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 7), nn.Linear(7, HIDDEN)
        self.out = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(Delay.apply(x))
        return x + self.out(F.gelu(self.base(y) + self.up(self.down(y))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


class Recorder:
    """Copies of every parameter at the moment its module computes with it, made while ``on``."""

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        self.seen: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            names = [name for name, _ in module.named_parameters(recurse=False)]
            if names:
                module.register_forward_pre_hook(lambda m, _, path=path, names=names: self._record(m, path, names))

    def _record(self, module: nn.Module, path: str, names: list[str]) -> None:
        if self.on:
            self.seen |= {f"{path}.{name}": getattr(module, name).detach().clone() for name in names}


class Training:
    """One model and its optimizer on this rank's rows, or with ``plain`` on all ranks' rows without sharding."""

    def __init__(
        self, device: torch.device, passes: tuple[bool, ...], *, plain: bool = False, feature: str = "", **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.device, self.passes, self.plain, self.feature = device, passes, plain, feature
        self.mixed = feature == "mixed precision"
        self.model: nn.Module = Model().to(device, torch.float32 if self.mixed else torch.float64)
        self.recorder = Recorder(self.model)
        self.scaler = ShardedGradScaler(device=device.type, init_scale=4.0, enabled=feature == "scaling" and not plain)
        if self.mixed:
            options["mixed_precision"] = MixedPrecision(param_dtype=torch.float64)
        if feature == "offload":
            options["cpu_offload"] = CPUOffload(offload_params=True)
        if not plain:
            self.model = FSDP(self.model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps = 0

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return this step's inputs and targets on the device, one pair per pass."""
        generator = torch.Generator().manual_seed(1000 + self.steps)
        self.steps += 1
        rank, world_size = dist.get_rank(), dist.get_world_size()
        rows = slice(None) if self.plain else slice(rank * ROWS, (rank + 1) * ROWS)
        pairs = []
        for _ in self.passes:
            x, y = (torch.randn(world_size * ROWS, n, generator=generator, dtype=torch.float64) for n in (11, 3))
            pairs.append((x[rows].to(self.device), y[rows].to(self.device)))
        return pairs

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Train on ``batches``; return the loss, on the device."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for (x, y), synchronised in zip(batches, self.passes, strict=True):
            with nullcontext() if synchronised or self.plain else self.model.no_sync():
                loss = F.mse_loss(self.forward(x), y) / len(batches)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.feature == "clipping":
            if self.plain:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            else:
                self.model.clip_grad_norm_(0.1)
        if self.feature == "scaling" and self.steps % 4 == 0:  # this step is skipped
            for param in self.model.parameters():
                if param.grad is not None and param.grad.numel():
                    param.grad.fill_(torch.inf)
        if not self.plain:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.feature != "scaling" or self.steps % 4:
            self.optimizer.step()
        if self.feature == "copying" and not self.plain and self.steps == 4:
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))  # both models call the recorder
        if self.feature == "saving" and not self.plain and self.steps % 4 == 0:
            self.save_spoil_and_load()
        return total

    def save_spoil_and_load(self) -> None:
        checkpoints = Path(tempfile.gettempdir(), f"gpu_check_{os.getppid()}")  # the parent of all ranks
        saved = async_save(checkpoints, self.model, self.optimizer)
        with torch.no_grad():
            for value in [*self.model.parameters(), *(v for of in self.optimizer.state.values() for v in of.values())]:
                value.mul_(3.0)
        saved.result()
        load(checkpoints, self.model, self.optimizer)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(checkpoints)
        dist.barrier()

    def forward(self, x: Tensor) -> Tensor:
        if not (self.plain and self.mixed):
            return self.model(x)
        wide = {name: param.double() for name, param in self.model.named_parameters()}
        return torch.func.functional_call(self.model, wide, (x,))


@contextmanager
def delayed(what: str) -> Iterator[None]:
    """Delay, on the device, every block (``compute``), every collective (``collectives``), or no operation."""
    global compute_delay
    names = COLLECTIVES if what == "collectives" else ()
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            sleep(BRIEF_SLEEP)
            return call(*args, **kwargs)

        return wrapper

    compute_delay = BRIEF_SLEEP if what == "compute" else 0
    for name, call in originals.items():
        setattr(dist, name, slow(call))
    try:
        yield
    finally:
        compute_delay = 0
        for name, call in originals.items():
            setattr(dist, name, call)


# -- the checks: each returns what to print, or raises -----------------------------------------------------------------


def check_parity(device: torch.device, passes: tuple[bool, ...], steps: int, options: dict[str, Any]) -> str:
    largest = 0.0
    for what in ("nothing", "compute", "collectives") if device.type == "cuda" else ("nothing",):
        feature = options.get("feature", "")
        bound = MIXED_BOUND if feature == "mixed precision" else BOUND
        sharded, plain = Training(device, passes, **options), Training(device, passes, plain=True, feature=feature)
        for step in range(steps + 1):
            batches, whole = sharded.batches(), plain.batches()
            before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
            sharded.recorder.on = True
            with delayed(what):
                if step < steps:
                    loss = sharded.step(batches)
                else:  # one more forward shows the parameters after the last step
                    with torch.no_grad():
                        loss = F.mse_loss(sharded.forward(batches[0][0]), batches[0][1])
            seen = sharded.recorder.seen
            expect(seen.keys() == before.keys(), f"forward used {sorted(seen)}, expected {sorted(before)}")
            differences = {name: (seen[name] - before[name]).abs().max().item() for name in before}
            worst = max(differences, key=lambda name: differences[name])
            where = f"at step {step} with {what} delayed"
            expect(differences[worst] <= bound, f"{worst} differs by {differences[worst]:.1e} {where}")
            largest = max(largest, differences[worst])
            if step < steps:
                dist.all_reduce(loss)
                difference = (loss / dist.get_world_size() - plain.step(whole)).abs().item()
                expect(difference <= bound, f"the loss differs by {difference:.1e} {where}")
    return f"{steps} steps, parameters differ by at most {largest:.0e}"


def check_memory(device: torch.device, passes: tuple[bool, ...], options: dict[str, Any]) -> str:
    gc.collect()  # of earlier checks, which would else happen at some step
    training = Training(device, passes, **options)
    peaks = []
    for _ in range(MEMORY_STEPS):
        batches = training.batches()
        torch.accelerator.reset_peak_memory_stats()
        training.step(batches)
        peaks.append(torch.accelerator.max_memory_allocated())
        del batches
    # a step in which the scaler skips the optimizer needs less
    every = [peak for step, peak in enumerate(peaks, 1) if options.get("feature") != "scaling" or step % 4]
    expect(len(set(every[1:])) == 1, f"peak bytes from step to step: {peaks}")
    return f"peak of {peaks[1]:,} bytes at every step from the second"


def check_host(device: torch.device, passes: tuple[bool, ...], options: dict[str, Any]) -> str:
    training = Training(device, passes, **options)
    for _ in range(3):
        training.step(training.batches())
    batches = [training.batches() for _ in range(2)]
    torch.accelerator.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step(batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sleep(LONG_SLEEP)
    slept = torch.cuda.Event()
    slept.record()
    training.step(batches[1])
    expect(not slept.query(), "the host came back from a step only after the device had done what was queued before it")
    return "the host waits for nothing in a step"


def check_instruments(device: torch.device) -> str:
    """Check that a host that waits is noticed."""
    value = torch.ones((), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    except RuntimeError:
        pass
    else:
        raise AssertionError("reading a value on the host is not reported by the synchronisation debug mode")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sleep(LONG_SLEEP)
    slept = torch.cuda.Event()
    slept.record()
    expect(not slept.query(), "the device does not sleep")
    torch.accelerator.synchronize()
    expect(slept.query(), "an event is not over after the device was waited for")
    return "a host that waits is noticed"


# -- running them ------------------------------------------------------------------------------------------------------


def check(name: str, call: Callable[..., str], *args: Any, words: Any) -> bool:
    """Run one check on every rank, print its line on rank 0, and return whether all ranks passed."""
    problem, remark = None, ""
    try:
        remark = call(*args)
    except Exception as error:  # reported below, and in the exit status
        problem = f"{type(error).__name__}: {error}"
        if not isinstance(error, AssertionError):
            traceback.print_exc()
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=words)
    first = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)
    if dist.get_rank() == 0:
        print(f"{'ok    ' if first is None else 'FAILED'}  {name}: {first or remark}", flush=True)
    return first is None


def check_survivor(title: str, situation: Situation, device: torch.device, passed: Any) -> None:
    """Run a situation that kills the last rank, and print the line of rank 0; the ranks have no group afterwards."""
    try:
        remark, fine = situation.run(device), True
    except Exception as error:  # reported below, and in the exit status
        remark, fine = f"{type(error).__name__}: {error}", False
    if dist.get_rank() == 0:
        print(f"{'ok    ' if fine else 'FAILED'}  {title}, {situation.run.__name__}: {remark}", flush=True)
        passed.put(fine)
    os._exit(0)  # a normal exit would wait for the rank that is gone


@dataclasses.dataclass(frozen=True)
class Setting:
    """``world_size`` processes on ``device`` that communicate through ``backend``; with ``spread`` on one each.

    They run parity checks and situations, or only the situations of ``only``, with ``environment`` set.
    """

    backend: str
    world_size: int
    device: torch.device
    spread: bool = False
    only: tuple[Situation, ...] | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def shares_by_nccl(self) -> bool:
        """Whether several ranks of NCCL are on one device."""
        return self.backend == "nccl" and self.world_size > 1 and not self.spread

    @property
    def title(self) -> str:
        """The first words of the lines that the checks print."""
        where = " on one device" if self.shares_by_nccl else ""
        return f"{self.backend} x {self.world_size}{where}" + "".join(f", {value}" for _, value in self.environment)

    def on(self, rank: int) -> torch.device:
        return torch.device(self.device.type, rank) if self.spread else self.device

    def reduced_to(self, names: list[str]) -> "Setting":
        """Return this setting with the situations of these names only."""
        here = TOGETHER if self.only is None else self.only
        return dataclasses.replace(self, only=tuple(one for one in here if one.run.__name__ in names))


def run_rank(rank: int, setting: Setting, steps: int, place: str, passed: Any) -> None:
    """Run one process of a setting. The ranks rendezvous at the file ``place``; rank 0 puts the verdict into
    ``passed``.
    """
    backend, device = setting.backend, setting.on(rank)
    if setting.shares_by_nccl:
        os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{place}",
        rank=rank,
        world_size=setting.world_size,
        timeout=timedelta(seconds=60),
        device_id=None if backend == "gloo" else device,
    )
    words = dist.new_group(backend="gloo")  # for results: a check may break the other group
    title = setting.title
    situations = fitting(TOGETHER if setting.only is None else setting.only, device, backend, setting.world_size)
    if any(situation.kills for situation in situations):
        check_survivor(title, situations[0], device, passed)
        return
    results = [check(f"{title}, {s.run.__name__.replace('_', ' ')}", s.run, device, words=words) for s in situations]
    if setting.only is None:
        results += run_parity(setting, device, steps, words)
        if device.type == "cpu":  # on CPU they do not break the process
            last = [s for s in fitting(ALONE, device, backend, setting.world_size) if not s.kills]
            results += [check(f"{title}, {s.run.__name__}", s.run, device, words=words) for s in last]
    if rank == 0:
        passed.put(all(results))
    if setting.only is None:  # else it may be broken: the end of the process ends it
        dist.destroy_process_group()


def run_parity(setting: Setting, device: torch.device, steps: int, words: Any) -> list[bool]:
    """Run the checks of parity, memory and the host; return for each whether it passed on all ranks."""
    backend, title = setting.backend, setting.title
    results = []
    alone = backend == "nccl" and setting.world_size == 1
    run_check = functools.partial(check, words=words)

    if alone:
        results.append(run_check(f"{title}, instruments", check_instruments, device))
    for strategy, use_orig_params, accumulation in itertools.product(STRATEGIES, (False, True), PASSES):
        passes = PASSES[accumulation]
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        case = f"{title}, {strategy.name}, use_orig_params={use_orig_params}, {accumulation}"
        results.append(run_check(f"{case}, parity", check_parity, device, passes, steps, options))
        if backend != "gloo":
            results.append(run_check(f"{case}, memory", check_memory, device, passes, options))
        if alone:
            results.append(run_check(f"{case}, host", check_host, device, passes, options))
    for feature, strategy, use_orig_params in itertools.product(FEATURES, STRATEGIES, (False, True)):
        if use_orig_params is not (strategy is ShardingStrategy.FULL_SHARD):
            continue  # one mode per strategy
        if device.type == "cpu" and setting.world_size == 1:
            continue  # two processes show it as well
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "feature": feature}
        case = f"{title}, {feature}, {strategy.name}, use_orig_params={use_orig_params}"
        results.append(run_check(f"{case}, parity", check_parity, device, PASSES["no_sync"], steps, options))
        if backend != "gloo" and feature not in ("copying", "saving"):
            results.append(run_check(f"{case}, memory", check_memory, device, PASSES["no_sync"], options))
        if alone and feature in ("mixed precision", "clipping"):
            results.append(run_check(f"{case}, host", check_host, device, PASSES["no_sync"], options))
    return results


def settings_for(device: torch.device) -> list[Setting]:
    """Return the settings to run on ``device`` and further devices of that kind."""
    backend = dist.get_default_backend_for_device(device)
    settings = [Setting(backend, 1, device), Setting("gloo", 2, device)]
    if device.type == "cpu":
        deadly = [s for s in fitting(ALONE, device, "gloo", 2) if s.kills]
        return [*settings, *(Setting("gloo", 2, device, only=(s,)) for s in deadly), *_means(device, 3)]
    count = torch.accelerator.device_count()
    groups = [(backend, 1, False), ("gloo", 2, False)]
    if backend == "nccl":
        groups.append((backend, 2, False))
        settings.append(Setting(backend, 2, device))
    if count > 1:
        spread = [(backend, count, True), (f"cpu:gloo,{device.type}:{backend}", count, True)]
        settings += [Setting(*_placed(group, device)) for group in spread]
        groups += spread
    for group in groups:
        alone = (Setting(*_placed(group, device), only=(s,)) for s in fitting(ALONE, device, group[0], group[1]))
        settings += alone
    expandable = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    settings.append(Setting(backend, 1, device, only=TOGETHER, environment=expandable))
    return [*settings, *_means(device, 3), *_means(device, 6)]


def _placed(group: tuple[str, int, bool], device: torch.device) -> tuple[str, int, torch.device, bool]:
    backend, world_size, spread = group
    return backend, world_size, device, spread


def _means(device: torch.device, world_size: int) -> list[Setting]:
    """Return the settings of the means: gloo, and NCCL where there is a device for each rank, else on one."""
    only = (Situation(means, "any"),)
    backend = dist.get_default_backend_for_device(device)
    spread = device.type != "cpu" and torch.accelerator.device_count() >= world_size
    settings = [Setting("gloo", world_size, device, only=only)]
    if spread or backend == "nccl":
        settings.append(Setting(backend, world_size, device, spread, only))
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="device to check on (default: the accelerator)")
    parser.add_argument("--steps", type=int, default=12, help="steps of each parity check (default: 12)")
    parser.add_argument("--brief", action="store_true", help="only the two settings that every machine has")
    parser.add_argument("--only", nargs="+", metavar="SITUATION", help="only these situations, in each setting")
    parser.add_argument("--setting", help='only the settings whose title is this, for example "nccl x 1"')
    options = parser.parse_args()
    if options.device is None and not torch.accelerator.is_available():
        print("gpu_check.py: there is no accelerator here, nothing is checked")
        return
    device = torch.device(options.device or torch.accelerator.current_accelerator())
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    passed = torch.multiprocessing.get_context("spawn").SimpleQueue()
    failures = 0
    settings = settings_for(device)[: 2 if options.brief else None]
    if options.setting:
        settings = [setting for setting in settings if setting.title == options.setting]
    if options.only:
        settings = [chosen for setting in settings if (chosen := setting.reduced_to(options.only)).only]
    if not settings:
        parser.error("no setting of this machine has this title and these situations")
    for setting in settings:
        os.environ.update(setting.environment)
        with tempfile.TemporaryDirectory() as directory:
            args = (setting, options.steps, f"{directory}/rendezvous", passed)
            ranks = torch.multiprocessing.spawn(run_rank, args, nprocs=setting.world_size, join=False)
            if any(situation.kills for situation in setting.only or ()):
                for process in ranks.processes:  # a join of all would end the remaining ones with the first
                    process.join()
            else:
                while not ranks.join():
                    pass
        failures += passed.empty() or not passed.get()
        for name, _ in setting.environment:
            del os.environ[name]
    print("gpu_check.py: some checks failed" if failures else "gpu_check.py: all checks passed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
