"""The rows of the tables: which method, with which settings, held against which plain one. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import recipes
from ..config import MethodName, TrainConfig
from ..names import BLIND_POLICIES
from .fingerprint import MEMORY

Settings = Mapping[str, Any]


def _literal(memory_size: int) -> Settings:
    """The paper's form (Algorithm 2), whatever the recipe's own defaults are."""
    plain = {name: TrainConfig.__dataclass_fields__[name].default for name in MEMORY}
    return plain | {"policy": "duel", "score": "linear", "admit": "always", "memory_size": memory_size}


LITERAL: Mapping[str, Settings] = {"d-moco": _literal(2048), "d-simclr": _literal(512)}


def recommended(method: MethodName, source: recipes.Source) -> Settings:
    """The memory that the standard recipe recommends, to be used with any recipe."""
    config = recipes.standard(method, source=source)
    return {name: getattr(config, name) for name in MEMORY} | {"policy": config.memory_policy}


@dataclass(frozen=True)
class Row:
    """One line of a table, without its bias and seed."""

    name: str
    """Part of file names; unique."""
    label: str
    """What the page says."""
    method: MethodName
    """The method whose recipe the row starts from."""
    plain: str
    """The row of the same method without DUEL; its own name for a plain row."""
    settings: Settings = field(default_factory=dict)
    """What differs from the recipe."""
    paper: str | None = None
    """The row of the paper's tables that it re-does."""
    as_many_as: str | None = None
    """Trained for so many steps that it encodes as many images as this row, not for the scale's."""
    small: bool = False
    """With the scale's `small_memory`, so that it has to choose even from a fixed subset."""

    @property
    def baseline(self) -> str:
        """The plain row for as many steps, or for as long if it is trained for longer, which gaps are measured from."""
        return self.plain if self.as_many_as is None else longer(self.plain)

    def config(self, recipe: str, data: str) -> TrainConfig:
        return dataclasses.replace(
            recipes.recipe(recipe, method=self.method, data=data, source="stream"), **self.settings
        )


def longer(row: str) -> str:
    """The name of the same row, trained for as many images as ours."""
    return f"{row}-longer"


def _plain(name: MethodName, label: str) -> Row:
    return Row(name, label, name, name, paper=name)


SEEN: Settings = {"space": "pixels", "refresh": 0}
"""A memory for which nothing is encoded."""


def _variants(base: str, word: str) -> list[Row]:
    """The D-rows of one method and what they are compared with at equal budget."""
    method: Any = f"d-{base}"
    other = "moco" if base == "simclr" else "simclr"
    literal, ours, stream = LITERAL[method], recommended(method, "memory"), recommended(method, "stream")

    def memory_first(policy: str, label: str) -> Row:
        return Row(
            f"{base}-memory-{policy}",
            f"{word}, memory-first, {label}",
            method,
            base,
            {**ours, "method": base, "policy": policy},
        )

    def control(name: str, label: str, start: Settings, **changes: Any) -> Row:
        return Row(f"{method}-{name}", f"D-{word}, {label}", method, base, {**start, **changes})

    rows = [
        Row(f"{method}-literal", f"D-{word}, literal", method, base, literal, paper=method),
        Row(f"{method}-ours", f"D-{word}, ours", method, base, ours),
        Row(f"{method}-ours-small", f"D-{word}, ours but 1,024 slots (digits: 128)", method, base, ours, small=True),
        control("stream", "ours but stream-first", stream),
        memory_first("fifo", "FIFO"),
        memory_first("reservoir", "reservoir"),
        memory_first("minred", "MinRed"),
        *(
            Row(
                f"{base}-memory-{policy}-pixels",
                f"{word}, memory-first, {label} by thumbnails",
                method,
                base,
                {**ours, "method": base, "policy": policy, **SEEN},
            )
            for policy, label in (("minred", "MinRed"), ("dedup", "a threshold"))
        ),
        memory_first("distinct", "images known by their ids"),
        memory_first("oracle", "balanced by an oracle"),
        Row(
            f"{base}-stream-oracle",
            f"{word}, stream-first, memory balanced by an oracle",
            method,
            base,
            {**stream, "method": base, "policy": "oracle"},
        ),
        control("at-once", "ours, a batch evicted at once", ours, at_once=True),
        control("pixels", "ours, compared by thumbnails", ours, **SEEN),
        control("compete", "ours, newcomers compete", ours, admit="compete"),
        control("adaptive", "ours, adaptive width", ours, policy="adaptive"),
        control("wide", f"ours, score {WIDE}", ours, score=WIDE),
        control("ours-linear", "ours, score linear", ours, score="linear"),
        control("few", f"ours, a width for {FEW} duplicates", ours, policy="adaptive", adaptive_target=float(FEW)),
    ]
    first = {**ours, "memory_size": 4096, "refresh": 256, "space": "projection"}
    if base == "moco":
        first |= COLD
    tried = [
        control(name, f"tried: {label}", first, **changes)
        for name, (label, changes) in TUNING.items()
        if not ONLY[other].intersection(changes)
    ]
    rows += [dataclasses.replace(row, plain="moco-cold") if base == "moco" else row for row in tried]
    rows += [control(score.replace(":", ""), f"literal but score {score}", literal, score=score) for score in SCORES]
    return rows


_BASES: tuple[tuple[MethodName, str], ...] = (("simclr", "SimCLR"), ("moco", "MoCo v2"))
WIDE = "exponential:0.2"
"""Where images come again and again, as frames or of a fixed subset, the recommended score counts little but these."""
FEW = 8
"""Expected duplicates of the mean item: what the scores that serve on digits and on CIFAR-10 have in common is that
these are few, whatever the size of the memory. Chosen on digits, seeds 5 to 7."""
SCORES = ("quadratic", "gaussian:1", "gaussian:0.1", "exponential:0.05")
"""Of the ablation, besides linear, which is the literal row."""
TUNING: Mapping[str, tuple[str, Settings]] = {
    "tune-4096": ("as it was first", {}),
    "tune-oracle": ("balanced by an oracle", {"policy": "oracle"}),
    "tune-adaptive": ("adaptive width", {"policy": "adaptive"}),
    "tune-adaptive0.001": ("adaptive width, target 0.001", {"policy": "adaptive", "adaptive_target": 0.001}),
    "tune-gaussian0.1": ("score gaussian:0.1", {"score": "gaussian:0.1"}),
    "tune-gaussian0.03": ("score gaussian:0.03", {"score": "gaussian:0.03"}),
    "tune-exponential0.1": ("score exponential:0.1", {"score": "exponential:0.1"}),
    "tune-exponential0.02": ("score exponential:0.02", {"score": "exponential:0.02"}),
    "tune-stream512": ("512 items looked at per step", {"stream_batch": 512}),
    "tune-age64": ("nobody stays for more than 64 steps", {"max_age": 64}),
    "tune-refresh0": ("nothing encoded anew", {"refresh": 0}),
    "tune-refresh1024": ("1,024 slots encoded anew", {"refresh": 1024}),
    "tune-clean": ("clean views in memory", {"memory_view": "clean"}),
    "tune-augmented": ("augmented views in memory", {"memory_view": "augmented"}),
    "tune-backbone": ("compared by backbone features", {"space": "backbone"}),
    "tune-backbone-exponential0.1": (
        "compared by backbone features, score exponential:0.1",
        {"space": "backbone", "score": "exponential:0.1"},
    ),
    "tune-no-queue": ("its embeddings as negatives", {"queue": 0}),
    "tune-8192-stream512": ("8,192 slots, 512 items looked at per step", {"memory_size": 8192, "stream_batch": 512}),
    "tune-16384": ("16,384 slots", {"memory_size": 16384}),
    "tune-16384-backbone": (
        "16,384 slots, compared by backbone features",
        {"memory_size": 16384, "space": "backbone"},
    ),
    "tune-16384-backbone-stream512": (
        "16,384 slots, compared by backbone features, 512 items looked at per step",
        {"memory_size": 16384, "space": "backbone", "stream_batch": 512},
    ),
    "tune-32768-backbone": (
        "32,768 slots, compared by backbone features, 512 encoded anew",
        {"memory_size": 32768, "space": "backbone", "refresh": 512},
    ),
    "tune-32768-backbone-negatives": (
        "32,768 slots, compared by backbone features, 512 encoded anew, all of them negatives",
        {"memory_size": 32768, "space": "backbone", "refresh": 512, "memory_negatives": True},
    ),
    "tune-32768-oracle": (
        "32,768 slots, balanced by an oracle, 512 encoded anew",
        {"memory_size": 32768, "policy": "oracle", "refresh": 512},
    ),
    "tune-32768": ("32,768 slots, 512 encoded anew", {"memory_size": 32768, "refresh": 512}),
}
"""What else is tried for the recommended memory: one change at a time from 4,096 slots, and other sizes."""
COLD: Settings = {"warmup": 0.0}
"""MoCo as it was when its memory was chosen."""
ONLY: Mapping[str, frozenset[str]] = {"moco": frozenset({"queue"}), "simclr": frozenset({"memory_negatives"})}
"""Settings that one method alone has."""


def _without_negatives(base: MethodName, word: str) -> list[Row]:
    """Memory-first forms of a method that has no negatives."""
    first = recommended(base, "memory")
    labels = {"fifo": "FIFO", "duel": "DUEL", "oracle": "balanced by an oracle"}
    return [
        Row(f"{base}-memory-{policy}", f"{word}, memory-first, {label}", base, base, {**first, "policy": policy})
        for policy, label in labels.items()
    ]


def _longer(row: Row) -> Row:
    """A row that encodes less per step, at the cost of ours. Of a memory no more is encoded than its policy needs:
    nothing for one that compares nothing, newcomers alone for another."""
    cut: Settings = SEEN if row.settings.get("policy") in BLIND_POLICIES else {"refresh": 0}
    less = row.settings.get("refresh", 0) > 0 and cut is not SEEN
    return dataclasses.replace(
        row,
        name=longer(row.name),
        settings={**row.settings, **cut} if row.settings.get("source") == "memory" else row.settings,
        label=f"{row.label}{', nothing encoded anew' * less}, longer (as many images as ours)",
        paper=None,
        as_many_as=f"d-{row.plain}-ours",
    )


_ALL = [
    _plain("simclr", "SimCLR"),
    _plain("moco", "MoCo v2"),
    _plain("simsiam", "SimSiam"),
    Row("byol", "BYOL", "byol", "byol"),
    *_without_negatives("simsiam", "SimSiam"),
    *_without_negatives("byol", "BYOL"),
    *_variants("simclr", "SimCLR"),
    *_variants("moco", "MoCo"),
    Row(
        "simclr-fifo",
        "SimCLR with a FIFO memory of 512",
        "d-simclr",
        "simclr",
        {**LITERAL["d-simclr"], "policy": "fifo"},
    ),
    Row("simclr-debiased", "SimCLR, debiased loss (τ⁺ 0.1)", "simclr", "simclr", {"debias": 0.1}),
    Row(
        "simclr-debiased-warm",
        "SimCLR, debiased loss (τ⁺ 0.1), temperature 0.5",
        "simclr",
        "simclr",
        {"debias": 0.1, "temperature": 0.5},
    ),
    *(
        Row(
            f"{base}-temperature",
            f"{word}, temperature from 0.1 to 1 and back",
            base,
            base,
            {"temperature": 0.1, "temperature_high": 1.0, "temperature_cycles": 5.0},
        )
        for base, word in _BASES
    ),
    Row("moco-cold", "MoCo v2 without warm-up", "moco", "moco-cold", COLD),
    Row("moco-refresh", "MoCo v2, FIFO, 64 slots encoded anew", "moco", "moco", {"refresh": 64}),
    Row(
        "d-moco-in-batch",
        "D-MoCo, literal, the batch's other keys as negatives too",
        "d-moco",
        "moco",
        {**LITERAL["d-moco"], "in_batch_negatives": True},
    ),
    Row(
        "d-moco-printed",
        "D-MoCo as Algorithm 2 prints it: the batch's other keys too, newcomers encoded after the step",
        "d-moco",
        "moco",
        {**LITERAL["d-moco"], "in_batch_negatives": True, "fresh_keys": True},
    ),
    Row(
        "d-moco-literal-4096",
        "D-MoCo, literal but 4,096 slots, as many as MoCo's queue",
        "d-moco",
        "moco",
        {**LITERAL["d-moco"], "memory_size": 4096},
    ),
    Row(
        "d-simclr-literal-augmented",
        "D-SimCLR, literal but augmented views in memory",
        "d-simclr",
        "simclr",
        {**LITERAL["d-simclr"], "memory_view": "augmented"},
    ),
]
_LONGER = (
    *("simclr-debiased", "simclr-debiased-warm"),
    "d-moco-literal",  # D-SimCLR's encodes as many as ours as it is
    *(
        pattern.format(base)
        for base, _ in _BASES
        for pattern in (
            *("{}", "{}-temperature", "d-{}-ours", "d-{}-pixels", "{}-memory-minred-pixels"),
            *(
                "{}-memory-dedup-pixels",
                "{}-memory-fifo",
                "{}-memory-reservoir",
                "{}-memory-distinct",
                "{}-memory-minred",
            ),
        )
    ),
)
ROWS: Mapping[str, Row] = {row.name: row for row in (*_ALL, *(_longer(row) for row in _ALL if row.name in _LONGER))}
