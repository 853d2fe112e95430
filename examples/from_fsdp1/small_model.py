"""The model and the data of examples/from_fsdp1/before.py and after.py.

`fsdp convert OLD NEW --model small_model:build` imports examples/from_fsdp1/small_model.py.
"""

import torch
import torch.distributed as dist
from torch import nn

ROWS, STEPS = 12, 5


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(nn.Embedding(64, 16), *layers, nn.Linear(16, 64))
    return model.double()  # so that the order of sums, which depends on the ranks, does not show in the losses


def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int) -> None:
    """Train for some steps. The ranks divide the rows of a step, so losses are those of any number of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(begin, begin + STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (ROWS, 8), generator=generator)[rank::ranks]
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 5 % 64).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item() / ranks:.5f}")
