"""The checks of ``scripts/gpu_check.py`` on two ranks of the late device.

python -m tests.device.gpu_scripts [PART_OF_A_NAME ...]

The scripts are written for CUDA. Here a substitute replaces ``torch.cuda``, so that they are tested without a GPU.
``SITUATIONS`` are those of ``scripts/gpu_situations.py`` that run on this device; ``tests.device.situations`` has them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.device import lag, pool

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = (
    "means",
    "kept_leaves",
    "profiler",
    "other_streams",
    "backward_on_another_stream",
    "failing_backwards",
    "offload",
    "host_optimizer",
    "failed_and_deleted",
    "forked",
    "forms_of_state",
    "allocator",
    "other_device",
    "no_interface",
)


class Cuda(types.SimpleNamespace):
    """The parts of ``torch.cuda`` that the scripts use, on the late device."""

    def __init__(self) -> None:
        super().__init__(
            _sleep=lambda cycles: lag.C.sleep(cycles / 2e6),
            synchronize=lambda device=None: lag.C.synchronize(-1),
            Stream=torch.Stream,
            Event=lambda: torch.Event("lag"),
            stream=lag.module.stream,
            current_stream=lag.module.current_stream,
            current_device=lag.C.current_device,
            device=lag.module.device,
            device_count=lag.C.device_count,
            set_sync_debug_mode=lambda mode: lag.C.on_sync({"error": 1, "default": 0}[mode]),
            memory=types.SimpleNamespace(),
            memory_reserved=lambda device: torch.accelerator.memory_reserved(device.index),
            memory_stats=lambda device: {"num_alloc_retries": 0},
            empty_cache=lambda: None,
            reset_peak_memory_stats=lambda device: None,
            max_memory_allocated=lambda device: torch.accelerator.max_memory_allocated(device.index),
        )


@functools.cache
def script(name: str) -> Any:
    """The module ``name`` of the scripts, on the late device."""
    file = SCRIPTS / f"{name}.py"
    text = file.read_text().replace('device.type == "cuda"', 'device.type == "lag"').replace("torch.cuda.", "CUDA.")
    module: Any = types.ModuleType(name)
    module.__file__, module.CUDA = str(file), Cuda()
    with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        sys.modules[name] = module
        exec(compile(text, str(file), "exec"), module.__dict__)
    return module


def run_situation(name: str, device: torch.device) -> str:
    return str(getattr(script("gpu_situations"), name)(device))


def run_check(kind: str, strategy: str, uop: bool, feature: str, device: torch.device) -> str:
    script("gpu_situations")  # before the second script imports it
    found = script("gpu_check")
    options = {"sharding_strategy": found.ShardingStrategy[strategy], "use_orig_params": uop}
    if feature:
        options["feature"] = feature
    steps = (4,) if kind == "parity" else ()
    return str(getattr(found, f"check_{kind}")(device, found.PASSES["no_sync"], *steps, options))


SITUATIONS: dict[str, pool.Case] = {name: functools.partial(run_situation, name) for name in NAMES}
CASES: dict[str, pool.Case] = {"memory.offload": functools.partial(run_check, "memory", "FULL_SHARD", False, "offload")}
for strategy, uop, kind in itertools.product(
    ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True), ("parity", "memory", "host")
):
    CASES[f"{kind}.{strategy}.uop{int(uop)}"] = functools.partial(run_check, kind, strategy, uop, "")
for feature in ("mixed precision", "offload", "clipping", "scaling", "copying"):
    case = functools.partial(run_check, "parity", "FULL_SHARD", True, feature)
    CASES[f"parity.{feature.replace(' ', '_')}"] = case

if __name__ == "__main__":
    pool.main("tests.device.gpu_scripts", CASES)
