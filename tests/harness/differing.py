"""Random programs in which one rank deviates at one action, and the outcome on every rank.

A program is a list of actions, equal on all ranks except for the deviation. Everything follows from a seed.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType
from fsdp.checkpoint import async_save
from fsdp.comm import threads
from fsdp.comm.waiting.work import OutOfStep
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import WIDTH, Block, Chain, new_pair

SOON = 10.0  # seconds until every rank must have an error
STOPPED = 30.0  # seconds that a rank is stopped
TIMEOUT = 25.0  # of a collective: a divergence that ends this way was not detected


class Fault(Exception):
    """An exception of the user's code."""


@dataclass(frozen=True)
class Action:
    """One action: "train", "eval", "twice" (two forwards, then two backwards), "no_sync", or a call."""

    kind: str
    order: tuple[int, ...] = ()
    clips: bool = False
    fails: str = ""  # "forward" or "backward", a space, and the exception
    position: int = 0


# In programs without a deviation also: another model over the same ranks, one over some of them, one on another thread
# at the same time, a save in the background.
AGREES = ("nothing", "stop")
ALIKE = ("other", "some", "thread", "save", "save")
CALLS = ("state_dict", "rank0_state_dict", "optim_state_dict", "summon", "load", "clip", "grads")


@dataclass
class Program:
    """A program drawn from a seed, alike on every rank."""

    seed: int
    world_size: int
    widths: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    odd: int = 0
    at: int = 0
    deviation: str = ""
    instead: list[Action] = field(default_factory=list)  # the odd rank's actions at that position
    kinds: tuple[str, ...] = ()  # further kinds of actions

    @staticmethod
    def make(seed: int, world_size: int, *, exits: bool = False, agrees: str = "") -> Program:
        """Draw a program.

        Args:
            exits: the odd rank's process ends.
            agrees: "nothing": no rank deviates; "stop": the odd rank is stopped for `STOPPED` seconds.
        """
        rng = random.Random(seed)
        program = Program(seed, world_size)
        count = rng.randint(2, 4)
        program.widths = [5] * count if rng.random() < 0.5 else rng.sample([3, 4, 5, 7, 9, 11], count)
        strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
        program.options = {
            "sharding_strategy": rng.choice(strategies),
            "use_orig_params": rng.random() < 0.5,
            "reduce_unused": rng.random() < 0.15,
            "forward_prefetch_distance": rng.randint(0, 2),
            "backward_prefetch_distance": rng.randint(0, 2),
        }
        orders = [tuple(rng.sample(range(count), rng.randint(1, count))) for _ in range(2)] + [tuple(range(count))] * 3
        program.kinds = ALIKE if agrees else ()
        habit = [program._random_action(rng, orders) for _ in range(rng.randint(1, 3))]
        while len(program.actions) < rng.randint(2, 8):
            program.actions += habit if rng.random() < 0.7 else [program._random_action(rng, orders)]
        program.actions += [Action("train", orders[-1])] * 3
        program.odd, program.at = rng.randrange(world_size), rng.randrange(len(program.actions) - 2)
        if agrees:
            program.deviation = agrees
            program.instead = [Action(agrees), program.actions[program.at]]
            return program
        program._deviate(rng, exits)
        while not program.instead:
            if exits:  # processes end in passes only
                program.at = rng.randrange(len(program.actions) - 2)
            program._deviate(rng, exits)
        return program

    def _random_action(self, rng: random.Random, orders: list[tuple[int, ...]]) -> Action:
        several = ["train"] * 6 + ["eval", "eval", "twice", "no_sync", rng.choice(CALLS), *self.kinds]
        kind = rng.choice(several)
        return Action(kind, rng.choice(orders), clips=rng.random() < 0.4)

    def _deviate(self, rng: random.Random, exits: bool) -> None:
        action, after = self.actions[self.at], self.actions[self.at + 1]
        runs = action.kind not in CALLS
        order = list(action.order)
        kinds = ["unit", "order", "pass", "missing", "extra", "exception", "exception"]
        kind = self.deviation = "exit" if exits else rng.choice(kinds)
        units_matter = runs and not self.options["reduce_unused"]
        if kind == "unit" and units_matter:
            place = rng.randrange(len(order))
            order[place] = rng.choice([unit for unit in range(len(self.widths)) if unit != order[place]])
            self.instead = [self._replaced(action, order=tuple(order))]
        elif kind == "order" and units_matter and len(order) > 1:
            first, second = rng.sample(range(len(order)), 2)
            order[first], order[second] = order[second], order[first]
            self.instead = [self._replaced(action, order=tuple(order))]
        elif kind == "pass" and runs:
            self.instead = [self._replaced(action, kind="train" if action.kind == "eval" else "eval")]
        elif kind == "missing" and action.kind == "train" and action.clips and after.kind != "clip":
            self.instead = [self._replaced(action, clips=False)]
        elif kind == "missing" and action.kind != after.kind and {action.kind, after.kind} != {"train", "no_sync"}:
            self.instead = [Action("nothing")]
        elif kind == "extra":
            extra = rng.choice(["eval", *CALLS])
            if extra != action.kind and not (extra == "eval" and runs):
                self.instead = [Action(extra, self.actions[-1].order), action]
        elif kind in ("exception", "exit") and runs:
            how = rng.choice(["Fault", "KeyboardInterrupt", "OutOfMemoryError"])
            wheres = ["forward", "backward"] if action.kind != "eval" else ["forward"]
            fails = f"{rng.choice(wheres)} {how if kind == 'exception' else 'exit'}"
            self.instead = [self._replaced(action, fails=fails, position=rng.randrange(len(order)))]

    @staticmethod
    def _replaced(action: Action, **changes: Any) -> Action:
        return Action(**{**action.__dict__, **changes})

    def __str__(self) -> str:
        actions = ", ".join(f"{a.kind}{list(a.order)}{' clip' if a.clips else ''}" for a in self.actions)
        return (
            f"seed {self.seed} on {self.world_size} ranks, widths {self.widths}, {self.options}: [{actions}]; rank "
            f"{self.odd} at {self.at}: {self.deviation}: {self.instead}"
        )


@dataclass
class Outcome:
    """The outcome of one program on one rank."""

    deviated: float | None = None  # time of the deviation, by the machine's clock
    told: float | None = None
    error: str = ""
    goes_on: str = ""  # "right", or the error of the restart
    found_alone: bool = False  # the exception was this rank's own


def run_programs(seeds: list[int], exits: bool, shard_size: int = 0, agrees: str = "") -> list[Outcome]:
    """Run each program in a new group; with ``shard_size`` in shard groups of that size and their replica groups."""
    kept, outcomes = [], []
    seconds = TIMEOUT + STOPPED if agrees else TIMEOUT
    with mock.patch.object(threads, "PATIENCE", timedelta(seconds=0.1)):
        for seed in seeds:
            timeout = timedelta(seconds=seconds)
            group = new_pair(shard_size, seconds) if shard_size else dist.new_group(timeout=timeout)
            kept.append(group)  # destroying a broken group waits for its last collectives
            program = Program.make(seed, dist.get_world_size(), exits=exits, agrees=agrees)
            outcomes.append(_Run(program, group).run())
            if not exits:
                dist.barrier()
    return outcomes


HYBRID = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy._HYBRID_SHARD_ZERO2,
}


class _Run:
    def __init__(self, program: Program, group: Any) -> None:
        self.program, self.group, self.rank = program, group, dist.get_rank()
        torch.manual_seed(program.seed)
        self.plain = Chain(tuple(program.widths))
        module = copy.deepcopy(self.plain)
        options = dict(program.options)
        if isinstance(group, tuple):
            options["sharding_strategy"] = HYBRID[options["sharding_strategy"]]
        self.model = FullyShardedDataParallel(module, group, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
        self.module: Chain = self.model.module
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.others: dict[str, Any] = {}  # models of `ALIKE`
        self.saves: list[Any] = []
        self.folder = f"{tempfile.gettempdir()}/fsdp-programs-{os.environ.get('MASTER_PORT', 0)}-{program.seed}"
        self.outcome = Outcome()

    def run(self) -> Outcome:
        if isinstance(self.group, tuple):  # replicas connect when they first train
            self._do(self.program.actions[-1])
        for place, action in enumerate(self.program.actions):
            todo = [action]
            if place == self.program.at and self.rank == self.program.odd:
                todo, self.outcome.deviated = self.program.instead, time.monotonic()
            try:
                for one in todo:
                    self._do(one)
            except (Fault, KeyboardInterrupt, torch.OutOfMemoryError):
                self.outcome.found_alone = True
                break
            except RuntimeError as error:
                self.outcome.told, self.outcome.error = time.monotonic(), str(error)
                break
        for save in self.saves:
            save.result()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.program.deviation != "exit":
            try:
                self.outcome.goes_on = self._go_on()
            except BaseException:
                self.outcome.goes_on = traceback.format_exc()
        return self.outcome

    def _do(self, action: Action) -> None:
        self.module.order = list(action.order)
        self.module.between = self._between(action)
        try:
            if action.kind in CALLS:
                self._call(action.kind)
            elif action.kind == "eval":
                with torch.no_grad():
                    self._forward()
            elif action.kind == "twice":
                first, second = self._forward(), self._forward()
                first.backward()
                second.backward()
            elif action.kind == "no_sync":
                with self.model.no_sync():
                    self._forward().backward()
                self._forward().backward()
            elif action.kind == "train":
                self._forward().backward()
            elif action.kind == "stop":
                resume = f"sleep {STOPPED}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", resume], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif action.kind in ALIKE:
                self._do_alike(action.kind)
            if action.clips and action.kind in ("train", "twice", "no_sync"):
                self.model.clip_grad_norm_(1.0)
            if action.kind in ("train", "twice", "no_sync"):
                self.optimizer.step()
                self.optimizer.zero_grad()
        finally:
            self.module.between = lambda position, x: x

    def _between(self, action: Action) -> Callable[[int, Tensor], Tensor]:
        where, _, how = action.fails.partition(" ")

        def fail(grad: Tensor | None = None) -> None:
            if how == "exit":
                os._exit(3)
            raise {"Fault": Fault, "KeyboardInterrupt": KeyboardInterrupt}.get(how, torch.OutOfMemoryError)("ours")

        def between(position: int, x: Tensor) -> Tensor:
            if position == action.position and where == "forward":
                fail()
            if position == action.position and where == "backward":
                x = x.clone() if x.requires_grad else x.detach().requires_grad_()
                x.register_hook(fail)
            return x

        return between

    def _forward(self) -> Tensor:
        return self.model(torch.ones(2, WIDTH)).square().mean()

    def _do_alike(self, kind: str) -> None:
        """Use another model, or save in the background."""
        if kind == "save":
            group = None if isinstance(self.group, tuple) else self.group
            self.saves.append(async_save(self.folder, self.model, process_group=group))
            return
        if kind not in self.others:
            size = dist.get_world_size()
            ranks = [*range(1, size)] if kind == "some" and size > 2 else [*range(size)]
            group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT + STOPPED))
            module = copy.deepcopy(self.plain)
            self.others[kind] = None if self.rank not in ranks else FullyShardedDataParallel(module, group)
        model = self.others[kind]

        def train() -> None:
            model(torch.ones(2, WIDTH)).square().mean().backward()

        if model is not None and kind != "thread":
            train()
        elif model is not None:
            thread = threading.Thread(target=train)
            thread.start()
            self._forward().backward()
            thread.join()

    def _call(self, kind: str) -> None:
        model = self.model
        if kind in ("state_dict", "rank0_state_dict"):
            config = FullStateDictConfig(rank0_only=kind == "rank0_state_dict")
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                model.state_dict()
        elif kind == "optim_state_dict":
            FullyShardedDataParallel.optim_state_dict(model, self.optimizer)
        elif kind == "load":
            model.load_state_dict(self.plain.state_dict())
        elif kind == "clip":
            model.clip_grad_norm_(1.0)
        else:
            with_grads = kind == "grads" and self.program.options["use_orig_params"]
            with FullyShardedDataParallel.summon_full_params(model, with_grads=with_grads):
                pass

    def _go_on(self) -> str:
        """Train on in every other program; then restart from the same values, and train like the plain model.

        A pass or call that peers began after one rank failed raises there as well, once.
        """
        self.model.zero_grad()
        recover = self._train_on if self.program.seed % 2 else self._load
        try:
            recover()
        except OutOfStep:
            recover()
        if recover != self._load:
            self._train_on()
            self._load()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        reference = torch.optim.SGD(self.plain.parameters(), lr=0.05, momentum=0.5)
        for order in ([*range(len(self.program.widths))], [0, 1], [1, 0], [1, 0]):
            self.module.order = self.plain.order = order
            self._do(Action("train", tuple(order)))
            self.plain(torch.ones(2, WIDTH)).square().mean().backward()
            reference.step()
            reference.zero_grad()
        with FullyShardedDataParallel.summon_full_params(self.model):
            for (name, got), expected in zip(self.module.named_parameters(), self.plain.parameters(), strict=True):
                if not torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
                    return f"{name} is {got}, and not {expected}"
        return "right"

    def _train_on(self) -> None:
        for order in (self.program.actions[-1].order, (0, 1), (1, 0)):
            self._do(Action("train", order))

    def _load(self) -> None:
        self.model.load_state_dict(self.plain.state_dict())


def faults(program: Program, outcomes: list[Outcome | None]) -> list[str]:
    """List violations of the guarantees; the outcome of a dead rank is None."""
    started = outcomes[program.odd]
    found = []
    if program.deviation in AGREES:
        return [
            f"rank {rank}: {outcome.error}, and afterwards {outcome.goes_on}"
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome.error or outcome.found_alone or outcome.goes_on != "right"
        ]
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        if outcome.told is None and not (outcome.found_alone and program.deviation == "exception"):
            found.append(f"rank {rank} got no error")
        elif outcome.told is not None:
            deviated = started.deviated if started is not None else None
            if deviated is not None and outcome.told - deviated > SOON:
                found.append(f"rank {rank} got an error after {outcome.told - deviated:.1f} s: {outcome.error}")
            if "rank " not in outcome.error or "Timed out" in outcome.error:
                found.append(f"rank {rank} got: {outcome.error}")
        if program.deviation != "exit" and outcome.goes_on != "right":
            found.append(f"rank {rank} does not go on: {outcome.goes_on}")
    return found
