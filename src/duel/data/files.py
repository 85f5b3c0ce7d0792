"""Which files of a folder are images, and of which part and class."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from duel.data.sources import Split, split_sizes
from duel.errors import Notice, UserError

EXTENSIONS = frozenset(
    f".{e}"
    for e in ("jpg", "jpeg", "jfif", "png", "bmp", "gif", "webp", "avif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm")
)
TEST_FOLDERS = ("test", "val", "valid", "validation")
# What is put beside images and never meant to be one.
BESIDE = frozenset(
    f".{e}" for e in ("csv", "tsv", "txt", "json", "jsonl", "xml", "yaml", "yml", "md", "ini", "db", "log")
)
SHOWN = 5
GLANCE = 4096  # bytes from either end by which files of one size are told apart first


def _files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """(image files below `folder`, sorted; how many others, by their ending). Hidden files and folders are left out.

    Links to folders are followed, but each folder is read once: by its own path where that lies below `folder`.
    """
    found: dict[tuple[str, ...], list[Path]] = {}
    others: Counter[str] = Counter()
    seen: set[str] = set()
    starts = [folder]
    for start in starts:  # which grows: links come after all that is reached without them
        for at, folders, files in os.walk(start):
            if (place := os.path.realpath(at)) in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(f for f in folders if not f.startswith((".", "__")))
            starts += [link for f in folders if (link := Path(at, f)).is_symlink()]
            paths = [Path(at, f) for f in sorted(files) if f[0] != "."]
            found[Path(at).parts] = [path for path in paths if path.suffix.lower() in EXTENSIONS]
            others.update(ending for path in paths if (ending := path.suffix.lower()) not in EXTENSIONS | BESIDE)
    return [path for parts in sorted(found) for path in found[parts]], others


def _listed(others: Counter[str]) -> str:
    """'2 .heic, 1 without one (3 in all)', the most frequent only."""
    named = [f"{count:,} {ending or 'without one'}" for ending, count in others.most_common(SHOWN)]
    more = ", …" if len(others) > SHOWN else ""
    return f"{', '.join(named)}{more}" + (f" ({others.total():,} in all)" if len(others) > 1 else "")


def copies(paths: Iterable[Path]) -> list[list[Path]]:
    """Files that have the same bytes, two or more in a group, each group in the order of the paths.

    Only files of one size and with the same ends are read whole. One that cannot be read is nobody's copy.
    """
    groups: list[list[Path]] = [list(paths)]
    for key in (lambda path: path.stat().st_size, _ends, _digest):
        groups = [alike for group in groups for alike in _alike(group, key) if len(alike) > 1]
    return groups


def _alike(paths: Iterable[Path], key: Callable[[Path], Hashable]) -> Iterable[list[Path]]:
    found: dict[Hashable, list[Path]] = defaultdict(list)
    for path in paths:
        try:
            found[key(path)].append(path)
        except OSError:
            continue  # said when it is decoded
    return found.values()


def _ends(path: Path) -> tuple[bytes, bytes]:
    with path.open("rb") as file:
        first = file.read(GLANCE)
        file.seek(-min(GLANCE, path.stat().st_size), os.SEEK_END)
        return first, file.read(GLANCE)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


def test_folders(folder: Path) -> list[Path]:
    """Its test folders, the one to take first."""
    return [path for name in TEST_FOLDERS if (path := folder / name).is_dir()]


def part_of(folder: Path, split: Split) -> tuple[Path, Path | None]:
    """(the folder to read, the training folder where the split is the folder's own).

    train/ is a split if a test folder stands beside it or if it is alone; among others it is a class (of vehicles).
    """
    subfolders = {p.name: p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))}
    tests = test_folders(folder)
    if "train" not in subfolders or (not tests and len(subfolders) > 1):
        return folder, None
    train = subfolders["train"]
    if split == "train":
        return train, train
    if not tests:
        wanted = ", ".join(f"{name}/" for name in TEST_FOLDERS)
        raise UserError(
            f"{str(folder)!r} has train/ but none of {wanted} to test on; `duel evaluate --data` takes others"
        )
    return tests[0], train


def own_split(folder: Path, paths: list[Path], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of the training and of the test part of a folder that brings no split: of each class as `split_sizes` has it.

    By the names of the files below the folder, so that one that is added moves hardly any other to the other part,
    where no two are the same. Files of a class that have the same bytes stay together: those that are too many for the
    test part are trained on, unless a class would have few to test on or none. One whose files are all the same is
    trained on.
    """
    first = {path: group[0] for group in copies(paths) for path in group}
    keys = [hashlib.blake2b(os.fsencode(first.get(p, p).relative_to(folder))).digest() for p in paths]
    is_test = torch.zeros(len(paths), dtype=torch.bool)
    for kind, count in enumerate(split_sizes(labels)):
        groups: dict[bytes, list[int]] = {}
        for i in (labels == kind).nonzero().flatten().tolist():
            groups.setdefault(keys[i], []).append(i)
        taken: list[int] = []
        left: list[list[int]] = []
        for _, group in sorted(groups.items()):
            fits = len(taken) + len(group) <= count
            taken += group if fits else []
            left += [] if fits else [group]
        if len(left) > 1:  # and so there is something else to train on
            least = min(left, key=len)
            if (count and not taken) or len(taken) + len(least) - count < count - len(taken):
                taken += least
        is_test[torch.tensor(taken if left else [], dtype=torch.int64)] = True
    return (~is_test).nonzero().flatten(), is_test.nonzero().flatten()


def _subfolders(folder: Path) -> list[str]:
    """Their names, sorted. They are classes if every image lies in one."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__")))


def scan(
    folder: Path, classes: tuple[str, ...] | None, *, tell: bool, labelled: bool = True
) -> tuple[list[Path], Tensor | None, tuple[str, ...]]:
    """(files, labels, class names); classes: number the classes as these (a test folder as its training folder). tell:
    say which files are not read. labelled: subfolders are classes."""
    paths, others = _files(folder)
    if not paths:
        there = f" (endings there: {_listed(others)})" if others else ""
        read = ", ".join(sorted(EXTENSIONS))
        raise UserError(f"no images in {str(folder)!r}{there}; files that end in {read} are read")
    if tell and others:
        warnings.warn(f"{folder}: files left out for their ending: {_listed(others)}", Notice, stacklevel=2)
    if tell and (again := sum(len(group) - 1 for group in copies(paths))):
        are = "is a copy of another" if again == 1 else "are copies of others"
        warnings.warn(f"{folder}: {again:,} of {len(paths):,} files {are}, byte for byte", Notice, stacklevel=2)
    subfolders = _subfolders(folder) if labelled else []
    beside = sum(path.parent == folder for path in paths)
    if tell and 0 < 2 * beside < len(paths) and len(subfolders) > 1:
        lie = "1 picture lies" if beside == 1 else f"{beside:,} pictures lie"
        told = f"{folder}: its subfolders are not taken for classes, since {lie} beside them"
        warnings.warn(told, Notice, stacklevel=2)
    groups: dict[str, list[Path]] = {name: [] for name in subfolders if not beside}
    for path in paths:
        if (name := path.parts[len(folder.parts)]) in groups:
            groups[name].append(path)
    if not any(groups.values()) or (len(groups) == 1 and classes is None):  # one class tells nothing apart
        return paths, None, ()
    if empty := [name for name, files in groups.items() if not files]:
        raise UserError(
            f"class {empty[0]!r} has no images of its own: every subfolder of {str(folder)!r} is a class. Add images "
            f"to {', '.join(repr(e) for e in empty)}, or move what is not a class elsewhere"
        )
    classes = tuple(groups) if classes is None else classes
    if unknown := sorted(set(groups) - set(classes)):
        raise UserError(f"{str(folder)!r} has classes that the training folder lacks: {', '.join(unknown)}")
    labels = [classes.index(name) for name, files in groups.items() for _ in files]
    return [f for files in groups.values() for f in files], torch.tensor(labels), classes
