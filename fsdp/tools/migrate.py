"""``fsdp migrate script.py``: the changes that a training script for DistributedDataParallel or torch's FSDP needs.

The script is parsed, not run. Patterns of calls are looked up in the tables below; each has a piece of advice. Changes
that follow from the text alone (the import, the wrapper, ``clip_grad_norm_``) are proposed as a diff. Everything else
is left to the user, and marked in the diff by a comment ``# TODO fsdp: ...``.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from fsdp.names.ddp import ARGUMENTS

# -- the patterns ------------------------------------------------------------------------------------------------------

_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_FSDP1 = "torch.distributed.fsdp"
_HERE = {  # modules of torch, and their names that this package has
    _FSDP1: {*api.__all__, "FullyShardedDataParallel", "FlatParameter"},
    f"{_FSDP1}.api": set(vars(api)),
    f"{_FSDP1}.fully_sharded_data_parallel": set(vars(fully_sharded_data_parallel)),
    f"{_FSDP1}.sharded_grad_scaler": set(vars(sharded_grad_scaler)),
    f"{_FSDP1}.wrap": set(vars(wrap)),
}
_WRAPPERS = {f"{module}.FullyShardedDataParallel" for module in (*_HERE, "fsdp", "fsdp.fully_sharded_data_parallel")}
_FSDP2 = {
    "fully_shard": "`model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({...}))`, with the result assigned",
    "FSDPModule": "`FullyShardedDataParallel`, which has its methods",
    "MixedPrecisionPolicy": "`MixedPrecision(...)`, with the same param_dtype and reduce_dtype",
    "CPUOffloadPolicy": "`CPUOffload(offload_params=True)`",
    "OffloadPolicy": "`CPUOffload()`",
    "register_fsdp_forward_method": "`fsdp.register_forward_method`",
    "UnshardHandle": "`fsdp.UnshardHandle`",
    "share_comm_ctx": "nothing: trees on one device share streams",
}
_PRIVATE = (
    "private to torch's FSDP1, and not in this package. Do without it; or leave torch's imports and run the script by "
    "`fsdp run script.py`, which serves the functions that tools call most"
)
_SCALER = (
    "use fsdp.sharded_grad_scaler.ShardedGradScaler: it skips a step on all ranks together; the plain scaler checks "
    "this rank's shards alone, and ranks drift apart"
)
_JOIN = "iterate over `fsdp.join(model, loader)`; a context cannot step the optimizer for the shards of another rank"
_CALLS = {  # functions by full name
    "torch.cuda.amp.GradScaler": _SCALER,
    "torch.cuda.amp.grad_scaler.GradScaler": _SCALER,
    "torch.amp.GradScaler": _SCALER,
    "torch.amp.grad_scaler.GradScaler": _SCALER,
    "torch.distributed.algorithms.join.Join": _JOIN,
    "torch.distributed.algorithms.Join": _JOIN,
    "torch.nn.utils.get_total_norm": "call `model.clip_grad_norm_(max_norm)`: this norm covers one rank's shards",
    "torch.nn.utils.clip_grads_with_norm_": "call `model.clip_grad_norm_(max_norm)`, which computes the norm and clips",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "use its optimizer_class directly: the state is sharded already",
}
_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_WHOLE_MATRIX = {"muon", "soap", "shampoo", "adafactor", "lamb", "lars", "lbfgs"}  # classes of optimizers
_WHOLE_MATRIX_ADVICE = (
    "{name} computes with whole parameters, and would step each rank's 1-D shards: wrap it in "
    "fsdp.optim.WholeParamOptimizer"
)
_MODEL_METHODS = {  # of the wrapped model
    "join": _JOIN,
    "register_comm_hook": "FSDP hooks get the unit's flat gradient; torch's DDP hooks for buckets do not fit",
}
_SAFE_METHODS = {
    *("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers", "children"),
    *("state_dict", "load_state_dict", "train", "eval", "requires_grad_", "zero_grad", "to"),
}
_SHAPES = {
    "dim": "ask fsdp.global_shape(p)",
    "ndim": "ask fsdp.global_shape(p)",
    "ndimension": "ask fsdp.global_shape(p)",
    "shape": "ask fsdp.global_shape(p)",
    "numel": "call fsdp.num_params(model)",
}
_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_OF_ONE_RANK = re.compile(r"rank|is_main|is_master|master_process|main_process")
_KEPT_ARGUMENTS = ("module", "process_group", "broadcast_buffers")
_CLIP_ARGUMENTS = {"max_norm", "norm_type", "error_if_nonfinite"}


# -- a script ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """A replacement of the text between two places, each (line from 1, byte from 0)."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Finding:
    """One place that has to change.

    Attributes:
        line: line number, from 1.
        advice: the change and the reason.
        edits: the proposed change; empty if it is left to the user.
    """

    line: int
    advice: str
    edits: tuple[Edit, ...] = ()


class Script:
    """A parsed training script with its findings.

    Raises:
        SyntaxError: the text is no Python.
    """

    def __init__(self, text: str, name: str = "script.py") -> None:
        self.text, self.name = text, name
        self._lines = text.encode().splitlines(keepends=True)
        self._tree = ast.parse(text, name)
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._nodes = [n for n in ast.walk(self._tree) if isinstance(n, (ast.stmt, ast.expr, ast.comprehension))]
        self._aliases = self._read_imports()
        self._wrapped = self._assigned_from(lambda made: made in _DDP or made in _WRAPPERS)
        self._inner = {  # names of the module inside: raw_model = model.module
            ast.unparse(target)
            for node in self._nodes
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)
            if any(self._is_inner(each) for each in ast.walk(node.value))
            for target in node.targets
        }
        self._optimizers = self._assigned_from(lambda made: made.startswith("torch.optim.") and made.count(".") == 2)
        self._optimizers |= {
            name: node
            for name, node in self._assigned_from(lambda made: True).items()
            if re.fullmatch(r"(self\.)?opt(im(izer)?)?", name)
        }
        used = {self._full(node) for node in self._nodes}
        imported = set(self._aliases.values())
        self._from_ddp = not used.isdisjoint(_DDP) and not (used | imported) & _WRAPPERS
        self.findings = sorted(self._find(), key=lambda finding: finding.line)

    @property
    def proposed(self) -> list[Finding]:
        """The findings with a proposed change."""
        return [finding for finding in self.findings if finding.edits]

    @property
    def left(self) -> list[Finding]:
        """The findings that are left to the user."""
        return [finding for finding in self.findings if not finding.edits]

    # -- facts ---------------------------------------------------------------------------------------------------------

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
        """Return ``torch.nn.Linear`` for ``nn.Linear``; "" for names that are not imported."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self._full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def _assigned_from(self, matches: Callable[[str], bool]) -> dict[str, ast.Assign]:
        """Map the targets of assignments from calls of matching functions to these assignments."""
        return {
            ast.unparse(target): node
            for node in self._nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and matches(self._full(node.value.func))
            for target in node.targets
        }

    def _is_inner(self, node: ast.AST) -> bool:
        """Return True for ``model.module`` of a wrapped ``model``, and for its aliases."""
        if isinstance(node, ast.Attribute) and node.attr == "module" and ast.unparse(node.value) in self._wrapped:
            return True
        return isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in getattr(self, "_inner", ())

    def _is_model(self, node: ast.AST) -> bool:
        return self._is_inner(node) or ast.unparse(node) in self._wrapped

    def _wrapper_of(self, node: ast.AST) -> str:
        """Return the source text of the wrapped model that ``node`` is, or is the inside of."""
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in self._wrapped:
            return ast.unparse(node.value)
        text = ast.unparse(node)
        return text if text in self._wrapped else min(self._wrapped)

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def _around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) pairs from ``node`` outward."""
        while (outer := self._parents.get(node)) is not None:
            yield node, outer
            node = outer

    def _guard(self, node: ast.AST) -> str:
        """Return the innermost condition around ``node`` that one rank alone meets; "" without one."""
        for inner, outer in self._around(node):
            if isinstance(outer, ast.If) and inner in outer.body and _OF_ONE_RANK.search(ast.unparse(outer.test)):
                return ast.unparse(outer.test)
        return ""

    def _function_of(self, node: ast.AST) -> ast.AST | None:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((outer for _, outer in self._around(node) if isinstance(outer, functions)), None)

    def _is_after_wrapping(self, node: ast.AST) -> bool:
        """Return True if the model may be wrapped when ``node`` runs.

        A function that the script calls before the wrapping line, and nowhere else, runs on the plain model.
        """
        if not self._wrapped:
            return False
        first = min(wrapping.lineno for wrapping in self._wrapped.values())
        function = self._function_of(node)
        if function in {self._function_of(wrapping) for wrapping in self._wrapped.values()}:
            return int(getattr(node, "lineno", 0)) > first
        name = getattr(function, "name", "")
        calls = [n for n in self._nodes if isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] == name]
        return not calls or any(self._is_after_wrapping(call) for call in calls if self._function_of(call) != function)

    @property
    def _layer_class(self) -> str:
        """Return the class of this file, with parameters inside, that a loop constructs; "" unless there is one."""
        modules = {n.name for n in self._nodes if isinstance(n, ast.ClassDef) and n.bases}
        loops = (ast.For, ast.ListComp, ast.GeneratorExp)
        repeated = {
            n.func.id
            for n in self._nodes
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in modules
            if any(isinstance(outer, loops) for _, outer in self._around(n))
        }
        return repeated.pop() if len(repeated) == 1 else ""

    # -- findings ------------------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Finding]:
        for node in self._nodes:
            if isinstance(node, ast.Import):
                yield from self._import(node)
            elif isinstance(node, ast.ImportFrom):
                yield from self._import_from(node)
            elif isinstance(node, (ast.Name, ast.Attribute)):
                yield from self._named(node)
            elif isinstance(node, ast.Call):
                yield from self._call(node)
            elif isinstance(node, (ast.For, ast.comprehension)):
                yield from self._shapes(node)
        conditional = [
            w for w in self._wrapped.values() if any(isinstance(outer, ast.If) for _, outer in self._around(w))
        ]
        if conditional and len(conditional) == len(self._wrapped):
            yield Finding(
                conditional[0].lineno,
                "wrap the model unconditionally, also in one process: later lines call methods of the wrapper",
            )

    def _import(self, node: ast.Import) -> Iterator[Finding]:
        for alias in node.names:
            if alias.name != _FSDP1 and not alias.name.startswith(f"{_FSDP1}."):
                continue
            used = {self._full(n) for n in self._nodes if isinstance(n, ast.Attribute)}
            missing = sorted(n for n in used if n.rpartition(".")[0] == alias.name and not _is_here(n))
            if alias.name not in _HERE:
                missing = [alias.name]
            if missing:
                yield Finding(node.lineno, f"{', '.join(missing)}: {_PRIVATE}")
                continue
            ours = alias.name.replace(_FSDP1, "fsdp")
            text = f"import {ours}" + (f" as {alias.asname}" if alias.asname else "")
            if not alias.asname and self._aliases.get("torch") == "torch":
                text = f"import torch, {ours}" if len(node.names) == 1 else text
            edits = (self._replace(node, text),) if len(node.names) == 1 else ()
            yield Finding(node.lineno, f"import {ours} instead: the same names, arguments and values", edits)

    def _import_from(self, node: ast.ImportFrom) -> Iterator[Finding]:
        module, names = node.module or "", {alias.name for alias in node.names}
        if module == "torch.distributed" and "fsdp" in names:
            yield Finding(node.lineno, "import fsdp instead of torch.distributed.fsdp")
        elif module == _FSDP1 or module.startswith(f"{_FSDP1}."):
            here = {name for name in names if name == "*" or _is_here(f"{module}.{name}")}
            for name in sorted(names - here):
                replacement = f"of torch's FSDP2 is not in this package. Write {_FSDP2.get(name)}"
                yield Finding(
                    node.lineno, f"{name} {replacement}" if name in _FSDP2 else f"{module}.{name}: {_PRIVATE}"
                )
            if here:
                ours = module.replace(_FSDP1, "fsdp")
                lines = [_import_line(ours, node, here)]
                lines += [_import_line(module, node, names - here)] if here < names else []
                edit = self._replace_by_lines(node, lines)
                yield Finding(node.lineno, f"import from {ours}: the same names, arguments and values", (edit,))
        elif module == _STATE_DICT:
            edit = self._replace_by_lines(node, [_import_line("fsdp.checkpoint", node, names)])
            yield Finding(
                node.lineno,
                "import from fsdp.checkpoint: torch's functions take a wrapped model for a plain one",
                (edit,) if all(re.match(r"[gs]et_\w*state_dict$|StateDictOptions$", name) for name in names) else (),
            )
        elif self._from_ddp and any(f"{module}.{name}" in _DDP for name in names):
            rest = {name for name in names if f"{module}.{name}" not in _DDP}
            lines = [_import_line(module, node, rest)] if rest else []
            lines.append("from fsdp import FullyShardedDataParallel as FSDP")
            lines += ["from fsdp.wrap import ModuleWrapPolicy"] if self._layer_class else []
            advice = "import FullyShardedDataParallel in place of DistributedDataParallel"
            yield Finding(node.lineno, advice, (self._replace_by_lines(node, lines),))

    def _named(self, node: ast.Name | ast.Attribute) -> Iterator[Finding]:
        parent = self._parents[node]
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if self._full(node) in _DDP and self._from_ddp and not is_called:
            yield Finding(node.lineno, "FullyShardedDataParallel instead", (self._replace(node, "FSDP"),))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == self._full(node) == _FSDP1:
            if _is_here(self._full(parent)):
                yield Finding(node.lineno, "fsdp instead of torch.distributed.fsdp", (self._replace(node, "fsdp"),))
            else:
                yield Finding(node.lineno, f"{ast.unparse(parent)}: {_PRIVATE}")

    def _call(self, call: ast.Call) -> Iterator[Finding]:
        made, line = self._full(call.func), call.lineno
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = ast.unparse(call.func).rpartition(".")[2]
        inside = self._parents.get(call)
        is_wrapped = isinstance(inside, ast.Call) and ast.unparse(inside.func).endswith("WholeParamOptimizer")
        if made in _DDP:
            yield from self._wrap(call)
        elif not self._wrapped:
            return
        elif made in _CLIP:
            yield self._clip(call)
        elif made in _CALLS:
            yield Finding(line, _CALLS[made])
        elif name.lower() in _WHOLE_MATRIX and not is_wrapped:
            yield Finding(line, _WHOLE_MATRIX_ADVICE.format(name=name))
        elif (
            owner is not None and ast.unparse(owner) in self._optimizers and method in ("state_dict", "load_state_dict")
        ):
            yield from self._optimizer_state(call, ast.unparse(owner), method)
        elif guard := self._needs_all_ranks(call, owner, method):
            yield Finding(
                line,
                f"this runs under `if {guard}`, and needs all ranks: call {ast.unparse(call.func)}() on every rank, "
                "and print or save the result on one",
            )
        elif owner is not None and self._is_model(owner) and method in _MODEL_METHODS:
            yield Finding(line, _MODEL_METHODS[method])
        elif self._is_inner(call.func):
            yield Finding(line, f"call {self._wrapper_of(call.func)}, not the module inside: the wrapper gathers")
        elif owner is not None and self._is_inner(owner) and method not in _SAFE_METHODS:
            yield Finding(
                line,
                f"{method}() of the module inside finds sharded parameters: call fsdp.register_forward_method("
                f"{self._wrapper_of(owner)}, {method!r}) once, then {self._wrapper_of(owner)}.{method}()",
            )
        elif any(self._is_inner(argument) for argument in call.args):
            given = next(argument for argument in call.args if self._is_inner(argument))
            whole = self._wrapper_of(given)
            yield Finding(line, f"pass {whole}, not the module inside: a part of a unit cannot be copied or run alone")

    def _needs_all_ranks(self, call: ast.Call, owner: ast.expr | None, method: str) -> str:
        """Return the condition around a call that communicates, if one rank alone meets it; else ""."""
        guard = self._guard(call)
        if not guard:
            return ""
        runners = {
            node.name
            for node in self._nodes
            if isinstance(node, ast.FunctionDef)
            if any(isinstance(each, ast.Call) and self._is_model(each.func) for each in ast.walk(node))
        }
        own_function = isinstance(call.func, ast.Name) and not self._full(call.func)
        given = own_function and any(self._is_model(argument) for argument in call.args)
        runs = self._is_model(call.func) or (own_function and ast.unparse(call.func) in runners) or given
        asks = (
            owner is not None
            and self._is_model(owner)
            and method not in _SAFE_METHODS - {"state_dict", "load_state_dict"}
        )
        return guard if runs or asks else ""

    def _wrap(self, call: ast.Call) -> Iterator[Finding]:
        """Replace ``DDP(...)`` by ``FSDP(...)``."""
        if not self._from_ddp:
            return  # the script chooses between the two wrappers
        arguments = [self._source(argument) for argument in call.args[:1]]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if len(call.args) > 1:
            keywords["device_ids"] = call.args[1]
        notes, unknown = [], []
        for name, value in keywords.items():
            if name in _KEPT_ARGUMENTS:
                arguments.append(f"{name}={self._source(value)}")
            elif name == "device_ids":
                device = self._only_device(value)
                if device is None:
                    unknown.append("device_ids")
                arguments += [f"device_id={device}"] if device not in (None, "None") else []
            elif name == "find_unused_parameters":
                arguments += [] if ast.unparse(value) == "False" else [f"reduce_unused={self._source(value)}"]
            elif name in ARGUMENTS:
                notes.append(f"without {name}: {ARGUMENTS[name]}")
            else:
                unknown.append("**" if name is None else name)
        arguments += [] if "broadcast_buffers" in keywords else ["broadcast_buffers=True"]
        arguments += ["use_orig_params=True", "sync_module_states=True"]
        layer = self._layer_class
        arguments += [f"auto_wrap_policy=ModuleWrapPolicy({{{layer}}})"] if layer else []
        advice = "; ".join(
            ["wrap by FullyShardedDataParallel, with rank 0's values and buffers as DDP has them", *notes]
        )
        if unknown:
            yield Finding(call.lineno, f"{advice}. Not known here: {', '.join(unknown)}")
        else:
            yield Finding(call.lineno, advice, (self._replace(call, f"FSDP({', '.join(arguments)})"),))
        if not layer:
            yield Finding(
                call.lineno,
                "pass auto_wrap_policy=ModuleWrapPolicy({...}) of fsdp.wrap with the class of the model's layers: else "
                "the whole model is gathered at once",
            )

    def _only_device(self, value: ast.AST) -> str | None:
        """Return the source of the only element of a list; "None" for None, and None for the remaining expressions."""
        if isinstance(value, ast.List) and len(value.elts) == 1:
            return self._source(value.elts[0])
        if isinstance(value, ast.IfExp):
            both = self._only_device(value.body), self._only_device(value.orelse)
            return None if None in both else f"{both[0]} if {self._source(value.test)} else {both[1]}"
        return "None" if isinstance(value, ast.Constant) and value.value is None else None

    def _clip(self, call: ast.Call) -> Finding:
        of, *rest = call.args or [ast.Constant(None)]
        of_model = isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "parameters"
        model, edits = min(self._wrapped), tuple[Edit, ...]()
        if of_model and self._is_model(of.func.value):  # type: ignore[attr-defined]
            model = self._wrapper_of(of.func.value)  # type: ignore[attr-defined]
            arguments = [self._source(each) for each in rest]
            arguments += [f"{keyword.arg}={self._source(keyword.value)}" for keyword in call.keywords]
            if {keyword.arg for keyword in call.keywords} <= _CLIP_ARGUMENTS:
                edits = (self._replace(call, f"{model}.clip_grad_norm_({', '.join(arguments)})"),)
        advice = f"call `{model}.clip_grad_norm_(max_norm)`: torch's function sees this rank's shards alone"
        return Finding(call.lineno, advice, edits)

    def _optimizer_state(self, call: ast.Call, optimizer: str, method: str) -> Iterator[Finding]:
        model = min(self._wrapped)
        if method == "state_dict":
            text = f"`FSDP.optim_state_dict({model}, {optimizer})`"
            yield Finding(
                call.lineno, f"call {text} on all ranks: {optimizer}.state_dict() has this rank's shards alone"
            )
        elif call.args and "optim_state_dict_to_load" not in ast.unparse(call.args[0]):
            saved = self._source(call.args[0])
            early = "" if self._is_after_wrapping(call) else ", after the model is wrapped"
            yield Finding(
                call.lineno,
                f"load `FSDP.optim_state_dict_to_load({model}, {optimizer}, {saved})`{early}: each rank loads a part. "
                "Pass DDP's state through FSDP.rekey_optim_state_dict first",
            )

    def _shapes(self, loop: ast.For | ast.comprehension) -> Iterator[Finding]:
        """Find decisions by the shapes of parameters, which are 1-D shards once the model is wrapped."""
        if not re.search(r"\bparameters\(|named_parameters\(|param_dict", ast.unparse(loop.iter)):
            return
        scope = loop if isinstance(loop, ast.For) else self._parents[loop]
        asked = [n for n in ast.walk(scope) if isinstance(n, ast.Attribute) and n.attr in _SHAPES]
        if asked and self._is_after_wrapping(loop.iter):
            yield Finding(
                asked[0].lineno,
                f".{asked[0].attr} of a parameter is that of this rank's 1-D shard: {_SHAPES[asked[0].attr]}; for "
                "weight decay there is fsdp.param_groups(model, ...)",
            )

    # -- the proposed text ---------------------------------------------------------------------------------------------

    def _replace(self, node: ast.stmt | ast.expr, text: str) -> Edit:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Edit((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text)

    def _replace_by_lines(self, node: ast.stmt, lines: list[str]) -> Edit:
        before = self._lines[node.lineno - 1][: node.col_offset].decode()
        return self._replace(node, (f"\n{before}" if not before.strip() else "; ").join(lines))

    def migrated(self, *, comments: bool = False) -> str:
        """Return the script with all proposed changes; with ``comments`` also a TODO before each line that is left."""
        edits = [edit for finding in self.findings for edit in finding.edits]
        if any("FSDP(" in edit.text for edit in edits) and not any("as FSDP" in edit.text for edit in edits):
            names = "from fsdp import FullyShardedDataParallel as FSDP\n"
            names += "from fsdp.wrap import ModuleWrapPolicy\n" if self._layer_class else ""
            top = [n for n in self._tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
            place = ((top[-1].end_lineno or 0) + 1 if top else 1, 0)
            edits.append(Edit(place, place, names))
        for finding in self.left if comments else ():
            starts = [n for n in self._nodes if isinstance(n, ast.stmt) and n.lineno <= finding.line]
            start = max(n.lineno for n in starts if (n.end_lineno or 0) >= finding.line)
            line = self._lines[start - 1].decode()
            indent = line[: len(line) - len(line.lstrip())]
            edits.append(Edit((start, 0), (start, 0), f"{indent}# TODO fsdp: {finding.advice}\n"))
        lines = [*self._lines, b""]
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end), reverse=True):
            (first, left), (last, right) = edit.start, edit.end
            joined = lines[first - 1][:left] + edit.text.encode() + lines[last - 1][right:]
            lines[first - 1 : last] = [joined, *[b""] * (last - first)]
        return b"".join(lines).decode()

    def diff(self) -> str:
        """Return a unified diff from the script to the proposed text, TODO comments included; "" without findings."""
        before, after = self.text.splitlines(keepends=True), self.migrated(comments=True).splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.name, f"{self.name} (migrated)"))


def _is_here(name: str) -> bool:
    """Return True if ``torch.distributed.fsdp.<...>`` has a counterpart in this package."""
    module, _, attribute = name.rpartition(".")
    return name in _HERE or attribute in _HERE.get(module, ())


def _import_line(module: str, node: ast.ImportFrom, names: set[str]) -> str:
    """Return the import of these names of ``node`` from ``module``."""
    return f"from {module} import {', '.join(ast.unparse(alias) for alias in node.names if alias.name in names)}"


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fsdp migrate``."""
    parser.add_argument("script", type=Path, help="a training script for DistributedDataParallel or torch's FSDP")
    parser.add_argument("--diff", action="store_true", help="print a patch; findings go to stderr")


def run(options: argparse.Namespace) -> int:
    """Print the findings. Return 0 if none is left to the user, 1 if some are, 2 if the script cannot be read."""
    try:
        script = Script(options.script.read_text(), str(options.script))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        print(f"fsdp migrate: {options.script}: {error}", file=sys.stderr)
        return 2
    out = sys.stderr if options.diff else sys.stdout
    if options.diff:
        print(script.diff(), end="")
    for finding in script.findings:
        kind = "--diff" if finding.edits else "by hand"
        print(f"{options.script}:{finding.line}: [{kind}] {finding.advice}", file=out)
    print(f"{len(script.proposed)} changes proposed by --diff, {len(script.left)} left to do by hand", file=out)
    return 1 if script.left else 0
