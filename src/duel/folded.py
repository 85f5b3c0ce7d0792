"""Residual blocks that only encode: the last convolution in one kernel with its BatchNorm, the shortcut and ReLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from .batchnorm import ViewBatchNorm

_SCHEMA = "(Tensor x, Tensor weight, Tensor bias, Tensor shortcut, SymInt[] stride, SymInt[] padding) -> Tensor"


@torch.library.custom_op("duel::conv_add_relu", mutates_args=(), schema=_SCHEMA)  # torch 2.6 infers none from list[int]
def conv_add_relu(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor, stride: list[int], padding: list[int]
) -> Tensor:
    """relu(conv2d(x, weight, bias) + shortcut): on a GPU by cuDNN, which writes the result once and reads it not at
    all."""
    if not x.is_cuda:
        return F.relu_(F.conv2d(x, weight, bias, stride, padding) + shortcut)
    how: Any = (stride, padding, (1, 1), 1)
    return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, *how)


@conv_add_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    return F.conv2d(x, weight, None, stride, padding)


def available(device: torch.device) -> bool:
    """Whether cuDNN has such kernels there for bf16."""
    cudnn = device.type == "cuda" and torch.version.hip is None and torch.backends.cudnn.enabled
    return cudnn and torch.cuda.get_device_capability(device)[0] >= 8


def _takes(x: Tensor) -> bool:
    """Whether they take this input: in half precision, and no tensor of the block has 2³¹ numbers or more."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.numel() * 4 < 2**31


def _folded(convolution: nn.Conv2d, norm: nn.BatchNorm2d, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that gives what BatchNorm, with its running statistics, makes of this one."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    weight = (convolution.weight * scale[:, None, None, None]).to(dtype)
    return weight, norm.bias - norm.running_mean * scale


class _Folding:
    """In front of a residual block of timm's: the same block, but quicker where it only encodes.

    Its weights may change: they are folded in every call.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        row = [(getattr(self, f"conv{i}"), getattr(self, f"bn{i}")) for i in (1, 2, 3) if hasattr(self, f"conv{i}")]
        beside = [] if self.downsample is None else [tuple(self.downsample)]
        # a BatchNorm may train where its block does not: while its statistics are estimated anew
        trains = self.training or any(norm.training for _, norm in (*row, *beside))
        if trains or torch.is_grad_enabled() or not _takes(x):
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        shortcut, shift = x, torch.zeros((), device=x.device)
        for convolution, norm in beside:
            weight, shift = _folded(convolution, norm, x.dtype)  # its bias is added with the other's
            shortcut = F.conv2d(x, weight, None, convolution.stride, convolution.padding)
        for convolution, norm in row[:-1]:
            # not by cudnn_convolution_relu, to which torch gives the unwritten result as an addend: 0 · NaN is NaN
            x = F.relu(norm(convolution(x)))
        convolution, norm = row[-1]
        weight, bias = _folded(convolution, norm, x.dtype)
        how: Any = (list(convolution.stride), list(convolution.padding))
        encoded: Tensor = conv_add_relu(x, weight, (bias + shift).to(x.dtype), shortcut, *how)
        return encoded


class FoldedBasicBlock(_Folding, BasicBlock):  # type: ignore[misc]
    pass


class FoldedBottleneck(_Folding, Bottleneck):  # type: ignore[misc]
    pass


def fold(network: nn.Module) -> int:
    """Exchanges every plain residual block of `network` for one that folds; how many there were.

    Parameters, buffers and results stay; it pays where the network is compiled, as the folding is then one launch.
    """
    forms: dict[type, type] = {BasicBlock: FoldedBasicBlock, Bottleneck: FoldedBottleneck}
    found = [part for part in network.modules() if type(part) in forms and _is_plain(part)]
    for block in found:
        block.__class__ = forms[type(block)]
    return len(found)


def _is_plain(block: Any) -> bool:
    """Whether a block of timm's is convolutions, BatchNorm and ReLU and nothing else."""
    main = [part for name, part in block.named_children() if name != "downsample"]
    down = [] if block.downsample is None else list(block.downsample)
    if down and (len(down) != 2 or not isinstance(down[0], nn.Conv2d) or not isinstance(down[1], nn.BatchNorm2d)):
        return False
    known = (nn.Conv2d, nn.BatchNorm2d, ViewBatchNorm, nn.ReLU, nn.Identity)  # and none of their other subclasses
    convolutions = [part for part in (*main, *down) if isinstance(part, nn.Conv2d)]
    norms = [part for part in (*main, *down) if isinstance(part, nn.BatchNorm2d)]
    return (
        all(type(part) in known for part in (*main, *down))
        and not any(c.bias is not None or c.groups > 1 or c.padding_mode != "zeros" for c in convolutions)
        and not any(isinstance(c.padding, str) or set(c.dilation) != {1} for c in convolutions)
        and all(n.affine and n.track_running_stats for n in norms)
    )
