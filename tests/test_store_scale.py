"""Checkpoints of many ranks: messages, opened files and memory per rank do not grow with the number of ranks.

A load reads the manifest, which has a line for each rank that saved.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.checkpoint import files, index, load, load_plain, rank_file, save
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.placement.boxes import Box, memory_order
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks

LAYERS, EXTRA = 12, 200_000


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(LAYERS)))


def wrapped(seed: int, **options: Any) -> FSDP:
    return FSDP(layers(seed), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


@on_ranks(4)
def test_each_replica_writes_a_part(tmp_path: Path) -> None:
    root = str(tmp_path)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    both = groups[0][rank // 2], groups[1][rank % 2]
    model = wrapped(1, process_group=both, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    save(root, model)
    nbytes = torch.tensor([Path(root, "checkpoint_00000001", files.rank_name(rank)).stat().st_size])
    all_nbytes = [torch.zeros_like(nbytes) for _ in range(4)]
    dist.all_gather(all_nbytes, nbytes)
    assert max(all_nbytes) < 3 * min(all_nbytes)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    load(root, model)
    if rank == 0:
        assert_bit_equal(load_plain(root).model, layers(1).state_dict())
    assert_bit_equal(model.state_dict(), layers(1).state_dict())


# -- without processes -------------------------------------------------------------------------------------------------


def sharded(shapes: list[tuple[int, ...]], rank: int, ranks: int, transposed: bool) -> dict[str, RaggedTensor]:
    """Return this rank's part of one flat vector of these tensors."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    shard, offset, state = -(-numel // ranks), 0, {}
    for number, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        start, end = (min(max(place * shard - offset, 0), size) for place in (rank, rank + 1))
        stride = torch.empty(shape, device="meta").T.contiguous().T.stride() if transposed and len(shape) == 2 else None
        state[str(number)] = RaggedTensor(torch.empty(end - start), shape, start, stride)
        offset += size
    return state


def writes(key: str, rank: int, ranks: int, replicas: int) -> bool:
    return zlib.crc32(key.encode()) % replicas == rank // ranks


def table_of(state: dict[str, RaggedTensor], rank: int, ranks: int, replicas: int = 1) -> index.Table:
    """Describe the elements that a rank writes; rank 0 writes tensors without elements."""
    table: index.Table = {}
    for key, value in state.items():
        shape, boxes = tuple(value.shape), value.boxes
        if value.numel() == 0:
            boxes = (Box.whole(shape),) if rank == 0 else ()
        if boxes and (value.numel() == 0 or writes(key, rank, ranks, replicas)):
            table[key] = index.of_tensor(value.dtype, shape, memory_order(shape, value.stride()), boxes, rank)
    return table


def described(shapes: list[tuple[int, ...]], ranks: int, replicas: int, transposed: bool = False) -> index.Table:
    """Join tables as the ranks do: some tables first, then some of the results."""
    states = [sharded(shapes, rank % ranks, ranks, transposed) for rank in range(ranks * replicas)]
    joined = [table_of(state, rank, ranks, replicas) for rank, state in enumerate(states)]
    while len(joined) > 1:
        width = random.randint(2, 5)
        joined = [index.joined(joined[at : at + width]) for at in range(0, len(joined), width)]
    return joined[0]


def test_the_size_of_the_index_is_independent_of_the_number_of_ranks() -> None:
    """The messages that build the index are as small."""
    shapes = [(512, 64), (64,), (64, 512), (512,)]
    nbytes = [len(index.packed(described(shapes, ranks, 1))) for ranks in (8, 64, 512)]
    assert max(nbytes) < 1.5 * min(nbytes), nbytes
    counts = []
    for ranks in (8, 512):
        table = described(shapes, ranks, 1)
        counts.append(sum(len(saved.runs) for saved in table.values()))
    assert max(counts) <= 3 * len(shapes)


def test_ranks_with_different_tensors_raise() -> None:
    one, other = (table_of(sharded([(4, 4 + rank)], rank, 2, False), rank, 2) for rank in range(2))
    with pytest.raises(ValueError, match=r"'0' is float32 of shape \(4, 4\) on rank 0 and .* \(4, 5\) on rank 1"):
        index.joined([one, other])
    with pytest.raises(ValueError, match=r"'0' has 16 elements, and the ranks together have 8 of them"):
        index.check_complete(one)
    both = index.joined([one, table_of(sharded([(4, 4)], 1, 2, False), 1, 2)])
    index.check_complete(both, ["0"])
    with pytest.raises(ValueError, match=r"no rank holds elements of '1' \(2 in all\)"):
        index.check_complete(both, ["0", "1", "2"])


def bytes_read() -> int:
    """Return the bytes that this process has read."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def test_files_are_read_once_or_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice where values exist that a second pass overwrites. Without an optimizer no optimizer states are read."""
    monkeypatch.setattr(rank_file, "BLOCK", 10_000)
    module = nn.Sequential(*(nn.Linear(150, 150) for _ in range(8)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 150)).sum().backward()
    optimizer.step()
    path = save(tmp_path, module, optimizer) / "rank_0.safetensors"
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    load(tmp_path, module, optimizer)  # imports happen before the measurement
    nn.init.zeros_(module[0].weight)
    for in_place, times in ((True, 2), (False, 1)):
        before = bytes_read()
        load(tmp_path, module, optimizer, in_place=in_place)
        assert bytes_read() - before < (times + 0.3) * path.stat().st_size
    assert_bit_equal(module.state_dict(), expected)
    assert_bit_equal(load_plain(tmp_path).model, expected)
    before = bytes_read()
    load(tmp_path, module)
    assert bytes_read() - before < 0.5 * path.stat().st_size
