"""The rows of `duel bench step`: which there are, and which plain row each is held against."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from duel import demo, recipes
from duel.config import MethodName, TrainConfig
from duel.errors import UserError, suggest

METHODS = ("moco", "simclr", "simsiam", "byol")
BACKBONES = ("resnet18", "resnet50")
#: Re-encoded slots of the rows with partial refresh.
REFRESH = 64
#: A rate at which embeddings spread as they do in training; at the recipe's, Adam may first crowd them together.
LR = 1e-3
#: Longer than any benchmark: the learning rate's table must cover every step.
STEPS = 100_000
#: What a memory that is trained on takes from the standard recipe.
MEMORY_FIRST = ("source", "memory_size", "score", "refresh", "space")


@dataclass(frozen=True)
class Case:
    """One row: a config, and the name of the row it is held against (None: it is such a row)."""

    name: str
    config: TrainConfig
    plain: str | None = None


SomeCase = TypeVar("SomeCase", bound=Case)


def cases(
    *,
    methods: Sequence[str] = METHODS,
    backbones: Sequence[str] = BACKBONES,
    memory: Sequence[int] = (2048, 65536),
    residents: int = 512,
    recipe: str = "paper",
    **settings: Any,
) -> list[Case]:
    """Each method plain, in its DUEL forms, and trained on what a DUEL memory holds.

    MoCo is asymmetric, as in the paper, and its keys are normalised by running statistics in every row, as they have to
    be where its memory is refreshed.

    memory: slots of MoCo's; residents: slots of D-SimCLR's. settings: any field of TrainConfig, for all rows.
    """
    found: list[Case] = []
    for unknown in set(methods) - set(METHODS):
        raise UserError(suggest("method", unknown, METHODS))

    def case(name: str, method: MethodName, backbone: str, plain: str | None, **own: Any) -> str:
        config = recipes.recipe(recipe, method=method, source="stream")
        # the library's own score rather than a recipe's: what a user gets without asking
        config = dataclasses.replace(config, backbone=backbone, score=TrainConfig.score, lr=LR, steps=STEPS)
        name = f"{name}, {backbone}"
        found.append(Case(name, dataclasses.replace(config, **{**own, **settings}), plain))
        return name

    def memory_first(name: str, method: MethodName, backbone: str, plain: str, **own: Any) -> None:
        given = {key: settings[key] for key in ("data", "batch_size") if key in settings}
        recommended = recipes.standard(method, source="memory", **given)
        own = {key: getattr(recommended, key) for key in MEMORY_FIRST} | own
        how = "pixels" if own["space"] == "pixels" else f"refresh {own['refresh']}"
        case(f"{name}, source memory {own['memory_size']:,}, {how}", method, backbone, plain, **own)

    # with what the newcomers' training gave instead of another pass over them
    reuses: list[dict[str, Any]] = [{}, {"reuse_newcomers": True}]
    # nothing encoded for the memory
    pixels: dict[str, Any] = {"space": "pixels", "refresh": 0}

    for backbone in backbones:
        for slots in memory if "moco" in methods else ():
            keys = {"symmetric": False, "key_batchnorm": "running"}
            own: dict[str, Any] = {"memory_size": slots, "refresh": 0, **keys}
            plain = case(f"MoCo {slots:,}", "moco", backbone, None, **own)
            case(f"D-MoCo {slots:,}", "d-moco", backbone, plain, **own)
            if slots == memory[0]:
                own["refresh"] = min(REFRESH, slots)
                case(f"D-MoCo {slots:,}, refresh {own['refresh']}", "d-moco", backbone, plain, **own)
                for seen in ({}, pixels):
                    memory_first("D-MoCo", "d-moco", backbone, plain, queue=slots, **keys, **seen)
        if "simclr" in methods:
            plain = case("SimCLR", "simclr", backbone, None)
            for refresh in (0, min(REFRESH, residents)):  # 0: all residents, as in the paper
                for reuse in reuses:
                    how = [f"refresh {refresh}"] * (refresh > 0) + ["reuse"] * bool(reuse) or ["literal"]
                    own = {"memory_size": residents, "refresh": refresh, **reuse}
                    case(f"D-SimCLR {residents:,}, {', '.join(how)}", "d-simclr", backbone, plain, **own)
            for seen in ({}, pixels):
                memory_first("D-SimCLR", "d-simclr", backbone, plain, **seen)
        others: tuple[tuple[str, MethodName], ...] = (("SimSiam", "simsiam"), ("BYOL", "byol"))
        for name, method in others:
            if method in methods:
                plain = case(name, method, backbone, None)
                memory_first(f"D-{name}", method, backbone, plain, policy="duel")
    return found


def demo_cases(**settings: Any) -> list[Case]:
    """The demo's two runs on the ×27 stream: the oldest leave, or the most duplicated, with the same refresh."""
    runs = demo.configs(out=Path("runs"), steps=STEPS, bias=27.0, seed=0)
    fifo, duel = (c for c in runs.values() if c.bias > 1)
    plain = f"demo, {fifo.memory_policy}"
    return [
        Case(plain, dataclasses.replace(fifo, **settings)),
        Case(f"demo, {duel.memory_policy}", dataclasses.replace(duel, **settings), plain),
    ]


def chosen(rows: Sequence[SomeCase], words: Sequence[str]) -> list[SomeCase]:
    """The rows with one of `words` in their name, and those they are held against; all where no words are given.

    A word that is a whole name means that row alone.
    """
    names = {case.name for case in rows}

    def named_by(word: str, name: str) -> bool:
        return word == name if word in names else word in name

    for word in words:
        if not any(word in case.name for case in rows):
            raise UserError(f"no row has {word!r} in its name; there are: {'; '.join(case.name for case in rows)}")
    named = [case for case in rows if not words or any(named_by(word, case.name) for word in words)]
    kept = {case.name for case in named} | {case.plain for case in named}
    return [case for case in rows if case.name in kept]
