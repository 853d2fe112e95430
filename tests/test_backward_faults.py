"""An exception in a forward, a backward or a recomputation leaves no state behind."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.runtime.context import RootContext
from tests.harness.lockstep import CLEAR, STEP, Data, Reference, gradient_sizes
from tests.harness.meter import Meter, needs_meter
from tests.harness.models import Net, Unit, in_turn
from tests.harness.passes import KINDS, WIDTH, check_parity, clear, loss_of, seeded, wrapped
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.strategies import MODES, by_turns, describe


class Fault(Exception):
    pass


class Trap:
    """Raises `Fault` at a position when it is passed for the `count`-th time after being set, on every rank."""

    position, count = "", 0

    @classmethod
    def set(cls, position: str, count: int = 1) -> None:
        cls.position, cls.count = position, count

    @classmethod
    def passed(cls, position: str) -> None:
        if position == cls.position:
            cls.count -= 1
            if cls.count == 0:
                cls.position = ""
                raise Fault(position)


class TrapInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, position: str) -> Tensor:
        ctx.position = position
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Trap.passed(ctx.position)
        return grad, None


def trapped(index: int, width: int = WIDTH) -> Unit:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.tanh(m.first(x))
        Trap.passed(f"forward {index}")
        return m.second(TrapInBackward.apply(x, f"backward {index}"))

    return Unit(forward, first=nn.Linear(width, width), second=nn.Linear(width, width))


def trapped_model(outer: str, width: int = WIDTH) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        Trap.passed("forward before")
        x = in_turn(m.blocks, TrapInBackward.apply(x, "backward last"), outer)
        Trap.passed("forward after")
        return m.head(TrapInBackward.apply(x, "backward first"))

    embed, blocks = nn.Linear(width, width), nn.ModuleList([trapped(i, width) for i in range(3)])
    return Net(forward, embed=embed, blocks=blocks, head=nn.Linear(width, width))


POSITIONS = ["before", "after", *range(3)]
FAULTS = [(f"forward {position}", 1) for position in POSITIONS]
FAULTS += [(f"backward {position}", 1) for position in ("first", 2, 1, 0, "last")]
RECOMPUTED = [(f"forward {index}", 2) for index in range(3)]  # passed in forward, raises when recomputed


def _faulty(faults: Sequence[tuple[str, int]]) -> Callable[[nn.Module, Data], Iterator[Any]]:
    """Run a step after each fault, with gradients cleared as in a training loop.

    In every second step a pass that began before the fault runs a backward afterwards.
    """

    def program(model: nn.Module, data: Data) -> Iterator[Any]:
        for step, fault in enumerate(faults):
            x, y = data.tensor(step, 3, WIDTH), data.tensor(100 + step, 2, WIDTH)
            waiting = loss_of(model, y) if step % 2 else None
            Trap.set(*fault)
            before = [id(param) for param in model.parameters()]
            try:
                loss_of(model, x).backward()
            except Fault:
                pass
            else:
                raise AssertionError(f"{fault} did not happen")
            assert [id(param) for param in model.parameters()] == before, f"parameters() after {fault}"
            yield CLEAR
            x.grad = None
            if waiting is not None:  # this graph is complete
                waiting.backward()
                yield {"y": y.grad}
            loss_of(model, x).backward()
            yield {"x": x.grad}
            if step % 3 == 2:
                yield STEP

    return program


@on_ranks(2)
def test_retry_after_an_exception_gives_the_plain_models_gradients() -> None:
    """In forward, backward and recomputation, before, in and after each unit; graphs from before stay usable."""
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    for number, outer in enumerate(KINDS):
        build = seeded(trapped_model, outer)
        reference = Reference(build, _faulty(FAULTS if outer == "none" else RECOMPUTED + FAULTS[-3:] + RECOMPUTED))
        for turn, mode in enumerate(by_turns(number)[: 3 if outer == "none" else 2]):
            debug = (number + turn) % 2
            with mock.patch.dict(os.environ, FSDP_DEBUG=str(debug)), gradient_sizes(all_small=bool(debug)):
                reference.check(wrapped(build, mode, Unit), f"{outer}, {describe(mode)}, debug={debug}")


@on_ranks(2)
def test_step_after_an_exception_gathers_as_often_as_usual() -> None:
    """The next forward clears the remaining state, not only the backward."""
    x = torch.randn(3, WIDTH)
    for mode, faults in zip(by_turns(0)[:2], (FAULTS, FAULTS[::3])):  # NO_SHARD gathers nothing
        model = wrapped(seeded(trapped_model, "none"), mode, Unit)

        def gathers() -> int:
            with record_collectives() as log:
                loss_of(model, x).backward()  # noqa: B023
            clear(model)  # noqa: B023
            return log.count("all_gather")

        usual = [gathers(), gathers()]
        for fault in faults:
            Trap.set(*fault)
            with pytest.raises(Fault):
                loss_of(model, x).backward()
            clear(model)
            assert gathers() == usual[1] == usual[0], f"after {fault}, {describe(mode)}"


@on_ranks(2)
def test_failed_backward_is_cleaned_up_on_the_thread_of_the_forwards() -> None:
    """Autograd's thread for an accelerator may be the last to hold a failed backward, while the program goes on.

    That thread must not change the units; the next call on the wrapped model resets them.
    """
    model = wrapped(seeded(trapped_model, "none"), MODES[0], Unit)
    x = Data(0, 2).tensor(0, 3, WIDTH)
    sizes = [param.numel() for param in model.parameters()]
    main, own = threading.get_ident(), []
    reset = RootContext.reset

    def note(context: RootContext) -> None:
        own.append(threading.get_ident() == main)
        reset(context)

    def fail(loss: Tensor) -> None:
        with pytest.raises(Fault):
            loss.backward()

    with mock.patch.object(RootContext, "reset", note):
        for then in (lambda: None, lambda: list(model.parameters()), lambda: model(x)):
            loss = loss_of(model, x)
            Trap.set("backward 1")
            thread = threading.Thread(target=fail, args=(loss,))
            del loss
            thread.start()
            thread.join()
            then()
            assert [param.numel() for param in model.parameters()] == sizes
    assert len(own) >= 3 and all(own)


@on_ranks(2)
def test_model_deleted_after_a_backward_that_failed_on_another_thread_does_not_stop_the_next_model() -> None:
    """One rank notices the failure at once, the other one at the first pass of the other model."""
    kept, model = (wrapped(seeded(trapped_model, "none"), MODES[0], Unit) for _ in range(2))
    x = torch.ones(3, WIDTH)
    loss_of(kept, x).backward()

    def fail(loss: Tensor) -> None:
        with pytest.raises(Fault):
            loss.backward()

    losses = [loss_of(model, x)]
    Trap.set("backward 1")
    if dist.get_rank() == 0:
        fail(losses.pop())
    else:
        thread = threading.Thread(target=lambda: fail(losses.pop()))
        thread.start()
        thread.join()
    del model
    clear(kept)
    loss_of(kept, x).backward()


def catching() -> nn.Module:
    """Build a model that handles the exception of a block."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for block in m.blocks:
            try:
                x = block(x)
            except Fault:
                x = x * m.scale
        return x * m.scale

    return Net(forward, blocks=nn.ModuleList([trapped(i) for i in range(3)]), scale=nn.Parameter(torch.ones(1)))


def _handled_program(model: nn.Module, data: Data) -> Iterator[Any]:
    for index in (1, 0, 2):
        x, y = data.tensor(index, 3, WIDTH), data.tensor(10 + index, 3, WIDTH)
        Trap.set(f"forward {index}")
        first = loss_of(model, x)
        second = loss_of(model, y)
        second.backward()
        yield {"y": y.grad}
        first.backward()
        yield {"x": x.grad}


@on_ranks(2)
def test_model_may_handle_an_exception_of_a_unit() -> None:
    check_parity(seeded(catching), _handled_program, Unit)


@on_ranks(2)
def test_error_in_a_backward_is_shown_once() -> None:
    """The exception has a note of rank and unit (from Python 3.11 on), and no second copy is logged."""
    model = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), use_orig_params=True)
    model.module.weight.register_hook(lambda grad: 1 / 0)
    with TestCase().assertNoLogs("fsdp", logging.WARNING), pytest.raises(ZeroDivisionError) as caught:
        model(torch.ones(1, WIDTH)).sum().backward()
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (sys.version_info >= (3, 11))
    assert all(f"rank {dist.get_rank()}, " in note and "of the root unit" in note for note in notes)


@pytest.mark.serial  # it waits a limited time for threads to free memory
@needs_meter
@on_ranks(2)
def test_faults_leave_no_memory_behind() -> None:
    width, meter = 300, Meter()
    for mode in by_turns(1):
        model = wrapped(seeded(trapped_model, "none", width), mode, Unit)
        held = list(model.parameters())
        x = torch.randn(3, width)

        # torch's flight recorder keeps about 1 KiB of each of the last 2000 collectives. A unit's buffer has 720 KB.
        allowed, before = 500_000, 0
        for cycle in range(2):  # the first cycle fills caches
            for fault in FAULTS:
                Trap.set(*fault)
                with pytest.raises(Fault):
                    loss_of(model, x).backward()
                with torch.no_grad():
                    model(x)
                if cycle:
                    more = meter.beyond(before, allowed)
                    assert more <= allowed, f"{more:,} bytes more after {fault}, {describe(mode)}"
            loss_of(model, x).backward()
            for param in held:
                param.grad = None
            if cycle == 0:
                before = meter.baseline()
        assert (more := meter.beyond(before, allowed)) <= allowed, f"{more:,} bytes more, {describe(mode)}"
