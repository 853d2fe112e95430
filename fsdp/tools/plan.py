"""``fsdp.plan(model, world_size=...)``: what a training would take per rank, with every strategy, before anything runs.

No process group, no memory: the model is on the meta device, wrapped by the engine's own policy walk (``wrap.py``) and
laid out by its own arithmetic (``flat/ownership.py``, ``flat/layout.py``). What moves in a step, and what it holds
meanwhile, is gone through in ``step_memory.py``.
"""

from __future__ import annotations

import argparse
import copy
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from fsdp.tools.step_memory import Bucket, PlannedUnit, Step
from fsdp.tools.text import counted, in_bytes, table
from fsdp.wrap import ModuleWrapPolicy, auto_wrap

_LARGEST_WORLD = 1 << 16
_PROBED = 4096  # elements of the parameter that an optimizer is tried on
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class StrategyPlan:
    """What one rank would hold and receive with one strategy.

    Attributes:
        shard_size, replicas: the ranks that parameters are sharded over, and how many such groups there are.
        param_nbytes, grad_nbytes, optim_nbytes: of the shards, their gradients and the optimizer's state.
        working_nbytes: the most that gathered parameters, gradients that are not reduced yet, and what the pools keep
            for them take at a time; see [Note: The memory of a step] in ``step_memory.py``.
        activation_nbytes: what autograd saves in a forward; 0 where no batch was given.
        peak_nbytes: the most that all of these take at a time, in a step or between steps.
        gathered_nbytes, reduced_nbytes: received in a step.
        gathers, reductions: collectives in a step.
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


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` returns; ``str()`` is for people.

    Attributes:
        name: the model's class.
        numel: numbers in its parameters.
        units: the paths of the modules that would be units; "" is the root.
        world_size: the ranks.
        strategies: side by side.
        memory: in bytes, what a rank has; None where nobody said.
        smallest: for each strategy the smallest number of ranks at which ``peak_nbytes`` fits ``memory``, or None where
            none does.
    """

    name: str
    numel: int
    units: tuple[str, ...]
    world_size: int
    strategies: tuple[StrategyPlan, ...]
    memory: int | None = None
    smallest: dict[ShardingStrategy, int | None] = field(default_factory=dict)

    def __getitem__(self, strategy: ShardingStrategy) -> StrategyPlan:
        """The plan with that strategy. KeyError if it was not planned."""
        for each in self.strategies:
            if each.strategy is strategy:
                return each
        raise KeyError(strategy)

    def __str__(self) -> str:
        units, ranks = (counted(n, noun) for n, noun in ((len(self.units), "unit"), (self.world_size, "rank")))
        title = f"{self.name}: {self.numel:,} parameters in {units}, {ranks}"
        head = ["per rank", "parameters", "gradients", "optimizer", "working set", "activations", "peak"]
        head += ["received", "gathers", "reductions"]
        rows = []
        for each in self.strategies:
            held = [each.param_nbytes, each.grad_nbytes, each.optim_nbytes, each.working_nbytes]
            cells = [in_bytes(nbytes) for nbytes in (*held, each.activation_nbytes, each.peak_nbytes)]
            cells += [in_bytes(each.gathered_nbytes + each.reduced_nbytes), str(each.gathers), str(each.reductions)]
            rows.append([each.strategy.name, *cells])
        if self.memory is None:
            return "\n".join([title, table(head, rows)])
        for row, each in zip(rows, self.strategies):
            smallest = self.smallest[each.strategy]
            fits = "yes" if each.peak_nbytes <= self.memory else "no"
            row += [fits, "never" if smallest is None else str(smallest)]
        return "\n".join([title, table([*head, f"fits {in_bytes(self.memory)}", "from ranks"], rows)])


def plan(
    model: nn.Module | Callable[[], nn.Module],
    *,
    world_size: int,
    policy: Any = None,
    strategy: ShardingStrategy | Iterable[ShardingStrategy] | None = None,
    precision: MixedPrecision | None = None,
    optimizer: Optimizer | None = torch.optim.AdamW,
    batch_tokens: int | Sequence[int] | None = None,
    inputs: Sequence[Any] | torch.Tensor | None = None,
    use_orig_params: bool = False,
    shard_size: int | None = None,
    device: str | torch.device = "cuda",
    memory: int | str | None = None,
) -> Plan:
    """What each rank would hold, and receive in a step, if ``model`` were wrapped and trained so. Nothing is allocated,
    ``model`` stays as it is, and no process group is needed.

    The formulas are those of the engine: [Note: The memory of a step] in ``fsdp/tools/step_memory.py`` lists them. Not
    counted is what the modules' operations, the optimizer's step and the backend's collectives allocate for themselves
    for a while, what the allocator rounds up, and CUDA's context. Units prefetch one unit, as by default.

    Args:
        model: a plain model, on any device (copied to the meta device, without its values), or a function that makes
            one, which is called with the meta device as the default.
        world_size: the number of ranks.
        policy: what would be ``auto_wrap_policy``; it is asked about the modules of the copy.
        strategy: the strategies to compare; None: all of them, hybrid ones if ``shard_size`` is given.
        precision: what would be ``mixed_precision``.
        optimizer: its class, or a function of a list of parameters; tried on a small one. None: no optimizer.
        batch_tokens: to count activations, a rank's batch of token ids: a number of tokens, or the shape, such as
            ``(8, 1024)``. The model's forward is run with it, on the meta device.
        inputs: as ``batch_tokens``, for other models: the arguments of the forward, or the tensor that is the only one,
            of any device.
        use_orig_params: as in the wrapper; it changes the padding.
        shard_size: with hybrid strategies, the ranks that a replica is sharded over: those of a machine, usually.
        device: where it would train. On accelerators shards are aligned to 16 bytes; on ``"cpu"`` (gloo) reductions
            receive into memory of their own, as between hosts: through memory that ranks share they need none.
        memory: what a rank has, in bytes or as ``"80GB"``: has :attr:`Plan.smallest` looked for.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind; the model is wrapped already, or cannot be.
        NotImplementedError: it has ``DTensor`` parameters.
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
        tree.try_forward(batch)
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
    """``80GB``, ``80 GiB``, ``512MB`` or a number of bytes.

    Raises:
        ValueError: it is nothing of this kind.
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b?\s*", str(memory), re.IGNORECASE)
    if found is None:
        raise ValueError(f"memory must be a number of bytes, such as 80GB, 80GiB or 512MB, but got {memory!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


def _strategies(strategy: Any, shard_size: int | None) -> list[ShardingStrategy]:
    if strategy is None:
        return [s for s in ShardingStrategy if s not in HYBRID_SHARDING_STRATEGIES or shard_size is not None]
    several = list(strategy) if isinstance(strategy, Iterable) and not isinstance(strategy, str) else [strategy]
    chosen = [as_sharding_strategy(each) for each in several]
    if shard_size is None and any(each in HYBRID_SHARDING_STRATEGIES for each in chosen):
        raise ValueError("hybrid strategies need shard_size=, the number of ranks that a replica is sharded over")
    return chosen


def _batch(batch_tokens: Any, inputs: Any) -> tuple[Any, ...] | None:
    if batch_tokens is not None and inputs is not None:
        raise ValueError("batch_tokens and inputs are two ways to say the same: pass one of them")
    if inputs is not None:
        arguments = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        moved: tuple[Any, ...] = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), arguments)
        return moved
    if batch_tokens is None:
        return None
    shape = (1, batch_tokens) if isinstance(batch_tokens, int) else batch_tokens
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        raise TypeError(f"batch_tokens must be a number of tokens, or a shape such as (8, 1024), but got {shape!r}")
    return (torch.empty(shape, dtype=torch.int64, device="meta"),)


def _on_meta(model: Any) -> nn.Module:
    """A copy without values that may be changed."""
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


class _Wrapped(nn.Module):
    """Stands where a unit would be, and knows when it runs; of a group, where one of its modules is, beside ``unit``,
    which stands nowhere."""

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
    """A model on the meta device, wrapped.

    Attributes:
        wrapped: its units, depth first.
        order: in which they run: (unit, whether it begins).
    """

    def __init__(
        self, model: nn.Module, policy: Any, precision: MixedPrecision, use_orig_params: bool, on_cpu: bool
    ) -> None:
        self.name, self.on_cpu = type(model).__name__, on_cpu
        self._use_orig_params = use_orig_params
        self._params = set(model.parameters())
        options: dict[str, Any] = {"mixed_precision": precision, "sharding_strategy": None}
        auto_wrap(model, policy, set(), set(), _Wrapped, options)
        self._root = _Wrapped(model, **options)
        self.wrapped: list[_Wrapped] = []
        self.order: list[tuple[int, bool]] = []
        self._visit(self._root, "", frozenset())
        self._settle(self.order)

    def _settle(self, order: list[tuple[int, bool]]) -> None:
        """Of a unit that ran several times its first run counts, as it is gathered in between. A group runs from the
        first of its modules to the last, around what runs between them."""
        groups = [unit for unit in self.wrapped if unit.is_group]
        last = {
            (unit.index, False): max(i for i, event in enumerate(order) if event[0] == unit.index) for unit in groups
        }
        self.order = list(dict.fromkeys(event for i, event in enumerate(order) if last.get(event, i) == i))
        for unit in groups:
            begin, end = self.order.index((unit.index, True)), self.order.index((unit.index, False))
            for index in {index for index, begins in self.order[begin:end] if begins} - {unit.index}:
                self.wrapped[index].around |= {unit.index}

    def _visit(self, wrapper: _Wrapped, name: str, around: frozenset[int]) -> None:
        (unit,) = wrapper.of
        behind = unit in self.wrapped  # another module of the group, and what runs between them
        if behind:
            unit.name += f", {name}"
        else:
            unit.name, unit.index, unit.around = name, len(self.wrapped), around
            self.wrapped.append(unit)
        self.order.append((unit.index, True))
        # the gradient of what has several places comes once, with the first one's, which a backward reaches last
        trained = {item.places[0].module for item in unit.owned if item.param.requires_grad}
        for path, module in _modules(wrapper.inner[0], name):
            if not isinstance(module, _Wrapped):
                unit.opens_early |= behind and module in trained
                unit.closes_late |= not behind and module in trained
                continue
            behind = True
            if module.of[0].is_group or module not in self.wrapped:
                self._visit(module, path, around | {unit.index})
        self.order.append((unit.index, False))

    def try_forward(self, batch: tuple[Any, ...]) -> None:
        """Run the model, note in which order units run, and what autograd saves in each."""
        order: list[tuple[int, bool]] = []
        running: list[_Wrapped] = []
        kept: dict[int, torch.Tensor] = {}  # by storage; held, so that no other one gets its number

        def save(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in kept:
                kept[storage._cdata] = tensor
                running[-1].saved += storage.nbytes()

        def tell(unit: _Wrapped, begins: bool, arguments: Any) -> None:
            order.append((unit.index, begins))
            if not begins:
                running.pop()
                return
            running.append(unit)
            for value in tree_leaves(arguments):  # what a checkpoint around its inside keeps, past autograd
                if isinstance(value, torch.Tensor):
                    save(value)

        for unit in self.wrapped:
            unit.told = tell
            dtype = unit.options["mixed_precision"] and unit.options["mixed_precision"].param_dtype
            for item in unit.owned if dtype else ():
                cast = item.param.to(dtype) if item.param.is_floating_point() else item.param
                for place in item.places:
                    setattr(place.module, place.attribute, nn.Parameter(cast, requires_grad=item.param.requires_grad))
        for param in self._root.parameters():
            kept[param.untyped_storage()._cdata] = param
        dtype = self._root.options["mixed_precision"].param_dtype
        if dtype is not None:
            batch = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
        try:
            with on_saved(save), torch.enable_grad():
                self._root(*batch)
        except Exception as error:
            raise ValueError(
                f"{self.name} does not run with this batch, on the meta device: {type(error).__name__}: {error}. Pass "
                "the arguments of its forward as inputs=(...), or no batch: activations are not counted then"
            ) from error
        self._settle(order)

    def units(
        self, groups_of: Callable[[ShardingStrategy | None], Groups], resharded: bool | None
    ) -> list[PlannedUnit]:
        """Its units; ``groups_of`` the strategy that the policy gave them, if any; ``resharded`` after forward, None:
        all but the root."""
        units = []
        for unit in self.wrapped:
            groups = groups_of(unit.options["sharding_strategy"])
            buckets = tuple(self._buckets(unit, groups))
            stays = unit.index == 0 if resharded is None else not resharded
            place = unit.index, unit.around, groups, buckets, stays
            units.append(PlannedUnit(*place, unit.opens_early, unit.closes_late, unit.saved))
        return units

    def _buckets(self, unit: _Wrapped, groups: Groups) -> Iterator[Bucket]:
        precision = as_mixed_precision(unit.options["mixed_precision"])
        for layout, members in bucket_layouts(
            unit.owned, groups.shard_size, self.on_cpu, precision, use_orig_params=self._use_orig_params
        ):
            yield Bucket(layout, members[0].param.requires_grad)


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Of ``module`` and what is in it, with paths in the plain model, up to nested units."""
    yield path, module
    for name, child in module.named_children():
        if isinstance(child, _Wrapped):
            yield joined(path, name), child
        else:
            yield from _modules(child, joined(path, name))


class _Planner:
    def __init__(self, tree: _Tree, optimizer: Optimizer | None, shard_size: int | None) -> None:
        self._tree, self._optimizer, self._shard_size = tree, optimizer, shard_size
        self._states: dict[torch.dtype, tuple[float, int]] = {}

    def plan(self, strategy: ShardingStrategy, world_size: int) -> StrategyPlan:
        groups = self._groups(strategy, world_size)
        resharded, _ = as_resharding(None, strategy)
        units = self._tree.units(lambda own: groups if own is None else self._groups(own, world_size), resharded)
        buckets = [bucket for unit in units for bucket in unit.buckets]
        params = sum(bucket.shard_nbytes for bucket in buckets)
        grads = sum(bucket.shard_nbytes for bucket in buckets if bucket.trained)
        optim = sum(self._state_nbytes(bucket) for bucket in buckets if bucket.trained)
        step = Step(units, self._tree.order, on_cpu=self._tree.on_cpu)
        return StrategyPlan(
            strategy=strategy,
            shard_size=groups.shard_size,
            replicas=groups.replica_size,
            param_nbytes=params,
            grad_nbytes=grads,
            optim_nbytes=optim,
            working_nbytes=step.working,
            activation_nbytes=sum(unit.activation_nbytes for unit in units),
            peak_nbytes=params + optim + max(step.most, grads),
            gathered_nbytes=step.gathered,
            reduced_nbytes=step.reduced,
            gathers=step.gathers,
            reductions=step.reductions,
        )

    def smallest(self, strategy: ShardingStrategy, limit: int) -> int | None:
        """The smallest number of ranks that fits ``limit``: searched by halves, as more ranks hold less each."""
        unit = self._shard_size if strategy in HYBRID_SHARDING_STRATEGIES and self._shard_size else 1

        def fits(count: int) -> bool:
            return self.plan(strategy, count * unit).peak_nbytes <= limit

        if strategy is ShardingStrategy.NO_SHARD or unit > 1:  # more ranks, or replicas, change nothing
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

    def _state_nbytes(self, bucket: Bucket) -> int:
        """What the optimizer holds of a shard: so much per element, and per parameter."""
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


def main(arguments: list[str] | None = None) -> int:
    """``python -m fsdp.plan module:factory --world-size 8 --memory 80GB``: prints the plan."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp.plan", description="What a training would take per rank, with every strategy."
    )
    parser.add_argument("model", help="module:name of a function without arguments that makes the model, or of a model")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="the number of ranks")
    parser.add_argument("--memory", metavar="80GB", help="what a rank has: find the smallest number of ranks that fits")
    parser.add_argument("--wrap", metavar="CLASS,...", help="the classes of modules that become units")
    parser.add_argument("--strategy", metavar="NAME,...", help="FULL_SHARD and so on; all of them by default")
    parser.add_argument("--precision", metavar="DTYPE", help="compute and reduce in bfloat16 or float16")
    parser.add_argument("--optimizer", default="AdamW", help="a class in torch.optim (AdamW), or none")
    parser.add_argument("--batch-tokens", metavar="8x1024", help="count the activations of such a batch of token ids")
    parser.add_argument("--shard-size", type=int, metavar="N", help="ranks per machine, for hybrid strategies")
    parser.add_argument("--device", default="cuda", help="cuda (default), or cpu for gloo")
    options = parser.parse_args(arguments)
    try:
        model = _on_meta(pkgutil.resolve_name(options.model))
        tokens = options.batch_tokens and [int(size) for size in options.batch_tokens.split("x")]
        dtype = options.precision and getattr(
            torch, {"bf16": "bfloat16", "fp16": "float16"}.get(*[options.precision] * 2)
        )
        found = plan(
            model,
            world_size=options.world_size,
            policy=options.wrap and _policy(model, options.wrap.split(",")),
            strategy=options.strategy and [ShardingStrategy[name] for name in options.strategy.split(",")],
            precision=dtype and MixedPrecision(param_dtype=dtype),
            optimizer=None if options.optimizer == "none" else getattr(torch.optim, options.optimizer),
            batch_tokens=tokens[0] if tokens and len(tokens) == 1 else tokens,
            shard_size=options.shard_size,
            device=options.device,
            memory=options.memory,
        )
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, KeyError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    print(found)
    return 0


def _policy(model: nn.Module, names: list[str]) -> ModuleWrapPolicy:
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    missing = sorted(set(names) - {each.__name__ for each in classes})
    if missing:
        there = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"the model has no {' and no '.join(missing)}; its modules are {', '.join(there)}")
    return ModuleWrapPolicy(classes)
