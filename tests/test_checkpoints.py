"""Models and optimizers together, through every way out and back in, over world sizes, strategies and modes.

What is saved is a training run with everything that makes state hard: ties, few elements and empty shards, memory in
another order, frozen parameters, parameters without state, several groups.
"""

from __future__ import annotations

import copy
import errno
import io
import itertools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp.checkpoint import StateDictOptions, get_state_dict, load, save
from fsdp.checkpoint.files import Disk
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.disk import FaultyDisk, on_disk
from tests.harness.oracle import assert_bit_equal
from tests.harness.pairs import pairwise
from tests.harness.pool import run_ranks
from tests.harness.sharded import full_gradients, wrap
from tests.test_state_dict import kind_of

FSDP = FullyShardedDataParallel
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
WAYS = list(itertools.product(STRATEGIES, (False, True)))  # strategy and use_orig_params


class Block(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(a, b), nn.Linear(a, b).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))  # fewer elements than ranks

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.frozen(x)) * self.scale


class Tiny(nn.Module):
    """A unit whose shards are empty on all ranks but one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.register_buffer("shift", torch.randn(5))
        self.blocks = nn.Sequential(Block(5, 3), checkpoint_wrapper(Block(3, 5)))
        self.tiny, self.idle = Tiny(1.5), Tiny(0.5)  # the second is trained by no optimizer
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tiny(self.blocks(self.tokens(tokens) + self.shift))
        return self.head(self.idle(x)) + self.image.square().mean()


def plain(seed: int) -> Everything:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return Everything()


def build(seed: int, strategy: ShardingStrategy, mode: bool) -> tuple[FullyShardedDataParallel, Optimizer]:
    model = wrap(plain(seed), strategy, mode, wrap_policy=ModuleWrapPolicy({Block, Tiny}))
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


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all there is, by name: parameters and buffers, optimizer state, hyperparameters."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    everything = {**of_model, **of_optimizer}
    return {key: torch.as_tensor(value).clone() for key, value in everything.items() if value is not None}


# -- out and back in ---------------------------------------------------------------------------------------------------

Run = tuple[FullyShardedDataParallel, Optimizer]
KINDS = {
    "full": (StateDictType.FULL_STATE_DICT,),
    "sharded": (StateDictType.SHARDED_STATE_DICT,),
    "local": (StateDictType.LOCAL_STATE_DICT,),
    "ragged": (StateDictType.SHARDED_STATE_DICT, RaggedStateDictConfig(), RaggedOptimStateDictConfig()),
    "rank 0": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        FullOptimStateDictConfig(rank0_only=True),
    ),
}


def carry(kind: str, source: Run, target: Run, folder: str) -> None:
    """The state of one run into another."""
    if kind == "directory":
        save(folder, *source, keep=1)
        load(folder, *target)
        return
    states = []
    with kind_of(source[0], "full"):  # it quiets what is said about NO_SHARD
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


def carried_on(root: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    kinds = [*KINDS, "directory"]
    for number, (strategy, mode) in enumerate(WAYS):
        if world_size == 4 and number != 3:  # nobody goes on from these
            continue
        if world_size in (1, 3) and not through_a_directory(world_size, number):
            continue
        run = build(1, strategy, mode)
        train(*run, range(2))
        half, goes_on = whole(*run), build(2, strategy, mode)
        for turn in range(len(kinds)):  # the last of them, another one for each way, is trained further
            kind = kinds[(number + world_size + turn) % len(kinds)]
            is_loaded = kind == "directory" and through_a_directory(world_size, number)  # by other numbers of ranks
            is_next = world_size == 2 and (turn + number // 2) % 3 == 0
            if turn < len(kinds) - 1 and not is_loaded and not is_next:
                continue
            target = goes_on if turn == len(kinds) - 1 else build(2, strategy, mode)
            carry(kind, run, target, f"{root}/{world_size}-{number}")
            assert_bit_equal(whole(*target), half, f"{kind}, {strategy}, use_orig_params={mode}")
        later = 5 if through_a_directory(world_size, number) else 1
        for one in (run, goes_on):
            train(*one, range(2, 2 + later))
        what = f"{kind}, {strategy}, use_orig_params={mode}, {later} steps later"
        assert_bit_equal(whole(*goes_on), whole(*run), what)
        if rank == 0:
            torch.save(half, f"{root}/{world_size}-{number}.expected")


def through_a_directory(world_size: int, number: int) -> bool:
    """Whether way `number` is saved to one, where kinds of state come by turns."""
    return (world_size + number) % 2 == 0


def carried_over(root: str) -> None:
    """What other numbers of ranks have saved, under other strategies and modes: on one rank all of it, by turns two of
    three such directories on 2 ranks, and the third on 4."""
    here = dist.get_world_size()
    for there, number in itertools.product((1, 2, 3), range(len(WAYS))):
        third = number // 2 == there % 3
        if not through_a_directory(there, number) or (here == 2 and third) or (here == 4 and not third):
            continue
        run = build(3, *WAYS[(number // 2 + there + here) % len(WAYS)])
        load(f"{root}/{there}-{number}", *run)
        assert_bit_equal(whole(*run), torch.load(f"{root}/{there}-{number}.expected"), f"{there} ranks, {WAYS[number]}")


def test_any_run_goes_on_from_any_kind_of_state_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Every kind of state with every strategy and in both modes on 2 ranks, by turns on others, bit for bit, and
    steps later, by turns five; and from 1, 2 and 3 ranks to 1, 2 and 4."""
    for world_size in (1, 2, 3, 4):
        run_ranks(world_size, carried_on, str(tmp_path), timeout=180)
    for world_size in (1, 2, 4):
        run_ranks(world_size, carried_over, str(tmp_path), timeout=180)


def holders() -> None:
    """State of a parent, of a unit and of a module inside of one, each of its own kind, into that of another model."""
    for mode, kind in itertools.product((False, True), ("full", "sharded", "local", "ragged")):
        (model, _), (other, _) = (build(seed, STRATEGIES[0], mode) for seed in (1, 2))
        for find in (
            lambda m: nn.Sequential(nn.ReLU(), m),
            lambda m: m.module.blocks[0],
            lambda m: m.module.blocks,
            lambda m: m.module.idle,
        ):
            into, source = find(other), find(model)
            with FSDP.state_dict_type(source, *KINDS[kind]), FSDP.state_dict_type(into, *KINDS[kind]):
                assert into.load_state_dict(source.state_dict()) == ([], [])
            with kind_of(source, "full"), kind_of(into, "full"):
                assert_bit_equal(into.state_dict(), source.state_dict(), f"{kind}, use_orig_params={mode}")


def test_every_kind_of_state_of_parents_and_nested_units() -> None:
    """There and back, alone."""
    run_ranks(2, holders)


def buffers(root: str) -> None:
    """With a dtype of their own for buffers, and after a failed forward, from which nobody has recovered."""
    low = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    for strategy, mode in WAYS[::2] + WAYS[1::4]:
        policy = ModuleWrapPolicy({Block})
        model, other = (wrap(plain(s), strategy, mode, wrap_policy=policy, mixed_precision=low) for s in (1, 2))
        for one in (model, other):
            one.module.tiny.register_forward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                one(torch.arange(6))
        expected = plain(1).state_dict()
        expected["shift"] = expected["shift"].bfloat16().float()
        for kind in KINDS:
            with kind_of(model, "full"), kind_of(other, "full"):
                other.load_state_dict(plain(2).state_dict())
                with FSDP.state_dict_type(model, *KINDS[kind]), FSDP.state_dict_type(other, *KINDS[kind]):
                    state = model.state_dict()
                    assert kind == "rank 0" or state["shift"].dtype == torch.float32
                    other.load_state_dict({} if kind == "rank 0" and dist.get_rank() > 0 else state)
                assert other.module.shift.dtype == torch.bfloat16
                assert_bit_equal(other.state_dict(), expected, f"{kind}, {strategy}, use_orig_params={mode}")
        save(root, model)
        other.load_state_dict(plain(2).state_dict())
        load(root, other)
        with kind_of(other, "full"):
            assert_bit_equal(other.state_dict(), expected, f"{strategy}, use_orig_params={mode}")


def fail(*args: Any) -> None:
    raise ZeroDivisionError


def test_state_after_a_failure_and_buffers_of_another_dtype(tmp_path: Path) -> None:
    """What was trained can be saved after an exception; buffers leave in the dtype that they had."""
    run_ranks(2, buffers, str(tmp_path))


# -- at any time -------------------------------------------------------------------------------------------------------


def everything_at(run: Run, root: str, kind: str, *, loads: bool) -> None:
    """What there is to do with state of this kind, with no effect on values."""
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


def refused(model: nn.Module, root: str) -> None:
    """Model state while a unit runs; on every rank, whatever the kind, and nothing is left of the attempt."""
    attempts: list[Callable[[], Any]] = [lambda: model.load_state_dict({}, strict=False), lambda: save(root, model)]
    for kind in KINDS:
        with kind_of(model, "full"), FSDP.state_dict_type(model, *KINDS[kind]):
            for attempt in (model.state_dict, *(attempts if kind == "full" else ())):
                with pytest.raises(RuntimeError, match=r"in the middle of the (for|back)ward of .*: call it outside"):
                    attempt()


def interrupted(root: str, numbers: Sequence[int]) -> None:
    """One accumulation over three backwards, and the step; with and without everything in between: at each place
    another kind of state in each of the ways."""
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
                place: str,
                run: Run = run,
                disturbed: bool = disturbed,
                reached: list[str] = reached,
                turn: int = number,
            ) -> None:
                if disturbed and place not in reached:
                    reached.append(place)
                    if "middle" in place:
                        refused(run[0], root)
                    else:  # before a backward, that would refuse what was loaded
                        kind = kinds[(turn + len(reached)) % len(kinds)]
                        everything_at(run, root, kind, loads="before backward" not in place)

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


def test_state_in_the_middle_of_anything(tmp_path: Path) -> None:
    """Refused while a unit runs; anywhere else in an accumulation values are exact and gradients stay."""
    for world_size, numbers in ((1, (5,)), (2, (0, 2, 3)), (3, (1, 4))):
        run_ranks(world_size, interrupted, str(tmp_path / str(world_size)), numbers, timeout=180)


# -- files -------------------------------------------------------------------------------------------------------------

SLACK = 64 * 1024  # bytes of a file that are no values


def payload(state: Any) -> int:
    """Bytes of the values in a nested state that this rank holds."""
    total = 0
    for leaf in tree_leaves(state, is_leaf=lambda x: isinstance(x, ShardedTensor)):
        if isinstance(leaf, ShardedTensor):
            total += sum(shard.tensor.nbytes for shard in leaf.local_shards())
        elif isinstance(leaf, RaggedTensor):
            total += leaf.local.nbytes
        elif isinstance(leaf, Tensor):
            total += leaf.nbytes
    return total


def sizes(root: str, mode: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = nn.Sequential(*(nn.Linear(250, 250) for _ in range(3)))
    model = wrap(module, use_orig_params=mode, wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 250)).square().mean().backward()
    optimizer.step()
    total = 3 * (250 * 250 + 250) * 4
    for kind in KINDS:
        with kind_of(model, "full"), FSDP.state_dict_type(model, *KINDS[kind]):
            for state, values in ((model.state_dict(), total), (FSDP.optim_state_dict(model, optimizer), 2 * total)):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Please use DTensor instead")
                    torch.save(state, file := io.BytesIO())
                held = {"full": values, "rank 0": values if rank == 0 else 0}.get(kind, values // world_size)
                assert abs(payload(state) - held) <= SLACK // 4, kind
                assert payload(state) <= len(file.getvalue()) <= payload(state) + SLACK, kind
    folder = save(root, model, optimizer, extra={"x": torch.ones(30_000)[:10]})
    for path in folder.iterdir():
        held = 3 * total / world_size if path.suffix == ".safetensors" else 0
        assert path.stat().st_size <= held + SLACK, path


@pytest.mark.parametrize("mode", [False, True])
def test_files_have_little_more_than_the_values(tmp_path: Path, mode: bool) -> None:
    """Each file of each kind of state, of models and optimizers, within 64 KiB of what the rank holds."""
    run_ranks(3, sizes, str(tmp_path), mode)


# -- what does not fit -------------------------------------------------------------------------------------------------


def quoted(text: str, after: str) -> set[str]:
    """The names that an error lists."""
    line = next(line for line in text.split("\n") if after in line)
    return set(line.split('"')[1::2])


def renamed_keys() -> None:
    kinds = ("full", "sharded", "ragged", "rank 0")
    added_by_others = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    places = ("", "blocks.0.", "blocks.1.")  # the last one is wrapped for checkpointing
    cases = pairwise((False, True), kinds, added_by_others, places)
    for (mode, kind), of_these in itertools.groupby(cases, key=lambda case: case[:2]):
        model, _ = build(1, STRATEGIES[0], mode)
        other, _ = build(2, STRATEGIES[0], mode)
        with kind_of(model, "full"):
            before = model.state_dict()
        with FSDP.state_dict_type(model, *KINDS[kind]), FSDP.state_dict_type(other, *KINDS[kind]):
            good = other.state_dict()
            if kind == "rank 0" and dist.get_rank() > 0:
                good = {}
            for _, _, added, place in of_these:
                renamed = {f"{place}{added}{k.removeprefix(place)}" if k.startswith(place) else k: k for k in before}
                state = {new: good[old] for new, old in renamed.items() if old in good}
                with pytest.raises(RuntimeError) as caught:
                    model.load_state_dict(state)
                wrong = {new: old for new, old in renamed.items() if new != old}
                assert quoted(str(caught.value), "Unexpected key(s) in") == set(wrong), (kind, added, place)
                assert quoted(str(caught.value), "Missing key(s) in") == set(wrong.values()), (kind, added, place)
        with kind_of(model, "full"):
            assert_bit_equal(model.state_dict(), before)


def test_renamed_keys_are_all_listed_on_every_rank_and_nothing_is_loaded() -> None:
    """Whatever other wrappers add, in front and in between, in every kind of state."""
    run_ranks(2, renamed_keys)


# -- what one rank alone has -------------------------------------------------------------------------------------------


def states_in(optimizers: list[Any]) -> dict[str, Tensor]:
    """Of optimizers, or of their dicts."""
    dicts = [one if isinstance(one, dict) else one.state_dict() for one in optimizers]
    return {
        f"{number} {key} {name}": value
        for number, one in enumerate(dicts)
        for key, states in one["state"].items()
        for name, value in states.items()
    }


def one_rank_differs(root: str) -> None:
    rank = dist.get_rank()
    for mode in (False, True):
        run, (other, other_optimizer) = build(1, STRATEGIES[0], mode), build(2, STRATEGIES[0], mode)
        for one in (run, (other, other_optimizer)):
            train(*one, range(1))
        model, optimizer = run
        before = whole(*run)
        # model state: a parameter that only some ranks would load
        for kind, without in itertools.product(("full", "sharded"), (0, 1, 2)):
            if (kind == "full") == (without % 2 == mode):  # by turns
                continue
            with FSDP.state_dict_type(model, *KINDS[kind]), FSDP.state_dict_type(other, *KINDS[kind]):
                state = {
                    k: v for k, v in other.state_dict().items() if rank != without or not k.endswith("linear.bias")
                }
                inside = {f"0.{key}": value for key, value in state.items()}
                for into, given, options in ((model, state, {"strict": False}), (nn.Sequential(model), inside, {})):
                    words = "on another rank: the state dict differs .*'linear.bias' of"
                    with pytest.raises(RuntimeError, match=words):
                        into.load_state_dict(given, **options)
                assert_bit_equal(whole(*run), before, f"{kind}, without rank {without}")
        # optimizer state, in chunks that the ranks would exchange
        good = FSDP.sharded_optim_state_dict(other, other_optimizer)
        name, state = "blocks.0.linear.weight", good["state"]
        raw = copy.deepcopy(optimizer.state_dict())
        lacks = {key: value for key, value in state.items() if not key.startswith("blocks.0.")}
        for what, states in (
            (f"state dict differs from that here in .*'exp_avg' of '{name}'", lacks),
            (rf"'exp_avg' of '{name}' has shape \(7,\)", state | {name: {**state[name], "exp_avg": torch.ones(7)}}),
            ("optimizer holds no parameter 'nobody'", None),
        ):
            given = dict(good)
            if rank == 1:
                given = {**good, "state": states} if states else {**good, "param_groups": [{"params": ["nobody"]}]}
            with pytest.raises((RuntimeError, ValueError, KeyError), match=what):
                FSDP.flatten_sharded_optim_state_dict(given, model, optimizer)
        # in a directory: what the optimizer of one rank trains is not there
        several = [AdamW(model.blocks.parameters()), AdamW(model.tiny.parameters())]
        loss_of(model, 5).backward()
        for one in several:
            one.step()
        save(f"{root}/{mode}", model, several)
        known = [copy.deepcopy(one.state_dict()) for one in several]
        loss_of(model, 5).backward()
        for one in several:
            one.step()
        later = [copy.deepcopy(one.state_dict()) for one in several]
        idle = AdamW(model.idle.parameters())
        for others, words in (
            ([several[0], idle], r"rank 1: the checkpoint .* has optimizer state of 'tiny\.gain', which no optimizer"),
            ([*several, idle], r"rank 1: the optimizer trains 'idle\.gain', which no parameter group"),
        ):
            with pytest.raises(RuntimeError, match=words):
                load(f"{root}/{mode}", model, others if rank == 1 else several)
            assert_bit_equal(states_in(several), states_in(later))
        load(f"{root}/{mode}", model, several)
        assert_bit_equal(states_in(several), states_in(known))
        model.zero_grad()
        before = whole(*run)
        # on the way out
        stranger = AdamW([*model.parameters(), *([nn.Parameter(torch.ones(3))] if rank == 1 else [])])
        with pytest.raises(KeyError, match=r"rank 1: the optimizer holds a parameter of shape \(3,\)"):
            FSDP.full_optim_state_dict(model, stranger)
        if rank == 1:
            next(iter(optimizer.state.values()))["made by"] = lambda: 0
        with pytest.raises(NotImplementedError, match=r"rank 1: .*, but a state cannot be pickled"):
            FSDP.full_optim_state_dict(model, optimizer)
        optimizer.load_state_dict(raw)
        assert_bit_equal(whole(*run), before)
        train(*run, range(1, 2))


def test_what_one_rank_alone_was_given_is_an_error_on_all(tmp_path: Path) -> None:
    """In words that name it, and nothing was loaded; nobody waits, and no process is aborted."""
    run_ranks(3, one_rank_differs, str(tmp_path))


# -- faults ------------------------------------------------------------------------------------------------------------


def listed(root: Path) -> tuple[list[str], str]:
    return sorted(os.listdir(root)), (root / "latest").read_text()


def save_in_vain(root: Path, run: Run, failing: int, at: int) -> None:
    """One rank's disk fails at its `at`-th operation: all ranks are told, and the save is there whole or not at all."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
    names, latest = listed(root)
    dist.barrier()
    with on_disk(FaultyDisk(at, error) if dist.get_rank() == failing else Disk()), pytest.raises(OSError) as caught:
        save(root, *run)
    assert caught.value.errno == errno.ENOSPC
    assert f"rank {failing}: " in str(caught.value) or dist.get_world_size() == 1
    dist.barrier()
    if listed(root) != (names, latest):  # it failed after the last rename
        assert listed(root)[1] != latest
        assert listed(root)[0] == sorted([*names, listed(root)[1].split()[0]])
    dist.barrier()


def faults(folder: str, numbers: Sequence[int]) -> None:
    """Operations of each rank's disk fail, others in each of the ways `numbers`; then each file is damaged."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    damage = itertools.cycle(("flip", "cut", "lost", "exchanged"))
    for number in numbers:
        strategy, mode = WAYS[number]
        root, run, fresh = Path(folder) / str(number), build(1, strategy, mode), build(2, strategy, mode)
        train(*run, range(1))
        with on_disk(counting := FaultyDisk()):
            save(root, *run)
        operations = counting.count - 2 * (rank == 0)  # later saves find the directory
        old = whole(*run)
        train(*run, range(1, 2))
        for turn in range(3):
            at = (number + turn * len(WAYS)) * operations // (3 * len(WAYS))
            save_in_vain(root, run, failing=(number + turn) % world_size, at=at)
        load(root / "checkpoint_00000001", *fresh)
        assert_bit_equal(whole(*fresh), old, "the old checkpoint")
        save(root, *run)
        paths = sorted((root / (root / "latest").read_text().split()[0]).iterdir())
        for path in paths[number % 2 :: 2]:
            dist.barrier()
            content, how = path.read_bytes(), next(damage)
            dist.barrier()
            if rank == 0:
                hurt(path, how, paths)
            dist.barrier()
            with pytest.raises(RuntimeError, match=re.escape(path.name)):
                load(root, *fresh)
            dist.barrier()
            if rank == 0:
                path.write_bytes(content)
        dist.barrier()
        assert_bit_equal(whole(*fresh), old, "damaged")
        load(root, *fresh)
        assert_bit_equal(whole(*fresh), whole(*run), "whole again")


def hurt(path: Path, how: str, paths: list[Path]) -> None:
    content = path.read_bytes()
    if how == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "cut":
        path.write_bytes(content[:-1])
    elif how == "lost":
        path.unlink()
    else:
        path.write_bytes(paths[paths.index(path) - 1].read_bytes())


@pytest.mark.parametrize(("world_size", "numbers"), [(1, (5,)), (2, (0, 3, 4)), (3, (1,)), (4, (2,))])
def test_faults_and_damage_with_every_strategy(tmp_path: Path, world_size: int, numbers: Sequence[int]) -> None:
    """On all ranks, in both modes; the old checkpoint stays, and what is damaged changes nothing."""
    run_ranks(world_size, faults, str(tmp_path), numbers, timeout=180)
