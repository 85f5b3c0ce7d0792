"""What the images give by themselves, without an encoder: a row that is not above it has learned nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .. import evaluation, runs
from ..config import TrainConfig
from ..data.sources import statistics
from ..inputs import load_split
from ..machine import resolve_device
from . import store
from .plan import SCALES


class Pixels(nn.Module):
    """Features (b, c · h · w) that are the normalised images themselves."""

    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def measure_pixels(
    scale: str,
    results: Path,
    *,
    root: str = "data",
    download: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Path:
    """Measure the raw images of a scale's data as encoders are measured there, unless the file has just that."""
    size, settings = SCALES[scale], SCALES[scale].evaluation
    path = results / store.PIXELS.format(size.images)
    there = store.pixels([results], size.images)
    if there is not None and there["protocol"]["settings"] == dataclasses.asdict(settings):
        return path
    config = TrainConfig(data=size.data, image_size=size.settings.get("image_size"), root=root, download=download)
    train, test = (load_split(config, split) for split in ("train", "test"))
    mean, std = statistics(train)
    on = resolve_device(device)
    found = evaluation.evaluate(
        Pixels(), train, test, mean=mean, std=std, device=on, settings=settings, progress=progress
    )
    found["protocol"] |= {"features": "the normalised pixels of clean images", "checkpoint": "none: nothing is trained"}
    values: dict[str, Any] = {"data": size.images, "evaluation": found, **runs.describe(on)}
    store.write_whole(path, values)
    return path
