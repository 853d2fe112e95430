"""``WholeParamOptimizer``: run an unmodified optimizer on whole parameters of a sharded model.

[Note: The pipeline of a step]
Each selected parameter has one owner among the ranks that it is sharded over. A step goes unit by unit. The first
exchange of a unit moves shards of values and gradients to the owners, and the second moves the new values back::

    in flight   unit 0 in   unit 1 in   unit 0 out   unit 2 in   unit 1 out   unit 3 in
    computed                unit 0                   unit 1                   unit 2

While a unit is computed, the next one is in flight. A unit's memory is allocated after the unit before has left. So
owners hold the parameters of at most two units, besides the messages of one exchange. On an accelerator messages are
packed and sent on the gather stream, so that the computation on the current stream does not delay them.

[Note: Values of a group]
The inner optimizer's ``step()`` runs once per unit, each time with the gradients of that unit alone. An optimizer that
counts steps in a parameter group would count too many. So the values of the groups are restored before each further
run.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.checkpoint.optim_names import STANDS_FOR, Holder, Member, ModelParams
from fsdp.checkpoint.state_dict import held_param
from fsdp.comm.collectives import agree
from fsdp.comm.consensus import TrainingRanks
from fsdp.flat.flat_param import assign_grad
from fsdp.flat.full_copy import point_at
from fsdp.optim.ownership import WholeHolder, assign_owners
from fsdp.placement.boxes import Box, Placement
from fsdp.placement.redistribute import Channel, Item, redistribute
from fsdp.runtime import hooks
from fsdp.runtime.build import join
from fsdp.runtime.unit import Unit

Factory = Callable[[list[nn.Parameter]], Optimizer]
Select = Callable[[str, tuple[int, ...]], bool]


class _StandIn(nn.Parameter):
    """The class of the inner optimizer's parameters outside of its steps, when their gradients are elsewhere.

    Programs that scale or clip the gradients of ``param_groups`` would leave these out. In a step the class is
    ``nn.Parameter``, since optimizers choose kernels by the type.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        _, holder = getattr(self, STANDS_FOR)
        raise RuntimeError(
            f"the gradient of {holder} is not on the parameter in the groups of a WholeParamOptimizer, but on those of "
            "the model, sharded. Clip by clip_grad_norm_() of the outermost wrapped module, scale the loss by "
            "fsdp.optim.ShardedGradScaler instead of GradScaler, and reset gradients by the optimizer's zero_grad()"
        )

    grad = property(_refuse, _refuse)


@dataclass(eq=False)
class _Selected:
    """A selected parameter.

    Attributes:
        param: the inner optimizer's parameter, with the true shape. On the owner it has values and a gradient while the
            optimizer steps it. At any other time it shows zeros that take no memory.
        shards: the model's parameter: this rank's part of the selected one, or the flat parameter that contains it.
        member: names, and the place in the layout.
        owner: the rank of the shard group that steps it.
    """

    param: nn.Parameter
    shards: Holder
    member: Member
    owner: int
    zeros: torch.Tensor
    whole: list[torch.Tensor] = field(default_factory=list)  # on the owner, while it is there: values and gradient

    @property
    def unit(self) -> Unit:
        return self.shards.unit

    @property
    def is_mine(self) -> bool:
        return self.shards.rank == self.owner

    @property
    def has_part(self) -> bool:
        """Whether this rank's shard holds elements of it."""
        layout = self.shards.handle.layout
        return layout.piece(self.member.index, self.shards.rank).numel > 0

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.unit.gradients[self.unit.handles.index(self.shards.handle)].dtype

    def _placements(self) -> tuple[Placement, Placement]:
        """Return the placement of the shards, and that on the owner."""
        shape, ranks = self.member.shape, self.unit.groups.shard_size
        whole = Placement.whole(shape, ranks, only=self.owner)
        return held_param(self.shards.handle, self.member.index).placement(ranks) or whole, whole

    def _memory(self, dtype: torch.dtype) -> torch.Tensor:
        record = self.member.record
        return torch.empty_strided(record.shape, record.stride, dtype=dtype, device=self.zeros.device)

    def to_owner(self, *, gradient: bool) -> list[Item]:
        """Return the items that move the values, and the gradient, from the shards to new memory on the owner."""
        source, target = self._placements()
        values, grad = held_param(self.shards.handle, self.member.index).part, self.shards.param.grad
        stride, box = self.member.record.stride, Box.whole(self.member.shape)
        given = [(values.dtype, values.parts)]
        if gradient:
            parts = [] if grad is None else self.shards.held(self.member, grad).part.parts
            given.append((self.gradient_dtype, parts))
        items = []
        for dtype, parts in given:
            if self.is_mine:
                self.whole.append(self._memory(dtype))
            outputs = [(box, self.whole[-1])] if self.is_mine else []
            items.append(Item(dtype, stride, source, target, parts, outputs))
        return items

    def to_shards(self) -> list[Item]:
        """Return the items that move the values from the owner to the shards."""
        target, source = self._placements()
        values = held_param(self.shards.handle, self.member.index).part
        inputs = [(Box.whole(self.member.shape), self.whole[0])] if self.is_mine else []
        return [Item(values.dtype, self.member.record.stride, source, target, inputs, values.parts)]

    def show(self) -> None:
        """Give the inner optimizer's parameter the values and the gradient, on the owner."""
        if self.is_mine:
            point_at([self.param], self.whole[:1])
            assign_grad(self.param, self.whole[1] if len(self.whole) > 1 else None)

    def hide(self) -> None:
        """Take the values from the inner optimizer's parameter, whose memory may have been replaced."""
        if self.is_mine:
            self.whole = [self.param.detach()]
        self.param.grad = None
        point_at([self.param], [self.zeros])


class WholeParamOptimizer(Optimizer):
    """An optimizer of whole parameters, such as Muon, for a sharded model.

    Each selected parameter is stepped by one rank, with its true shape, value and gradient, by the unmodified optimizer
    that ``factory`` makes. The state has true shapes. Parameters that are not selected are stepped on the shards::

        optimizer = fsdp.optim.WholeParamOptimizer(
            model,
            lambda params: torch.optim.Muon(params, lr=0.02),
            select=lambda name, shape: len(shape) == 2 and "embed" not in name,
            rest=lambda params: torch.optim.AdamW(params, lr=3e-4),
        )

    The inner optimizer must step each parameter by itself: its results must not depend on the gradients of any
    other parameter. A step moves 3 P (N - 1) / N elements over N ranks together, for P selected elements: values and
    gradients to the owners, and values back. It computes each parameter once. Owners hold the parameters of at most
    two units, besides their optimizer state. Replicas of hybrid sharding each step all of their parameters.

    ``param_groups`` are the inner optimizers' own dictionaries, so that schedulers change them. Whole parameters have
    no ``.grad`` there, and reading it is an error: clip by the model's ``clip_grad_norm_()``, and scale the loss by
    :class:`ShardedGradScaler`.

    ``state_dict()`` has this rank's state alone, as for any optimizer of a sharded model. ``FSDP.optim_state_dict`` and
    ``fsdp.checkpoint`` have the state of whole parameters under their names, and load it at any number of ranks, into a
    plain model's optimizer, and back.

    Args:
        model: a wrapped model, or a module with wrapped modules in it. All ranks have to construct the optimizer.
        factory: makes the inner optimizer for a list of parameters, which have their true shapes, and on their owner
            their values, while it runs. The order is that of ``model.named_parameters()``.
        select: whether the parameter of this name (in the plain model) and shape is stepped whole.
        rest: makes the optimizer of the other parameters, on the shards. None: all of them must be frozen.

    Raises:
        TypeError: an argument cannot be called, or a factory returns no optimizer.
        ValueError: nothing is selected; parameters are left over and there is no ``rest``; a flat parameter
            (``use_orig_params=False``) has selected and unselected parameters; or an optimizer does not hold exactly
            the parameters that the factory was given.
        NotImplementedError: a selected parameter is placed by tensor parallelism; or the optimizer is LBFGS.
        RuntimeError: another rank selects different parameters, or the constructor failed there.
    """

    def __init__(self, model: nn.Module, factory: Factory, *, select: Select, rest: Factory | None = None) -> None:
        for name, function in (("factory", factory), ("select", select), ("rest", rest)):
            if not callable(function) and (name != "rest" or function is not None):
                raise TypeError(f"{name} must be callable, got {type(function).__name__}")
        params = ModelParams(model)
        if not params.units:
            raise ValueError(
                f"expected a model with FullyShardedDataParallel modules in it, but {type(model).__name__} has none: "
                "use the optimizer itself"
            )
        self._model = model  # whose deletion would end the units
        self._units = list(params.units)
        self._selected: list[_Selected] = []

        def divide() -> list[nn.Parameter]:
            self._selected, others = _divide(params, select, has_rest=rest is not None)
            return others

        def make() -> tuple[Optimizer, Optimizer | None]:
            whole = made_by(factory, [each.param for each in self._selected], "factory")
            return whole, None if rest is None or not others else made_by(rest, others, "rest")

        with self._calling("WholeParamOptimizer()"):
            ranks = TrainingRanks([*map(_group_of, self._units)], params.device)
            others = ranks.together("select whole parameters", divide, lambda _: self._described())
            with _values_shown(self):
                self._whole, self._rest = ranks.together("construct a WholeParamOptimizer", make)
        for each in self._selected:
            if not each.is_mine:
                self._whole.state.pop(each.param, None)  # some optimizers make state in their constructors
        hooks.steps_no_shards(self._whole)
        self.inner_optimizers = [inner for inner in (self._whole, self._rest) if inner is not None]
        common = set.intersection(*(set(inner.defaults) for inner in self.inner_optimizers))
        self.defaults = {name: value for name, value in self._whole.defaults.items() if name in common}
        super().__setstate__({})  # instead of super().__init__(): groups and state are the inner optimizers' own

    # -- as torch's optimizers -----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizers, those of whole parameters first."""
        return [group for inner in self.inner_optimizers for group in inner.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The states that this rank has, by parameter of the groups."""
        return _States(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the parameters are divided once, by the constructor."""
        raise RuntimeError("add_param_group() of a WholeParamOptimizer: make the groups in `factory` and `rest`")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state and groups, as ``load_state_dict`` of the base class passes them."""
        start = 0
        for inner in self.inner_optimizers:
            end = start + len(inner.param_groups)
            groups = state["param_groups"][start:end]
            inner.__setstate__({"state": defaultdict(dict), "param_groups": groups})
            start = end
        for key, value in state["state"].items():
            self.state[key] = value
        for inner in self.inner_optimizers:  # upgrade the state that an older version of the class has saved
            inner.__setstate__({"state": inner.state})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters of the model that the inner optimizers step."""
        for param in self.stepped_params():
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.detach_().zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients. All ranks have to call.

        Returns:
            the result of ``closure``, which is called first, with gradients enabled.

        Raises:
            RuntimeError: gradients are not reduced yet; or a parameter has a gradient on some ranks only; or other
                ranks do not call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for unit in self._units:
            unit.before_step()
            unit.check_gradients("WholeParamOptimizer.step()")
        with self._calling("WholeParamOptimizer.step()"), self._hidden_afterwards():
            groups = _Groups(self._whole)
            for group, by_unit in self._by_group().items():
                self._step_of(group, by_unit, groups)
            if not groups.stepped:  # as without gradients
                groups.step()
        if self._rest is not None:
            self._rest.step()
        return loss

    # -- for the rest of the package -----------------------------------------------------------------------------------

    def stepped_params(self) -> Iterator[nn.Parameter]:
        """The model's parameters whose gradients a step reads; flat ones with ``use_orig_params=False``."""
        yield from dict.fromkeys(each.shards.param for each in self._selected)
        for group in [] if self._rest is None else self._rest.param_groups:
            yield from group["params"]

    def optimizer_of(self, param: Any) -> Optimizer:
        """Return the inner optimizer that holds ``param``; the one of whole parameters if no optimizer does."""
        of_rest = self._rest is not None and any(
            param is one for group in self._rest.param_groups for one in group["params"]
        )
        return self._rest if of_rest and self._rest is not None else self._whole

    # -- a step --------------------------------------------------------------------------------------------------------

    def _by_group(self) -> dict[Any, dict[Unit, list[_Selected]]]:
        """The selected parameters by shard group and unit, in the order of the units; None is this rank alone."""
        found: dict[Any, dict[Unit, list[_Selected]]] = {}
        for unit in self._units:
            if several := [each for each in self._selected if each.unit is unit]:
                found.setdefault(_group_of(unit), {})[unit] = several
        return found

    def _step_of(self, group: Any, by_unit: dict[Unit, list[_Selected]], groups: _Groups) -> None:
        """Step the parameters that are sharded over ``group``; see [Note: The pipeline of a step]."""
        device = next(iter(by_unit)).device
        channel = Channel(group, device)
        having = _with_gradients([each for several in by_unit.values() for each in several], group, device)
        rounds = [[each for each in several if each in having] for several in by_unit.values()]
        rounds = [several for several in rounds if several]
        if rounds:
            _start([item for each in rounds[0] for item in each.to_owner(gradient=True)], channel)
            channel.flush()
        for current, following in zip_longest(rounds, rounds[1:], fillvalue=()):
            _start([item for each in following for item in each.to_owner(gradient=True)], channel)
            for each in current:
                each.show()
            groups.step()
            for each in current:
                each.hide()
            channel.flush()
            _start([item for each in current for item in each.to_shards()], channel)
            channel.flush()
            _drop(current)

    @contextlib.contextmanager
    def _hidden_afterwards(self) -> Iterator[None]:
        """Hide the selected parameters' values at the end, and drop their memory, also after an exception."""
        for each in self._selected:
            each.param.__class__ = nn.Parameter
        try:
            yield
        finally:
            for each in self._selected:
                each.hide()
                each.param.__class__ = _StandIn
            _drop(self._selected)

    @contextlib.contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """Inside, ``call``, which all ranks have to make."""
        with contextlib.ExitStack() as calls:
            for context in dict.fromkeys(map(join, self._units)):
                calls.enter_context(context.calling(call, often=True))
            for unit in self._units:
                unit.announce(replicas=False)
            yield

    def _described(self) -> dict[Any, list[str]]:
        """Describe the selected parameters for the ranks of each group, which have to select the same."""
        return {
            group: [f"{each.member.name} {each.member.shape}" for each in chain(*by_unit.values())]
            for group, by_unit in self._by_group().items()
        }


def _group_of(unit: Unit) -> Any:
    return unit.groups.shard if unit.groups.sharded else None


def _drop(several: Iterable[_Selected]) -> None:
    for each in several:
        each.whole.clear()


def _start(items: Sequence[Item], channel: Channel) -> None:
    """Start to move ``items`` in one exchange."""
    redistribute(items, channel, "WholeParamOptimizer", limit=1 << 62)


def _with_gradients(several: Sequence[_Selected], group: Any, device: torch.device) -> set[_Selected]:
    """Return the parameters that have gradients on the ranks that hold elements of them.

    Raises:
        RuntimeError: on all ranks, if one has a gradient on some of these ranks only.
    """
    has = [each.has_part and each.shards.param.grad is not None for each in several]
    lacks = [each.has_part and each.shards.param.grad is None for each in several]
    flags = torch.tensor([has, lacks], dtype=torch.uint8, device="cpu")
    if group is not None:
        agree(flags, group, device, "agree on the gradients of whole parameters")
    has, lacks = flags.bool().tolist()
    torn = [repr(each.member.name) for each, one, other in zip(several, has, lacks) if one and other]
    if torn:
        raise RuntimeError(
            f"WholeParamOptimizer.step(): {', '.join(torn)} has a gradient on some ranks, and none on others that hold "
            "a part of it. Set .grad to None on all ranks or on none"
        )
    return {each for each, one in zip(several, has) if one}


@contextlib.contextmanager
def _values_shown(optimizer: WholeParamOptimizer) -> Iterator[None]:
    """Inside, the selected parameters have their values on their owners; changes are dropped."""
    for group, by_unit in optimizer._by_group().items():
        channel = Channel(group, next(iter(by_unit)).device)
        for several in by_unit.values():
            _start([item for each in several for item in each.to_owner(gradient=False)], channel)
        channel.flush()
    with optimizer._hidden_afterwards():
        for each in optimizer._selected:
            each.show()
        yield


class _Groups:
    """The groups of an optimizer during one step of ours, in which it steps several times; see [Note: Values of a
    group]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.stepped = optimizer, False
        self._before = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]

    def step(self) -> None:
        """Step the optimizer, with the values that the groups had at first."""
        if self.stepped:
            for group, before in zip(self._optimizer.param_groups, self._before):
                for key in [key for key in group if key not in before]:
                    del group[key]
                for key, value in before.items():
                    if isinstance(value, torch.Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
        self.stepped = True
        self._optimizer.step()


class _States(MutableMapping[Any, Any]):
    """The states of the inner optimizers of a ``WholeParamOptimizer``, as one mapping."""

    def __init__(self, optimizer: WholeParamOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, key: Any) -> Any:
        state = self._optimizer.optimizer_of(key).state
        if key not in state:
            raise KeyError(key)
        return state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._optimizer.optimizer_of(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._optimizer.optimizer_of(key).state[key]

    def __iter__(self) -> Iterator[Any]:
        return (key for inner in self._optimizer.inner_optimizers for key in inner.state)

    def __len__(self) -> int:
        return sum(len(inner.state) for inner in self._optimizer.inner_optimizers)


# -- construction ------------------------------------------------------------------------------------------------------


def _divide(params: ModelParams, select: Select, *, has_rest: bool) -> tuple[list[_Selected], list[nn.Parameter]]:
    """Divide the model's parameters into the selected ones, and the visible ones of the rest."""
    chosen: list[tuple[Holder, Member]] = []
    others: list[nn.Parameter] = []
    for param in params.in_order:
        holder = params.holders.get(param)
        if holder is None:  # no unit owns it
            others.append(param)
            continue
        own = [member for member in holder.members if select(member.name, member.shape)]
        chosen += [(holder, member) for member in own]
        if not own:
            others.append(param)
        elif len(own) < len(holder.members):
            left = next(member for member in holder.members if member not in own)
            raise ValueError(
                f"{own[0].name!r} is selected and {left.name!r} is not, and both lie in one flat parameter of "
                f"{holder.unit.name}. Wrap with flat_param_key=lambda name, param: ..., a label that differs for the "
                "two, or with use_orig_params=True"
            )
    names = [member.name for holder in params.holders.values() for member in holder.members]
    if not chosen:
        raise ValueError(f"select() is true for none of the {len(names)} parameters, among them {names[:3]}")
    for holder, member in chosen:
        if holder.handle.tp[member.index] is not None:
            raise NotImplementedError(
                f"{member.name!r} is selected, and is placed by tensor parallelism: no rank of its shard group has all "
                "of it. Leave it to `rest`"
            )
    left_over = [param for param in others if param.requires_grad]
    if left_over and not has_rest:
        raise ValueError(
            f"select() leaves out {', '.join(repr(name) for param in left_over for name in params.names(param))}, and "
            "there is no rest=: pass one, or freeze these parameters"
        )
    owners: dict[Member, int] = {}
    for group in dict.fromkeys(holder.unit.groups.shard for holder, _ in chosen):
        of_group = [(holder, member) for holder, member in chosen if holder.unit.groups.shard is group]
        ranks = of_group[0][0].unit.groups.shard_size
        shared = assign_owners([member.shape for _, member in of_group], ranks)
        owners.update(zip((member for _, member in of_group), shared))
    return [_selected(holder, member, owners[member]) for holder, member in chosen], others


def _selected(holder: Holder, member: Member, owner: int) -> _Selected:
    shard = holder.handle.shard
    zeros = torch.zeros((), dtype=shard.dtype, device=shard.device).expand(member.shape)
    param = nn.Parameter(zeros, requires_grad=holder.param.requires_grad)
    of_param = param, (member,), holder.unit, holder.handle, False
    stands_for = WholeHolder(*of_param, owner=owner) if holder.sharded else Holder(*of_param)
    setattr(param, STANDS_FOR, (holder.param, stands_for))
    return _Selected(param, holder, member, owner, zeros)


def made_by(factory: Factory, params: list[nn.Parameter], name: str) -> Optimizer:
    """Return the optimizer that ``factory`` makes of ``params``."""
    made = factory(list(params))
    if not isinstance(made, Optimizer):
        raise TypeError(f"{name} must return a torch.optim.Optimizer, got {type(made).__name__}")
    if isinstance(made, torch.optim.LBFGS):
        raise NotImplementedError("LBFGS steps all parameters as one vector, and cannot be given one unit at a time")
    held = [param for group in made.param_groups for param in group["params"]]
    if {id(param) for param in held} != {id(param) for param in params} or len(held) != len(params):
        raise ValueError(
            f"{name} was given {len(params)} parameters, and its {type(made).__name__} holds {len(held)}: it must hold "
            "exactly the parameters that it was given, each once"
        )
    return made
