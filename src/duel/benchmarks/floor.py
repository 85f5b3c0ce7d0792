"""The least a training step can take: operations and bytes of every layer against what the GPU can do of each.

A layer takes at least max(operations / peak, bytes / bandwidth). Counted are the backbone's convolutions and linear
layers, and the passes over activations of BatchNorm, ReLU and the additions of residual blocks; not the loss, the
optimizer, the augmentation and the launches. Activations are bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from duel.config import TrainConfig
from duel.encoders import backbone

BYTES = 2  # per activation


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float
    """bf16 operations per second, dense; data sheets often print twice that, for sparse matrices."""
    bandwidth: float
    """Bytes per second of its memory."""


#: NVIDIA's data sheet of the H200 SXM: 1,979 TFLOPS with sparsity, half of it without; 4.8 TB/s.
H200 = Gpu("H200", 1979e12 / 2, 4.8e12)

# Passes over a layer's tensor in elements read or written, forward and backward, each kernel by itself:
#   BatchNorm: read for the statistics, read, write; then dy and x for the sums, dy and x again, write dx.
#   ReLU: read, write; then dy and y read, dx written.
#   Addition: two read, one written; backward, the gradients of the two branches are added where they meet.
SEPARATE = {"norm": (3, 5), "relu": (2, 3), "add": (3, 3)}
# BatchNorm, addition and ReLU of a layer in one pass over its tensor: the ReLU is free, the addition reads the other
# branch, and hands its gradient on.
FUSED = {"norm": (3, 5), "relu": (0, 0), "add": (1, 1)}
# Without gradient and with BatchNorm, which has running statistics, folded into the convolution before it.
INFERENCE = {"norm": (0, 0), "relu": (0, 0), "add": (1, 0)}


@dataclass(frozen=True)
class Layer:
    """One layer for one image."""

    kind: str
    """conv (also linear layers), norm, relu or add."""
    inputs: int
    outputs: int
    """Elements."""
    operations: int = 0
    """Of a forward pass; a multiplication and an addition are two."""
    first: bool = False
    """Whether its input is the image, which needs no gradient."""


@dataclass(frozen=True)
class Cost:
    """Operations, bytes moved, and the least seconds for both, layer by layer."""

    operations: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operations + other.operations, self.bytes + other.bytes, self.seconds + other.seconds)


@cache
def layers(name: str, image_size: int = 32) -> tuple[Layer, ...]:
    """What one image passes through in the backbone `name`, in order of execution; no memory is used."""
    with torch.device("meta"):
        model = backbone(name, image_size=image_size)
        image = torch.zeros(1, 3, image_size, image_size)
    found: list[Layer] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        size, out = args[0].numel(), output.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            found.append(Layer("conv", size, out, 2 * out * module.weight[0].numel(), first=not found))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            found.append(Layer("norm", size, out))
        elif isinstance(module, nn.ReLU):
            found.append(Layer("relu", size, out))
        elif hasattr(module, "conv1") and hasattr(module, "downsample"):  # a residual block ends with an addition
            found.append(Layer("add", out, out))

    for module in model.modules():
        module.register_forward_hook(note)  # type: ignore[arg-type]
    model.train()(image)
    return tuple(found)


def cost(found: Sequence[Layer], count: int, gpu: Gpu, passes: dict[str, tuple[int, int]], *, backward: bool) -> Cost:
    """Forward, and backward if asked, of `count` images through the layers.

    A convolution reads its input and writes its output; backward it reads dy twice and x once, and writes dx, with
    twice the operations of the forward pass (the first one has no dx). Weights are left out: megabytes, read once.
    """
    total = Cost()
    for layer in found:
        if layer.kind == "conv":
            steps = [(1, layer.inputs + layer.outputs)]
            gradients = 1 if layer.first else 2
            steps += [(1, layer.outputs + layer.inputs)] * gradients if backward else []
        else:
            forward, back = passes[layer.kind]
            steps = [(0, forward * layer.outputs), (0, back * layer.outputs if backward else 0)]
        for work, elements in steps:
            operations, size = count * work * layer.operations, count * elements * BYTES
            total += Cost(operations, size, max(operations / gpu.flops, size / gpu.bandwidth))
    return total


def images_of(config: TrainConfig) -> tuple[int, int, int]:
    """Images per step that are trained on (forward and backward), that only pass forward in training mode, with the
    statistics of their batch, and that are only encoded, with running statistics.

    Of the second kind are BYOL's targets, MoCo's keys with key_batchnorm batch, an asymmetric SimSiam's second view.
    """
    batch, method, given = config.batch_size, config.base_method, config.method_settings
    symmetric = given.get("symmetric", method != "moco")
    views = batch * (2 if method == "simclr" or symmetric else 1)
    keys = {"moco": views, "byol": views, "simsiam": 0 if symmetric else batch}.get(method, 0)
    running = method == "moco" and given.get("key_batchnorm") == "running"
    encoded = keys if running else 0
    if config.memory_encoded:
        encoded += config.refreshed_slots + (0 if config.newcomers_from_training else config.stream_items)
    return views, 0 if running else keys, encoded


def step_floor(config: TrainConfig, gpu: Gpu = H200, *, passes: dict[str, tuple[int, int]] | None = None) -> Cost:
    """The floor of the encoder's part of a step; passes: `SEPARATE` or `FUSED` (the default)."""
    trained, forward, encoded = images_of(config)
    found, passes = layers(config.backbone, config.image_size or 32), passes or FUSED
    training = cost(found, trained, gpu, passes, backward=True) + cost(found, forward, gpu, passes, backward=False)
    return training + cost(found, encoded, gpu, INFERENCE, backward=False)


def share_of_passes(name: str, gpu: Gpu = H200) -> dict[str, Any]:
    """Milliseconds per 256 images trained on: convolutions alone, and the passes of the rest, separate and fused."""
    found = layers(name)
    convolutions = [layer for layer in found if layer.kind == "conv"]
    rest = [layer for layer in found if layer.kind != "conv"]

    def ms(some: Sequence[Layer], passes: dict[str, tuple[int, int]]) -> float:
        return cost(some, 256, gpu, passes, backward=True).seconds * 1e3

    return {"convolutions": ms(convolutions, FUSED), "separate": ms(rest, SEPARATE), "fused": ms(rest, FUSED)}
