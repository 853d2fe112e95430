"""``fsdp.plan(model, world_size=...)``: memory and traffic of each rank under every strategy, before a run.

The model is on the meta device. The engine's functions choose the units (``wrap.py``) and lay them out
(``flat/ownership.py``, ``flat/layout.py``), so sizes of shards and traffic are exact. The peak is a closed form: see
[Note: The peak of a step] in ``plan_memory.py``.
"""

from __future__ import annotations

import argparse
import bisect
import copy
import dataclasses
import inspect
import json
import math
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp.api import (
    MixedPrecision,
    ShardingStrategy,
    as_count,
    as_mixed_precision,
    as_nbytes,
    as_resharding,
    as_sharding_strategy,
)
from fsdp.comm.groups import HYBRID_SHARDING_STRATEGIES, Groups
from fsdp.flat.names import unit_of
from fsdp.flat.ownership import bucket_layouts
from fsdp.tools.plan_memory import ModelUnit, UnitMemory, find_units, gathers, peaks, try_forward
from fsdp.tools.text import Report, counted, in_bytes
from fsdp.wrap import ModuleWrapPolicy

_PROBED = 1 << 16  # elements of the parameters that an optimizer is tried on
_COLUMNS = {
    "parameters": "param_nbytes",
    "gradients": "grad_nbytes",
    "optimizer": "optim_nbytes",
    "its step": "step_nbytes",
    "working set": "working_nbytes",
    "activations": "activation_nbytes",
    "host": "host_nbytes",
    "peak": "peak_nbytes",
}
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyPlan:
    """Memory and traffic of one rank under one strategy.

    Attributes:
        param_nbytes, grad_nbytes, optim_nbytes: bytes of the shards, their gradients and the optimizer's state.
        step_nbytes: the most that temporary tensors of the optimizer's step take at a time.
        working_nbytes: the most that full and reduce buffers take at a time; see [Note: The peak of a step].
        activation_nbytes: bytes that autograd saves in a forward; 0 without a batch.
        host_nbytes: with a ``HostOptimizer`` the bytes in host memory: shards, gradients, state and its step; else 0.
        peak_nbytes: the most that all of these take on the device at a time, in the backward or in the optimizer's
            step.
        gathered_nbytes, reduced_nbytes: bytes received in a step.
        gathers, reductions: number of collectives in a step.
    """

    strategy: ShardingStrategy
    param_nbytes: int
    grad_nbytes: int
    optim_nbytes: int
    step_nbytes: int
    working_nbytes: int
    activation_nbytes: int
    host_nbytes: int
    peak_nbytes: int
    gathered_nbytes: int
    reduced_nbytes: int
    gathers: int
    reductions: int


@dataclass(frozen=True, repr=False)
class Plan(Report):
    """The result of :func:`plan`. It prints as a table; ``to_json()`` has the numbers.

    Attributes:
        name: the model's class.
        numel: number of elements in the parameters.
        units: the paths of the modules that would be units; "" is the root.
        world_size: number of ranks.
        checkpoint_nbytes: bytes of parameters, buffers and optimizer state of all ranks.
        strategies: one plan per strategy.
        memory: bytes that a rank has; None if not given.
        smallest: for each strategy the smallest number of ranks for which ``peak_nbytes`` fits ``memory``, or None.
    """

    name: str
    numel: int
    units: tuple[str, ...]
    world_size: int
    checkpoint_nbytes: int
    strategies: tuple[StrategyPlan, ...]
    memory: int | None = None
    smallest: dict[ShardingStrategy, int | None] = field(default_factory=dict)

    def __getitem__(self, strategy: ShardingStrategy) -> StrategyPlan:
        """Return the plan of one strategy. Raises KeyError if it was not planned."""
        return {each.strategy: each for each in self.strategies}[strategy]

    def local_nbytes(self, ranks: int, copies: int = 1) -> int:
        """Return the bytes of the directory of a ``fsdp.checkpoint.Local`` on a host: two checkpoints of ``ranks``
        ranks, and of as many on each of ``copies`` other hosts. During a save it takes half as much again."""
        return 2 * (1 + copies) * self.checkpoint_nbytes * ranks // self.world_size

    def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        on_host = any(each.host_nbytes for each in self.strategies)
        columns = {title: name for title, name in _COLUMNS.items() if on_host or title != "host"}
        rows = [["per rank", *columns, "received", "gathers", "reductions"]]
        rows[0] += [] if self.memory is None else [f"fits {in_bytes(self.memory)}", "from ranks"]
        for each in self.strategies:
            nbytes = [*(getattr(each, name) for name in columns.values()), each.gathered_nbytes + each.reduced_nbytes]
            rows.append([each.strategy.name, *map(in_bytes, nbytes), str(each.gathers), str(each.reductions)])
            if self.memory is not None:
                fits = "yes" if each.peak_nbytes <= self.memory else "no"
                rows[-1] += [fits, str(self.smallest[each.strategy] or "never")]
        units, ranks = counted(len(self.units), "unit"), counted(self.world_size, "rank")
        title = f"{self.name}: {self.numel:,} parameters in {units}, {ranks}"
        notes = [
            f"a checkpoint: {in_bytes(self.checkpoint_nbytes)}; with fsdp.checkpoint.Local(copies=1) a host keeps "
            f"{in_bytes(self.local_nbytes(1))} for each of its ranks, and half as much again during a save",
            "not counted: the device's context, the backend's buffers, and what the allocator rounds up or keeps",
        ]
        if on_host:
            notes.insert(0, "host: parameters, gradients, optimizer and its step; the peak is that of the device")
        return [title], rows, notes

    def to_json(self) -> str:
        """Return all numbers as JSON; strategies by name."""
        smallest = {strategy.name: ranks for strategy, ranks in self.smallest.items()}
        found = {**dataclasses.asdict(self), "smallest": smallest}
        return json.dumps(found, indent=2, default=lambda strategy: strategy.name)


def plan(
    model: nn.Module | Callable[[], nn.Module],
    *,
    world_size: int,
    policy: Any = None,
    strategy: ShardingStrategy | Iterable[ShardingStrategy] | None = None,
    precision: MixedPrecision | None = None,
    optimizer: Optimizer | None = torch.optim.AdamW,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    shard_size: int | None = None,
    experts: type[nn.Module] | tuple[type[nn.Module], ...] = (),
    expert_ranks: int = 1,
    device: str | torch.device = "cuda",
    host_optimizer: bool = False,
    memory: int | str | None = None,
) -> Plan:
    """Compute the memory of each rank, and the bytes that it receives in a step, if ``model`` were wrapped and trained.

    No memory is allocated, ``model`` stays as it is, and no process group is needed. Sizes and traffic are exact, on
    the CPU for ``use_orig_params=False``; the peak is a closed form, see [Note: The peak of a step] in
    ``fsdp/tools/plan_memory.py``. ::

        print(fsdp.plan(Model, world_size=8, policy=ModuleWrapPolicy({Block}), inputs=[tokens], memory="80GB"))

    Args:
        model: a plain model on any device (copied to the meta device without values), or a function that makes one,
            which is called with the meta device as the default.
        world_size: number of ranks.
        policy: the ``auto_wrap_policy``; it is called with modules of the copy.
        strategy: the strategies to compare; None: all of them, hybrid ones if ``shard_size`` is given.
        precision: the ``mixed_precision``.
        optimizer: a class, or a function of a list of parameters; tried on small parameters, for the state and for the
            temporary tensors of a step. None: no optimizer. Without ``foreach`` or ``fused`` it runs as on ``device``.
        inputs: the arguments of a rank's forward, to count activations: a sequence, a mapping of keywords, or the only
            tensor, on any device. The forward runs on the meta device.
        shard_size: with hybrid strategies, the number of ranks of a shard group, usually those of a machine.
        experts: the classes of the units of experts, ``[experts, ...]`` in each parameter of the plain model.
        expert_ranks: the number of ranks that have other experts each (``fsdp.shard_experts``). The others hold copies,
            over which the units are sharded. In hybrid strategies a shard group has all experts.
        device: the device of the training. On accelerators shards are aligned to 16 bytes. With ``"cpu"`` (gloo)
            reductions receive into memory of their own, as between hosts.
        host_optimizer: plan for ``CPUOffload(offload_params=True)`` and a ``fsdp.optim.HostOptimizer`` around
            ``optimizer``: parameters, gradients and states are in host memory, and the peak is that of the device.
        memory: the memory of a rank, in bytes or as ``"80GB"``: fills :attr:`Plan.smallest`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the model is wrapped already, or cannot be wrapped.
        NotImplementedError: the model has ``DTensor`` parameters.
    """
    for argument, number in {"world_size": world_size, "expert_ranks": expert_ranks, "shard_size": shard_size}.items():
        if number is not None:
            as_count(number, argument, "ranks", least=1)
    kind = torch.device(device).type
    if host_optimizer and kind == "cpu":
        raise ValueError("host_optimizer=True is for accelerators: on the CPU everything is in host memory anyway")
    chosen = _strategies(strategy, shard_size)
    limit = None if memory is None else as_nbytes(memory, "memory")
    copied = on_meta(model)
    units = find_units(copied, policy, as_mixed_precision(precision))
    dtypes = {param.dtype for param in copied.parameters() if param.requires_grad}
    tried = {dtype: _try(optimizer, dtype, on_cpu=host_optimizer or kind == "cpu") for dtype in dtypes}
    planner = _Planner(units, tried, shard_size, kind == "cpu", host_optimizer)
    checkpoint_nbytes = planner.checkpoint_nbytes(copied)
    if inputs is not None:
        try_forward(copied, units, inputs)
    numel = sum(item.param.numel() for unit in units for item in unit.owned)
    _leave_part_of_experts(units, experts, expert_ranks)
    return Plan(
        name=type(copied).__name__,
        numel=numel,
        units=tuple(", ".join(unit.names) for unit in units),
        world_size=world_size,
        checkpoint_nbytes=checkpoint_nbytes,
        strategies=tuple(planner.plan(each, world_size) for each in chosen),
        memory=limit,
        smallest={} if limit is None else {each: planner.smallest(each, limit) for each in chosen},
    )


# -- arguments ---------------------------------------------------------------------------------------------------------


def _strategies(strategy: Any, shard_size: int | None) -> list[ShardingStrategy]:
    if strategy is None:
        return [s for s in ShardingStrategy if s not in HYBRID_SHARDING_STRATEGIES or shard_size is not None]
    several = list(strategy) if isinstance(strategy, Iterable) and not isinstance(strategy, str) else [strategy]
    chosen = [as_sharding_strategy(each) for each in several]
    if shard_size is None and any(each in HYBRID_SHARDING_STRATEGIES for each in chosen):
        raise ValueError("hybrid strategies need shard_size=, the number of ranks that a replica is sharded over")
    return chosen


def on_meta(model: Any) -> nn.Module:
    """Copy a model, or make one, on the meta device."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(f"model must be an nn.Module or a function that makes one, but got {type(model).__name__}")
        with torch.device("meta"):
            model = model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected the function to make an nn.Module, but it made a {type(model).__name__}")
    if any(unit_of(module) is not None for module in model.modules()):
        raise ValueError("plan() is for models that are not wrapped yet; fsdp.describe(model) shows wrapped ones")
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise NotImplementedError(
            "plan() does not count tensor parallelism: plan the model as it is before parallelize_module(), with the "
            "number of data parallel ranks. Of experts plan the plain model, and pass experts= and expert_ranks="
        )
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _leave_part_of_experts(units: Iterable[ModelUnit], experts: Any, ranks: int) -> None:
    """Let each unit of a class of ``experts`` have the parameters of one of ``ranks`` ranks.

    Raises:
        ValueError: no unit is of such a class, or a parameter has no dimension.
    """
    found = [unit for unit in units if isinstance(unit.module, experts)]
    if not found and (experts or ranks > 1):
        raise ValueError(
            f"expert_ranks={ranks} needs units of experts, and no unit of the model is one of experts={experts}: name "
            "the class, and let the policy make units of it"
        )
    for unit in found:
        unit.expert_ranks = ranks
        for item in unit.owned:
            if item.param.dim() == 0:
                raise ValueError(
                    f"expected [experts, ...], but {item.name!r} of {type(unit.module).__name__} has no dimension"
                )
            item.param = nn.Parameter(item.param.detach().chunk(ranks)[0], item.param.requires_grad)


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass
class _Planner:
    """The units of a model, and the facts that do not depend on strategy and number of ranks."""

    units: list[ModelUnit]
    tried: dict[torch.dtype, _Tried]  # the optimizer, by dtype of trained parameters
    shard_size: int | None
    on_cpu: bool
    host_optimizer: bool

    def plan(self, strategy: ShardingStrategy, world_size: int) -> StrategyPlan:
        """Return the plan of one strategy at a number of ranks."""
        resharded, _ = as_resharding(None, strategy)
        units, stepped = [], defaultdict[tuple[torch.dtype, int], list[int]](list)  # by dtype, and on the host by unit
        for unit in self.units:
            groups = self._groups(unit.strategy or strategy, world_size, unit.expert_ranks)
            stays = unit.index == 0 if resharded is None else not resharded
            memory = UnitMemory(unit, stays=stays, offloaded=self.host_optimizer)
            ranks = groups.shard_size
            for layout, params in bucket_layouts(unit.owned, ranks, self.on_cpu, unit.precision, use_orig_params=False):
                optim = None
                if params[0].param.requires_grad:
                    shard = layout.shard_numel
                    optim = self.tried[layout.dtype].state_nbytes(shard)
                    stepped[layout.dtype, unit.index if self.host_optimizer else 0].append(shard)
                memory.add(layout, groups, optim, on_cpu=self.on_cpu)
            units.append(memory)
        params, grads, optim = (sum(getattr(each, name) for each in units) for name in ("params", "grads", "optim"))
        working, most = peaks(units)
        step = max((self.tried[dtype].temporary_nbytes(numels) for (dtype, _), numels in stepped.items()), default=0)
        times = gathers(units)
        return StrategyPlan(
            strategy=strategy,
            param_nbytes=params,
            grad_nbytes=grads,
            optim_nbytes=optim,
            step_nbytes=step,
            working_nbytes=working,
            activation_nbytes=sum(unit.activation_nbytes for unit in self.units),
            host_nbytes=params + grads + optim + step if self.host_optimizer else 0,
            peak_nbytes=most if self.host_optimizer else params + optim + max(most, grads + step),
            gathered_nbytes=sum(count * each.gathered for count, each in zip(times, units)),
            reduced_nbytes=sum(each.received for each in units),
            gathers=sum(times),
            reductions=sum(each.reductions for each in units),
        )

    def checkpoint_nbytes(self, model: nn.Module) -> int:
        """Return the bytes in a checkpoint of ``model``: a tied parameter is there under each name."""
        values = (value.nbytes for value in model.state_dict().values() if isinstance(value, torch.Tensor))
        trained = (param for param in model.parameters() if param.requires_grad)
        return sum(values) + sum(self.tried[param.dtype].state_nbytes(param.numel()) for param in trained)

    def smallest(self, strategy: ShardingStrategy, limit: int) -> int | None:
        """Return the smallest number of ranks that fits ``limit``, by bisection: more ranks hold less each."""
        step = (self.shard_size or 1) if strategy in HYBRID_SHARDING_STRATEGIES else 1
        step = math.lcm(step, *(unit.expert_ranks for unit in self.units))

        def fits(count: int) -> bool:
            return self.plan(strategy, count * step).peak_nbytes <= limit

        high = next((count for count in (1 << power for power in range(17)) if fits(count)), None)
        if high is None:
            return None
        counts = range(high // 2 + 1, high)
        return step * (counts.start + bisect.bisect_left(counts, True, key=fits))

    def _groups(self, strategy: ShardingStrategy, world_size: int, expert_ranks: int) -> Groups:
        size = 1 if strategy is ShardingStrategy.NO_SHARD else world_size
        if strategy in HYBRID_SHARDING_STRATEGIES and self.shard_size is not None:
            size = self.shard_size
            if world_size % size:
                raise ValueError(f"world_size {world_size} is not a multiple of shard_size {size}")
        if world_size % expert_ranks:
            raise ValueError(f"world_size {world_size} is not a multiple of expert_ranks {expert_ranks}")
        size = max(size // expert_ranks, 1)
        return Groups(None, 0, size, None, 0, world_size // expert_ranks // size)


class _Tried(NamedTuple):
    """Bytes of an optimizer per element, found by trial.

    Attributes:
        state: the state.
        own, kept: the temporary tensors of one parameter in a loop over parameters, and those that the loop keeps while
            it steps the next parameter.
        together: the temporary tensors that exist for all parameters at a time.
    """

    state: float = 0
    own: float = 0
    kept: float = 0
    together: float = 0

    def state_nbytes(self, numel: int) -> int:
        """Return the bytes of state for a parameter of ``numel`` elements."""
        return math.ceil(self.state * numel)

    def temporary_nbytes(self, numels: list[int]) -> int:
        """Return the most bytes of temporary tensors in a step of parameters of these sizes, in their order."""
        in_loop = max(self.own * numel + self.kept * before for numel, before in zip(numels, [0, *numels]))
        return math.ceil(in_loop + self.together * sum(numels))


def _try(optimizer: Optimizer | None, dtype: torch.dtype, *, on_cpu: bool) -> _Tried:
    """Take two steps of an optimizer of one parameter, of two, and of three."""
    if optimizer is None:
        return _Tried()
    temporary = []
    for count in (1, 2, 3):
        params = [nn.Parameter(torch.zeros(_PROBED, dtype=dtype)) for _ in range(count)]
        for param in params:
            param.grad = torch.zeros_like(param)
        try:
            made = optimizer(params)
            for group in [] if on_cpu else made.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # torch's default on accelerators
            made.step()
            with _Temporaries() as found:
                made.step()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{optimizer!r} cannot be tried on a 1-D parameter: {error}") from error
        temporary.append(found.nbytes / _PROBED)
    state = sum(value.nbytes for value in made.state[params[0]].values() if isinstance(value, torch.Tensor))
    one, two, three = temporary
    together = three - two
    return _Tried(state / _PROBED, one - together, two - one - together, together)


class _Temporaries(TorchDispatchMode):
    """The most bytes at a time of new tensors of at least :data:`_PROBED` elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is None for each in func._schema.returns):  # neither a view nor in place
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= _PROBED:
                    storage = tensor.untyped_storage()
                    self._made[StorageWeakRef(storage)] = storage.nbytes()
            self.nbytes = max(self.nbytes, sum(n for storage, n in self._made.items() if not storage.expired()))
        return result


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fsdp plan``."""
    add = parser.add_argument
    add("model", type=resolved, help="module:name of a model, or of a function without arguments that makes it")
    add("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    add("--memory", metavar="80GB", help="memory of a rank: find the smallest number of ranks that fits")
    add("--wrap", metavar="CLASS,...", help="classes of modules that become units")
    add("--strategy", type=str.upper, choices=ShardingStrategy.__members__, nargs="+", help="default: all")
    add("--precision", choices=_DTYPES, help="compute and reduce in this dtype")
    add("--optimizer", type=_optimizer, default="AdamW", help="a class of torch.optim (default AdamW), or none")
    add("--batch-tokens", type=_ids, metavar="8x1024", dest="inputs", help="count activations of such a batch of ids")
    add("--inputs", type=_returned, metavar="MODULE:NAME", help="function that returns the arguments of a forward")
    add("--shard-size", type=int, metavar="N", help="ranks per machine, for hybrid strategies")
    add("--experts", default=(), metavar="CLASS,...", help="classes of units of experts, which --wrap names as well")
    add("--expert-ranks", type=int, default=1, metavar="N", help="number of ranks with other experts each")
    add("--device", default="cuda", help="cuda (default), or cpu for gloo")
    add("--host-optimizer", action="store_true", help="offloaded parameters, and a HostOptimizer around --optimizer")
    add("--json", action="store_true", help="print all numbers as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan; return 0."""
    model = on_meta(options.model)
    given = {name: value for name, value in vars(options).items() if name in inspect.signature(plan).parameters}
    given |= {
        "model": model,
        "policy": options.wrap and ModuleWrapPolicy(classes_of(model, options.wrap)),
        "strategy": options.strategy and [ShardingStrategy[name] for name in options.strategy],
        "precision": options.precision and MixedPrecision(param_dtype=_DTYPES[options.precision]),
        "experts": options.experts and classes_of(model, options.experts),
    }
    found = plan(**given)
    print(found.to_json() if options.json else found)
    return 0


def resolved(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _optimizer(name: str) -> Any:
    return None if name == "none" else resolved(f"torch.optim:{name}")


def _ids(text: str) -> torch.Tensor:
    sizes = text.split("x")
    if not all(map(str.isdecimal, sizes)):
        raise argparse.ArgumentTypeError(f"expected sizes such as 8x1024, but got {text!r}")
    return torch.empty([*map(int, sizes)], dtype=torch.int64, device="meta")


def _returned(name: str) -> Any:
    return resolved(name)()


def classes_of(model: nn.Module, names: str) -> tuple[type[nn.Module], ...]:
    """Return the classes of modules in ``model`` with ``names`` (Block,Experts). Raises ValueError if one has none."""
    classes, asked = {type(module) for module in model.modules()}, set(names.split(","))
    there = {each.__name__ for each in classes}
    if missing := sorted(asked - there):
        raise ValueError(f"the model has no {' and no '.join(missing)}; its modules are {', '.join(sorted(there))}")
    return tuple(each for each in classes if each.__name__ in asked)
