"""Rules on the package's sources: allowed imports, and the files that may use each dangerous API.

Each rule is a function from a `Source` to a list of violations. Every rule is checked on the package, and on snippets
that break it.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests.harness.programs import run_python

REPOSITORY = Path(__file__).resolve().parents[1]

# Bottom to top. A file may import from the layers below its own, and from its own layer without a cycle.
LAYERS = [
    ["fsdp/api.py", "fsdp/environment.py", "fsdp/patches.py"],
    ["fsdp/comm/"],
    ["fsdp/placement/"],
    ["fsdp/flat/", "fsdp/sharded_grad_scaler.py"],
    ["fsdp/runtime/", "fsdp/wrap.py", "fsdp/module_groups.py"],
    ["fsdp/checkpoint/"],
    ["fsdp/optim/", "fsdp/export/"],
    ["fsdp/names/"],
    ["fsdp/fully_sharded_data_parallel.py"],
    ["fsdp/tools/"],
    ["fsdp/compat/", "fsdp/__main__.py"],
    ["fsdp/__init__.py"],
]
LOWEST_OF_COMM = [
    "fsdp/comm/versions.py",
    "fsdp/comm/user_warnings.py",
    "fsdp/comm/groups.py",
    "fsdp/comm/profiling.py",
    "fsdp/comm/threads.py",
    "fsdp/comm/host_memory.py",
    "fsdp/comm/streams.py",
    "fsdp/comm/waiting/work.py",
    "fsdp/comm/transport/native.py",
]  # each may import the files before it

TORCHS_OWN = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
COLLECTIVE = re.compile(
    r"torch\.distributed\.(distributed_c10d\.)?(reduce|P2POp|((all_|reduce_scatter|broadcast|gather|scatter|batch_|barrier"
    r"|monitored_barrier)\w*)|i?(send|recv)(_\w+)?)"
)
ISSUE_COLLECTIVES = ("torch.distributed._functional_collectives", "torch.distributed.nn", "torch.ops.c10d") + (
    "torch.distributed.algorithms",
)
GROUP_METHODS = {"allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "alltoall", "alltoall_base"} | {
    "recv",
    "recv_anysource",
}
STORE_CALL = re.compile(r"(^|[._])(group_)?store(\(\w*\))?\.(get|set|add|check|wait|delete_key)$")
ACCELERATORS = ("torch.cuda", "torch.accelerator", "torch.xpu", "torch.npu", "torch.mtia", "torch.mps")
STREAM_METHODS = {"record_stream", "wait_stream", "wait_event", "record_event", "current_stream", "set_stream"}
REPLACES_MEMORY = {"resize_", "_swap_data_ptr_", "set_", "swap_tensors"}
AUTOGRAD_HOOKS = {
    "queue_callback",
    "register_hook",
    "register_prehook",
    "register_multi_grad_hook",
    "register_post_accumulate_grad_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "saved_tensors_hooks",
}
GLOBAL_HOOK = re.compile(
    r"torch\.(optim\.optimizer\.register_optimizer_step|nn\.modules\.module\.register_module)_\w+"
    r"|sys\.(excepthook|unraisablehook|settrace|setprofile)"
)
WRAPPERS_NAMES = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
WRAPPERS_PRIVATE_NAMES = {"_fsdp_unit", "_membership", "_join_context", "_device_mesh"}
FORWARD_HOOKS = {"register_forward_hook", "register_forward_pre_hook", "_forward_hooks", "_forward_pre_hooks"}


@dataclass(frozen=True)
class Source:
    """One file; `name` is its path from the repository's root."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[ast.Import | ast.ImportFrom, list[str]]]:
        """Every import, at any depth, with the full names of the imported objects."""
        found: list[tuple[ast.Import | ast.ImportFrom, list[str]]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.append((node, [alias.name for alias in node.names]))
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                found.append((node, [f"{base}.{alias.name}" for alias in node.names]))
        return found

    @cached_property
    def imports_for_types(self) -> set[ast.AST]:
        """The imports under `if TYPE_CHECKING`, which do not run."""
        tests = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        blocks = [node for node in self.tree.body if isinstance(node, ast.If) and ast.unparse(node.test) in tests]
        return {node for block in blocks for node in block.body if isinstance(node, (ast.Import, ast.ImportFrom))}

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Full names by imported name."""
        aliases: dict[str, str] = {}
        for node, names in self.imports:
            for alias, name in zip(node.names, names, strict=True):
                if alias.asname or isinstance(node, ast.ImportFrom):
                    aliases[alias.asname or alias.name] = name
                else:
                    aliases[alias.name.split(".")[0]] = alias.name.split(".")[0]
        return aliases

    def full_name(self, node: ast.AST) -> str | None:
        """Return `torch.distributed.all_reduce` for `dist.all_reduce`; None for names that are not imported."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr}" if base else None
        return None

    @cached_property
    def references(self) -> list[tuple[int, str]]:
        """(line, full name) of every import, and of every use through an import."""
        found = [(node.lineno, name) for node, names in self.imports for name in names]
        for node in self.nodes:
            name = self.full_name(node)
            if name is not None:
                found.append((node.lineno, name))  # type: ignore[attr-defined]
        return found

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        """Calls by the called expression."""
        found: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                found.setdefault(ast.unparse(node.func), []).append(node)
        return found

    def calls(self, function: str) -> list[ast.Call]:
        return self._calls.get(function, [])

    def attributes(self, names: set[str]) -> Iterator[tuple[int, str]]:
        """Yield (line, name) wherever one of `names` is an attribute, an import, or a string except in `hasattr`."""
        arguments = {argument for call in self.calls("hasattr") for argument in call.args}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr in names:
                yield node.lineno, node.attr
            elif isinstance(node, ast.Constant) and node.value in names and node not in arguments:
                yield node.lineno, str(node.value)
        for imported, full_names in self.imports:
            for name in full_names:
                if name.rpartition(".")[2] in names:
                    yield imported.lineno, name


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Free the syntax trees of all files."""
    yield
    _read.cache_clear()


def package() -> list[Source]:
    return _read("fsdp")


@cache
def _read(folder: str) -> list[Source]:
    paths = sorted((REPOSITORY / folder).rglob("*.py"))
    return [Source(path.relative_to(REPOSITORY).as_posix(), path.read_text()) for path in paths]


def below(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


# -- rule 1: imports -----------------------------------------------------------------------------------------------


def imports_are_at_the_top(source: Source) -> list[str]:
    top: set[ast.AST] = {*source.tree.body, *source.imports_for_types}
    for node in source.tree.body:
        if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "warnings.catch_warnings()":
            top.update(node.body)  # the imported module warns
        if source.name.endswith("/__init__.py") and isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            top.update(ast.walk(node))  # a package may load a file at the first use of a name
    lazy = [f"line {node.lineno}: import inside of something" for node, _ in source.imports if node not in top]
    by_name = [f"line {line}: {name}" for line, name in source.references if name == "importlib.import_module"]
    if source.name == "fsdp/compat/__init__.py":  # puts our names where torch's are; a torch may have no FSDP1
        by_name = []
    names = [node for node in source.nodes if isinstance(node, ast.Name)]
    return lazy + by_name + [f"line {name.lineno}: {name.id}" for name in names if name.id == "__import__"]


def imports_for_types_are_in_annotations(source: Source) -> list[str]:
    """Check the uses of names that are imported under `TYPE_CHECKING`; elsewhere they are not defined."""
    types, others = set[str](), set[str]()
    for node, _ in source.imports:
        names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
        (types if node in source.imports_for_types else others).update(names)
    annotations = [getattr(node, field, None) for node in source.nodes for field in ("annotation", "returns")]
    allowed = {inner for annotation in annotations if annotation for inner in ast.walk(annotation)}
    used = [node for node in source.nodes if isinstance(node, ast.Name) and node.id in types - others]
    return [f"line {node.lineno}: {node.id} is imported for types only" for node in used if node not in allowed]


def imports_torch_and_stdlib_only(source: Source) -> list[str]:
    allowed = sys.stdlib_module_names | {"torch", "fsdp"}
    if source.name == "fsdp/checkpoint/progress.py":
        allowed |= {"tqdm"}
    if source.name == "fsdp/checkpoint/checksums.py":
        allowed |= {"numpy"}
    return [
        f"line {node.lineno}: {name}"
        for node, names in source.imports
        for name in names
        if name.split(".")[0] not in allowed
    ]


def no_use_of_torchs_fsdp(source: Source) -> list[str]:
    return [f"line {line}: {name}" for line, name in source.references if below(name, TORCHS_OWN)]


def layer_of(name: str) -> int:
    for number, layer in enumerate(LAYERS):
        if any(name == path or (path.endswith("/") and name.startswith(path)) for path in layer):
            return number
    raise LookupError(f"{name} is in no layer")


def files_imported(source: Source, files: Iterable[str]) -> list[tuple[int, str]]:
    """Return (line, file) of the package's own files that `source` imports when it runs, resolving imported names to
    files."""
    modules = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}
    found = []
    for node, names in source.imports:
        for name in names:
            if name.split(".")[0] == "fsdp" and node not in source.imports_for_types:
                while name not in modules:
                    name = name.rpartition(".")[0]
                found.append((node.lineno, modules[name]))
    return found


def downward_only(source: Source, files: Iterable[str]) -> list[str]:
    wrong = []
    for line, target in files_imported(source, files):
        up = layer_of(target) > layer_of(source.name)
        for index, path in enumerate(LOWEST_OF_COMM):
            is_lower = target in LOWEST_OF_COMM[:index]
            up = up or (source.name == path and target.startswith("fsdp/comm/") and not is_lower)
        if up:
            wrong.append(f"line {line}: {target} is above {source.name}")
    return wrong


def cycles(sources: Iterable[Source]) -> list[str]:
    sources = list(sources)
    files = [source.name for source in sources]
    graph = {source.name: {file for _, file in files_imported(source, files)} for source in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


# -- rule 2: APIs that belong to one file --------------------------------------------------------------------------


def collectives_in_collectives(source: Source) -> list[str]:
    places = ("collectives", "consensus", "lane/issuing", "transport/native")
    if source.name in (f"fsdp/comm/{name}.py" for name in places):
        return []
    wrong = [
        f"line {line}: {name}"
        for line, name in source.references
        if COLLECTIVE.fullmatch(name) or below(name, ISSUE_COLLECTIVES)
    ]
    for call in source.calls("getattr"):  # by a name computed at run time
        if (source.full_name(call.args[0]) or "").startswith("torch.distributed"):
            wrong.append(f"line {call.lineno}: {ast.unparse(call)}")
    return wrong + [f"line {line}: .{name}()" for line, name in source.attributes(GROUP_METHODS)]


def stores_in_board(source: Source) -> list[str]:
    """Check that only `Board` reads, writes and polls a store; files of `comm` may make groups on one."""
    if source.name == "fsdp/comm/waiting/board.py":
        return []
    polls = () if source.name.startswith("fsdp/comm/") else ("fsdp.comm.groups.group_store", "time.sleep")
    wrong = [f"line {line}: {name}" for line, name in source.references if name in polls]
    calls = [call for function, calls in source._calls.items() if STORE_CALL.search(function) for call in calls]
    return wrong + [f"line {call.lineno}: {ast.unparse(call)}" for call in calls]


def streams_in_streams(source: Source) -> list[str]:
    if source.name == "fsdp/comm/streams.py":
        return []
    wrong = [
        f"line {line}: {name}"
        for line, name in source.references
        if name in ("torch.Stream", "torch.Event") or below(name, ACCELERATORS)
    ]
    return wrong + [f"line {line}: .{name}" for line, name in source.attributes(STREAM_METHODS)]


def memory_in_flat_param(source: Source) -> list[str]:
    if source.name in (
        "fsdp/flat/flat_param.py",
        "fsdp/flat/full_copy.py",
        "fsdp/flat/memory.py",
        "fsdp/flat/released.py",
        "fsdp/flat/ownership.py",
    ):
        return []
    wrong = [
        f"line {node.lineno}: .data is assigned"
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr == "data" and not isinstance(node.ctx, ast.Load)
    ]
    for call in source.calls("setattr"):
        if ast.unparse(call.args[1]) == "'data'":
            wrong.append(f"line {call.lineno}: .data is assigned")
    return wrong + [f"line {line}: {name}" for line, name in source.attributes(REPLACES_MEMORY)]


def registrations_in_registration(source: Source) -> list[str]:
    if source.name == "fsdp/flat/registration.py":
        return []
    wrong = [f"line {line}: {name}" for line, name in source.attributes({"_parameters", "register_parameter"})]
    if source.name != "fsdp/flat/ownership.py":
        return wrong
    # ownership.py reads them while a unit is built.
    wrong = [line for line in wrong if not line.endswith(" _parameters")]
    for node in source.nodes:
        if not isinstance(node, (ast.Subscript, ast.Attribute)):
            continue
        stored = not isinstance(node.ctx, ast.Load)
        mutated = isinstance(node, ast.Attribute) and node.attr in ("pop", "popitem", "update", "setdefault", "clear")
        for written in (node, node.value):
            if (stored or mutated) and isinstance(written, ast.Attribute) and written.attr == "_parameters":
                wrong.append(f"line {node.lineno}: _parameters is changed")
    return wrong


def hooks_in_hooks(source: Source) -> list[str]:
    if source.name == "fsdp/runtime/hooks.py":
        return []
    return [f"line {line}: {name}" for line, name in source.attributes(AUTOGRAD_HOOKS | FORWARD_HOOKS)]


def names_in_names(source: Source) -> list[str]:
    if source.name == "fsdp/flat/names.py":
        return []
    constants = [node for node in source.nodes if isinstance(node, ast.Constant) and node.value in WRAPPERS_NAMES]
    return [f"line {node.lineno}: {node.value}" for node in constants]


def privates_of_the_wrapper(source: Source) -> list[str]:
    """Check that layers below the wrapper find units through functions of `flat/names.py`."""
    if source.name in (
        "fsdp/fully_sharded_data_parallel.py",
        "fsdp/names/fsdp1.py",
        "fsdp/names/fsdp2.py",
        "fsdp/flat/names.py",
    ):
        return []
    return [f"line {line}: {name}" for line, name in source.attributes(WRAPPERS_PRIVATE_NAMES)]


def changes_of_libraries_in_patches(source: Source) -> list[str]:
    """Check that other files neither assign to imported modules and classes nor register hooks for all optimizers and
    modules."""
    if source.name == "fsdp/patches.py":
        return []
    wrong = [
        f"line {node.lineno}: {name} is assigned"
        for node in source.nodes
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and (name := source.full_name(node))
    ]
    for function in ("setattr", "delattr"):
        for call in source.calls(function):
            if name := source.full_name(call.args[0]):
                wrong.append(f"line {call.lineno}: an attribute of {name} is assigned")
    return wrong + [f"line {line}: {name}" for line, name in source.references if GLOBAL_HOOK.fullmatch(name)]


Rule = Callable[[Source], list[str]]
RULES: list[Rule] = [
    imports_are_at_the_top,
    imports_for_types_are_in_annotations,
    imports_torch_and_stdlib_only,
    no_use_of_torchs_fsdp,
    collectives_in_collectives,
    stores_in_board,
    streams_in_streams,
    memory_in_flat_param,
    registrations_in_registration,
    hooks_in_hooks,
    names_in_names,
    privates_of_the_wrapper,
    changes_of_libraries_in_patches,
]


# -- the package ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: Rule) -> None:
    wrong = {source.name: found for source in package() if (found := rule(source))}
    assert not wrong


def test_imports_lead_to_lower_layers_without_cycles() -> None:
    files = [source.name for source in package()]
    assert not {source.name: found for source in package() if (found := downward_only(source, files))}
    assert not cycles(package())


def test_every_file_is_in_a_layer() -> None:
    names = [source.name for source in package()]
    assert {"fsdp/__init__.py", "fsdp/comm/collectives.py", "fsdp/flat/views.py", "fsdp/runtime/unit.py"} <= set(names)
    for name in names:
        assert name.endswith("/__init__.py") or layer_of(name) >= 0


def test_files_have_at_most_650_lines() -> None:
    """A longer file has a second job, which needs a file of its own."""
    long = [source.name for source in package() if len((REPOSITORY / source.name).read_text().splitlines()) > 650]
    assert not long, long


def code_lines(path: Path) -> int:
    """Count the lines of a file that are neither blank nor comment nor docstring."""
    text, doc = path.read_text(), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
                doc.update(range(first.lineno, first.end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for number, line in lines if line.strip() and not line.lstrip().startswith("#") and number not in doc)


# Lines of code by folder. A new ability pays by a simplification first; a number changes in a commit of its own, with
# the reason.
BUDGETS = {
    "fsdp/*.py": 1485,
    "fsdp/checkpoint": 5425,
    "fsdp/comm": 3395,
    "fsdp/compat": 310,
    "fsdp/export": 710,
    "fsdp/flat": 2475,
    "fsdp/names": 540,
    "fsdp/optim": 730,
    "fsdp/placement": 380,
    "fsdp/runtime": 3995,
    "fsdp/tools": 1416,
    "scripts": 3240,
    "tests": 32870,
}


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_its_budget_of_code(folder: str) -> None:
    pattern = folder if folder.endswith(".py") else f"{folder}/**/*.py"
    found = sum(map(code_lines, REPOSITORY.glob(pattern)))
    assert 0 < found <= BUDGETS[folder], f"{folder} has {found} lines of code: simplify something first"


def test_examples_do_not_use_torchs_fsdp() -> None:
    """Except the scripts that show the training before the migration."""
    found = {source.name: used for source in _read("examples") if (used := no_use_of_torchs_fsdp(source))}
    assert list(found) == ["examples/ddp_to_fsdp/2_torch_fsdp.py", "examples/from_fsdp1/before.py"]


IMPORTING = """
import sys
import fsdp

def loaded(*names):
    print(*sorted(module for module in sys.modules if module.startswith(names)))

loaded("torch.distributed.fsdp", "fsdp.tools")
loaded("fsdp.compat")
print(fsdp.describe.__module__, fsdp.tools.__name__)
import fsdp.checkpoint.ragged
loaded("torch.distributed.checkpoint")
print(fsdp.compat.unpatch.__module__)
"""


def test_import_loads_only_needed_modules(tmp_path: Path) -> None:
    """The bare import loads neither torch's FSDP nor the tools nor `fsdp.compat`.

    These are loaded at their first use; ragged tensors load no checkpoint package, which imports torch's FSDP.
    """
    (tmp_path / "importing.py").write_text(IMPORTING)
    done = run_python("importing.py", folder=tmp_path, warn="error")
    assert done == (0, "\n\nfsdp.tools.describe fsdp.tools\n\nfsdp.compat\n")


# -- the rules themselves ------------------------------------------------------------------------------------------

RUNTIME, VIEWS, OWNERSHIP = "fsdp/runtime/unit.py", "fsdp/flat/views.py", "fsdp/flat/ownership.py"
DIST = "import torch.distributed as dist\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fsdp.runtime.unit import Unit\n"
BROKEN: list[tuple[Rule, str, str]] = [
    (imports_are_at_the_top, RUNTIME, "def f():\n    import os"),
    (imports_are_at_the_top, RUNTIME, "import importlib\nimportlib.import_module('os')"),
    (imports_are_at_the_top, RUNTIME, "def __getattr__(name):\n    import os"),
    (imports_are_at_the_top, "fsdp/flat/__init__.py", "def f():\n    import os"),
    (imports_for_types_are_in_annotations, RUNTIME, FOR_TYPES + "Shown = Unit | None"),
    (imports_torch_and_stdlib_only, RUNTIME, "import numpy as np"),
    (no_use_of_torchs_fsdp, "fsdp/api.py", "import torch.distributed.fsdp"),
    (no_use_of_torchs_fsdp, "examples/train.py", "import torch\nx = torch.distributed.fsdp.FullyShardedDataParallel"),
    (collectives_in_collectives, RUNTIME, DIST + "dist.all_reduce(x)"),
    (collectives_in_collectives, RUNTIME, DIST + "getattr(dist, NAME)(x, y)"),
    (collectives_in_collectives, RUNTIME, "import torch.distributed._functional_collectives as funcol"),
    (collectives_in_collectives, RUNTIME, "group.allreduce([x])"),
    (stores_in_board, RUNTIME, "from fsdp.comm.groups import group_store"),
    (stores_in_board, RUNTIME, "import time\nwhile not done():\n    time.sleep(0.1)"),
    (stores_in_board, RUNTIME, "self._store.set(key, value)"),
    (streams_in_streams, RUNTIME, "import torch\ns = torch.Stream('cuda')"),
    (streams_in_streams, RUNTIME, "from torch import accelerator\naccelerator.current_stream()"),
    (memory_in_flat_param, VIEWS, "param.data = value"),
    (memory_in_flat_param, VIEWS, "tensor.untyped_storage().resize_(0)"),
    (memory_in_flat_param, VIEWS, "getattr(storage, '_swap_data_ptr_')(block)"),
    (registrations_in_registration, RUNTIME, "for name, param in module._parameters.items(): pass"),
    (registrations_in_registration, OWNERSHIP, "module._parameters[name] = p"),
    (hooks_in_hooks, RUNTIME, "tensor.register_hook(f)"),
    (hooks_in_hooks, "fsdp/wrap.py", "module.register_forward_pre_hook(f, prepend=True)"),
    (names_in_names, RUNTIME, "part == '_orig_mod'"),
    (privates_of_the_wrapper, "fsdp/checkpoint/torch_state_dict.py", "unit = wrapper._fsdp_unit"),
    (changes_of_libraries_in_patches, RUNTIME, "import torch\ntorch.autograd.backward = f"),
    (changes_of_libraries_in_patches, RUNTIME, "import sys\nsys.excepthook = f"),
    (hooks_in_hooks, VIEWS, "from torch.autograd.graph import saved_tensors_hooks\nuse = saved_tensors_hooks(f, g)"),
]


def _label(value: object) -> str:
    return value.__name__ if callable(value) else str(value).replace("\n", "; ")[:60]


@pytest.mark.parametrize(("rule", "name", "text"), BROKEN, ids=_label)
def test_rule_finds_a_violation(rule: Rule, name: str, text: str) -> None:
    assert rule(Source(name, text))


def test_every_rule_has_a_violation() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


FILES = [
    "fsdp/__init__.py",
    "fsdp/comm/streams.py",
    "fsdp/comm/versions.py",
    "fsdp/flat/views.py",
    "fsdp/runtime/unit.py",
]


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("fsdp/flat/views.py", "from fsdp.runtime.unit import Unit", False),
        ("fsdp/flat/views.py", "from ..runtime.unit import Unit", False),
        ("fsdp/runtime/unit.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fsdp", True),
        ("fsdp/comm/versions.py", "from fsdp.comm.streams import StreamEvent", False),
        ("fsdp/runtime/unit.py", "from fsdp.flat.views import BucketViews", True),
    ],
    ids=_label,
)
def test_imports_of_higher_layers_are_found(name: str, text: str, allowed: bool) -> None:
    assert (not downward_only(Source(name, text), FILES)) is allowed


def test_import_cycles_are_found() -> None:
    one = Source("fsdp/runtime/unit.py", "from fsdp.runtime.order import a")
    two = Source("fsdp/runtime/order.py", "from fsdp.runtime.unit import b")
    away = Source("fsdp/runtime/order.py", "import torch")
    assert cycles([one, two]) and not cycles([one, away])
