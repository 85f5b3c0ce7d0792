"""A ResNet that only encodes: one kernel for each convolution, its BatchNorm folded in, with ReLU and shortcut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from .launching import has_triton
from .scaling import Scaling
from .stem import StemConv2d


class FoldedResNet:
    """A timm ResNet in evaluation mode, without gradient. Its weights may change: they are folded anew in every call.

    On a GPU cuDNN adds bias and shortcut and applies ReLU where the convolution leaves its result, so that no
    activation is read or written another time.
    """

    def __init__(self, network: ResNet) -> None:
        self.network = network
        small = isinstance(network.conv1, StemConv2d)
        self.stem = _Product(network.conv1, network.bn1) if small else _Layer(network.conv1, network.bn1)
        self.blocks = [_Block.of(block) for stage in range(1, 5) for block in getattr(network, f"layer{stage}")]
        self.layers = [self.stem, *(layer for block in self.blocks for layer in block.layers)]
        self.widest = max(layer.convolution.out_channels for layer in self.layers)
        self.scaling: Scaling | None = None

    @staticmethod
    def of(network: nn.Module) -> FoldedResNet | None:
        """None where `network` is not a ResNet of which every part is known here."""
        return FoldedResNet(network) if _is_plain(network) else None

    def takes(self, images: Tensor, dtype: torch.dtype) -> bool:
        """Whether these images go this way: on a GPU, in half precision, in evaluation mode, and not too many."""
        encodes_only = not self.network.training and not any(layer.norm.training for layer in self.layers)
        small = images.shape[0] * self.widest * images[0, 0].numel() < 2**31
        return images.is_cuda and dtype == torch.bfloat16 and encodes_only and small

    @torch.no_grad()
    def __call__(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Features (b, f) in `dtype` of images (b, c, h, w)."""
        with torch.autocast(images.device.type, enabled=False):
            self._fold(dtype)
            x = self.stem(images)
            x = self.network.maxpool(x)
            for block in self.blocks:
                x = block(x)
            features: Tensor = self.network.global_pool(x)
            return features

    def _fold(self, dtype: torch.dtype) -> None:
        norms: list[Any] = [layer.norm for layer in self.layers]
        scales = torch._foreach_add([norm.running_var for norm in norms], norms[0].eps)
        torch._foreach_rsqrt_(scales)
        torch._foreach_mul_(scales, [norm.weight for norm in norms])
        biases = torch._foreach_mul([norm.running_mean for norm in norms], scales)
        torch._foreach_neg_(biases)
        torch._foreach_add_(biases, [norm.bias for norm in norms])
        given = dict(zip(map(id, self.layers), biases, strict=True))
        for block in self.blocks:
            if block.shortcut is not None:
                given[id(block.row[-1])].add_(given[id(block.shortcut)])
        weights = [layer.convolution.weight for layer in self.layers]
        moved = [layer.prepare(dtype) for layer in self.layers]
        if self.scaling is None or any(moved) or not self.scaling.fits(weights):
            self.scaling = Scaling(weights, [layer.scaled for layer in self.layers])
        self.scaling(scales)
        torch._foreach_copy_([layer.bias for layer in self.layers], list(given.values()))


@dataclass
class _Layer:
    """A convolution and its BatchNorm, as a convolution with bias."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d

    def __post_init__(self) -> None:
        self.weight = self.scaled = self.bias = torch.empty(0)

    def prepare(self, dtype: torch.dtype) -> bool:
        """Makes room for the folded weight and bias, once; whether it did. scaled: the weight, in its own shape."""
        given = self.convolution.weight
        if self.weight.numel() and self.weight.dtype == dtype and self.weight.device == given.device:
            return False
        self.weight, self.scaled = self._room(given, dtype)
        self.bias = torch.empty(given.shape[0], dtype=dtype, device=given.device)
        return True

    def _room(self, given: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        room = torch.empty_like(given, dtype=dtype, memory_format=torch.channels_last)
        return room, room

    def __call__(self, x: Tensor, *, relu: bool = True, shortcut: Tensor | None = None) -> Tensor:
        c, x = self.convolution, x.to(self.weight.dtype)
        how: Any = (c.stride, c.padding, c.dilation, c.groups)
        if not relu:
            return F.conv2d(x, self.weight, None, *how)  # a shortcut, whose bias is added with the block's
        if not x.is_cuda or c.in_channels % 8:  # what cuDNN's fused forms do not take
            x = F.conv2d(x, self.weight, self.bias, *how)
            return F.relu_(x if shortcut is None else x + shortcut)
        if shortcut is None:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *how)
        return torch.cudnn_convolution_add_relu(x, self.weight, shortcut, 1.0, self.bias, *how)


class _Product(_Layer):
    """The same for a stem that is a matrix product."""

    convolution: StemConv2d

    def _room(self, given: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        taps = self.convolution.taps
        room = torch.zeros(given.shape[0], taps + -taps % 8, dtype=dtype, device=given.device)
        return room, room[:, :taps].unflatten(1, given.shape[1:])

    def __call__(self, x: Tensor, *, relu: bool = True, shortcut: Tensor | None = None) -> Tensor:
        power_of_two = self.weight.shape[0].bit_count() == 1 and self.weight.shape[0] >= 16
        fused = x.is_cuda and power_of_two and has_triton()
        run = self.convolution.with_relu_fused if fused else self.convolution.with_relu
        return run(x, self.weight, self.bias)


@dataclass
class _Block:
    """Convolutions in a row, and what is added before the last ReLU."""

    row: list[_Layer]
    shortcut: _Layer | None

    @classmethod
    def of(cls, block: Any) -> _Block:
        row = [_Layer(block.conv1, block.bn1), _Layer(block.conv2, block.bn2)]
        if isinstance(block, Bottleneck):
            row.append(_Layer(block.conv3, block.bn3))
        return cls(row, None if block.downsample is None else _Layer(block.downsample[0], block.downsample[1]))

    @property
    def layers(self) -> list[_Layer]:
        return self.row if self.shortcut is None else [*self.row, self.shortcut]

    def __call__(self, x: Tensor) -> Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x, relu=False)
        for layer in self.row[:-1]:
            x = layer(x)
        return self.row[-1](x, shortcut=shortcut)


def _is_plain(network: nn.Module) -> bool:
    """Whether a network is what `FoldedResNet` computes."""
    if type(network) is not ResNet or not isinstance(network.fc, nn.Identity):
        return False
    if not isinstance(network.conv1, nn.Conv2d) or type(network.act1) is not nn.ReLU:
        return False
    if not isinstance(network.maxpool, nn.Identity | nn.MaxPool2d):
        return False
    convolutions = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
    if any(c.bias is not None or c.padding_mode != "zeros" for c in convolutions):
        return False
    blocks = [block for stage in range(1, 5) for block in getattr(network, f"layer{stage}")]
    norms = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    same = all(isinstance(n, nn.BatchNorm2d) and n.affine and n.track_running_stats for n in norms)
    return same and len({n.eps for n in norms}) == 1 and all(map(_is_plain_block, blocks))


def _is_plain_block(block: Any) -> bool:
    if type(block) not in (BasicBlock, Bottleneck):
        return False
    acts = [block.act1, block.act2, *([block.act3] if type(block) is Bottleneck else [])]
    extras = (block.se, block.drop_path, block.drop_block, block.aa)
    down = block.downsample
    return (
        all(type(act) is nn.ReLU for act in acts)
        and all(part is None or isinstance(part, nn.Identity) for part in extras)
        and (down is None or (len(down) == 2 and isinstance(down[0], nn.Conv2d)))
    )
