"""The short examples, each run as a script in two ranks: what they print is what they claim."""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fsdp import FullyShardedDataParallel
from fsdp.compat import disable_dcp, unpatch
from tests.harness.pool import run_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
README = (EXAMPLES.parent / "README.md").read_text()

# What each prints, in part: patterns in their order, whose groups are numbers.
PRINTS = {
    "minimal.py": r"step 10: loss \d.*step 50: loss \d",
    "accumulation.py": r"every time: 16 reductions.*no_sync: 4 reductions.*up to rounding: True",
    "cpu_offload.py": r"step 3: loss \d.*parameters and optimizer state are on cpu",
    "custom_policy.py": r"step 5: loss [012]\..*layers\.1\.router Router .* SHARD_GRAD_OP .* float32  ",
    "ema.py": r"loss of the last weights (?P<larger>\S+), of their average (?P<smaller>\S+)\n.*back: True; 6 tensors",
    "export_plain.py": r"from model\.pt computes.*: True.*from the sharded checkpoint computes.*: True",
    "lora.py": r"step 20: loss 0\.00.*parameters (?P<larger>[\d,]+), gradients (?P<smaller>[\d,]+),.*96%",
    "meta_init.py": r"(?P<smaller>[\d,]+) of (?P<larger>[\d,]+) bytes on this rank; all .*: True",
}


def _run(path: str, options: list[str]) -> str:
    printed = io.StringIO()
    with (
        redirect_stdout(printed),
        mock.patch.object(sys, "argv", [path, *options]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_does_what_it_says(name: str, tmp_path: Path) -> None:
    options = ["--to", str(tmp_path)] if name == "export_plain.py" else []
    printed, of_others = run_ranks(2, _run, str(EXAMPLES / name), options)
    found = re.search(PRINTS[name], printed, re.DOTALL)
    assert found is not None, printed
    numbers = {key: float(value.replace(",", "").rstrip(",")) for key, value in found.groupdict().items()}
    assert not numbers or numbers["smaller"] < numbers["larger"]
    assert of_others == ""


def test_from_ddp_with_the_same_losses() -> None:
    """The same script for DDP, torch's FSDP1 and this package: all three print the same."""
    names = ["1_ddp.py", "2_torch_fsdp.py", "3_fsdp.py"]
    ddp, torchs, ours = (run_ranks(2, _ignoring_warnings, str(EXAMPLES / "ddp_to_fsdp" / name))[0] for name in names)
    assert "step 20: loss 3." in ddp and ddp == torchs == ours


def _ignoring_warnings(path: str) -> str:
    import warnings

    warnings.simplefilter("ignore")  # torch says of its own interface that it is not to be used for long any more
    return _run(path, [])


def _go_on(snippets: list[str], directory: str) -> list[str]:
    """Each on its own, after a step of what the README's first example makes; returns what the first ones saved."""
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before, disable = os.getcwd(), (disable_dcp, unpatch)
    os.chdir(directory)
    try:
        for code in snippets:
            names = {"FSDP": FullyShardedDataParallel, "model": model, "optimizer": optimizer, "step": 0}
            exec(code, {**names, "torch": torch, "rank": dist.get_rank()})
            if "enable_dcp()" in code:
                assert list(get_model_state_dict(model)) == ["weight", "bias"]
            if "patch()" in code:
                assert torch.distributed.fsdp.FullyShardedDataParallel is FullyShardedDataParallel
        return sorted(os.listdir(directory))
    finally:
        os.chdir(before)
        for undo in disable:
            undo()


def test_the_readme_s_other_snippets_run(tmp_path: Path) -> None:
    """Those that go on from a model; whole programs are run where what they print is looked at."""
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    others = [code for code in snippets if "FullyShardedDataParallel" not in code and "fsdp.plan(" not in code]
    assert len(others) == 4
    assert run_ranks(2, _go_on, others, str(tmp_path))[0] == ["checkpoints", "step_1000"]


def test_every_example_is_short_and_says_how_it_is_started() -> None:
    for path in EXAMPLES.rglob("*.py"):
        name = str(path.relative_to(EXAMPLES))
        if name not in ("train_gpt.py", "resume_elastic.py"):
            assert len(path.read_text().splitlines()) <= 150
        if name != "resume_elastic.py":
            assert f"examples/{name}" in path.read_text(), f"{name} does not say how it is started"
