"""Measures training steps beside torch's DDP, FSDP1 and FSDP2, in one run, so that the machine's moods meet all alike.

    python scripts/bench.py --ranks 2 --rounds 8 --contenders ddp fsdp1 direct shared

starts ``--ranks`` fresh processes for every contender: ``plain`` (one model per rank, nothing communicated: what the
machine can do), ``ddp``, ``fsdp1`` and ``fsdp2`` of torch, and this package as ``native``, ``direct``, ``shared`` or
``auto`` (the values of ``FSDP_COLLECTIVES``). They take turns, ``--rounds`` times, in ``--steps`` steps of each
workload while all others sleep:

* ``compute``: a GPT of 29 million parameters, 256 tokens per rank;
* ``communication``: one of 118 million, 16 tokens per rank;
* ``tiny``: 121 units of two layers with 2,000 parameters each.

Prints for each the median time of a step on the slowest rank, with the fastest and slowest round; processor time, page
faults and the highest proportional share of memory (PSS) per rank; and the time in units of the first contender's, as
the median over rounds. ``--json`` writes what was measured.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
import torch.multiprocessing as mp
from torch import Tensor, nn

import fsdp
import fsdp.wrap

CONTENDERS = ("plain", "ddp", "fsdp1", "fsdp2", "native", "direct", "shared", "auto")


class Block(nn.Module):
    """A transformer's."""

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


WORKLOADS = {
    "compute": (lambda: GPT(512, 8, 4000), lambda: torch.randint(0, 4000, (2, 128))),
    "communication": (lambda: GPT(1024, 9, 2400), lambda: torch.randint(0, 2400, (1, 16))),
    "tiny": (lambda: nn.Sequential(*(Tiny() for _ in range(120))), lambda: torch.randn(4, 32)),
}


def wrapped(model: nn.Module, contender: str, use_orig_params: bool) -> nn.Module:
    units: Any = {Block, Tiny}
    if contender == "plain":
        return model
    if contender == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if contender == "fsdp2":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in model.modules():
            if type(unit) in units:
                dist.fsdp.fully_shard(unit, mesh=mesh)
        return dist.fsdp.fully_shard(model, mesh=mesh)
    engine: Any = torch.distributed.fsdp if contender == "fsdp1" else fsdp
    policy = engine.wrap.ModuleWrapPolicy(units)
    return engine.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def pss() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


def highest_pss(step: Callable[[], None]) -> int:
    """While ``step`` runs, as far as looking now and then can tell."""
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


def rank_process(rank: int, options: argparse.Namespace, contender: str, workload: str, port: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if contender in ("native", "direct", "shared", "auto"):
        os.environ["FSDP_COLLECTIVES"] = contender
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    make, batch = WORKLOADS[workload]
    torch.manual_seed(0)
    model = wrapped(make(), contender, options.use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = model(batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    dist.barrier()
    pipe.send(None)
    while pipe.recv():
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for _ in range(options.steps):
            step()
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        highest = highest_pss(step)
        dist.barrier()
        n = options.steps
        pipe.send((wall / n, cpu / n, (after.ru_minflt - before.ru_minflt) / n, highest))
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
    """Of each contender, for each round: seconds, processor seconds, page faults, bytes; of the worst rank."""
    pipes = {contender: start(options, contender, workload) for contender in options.contenders}
    found: dict[str, list[list[float]]] = {contender: [] for contender in pipes}
    for _ in range(options.rounds):
        for contender, several in pipes.items():
            for pipe in several:
                pipe.send(True)
            found[contender].append([max(values) for values in zip(*(pipe.recv() for pipe in several))])
    for pipe in (pipe for several in pipes.values() for pipe in several):
        pipe.send(False)
    return found


def show(workload: str, found: dict[str, list[list[float]]]) -> None:
    base = next(iter(found.values()))
    print(f"\n{workload:13}{'ms':>8}{'fastest':>9}{'slowest':>9}{'CPU ms':>9}{'faults':>9}{'PSS MB':>8}{'ratio':>7}")
    for contender, rounds in found.items():
        wall, cpu, faults, memory = (list(values) for values in zip(*rounds))
        ratio = statistics.median(one[0] / other[0] for one, other in zip(rounds, base))
        print(
            f"{contender:13}{statistics.median(wall) * 1e3:8.1f}{min(wall) * 1e3:9.1f}{max(wall) * 1e3:9.1f}"
            f"{statistics.median(cpu) * 1e3:9.1f}{statistics.median(faults):9.0f}{max(memory) / 1e6:8.0f}{ratio:7.2f}",
            flush=True,
        )


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
    options = parser.parse_args()
    results = {}
    for workload in options.workloads:
        results[workload] = measure(options, workload)
        show(workload, results[workload])
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
