"""The parameters that a unit owns, in buckets: all of the subtree, except those of nested units and ignored ones.

Before they are flattened, they are materialized from the meta device, moved, and synchronized from rank 0. Units are
flattened one by one, innermost first, so that the peak of memory is the sharded model plus one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp import environment
from fsdp.api import FlatParamKey, MixedPrecision
from fsdp.comm.collectives import broadcast
from fsdp.comm.groups import Groups, backend_of
from fsdp.comm.streams import default_device, resolve_device
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.flat_param import FlatParameter
from fsdp.flat.layout import FlatLayout, ParamSpec
from fsdp.flat.names import WRAPPED_MODULE, joined, own_modules
from fsdp.flat.registration import Site
from fsdp.flat.tensor_parallel import EXPERTS, TensorParallel, local_of
from fsdp.flat.unwritten import MarkEmpty, moved

ONE_UNIT_ONLY = (
    "A parameter can be sharded by one unit only: make the two modules that have it one unit by "
    "FullyShardedDataParallel.group(), or wrap the lowest module that contains both, and neither of the two apart"
)
_TORCH = "torch.distributed.fsdp"  # never imported
_GATHER_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")  # FSDP2 gathers tensor subclasses by these
ALIGNMENT = 16  # bytes; collectives and kernels have slow paths for less aligned memory


@dataclass
class OwnedParam:
    """A parameter of the unit, with each registration of it; the first one gives the name."""

    param: nn.Parameter
    sites: list[Site]
    tp: TensorParallel | None = None  # the placement by tensor parallelism; then ``param`` is this rank's part
    dtensor: nn.Parameter | None = None  # the registered ``DTensor``, which ``param`` replaces

    @property
    def name(self) -> str:
        return self.sites[0].name


def owned_params(module: nn.Module, ignored: Ignored, unit_name: str, groups: Groups | None = None) -> list[OwnedParam]:
    """Return the parameters of the unit of ``module``, in registration order, depth first, each once. ``groups`` will
    shard them.

    Raises:
        ValueError: a parameter already belongs to another unit, or it, or the module, is of a kind that cannot be
            flattened.
        NotImplementedError: the same for a ``DTensor``; see ``TensorParallel``.
    """
    owned = []
    for param, sites in _sites_of(module, ignored):
        _check(param, sites, unit_name)
        if isinstance(param, DTensor):
            declared = vars(sites[0].module).get(EXPERTS, {}).get(sites[0].attribute)
            tp = TensorParallel.of(param, f"{sites[0].name!r} of {unit_name}", groups, declared)
            local = nn.Parameter(local_of(param).detach(), param.requires_grad)
            local.__dict__.update(param.__dict__)
            owned.append(OwnedParam(local, sites, tp, param))
        else:
            owned.append(OwnedParam(param, sites))
    placed = [(item.name, item.tp) for item in owned if item.tp is not None]
    several = {(tuple(tp.spec.mesh.mesh.tolist()), tp.experts): name for name, tp in placed}
    if len(several) > 1:
        kinds = {True: " (experts)", False: ""}
        raise NotImplementedError(
            f"{unit_name} has parameters of tensor parallelism over different ranks, or experts next to others: "
            f"{', '.join(f'{name!r} over {list(ranks)}{kinds[own]}' for (ranks, own), name in several.items())}"
        )
    return owned


def check_not_wrapped(module: nn.Module, ignored: Ignored) -> None:
    """Check that no engine shards or replicates ``module`` already.

    Raises:
        ValueError: torch's own FSDP has wrapped ``module``, or a module inside or around it; or
            ``DistributedDataParallel`` has wrapped ``module``, or a module inside that is not ignored.
    """
    found = torchs_own(module)
    if found is not None:
        raise ValueError(
            f"{found}, which cannot be nested in this package's FullyShardedDataParallel: wrap the whole model with "
            "one of the two"
        )
    if not any(issubclass(kind, DistributedDataParallel) for kind in set(map(type, module.modules()))):
        return
    for name, submodule in module.named_modules():
        if isinstance(submodule, DistributedDataParallel) and submodule not in ignored.modules:
            where = f"{name!r} in the module to wrap" if name else "the module to wrap"
            raise ValueError(
                f"{where} is a DistributedDataParallel, which reduces gradients by itself: pass the model without it, "
                "FullyShardedDataParallel(model), or FullyShardedDataParallel(ddp.module)"
            )


def torchs_own(module: nn.Module, *, fully_shard: bool = True) -> str | None:
    """Describe the module that torch's own FSDP has wrapped, in or around ``module``; with ``fully_shard`` also the one
    that ``fully_shard`` has."""
    modules = list(module.modules())
    if any(torchs_base_of(kind, fully_shard) for kind in set(map(type, modules))):
        for name, submodule in module.named_modules():
            if found := torchs_base_of(type(submodule), fully_shard):
                return f"{repr(name) if name else 'the module'} is already wrapped by {found}"
    flattened = (p for m in modules for p in m._parameters.values() if getattr(p, "_fsdp_flattened", False))
    if any(_is_torchs(param) for param in flattened):
        name = next(name for name, param in module.named_parameters() if _is_torchs(param))
        return f"parameter {name!r} is already sharded by {_TORCH}.FullyShardedDataParallel"
    return None


def torchs_base_of(kind: type, fully_shard: bool) -> str | None:
    """Return the name of the class of torch's own FSDP that ``kind``, a class of modules, derives from."""
    classes = ("FullyShardedDataParallel", "FSDPModule") if fully_shard else ("FullyShardedDataParallel",)
    bases = (base for base in kind.__mro__ if base.__module__.startswith(_TORCH) and base.__name__ in classes)
    return next((f"{base.__module__}.{base.__name__}" for base in bases), None)


def _is_torchs(param: object) -> bool:
    foreign = not isinstance(param, FlatParameter) and not hasattr(param, "_fsdp_owner")
    return foreign and getattr(param, "_fsdp_flattened", False)


def _sites_of(module: nn.Module, ignored: Ignored) -> list[tuple[nn.Parameter, list[Site]]]:
    """Return each parameter below ``module`` that is neither ignored nor in a nested unit, with all registrations."""
    found: dict[int, tuple[nn.Parameter, list[Site]]] = {}  # by id: the hash of a tensor is a Python function
    skipped = set(map(id, ignored.params))
    for prefix, owner in own_modules(module):
        order = list(owner._parameters.keys())  # no iterator in a compiled script
        for attribute, param in owner._parameters.items():
            if param is None or id(param) in skipped:
                continue
            site = Site(owner, attribute, joined(prefix, attribute), order)
            if id(param) not in found:
                found[id(param)] = param, [site]
            elif all((other.module, other.attribute) != (owner, attribute) for other in found[id(param)][1]):
                found[id(param)][1].append(site)
    return list(found.values())


def warn_of_shared_memory(module: nn.Module, ignored: Ignored) -> None:
    """Warn of each parameter, other than nested units' and ignored ones, that begins at the address of another one."""
    first: dict[int, str] = {}
    for param, sites in _sites_of(module, ignored):
        plain = type(param) is nn.Parameter and param.layout == torch.strided and not param.is_meta
        if not plain or param.numel() == 0 or hasattr(param, "_fsdp_in_shared_memory"):
            continue
        name = first.setdefault(param.data_ptr(), sites[0].name)
        if name != sites[0].name:
            param._fsdp_in_shared_memory = True  # type: ignore[attr-defined] # warn once, not in each unit inside
            warn_user(
                f"parameters {name!r} and {sites[0].name!r} are two nn.Parameter objects over one memory: each gets "
                "memory of its own, and their values part at the first step. To train them as one, assign the "
                "nn.Parameter itself before wrapping (head.weight = embed.weight), not its .data"
            )


def _check(param: nn.Parameter, sites: list[Site], unit_name: str) -> None:
    name = sites[0].name
    if getattr(param, "_fsdp_flattened", False):
        other = getattr(param, "_fsdp_owner", "a flat parameter")
        if any("_is_fsdp_managed_module" in site.module.__dict__ for site in sites):
            raise ValueError(
                f"parameter {name!r} of {unit_name} lies in a module that was wrapped before, as {other}, and the "
                "wrapper is not in the model. FullyShardedDataParallel(layer) returns a wrapper, unlike torch's "
                "fully_shard(layer): assign it, as in model.layers[0] = FullyShardedDataParallel(model.layers[0]). Or "
                "wrap the model alone, with auto_wrap_policy=ModuleWrapPolicy({type of the layers})"
            )
        raise ValueError(
            f"parameter {name!r} of {unit_name} is shared with {other}, which already owns it. {ONE_UNIT_ONLY}"
        )
    for site in sites:
        if isinstance(site.module, torch.jit.ScriptModule):
            raise ValueError(
                f"parameter {name!r} of {unit_name} is in a compiled script (torch.jit), whose parameters cannot be "
                "sharded. Wrap the module that the script was made of, or pass the script in ignored_modules"
            )
    if type(param) is not nn.Parameter and isinstance(param, nn.UninitializedParameter):
        raise ValueError(
            f"parameter {name!r} of {unit_name} is not initialised yet (a lazy module): run one forward of the plain "
            "model before wrapping it"
        )
    if type(param) is not nn.Parameter:
        kind = type(local_of(param.detach()))
        for hook in _GATHER_HOOKS:
            if hasattr(kind, hook):
                raise NotImplementedError(
                    f"parameter {name!r} of {unit_name} is a {kind.__name__} with {hook}(), which this package would "
                    "not call: it gathers shards as plain tensors. Make the parameter a plain tensor, or pass it in "
                    "ignored_states"
                )
    if param.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} of {unit_name} has layout {param.layout}; only strided parameters can be sharded"
        )


def _memory_order(param: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor that is not row-major; None to store the parameter row-major."""
    if param.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(param):
        return None
    return tuple(param.stride())


def bucket_layouts(
    owned: list[OwnedParam],
    shard_size: int,
    on_cpu: bool,
    precision: MixedPrecision,
    *,
    use_orig_params: bool,
    key: FlatParamKey | None = None,
) -> list[tuple[FlatLayout, list[OwnedParam]]]:
    """Return the layout of each bucket of (dtype, ``requires_grad``, label by ``key``) over ``shard_size`` ranks, in
    order of first appearance, trainable ones first.

    On accelerators shards and parameters are aligned to 16 bytes. On CPU shards are what ``torch.chunk`` gives, and
    only original parameters are aligned, not those in a flat parameter. ``FSDP_SHARD_ALIGNMENT`` (bytes) overrides it,
    on every rank.
    """
    buckets: dict[tuple[torch.dtype, bool, Hashable], list[OwnedParam]] = {}
    for item in owned:
        label = None if key is None else _label_of(item, key)
        buckets.setdefault((item.param.dtype, item.param.requires_grad, label), []).append(item)
    shard_alignment = environment.SHARD_ALIGNMENT.value or (1 if on_cpu else ALIGNMENT)
    layouts = []
    for (dtype, _, _), members in sorted(buckets.items(), key=lambda entry: not entry[0][1]):
        specs = [
            ParamSpec(
                name=item.name,
                shape=tuple(item.param.shape),
                stride=_memory_order(item.param),
                aliases=tuple(site.name for site in item.sites[1:]),
            )
            for item in members
        ]
        layout = FlatLayout.build(
            specs,
            dtype=dtype,
            world_size=shard_size,
            compute_dtype=precision.compute_dtype_of(dtype),
            reduce_dtype=precision.reduce_dtype_of(dtype),
            param_alignment=ALIGNMENT if use_orig_params or shard_alignment > 1 else 1,
            shard_alignment=shard_alignment,
        )
        layouts.append((layout, members))
    return layouts


def _label_of(item: OwnedParam, key: FlatParamKey) -> Hashable:
    label = key(item.name, item.param if item.dtensor is None else item.dtensor)
    try:
        hash(label)
    except TypeError:
        raise TypeError(
            f"expected flat_param_key to return a hashable label, such as a bool or a string, but for {item.name!r} it "
            f"returned {label!r}"
        ) from None
    return label


# -- ignored modules and parameters ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ignored:
    """The modules and parameters that no unit owns. A module includes all modules below, except nested units."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()

    @staticmethod
    def of(
        module: nn.Module,
        ignored_modules: Iterable[nn.Module] | None,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    ) -> Ignored:
        """Collect the two arguments of the constructor, and subtrees under torch's composable ``replicate``.

        Raises:
            TypeError: ``ignored_modules`` is not iterable.
            ValueError: an element is of the wrong kind or a wrapped module, or ``ignored_states`` mixes kinds.
        """
        params: set[nn.Parameter] = set()
        if ignored_states is not None:
            states = list(ignored_states)  # may be a generator
            types = sorted({type(state) for state in states}, key=lambda kind: kind.__name__)
            if all(isinstance(state, nn.Parameter) for state in states):
                params.update(states)  # type: ignore[arg-type]
            elif all(isinstance(state, nn.Module) for state in states):
                ignored_modules = states  # type: ignore[assignment]
            else:
                raise ValueError(
                    f"ignored_states expects all nn.Parameter or all nn.Module elements but got types {types}"
                )
        try:
            named = list(ignored_modules or ())
        except TypeError as error:
            raise TypeError(
                f"ignored_modules should be an iterable of nn.Modules but got {type(ignored_modules)}"
            ) from error
        modules: set[nn.Module] = set()
        for ignored in named:
            if not isinstance(ignored, nn.Module):
                raise ValueError(f"ignored_modules expects nn.Module elements but got types [{type(ignored)}]")
            if WRAPPED_MODULE in ignored._modules:
                raise ValueError(
                    "`ignored_modules` should not include FSDP modules: a wrapped module cannot be ignored"
                )
            if ignored is module:
                warn_user(
                    "the module being wrapped is in ignored_modules: all of it is ignored, and nothing is sharded"
                )
            modules.update(below for _, below in own_modules(ignored))
        for _, below in own_modules(module):
            if "replicate" in below.__dict__.get(REGISTRY_KEY, ()):
                modules.update(inner for _, inner in own_modules(below))
        for ignored in modules:
            params.update(param for param in ignored._parameters.values() if param is not None)
        for param in params:
            param._fsdp_ignored = True  # type: ignore[attr-defined]
        return Ignored(frozenset(modules), frozenset(params))


# -- before flattening -------------------------------------------------------------------------------------------------


def materialize(
    module: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    device_id: int | str | torch.device | None,
    unit_name: str,
) -> None:
    """Give the unit's meta parameters and buffers memory and values, module by module.

    ``param_init_fn`` is called with each module of the unit; it should initialize the module's own parameters and
    buffers. Without it, each module with meta tensors is emptied on the device, and ``reset_parameters()`` is called.

    Raises:
        ValueError: ``param_init_fn`` left a parameter on the meta device.
    """
    on_meta = meta_modules(module, ignored)
    if not on_meta:
        return
    ties = [sites for _, sites in _sites_of(module, ignored) if len(sites) > 1]
    if param_init_fn is not None:
        with MarkEmpty():
            for _, owner in _breadth_first(module, ignored):
                param_init_fn(owner)
    else:
        device = resolve_device(device_id) if device_id is not None else default_device()
        with torch.no_grad(), MarkEmpty():
            for _, owner in on_meta:
                owner.to_empty(device=device, recurse=False)
                owner.reset_parameters()  # type: ignore[operator]
    for first, *others in ties:  # each module has new parameters of its own
        for site in others:
            setattr(site.module, site.attribute, getattr(first.module, first.attribute))
    for name, owner in meta_modules(module, ignored):
        raise ValueError(
            f"param_init_fn left parameters or buffers of {name or unit_name!r} ({type(owner).__name__}) on the meta "
            "device; it has to give every module's own ones memory, for instance by "
            "module.to_empty(device=..., recurse=False)"
        )


def check_initialisers(module: nn.Module, ignored: Ignored, unit_name: str) -> None:
    """Raise AttributeError, with all names, if ``materialize`` without ``param_init_fn`` cannot initialize modules."""
    lacking = [
        f"{name or 'itself'} ({type(owner).__name__})"
        for name, owner in meta_modules(module, ignored)
        if not callable(getattr(owner, "reset_parameters", None))
    ]
    if lacking:
        raise AttributeError(
            f"{unit_name} is on the meta device, and these of its modules have no reset_parameters() to initialise "
            f"them: {', '.join(lacking)}. Give them one, or pass param_init_fn="
        )


def _breadth_first(module: nn.Module, ignored: Ignored) -> list[tuple[str, nn.Module]]:
    names: dict[nn.Module, str] = {}
    for name, owner in own_modules(module):
        if owner not in ignored.modules:
            names.setdefault(owner, name)
    return sorted(((name, owner) for owner, name in names.items()), key=lambda item: item[0].count(".") + bool(item[0]))


def meta_modules(module: nn.Module, ignored: Ignored) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the modules of the unit that have parameters or buffers on the meta device, breadth
    first."""
    return [
        (name, owner)
        for name, owner in _breadth_first(module, ignored)
        if any(
            param is not None and param.is_meta and param not in ignored.params for param in owner._parameters.values()
        )
        or any(buffer is not None and buffer.is_meta for buffer in owner._buffers.values())
    ]


def move_to(
    module: nn.Module,
    owned: list[OwnedParam],
    ignored: Ignored,
    device_id: int | str | torch.device | None,
    inner: Iterable[torch.device] = (),
    group: ProcessGroup | None = None,
) -> torch.device:
    """Move the unit's parameters, and the buffers of the modules, to the device of the unit, and return that.

    The device is ``device_id`` if given, else the accelerator that the parameters are on. For parameters on CPU it is
    the current accelerator, with a warning. It is the CPU without an accelerator, or if ``group`` serves the CPU alone.
    A unit without parameters computes on the device of the units inside (``inner``). Parameters stay the same objects.

    Raises:
        RuntimeError: parameters lie on several accelerator devices, or partly on one without ``device_id``.
        ValueError: they lie on another accelerator device than ``device_id``.
    """
    devices = sorted({item.param.device for item in owned}, key=str)
    away = [device for device in devices if device.type != "cpu"]
    if len(away) > 1:
        raise RuntimeError(f"a unit's parameters must lie on one device, got {', '.join(map(str, away))}")
    if device_id is None:
        if away and len(devices) > 1:
            raise RuntimeError(
                f"a unit's parameters lie on CPU and on {away[0]}: pass device_id= to move them to one device"
            )
        if away:
            return away[0]
        target = default_device()
        if group is not None and backend_of(group, target) == "unknown" != backend_of(group, torch.device("cpu")):
            target = torch.device("cpu")
        inner = [] if owned else sorted(set(inner), key=lambda device: device.type == "cpu")
        if inner or target.type == "cpu":
            return inner[0] if inner else target
        if owned:
            warn_user(
                f"the parameters lie on CPU, and there is an accelerator: they are moved to its current device, "
                f"{target}, and the unit computes there. Pass device_id= to say where it is to compute, "
                "device_id='cpu' for the CPU"
            )
    else:
        target = resolve_device(device_id)
        if target.index is not None and torch.device(device_id).index is None:
            warn_user(f"device_id={device_id!r} has no index; the current device, {target}, is used")
    if away and away[0] != target:
        raise ValueError(
            f"device_id is {target}, but parameters lie on {away[0]}: move them there first or drop device_id"
        )
    with torch.no_grad():
        for item in owned if devices != [target] else ():
            item.param.data = item.param.data.to(target)
        for _, owner in own_modules(module):
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.device.type == "cpu" and owner not in ignored.modules:
                    owner._buffers[name] = moved(buffer, target)
    return target


def count_writes(owned: Iterable[OwnedParam]) -> None:
    """Turn parameters from inference mode, which have no version counters, into ordinary ones; they stay the same
    objects."""
    for param in [item.param for item in owned if item.param.is_inference()]:
        ordinary: Any = torch.Tensor._make_subclass(type(param), param.detach().clone(), param.requires_grad)
        ordinary.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, ordinary)


def own_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of the unit of ``module``, without those of nested units, each once."""
    owners = [owner for _, owner in own_modules(module)]
    found = dict.fromkeys(buffer for owner in owners for buffer in owner._buffers.values() if buffer is not None)
    return [local_of(buffer).detach() for buffer in found]


def synchronize(tensors: list[torch.Tensor], groups: Groups) -> None:
    """Give ``tensors`` the values of the first rank of the shard group, in the first replica."""
    if groups.replica is not None and groups.shard_rank == 0:  # the other ranks receive them in the shard group
        broadcast(tensors, groups.replica)
    if groups.shard is not None:
        broadcast(tensors, groups.shard)
