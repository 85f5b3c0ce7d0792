"""The paper's theory, judged by running it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from .. import scores, theory
from .claims import Verdict
from .paper import BIASES

SCORES = ("linear", "quadratic", "gaussian:1", "gaussian:0.1", "exponential:0.05")


@functools.cache
def verdicts() -> Mapping[str, Verdict]:
    """Statement -> verdict, computed here and now; a second or two on a CPU."""
    return {
        "Simplex ETF: inner products -1/C": _etf(),
        "Observation 1: on biased data the ETF is no stationary point; rare classes drift towards -z_max": _drift(),
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
    worst, moved = 0.0, []
    for bias in BIASES:
        weights = theory.dominant(10, bias)
        vectors = theory.simplex_etf(10)
        for own in (0, 5):
            z = vectors[own].clone().requires_grad_()
            (found,) = torch.autograd.grad(theory.class_loss(z, vectors, weights, own), z)
            worst = max(worst, float((found - theory.closed_form_gradient(weights, own)).abs().max()))
        path = theory.drift(weights, steps=100)
        moved.append(float((path[-1, 1:] @ -path[-1, 0]).mean()))
    shown = ", ".join(f"×{bias:g} {cosine:.2f}" for bias, cosine in zip(BIASES, moved, strict=True))
    agree = "agree to 1e-10" if worst < 1e-10 else f"differ by {worst:.0e}"
    right = worst < 1e-10 and all(m > 1 / 9 + 0.05 for m in moved[1:]) and abs(moved[0] - 1 / 9) < 1e-6
    return Verdict(
        "holds" if right else "does not hold",
        f"closed form and autograd {agree} for the loss with all same-class positives; cosine of rare classes "
        f"with -z_max after 100 steps from the ETF (C = 10, where it is 0.11): {shown}",
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
    cosines = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    wrong, shown = 0, []
    for name in SCORES:
        at = theory.threshold(name, 0.5)
        clear = (cosines - at).abs() > 1e-9
        wrong += int(((scores.get(name)(cosines) >= 0.5) != (cosines >= at))[clear].sum())
        shown.append(f"{name} {round(at, 3) + 0.0:.3f}")
    return Verdict(
        "does not hold" if wrong else "holds only when h is continuous and strictly increasing",
        f"cosine at which the probability is one half: {', '.join(shown)}",
    )
