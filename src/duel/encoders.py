"""Encoders: any timm backbone, a stem for small images, and a projection.

Importing this module registers with timm the variants it adds (`resnet18_small`, …, `duel_convnet`), so that
`timm.create_model("resnet18_small", checkpoint_path=...)` rebuilds what was exported.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from typing import Any, Literal, cast

import timm
import torch
from timm.models import register_model
from torch import Tensor, nn

from .batchnorm import prepare_views, views_apart
from .errors import UserError
from .stem import StemConv2d

__all__ = ["ConvNet", "Encoder", "backbone", "encoder", "mlp", "resolve"]

Stem = Literal["auto", "small", "full"]
Norm = Literal["none", "hidden", "all"]

SMALL_IMAGE = 64  # pixels; up to this side `stem="auto"` means the small stem
_SMALL_STEMS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2")
OURS = ("duel_convnet", *(f"{base}_small" for base in _SMALL_STEMS))
"""Names that timm knows once this module is imported."""
_ALIASES = {"convnet": "duel_convnet"}
_TOKENS_PER_SIDE = 8  # a small-stem ViT cuts an image into about 8 x 8 patches: 4 pixels each at 32 x 32
_TOKENS_ALLOWED = range(6, 17)


class ConvNet(nn.Module):
    """Three 3x3 convolutions, 93k parameters: for 8x8 digits on a laptop's processor.

    timm's conventions: `num_classes=0` gives pooled features, (b, c, h, w) -> (b, 128).
    """

    def __init__(self, in_chans: int = 3, num_classes: int = 0, width: int = 32) -> None:
        super().__init__()
        self.num_features = self.head_hidden_size = 4 * width
        self.features = nn.Sequential(
            *self._block(in_chans, width, stride=1),
            *self._block(width, 2 * width, stride=2),
            *self._block(2 * width, 4 * width, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.fc(self.pool(self.features(images)).flatten(1))
        return features


def _small_stem(base: str) -> Callable[..., nn.Module]:
    """A timm entry point for `base` with a 3x3 stride-1 first convolution and no max-pool."""

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            raise UserError(f"{base}_small has no pretrained weights; use stem='full' or pretrained=False")
        kwargs.setdefault("num_classes", 0)  # so that an exported backbone loads by name alone
        model: Any = timm.models.model_entrypoint(base)(pretrained=False, **kwargs)
        full = model.conv1
        model.conv1 = StemConv2d(full.in_channels, full.out_channels, 3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm does for ResNets
        model.maxpool = nn.Identity()
        for stage, info in enumerate(model.feature_info):  # stem 2 -> 1; stages 4, 8, 16, 32 -> 1, 2, 4, 8
            info["reduction"] //= 2 if stage == 0 else 4
        return cast(nn.Module, model)

    build.__name__ = f"{base}_small"
    return build


def duel_convnet(
    pretrained: bool = False,
    pretrained_cfg: object = None,
    pretrained_cfg_overlay: object = None,
    cache_dir: object = None,
    **kwargs: Any,
) -> ConvNet:
    """timm's entry point for `ConvNet`; timm passes the middle three to every model."""
    if pretrained:
        raise UserError("duel_convnet has no pretrained weights; use pretrained=False")
    return ConvNet(**kwargs)


for _entry_point in (duel_convnet, *map(_small_stem, _SMALL_STEMS)):
    globals()[_entry_point.__name__] = register_model(_entry_point)  # timm also lists it in this module's __all__


def resolve(
    name: str, *, stem: Stem = "auto", image_size: int, in_chans: int = 3, pretrained: bool = False
) -> tuple[str, dict[str, Any]]:
    """What to ask of timm: `timm.create_model(name, **arguments)` builds the backbone.

    `stem="small"` means `<name>_small` for a ResNet and about 8x8 patches for a ViT; "auto" takes it for images of up
    to 64 pixels where there is one, unless pretrained weights, which belong to the full stem, are wanted.
    """
    if stem not in ("auto", "small", "full"):
        raise UserError(f"stem must be 'auto', 'small' or 'full', got {stem!r}")
    if image_size < 1:
        raise UserError(f"image_size must be >= 1 pixel, got {image_size}")
    name = _ALIASES.get(name, name)
    if not timm.is_model(name):
        raise UserError(_unknown_backbone(name))
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": in_chans}
    small = stem == "small" or (stem == "auto" and image_size <= SMALL_IMAGE and not pretrained)
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:  # ViTs and their kin have to be told
        arguments["img_size"] = image_size
    if name in _SMALL_STEMS and small:
        name = f"{name}_small"
    elif small and "img_size" in arguments and re.search(r"patch\d+", name) and "window" not in name:
        arguments["patch_size"] = _patch(image_size)
    elif stem == "small" and name not in OURS:
        raise UserError(
            f"stem='small' is not known for backbone {name!r}; it is for {', '.join(_SMALL_STEMS)} and ViTs. "
            "Use stem='full' or 'auto'."
        )
    return name, arguments


def _patch(side: int) -> int:
    """The size of patches that cover as much of a side as 6 to 16 of them can, as near as there is to an eighth of it.

    Of most sides that is all; of 59 pixels three are left out.
    """
    wanted = side / _TOKENS_PER_SIDE
    sizes = [size for size in range(1, side + 1) if side // size in _TOKENS_ALLOWED] or [1]
    return min(sizes, key=lambda size: (side % size, abs(math.log(size / wanted))))


def _unknown_backbone(name: str) -> str:
    known = [*timm.list_models(), *_ALIASES]
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "common ones: resnet18, resnet50, convnet."
    return f"unknown backbone {name!r}; {hint} Any name that timm.list_models() prints is accepted."


def backbone(
    name: str, *, stem: Stem = "auto", image_size: int, in_chans: int = 3, pretrained: bool = False
) -> nn.Module:
    """A timm model without its classifier: (b, in_chans, image_size, image_size) -> (b, f)."""
    name, arguments = resolve(name, stem=stem, image_size=image_size, in_chans=in_chans, pretrained=pretrained)
    return _create(name, arguments, pretrained)


def _create(name: str, arguments: dict[str, Any], pretrained: bool) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
    except UserError:
        raise
    except Exception as error:  # timm asserts, and its download fails, with many types
        advice = "Check the network, or use pretrained=False." if pretrained else "Try another image_size or stem."
        raise UserError(f"timm cannot build backbone {name!r} with {arguments}: {error}. {advice}") from error
    return model


def mlp(inputs: int, hidden: int, outputs: int, *, layers: int = 2, norm: Norm = "none") -> nn.Sequential:
    """Linear layers with ReLU between them: (b, inputs) -> (b, outputs). One layer has no hidden units.

    norm: where BatchNorm goes. "none": MoCo v2; "hidden" (not after the last layer): BYOL, and every predictor;
    "all": SimCLR, SimSiam. A layer before a BatchNorm has no bias.
    """
    if layers < 1:
        raise UserError(f"layers must be >= 1, got {layers}")
    if norm not in ("none", "hidden", "all"):
        raise UserError(f"norm must be 'none', 'hidden' or 'all', got {norm!r}")
    sizes = [inputs, *[hidden] * (layers - 1), outputs]
    modules: list[nn.Module] = []
    for i in range(layers):
        last = i == layers - 1
        normalised = norm == "all" or (norm == "hidden" and not last)
        modules.append(nn.Linear(sizes[i], sizes[i + 1], bias=not normalised))
        if normalised:
            modules.append(nn.BatchNorm1d(sizes[i + 1]))
        if not last:
            modules.append(nn.ReLU(inplace=True))
    return nn.Sequential(*modules)


class Encoder(nn.Module):
    """A backbone and a projection.

    Attributes:
        feature_dim: f, what `features` gives; evaluated and exported.
        dim: d, what `forward` gives; trained, compared and remembered.
        one_pass: whether `features_of_each` makes one pass over all.
        timm_name, timm_arguments: `timm.create_model(timm_name, **timm_arguments)` builds such a backbone.
        image_shape: (c, h, w) it was made for.
    """

    one_pass: bool = False

    def __init__(
        self,
        backbone: nn.Module,
        projection: nn.Module,
        *,
        feature_dim: int,
        dim: int,
        timm_name: str,
        timm_arguments: dict[str, Any],
        image_shape: tuple[int, int, int],
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = projection
        self.feature_dim = feature_dim
        self.dim = dim
        self.timm_name = timm_name
        self.timm_arguments = timm_arguments
        self.image_shape = image_shape

    def take_views_at_once(self) -> None:
        """From now on `features_of_each` makes one pass, where BatchNorm allows it. It pays where that is compiled."""
        self.one_pass = prepare_views(self.backbone)

    def features_of_each(self, *batches: Tensor) -> tuple[Tensor, ...]:
        """Backbone features (b, f) of equally large batches (b, c, h, w), as if each had been the only one."""
        if not self.one_pass:
            return tuple(self.features(batch) for batch in batches)
        with views_apart(self.backbone, len(batches)):
            return self.features(torch.cat(batches)).chunk(len(batches))

    def features(self, images: Tensor) -> Tensor:
        """Backbone features: (b, c, h, w) -> (b, f)."""
        features: Tensor = self.backbone(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Projections, not normalised: (b, c, h, w) -> (b, d)."""
        projected: Tensor = self.projection(self.features(images))
        return projected


def encoder(
    name: str = "resnet18",
    *,
    stem: Stem = "auto",
    projection: Literal["linear", "mlp"] = "linear",
    dim: int = 256,
    hidden: int | None = None,
    layers: int = 2,
    norm: Norm = "hidden",
    image_size: int = 32,
    in_chans: int = 3,
    pretrained: bool = False,
) -> Encoder:
    """An encoder by the name of its backbone.

    Args:
        name: any timm name, or "convnet", a small one of our own.
        stem: "small" for images of up to 64 pixels (3x3 stride 1, no max-pool; small patches), "full" as timm has it.
        projection: "linear", one layer (the paper's); "mlp", with `hidden` units (default: the feature size),
            `layers` layers and BatchNorm where `norm` says; see `mlp`.
        dim: size of the projection.
        image_size: side of the images in pixels.
        pretrained: start from timm's weights (downloaded); full stems only.
    """
    if projection not in ("linear", "mlp"):
        raise UserError(f"projection must be 'linear' or 'mlp', got {projection!r}")
    for argument, value in (("dim", dim), ("hidden", 1 if hidden is None else hidden), ("in_chans", in_chans)):
        if value < 1:
            raise UserError(f"{argument} must be >= 1, got {value}")
    timm_name, arguments = resolve(name, stem=stem, image_size=image_size, in_chans=in_chans, pretrained=pretrained)
    body: Any = _create(timm_name, arguments, pretrained)
    # Some networks widen after their last stage, so `num_features` alone would not do.
    feature_dim = int(getattr(body, "head_hidden_size", None) or body.num_features)
    if projection == "linear":
        head = mlp(feature_dim, 0, dim, layers=1)
    else:
        head = mlp(feature_dim, hidden or feature_dim, dim, layers=layers, norm=norm)
    return Encoder(
        body,
        head,
        feature_dim=feature_dim,
        dim=dim,
        timm_name=timm_name,
        timm_arguments=arguments,
        image_shape=(in_chans, image_size, image_size),
    )
