"""A training script for DistributedDataParallel: 2_torch_fsdp.py and 3_fsdp.py are the migrated versions.

torchrun --standalone --nproc-per-node 2 examples/ddp_to_fsdp/1_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0), nn.Linear(32, 64))
model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

for step in range(20):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    tokens = torch.randint(64, (16, 8), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 5 % 64).flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item() / ranks:.5f}")

state = model.module.state_dict()
if rank == 0:
    print(f"saved {len(state)} tensors, {sum(value.numel() for value in state.values()):,} numbers")
dist.destroy_process_group()
