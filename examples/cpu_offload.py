"""CPU offload: shards, gradients and optimizer state live in host memory.

    torchrun --standalone --nproc-per-node 2 examples/cpu_offload.py

Each unit's shard is copied to the device when the unit is gathered, and the shard of the gradient is copied back when
it is reduced. The optimizer runs on the CPU. Use it for models whose optimizer state does not fit the device; the
copies cost time. Without an accelerator host and device memory are the same, and the script runs all the same.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp import CPUOffload
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy


def join() -> torch.device:
    """Join the process group and return the device of this process: a separate accelerator, or the CPU."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo as well: clipping reduces the norm of gradients in host memory
    return device


def main() -> None:
    device = join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), *(nn.TransformerEncoderLayer(256, 4, 512) for _ in range(4)))
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = FSDP(model, auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True), device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.randn(8, 16, 128, device=device)
        loss = model(x).square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, norm of the gradients {norm.item():.4f}")
    tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    held = sum(tensor.nbytes for tensor in tensors)
    if dist.get_rank() == 0:
        where = ", ".join(sorted({tensor.device.type for tensor in tensors}))
        print(f"computes on {device.type}; {held:,} bytes of parameters and optimizer state are on {where}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
