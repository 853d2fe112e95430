"""The Python snippets in the repository's README files run, each on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.compat import disable_dcp, unpatch
from tests.harness.old_programs import save_old_checkpoints
from tests.harness.optim_states import quiet
from tests.harness.pool import run_ranks

ROOT = Path(__file__).resolve().parents[1]
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("", "examples/**/", "fsdp/**/", "scripts/", "tests/**/")
    for path in sorted(ROOT.glob(f"{folder}README.md"))
]
FILES = {  # files that a document's snippets are expected to write
    "README.md": {"checkpoints"},
    "fsdp/checkpoint/README.md": {
        *("step_1000", "checkpoints", "model.safetensors", "dcp", "memory"),
        *("ddp", "fsdp1_dcp", "verl", "fsdp1_local", "from_ddp", "from_dcp", "from_verl", "from_local"),
    },
    "fsdp/tools/README.md": {"step.svg", "step.rank1.svg", "trace.json", "trace.rank1.json"},
}
WITH_SNIPPETS = [name for name in DOCUMENTS if SNIPPET.search((ROOT / name).read_text())]


class Model(nn.Linear):
    """A model with a second method, as language models have."""

    def generate(self) -> torch.Tensor:
        return self(torch.ones(1, 4))


def _run(snippets: list[str], directory: str) -> None:
    """Run the snippets in sequence in `directory`.

    A snippet that is not a whole program starts with a wrapped model that has taken one step.
    """
    model = FullyShardedDataParallel(Model(4, 4), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    names: dict[str, Any] = {
        "FSDP": FullyShardedDataParallel,
        "fsdp": fsdp,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "step": 0,
        "rank": dist.get_rank(),
    }
    before = os.getcwd()
    os.chdir(directory)
    if any("convert(" in code for code in snippets):
        quiet(save_old_checkpoints, lambda: nn.Linear(4, 4))
    try:
        for code in snippets:
            program = "init_process_group" in code
            with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
                exec(compile(code, "README.md", "exec"), {"__name__": "__main__"} if program else {**names})
    finally:
        os.chdir(before)
        disable_dcp()
        unpatch()


@pytest.mark.parametrize("name", WITH_SNIPPETS)
def test_snippets_of_a_document_run(name: str, tmp_path: Path) -> None:
    snippets = SNIPPET.findall((ROOT / name).read_text())
    if not hasattr(torch.optim, "Muon"):  # as in older versions of torch
        snippets = [code for code in snippets if "Muon" not in code]
    run_ranks(2, _run, snippets, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == FILES.get(name, set())


def test_documents_with_expected_files_have_snippets() -> None:
    assert set(FILES) <= set(WITH_SNIPPETS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_of_a_document_lead_to_files(name: str) -> None:
    document = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    lost = [link for link in links if not (document.parent / link).exists()]
    assert not lost


def test_readme_has_at_most_250_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250
