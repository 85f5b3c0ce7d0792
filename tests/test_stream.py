"""Endless, complete, biased as asked, and the same after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from duel.data import ArraySource, Source, Stream, batches, class_weights, load
from duel.data import stream as stream_module
from duel.errors import UserError


def numbered(n: int = 50, side: int = 8, classes: int = 5, resident: bool = True) -> ArraySource:
    """Image i is filled with the value i, so that it can be told from its pixels."""
    images = torch.arange(n, dtype=torch.uint8).view(-1, 1, 1, 1).expand(n, 3, side, side).contiguous()
    return ArraySource(images, torch.arange(n) % classes, name="numbered", resident=resident)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(30):
        (tmp_path / f"c{i % 3}").mkdir(exist_ok=True)
        Image.new("RGB", (10, 10), (i, i, i)).save(tmp_path / f"c{i % 3}" / f"{i:02}.png")
    return tmp_path


def make(source: Source, **settings: object) -> Stream:
    return Stream(source, **{"batch_size": 8, "device": "cpu", "seed": 3, **settings})


def test_every_item_once_an_epoch_in_a_new_order() -> None:
    stream = make(numbered())
    shown = []
    for _ in range(25):  # 200 items: four epochs, with batches across their borders
        images, ids = stream.next()
        assert images.shape == (8, 3, 8, 8)
        assert images.dtype == torch.uint8
        assert torch.equal(images[:, 0, 0, 0].long(), ids)
        shown.append(ids)
    epochs = torch.cat(shown).view(4, 50)
    assert all(torch.equal(e.sort().values, torch.arange(50)) for e in epochs)
    assert len({tuple(e.tolist()) for e in epochs}) == 4
    assert stream.epoch == pytest.approx(4)


def test_only_the_subset() -> None:
    stream = make(numbered(), ids=torch.tensor([3, 7, 11, 19, 23, 31, 40, 41, 49]))
    ids = torch.cat([stream.next()[1] for _ in range(9)])
    assert torch.bincount(ids, minlength=50)[[3, 7, 11, 19, 23, 31, 40, 41, 49]].tolist() == [8] * 9
    assert len(ids) == 72


def test_draws_with_weights_also_inside_a_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "DRAW_BLOCK", 100)  # several blocks
    source = numbered()
    stream = make(source, weights=class_weights(5, bias=16))
    ids = torch.cat([stream.next()[1] for _ in range(250)])
    assert float((source.labels[ids] == 0).float().mean()) == pytest.approx(16 / 20, abs=0.04)
    subset = torch.arange(25)
    ids = torch.cat(
        [(make(source, weights=class_weights(5, bias=16), ids=subset, seed=s)).next()[1] for s in range(200)]
    )
    assert ids.max() < 25
    assert float((source.labels[ids] == 0).float().mean()) == pytest.approx(16 / 20, abs=0.05)


def test_seeds() -> None:
    source = numbered()
    assert torch.equal(make(source).next()[1], make(source).next()[1])
    assert not torch.equal(make(source).next()[1], make(source, seed=4).next()[1])


SETTINGS = [
    {},
    {"weights": class_weights(5, bias=9)},
    {"ids": torch.arange(20)},
    {"dwell": 3},
    {"dwell": 3, "dwell_spread": 0.7},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("steps", [0, 7, 25])
def test_a_restart_goes_on_bit_for_bit(settings: dict[str, object], resident: bool, steps: int) -> None:
    source = numbered(resident=resident)
    stream = make(source, **settings)
    for _ in range(steps):
        stream.next()
    state = stream.state_dict()
    assert all(type(v) is int for v in state.values())  # a checkpoint loads them with weights_only=True
    after = [stream.next() for _ in range(9)]
    again = make(source, **{**settings, "seed": 99})
    again.next()
    again.load_state_dict(state)
    for images, ids in after:
        x, y = again.next()
        assert torch.equal(x, images)
        assert torch.equal(y, ids)


def test_resident_and_streamed_give_the_same_and_spare_the_global_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, two = make(numbered(), dwell=2), make(numbered(resident=False), dwell=2)
    for _ in range(20):
        (x, i), (y, j) = one.next(), two.next()
        assert torch.equal(x, y)
        assert torch.equal(i, j)
    assert torch.equal(torch.get_rng_state(), before)


def test_dwell_shows_runs_of_nearly_identical_frames() -> None:
    images = torch.randint(60, 200, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stream = make(ArraySource(images), dwell=4)
    seen, ids = (torch.cat(t) for t in zip(*[stream.next() for _ in range(20)], strict=True))
    runs = ids.view(-1, 4)
    assert (runs == runs[:, :1]).all()
    assert torch.equal(runs[:, 0].sort().values, torch.arange(40))  # 160 frames: each item once
    assert torch.equal(seen.view(40, 4, 3, 32, 32)[:, 0], images[runs[:, 0]])
    later, first = seen.view(40, 4, 3, 32, 32)[:, 1:].float(), images[runs[:, 0]].unsqueeze(1).float()
    assert (later != first).flatten(2).any(2).float().mean() > 0.9
    # Undo the gain and the best shift of at most 2 pixels: what remains is rounding.
    inner = first[..., 4:28, 4:28]
    shifts = [later[..., 4 + dy : 28 + dy, 4 + dx : 28 + dx] for dy in range(-2, 3) for dx in range(-2, 3)]
    gain = [s.mean((-1, -2, -3), keepdim=True) / inner.mean((-1, -2, -3), keepdim=True) for s in shifts]
    error = torch.stack([(s / g - inner).abs().amax((-1, -2, -3)) for s, g in zip(shifts, gain, strict=True)]).amin(0)
    assert error.max() < 2
    assert later.mean() / first.mean() == pytest.approx(1, abs=0.03)
    best = torch.stack([(s / g - inner).abs().mean((-1, -2, -3)) for s, g in zip(shifts, gain, strict=True)]).argmin(0)
    dy, dx = best // 5 - 2, best % 5 - 2
    assert {1, -1} <= set(dy.flatten().tolist()) & set(dx.flatten().tolist())
    assert (dy != dx).float().mean() > 0.4
    lighter = (later.mean((-1, -2, -3)) / first.mean((-1, -2, -3))).std()
    assert float(lighter) == pytest.approx(0.1 / 3**0.5, rel=0.2)  # gains are uniform within a tenth
    assert stream.epoch == 1  # 160 frames of 40 items


@pytest.mark.parametrize("spread", [0.3, 0.75, 1.0])
def test_frames_of_an_item_have_a_heavy_tail(spread: float) -> None:
    n, mean = 20_000, 32
    lengths = stream_module.frames_each(n, mean, spread, torch.Generator().manual_seed(0))
    assert lengths.sum() == n * mean
    assert lengths.min() >= 1
    # Beyond the first frame a share p of the items has more than u^-spread at u = p, in the unit of the smallest.
    beyond = (lengths - 1).sort(descending=True).values.double()
    ratio = beyond[n // 100] / beyond[n // 2]  # rounded to whole frames
    assert float(ratio) == pytest.approx(50**spread, rel=0.2)
    assert beyond[0] / beyond[n // 2] > 4000**spread  # the longest of n: u about 1 / n
    neighbours = torch.corrcoef(torch.stack((lengths[:-1], lengths[1:])).double().log())[0, 1]
    assert abs(float(neighbours)) < 0.03  # no rounding carried from one to the next


def test_a_spread_of_the_dwell_shows_every_item_from_its_first_frame_on() -> None:
    images = torch.randint(60, 200, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stream = make(ArraySource(images), dwell=4, dwell_spread=0.75)
    seen, ids = (torch.cat(t) for t in zip(*[stream.next() for _ in range(20)], strict=True))
    items, lengths = ids.unique_consecutive(return_counts=True)
    assert torch.equal(items.sort().values, torch.arange(40))  # 160 frames: each item once, for 4 on average
    assert lengths.max() > 8
    first = lengths.cumsum(0) - lengths
    assert torch.equal(seen[first], images[items])
    later = torch.ones(len(ids), dtype=torch.bool).index_fill(0, first, False)
    assert (seen[later] != images[ids[later]]).flatten(1).any(1).float().mean() > 0.9
    assert stream.epoch == 1


def test_a_frame_is_shifted_down_and_to_the_right_edges_repeated() -> None:
    image = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
    down, right = (stream_module.show(image, torch.tensor([shift]), torch.ones(1)) for shift in ([2, 0], [0, 1]))
    assert torch.equal(down[:, :, 2:], image[:, :, :2])
    assert torch.equal(down[:, :, 1], image[:, :, 0])
    assert torch.equal(right[..., 1:], image[..., :3])
    large = ArraySource(torch.zeros(4, 3, 64, 64, dtype=torch.uint8))
    assert make(large, batch_size=2, dwell=2).order.shift == 3.0  # 1.5 at 32 pixels


def test_small_images_are_shifted_by_fractions_of_a_pixel() -> None:
    """Of digits, 8 x 8, whole pixels would be none at all, and frames would differ in brightness alone."""
    one = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(1, 3, 8, 8)  # a slope: 8 a row, 1 a column
    show = stream_module.show
    shifted = show(one, torch.tensor([[0.5, 0.0]]), torch.ones(1))
    assert torch.equal(shifted[:, :, 1:].long(), one[:, :, 1:].long() - 4)
    assert torch.equal(shifted[:, :, 0], one[:, :, 0])  # the edge is repeated
    assert torch.equal(show(one, torch.tensor([[-0.25, 0.0]]), torch.ones(1))[:, :, :-1], one[:, :, :-1] + 2)
    assert torch.equal(show(one, torch.tensor([[0.0, -1.0]]), torch.ones(1))[..., :-1], one[..., 1:])
    images = torch.randint(60, 200, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for whole in ([1, 0], [0, -1], [-2, 1]):
        shift = torch.tensor([whole]).expand(40, 2)
        assert torch.equal(show(images, shift.float(), torch.ones(40)), show(images, shift, torch.ones(40)))
    moves = make(ArraySource(images), dwell=4).order.block(0).shift
    assert moves is not None
    later = moves.view(40, 4, 2)[:, 1:]
    assert 0.3 < float(later.max()) <= 0.375  # 5 % of the side
    assert -0.375 <= float(later.min()) < -0.3
    assert (later != 0).all()
    assert (moves.view(40, 4, 2)[:, 0] == 0).all()
    larger = ArraySource(torch.zeros(40, 3, 16, 16, dtype=torch.uint8))
    moves = make(larger, dwell=4).order.block(0).shift
    assert moves is not None
    assert set(moves.flatten().tolist()) == {-1, 0, 1}


def test_batches_are_written_into_given_tensors() -> None:
    one, two = make(numbered()), make(numbered())
    out = torch.empty(8, 3, 8, 8, dtype=torch.uint8), torch.empty(8, dtype=torch.int64)
    for _ in range(8):
        images, ids = two.next(out=out)
        assert images is out[0]
        assert ids is out[1]
        x, i = one.next()
        assert torch.equal(x, images)
        assert torch.equal(i, ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_folder_equals_a_resident_one_and_resumes(folder: Path, workers: int) -> None:
    held, streamed = load(str(folder)), load(str(folder), residency="stream")
    assert len(held) == len(streamed) == 24
    one, two = make(held, workers=workers), make(streamed, workers=workers)
    for _ in range(5):
        (x, i), (y, j) = one.next(), two.next()
        assert torch.equal(x, y)
        assert torch.equal(i, j)
    again = make(streamed, workers=workers)
    again.load_state_dict(two.state_dict())
    assert torch.equal(again.next()[1], one.next()[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_breaks_on_the_way_is_replaced_and_listed(folder: Path, workers: int) -> None:
    source = load(str(folder), residency="stream")
    broken = [Path(source.paths[4]), Path(source.paths[5])]
    for path in broken:
        path.write_bytes(path.read_bytes()[:40])
    stream = make(source, workers=workers)
    with pytest.warns(UserWarning, match="unreadable file"):
        seen = [stream.next() for _ in range(3)]
    images, ids = (torch.cat(t) for t in zip(*seen, strict=True))
    assert 4 not in ids
    assert 5 not in ids
    assert len(ids) == 24
    names = [int(Path(source.paths[i]).stem) for i in ids.tolist()]
    assert images[:, 0, 0, 0].tolist() == names  # the ids say what is really shown
    assert sorted(line.split(":")[0] for line in source.skipped) == sorted(map(str, broken))
    fresh = load(str(folder), residency="stream")
    with pytest.warns(UserWarning, match="2 unreadable files skipped"):
        held = fresh.images(torch.arange(24))
    assert int(held[4, 0, 0, 0]) % 3 == int(source.labels[4])  # replaced by one of its class


@pytest.mark.parametrize("resident", [True, False])
def test_each_item_once_in_order(resident: bool) -> None:
    passes = list(batches(numbered(resident=resident), batch_size=16, device="cpu"))
    assert [len(i) for _, i in passes] == [16, 16, 16, 2]
    assert torch.equal(torch.cat([i for _, i in passes]), torch.arange(50))
    assert torch.equal(torch.cat([x for x, _ in passes])[:, 0, 0, 0].long(), torch.arange(50))
    some = torch.cat([i for _, i in batches(numbered(), batch_size=2, device="cpu", ids=torch.tensor([9, 2, 4]))])
    assert some.tolist() == [9, 2, 4]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 51}, "batch_size 51 is larger than the data: numbered has 50 images"),
        ({"ids": torch.arange(7)}, r"batch_size 8 .* has 7 images \(the biased subset\)"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"dwell": 0}, "dwell must be a whole number of frames per item, at least 1, got 0"),
        ({"dwell": 1.5}, "got 1.5"),
        ({"dwell": 2, "dwell_spread": 1.5}, r"dwell_spread must lie in \[0, 1\], got 1.5"),
        ({"ids": [5, 3]}, "ids must be a tensor, int64"),
        ({"ids": torch.arange(50) > 20}, r"got a mask: pass mask.nonzero\(\).flatten\(\)"),
        ({"ids": torch.arange(10.0)}, "ids must be whole numbers of shape"),
        ({"ids": torch.arange(10).view(2, 5)}, r"shape \(n,\), got torch.int64 \(2, 5\)"),
        ({"ids": torch.arange(41, 51)}, "ids must be between 0 and 49, got 41 to 50"),
        ({"ids": torch.arange(-1, 9)}, "ids must be between 0 and 49, got -1 to 8"),
        ({"weights": class_weights(6)}, "class 5 has no images"),
    ],
)
def test_wrong_settings(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make(numbered(), **settings)


def test_what_is_no_number_of_an_item_is_refused_elsewhere_too() -> None:
    mask = torch.arange(50) > 20
    with pytest.raises(UserError, match="got a mask"):
        next(batches(numbered(), batch_size=8, device="cpu", ids=mask))
    with pytest.raises(UserError, match="got a mask"):
        numbered().subset(mask)
    assert len(numbered().subset(mask.nonzero().flatten().int())) == 29


def test_a_position_of_another_stream_is_refused() -> None:
    with pytest.raises(UserError, match="other data or settings"):
        make(numbered()).load_state_dict({"seed": 3, "block": 0, "offset": 60})
    with pytest.raises(UserError, match="this is no position of a stream: it has step"):
        make(numbered()).load_state_dict({"step": 3})


def test_what_has_no_numbers_is_no_source() -> None:
    with pytest.raises(UserError, match="Source, whose items have numbers, got a generator"):
        make(image for image in torch.zeros(50, 3, 4, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_sees_what_the_cpu_sees_without_waiting() -> None:
    source = numbered()
    for settings in SETTINGS:
        cpu, gpu = make(source, **settings), make(source, device="cuda", **settings)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen = [gpu.next() for _ in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for images, ids in seen:
            x, i = cpu.next()
            assert torch.equal(x, images.cpu())
            assert torch.equal(i, ids.cpu())
