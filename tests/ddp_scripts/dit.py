"""A loop like DiT's: a moving average of the weights, copied before the model is wrapped, in each checkpoint."""

from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.ddp_scripts.model import Net, batch


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9):
    ema_params = OrderedDict(ema_model.named_parameters())
    model_params = OrderedDict(model.named_parameters())
    for name, param in model_params.items():
        ema_params[name].mul_(decay).add_(param.data, alpha=1 - decay)


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def main(steps, ckpt_every):
    rank, device, losses = dist.get_rank(), "cpu", []
    torch.manual_seed(0)
    model = Net()
    ema = deepcopy(model).to(device)
    requires_grad(ema, False)
    model = DDP(model.to(device))
    print(f"DiT Parameters: {sum(p.numel() for p in model.parameters()):,}")
    opt = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0)
    update_ema(ema, model.module, decay=0)
    model.train()
    ema.eval()
    for step in range(1, steps + 1):
        x, y = batch(step, rank, torch.float32)
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model.module)
        losses.append(loss.item())
        if step % ckpt_every == 0:
            if rank == 0:
                checkpoint = {
                    "model": model.module.state_dict(),
                    "ema": ema.state_dict(),
                    "opt": opt.state_dict(),
                }
                torch.save(checkpoint, f"{step:07d}.pt")
            dist.barrier()
            with torch.no_grad():
                losses.append(F.mse_loss(ema(x), y).item())
    return losses


if __name__ == "__main__":
    losses = main(steps=4, ckpt_every=2)
