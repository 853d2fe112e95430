"""Loss scaling for sharded gradients: all ranks skip a step, and change the scale, together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from fsdp.comm.collectives import combine
from fsdp.comm.groups import default_group

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` for gradients of which each rank holds a part.

    What it does beside a plain one: a NaN or infinity on one rank makes all ranks of ``process_group`` skip the step
    and lower the scale; gradients may be float16, since shards may be; they may lie on CPU while the loss is on an
    accelerator (offload); ranks without gradients take part; and ``scale`` keeps the dtype of the loss.

    The ranks agree by one all-reduce per optimizer, when its gradients are unscaled, whatever the devices that they are
    on. The host waits for the answer in ``step``, and not even there with optimizers that take the answer themselves
    (``fused=True``). Offloaded gradients apart, it waits nowhere else.

    Args:
        device: the type of device that gradients are expected on, as in ``GradScaler``; "cuda" without one disables
            the scaler, with a warning.
        init_scale, backoff_factor, growth_factor, growth_interval, enabled: as in ``GradScaler``; mind that the order
            of the two factors is another one.
        process_group: the ranks that agree; the default group if None.
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
        """``outputs``, a tensor or a nest of iterables of tensors, times the scale, each in its own dtype.

        Lists and tuples come back as such, other iterables as a lazy ``map``.

        Raises:
            ValueError: something is neither a tensor nor an iterable.
            AssertionError: a tensor is on a device that gradients cannot be on.
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
            there = self._scale.to(outputs.device, non_blocking=outputs.device.type != "cpu")  # the CPU reads at once
            return (outputs * there).to(outputs.dtype)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            if not isinstance(outputs, (list, tuple)):
                return scaled
            return type(outputs)(*scaled) if hasattr(outputs, "_fields") else type(outputs)(scaled)
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients that ``optimizer`` holds by the scale, and agree on whether any rank's were infinite or
        NaN. All ranks have to call it, or leave it to ``step``.

        Raises:
            RuntimeError: it was called since the last ``update`` already, or ``step`` was.
        """
        super().unscale_(optimizer)
        if self._enabled:
            self._agree(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Raise or lower the scale as in ``GradScaler``, or set it to ``new_scale``, a float or a tensor of one
        element."""
        if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())
        super().update(new_scale)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """For optimizers that unscale by themselves."""
        super()._check_inf_per_device(optimizer)
        return self._agree(optimizer)

    def _agree(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Make one flag, beside the scale, of those of all devices and ranks: how many were raised."""
        assert self._scale is not None
        state = self._per_optimizer_states[id(optimizer)]
        flags = [flag.to(self._scale.device) for flag in state["found_inf_per_device"].values()]
        found = torch.stack(flags).sum(dim=0)
        group = self.process_group if self.process_group is not None else default_group()
        if group.size() > 1:
            combine(found, group, "agree on infinite gradients")
        state["found_inf_per_device"] = {found.device: found}
        return dict(state["found_inf_per_device"])

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply this rank's gradients by ``inv_scale``; returns by device a copy of ``found_inf``, raised where one
        was infinite or NaN. The device of ``found_inf`` always has one, also on ranks without gradients.

        float16 is allowed whatever ``allow_fp16`` says, which the plain scaler's own methods pass.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        with torch.no_grad():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                grad = param.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    if grad.dtype == torch.float16 and not grad.is_coalesced():  # what is summed up may overflow
                        grad = param.grad = grad.float().coalesce().half()
                    grad = grad._values()
                kinds.setdefault((grad.device, grad.dtype), []).append(grad)
            flags = {found_inf.device: found_inf.clone()}
            scales = {inv_scale.device: inv_scale}
            for (device, _), grads in kinds.items():
                if device not in flags:
                    flags[device] = found_inf.to(device)
                if device not in scales:  # offloaded: a copy that the host does not wait for could be read too early
                    scales[device] = inv_scale.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], scales[device])
        return flags


def _device_types() -> tuple[str, ...]:
    """Where gradients may be scaled."""
    return ("cpu", "cuda", "xpu", "hpu", "mtia", "xla", torch._C._get_privateuse1_backend_name())
