"""Hybrid sharding and resharding to ranks nearby, on four ranks of the late device: two replicas of two.

python -m tests.device.hybrid [PART_OF_A_NAME ...]
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp import CPUOffload, MixedPrecision
from fsdp import ShardingStrategy as S
from tests.device import parity, pool, situations
from tests.device.pairs import offload

CASES: dict[str, pool.Case] = {}


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("lag", (2, 2), mesh_dim_names=("replicate", "shard"))


def add(name: str, strategy: S, *, offloaded: bool = False, low: bool = False, **options: Any) -> None:
    """Add a training with ``options``; ``low``: in bfloat16."""
    options["sharding_strategy"] = strategy
    if offloaded:
        options["cpu_offload"] = CPUOffload(True)
    if low:
        precision = MixedPrecision(torch.bfloat16, torch.bfloat16)
        options |= {"dtype": torch.float32, "bound": 2e-2, "mixed_precision": precision}

    def run(device: torch.device) -> str:
        hybrid = {"device_mesh": mesh()} if strategy in (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2) else {}
        return parity.train(device, **options, **hybrid)

    CASES[name] = run


for strategy in (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2):
    for uop in (False, True):
        title = f"{strategy.name}.uop{int(uop)}"
        for accumulation, passes in parity.ACCUMULATION.items():
            add(f"{title}.{accumulation}", strategy, use_orig_params=uop, passes=passes)
        add(f"{title}.offload", strategy, use_orig_params=uop, offloaded=True, passes=(False, True))
        add(f"{title}.clip", strategy, use_orig_params=uop, clip=True)
        add(f"{title}.low", strategy, use_orig_params=uop, low=True)
for late, fixed in {**parity.LATE_STREAMS, "replica": {3: 40.0}}.items():
    add(f"hybrid.late_{late}", S.HYBRID_SHARD, late=0.0, fixed=fixed, passes=(False, True))
    add(f"hybrid.late_{late}.offload", S.HYBRID_SHARD, late=0.0, fixed=fixed, offloaded=True)
add("nearby2", S.FULL_SHARD, reshard_after_forward=2)
add("nearby2.nosync.uop1", S.FULL_SHARD, reshard_after_forward=2, use_orig_params=True, passes=(False, True))
add("nearby2.late_gather", S.FULL_SHARD, reshard_after_forward=2, late=0.0, fixed={1: 40.0})
add("nearby2.offload", S.FULL_SHARD, reshard_after_forward=2, offloaded=True)
add("nearby2.low", S.FULL_SHARD, reshard_after_forward=2, low=True)
add("full4.low", S.FULL_SHARD, low=True, passes=(False, True))


def delayed_all_reduce(device: torch.device) -> None:
    """Gradients are reduced over the replicas in the last of three backwards only."""
    for extra in ({}, offload()):
        pair = situations.late_pair(device, device_mesh=mesh(), sharding_strategy=S.HYBRID_SHARD, **extra)
        for _ in range(4):
            pair.zero_grad()
            for last in (False, False, True):
                pair.model.set_requires_all_reduce(last)
                pair.backward()
            pair.update()
        pair.check()


def all_reduce_hook(device: torch.device) -> str | None:
    """Change gradients in a hook once they are reduced over the replicas."""
    pair = situations.late_pair(device, device_mesh=mesh(), sharding_strategy=S.HYBRID_SHARD)
    pair.model.set_all_reduce_hook(lambda grad: grad.mul_(0.5), recurse=True)
    for _ in range(4):
        pair.zero_grad()
        pair.backward()
        for param in pair.plain.parameters():
            param.grad.mul_(0.5)
        pair.update()
    return pair.check()


CASES |= {"delayed_all_reduce": delayed_all_reduce, "all_reduce_hook": all_reduce_hook}

if __name__ == "__main__":
    pool.main("tests.device.hybrid", CASES, ranks=4, devices=4)
