"""Training steps without sharding, and comparisons that name differences.

`run_plain` trains the plain model in one process, in one of two orders of arithmetic:

* `order="ranks"`: each rank's batch goes through the model separately, gradients are summed in rank order 0..N-1 and
  the sum is divided by N. An implementation that does the same, on equal shapes, agrees bit for bit.
* `order="batch"`: one pass over the concatenated batch. The sums inside the kernels associate differently, so
  agreement is within rounding: compare in float64, with `assert_equivalent`.

`run_ddp` trains under torch's DistributedDataParallel, inside rank processes.

All three see the same batches (`rank_batch`) and return one `Step` per optimizer step.

[Note: Bounds] The rounding error of a sum is proportional to the magnitudes of the terms, not to the result after
cancellation, and depends on the order of the processor's kernels. So no bound counts units of a result that can cancel.
There are three comparisons:

* `assert_bit_equal` where both sides do the same arithmetic on the same shapes;
* `assert_close_ulp` with `summed`, the sum of the terms' magnitudes, where the terms are known and only the order of
  their sum differs: n terms summed in any order are within (n - 1) / 2 units of it (Higham, Accuracy and Stability of
  Numerical Algorithms, 4.2), and a division by n adds half of one;
* `assert_equivalent` where whole computations differ: both run in float64, and rounding, however badly conditioned the
  sums, stays far below the bound, and every mistake far above it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from tests.harness.models import Batch, Case, SegmentBlock

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Tensors = Mapping[str, Tensor | None]


def sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


def sgd_of_halves(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with factors that are powers of two: products are exact, so each operation of a step rounds once.

    A kernel may fuse a multiplication and an addition in the vectorized body and not in the tail, and in low
    precision round the product or not. An element of a shard has another position than in the full parameter. These
    factors make both round alike.
    """
    return SGD(params, lr=0.125, momentum=0.5, weight_decay=0.0078125)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw}


@dataclass
class Schedule:
    """Length and batches of a training: `micro` batches of `batch` samples per rank and optimizer step.

    Gradients are summed (not averaged) over micro-batches: locally before one reduction, as under `no_sync`, or with
    `reduce_each` after a reduction of each.
    """

    steps: int = 10
    batch: int = 2
    micro: int = 1
    reduce_each: bool = False
    seed: int = 0


@dataclass
class Step:
    """One optimizer step. Tensors are copies in full shapes, by the plain model's parameter names.

    `loss` and `rank_losses` belong to the last micro-batch. `grads` are the gradients at the optimizer's step, None
    where a parameter has none. `params`, `optim` and `buffers` are values after the step; buffers are rank 0's.
    `summed` are gradients of magnitudes, from `run_plain` in rank order.
    """

    loss: Tensor
    rank_losses: list[Tensor]
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]
    optim: dict[str, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    summed: dict[str, Tensor | None] = field(default_factory=dict)

    def parts(self, without: tuple[str, ...] = (), by_rank: bool = True) -> dict[str, Tensors]:
        """Return the values to compare, grouped by kind and magnitude, without names of these prefixes."""
        state = flatten_state(self.optim)
        groups: dict[str, Tensors] = {
            "losses": {str(rank): loss for rank, loss in enumerate(self.rank_losses)} if by_rank else {},
            "loss": {"mean": self.loss},
            "gradients": self.grads,
            "parameters": self.params,
            "buffers": self.buffers,
        }
        for key in sorted({name.rpartition("/")[2] for name in state}):
            groups[f"optimizer state {key}"] = {n: value for n, value in state.items() if n.endswith(f"/{key}")}
        return {
            group: {name: value for name, value in part.items() if not name.startswith(without or ("//",))}
            for group, part in groups.items()
        }


def rank_batch(case: Case, schedule: Schedule, step: int, micro: int, rank: int, world_size: int) -> Batch:
    """Return one rank's samples: this rank's part of the concatenated batch."""
    whole = whole_batch(case, schedule, step, micro, world_size)
    return whole.slice(rank * schedule.batch, (rank + 1) * schedule.batch)


def whole_batch(case: Case, schedule: Schedule, step: int, micro: int, world_size: int) -> Batch:
    seed = 1_000_000 * schedule.seed + 1000 * step + micro
    return case.make_batch(seed, schedule.batch * world_size)


# -- the references ----------------------------------------------------------------------------------------------


def run_plain(
    case: Case,
    make_optimizer: MakeOptimizer,
    world_size: int,
    schedule: Schedule | None = None,
    *,
    order: Literal["ranks", "batch"] = "ranks",
    dtype: torch.dtype = torch.float32,
    zero_grads: Collection[str] = (),
    shard_size: int | None = None,
) -> list[Step]:
    """Train the plain model as `world_size` ranks would.

    With `shard_size`, `order="ranks"` sums gradients within groups of consecutive ranks first, as hybrid sharding
    does. Parameters in `zero_grads` get zeros instead of no gradient, as unused members of a used unit do, so that
    weight decay and momentum move them.
    """
    schedule = schedule or Schedule()
    if order == "batch" and case.local_statistics:
        raise ValueError(f"{case.name} uses statistics of the local batch: only order='ranks' is a reference")
    # One copy of the model per rank, since buffers are per rank; rank 0's holds the optimizer.
    first = case.build(schedule.seed, dtype)
    replicas = [first, *(deepcopy(first) for _ in range(world_size - 1))] if order == "ranks" else [first]
    optimizer = make_optimizer(first.parameters())
    steps = []
    for step in range(schedule.steps):
        totals: dict[str, Tensor | None] = dict.fromkeys(named_parameters(first))
        summed: dict[str, Tensor | None] = dict(totals)
        for micro in range(schedule.micro):
            if order == "batch":
                batches = [whole_batch(case, schedule, step, micro, world_size)]
            else:
                batches = [rank_batch(case, schedule, step, micro, r, world_size) for r in range(world_size)]
            losses = []
            for replica, batch in zip(replicas, batches, strict=True):
                loss = case.loss(replica, batch.to(dtype))
                loss.backward()
                losses.append(loss.detach())
            if schedule.reduce_each or micro == schedule.micro - 1:
                for name, found in mean_gradients(replicas, shard_size or world_size).items():
                    if found is not None:
                        for sums, value in zip((totals, summed), found):
                            before = sums[name]
                            sums[name] = value if before is None else before + value
        for name, param in named_parameters(first).items():
            param.grad = totals[name]
            if param.grad is None and name in zero_grads:
                summed[name] = param.grad = torch.zeros_like(param)
        grads = named_grads(first)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for replica in replicas[1:]:
                for ours, theirs in zip(replica.parameters(), first.parameters(), strict=True):
                    ours.copy_(theirs)
        steps.append(replace(_record(first, optimizer, losses, grads), summed=summed))
    return steps


def mean_gradients(replicas: list[nn.Module], shard_size: int) -> dict[str, tuple[Tensor, Tensor] | None]:
    """Return gradients averaged in the order of the replicas, with means of their magnitudes; clear the replicas'
    gradients.

    Groups of `shard_size` are summed first. 16-bit gradients are summed in float32. A missing gradient of some
    replicas counts as zero.
    """
    per_replica = [named_parameters(replica) for replica in replicas]
    means: dict[str, tuple[Tensor, Tensor] | None] = {}
    for name, param in per_replica[0].items():
        grads = [params[name].grad for params in per_replica]
        for params in per_replica:
            params[name].grad = None
        if all(grad is None for grad in grads):
            means[name] = None
            continue
        wide = torch.float32 if param.dtype.itemsize == 2 else param.dtype
        dense = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        filled = [torch.zeros_like(param, dtype=wide) if grad is None else grad.to(wide) for grad in dense]
        sums = []
        for first in range(0, len(filled), shard_size):
            sums.append(filled[first].clone())
            for grad in filled[first + 1 : first + shard_size]:
                sums[-1] += grad
        total = sums[0]
        for other in sums[1:]:
            total += other
        magnitudes = torch.stack([torch.view_as_real(g) if g.is_complex() else g for g in filled]).abs().sum(0)
        magnitudes = torch.view_as_complex(magnitudes) if total.is_complex() else magnitudes
        means[name] = (total.detach() / len(replicas)).to(param.dtype), (magnitudes / len(replicas)).detach()
    return means


def run_ddp(
    case: Case, make_optimizer: MakeOptimizer, schedule: Schedule | None = None, *, dtype: torch.dtype = torch.float32
) -> list[Step]:
    """Train under DDP on the default group; ranks return equal results except for buffers.

    DDP divides by the number of ranks before it sums. So it equals `order="ranks"` bit for bit only on 1 and 2
    ranks, and not with `reduce_each`, where it reduces the sum of the earlier reduced gradient and the new one.
    """
    schedule = schedule or Schedule()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = case.build(schedule.seed, dtype)
    for block in module.modules():
        if isinstance(block, SegmentBlock) and block.segment == "reentrant":
            block.segment = "non-reentrant"  # same arithmetic; with unused parameters DDP accepts only this
    keywords = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = {next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in keywords): False}
    ddp = DistributedDataParallel(module, find_unused_parameters=bool(case.unused), **buffers)
    optimizer = make_optimizer(module.parameters())
    steps = []
    for step in range(schedule.steps):
        for micro in range(schedule.micro):
            last = schedule.reduce_each or micro == schedule.micro - 1
            with nullcontext() if last else ddp.no_sync():
                loss = case.loss(ddp, rank_batch(case, schedule, step, micro, rank, world_size).to(dtype))
                loss.backward()
        grads = named_grads(module)
        optimizer.step()
        optimizer.zero_grad()
        losses = [torch.zeros_like(loss) for _ in range(world_size)]
        dist.all_gather(losses, loss.detach())
        steps.append(_record(module, optimizer, losses, grads))
    return steps


def _record(module: nn.Module, optimizer: Optimizer, losses: list[Tensor], grads: dict[str, Tensor | None]) -> Step:
    return Step(
        loss=mean_loss(losses),
        rank_losses=losses,
        grads=grads,
        params={name: param.detach().clone() for name, param in named_parameters(module).items()},
        optim=named_optim_state(module, optimizer),
        buffers={name: buffer.clone() for name, buffer in module.named_buffers()},
    )


def mean_loss(losses: list[Tensor]) -> Tensor:
    """Return the mean over ranks, summed in rank order."""
    total = losses[0].clone()
    for loss in losses[1:]:
        total += loss
    return total / len(losses)


# -- reading a module --------------------------------------------------------------------------------------------

_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """Return a parameter's name in the plain model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name; a shared parameter has its first name."""
    return {clean_name(name): param for name, param in module.named_parameters()}


def named_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of the gradients by clean name."""
    params = named_parameters(module).items()
    return {name: None if param.grad is None else param.grad.detach().clone() for name, param in params}


def named_optim_state(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return copies of the optimizer's state by clean name, without parameters that have no state."""
    state: dict[str, dict[str, Tensor]] = {}
    for name, param in named_parameters(module).items():
        if optimizer.state.get(param):
            values = optimizer.state[param].items()
            state[name] = {key: torch.as_tensor(value).detach().clone() for key, value in values if value is not None}
    return state


def flatten_state(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Convert `{"weight": {"exp_avg": t}}` to `{"weight/exp_avg": t}`."""
    return {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}


# -- comparisons -------------------------------------------------------------------------------------------------


def assert_same_steps(
    actual: list[Step],
    expected: list[Step],
    what: str = "",
    *,
    same_order: bool = True,
    without: tuple[str, ...] = (),
    by_rank: bool = True,
) -> None:
    """Assert that all values are bit-equal, or equivalent if sums have another order. Only rank 0 must have steps."""
    __tracebackhide__ = True
    assert actual or dist.get_rank() > 0
    for index, steps in enumerate(zip(actual, expected, strict=True)):
        ours, theirs = (step.parts(without, by_rank) for step in steps)
        assert list(ours) == list(theirs), f"{what}, step {index}"
        for group in theirs:
            compare = assert_bit_equal if same_order else assert_equivalent
            compare(ours[group], theirs[group], f"{what}, step {index}, {group}")


def assert_bit_equal(actual: Tensors, expected: Tensors, what: str = "") -> None:
    """Assert equal names, Nones, shapes, dtypes and bits (so -0.0 is not 0.0)."""
    __tracebackhide__ = True
    _assert_comparable(actual, expected, what)
    wrong = []
    for name, value in expected.items():
        other = actual[name]
        if value is not None and other is not None:
            bits, wanted = _bytes(other), _bytes(value)
            if not torch.equal(bits, wanted):
                different = (bits != wanted).view(-1, value.element_size()).any(dim=1)
                wrong.append(f"{name}: {int(different.sum())} of {value.numel()} differ, {_worst(other, value)}")
    _fail_if(wrong, len(expected), what, "not bit-equal")


def assert_close_ulp(
    actual: Tensors, expected: Tensors, ulps: float, what: str = "", *, summed: Tensors | None = None
) -> None:
    """Assert equal names, Nones, shapes and dtypes, and values within `ulps` units in the last place.

    The unit is that of the tensor's largest magnitude, eps(dtype) * 2**floor(log2(max |x|)), in `actual`'s dtype.
    The magnitude is that of `expected`, or of `summed`, the sums of the terms' magnitudes, where sums can cancel
    ([Note: Bounds]). A tensor of zeros must be zeros. NaN and infinities are never close. `expected` may be float64.
    """
    __tracebackhide__ = True
    _assert_comparable(actual, expected, what, same_dtype=False)
    wrong = []
    for name, value in expected.items():
        other, terms = actual[name], (summed or expected)[name]
        if value is None or other is None or value.numel() == 0:
            continue
        error = (other.double() - value.double()).abs().max()
        unit = ulp(value if terms is None else terms, other.dtype)
        if not error <= ulps * unit:
            wrong.append(f"{name}: off by {float(error / unit):.1f} ulp, allowed {ulps:g}, {_worst(other, value)}")
    _fail_if(wrong, len(expected), what, f"not within {ulps:g} ulp")


def assert_equivalent(actual: Tensors, expected: Tensors, what: str = "") -> None:
    """Assert equal names, Nones, shapes and dtypes; float64 values may differ by rounding, further values must be
    equal.

    An element may differ by 2**-23 of the tensor's largest magnitude (one unit of float32). Rounding is at most
    2**-53 times the number of terms times the condition of their sum. That leaves 2**30 for both: a million for
    cancellation where a thousand terms are summed. Values that cancel entirely, such as the gradient of a key's bias
    in attention, are only rounding: every element may differ by 2**-40 of the largest magnitude in `expected`.
    """
    __tracebackhide__ = True
    _assert_comparable(actual, expected, what)
    largest = max((_largest(value) for value in expected.values() if value is not None), default=0.0)
    wrong = []
    for name, value in expected.items():
        other = actual[name]
        if value is None or other is None or value.numel() == 0:
            continue
        error = float((other.double() - value.double()).abs().max())
        is_computed = value.dtype == torch.float64
        allowed = 2.0**-23 * _largest(value) + 2.0**-40 * largest if is_computed else 0.0
        if not error <= allowed:
            wrong.append(f"{name}: off by {error:.3g}, allowed {allowed:.3g}, {_worst(other, value)}")
    _fail_if(wrong, len(expected), what, "not equivalent")


def _largest(value: Tensor) -> float:
    return float(value.detach().double().abs().max()) if value.numel() else 0.0


def ulp(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unit in the last place, for `dtype`, of the largest magnitude in `expected` (float64, 0-d)."""
    largest = expected.detach().double().abs().max()
    exponent = torch.frexp(largest).exponent - 1  # frexp's mantissa is in [0.5, 1)
    unit = torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps
    return torch.where(largest > 0, torch.ldexp(torch.tensor(unit, dtype=torch.float64), exponent), 0.0)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _assert_comparable(actual: Tensors, expected: Tensors, what: str, same_dtype: bool = True) -> None:
    __tracebackhide__ = True
    missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    wrong = [f"{name}: missing" for name in missing] + [f"{name}: not expected" for name in extra]
    for name in sorted(set(expected) & set(actual)):
        ours, theirs = actual[name], expected[name]
        if ours is None or theirs is None:
            if ours is not theirs:
                wrong.append(f"{name}: {'None' if ours is None else 'a tensor'}, expected the opposite")
        elif ours.shape != theirs.shape or (same_dtype and ours.dtype != theirs.dtype):
            wrong.append(f"{name}: {tuple(ours.shape)} {ours.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}")
    _fail_if(wrong, len(expected), what, "not comparable")


def _worst(actual: Tensor, expected: Tensor) -> str:
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf")).flatten()
    flat = int(difference.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    at = f"at {index} " if index else ""
    ours, theirs = actual.flatten()[flat].item(), expected.flatten()[flat].item()
    return f"worst {at}{ours!r}, expected {theirs!r} (difference {ours - theirs:.3g})"


def _fail_if(wrong: list[str], total: int, what: str, verdict: str) -> None:
    __tracebackhide__ = True
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong[:8]) + ("\n  ..." if len(wrong) > 8 else "")
        raise AssertionError(f"{what + ': ' if what else ''}{len(wrong)} of {total} {verdict}:{lines}")
