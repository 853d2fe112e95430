"""`fsdp.plan`: planned bytes equal the bytes that two ranks hold and receive."""

from __future__ import annotations

import functools
import io
import json
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.__main__ import main
from fsdp.api import as_nbytes
from fsdp.checkpoint import Local
from fsdp.comm import host_memory
from fsdp.comm.transport import shared_memory
from fsdp.optim import HostOptimizer
from fsdp.tools.plan_memory import find_units, try_forward
from fsdp.tools.text import in_bytes
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.meter import NOISE, Meter, Peak, needs_meter
from tests.harness.models import EncoderBlock, Net, Stacked, Unit, in_turn, tied_transformer
from tests.harness.pool import on_ranks
from tests.harness.process_groups import CollectiveLog, record_collectives
from tests.harness.strategies import FULL, GRAD_OP, HYBRID, NO_SHARD

MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh())


class Mlp(nn.Module):
    """A root that only runs first."""

    def __init__(self, width: int = 600, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x))


class Language(Stacked):
    """Tied embedding and head: one gradient, at the end of the backward."""

    def __init__(self, words: int = 900) -> None:
        super().__init__(words, 600, (Layer(600) for _ in range(3)))


class LargeLanguage(Language):
    def __init__(self) -> None:
        super().__init__(2700)


class Untied(Language):
    """The root's parameters are used before and after all inner units."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(600, 900, bias=False)


def grouped() -> nn.Module:
    """Return a model whose first and last modules form one unit."""
    model = LargeLanguage()
    FullyShardedDataParallel.group([model.embed, model.head])
    return model


def adapted(width: int = 600) -> Unit:
    """Build a frozen base with a trained adapter."""
    return Unit(
        lambda m, x: torch.tanh(m.base(x)) + m.up(m.down(x)),
        base=nn.Linear(width, width).requires_grad_(False),
        down=nn.Linear(width, 60),
        up=nn.Linear(60, width),
    )


def stages() -> nn.Module:
    """Build nested units behind a frozen unit that no backward reaches."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(600, 600), adapted(), adapted()) for _ in range(3))
    return Net(lambda m, x: in_turn(m.stages, m.frozen(x)), frozen=Layer(600).requires_grad_(False), stages=blocks)


def traffic(log: CollectiveLog) -> tuple[int, int, int, int]:
    """Return gathered bytes, reduced bytes, and the numbers of both collectives in a step on two ranks."""
    gathers = [each for each in log.records if (each.label or "").startswith("gather ")]
    reductions = [each for each in log.records if (each.label or "").startswith("reduce ")]
    moved = [each.output_nbytes if each.op == "exchange" else each.nbytes // 2 for each in gathers]
    halves = [each.nbytes // 2 if each.op == "reduce_scatter" else each.output_nbytes for each in reductions]
    return sum(moved), sum(halves), len(gathers), len(reductions)


ADAMW = functools.partial(torch.optim.AdamW, foreach=False)
WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}


def measure(
    build: Callable[[], nn.Module],
    policy: Any,
    batch: Tensor,
    steps: int = 4,
    make_optimizer: Any = ADAMW,
    **options: Any,
) -> dict[str, Any]:
    """Return bytes that this rank holds and receives; only steps after the second are measured, as that is slow."""
    meter = Meter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = meter.baseline()
        model = FullyShardedDataParallel(build(), auto_wrap_policy=policy, **options)
    optimizer = make_optimizer(model.parameters())
    most = stepping = 0
    for step in range(steps):
        optimizer.zero_grad()
        measured = step >= 2
        with Peak(meter) if measured else nullcontext() as peak, record_collectives() as log:
            model(batch).float().sum().backward()
        if peak is not None:
            most = max(most, peak.nbytes)
        if step < steps - 1:
            held = meter.live()
            with Peak(meter) if measured else nullcontext() as peak:
                optimizer.step()
            if peak is not None:
                stepping, most = max(stepping, peak.nbytes - held), max(most, peak.nbytes)
    state = [value.nbytes for values in optimizer.state.values() for value in values.values()]
    return {
        "param_nbytes": sum(bucket.flat_param.nbytes for unit in fsdp.shard_info(model) for bucket in unit.buckets),
        "grad_nbytes": sum(param.grad.nbytes for param in model.parameters() if param.grad is not None),
        "optim_nbytes": sum(state),
        "step_nbytes": stepping,
        "received": traffic(log),
        "peak_nbytes": most - before,
    }


LAYERS, STAGES = ModuleWrapPolicy({Layer}), ModuleWrapPolicy({Layer, nn.Sequential, Unit})
TOKENS = torch.zeros(1, 8, dtype=torch.long)
CASES: list[tuple[Callable[[], nn.Module], Any, Tensor, dict[str, Any], tuple[ShardingStrategy, ...]]] = [
    (Mlp, LAYERS, torch.ones(200, 64), {}, (FULL, GRAD_OP, NO_SHARD)),
    (LargeLanguage, LAYERS, TOKENS, {"mixed_precision": MIXED}, (FULL, NO_SHARD)),
    (Untied, LAYERS, TOKENS, {"mixed_precision": MIXED}, (FULL,)),
    (stages, STAGES, torch.ones(2, 600), {"use_orig_params": True}, (FULL, GRAD_OP)),
    (grouped, LAYERS, TOKENS, {"mixed_precision": MIXED}, (GRAD_OP,)),
]


@needs_meter
@pytest.mark.parametrize("number", range(len(CASES)))
@on_ranks(2)
@mock.patch.object(shared_memory, "SUPPORTED", False)  # shared memory needs no receive buffers
@mock.patch.object(host_memory, "_MAY_BE_HUGE", False)  # the meter counts allocations, not mappings
@mock.patch.object(host_memory, "_RECYCLED", 1 << 62)
def test_two_ranks_hold_and_receive_the_planned_bytes(number: int) -> None:
    """Sizes and traffic are exact; the peak is within 10 %."""
    build, policy, batch, options, strategies = CASES[number]
    precision = options.get("mixed_precision")
    planned = fsdp.plan(build, world_size=2, policy=policy, inputs=[batch], device="cpu", precision=precision)
    options = {**options, "process_group": dist.new_group()}
    measure(build, policy, batch, steps=2, **options)  # operations cache memory at their first call
    for strategy in strategies:
        result = measure(build, policy, batch, sharding_strategy=strategy, **options)
        plan, case = planned[strategy], f"{build.__name__}, {strategy.name}: "
        assert result["step_nbytes"] <= plan.step_nbytes + NOISE, case  # a part on this rank may be smaller
        received = (plan.gathered_nbytes, plan.reduced_nbytes, plan.gathers, plan.reductions)
        assert received == result["received"], f"{case}{received}, {result['received']}"
        assert (plan.param_nbytes, plan.grad_nbytes) == (result["param_nbytes"], result["grad_nbytes"]), case
        assert plan.optim_nbytes == pytest.approx(result["optim_nbytes"], rel=1e-4), case
        peak = f"{plan.peak_nbytes:,} planned, {result['peak_nbytes']:,} held"
        assert plan.peak_nbytes == pytest.approx(result["peak_nbytes"], rel=0.1), case + peak


@needs_meter
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
@mock.patch.object(shared_memory, "SUPPORTED", False)
@mock.patch.object(host_memory, "_MAY_BE_HUGE", False)
@mock.patch.object(host_memory, "_RECYCLED", 1 << 62)
def test_the_peak_may_be_in_the_step_of_the_optimizer(way: str) -> None:
    """With `foreach` temporary tensors are as large as all shards, in a loop as three layers, with `fused` none."""
    build, batch = functools.partial(Mlp, 300, 16), torch.ones(2, 64)
    make = functools.partial(torch.optim.Adam, **WAYS[way])
    planned = fsdp.plan(build, world_size=2, policy=LAYERS, inputs=[batch], device="cpu", optimizer=make)
    options = {"make_optimizer": make, "process_group": dist.new_group()}
    measure(build, LAYERS, batch, steps=2, **options)
    for strategy in (FULL, NO_SHARD):
        result, plan = measure(build, LAYERS, batch, sharding_strategy=strategy, **options), planned[strategy]
        ranks = 1 if strategy is NO_SHARD else 2
        layer = 4 * 300 * 301 // ranks
        assert plan.step_nbytes == {"foreach": plan.param_nbytes, "fused": 0, "loop": 3 * layer}[way]
        assert abs(plan.step_nbytes - result["step_nbytes"]) <= NOISE
        assert plan.peak_nbytes == pytest.approx(result["peak_nbytes"], rel=0.1), strategy
        held = plan.param_nbytes + plan.grad_nbytes + plan.optim_nbytes + plan.step_nbytes
        assert plan.peak_nbytes >= held and (way != "foreach" or plan.peak_nbytes == held)


@needs_meter
@on_ranks(2)
def test_a_host_optimizer_takes_the_planned_host_memory() -> None:
    """Its step takes temporary tensors for one unit at a time."""
    meter, taken = Meter(), [0]

    class Measured(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            before = meter.live()
            with Peak(meter) as peak:
                super().step()
            taken.append(peak.nbytes - before)

    planned = fsdp.plan(Mlp, world_size=2, policy=LAYERS, optimizer=torch.optim.Adam, host_optimizer=True)
    for strategy, layer in ((FULL, 4 * 600 * 601 // 2), (NO_SHARD, 4 * 600 * 601)):
        options: dict[str, Any] = {"sharding_strategy": strategy, "cpu_offload": CPUOffload(offload_params=True)}
        model = FullyShardedDataParallel(Mlp(), auto_wrap_policy=LAYERS, **options)
        optimizer = HostOptimizer(model, Measured)
        for _ in range(4):
            taken.clear()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.synchronize()
        params = list(model.parameters())
        held = [param.nbytes for param in params], [param.grad.nbytes for param in params if param.grad is not None]
        states = [value.nbytes for state in optimizer.state.values() for value in state.values()]
        plan = planned[strategy]
        assert (plan.param_nbytes, plan.grad_nbytes, plan.step_nbytes) == (sum(held[0]), sum(held[1]), 2 * layer)
        assert plan.optim_nbytes == pytest.approx(sum(states), rel=1e-4)
        assert abs(max(taken) - plan.step_nbytes) <= NOISE, strategy
        assert plan.host_nbytes == plan.param_nbytes + plan.grad_nbytes + plan.optim_nbytes + plan.step_nbytes


@on_ranks(2)
def test_directories_of_hosts_have_the_planned_bytes(tmp_path: Path) -> None:
    for strategy, copies in ((FULL, 0), (GRAD_OP, 1), (NO_SHARD, 1)):
        plan = fsdp.plan(Language, world_size=2, policy=LAYERS, strategy=strategy)
        model = FullyShardedDataParallel(Language(), auto_wrap_policy=LAYERS, sharding_strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        model(TOKENS).sum().backward()
        optimizer.step()
        with mock.patch.dict(os.environ, FSDP_HOST=f"host{dist.get_rank()}"):
            local = Local(tmp_path / strategy.name / f"host{dist.get_rank()}", copies)
            for _ in range(3):
                local.save(model, optimizer)
        nbytes = torch.tensor([sum(path.stat().st_size for path in local.path.rglob("*") if path.is_file())])
        dist.all_reduce(nbytes)  # a hash divides tensors of replicas, not evenly
        assert 2 * plan.local_nbytes(1, copies) == pytest.approx(nbytes.item(), rel=0.01), strategy
        assert plan.local_nbytes(8) == 2 * 2 * plan.checkpoint_nbytes * 8 // 2


# -- without ranks -------------------------------------------------------------------------------------------------


def test_planning_a_model_or_its_builder_is_equal_and_changes_nothing() -> None:
    model = tied_transformer()
    before = {name: (id(param), param._version) for name, param in model.named_parameters()}
    policy = ModuleWrapPolicy({EncoderBlock})
    result = fsdp.plan(model, world_size=3, policy=policy)
    assert result == fsdp.plan(tied_transformer, world_size=3, policy=policy)
    assert before == {name: (id(param), param._version) for name, param in model.named_parameters()}
    assert (result.name, result.units) == ("Net", ("", "blocks.0", "blocks.1"))
    assert result.numel == sum(param.numel() for param in model.parameters())  # tied parameters count once
    layer = Layer(4)
    twice = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))  # one unit, in two places
    assert fsdp.plan(twice, world_size=2, policy=ModuleWrapPolicy({Layer})).units == ("", "0.0")


def test_module_group_is_unsharded_around_the_units_between() -> None:
    units = find_units(grouped(), ModuleWrapPolicy({Layer}), MixedPrecision())
    assert [unit.names for unit in units] == [[""], ["embed", "head"], ["blocks.0"], ["blocks.1"], ["blocks.2"]]
    assert [sorted(unit.around) for unit in units] == [[], [0], [0, 1], [0, 1], [0, 1]]


def test_a_batch_gives_the_activations_of_each_unit() -> None:
    with torch.device("meta"):
        model = Mlp()
    units = find_units(model, LAYERS, MixedPrecision())
    try_forward(model, units, [torch.ones(32, 64)])
    found = {", ".join(unit.names): unit.activation_nbytes // (4 * 32) for unit in units}
    assert list(found.items()) == [("", 64), ("layers.0", 1200), *((f"layers.{i}", 600) for i in (1, 2, 3))]


def test_activation_bytes_are_the_tensors_that_autograd_saves() -> None:
    """Input and output of a layer, in the compute dtype; with recomputation only the input."""
    rows, width = 32, 600
    inputs = [torch.ones(rows, 64)]
    policy = ModuleWrapPolicy({Layer})
    result = fsdp.plan(Mlp, world_size=2, policy=policy, inputs=inputs)[FULL]
    assert fsdp.plan(Mlp, world_size=2, policy=policy, inputs=inputs[0])[FULL] == result
    assert result.activation_nbytes == 4 * rows * (64 + 5 * width)
    assert fsdp.plan(Mlp, world_size=2, policy=policy)[FULL].activation_nbytes == 0
    half = fsdp.plan(Mlp, world_size=2, policy=policy, inputs=inputs, precision=MIXED)[FULL]
    assert half.activation_nbytes == result.activation_nbytes // 2

    class Recomputed(Layer):
        def forward(self, input: Tensor) -> Tensor:
            return checkpoint(super().forward, input, use_reentrant=False)

    def build() -> nn.Module:
        model = Mlp()
        model.layers = nn.Sequential(*(Recomputed(width) for _ in range(4)))
        return model

    saved = fsdp.plan(build, world_size=2, policy=policy, inputs=inputs)[FULL].activation_nbytes
    assert saved == 4 * rows * (64 + 4 * width)


def test_smallest_fitting_world_size_is_minimal() -> None:
    build = functools.partial(Mlp, 100, 6)
    policy = ModuleWrapPolicy({Layer})
    strategies = [FULL, GRAD_OP, NO_SHARD, HYBRID]
    planned = functools.partial(fsdp.plan, build, policy=policy, shard_size=1, strategy=strategies)
    plans = {ranks: planned(world_size=ranks) for ranks in range(1, 12)}
    for memory in (360_000, 450_000, 700_000, 1_200_000, 10_000_000):
        result = fsdp.plan(build, world_size=2, policy=policy, strategy=strategies[:3], memory=memory)
        for strategy in (FULL, GRAD_OP):
            fitting = [ranks for ranks, each in plans.items() if each[strategy].peak_nbytes <= memory]
            assert result.smallest[strategy] == (min(fitting) if fitting else result.smallest[strategy])
        assert result.smallest[NO_SHARD] == (1 if plans[1][NO_SHARD].peak_nbytes <= memory else None)
    none = fsdp.plan(build, world_size=2, policy=policy, memory=1000).smallest
    assert none == dict.fromkeys((FULL, GRAD_OP, NO_SHARD))


def test_hybrid_strategies_shard_within_and_replicate_across_groups() -> None:
    policy = ModuleWrapPolicy({Layer})
    result = fsdp.plan(Mlp, world_size=8, policy=policy, shard_size=4, memory="1GB")
    assert [each.strategy for each in result.strategies] == list(ShardingStrategy)
    hybrid, full = result[HYBRID], fsdp.plan(Mlp, world_size=4, policy=policy)[FULL]
    assert result.smallest[HYBRID] == 4
    assert (hybrid.param_nbytes, hybrid.gathered_nbytes) == (full.param_nbytes, full.gathered_nbytes)
    assert hybrid.reduced_nbytes == full.reduced_nbytes + full.grad_nbytes  # once round a ring of two
    assert hybrid.reductions == 2 * full.reductions


def test_policies_with_options_of_single_units() -> None:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, Unit):
            return {"mixed_precision": None, "sharding_strategy": NO_SHARD}
        return isinstance(module, Layer)

    planned = functools.partial(fsdp.plan, stages, world_size=2, precision=MIXED, device="cpu")
    plain = planned(policy=ModuleWrapPolicy({Layer, Unit}))[FULL]
    result = planned(policy=CustomPolicy(choose))[FULL]
    of_adapted = sum(param.nbytes for param in adapted().parameters())
    assert result.param_nbytes == plain.param_nbytes + 6 * of_adapted // 2
    assert result.gathers < plain.gathers


def test_optimizer_bytes_come_from_a_real_step() -> None:
    planned = functools.partial(fsdp.plan, Mlp, world_size=2, strategy=FULL)
    params = planned()[FULL].param_nbytes
    expected = {
        None: 0,
        torch.optim.SGD: 0,
        functools.partial(torch.optim.SGD, momentum=0.9): params,
        torch.optim.AdamW: 2 * params,  # and the step count
    }
    for optimizer, nbytes in expected.items():
        assert planned(optimizer=optimizer)[FULL].optim_nbytes == pytest.approx(nbytes, rel=1e-4)
    result = planned()[FULL]
    in_backward = planned(optimizer=functools.partial(torch.optim.AdamW, fused=True))[FULL].peak_nbytes
    without = replace(result, optim_nbytes=0, step_nbytes=0, peak_nbytes=in_backward - result.optim_nbytes)
    assert planned(optimizer=None)[FULL] == without


def test_an_optimizer_steps_as_on_the_planned_device() -> None:
    """On accelerators torch steps all parameters together unless it is told otherwise, on the CPU one by one."""
    planned = functools.partial(fsdp.plan, Mlp, world_size=2, strategy=FULL, policy=LAYERS)
    together, alone = planned(device="cuda")[FULL], planned(device="cpu")[FULL]
    assert together.step_nbytes == together.param_nbytes and alone.step_nbytes == 3 * 4 * 600 * 601 // 2
    loop = functools.partial(torch.optim.AdamW, foreach=False)
    assert planned(device="cuda", optimizer=loop)[FULL].step_nbytes == alone.step_nbytes
    assert planned(device="cpu", policy=None)[FULL].step_nbytes == 2 * alone.param_nbytes  # an only flat parameter


@on_ranks(2)
def test_wrapped_and_tensor_parallel_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"plan\(\) is for models that are not wrapped yet; fsdp.describe"):
        fsdp.plan(FullyShardedDataParallel(Mlp(8, 1)), world_size=2)

    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    with pytest.raises(NotImplementedError, match="does not count tensor parallelism: plan the model as it is before"):
        fsdp.plan(parallel, world_size=2)


SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
TWO_UNITS = ModuleWrapPolicy({nn.Embedding, nn.Linear})
INVALID: list[tuple[Any, dict[str, Any], type[Exception], str]] = [  # the model, further arguments, and the error
    (Mlp, {"world_size": -1}, ValueError, "world_size must be a number of ranks, 1 or more, but got -1"),
    ("Mlp", {}, TypeError, "model must be an nn.Module or a function that makes one, but got str"),
    (dict, {}, TypeError, "expected the function to make an nn.Module, but it made a dict"),
    (Mlp, {"strategy": HYBRID}, ValueError, "hybrid strategies need shard_size=, the number of ranks"),
    (Mlp, {"world_size": 6, "strategy": HYBRID, "shard_size": 4}, ValueError, "6 is not a multiple of shard_size 4"),
    (Language, {"policy": TWO_UNITS}, ValueError, "parameter 'head.weight' is shared with 'embed.weight'"),
    (Mlp, {"shard_size": "x"}, TypeError, "shard_size must be an int, a number of ranks, but got 'x'"),
    (Mlp, {"optimizer": SGD}, ValueError, "cannot be tried on a 1-D parameter: 'SGD' object is not callable"),
    (Mlp, {"strategy": "FULL"}, TypeError, "must be a ShardingStrategy .* but got 'FULL' of type"),
    (Mlp, {"inputs": TOKENS}, ValueError, r"Mlp does not run with this batch, on the meta device: .* inputs=\(...\)"),
    (Mlp, {"memory": "x"}, ValueError, "memory must be a number of bytes, such as 80GB, 80GiB or 512MB, but got 'x'"),
    (Mlp, {"host_optimizer": True, "device": "cpu"}, ValueError, "host_optimizer=True is for accelerators"),
    (Mlp, {"optimizer": torch.optim.LBFGS}, ValueError, "LBFGS'> cannot be tried on a 1-D parameter"),
]


@pytest.mark.parametrize(("model", "arguments", "kind", "words"), INVALID)
def test_invalid_arguments_are_refused(model: Any, arguments: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        fsdp.plan(model, **{"world_size": 2, **arguments})


def test_memory_sizes_with_units() -> None:
    sizes = {"80GB": 80 * 10**9, "80 GiB": 80 << 30, "1.5m": 1_500_000, "7": 7, 123: 123, "2TB": 2 * 10**12}
    assert {size: as_nbytes(size, "memory") for size in sizes} == sizes


# -- the command ---------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = main(["plan", *arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, output.getvalue(), errors.getvalue()


MODEL = "tests.test_plan:Language"


def test_the_command_prints_the_plan() -> None:
    _, output, _ = run(MODEL, "--world-size", "8", "--memory", "1GB", "--wrap", "Layer", "--batch-tokens", "2x8")
    result = fsdp.plan(Language, world_size=8, policy=ModuleWrapPolicy({Layer}), inputs=TOKENS[[0, 0]], memory="1GB")
    assert output == f"{result}\n"
    title, head, *rows, saved, note = output.splitlines()
    nbytes = in_bytes(result.local_nbytes(1)), in_bytes(result.checkpoint_nbytes)
    assert f"a checkpoint: {nbytes[1]}; with fsdp.checkpoint.Local(copies=1) a host keeps {nbytes[0]} for each" in saved
    assert note == "not counted: the device's context, the backend's buffers, and what the allocator rounds up or keeps"
    assert title == "Language: 1,621,800 parameters in 4 units, 8 ranks"
    assert head.split()[-5:] == ["fits", "1.00", "GB", "from", "ranks"]
    assert [(row.split()[0], *row.split()[-2:]) for row in rows] == [
        ("FULL_SHARD", "yes", "1"),
        ("SHARD_GRAD_OP", "yes", "1"),
        ("NO_SHARD", "yes", "1"),
    ]
    host = run(MODEL, "--world-size", "2", "--host-optimizer")[1]
    assert host == f"{fsdp.plan(Language, world_size=2, host_optimizer=True)}\n"
    assert host.splitlines()[1].split()[10] == "host"
    half = run(MODEL, "--world-size", "2", "--precision", "bf16", "--optimizer", "SGD", "--strategy", "full_shard")
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    expected = fsdp.plan(Language, world_size=2, strategy=FULL, precision=precision, optimizer=torch.optim.SGD)
    assert half == (0, f"{expected}\n", "")


def batch_of_keywords() -> dict[str, Tensor]:
    return {"tokens": torch.zeros(2, 8, dtype=torch.long)}


def test_the_command_prints_json_and_accepts_a_function_of_inputs() -> None:
    """Keyword arguments of a forward are a mapping, as in batches of Hugging Face models."""
    code, output, _ = run(MODEL, "--world-size", "2", "--inputs", "tests.test_plan:batch_of_keywords", "--json")
    result = fsdp.plan(Language, world_size=2, inputs=batch_of_keywords())
    numbers = json.loads(output)
    assert code == 0 and numbers == json.loads(result.to_json())
    full = next(each for each in numbers["strategies"] if each["strategy"] == "FULL_SHARD")
    assert full["peak_nbytes"] == result[FULL].peak_nbytes and full["activation_nbytes"] > 0
    assert result[FULL] == fsdp.plan(Language, world_size=2, inputs=TOKENS[[0, 0]])[FULL]


WRONG = {
    ("--wrap", "Bloc"): "the model has no Bloc; its modules are Embedding, Language, Layer, Linear, ModuleList, Tanh",
    ("--inputs", "missing:batch"): "argument --inputs: No module named 'missing'",
    ("--strategy", "FULL"): "argument --strategy: invalid choice: 'FULL' (choose from",
    ("--optimizer", "Adm"): "argument --optimizer: module 'torch.optim' has no attribute 'Adm'",
    ("--batch-tokens", "8,4"): "argument --batch-tokens: expected sizes such as 8x1024, but got '8,4'",
    ("--device", "gpu"): "Expected one of cpu",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_invalid_command_arguments_give_one_line(arguments: tuple[str, str]) -> None:
    code, output, errors = run(MODEL, "--world-size", "2", *arguments)
    assert (code, output) == (2, "") and errors.startswith("fsdp plan: ") and WRONG[arguments] in errors
    assert errors.count("\n") == 1
