"""Shows that the late device computes as the CPU does, and that a missing wait between streams changes the values.

python -m tests.device.smoke
"""

from __future__ import annotations

import copy
import os
import sys

import torch
from torch import nn

from tests.device import lag


def main() -> None:
    device = torch.device("lag", 0)
    lag.C.set_lateness(20, {})
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Dropout(0.1), nn.Linear(7, 1)).eval()
    copied, x = copy.deepcopy(model).to(device), torch.randn(4, 5)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, copied)]
    for _ in range(3):
        for each, optimizer, value in ((model, optimizers[0], x), (copied, optimizers[1], x.to(device))):
            optimizer.zero_grad()
            each(value).square().mean().backward()
            optimizer.step()
    worst = max((a - b.cpu()).abs().max().item() for a, b in zip(model.parameters(), copied.parameters()))
    assert worst < 1e-5, f"after three steps parameters differ by {worst:.1e}"

    side, ones = torch.Stream(device), 1000
    lag.C.synchronize(0)
    results = []
    for waits in (False, True):
        zeros = torch.zeros(ones, device=device)
        lag.C.synchronize(0)
        lag.C.set_lateness(0, {0: 50.0})
        zeros.fill_(1)
        if waits:
            side.wait_stream(torch.accelerator.current_stream(device))
        with lag.module.stream(side):
            results.append(zeros.clone().cpu().sum().item())
        lag.C.set_lateness(0, {})
        lag.C.synchronize(0)
    assert results == [0, ones], f"read {results[0]} without a wait and {results[1]} with one"
    assert not lag.C.take_errors()
    print("the late device computes as the CPU does, and shows a missing wait")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of the device may still run
