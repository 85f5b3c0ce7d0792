"""The paper's theory, judged by running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import theory
from .paper import BIASES
from .verdicts import Verdict

SCORES = ("linear", "quadratic", "gaussian:1", "gaussian:0.1", "exponential:0.05")


@functools.cache
def verdicts() -> Mapping[str, Verdict]:
    """Statement -> verdict, computed here and now; a few seconds on a CPU."""
    return {
        "Simplex ETF: inner products -1/C": _etf(),
        "Observation 1: on biased data the ETF is no stationary point; rare classes drift towards -z_max": _drift(),
        'The policy "finds the dense area" of the latent space and evicts from it': _dense(),
        "Theorem 1: the naive policy (Algorithm 2) never lowers p_d on the ETF": _safety(),
        "Algorithm 1 (`admit=compete`) never lowers p_d, for any score and geometry": _compete(),
        "Theorem 2: a threshold on probability is one on cosine": _threshold(),
    }


def _etf() -> Verdict:
    vectors = theory.simplex_etf(10)
    cosine = float(vectors[0] @ vectors[1])
    return Verdict(
        "holds" if abs(cosine + 1 / 10) < 1e-6 else "does not hold",
        f"ten vectors that sum to zero, as the proof needs, have {cosine:.4f} = -1/(C-1), not -0.1",
    )


def _drift() -> Verdict:
    worst = 0.0
    for bias in BIASES:
        weights, vectors = theory.dominant(10, bias), theory.simplex_etf(10)
        for own in (0, 5):
            z = vectors[own].clone().requires_grad_()
            (found,) = torch.autograd.grad(theory.class_loss(z, vectors, weights, own), z)
            worst = max(worst, float((found - theory.closed_form_gradient(weights, own)).abs().max()))
    moved = [_moved(theory.class_loss), _moved(functools.partial(theory.single_positive_loss, negatives=2))]
    one, two = (", ".join(f"×{b:g} {cosine:.2f}" for b, cosine in zip(BIASES, m, strict=True)) for m in moved)
    agree = "agree to 1e-10" if worst < 1e-10 else f"differ by {worst:.0e}"
    drifts = all(m > 1 / 9 + 0.05 for path in moved for m in path[1:]) and all(abs(m[0] - 1 / 9) < 1e-6 for m in moved)
    return Verdict(
        "holds" if worst < 1e-10 and drifts else "does not hold",
        f"closed form and autograd {agree} for the loss with all same-class positives; cosine of rare classes "
        f"with -z_max after 100 steps from the ETF (C = 10, where it is 0.11), at temperature 1 as derived: {one}; "
        f"under Equation 2 itself (one positive, two negatives): {two}",
    )


def _moved(loss: Callable[..., Tensor]) -> list[float]:
    """Mean cosine of the rare classes with -z_max at the end, for each bias."""
    paths = [theory.drift(theory.dominant(10, bias), steps=100, loss=loss)[-1] for bias in BIASES]
    return [float((vectors[1:] @ -vectors[0]).mean()) for vectors in paths]


def _dense() -> Verdict:
    crowd = theory.crowded_circle()
    gone = {score: theory.evicted(crowd, score) for score in SCORES}
    good = [score for score, evicted in gone.items() if bool(crowd.dense[evicted].all())]
    shown = ", ".join(f"{score} {int((crowd.dense & out).sum())} of {int(out.sum())}" for score, out in gone.items())
    return Verdict(
        "holds" if len(good) == len(gone) else "holds only when" if good else "does not hold",
        "on a circle with a common kind that is spread out and six items close together (figure-mcp), evicted from "
        f"among the six: {shown}",
        f" the score is sharp ({', '.join(good)})" if 0 < len(good) < len(gone) else "",
    )


def _safety() -> Verdict:
    found = theory.smallest_counterexample()
    if found is None:
        return Verdict("holds", "no counter-example among small pools")
    letters = "ABC"
    before, after = ("".join(letters[c] for c in pool) for pool in (found.pool, found.after))
    on, off = (100 * theory.unsafe_share(etf=etf, pools=300) for etf in (True, False))
    return Verdict(
        "does not hold",
        f"smallest counter-example: memory {before}, newcomer {letters[found.newcomer]}, a tie, memory {after}; "
        f"p_d falls in {on:.0f} % of random pools on the ETF and {off:.0f} % elsewhere. "
        "Safe iff the newcomer has the victim's class, or that class is strictly larger than the newcomer's",
    )


def _compete() -> Verdict:
    shares = [
        theory.unsafe_share(etf=etf, admit="compete", score=score, pools=60)
        for score in SCORES
        for etf in (True, False)
    ]
    fell = round(60 * sum(shares))
    return Verdict("does not hold" if fell else "holds", f"p_d fell in {fell} of {60 * len(shares)} random pools")


def _threshold() -> Verdict:
    """For the scores there are; then for an h that is flat and for one that jumps."""
    cosines = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    at = {name: theory.threshold(name, 0.5) for name in SCORES}
    right = all(theory.separates(name, 0.5, x, cosines[(cosines - x).abs() > 1e-9]) for name, x in at.items())
    shown = ", ".join(f"{name} {round(x, 3) + 0.0:.3f}" for name, x in at.items())
    halves, edge, above = cosines[_flat(cosines) == 0.5], theory.threshold(_flat, 0.5), theory.threshold(_jump, 0.5)
    near = torch.tensor([0.0, above / 2, above], dtype=torch.float64)
    needs = []
    if not theory.separates(_flat, 0.5, edge, cosines):
        needs.append("strictly increases")
    if not any(theory.separates(_jump, 0.5, x, near) for x in (0.0, above)):
        needs.append("takes the upper value where it jumps")
    return Verdict(
        "does not hold" if not right else "holds only when" if needs else "holds",
        f"cosine at which the probability is one half: {shown}; with an h that is one half from "
        f"{float(halves.min()):.2f} to {float(halves.max()):.2f} it is not unique, as the proof wants, the threshold "
        f"{edge:.2f} is; with an h that is 0 up to 0 and 1 above, 0 is too low and {above:.0e} too high",
        f" h {' and '.join(needs)}" if right and needs else "",
    )


def _flat(x: Tensor) -> Tensor:
    return 0.5 + x.sign() * (x.abs() - 0.25).clamp(min=0) / 1.5


def _jump(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)
