"""Muon on a sharded GPT: an unmodified optimizer of whole matrices, in which each matrix has one owner rank.

    torchrun --standalone --nproc-per-node 2 examples/muon.py

Muon orthogonalizes the momentum of a matrix, which it cannot do to a shard. `WholeParamOptimizer` brings each selected
matrix and its gradient to one rank, which steps it with the optimizer below, and returns the values to the shards. The
other parameters stay with AdamW. At the end the losses are compared with those of one unsharded process.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.optim import WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 64, 64, 16, 8, 20


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        settings: dict[str, Any] = {"dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al., 2024); `torch.optim.Muon` does the same in recent versions of torch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self.state[param]["average"] = torch.zeros_like(param)
                average = self.state[param]["average"].lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalized(param.grad.lerp(average, group["momentum"]))
                param.add_(update, alpha=-group["lr"] * max(1.0, param.shape[0] / param.shape[1]) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Move the singular values of `matrix` near 1, by five Newton-Schulz iterations."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def takes_muon(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("blocks.") and len(shape) == 2


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def batch(step: int) -> Tensor:
    """Return sequences in which each token follows from the one before, for all ranks together."""
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(step))]
    for _ in range(LENGTH):
        tokens.append((tokens[-1] * 5 + 3) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, ranks: int) -> list[Tensor]:
    """Train on this rank's part of each batch; return the losses."""
    losses = []
    for step in range(STEPS):
        tokens = batch(step)[rank::ranks]
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = FSDP(GPT(), auto_wrap_policy=policy, use_orig_params=True, device_id="cpu")
    optimizer = WholeParamOptimizer(model, Muon, select=takes_muon, rest=adamw)
    losses = torch.stack(train(model, [optimizer], rank, ranks))
    dist.all_reduce(losses)
    losses /= ranks

    torch.manual_seed(0)
    plain = GPT()
    matrices = [param for name, param in plain.named_parameters() if takes_muon(name, tuple(param.shape))]
    others = [param for name, param in plain.named_parameters() if not takes_muon(name, tuple(param.shape))]
    expected = torch.stack(train(plain, [Muon(matrices), adamw(others)], 0, 1))
    if rank == 0:
        for step in range(4, STEPS, 5):
            print(f"step {step + 1}: loss {losses[step]:.3f}, of one process {expected[step]:.3f}")
        # float32 sums of the gradients are in another order
        same = torch.allclose(losses, expected, rtol=1e-3)
        held = sum(each["average"].numel() for each in optimizer.state.values() if "average" in each)
        print(f"the same losses: {same}; this rank owns {held:,} of {sum(p.numel() for p in matrices):,} elements")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
