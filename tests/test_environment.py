"""Environment variables: invalid values, unknown names, and values that differ between ranks."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel, environment
from fsdp.runtime import mistakes
from tests.harness.agreeing import UNEQUAL, Chain, build, new_group, raises_soon, train
from tests.harness.pool import on_ranks
from tests.harness.small import StandIn

REPOSITORY = Path(__file__).resolve().parents[1]
WRONG = {
    "FSDP_DEBUG": "yes",
    "FSDP_FORCE_SHARDED": "true",
    "FSDP_SKIP_WRITEBACK_CHECK": "2",
    "FSDP_USE_FULL_PREC_IN_EVAL": "on",
    "FSDP_SHARD_ALIGNMENT": "abc",
    "FSDP_COLLECTIVES": "fast",
}


@pytest.mark.parametrize(("name", "value"), [*WRONG.items(), *(("FSDP_SHARD_ALIGNMENT", text) for text in ("0", "3"))])
def test_invalid_value_is_refused_when_a_module_is_wrapped(name: str, value: str) -> None:
    """The error names the variable, the value and the allowed values."""
    with mock.patch.dict(os.environ, {name: value}), pytest.raises(ValueError) as caught:
        mistakes.check_variables.cache_clear()
        FullyShardedDataParallel(torch.nn.Linear(2, 2), StandIn())
    assert str(caught.value).startswith(f"{name} is {value!r}; it may be ")


def test_every_variable_is_checked() -> None:
    assert set(WRONG) == {variable.name for variable in environment.VARIABLES} - {"FSDP_HOST"}  # which may be any name


def test_allowed_values_are_read() -> None:
    for name, value, expected in (
        ("FSDP_DEBUG", "", False),
        ("FSDP_DEBUG", "0", False),
        ("FSDP_DEBUG", "1", True),
        ("FSDP_COLLECTIVES", "", "auto"),
        ("FSDP_COLLECTIVES", "native", "native"),
        ("FSDP_SHARD_ALIGNMENT", "", None),
        ("FSDP_SHARD_ALIGNMENT", "32", 32),
    ):
        (variable,) = [variable for variable in environment.VARIABLES if variable.name == name]
        with mock.patch.dict(os.environ, {name: value}):
            assert variable.value == expected, (name, value)


def test_unknown_name_warns_once() -> None:
    """The warning lists the names; variables of other programs are ignored."""
    foreign = {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_VERSION": "1"}
    mistakes.check_variables.cache_clear()
    with mock.patch.dict(os.environ, {"FSDP_COLECTIVES": "native", "FSDP_NEW": "", **foreign}):
        with pytest.warns(UserWarning) as caught:
            mistakes.check_variables()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mistakes.check_variables()
    for name, warning in zip(("FSDP_COLECTIVES", "FSDP_NEW"), caught, strict=True):
        told = str(warning.message)
        assert f" {name} is none of fsdp's" in told and all(each in told for each in WRONG), told


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("FSDP_COLLECTIVES", ["", "native", ""], "'auto' on ranks 0 and 2 and 'native' on rank 1"),
        ("FSDP_COLLECTIVES", ["native", "direct", "direct"], "'native' on rank 0 and 'direct' on ranks 1-2"),
        ("FSDP_SHARD_ALIGNMENT", ["32", "64", "32"], "'32' on ranks 0 and 2 and '64' on rank 1"),
        ("FSDP_USE_FULL_PREC_IN_EVAL", ["0", "0", "1"], "'0' on ranks 0-1 and '1' on rank 2"),
    ],
)
@on_ranks(3)
def test_value_that_differs_between_ranks_is_named(name: str, values: list[str], expected: str) -> None:
    """Every rank raises at once, at the first use of a model; with equal values the ranks train afterwards."""
    group = new_group()
    with mock.patch.dict(os.environ, {name: values[dist.get_rank()]}):
        for synchronizes in (False, True):
            with raises_soon() as caught:
                train(build(Chain(UNEQUAL), group, sync_module_states=synchronizes))
            assert str(caught.value) == f"the environment variable {name} is {expected}: set it alike on all ranks"
    train(build(Chain(UNEQUAL), group))


def test_variables_are_read_in_one_file() -> None:
    for path in (REPOSITORY / "fsdp").rglob("*.py"):
        reads = re.search(r"environ\b.*FSDP_|getenv", path.read_text())
        assert path.name == "environment.py" or not reads, path
