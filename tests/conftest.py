"""Configuration of the whole run: environment and warnings of ranks, garbage collection, end of the rank processes."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from tests.harness import pool, worker


def pytest_configure(config: pytest.Config) -> None:
    # Modules without device_id move to an accelerator if there is one, but the suite tests on CPU (scripts/gpu_check.py
    # on a GPU). The ranks inherit this.
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="", ZE_AFFINITY_MASK="")
    # torch records its last 2000 native collectives, about 1 KiB each: a leak, as it seems, until the record is full.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    os.fsync = os.fstat  # type: ignore[assignment]  # see `worker.main`
    pool.set_warning_filters(config.getini("filterwarnings"))
    worker.seed_the_cpu_only()
    torch.set_num_threads(1)  # the ranks need the remaining cores, and results must not depend on their number
    gc.disable()  # imported modules are never freed, so collections during imports only cost time


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # no later collection scans the imported modules
    gc.enable()


def pytest_sessionfinish() -> None:
    pool.shutdown()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
