"""``python -m fsdp.migrate script.py``: what a training script has to change to train with this package, line by line.

The script is read, not run. It may come from ``DistributedDataParallel`` or from torch's own FSDP1. What follows from
the text alone is proposed as a diff (``--diff``); what depends on what the program means is said, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from fsdp.names.ddp import ARGUMENTS

_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_FSDP1 = "torch.distributed.fsdp"
_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_STATE_DICT_NAMES = {"StateDictOptions"} | {
    f"{verb}_{what}" for verb in ("get", "set") for what in ("state_dict", "model_state_dict", "optimizer_state_dict")
}
_MODULES = {  # of torch, and the names that they have here
    _FSDP1: {*api.__all__, "FullyShardedDataParallel", "FlatParameter"},
    f"{_FSDP1}.api": set(vars(api)),
    f"{_FSDP1}.fully_sharded_data_parallel": set(vars(fully_sharded_data_parallel)),
    f"{_FSDP1}.sharded_grad_scaler": set(vars(sharded_grad_scaler)),
    f"{_FSDP1}.wrap": set(vars(wrap)),
}
_FSDP1_WRAPPER = {f"{module}.FullyShardedDataParallel" for module in _MODULES}
_FSDP2 = {  # and what to write here
    "fully_shard": "`model = FSDP(model)` for `fully_shard(model)`, with the result assigned; for the layers inside it "
    "pass auto_wrap_policy=ModuleWrapPolicy({...})",
    "FSDPModule": "FullyShardedDataParallel, which has its methods",
    "MixedPrecisionPolicy": "MixedPrecision, with the same param_dtype and reduce_dtype",
    "CPUOffloadPolicy": "CPUOffload(offload_params=True)",
    "OffloadPolicy": "CPUOffload()",
    "register_fsdp_forward_method": "register_forward_method",
    "UnshardHandle": "fsdp.fully_sharded_data_parallel.UnshardHandle",
}
_PRIVATE = (
    "inside of torch's FSDP1, and not here. Do without; or leave torch's imports, and run the script by `python -m "
    "fsdp.compat`, which lets the functions that tools call most take models of this package"
)
_SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")
_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_OF_ONE_RANK = re.compile(r"rank|is_main|is_master|master_process|main_process")
_OURS = "FSDP"
_WRAPPER_IMPORT = "from fsdp import FullyShardedDataParallel as FSDP"
_IMPORTS = {  # by the names that need them
    r"ShardedGradScaler": "from fsdp.sharded_grad_scaler import ShardedGradScaler",
    rf"\b{_OURS}\b": _WRAPPER_IMPORT,
}
_KEPT_ARGUMENTS = ("module", "process_group", "broadcast_buffers")


@dataclass(frozen=True)
class Edit:
    """Replace what is between two places, (line from 1, byte from 0), by ``text``."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Finding:
    """Something to change, or to know.

    Attributes:
        line: where, from 1.
        says: what to change, and why.
        edits: how, where that is safe to propose.
    """

    line: int
    says: str
    edits: tuple[Edit, ...] = ()


class Script:
    """A training script, and what is found in it.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, text: str, name: str = "script.py") -> None:
        self.text, self.name = text, name
        self._lines = text.encode().splitlines(keepends=True)
        self._tree = ast.parse(text, name)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._nodes: list[ast.stmt | ast.expr | ast.comprehension] = [
            node for node in ast.walk(self._tree) if isinstance(node, (ast.stmt, ast.expr, ast.comprehension))
        ]
        self._aliases = self._read_imports()
        self._wrapped = self._assigned_from(*_DDP, *_FSDP1_WRAPPER)
        self._inside = {  # names of what is in a wrapper: raw_model = model.module
            ast.unparse(target)
            for node in self._nodes
            if isinstance(node, ast.Assign) and any(self._is_inside(each) for each in ast.walk(node.value))
            if not isinstance(node.value, ast.Call)
            for target in node.targets
        }
        used = {*self._aliases.values(), *map(self._full, self._nodes)}
        self._from_fsdp1 = not used.isdisjoint(_FSDP1_WRAPPER)
        self._from_ddp = not self._from_fsdp1 and any(self._full(node) in _DDP for node in self._nodes)
        self._optimizers = self._assigned_from("torch.optim.")
        self._runners = {  # functions that run the model
            node.name
            for node in self._nodes
            if isinstance(node, ast.FunctionDef)
            if any(isinstance(each, ast.Call) and self._is_model(each.func) for each in ast.walk(node))
        }
        self.findings = sorted(self._find(), key=lambda finding: finding.line)

    # -- what the script has -------------------------------------------------------------------------------------------

    def _read_imports(self) -> dict[str, str]:
        aliases = {}
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.split(".")[0]
                    aliases[alias.asname or package] = alias.name if alias.asname else package
            elif isinstance(node, ast.ImportFrom) and not node.level:
                aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        return aliases

    def _full(self, node: ast.AST) -> str:
        """``torch.nn.Linear`` for ``nn.Linear``; "" for what does not start at an import."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self._full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _assigned_from(self, *makers: str) -> dict[str, ast.Assign]:
        """What is assigned from calls of ``makers``, as it is written, and where."""
        found: dict[str, ast.Assign] = {}
        for node in self._nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = self._full(node.value.func)
                for target in map(ast.unparse, node.targets):
                    if made in makers or ("torch.optim." in makers and _is_optimizer(made, target)):
                        found[target] = node
        return found

    def _is_inside(self, node: ast.AST) -> bool:
        """Whether it is ``model.module`` of a wrapped ``model``."""
        return isinstance(node, ast.Attribute) and node.attr == "module" and ast.unparse(node.value) in self._wrapped

    def _is_model(self, node: ast.AST) -> bool:
        return self._is_inside(node) or ast.unparse(node) in self._wrapped.keys() | self._inside

    def _wrapper_of(self, node: ast.AST) -> str:
        """The wrapped model, as it is written, of which this is all or the inside."""
        if self._is_inside(node) and isinstance(node, ast.Attribute):
            return ast.unparse(node.value)
        words = ast.unparse(node)
        return words if words in self._wrapped else min(self._wrapped)

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    @property
    def _always_wrapped(self) -> bool:
        """Whether the model is wrapped under no condition."""
        return not any(isinstance(outer, ast.If) for node in self._wrapped.values() for _, outer in self._around(node))

    @property
    def _first_wrapped(self) -> int:
        """The line where something is wrapped first."""
        return min(node.lineno for node in self._wrapped.values())

    def _around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """What is around it, innermost first, each behind that of its own that it is around."""
        while (outer := self._parents.get(node)) is not None:
            yield node, outer
            node = outer

    def _replace(self, node: ast.AST, text: str) -> Edit:
        where: ast.expr = node  # type: ignore[assignment]
        assert where.end_lineno is not None and where.end_col_offset is not None
        return Edit((where.lineno, where.col_offset), (where.end_lineno, where.end_col_offset), text)

    def _replace_by_lines(self, node: ast.stmt, lines: list[str]) -> Edit:
        before = self._lines[node.lineno - 1][: node.col_offset].decode()
        return self._replace(node, (f"\n{before}" if not before.strip() else "; ").join(lines))

    def _insert_before(self, node: ast.stmt, lines: list[str]) -> Edit:
        indent = self._lines[node.lineno - 1][: node.col_offset].decode()
        return Edit((node.lineno, 0), (node.lineno, 0), "".join(f"{indent}{line}\n" for line in lines))

    def _guards(self, node: ast.AST) -> Iterator[ast.If]:
        """The conditions around it that only some ranks meet, innermost first."""
        for inner, outer in self._around(node):
            if isinstance(outer, ast.If) and inner in outer.body and _OF_ONE_RANK.search(ast.unparse(outer.test)):
                yield outer

    # -- what is to change ---------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Finding]:
        for node in self._nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self._import(node)
            elif isinstance(node, (ast.Name, ast.Attribute)):
                yield from self._named(node)
            elif not self._from_ddp:
                continue
            elif isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, ast.If):
                yield from self._saved_by_one_rank(node)
            elif isinstance(node, (ast.For, ast.comprehension)):
                yield from self._shapes(node)
        if self._from_ddp and not self._always_wrapped:
            yield Finding(
                self._first_wrapped,
                "wrap the model in any case, as one process can, too: what follows calls methods of the wrapper. Only "
                "then more than this can be proposed as a diff",
            )
        for name, made in self._optimizers.items():
            if self._from_ddp and self._wrapped and made.lineno < self._first_wrapped:
                yield Finding(
                    made.lineno,
                    f"{name} is made before the model is wrapped: that works with use_orig_params=True, where "
                    "parameters stay the same objects. Without it, make the optimizer after wrapping",
                )

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Finding]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == _FSDP1 or alias.name.startswith(f"{_FSDP1}."):
                    ours = alias.name.replace(_FSDP1, "fsdp")
                    if missing := self._missing(alias.name):
                        yield Finding(node.lineno, f"{', '.join(missing)}: {_PRIVATE}")
                        if alias.asname or alias.name not in _MODULES or "fsdp" in self._aliases:
                            continue
                    lines = [f"import {ours}{f' as {alias.asname}' if alias.asname else ''}"]
                    if missing:
                        lines = [self._source(node), *lines]
                    elif not alias.asname and not self._imports_torch():
                        lines = ["import torch", *lines]
                    edits = (self._replace_by_lines(node, lines),) if len(node.names) == 1 else ()
                    yield Finding(node.lineno, f"import {ours} instead: the same names, arguments and values", edits)
            return
        module, names = node.module or "", {alias.name for alias in node.names}
        if module == "torch.distributed" and "fsdp" in names:
            yield Finding(node.lineno, "import fsdp instead of torch.distributed.fsdp")
        elif module == _FSDP1 or module.startswith(f"{_FSDP1}."):
            ours = module.replace(_FSDP1, "fsdp")
            here = names & _MODULES[module] | (names & {"*"}) if module in _MODULES else set[str]()
            for name in sorted(names - here - _FSDP2.keys()):
                yield Finding(node.lineno, f"{module}.{name}: {_PRIVATE}")
            for name in sorted((names - here) & _FSDP2.keys()):
                yield Finding(node.lineno, f"{name} of torch's FSDP2 is not here. Write {_FSDP2[name]}")
            if here:
                edit = self._replace(node, self._source(node).replace(module, ours, 1))
                if here < names:
                    kinds = {ours: here, module: names - here}
                    lines = [_import_from(name, node, kept) for name, kept in kinds.items()]
                    edit = self._replace_by_lines(node, lines)
                yield Finding(node.lineno, f"import from {ours}: the same names, arguments and values", (edit,))
        elif module == _STATE_DICT:
            safe = names <= _STATE_DICT_NAMES
            edits = (self._replace(node, self._source(node).replace(module, "fsdp.checkpoint", 1)),) if safe else ()
            yield Finding(
                node.lineno,
                "import these from fsdp.checkpoint, or call fsdp.compat.enable_dcp() once: torch's own take a wrapped "
                "model for a plain one",
                edits,
            )
        elif any(f"{module}.{name}" in _DDP for name in names):
            if not self._from_ddp:
                why = (
                    "it is not used"
                    if not any(self._full(each) in _DDP for each in self._nodes)
                    else ("the script has FullyShardedDataParallel besides, and chooses between the two")
                )
                yield Finding(node.lineno, f"DistributedDataParallel stays: {why}")
                return
            rest = {name for name in names if f"{module}.{name}" not in _DDP}
            lines = [*([_import_from(module, node, rest)] if rest else []), _WRAPPER_IMPORT]
            yield Finding(
                node.lineno,
                "import FullyShardedDataParallel in place of DistributedDataParallel",
                (self._replace_by_lines(node, lines),),
            )

    def _missing(self, module: str) -> list[str]:
        """The names that the script uses of this module of torch's FSDP1, with dots, and that are not here; the module
        itself if there is none."""
        if module not in _MODULES:
            return [module]
        used = {self._full(node) for node in self._nodes if isinstance(node, ast.Attribute)}
        return sorted(name for name in used if name.rpartition(".")[0] == module and not _is_here(name))

    def _imports_torch(self) -> bool:
        every = (alias for node in self._nodes if isinstance(node, ast.Import) for alias in node.names)
        return any(alias.name == "torch" and not alias.asname for alias in every)

    def _call(self, call: ast.Call) -> Iterator[Finding]:
        made, method = self._full(call.func), call.func.attr if isinstance(call.func, ast.Attribute) else ""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if made in _DDP:
            yield from self._wrap(call)
        elif made in _CLIP:
            yield from self._clip(call)
        elif made in _SCALERS:
            safe = len(call.args) <= (2 if made == "torch.amp.GradScaler" else 0)
            yield Finding(
                call.lineno,
                "use ShardedGradScaler: it skips a step on all ranks alike, where the plain one looks at this rank's "
                "shards alone and lets the ranks drift apart",
                (self._replace(call.func, "ShardedGradScaler"),) if safe else (),
            )
        elif self._wrapped and method == "load_state_dict" and owner is not None:
            yield from self._load(call, owner)
        elif method == "state_dict" and ast.unparse(owner or call) in self._optimizers and not any(self._guards(call)):
            yield from self._saved(call)
        elif made == "copy.deepcopy" and call.args and self._is_inside(call.args[0]):
            whole = self._wrapper_of(call.args[0])
            yield Finding(
                call.lineno,
                f"copy {whole}, not what is inside of it: a part of a unit cannot be copied alone",
                (self._replace(call.args[0], whole),),
            )
        elif (
            self._is_model(call.func)
            or self._runs_model(call)
            or (owner is not None and self._is_inside(owner) and method not in _HARMLESS)
        ):
            yield from self._called(call, method)
        elif owner is not None and self._is_model(owner) and method == "join":
            yield Finding(call.lineno, "no context: iterate over `fsdp.join(model, loader)`, of the same arguments")
        elif made == "torch.distributed.algorithms.join.Join":
            yield Finding(call.lineno, "Join does not know this wrapper: iterate over `fsdp.join(model, loader)`")
        elif method == "register_comm_hook" and owner is not None and self._is_model(owner):
            yield Finding(call.lineno, "hooks get the unit's flat gradient; torch's DDP hooks for buckets do not fit")

    def _wrap(self, call: ast.Call) -> Iterator[Finding]:
        """``DDP(...)``."""
        arguments = [self._source(arg) for arg in call.args[:1]]
        notes, safe = [], len(call.args) < 3 and not any(isinstance(arg, ast.Starred) for arg in call.args)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if len(call.args) == 2:
            keywords["device_ids"] = call.args[1]
        for name, value in keywords.items():
            if name in _KEPT_ARGUMENTS:
                arguments.append(f"{name}={self._source(value)}")
            elif name == "device_ids":
                device = self._only_device(value)
                safe = safe and device is not None
                arguments += [f"device_id={device}"] if device and device != "None" else []
            elif name == "find_unused_parameters":
                if ast.unparse(value) != "False":
                    arguments.append(f"reduce_unused={self._source(value)}")
                    notes.append("find_unused_parameters is reduce_unused here")
            elif name in ARGUMENTS:
                notes.append(f"without {name}: {ARGUMENTS[name]}")
            else:
                safe = False
                notes.append(f"{'**' if name is None else name}: not known here")
        arguments += [] if "broadcast_buffers" in keywords else ["broadcast_buffers=True"]
        arguments += ["use_orig_params=True", "sync_module_states=True"]
        says = (
            "wrap by FullyShardedDataParallel, with parameters as the optimizer knows them, the values of rank 0, and "
            "its buffers at each forward, as far as there are some"
        )
        yield Finding(
            call.lineno,
            "; ".join([says, *notes]),
            (self._replace(call, f"{_OURS}({', '.join(arguments)})") if safe else self._replace(call.func, _OURS),),
        )
        yield Finding(
            call.lineno,
            "without auto_wrap_policy= the whole model is gathered at once: pass ModuleWrapPolicy({...}), of "
            "fsdp.wrap, with the class of the model's layers",
        )

    def _only_device(self, value: ast.AST) -> str | None:
        """The one element of a list; None where that is not what it is."""
        if isinstance(value, ast.List) and len(value.elts) == 1:
            return self._source(value.elts[0])
        if isinstance(value, ast.IfExp):
            both = self._only_device(value.body), self._only_device(value.orelse)
            if both[0] is not None and both[1] is not None:
                return f"{both[0]} if {self._source(value.test)} else {both[1]}"
        return "None" if isinstance(value, ast.Constant) and value.value is None else None

    def _clip(self, call: ast.Call) -> Iterator[Finding]:
        if not self._wrapped:
            return
        says = "torch's own clip_grad_norm_ sees this rank's shards alone; the wrapped model's is over all ranks"
        of, *rest = call.args or [ast.Constant(None)]
        edits: tuple[Edit, ...] = ()
        if isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "parameters":
            known = {"max_norm", "norm_type", "error_if_nonfinite"}
            if self._is_model(of.func.value) and {keyword.arg for keyword in call.keywords} <= known:
                arguments = [self._source(each) for each in rest]
                arguments += [f"{keyword.arg}={self._source(keyword.value)}" for keyword in call.keywords]
                text = f"{self._wrapper_of(of.func.value)}.clip_grad_norm_({', '.join(arguments)})"
                edits = (self._replace(call, text),) if self._always_wrapped else ()
        yield Finding(call.lineno, says, edits)

    def _saved(self, call: ast.Call) -> Iterator[Finding]:
        """``optimizer.state_dict()``, on all ranks as far as can be read."""
        if self._wrapped:
            model, optimizer = min(self._wrapped), ast.unparse(call.func).rpartition(".")[0]
            text = f"FSDP.optim_state_dict({model}, {optimizer})"
            yield Finding(
                call.lineno,
                f"{optimizer}.state_dict() has this rank's shards alone: {text}, called by all ranks, has all",
                (self._replace(call, text),) if self._always_wrapped else (),
            )

    def _load(self, call: ast.Call, owner: ast.expr) -> Iterator[Finding]:
        late = self._is_late(call)
        if ast.unparse(owner) in self._optimizers and len(call.args) == 1:
            model = min(self._wrapped)
            text = f"FSDP.optim_state_dict_to_load({model}, {self._source(owner)}, {self._source(call.args[0])})"
            yield Finding(
                call.lineno,
                "the optimizer holds this rank's shards: FSDP.optim_state_dict_to_load takes each rank's part of a "
                "state dict of FSDP.optim_state_dict. One of DistributedDataParallel, by numbers, goes through "
                f"FSDP.rekey_optim_state_dict first{'' if late else '. Do so after the model is wrapped'}",
                (self._replace(call.args[0], text),) if self._always_wrapped and late else (),
            )
        elif self._is_model(owner) and late:
            yield Finding(
                call.lineno,
                "every rank calls it, with the whole state dict; one that DistributedDataParallel itself made, not its "
                '.module, has names with "module." in front: take that away',
            )

    def _runs_model(self, call: ast.Call) -> bool:
        """Whether some rank alone calls a function of the script that runs the model, or is given it."""
        if not isinstance(call.func, ast.Name) or self._full(call.func) or not any(self._guards(call)):
            return False
        return call.func.id in self._runners or any(self._is_model(each) for each in call.args)

    def _called(self, call: ast.Call, method: str) -> Iterator[Finding]:
        for guard in self._guards(call):
            yield Finding(
                call.lineno,
                f"the model runs under `if {ast.unparse(guard.test)}`: gathering its parameters takes all ranks. Run "
                "it on every rank, and print or save on one",
            )
            return
        if self._is_inside(call.func):
            whole = self._wrapper_of(call.func)
            says = f"call {whole}, not what is inside of it: the wrapper gathers the parameters"
            yield Finding(call.lineno, says, (self._replace(call.func, whole),))
        elif self._is_inside(getattr(call.func, "value", call)):
            yield Finding(
                call.lineno,
                f"{method}() past the wrapper meets sharded parameters: fsdp.register_forward_method(model, "
                f"{method!r}), and call it on the wrapped model",
            )

    def _named(self, node: ast.Name | ast.Attribute) -> Iterator[Finding]:
        of_call = isinstance(parent := self._parents[node], ast.Call) and parent.func is node
        if self._full(node) in _DDP:
            if not of_call and self._from_ddp:
                yield Finding(node.lineno, "FullyShardedDataParallel instead", (self._replace(node, _OURS),))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == self._full(node) == _FSDP1:
            if _is_here(self._full(parent)):
                yield Finding(node.lineno, "fsdp instead of torch.distributed.fsdp", (self._replace(node, "fsdp"),))
            else:
                yield Finding(node.lineno, f"{ast.unparse(parent)}: {_PRIVATE}")

    def _saved_by_one_rank(self, guard: ast.If) -> Iterator[Finding]:
        """State dicts that one rank alone asks for."""
        if not _OF_ONE_RANK.search(ast.unparse(guard.test)):
            return
        lines, edits = [], []
        for node in (node for statement in guard.body for node in ast.walk(statement)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if node.func.attr != "state_dict" or next(self._guards(node)) is not guard:
                continue
            if self._is_model(owner):
                name, value = "model_state", f"{self._wrapper_of(owner)}.state_dict()"
            elif ast.unparse(owner) in self._optimizers and self._wrapped:
                name, value = "optim_state", f"FSDP.optim_state_dict({min(self._wrapped)}, {ast.unparse(owner)})"
            else:
                continue
            lines.append(f"{name} = {value}  # on every rank")
            edits.append(self._replace(node, name))
        if not lines:
            return
        test = guard.test
        conditions = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        others = [value for value in conditions if not _OF_ONE_RANK.search(ast.unparse(value))]
        if others:
            lines = [f"if {' and '.join(ast.unparse(value) for value in others)}:", *(f"    {line}" for line in lines)]
        is_elif = self._lines[guard.lineno - 1][guard.col_offset :].startswith(b"elif")
        safe = self._always_wrapped and not is_elif
        yield Finding(
            guard.lineno,
            "a state dict takes all ranks: ask for it before the condition, and save it on one; or use "
            "fsdp.checkpoint.save on all, which gathers nothing",
            (self._insert_before(guard, list(dict.fromkeys(lines))), *edits) if safe else (),
        )

    def _shapes(self, loop: ast.For | ast.comprehension) -> Iterator[Finding]:
        """Decisions by the shapes of parameters, which are 1-D shards once the model is wrapped."""
        if not re.search(r"\bparameters\(|named_parameters\(|param_dict", ast.unparse(loop.iter)):
            return
        scope: ast.AST = loop if isinstance(loop, ast.For) else self._parents[loop]
        for node in (each for each in ast.walk(scope) if isinstance(each, ast.Attribute)):
            asked = node.attr
            if asked in ("dim", "ndim", "ndimension", "shape") and self._is_late(loop.iter):
                yield Finding(
                    node.lineno,
                    f".{asked} of a parameter is that of this rank's 1-D part once the model is wrapped: choose before "
                    "wrapping, or ask fsdp.global_shape(p); for weight decay there is fsdp.param_groups(model, ...)",
                )
                return
            if asked == "numel" and self._is_late(loop.iter):
                yield Finding(node.lineno, "counts this rank's part once the model is wrapped: fsdp.num_params(model)")
                return

    def _is_late(self, node: ast.expr) -> bool:
        """Whether the model may be wrapped by then: in a function of its own, or below the wrapping."""
        wrapping = set(map(self._function_of, self._wrapped.values()))
        return bool(wrapping) and (node.lineno > self._first_wrapped or self._function_of(node) not in wrapping)

    def _function_of(self, node: ast.AST) -> ast.AST | None:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((outer for _, outer in self._around(node) if isinstance(outer, functions)), None)

    # -- what is proposed ----------------------------------------------------------------------------------------------

    def migrated(self) -> str:
        """The script with all edits made."""
        edits = [edit for finding in self.findings for edit in finding.edits]
        proposed = " ".join(edit.text for edit in edits)
        added = [line for name, line in _IMPORTS.items() if re.search(name, proposed) and line not in proposed]
        top = [node for node in self._tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        if added and top:
            place = ((top[-1].end_lineno or 0) + 1, 0)
            edits.append(Edit(place, place, "".join(f"{line}\n" for line in added)))
        lines = list(self._lines) + [b""]
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
            (first, left), (last, right) = edit.start, edit.end
            joined = lines[first - 1][:left] + edit.text.encode() + lines[last - 1][right:]
            lines[first - 1 : last] = [joined, *[b""] * (last - first)]
        return b"".join(lines).decode()

    def diff(self) -> str:
        """From the script to what is proposed; "" where nothing is."""
        before, after = self.text.splitlines(keepends=True), self.migrated().splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.name, f"{self.name} (migrated)"))


_HARMLESS = {"parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers", "children"} | {
    *("state_dict", "load_state_dict", "train", "eval", "requires_grad_", "zero_grad", "to", "register_comm_hook")
}


def _is_here(name: str) -> bool:
    """Whether what is called ``name`` in torch's FSDP1, with dots, is here."""
    module, _, attribute = name.rpartition(".")
    return name in _MODULES or attribute in _MODULES.get(module, ())


def _import_from(module: str, node: ast.ImportFrom, names: set[str]) -> str:
    """The import of these of the names of ``node``, from ``module``."""
    return f"from {module} import {', '.join(ast.unparse(alias) for alias in node.names if alias.name in names)}"


def _is_optimizer(made: str, target: str) -> bool:
    """Whether what ``made`` makes is an optimizer; what is called one is, whoever makes it."""
    if made.startswith("torch.optim."):
        return made.rpartition(".")[0] == "torch.optim"
    return re.fullmatch(r"(self\.)?opt(im(izer)?)?", target) is not None


def main(arguments: list[str] | None = None) -> int:
    """The command. 0 if it could read the script, 2 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp.migrate",
        description="Reads a training script for DistributedDataParallel or torch's FSDP1, and says what to change.",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("--diff", action="store_true", help="propose what is safe as a diff; the rest goes to stderr")
    options = parser.parse_args(arguments)
    try:
        script = Script(options.script.read_text(), str(options.script))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        print(f"python -m fsdp.migrate: {options.script}: {error}", file=sys.stderr)
        return 2
    if options.diff:
        print(script.diff(), end="")
    for finding in script.findings:
        where = f"{options.script}:{finding.line}: "
        if not options.diff:
            print(f"{where}{finding.says}{' (--diff)' * bool(finding.edits)}")
        elif not finding.edits:
            print(f"{where}{finding.says}", file=sys.stderr)
    if not script.findings and not options.diff:
        print(f"{options.script}: nothing of DistributedDataParallel or torch.distributed.fsdp found")
    return 0
