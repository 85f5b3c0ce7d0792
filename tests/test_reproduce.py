"""The plan, the runner and its store; on digits, a few steps a run."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duel import cli, inputs, runs
from duel.config import TrainConfig
from duel.data import load, statistics
from duel.errors import UserError
from duel.evaluation.settings import EvaluationSettings
from duel.locking import alone
from duel.machine import PeakMemory
from duel.reproduce import execute as execution
from duel.reproduce import reproduce, runner, store
from duel.reproduce.estimate import Estimate, plan_lines, seconds_of
from duel.reproduce.evidence import Evidence
from duel.reproduce.execute import Job, Outcome
from duel.reproduce.fingerprint import fingerprint
from duel.reproduce.grids import GRIDS, Data
from duel.reproduce.pixels import measure_pixels
from duel.reproduce.plan import SCALES, Planned, Variation, encoded_images, runs_of, set_aside
from duel.reproduce.rows import ROWS
from duel.reproduce.sharing import SharedClock
from duel.reproduce.tables import words
from duel.signals import StopRequest
from duel.step import worth_compiling
from duel.training import RunResult

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def smoke(**given: object) -> object:
    return reproduce("table2", scale="smoke", **{"rows": ("simclr",), "biases": (27.0,), "device": "cpu", **given})  # type: ignore[arg-type]


def names(out: str = "results") -> list[str]:
    return sorted(path.name for path in Path(out, "runs").glob("*.json"))


# Several processes -------------------------------------------------------------------------------------------


def test_a_run_that_another_process_is_at_is_left_to_it() -> None:
    (planned,) = runs_of("table2", "smoke", rows=("simclr",), biases=(27.0,))
    Path("work").mkdir()
    with alone(Path("work") / f"{planned.name}.in-use"):
        done = smoke(work="work")
    assert (done.complete, done.failed, names()) == (False, 0, [])
    assert not (Path("results") / "errors").exists()
    assert smoke(work="work").complete


def test_a_run_that_another_process_has_finished_meanwhile_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert smoke().complete
    monkeypatch.setattr(store, "load_all", lambda folders: {})  # as it was when the plan was made
    monkeypatch.setattr(execution, "_execute", None)
    assert smoke().complete


def test_folders_that_cannot_be_written_are_said_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "execute", None)
    Path("file").touch()
    for option in ("out", "work"):
        with pytest.raises(UserError, match=f"cannot write file/x: .*; give another with --{option}"):
            smoke(**{option: "file/x"})


# The plan ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_of_every_grid_is_a_valid_run_with_its_own_name(scale: str) -> None:
    plan = runs_of("all", scale, seeds=(0, 1))
    assert len({p.hash for p in plan}) == len({p.name for p in plan}) == len(plan)
    assert {row for grid in GRIDS.values() for row in grid.rows} == set(ROWS)
    shown = {p.hash for p in plan}
    for row in ROWS:  # rows that differ only in what a small scale cuts away share a run
        own = runs_of("all", scale, seeds=(0, 1), rows=[row])
        assert own
        assert {p.hash for p in own} <= shown
    for p in plan:
        assert ROWS[p.row.plain].plain == p.row.plain
        assert fingerprint(TrainConfig.from_dict(p.config.identity())) == p.hash


def test_table2_is_the_issue_s_grid_and_whole_seeds_come_first() -> None:
    plan = runs_of("table2", "short")
    assert len(plan) == 6 * 4 * 3
    seeds = [p.config.seed for p in plan]
    assert seeds == sorted(seeds)
    one = [(p.row.name, p.config.bias) for p in plan if p.config.seed == 2]
    assert one[:2] == [("simclr", 27), ("d-simclr-literal", 27)]
    assert [bias for _, bias in one] == [27] * 6 + [1] * 6 + [9] * 6 + [3] * 6
    for p in plan:
        assert (p.config.steps, p.config.backbone, p.config.batch_size) == (5000, "resnet18", 256)
        assert p.config.bias_mode == "draw"
    literal = {p.row.name: p.config for p in plan if "literal" in p.row.name}
    assert {(c.score, c.memory_size, c.refreshed_slots, c.source) for c in literal.values()} == {
        ("linear", 2048, 0, "stream"), ("linear", 512, 512, "stream")
    }  # fmt: skip


def test_the_tuning_has_seeds_of_its_own() -> None:
    scale = SCALES["short"]
    assert not set(scale.seeds) & set(scale.tuned_on)
    assert {p.config.seed for p in runs_of("tuning", "short")} == set(scale.tuned_on)
    assert {p.config.seed for p in runs_of("tuning", "short", seeds=(7,))} == {7}
    everything = runs_of("all", "short")
    assert {p.config.seed for p in everything} == {*scale.seeds, *scale.more_seeds, *scale.tuned_on}
    assert not any("-tune-" in p.row.name for p in everything if p.config.seed not in scale.tuned_on)
    assert everything[0].config.seed == scale.seeds[0]  # evidence first
    balanced = {p.row.name for p in runs_of("tuning", "short") if p.config.bias == 1}
    assert balanced == {"simclr", "moco", "moco-cold"}  # for the gap
    balanced = {p.row.name for p in runs_of("rivals", "short") if p.config.bias == 1}
    assert balanced == {row.baseline for row in map(ROWS.__getitem__, GRIDS["rivals"].rows)}
    assert "seeds 0, 1" in (set_aside("table2", "short", (1, 2)) or "")
    assert "seeds 0, 1" in (set_aside("tuning", "short", (7,)) or "")
    assert set_aside("tuning", "short", (0, 1)) is None
    assert set_aside("table2", "short", (2, 3)) is None
    assert set_aside("table2", "digits", (0,)) is None
    assert {p.config.seed for p in runs_of("tuning", "digits")} == set(SCALES["digits"].seeds)


def test_several_grids_are_one_plan_seed_by_seed() -> None:
    both = runs_of(("controls", "framework"), "short", seeds=(2, 3), biases=(27.0,))
    alone = [runs_of(grid, "short", seeds=(2, 3), biases=(27.0,)) for grid in ("controls", "framework")]
    assert {p.hash for p in both} == {p.hash for plan in alone for p in plan}
    seeds = [p.config.seed for p in both]
    assert seeds == sorted(seeds)
    assert both[0].row.name == alone[0][0].row.name
    assert runs_of(("table2", "all"), "short") == runs_of("all", "short")
    assert set_aside(("table2", "tuning"), "short", (0, 2)) is None
    with pytest.raises(UserError, match="did you mean 'controls'"):
        runs_of(("framework", "control"), "short")


def test_grids_that_compare_us_have_five_paired_seeds() -> None:
    for grid, short in {"framework": 5, "rivals": 5, "controls": 5, "table2": 3, "negative-free": 3}.items():
        assert {p.config.seed for p in runs_of(grid, "short")} == set(range(2, 2 + short))
        assert {p.config.seed for p in runs_of(grid, "digits")} == set(range(5))
        assert {p.config.seed for p in runs_of(grid, "paper")} == {0}


def test_what_a_run_encodes_is_known_beforehand() -> None:
    """By the committed results."""
    for path in (REPOSITORY / "results" / store.RUNS).glob("*-seed0-*.json"):
        record = store.read(path)
        if record.config.bias_mode == "subset":  # which may have fewer images than the memory has slots
            assert encoded_images(record.config) >= (record.budget("images_encoded") or 0)
        else:
            assert encoded_images(record.config) == record.budget("images_encoded")


CHEAP = ("fifo", "reservoir", "distinct", "minred-pixels", "dedup-pixels", "minred")
"""Memories for which less need be encoded than for ours."""


@pytest.mark.parametrize("scale", SCALES)
def test_longer_rows_encode_as_many_images_as_ours(scale: str) -> None:
    plan = {p.row.name: p for p in runs_of(["rivals", "table2"], scale, seeds=(2,), biases=[27.0])}
    longer = [p for p in plan.values() if p.row.as_many_as]
    cheaper = ("{}", "{}-temperature", "d-{}-ours", "d-{}-pixels", *(f"{{}}-memory-{policy}" for policy in CHEAP))
    assert {p.row.name.removesuffix("-longer") for p in longer} == {
        *("simclr-debiased", "simclr-debiased-warm", "d-moco-literal"),
        *(row.format(method) for row in cheaper for method in ("simclr", "moco")),
    }
    for p in longer:
        ours = plan[p.row.as_many_as or ""].config
        assert abs(encoded_images(p.config) - encoded_images(ours)) <= 2 * ours.batch_size
        shorter = plan[p.row.name.removesuffix("-longer")].config
        if shorter.source == "memory":
            shorter = dataclasses.replace(shorter, refresh=0)
            if not p.row.name.endswith(
                ("-memory-minred-longer", "-ours-longer")
            ):  # which compare what the encoder gives
                shorter = dataclasses.replace(shorter, space="pixels")
        assert p.config.differences(shorter) == [f"steps: {p.config.steps} -> {shorter.steps}"]
        assert (p.config.steps or 0) > (shorter.steps or 0)


def test_a_longer_row_stands_beside_the_others() -> None:
    (planned,) = runs_of("rivals", "short", rows=["simclr-longer"], biases=[27.0], seeds=(2,))
    assert planned.config.steps == 12_564
    record = fake(planned.config, row="simclr-longer")
    assert record.own_length
    assert not fake(TrainConfig(steps=100)).own_length
    assert Evidence([record], SCALES["short"]).runs("simclr-longer", Data(27.0)) == [record]


def test_rows_are_run_in_the_order_they_are_asked_for_seed_by_seed() -> None:
    rows = ["moco", "d-simclr-ours", "simclr"]
    plan = runs_of(("table2", "camera"), "short", rows=rows, biases=[27.0], seeds=(4, 2))
    assert [(p.config.seed, p.row.name, p.data.dwell) for p in plan] == [
        (seed, row, dwell) for seed in (4, 2) for row in rows for dwell in (1, 32)
    ]
    usual = [p.row.name for p in runs_of("table2", "short", biases=[27.0], seeds=(4,))]
    assert [row for row in usual if row in rows] != rows


def test_a_small_memory_has_to_choose_from_a_subset() -> None:
    """Digits at ×27 are 164."""
    for scale, slots in {"short": 1024, "paper": 1024, "digits": 128, "smoke": 64}.items():
        plan = runs_of("subset", scale, rows=["d-simclr-ours-small", "d-moco-ours-small"], biases=[27.0], seeds=(2,))
        assert {p.config.memory_size for p in plan} == {slots}
        for p in plan:
            ours = runs_of("subset", scale, rows=[p.row.name.removesuffix("-small")], biases=[27.0], seeds=(2,))
            changed = {line.split(":")[0] for line in p.config.differences(ours[0].config)}
            assert "memory_size" in changed
            assert changed <= {"memory_size", "refresh"}


def test_a_camera_shows_each_image_many_times() -> None:
    plan = runs_of("camera", "short", seeds=(2,), rows=["simclr", "simclr-memory-reservoir"])
    found = {(p.row.name, p.data.name): p.config for p in plan}
    as_drawn = runs_of("table2", "short", seeds=(2,), rows=["simclr"], biases=[27.0])[0].config
    assert as_drawn.differences(found["simclr", "x27-dwell32"]) == ["dwell: 1 -> 32"]
    assert found["simclr-memory-reservoir", "x1-dwell32"].dwell == 32
    assert found["simclr", "x1"].dwell == 1  # what curated data would give
    assert ("simclr-memory-reservoir", "x1") not in found
    assert words(Data(27.0, dwell=32)) == "×27 32 frames"


def test_a_camera_that_stops_differs_in_how_long_it_shows_what() -> None:
    rows = ["simclr", "d-moco-ours"]
    camera, stops = (
        {(p.row.name, p.data.bias): p for p in runs_of(grid, "short", seeds=(2,), rows=rows, biases=[27.0])}
        for grid in ("camera", "stops")
    )
    assert camera.keys() == stops.keys() == {(row, 27.0) for row in rows}
    for which, planned in stops.items():
        assert camera[which].config.differences(planned.config) == ["dwell_spread: 0.0 -> 0.75"]
        assert planned.data.name == "x27-dwell32-spread0.75"
        assert words(planned.data) == "×27 32 frames on average"


def test_methods_without_negatives_have_memories_too() -> None:
    plan = runs_of("negative-free", "short", seeds=(2,), biases=[27.0])
    found = {p.row.name: p.config for p in plan}
    for method in ("simsiam", "byol"):
        assert found[method].source == "stream"
        duel = found[f"{method}-memory-duel"]
        assert (duel.source, duel.memory_policy, duel.score) == ("memory", "duel", "exponential:0.05")
        assert duel.differences(found[f"{method}-memory-oracle"]) == ["policy: duel -> oracle"]
        assert duel.differences(found[f"{method}-memory-fifo"]) == ["policy: duel -> fifo"]


def test_digits_are_measured_while_they_train() -> None:
    config = runs_of("figure3", "digits")[0].config
    assert config.knn_every == config.log_every == 20


def test_a_row_differs_from_its_rival_in_the_policy_only() -> None:
    """At equal budget: the same memory, batches and encodings."""
    plan = {p.row.name: p.config for p in runs_of("rivals", "short", seeds=(0,))}
    changed = plan["d-simclr-ours"].differences(plan["simclr-memory-reservoir"])
    assert changed == ["method: d-simclr -> simclr", "policy: duel -> reservoir"]


def test_a_choice_without_runs_is_an_error() -> None:
    with pytest.raises(UserError, match="no run of table2 has biases 5"):
        runs_of("table2", "smoke", biases=(5.0,))
    with pytest.raises(UserError, match="no run of framework has rows moco-cold"):
        runs_of("framework", "short", rows=("moco-cold",))


def test_a_small_scale_bounds_the_queue_too() -> None:
    (run,) = runs_of("table2", "smoke", rows=["d-moco-ours"], biases=[27.0])
    assert run.config.memory_size == run.config.queue == 128


def test_the_paper_scale_is_the_paper_s_recipe() -> None:
    config = runs_of("table2", "paper", rows=("d-moco-literal",), biases=(27.0,))[0].config
    assert (config.backbone, config.steps, config.lr, config.temperature) == ("resnet50", 40_000, 0.05, 0.7)
    assert (config.augment, config.score, config.memory_size, config.refresh) == ("paper", "linear", 2048, 0)


def test_unknown_names_are_told() -> None:
    with pytest.raises(UserError, match="did you mean 'table2'"):
        runs_of("tabel2", "short")
    with pytest.raises(UserError, match="did you mean 'short'"):
        runs_of("table2", "shrot")
    with pytest.raises(UserError, match="did you mean 'd-moco-ours'"):
        runs_of("table2", "short", rows=("d-moco-our",))


# The runner -------------------------------------------------------------------------------------------------


def test_a_run_leaves_one_json_and_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    done = smoke(commit="abc123")
    assert done.complete
    assert names() == [runs_of("table2", "smoke", rows=("simclr",), biases=(27.0,))[0].name + ".json"]
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in said] == ["finished"]
    (record,) = store.load([Path("results")]).values()
    assert said[0]["probe"] == record.measure("probe")
    assert record.values["schema"] == store.SCHEMA
    assert record.values["row"] == "simclr"
    assert record.budget("steps") == record.config.steps
    assert record.budget("images_encoded") == 2 * 64 * record.config.steps
    steps, losses = record.over_time("loss")
    assert steps == [2, 4, 6, 8, 10]
    assert all(loss > 0 for loss in losses)
    assert record.over_time("inter_class_cosine")[0] == [4, 8, 10]
    assert record.values["commit"]
    assert not {"out", "root", "device"} & set(record.values["config"])
    assert not re.search(r"(/tmp|/home|/root|/work)", record.path.read_text())
    assert not Path("runs/reproduce", record.values["name"]).exists()
    before = record.path.read_bytes()
    assert smoke().complete
    assert capsys.readouterr().out == ""
    assert record.path.read_bytes() == before
    assert smoke(out="elsewhere", finished_in=("results",)).complete
    assert names("elsewhere") == []


class StopsAfterFour(StopRequest):
    """The time is up after four steps."""

    looks = 0

    @property
    def requested(self) -> bool:
        self.looks += 1
        if self.looks > 4:
            self.until = 0.0
        return super().requested


def test_a_cut_run_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call resumes; the result is, bit for bit, that of a run that was never cut."""
    smoke(out="whole")
    capsys.readouterr()
    monkeypatch.setattr(runner.SharedClock, "__call__", lambda clock: time.monotonic() / 2)
    with monkeypatch.context() as patch:
        patch.setattr("duel.loop.StopRequest", StopsAfterFour)
        done = smoke(minutes=60.0)
    assert not done.complete
    first = json.loads(capsys.readouterr().out)
    assert first["status"] == "cut"
    assert first["message"] == "stopped after step 4"
    assert names() == []
    assert smoke(minutes=60.0).complete
    (whole,), (resumed,) = store.load([Path("whole")]).values(), store.load([Path("results")]).values()
    assert resumed.values["evaluation"]["probe"] == whole.values["evaluation"]["probe"]
    assert resumed.over_time("loss") == whole.over_time("loss")
    assert resumed.budget("images_encoded") == whole.budget("images_encoded")
    assert whole.budget("share") == 1
    assert resumed.budget("share") == pytest.approx(0.5, abs=2e-2)


def test_no_run_is_begun_when_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    done = smoke(minutes=1e-9)
    assert (done.finished, done.total, done.failed) == (0, 1, 0)
    assert json.loads(capsys.readouterr().out)["status"] == "not started"
    assert not Path("runs/reproduce").exists()


def test_a_failing_run_is_recorded_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = execution.train

    def fails_at_27(config: TrainConfig, **given: object) -> object:
        if config.bias == 27:
            raise RuntimeError("out of luck")
        return real(config, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(execution, "train", fails_at_27)
    done = smoke(biases=(27.0, 1.0))
    assert (done.finished, done.total, done.failed) == (1, 2, 1)
    (error,) = Path("results/errors").glob("*.json")
    assert "out of luck" in json.loads(error.read_text())["error"]
    monkeypatch.setattr(execution, "train", real)
    assert smoke(biases=(27.0, 1.0)).complete
    assert not list(Path("results/errors").glob("*.json"))


def test_training_that_diverges_is_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = execution.train

    def astray(config: TrainConfig, **given: Any) -> RunResult:
        return real(dataclasses.replace(config, lr=1e30), **given)

    monkeypatch.setattr(execution, "train", astray)
    assert smoke().complete
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == "diverged"
    assert not Path("results/errors").exists()
    (record,) = store.failures([Path("results")]).values()
    assert record.failed == said["message"]
    assert re.fullmatch(r"diverged at step [2-9]", record.failed)
    assert not Path("runs/reproduce", record.values["name"]).exists()
    assert store.load([Path("results")]) == {}
    assert smoke().complete
    assert capsys.readouterr().out == ""
    smoke(dry_run=True)
    assert "1 of 1 finished, 1 diverged" in capsys.readouterr().out


def test_missing_data_are_said_once() -> None:
    with pytest.raises(UserError, match="cifar10 was not found at 'nowhere"):
        reproduce("table2", scale="short", root="nowhere", rows=["simclr"], device="cpu")
    assert not list(Path.cwd().iterdir())


def test_data_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(data: str, *, split: str, download: bool, **given: Any) -> str:
        asked.append((data, split, download))
        return data

    monkeypatch.setattr(inputs, "load", load)
    with inputs.keep_sources():
        runner._find_data(runs_of("table2", "short", free={"download": True}))
    assert asked == [("cifar10", "train", True), ("cifar10", "test", True)]


def test_the_command_passes_on_what_the_machine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def stand_in(what: str, **options: Any) -> runner.Done:
        given.update(options)
        return runner.Done(1, 1, 0, False)

    monkeypatch.setattr(runner, "reproduce", stand_in)
    options = ["--commit", "abc", "--work", "here", "--compile", "False", "--dry-run"]
    assert cli.main(["reproduce", "table2", *options, "--steps", "30", "--lr", "0.001"]) == 0
    assert (given["steps"], given["lr"]) == (30, 0.001)
    assert (given["commit"], given["work"], given["machine"]) == ("abc", "here", {"compile": False})
    assert cli.main(["reproduce", "table2", "--dry-run"]) == 0
    assert (given["commit"], given["work"], given["machine"]) == (None, "runs/reproduce", {"compile": None})


def test_a_lost_device_ends_the_process_s_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_clean_up", lambda: False)
    monkeypatch.setattr(execution, "train", lambda *args, **given: 1 / 0)
    done = smoke(biases=())
    assert (done.total, done.failed) == (4, 1)


def test_the_machine_s_settings_do_not_decide_the_result() -> None:
    with pytest.raises(UserError, match="got lr"):
        smoke(machine={"lr": 1.0, "graph": False})


def test_a_dry_run_prints_the_plan_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    smoke(dry_run=True, biases=())
    text = capsys.readouterr().out
    assert "4 runs" in text
    assert "x27 x1 x9 x3" in text
    assert not list(Path.cwd().iterdir())


def test_a_benchmark_that_cannot_be_read_stops_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("results").mkdir()
    Path("results/bench-step-x.json").write_text("{}")
    smoke(dry_run=True)
    assert "warning: results/bench-step-x.json cannot be read as a benchmark" in capsys.readouterr().out


class MortalPool:
    """Stands for the processes: the first two runs that are submitted together die, later ones finish."""

    made = 0

    def __init__(self, *args: object, **given: object) -> None:
        MortalPool.made += 1

    def shutdown(self, *, wait: bool) -> None:
        assert wait

    def submit(self, function: object, planned: Planned, job: object) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        if MortalPool.made == 1:
            future.set_exception(BrokenProcessPool("killed"))
        else:
            future.set_result(Outcome(planned, "cut", "it was the other pool"))
        return future


def test_a_process_that_dies_costs_only_the_runs_under_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "ProcessPoolExecutor", MortalPool)
    monkeypatch.setattr(MortalPool, "made", 0)
    done = smoke(jobs=2, biases=())
    assert done.failed == 2
    ends = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [end["status"] for end in ends] == ["failed", "failed", "cut", "cut"]
    assert "use fewer jobs" in ends[0]["message"]
    assert len(list(Path("results/errors").glob("*.json"))) == 2


class DeafPool(ProcessPoolExecutor):
    """Its processes hang whatever they are given."""

    def __init__(self, jobs: int, **given: Any) -> None:
        super().__init__(jobs, mp_context=given["mp_context"])

    def submit(self, *given: Any) -> Future[Any]:  # type: ignore[override]
        return super().submit(time.sleep, 600)


def test_processes_that_do_not_stop_in_time_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ProcessPoolExecutor", DeafPool)
    monkeypatch.setattr(runner, "GRACE", 0.1)
    job = Job(Path("results"), Path("work"), time.monotonic() + 1, 1, keep=False, quiet=True)
    hung, waiting = runner._side_by_side(runs_of("table2", "smoke", rows=["simclr"], biases=[1.0, 27.0]), job)
    assert (hung.status, waiting.status) == ("failed", "not started")
    assert hung.message.startswith("did not stop in time")
    (error,) = Path("results/errors").glob("*.json")
    assert "did not stop in time" in json.loads(error.read_text())["error"]
    # join() does not say so reliably: a thread of the pool may have met the dead process first
    left, until = multiprocessing.active_children(), time.monotonic() + 60
    while any(process.is_alive() for process in left) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(process.is_alive() for process in left)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes by their group")
def test_processes_of_a_call_that_was_killed_save_and_end(tmp_path: Path) -> None:
    command = "reproduce table2 --scale smoke --rows simclr --biases 27 --jobs 2 --steps 100000 --device cpu"
    call = subprocess.Popen(
        [sys.executable, "-m", "duel", *command.split()], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(lambda: any(log.read_text() for log in tmp_path.glob("runs/reproduce/*/metrics.csv")))
        call.kill()
        call.wait()
        _wait_for(lambda: not _in_group(call.pid))
    finally:
        for process in _in_group(call.pid):
            os.kill(process, signal.SIGKILL)
    assert list(tmp_path.glob("runs/reproduce/*/checkpoints/*"))


def _wait_for(what: Callable[[], bool], seconds: float = 140) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def _in_group(group: int) -> list[int]:
    """Processes of a group that are still running."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_two_processes_give_what_one_gives() -> None:
    assert smoke(jobs=2, biases=(1.0, 27.0), out="two").complete
    assert smoke(biases=(1.0, 27.0), out="one").complete
    one, two = store.load([Path("one")]), store.load([Path("two")])
    assert one.keys() == two.keys()
    for key, record in one.items():
        assert record.values["evaluation"]["probe"] == two[key].values["evaluation"]["probe"]
        assert 0.5 <= (two[key].budget("share") or 0) <= 1


@pytest.mark.parametrize(
    ("device", "steps", "jobs", "given", "compiled"),
    [
        ("cuda", 5000, 1, None, False),  # it would take longer than it saves
        ("cuda", 5000, 6, None, True),  # the others go on meanwhile
        ("cuda", 500, 6, None, False),
        ("cuda", 40_000, 1, None, True),
        ("cuda", 40_000, 6, False, False),
        ("cuda", 500, 6, True, True),
        ("cpu", 40_000, 6, None, False),
    ],
)
def test_what_shares_a_gpu_is_compiled_sooner(monkeypatch, device, steps, jobs, given, compiled) -> None:
    monkeypatch.setattr(execution, "resolve_device", torch.device)
    monkeypatch.setattr("shutil.which", lambda name: name)
    config = TrainConfig(device=device, steps=steps, compile=given)
    found = execution._on_this_machine(config, Path("run"), jobs)
    wanted = worth_compiling(steps, torch.device(device)) if found.compile is None else found.compile
    assert (found.out, wanted) == ("run", compiled)
    assert fingerprint(found) == fingerprint(config)


# The budget -------------------------------------------------------------------------------------------------


def test_a_run_s_share_of_the_device_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("duel.reproduce.sharing.time", SimpleNamespace(monotonic=lambda: now))
    clock, of_another_call = SharedClock(Path("clock")), SharedClock(Path("clock"))
    with clock.at_work():
        first = clock()
        now = 110.0
        with of_another_call.at_work():
            second = clock()
            now = 120.0
            assert clock() - second == 5
            assert of_another_call() == clock()
        now = 126.0
        assert clock() - first == 10 + 5 + 6
    before = clock()
    now = 500.0
    with clock.at_work():
        assert clock() == before  # nobody was at work
        now = 3.0
        assert clock() == before  # the machine was restarted
        now = 4.0
        assert clock() == before + 1


def test_a_process_that_died_at_work_has_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("duel.reproduce.sharing.time", SimpleNamespace(monotonic=lambda: now))
    died = multiprocessing.get_context("spawn").Process(target=int)
    died.start()
    died.join()
    Path("clock").write_text(json.dumps([7.0, 100.0, [died.pid]]))
    clock = SharedClock(Path("clock"))
    with clock.at_work():
        now = 110.0
        assert clock() == 17.0
    Path("clock").write_text("[7.0, 1")  # cut off
    with clock.at_work():
        now = 112.0
        assert clock() == 2.0
        Path("clock").unlink()


def test_gpu_seconds_are_the_run_s_share() -> None:
    attempt = {"hardware": {"gpu": "G"}}
    runs.write_json(Path(runs.META), {"attempts": [attempt], "budget": {"seconds": 40.0}})
    result = RunResult(Path(), 10, True, seconds=40.0, device_seconds=12.0)
    budget = execution._budget(Path(), result, 4, {"seconds": 3.0})
    assert budget == {"seconds": 40.0, "jobs": 4, "share": 0.3, "gpu_seconds": 12.0, "evaluation_seconds": 3.0}


def test_peak_memory_is_the_run_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"init": None, "reset_peak_memory_stats": None, "memory_allocated": 3 << 30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    peak = PeakMemory(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 << 30)
    assert peak.mib() == 2048
    assert PeakMemory(torch.device("cpu")).mib() is None


# The store and the estimate ---------------------------------------------------------------------------------


def fake(config: TrainConfig, /, folder: Path = Path("results"), **values: object) -> store.Record:
    path = store.write(
        folder,
        f"fake-{fingerprint(config)}",
        {
            "row": "simclr", "scale": "short", "seed": config.seed, "config": config.identity(),
            "evaluation": {"probe": float("nan")}, "hardware": {}, "versions": {}, "metrics": {"step": []},
            "budget": {"steps": 100, "seconds": 20.0, "jobs": 2, "evaluation_seconds": 4.0}, **values,
        },
    )  # fmt: skip
    return store.read(path)


def test_settings_that_came_later_do_not_hide_finished_runs() -> None:
    config = TrainConfig(steps=100)
    older = {k: v for k, v in config.identity().items() if k not in ("at_once", "fresh_keys")}
    record = fake(config, config=older)
    assert record.hash == fingerprint(config)
    assert record.measure("probe") is None  # NaN is not JSON


def test_the_hash_is_of_what_decides_the_result() -> None:
    config = TrainConfig()
    same = dataclasses.replace(config, out="x", root="y", device="cpu", log_every=3, graph=False, knn_every=7)
    assert fingerprint(same) == fingerprint(config)
    assert fingerprint(dataclasses.replace(config, bias=1)) == fingerprint(config)
    for change in (
        {"seed": 1},
        {"bias": 3.0},
        {"lr": 0.1},
        {"method": "moco"},
        {"weights": (1.0,), "bias_kind": "weights"},
    ):
        assert fingerprint(dataclasses.replace(config, **change)) != fingerprint(config)


def test_the_class_at_the_head_of_a_long_tail_decides_the_result() -> None:
    first = TrainConfig(bias=100, bias_kind="longtail")
    assert fingerprint(first) == "8ea5716f1d"  # as in files of before
    assert fingerprint(dataclasses.replace(first, bias_class=9)) != fingerprint(first)


def test_another_learning_rate_is_another_run() -> None:
    plain, slow = (runs_of("table2", "smoke", variation=Variation(lr=lr)) for lr in (None, 0.02))
    assert {run.config.lr for run in slow} == {0.02}
    assert not {run.hash for run in slow} & {run.hash for run in plain}


def test_raw_pixels_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = measure_pixels("smoke", tmp_path, progress=False)
    assert path == tmp_path / "pixels-digits.json"
    written = path.read_text()
    found = store.pixels([tmp_path], "digits")
    assert found is not None
    assert found["protocol"]["settings"]["probe_epochs"] == SCALES["smoke"].evaluation.probe_epochs
    train, test = (load("digits", split=split) for split in ("train", "test"))
    mean, std = (torch.tensor(values)[:, None, None] for values in statistics(train))
    seen, unseen = (((s.images(torch.arange(len(s))) / 255 - mean) / std).flatten(1) for s in (train, test))
    nearest = (torch.nn.functional.normalize(unseen) @ torch.nn.functional.normalize(seen).T).argmax(1)
    hits = train.labels[nearest] == test.labels
    assert found["top1_test_to_train"] == pytest.approx(hits.double().mean())
    assert json.loads(written)["data"] == "digits"
    assert measure_pixels("smoke", tmp_path, progress=False) == path
    assert path.read_text() == written
    monkeypatch.setitem(SCALES, "smoke", dataclasses.replace(SCALES["smoke"], evaluation=EvaluationSettings(shots=2)))  # type: ignore[arg-type]
    measure_pixels("smoke", tmp_path, progress=False)  # as another scale measures them
    assert json.loads(path.read_text())["evaluation"]["used"]["shots"] == 2
    assert store.pixels([tmp_path], "cifar10") is None


def test_settings_that_do_nothing_in_a_run_do_not_make_it_another() -> None:
    simclr, moco = TrainConfig(steps=9), TrainConfig(steps=9, method="moco")
    duel = dataclasses.replace(moco, method="d-moco")

    def changed(config: TrainConfig, **changes: object) -> bool:
        return fingerprint(dataclasses.replace(config, **changes)) != fingerprint(config)  # type: ignore[arg-type]

    assert not changed(simclr, score="linear", memory_size=7, admit="compete", epochs=1.0, recipe="mine")
    assert not changed(simclr, bias_mode="subset", bias_class=3, bias_kind="longtail")
    assert not changed(moco, score="linear", at_once=True, admit="compete", policy="fifo")
    assert not changed(duel, policy="duel")
    assert fingerprint(duel) == fingerprint(dataclasses.replace(moco, policy="duel")) != fingerprint(moco)
    first = dataclasses.replace(duel, source="memory")
    assert changed(first, queue=64)
    assert changed(duel, fresh_keys=True)
    assert changed(first, space="backbone")
    assert not changed(dataclasses.replace(first, policy="reservoir"), space="backbone")  # compares nothing
    assert changed(dataclasses.replace(first, policy="adaptive"), adaptive_target=0.01)
    assert all(changed(moco, **{name: value}) for name, value in {"memory_size": 7, "refresh": 5, "max_age": 3}.items())
    assert all(changed(duel, **{name: value}) for name, value in {"score": "linear", "admit": "compete"}.items())
    biased = dataclasses.replace(simclr, bias=3.0)
    assert all(changed(biased, **{k: v}) for k, v in {"bias_mode": "subset", "bias_class": 3}.items())


def test_a_damaged_or_foreign_result_is_named() -> None:
    record = fake(TrainConfig())
    record.path.write_text(record.path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(UserError, match=r"^results/runs/.* has schema 99"):
        store.load([Path("results")])
    record.path.write_text("{")
    with pytest.raises(UserError, match=re.escape(record.path.name)):
        store.load([Path("results")])
    for changes in (
        {"budget": {"steps": 100, "seconds": 20.0}},
        {"evaluation": {"probe": "good"}},
        {"evaluation": None},
        {"metrics": {}},
        {"hardware": None},
    ):
        with pytest.raises(UserError, match=rf"{record.path.name} cannot be read as a run's result"):
            fake(TrainConfig(), **changes)
    failed = fake(TrainConfig(), failed="diverged at step 3", evaluation=None, budget=None)
    assert failed.failed == "diverged at step 3"


def test_the_estimate_comes_from_the_nearest_finished_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(steps=1000)
    near = fake(config)
    far = fake(
        TrainConfig(steps=100, method="moco", symmetric=True),
        budget={"steps": 100, "seconds": 60.0, "jobs": 3, "share": 0.5, "evaluation_seconds": 4.0},
        hardware={"gpu": "G"},
    )
    here = 20 * 10 + 4
    assert seconds_of(config, [near, far]) == Estimate(pytest.approx(here), None)
    assert seconds_of(config, [near], "another") == Estimate(pytest.approx(here), None)
    monkeypatch.setattr("os.cpu_count", lambda: 4)  # each process has a core of its own
    for jobs, at_once in ((2, 2), (6, 4)):
        assert seconds_of(config, [near], jobs=jobs) == Estimate(pytest.approx(here / at_once), None)
        assert seconds_of(config, [far], jobs=jobs) == seconds_of(config, [far])  # a GPU, as it was shared then
    assert seconds_of(config, [far]) == Estimate(pytest.approx(60 * 0.5 * 10 / 2 + 2), "G")  # half as many images
    assert seconds_of(TrainConfig(steps=100, backbone="resnet50"), [near, far]) is None
    byol = TrainConfig(steps=100, method="byol")
    assert seconds_of(byol, [near, dataclasses.replace(far, values={**far.values, "hardware": {}})]) == Estimate(
        pytest.approx(60 + 4), None
    )


def test_where_nothing_has_run_benchmarked_steps_say_how_long(tmp_path: Path) -> None:
    plan = runs_of("table2", "paper", rows=("moco", "d-moco-literal"), biases=(27.0,))
    differing = TrainConfig().as_dict()
    rows = [
        {
            "name": p.row.name,
            "ms": ms,
            "settings": {k: v for k, v in p.config.as_dict().items() if v != differing[k]} | {"data": "synthetic"},
        }
        for p, ms in zip(plan, (15.0, 30.0), strict=True)
    ]
    rows += [{**rows[0], "ms": 99.0, "settings": {**rows[0]["settings"], "memory_size": 65536}}, {"name": "failed"}]
    (tmp_path / "bench-step-g.json").write_text(json.dumps({"hardware": {"gpu": "G"}, "rows": rows}))
    found = store.steps([tmp_path])
    assert len(found) == 3
    lines = plan_lines(plan, {}, Path(), jobs=1, steps=found)
    assert [line.split("about ")[1] for line in lines[1:3]] == ["10.0 min as on G", "20.0 min as on G"]
    (tmp_path / "bench-step-g.json").write_text("[]")
    with pytest.raises(UserError, match="bench-step-g"):
        store.steps([tmp_path])


def test_the_plan_says_how_long_each_seed_takes_and_where() -> None:
    plan = runs_of("table2", "short", rows=("simclr",), biases=(1.0, 27.0), seeds=(0, 1))
    lines = plan_lines(plan, {}, Path(), jobs=1)
    assert lines[0].endswith("0 are finished; to go: 4 of unknown length")
    assert lines[-1] == "seed 1: 2 runs to go, 2 of unknown length"
    one = fake(plan[0].config, hardware={"gpu": "G"}, budget={
        "steps": 5000, "seconds": 230.0, "jobs": 4, "share": 0.25, "evaluation_seconds": 10.0
    })  # fmt: skip
    lines = plan_lines(plan, {one.hash: one}, Path(), jobs=1)
    assert lines[0].endswith("1 are finished; to go: about 3.0 min as on G")
    assert lines[-3:] == [
        "these times are those of G: without a GPU it takes many times as long",
        "seed 0: 1 runs to go, about 1.0 min as on G",
        "seed 1: 2 runs to go, about 2.0 min as on G",
    ]


def test_the_commit_may_be_told_where_git_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.COMMIT_VARIABLE, "f00d")
    monkeypatch.setenv("PATH", "")
    assert runs.describe(torch.device("cpu"))["commit"] == "f00d"


def test_raw_pixels_of_a_scale_that_resizes_images_are_of_that_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized = dataclasses.replace(SCALES["smoke"], settings={**SCALES["smoke"].settings, "image_size": 4})
    monkeypatch.setitem(SCALES, "smoke", resized)  # type: ignore[arg-type]
    path = measure_pixels("smoke", tmp_path, progress=False)
    assert path == tmp_path / "pixels-digits-4px.json"
    assert store.pixels([tmp_path], "digits") is None
    found = store.pixels([tmp_path], "digits-4px")
    assert found is not None
    assert 0.8 < found["top1_test_to_train"] < 0.975  # 8 pixels have 97.6
    assert SCALES["tiny"].images == "cifar10-16px"
    assert {planned.config.image_size for planned in runs_of("all", "tiny")} == {16}
    assert max(planned.config.memory_size for planned in runs_of("all", "tiny")) == 8192
