"""Measure steps on one GPU as rank 0 of many, beside torch's FSDP1 and FSDP2, in turns.

    python scripts/bench_gpu.py --ranks 8 --rounds 3 --contenders plain fsdp fsdp1 fsdp2

Torch's fake process group stands for the network: a collective takes the time of copying this rank's shard, and values
are wrong. Kernels, streams, events and the allocator are real. So this shows the cost of an engine without the network:
the work of the host, and memory. Parameters are float32; the arithmetic and the reductions are in bfloat16, and the
optimizer is AdamW. The ``plain`` model is bfloat16 and whole.

Workloads, all GPTs with 32,000 words:

* ``small``: 35 million parameters in 24 layers, 64 tokens: the host takes longer than the device;
* ``medium``: 0.9 billion in 16 layers, 4,096 tokens;
* ``large``: 1.9 billion in 8 layers, 8,192 tokens: the device takes longer than the host.

The table has, for each contender: the median milliseconds until the host has launched a step; those of a step, of
several that follow each other; and the peaks of the memory in tensors and of the memory that the allocator has taken
from the device, in MiB.
"""

import argparse
import gc
import statistics
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench import GPT, Block, sharded
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

CONTENDERS = ("plain", "fsdp", "fsdp1", "fsdp2")
WORDS = 32_000
WORKLOADS = {"small": (256, 24, 1, 64), "medium": (2048, 16, 4, 1024), "large": (4096, 8, 4, 2048)}
WARM_UP, STEPS = 3, 8
COLUMNS = ("host", "step", "allocated", "reserved")


def wrapped(contender: str, model: GPT, device: torch.device) -> nn.Module:
    if contender == "plain":
        return model.to(torch.bfloat16)
    options = {"use_orig_params": True} if contender != "fsdp2" else {}
    return sharded(model, contender, {Block}, device, torch.bfloat16, **options)


def measure(contender: str, workload: str, device: torch.device) -> dict[str, float]:
    """Train ``contender`` from the start, and return a value per column."""
    width, layers, batch, length = WORKLOADS[workload]
    gc.collect()
    torch.accelerator.empty_cache()
    held = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    with device:
        model = wrapped(contender, GPT(width, layers, WORDS), device)
        tokens = torch.randint(0, WORDS, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    hosts = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - began)
        torch.accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.accelerator.synchronize()
    whole = (time.perf_counter() - began) / STEPS
    allocated, reserved = torch.accelerator.max_memory_allocated() - held, torch.accelerator.max_memory_reserved()
    values = statistics.median(hosts) * 1e3, whole * 1e3, allocated / 2**20, reserved / 2**20
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the fake group (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default: 3)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    kind = torch.accelerator.current_accelerator()
    if kind is None or not hasattr(torch.accelerator, "max_memory_reserved"):
        sys.exit("bench_gpu.py needs a GPU, and torch 2.9 or newer, which tells the memory of accelerators")
    device = torch.device(kind.type, 0)
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    for workload in options.workloads:
        rows: dict[str, list[dict[str, float]]] = {contender: [] for contender in options.contenders}
        for _ in range(options.rounds):
            for contender in options.contenders:
                rows[contender].append(measure(contender, workload, device))
        print(f"\n{workload:10s}" + "".join(f"{column:>12s}" for column in COLUMNS))
        for contender, turns in rows.items():
            medians = [statistics.median(turn[column] for turn in turns) for column in COLUMNS]
            print(f"{contender:10s}" + "".join(f"{value:12,.1f}" for value in medians), flush=True)


if __name__ == "__main__":
    main()
