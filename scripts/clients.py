"""Runs real tools on this package and on torch's FSDP1, with the same programs, and compares.

    bash scripts/test_clients.sh [--only SUBSTRING] [--list] [--without-fsdp1]

makes an environment with the tools and runs this script in it. Each row of `ROWS` is a small program for one tool, on
2 CPU ranks. New processes run it three times: on torch's FSDP1; on this package, through `fsdp.compat.patch()` alone
(before or after the import of the tool, see `TOOLS`); and on this package in two halves, of which the second starts
from the first half's checkpoint in new processes. In the rows of old checkpoints torch's FSDP1 runs the whole program
and the first half, and the second half loads the converted checkpoint.

Losses and other results must equal torch's to 6 digits, unless the row names torch's mistake. The resumed run must
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
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import client_post_training
import client_rows
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.multiprocessing as mp
from client_rows import RANKS, STEPS, Part
from torch import nn

from fsdp.compat import patch
from tests.harness import without_fsdp1

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
    late = late and hasattr(torchs, "FullyShardedDataParallel")  # else the tool cannot be imported before patch()
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
        part.result.unlink(missing_ok=True)
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
        asked.send((json.loads(part.result.read_text()) if part.result.exists() else [], failed.strip()))


class Engine:
    """A process that has imported one tool and runs rows of that tool."""

    def __init__(self, tool: str, engine: str, variables: dict[str, str]) -> None:
        context = mp.get_context("spawn")
        self._asked, asked = context.Pipe()
        self._process = context.Process(target=serve, args=(tool, engine, asked))
        with mock.patch.dict(os.environ, variables):
            self._process.start()
        asked.close()

    def run(self, number: int, part: Part) -> tuple[list[float], str]:
        """Return the reported losses and the error message, empty if the run succeeded."""
        self._asked.send((number, part))
        return self._asked.recv()

    def end(self) -> None:
        if self._process.is_alive():  # not if the tool could not be imported
            self._asked.send(None)
        self._process.join()


def close(one: list[float], other: list[float], within: float) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= within * max(abs(a), abs(b)) for a, b in zip(one, other))


def judge(number: int, torchs_engine: Engine, engine: Engine) -> str:
    """Compare the engines on a row, and return remarks about torch's FSDP1.

    Raises:
        RuntimeError: a run has failed. On torch's FSDP1 it may fail after the training.
        AssertionError: results differ.
    """
    row, half, aside = ROWS[number], STEPS // 2, ROWS[number].torch_is_wrong

    def run(by: Engine, name: str, begin: int, end: int) -> list[float]:
        nonlocal aside
        told, failed = by.run(number, Part(begin, end, f"{folder}/{name}", row.is_old and by is engine))
        if failed and (by is engine or len(told) < end - begin):
            raise RuntimeError(f"on {'this package' if by is engine else 'torch'}: {failed}")
        aside += f"; it trains the same, and fails then: {failed.splitlines()[-1]}" if failed else ""
        return told

    with tempfile.TemporaryDirectory() as folder:
        before = torchs_engine if row.is_old else engine
        whole = run(before, "whole", 0, STEPS)
        if before is engine and (not row.torch_is_wrong or row.instead is not None):
            theirs = run(torchs_engine, "torch", 0, STEPS)
            assert close(whole[: len(theirs)], theirs, row.within), f"{theirs} on torch, and here {whole}"
        if row.resumes:
            resumed = run(before, "parts", 0, half)[:half] + run(engine, "parts", half, STEPS)
            assert close(whole, resumed[: len(whole)], row.resumed_within), f"{whole}, and resumed {resumed}"
    return aside.removeprefix("; ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose tool or description contains this")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--without-fsdp1", action="store_true", help="hide torch's FSDP1 where this package runs")
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    hidden = without_fsdp1.environment(Path(folder.name)) if options.without_fsdp1 else {}
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
        engines = [Engine(tool, "torch", {}), Engine(tool, "fsdp", hidden)] if mine else []
        for number in mine:
            try:
                aside = judge(number, *engines)
                print(f"ok     {ROWS[number]}{f' (torch: {aside})' * bool(aside)}", flush=True)
            except Exception as error:
                bad += 1
                print(f"FAILED {ROWS[number]}: {type(error).__name__}: {error}", flush=True)
        for engine in engines:
            engine.end()
    if not options.list:
        print(f"{len(chosen) - bad - skipped} of {len(chosen)} rows hold, {skipped} were not run")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
