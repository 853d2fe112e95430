"""Checkpoints of hosts: each host has the files of its ranks and copies of others. Every rank here is a host."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp
from fsdp.checkpoint import Local, files, load, save
from fsdp.comm import consensus
from tests.harness.disk import FaultyDisk, on_disk
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import Died, on_ranks, run_fresh, run_ranks
from tests.harness.sharded import wrap
from tests.harness.states import whole

HOSTS = 3
WIDTH = 11


def built(seed: int = 0, group: Any = None) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))
    model = wrap(net, use_orig_params=True, wrap_policy=fsdp.wrap.ModuleWrapPolicy({nn.Linear}), process_group=group)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def host(root: Path, copies: int = 1, rank: int | None = None) -> Iterator[Local]:
    """Let this rank be a host with a directory of its own."""
    name = f"host{dist.get_rank() if rank is None else rank}"
    with mock.patch.dict(os.environ, FSDP_HOST=name):
        yield Local(root / name, copies)


def resumed(sources: Any, group: Any = None) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Load into a new model; return the extra, all values, and the warnings of this rank."""
    model, optimizer = built(9, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = load(sources, model, optimizer, process_group=group)
    return extra, whole(model, optimizer), [str(each.message) for each in caught]


def flip(path: Path) -> None:
    """Change a byte of a tensor."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def after(change: Callable[[], object]) -> None:
    """Change files on rank 0, while no rank uses them."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


@on_ranks(HOSTS)
def test_loss_of_a_host_and_damage_are_made_good_from_copies(tmp_path: Path) -> None:
    model, optimizer = built()
    states = {}
    with host(tmp_path) as local:
        assert load([local, tmp_path / "disk"], model, optimizer) is None  # nothing is there
        for number in range(4):
            step(model, optimizer, number)
            states[number] = whole(model, optimizer)
            if number == 0:
                save(tmp_path / "disk", model, optimizer, extra=number)
            else:
                local.save(model, optimizer, extra=number)
        own = {f"rank_{rank}.safetensors" for rank in (dist.get_rank(), (dist.get_rank() - 1) % HOSTS)}
        names = sorted(path.name for path in local.path.iterdir())
        assert names == ["checkpoint_00000002", "checkpoint_00000003", "latest"], "two checkpoints are kept"
        newest, older = local.path / names[1], local.path / names[0]
        assert {path.name for path in newest.iterdir()} == own | {"index.json", "manifest.json"}

        def check(expected: int, warned: str = "") -> None:
            extra, found, texts = resumed([local, tmp_path / "disk"])
            assert extra == expected
            assert_bit_equal(found, states[expected], str(expected))
            assert (len(texts) == 1 and warned in texts[0]) if warned and dist.get_rank() == 0 else not texts

        check(3)
        after(lambda: shutil.rmtree(tmp_path / "host1"))
        check(3)
        assert newest.is_dir(), "the host has files again"
        after(lambda: flip(tmp_path / "host2" / newest.name / "rank_2.safetensors"))
        check(3)
        check(3)  # and the file is whole again
        after(lambda: (tmp_path / "host2" / newest.name / "index.json").unlink())
        after(lambda: (tmp_path / "host0" / newest.name / "rank_2.safetensors").unlink())  # a copy
        check(3)
        for rank in range(HOSTS):
            after(lambda: [flip(path) for path in tmp_path.glob(f"host{rank}/{newest.name}/rank_0.*")])  # noqa: B023
        check(2, "no host has rank_0.safetensors whole")
        after(lambda: [shutil.rmtree(path) for path in tmp_path.glob(f"*/{older.name}")])
        check(0, "checkpoint_00000003 of the hosts was not loaded")
        after(lambda: shutil.rmtree(tmp_path / "disk"))
        with pytest.raises(RuntimeError, match=r"no checkpoint that is whole: checkpoint_00000003 of the hosts"):
            load([local, tmp_path / "disk"], *built())
        local.save(model, optimizer, extra=4)  # goes on
        assert resumed(local)[0] == 4
        dist.barrier()


@on_ranks(HOSTS)
def test_newer_checkpoint_on_the_shared_disk_is_loaded(tmp_path: Path) -> None:
    model, optimizer = built()
    with host(tmp_path) as local:
        local.async_save(model, optimizer, extra="of the hosts").result()
        assert resumed([tmp_path / "disk", local])[0] == "of the hosts"
        step(model, optimizer, 0)
        save(tmp_path / "disk", model, optimizer, extra="of the disk")
        assert resumed([local, tmp_path / "disk"])[0] == "of the disk"
        local.async_save(model, optimizer, extra="of the hosts again")
        assert resumed([tmp_path / "disk", local])[0] == "of the hosts again"


@on_ranks(HOSTS)
def test_two_ranks_continue_what_three_have_saved(tmp_path: Path) -> None:
    """Each needs parts of files that are on other hosts, of which one is gone."""
    model, optimizer = built()
    step(model, optimizer, 0)
    state, pair = whole(model, optimizer), dist.new_group([0, 2])
    with host(tmp_path) as local:
        local.save(model, optimizer, extra=dist.get_rank())
        after(lambda: shutil.rmtree(tmp_path / "host1"))
        if dist.get_rank() != 1:
            extra, found, texts = resumed(local, pair)
            assert extra == (0 if dist.get_rank() == 0 else 1) and not texts
            assert_bit_equal(found, state, "two ranks")


@on_ranks(4)
def test_two_hosts_with_two_ranks_each(tmp_path: Path) -> None:
    model, optimizer = built()
    state = whole(model, optimizer)
    number = dist.get_rank() // 2
    with host(tmp_path, rank=number) as local:
        local.save(model, optimizer)
        assert sorted(path.name for path in tmp_path.glob("host*/*/rank_*")) == sorted(
            f"rank_{rank}.safetensors" for rank in [*range(4)] * 2
        )
        after(lambda: shutil.rmtree(tmp_path / "host0"))
        assert_bit_equal(resumed(local)[1], state, "two hosts")
        with pytest.raises(ValueError, match="copies=2 takes as many other hosts, but the ranks are on 2 alone"):
            Local(local.path, copies=2).save(model, optimizer)
        dist.barrier()
        if number == 0:
            assert len([*local.path.glob("*/rank_*")]) == 2, "a host gets the files that its ranks need alone"


@on_ranks(HOSTS)
def test_error_of_one_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """At every third operation of one rank: while the file is written, copied or published."""
    model, optimizer = built()
    with host(tmp_path) as local:
        local.save(model, optimizer, extra="before")
        disk = FaultyDisk()
        with on_disk(disk):
            local.save(model, optimizer, extra="before")
        counts = [None] * HOSTS
        dist.all_gather_object(counts, disk.count)
        for at in range(0, counts[1], 3):
            faulty = FaultyDisk(at if dist.get_rank() == 1 else 10**6, OSError(errno.ENOSPC, "full"))
            with on_disk(faulty), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where an older checkpoint could not be removed
                try:
                    local.save(model, optimizer, extra="after")
                except OSError as error:
                    assert "full" in str(error), error
                    expected = "before"
                else:
                    expected = "after"
            assert load(local, *built(9)) == expected, at
            dist.barrier()
            if expected == "after":
                local.save(model, optimizer, extra="before")
        local.save(model, optimizer, extra="the last one")
        assert load(local, *built(9)) == "the last one"


PHASES = ("forward", "reductions", "step", "write", "send", "rename")
KILLED, LAST = 1, 2  # the step in which a rank is killed, and the last one


def train(root: str, phase: str = "", victim: int = -1) -> tuple[int, list[Tensor]]:
    """Train on from the newest checkpoint, and save every step; ``victim`` is killed in the phase of a step.

    Returns the step from which the run went on, -1 at the start, and the parts of the parameters at the end.
    """
    here, number = dist.get_rank(), -1

    def reach(name: str) -> None:
        if name == phase and here == victim and number == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    def reaching(name: str, owner: Any, attribute: str) -> Any:
        function = getattr(owner, attribute)

        def run(*args: Any, **kwargs: Any) -> Any:
            reach(name)
            return function(*args, **kwargs)

        return mock.patch.object(owner, attribute, run)

    model, optimizer = built()
    model.module[2].register_forward_pre_hook(lambda *_: reach("forward"))
    model.module[2].register_full_backward_hook(lambda *_: reach("reductions"))
    optimizer.register_step_pre_hook(lambda *_: reach("step"))
    with host(Path(root)) as local, ExitStack() as stack:
        begun = load([local], model, optimizer)
        for name, owner, attribute in (
            ("write", files.disk, "create"),
            ("send", consensus.SideGroup, "message"),
            ("rename", files, "publish"),
        ):
            stack.enter_context(reaching(name, owner, attribute))
        for number in range(0 if begun is None else begun + 1, LAST + 1):
            try:
                step(model, optimizer, number)
                local.save(model, optimizer, extra=number)
            except RuntimeError:  # of the rank that was killed
                assert number == KILLED and here != victim
                break
    return -1 if begun is None else begun, [param.detach().clone() for param in model.parameters()]


def test_run_goes_on_from_the_last_whole_step_after_a_rank_was_killed(tmp_path: Path) -> None:
    """In each phase of a step, with the files of the host lost or not; the weights are those of an undisturbed run."""
    expected = run_ranks(HOSTS, train, str(tmp_path / "undisturbed"))
    for number, phase in enumerate(PHASES):
        root, victim = tmp_path / phase, number % HOSTS
        assert isinstance(run_fresh(HOSTS, train, str(root), phase, victim)[victim], Died), phase
        if number % 2:
            shutil.rmtree(root / f"host{victim}")
        found = run_ranks(HOSTS, train, str(root))
        assert {begun for begun, _ in found} <= {KILLED - 1, KILLED}, phase
        for (_, here), (_, there) in zip(found, expected):
            assert all(map(torch.equal, here, there)), phase
