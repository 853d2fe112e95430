"""Model state: the entries of each kind of state dict, and where each kind can be loaded."""

from __future__ import annotations

import contextlib
import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
)
from fsdp.checkpoint import get_model_state_dict, set_model_state_dict
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import wrap
from tests.harness.small import StandIn, torchs
from tests.harness.states import FULL, KINDS, LOCAL, SHARDED, Rich, Tied, full_state, kind_of, rich, swapping
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

MODES = [(strategy, mode) for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD) for mode in (False, True)]


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "modes"), [(1, MODES[::3]), (2, MODES), (3, MODES[:1]), (4, MODES[1:2])])
@on_ranks("world_size")
def test_every_kind_of_state_has_the_plain_models_entries_and_loads(
    world_size: int, modes: list[tuple[ShardingStrategy, bool]]
) -> None:
    """Names, order, values and versions are the plain model's, in both modes."""
    plain, noise = Rich().state_dict(), Rich(1).state_dict()
    for strategy, mode in modes:
        model, other = rich(mode, strategy), rich(mode, strategy)
        objects = [id(param) for param in other.parameters()]
        for kind in KINDS:
            what = f"{kind}, {strategy}, use_orig_params={mode}"
            other.load_state_dict(noise)
            with kind_of(model, kind), kind_of(other, kind):
                state = model.state_dict()
                assert other.load_state_dict(state) == ([], []), what
            got = full_state(other)
            assert list(got) == list(plain), what
            assert_bit_equal(got, plain, what)
            assert got._metadata == plain._metadata, what
            if kind != "local" or strategy is NO_SHARD or dist.get_world_size() == 1:
                assert list(state) == list(plain), what
        assert [id(param) for param in other.parameters()] == objects
        assert got["image"].stride() == plain["image"].stride()


# -- torch's FSDP1, plain modules and DDP ------------------------------------------------------------------------------


def torch_fsdp_of(module: nn.Module, mode: bool, strategy: ShardingStrategy = FULL_SHARD) -> Any:
    options: dict[str, Any] = {"ignored_modules": [module.ignored]} if hasattr(module, "ignored") else {}
    return torchs(module, strategy.name, {Tied}, use_orig_params=mode, **options)


def make_plainer(seed: int = 0) -> Rich:
    """Leave out what torch refuses: frozen beside trained parameters, and transposed sharded tensors."""
    module = Rich(seed)
    del module.frozen, module.image
    return module


def assert_same_entries(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    # torch registers shared parameters last when it unflattens; here they are always in the plain model's order
    shared = [key for key in theirs if "again.weight" in key]
    assert [k for k in ours if k not in shared] == [k for k in theirs if k not in shared], what
    assert set(ours) == set(theirs), what
    for key, expected in theirs.items():
        found = ours[key]
        assert type(found) is type(expected), (what, key)
        if isinstance(expected, ShardedTensor):
            ours_are, theirs_are = found.metadata(), expected.metadata()
            assert ours_are.shards_metadata == theirs_are.shards_metadata and ours_are.size == theirs_are.size, (
                what,
                key,
            )
            # torch's local tensors have a graph, and cannot be copied
            theirs_are.tensor_properties.requires_grad = False
            assert ours_are.tensor_properties == theirs_are.tensor_properties, (what, key)
            assert len(found.local_shards()) == len(expected.local_shards()), (what, key)
            for shard, other in zip(found.local_shards(), expected.local_shards(), strict=True):
                assert shard.metadata == other.metadata, (what, key)
                assert type(shard.tensor) is Tensor, (what, key)
                assert torch.equal(shard.tensor, other.tensor.detach()), (what, key)
        else:
            assert_bit_equal({key: found}, {key: expected}, what)
            assert found.requires_grad is expected.requires_grad is False, (what, key)


@on_ranks(2, 3)
def test_every_form_of_state_equals_torch_fsdps(world_size: int) -> None:
    """Names, order, types, chunks and values are equal, also with `rank0_only`; and torch's states are loaded."""
    warnings.simplefilter("ignore")
    from torch.distributed import fsdp as torchs

    noise = make_plainer(1).state_dict()
    for strategy, mode in [(FULL_SHARD, False), (SHARD_GRAD_OP, True), (NO_SHARD, False)][: 4 - dist.get_world_size()]:
        module = make_plainer()
        ours = wrap(module, strategy, mode, wrap_policy=ModuleWrapPolicy({Tied}), ignored_modules=[module.ignored])
        theirs = torch_fsdp_of(make_plainer(), mode, strategy)
        holders = {"root": (ours, theirs), "unit": (ours.module.blocks[0], theirs.module.blocks[0])}
        holders["parent"] = (nn.Sequential(nn.ReLU(), ours), nn.Sequential(nn.ReLU(), theirs))
        for kind in ("full", "rank 0", "sharded", *(["local"] if not mode else [])):
            if kind == "rank 0" and strategy is NO_SHARD:
                continue  # torch ignores the option
            name = "Full" if kind == "rank 0" else kind.capitalize()
            torch_type = torchs.StateDictType[f"{name.upper()}_STATE_DICT"]
            config = partial(
                getattr(torchs, f"{name}StateDictConfig"), **{"rank0_only": True} if kind == "rank 0" else {}
            )
            for holder, (our_holder, their_holder) in holders.items():
                what = f"{kind}, {strategy}, use_orig_params={mode}, {holder}"
                states = []
                for library, held in (
                    (FullyShardedDataParallel, our_holder),
                    (torchs.FullyShardedDataParallel, their_holder),
                ):
                    with library.state_dict_type(held, torch_type, config()):
                        states.append(held.state_dict())
                assert_same_entries(*states, what)
                if holder == "root" and kind != "rank 0":
                    ours.load_state_dict(noise)
                    with FullyShardedDataParallel.state_dict_type(ours, torch_type, config()):
                        assert ours.load_state_dict(states[1]) == ([], [])
                    assert_bit_equal(full_state(ours), make_plainer().state_dict(), what)


# -- mismatches --------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, state: dict[str, Any], kind: type[Exception] = RuntimeError, **options: Any) -> str:
    """Return the error's text, and check that the model is unchanged."""
    before = {key: value.clone() for key, value in full_state(model).items()}
    with pytest.raises(kind) as caught:
        model.load_state_dict(state, **options)
    assert_bit_equal(full_state(model), before, str(caught.value))
    assert not any(type(param).__name__ == "Target" for param in model.parameters())
    text = str(caught.value)
    assert "_fsdp_wrapped_module" not in text and "_checkpoint_wrapped_module" not in text, text
    return text


def expected_mismatches(state: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the missing and unexpected keys that a plain module reports."""
    found = Rich().load_state_dict(state, strict=False)
    return tuple([key.replace("_checkpoint_wrapped_module.", "") for key in keys] for keys in found)  # type: ignore[return-value]


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_a_mismatch_raises_on_every_rank_and_nothing_is_loaded(mode: bool, swaps: bool) -> None:
    """Also where `nn.Module` loads by swapping tensors."""
    with swapping(swaps):
        check_mismatches(mode)


def check_mismatches(mode: bool) -> None:
    model, rank = rich(mode), dist.get_rank()
    good = Rich(1).state_dict()

    def without(*names: str) -> dict[str, Tensor]:
        return {key: value for key, value in good.items() if key not in names}

    text = refused(
        model, without("blocks.1.0.inner.bias", "table") | {"blocks.0.nothing": torch.ones(1), "x.y": good["table"]}
    )
    assert 'Missing key(s) in state_dict: "table", "blocks.1.0.inner.bias"' in text
    assert 'Unexpected key(s) in state_dict: "x.y", "blocks.0.nothing"' in text
    text = refused(model, good | {"blocks.0.inner.bias": torch.ones(3), "ignored.0.bias": torch.ones(9)})
    assert "size mismatch for blocks.0.inner.bias: copying a param with shape torch.Size([3]) from checkpoint" in text
    assert "size mismatch for ignored.0.bias" in text
    assert "expected torch.Tensor" in refused(model, good | {"image": 1})
    text = refused(model, {f"_fsdp_wrapped_module.{key}": value for key, value in good.items()})
    assert 'Missing key(s) in state_dict: "image"' in text and "as those of named_parameters() have" in text
    # an error of one rank is reported on all ranks
    text = refused(model, without("last.bias") if rank == 1 else good)
    assert 'Missing key(s) in state_dict: "last.bias"' in text
    assert ("because of rank 1" in text) is (rank == 0)
    # not strict: matching entries are loaded
    before = full_state(model)
    partial = {"left.weight": good["left.weight"], "no.such": good["table"]}
    assert model.load_state_dict(partial, strict=False) == expected_mismatches(partial)
    assert_bit_equal(full_state(model), before | dict.fromkeys(("left.weight", "right.weight"), good["left.weight"]))
    # assign
    assert "image" in refused(model, good | {"image": good["image"].double()}, assign=True)
    ignored = model.module.ignored[0]
    assert model.load_state_dict(good, assign=True) == ([], [])
    assert_bit_equal(full_state(model), good)
    assert ignored.weight.data_ptr() == good["ignored.0.weight"].data_ptr()
    model.load_state_dict({key: value.double() for key, value in Rich(2).state_dict().items()})
    assert_bit_equal(full_state(model), Rich(2).state_dict())
    # a parent module
    holder = nn.Sequential(nn.Linear(2, 2), model)
    state = {"1." + key: value for key, value in good.items()} | nn.Sequential(nn.Linear(2, 2)).state_dict(prefix="")
    misfit = {"1.blocks.0.inner.bias": torch.ones(3)} if rank == 1 else {}
    words = "size mismatch for 1.blocks.0.inner.bias"
    with pytest.raises(RuntimeError, match=words if rank == 1 else f"because of rank 1: .*{words}"):
        holder.load_state_dict(state | misfit | {"1.table": good["table"] + 1})
    assert_bit_equal(full_state(model), Rich(2).state_dict())
    for part in (model.module, model.module.left, model.module.blocks):
        with pytest.raises(RuntimeError, match="Missing key"):
            part.load_state_dict({})


@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_loads_by_swapping_tensors_keep_the_values_given_and_undo_all_changes(mode: bool) -> None:
    """Gradients, attributes and identities stay as well if the load fails, and so do the values that were given."""
    model, good, lacks = rich(mode), Rich(1).state_dict(), Rich(2).state_dict()
    del lacks["last.bias"]
    given = {key: value.clone() for key, value in lacks.items()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    weight = model.module.ignored[0].weight
    weight.label = "kept"
    params = [(param, param.grad) for param in model.parameters()]
    with swapping():
        for summoned in (contextlib.nullcontext(), FullyShardedDataParallel.summon_full_params(model)):
            with summoned:
                before = {key: value.clone() for key, value in full_state(model).items()}
                refused(model, lacks)
                refused(model, lacks, assign=True)
                assert_bit_equal(full_state(model), before)
        assert all(new is old and new.grad is grad for new, (old, grad) in zip(model.parameters(), params, strict=True))
        assert_bit_equal(lacks, given)
        assert weight.label == "kept" and weight.data_ptr() != lacks["ignored.0.weight"].data_ptr()  # type: ignore[attr-defined]
        for kind in KINDS:
            with kind_of(model, kind):
                model.load_state_dict(model.state_dict())
        assert_bit_equal(full_state(model), before)
        for load in (model.load_state_dict, partial(set_model_state_dict, model)):
            assert load(good) == ([], [])
            assert_bit_equal(full_state(model), good)
            with FullyShardedDataParallel.summon_full_params(model):
                model.module.load_state_dict(before, assign=True)
            assert_bit_equal(full_state(model), before)


@on_ranks(2)
def test_an_empty_state_dict_on_one_rank_raises_with_the_remedy() -> None:
    for strategy, mode in MODES:
        model = rich(mode, strategy)
        state = full_state(model)
        told = refused(model, state if dist.get_rank() == 0 else {})
        assert "The state dict is empty on rank 1. If only rank 0 has it, load inside" in told, told
        assert "FullStateDictConfig(rank0_only=True)" in told and "DistributedDataParallel" not in told


@on_ranks(2)
def test_shards_of_another_model_are_refused() -> None:
    """A local dict must have whole units."""
    model, coarse = rich(True), wrap(Rich(1), FULL_SHARD, True)
    for kind, words in (
        ("local", "only the model it was made from"),
        ("ragged", "let torch.distributed.checkpoint load"),
    ):
        with kind_of(model, kind), kind_of(coarse, kind):
            state = coarse.state_dict()
            text = refused(model, state, strict=kind == "ragged")
            assert words in text or "size mismatch for _flat_param" in text, text
    with kind_of(model, "local"):
        with pytest.raises(RuntimeError, match="LOCAL_STATE_DICT holds whole units"):
            model.module.left.state_dict()
        with pytest.raises(RuntimeError, match="LOCAL_STATE_DICT holds whole units"):
            model.module.left.load_state_dict({})
        with pytest.raises(AssertionError, match=r"Missing key.*_flat_param"):
            model.load_state_dict({})


# -- from rank 0 alone -------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_state_dict_of_rank_0_alone_is_distributed() -> None:
    """The units are distributed one by one, and errors are those of rank 0."""
    model, rank = rich(False), dist.get_rank()
    good = Rich(1).state_dict()
    full_state(model)
    with FullyShardedDataParallel.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        with record_collectives() as log:
            assert model.load_state_dict(good if rank == 0 else {}) == ([], [])
        assert_bit_equal(full_state(model), good)
        scattered = [r for r in log.records if r.op == "all_to_all"]
        assert len(scattered) == 3
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "left.bias"') as caught:
            model.load_state_dict({k: v + 1 for k, v in good.items() if k != "left.bias"} if rank == 0 else {})
        assert "_fsdp_wrapped_module" not in str(caught.value)
        assert_bit_equal(full_state(model), good)
        partial = {"left.bias": good["left.bias"] + 1, "ignored.0.bias": good["ignored.0.bias"] + 1}
        result = model.load_state_dict(partial if rank == 0 else {}, strict=False)
        assert result == expected_mismatches(partial)
        assert_bit_equal(full_state(model), good | partial | {"right.bias": partial["left.bias"]})
        mine = {k: v + rank for k, v in good.items()}  # if every rank has a dict, each rank keeps a part of it
        model.load_state_dict(mine)
        assert torch.equal(model.module.table, mine["table"])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(good if rank == 0 else {})


# -- moments and options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_state_is_a_compact_copy_where_parameters_are_sharded(mode: bool) -> None:
    """Sharded parameters are copied; buffers, ignored parameters and shards are live."""
    model = rich(mode)
    states = {}
    for kind in KINDS:
        with kind_of(model, kind):
            states[kind] = model.state_dict()
    plain = Rich().state_dict()
    for param in model.parameters():
        param.data.add_(1)
    model.module.table.add_(1)
    buffers = dict(Rich().named_buffers()).keys() | {"blocks.1.0.steps"}
    managed = [key for key in plain if key not in buffers and not key.startswith("ignored")]
    rows: list[Tensor] = []
    for key in managed:
        full, sharded = states["full"][key], states["sharded"][key]
        assert torch.equal(full, plain[key]) and full.untyped_storage().nbytes() == plain[key].nbytes, key
        for shard in sharded.local_shards() if isinstance(sharded, ShardedTensor) else ():
            start = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor, plain[key][start : start + shard.metadata.shard_sizes[0]]), key
            assert shard.tensor.untyped_storage().nbytes() == shard.tensor.nbytes
            rows += [shard.tensor] * (shard.tensor.numel() > 0)
    assert torch.equal(states["full"]["table"], plain["table"] + 1)
    for separate in (rows, [states["full"][key] for key in managed]):
        assert len({tensor.data_ptr() for tensor in separate}) == len(separate)
    part = states["ragged"]["frozen"]
    assert torch.equal(part.local, plain["frozen"][part.start : part.start + part.local.numel()] + 1), "it is live"


@on_ranks(2)
def test_a_part_of_an_unsharded_parameter_is_refused_before_any_write() -> None:
    def make(**options: Any) -> FullyShardedDataParallel:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return wrap(inner, use_orig_params=True, wrap_policy=None, **options)

    whole = torch.arange(16.0).view(4, 4)
    given: list[Any] = [distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])]
    for kind in ("sharded", "ragged"):
        with kind_of(other := make(), kind):
            given.append(other.state_dict()["1.weight"])
    assert [type(value).__name__ for value in given] == ["DTensor", "ShardedTensor", "RaggedTensor"]
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrap(inner, use_orig_params=True, wrap_policy=None, ignored_states=[*inner[1].parameters()])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for value in given:
        for everywhere in (True, False):
            state: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in before.items()}
            if everywhere or dist.get_rank() == 1:
                state["1.weight"] = value
            with pytest.raises(RuntimeError, match=rf"1.weight.*no unit .* {type(value).__name__} was given"):
                model.load_state_dict(state)
            assert_bit_equal(model.state_dict(), before)
    replicated = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Replicate()])
    model.load_state_dict({**before, "1.weight": replicated})
    assert torch.equal(model.state_dict()["1.weight"], whole)


class Customized(nn.Module):
    """A module with custom state methods and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.seen: list[Any] = []
        self.refuses = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.refuses:
            raise ZeroDivisionError
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.seen.append(self.weight.shape)
        destination[prefix + "double"] = self._parameters["weight"].detach() * 2

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.refuses:
            raise ZeroDivisionError
        state_dict.pop(prefix + "double", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "weight" in state_dict and (state_dict[prefix + "weight"] < -90).any():
            self.weight.data[0] = 0.0
        elif prefix + "weight" in state_dict:
            self.weight.data.copy_(state_dict[prefix + "weight"] * 10)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen.append(state)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_state_hooks_of_modules_run_and_see_full_parameters(mode: bool) -> None:
    """An exception in a hook leaves the parameters registered."""
    module = nn.Sequential(Customized(), nn.Linear(3, 2))
    inner = module[0]
    plain = dict(module.state_dict().items())
    model = wrap(module, FULL_SHARD, mode, wrap_policy=ModuleWrapPolicy({Customized}))
    state = model.state_dict()
    assert list(state) == list(plain)
    assert torch.equal(state["0.double"], 2 * plain["0.weight"])
    keep = model.state_dict(prefix="a.", keep_vars=True)
    assert list(keep) == ["a." + key for key in state]
    assert not any(value.requires_grad for value in keep.values() if isinstance(value, Tensor))
    state["0.weight"] = state["0.weight"] + 1
    assert model.load_state_dict(state) == ([], [])
    assert inner.seen[-1] == {"seen": 7}
    assert torch.equal(model.state_dict()["0.weight"], 10 * (plain["0.weight"] + 1))
    with pytest.raises(RuntimeError, match=r"only copy_\(\) of the whole"):
        model.load_state_dict(state | {"0.weight": plain["0.weight"] - 100})
    assert torch.equal(model.state_dict()["0.weight"], 10 * (plain["0.weight"] + 1))
    # an exception on one rank alone is reported on all
    inner.refuses = dist.get_rank() == 1
    words = None if inner.refuses else "Nothing was loaded, because of ranks? .*: ZeroDivisionError"
    with pytest.raises(ZeroDivisionError if inner.refuses else RuntimeError, match=words):
        model.load_state_dict(state)

    # an exception in between leaves no trace
    def parameters() -> list[tuple[str, torch.Size, int]]:
        return [(name, param.shape, id(param)) for name, param in model.named_parameters()]

    before = parameters()
    inner.refuses = True
    for use in (model.state_dict, lambda: model.load_state_dict(state), inner.state_dict):
        with pytest.raises(ZeroDivisionError):
            use()
        if use == inner.state_dict:  # noticed when the module is next used
            model(torch.ones(2, 5)).sum().backward()
        assert parameters() == before


class Versioned(nn.Linear):
    """A module of version 2, which converts older values: version 1 had the transposed weight."""

    _version = 2

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


@on_ranks(2)
def test_modules_see_the_version_of_the_state_that_they_load() -> None:
    """In dicts of the wrapped model, of a parent, of the plain model, and of an older one."""
    plain = nn.Sequential(Versioned(4, 4), nn.Sequential(Versioned(4, 4)))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    old = plain.state_dict()
    for layer in ("0", "1.0"):
        old[f"{layer}.weight"] = old[f"{layer}.weight"].t()
        old._metadata[layer] = {"version": 1}
    model = wrap(copy.deepcopy(plain), FULL_SHARD, True, wrap_policy=ModuleWrapPolicy({Versioned}))
    parent = nn.ModuleDict({"model": model})
    with kind_of(model, "sharded"):
        model.load_state_dict(model.state_dict())
    assert_bit_equal(full_state(model), expected, "sharded")
    for what, of, state in (
        ("wrapped", model, full_state(model)),
        ("parent", parent, parent.state_dict()),
        ("plain", model, plain.state_dict()),
        ("old", model, old),
        ("other names", model, get_model_state_dict(model)),
    ):
        of.load_state_dict(state)
        assert_bit_equal(full_state(model), expected, what)


class Scaled(nn.Module):
    """A module that saves the attribute `scales` of a parameter beside it, as layers with quantized weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3))
        vars(self.weight)["scales"] = {"absmax": torch.ones(2), "map": torch.arange(3.0)}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in getattr(self.weight, "scales", {}).items():
            destination[f"{prefix}weight.{name}"] = value

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in getattr(self.weight, "scales", {}):
            self.weight.scales[name].copy_(state_dict.pop(f"{prefix}weight.{name}"))  # type: ignore[union-attr, operator]
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize(("strategy", "mode"), [(FULL_SHARD, False), (FULL_SHARD, True), (NO_SHARD, True)])
@on_ranks(2)
def test_attributes_of_parameters_are_available_to_modules_that_save_them(
    strategy: ShardingStrategy, mode: bool
) -> None:
    """A quantized layer needs the scales, which are an attribute of the parameter."""
    module = nn.Sequential(Scaled(), nn.Linear(3, 2))
    module[0].weight.late = 3
    plain = {key: value.clone() for key, value in module.state_dict().items()}
    assert {"0.weight.absmax", "0.weight.map"} < plain.keys()
    model = wrap(module, strategy, mode, wrap_policy=ModuleWrapPolicy({Scaled}))
    with kind_of(model, "sharded"):
        assert {*model.state_dict()} == {*plain}
    assert_bit_equal(full_state(model), plain)
    assert_bit_equal(dict(model.module.state_dict()), plain)
    with FullyShardedDataParallel.summon_full_params(model):
        assert model.module[0].weight.scales["map"].tolist() == [0, 1, 2]
        assert_bit_equal(full_state(model), plain)
        assert_bit_equal(dict(model.module.state_dict()), plain)
    other = {key: value + 1 for key, value in plain.items()}
    model.load_state_dict(other)
    assert_bit_equal(full_state(model), other)


@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_state_of_a_summoned_model_is_read_and_loaded_without_a_gather(mode: bool) -> None:
    """`test_checkpoints` has the state at other times."""
    plain, model = Rich(), rich(mode)
    with FullyShardedDataParallel.summon_full_params(model):
        for param in model.parameters():
            param.data.add_(1)
        with record_collectives() as log:
            summoned = full_state(model)
        assert not log.records
        for kind in ("ragged", "local"):
            with kind_of(model, kind), pytest.raises(RuntimeError, match="inside summon_full_params"):
                model.state_dict()
    names = {clean_name(name) for name, _ in plain.named_parameters(remove_duplicate=False)}
    expected = {key: value + (key in names) for key, value in plain.state_dict().items()}
    assert_bit_equal(summoned, expected)
    with FullyShardedDataParallel.summon_full_params(model):
        model.load_state_dict(plain.state_dict())
    assert_bit_equal(full_state(model), plain.state_dict())


# -- the kind of state dict --------------------------------------------------------------------------------------------


def nested() -> nn.Module:
    """Return an unwrapped parent, with a unit and nested units."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    model[0] = FullyShardedDataParallel(model[0], StandIn(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    return model


def kinds(model: nn.Module) -> list[Any]:
    return [(m._state_dict_type, m._state_dict_config) for m in FullyShardedDataParallel.fsdp_modules(model)]


def test_the_kind_is_full_and_a_setting_applies_to_all_instances_until_the_context_ends() -> None:
    """No deprecation warning is raised."""
    FSDP, model = FullyShardedDataParallel, nested()
    default = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    assert FSDP.get_state_dict_type(model) == default
    assert FSDP.get_state_dict_type(nn.Linear(1, 1)) is None
    config = ShardedStateDictConfig(offload_to_cpu=True)
    assert FSDP.set_state_dict_type(model, SHARDED, config) == default
    before = StateDictSettings(SHARDED, config, ShardedOptimStateDictConfig())
    assert kinds(model) == [(SHARDED, config)] * 3 and FSDP.get_state_dict_type(model) == before
    assert FSDP.set_state_dict_type(nn.Linear(1, 1), FULL) == StateDictSettings(None, None, None)
    with FSDP.state_dict_type(model, LOCAL):
        assert kinds(model) == [(LOCAL, LocalStateDictConfig())] * 3
        with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, FULL, FullStateDictConfig(True, True)):
            assert FSDP.get_state_dict_type(model[0]).state_dict_config == FullStateDictConfig(True, True)
            raise ZeroDivisionError
        local = StateDictSettings(LOCAL, LocalStateDictConfig(), LocalOptimStateDictConfig())
        assert FSDP.get_state_dict_type(model) == local
    assert FSDP.get_state_dict_type(model) == before
    with pytest.raises(ValueError, match="no FullyShardedDataParallel in this Linear"):
        FSDP.state_dict_type(nn.Linear(1, 1), FULL).__enter__()


def test_different_settings_of_instances_and_mismatched_configs_are_refused() -> None:
    """No setting is changed by the refusal."""
    FSDP, model = FullyShardedDataParallel, nested()
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
        FSDP.set_state_dict_type(model, SHARDED, FullStateDictConfig())
    with pytest.raises(RuntimeError, match="Expected optim_state_dict_config of type"):
        FSDP.set_state_dict_type(model, SHARDED, None, FullOptimStateDictConfig())
    assert kinds(model) == [(FULL, FullStateDictConfig())] * 3
    FSDP.set_state_dict_type(model[0].module[1], LOCAL)
    for ask in (lambda: FSDP.get_state_dict_type(model), lambda: FSDP.set_state_dict_type(model, SHARDED)):
        with pytest.raises(AssertionError, match=r"'0\.1' has .*LOCAL_STATE_DICT"):
            ask()
    assert [kind for kind, _ in kinds(model)] == [FULL, FULL, LOCAL]


@on_ranks(2)
def test_loading_a_local_state_dict_as_a_full_one_raises_by_name() -> None:
    for use_orig_params in (False, True):
        model = wrap(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), FULL_SHARD, use_orig_params)
        with FullyShardedDataParallel.state_dict_type(model, LOCAL):
            state = model.state_dict()
            lacks = {key: value for key, value in state.items() if key != "1.running_mean"}
            told = refused(model, lacks)  # without advice to use the form in force
            assert 'Missing key(s) in state_dict: "1.running_mean"' in told and "LOCAL_STATE_DICT" not in told
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*LOCAL_STATE_DICT: load it inside FSDP.state_dict_ty"):
            model.load_state_dict(state)


@on_ranks(2)
def test_a_non_strict_load_without_any_matching_name_warns() -> None:
    """All names wrong, as with a prefix, is a mistake; some missing names are the purpose of `strict=False`."""
    model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), FULL_SHARD, True)
    state = model.state_dict()
    other = {f"model.{name}": value for name, value in state.items()}
    for given, words in (
        (other, "such as 'model.0.weight', .*'0.weight': take the prefix 'model.' away"),
        ({"x": 1}, "'x'"),
    ):
        with pytest.warns(UserWarning, match=rf"has loaded nothing: none of the {len(given)} names.*{words}"):
            model.load_state_dict(given, strict=False)
    model.load_state_dict({"1.bias": state["1.bias"], "x": torch.ones(1)}, strict=False)  # warnings are errors
    model.load_state_dict({}, strict=False)
