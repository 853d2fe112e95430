"""``fsdp.flat_param_groups``: an optimizer of a few vectors trains, saves and loads what one of parameters does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

import fsdp
from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.sharded_grad_scaler import ShardedGradScaler
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.poison import poisoned_memory
from tests.harness.pool import run_ranks
from tests.harness.sharded import full_gradients, full_parameters

FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
Rule = Callable[[str, torch.Size], Mapping[str, Any]]


class Block(nn.Module):
    """A conv whose weight is not row-major, a weight twice registered, sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 2)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().transpose(0, 2).contiguous().transpose(0, 2))
        self.frozen = nn.Parameter(torch.ones(7))
        self.norm = nn.LayerNorm(5)
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean(-1)
        y = self.two(torch.tanh(self.one(self.norm(y)))) * self.gain + self.frozen[:5] * self.wide.to(y.dtype)
        return x + y.sum(-1).view(-1, 1, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.left = nn.Linear(3, 4)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.left(x.mean(-1)).view(-1, 4)[:, :3])


def build(strategy: ShardingStrategy = FULL, **options: Any) -> Any:
    torch.manual_seed(3)
    net = Net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FullyShardedDataParallel: the group has one rank")
        policy = ModuleWrapPolicy({Block})
        options = {"ignored_states": [net.left.bias], "use_orig_params": True, **options}
        model = FSDP(net, sharding_strategy=strategy, auto_wrap_policy=policy, **options)
    for name, param in model.named_parameters():
        if "frozen" in name:
            param.requires_grad_(False)
    return model


def rule(name: str, shape: torch.Size) -> dict[str, Any]:
    return {"weight_decay": 0.3 if len(shape) > 1 else 0.0}


def grouped(model: nn.Module, rule: Rule = rule) -> list[dict[str, Any]]:
    """The same groups of parameters."""
    groups: dict[float, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            options = rule(clean_name(name), fsdp.global_shape(param))
            groups.setdefault(options["weight_decay"], {**options, "params": []})["params"].append(param)
    return list(groups.values())


def pair(
    strategy: ShardingStrategy = FULL, make: Any = AdamW, rule: Rule = rule, **options: Any
) -> list[tuple[Any, Optimizer]]:
    """A model with an optimizer of parameters, and one of vectors."""
    first, second = build(strategy, **options), build(strategy, **options)
    return [(first, make(grouped(first, rule), lr=0.05)), (second, make(fsdp.flat_param_groups(second, rule), lr=0.05))]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(4, 3, 6, generator=generator)


def backward(model: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()


def same(first: Any, second: Any) -> None:
    """Two state dicts, or parts of such."""
    assert type(first) is type(second), (first, second)
    if isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            same(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second):
            same(one, other)
    elif isinstance(first, Tensor):
        one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (first, second))
        if isinstance(one, ShardedTensor):
            assert one.metadata() == other.metadata()
            one, other = (
                torch.cat([shard.tensor for shard in t.local_shards()] or [torch.empty(0)]) for t in (one, other)
            )
        elif isinstance(one, RaggedTensor):
            assert (one.start, one.end, one.shape) == (other.start, other.end, other.shape)
            one, other = one.local, other.local
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert torch.equal(one, other), f"{one} and {other}"
    else:
        assert first == second


def alike(several: list[tuple[Any, Optimizer]]) -> None:
    (first, _), (second, _) = several
    assert_bit_equal(full_parameters(second), full_parameters(first))
    assert torch.equal(first.left.bias, second.left.bias)


def _trains(strategy: ShardingStrategy) -> None:
    several = pair(strategy)
    held = [param for group in several[1][1].param_groups for param in group["params"]]
    assert len(held) < len([p for p in several[0][0].parameters() if p.requires_grad])
    assert all(type(param) is nn.Parameter for param in held)
    for step in range(6):
        for model, _ in several:
            for micro in range(1 + step % 3):  # accumulation with no_sync, and without
                with model.no_sync() if micro == 0 and step % 3 == 2 else nullcontext():
                    backward(model, 3 * step + micro)
        assert_bit_equal(full_gradients(several[1][0]), full_gradients(several[0][0]))
        for model, optimizer in several:
            optimizer.step()
            which: Any = (optimizer, model)[step % 2]
            which.zero_grad(set_to_none=step % 4 < 2)
        alike(several)


@pytest.mark.parametrize("world_size", [2, 3])
def test_vectors_train_as_parameters_do(world_size: int) -> None:
    run_ranks(world_size, _trains, FULL)


def test_vectors_of_what_is_not_sharded_train_as_parameters_do() -> None:
    run_ranks(1, _trains, FULL)
    run_ranks(2, _trains, NO_SHARD)


# -- optimizer state ---------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[StateDictType, Any, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()),
    "full on rank 0": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    ),
    "sharded": (StateDictType.SHARDED_STATE_DICT, None, None),
    "ragged": (StateDictType.SHARDED_STATE_DICT, RaggedStateDictConfig(), RaggedOptimStateDictConfig()),
    "local": (StateDictType.LOCAL_STATE_DICT, None, None),
}


def trained(several: list[tuple[Any, Optimizer]], steps: range = range(2)) -> list[tuple[Any, Optimizer]]:
    for model, optimizer in several:
        for step in steps:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return several


def _saves(strategy: ShardingStrategy, root: str, forms: list[str]) -> None:
    of_one_group = trained(pair(strategy, rule=lambda name, shape: {"weight_decay": 0.1}))
    same(*(FSDP.optim_state_dict(*one) for one in of_one_group))
    make = partial(pair, strategy, ignored_states=None)  # each rank has its own of these
    several = trained(make())
    for form in forms:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for model, _ in several:
                FSDP.set_state_dict_type(model, *FORMS[form])
            dicts = [FSDP.optim_state_dict(*one) for one in several]
            same(*dicts)
            fresh = make()
            for (model, optimizer), saved in zip(fresh, reversed(dicts)):
                FSDP.set_state_dict_type(model, *FORMS[form])
                if form == "full on rank 0":
                    saved = FSDP.scatter_full_optim_state_dict(saved if saved else None, model, optim=optimizer)
                    optimizer.load_state_dict(saved)
                else:
                    with poisoned_memory():
                        loadable = FSDP.optim_state_dict_to_load(model, optimizer, saved)
                    optimizer.load_state_dict(loadable)
                assert not any(v.isnan().any() for state in optimizer.state.values() for v in state.values())
            same(*(FSDP.optim_state_dict(*one) for one in fresh))
            alike(trained(fresh, range(2, 4)))
    for number, (source, target) in enumerate(((0, 1), (1, 0))):
        fresh = make()
        load(save(f"{root}/{number}", *several[source], keep=1), *fresh[target])
        same(get_optimizer_state_dict(*fresh[target]), get_optimizer_state_dict(*several[source]))
        set_optimizer_state_dict(*fresh[source], get_optimizer_state_dict(*several[target]))
        alike([trained([fresh[target]], range(2, 4))[0], trained([several[source]], range(2, 4))[0]])
    new = make()
    same(*(get_optimizer_state_dict(*one) for one in new))  # what a first step would make
    assert all(p.grad is None for model, _ in new for p in model.parameters())


def test_state_of_vectors_is_that_of_parameters(tmp_path: Path) -> None:
    run_ranks(2, _saves, FULL, str(tmp_path), list(FORMS))


def test_state_of_vectors_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(3, _saves, FULL, str(tmp_path), ["full"])
    run_ranks(1, _saves, FULL, str(tmp_path / "one"), ["full"])
    run_ranks(2, _saves, NO_SHARD, str(tmp_path / "whole"), ["full"])


# -- what is done to one side is done to the other ---------------------------------------------------------------------


def _follows() -> None:
    (model, _), (vectors, optimizer) = several = pair(FULL, SGD)
    held = [param for group in optimizer.param_groups for param in group["params"]]

    def both(change: Callable[[Tensor], Tensor | None]) -> None:
        """Gradients of parameters here, of vectors there."""
        for params in (model.parameters(), held):
            for param in params:
                if param.grad is not None:
                    changed = change(param.grad)
                    param.grad = changed if changed is not param.grad else param.grad

    def step() -> None:
        for _, its in several:
            its.step()
            its.zero_grad()
        alike(several)

    for one, _ in several:
        backward(one, 0)
    grads = [param.grad for param in held if param.grad is not None]
    assert any(grad.untyped_storage().nbytes() > grad.nbytes for grad in grads)  # parts of what came, no copies
    both(lambda grad: grad.mul_(2))
    assert_bit_equal(full_gradients(vectors), full_gradients(model))
    both(lambda grad: grad + 1)
    step()
    for one in (model, vectors):  # members' gradients are replaced, by hand and before any backward
        for param in one.parameters():
            param.grad = torch.cos(param.detach()) if param.requires_grad and param.numel() else None
    step()
    for one in (model, vectors):
        backward(one, 1)
        one.zero_grad()
    step()  # of nothing
    for one, its in several:  # gradients that are dropped inside of an accumulation
        with one.no_sync():
            backward(one, 2)
            loss = one(batch(3)).square().mean()
            its.zero_grad()
            loss.backward()
        backward(one, 4)
    assert_bit_equal(full_gradients(vectors), full_gradients(model))
    norms = [one.clip_grad_norm_(0.01) for one in (model, vectors)]
    torch.testing.assert_close(*norms)
    both(lambda grad: grad.zero_())
    step()
    for one, its in several:  # what no unit has run since is no part of the norm
        backward(one, 5)
        its.zero_grad()
    assert vectors.clip_grad_norm_(1.0) == 0
    for one in (model, vectors):  # moved and cast, with gradients
        backward(one, 6)
        one.to(torch.float64)
    assert {param.dtype for param in held} == {torch.float64}
    step()
    for params in ([p for p in model.parameters() if p.requires_grad], held):  # data replaced, as by SAM
        for param in params:
            param.data = param.data * 2
    step()
    for one in (model, vectors):
        one.head.requires_grad_(False)
        one.left.requires_grad_(False)
        backward(one, 7) if one is None else one(batch(7).double()).square().mean().backward()
    assert_bit_equal(full_gradients(vectors), full_gradients(model))
    step()
    for param in held:  # a whole group is unfrozen
        param.requires_grad_(True)
    model.head.requires_grad_(True)
    model.left.requires_grad_(True)
    for one in (model, vectors):
        one(batch(8).double()).square().mean().backward()
    step()
    with FSDP.summon_full_params(model), FSDP.summon_full_params(vectors):
        for one in (model, vectors):
            for param in one.parameters():
                param.data.mul_(0.5)
    alike(several)
    both_copied = copy.deepcopy((vectors, optimizer))
    for one, its in ((model, several[0][1]), both_copied):
        one(batch(9).double()).square().mean().backward()
        its.step()
    alike([several[0], both_copied])
    seen: list[int] = []
    hooks = [param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.numel())) for param in held]
    vectors(batch(9).double()).square().mean().backward()
    assert sorted(seen) == sorted(param.numel() for param in held if param.numel())
    for hook in hooks:
        hook.remove()
    loss = vectors(batch(1).double()).square().mean()  # between a forward and its backward
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was changed in place, or replaced, between a forward and its backward"):
        loss.backward()
    vectors.reset_iter_state()


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        return self.right(self.left(x)) if both else self.left(x)


def _drops() -> None:
    """Gradients are dropped while others of the same unit, which no backward reaches again, wait to be attached."""
    results = []
    for vectors in (False, True):
        torch.manual_seed(3)
        model: Any = FSDP(_Halves(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
        optimizer = SGD(fsdp.flat_param_groups(model) if vectors else model.parameters(), lr=0.1)
        model(torch.ones(2, 6), both=True).sum().backward()
        model.set_is_last_backward(False)
        model(torch.full((2, 6), 2.0), both=True).sum().backward()
        model.set_is_last_backward(True)
        loss = model(torch.full((2, 6), 3.0), both=False).sum()
        optimizer.zero_grad()
        loss.backward()
        results.append(full_gradients(model))
    assert_bit_equal(*results)


def test_what_is_done_to_vectors_or_parameters_is_done_to_both() -> None:
    run_ranks(2, _follows)
    run_ranks(2, _drops)


def _low_precision() -> None:
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    several = pair(FULL, mixed_precision=precision, ignored_states=None)
    scaled = [(model, optimizer, ShardedGradScaler("cpu", init_scale=2.0**14)) for model, optimizer in several]
    for step in range(3):
        for model, optimizer, scaler in scaled:
            scaler.scale(model(batch(step)).float().square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        alike(several)
    assert scaled[0][2].get_scale() == scaled[1][2].get_scale()


def test_vectors_are_scaled_as_parameters_are() -> None:
    run_ranks(2, _low_precision)


def _errors() -> None:
    model = build()
    with pytest.raises(TypeError, match=r"a dict of options without 'params'.* for 'blocks.0.gain' it returned 3"):
        fsdp.flat_param_groups(model, lambda name, shape: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"is a flat parameter already: give the optimizer model.parameters"):
        fsdp.flat_param_groups(build(use_orig_params=False))
    groups = fsdp.flat_param_groups(model)
    optimizer = AdamW(groups)
    with pytest.raises(
        ValueError, match=r"is held as one parameter by an optimizer of flat_param_groups.* delete that"
    ):
        fsdp.flat_param_groups(model, rule)
    again = fsdp.flat_param_groups(model)
    assert all(one is other for one, other in zip(groups[0]["params"], again[0]["params"], strict=True))
    run = next(param for param in groups[0]["params"] if param.numel() > 9)
    for ask in (fsdp.full_tensor, fsdp.global_shape):
        with pytest.raises(
            ValueError, match=r"got what flat_param_groups\(\) has made of 'gain' to 'two.bias', of the Block unit"
        ):
            ask(run)
    backward(model, 0)
    with pytest.warns(UserWarning, match=r"torch.nn.utils.clip_grad_norm_.. was called on sharded parameters"):
        torch.nn.utils.clip_grad_norm_([run], 1e9)
    here = [p for p in model.blocks[0].parameters() if p.grad is not None][-1]
    kept, here.grad = here.grad, None
    with pytest.raises(RuntimeError, match=r"of unit 'blocks.0' has no gradient, and others that the optimizer holds"):
        optimizer.step()
    here.grad = kept
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match=r"steps inside summon_full_params"):
        optimizer.step()
    model.head.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'head.bias' of the root unit got requires_grad=False while an optimizer"):
        model(batch(0))
    model.head.bias.requires_grad_(True)
    optimizer.step()
    twice = AdamW([*groups[0]["params"], model.blocks[0].gain])
    with pytest.raises(ValueError, match=r"optimizers hold 'gain' of unit 'blocks.0' twice"):
        FSDP.optim_state_dict(model, twice)
    uneven = FSDP.optim_state_dict(model, optimizer)
    uneven["state"]["blocks.0.gain"]["step"] += 1
    with pytest.raises(ValueError, match=r"the parameters of one parameter of flat_param_groups\(\) share 'step'"):
        FSDP.optim_state_dict_to_load(model, optimizer, uneven)
    odd = torch.optim.SGD(groups)
    odd.state = {run: {"rows": torch.zeros(3)}}  # type: ignore[assignment]
    with pytest.raises(
        NotImplementedError, match=r"only states that are scalars, or that have one element per element"
    ):
        FSDP.optim_state_dict(model, odd)


def _phases() -> None:
    """Parameters that an optimizer which is gone had as one are there for other groups."""
    model = build()
    model.blocks.requires_grad_(False)
    optimizer = AdamW(fsdp.flat_param_groups(model))
    assert [param.numel() > 0 for param in optimizer.param_groups[0]["params"]].count(True) <= 2
    backward(model, 0)
    optimizer.step()
    del optimizer
    model.requires_grad_(True)
    model(batch(1))  # frozen and unfrozen as without it
    AdamW(fsdp.flat_param_groups(model, rule)).zero_grad()
    differing: Rule = rule if dist.get_rank() else lambda name, shape: {"lr": 0.1 + len(name)}
    apart = AdamW(fsdp.flat_param_groups(model, differing))
    backward(model, 1)
    apart.step()
    with pytest.raises(RuntimeError, match=r"the rule of flat_param_groups\(\) has to be the same on all of them"):
        FSDP.optim_state_dict(model, apart)


def test_what_cannot_be_one_vector_is_refused() -> None:
    run_ranks(2, _errors)
    run_ranks(2, _phases)
