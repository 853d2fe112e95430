"""Mixed precision: the plain model that is cast alike, and a wrapped model beside it."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from fsdp import MixedPrecision, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import assert_local_gradients, assert_local_parameters
from tests.harness.oracle import assert_bit_equal, named_parameters
from tests.harness.sharded import wrap
from tests.harness.twin import Twin

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def reduced(grads: list[Tensor]) -> Tensor:
    """Return the mean over ranks in the gradients' dtype; float16 is divided before and after."""
    size, dtype = len(grads), grads[0].dtype
    factor = 1
    while dtype == FP16 and size % factor == 0 and size / factor > factor:
        factor *= 2
    wide = FP32 if dtype.itemsize == 2 else dtype
    total = grads[0].div(factor).to(wide)
    for grad in grads[1:]:
        total = total + grad.div(factor)
    return total.to(dtype).div_(size / factor)


WIDTH = 7


class Block(nn.Module):
    """Records compute dtypes. The buffer is part of a matrix product, which refuses mixed dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turn", torch.eye(WIDTH).roll(1, 0) * 0.5)  # exact in every dtype
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {x.dtype, self.turn.dtype, self.linear.weight.dtype}
        assert self.calls.dtype == torch.int64
        return x + torch.tanh(self.linear(x) @ self.turn)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(OrderedDict(blocks=nn.Sequential(Block(), Block()), head=nn.Linear(WIDTH, 5)))

    def seen(self) -> set[torch.dtype]:
        """Return the compute dtypes of the blocks since the last call."""
        found = set[torch.dtype]()
        for block in self.blocks:
            found |= getattr(block, "module", block).seen
            getattr(block, "module", block).seen = set()
        return found


class Pair(Twin):
    """A wrapped model, the plain model in the parameters' dtype, and inputs of every rank."""

    def __init__(
        self,
        strategy: ShardingStrategy,
        use_orig_params: bool,
        precision: MixedPrecision | None = None,
        dtype: torch.dtype = FP32,
        **options: Any,
    ) -> None:
        self.precision = precision or MixedPrecision(BF16, buffer_dtype=BF16)
        torch.manual_seed(0)
        self.net = Net().to(dtype)
        plain = deepcopy(self.net)
        options.setdefault("wrap_policy", ModuleWrapPolicy({Block}))
        model = wrap(self.net, strategy, use_orig_params, mixed_precision=self.precision, **options)
        super().__init__(model, plain, self._loss_of, lambda module: SGD(module.parameters(), 0.125))
        self._generator = torch.Generator().manual_seed(1)

    def _loss_of(self, model: nn.Module, step: int, rank: int) -> Tensor:
        raise NotImplementedError("the plain model runs as a replica in another dtype: see `run`")

    def inputs(self) -> list[Tensor]:
        """Return a new batch for each rank."""
        dtype = next(self.plain.parameters()).dtype
        return [torch.randn(3, WIDTH, generator=self._generator).to(dtype) for _ in range(dist.get_world_size())]

    def run(self, x: Tensor, dtype: torch.dtype | None) -> tuple[nn.Module, Tensor]:
        """Return a replica in `dtype` (None: dtype of the parameters) and the output of a forward."""
        replica = deepcopy(self.plain).to(dtype)
        replica.zero_grad()
        return replica, replica(x.to(next(replica.parameters()).dtype))

    def outputs(self, inputs: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """Return the expected output of each rank in `dtype`."""
        return [self.run(x, dtype)[1] for x in inputs]

    def gradients(self, inputs: list[Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the mean over ranks for one micro-batch, in the parameters' dtype."""
        return self.mean([self.local_gradients(x, dtype) for x in inputs])

    def local_gradients(self, x: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return one rank's gradients in the reduce dtype."""
        replica, output = self.run(x, dtype)
        loss_of(output).backward()
        reduce = None if dtype is None else self.precision.reduce_dtype
        return {name: p.grad.to(reduce or p.dtype) for name, p in named_parameters(replica).items()}  # type: ignore[union-attr]

    def mean(self, by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        params = named_parameters(self.plain)
        return {name: reduced([grads[name] for grads in by_rank]).to(p.dtype) for name, p in params.items()}

    def step(self, case: str, dtype: torch.dtype | None = BF16) -> None:
        """Train both one step and compare output, gradients and shards."""
        inputs = self.inputs()
        output = self.model(inputs[dist.get_rank()])
        same(output, self.outputs(inputs, dtype)[dist.get_rank()], case)
        loss_of(output).backward()
        grads = self.gradients(inputs, dtype)
        assert_local_gradients(self.model, grads, 0, case)
        for param, grad in zip(self.plain.parameters(), grads.values(), strict=True):
            param.grad = grad
        self.update()
        self.zero_grad()
        assert_local_parameters(self.model, dict(named_parameters(self.plain)), 0, case)

    def check_output(self, case: str, dtype: torch.dtype | None = BF16) -> None:
        """Compare a forward without gradients with the reference."""
        inputs = self.inputs()
        with torch.no_grad():
            output = self.model(inputs[dist.get_rank()])
            same(output, self.outputs(inputs, dtype)[dist.get_rank()], case)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def same(actual: Tensor, expected: Tensor, case: str) -> None:
    __tracebackhide__ = True
    assert_bit_equal({"output": actual.detach()}, {"output": expected.detach()}, case)


def by_foreach(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(params, 0.96875)
