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
    many[:, 0, 0, 3] = 255
    images = from_arrays(many).data
    expected = np.stack([np.asarray(opaque.picture(Image.fromarray(image))) for image in many])
    assert (images.permute(0, 2, 3, 1).int() - torch.from_numpy(expected).int()).abs().max() <= 1


@pytest.mark.parametrize("highest", [0, 1, 254])
def test_a_fourth_channel_by_which_nothing_is_opaque_is_none(highest: int) -> None:
    """A mask of zeros and ones, say, or the fourth byte of a screen's frames."""
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 4), dtype=np.uint8)
    frames[1, ..., 3] = frames[1, ..., 3].clip(0, highest)
    frames[[0, 2], 0, 0, 3] = 255
    as_they_are = torch.from_numpy(frames[..., :3]).permute(0, 3, 1, 2)
    images = from_arrays(frames).data
    assert [torch.equal(*pair) for pair in zip(images, as_they_are, strict=True)] == [False, True, False]


def test_a_file_that_is_transparent_all_over_is_seen_as_it_is(tmp_path: Path) -> None:
    hidden = np.full((8, 8, 4), 100, dtype=np.uint8)
    hidden[..., 3] = 0
    Image.fromarray(hidden).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", 8).unique().tolist() == [100]


def test_of_a_stream() -> None:
    frames = LiveStream(iter([Image.fromarray(drawing(True)), drawing(False)]), batch_size=2, device="cpu")
    assert torch.equal(frames.next()[0], torch.stack([seen(True), seen(False)]))
