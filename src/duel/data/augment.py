"""Random views: a whole batch at a time, each image with its own random parameters, on the images' device.

`Augment.draw` makes the parameters, `Augment.apply_parameters` is a pure function of images and parameters. Neither
reads anything back to the host nor makes a tensor from Python numbers (torch.where with a number would), so a step
that holds them can be captured as a CUDA graph (register the generator: `graph.register_generator_state`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from duel.data import operations
from duel.data.operations import normalise
from duel.errors import UserError, suggest

__all__ = ["PRESETS", "Augment", "Parameters", "Preset", "normalise"]

# RandomResizedCrop's own number of attempts at a box that fits before it takes the largest central one.
CROP_ATTEMPTS = 10
# What leaves an image as it is: sigma so small that the other taps are zero, a threshold above every value.
NO_BLUR, NO_SOLARIZE = 0.01, 2.0
# On the CPU, work on pieces of about this many values: they stay in the cache from one operation to the next.
CPU_PIECE = 200_000


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How views are made. Probabilities are per image; an operation with probability 0 costs nothing."""

    crop_scale: tuple[float, float] | None = None
    """Share of the image's area a crop covers; None: no crop."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of a crop, drawn log-uniformly."""
    flip: float = 0.0
    """Probability of mirroring left to right."""
    jitter: float = 0.0
    """Probability of colour jitter (the four below, in a random order for each image)."""
    brightness: float = 0.0
    """Brightness is multiplied by a factor from 1 ± this."""
    contrast: float = 0.0
    """Contrast likewise."""
    saturation: float = 0.0
    """Saturation likewise."""
    hue: float = 0.0
    """Hue is turned by up to ± this share of the circle (at most 0.5)."""
    grayscale: float = 0.0
    """Probability of losing the colour."""
    blur: float = 0.0
    """Probability of Gaussian blur, on images wider than `blur_above`; kernel a tenth of the side."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Blur's standard deviation in pixels, drawn uniformly."""
    blur_above: int = 32
    """Blur is left out up to this side length, where it removes what little detail there is."""
    solarize: float = 0.0
    """Probability of inverting values above one half."""

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "grayscale", "blur", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is a probability and must be in 0..1, got {getattr(self, name)}")
        for name in ("brightness", "contrast", "saturation"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if not 0 <= self.hue <= 0.5:
            raise UserError(f"hue must be in 0..0.5 (of the hue circle), got {self.hue}")
        for name, top in (("crop_scale", 1.0), ("crop_ratio", math.inf), ("blur_sigma", math.inf)):
            pair = getattr(self, name)
            if pair is not None and not (len(pair) == 2 and 0 < pair[0] <= pair[1] <= top):
                raise UserError(f"{name} must be two numbers 0 < low <= high <= {top}, got {pair}")


_COLOUR = Preset(
    flip=0.5, jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grayscale=0.2
)  # MoCo v2's, and SimCLR's at the strength 0.5 that it uses on CIFAR
PRESETS: dict[str, Preset] = {
    # The DUEL paper: jitter, grayscale, flip; no crop. It gives no strengths; these are MoCo v2's.
    "paper": _COLOUR,
    # SimCLR with the crops that RandomResizedCrop, SimCLR and lightly's CIFAR-10 benchmark use (0.08 to 1).
    "standard": replace(_COLOUR, crop_scale=(0.08, 1.0), blur=0.5),
    # Grey 8×8 signs: a mirrored digit is another sign, and there is no hue.
    "digits": Preset(crop_scale=(0.5, 1.0), jitter=0.8, brightness=0.4, contrast=0.4),
    # The clean view.
    "none": Preset(),
}


class Parameters(NamedTuple):
    """One batch's random choices, (b, …) each; None: the operation is off for the whole batch."""

    boxes: Tensor | None  # (b, 4) float32: top, left, height, width
    mirror: Tensor | None  # (b,) bool
    slots: Tensor | None  # (b, 3 or 6) int64: rows of operations.jitter_orders
    factors: Tensor | None  # (b, 4): 1, brightness, contrast, saturation
    hue: Tensor | None  # (b,)
    grey: Tensor | None  # (b,) bool
    sigma: Tensor | None  # (b,)
    threshold: Tensor | None  # (b,)

    def split(self, size: int) -> list[Parameters]:
        pieces = [() if p is None else torch.split(p, size) for p in self]
        count = max(map(len, pieces), default=0)
        return [Parameters(*(p[i] if p else None for p in pieces)) for i in range(count)]


class Augment(nn.Module):
    """uint8 images (b, 3, h, w) -> one random view each, float32 (b, 3, image_size, image_size), normalised.

    preset: a name from PRESETS or a Preset. mean, std: per channel, in units of 0..1. image_size: side of the views;
    images of another size are resized (by the crop where there is one).
    """

    orders: Tensor
    jitter: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, preset: str | Preset, *, mean: Sequence[float], std: Sequence[float], image_size: int) -> None:
        super().__init__()
        if isinstance(preset, str):
            if preset not in PRESETS:
                raise UserError(suggest("augmentation", preset, PRESETS))
            preset = PRESETS[preset]
        if image_size < 1:
            raise UserError(f"image_size must be at least 1 pixel, got {image_size}")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise UserError(f"mean and std must have 3 entries, std > 0; got mean {tuple(mean)}, std {tuple(std)}")
        self.preset, self.image_size = preset, image_size
        self.jitters = preset.jitter > 0 and max(preset.brightness, preset.contrast, preset.saturation, preset.hue) > 0
        self.blurs = preset.blur > 0 and image_size > preset.blur_above
        self.kernel_size = max(3, image_size // 10 | 1)
        self.register_buffer("orders", operations.jitter_orders(hue=preset.hue > 0), persistent=False)
        # (5, 1) each: lowest value, width and value when off of identity, brightness, contrast, saturation and hue.
        widths = torch.tensor([0, preset.brightness, preset.contrast, preset.saturation, preset.hue]).view(5, 1)
        neutral = torch.tensor([1.0, 1, 1, 1, 0]).view(5, 1)
        self.register_buffer("jitter", torch.stack((neutral - widths, 2 * widths, neutral)), persistent=False)
        spread = torch.tensor(std, dtype=torch.float32).view(1, 3, 1, 1)
        self.register_buffer("scale", 1 / spread, persistent=False)
        self.register_buffer("offset", -torch.tensor(mean).view(1, 3, 1, 1) / spread, persistent=False)

    def extra_repr(self) -> str:
        return f"{self.preset}, image_size={self.image_size}"

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise UserError(f"images must be uint8 (b, 3, h, w), got {images.dtype} {tuple(images.shape)}")
        parameters, kind = self.draw(images, generator), images.device.type
        # Under autocast the crop's matrix products would round pixels to 8 bits of mantissa.
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            return self.apply_parameters(images, parameters)

    def views(self, images: Tensor, count: int = 2, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """`count` views of each image, made in one go: on a GPU the number of kernels, not of pixels, is the cost."""
        return torch.chunk(self.forward(images.repeat(count, 1, 1, 1), generator), count)

    def draw(self, images: Tensor, generator: torch.Generator | None = None) -> Parameters:
        """Random parameters for images (b, c, h, w), on their device; generator: on that device, or None."""
        p, b, (height, width) = self.preset, images.shape[0], images.shape[2:]

        # One call for all the numbers, a row for each choice.
        numbers = torch.rand(14 + 2 * CROP_ATTEMPTS, b, device=images.device, generator=generator)
        boxes = slots = factors = hue = sigma = threshold = None
        if p.crop_scale is not None:
            boxes = self._boxes(numbers[12:14], numbers[14:].view(2, CROP_ATTEMPTS, b), height, width)
        if self.jitters:
            order = (numbers[0] * len(self.orders)).long().clamp_(max=len(self.orders) - 1)  # u * n may round up to n
            slots = self.orders[order]
            low, width, neutral = self.jitter
            amounts = torch.where(numbers[1] < p.jitter, torch.addcmul(low, numbers[2:7], width), neutral)
            factors, hue = amounts[:4].t(), amounts[4] if p.hue else None
        mirror = numbers[7] < p.flip if p.flip else None
        grey = numbers[8] < p.grayscale if p.grayscale else None
        if self.blurs:
            low, high = p.blur_sigma
            sigma = (numbers[10] * (high - low) + low).masked_fill_(numbers[9] >= p.blur, NO_BLUR)
        if p.solarize:
            threshold = (numbers[11] < p.solarize) * (0.5 - NO_SOLARIZE) + NO_SOLARIZE
        return Parameters(boxes, mirror, slots, factors, hue, grey, sigma, threshold)

    def _boxes(self, corner: Tensor, numbers: Tensor, height: int, width: int) -> Tensor:
        """Boxes as RandomResizedCrop draws them, (b, 4): the first of ten attempts that fits, else the whole image
        cut to the nearest allowed ratio. Uniform numbers: corner (2, b), numbers (2, attempts, b).
        """
        scale, ratio = self.preset.crop_scale or (1.0, 1.0), self.preset.crop_ratio
        low, high = math.log(ratio[0]) / 2, math.log(ratio[1]) / 2
        side = (numbers[0] * ((scale[1] - scale[0]) * height * width) + scale[0] * height * width).sqrt_()
        root = (numbers[1] * (high - low) + low).exp_()  # square root of width / height
        w, h = (side * root).round_(), (side / root).round_()
        fits = (w <= width) & (h <= height) & (torch.minimum(w, h) >= 1)
        some, first = fits.to(torch.uint8).max(0, keepdim=True)  # first: index of the first attempt that fits
        none = some == 0
        whole = width / height
        w_else = round(height * ratio[1]) if whole > ratio[1] else width
        h_else = round(width / ratio[0]) if whole < ratio[0] else height
        w = w.gather(0, first).masked_fill_(none, w_else)
        h = h.gather(0, first).masked_fill_(none, h_else)
        # Each of the free pixels + 1 offsets is equally likely; where no attempt fits, half the free pixels, rounded
        # down (hence not quite 0.5).
        free = torch.cat((height - h, width - w))
        corner = torch.minimum((corner.masked_fill(none, 0.49999) * (free + 1)).floor_(), free)
        return torch.cat((corner, h, w)).t()

    def compile_operations(self) -> None:
        """From now on `apply_parameters` runs compiled; for a GPU, where launches are dear."""
        self._piece = torch.compile(self._piece, dynamic=False)  # type: ignore[method-assign]

    def apply_parameters(self, images: Tensor, parameters: Parameters) -> Tensor:
        """The views that `parameters` describe; no randomness."""
        if images.is_cpu:
            piece = max(1, CPU_PIECE // (3 * self.image_size**2))
            if piece < len(images) and any(p is not None for p in parameters):
                pieces = zip(torch.split(images, piece), parameters.split(piece), strict=True)
                return torch.cat([self._piece(i, p) for i, p in pieces])
        return self._piece(images, parameters)

    def _piece(self, images: Tensor, parameters: Parameters) -> Tensor:
        boxes, mirror, slots, factors, hue, grey, sigma, threshold = parameters
        x = images.float().div_(255)
        size = self.image_size
        if boxes is None and images.shape[2:] != (size, size):
            side = torch.ones(len(images), device=images.device)
            boxes = torch.stack((side * 0, side * 0, side * images.shape[2], side * images.shape[3]), dim=1)
        if boxes is not None:
            x = operations.resized_crop(x, boxes, size, mirror)
        elif mirror is not None:
            x = operations.hflip(x, mirror)
        if slots is not None and factors is not None:
            x = operations.color_jitter(x, slots, factors, hue)
        if grey is not None:
            x = operations.grayscale(x, grey)
        if sigma is not None:
            x = operations.gaussian_blur(x, sigma, self.kernel_size)
        if threshold is not None:
            x = operations.solarize(x, threshold)
        return torch.addcmul(self.offset, x, self.scale)
