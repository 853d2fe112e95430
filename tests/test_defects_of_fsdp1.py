"""Known defects of torch's FSDP1 (2.13), each as a program that goes wrong there and right here.

A program is run with either package, in both `use_orig_params` modes, on two ranks. It returns nothing where the
package does what it should, and otherwise says or raises what went wrong, alike on every rank: so torch's ranks stay
in step, and a defect that hangs or kills processes has no place here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from tests.harness.oracle import clean_name
from tests.harness.pool import run_ranks
from tests.harness.process_groups import record_collectives

WIDTH = 5


@dataclass(frozen=True)
class Package:
    """One of the two, as a program uses it."""

    name: str
    use_orig_params: bool

    @property
    def cls(self) -> Any:
        if self.name == "fsdp":
            return fsdp.FullyShardedDataParallel
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel

    def wrap(self, module: nn.Module, *units: type[nn.Module], **options: Any) -> Any:
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

        policy = fsdp.wrap.ModuleWrapPolicy if self.name == "fsdp" else TorchPolicy
        return self.cls(
            module,
            auto_wrap_policy=policy(set(units)) if units else None,
            device_id=torch.device("cpu"),
            use_orig_params=self.use_orig_params,
            **options,
        )

    def values(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the whole parameters."""
        with self.cls.summon_full_params(model, writeback=False):
            return {clean_name(name): param.detach().clone() for name, param in model.named_parameters()}


Program = Callable[[Package], str | None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def net(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 3))


def batch(rank: int = -1) -> Tensor:
    rank = dist.get_rank() if rank < 0 else rank
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 2) -> None:
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def trained(module: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """What `train` on two ranks should make of the parameters."""
    optimizer = sgd(module)
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(module(batch(rank)).square().mean() for rank in range(2)) / 2).backward()
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    wrong = [name for name, value in expected.items() if not torch.allclose(found[name], value, rtol=1e-5, atol=1e-6)]
    return on_all_ranks(f"wrong: {', '.join(wrong)}" if wrong else None)


def on_all_ranks(words: str | None) -> str | None:
    """The first that a rank has to say."""
    everybody: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, words)
    return next((words for words in everybody if words), None)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# -- the programs --------------------------------------------------------------------------------------------------


def forward_inside_summon(package: Package) -> str | None:
    model = package.wrap(net(), Block)
    before = package.values(model)
    with package.cls.summon_full_params(model), torch.no_grad():
        model(batch())
    return differences(package.values(model), before)


def written_after_a_forward_without_gradients(package: Package) -> str | None:
    plain, model = net(), package.wrap(net(), Block)
    with torch.no_grad():
        model(batch())
        for each in (plain, model):
            for param in each.parameters():
                param.mul_(2.0)
        found, expected = model(batch()), plain(batch())
    return differences({"output": found}, {"output": expected})


def tied_across_units(package: Package) -> str | None:
    module = net()
    module[2].linear.weight = module[0].linear.weight
    words = error_of(package.wrap, module, Block)
    if words is None:
        return "no error"
    return (
        None if words.startswith("ValueError") and "0.linear.weight" in words and "2.linear.weight" in words else words
    )


def a_module_at_two_places(package: Package) -> str | None:
    plain, module = net(), net()
    plain[2], module[2] = plain[0], module[0]
    model = package.wrap(module, Block)
    train(model)
    return differences(package.values(model), trained(plain))


def a_child_first(package: Package) -> str | None:
    module = nn.Sequential(*net())
    module[0] = package.wrap(module[0])
    with torch.no_grad():
        module[0](batch())
    model = package.wrap(module)
    train(model)
    return differences(package.values(model), trained(net()))


class Fault(Exception):
    pass


def exception_in(package: Package, hook: Callable[..., Any]) -> str | None:
    """A step, an exception on the way of the next one, and a step as if it had not happened."""
    model = package.wrap(net(), Block)
    optimizer = sgd(model)
    train(model, optimizer, 1)
    before = [id(param) for param in model.parameters()]
    handle = model.module[1].module.linear.register_forward_hook(hook)
    with pytest.raises(Fault):
        model(batch()).square().mean().backward()
    handle.remove()
    if [id(param) for param in model.parameters()] != before:
        return "parameters() gives others"
    train(model, optimizer, 1)
    return differences(package.values(model), trained(net()))


def exception_in_forward(package: Package) -> str | None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        raise Fault

    return exception_in(package, hook)


def exception_in_backward(package: Package) -> str | None:
    def raise_fault(grad: Tensor) -> None:
        raise Fault

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(raise_fault)

    return exception_in(package, hook)


def inference_first(package: Package) -> str | None:
    model = package.wrap(net(), Block)
    with torch.inference_mode():
        model(batch())
    train(model)
    return differences(package.values(model), trained(net()))


class Sized(Block):
    """Blocks that one can tell by the sizes of their gathers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(100 * (index + 1)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.more.mean()


class Order:
    """The gathers of a step and the units that compute, in order, by the units' numbers: "gather 1", "forward 1"."""

    def __init__(self, package: Package, order: list[int], **options: Any) -> None:
        torch.manual_seed(0)
        units = [Sized(index) for index in range(max(order) + 1)]
        self._module = nn.Sequential(*(units[index] for index in order), nn.Linear(WIDTH, 3))
        for index in range(len(units)):
            units[index].linear.register_forward_pre_hook(self._mark(f"forward {index}"))
            units[index].linear.register_full_backward_pre_hook(self._mark(f"backward {index}"))
        wrapped = [package.wrap(unit, **options) for unit in units]
        self.model = package.wrap(nn.Sequential(*(wrapped[index] for index in order), nn.Linear(WIDTH, 3)), **options)

    def _mark(self, text: str) -> Callable[..., None]:
        return lambda *args: self._log.mark(text)

    def step(self) -> tuple[list[str], list[str]]:
        """The events of forward and backward."""
        with record_collectives() as self._log:
            loss = self.model(batch()).square().mean()
        forward = self._events()
        with record_collectives() as self._log:
            loss.backward()
        return forward, self._events()

    def _events(self) -> list[str]:
        records = self._log.records
        return [
            str(what) if kind == "mark" else f"gather {records[int(what)].output_numel // 100 - 1}"
            for kind, what in self._log.events
            if kind == "mark" or (kind == "issue" and records[int(what)].op == "all_gather")
        ]


def two_ahead(package: Package) -> str | None:
    options = {"forward_prefetch_distance": 2, "backward_prefetch_distance": 2} if package.name == "fsdp" else {}
    order = Order(package, [0, 1, 2, 3, 4], forward_prefetch=True, **options)
    order.step()
    if package.name == "torch":  # the only way to ask for it
        order.model._exec_order_data._forward_prefetch_limit = 2
        order.model._exec_order_data._backward_prefetch_limit = 2
    order.step()
    forward, backward = order.step()
    for events, what, units in ((forward, "forward", [0, 1, 2, 3, 4]), (backward, "backward", [4, 3, 2, 1, 0])):
        for position, unit in enumerate(units):
            before = events[: events.index(f"{what} {unit}")]
            missing = [other for other in units[: position + 3] if f"gather {other}" not in before]
            if missing:
                return f"{what} {unit} computes before {missing} are gathered: {events}"
        gathers = [event for event in events if event.startswith("gather") and event != "gather -1"]
        if gathers != [f"gather {unit}" for unit in units]:
            return f"not in the order in which they are needed: {events}"
    return None


def used_twice(package: Package) -> str | None:
    order = Order(package, [0, 1, 2, 1])
    order.step()
    _, backward = order.step()
    gathers = [event for event in backward if event.startswith("gather")]
    return None if gathers == ["gather 1", "gather 2", "gather 0"] else f"{backward}"


def without_backward(package: Package) -> str | None:
    model = package.wrap(net(), Block)
    block = model.module[0]
    unit = block._fsdp_unit if package.name == "fsdp" else block._handle
    counts = []
    with torch.no_grad():
        for _ in range(4):
            model(batch())
            counts.append(sys.getrefcount(unit))
    return None if counts[1] == counts[-1] else f"references: {counts}"


class WithScale(nn.Module):
    """A root without parameters, and with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net()
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


def kind_of_state_after_an_exception(package: Package) -> str | None:
    model = package.wrap(net(), Block)
    model(batch())
    sharded = type(package.cls.get_state_dict_type(model).state_dict_type).SHARDED_STATE_DICT
    before = package.cls.get_state_dict_type(model).state_dict_type
    try:
        with package.cls.state_dict_type(model, sharded):
            raise ArithmeticError
    except ArithmeticError:
        pass
    after = package.cls.get_state_dict_type(model).state_dict_type
    if after != before:
        return f"{after.name} after the exception"
    try:
        with package.cls.state_dict_type(nn.Linear(1, 1), sharded):
            pass
    except ValueError:
        return None
    return "no error for a module that is not wrapped"


def buffers_of_a_root_without_parameters(package: Package) -> str | None:
    precision = fsdp.MixedPrecision if package.name == "fsdp" else _torchs("MixedPrecision")
    model = package.wrap(WithScale(), Block, nn.Linear, mixed_precision=precision(buffer_dtype=torch.bfloat16))
    model(batch())
    dtype = model.state_dict()["scale"].dtype
    return None if dtype == torch.float32 else f"the buffer is {dtype}"


def _torchs(name: str) -> Any:
    import torch.distributed.fsdp

    return getattr(torch.distributed.fsdp, name)


# -- the comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defect:
    """What is known of torch: the beginning of what a program says there, with flat and with original parameters."""

    row: str
    program: Program
    flat: str | None
    original: str | None


ONCE_ROOT = "AssertionError: Non-root FSDP instance's `_is_root` should not have been set"
OTHERS = "parameters() gives others"
NOT_IN_ORDER = "not in the order in which they are needed: ['gather -1', 'gather 1', 'gather 0', 'gather 2'"
INFERENCE = "AssertionError: The `grad_fn` is needed to access the `AccumulateGrad`"
DEFECTS = [
    Defect("Y58", forward_inside_summon, "AssertionError: Expects tensor to be unsharded", "wrong: 0.linear.weight"),
    Defect("Y59", written_after_a_forward_without_gradients, "wrong: output", "wrong: output"),
    Defect("Y60", tied_across_units, "no error", "no error"),
    Defect("Y61", a_module_at_two_places, "RuntimeError: setStorage: ", "RuntimeError: mat2 must be a matrix"),
    Defect("Y62", kind_of_state_after_an_exception, *["SHARDED_STATE_DICT after the exception"] * 2),
    Defect("Y63", a_child_first, ONCE_ROOT, ONCE_ROOT),
    Defect("Y64", exception_in_forward, None, OTHERS),
    Defect("Y64", exception_in_backward, "AssertionError: Cannot manually unshard parameters", OTHERS),
    Defect("Y67", inference_first, INFERENCE, INFERENCE),
    Defect("Y68", buffers_of_a_root_without_parameters, *["the buffer is torch.bfloat16"] * 2),
    Defect("Y70", two_ahead, NOT_IN_ORDER, NOT_IN_ORDER),
    Defect("Y70", used_twice, "['gather 1', 'gather 0', 'backward 1', 'gather 2'", "['gather 1', 'gather 0', "),
    Defect("Y70", without_backward, "references: ", "references: "),
]


def outcomes(number: int) -> list[str | None]:
    warnings.simplefilter("ignore")
    program = DEFECTS[number].program
    packages = ["fsdp", "torch"] if torch.__version__.startswith("2.13") else ["fsdp"]
    found = []
    for package in (Package(name, use_orig_params) for name in packages for use_orig_params in (False, True)):
        try:
            found.append(program(package))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=[f"{d.row}-{d.program.__name__}" for d in DEFECTS])
def test_right_here_and_wrong_there(number: int) -> None:
    """Y58-Y64, Y67, Y68, Y70"""
    defect = DEFECTS[number]
    for ours_flat, ours_original, *torchs in run_ranks(2, outcomes, number):
        assert ours_flat is None and ours_original is None, (ours_flat, ours_original)
        for found, known in zip(torchs, (defect.flat, defect.original)):
            assert found is None if known is None else str(found).startswith(known), found
