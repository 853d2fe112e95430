"""A sharded tower on the late device beside the plain one on CPU, and helpers for the cases about it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import CPUOffload
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.device import lag
from tests.harness.twin import Twin

WIDTH = 32


class Block(nn.Module):
    """A residual block that raises in forward or in backward, as ``fail`` selects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fail: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fail == "forward":
            raise ValueError("in forward")
        y = torch.relu(self.inner(x))
        if self.fail == "backward" and torch.is_grad_enabled():
            y.register_hook(_raise)
        return x + self.outer(y)


def _raise(grad: Tensor) -> Tensor:
    raise ValueError("in backward")


class Pair(Twin):
    """A sharded tower on the device next to the plain one on CPU; all ranks have the same batch."""

    def __init__(self, device: torch.device, depth: int = 4, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        blocks = (Block() for _ in range(depth))
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 2)).double()
        policy = ModuleWrapPolicy({Block})
        model = FSDP(copy.deepcopy(plain), auto_wrap_policy=policy, device_id=device, **options)
        super().__init__(model, plain, self._loss_of, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), ranks=1)
        self.device = device
        self.steps = 0

    def _loss_of(self, model: nn.Module, step: int, rank: int) -> Tensor:
        x = self.batch(step)
        return model(x if model is self.plain else x.to(self.device)).square().mean()

    @property
    def blocks(self) -> list[Block]:
        return [module for module in self.model.modules() if type(module) is Block]

    def batch(self, step: int | None = None) -> Tensor:
        """Return the batch of a step, by default a new one."""
        if step is None:
            step, self.steps = self.steps, self.steps + 1
        generator = torch.Generator().manual_seed(step)
        return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)

    def backward(self, step: int | None = None, *, synchronise: bool = True) -> None:
        self.steps += 1
        with contextlib.nullcontext() if synchronise else self.model.no_sync():
            super().backward(self.steps - 1 if step is None else step)

    def step(self) -> None:
        self.zero_grad()
        self.backward()
        self.update()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def check(self, what: str = "", bound: float = 1e-9) -> str:
        return check_parameters(self.model, self.plain, bound)


def values_of(model: Any) -> dict[str, Tensor]:
    """Return the full parameters of a sharded model on CPU, by the plain model's names."""
    with FSDP.summon_full_params(model, writeback=False):
        named = model.named_parameters()
        return {name.replace("_fsdp_wrapped_module.", ""): value.detach().cpu() for name, value in named}


def check_parameters(model: Any, plain: nn.Module, bound: float = 1e-9) -> str:
    """Compare the parameters of both models; the largest difference in words."""
    values, expected = values_of(model), dict(plain.named_parameters())
    assert values.keys() == expected.keys(), (list(values), list(expected))
    worst, name = max(
        ((values[name].double() - value.detach().double()).abs().max().nan_to_num(nan=9e9).item(), name)
        for name, value in expected.items()
    )
    assert worst <= bound, f"{name} differs by {worst:.1e}"
    return f"differ by {worst:.0e}"


def offload(**more: Any) -> dict[str, Any]:
    return {"cpu_offload": CPUOffload(offload_params=True, **more)}


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.data.fill_(value)


@contextlib.contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Make ``stream`` the current one inside."""
    with lag.module.stream(stream):
        yield
