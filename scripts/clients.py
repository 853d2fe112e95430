"""Runs real tools on this package and on torch's FSDP1, with the same programs, and compares.

    bash scripts/test_clients.sh [--only SUBSTRING] [--list]

makes an environment with the tools and runs this script in it. Each row of `ROWS` is a small program for one tool, on
2 CPU ranks. New processes run it three times: on torch's FSDP1; on this package, through `fsdp.compat.patch()` alone
(before or after the import of the tool, see `TOOLS`); and on this package in two halves, of which the second starts
from the first half's checkpoint in new processes.

Losses and further results must equal torch's to 6 digits, unless the row names torch's mistake. The resumed run must
equal the uninterrupted run bit for bit. A tool is imported once per engine, and the ranks are forked from there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import client_post_training
import client_rows
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.multiprocessing as mp
from client_rows import RANKS, STEPS, Part
from torch import nn

from fsdp.compat import patch

PATIENCE = 240.0  # seconds for one run of a row
ROWS = client_rows.ROWS + client_post_training.ROWS


# -- running -----------------------------------------------------------------------------------------------------------

# By tool: the modules to import before the ranks are forked, and whether patch() is called after the import.
TOOLS: dict[str, tuple[Sequence[str], bool]] = {
    "accelerate": (["accelerate"], True),
    "fabric": (["lightning.fabric"], False),
    "trainer": (["lightning.pytorch", "torchmetrics"], True),
    "transformers": (["transformers.trainer", "transformers.trainer_seq2seq"], True),
    "peft": (["transformers.trainer", "peft"], False),
    "qlora": (["transformers.trainer", "peft", "bitsandbytes"], False),
    "trl": (["trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "peft", "trl"], False),
    "verl": (["verl.workers.engine.fsdp", "verl"], False),
    "composer": (["torchmetrics", "composer", "composer.algorithms"], False),  # Composer binds torch's names at import
}


def prepare(tool: str, engine: str) -> None:
    """Import the tool for one engine, patched for CPU ranks."""
    modules, late = TOOLS[tool]
    if tool in ("fabric", "trainer"):  # Lightning builds meshes for CUDA
        make_mesh = torch.distributed.device_mesh.init_device_mesh
        torch.distributed.device_mesh.init_device_mesh = lambda kind, *args, **options: make_mesh(
            "cpu", *args, **options
        )
    if tool == "composer":
        sys.meta_path.insert(0, client_rows.Absent())
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    if tool == "verl":
        client_post_training.take_the_cpu_for_verls_device()
    if engine == "fsdp" and not late:
        patch()
    for module in modules:
        importlib.import_module(module)
    if engine == "fsdp" and late:
        patch()
    if "accelerate" in sys.modules:
        take_the_cpu_for_an_accelerator()
    if engine == "torch":  # to offload is to release or to overwrite the values that are on CPU already
        for config in (torchs.api.StateDictConfig, torchs.api.OptimStateDictConfig):
            config.offload_to_cpu = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]
    wrapper: Any = torchs.FullyShardedDataParallel
    made = wrapper.__init__

    def counted(*args: Any, **options: Any) -> None:
        wrapped.append(args[0])
        if engine == "torch":  # requires an explicit CPU device, which Lightning and Composer do not pass
            options["device_id"] = torch.device("cpu")
            options["sync_module_states"] = False  # which needs an accelerator; the ranks have equal weights
        made(*args, **options)

    wrapper.__init__ = counted


wrapped: list[nn.Module] = []  # the modules wrapped in this process


def take_the_cpu_for_an_accelerator() -> None:
    """Make accelerate use FSDP on CPU, where it would always choose DistributedDataParallel."""
    from accelerate import state

    def prepare_backend(*args: Any) -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return "gloo", state.DistributedType.MULTI_GPU

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    state.PartialState._prepare_backend, state.PartialState.set_device = prepare_backend, set_device


def rank_process(rank: int, number: int, part: Part, port: int, options: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_FSDP="true",
        ACCELERATE_USE_CPU="true",
        FSDP_VERSION="1",
        TORCHELASTIC_RUN_ID="none",
        GROUP_RANK="0",
        ROLE_RANK=str(rank),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        TOKENIZERS_PARALLELISM="false",
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    Path(part.folder).mkdir(parents=True, exist_ok=True)
    values = ROWS[number].program(part, **options)
    assert wrapped, "the tool has trained without FullyShardedDataParallel"
    part.tell(values)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def serve(tool: str, engine: str, asked: Any) -> None:
    """Run the requested rows of one tool on one engine, each in new processes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    prepare(tool, engine)
    for number, part in iter(asked.recv, None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = dict(ROWS[number].options)
        if engine == "torch":
            options.update(ROWS[number].instead or {})
        until, failed = time.monotonic() + PATIENCE, ""
        with tempfile.TemporaryDirectory() as folder:
            part.result = f"{folder}/result"
            try:
                ranks = mp.start_processes(
                    rank_process, (number, part, port, options), nprocs=RANKS, join=False, start_method="fork"
                )
                while not ranks.join(timeout=1):
                    if time.monotonic() > until:
                        for process in ranks.processes:
                            process.kill()
                        raise TimeoutError(f"not over after {PATIENCE:.0f} s")
            except Exception:
                failed = traceback.format_exc()
            told = Path(part.result)
            asked.send((json.loads(told.read_text()) if told.exists() else [], failed.strip()))


class Engine:
    """A process that has imported one tool and runs rows of that tool."""

    def __init__(self, tool: str, engine: str) -> None:
        context = mp.get_context("fork")
        self._asked, asked = context.Pipe()
        self._process = context.Process(target=serve, args=(tool, engine, asked))
        self._process.start()
        asked.close()

    def run(self, number: int, part: Part) -> tuple[list[float], str]:
        """Return the reported losses and the error message, empty if the run succeeded."""
        self._asked.send((number, part))
        return self._asked.recv()

    def end(self) -> None:
        self._asked.send(None)
        self._process.join()


def close(one: list[float], other: list[float], within: float) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= within * max(abs(a), abs(b)) for a, b in zip(one, other))


def judge(number: int, torchs_engine: Engine, engine: Engine) -> tuple[str, str]:
    """Compare the engines on a row; return the error, empty if the row passes, and a remark about torch's FSDP1."""
    row, aside = ROWS[number], ROWS[number].torch_is_wrong
    with tempfile.TemporaryDirectory() as folder:
        ours, failed = engine.run(number, Part(0, STEPS, f"{folder}/whole"))
        if failed:
            return failed, aside
        if not row.torch_is_wrong or row.instead is not None:
            theirs, failed = torchs_engine.run(number, Part(0, STEPS, f"{folder}/torch"))
            if failed and len(theirs) == STEPS:
                aside += f"{'; ' if aside else ''}it trains the same, and fails then: {failed.splitlines()[-1]}"
            elif failed:
                return f"torch's FSDP1 failed: {failed}", aside
            mine = ours[: len(theirs)] if failed or row.instead is not None else ours
            if not close(mine, theirs, row.within):
                return f"torch's FSDP1 has {theirs}, and here are {ours}", aside
        if not row.resumes:
            return "", aside
        first, failed = engine.run(number, Part(0, STEPS // 2, f"{folder}/parts"))
        second, failed_then = engine.run(number, Part(STEPS // 2, STEPS, f"{folder}/parts"))
        if failed or failed_then:
            return failed or failed_then, aside
        if first[: STEPS // 2] + second != ours:
            return f"resumed {first[: STEPS // 2] + second}, and not stopped {ours}", aside
    return "", aside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose tool or description contains this")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [number for number, row in enumerate(ROWS) if options.only in str(row)]
    bad = skipped = 0
    for tool in TOOLS:
        mine = [number for number in chosen if ROWS[number].tool == tool]
        if options.list:
            print("\n".join(str(ROWS[number]) for number in mine))
            continue
        if mine and importlib.util.find_spec(TOOLS[tool][0][-1].partition(".")[0]) is None:
            print(f"not there: {tool}, {len(mine)} rows", flush=True)
            skipped += len(mine)
            continue
        engines = [Engine(tool, engine) for engine in ("torch", "fsdp")] if mine else []
        for number in mine:
            try:
                wrong, aside = judge(number, *engines)
            except Exception:
                wrong, aside = traceback.format_exc(), ""
            bad += bool(wrong)
            aside = f" (torch: {aside})" if aside else ""
            print(f"{'FAILED' if wrong else 'ok':7}{ROWS[number]}{aside}{f': {wrong}' if wrong else ''}", flush=True)
        for engine in engines:
            engine.end()
    if not options.list:
        print(f"{len(chosen) - bad - skipped} of {len(chosen)} rows hold, {skipped} were not run")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
