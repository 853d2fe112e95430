"""The values that parameters had when they were wrapped.

Each rank keeps a shard of them. If the ranks gave parameters different values, the model is a mixture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from fsdp.flat.views import BucketViews


def sample(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy a few elements of each parameter, without waiting for the device."""
    return [(row := param.detach().reshape(-1))[:: max(1, row.numel() // 8)].clone() for param in params]


class InitialValues:
    """The values that this rank gave the parameters of a bucket, until the shard is written."""

    def __init__(self, views: BucketViews, samples: list[torch.Tensor]) -> None:
        """``samples`` of each parameter were taken before the parameters became shards."""
        self._views, self._samples = views, samples
        self._before, self._elements = views.versions(), self._elements_now().clone()

    def _elements_now(self) -> torch.Tensor:
        """Return a few elements of the shard, by which writes through ``.data`` show."""
        shard = self._views.handle.shard
        return shard[:: max(1, shard.numel() // 64)]

    def digests(self) -> dict[str, str | None]:
        """Return a digest of each parameter's initial values, by name; None if values were loaded or written since.

        The host waits for the device.
        """
        names = [record.name for record in self._views.handle.layout.params]
        then, now = (values.contiguous().view(torch.uint8) for values in (self._elements, self._elements_now()))
        if not (self._before == self._views.versions() and torch.equal(then, now)):
            return dict.fromkeys(names)
        values = [bytes(each.cpu().view(torch.uint8).tolist()) for each in self._samples]
        return {name: hashlib.blake2b(each).hexdigest()[:16] for name, each in zip(names, values)}
