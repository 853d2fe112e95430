"""Marks for tests that need more than the oldest torch that the package supports."""

from __future__ import annotations

import pytest
import torch

from fsdp.comm.versions import STORAGES_SWAP

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
needs_swaps = pytest.mark.skipif(not STORAGES_SWAP, reason="this torch cannot swap the memory of two storages")
needs_cpu_events = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP1 and FSDP2 of this torch cannot prefetch on the CPU"
)


def needs(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skip a test with older releases of torch; ``why`` says what these do."""
    return pytest.mark.skipif((major, minor) > RELEASE, reason=f"torch before {major}.{minor} {why}")
