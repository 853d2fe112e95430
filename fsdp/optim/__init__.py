"""Optimizers for sharded models."""

from fsdp.optim.whole import WholeParamOptimizer
from fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler", "WholeParamOptimizer"]
