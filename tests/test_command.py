"""The command `fsdp`: its tools, and the console script that the package installs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp
from fsdp.__main__ import main

ROOT = Path(__file__).resolve().parents[1]


def test_help_lists_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {tool} ", out, re.MULTILINE) for tool in ("plan", "migrate", "convert", "run"))


def test_a_missing_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "fsdp: the following arguments are required: {plan,migrate,convert,run}\n"


def test_the_package_runs_as_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp", "convert", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "fsdp" / "__main__.py"), run_name="__main__")
    assert ended.value.code == 0 and "safetensors" in capsys.readouterr().out


def test_run_starts_the_script_under_fsdp_compat(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments) or pytest.fail("execv returned"))
    with pytest.raises(pytest.fail.Exception, match="execv returned"):
        main(["run", "train.py", "--lr", "0.1"])
    assert started == [[sys.executable, "-m", "fsdp.compat", "train.py", "--lr", "0.1"]]


def test_version_is_defined_once() -> None:
    """`setup.py` reads it from the package, and the changelog has an entry for it."""
    command = [sys.executable, "-W", "ignore", "setup.py", "--version"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert printed.split()[-1] == fsdp.__version__
    assert f"* **{fsdp.__version__}**" in (ROOT / "README.md").read_text()
