"""The grids: which rows each table or figure holds against each other, on which kinds of data. No torch here: the
command line reads the names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, suggest
from .paper import BIASES
from .rows import ROWS, SCORES, longer


@dataclass(frozen=True)
class Data:
    """How the stream is biased."""

    bias: float = 1.0
    kind: str = "dominant"
    mode: str = "draw"
    dwell: int = 1
    spread: float = 0.0
    """Of the dwell."""

    @property
    def name(self) -> str:
        """×27, ×27 subset, longtail 100 ..., as file names have it."""
        parts = [
            "longtail" if self.kind == "longtail" else "",
            f"x{self.bias:g}",
            "subset" * (self.mode == "subset"),
            f"dwell{self.dwell}" if self.dwell > 1 else "",
            f"spread{self.spread:g}" if self.spread else "",
        ]
        return "-".join(part for part in parts if part)

    def settings(self) -> dict[str, Any]:
        return {
            **{"bias": self.bias, "bias_kind": self.kind, "bias_mode": self.mode},
            **{"dwell": self.dwell, "dwell_spread": self.spread},
        }


@dataclass(frozen=True)
class Grid:
    """Rows times kinds of data."""

    about: str
    rows: tuple[str, ...]
    data: tuple[Data, ...]
    balanced: tuple[str, ...] = ()
    """Rows that are run on balanced data too, for the gap to it."""
    seeds: int = 0
    """As many at least, where the scale has them."""
    new: tuple[str, ...] = ()
    """Without a run of one of these the page does not show it: another grid has the rest."""

    def runs(self) -> list[tuple[Data, str]]:
        """Kinds of data and rows, what matters most first: the largest bias, then balanced data, then the rest."""
        kinds = dict.fromkeys([*self.data, *([Data()] if self.balanced else [])])
        largest = max(data.bias for data in kinds)
        order = sorted(kinds, key=lambda data: (data.bias != largest, data.bias != 1, -data.bias))
        return [(data, row) for data in order for row in self.rows if data in self.data or row in self.balanced]


DRAWN = tuple(Data(bias) for bias in BIASES)
_ENDS = (DRAWN[0], DRAWN[-1])
DWELL = 32
"""Frames of an image in the grids "camera" and "stops": about a second of a video."""
SPREAD = 0.75
"""Of the dwell in the grid "stops". A tail with the exponent 4/3: it has a mean, and no variance."""
_METHODS = ("simclr", "moco")
_PLAIN_AND_D = tuple(name for m in _METHODS for name in (m, f"d-{m}-literal", f"d-{m}-ours"))
_PAIRED = 5  # seeds of the grids that say what our form gives and what others do


def _each(*patterns: str) -> tuple[str, ...]:
    """`{}` stands for each of the two methods."""
    return tuple(pattern.format(m) for m in _METHODS for pattern in patterns)


_SMALL = _each("d-{}-ours-small")
_PIXELS = ("d-{}-pixels", "{}-memory-minred-pixels", "{}-memory-dedup-pixels")
"""At the plain method's cost: nothing is encoded for the memory."""
_MEMORIES = tuple(f"{{}}-memory-{policy}" for policy in ("fifo", "reservoir", "distinct", "minred"))
"""Others in the place of DUEL's."""
_COMPARED = ("d-{}-few", "{}-memory-minred", "{}-memory-distinct", "{}-memory-oracle")
"""With ours on data in which there are no exact copies, or few."""
TUNING = "tuning"
GRIDS: Mapping[str, Grid] = {
    "table1": Grid("Top-k accuracy", (*_PLAIN_AND_D, "simsiam"), DRAWN),
    "table2": Grid("linear probe", _PLAIN_AND_D, DRAWN),
    "thumbnails": Grid(
        "ours with a memory that nothing is encoded for",
        _each("{}", "d-{}-ours", "d-{}-pixels"),
        DRAWN,
        new=_each("d-{}-pixels"),
    ),
    "ablation": Grid(
        "score functions at ×27",
        _each("d-{}-literal") + tuple(f"d-{m}-{score.replace(':', '')}" for m in _METHODS for score in SCORES),
        DRAWN[-1:],
    ),
    "resources": Grid("time and memory at ×27", (*_PLAIN_AND_D, "simsiam"), DRAWN[-1:]),
    "framework": Grid(
        "gap recovered at ×27",
        _each("{}", "d-{}-ours", "d-{}-stream", "{}-memory-fifo", "{}-memory-oracle", "{}-stream-oracle"),
        _ENDS,
        seeds=_PAIRED,
    ),
    "rivals": Grid(
        "other memories and losses, for as many steps as ours or (longer) as many images",
        (
            *_each("{}", "d-{}-ours", *_PIXELS, *_MEMORIES, "{}-temperature"),
            "simclr-debiased",
            "simclr-debiased-warm",
            *(name for name, row in ROWS.items() if row.as_many_as),
        ),
        DRAWN[-1:],
        balanced=(*_METHODS, *map(longer, _METHODS)),
        seeds=_PAIRED,
    ),
    "controls": Grid(
        "what each part gives at ×27",
        (
            *("simclr-fifo", "moco-refresh", "d-simclr-literal-augmented"),
            *("d-moco-in-batch", "d-moco-printed", "d-moco-literal-4096"),
            *_each(
                *(f"d-{{}}-{change}" for change in ("at-once", "compete", "adaptive", "wide", "few", "ours-linear"))
            ),
        ),
        DRAWN[-1:],
        seeds=_PAIRED,
    ),
    TUNING: Grid(
        "how the recommended memory is found, at ×27, from 4,096 slots (where a scale allows so many)",
        (*_each("{}", "d-{}-ours"), "moco-cold", *(name for name in ROWS if "-tune-" in name)),
        DRAWN[-1:],
        balanced=(*_METHODS, "moco-cold"),
    ),
    "negative-free": Grid(
        "methods without negatives",
        tuple(
            f"{m}{form}" for m in ("simsiam", "byol") for form in ("", "-memory-fifo", "-memory-duel", "-memory-oracle")
        ),
        _ENDS,
    ),
    "subset": Grid(
        "a fixed subset",
        (*_PLAIN_AND_D, *_SMALL, *_each("d-{}-wide", *_COMPARED, *_PIXELS)),
        tuple(Data(bias, mode="subset") for bias in BIASES[1:]),
    ),
    "longtail": Grid(
        "exponential long tail, ratio 100",
        (*_PLAIN_AND_D, *_SMALL, *_each(*_COMPARED, *_PIXELS)),
        (Data(100.0, "longtail"), Data(100.0, "longtail", "subset")),
    ),
    "camera": Grid(
        f"a stream that shows each image as {DWELL} nearly identical frames in a row",
        _each(
            *("{}", "d-{}-literal", "d-{}-ours", "d-{}-wide", "d-{}-few", *_PIXELS, *_MEMORIES, "{}-memory-oracle"),
        ),
        tuple(Data(bias, dwell=DWELL) for bias in (BIASES[0], BIASES[-1])),
        balanced=_METHODS,
    ),
    "stops": Grid(
        f"the same, but {DWELL} frames on average: most images are shown for fewer, a few for very many",
        _each("{}", "d-{}-literal", "d-{}-ours", "{}-memory-reservoir", *_COMPARED, *_PIXELS),
        tuple(Data(bias, dwell=DWELL, spread=SPREAD) for bias in (BIASES[0], BIASES[-1])),
        balanced=_METHODS,
    ),
    "figure3": Grid("cosines over training", ("moco", "d-moco-literal", "d-moco-ours"), DRAWN),
}


def grids_of(what: str | Sequence[str]) -> tuple[str, ...]:
    """The grids that one name or several stand for."""
    names = (what,) if isinstance(what, str) else tuple(what)
    for name in names:
        if name != "all" and name not in GRIDS:
            raise UserError(suggest("grid", name, ("all", *GRIDS)))
    return tuple(GRIDS) if "all" in names else names
