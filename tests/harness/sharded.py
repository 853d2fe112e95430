"""Training under the package in the oracle's form, and full tensors assembled from the ranks' parts.

`run_fsdp` trains a case like `oracle.run_ddp` and returns the same `Step`s. `full_parameters`, `full_gradients` and
`full_optim_state` read shards only through the public metadata (`fsdp.shard_info`). Each rank contributes its ranges
of the parameters that users hold, and every rank gets full tensors by the plain model's parameter names. All run on
every rank of the default group and exchange Python objects (two all-gathers each; `run_fsdp` at its end for all
steps).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import fsdp
from fsdp import BucketInfo, FullyShardedDataParallel, ShardingStrategy
from fsdp.flat.layout import ParamRecord
from fsdp.runtime.unit import units_of
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Case
from tests.harness.oracle import MakeOptimizer, Schedule, Step, clean_name, mean_loss, rank_batch

BLOCKS = "blocks"  # the wrap policy that makes a unit of each of the case's blocks


def wrap(
    case_or_module: Case | nn.Module,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    use_orig_params: bool = False,
    *,
    wrap_policy: Any = BLOCKS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> FullyShardedDataParallel:
    """Wrap the case's model (built from `seed` in `dtype`), or a given module, on the default group.

    With the wrap policy `BLOCKS` each of the case's blocks is a unit beside the root; with None, or without blocks,
    the root alone. The warning about a group of one rank is silenced. `options` are further arguments of the
    wrapper.
    """
    if isinstance(case_or_module, Case):
        module = case_or_module.build(seed, dtype)
        blocks = case_or_module.blocks
    else:
        module, blocks = case_or_module, frozenset()
    policy = wrap_policy
    if policy is BLOCKS:
        policy = ModuleWrapPolicy(blocks) if blocks else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FullyShardedDataParallel: the group has one rank", UserWarning)
        return FullyShardedDataParallel(
            module, sharding_strategy=strategy, auto_wrap_policy=policy, use_orig_params=use_orig_params, **options
        )


def run_fsdp(
    case: Case,
    make_optimizer: MakeOptimizer,
    schedule: Schedule | None = None,
    *,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    use_orig_params: bool = False,
    wrap_policy: Any = BLOCKS,
    no_sync: Sequence[bool] | None = None,
    dtype: torch.dtype = torch.float32,
    rank0_only: bool = False,
    **options: Any,
) -> list[Step]:
    """Train under the package on the default group; ranks return equal results except for buffers, or only rank 0
    with `rank0_only`.

    `no_sync` selects the micro-batches of a step that run under `no_sync()`. The default is all except the last,
    unless the schedule reduces each. The model and batches are in `dtype`. `options` are further arguments of the
    wrapper.
    """
    schedule = schedule or Schedule()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if no_sync is None:
        no_sync = [not schedule.reduce_each and micro < schedule.micro - 1 for micro in range(schedule.micro)]
    model = wrap(case, strategy, use_orig_params, wrap_policy=wrap_policy, seed=schedule.seed, dtype=dtype, **options)
    optimizer = make_optimizer(model.parameters())
    taken = []
    for step in range(schedule.steps):
        for micro, unsynced in zip(range(schedule.micro), no_sync, strict=True):
            with model.no_sync() if unsynced else nullcontext():
                loss = case.loss(model, rank_batch(case, schedule, step, micro, rank, world_size).to(dtype))
                loss.backward()
        taken.append(_take_step(model, optimizer, loss))
    return _steps(model, taken, rank0_only)


def finish_step(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Step:
    """Step the optimizer on existing gradients, clear them, and return the `Step`."""
    return _steps(model, [_take_step(model, optimizer, loss)])[0]


class _Taken(NamedTuple):
    """Values of one step on this rank."""

    grads: Packed
    rest: Packed
    buffers: dict[str, Tensor]


def _take_step(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> _Taken:
    grads = _pack(_held(model, {"grads": _gradient}))
    optimizer.step()
    optimizer.zero_grad()
    rest = _pack(_held(model, {"params": _values, "optim": _state_of(optimizer)}, loss=loss))
    return _Taken(grads, rest, {clean_name(name): buffer.clone() for name, buffer in model.named_buffers()})


def _steps(model: nn.Module, taken: list[_Taken], rank0_only: bool = False) -> list[Step]:
    exchanged = _exchange([packed for step in taken for packed in (step.grads, step.rest)])
    if rank0_only and dist.get_rank() > 0:
        return []
    steps = []
    for grads, rest, step in zip(exchanged[::2], exchanged[1::2], taken, strict=True):
        by_rank = [_unpack(packed) for packed in rest]
        losses = [held["loss"][""].value for held in by_rank]
        steps.append(
            Step(
                loss=mean_loss(losses),
                rank_losses=losses,
                grads=_only_value(_assemble(model, [_unpack(packed) for packed in grads], "grads")),
                params=_only_value(_assemble(model, by_rank, "params")),
                optim=_without_empty(_assemble(model, by_rank, "optim")),
                buffers=step.buffers,
            )
        )
    return steps


# -- full tensors ------------------------------------------------------------------------------------------------


def handles_of(model: nn.Module) -> list[Any]:
    """The engine's handles of all buckets in ``model``, unit by unit."""
    return [handle for unit in units_of(model) for handle in unit.handles]


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters in their full shapes and strides."""
    return _only_value(_assemble(model, _gather(model, {"params": _values}), "params"))


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of the reduced gradients in full shapes; None if no rank with a part has one.

    A parameter without elements is None. AssertionError if some ranks have a gradient and some None, as after a
    backward without synchronization.
    """
    return _only_value(_assemble(model, _gather(model, {"grads": _gradient}), "grads"))


def full_optim_state(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return copies of the optimizer's state by parameter name, without parameters that have no state.

    States with the parameter's shape are full; further states (the number of steps) are unchanged.
    """
    return _without_empty(_assemble(model, _gather(model, {"optim": _state_of(optimizer)}), "optim"))


class Held(NamedTuple):
    """A rank's value: a part of a tensor with the parameter's shape (1-D, in memory order), or a whole value that
    all ranks have.

    The value None stands for a missing tensor.
    """

    value: Any  # Tensor | None
    is_part: bool


Contents = dict[str, dict[str, Held]]  # of one rank, by "kind/parameter" and key
Packed = tuple[list[str], list[tuple[str, str, Any, bool]], bytes]  # names, descriptions and bytes of all values
Select = Callable[[nn.Parameter], Mapping[str, Any]]  # values to read from a parameter of the user


def _values(param: nn.Parameter) -> Mapping[str, Any]:
    return {"": param.data}


def _gradient(param: nn.Parameter) -> Mapping[str, Any]:
    if param.grad is not None and param.grad.shape != param.shape:
        raise AssertionError(f"a gradient of shape {tuple(param.grad.shape)} on a shard of {tuple(param.shape)}")
    return {"": param.grad}


def _state_of(optimizer: Optimizer) -> Select:
    def state(param: nn.Parameter) -> Mapping[str, Any]:
        return {key: value for key, value in optimizer.state.get(param, {}).items() if value is not None}

    return state


def _only_value(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: by_key.get("") for name, by_key in values.items()}


def _without_empty(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: by_key for name, by_key in values.items() if by_key}


def _gather(model: nn.Module, kinds: Mapping[str, Select]) -> list[Contents]:
    """Return each rank's contents by rank."""
    (by_rank,) = _exchange([_pack(_held(model, kinds))])
    return [_unpack(packed) for packed in by_rank]


def _held(model: nn.Module, kinds: Mapping[str, Select], **whole: Tensor) -> Contents:
    """Return this rank's part of each parameter, and `whole`."""
    contents: Contents = {name: {"": Held(value.detach(), False)} for name, value in whole.items()}
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            is_flat = bucket.params[0] is bucket.flat_param
            for index, (record, piece) in enumerate(zip(bucket.layout.params, bucket.pieces, strict=True)):
                holder = bucket.params[0 if is_flat else index]
                if piece.numel == 0:
                    continue
                for kind, select in kinds.items():
                    entry = contents[f"{kind}/{unit.full_name(record)}"] = {}
                    for key, value in select(holder).items():
                        value = None if value is None else torch.as_tensor(value).detach()
                        if value is None or value.shape != holder.shape:
                            entry[key] = Held(value, False)
                        elif is_flat:
                            entry[key] = Held(value[piece.shard_offset : piece.shard_offset + piece.numel], True)
                        else:
                            entry[key] = Held(value if value.dim() == 1 else _in_memory_order(value, record), True)
    return contents


def _in_memory_order(value: Tensor, record: ParamRecord) -> Tensor:
    """Return the elements of an unsharded tensor in the order of the flat vector."""
    ordered = torch.empty_strided(record.shape, record.stride, dtype=value.dtype).copy_(value)
    return ordered.as_strided((record.numel,), (1,))


def _pack(contents: Contents) -> Packed:
    """Copy contents into one block of bytes; pickling single tensors would take longer than the training."""
    described, parts = [], []
    for name, entry in contents.items():
        for key, (value, is_part) in entry.items():
            described.append((name, key, None if value is None else (value.dtype, value.shape), is_part))
            if value is not None:
                parts.append(_bits(value))
    return list(contents), described, torch.cat(parts).numpy().tobytes() if parts else b""


def _exchange(several: list[Packed]) -> list[list[Packed]]:
    """Exchange several packed contents; return each by rank."""
    of_ranks: Any = [several]
    if dist.get_world_size() > 1:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, several)
    return [list(by_rank) for by_rank in zip(*of_ranks, strict=True)]


def _unpack(packed: Packed) -> Contents:
    names, described, data = packed
    contents: Contents = {name: {} for name in names}
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    offset = 0
    for name, key, kind, is_part in described:
        value = None
        if kind is not None:
            dtype, shape = kind
            nbytes = shape.numel() * dtype.itemsize
            value = memory[offset : offset + nbytes].clone().view(dtype).view(shape)
            offset += nbytes
        contents[name][key] = Held(value, is_part)
    return contents


def _assemble(model: nn.Module, by_rank: list[Contents], kind: str) -> dict[str, dict[str, Any]]:
    """Return full tensors by parameter and key."""
    result: dict[str, dict[str, Any]] = {}
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            for index, record in enumerate(bucket.layout.params):
                name = unit.full_name(record)
                what = f"{kind}/{name}"
                if record.numel == 0:
                    empty = torch.empty_strided(record.shape, record.stride, dtype=bucket.layout.dtype)
                    result[name] = {"": empty} if kind == "params" else {}
                    continue
                found = {rank: contents[what] for rank, contents in enumerate(by_rank) if what in contents}
                if bucket.layout.world_size > 1:
                    found = _of_one_replica(found, bucket.layout.world_size, what)
                keys = {rank: sorted(entry) for rank, entry in found.items()}
                some = next(iter(keys.values()))
                if any(other != some for other in keys.values()):
                    raise AssertionError(f"{what}: the ranks hold different things: {keys}")
                result[name] = {
                    key: _join({rank: entry[key] for rank, entry in found.items()}, bucket, index, f"{what} {key}")
                    for key in some
                }
    return result


def _of_one_replica(found: dict[int, dict[str, Held]], size: int, what: str) -> dict[int, dict[str, Held]]:
    """Return the contents of the first replica (`size` consecutive ranks). AssertionError if replicas differ."""
    for rank, entry in found.items():
        for key, (value, _) in entry.items():
            first = found[rank % size][key].value
            if (value is None) != (first is None) or (
                value is not None and not torch.equal(_bits(value), _bits(first))
            ):
                raise AssertionError(f"{what} {key}: rank {rank} has {value}, rank {rank % size} {first}")
    return {rank: entry for rank, entry in found.items() if rank < size}


def _join(held: dict[int, Held], bucket: BucketInfo, index: int, what: str) -> Tensor | None:
    """Join the ranks' parts into one value. AssertionError if ranks that should agree differ."""
    values = {rank: entry.value for rank, entry in held.items()}
    without = [rank for rank, value in values.items() if value is None]
    if without:
        if len(without) < len(values):
            raise AssertionError(f"{what}: None on ranks {without}, and a tensor on others of {list(values)}")
        return None
    layout, record = bucket.layout, bucket.layout.params[index]
    some, is_part = next(iter(held.values()))
    if layout.world_size == 1 or not is_part:  # every rank has all of it
        for rank, value in values.items():
            if value.shape != some.shape or not torch.equal(_bits(value), _bits(some)):
                raise AssertionError(f"{what}: rank {rank} has {value}, another rank {some}")
        if not is_part:
            return some
        values = {0: some}
    full = torch.zeros(record.numel, dtype=some.dtype)
    for rank, value in values.items():
        piece = layout.piece(index, rank)
        full[piece.start : piece.end] = value
    return full.as_strided(record.shape, record.stride)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
