"""`ShardedGradScaler`: all ranks skip the same steps and have the same scale, wherever an infinity occurs."""

from __future__ import annotations

import collections
import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.optim import SGD, Adam

from fsdp import MixedPrecision
from fsdp.sharded_grad_scaler import ShardedGradScaler
from tests.harness.models import ZOO
from tests.harness.oracle import Schedule, assert_bit_equal, clean_name, rank_batch, sgd
from tests.harness.passes import HostReads
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_parameters, wrap
from tests.harness.small import torchs
from tests.harness.strategies import FULL, NONE

CASE = ZOO["mlp"]
SCHEDULE = Schedule(steps=8)


class SingleRankGroup:
    """A stand-in for a group of one rank, with rank and size only."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def single_rank_scaler(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler(device="cpu", process_group=SingleRankGroup(), **options)


def param_with(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return param


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return CASE.loss(model, rank_batch(CASE, SCHEDULE, step, 0, rank, dist.get_world_size()))


# -- one process -----------------------------------------------------------------------------------------------------


def test_signature_equals_torchs() -> None:
    """Names, order and defaults."""
    ours, theirs = inspect.signature(ShardedGradScaler), inspect.signature(TorchScaler)
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        if name != "process_group":
            assert ours.parameters[name].default == parameter.default
    assert issubclass(ShardedGradScaler, torch.amp.GradScaler)


def test_scale_keeps_dtypes_and_nests() -> None:
    scaler = single_rank_scaler(init_scale=4.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for loss in (torch.tensor(1.5, dtype=dtype), torch.ones(3, dtype=dtype)):
            scaled = scaler.scale(loss)
            assert scaled.dtype == dtype and torch.equal(scaled, loss * 4)
    Pair = collections.namedtuple("Pair", "a b")
    one, two = torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float16)
    nest = scaler.scale([one, (two, [one]), Pair(one, two)])
    assert nest == [4, (8, [4]), Pair(4, 8)] and type(nest[2]) is Pair and nest[1][0].dtype == torch.float16
    lazily = scaler.scale(iter([one, [two]]))
    assert isinstance(lazily, Iterator) and list(lazily) == [4, [8]]
    with pytest.raises(ValueError, match="must be a Tensor or an iterable of Tensors, got int"):
        scaler.scale([one, 3])
    with pytest.raises(AssertionError, match=r"Expected outputs on a supported device .*cuda.*, got meta"):
        scaler.scale(torch.empty(1, device="meta"))


def test_disabled_scaler_changes_nothing() -> None:
    """Without CUDA the default device disables the scaler with torch's warning."""
    scalers = [ShardedGradScaler(device="cpu", enabled=False)]
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"):
            scalers.append(ShardedGradScaler())
    for scaler in scalers:
        loss = object()
        param = param_with(torch.tensor([2.0]))
        optimizer = SGD([param], lr=1.0)
        assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and not scaler.is_enabled()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert param.item() == -2.0 and scaler.state_dict() == {}


def test_sparse_gradients_are_coalesced_before_the_check() -> None:
    """Sums of duplicate float16 entries may overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: sparse invariants are not checked
        scaler = single_rank_scaler(init_scale=2.0)
        inverse, zero = torch.full((1,), 0.5), torch.zeros(1)
        indices = torch.tensor([[0, 2, 0]])
        for dtype in (torch.float16, torch.float32):
            for values, found in (([1.0, 2.0, 3.0], 0.0), ([1.0, math.inf, 3.0], 1.0), ([6e4, 1.0, 6e4], None)):
                grad = torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (3,))
                param = nn.Parameter(torch.zeros(3, dtype=dtype))
                param.grad = grad.clone()
                flags = scaler._unscale_grads_(SGD([param], lr=1.0), inverse, zero)
                overflow = float(dtype == torch.float16)
                assert list(flags) == [torch.device("cpu")]
                assert flags[torch.device("cpu")].item() == (overflow if found is None else found)
                assert zero.item() == 0
                if found == 0:
                    assert torch.equal(param.grad.to_dense(), grad.float().to_dense().to(dtype) / 2)


# -- several ranks ---------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_infinity_on_one_rank_skips_the_step_on_all(world_size: int) -> None:
    """Infinity or NaN in the rank's own part of a gradient, also on all ranks, and with fused optimizers."""
    rank = dist.get_rank()
    for strategy, orig in ((FULL, True), (FULL, False), (NONE, True)):
        for fused in (False, True) if world_size == 2 else (orig,):
            model = wrap(CASE, strategy, orig)
            optimizer = Adam(model.parameters(), lr=0.1, fused=fused)
            scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, growth_interval=100)
            scale = 1024.0
            for step, bad in enumerate((math.nan, None, math.inf, -math.inf)):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                if bad is not None and (rank == step % world_size or step == 2):
                    model._fsdp_unit.views[0].grad_parts()[0].view(-1)[-1] = bad
                before = [param.detach().clone() for param in model.parameters()]
                if step == 3 and not fused:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                after = [param.detach().clone() for param in model.parameters()]
                scale *= 1.0 if bad is None else 0.5
                assert scaler.get_scale() == scale
                same = all(torch.equal(new, old) for new, old in zip(after, before, strict=True))
                assert same is (bad is not None), f"{strategy}, {orig}, fused={fused}, step {step}"


@on_ranks(2)
def test_one_collective_and_no_host_synchronization() -> None:
    """One all-reduce per optimizer at unscaling. The host reads values only in `step`, never with fused optimizers."""
    for fused in (False, True):
        model = wrap(CASE, FULL)
        optimizer = Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = ShardedGradScaler(device="cpu", init_scale=8.0)
        scaler.scale(loss_of(model, 0)).backward()
        with record_collectives() as log, HostReads() as reads:
            if not fused:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(1.0)
                assert log.labels() == ["agree on infinite gradients", "sum up the gradient norm"]
            else:
                scaler._check_inf_per_device(optimizer)
                assert log.labels() == ["agree on infinite gradients"]
        assert log.ops() == ["all_reduce"] * (1 if fused else 2) and reads.count == 0
        with record_collectives() as log:
            if not fused:
                scaler.step(optimizer)
            with HostReads() as reads:
                scaler.update()
        assert log.ops() == [] and reads.count == 0


@on_ranks(3)
def test_ranks_without_gradients_take_part() -> None:
    """One element on three ranks: two ranks hold padding or no elements."""
    for orig in (True, False):
        model = wrap(nn.Linear(1, 1, bias=False), FULL, orig, wrap_policy=None)
        optimizer = SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(device="cpu", init_scale=2.0)
        for bad, scale in ((False, 2.0), (True, 1.0)):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum() * (math.inf if bad else 1.0)).backward()
            (before,) = full_parameters(model).values()
            scaler.step(optimizer)
            scaler.update()
            (after,) = full_parameters(model).values()
            assert torch.equal(after, before - (0.0 if bad else 1.0)) and scaler.get_scale() == scale


@on_ranks(2)
def test_agreement_is_limited_to_the_process_group() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    own_group = groups[dist.get_rank()]
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0, process_group=own_group)
    assert scaler.process_group is own_group
    param = param_with(torch.tensor([math.inf if dist.get_rank() else 2.0]))
    scaler.scale(torch.tensor(1.0))
    scaler.step(SGD([param], lr=1.0))
    scaler.update()
    assert (param.item(), scaler.get_scale()) == ((0.0, 1.0) if dist.get_rank() else (-1.0, 2.0))
    dist.destroy_process_group(own_group)


@on_ranks(2)
def test_float16_training_finds_its_scale() -> None:
    """All ranks skip steps until float16 gradients are finite; then the loss falls."""
    for orig in (True, False):
        model = wrap(CASE, FULL, orig, mixed_precision=MixedPrecision(param_dtype=torch.float16))
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler(device="cpu", init_scale=2.0**24)
        start = full_parameters(model)
        losses, scales = [], []
        for _ in range(24):
            loss = loss_of(model, 0)
            scaler.scale(loss).backward()
            scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            if scaler.get_scale() < scales[-1]:
                assert_bit_equal(full_parameters(model), start)
        assert scales[-1] < 2.0**24 and scales[-1] == scales[-2]
        assert losses[-1] < 0.9 * losses[0]
        assert of_all_ranks(scales) == [scales, scales]


@on_ranks(2)
def test_training_equals_torchs_fsdp_and_a_plain_scaler() -> None:
    """Eight steps with an overflow in the fourth. Scales are powers of two, so results are bit-equal."""
    for orig in (True, False):
        ours = wrap(CASE, FULL, orig)
        theirs = torchs(CASE.build(), blocks=CASE.blocks, use_orig_params=orig)
        plain = CASE.build()
        options: dict[str, Any] = {"init_scale": 2.0**8, "growth_interval": 2}
        scalers = (
            ShardedGradScaler(device="cpu", **options),
            TorchScaler(device="cpu", **options),
            torch.amp.GradScaler("cpu", **options),
        )
        optimizers = [sgd(model.parameters()) for model in (ours, theirs, plain)]
        for step in range(8):
            factor = math.inf if step == 3 and dist.get_rank() == 1 else 1.0
            for model, scaler in zip((ours, theirs), scalers):
                scaler.scale(loss_of(model, step) * factor).backward()
            for rank in range(2):
                scalers[2].scale(loss_of(plain, step, rank) * (math.inf if step == 3 and rank == 1 else 1.0)).backward()
            for param in plain.parameters():
                assert param.grad is not None
                param.grad /= 2
            for scaler, optimizer in zip(scalers, optimizers):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert len({scaler.get_scale() for scaler in scalers}) == 1, step
        assert scalers[0].get_scale() != 2.0**8
        expected = {name: param.detach() for name, param in plain.named_parameters()}
        assert_bit_equal(full_parameters(ours), expected, f"plain, use_orig_params={orig}")
        with theirs.summon_full_params(theirs):
            whole = {clean_name(name): param.detach().clone() for name, param in theirs.named_parameters()}
        assert_bit_equal(whole, expected, f"torch's, use_orig_params={orig}")
