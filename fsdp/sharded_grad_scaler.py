"""Loss scaling for sharded gradients: all ranks skip a step, and change the scale, together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from fsdp.comm.collectives import combine
from fsdp.comm.groups import default_group
from fsdp.comm.streams import streams_for
from fsdp.flat.views import stepped_params

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` for sharded gradients.

    Differences to the plain scaler: a NaN or infinity on one rank makes all ranks of ``process_group`` skip the step
    and lower the scale. Gradients may be float16, because shards may be. They may be on CPU while the loss is on an
    accelerator (offload). Ranks without gradients take part. ``scale`` keeps the dtype of the loss.

    The ranks agree by one all-reduce per optimizer when the gradients are unscaled, on whatever devices these are. The
    host waits for the result in ``step`` only, and with optimizers that read the result themselves (``fused=True``)
    not even there, unless gradients are offloaded.

    Args:
        device: the type of device of the gradients, as in ``GradScaler``; "cuda" without such a device disables the
            scaler, with a warning.
        init_scale, backoff_factor, growth_factor, growth_interval, enabled: as in ``GradScaler``, but with the two
            factors in the other order.
        process_group: the ranks that agree; None: the default group.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply ``outputs``, a tensor or a nest of iterables of tensors, by the scale. Dtypes stay.

        Lists and tuples keep their type; other iterables become a lazy ``map``.

        Raises:
            ValueError: an element is neither a tensor nor an iterable.
            AssertionError: a tensor is on an unsupported type of device.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            if outputs.device.type not in _device_types():
                raise AssertionError(
                    f"Expected outputs on a supported device (one of {', '.join(_device_types())}), got "
                    f"{outputs.device}"
                )
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            there = self._scale.to(
                outputs.device, non_blocking=outputs.device.type != "cpu"
            )  # the CPU reads it at once
            return (outputs * there).to(outputs.dtype)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            if not isinstance(outputs, (list, tuple)):
                return scaled
            return type(outputs)(*scaled) if hasattr(outputs, "_fields") else type(outputs)(scaled)
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and agree whether any rank's were infinite or NaN.

        All ranks have to call it, or leave it to ``step``.

        Raises:
            RuntimeError: it, or ``step``, was called already since the last ``update``.
        """
        super().unscale_(optimizer)
        if self._enabled:
            self._agree(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Raise or lower the scale as in ``GradScaler``, or set it to ``new_scale`` (a float or a 1-element tensor)."""
        if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())
        super().update(new_scale)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Check the gradients of an optimizer that unscales them itself."""
        super()._check_inf_per_device(optimizer)
        return self._agree(optimizer)

    def _agree(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Combine the flags of all devices and ranks to one on the device of the scale."""
        assert self._scale is not None
        state = self._per_optimizer_states[id(optimizer)]
        flags = [flag.to(self._scale.device) for flag in state["found_inf_per_device"].values()]
        found = torch.stack(flags).sum(dim=0)
        group = self.process_group if self.process_group is not None else default_group()
        if group.size() > 1:
            combine(found, group, streams_for(found.device), "agree on infinite gradients")
        found.clamp_(max=1.0)  # kernels of fused optimizers skip a step at the value 1 alone
        state["found_inf_per_device"] = {found.device: found}
        return dict(state["found_inf_per_device"])

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply this rank's gradients by ``inv_scale``; float16 is allowed whatever ``allow_fp16`` says.

        Returns:
            by device a copy of ``found_inf``, raised if a gradient there was infinite or NaN. The device of
            ``found_inf`` has one on every rank, also without gradients.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        check = getattr(optimizer, "check_not_stepped", None)  # of fsdp.optim.HostOptimizer
        if check is not None:
            check("ShardedGradScaler.unscale_()")
        with torch.no_grad():
            for param in stepped_params(optimizer):
                grad = param.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    if grad.dtype == torch.float16 and not grad.is_coalesced():  # the sum may overflow
                        grad = param.grad = grad.float().coalesce().half()
                    grad = grad._values()
                kinds.setdefault((grad.device, grad.dtype), []).append(grad)
            flags = {found_inf.device: found_inf.clone()}
            scales = {inv_scale.device: inv_scale}
            for (device, _), grads in kinds.items():
                if device not in flags:
                    flags[device] = found_inf.to(device)
                if device not in scales:  # offloaded: an asynchronous copy could be read too early
                    scales[device] = inv_scale.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], scales[device])
        return flags


def _device_types() -> tuple[str, ...]:
    """Return the supported types of devices."""
    return ("cpu", "cuda", "xpu", "hpu", "mtia", "xla", torch._C._get_privateuse1_backend_name())
