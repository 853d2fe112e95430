"""Runs real tools on this package and on torch's FSDP1, with the same programs, and compares.

    bash scripts/test_clients.sh [--only SUBSTRING] [--list]

makes an environment with the tools and runs this in it. Each row of `ROWS` is a small program for one tool, on 2 CPU
ranks. It runs in fresh processes on torch's FSDP1; on this package, of which `fsdp.compat.patch()` is all that it gets;
and on this package once more, as two runs: the second begins, in new processes, with what the first has saved. Losses
have to be torch's to 6 digits (where the row does not say what torch gets wrong), and what was resumed has to be what
was never stopped, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

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
    """What a row's program does: steps `begin` to `end`; it loads from `folder` before, if it does not begin at 0, and
    saves there at the end. `state` is "full" or "sharded"."""

    begin: int
    end: int
    folder: str


# -- accelerate --------------------------------------------------------------------------------------------------------


def with_accelerate(
    part: Part,
    *,
    precision: str = "no",
    accumulate: int = 1,
    state: str = "FULL",
    ignored: bool = False,
    **options: Any,
) -> list[float]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import set_seed

    set_seed(0)
    model = net()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=f"{state}_STATE_DICT",
        **{"cpu_ram_efficient_loading": False, "sharding_strategy": "FULL_SHARD", **options},
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin, mixed_precision=precision, gradient_accumulation_steps=accumulate, cpu=True
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
    accelerator.save_state(part.folder)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        losses.append(sum(value.double().abs().sum().item() for value in whole.values()))
    return losses


# -- Lightning ---------------------------------------------------------------------------------------------------------


def on_cpu(strategy: type) -> type:
    """Lightning refuses its own class without an accelerator, and no other."""
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
    fabric.save(saved, held)
    return losses


def with_trainer(part: Part, *, precision: str = "32-true", state: str = "full", **options: Any) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy

    losses = []

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = loss_of(self.net(batch["input_ids"]), batch["labels"])
            losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    strategy = on_cpu(FSDPStrategy)(auto_wrap_policy={Block}, state_dict_type=state, **options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        precision=precision,
        max_steps=part.end,
        gradient_clip_val=None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(batches(), batch_size=2)
    saved = f"{part.folder}/saved.ckpt"
    trainer.fit(Task(), loader, ckpt_path=saved if part.begin else None)
    trainer.save_checkpoint(saved)
    return losses


# -- transformers and peft ---------------------------------------------------------------------------------------------


def language_model(kind: str, adapters: bool) -> Any:
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

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    return model


NO_RAM = {"cpu_ram_efficient_loading": "false"}
LAYERS = {"llama": "LlamaDecoderLayer", "tied llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "t5": "T5Block"}


def with_transformers(
    part: Part, *, kind: str, adapters: bool = False, bf16: bool = False, checkpointing: bool = False, **options: Any
) -> list[float]:
    import transformers

    given = transformers.TrainingArguments(
        output_dir=part.folder,
        max_steps=part.end,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=part.end,
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
    )
    model = language_model(kind, adapters)
    trainer = transformers.Trainer(model=model, args=given, train_dataset=batches(), eval_dataset=batches(8))
    trainer.train(resume_from_checkpoint=bool(part.begin))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][part.begin :]
    losses.append(trainer.evaluate()["eval_loss"])
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
    torch_is_wrong: str = ""  # why its losses are not compared
    resumes: bool = True

    def __str__(self) -> str:
        return f"{self.tool}: {self.what}"


def accelerates(what: str, *, torch_is_wrong: str = "", **options: Any) -> Row:
    return Row("accelerate", what, with_accelerate, {"use_orig_params": True, **options}, torch_is_wrong)


NO_CPU = "it refuses a CPU that is not named by device_id, as Lightning does not"
ROWS = [
    accelerates("full state, accumulation, clipping", accumulate=2),
    accelerates("full state, bf16, flat parameters", precision="bf16", use_orig_params=False, accumulate=2),
    accelerates("sharded state, flat parameters", state="SHARDED", use_orig_params=False),
    accelerates("sharded state, bf16", state="SHARDED", precision="bf16", accumulate=2),
    accelerates("offload", cpu_offload=True),
    accelerates("activation checkpointing", activation_checkpointing=True),
    Row("fabric", "full state", with_fabric, torch_is_wrong=NO_CPU),
    Row(
        "fabric",
        "sharded state, bf16, flat parameters",
        with_fabric,
        {"state": "sharded", "precision": "bf16-mixed", "use_orig_params": False},
        NO_CPU,
    ),
    Row("trainer", "full state", with_trainer, torch_is_wrong=NO_CPU),
    Row("trainer", "sharded state, bf16", with_trainer, {"state": "sharded", "precision": "bf16-mixed"}, NO_CPU),
    Row("transformers", "llama", with_transformers, {"kind": "llama", "use_orig_params": "true"}),
    Row(
        "transformers",
        "tied llama, flat parameters",
        with_transformers,
        {"kind": "tied llama", "use_orig_params": "false"},
    ),
    Row("transformers", "gpt2, bf16", with_transformers, {"kind": "gpt2", "bf16": True, "use_orig_params": "true"}),
    Row(
        "transformers",
        "t5, checkpointing",
        with_transformers,
        {"kind": "t5", "checkpointing": True, "use_orig_params": "true"},
    ),
    Row("peft", "LoRA", with_transformers, {"kind": "llama", "adapters": True, "use_orig_params": "true"}),
]


# -- running -----------------------------------------------------------------------------------------------------------


def rank_process(rank: int, number: int, engine: str, part: Part, port: int, result: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
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
    if engine == "fsdp":
        from fsdp.compat import patch

        patch()
    row = ROWS[number]
    Path(part.folder).mkdir(parents=True, exist_ok=True)
    values = row.program(part, **row.options)
    if rank == 0:
        Path(result).write_text(json.dumps(values))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(number: int, engine: str, part: Part) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/result"
        mp.spawn(rank_process, (number, engine, part, port, result), nprocs=RANKS)
        return json.loads(Path(result).read_text())


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= 1e-6 * max(abs(a), abs(b)) for a, b in zip(one, other))


def judge(number: int) -> str:
    """What is wrong with a row."""
    row = ROWS[number]
    with tempfile.TemporaryDirectory() as folder:
        ours = run(number, "fsdp", Part(0, STEPS, f"{folder}/whole"))
        if not row.torch_is_wrong:
            theirs = run(number, "torch", Part(0, STEPS, f"{folder}/torch"))
            if not close(ours, theirs):
                return f"torch's FSDP1 has {theirs}, and here are {ours}"
        if row.resumes:
            first = run(number, "fsdp", Part(0, STEPS // 2, f"{folder}/parts"))
            second = run(number, "fsdp", Part(STEPS // 2, STEPS, f"{folder}/parts"))
            if first[: STEPS // 2] + second != ours:
                return f"resumed {first[: STEPS // 2] + second}, and not stopped {ours}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose tool or description contains this")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [number for number, row in enumerate(ROWS) if options.only in str(row)]
    bad = 0
    for number in chosen:
        if options.list:
            print(ROWS[number])
            continue
        try:
            wrong = judge(number)
        except Exception:
            wrong = traceback.format_exc()
        bad += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok':7}{ROWS[number]}{f': {wrong}' if wrong else ''}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} rows hold")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
