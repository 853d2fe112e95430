"""Errors of wrong use: types and words that callers match, and the remedy where a released parameter is read.

Wrong arguments of the constructor are in `test_wrapper`.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp.flat.ownership as ownership
from fsdp import FullyShardedDataParallel
from fsdp.comm import streams
from fsdp.comm.versions import STORAGES_SWAP
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net, Unit
from tests.harness.pool import on_ranks
from tests.harness.sharded import handles_of
from tests.harness.small import WIDTH, StandIn, batch, build, error_of, net
from tests.harness.strategies import both_modes


class OnDevice(Tensor):
    """A tensor that reports some device and has no memory."""

    @staticmethod
    def __new__(cls, device: str, *shape: int) -> OnDevice:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::detach":
            return OnDevice(str(args[0].device), *args[0].shape)
        raise AssertionError(f"{func} of a tensor without memory")


def on(*devices: str) -> nn.Module:
    """Return a module with a parameter on each of `devices`."""
    module = nn.Module()
    for index, device in enumerate(devices):
        tensor = torch.ones(2) if device == "cpu" else OnDevice(device, 2)
        module.register_parameter(f"p{index}", nn.Parameter(tensor))
    return module


# -- construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "device_id", "kind", "words"),
    [
        (("cuda:0", "cuda:1"), None, RuntimeError, "on one device, got cuda:0, cuda:1"),
        (("cuda:0", "xpu:0"), "cuda:0", RuntimeError, "on one device, got cuda:0, xpu:0"),
        (("cuda:0", "cpu"), None, RuntimeError, "on CPU and on cuda:0: pass device_id="),
        (("cuda:0",), "cpu", ValueError, "device_id is cpu, but parameters lie on cuda:0"),
    ],
)
def test_parameters_must_lie_on_one_device(
    devices: tuple[str, ...], device_id: str | None, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        FullyShardedDataParallel(on(*devices), StandIn(), device_id=device_id)


def test_device_without_index_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "resolve_device", lambda device: torch.device("cuda", 3))
    with pytest.warns(UserWarning, match=r"device_id='cuda' has no index; the current device, cuda:3, is used"):
        FullyShardedDataParallel(nn.ReLU(), StandIn(), device_id="cuda")


def test_device_is_found_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "default_device", lambda: torch.device("cuda", 3))
    asked = ("cuda", torch.device("cuda"), "cuda:1", "cpu")
    assert [*map(str, map(streams.resolve_device, asked))] == ["cuda:3", "cuda:3", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match=r"device_id='xpu' is not available: .* default device is 'cuda:3'"):
        streams.resolve_device("xpu")


# -- in use --------------------------------------------------------------------------------------------------------


def _model(use_orig_params: bool, **options: Any) -> FullyShardedDataParallel:
    return build(net(), use_orig_params=use_orig_params, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)


def _forward(model: nn.Module) -> Tensor:
    return model(batch(0))


@pytest.mark.parametrize("trained, kind", [(False, RuntimeError), (True, AssertionError)])
@on_ranks(2)
def test_moved_shard_is_refused(trained: bool, kind: type[Exception]) -> None:
    """The memory of the shard moves, as the flat parameter's data would on a machine with an accelerator."""
    model = _model(use_orig_params=False)
    if trained:
        _forward(model)
    flat_param, base = handles_of(model)[0].flat_param, model._fsdp_unit.views[0].registration.base
    base.memory[-1] = flat_param.detach().to("meta")
    flat_param.data = flat_param.detach().clone()
    with pytest.raises(kind, match="Cannot writeback"):
        _forward(model)


@both_modes
@on_ranks(2)
def test_gradient_of_another_shape_is_not_accumulated_into(use_orig_params: bool) -> None:
    model = _model(use_orig_params)
    _forward(model).sum().backward()
    param = max(model.parameters(), key=Tensor.numel)
    assert param.grad is not None
    param.grad.data = torch.zeros(3, 1)
    with pytest.raises(AssertionError, match=r"the gradient of '.*' is \(3, 1\) on cpu"):
        _forward(model).sum().backward()


# -- sharded parameters used as full ones --------------------------------------------------------------------------


def parts_of_many_kinds() -> nn.Module:
    """Build direct parameters, a normalisation and a parametrization; some have fewer elements than there are ranks."""
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return Net(
        lambda m, x: m.norm(m.linear(x)) * m.scale + m.embedding.weight[0],
        scale=nn.Parameter(torch.ones(1)),
        norm=nn.LayerNorm(WIDTH),
        linear=linear,
        embedding=nn.Embedding(3, WIDTH),
    )


@both_modes
@on_ranks(3)
def test_call_of_a_module_inside_a_unit_is_refused(use_orig_params: bool) -> None:
    """On every rank, also without elements of the parameters. Inside `summon_full_params` the call is allowed."""
    net = Net(  # a parent that may read into a nested unit
        lambda m, x: m.linear(m.below.norm(x) if m.reaches else m.below(x)),
        below=build(parts_of_many_kinds(), use_orig_params=use_orig_params),
        linear=nn.Linear(WIDTH, WIDTH),
        reaches=False,
    )
    model = build(net, use_orig_params=use_orig_params)
    parts, x = model.below.module, batch(0, 0)
    rows = torch.zeros(2, dtype=torch.int64)
    uses = {
        "norm.": lambda: parts.norm(x),
        "linear.parametrizations.weight.": lambda: parts.linear.weight,
        "embedding.weight": lambda: parts.embedding(rows),
        "scale" if use_orig_params else "linear.parametrizations.weight.original": lambda: parts(x),
    }
    for moment in ("built", "trained", "summoned", "again"):
        with FullyShardedDataParallel.summon_full_params(model) if moment == "summoned" else warnings.catch_warnings():
            found = {name: error_of(use) for name, use in uses.items()}
        if moment == "summoned":
            assert set(found.values()) == {"no error"}, found
        else:
            unit = "the Net unit" if moment == "built" else "unit 'below'"
            for name, words in found.items():
                assert re.match(_refusal(name, unit), words), (moment, name, words)
            model.module.reaches = True
            assert re.match(_refusal("norm.", "unit 'below'"), error_of(model, x)), moment
            model.module.reaches = False
        model(x).sum().backward()
        assert len(list(model.parameters())) == (9 if use_orig_params else 2)


def _refusal(parameter: str, unit: str) -> str:
    return rf"RuntimeError: .*parameter '{parameter}\w*' of {unit} is sharded; .* Call the wrapped module"


@on_ranks(2)
def test_error_in_a_parent_that_reads_parameters_of_a_child_suggests_to_wrap_the_parent() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.ones(2, 3, 8)
    with torch.no_grad():
        expected = layer(x)
        with pytest.raises(RuntimeError, match="Where the module around reads it"):
            build(copy.deepcopy(layer), auto_wrap_policy=ModuleWrapPolicy({nn.MultiheadAttention}))(x)
        torch.testing.assert_close(build(layer)(x), expected)


def test_submodule_of_a_unit_can_be_neither_called_nor_copied() -> None:
    """Users' own pre-hooks stay."""
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


def _reads_in(use_orig_params: bool, reads: dict[str, Callable[[Tensor], Any]]) -> dict[str, str]:
    """Return the result of each of `reads` of each kept tensor: an error, "NaN" or values."""

    def forward(m: Any, x: Tensor) -> Tensor:
        weight = m.linear.weight
        m.kept = {"leaf": weight, "view": weight.t(), "row": weight[3], "detached": weight.detach()}
        return m.linear(x) + weight[:, 0]

    found = {}
    net, policy = nn.Sequential(Unit(forward, linear=nn.Linear(40, 30)), nn.Linear(30, 2)), ModuleWrapPolicy({Unit})
    model = build(net, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    for moment in ("forward", "backward"):
        output = model(torch.ones(2, 40))
        if moment == "backward":
            output.sum().backward()
        for kept, tensor in model[0].module.kept.items():
            for read, function in reads.items():
                try:
                    result = torch.as_tensor(function(tensor))
                    words = "NaN" if result.isnan().all() else f"values {result.flatten()[:3]}"
                except RuntimeError as error:
                    words = f"RuntimeError: {error}"
                found[f"{use_orig_params} {moment} {kept} {read}"] = words
        model.zero_grad()
    model(torch.ones(2, 40)).sum().backward()
    assert all(p.grad is not None and not p.grad.isnan().any() for p in model.parameters() if p.numel())
    return found


needs_guards = pytest.mark.skipif(not STORAGES_SWAP, reason="this torch cannot guard released memory")


@pytest.mark.parametrize("debug", [pytest.param("0", marks=needs_guards), "1"])
@on_ranks(2)
def test_reads_of_tensors_kept_from_a_forward_raise_or_give_nan(debug: str) -> None:
    """The process lives on, and no read returns values; torch's FSDP1 crashes."""
    os.environ["FSDP_DEBUG"] = debug
    writes = ("write", "accumulate") if debug == "1" else ()  # the debug pool keeps the memory, so a write is possible
    reads = {name: read for name, read in READS.items() if name not in writes}
    found = {**_reads_in(False, reads), **_reads_in(True, reads)}
    assert len(found) == 2 * 2 * 4 * len(reads)
    for case, words in found.items():
        assert words == "NaN" or words.startswith("RuntimeError"), (case, words)
