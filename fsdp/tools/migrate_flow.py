"""Calls and values of a script: the functions that a call leads to, and the names that hold the model.

Values follow assignments, arguments and results of the whole file, regardless of order and scope: variables of one name
are one, and so are attributes of one name. A method of ``self`` is that of the class; else a call leads to the methods
of that name in every class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fsdp.tools.migrate_source import FUNCTIONS, Source

MODEL, INSIDE, COPY, OPTIMIZER = "wrapped model", "module inside", "copy", "optimizer"
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
_OPTIONS = re.compile(r"(.*\.)?(args?|cfg|conf|config|opts?|hparams|params|flags|FLAGS)")  # objects with numbers
SHOWS = re.compile(  # functions that do not run a model that is passed to them
    r"print|isinstance|hasattr|getattr|len|str|repr|id|type|\w*(info|debug|log|watch|append|count|num_)\w*"
)


class Value(NamedTuple):
    """The facts that are known of the value of an expression.

    Attributes:
        kind: one of the constants above.
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
        self._functions: dict[str, list[Any]] = defaultdict(list)  # and constructors, by the class
        self._methods: dict[str, list[Any]] = defaultdict(list)
        for function in (n for n in source.nodes if isinstance(n, FUNCTIONS)):
            cls = source.parent(function)
            if not isinstance(cls, ast.ClassDef):
                self._functions[function.name].append(function)
            elif function.name == "__init__":
                self._functions[cls.name].append(function)
            else:
                self._methods[function.name].append(function)
        self._calls_in: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
        self._callers: dict[ast.AST | None, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            self._calls_in[source.function_of(call)].append(call)
            for function in self.targets(call):
                if function is not source.function_of(call):
                    self._callers[function].append(call)
        self._values: dict[str, Value] = {}
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
        """Set the values of names, from the wrappings on."""
        assigned = list(self._assignments())
        wrapped = [(to, call) for to, value in assigned if (call := _unmoved(value)) in self.wrappings]
        self._values |= {self._name(to): Value(MODEL) for to, _ in wrapped}
        for to, call in wrapped:
            if isinstance(to, ast.expr) and isinstance(call, ast.Call) and call.args:
                self._values.setdefault(self._name(call.args[0]), Value(INSIDE, ast.unparse(to)))
        self._values.pop("", None)
        fixed, before = set(self._values), dict[str, Value]()
        while before != self._values:
            before = dict(self._values)
            held = [(self._name(to), self.value(expression)) for to, expression in assigned]
            for call in self.calls:
                for name, expression in self._arguments(call):
                    value = self.value(expression)  # advice passes the wrapped model in the place of the module inside
                    held.append((name, Value(MODEL) if value and value.kind == INSIDE else value))
            for name, value in held:
                is_new = name not in self._values or (value and value.kind == INSIDE != self._values[name].kind)
                if name and value and is_new and name not in fixed:
                    self._values[name] = value

    def _arguments(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield the parameters of the functions that ``call`` leads to, with the expressions that it passes."""
        for function in self.targets(call):
            names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            is_bound = isinstance(self._source.parent(function), ast.ClassDef) and names[:1] == ["self"]
            yield from zip(names[is_bound:], call.args)
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

    def value(self, node: ast.AST) -> Value | None:
        """Return the facts about the value of an expression; None if nothing is known."""
        node = _unmoved(node)
        if isinstance(node, ast.Attribute) and node.attr == "module" and self.kind(node.value) in (MODEL, COPY):
            return Value(INSIDE, ast.unparse(node.value))
        if isinstance(node, ast.Call):
            made, given = self._source.full(node.func), node.args[:1]
            if made in self._wrappers:
                return Value(MODEL)
            if made in COPIES:
                return Value(COPY) if given and self.kind(given[0]) in SHARDED else None
            if _OPTIMIZER_CLASS.fullmatch(made):
                models = (model for each in given for part in ast.walk(each) if (model := self.model_of(part)))
                return Value(OPTIMIZER, next(models, ""))
        return self._values.get(self._name(node))

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

    def targets(self, call: ast.Call) -> list[Any]:
        """Return the functions of the script that ``call`` may lead to."""
        if isinstance(call.func, ast.Name):
            return self._functions[call.func.id]
        if not isinstance(call.func, ast.Attribute) or self._source.full(call.func):
            return []
        methods = self._methods[call.func.attr]
        around = [outer for _, outer in self._source.around(call)] if ast.unparse(call.func.value) == "self" else []
        own = [function for function in methods if self._source.parent(function) in around]
        return own or (methods if call.func.attr not in LOCAL_METHODS | STATE else [])

    def reached(self, call: ast.Call, seen: set[Any] | None = None) -> Iterator[ast.Call]:
        """Yield ``call``, and all calls that it leads to."""
        seen = set() if seen is None else seen
        yield call
        for function in self.targets(call):
            if function not in seen:
                seen.add(function)
                for inner in self._calls_in[function]:
                    yield from self.reached(inner, seen)

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
