"""Programs of post-training: adapters on a 4-bit base (bitsandbytes), and the trainers of trl and verl."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from client_rows import (
    FLAT,
    HF_FLAT,
    HF_ORIG,
    LORA,
    OLD,
    ORIG,
    RANKS,
    VOCABULARY,
    Part,
    Row,
    batches,
    language_model,
    my_batches,
    noted_losses,
    size_of,
    training_arguments,
)
from torch import Tensor, nn

# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def quantized(model: nn.Module) -> nn.Module:
    """Replace the layers of each block by layers of 4 bits; the bytes are stored as float32, as FSDP1 needs it."""
    import bitsandbytes

    for block in model.model.layers:
        for module in list(block.modules()):
            for name, layer in [(n, m) for n, m in module.named_children() if type(m) is nn.Linear]:
                options = {"compute_dtype": torch.float32, "quant_storage": torch.float32, "quant_type": "nf4"}
                low = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, **options)
                low.load_state_dict(layer.state_dict())
                low.support_avx512bf16_for_cpu = False  # else evaluation packs the weights in another way, for good
                setattr(module, name, low.to("cpu"))  # the move quantizes
    return model


def with_qlora(part: Part, **options: Any) -> list[float]:
    import peft
    import transformers

    model = quantized(language_model("llama")).requires_grad_(False)
    name, adapters = LORA
    model = peft.get_peft_model(model, getattr(peft, name)(**adapters))
    arguments = transformers.TrainingArguments(**training_arguments(part, "llama", **options))
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=batches(), eval_dataset=batches(16))
    losses = noted_losses(part, trainer)
    trainer.train(resume_from_checkpoint=bool(part.begin))
    losses += [trainer.evaluate()["eval_loss"] for _ in range(2)]
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if dist.get_rank() == 0:
        assert any("quant_state.bitsandbytes__nf4" in key for key in state)
        losses.append(size_of({key: value for key, value in state.items() if "lora" in key}))
    return losses


# -- trl ---------------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """Return a tokenizer of the words `w0`, `w1`, ..., which are the tokens' numbers."""
    import tokenizers
    import transformers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def text(row: Tensor) -> str:
    return " ".join(f"w{4 + int(token) % (VOCABULARY - 4)}" for token in row)


def dataset(kind: str) -> Any:
    import datasets

    rows = [batch["input_ids"] for batch in batches()]
    if kind == "SFT":
        return datasets.Dataset.from_dict({"text": [text(row) for row in rows]})
    prompts = {"prompt": [text(row[:4]) for row in rows]}
    if kind == "DPO":
        prompts |= {"chosen": [" " + text(row[4:8]) for row in rows], "rejected": [" " + text(row[8:]) for row in rows]}
    return datasets.Dataset.from_dict(prompts)


def with_trl(part: Part, *, trainer: str, **options: Any) -> list[float]:
    import peft
    import trl

    name, adapters = LORA
    asked: dict[str, Any] = {"SFT": {"max_length": 16}, "DPO": {"max_length": 16}, "GRPO": {}}[trainer]
    given: dict[str, Any] = {}
    if trainer == "GRPO":
        asked |= {"num_generations": 2, "max_completion_length": 6, "use_vllm": False, "seed": 3}
        given = {"reward_funcs": lambda completions, **_: [float(each.count("w1")) for each in completions]}
    arguments = getattr(trl, f"{trainer}Config")(**training_arguments(part, "llama", **options), bf16=False, **asked)
    made = getattr(trl, f"{trainer}Trainer")(
        model=language_model("llama"),
        args=arguments,
        train_dataset=dataset(trainer),
        processing_class=tokenizer(),
        peft_config=getattr(peft, name)(**adapters, task_type="CAUSAL_LM"),
        **given,
    )
    losses = noted_losses(part, made)
    made.train(resume_from_checkpoint=bool(part.begin))
    state = made.accelerator.get_state_dict(made.model_wrapped)
    made.save_model(f"{part.folder}/adapter")
    if dist.get_rank() == 0:
        import safetensors.torch

        saved = safetensors.torch.load_file(f"{part.folder}/adapter/adapter_model.safetensors")
        assert len(saved) == 8, "two matrices for each of two layers in two blocks"
        losses.append(size_of({key: value for key, value in state.items() if "lora" in key}))
        assert abs(size_of(saved) - losses[-1]) <= 1e-6 * losses[-1]
    return losses


# -- verl --------------------------------------------------------------------------------------------------------------


class CPUIndex(str):
    """The name of the device where verl expects an index; in an f-string the index."""

    def __format__(self, spec: str) -> str:
        return "0"


class CPUModule:
    """`torch.cpu`, with functions that do nothing in place of those that accelerators have besides."""

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *args, **options: 0)


def take_the_cpu_for_verls_device() -> None:
    """Set a platform of verl for CPUs, of which it has none; before its engines are imported."""
    import trl
    from verl.plugin.platform import PlatformBase, set_platform

    trl.AutoModelForCausalLMWithValueHead = type(
        "WithValueHead", (nn.Module,), {}
    )  # of an older trl, which verl imports and no row uses

    def returns(value: Any) -> Any:
        return lambda self, *args, **options: value

    values = {
        "is_available": True,
        "current_device": CPUIndex("cpu"),
        "device_count": 1,
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "nvtx_range": contextlib.nullcontext(),
        "get_device_capability": (None, None),
        "is_ipc_supported": False,
    }
    names = dict.fromkeys(PlatformBase.__abstractmethods__) | values
    methods = {name: returns(value) for name, value in names.items()}
    facts = {"device_name": "cpu", "vendor_name": "cpu", "device_module": CPUModule()}
    methods |= {name: property(returns(value)) for name, value in facts.items()}
    set_platform(type("CPUPlatform", (PlatformBase,), methods)())


def verls_batch(number: int, fields: dict[str, Any]) -> Any:
    import tensordict
    from verl.utils import tensordict_utils

    rows = my_batches()[number]
    tokens = torch.nested.as_nested_tensor(list(rows[:, :10]), layout=torch.jagged)
    ones, places = torch.ones(10, dtype=torch.int64), torch.arange(10)
    data = tensordict.TensorDict(
        {
            "input_ids": tokens,
            "position_ids": torch.nested.as_nested_tensor([places] * len(rows), layout=torch.jagged),
            "loss_mask": torch.nested.as_nested_tensor([ones] * len(rows), layout=torch.jagged),
        },
        batch_size=len(rows),
    )
    tensordict_utils.assign_non_tensor(data, **fields)
    return data


def with_verl(part: Part, *, lora: bool = False, max_norm: float = 1.0, **options: Any) -> list[float]:
    from verl.trainer.config import CheckpointConfig
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.utils.fsdp_utils import get_fsdp_wrap_policy
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead
    from verl.workers.utils.losses import sft_loss

    dist.init_process_group("gloo")
    source = f"{part.folder}/model"
    if dist.get_rank() == 0:
        language_model("tied llama").save_pretrained(source)  # verl loads one that is not tied on rank 0 alone
        tokenizer().save_pretrained(source)
    dist.barrier()
    torch.manual_seed(1)  # for equal adapters on all ranks: torch's FSDP1 does not synchronize them here
    adapters = {"lora_rank": 2, "target_modules": ["q_proj", "v_proj"]} if lora else {}
    single = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=source,
            override_config={"attn_implementation": "eager"},
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            **adapters,
        ),
        FSDPEngineConfig(
            use_torch_compile=False,
            mixed_precision=single,
            fsdp_size=RANKS,
            param_offload=True,
            optimizer_offload=True,
            wrap_policy={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            **options,
        ),
        FSDPOptimizerConfig(lr=0.01, total_training_steps=100, clip_grad=max_norm),
        CheckpointConfig(),
    )
    engine.initialize()
    if part.is_old:
        plain = language_model("tied llama", LORA if lora else None)
        policy = get_fsdp_wrap_policy(plain, engine.engine_config.wrap_policy, is_lora=lora)
        part.load_old(f"{part.folder}/saved", engine.module, engine.optimizer, model=plain, auto_wrap_policy=policy)
    elif part.begin:
        engine.load_checkpoint(f"{part.folder}/saved", del_local_after_load=False)
    fields = {
        "temperature": 1.0,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
        "use_remove_padding": False,
        "pad_mode": DatasetPadMode.NO_PADDING,
    }
    loss_function = functools.partial(sft_loss, None)
    losses = []
    for number in range(part.begin, part.end):
        with engine.eval_mode():
            engine.infer_batch(verls_batch(number, fields), loss_function)
        with engine.train_mode():
            output = engine.train_batch(verls_batch(number, fields), loss_function)
        losses.append(sum(output["loss"]) / len(output["loss"]))
    part.tell(losses)
    engine.save_checkpoint(f"{part.folder}/saved")
    for synced in (False, True) if lora else (False,):
        for layered in (False, True) if synced else (False,):
            weights, _ = engine.get_per_tensor_param(layered_summon=layered, base_sync_done=synced)
            losses.append(size_of(dict(weights)))
    return losses


ROWS = [
    Row(with_qlora, "4-bit base", **HF_ORIG),
    Row(with_qlora, "4-bit base, flat parameters", **HF_FLAT),
    *(Row(with_trl, f"{trainer} with LoRA", trainer=trainer, **HF_ORIG) for trainer in ("SFT", "DPO", "GRPO")),
    *(
        Row(with_verl, f"FSDPEngineWithLMHead{what}{', old checkpoint' * bool(old)}", **old, **options)
        for old in ({}, OLD)
        for what, options in (("", ORIG), (", flat parameters", FLAT), (", LoRA", {"lora": True, **ORIG}))
    ),
]
