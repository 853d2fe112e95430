"""The model zoo: one small model per structure that sharding must survive, with sizes that 2, 3 and 4 do not divide.

A `Case` is picklable and has everything for a training step; `ZOO` holds all cases by name. Losses are means over
equal batches, so the mean of the ranks' gradients is the gradient of the concatenated batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH = 37, 7, 11


class Batch(NamedTuple):
    """Arguments of the model's forward and what the loss compares with; the first dimension is the sample."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    def slice(self, start: int, end: int) -> Batch:
        return Batch(tuple(x[start:end] for x in self.inputs), self.target[start:end])

    def to(self, dtype: torch.dtype) -> Batch:
        """Floating-point tensors cast to `dtype`; token ids stay."""
        return Batch(tuple(_cast(x, dtype) for x in self.inputs), _cast(self.target, dtype))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


_seeding = threading.Lock()  # ranks may be threads that share the generator


@dataclass(frozen=True)
class Case:
    """A model, its data, its loss, and the classes of the submodules to wrap."""

    name: str
    model: Callable[[], nn.Module]
    samples: Callable[[torch.Generator, int], Batch]
    criterion: Callable[[Tensor, Tensor], Tensor]
    blocks: frozenset[type[nn.Module]]
    unused: tuple[str, ...] = ()  # prefixes of the parameters that no forward uses
    local_statistics: bool = False  # the model sees only its own rank's batch: no parity with the concatenated one

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build the model with values that depend only on `seed` (`dtype` is a cast of the same fp32 values)."""
        with _seeding, torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return self.model().to(dtype)

    def make_batch(self, seed: int, size: int) -> Batch:
        return self.samples(torch.Generator().manual_seed(seed), size)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(module(*batch.inputs), batch.target)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _make_vectors(generator: torch.Generator, size: int) -> Batch:
    x = torch.randn(size, 7, generator=generator)
    return Batch((x,), torch.randn(size, 5, generator=generator))


def _make_tokens(generator: torch.Generator, size: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return Batch((tokens[:, :-1],), tokens[:, 1:])


def _make_pairs(generator: torch.Generator, size: int) -> Batch:
    source = torch.randint(VOCABULARY, (size, LENGTH + 2), generator=generator)
    target = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return Batch((source, target[:, :-1]), target[:, 1:])


def _make_images(generator: torch.Generator, size: int) -> Batch:
    images = torch.randn(size, 3, 9, 9, generator=generator)
    return Batch((images,), torch.randn(size, 5, generator=generator))


# -- vectors -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Children by name (modules, parameters, buffers, values) and a function `forward(net, ...)`, for one test."""

    def __init__(self, forward: Callable[..., Any] | None = None, **children: Any) -> None:
        super().__init__()
        self.run: Any = forward
        for name, child in children.items():
            if isinstance(child, Tensor) and not isinstance(child, nn.Parameter):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Unit(Net):
    """A `Net` that a wrap policy selects by its class."""


class WithExtraState(Net):
    """A `Net` whose extra state is its attribute `extra`; loading the state "bad" raises."""

    def __init__(self, extra: Any, **children: Any) -> None:
        super().__init__(children.pop("forward", None), **children)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise ValueError("this module takes no such state")
        self.extra = state


def in_turn(modules: Iterable[nn.Module], x: Tensor, checkpointing: str = "none") -> Tensor:
    """Call modules one after the other, each checkpointed ("none", "reentrant" or "non-reentrant")."""
    for module in modules:
        is_plain = checkpointing == "none"
        x = module(x) if is_plain else checkpoint(module, x, use_reentrant=checkpointing == "reentrant")
    return x


class MlpBlock(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.scale = nn.Parameter(torch.ones(1))  # fewer elements than ranks

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def mlp() -> nn.Module:
    """Build odd sizes, a parameter of one element per block, parameters of the root itself."""
    blocks = nn.Sequential(MlpBlock(7, 13), MlpBlock(13, 11), MlpBlock(11, 17))
    return nn.Sequential(OrderedDict(blocks=blocks, head=nn.Linear(17, 5)))


class Gain(nn.Module):
    """One element, so that all ranks but one hold none of it."""

    def __init__(self, value: float = 1.5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def used_twice() -> nn.Module:
    """Build a module called twice in one forward, other units in between."""
    return Net(
        lambda m, x: m.head(m.shared(m.second(m.shared(m.first(x))))),
        first=MlpBlock(7, 11),
        shared=MlpBlock(11, 11),
        second=MlpBlock(11, 11),
        head=nn.Linear(11, 5),
    )


class BlockWithUnused(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.unused = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


def unused() -> nn.Module:
    """Build parameters that no forward uses: in the middle of each used block, and a whole block."""
    return Net(
        lambda m, x: m.head(m.blocks(x)),
        blocks=nn.Sequential(BlockWithUnused(7), BlockWithUnused(7)),
        never=BlockWithUnused(7),
        head=nn.Linear(7, 5),
    )


class LoraBlock(nn.Module):
    """A frozen base, used first in forward and so read last in backward, beside a small trained adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 3, bias=False), nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.base(x)) + self.up(torch.tanh(self.down(x)))


def lora() -> nn.Module:
    """Build a frozen input layer, which backward never reaches, then LoRA blocks and a trained head."""
    embed = nn.Linear(7, 13).requires_grad_(False)
    blocks = nn.Sequential(LoraBlock(13), LoraBlock(13), LoraBlock(13))
    return nn.Sequential(OrderedDict(embed=embed, blocks=blocks, head=nn.Linear(13, 5)))


class SegmentBlock(nn.Module):
    """A frozen base first, leaves inside and outside a checkpointed segment, a weight computed from leaves.

    Besides, a layer that is not used. `segment` is "none", "reentrant" or "non-reentrant".
    """

    def __init__(self, width: int, segment: str) -> None:
        super().__init__()
        self.segment = segment
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 3), nn.Linear(3, width)
        self.norm, self.gain = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.unused = nn.Linear(width, 2)

    def adapter(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.down(x)), self.up.weight * self.gain[:, None], self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.segment == "none":
            inner = self.adapter(h)
        else:
            inner = checkpoint(self.adapter, h, use_reentrant=self.segment == "reentrant")
        return torch.sin(self.base(x)) + inner


def segments(segment: str) -> nn.Module:
    embed, blocks = nn.Linear(7, 7), nn.Sequential(*(SegmentBlock(7, segment) for _ in range(3)))
    return nn.Sequential(OrderedDict(embed=embed, blocks=blocks, head=nn.Linear(7, 5)))


# -- sequences ---------------------------------------------------------------------------------------------------


class Stacked(nn.Module):
    """An embedding, blocks, perhaps a norm, and a head that may be tied to the embedding."""

    def __init__(
        self, words: int, width: int, blocks: Iterable[nn.Module], *, tied: bool = True, norm: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width) if norm else None
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = in_turn(self.blocks, self.embed(tokens))
        return self.head(x if self.norm is None else self.norm(x))


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return self.out(F.scaled_dot_product_attention(self.query(x), key, value, is_causal=self.causal))


class EncoderBlock(nn.Module):
    """Self-attention and an MLP, each behind a LayerNorm and with a residual."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(causal)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 23), nn.GELU(), nn.Linear(23, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h)
        return x + self.mlp(self.norm2(x))


class DecoderBlock(EncoderBlock):
    """An encoder block with causal attention, then attention over the encoder's output."""

    def __init__(self) -> None:
        super().__init__(causal=True)
        self.norm3, self.cross = nn.LayerNorm(WIDTH), Attention(causal=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        return x + self.cross(self.norm3(x), memory)


def tied_transformer() -> nn.Module:
    """Build a causal language model with a tied output layer: one parameter under two names of the root."""
    tokens, positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
    blocks = nn.Sequential(EncoderBlock(causal=True), EncoderBlock(causal=True))
    norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = tokens.weight
    return Net(
        lambda m, words: m.head(m.norm(m.blocks(m.tokens(words) + m.positions.weight))),
        tokens=tokens,
        positions=positions,
        blocks=blocks,
        norm=norm,
        head=head,
    )


def encoder_decoder() -> nn.Module:
    """Build units in another order than in the module tree: decoder units use the output of encoder units."""

    def forward(m: Any, source: Tensor, target: Tensor) -> Tensor:
        memory = m.encoder(m.source(source))
        x = m.target(target)
        for block in m.decoder:
            x = block(x, memory)
        return m.head(x)

    return Net(
        forward,
        decoder=nn.ModuleList([DecoderBlock(), DecoderBlock()]),  # registered first, run last
        encoder=nn.Sequential(EncoderBlock(causal=False), EncoderBlock(causal=False)),
        source=nn.Embedding(VOCABULARY, WIDTH),
        target=nn.Embedding(VOCABULARY, WIDTH),
        head=nn.Linear(WIDTH, VOCABULARY),
    )


def lstm() -> nn.Module:
    """Build a recurrent network, which keeps weights in its own lists (`_flat_weights`)."""
    return Net(
        lambda m, words: m.head(m.lstm(m.tokens(words))[0]),
        tokens=nn.Embedding(VOCABULARY, 13),
        lstm=nn.LSTM(13, 13, num_layers=2, batch_first=True),  # sizes of an LSTM are multiples of 4, not of 3
        head=nn.Linear(13, VOCABULARY),
    )


# -- images ------------------------------------------------------------------------------------------------------


def conv_net() -> nn.Module:
    """Build convolutions with BatchNorm: buffers changed by forwards, and statistics of the local batch."""

    def block(channels_in: int, channels_out: int) -> Unit:
        return Unit(
            lambda m, x: torch.relu(m.norm(m.conv(x))),
            conv=nn.Conv2d(channels_in, channels_out, 3, bias=False),
            norm=nn.BatchNorm2d(channels_out),
        )

    blocks, head = nn.Sequential(block(3, 5), block(5, 7)), nn.Linear(7, 5)
    return Net(lambda m, x: m.head(m.blocks(x).mean(dim=(2, 3))), blocks=blocks, head=head)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error; torch's own takes tensors of two dtypes only since 2.12."""
    return (output - target).square().mean()


def _segments(segment: str) -> Case:
    prefixes = tuple(f"blocks.{i}.unused." for i in range(3))
    build = partial(segments, segment)
    return Case(f"segment-{segment}", build, _make_vectors, squared_error, frozenset({SegmentBlock}), prefixes)


_UNUSED = ("blocks.0.unused.", "blocks.1.unused.", "never.")
_CASES = [
    Case("mlp", mlp, _make_vectors, squared_error, frozenset({MlpBlock})),
    Case("tied-transformer", tied_transformer, _make_tokens, cross_entropy, frozenset({EncoderBlock})),
    Case("encoder-decoder", encoder_decoder, _make_pairs, cross_entropy, frozenset({EncoderBlock, DecoderBlock})),
    Case("used-twice", used_twice, _make_vectors, squared_error, frozenset({MlpBlock})),
    Case("unused", unused, _make_vectors, squared_error, frozenset({BlockWithUnused}), _UNUSED),
    Case("conv-batchnorm", conv_net, _make_images, squared_error, frozenset({Unit}), local_statistics=True),
    Case("lstm", lstm, _make_tokens, cross_entropy, frozenset({nn.LSTM})),
    Case("lora", lora, _make_vectors, squared_error, frozenset({LoraBlock})),
    *(_segments(segment) for segment in ("none", "reentrant", "non-reentrant")),
]
ZOO: dict[str, Case] = {case.name: case for case in _CASES}
