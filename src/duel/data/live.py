"""Images that come once, and no end of them that is known: a camera, a video, a crawler."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duel.data import opaque
from duel.data.arrays import as_images, resize
from duel.errors import Notice, UserError

_NO_MORE = object()


class StreamEnded(UserError):
    """There are no more images."""


class LiveStream:
    """Batches of what an iterable gives, as a `Stream` gives those of a source: each once, in order, numbered from 0.

    images: gives them one by one, as an array, a tensor or a PIL image (h, w), (h, w, c) or (c, h, w), or several: a
    list or tuple of them, or one array (n, h, w, c) or (n, c, h, w); with 1, 3 or 4 channels, uint8 or floats in 0..1.
    A loader's labels are passed over. size: side in pixels that they are brought to, as in `load`; None: that of the
    first one, which all others must have.

    waiting: whether it waits for the iterable just now. failed: whether that has raised an error, or given what is no
    image.
    """

    def __init__(
        self, images: Iterable[Any], *, batch_size: int, device: torch.device | str, size: int | None = None
    ) -> None:
        if isinstance(images, str | bytes) or not isinstance(images, Iterable):
            raise UserError(f"frames must be an iterable of images, got a {type(images).__name__}")
        self.batch_size, self.device, self.size = batch_size, torch.device(device), size
        self._images = iter(images)
        self._shape: tuple[int, ...] | None = None
        self._ahead: list[Tensor] = []  # uint8 (n, 3, h, w): read but not shown yet
        self._read = self._shown = 0
        self.waiting = self.failed = False
        self._error: Exception | None = None  # what it failed with, after all that is read

    def look(self, count: int, *, at_least: int | None = None) -> Tensor:
        """The next `count` images, uint8 (n, 3, h, w), which stay the next ones; fewer where there are no more.

        at_least: so many will do where the stream fails; the error is then raised when more than these are needed.
        """
        try:
            while self._read - self._shown < count and (images := self._next()) is not _NO_MORE:
                for array in _arrays(images):
                    self._ahead.append(self._brought_to_size(array, type(images).__name__))
                    self._read += len(self._ahead[-1])
        except Exception as error:
            if at_least is None or self._read - self._shown < at_least:
                self.failed = True
                raise
            self._error = error
        if not self._ahead:
            why = "" if self._shown else ": does what is before the pipe, or the iterable, give any?"
            raise StreamEnded(f"the stream ended after {self._shown:,} images{why}")
        if len(self._ahead) > 1:
            self._ahead = [torch.cat(self._ahead)]
        return self._ahead[0][:count]

    def _next(self) -> Any:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.waiting = True
        try:
            return next(self._images, _NO_MORE)
        finally:
            self.waiting = False

    def _brought_to_size(self, array: NDArray[Any], kind: str) -> Tensor:
        name = f"the stream, at number {self._read:,},"
        if array.ndim not in (2, 3, 4):
            raise UserError(f"{name} has no image: {kind}, shape {array.shape}")
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
        self._ahead[0] = self._ahead[0][self.batch_size :]
        ids = torch.arange(self._shown, self._shown + self.batch_size)
        self._shown += self.batch_size
        if out is None:
            return images.to(self.device), ids.to(self.device)
        return out[0].copy_(images), out[1].copy_(ids)

    def rest(self) -> tuple[Tensor, Tensor]:
        """What is read and not shown yet, however many: less than a batch at the end of the stream."""
        ahead, self._ahead = self._ahead, []
        ids = torch.arange(self._shown, self._read, device=self.device)
        self._shown = self._read
        return torch.cat(ahead or [torch.empty(0, *self._shape or (3, 0, 0), dtype=torch.uint8)]).to(self.device), ids

    def state_dict(self) -> dict[str, Any]:
        """How many images came, also those that are read but not shown: they are gone, and what is resumed goes on
        with those that come then."""
        return {"shown": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there."""
        if "shown" not in state:
            raise UserError("this is no position in a live stream; it was saved by a stream of another kind")
        ahead = self._read - self._shown
        self._shown = int(state["shown"])
        self._read = self._shown + ahead


def _arrays(images: Any) -> list[NDArray[Any]]:
    """What an iterable gave at a time: an image, several, or one (or a batch) with labels, masks or the like, whose
    dimensions are others."""
    from PIL.Image import Image

    def one(image: Any) -> NDArray[Any]:
        if isinstance(image, Tensor):
            return image.detach().cpu().numpy()
        return np.asanyarray(opaque.picture(image) if isinstance(image, Image) else image)

    if not isinstance(images, tuple | list) or not images:
        return [one(images)]
    first, *others = images
    image, rest = one(first), [one(other) for other in others]
    alike = [array.ndim == image.ndim or array.shape[-3:] == image.shape[-3:] for array in rest]
    if any(alike) and not all(alike) and all(array.ndim > 1 for array in rest):
        shapes = ", ".join(str(array.shape) for array in (image, *rest))
        raise UserError(f"the stream gave arrays of shapes {shapes} at once; which are images? Give these alone")
    return [image, *(rest if all(alike) else ())]


def raw_frames(file: BinaryIO, size: int) -> Iterator[NDArray[np.uint8]]:
    """Uncompressed RGB frames (size, size, 3), one after the other without anything between them; ffmpeg calls that
    rawvideo, pixel format rgb24. A last one that is not whole is left out, with a warning."""
    length = 3 * size * size
    while len(frame := file.read(length)) == length:
        yield np.frombuffer(frame, dtype=np.uint8).reshape(size, size, 3)
    if frame:
        warnings.warn(
            f"the frames ended with {len(frame):,} bytes, not the {length:,} of {size} × {size} pixels in RGB; unless "
            "they were cut off there, they have another size, and what was read is scrambled",
            Notice,
            stacklevel=2,
        )


def standard_input(size: int | None) -> Iterator[NDArray[np.uint8]]:
    """`raw_frames` of what is piped into this process."""
    side = size or 64
    example = f"ffmpeg -i VIDEO -vf scale={side}:{side} -f rawvideo -pix_fmt rgb24 - | duel …"
    if size is None:
        raise UserError(
            "data '-' is raw RGB frames from standard input; give their side as image_size: "
            f"{example} --data - --image-size {side}"
        )
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError(f"data '-' is raw RGB frames from standard input, and nothing is piped into it: {example}")
    return raw_frames(sys.stdin.buffer, size)
