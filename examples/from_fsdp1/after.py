"""The script on this package: it loads a converted checkpoint at any number of ranks, and goes on training.

torchrun --standalone --nproc-per-node 3 examples/from_fsdp1/after.py runs/from_full
"""

import sys

import torch
import torch.distributed as dist
from small_model import build, train
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import load
from fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
extra = load(sys.argv[1], model, optimizer)
train(model, optimizer, extra["step"])
dist.destroy_process_group()
