"""Images with transparent parts are seen as they look on a white page, wherever they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from duel.data import from_arrays, load, opaque
from duel.data.folder import decode
from duel.data.live import LiveStream


def drawing(left: bool) -> NDArray[np.uint8]:
    """A black half on a transparent ground whose hidden colour is black, too: (16, 16, 4)."""
    pixels = np.zeros((16, 16, 4), dtype=np.uint8)
    pixels[:, :8][..., 3] = 255 * left
    pixels[:, 8:][..., 3] = 255 * (not left)
    return pixels


def seen(left: bool) -> torch.Tensor:
    expected = torch.full((3, 16, 16), 255, dtype=torch.uint8)
    expected[:, :, slice(0, 8) if left else slice(8, 16)] = 0
    return expected


@pytest.mark.parametrize("name", ["a.png", "a.webp", "palette.png", "a.gif", "grey.png"])
@pytest.mark.parametrize("left", [True, False])
def test_of_files(tmp_path: Path, name: str, left: bool) -> None:
    image = Image.fromarray(drawing(left))
    if name.startswith("palette"):
        image = image.quantize(4)
    elif name.startswith("grey"):
        image = image.convert("LA")
    image.save(tmp_path / name, **({"lossless": True, "exact": True} if name.endswith("webp") else {}))
    assert torch.equal(decode(tmp_path / name, 16), seen(left))


def test_of_a_colour_that_stands_for_nothing(tmp_path: Path) -> None:
    """PNG without an opacity, one colour of which is called transparent."""
    rgb = np.zeros((16, 16, 3), dtype=np.uint8)
    rgb[:, 8:] = 10, 20, 30
    Image.fromarray(rgb).save(tmp_path / "a.png", transparency=(10, 20, 30))
    assert torch.equal(decode(tmp_path / "a.png", 16), seen(left=True))


def test_a_drawing_and_its_copy_without_transparency_are_alike(tmp_path: Path) -> None:
    image = Image.fromarray(drawing(left=True))
    image.save(tmp_path / "a.png")
    flat = Image.new("RGB", image.size, "white")
    flat.paste(image, mask=image)
    flat.save(tmp_path / "b.png")
    one, other = load(str(tmp_path)).images(torch.arange(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_of_arrays(kind: type) -> None:
    both = np.stack([drawing(True), drawing(False)])
    images = from_arrays(both if kind is np.uint8 else (both / 255).astype(kind)).data
    assert torch.equal(images, torch.stack([seen(True), seen(False)]))


def test_arrays_of_any_opacity_are_as_pillow_has_them() -> None:
    """And in pieces as at once."""
    many = np.random.default_rng(0).integers(0, 256, (opaque._AT_ONCE + 3, 4, 4, 4), dtype=np.uint8)
    images = from_arrays(many).data
    expected = np.stack([np.asarray(opaque.picture(Image.fromarray(image))) for image in many])
    assert (images.permute(0, 2, 3, 1).int() - torch.from_numpy(expected).int()).abs().max() <= 1


def test_a_fourth_channel_that_is_zero_everywhere_is_none() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 4), dtype=np.uint8)
    frames[1, ..., 3] = 0
    images = from_arrays(frames).data
    assert torch.equal(images[1], torch.from_numpy(frames[1, ..., :3]).permute(2, 0, 1))
    assert not torch.equal(images[0], torch.from_numpy(frames[0, ..., :3]).permute(2, 0, 1))
    for frame, image in zip(frames, images, strict=True):
        seen = torch.from_numpy(np.array(opaque.picture(Image.fromarray(frame)))).permute(2, 0, 1)
        assert (seen.int() - image.int()).abs().max() <= 1


def test_of_a_stream() -> None:
    frames = LiveStream(iter([Image.fromarray(drawing(True)), drawing(False)]), batch_size=2, device="cpu")
    assert torch.equal(frames.next()[0], torch.stack([seen(True), seen(False)]))
