"""Small models in the shapes of popular libraries: caches, output classes, routing, adapters.

`models.py` covers structures of parameters; these models cover unusual values between forwards. Their forward takes
keyword arguments and returns an object with a `loss`, as Hugging Face's models do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH = 29, 5, 6

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, a batch, the classes of the blocks, and `recompute(model, reentrant)`, which checkpoints them."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]
    blocks: Callable[[nn.Module], set[type[nn.Module]]]
    recompute: Callable[[Any, bool], None]


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is an ordered dictionary of fields that are not None, like Hugging Face's `ModelOutput`."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not for an output")

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


class Cache:
    """Keys and values of earlier layers, in one object that all layers extend."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return self.keys[-1], self.values[-1]


class CausalLM(nn.Module):
    """Tied embedding and head, a norm in the root, and layers of subclasses between."""

    def __init__(self, layers: list[nn.Module], tied: bool = True) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute: bool | None = None  # reentrant or not; None: no checkpointing

    def call(self, layer: nn.Module, x: Tensor, **kwargs: Any) -> Any:
        if self.recompute is None:
            return layer(x, **kwargs)
        # Pass tensors as arguments: reentrant recomputation would run the backward of captured tensors' graphs.
        names, values = list(kwargs), list(kwargs.values())
        return checkpoint(lambda h, *v: layer(h, **dict(zip(names, v))), x, *values, use_reentrant=self.recompute)

    def finish(self, x: Tensor, labels: Tensor, **more: Any) -> Output:
        logits = self.head(self.norm(x))
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits, **more)


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key_value, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, cache: Cache | None = None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        h = self.norm(x)
        key, value = self.key_value(h).chunk(2, dim=-1)
        if cache is not None:
            key, value = cache.update(key, value)
        cos, sin = rotary
        attended = F.scaled_dot_product_attention(self.query(h) * cos, key * sin, value, is_causal=True)
        return x + self.out(attended)


class Cached(CausalLM):
    """A key-value cache that is passed to every layer and returned, and a tuple of tensors that layers share."""

    def __init__(self) -> None:
        super().__init__([CachedLayer() for _ in range(6)])

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        x, cache = self.embed(tokens), Cache() if self.recompute is None else None
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, WIDTH, dtype=x.dtype)
        for layer in self.layers:
            x = self.call(layer, x, cache=cache, rotary=(angles.cos(), angles.sin()))
        return self.finish(x, labels, cache=cache)


class RoutedLayer(nn.Module):
    """Routes each token to two of five experts, so some experts are unused; returns router scores."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        weights, chosen = scores.softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, slots = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                mixed = mixed.index_add(0, rows, torch.tanh(expert(tokens[rows])) * weights[rows, slots, None])
        return x + mixed.view_as(x), scores


class Routed(CausalLM):
    """A mixture of experts with a loss of its routers."""

    def __init__(self) -> None:
        super().__init__([RoutedLayer() for _ in range(3)], tied=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        x, scores = self.embed(tokens[:, :1]), []  # few tokens, so that some experts are unused
        for layer in self.layers:
            x, of_layer = self.call(layer, x)
            scores.append(of_layer)
        output = self.finish(x, labels[:, :1])
        assert output.loss is not None
        output["loss"] = output.loss + 0.1 * torch.stack([s.softmax(-1).mean(0).square().sum() for s in scores]).sum()
        return output


class BiasedLayer(nn.Module):
    """The first layer computes a bias that later layers receive with the hidden state."""

    def __init__(self, first: bool, cross: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relative = nn.Embedding(LENGTH, LENGTH) if first else None
        self.cross = nn.Linear(WIDTH, WIDTH) if cross else None

    def forward(self, x: Tensor, *, bias: Tensor | None = None, memory: Any = None) -> tuple[Tensor, Tensor]:
        if self.relative is not None:
            bias = self.relative(torch.arange(x.shape[1]))
        assert bias is not None
        x = x + torch.tanh(self.mix(bias.softmax(-1) @ self.norm(x)))
        if self.cross is not None:
            hidden = memory if isinstance(memory, Tensor) else memory["logits"]
            x = x + self.cross(hidden.mean(1, keepdim=True))
        return x, bias


class Seq2Seq(CausalLM):
    """An encoder and a decoder with one embedding; decoder layers receive the encoder's output object."""

    def __init__(self) -> None:
        super().__init__([BiasedLayer(index == 0, cross=True) for index in range(2)])
        self.encoder = nn.ModuleList(BiasedLayer(index == 0, cross=False) for index in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        x, bias = self.embed(tokens), None
        for layer in self.encoder:
            x, bias = self.call(layer, x, bias=bias)
        memory = x if self.recompute else Output(logits=x)  # reentrant checkpointing knows tensors only
        x, bias = self.embed(labels.roll(1, 1)), None
        for layer in self.layers:
            x, bias = self.call(layer, x, bias=bias, memory=memory)
        return self.finish(x, labels)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedLayer(CachedLayer):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.query, self.out = LoraLinear(self.query), LoraLinear(self.out)  # type: ignore[assignment]


class Adapted(CausalLM):
    """Adapters on frozen layers. The root has a frozen embedding and norm, an adapter and a trained head.

    So frozen layers without gradients lie between the last block and the head, and backward reads them.
    """

    def __init__(self) -> None:
        super().__init__([AdaptedLayer() for _ in range(3)], tied=False)
        self.embed.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.last = LoraLinear(nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        x = self.embed(tokens)
        if self.recompute:
            x.requires_grad_()  # reentrant checkpointing needs an input that requires grad
        rotary = torch.ones(WIDTH, dtype=x.dtype), torch.ones(WIDTH, dtype=x.dtype)
        for layer in self.layers:
            x = self.call(layer, x, rotary=rotary)
        return self.finish(self.last(x), labels)


def token_inputs(generator: torch.Generator) -> Inputs:
    return {
        "tokens": torch.randint(VOCABULARY, (2, LENGTH), generator=generator),
        "labels": torch.randint(VOCABULARY, (2, LENGTH), generator=generator),
    }


def _recompute(model: CausalLM, reentrant: bool) -> None:
    model.recompute = reentrant


def _shape(build: type[CausalLM], *blocks: type[nn.Module]) -> Shape:
    return Shape(build.__name__, build, token_inputs, lambda model: set(blocks), _recompute)


SHAPES = {
    shape.name: shape
    for shape in (
        _shape(Cached, CachedLayer),
        _shape(Routed, RoutedLayer),
        _shape(Seq2Seq, BiasedLayer),
        _shape(Adapted, AdaptedLayer),
    )
}
