"""Optimizers of the package pytorch-optimizer, unmodified, on whole parameters; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from torch.optim import Optimizer

from tests.harness.pool import run_ranks
from tests.test_whole_params import PlainTwin, train_beside, whole, wrapped

OPTIONS: dict[str, dict[str, Any]] = {
    "SOAP": {"precondition_frequency": 2},
    "Shampoo": {"momentum": 0.9},
    "AdaFactor": {},
    "CAME": {"weight_decay": 0.1},
    "LARS": {},
    "Lamb": {},
    "Muon": {},
}


def train_with(name: str) -> None:
    import pytorch_optimizer

    def factory(params: list[Any]) -> Optimizer:
        given = [{"params": list(params), "use_muon": True}] if name == "Muon" else params
        made: Optimizer = getattr(pytorch_optimizer, name)(given, lr=0.02, **OPTIONS[name])
        return made

    for use_orig_params in (True, False):
        model = wrapped(use_orig_params)
        twin = PlainTwin(model, factory)
        train_beside(twin, model, whole(model, factory), 5, f"{name}, ")


@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch-optimizer is not installed")
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_unmodified_optimizers_of_a_library(name: str) -> None:
    """Bit for bit as in a plain model, over five steps, on three ranks."""
    run_ranks(3, train_with, name)
