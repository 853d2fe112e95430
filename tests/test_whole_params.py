"""`fsdp.optim.WholeParamOptimizer` steps full parameters of a sharded model as the plain model's optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp
import fsdp.checkpoint
from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from fsdp.optim import ShardedGradScaler, WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Stacked
from tests.harness.oracle import assert_bit_equal, flatten_state
from tests.harness.pairs import pairwise
from tests.harness.pool import RankFailure, of_all_ranks, on_ranks, run_fresh, run_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_parameters, wrap
from tests.harness.strategies import FULL, HYBRID, NONE
from tests.harness.twin import Twin

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)

WIDTH, WORDS, STEPS = 7, 13, 10


class Block(nn.Module):
    """Matrices whose sizes 2, 3 and 4 do not divide; a vector, a convolution and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 11, bias=False), nn.Linear(11, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.tiny = nn.Parameter(torch.ones(1, 1))
        self.frozen = nn.Parameter(torch.full((3, 5), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.outer(torch.tanh(self.inner(x))) * self.tiny
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2) * self.frozen.sum()


class Model(Stacked):
    """An embedding tied to the head, two blocks, and a matrix that no forward uses."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH, (Block() for _ in range(2)), norm=True)
        self.unused = nn.Parameter(torch.ones(4, 3))


def build(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(7)
    return Model().to(dtype)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and "embed" not in name and "unused" not in name


def wrapped(
    use_orig_params: bool, strategy: ShardingStrategy = FULL, dtype: torch.dtype = torch.float64, **options: Any
) -> FullyShardedDataParallel:
    if not use_orig_params:
        options["flat_param_key"] = lambda name, param: is_matrix(name, tuple(param.shape))
    if strategy is HYBRID:
        options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    policy = ModuleWrapPolicy({Block})
    return wrap(build(dtype), strategy, use_orig_params, wrap_policy=policy, **options)


def muon(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.1)


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def whole(model: nn.Module, factory: Callable[[Any], Optimizer] = muon) -> WholeParamOptimizer:
    return WholeParamOptimizer(model, factory, select=is_matrix, rest=adamw)


def plain_pair(plain: nn.Module, factory: Callable[[Any], Optimizer] = muon) -> list[Optimizer]:
    named = [(name, p) for name, p in plain.named_parameters()]
    selected = [p for name, p in named if is_matrix(name, tuple(p.shape))]
    return [factory(selected), adamw([p for name, p in named if not is_matrix(name, tuple(p.shape))])]


def tokens(step: int, micro: int = 0, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(WORDS, (3, 5), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class OptimizerTwin(Twin):
    """A plain model that takes the full gradients of a sharded one, bit for bit, so that only steps can differ."""

    def __init__(self, model: FullyShardedDataParallel, factory: Callable[[Any], Optimizer] = muon) -> None:
        self.model, self.plain = model, build(next(model.parameters()).dtype)
        self.plain.load_state_dict(full_state(model))
        self.optimizers = plain_pair(self.plain, factory)

    def take_gradients(self) -> None:
        grads = full_gradients(self.model)
        for name, param in self.plain.named_parameters():
            param.grad = grads[name]


def full_state(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "use_orig_params", "strategy"),
    [(1, True, FULL), (2, False, FULL), (3, True, FULL), (2, True, NONE), (4, True, HYBRID)],
)
@on_ranks("world_size")
def test_steps_equal_the_plain_models_bit_for_bit(
    world_size: int, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    """Ten steps of accumulation, clipping and schedulers, in float64. Matrices lie in one shard or across several, some
    shards are empty, one matrix is frozen, one is tied and one unused.
    """
    model = wrapped(use_orig_params, strategy)
    optimizer, twin = whole(model), OptimizerTwin(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, gamma=0.5) for each in (optimizer, *twin.optimizers)]
    for step in range(STEPS):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                loss_of(model, tokens(step, micro)).backward()
        model.clip_grad_norm_(0.5)
        twin.take_gradients()
        optimizer.step()
        twin.update()
        if step % 3 == 0:
            twin.check(f"step {step}")
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [each.param_groups[0]["lr"] for each in twin.optimizers] != [0.02, 3e-3]


def train_beside(twin: OptimizerTwin, model: nn.Module, optimizer: Optimizer, steps: int, words: str = "") -> None:
    """Train `model` and the plain `twin` on the same gradients, and compare them after each step."""
    for step in range(steps):
        loss_of(model, tokens(step)).backward()
        twin.take_gradients()
        optimizer.step()
        twin.update()
        twin.check(f"{words}step {step}")
        optimizer.zero_grad()


class FailingOnce(torch.optim.Muon):
    """A Muon optimizer whose first step raises an error before it changes anything."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise ArithmeticError("the first step")
        return super().step(closure)


@on_ranks(2)
def test_step_after_a_failed_one_uses_new_values_and_gradients() -> None:
    model = wrapped(True)
    optimizer: Any = whole(model, lambda params: FailingOnce(params, lr=0.02, weight_decay=0.1))
    loss_of(model, tokens(7)).backward()
    with pytest.raises(ArithmeticError, match="the first step"):
        optimizer.step()
    assert all(param.untyped_storage().nbytes() == 8 for param in optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    train_beside(OptimizerTwin(model), model, optimizer, 2)


def adafactor(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(3)
def test_unmodified_optimizers_of_various_classes_are_supported(use_orig_params: bool) -> None:
    """Their state may differ in shape from the parameter, or be made in the constructor."""
    makes_state_in_the_constructor = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.5)
    for factory in (adafactor, makes_state_in_the_constructor):
        model = wrapped(use_orig_params)
        twin = OptimizerTwin(model, factory)
        optimizer = whole(model, factory)
        train_beside(twin, model, optimizer, 2, f"{factory}, ")
        for group, other in zip(optimizer.param_groups, twin.optimizers[0].param_groups):
            assert {**group, "params": 0} == {**other, "params": 0}


def sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05)


@on_ranks(2)
def test_mixed_precision_and_a_gradient_scaler_are_supported() -> None:
    """An infinite gradient of a parameter that is stepped whole skips the step."""
    for low in (False, True):
        mixed = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=low)
        model, first = wrapped(True, dtype=torch.float32, mixed_precision=mixed), sgd if low else muon
        optimizer, twin = WholeParamOptimizer(model, first, select=is_matrix, rest=sgd), OptimizerTwin(model, first)
        twin.optimizers[1] = sgd(twin.optimizers[1].param_groups[0]["params"])
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        for step in range(3):
            scaler.scale(loss_of(model, tokens(step))).backward()
            scaler.unscale_(optimizer)
            grads = full_gradients(model)
            for name, param in twin.plain.named_parameters():
                param.grad = None if (grad := grads[name]) is None else grad.float()
            scaler.step(optimizer)
            twin.update()
            twin.check(f"step {step}")
            scaler.update()
            optimizer.zero_grad()
        scaler.scale(loss_of(model, tokens(9))).backward()
        before = full_parameters(model)
        next(param.grad for param in optimizer.stepped_params() if param.grad is not None).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert_bit_equal(full_parameters(model), before)
        assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_gradients_of_the_groups_are_refused_where_they_would_be_left_out() -> None:
    """`GradScaler`, torch's clipping and resetting by hand raise on all ranks, and the next step is as without them."""
    model = wrapped(True, dtype=torch.float32)
    optimizer, twin = whole(model), OptimizerTwin(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, tokens(0)))  # makes the scale
    loss_of(model, tokens(0)).backward()
    held = [param for group in optimizer.param_groups for param in group["params"]]
    attempts: list[Callable[[], Any]] = [
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer),
        lambda: nn.utils.clip_grad_norm_(held, 0.01),
        lambda: setattr(held[0], "grad", None),
    ]
    for attempt in attempts:
        words = r"'blocks\.0\.tiny' is not on .*clip_grad_norm_\(\) of the .*ShardedGradScaler.*zero_grad\(\)"
        with pytest.raises(RuntimeError, match=words):
            attempt()
    twin.take_gradients()
    optimizer.step()
    twin.update()
    twin.check("the step")


# -- costs -------------------------------------------------------------------------------------------------------------


@on_ranks(2, 3, 4)
def test_a_step_moves_each_element_once(world_size: int) -> None:
    """A step sends each element outside of the owner's shard three times, and keeps no full parameter."""
    model = wrapped(True)
    optimizer = whole(model)
    loss_of(model, tokens(0)).backward()
    with record_collectives() as log:
        optimizer.step()
    size = dist.get_world_size()
    matrices = [p for name, p in build().named_parameters() if is_matrix(name, tuple(p.shape)) and p.requires_grad]
    moved = [collective for collective in log.records if collective.label == "WholeParamOptimizer"]
    sent = of_all_ranks(sum(collective.input_nbytes for collective in moved))
    padding = 16 * size * size * len(moved)  # each message ends at a multiple of 16 bytes
    expected = 3 * 8 * sum(p.numel() for p in matrices) * (size - 1) / size
    assert 0.6 * expected <= sum(sent) <= 1.4 * expected + padding  # shards do not divide each matrix evenly
    assert all(param.untyped_storage().nbytes() == 8 for param in optimizer.param_groups[0]["params"])


# -- state -------------------------------------------------------------------------------------------------------------


def _trained(
    use_orig_params: bool, factory: Callable[[Any], Optimizer] = muon, strategy: ShardingStrategy = FULL
) -> tuple[Any, Any, OptimizerTwin]:
    model = wrapped(use_orig_params, strategy)
    twin, optimizer = OptimizerTwin(model, factory), whole(model, factory)
    train_beside(twin, model, optimizer, 2)
    return model, optimizer, twin


def _plain_states(twin: OptimizerTwin) -> dict[str, dict[str, Any]]:
    names = {param: name for name, param in twin.plain.named_parameters()}
    return {names[param]: state for each in twin.optimizers for param, state in each.state.items()}


@pytest.mark.parametrize(
    ("world_size", "factory", "use_orig_params"), pairwise([1, 3], [muon, adafactor], [True, False])
)
@on_ranks("world_size")
def test_optimizer_state_dicts_of_every_form(world_size: int, factory: Any, use_orig_params: bool) -> None:
    """State has the names and shapes of the plain optimizer's, is restored bit for bit, and lies on the owner alone."""
    model, optimizer, twin = _trained(use_orig_params, factory)
    expected = flatten_state(_plain_states(twin))
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_bit_equal(flatten_state(full["state"]), expected)
    names = [name for name, param in twin.plain.named_parameters() if is_matrix(name, tuple(param.shape))]
    assert sorted(full["param_groups"][0]["params"]) == sorted(names)
    ragged = (fsdp.RaggedStateDictConfig(), fsdp.RaggedOptimStateDictConfig())
    sharded = StateDictType.SHARDED_STATE_DICT
    kinds: list[Any] = [(StateDictType.FULL_STATE_DICT,), (sharded,), (sharded, *ragged)]
    if not use_orig_params:
        kinds.append((StateDictType.LOCAL_STATE_DICT,))
    for kind in kinds:
        with FullyShardedDataParallel.state_dict_type(model, *kind):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            other = whole(model, factory)
            loadable = FullyShardedDataParallel.optim_state_dict_to_load(model, other, state)
        other.load_state_dict(loadable)
        again = FullyShardedDataParallel.full_optim_state_dict(model, other, rank0_only=False)
        assert_bit_equal(flatten_state(again["state"]), expected, str(kind))
        for inner, before in zip(other.inner_optimizers, optimizer.inner_optimizers):
            found, expected_groups = ([{**g, "params": 0} for g in each.param_groups] for each in (inner, before))
            assert found == expected_groups
        owned = [each for each in other._selected if each.is_mine or not each.shards.sharded]
        of_whole = {id(param) for param in other.inner_optimizers[0].state}
        assert of_whole <= {id(each.param) for each in owned}
    train_beside(twin, model, other, 1)


def _save(
    folder: Path, use_orig_params: bool, factory: Callable[[Any], Optimizer], strategy: ShardingStrategy = FULL
) -> None:
    model, optimizer, twin = _trained(use_orig_params, factory, strategy)
    fsdp.checkpoint.save(folder, model, optimizer)
    if dist.get_rank() == 0:
        torch.save([twin.plain.state_dict(), _plain_states(twin)], folder / "expected.pt")


def _load(
    folder: Path, use_orig_params: bool, factory: Callable[[Any], Optimizer], strategy: ShardingStrategy = FULL
) -> None:
    values, states = torch.load(folder / "expected.pt")
    model = wrapped(use_orig_params, strategy)
    optimizer = whole(model, factory)
    fsdp.checkpoint.load(folder, model, optimizer)
    assert_bit_equal(full_parameters(model), {name: values[name] for name in full_parameters(model)})
    full = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_bit_equal(flatten_state(full["state"]), flatten_state(states))
    names = [name for name, _ in build().named_parameters()]
    empty = whole(wrapped(use_orig_params), factory)
    of_empty = fsdp.checkpoint.get_optimizer_state_dict(model, [whole(model, factory)])
    assert set(of_empty["state"]) <= set(names) and not empty.state


@pytest.mark.parametrize(
    ("saving", "use_orig_params", "factory", "loading"),
    [
        ((3, FULL), True, muon, [(2, FULL), (1, FULL)]),
        ((3, FULL), False, adafactor, [(2, FULL)]),
        ((4, HYBRID), True, adafactor, [(4, HYBRID), (3, FULL)]),
    ],
)
def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks_and_replicas(
    saving: Any, use_orig_params: bool, factory: Any, loading: list[Any], tmp_path: Path
) -> None:
    """Each replica has an owner of the state, and one of them writes it."""
    run_ranks(saving[0], _save, tmp_path, use_orig_params, factory, saving[1])
    for ranks, strategy in loading:
        run_ranks(ranks, _load, tmp_path, not use_orig_params, factory, strategy)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_arguments_raise_and_change_no_state() -> None:
    model = wrapped(True)

    with pytest.raises(ValueError, match="select\\(\\) is true for none of the 18 parameters"):
        WholeParamOptimizer(model, muon, select=lambda name, shape: False)
    with pytest.raises(ValueError, match=r"leaves out .*'embed.weight', .*there is no rest="):
        WholeParamOptimizer(model, muon, select=is_matrix)
    with pytest.raises(TypeError, match=r"factory must return a torch.optim.Optimizer, got list"):
        WholeParamOptimizer(model, list, select=is_matrix, rest=adamw)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was given 8 parameters, and its Muon holds 1"):
        WholeParamOptimizer(model, lambda params: muon(params[:1]), select=is_matrix, rest=adamw)
    with pytest.raises(NotImplementedError, match="LBFGS steps all parameters as one vector"):
        WholeParamOptimizer(model, torch.optim.LBFGS, select=is_matrix, rest=adamw)
    with pytest.raises(TypeError, match="select must be callable, got str"):
        WholeParamOptimizer(model, muon, select="weight", rest=adamw)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has none: use the optimizer itself"):
        WholeParamOptimizer(build(), muon, select=is_matrix, rest=adamw)
    flat = wrap(build(), FULL, False, wrap_policy=ModuleWrapPolicy({Block}))
    with pytest.raises(ValueError, match=r"both lie in one flat parameter.*flat_param_key"):
        WholeParamOptimizer(flat, muon, select=is_matrix, rest=adamw)
    optimizer = whole(model)
    with pytest.raises(RuntimeError, match="make the groups in `factory` and `rest`"):
        optimizer.add_param_group({"params": []})
    with model.no_sync():
        loss_of(model, tokens(0)).backward()
    with pytest.raises(RuntimeError, match="gradients from no_sync"):
        optimizer.step()
    model.reduce_gradients()
    optimizer.step()
    split = wrap(nn.Linear(WIDTH, WIDTH, bias=False), FULL, True)
    optimizer = WholeParamOptimizer(split, muon, select=is_matrix)
    split(torch.ones(1, WIDTH)).sum().backward()
    held = next(optimizer.stepped_params())
    if dist.get_rank() == 0:
        held.grad = None
    with pytest.raises(RuntimeError, match="'weight' has a gradient on some ranks, and none on"):
        optimizer.step()
    held.grad = None
    optimizer.step()


@on_ranks(2)
def test_different_selections_and_single_failures_raise_on_all_ranks() -> None:
    model = wrapped(True)

    def select(name: str, shape: tuple[int, ...]) -> bool:
        return is_matrix(name, shape) and (dist.get_rank() == 0 or "inner" not in name)

    with pytest.raises(RuntimeError, match=r"inner.weight"):
        WholeParamOptimizer(model, muon, select=select, rest=adamw)

    def fails_on_rank_1(params: Any) -> Optimizer:
        if dist.get_rank() == 1:
            raise ValueError("no such optimizer")
        return muon(params)

    with pytest.raises(ValueError, match="no such optimizer"):
        WholeParamOptimizer(model, fails_on_rank_1, select=is_matrix, rest=adamw)
    optimizer = whole(model)
    loss_of(model, tokens(0)).backward()
    optimizer.step()


def _rank_1_leaves_the_step_out() -> None:
    model = wrapped(True)
    optimizer = whole(model)
    loss_of(model, tokens(0)).backward()
    if dist.get_rank() == 0:
        optimizer.step()
    else:
        loss_of(model, tokens(1)).backward()


def _rank_1_fails_in_the_step() -> None:
    class Failing(torch.optim.Muon):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == 1:
                raise ArithmeticError("a matrix is singular")
            return super().step(closure)

    model = wrapped(True)
    optimizer = whole(model, Failing)
    loss_of(model, tokens(0)).backward()
    with pytest.raises(ArithmeticError if dist.get_rank() == 1 else RuntimeError):
        optimizer.step()
        loss_of(model, tokens(1)).backward()


def test_a_rank_that_does_not_step_or_fails_is_an_error_on_all() -> None:
    with pytest.raises(RankFailure, match=r"WholeParamOptimizer.step\(\)"):
        run_fresh(2, _rank_1_leaves_the_step_out)
    run_fresh(2, _rank_1_fails_in_the_step)
