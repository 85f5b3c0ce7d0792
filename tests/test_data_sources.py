"""Named sets, arrays and folders; and what is said when they are not as they should be."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from duel.data import STATS, ArraySource, FolderSource, Source, files, from_arrays, load, statistics
from duel.data.arrays import resize
from duel.data.files import EXTENSIONS
from duel.data.folder import decode
from duel.errors import Notice, UserError


def picture(path: Path, value: int = 100, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "P", "I;16") else (value,) * len(mode)).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of ten images."""
    for i in range(30):
        picture(tmp_path / "set" / "abc"[i % 3] / f"{i:02}.png", i)
    return tmp_path / "set"


def test_digits() -> None:
    train, test = load("digits"), load("digits", split="test")
    assert isinstance(train, Source)
    assert (len(train), len(test)) == (1297, 500)
    assert train.shape == (3, 8, 8)
    assert len(train.classes) == 10
    assert torch.equal(train.data[:, 0], train.data[:, 2])
    assert train.data.max() == 255
    counts = torch.bincount(test.labels)
    assert counts.min() >= 48
    assert counts.max() <= 51
    both = {x.numpy().tobytes() for x in train.data} & {x.numpy().tobytes() for x in test.data}
    assert not both
    again = load("digits", split="test")
    assert torch.equal(again.data, test.data)
    pixels = train.data.double() / 255
    mean, std = STATS["digits"]
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(mean).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(std).double(), atol=1e-4, rtol=0)


def test_images_by_id_and_resizing_at_load() -> None:
    source = load("digits")
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(source.images(ids), source.data[ids])
    assert load("digits", image_size=16).shape == (3, 16, 16)


def test_cifar10_in_torchvisions_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real files are 170 MB: small ones in their place, with the checksums left aside."""
    from torchvision.datasets import cifar

    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    pixels = np.arange(4 * 3072, dtype=np.int64).reshape(4, 3072).astype(np.uint8)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        (base / name).write_bytes(pickle.dumps({"data": pixels + i, "labels": [0, 1, 2, 9]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    source = load("cifar10", root=str(tmp_path))
    assert len(source) == 20
    assert source.shape == (3, 32, 32)
    assert source.labels.tolist() == [0, 1, 2, 9] * 5
    assert source.classes == tuple("abcdefghij")
    assert torch.equal(source.data[1].flatten(), torch.from_numpy(pixels[1]))  # channels first, as in the file
    assert len(load("cifar10", root=str(tmp_path), split="test")) == 4
    assert statistics(source) == STATS["cifar10"]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "stl10-unlabeled"])
def test_missing_data_says_where_and_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} was not found at '.*'\. Download it \(download=True; .*--download\)"):
        load(name, root=str(tmp_path))


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(UserError, match=r"could not download cifar10 to .*Check the network.*cifar-10-python.tar.gz"):
        load("cifar10", root=str(tmp_path), download=True)


def test_damaged_data(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(UserError, match="cifar10 is incomplete or damaged"):
        load("cifar10", root=str(tmp_path))


def test_unknown_names_and_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean 'cifar10'\?.*or the path of a folder"):
        load("cifer10")
    (tmp_path / "x.txt").write_text("no")
    with pytest.raises(UserError, match=r"neither a folder nor a \.npz"):
        load(str(tmp_path / "x.txt"))
    with pytest.raises(UserError, match="image_size must be at least 1 pixel, got 0"):
        load("digits", image_size=0)
    with pytest.raises(UserError, match="did you mean 'stream'"):
        load("digits", residency="steam")
    with pytest.raises(UserError, match="unknown split"):
        load("digits", split="validation")
    with pytest.raises(UserError, match="evaluate on data 'stl10'"):
        load("stl10-unlabeled", split="test")


# Arrays


@pytest.mark.parametrize(
    "shape", [(10, 6, 7), (10, 6, 7, 1), (10, 6, 7, 3), (10, 3, 6, 7), (10, 1, 6, 7), (10, 6, 7, 4)]
)
@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_arrays_of_every_layout(shape: tuple[int, ...], kind: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    if shape[-1] == 4:
        raw[..., 3] = 255
    source = from_arrays(raw if kind == "uint8" else raw / np.float32(255), list(range(10)))
    assert source.shape == (3, 6, 7)
    last = raw if len(shape) == 3 else raw[:, 0] if shape[1] < 5 else raw[..., 0]
    assert torch.equal(source.data[:, 0], torch.from_numpy(last))


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (np.zeros((4, 5), np.uint8), None, r"shape \(n, h, w\).*got \(4, 5\)"),
        (np.zeros((4, 5, 5, 7), np.uint8), None, "1, 3 or 4 channels"),
        (np.zeros((0, 5, 5), np.uint8), None, "holds no images"),
        (np.zeros((4, 5, 5), np.int32), None, "must be uint8, or floats"),
        (np.full((4, 5, 5), 200.0), None, r"must be in 0\.\.1, got 200\.\.200"),
        (np.full((4, 5, 5), np.nan), None, r"must be in 0\.\.1"),
        (np.zeros((4, 5, 5), np.uint8), [0, 1], "4 whole numbers, one per image"),
        (np.zeros((4, 5, 5), np.uint8), [0.0, 1, 2, 3], "whole numbers"),
        (np.zeros((4, 5, 5), np.uint8), [0, 1, -1, 3], "got -1..3"),
    ],
)
def test_wrong_arrays(images: np.ndarray, labels: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_arrays(images, labels)


def test_one_subfolder_is_no_class(tmp_path: Path) -> None:
    (tmp_path / "DCIM").mkdir()
    for i in range(5):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "DCIM" / f"{i}.png")
    source = load(str(tmp_path))
    assert (len(source), source.labels, source.classes) == (5, None, ())


def test_npz_with_its_own_split_and_without(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (50, 8, 8, 3), dtype=np.uint8), np.arange(50) % 5
    np.savez(tmp_path / "own.npz", x_train=x[:40], y_train=y[:40, None], x_test=x[40:], y_test=y[40:, None])
    assert len(load(str(tmp_path / "own.npz"))) == 40
    assert load(str(tmp_path / "own.npz"), split="test").labels.tolist() == y[40:].tolist()
    np.savez(tmp_path / "one.npz", images=x, labels=y)
    train, test = load(str(tmp_path / "one.npz")), load(str(tmp_path / "one.npz"), split="test")
    assert torch.bincount(train.labels).tolist() == [8] * 5
    assert torch.bincount(test.labels).tolist() == [2] * 5
    joined = {a.numpy().tobytes() for s in (train, test) for a in s.data}
    assert len(joined) == 50


@pytest.mark.parametrize("missing", ["train", "test"])
def test_the_last_class_may_be_missing_in_one_part_of_an_npz(missing: str, tmp_path: Path) -> None:
    x = np.zeros((12, 8, 8, 3), dtype=np.uint8)
    y = {"train": np.arange(12) % 3, "test": np.arange(12) % 3}
    y[missing] = np.arange(12) % 2
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y["train"], x_test=x, y_test=y["test"])
    train, test = (load(str(tmp_path / "own.npz"), split=split) for split in ("train", "test"))
    assert train.classes == test.classes == ("0", "1", "2")
    assert load(str(tmp_path / "own.npz"), labelled=False).classes == ()


@pytest.mark.parametrize("labels", [np.array(["a", "b"]), np.array([0.5, 1.0])])
def test_labels_of_the_other_part_that_are_none_are_told_once_it_is_asked_for(tmp_path: Path, labels: Any) -> None:
    images = np.zeros((2, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=[0, 1], x_test=images, y_test=labels)
    assert load(str(tmp_path / "own.npz")).classes == ("0", "1")
    with pytest.raises(UserError, match=r"labels in .* must be a list of whole numbers"):
        load(str(tmp_path / "own.npz"), split="test")


def test_npy_is_mapped_and_all_training_data(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (9, 3, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    source = load(str(tmp_path / "x.npy"), residency="stream")
    assert isinstance(source, ArraySource)
    assert not source.resident
    assert torch.equal(source.images(torch.tensor([8])), torch.from_numpy(x[8:]))
    with pytest.raises(UserError, match="no labels and no test part"):
        load(str(tmp_path / "x.npy"), split="test")


def test_strange_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", pictures=np.zeros(3))
    with pytest.raises(UserError, match=r"holds the arrays \['pictures'\]; images must be called"):
        load(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", train_images=np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(UserError, match="no test_images"):
        load(str(tmp_path / "b.npz"), split="test")
    (tmp_path / "c.npz").write_bytes(b"not a zip file")
    with pytest.raises(UserError, match="cannot be read as a NumPy file"):
        load(str(tmp_path / "c.npz"))
    np.save(tmp_path / "d.npy", np.array([{"code": print}], dtype=object))
    with pytest.raises(UserError, match="cannot be read as a NumPy file of plain arrays"):
        load(str(tmp_path / "d.npy"))


def test_resize_cuts_the_central_square() -> None:
    x = torch.zeros(2, 3, 10, 30, dtype=torch.uint8)
    x[..., 10:20] = 200
    assert (resize(x, 10) == 200).all()
    assert resize(x, 5).shape == (2, 3, 5, 5)
    assert resize(x, 20).shape == (2, 3, 20, 20)


def test_statistics_are_measured_where_unknown() -> None:
    x = torch.randint(0, 256, (300, 3, 9, 9), dtype=torch.uint8)
    x[:, 2] = 77
    mean, std = statistics(ArraySource(x))
    exact = x.double().transpose(0, 1).flatten(1) / 255
    assert mean == pytest.approx(exact.mean(1).tolist())
    assert std[:2] == pytest.approx(exact.std(1, correction=0)[:2].tolist())
    assert std[2] == pytest.approx(1 / 255)  # never a division by zero


# Folders


def test_folder_with_classes(folder: Path) -> None:
    train, test = load(str(folder)), load(str(folder), split="test")
    assert isinstance(train, ArraySource)
    assert train.classes == ("a", "b", "c")
    assert torch.bincount(train.labels).tolist() == [8] * 3
    assert torch.bincount(test.labels).tolist() == [2] * 3
    for source in (train, test):
        assert torch.equal(source.data[:, 0, 0, 0].long() % 3, source.labels)
    assert sorted(torch.cat([train.data, test.data])[:, 0, 0, 0].tolist()) == list(range(30))
    assert train.skipped == ()


def test_streamed_and_held_folders_are_the_same(folder: Path) -> None:
    held, streamed = load(str(folder)), load(str(folder), residency="stream")
    assert isinstance(streamed, FolderSource)
    assert isinstance(streamed, Source)
    assert torch.equal(held.labels, streamed.labels)
    ids = torch.tensor([3, 3, 11])
    assert torch.equal(held.images(ids), streamed.images(ids))


def test_residency_is_chosen_by_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duel.data.folder.RESIDENT_BYTES", 24 * 3 * 12 * 12 - 1)  # of the part that is trained on
    assert isinstance(load(str(folder)), FolderSource)
    assert isinstance(load(str(folder), residency="device"), ArraySource)
    monkeypatch.setattr("duel.data.folder.RESIDENT_BYTES", 24 * 3 * 12 * 12)
    assert isinstance(load(str(folder)), ArraySource)


def test_folder_without_classes(tmp_path: Path) -> None:
    picture(tmp_path / "one.jpg")
    picture(tmp_path / "deep" / "two.png")
    picture(tmp_path / ".hidden" / "three.png")
    (tmp_path / "notes.txt").write_text("not an image")
    source = load(str(tmp_path))
    assert len(source) == 2
    assert source.labels is None
    assert source.classes == ()
    with pytest.raises(UserError, match="no labels and no test part"):
        load(str(tmp_path), split="test")


@pytest.mark.parametrize("links", [["loop"], ["loop", "again"], ["a/up"]])
def test_a_link_that_leads_back_brings_nothing_twice(tmp_path: Path, links: list[str]) -> None:
    pictures = [picture(tmp_path / "set" / name) for name in ("one.png", "a/two.png", "b/three.png")]
    for link in links:
        (tmp_path / "set" / link).symlink_to(tmp_path / "set")
    source = load(str(tmp_path / "set"))
    assert list(map(Path, source.paths)) == pictures


def test_links_to_folders_elsewhere_are_followed_in_order(tmp_path: Path) -> None:
    for name in ("set/0.png", "set/a/1.png", "set/c/1.png", "set/c/deep/2.png", "elsewhere/x/1.png", "elsewhere/2.png"):
        picture(tmp_path / name)
    (tmp_path / "set" / "b").symlink_to("../elsewhere")
    (tmp_path / "set" / "a" / "other").symlink_to("../c/deep")  # which is read by its own path
    found = [str(Path(p).relative_to(tmp_path / "set")) for p in load(str(tmp_path / "set")).paths]
    assert found == ["0.png", "a/1.png", "b/2.png", "b/x/1.png", "c/1.png", "c/deep/2.png"]
    (tmp_path / "set" / "0.png").unlink()
    assert load(str(tmp_path / "set")).classes == ("a", "b", "c")
    (tmp_path / "set" / "d").symlink_to("c")
    with pytest.raises(UserError, match="class 'd' has no images of its own"):
        load(str(tmp_path / "set"))


def test_the_test_part_has_the_size_of_the_training_part(tmp_path: Path) -> None:
    for part, side in (("train", 20), ("test", 12)):
        for c in "xy":
            picture(tmp_path / part / c / "1.png", size=(side, side))
    for residency in ("device", "stream"):
        sizes = [load(str(tmp_path), split=split, residency=residency).shape for split in ("train", "test")]
        assert sizes == [(3, 20, 20)] * 2
    assert load(str(tmp_path), split="test", image_size=9).shape == (3, 9, 9)


@pytest.mark.parametrize("test", ["test", "val"])
def test_folder_with_its_own_split(tmp_path: Path, test: str) -> None:
    for c in "xyz":
        picture(tmp_path / "train" / c / "1.png", ord(c))
    picture(tmp_path / test / "z" / "1.png", ord("z"))
    source = load(str(tmp_path), split="test")
    assert source.labels.tolist() == [2]  # numbered as in train/
    assert len(load(str(tmp_path))) == 3
    picture(tmp_path / test / "new" / "1.png")
    with pytest.raises(UserError, match="classes that the training folder lacks: new"):
        load(str(tmp_path), split="test")


def test_train_alone_has_nothing_to_test_on_and_can_be_a_class(tmp_path: Path) -> None:
    for name in "ab":
        picture(tmp_path / "train" / name / "1.png")
    assert load(str(tmp_path)).classes == ("a", "b")
    with pytest.raises(UserError, match="has train/ but none of test/"):
        load(str(tmp_path), split="test")
    for i in range(5):
        picture(tmp_path / "bus" / f"{i}.png")
        picture(tmp_path / "train" / "a" / f"{i}.png")
    assert load(str(tmp_path)).classes == ("bus", "train")


def test_empty_folder_and_empty_class(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no images in '.*empty'.*\.jpg"):
        load(str(tmp_path / "empty"))
    (folder / "d").mkdir()
    with pytest.raises(UserError, match="class 'd' has no images"):
        load(str(folder))
    (folder / "d" / "broken.png").write_bytes(b"\x89PNG not really")
    with (
        pytest.raises(UserError, match=r"class 'd' has no images: of 1 taken from .* none is readable"),
        pytest.warns(UserWarning, match="1 unreadable file skipped"),
    ):
        load(str(folder))


def test_unreadable_files_are_skipped_counted_and_listed(folder: Path) -> None:
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(whole, "JPEG")
    bad = {"zero.png": b"", "text.jpg": b"hello", "cut.jpg": whole.getvalue()[:700]}
    for name, content in bad.items():
        (folder / "a" / name).write_bytes(content)
    with pytest.warns(UserWarning, match="3 unreadable files skipped") as record:
        source = load(str(folder), labelled=False)
    assert len(source) == 30
    assert {Path(line.split(":")[0]).name for line in source.skipped} == set(bad)
    assert all(name in str(record[0].message) for name in bad)
    with warnings.catch_warnings(action="ignore"):
        source = load(str(folder))
    assert torch.equal(source.data[:, 0, 0, 0].long() % 3, source.labels)  # labels stay with their images


def test_a_file_that_cannot_be_read_moves_no_other_to_the_other_part(folder: Path) -> None:
    """However the images are held; before it is found to be unreadable it is one as the others."""
    for name in "bcde":
        (folder / "a" / f"{name}.png").write_bytes(b"hello" + name.encode())
    parts: dict[str, list[set[str]]] = {}
    with warnings.catch_warnings(action="ignore"):
        for residency in ("device", "stream"):
            loaded = [load(str(folder), split=split, residency=residency) for split in ("train", "test")]
            parts[residency] = [set(source.paths.tolist()) for source in loaded]
    streamed, held = parts["stream"], parts["device"]
    assert sum(map(len, streamed)) == 34
    assert sum(map(len, held)) == 30
    assert held[0] <= streamed[0]
    assert held[1] <= streamed[1]


def test_only_the_part_that_is_asked_for_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Path] = []
    monkeypatch.setattr("duel.data.folder.decode", lambda path, size: (decoded.append(path), decode(path, size))[1])
    assert len(load(str(folder), split="test")) == 6
    assert len(decoded) == 6


def test_copies_byte_for_byte_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sorted((folder / "a").iterdir())[0]
    for name in ("a/copy.png", "b/again.png"):
        (folder / name).write_bytes(first.read_bytes())
    with pytest.warns(Notice) as record:
        assert len(load(str(folder), split="train")) > 20
    assert [str(found.message) for found in record] == [f"{folder}: 2 of 32 files are copies of others, byte for byte"]
    with warnings.catch_warnings(action="error"):  # said once
        load(str(folder), split="test")

    whole: list[Path] = []
    digest = files._digest
    monkeypatch.setattr(files, "_digest", lambda path: whole.append(path) or digest(path))
    made = [folder / name for name in ("x", "y", "z", "empty", "none", "middle", "gone")]
    contents = (b"x" * 20_000, b"x" * 20_000, b"x" * 19_999 + b"y", b"", b"", b"x" * 9_999 + b"y" + b"x" * 10_000)
    for path, content in zip(made, contents, strict=False):
        path.write_bytes(content)
    assert sum(len(group) - 1 for group in files.copies(made)) == 2  # y of x, none of empty
    assert {path.name for path in whole} == {"x", "y", "middle", "empty", "none"}  # z ends otherwise


def test_files_that_are_not_read_are_counted_by_their_ending(folder: Path) -> None:
    for name in ("a/1.heic", "b/2.HEIC", "c/3.mov", "c/4", "list.csv", "a/notes.txt", ".DS_Store", ".hidden/x.heic"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    with pytest.warns(Notice) as record:
        assert len(load(str(folder))) == 24
    assert [str(found.message) for found in record] == [
        f"{folder}: files left out for their ending: 2 .heic, 1 .mov, 1 without one (4 in all)"
    ]
    with warnings.catch_warnings(action="error"):  # said once
        load(str(folder), split="test")
    for i in range(9):
        (folder / f"x.{i}").touch()
    with pytest.warns(Notice, match=r": 2 \.heic, .*, … \(13 in all\)$"):
        load(str(folder))
    (folder.parent / "phone").mkdir()
    (folder.parent / "phone" / "1.heic").touch()
    with pytest.raises(UserError, match=r"no images in '.*phone' \(endings there: 1 \.heic\); .*\.jpg"):
        load(str(folder.parent / "phone"))


def test_the_page_lists_the_endings_that_are_read() -> None:
    page = " ".join((Path(__file__).parent.parent / "docs" / "training.md").read_text().split())
    listed = page.partition("are read from files that end in ")[2].partition(" (in capitals")[0]
    assert {f".{ending}" for ending in re.split(r", | or ", listed)} == EXTENSIONS


def test_only_what_may_be_an_image_is_told(folder: Path) -> None:
    for name in ("list.csv", "a/notes.txt", ".DS_Store"):
        (folder / name).touch()
    with warnings.catch_warnings(action="error"):
        load(str(folder))


def test_nothing_readable(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match="none of the 1 image files"), pytest.warns(UserWarning, match="skipped"):
        load(str(tmp_path))
    source = load(str(tmp_path), residency="stream", image_size=8)
    with pytest.raises(UserError, match="no readable image left"):
        source.images(torch.tensor([0]))


@pytest.mark.parametrize(
    ("name", "mode", "value", "expected"),
    [
        ("a.png", "L", 90, 90),
        ("a.png", "RGBA", 90, 197),  # on white
        ("a.gif", "P", 0, 0),
        ("a.png", "I;16", 90 * 257, 90),
        ("a.bmp", "RGB", 90, 90),
        ("a.webp", "RGB", 90, 90),
        ("a.tiff", "L", 90, 90),
        ("A.JPG", "RGB", 90, 90),
    ],
)
def test_formats(tmp_path: Path, name: str, mode: str, value: int, expected: int) -> None:
    picture(tmp_path / name, value, (20, 14), mode)
    source = load(str(tmp_path))
    assert source.shape == (3, 14, 14)
    assert (source.data.int() - expected).abs().max() <= 2


def test_sizes_and_orientation(tmp_path: Path) -> None:
    for i, size in enumerate([(20, 30), (30, 20), (500, 400), (24, 24), (26, 22)]):
        picture(tmp_path / f"{i}.png", size=size)
    assert load(str(tmp_path)).shape == (3, 22, 22)  # the median short side
    assert load(str(tmp_path), image_size=9).shape == (3, 9, 9)
    left_red = Image.new("RGB", (40, 40), (0, 0, 255))
    left_red.paste((255, 0, 0), (0, 0, 20, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise by a quarter: left becomes top
    left_red.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    seen = decode(tmp_path / "turned.jpg", 40)
    assert seen[0, 5, 20] > 200
    assert seen[0, 35, 20] < 50


def test_a_file_more_moves_hardly_any_other_between_the_parts(folder: Path) -> None:
    before = {split: set(load(str(folder), split=split).paths) for split in ("train", "test")}
    assert [len(part) for part in before.values()] == [24, 6]
    for i in range(3):
        picture(folder / "abc"[i] / "000.png", 50 + i)
    after = {split: set(load(str(folder), split=split).paths) for split in ("train", "test")}
    assert [len(part) for part in after.values()] == [26, 7]
    assert len(before["train"] & after["test"]) <= 1  # the part for testing grows
    assert len(before["test"] - after["test"]) <= 2  # an added one may take the place of the last


def test_copies_of_a_file_stay_in_one_part(folder: Path) -> None:
    """Or what was trained on would be measured on."""
    originals = sorted(folder.rglob("*.png"))
    for path in originals:
        for i in range(3):
            path.with_name(f"{i}-of-{path.name}").write_bytes(path.read_bytes())
    with pytest.warns(Notice, match="90 of 120 files are copies"):
        train = {Path(p).read_bytes() for p in load(str(folder)).paths}
    test = [Path(p).read_bytes() for p in load(str(folder), split="test").paths]
    assert len(test) == 24
    assert len(set(test)) == 6
    assert not train & set(test)
    for path in (folder / "a").iterdir():  # a class that is one file
        path.write_bytes(b"" + originals[0].read_bytes())
    with pytest.warns(Notice, match="copies"):
        assert set(load(str(folder)).labels.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("name", range(6))
def test_a_file_that_is_there_very_often_does_not_take_the_test_part_away(tmp_path: Path, name: int) -> None:
    """Whatever it is called, and so wherever its group comes."""
    for i in range(40):
        picture(tmp_path / "a" / f"{i}.png", 3 * i)
        picture(tmp_path / "b" / f"{i}.png", 200 - i)
    for i in range(60):
        shutil.copy(tmp_path / "a" / "7.png", tmp_path / "a" / f"{name}-again-{i}.png")
    assert load(str(tmp_path), split="test").labels.bincount().tolist() == [20, 8]


def test_one_picture_beside_class_folders_is_told(folder: Path) -> None:
    picture(folder / "stray.png")
    with pytest.warns(Notice, match="subfolders are not taken for classes, since 1 picture lies beside them"):
        assert load(str(folder)).labels is None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load(str(folder), labelled=False)
        for i in range(60):  # then the subfolders are a few among other things
            picture(folder / f"{i}.png", i)
        load(str(folder))
    assert not [line for line in said if "not taken for classes" in str(line.message)]


def test_classes_without_test_images_are_named(folder: Path) -> None:
    first, second = (path.read_bytes() for path in sorted((folder / "c").iterdir())[:2])
    for path in (folder / "a").iterdir():  # ten that are one, and two of which each is there five times
        path.write_bytes(first)
    for i, path in enumerate(sorted((folder / "b").iterdir())):
        path.write_bytes((first, second)[i % 2])
    with pytest.warns(Notice, match="class 'a' has too few different files to keep any for testing"):
        load(str(folder))
    assert load(str(folder), split="test").labels.bincount().tolist() == [0, 5, 2]


@pytest.mark.parametrize("residency", ["device", "stream"])
def test_subfolders_that_are_no_classes(residency: str, folder: Path) -> None:
    source = load(str(folder), labelled=False, residency=residency)
    assert len(source) == 30
    assert source.labels is None
    with pytest.raises(UserError, match="has no labels and no test part"):
        load(str(folder), split="test", labelled=False)
    np.savez(folder / "set.npz", images=np.zeros((10, 8, 8), np.uint8), labels=np.arange(10) % 2)
    assert load(str(folder / "set.npz"), labelled=False).labels is None
    assert len(load(str(folder / "set.npz"), labelled=False)) == 10
    with pytest.raises(UserError, match="unlabelled is for folders and arrays"):
        load("digits", labelled=False)
