"""What every method is: an encoder, a loss over two views, and what happens after the optimizer's step."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..encoders import Encoder
from ..errors import UserError
from ..losses import unit
from ..modes import evaluating


class NegativeSource(Protocol):
    """The part of `WorkingMemory` that a method reads."""

    def negatives(self, *, exclude_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Embeddings (n, d), and bool (b, n) or None: True where slot j holds item i itself."""
        ...


class StepOutput(NamedTuple):
    """What one forward gives the trainer."""

    loss: Tensor  # scalar float32
    embeddings: Tensor  # (b, d) float32, unit rows, no gradient: what the memory is updated with
    features: Tensor  # (b, f), no gradient: the backbone features these were projected from


class Encoded(NamedTuple):
    """Both ends of an encoder, from one pass."""

    projections: Tensor  # (b, d), not normalised
    features: Tensor  # (b, f), of the backbone


def encode(encoder: Encoder, images: Tensor) -> Encoded:
    """Projections and backbone features of images (b, c, h, w)."""
    features = encoder.features(images)
    return Encoded(encoder.projection(features), features)


class Method(nn.Module, ABC):
    """A self-supervised method. Subclasses define `forward`; those with a momentum copy also `after_step`.

    Nothing here synchronises with the host, so a whole step can be captured as a CUDA graph.

    Attributes:
        uses_memory: whether the loss needs one.
        encoder: what is trained, evaluated and exported.
        memory: where negatives come from. Deliberately not a submodule: DDP would overwrite every rank's memory with
            the first one's, and the trainer saves it separately.
    """

    uses_memory: ClassVar[bool] = False
    encoder: Encoder
    memory: NegativeSource | None

    def __init__(self, encoder: Encoder, *, memory: NegativeSource | None = None, joint: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.memory = memory
        self.joint = joint
        # two views may share one forward pass if nothing mixes the images of a batch
        self._mixes = _has_batchnorm(encoder)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "memory":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @abstractmethod
    def forward(self, view1: Tensor, view2: Tensor, ids: Tensor | None = None) -> StepOutput:
        """The loss of two views (b, c, h, w) of the same items; ids int64 (b,) tell which items these are."""

    def after_step(self, progress: Tensor | float) -> None:
        """Called after the optimizer's step; progress in 0..1, a 0-dim tensor on the device inside a CUDA graph."""

    @property
    def memory_encoder(self) -> Encoder:
        """The encoder whose embeddings the memory holds."""
        return self.encoder

    @torch.no_grad()
    def embed_with_features(self, images: Tensor) -> Encoded:
        """For the memory: unit projections (b, d), and the backbone features (b, f) of images (b, c, h, w).

        BatchNorm uses its running statistics and leaves them alone, so that an item's embedding depends on the encoder
        and the item, not on its batch.
        """
        with evaluating(self.memory_encoder):
            projections, features = encode(self.memory_encoder, images)
        return Encoded(unit(projections), features)

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings for the memory alone: (b, c, h, w) -> (b, d), unit rows."""
        return self.embed_with_features(images).projections

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters the optimizer gets: momentum copies and frozen ones left out."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def parameter_groups(self, weight_decay: float, *, decay_norm_and_bias: bool = True) -> list[dict[str, Any]]:
        """Groups for an optimizer.

        MoCo v2 and SimSiam decay everything; SimCLR and BYOL leave out biases and the weights of norms, that is,
        everything with fewer than two dimensions.
        """
        parameters = list(self.trainable_parameters())
        if decay_norm_and_bias:
            return [{"params": parameters, "weight_decay": weight_decay}]
        return [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]

    def _both(self, network: Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """`network`, with BatchNorm where it is no encoder, of both views: in one pass if `joint`, otherwise each with
        statistics of its own."""
        if isinstance(network, Encoder):
            one, two = (both.projections for both in self._encode_both(network, first, second))
        elif self.joint:
            one, two = network(torch.cat([first, second])).chunk(2)
        else:
            one, two = network(first), network(second)
        return one, two

    def _encode_both(
        self, encoder: Encoder, first: Tensor, second: Tensor, *, joint: bool = False
    ) -> tuple[Encoded, Encoded]:
        """The same for an encoder, both of its ends."""
        if joint or self.joint or not self._mixes:
            (z1, z2), (f1, f2) = (part.chunk(2) for part in encode(encoder, torch.cat([first, second])))
            return Encoded(z1, f1), Encoded(z2, f2)
        f1, f2 = encoder.features_of_each(first, second)
        return Encoded(encoder.projection(f1), f1), Encoded(encoder.projection(f2), f2)


def momentum_copy(encoder: Encoder) -> Encoder:
    """A copy that no gradient reaches; `follow` moves it towards the original."""
    return copy.deepcopy(encoder).requires_grad_(False)


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, rate: Tensor | float, *, statistics: bool = False) -> None:
    """target += rate * (source - target); rate = 1 - momentum. Parameters, and BatchNorm's `statistics` if asked.

    By default the statistics stay the target's: it sees every batch itself, in training mode as in MoCo and BYOL, and
    so has running statistics that fit its own, slower, weights.
    """
    targets: list[Tensor] = list(target.parameters())
    sources: list[Tensor] = list(source.parameters())
    if statistics:
        targets += [buffer for buffer in target.buffers() if buffer.is_floating_point()]
        sources += [buffer for buffer in source.buffers() if buffer.is_floating_point()]
    if isinstance(rate, Tensor):  # a number on the device: lerp would read it back
        steps = torch._foreach_sub(sources, targets)
        torch._foreach_mul_(steps, rate)
        torch._foreach_add_(targets, steps)
    else:
        torch._foreach_lerp_(targets, sources, rate)


def cosine_rate(momentum: float, progress: Tensor | float) -> Tensor | float:
    """1 - momentum for a momentum that rises to 1: (1 - m) (cos(pi k / K) + 1) / 2 (BYOL, section 3.3)."""
    if isinstance(progress, Tensor):
        return (torch.cos(progress * math.pi) + 1) * ((1 - momentum) / 2)
    return (1 - momentum) * (math.cos(math.pi * progress) + 1) / 2


def check_range(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raises unless low <= value <= high (low < value if `open_low`)."""
    if not (low < value if open_low else low <= value) or not value <= high:
        upper = "" if math.isinf(high) else f" and <= {high:g}"
        raise UserError(f"{name} must be {'>' if open_low else '>='} {low:g}{upper}, got {value}")


def _has_batchnorm(module: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
