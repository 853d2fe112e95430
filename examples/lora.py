"""Fine-tuning with low-rank adapters (LoRA, Hu et al., 2021) on a frozen base.

    torchrun --standalone --nproc-per-node 2 examples/lora.py

One unit may hold frozen and trained parameters; gradients, their reduction and optimizer state exist for the trained
ones alone. The base can be in bfloat16 while the adapters are in float32: each unit then has one flat vector per dtype.
The script prints the memory and traffic of both.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, describe, num_params
from fsdp.wrap import ModuleWrapPolicy


class Adapted(nn.Module):
    """A frozen linear layer, plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the adapted layer starts equal to the base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = Adapted(nn.Linear(width, 4 * width), rank)
        self.second = Adapted(nn.Linear(4 * width, width), rank)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(self.norm(x))))


def make_model(width: int = 128, depth: int = 4, rank: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width, rank) for _ in range(depth)), nn.Linear(width, 8))
    for name, param in model.named_parameters():
        trained = ".down." in name or ".up." in name
        param.requires_grad_(trained)
        if not trained:
            param.data = param.data.bfloat16()
    return model


def main() -> None:
    dist.init_process_group("gloo")
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=precision,
        use_orig_params=True,  # the optimizer sees the model's own parameters
        device_id="cpu",
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(dist.get_rank()))
    target = torch.randint(8, (32,), generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(20):
        loss = nn.functional.cross_entropy(model(x).float(), target)
        loss.backward()
        gradients = sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    parameters = sum(param.nbytes for param in model.parameters())
    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values() if value.dim())
    if dist.get_rank() == 0:
        print(f"{num_params(model):,} parameters; on this rank, in bytes:")
        print(f"parameters {parameters:,}, gradients {gradients:,}, optimizer state {state:,}")
        print(describe(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
