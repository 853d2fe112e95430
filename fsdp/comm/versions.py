"""Differences between the supported versions of torch (2.6 and newer)."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _dynamo
from torch.distributed import device_mesh

# New names of the flat collectives; the old names warn where the new ones exist. They are looked up by name at each
# call, so that a profiler or recorder that replaces the attribute of torch.distributed sees the call.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# A swap of the memory of two storages is free; resizing a storage calls the allocator each time.
STORAGES_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

# The functions of torch.distributed.checkpoint.state_dict read ``_fqn_modifiers`` of every module.
STATE_DICTS_ASK = torch.__version__ >= "2.7"


_set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter


def _set_each_version(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    for tensor, version in zip(tensors, versions, strict=True):
        _set_versions(tensor, version)


# Sets the version counters of several tensors, by which autograd detects writes; in one call if torch supports that.
try:
    _set_versions((), ())
    set_versions = _set_versions
except TypeError:
    set_versions = _set_each_version


# The frame evaluation of torch.compile; importing the Python parts would load the whole compiler.
_frames: Any = _dynamo.eval_frame


# Sets the frame callback of this thread (None: no callback); returns the previous one.
set_frame_callback: Callable[[Any], Any] = _frames.set_eval_frame


def skip_code(code: types.CodeType) -> None:
    """Exclude frames of ``code`` from compilation, but not the frames that they call."""
    if hasattr(_frames, "set_code_exec_strategy"):
        action = _frames._FrameAction
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:
        _frames.skip_code(code)


def root_of(mesh: device_mesh.DeviceMesh) -> device_mesh.DeviceMesh:
    """Return the mesh of which ``mesh`` is a slice, or ``mesh`` itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return device_mesh._mesh_resources.get_root_mesh(mesh)
