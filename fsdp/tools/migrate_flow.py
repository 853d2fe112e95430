"""Calls and values of a script: the functions that a call leads to, and the names that hold the model.

Values follow assignments, arguments and results, regardless of order. A variable belongs to its function; an attribute
is one name in the whole file, on whatever object. A call of a method leads to the class of its object, or by name to
every class of the file if the object is not known.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fsdp.tools.migrate_source import FUNCTIONS, Source

MODEL, INSIDE, COPY, OPTIMIZER, FLAG = "wrapped model", "module inside", "copy", "optimizer", "condition"
SHARDED = (INSIDE, MODEL, COPY)
STATE = {"state_dict", "load_state_dict"}
LOCAL_METHODS = {  # of modules: one rank alone may call them
    *("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers", "children"),
    *("train", "eval", "requires_grad_", "zero_grad", "no_sync", "to"),
}
_RETURN_SELF = {"to", "cuda", "cpu", "double", "float", "half", "bfloat16", "train", "eval", "requires_grad_"}
COPIES = ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")
_OPTIMIZER_CLASS = re.compile(r"torch\.optim\.\w+")
_OPTIMIZER_NAME = re.compile(r"(?i)(?!.*sched)(.*(\b|_)opt(_\w*)?|.*optim.*)")
_OPTIONS = re.compile(
    r"(.*\.)?(args?|cfg|conf|config|opts?|hparams|params|flags|FLAGS)"
)  # their attributes are numbers
SHOWS = re.compile(  # functions that do not run a model that is passed to them
    r"print|isinstance|hasattr|getattr|len|str|repr|id|type|\w*(info|debug|log|watch|append|count|num_)\w*"
)

# Conditions that differ between ranks: numbers of ranks, and names of flags.
_RANK = re.compile(r"(?i)(?<!lora_)rank(?!\w)")
_DEVICE = re.compile(r"(?!n_|num_)(\w+_)?(gpu|device|replica|process|proc|worker)(_?(id|index|idx))?")
_CHIEF = re.compile(
    r"(?i)\bis_?(\w+_)?(main|master|chief|leader|root|primary|zero)|\b(master|chief)\b|rank_?(0|zero)\b"
    r"|(main|master|chief|primary|leader)_?(process|rank|proc|worker|node)"
)


class Value(NamedTuple):
    """The facts that are known of the value of an expression.

    Attributes:
        kind: one of the constants above, or the name of a class of the file.
        model: for a module inside and for an optimizer, the expression of the wrapped model.
    """

    kind: str
    model: str = ""


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
        self._classes = {n.name: n for n in source.nodes if isinstance(n, ast.ClassDef)}
        self._functions: dict[str, list[Any]] = defaultdict(list)
        self._locals: dict[ast.AST | None, set[str]] = {}
        for function in (n for n in source.nodes if isinstance(n, FUNCTIONS)):
            self._functions[function.name].append(function)
            self._locals[function] = {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
        self._calls_in: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
        for node in source.nodes:
            within = source.function_of(node)
            if isinstance(node, ast.Call):
                self._calls_in[within].append(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and within:
                self._locals[within].add(node.id)
        self._values: dict[Any, Value] = {}
        self._follow_values()
        self._callers: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            for function in self.targets(call):
                if function is not source.function_of(call):
                    self._callers[function].append(call)
        self._wrapped_from: dict[ast.AST | None, tuple[int, int]] = {}  # by function: where the wrapping ends
        self._mark(self.wrappings)

    # -- values --------------------------------------------------------------------------------------------------------

    def _assignments(self) -> Iterator[tuple[ast.AST, ast.expr]]:
        """Yield expressions with the targets that they are assigned to; results with their functions."""
        for node in self._source.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        yield from zip(target.elts, node.value.elts)
                    else:
                        yield target, node.value
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
                yield node.target, node.value
            elif isinstance(node, ast.Return) and node.value:
                yield self._source.function_of(node) or node, node.value

    def _follow_values(self) -> None:
        """Set the values of all names: forward from expressions, then back to other names of the wrapped module."""
        assigned = [(self._key(to), value) for to, value in self._assignments()]
        plain: dict[Any, str] = {}  # names of the module that is wrapped, with the expression of the wrapped model
        for to, value in self._assignments():
            if (call := _unmoved(value)) in self.wrappings and (name := self._key(to)):
                self._values[name] = Value(MODEL)
                if isinstance(call, ast.Call) and call.args and (name := self._key(call.args[0])):
                    plain[name] = ast.unparse(to) if isinstance(to, ast.expr) else "the wrapped model"
        wrapped, before = set(self._values), dict[Any, Value]()
        while before != self._values:
            before = dict(self._values)
            passed = [pair for call in self.calls for pair in self._arguments(call)]
            for name, expression in assigned:
                self._hold(name, self.value(expression), wrapped)
            for name, expression in passed:  # advice has the wrapped model passed in the place of the module inside
                given = self.value(expression)
                self._hold(name, Value(MODEL) if given and given.kind == INSIDE else given, wrapped)
            if before == self._values:
                for name, expression in [*assigned, *passed]:
                    if name in plain and (origin := self._key(expression)):
                        plain.setdefault(origin, plain[name])
                known = {name for name, value in before.items() if value.kind not in self._classes}
                for name, model in plain.items():
                    self._hold(name, Value(INSIDE, model), known)

    def _hold(self, name: Any, value: Value | None, fixed: Collection[Any]) -> None:
        """Note that ``name`` holds ``value``, unless it is one of ``fixed`` or more is known of its present value."""
        old = self._values.get(name)
        if name and value and name not in fixed and (not old or self._detail(value) > self._detail(old)):
            self._values[name] = value

    def _detail(self, value: Value) -> int:
        return 0 if value.kind in self._classes else 2 if value.kind == INSIDE else 1

    def _arguments(self, call: ast.Call) -> Iterator[tuple[Any, ast.expr]]:
        """Yield the parameters of the functions that ``call`` leads to, with the expressions that it passes."""
        for function in self.targets(call):
            names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            is_bound = self._is_method(function) and "staticmethod" not in map(ast.unparse, function.decorator_list)
            passed = itertools.takewhile(lambda arg: not isinstance(arg, ast.Starred), call.args)
            yield from (((function, name), value) for name, value in zip(names[is_bound:], passed))
            yield from (((function, keyword.arg), keyword.value) for keyword in call.keywords)

    def _key(self, node: ast.AST) -> Any:
        """Return the name that holds ``node``, of a function its result; None for other expressions."""
        node = _unmoved(node)
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Attribute):
            return None if _OPTIONS.fullmatch(ast.unparse(node.value)) else node.attr
        if isinstance(node, ast.Name):
            scopes = (outer for _, outer in self._source.around(node) if node.id in self._locals.get(outer, ()))
            return next(scopes, None), node.id
        return node if isinstance(node, FUNCTIONS) else None

    def value(self, node: ast.AST) -> Value | None:
        """Return the facts about the value of an expression; None if nothing is known."""
        node = _unmoved(node)
        if isinstance(node, ast.IfExp):
            parts = [self.value(node.body), self.value(node.orelse)]
            return max((value for value in parts if value), key=self._detail, default=None)
        if isinstance(node, (ast.Dict, ast.List, ast.Tuple)):  # of one kind
            elements = [self.value(each) for each in (node.values if isinstance(node, ast.Dict) else node.elts) if each]
            return elements[0] if elements and len({each and each.kind for each in elements}) == 1 else None
        if isinstance(node, ast.Attribute) and node.attr == "module" and self.kind(node.value) in (MODEL, COPY):
            return Value(INSIDE, ast.unparse(node.value))
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            return Value(FLAG) if self.of_some_ranks(node) else None
        if not isinstance(node, ast.Call):
            return self._values.get(self._key(node))
        made, given = self._source.full(node.func), self.kind(node.args[0]) if node.args else ""
        if made in self._wrappers:
            return Value(MODEL)
        if made in COPIES:
            return Value(COPY) if given in SHARDED else None
        if _OPTIMIZER_CLASS.fullmatch(made):
            models = [model for each in node.args[:1] for part in ast.walk(each) if (model := self.model_of(part))]
            return Value(OPTIMIZER, models[0] if models else "")
        if isinstance(node.func, ast.Name) and node.func.id in self._classes:
            return Value(node.func.id)
        return next(
            (self._values[f] for f in self.targets(node) if f in self._values), self._values.get(self._key(node))
        )

    def kind(self, node: ast.AST) -> str:
        """Return the kind of the value of an expression; "" if it is not known. Optimizers may be known by name."""
        value = self.value(node)
        if not value and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            return OPTIMIZER if _OPTIMIZER_NAME.fullmatch(ast.unparse(node).rpartition(".")[2]) else ""
        return value.kind if value else ""

    def model_of(self, node: ast.AST) -> str:
        """Return the wrapped model that an expression stands for, or whose inside it is; "" for other expressions."""
        value = self.value(node)
        return "" if not value or value.kind not in SHARDED else value.model or ast.unparse(node)

    def model_near(self, node: ast.AST, optimizer: ast.AST | None = None) -> str:
        """Return the name of the wrapped model of ``optimizer`` nearest to ``node``: in the function, class or file."""
        made = self.value(optimizer) if optimizer else None
        places = [outer for _, outer in self._source.around(node) if isinstance(outer, (*FUNCTIONS, ast.ClassDef))]
        for place in (*places, self._source.tree):
            named = [each for each in ast.walk(place) if isinstance(each, (ast.Name, ast.Attribute))]
            models = [ast.unparse(each) for each in named if self.kind(each) == MODEL]
            if models:
                return made.model if made and made.model in models else models[0]
        return "model"

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _is_method(self, function: ast.AST) -> bool:
        return isinstance(self._source.parent(function), ast.ClassDef)

    def _methods(self, cls: str, name: str) -> list[Any]:
        own = [f for f in self._classes[cls].body if isinstance(f, FUNCTIONS) and f.name == name]
        bases = [ast.unparse(base) for base in self._classes[cls].bases]
        return own or [f for base in bases if base in self._classes and base != cls for f in self._methods(base, name)]

    def targets(self, call: ast.Call) -> list[Any]:
        """Return the functions of the script that ``call`` may lead to."""
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if name in self._classes:
                return self._methods(name, "__init__")
            return [function for function in self._functions[name] if not self._is_method(function)]
        if not isinstance(call.func, ast.Attribute) or self._source.full(call.func):
            return []
        owner, name = call.func.value, call.func.attr
        classes = [outer.name for _, outer in self._source.around(call) if isinstance(outer, ast.ClassDef)]
        cls = classes[0] if classes and ast.unparse(owner) == "self" else self.kind(owner)
        if cls in self._classes and (methods := self._methods(cls, name)):
            return methods
        named = self._functions[name] if name not in LOCAL_METHODS | STATE else []
        return [function for function in named if self._is_method(function)]

    def reached(self, call: ast.Call, seen: set[Any] | None = None) -> Iterator[ast.Call]:
        """Yield ``call``, and all calls that it leads to."""
        seen = set() if seen is None else seen
        yield call
        for function in self.targets(call):
            if function not in seen:
                seen.add(function)
                for inner in self._calls_in[function]:
                    yield from self.reached(inner, seen)

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

    def early(self, node: ast.expr, seen: set[Any] | None = None) -> Iterator[tuple[ast.Call, ast.stmt]]:
        """Yield wrappings, each with an earlier statement next to it that leads to ``node``."""
        function = self._source.function_of(node)
        for wrapping in self.wrappings:
            around = {outer for _, outer in self._source.around(wrapping)}
            inner = next(inner for inner, outer in self._source.around(node) if outer in around)
            if isinstance(inner, ast.stmt) and inner not in around and function is self._source.function_of(wrapping):
                yield from [(wrapping, inner)] if inner.lineno < wrapping.lineno else ()
        seen = set() if seen is None else seen
        for call in self._callers[function]:
            if call not in seen:
                seen.add(call)
                yield from self.early(call, seen)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def needs_all_ranks(self, call: ast.Call) -> bool:
        """Return True if ``call`` itself may run a forward or gather, and must be made on all ranks."""
        function, name = call.func, ast.unparse(call.func).rpartition(".")[2]
        if not self.is_after_wrapping(call):
            return False
        if self.kind(function) in SHARDED:
            return True
        owner = self.kind(function.value) if isinstance(function, ast.Attribute) else ""
        if owner in SHARDED and name not in LOCAL_METHODS:
            return True
        if name in STATE:
            return owner == OPTIMIZER or any(self.kind(part) in SHARDED for part in ast.walk(function))
        full = self._source.full(function)
        is_given = any(self.kind(value) in SHARDED for value in (*call.args, *(k.value for k in call.keywords)))
        is_torchs = full.startswith(("torch.", "copy.")) and full.rpartition(".")[0] not in self._wrappers
        return is_given and not (is_torchs or SHOWS.fullmatch(name) or self.targets(call))

    def of_some_ranks(self, test: ast.expr) -> str:
        """Return the part of a condition that differs between ranks; "" if none is known."""
        text = ast.unparse(test)
        if isinstance(test, ast.BoolOp):
            parts = [part for value in test.values if (part := self.of_some_ranks(value))]
            return " and ".join(parts) if isinstance(test.op, ast.And) else text if parts else ""
        if isinstance(test, ast.UnaryOp):
            operand = ast.unparse(test.operand)
            differs = self.of_some_ranks(test.operand) or _RANK.search(operand) or _DEVICE.fullmatch(_last(operand))
            return text if isinstance(test.op, ast.Not) and differs else ""
        if isinstance(test, ast.Compare):
            sides = [test.left, test.comparators[0]]
            one, other = sides if not isinstance(test.left, ast.Constant) else sides[::-1]
            return text if _is_rank_at(one, test.ops[0], other) else ""
        is_named = isinstance(test, (ast.Name, ast.Attribute, ast.Call))
        named = _CHIEF.search(ast.unparse(test.func) if isinstance(test, ast.Call) else text)
        return text if is_named and (named or self.kind(test) == FLAG) else ""


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


def _last(expression: str) -> str:
    return expression.removesuffix("()").rpartition(".")[2]


def _is_rank_at(one: ast.expr, comparison: ast.cmpop, other: ast.expr) -> bool:
    """Return True if ``one`` is the number of a rank or its device, and is compared with some of its values."""
    text, equals = ast.unparse(one), isinstance(comparison, (ast.Eq, ast.NotEq))
    if _DEVICE.fullmatch(_last(text)):
        return equals and ast.unparse(other) in ("0", "'0'")
    is_number = isinstance(other, (ast.List, ast.Tuple, ast.Set)) or ast.unparse(other).strip("'").isdigit()
    orders = isinstance(comparison, (ast.Lt, ast.LtE, ast.Gt, ast.In, ast.NotIn))
    is_named = equals and isinstance(other, (ast.Name, ast.Attribute, ast.BinOp))  # rank == last_rank
    return bool(_RANK.search(text)) and ((is_number and (equals or orders)) or is_named)
