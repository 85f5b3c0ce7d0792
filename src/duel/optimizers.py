"""Optimizers whose learning rate is a tensor on the device, so that a captured step can follow the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError, suggest


def learning_rate(step: int, *, peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to `end` × peak at `steps`.

    `step` counts from 0; the first warm-up step has rate peak / warmup, never 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * share)))


class Schedule:
    """The learning rate of every step, as a table on the device, and the current one in `lr` (a 0-d tensor).

    A table needs one gather per step, reads nothing on the host, and keeps the formula in one place.

    warmup: in steps, or below 1 as a share of `steps`.
    """

    def __init__(self, *, peak: float, steps: int, warmup: float, end: float, device: torch.device) -> None:
        if warmup >= steps:
            raise UserError(f"warmup must be shorter than the training of {steps} steps, got {warmup:g}")
        rising = int(warmup * steps if warmup < 1 else warmup)
        rates = [learning_rate(s, peak=peak, steps=steps, warmup=rising, end=end) for s in range(steps)]
        self.table = torch.tensor(rates, dtype=torch.float32, device=device)  # (steps,)
        self.lr = self.table[0].clone()

    def set(self, step: Tensor) -> None:
        """Put the rate of `step` (int64 (1,), on the device) into `lr`."""
        self.lr.copy_(self.table.index_select(0, step)[0])


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose rate is scaled per tensor by trust × |w| / |g + decay × w| (You et al., 2017).

    Tensors with one axis (biases, norm weights) are neither scaled nor decayed, as in SimCLR and BYOL.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            for scaled in (True, False):
                self._update([p for p in params if (p.ndim > 1) == scaled], group, scaled)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any], scaled: bool) -> None:
        if not params:
            return
        grads: Any = [p.grad for p in params]
        if scaled:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            norms = zip(torch._foreach_norm(params), torch._foreach_norm(grads), strict=True)
            # A tensor of zeros (a fresh last norm, a frozen layer) moves at the plain rate instead of never.
            grads = [
                g * torch.where((w > 0) & (n > 0), group["trust"] * w / n, 1.0)
                for g, (w, n) in zip(grads, norms, strict=True)
            ]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers: Any = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, grads)
        moves: Any = torch._foreach_mul(buffers, group["lr"])
        torch._foreach_sub_(params, moves)


def build_optimizer(
    name: str, groups: list[dict[str, Any]], *, lr: Tensor, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """An optimizer over parameter groups that carry their weight decay.

    `lr` is kept as the very tensor given: writing into it changes the rate of the next step. The fused forms read it
    on the device; the others would copy it to the host.
    """
    capturable = lr.device.type == "cuda"  # Adam counts its steps on the device; torch refuses this on the CPU
    match name:
        case "adam":
            return torch.optim.Adam(groups, lr=lr, fused=True, capturable=capturable)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=capturable)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
        case "lars":
            return LARS(groups, lr=lr, momentum=momentum)
    raise UserError(suggest("optimizer", name, ("adam", "adamw", "sgd", "lars")))
