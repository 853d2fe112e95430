"""An import hook that makes the installed torch one without FSDP1.

Modules of FSDP1 cannot be imported, and ``torch.distributed.fsdp`` has FSDP2's names alone. Other modules of torch that
import names of FSDP1 get empty classes in their place, which no model is an instance of. Activation checkpointing
uses functions of FSDP1's policies, which such a torch would keep: it gets a copy.

`python -m tests.harness.without_fsdp1 STAYS PROGRAM ...` runs a program with it.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.harness.programs import run_as_main

_FSDP = "torch.distributed.fsdp"
_STAYS = {"_fully_shard", "_common_utils", "_shard_utils"}  # FSDP2; a helper of torch.distributed.checkpoint
_CHECKPOINTING = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_POLICIES = "torch.distributed._policies"  # a copy of FSDP1's module, for _CHECKPOINTING
_REWRITTEN = {
    _FSDP,
    f"{_FSDP}._common_utils",  # reduced to functions of FSDP2
    _CHECKPOINTING,
    "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim.named_optimizer",
}
_STAND_IN = "class {}:\n    fsdp_modules = staticmethod(lambda *args, **kwargs: [])"


def install(stays: Collection[str]) -> None:
    """Remove FSDP1 except for its modules ``stays``, before anything has imported a module that is changed."""
    assert not _REWRITTEN.intersection(sys.modules)
    sys.meta_path.insert(0, _Finder(stays))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, stays: Collection[str]) -> None:
        self._stays = _STAYS | set(stays)

    def is_gone(self, module: str) -> bool:
        return module.startswith(f"{_FSDP}.") and module.split(".")[3] not in self._stays

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name in _REWRITTEN:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            assert spec is not None and spec.origin is not None
            loader = _Loader(name, spec.origin)
            loader.finder = self
            spec.loader = loader
            return spec
        if name == _POLICIES:
            return importlib.util.spec_from_file_location(name, Path(path[0], "fsdp", "wrap.py"))
        if self.is_gone(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    finder: _Finder

    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(self.get_data(self.path))
        if fullname == f"{_FSDP}._common_utils":
            tree.body = [node for node in tree.body if _is_of_fsdp2(node)]
        tree = ast.fix_missing_locations(_Without(self.finder, fullname).visit(tree))
        return compile(tree, self.path, "exec")


def _is_of_fsdp2(node: ast.stmt) -> bool:
    functions = ("_named_parameters_with_duplicates", "collect_grad_tensors", "replace_grad_tensors")
    return isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "").endswith(functions)


class _Without(ast.NodeTransformer):
    """Removes imports of FSDP1's names, and outside of torch.distributed.fsdp writes classes in their place."""

    def __init__(self, finder: _Finder, module: str) -> None:
        self._finder, self._module, self._inside = finder, module, module.startswith(_FSDP)
        self._removed: set[str] = set()

    def visit_Import(self, node: ast.Import) -> Any:
        node.names = [alias for alias in node.names if not self._finder.is_gone(alias.name)]
        return node if node.names else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = f"{_FSDP}.{node.module}" if node.level and self._inside else str(node.module)
        names = [alias.asname or alias.name for alias in node.names]
        if self._module == _CHECKPOINTING and module.startswith(_FSDP):
            node.module = _POLICIES
        elif not self._inside and module.startswith(_FSDP):
            return [ast.parse(_STAND_IN.format(name)).body[0] for name in names]
        if self._inside and self._finder.is_gone(module):
            self._removed.update(names)
            return None
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        if ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
            node.value.elts = [each for each in node.value.elts if ast.literal_eval(each) not in self._removed]
        return node


if __name__ == "__main__":
    install(sys.argv[1].split(","))
    run_as_main(sys.argv[2:])
