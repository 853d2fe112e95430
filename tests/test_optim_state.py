"""Optimizer state by parameter name: equal to torch's FSDP1, between any wrappings and plain optimizers.

Gradients are functions of the parameter's own elements. So states of every wrapping, of torch's FSDP1 and of the
plain model are bit-equal without a forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer

from fsdp import (
    FullStateDictConfig,
    OptimStateKeyType,
    RaggedOptimStateDictConfig,
    StateDictType,
    checkpoint,
)
from fsdp.checkpoint import set_optimizer_state_dict
from fsdp.checkpoint.ragged import RaggedTensor
from tests.harness.models import Net
from tests.harness.optim_states import (
    FSDP,
    adamw,
    assert_same,
    assert_same_states,
    block,
    build,
    cross_load,
    mixed_plain,
    ours,
    quiet,
    row_major,
    save,
    settle,
    settle_all,
    torchs,
    train,
)
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.states import full_state

# -- like torch --------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_state_dicts_equal_torchs(world_size: int) -> None:
    """Keys, values and types; full, on rank 0 only, and sharded. 3 ranks take strategies by turns."""
    for uop in (False, True):
        by_turns = ("FULL_SHARD", "NO_SHARD")[uop == dist.get_world_size() % 2 :][:1]
        for strategy in ("FULL_SHARD", "NO_SHARD") if dist.get_world_size() < 3 else by_turns:
            case = f"use_orig_params={uop}, {strategy}"
            model, torch_model = ours(uop, strategy, module=row_major()), torchs(uop, strategy, module=row_major())
            optimizer, torch_optimizer = train(adamw(model.parameters())), train(adamw(torch_model.parameters()))
            # torch's states share memory with each other on CPU if they are "offloaded" with use_orig_params=True
            actual = save(FSDP, model, optimizer, offload_to_cpu=uop)
            expected = save(TorchFSDP, torch_model, torch_optimizer, offload_to_cpu=False)
            assert_same(actual, expected, f"{case}, full")
            actual = save(FSDP, model, optimizer, rank0_only=True)
            assert_same(actual, expected if dist.get_rank() == 0 else {}, f"{case}, rank 0 only")
            assert_same(FSDP.full_optim_state_dict(model, optimizer), actual, f"{case}, full_optim_state_dict")
            if dist.get_world_size() > 1 or strategy == "FULL_SHARD":
                sharded = save(TorchFSDP, torch_model, torch_optimizer, "SHARDED_STATE_DICT", offload_to_cpu=False)
                assert_same(save(FSDP, model, optimizer, "SHARDED_STATE_DICT"), sharded, f"{case}, sharded")
                assert_same(FSDP.sharded_optim_state_dict(model, optimizer), sharded, f"{case}, sharded")
                cross_load(model, optimizer, torch_model, torch_optimizer, sharded, case)
            cross_load(model, optimizer, torch_model, torch_optimizer, expected, case)
            empty = adamw(model.parameters())
            assert_same(save(FSDP, model, empty)["state"], {}, "no state before the first step")


# -- other wrappings ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_state_converts_from_and_to_plain_optimizers() -> None:
    for uop in (False, True):
        model, plain = ours(uop), build()
        optimizer, plain_optimizer = train(adamw(model.parameters())), train(adamw(plain.parameters()))
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
        assert_same_states(ids, plain_optimizer.state_dict(), "to a plain optimizer")
        assert_same(
            FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain), ids, "positions in model.parameters()"
        )
        names = FSDP.rekey_optim_state_dict(
            plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=plain_optimizer
        )
        assert names["param_groups"][0]["params"] == sorted(full["param_groups"][0]["params"])
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, names)
        assert_same_states(loadable, optimizer.state_dict(), "from a plain optimizer")
        loadable = FSDP.shard_full_optim_state_dict(full, model)
        assert_same_states(loadable, optimizer.state_dict(), "without an optimizer: positions in model.parameters()")
        assert FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_NAME, plain) is full
        with pytest.raises(ValueError, match="Invalid parameter keys"):
            FSDP.rekey_optim_state_dict({"state": {0: {}, "a": {}}}, OptimStateKeyType.PARAM_ID, plain)
        if uop:
            reloaded = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model)
            names_now = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
            assert list(reloaded["state"]) == [names_now.index(name) for name in full["state"]]
        else:
            with pytest.raises(RuntimeError, match="whose parameters have one name each"):
                FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model)


@on_ranks(3)
def test_a_group_that_does_not_begin_with_rank_0(tmp_path: Path) -> None:
    """The group's own first rank saves and distributes the state; the remaining rank does not call."""
    group = dist.new_group([1, 2])
    for uop in (False, True) if dist.get_rank() > 0 else ():
        model = ours(uop, process_group=group)
        optimizer = train(adamw(model.parameters()))
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=True, group=group)
        assert bool(full) is (dist.get_rank() == 1)
        scattered = FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer, group=group)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer, group=group)
        directory, fresh = f"{tmp_path}/{uop}", adamw(model.parameters())
        expected = full_state(model)
        checkpoint.save(directory, model, optimizer, extra=dist.get_rank(), process_group=group)
        for param in model.parameters():
            param.detach().zero_()
        assert checkpoint.load(directory, model, fresh, process_group=group) == dist.get_rank()
        assert_bit_equal(full_state(model), expected)
        flattened = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
        for loadable in (scattered, flattened, fresh.state_dict()):
            assert_same_states(loadable, optimizer.state_dict(), f"use_orig_params={uop}")
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            state = model.state_dict()
            assert model.load_state_dict(state if dist.get_rank() == 1 else {}) == ([], [])
    dist.barrier()
    dist.destroy_process_group(group)


# -- parameter groups --------------------------------------------------------------------------------------------------


def groups_of(named: Iterable[tuple[str, nn.Parameter]], plain: bool) -> list[dict[str, Any]]:
    """Return two groups that interleave over the unit."""
    named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in named]
    trained = [(n, p) for n, p in named if p.requires_grad and n != "idle"]
    weights = [p for n, p in trained if n.endswith("weight")]
    rest = [p for n, p in trained if not n.endswith("weight")]
    return [{"params": weights, "lr": 0.1, "momentum": 0.9}, {"params": rest, "lr": 0.01, "weight_decay": 0.2}]


@on_ranks(1, 2, 3)
def test_groups_frozen_stateless_ignored_and_partial(world_size: int) -> None:
    """Existing states are saved, over buckets, groups and parameters that no unit owns."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = mixed_plain()
        model = ours(True, strategy, False, module=model, ignored_modules=[model.ignored])
        plain = mixed_plain()
        optimizer = train(SGD(groups_of(model.named_parameters(), False)))
        plain_optimizer = train(SGD(groups_of(plain.named_parameters(), True)))
        full = save(FSDP, model, optimizer)
        ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
        assert_same_states(ids, plain_optimizer.state_dict(), "as the plain optimizer has it")
        assert sorted(full["state"]) == ["down.weight", "ignored.weight", "up.weight"]  # no momentum, no state
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, full)
        assert_same_states(loadable, optimizer.state_dict(), "several groups")
        scattered = FSDP.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, optim=optimizer)
        assert_same_states(scattered, optimizer.state_dict(), "several groups, from rank 0")
        sharded = save(FSDP, model, optimizer, "SHARDED_STATE_DICT")
        loadable = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
        assert_same_states(loadable, optimizer.state_dict(), "several groups, sharded")
        dict(model.named_parameters())["_fsdp_wrapped_module.up.weight"].requires_grad_(
            False
        )  # frozen parameters keep their state
        assert_same(save(FSDP, model, optimizer), full, "frozen later")
        without = {"state": full["state"]}
        assert list(FSDP.optim_state_dict_to_load(model, optimizer, without)) == ["state"]
        optimizer.state["anything"] = {"of": "the user's"}
        more = save(FSDP, model, optimizer)
        assert more["state"].pop("anything") == {"of": "the user's"}
        assert_same(more, full, "with something of the user's")
        more["state"]["anything"] = {"of": "the user's"}
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, more)
        assert loadable["state"].pop("anything") == {"of": "the user's"}


@on_ranks(2)
def test_named_optimizers_and_optim_input() -> None:
    for uop in (False, True):
        model = ours(uop)
        optimizer = train(adamw(model.parameters()))
        full = save(FSDP, model, optimizer)
        names = [name for name, _ in model.named_parameters()]
        raw = optimizer.state_dict()
        named = {
            "state": {names[key]: value for key, value in raw["state"].items()},
            "param_groups": [
                {**group, "params": sorted(names[key] for key in group["params"])} for group in raw["param_groups"]
            ],
        }
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            reloaded = FSDP.optim_state_dict(model, optimizer, named)
        assert reloaded["state"].keys() == full["state"].keys()
        assert_same_states({**reloaded, "param_groups": None}, {**full, "param_groups": None}, "a named optimizer's")
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, full, is_named_optimizer=True)
        assert_same_states(loadable, named, "to a named optimizer")
        plain = build()
        some = {name: full["state"][name] for name in ("bias", "conv.weight")}
        by_id = {"state": dict(enumerate(some.values()))}
        for given in (list(model.parameters()), [{"params": list(model.parameters())}]):
            with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
                assert_same(FSDP.full_optim_state_dict(model, optimizer, given, rank0_only=False), full, "optim_input")
                loadable = FSDP.shard_full_optim_state_dict(full, model, given)
                assert_same_states(loadable, raw, "optim_input")
                loadable = FSDP.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, given)
                assert_same_states(loadable, raw, "optim_input, from rank 0")
                weights = [plain.bias, plain.conv.weight]
                ids = FSDP.rekey_optim_state_dict({"state": some}, OptimStateKeyType.PARAM_ID, plain, weights)
                assert_same(ids, by_id, "optim_input, by number")
        with pytest.warns(FutureWarning), pytest.raises(TypeError, match="optim_input should be an iterable"):
            FSDP.full_optim_state_dict(model, optimizer, 3)
        directly = adamw(model.parameters())
        FSDP.optim_state_dict_to_load(model, directly, full, load_directly=True)
        assert_same_states(directly.state_dict(), raw, "loaded directly")


# -- memory and devices ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_tensors_are_owned_and_compact() -> None:
    """No tensor aliases the optimizer, gathered memory or another state, and scalars are not shared."""
    for uop in (False, True):
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            model = ours(uop, strategy)
            optimizer = train(adamw(model.parameters()))
            for offload in (True, False):
                full = save(FSDP, model, optimizer, offload_to_cpu=offload)
                tensors = [value for state in full["state"].values() for value in state.values()]
                pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
                assert len(pointers) == len(tensors)
                assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
                sharded, before = save(FSDP, model, optimizer, "SHARDED_STATE_DICT"), copy.deepcopy(full)
                rows = {name: settle(values) for name, values in sharded["state"].items()}
                rows = settle_all(rows)
                full["param_groups"][0]["lr"] = 7.0
                assert optimizer.param_groups[0]["lr"] == 0.01
                train(optimizer, steps=1)
                full["param_groups"][0]["lr"] = 0.01
                assert_same(full, before, "training went on")
                assert_same(settle_all(sharded["state"]), rows, "training went on, sharded")
                loadable = FSDP.optim_state_dict_to_load(model, optimizer, full)
                for state in loadable["state"].values():
                    for value in state.values():
                        assert value.untyped_storage().data_ptr() not in pointers
                        assert value.untyped_storage().nbytes() == value.nbytes


# -- errors ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_invalid_states_are_refused_on_save_on_every_rank() -> None:
    """The error names the rank, the state and the parameter."""
    rank = dist.get_rank()
    for uop in (False, True):
        model = ours(uop)
        fresh = lambda model=model: train(adamw(model.parameters()))  # noqa: E731

        optimizer = fresh()
        if rank == 1:  # torch would list states that exist on rank 0 only
            optimizer.state.pop(next(param for param in model.parameters() if param.numel() > 0))
        with pytest.raises(RuntimeError, match=r"rank 1 is missing all states of '\w+"):
            save(FSDP, model, optimizer)

        optimizer = fresh()
        if rank == 1:
            for state in optimizer.state.values():
                state["step"] += 1
        with pytest.raises(AssertionError, match=r"state 'step' of .* is tensor\(3\.\) on rank 1 and tensor\(2\.\)"):
            save(FSDP, model, optimizer)

        optimizer = fresh()
        holder = next(param for param in model.parameters() if param.numel() > 0)
        if rank == 1:
            optimizer.state[holder]["row"] = torch.zeros(holder.numel() + 1)
        with pytest.raises(NotImplementedError, match=r"one element per element.*, but state 'row' of '\w+"):
            save(FSDP, model, optimizer, rank0_only=True)
        if rank == 1:
            optimizer.state[holder]["row"] = [torch.zeros(3)]
        with pytest.raises(NotImplementedError, match="is a list of tensors"):
            save(FSDP, model, optimizer)

        unrelated = adamw([nn.Parameter(torch.ones(3)), *model.parameters()])
        with pytest.raises(KeyError, match="that is not in the model"):
            save(FSDP, model, quiet(train, unrelated))
    with pytest.raises(ValueError, match="Linear has none"):
        FSDP.optim_state_dict(nn.Linear(1, 1), adamw(nn.Linear(1, 1).parameters()))
    both = nn.Sequential(ours(False), ours(True))
    with pytest.raises(AssertionError, match="one use_orig_params"):
        FSDP.full_optim_state_dict(both, adamw(both.parameters()))


def with_changes(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Replace states of `blocks.0.linear.bias`; `all=None` drops them."""
    result = {**saved, "state": {name: dict(state) for name, state in saved["state"].items()}}
    if changes == {"all": None}:
        del result["state"]["blocks.0.linear.bias"]
    else:
        result["state"]["blocks.0.linear.bias"].update(changes)
    return result


@on_ranks(2)
def test_mismatched_states_are_refused_on_every_rank_and_change_nothing() -> None:
    """All mismatches are named, whether every rank or rank 0 has the state."""
    for uop in (False, True):
        model = ours(uop)
        optimizer = train(adamw(model.parameters()))
        saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        name, state = "blocks.0.linear.bias", saved["state"]["blocks.0.linear.bias"]
        prefixed = {f"module.{key}" if "head" in key or "bias" in key else key: s for key, s in saved["state"].items()}
        cases: list[tuple[Any, type[Exception], str]] = [
            ({"param_groups": []}, ValueError, '"state"'),
            ({"state": {0: state}}, ValueError, "plain optimizer; turn it into names"),
            ({"state": prefixed}, ValueError, r"'module.bias' \(is it 'bias'\?\), .*'module.conv.bias'"),
            ({"state": {"_fsdp_wrapped_module.bias": {}}}, ValueError, r"is it 'bias'"),
            (with_changes(saved, exp_avg=torch.zeros(4)), ValueError, rf"'exp_avg' of '{name}' has shape \(4,\)"),
            (
                {"state": saved["state"], "param_groups": [{"params": ["bias", "nobody", "noone"]}]},
                KeyError,
                "no parameter 'nobody', 'noone'",
            ),
        ]
        if not uop:
            cases += [
                (with_changes(saved, all=None), ValueError, f"share 'step', which {name} lack"),
                (with_changes(saved, step=torch.tensor(5.0)), ValueError, "share 'step', but it is"),
                (with_changes(saved, more=1), ValueError, "need the same states"),
                (with_changes(saved, exp_avg=state["exp_avg"].double()), ValueError, "needs one dtype"),
            ]
        before = copy.deepcopy(optimizer.state_dict())
        for given, error, message in cases:
            with pytest.raises(error, match=message):
                FSDP.shard_full_optim_state_dict(given, model, optim=optimizer)
            with pytest.raises(error, match=message):
                FSDP.scatter_full_optim_state_dict(given if dist.get_rank() == 0 else None, model, optim=optimizer)
        assert_same(optimizer.state_dict(), before, "nothing was loaded")
        if uop:  # members are independent
            given = with_changes(saved, all=None) if dist.get_rank() == 1 else saved
            with pytest.raises(RuntimeError, match=f"rank 1: it differs from rank 0 in the state of '{name}'"):
                FSDP.optim_state_dict_to_load(model, optimizer, given)
            loadable = FSDP.optim_state_dict_to_load(model, optimizer, with_changes(saved, all=None))
            loading_ranks = {
                n.replace("_fsdp_wrapped_module.", ""): i for i, (n, _) in enumerate(model.named_parameters())
            }
            assert loading_ranks[name] not in loadable["state"]
        else:  # tensors of a member without state are zero
            momentum = {"state": {"tokens.weight": {"momentum_buffer": torch.ones(7, 5)}}}
            (only,) = FSDP.optim_state_dict_to_load(model, optimizer, momentum)["state"].values()
            (part,) = only.values()
            assert part.shape == next(model.parameters()).shape
            assert set(part.tolist()) <= {0.0, 1.0}
        extra = {"state": {**saved["state"], "of.another.model": {"x": 1}}}
        assert FSDP.optim_state_dict_to_load(model, optimizer, extra)["state"]["of.another.model"] == {"x": 1}


# -- parameters without state ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_without_saved_state_are_left_out() -> None:
    """Programs complete the result before `Optimizer.load_state_dict` checks it, as with torch's FSDP1."""
    for uop in (False, True):
        saved_model = ours(uop)
        saved = FSDP.full_optim_state_dict(saved_model, train(adamw(saved_model.parameters())), rank0_only=False)
        model = nn.ModuleDict({"saved": saved_model, "new": nn.Linear(2, 3)})
        saved["state"] = {f"saved.{name}": state for name, state in saved["state"].items()}
        for group in saved["param_groups"]:
            group["params"] = [f"saved.{name}" for name in group["params"]]
        optimizer = adamw(model.parameters())
        new = [len(optimizer.param_groups[0]["params"]) - number for number in (2, 1)]
        for loadable in (
            FSDP.optim_state_dict_to_load(model, optimizer, saved),
            FSDP.shard_full_optim_state_dict(saved, model, optim=optimizer),
            FSDP.scatter_full_optim_state_dict(saved if dist.get_rank() == 0 else None, model, optim=optimizer),
        ):
            (group,) = loadable["param_groups"]
            assert group["params"] == list(range(new[0])) and not {*loadable["state"]} & {*new}
            with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
                optimizer.load_state_dict(loadable)
            group["params"] += new
            optimizer.load_state_dict(loadable)
        apart = adamw(saved_model.parameters())
        apart.add_param_group({"params": [*model["new"].parameters()]})
        assert len(FSDP.optim_state_dict_to_load(model, apart, saved)["param_groups"]) == 1
        with pytest.raises(RuntimeError, match=r"the optimizer trains 'new.weight', .*which no parameter group"):
            set_optimizer_state_dict(model, optimizer, saved)


# -- other optimizers --------------------------------------------------------------------------------------------------


def with_scalar() -> Net:
    """Build a parameter without dimensions, one without elements, and a block."""
    temperature, nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(2)
        return Net(temperature=temperature, nothing=nothing, block=block(5, 3))


@on_ranks(1, 3)
def test_scalar_and_eager_states_and_parameters_without_elements(world_size: int) -> None:
    """Ranks without elements of a parameter have no state of it. Loaded states are plain tensors in every form.

    Each optimizer's state is loaded in each form, by turns of the modes and numbers of ranks.
    """
    makers: list[Callable[[Any], Optimizer]] = [
        lambda params: Adagrad(params, lr=0.1),  # makes state for parameters without elements, and never steps it
        lambda params: AdamW(params, lr=0.1, amsgrad=True),
        lambda params: NAdam(params, lr=0.1),  # a second scalar
        lambda params: SGD(params, lr=0.1),  # no state
    ]
    for number, make in enumerate(makers):
        plain = with_scalar()
        plain_optimizer = train(make(plain.parameters()))
        for uop in (False, True):
            model = ours(uop, module=with_scalar())
            optimizer = train(make(model.parameters()))
            full = save(FSDP, model, optimizer)
            ids = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
            expected = plain_optimizer.state_dict()
            for raw in (ids, expected):  # a parameter without elements has no gradient here
                raw["state"].pop(list(dict(plain.named_parameters())).index("nothing"), None)
            assert_same_states(ids, expected, f"{type(optimizer).__name__}, use_orig_params={uop}")
            sharded = save(FSDP, model, optimizer, "SHARDED_STATE_DICT")
            kind = RaggedOptimStateDictConfig(offload_to_cpu=True)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, None, kind):
                ragged = FSDP.optim_state_dict(model, optimizer)
            saved = (full, sharded, ragged)[(number + 2 * uop + world_size // 2) % 3]
            fresh = make(model.parameters())
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, saved))
            states = [value for of in fresh.state.values() for value in of.values()]
            assert not any(isinstance(value, RaggedTensor) for value in states)
            reloaded = save(FSDP, model, fresh)
            for states in (reloaded["state"], full["state"]):
                states.pop("nothing", None)
            assert_same(reloaded, full, f"{type(optimizer).__name__}, use_orig_params={uop}, loaded")
            train(fresh)
