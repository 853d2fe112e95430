"""Fresh memory filled with NaN, so that reading an unwritten byte shows.

`poisoned_memory()` fills uninitialized allocations of torch with NaN in floating and the largest value in integer
dtypes. This covers `torch.empty`, torch's own operators and tensors grown by `resize_`. New bytes of untyped
storages are 0xFF, which is NaN in every floating dtype. The context turns on deterministic algorithms, because torch
fills only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import UntypedStorage


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Poison uninitialized memory inside the context."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    init, resize = UntypedStorage.__init__, UntypedStorage.resize_

    def poisoned_init(self: UntypedStorage, *args: Any, **kwargs: Any) -> None:
        init(self)
        if args and isinstance(args[0], int):
            _fill(self, 0)

    def poisoned_resize(self: UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = resize(self, size)
        _fill(self, before)
        return result

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    UntypedStorage.__init__, UntypedStorage.resize_ = poisoned_init, poisoned_resize  # type: ignore[method-assign]
    try:
        yield
    finally:
        UntypedStorage.__init__, UntypedStorage.resize_ = init, resize  # type: ignore[method-assign]
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _fill(storage: UntypedStorage, start: int) -> None:
    if storage.nbytes() > start and storage.device.type != "meta":
        torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)[start:].fill_(0xFF)
