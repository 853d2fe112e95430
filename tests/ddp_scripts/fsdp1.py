"""A loop for torch's FSDP1, whose imports alone change."""

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from tests.ddp_scripts.model import Net, batch

torch.manual_seed(0)
model = Net().double()
if os.path.exists("fsdp1.pt"):
    model.load_state_dict(torch.load("fsdp1.pt")["model"])
model = FSDP(
    model,
    auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=20),
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    mixed_precision=MixedPrecision(),
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
losses = []
for step in range(4):
    x, y = batch(step, dist.get_rank(), torch.float64)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
full = model.state_dict()
if dist.get_rank() == 0:
    torch.save({"model": full}, "fsdp1.pt")
