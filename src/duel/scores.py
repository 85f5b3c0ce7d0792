"""h: from the cosine of two embeddings to the probability that they are duplicates.

Every score maps -1 to 0 and 1 to 1 and never decreases in between. A score is given by object (`gaussian(0.1)`), by
name (`"gaussian"`), by name and width (`"gaussian:0.1"`), as a mix (`"gaussian:0.1+gaussian:0.001"`, weighted
`"0.1*gaussian:0.1+0.9*gaussian:0.003"`) or as any callable with those properties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from duel.checks import is_narrow
from duel.errors import UserError
from duel.names import SCORE_FORMS, check_weight, check_width, score_parts


class Score:
    """h(x) = (g(x) - floor) · scale, with g chosen by `kind`; x is clamped to [-1, 1] first.

    | kind        | g(x)                    | in the paper                                   |
    |-------------|-------------------------|------------------------------------------------|
    | linear      | x                       | (1 + x) / 2, the default of Definition 1       |
    | quadratic   | (1 + x)²                | ((1 + x) / 2)², drawn in the appendix          |
    | gaussian    | exp(width · (1 - x)²)   | exp(-(x - 1)² / τ), rescaled; paper τ = 1      |
    | exponential | exp(width · (1 - x))    | not in the paper: a sharper one                |
    | callable    | the user's              |                                                |
    | mix         | mean of several scores, | not in the paper: a broad one and a sharp one  |
    |             | weighted or not         |                                                |

    `width`, `floor` and `scale` are numbers, or 0-dim tensors on the embeddings' device where a policy moves them.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        width: float | Tensor = 0.0,
        floor: float | Tensor = 0.0,
        scale: float | Tensor = 1.0,
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.name, self.kind, self.width, self.floor, self.scale = name, kind, width, floor, scale
        self.function = function

    def __call__(self, cosines: Tensor) -> Tensor:
        """cosines of any shape and float dtype -> probabilities, same shape and dtype."""
        narrow = is_narrow(cosines.dtype)
        x = cosines.float() if narrow else cosines
        h = self._evaluate_(x.clamp(-1.0, 1.0))
        return h.to(cosines.dtype) if narrow else h

    def _evaluate_(self, x: Tensor, unit: float = 1.0) -> Tensor:
        """The same for float32 or float64 cosines inside [-1, 1] that may be overwritten, times a power of two."""
        if self.function is not None:
            return self.function(x).to(x.dtype) * unit
        if self.kind == "linear":
            return x.add_(1.0).mul_(0.5 * unit)
        if self.kind == "quadratic":
            return x.add_(1.0).mul_(0.5).square_().mul_(unit)
        # every pass over the cosines counts: 1 - x would be two
        x = x.sub_(1.0)
        x = x.square_().mul_(self.width) if self.kind == "gaussian" else x.mul_(-self.width)
        h = x.exp_().sub_(self.floor).mul_(self.scale * unit)
        # near -1 the rounding of exp can leave a little less than the floor; where that is nothing, save the pass
        return h.clamp_(min=0.0) if isinstance(self.floor, Tensor) or self.floor > 1e-14 else h

    def curve(self) -> list[float]:
        """h at cosines from -1 to 1: what tells two functions of one name apart."""
        return [round(h, 6) for h in self(torch.linspace(-1.0, 1.0, 33, dtype=torch.float64)).tolist()]

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Score) or other.name != self.name:
            return False
        return self.kind != "callable" or self.function is other.function

    def __hash__(self) -> int:
        return hash(self.name)


linear = Score("linear", "linear")
quadratic = Score("quadratic", "quadratic")


def shape_parameters(kind: str, tau: float) -> tuple[float, float, float]:
    """(width, floor, scale) of a gaussian or exponential score of width τ, so that h(-1) = 0 and h(1) = 1."""
    check_width(kind, tau := float(tau))
    floor = math.exp((-4.0 if kind == "gaussian" else -2.0) / tau)
    return -1.0 / tau, floor, 1.0 / (1.0 - floor)


def _with_width(kind: str, tau: float) -> Score:
    width, floor, scale = shape_parameters(kind, tau)
    return Score(f"{kind}:{_written(float(tau))}", kind, width=width, floor=floor, scale=scale)


def _written(number: float) -> str:
    """A number as a name has it: read again, it is the same."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def gaussian(tau: float = 1.0) -> Score:
    """exp(-(x - 1)² / τ), shifted and scaled so that h(-1) = 0 and h(1) = 1. The paper uses τ = 1."""
    return _with_width("gaussian", tau)


def exponential(tau: float = 0.05) -> Score:
    """exp((x - 1) / τ), shifted and scaled likewise. Sharper than anything in the paper."""
    return _with_width("exponential", tau)


def mix(*parts: Score | str, weights: Sequence[float] = ()) -> Score:
    """The mean of several scores. A broad one tells classes apart, a sharp one near-duplicates; their mix does both.

    weights: one for each, divided by their sum, so that h(1) = 1; by default all alike.
    """
    scores = [get(part) for part in parts]
    weights = [float(weight) for weight in weights] if len(weights) else [1.0] * len(scores)
    if not scores or len(weights) != len(scores):
        raise UserError(f"mix needs at least one score and as many weights, got {len(scores)} and {len(weights)}")
    for score, weight in zip(scores, weights, strict=True):
        check_weight(score.name, weight)
        if score.kind == "mix":
            raise UserError(f"mix takes single scores, got the mix {score.name!r}: give its parts")
    weighted = any(weight != weights[0] for weight in weights)
    names = [f"{_written(w)}*{s.name}" if weighted else s.name for s, w in zip(scores, weights, strict=True)]
    return Score("+".join(names), "mix", function=partial(_mean, tuple(scores), tuple(weights)))


def _mean(scores: Sequence[Score], weights: Sequence[float], cosines: Tensor) -> Tensor:
    h, total = scores[0](cosines), weights[0]
    for score, weight in zip(scores[1:], weights[1:], strict=True):
        total += weight
        h = h.lerp(score(cosines), weight / total)  # where all parts are 0 or 1, exactly that
    return h


def get(score: Any) -> Score:
    """The score that a name, a `name:tau` string, a Score or a callable stands for."""
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        return _from_name(score)
    if score is gaussian or score is exponential:
        return score()  # type: ignore[no-any-return]  # the factory itself was given: its default width
    if callable(score):
        return _checked(score)
    raise UserError(f"score must be a name ({', '.join(SCORE_FORMS)}), a Score or a callable, got {score!r}")


def _from_name(text: str) -> Score:
    found = score_parts(text)
    parts = [_named(name, tau) for _, name, tau in found]
    return parts[0] if len(parts) == 1 else mix(*parts, weights=[weight for weight, _, _ in found])


def _named(name: str, tau: float | None) -> Score:
    if tau is not None:
        return _with_width(name, tau)
    return get({"linear": linear, "quadratic": quadratic, "gaussian": gaussian, "exponential": exponential}[name])


def _checked(function: Callable[[Tensor], Tensor]) -> Score:
    """A user's callable as a Score, after looking at it once on a fine grid of cosines."""
    label = getattr(function, "__name__", type(function).__name__)
    grid = torch.linspace(-1.0, 1.0, 4001, dtype=torch.float64)
    h = function(grid.clone())
    if not isinstance(h, Tensor) or h.shape != grid.shape or not h.is_floating_point():
        raise UserError(f"score {label!r} must return a floating-point tensor of the shape it is given")
    if not bool(torch.isfinite(h).all()) or float(h.min()) < -1e-6 or float(h.max()) > 1 + 1e-6:
        raise UserError(f"score {label!r} leaves [0, 1] on cosines in [-1, 1]: from {h.min():g} to {h.max():g}")
    if float(h.diff().min()) < -1e-6:
        at = float(grid[int(h.diff().argmin())])
        raise UserError(f"score {label!r} is not monotone: it decreases at cosine {at:.3f}")
    if abs(float(h[0])) > 1e-6 or abs(float(h[-1]) - 1) > 1e-6:
        raise UserError(f"score {label!r} must map -1 to 0 and 1 to 1, got {float(h[0]):g} and {float(h[-1]):g}")
    return Score(label, "callable", function=function)
