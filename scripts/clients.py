"""Runs real tools on this package and on torch's FSDP1, with the same programs, and compares.

    bash scripts/test_clients.sh [--only SUBSTRING] [--list]

makes an environment with the tools and runs this script in it. Each row of `ROWS` is a small program for one tool, on
2 CPU ranks. New processes run it three times: on torch's FSDP1; on this package, through `fsdp.compat.patch()` alone
(before or after the import of the tool, see `TOOLS`); and on this package in two halves, of which the second starts
from the first half's checkpoint in new processes.

Losses and further results must equal torch's to 6 digits, unless the row names torch's mistake. The resumed run must
equal the uninterrupted run bit for bit. A tool is imported once per engine, and the ranks are forked from there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
import torch.multiprocessing as mp
from torch import Tensor, nn

from fsdp.compat import patch

RANKS, STEPS, VOCABULARY, LENGTH = 2, 8, 40, 12
PATIENCE = 240.0  # seconds for one run of a row


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass
class Part:
    """One run of a row's program: steps `begin` to `end`.

    The program loads from `folder` first, unless `begin` is 0, and saves there at the end. The losses are reported
    directly after training, because torch's FSDP1 may fail afterwards.
    """

    begin: int
    end: int
    folder: str
    result: str = ""

    def tell(self, losses: list[float]) -> list[float]:
        if dist.get_rank() == 0:
            Path(self.result).write_text(json.dumps(losses))
        return losses


# -- accelerate --------------------------------------------------------------------------------------------------------


def with_accelerate(
    part: Part,
    *,
    precision: str = "no",
    accumulate: int = 1,
    state: str = "FULL",
    compiled: bool = False,
    **options: Any,
) -> list[float]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin, merge_fsdp_weights, set_seed
    from safetensors.torch import load_file

    set_seed(0)
    model = net()
    if "ignored_modules" in options:  # gradients of ignored modules are not reduced
        model.head.requires_grad_(False)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=f"{state}_STATE_DICT",
        **{
            "auto_wrap_policy": "transformer_based_wrap",
            "cpu_ram_efficient_loading": False,
            "sharding_strategy": "FULL_SHARD",
            **options,
        },
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        cpu=True,
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager") if compiled else None,
    )
    loader = torch.utils.data.DataLoader(batches(), batch_size=2)
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if part.begin:
        accelerator.load_state(part.folder)
    losses = []
    for number, batch in enumerate(loader):
        if not part.begin <= number < part.end:
            continue
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    part.tell(losses)
    accelerator.save_state(part.folder)
    found = [accelerator.get_state_dict(model)]
    accelerator.save_model(model, f"{part.folder}/model")
    if state == "SHARDED":
        merge_fsdp_weights(f"{part.folder}/pytorch_model_fsdp_0", f"{part.folder}/merged")
    if accelerator.is_main_process:
        found += [load_file(each) for each in sorted(Path(part.folder).glob("m*/model.safetensors"))]
        losses += [size_of(each) for each in found]
    return [*losses, float(type(accelerator.unwrap_model(model)) is Net)]


def size_of(state: dict[str, Tensor]) -> float:
    return sum(value.double().abs().sum().item() for value in state.values())


# -- Lightning ---------------------------------------------------------------------------------------------------------


def on_cpu(strategy: type) -> type:
    """Return a subclass of a strategy, because Lightning refuses only the exact class without an accelerator."""
    return type(f"{strategy.__name__}OnCPU", (strategy,), {})


def with_fabric(part: Part, *, precision: str = "32-true", state: str = "full", **options: Any) -> list[float]:
    import lightning
    from lightning.fabric.strategies import FSDPStrategy

    strategy = on_cpu(FSDPStrategy)(auto_wrap_policy={Block}, state_dict_type=state, **options)
    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision=precision)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    held: dict[str, Any] = {"model": model, "optimizer": optimizer}
    saved = f"{part.folder}/saved"
    if part.begin:
        fabric.load(saved, held)
    losses = []
    for batch in my_batches()[part.begin : part.end]:
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model(batch), batch))
        loss = loss_of(model(batch), batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    part.tell(losses)
    fabric.save(saved, held)
    return losses


def with_trainer(
    part: Part,
    *,
    precision: str = "32-true",
    state: str = "full",
    manual: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> list[float]:
    import lightning
    import torchmetrics
    from lightning.pytorch.strategies import FSDPStrategy

    losses = []

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mean = net(), torchmetrics.MeanMetric()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = loss_of(self.net(batch["input_ids"]), batch["labels"])
            self.mean.update(loss.detach())
            losses.append(self.mean.compute().item())  # the mean over all ranks
            self.mean.reset()
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def predict_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.net(batch["input_ids"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def trainer() -> Any:
        strategy = on_cpu(FSDPStrategy)(auto_wrap_policy={Block}, state_dict_type=state, **options)
        return lightning.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            precision=precision,
            max_steps=part.end // accumulate,
            accumulate_grad_batches=accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # Lightning's sampler shuffles
        )

    def load(data: list[Any]) -> Any:
        return torch.utils.data.DataLoader(data[int(os.environ["RANK"]) :: RANKS], batch_size=2)

    loader = load(batches()[2 * RANKS * part.begin :])  # a resumed loader does not skip batches
    saved = f"{part.folder}/saved.ckpt"
    first = trainer()
    first.fit(Task(), loader, ckpt_path=saved if part.begin else None)
    part.tell(losses)
    first.save_checkpoint(saved)
    predicted = trainer().predict(Task(), load(batches(16)), ckpt_path=saved)
    return [*losses, torch.stack(predicted).sum().item()]


# -- transformers and peft ---------------------------------------------------------------------------------------------


def language_model(kind: str, adapters: Any = None) -> Any:
    """Build a language model; `adapters` are the class name and the arguments of a peft configuration."""
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **sizes))
    elif kind == "tied llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **sizes, tie_word_embeddings=True))
    elif kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **sizes, **dropped))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        config = transformers.T5Config(**small, **sizes, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config)
    if adapters:
        import peft

        name, options = adapters
        model = peft.get_peft_model(model, getattr(peft, name)(**options))
    return model


NO_RAM = {"cpu_ram_efficient_loading": "false"}
LAYERS = {"llama": "LlamaDecoderLayer", "tied llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "t5": "T5Block"}


def with_transformers(
    part: Part,
    *,
    kind: str,
    adapters: Any = None,
    low: bool = False,
    own_policy: bool = False,
    bf16: bool = False,
    checkpointing: bool = False,
    seq2seq: bool = False,
    generates: bool = False,
    saves: bool = True,
    **options: Any,
) -> list[float]:
    import transformers

    made, asked = (transformers.Trainer, transformers.TrainingArguments), {}
    if seq2seq:
        made = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
        asked = {"predict_with_generate": True, "generation_max_length": 6}
    given = made[1](
        output_dir=part.folder,
        max_steps=part.end,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=part.end,
        save_strategy="steps" if saves else "no",
        use_cpu=True,
        bf16=bf16,
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "transformer_layer_cls_to_wrap": [LAYERS[kind]],
            "version": 1,
            "sync_module_states": "false",
            **NO_RAM,
            **options,
        },
        **asked,
    )
    model = language_model(kind, adapters)
    if low:
        for param in model.parameters():
            param.data = param.data.bfloat16() if not param.requires_grad else param.data
    rows = batches(16)
    trainer = made[0](model=model, args=given, train_dataset=batches(), eval_dataset=rows)
    losses: list[float] = []

    class Tells(transformers.TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **others: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))
                part.tell(losses)

    trainer.add_callback(Tells)
    if own_policy:  # replaces peft's policy, which wraps each adapter in a separate unit
        plugin = trainer.accelerator.state.fsdp_plugin
        layers = {type(module) for module in model.modules() if type(module).__name__ == LAYERS[kind]}
        transformers.trainer.update_fsdp_plugin_peft = lambda *args: plugin.__setattr__(
            "auto_wrap_policy", torchs.wrap.ModuleWrapPolicy(layers)
        )
    trainer.train(resume_from_checkpoint=bool(part.begin))
    losses.append(trainer.evaluate()["eval_loss"])
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    prompt = torch.stack([row["input_ids"] for row in rows])
    if adapters:
        if trainer.is_world_process_zero():
            losses.append(adapted(kind, adapters, whole, f"{part.folder}/adapter", prompt))
    elif seq2seq:
        predicted = trainer.predict(rows).predictions
        after = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        check_generated(kind, whole, torch.as_tensor(predicted), prompt, max_length=6)
        assert whole.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in whole.items())
    elif generates:
        with torch.no_grad():
            found = trainer.model_wrapped.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        check_generated(kind, whole, found, prompt, max_new_tokens=4)
    elif not bf16:
        losses += [float(value.mean()) for value in trainer.predict(rows).predictions[:1]]
        trainer.save_model(f"{part.folder}/model")
        if trainer.is_world_process_zero():
            saved = type(model).from_pretrained(f"{part.folder}/model")
            assert all(torch.equal(saved.state_dict()[name], value) for name, value in whole.items())
    return losses


def check_generated(kind: str, weights: dict[str, Tensor], found: Tensor, prompt: Tensor, **options: Any) -> None:
    """Check that a plain model with these weights generates the same tokens."""
    if dist.get_rank() == 0:
        plain = language_model(kind)
        plain.load_state_dict(weights)
        expected = plain.eval().generate(input_ids=prompt, do_sample=False, **options)
        assert torch.equal(found[:, : expected.shape[1]], expected), (found, expected)


def adapted(kind: str, adapters: Any, weights: dict[str, Tensor], folder: str, prompt: Tensor) -> float:
    """Return the loss of a plain model with the adapters, after saving, loading and (if possible) merging them."""
    import peft

    plain = language_model(kind, adapters)
    plain.load_state_dict(weights)
    plain.save_pretrained(folder)
    base = language_model(kind)
    weights = {name.replace(".base_layer", ""): value for name, value in weights.items()}
    base.load_state_dict(
        {name: next(v for other, v in weights.items() if other.endswith(name)) for name in base.state_dict()}
    )
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        value = loaded(input_ids=prompt).logits.double().abs().mean()
        torch.testing.assert_close(
            plain.eval()(input_ids=prompt).logits.double().abs().mean(), value, rtol=1e-6, atol=0
        )
        if isinstance(loaded.peft_config["default"], peft.LoraConfig):
            merged = loaded.merge_and_unload()(input_ids=prompt).logits.double().abs().mean()
            torch.testing.assert_close(merged, value, rtol=1e-5, atol=0)
    return float(value)


# -- Composer ----------------------------------------------------------------------------------------------------------


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer of empty stand-ins for two packages that Composer imports and no row uses.

    They are torchvision, which PyPI does not have for torch without CUDA, and the client of a cloud service.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "mcli"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def with_composer(part: Part, *, hooks: bool = False, **options: Any) -> list[float]:
    import composer
    from composer.distributed.shared_utils import add_fsdp_oom_hooks

    losses: list[float] = []
    micro: list[float] = []  # the losses of one batch

    class Task(composer.ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.net.fsdp_wrap_fn = lambda module: isinstance(module, Block)

        def forward(self, batch: Any) -> Tensor:
            return self.net(batch["input_ids"])

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            loss = loss_of(outputs, batch["labels"])
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            micro.append(mean.item() / RANKS)
            if len(micro) == 2:
                losses.append(sum(micro))
                micro.clear()
                part.tell(losses)
            return loss

    full = options.get("state_dict_type", "full") == "full"
    task, data = Task(), batches()
    sampler = composer.utils.dist.get_sampler(data, shuffle=False)
    trainer = composer.Trainer(
        model=task,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler),
        optimizers=torch.optim.AdamW(task.parameters(), lr=0.01),
        max_duration=f"{part.end}ba",
        device="cpu",
        device_train_microbatch_size=1,
        algorithms=[composer.algorithms.GradientClipping(clipping_type="norm", clipping_threshold=0.5)],
        parallelism_config={"fsdp": {"mixed_precision": "PURE", **options}},
        save_folder=part.folder,
        save_interval=f"{part.end}ba",
        save_overwrite=True,
        save_filename="saved.pt",
        load_path=f"{part.folder}/{'saved.pt' if full else f'ep0-ba{part.begin}'}" if part.begin else None,
        progress_bar=False,
        seed=0,
    )
    if hooks:
        add_fsdp_oom_hooks(trainer.state.model, device=trainer.state.device)
    trainer.fit()
    return losses


def my_batches() -> list[Tensor]:
    whole = torch.stack([batch["input_ids"] for batch in batches()])
    return list(whole.view(-1, RANKS, 2, LENGTH)[:, dist.get_rank()])


@dataclass
class Row:
    tool: str
    what: str
    program: Callable[..., list[float]]
    options: dict[str, Any] = field(default_factory=dict)
    torch_is_wrong: str = ""  # the reason not to compare with torch, or to compare with `instead`
    instead: dict[str, Any] | None = None  # options with which torch trains the same model correctly
    within: float = 1e-6  # tolerance relative to torch's losses

    @property
    def resumes(self) -> bool:
        return bool(self.options.get("saves", True))

    def __str__(self) -> str:
        return f"{self.tool}: {self.what}"


def row(
    program: Callable[..., list[float]],
    what: str,
    torch_is_wrong: str = "",
    instead: dict[str, Any] | None = None,
    within: float = 1e-6,
    **options: Any,
) -> Row:
    tool = program.__name__.removeprefix("with_")
    return Row("peft" if "adapters" in options else tool, what, program, options, torch_is_wrong, instead, within)


LORA = "LoraConfig", {"target_modules": ["q_proj", "v_proj"], "r": 2}
PROMPT = "PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
ORIG, FLAT = {"use_orig_params": True}, {"use_orig_params": False}
HF_ORIG, HF_FLAT = {"use_orig_params": "true"}, {"use_orig_params": "false"}
HYBRID = {"sharding_strategy": "HYBRID_SHARD"}
FULL = {"sharding_strategy": "FULL_SHARD"}  # the same training
ONE_DEVICE = "it takes the CPU for the one device of a machine, and averages nothing"
ROWS = [
    row(with_accelerate, "full state, accumulation, clipping", accumulate=2, **ORIG),
    row(with_accelerate, "full state, bf16, flat parameters", precision="bf16", accumulate=2, **FLAT),
    row(with_accelerate, "sharded state, flat parameters", state="SHARDED", **FLAT),
    row(with_accelerate, "sharded state, bf16", state="SHARDED", precision="bf16", accumulate=2, **ORIG),
    row(with_accelerate, "offload", "it needs an accelerator", {"cpu_offload": False}, cpu_offload=True, **ORIG),
    row(with_accelerate, "activation checkpointing", activation_checkpointing=True, **ORIG),
    row(with_accelerate, "policy by size", auto_wrap_policy="size_based_wrap", min_num_params=500, **FLAT),
    row(
        with_accelerate,
        "no policy, kept after forward",
        auto_wrap_policy="NO_WRAP",
        sharding_strategy="SHARD_GRAD_OP",
        **ORIG,
    ),
    row(with_accelerate, "ignored modules", ignored_modules="head", **ORIG),
    row(with_accelerate, "HYBRID_SHARD", ONE_DEVICE, FULL, **ORIG, **HYBRID),
    row(
        with_accelerate,
        "HYBRID_SHARD, sharded state, flat parameters",
        ONE_DEVICE,
        FULL,
        state="SHARDED",
        **FLAT,
        **HYBRID,
    ),
    row(with_accelerate, "torch_compile", compiled=True, **ORIG),
    row(with_fabric, "full state, accumulation, clipping"),
    row(with_fabric, "sharded state, bf16, flat parameters", state="sharded", precision="bf16-mixed", **FLAT),
    row(with_fabric, "HYBRID_SHARD", ONE_DEVICE, FULL, **HYBRID),
    row(with_fabric, "device_mesh (1, 2), sharded state", state="sharded", device_mesh=(1, 2), **HYBRID),
    row(with_trainer, "full state, predict, torchmetrics"),
    row(with_trainer, "sharded state, bf16", state="sharded", precision="bf16-mixed"),
    row(with_trainer, "accumulation, sharded state, flat parameters", accumulate=2, state="sharded", **FLAT),
    row(with_trainer, "manual optimisation", "it raises inside the forward", {"manual": False}, manual=True),
    row(with_trainer, "device_mesh (1, 2)", device_mesh=(1, 2), **HYBRID),
    row(with_transformers, "llama", kind="llama", **HF_ORIG),
    row(with_transformers, "tied llama, flat parameters", kind="tied llama", **HF_FLAT),
    row(with_transformers, "gpt2", kind="gpt2", **HF_ORIG),
    # the two engines round differently from the fourth step on, by 1e-5
    row(with_transformers, "gpt2, bf16", within=1e-3, kind="gpt2", bf16=True, **HF_ORIG),
    row(with_transformers, "t5, checkpointing", kind="t5", checkpointing=True, **HF_ORIG),
    row(
        with_transformers, "llama, generate", "its generate() does not gather", kind="llama", generates=True, **HF_ORIG
    ),
    row(
        with_transformers, "t5, predict_with_generate", "its weights are corrupted", kind="t5", seq2seq=True, **HF_ORIG
    ),
    # peft finds no adapters to save in a model with wrapped modules inside, and asks rank 0 alone for prompts
    row(with_transformers, "LoRA, merged", kind="llama", adapters=LORA, saves=False, **HF_ORIG),
    row(with_transformers, "prompt tuning", kind="llama", adapters=PROMPT, saves=False, **HF_ORIG),
    row(
        with_transformers,
        "LoRA, frozen and trainable in one flat parameter's unit, layers alone wrapped",
        "it refuses that",
        kind="llama",
        adapters=LORA,
        saves=False,
        own_policy=True,
        **HF_FLAT,
    ),
    row(
        with_transformers,
        "LoRA on a frozen bf16 model",
        "it refuses that",
        kind="llama",
        adapters=LORA,
        saves=False,
        low=True,
        **HF_FLAT,
    ),
    row(with_composer, "full state, clipping, microbatches"),
    row(with_composer, "sharded state, flat parameters, OOM hooks", hooks=True, state_dict_type="sharded", **FLAT),
]


# -- running -----------------------------------------------------------------------------------------------------------

# By tool: the modules to import before the ranks are forked, and whether patch() is called after the import.
TOOLS: dict[str, tuple[Sequence[str], bool]] = {
    "accelerate": (["accelerate"], True),
    "fabric": (["lightning.fabric"], False),
    "trainer": (["lightning.pytorch", "torchmetrics"], True),
    "transformers": (["transformers.trainer", "transformers.trainer_seq2seq"], True),
    "peft": (["transformers.trainer", "peft"], False),
    "composer": (["torchmetrics", "composer", "composer.algorithms"], False),  # Composer binds torch's names at import
}


def prepare(tool: str, engine: str) -> None:
    """Import the tool for one engine, patched for CPU ranks."""
    modules, late = TOOLS[tool]
    if tool in ("fabric", "trainer"):  # Lightning builds meshes for CUDA
        make_mesh = torch.distributed.device_mesh.init_device_mesh
        torch.distributed.device_mesh.init_device_mesh = lambda kind, *args, **options: make_mesh(
            "cpu", *args, **options
        )
    if tool == "composer":
        sys.meta_path.insert(0, _Absent())
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    if engine == "fsdp" and not late:
        patch()
    for module in modules:
        importlib.import_module(module)
    if engine == "fsdp" and late:
        patch()
    if "accelerate" in sys.modules:
        take_the_cpu_for_an_accelerator()
    wrapper: Any = torchs.FullyShardedDataParallel
    made = wrapper.__init__

    def counted(*args: Any, **options: Any) -> None:
        wrapped.append(args[0])
        if engine == "torch":  # requires an explicit CPU device, which Lightning and Composer do not pass
            options["device_id"] = torch.device("cpu")
        made(*args, **options)

    wrapper.__init__ = counted


wrapped: list[nn.Module] = []  # the modules wrapped in this process


def take_the_cpu_for_an_accelerator() -> None:
    """Make accelerate use FSDP on CPU, where it would always choose DistributedDataParallel."""
    from accelerate import state

    def prepare_backend(*args: Any) -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return "gloo", state.DistributedType.MULTI_GPU

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    state.PartialState._prepare_backend, state.PartialState.set_device = prepare_backend, set_device


def rank_process(rank: int, number: int, part: Part, port: int, options: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_FSDP="true",
        ACCELERATE_USE_CPU="true",
        FSDP_VERSION="1",
        TORCHELASTIC_RUN_ID="none",
        GROUP_RANK="0",
        ROLE_RANK=str(rank),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        CUDA_VISIBLE_DEVICES="",
    )
    torch.set_num_threads(1)
    Path(part.folder).mkdir(parents=True, exist_ok=True)
    values = ROWS[number].program(part, **options)
    assert wrapped, "the tool has trained without FullyShardedDataParallel"
    part.tell(values)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def serve(tool: str, engine: str, asked: Any) -> None:
    """Run the requested rows of one tool on one engine, each in new processes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    prepare(tool, engine)
    for number, part in iter(asked.recv, None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = dict(ROWS[number].options)
        if engine == "torch":
            options.update(ROWS[number].instead or {})
        until, failed = time.monotonic() + PATIENCE, ""
        with tempfile.TemporaryDirectory() as folder:
            part.result = f"{folder}/result"
            try:
                ranks = mp.start_processes(
                    rank_process, (number, part, port, options), nprocs=RANKS, join=False, start_method="fork"
                )
                while not ranks.join(timeout=1):
                    if time.monotonic() > until:
                        for process in ranks.processes:
                            process.kill()
                        raise TimeoutError(f"not over after {PATIENCE:.0f} s")
            except Exception:
                failed = traceback.format_exc()
            told = Path(part.result)
            asked.send((json.loads(told.read_text()) if told.exists() else [], failed.strip()))


class Engine:
    """A process that has imported one tool and runs rows of that tool."""

    def __init__(self, tool: str, engine: str) -> None:
        context = mp.get_context("fork")
        self._asked, asked = context.Pipe()
        self._process = context.Process(target=serve, args=(tool, engine, asked))
        self._process.start()
        asked.close()

    def run(self, number: int, part: Part) -> tuple[list[float], str]:
        """Return the reported losses and the error message, empty if the run succeeded."""
        self._asked.send((number, part))
        return self._asked.recv()

    def end(self) -> None:
        self._asked.send(None)
        self._process.join()


def close(one: list[float], other: list[float], within: float) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= within * max(abs(a), abs(b)) for a, b in zip(one, other))


def judge(number: int, torchs_engine: Engine, engine: Engine) -> tuple[str, str]:
    """Compare the engines on a row; return the error, empty if the row passes, and a remark about torch's FSDP1."""
    row, aside = ROWS[number], ROWS[number].torch_is_wrong
    with tempfile.TemporaryDirectory() as folder:
        ours, failed = engine.run(number, Part(0, STEPS, f"{folder}/whole"))
        if failed:
            return failed, aside
        if not row.torch_is_wrong or row.instead is not None:
            theirs, failed = torchs_engine.run(number, Part(0, STEPS, f"{folder}/torch"))
            if failed and len(theirs) == STEPS:
                aside += f"{'; ' if aside else ''}it trains the same, and fails then: {failed.splitlines()[-1]}"
            elif failed:
                return f"torch's FSDP1 failed: {failed}", aside
            mine = ours[: len(theirs)] if failed or row.instead is not None else ours
            if not close(mine, theirs, row.within):
                return f"torch's FSDP1 has {theirs}, and here are {ours}", aside
        if not row.resumes:
            return "", aside
        first, failed = engine.run(number, Part(0, STEPS // 2, f"{folder}/parts"))
        second, failed_then = engine.run(number, Part(STEPS // 2, STEPS, f"{folder}/parts"))
        if failed or failed_then:
            return failed or failed_then, aside
        if first[: STEPS // 2] + second != ours:
            return f"resumed {first[: STEPS // 2] + second}, and not stopped {ours}", aside
    return "", aside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose tool or description contains this")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [number for number, row in enumerate(ROWS) if options.only in str(row)]
    bad = skipped = 0
    for tool in TOOLS:
        mine = [number for number in chosen if ROWS[number].tool == tool]
        if options.list:
            print("\n".join(str(ROWS[number]) for number in mine))
            continue
        if mine and importlib.util.find_spec(TOOLS[tool][0][-1].partition(".")[0]) is None:
            print(f"not there: {tool}, {len(mine)} rows", flush=True)
            skipped += len(mine)
            continue
        engines = [Engine(tool, engine) for engine in ("torch", "fsdp")] if mine else []
        for number in mine:
            try:
                wrong, aside = judge(number, *engines)
            except Exception:
                wrong, aside = traceback.format_exc(), ""
            bad += bool(wrong)
            aside = f" (torch: {aside})" if aside else ""
            print(f"{'FAILED' if wrong else 'ok':7}{ROWS[number]}{aside}{f': {wrong}' if wrong else ''}", flush=True)
        for engine in engines:
            engine.end()
    if not options.list:
        print(f"{len(chosen) - bad - skipped} of {len(chosen)} rows hold, {skipped} were not run")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
