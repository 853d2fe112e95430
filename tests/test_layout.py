"""Layouts of random parameters, dtypes, alignments and world sizes, and the documented examples."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import pytest
import torch

from fsdp.flat.layout import FlatLayout, ParamSpec, Piece, contiguous_stride

FP8 = [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64, *FP8]
SIZES = [0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 64, 127]
WORLD_SIZES = range(1, 65)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])))
    return shape if math.prod(shape) < 3000 else shape[:1]


def random_stride(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return None, or strides of a dense tensor with a random order of dimensions in memory."""
    if rng.random() < 0.5:
        return None
    order = rng.sample(range(len(shape)), len(shape))
    inverse = [order.index(dim) for dim in range(len(shape))]
    return torch.empty([shape[dim] for dim in order], device="meta").permute(inverse).stride()


def random_specs(rng: random.Random) -> list[ParamSpec]:
    shapes = [random_shape(rng) for _ in range(rng.choice([0, 1, 1, 2, 3, 4, 5, 6, 9]))]
    return [ParamSpec(f"layers.{i}.weight", shape, random_stride(rng, shape)) for i, shape in enumerate(shapes)]


def random_layout(rng: random.Random) -> tuple[FlatLayout, int, int]:
    """Return a layout with the alignments of parameters and shards in bytes."""
    dtype = rng.choice(DTYPES)
    compute_dtype = rng.choice([None, *DTYPES])
    reduce_dtype = rng.choice([None, *DTYPES])
    param_alignment, shard_alignment = rng.choice([(1, 1), (16, 1), (16, 16), (1, 16)])
    layout = FlatLayout.build(
        random_specs(rng),
        dtype=dtype,
        world_size=rng.choice(WORLD_SIZES),
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        param_alignment=param_alignment,
        shard_alignment=shard_alignment,
    )
    assert layout.compute_dtype is (compute_dtype or dtype)
    assert layout.reduce_dtype is (reduce_dtype or compute_dtype or dtype)
    return layout, param_alignment, shard_alignment


def layouts(seed: int, count: int) -> list[tuple[FlatLayout, int, int]]:
    rng = random.Random(seed)
    return [random_layout(rng) for _ in range(count)]


def transported_dtypes(layout: FlatLayout) -> set[torch.dtype]:
    return {layout.dtype, layout.compute_dtype, layout.reduce_dtype}


def random_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    nbytes = numel * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare memory, so NaNs and signed zeros count."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


# The property


def test_parameters_survive_flatten_shard_and_gather_bit_for_bit() -> None:
    """Parameters keep shapes, strides and all bits; the pieces of the ranks are each parameter, in order."""
    generator = torch.Generator().manual_seed(0)
    for layout, _, _ in layouts(0, 300):
        memory = [random_bits(param.numel, layout.dtype, generator) for param in layout.params]
        originals = [m.as_strided(param.shape, param.stride) for m, param in zip(memory, layout.params, strict=True)]

        flat = torch.zeros(layout.padded_numel, dtype=layout.dtype)
        for param, original in zip(layout.params, originals, strict=True):
            flat[param.offset : param.end].as_strided(param.shape, param.stride).copy_(original)
        shards = [flat[slice(*layout.shard_range(rank))].clone() for rank in range(layout.world_size)]
        assert {shard.numel() for shard in shards} == {layout.shard_numel}

        gathered = torch.cat(shards)
        for param, original in zip(layout.params, originals, strict=True):
            view = gathered[param.offset : param.end].as_strided(param.shape, param.stride)
            assert view.stride() == original.stride() or view.numel() <= 1
            assert same_bits(view, original), (param, layout)
        for start, end in layout.gaps:
            assert not gathered[start:end].view(torch.uint8).any()

        # Pieces agree with ranges: a rank's part of a parameter is that part of the parameter's memory.
        ends = [0] * len(layout.params)
        for rank, shard in enumerate(shards):
            for number, piece in enumerate(layout.pieces(rank)):
                if piece.numel:
                    part = shard[piece.shard_offset : piece.shard_offset + piece.numel]
                    assert same_bits(part, memory[number][piece.start : piece.end]) and piece.start == ends[number]
                    ends[number] = piece.end
        assert ends == [param.numel for param in layout.params], layout


def test_gaps_and_runs_of_shards_equal_those_of_the_vector() -> None:
    for layout, _, _ in layouts(2, 150):
        padding = [False] * layout.padded_numel
        for start, end in layout.gaps:
            padding[start:end] = [True] * (end - start)
        for rank in range(layout.world_size):
            first, last = layout.shard_range(rank)
            gaps, runs = layout.shard_gaps(rank), layout.shard_runs(rank)
            covered = [False] * layout.shard_numel
            for start, end in gaps:
                covered[start:end] = [True] * (end - start)
            assert covered == padding[first:last]
            ranges = sorted([*gaps, *runs])
            assert all(start < end for start, end in ranges)
            edges = [0, *(end for _, end in ranges)]
            assert [start for start, _ in ranges] == edges[:-1] and edges[-1] == layout.shard_numel
            joined = list(itertools.pairwise(runs))
            assert all(end < start for (_, end), (start, _) in joined)


def test_shards_and_views_are_aligned_with_minimal_padding() -> None:
    """Shards and views are 16-byte aligned in every transported dtype."""
    for layout, param_alignment, shard_alignment in layouts(3, 1000):
        smallest = min(dtype.itemsize for dtype in transported_dtypes(layout))
        unaligned_numel = -(-layout.numel // layout.world_size)
        if shard_alignment == 16:
            for dtype in transported_dtypes(layout):
                assert layout.shard_numel * dtype.itemsize % 16 == 0
        assert 0 <= layout.shard_numel - unaligned_numel < max(1, shard_alignment // smallest)

        aligned_dtypes = transported_dtypes(layout) if shard_alignment == 16 else {layout.compute_dtype}
        step = max(1, param_alignment // min(dtype.itemsize for dtype in aligned_dtypes))
        end = 0
        for param in layout.params:
            assert 0 <= param.offset - end < step
            for dtype in aligned_dtypes:
                assert param.offset * dtype.itemsize % param_alignment == 0
            end = param.end


def test_shards_without_alignment_follow_torch_chunk() -> None:
    for numel in [*range(70), 97, 127, 128, 129, 1000]:
        for world_size in [*range(1, 17), 31, 64]:
            layout = FlatLayout.build([ParamSpec("w", (numel,))], dtype=torch.float32, world_size=world_size)
            chunks = torch.empty(numel, device="meta").chunk(world_size)
            sizes = [chunk.numel() for chunk in chunks] + [0] * (world_size - len(chunks))
            assert [layout.piece(0, rank).numel for rank in range(world_size)] == sizes
            assert layout.shard_numel == sizes[0]


# The documented examples


def example(world_size: int, param_alignment: int) -> FlatLayout:
    specs = [ParamSpec("weight", (5, 3)), ParamSpec("bias", (5,))]
    return FlatLayout.build(specs, dtype=torch.float32, world_size=world_size, param_alignment=param_alignment)


def test_documented_example_with_aligned_parameters() -> None:
    """fp32 weight 5x3 and bias 5 on 2 ranks: 15, 1, 5, 1 elements, 11 per rank."""
    layout = example(world_size=2, param_alignment=16)
    assert [(param.offset, param.end) for param in layout.params] == [(0, 15), (16, 21)]
    assert layout.gaps == ((15, 16), (21, 22))
    assert (layout.numel, layout.padded_numel, layout.shard_numel) == (21, 22, 11)
    assert layout.pieces(0) == (Piece(0, 11, 0), Piece(0, 0, 11))
    assert layout.pieces(1) == (Piece(11, 15, 0), Piece(0, 5, 5))


def test_parameters_are_aligned_in_the_compute_dtype() -> None:
    specs = [ParamSpec("a", (1,)), ParamSpec("b", (1,))]
    build = partial(FlatLayout.build, specs, dtype=torch.float32, world_size=1, param_alignment=16)
    assert build().params[1].offset == 4
    assert build(compute_dtype=torch.bfloat16).params[1].offset == 8
    # The reduce dtype counts only where the shard is aligned too.
    assert build(compute_dtype=torch.float32, reduce_dtype=torch.bfloat16).params[1].offset == 4
    aligned = build(compute_dtype=torch.float32, reduce_dtype=torch.bfloat16, shard_alignment=16)
    assert aligned.params[1].offset == 8
    assert aligned.shard_numel == 16


def test_strides() -> None:
    for shape in [(), (4,), (2, 3), (2, 0, 5), (0, 3), (1, 1, 7), (4, 3, 2, 5)]:
        assert contiguous_stride(shape) == torch.empty(shape, device="meta").stride()
    channels_last = torch.empty(4, 3, 5, 6, device="meta").contiguous(memory_format=torch.channels_last)
    spec = ParamSpec("conv", tuple(channels_last.shape), channels_last.stride())
    assert FlatLayout.build([spec], dtype=torch.float32, world_size=1).params[0].stride == (90, 1, 18, 3)


# Errors


@pytest.mark.parametrize(
    ("specs", "kwargs", "message"),
    [
        ([ParamSpec("a", (1,)), ParamSpec("a", (2,))], {}, "'a' comes twice"),
        ([ParamSpec("a", (1,), aliases=("b",)), ParamSpec("b", (2,))], {}, "'b' comes twice"),
        ([ParamSpec("a", (1,), aliases=("a",))], {}, "'a' comes twice"),
        ([ParamSpec("a", (2, -1))], {}, r"'a' has shape \(2, -1\)"),
        ([ParamSpec("a", (2, 3), (4, 1))], {}, "dense"),
        ([ParamSpec("a", (2, 3), (1,))], {}, "dense"),
        ([], {"world_size": 0}, "world_size"),
        ([], {"param_alignment": 12}, "param_alignment must be a power of two"),
        ([], {"shard_alignment": -16}, "shard_alignment must be a power of two"),
    ],
)
def test_errors(specs: list[ParamSpec], kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatLayout.build(specs, **{"dtype": torch.float32, "world_size": 2, **kwargs})


def test_a_rank_outside_the_world_is_an_error() -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=r"rank in \[0, 2\)"):
            example(world_size=2, param_alignment=1).piece(0, rank)
