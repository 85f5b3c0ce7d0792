"""Images to measure with: a data set, or made-up ones of CIFAR's shape that need no download."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import interpolate

from duel.config import TrainConfig
from duel.data.sources import ArraySource, statistics
from duel.inputs import Inputs

SYNTHETIC = "synthetic"
#: As many as CIFAR has, of its size.
COUNT, SIDE = 50_000, 32


@lru_cache(maxsize=1)
def synthetic(count: int = COUNT, side: int = SIDE, *, seed: int = 0) -> ArraySource:
    """Smooth patches of colour under a little noise: unlike pure noise, an untrained network tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.empty(count, 3, side, side, dtype=torch.uint8)
    for part in images.split(4096):
        patches = torch.rand(len(part), 3, 4, 4, generator=generator)
        noise = torch.rand(len(part), 3, side, side, generator=generator)
        smooth = interpolate(patches, (side, side), mode="bilinear", align_corners=False)
        part.copy_((smooth * 0.9 + noise * 0.1) * 255)
    return ArraySource(images, name=SYNTHETIC)


def load(config: TrainConfig, device: torch.device, *, count: int = COUNT) -> Inputs:
    """What `config` trains on, resident on `device`; `count` images where its data is `SYNTHETIC`."""
    if config.data != SYNTHETIC:
        return Inputs.load(config, device, test=False)
    source = synthetic(count, config.image_size or SIDE, seed=config.seed)
    return Inputs(train=source.to(device), test=None, stats=statistics(source), ids=None, weights=None)
