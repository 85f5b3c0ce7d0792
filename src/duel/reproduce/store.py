"""One JSON per run. Finished runs are found again by what they computed; `results/README.md` documents the schema.

RESULTS/runs/<name>-<hash>.json    a finished run, or one whose training diverged
RESULTS/errors/<name>-<hash>.json  the last accident of a run, which the next call tries again
RESULTS/pixels-<images>.json       what the images give without an encoder
RESULTS/bench-step-*.json          what `duel bench step` wrote: what rows cost, and how long steps take
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint import atomic
from ..config import TrainConfig
from ..errors import UserError, writing
from ..evaluation.report import has_fitted
from .fingerprint import fingerprint
from .rows import ROWS

SCHEMA = 1
RUNS, ERRORS = "runs", "errors"
AS_TRAINED = "as trained: "
#: What files without `share` have by another definition (results/README.md).
LATER_DEFINED = ("gpu_seconds", "peak_gpu_memory_mb")
STEPS = "bench-step-*.json"
PIXELS = "pixels-{}.json"
#: Rows whose cost `duel bench step` measures in the paper's setting, and their names there.
MEASURED = {"d-moco-literal": "D-MoCo 2,048, resnet50", "d-simclr-literal": "D-SimCLR 512, literal, resnet50"}


class Cost(NamedTuple):
    """Over the plain method's."""

    time: float
    memory: float
    how: str = ""
    """Where it is from, if not from runs."""


@dataclass(frozen=True)
class Record:
    """A run that came to an end, as it was written; rates are shares between 0 and 1."""

    path: Path
    values: Mapping[str, Any]
    config: TrainConfig
    hash: str
    """Of the config as this version reads it: settings that came later have their defaults, which change nothing."""

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def scale(self) -> str:
        return str(self.values["scale"])

    @property
    def failed(self) -> str | None:
        """How its training failed, for a run that has no `evaluation` and no `budget`."""
        return self.values.get("failed")

    @property
    def own_length(self) -> bool:
        """Whether its row, not its scale, says how long it was trained."""
        row = ROWS.get(self.values["row"])
        return row is not None and row.as_many_as is not None

    def fitted(self, measure: str) -> bool:
        """Whether its linear probe says something of the features; True for any other measure."""
        found, name = self._evaluation(measure)
        return name != "probe" or has_fitted(found)

    def measure(self, name: str) -> float | None:
        """A figure of the evaluation: probe, top1_test_to_train, ...; AS_TRAINED before it: with the BatchNorm
        statistics that training left."""
        found, name = self._evaluation(name)
        value = found.get(name)
        return None if value is None else float(value)

    def _evaluation(self, measure: str) -> tuple[Mapping[str, Any], str]:
        """Where a measure is found, and by what name."""
        whole = self.values["evaluation"]
        if measure.startswith(AS_TRAINED):
            return whole.get("without_reestimation", {}), measure.removeprefix(AS_TRAINED)
        return whole, measure

    def budget(self, name: str) -> float | None:
        """None also where an older file has it by another definition."""
        budget = self.values["budget"]
        if name in LATER_DEFINED and "share" not in budget:
            return None
        value = budget.get(name)
        return None if value is None else float(value)

    def over_time(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric, where it was logged."""
        metrics = self.values["metrics"]
        pairs = zip(metrics["step"], metrics.get(name, []), strict=False)
        found = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in found], [value for _, value in found]


def load(folders: Iterable[Path]) -> dict[str, Record]:
    """The finished runs of these result folders, by hash, in the order of their names; a later folder wins."""
    return {key: record for key, record in load_all(folders).items() if record.failed is None}


def failures(folders: Iterable[Path]) -> dict[str, Record]:
    """Likewise those whose training failed: nothing was measured, and running them again would not help."""
    return {key: record for key, record in load_all(folders).items() if record.failed is not None}


def load_all(folders: Iterable[Path]) -> dict[str, Record]:
    """Both."""
    found: dict[str, Record] = {}
    for folder in folders:
        for path in sorted((folder / RUNS).glob("*.json")):
            record = read(path)
            found[record.hash] = record
    return found


def costs(folders: Iterable[Path]) -> dict[str, Cost]:
    """By row, from the benchmarks of training steps that lie in these folders; the last by name wins."""
    found: dict[str, Cost] = {}
    for path in _benchmarks(folders):
        with _readable(path, "a benchmark"):
            rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
            for row, name in MEASURED.items():
                step = rows.get(name, {})
                plain = rows.get(step.get("plain"), {})
                if "ratio" in step and "peak_gb" in step and "peak_gb" in plain:  # not failed, and on a GPU
                    score = step["settings"].get("score", TrainConfig.score)
                    how = f", by the benchmark of training steps, score {score}"
                    found[row] = Cost(step["ratio"], step["peak_gb"] / plain["peak_gb"], how)
    return found


def pixels(folders: Iterable[Path], images: str) -> Mapping[str, Any] | None:
    """The evaluation of raw images (`Scale.images`), if some folder has one; the last wins."""
    found: Mapping[str, Any] | None = None
    for path in (folder / PIXELS.format(images) for folder in folders):
        if path.exists():
            with _readable(path, "an evaluation of raw images"):
                found = dict(json.loads(path.read_text(encoding="utf-8"))["evaluation"])
                _check_rates(found)
                dict(found["protocol"]["settings"])
    return found


def steps(folders: Iterable[Path]) -> list[Record]:
    """The steps that were benchmarked on made-up images, as runs of one step on CIFAR-10, whose shape these have."""
    found = []
    for path in _benchmarks(folders):
        with _readable(path, "a benchmark"):
            benchmark = json.loads(path.read_text(encoding="utf-8"))
            for row in benchmark["rows"]:
                if "ms" not in row or row["settings"].get("data") != "synthetic":
                    continue
                config = TrainConfig.from_dict(row["settings"] | {"data": "cifar10"})
                budget = {"steps": 1, "seconds": row["ms"] / 1e3, "evaluation_seconds": 0.0, "jobs": 1}
                values = {"hardware": row.get("hardware", benchmark["hardware"]), "budget": budget}
                found.append(Record(path, values, config, fingerprint(config)))
    return found


def _benchmarks(folders: Iterable[Path]) -> Iterator[Path]:
    return (path for folder in folders for path in sorted(folder.glob(STEPS)))


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as {kind} ({error!r}); restore it or move it away") from error


def read(path: Path) -> Record:
    with _readable(path, "a run's result"):
        values = json.loads(path.read_text(encoding="utf-8"))
        schema = values["schema"]
        if schema != SCHEMA:
            raise UserError(f"{path} has schema {schema!r}, this version reads {SCHEMA}; move it away")
        config = TrainConfig.from_dict(values["config"])
        _check(values)
    return Record(path, values, config, fingerprint(config))


def _check(values: Mapping[str, Any]) -> None:
    """Raises where a result lacks what is read of every one."""
    str(values["row"]), str(values["scale"])
    if values.get("failed") is None:
        _check_rates(values["evaluation"])
        for name in ("steps", "seconds", "evaluation_seconds"):
            float(values["budget"][name])
        list(values["metrics"]["step"]), dict(values["hardware"]), dict(values["versions"])


def _check_rates(evaluation: Mapping[str, Any]) -> None:
    """Raises where what should be a number is none."""
    for name, value in evaluation.items():
        if name.startswith(("probe", "knn", "top", "few_shot")) and value is not None:
            float(value)


def write(folder: Path, name: str, values: Mapping[str, Any]) -> Path:
    """A finished run. NaN becomes null."""
    path = folder / RUNS / f"{name}.json"
    write_whole(path, {"schema": SCHEMA, "name": name, **values})
    (folder / ERRORS / path.name).unlink(missing_ok=True)
    return path


def find(folder: Path, name: str) -> dict[str, Any] | None:
    """What `write` wrote, if it has."""
    path = folder / RUNS / f"{name}.json"
    return dict(read(path).values) if path.is_file() else None


def write_failure(folder: Path, name: str, config: TrainConfig, error: BaseException) -> Path:
    """What went wrong; the next call tries again."""
    path = folder / ERRORS / f"{name}.json"
    lines = "".join(traceback.format_exception(error))
    values = {
        "schema": SCHEMA,
        "name": name,
        "config": config.identity(),
        "error": f"{type(error).__name__}: {error}",
        "trace": lines[-4000:],
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_whole(path, values)
    return path


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Lines of metrics -> one list per metric; None where a line does not have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: float | None) -> float | None:
    """Six digits are more than a metric means."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.6g}")


def write_whole(path: Path, values: Mapping[str, Any]) -> None:
    """One line for each part, so that files stay small and differences readable; the whole file or none."""
    parts = [f"{json.dumps(k)}: {json.dumps(_finite(v), ensure_ascii=False)}" for k, v in values.items()]
    with writing(path, "make room or give another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as partial:
            partial.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
