"""The package as `pip install .` leaves it: next to the distributions that `setup.py` declares, and theirs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]

# Hides every other distribution of the environment, runs a script in two ranks, and imports modules.
RUN = """
import importlib, os, runpy, sys

class Undeclared:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

script, hidden, modules = sys.argv[1], set(sys.argv[2].split(",")), sys.argv[3].split(",")
sys.meta_path.insert(0, Undeclared())
import torch._dynamo  # which optimizers import: once for both ranks
ranks = []
for rank in range(2):
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    ranks.append(os.fork())
    if not ranks[-1]:
        runpy.run_path(script, run_name="__main__")
        sys.exit()
assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]
for module in modules:
    importlib.import_module(module)
"""


def declared() -> list[str]:
    """Return the requirements in `setup.py`."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no install_requires")


def installed_with(requirements: list[str]) -> set[str]:
    """Return the distributions that these requirements bring, by normalized name."""
    found: set[str] = set()
    open_ends = list(requirements)
    while open_ends:
        requirement = Requirement(open_ends.pop())
        name = normalized(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        open_ends.extend(metadata.requires(name) or [])
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_first_script_of_the_readme_and_every_module_need_declared_packages_alone(tmp_path: Path) -> None:
    """The script prints nothing but losses, without warnings: the group ends while the model is there."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "fsdp").rglob("*.py"))
        if path.stem != "__main__"
    ]
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0])
    kept = installed_with(declared()) | {"fsdp"}
    owners = metadata.packages_distributions()
    hidden = {module for module, its in owners.items() if not kept.intersection(map(normalized, its))}
    assert {"pytest", "mypy"} <= hidden and not {"torch", "fsdp"} & hidden
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_torchrun = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": "1",
    }
    of_torchrun |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, str(script), ",".join(hidden), ",".join(modules)],
        cwd=tmp_path,
        env={**os.environ, **of_torchrun, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    steps = re.findall(r"^step (\d): loss \d\.\d{4}$", done.stdout, re.MULTILINE)
    assert steps == [str(step) for step in range(10)]
