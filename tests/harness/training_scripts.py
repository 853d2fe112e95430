"""Small training scripts in common styles, for DistributedDataParallel and torch's FSDP1.

Scripts in `RUNNABLE` have a function `main(directory)` that trains in an existing process group and returns losses.
"""

from __future__ import annotations

COMMON = """import os
import torch
import torch.distributed as dist
from torch import nn


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(5, 6, generator=generator)

"""

HAND_WRITTEN = (
    COMMON
    + """
from torch.nn.parallel import DistributedDataParallel as DDP


def main(directory):
    rank = dist.get_rank()
    model = DDP(make_model(), device_ids=[rank] if torch.cuda.is_available() else None, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    path = os.path.join(directory, "hand_written.pt")
    for step in range(6):
        if step == 3:
            saved = torch.load(path)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 3 == 2:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()
    return losses
"""
)

TUTORIAL = (
    COMMON
    + """

class Trainer:
    def __init__(self, model, optimizer, local_rank, directory):
        self.local_rank = local_rank
        self.optimizer = optimizer
        self.path = os.path.join(directory, "snapshot.pt")
        self.model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def _save_snapshot(self, epoch):
        torch.save({"MODEL_STATE": self.state, "EPOCHS_RUN": epoch}, self.path)

    def train(self, epochs):
        losses = []
        for epoch in range(epochs):
            loss = self.model(batch(epoch)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.module.parameters(), max_norm=0.3)
            self.optimizer.step()
            losses.append(loss.item())
            if self.local_rank == 0:
                self.state = self.model.module.state_dict()
                self._save_snapshot(epoch)
        return losses


def main(directory):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, optimizer, dist.get_rank(), directory).train(4)
"""
)

FSDP1 = (
    COMMON
    + """
from functools import partial

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main(directory):
    policy = partial(size_based_auto_wrap_policy, min_num_params=20)
    model = FSDP(
        make_model(),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = model(batch(step)).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    full = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(full, os.path.join(directory, "fsdp1.pt"))
    return losses
"""
)

VISION = (
    COMMON
    + """
import torch.distributed.checkpoint.state_dict


def evaluate(model, steps):
    model.eval()
    with torch.no_grad():
        total = sum(model(batch(100 + step)).square().mean() for step in range(steps))
    model.train()
    return total


def main(directory):
    model = make_model()
    model_without_ddp = model
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    model_without_ddp = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for epoch in range(3):
        loss = model(batch(epoch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        losses.append(evaluate(model, 2).item())
        if dist.get_rank() == 0:
            torch.save(model_without_ddp.state_dict(), os.path.join(directory, "vision.pt"))
    return losses
"""
)

NANO = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group
from model import GPTConfig, GPT

class Optim:
    def configure_optimizers(self, weight_decay, lr):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        return torch.optim.AdamW([{'params': decay_params, 'weight_decay': weight_decay}], lr=lr)

@torch.no_grad()
def estimate_loss():
    model.eval()
    logits, loss = model(X, Y)
    return loss

ddp = int(os.environ.get('RANK', -1)) != -1
master_process = ddp_rank == 0
model = GPT(GPTConfig())
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == 'float16'))
optimizer = model.configure_optimizers(0.1, 6e-4)
if init_from == 'resume':
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module if ddp else model
while True:
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        if iter_num > 0:
            checkpoint = {'model': raw_model.state_dict(), 'optimizer': optimizer.state_dict()}
            torch.save(checkpoint, 'ckpt.pt')
    for micro_step in range(4):
        if ddp:
            model.require_backward_grad_sync = (micro_step == 3)
        logits, loss = model(X, Y)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
"""

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
model.register_comm_hook(None, hook)
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

RUNNABLE = {"hand-written": HAND_WRITTEN, "tutorial": TUTORIAL, "fsdp1": FSDP1, "vision": VISION}
SCRIPTS = {
    **RUNNABLE,
    "nano": NANO,
    "imagenet": IMAGENET,
    "ema": EMA,
    "amp": AMP,
    "fsdp1-dotted": FSDP1_DOTTED,
    "plain": PLAIN,
}
