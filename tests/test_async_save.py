"""Saves in the background: their content, the calls that wait for them, and the handling of their errors."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.checkpoint import async_save, files, load, load_plain, progress, save, save_checkpoint
from fsdp.checkpoint.files import Disk
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient
from tests.harness.models import WithExtraState
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import Died, on_ranks, run_fresh
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import wrap
from tests.harness.states import whole
from tests.harness.strategies import STRATEGIES


def part() -> WithExtraState:
    """Build a tied parameter, a buffer, extra state changed in place, a frozen parameter; sizes that do not divide."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.extra["batches"] += 1
        m.extra["sizes"].add(len(x))
        m.passes += 1
        return m.back(m.norm(m.linear(x) + m.again(x)))

    linear, norm, again, back = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(5, 7), nn.Linear(7, 5)
    again.weight = linear.weight
    back.bias.requires_grad_(False)
    extra = {"batches": torch.zeros(()), "sizes": set()}
    children = {"linear": linear, "norm": norm, "again": again, "passes": torch.zeros(()), "back": back}
    return WithExtraState(extra, forward=forward, **children)


def built(
    strategy: ShardingStrategy, mode: bool, seed: int = 0, **options: Any
) -> tuple[FullyShardedDataParallel, Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(part(), nn.Linear(5, 5), part())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NO_SHARD")
        model = wrap(module, strategy, mode, wrap_policy=ModuleWrapPolicy({WithExtraState}), **options)
    params = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW([{"params": params[:1], "lr": torch.tensor(0.02)}, {"params": params[1:]}], lr=0.01)


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + (dist.get_rank() if dist.is_initialized() else 0))
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(path: Path, mode: bool) -> dict[str, Tensor]:
    """Load the latest checkpoint in `path`, or the checkpoint `path`, into a model of other values."""
    model, optimizer = built(ShardingStrategy.FULL_SHARD, mode, seed=1)
    load(path, model, optimizer)
    return whole(model, optimizer)


class Gate(Disk):
    """Storage in which a save waits before the first file until the gate is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()

    def create(self, path: Path) -> BinaryIO:
        self.reached.set()
        assert self.opened.wait(60)
        return super().create(path)


# -- content -----------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_save_has_the_values_of_its_call(world_size: int, tmp_path: Path) -> None:
    """Later steps, changes in place and the training's collectives do not alter a save that has not written yet."""
    ways = list(itertools.product(STRATEGIES, (False, True)))
    by_ranks = {1: ways[5:], 2: (ways[0], ways[3], ways[4]), 3: ways[1:2]}
    for number, (strategy, mode) in enumerate(by_ranks[dist.get_world_size()]):
        path = tmp_path / f"{dist.get_world_size()}-{number}"
        (model, optimizer), (twin, twin_optimizer) = built(strategy, mode), built(strategy, mode)
        step(model, optimizer, 0)
        step(twin, twin_optimizer, 0)
        expected = whole(model, optimizer)
        files.disk = gate = Gate()
        with record_collectives() as log:
            outcome = async_save(path, model, optimizer, extra={"rank": dist.get_rank()})
        assert all(str(record.label).startswith("agree") for record in log.records)  # no tensor data travels
        for later in (1, 2):  # the training's collectives run between the save's
            step(model, optimizer, later)
            step(twin, twin_optimizer, later)
        assert_bit_equal(whole(model, optimizer), whole(twin, twin_optimizer))
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers(), *optimizer.param_groups[0]["params"]]:
                value.zero_()
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
            optimizer.param_groups[0]["lr"].zero_()
            for module in model.modules():
                if isinstance(module, WithExtraState):
                    module.extra["batches"].fill_(-1)
                    module.extra["sizes"].clear()
        assert not outcome.done()
        assert not (path / "latest").exists()
        gate.opened.set()
        assert outcome.result() == path / "checkpoint_00000001"
        files.disk = Disk()
        extra_state = load_plain(path).model["0._extra_state"]
        assert extra_state == {"batches": torch.ones(()), "sizes": {4}}
        model, optimizer = built(strategy, mode, seed=1)
        assert load(path, model, optimizer) == {"rank": dist.get_rank()}
        assert_bit_equal(whole(model, optimizer), expected)


# -- one at a time -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_save_and_load_wait_for_the_previous_async_save(tmp_path: Path) -> None:
    """Each of two overlapping saves has the values of its own call."""
    model, optimizer = built(ShardingStrategy.FULL_SHARD, True)
    path, expected = tmp_path, []

    def second_save() -> None:
        made = async_save(path, model, optimizer, extra="second")
        assert first.done() and made.result()

    def saved_in_flight() -> None:
        assert load(path, model, optimizer) == number

    uses = (second_save, lambda: save(path, model, optimizer), saved_in_flight)
    for number, use in enumerate(uses):
        step(model, optimizer, number)
        expected.append(whole(model, optimizer))
        files.disk = gate = Gate()
        first = async_save(path, model, optimizer, extra=number)
        assert gate.reached.wait(60)
        if use is not saved_in_flight:
            step(model, optimizer, 10 + number)
            expected.append(whole(model, optimizer))
        waiting = threading.Timer(0.1, gate.opened.set)  # before or after the call begins to wait
        waiting.start()
        use()
        assert first.done()
        waiting.join()
        files.disk = Disk()
    for number, values in enumerate(expected):
        assert_bit_equal(saved(path / f"checkpoint_{number + 1:08d}", True), values, f"checkpoint {number + 1}")


# -- errors ------------------------------------------------------------------------------------------------------------


class Full(Disk):
    def create(self, path: Path) -> BinaryIO:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@on_ranks(2)
def test_error_in_the_background_is_raised_on_every_rank(tmp_path: Path) -> None:
    """By `result()`, or else by the next save; the previous checkpoint is intact, and training and saving go on."""
    path, rank = tmp_path / "run", dist.get_rank()
    model, optimizer = built(ShardingStrategy.FULL_SHARD, False)
    step(model, optimizer, 0)
    before = whole(model, optimizer)
    save(path, model, optimizer)
    for failing in range(2):
        files.disk = Full() if rank == failing else Disk()
        outcome = async_save(path, model, optimizer)
        step(model, optimizer, 1)
        with pytest.raises(OSError, match=f"rank {failing}: No space left on device") as caught:
            outcome.result()
        assert caught.value.errno == errno.ENOSPC
        assert str(outcome.exception()) == str(caught.value)
        unasked = async_save(path, model, optimizer)
        with pytest.raises(RuntimeError, match=r"(?s)save in the background before this one has failed.*No space"):
            save(path, model, optimizer)
        if rank == 0:  # read on one rank only
            assert isinstance(unasked.exception(), OSError)
        dist.barrier()
        assert sorted(os.listdir(path)) == ["checkpoint_00000001", "latest"]
        assert_bit_equal(saved(path, False), before)
        dist.barrier()
    files.disk = Disk()
    with pytest.raises(TypeError, match="rank 1: extra is of type builtin_function_or_method, which"):
        async_save(path, model, optimizer, extra=print if rank == 1 else None)
    with pytest.raises(ValueError, match="keep must be a positive number"):
        async_save(path, model, optimizer, keep=0)
    assert async_save(path, model, optimizer, keep=1).result() == path / "checkpoint_00000002"
    dist.barrier()
    assert sorted(os.listdir(path)) == ["checkpoint_00000002", "latest"]


def test_finished_save_holds_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the outcome, nor an error, nor the warning at exit keeps the staged copies alive."""
    copies: list[weakref.ref[Tensor]] = []

    def staged(saving: save_checkpoint.Save) -> None:
        stage(saving)
        copies.extend(weakref.ref(piece.values) for piece in saving.share.pieces)

    stage = save_checkpoint.Save._stage
    monkeypatch.setattr(save_checkpoint.Save, "_stage", staged)
    async_save(tmp_path, nn.Linear(2, 2)).result()
    monkeypatch.setattr(files, "disk", Full())
    failed = async_save(tmp_path, nn.Linear(2, 2))
    error = failed.exception()
    assert isinstance(error, OSError) and error.__traceback__ is not None
    assert len(copies) == 4 and all(copy() is None for copy in copies)
    outcome, error = weakref.ref(failed), None
    del failed
    monkeypatch.setattr(files, "disk", Disk())
    save(tmp_path, nn.Linear(2, 2))
    gc.collect()
    assert outcome() is None


class Deadly(Disk):
    def write(self, stream: BinaryIO, data: Any, offset: int) -> None:
        os._exit(9)


@impatient
def save_while_rank_1_dies(root: str) -> None:
    model, optimizer = built(ShardingStrategy.FULL_SHARD, False)
    step(model, optimizer, 0)
    save(root, model, optimizer)
    if dist.get_rank() == 1:
        files.disk = Deadly()
    outcome = async_save(root, model, optimizer)
    try:
        outcome.result()
    except RuntimeError as error:
        Path(f"{root}/error{dist.get_rank()}").write_text(str(error))


def test_rank_that_dies_during_a_save_is_named_on_every_rank(tmp_path: Path) -> None:
    """Every remaining rank raises at once, and the previous checkpoint is the latest."""
    assert isinstance(run_fresh(3, save_while_rank_1_dies, str(tmp_path))[1], Died)
    gone = "fsdp.checkpoint.async_save() (write a checkpoint): waiting for rank 1, which is gone"
    assert gone in (tmp_path / "error0").read_text()
    error = (tmp_path / "error2").read_text()
    assert f"rank 0 left {gone}" in error
    assert "Timed out" not in error
    assert (tmp_path / "latest").read_text().startswith("checkpoint_00000001 ")
    load_plain(tmp_path)


# -- at the process's exit ---------------------------------------------------------------------------------------------


class Slow(Disk):
    def __init__(self, full: bool) -> None:
        self.full = full

    def sync(self, stream: BinaryIO) -> None:
        time.sleep(0.2)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().sync(stream)


class Ended(BaseException):
    """Uncaught exception: the interpreter exits."""


def save_and_exit(root: str, group: str, is_full: bool) -> None:
    with open(f"{root}/stderr{dist.get_rank()}", "wb") as stderr:
        os.dup2(stderr.fileno(), 2)
    files.disk = Slow(is_full)
    model: nn.Module = nn.Linear(5, 7)
    if group == "no group":
        dist.destroy_process_group()
    else:
        model = FullyShardedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    async_save(f"{root}/run", model, optimizer)
    if group == "group destroyed after the call":
        dist.destroy_process_group()
    raise Ended


@pytest.mark.parametrize(
    ("group", "is_full"),
    [("no group", False), ("group", True), ("group destroyed after the call", False), ("group", False)],
)
def test_process_finishes_its_save_before_it_exits(tmp_path: Path, group: str, is_full: bool) -> None:
    """A failure is written to stderr."""
    ranks = 1 if group == "no group" else 2
    assert run_fresh(ranks, save_and_exit, str(tmp_path), group, is_full) == [Died(1)] * ranks
    stderr = "".join((tmp_path / f"stderr{rank}").read_text() for rank in range(ranks))
    if is_full:
        assert "a checkpoint was not saved" in stderr
        assert "No space left on device" in stderr
        assert os.listdir(tmp_path / "run") == []
    else:
        assert set(load_plain(tmp_path / "run").model) == {"weight", "bias"}


# -- bars --------------------------------------------------------------------------------------------------------------


def test_long_saves_and_loads_show_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, after a delay, unless it is turned off; never for a save in the background."""
    model = nn.Linear(100, 100)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    save(tmp_path, model)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    save(tmp_path, model)
    assert "saving" in (shown := capsys.readouterr().err)
    assert "40.4k" in shown  # bytes
    load(tmp_path, model)
    shown = capsys.readouterr().err
    assert "verifying" in shown and "loading" in shown
    save(tmp_path, model, progress=False)
    load(tmp_path, model, progress=False)
    load_plain(tmp_path, progress=False)
    async_save(tmp_path, model).result()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    save(tmp_path, model)
    assert capsys.readouterr().err == ""
