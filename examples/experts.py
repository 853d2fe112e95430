"""A mixture of experts: each of two groups of ranks has half of the experts, and all ranks have tokens of their own.

    torchrun --standalone --nproc-per-node 4 examples/experts.py

The model sends each token to the rank that has its expert. `fsdp.shard_experts` declares the experts, so that
gradients, their norm and checkpoints are those of one process with all experts and all tokens. The gradients are
compared with those.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel as FSDP

EXPERTS, WIDTH, TOKENS, EXPERT_RANKS = 8, 16, 64, 2


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """Apply to each row of `x` the expert of this number; every expert takes part, if only with no rows."""
        y, places = [], [(expert == number).nonzero().flatten() for number in range(len(self.up))]
        for up, down, rows in zip(self.up, self.down, places, strict=True):
            y.append(torch.relu(x[rows] @ up) @ down)
        return torch.cat(y)[torch.cat(places).argsort()]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(WIDTH, EXPERTS), Experts(EXPERTS), nn.Linear(WIDTH, 1)
        self.group: Any = None  # the ranks with other experts

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(dim=-1).max(dim=-1)
        order = expert.argsort(stable=True)
        y = self._sent(x[order], expert[order])[order.argsort()]
        return self.head(x + weight[:, None] * y)

    def _sent(self, x: Tensor, expert: Tensor) -> Tensor:
        """Return the outputs for rows that are sorted by expert, from the ranks that have these."""
        if self.group is None:
            return self.experts(x, expert)
        ranks = self.group.size()
        each = EXPERTS // ranks
        sends = torch.bincount(expert // each, minlength=ranks)
        gets = torch.empty_like(sends)
        dist.all_to_all_single(gets, sends, group=self.group)
        numbers, splits = expert.new_empty(int(gets.sum())), [gets.tolist(), sends.tolist()]
        dist.all_to_all_single(numbers, expert, *splits, group=self.group)
        y = self.experts(all_to_all(x, *splits, self.group), numbers - self.group.rank() * each)
        return all_to_all(y, *splits[::-1], self.group)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    plain, model = Mixture().double(), Mixture().double()
    model.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size() // EXPERT_RANKS, EXPERT_RANKS), mesh_dim_names=("dp", "ep"))
    model.group = mesh.get_group("ep")
    for name, param in list(model.experts.named_parameters()):  # this rank's experts
        mine = param.detach().chunk(EXPERT_RANKS)[mesh.get_local_rank("ep")]
        setattr(model.experts, name, nn.Parameter(mine.clone()))
    fsdp.shard_experts(model.experts, mesh["ep"])
    model.experts = FSDP(model.experts, device_mesh=mesh["dp"], use_orig_params=True, device_id="cpu")
    model = FSDP(model, use_orig_params=True, device_id="cpu")  # over all ranks
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    worst = 0.0
    for _ in range(20):
        x = torch.randn(dist.get_world_size(), TOKENS, WIDTH, dtype=torch.float64)  # the same on every rank
        loss = (model(x[dist.get_rank()]) - x[dist.get_rank()].prod(dim=-1, keepdim=True)).square().mean()
        loss.backward()
        everything = x.flatten(0, 1)
        (plain(everything) - everything.prod(dim=-1, keepdim=True)).square().mean().backward()
        for param, alone in zip(model.parameters(), plain.parameters(), strict=True):
            found = fsdp.full_grad(param)
            assert found is not None and alone.grad is not None
            worst = max(worst, float((found - alone.grad).norm() / alone.grad.norm()))
        model.clip_grad_norm_(1.0)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    shape = model.state_dict()["experts.up"].shape  # on all ranks
    if dist.get_rank() == 0:
        print(fsdp.describe(model))
        print(f"step 20: loss {loss.item():.3f}; {shape[0]} experts in the state dict")
        print(f"in all steps gradients equal those of one process, up to rounding: {worst < 1e-10}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
