"""Images from NumPy arrays, .npz and .npy files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duel.data import opaque
from duel.data.sources import RESIDENT_BYTES, ArraySource, Residency, Split, own_split
from duel.errors import UserError

# What the arrays in a .npz may be called, first match wins; with a split's name before or after (train_images).
IMAGE_KEYS = ("images", "x", "X", "data", "image", "arr_0")
LABEL_KEYS = ("labels", "y", "Y", "targets", "label", "arr_1")
TEST_PARTS = ("test", "val")


def as_images(array: Any, name: str) -> Tensor:
    """Array-like (n, h, w), (n, h, w, c) or (n, c, h, w), c = 1, 3 or 4, uint8 or floats in 0..1 -> uint8 (n, 3, h, w).

    Grey images become three equal channels; a fourth channel is the opacity, on white. uint8 (n, 3, h, w) is not
    copied.
    """
    array = np.asanyarray(array)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3, 4):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3, 4) or 0 in array.shape[2:]:
        raise UserError(
            f"images in {name} must have shape (n, h, w), (n, h, w, c) or (n, c, h, w) with 1, 3 or 4 channels, "
            f"got {array.shape}"
        )
    if len(array) == 0:
        raise UserError(f"{name} holds no images: its array has shape {array.shape}")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also refuses NaN
            raise UserError(
                f"images in {name} are {array.dtype} and must be in 0..1, got {low:g}..{high:g}; or give uint8"
            )
        array = (array * 255).round().astype(np.uint8)
    elif array.dtype != np.uint8:
        raise UserError(f"images in {name} must be uint8, or floats in 0..1, got {array.dtype}")
    array = opaque.arrays(array) if array.shape[1] == 4 else array
    if array.shape[1] == 1:
        array = np.repeat(array, 3, axis=1)
    return torch.from_numpy(array if array.flags.c_contiguous and array.flags.writeable else array.copy())


def from_arrays(images: Any, labels: Any = None, *, name: str = "array", classes: tuple[str, ...] = ()) -> ArraySource:
    """A source from anything NumPy takes: images as in `as_images`, labels whole numbers from 0, one per image."""
    return ArraySource(as_images(images, name), _labels(labels, name), name=name, classes=classes)


def _labels(labels: Any, name: str) -> Tensor | None:
    if labels is None:
        return None
    labels = np.asarray(labels)
    labels = labels.reshape(len(labels), -1)[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.dtype.kind not in "iub" or labels.ndim != 1:
        raise UserError(f"labels in {name} must be a list of whole numbers from 0, got {labels.dtype} {labels.shape}")
    return torch.from_numpy(labels.astype(np.int64))


def resize(images: Tensor, size: int) -> Tensor:
    """uint8 (n, c, h, w) -> (n, c, size, size): shorter side to size (bilinear, antialiased), central square."""
    height, width = images.shape[2:]
    if (height, width) == (size, size):
        return images
    scale = size / min(height, width)
    to = (max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (to[0] - size) // 2, (to[1] - size) // 2
    out = torch.empty(len(images), images.shape[1], size, size, dtype=torch.uint8)
    for piece, target in zip(torch.split(images, 1024), torch.split(out, 1024), strict=True):
        big = torch.nn.functional.interpolate(piece.float(), to, mode="bilinear", antialias=True)
        target.copy_(big[:, :, top : top + size, left : left + size].round_().clamp_(0, 255))
    return out


def finish(source: ArraySource, image_size: int | None, residency: Residency) -> ArraySource:
    """Resized where asked, and marked resident or not."""
    images = source.data if image_size is None else resize(source.data, image_size)
    resident = images.numel() <= RESIDENT_BYTES if residency == "auto" else residency == "device"
    return ArraySource(images, source.labels, name=source.name, classes=source.classes, resident=resident)


def load(
    path: Path, *, split: Split, image_size: int | None, residency: Residency, labelled: bool = True
) -> ArraySource:
    """A .npy of images, or a .npz with images and perhaps labels, perhaps one pair for each split."""
    name = str(path)
    has_test, kept_apart = False, 0
    classes: tuple[str, ...] = ()
    try:
        if path.suffix == ".npy":
            # Mapped, copy on write: a file larger than memory can be streamed.
            images, labels, has_split = np.load(path, mmap_mode="c", allow_pickle=False), None, False
        else:
            with np.load(path, allow_pickle=False) as archive:
                images, labels, has_split = _members(archive, split, name)
                classes = _classes(archive, name) if has_split and labelled else ()
                has_test = any(_find(archive, IMAGE_KEYS, part) for part in TEST_PARTS)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} cannot be read as a NumPy file of plain arrays: {error}") from error
    source = from_arrays(images, labels if labelled else None, name=name, classes=() if labels is None else classes)
    if not has_split:
        ids = own_split(name, source.labels, len(source), split)
        kept_apart = len(source) - len(ids)
        has_test = kept_apart > 0
        source = source if len(ids) == len(source) else source.subset(ids)
    source = finish(source, image_size, residency)
    source.has_test, source.kept_apart = has_test, kept_apart
    return source


def _classes(arrays: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Of all parts together: the last ones may be missing in one of them. Labels that are none are told of once their
    part is asked for."""
    highest = -1
    for part in ("train", *TEST_PARTS):
        key = _find(arrays, LABEL_KEYS, part)
        with suppress(UserError):
            labels = None if key is None else _labels(arrays[key], name)
            highest = highest if labels is None or not len(labels) else max(highest, int(labels.max()))
    return tuple(str(c) for c in range(highest + 1))


def _find(arrays: Mapping[str, Any], keys: tuple[str, ...], part: str) -> str | None:
    """What the first of these arrays is called there, of this part or of no part."""
    names = (n for key in keys for n in ((f"{part}_{key}", f"{key}_{part}") if part else (key,)))
    return next((n for n in names if n in arrays), None)


def _members(arrays: Mapping[str, Any], split: Split, name: str) -> tuple[Any, Any, bool]:
    """(images, labels or None, whether the file has a split of its own)."""

    def find(keys: tuple[str, ...], part: str) -> Any:
        found = _find(arrays, keys, part)
        return None if found is None else arrays[found]

    if _find(arrays, IMAGE_KEYS, "train"):
        for part in ("train",) if split == "train" else TEST_PARTS:
            if (images := find(IMAGE_KEYS, part)) is not None:
                return images, find(LABEL_KEYS, part), True
        raise UserError(f"{name} has training images but no test_images (or x_test, val_images, …) array")
    images = find(IMAGE_KEYS, "")
    if images is None:
        raise UserError(
            f"{name} holds the arrays {sorted(arrays)}; images must be called one of {', '.join(IMAGE_KEYS)} "
            f"(or train_images and test_images, x_train and x_test, …), labels one of {', '.join(LABEL_KEYS)}"
        )
    return images, find(LABEL_KEYS, ""), False
