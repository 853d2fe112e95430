"""Five training scripts for DDP, and one for FSDP1: `--diff` and an edit of each line that it names make them train
here as before.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.consensus import CPU, TrainingRanks
from fsdp.tools.migrate import Script
from tests.harness.pool import run_ranks

SCRIPTS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "ddp_scripts").glob("[a-z]*.py"))}
del SCRIPTS["model"]

WRAPPED = "broadcast_buffers=True, use_orig_params=True, sync_module_states=True"
UNUSED = f"reduce_unused=True, {WRAPPED}"
SCALER = 'from fsdp.sharded_grad_scaler import ShardedGradScaler\n{}ShardedGradScaler("cpu", enabled=True)'


def _policy(line: str, layer: str) -> str:
    """Return the wrapping with the policy that the advice asks for."""
    at, _, name = layer.rpartition(".")
    imports = "from fsdp.wrap import ModuleWrapPolicy\n" + (f"from {at} import {name}\n" if at else "")
    return f"{imports}{line.removesuffix(')')}, auto_wrap_policy=ModuleWrapPolicy({{{name}}}))"


# The advice to each named line, done. "" takes a condition off the lines under it.
BY_HAND: dict[str, dict[str, str]] = {
    "fsdp1": {},
    "tutorial": {
        (line := f"self.model = FSDP(self.model, {UNUSED})"): _policy(line, "torch.nn.Linear"),
        "if self.gpu_id == 0 and epoch % self.save_every == 0:": "if epoch % self.save_every == 0:",
    },
    "mingpt": {
        (line := f"self.model = FSDP(self.model, {WRAPPED})"): _policy(line, "tests.ddp_scripts.model.Block"),
        "self.optimizer.load_state_dict(snapshot.optimizer_state)": (
            "self.optimizer.load_state_dict("
            "FSDP.optim_state_dict_to_load(self.model, self.optimizer, snapshot.optimizer_state))"
        ),
        "optimizer_state=self.optimizer.state_dict(),": "optimizer_state=FSDP.optim_state_dict(model, self.optimizer),",
        "if self.local_rank == 0 and epoch % self.save_every == 0:": "if epoch % self.save_every == 0:",
    },
    "nanogpt": {
        'scaler = torch.amp.GradScaler("cpu", enabled=True)': SCALER.format("scaler = "),
        'optimizer.load_state_dict(checkpoint["optimizer"])': (
            'optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optimizer"]))'
        ),
        "if ddp:": "",
        (line := f"model = FSDP(model, {WRAPPED})"): _policy(line, "Layer"),
        "if iter_num % eval_interval == 0 and master_process:": "if iter_num % eval_interval == 0:",
        '"optimizer": optimizer.state_dict(),': '"optimizer": FSDP.optim_state_dict(model, optimizer),',
    },
    "diffwave": {
        'self.scaler = torch.amp.GradScaler("cpu", enabled=True)': SCALER.format("self.scaler = "),
        '"optimizer": self.optimizer.state_dict(),': (
            '"optimizer": FSDP.optim_state_dict(self.model, self.optimizer),'
        ),
        'self.optimizer.load_state_dict(state_dict["optimizer"])': (
            "self.optimizer.load_state_dict("
            'FSDP.optim_state_dict_to_load(self.model, self.optimizer, state_dict["optimizer"]))'
        ),
        "if self.is_master:": "",
        (line := f"model = FSDP(model, {WRAPPED})"): _policy(line, "tests.ddp_scripts.model.Block"),
    },
    "dit": {
        (line := f"model = FSDP(model.to(device), {WRAPPED})"): _policy(line, "tests.ddp_scripts.model.Block"),
        'print(f"DiT Parameters: {sum(p.numel() for p in model.parameters()):,}")': (
            'import fsdp\nprint(f"DiT Parameters: {fsdp.num_params(model):,}")'
        ),
        "update_ema(ema, model.module, decay=0)": "update_ema(ema, model, decay=0)",
        "update_ema(ema, model.module)": "update_ema(ema, model)",
        (line := "ema = deepcopy(model).to(device)"): line,
        "if rank == 0:": "",
        '"opt": opt.state_dict(),': '"opt": FSDP.optim_state_dict(model, opt),',
    },
}


def _under(condition: str, *lines: str) -> dict[str, str]:
    return {line: f"if {condition}:\n    {line}" for line in lines}


# The lines that print or write in branches that all ranks enter now: they keep the condition.
WRITES: dict[str, dict[str, str]] = {
    "tutorial": _under(
        "self.gpu_id == 0",
        "torch.save(snapshot, self.snapshot_path)",
        'print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}")',
    ),
    "mingpt": _under("self.local_rank == 0", "torch.save(asdict(snapshot), self.snapshot_path)"),
    "nanogpt": _under(
        "master_process",
        "print(f\"step {iter_num}: train loss {estimated['train']:.4f}, val loss {estimated['val']:.4f}\")",
        'torch.save(checkpoint, "ckpt.pt")',
    ),
    "diffwave": {
        'torch.save(self.state_dict(), f"{self.model_dir}/{save_basename}")': (
            'state = self.state_dict()\nif self.is_master:\n    torch.save(state, f"{self.model_dir}/{save_basename}")'
        ),
        **_under(
            "self.is_master",
            "os.unlink(link_name)",
            "os.symlink(save_basename, link_name)",
            "self._write_summary(self.step, loss)",
        ),
    },
    "dit": _under("rank == 0", 'torch.save(checkpoint, f"{step:07d}.pt")'),
}

# The statement before which the model has to be wrapped.
WRAP_BEFORE = {
    "mingpt": "self._load_snapshot()",
    "nanogpt": 'if init_from == "resume":',
    "dit": "ema = deepcopy(model).to(device)",
}


def _done_by_hand(name: str) -> str:
    """Return the script after ``--diff``, with each line that is named, and no other, as the tables above have it."""
    script = Script(SCRIPTS[name])
    lines, done = script.migrated().splitlines(), dict(BY_HAND[name])
    imports = len(lines) - len(SCRIPTS[name].splitlines())  # lines that --diff adds
    advice = [(finding.line + imports, finding.advice) for finding in script.findings if finding.kind == "by hand"]
    assert (name in WRAP_BEFORE) is any("wrap the model before this" in text for _, text in advice)
    assert (name in WRITES) is any("keep the condition for what prints or writes" in text for _, text in advice)
    wrapping = next(number for number, line in enumerate(lines, 1) if " = FSDP(" in line)
    moved = [wrapping] if name in WRAP_BEFORE else []
    for number in sorted({*moved, *(number for number, _ in advice)}, reverse=True):
        line = lines[number - 1]
        indent, new = line[: len(line) - len(line.lstrip())], done.pop(line.strip())
        if number in moved:
            wrapped, new = new, ""
        end = number
        while not new and end < len(lines) and lines[end].startswith(f"{indent} "):
            lines[end] = lines[end].removeprefix("    ")
            end += 1
        lines[number - 1 : number] = textwrap.indent(new, indent).splitlines()
    assert not done, f"not named: {list(done)}"
    edits = WRITES.get(name, {}) | ({WRAP_BEFORE[name]: f"{wrapped}\n{WRAP_BEFORE[name]}"} if moved else {})
    for old, new in edits.items():
        (place,) = [place for place, line in enumerate(lines) if line.strip() == old]
        indent = lines[place][: -len(old)]
        lines[place : place + 1] = textwrap.indent(new, indent).splitlines()
    return "\n".join(lines)


def _run(text: str) -> tuple[list[float], str, dict[str, Any]]:
    """Run a script twice, the second time from what the first has saved. Return losses, output and saved models."""
    folder = TrainingRanks([dist.group.WORLD], CPU).first("make a folder", tempfile.mkdtemp)
    losses: list[float] = []
    before = os.getcwd()
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(2):
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(text, "script.py", "exec"), names)
            losses += names["losses"]
            dist.barrier()  # rank 0 has saved
        saved = {str(path): torch.load(path) for path in sorted(Path().rglob("*.pt"))}
    os.chdir(before)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    models = {
        f"{path}: {key}.{name}": value
        for path, state in saved.items()
        for key in state.keys() & {"MODEL_STATE", "model_state", "model", "ema"}
        for name, value in state[key].items()
    }
    return losses, printed.getvalue(), models


def check_equal_training(before: str, after: str, rtol: float) -> None:
    expected, found = _run(before), _run(after)
    assert len(expected[0]) >= 6 and expected[2]
    assert found[1] == expected[1]
    torch.testing.assert_close((found[0], found[2]), (expected[0], expected[2]), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_each_named_line_done_trains_as_under_ddp(name: str) -> None:
    """Losses, output and saved models are equal bit for bit, and up to the rounding of the norm in scripts that clip.

    The norms of about 120 float64 numbers, summed in another order, differ by at most 1.4e-14 of themselves. Six steps
    may make a thousand times that of it. Without clipping the losses would differ by a hundredth.
    """
    after = _done_by_hand(name)
    assert not Script(after).findings  # nothing is left, and nothing new
    run_ranks(2, check_equal_training, SCRIPTS[name], after, 1e-11 if "clip_grad_norm_" in after else 0)
