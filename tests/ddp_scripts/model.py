"""The model of the scripts, as a file of its own."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(4, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x + self.pos_embed))


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, other ones for each step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(3, 4, size, generator=generator, dtype=dtype) for size in (6, 2))  # type: ignore[return-value]
