"""Programs and tools written for torch's FSDP1 run on this package, on request.

:func:`patch` replaces torch's FSDP1 class, enums, configurations, policies and scaler by those of this package: in
torch's modules, and in modules that have imported them. ``torch.distributed.fsdp`` keeps FSDP2's names. In a version of
torch without FSDP1, the modules and names are added. The command ``fsdp run script.py ...`` (with torchrun:
``torchrun -m fsdp run script.py ...``) does that and runs a script.

:func:`enable_dcp` is the part for ``torch.distributed.checkpoint.state_dict``, which recognises a sharded model by its
class. Without help it takes a model of this package for a plain one, and optimizer shards for full tensors. Afterwards
models with wrapped modules go to :mod:`fsdp.checkpoint`, whose functions have the same signatures and results. Other
models, including those of torch's FSDP and DDP, stay with torch. The private functions of that module are replaced. The
public ones look these up at each call, so it does not matter when and how a program imported ``get_state_dict``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import multiprocessing.spawn
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.state_dict as torchs
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp import api, sharded_grad_scaler, wrap
from fsdp import fully_sharded_data_parallel as wrapper
from fsdp.checkpoint import torch_state_dict
from fsdp.checkpoint.optim_names import ModelParams
from fsdp.comm.consensus import ranks_of
from fsdp.comm.groups import default_group
from fsdp.export.weights import WeightStream
from fsdp.flat.flat_param import FlatParameter
from fsdp.flat.names import clean, plain_modules
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.names import fsdp1
from fsdp.patches import ABSENT, DCP, FSDP1, Change, Entry, Replacement
from fsdp.runtime.unit import units_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of functions that it compiles there
    import torch.distributed.optim as torchs_optim

__all__ = ["disable_dcp", "enable_dcp", "patch", "unpatch"]


def patch(*, imported: bool = True) -> list[str]:
    """Run programs that use torch's FSDP1 on this package, in this process and in processes that it spawns, until
    :func:`unpatch`. All ranks have to call it; a second call is a no-op.

    * The FSDP1 names of ``torch.distributed.fsdp``, ``.fully_sharded_data_parallel``, ``.api``, ``.wrap`` and
      ``.sharded_grad_scaler`` become those of this package: the class, enums, configurations, policies,
      ``FlatParameter``, ``ShardedGradScaler``. FSDP2's names stay; ``register_fsdp_forward_method`` serves both.
      Modules and names that this version of torch lacks are added.
    * Private functions that tools call (``_lazy_init``, ``_root_pre_forward``, ``_unshard``, ``_reshard``,
      ``_unshard_params_for_summon``, ``_get_module_fsdp_state`` and more) take wrapped modules of this package.
    * :func:`enable_dcp` is included.
    * accelerate loads a sharded optimizer state into the state of an optimizer without steps, which is created here.
      peft finds the adapters of a model with nested wrappers, to save and to load them.

    Torch's own FSDP1 must not be used meanwhile.

    Args:
        imported: replace the names also in modules that have imported them already. Copies in containers, defaults and
            subclasses stay.

    Returns:
        the changed names, as ``module.name``.

    Raises:
        RuntimeError: a function of this version of torch has other parameters; no name was changed.
    """
    if FSDP1:
        return []
    changes = _changes_for_fsdp1(_others() if imported else ())
    prepare = multiprocessing.spawn.get_preparation_data
    changes.append(Replacement(multiprocessing.spawn, "get_preparation_data", prepare, _and_patch(prepare)))
    changes += [] if DCP else _changes_for_dcp()
    changes.append(Entry("sys.meta_path", _find_libraries))
    FSDP1.make(changes)
    for library in filter(None, map(sys.modules.get, _LIBRARIES)):
        _adapt(library)
    return [str(change) for change in FSDP1 if isinstance(change, Replacement)]


def _changes_for_fsdp1(others: Iterable[ModuleType]) -> list[Change]:
    """Return the changes of names in torch's modules and in ``others``, and the modules that torch lacks."""
    found = {name: _module(name) for name in (*_NAMES, *_PUBLIC)}
    lacking = {name: _PUBLIC.get(name) or ModuleType(name) for name, module in found.items() if module is None}
    modules = {**found, **lacking}
    pairs = [(modules[place], each) for place, names in _NAMES.items() for each in names]
    pairs += [(modules[place], each) for place in _PUBLIC if found[place] for each in _same_names(place)]
    present = [(place, each) for place, each in pairs if hasattr(place, each.name)]
    absent = [(place, each) for place, each in pairs if not hasattr(place, each.name)]
    _check_fits("patch", present, [], "import the names from fsdp in place of torch.distributed.fsdp")
    ours = {id(change.original): change.new for change in itertools.starmap(_change, present)}
    changes: list[Change] = [
        Replacement(owner, name, original, ours[id(original)])
        for owner in (*filter(None, found.values()), *others)
        for name, original in list(vars(owner).items())
        if id(original) in ours
    ]
    changes += [Replacement(place, each.name, ABSENT, each.ours) for place, each in absent]
    for name, module in lacking.items():
        package, _, last = name.rpartition(".")
        changes.append(Replacement(modules[package], last, ABSENT, module))
        changes.append(Entry("sys.modules", functools.partial(_add_module, name, module)))
    return changes


def unpatch() -> None:
    """Undo :func:`patch`; a no-op without it.

    Raises:
        RuntimeError: a name was replaced by a third object since; no name was changed.
    """
    FSDP1.undo("unpatch")


def enable_dcp() -> None:
    """Make torch's functions for state dicts take models of this package, until :func:`disable_dcp`.

    These are ``get_state_dict``, ``get_model_state_dict``, ``get_optimizer_state_dict`` and the ``set_`` counterparts
    of ``torch.distributed.checkpoint.state_dict``, however they were imported, and ``load_state_dict()`` of torch's
    ``_NamedOptimizer``. They call the functions of the same names in :mod:`fsdp.checkpoint`, with torch's
    ``StateDictOptions``. All ranks have to call it, since the functions communicate. A second call is a no-op.

    Raises:
        RuntimeError: this version of torch lacks some of the names; no name was changed.
    """
    if not DCP and not FSDP1:
        DCP.make(_changes_for_dcp())


def _changes_for_dcp() -> list[Change]:
    fields = getattr(vars(torchs).get("_StateDictInfo"), "__dataclass_fields__", {})
    lacking = [f"_StateDictInfo.{name}" for name in _ASKED if name not in fields]
    pairs: list[tuple[Any, _Name]] = [(torchs, each) for each in _OF_STATE_DICTS]
    if hasattr(torchs_optim, "_NamedOptimizer"):  # private, and for FSDP1 alone
        named = _Name("_pre_load_state_dict", _pre_load_state_dict, _has_wrapper)
        pairs.append((torchs_optim._NamedOptimizer, named))
    _check_fits("enable_dcp", pairs, lacking, "get_state_dict and set_state_dict of fsdp.checkpoint do the same")
    return list(itertools.starmap(_change, pairs))


def disable_dcp() -> None:
    """Undo :func:`enable_dcp`; a no-op without it.

    Raises:
        RuntimeError: a name was replaced by a third object since; no name was changed.
    """
    DCP.undo("disable_dcp")


# -- replacements of torch's functions of the same names, for models of this package -----------------------------------


def _get_model_state_dict(model: nn.Module, info: Any) -> Any:
    prefixes = {clean(prefix.removesuffix(".")) for prefix in info.submodule_prefixes}
    submodules = {module for path, module in plain_modules(model) if path in prefixes}
    return torch_state_dict.get_model_state_dict(model, submodules=submodules, options=info)


def _load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
    # set_state_dict() has checked for a model's state on this rank, not on rank 0
    ranks = ranks_of(units_of(model), [default_group()])
    if info.broadcast_from_rank0 and not ranks.first("ask for a model's state", lambda: info.handle_model):
        return _IncompatibleKeys([], [])
    # torch has flattened a dict of dicts by submodule with the submodules' names, which contain wrappers
    return torch_state_dict.set_model_state_dict(model, {clean(key): v for key, v in state_dict.items()}, options=info)


def _get_optim_state_dict(model: nn.Module, optimizers: Any, info: Any) -> Any:
    return torch_state_dict.get_optimizer_state_dict(model, optimizers, options=info)


def _load_optim_state_dict(model: nn.Module, optimizers: Any, state_dict: dict[str, Any], info: Any) -> None:
    torch_state_dict.set_optimizer_state_dict(model, optimizers, state_dict, options=info)


def _pre_load_state_dict(self: Any, state_dict: dict[str, Any]) -> Any:
    return FullyShardedDataParallel.optim_state_dict_to_load(
        self.module, self._optimizer, state_dict, is_named_optimizer=True
    )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    wrapper.register_forward_method(module, method_name)


def clean_tensor_name(tensor_name: str) -> str:
    return clean(tensor_name)


# -- replacements of functions of libraries, made of the originals ----------------------------------------------------


def _loading_into_new_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give an optimizer that has not stepped a state for accelerate's function to load into."""

    def load_fsdp_optimizer(
        fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: nn.Module, *rest: Any, **options: Any
    ) -> Any:
        inner = getattr(optimizer, "optimizer", optimizer)
        full = fsdp_plugin.state_dict_type is api.StateDictType.FULL_STATE_DICT
        is_new = _has_wrappers(model) and not inner.state and not full
        if is_new:
            with torch_state_dict.initialised(inner, ModelParams(model)):
                made = dict(inner.state)
            inner.state.update(made)
        try:
            return original(fsdp_plugin, accelerator, optimizer, model, *rest, **options)
        except BaseException:
            if is_new:
                inner.state.clear()
            raise

    return load_fsdp_optimizer


def _getting_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Show peft's function names of modules as in state dicts. It removes parts of wrappers only where names begin."""

    def get_peft_model_state_dict(model: nn.Module, *rest: Any, **options: Any) -> Any:
        named_modules = model.named_modules

        def clean_names(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
            return ((clean(name), module) for name, module in named_modules(*args, **kwargs))

        with _showing(model, "named_modules", clean_names):
            return original(model, *rest, **options)

    return get_peft_model_state_dict


def _setting_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Show peft's function, besides, all keys and shapes, on the meta device and without communication. It reads these
    from a state dict, which with ``rank0_only`` is empty on all ranks but one."""

    def set_peft_model_state_dict(model: nn.Module, *rest: Any, **options: Any) -> Any:
        units = units_of(model)
        if not units or any(unit.groups.tp is not None for unit in units):
            return with_clean_names(model, *rest, **options)
        infos = WeightStream(model, None, None, None).metadata()
        shapes = {info.name: torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos}
        with _showing(model, "state_dict", lambda: dict(shapes)):
            return with_clean_names(model, *rest, **options)

    with_clean_names = _getting_adapters(original)
    return set_peft_model_state_dict


@contextlib.contextmanager
def _showing(model: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of ``model``."""
    vars(model)[name] = method
    try:
        yield
    finally:
        vars(model).pop(name, None)


def _is_wrapper(module: nn.Module, *rest: Any) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _has_wrappers(module: nn.Module, *rest: Any) -> bool:
    return bool(units_of(module))


def _has_model(model: nn.Module, *rest: Any) -> bool:
    return (rest[-1].handle_model or rest[-1].broadcast_from_rank0) and bool(units_of(model))


def _has_optimizer(model: nn.Module, *rest: Any) -> bool:
    return rest[-1].handle_optim and bool(units_of(model))


def _has_wrapper(self: Any, state_dict: dict[str, Any]) -> bool:
    return isinstance(self.module, FullyShardedDataParallel)


# -- replacing names --------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """A name of torch, and the object of this package for it.

    Attributes:
        name: torch's name.
        ours: the object of this package. A function has the parameters of torch's.
        applies: for a function, given the arguments of a call: True if ours is called, False if torch's is called.
    """

    name: str
    ours: Any
    applies: Callable[..., bool] | None = None


_OF_STATE_DICTS = [
    _Name("_get_model_state_dict", _get_model_state_dict, _has_model),
    _Name("_load_model_state_dict", _load_model_state_dict, _has_model),
    _Name("_get_optim_state_dict", _get_optim_state_dict, _has_optimizer),
    _Name("_load_optim_state_dict", _load_optim_state_dict, _has_optimizer),
]
_ASKED = ("handle_model", "handle_optim", "submodule_prefixes", "broadcast_from_rank0")  # of torch's _StateDictInfo
_FSDP = "torch.distributed.fsdp"
_PUBLIC: dict[str, Any] = {  # modules of torch's FSDP1, and ours with the same names
    f"{_FSDP}.api": api,
    f"{_FSDP}.wrap": wrap,
    f"{_FSDP}.fully_sharded_data_parallel": wrapper,
    f"{_FSDP}.sharded_grad_scaler": sharded_grad_scaler,
}
_NAMES = {  # names of torch's other modules
    _FSDP: [
        *(_Name(name, getattr(api, name)) for name in api.__all__ if not name.startswith("Ragged")),
        _Name("FullyShardedDataParallel", FullyShardedDataParallel),
        _Name("FlatParameter", FlatParameter),
        _Name("register_fsdp_forward_method", register_fsdp_forward_method, _is_wrapper),
    ],
    f"{_FSDP}._flat_param": [_Name("FlatParameter", FlatParameter)],
    f"{_FSDP}._common_utils": [
        _Name("_FSDPState", FullyShardedDataParallel),
        _Name("clean_tensor_name", clean_tensor_name),
        _Name("_get_module_fsdp_state", fsdp1._get_module_fsdp_state, _is_wrapper),
        _Name(
            "_get_module_fsdp_state_if_fully_sharded_module",
            fsdp1._get_module_fsdp_state_if_fully_sharded_module,
            _is_wrapper,
        ),
        _Name("_has_fsdp_params", fsdp1._has_fsdp_params, _is_wrapper),
        _Name("_module_handle", fsdp1._module_handle, _is_wrapper),
        _Name("_get_param_to_fqns", fsdp1._get_param_to_fqns, _has_wrappers),
    ],
    f"{_FSDP}._runtime_utils": [
        _Name("_lazy_init", fsdp1._lazy_init, _is_wrapper),
        _Name("_root_pre_forward", fsdp1._root_pre_forward, _is_wrapper),
        _Name("_unshard", fsdp1._unshard, _is_wrapper),
        _Name("_reshard", fsdp1._reshard, _is_wrapper),
        _Name("_post_backward_final_callback", fsdp1._post_backward_final_callback, _is_wrapper),
    ],
    f"{_FSDP}._unshard_param_utils": [
        _Name("_unshard_params_for_summon", fsdp1._unshard_params_for_summon, _is_wrapper)
    ],
}
_LIBRARIES: dict[str, dict[str, Callable[..., Any]]] = {  # functions of libraries, and what makes the replacements
    "accelerate.utils.fsdp_utils": {"load_fsdp_optimizer": _loading_into_new_optimizers},
    "peft.utils.save_and_load": {
        "get_peft_model_state_dict": _getting_adapters,
        "set_peft_model_state_dict": _setting_adapters,
    },
}


def _change(owner: Any, named: _Name) -> Replacement:
    """Return the change of one name; a function is replaced by one that chooses between the two at each call."""
    original = getattr(owner, named.name)
    applies = named.applies
    if applies is None:
        return Replacement(owner, named.name, original, named.ours)
    parameters = inspect.signature(original)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        return (named.ours if applies(*given.args) else original)(*given.args, **given.kwargs)

    return Replacement(owner, named.name, original, chosen)


def _check_fits(function: str, pairs: Iterable[tuple[Any, _Name]], lacking: list[str], instead: str) -> None:
    """Raise RuntimeError if an owner lacks a function with the parameters of ours, or names are ``lacking``."""
    wrong = []
    for owner, each in pairs:
        wanted = list(inspect.signature(each.ours).parameters) if each.applies else []
        original = getattr(owner, each.name, None)
        if each.applies and (original is None or list(inspect.signature(original).parameters) != wanted):
            wrong.append(f"{each.name}({', '.join(wanted)})")
    if wrong or lacking:
        raise RuntimeError(
            f"{function}() does not fit this version of torch, {torch.__version__}, which lacks "
            f"{', '.join([*wrong, *lacking])}. Nothing was changed; {instead}"
        )


def _module(name: str) -> ModuleType | None:
    """Import a module of torch; return None if this version of torch has none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _add_module(name: str, module: ModuleType) -> Callable[[], object]:
    sys.modules[name] = module
    return lambda: sys.modules.pop(name)


def _same_names(place: str) -> Iterator[_Name]:
    """Yield the objects of a public module of torch for which this package has one with the same name."""
    for name, value in vars(sys.modules[place]).items():
        if getattr(value, "__module__", None) == place and hasattr(_PUBLIC[place], name):
            yield _Name(name, getattr(_PUBLIC[place], name))


def _others() -> Iterable[ModuleType]:
    """Return all imported modules except those of torch and of this package, each once."""
    named = [(name.partition(".")[0], module) for name, module in list(sys.modules.items())]
    foreign = [each for top, each in named if isinstance(each, ModuleType) and top not in ("torch", "fsdp")]
    return {id(module): module for module in foreign}.values()


class _PatchedChild:
    """An object that calls ``patch`` when a spawned process unpickles it, before the program's main module."""

    def __reduce__(self) -> Any:
        return patch, ()


def _and_patch(prepare: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    return lambda name: {**prepare(name), "patched by fsdp": _PatchedChild()}


def _adapt(library: ModuleType) -> None:
    for name, replace in _LIBRARIES[library.__name__].items():
        original = getattr(library, name, None)
        if original is not None:  # else this version does not need the adaptation
            replacement = replace(original)
            owners = [module for module in _others() if vars(module).get(name) is original]
            FSDP1.make([Replacement(owner, name, original, replacement) for owner in owners])


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that adapts modules of libraries which are imported after ``patch``."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if FSDP1:
                    _adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _find_libraries() -> Callable[[], None]:
    sys.meta_path.insert(0, _finder)
    return lambda: sys.meta_path.remove(_finder)
