"""The smallest training script: wrap the model, then train as usual.

torchrun --standalone --nproc-per-node 2 examples/minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 1))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after wrapping: it holds this rank's shards

    data = torch.Generator().manual_seed(dist.get_rank())  # each rank has a separate part of the data
    for step in range(50):
        x = torch.randn(64, 32, generator=data)
        loss = (model(x) - x.sum(dim=1, keepdim=True).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
