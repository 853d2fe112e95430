"""Measures checkpoints beside those of torch's FSDP1 and FSDP2, interleaved in one run.

    python scripts/bench_checkpoint.py

starts ``--ranks`` processes. They wrap the same model, after one step of AdamW: with this package and with torch's
FSDP1, both in either mode of ``use_orig_params``, and with torch's FSDP2. The model is a transformer of about 120
million parameters; ``--width`` and further options change it. The contenders take turns, ``--rounds`` times, in

* collecting the full model state and the full optimizer state: on rank 0 alone, offloaded to CPU, and on all ranks;
* loading these states: the model state on all ranks, the optimizer state from rank 0 or on all ranks;
* saving model and optimizer, sharded, to a directory, and loading them from there: into an optimizer with state (here
  also with ``in_place=False``), and into one without, as when a program starts again. This package uses
  ``fsdp.checkpoint.save``: files with a checksum for each block, synced to the disk, published by a rename; ``load``
  verifies all data before any change. torch's contenders use ``torch.distributed.checkpoint.save``, which syncs files
  to the disk, too, and verifies no data in a load;
* starting the same save in the background: for how long the call blocks, beside a bare copy of the same bytes;
* this package's checkpoints in the memory of hosts (``Local``), with a copy on another host, beside those on the disk.

Prints for each row and contender: the median time of the slowest rank, with the fastest and slowest round; the time
relative to this package, round by round (median, smallest and largest); and the peak of memory above that held before,
including results, on rank 0 and on the worst remaining rank. Memory is the resident memory of the process, or on
accelerators the memory allocated on the device.

``--only`` picks rows, ``--directory`` selects the disk.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
import fsdp.checkpoint
import fsdp.wrap

MB = 1e6


class Model(nn.Module):
    """The modules of a language model that have parameters."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        heads = max(width // 64, 1)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(tokens)))


# -- the contenders ----------------------------------------------------------------------------------------------------


class Trained:
    """A wrapped model with its optimizer."""

    model: nn.Module

    def step(self, tokens: Tensor) -> None:
        """Train once, so that there is optimizer state."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.model(tokens).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class FSDP1(Trained):
    """The usual recipes for state of torch's FSDP1, or of a package with the same interface."""

    def __init__(self, model: Model, device: torch.device, package: Any, use_orig_params: bool) -> None:
        self.api, self.cls = package, package.FullyShardedDataParallel
        self.offloads = device.type != "cpu"
        policy = importlib.import_module(f"{package.__name__}.wrap").ModuleWrapPolicy({nn.TransformerEncoderLayer})
        options = {"auto_wrap_policy": policy, "device_id": device, "use_orig_params": use_orig_params}
        self.model = self.cls(model, **options)

    def full(self, everywhere: bool) -> Any:
        # torch's FSDP1 cannot offload to CPU a tensor that is there already: it frees the tensor before reading it
        options = {"offload_to_cpu": not everywhere and self.offloads, "rank0_only": not everywhere}
        configs = self.api.FullStateDictConfig(**options), self.api.FullOptimStateDictConfig(**options)
        return self.cls.state_dict_type(self.model, self.api.StateDictType.FULL_STATE_DICT, *configs)

    def model_state(self, everywhere: bool) -> Any:
        with self.full(everywhere):
            return self.model.state_dict()

    def load_model_state(self, state: Any) -> None:
        with self.full(True):
            self.model.load_state_dict(state)

    def optim_state(self, everywhere: bool) -> Any:
        with self.full(everywhere):
            return self.cls.optim_state_dict(self.model, self.optimizer)

    def load_optim_state(self, state: Any, everywhere: bool) -> None:
        with self.full(everywhere):
            self.optimizer.load_state_dict(self.cls.optim_state_dict_to_load(self.model, self.optimizer, state))

    def sharded(self) -> Any:
        return self.cls.state_dict_type(self.model, self.api.StateDictType.SHARDED_STATE_DICT)

    def sharded_state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.cls.optim_state_dict(self.model, self.optimizer)}

    def save(self, path: Path) -> None:
        with self.sharded():
            dcp.save(self.sharded_state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        with self.sharded():
            state = self.sharded_state()
            dcp.load(state, checkpoint_id=path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(
                self.cls.optim_state_dict_to_load(self.model, self.optimizer, state["optim"])
            )


class Ours(FSDP1):
    def save(self, path: Path) -> None:
        fsdp.checkpoint.save(path, self.model, self.optimizer)

    def begin_save(self, path: Path) -> Any:
        return fsdp.checkpoint.async_save(path, self.model, self.optimizer)

    def copy(self) -> list[Tensor]:
        """Copy this rank's parameters and optimizer state to CPU memory."""
        held = [value for param in self.model.parameters() for value in (param, *self.optimizer.state[param].values())]
        return [value.detach().to("cpu", copy=True) for value in held]

    def load(self, path: Path | fsdp.checkpoint.Local, *, in_place: bool = True) -> None:
        fsdp.checkpoint.load(path, self.model, self.optimizer, in_place=in_place)


class FSDP2(Trained):
    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model.to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            torch.distributed.fsdp.fully_shard(block, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        self.background = dist.new_group(backend="gloo")  # messages of a thread need a group of their own

    @staticmethod
    def full(everywhere: bool) -> dsd.StateDictOptions:
        return dsd.StateDictOptions(full_state_dict=True, cpu_offload=not everywhere)  # offloaded: on rank 0 alone

    def model_state(self, everywhere: bool) -> Any:
        return dsd.get_model_state_dict(self.model, options=self.full(everywhere))

    def load_model_state(self, state: Any) -> None:
        dsd.set_model_state_dict(self.model, state, options=self.full(True))

    def optim_state(self, everywhere: bool) -> Any:
        return dsd.get_optimizer_state_dict(self.model, self.optimizer, options=self.full(everywhere))

    def load_optim_state(self, state: Any, everywhere: bool) -> None:
        options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
        dsd.set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def save(self, path: Path) -> None:
        model, optim = dsd.get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)

    def begin_save(self, path: Path) -> Any:
        model, optim = dsd.get_state_dict(self.model, self.optimizer)
        return dcp.async_save({"model": model, "optim": optim}, checkpoint_id=path, process_group=self.background)

    def load(self, path: Path) -> None:
        model, optim = dsd.get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optim": optim}
        dcp.load(state, checkpoint_id=path)
        dsd.set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


Contender = FSDP1 | FSDP2

# name -> (how it is made, the one whose time is the unit)
CONTENDERS: dict[str, tuple[Callable[[Model, torch.device], Contender], str]] = {
    "fsdp": (lambda model, device: Ours(model, device, fsdp, False), "fsdp"),
    "fsdp, use_orig_params": (lambda model, device: Ours(model, device, fsdp, True), "fsdp, use_orig_params"),
    "torch FSDP1": (lambda model, device: FSDP1(model, device, torch.distributed.fsdp, False), "fsdp"),
    "torch FSDP1, use_orig_params": (
        lambda model, device: FSDP1(model, device, torch.distributed.fsdp, True),
        "fsdp, use_orig_params",
    ),
    "torch FSDP2": (FSDP2, "fsdp"),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """The cost of one action on one rank: wall and processor seconds, and peaks of memory above the start, in bytes."""

    seconds: float
    processor: float
    host: int
    device: int


def resident(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at the peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


class Meter:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)

    def measure(self, action: Callable[[], Any]) -> tuple[Any, Cost]:
        """Return the result and the cost of ``action``; all ranks begin at the same time."""
        gc.collect()
        self.trim(0)  # memory cached by malloc would hide the memory of the action
        held = peak = 0
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            held = torch.accelerator.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        resident_before = resident("VmRSS")
        dist.barrier()
        begin, processor = time.perf_counter(), time.process_time()
        result = action()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated()
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        return result, Cost(seconds, processor, resident("VmHWM") - resident_before, peak - held)


# -- the rows ----------------------------------------------------------------------------------------------------------

# (name, the suffix for the contender's name, action); receives the result of the action
Rows = Generator[tuple[str, str, Callable[[], Any]], Any, None]


def model_state(contender: Contender, directory: Path) -> Rows:
    yield "full model state on rank 0", "", lambda: contender.model_state(False)
    state = yield "full model state on all ranks", "", lambda: contender.model_state(True)
    yield "load full model state of all ranks", "", lambda: contender.load_model_state(state)


def optimizer_state(contender: Contender, directory: Path) -> Rows:
    state = yield "full optimizer state on rank 0", "", lambda: contender.optim_state(False)
    yield "load full optimizer state of rank 0", "", lambda: contender.load_optim_state(state, False)
    state = None
    state = yield "full optimizer state on all ranks", "", lambda: contender.optim_state(True)
    yield "load full optimizer state of all ranks", "", lambda: contender.load_optim_state(state, True)


def sharded(contender: Contender, directory: Path) -> Rows:
    yield "sharded save", "", lambda: contender.save(directory)
    yield "sharded load", "", lambda: contender.load(directory)
    if isinstance(contender, Ours):
        yield "sharded load", ", in_place=False", lambda: contender.load(directory, in_place=False)
    if isinstance(contender, (Ours, FSDP2)):  # with FSDP1 the states to load into have to be there
        contender.optimizer.state.clear()
        yield "sharded load, new optimizer", "", lambda: contender.load(directory)


def background(contender: Contender, directory: Path) -> Rows:
    if not isinstance(contender, (Ours, FSDP2)):
        return  # torch's background saves refuse the ShardedTensor of FSDP1
    row = "sharded save in the background, blocked"
    if isinstance(contender, Ours):
        yield row, ", bare copy", contender.copy
    saved = yield row, "", lambda: contender.begin_save(directory)
    saved.result()


def hosts(contender: Contender, directory: Path) -> Rows:
    """Save to the memory of hosts, as `sharded` and `background` do to the disk; every rank is a host."""
    if not isinstance(contender, Ours):
        return
    memory = Path("/dev/shm") / f"{directory.parent.name}-{dist.get_rank()}"
    local = fsdp.checkpoint.Local(memory)
    with mock.patch.dict(os.environ, FSDP_HOST=memory.name):
        yield "sharded save", ", in memory with a copy", lambda: local.save(contender.model, contender.optimizer)
        row = "sharded save in the background, blocked"
        saved = yield row, ", in memory with a copy", lambda: local.async_save(contender.model, contender.optimizer)
        saved.result()
        yield "sharded load", ", from memory", lambda: contender.load(local)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(memory)
        dist.barrier()
        yield "sharded load", ", from the copy of a lost host", lambda: contender.load(local)
        shutil.rmtree(memory)


SCENARIOS = {
    "model": model_state,
    "optimizer": optimizer_state,
    "sharded": sharded,
    "background": background,
    "hosts": hosts,
}


class Results:
    """The costs of every row: by label, by round, by rank. A label is a contender's name, perhaps with an addition."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, list[list[Cost]]]] = {}
        self._units: dict[str, str] = {}

    def add(self, row: str, label: str, unit: str, cost: Cost) -> None:
        """The measurements of one round; ``unit`` is the label of the reference. All ranks have to call."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, cost)
        self._units[label] = unit
        self._rows.setdefault(row, {}).setdefault(label, []).append(everyone)

    def show(self, device: torch.device) -> None:
        for row, labels in self._rows.items():
            print(f"\n{row}")
            wall = {
                label: [max(cost.seconds for cost in ranks) for ranks in rounds] for label, rounds in labels.items()
            }
            used = {
                label: [sum(cost.processor for cost in ranks) / len(ranks) for ranks in rounds]
                for label, rounds in labels.items()
            }
            for label, rounds in labels.items():
                unit = self._units[label] if self._units[label] in labels else label
                line = f"  {label:33}"
                for times, kind in ((wall, "s"), (used, "s of processor")):
                    ratios = [one / other for one, other in zip(times[label], times[unit])]
                    line += f" {_spread(times[label], '.3f')} {kind}"
                    line += f"  x {_spread(ratios, '.2f'):21}" if label != unit else " " * 25
                for kind in ("host", "device") if device.type != "cpu" else ("host",):
                    line += f" {kind} {_peaks([[getattr(cost, kind) for cost in ranks] for ranks in rounds])}"
                print(line.rstrip(), flush=True)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def _peaks(rounds: list[list[int]]) -> str:
    """Return the median of rank 0, and that of the worst remaining rank."""
    first = statistics.median(ranks[0] for ranks in rounds)
    others = [max(ranks[1:]) for ranks in rounds if ranks[1:]]
    return f"{first / MB:5.0f} MB" + (f" / {statistics.median(others) / MB:5.0f} MB" if others else "")


def run_rank(rank: int, options: argparse.Namespace, place: str) -> None:
    """Run one process. The ranks rendezvous in the directory ``place``, which also holds the checkpoints."""
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    backend = "gloo"
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        device = torch.device(device.type, rank % count)
        torch.accelerator.set_device_index(device.index)
        if count >= options.ranks:
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    torch.set_num_threads(options.threads)
    dist.init_process_group(backend, init_method=f"file://{place}/meet", rank=rank, world_size=options.ranks)
    contenders = {}
    for name in options.contenders or CONTENDERS:
        make, _ = CONTENDERS[name]
        torch.manual_seed(0)
        contenders[name] = make(Model(options.width, options.depth, options.vocabulary), device)
        contenders[name].step(torch.randint(options.vocabulary, (1, 8), device=device))
    if rank == 0:
        numel = sum(p.numel() for p in Model(options.width, options.depth, options.vocabulary).parameters())
        print(f"{numel / 1e6:.1f} million parameters, {options.ranks} ranks, {backend}, {device.type}")
    meter, results = Meter(device), Results()
    gc.freeze()  # keep imported modules out of collections between measurements
    for scenario in options.only or SCENARIOS:
        for number in range(options.rounds + 1):  # the first fills caches and is not counted
            for name, contender in contenders.items():
                directory = Path(place, "checkpoints")
                measure(SCENARIOS[scenario](contender, directory), meter, results if number > 0 else None, name)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(directory, ignore_errors=True)
    if rank == 0:
        results.show(device)
    dist.barrier()
    dist.destroy_process_group()


def measure(rows: Rows, meter: Meter, results: Results | None, name: str) -> None:
    result: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            row, addition, action = rows.send(result)
            result = None  # or it would count as held
            result, cost = meter.measure(action)
            if results is not None:
                results.add(row, name + addition, CONTENDERS[name][1], cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted (default: 5)")
    parser.add_argument("--width", type=int, default=768, help="of the model (default: 768)")
    parser.add_argument("--depth", type=int, default=12, help="blocks of the model (default: 12)")
    parser.add_argument("--vocabulary", type=int, default=50257, help="rows of the embedding (default: 50257)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, help="what to measure (default: all)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="who takes turns (default: all)")
    parser.add_argument("--device", help="default: the accelerator if there is one, else cpu")
    parser.add_argument("--threads", type=int, default=1, help="of each process on CPU (default: 1)")
    parser.add_argument("--directory", help="where to save checkpoints (default: the directory for temporary files)")
    options = parser.parse_args()
    if options.device is None:
        options.device = "cpu"
        if torch.accelerator.is_available():
            options.device = torch.accelerator.current_accelerator().type
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        torch.multiprocessing.spawn(run_rank, (options, place), nprocs=options.ranks)


if __name__ == "__main__":
    main()
