"""What is run for each grid at each scale. No torch here: the command line reads the names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import TrainConfig
from ..errors import UserError, suggest
from ..evaluation.settings import EvaluationSettings
from .fingerprint import fingerprint
from .grids import GRIDS, TUNING, Data, grids_of
from .rows import ROWS, Row


@dataclass(frozen=True)
class Scale:
    """How large a run is. `settings` override the recipe's; `largest_memory` bounds every memory.

    `more_seeds`: for grids that ask for more than `seeds`. `tuned_on`: seeds on which our settings were chosen. Only
    the grid "tuning" has them; all else takes fresh ones.
    """

    name: str
    data: str
    recipe: str
    seeds: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    largest_memory: int | None = None
    small_memory: int = 1024
    """Of the rows with a small one; a batch must fit."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    more_seeds: tuple[int, ...] = ()
    tuned_on: tuple[int, ...] = ()
    in_part: bool = False
    """It is there for single questions: the page leaves out what has not been run."""

    @property
    def images(self) -> str:
        """The images that encoders see, in a word: the data, and their size where they are resized."""
        size = self.settings.get("image_size")
        return self.data if size is None else f"{self.data}-{size}px"

    def varied(self, variation: Variation) -> Scale:
        return dataclasses.replace(self, settings={**self.settings, **variation.settings})


@dataclass(frozen=True)
class Variation:
    """What is not as the scale has it; None: as it has it. Such runs have a section of their own."""

    steps: int | None = None
    lr: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def words(self) -> str:
        """To follow the scale's name."""
        length = "" if self.steps is None else f", {self.steps:,} steps"
        return length + ("" if self.lr is None else f", learning rate {self.lr:g}")


OWN = Variation()
"""The scale as it is."""


SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "digits",
            "demo",
            (0,),
            {"steps": 10, "batch_size": 64, "log_every": 2, "checkpoint_every": 1000, "knn_every": 4, "device": "auto"},
            largest_memory=128,
            small_memory=64,
            evaluation=EvaluationSettings(probe_epochs=5, shot_repeats=2, neighbours=20),
        ),
        Scale(
            "digits",
            "digits",
            "demo",
            (0, 1, 2, 3, 4),
            {"log_every": 20, "checkpoint_every": 1000, "knn_every": 20, "device": "auto"},
            largest_memory=256,
            small_memory=128,
        ),
        Scale(
            "tiny",
            "cifar10",
            "standard",
            (0, 1, 2),
            {
                **{"backbone": "convnet", "image_size": 16, "steps": 1500},
                **{"log_every": 50, "checkpoint_every": 500, "knn_every": 500, "tensorboard": False},
            },
            largest_memory=8192,
            more_seeds=(3, 4),
            in_part=True,
        ),
        Scale(
            "short",
            "cifar10",
            "standard",
            (2, 3, 4),
            {"steps": 5000, "log_every": 100, "checkpoint_every": 2500, "knn_every": 1000, "tensorboard": False},
            more_seeds=(5, 6),
            tuned_on=(0, 1),
        ),
        Scale(
            "paper",
            "cifar10",
            "paper",
            (0,),
            {"log_every": 400, "checkpoint_every": 4000, "knn_every": 4000, "tensorboard": False},
        ),
    )
}


@dataclass(frozen=True)
class Planned:
    """One run: a row on one kind of data, with one seed, at one scale."""

    row: Row
    data: Data
    scale: Scale
    config: TrainConfig

    @property
    def hash(self) -> str:
        return fingerprint(self.config)

    @property
    def name(self) -> str:
        """A readable name with the hash: of the run directory and of the result file."""
        c = self.config
        return f"{self.scale.name}-{c.data}-{c.backbone}-{self.row.name}-{self.data.name}-seed{c.seed}-{self.hash}"


def runs_of(
    what: str | Sequence[str],
    scale: str,
    *,
    seeds: Sequence[int] | None = None,
    rows: Sequence[str] = (),
    biases: Sequence[float] = (),
    variation: Variation = OWN,
    free: Mapping[str, Any] | None = None,
) -> list[Planned]:
    """The runs of grids (or "all"), seed by seed, what matters most first, so that a plan cut short is worth most.

    seeds: the scale's, if none are given. rows, biases: only these, of each seed in the order of the rows. free:
    settings of the machine (root, device, ...), for every run.
    """
    if scale not in SCALES:
        raise UserError(suggest("scale", scale, SCALES))
    grids = grids_of(what)
    for row in rows:
        if row not in ROWS:
            raise UserError(suggest("row", row, ROWS))
    size = SCALES[scale].varied(variation)
    chosen: dict[str, Planned] = {}
    for seed in (*size.seeds, *size.more_seeds, *size.tuned_on) if seeds is None else seeds:
        for name in grids:
            if seeds is None and seed not in seeds_of(name, size):
                continue
            for data, row in GRIDS[name].runs():
                if (rows and row not in rows) or (biases and data.bias not in biases):
                    continue
                planned = plan_run(ROWS[row], data, size, seed, free or {})
                chosen.setdefault(planned.hash, planned)  # grids share rows
    if not chosen:
        asked = [
            f"{name} {', '.join(map(str, given))}" for name, given in (("rows", rows), ("biases", biases)) if given
        ]
        raise UserError(
            f"no run of {', '.join(grids)} has {' and '.join(asked)}; --dry-run without them shows what there is"
        )
    found = list(chosen.values())
    if not rows:
        return found
    order = list(dict.fromkeys(planned.config.seed for planned in found))
    return sorted(found, key=lambda planned: (order.index(planned.config.seed), rows.index(planned.row.name)))


def seeds_of(grid: str, scale: Scale) -> tuple[int, ...]:
    if grid == TUNING and scale.tuned_on:
        return scale.tuned_on
    return (*scale.seeds, *scale.more_seeds)[: max(len(scale.seeds), GRIDS[grid].seeds)]


def set_aside(what: str | Sequence[str], scale: str, seeds: Sequence[int]) -> str | None:
    """What to say of seeds whose runs the page will not show among the others, if there are any."""
    tuned_on, grids = SCALES[scale].tuned_on, grids_of(what)
    if not any(tuned_on and all((seed in tuned_on) != (grid == TUNING) for grid in grids) for seed in seeds):
        return None
    words = ", ".join(map(str, tuned_on))
    return f"note: our settings were chosen on seeds {words}; the page has them in the tuning's table, others elsewhere"


def plan_run(row: Row, data: Data, scale: Scale, seed: int, free: Mapping[str, Any]) -> Planned:
    config = row.config(scale.recipe, scale.data)
    changes: dict[str, Any] = {**scale.settings, **data.settings(), "seed": seed, **free}
    if config.has_memory:
        changes |= _bounded(config, row, scale)
    planned = Planned(row, data, scale, dataclasses.replace(config, **changes))
    if row.as_many_as is None:
        return planned
    other = plan_run(ROWS[row.as_many_as], data, scale, seed, free)
    steps = _steps_for(planned.config, encoded_images(other.config))
    return dataclasses.replace(planned, config=dataclasses.replace(planned.config, steps=steps))


def _bounded(config: TrainConfig, row: Row, scale: Scale) -> dict[str, Any]:
    """The settings of a memory that are too large for the scale."""
    changes: dict[str, Any] = {}
    largest, slots = scale.largest_memory, scale.small_memory if row.small else scale.largest_memory
    if slots is not None:
        memory = min(config.memory_size, slots)
        changes |= {"memory_size": memory, "refresh": min(config.refresh, memory // 2)}
    if largest is not None:
        changes["queue"] = min(config.queue, largest)
    return changes


def images_per_step(config: TrainConfig) -> int:
    """Images that a step encodes, by whatever encoder."""
    from ..benchmarks.floor import images_of  # loads torch

    return sum(images_of(config))


def encoded_images(config: TrainConfig) -> int:
    """Images that a run of so many steps encodes, the filling of its memory and queue included."""
    return images_per_step(config) * (config.steps or 0) + _to_fill(config)


def _steps_for(config: TrainConfig, images: int) -> int:
    return round((images - _to_fill(config)) / images_per_step(config))


def _to_fill(config: TrainConfig) -> int:
    if not config.has_memory:
        return 0
    return (config.memory_size if config.memory_encoded else 0) + config.queue
