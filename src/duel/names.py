"""What can be named: methods, policies, augmentations, scores. No torch, so that a name is checked before it loads."""

from __future__ import annotations

from typing import Literal

from .errors import UserError, suggest

MethodName = Literal["simclr", "moco", "simsiam", "byol", "d-simclr", "d-moco", "d-simsiam", "d-byol"]
OptimizerName = Literal["adam", "adamw", "sgd", "lars"]
AugmentName = Literal["standard", "paper", "digits", "none"]
POLICIES = ("duel", "fifo", "reservoir", "random", "minred", "adaptive", "oracle")
#: Those that compare nothing.
BLIND_POLICIES = ("fifo", "reservoir", "random", "oracle")
#: Methods without negatives: a memory can only give them their batches.
NEGATIVE_FREE = ("simsiam", "byol")

#: Scores with a width τ, and all of them.
WIDE_SCORES = ("gaussian", "exponential")
SCORES = ("linear", "quadratic", *WIDE_SCORES)
#: As they are written.
SCORE_FORMS = tuple(f"{name}:TAU" if name in WIDE_SCORES else name for name in SCORES)


def score_parts(text: str) -> list[tuple[str, float | None]]:
    """(name, τ or None where none is given) of each score in "name", "name:TAU" or a mix of such, "A+B"."""
    return [_score_part(part) for part in text.split("+")]


def _score_part(text: str) -> tuple[str, float | None]:
    name, _, tau = text.partition(":")
    if name not in SCORES:
        raise UserError(suggest("score", name, SCORES, shown=SCORE_FORMS))
    if not tau:
        return name, None
    if name not in WIDE_SCORES:
        raise UserError(f"score {name!r} has no width, got {text!r}; write {name!r}")
    try:
        width = float(tau)
    except ValueError:
        raise UserError(f"score {text!r}: the part after ':' must be a number, for example '{name}:0.1'") from None
    check_width(name, width)
    return name, width


def check_width(name: str, tau: float) -> None:
    """Refuse a τ for which float32 cannot tell the score from a step or from a straight line."""
    if not 1e-5 <= tau <= 100:
        raise UserError(f"tau of the {name} score must lie between 1e-5 and 100, got {tau!r}")
