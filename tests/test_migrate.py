"""`fsdp migrate`: findings in excerpts of scripts. In test_migrated_scripts.py whole scripts train as before."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdp.__main__ import main
from fsdp.tools.migrate import Finding, Script
from tests.harness.training_scripts import SCRIPTS

# Findings of each script: (text of the line, part of the advice, whether a change is proposed).
FOUND = {
    "imagenet": [
        ("output_device", "without output_device: outputs stay", True),
        ("output_device", "pass auto_wrap_policy=", False),
        ("optimizer.load_state_dict", "each rank loads a part", False),
        ("p.numel()", "call fsdp.num_params(model)", False),
        ("optimizer.state_dict", "FSDP.optim_state_dict(model, optimizer)` on all ranks", False),
        ("if args.rank == 0", "alone call validate(), and all ranks have to", False),
    ],
    "ema": [
        ("import DataParallel", "import FullyShardedDataParallel", True),
        ("static_graph", "without static_graph: nothing has to be promised", True),
        ("static_graph", "pass auto_wrap_policy=", False),
        ("deepcopy", "pass the wrapped model, not the module inside", False),
        ("net.join()", "for batch in fsdp.join(model, loader)", False),
        ("net.module(x)", "call the wrapped model, not the module inside", False),
        ("sample", "fsdp.register_forward_method(model, 'sample')", False),
        ("isinstance", "FullyShardedDataParallel instead", True),
    ],
    "amp": [
        ("import DistributedDataParallel", "import FullyShardedDataParallel", True),
        ("[rank]", "wrap by FullyShardedDataParallel", True),
        ("[rank]", "pass auto_wrap_policy=", False),
        ('GradScaler("cuda")', "ShardedGradScaler", False),
        ("cuda.amp.GradScaler", "ShardedGradScaler", False),
        ("p.ndim", "ask fsdp.global_shape(p)", False),
        ("Join(", "for batch in fsdp.join(model, loader)", False),
        ("elif rank == 0", "`if rank == 0` lets some ranks alone call model.state_dict()", False),
    ],
    "fsdp1-dotted": [
        ("import torch.distributed.fsdp\n", "import fsdp in place of torch.distributed.fsdp", False),
        ("as wrapping", "import fsdp.wrap in place of torch.distributed.fsdp.wrap", False),
        ("StateDictOptions", "import from fsdp.checkpoint", True),
        ("import fully_shard", "fully_shard: not in this package. For FSDP2 write `model = FSDP(", False),
    ],
    "plain": [],
}


def left(text: str) -> list[Finding]:
    return [finding for finding in Script(text).findings if finding.kind == "by hand"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_findings_of_scripts(name: str) -> None:
    script = Script(SCRIPTS[name], name)
    lines = SCRIPTS[name].splitlines(keepends=True)
    assert len(script.findings) == len(FOUND[name]), [finding.advice for finding in script.findings]
    for finding, (word, advice, proposed) in zip(script.findings, FOUND[name]):
        assert word in lines[finding.line - 1] and advice in finding.advice, finding
        assert (finding.edit is not None) is proposed, finding
    compile(script.migrated(), name, "exec")
    assert Script(script.migrated()).migrated() == script.migrated()  # idempotent


def test_arguments_of_the_wrapper_are_kept_translated_or_dropped() -> None:
    text = """
import torch; from torch.nn.parallel import DataParallel, DistributedDataParallel as DDP
model = DDP(net, device_ids=[0], process_group=group, broadcast_buffers=False, find_unused_parameters=unused)
torch.nn.utils.clip_grad_norm_(some, 1.0)
"""
    script = Script(text)
    assert (
        script.migrated()
        == """
import torch; from fsdp import FullyShardedDataParallel as FSDP; from torch.nn.parallel import DataParallel
model = FSDP(net, process_group=group, broadcast_buffers=False, reduce_unused=unused, use_orig_params=True, \
sync_module_states=True)
torch.nn.utils.clip_grad_norm_(some, 1.0)
"""
    )
    assert "call `model.clip_grad_norm_(max_norm)`" in left(text)[-1].advice
    of_mapping = left(text.replace("device_ids=[0]", "**options"))
    assert of_mapping[0].line == 3 and of_mapping[0].advice.startswith("wrap by FullyShardedDataParallel")


def test_aliases_of_the_inner_module_are_found() -> None:
    text = """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(net)
raw_model = model if single else model.module
ema = EMA(model.module)
if master_process:
    raw_model.generate(4)
"""
    advice = {finding.line: finding.advice for finding in left(text)}
    assert "pass the wrapped model, not the module inside" in advice[5]
    assert "`if master_process` lets some ranks alone call raw_model.generate()" in advice[6]
    assert "fsdp.register_forward_method(model, 'generate')" in advice[7]


def _branches(text: str) -> list[str]:
    return [finding.advice for finding in left(text) if "lets some ranks alone call" in finding.advice]


WRAPPED = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n"
OF_SOME_RANKS = [
    *("rank == 0", "0 == self.rank", "args.local_rank in [-1, 0]", "not rank", "rank < 1", "dist.get_rank() != 0"),
    *("gpu_id == 0", "self.device == 0", "args.gpu == 0", "replica_id == 0", 'int(os.environ["RANK"]) == 0'),
    *("self.is_chief", "is_main_process()", "trainer.is_global_zero", "master_process", "not is_master"),
    *("step % 2 == 0 and rank == 0", "args.gpu is None or args.gpu == 0", "rank == args.last_rank", "rank % 8 == 0"),
]
OF_ALL_RANKS = [
    *("step == 0", "local_rank != -1", '"RANK" in os.environ', "rank is not None", "args.lora_rank > 0", "rank >= 0"),
    *("torch.cuda.device_count() > 1", "num_workers == 0", 'device == "cuda"', "args.n_gpu > 1", 'mode == "rank"'),
    *('__name__ == "__main__"', "master_addr", "args.distributed", "world_size > 1"),
]


@pytest.mark.parametrize("condition", [*OF_SOME_RANKS, *OF_ALL_RANKS])
def test_conditions_of_some_ranks_are_known(condition: str) -> None:
    found = _branches(f"{WRAPPED}if {condition}:\n    model.state_dict()\n")
    assert bool(found) is (condition in OF_SOME_RANKS)


FOR_ALL_RANKS = [
    *(
        "loss = model(x)",
        "model.module(x)",
        "model.clip_grad_norm_(1.0)",
        "model.generate(x)",
        "model.load_state_dict(s)",
    ),
    *(
        "net.state_dict()",
        "model.module.head.state_dict()",
        "optimizers[0].state_dict()",
        "self.opt_g.load_state_dict(s)",
    ),
    *("copy.deepcopy(model).to(device).state_dict()", "validate(loader, model)", "writer.add_graph(model, x)"),
    *("fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)", "x = model.state_dict() if y else None"),
]
FOR_ONE_RANK = [
    *("print(model)", "model.eval()", "sum(p.numel() for p in model.parameters())", "scheduler.state_dict()"),
    *("scaler.state_dict()", "wandb.watch(model)", "torch.save(state, path)", "logger.info(args.model)"),
    *("optim_scheduler.load_state_dict(s)", "isinstance(model.module, Net)", "make(args.model)", "self.step(x)"),
]


@pytest.mark.parametrize("statement", [*FOR_ALL_RANKS, *FOR_ONE_RANK])
def test_calls_that_need_all_ranks_are_known(statement: str) -> None:
    found = _branches(f"import copy, fsdp, torch\n{WRAPPED}if rank == 0:\n    {statement}\n")
    assert bool(found) is (statement in FOR_ALL_RANKS)


PATHS = {  # ways from a condition to a call that needs all ranks
    "else": "if rank != 0:\n    pass\nelse:\n    model(x)",
    "an early return": "def save():\n    if rank != 0:\n        return\n    print('saving')\n    model.state_dict()",
    "a conditional expression": "state = model.state_dict() if rank == 0 else None",
    "a parameter": "def f(m):\n    if rank == 0:\n        m.state_dict()\nf(m=model)",
    "a result": "def f():\n    return model.module\ninner = f()\nif rank == 0:\n    inner.state_dict()",
    "two calls": "def f():\n    g()\ndef g():\n    model(x)\nif rank == 0:\n    f()",
    "an attribute": """
class Base:
    def save(self):
        self.keep(self.net.state_dict())
class Trainer(Base):
    def __init__(self, net):
        self.net = net
    def run(self):
        if self.rank == 0:
            self.save()
Trainer(model).run()
""",
    "a function in a method": """
class Trainer:
    def train(self):
        def save():
            Trainer.keep(model.state_dict())
        if rank == 0:
            save()
""",
    "a static method": """
class Tool:
    @staticmethod
    def save(net):
        net.state_dict()
def run(tool):
    if rank == 0:
        tool.save(model)
""",
    "a function that wraps": """
def wrap(module):
    return DDP(module)
class Runner:
    def __init__(self):
        self.net = wrap(Net())
    def run(self):
        if self.rank == 0:
            self.net(x)
""",
    "a name of the model or the module inside": """
raw = model
if several:
    raw = model.module
if rank == 0:
    raw.generate()
""",
    "an object": """
class Saver:
    def save(self):
        self.save_again()
    def save_again(self):
        self.save()
        self.state_dict()
    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict()}
class Trainer:
    def __init__(self):
        self.saver = Saver()
    def run(self):
        if self.rank == 0:
            self.saver.save()
""",
}


@pytest.mark.parametrize("path", PATHS)
def test_branches_of_some_ranks_are_followed(path: str) -> None:
    (advice,) = _branches(f"{WRAPPED}{PATHS[path]}\n")
    assert "`if " in advice


def test_what_runs_before_the_wrapping_is_for_any_rank() -> None:
    """Also in a method that the constructor calls before it wraps, but not if another method calls it later."""
    text = """
from torch.nn.parallel import DistributedDataParallel as DDP
class Trainer:
    def __init__(self, model):
        self.model = model
        self.load()
        self.model = DDP(self.model)
    def load(self):
        if self.rank == 0:
            self.model.load_state_dict(torch.load("x.pt"))
"""
    assert not _branches(text)
    assert _branches(f"{text}    def again(self):\n        self.load()\n")


@pytest.mark.parametrize("copy", ["copy.deepcopy(net)", "EMA(net)", "torch.optim.swa_utils.AveragedModel(net).to(0)"])
def test_copies_of_the_plain_model_are_to_be_made_after_wrapping(copy: str) -> None:
    text = f"""
import copy, torch
from torch.nn.parallel import DistributedDataParallel as DDP
class EMA:
    def __init__(self, model):
        self.shadow = copy.deepcopy(model)
def main():
    ema = {copy}
    model = DDP(net)
"""
    assert [f.line for f in left(text) if "wrap the model before this runs: " in f.advice] == [
        6 if copy.startswith("EMA") else 8
    ]
    text = text.replace("def main", "model = DDP(net)\ndef main").replace("    model = DDP(net)\n", "")
    assert not any("wrap the model before" in finding.advice for finding in left(text))


def test_states_of_optimizers_are_named() -> None:
    text = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
generator, critic = DDP(generator), DDP(critic)
opt_g, opt_c = torch.optim.SGD(generator.parameters()), torch.optim.SGD(critic.module.parameters())
saved = opt_g.state_dict()
opt_c.load_state_dict(saved)
"""
    advice = {finding.line: finding.advice for finding in left(text)}
    assert "`FSDP.optim_state_dict(model, opt_g)`" in advice[6]
    assert "`FSDP.optim_state_dict_to_load(model, opt_c, saved)`" in advice[7]


def test_shapes_read_before_wrapping_are_no_finding() -> None:
    text = """
from torch.nn.parallel import DistributedDataParallel as DDP
class Net:
    def configure_optimizers(self):
        return [p for p in self.parameters() if p.dim() > 1]
groups = net.configure_optimizers()
model = DDP(net)
"""
    assert not any("dim" in finding.advice for finding in Script(text).findings)
    assert any(".dim of a parameter" in f.advice for f in Script(f"{text}net.configure_optimizers()\n").findings)


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
    "FSDP2 beside FSDP1": """
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, MixedPrecisionPolicy as Policy
from torch.distributed.fsdp import register_fsdp_forward_method, UnshardHandle
""",
}


@pytest.mark.parametrize("case", PRIVATE)
def test_names_that_the_package_lacks_are_findings_and_stay(case: str) -> None:
    """Each such name of torch's FSDP is one finding."""
    text = PRIVATE[case]
    script = Script(text)
    advice = [finding.advice for finding in left(text)]
    assert all("not in this package" in advice for advice in advice)
    assert len(advice) == {"modules": 3, "FSDP2 beside FSDP1": 2}.get(case, 1)
    migrated = script.migrated()
    for node in ast.walk(ast.parse(migrated)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fsdp"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
    for name in ("_reshard", "_lazy_init", "_get_device_from_mesh", "fully_shard", "Policy"):
        before = [line for line in text.splitlines() if re.search(rf"\b{name}\(", line)]
        assert all(line in migrated.splitlines() for line in before)
    assert "from fsdp import FullyShardedDataParallel" in migrated
    assert Script(migrated).migrated() == migrated


def test_the_package_imported_by_its_last_name_is_left_to_the_user() -> None:
    (finding,) = left("from torch.distributed import fsdp\nmodel = fsdp.FullyShardedDataParallel(net)\n")
    assert finding.advice.startswith("import fsdp in place of torch.distributed.fsdp: ")
    (finding,) = left("from torch.distributed.checkpoint import state_dict\n")
    assert finding.advice.startswith("import fsdp.checkpoint in place of torch.distributed.checkpoint.state_dict: ")


def test_scripts_with_both_wrappers_keep_both() -> None:
    text = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
model = FSDP(net) if sharded else DDP(net, device_ids=[rank])
if isinstance(model, DDP) or isinstance(model, FSDP):
    pass
"""
    assert Script(text).migrated() == text.replace("torch.distributed.fsdp", "fsdp")
    unused = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    assert Script(unused).migrated() == unused
    assert not Script(unused).findings


def test_positions_are_right_after_text_beyond_ascii() -> None:
    text = "from torch.nn.parallel import DistributedDataParallel as DDP\n\nmodel = {'é': DDP(net)}['é']  # ü\n"
    assert Script(text).migrated().splitlines()[-1] == (
        "model = {'é': FSDP(net, broadcast_buffers=True, use_orig_params=True, sync_module_states=True)}['é']  # ü"
    )


SUMMED = """
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel as DDP
criterion = nn.CrossEntropyLoss(reduction="sum")
model = DDP(net)
for x, y in batches:
    (criterion(model(x), y) + nll_loss(model(x), y, reduction='sum')).backward()
    nll_loss(model(x), y, reduction='mean')
"""


def test_summed_losses_are_noted_where_they_are_trained_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once each; the script may be right, so the line is nothing that is left to do."""
    script = Script(SUMMED)
    noted = [finding for finding in script.findings if finding.kind == "note"]
    assert [finding.line for finding in noted] == [6, 9]
    assert all("`fsdp.mean_factor(model, num_tokens)`" in finding.advice for finding in noted)
    path = tmp_path / "train.py"
    path.write_text(done := script.migrated())
    assert main(["migrate", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in printed[:-1]] == [f"{path}:6", f"{path}:9"]
    assert all("[note] gradients of a sum" in line for line in printed[:-1])
    assert printed[-1] == "0 changes proposed by --diff, 0 left to do by hand"
    path.write_text(done + "factor = fsdp.mean_factor(model, len(y))\n")
    assert main(["migrate", str(path)]) == 0 and len(capsys.readouterr().out.splitlines()) == 1


def test_the_command_reports_changes_and_manual_edits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPTS["imagenet"])
    assert main(["migrate", str(path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{path}:9: [--diff] wrap by FullyShardedDataParallel")
    assert printed[1].startswith(f"{path}:9: [by hand] pass auto_wrap_policy=")
    assert printed[-1] == "1 changes proposed by --diff, 5 left to do by hand"
    assert main(["migrate", str(path), "--diff"]) == 1
    out, rest = capsys.readouterr()
    assert f"--- {path}\n+++ {path} (migrated)\n" in out and len(rest.splitlines()) == 7
    path.write_text(SCRIPTS["plain"])
    assert main(["migrate", str(path)]) == 0
    assert capsys.readouterr().out == "0 changes proposed by --diff, 0 left to do by hand\n"
    wrong = {
        b"def": "invalid syntax (train.py, line 1)",
        b"x = 1\n\n\n'\xe9'\n": "'utf-8' codec can't decode byte 0xe9",
    }
    for content, words in wrong.items():
        path.write_bytes(content)
        with pytest.raises(SystemExit) as ended:
            main(["migrate", str(path)])
        assert ended.value.code == 2 and f"fsdp migrate: {path}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_patch_has_the_encoding_and_the_ends_of_lines_of_the_script(
    encoding: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    """It applies, also at the first line, and where the last one does not end."""
    monkeypatch.chdir(tmp_path)
    path, ddp = Path("train.py"), "from torch.nn.parallel import DistributedDataParallel"
    lines = [
        f"# coding: {encoding.removesuffix('-sig')}",
        ddp,
        "x = 'é\f'",
        "model = DistributedDataParallel(net)  # é",
    ]
    path.write_bytes(end.join(lines).encode(encoding))
    assert main(["migrate", str(path), "--diff"]) == 1
    subprocess.run(["git", "apply", "-"], input=capfdbinary.readouterr().out, check=True, timeout=60)
    lines[1] = "from fsdp import FullyShardedDataParallel as FSDP"
    lines[3] = "model = FSDP(net, broadcast_buffers=True, use_orig_params=True, sync_module_states=True)  # é"
    assert path.read_bytes() == end.join(lines).encode(encoding)


def test_the_command_takes_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file once, without hidden folders and virtual environments. An unreadable file in a folder is named."""
    texts = {
        "train.py": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(net)\n",
        "utils/policies.py": "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n",
        "utils/second.py": "from torch.distributed.fsdp import fully_shard, FSDPModule\nfrom torch import nn\n",
        "utils/old.py": "print 'torch.distributed.fsdp'\n",
        "utils/done.py": "import fsdp\n'torch.distributed.fsdp.FullyShardedDataParallel'\n",
        ".venv/a.py": "from torch.distributed.fsdp import CPUOffload\n",
        "env/lib/site-packages/b.py": "from torch.distributed.fsdp import CPUOffload\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    train, utils = tmp_path / "train.py", tmp_path / "utils"
    for given in ([train, utils], [tmp_path], [tmp_path, train, utils / "done.py"], [utils / ".." / "train.py", utils]):
        assert main(["migrate", *map(str, given)]) == 1
        printed = capsys.readouterr().out
        assert [Path(name).name for name in re.findall(r"(\S+): \[", printed)] == [
            *("train.py:1", "policies.py:1", "second.py:1", "second.py:1", "old.py")
        ]
        assert printed.splitlines()[-1] == "2 changes proposed by --diff, 3 left to do by hand"
    assert main(["migrate", str(train), str(utils), "--diff"]) == 1
    assert re.findall(r"--- (.*)", capsys.readouterr().out) == [str(train), f"{utils}/policies.py"]
    (tmp_path / "empty").mkdir()
    for given, error in ((tmp_path / "empty", "has no Python files"), (utils / "old.py", "(old.py, line 1)")):
        with pytest.raises(SystemExit) as ended:
            main(["migrate", str(train), str(given)])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "") and error in err
