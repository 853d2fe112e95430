"""With what values ranks began: each keeps its own shard alone, and of ranks that gave parameters different values, the
model would be a mixture."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from fsdp.flat.views import BucketViews


def sample(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A few elements of each, copied; nobody waits for them."""
    return [(row := param.detach().reshape(-1))[:: max(1, row.numel() // 8)].clone() for param in params]


class InitialValues:
    """Those that this rank gave the parameters of a bucket, until anybody changes the shard that it has kept."""

    def __init__(self, views: BucketViews, samples: list[torch.Tensor]) -> None:
        """``samples``: of the values of each parameter, as they were before they became shards."""
        self._views, self._samples = views, samples
        self._look, self._probe = self._look_now(), self._probe_now().clone()

    def _look_now(self) -> Any:
        """What changes with writes to the shard, and to what users hold of it."""
        shard = self._views.handle.shard
        return shard.data_ptr(), shard._version, self._views.versions

    def _probe_now(self) -> torch.Tensor:
        """For writes that leave no other trace."""
        shard = self._views.handle.shard
        return shard[:: max(1, shard.numel() // 64)]

    def digests(self) -> dict[str, str | None]:
        """By parameter what is equal on ranks that gave it the same values; None where these do not count any more, as
        others were loaded or written. The host waits for the device."""
        names = [record.name for record in self._views.handle.layout.params]
        then, now = (values.contiguous().view(torch.uint8) for values in (self._probe, self._probe_now()))
        if self._look != self._look_now() or not torch.equal(then, now):
            return dict.fromkeys(names)
        values = [bytes(each.cpu().view(torch.uint8).tolist()) for each in self._samples]
        return {name: hashlib.blake2b(each).hexdigest()[:16] for name, each in zip(names, values)}
