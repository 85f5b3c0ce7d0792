"""Data sets known by name: scikit-learn's digits, and CIFAR-10, CIFAR-100 and STL-10 through torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from duel.data.arrays import as_images, finish
from duel.data.sources import ArraySource, Residency, Split, split_ids
from duel.errors import UserError

DIGITS_TEST = 500


def load(
    name: str, *, split: Split, root: str, download: bool, image_size: int | None, residency: Residency
) -> ArraySource:
    """See duel.data.load; name is one of sources.NAMES."""
    if name == "digits":
        return finish(_digits(split), image_size, residency)
    data = _torchvision(name, split, root, download)
    images = as_images(data.data, name)
    labels = None
    if name != "stl10-unlabeled":
        labels = torch.as_tensor(data.labels if name == "stl10" else data.targets)
    source = ArraySource(images, labels, name=name, classes=tuple(data.classes) if labels is not None else ())
    return finish(source, image_size, residency)


def _digits(split: Split) -> ArraySource:
    """1,797 grey 8×8 images as three equal channels; a fixed stratified split of 1,297 and 500."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("data 'digits' needs scikit-learn: pip install 'duel-ssl[train]'") from error
    digits = load_digits()
    images = as_images((digits.images * (255 / 16)).round().astype("uint8"), "digits")
    labels = torch.as_tensor(digits.target)
    train, test = split_ids(len(images), labels, test_size=DIGITS_TEST)
    return ArraySource(images, labels, name="digits").subset(train if split == "train" else test)


def _torchvision(name: str, split: Split, root: str, download: bool) -> Any:
    """torchvision's data set, with what can go wrong said in the user's terms."""
    try:
        from torchvision import datasets
    except ImportError as error:
        raise UserError(f"data {name!r} needs torchvision: pip install 'duel-ssl[train]'") from error
    if name == "stl10-unlabeled" and split == "test":
        raise UserError("stl10-unlabeled is for training; evaluate on data 'stl10'")
    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}.get(name, datasets.STL10)
    which: dict[str, Any] = {"train": split == "train"}
    if kind is datasets.STL10:
        which = {"split": "unlabeled" if name == "stl10-unlabeled" else split}
    where = Path(root).expanduser()
    try:
        return kind(str(where), download=download, **which)
    except (RuntimeError, OSError, EOFError) as error:  # urllib's and zlib's errors are OSErrors
        expected = f"{where / kind.base_folder}"
        if download:
            raise UserError(
                f"could not download {name} to {str(where)!r}: {error}. Check the network and the free space, or "
                f"unpack the original archive {kind.filename} on this machine so that {expected!r} exists"
            ) from error
        found = "is incomplete or damaged" if Path(expected).exists() else "was not found"
        raise UserError(
            f"{name} {found} at {expected!r}. Download it (download=True; duel train --download), name "
            f"the folder that holds {kind.base_folder!r} (root; --root), or take data 'digits', which needs no download"
        ) from error
