"""Random models, wrappings and trainings; `random_programs` runs them.

`Plan.of(seed)` draws a model (blocks, pieces, units, checkpoints, and how values travel between blocks), the
wrapping, and the passes of a few optimizer steps. `str(plan)` describes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fsdp
from fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fsdp.wrap import CustomPolicy
from tests.harness.lockstep import REASSOCIATED

WIDTH, VOCABULARY = 5, 7
LOSSES = ("all", "all", "output", "sides")
PASSES = (
    "one",
    "forward forward backward backward",
    "two losses",
    "used twice",
    "retained",
    "no_sync",
    "gradients of inputs",
    "evaluation in between",
    "sides first",
    "several tensors",
    "forward without backward",
)
HOW_GIVEN = ("closure", "attribute")
KINDS = ("reentrant", "non-reentrant", "selective")


# -- pieces of a block -------------------------------------------------------------------------------------------------


class Box:
    """Values that modules and the program exchange without arguments: side outputs and a hidden input."""

    def __init__(self) -> None:
        self.sides: list[Tensor] = []
        self.state: Any = None


@dataclass
class Shared:
    """Values that all blocks receive, read and extend."""

    context: Tensor
    losses: list[Tensor] = field(default_factory=list, init=False)
    cache: dict[int, Tensor] = field(default_factory=dict)


def parts_of(shared: Any) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
    if isinstance(shared, Shared):
        return shared.context, shared.losses, shared.cache
    values = shared.values() if isinstance(shared, dict) else shared
    return tuple(values)  # type: ignore[return-value]


class Piece(nn.Module):
    """One computation with a few parameters. `number` is the position in the model.

    Inside a reentrant checkpoint (`detached`) it must reach outside graphs only through arguments.
    """

    def __init__(self, kind: str, box: Box, number: int, detached: bool) -> None:
        super().__init__()
        self.kind, self.box, self.number, self.detached = kind, box, number, detached
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind in ("frozen linear", "lora", "frozen weight", "dora"):
            self.linear.weight.requires_grad_(False)
        if kind in ("frozen linear", "lora"):
            assert self.linear.bias is not None
            self.linear.bias.requires_grad_(False)
        if kind in ("lora", "dora"):
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        if kind in ("norm", "frozen norm"):
            self.norm = nn.LayerNorm(WIDTH).requires_grad_(kind == "norm")
        if kind in ("norm", "frozen norm", "scale", "frozen scale"):
            del self.linear
        if kind in ("scale", "frozen scale"):
            self.scale = nn.Parameter(torch.randn(WIDTH)).requires_grad_(kind == "scale")
        if kind in ("computed weight", "dora", "detached weight"):
            self.gain = nn.Parameter(torch.randn(WIDTH))
        if kind == "tied":
            self.other = nn.Linear(WIDTH, WIDTH)
            self.other.weight = self.linear.weight
        if kind == "unused":
            self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, context: Tensor, shared: Any) -> Tensor:
        kind = self.kind
        if kind in ("norm", "frozen norm"):
            return self.norm(x)
        if kind in ("scale", "frozen scale"):
            return x * self.scale + x
        if kind == "lora":
            return x + torch.tanh(self.linear(x) + self.b(self.a(x)))
        if kind == "computed weight":
            return x + torch.tanh(F.linear(x, self.linear.weight * self.gain.softmax(0), self.linear.bias))
        if kind == "dora":
            weight = self.linear.weight + self.b.weight @ self.a.weight
            return x + torch.tanh(F.linear(x, self.gain * weight / weight.norm(dim=0).detach(), self.linear.bias))
        if kind == "detached weight":
            return torch.tanh(x @ self.linear.weight.detach()) * self.gain + self.linear(x.detach())
        if kind == "tied":
            return self.other(torch.tanh(self.linear(x)))
        if kind == "conditioned":
            return x + torch.tanh(self.linear(context)) * x
        if kind in ("collects", "caches", "shared context"):
            return self._with_shared(x, shared)
        if kind in ("side", "side only", "side detached"):
            return self._with_side(x)
        return x + torch.tanh(self.linear(x))  # linear, frozen linear, frozen weight, unused

    def _with_shared(self, x: Tensor, shared: Any) -> Tensor:
        context, losses, cache = parts_of(shared)
        y = self.linear(x)
        if self.kind == "collects":
            losses.append(fsdp.mark_side_output(y.square().mean()))  # the loss may use only these
            return x + torch.tanh(y)
        if self.kind == "shared context":
            return x + y * (context.detach() if self.detached else context)
        earlier = [cache[number] for number in sorted(cache) if number < self.number]
        cache[self.number] = y
        return x + torch.tanh(sum((key.detach() if self.detached else key for key in earlier), start=y))

    def _with_side(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.box.sides.append(fsdp.mark_side_output(torch.tanh(y)))
        if self.kind == "side only":
            return x
        return x + torch.tanh(y.detach() if self.kind == "side detached" else y)


PIECES = (
    *("linear", "linear", "norm", "frozen norm", "frozen linear", "frozen weight", "scale", "frozen scale"),
    *("lora", "lora", "dora", "computed weight", "detached weight", "tied", "unused", "conditioned"),
    *("collects", "caches", "caches", "shared context", "side", "side only", "side detached"),
)


@dataclass(frozen=True)
class BlockPlan:
    """Pieces and inner blocks; those from `segment[0]` to `segment[1]` (exclusive) run inside a checkpoint."""

    pieces: tuple[Any, ...]  # str or BlockPlan
    unit: bool
    taken: bool  # a hook stores the block's output as a side output
    segment: tuple[int, int, str] | None

    @staticmethod
    def of(draw: random.Random, depth: int = 0) -> BlockPlan:
        pieces = tuple(
            BlockPlan.of(draw, depth + 1) if depth < 2 and draw.random() < 0.2 else draw.choice(PIECES)
            for _ in range(draw.randint(1, 4))
        )
        segment = None
        if draw.random() < 0.3:
            start = draw.randrange(len(pieces))
            segment = (start, draw.randint(start + 1, len(pieces)), draw.choice(KINDS))
        return BlockPlan(pieces, draw.random() < 0.75, draw.random() < 0.1, segment)

    @property
    def kinds(self) -> set[str]:
        """Return kinds of the pieces and of inner checkpoints."""
        found = {self.segment[2]} if self.segment else set()
        for piece in self.pieces:
            found |= piece.kinds if isinstance(piece, BlockPlan) else {piece}
        return found

    def __str__(self) -> str:
        words = [str(piece) for piece in self.pieces]
        if self.segment is not None:
            start, stop, kind = self.segment
            words[start:stop] = [f"{kind}({', '.join(words[start:stop])})"]
        return f"{'unit' if self.unit else 'block'}{' whose output is taken' * self.taken}[{', '.join(words)}]"


def run_in(kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, checkpointed or not."""
    if kind == "none":
        return function(*args)
    if kind == "selective":

        def contexts() -> Any:
            return create_selective_checkpoint_contexts(_save_products)

        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return checkpoint(function, *args, use_reentrant=kind == "reentrant")


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self, plan: BlockPlan, box: Box, number: int, detached: bool) -> None:
        super().__init__()
        self.plan, self.box, self.is_unit = plan, box, plan.unit
        start, stop, kind = plan.segment or (0, 0, "none")
        self.parts = nn.ModuleList()
        for index, piece in enumerate(plan.pieces):
            inside = detached or (start <= index < stop and kind == "reentrant")
            make = Block if isinstance(piece, BlockPlan) else Piece
            self.parts.append(make(piece, box, 10 * number + index, inside))
        if plan.taken:
            self.register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:  # otherwise it may become the output of an outer reentrant checkpoint
            self.box.sides.append(output if self.is_unit else fsdp.mark_side_output(output))

    def forward(self, x: Any, context: Tensor, shared: Any) -> Tensor:
        x = self.box.state if x is None else x if isinstance(x, Tensor) else x()
        start, stop, kind = self.plan.segment or (0, 0, "none")
        x = self._run(0, start, x, context, shared)
        x = run_in(kind, self._run, start, stop, x, context, shared)
        return self._run(stop, len(self.parts), x, context, shared)

    def _run(self, start: int, stop: int, x: Tensor, context: Tensor, shared: Any) -> Tensor:
        for index in range(start, stop):
            x = self.parts[index](x, context, shared)
        return x


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A model, a wrapping and a training. See `of` for possible values of each field."""

    seed: str
    tokens: bool
    embedding: str
    blocks: tuple[BlockPlan, ...]
    around: tuple[str, ...]
    segment: tuple[int, int, str]
    how_given: tuple[str, ...]
    twice: int
    ignored: int
    container: str
    middle: str
    head: str
    returns: str
    separate_roots: bool
    strategy: ShardingStrategy
    orig: bool
    options: dict[str, Any]
    debug: bool
    optimizer: str
    steps: tuple[tuple[tuple[str, str], ...], ...]

    @staticmethod
    def of(seed: str) -> Plan:
        draw = random.Random(seed)
        count = draw.randint(2, 4)
        tokens = draw.random() < 0.6
        start = draw.randrange(count)
        segment = (start, draw.randint(start + 1, count), draw.choice((*KINDS, "none", "none", "none")))
        around = tuple(draw.choice(("none", "none", *KINDS)) for _ in range(count))
        if segment[2] != "none":  # rarely both
            around = tuple(kind if draw.random() < 0.2 else "none" for kind in around)
        embedding = draw.choice(("in the root", "a unit", "a frozen unit", "frozen in the root"))
        separate = draw.random() < 0.15
        tie = tokens and not separate and embedding == "in the root"
        return Plan(
            seed=seed,
            tokens=tokens,
            embedding=embedding,
            blocks=tuple(BlockPlan.of(draw) for _ in range(count)),
            around=around,
            segment=segment,
            how_given=tuple(draw.choice(("",) * 5 + HOW_GIVEN) for _ in range(count)),
            twice=draw.randrange(count) if draw.random() < 0.2 else -1,
            ignored=draw.randrange(count) if draw.random() < 0.2 else -1,
            container=draw.choice(("list", "dict", "dataclass")),
            middle=draw.choice(("", *PIECES)),
            head=draw.choice(("trainable", "trainable", "frozen", *(("tied",) if tie else ()))),
            returns=draw.choice(("tuple", "dict", "stored")),
            separate_roots=separate,
            strategy=draw.choice(
                (*(ShardingStrategy.FULL_SHARD,) * 3, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
            ),
            orig=draw.random() < 0.5,
            options={
                "limit_all_gathers": draw.random() < 0.7,
                "forward_prefetch": draw.random() < 0.3,
                "backward_prefetch": draw.choice((*(BackwardPrefetch.BACKWARD_PRE,) * 2, *BackwardPrefetch, None)),
            },
            debug=draw.random() < 0.3,
            optimizer=draw.choice(("sgd", "momentum", "momentum", "adamw")),
            steps=tuple(
                (*((draw.choice(PASSES), draw.choice(LOSSES)) for _ in range(draw.randint(0, 2))), ("one", "all"))
                for _ in range(draw.randint(2, 3))
            ),
        )

    def reentrant(self, index: int) -> bool:
        """Return whether block `index` runs inside a reentrant checkpoint."""
        start, stop, kind = self.segment
        return self.around[index] == "reentrant" or (kind == "reentrant" and start <= index < stop)

    def given(self, index: int) -> str:
        """Return how block `index` receives its input.

        A reentrant checkpoint would run through the graph of a hidden input twice, which the plain model refuses.
        """
        return "" if self.reentrant(index) else self.how_given[index]

    @property
    def ulps(self) -> float:
        """Return the tolerance of gradients in the first step: 0 if additions have the order of plain replicas.

        A reentrant checkpoint delivers gradients task by task, and a unit used in two tasks is reduced twice: (a +
        b) / N + (c + d) / N. An all-reduce of more than 2 ranks has an unknown order.
        """
        kinds = {self.segment[2], *self.around, *(kind for block in self.blocks for kind in block.kinds)}
        ring = self.strategy is ShardingStrategy.NO_SHARD and dist.get_world_size() > 2
        return REASSOCIATED if "reentrant" in kinds or ring else 0

    @property
    def ulps_after_step(self) -> float:
        """Return the tolerance after a step. SGD with factors of powers of two rounds alike for every layout."""
        return REASSOCIATED if self.optimizer == "adamw" else self.ulps

    def make_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(params, lr=0.01, weight_decay=0.0, eps=1e-3)
        return SGD(params, lr=0.125, momentum=0.5 if self.optimizer == "momentum" else 0.0)

    def __str__(self) -> str:
        blocks = []
        for index, block in enumerate(self.blocks):
            words = f"ignored {block}" if index == self.ignored else str(block)
            words = words if self.around[index] == "none" else f"{self.around[index]}({words})"
            words += f" given by {self.given(index)}" if self.given(index) else ""
            blocks.append(words + " twice" * (index == self.twice))
        start, stop, kind = self.segment
        if kind != "none":
            blocks[start:stop] = [f"{kind}({'; '.join(blocks[start:stop])})"]
        steps = " | ".join(", ".join(f"{kind} of {loss}" for kind, loss in step) for step in self.steps)
        lines = (
            f"{'token ids' if self.tokens else 'floats'}; embedding {self.embedding}; context in a {self.container}",
            *(f"  {block}" for block in blocks),
            f"middle: {self.middle or 'nothing'}; head: {self.head}; returns a value {self.returns}",
            f"{self.strategy.name}, use_orig_params={self.orig}, {self.options}"
            + ", separate roots" * self.separate_roots
            + ", FSDP_DEBUG=1" * self.debug,
            f"{self.optimizer}: {steps}",
        )
        return "\n".join(lines)


class Model(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.box = plan, Box()
        self.embedding: nn.Module = nn.Embedding(VOCABULARY, WIDTH) if plan.tokens else nn.Linear(WIDTH, WIDTH)
        self.embedding.requires_grad_("frozen" not in plan.embedding)
        self.embedding.is_unit = "unit" in plan.embedding
        self.context = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Block(block, self.box, index + 1, plan.reentrant(index)) for index, block in enumerate(plan.blocks)
        )
        self.middle = Piece(plan.middle, self.box, 99, False) if plan.middle else None
        self.head = nn.Linear(WIDTH, VOCABULARY if plan.head == "tied" else WIDTH).requires_grad_(plan.head != "frozen")
        if plan.head == "tied":
            self.head.weight = self.embedding.weight
        if plan.ignored >= 0:
            self.blocks[plan.ignored].requires_grad_(False)  # ignored parameters are not reduced
            for block in self.blocks[plan.ignored].modules():
                if isinstance(block, Block):
                    block.is_unit = False  # so stored outputs must be marked

    def forward(self, value: Tensor) -> Any:
        plan = self.plan
        x = self.embedding(value)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.requires_grad_()  # as adapters of frozen models do it
        context = self.context(x)
        shared: Any = Shared(context)
        if plan.container != "dataclass":
            parts = parts_of(shared)
            shared = list(parts) if plan.container == "list" else dict(zip("abc", parts))
        start, stop, kind = plan.segment
        x = self._run(0, start, x, context, shared)
        x = run_in(kind, self._run, start, stop, x, context, shared)
        x = self._run(stop, len(self.blocks), x, context, shared)
        if self.middle is not None:
            x = self.middle(x, context, shared)
        losses = parts_of(shared)[1]
        y = self.head(x)
        if plan.returns == "tuple":
            return y, losses
        if plan.returns == "dict":
            return {"y": y, "losses": losses}
        self.box.sides += [fsdp.mark_side_output(loss) for loss in losses]
        return y

    def _run(self, start: int, stop: int, x: Tensor, context: Tensor, shared: Any) -> Tensor:
        plan = self.plan
        for index in range(start, stop):
            for _ in range(1 + (index == plan.twice)):
                given: Any = x
                if plan.given(index):
                    self.box.state = x
                    given = (lambda x=x: x) if plan.given(index) == "closure" else None
                x = run_in(plan.around[index], self.blocks[index], given, context, shared)
        return x


def build(plan: Plan) -> Model:
    torch.manual_seed(3)
    return Model(plan).double()


def wrap(plan: Plan, model: Model) -> nn.Module:
    ignored = [model.blocks[plan.ignored]] if plan.ignored >= 0 else []
    inside = {module for block in ignored for module in block.modules()}

    def make(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=plan.strategy,
            use_orig_params=plan.orig,
            auto_wrap_policy=CustomPolicy(lambda m: getattr(m, "is_unit", False) is True and m not in inside),
            ignored_modules=ignored,
            **plan.options,
        )

    if not plan.separate_roots:
        return make(model)
    for name, child in list(model.named_children()):
        if name != "blocks":
            setattr(model, name, make(child))
    for index, block in enumerate(model.blocks):
        if index != plan.ignored:
            model.blocks[index] = make(block)
    return model
