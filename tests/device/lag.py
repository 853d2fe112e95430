"""Builds the late device of ``lag.cpp`` (once per version of torch), and registers it with torch as "lag".

Importing this module suffices: ``torch.device("lag")`` exists then, and is the accelerator. ``C`` is the extension
with the settings of lateness, the counters and the reports. ``init`` makes the process group.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = os.environ.get("LAG_SOURCE", str(Path(__file__).with_name("lag.cpp")))
_BUILD = Path(os.environ.get("LAG_BUILD", _ROOT / "build" / f"lag-{torch.__version__}"))
_BUILD.mkdir(parents=True, exist_ok=True)
_FLAGS = ["-O1", "-DUSE_DISTRIBUTED", "-w"]


def _extension() -> Any:
    """The extension: built where that is needed, or as the driver of the ranks has built it for them."""
    built = os.environ.get("LAG_EXTENSION")
    if built is None:
        return cpp_extension.load("lag_C", [_SOURCE], build_directory=str(_BUILD), extra_cflags=_FLAGS, verbose=False)
    spec = importlib.util.spec_from_file_location("lag_C", built)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


C = _extension()

torch.utils.rename_privateuse1_backend("lag")


class _OnStream:
    """A context in which a stream is the current one."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self.before)


class _Current:
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = C.current_device()
        C.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        C.set_device(self.before)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(C.current_device()) if index is None else index


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    C.default_generator(_index(device)).set_state(state)


module: Any = types.ModuleType("torch.lag")
module.is_available = lambda: True
module.is_initialized = lambda: True
module._initialized = True  # activation checkpointing looks at this before it saves the generators' states
module._lazy_init = lambda: None
module.device_count = C.device_count
module.current_device = C.current_device
module.set_device = lambda device: C.set_device(_index(device))
module.device = _Current
module._is_in_bad_fork = lambda: False
module.synchronize = lambda device=None: C.synchronize(_index(device))
module.manual_seed = lambda seed: C.default_generator(C.current_device()).manual_seed(seed)
module.manual_seed_all = lambda seed: [C.default_generator(i).manual_seed(seed) for i in range(C.device_count())]
module.get_rng_state = lambda device=None: C.default_generator(_index(device)).get_state()
module.set_rng_state = _set_rng_state
module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
module.is_bf16_supported = lambda *_: True
module.current_stream = lambda device=None: torch.accelerator.current_stream(torch.device("lag", _index(device)))
module.memory_allocated = lambda device=None: torch.accelerator.memory_allocated(_index(device))
module.empty_cache = lambda: None
module.stream = _OnStream
module.Stream = torch.Stream
module.Event = torch.Event
torch._register_device_module("lag", module)
torch.utils.generate_methods_for_privateuse1_backend()

torch.empty(1, pin_memory=True)  # torch page-locks memory only for a device that is initialized

atexit.register(lambda: [C.synchronize(index) for index in range(C.device_count())])

TIMEOUT = int(os.environ.get("LAG_TIMEOUT", "60"))  # seconds, of a collective


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT))
    return C.make_backend(gloo, rank, size, os.environ.get("LAG_NAME", "nccl"), TIMEOUT)


# The backend reports the name "nccl", so that the engine takes the paths that it takes with NCCL.
dist.Backend.register_backend("lagccl", _create, devices=["lag"])


def init(rank: int, size: int, store_path: str, *, with_gloo: bool = True, device: int = 0) -> torch.device:
    """Make the default process group and ``device`` the current one; ``with_gloo``: gloo serves CPU tensors."""
    C.set_device(device)
    backend = "cpu:gloo,lag:lagccl" if with_gloo else "lag:lagccl"
    store = dist.FileStore(store_path, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    return torch.device("lag", device)
