"""Any folder of images: decoded, and kept or streamed. Which files it has, `duel.data.files` says."""

from __future__ import annotations

import functools
import os
import statistics as numbers
import sys
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duel.data import files, opaque
from duel.data.files import part_of, scan, test_folders
from duel.data.sources import RESIDENT_BYTES, ArraySource, Residency, Source, Split, own_split
from duel.errors import Notice, UserError

# A folder's own image size is the median of this many files, and not more than the size ImageNet is trained at.
PROBED, LARGEST_SIZE = 100, 224
THREADS = min(8, os.cpu_count() or 1)


#: What `decode` does, for those who have to do the same; the side in pixels is to follow.
PREPARED = (
    "upright (EXIF rotation applied), RGB, transparent parts white, central square, resized (bilinear, antialiased) to "
    "a side of"
)


def decode(path: Path | str, size: int) -> Tensor:
    """One file -> uint8 (3, size, size): upright (EXIF), RGB, on white, shorter side resized to size, central square.

    Raises whatever the decoder raises: callers take every Exception to mean "unreadable", but for those that say that
    there is no memory left or no decoder installed.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        file.draft("RGB", (size, size))  # lets JPEG decode at 1/2, 1/4 or 1/8 of its size, never below `size`
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I") or image.mode == "F":  # more than 8 bits: PIL would cut, not scale
            wide = np.asarray(image, dtype=np.float64)
            top = 65535 if wide.max() > 255 or image.mode.startswith("I;16") else 255 if wide.max() > 1 else 1
            image = Image.fromarray((wide.clip(0, top) * (255 / top)).round().astype(np.uint8))
        image = ImageOps.fit(opaque.picture(image), (size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class FolderSource:
    """Paths, decoded when asked for. For folders too large to hold; Stream decodes in worker processes.

    A file that turns out to be unreadable is replaced by the next readable one of its class (of the folder, without
    labels) and added to `skipped`, with a warning.
    """

    kept_apart = 0
    """Images of the folder that are in the other part of a split that it did not bring itself."""
    has_test = True
    """Of training images: whether there are others to measure on."""

    def __init__(
        self,
        paths: list[Path],
        labels: Tensor | None,
        *,
        name: str,
        classes: tuple[str, ...],
        image_size: int,
        skipped: tuple[str, ...] = (),
    ) -> None:
        from PIL import Image  # noqa: F401  # told now if it is missing: not by a worker, as one file after the other

        self.paths = _names(paths)
        self.labels, self.name, self.classes, self.skipped = labels, name, classes, skipped
        self.shape = (3, image_size, image_size)
        self._bad: set[int] = set()

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return f"FolderSource({self.name!r}, {len(self)} files as {self.shape}, {len(self.classes)} classes)"

    def images(self, ids: Tensor) -> Tensor:
        """ids int64 (b,) -> uint8 (b, 3, h, w) on the device of ids, which are read back to the host."""
        images, _, bad = self.read(ids)
        self.report(bad)
        return images.to(ids.device)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor, dict[int, str]]:
        """(images, the ids really shown, reasons by unreadable id), on the CPU. Each distinct id is decoded once."""
        wanted, bad = ids.tolist(), dict[int, str]()
        decoded: dict[int, Tensor] = {}
        shown = []
        for first in wanted:
            item = first
            while item not in decoded:
                try:
                    if item in self._bad:
                        raise OSError("found unreadable before")
                    decoded[item] = decode(str(self.paths[item]), self.shape[1])
                except (MemoryError, ModuleNotFoundError):
                    raise
                except Exception as error:
                    if item not in self._bad:
                        bad[item] = _reason(error)
                        self._bad.add(item)
                    item = self._next(item)
                    if item == first:
                        raise UserError(f"no readable image left of {self._kind(first)} in {self.name!r}") from error
            shown.append(item)
        return torch.stack([decoded[i] for i in shown]), torch.tensor(shown), bad

    @property
    def unreadable(self) -> frozenset[int]:
        """Items found to be so up to now."""
        return frozenset(self._bad)

    def report(self, bad: dict[int, str]) -> None:
        """Put unreadable files found by `read` (here or in a worker) on the list, and say so."""
        known = set(self.skipped)
        new = [line for i, why in sorted(bad.items()) if (line := f"{self.paths[i]}: {why}") not in known]
        self._bad.update(bad)
        if new:
            self.skipped += tuple(new)
            _warn(self.name, new)

    def _next(self, item: int) -> int:
        """The item after this one, of the same class, going round."""
        if self.labels is None:
            return (item + 1) % len(self)
        peers = (self.labels == self.labels[item]).nonzero().flatten().tolist()
        return int(peers[(peers.index(item) + 1) % len(peers)])

    def _kind(self, item: int) -> str:
        return "any kind" if self.labels is None else f"class {self.classes[int(self.labels[item])]!r}"


def _names(paths: list[Path]) -> NDArray[np.str_]:
    """One block: worker processes share it, lists are copied."""
    return np.array([str(p) for p in paths])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__


def _warn(name: str, lines: Iterable[str], shown: int = 5) -> None:
    lines = list(lines)
    more = f"\n  … and {len(lines) - shown} more" if len(lines) > shown else ""
    listed = "".join(f"\n  {line}" for line in lines[:shown])
    told = f"{name}: {len(lines)} unreadable file{'s' * (len(lines) > 1)} skipped:{listed}{more}"
    warnings.warn(told, Notice, stacklevel=3)


def _own_size(paths: list[Path]) -> int:
    """The median short side of up to PROBED files spread over the folder, at most LARGEST_SIZE."""
    from PIL import Image

    sides = []
    for path in paths[:: max(1, len(paths) // PROBED)]:
        try:
            with Image.open(path) as image:
                sides.append(min(image.size))
        except Exception:  # an unreadable file: found again, and listed, when it is decoded
            continue
    return min(LARGEST_SIZE, int(numbers.median(sides))) if sides else LARGEST_SIZE


def load(folder: Path, *, split: Split, image_size: int | None, residency: Residency, labelled: bool = True) -> Source:
    """See duel.data.load. Kept in memory: decoded once, here. Streamed: decoded when needed."""
    part, train = part_of(folder, split)
    training = scan(train, None, tell=False, labelled=labelled) if train is not None and part != train else None
    known = training[2] or None if training else None
    paths, labels, classes = scan(part, known, tell=split == "train" or train is not None, labelled=labelled)
    size = image_size or _own_size(training[0] if training else paths)
    kept_apart = 0
    if train is None:  # before any is decoded: whether a file can be read changes no other's part
        ids = own_split(str(folder), labels, len(paths), split, functools.partial(files.own_split, folder, paths))
        kept_apart = len(paths) - len(ids)
        if labels is not None and split == "train":
            _tell_untested(str(folder), labels, ids, classes)
        paths, labels = [paths[i] for i in ids.tolist()], None if labels is None else labels[ids]
    resident = len(paths) * 3 * size**2 <= RESIDENT_BYTES if residency == "auto" else residency == "device"
    images: Tensor | None = None
    skipped: tuple[str, ...] = ()
    if resident:
        images, good, skipped = _decode_all(paths, size, str(folder))
        if labels is not None and (train is not None or split == "train"):  # what is kept for testing may lack some
            _check_classes(labels, good, classes, part)
        paths, labels = [paths[i] for i in good.tolist()], None if labels is None else labels[good]
    source: ArraySource | FolderSource
    if images is None:
        source = FolderSource(paths, labels, name=str(folder), classes=classes, image_size=size)
    else:
        source = ArraySource(images, labels, name=str(folder), classes=classes, skipped=skipped, paths=_names(paths))
    source.kept_apart = kept_apart
    source.has_test = kept_apart > 0 if train is None else bool(test_folders(folder))
    return source


def _tell_untested(name: str, labels: Tensor, train: Tensor, classes: tuple[str, ...]) -> None:
    """Classes that the rest, which is for testing, has no image of."""
    counts = torch.bincount(labels, minlength=len(classes)) - torch.bincount(labels[train], minlength=len(classes))
    if untested := [c for c, n in zip(classes, counts.tolist(), strict=True) if n == 0]:
        more = f" and {len(untested) - 3:,} more" if len(untested) > 3 else ""
        listed = ", ".join(map(repr, untested[:3]))
        which = f"class {listed} has" if len(untested) == 1 else f"classes {listed}{more} have"
        warnings.warn(f"{name}: {which} too few different files to keep any for testing", Notice, stacklevel=3)


def _check_classes(labels: Tensor, good: Tensor, classes: tuple[str, ...], part: Path) -> None:
    """That none of those with files is left without a readable one."""
    if empty := sorted(set(labels.tolist()) - set(labels[good].tolist())):
        name, of = classes[empty[0]], int((labels == empty[0]).sum())
        raise UserError(f"class {name!r} has no images: of {of} taken from {str(part / name)!r} none is readable")


def _decode_all(paths: list[Path], size: int, name: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """(images (n, 3, size, size), which of the paths they are, the others with the reason)."""

    def attempt(path: Path) -> Tensor | str:
        try:
            return decode(path, size)
        except (MemoryError, ModuleNotFoundError):
            raise
        except Exception as error:
            return _reason(error)

    out = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)
    good: list[int] = []
    skipped: list[str] = []
    with ThreadPoolExecutor(THREADS) as pool:  # Pillow releases the interpreter lock while it decodes and resizes
        for i, result in enumerate(_watched(pool.map(attempt, paths), len(paths), name)):
            if isinstance(result, str):
                skipped.append(f"{paths[i]}: {result}")
            else:
                out[len(good)] = result
                good.append(i)
    if skipped:
        _warn(name, skipped)
    if not good:
        raise UserError(f"none of the {len(paths)} image files in {name!r} is readable; the first: {skipped[0]}")
    return out[: len(good)], torch.tensor(good), tuple(skipped)


def _watched(items: Iterable[Tensor | str], total: int, name: str) -> Iterable[Tensor | str]:
    """A progress bar where somebody watches and it takes more than a few seconds."""
    if total < 2000 or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, f"reading {name}", total=total, console=Console(stderr=True), transient=True)
