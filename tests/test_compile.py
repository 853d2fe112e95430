"""torch.compile around, inside and between units: eager's numbers, and graph breaks only at the borders of units.

With `use_orig_params=False` torch's compiler leaves a unit's modules alone ("Dynamo only supports FSDP with
use_orig_params=True"), as under torch's FSDP1.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import on_ranks
from tests.harness.versions import needs

STEPS = 3  # the first compiles, the second sees optimizer state for the first time, the third must not compile


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build_plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(first=nn.Linear(5, 6), blocks=nn.Sequential(Block(), Block()), head=nn.Linear(6, 3))
    )


def build(way: str, backend: Any, use_orig_params: bool) -> Any:
    plain: Any = build_plain()
    if way == "blocks, then wrapped":
        for block in plain.blocks:
            block.compile(backend=backend)
    elif way == "model, then wrapped":
        plain = torch.compile(plain, backend=backend)
    model = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    if way == "wrapped, then blocks":
        for block in model.module.blocks:
            block.compile(backend=backend)
    elif way == "wrapped, then in place":
        model.compile(backend=backend)
    return torch.compile(model, backend=backend) if way == "wrapped, then compiled" else model


def train(model: Any) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
    """Return the loss of each step, and after it the compiler's counts: graphs, graph breaks, frames."""
    import torch._dynamo.utils as dynamo  # here, since this import is slow and would burden every test

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, counts = [], []
    for step in range(STEPS):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        counters = dynamo.counters
        frames = counters["frames"]["total"]
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), frames))
    return losses, counts


WAYS = [
    "wrapped, then compiled",
    "wrapped, then in place",
    "model, then wrapped",
    "blocks, then wrapped",
    "wrapped, then blocks",
]


WAYS_AND_MODES = [
    pytest.param(WAYS, True, id="orig"),
    pytest.param([WAYS[0], WAYS[3]], False, id="flat", marks=needs(2, 8, "refuses flat parameters")),
]


@pytest.mark.parametrize(("ways", "use_orig_params"), WAYS_AND_MODES)
@on_ranks(2, timeout=240)
def test_compiled_model_trains_as_in_eager_mode(ways: list[str], use_orig_params: bool) -> None:
    """Compile before and after wrapping, the model and its blocks, with aot_eager: equal bits, and one compilation."""
    import torch._dynamo

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler hides it
    eager, _ = train(build("eager", None, use_orig_params))
    for way in ways:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        losses, counts = train(build(way, "aot_eager", use_orig_params))
        case = f"{way}, use_orig_params={use_orig_params}: {counts}"
        assert all(torch.equal(a, b) for a, b in zip(losses, eager)), case
        assert counts[1:] == counts[1:2] * (STEPS - 1), f"compiled again, {case}"
        graphs, breaks, _ = counts[-1]
        assert graphs == (1 if use_orig_params else 0), case  # both blocks share one
        assert breaks <= 2, case  # at the border of the root, and in the loop over the blocks


@needs(2, 8, "rounds differently, or refuses flat parameters")
@on_ranks(2, timeout=240)
def test_training_step_may_be_one_compiled_function() -> None:
    """Forward, backward and optimizer are in one function; graph breaks are those of a plain model.

    The optimizer is SGD, because compiled Adam rounds differently for a plain model as well.
    """
    import torch._dynamo

    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")  # as torch imports its compiler
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for use_orig_params in (True, False):
        losses: dict[bool, list[Tensor]] = {}
        for compiled in (False, True):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model = build("eager", None, use_orig_params)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            run = torch.compile(step, backend="aot_eager" if use_orig_params else "eager") if compiled else step
            frames = []
            losses[compiled] = []
            for seed in range(STEPS):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
                losses[compiled].append(run(model, optimizer, x))
                frames.append(torch._dynamo.utils.counters["frames"]["total"])
            assert frames[1:] == frames[1:2] * (STEPS - 1), f"compiled again, {use_orig_params=}: {frames}"
        assert all(torch.equal(a, b) for a, b in zip(*losses.values())), use_orig_params


@on_ranks(2)
def test_a_policy_that_chooses_a_compiled_module_is_refused() -> None:
    """The compiled module would call the module and not its wrapper. Units inside of it are of no matter."""
    plain: Any = build_plain()
    plain.blocks[0] = torch.compile(plain.blocks[0], backend="eager")
    with pytest.raises(ValueError, match=r"'blocks\.0\._orig_mod' \(Block\).*module's own compile\(\)"):
        FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert not any(isinstance(module, FullyShardedDataParallel) for module in plain.modules())
    everything = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm, Block}))
    assert len(FullyShardedDataParallel.fsdp_modules(everything)) == 11


@on_ranks(2)
def test_code_after_a_backward_is_compiled() -> None:
    """Hooks of a backward run with the compiler off, and switch it on again."""
    import torch._dynamo

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph.code)
        return graph.forward

    def step(model: Any, x: Tensor) -> Tensor:
        model(x).square().mean().backward()
        return torch.erf(x)

    torch.compile(step, backend=backend)(build("eager", None, True), torch.ones(4, 5))
    assert any("erf" in code for code in compiled)


@on_ranks(2)
def test_ignored_modules_are_not_marked_for_the_compiler() -> None:
    model = build_plain()
    wrapped = FullyShardedDataParallel(model, ignored_modules=[model.blocks[1]], use_orig_params=True)
    marked = {name for name, module in wrapped.module.named_modules() if hasattr(module, "_is_fsdp_managed_module")}
    assert marked == {name for name, _ in model.named_modules() if not name.startswith("blocks.1")}
