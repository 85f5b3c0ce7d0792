"""BatchNorm that treats parts of a batch as batches of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError


class SplitBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm that, in training, normalises each of `groups` equal parts of the batch by itself.

    Parameters and buffers are BatchNorm's, so checkpoints fit either. Running statistics move once per batch, towards
    the mean of the groups' statistics. With momentum None (re-estimation) it is plain BatchNorm.
    """

    groups: int = 1

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # any (b, c, ...)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.momentum is None or not self.track_running_stats:
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share = self.momentum / self.groups
        parts = []
        for i, part in enumerate(input.chunk(self.groups)):
            # Later parts overwrite earlier ones a little; this factor gives each the same share in the end.
            factor = share / (1 - share * (self.groups - 1 - i))
            parts.append(
                F.batch_norm(part, self.running_mean, self.running_var, self.weight, self.bias, True, factor, self.eps)
            )
        return torch.cat(parts)


def split_batchnorm(module: nn.Module, groups: int) -> None:
    """Replaces every BatchNorm inside `module` by a `SplitBatchNorm` with the same parameters and buffers."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm1d or type(child) is nn.BatchNorm2d:
            split = SplitBatchNorm(child.num_features, child.eps, child.momentum, child.affine)
            split._parameters, split._buffers = child._parameters, child._buffers
            split.groups = groups
            setattr(module, name, split.train(child.training))
        elif isinstance(child, nn.modules.batchnorm._BatchNorm) and not isinstance(child, SplitBatchNorm):
            kind = type(child).__name__
            raise UserError(f"batchnorm_groups must be 1 for this backbone (its {kind} cannot be split), got {groups}")
        else:
            split_batchnorm(child, groups)


class ViewBatchNorm(nn.BatchNorm2d):
    """BatchNorm that, while `views` > 1, takes a batch of so many equal parts for so many batches, one after the other.

    The same result as that many passes, running statistics included, from one: a network then runs over two views of a
    batch at once. Meant to be compiled; eagerly it takes several passes over the data. Otherwise plain BatchNorm, with
    the same parameters and buffers. In training it does not count batches, a launch per layer for a number that only
    an unlimited average (momentum None) reads.
    """

    views: int = 1

    def forward(self, input: Tensor) -> Tensor:
        rate, mean_so_far, var_so_far = self.momentum, self.running_mean, self.running_var
        if not self.training or not self.affine or rate is None or mean_so_far is None or var_so_far is None:
            return super().forward(input)
        if self.views == 1:
            return F.batch_norm(input, mean_so_far, var_so_far, self.weight, self.bias, True, rate, self.eps)
        output, mean, var = _Apart.apply(input, self.weight, self.bias, self.eps, self.views)
        count = input.numel() // (self.views * input.shape[1])
        with torch.no_grad():
            for i in range(self.views):
                mean_so_far.lerp_(mean[i].to(mean_so_far), rate)
                var_so_far.lerp_((var[i] * (count / (count - 1))).to(var_so_far), rate)
        normalised: Tensor = output.flatten(0, 1)
        return normalised


class _Apart(torch.autograd.Function):
    """x (parts · n, c, h, w) -> (parts, n, c, h, w), each normalised by itself; means and biased variances (parts, c).

    The gradient is written out: derived from the formula it would take more passes over the data.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, parts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _widened(x.unflatten(0, (parts, -1)))
        # part by part: over all at once the compiler's reduction takes three times as long
        found = [torch.var_mean(part, (0, 2, 3), correction=0) for part in wide]
        var, mean = (torch.stack(each)[:, None, :, None, None] for each in zip(*found, strict=True))
        inverse = torch.rsqrt(var + eps)
        output = (wide - mean) * inverse * _by_channel(weight) + _by_channel(bias)
        ctx.save_for_backward(x, weight, mean, inverse)
        means, variances = mean.flatten(1), var.flatten(1)
        ctx.mark_non_differentiable(means, variances)
        # A conversion that changes nothing must not be written: torch 2.11's compiler then loses the whole gradient.
        return output if output.dtype == x.dtype else output.to(x.dtype), means, variances

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        parts = mean.shape[0]
        g = _widened(grads[0])
        unit = (_widened(x.unflatten(0, (parts, -1))) - mean) * inverse
        of_bias = g.sum((1, 3, 4), keepdim=True)
        of_weight = (g * unit).sum((1, 3, 4), keepdim=True)
        count = g.numel() // of_bias.numel()
        moved = (g - of_bias / count - unit * (of_weight / count)) * (inverse * _by_channel(weight))
        return (
            moved.to(x.dtype).flatten(0, 1),
            of_weight.sum(0).flatten().to(weight.dtype),
            of_bias.sum(0).flatten().to(weight.dtype),
            None,
            None,
        )


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_channel(values: Tensor) -> Tensor:
    """(c,) -> (c, 1, 1)."""
    return values[:, None, None]


def prepare_views(network: nn.Module) -> bool:
    """Exchanges every BatchNorm of `network` for a `ViewBatchNorm` with the same parameters and buffers.

    Returns False, and changes nothing, where it has one of another kind.
    """
    found = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if not found or any(type(part) is not nn.BatchNorm2d for part in found):
        return False
    for part in found:
        part.__class__ = ViewBatchNorm
        setattr(part, "views", 1)  # noqa: B010 - of its own from the start: compiled code looks at it
    return True


@contextmanager
def views_apart(network: nn.Module, count: int) -> Iterator[None]:
    """Inside the block a batch of `network` counts as `count` batches, for its `ViewBatchNorm`s."""
    norms = [part for part in network.modules() if isinstance(part, ViewBatchNorm)]
    for norm in norms:
        norm.views = count
    try:
        yield
    finally:
        for norm in norms:
            norm.views = 1
