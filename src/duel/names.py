"""What can be named: methods, policies, augmentations, scores. No torch, so that a name is checked before it loads."""

from __future__ import annotations

from typing import Literal

from .errors import UserError, suggest

MethodName = Literal["simclr", "moco", "simsiam", "byol", "d-simclr", "d-moco", "d-simsiam", "d-byol"]
OptimizerName = Literal["adam", "adamw", "sgd", "lars"]
AugmentName = Literal["standard", "paper", "digits", "none"]
#: Data sets that torchvision or scikit-learn brings.
NAMED_DATA = ("digits", "cifar10", "cifar100", "stl10", "stl10-unlabeled")
#: `data` of a run whose images come once, from outside.
LIVE = "-"
POLICIES = ("duel", "fifo", "reservoir", "random", "distinct", "dedup", "minred", "adaptive", "oracle")
#: Those that compare nothing.
BLIND_POLICIES = ("fifo", "reservoir", "random", "distinct", "oracle")
#: Of a thumbnail, in pixels. docs/decisions.md has how well other sides tell frames of an image from other images.
THUMBNAIL_SIDE = 8
#: Methods without negatives: a memory can only give them their batches.
NEGATIVE_FREE = ("simsiam", "byol")

#: Scores with a width τ, and all of them.
WIDE_SCORES = ("gaussian", "exponential")
SCORES = ("linear", "quadratic", *WIDE_SCORES)
#: As they are written.
SCORE_FORMS = tuple(f"{name}:TAU" if name in WIDE_SCORES else name for name in SCORES)


def score_parts(text: str) -> list[tuple[float, str, float | None]]:
    """(weight, name, τ or None where none is given) of each score in "name", "name:TAU" or a mix of such: "A+B",
    weighted "0.1*A+0.9*B". A part without a weight has weight 1."""
    parts = [_score_part(part) for part in text.split("+")]
    if len(parts) == 1 and "*" in text:
        raise UserError(
            f"score {text!r} has a weight and nothing to weigh it against; write {text.partition('*')[2]!r}, or a mix "
            "such as '0.1*gaussian:0.1+0.9*gaussian:0.003'"
        )
    return parts


def _score_part(text: str) -> tuple[float, str, float | None]:
    before, star, score = text.rpartition("*")
    weight = _number(before, f"score {text!r}: the part before '*'", "0.1*gaussian:0.1") if star else 1.0
    check_weight(score, weight)
    name, _, tau = score.partition(":")
    if name not in SCORES:
        raise UserError(suggest("score", name, SCORES, shown=SCORE_FORMS))
    if not tau:
        return weight, name, None
    if name not in WIDE_SCORES:
        raise UserError(f"score {name!r} has no width, got {score!r}; write {name!r}")
    width = _number(tau, f"score {text!r}: the part after ':'", f"{name}:0.1")
    check_width(name, width)
    return weight, name, width


def _number(text: str, what: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{what} must be a number, for example {example!r}") from None


def check_weight(score: str, weight: float) -> None:
    """Refuse a weight in a mix that is not positive, or that would leave nothing of its part or of the others."""
    if not 1e-5 <= weight <= 1e5:
        raise UserError(f"the weight of {score!r} must lie between 1e-5 and 1e5, got {weight!r}")


def check_width(name: str, tau: float) -> None:
    """Refuse a τ for which float32 cannot tell the score from a step or from a straight line."""
    if not 1e-5 <= tau <= 100:
        raise UserError(f"tau of the {name} score must lie between 1e-5 and 100, got {tau!r}")
