"""Models of popular libraries train sharded as they do plain: bit for bit on 2 ranks, with state dicts saved and
loaded.

`transformers` and `peft` are optional: their tests are skipped without them (`scripts/test.sh --with-libraries`
installs them). Models have small configurations, without downloads. Random models (tests/harness/random_models.py) have
caches, adapters and auxiliary losses without the libraries.

All is float64, except for adapters on a bfloat16 base, whose arithmetic is bfloat16.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import adamw, assert_bit_equal, named_optim_state, named_parameters
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, full_optim_state, full_parameters, wrap
from tests.harness.strategies import FULL, GRAD_OP

STEPS, VOCABULARY, LENGTH = 3, 29, 5
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, a batch, the classes of the blocks, and `recompute(model, reentrant)`, which checkpoints them."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]
    blocks: Callable[[nn.Module], set[type[nn.Module]]]
    recompute: Callable[[Any, bool], None]


# All pairs of strategy, mode and kind of checkpointing (None, reentrant or not).
Configuration = tuple[ShardingStrategy, bool, bool | None]
CONFIGURATIONS: Sequence[Configuration] = (
    (FULL, True, None),
    (FULL, False, False),
    (FULL, True, True),
    (GRAD_OP, False, None),
    (GRAD_OP, True, False),
    (GRAD_OP, False, True),
)


def _needs(*packages: str) -> Callable[[Any], Any]:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{' and '.join(missing)} not installed (scripts/test.sh --with-libraries)"
    )


@contextmanager
def foreign_code() -> Iterator[None]:
    """Ignore warnings of third-party packages."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- comparison ----------------------------------------------------------------------------------------------------


def inputs_of(shape: Shape, step: int, rank: int) -> Inputs:
    return shape.inputs(torch.Generator().manual_seed(100 * step + rank))


def built(shape: Shape, reentrant: bool | None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = shape.build()
    if reentrant is not None:
        shape.recompute(module, reentrant)
    return module


def train_plain(shape: Shape, reentrant: bool | None) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Train the plain model on all ranks' batches, summed in rank order and divided; unreached parameters have
    zeros.

    The same checkpointing is needed, because recomputation changes the order in which shared gradients are added.
    """
    model = built(shape, reentrant)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    steps = []
    for step in range(STEPS):
        losses, sums = [], {}
        for rank in range(dist.get_world_size()):
            loss = model(**inputs_of(shape, step, rank)).loss
            loss.backward()
            losses.append(loss.detach())
            for name, param in named_parameters(model).items():
                if param.requires_grad:
                    grad = torch.zeros_like(param) if param.grad is None else param.grad
                    sums[name] = grad if rank == 0 else sums[name] + grad
            model.zero_grad()
        for name, param in named_parameters(model).items():
            param.grad = sums[name] / dist.get_world_size() if param.requires_grad else None
        grads = {name: None if param.grad is None else param.grad for name, param in named_parameters(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        params = {name: param.detach().clone() for name, param in named_parameters(model).items()}
        steps.append({"loss": losses, "grads": grads, "params": params, "optim": named_optim_state(model, optimizer)})
    return model, steps


def train_sharded(shape: Shape, configurations: Sequence[Configuration] = CONFIGURATIONS) -> None:
    with foreign_code():
        plain = {reentrant: train_plain(shape, reentrant) for *_, reentrant in configurations}
        for strategy, orig, reentrant in configurations:
            check_configuration(shape, *plain[reentrant], strategy, orig, reentrant)


def sharded(shape: Shape, strategy: ShardingStrategy, orig: bool, reentrant: bool | None, seed: int = 0) -> Any:
    module = built(shape, reentrant, seed)
    return wrap(module, strategy, orig, wrap_policy=ModuleWrapPolicy(shape.blocks(module)))


def check_configuration(
    shape: Shape,
    plain: nn.Module,
    expected: list[dict[str, Any]],
    strategy: ShardingStrategy,
    orig: bool,
    reentrant: bool | None,
) -> None:
    rank = dist.get_rank()
    case = f"{shape.name}, {strategy.name}, use_orig_params={orig}, reentrant={reentrant}"
    model = sharded(shape, strategy, orig, reentrant)
    assert len(list(FullyShardedDataParallel.fsdp_modules(model))) > 2, case
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step, reference in enumerate(expected):
        where = f"{case}, step {step}"
        loss = model(**inputs_of(shape, step, rank)).loss
        loss.backward()
        assert_bit_equal({"": loss.detach()}, {"": reference["loss"][rank]}, f"{where}, loss")
        assert_bit_equal(full_gradients(model), reference["grads"], f"{where}, gradients")
        optimizer.step()
        optimizer.zero_grad()
        assert_bit_equal(full_parameters(model), reference["params"], f"{where}, parameters")
    state = model.state_dict()
    assert list(state) == list(plain.state_dict()), case
    assert_bit_equal(state, plain.state_dict(), f"{case}, state dict")
    of_optimizer = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    check_loaded_training(
        shape, sharded(shape, strategy, orig, reentrant, seed=1), (model, optimizer), state, of_optimizer, case
    )


def check_loaded_training(shape: Shape, fresh: Any, trained: Any, state: Any, of_optimizer: Any, case: str) -> None:
    """Load the saved state into a new model and optimizer, and compare one more step."""
    model, optimizer = trained
    fresh.load_state_dict(state)
    fresh_optimizer = adamw(p for p in fresh.parameters() if p.requires_grad)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(fresh, fresh_optimizer, of_optimizer)
    fresh_optimizer.load_state_dict(loaded)
    for each, own_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        each(**inputs_of(shape, STEPS, dist.get_rank())).loss.backward()
        own_optimizer.step()
    assert_bit_equal(full_parameters(fresh), full_parameters(model), f"{case}, after loading")
    states = full_optim_state(fresh, fresh_optimizer), full_optim_state(model, optimizer)
    for name, entry in states[1].items():
        assert_bit_equal(states[0][name], entry, f"{case}, after loading, {name}")


def count_gathered(shape: Shape) -> int:
    """Return the maximum number of unsharded inner units when a block's backward begins."""
    model = sharded(shape, FULL, True, None)
    counts: list[int] = []

    def look(grad: Tensor) -> None:
        gathered = (all(h.full.untyped_storage().nbytes() for h in unit.handles) for _, unit, _ in units_in(model))
        counts.append(sum(gathered) - 1)

    for block in model.modules():
        if type(block) in shape.blocks(model.module):
            block.register_forward_hook(lambda module, args, output: output.register_hook(look) and None)
    for step in range(2):
        model(**inputs_of(shape, step, dist.get_rank())).loss.backward()
    assert counts
    return max(counts)


# -- transformers ----------------------------------------------------------------------------------------------------


def small_llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options))


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=3, n_head=2, **dropout))


def small_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 12, "d_kv": 6, "d_ff": 14, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


def small_mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    config = MixtralConfig(**sizes, **heads, num_local_experts=5, output_router_logits=True)
    config._experts_implementation = "eager"  # the others know no float64
    return MixtralForCausalLM(config)


def small_vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 14}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **dropout, image_size=8, patch_size=4, num_labels=3))


def lora_llama(base: torch.dtype = torch.float64) -> Any:
    """Adapters on the attention; the head is trained whole, and the norm before it stays frozen."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], "lora_dropout": 0.0}
    model = get_peft_model(small_llama().to(base), LoraConfig(**options))  # bfloat16 gets adapters in float32
    model.enable_input_require_grads()
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros would leave lora_A without a gradient
            nn.init.normal_(param, std=0.1)
    return model


def text_inputs(generator: torch.Generator) -> Inputs:
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def image_inputs(generator: torch.Generator) -> Inputs:
    images = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"pixel_values": images, "labels": torch.randint(3, (2,), generator=generator)}


LAYERS = ("LlamaDecoderLayer", "GPT2Block", "T5Block", "MixtralDecoderLayer", "ViTLayer")


def layers_of(model: nn.Module) -> set[type[nn.Module]]:
    return {type(module) for module in model.modules() if type(module).__name__ in LAYERS}


def recompute(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


MODELS = {"Llama": small_llama, "GPT-2": small_gpt2, "T5": small_t5, "Mixtral": small_mixtral, "ViT": small_vit}
ADAPTED = {"LoRA": lora_llama, "LoRA on bfloat16": partial(lora_llama, torch.bfloat16)}


def train_library(name: str) -> None:
    inputs = image_inputs if name == "ViT" else text_inputs

    def build() -> nn.Module:
        model = MODELS[name]().double() if name in MODELS else ADAPTED[name]()
        return model.train()  # type: ignore[no-any-return]

    train_sharded(Shape(name, build, inputs, layers_of, recompute))


@_needs("transformers")
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, timeout=180)
def test_transformers(name: str) -> None:
    train_library(name)


@_needs("transformers", "peft")
@pytest.mark.parametrize("name", ADAPTED)
@on_ranks(2, timeout=180)
def test_peft(name: str) -> None:
    """The root's frozen norm lies between units and a trained head."""
    train_library(name)


@_needs("transformers", "peft")
@on_ranks(2, timeout=180)
def test_peft_saves_and_loads_adapters_inside_units(tmp_path: Path) -> None:
    with foreign_code():
        from fsdp.compat import patch, unpatch

        patch()
        import peft

        for orig, dtype in ((True, torch.float64), (False, torch.float64), (True, torch.bfloat16)):
            torch.manual_seed(0)
            plain = lora_llama(dtype)
            policy = ModuleWrapPolicy(layers_of(plain))
            model, other = (wrap(each, FULL, orig, wrap_policy=policy) for each in (deepcopy(plain), lora_llama(dtype)))
            assert list(units_in(model.module)), "units inside"
            expected = peft.get_peft_model_state_dict(plain)
            state = model.state_dict()
            model.module.save_pretrained(f"{tmp_path}/{dist.get_rank()}", state_dict=state, save_embedding_layers=False)
            saved = peft.utils.load_peft_weights(f"{tmp_path}/{dist.get_rank()}", device="cpu")
            assert expected.keys() == saved.keys() and any("lm_head" in key for key in saved)
            assert_bit_equal(saved, expected)
            peft.set_peft_model_state_dict(other, saved)
            assert_bit_equal(peft.get_peft_model_state_dict(other), expected)
        unpatch()


@_needs("transformers")
@on_ranks(2, timeout=180)
def test_transformers_caches_keep_no_unit_unsharded() -> None:
    with foreign_code():
        shape = Shape("Llama", lambda: small_llama(use_cache=True).double(), text_inputs, layers_of, recompute)
        assert count_gathered(shape) <= 2


@_needs("transformers")
@on_ranks(2, timeout=180)
def test_transformers_output_objects_under_mixed_precision() -> None:
    with foreign_code():
        from transformers.modeling_outputs import BaseModelOutput

        for orig in (True, False):
            torch.manual_seed(0)
            module = small_t5()
            policy = ModuleWrapPolicy(layers_of(module))
            precision = MixedPrecision(param_dtype=torch.bfloat16)
            model = wrap(deepcopy(module), FULL, orig, wrap_policy=policy, mixed_precision=precision)
            given = BaseModelOutput(last_hidden_state=torch.randn(2, LENGTH, 12))
            labels = torch.randint(1, VOCABULARY, (2, LENGTH))
            output = model(encoder_outputs=given, labels=labels)
            assert type(output).__name__ == "Seq2SeqLMOutput" and output.logits.dtype == torch.bfloat16
            assert given.last_hidden_state.dtype == torch.float32, "the caller's object stays as it was"
            output.loss.backward()
            grads = [grad for grad in full_gradients(model).values() if grad is not None]
            assert grads and all(grad.isfinite().all() for grad in grads)
