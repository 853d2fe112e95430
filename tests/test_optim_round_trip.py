"""Optimizer state survives saving and loading bit for bit, for every optimizer and every form of state.

States are compared by parameter and loaded into optimizers with other orders of groups and parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from fsdp import FullStateDictConfig, FullyShardedDataParallel, OptimStateKeyType, ShardingStrategy, StateDictType
from fsdp.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from fsdp.checkpoint.torch_state_dict import StateDictOptions
from fsdp.optim import WholeParamOptimizer
from tests.harness.models import Net
from tests.harness.optim_states import train as step
from tests.harness.optim_states import transfer
from tests.harness.pool import of_all_ranks, on_ranks

FSDP = FullyShardedDataParallel
Make = Callable[[Any], Optimizer]


def plain_model(**more: nn.Module) -> Net:
    """Build parameters of 16 and 32 bits, without padding in a flat parameter on 2 ranks."""
    return Net(half=nn.Linear(3, 5, dtype=torch.bfloat16), full=nn.Linear(5, 2), **more)


def build(uop: bool, module: nn.Module | None = None) -> FSDP:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return FSDP(module or plain_model(), use_orig_params=uop)


class ManyKinds(Optimizer):
    """An optimizer with states of many dtypes and names, and one state that belongs to no parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.state["global"] = {"x": torch.ones(3, dtype=torch.float64), "n": 3, "deep": [torch.zeros(2), "text"]}
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            odd = torch.sin(7 * param.grad.double())
            odd.view(-1)[::3] = float("nan")
            odd.view(-1)[1::3] = -0.0
            self.state[param] = {
                "m.fast": odd.float(),
                "%2E": odd,
                0: (odd > 0).clone(),
                11: torch.full(param.shape, 3, dtype=torch.int8),
                "complex": torch.complex(odd, -odd),
                "scalar": torch.tensor(0.1, dtype=torch.float64),
                "count": torch.tensor(3),
                "number": 0.1,
                "nothing": None,
                "word": "abc",
                "words": ("a", 2),
            }


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {}],
    "Adam": [{"amsgrad": True}, {"foreach": True}],
    "AdamW": [{}, {"fused": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
}
NOT_ELEMENTWISE = {"SparseAdam", "LBFGS", "Muon"}  # need sparse gradients, a closure, matrices


def makers() -> Iterable[tuple[str, Make]]:
    """Yield every elementwise optimizer of torch."""
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
            for settings in SETTINGS.get(name, [{}]) if name not in NOT_ELEMENTWISE else ():
                yield f"{name} {settings}", lambda groups, kind=kind, settings=settings: kind(groups, **settings)
    yield "ManyKinds", ManyKinds


@on_ranks(2)
def test_states_are_cast_to_another_dtype_as_torch_casts_them(tmp_path: Path) -> None:
    """Float32 moments loaded for bfloat16 parameters become bfloat16, so the optimizer can step."""
    for uop in (False, True):
        trained, plain = build(uop, plain_model().float()), plain_model()
        optimizer = step(torch.optim.AdamW(trained.parameters(), foreach=uop))
        with FSDP.state_dict_type(trained, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            saved = FSDP.optim_state_dict(trained, optimizer)
        of_plain = torch.optim.AdamW(plain.parameters(), foreach=uop)
        ids = FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain, optim=of_plain)
        of_plain.load_state_dict(ids)
        for form in ("full", "save"):
            model = build(uop)
            fresh = torch.optim.AdamW(model.parameters(), foreach=uop)
            if form == "full":
                fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, saved))
            else:
                load(save(tmp_path, trained, optimizer, keep=1), model, fresh)
            loaded_state = FSDP.optim_state_dict(model, fresh)
            for number, (name, _) in enumerate(plain.named_parameters()):
                assert bits(dict(sorted(loaded_state["state"][name].items()))) == bits(
                    dict(sorted(of_plain.state[list(plain.parameters())[number]].items()))
                ), f"{name}, {form}, use_orig_params={uop}"
            step(fresh)


def groups_of(model: nn.Module, backwards: bool = False) -> list[dict[str, Any]]:
    """Return two parameter groups; `backwards` reverses the order of groups and of parameters."""
    params = list(model.parameters())
    groups = [{"params": params[:1], "lr": 0.125}, {"params": params[1:], "lr": 0.25}]
    return [{**group, "params": group["params"][::-1]} for group in groups[::-1]] if backwards else groups


def bits(value: Any) -> Any:
    """Return a value that is equal if and only if all bits are."""
    leaves, structure = tree_flatten(value)
    return str(structure), [
        (leaf.dtype, tuple(leaf.shape), bytes(leaf.detach().reshape(-1).view(torch.uint8).tolist()))
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]


def content(optimizer: Optimizer) -> dict[Any, Any]:
    """Return states and settings by parameter with elements on this rank, and states of no parameter."""
    found: dict[Any, Any] = {key: bits(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    for group in optimizer.param_groups:
        for param in (param for param in group["params"] if param.numel() > 0):
            states = {name: bits(value) for name, value in optimizer.state.get(param, {}).items()}
            found[param] = states, {key: value for key, value in group.items() if key != "params"}
    return found


@on_ranks(2)
def test_state_of_every_optimizer_survives_every_form_bit_for_bit(tmp_path: Path) -> None:
    """Dotted and integer names, states of no parameter, every dtype, groups in any order. Forms take turns."""
    assert set(vars(torch.optim)) >= NOT_ELEMENTWISE - {"Muon"}
    for uop in (False, True):
        model = build(uop)
        before = {name: value.clone() for name, value in model.named_parameters()}
        for number, (name, make) in enumerate(makers()):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Adafactor computes with the norms, shapes or products of whole")
                optimizer = step(make(groups_of(model)))
            expected = content(optimizer)
            forms = ("full", "sharded", "rank 0", "ragged", "save")
            for form in forms if name == "ManyKinds" else [forms[(number + 2 * uop) % 5]]:
                fresh = make(groups_of(model, backwards=True))
                transfer(form, model, optimizer, fresh, tmp_path)
                assert content(fresh) == expected, f"{name}, {form}, use_orig_params={uop}"
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(before[name])


# -- memory order ------------------------------------------------------------------------------------------------------


class Rotating(Optimizer):
    """An optimizer of matrices with column-major states, whose products round otherwise in another memory order."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state["q"] = torch.linalg.qr(param.grad @ param.grad.mT + torch.eye(len(param)))[0]
                state["mean"] = torch.zeros_like(param).mT.contiguous().mT
            state["mean"].mul_(0.9).add_(param.grad)
            param.sub_(state["q"] @ (state["q"].mT @ state["mean"]), alpha=0.01)


def matrices(kind: str) -> tuple[nn.Module, Optimizer]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(33, 33, bias=False), nn.Linear(33, 70, bias=False))
    if kind == "plain":
        return model, Rotating(model.parameters())
    strategy = ShardingStrategy.NO_SHARD if kind == "replicas" else ShardingStrategy.FULL_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(model, use_orig_params=True, sharding_strategy=strategy)
    if kind == "whole parameters":
        return model, WholeParamOptimizer(model, Rotating, select=lambda name, shape: True)
    return model, Rotating(model.parameters())


def step_once(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    model(torch.sin(torch.arange(5 * 33.0) * seed).view(5, 33)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(1, "plain"), (1, "one rank"), (2, "replicas"), (1, "whole parameters"), (2, "whole parameters")],
)
@on_ranks("world_size")
def test_states_keep_their_memory_order_so_that_the_next_step_is_that_of_the_run(
    world_size: int, kind: str, tmp_path: Path
) -> None:
    """Of the parameter's shape and of another, into new states and into present ones."""
    model, optimizer = matrices(kind)
    for seed in (1, 2):
        step_once(model, optimizer, seed)
    save(tmp_path, model, optimizer)
    states = [{k: v.stride() for k, v in state.items() if v.numel()} for state in optimizer.state.values()]
    step_once(model, optimizer, 3)
    for has_stepped, in_place in ((False, True), (True, True), (True, False)):
        other, fresh = matrices(kind)
        if has_stepped:
            step_once(other, fresh, 5)
        load(tmp_path, other, fresh, in_place=in_place)
        found = [{k: v.stride() for k, v in state.items() if v.numel()} for state in fresh.state.values()]
        assert found == states and all(stride[0] == 1 for state in states for stride in state.values())
        step_once(other, fresh, 3)
        for one, two in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, two)


# -- mismatched states ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_entries_missing_in_the_checkpoint_are_left_alone(tmp_path: Path) -> None:
    """States, settings and entries of no parameter in the loading optimizer."""
    for uop in (False, True):
        saved = build(uop)
        optimizer = step(torch.optim.SGD(saved.parameters(), lr=0.5, momentum=0.9))
        optimizer.state["global"] = {"x": 1}
        path = save(f"{tmp_path}/{uop}", saved, optimizer)
        # Layers that are missing in the checkpoint, in a shared bucket and in a separate one.
        wider = plain_model(new=nn.Linear(2, 4), newest=nn.Linear(2, 4, dtype=torch.float64))
        model = build(uop, wider)
        groups = [{"params": [p], "lr": 0.1 * (number + 1)} for number, p in enumerate(model.parameters())]
        present = step(torch.optim.SGD(groups, lr=0.1, momentum=0.5), 3)
        present.state["mine"] = 7
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            before = FSDP.optim_state_dict(model, present)["state"]
        with pytest.raises(RuntimeError, match=r"missing in the checkpoint: 'new.weight'"):
            load(path, model, present)
        load(path, model, present, strict=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            after = FSDP.optim_state_dict(model, present)
            expected = FSDP.optim_state_dict(saved, optimizer)["state"]
        expected |= {key: value for key, value in before.items() if key.startswith("new") or key == "mine"}
        assert bits(dict(sorted(after["state"].items()))) == bits(dict(sorted(expected.items())))
        rates = {name: group["lr"] for group in after["param_groups"] for name in group["params"]}
        assert (rates["half.weight"], rates["newest.weight"]) == (0.5, groups[-1 if not uop else -2]["lr"])


def gradients_of(model: nn.Module) -> Tensor:
    for param in model.parameters():
        param.grad = param.detach().clone()
    return torch.ones(())


@on_ranks(2)
def test_state_names_are_kept_or_refused_and_ordered_alike_on_all_ranks(tmp_path: Path) -> None:
    rank = dist.get_rank()
    for uop in (False, True):
        model = build(uop)
        optimizer = step(torch.optim.AdamW(model.parameters()))
        for key, error, message in (
            ("half.bias", KeyError, r"half.bias\W+belongs to no parameter, and has the name of one"),
            (None, TypeError, "'half.weight' has one called None"),
        ):
            if key is not None:
                optimizer.state[key] = {"x": 1}
            else:
                next(state for state in optimizer.state.values() if state)[None] = 1
            with pytest.raises(error, match=message):
                save(tmp_path, model, optimizer)
            optimizer.state.pop(key, None)
        optimizer = step(ManyKinds(model.parameters()))
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        for optimizers, options in ((optimizer, flat), ([optimizer, optimizer], None)):
            with pytest.raises(ValueError, match="'global', which belongs to no parameter"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                get_optimizer_state_dict(model, optimizers, options=options)
        del optimizer.state["global"]
        with pytest.raises(ValueError, match="names of states have to be strings, but one is 0"):
            get_optimizer_state_dict(model, optimizer, options=flat)
        # all ranks list states in one order, independent of the optimizer's order
        model = build(uop)
        params = list(model.parameters())
        backwards = step(torch.optim.AdamW(params[::-1] if rank else params))
        names = list(FSDP.sharded_optim_state_dict(model, backwards)["state"])
        assert of_all_ranks(names) == [names, names]


@on_ranks(2)
def test_states_that_are_lists_of_tensors_survive(tmp_path: Path) -> None:
    """Those of LBFGS, whose steps need whole parameters."""
    for uop in (False, True):
        model = FSDP(nn.Linear(4, 3), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=uop)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for _ in range(2):
            optimizer.step(lambda model=model: gradients_of(model))
        assert any(isinstance(value, list) for state in optimizer.state.values() for value in state.values())
        for form in ("full", "save"):
            fresh = torch.optim.LBFGS(model.parameters(), max_iter=3)
            transfer(form, model, optimizer, fresh, tmp_path)
            assert content(fresh) == content(optimizer), (form, uop)


@on_ranks(2)
def test_flat_parameters_without_elements_have_state() -> None:
    """Fused optimizers need momentum for all parameters or none."""
    for fused in (False, True):
        torch.manual_seed(0)
        linear, empty = nn.Linear(4, 3), nn.Parameter(torch.zeros(0, 4))
        net = Net(lambda m, x: m.linear(x) + m.empty.sum(), linear=linear, empty=empty)
        model = FSDP(net, use_orig_params=False, flat_param_key=lambda name, param: name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        fresh = get_optimizer_state_dict(model, optimizer)
        assert sorted(fresh["state"]) == ["empty", "linear.bias", "linear.weight"]
        set_optimizer_state_dict(model, optimizer, fresh)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert sorted(get_optimizer_state_dict(model, optimizer)["state"]) == sorted(fresh["state"])


# -- state of another rank ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_state_of_another_size_raises_at_the_first_step() -> None:
    """A rank's ``optimizer.state_dict()`` on all ranks, or a plain optimizer's, raises; one's own does not."""
    model = build(True)
    optimizer = step(torch.optim.AdamW(model.parameters()))
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(optimizer.state_dict())  # each rank's own
    step(fresh)
    given = [optimizer.state_dict()]
    dist.broadcast_object_list(given)
    for loaded_state in (fresh, torch.optim.AdamW(model.parameters())):  # with and without earlier steps
        loaded_state.load_state_dict(copy.deepcopy(given[0]))  # torch would share the memory
        if dist.get_rank() == 0:
            step(loaded_state, 1)
        else:
            words = (
                r"(?s)state 'exp_avg' of 'half\.weight' in .* has 11 elements, and this.*FSDP\.optim_state_dict\(model"
            )
            with pytest.raises(RuntimeError, match=words):
                step(loaded_state, 1)
    plain = step(torch.optim.AdamW(plain_model().parameters()))
    loaded_state.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match=r"state 'exp_avg' of 'half.weight' in .* has 15 elements"):
        step(loaded_state, 1)
