"""The mean loss over all tokens, of which each rank and micro-batch has another number.

    torchrun --standalone --nproc-per-node 2 examples/token_mean.py

Sharding averages gradients over ranks, as DDP does, so each rank's mean counts as much as that of another rank, however
many tokens it is of. `fsdp.mean_factor` asks all ranks for their numbers once per step. The gradients are compared with
those of one process over all tokens.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel as FSDP

MICRO_BATCHES, WIDTH = 4, 16


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def micro_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and labels, of 2 to 32 tokens: the more, the higher the rank."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [2 * (rank + 1) * (number + 1) for number in range(MICRO_BATCHES)]
    inputs = [torch.randn(size, WIDTH, dtype=torch.float64, generator=generator) for size in sizes]
    return [(x, torch.randint(3, x.shape[:1], generator=generator)) for x in inputs]


def difference(factor_of_all: bool, expected: list[Tensor]) -> float:
    """Return the largest relative difference of a gradient from that of one process."""
    model = FSDP(make_model(), use_orig_params=True, device_id="cpu")
    batches = micro_batches(dist.get_rank())
    tokens = [len(labels) for _, labels in batches]
    factor = fsdp.mean_factor(model, tokens) if factor_of_all else 1 / sum(tokens)
    for number, (inputs, labels) in enumerate(batches):
        with nullcontext() if number == MICRO_BATCHES - 1 else model.no_sync():
            loss_sum = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            (loss_sum * factor).backward()
    found = [fsdp.full_grad(param) for param in model.parameters()]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True) if a is not None)


def main() -> None:
    dist.init_process_group("gloo")
    plain = make_model()
    inputs, labels = zip(
        *(batch for rank in range(dist.get_world_size()) for batch in micro_batches(rank)), strict=True
    )
    nn.functional.cross_entropy(plain(torch.cat(inputs)), torch.cat(labels)).backward()
    expected = [param.grad for param in plain.parameters() if param.grad is not None]
    means, exact = (difference(factor_of_all, expected) for factor_of_all in (False, True))
    if dist.get_rank() == 0:
        print(f"each rank divides by its own number of tokens: gradients differ from one process's by {means:.0%}")
        print(f"with fsdp.mean_factor they are the same, up to rounding: {exact < 1e-12}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
