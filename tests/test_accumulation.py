"""Accumulation: synchronised and unsynchronised passes in every order give the sum of the plain models' gradients.

Bit-equal: a pass adds one gradient per parameter to the accumulated one, locally or after the reduction, and the
reference adds the same numbers in the same order. Sums over 3 ranks have that order in the direct exchange only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness import passes
from tests.harness.lockstep import Data, assert_at_rest
from tests.harness.meter import Meter, needs_meter
from tests.harness.models import BlockWithUnused, MlpBlock, Net
from tests.harness.oracle import assert_bit_equal, named_parameters
from tests.harness.passes import WIDTH, clear
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import _in_memory_order, full_parameters, wrap
from tests.harness.strategies import FULL, GRAD_OP, MODES, NONE, Mode

SYNC, NO_SYNC = "sync", "no_sync"


def plain_model() -> nn.Module:
    """Build parameters of the root, of blocks, one of a single element, and one that no forward uses."""

    def forward(m: Any, x: Tensor, skip: int | None = None) -> Tensor:
        x = m.embed(x)
        for index, block in enumerate(m.blocks):
            if skip is None:
                x = block(x)
            elif index != skip:
                x = x + block(x).sum()
        return m.last(x)

    embed, blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([MlpBlock(WIDTH, WIDTH), MlpBlock(WIDTH, WIDTH)])
    return Net(forward, embed=embed, blocks=blocks, last=BlockWithUnused(WIDTH))


BLOCKS = (MlpBlock, BlockWithUnused)


def build(model: Callable[[], nn.Module] = plain_model) -> nn.Module:
    torch.manual_seed(5)
    return model()


def wrapped(mode: Mode, model: Callable[[], nn.Module] = plain_model) -> FullyShardedDataParallel:
    return wrap(build(model), *mode, wrap_policy=ModuleWrapPolicy(set(BLOCKS)))


def loss_of(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return model(x, **options).square().mean()


def describe(mode: Mode) -> str:
    return f"{passes.describe(mode)}, {dist.get_world_size()} ranks"


# -- the reference -----------------------------------------------------------------------------------------------

Grads = dict[str, Tensor | None]


def pass_gradients(count: int, **options: Any) -> list[list[Grads]]:
    """Return the gradients of one backward of the plain model, by pass and by rank whose input it gets."""
    plain = build()
    result = []
    for index in range(count):
        per_rank = []
        for rank in range(dist.get_world_size()):
            plain.zero_grad()
            loss_of(plain, Data(rank, 0).tensor(index, 3, WIDTH), **options).backward()
            per_rank.append({n: None if p.grad is None else p.grad.clone() for n, p in named_parameters(plain).items()})
        result.append(per_rank)
    return result


@dataclass
class Ledger:
    """Expected `.grad`: per parameter the sum of reduced means and, per rank, a local sum not yet reduced.

    `units` are the parameter names of each unit: in a used unit, parameters without a gradient get zeros.
    """

    units: list[list[str]]
    reduced: Grads = field(default_factory=dict)
    local: list[Grads] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [name for unit in self.units for name in unit]
        self.reduced = dict.fromkeys(names)
        self.local = [dict.fromkeys(names) for _ in range(dist.get_world_size())]

    def add(self, grads: Sequence[Grads], synchronize: bool) -> None:
        for unit in self.units:
            shapes = {name: next((g for r in grads if (g := r[name]) is not None), None) for name in unit}
            used = any(value is not None for value in shapes.values())
            pending = any(local[name] is not None for local in self.local for name in unit)
            if not used and not (pending and synchronize):
                continue
            for name in unit:
                frozen = name in self.frozen
                for rank, local in enumerate(self.local):
                    grad, before = grads[rank][name], local[name]
                    if before is None:
                        if not frozen:
                            local[name] = grad.clone() if grad is not None else self.zeros[name].clone()
                    elif grad is not None:
                        local[name] = before + grad
                if synchronize and len(self.local) > 1 and self.local[0][name] is not None:
                    self._reduce(name)

    def _reduce(self, name: str) -> None:
        parts: list[Any] = [local[name] for local in self.local]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        mean, before = total / len(parts), self.reduced[name]
        self.reduced[name] = mean if before is None else before + mean
        for local in self.local:
            local[name] = None

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            for grads in (self.reduced, *self.local):
                grads[name] = None

    def scale(self, factor: float) -> None:
        for grads in (self.reduced, *self.local):
            for name, grad in grads.items():
                grads[name] = None if grad is None else grad * factor if factor else torch.zeros_like(grad)

    frozen: set[str] = field(default_factory=set)
    zeros: dict[str, Tensor] = field(
        default_factory=lambda: {n: torch.zeros_like(p) for n, p in named_parameters(build()).items()}
    )


def assert_visible(model: nn.Module, ledger: Ledger, label: str) -> None:
    """Check that every `.grad` is the ledger's: in full shape where there is a local sum, else this rank's part."""
    actual: Grads = {}
    expected: Grads = {}
    local = ledger.local[dist.get_rank()]
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            layout = bucket.layout
            names = [unit.full_name(record) for record in layout.params]
            if bucket.params[0] is bucket.flat_param:
                source = local if local[names[0]] is not None else ledger.reduced
                actual[names[0]], expected[names[0]] = bucket.flat_param.grad, None
                if source[names[0]] is None:
                    continue
                flat = torch.zeros(layout.padded_numel)
                for name, record in zip(names, layout.params):
                    value = source[name]
                    assert value is not None
                    flat[record.offset : record.end] = _in_memory_order(value, record)
                start, end = (0, layout.numel) if source is local else layout.shard_range(bucket.rank)
                expected[names[0]] = flat[start:end]
                continue
            for name, record, param, piece in zip(names, layout.params, bucket.params, bucket.pieces):
                actual[name], value = param.grad, ledger.reduced[name]
                if local[name] is not None:
                    expected[name] = local[name]
                elif value is None or layout.world_size == 1:
                    expected[name] = value
                else:
                    part = _in_memory_order(value, record)[piece.start : piece.end]
                    expected[name] = part if piece.numel else None
    assert_bit_equal(actual, expected, label)


class Trainer:
    """A wrapped model and the ledger, kept in step."""

    def __init__(self, mode: Mode, grads: list[list[Grads]]) -> None:
        self.model = wrapped(mode)
        self.params = list(self.model.parameters())  # as an optimizer holds them
        units = [[u.full_name(r) for b in u.buckets for r in b.layout.params] for u in fsdp.shard_info(self.model)]
        self.ledger = Ledger(units)
        self.grads, self.mode, self.label = grads, mode, describe(mode)
        self.done: list[str] = []

    def restart(self, label: str) -> None:
        self.clear()
        self.label, self.done = f"{label}, {describe(self.mode)}", []

    def check(self, event: str) -> None:
        self.done.append(event)
        label = f"{self.label}, after {', '.join(self.done)}"
        assert_visible(self.model, self.ledger, label)
        assert_at_rest(self.model, label)

    def run(self, index: int, kind: str, *, between: Callable[[], None] | None = None) -> None:
        """Run one forward and backward on input `index`, with `between` called between the two."""
        with self.model.no_sync() if kind == NO_SYNC else nullcontext():
            loss = loss_of(self.model, Data(dist.get_rank(), 0).tensor(index, 3, WIDTH))
            if between is not None:
                between()
            loss.backward()
        self.ledger.add(self.grads[index], kind == SYNC)
        self.check(kind)

    def clear(self) -> None:
        clear(self.model)
        self.ledger.drop(list(self.ledger.reduced))

    def zero(self) -> None:
        torch.optim.SGD(self.params, lr=0.1).zero_grad(set_to_none=False)
        self.ledger.scale(0.0)

    def named(self, names: list[str]) -> list[nn.Parameter]:
        buckets = [(unit, bucket) for unit in fsdp.shard_info(self.model) for bucket in unit.buckets]
        pairs = [(u.full_name(record), p) for u, b in buckets for record, p in zip(b.layout.params, b.params)]
        return [param for name, param in pairs if name in names]

    def in_block(self) -> list[str]:
        """Return the names of the first block's parameters, which are one flat parameter or several originals."""
        return [name for name in self.ledger.reduced if name.startswith("blocks.0.")]

    def drop_some(self) -> None:
        """Set `.grad = None` on single parameters; with flat parameters on that of one unit."""
        names = ["blocks.0.linear.weight", "blocks.0.scale", "embed.bias"] if self.mode[1] else self.in_block()
        for param in self.named(names):
            param.grad = None
        self.ledger.drop(names)


ACTIONS: dict[str, Callable[[Trainer], None] | None] = {
    "-": None,
    "zeroed": Trainer.zero,
    "some dropped": Trainer.drop_some,
    "cleared": Trainer.clear,
}


def _takes_turn(number: int, mode: Mode) -> bool:
    """Choose half of the numbered cases for original parameters, and the other half for flat ones."""
    return number.bit_count() % 2 == mode[1]


@on_ranks(2, 3)
def test_every_order_of_synchronised_and_unsynchronised_passes(world_size: int) -> None:
    """Gradients sum up alone, and on 2 ranks with gradients zeroed, cleared, or dropped for some parameters in between.

    Each order of four passes is run with flat or with original parameters.
    """
    if world_size > 2:
        os.environ["FSDP_COLLECTIVES"] = "direct"
    modes = MODES if world_size == 2 else [(FULL, True), (FULL, False)]
    acts = world_size == 2
    passes = 4 if acts else 3
    grads, names = pass_gradients(passes), list(ACTIONS)
    for place, mode in enumerate(modes):
        trainer = Trainer(mode, grads)
        orders = [*enumerate(itertools.product((SYNC, NO_SYNC), repeat=passes))]
        mine = [order for order in orders if _takes_turn(order[0], mode)]
        for number, kinds in mine[place // 2 :: 2] if acts else mine:
            trainer.restart(f"order {number}")
            for index, kind in enumerate(kinds):
                name = names[(number // 4 + number + index) % len(names)] if acts and index else "-"
                action = ACTIONS[name]
                if action is None:
                    trainer.run(index, kind)
                elif number // 4 % 2:
                    action(trainer)
                    trainer.check(name)
                    trainer.run(index, kind)
                else:
                    trainer.done.append(f"(forward, then {name})")
                    trainer.run(index, kind, between=lambda: action(trainer))  # noqa: B023


# -- what the context manager covers -----------------------------------------------------------------------------


@on_ranks(2)
def test_no_sync_applies_to_backwards_that_run_inside() -> None:
    """A backward reduces unless it runs inside `no_sync()`, wherever its forward ran."""
    grads = pass_gradients(3)
    for mode in MODES:
        trainer = Trainer(mode, grads)
        model, ledger = trainer.model, trainer.ledger
        x, y, z = (Data(dist.get_rank(), 0).tensor(i, 3, WIDTH) for i in range(3))
        # forward outside, backward inside
        loss = loss_of(model, x)
        with model.no_sync(), record_collectives() as log:
            loss.backward()
        assert not log.units("reduce")
        ledger.add(grads[0], False)
        trainer.check("backward inside")
        # forward inside, backward outside
        with model.no_sync():
            loss = loss_of(model, y)
        loss.backward()
        ledger.add(grads[1], True)
        trainer.check("backward outside")
        # two graphs, one backward each side, nested contexts
        trainer.clear()
        first, second, third = (loss_of(model, leaf) for leaf in (x, y, z))
        with model.no_sync():
            with model.no_sync():
                first.backward()
            ledger.add(grads[0], False)
            trainer.check("inner")
            second.backward()
            ledger.add(grads[1], False)
            trainer.check("outer")
        third.backward()
        ledger.add(grads[2], True)
        trainer.check("outside")
        # the same graph twice
        trainer.clear()
        loss = loss_of(model, x)
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        ledger.add(grads[0], False)
        ledger.add(grads[0], True)
        trainer.check("kept graph")
        # an exception inside puts things back
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        trainer.run(0, SYNC)


def _unwrapped(model: nn.Module) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


@pytest.mark.parametrize("mode", MODES, ids=passes.describe)
@on_ranks(2)
def test_no_sync_is_refused_on_units_and_during_passes(mode: Mode) -> None:
    model = wrapped(mode)
    with model.no_sync():  # before anything ran: the instance becomes the root
        pass
    with pytest.raises(RuntimeError, match="should only be called on the root"), model.blocks[0].no_sync():
        pass
    caught: list[str] = []

    def enter(*args: Any) -> None:
        try:
            with model.no_sync():
                raise AssertionError("entered")
        except ValueError as error:
            caught.append(str(error))

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        enter()
        output.register_hook(enter)

    handle = _unwrapped(model).embed.register_forward_hook(watch)
    loss_of(model, torch.randn(3, WIDTH)).backward()
    handle.remove()
    assert len(caught) == 2 and all("expected to be in states" in text for text in caught), caught
    assert all(unit.synchronize for _, unit, _ in units_in(model))


# -- parts of the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=passes.describe)
@on_ranks(2)
def test_pass_reduces_gradients_of_units_that_it_does_not_use(mode: Mode) -> None:
    """A synchronised pass also reduces the gradients that earlier passes left in units that it does not use."""
    whole, without = pass_gradients(3), {skip: pass_gradients(3, skip=skip) for skip in (0, 1)}
    trainer = Trainer(mode, whole)

    def run(index: int, kind: str, skip: int) -> None:
        with trainer.model.no_sync() if kind == NO_SYNC else nullcontext():
            loss_of(trainer.model, Data(dist.get_rank(), 0).tensor(index, 3, WIDTH), skip=skip).backward()
        trainer.ledger.add(without[skip][index], kind == SYNC)
        trainer.check(f"{kind} without block {skip}")

    for number, orders in enumerate(itertools.product((SYNC, NO_SYNC), (SYNC, NO_SYNC), (SYNC, NO_SYNC))):
        if not _takes_turn(number, mode):
            continue
        trainer.restart(f"order {number}")
        run(0, orders[0], 0)
        run(1, orders[1], 1)
        run(2, orders[2], 0)
        trainer.run(0, SYNC)  # at last a pass that uses the whole model


@on_ranks(2)
def test_freezing_between_accumulated_passes() -> None:
    """A frozen parameter keeps its gradient, and the next synchronised backward reduces it."""
    grads = pass_gradients(4)
    for mode in MODES:
        trainer = Trainer(mode, grads)
        frozen = trainer.in_block() + (["last.used.weight"] if mode[1] else [])
        params = trainer.named(frozen)
        trainer.run(0, NO_SYNC)
        for param in params:
            param.requires_grad_(False)
        thawed = [[[dict(r) for r in p] for p in grads], trainer.grads]
        for per_rank in thawed[0]:
            for by_name in per_rank:
                by_name.update(dict.fromkeys(frozen))
        trainer.ledger.frozen = set(frozen)
        trainer.grads = thawed[0]
        trainer.run(1, NO_SYNC)
        trainer.run(2, SYNC)
        for param in params:
            param.requires_grad_(True)
        trainer.ledger.frozen, trainer.grads = set(), thawed[1]
        trainer.run(3, NO_SYNC)
        trainer.run(0, SYNC)


# -- .grad in users' hands ---------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_later_passes_do_not_write_gradients_that_were_dropped(world_size: int) -> None:
    """They neither free nor write a dropped gradient; until dropped, they accumulate into it as in plain torch."""
    grads = pass_gradients(4)
    for place, mode in enumerate(MODES):
        trainer = Trainer(mode, grads)
        for number, (before, after) in enumerate(itertools.product((SYNC, NO_SYNC), (SYNC, NO_SYNC))):
            if not _takes_turn(number, mode):
                continue
            # cleared, all or some: the held tensors are the user's
            drop = Trainer.clear if (place + number // 2) % 2 else Trainer.drop_some
            trainer.restart(f"{drop.__name__} between {before} and {after}")
            trainer.run(0, before)
            held = [(p, p.grad, p.grad.clone()) for p in trainer.params if p.grad is not None]
            drop(trainer)
            dropped = [(grad, copied) for param, grad, copied in held if param.grad is None]
            trainer.run(1, after)
            trainer.run(2, SYNC)
            trainer.run(3, NO_SYNC)
            changed = [tuple(grad.shape) for grad, copied in dropped if not torch.equal(grad, copied)]
            assert not changed, f"{trainer.label}: gradients of shapes {changed} changed in the user's hands"
            # accumulated into: its memory can still be read
            trainer.restart(f"{before}, then {after}")
            trainer.run(0, before)
            kept = [param.grad for param in trainer.params if param.grad is not None]
            trainer.run(1, after)
            trainer.run(2, SYNC)
            trainer.clear()
            trainer.run(3, after)
            assert all(grad.isfinite().all() for grad in kept), trainer.label


@on_ranks(1, 2)
def test_passes_accumulate_into_gradients_that_users_changed(world_size: int) -> None:
    """A gradient may be scaled in place, or replaced by a new tensor where torch allows it."""
    grads = pass_gradients(3)
    for mode in MODES:
        trainer = Trainer(mode, grads)
        for before, after in itertools.product((SYNC, NO_SYNC), (SYNC, NO_SYNC)):
            for how in ("in place", "replaced"):
                if not _takes_turn((before == after) + 2 * (how == "replaced"), mode):
                    continue
                trainer.restart(f"{how} between {before} and {after}")
                trainer.run(0, before)
                for param in trainer.params:
                    if param.grad is None:
                        continue
                    if how == "in place":
                        param.grad.mul_(0.5)
                    elif param.grad.shape == param.shape:
                        param.grad = param.grad * 0.5
                    else:  # torch refuses a gradient of another shape than the parameter's
                        with pytest.raises(RuntimeError, match="size"):
                            param.grad = param.grad * 0.5
                        param.grad.mul_(0.5)
                trainer.ledger.scale(0.5)
                trainer.check(how)
                trainer.run(1, after)
                trainer.run(2, SYNC)


@pytest.mark.serial  # it waits a limited time for the release of memory by threads
@needs_meter
@pytest.mark.parametrize("mode", [(FULL, True), (FULL, False), (GRAD_OP, False), (NONE, True)], ids=passes.describe)
@on_ranks(2)
def test_memory_of_accumulated_gradients(mode: Mode) -> None:
    """The full gradients are held while they are not reduced, then a shard of them, and no memory once cleared."""
    meter = Meter()
    world_size = dist.get_world_size()
    x = torch.randn(2, 601)
    model = wrapped(mode, lambda: nn.Sequential(*(MlpBlock(601, 601) for _ in range(3))))
    full = sum(4 * b.layout.numel for u in fsdp.shard_info(model) for b in u.buckets)
    shard = full if mode[0] is NONE else full / world_size

    def held(expected: float, label: str) -> None:
        found = meter.beyond(base, int(expected + 0.05 * full))
        assert abs(found - expected) < 0.05 * full + 65536, f"{label}, {describe(mode)}: {found:,}, not {expected:,}"

    def backward(synchronize: bool) -> None:
        with nullcontext() if synchronize else model.no_sync():
            loss_of(model, x).backward()

    for synchronize in (True, False, True):  # warm up: some memory is allocated once
        backward(synchronize)
    clear(model)
    base = meter.baseline()
    kept = full if mode[0] is GRAD_OP else 0  # the parameters themselves, for the next forward
    backward(False)
    held(full + kept, "after an unsynchronised pass")
    backward(False)
    held(full + kept, "after another one")
    backward(True)
    held(shard, "after the synchronised pass")
    backward(False)
    held(full + kept + shard, "after an unsynchronised one with a reduced gradient aside")
    backward(True)
    held(shard, "after the second synchronised pass")
    clear(model)
    held(0, "cleared")
    backward(False)
    clear(model)
    held(kept, "cleared after an unsynchronised pass")
    backward(True)
    clear(model)


@on_ranks(2)
def test_accumulation_after_an_exception() -> None:
    """Once cleared, a backward that failed in the middle leaves no gradient behind."""

    class Fault(Exception):
        pass

    def boom(grad: Tensor) -> None:
        raise Fault

    def plant(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(boom)

    grads = pass_gradients(3)
    for mode in MODES:
        trainer = Trainer(mode, grads)
        for kind in (SYNC, NO_SYNC):
            trainer.run(0, NO_SYNC)
            hook = _unwrapped(trainer.model.blocks[0]).register_forward_hook(plant)
            with pytest.raises(Fault), trainer.model.no_sync() if kind == NO_SYNC else nullcontext():
                loss_of(trainer.model, torch.randn(3, WIDTH)).backward()
            hook.remove()
            trainer.clear()
            for index, each in enumerate((NO_SYNC, SYNC, kind)):
                trainer.run(index, each)
            trainer.clear()


# -- steps without a reduction ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_step_with_unreduced_gradients_is_refused() -> None:
    """The error gives the number of parameters and the remedy, and neither parameters nor state change."""
    words = r"^3 parameters have gradients from no_sync\(\) that were never reduced. Run the last micro-batch's"
    for strategy, orig in itertools.product((FULL, GRAD_OP), (True, False)):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=orig and index == 0)) for index in range(2 if orig else 3)]
        model = wrap(nn.Sequential(*blocks), strategy, orig, wrap_policy=ModuleWrapPolicy({nn.Sequential}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        before = full_parameters(model)
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(2, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
        assert_bit_equal(full_parameters(model), before)
        assert not optimizer.state
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        assert not any(torch.equal(value, before[name]) for name, value in full_parameters(model).items())
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.ones(2, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match=r"^1 parameter has .* holds [\w.]+ of unit '\d'$"):
            torch.optim.SGD(list(model.parameters())[-2:-1], lr=1.0).step()
        model.zero_grad()
        optimizer.step()  # without any gradients


@on_ranks(2)
def test_a_closure_may_reduce_what_was_accumulated() -> None:
    """Lightning runs the last micro-batch in the closure of `step()`. A closure that reduces nothing is refused."""
    for number, (strategy, orig) in enumerate(itertools.product((FULL, GRAD_OP), (True, False))):
        by_keyword = number in (1, 2)
        models = [wrapped((strategy, orig)) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
        data = [Data(0, dist.get_rank()).tensor(index, 3, WIDTH) for index in range(2)]
        for model in models:
            with model.no_sync():
                loss_of(model, data[0]).backward()

        def closure(model: Any = models[0], last: Tensor = data[1]) -> Tensor:
            loss = loss_of(model, last)
            loss.backward()
            return loss

        loss = optimizers[0].step(closure=closure) if by_keyword else optimizers[0].step(closure)
        assert torch.equal(loss, closure(models[1]))
        optimizers[1].step()
        assert_bit_equal(*map(full_parameters, models))
        optimizers[0].zero_grad()
        with pytest.raises(RuntimeError, match="never reduced"), models[0].no_sync():
            optimizers[0].step(closure)
        assert_bit_equal(*map(full_parameters, models))


@on_ranks(2)
def test_step_with_unreduced_gradients_warns_without_sharding() -> None:
    """The optimizer's first step warns that replicas differ, unless the program reduced the gradients itself."""
    for orig in (True, False):
        model = wrap(nn.Linear(WIDTH, WIDTH), NONE, orig)
        for by_hand in (True, False):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            with model.no_sync():
                model(torch.ones(2, WIDTH)).sum().backward()
            if by_hand:  # the program reduces gradients itself
                for param in model.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
            with nullcontext() if by_hand else pytest.warns(UserWarning, match="that were never reduced.*differ from"):
                optimizer.step()
            optimizer.step()
            model.zero_grad()
