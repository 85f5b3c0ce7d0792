"""SimCLR: the two views of an item attract, all other views of the batch (and of a memory) repel."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..encoders import Encoder
from ..losses import nt_xent, unit
from .base import Method, NegativeSource, StepOutput, check_range, encode


class SimCLR(Method):
    """Chen et al. 2020. With a `memory`, its embeddings are further negatives of every view: D-SimCLR.

    Args:
        temperature: 0.5 is the original's for CIFAR-10.
        joint: one pass over both views, so that BatchNorm sees 2b images, as in the original.
    """

    def __init__(
        self, encoder: Encoder, *, temperature: float = 0.5, memory: NegativeSource | None = None, joint: bool = True
    ) -> None:
        check_range("temperature", temperature, 0, open_low=True)
        super().__init__(encoder, memory=memory, joint=joint)
        self.temperature = temperature

    def forward(self, view1: Tensor, view2: Tensor, ids: Tensor | None = None) -> StepOutput:
        (z1, features), (z2, _) = self._encode_both(partial(encode, self.encoder), view1, view2)
        negatives, blocked = (None, None) if self.memory is None else self.memory.negatives(exclude_ids=ids)
        loss = nt_xent(z1, z2, temperature=self.temperature, negatives=negatives, blocked=blocked, ids=ids)
        return StepOutput(loss, unit(z1.detach()), features.detach())
