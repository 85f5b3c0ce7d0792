from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_utilities.core import rank_zero
from PIL import Image
from rich.console import Console

from duel import checkpoint, loop, recipes, runs
from duel.checks import RowsRefused
from duel.config import TrainConfig
from duel.data import ArraySource, load
from duel.errors import Notice, UserError
from duel.evaluation.settings import EvaluationSettings
from duel.inputs import Inputs
from duel.locking import alone
from duel.machine import build_fabric, resolve_device
from duel.memory import WorkingMemory
from duel.runlog import RunLog, read_metrics
from duel.step import TrainingStep
from duel.trained import evaluate, evaluation_file, export, load_trained
from duel.training import NonFiniteLoss, RunResult, train
from duel.upkeep import Upkeep

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def small(method: Any = "simclr", **changes: Any) -> TrainConfig:
    """Seconds, not minutes: 8×8 digits, 16 images a step."""
    settings: dict[str, Any] = {
        "out": "run",
        "steps": 8,
        "batch_size": 16,
        "memory_size": 32,
        "refresh": 0,
        "dim": 16,
        "log_every": 2,
        "checkpoint_every": 4,
        "bias": 27.0,
    }
    return dataclasses.replace(recipes.demo(method), **{**settings, **changes})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def go(config: TrainConfig, **options: Any) -> RunResult:
    return train(config, console=options.pop("console", None) or quiet(), **options)


def final_state(run: str) -> dict[str, Any]:
    return checkpoint.load_latest(Path(run) / runs.CHECKPOINTS)[1]["training"]


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Bit for bit, whatever the structure."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Send this process a real signal in the middle of a step."""
    original = TrainingStep.compute

    def compute(self: TrainingStep) -> None:
        if self.done + 1 == step:
            os.kill(os.getpid(), number)
        original(self)

    monkeypatch.setattr(TrainingStep, "compute", compute)


CASES = {
    "simclr-sgd": small(optimizer="sgd", clip=1.0, warmup=2),
    "byol-lars": small("byol", optimizer="lars", bias_mode="subset", bias=3.0),
    "d-moco": small("d-moco", policy="duel", symmetric=True),
    "d-simclr": small("d-simclr"),
    "d-moco-backbone": small("d-moco", space="backbone", refresh=8, memory_view="augmented"),
    "d-simclr-reuse": small(
        "d-simclr", reuse_newcomers=True, space="backbone", policy="adaptive", adaptive_target=0.01
    ),
    "oracle": small("simclr", source="memory", policy="oracle", memory_negatives=True, stream_batch=24),
    "distinct": small("moco", source="memory", policy="distinct", refresh=8),
    "host": small("d-simclr", source="memory", memory_images="host", refresh=8, stream_batch=8),
    "memory-first": small("simsiam", source="memory", policy="reservoir", refresh=8, dwell=3),
    "moco-queue": small("d-moco", source="memory", queue=24, refresh=8),
    "d-byol": small("d-byol", source="memory", refresh=8),
    "pixels": small("d-simclr", source="memory", space="pixels", refresh=8),
    "pixels-host": small("d-simclr", source="memory", space="pixels", memory_images="host"),
    "memory-first-moco": small("moco", source="memory", policy="duel", admit="compete", score="exponential:0.05"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_resume_continues_bit_for_bit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CASES[case]
    whole = go(dataclasses.replace(config, out="whole"))
    assert whole.finished
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        said = io.StringIO()
        stopped = go(dataclasses.replace(config, out="parts"), console=Console(file=said, width=200))
    assert (stopped.steps, stopped.finished) == (5, False)
    assert "duel train --out parts --resume" in said.getvalue()
    torch.manual_seed(99)  # whatever else happens in between
    resumed = go(dataclasses.replace(config, out="parts"), resume=True)
    assert resumed.finished
    assert_same(final_state("whole"), final_state("parts"))
    drop = {"steps_per_s"}
    lines = [
        [{k: v for k, v in row.items() if k not in drop} for row in read_metrics(Path(r))] for r in ("whole", "parts")
    ]
    assert lines[0] == lines[1]
    assert [row["step"] for row in lines[0]] == [2, 4, 6, 8]


def test_a_stop_while_the_memory_is_filled_is_resumed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("d-moco", source="memory", memory_size=70, queue=40, refresh=8)
    go(dataclasses.replace(config, out="whole"))
    said: list[str] = []
    monkeypatch.setattr(RunLog, "doing", lambda self, what: said.append(what))
    offer = Upkeep._offer
    for turn, upto in enumerate((16, 48)):  # each time a batch further
        with monkeypatch.context() as patch:

            def stop(self: Upkeep, *args: Any, upto: int = upto) -> None:
                offer(self, *args)
                if len(self.memory) >= upto:
                    os.kill(os.getpid(), signal.SIGTERM)

            patch.setattr(Upkeep, "_offer", stop)
            stopped = go(dataclasses.replace(config, out="parts"), resume=turn > 0)
        assert (stopped.steps, stopped.finished) == (0, False)
        assert said[-2:] == [f"filling the memory: {upto} of 70", ""]
    said.clear()
    assert go(dataclasses.replace(config, out="parts"), resume=True).finished
    assert said[:2] == ["filling the memory: 64 of 70", "filling the memory: 70 of 70"]
    assert said[-2:] == ["filling the queue: 40 of 40 (--queue)", ""]
    assert_same(final_state("whole"), final_state("parts"))


def test_filling_is_told_in_a_log_now_and_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [100.0]
    monkeypatch.setattr("duel.runlog.time.monotonic", lambda: now[0])
    said = io.StringIO()
    log = RunLog(tmp_path, columns=[], steps=5, label="moco", tensorboard=False, console=Console(file=said, width=200))
    with log:
        for what in ("one", "two", "three", "four", ""):
            log.doing(what)
            now[0] += 6
    assert said.getvalue().splitlines() == ["moco: three"]


def test_a_memory_has_a_slot_for_each_image_at_most() -> None:
    said = io.StringIO()
    config = small(source="memory", memory_size=2000, refresh=1900, steps=2)
    result = go(dataclasses.replace(config, space="backbone", policy="duel"), console=Console(file=said, width=200))
    assert result.steps == 2
    assert "the memory gets 1,297 slots, as many as there are images, not 2,000" in said.getvalue()
    go(dataclasses.replace(config, dwell=3, out="frames"))  # of one image there are several
    assert final_state("frames")["memory"]["_extra_state"]["filled"] == 2000


def test_training_learns_and_writes_its_origin() -> None:
    config = small(steps=40, bias=1.0, bias_class=3, batch_size=64, log_every=10, knn_every=20, tensorboard=True)
    result = go(config)
    lines = read_metrics(result.run_dir)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert [("knn" in row) for row in lines] == [False, True, False, True]
    assert lines[-1]["knn"] > 0.5
    assert lines[-1]["lr"] < lines[0]["lr"]
    meta = json.loads((result.run_dir / runs.META).read_text())
    assert meta["finished"] is True
    assert meta["budget"] == {
        "steps": 40,
        "images_encoded": 2 * 64 * 40,
        "seconds": pytest.approx(result.seconds, abs=1e-3),
        "filling_seconds": 0,
        "peak_gpu_memory_mb": None,
        "compiled": False,
    }
    assert meta["attempts"][0]["versions"]["torch"]
    assert meta["attempts"][0]["hardware"]["device"] == "cpu"
    assert runs.load_config(result.run_dir) == config
    assert list((result.run_dir / runs.TENSORBOARD).glob("events*"))


def test_filling_the_memory_is_counted_apart_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now, original = [0.0], TrainingStep.filling

    def slowly(self: TrainingStep) -> Iterator[str]:
        for how_far in original(self):
            now[0] += 10
            yield how_far

    monkeypatch.setattr(TrainingStep, "filling", slowly)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    config = small("d-moco", steps=2, memory_size=48)
    assert go(config, until=0.0).steps == 0  # stopped after the first of three batches
    assert runs.read_meta(Path("run"))["budget"]["filling_seconds"] == 10
    assert go(config, resume=True).finished
    budget = runs.read_meta(Path("run"))["budget"]
    assert (budget["filling_seconds"], budget["seconds"]) == (30, 0)


def test_what_was_compiled_in_part_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *given, **how: None)  # which takes long
    found = []
    for first, then in ((False, False), (True, True), (False, True), (True, False)):
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            go(small(steps=6, compile=first), overwrite=True)
        assert go(small(steps=6, compile=then), resume=True).finished
        meta = runs.read_meta(Path("run"))
        assert [attempt["compiled"] for attempt in meta["attempts"]] == [first, then]
        found.append(meta["budget"]["compiled"])
    assert found == [False, True, None, None]


def test_the_knn_of_a_run_does_not_change_it() -> None:
    go(small(out="watched", knn_every=2))
    go(small(out="alone", knn_every=0))
    assert_same(final_state("watched"), final_state("alone"))


def test_seeds_matter_and_repeat() -> None:
    go(small(out="a"))
    go(small(out="b"))
    go(small(out="c", seed=1))
    assert_same(final_state("a"), final_state("b"))
    weights = [next(iter(final_state(r)["method"].values())) for r in ("a", "c")]
    assert not torch.equal(*weights)


def test_the_memory_is_filled_with_real_items_and_fed_by_the_stream() -> None:
    result = go(small("moco", steps=3, log_every=1))
    memory = final_state("run")["memory"]
    assert memory["_extra_state"]["filled"] == 32
    torch.testing.assert_close(memory["_embeddings"].norm(dim=1), torch.ones(32))
    # two batches of 16 pass through 32 slots of a FIFO in two steps
    assert int(memory["_clock"]) == 2 + 3
    assert 0.5 < result.metrics["memory_largest"] <= 1.0


def test_the_ids_of_a_memory_are_read_without_building_it() -> None:
    go(small("simclr", steps=3, policy="oracle"))
    trained = load_trained("run")
    assert trained.memory_ids is not None
    assert torch.equal(trained.memory_ids, final_state("run")["memory"]["_payload_id"])
    go(small("simclr", steps=2), overwrite=True)
    assert load_trained("run").memory_ids is None


def test_epochs_set_the_length() -> None:
    result = go(small(steps=None, epochs=0.05, bias=1.0))
    assert result.steps == round(0.05 * 1297 / 16)


def test_output_directory_is_not_shared_by_two_runs() -> None:
    go(small(steps=2))
    with pytest.raises(
        UserError, match="run already holds a run; continue it with --resume, replace it with --overwrite"
    ):
        go(small(steps=2))
    assert go(small(steps=3), overwrite=True).steps == 3
    assert [p.name for p in checkpoint.checkpoints(Path("run") / runs.CHECKPOINTS)] == ["step-000000003.pt"]
    with pytest.raises(UserError, match=r"^--resume and --overwrite were both given"):
        go(small(steps=3), overwrite=True, resume=True)


def test_a_run_that_another_process_trains_is_left_alone() -> None:
    go(small(steps=2))
    with alone(Path("run") / runs.LOCK) as mine:
        assert mine
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(runs.RunInUse, match="another process is training in run; wait for it"):
                go(small(steps=2), **how)
    assert go(small(steps=2), resume=True).finished
    assert not (Path("run") / runs.LOCK).exists()
    Path("left").mkdir()
    (Path("left") / runs.LOCK).touch()  # by a process that was killed
    assert go(small(steps=2, out="left")).finished


def test_who_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with alone(path) as one, alone(path) as other:
        assert (one, other) == (True, False)
        with alone(path) as third:
            assert not third
    assert not path.exists()
    with alone(path) as again:
        assert again


def test_a_run_is_not_deleted_for_one_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    go(small(steps=2))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed"):
        go(small(steps=2, wandb="mine"), overwrite=True)
    monkeypatch.setattr(TrainConfig, "as_dict", lambda self: {"out": object()})
    with pytest.raises(UserError, match="cannot be written as JSON"):
        go(small(steps=2), overwrite=True)
    assert len(checkpoint.checkpoints(Path("run") / runs.CHECKPOINTS)) == 1


def test_paths_may_be_paths() -> None:
    result = go(small(steps=2, out=Path("here"), root=Path("data")))
    assert (result.run_dir, runs.load_config(Path("here")).out) == (Path("here"), "here")


def one_class(count: int, classes: int) -> str:
    """A file of images, all but one of class 0."""
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    labels = np.zeros(count, dtype=np.int64)
    labels[0] = classes - 1
    np.savez("one.npz", images=images, labels=labels)
    return "one.npz"


def test_images_must_be_squares_of_one_size() -> None:
    def pictures(count: int, height: int, width: int) -> Any:
        return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)

    np.savez("wide.npz", images=pictures(60, 8, 12), labels=np.arange(60) % 2)
    with pytest.raises(UserError, match="has images of 8 × 12 pixels, not square ones; give an image_size"):
        go(small(data="wide.npz", bias=1.0))
    y = np.arange(60) % 2
    np.savez("two.npz", x_train=pictures(60, 8, 8), y_train=y, x_test=pictures(60, 10, 10), y_test=y)
    with pytest.raises(UserError, match="test images of 10 × 10 pixels, not those of the training images, 8 × 8"):
        go(small(data="two.npz", bias=1.0, knn_every=2))
    for data in ("wide.npz", "two.npz"):
        result = go(small(data=data, bias=1.0, knn_every=2, image_size=8, steps=2, out=data.removesuffix(".npz")))
        assert evaluate(result.run_dir, settings=EvaluationSettings(probe_epochs=1))["images"]["test"] > 1


@pytest.mark.parametrize("classes", [1, 2])
def test_data_that_cannot_be_measured_on_are_trained_on(classes: int) -> None:
    result = go(small("d-simclr", data=one_class(60, classes), bias=1.0, knn_every=2, steps=4))
    assert result.finished
    assert result.labelled == (classes > 1)
    assert all(math.isfinite(value) for value in result.metrics.values() if not math.isnan(value))
    assert checkpoint.checkpoints(Path("run") / runs.CHECKPOINTS)


@pytest.mark.parametrize("kind", ["folder", "streamed folder", "npz"])
def test_without_a_test_part_there_is_no_knn(kind: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez("all.npz", x_train=images, y_train=np.arange(40) % 2)
    for i, image in enumerate(images):
        path = Path("all", "train", "ab"[i % 2], f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    data = "all.npz" if kind == "npz" else "all"
    how = {"residency": "stream", "workers": 0} if kind == "streamed folder" else {}
    config = small("d-simclr", data=data, bias=1.0, steps=4, image_size=8, **how)
    with pytest.warns(Notice, match=f"{data}: no k-NN while training, as it has no test part"):
        result = go(dataclasses.replace(config, knn_every=2))
    assert (result.finished, result.labelled, "knn" in result.metrics) == (True, False, False)
    with warnings.catch_warnings(action="error", category=Notice):  # nothing was asked for
        assert not go(dataclasses.replace(config, knn_every=0), overwrite=True).labelled
    with pytest.raises(UserError, match=r"has train/ but none of test/|has training images but no test_images"):
        evaluate("run", device="cpu")


@pytest.mark.parametrize("method", ["d-simclr", "d-moco"])
def test_embeddings_that_a_memory_refuses_are_training_gone_astray(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(method, source="memory" if method == "d-simclr" else "stream")
    calls = []

    def refuses(self: WorkingMemory, *args: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # filling takes two
            raise RowsRefused("row 0 is not finite; use torch.nn.functional.normalize")
        return real(self, *args, **given)

    real = WorkingMemory.update
    monkeypatch.setattr(WorkingMemory, "update", refuses)
    with pytest.raises(NonFiniteLoss, match=r"an embedding became NaN or infinite at step 2 .*Try a lower --lr"):
        go(config)


def test_a_measurement_that_fails_costs_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **given: Any) -> dict[str, float]:
        raise UserError("too few images")

    monkeypatch.setattr("duel.evaluation.online_measures", fails)
    console = quiet()
    result = go(small(knn_every=2), console=console)
    assert result.finished
    assert console.file.getvalue().count("warning: no k-NN while training: too few images") == 1  # type: ignore[attr-defined]
    assert "knn" not in result.metrics


def test_foreign_files_are_never_touched() -> None:
    Path("photos").mkdir()
    Path("photos/holiday.jpg").write_text("precious")
    with pytest.raises(UserError, match="not a duel run"):
        go(small(out="photos"), overwrite=True)
    go(small(steps=2))
    Path("run/notes.txt").write_text("mine")
    go(small(steps=2), overwrite=True)
    assert Path("run/notes.txt").read_text() == "mine"
    assert Path("photos/holiday.jpg").read_text() == "precious"


def test_resuming_with_other_settings_shows_the_difference() -> None:
    go(small(steps=2))
    with pytest.raises(UserError, match=r"(?s)lr: 0.003 -> 0.5.*train in another directory"):
        go(small(steps=2, lr=0.5), resume=True)
    with pytest.raises(UserError, match="there is no run directory"):
        go(small(out="nowhere"), resume=True)


def test_a_finished_run_resumes_to_itself() -> None:
    first = go(small("d-moco", steps=4, bias_mode="subset", bias=3.0, tensorboard=True))
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    said = io.StringIO()
    console = Console(file=said, width=200)
    again = go(small("d-moco", steps=4, bias_mode="subset", bias=3.0, log_every=1), resume=True, console=console)
    assert said.getvalue() == "run is finished (4 steps): nothing to be done\n"
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    assert dataclasses.replace(again, seconds=first.seconds, device_seconds=first.device_seconds) == first
    assert again.seconds > 0


def test_a_run_that_ended_before_it_said_so_is_finished_by_resuming() -> None:
    go(small(steps=4))
    before = final_state("run")
    runs.write_json(Path("run") / runs.META, {**runs.read_meta(Path("run")), "finished": None})
    assert go(small(steps=4), resume=True).finished
    assert runs.read_meta(Path("run"))["finished"] is True
    assert_same(before, final_state("run"))


def test_a_damaged_checkpoint_falls_back_to_the_last_good_one() -> None:
    go(small(out="whole"))
    go(small())
    newest = Path("run") / runs.CHECKPOINTS / "step-000000008.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    said = io.StringIO()
    result = go(small(), resume=True, console=Console(file=said, width=200))
    assert str(newest) in said.getvalue().replace("\n", "")
    assert "resuming run at step 4" in said.getvalue()
    assert result.finished
    assert_same(final_state("whole"), final_state("run"))


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = TrainingStep.compute

    def compute(self: TrainingStep) -> None:
        if self.done + 1 == step:
            next(iter(self.method.trainable_parameters())).data.fill_(math.nan)
        original(self)

    monkeypatch.setattr(TrainingStep, "compute", compute)


@pytest.mark.parametrize("method", ["simclr", "d-moco"])
def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 6)
    advice = r"at step 6 \(learning rate 0\.00\d+\).*step-000000004\.pt.*--lr .*--warmup .*--clip"
    with pytest.raises(NonFiniteLoss, match=advice):
        go(small(method, log_every=100))
    _, state, problems = checkpoint.load_latest(Path("run") / runs.CHECKPOINTS)
    assert problems == []
    assert state["training"]["step"] == 4
    assert all(torch.isfinite(t).all() for t in state["training"]["method"].values())


def test_full_disk_keeps_the_previous_checkpoint_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.save, []

    def full(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args, **options)

    monkeypatch.setattr(torch, "save", full)
    said = io.StringIO()
    result = go(small(checkpoint_every=2), console=Console(file=said, width=300))
    assert result.finished
    assert "step-000000004.pt: No space left on device; the previous checkpoint" in said.getvalue()
    assert final_state("run")["step"] == 8


def test_full_disk_at_the_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="No space left on device; there is no earlier checkpoint"):
        go(small(steps=2))


def test_a_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainingStep.compute

    def compute(self: TrainingStep) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        original(self)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(TrainingStep, "compute", compute)
    with pytest.raises(KeyboardInterrupt):
        go(small())
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_when_one_was_asked_for() -> None:
    with pytest.raises(UserError, match=r"sees no GPU.*--device cpu"):
        go(small(device="cuda"))
    assert not Path("run").exists()
    for name in ("gpu", "cpu:3"):
        with pytest.raises(UserError, match="device must be auto, cpu, cuda"):
            go(small(device=name))
    assert resolve_device("cpu:0") == torch.device("cpu")


def test_several_processes_for_one_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"one device, but WORLD_SIZE is 2;.*CUDA_VISIBLE_DEVICES=1 duel train"):
        go(small())
    assert not Path("run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert build_fabric(small()).device.type == "cpu"


def test_lightning_says_nothing_of_precision_and_tensor_cores(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, config = rank_zero.log, small(precision="bf16")
    before = log.level
    with caplog.at_level(logging.INFO, logger=log.name):
        fabric = build_fabric(config)
        setup = fabric.setup
        monkeypatch.setattr(fabric, "setup", lambda *parts: (log.info("a GPU with tensor cores"), setup(*parts))[1])
        TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
        log.info("still heard")
    assert [record.message for record in caplog.records] == ["still heard"]
    assert log.level == before


def test_why_a_step_is_not_recorded_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingStep, "why_eager", "the memory's images are on the host (memory_images host)")
    said = io.StringIO()
    go(small(), console=Console(file=said, width=200))
    assert said.getvalue().count("cannot be recorded as a CUDA graph and runs eagerly: the memory's images are on") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].memory_images != "host"])
def test_a_step_never_waits_for_the_device(case: str) -> None:
    config = dataclasses.replace(CASES[case], device="cuda", steps=100)
    fabric = build_fabric(config)
    step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
    step.fill_memory()
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.read_loss()[1] is None


def test_a_run_that_cannot_start_leaves_nothing_behind() -> None:
    with pytest.raises(UserError, match="batch_size 5000 is larger"):
        go(small(batch_size=5000, memory_size=5000))
    with pytest.raises(UserError, match="stream_batch 5000 is larger than the data: digits has 1297 images"):
        go(small(source="memory", stream_batch=5000))
    with pytest.raises(UserError, match="key_momentum was given, but simclr has no such setting"):
        go(small(key_momentum=0.9))
    with pytest.raises(UserError, match="unknown backbone 'resnet81'"):
        go(small(backbone="resnet81"))
    assert not Path("run").exists()


def test_evaluate_and_export_what_was_trained() -> None:
    go(small("moco", steps=4, batchnorm_groups=4))
    trained = load_trained("run")
    weights = final_state("run")["method"]
    for name, tensor in trained.encoder.state_dict().items():
        assert torch.equal(tensor, weights[f"encoder.{name}"])
    result = evaluate("run", device="cpu", cache=False)
    saved = json.loads((Path("run") / runs.EVALUATION).read_text())
    assert saved["probe"] == result["probe"]
    assert saved["run"]["step"] == 4
    assert saved["run"]["config"]["bias"] == 27.0
    done = export("run")
    assert done.path.exists()
    for name, values in (("mean", trained.mean), ("std", trained.std), ("image_shape", (3, 8, 8))):
        assert tuple(map(float, done.metadata[name].split())) == pytest.approx(values, rel=1e-5)
    for path in (Path("run") / runs.CHECKPOINTS).iterdir():
        path.unlink()
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_trained("run")


def test_other_data_are_evaluated_into_a_file_of_their_own() -> None:
    go(small(steps=2))
    source = load("digits")
    assert isinstance(source, ArraySource)
    assert source.labels is not None
    Path("more").mkdir()
    np.savez("more/digits.npz", images=source.data[:200].numpy(), labels=source.labels[:200].numpy())
    quick = {"device": "cpu", "cache": False, "settings": EvaluationSettings(probe_epochs=2)}
    own = evaluate("run", **quick)
    other = evaluate("run", data="more/digits.npz", **quick)
    assert other["images"] != own["images"]
    written = {path.name: json.loads(path.read_text()) for path in Path("run").glob("evaluation*")}
    elsewhere = evaluation_file("run", "more/digits.npz").name
    assert re.fullmatch(r"evaluation-more-digits\.npz-[0-9a-f]{8}\.json", elsewhere)
    assert set(written) == {runs.EVALUATION, elsewhere}
    assert written[runs.EVALUATION]["images"] == own["images"]
    assert written[elsewhere]["images"] == other["images"]
    Path("run/evaluation-notes.json").write_text("mine")
    go(small(steps=2), overwrite=True)
    assert [path.name for path in Path("run").glob("evaluation*")] == ["evaluation-notes.json"]


def test_a_folder_is_evaluated_at_the_size_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for folder, side in (("own/train", 8), ("own/test", 12), ("other", 16)):
        for i in range(20):
            path = Path(folder, "ab"[i % 2], f"{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
    go(small(data="own", steps=2, bias=1.0, knn_every=0))
    quick = {"device": "cpu", "cache": False, "settings": EvaluationSettings(probe_epochs=2)}
    assert evaluate("run", **quick)["images"] == {"train": 20, "test": 20}
    assert evaluate("run", data="other", **quick)["images"] == {"train": 16, "test": 4}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"cannot write run/evaluation.json: No space left on device; make room"):
        evaluate("run", **quick)


def test_the_run_s_own_data_are_known_by_any_spelling() -> None:
    Path("pictures").mkdir()
    for own, spelled in (
        ("pictures", str(Path("pictures").resolve())),
        ("digits", "digits"),
        ("stl10-unlabeled", "stl10"),
    ):
        runs.prepare(Path("run"), small(data=own), overwrite=False)
        assert evaluation_file("run", spelled) == evaluation_file("run") == Path("run") / runs.EVALUATION
    others = ("a/val", "a-val", "b/val", "/a/val.npz", "../x" * 200, "../x" * 201, ".", "./digits", "./stl10")
    names = {evaluation_file("run", data).name for data in others}
    assert len(names) == len(others)
    assert max(map(len, names)) < 80
    assert all(re.fullmatch(r"evaluation-[a-z][\w.-]*\.json", name) for name in names)


def test_the_log_goes_on_without_its_files(tmp_path: Path) -> None:
    said = io.StringIO()
    out = tmp_path / "log"
    out.mkdir()
    with RunLog(out, columns=["loss"], steps=3, tensorboard=False, console=Console(file=said, width=200)) as log:
        log.log(1, {"loss": 1.0})
        (out / runs.METRICS).unlink()
        (out / runs.METRICS).mkdir()  # nobody can append to a folder
        log.log(2, {"loss": 2.0})
        log.log(3, {"loss": 3.0})
    assert said.getvalue().count("training goes on without logs") == 1
    assert "3.0000" in said.getvalue()
    with pytest.raises(KeyError, match="lss"):
        log.log(4, {"lss": 1.0})


@pytest.mark.parametrize("lines", [1, 3])  # the error is raised at the end, or already by the next line
def test_a_run_is_finished_though_tensorboard_cannot_write(
    lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    real, hook = RecordWriter.write, threading.excepthook

    def full(self: RecordWriter, data: bytes) -> None:
        if b"loss" in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    said = io.StringIO()
    result = go(small(steps=3, log_every=3 // lines, tensorboard=True), console=Console(file=said, width=200))
    assert result.finished
    assert runs.read_meta(Path("run"))["finished"]
    assert said.getvalue().count("warning: cannot write run/") == 1
    assert "(No space left on device)" in said.getvalue()
    assert threading.excepthook is hook
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_is_finished_though_wandb_cannot_be_reached(tmp_path: Path) -> None:
    def unreachable(exit_code: int) -> None:
        raise RuntimeError("no network")

    said = io.StringIO()
    log = RunLog(tmp_path, columns=[], steps=1, tensorboard=False, console=Console(file=said, width=200))
    log._wandb = SimpleNamespace(finish=unreachable)
    with log:
        pass
    assert said.getvalue() == "warning: Weights & Biases may lack the last lines (no network)\n"


def test_a_resumed_log_keeps_the_checkpoint_s_line_and_drops_later_ones(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, values in ((0, (1.0, 2.0, 3.0)), (2, (4.0,))):
        with RunLog(tmp_path, columns=["loss"], steps=3, start=start, console=Console(file=io.StringIO())) as log:
            for step, value in enumerate(values, start + 1):
                log.log(step, {"loss": value})
    assert (tmp_path / runs.METRICS).read_text().split() == ["step,loss", "1,1.0", "2,2.0", "3,4.0"]
    events = EventAccumulator(str(tmp_path / runs.TENSORBOARD))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_what_can_be_captured_is_the_device_s_own_whatever_was_saved() -> None:
    config = dataclasses.replace(small(), optimizer="adam", device="cpu")
    fabric = build_fabric(config)
    step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
    step.fill_memory()
    step()
    saved = step.state_dict()
    for group in saved["optimizer"]["param_groups"]:
        group["capturable"] = True  # as a GPU saves it; torch refuses to go on with it on a CPU
    step.load_state_dict(saved)
    assert not any(group["capturable"] for group in step.optimizer.param_groups)
    step()


def test_as_many_checkpoints_are_kept_as_asked_for() -> None:
    go(small(steps=8, checkpoint_every=2, keep=3))
    assert len(list(Path("run").glob("checkpoints/*"))) == 3


def test_metrics_go_to_wandb_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: dict[int, dict[str, float]] = {}
    project: dict[str, Any] = {}
    logger = SimpleNamespace(log=lambda metrics, step: lines.update({step: metrics}), finish=lambda exit_code: None)
    module = SimpleNamespace(init=lambda **given: project.update(given) or logger)
    monkeypatch.setitem(sys.modules, "wandb", module)
    go(small(wandb="mine"))
    assert project["project"] == "mine"
    assert sorted(lines) == [2, 4, 6, 8]
    assert lines[8]["loss"] == pytest.approx(read_metrics(Path("run"))[-1]["loss"])
