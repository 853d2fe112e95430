"""Programs that train with real tools, and the rows of `clients.py` that run them.

Each program trains a small model on 2 CPU ranks, saves at its end, and returns its losses and further results.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn

from fsdp.checkpoint import convert, load

RANKS, STEPS, VOCABULARY, LENGTH = 2, 8, 40, 12


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
    directly after training, because torch's FSDP1 may fail afterwards. If `is_old`, the checkpoint is one that the same
    program saved on torch's FSDP1, for :meth:`load_old`.
    """

    begin: int
    end: int
    folder: str
    is_old: bool = False

    @property
    def result(self) -> Path:
        return Path(f"{self.folder}.json")

    def tell(self, losses: list[float]) -> list[float]:
        if dist.get_rank() == 0:
            self.result.write_text(json.dumps(losses))
        return losses

    def load_old(self, saved: str, into: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        """Convert what a tool has saved, and load that; `options` are those of `convert`."""
        if dist.get_rank() == 0:
            convert(saved, f"{self.folder}.converted", **options)
        dist.barrier()
        load(f"{self.folder}.converted", into, optimizer)


# -- accelerate --------------------------------------------------------------------------------------------------------


def with_accelerate(
    part: Part,
    *,
    precision: str = "no",
    accumulate: int = 1,
    state: str = "FULL",
    compiled: bool = False,
    quantized: str = "",
    max_norm: float = 0.5,
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
    if quantized:
        import bitsandbytes

        optimizer = getattr(bitsandbytes.optim, quantized)(model.parameters(), lr=0.01, min_8bit_size=256)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if part.is_old:
        part.load_old(part.folder, model, optimizer.optimizer)
    elif part.begin:
        accelerator.load_state(part.folder)
    losses = []
    for number, batch in enumerate(loader):
        if not part.begin <= number < part.end:
            continue
        with accelerator.accumulate(model):
            loss = loss_of(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
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


def with_fabric(
    part: Part, *, precision: str = "32-true", state: str = "full", max_norm: float = 0.5, **options: Any
) -> list[float]:
    import lightning
    from lightning.fabric.strategies import FSDPStrategy

    strategy = on_cpu(FSDPStrategy)(auto_wrap_policy={Block}, state_dict_type=state, **options)
    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision=precision)
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    held: dict[str, Any] = {"model": model, "optimizer": optimizer}
    saved = f"{part.folder}/saved.ckpt"
    if part.is_old:
        part.load_old(saved, model._forward_module, optimizer.optimizer)
    elif part.begin:
        fabric.load(saved, held)
    losses = []
    for batch in my_batches()[part.begin : part.end]:
        with fabric.no_backward_sync(model):
            fabric.backward(loss_of(model(batch), batch))
        loss = loss_of(model(batch), batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=max_norm)
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
    if kind in ("llama", "tied llama"):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config: Any = transformers.LlamaConfig(**small, **sizes, tie_word_embeddings=kind == "tied llama")
        model: Any = transformers.LlamaForCausalLM(config)
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


def training_arguments(
    part: Part, kind: str, *, saves: bool = True, checkpointing: bool = False, **options: Any
) -> dict[str, Any]:
    """Return keyword arguments of transformers' `TrainingArguments` and of the classes derived from it."""
    return {
        "output_dir": part.folder,
        "max_steps": part.end,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": part.end,
        "save_strategy": "steps" if saves else "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if checkpointing else None,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": [LAYERS[kind]],
            "version": 1,
            "sync_module_states": "false",
            **NO_RAM,
            **options,
        },
    }


def noted_losses(part: Part, trainer: Any) -> list[float]:
    """Return a list to which each loss that `trainer` logs is appended."""
    import transformers

    losses: list[float] = []

    class Tells(transformers.TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **others: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))
                part.tell(losses)

    trainer.add_callback(Tells)
    return losses


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
    arguments = training_arguments(part, kind, saves=saves, checkpointing=checkpointing, **options)
    given = made[1](**arguments, bf16=bf16, **asked)
    model = language_model(kind, adapters)
    if low:
        for param in model.parameters():
            param.data = param.data.bfloat16() if not param.requires_grad else param.data
    rows = batches(16)
    trainer = made[0](model=model, args=given, train_dataset=batches(), eval_dataset=rows)
    losses = noted_losses(part, trainer)
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


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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


class Row:
    """A program of one tool with its options.

    Attributes:
        torch_is_wrong: the reason not to compare with torch's FSDP1, or to compare with `instead`.
        instead: options with which torch trains the same model correctly.
        within: tolerance relative to torch's results.
        is_old: the first half runs on torch's FSDP1, and its checkpoint is converted.
    """

    def __init__(
        self,
        program: Callable[..., list[float]],
        what: str,
        torch_is_wrong: str = "",
        instead: dict[str, Any] | None = None,
        within: float = 1e-6,
        is_old: bool = False,
        **options: Any,
    ) -> None:
        self.tool = "peft" if "adapters" in options else program.__name__.removeprefix("with_")
        self.what, self.program, self.options = what, program, options
        self.torch_is_wrong, self.instead, self.within, self.is_old = torch_is_wrong, instead, within, is_old
        self.resumes = options.get("saves", True)
        self.resumed_within = 1e-3 if "quantized" in options else 0.0  # 8-bit states are rounded once more

    def __str__(self) -> str:
        return f"{self.tool}: {self.what}"


LORA = "LoraConfig", {"target_modules": ["q_proj", "v_proj"], "r": 2}
PROMPT = "PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
ORIG, FLAT = {"use_orig_params": True}, {"use_orig_params": False}
HF_ORIG, HF_FLAT = {"use_orig_params": "true"}, {"use_orig_params": "false"}
HYBRID, GRAD_OP = {"sharding_strategy": "HYBRID_SHARD"}, {"sharding_strategy": "SHARD_GRAD_OP"}
FULL = {"sharding_strategy": "FULL_SHARD"}  # the same training
OLD: dict[str, Any] = {"is_old": True, "max_norm": torch.inf}  # without clipping: sums of norms differ in the last bit
ONE_DEVICE = "it takes the CPU for the one device of a machine, and averages nothing"
PEFT = partial(Row, with_transformers, kind="llama", saves=False)  # peft asks rank 0 alone for prompts to save
ROWS = [
    Row(with_accelerate, "full state, accumulation, clipping", accumulate=2, **ORIG),
    Row(with_accelerate, "full state, bf16, flat parameters", precision="bf16", accumulate=2, **FLAT),
    Row(with_accelerate, "sharded state, flat parameters", state="SHARDED", **FLAT),
    Row(with_accelerate, "sharded state, bf16", state="SHARDED", precision="bf16", accumulate=2, **ORIG),
    Row(with_accelerate, "offload", "it needs an accelerator", {"cpu_offload": False}, cpu_offload=True, **ORIG),
    Row(with_accelerate, "activation checkpointing", activation_checkpointing=True, **ORIG),
    Row(with_accelerate, "policy by size", auto_wrap_policy="size_based_wrap", min_num_params=500, **FLAT),
    Row(with_accelerate, "no policy, kept after forward", auto_wrap_policy="NO_WRAP", **ORIG, **GRAD_OP),
    Row(with_accelerate, "ignored modules", ignored_modules="head", **ORIG),
    Row(with_accelerate, "HYBRID_SHARD", ONE_DEVICE, FULL, **ORIG, **HYBRID),
    Row(with_accelerate, "HYBRID_SHARD, sharded state, flat", ONE_DEVICE, FULL, state="SHARDED", **FLAT, **HYBRID),
    Row(with_accelerate, "torch_compile", compiled=True, **ORIG),
    Row(with_accelerate, "AdamW8bit, flat parameters", quantized="AdamW8bit", **FLAT),
    Row(with_accelerate, "Lion8bit, sharded state", quantized="Lion8bit", state="SHARDED", **ORIG),
    *(
        Row(with_accelerate, f"old checkpoint, {state} state, {mode}", state=state, **OLD, **mode)
        for state in ("FULL", "SHARDED")
        for mode in (ORIG, FLAT)
    ),
    Row(with_fabric, "full state, accumulation, clipping"),
    Row(with_fabric, "sharded state, bf16, flat parameters", state="sharded", precision="bf16-mixed", **FLAT),
    Row(with_fabric, "HYBRID_SHARD", ONE_DEVICE, FULL, **HYBRID),
    Row(with_fabric, "device_mesh (1, 2), sharded state", state="sharded", device_mesh=(1, 2), **HYBRID),
    *(Row(with_fabric, f"old checkpoint, {state} state", state=state, **OLD) for state in ("full", "sharded")),
    Row(with_trainer, "full state, predict, torchmetrics"),
    Row(with_trainer, "sharded state, bf16", state="sharded", precision="bf16-mixed"),
    Row(with_trainer, "accumulation, sharded state, flat parameters", accumulate=2, state="sharded", **FLAT),
    Row(with_trainer, "manual optimisation", "it raises inside the forward", {"manual": False}, manual=True),
    Row(with_trainer, "device_mesh (1, 2)", device_mesh=(1, 2), **HYBRID),
    Row(with_transformers, "llama", kind="llama", **HF_ORIG),
    Row(with_transformers, "tied llama, flat parameters", kind="tied llama", **HF_FLAT),
    Row(with_transformers, "gpt2", kind="gpt2", **HF_ORIG),
    # the two engines round differently from the fourth step on, by 1e-5
    Row(with_transformers, "gpt2, bf16", within=1e-3, kind="gpt2", bf16=True, **HF_ORIG),
    Row(with_transformers, "t5, checkpointing", kind="t5", checkpointing=True, **HF_ORIG),
    Row(with_transformers, "generate", "its generate() does not gather", kind="llama", generates=True, **HF_ORIG),
    Row(with_transformers, "predict_with_generate", "its weights are corrupted", kind="t5", seq2seq=True, **HF_ORIG),
    PEFT("LoRA, merged", adapters=LORA, **HF_ORIG),
    PEFT("prompt tuning", adapters=PROMPT, **HF_ORIG),
    PEFT("LoRA, flat parameters, frozen and trainable", "it refuses that", adapters=LORA, own_policy=True, **HF_FLAT),
    PEFT("LoRA on a frozen bf16 model", "it refuses that", adapters=LORA, low=True, **HF_FLAT),
    Row(with_composer, "full state, clipping, microbatches"),
    Row(with_composer, "sharded state, flat parameters, OOM hooks", hooks=True, state_dict_type="sharded", **FLAT),
]
