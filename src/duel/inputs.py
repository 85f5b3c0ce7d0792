"""From a config to the images it trains on: sources, bias, stream, length."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import checkpoints
from .config import TrainConfig
from .config_checks import no_labels
from .data.bias import class_weights, subset_ids
from .data.digests import digests
from .data.live import LiveStream
from .data.sources import NAMES, ArraySource, Source, Stats, load, statistics
from .data.stream import Stream
from .errors import Notice, UserError
from .runs import CHECKPOINTS, STREAM, SUBSET, TRAINED_ON, write_json

if TYPE_CHECKING:
    from .instruments import Instruments
    from .memory import WorkingMemory

#: Images of a live stream that are looked at first, so that all can be normalised by them.
LOOKED_AT = 1024
#: As many as it has.
ENDLESS = sys.maxsize


@dataclass(frozen=True)
class Inputs:
    """What a run reads. Labels are for measuring and for making the bias; no method sees them, nor any policy but the
    oracle, which is a control."""

    train: Source
    test: Source | None
    """For measuring while training; None where there is none or where there are no labels."""
    stats: Stats
    """Mean and standard deviation per channel, in 0..1."""
    ids: Tensor | None
    """bias_mode subset: the only items shown, int64 (n,)."""
    weights: Tensor | None
    """bias_mode draw: class weights, float64 (classes,)."""
    known_as: str = field(default="", kw_only=True)
    """What the folder was called when the run was started, where it may be called otherwise now."""

    @classmethod
    def load(cls, config: TrainConfig, device: torch.device, *, test: bool, known_as: str = "") -> Inputs:
        train = load_split(config, "train")
        _check_size(config.data, "images", train)
        if kept := getattr(train, "kept_apart", 0):
            folder = f"its {len(train.classes)} subfolders are taken for classes, and " * bool(files_of(train))
            unless = "if they are none, " * bool(folder)
            warnings.warn(
                f"{config.data}: {folder}{kept} of {len(train) + kept} images kept for testing; {unless}--unlabelled "
                "trains on all of them",
                Notice,
                stacklevel=2,
            )
        biased = config.bias_kind == "weights" or config.bias != 1
        ids = weights = None
        if biased:
            if train.labels is None:
                raise UserError(no_labels(config))
            weights = class_weights(
                len(train.classes),
                kind=config.bias_kind,
                bias=config.bias,
                dominant=config.bias_class,
                weights=config.weights,
            )
            if config.bias_mode == "subset":
                ids, weights = subset_ids(train.labels, weights, seed=config.seed), None
        stats = statistics(train)
        held = load_split(config, "test") if test and _can_be_measured(train) else None
        if held is not None and len(held) < 2:
            held = None  # nothing to measure
        if test and _tells_classes(train) and not _can_be_measured(train):
            warnings.warn(f"{config.data}: no k-NN while training, as it has no test part", Notice, stacklevel=2)
        if held is not None:
            _check_size(config.data, "test images", held, train.shape[-1])
        return cls(_to(train, device), held and _to(held, device), stats, ids, weights, known_as=known_as)

    @property
    def items(self) -> int:
        """As many different ones can come."""
        return len(self.train) if self.ids is None else len(self.ids)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Another one when items no longer have the numbers by which a stream and a memory know them."""
        return items_of(self.train, self.known_as)

    @functools.cached_property
    def files(self) -> list[str]:
        """Paths of the items, if any, as the run's config calls the folder, unless that is called otherwise now."""
        return files_of(self.train, self.known_as if _called(self.train.name, self.known_as) else "")

    @property
    def labelled(self) -> bool:
        """Whether there are classes to tell apart, and other images to tell them apart in."""
        return _can_be_measured(self.train)

    def steps(self, config: TrainConfig) -> int:
        """Length of training in steps; in an epoch the stream brings as many items as there are, also where they are
        drawn."""
        return config.steps or max(1, round(config.epochs * self.items / config.stream_items))

    def stream(self, config: TrainConfig, device: torch.device) -> Stream | LiveStream:
        return Stream(
            self.train,
            batch_size=config.stream_items,
            device=device,
            seed=config.seed,
            ids=self.ids,
            weights=self.weights,
            dwell=config.dwell,
            dwell_spread=config.dwell_spread,
            workers=config.workers,
        )

    def instruments(self, config: TrainConfig, memory: WorkingMemory | None) -> Instruments | None:
        """What watches the memory of a run, if it has one."""
        from .instruments import Instruments

        if memory is None:
            return None
        labels = self.train.labels
        largest = None
        if labels is not None:
            shown = labels if self.ids is None else labels[self.ids.cpu()]
            share = self.weights if self.weights is not None else shown.bincount() / len(shown)
            largest = float(share.max())
        return Instruments(
            memory,
            labels=labels,
            classes=len(self.train.classes),
            stream_largest=largest,
            per_update=config.stream_items,
            dwell=config.dwell,
            encoded=config.memory_encoded,
            score=config.score,
            items=self.items,
            negatives=config.memory_negatives,
        )

    def save(self, run: Path) -> None:
        """Which items a fixed subset shows is part of the result, and what was trained on is not to be measured on."""
        if self.ids is not None:
            np.save(run / SUBSET, self.ids.cpu().numpy())
        # a named set's test part is what it is; of others it may be made of anything
        if self.train.name not in NAMES and (seen := digests(self.train, self.ids)) is not None:
            np.save(run / TRAINED_ON, seen.numpy())


@dataclass(frozen=True)
class LiveInputs(Inputs):
    """Of a stream that brings each image once: no labels, nothing to measure on, and no end that is known.

    `train` is what it began with, by which images are normalised.
    """

    live: LiveStream

    @classmethod
    def open(cls, config: TrainConfig, frames: Iterable[Any], device: torch.device, resumed: Path | None) -> LiveInputs:
        """resumed: a run that goes on, and has said what it began with."""
        live = LiveStream(frames, batch_size=config.stream_items, device=device, size=config.image_size)
        trained = resumed and checkpoints(resumed / CHECKPOINTS)  # without any it begins with what comes now
        began = json.loads((resumed / STREAM).read_text()) if resumed and trained else None
        count, enough = (1, 1) if began else (LOOKED_AT, min(LOOKED_AT, config.stream_items))
        train = ArraySource(live.look(count, at_least=enough), name="stream")
        _check_size(config.data, "images", train)
        if len(train) < enough:
            raise UserError(f"the stream ended after {len(train)} images, before a batch of {config.stream_items}")
        if began is None:
            return cls(train, None, statistics(train), None, None, live)
        if began["image_shape"] != list(train.shape):
            raise UserError(
                f"the stream has images of {train.shape[1]} × {train.shape[2]} pixels, and {resumed} was trained on "
                f"{began['image_shape'][1]} × {began['image_shape'][2]}; give it such"
            )
        return cls(train, None, (tuple(began["mean"]), tuple(began["std"])), None, None, live)

    @property
    def items(self) -> int:
        return ENDLESS

    @property
    def fingerprint(self) -> str:
        """The same for all: what comes next need not be what came before."""
        return "live"

    def stream(self, config: TrainConfig, device: torch.device) -> LiveStream:
        return self.live

    def save(self, run: Path) -> None:
        """A run that goes on normalises images as before."""
        mean, std = self.stats
        write_json(run / STREAM, {"image_shape": list(self.train.shape), "mean": list(mean), "std": list(std)})


_kept: dict[tuple[object, ...], Source] | None = None


@contextmanager
def keep_sources() -> Iterator[None]:
    """Inside the block every data set is read once, however many runs use it."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def _check_size(data: str, what: str, source: Source, side: int | None = None) -> None:
    """That its images are squares, of this side."""
    height, width = source.shape[1:]
    if height != width or width != (side or width):
        wanted = "square ones" if side is None else f"those of the training images, {side} × {side}"
        raise UserError(
            f"{data!r} has {what} of {height} × {width} pixels, not {wanted}; give an image_size to resize all to"
        )


def items_of(source: Source, known_as: str = "") -> str:
    """Another hash when its items no longer have the same numbers."""
    text = "\0".join([str(len(source)), *(files_of(source, known_as) or [""])])
    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def files_of(source: Source, known_as: str = "") -> list[str]:
    """Paths of its items, none of what is no folder. known_as: what the folder was called when a run began; reached by
    another path it is the same."""
    paths = getattr(source, "paths", None)
    names: list[str] = [] if paths is None else paths.tolist()
    if not known_as:
        return names
    now, then = _start(source.name), _start(known_as)
    return [then + name.removeprefix(now) for name in names]


def _start(folder: str) -> str:
    """What the paths of its files begin with."""
    return "" if (path := Path(folder).expanduser()) == Path() else os.path.join(path, "")


def _called(folder: str, name: str) -> bool:
    """Whether a folder can be meant by this name from some directory."""
    meant = Path(os.path.normpath(Path(name).expanduser()))
    ending = [part for part in meant.parts if part not in (os.curdir, os.pardir)]
    there = Path(folder).expanduser().absolute()
    return not ending or list(there.parts[-len(ending) :]) == ending or there.resolve() == meant.resolve()


def _tells_classes(source: Source) -> bool:
    return source.labels is not None and len(source.classes) > 1


def _can_be_measured(train: Source) -> bool:
    return _tells_classes(train) and getattr(train, "has_test", True)


def load_split(config: TrainConfig, split: str) -> Source:
    key = (config.data, split, config.root, config.image_size, config.residency, config.unlabelled)
    if _kept is None or key not in _kept:
        source = _load_split(config, split)
        if _kept is None:
            return source
        _kept[key] = source
    return _kept[key]


def _load_split(config: TrainConfig, split: str) -> Source:
    return load(
        config.data,
        split="train" if split == "train" else "test",
        root=config.root,
        download=config.download,
        image_size=config.image_size,
        residency=config.residency,
        labelled=not config.unlabelled,
    )


def _to(source: Source, device: torch.device) -> Source:
    """Sources that can live on the device do."""
    move = getattr(source, "to", None)
    moved: Source = source if move is None else move(device)
    return moved
