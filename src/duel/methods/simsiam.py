"""SimSiam: predict one view's projection from the other's, without negatives and without a momentum copy."""

from __future__ import annotations

import torch
from torch import Tensor

from ..encoders import Encoder, mlp
from ..losses import negative_cosine, unit
from .base import Method, NegativeSource, StepOutput, check_range, encode


class SimSiam(Method):
    """Chen & He 2021. The gradient stops at the side that is predicted.

    Args:
        predictor_hidden: the predictor's bottleneck; default a quarter of the projection, as in the original.
        symmetric: predict each view from the other (the original); otherwise only the second from the first.
        joint: one pass over both views. Off, as in the original: each view has BatchNorm statistics of its own.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        predictor_hidden: int | None = None,
        symmetric: bool = True,
        memory: NegativeSource | None = None,
        joint: bool = False,
    ) -> None:
        super().__init__(encoder, memory=memory, joint=joint)
        hidden = max(1, encoder.dim // 4) if predictor_hidden is None else predictor_hidden
        check_range("predictor_hidden", hidden, 1)
        self.predictor = mlp(encoder.dim, hidden, encoder.dim, norm="hidden")
        self.symmetric = symmetric

    def forward(self, view1: Tensor, view2: Tensor, ids: Tensor | None = None) -> StepOutput:
        if not self.symmetric:
            z1, features = encode(self.encoder, view1)
            with torch.no_grad():
                z2 = self.encoder(view2)
            return StepOutput(negative_cosine(self.predictor(z1), z2), unit(z1.detach()), features.detach())
        (z1, features), (z2, _) = self._encode_both(self.encoder, view1, view2)
        p1, p2 = self._both(self.predictor, z1, z2)
        loss = 0.5 * (negative_cosine(p1, z2) + negative_cosine(p2, z1))
        return StepOutput(loss, unit(z1.detach()), features.detach())
