"""``fsdp.plan(model, world_size=...)``: memory and traffic of each rank under every strategy, before a run.

The model is on the meta device. It is wrapped by the engine's policy walk (``wrap.py``) and laid out by the engine's
arithmetic (``flat/ownership.py``, ``flat/layout.py``). So sizes of shards and traffic are exact.

The peak is a closed form: see [Note: The peak of a step] in ``plan_memory.py``.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp.api import MixedPrecision, ShardingStrategy, as_mixed_precision, as_resharding, as_sharding_strategy
from fsdp.comm.groups import HYBRID_SHARDING_STRATEGIES, Groups
from fsdp.flat.names import WRAPPED_MODULE, ModuleGroup, joined, members_of, unit_of
from fsdp.flat.ownership import Ignored, bucket_layouts, owned_params
from fsdp.runtime.hooks import on_saved
from fsdp.tools.plan_memory import PlannedBucket, PlannedUnit, gathers, peaks, reductions
from fsdp.tools.text import Table, counted, in_bytes
from fsdp.wrap import ModuleWrapPolicy, auto_wrap

_LARGEST_WORLD = 1 << 16
_PROBED = 4096  # elements of the parameter that an optimizer is tried on
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyPlan:
    """Memory and traffic of one rank under one strategy.

    Attributes:
        shard_size, replicas: number of ranks in a shard group, and of shard groups.
        param_nbytes, grad_nbytes, optim_nbytes: bytes of the shards, their gradients and the optimizer's state.
        working_nbytes: the most that full and reduce buffers take at a time; see [Note: The peak of a step].
        activation_nbytes: bytes that autograd saves in a forward; 0 without a batch.
        peak_nbytes: the most that all of these take at a time.
        gathered_nbytes, reduced_nbytes: bytes received in a step.
        gathers, reductions: number of collectives in a step.
    """

    strategy: ShardingStrategy
    shard_size: int
    replicas: int
    param_nbytes: int
    grad_nbytes: int
    optim_nbytes: int
    working_nbytes: int
    activation_nbytes: int
    peak_nbytes: int
    gathered_nbytes: int
    reduced_nbytes: int
    gathers: int
    reductions: int


@dataclass(frozen=True, repr=False)
class Plan:
    """The result of :func:`plan`. ``str()`` is a table, ``to_json()`` has the numbers, notebooks show the table.

    Attributes:
        name: the model's class.
        numel: number of elements in the parameters.
        units: the paths of the modules that would be units; "" is the root.
        world_size: number of ranks.
        strategies: one plan per strategy.
        memory: bytes that a rank has; None if not given.
        smallest: for each strategy the smallest number of ranks for which ``peak_nbytes`` fits ``memory``, or None.
    """

    name: str
    numel: int
    units: tuple[str, ...]
    world_size: int
    strategies: tuple[StrategyPlan, ...]
    memory: int | None = None
    smallest: dict[ShardingStrategy, int | None] = field(default_factory=dict)

    def __getitem__(self, strategy: ShardingStrategy) -> StrategyPlan:
        """Return the plan of one strategy. Raises KeyError if it was not planned."""
        for each in self.strategies:
            if each.strategy is strategy:
                return each
        raise KeyError(strategy)

    @property
    def title(self) -> str:
        units, ranks = (counted(n, noun) for n, noun in ((len(self.units), "unit"), (self.world_size, "rank")))
        return f"{self.name}: {self.numel:,} parameters in {units}, {ranks}"

    @property
    def table(self) -> Table:
        """One row per strategy."""
        head = ["per rank", "parameters", "gradients", "optimizer", "working set", "activations", "peak"]
        head += ["received", "gathers", "reductions"]
        rows = []
        for each in self.strategies:
            held = [each.param_nbytes, each.grad_nbytes, each.optim_nbytes, each.working_nbytes]
            cells = [in_bytes(nbytes) for nbytes in (*held, each.activation_nbytes, each.peak_nbytes)]
            cells += [in_bytes(each.gathered_nbytes + each.reduced_nbytes), str(each.gathers), str(each.reductions)]
            if self.memory is not None:
                cells.append("yes" if each.peak_nbytes <= self.memory else "no")
                cells.append(str(self.smallest[each.strategy] or "never"))
            rows.append([each.strategy.name, *cells])
        return Table(head if self.memory is None else [*head, f"fits {in_bytes(self.memory)}", "from ranks"], rows)

    def __str__(self) -> str:
        return f"{self.title}\n{self.table}"

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        return f"{self.title}\n\n{self.table.markdown()}"

    def to_json(self) -> str:
        """Return all numbers as JSON; strategies by name."""
        found = dataclasses.asdict(self)
        found["strategies"] = [{**each, "strategy": each["strategy"].name} for each in found["strategies"]]
        found["smallest"] = {strategy.name: ranks for strategy, ranks in self.smallest.items()}
        return json.dumps(found, indent=2)


def plan(
    model: nn.Module | Callable[[], nn.Module],
    *,
    world_size: int,
    policy: Any = None,
    strategy: ShardingStrategy | Iterable[ShardingStrategy] | None = None,
    precision: MixedPrecision | None = None,
    optimizer: Optimizer | None = torch.optim.AdamW,
    batch_tokens: int | Sequence[int] | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    use_orig_params: bool = False,
    shard_size: int | None = None,
    device: str | torch.device = "cuda",
    memory: int | str | None = None,
) -> Plan:
    """Compute what each rank would hold, and receive in a step, if ``model`` were wrapped and trained.

    No memory is allocated, ``model`` stays as it is, and no process group is needed. Sizes and traffic are exact; the
    peak is a closed form, see [Note: The peak of a step] in ``fsdp/tools/plan_memory.py``. ::

        print(fsdp.plan(Model, world_size=8, policy=ModuleWrapPolicy({Block}), batch_tokens=(8, 1024), memory="80GB"))

    Args:
        model: a plain model on any device (copied to the meta device without values), or a function that makes one,
            which is called with the meta device as the default.
        world_size: number of ranks.
        policy: the ``auto_wrap_policy``; it is called with modules of the copy.
        strategy: the strategies to compare; None: all of them, hybrid ones if ``shard_size`` is given.
        precision: the ``mixed_precision``.
        optimizer: a class, or a function of a list of parameters; tried on a small parameter. None: no optimizer.
        batch_tokens: a rank's batch of token ids, to count activations: a number of tokens, or a shape such as
            ``(8, 1024)``. The model's forward runs with it on the meta device.
        inputs: the arguments of the forward instead of ``batch_tokens``: a sequence, a mapping of keywords, or the only
            tensor, on any device.
        use_orig_params: as in the wrapper; it changes the padding.
        shard_size: with hybrid strategies, the number of ranks of a shard group, usually those of a machine.
        device: the device of the training. On accelerators shards are aligned to 16 bytes. With ``"cpu"`` (gloo)
            reductions receive into memory of their own, as between hosts.
        memory: the memory of a rank, in bytes or as ``"80GB"``: fills :attr:`Plan.smallest`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the model is wrapped already, or cannot be wrapped.
        NotImplementedError: the model has ``DTensor`` parameters.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a number of ranks, 1 or more, but got {world_size!r}")
    if shard_size is not None and (not isinstance(shard_size, int) or shard_size < 1):
        raise ValueError(f"shard_size must be a number of ranks, 1 or more, or None, but got {shard_size!r}")
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            "optimizer must be a class such as torch.optim.AdamW, a function that makes one of a list of parameters, "
            f"or None, but got a {type(optimizer).__name__}"
        )
    tree = _Tree(
        _on_meta(model), policy, as_mixed_precision(precision), use_orig_params, torch.device(device).type == "cpu"
    )
    batch = _batch(batch_tokens, inputs)
    if batch is not None:
        tree.try_forward(*batch)
    chosen = _strategies(strategy, shard_size)
    planner = _Planner(tree, optimizer, shard_size)
    limit = None if memory is None else as_nbytes(memory)
    return Plan(
        name=tree.name,
        numel=sum(item.param.numel() for wrapped in tree.wrapped for item in wrapped.owned),
        units=tuple(wrapped.name for wrapped in tree.wrapped),
        world_size=world_size,
        strategies=tuple(planner.plan(each, world_size) for each in chosen),
        memory=limit,
        smallest={} if limit is None else {each: planner.smallest(each, limit) for each in chosen},
    )


def as_nbytes(memory: int | str) -> int:
    """Convert ``80GB``, ``80 GiB``, ``512MB`` or a number of bytes to bytes.

    Raises:
        ValueError: ``memory`` is none of these.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", str(memory), re.IGNORECASE)
    if found is None:
        raise ValueError(f"memory must be a number of bytes, such as 80GB, 80GiB or 512MB, but got {memory!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


# -- arguments ---------------------------------------------------------------------------------------------------------


def _strategies(strategy: Any, shard_size: int | None) -> list[ShardingStrategy]:
    if strategy is None:
        return [s for s in ShardingStrategy if s not in HYBRID_SHARDING_STRATEGIES or shard_size is not None]
    several = list(strategy) if isinstance(strategy, Iterable) and not isinstance(strategy, str) else [strategy]
    chosen = [as_sharding_strategy(each) for each in several]
    if shard_size is None and any(each in HYBRID_SHARDING_STRATEGIES for each in chosen):
        raise ValueError("hybrid strategies need shard_size=, the number of ranks that a replica is sharded over")
    return chosen


def _batch(batch_tokens: Any, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the positional and keyword arguments of a forward, on the meta device; None without a batch."""
    if batch_tokens is not None and inputs is not None:
        raise ValueError("batch_tokens and inputs are two ways to say the same: pass one of them")
    if inputs is not None:
        keywords = dict(inputs) if isinstance(inputs, Mapping) else {}
        positional = () if keywords else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        moved: Any = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (positional, keywords))
        return tuple(moved[0]), moved[1]
    if batch_tokens is None:
        return None
    shape = (1, batch_tokens) if isinstance(batch_tokens, int) else batch_tokens
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        raise TypeError(f"batch_tokens must be a number of tokens, or a shape such as (8, 1024), but got {shape!r}")
    if not all(size > 0 for size in shape):
        raise ValueError(f"batch_tokens must have sizes of 1 or more, but got {shape!r}")
    return (torch.empty(shape, dtype=torch.int64, device="meta"),), {}


def _on_meta(model: Any) -> nn.Module:
    """Copy a model, or make one, on the meta device."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(f"model must be an nn.Module or a function that makes one, but got {type(model).__name__}")
        with torch.device("meta"):
            model = model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected the function to make an nn.Module, but it made a {type(model).__name__}")
    if any(unit_of(module) is not None for module in model.modules()):
        raise ValueError("plan() is for models that are not wrapped yet; fsdp.describe(model) tells of wrapped ones")
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise NotImplementedError(
            "plan() does not count tensor parallelism: plan the model as it is before parallelize_module(), with the "
            "number of data parallel ranks, and divide what is parallelized by the number of tensor parallel ones"
        )
    memo: dict[int, Any] = {
        id(param): nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


# -- the model, wrapped ------------------------------------------------------------------------------------------------


class _Wrapped(nn.Module):
    """Placeholder of a wrapper, which reports when it runs. Each module of a group has one, with a common ``unit``."""

    def __init__(self, module: nn.Module, unit: _Wrapped | None = None, **options: Any) -> None:
        super().__init__()
        setattr(self, WRAPPED_MODULE, module)
        self.inner, self.of = [module], [unit or self]  # in lists: not a second time among the modules
        if unit is not None:
            return
        self.name, self.index, self.around, self.options = "", 0, frozenset[int](), options
        self.is_group, self.saved = isinstance(module, ModuleGroup), 0
        self.opens_early = self.closes_late = False
        self.told: Callable[[_Wrapped, bool, Any], None] = lambda *_: None
        self.owned = owned_params(module, Ignored(), f"the {type(module).__name__} unit")

    @classmethod
    def _around_group(cls, group: ModuleGroup, options: dict[str, Any]) -> dict[nn.Module, nn.Module]:
        unit = cls(group, **options)
        return {member: cls(member, unit) for member in members_of(group).values()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (unit,) = self.of
        unit.told(unit, True, (args, kwargs))
        output = self.inner[0](*args, **kwargs)
        unit.told(unit, False, None)
        return output


class _Tree:
    """A wrapped model on the meta device.

    Attributes:
        wrapped: the units, depth first.
        order: the indices of the units, in the order in which a forward begins them.
    """

    def __init__(
        self, model: nn.Module, policy: Any, precision: MixedPrecision, use_orig_params: bool, on_cpu: bool
    ) -> None:
        self.name, self.on_cpu = type(model).__name__, on_cpu
        self._use_orig_params = use_orig_params
        options: dict[str, Any] = {"mixed_precision": precision, "sharding_strategy": None}
        auto_wrap(model, policy, set(), set(), _Wrapped, options)
        self._root = _Wrapped(model, **options)
        self.wrapped: list[_Wrapped] = []
        self.order: list[int] = []
        self._visit(self._root, "", frozenset())
        self._settle(self.order)

    def _settle(self, begun: list[int]) -> None:
        """Set ``order``, in which the first run of a unit counts. A group is around the units that begin between its
        first and its last module."""
        self.order = list(dict.fromkeys(begun))
        for unit in (unit for unit in self.wrapped if unit.is_group):
            last = len(begun) - 1 - begun[::-1].index(unit.index)
            for index in {*begun[begun.index(unit.index) : last]} - {unit.index}:
                self.wrapped[index].around |= {unit.index}

    def _visit(self, wrapper: _Wrapped, name: str, around: frozenset[int]) -> None:
        (unit,) = wrapper.of
        behind = unit in self.wrapped  # a later module of a group
        if behind:
            unit.name += f", {name}"
        else:
            unit.name, unit.index, unit.around = name, len(self.wrapped), around
            self.wrapped.append(unit)
        self.order.append(unit.index)
        # a shared parameter's gradient arrives once, at the first place, which a backward reaches last
        trained = {item.sites[0].module for item in unit.owned if item.param.requires_grad}
        for path, module in _modules(wrapper.inner[0], name):
            if not isinstance(module, _Wrapped):
                unit.opens_early |= behind and module in trained
                unit.closes_late |= not behind and module in trained
                continue
            behind = True
            if module.of[0].is_group or module not in self.wrapped:
                self._visit(module, path, around | {unit.index})

    def try_forward(self, batch: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Run the model; record the order of the units and the bytes that autograd saves in each."""
        begun: list[int] = []
        running: list[_Wrapped] = []
        kept: dict[int, torch.Tensor] = {}  # by storage; held, so that the number is not reused

        def save(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in kept:
                kept[storage._cdata] = tensor
                running[-1].saved += storage.nbytes()

        def tell(unit: _Wrapped, begins: bool, arguments: Any) -> None:
            if not begins:
                running.pop()
                return
            begun.append(unit.index)
            running.append(unit)
            for value in tree_leaves(arguments):  # kept by a checkpoint inside the unit, past autograd
                if isinstance(value, torch.Tensor):
                    save(value)

        for unit in self.wrapped:
            unit.told = tell
            dtype = unit.options["mixed_precision"] and unit.options["mixed_precision"].param_dtype
            for item in unit.owned if dtype else ():
                cast = item.param.to(dtype) if item.param.is_floating_point() else item.param
                for site in item.sites:
                    setattr(site.module, site.attribute, nn.Parameter(cast, requires_grad=item.param.requires_grad))
        for param in self._root.parameters():
            kept[param.untyped_storage()._cdata] = param
        dtype = self._root.options["mixed_precision"].param_dtype
        if dtype is not None:
            both = batch, keywords
            batch, keywords = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, both)
        try:
            with on_saved(save), torch.enable_grad():
                self._root(*batch, **keywords)
        except Exception as error:
            raise ValueError(
                f"{self.name} does not run with this batch, on the meta device: {type(error).__name__}: {error}. Pass "
                "the arguments of its forward as inputs=(...), or no batch: activations are not counted then"
            ) from error
        self._settle(begun)

    def units(
        self, groups_of: Callable[[ShardingStrategy | None], Groups], resharded: bool | None
    ) -> list[PlannedUnit]:
        """Return the units. ``groups_of`` maps the strategy that a policy gave a unit, or None, to groups.
        ``resharded``: after forward; None: all units except the root."""
        units = []
        for unit in self.wrapped:
            groups = groups_of(unit.options["sharding_strategy"])
            precision = as_mixed_precision(unit.options["mixed_precision"])
            layouts = bucket_layouts(
                unit.owned, groups.shard_size, self.on_cpu, precision, use_orig_params=self._use_orig_params
            )
            buckets = tuple(PlannedBucket(layout, params[0].param.requires_grad) for layout, params in layouts)
            stays = unit.index == 0 if resharded is None else not resharded
            open_early = unit.opens_early and unit.closes_late
            units.append(PlannedUnit(unit.index, unit.around, groups, buckets, stays, open_early, unit.saved))
        return units


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and the modules inside, with paths in the plain model, down to nested units."""
    yield path, module
    for name, child in module.named_children():
        if isinstance(child, _Wrapped):
            yield joined(path, name), child
        else:
            yield from _modules(child, joined(path, name))


# -- plans -------------------------------------------------------------------------------------------------------------


class _Planner:
    """The plans of one model."""

    def __init__(self, tree: _Tree, optimizer: Optimizer | None, shard_size: int | None) -> None:
        self._tree, self._optimizer, self._shard_size = tree, optimizer, shard_size
        self._states: dict[torch.dtype, tuple[float, int]] = {}

    def plan(self, strategy: ShardingStrategy, world_size: int) -> StrategyPlan:
        """Return the plan of one strategy at a number of ranks."""
        groups = self._groups(strategy, world_size)
        resharded, _ = as_resharding(None, strategy)
        units = self._tree.units(lambda own: groups if own is None else self._groups(own, world_size), resharded)
        buckets = [bucket for unit in units for bucket in unit.buckets]
        params = sum(bucket.shard_nbytes for bucket in buckets)
        grads = sum(bucket.shard_nbytes for bucket in buckets if bucket.trained)
        optim = sum(self._state_nbytes(bucket) for bucket in buckets if bucket.trained)
        working, most = peaks(units, self._tree.order, self._tree.on_cpu)
        gathered, gather_count = gathers(units)
        reduced, reduction_count = reductions(units)
        return StrategyPlan(
            strategy=strategy,
            shard_size=groups.shard_size,
            replicas=groups.replica_size,
            param_nbytes=params,
            grad_nbytes=grads,
            optim_nbytes=optim,
            working_nbytes=working,
            activation_nbytes=sum(unit.activation_nbytes for unit in units),
            peak_nbytes=params + optim + max(most, grads),
            gathered_nbytes=gathered,
            reduced_nbytes=reduced,
            gathers=gather_count,
            reductions=reduction_count,
        )

    def smallest(self, strategy: ShardingStrategy, limit: int) -> int | None:
        """Return the smallest number of ranks that fits ``limit``, by bisection: more ranks hold less each."""
        unit = self._shard_size if strategy in HYBRID_SHARDING_STRATEGIES and self._shard_size else 1

        def fits(count: int) -> bool:
            return self.plan(strategy, count * unit).peak_nbytes <= limit

        if strategy is ShardingStrategy.NO_SHARD or unit > 1:  # more ranks, or replicas, hold as much
            return unit if fits(1) else None
        low, high = 0, 1
        while not fits(high):
            if high >= _LARGEST_WORLD or self.plan(strategy, high).working_nbytes > limit:
                return None
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _groups(self, strategy: ShardingStrategy, world_size: int) -> Groups:
        size = world_size
        if strategy is ShardingStrategy.NO_SHARD:
            size = 1
        elif strategy in HYBRID_SHARDING_STRATEGIES and self._shard_size is not None:
            size = self._shard_size
            if world_size % size:
                raise ValueError(f"world_size {world_size} is not a multiple of shard_size {size}")
        return Groups(None, 0, size, None, 0, world_size // size)

    def _state_nbytes(self, bucket: PlannedBucket) -> int:
        """Return the bytes of optimizer state for one shard: an amount per element and one per parameter."""
        if self._optimizer is None:
            return 0
        dtype = bucket.layout.dtype
        if dtype not in self._states:
            param = nn.Parameter(torch.zeros(_PROBED, dtype=dtype))
            param.grad = torch.zeros_like(param)
            made = self._optimizer([param])
            made.step()
            state = [value for value in made.state[param].values() if isinstance(value, torch.Tensor)]
            alike = sum(value.nbytes for value in state if value.numel() == _PROBED)
            self._states[dtype] = alike / _PROBED, sum(value.nbytes for value in state) - alike
        per_element, per_param = self._states[dtype]
        return math.ceil(per_element * bucket.layout.shard_numel) + per_param


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fsdp plan``."""
    parser.add_argument("model", help="module:name of a model, or of a function without arguments that makes it")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--memory", metavar="80GB", help="memory of a rank: find the smallest number of ranks that fits"
    )
    parser.add_argument("--wrap", metavar="CLASS,...", help="classes of modules that become units")
    parser.add_argument("--strategy", metavar="NAME,...", help="FULL_SHARD and so on; default: all")
    parser.add_argument("--precision", metavar="DTYPE", help="compute and reduce in bfloat16 or float16")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (default AdamW), or none")
    parser.add_argument("--batch-tokens", metavar="8x1024", help="count the activations of such a batch of token ids")
    parser.add_argument("--inputs", metavar="MODULE:NAME", help="function that returns the arguments of a forward")
    parser.add_argument("--shard-size", type=int, metavar="N", help="ranks per machine, for hybrid strategies")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu for gloo")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the plan. Return 0, or 2 with a message for wrong arguments."""
    try:
        found = _from_command(options)
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        print(f"fsdp plan: {error}", file=sys.stderr)
        return 2
    print(found.to_json() if options.json else found)
    return 0


def _from_command(options: argparse.Namespace) -> Plan:
    model = _on_meta(pkgutil.resolve_name(options.model))
    names = [] if options.strategy is None else options.strategy.upper().split(",")
    if unknown := set(names) - set(ShardingStrategy.__members__):
        raise ValueError(f"--strategy {min(unknown)} is none of {', '.join(ShardingStrategy.__members__)}")
    dtypes = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
    if options.precision is not None and options.precision not in dtypes:
        raise ValueError(f"--precision {options.precision} is none of {', '.join(dtypes)}")
    optimizer = None if options.optimizer == "none" else getattr(torch.optim, options.optimizer, None)
    if optimizer in (torch.optim.LBFGS, torch.optim.Optimizer) or (optimizer is None and options.optimizer != "none"):
        raise ValueError(f"--optimizer {options.optimizer} is no class of torch.optim that can be tried; or none")
    if options.memory is not None and as_nbytes(options.memory) < 1000:
        raise ValueError(f"--memory {options.memory} is less than 1 kB: write 80GB or 512MB")
    shape = None
    if options.batch_tokens is not None:
        if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", options.batch_tokens) is None:
            raise ValueError(f"--batch-tokens {options.batch_tokens} is no shape such as 8x1024")
        shape = [int(size) for size in options.batch_tokens.split("x")]
    return plan(
        model,
        world_size=options.world_size,
        policy=options.wrap and _policy(model, options.wrap.split(",")),
        strategy=[ShardingStrategy[name] for name in names] or None,
        precision=options.precision and MixedPrecision(param_dtype=dtypes[options.precision]),
        optimizer=optimizer,
        batch_tokens=shape[0] if shape and len(shape) == 1 else shape,
        inputs=options.inputs and pkgutil.resolve_name(options.inputs)(),
        shard_size=options.shard_size,
        device=options.device,
        memory=options.memory,
    )


def _policy(model: nn.Module, names: list[str]) -> ModuleWrapPolicy:
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    missing = sorted(set(names) - {each.__name__ for each in classes})
    if missing:
        there = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"the model has no {' and no '.join(missing)}; its modules are {', '.join(there)}")
    return ModuleWrapPolicy(classes)
