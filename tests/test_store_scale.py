"""Checkpoints of many ranks: messages, opened files and memory per rank do not grow with the number of ranks.

A load reads the manifest, which has a line for each rank that saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp.checkpoint import index, load, load_plain, rank_file, save
from fsdp.checkpoint.ragged import RaggedTensor
from tests.harness.oracle import assert_bit_equal


def tables_of(shapes: list[tuple[int, ...]], ranks: int) -> list[index.Table]:
    """Describe what each rank writes: a part of one flat vector of these tensors."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    shard, tables = -(-sum(sizes) // ranks), [index.Table() for _ in range(ranks)]
    for number, (shape, size) in enumerate(zip(shapes, sizes)):
        offset = sum(sizes[:number])
        for rank, table in enumerate(tables):
            start, end = (min(max(place * shard - offset, 0), size) for place in (rank, rank + 1))
            if start < end:
                boxes = RaggedTensor(torch.empty(end - start), shape, start).boxes
                table[str(number)] = index.of_tensor(torch.float32, shape, range(len(shape)), boxes, rank)
    return tables


def test_the_size_of_the_index_is_independent_of_the_number_of_ranks() -> None:
    """The messages that build the index are as small. Ranks join some tables first, then some of the results."""
    shapes, nbytes = [(512, 64), (64,), (64, 512), (512,)], []
    for ranks in (8, 64, 512):
        tables = tables_of(shapes, ranks)
        while len(tables) > 1:
            tables = [index.joined(tables[at : at + 3]) for at in range(0, len(tables), 3)]
            assert max(len(saved.runs) for table in tables for saved in table.values()) <= 3
        nbytes.append(len(index.packed(tables[0])))
    assert max(nbytes) < 1.5 * min(nbytes), nbytes


def test_ranks_with_different_tensors_raise() -> None:
    one, other = tables_of([(4, 4)], 2)[0], tables_of([(4, 5)], 2)[1]
    with pytest.raises(ValueError, match=r"'0' is float32 of shape \(4, 4\) on rank 0 and .* \(4, 5\) on rank 1"):
        index.joined([one, other])
    with pytest.raises(ValueError, match=r"'0' has 16 elements, and the ranks together have 8 of them"):
        index.check_complete(one)
    both = index.joined(tables_of([(4, 4)], 2))
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
