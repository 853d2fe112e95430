"""A loop like nanoGPT's: globals, `master_process`, `raw_model`, accumulation, a scaler and clipping."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.ddp_scripts.model import Block, batch


class Layer(Block):
    pass


class GPT(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.h = nn.ModuleList([Layer(width) for _ in range(2)])
        self.head = nn.Linear(width, 2)

    def forward(self, x, targets):
        for layer in self.h:
            x = layer(x)
        out = self.head(x)
        return out, F.mse_loss(out, targets)

    def configure_optimizers(self, weight_decay, learning_rate):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        groups = [{"params": decay_params, "weight_decay": weight_decay}, {"params": nodecay_params}]
        return torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0)


eval_interval, max_iters, gradient_accumulation_steps, grad_clip = 2, 4, 2, 0.1
init_from = "resume" if os.path.exists("ckpt.pt") else "scratch"
ddp = int(os.environ.get("RANK", -1)) != -1
ddp_rank = int(os.environ["RANK"]) if ddp else 0
master_process = ddp_rank == 0
torch.manual_seed(1337)
iter_num, losses = 0, []
if init_from == "scratch":
    model = GPT().double()
elif init_from == "resume":
    checkpoint = torch.load("ckpt.pt", map_location="cpu")
    model = GPT().double()
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
scaler = torch.amp.GradScaler("cpu", enabled=True)
optimizer = model.configure_optimizers(0.1, 0.05)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for number, split in enumerate(["train", "val"]):
        _, loss = model(*batch(1000 + number, ddp_rank))
        out[split] = loss.item()
    model.train()
    return out


raw_model = model.module if ddp else model
while iter_num < max_iters:
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.05 / (1 + iter_num)
    if iter_num % eval_interval == 0 and master_process:
        estimated = estimate_loss()
        print(f"step {iter_num}: train loss {estimated['train']:.4f}, val loss {estimated['val']:.4f}")
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
            }
            torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(*batch(10 * iter_num + micro_step, ddp_rank))
        scaler.scale(loss / gradient_accumulation_steps).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    if iter_num % 2 == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1
