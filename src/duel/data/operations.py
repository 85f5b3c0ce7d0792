"""Image operations on a whole batch with one parameter per image.

Images are float32 in 0..1, shape (b, c, h, w), on any device; parameters are tensors on the same device, one entry
per image. Each function returns what torchvision's function of the same name returns for each image alone (tests
compare them), reads nothing back to the host, and so can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor

# ITU-R 601 luma as torchvision rounds it.
LUMA = (0.2989, 0.587, 0.114)


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _luma(images: Tensor) -> Tensor:
    """(b, 3, h, w) -> (b, 1, h, w)."""
    red, green, blue = images.tensor_split(3, dim=1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """shift (b,) in -0.5..0.5 turns of the HSV hue circle.

    HSV without its tables: with chroma = max - min, a channel is max - chroma * wave(hue + n/6) for n = 5, 3, 1 (red,
    green, blue), where wave(t) = 2 - clip(6 |t mod 1 - 1/3|, 1, 2) is a trapezium of period one.
    """
    red, green, blue = images.tensor_split(3, dim=1)
    top = torch.maximum(torch.maximum(red, green), blue)
    chroma = top - torch.minimum(torch.minimum(red, green), blue)
    # Sixths of a turn, times chroma.
    sixths = torch.where(
        red == top,
        green - blue,
        torch.where(green == top, (blue - red).add_(chroma, alpha=2), (red - green).add_(chroma, alpha=4)),
    )
    # Greys have chroma 0, so any finite hue gives the grey back. The 1 keeps the sum positive (hue >= -1/6, shift
    # >= -1/2), so that frac is "modulo one turn".
    chroma6 = chroma * 6
    hue = sixths.div_(chroma6.clamp(min=1e-12)).add_(_per_image(shift) + 1)
    offsets = torch.arange(5, 0, -2, device=images.device, dtype=images.dtype).div_(6).view(1, 3, 1, 1)
    wave = (hue + offsets).frac_().sub_(1 / 3).abs_().clamp_(1 / 6, 1 / 3)
    return torch.addcmul(top.sub_(chroma, alpha=2), chroma6, wave)


# Torchvision's ColorJitter applies its four operations in a random order. To give every image an order of its own
# in a batch, the three blends get slots before and after the hue rotation, which is the dear one and is done once;
# an image uses three of the slots, and blends of factor 1 fill the others.
IDENTITY, BRIGHTNESS, CONTRAST, SATURATION, HUE = range(5)


def jitter_orders(hue: bool) -> Tensor:
    """All orders of the jitter operations as slots: int64 (24, 6) with hue, (6, 3) without.

    Row r, slot s holds IDENTITY, BRIGHTNESS, CONTRAST or SATURATION; the hue rotation comes after slot 2 (with hue).
    Rows follow itertools.permutations over (BRIGHTNESS, CONTRAST, SATURATION[, HUE]).
    """
    if not hue:
        return torch.tensor(list(permutations((BRIGHTNESS, CONTRAST, SATURATION))))
    rows = []
    for order in permutations((BRIGHTNESS, CONTRAST, SATURATION, HUE)):
        at = order.index(HUE)
        before, after = list(order[:at]), list(order[at + 1 :])
        rows.append(before + [IDENTITY] * (3 - len(before)) + after + [IDENTITY] * (3 - len(after)))
    return torch.tensor(rows)


def color_jitter(images: Tensor, slots: Tensor, factors: Tensor, hue: Tensor | None) -> Tensor:
    """Brightness, contrast, saturation and hue, each image in its own order.

    slots int64 (b, 6 or 3): one row of `jitter_orders` per image. factors (b, 4): 1, then those of brightness, contrast
    and saturation (columns IDENTITY to SATURATION). hue (b,): turns, with 6 slots; None with 3.
    """
    keep = factors.gather(1, slots)
    # A blend is keep * x + to_mean * mean(luma) + to_luma * luma: each operation is one choice of the three numbers.
    rest = 1 - keep
    to_mean, to_luma = rest * (slots == CONTRAST), rest * (slots == SATURATION)
    for slot in range(slots.shape[1]):
        if hue is not None and slot == 3:
            images = adjust_hue(images, hue)
        luma = _luma(images)
        mean = luma.mean((1, 2, 3), keepdim=True)
        other = torch.addcmul(mean * _per_image(to_mean[:, slot]), luma, _per_image(to_luma[:, slot]))
        images = torch.addcmul(other, images, _per_image(keep[:, slot])).clamp_(0, 1)
    return images


def grayscale(images: Tensor, mask: Tensor) -> Tensor:
    """Images with mask (b,) true become grey, with three equal channels."""
    return torch.where(_per_image(mask), _luma(images), images)


def hflip(images: Tensor, mask: Tensor) -> Tensor:
    """Images with mask (b,) true are mirrored left to right."""
    return torch.where(_per_image(mask), images.flip(-1), images)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Values at or above threshold (b,) are inverted; a threshold above 1 leaves the image."""
    return torch.where(images >= _per_image(threshold), 1 - images, images)


def _resize_weights(start: Tensor, length: Tensor, size_in: int, size_out: int) -> Tensor:
    """Antialiased bilinear interpolation of pixels start .. start + length of size_in to size_out: (b, out, in).

    A triangle as wide as the reduction (at least one pixel each way), cut at the edges of the crop and scaled to
    sum 1; this is the filter of torchvision's resize with antialias=True.
    """
    scale = (length / size_out).view(-1, 1, 1)
    position = torch.arange(size_out, device=start.device, dtype=torch.float32).add_(0.5).view(1, -1, 1)
    pixel = torch.arange(size_in, device=start.device, dtype=torch.float32).view(1, 1, -1) - start.view(-1, 1, 1)
    distance = torch.addcmul(-0.5 - pixel, position, scale).abs_().div_(scale.clamp(min=1))
    inside = (pixel >= 0) & (pixel < length.view(-1, 1, 1))
    weights = distance.neg_().add_(1).clamp_(min=0).mul_(inside)
    return weights.div_(weights.sum(-1, keepdim=True))


def _filter(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows (b, h', h) and columns (b, w', w), a linear filter for each side, applied to (b, c, h, w)."""
    b, c, h, w = images.shape
    wide = torch.bmm(images.reshape(b, c * h, w), columns.transpose(1, 2)).view(b, c, h, -1)
    return torch.matmul(rows.unsqueeze(1), wide)


def resized_crop(images: Tensor, boxes: Tensor, size: int, mirror: Tensor | None = None) -> Tensor:
    """Cut a box out of each image and resize it to size × size, as torchvision with bilinear and antialias=True.

    boxes (b, 4), float32: top, left, height, width in pixels, inside the image. As in torchvision, nothing outside
    the box contributes. mirror (b,), bool: also flip these left to right, at no cost.
    Two small matrix products per image rather than grid_sample: that would read past the box and cannot antialias.
    """
    top, left, height, width = boxes.unbind(1)
    rows = _resize_weights(top, height, images.shape[2], size)
    columns = _resize_weights(left, width, images.shape[3], size)
    if mirror is not None:
        columns = torch.where(mirror.view(-1, 1, 1), columns.flip(1), columns)
    return _filter(images, rows, columns)


def _blur_weights(sigma: Tensor, size: int, kernel_size: int) -> Tensor:
    """(b, size, size): a normal curve of sigma pixels over kernel_size taps; the border is reflected."""
    half = kernel_size // 2
    pixel = torch.arange(size, device=sigma.device)
    source = (pixel.view(-1, 1) + torch.arange(-half, half + 1, device=sigma.device)).abs_()
    source = torch.where(source >= size, 2 * (size - 1) - source, source)  # (size, taps): where each tap reads
    taps = torch.arange(-half, half + 1, device=sigma.device, dtype=torch.float32)
    curve = torch.softmax(-0.5 * (taps / sigma.view(-1, 1)) ** 2, dim=1)  # (b, taps), sums to 1
    weights = torch.zeros(sigma.shape[0], size, size, device=sigma.device)
    index = source.expand(sigma.shape[0], -1, -1)
    return weights.scatter_add_(2, index, curve.unsqueeze(1).expand(-1, size, -1))


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """sigma (b,), > 0, in pixels; kernel_size odd, at most 2 × side - 1. A sigma of 0.01 leaves the image."""
    rows = _blur_weights(sigma, images.shape[2], kernel_size)
    columns = _blur_weights(sigma, images.shape[3], kernel_size)
    return _filter(images, rows, columns)


def channels(values: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Per-channel numbers as (1, c, 1, 1) on the device of `like`."""
    return torch.as_tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)


def normalise(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """uint8 images (b, c, h, w) -> float32 (x / 255 - mean) / std: the clean view. mean, std (c,) in units of 0..1.

    Give tensors on the images' device where a host-to-device copy must not happen (inside a captured step).
    """
    std = channels(std, images)
    return torch.addcmul(-channels(mean, images) / std, images.float(), 1 / (255 * std))
