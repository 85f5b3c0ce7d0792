"""SimCLR: the two views of an item attract, all other views of the batch (and of a memory) repel."""

from __future__ import annotations

from torch import Tensor

from ..encoders import Encoder
from ..errors import UserError
from ..losses import nt_xent, unit
from .base import Method, NegativeSource, StepOutput
from .temperature import Temperature


class SimCLR(Method):
    """Chen et al. 2020. With a `memory`, its embeddings are further negatives of every view: D-SimCLR.

    Args:
        temperature: 0.5 is the original's for CIFAR-10.
        temperature_high, temperature_cycles: let it swing from `temperature_high` down and back, so many times.
        debias: τ⁺ of the debiased loss; see `duel.losses.nt_xent`.
        joint: one pass over both views, so that BatchNorm sees 2b images, as in the original.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        temperature: float = 0.5,
        temperature_high: float | None = None,
        temperature_cycles: float = 5.0,
        debias: float | None = None,
        memory: NegativeSource | None = None,
        joint: bool = True,
    ) -> None:
        if debias is not None and not 0 <= debias < 1:
            raise UserError(f"debias must lie in [0, 1), got {debias}")
        super().__init__(encoder, memory=memory, joint=joint)
        self.temperature = Temperature(temperature, temperature_high, temperature_cycles)
        self.debias = debias

    def forward(self, view1: Tensor, view2: Tensor, ids: Tensor | None = None) -> StepOutput:
        (z1, features), (z2, _) = self._encode_both(self.encoder, view1, view2)
        negatives, blocked = (None, None) if self.memory is None else self.memory.negatives(exclude_ids=ids)
        loss = nt_xent(
            z1,
            z2,
            temperature=self.temperature.value,
            negatives=negatives,
            blocked=blocked,
            ids=ids,
            debias=self.debias,
        )
        return StepOutput(loss, unit(z1.detach()), features.detach())

    def after_step(self, progress: Tensor | float) -> None:
        self.temperature.advance(progress)
