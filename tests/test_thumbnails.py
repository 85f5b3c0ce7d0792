"""A memory that is compared by thumbnails: what they tell apart, and that nothing is encoded for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

import duel
from duel import recipes
from duel.benchmarks.floor import images_of
from duel.config import TrainConfig
from duel.data.stream import show
from duel.errors import UserError
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.pixels import SIDE, length
from duel.replacement import replace
from duel.reproduce.fingerprint import fingerprint
from duel.reproduce.plan import encoded_images
from duel.step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore")


def scenes(count: int, side: int = 32, seed: int = 0) -> Tensor:
    """Smooth images, uint8 (count, 3, side, side)."""
    noise = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    smooth = interpolate(noise, side, mode="bicubic")
    return smooth.clamp(0, 1).mul(255).round().to(torch.uint8)


@pytest.mark.parametrize(("channels", "side"), [(3, 32), (1, 8), (3, 5), (3, 50)])
def test_unit_rows_of_every_size(channels: int, side: int) -> None:
    rows = duel.thumbnails(scenes(4, side)[:, :channels])
    assert rows.shape == (4, length(channels))
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))


def test_an_image_of_that_size_is_its_own_thumbnail() -> None:
    images = torch.rand(5, 3, SIDE, SIDE, dtype=torch.float64)
    centred = (images - images.mean((2, 3), keepdim=True)).flatten(1)
    floor = torch.full((5, 1), 2 / 255 * 192**0.5, dtype=torch.float64)
    torch.testing.assert_close(duel.thumbnails(images), normalize(torch.cat([centred, floor], 1), dim=1).float())


def test_fields_are_means() -> None:
    small = torch.rand(3, 1, SIDE, SIDE)
    large = small.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    large[:, :, ::2] += 0.1  # within the fields, to and fro
    large[:, :, 1::2] -= 0.1
    torch.testing.assert_close(duel.thumbnails(large), duel.thumbnails(small))


def test_neither_brightness_nor_contrast_counts() -> None:
    images = scenes(6).float() / 255
    rows = duel.thumbnails(images)
    assert ((duel.thumbnails(0.4 * images + 0.3) * rows).sum(1) > 0.995).all()
    tint = torch.tensor([0.1, 0.0, -0.1]).view(3, 1, 1)  # nor what is added to a channel as a whole
    torch.testing.assert_close(duel.thumbnails(images + tint), rows, atol=1e-5, rtol=0)
    torch.testing.assert_close(duel.thumbnails(scenes(6)), rows)
    assert (rows @ rows.T).fill_diagonal_(0).max() < 0.9


def test_plain_areas_of_colour_are_all_alike() -> None:
    """And not what rounding makes of them."""
    plain = torch.arange(0, 256, 5).view(-1, 1, 1, 1).expand(-1, 3, 30, 30)
    rows = duel.thumbnails(torch.cat([plain.to(torch.uint8), plain.to(torch.uint8).flip(0)]))
    axis = torch.eye(length(3))[-1:]
    torch.testing.assert_close(rows, axis.expand(len(rows), -1), atol=1e-4, rtol=0)
    torch.testing.assert_close(duel.thumbnails(torch.full((1, 3, 30, 30), 1 / 3)), axis)


@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_a_dark_scene_does_not_fill_the_memory_with_its_noise(noise: float) -> None:
    """As a camera's whose lens is covered half of the time."""
    generator = torch.Generator().manual_seed(0)
    dark = 20 + noise * torch.randn(2000, 3, 32, 32, generator=generator)
    frames = torch.stack([scenes(2000), dark.round().clamp(0, 255).to(torch.uint8)], dim=1).flatten(0, 1)
    memory = duel.WorkingMemory(256, length(3), duel.policies.Duel("exponential:0.05"), {"dark": ((), torch.bool)})
    for i in range(0, len(frames), 100):
        memory.update(duel.thumbnails(frames[i : i + 100]), dark=torch.arange(i, i + 100) % 2 == 1)
    assert memory["dark"].float().mean() < 0.05


def test_frames_of_an_image_are_nearer_than_other_images() -> None:
    images = scenes(200)
    generator = torch.Generator().manual_seed(1)
    shift = torch.randint(-1, 2, (200, 2), generator=generator)
    frames = show(images, shift, 0.9 + 0.2 * torch.rand(200, generator=generator))
    cosines = duel.thumbnails(frames) @ duel.thumbnails(images).T
    own = cosines.diagonal()
    others = cosines.clone().fill_diagonal_(-1).max(1).values
    assert (own > others).all()
    assert own.min() > 0.8


def test_what_is_no_image_is_refused() -> None:
    for wrong, said in ((np.zeros((1, 3, 8, 8)), "must be a tensor"), (torch.zeros(3, 8, 8), "got (3, 8, 8)")):
        with pytest.raises(UserError, match="images must be") as error:
            duel.thumbnails(wrong)  # type: ignore[arg-type]
        assert said in str(error.value)
    with pytest.raises(UserError, match=r"got \(1, 3, 8, 8\) of torch.int64"):
        duel.thumbnails(torch.zeros(1, 3, 8, 8, dtype=torch.int64))


# In training ------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    **{"batch_size": 8, "memory_size": 24, "dim": 16, "steps": 20, "bias": 27.0},
    **{"source": "memory", "space": "pixels", "score": "exponential:0.05"},
}


def configured(method: Any = "d-simclr", **changes: Any) -> TrainConfig:
    settings = SMALL | ({"queue": 24} if method.endswith("moco") else {}) | changes
    return dataclasses.replace(recipes.demo(method), **settings)


def start(config: TrainConfig) -> TrainingStep:
    fabric = build_fabric(config)
    step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
    step.fill_memory()
    return step


@pytest.mark.parametrize("policy", ["duel", "minred", "adaptive", "reservoir"])
@pytest.mark.parametrize("method", ["d-simclr", "d-moco", "d-byol"])
def test_nothing_is_encoded_for_the_memory(method: str, policy: str) -> None:
    config = configured(method, policy=policy)
    step = start(config)
    queue = config.queue
    assert step.images_encoded == queue
    for _ in range(3):
        step()
    plain = dataclasses.replace(recipes.demo(method.removeprefix("d-")), batch_size=8)
    assert step.images_encoded == 3 * sum(images_of(plain)) + queue
    assert encoded_images(dataclasses.replace(config, steps=3)) == step.images_encoded
    assert step.memory is not None
    assert torch.equal(step.memory.embeddings, duel.thumbnails(step.memory["image"]))


def test_victims_are_those_of_replace() -> None:
    step = start(configured(stream_batch=20))
    assert step.memory is not None
    for _ in range(3):
        ids, held = step.memory["id"].clone(), step.memory.embeddings.clone()
        step()
        newcomers = duel.thumbnails(step.images)
        slots = replace(held, newcomers, score="exponential:0.05", engine="reference").slots
        for b, slot in enumerate(slots.tolist()):
            ids[slot] = step.ids[b]
        assert torch.equal(step.memory["id"], ids)


def test_settings_of_encoding_are_no_part_of_the_result() -> None:
    config = configured(refresh=12)
    assert config.refreshed_slots == 0
    for change in ({"refresh": 0}, {"memory_view": "clean"}):
        assert fingerprint(dataclasses.replace(config, **change)) == fingerprint(config)
    for change in ({"space": "projection"}, {"score": "linear"}):
        assert fingerprint(dataclasses.replace(config, **change)) != fingerprint(config)


def test_what_pixels_cannot_give_is_refused() -> None:
    with pytest.raises(UserError, match="source 'stream' batches come from the stream; use --source memory"):
        TrainConfig(method="d-simclr", space="pixels")
    with pytest.raises(UserError, match="embeddings are negatives; give it a queue"):
        configured("d-moco", queue=0)
    with pytest.raises(UserError, match="embeddings are negatives; do without memory_negatives"):
        configured(memory_negatives=True)
    with pytest.raises(UserError, match="memory_view augmented would do nothing"):
        configured(memory_view="augmented")
    with pytest.raises(UserError, match="keeps no memory, so space would do nothing"):
        TrainConfig(method="simclr", space="pixels")
