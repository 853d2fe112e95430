"""The short examples, each run as a script on two ranks and compared with the expected output."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp.__main__ import main
from tests.harness.pool import run_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# By example: patterns of the output, in order, whose groups are numbers.
PRINTS = {
    "minimal.py": r"step 10: loss \d.*step 50: loss \d",
    "accumulation.py": r"every time: 16 reductions.*no_sync: 4 reductions.*up to rounding: True",
    "cpu_offload.py": r"step 3: loss \d.*parameters and optimizer state are on cpu",
    "custom_policy.py": r"step 5: loss [012]\..*layers\.1\.router Router .* SHARD_GRAD_OP .* float32  ",
    "ema.py": r"loss of the last weights (?P<larger>\S+), of their average (?P<smaller>\S+)\n.*back: True; 6 tensors",
    "export_plain.py": r"from model\.pt computes.*: True.*from the sharded checkpoint computes.*: True",
    "load_pretrained.py": r"(?P<smaller>[\d,]+) bytes on this rank, of (?P<larger>[\d,]+) in 4 .*the last bit: True",
    "token_mean.py": r"one process's by [1-9]\d%\n.*up to rounding: True",
    "experts.py": r"Experts .* experts over 2 ranks, .* divided by 4 .*8 experts in the state.*up to rounding: True",
    "muon.py": r"step 20: loss 0\..*the same losses: True; this rank owns 32,768 of 65,536 elements",
    "lora.py": r"step 20: loss 0\.00.*parameters (?P<larger>[\d,]+), gradients (?P<smaller>[\d,]+),.*96%",
    "rollout.py": r"step 10: reward 0\.\d.*outputs equal: True\nsent \d+% of the elements",
    "meta_init.py": r"(?P<smaller>[\d,]+) of (?P<larger>[\d,]+) bytes on this rank; all .*: True",
}


def _run(path: str, options: list[str]) -> str:
    printed = io.StringIO()
    with (
        redirect_stdout(printed),
        mock.patch.object(sys, "argv", [path, *options]),
        mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_prints_the_expected_lines(name: str, tmp_path: Path) -> None:
    options = ["--to", str(tmp_path)] if name == "export_plain.py" else []
    printed, *of_others = run_ranks(4 if name == "experts.py" else 2, _run, str(EXAMPLES / name), options)
    found = re.search(PRINTS[name], printed, re.DOTALL)
    assert found is not None, printed
    numbers = {key: float(value.replace(",", "").rstrip(",")) for key, value in found.groupdict().items()}
    assert not numbers or numbers["smaller"] < numbers["larger"]
    assert set(of_others) == {""}


def test_ddp_torch_fsdp_and_this_package_print_the_same_losses() -> None:
    """One script runs with DDP, torch's FSDP1 and this package."""
    names = ["1_ddp.py", "2_torch_fsdp.py", "3_fsdp.py"]
    ddp, torchs, ours = (run_ranks(2, _ignoring_warnings, str(EXAMPLES / "ddp_to_fsdp" / name))[0] for name in names)
    assert "step 20: loss 3." in ddp and ddp == torchs == ours


def _ignoring_warnings(path: str, options: list[str] | None = None) -> str:
    import warnings

    warnings.simplefilter("ignore")  # torch's deprecation warning of FSDP1
    return _run(path, options or [])


def test_a_run_on_fsdp1_or_ddp_goes_on_with_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the README run, each script in ranks of the pool."""
    text = (EXAMPLES / "from_fsdp1" / "README.md").read_text()
    commands = [
        shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES / "from_fsdp1")
    losses: dict[str, list[str]] = {}
    for command in commands:
        if command[:2] == ["fsdp", "convert"]:
            assert main(command[1:]) == 0
        elif command[0] == "torchrun":
            script, *options = command[4:]
            options = [str(tmp_path / option) if "runs" in option else option for option in options]
            printed = run_ranks(int(command[3]), _ignoring_warnings, str(EXAMPLES.parent / script), options)[0]
            losses[" ".join(command[4:])] = printed.splitlines()[-5:]
    assert len(losses) == 6 and len({*map(tuple, losses.values())}) == 1, losses
    found = next(iter(losses.values()))
    assert "\n".join(found) in text, found


def test_every_example_is_short_and_shows_its_command_line() -> None:
    for path in EXAMPLES.rglob("*.py"):
        name = str(path.relative_to(EXAMPLES))
        if name not in ("train_gpt.py", "resume_elastic.py"):
            assert len(path.read_text().splitlines()) <= 150
        if name != "resume_elastic.py":
            assert f"examples/{name}" in path.read_text(), f"{name} does not say how it is started"
