"""Runs programs with common mistakes, and grades the errors and warnings that each rank reports.

    python scripts/mistakes.py [--only SUBSTRING] [--jobs 2] [--long]

Each case of `CASES` is a small program that runs in new processes, usually two ranks, until the end or a timeout. A
report is an exception, a warning, or output on stderr. The grade is

    5  a report in time, on every rank concerned, that names the mistake (`what`) and the remedy (`remedy`)
    4  the remedy without the name of the mistake, or grade 5 except for one rank, or too late
    3  the mistake without a remedy
    1  an unrelated report
    0  no report: the program trains wrongly, or hangs

A case without patterns is a correct program, which must run without a report. Prints a line per case, the average and
the number of cases at grade 0. Exits with 1 if a case has grade 0 or the average is below 4.

Five mistakes cannot be detected, and are no cases. With `use_orig_params=True` a sharded parameter is an ordinary
`nn.Parameter`, as optimizers and libraries need, and so is reading `shape` or `sum()`. An operation that needs the
whole shape fails with torch's own message. A loop that skips parameters of fewer than two dimensions changes none. A
norm of gradients computed by hand is a plain sum. With flat parameters, a loop that freezes by name finds no name.
"""

from __future__ import annotations

import argparse
import copy
import json
import linecache
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

import fsdp
import fsdp.checkpoint
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy

NAMES = {"argparse": argparse, "copy": copy, "fsdp": fsdp, "signal": signal}  # that programs alone use
PATIENCE = 25.0  # seconds that a case may run; a waiting rank must raise within 10
QUICK = 5.0  # seconds within which the ranks must report the mistake


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """A small language model, of which the policy of `wrap` makes a unit per block and the root."""

    def __init__(self, depth: int = 2, width: int = 8) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def wrap(module: nn.Module | None = None, *, flat: bool = False, **options: Any) -> Any:
    module = net() if module is None else module
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=not flat, **options)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A program, and the expected report; `what` and `remedy` are regular expressions."""

    name: str
    program: str
    what: str = ""
    remedy: str = ""
    ranks: str = "all"  # the ranks that must report: all, one (any), or the digits of some
    world: int = 2
    quick: float = QUICK
    group: bool = True  # whether there is a process group


CASES: list[Case] = []


def case(name: str, program: str, what: str = "", remedy: str = "", **options: Any) -> None:
    CASES.append(Case(name, textwrap.dedent(program).strip("\n"), what, remedy, **options))


# -- setting up --------------------------------------------------------------------------------------------------------

case("no process group", "FSDP(net())", "process group", r"init_process_group\(\) first", group=False)
case(
    "WORLD_SIZE is too large",
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.TCPStore("127.0.0.1", 0, 3, True, timeout=timedelta(seconds=2))
    """,
    "[12]/3 clients joined",
    world=1,
    group=False,
)
case("the policy is a class", "FSDP(net(), auto_wrap_policy=Block)", "auto_wrap_policy.*got.*Block", "ModuleWrapPolicy")
case("the policy is a set", "FSDP(net(), auto_wrap_policy={Block})", "auto_wrap_policy.*got.*Block", "ModuleWrapPolicy")
case(
    "the policy's classes are names", 'ModuleWrapPolicy({"Block"})', "got.*Block", "module classes, such as {", world=1
)
case(
    "a policy function without partial()",
    "FSDP(net(), auto_wrap_policy=fsdp.wrap.transformer_auto_wrap_policy)",
    "transformer_layer_cls",
    r"functools.partial\(transformer_auto_wrap_policy",
)
case(
    "the policy matches nothing", "FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))", "matched no", "classes"
)
case("no policy", "say(str(fsdp.describe(FSDP(net(), use_orig_params=True))))", "one unit|single unit", "Block")
case("a class instead of a module", "FSDP(Net)", "module must be an nn.Module, got type|class", "nn.Module")
case(
    "the strategy is a string",
    'FSDP(net(), sharding_strategy="FULL_SHARD")',
    "sharding_strategy.*FULL_SHARD",
    "Sharding",
)
case("the strategy is a number", "FSDP(net(), sharding_strategy=3)", "sharding_strategy.*got 3", "ShardingStrategy")
case(
    "the precision is a dtype", "FSDP(net(), mixed_precision=torch.bfloat16)", "mixed_precision.*bfloat16", "MixedPrec"
)
case("the precision is True", "FSDP(net(), mixed_precision=True)", "mixed_precision.*True", "MixedPrecision")
case("the offload is True", "FSDP(net(), cpu_offload=True)", "cpu_offload.*True", "CPUOffload")
case("a device that is not there", "FSDP(net(), device_id=0)", "device_id=0", "leave device_id out")
case("an argument of DDP", "FSDP(net(), find_unused_parameters=True)", "find_unused_parameters", "reduce_unused=True")
case("device_ids by position", "FSDP(net(), [0])", r"\[0\]", "device_id=")
case("a typo in an argument", "FSDP(net(), auto_wrap_polcy=None)", "auto_wrap_polcy", "mean 'auto_wrap_policy'")
case(
    "the optimizer is made before wrapping",
    "module = net(); optimizer = sgd(module); train(wrap(module, flat=True), optimizer)",
    "holds 1. of 1. parameters from before",
    "Build the optimizer from",
)
case("wrapped twice", "model = FSDP(FSDP(net())); train(model, sgd(model))")
case(
    "DDP around it", "nn.parallel.DistributedDataParallel(wrap())", "DistributedDataParallel", "use the module as it is"
)
case("it around DDP", "FSDP(nn.parallel.DistributedDataParallel(net()))", "DistributedDataParallel", r"ddp\.module")
case("a list is wrapped", "FSDP(nn.ModuleList([Block()]))", "ModuleList", "wrap its elements")
case("a mesh of too many ranks", 'dist.init_device_mesh("cpu", (4,))', "bigger than|world size")
case(
    "the process group of other ranks",
    "group = dist.new_group([0])\nif rank == 1: FSDP(net(), process_group=group)",
    "process_group.*rank 1",
    "Pass each rank a group",
    ranks="1",
)
case(
    "a tensor subclass of FSDP2",
    """
    class Scaled(torch.Tensor):
        def fsdp_pre_all_gather(self, mesh): raise AssertionError
    module = net()
    module.head.weight = nn.Parameter(module.head.weight.detach().as_subclass(Scaled))
    wrap(module)
    """,
    "head.weight.*fsdp_pre_all_gather",
    "plain tensor",
)
for name, value in (("COLLECTIVES", "fast"), ("DEBUG", "yes"), ("FORCE_SHARDED", "true"), ("SHARD_ALIGNMENT", "abc")):
    set_it = f'os.environ["FSDP_{name}"] = "{value}"\nmodel = wrap()\ntrain(model, sgd(model))'
    case(f"FSDP_{name}={value}", set_it, f"FSDP_{name}.*{value}", "may be")
case(
    "a typo in a variable",
    'os.environ["FSDP_DEBUGG"] = "1"\nmodel = wrap()\ntrain(model, sgd(model))',
    "FSDP_DEBUGG",
    r"FSDP_DEBUG\b",
)
case(
    "FSDP_COLLECTIVES differs",
    'os.environ["FSDP_COLLECTIVES"] = ["auto", "native"][rank]\nmodel = wrap()\ntrain(model, sgd(model))',
    "FSDP_COLLECTIVES.*(auto.*native|native.*auto)",
    "alike|same",
)

# -- using parts of the model ------------------------------------------------------------------------------------------

USED = ("model.module(batch())", "model.module.head(torch.ones(2, 8))", "model.encode(batch())")
for name, program in zip(("the inner module is called", "a child is called", "another method is called"), USED):
    for flat in (False, True):
        remedy = "Call the wrapped module|register_forward_method"
        case(f"{name}{', flat' * flat}", f"model = wrap(flat={flat})\n{program}", r"'\w+\.\w+' of", remedy)
USED_WEIGHT = "model = wrap(flat={})\nnn.functional.linear(torch.ones(2, 8), model.module.head.weight)"
case("a weight is used outside, flat", USED_WEIGHT.format(True), "'head.weight' of", "summon_full_params")
case(
    "a flat weight is printed",
    "say(repr(wrap(flat=True).module.head.weight))",
    "ShardedPlaceholder",
    r"shape=\(16, 8\)",
)
case("a flat weight is summed", "wrap(flat=True).module.head.weight.sum()", "'head.weight' of", "summon_full_params")
case("deepcopy of the inner module", "model = wrap(); copy.deepcopy(model.module)", "copy", r"deepcopy\(model\)")
case("torch.save of the model", "torch.save(wrap(), folder + '/model')", "pickle", "state_dict")
case(
    "torch.save of the optimizer",
    "model = wrap(); optimizer = sgd(model); train(model, optimizer)\n"
    "torch.save(optimizer, folder + f'/optimizer{rank}')",
    "shard",
    "optim_state_dict",
)
case(
    "the data of a weight is replaced",
    "model = wrap(); model.module.head.weight.data = torch.zeros(16, 8)\nbackward(model)",
    "'head.weight' of",
    "summon_full_params",
)
case(
    "a weight is replaced",
    "model = wrap(); model.module.head.weight = nn.Parameter(torch.zeros(16, 4))\nbackward(model)",
    "'head.weight' of",
    "summon_full_params",
)
case(
    "a weight is changed in place",
    "model = wrap()\nwith torch.no_grad():\n    for p in model.parameters(): p.mul_(2)\nbackward(model)",
)
case(
    "weights are tied after wrapping",
    "model = wrap(); model.module.head.weight = model.module.emb.weight\nbackward(model)",
    "'head.weight' of.*replaced by|shared",
    "before wrapping",
)
case(
    "weights are tied across units",
    "module = net(); module.blocks[1].up.weight = module.blocks[0].up.weight\nwrap(module)",
    "shared with",
    r"group\(\)",
)
case(
    "a layer is added after wrapping",
    """
    model = wrap()
    model.module.head = nn.Sequential(model.module.head, nn.Linear(16, 4))
    train(model, sgd(model))
    """,
    r"head\.1|1\.weight",
    "wrap",
)
case(
    "the head is outside of the wrapped part",
    """
    module = net()
    module.blocks = nn.Sequential(*module.blocks)
    module.blocks = wrap(module.blocks)
    x = module.head(module.blocks(module.emb(batch()))).sum()
    optimizer = sgd(module)
    x.backward()
    optimizer.step()
    """,
    r"emb\.weight|head\.weight|parameters",
    "wrap",
)
case(
    "an embedding with max_norm",
    "module = net(); module.emb.max_norm = 1.0; module.emb.weight.data.mul_(9)\nmodel = wrap(module); backward(model)",
    "emb.weight.*max_norm",
    "ignored_modules|max_norm=None",
)
case(
    "a part keeps its full weights",
    "model = wrap(flat=True); FSDP.fsdp_modules(model)[1].set_unshard_in_backward(False)\nbackward(model)",
    r"\w+\.weight",
    "set_unshard_in_backward",
)
case("torch.func around a unit", "torch.func.vmap(wrap())(batch())", "torch.func", "inside of its forward")

# -- ranks that differ -------------------------------------------------------------------------------------------------

MODEL = "model = wrap(); optimizer = sgd(model); train(model, optimizer); mark()\n"
ALONE = {
    "state_dict()": ("model.state_dict()", r"state_dict"),
    "save()": ("fsdp.checkpoint.save(folder + '/saved', model, optimizer)", r"save\("),
    "async_save()": ("fsdp.checkpoint.async_save(folder + '/saved', model, optimizer).result()", r"save\("),
    "load()": ("fsdp.checkpoint.load(folder + '/saved', model, optimizer)", r"load\("),
    "optim_state_dict()": ("FSDP.optim_state_dict(model, optimizer)", "optim_state_dict"),
    "summon_full_params()": ("with FSDP.summon_full_params(model): pass", "summon_full_params"),
    "clip_grad_norm_()": ("model.clip_grad_norm_(1.0)", "clip_grad_norm_"),
    "evaluation": ("with torch.no_grad(): model(batch())", "forward"),
    "backward()": ("backward(model)", "backward|forward"),
}
EVERY_RANK = r"every rank|all ranks|if rank == 0|join\(model, loader\)"
for call, (program, words) in ALONE.items():
    before = "fsdp.checkpoint.save(folder + '/saved', model, optimizer); mark()\n" if call == "load()" else ""
    case(
        f"rank 0 alone: {call}, then a step",
        f"{MODEL}{before}if rank == 0:\n    {program}\ntrain(model, optimizer)",
        f"rank 0.*{words}|{words}.*rank 0",
        EVERY_RANK,
        ranks="0" if call == "backward()" else "all",  # rank 1 runs the step that only rank 0 should run, and ends
    )
for call in ("state_dict()", "save()", "clip_grad_norm_()"):
    program, words = ALONE[call]
    case(
        f"rank 0 alone: {call}, then a barrier",
        f"{MODEL}if rank == 0:\n    {program}\ndist.barrier()",
        words,
        EVERY_RANK,
        ranks="0",
        quick=15,
    )
case(
    "rank 0 alone: state_dict(), then the end",
    f"{MODEL}if rank == 0:\n    {ALONE['state_dict()'][0]}",
    "rank 1 has ended.*state_dict|state_dict.*rank 1 has ended",
    "left out this call|every rank|all ranks",
    ranks="0",
)
UNEVEN = f"{MODEL}train(model, optimizer, steps=2 + rank)\n"
case("uneven batches, then the end", UNEVEN, "rank 0 has ended", r"join\(model, loader\)", ranks="1")
case("uneven batches, then save()", UNEVEN + ALONE["save()"][0], r"save\(", r"join\(model, loader\)")
case(
    "uneven batches, then all_reduce()",
    UNEVEN + "dist.all_reduce(torch.ones(1))",
    "rank 1 has waited.*rank 0|rank 0",
    r"join\(model, loader\)",
    ranks="1",
    quick=15,
)
case(
    "a rank skips its backward",
    f"{MODEL}loss = model(batch()).sum()\nif rank == 0: loss.backward()\ntrain(model, optimizer)",
    "rank 0.*backward.*rank 1.*forward",
    EVERY_RANK + "|the same",
)
case(
    "a branch that depends on the rank",
    """
    class Branching(Net):
        def encode(self, tokens): return self.blocks[rank](self.emb(tokens))
    model = wrap(Branching()); train(model, sgd(model), steps=2)
    """,
    "blocks.[01]",
    "reduce_unused=True",
)
case(
    "ranks of other depth",
    "model = wrap(net(depth=2 + rank)); backward(model)",
    "different models",
    "first difference is at unit",
)
case(
    "ranks of other width",
    "model = wrap(net(width=8 + 8 * rank)); backward(model)",
    "different models",
    "first difference is at unit",
)
case("use_orig_params differs", "model = wrap(flat=rank == 1); train(model, sgd(model), steps=2)")
case(
    "other seeds",
    "torch.manual_seed(rank); model = wrap(Net()); train(model, sgd(model))",
    "began with different values.*weight",
    "sync_module_states=True",
    ranks="0",
)
ENDS = "rank 1 has ended|process of rank 1"
case(
    "a rank raises",
    f"{MODEL}if rank == 1: raise KeyError('of rank 1')\ntrain(model, optimizer)",
    ENDS,
    "failed",
    ranks="0",
)
case("a rank exits", f"{MODEL}if rank == 1: sys.exit(3)\ntrain(model, optimizer)", ENDS, "failed|left out", ranks="0")
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
case("a rank is killed", f"{MODEL}if rank == 1: {KILL}\ntrain(model, optimizer)", ENDS, "failed|left out", ranks="0")
case(
    "a rank is killed while others save",
    f"{MODEL}if rank == 1: {KILL}\n{ALONE['save()'][0]}",
    rf"save\(.*({ENDS})|({ENDS}).*save\(",
    "failed|left out|nothing was saved|again",
    ranks="0",
)
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT); time.sleep(1)"
case(
    "Ctrl-C on one rank",
    f"{MODEL}if rank == 1: {INTERRUPT}\ntrain(model, optimizer)",
    f"KeyboardInterrupt|{ENDS}",
    "KeyboardInterrupt|failed|left out",
)
case("Ctrl-C on all ranks", f"{MODEL}{INTERRUPT}\ntrain(model, optimizer)", "KeyboardInterrupt", "KeyboardInterrupt")

# -- states ------------------------------------------------------------------------------------------------------------

ADAM = "model = wrap(flat={}); optimizer = torch.optim.Adam(model.parameters()); train(model, optimizer)\n"
case(
    "one rank's optimizer state on all",
    ADAM.format(False)
    + """
saved = [optimizer.state_dict()]
dist.broadcast_object_list(saved, 0)
optimizer.load_state_dict(saved[0])
train(model, optimizer)
    """,
    "same state|state of another rank",
    "optim_state_dict_to_load",
    ranks="one",
)
PLAIN = """
plain = net(); other = torch.optim.Adam(plain.parameters()); train(plain, other)
optimizer.load_state_dict(other.state_dict())
train(model, optimizer)
"""
case("a plain optimizer's state", ADAM.format(False) + PLAIN, "state of another rank|whole", "optim_state_dict_to_load")
LOAD = "model, state = wrap(), net().state_dict(); {}\nmodel.load_state_dict(state{})"
case("load: a key is missing", LOAD.format("del state['head.bias']", ""), "head.bias", "Missing")
case("load: a key too many", LOAD.format("state['other'] = torch.ones(1)", ""), "other", "Unexpected")
case("load: another shape", LOAD.format("state['head.bias'] = torch.ones(3)", ""), "head.bias.*3", "size mismatch")
case(
    "load: ranks have other keys",
    LOAD.format("state.pop('head.bias' if rank else 'nothing', None)", ""),
    "head.bias",
    "Missing|Nothing was loaded",
)
case(
    "load: DDP's keys",
    LOAD.format("state = {'module.' + k: v for k, v in state.items()}", ""),
    "module.",
    "consume_prefix",
)
case("load: empty on other ranks", LOAD.format("state = {} if rank else state", ""), "empty", "rank0_only=True")
case(
    "load: no name fits, not strict",
    LOAD.format("state = {'model.' + k: v for k, v in state.items()}", ", strict=False"),
    "none of|no key|nothing",
    "model\\.|prefix|names",
)
TYPED = "with FSDP.state_dict_type(model, fsdp.StateDictType.{}): state = model.state_dict()\n"
case(
    "a local state dict as a full one",
    "model = wrap(flat=True)\n" + TYPED.format("LOCAL_STATE_DICT") + "model.load_state_dict(state)",
    "LOCAL_STATE_DICT",
    r"state_dict_type\(",
)
CHECKPOINT = "model = wrap(); optimizer = torch.optim.AdamW(model.parameters()); train(model, optimizer)\n"
SAVED = CHECKPOINT + "fsdp.checkpoint.save(folder + '/saved', model, optimizer)\nmark()\n"
LOADING = "fsdp.checkpoint.load(folder + '/saved', {})"
case("a checkpoint that is not there", CHECKPOINT + LOADING.format("model"), "/saved.*no checkpoint", "manifest|save")
case("the checkpoint of another model", SAVED + LOADING.format("wrap(net(depth=3))"), r"blocks\.2", "missing")
case(
    "a checkpoint without optimizer state",
    CHECKPOINT + "fsdp.checkpoint.save(folder + '/saved', model)\n" + LOADING.format("model, optimizer"),
    "no optimizer state",
    "without",
)
case(
    "the checkpoint of another optimizer",
    SAVED + "optimizer = sgd(model)\n" + LOADING.format("model, optimizer") + "\ntrain(model, optimizer)",
    "another optimizer than SGD|AdamW",
    "optimizer that saved|without one",
)
case(
    "a checkpoint into a file",
    CHECKPOINT + "open(folder + '/saved', 'w').close()\nfsdp.checkpoint.save(folder + '/saved/first', model)",
    "/saved",
    "Not a directory|is a file",
)
case("a checkpoint with swapped arguments", CHECKPOINT + "fsdp.checkpoint.save(model, folder)", "expected a", "got")
case(
    "extra holds an object",
    CHECKPOINT + "fsdp.checkpoint.save(folder + '/saved', model, extra={'args': argparse.Namespace(lr=1)})",
    r"args.*Namespace",
    r"vars\(|numbers, strings|plain",
)
case(
    "the folder cannot be written",
    CHECKPOINT + "fsdp.checkpoint.save('/proc/nowhere/saved', model)",
    "/proc/nowhere",
    "No such file|not permitted|cannot",
)
case(
    "the disk is full",
    """
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    fsdp.checkpoint.save(folder + "/saved", wrap(net(width=2048)))
    """,
    "/saved",
    "too large|No space",
)

# -- steps -------------------------------------------------------------------------------------------------------------

case("an input in float64", "FSDP(nn.Linear(2, 2))(torch.ones(1, 2).double())", "dtype|double", "double")
case(
    "every micro-step in no_sync()",
    f"model = wrap(flat={False}); optimizer = sgd(model)\nwith model.no_sync(): backward(model)\noptimizer.step()",
    r"no_sync\(\).*never reduced",
    r"outside no_sync\(\)|outside of no_sync",
)
STEP = "model = wrap(); optimizer = sgd(model); backward(model)\n"
case(
    "torch's clip_grad_norm_()",
    STEP + "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "rank",
    "Call clip_grad_norm_",
)
case(
    "torch's get_total_norm()",
    STEP + "norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])\n"
    "nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)",
    "get_total_norm",
    r"Call clip_grad_norm_\(\)",
)
case(
    "clipping in no_sync()",
    "model = wrap()\nwith model.no_sync():\n    backward(model)\n    model.clip_grad_norm_(1.0)",
    "unsharded gradients",
    "run a backward",
)
case(
    "clipping a norm that is NaN",
    STEP
    + "for p in model.parameters(): p.grad = p.grad and p.grad * float('nan')\n"
    "model.clip_grad_norm_(1.0, error_if_nonfinite=True)".replace("p.grad and p.grad *", "torch.zeros_like(p) +"),
    "is nan",
    "error_if_nonfinite=False",
)
case(
    "an optimizer of whole parameters",
    STEP + "torch.optim.Adafactor(model.parameters()).step()",
    "Adafactor",
    "Use one",
)
case(
    "a model in bfloat16",
    "model = wrap(net().bfloat16()); train(model, sgd(model))",
    "rounded away",
    r"mixed_precision=MixedPrecision\(",
)
case(
    "parameter groups by p.dim()",
    """
    model = wrap()
    groups = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    train(model, torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * i} for i, group in enumerate(groups)]))
    """,
    r"group 0 .* is empty",
    "param_groups|global_shape",
)
case(
    "a backward twice", "loss = wrap()(batch()).sum()\nloss.backward(); loss.backward()", "second time", "retain_graph"
)
case("join() of DDP", "wrap().join()", "join", r"fsdp\.join\(model, loader\)")
case(
    "create_graph=True",
    "model = wrap(); model(batch()).sum().backward(create_graph=True)",
    "create_graph=True.*unit",
    "NO_SHARD|plain model",
)
case(
    "a step between forward and backward",
    STEP + "loss = model(batch()).sum(); optimizer.step()\nloss.backward()",
    r"'\w+.*' of the .* unit|optimizer",
    "before|between|after",
)
case(
    "register_hook() on flat parameters",
    """
    model = wrap(flat=True)
    for p in model.parameters(): p.register_hook(lambda grad: grad)
    train(model, sgd(model))
    """,
    "never fires",
    "use_orig_params=True",
)
case(
    "one parameter of a flat one is frozen",
    "model = wrap(flat=True); model.module.head.weight.requires_grad_(False)\nbackward(model)",
    "'head.weight'.*one flat parameter",
    "use_orig_params=True",
)

# -- a case in processes of its own ------------------------------------------------------------------------------------


@dataclass
class Told:
    """The message that one rank got, and the seconds from the mistake until then."""

    seconds: float
    text: str


class Diary:
    """Stands for stderr in a rank: writes down each text that the package or Python prints, with the time."""

    def __init__(self, path: Path) -> None:
        self._file, self.start = open(path, "a", buffering=1), time.monotonic()  # noqa: SIM115

    def write(self, text: str) -> int:
        if text.strip():
            self._file.write(json.dumps([time.monotonic() - self.start, text.strip()]) + "\n")
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def mark(self) -> None:
        """Here the mistake begins."""
        self.start = time.monotonic()


def play(case: Case, rank: int, folder: Path) -> None:
    """Run the program of `case` as one rank, which has the process to itself."""
    torch.set_num_threads(1)
    diary: Any = Diary(folder / f"rank{rank}")
    sys.stderr = diary
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.world)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0", "LOCAL_WORLD_SIZE": "2"}
    name = f"<{case.name}>"
    names = {**globals(), **NAMES, "rank": rank, "world": case.world, "folder": str(folder), "mark": diary.mark}
    names["say"] = diary.write
    linecache.cache[name] = (len(case.program), None, case.program.splitlines(keepends=True), name)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", category=UserWarning)
    for noise in ("The given buffer is not writable", "TypedStorage is deprecated"):
        warnings.filterwarnings("ignore", noise)
    warnings.showwarning = lambda message, *where: diary.write(str(message))
    try:
        if case.group:
            store = f"file://{folder}/store"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=case.world, timeout=timedelta(seconds=60)
            )
            dist.barrier()
        diary.mark()
        exec(compile(case.program, name, "exec"), names)
        status = 0
    except BaseException as error:
        status = 1
        diary.write("".join(traceback.format_exception_only(error)))
    os._exit(status)


def warm_up() -> None:
    """Import, before the ranks are forked, the modules that torch imports at first use."""
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor):
        make([nn.Parameter(torch.zeros(1))]).step()
    torch.utils.checkpoint.checkpoint(nn.Identity(), torch.zeros(1), use_reentrant=False)


def run(case: Case) -> tuple[list[Told | None], bool]:
    """Return the message that each rank got, and whether a rank was still running when the time was up."""
    folder = Path(tempfile.mkdtemp(prefix="mistake-"))
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=play, args=(case, rank, folder)) for rank in range(case.world)]
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + PATIENCE
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hangs = any(process.is_alive() for process in ranks)
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        told: list[Told | None] = []
        for rank in range(case.world):
            path = folder / f"rank{rank}"
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            told.append(Told(lines[0][0], "\n".join(text for _, text in lines)) if lines else None)
        return told, hangs
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- grades ------------------------------------------------------------------------------------------------------------


def grade(case: Case, told: list[Told | None], hangs: bool) -> int:
    found = [each for each in told if each is not None]
    if not case.what and not case.remedy:
        return 0 if found or hangs else 5
    if not found:
        return 0
    best = max(_of_words(case, each.text) for each in found)
    expected = {"all": list(range(case.world)), "one": []}.get(case.ranks, [int(c) for c in case.ranks if c.isdigit()])
    lacks = any(told[rank] is None or _of_words(case, told[rank].text) < best for rank in expected)  # type: ignore[union-attr]
    late = min(each.seconds for each in found) > case.quick
    return max(1, best - (lacks or late)) if best > 1 else 1


def _of_words(case: Case, text: str) -> int:
    named = re.search(case.what, text, re.IGNORECASE | re.DOTALL) is not None
    helped = bool(case.remedy) and re.search(case.remedy, text, re.IGNORECASE | re.DOTALL) is not None
    return {(True, True): 5, (False, True): 4, (True, False): 3, (False, False): 1}[named, helped]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run side by side")
    parser.add_argument("--long", action="store_true", help="print all that was said")
    arguments = parser.parse_args()
    chosen = [each for each in CASES if arguments.only in each.name]
    warm_up()
    grades = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for each, (told, hangs) in zip(chosen, pool.map(run, chosen)):
            grades.append(grade(each, told, hangs))
            first = next((one for one in told if one is not None), None)
            seconds = "-" if first is None else f"{min(one.seconds for one in told if one is not None):.1f}"
            ranks = ",".join(str(rank) for rank, one in enumerate(told) if one is not None) or "none"
            text = "" if first is None else " | ".join(dict.fromkeys(one.text for one in told if one is not None))
            short = " ".join(text.split()) if arguments.long else " ".join(text.split())[:110]
            line = f"{grades[-1]}  {each.name:44} {seconds:>5} s  rank {ranks:5} {'HANGS  ' if hangs else ''}{short}"
            print(line, flush=True)
    average, silent = sum(grades) / max(1, len(grades)), grades.count(0)
    print(f"{len(grades)} cases: average {average:.2f}, {silent} at grade 0")
    sys.exit(1 if silent or average < 4 else 0)


if __name__ == "__main__":
    main()
