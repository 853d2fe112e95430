"""The norm of a tree's gradients, and clipping by it.

[Note: Gradients that count]
The parts of a sharded gradient lie on the ranks of the unit's shard group, and are combined over that group. The units
of one group share one all-reduce. Ranks that clip by different norms drift apart, so the norm has to be equal on all
ranks of the root's group. Therefore all other parts go into the all-reduce over that group: each of the N ranks
contributes 1/N of the p-th powers (for the infinity norm, all of it). These are:

* gradients of ``NO_SHARD`` units, which are equal on all ranks and count once;
* gradients of parameters that no unit manages, which may differ between ranks;
* the sums over groups that are not the root's.

A unit over fewer ranks than the root holds experts, which differ between its group and the others. The sum of such a
group of n ranks counts whole: each rank contributes 1/n of it. Where the root has replicas, of which the result is the
mean, each contributes that many times as much.

The norm is NaN or infinite where any gradient is. Replicas of a sharded root have equal gradients, bit for bit, and so
equal norms. An all-reduce over the replicas follows only if contributions that may differ are in the norm. With tensor
parallelism, a sum over those ranks is first: each contributes the local parts of parameters that are cut, and a share
of the rest.

[Note: Precision of the norm]
A norm in float32 is good to six digits only where sums are short. On accelerators they are, since thousands of threads
share the work. On CPU one sum runs along the whole tensor and is off by a thousandth at 20 million elements: there
pieces that fit into the cache are summed in float64.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from fsdp import patches
from fsdp.comm.collectives import combine
from fsdp.comm.groups import group_ranks
from fsdp.comm.lane.issuing import REDUCE
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.tensor_parallel import local_of
from fsdp.runtime.unit import Unit, every_unit

_PIECE = 1 << 16  # elements
_STABILIZER = 1e-6  # added to the norm before it divides, as in torch.nn.utils.clip_grad_norm_


class _NoSuchNorm(ValueError, ZeroDivisionError):
    """The error for norm order 0, which raises ZeroDivisionError in FSDP1."""


class _PowerSum:
    """A p-norm as a sum of p-th powers, which adds up over tensors and ranks."""

    largest = False

    def __init__(self, p: float) -> None:
        self.p = p

    def part(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the contribution of tensors with these ``norms``."""
        return norms.pow(self.p).sum().view(1)

    def share(self, part: torch.Tensor, ranks: float) -> torch.Tensor:
        """Return the contribution of each of ``ranks`` ranks that all have ``part``; together they contribute it
        once."""
        return part / ranks

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    def norm(self, part: torch.Tensor) -> torch.Tensor:
        """Return the norm (0-d) of the contribution ``part``."""
        return part[0].pow(1 / self.p)


class _Largest:
    """The infinity norm. Backends differ in the order of NaN and numbers, so a flag for NaN travels next to the
    number."""

    largest = True

    def part(self, norms: torch.Tensor) -> torch.Tensor:
        greatest = torch.cat([norms, norms.new_zeros(1)]).amax()
        return torch.stack([greatest.nan_to_num(nan=math.inf, posinf=math.inf), greatest.isnan().to(norms.dtype)])

    def share(self, part: torch.Tensor, ranks: float) -> torch.Tensor:
        return part

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.maximum(one, other)

    def norm(self, part: torch.Tensor) -> torch.Tensor:
        return torch.where(part[1] > 0, math.nan, part[0])


def _order(norm_type: float | str) -> tuple[float, _PowerSum | _Largest]:
    """Return the order and the norm. Raise ValueError (for 0 also a ZeroDivisionError) if there is no such norm."""
    p = float(norm_type)
    if p == 0:
        raise _NoSuchNorm("clip_grad_norm_() with norm_type=0: there is no such norm; expected 1, 2, inf, ...")
    if math.isnan(p) or p == -math.inf:
        raise ValueError(f"clip_grad_norm_() with norm_type={norm_type}: expected a number other than 0, or inf")
    return p, _Largest() if p == math.inf else _PowerSum(p)


@torch.no_grad()
def clip_grad_norm_(
    root: Unit,
    units: Sequence[Unit],
    params: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale the gradients of ``units`` and ``params`` (which may include the units' own) to a norm of ``max_norm``.

    See ``FullyShardedDataParallel.clip_grad_norm_`` for the result and the errors.
    """
    max_norm = float(max_norm)
    p, order = _order(norm_type)
    for unit in units:
        unit.check_gradients("clip_grad_norm_()")
    managed = {visible.param for unit in units for views in unit.views for visible in views.visible}
    others = [param for param in params if param not in managed]
    handles = [handle for unit in units for handle in unit.handles]
    dtypes = {param.dtype for param in others} | {each.dtype for unit in units for each in unit.gradients}
    wide = torch.float64 if any(dtype.to_real() == torch.float64 for dtype in dtypes) else torch.float32

    sharded: dict[ProcessGroup | None, _Grads] = {}  # by shard group, in the tree's order on every rank
    # by shard group, None for a single rank, and number of ranks
    experts: dict[tuple[ProcessGroup | None, int], _Grads] = {}
    whole, tp_group = _Grads([], []), _tp_group(units, others)
    for param in others:
        whole.add_unmanaged(param)
    for unit in units:
        for views in unit.views:
            group = unit.groups.shard if unit.groups.sharded else None
            if unit.holds_experts(unit.position.ranks):
                home = experts.setdefault((group, unit.groups.data_parallel_size), _Grads([], []))
            else:
                home = whole if group is None else sharded.setdefault(group, _Grads([], []))
            home.alike.extend(views.grad_parts())
            (home.cut if unit.groups.experts is None else home.alike).extend(views.grad_parts(cut=True))

    device = next((unit.device for unit in units if unit.handles), root.device)

    context = root.context
    assert context is not None
    if root.groups.data_ranks > root.groups.data_parallel_size:
        raise NotImplementedError(
            f"clip_grad_norm_() of {root.name} alone, of whose experts other ranks have others: call it for a module "
            "around it, wrapped over all ranks"
        )

    def combined(value: torch.Tensor, group: Any) -> torch.Tensor:
        context.passes.announce(group)
        combine(value, group, context.streams, "sum up the gradient norm", largest=order.largest)
        return value

    def part(grads: _Grads) -> torch.Tensor:
        of_all = order.part(_norms(grads.alike, p, wide, device))
        if tp_group is None:
            return of_all
        own = order.part(_norms(grads.cut, p, wide, device))
        return combined(order.join(order.share(of_all, tp_group.size()), own), tp_group)

    over = root.groups_for(REDUCE)
    everyone = over[0] if over else None
    with context.calling(f"clip_grad_norm_(norm_type={p})", often=True, gathers=False):
        parts = {group: part(grads) for group, grads in sharded.items()}
        own = parts.pop(everyone, None)
        total = part(whole)
        for group, value in parts.items():
            total = order.join(total, combined(value, group))
        replicas = math.prod(group.size() for group in over[1:])
        for (group, ranks), held in experts.items():
            value = part(held) if group is None else combined(part(held), group)
            value = order.share(value, ranks / replicas)
            own = value if own is None else order.join(own, value)
        if everyone is not None and (own is not None or parts or others):  # see [Note: Gradients that count]
            share = order.share(total, everyone.size())
            total = combined(share if own is None else order.join(own, share), everyone)
            for group in over[1:] if parts or others or experts else ():
                total = combined(order.share(total, group.size()), group)
    norm = order.norm(total).to(wide)

    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_(): the total norm of order {p} of the gradients is {float(norm)}, so they cannot be "
            "clipped. To scale them by it anyway, pass error_if_nonfinite=False"
        )
    coefficient = (max_norm / (norm + _STABILIZER)).clamp(max=1.0)  # no branch: the host would wait
    for (place, dtype), grads in _by_kind(
        grad for of_group in (whole, *sharded.values(), *experts.values()) for grad in (*of_group.alike, *of_group.cut)
    ):
        torch._foreach_mul_(grads, coefficient.to(device=place, dtype=dtype))
    return norm.cpu() if any(handle.keeps_gradients_on_host for handle in handles) else norm


class _Grads(NamedTuple):
    """Gradients of the units of one group: ``cut`` by tensor parallelism, or ``alike`` on all ranks."""

    alike: list[torch.Tensor]
    cut: list[torch.Tensor]

    def add_unmanaged(self, param: nn.Parameter) -> None:
        """Add the gradient of a parameter that no unit manages, if it has one."""
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            if param.grad.placements != param.placements:  # partial sums: their norms are of no use
                param.grad = param.grad.redistribute(placements=param.placements)
            home = self.alike if all(placement.is_replicate() for placement in param.placements) else self.cut
        else:
            home = self.alike
        if param.grad is not None and (grad := local_of(param.grad)).numel():
            home.append(grad)


def _tp_group(units: Iterable[Unit], others: Iterable[nn.Parameter]) -> ProcessGroup | None:
    """Return the group of the tree's tensor parallelism; None where there is none.

    Raises:
        NotImplementedError: tensor parallelism over several groups of ranks.
    """
    groups = [unit.groups.tp for unit in units if unit.groups.experts is None]
    groups += [param.device_mesh.get_group() for param in others if isinstance(param, DTensor)]
    found = {tuple(group_ranks(group)): group for group in groups if group is not None}
    if len(found) > 1:
        raise NotImplementedError(
            f"clip_grad_norm_() of a model with tensor parallelism over several groups of ranks: {list(found)}"
        )
    return next(iter(found.values()), None)


def _norms(grads: Iterable[torch.Tensor], p: float, wide: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the norms of ``grads``, which have elements, or of pieces: 1-D on ``device``, in float64 on CPU and
    in ``wide`` elsewhere."""
    dtype = torch.float64 if device.type == "cpu" else wide
    norms = [torch.empty(0, dtype=dtype, device=device)]
    for (place, _), several in _by_kind([grad.abs() if grad.is_complex() else grad for grad in grads]):
        if place.type == "cpu":  # see [Note: Precision of the norm]
            pieces = [piece for grad in several for piece in grad.reshape(-1).split(_PIECE)]
            found = torch._foreach_norm(pieces, p, dtype=torch.float64)
        else:
            found = torch._foreach_norm(several, p, dtype=wide)
        norms.append(torch.stack(list(found)).to(device=device, dtype=dtype))
    return torch.cat(norms)


def _get_grad_norm(
    params: Iterable[nn.Parameter], norm_type: float, zero: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the norm of this rank's gradients of ``params``, as one vector: float32 on ``device``, or ``zero`` if
    there are none. A helper of FSDP1 that tools call."""
    grads = [param.grad.detach() for param in params if param.grad is not None and param.grad.numel()]
    p, order = _order(norm_type)
    return order.norm(order.part(_norms(grads, p, torch.float32, device))).float() if grads else zero


def _by_kind(tensors: Iterable[torch.Tensor]) -> Iterable[tuple[tuple[torch.device, torch.dtype], list[torch.Tensor]]]:
    """Return ``tensors`` by device and dtype, as the kernels for many tensors require."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds.items()


def watch_torchs_clipping() -> None:
    """Warn, from now on, where torch's clipping computes the norm of this rank's shards alone, or of nothing.

    ``clip_grad_norm_`` does so with sharded parameters, or with parameters from before the wrapping, and
    ``get_total_norm`` with sharded gradients. Programs import these functions under names of their own. So the helpers
    that both call, by names in torch's module, are wrapped. ``clip_grads_with_norm_`` scales by a given norm, and is
    not checked.
    """
    patches.CLIPPING.install(_warning_of_params)
    patches.TOTAL_NORM.install(_warning_of_gradients)


def _warning_of_params(clips: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clips)
    def warn_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        params: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        flattened = any(getattr(param, "_fsdp_flattened", False) for param in params)
        replaced = [param for param in params if getattr(param, "_fsdp_replaced", False)]
        if flattened and not _sharded_params().isdisjoint(params):
            _warn_of_partial_norm("clip_grad_norm_", "parameters")
        elif replaced:
            warn_user(
                f"torch.nn.utils.clip_grad_norm_ was called on {len(replaced)} parameters from before they were "
                f"wrapped, the first one {replaced[0]._fsdp_owner}, which get no gradients: it does not clip those of "
                "the model. Call clip_grad_norm_() of the outermost wrapped module instead, which returns the norm"
            )
        clips(params, *args, **kwargs)

    return warn_and_clip


def _warning_of_gradients(by_kind: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(by_kind)
    def warn_and_group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            caller: Any = sys._getframe(1)
            from_user = caller.f_back.f_back.f_globals is not vars(clip_grad)  # past no_grad()
            if caller.f_code.co_name == "_get_total_norm" and from_user:
                given = {id(tensor) for each in tensors for tensor in each}
                if any(id(param) in given or id(param.grad) in given for param in _sharded_params()):
                    _warn_of_partial_norm("get_total_norm", "gradients")
        return by_kind(tensors, *args, **kwargs)

    return warn_and_group


def _sharded_params() -> set[torch.Tensor]:
    """Return the visible parameters of all sharded units of this process."""
    return {param for unit in every_unit() if unit.is_sharded for param in unit.visible_params()}


def _warn_of_partial_norm(function: str, given: str) -> None:
    warn_user(
        f"torch.nn.utils.{function} was called on sharded {given}: it sees this rank's shards only, and every rank "
        "clips by another norm. Call clip_grad_norm_() of the outermost wrapped module instead, which returns the norm"
    )
