"""`python -m fsdp.migrate`: what it says of ten scripts, and that what it proposes trains as the script did."""

from __future__ import annotations

import ast
import importlib
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp.tools.migrate import Script, main
from tests.harness.pool import run_ranks
from tests.harness.training_scripts import RUNNABLE, SCRIPTS


def _train(text: str) -> list[float]:
    directory = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(directory)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "script.py", "exec"), names)
        losses: list[float] = names["main"](directory[0])
    dist.barrier()  # rank 0 has saved
    saved = [torch.load(os.path.join(directory[0], name)) for name in sorted(os.listdir(directory[0]))]
    assert len(saved) == 1  # its last checkpoint is whole, with the names of the plain model
    state = saved[0].get("model", saved[0].get("MODEL_STATE", saved[0]))
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert shapes == {"0.weight": (7, 6), "0.bias": (7,), "2.weight": (2, 7), "2.bias": (2,)}
    return losses


def _both(texts: dict[str, tuple[str, str]]) -> None:
    for name, (before, after) in texts.items():
        theirs, ours = _train(before), _train(after)
        assert len(theirs) >= 4
        assert ours == pytest.approx(theirs, rel=1e-5), name


def test_what_is_proposed_trains_as_the_script_did() -> None:
    texts = {name: (text, Script(text).migrated()) for name, text in RUNNABLE.items()}
    for before, after in texts.values():
        assert not re.search(r"DistributedDataParallel|torch\.distributed\.fsdp", after)
        assert before != after
    run_ranks(2, _both, texts)


# What is said of each script: (a word of the line, what it says, whether that is in the diff).
SAID = {
    "hand-written": [
        ("import DistributedDataParallel", "import FullyShardedDataParallel", True),
        ("model = DDP(", "wrap by FullyShardedDataParallel", True),
        ("model = DDP(", "without auto_wrap_policy= the whole model", False),
        ("module.load_state_dict", "every rank calls it, with the whole state dict", False),
        ("optimizer.load_state_dict", "FSDP.optim_state_dict_to_load takes", True),
        ("clip_grad_norm_", "sees this rank's shards alone", True),
        ("if rank == 0 and", "a state dict takes all ranks", True),
    ],
    "tutorial": [
        ("find_unused_parameters", "find_unused_parameters is reduce_unused here", True),
        ("find_unused_parameters", "without auto_wrap_policy=", False),
        ("clip_grad_norm_", "sees this rank's shards alone", True),
        ("if self.local_rank == 0", "a state dict takes all ranks", True),
    ],
    "fsdp1": [
        ("MixedPrecision", "import from fsdp: the same names", True),
        ("import ShardingStrategy", "import from fsdp: the same names", True),
        ("fsdp.wrap", "import from fsdp.wrap: the same names", True),
    ],
    "vision": [
        ("gradient_as_bucket_view", "without gradient_as_bucket_view", True),
        ("gradient_as_bucket_view", "without auto_wrap_policy=", False),
        ("if dist.get_rank() == 0", "a state dict takes all ranks", True),
    ],
    "nano": [
        ("import DistributedDataParallel", "import FullyShardedDataParallel", True),
        ("p.dim() >= 2", ".dim of a parameter is that of this rank's 1-D part", False),
        ("GradScaler", "use ShardedGradScaler", True),
        ("optimizer = model.conf", "optimizer is made before the model is wrapped", False),
        ("optimizer.load_state_dict", "Do so after the model is wrapped", False),
        ("model = DDP(", "wrap by FullyShardedDataParallel", True),
        ("model = DDP(", "without auto_wrap_policy=", False),
        ("model = DDP(", "wrap the model in any case", False),
        ("and master_process:", "a state dict takes all ranks", False),
        (
            "losses = estimate_loss()",
            "the model runs under `if iter_num % eval_interval == 0 and master_process`",
            False,
        ),
        ("clip_grad_norm_", "sees this rank's shards alone", False),
    ],
    "imagenet": [
        ("output_device", "without output_device: outputs stay", True),
        ("output_device", "without auto_wrap_policy=", False),
        ("model.load_state_dict", "every rank calls it", False),
        ("optimizer.load_state_dict", "the optimizer holds this rank's shards", True),
        ("p.numel()", "counts this rank's part once the model is wrapped: fsdp.num_params", False),
        ("optimizer.state_dict", "FSDP.optim_state_dict(model, optimizer), called by all ranks, has all", True),
        ("validate(", "the model runs under `if args.rank == 0`", False),
    ],
    "ema": [
        ("import DataParallel", "import FullyShardedDataParallel", True),
        ("static_graph", "delay_all_reduce_named_params: not known here", True),
        ("static_graph", "without auto_wrap_policy=", False),
        ("deepcopy", "copy net, not what is inside of it", True),
        ("net.join()", "iterate over `fsdp.join(model, loader)`", False),
        ("net.module(x)", "call net, not what is inside of it", True),
        ("sample", "fsdp.register_forward_method(model, 'sample')", False),
        ("isinstance", "FullyShardedDataParallel instead", True),
    ],
    "amp": [
        ("import DistributedDataParallel", "import FullyShardedDataParallel", True),
        ("[rank]", "wrap by FullyShardedDataParallel", True),
        ("[rank]", "without auto_wrap_policy=", False),
        ('GradScaler("cuda")', "use ShardedGradScaler", True),
        ("register_comm_hook", "hooks get the unit's flat gradient", False),
        ("p.ndim", ".ndim of a parameter", False),
        ("Join(", "Join does not know this wrapper", False),
        ("elif rank == 0", "a state dict takes all ranks", False),
    ],
    "fsdp1-dotted": [
        ("import torch.distributed.fsdp\n", "import fsdp instead", True),
        ("as wrapping", "import fsdp.wrap instead", True),
        ("StateDictOptions", "import these from fsdp.checkpoint, or call fsdp.compat.enable_dcp() once", True),
        ("import fully_shard", "Write `model = FSDP(model)` for `fully_shard(model)`", False),
        ("model = torch", "fsdp instead of torch.distributed.fsdp", True),
    ],
    "plain": [],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_says_what_to_change(name: str) -> None:
    script = Script(SCRIPTS[name], name)
    lines = SCRIPTS[name].splitlines(keepends=True)
    assert len(script.findings) == len(SAID[name]), [finding.says for finding in script.findings]
    for finding, (word, says, proposed) in zip(script.findings, SAID[name]):
        assert word in lines[finding.line - 1] and says in finding.says, finding
        assert bool(finding.edits) is proposed, finding
    compile(script.migrated(), name, "exec")
    assert Script(script.migrated()).migrated() == script.migrated() or name == "ema"  # nothing is proposed twice


def test_state_dicts_are_asked_for_on_every_rank_when_they_are_saved() -> None:
    migrated = Script(SCRIPTS["hand-written"]).migrated()
    assert (
        """        if step % 3 == 2:
            model_state = model.state_dict()  # on every rank
            optim_state = FSDP.optim_state_dict(model, optimizer)  # on every rank
        if rank == 0 and step % 3 == 2:
            torch.save({"model": model_state, "optimizer": optim_state}, path)
"""
        in migrated
    )
    assert (
        "FSDP(make_model(), device_id=rank if torch.cuda.is_available() else None, broadcast_buffers=False, "
        in migrated
    )


def test_an_optimizer_that_is_loaded_before_the_model_is_wrapped_gets_no_shards() -> None:
    text = "from torch.nn.parallel import DistributedDataParallel as DDP\nopt = make(net)\nopt.load_state_dict(saved)\n"
    assert Script(text + "model = DDP(net)\n").migrated().splitlines()[2] == "opt.load_state_dict(saved)"
    assert "optim_state_dict_to_load" in Script(text.replace("opt =", "model = DDP(net)\nopt =")).migrated()


PRIVATE = {
    "a function of another module": """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _reshard
_reshard(FSDP(net), handle, True)
""",
    "modules": """
if True:
    from torch.distributed.fsdp import _runtime_utils, FullyShardedDataParallel as FSDP, ShardingStrategy as Strategy
    import torch.distributed.fsdp._common_utils as common
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
model = FSDP(net, sharding_strategy=Strategy.FULL_SHARD)
""",
    "names with dots": """
import torch
import torch.distributed.fsdp
torch.distributed.fsdp._runtime_utils._lazy_init(model, model)
model = torch.distributed.fsdp.FullyShardedDataParallel(net)
""",
    "an alias": """
import torch.distributed.fsdp as theirs
theirs._runtime_utils._lazy_init(theirs.FullyShardedDataParallel(net))
""",
    "FSDP2 beside FSDP1": """
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, MixedPrecisionPolicy as Policy
""",
}


@pytest.mark.parametrize("what", PRIVATE)
def test_it_imports_nothing_that_is_not_here(what: str) -> None:
    """Names of torch's FSDP that are not here stay as they are, and are told of, one by one."""
    text = PRIVATE[what]
    script = Script(text)
    told = [finding.says for finding in script.findings if not finding.edits]
    assert all("is not here" in says or "and not here" in says for says in told)
    assert len(told) == {"modules": 3, "names with dots": 2, "FSDP2 beside FSDP1": 2}.get(what, 1)
    migrated = script.migrated()
    for node in ast.walk(ast.parse(migrated)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fsdp"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        for alias in node.names if isinstance(node, ast.Import) else ():
            importlib.import_module(alias.name)
    for name in ("_reshard", "_lazy_init", "_get_device_from_mesh", "fully_shard", "Policy"):
        before = [line for line in text.splitlines() if re.search(rf"\b{name}\(", line)]
        assert all(line in migrated.splitlines() for line in before)
    assert "fsdp.FullyShardedDataParallel(net)" in migrated or what != "names with dots"
    assert "from fsdp import FullyShardedDataParallel" in migrated or what in ("names with dots", "an alias")
    assert Script(migrated).migrated() == migrated


def test_a_script_that_chooses_between_two_wrappers_keeps_both() -> None:
    both = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
model = FSDP(net) if sharded else DDP(net, device_ids=[rank])
if isinstance(model, DDP) or isinstance(model, FSDP):
    pass
"""
    assert Script(both).migrated() == both.replace("torch.distributed.fsdp", "fsdp")
    assert "the script has FullyShardedDataParallel besides" in Script(both).findings[1].says
    unused = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    assert Script(unused).migrated() == unused
    assert Script(unused).findings[0].says == "DistributedDataParallel stays: it is not used"


def test_text_that_is_not_ascii_keeps_its_places() -> None:
    text = "from torch.nn.parallel import DistributedDataParallel as DDP\n\nmodel = {'é': DDP(net)}['é']  # ü\n"
    assert Script(text).migrated().splitlines()[-1] == (
        "model = {'é': FSDP(net, broadcast_buffers=True, use_orig_params=True, sync_module_states=True)}['é']  # ü"
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPTS["imagenet"])
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{path}:9: wrap by FullyShardedDataParallel") and printed[0].endswith(" (--diff)")
    assert printed[1].startswith(f"{path}:9: without auto_wrap_policy=") and len(printed) == 7
    assert main([str(path), "--diff"]) == 0
    out, rest = capsys.readouterr()
    assert f"--- {path}\n+++ {path} (migrated)\n" in out and len(rest.splitlines()) == 4
    path.write_text(SCRIPTS["plain"])
    assert main([str(path)]) == 0
    assert "nothing of DistributedDataParallel or torch.distributed.fsdp found" in capsys.readouterr().out
    path.write_text("def")
    assert main([str(path)]) == 2
    assert f"python -m fsdp.migrate: {path}: invalid syntax" in capsys.readouterr().err
