"""MoCo v2: match the key that a slowly moving copy makes of the other view, against a memory of earlier keys.

BatchNorm leaks in MoCo: query and key of an item are normalised together with the same other images, negatives with
others, so the statistics betray which key is the positive. The original normalises in small groups (one per device)
and shuffles the keys among them; `batchnorm_groups` does the same on one device. `key_batchnorm="running"` removes the
leak altogether: keys are normalised by running statistics that follow the encoder's (EMAN, Cai et al. 2021), so a key
depends on its image alone. The default, the whole batch as one group, leaks little (the signal is shared by all
queries) but is not free of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..batchnorm import split_batchnorm
from ..encoders import Encoder
from ..errors import UserError
from ..losses import info_nce, unit
from ..modes import evaluating
from ..streams import Beside
from .base import Encoded, Method, NegativeSource, StepOutput, check_range, encode, follow, momentum_copy
from .temperature import Temperature


class MoCo(Method):
    """He et al. 2020, Chen et al. 2020b. Plain MoCo with a FIFO memory; D-MoCo is the same with a DUEL policy.

    Args:
        memory: holds the keys; filled before the first step. May be left out if `in_batch_negatives`.
        temperature: 0.2 is MoCo v2's.
        temperature_high, temperature_cycles: let it swing from `temperature_high` down and back, so many times.
        momentum: of the key encoder. 0.99 suits small data sets; MoCo v2 has 0.999 on ImageNet.
        symmetric: each view is query once and key once (twice the encoding); the original is not symmetric.
        in_batch_negatives: the other keys of the batch are negatives too.
        batchnorm_groups: how many groups of the batch BatchNorm normalises separately; keys are dealt out anew among
            them. 8 imitates the original's eight devices.
        key_batchnorm: "batch", statistics of the keys' own batch (the original); "running", EMAN.
    """

    uses_memory = True

    def __init__(
        self,
        encoder: Encoder,
        *,
        memory: NegativeSource | None = None,
        temperature: float = 0.2,
        temperature_high: float | None = None,
        temperature_cycles: float = 5.0,
        momentum: float = 0.99,
        symmetric: bool = False,
        in_batch_negatives: bool = False,
        batchnorm_groups: int = 1,
        key_batchnorm: Literal["batch", "running"] = "batch",
    ) -> None:
        check_range("momentum", momentum, 0, 1)
        check_range("batchnorm_groups", batchnorm_groups, 1)
        if key_batchnorm not in ("batch", "running"):
            raise UserError(f"key_batchnorm must be 'batch' or 'running', got {key_batchnorm!r}")
        super().__init__(encoder, memory=memory)
        self.temperature = Temperature(temperature, temperature_high, temperature_cycles)
        self.momentum = momentum
        self.symmetric = symmetric
        self.in_batch_negatives = in_batch_negatives
        self.groups = batchnorm_groups
        self.running = key_batchnorm == "running"
        if batchnorm_groups > 1:
            split_batchnorm(encoder, batchnorm_groups)
        self.key_encoder = momentum_copy(encoder)
        self._stream: Beside | None = None

    @property
    def memory_encoder(self) -> Encoder:
        return self.key_encoder

    def forward(self, view1: Tensor, view2: Tensor, ids: Tensor | None = None) -> StepOutput:
        if view1.shape[0] % self.groups:
            raise UserError(f"the batch size must be a multiple of batchnorm_groups {self.groups}, got {len(view1)}")
        negatives, blocked = self._negatives(ids, like=view1)

        def loss(query: Tensor, key: Tensor) -> Tensor:
            return info_nce(
                query,
                key,
                negatives,
                temperature=self.temperature.value,
                blocked=blocked,
                in_batch=self.in_batch_negatives,
                ids=ids,
            )

        beside = self._beside(view1.device)
        if not self.symmetric:
            with torch.no_grad(), beside.begin():
                key, features = self._keys(view2)
            query = self.encoder(view1)
            beside.join()
            return StepOutput(loss(query, key), unit(key), features)
        with torch.no_grad(), beside.begin():
            (k1, _), (k2, features) = self._keys_of_both(view1, view2)
        q1, q2 = self._both(self.encoder, view1, view2)
        beside.join()
        # One key per item goes to the memory, so that a slot is an item.
        return StepOutput(0.5 * (loss(q1, k2) + loss(q2, k1)), unit(k2), features)

    def after_step(self, progress: Tensor | float) -> None:
        follow(self.key_encoder, self.encoder, 1 - self.momentum, statistics=self.running)
        self.temperature.advance(progress)

    def _beside(self, device: torch.device) -> Beside:
        """Keys do not wait for queries, nor queries for keys: a GPU works on both at once."""
        if self._stream is None or self._stream.device != device:
            self._stream = Beside(device)
        return self._stream

    def _keys(self, images: Tensor) -> Encoded:
        """Keys of images (b, c, h, w).

        Dealing like cards spreads each of the queries' groups evenly over the keys' groups. A fixed order will do:
        the batch itself comes in random order.
        """
        if self.running:
            with evaluating(self.key_encoder):
                return encode(self.key_encoder, images)
        if self.groups == 1:
            return encode(self.key_encoder, images)
        each = images.shape[0] // self.groups
        dealt = images.view(self.groups, each, *images.shape[1:]).transpose(0, 1).flatten(0, 1)
        both = encode(self.key_encoder, dealt)
        return Encoded(*(part.view(each, self.groups, -1).transpose(0, 1).flatten(0, 1) for part in both))

    def _keys_of_both(self, view1: Tensor, view2: Tensor) -> tuple[Encoded, Encoded]:
        if self.running:  # running statistics mix nothing, so both views can share a pass
            with evaluating(self.key_encoder):
                return self._encode_both(self.key_encoder, view1, view2, joint=True)
        if self.groups == 1:
            return self._encode_both(self.key_encoder, view1, view2)
        return self._keys(view1), self._keys(view2)

    def _negatives(self, ids: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.memory is not None:
            negatives, blocked = self.memory.negatives(exclude_ids=ids)
        else:
            negatives, blocked = like.new_empty((0, self.encoder.dim)), None
        if negatives.shape[0] == 0 and not self.in_batch_negatives:
            raise UserError(
                "MoCo has no negatives: its memory is missing or empty. Give a memory and fill it "
                "(memory.update(method.embed(images), id=ids)), or set in_batch_negatives=True."
            )
        return negatives, blocked
