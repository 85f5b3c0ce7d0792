"""Images with transparent parts, as they look on a white page.

What colour a transparent pixel has nobody sees: programs leave black there, or anything. With the opacity merely
dropped a black drawing on a transparent ground is all black, and like every other such drawing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

PAGE = 255
_AT_ONCE = 256  # images: composed in 16 bits


def picture(image: Image) -> Image:
    """A picture of any mode -> RGB. One that is transparent all over is taken as it is."""
    from PIL.Image import new

    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    if not shown.getchannel("A").getbbox():
        return image.convert("RGB")
    page = new("RGBA", shown.size, (PAGE, PAGE, PAGE, 255))
    page.alpha_composite(shown)
    return page.convert("RGB")


def arrays(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 (n, 4, h, w), the fourth channel being the opacity -> (n, 3, h, w).

    An image in which no pixel is opaque is taken as it is, since its fourth channel must be something else: a mask of
    zeros and ones, or the byte of zeros of a screen's frames.
    """
    out = np.empty((len(images), 3, *images.shape[2:]), dtype=np.uint8)
    for start in range(0, len(images), _AT_ONCE):
        piece = images[start : start + _AT_ONCE].astype(np.uint16)
        opacity = piece[:, 3:]
        opacity[opacity.max(axis=(1, 2, 3)) < 255] = 255
        out[start : start + _AT_ONCE] = (piece[:, :3] * opacity + PAGE * (255 - opacity) + 127) // 255
    return out
