"""What `duel bench peers` measures beside ours.

lightly gets what its own CIFAR-10 benchmark uses (transforms, heads, loss with memory bank, momentum copy with shuffled
keys; for MoCo BatchNorm in eight groups) around our backbone. "One BatchNorm group" is the same without these, which is
faster. Plain PyTorch is MoCo v2 as a page of one's own code.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from duel import encoders
from duel.config import TrainConfig
from duel.errors import UserError
from duel.stem import StemConv2d


def lightly() -> Any:
    """The parts of lightly that are measured, as attributes."""
    try:
        from lightly import loss, transforms
        from lightly.models import utils
        from lightly.models.batchnorm import SplitBatchNorm
        from lightly.models.modules import heads
    except ImportError as error:
        raise UserError(
            f"duel bench peers measures lightly, which cannot be imported ({error}): pip install 'duel-ssl[peers]'"
        ) from error

    class Parts:
        NTXentLoss = loss.NTXentLoss
        SimCLRTransform, MoCoV2Transform = transforms.SimCLRTransform, transforms.MoCoV2Transform
        SimCLRProjectionHead, MoCoProjectionHead = heads.SimCLRProjectionHead, heads.MoCoProjectionHead
        update_momentum, deactivate = staticmethod(utils.update_momentum), staticmethod(utils.deactivate_requires_grad)
        shuffle, unshuffle = staticmethod(utils.batch_shuffle), staticmethod(utils.batch_unshuffle)
        BatchNorm = SplitBatchNorm

    return Parts


class Peer(nn.Module, ABC):
    """What is measured beside ours: a backbone, its loss for two views, and the transform that gives them."""

    backbone: nn.Module
    channels_last = True
    """Whether it takes images in that layout."""

    @abstractmethod
    def transform(self, side: int) -> Any:
        """PIL image -> two tensors (3, side, side); no blur, as is usual for small images."""


class LightlyPeer(Peer):
    """lightly's SimCLR or symmetric MoCo around our backbone, with the settings of `config`.

    groups: how many of the batch MoCo's BatchNorm normalises separately.
    """

    def __init__(self, config: TrainConfig, shape: tuple[int, int, int], groups: int = 8) -> None:
        super().__init__()
        self.library, self.config = lightly(), config
        backbone: Any = encoders.backbone(config.backbone, stem=config.stem, image_size=shape[-1])
        if config.method == "moco" and groups > 1:
            self._split(backbone, groups)
        self.backbone, width = backbone, int(backbone.num_features)
        if config.method == "simclr":
            self.head = self.library.SimCLRProjectionHead(width, config.hidden or width, config.dim)
            self.criterion = self.library.NTXentLoss(temperature=config.temperature)
        else:
            self.head = self.library.MoCoProjectionHead(width, config.hidden or width, config.dim)
            self.criterion = self.library.NTXentLoss(
                temperature=config.temperature, memory_bank_size=(config.memory_size, config.dim)
            )
            self.slow_backbone, self.slow_head = copy.deepcopy(self.backbone), copy.deepcopy(self.head)
            for part in (self.slow_backbone, self.slow_head):
                self.library.deactivate(part)

    def _split(self, backbone: nn.Module, groups: int) -> None:
        """lightly's BatchNorm, which views its input in a way that channels-last does not allow; nor may it come from
        our stem, whose product is channels-last."""
        self.channels_last = False
        places = [(part, *at) for part in backbone.modules() for at in part.named_children()]
        for part, name, layer in places:
            if isinstance(layer, nn.BatchNorm2d):
                setattr(part, name, self._like(layer, groups))
            elif isinstance(layer, StemConv2d):
                setattr(part, name, self._plain(layer))

    @staticmethod
    def _plain(stem: StemConv2d) -> nn.Module:
        size: Any = stem.kernel_size
        shape: Any = {"stride": stem.stride, "padding": stem.padding}
        conv = nn.Conv2d(stem.in_channels, stem.out_channels, size, bias=False, **shape)
        conv.weight = stem.weight
        return conv

    def _like(self, norm: nn.BatchNorm2d, groups: int) -> nn.Module:
        split: nn.Module = self.library.BatchNorm(norm.num_features, groups)
        split.weight, split.bias = norm.weight, norm.bias
        return split

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if self.config.method == "simclr":
            simclr: Tensor = self.criterion(self._query(first), self._query(second))
            return simclr
        for fast, slow in ((self.backbone, self.slow_backbone), (self.head, self.slow_head)):
            self.library.update_momentum(fast, slow, self.config.key_momentum)
        one = self.criterion(self._query(first), self._key(second))
        two = self.criterion(self._query(second), self._key(first))
        moco: Tensor = 0.5 * (one + two)
        return moco

    def _query(self, view: Tensor) -> Any:
        return self.head(self.backbone(view))

    def _key(self, view: Tensor) -> Any:
        with torch.no_grad():
            shuffled, order = self.library.shuffle(view)
            return self.library.unshuffle(self.slow_head(self.slow_backbone(shuffled)), order)

    def transform(self, side: int) -> Any:
        """With the weaker jitter that lightly advises for small images."""
        if self.config.method == "simclr":
            return self.library.SimCLRTransform(input_size=side, cj_strength=0.5, gaussian_blur=0.0)
        return self.library.MoCoV2Transform(input_size=side, gaussian_blur=0.0)


class PlainPeer(Peer):
    """MoCo v2 in plain PyTorch: the first view asks, a momentum copy answers for the second, negatives are a queue."""

    queue: Tensor

    def __init__(self, config: TrainConfig, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.temperature: Any = config.temperature
        self.momentum: Any = config.key_momentum
        self.oldest = 0
        self.backbone = encoders.backbone(config.backbone, stem=config.stem, image_size=shape[-1])
        width: Any = self.backbone.num_features
        hidden = config.hidden or width
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, config.dim))
        self.slow = copy.deepcopy(nn.Sequential(self.backbone, self.head)).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(config.memory_size, config.dim), dim=1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        query = normalize(self.head(self.backbone(first)), dim=1)
        with torch.no_grad():
            self._follow()
            key = normalize(self.slow(second), dim=1)
        alike = (query * key).sum(dim=1, keepdim=True)
        logits = torch.cat([alike, query @ self.queue.clone().T], dim=1) / self.temperature
        loss = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
        self._enqueue(key)
        return loss

    def _follow(self) -> None:
        trained = (*self.backbone.parameters(), *self.head.parameters())
        for slow, fast in zip(self.slow.parameters(), trained, strict=True):
            slow.mul_(self.momentum).add_(fast, alpha=1 - self.momentum)

    def _enqueue(self, keys: Tensor) -> None:
        """Put keys (b, dim) in the place of the oldest ones."""
        slots = torch.arange(self.oldest, self.oldest + len(keys), device=keys.device) % len(self.queue)
        self.queue[slots] = keys.float()
        self.oldest = (self.oldest + len(keys)) % len(self.queue)

    def transform(self, side: int) -> Any:
        """MoCo v2's."""
        from torchvision import transforms

        view = transforms.Compose(
            [
                transforms.RandomResizedCrop(side, scale=(0.2, 1.0)),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                transforms.RandomGrayscale(p=0.2),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            ]
        )
        return TwoViews(view)


class TwoViews:
    def __init__(self, view: Any) -> None:
        self.view = view

    def __call__(self, image: Any) -> tuple[Tensor, Tensor]:
        return self.view(image), self.view(image)


#: By the name that stands in a row.
PEERS: dict[str, Callable[[TrainConfig, tuple[int, int, int]], Peer]] = {
    "lightly": LightlyPeer,
    "lightly, one BatchNorm group": partial(LightlyPeer, groups=1),
    "plain PyTorch": PlainPeer,
}
