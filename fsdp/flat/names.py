"""The names of modules, parameters and buffers, and walks through modules. This file alone handles the parts that
wrappers add to names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRAPPED_MODULE = "_fsdp_wrapped_module"
CHECKPOINTED_MODULE = "_checkpoint_wrapped_module"
_COMPILED_MODULE = "_orig_mod"


def clean(name: str) -> str:
    """Remove the parts of ``name`` that this package's and torch's checkpoint wrappers add, as in state dicts."""
    return ".".join(part for part in name.split(".") if part not in (WRAPPED_MODULE, CHECKPOINTED_MODULE))


def clean_text(text: str) -> str:
    """Remove these parts from the names in ``text``."""
    return text.replace(f"{WRAPPED_MODULE}.", "").replace(f"{CHECKPOINTED_MODULE}.", "")


def joined(path: str, name: str) -> str:
    """Join ``path``, of a module, and ``name``, relative to the module."""
    return f"{path}.{name}" if path else name


def bare(name: str) -> str:
    """Remove the parts of ``name`` that a wrapper of any kind may have added."""
    return _uncompiled(name.removeprefix("module."))


def _uncompiled(name: str) -> str:
    return ".".join(part for part in clean(name).split(".") if part != _COMPILED_MODULE)


def plain_keys(keys: Iterable[str]) -> dict[str, str]:
    """Map the keys of a saved state dict to names in the plain model. ``DistributedDataParallel`` has put "module."
    before all of them or none."""
    names = {key: _uncompiled(key) for key in keys}
    of_ddp = all(name.startswith("module.") for name in names.values())
    return {key: name.removeprefix("module.") if of_ddp else name for key, name in names.items()}


# -- units of several modules ------------------------------------------------------------------------------------------


class ModuleGroup(nn.Module):
    """The modules of one unit, by their paths in the plain model below the module in which they were grouped. Names of
    the unit's parameters are relative to that module. The group itself is in no model; each member has a wrapper there.
    """

    def __init__(self, members: Mapping[str, nn.Module]) -> None:
        """``members`` has all paths to each."""
        super().__init__()
        self._modules.update(members)

    @property
    def training(self) -> bool:
        return any(member.training for member in self._modules.values() if member is not None)

    @training.setter
    def training(self, mode: bool) -> None:
        """Each member has a mode, which the model sets."""


def members_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose forwards are forwards of the unit of ``module``, by the prefix of the names in them:
    nearly always the module itself, with the prefix ""."""
    if not isinstance(module, ModuleGroup):
        return {"": module}
    first: dict[nn.Module, str] = {}
    for path, member in module._modules.items():
        assert member is not None
        first.setdefault(member, path)
    return {path: member for member, path in first.items()}


def unit_name(wrapper: Any, path: str) -> str:
    """Return the name of the unit of ``wrapper``, at ``path`` in the plain model: the paths of the unit's modules."""
    place, members = wrapper._fsdp_place, members_of(unit_of(wrapper).module)
    if not place:
        return path
    around = path[: -len(place)].removesuffix(".") if f".{path}".endswith(f".{place}") else ""
    return ", ".join(joined(around, member) for member in members)


def path_of(unit: Any, name: str) -> str:
    """Return the path that the names of the unit's parameters are relative to; ``name`` is the name of the unit."""
    first = next(iter(members_of(unit.module)))
    return name.split(", ")[0].removesuffix(first).removesuffix(".") if first else name


# -- walks through the modules -----------------------------------------------------------------------------------------


def own_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) for ``module`` and its descendants, every path to each, without entering nested units."""
    found: list[tuple[str, nn.Module]] = []
    _add_own(module, "", found)
    return found


def _add_own(module: nn.Module, path: str, found: list[tuple[str, nn.Module]]) -> None:
    children = module._modules
    if WRAPPED_MODULE in children:
        return
    if not isinstance(module, ModuleGroup):
        found.append((path, module))
    for name, child in children.items():
        if child is not None:
            _add_own(child, f"{path}.{name}" if path else name, found)


def unit_of(module: nn.Module) -> Any:
    """Return the unit of ``module`` if that is a wrapped module, else None."""
    return module.__dict__.get("_fsdp_unit")


def wrappers_in(module: nn.Module) -> list[Any]:
    """Return every wrapped module in ``module``, itself included, depth first."""
    return [m for m in module.modules() if unit_of(m) is not None]


def plain_children(module: nn.Module, path: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Iterate over (name, path in the plain model, module) of the children of a module at ``path`` there. A wrapped
    module has the path of the wrapper."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, path if _is_hidden(module, name) else joined(path, name), child


def _is_hidden(module: nn.Module, child: str) -> bool:
    """Whether ``module`` is a wrapper of any kind, and ``child`` the attribute for the wrapped module."""
    if child == _COMPILED_MODULE:  # by type, without importing the compiler: a user's module may have this name
        kinds = {(kind.__module__, kind.__name__) for kind in type(module).__mro__}
        return ("torch._dynamo.eval_frame", "OptimizedModule") in kinds
    return child in (WRAPPED_MODULE, CHECKPOINTED_MODULE) or (
        child == "module" and isinstance(module, DistributedDataParallel)
    )


def compiled_in(model: nn.Module) -> set[nn.Module]:
    """Return the modules in ``model`` around which ``torch.compile`` has made another module."""
    around = [module for module in model.modules() if _COMPILED_MODULE in module._modules]
    return {module.get_submodule(_COMPILED_MODULE) for module in around if _is_hidden(module, _COMPILED_MODULE)}


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate like ``named_modules()``, with every path to each module, by the plain model's names."""
    for plain, _, module in _walk(model, "", ""):
        yield plain, module


def _walk(module: nn.Module, plain: str, now: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Iterate over (path in the plain model, path now, module)."""
    yield plain, now, module
    for name, path, child in plain_children(module, plain):
        yield from _walk(child, path, clean(joined(now, name)))


def inside(model: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel`` and ``torch.compile``'s outermost module."""
    for name, child in model._modules.items():
        if child is not None and name not in (WRAPPED_MODULE, CHECKPOINTED_MODULE) and _is_hidden(model, name):
            return inside(child)
    return model


class PlainNames:
    """A translation between the names in a model's state dict and those of the plain model, to which
    ``DistributedDataParallel`` and ``torch.compile`` add parts."""

    def __init__(self, model: nn.Module) -> None:
        walked = list(_walk(model, "", ""))
        self._plain = {now: plain for plain, now, _ in walked}
        self._now = {plain: now for plain, now, _ in walked}  # the innermost's, where the parameters are

    def plain(self, name: Any) -> Any:
        """Return the plain model's name; a key that is no string stays."""
        return _renamed(name, self._plain)

    def now(self, name: Any) -> Any:
        """Return the name in the state dict: the inverse of ``plain``."""
        return _renamed(name, self._now)


def _renamed(name: Any, paths: dict[str, str]) -> Any:
    """Replace the longest prefix of ``name`` that is a module's path in ``paths``."""
    if not isinstance(name, str):
        return name
    path = name
    while path not in paths:
        path = path.rpartition(".")[0]
    rest = name.removeprefix(path).removeprefix(".")
    return joined(paths[path], rest) if rest else paths[path]
