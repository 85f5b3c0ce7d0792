"""`duel pick` keeps pictures that are unlike each other, and says of all others which of these they are like."""

from __future__ import annotations

import csv
import io
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import duel
from duel import cli, likeness
from duel.data import folder
from duel.data.live import LiveStream
from duel.likeness import PART, unlike
from duel.picking import choosing
from duel.picking.choosing import BATCH, nearest

ORIGINALS, COPIES = 12, 6


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def original(i: int) -> Image.Image:
    """Of 4 x 4 fields in random colours."""
    fields = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(fields).resize((32, 32), Image.Resampling.BILINEAR)


def pictures(where: str = "pictures") -> None:
    """Each original once as it is, and again resized, darker and as JPEG; the first ones more often."""
    Path(where, "sub").mkdir(parents=True)
    for i in range(ORIGINALS):
        original(i).save(Path(where, "sub", f"{i:02}.png"))
        for copy in range(COPIES if i < 4 else 1):
            side = 24 + 4 * copy
            darker = original(i).resize((side, side)).point(lambda v, by=1 - 0.05 * copy: int(v * by))
            darker.save(Path(where, f"{i:02}-{copy}.jpg"), quality=60 + 5 * copy)


def picked(path: str = "picked.csv") -> dict[str, dict[str, str]]:
    with open(path, newline="") as file:
        return {line["picture"]: line for line in csv.DictReader(file)}


def number(name: str) -> str:
    """Which original a file shows."""
    return Path(name).stem.split("-")[0]


def run(*options: object) -> int:
    return cli.main(["pick", *map(str, options)])


def test_of_a_folder_every_original_is_kept_once(capsys: pytest.CaptureFixture[str]) -> None:
    pictures()
    assert run("--data", "pictures", "--keep", ORIGINALS) == 0
    lines = picked()
    kept = [name for name, line in lines.items() if line["kept"] == "1"]
    assert sorted(map(number, kept)) == [f"{i:02}" for i in range(ORIGINALS)]
    left = {name: line for name, line in lines.items() if line["kept"] == "0"}
    assert len(lines) == len(kept) + len(left) == 4 * (COPIES + 1) + 8 * 2
    for name, line in left.items():
        assert line["like"] in kept
        assert number(line["like"]) == number(name)
        assert 0.9 < float(line["cosine"]) <= 1
    for name in kept:  # of itself nothing is said
        assert lines[name]["like"] in {*kept} - {name}
        assert float(lines[name]["cosine"]) < 0.9
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "44 pictures, of which 12 are kept: picked.csv",
        "32 of the 32 left out are like another that is kept (cosine 0.9 or more), and 0 of the 12 kept",
    ]


@pytest.mark.parametrize("policy", ["duel", "minred", "dedup", "reservoir"])
def test_it_keeps_what_a_memory_of_that_policy_holds(policy: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 3), dtype=np.uint8)
    np.savez("some.npz", images=images)
    assert run("--data", "some.npz", "--keep", 40, "--image-size", 8, "--policy", policy, "--seed", 3) == 0
    made = {
        "duel": duel.policies.Duel(score="exponential:0.035", admit="compete"),
        "minred": duel.policies.MinRed(),
        "dedup": duel.policies.Reservoir(seed=3),  # no two of them are alike
        "reservoir": duel.policies.Reservoir(seed=3),
    }
    channels_first = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    memory = duel.WorkingMemory(size=40, dim=193, policy=made[policy], payload={"id": ((), torch.int64)})
    for ids in torch.randperm(300, generator=torch.Generator().manual_seed(3)).split(BATCH):
        memory.update(duel.thumbnails(channels_first[ids]), id=ids)
    assert sorted(memory["id"].tolist()) == [int(i) for i, line in picked().items() if line["kept"] == "1"]


@pytest.mark.parametrize(("option", "value"), [("--seed", 1), ("--score", "linear"), ("--policy", "reservoir")])
def test_settings_matter_and_the_same_give_the_same(option: str, value: object) -> None:
    np.savez("some.npz", images=np.random.default_rng(0).integers(0, 256, (300, 8, 8, 3), dtype=np.uint8))
    found = []
    for i, more in enumerate(((), (), (option, value))):
        assert run("--data", "some.npz", "--keep", 40, "--image-size", 8, "--out", f"{i}.csv", *more) == 0
        found.append(Path(f"{i}.csv").read_bytes())
    assert found[0] == found[1] != found[2]


def test_the_nearest_other_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(50, 6, generator=generator, dtype=torch.float64), dim=1)
    chosen = [3, 9, 20, 49]
    own = torch.full((50,), -1)
    own[chosen] = torch.arange(4)
    found = nearest(rows, rows[chosen], own)
    for i in range(50):
        cosines = [(-2.0 if j == i else float(rows[i] @ rows[j])) for j in chosen]
        assert int(found.place[i]) == int(np.argmax(cosines))
        assert float(found.cosine[i]) == pytest.approx(max(cosines))


def test_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.nn.functional.normalize(torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    own = torch.arange(50) - 40  # the last ten are kept
    whole = nearest(rows, rows[40:], own.clamp(min=-1))
    monkeypatch.setattr(likeness, "ELEMENTS", 70)
    assert all(map(torch.equal, nearest(rows, rows[40:], own.clamp(min=-1)), whole))


def test_one_alone_is_like_no_other() -> None:
    pictures()
    assert run("--data", "pictures", "--keep", 1) == 0
    (kept,) = (line for line in picked().values() if line["kept"] == "1")
    assert (kept["like"], kept["cosine"]) == ("", "")


def test_what_is_kept_of_different_pictures_is_as_unlike_as_the_farthest_first() -> None:
    """A score that is too sharp would not tell how like pictures are that are no copies."""
    noise = np.random.default_rng(0).integers(0, 256, (600, 4, 4, 3), dtype=np.uint8).repeat(2, 1).repeat(2, 2)
    np.savez("some.npz", images=noise)
    rows = duel.thumbnails(torch.from_numpy(noise).permute(0, 3, 1, 2).contiguous())
    best, far = rows @ rows[0], [0]
    while len(far) < 60:
        far.append(int(best.argmin()))
        best = torch.maximum(best, rows @ rows[far[-1]])

    def closest(ids: list[int]) -> float:
        cosines = rows[ids] @ rows[ids].T
        return float(cosines.fill_diagonal_(-1).max())

    for seed in range(3):
        out = f"{seed}.csv"
        assert run("--data", "some.npz", "--keep", 60, "--image-size", 8, "--seed", seed, "--out", out) == 0
        kept = [int(name) for name, line in picked(out).items() if line["kept"] == "1"]
        sample = torch.randperm(600, generator=torch.Generator().manual_seed(seed))[:60].tolist()
        assert closest(kept) < closest(far) + 0.25 * (closest(sample) - closest(far))


def test_a_threshold_keeps_at_most_so_many_and_no_copies(capsys: pytest.CaptureFixture[str]) -> None:
    pictures()
    for keep, kept in ((5, 5), (30, ORIGINALS), (1000, ORIGINALS)):
        assert run("--data", "pictures", "--keep", keep, "--policy", "dedup", "--overwrite") == 0
        names = [name for name, line in picked().items() if line["kept"] == "1"]
        assert len({*map(number, names)}) == len(names) == kept
        said = capsys.readouterr()
        assert f"44 pictures, of which {kept} are kept" in said.out
        assert f"(cosine 0.9 or more), and 0 of the {kept} kept\n" in said.out
        assert not said.err


def pan(frames: int) -> NDArray[np.uint8]:
    """Of a wide scene, each frame a little to the right of the one before, and in the end all of it another."""
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 100, 3), dtype=np.uint8))
    scene = np.asarray(wide.resize((1600, 128), Image.Resampling.BICUBIC))
    return np.stack([scene[::8, 2 * i : 2 * i + 128 : 8] for i in range(frames)])


def greedy(vectors: torch.Tensor, alike: float = 0.9) -> list[int]:
    found: list[int] = []
    for i in range(len(vectors)):
        if not found or float((vectors[found] @ vectors[i]).max()) < alike:
            found.append(i)
    return found


@pytest.mark.parametrize("held", [0, 5])
def test_what_is_like_only_what_is_left_out_stays(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, in blocks too."""
    rows = duel.thumbnails(torch.from_numpy(pan(700)).permute(0, 3, 1, 2).contiguous())
    assert (rows[1:] * rows[:-1]).sum(1).min() > 0.94
    before = greedy(rows[-40:])[:held]
    given = rows[-40:][before]
    expected = [i - held for i in greedy(torch.cat([given, rows[:600]]))[held:]]
    assert len(expected) > 20
    for elements in (likeness.ELEMENTS, 3 * PART):
        monkeypatch.setattr(likeness, "ELEMENTS", elements)
        assert unlike(rows[:600], 0.9, given).nonzero().squeeze(1).tolist() == expected


def test_a_threshold_keeps_frames_of_all_of_a_slow_pan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = pan(700)
    rows = duel.thumbnails(torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous())
    kept = []
    for keep in (10, 20, 1000):
        monkeypatch.setattr(sys, "stdin", Pipe(frames.tobytes()))
        options = ("--image-size", 16, "--keep", keep, "--policy", "dedup", "--out", f"{keep}.csv")
        assert run("--data", "-", *options) == 0
        kept.append([int(name) for name in picked(f"{keep}.csv")])
        cosines = rows[kept[-1]] @ rows[kept[-1]].T
        assert float(cosines.fill_diagonal_(-1).max()) < 0.9
        assert capsys.readouterr().out.endswith(" kept are like another that is kept (cosine 0.9 or more)\n")
    assert [len(numbers) for numbers in kept] == [10, 20, len(greedy(rows))]
    assert kept[2] == greedy(rows)
    assert kept[0][-1] > 350  # not only of the beginning


def test_how_many_would_do_is_what_a_threshold_would_keep_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = pan(700)
    rows = duel.thumbnails(torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous())
    monkeypatch.setattr(sys, "stdin", Pipe(frames.tobytes()))
    assert run("--data", "-", "--image-size", 16, "--keep", 300) == 0
    enough = int(re.findall(r"--keep (\d+) may do", capsys.readouterr().out)[0])
    assert abs(enough - len(greedy(rows))) < 0.35 * len(greedy(rows))


def test_a_memory_that_would_not_fit_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choosing, "total_memory", lambda: 10**9)
    monkeypatch.setattr(sys, "stdin", Pipe(shots(1, 1, side=8).tobytes()))
    assert run("--data", "-", "--image-size", 8, "--keep", 2_000_000) == cli.USER_MISTAKE
    assert "keep 2,000,000 would take 2 GiB, and there are 1; take fewer" in capsys.readouterr().err


def test_a_folder_without_a_readable_picture(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad").mkdir()
    for i in range(5):
        Path("bad", f"{i}.png").write_bytes(b"no picture")
    assert run("--data", "bad", "--keep", 2) == cli.USER_MISTAKE
    said = capsys.readouterr().err
    assert "no readable image left of any kind in 'bad'" in said
    assert "Traceback" not in said


def test_too_many_are_told_to_be_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    pictures()
    assert run("--data", "pictures", "--keep", 30) == 0
    assert (
        "no two alike among 12 of those kept: --keep 12 may do, if a cosine of 0.9 means alike (--alike)"
        in capsys.readouterr().out
    )
    assert run("--data", "pictures", "--keep", 12, "--overwrite") == 0
    assert "may do" not in capsys.readouterr().out


def test_all_of_a_folder_is_looked_at_whatever_its_subfolders_are_called() -> None:
    pictures()
    Path("pictures", "sub").rename(Path("pictures", "train"))
    assert run("--data", "pictures", "--keep", ORIGINALS) == 0
    assert len(picked()) == 44


def test_a_missing_decoder_is_no_unreadable_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures()
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert run("--data", "pictures", "--keep", 5) == cli.USER_MISTAKE
    assert "which is missing; pip install 'duel-ssl[pick]'" in capsys.readouterr().err
    for residency in ("device", "stream"):
        with pytest.raises(ModuleNotFoundError, match="PIL"):
            duel.data.load("pictures", image_size=8, residency=residency)


def test_the_kept_images_can_be_trained_on() -> None:
    pictures()
    assert run("--data", "pictures", "--keep", 10, "--image-size", 16, "--images", "kept/images.npz") == 0
    names = list(picked())
    with np.load("kept/images.npz") as found:
        assert found["images"].shape == (10, 16, 16, 3)
        for image, item in zip(found["images"], found["picture"], strict=True):
            assert picked()[names[item]]["kept"] == "1"
            assert torch.equal(torch.from_numpy(image).permute(2, 0, 1), folder.decode(names[item], 16))
    assert len(duel.data.load("kept/images.npz")) == 10


def test_files_that_cannot_be_read_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    pictures()
    for name in ("00-9.png", "sub/00.jpg", "z.jpg"):
        Path("pictures", name).write_bytes(b"no picture")
    assert run("--data", "pictures", "--keep", 12, "--images", "kept.npz", "--image-size", 16) == 0
    assert "3 unreadable files skipped" in capsys.readouterr().err
    lines = list(picked().values())
    assert len(lines) == 44
    assert sum(line["kept"] == "1" for line in lines) == 12
    with np.load("kept.npz") as found:  # by the number of the line
        for image, number in zip(found["images"], found["picture"], strict=True):
            assert lines[number]["kept"] == "1"
            seen = folder.decode(lines[number]["picture"], 16)
            assert torch.equal(torch.from_numpy(image).permute(2, 0, 1), seen)


def test_all_are_kept_where_too_few_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    pictures()
    for name in "abc":
        Path("pictures", f"{name}.png").write_bytes(b"no picture")
    assert run("--data", "pictures", "--keep", 46) == 0
    assert "there were 44 pictures, fewer than the 46 to keep" in capsys.readouterr().err
    assert [line["kept"] for line in picked().values()] == ["1"] * 44


@pytest.mark.parametrize(("policy", "keep"), [("duel", 100), ("dedup", 150)])
def test_exact_copies_are_alike_at_the_highest_threshold(
    policy: str, keep: int, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8, 3), dtype=np.uint8)
    np.savez("some.npz", images=images.repeat(2, 0))
    assert run("--data", "some.npz", "--keep", keep, "--image-size", 8, "--alike", 1, "--policy", policy) == 0
    assert "100 of the 100 left out are like another" in capsys.readouterr().out
    assert run("--data", "some.npz", "--keep", 9, "--image-size", 8, "--alike", 1e-7, "--out", "low.csv") == 0


def test_a_named_set_has_numbers() -> None:
    assert run("--data", "digits", "--keep", 20) == 0
    lines = picked()
    assert list(lines) == [str(i) for i in range(1297)]
    assert sum(line["kept"] == "1" for line in lines.values()) == 20


# Streams ----------------------------------------------------------------------------------------------------------


def shots(count: int, each: int, side: int = 16) -> NDArray[np.uint8]:
    """So many frames of each of some scenes, with a little noise."""
    scenes = np.stack([np.asarray(original(i).resize((side, side))) for i in range(count)]).repeat(each, 0)
    noise = np.random.default_rng(0).integers(-3, 4, scenes.shape)
    return (scenes + noise).clip(0, 255).astype(np.uint8)


class Pipe:
    """Standard input with these bytes."""

    def __init__(self, raw: bytes) -> None:
        self.buffer = io.BytesIO(raw)

    def isatty(self) -> bool:
        return False


def test_of_a_stream_a_frame_of_every_scene_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = shots(9, 61)  # two batches and a part of one, in which the last scene begins
    assert BATCH < 8 * 61
    monkeypatch.setattr(sys, "stdin", Pipe(frames.tobytes()))
    assert run("--data", "-", "--image-size", 16, "--keep", 9, "--out", "frames.csv") == 0
    kept = [int(line) for line in picked("frames.csv")]
    assert sorted(frame // 61 for frame in kept) == list(range(9))
    with np.load("frames.npz") as found:
        assert found["picture"].tolist() == kept
        assert np.array_equal(found["images"], frames[kept])
    assert capsys.readouterr().out.splitlines() == [
        "549 pictures, of which 9 are kept: frames.csv",
        "the kept images: frames.npz",
        "0 of the 9 kept are like another that is kept (cosine 0.9 or more)",
    ]


@pytest.mark.parametrize("frames", [10, BATCH, BATCH + 1])
def test_every_frame_is_offered(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are no whole batch."""
    monkeypatch.setattr(sys, "stdin", Pipe(shots(frames, 1, side=8).tobytes()))
    assert run("--data", "-", "--image-size", 8, "--keep", frames) == 0
    assert list(picked()) == [str(i) for i in range(frames)]


@pytest.mark.parametrize("where", ["waiting", "reading", "comparing"])
def test_an_interrupted_stream_leaves_what_has_come_by_then(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the next frame is waited for, between two frames, or while a batch is compared."""
    frames, read, compare = shots(3, BATCH, side=8), [0], choosing.thumbnails

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    class Camera(Pipe):
        def isatty(self) -> bool:
            return False

    class Bytes(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            read[0] += 1
            if where == "waiting" and read[0] == 301:
                interrupt()
            return super().read(size)

    def brought(self: LiveStream, array: Any, kind: str) -> torch.Tensor:
        if where == "reading" and read[0] == 300:
            interrupt()
        return whole(self, array, kind)

    def comparing(images: torch.Tensor) -> torch.Tensor:
        if where == "comparing":
            interrupt()
        return compare(images)

    whole = LiveStream._brought_to_size
    monkeypatch.setattr(LiveStream, "_brought_to_size", brought)
    monkeypatch.setattr(choosing, "thumbnails", comparing)
    camera = Camera(b"")
    camera.buffer = Bytes(frames.tobytes())
    monkeypatch.setattr(sys, "stdin", camera)
    handler = signal.getsignal(signal.SIGINT)
    assert run("--data", "-", "--image-size", 8, "--keep", 299) == 0
    kept = list(map(int, picked()))
    came = BATCH if where == "comparing" else 300
    assert len(kept) == min(299, came)
    assert kept[-1] < came
    assert kept[-1] >= came - 2  # those that were not yet a batch are among them
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_interruption_ends_it_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(images: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return images

    monkeypatch.setattr(choosing, "thumbnails", twice)
    monkeypatch.setattr(sys, "stdin", Pipe(shots(2, BATCH, side=8).tobytes()))
    assert run("--data", "-", "--image-size", 8, "--keep", 9) == cli.INTERRUPTED
    assert "at once, so that nothing is written" in capsys.readouterr().err
    assert not Path("picked.csv").exists()


# Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--keep", 0), "--keep must be >= 1, got 0"),
        (("--keep", 44), "pictures has 44 pictures, so there is no choosing 44 of them"),
        (("--keep", 5, "--image-size", 7), "--image-size must be >= 8, got 7"),
        (("--keep", 5, "--alike", 1.5), "must be a cosine above 0 and at most 1, got 1.5"),
        (("--keep", 5, "--policy", "minred", "--score", "linear"), "policy minred has no score"),
        (("--keep", 5, "--score", "sharp"), "sharp"),
        (("--keep", 5, "--out", "picked.txt"), "must end in .csv, got 'picked.txt'"),
        (("--keep", 5, "--images", "kept"), "must end in .npz, got 'kept'"),
        (("--keep", 5, "--out", "there.csv"), "there.csv is there already; give another name, or replace it"),
        (("--keep", 5, "--images", "there.npz"), "there.npz is there already"),
        (("--keep", 5, "--out", "folder.csv", "--overwrite"), "folder.csv is a folder; give a file"),
        (("--keep", 5, "--device", "tpu"), "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (("--keep", 5, "--seed", -1), "seed"),
    ],
)
def test_mistakes_are_told(options: tuple[object, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    pictures()
    Path("folder.csv").mkdir()
    for name in ("there.csv", "there.npz"):
        Path(name).write_text("kept")
    assert run("--data", "pictures", *options) == cli.USER_MISTAKE
    assert says in capsys.readouterr().err
    assert Path("there.csv").read_text() == "kept"
    assert not Path("picked.csv").exists()


def test_what_is_there_can_be_replaced() -> None:
    pictures()
    Path("picked.csv").write_text("kept")
    assert run("--data", "pictures", "--keep", 5, "--overwrite") == 0
    assert len(picked()) == 44


def test_of_a_stream_that_is_too_short_all_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(shots(10, 1, side=8).tobytes()))
    assert run("--data", "-", "--image-size", 8, "--keep", 11) == 0
    said = capsys.readouterr()
    assert "there were 10 pictures, fewer than the 11 to keep" in said.err
    assert "10 pictures, of which 10 are kept" in said.out
    assert list(picked()) == [str(i) for i in range(10)]


def test_of_an_empty_stream_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b""))
    assert run("--data", "-", "--image-size", 8, "--keep", 11) == cli.USER_MISTAKE
    assert "the stream ended before there was a frame" in capsys.readouterr().err
