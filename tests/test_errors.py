"""The catalogue of errors, row by row: types, and the words that callers match on. What is used too late or too early.

`HERE` is tried in this process, `IN_RANKS` on two ranks; the rows that only take arguments of the constructor are in
`test_wrapper.BAD`. `LATER` and `NOT_HERE` say where the other rows are, so that none is forgotten.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp.flat.ownership as ownership
import fsdp.flat.released as released
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from tests.harness.pool import run_ranks
from tests.harness.sharded import handles_of
from tests.test_ownership import WithoutReset, on_meta
from tests.test_wrapper import BAD, WIDTH, StandIn, batch, build, error_of, net

MODES = [False, True]
both_modes = pytest.mark.parametrize("use_orig_params", MODES)


class Elsewhere(Tensor):
    """Says that it is on some device; there is nothing behind it."""

    @staticmethod
    def __new__(cls, device: str, *shape: int) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::detach":
            return Elsewhere(str(args[0].device), *args[0].shape)
        raise AssertionError(f"{func} of a tensor that is not there")


def on(*devices: str) -> nn.Module:
    """A module with a parameter on each of `devices`."""
    module = nn.Module()
    for index, device in enumerate(devices):
        tensor = torch.ones(2) if device == "cpu" else Elsewhere(device, 2)
        module.register_parameter(f"p{index}", nn.Parameter(tensor))
    return module


# -- construction --------------------------------------------------------------------------------------------------


def _over_a_wrapped_child(**options: Any) -> None:
    inner = build(nn.Linear(2, 2), process_group=StandIn())
    options = {key: [inner] if value is None else value for key, value in options.items()}
    FullyShardedDataParallel(nn.Sequential(nn.ReLU(), nn.Sequential(inner)), StandIn(), **options)


def _nested_enable_wrap() -> None:
    with enable_wrap(wrapper_cls=build, process_group=StandIn()), enable_wrap(wrapper_cls=build):
        wrap(nn.Linear(2, 2))


def _lacking() -> None:
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(WithoutReset())))
    try:
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    finally:
        assert type(module[0]) is nn.Linear and all(p.is_meta for p in module.parameters())


HERE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "Y8": (lambda: _over_a_wrapped_child(ignored_modules=None), ValueError, "should not include FSDP modules"),
    "Y8, ignored_states": (
        lambda: _over_a_wrapped_child(ignored_states=None),
        ValueError,
        "should not include FSDP modules",
    ),
    "Y10": (
        lambda: _over_a_wrapped_child(auto_wrap_policy=ModuleWrapPolicy({nn.ReLU})),
        ValueError,
        "holds no FullyShardedDataParallel yet, but '1.0' in Sequential is one",
    ),
    "Y12": (_nested_enable_wrap, NotImplementedError, "cannot be nested"),
    "Y16, several devices": (
        lambda: FullyShardedDataParallel(on("cuda:0", "cuda:1"), StandIn()),
        RuntimeError,
        "on one device, got cuda:0, cuda:1",
    ),
    "Y16, two kinds": (
        lambda: FullyShardedDataParallel(on("cuda:0", "xpu:0"), StandIn(), device_id="cuda:0"),
        RuntimeError,
        "on one device, got cuda:0, xpu:0",
    ),
    "Y16, CPU and another": (
        lambda: FullyShardedDataParallel(on("cuda:0", "cpu"), StandIn()),
        RuntimeError,
        "on CPU and on cuda:0: pass device_id=",
    ),
    "Y19": (
        lambda: FullyShardedDataParallel(on("cuda:0"), StandIn(), device_id="cpu"),
        ValueError,
        "device_id is cpu, but parameters lie on cuda:0",
    ),
    "Y23": (_lacking, AttributeError, "no reset_parameters() to initialise them: 1.0 (WithoutReset)"),
}


@pytest.mark.parametrize("row", HERE)
def test_construction(row: str) -> None:
    act, kind, words = HERE[row]
    with pytest.raises(kind) as caught:
        act()
    assert words in str(caught.value)


def _without_index(monkeypatch: pytest.MonkeyPatch) -> FullyShardedDataParallel:
    monkeypatch.setattr(ownership, "resolve_device", lambda device: torch.device("cuda", 3))
    return FullyShardedDataParallel(nn.ReLU(), StandIn(), device_id="cuda")


def _ignoring_itself(monkeypatch: pytest.MonkeyPatch) -> FullyShardedDataParallel:
    module = net()
    return FullyShardedDataParallel(module, StandIn(), ignored_modules=[module])


WARNINGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], FullyShardedDataParallel], str]] = {
    "Y9": (_ignoring_itself, "the module being wrapped is in ignored_modules"),
    "Y18": (_without_index, r"device_id='cuda' has no index; the current device, cuda:3, is used"),
    "Y24": (
        lambda _: FullyShardedDataParallel(nn.ModuleList([nn.Linear(2, 2)]), StandIn()),
        "wraps a ModuleList, which has no forward",
    ),
    "Y25": (lambda _: FullyShardedDataParallel(net(), StandIn(0, 1)), "FULL_SHARD works like NO_SHARD"),
}


@pytest.mark.parametrize("row", WARNINGS)
def test_warnings(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, words = WARNINGS[row]
    with pytest.warns(UserWarning, match=words):
        act(monkeypatch)


def _with(*params: nn.Parameter) -> nn.Module:
    module = nn.Module()
    for index, param in enumerate(params):
        module.register_parameter(f"p{index}", param)
    return module


def _parameter(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=requires_grad)


SUPPORTED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Y13": (lambda: _with(_parameter(3), _parameter(3, requires_grad=False)), {}),
    "Y14, dtypes": (lambda: _with(_parameter(3), _parameter(3, dtype=torch.bfloat16)), {}),
    "Y14, integers": (lambda: _with(_parameter(3), _parameter(3, dtype=torch.int8, requires_grad=False)), {}),
    "Y15": (lambda: _with(_parameter()), {}),
    "Y17, Y20: CPU": (lambda: _with(_parameter(3)), {}),
    "Y26": (lambda: _with(_parameter(3)), {"sharding_strategy": ShardingStrategy.NO_SHARD}),
}


@both_modes
@pytest.mark.parametrize("row", SUPPORTED)
def test_what_needs_no_error(row: str, use_orig_params: bool) -> None:
    """FSDP1 refuses these or warns of them (AA1, AA26). That they are right is held by the tests of parity."""
    make, options = SUPPORTED[row]
    FullyShardedDataParallel(make(), StandIn(), use_orig_params=use_orig_params, **options)  # warnings are errors


# -- in use --------------------------------------------------------------------------------------------------------


def _model(use_orig_params: bool, **options: Any) -> FullyShardedDataParallel:
    return build(net(), use_orig_params=use_orig_params, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)


def _forward(model: nn.Module) -> Tensor:
    return model(batch(0, dist.get_rank()))


def _child_first(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    _forward(model.module.layers)
    _forward(model)


def _moved(use_orig_params: bool, first: bool) -> None:
    """With one kind of device, the memory of the shard is moved and not the flat parameter's data."""
    model = _model(use_orig_params)
    if not first:
        _forward(model)
    flat_param, base = handles_of(model)[0].flat_param, model._fsdp_unit.views[0].registration.base
    base.memory[-1] = flat_param.detach().to("meta")
    flat_param.data = flat_param.detach().clone()
    _forward(model)


def _heterogeneous(attribute: str, use_orig_params: bool) -> None:
    options = {attribute: attribute == "use_orig_params" and not use_orig_params}
    module = net()
    module.layers = build(module.layers, **{"use_orig_params": use_orig_params, **options})
    _forward(build(module, use_orig_params=use_orig_params))


def _optimizer_in_backward(use_orig_params: bool) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = _model(use_orig_params)
    _apply_optimizer_in_backward(torch.optim.SGD, [next(model.parameters())], {"lr": 0.1})
    _forward(model)


def _gradients_of_gradients(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    _forward(model).sum().backward(create_graph=True)


def _accumulate_onto_another_shape(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    _forward(model).sum().backward()
    param = max(model.parameters(), key=Tensor.numel)
    assert param.grad is not None
    param.grad.data = torch.zeros(3, 1)
    _forward(model).sum().backward()


def _another_shape(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    param = max(model.parameters(), key=Tensor.numel)
    param.data = torch.zeros(3, 1)
    _forward(model)


def _one_of_a_tie_replaced(use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1].weight = module[0].weight
    model = build(module, use_orig_params=use_orig_params)
    module[1].weight = nn.Parameter(torch.ones_like(module[0].weight))
    _forward(model)


def _change_while_kept(use_orig_params: bool) -> None:
    model = _model(use_orig_params, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    loss = _forward(model).sum()
    param = max(model.parameters(), key=Tensor.numel)
    param.data = torch.zeros_like(param.data)
    loss.backward()
    _forward(model).sum().backward()
    assert not param.any()


def _no_sync_of_a_child(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    model.check_is_root()
    _enter(model.module.layers.no_sync())


def _enter(context: Any) -> None:
    with context:
        pass


def _inside_forward(use: Callable[[FullyShardedDataParallel], Any], use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    model.module.head.register_forward_hook(lambda *_: use(model))
    _forward(model)


def _summon(model: FullyShardedDataParallel, **options: Any) -> None:
    _enter(FullyShardedDataParallel.summon_full_params(model, **options))


def _summon_twice(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    with FullyShardedDataParallel.summon_full_params(model):
        _summon(model)


def _replicated(use_orig_params: bool) -> FullyShardedDataParallel:
    return _model(use_orig_params, sharding_strategy=ShardingStrategy.NO_SHARD)


Case = tuple[Callable[[bool], Any], str]
NO_ERROR = "no error"
IN_RANKS: dict[str, Case | dict[bool, Case]] = {
    "Y27": {False: (lambda mode: _moved(mode, first=True), "RuntimeError: Cannot writeback")},
    "Y28": (_child_first, NO_ERROR),
    "Y29, use_orig_params": (
        lambda mode: _heterogeneous("use_orig_params", mode),
        "ValueError: use_orig_params must be the same",
    ),
    "Y29, limit_all_gathers": (
        lambda mode: _heterogeneous("limit_all_gathers", mode),
        "ValueError: limit_all_gathers must be the same",
    ),
    "Y30": {
        False: (_optimizer_in_backward, "RuntimeError: .* only supported with use_orig_params=True"),
        True: (_optimizer_in_backward, NO_ERROR),
    },
    "Y31": {False: (lambda mode: _moved(mode, first=False), "AssertionError: Cannot writeback")},
    "Y32": (_gradients_of_gradients, "RuntimeError: .* gradients of gradients"),
    "Y33": (_accumulate_onto_another_shape, r"AssertionError: the gradient of '.*' is \(3, 1\) on cpu"),
    "Y34, shape": (_another_shape, r"RuntimeError: Cannot writeback .*\(3, 1\)"),
    "Y34, shared": {True: (_one_of_a_tie_replaced, "NotImplementedError: Cannot writeback '1.weight': .* shared")},
    "Y34, SHARD_GRAD_OP": (_change_while_kept, NO_ERROR),
    "Y35, no_sync": (
        _no_sync_of_a_child,
        "RuntimeError: .* should only be called on the root FSDP instance",
    ),
    "Y36, no_sync": (
        lambda mode: _inside_forward(lambda model: _enter(model.no_sync()), mode),
        "ValueError: .* expected to be in states",
    ),
    "Y36, apply": (
        lambda mode: _inside_forward(lambda model: model.apply(print), mode),
        "ValueError: .* expected to be in states",
    ),
    "Y38, in forward": (
        lambda mode: _inside_forward(_summon, mode),
        "AssertionError: .* Cannot manually unshard parameters during forward/backward",
    ),
    "Y38, twice": (_summon_twice, "AssertionError: .* while they are shown already"),
    "Y39, with_grads": {False: (lambda mode: _summon(_model(mode), with_grads=True), "NotImplementedError: .* is not")},
    "Y39, with_grads on CPU": {
        True: (
            lambda mode: _summon(_model(mode), with_grads=True, offload_to_cpu=True),
            "NotImplementedError: .* is not supported",
        )
    },
    "Y39, offload of NO_SHARD": (
        lambda mode: _summon(_replicated(mode), offload_to_cpu=True),
        "NotImplementedError: .* is not supported",
    ),
    "Y39, rank0_only": (
        lambda mode: _summon(_model(mode), rank0_only=True),
        "NotImplementedError: .*writeback=True with rank0_only=True is not supported",
    ),
    "K12": (
        lambda mode: _inside_forward(lambda model: model._unshard(), mode),
        "AssertionError: .* Cannot manually unshard parameters during forward/backward",
    ),
}


def _case(row: str, use_orig_params: bool) -> Case | None:
    case = IN_RANKS[row]
    return case.get(use_orig_params) if isinstance(case, dict) else case


def _types(act: Callable[[bool], Any], use_orig_params: bool) -> list[str]:
    """The error under each name of a type that it is, most special first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            act(use_orig_params)
        except Exception as error:
            return [f"{kind.__name__}: {error}" for kind in type(error).__mro__]
    return [NO_ERROR]


def _try_all(use_orig_params: bool) -> dict[str, list[str]]:
    found = {}
    for row in IN_RANKS:
        case = _case(row, use_orig_params)
        if case is not None:
            found[row] = _types(case[0], use_orig_params)
    return found


@functools.cache
def errors_in_ranks(use_orig_params: bool) -> list[dict[str, list[str]]]:
    return run_ranks(2, _try_all, use_orig_params)


@pytest.mark.parametrize(
    ("row", "use_orig_params"), [(row, mode) for row in IN_RANKS for mode in MODES if _case(row, mode) is not None]
)
def test_in_use(row: str, use_orig_params: bool) -> None:
    """On every rank alike."""
    case = _case(row, use_orig_params)
    assert case is not None
    for by_row in errors_in_ranks(use_orig_params):
        assert any(re.match(case[1], error, re.DOTALL) for error in by_row[row]), by_row[row]


LATER = {35, 36, 37, *range(40, 54)}  # clipping, hooks and state dicts are not there yet (35 and 36 in part)
NOT_HERE = {21: "test_sync_module_states_on_cpu: no error (AA1)", 54: "test_agreement"}


def test_every_row_has_its_place() -> None:
    held = [*BAD, *HERE, *WARNINGS, *SUPPORTED, *IN_RANKS]
    rows = {int(part[1:]) for key in held for part in key.replace(":", "").replace(",", "").split() if part[0] == "Y"}
    assert rows | LATER | NOT_HERE.keys() >= set(range(1, 55))


# -- what is sharded, used as if it were whole ---------------------------------------------------------------------


class Parts(nn.Module):
    """Parameters of its own, in a normalisation, and behind a parametrization; more ranks than elements in some."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(3, WIDTH)
        nn.utils.parametrizations.weight_norm(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale + self.embedding.weight[0]


class Above(nn.Module):
    """Reaches into a unit below it."""

    def __init__(self, use_orig_params: bool) -> None:
        super().__init__()
        self.below = build(Parts(), use_orig_params=use_orig_params)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.reaches = False

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.below.norm(x) if self.reaches else self.below(x))


def _used_as_if_whole(use_orig_params: bool) -> dict[str, str]:
    model = build(Above(use_orig_params), use_orig_params=use_orig_params)
    parts, x = model.below.module, batch(0, 0)
    rows = torch.zeros(2, dtype=torch.int64)
    uses = {
        "norm.": lambda: parts.norm(x),
        "linear.parametrizations.weight.": lambda: parts.linear.weight,
        "embedding.weight": lambda: parts.embedding(rows),
        "scale" if use_orig_params else "all: linear.parametrizations.weight.": lambda: parts(x),
    }
    found = {}
    for when in ("built", "trained", "shown", "again"):
        with FullyShardedDataParallel.summon_full_params(model) if when == "shown" else warnings.catch_warnings():
            for name, use in uses.items():
                found[f"{when} {name}"] = error_of(use)
        if when != "shown":
            model.module.reaches = True
            found[f"{when} from above, norm."] = error_of(model, x)
            model.module.reaches = False
        model(x).sum().backward()
        assert len(list(model.parameters())) == (9 if use_orig_params else 2)
    return found


@both_modes
def test_a_module_inside_a_unit_is_not_called_by_itself(use_orig_params: bool) -> None:
    """I10: on every rank, whatever part of the parameters it has. Inside `summon_full_params` it can be called."""
    for found in run_ranks(3, _used_as_if_whole, use_orig_params):
        for case, words in found.items():
            if case.startswith("shown"):
                assert words == "no error", case
                continue
            unit = "the Parts unit" if case.startswith("built") and "above" not in case else "unit 'below'"
            pattern = (
                rf"RuntimeError: .*parameter '{case.split()[-1]}\w*' of {unit} is sharded; .* Call the wrapped module"
            )
            assert re.match(pattern, words), (case, words)


def _read_parameters_of_a_child() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.ones(2, 3, 8)
    with torch.no_grad():
        expected = layer(x)
        with pytest.raises(RuntimeError, match="Where the module around reads it"):
            build(copy.deepcopy(layer), auto_wrap_policy=ModuleWrapPolicy({nn.MultiheadAttention}))(x)
        torch.testing.assert_close(build(layer)(x), expected)


def test_the_advice_where_a_module_reads_parameters_of_its_child() -> None:
    run_ranks(2, _read_parameters_of_a_child)


def test_hooks_of_a_unit_at_rest() -> None:
    """Users' own pre-hooks stay, and a submodule can be neither copied nor pickled."""
    module = net()
    seen: list[nn.Module] = []
    module.head.register_forward_pre_hook(lambda *_: seen.append(module))
    model = build(module, process_group=StandIn(), use_orig_params=True)
    assert error_of(module.head, batch(0, 0)).startswith(
        "RuntimeError: a Linear was called by itself: parameter 'head."
    )
    assert error_of(copy.deepcopy, module.head).startswith("RuntimeError: copy.deepcopy of the Linear alone would be")
    assert error_of(pickle.dumps, module.layers[0]).startswith("TypeError: cannot pickle a module: parameter 'layers.0")
    assert seen and model.module is module
    whole = build(net(), process_group=StandIn(0, 1), use_orig_params=True)
    assert error_of(whole.module.head, batch(0, 0)) == "no error"


class Keeping(nn.Module):
    """Keeps what it reads in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 30)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        self.kept = {"leaf": weight, "view": weight.t(), "row": weight[3], "detached": weight.detach()}
        return self.linear(x) + weight[:, 0]


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": Tensor.sum,
    "clone": Tensor.clone,
    "add": lambda tensor: tensor + 1,
    "multiply": lambda tensor: torch.mul(tensor, tensor),
    "cast": lambda tensor: tensor.to(torch.bfloat16),
    "matrix": lambda tensor: tensor @ torch.ones(tensor.shape[-1], 2),
    "linear": lambda tensor: F.linear(torch.ones(2, tensor.shape[-1]), tensor),
    "normalised": lambda tensor: F.layer_norm(tensor, tensor.shape),
    "stacked": lambda tensor: torch.stack([tensor, tensor]),
    "copied": lambda tensor: torch.zeros(tensor.shape).copy_(tensor),
    "maximum": lambda tensor: tensor.max().item(),
    "list": lambda tensor: tensor.detach().tolist(),
    "view": lambda tensor: tensor.flatten().sum(),
    "write": lambda tensor: tensor.detach().zero_(),
    "accumulate": lambda tensor: tensor.detach().add_(1),
}


def _read_what_was_kept(debug: bool) -> dict[str, str]:
    """What each read of each kept tensor gives: an error, or whether all of it is NaN."""
    os.environ["FSDP_DEBUG"] = "1" if debug else "0"
    try:
        return {**_reads_in(False), **_reads_in(True)}
    finally:
        del os.environ["FSDP_DEBUG"]


def _reads_in(use_orig_params: bool) -> dict[str, str]:
    found = {}
    model = build(nn.Sequential(Keeping(), nn.Linear(30, 2)), use_orig_params=use_orig_params,
                  auto_wrap_policy=ModuleWrapPolicy({Keeping}))  # fmt: skip
    for when in ("forward", "backward"):
        output = model(torch.ones(2, 40))
        if when == "backward":
            output.sum().backward()
        for kept, tensor in model[0].module.kept.items():
            for read, function in READS.items():
                try:
                    result = torch.as_tensor(function(tensor))
                    words = "NaN" if result.isnan().all() else f"values {result.flatten()[:3]}"
                except RuntimeError as error:
                    words = f"RuntimeError: {error}"
                found[f"{use_orig_params} {when} {kept} {read}"] = words
        model.zero_grad()
    model(torch.ones(2, 40)).sum().backward()
    assert all(p.grad is not None and not p.grad.isnan().any() for p in model.parameters() if p.numel())
    return found


def test_what_was_kept_from_a_forward_can_be_read_without_harm() -> None:
    """The process lives on, and nothing looks like a value; torch's dies."""
    for found in run_ranks(2, _read_what_was_kept, False):
        assert len(found) == 2 * 2 * 4 * len(READS)
        wrong = {
            case: words for case, words in found.items() if words != "NaN" and not words.startswith("RuntimeError")
        }
        assert not wrong


def test_debugging_names_the_parameter_that_was_kept() -> None:
    for found in run_ranks(2, _read_what_was_kept, True):
        wrong = {
            case: words
            for case, words in found.items()
            if not re.match(r"RuntimeError: .*parameter 'linear.weight' of unit '0' is sharded; .* kept from", words)
            and not case.endswith(" list")
        }
        assert not wrong


def test_without_address_space_nothing_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError

    released._address_space.cache_clear()
    monkeypatch.setattr(released, "map_at", refuse)
    monkeypatch.setattr(released, "_storages_refuse", lambda: False)  # as where torch is not built for CUDA
    storage = torch.ones(10).untyped_storage()
    storage.resize_(0)
    tensor = torch.empty(0).set_(storage)
    released.guard_released(tensor, 40)
    assert storage.nbytes() == 0 and storage.data_ptr() == 0
    monkeypatch.undo()
    released.guard_released(tensor, 40)
    assert storage.nbytes() == 0
    with pytest.raises(RuntimeError):
        storage.data_ptr()
