"""Gradient accumulation: micro-batches without communication, or with little memory.

    torchrun --standalone --nproc-per-node 2 examples/accumulation.py

Inside `model.no_sync()` a backward reduces no gradients; the last backward, outside it, reduces their sum once. This
saves communication and costs memory, because each rank keeps full gradients instead of shards. Without `no_sync`
gradients are reduced after each micro-batch and added up sharded. Both give the gradient of the whole batch.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import trace
from fsdp.wrap import ModuleWrapPolicy

MICRO_BATCHES = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)), nn.Linear(64, 1))
    return FSDP(model.double(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id="cpu")


def accumulate(model: nn.Module, batch: Tensor, *, sync_every_time: bool) -> None:
    """Compute the gradients of the mean over `batch`, one micro-batch at a time."""
    for number, micro in enumerate(batch.chunk(MICRO_BATCHES)):
        last = number == MICRO_BATCHES - 1
        with nullcontext() if sync_every_time or last else model.no_sync():
            (model(micro).square().mean() / MICRO_BATCHES).backward()


def main() -> None:
    dist.init_process_group("gloo")
    batch = torch.randn(32, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    gradients = []
    for sync_every_time in (True, False):
        model = make_model()
        with trace(model) as recorded:
            accumulate(model, batch, sync_every_time=sync_every_time)
        sent = [event for event in recorded.events if event.phase == "reduce"]
        gradients.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        if dist.get_rank() == 0:
            name = "reduced every time" if sync_every_time else "inside no_sync"
            print(f"{name}: {len(sent)} reductions, {sum(event.nbytes for event in sent):,} bytes received")
    difference = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
    if dist.get_rank() == 0:
        print(f"the gradients are the same, up to rounding: {difference < 1e-12}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
