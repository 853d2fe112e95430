"""A script on torch's FSDP1, or on DDP, that trains 5 steps, saves, and trains 5 more steps.

torchrun --standalone --nproc-per-node 2 examples/from_fsdp1/before.py fsdp1 runs
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_model import STEPS, build, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

kind, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
if kind == "fsdp1":
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = FSDP(build(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
else:
    model = DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
train(model, optimizer, 0)

for name in ("full", "sharded", "local") if kind == "fsdp1" else ("ddp",):
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    if kind == "ddp":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    else:
        with FSDP.state_dict_type(model, StateDictType[f"{name.upper()}_STATE_DICT"]):
            state = {"model": model.state_dict(), "step": STEPS}
            state["optimizer"] = optimizer.state_dict() if name == "local" else FSDP.optim_state_dict(model, optimizer)
    if name == "sharded":
        dcp.save(state, checkpoint_id=path)
    elif name == "local":
        torch.save(state, path / f"rank{rank}.pt")
    elif rank == 0:
        torch.save(state, path / "run.pt")

train(model, optimizer, STEPS)
dist.destroy_process_group()
