"""Several modules in one unit: groups that users declare."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torch import nn

from fsdp.flat.names import WRAPPED_MODULE, ModuleGroup, clean, members_of, own_modules

ModuleGroups = list[tuple[ModuleGroup, dict[str, Any]]]  # with the arguments of their wrappers


@dataclass(frozen=True, eq=False)
class _Group:
    """A declared group, with the arguments that differ from those of the wrapper around it."""

    modules: tuple[nn.Module, ...]
    arguments: dict[str, Any]


_GROUP = "_fsdp_group"  # key in the modules' __dict__ until they are wrapped; deepcopy copies it with them


def declare_group(modules: Iterable[nn.Module], arguments: dict[str, Any]) -> None:
    """Declare ``modules`` as one unit with ``arguments``; see ``FullyShardedDataParallel.group``.

    Raises:
        TypeError, ValueError: the modules cannot be one unit. The modules are unchanged.
    """
    if isinstance(modules, nn.Module) and not isinstance(modules, Iterable):
        raise TypeError(f"group() expects a list of modules, [model.embed, model.head], got {_kinds([modules])}")
    members = tuple(modules)
    for module in members:
        if not isinstance(module, nn.Module):
            raise TypeError(f"group() expects nn.Module elements, got {type(module).__name__}")
    if len(set(members)) < max(2, len(members)):
        raise ValueError(f"group() expects two or more modules, each once, got {_kinds(members)}")
    for module in members:
        inner = set(module.modules())
        if any(other in inner for other in members if other is not module):
            raise ValueError(f"group(): one of its modules, a {type(module).__name__}, contains another one of them")
        if WRAPPED_MODULE in module._modules or "_fsdp_in_unit" in module.__dict__:
            raise ValueError(
                f"group(): the {type(module).__name__} is wrapped already; call it before FullyShardedDataParallel, on "
                "the modules of the plain model"
            )
    found = [module for module in members if _GROUP in module.__dict__]
    if found:
        raise ValueError(f"group(): {_kinds(found)} among these modules is in a group already")
    group = _Group(members, arguments)
    for module in members:
        module.__dict__[_GROUP] = group


def has_groups(module: nn.Module) -> bool:
    """Return True if a group of modules in ``module`` is declared."""
    return any(_GROUP in below.__dict__ for below in module.modules())


def forget(group: ModuleGroup) -> None:
    """Remove the declaration from the modules of ``group``, which are about to be wrapped."""
    for member in members_of(group).values():
        member.__dict__.pop(_GROUP, None)


def groups_in(root_module: nn.Module, ignored: Collection[nn.Module]) -> ModuleGroups:
    """Return the declared groups below ``root_module``, with their arguments, in the order of the model.

    Raises:
        ValueError: a module of a group is missing or ignored.
    """
    found: dict[_Group, dict[str, nn.Module]] = {}
    for path, module in own_modules(root_module):
        if _GROUP in module.__dict__:
            found.setdefault(module.__dict__[_GROUP], {})[clean(path)] = module
    for group, members in found.items():
        absent = set(group.modules) - set(members.values())
        if absent or root_module in group.modules or any(member in ignored for member in group.modules):
            raise ValueError(
                f"FullyShardedDataParallel.group() has made {_kinds(group.modules)} one unit, and the "
                f"{type(root_module).__name__} that is being wrapped does not contain all of them, or they are wrapped "
                f"or ignored there: {_kinds(absent or group.modules)}. Wrap a module around all of them first"
            )
    return [(ModuleGroup(members), group.arguments) for group, members in found.items()]


def inner_first(groups: ModuleGroups) -> ModuleGroups:
    """Sort ``groups`` so that each follows the groups inside the modules of that group.

    Raises:
        ValueError: two groups contain each other.
    """
    members = [list(members_of(group).values()) for group, _ in groups]
    place = {member: i for i, several in enumerate(members) for member in several}
    inner = {
        i: [place[m] for member in members[i] for m in member.modules() if place.get(m, i) != i]
        for i in range(len(groups))
    }
    try:
        return [groups[i] for i in TopologicalSorter(inner).static_order()]
    except CycleError as error:
        around = "; ".join(_kinds(members[i]) for i in dict.fromkeys(error.args[1]))
        raise ValueError(
            f"FullyShardedDataParallel.group(): each of these groups has a module inside of a module of the next, and "
            f"the last of the first: {around}. A group may lie inside of another one's modules, if not around any too"
        ) from None


def _kinds(modules: Iterable[nn.Module]) -> str:
    return " and ".join(f"a {type(module).__name__}" for module in modules)
