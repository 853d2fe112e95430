"""Auto-wrap policies, which choose the submodules that become units, and the walk that wraps them.

There are two kinds of policy. A *policy object* (:class:`ModuleWrapPolicy`, :class:`CustomPolicy`) maps modules to the
keyword arguments of their wrappers. A *callable policy* is called for each module, with keywords::

    policy(module=module, recurse=True, nonwrapped_numel=n)   # n elements in the subtree: visit the children?
    policy(module=module, recurse=False, nonwrapped_numel=n)  # n elements outside of units below: make this a unit?

Wrapping has two steps: choose on the untouched tree, then replace, children before parents. So a policy never sees a
half-wrapped tree, and a policy that raises leaves the model unchanged. A module with several parents is wrapped once;
the wrapper replaces it in all of them.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fsdp.comm.user_warnings import warn_user
from fsdp.flat.names import compiled_in, members_of
from fsdp.flat.ownership import ONE_UNIT_ONLY
from fsdp.module_groups import ModuleGroups, forget, groups_in, inner_first
from fsdp.runtime.hooks import around_forward

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

# The modules that become units, with the keyword arguments of their wrappers.
_Targets = dict[nn.Module, dict[str, Any]]
_POLICY_ARGUMENTS = ("module", "recurse", "nonwrapped_numel")


# Policy objects


class _Policy(ABC):
    """Base of policies that choose for a whole tree at once."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Map the modules to wrap to new dicts of keyword arguments. They may include the root, which the caller leaves
        out, but none of ``ignored_modules``."""


class ModuleWrapPolicy(_Policy):
    """Policy that wraps the instances of ``module_classes``, such as ``ModuleWrapPolicy({Block})``.

    Also usable as a callable policy.

    Raises:
        TypeError: ``module_classes`` is no iterable of classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = list(module_classes) if isinstance(module_classes, Iterable) else None
        if classes is None or not all(isinstance(cls, type) for cls in classes):
            raise TypeError(
                "module_classes must be an iterable of module classes, such as {nn.Linear}, "
                f"but got {module_classes!r}"
            )
        self._module_classes = set(classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module_classes})"


class CustomPolicy(_Policy):
    """Policy that calls ``lambda_fn(module)`` for each module.

    False or an empty dict: no unit. True: a unit with the root's keyword arguments. A dict: a unit with the root's
    keyword arguments, overridden by the dict. Also usable as a callable policy, where the contents of a dict are
    ignored.

    Raises:
        ValueError: ``lambda_fn`` returns something else (raised during wrapping).
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        targets: _Targets = {}
        for module in root_module.modules():
            overrides = None if module in ignored_modules else self._overrides(module)
            if overrides is not None:
                targets[module] = {**root_kwargs, **overrides}
        return targets

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or self._overrides(module) is not None

    def _overrides(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the overrides of ``module``'s arguments, or None if it becomes no unit."""
        result = self._lambda_fn(module)
        if not isinstance(result, (bool, dict)):
            raise ValueError(
                f"expected the function of a CustomPolicy to return a bool or a dict, but it returned {result!r} "
                f"for a {type(module).__name__}"
            )
        if not result:
            return None
        return result if isinstance(result, dict) else {}


# Callable policies


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Choose every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Choose the modules for which ``lambda_fn(module)`` is true. Use it through ``functools.partial``."""
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Choose the instances of ``transformer_layer_cls``. Use it through ``functools.partial``."""
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Choose modules with at least ``min_num_params`` elements outside of units below.

    Children of ``force_leaf_modules`` are not visited, and ``exclude_wrap_modules`` are not wrapped themselves. The
    defaults are this function's attributes ``FORCE_LEAF_MODULES`` and ``EXCLUDE_WRAP_MODULES``.
    """
    if nonwrapped_numel < min_num_params:
        return False
    defaults: Any = size_based_auto_wrap_policy
    if recurse:
        leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return not isinstance(module, tuple(leaves))
    excluded = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(excluded))


# A multi-head attention reads the weights of nested projections instead of calling these. A list or dict of modules has
# no forward that would gather parameters.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Return True if any of the callable ``policies`` returns True."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


# Wrapping by hand


class _ConfigAutoWrap:
    """The wrapper class and keyword arguments of :func:`wrap`, for the whole process; see :func:`enable_wrap`."""

    in_autowrap_context: ClassVar[bool] = False
    wrapper_cls: ClassVar[Callable[..., nn.Module] | None] = None
    kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self, **kwargs: Any) -> None:
        self._entering = kwargs

    @staticmethod
    def enable_autowrap_context(kwargs: dict[str, Any]) -> None:
        if _ConfigAutoWrap.in_autowrap_context:
            raise NotImplementedError("enable_wrap contexts cannot be nested: leave the outer one first")
        if "wrapper_cls" not in kwargs:
            raise ValueError("expected a wrapper_cls, the class that wrap() applies")
        _ConfigAutoWrap.in_autowrap_context = True
        _ConfigAutoWrap.wrapper_cls = kwargs["wrapper_cls"]
        _ConfigAutoWrap.kwargs = {name: value for name, value in kwargs.items() if name != "wrapper_cls"}

    @staticmethod
    def disable_autowrap_context() -> None:
        _ConfigAutoWrap.in_autowrap_context = False
        _ConfigAutoWrap.wrapper_cls = None
        _ConfigAutoWrap.kwargs = {}

    def __enter__(self) -> None:
        self.enable_autowrap_context(self._entering)

    def __exit__(self, *exc_info: object) -> None:
        self.disable_autowrap_context()


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap(module, **overrides)`` return ``wrapper_cls(module, **{**wrapper_kwargs, **overrides})`` inside.

    The context applies to the whole process.

    Raises:
        NotImplementedError: inside another such context.
    """
    with _ConfigAutoWrap(wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the arguments of the surrounding :func:`enable_wrap`; without one return ``module``.

    A dict attribute ``_wrap_overrides`` of the module overrides ``wrap_overrides``, which override the context's.
    """
    if _ConfigAutoWrap.wrapper_cls is None:
        return module
    kwargs = {**_ConfigAutoWrap.kwargs, **wrap_overrides}
    return _ConfigAutoWrap.wrapper_cls(module, **_with_own_overrides(module, kwargs))


def _with_own_overrides(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, **getattr(module, "_wrap_overrides", {})}


# Wrapping by policy


def choose_units(
    root_module: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
) -> tuple[_Targets, ModuleGroups]:
    """Choose the submodules of ``root_module`` that become units by ``policy``, and declared groups.

    Each has the arguments ``root_kwargs`` as changed by the policy, and for a policy object ``auto_wrap_policy=None``
    besides. A policy that matches no module is warned of, since the whole model is then one unit. Modules of the
    classes that ``mixed_precision`` excludes become units in full precision, with a warning, and get hooks that cast
    inputs and outputs.

    Args:
        policy: a policy of either kind; None chooses declared groups alone.
        ignored_modules: modules that are not chosen; every descendant has to be named.
        ignored_params: parameters that are not counted.

    Returns:
        the modules with the arguments of their wrappers, and the groups with theirs, inner groups first.

    Raises:
        ValueError: ``policy`` is no policy, or a group cannot be one unit. The model is unchanged.
        TypeError: ``policy`` has other required arguments.
    """
    groups = groups_in(root_module, ignored_modules)
    grouped = {member: group for group, _ in groups for member in members_of(group).values()}
    if policy is None:
        targets: _Targets = {}
    elif callable(getattr(policy, "_run_policy", None)):  # torch's own policy objects too
        targets = policy._run_policy(root_module, ignored_modules, {**root_kwargs, "auto_wrap_policy": None})
    elif callable(policy) and not isinstance(policy, type):
        _check_callable(policy)
        choice = _Choice(policy, ignored_modules, ignored_params, grouped)
        choice.visit(root_module, only_children=True)
        targets = {module: _with_own_overrides(module, root_kwargs) for module in choice.modules}
    else:
        raise ValueError(
            "expected auto_wrap_policy to be callable, a function or a policy object such as "
            f"ModuleWrapPolicy({{Block}}), but got {policy!r}"
        )
    if policy is not None and not targets and any(True for _ in root_module.children()):
        warn_user(
            f"auto_wrap_policy {policy!r} matched no submodule of {type(root_module).__name__}: the whole module "
            "becomes one unit, gathered at once. Check the policy's classes or sizes, or pass auto_wrap_policy=None."
        )
    kept_full = root_kwargs.get("mixed_precision") if policy is not None else None
    sensitive = _in_full_precision(root_module, kept_full, {*ignored_modules, *grouped})
    targets = {
        module: {**targets.get(module, root_kwargs), **({"mixed_precision": None} if module in sensitive else {})}
        for module in root_module.modules()
        if (module in targets or module in sensitive) and module not in grouped
    }
    targets.pop(root_module, None)
    groups = inner_first(groups)
    _check_ties(root_module, {**dict(zip(targets, targets)), **grouped}, ignored_modules, ignored_params)
    for module in sensitive:
        _CastAround(module)
    return targets, [(group, {**root_kwargs, **arguments}) for group, arguments in groups]


def auto_wrap(
    root_module: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    wrapper_cls: type[nn.Module],
    root_kwargs: dict[str, Any],
) -> int:
    """Wrap the units that :func:`choose_units` finds below ``root_module``. The root is not wrapped.

    Each chosen module is replaced, in all parents, by one ``wrapper_cls(module, **arguments)``.

    Returns:
        the number of units.

    Raises: as ``choose_units``, and
        ValueError: the tree contains a ``wrapper_cls`` already.
    """
    if policy is not None:
        _check_not_wrapped(root_module, wrapper_cls)
    targets, groups = choose_units(root_module, policy, ignored_modules, ignored_params, root_kwargs)
    wrapped = _construct_wrap_fn(root_module, targets, wrapper_cls)
    around: Any = wrapper_cls
    done: set[nn.Module] = set()

    def wrap_in(modules: Collection[nn.Module]) -> None:
        _post_order_apply(root_module, lambda module: wrapped(module) if module in modules else None)
        done.update(modules)

    for group, arguments in groups:  # before the units around the group's modules, after the units inside them
        wrap_in({module for member in members_of(group).values() for module in member.modules()} - done)
        forget(group)
        wrappers = around._around_group(group, arguments)
        _post_order_apply(root_module, wrappers.get)
    wrap_in(targets.keys() - done)
    return len(targets) + len(groups)


def _check_callable(policy: Callable[..., bool]) -> None:
    """Raise TypeError if ``policy`` has other required arguments, as without ``functools.partial``."""
    try:
        params = inspect.signature(policy).parameters
    except (TypeError, ValueError):  # a callable of C, which has no signature
        return
    keywords = [p for p in params.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    lacks = [p.name for p in keywords if p.default is p.empty and p.name not in _POLICY_ARGUMENTS]
    if lacks:
        name = getattr(policy, "__name__", repr(policy))
        value = "{Block}" if lacks[0].endswith("cls") else "..."
        raise TypeError(
            f"auto_wrap_policy {name}() needs {', '.join(map(repr, lacks))} besides what every policy is called with "
            f"({', '.join(_POLICY_ARGUMENTS)}): pass functools.partial({name}, {lacks[0]}={value})"
        )


def _in_full_precision(root_module: nn.Module, precision: Any, ignored_modules: set[nn.Module]) -> list[nn.Module]:
    """Return the modules that ``precision`` excludes, which become units in full precision; warn if there are any."""
    if precision is None:
        return []
    classes = tuple(precision._module_classes_to_ignore)
    found = [m for m in root_module.modules() if isinstance(m, classes) and m not in ignored_modules]
    if found:
        names = sorted({type(module).__name__ for module in found})
        warn_user(
            "Both mixed precision and an auto_wrap_policy were given, and the model has modules of the types "
            f"{', '.join(names)}, which are kept in full precision: each becomes a unit of its own. Pass "
            "MixedPrecision(_module_classes_to_ignore=()) to treat them like the others"
        )
    return found


class _CastAround:
    """Forward hooks that run a module in float32 inside a model of another precision, and cast the output back."""

    def __init__(self, module: nn.Module) -> None:
        self._dtype: torch.dtype | None = None  # of the inputs of the forward under way
        around_forward(module, self._enter, self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._dtype = None

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            self._dtype = self._dtype or tensor.dtype
            return tensor.to(torch.float32)

        return tree_map_only(torch.Tensor, widen, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self._dtype
        if dtype is None:
            return output
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, output)


def _check_ties(
    root_module: nn.Module,
    targets: Mapping[nn.Module, nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> None:
    """Raise ValueError if a parameter would belong to two units, with both names, or to a module that was given to
    ``torch.compile``, whose result calls that module and not the wrapper. A shared module is one unit.

    ``targets`` maps each chosen module to the module that the unit wraps: the same one, or a group.
    """
    homes: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    compiled = compiled_in(root_module)
    pending = [(root_module, root_module, "")]
    while pending:
        module, unit, path = pending.pop()
        if module in ignored_modules:
            continue
        unit = targets.get(module, unit)
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in ignored_params:
                continue
            if unit in compiled:
                name = next(name for name, module in root_module.named_modules() if module is unit)
                raise ValueError(
                    f"auto_wrap_policy chooses {name!r} ({type(unit).__name__}), but the module that torch.compile has "
                    "made around it would not call the wrapper: compile in place, by the module's own compile(), or "
                    "wrap first and compile afterwards"
                )
            first, name = homes.setdefault(param, (unit, f"{path}{attribute}"))
            if first is not unit:
                raise ValueError(
                    f"parameter {path + attribute!r} is shared with {name!r}, and auto_wrap_policy puts the two into "
                    f"different units ({type(unit).__name__} and {type(first).__name__}). {ONE_UNIT_ONLY}"
                )
        children = [(child, unit, f"{path}{name}.") for name, child in module._modules.items() if child is not None]
        pending += reversed(children)


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap ``module`` (unless ``only_wrap_children``) and submodules as a callable policy chooses.

    ``wrapper_cls`` may be any function of a module and ``kwargs``.

    Returns:
        the wrapper of ``module``, or ``module``; and the number of elements inside wrappers.

    Raises:
        ValueError: ``wrapper_cls`` is a class with instances in the tree.
    """
    if isinstance(wrapper_cls, type):
        _check_not_wrapped(module, wrapper_cls)
    choice = _Choice(auto_wrap_policy, ignored_modules, ignored_params)
    numel = _numel(choice.visit(module, only_wrap_children))
    targets = {target: _with_own_overrides(target, kwargs) for target in choice.modules}
    del choice  # it would keep the original parameters alive during wrapping
    _post_order_apply(module, _construct_wrap_fn(module, targets, wrapper_cls))
    return (wrapper_cls(module, **targets[module]) if module in targets else module), numel


class _Choice:
    """The choice of a callable policy in a tree: ``modules``, children before parents."""

    def __init__(
        self,
        policy: Callable[..., bool],
        ignored_modules: set[nn.Module],
        ignored_params: set[nn.Parameter],
        grouped: Collection[nn.Module] = (),
    ) -> None:
        """``grouped`` modules are chosen already; modules inside them are not."""
        self.modules: list[nn.Module] = []
        self._grouped = grouped
        self._policy = policy
        self._ignored_params = ignored_params
        # For each visited or ignored module: the parameters of the subtree that are in chosen modules.
        self._covered: dict[nn.Module, set[nn.Parameter]] = {module: set() for module in ignored_modules}

    def visit(self, module: nn.Module, only_children: bool = False) -> set[nn.Parameter]:
        """Call the policy for ``module`` (unless ``only_children``) and the subtree. Return the parameters
        that are in chosen modules."""
        covered = self._covered[module] = set()
        params = [param for param in module.parameters() if param not in self._ignored_params]
        if self._policy(module=module, recurse=True, nonwrapped_numel=_numel(params)):
            for child in module.children():
                covered |= self._covered[child] if child in self._covered else self.visit(child)
        elif module not in self._grouped:
            return covered
        if only_children:
            return covered
        if module in self._grouped:
            covered.update(params)
            return covered
        remainder = _numel(param for param in params if param not in covered)
        if self._policy(module=module, recurse=False, nonwrapped_numel=remainder):
            self.modules.append(module)
            covered.update(params)
        return covered


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _check_not_wrapped(root_module: nn.Module, wrapper_cls: type) -> None:
    for path, module in root_module.named_modules():
        if isinstance(module, wrapper_cls):
            place = f"{path!r} in {type(root_module).__name__}" if path else "the module to wrap itself"
            raise ValueError(
                f"an auto-wrap policy needs a module that holds no {wrapper_cls.__name__} yet, but {place} is one; "
                "wrap the tree either by the policy or by hand"
            )


def _construct_wrap_fn(
    root_module: nn.Module, target_module_to_kwargs: _Targets, fsdp_fn: Callable[..., nn.Module]
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function for :func:`_post_order_apply` that wraps the targets, except the root, by ``fsdp_fn``."""

    def wrapped(module: nn.Module) -> nn.Module | None:
        if module is root_module or module not in target_module_to_kwargs:
            return None
        return fsdp_fn(module, **target_module_to_kwargs[module])

    return wrapped


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` once for each module of the tree, children first. A module as the result replaces the module in
    all parents.

    Raises:
        ValueError: ``fn`` returns a module for the root, which has no parent.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {root_module: []}
    for parent in root_module.modules():
        for name, child in parent._modules.items():  # not named_children(): it gives a child's first name only
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for module in list(_post_order(root_module, set())):
        replacement = fn(module)
        if replacement is None:
            continue
        if module is root_module:
            raise ValueError("the root cannot be replaced in its own tree, but the function returned a module for it")
        for parent, name in places[module]:
            setattr(parent, name, replacement)


def _post_order(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    visited.add(module)
    for child in module.children():
        if child not in visited:
            yield from _post_order(child, visited)
    yield module
