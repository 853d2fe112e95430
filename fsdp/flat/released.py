"""Guards of released memory: a read is an error, or gives NaN, instead of ending the process.

A program may keep a leaf, or a view of one, from inside a forward. Once the unit is resharded, it has no memory.
The kernels of torch do not check for that: on CPU the process would crash.

[Note: Released memory]
The storage of a released buffer has 0 bytes. Operations that check the size (views, matrix products) refuse it. In
builds for CUDA, torch lets a storage refuse every access with a message. Elsewhere, on CPU, the storage refuses writes,
and points to address space without memory of its own, where every read finds NaN. The guard is set up once per buffer
and is exchanged with the memory from the pool, without cost per step. Accelerators of other builds have no guard, and
neither has torch before 2.12, which cannot exchange memory: there a read may end the process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fsdp.comm.host_memory import MAP_FIXED, map_at

_MESSAGE = (
    "a sharded parameter was used, through a reference kept from inside a forward, after its unit was resharded. Use "
    "it inside the forward, copy it there, or use summon_full_params()"
)


def guard_released(tensor: torch.Tensor, nbytes: int) -> None:
    """Guard the storage of ``tensor``, which has 0 bytes while the ``nbytes`` of memory are released.

    The guard belongs to the data pointer: when two storages exchange their memory, they exchange the guard as well.
    """
    storage: Any = tensor.untyped_storage()
    if _storages_refuse():
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _MESSAGE)
    elif tensor.device.type == "cpu" and sys.platform == "linux":
        try:
            nowhere = _without_memory(nbytes)
        except OSError:  # the system has no address space left; no code depends on the guard
            return
        torch._C._set_throw_on_mutable_data_ptr(nowhere)
        storage._swap_data_ptr_(nowhere.untyped_storage())


@functools.cache
def _storages_refuse() -> bool:
    """Whether a storage can refuse every access, and whether the refusal is exchanged with the memory."""
    refuse: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if refuse is None:
        return False
    tensor, block = torch.ones(1, device="cpu"), torch.ones(1, device="cpu")
    storage: Any = tensor.untyped_storage()
    storage.resize_(0)
    refuse(storage._cdata, _MESSAGE)
    try:
        storage._swap_data_ptr_(block.untyped_storage())
        tensor.add(1)
        storage._swap_data_ptr_(block.untyped_storage())
    except RuntimeError:
        return False
    try:
        tensor.add(1)
    except RuntimeError:
        return True
    return False


class _DLTensor(ctypes.Structure):
    """The exchange format of tensors between libraries (DLPack), here for 1-D tensors of bytes in host memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def _without_memory(nbytes: int) -> torch.Tensor:
    """Make a CPU tensor of 0 bytes, at whose address ``nbytes`` can be read: NaN in each floating point type."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    described = _address_space(max(nbytes, mmap.PAGESIZE).bit_length())
    return from_dlpack(new_capsule(ctypes.addressof(described), b"dltensor", None))


@functools.cache
def _address_space(bits: int) -> _DLTensor:
    """Map ``2 ** bits`` bytes of address space, with all bits set, and describe them as a tensor of 0 bytes.

    The mapping lasts as long as the process, and takes little memory: a few pages are mapped again and again.
    """
    nbytes = 1 << bits
    chunk = max(nbytes >> 9, mmap.PAGESIZE)
    pages = os.memfd_create("fsdp")
    try:
        os.write(pages, b"\xff" * chunk)
        space = map_at(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        for offset in range(0, nbytes, chunk):
            map_at(space + offset, chunk, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, pages)
    finally:
        os.close(pages)
    described = _DLTensor(
        data=space, device_type=1, ndim=1, type_code=1, bits=8, lanes=1, shape=ctypes.pointer(ctypes.c_int64(0))
    )
    _described.append(described)
    return described


_described: list[_DLTensor] = []  # kept, because a tensor reads its description when it is freed
