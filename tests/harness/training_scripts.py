"""Excerpts of training scripts in common styles, for DistributedDataParallel and torch's FSDP1.

The scripts in `tests/ddp_scripts` run.
"""

from __future__ import annotations

IMAGENET = """
import torch
import torch.nn.parallel
import torch.optim

def main_worker(gpu, args):
    model = models.resnet18()
    model.cuda(args.gpu)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], output_device=args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint['state_dict'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        scheduler.load_state_dict(checkpoint['scheduler'])
    print(sum(p.numel() for p in model.parameters()))
    save_on_master({'optimizer': optimizer.state_dict()})
    if args.rank == 0:
        validate(val_loader, model)
"""

EMA = """
import copy
import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

def train(net, data, rank):
    net = DistributedDataParallel(net, device_ids=[rank], static_graph=True, delay_all_reduce_named_params=None)
    ema = copy.deepcopy(net.module)
    with net.join():
        for x in data:
            net.module(x).sum().backward()
            net.module.sample(4)
    assert isinstance(net, (DataParallel, DistributedDataParallel))
"""

AMP = """
import torch
from torch.amp import GradScaler, autocast
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(Net().to(rank), [rank])
scaler = GradScaler("cuda")
older = torch.cuda.amp.GradScaler(enabled=half)
no_decay = [p for name, p in model.named_parameters() if p.ndim < 2]
with Join([model]):
    pass
if rank != 0:
    pass
elif rank == 0:
    torch.save(model.state_dict(), "x.pt")
"""

FSDP1_DOTTED = """
import torch
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap as wrapping
from torch.distributed.checkpoint.state_dict import get_state_dict, StateDictOptions
from torch.distributed.fsdp import fully_shard

model = torch.distributed.fsdp.FullyShardedDataParallel(Net(), auto_wrap_policy=wrapping.always_wrap_policy)
"""

PLAIN = """
import torch

model = torch.nn.Linear(2, 2)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if rank == 0:
    torch.save(model.state_dict(), "x.pt")
"""

SCRIPTS = {
    "imagenet": IMAGENET,
    "ema": EMA,
    "amp": AMP,
    "fsdp1-dotted": FSDP1_DOTTED,
    "plain": PLAIN,
}
