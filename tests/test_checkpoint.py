from __future__ import annotations

import pickle
import resource
import signal
from pathlib import Path

import pytest
import torch

from duel import checkpoint
from duel.checkpoint import CheckpointError


def state(value: float, size: int = 100) -> dict[str, object]:
    return {"step": 3, "weights": torch.full((size,), value), "nested": {"rng": torch.get_rng_state(), "x": [1, 2.0]}}


def test_round_trip_and_rotation(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, state(step), keep=2)
    kept = checkpoint.checkpoints(tmp_path)
    assert [checkpoint.step_of(p) for p in kept] == [3, 10]
    path, loaded, problems = checkpoint.load_latest(tmp_path)
    assert path == kept[-1]
    assert problems == []
    assert torch.equal(loaded["weights"], torch.full((100,), 10.0))
    assert loaded["nested"]["x"] == [1, 2.0]


def test_nothing_saved_yet(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "absent") == (None, {}, [])


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_last_good_one_used(tmp_path: Path, damage: str) -> None:
    good = checkpoint.save(tmp_path, 1, state(1.0), keep=2)
    bad = checkpoint.save(tmp_path, 2, state(2.0, size=5000), keep=2)
    raw = bytearray(bad.read_bytes())
    if damage == "truncated":
        raw = raw[: len(raw) // 2]
    elif damage == "flipped":
        raw[len(raw) // 2] ^= 1  # one bit inside the weights: torch.load alone would not notice
    else:
        raw = bytearray()
    bad.write_bytes(bytes(raw))
    path, loaded, problems = checkpoint.load_latest(tmp_path)
    assert path == good
    assert loaded["weights"][0] == 1.0
    assert len(problems) == 1
    assert str(bad) in problems[0]
    assert "damaged" in problems[0]


def test_all_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    bad = checkpoint.save(tmp_path, 1, state(1.0), keep=2)
    bad.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=str(bad)):
        checkpoint.load_latest(tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("ran-code"),))


def test_a_file_from_a_stranger_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-000000001.pt"
    torch.save({"x": _Evil()}, path)
    with pytest.raises(CheckpointError, match="could run code"):
        checkpoint.load(path)
    plain = tmp_path / "step-000000002.pt"
    plain.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match=r"step-000000002\.pt"):
        checkpoint.load(plain)
    assert not (tmp_path / "ran-code").exists()


def test_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """A file size limit makes the real write fail half-way, as a full disk does."""
    checkpoint.save(tmp_path, 1, state(1.0), keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(CheckpointError, match=r"step-000000001\.pt is untouched"):
            checkpoint.save(tmp_path, 2, state(2.0, size=100_000), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001.pt"]
    assert checkpoint.load_latest(tmp_path)[1]["weights"][0] == 1.0
    checkpoint.save(tmp_path, 2, state(2.0, size=100_000), keep=1)
    assert checkpoint.load_latest(tmp_path)[1]["weights"][0] == 2.0
