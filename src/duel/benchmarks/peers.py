"""Against lightly: the same data, backbone, batch and machine, in the same run, end to end and compute only.

The peer gets what its own CIFAR-10 benchmark uses (transforms, heads, loss with memory bank, momentum copy with
shuffled keys, SGD) and, beyond that, what makes it faster: our backbone with one BatchNorm group instead of eight,
bf16, channels-last, pinned memory and a loading process per core. End to end, the two run one after the other:
processes that load ahead would otherwise work during the other's turn.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from duel import encoders, recipes
from duel.benchmarks import images, parts, tables
from duel.benchmarks.results import Results
from duel.benchmarks.step import is_compiled
from duel.benchmarks.timing import capture, windows
from duel.config import TrainConfig
from duel.errors import UserError, suggest
from duel.graph import WARM_UP
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.step import TrainingStep

METHODS = ("simclr", "moco")
#: Batches that a DataLoader's process prepares ahead (torch's default).
AHEAD = 2


def lightly() -> Any:
    """The parts of lightly that are measured, as attributes."""
    try:
        from lightly import loss, transforms
        from lightly.models import utils
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

    return Parts


class Peer(nn.Module):
    """lightly's SimCLR or symmetric MoCo around our backbone, with the settings of `config`."""

    def __init__(self, config: TrainConfig, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.library, self.config = lightly(), config
        backbone: Any = encoders.backbone(config.backbone, stem=config.stem, image_size=shape[-1])
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
        """Two views of a PIL image; no blur, and the weaker jitter that lightly advises for small images."""
        if self.config.method == "simclr":
            return self.library.SimCLRTransform(input_size=side, cj_strength=0.5, gaussian_blur=0.0)
        return self.library.MoCoV2Transform(input_size=side, gaussian_blur=0.0)


class Pictures(Dataset[Any]):
    """uint8 arrays (n, h, w, 3), given out as torchvision's CIFAR10 gives its own: a PIL image each, transformed."""

    def __init__(self, arrays: np.ndarray[Any, Any], transform: Any) -> None:
        self.arrays, self.transform = arrays, transform

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return self.transform(Image.fromarray(self.arrays[index]))


class PeerRun:
    """The peer's training: `compute` on a batch that is there, `end_to_end` with its loader."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, device: torch.device, *, workers: int, compiled: bool
    ) -> None:
        torch.manual_seed(config.seed)
        self.device, self.cuda = device, device.type == "cuda"
        self.layout = torch.channels_last if self.cuda else torch.contiguous_format
        peer = Peer(config, inputs.train.shape)
        side = inputs.train.shape[-1]
        everything = torch.arange(len(inputs.train))
        arrays = inputs.train.images(everything).permute(0, 2, 3, 1).contiguous().numpy()
        self.loader = DataLoader(
            Pictures(arrays, peer.transform(side)),
            batch_size=config.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.cuda,
        )
        self.model = peer.to(device).to(memory_format=self.layout)  # type: ignore[call-overload]
        if compiled:
            self.model.backbone.compile(dynamic=False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(
            trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self._batches = self._forever()
        self.batch = next(self._batches)

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for first, second in self.loader:
                yield self._put(first), self._put(second)

    def _put(self, view: Tensor) -> Tensor:
        return view.to(self.device, non_blocking=True).contiguous(memory_format=self.layout)

    def compute(self) -> None:
        first, second = self.batch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.cuda):
            loss = self.model(first, second)
        loss.backward()
        self.optimizer.step()

    def end_to_end(self) -> None:
        self.batch = next(self._batches)
        self.compute()

    def close(self) -> None:
        """End the loading processes."""
        self._batches.close()  # type: ignore[attr-defined]
        self.loader._iterator = None


def our_compute(step: TrainingStep) -> Callable[[], object]:
    """Our step from views that are there to the updated memory: what is left without sampling and augmentation."""
    first, second = parts.views(step, step.images)

    def compute() -> None:
        parts.remember(step, parts.train(step, first, second))

    return capture(compute, step.generator) if step.graph is not None and step.graph.why_not is None else compute


def compare(
    config: TrainConfig,
    *,
    device: torch.device,
    workers: int,
    warm_up: int,
    count: int,
    length: int,
    compile_peer: bool = False,
) -> list[dict[str, Any]]:
    """Two rows: end to end and compute only, ours and lightly's, in milliseconds per step."""
    inputs = images.load(config, torch.device("cpu"))
    peer = PeerRun(config, inputs, device, workers=workers, compiled=compile_peer)
    for _ in range(warm_up + 3 * AHEAD * workers):  # until what was loaded ahead is used up
        peer.end_to_end()
    (theirs_whole,) = windows([peer.end_to_end], device, count=count, length=length)
    peer.close()

    step = TrainingStep(config, images.load(config, device), fabric=build_fabric(config))
    step.fill_memory()
    for _ in range(max(warm_up, WARM_UP + 2) if step.graph is not None else warm_up):
        step()
    (ours_whole,) = windows([step], device, count=count, length=length)
    ours, theirs = windows([our_compute(step), peer.compute], device, count=count, length=length)
    about = {name: getattr(config, name) for name in ("method", "backbone", "batch_size", "data")}
    about |= {"ours_compiled": is_compiled(step), "lightly_compiled": compile_peer}
    return [
        about | {"what": what, **_figures(ours, theirs, config.batch_size)}
        for what, ours, theirs in (("end to end", ours_whole, theirs_whole), ("compute only", ours, theirs))
    ]


def _figures(ours: list[float], theirs: list[float], batch: int) -> dict[str, Any]:
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "ours_ms": mine,
        "lightly_ms": other,
        "speedup": other / mine,
        "ours_images_per_s": batch / mine * 1e3,
        "lightly_images_per_s": batch / other * 1e3,
        "ours_windows": [round(t, 4) for t in ours],
        "lightly_windows": [round(t, 4) for t in theirs],
    }


def report(
    *,
    device: torch.device,
    out: str | None,
    methods: Sequence[str] = METHODS,
    data: str | None = None,
    workers: int | None = None,
    warm_up: int,
    count: int,
    length: int,
    compile_peer: bool = False,
    **settings: Any,
) -> Path:
    """What `duel bench peers` does: a table and the figures as JSON. data None: CIFAR-10 if it is there, else made up.

    settings: fields of TrainConfig, on top of the recipe `standard`.
    """
    from rich.console import Console

    lightly()  # missing is to be told before anything is loaded
    for name in set(methods) - set(METHODS):
        raise UserError(suggest("method", name, METHODS))
    if min(count, length) < 1:
        raise UserError(f"count and length must be at least 1, got {count} and {length}")
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    versions = {"lightly": importlib.metadata.version("lightly")}
    how = {"workers": workers, "warm_up": warm_up, "count": count, "length": length}
    call = {"methods": methods, "data": data, "compile_peer": compile_peer, **how, **settings}
    results = Results("peers", device, out, call, peers=versions, **how)
    console = Console()
    for method in methods:
        config = recipes.standard(method)  # type: ignore[arg-type]
        config = dataclasses.replace(config, device=str(device), **settings)
        config = dataclasses.replace(config, data=data or _available(config))
        with console.status(f"{method}: {config.data}, {workers} loading processes"):
            rows = compare(
                config,
                device=device,
                workers=workers,
                warm_up=warm_up,
                count=count,
                length=length,
                compile_peer=compile_peer,
            )
        for row in rows:
            results.add(row)
    console.print(table(results.rows))
    return results.path


def _available(config: TrainConfig) -> str:
    try:
        images.load(config, torch.device("cpu"))
    except UserError:
        return images.SYNTHETIC
    return config.data


def table(rows: Sequence[dict[str, Any]]) -> Any:
    shown = tables.table("A training step, ms", ("method", "what"), ("ours", "lightly", "lightly / ours"))
    for row in rows:
        shown.add_row(row["method"], row["what"], *cells(row))
    return shown


def cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['ours_ms']:.2f}", f"{row['lightly_ms']:.2f}", f"{row['speedup']:.2f}"]
