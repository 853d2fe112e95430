"""Optimizers for sharded models."""

from fsdp.optim.host import HostOptimizer
from fsdp.optim.whole import WholeParamOptimizer
from fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["HostOptimizer", "ShardedGradScaler", "WholeParamOptimizer"]
