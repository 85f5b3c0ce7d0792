"""Images that come once are trained on as those of a set are, and a run that goes on goes on with what comes then."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from duel import checkpoint, cli, inputs, recipes, runs
from duel.config import TrainConfig
from duel.data import LiveStream, load, raw_frames
from duel.data.live import StreamEnded
from duel.errors import Notice, UserError
from duel.evaluation.settings import EvaluationSettings
from duel.inputs import Inputs
from duel.runlog import read_metrics
from duel.signals import END_OF_STREAM
from duel.trained import evaluate, export, load_trained
from duel.training import RunResult, train

pytestmark = pytest.mark.filterwarnings("ignore")
SIDE = 8


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def numbered(count: int, side: int = SIDE) -> Iterator[torch.Tensor]:
    """Image i is filled with the value i."""
    return (torch.full((3, side, side), i, dtype=torch.uint8) for i in range(count))


def live(images: Any, **settings: Any) -> LiveStream:
    return LiveStream(images, **{"batch_size": 4, "device": "cpu", **settings})


def small(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "out": "run", "steps": 8, "batch_size": 16, "memory_size": 32, "refresh": 8, "dim": 16, "log_every": 2,
        "checkpoint_every": 100, "source": "memory",
    }  # fmt: skip
    return dataclasses.replace(recipes.demo("d-simclr", "-"), **{**settings, **changes})


def go(config: TrainConfig, frames: Any, **options: Any) -> RunResult:
    return train(config, frames=frames, console=Console(file=io.StringIO()), **options)


def state_of(run: str) -> dict[str, Any]:
    return checkpoint.load_latest(Path(run) / runs.CHECKPOINTS)[1]


def digits() -> torch.Tensor:
    source = load("digits", split="train")
    return source.images(torch.arange(len(source)))


def endless(seed: int = 0) -> Iterator[torch.Tensor]:
    images, rng = digits(), np.random.default_rng(seed)
    while True:
        yield images[int(rng.integers(len(images)))]


# The stream ------------------------------------------------------------------------------------------------
def test_batches_are_numbered_and_in_order_whatever_comes_at_a_time() -> None:
    whole = torch.stack([*numbered(11)])
    pieces = [whole[:1], whole[1], whole[2:9], whole[9:]]
    for images in (numbered(11), pieces):
        stream = live(images)
        assert stream.look(6)[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]  # and they stay the next ones
        for first in (0, 4):
            shown, ids = stream.next()
            assert ids.tolist() == shown[:, 0, 0, 0].tolist() == [*range(first, first + 4)]
        with pytest.raises(StreamEnded, match="after 11 images"):
            stream.next()


def test_a_batch_is_written_where_it_is_wanted() -> None:
    out = torch.zeros(4, 3, SIDE, SIDE, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    assert live(numbered(4)).next(out=out)[0] is out[0]
    assert out[0][:, 0, 0, 0].tolist() == out[1].tolist() == [0, 1, 2, 3]


def test_images_of_any_kind() -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    wanted = torch.from_numpy(rgb).permute(2, 0, 1)
    palette = Image.fromarray(rgb).quantize()
    kinds = {
        "array (h, w, c)": rgb,
        "seen in a mirror": rgb[:, ::-1][:, ::-1],
        "opaque": np.dstack([rgb, np.full((SIDE, SIDE), 255, np.uint8)]),
        "tensor (c, h, w)": wanted,
        "floats": wanted / 255,
        "PIL": Image.fromarray(rgb),
        "as a loader gives it": (wanted[None], torch.zeros(1)),
        "as another gives it": [wanted[None], torch.zeros(1), 3],
        "a list of it": [wanted],
    }
    for name, image in kinds.items():
        assert torch.equal(live([image], batch_size=1).next()[0][0], wanted), name
    grey = live([rgb[:, :, 0]], batch_size=1).next()[0][0]
    assert torch.equal(grey, wanted[:1].expand(3, -1, -1))
    colours = torch.from_numpy(np.array(palette.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(live([palette], batch_size=1).next()[0][0], colours)


def test_several_images_at_a_time_are_all_shown() -> None:
    first, *others = numbered(6)
    for images in ([first, (others[0], others[1].numpy())], [[first, *others]], [(torch.stack([first]), *others[:2])]):
        values = live(images, batch_size=3).next()[0][:, 0, 0, 0].tolist()
        assert values == [0, 1, 2]


def test_labels_and_masks_are_passed_over() -> None:
    image, mask, one_hot = next(numbered(1)), torch.full((SIDE, SIDE), 9, dtype=torch.uint8), torch.ones(10)
    batch = torch.stack(list(numbered(4)))
    for given in ((image, mask), (image, 3), (image, one_hot), (image, image, 3), [image, {"id": 3}, mask]):
        assert live([given] * 2, batch_size=2).next()[0][:, 0, 0, 0].tolist() == [0, 0]
    for others in (torch.arange(4), torch.ones(4, 10), torch.full((4, SIDE, SIDE), 9, dtype=torch.uint8)):
        assert live([(batch, others)] * 2, batch_size=8).next()[0][:, 0, 0, 0].tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(UserError, match=r"shapes \(3, 8, 8\), \(8, 8\), \(3, 8, 8\) at once; which are images"):
        live([(image, mask, image)], batch_size=2).next()


def test_a_buffer_may_be_used_again() -> None:
    def camera() -> Iterator[np.ndarray]:
        buffer = np.zeros((3, SIDE, SIDE), np.uint8)
        for i in range(4):
            buffer[:] = i
            yield buffer

    assert live(camera()).next()[0][:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_images_are_brought_to_size_or_must_have_one() -> None:
    mixed = [np.zeros((12, 20, 3), np.uint8), np.zeros((SIDE, SIDE, 3), np.uint8)]
    assert live(mixed, batch_size=2, size=SIDE).next()[0].shape == (2, 3, SIDE, SIDE)
    with pytest.raises(UserError, match=r"number 1, has an image of 8 × 8 pixels, the first had 12 × 20; .*image_size"):
        live(mixed, batch_size=2).next()


@pytest.mark.parametrize("what", [None, "a.png", 3, (), np.zeros((SIDE, SIDE, 2), np.uint8)])
def test_what_is_no_image_is_named(what: Any) -> None:
    with pytest.raises(UserError, match="the stream, at number 1,"):
        live([*numbered(1), what], batch_size=2).next()


@pytest.mark.parametrize("what", ["video.mp4", b"", 3, None])
def test_what_cannot_be_iterated_over_is_refused(what: Any) -> None:
    with pytest.raises(UserError, match=f"iterable of images, got a {type(what).__name__}"):
        live(what)


def test_counting_goes_on() -> None:
    before, after = live(numbered(8)), live(numbered(8))
    before.next()
    before.look(2)  # which are gone
    after.look(3)
    after.load_state_dict(before.state_dict())
    images, ids = after.next()
    assert ids.tolist() == [6, 7, 8, 9]
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]  # what comes now
    with pytest.raises(UserError, match="stream of another kind"):
        after.load_state_dict({"block": 0, "offset": 0, "seed": 0})


def test_raw_frames_without_the_rest_of_one() -> None:
    rgb = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    with pytest.warns(Notice, match="ended with 43 bytes, not the 48 of 4 × 4 pixels in RGB"):
        found = [*raw_frames(io.BytesIO(rgb.tobytes()[:-5]), 4)]
    assert np.array_equal(np.stack(found), rgb[:2])
    with warnings.catch_warnings(action="error"):
        assert len([*raw_frames(io.BytesIO(rgb.tobytes()), 4)]) == 3


# Training --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_a_stream_trains_as_the_same_images_of_a_set_do(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images = digits()[:160]
    np.save("images.npy", images.numpy())
    of_a_set = small(source=source, data="images.npy", out="set")
    order = Inputs.load(of_a_set, torch.device("cpu"), test=False).stream(of_a_set, torch.device("cpu"))
    frames = [image for _ in range(20) for image in order.next()[0]]
    monkeypatch.setattr(inputs, "LOOKED_AT", len(images))  # an epoch, so that both are normalised alike
    go(small(source=source), frames)
    train(of_a_set, console=Console(file=io.StringIO()))
    found, wanted = (state_of(run)["training"]["method"] for run in ("run", "set"))
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_end_of_a_stream_is_no_end_of_the_run() -> None:
    # fills the memory (32), then five steps of 16, and a rest
    result = go(small(), itertools.islice(endless(), 32 + 5 * 16 + 3))
    assert (result.steps, result.finished, result.stopped_by) == (5, False, END_OF_STREAM)
    began = json.loads(Path("run", runs.STREAM).read_text())
    bright = (torch.full((3, SIDE, SIDE), 255, dtype=torch.uint8) for _ in itertools.count())
    result = go(small(), bright, resume=True)
    assert (result.steps, result.finished) == (8, True)
    state = state_of("run")
    assert [*state["mean"], *state["std"]] == [*began["mean"], *began["std"]]  # normalised as before
    assert state["training"]["stream"] == {"shown": 32 + 8 * 16 + 3}  # the rest came, too
    lines = Path("run", runs.MEMORY).read_text().splitlines()
    assert len(lines) == 1 + 32
    ids = [int(line.split(",")[1]) for line in lines[1:]]
    assert len(set(ids)) == 32
    assert max(ids) < 32 + 8 * 16 + 3
    assert not {*range(32 + 5 * 16, 32 + 5 * 16 + 3)} & {*ids}
    kept = load_trained("run")
    assert kept.memory_ids is not None
    assert kept.memory_images is not None
    assert sorted(kept.memory_ids.tolist()) == sorted(ids)
    late = kept.memory_ids >= 32 + 5 * 16
    assert 0 < late.sum() < 32
    assert torch.equal((kept.memory_images == 255).flatten(1).all(1), late)
    assert "epoch" not in read_metrics(Path("run"))[-1]


@pytest.mark.parametrize("what", ["an error", "no image"])
def test_a_camera_that_fails_costs_no_steps(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LOOKED_AT", 16)

    def camera() -> Iterator[Any]:
        yield from itertools.islice(endless(), 32 + 5 * 16 + 3)
        if what == "an error":
            raise OSError("unplugged")
        yield None

    error, words = (OSError, "unplugged") if what == "an error" else (UserError, "number 115, has no image: NoneType")
    with pytest.raises(error, match=words) as found:
        go(small(), camera())
    assert found.value.__notes__ == ["saved after step 5 of 8, from which resume goes on"]
    assert state_of("run")["training"]["step"] == 5
    assert go(small(), endless(), resume=True).steps == 8


@pytest.mark.parametrize(
    ("count", "steps"),
    [(0, None), (15, None), (20, 0), (32 + 3 * 16 + 5, 3), (32 + 8 * 16, 8)],
    ids=["at once", "before a batch", "before the memory is full", "in training", "after training"],
)
def test_a_stream_that_fails_while_it_is_looked_at_is_trained_on_as_far_as_it_came(
    count: int, steps: int | None
) -> None:
    def camera() -> Iterator[Any]:
        yield from itertools.islice(endless(), count)
        raise OSError("unplugged")

    if steps == 8:  # it has all that is needed
        assert go(small(), camera()).finished
        return
    with pytest.raises(OSError, match="unplugged"):
        go(small(), camera())
    assert Path("run").exists() == (steps is not None)
    if steps:
        assert state_of("run")["training"]["step"] == steps
        assert go(small(), endless(), resume=True).steps == 8


@pytest.mark.parametrize("count", [20, 60])
def test_a_signal_ends_the_waiting_for_images(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the memory (32) is filled, and in training. The camera waits for ever."""
    monkeypatch.setattr(inputs, "LOOKED_AT", 16)

    def camera() -> Iterator[Any]:
        yield from itertools.islice(endless(), count)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on waiting")

    result = go(small(), camera())
    assert (result.steps, result.finished, result.stopped_by) == (0 if count == 20 else 1, False, "Ctrl-C")
    assert state_of("run")["training"]["step"] == result.steps
    assert go(small(), endless(), resume=True).finished


def test_ctrl_c_is_no_end_of_the_stream_though_it_ends_what_is_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LOOKED_AT", 16)

    def camera() -> Iterator[Any]:
        yield from itertools.islice(endless(), 60)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert go(small(), camera()).stopped_by == "Ctrl-C"


def test_a_run_without_a_checkpoint_begins_with_what_comes_now() -> None:
    with pytest.raises(UserError, match="too few to fill"):
        go(small(), numbered(20))
    go(small(steps=8), itertools.chain(numbered(64), endless()), resume=True)
    began = json.loads(Path("run", runs.STREAM).read_text())
    assert began["mean"] == state_of("run")["mean"]
    assert began["mean"][0] > 20 / 255


def test_a_run_that_is_replaced_forgets_its_stream() -> None:
    go(small(steps=1), endless())
    go(small(steps=1), numbered(64), overwrite=True)
    assert state_of("run")["mean"] == pytest.approx([31.5 / 255] * 3)


def test_what_was_trained_on_a_stream_is_measured_on_labelled_data() -> None:
    go(small(), endless())
    for data in (None, "-"):
        with pytest.raises(UserError, match="trained on a stream, which is gone"):
            evaluate("run", data=data, device="cpu")
    found = evaluate("run", data="digits", device="cpu", settings=EvaluationSettings(probe_epochs=1, shot_repeats=1))
    assert found["images"]["test"] == 500
    assert export("run").metadata["data"] == "stream"
    assert dataclasses.replace(small(), out=None).run_dir == "runs/stream-memory-d-simclr-x1-seed0"


@pytest.mark.parametrize(
    ("changes", "frames", "message"),
    [
        ({"steps": None}, endless, "steps must be given for a stream"),
        ({"bias": 27.0}, endless, "bias 27 needs labels"),
        ({"dwell": 3}, endless, "dwell 3"),
        ({"policy": "oracle"}, endless, "oracle sees the labels"),
        ({"policy": "distinct"}, endless, "every image of a stream has one of its own; take reservoir"),
        ({}, lambda: numbered(15), "ended after 15 images, before a batch of 16"),
        ({}, lambda: numbered(31), "after 31 images, too few to fill the memory"),
        ({}, lambda: [], "ended after 0 images"),
        ({}, lambda: [np.zeros((8, 9, 3), np.uint8)] * 50, "8 × 9 pixels, not square"),
        ({"data": "digits"}, endless, "frames go with data '-', and only with that; got data 'digits' with frames"),
        ({}, lambda: None, "got data '-' without frames"),
    ],
)
def test_what_a_stream_cannot_do_is_said_at_once(changes: dict[str, Any], frames: Any, message: str) -> None:
    said = io.StringIO()
    with pytest.raises(UserError, match=message):
        train(small(**changes), frames=frames(), console=Console(file=said))
    if changes.keys() & {"steps", "bias", "dwell"}:
        assert said.getvalue() == ""


def test_a_run_goes_on_with_images_of_its_size() -> None:
    go(small(), itertools.islice(endless(), 64))
    with pytest.raises(UserError, match=r"9 × 9 pixels, and run was trained on 8 × 8"):
        go(small(), numbered(64, side=9), resume=True)


# The command line ------------------------------------------------------------------------------------------
COMMAND = "train --data - --method d-simclr --recipe demo --source memory --memory-size 32 --batch-size 16 --steps 2"


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes, tty: bool = False) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: tty))


def test_frames_are_read_from_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    content = digits()[:80].permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    piped(monkeypatch, content)
    assert cli.main([*COMMAND.split(), "--image-size", str(SIDE), "--out", "piped"]) == 0
    assert "next: duel export piped" in capsys.readouterr().out
    assert state_of("piped")["training"]["stream"] == {"shown": 80}  # read, though two steps needed 64 only


def test_a_video_may_end_before_the_steps_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, digits()[:60].permute(0, 2, 3, 1).contiguous().numpy().tobytes())
    assert cli.main([*COMMAND.split(), "--image-size", str(SIDE), "--out", "piped"]) == 0
    said = capsys.readouterr()
    assert "stopped by the end of the stream after step 1 of 2" in said.err
    assert "… | duel train --out piped --resume" in said.err
    assert "next: duel export piped" in said.out


def test_a_process_without_standard_input_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main([*COMMAND.split(), "--image-size", "8"]) == cli.USER_MISTAKE
    assert "nothing is piped into it: ffmpeg -i VIDEO -vf scale=8:8" in capsys.readouterr().err


def test_what_is_missing_is_said_before_the_pipe_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("duel.data.live.standard_input", lambda size: pytest.fail("looked at the pipe"))
    piped(monkeypatch, b"")
    args = [word for word in COMMAND.replace("demo", "standard").split() if word not in ("--steps", "2")]
    assert cli.main([*args, "--image-size", "8"]) == cli.USER_MISTAKE
    said = capsys.readouterr().err
    assert said == "duel: error: --steps must be given for a stream, which has no epochs\n"


@pytest.mark.parametrize(("options", "tty"), [("", False), ("--image-size 8", True)])
def test_how_to_pipe_is_said(
    options: str, tty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"", tty)
    assert cli.main([*COMMAND.split(), *options.split()]) == cli.USER_MISTAKE
    said = capsys.readouterr().err
    assert "raw RGB frames from standard input" in said
    assert "ffmpeg -i VIDEO" in said
    assert ("--image-size" in said.partition("ffmpeg")[0]) == (not tty)
