"""One unit of several modules: ``FullyShardedDataParallel.group``.

The reference is the same model and policy without groups, bit for bit, and the plain model once.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import load, save
from fsdp.flat.names import clean
from fsdp.runtime.unit import units_of
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import VOCABULARY, WIDTH, ZOO, Case, MlpBlock, Net, Stacked
from tests.harness.oracle import Schedule, adamw, assert_bit_equal, assert_same_steps, run_plain, sgd
from tests.harness.passes import gathered
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_optim_state, full_parameters, run_fsdp, wrap
from tests.harness.states import KINDS, kind_of

FULL, KEPT = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MlpBlock(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def make_lm(tied: bool) -> Any:
    return Stacked(VOCABULARY, WIDTH, (Block() for _ in range(2)), tied=tied, norm=True)


def tied() -> nn.Module:
    model = make_lm(True)
    FSDP.group([model.head, model.embed])
    return model


def untied() -> nn.Module:
    model = make_lm(False)
    FSDP.group([model.norm, model.head])
    FSDP.group([block.norm for block in model.blocks])
    return model


_LM = ZOO["tied-transformer"]


def case_of(model: Any) -> Case:
    return Case("lm", model, _LM.samples, _LM.criterion, frozenset({Block}))


GROUPED = {"tied": case_of(tied), "untied": case_of(untied)}
WITHOUT = {"tied": case_of(partial(make_lm, True)), "untied": case_of(partial(make_lm, False))}


def assert_equal_training(name: str, schedule: Schedule, **options: Any) -> None:
    both = [run_fsdp(cases[name], sgd, schedule, **options) for cases in (GROUPED, WITHOUT)]
    assert_same_steps(*both, f"{name} {options}")


@on_ranks(2)
def test_groups_train_to_the_same_bits() -> None:
    schedule = Schedule(steps=2, micro=2)
    for name in GROUPED:
        for step, plain in zip(run_fsdp(GROUPED[name], sgd, schedule), run_plain(GROUPED[name], sgd, 2, schedule)):
            assert_bit_equal(step.params, plain.params, name)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    assert_equal_training("tied", schedule, strategy=KEPT, use_orig_params=True)
    assert_equal_training("untied", schedule, mixed_precision=low, use_orig_params=True)
    assert_equal_training("untied", schedule, backward_prefetch=BackwardPrefetch.BACKWARD_POST, limit_all_gathers=False)
    assert_equal_training("tied", schedule, strategy=ShardingStrategy.NO_SHARD)
    assert_equal_training("tied", Schedule(steps=2), reduce_unused=True)


@on_ranks(4)
def test_groups_train_to_the_same_bits_over_two_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    assert_equal_training(
        "tied", Schedule(steps=2), strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, use_orig_params=True
    )


def assert_equal_states(states: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert set(states) == set(expected)
    for name, state in expected.items():
        assert_bit_equal(states[name], state, name)


@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_state_of_groups_equals_the_plain_models(mode: bool, tmp_path: Path) -> None:
    """Kinds of state dicts and checkpoints take turns."""
    for name in GROUPED:
        grouped, without = (wrap(cases[name], use_orig_params=mode) for cases in (GROUPED, WITHOUT))
        optims = []
        for model in (grouped, without):
            optims.append(adamw(model.parameters()))
            for step in range(2):
                optims[-1].zero_grad()
                _LM.loss(model, _LM.make_batch(step, 2)).backward()
                norm = model.clip_grad_norm_(0.1)
                optims[-1].step()
            if model is grouped:
                first = norm
        assert torch.equal(first, norm)
        plain = WITHOUT[name].build()
        values = full_parameters(without)
        assert_bit_equal(full_parameters(grouped), values)
        in_turn = mode == (name == "tied")
        for kind in KINDS if in_turn else ():
            with kind_of(grouped, kind):
                with record_collectives() as log:
                    state = grouped.state_dict()
                gathers = log.units("gather")
                assert len(gathers) == len(set(gathers)), kind
                if kind != "local":
                    assert list(state) == list(plain.state_dict()), kind
                fresh = wrap(GROUPED[name], use_orig_params=mode, seed=1)
                with kind_of(fresh, kind):
                    fresh.load_state_dict(state)
            assert_bit_equal(full_parameters(fresh), values, kind)
        plain.load_state_dict(grouped.state_dict())
        if mode:
            with FSDP.summon_full_params(grouped):
                shapes, wanted = ({key: p.shape for key, p in each.named_parameters()} for each in (grouped, plain))
            assert shapes == wanted
        assert {key for key, _ in fsdp.full_params(grouped)} == {key for key, _ in plain.named_parameters()}
        expected = FSDP.optim_state_dict(without, optims[1])
        assert_equal_states(FSDP.optim_state_dict(grouped, optims[0])["state"], expected["state"])
        fresh = wrap(GROUPED[name], use_orig_params=mode, seed=1)
        optim = adamw(fresh.parameters())
        optim.load_state_dict(FSDP.optim_state_dict_to_load(fresh, optim, expected))
        assert_equal_states(full_optim_state(fresh, optim), expected["state"])
        path = Path(tmp_path, name)
        if not in_turn:
            save(path, grouped, optims[0])
            for cases in (GROUPED, WITHOUT):
                fresh = wrap(cases[name], use_orig_params=mode, seed=1)
                optim = adamw(fresh.parameters())
                load(path, fresh, optim)
                assert_bit_equal(full_parameters(fresh), values)
                assert_equal_states(full_optim_state(fresh, optim), expected["state"])
        copied = copy.deepcopy(grouped)
        for model in (copied, grouped):
            model.zero_grad()
            _LM.loss(model, _LM.make_batch(7, 2)).backward()
        assert_bit_equal(full_gradients(copied), full_gradients(grouped))
        assert "\n  embed, head Embedding, Linear " in str(fsdp.describe(grouped)) or name == "untied"


def record(recorded: dict[str, set[str]], name: str, now: Any, *_: Any) -> None:
    recorded[name] = now()


@on_ranks(2)
def test_groups_are_gathered_once_per_pass() -> None:
    head, norms, ends = "unit 'norm, head'", "unit 'blocks.0.norm, blocks.1.norm'", "unit 'embed, head'"
    blocks = [f"unit 'blocks.{index}'" for index in range(2)]
    forwards = {"tied": [ends, *blocks], "untied": [blocks[0], norms, blocks[1], head]}
    backwards = {"tied": [ends, blocks[1], blocks[0]], "untied": [head, blocks[1], norms, blocks[0]]}
    for name, forward in forwards.items():
        prefetches = BackwardPrefetch.BACKWARD_POST if name == "tied" else BackwardPrefetch.BACKWARD_PRE
        model = wrap(GROUPED[name], use_orig_params=True, backward_prefetch=prefetches)
        recorded: dict[str, set[str]] = {}
        for index, block in enumerate(model.module.blocks):
            hook = partial(record, recorded, f"blocks.{index}", partial(gathered, model))
            block.module.mlp.register_forward_hook(hook)
        for prefetch in (False, True):  # the first step has no recorded order
            batch = _LM.make_batch(0, 2)
            with record_collectives() as log:
                loss = _LM.loss(model, batch)
            assert log.units("gather") == ["the root unit", *forward], name
            assert gathered(model) == {""}
            with record_collectives() as log:
                loss.backward()
            assert log.units("gather") == backwards[name], name
            if prefetch and name == "tied":  # also while a unit waits for gradients of later modules
                assert log.labels().index(f"gather {blocks[0]}") < log.labels().index(f"reduce {blocks[1]}")
            assert sorted(log.units("reduce")) == sorted(["the root unit", *forward]), name
            assert gathered(model) == set()
            if name == "tied":  # the awaited unit does not count for the limit: the next block is unsharded, too
                ahead = {"blocks.1"} if prefetch else set()
                assert recorded["blocks.0"] == {"", "embed, head", "blocks.0", *ahead}
                assert recorded["blocks.1"] == {"", "embed, head", "blocks.1"}
        with torch.no_grad(), record_collectives() as log:
            _LM.loss(model, batch)
        assert log.units("gather") == ["the root unit", *forward]
        assert gathered(model) == set()


def note(during: list[set[str]], model: Any, *_: Any) -> None:
    during.append(gathered(model))


@on_ranks(2)
def test_groups_that_run_partly_or_twice() -> None:
    def forward(m: Any, x: Tensor, plan: str) -> Tensor:
        for name in plan.split():
            if name == "fail":
                raise ZeroDivisionError
            x = getattr(m, name)(x).sin()
        return x

    plans = ["first third", "third second third", "first second first", "second third first", "third"]
    for keeps in (FULL, KEPT):
        torch.manual_seed(0)
        plain: Any = Net(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3), third=nn.Linear(3, 3))
        FSDP.group([plain.first, plain.second])
        model = FSDP(copy.deepcopy(plain), sharding_strategy=keeps, use_orig_params=True)
        for plan in plans:
            x = torch.randn(2, 3)
            for each in (plain, model):
                each.zero_grad()
                each(x, plan).sum().backward()
                if each is model:
                    assert gathered(model) == set(), plan
            for name, grad in full_gradients(model).items():
                expected = plain.get_parameter(name).grad
                if expected is None:  # zeros where further modules of the unit have gradients
                    assert grad is None or (name.split(".")[0] in ("first", "second") and not grad.any()), (plan, name)
                else:
                    assert torch.equal(grad, expected), (plan, name)
        during: list[set[str]] = []
        hook = model.module.third.register_forward_hook(partial(note, during, model))
        model(x, "first second third")
        model(x, "first third second")
        hook.remove()
        kept = {"", "first, second"}
        assert during == [kept if keeps is KEPT else {""}, kept], "resharded when all modules of the group have run"
        loss = model(x, "first third").sum()
        assert gathered(model) == ({"", "first, second"} if keeps is KEPT else {""})
        del loss
        with pytest.raises(ZeroDivisionError):
            model(x, "first fail")
        assert gathered(model) == set()


def nested() -> nn.Module:
    """Build members that contain units of a policy and buffers; one member has two names."""
    front, back = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    FSDP.group([back, front], reshard_after_forward=False)
    middle = nn.Linear(4, 4)
    return Net(lambda m, x: m.back(m.middle(m.again(m.front(x)))), front=front, back=back, again=front, middle=middle)


@on_ranks(2)
def test_groups_with_checkpointing_casts_and_freezing() -> None:
    batch = _LM.make_batch(0, 2)
    for name in GROUPED:
        losses = {}
        for checkpointed in ("", "before", "after"):
            module = GROUPED[name].build()
            chosen = partial(apply_activation_checkpointing, check_fn=lambda m: isinstance(m, (nn.LayerNorm, Block)))
            if checkpointed == "before":
                apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, (MlpBlock, nn.Embedding)))
            model = wrap(module, use_orig_params=True, wrap_policy=ModuleWrapPolicy({Block}))
            if checkpointed == "after":
                chosen(model)
            _LM.loss(model, batch).backward()
            losses[checkpointed] = {clean(key): grad for key, grad in full_gradients(model).items()}
        for checkpointed in ("before", "after"):
            assert_bit_equal(losses[checkpointed], losses[""], checkpointed)
    # freeze one of two members, then train both
    model = wrap(GROUPED["untied"], use_orig_params=True)
    whole, head = full_parameters(model), model.get_submodule("_fsdp_wrapped_module.head")
    for param in head.parameters():
        param.requires_grad_(False)
    _LM.loss(model, batch).backward()
    assert all((grad is None) == (key == "head.weight") for key, grad in full_gradients(model).items())
    # each cast changes shards once, also with frozen members; members can be called directly
    for factor in (2, 4):
        model._apply(lambda tensor: tensor * 2 if tensor.is_floating_point() else tensor)
        assert_bit_equal(full_parameters(model), {key: factor * value for key, value in whole.items()})
    reference = wrap(WITHOUT["untied"], use_orig_params=True)
    reference.load_state_dict(model.state_dict())
    for param in head.parameters():
        param.requires_grad_(True)
    for each in (model, reference):
        each.zero_grad()
        _LM.loss(each, batch).backward()
    assert_bit_equal(full_gradients(model), full_gradients(reference))
    assert set(head.state_dict()) == {"weight"}
    with torch.no_grad():
        assert head(torch.ones(2, WIDTH)).shape == (2, VOCABULARY)
    head.load_state_dict({"weight": torch.ones(VOCABULARY, WIDTH)})
    assert full_parameters(model)["head.weight"].eq(1).all()
    with kind_of(model, "local"), pytest.raises(RuntimeError, match="holds whole units, and FullyShardedDataParallel"):
        head.load_state_dict({})
    # members contain units, have several names, and take options
    model = FSDP(nested(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Sequential}))
    assert [unit.name for unit in fsdp.shard_info(model)] == ["", "front, back", "front.0", "back.0", "middle"]
    model(torch.ones(2, 4)).sum().backward()
    assert model.module.front is model.module.again and model.module.back._fsdp_unit is model.module.front._fsdp_unit
    kept = [unit.policy.reshard_after_forward for unit in units_of(model)]
    assert kept == [None, False, None, None, None]
    assert list(model.state_dict()) == list(nested().state_dict())


def inside(grouped: bool) -> nn.Module:
    """Build a group inside another group, next to a unit wrapped by hand."""
    torch.manual_seed(5)
    front = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    back = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    head = nn.Linear(2, 3)
    if grouped:
        FSDP.group([front, back])
        FSDP.group([front[1], head])
    return Net(lambda m, x: m.head(m.back(m.front(x))), front=front, back=back, head=head)


@on_ranks(2)
def test_invalid_groups_are_refused() -> None:
    def error(
        *choose: Any, of: type[nn.Module] = nn.Sequential, match: str, kind: type[Exception] = ValueError, **kw: Any
    ) -> None:
        model = nn.Sequential(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
        )
        before = list(model.modules())
        with pytest.raises(kind, match=match):
            for modules in choose:
                FSDP.group([model.get_submodule(path) for path in modules], **kw)
            FSDP(model if of is nn.Sequential else model[1])
        assert list(model.modules()) == before

    error(["1"], match="two or more modules, each once")
    error(["1", "1"], match="two or more modules, each once")
    error(["0", "0.0"], match="a Sequential, contains another")
    error(["1", "2"], ["0", "2"], match="is in a group already")
    error(["1.0", "2"], of=nn.Linear, match="does not contain all of them")
    error(["", "2"], match="contains another")
    error(["0", "1.0"], ["0.0", "1"], match="each of these groups has a module inside of a module of the next")
    error(["1", "2"], kind=TypeError, match="takes no auto_wrap_policy", auto_wrap_policy=None)
    with pytest.raises(TypeError, match=r"nn\.Module elements, got int"):
        FSDP.group([nn.Linear(2, 2), 3])
    wrapped = FSDP(nn.Linear(2, 2))
    for module in (wrapped, wrapped.module):
        with pytest.raises(ValueError, match="is wrapped already"):
            FSDP.group([nn.Linear(2, 2), module])
    with pytest.raises(ValueError, match="or ignored there: a LayerNorm and a Linear"):
        model = make_lm(False)
        FSDP.group([model.norm, model.head])
        FSDP(model, ignored_modules=[model.head])
