"""Checkpoints of many ranks: what they say to each other, read and keep in memory does not grow with all of them."""

from __future__ import annotations

import os
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import WriteItem

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.checkpoint import checksums, files, index, load, load_plain, save
from fsdp.checkpoint.load_checkpoint import Extras
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.comm import consensus
from fsdp.placement.boxes import Box
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import run_ranks

LAYERS, EXTRA = 12, 200_000


def layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(LAYERS)))


def wrapped(seed: int, **options: Any) -> FSDP:
    return FSDP(layers(seed), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def deep(seed: int) -> Any:
    model = wrapped(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


class Watched:
    """What this rank sends to others, in bytes, and the files it reads whole."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self.told: list[int] = []  # of how many files' names, in each message
        self.read: list[str] = []
        self.removed: list[str] = []
        send, read, remove = consensus._SideGroup.send, checksums.read_verified, files.Disk.remove_file

        def sends(side: Any, rank: int, value: Any) -> None:
            self.sent.append(len(pickle.dumps(value)))
            self.told.append(len(re.findall(rb"tensors_|extra_|__\d", pickle.dumps(value))))
            send(side, rank, value)

        def reads(path: Path, entry: checksums.Entry) -> bytes:
            self.read.append(path.name)
            return read(path, entry)

        patch.setattr(consensus._SideGroup, "send", sends)
        patch.setattr(checksums, "read_verified", reads)
        patch.setattr(files.Disk, "remove_file", lambda disk, its: (self.removed.append(its.name), remove(disk, its)))


def few_words(root: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = deep(1)
    added = [torch.full((EXTRA,), number, dtype=torch.uint8) for number in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        save(root, model, optimizer, extra=added[rank])
        assert rank == 0 or max(watched.sent) > 2000
        watched.sent.clear()
        save(root, model, optimizer, extra=added[rank])
        assert max(watched.sent) < 700  # size and checksum of a rank's three files
        watched.sent.clear()
        watched.read.clear()
        watched.told.clear()
        optimizer.param_groups[0]["lr"] = 0.5
        extras = load(root, *deep(2))
        assert max(watched.sent) < 2500  # of those that it verifies and reads
        assert max(watched.told) <= 5  # two files of two ranks, and one of its own
        if rank > 0:
            assert {*watched.read} == {
                "tensors.json",
                *(f"tensors_{its}.json" for its in (0, rank)),
                f"extra_{rank}.pt",
            }
        watched.read.clear()
        assert all(torch.equal(extra, expected) for extra, expected in zip(extras, added, strict=True))
        assert len(watched.read) == size - 1
        other = deep(3)[0]
        save(root, other)  # without an optimizer: not as before
        before = other.state_dict()
        load(root, model)
        assert_bit_equal(model.state_dict(), before)
        dist.barrier()
        older = [name for number in (1, 2, 3) for name in os.listdir(Path(root, f"checkpoint_0000000{number}"))]
        older = [name for name in older if name != "manifest"]  # which is renamed, and removed by whoever comes last
        dist.barrier()
        save(root, other, keep=1)
        assert 0 < len(watched.removed) <= len(older) // size + 6
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, watched.removed)
        assert sorted(name for names in everybody for name in names if name != "retired") == sorted(older)
        assert sorted(os.listdir(root)) == ["checkpoint_00000004", "latest"]


def test_fd50_fd51_fd52_fd54_what_ranks_say_read_and_remove(tmp_path: Path) -> None:
    """FD50: plans travel if they have changed. FD51: a rank reads where its own tensors are. FD52: and its extra.
    FD54: each removes a part of what is older."""
    run_ranks(3, few_words, str(tmp_path))


def replicas(root: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    both = groups[0][rank // 2], groups[1][rank % 2]
    model = wrapped(1, process_group=both, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    save(root, model)
    nbytes = torch.tensor([Path(root, "checkpoint_00000001", files.data_name(rank)).stat().st_size])
    all_nbytes = [torch.zeros_like(nbytes) for _ in range(4)]
    dist.all_gather(all_nbytes, nbytes)
    assert max(all_nbytes) < 3 * min(all_nbytes)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    load(root, model)
    if rank == 0:
        assert_bit_equal(load_plain(root).model, layers(1).state_dict())
    assert_bit_equal(model.state_dict(), layers(1).state_dict())


def test_fd50_replicas_write_each_a_part(tmp_path: Path) -> None:
    run_ranks(4, replicas, str(tmp_path))


# -- without processes -------------------------------------------------------------------------------------------------


def items_of(state: dict[str, Any]) -> list[WriteItem]:
    return [item for key, value in state.items() for item in value.__create_write_items__(key, value)]


def sharded(shapes: list[tuple[int, ...]], rank: int, ranks: int, transposed: bool) -> dict[str, RaggedTensor]:
    """What a rank has of one flat vector of these tensors."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    shard, offset, state = -(-numel // ranks), 0, {}
    for number, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        start, end = (min(max(place * shard - offset, 0), size) for place in (rank, rank + 1))
        stride = torch.empty(shape, device="meta").T.contiguous().T.stride() if transposed and len(shape) == 2 else None
        state[str(number)] = RaggedTensor(torch.empty(end - start), shape, start, stride)
        offset += size
    return state


def described(shapes: list[tuple[int, ...]], ranks: int, replicas: int, transposed: bool = False) -> index.Table:
    """As the ranks join it: some of them, then some of the results."""
    tables = [sharded(shapes, rank % ranks, ranks, transposed) for rank in range(ranks * replicas)]
    joined = [index.described(items_of(state), state, rank) for rank, state in enumerate(tables)]
    while len(joined) > 1:
        width = random.randint(2, 5)
        joined = [index.joined(joined[at : at + width]) for at in range(0, len(joined), width)]
    return joined[0]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("ranks", [1, 3, 8, 50])
def test_fd51_ranks_are_found_by_runs(ranks: int, replicas: int, transposed: bool) -> None:
    """FD51: each element is on one rank, which is found, and nearly nothing is looked for in vain."""
    random.seed(ranks)
    shapes = [(5, 9), (3,), (40, 4), (1, 1), (2, 0), (), (7, 11)]
    table, kept = index.settled(described(shapes, ranks, replicas, transposed))
    assert (replicas == 1 and set(kept) <= {"4"}) or len(kept) == len(shapes)
    assert index.unpacked_table(index.packed_table(table), ranks * replicas, ranks * replicas) == table
    for key, saved in table.items():
        assert len(saved.runs) <= 3, key
        held: dict[tuple[int, ...], int] = {}
        for rank in range(ranks * replicas):
            for box in (
                sharded(shapes, rank % ranks, ranks, transposed)[key].boxes if index.has(saved.runs, rank) else ()
            ):
                assert rank in saved.holders([box])
                assert saved.holders([box]) <= {rank}
                for place in torch.ones(box.sizes).nonzero().tolist():
                    found = tuple(o + p for o, p in zip(box.offsets, place))
                    assert held.setdefault(found, rank) == rank, (key, found)
        assert len(held) == torch.Size(saved.shape).numel(), key
        assert saved.holders([Box.whole(saved.shape)]) == {*held.values()}


def test_fd51_the_index_is_as_small_for_many_ranks_as_for_few() -> None:
    """FD51: and so is what ranks tell each other to make it."""
    shapes = [(512, 64), (64,), (64, 512), (512,)]
    nbytes = [len(index.packed_table(index.settled(described(shapes, ranks, 1))[0])) for ranks in (8, 64, 512)]
    assert max(nbytes) < 1.5 * min(nbytes), nbytes
    counts = []
    for ranks in (8, 512):
        table = described(shapes, ranks, 1)
        counts.append(sum(len(saved.runs) for saved in table.values()))
    assert max(counts) <= 3 * len(shapes)


def test_fd51_ranks_that_differ_are_told() -> None:
    one, other = (
        index.described(items_of(state), state, rank)
        for rank, state in enumerate([sharded([(4, 4)], 0, 2, False), sharded([(4, 5)], 1, 2, False)])
    )
    with pytest.raises(ValueError, match=r"'0' is float32 of shape \(4, 4\) on rank 0 and .* \(4, 5\) on rank 1"):
        index.joined([one, other])
    with pytest.raises(ValueError, match=r"'0' has 16 elements, and the ranks together have 8 of them"):
        index.settled(one)


def test_an_extra_of_a_checkpoint_that_was_removed_is_told(tmp_path: Path) -> None:
    unread = Extras(*files.find(save(tmp_path, nn.Linear(3, 2))))
    save(tmp_path, nn.Linear(3, 2), keep=1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_00000002", "latest"]
    with pytest.raises(RuntimeError, match=r"checkpoint_00000001 was removed since it was loaded: ask for"):
        print(unread[0])


def bytes_read() -> int:
    """By this process, from files and whatever else."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def test_fd55_no_file_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FD55: what is read is verified meanwhile; what nobody reads is verified all the same."""
    monkeypatch.setattr(files, "BLOCK", 10_000, raising=False)
    module = nn.Sequential(*(nn.Linear(150, 150) for _ in range(8)))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 150)).sum().backward()
    optimizer.step()
    path = save(tmp_path, module, optimizer) / "__0_0.distcp"
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    load(tmp_path, module, optimizer)  # whatever is imported first
    nn.init.zeros_(module[0].weight)
    before = bytes_read()
    load(tmp_path, module, optimizer)
    assert bytes_read() - before < 1.3 * path.stat().st_size
    assert_bit_equal(module.state_dict(), expected)
    assert_bit_equal(load_plain(tmp_path).model, expected)
    content = path.read_bytes()
    for number in range(5, len(content), len(content) // 7):
        path.write_bytes(content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :])
        for others in ((optimizer,), ()):  # without an optimizer most of the file is not read
            with pytest.raises(RuntimeError, match=r"__0_0.distcp has another checksum than when it was written"):
                load(tmp_path, module, *others)


def test_an_index_and_an_extra_are_read_once(tmp_path: Path) -> None:
    """The bytes that are used are the bytes that were verified: of a second reading nobody would know."""
    size = 3_000_000
    save(tmp_path, nn.Linear(3, 2), extra=torch.ones(size, dtype=torch.uint8))
    for read in (lambda: load(tmp_path, nn.Linear(3, 2)), lambda: load_plain(tmp_path)):
        read()
        before = bytes_read()
        read()
        assert bytes_read() - before < 2.5 * size  # verified by the rank, and read for its value


def test_fd55_blocks_are_read_once_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 100)
    random.seed(1)
    for size in (0, 1, 99, 100, 101, 300, 1050):
        content, path = random.randbytes(size), tmp_path / str(size)
        entries: dict[str, checksums.Entry] = {}
        blocks: dict[str, list[str]] = {}
        with files.durable(path, entries, blocks=blocks) as written:
            for begin in range(0, size, 37):
                written.write(content[begin : begin + 37])
        entry, its = entries[path.name], blocks[path.name]
        checksums.verify(tmp_path, entries)
        assert len(its) == max(1, -(-size // 100)) and (entry.checksum in its) == (size <= 100)
        with checksums.Verified(path, entry, its) as stream:
            assert stream.read() == content and stream.tell() == size and stream.read(3) == b""
        with checksums.Verified(path, entry, its) as stream:
            before, begin = bytes_read(), 0
            noise = -before + bytes_read()
            while begin < size:  # parts one after the other, of each the end first
                end = min(size, begin + random.randint(1, 320))
                stream.seek(tail := max(begin, end - 20))
                assert stream.read(end - tail) == content[tail:end]
                stream.seek(begin)
                assert stream.read(end - begin) == content[begin:end]
                begin = end
            assert bytes_read() - before - noise <= size + noise
        for number in range(0, size, 13):
            path.write_bytes(content[:number] + bytes([content[number] ^ 1]) + content[number + 1 :])
            with checksums.Verified(path, entry, its) as stream:
                stream.seek(number)
                with pytest.raises(RuntimeError, match=rf"{size} has another checksum than when it was written"):
                    stream.read(1)
            with pytest.raises(RuntimeError, match=rf"{size} has another checksum than when it was written"):
                checksums.verify(tmp_path, {path.name: entry})
        path.write_bytes(content + b"x")
        with pytest.raises(RuntimeError, match=rf"has {size + 1} bytes instead of {size}"):
            checksums.Verified(path, entry, its)
        with pytest.raises(RuntimeError, match=r"the checksums of the blocks of .* are not those that the manifest"):
            checksums.Verified(path, entry, ["0" * 64] * len(its))
        path.unlink()
