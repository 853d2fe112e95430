"""``fsdp migrate FILES``: the changes that training scripts for DistributedDataParallel or torch's FSDP need.

The script is parsed, not run. Patterns of calls are looked up in the tables below; each has a piece of advice. Changes
that follow from the text alone (the import, the wrapper, ``clip_grad_norm_``) are proposed as a diff. Everything else
is left to the user.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsdp.checkpoint
from fsdp import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from fsdp.names.ddp import ARGUMENTS, JOIN_REMEDY
from fsdp.tools.migrate_flow import COPIES, INSIDE, LOCAL_METHODS, MODEL, OPTIMIZER, SHOWS, STATE, Edit, Flow, Source

# -- the patterns ------------------------------------------------------------------------------------------------------

_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_FSDP1 = "torch.distributed.fsdp"
_HERE: dict[str, Any] = {  # modules of torch, and those of this package with the names
    _FSDP1: fsdp,
    f"{_FSDP1}.api": api,
    f"{_FSDP1}.fully_sharded_data_parallel": fully_sharded_data_parallel,
    f"{_FSDP1}.sharded_grad_scaler": sharded_grad_scaler,
    f"{_FSDP1}.wrap": wrap,
    "torch.distributed.checkpoint.state_dict": fsdp.checkpoint,
}
_WRAPPERS = {f"{module}.FullyShardedDataParallel" for module in (*_HERE, "fsdp", "fsdp.fully_sharded_data_parallel")}
_IMPORT = "from fsdp import FullyShardedDataParallel as FSDP"
_LACKING = (
    "not in this package. For FSDP2 write `model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({...}))`, with the "
    "result assigned, which has the methods of an FSDPModule. Do without private names; or leave torch's imports, and "
    "run the script by `fsdp run script.py`, which serves the functions that tools call most"
)
_CALLS = {  # by the full names of functions
    r"torch\.(cuda\.)?amp\.(grad_scaler\.)?GradScaler": (
        "use fsdp.sharded_grad_scaler.ShardedGradScaler: it skips a step on all ranks together; the plain scaler "
        "checks this rank's shards alone, and ranks drift apart"
    ),
    r"torch\.distributed\.algorithms\.(join\.)?Join": JOIN_REMEDY,
}
_CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_METHODS = {  # by the kind of the owner: of methods, the advice
    (MODEL, "join"): JOIN_REMEDY,
    (OPTIMIZER, "state_dict"): (
        "call `FSDP.optim_state_dict(model, {owner})` on all ranks, or save by fsdp.checkpoint.save: "
        "{owner}.state_dict() has this rank's shards alone"
    ),
    (OPTIMIZER, "load_state_dict"): (
        "load `FSDP.optim_state_dict_to_load(model, {owner}, {given})`: each rank loads a part. Pass DDP's state "
        "through FSDP.rekey_optim_state_dict first"
    ),
}
_SHAPES = ("dim", "ndim", "ndimension", "shape", "numel")
_PARAMETERS = re.compile(r"\bparameters\(|named_parameters\(|param_dict")  # iterables over parameters
_SUMMED = (
    "gradients of a sum are divided by the number of ranks, as under DDP: for the mean over the tokens of all ranks "
    "multiply it by `fsdp.mean_factor(model, num_tokens)`, instead of dividing it by a number of tokens"
)


# -- a script ----------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One place that has to change.

    Attributes:
        line: line number, from 1.
        advice: the change and the reason.
        edit: the proposed change; None if it is left to the user.
        is_note: the script may be right as it is.
    """

    line: int
    advice: str
    edit: Edit | None = None
    is_note: bool = False

    @property
    def kind(self) -> str:
        return "--diff" if self.edit else "note" if self.is_note else "by hand"


class Script:
    """A parsed training script with its findings.

    Raises:
        SyntaxError: the text is no Python.
    """

    def __init__(self, text: str, name: str = "script.py", encoding: str = "utf-8") -> None:
        self.text, self.name, self.encoding = text, name, encoding
        self._source = Source(text, name)
        self._full, self._nodes = self._source.full, self._source.nodes
        self._flow = Flow(self._source, {*_DDP, *_WRAPPERS})
        used = {self._full(node) for node in self._nodes}
        self._from_ddp = not used.isdisjoint(_DDP) and not used.union(self._source.aliases.values()) & _WRAPPERS
        self.findings = sorted(dict.fromkeys(self._find()), key=lambda finding: finding.line)

    # -- findings ------------------------------------------------------------------------------------------------------

    def _find(self) -> Iterator[Finding]:
        wrappings = self._flow.wrappings
        for node in self._nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self._import(node)
            elif isinstance(node, (ast.Name, ast.Attribute)):
                yield from self._named(node)
            elif isinstance(node, ast.Call):
                made = self._full(node.func)
                if made in _DDP and self._from_ddp:  # else the script chooses between the two wrappers
                    yield from self._wrap(node)
                elif made in _CLIP and wrappings:
                    yield self._clip(node)
                elif wrappings:
                    yield from (Finding(node.lineno, advice) for advice in self._advice(node))
                    yield from self._summed(node)
            elif isinstance(node, (ast.For, ast.comprehension)) and wrappings:
                yield from self._shapes(node)
        conditions = [next((o for _, o in self._source.around(w) if isinstance(o, ast.If)), None) for w in wrappings]
        if conditions and conditions[0] and all(conditions):
            advice = "wrap the model unconditionally, also in one process: later lines call methods of the wrapper"
            yield Finding(conditions[0].lineno, advice)
        yield from self._run_by_some_ranks() if wrappings else ()

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Finding]:
        module, names = getattr(node, "module", None) or "", {alias.name for alias in node.names}
        ours: Any = _HERE.get(module)
        here = {name for name in names if ours and (name == "*" or hasattr(ours, name))}
        for name in sorted(names - here):
            full = f"{module}.{name}".removeprefix(".")
            if full in _HERE and not ours:
                advice = f"import {_HERE[full].__name__} in place of {full}: the same names, arguments and values"
                yield Finding(node.lineno, advice)
            elif ours or full.startswith(f"{_FSDP1}."):
                yield Finding(node.lineno, f"{full}: {_LACKING}")
        wrappers = {name for name in names if self._from_ddp and f"{module}.{name}" in _DDP}
        if isinstance(node, ast.ImportFrom) and here:
            advice = f"import from {ours.__name__}: the same names, arguments and values"
            yield Finding(node.lineno, advice, self._moved(node, ours.__name__, here))
        elif isinstance(node, ast.ImportFrom) and wrappers:
            advice = "import FullyShardedDataParallel in place of DistributedDataParallel"
            yield Finding(node.lineno, advice, self._moved(node, "", wrappers))

    def _named(self, node: ast.Name | ast.Attribute) -> Iterator[Finding]:
        is_called = getattr(self._source.parents[node], "func", None) is node
        if self._full(node) in _DDP and self._from_ddp and not is_called:
            yield Finding(node.lineno, "FullyShardedDataParallel instead", self._source.replace(node, "FSDP"))

    def _wrap(self, call: ast.Call) -> Iterator[Finding]:
        """Replace ``DDP(...)`` by ``FSDP(...)``."""
        given = {keyword.arg or "": keyword.value for keyword in call.keywords}
        kept = [keyword for keyword in call.keywords if keyword.arg not in ARGUMENTS]
        arguments = [self._source.text_of(argument) for argument in (*call.args[:1], *kept)]
        unused = given.get("find_unused_parameters")
        if unused is not None and ast.unparse(unused) != "False":
            arguments.append(f"reduce_unused={self._source.text_of(unused)}")
        arguments += [] if "broadcast_buffers" in given else ["broadcast_buffers=True"]
        arguments += ["use_orig_params=True", "sync_module_states=True"]
        advice = "wrap by FullyShardedDataParallel, with rank 0's values and buffers as DDP has them"
        advice += "".join(f"; without {name}: {ARGUMENTS[name]}" for name in given if name in ARGUMENTS)
        edit = self._source.replace(call, f"FSDP({', '.join(arguments)})")
        yield Finding(call.lineno, advice, None if "" in given else edit)  # a mapping may have DDP's arguments
        yield Finding(
            call.lineno,
            "pass auto_wrap_policy=ModuleWrapPolicy({...}) of fsdp.wrap with the class of the model's layers: else the "
            "whole model is gathered at once",
        )

    def _clip(self, call: ast.Call) -> Finding:
        of, edit = call.args[0] if call.args else None, None
        owner = of.func.value if isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) else None
        given = {keyword.arg for keyword in call.keywords}
        if owner and self._flow.kind(owner) == MODEL and given <= {"max_norm", "norm_type", "error_if_nonfinite"}:
            arguments = ", ".join(map(self._source.text_of, [*call.args[1:], *call.keywords]))
            edit = self._source.replace(call, f"{ast.unparse(owner)}.clip_grad_norm_({arguments})")
        advice = "call `model.clip_grad_norm_(max_norm)`: torch's function sees this rank's shards alone"
        return Finding(call.lineno, advice, edit)

    def _advice(self, call: ast.Call) -> Iterator[str]:
        """Yield the changes of a call that are left to the user."""
        function, name = call.func, ast.unparse(call.func).rpartition(".")[2]
        owner = function.value if isinstance(function, ast.Attribute) else ast.Constant(None)
        kind, given = self._flow.kind(owner), "".join(map(self._source.text_of, call.args[:1]))
        yield from (advice for names, advice in _CALLS.items() if re.fullmatch(names, self._full(function)))
        if (kind, name) in _METHODS and "optim_state_dict_to_load" not in given:
            yield _METHODS[kind, name].format(owner=ast.unparse(owner), given=given)
        early = "wrap the model before this runs: "
        if not self._flow.is_after_wrapping(call):
            if self._full(function) in COPIES and self._flow.kind(call):
                yield f"{early}else `{ast.unparse(call)}` has other names than the wrapped model, and whole tensors"
            elif (kind, name) == (OPTIMIZER, "load_state_dict"):
                yield f"{early}{ast.unparse(function)}() needs the wrapped model"
        elif (kind, name) in _METHODS:
            return
        elif self._flow.kind(function) == INSIDE:
            yield "call the wrapped model, not the module inside: the wrapper gathers"
        elif kind == INSIDE and name not in LOCAL_METHODS | STATE:
            yield (
                f"{name}() of the module inside finds sharded parameters: call fsdp.register_forward_method(model, "
                f"{name!r}) once, then {name}() of the wrapped model"
            )
        elif not SHOWS.fullmatch(name) and INSIDE in map(self._flow.kind, call.args):
            yield "pass the wrapped model, not the module inside: its parameters are shards, and have other names"

    def _summed(self, call: ast.Call) -> Iterator[Finding]:
        sums = any(keyword.arg == "reduction" and ast.unparse(keyword.value) == "'sum'" for keyword in call.keywords)
        if sums and "mean_factor" not in self.text:
            yield Finding(call.lineno, _SUMMED, is_note=True)

    def _shapes(self, loop: ast.For | ast.comprehension) -> Iterator[Finding]:
        """Find decisions by the shapes of parameters, which are 1-D shards once the model is wrapped."""
        scope = loop if isinstance(loop, ast.For) else self._source.parents[loop]
        asked = [n for n in ast.walk(scope) if isinstance(n, ast.Attribute) and n.attr in _SHAPES]
        if asked and _PARAMETERS.search(ast.unparse(loop.iter)) and self._flow.is_after_wrapping(loop.iter):
            yield Finding(
                asked[0].lineno,
                f".{asked[0].attr} of a parameter is that of this rank's 1-D shard: ask fsdp.global_shape(p), or "
                "call fsdp.num_params(model) for the number; for weight decay there is fsdp.param_groups(model, ...)",
            )

    def _run_by_some_ranks(self) -> Iterator[Finding]:
        """Find the branches of some ranks that lead to calls for all ranks."""
        needed: dict[Any, dict[str, None]] = {}
        for call in self._flow.calls:
            branch = self._flow.branch_of_some_ranks(call)
            inner = branch and next(filter(self._flow.needs_all_ranks, self._flow.reached(call)), None)
            if inner:
                function = getattr(self._source.function_of(inner), "name", "")
                way = "" if inner is call else f" (which leads to {ast.unparse(inner.func)}() in {function})"
                needed.setdefault(branch, {})[f"{ast.unparse(call.func)}(){way}"] = None
        for branch, calls in needed.items():
            yield Finding(
                branch.lineno,
                f"`if {ast.unparse(branch.test)}` lets some ranks alone call {', '.join(calls)}, and all ranks have "
                "to: let all come here, and keep the condition for what prints or writes",
            )

    # -- the proposed text ---------------------------------------------------------------------------------------------

    def _moved(self, node: ast.ImportFrom, ours: str, names: set[str]) -> Edit:
        """Import ``names`` from ``ours``, or the wrapper if that is "", and the other names as before."""
        parts = {ours: [alias for alias in node.names if alias.name in names]}
        parts[str(node.module)] = [alias for alias in node.names if alias.name not in names]
        lines = [f"from {module} import {', '.join(map(ast.unparse, each))}" for module, each in parts.items() if each]
        return self._source.replace(node, "; ".join(lines if ours else [_IMPORT, *lines[1:]]))

    def migrated(self) -> str:
        """Return the script with all proposed changes."""
        edits = [finding.edit for finding in self.findings if finding.edit]
        if any("FSDP(" in edit.text for edit in edits) and not any("as FSDP" in edit.text for edit in edits):
            top = [n for n in self._source.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
            place = self._source.line_start((top[-1].end_lineno or 0) + 1 if top else 1)
            edits.append(Edit(place, place, _IMPORT + ("\r\n" if "\r\n" in self.text else "\n")))
        return self._source.edited(edits)

    def diff(self) -> str:
        """Return a unified diff from the script to the proposed text; "" without changes."""
        before, after = (re.findall(".*\n|.+", text) for text in (self.text, self.migrated()))  # form feeds end no line
        lines = difflib.unified_diff(before, after, self.name, f"{self.name} (migrated)")
        return "".join(line if line[-1] == "\n" else f"{line}\n\\ No newline at end of file\n" for line in lines)


# -- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``fsdp migrate``."""
    what = "files of a program for DistributedDataParallel or torch's FSDP, and folders of such files"
    parser.add_argument("scripts", type=Path, nargs="+", help=what)
    parser.add_argument("--diff", action="store_true", help="print a patch; findings go to stderr")


def run(options: argparse.Namespace) -> int:
    """Print the findings. Return 0 if nothing is left to the user, else 1.

    Raises:
        OSError: a script cannot be read; nothing was printed.
        ValueError: a script is no Python, or a folder has no Python files.
    """
    scripts, unread = [], []
    files = {file.resolve(): file for path in options.scripts for file in _files_of(path)}
    for file in files.values():
        try:
            scripts.append(_read(file))
        except (SyntaxError, ValueError) as error:
            if file in options.scripts:
                raise ValueError(f"{file}: {error}") from error
            unread.append((str(file), "by hand", f"not read: {error}"))
    for script in scripts if options.diff else ():
        sys.stdout.buffer.write(script.diff().encode(script.encoding))
    out = sys.stderr if options.diff else sys.stdout
    found = [(f"{script.name}:{each.line}", each.kind, each.advice) for script in scripts for each in script.findings]
    for place, kind, advice in [*found, *unread]:
        print(f"{place}: [{kind}] {advice}", file=out)
    kinds = Counter(kind for _, kind, _ in [*found, *unread])
    print(f"{kinds['--diff']} changes proposed by --diff, {kinds['by hand']} left to do by hand", file=out)
    return 1 if kinds["by hand"] else 0


def _read(file: Path) -> Script:
    """Return the script with its own ends of lines, and with its byte order mark."""
    with file.open("rb") as stream:
        encoding = tokenize.detect_encoding(stream.readline)[0].removesuffix("-sig")
    return Script(file.read_bytes().decode(encoding), str(file), encoding)


def _files_of(path: Path) -> list[Path]:
    """Return ``path``; of a folder the Python files in it, without hidden folders and virtual environments."""
    if not path.is_dir():
        return [path]
    seen = [(file, file.relative_to(path).parts) for file in sorted(path.rglob("*.py"))]
    found = [file for file, parts in seen if not any(part[0] == "." or part == "site-packages" for part in parts)]
    if not found:
        raise ValueError(f"{path} has no Python files")
    return found
