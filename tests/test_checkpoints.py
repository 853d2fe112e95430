"""Models with optimizers, saved and loaded in every form of state, by world size, strategy and mode.

The training run has everything that makes state hard: ties, few elements and empty shards, memory in another order,
frozen parameters, parameters without state, several groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW, Optimizer

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from fsdp.checkpoint import load, load_plain, save
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Gain, Net, Unit
from tests.harness.optim_states import FORMS
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.sharded import full_gradients, wrap
from tests.harness.states import kind_of, whole
from tests.harness.strategies import STRATEGIES

FSDP = FullyShardedDataParallel
both_modes = pytest.mark.parametrize("mode", [False, True])
WAYS = list(itertools.product(STRATEGIES, (False, True)))  # strategy and use_orig_params


def block(a: int, b: int) -> Unit:
    return Unit(
        lambda m, x: torch.tanh(m.linear(x) + m.frozen(x)) * m.scale,
        linear=nn.Linear(a, b),
        frozen=nn.Linear(a, b).requires_grad_(False),
        scale=nn.Parameter(torch.ones(1)),  # fewer elements than ranks
    )


def plain(seed: int) -> Net:
    def forward(m: Any, words: Tensor) -> Tensor:
        x = m.tiny(m.blocks(m.tokens(words) + m.shift))
        return m.head(m.idle(x)) + m.image.square().mean()

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        net = Net(
            forward,
            tokens=nn.Embedding(7, 5),
            shift=torch.randn(5),
            blocks=nn.Sequential(block(5, 3), checkpoint_wrapper(block(3, 5))),
            tiny=Gain(1.5),
            idle=Gain(0.5),  # trained by no optimizer
            image=nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            head=nn.Linear(5, 7, bias=False),
        )
    net.head.weight = net.tokens.weight
    return net


def build(seed: int, strategy: ShardingStrategy, mode: bool) -> tuple[FullyShardedDataParallel, Optimizer]:
    model = wrap(plain(seed), strategy, mode, wrap_policy=ModuleWrapPolicy({Unit, Gain}))
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad and "idle" not in name]
    rest = [param for name, param in trained if "blocks" not in name]
    groups = [{"params": [param for name, param in trained if "blocks" in name], "lr": 0.02}, {"params": rest}]
    return model, AdamW(groups, lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(7, (6,), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    return F.cross_entropy(model(tokens), tokens.roll(1))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- save and load -----------------------------------------------------------------------------------------------------

Run = tuple[FullyShardedDataParallel, Optimizer]
KINDS = {**FORMS, "local": (StateDictType.LOCAL_STATE_DICT,)}


def carry(kind: str, source: Run, target: Run, folder: str) -> None:
    """Load the state of one run into another."""
    if kind == "directory":
        save(folder, *source, extra={"rank": dist.get_rank()}, keep=1)
        load(folder, *target)
        return
    states = []
    with kind_of(source[0], "full"):  # silences the warning about NO_SHARD
        for model, optimizer in (source, target):
            with FSDP.state_dict_type(model, *KINDS[kind]):
                if not states:
                    states = [model.state_dict(), FSDP.optim_state_dict(model, optimizer)]
                    if kind == "rank 0" and dist.get_rank() > 0:
                        assert states[1] == {}
                        states[0] = {}
                    continue
                assert model.load_state_dict(states[0]) == ([], [])
                FSDP.optim_state_dict_to_load(model, optimizer, states[1], load_directly=True)


def local_values(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copy this rank's parameters, buffers and optimizer state, to compare models that are wrapped alike."""
    values: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, state in optimizer.state_dict()["state"].items():
        values |= {f"{number}.{key}": value for key, value in state.items()}
    return {name: value.detach().clone() for name, value in values.items()}


def save_and_continue(root: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kinds = [*KINDS, "directory"]
    for number, (strategy, mode) in enumerate(WAYS):
        if world_size == 4 and number != 3:  # `load_elsewhere` does not load these
            continue
        if world_size in (1, 3) and not through_a_directory(world_size, number):
            continue
        run = build(1, strategy, mode)
        train(*run, range(2))
        half = local_values(*run)
        is_loaded = through_a_directory(world_size, number)  # by `load_elsewhere`
        kind = kinds[(number + world_size - 1) % len(kinds)]  # a different one for each way goes on training
        for each in ("directory", kind) if is_loaded and kind != "directory" else (kind,):
            continued = build(2, strategy, mode)
            carry(each, run, continued, f"{root}/{world_size}-{number}")
            assert_bit_equal(local_values(*continued), half, f"{each}, {strategy}, use_orig_params={mode}")
        if is_loaded:
            half = whole(*run)
            if rank == 0:
                torch.save(half, f"{root}/{world_size}-{number}.expected")
        for trained in (run, continued):
            train(*trained, range(2, 4))
        case = f"{kind}, {strategy}, use_orig_params={mode}, two steps later"
        assert_bit_equal(local_values(*continued), local_values(*run), case)


def through_a_directory(world_size: int, number: int) -> bool:
    """Return whether way `number` is saved to a directory; the kinds of state take turns."""
    return (world_size + number) % 2 == 0


def load_elsewhere(root: str) -> None:
    """Load directories saved by other numbers of ranks, under different strategies and modes.

    Two ranks load two thirds of them, one rank and four ranks the rest.
    """
    size = dist.get_world_size()
    for saved_by, number in itertools.product((1, 2, 3), range(len(WAYS))):
        third = number // 2 == saved_by % 3
        if not through_a_directory(saved_by, number) or third == (size == 2):
            continue
        run, path = build(3, *WAYS[(number // 2 + saved_by + size) % len(WAYS)]), f"{root}/{saved_by}-{number}"
        expected = torch.load(f"{path}.expected")
        assert load(path, *run) == {"rank": dist.get_rank() % saved_by}
        assert_bit_equal(whole(*run), expected, f"{saved_by} ranks, {WAYS[number]}")
        if size == 1:
            module, (saved, _, extras) = plain(4), load_plain(path)
            load(path, module)
            for found in (module.state_dict(), saved):
                assert_bit_equal(found, {key: expected[key] for key in module.state_dict()})
            assert extras == [{"rank": rank} for rank in range(saved_by)]


def test_training_continues_bit_for_bit_from_any_kind_of_state(tmp_path: Path) -> None:
    """With every kind of state, strategy and mode on 2 ranks, and a part of them on 1, 3 and 4.

    Directories of 1, 2 and 3 ranks are loaded on 1, 2 and 4.
    """
    for world_size in (1, 2, 3, 4):
        run_ranks(world_size, save_and_continue, str(tmp_path), timeout=180)
    for world_size in (1, 2, 4):
        run_ranks(world_size, load_elsewhere, str(tmp_path), timeout=180)


@on_ranks(2)
def test_state_of_parents_and_nested_units() -> None:
    """Every kind of state is loaded where it was saved: a parent module, a nested unit, or a module between."""
    finds: list[Callable[[Any], Any]] = [
        lambda m: nn.Sequential(nn.ReLU(), m),
        lambda m: m.module.blocks[0],
        lambda m: m.module.blocks,
        lambda m: m.module.idle,
    ]
    for mode in (False, True):
        (model, _), (target, _) = (build(seed, STRATEGIES[0], mode) for seed in (1, 2))
        for (turn, kind), (index, find) in itertools.product(
            enumerate(("full", "sharded", "local", "ragged")), enumerate(finds)
        ):
            if (turn + index) % 2 == mode:  # the modes take turns
                continue
            target.load_state_dict(plain(2).state_dict())
            into, source = find(target), find(model)
            with FSDP.state_dict_type(source, *KINDS[kind]), FSDP.state_dict_type(into, *KINDS[kind]):
                assert into.load_state_dict(source.state_dict()) == ([], [])
            with kind_of(source, "full"), kind_of(into, "full"):
                assert_bit_equal(into.state_dict(), source.state_dict(), f"{kind}, use_orig_params={mode}")


@on_ranks(2)
def test_state_after_a_failed_forward_has_the_original_dtype_of_buffers(tmp_path: Path) -> None:
    """Buffers are computed with in bfloat16, and the units have not been reset after the failure."""
    low = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    for turn, (strategy, mode) in enumerate(WAYS[::2] + WAYS[1::4]):
        policy = ModuleWrapPolicy({Unit})
        model, target = (wrap(plain(s), strategy, mode, wrap_policy=policy, mixed_precision=low) for s in (1, 2))
        for each in (model, target):
            each.module.tiny.register_forward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                each(torch.arange(6))
        expected = plain(1).state_dict()
        expected["shift"] = expected["shift"].bfloat16().float()
        for kind in [*KINDS, *KINDS][turn : turn + 2]:
            with kind_of(model, "full"), kind_of(target, "full"):
                target.load_state_dict(plain(2).state_dict())
                with FSDP.state_dict_type(model, *KINDS[kind]), FSDP.state_dict_type(target, *KINDS[kind]):
                    state = model.state_dict()
                    assert kind == "rank 0" or state["shift"].dtype == torch.float32
                    target.load_state_dict({} if kind == "rank 0" and dist.get_rank() > 0 else state)
                assert target.module.shift.dtype == torch.bfloat16
                assert_bit_equal(target.state_dict(), expected, f"{kind}, {strategy}, use_orig_params={mode}")
        if turn % 2:
            continue
        save(tmp_path, model)
        target.load_state_dict(plain(2).state_dict())
        load(tmp_path, target)
        with kind_of(target, "full"):
            assert_bit_equal(target.state_dict(), expected, f"{strategy}, use_orig_params={mode}")


def fail(*args: Any) -> None:
    raise ZeroDivisionError


# -- at any time -------------------------------------------------------------------------------------------------------


def use_state(run: Run, root: str, kind: str, *, loads: bool) -> None:
    """Save, and with `loads` load, state of this kind, without an effect on values."""
    model, optimizer = run
    if kind == "directory":
        save(root, model, optimizer, keep=1)
        if loads:
            load(root, model, optimizer)
        return
    with kind_of(model, "full"), FSDP.state_dict_type(model, *KINDS[kind]):
        state = model.state_dict()
        saved = FSDP.optim_state_dict(model, optimizer)
        if loads:
            model.load_state_dict({} if kind == "rank 0" and dist.get_rank() > 0 else state)
        FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)


def assert_state_is_refused(model: nn.Module, root: str) -> None:
    """Check that state of every kind is refused on every rank while a unit runs."""
    attempts: list[Callable[[], Any]] = [lambda: model.load_state_dict({}, strict=False), lambda: save(root, model)]
    for kind in KINDS:
        with kind_of(model, "full"), FSDP.state_dict_type(model, *KINDS[kind]):
            for attempt in (model.state_dict, *(attempts if kind == "full" else ())):
                with pytest.raises(RuntimeError, match=r"in the middle of the (for|back)ward of .*: call it outside"):
                    attempt()


@pytest.mark.parametrize(("world_size", "numbers"), [(1, (5,)), (2, (0, 3)), (3, (1,))])
@on_ranks("world_size", timeout=180)
def test_state_during_an_accumulation_is_exact_or_refused(
    tmp_path: Path, world_size: int, numbers: Sequence[int]
) -> None:
    """State is refused while a unit runs; anywhere else values are exact and gradients stay.

    An accumulation over three backwards, and the step, with and without saves and loads between.
    """
    root = str(tmp_path)
    kinds = [*KINDS, "directory"]
    for number in numbers:
        strategy, mode = WAYS[number]
        results = []
        for disturbed in (False, True):
            run = build(1, strategy, mode)
            model, optimizer = run
            train(*run, range(1))
            reached: list[str] = []

            def at(
                moment: str,
                run: Run = run,
                disturbed: bool = disturbed,
                reached: list[str] = reached,
                turn: int = number,
            ) -> None:
                if disturbed and moment not in reached:
                    reached.append(moment)
                    if "middle" in moment:
                        assert_state_is_refused(run[0], root)
                    else:  # a backward would refuse parameters loaded since the forward
                        kind = kinds[(turn + len(reached)) % len(kinds)]
                        use_state(run, root, kind, loads="before backward" not in moment)

            def in_backward(grad: Tensor, at: Callable[..., None] = at) -> None:
                at("the middle of a unit's backward")

            def in_forward(module: nn.Module, args: Any, out: Tensor, at: Callable[..., None] = at) -> None:
                at("the middle of a unit's forward")
                if out.requires_grad:
                    out.register_hook(in_backward)

            block = model.module.blocks[0]
            block.linear.register_forward_hook(in_forward)
            with model.no_sync():
                loss = loss_of(model, 1)
                at("in no_sync, before backward")
                loss.backward()
                at("in no_sync")
            at("after no_sync")
            loss = loss_of(model, 2)
            at("before backward")
            loss.backward()
            at("after backward")
            loss_of(model, 3).backward()
            grads = full_gradients(model)
            optimizer.step()
            results.append(
                {**whole(*run), **{f"{name}.grad": grad for name, grad in grads.items() if grad is not None}}
            )
            assert len(reached) == (7 if disturbed else 0)
        assert_bit_equal(results[1], results[0], f"{strategy}, use_orig_params={mode}")


# -- arguments of one rank that differ ---------------------------------------------------------------------------------


def two_runs(mode: bool) -> tuple[Run, Run]:
    """Build two runs from different seeds, and train each for one step."""
    runs = build(1, STRATEGIES[0], mode), build(2, STRATEGIES[0], mode)
    for run in runs:
        train(*run, range(1))
    return runs


@both_modes
@on_ranks(3)
def test_model_state_without_a_parameter_on_one_rank_is_loaded_by_none(mode: bool) -> None:
    """Every rank raises, also with `strict=False` and when a parent loads."""
    run, (source, _) = two_runs(mode)
    model, before = run[0], whole(*run)
    for kind, without in itertools.product(("full", "sharded"), (0, 1, 2)):
        if (kind == "full") == (without % 2 == mode):  # by turns
            continue
        with FSDP.state_dict_type(model, *KINDS[kind]), FSDP.state_dict_type(source, *KINDS[kind]):
            state = source.state_dict()
            if dist.get_rank() == without:
                state = {key: value for key, value in state.items() if not key.endswith("linear.bias")}
            inside = {f"0.{key}": value for key, value in state.items()}
            for into, given, options in ((model, state, {"strict": False}), (nn.Sequential(model), inside, {})):
                words = "because of .*: it differs .*'linear.bias' of"
                with pytest.raises(RuntimeError, match=words):
                    into.load_state_dict(given, **options)
            assert_bit_equal(whole(*run), before, f"{kind}, without rank {without}")


@both_modes
@on_ranks(3)
def test_invalid_optimizer_state_on_one_rank_raises_on_every_rank(mode: bool) -> None:
    """When it is loaded in chunks that the ranks would exchange; the state does not change."""
    rank, (run, source) = dist.get_rank(), two_runs(mode)
    (model, optimizer), before = run, whole(*run)
    good = FSDP.sharded_optim_state_dict(*source)
    name, state = "blocks.0.linear.weight", good["state"]
    lacks = {key: value for key, value in state.items() if not key.startswith("blocks.0.")}
    for words, states in (
        (f"rank 1: it differs from rank 0 in .*'exp_avg' of '{name}'", lacks),
        (rf"'exp_avg' of '{name}' has shape \(7,\)", state | {name: {**state[name], "exp_avg": torch.ones(7)}}),
        ("optimizer holds no parameter 'nobody'", None),
    ):
        given = dict(good)
        if rank == 1:
            given = {**good, "state": states} if states else {**good, "param_groups": [{"params": ["nobody"]}]}
        with pytest.raises((RuntimeError, ValueError, KeyError), match=words):
            FSDP.flatten_sharded_optim_state_dict(given, model, optimizer)
    assert_bit_equal(whole(*run), before)
