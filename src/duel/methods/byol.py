"""BYOL: predict what a slowly moving copy of the encoder makes of the other view."""

from __future__ import annotations

import torch
from torch import Tensor

from ..encoders import Encoder, mlp
from ..losses import negative_cosine, unit
from .base import Method, NegativeSource, StepOutput, check_range, cosine_rate, encode, follow, momentum_copy


class BYOL(Method):
    """Grill et al. 2020.

    The loss is the mean of the two negative cosines (from -1 to 1), a quarter of the original's scale.

    Args:
        momentum: of the target, at the start; it rises to 1 along a cosine.
        momentum_schedule: False keeps `momentum` throughout.
        predictor_hidden: default four times the projection.
        symmetric: predict each view from the other (the original); otherwise only the second from the first.
        joint: one pass over both views. Off, as in the original: each view has BatchNorm statistics of its own.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        momentum: float = 0.996,
        momentum_schedule: bool = True,
        predictor_hidden: int | None = None,
        symmetric: bool = True,
        memory: NegativeSource | None = None,
        joint: bool = False,
    ) -> None:
        check_range("momentum", momentum, 0, 1)
        super().__init__(encoder, memory=memory, joint=joint)
        hidden = 4 * encoder.dim if predictor_hidden is None else predictor_hidden
        check_range("predictor_hidden", hidden, 1)
        self.predictor = mlp(encoder.dim, hidden, encoder.dim, norm="hidden")
        self.target = momentum_copy(encoder)
        self.momentum = momentum
        self.momentum_schedule = momentum_schedule
        self.symmetric = symmetric

    @property
    def memory_encoder(self) -> Encoder:
        return self.target

    def forward(self, view1: Tensor, view2: Tensor, ids: Tensor | None = None) -> StepOutput:
        if not self.symmetric:
            with torch.no_grad():
                t2, features = encode(self.target, view2)
            return StepOutput(negative_cosine(self.predictor(self.encoder(view1)), t2), unit(t2), features)
        z1, z2 = self._both(self.encoder, view1, view2)
        p1, p2 = self._both(self.predictor, z1, z2)
        with torch.no_grad():
            (t1, _), (t2, features) = self._encode_both(self.target, view1, view2)
        return StepOutput(0.5 * (negative_cosine(p1, t2) + negative_cosine(p2, t1)), unit(t2), features)

    def after_step(self, progress: Tensor | float) -> None:
        rate = cosine_rate(self.momentum, progress) if self.momentum_schedule else 1 - self.momentum
        follow(self.target, self.encoder, rate)
