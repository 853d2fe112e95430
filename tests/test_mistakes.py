"""A sample of `scripts/mistakes.py`: cases run and are graded by the script's rules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "mistakes.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("mistakes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["mistakes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grades_follow_message_ranks_and_time(script: Any) -> None:
    case = script.Case("", "", what="weight", remedy="summon")
    good, named, helped, other, late = (
        script.Told(seconds, text)
        for seconds, text in ((1, "a weight: summon"), (1, "weight"), (1, "summon"), (1, "?"), (9, "weight, summon"))
    )
    for told, expected in (
        ([good, good], 5),
        ([helped, helped], 4),
        ([named, named], 3),
        ([other, other], 1),
        ([None, None], 0),
        ([good, None], 4),
        ([good, other], 4),
        ([late, late], 4),
    ):
        assert script.grade(case, told, False) == expected, told
    for hangs in (False, True):
        assert script.grade(script.Case("", ""), [None, None], hangs) == (0 if hangs else 5)
    assert script.grade(script.Case("", "", what="weight", remedy="summon", ranks="1"), [None, good], True) == 5


def test_cases_have_unique_names(script: Any) -> None:
    names = [case.name for case in script.CASES]
    assert len(names) >= 100 and len(set(names)) == len(names)


def test_a_few_cases_run_and_are_graded() -> None:
    """Parameters used and replaced: errors, and a case without an error."""
    command = [sys.executable, str(SCRIPT), "--only", "a weight is"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    grades = [line.split("  ")[0] for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert grades[:-1] == ["5"] * 4, result.stdout
    assert "4 cases: average 5.00, 0 at grade 0" in grades[-1], result.stdout
    assert result.returncode == 0, result.stderr
