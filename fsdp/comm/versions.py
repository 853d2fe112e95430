"""What torch renamed or added between the versions we support (2.6 and newer), settled once."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _dynamo
from torch.distributed import device_mesh

# The flat collectives got new names, and the old ones warn where the new ones exist. They are looked up by name at each
# call, so that a profiler or recorder that replaces the attribute of torch.distributed sees the call.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# Exchanging the memory of two storages costs nothing; without it a storage is resized, which asks the allocator each
# time.
STORAGES_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


_set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter


def _set_each_version(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    for tensor, version in zip(tensors, versions, strict=True):
        _set_versions(tensor, version)


# Gives each of several tensors the version of the same place, by which autograd tells whether one was written. It takes
# several at once where it can.
try:
    _set_versions((), ())
    set_versions = _set_versions
except TypeError:
    set_versions = _set_each_version


# What torch.compile looks at Python frames with; importing its Python parts would load the whole compiler.
_frames: Any = _dynamo.eval_frame


# Has a function look at the frames that this thread begins, or with None nobody; returns who did before.
set_frame_callback: Callable[[Any], Any] = _frames.set_eval_frame


def skip_code(code: types.CodeType) -> None:
    """Frames of ``code`` are not compiled; those that they begin are looked at."""
    if hasattr(_frames, "set_code_exec_strategy"):
        action = _frames._FrameAction
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:
        _frames.skip_code(code)


def root_of(mesh: device_mesh.DeviceMesh) -> device_mesh.DeviceMesh:
    """The mesh that ``mesh`` is a slice of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    return device_mesh._mesh_resources.get_root_mesh(mesh)
