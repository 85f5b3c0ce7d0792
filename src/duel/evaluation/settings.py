"""What a user may change about an evaluation. The defaults are the protocol; no torch here, so that help is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from duel.errors import UserError, check_seed, suggest

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How features are taken and measured."""

    batch_size: int = 512
    """Images encoded at a time (also the batch of the BatchNorm re-estimation)."""
    workers: int = 0
    """Processes that decode images; 0 decodes in this one. Only for sources that are not on the device already."""
    precision: Precision = "fp32"
    """What images are encoded in. auto: bf16 (mixed) on a GPU, fp32 on the CPU. Features are float32 all the same."""
    batchnorm_images: int = 10_000
    """Clean, class-balanced training images on which BatchNorm statistics are re-estimated (at most the whole set)."""
    neighbours: int = 200
    """k of the weighted k-NN classifier."""
    temperature: float = 0.1
    """Temperature of the weighted k-NN vote: a neighbour at cosine s weighs exp(s / temperature)."""
    probe_epochs: int = 100
    """Passes of the linear probe over the training features."""
    probe_lr: float = 0.01
    """Learning rate of the linear probe, constant."""
    probe_momentum: float = 0.9
    """SGD momentum of the linear probe."""
    probe_weight_decay: float = 1e-6
    """Weight decay of the linear probe (weights and bias)."""
    probe_batch_size: int = 256
    """Batch of the linear probe; the last, smaller batch of an epoch is used too."""
    shots: int = 5
    """Labelled training images per class of the nearest-centroid classifier."""
    shot_repeats: int = 20
    """Draws of those images; the rate is the mean over draws."""
    seed: int = 0
    """Seed of the probe's order, of the few-shot draws and of the images for BatchNorm."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "batchnorm_images", "neighbours", "probe_epochs", "probe_batch_size", "shots"):
            _at_least(name, getattr(self, name), 1)
        _at_least("shot_repeats", self.shot_repeats, 1)
        _at_least("workers", self.workers, 0)
        check_seed(self.seed)
        if self.precision not in get_args(Precision):
            raise UserError(suggest("precision", self.precision, get_args(Precision)))
        for name in ("temperature", "probe_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        if not 0 <= self.probe_momentum < 1:
            raise UserError(f"probe_momentum must be in [0, 1), got {self.probe_momentum}")
        if not 0 <= self.probe_weight_decay < math.inf:
            raise UserError(f"probe_weight_decay must be >= 0 and finite, got {self.probe_weight_decay}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} must be >= {least}, got {value}")


DEFAULTS = EvaluationSettings()
