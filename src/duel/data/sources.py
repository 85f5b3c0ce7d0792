"""Where images come from: named data sets, folders, arrays. `load` finds the right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duel.checks import check_tensor
from duel.errors import UserError, suggest
from duel.names import NAMED_DATA

Split = Literal["train", "test"]
Residency = Literal["auto", "device", "stream"]
Stats = tuple[tuple[float, float, float], tuple[float, float, float]]

NAMES = NAMED_DATA
# "auto" keeps a set as one uint8 tensor (on the training device) up to this size. STL-10's unlabelled part, 2.6 GiB,
# fits; ImageNet at 224 pixels, 180 GiB, streams.
RESIDENT_BYTES = 4 * 2**30
# The share of a labelled set without a split of its own that becomes its test set.
TEST_SHARE = 0.2

# Mean and standard deviation of the training pixels per channel, in units of 0..1.
STATS: dict[str, Stats] = {
    "digits": ((0.3061, 0.3061, 0.3061), (0.3760, 0.3760, 0.3760)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "stl10": ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
    "stl10-unlabeled": ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
}


@runtime_checkable
class Source(Protocol):
    """A set of images, all of one shape, with labels or without."""

    name: str
    classes: tuple[str, ...]  # () without labels
    labels: Tensor | None  # int64 (n,), on the CPU, 0 <= label < len(classes)
    shape: tuple[int, int, int]  # (c, h, w) of every image
    skipped: tuple[str, ...]  # files left out, each with the reason
    # one of files also has `paths`, each item's: str (n,)

    def __len__(self) -> int: ...

    def images(self, ids: Tensor) -> Tensor:
        """ids int64 (b,) -> uint8 (b, c, h, w) on the device of ids."""
        ...


class ArraySource:
    """Images in one uint8 tensor (n, 3, h, w); on the device of `to`, from where they are gathered without a copy.

    resident: the tensor may live on the training device. False keeps it in host memory (or in a memory-mapped file),
    and batches travel one by one.
    """

    kept_apart, has_test = 0, True
    """As a FolderSource has them."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        *,
        name: str = "array",
        classes: tuple[str, ...] = (),
        resident: bool = True,
        skipped: tuple[str, ...] = (),
        paths: NDArray[np.str_] | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise UserError(f"images must be uint8 (n, c, h, w), got {images.dtype} {tuple(images.shape)}")
        if len(images) == 0:
            raise UserError(f"{name} holds no images")
        if labels is not None:
            if labels.shape != (len(images),) or labels.is_floating_point():
                raise UserError(
                    f"labels of {name} must be {len(images)} whole numbers, one per image; "
                    f"got {labels.dtype} {tuple(labels.shape)}"
                )
            labels = labels.to("cpu", torch.int64)
            low, high = int(labels.min()), int(labels.max())
            classes = classes or tuple(str(c) for c in range(high + 1))
            if low < 0 or high >= len(classes):
                raise UserError(f"labels of {name} must be in 0..{len(classes) - 1}, got {low}..{high}")
        if paths is not None and len(paths) != len(images):
            raise UserError(f"paths of {name} must be {len(images)}, one per image, got {len(paths)}")
        self.data, self.labels, self.name, self.classes = images, labels, name, classes
        self.resident, self.skipped, self.paths = resident, skipped, paths
        self.shape: tuple[int, int, int] = (images.shape[1], images.shape[2], images.shape[3])

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"ArraySource({self.name!r}, {len(self)} images {self.shape}, {len(self.classes)} classes)"

    def images(self, ids: Tensor) -> Tensor:
        """ids int64 (b,) -> uint8 (b, c, h, w). No synchronisation where ids and images share a device."""
        if ids.device == self.data.device:
            return self.data.index_select(0, ids)
        return self.data.index_select(0, ids.to(self.data.device)).to(ids.device)

    def to(self, device: torch.device | str) -> ArraySource:
        """The same source with its images on `device` (itself where they are there already, or not resident)."""
        if not self.resident or self.data.device == torch.device(device):
            return self
        return self._with(self.data.to(device), self.labels, self.paths)

    def subset(self, ids: Tensor) -> ArraySource:
        """These images only, renumbered 0..; classes keep their numbers."""
        ids = check_items(ids, len(self))
        labels = None if self.labels is None else self.labels[ids]
        paths = None if self.paths is None else self.paths[ids.numpy()]
        return self._with(self.images(ids.to(self.data.device)), labels, paths)

    def _with(self, images: Tensor, labels: Tensor | None, paths: NDArray[np.str_] | None) -> ArraySource:
        made = ArraySource(
            images,
            labels,
            name=self.name,
            classes=self.classes,
            resident=self.resident,
            skipped=self.skipped,
            paths=paths,
        )
        made.has_test = self.has_test
        return made


def check_items(ids: Tensor, count: int) -> Tensor:
    """Numbers of some of `count` items, as int64 on the CPU; refuses a mask, fractions, and numbers that none has."""
    check_tensor(ids, "ids", "int64 (n,)")
    if ids.dtype == torch.bool:
        raise UserError("ids must be the numbers of items, got a mask: pass mask.nonzero().flatten()")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise UserError(f"ids must be whole numbers of shape (n,), got {ids.dtype} {tuple(ids.shape)}")
    ids = ids.detach().to("cpu", torch.int64)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise UserError(f"ids must be between 0 and {count - 1}, got {int(ids.min())} to {int(ids.max())}")
    return ids


def split_sizes(labels: Tensor, test_size: int | None = None) -> list[int]:
    """How many items of each class are kept for testing, of `test_size` in all (TEST_SHARE of them).

    Each class gives its share rounded down; the classes with the largest remainders give one more.
    """
    n = len(labels)
    size = round(n * TEST_SHARE) if test_size is None else test_size
    share = torch.bincount(labels).double() * size / n
    take = share.floor()
    spare = size - int(take.sum())
    take[torch.argsort(share - take, descending=True, stable=True)[:spare]] += 1
    return [int(k) for k in take]


def split_ids(n: int, labels: Tensor, *, test_size: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Seeded, stratified (`split_sizes`): ids of the training and of the test part, int64, ascending."""
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    chosen = [shuffled[labels[shuffled] == c][:k] for c, k in enumerate(split_sizes(labels, test_size))]
    is_test = torch.zeros(n, dtype=torch.bool)
    is_test[torch.cat(chosen)] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def own_split(
    source_name: str,
    labels: Tensor | None,
    n: int,
    split: Split,
    divide: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Which ids of a set that brings no split are `split`: 80 % / 20 %, seeded and stratified, or as `divide` has them.

    A set without labels is for training only: all of it, and no test set.
    """
    if labels is None:
        if split == "train":
            return torch.arange(n)
        raise UserError(
            f"{source_name} has no labels and no test part, so nothing to measure on; evaluate on labelled data: "
            "class subfolders, a test/ or val/ folder beside train/, or a 'labels' array in the .npz, there or, by "
            "`duel evaluate --data`, elsewhere"
        )
    train, test = split_ids(n, labels) if divide is None else divide(labels)
    chosen = train if split == "train" else test
    if len(chosen) == 0:
        raise UserError(f"{source_name} has {n} images, too few different ones to set a {split} part of them apart")
    return chosen


def statistics(source: Source, *, sample: int = 4096, seed: int = 0) -> Stats:
    """Mean and standard deviation per channel in units of 0..1, for normalisation.

    Named sets have constants (STATS); of others, up to `sample` randomly chosen images are measured.
    """
    if source.name in STATS:
        return STATS[source.name]
    ids = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed))[:sample]
    total, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    for piece in torch.split(ids, 256):
        pixels = source.images(piece).double().div_(255).transpose(0, 1).flatten(1)
        total, squares, count = total + pixels.sum(1), squares + pixels.square().sum(1), count + pixels.shape[1]
    mean = total / count
    # A constant channel would divide by zero: at least one grey level.
    std = (squares / count - mean**2).clamp_(min=0).sqrt_().clamp_(min=1 / 255)
    m, s = mean.tolist(), std.tolist()
    return (m[0], m[1], m[2]), (s[0], s[1], s[2])


def load(
    data: str,
    *,
    split: Split = "train",
    root: str = "data",
    download: bool = False,
    image_size: int | None = None,
    residency: Residency = "auto",
    labelled: bool = True,
) -> Source:
    """Images by name or path.

    data: a name in NAMES (looked for under `root`, fetched there with download=True); a folder of images; a .npz or
    .npy file. image_size: side in pixels (None: the set's own; of a folder, the median short side of its training
    images, at most 224); images are resized by their shorter side and cut to the central square. residency: "device"
    holds all images as one uint8 tensor, "stream" reads them when they are needed, "auto" decides by size
    (RESIDENT_BYTES). labelled: False leaves the labels of a folder or of arrays aside, and so keeps none for testing.

    Folders: where every image lies in one of several subfolders, these are the classes; otherwise there are none.
    train/ and test/ (or val/) inside the folder are the splits; without them, and for arrays without a split, a
    labelled set is split 80 % / 20 % (stratified; arrays with a fixed seed, files by their names, copies of one file
    in a class together) and an unlabelled one is all training data.
    """
    if split not in ("train", "test"):
        raise UserError(suggest("split", split, ("train", "test")))
    if residency not in ("auto", "device", "stream"):
        raise UserError(suggest("residency", residency, ("auto", "device", "stream")))
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size must be at least 1 pixel, got {image_size}")
    path = Path(data).expanduser()
    if data in NAMES and not labelled:
        raise UserError(
            f"unlabelled is for folders and arrays of your own, whose labels may be none; leave it out for {data}"
        )
    if data in NAMES:
        from duel.data import named

        return named.load(data, split=split, root=root, download=download, image_size=image_size, residency=residency)
    if path.is_dir():
        from duel.data import folder

        return folder.load(path, split=split, image_size=image_size, residency=residency, labelled=labelled)
    if path.is_file() and path.suffix in (".npz", ".npy"):
        from duel.data import arrays

        return arrays.load(path, split=split, image_size=image_size, residency=residency, labelled=labelled)
    if path.exists():
        raise UserError(f"data {data!r} is neither a folder nor a .npz or .npy file")
    raise UserError(
        f"{suggest('data', data, NAMES)}; or the path of a folder of images, of a .npz or of a .npy file "
        f"(there is nothing at {str(path)!r})"
    )
