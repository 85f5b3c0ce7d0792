"""Images that come once, and no end of them that is known: a camera, a video, a crawler."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duel.data.arrays import as_images, resize
from duel.errors import UserError

_NO_MORE = object()


class StreamEnded(UserError):
    """There are no more images."""


class LiveStream:
    """Batches of what an iterable gives, as a `Stream` gives those of a source: each once, in order, numbered from 0.

    images: gives them one by one, as an array, a tensor or a PIL image (h, w), (h, w, c) or (c, h, w), or several of
    one size (n, h, w, c) or (n, c, h, w), with 1, 3 or 4 channels, uint8 or floats in 0..1. Of a tuple or a list, as a
    loader gives it, the first entry; labels are not looked at. size: side in pixels that they are brought to, as in
    `load`; None: that of the first one, which all others must have.
    """

    def __init__(
        self, images: Iterable[Any], *, batch_size: int, device: torch.device | str, size: int | None = None
    ) -> None:
        if isinstance(images, str | bytes) or not isinstance(images, Iterable):
            raise UserError(f"frames must be an iterable of images, got a {type(images).__name__}")
        self.batch_size, self.device, self.size = batch_size, torch.device(device), size
        self._images = iter(images)
        self._shape: tuple[int, ...] | None = None
        self._waiting: list[Tensor] = []  # uint8 (n, 3, h, w): read but not shown yet
        self._read = self._shown = 0

    def look(self, count: int) -> Tensor:
        """The next `count` images, uint8 (n, 3, h, w), which stay the next ones; fewer where there are no more."""
        while self._read - self._shown < count and (images := next(self._images, _NO_MORE)) is not _NO_MORE:
            piece = self._brought_to_size(images)
            self._waiting.append(piece)
            self._read += len(piece)
        if not self._waiting:
            raise StreamEnded(f"the stream ended after {self._shown:,} images")
        if len(self._waiting) > 1:
            self._waiting = [torch.cat(self._waiting)]
        return self._waiting[0][:count]

    def _brought_to_size(self, images: Any) -> Tensor:
        from PIL.Image import Image

        images = images[0] if isinstance(images, tuple | list) and images else images
        images = images.convert("RGB") if isinstance(images, Image) else images
        name = f"the stream, at number {self._read:,},"
        array = images.detach().cpu().numpy() if isinstance(images, Tensor) else np.asanyarray(images)
        if array.ndim not in (2, 3, 4):
            raise UserError(f"{name} has no image: {type(images).__name__}, shape {array.shape}")
        found = as_images(array if array.ndim == 4 else array[None], name)
        found = found if self.size is None else resize(found, self.size)
        self._shape = self._shape or tuple(found.shape[1:])
        if found.shape[1:] != self._shape:
            (height, width), (h, w) = found.shape[2:], self._shape[1:]
            raise UserError(
                f"{name} has an image of {height} × {width} pixels, the first had {h} × {w}; give an image_size to "
                "bring all to"
            )
        return found.clone()  # a camera may use the same buffer again

    def next(self, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The next batch, as `Stream.next`; StreamEnded where fewer than a batch are left."""
        images = self.look(self.batch_size)
        if len(images) < self.batch_size:
            raise StreamEnded(f"the stream ended after {self._read:,} images")
        self._waiting[0] = self._waiting[0][self.batch_size :]
        ids = torch.arange(self._shown, self._shown + self.batch_size)
        self._shown += self.batch_size
        if out is None:
            return images.to(self.device), ids.to(self.device)
        return out[0].copy_(images), out[1].copy_(ids)

    def state_dict(self) -> dict[str, Any]:
        """How many images were shown. They are not kept: what is resumed goes on with those that come then."""
        return {"shown": self._shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        if "shown" not in state:
            raise UserError("this is no position in a live stream; it was saved by a stream of another kind")
        waiting = self._read - self._shown
        self._shown = int(state["shown"])
        self._read = self._shown + waiting


def raw_frames(file: BinaryIO, size: int) -> Iterator[NDArray[np.uint8]]:
    """Uncompressed RGB frames (size, size, 3), one after the other without anything between them; ffmpeg calls that
    rawvideo, pixel format rgb24. A last one that is not whole is left out."""
    length = 3 * size * size
    while len(frame := file.read(length)) == length:
        yield np.frombuffer(frame, dtype=np.uint8).reshape(size, size, 3)


def standard_input(size: int | None) -> Iterator[NDArray[np.uint8]]:
    """`raw_frames` of what is piped into this process."""
    example = "ffmpeg -i VIDEO -vf scale=64:64 -f rawvideo -pix_fmt rgb24 - | duel train --data - --image-size 64 …"
    if size is None:
        raise UserError(f"data '-' is raw RGB frames from standard input; give their side as image_size: {example}")
    if sys.stdin.isatty():
        raise UserError(f"data '-' is raw RGB frames from standard input, and nothing is piped into it: {example}")
    return raw_frames(sys.stdin.buffer, size)
