"""A policy that chooses units and their options by hand.

    torchrun --standalone --nproc-per-node 2 examples/custom_policy.py

A unit is gathered and reduced as a whole, so modules that compute together belong together, and the largest unit sets
the peak of memory. `CustomPolicy` is called for each module: False leaves the module to the unit around it, True makes
it a unit, and a dict makes it a unit with arguments that differ from the root's.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy, describe
from fsdp.wrap import CustomPolicy


class Router(nn.Linear):
    """A layer that chooses between experts; the scores are sensitive to rounding."""


class Layer(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=-1).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + (outputs * weights.unsqueeze(-2)).sum(dim=-1)


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(2)))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def choose(module: nn.Module) -> bool | dict[str, object]:
    if isinstance(module, Router):  # small: full precision, and gathered once for forward and backward
        precision = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
        return {"mixed_precision": precision, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, Layer | nn.Embedding)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(Model(), auto_wrap_policy=CustomPolicy(choose), mixed_precision=precision, device_id="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        tokens = torch.randint(1000, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
