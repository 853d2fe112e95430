"""Fully sharded data parallel training behind the classic FSDP1 interface.

    from fsdp import FullyShardedDataParallel as FSDP      # was: from torch.distributed.fsdp import ...

    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

Each wrapped module is a *unit*. The parameters of a unit are flattened into one vector per dtype, and every rank keeps
a shard of each vector; the optimizer works on the shards. While a unit computes, the vector is gathered into a full
buffer, and the modules compute with *leaves*, parameters that are views of that buffer. Gradients are copied into a
second buffer, which is reduce-scattered when the unit's last gradient has arrived. ``fsdp/README.md`` describes the
implementation.
"""

from typing import TYPE_CHECKING, Any

from fsdp import export, optim
from fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp.flat.experts import shard_experts
from fsdp.flat.flat_param import FlatParameter
from fsdp.flat.layout import FlatLayout
from fsdp.flat.metadata import BucketInfo, UnitInfo
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, full_params, shard_info
from fsdp.names.fsdp2 import UnshardHandle, register_forward_method, register_fsdp_forward_method
from fsdp.optim.phases import offload, offloaded, onload
from fsdp.runtime.call import mark_side_output
from fsdp.runtime.mean_factor import mean_factor
from fsdp.runtime.tensors import full_grad, full_tensor, global_shape, num_params, param_groups

if TYPE_CHECKING:
    from fsdp import compat as compat
    from fsdp import tools as tools
    from fsdp.tools.describe import Description, UnitDescription, describe
    from fsdp.tools.plan import Plan, StrategyPlan, plan
    from fsdp.tools.trace import Trace, trace
    from fsdp.tools.uneven_batches import join

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "BucketInfo",
    "CPUOffload",
    "Description",
    "FlatLayout",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "Plan",
    "RaggedOptimStateDictConfig",
    "RaggedStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StrategyPlan",
    "Trace",
    "UnitDescription",
    "UnitInfo",
    "UnshardHandle",
    "describe",
    "export",
    "full_grad",
    "full_params",
    "full_tensor",
    "global_shape",
    "join",
    "mark_side_output",
    "mean_factor",
    "num_params",
    "offload",
    "offloaded",
    "onload",
    "optim",
    "param_groups",
    "plan",
    "register_forward_method",
    "register_fsdp_forward_method",
    "shard_experts",
    "shard_info",
    "trace",
]


_TOOLS = ("Description", "Plan", "StrategyPlan", "Trace", "UnitDescription", "describe", "join", "plan", "trace")


def __getattr__(name: str) -> Any:
    """Import the tools, and ``fsdp.compat``, at the first use of one; training does not need them."""
    if name == "compat":
        import fsdp.compat

        return fsdp.compat
    if name not in ("tools", *_TOOLS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp.tools import describe, plan, trace, uneven_batches

    loaded = {**vars(describe), **vars(plan), **vars(trace), **vars(uneven_batches)}
    globals().update({tool: loaded[tool] for tool in _TOOLS})
    return globals()[name]


def __dir__() -> list[str]:
    """List the public names, including those that are not imported yet."""
    return sorted([*__all__, "__version__", "checkpoint", "compat", "tools", "wrap"])
