"""A sharded exponential moving average of the weights.

    torchrun --standalone --nproc-per-node 2 examples/ema.py

The average of a sharded parameter is the average of the shards. So each rank averages the local shards without
communication, and no rank holds the full average. For evaluation and saving the shards and the averages are swapped.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy


class Average:
    """A running average: `decay` times the average so far plus 1 - `decay` times the new weights, at each `update`."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.params = list(model.parameters())
        self.values = [param.detach().clone() for param in self.params]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.values, self.params, 1 - self.decay)

    @torch.no_grad()
    def _swap(self) -> None:
        for param, value in zip(self.params, self.values, strict=True):
            kept = param.clone()
            param.copy_(value)
            value.copy_(kept)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()


def loss_on(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True).sin()).square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)), nn.Linear(16, 1))
    policy = ModuleWrapPolicy({nn.Sequential})
    model = FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    average = Average(model, decay=0.95)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        loss_on(model, torch.randn(4, 16, generator=data)).backward()  # a small batch: the weights are noisy
        optimizer.step()
        optimizer.zero_grad()
        average.update()

    held = torch.randn(2048, 16, generator=torch.Generator().manual_seed(100))
    with torch.no_grad():
        last = loss_on(model, held).item()
        with average.shown():
            averaged = loss_on(model, held).item()
            state = model.state_dict()  # the whole average, with the plain model's names
        again = loss_on(model, held).item()
    if dist.get_rank() == 0:
        print(f"loss of the last weights {last:.4f}, of their average {averaged:.4f}")
        print(f"the last weights are back: {last == again}; {len(state)} tensors of the average to save")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
