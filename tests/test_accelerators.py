"""What the engine asks of an accelerator, shown on CPU: the meta device, or a recorder, stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fsdp.comm.collectives as collectives_module
import fsdp.flat.ownership as ownership_module
from fsdp.comm.collectives import Communicator, Groups
from fsdp.comm.streams import AcceleratorStreams, HostStreams
from fsdp.flat.ownership import Ignored, move_to, owned_params
from fsdp.runtime.nested import to_device
from fsdp.sharded_grad_scaler import ShardedGradScaler

CPU, AWAY = torch.device("cpu"), torch.device("meta")


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, exact", [(1, False), (2, True), (3, False), (6, False), (7, False), (8, True)])
def test_nccl_averages_low_precision_only_where_it_is_exact(size: int, exact: bool) -> None:
    """FD63: NCCL multiplies by bf16(1/n), which is off by 0.195 % for n = 3, 6, 12, 24, and by -0.195 % for 7."""
    communicator = Communicator(Groups(mock.Mock(), 0, size, None, 0, 1), HostStreams())
    with mock.patch.object(collectives_module, "_backend", return_value="nccl"):
        low = communicator._averaging(torch.bfloat16, AWAY)
        high = communicator._averaging(torch.float32, AWAY)
    by_hand = (dist.ReduceOp.SUM, 1.0, float(size))
    assert low == ((dist.ReduceOp.AVG, 1.0, 1.0) if exact else by_hand)
    assert high == ((dist.ReduceOp.AVG, 1.0, 1.0) if size > 1 else by_hand)


def test_gathers_and_reductions_have_one_priority() -> None:
    """FD69: a communicator keeps the order of its collectives: a gather waits behind a reduction that is starved."""
    with mock.patch("torch.Stream") as stream:
        AcceleratorStreams(torch.device("cuda", 0))
    assert [call.kwargs for call in stream.call_args_list] == [{"priority": -1}] * 2


# -- copies between the host and the device ----------------------------------------------------------------------------


class Copies(TorchFunctionMode):
    """Notes where each ``Tensor.to`` leads, and whether it blocks the host; what is ``pinned`` says so, what is away
    comes as ones, and with ``stays`` nothing goes there."""

    def __init__(self, *, pinned: bool = False, stays: bool = False) -> None:
        super().__init__()
        self.pinned, self.stays = pinned, stays
        self.blocks: list[bool] = []
        self.targets: list[torch.device] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.is_pinned:
            return self.pinned
        if func is Tensor.to and isinstance(args[1], torch.device):
            self.blocks.append(not (kwargs or {}).get("non_blocking", False))
            self.targets.append(args[1])
            if self.stays:
                return args[0]
            if args[0].is_meta:
                return torch.ones(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_may_be_refilled_at_once(pinned: bool) -> None:
    """FD64: a copy of page-locked memory goes on while its owner fills it with the next batch."""
    with Copies(pinned=pinned) as copies:
        moved = to_device({"x": torch.ones(3)}, AWAY)
    assert moved["x"].is_meta and copies.blocks == [pinned]
    with Copies() as copies:
        to_device(torch.ones(3, device=AWAY), CPU)
    assert copies.blocks == [True]


def test_a_scale_that_goes_to_the_host_is_waited_for() -> None:
    """FD64: the loss is on CPU, and the scale on the device."""
    scaler = ShardedGradScaler("cpu", init_scale=1.0)
    scaler._scale = torch.ones((), device=AWAY)
    with Copies() as copies:
        assert scaler.scale(torch.tensor(3.0)) == 3.0
    assert copies.blocks == [True]


# -- where a unit computes ---------------------------------------------------------------------------------------------


@contextmanager
def accelerator(device: torch.device) -> Iterator[None]:
    with mock.patch.object(ownership_module, "default_device", return_value=device):
        yield


def test_a_module_on_cpu_goes_to_the_accelerator() -> None:
    """FD65: torch computes on the current device; nothing here trained on CPU without a word."""
    module = nn.Linear(3, 3)
    module.register_buffer("mean", torch.zeros(3))
    params = dict(module.named_parameters())
    owned = owned_params(module, Ignored(), "it")
    with accelerator(AWAY):
        warned = pytest.warns(UserWarning, match=r"moved to its current device, meta.*Pass device_id=")
        with warned, Copies(stays=True) as copies:
            assert move_to(module, owned, Ignored(), None) == AWAY
        assert copies.targets == [AWAY] * 3
        assert all(params[name] is param for name, param in module.named_parameters())
        assert move_to(nn.Linear(3, 3), owned_params(nn.Linear(3, 3), Ignored(), "it"), Ignored(), "cpu") == CPU
    with accelerator(CPU):
        assert move_to(nn.Linear(3, 3), owned_params(nn.Linear(3, 3), Ignored(), "it"), Ignored(), None) == CPU


def test_a_unit_without_parameters_computes_where_those_in_it_do() -> None:
    """FD65: its streams and the device of its inputs are those of the whole tree if it is the root."""
    for inner in ([AWAY], [CPU, AWAY]):
        assert move_to(nn.Identity(), [], Ignored(), None, inner) == AWAY
    with accelerator(AWAY):
        assert move_to(nn.Identity(), [], Ignored(), None, [CPU]) == CPU
        assert move_to(nn.Identity(), [], Ignored(), None) == AWAY
