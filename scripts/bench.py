"""Measure training steps beside torch's DDP, FSDP1 and FSDP2, interleaved in one run.

    python scripts/bench.py --ranks 2 --rounds 8 --contenders ddp fsdp1 fsdp2 auto bound

Each contender runs in ``--ranks`` separate processes. The contenders take turns, ``--rounds`` times, with ``--steps``
steps of each workload, while the others sleep. One step before each turn is not counted, because the memory of an idle
process is slower.

Contenders:

* ``plain``: one model per rank, no communication;
* ``bound``: the plain model and the work that sharding cannot avoid, see :class:`Bound`;
* ``ddp``, ``fsdp1`` and ``fsdp2``: torch's;
* ``native``, ``direct``, ``shared`` and ``auto``: this package with that value of ``FSDP_COLLECTIVES``;
* ``owners`` and ``everywhere``, for ``muon``: :class:`fsdp.optim.WholeParamOptimizer`, and one Muon per unit that steps
  on every rank, where values and gradients are gathered;
* ``stream`` and ``state-dict``, for ``export``: :func:`fsdp.export.weights` in bfloat16, and a full state dict that is
  cast. Both end on rank 0.

Workloads:

* ``compute``: a GPT of 29 million parameters, 256 tokens per rank;
* ``communication``: a GPT of 118 million parameters, 16 tokens per rank;
* ``tiny``: 121 units of two layers with 2,000 parameters each;
* ``lora``: a frozen GPT of 63 million parameters with adapters of rank 8, 64 tokens per rank;
* ``accumulation``: the GPT of ``compute``, with four batches of 64 tokens in a step, three of them under ``no_sync``;
* ``muon``: the optimizer's step of the GPT of ``compute``, with Muon for the matrices of its blocks, one step a turn.
  Muon's Newton-Schulz iterations run in float32, because most CPUs multiply bfloat16 matrices several times slower;
* ``export``: all weights of the GPT of ``communication`` on rank 0, in bfloat16;
* ``wrapping`` and ``from-meta``: no training. The GPT of ``communication`` is made, and wrapping it is timed, once a
  round. In ``from-meta`` the modules begin on the meta device and receive values while they are wrapped.

The table has, for each contender: the median time of a step on the slowest rank, with the fastest and slowest round;
processor time, page faults and the highest proportional share of memory (PSS) per rank; the collectives of a step and
the bytes that a rank receives in them; and the time relative to the first contender, as the median over rounds.
``--json`` writes the measurements, ``--plot`` draws them (an SVG).
``bench_scale.py`` measures host time alone, with up to 4096 ranks.
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp
import fsdp.export
import fsdp.optim
import fsdp.wrap
from fsdp.comm.lane.lane import Lane
from fsdp.comm.versions import ALL_GATHER

OURS = ("native", "direct", "shared", "auto")
OF_MUON, OF_EXPORT = ("owners", "everywhere"), ("stream", "state-dict")
CONTENDERS = ("plain", "bound", "ddp", "fsdp1", "fsdp2", *OURS, *OF_MUON, *OF_EXPORT)
NAMES = {  # of contenders, in the picture
    "plain": "plain, not sharded",
    "bound": "bound: one process",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "auto": "fsdp",
}


class Block(nn.Module):
    """A transformer layer."""

    attend: nn.Module
    project: nn.Module

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.attend(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Adapter(nn.Module):
    """A low-rank update of a frozen layer, of rank 8."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, 8, bias=False)
        self.up = nn.Linear(8, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class Adapted(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.adapter = layer, Adapter(layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)


def adapted(model: GPT) -> GPT:
    model.requires_grad_(False)
    for block in [block for block in model.modules() if isinstance(block, Block)]:
        block.attend, block.project = Adapted(block.attend), Adapted(block.project)
    return model


class Workload(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    batches: int = 1  # in a step
    wraps_from: str = ""  # the device on which the model is made, where a step is to wrap it


WORKLOADS = {
    "compute": Workload(lambda: GPT(512, 8, 4000), lambda: torch.randint(0, 4000, (2, 128))),
    "communication": Workload(lambda: GPT(1024, 9, 2400), lambda: torch.randint(0, 2400, (1, 16))),
    "tiny": Workload(lambda: nn.Sequential(*(Tiny() for _ in range(120))), lambda: torch.randn(4, 32)),
    "lora": Workload(lambda: adapted(GPT(768, 8, 4000)), lambda: torch.randint(0, 4000, (1, 64))),
    "accumulation": Workload(lambda: GPT(512, 8, 4000), lambda: torch.randint(0, 4000, (1, 64)), batches=4),
}
TITLES = {  # of workloads, in the picture
    "compute": "GPT of 29 million parameters, 256 tokens",
    "communication": "118 million, 16 tokens",
    "tiny": "121 tiny units",
    "lora": "adapters of rank 8 on a frozen GPT of 63 million",
    "accumulation": "29 million, four batches of 64 tokens, three of them under no_sync",
}
WORKLOADS |= {
    name: WORKLOADS["communication"]._replace(wraps_from=device)
    for name, device in (("wrapping", "cpu"), ("from-meta", "meta"))
}


WORKLOADS |= {"muon": WORKLOADS["compute"], "export": WORKLOADS["communication"]}


class Bound(nn.Module):
    """The least work of a rank under full sharding, without any waiting or scheduling.

    It consists of the plain model's forward and backward; before each, a copy of the other ranks' parameters
    (``gather``); after the last backward, the sum of this rank's 1/N of the gradients over all ranks, and the
    optimizer's step for that part (``reduce``).
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__()
        self.model, self._ranks = model, ranks
        total = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._theirs = torch.rand(total - total // ranks)
        self._full = torch.empty_like(self._theirs)
        self._gradients = torch.zeros(ranks, trained // ranks)
        self.shard = nn.Parameter(torch.zeros(trained // ranks))

    def gather(self) -> None:
        self._full.copy_(self._theirs)

    def reduce(self) -> None:
        self.shard.grad = self._gradients.sum(0).div_(self._ranks)
        for p in self.model.parameters():
            p.grad = None

    def forward(self, x: Tensor) -> Tensor:
        self.gather()
        y: Tensor = self.model(x)
        self.gather()  # before the backward
        return y


def give_values(module: nn.Module) -> None:
    """Give values to the module's own parameters, which are on the meta device."""
    module.to_empty(device="cpu", recurse=False)
    if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
        module.reset_parameters()


def sharded(
    model: nn.Module,
    contender: str,
    units: set[type[nn.Module]],
    device: torch.device,
    low: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Shard ``model`` by ``fsdp1``, ``fsdp2`` or this package.

    The modules of the classes ``units`` become units, and compute and reduce in the dtype ``low``.
    """
    theirs: Any = torch.distributed.fsdp
    if contender == "fsdp2":
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*reversed([unit for unit in model.modules() if type(unit) in units]), model):  # inner ones first
            theirs.fully_shard(module, mesh=mesh, mp_policy=theirs.MixedPrecisionPolicy(low, low))
        return model
    engine = theirs if contender == "fsdp1" else fsdp
    return engine.FullyShardedDataParallel(
        model,
        auto_wrap_policy=engine.wrap.ModuleWrapPolicy(units),
        device_id=device,
        mixed_precision=None if low is None else engine.MixedPrecision(low, low),
        **options,
    )


def wrapped(model: nn.Module, contender: str, use_orig_params: bool) -> Any:
    units: Any = (
        {Block, Tiny} if use_orig_params else {Block, Tiny, Adapter}
    )  # a flat parameter is trained or frozen as a whole
    on_meta = next(model.parameters()).is_meta
    if on_meta and contender in ("plain", "bound", "ddp"):
        for module in model.modules():
            give_values(module)
    if contender == "plain":
        return model
    if contender == "bound":
        return Bound(model, dist.get_world_size())
    if contender == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    options = {"use_orig_params": use_orig_params} if contender != "fsdp2" else {}
    if on_meta and contender != "fsdp2":
        options["param_init_fn"] = give_values
    model = sharded(model, contender, units, torch.device("cpu"), **options)
    for module in model.modules() if on_meta and contender == "fsdp2" else ():
        give_values(module)
    return model


def unsynchronized(model: Any, contender: str) -> AbstractContextManager[None]:
    """Return the context for all batches of a step but the last."""
    if contender in ("plain", "bound"):
        return contextlib.nullcontext()
    if contender != "fsdp2":
        return model.no_sync()

    @contextlib.contextmanager
    def context() -> Any:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return context()


class Counted(TorchDispatchMode):
    """A counter of the collectives that reach torch's C++, and of the bytes that this rank receives in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.received = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            ranks, name = dist.get_world_size(), func._schema.name.removeprefix("c10d::")
            moved = {"allreduce_": 2, "_allgather_base_": 1, "allgather_": 1, "_reduce_scatter_base_": ranks}[name]
            self.calls += 1
            self.received += moved * sum(output.nbytes for output in tree_leaves(args[0])) * (ranks - 1) / ranks
        return func(*args, **(kwargs or {}))


def traffic(model: nn.Module, contender: str, step: Callable[[], None]) -> tuple[int, float]:
    """Return the number of collectives of a step, and the bytes that this rank receives in them."""
    if contender in OURS:
        with fsdp.trace(model) as trace:
            step()
        moved = [event for event in trace.events if event.phase in ("gather", "reduce")]
        return len(moved), sum(event.nbytes for event in moved)
    with Counted() as counted:
        step()
    return counted.calls, counted.received


def pss() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


def highest_pss(step: Callable[[], None]) -> int:
    """Return the highest PSS while ``step`` runs, sampled every 20 ms."""
    found, over = [pss()], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            found.append(pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    over.set()
    watcher.join()
    return max(found)


# The functions that prepare a step, run it, and return its collectives and bytes.
Measured = tuple[Callable[[], None], Callable[[], None], Callable[[], tuple[int, float]]]


def training(options: argparse.Namespace, contender: str, workload: str) -> Measured:
    made = WORKLOADS[workload]
    model = wrapped(made.model(), contender, options.use_orig_params)
    trained = [model.shard] if isinstance(model, Bound) else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)

    def step() -> None:
        for left in reversed(range(made.batches)):
            with unsynchronized(model, contender) if left else contextlib.nullcontext():
                model(made.batch()).float().square().mean().backward()
        if isinstance(model, Bound):
            model.reduce()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step, step, lambda: traffic(model, contender, step)


def wrapping(options: argparse.Namespace, contender: str, workload: str) -> Measured:
    made, plain, done = WORKLOADS[workload], list[nn.Module](), list[nn.Module]()

    def prepare() -> None:
        done.clear()
        gc.collect()
        with torch.device(made.wraps_from):
            plain[:] = [made.model()]

    def step() -> None:
        done.append(wrapped(plain.pop(), contender, options.use_orig_params))

    return prepare, step, lambda: (0, 0.0)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.startswith("blocks")


def received(calls: Callable[[], None]) -> tuple[int, float]:
    """Return the number of messages that this rank waited for, and the bytes that its peers put into its memory."""
    found: list[int] = []
    real = Lane.collective

    def counted(lane: Any, name: str, event: Any, *tensors: Any, **options: Any) -> Any:
        own = {ALL_GATHER: lambda: tensors[1].nbytes, "all_to_all_single": lambda: tensors[2][lane.group.rank()]}
        found.append(tensors[0].nbytes - own.get(name, lambda: 0)())
        return real(lane, name, event, *tensors, **options)

    with mock.patch.object(Lane, "collective", counted):
        calls()
    return len(found), float(sum(found))


def stepping(options: argparse.Namespace, contender: str, workload: str) -> Measured:
    """Measure the optimizer's step alone; the gradients stay."""
    made = WORKLOADS[workload]
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign]  # Muon calls it before its iterations
    model: Any = wrapped(made.model(), "native", True)
    model(made.batch()).float().square().mean().backward()
    if contender == "owners":
        optimizer = fsdp.optim.WholeParamOptimizer(
            model, lambda params: torch.optim.Muon(params, lr=1e-3), select=is_matrix, rest=torch.optim.AdamW
        )
        optimizer.step()
        return optimizer.step, optimizer.step, lambda: received(optimizer.step)

    summoned = fsdp.FullyShardedDataParallel.summon_full_params
    units = [unit for unit in fsdp.FullyShardedDataParallel.fsdp_modules(model) if unit is not model]
    muons = []
    for unit in units:
        with summoned(unit, recurse=False):
            muons.append(torch.optim.Muon([p for p in unit.parameters() if p.dim() == 2], lr=1e-3))
    matrices = {id(p) for muon in muons for group in muon.param_groups for p in group["params"]}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in matrices])

    def step() -> None:
        for unit, muon in zip(units, muons, strict=True):
            with summoned(unit, recurse=False, with_grads=True):
                muon.step()
        rest.step()

    step()
    return step, step, lambda: received(step)


def exporting(options: argparse.Namespace, contender: str, workload: str) -> Measured:
    model: Any = wrapped(WORKLOADS[workload].model(), "native", True)
    full = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    kept: dict[str, Tensor] = {}
    for name, param in WORKLOADS[workload].model().named_parameters() if dist.get_rank() == 0 else ():
        kept[name] = torch.empty_like(param, dtype=torch.bfloat16)

    def step() -> None:
        if contender == "stream":
            for name, tensor in fsdp.export.weights(model, dtype=torch.bfloat16, to=0):
                kept[name].copy_(tensor)
            return
        with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, full):
            for name, tensor in model.state_dict().items():
                kept[name].copy_(tensor)

    step()
    return step, step, lambda: received(step)


def rank_process(rank: int, options: argparse.Namespace, contender: str, workload: str, port: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if contender in (*OF_MUON, *OF_EXPORT):
        os.environ["FSDP_COLLECTIVES"] = "native"  # so that all bytes are counted
    if contender in OURS:
        os.environ["FSDP_COLLECTIVES"] = contender
    warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")  # FSDP1's
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    made: Callable[..., Measured] = {"muon": stepping, "export": exporting}.get(workload, training)
    made = wrapping if WORKLOADS[workload].wraps_from else made
    prepare, step, traffic_of = made(options, contender, workload)
    dist.barrier()
    pipe.send(None)
    n = 1 if workload == "muon" or WORKLOADS[workload].wraps_from else options.steps
    while pipe.recv():
        prepare()
        dist.barrier()
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for _ in range(n):
            step()
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if WORKLOADS[workload].wraps_from:
            prepare()
        highest = highest_pss(step)
        dist.barrier()
        pipe.send((wall / n, cpu / n, (after.ru_minflt - before.ru_minflt) / n, highest))
    pipe.send(traffic_of())  # last: torch's profiler, which records our traffic, takes memory for good
    dist.destroy_process_group()


def start(options: argparse.Namespace, contender: str, workload: str) -> list[Connection]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, ours = mp.get_context("spawn"), []
    for rank in range(options.ranks):
        here, there = context.Pipe()
        arguments = (rank, options, contender, workload, port, there)
        context.Process(target=rank_process, args=arguments, daemon=True).start()
        ours.append(here)
    for pipe in ours:
        pipe.recv()
    return ours


def measure(options: argparse.Namespace, workload: str) -> dict[str, list[list[float]]]:
    """Return, by contender and round, the values of the worst rank.

    The values are seconds, processor seconds, page faults, bytes of memory, collectives and bytes received.
    """
    contenders = {"muon": OF_MUON, "export": OF_EXPORT}.get(workload, options.contenders)
    pipes = {contender: start(options, contender, workload) for contender in contenders}
    found: dict[str, list[list[float]]] = {contender: [] for contender in pipes}
    for _ in range(options.rounds):
        for contender, several in pipes.items():
            for pipe in several:
                pipe.send(True)
            found[contender].append([max(values) for values in zip(*(pipe.recv() for pipe in several))])
    for contender, several in pipes.items():
        for pipe in several:
            pipe.send(False)
        moved = [max(values) for values in zip(*(pipe.recv() for pipe in several))]
        found[contender] = [[*values, *moved] for values in found[contender]]
    return found


HEAD = ("ms", "fastest", "slowest", "CPU ms", "faults", "PSS MB", "calls", "MB in", "ratio")


def show(workload: str, found: dict[str, list[list[float]]]) -> None:
    """Print a row for each contender, with a cell for each word of :data:`HEAD`."""
    print(f"\n{workload:13}" + "".join(f"{word:>9}" for word in HEAD))
    base = next(iter(found.values()))
    for contender, rounds in found.items():
        wall, cpu, faults, memory, calls, received = (list(values) for values in zip(*rounds))
        ratio = statistics.median(one[0] / other[0] for one, other in zip(rounds, base))
        times = [1e3 * seconds for seconds in (statistics.median(wall), min(wall), max(wall), statistics.median(cpu))]
        cells = [f"{time:.1f}" for time in times] + [
            f"{statistics.median(faults):.0f}",
            f"{max(memory) / 1e6:.0f}",
            f"{calls[0]:.0f}",
            f"{received[0] / 1e6:.1f}",
            f"{ratio:.2f}",
        ]
        print(f"{contender:13}" + "".join(f"{cell:>9}" for cell in cells), flush=True)


def drawn(results: dict[str, dict[str, list[list[float]]]]) -> str:
    """Draw an SVG with a bar for each contender of each workload: the median step, on one scale per workload.

    The line across a bar reaches from the fastest to the slowest round. The memory of ``bound`` is left out: it is one
    process without peers.
    """
    height, left, width, y = 18, 150, 620, 18
    title = (
        "Milliseconds of a training step: median, with the fastest and slowest round, on one scale per workload; "
        "proportional memory of a rank"
    )
    parts = [f'<text x="4" y="14" font-size="12">{title}</text>']
    for workload, found in results.items():
        seconds = {contender: [values[0] for values in rounds] for contender, rounds in found.items()}
        scale = width / max(max(rounds) for rounds in seconds.values())
        y += height + 6
        parts.append(f'<text x="4" y="{y - 4}" font-weight="bold">{TITLES.get(workload, workload)}</text>')
        for contender, rounds in seconds.items():
            median, color = statistics.median(rounds), "#3d6cb9" if contender in OURS else "#999999"
            memory = "" if contender == "bound" else f", {max(values[3] for values in found[contender]) / 1e6:.0f} MB"
            low, high, middle = left + min(rounds) * scale, left + max(rounds) * scale, y + height / 2 - 1
            parts += [
                f'<text x="14" y="{y + 12}">{NAMES.get(contender, contender)}</text>',
                f'<rect x="{left}" y="{y}" width="{median * scale:.1f}" height="{height - 3}" fill="{color}"/>',
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="black"/>',
                f'<text x="{high + 6:.1f}" y="{y + 12}">{1e3 * median:.0f} ms{memory}</text>',
            ]
            y += height
    size = f'width="{left + width + 110}" height="{y + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["ddp", "fsdp1", "direct", "shared"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="per round")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--use-orig-params", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results = {}
    for workload in options.workloads:
        results[workload] = measure(options, workload)
        show(workload, results[workload])
    if options.plot is not None:
        options.plot.write_text(drawn(results))
    if options.json is not None:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": given, "results": results}, indent=1))


if __name__ == "__main__":
    main()
