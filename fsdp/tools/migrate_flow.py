"""A parsed script: names and positions; the functions that a call leads to, branches that some ranks run alone, and the
names that hold the model.

Values follow assignments, arguments and results of the whole file, regardless of order and scope: variables of one name
are one, and so are attributes of one name. A call leads to all functions and methods of that name.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MODEL, INSIDE, OPTIMIZER = "wrapped model", "module inside", "optimizer"  # copies count as the wrapped model
SHARDED = (INSIDE, MODEL)
STATE = {"state_dict", "load_state_dict"}
LOCAL_METHODS = {  # of modules: one rank alone may call them
    *("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers", "children"),
    *("train", "eval", "requires_grad_", "zero_grad", "no_sync", "to"),
}
_RETURN_SELF = {"to", "cuda", "cpu", "double", "float", "half", "bfloat16", "train", "eval", "requires_grad_"}
COPIES = ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")
_OPTIMIZER_CLASS = re.compile(r"torch\.optim\.\w+")
_OPTIMIZER_NAME = re.compile(r"(?i)(?!.*sched)(.*(\b|_)opt(_\w*)?|.*optim.*)")
_OPTIONS = re.compile(r"(.*\.)?(args?|cfg|conf|config|opts?|hparams|params|flags|FLAGS)")  # objects with numbers
SHOWS = re.compile(  # functions that do not run a model that is passed to them
    r"print|isinstance|hasattr|getattr|len|str|repr|id|type|\w*(info|debug|log|watch|append|count|num_)\w*"
)
_SOME_RANKS = re.compile(  # conditions that differ between ranks
    r"""(?ix)
    (?<!lora_)rank[\]'()]*(\s%\s\d+)? \s (==|!=|<|<=|>)\s(\d|[\w.]*rank) | rank\s(not\s)?in\s[\[({]  # rank == 0
    | \b0\s(==|!=)\s[\w.]*rank\b | \bnot\s[\w.]*rank\b
    | \b(?!n_|num_)(\w+_)?(gpu|device|replica|process|worker)(_?(id|index))?\s(==|!=)\s'?0
    | \bis_?(\w+_)?(main|master|chief|leader|root|primary|zero) | \b(master|chief)\b | rank_?zero
    | (main|master|chief|primary|leader)_?(process|rank|proc|worker|node)
    """
)
_LEAVE = (ast.Return, ast.Continue, ast.Break)


class Edit(NamedTuple):
    """A replacement of the text from byte ``start`` to byte ``end``."""

    start: int
    end: int
    text: str


class Source:
    """The text of a script, which may begin with a byte order mark, with its tree.

    Attributes:
        nodes: statements, expressions and comprehensions.
        parents: the parent of each node.
        aliases: full names of imported names.

    Raises:
        SyntaxError: the text is no Python.
    """

    def __init__(self, text: str, name: str) -> None:
        self._bytes = text.encode()
        mark = text[: text.startswith("\ufeff")]
        lengths = [len(line) for line in self._bytes.splitlines(keepends=True)]
        self._line_starts = [len(mark.encode()), *itertools.accumulate(lengths)]
        self.tree = ast.parse(text.removeprefix(mark), name)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.nodes = [n for n in ast.walk(self.tree) if isinstance(n, (ast.stmt, ast.expr, ast.comprehension))]
        self.aliases: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.split(".")[0]
                    self.aliases[alias.asname or package] = alias.name if alias.asname else package
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                self.aliases.update(names)

    def full(self, node: ast.AST) -> str:
        """Return ``torch.nn.Linear`` for ``nn.Linear``; "" for names that are not imported."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) pairs from ``node`` outward."""
        while (outer := self.parents.get(node)) is not None:
            yield node, outer
            node = outer

    def function_of(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost function around ``node``; None at module level."""
        return next((outer for _, outer in self.around(node) if isinstance(outer, FUNCTIONS)), None)

    def replace(self, node: Any, text: str) -> Edit:
        start = self.line_start(node.lineno) + node.col_offset
        return Edit(start, self.line_start(node.end_lineno) + node.end_col_offset, text)

    def text_of(self, node: ast.AST) -> str:
        start, end, _ = self.replace(node, "")  # ast.get_source_segment splits the whole text each time
        return self._bytes[start:end].decode()

    def line_start(self, line: int) -> int:
        """Return the first byte of a line, counted from 1."""
        return self._line_starts[line - 1]

    def edited(self, edits: list[Edit]) -> str:
        """Return the text after all edits, which do not overlap."""
        text = self._bytes
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new.encode() + text[end:]
        return text.decode()


class Flow:
    """The calls and values of a script.

    Attributes:
        calls: all calls.
        wrappings: the calls of a wrapper.
    """

    def __init__(self, source: Source, wrappers: Collection[str]) -> None:
        self._source, self._wrappers = source, wrappers
        self.calls = [n for n in source.nodes if isinstance(n, ast.Call)]
        self.wrappings = [call for call in self.calls if source.full(call.func) in wrappers]
        self._functions: dict[str, list[Any]] = defaultdict(list)  # and methods; constructors by the class
        for function in (n for n in source.nodes if isinstance(n, FUNCTIONS)):
            cls: Any = source.parents[function]
            name = getattr(cls, "name", "") if function.name == "__init__" else function.name
            self._functions[name].append(function)
        self._calls_in: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
        self._callers: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            self._calls_in[source.function_of(call)].append(call)
            for function in self.targets(call):
                if function is not source.function_of(call):
                    self._callers[function].append(call)
        self._kinds: dict[str, str] = {}  # of values, by name
        self._follow_values()
        self._wrapped_from: dict[ast.AST | None, tuple[int, int]] = {}  # by function: where the wrapping ends
        self._mark(self.wrappings)

    # -- values --------------------------------------------------------------------------------------------------------

    def _assignments(self) -> Iterator[tuple[ast.AST, ast.expr]]:
        """Yield targets with the expressions that are assigned to them; functions with their results."""
        for node in self._source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        yield from zip(target.elts, node.value.elts)
                    elif isinstance(node.value, ast.IfExp):
                        yield from ((target, node.value.body), (target, node.value.orelse))
                    else:
                        yield target, node.value
            elif isinstance(node, ast.Return) and node.value:
                yield self._source.function_of(node) or node, node.value

    def _follow_values(self) -> None:
        """Set the kinds of names, from the wrappings on."""
        assigned = list(self._assignments())
        wrapped = [(to, call) for to, value in assigned for call in self.wrappings if call is _unmoved(value)]
        self._kinds |= {self._name(to): MODEL for to, _ in wrapped}
        for inside in (call.args[0] for _, call in wrapped if call.args):
            self._kinds.setdefault(self._name(inside), INSIDE)
        self._kinds.pop("", None)
        fixed, before = set(self._kinds), dict[str, str]()
        while before != self._kinds:
            before = dict(self._kinds)
            held = [(self._name(to), self.kind(expression)) for to, expression in assigned]
            for name, expression in (each for call in self.calls for each in self._arguments(call)):
                kind = self.kind(expression)  # advice passes the wrapped model in the place of the module inside
                held.append((name, MODEL if kind == INSIDE else kind))
            for name, kind in held:
                is_new = name not in self._kinds or kind == INSIDE != self._kinds[name]
                if name and kind and is_new and name not in fixed:
                    self._kinds[name] = kind

    def _arguments(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield the parameters of the functions that ``call`` leads to, with the expressions that it passes."""
        for function in self.targets(call):
            names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            yield from zip(names[names[:1] == ["self"] :], call.args)
            yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)

    def _name(self, node: ast.AST) -> str:
        """Return the name that holds ``node``, or the function whose result it is; "" for other expressions."""
        node = _unmoved(node)
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Attribute):
            return "" if _OPTIONS.fullmatch(ast.unparse(node.value)) else f".{node.attr}"
        if isinstance(node, ast.Call):
            return next((f"{function.name}()" for function in self.targets(node)), "")
        return f"{node.name}()" if isinstance(node, FUNCTIONS) else node.id if isinstance(node, ast.Name) else ""

    def kind(self, node: ast.AST) -> str:
        """Return the kind of the value of an expression; "" if it is not known. Optimizers may be known by name."""
        node = _unmoved(node)
        if isinstance(node, ast.Attribute) and node.attr == "module" and self.kind(node.value) == MODEL:
            return INSIDE
        if isinstance(node, ast.Call):
            made = self._source.full(node.func)
            if made in self._wrappers:
                return MODEL
            if made in COPIES:
                return MODEL if node.args and self.kind(node.args[0]) in SHARDED else ""
            if _OPTIMIZER_CLASS.fullmatch(made):
                return OPTIMIZER
        found = self._kinds.get(self._name(node), "")
        if not found and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            return OPTIMIZER if _OPTIMIZER_NAME.fullmatch(ast.unparse(node).rpartition(".")[2]) else ""
        return found

    # -- calls ---------------------------------------------------------------------------------------------------------

    def targets(self, call: ast.Call) -> list[Any]:
        """Return the functions of the script that ``call`` may lead to."""
        owner, _, name = ast.unparse(call.func).rpartition(".")
        is_modules = name in LOCAL_METHODS | STATE and owner != "self"
        return [] if is_modules or self._source.full(call.func) else self._functions[name]

    def reached(self, call: ast.Call) -> list[ast.Call]:
        """Return ``call``, and all calls that it leads to, the nearest ones first."""
        found = [call]
        for each in found:  # which grows
            inside = (inner for function in self.targets(each) for inner in self._calls_in[function])
            found += [inner for inner in inside if inner not in found]
        return found

    def needs_all_ranks(self, call: ast.Call) -> bool:
        """Return True if ``call`` itself may run a forward or gather, and must be made on all ranks."""
        function, name = call.func, ast.unparse(call.func).rpartition(".")[2]
        if not self.is_after_wrapping(call):
            return False
        owner = self.kind(function.value) if isinstance(function, ast.Attribute) else ""
        if self.kind(function) in SHARDED or (owner in SHARDED and name not in LOCAL_METHODS):
            return True
        if name in STATE:
            return owner == OPTIMIZER or any(self.kind(part) in SHARDED for part in ast.walk(function))
        full = self._source.full(function)
        is_given = any(self.kind(value) in SHARDED for value in (*call.args, *(k.value for k in call.keywords)))
        is_torchs = full.startswith(("torch.", "copy.")) and full.rpartition(".")[0] not in self._wrappers
        return is_given and not (is_torchs or SHOWS.fullmatch(name) or self.targets(call))

    def branch_of_some_ranks(self, node: ast.AST) -> ast.If | ast.IfExp | None:
        """Return the innermost branch around ``node``, in the same function, that some ranks run alone."""
        for inner, outer in self._source.around(node):
            if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test and _of_some_ranks(outer):
                return outer
            for block in (getattr(outer, field, None) for field in ("body", "orelse", "finalbody")):
                for before in block[: block.index(inner)] if isinstance(block, list) and inner in block else ():
                    if isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVE) and _of_some_ranks(before):
                        return before
            if isinstance(outer, FUNCTIONS):
                break
        return None

    # -- before and after the wrapping ---------------------------------------------------------------------------------

    def _mark(self, wrappings: list[ast.Call]) -> None:
        """Note that the model is wrapped where ``wrappings`` end, and where calls of their functions end."""
        for call in wrappings:
            function, end = self._source.function_of(call), (call.end_lineno or 0, call.end_col_offset or 0)
            is_new = function not in self._wrapped_from
            self._wrapped_from[function] = min(end, self._wrapped_from.get(function, end))
            self._mark(self._callers[function] if is_new else [])

    def is_after_wrapping(self, node: ast.expr, seen: set[Any] | None = None) -> bool:
        """Return True if the model may be wrapped when ``node`` runs.

        A function that is called before the wrapping, and nowhere else, runs on the plain model.
        """
        function = self._source.function_of(node)
        if function in self._wrapped_from:
            return (node.end_lineno or 0, node.end_col_offset or 0) > self._wrapped_from[function]
        seen = set() if seen is None else seen
        seen.add(function)
        calls = self._callers[function]
        return not calls or any(
            self.is_after_wrapping(call, seen) for call in calls if self._source.function_of(call) not in seen
        )


def _unmoved(node: ast.AST) -> ast.AST:
    """Return ``model`` for ``model.to(device).eval()`` and ``torch.compile(model)``."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _RETURN_SELF:
            node = node.func.value
        elif node.args and ast.unparse(node.func) == "torch.compile":
            node = node.args[0]
        else:
            break
    return node


def _of_some_ranks(branch: ast.If | ast.IfExp) -> bool:
    return bool(_SOME_RANKS.search(ast.unparse(branch.test)))
