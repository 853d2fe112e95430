"""Hybrid sharding: parameters sharded over the ranks of one machine, and replicated over the machines.

    torchrun --standalone --nproc-per-node 4 examples/hybrid.py --replicas 2 --steps 6 --save checkpoints
    torchrun --standalone --nproc-per-node 4 examples/hybrid.py --replicas 1 --steps 12 --resume checkpoints

The first command trains on a mesh of 2 replicas x 2 shards and saves. The second continues on a mesh of 1 x 4, with
the same losses as an uninterrupted run; any number of ranks is possible. Without --replicas each machine is a replica.
On several machines the same script is started once per machine, by examples/launch_machines.sh.

All-gathers stay inside a machine. Between machines only the shards of gradients travel, once a step:
(replicas - 1) / replicas of the model, divided by the ranks of a machine, in each direction and for each rank.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.checkpoint import load, save
from fsdp.wrap import ModuleWrapPolicy

BATCH = 24  # rows of all ranks together


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def my_part_of_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the batch of `step`; every rank has different rows."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 10, dtype=torch.float64, generator=generator)
    mine = inputs[dist.get_rank() :: dist.get_world_size()]
    return mine, mine.sin().sum(dim=1, keepdim=True)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train, and return the losses of all steps so far."""
    ranks = dist.get_world_size()
    if ranks % options.replicas:
        raise SystemExit(f"hybrid.py: {ranks} ranks cannot be {options.replicas} replicas of the same size")
    shape = (options.replicas, ranks // options.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        make_model().to(device),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress: dict[str, Any] = {"losses": []}
    if options.resume:
        progress = load(options.resume, model, optimizer)  # each rank reads only the parts that it needs, on any mesh
    first = len(progress["losses"])
    for step in range(first, options.steps):
        inputs, targets = (part.to(device) for part in my_part_of_batch(step))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["losses"].append(mean_over_ranks(loss))
    if options.save:
        save(options.save, model, optimizer, extra=progress)
    if dist.get_rank() == 0:
        here = sum(param.numel() for param in model.parameters())
        print(
            f"mesh {shape[0]} x {shape[1]}: {here:,} of {sum(p.numel() for p in make_model().parameters()):,} numbers"
        )
        for step in range(first, options.steps):
            print(f"step {step:2d}: loss {progress['losses'][step]:.15f}")
    return list(progress["losses"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    machines = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    parser.add_argument("--replicas", type=int, default=machines, help="replicas of the model (one per machine)")
    parser.add_argument("--steps", type=int, default=12, help="where the training ends (12)")
    parser.add_argument("--save", metavar="DIRECTORY", help="where to save a checkpoint at the end")
    parser.add_argument("--resume", metavar="DIRECTORY", help="a directory with checkpoints to go on from")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
