"""The factor for summed losses with which gradients are those of the mean over the tokens of all ranks.

The gradient of a unit is the sum over its ranks, divided by its divisor d. With losses that are multiplied by f it is
f / d times the gradient of the sum of all losses, and the mean over T tokens needs f = d / T. Where ranks of tensor
parallelism, which see the same data, are among the ranks of a unit, they count several times in that sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from fsdp.comm.collectives import combine
from fsdp.comm.groups import control_device
from fsdp.comm.lane.issuing import REDUCE
from fsdp.comm.streams import streams_for
from fsdp.runtime.build import join
from fsdp.runtime.unit import Unit, units_of


def mean_factor(model: nn.Module, num_tokens: float | Sequence[float] | torch.Tensor) -> float:
    """Return the number to multiply this rank's summed losses by, for the mean over the tokens of all ranks.

    The mean of means is the mean over all tokens only if all ranks and micro-batches have equally many. With this
    factor gradients are those of one process over all tokens of the step, whatever the strategy, under ``no_sync()`` or
    not, and with any ``set_gradient_divide_factor``. Call it once per step, on all ranks of the data parallelism::

        factor = fsdp.mean_factor(model, [(labels != -100).sum() for _, labels in micro_batches])
        for inputs, labels in micro_batches:
            loss = cross_entropy(model(inputs), labels, reduction="sum") * factor
            loss.backward()

    A loss function that divides by ``num_items_in_batch``, as those of transformers do, takes ``1 / factor``. The mean
    of ``loss`` over ranks is the mean over tokens, if gradients are divided by the number of ranks.

    The ranks exchange one number, on the host: counts on an accelerator have to be waited for.

    Args:
        model: a wrapped model, or a module with wrapped models in it, which communicates over the ranks of the first. A
            communication hook has to average over the ranks, as without one.
        num_tokens: the number of tokens that this rank has losses of, in all micro-batches of the step: a number, or
            several numbers, which are added up. It may be zero. For a stand-in of ``fsdp.join`` it counts as zero.

    Raises:
        TypeError: ``num_tokens`` are no numbers.
        ValueError: no module in ``model`` is wrapped; or its units divide their gradients by different numbers; or, on
            all ranks, a number is negative or not finite, or no rank has any tokens.
    """
    units = units_of(model)
    if not units:
        raise ValueError(f"mean_factor() needs a model with FullyShardedDataParallel in it, got {type(model).__name__}")
    try:
        number = float(torch.as_tensor(num_tokens, dtype=torch.float64).sum())
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"expected a number of tokens, or several, but got a {type(num_tokens).__name__}"
        raise TypeError(f"mean_factor(): {found}") from error
    context, *_ = [join(unit) for unit in units]
    root, valid = context.root, 0 <= number < math.inf
    divisor = _common_divisor(units) * _times(root)
    own = number * root.weight if valid else math.nan  # all ranks see the NaN, and raise together
    with context.calling("mean_factor()", often=True, gathers=False):
        for group in root.groups_for(REDUCE):
            context.passes.announce(group)
            counted = torch.tensor([own], dtype=torch.float64, device=control_device(group, root.device))
            combine(counted, group, streams_for(counted.device), "add up the numbers of tokens")
            own = float(counted)
    if not valid:
        raise ValueError(f"mean_factor(): expected a number of tokens, zero or more, but got {num_tokens!r}")
    if math.isnan(own):
        raise ValueError("mean_factor(): another rank has passed a negative number of tokens, or no finite one")
    if own == 0:
        raise ValueError(
            "mean_factor(): no rank has any tokens, so there is no mean over them. Leave the step out: this is raised "
            "on all ranks"
        )
    return divisor / own


def _times(unit: Unit) -> int:
    """Return how often the same data are counted in the sum of the unit's gradients."""
    return max(1, unit.groups.data_parallel_size // unit.position.ranks)


def _common_divisor(units: Sequence[Unit]) -> float:
    """Return the divisor of the units' gradients, of which the same data are counted once.

    Raises:
        ValueError: the units have different ones.
    """
    names: dict[float, str] = {}
    trainable = [unit for unit in units if any(param.requires_grad for param in unit.visible_params())]
    for unit in trainable or units:
        divisor = unit.divisor(unit.position.ranks) or unit.groups.data_parallel_size
        names.setdefault(divisor / _times(unit), unit.name)
    if len(names) > 1:
        each = ", ".join(f"those of {name} by {divisor:g}" for divisor, name in names.items())
        raise ValueError(
            f"mean_factor() needs gradients that are all divided by the same number, and the sums over different data "
            f"are divided here: {each}. Set one by set_gradient_divide_factor(number, recurse=True) of the outermost "
            "wrapped module, or call mean_factor() for each model of its own"
        )
    return next(iter(names))
