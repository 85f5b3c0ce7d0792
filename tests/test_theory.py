from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from duel import scores, theory
from duel.errors import UserError

SCORES = ("linear", "quadratic", "gaussian:1", "gaussian:0.1", "exponential:0.05", "gaussian:0.1+gaussian:0.003")


def gradient(loss: object, z: Tensor, *args: object, **how: object) -> Tensor:
    free = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(free, *args, **how), free)  # type: ignore[operator]
    return found


def random_weights(classes: int, seed: int) -> Tensor:
    weights = torch.rand(classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    return weights / weights.sum()


@pytest.mark.parametrize("classes", [2, 3, 10, 57])
def test_the_simplex_etf_is_one(classes: int) -> None:
    rows = theory.simplex_etf(classes, classes + 2)
    gram = rows @ rows.T
    expected = torch.full_like(gram, -1 / (classes - 1)).fill_diagonal_(1)
    assert torch.allclose(gram, expected, rtol=0, atol=1e-12)
    assert torch.allclose(rows.sum(0), torch.zeros(classes + 2, dtype=torch.float64), rtol=0, atol=1e-12)
    assert theory.etf_distance(rows, centre=False) < 1e-12
    assert theory.etf_distance(rows.roll(1, 1) + 0.1, centre=False) > 1e-3


def test_too_few_dimensions_are_told() -> None:
    with pytest.raises(UserError, match="dim >= classes - 1"):
        theory.simplex_etf(10, 8)


# Observation 1 ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**6), st.floats(0.05, 2.0))
@example(300, 0, 0.05)
def test_the_closed_form_is_the_gradient(classes: int, seed: int, temperature: float) -> None:
    weights = random_weights(classes, seed)
    vectors = theory.simplex_etf(classes)
    for own in {0, classes - 1}:
        found = gradient(theory.class_loss, vectors[own], vectors, weights, own, temperature=temperature)
        closed = theory.closed_form_gradient(weights, own, temperature=temperature)
        assert torch.allclose(found, closed, rtol=0, atol=1e-10)


@pytest.mark.parametrize("bias", [1.0, 3.0, 9.0, 27.0])
def test_a_dominant_class_gives_the_paper_s_equation_3(bias: float) -> None:
    classes = 10
    weights = theory.dominant(classes, bias)
    vectors = theory.simplex_etf(classes)
    excess = weights[0] - weights[1]
    for own, expected in ((0, vectors[0] * (-1 + excess)), (4, -vectors[4] + vectors[0] * excess)):
        found = theory.closed_form_gradient(weights, own)
        assert cosine_similarity(found, expected, dim=0) == pytest.approx(1, abs=1e-12)


def test_the_loss_is_the_one_with_all_same_class_items_as_positives() -> None:
    """Against sums over a pool of 12 items, item by item."""
    counts = torch.tensor([7, 3, 2])
    labels = torch.repeat_interleave(torch.arange(3), counts)
    vectors = normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    items, z = vectors[labels], vectors[1] + 0.1
    terms = [-(torch.log((z @ p).exp() / (items @ z).exp().sum())) for p in items[labels == 1]]
    plain = torch.stack(terms).mean() - torch.tensor(12.0, dtype=torch.float64).log()
    assert theory.class_loss(z, vectors, counts / counts.sum().double(), 1) == pytest.approx(float(plain), abs=1e-12)


@pytest.mark.parametrize("negatives", [1, 2, 4])
def test_equation_2_has_the_same_direction_on_the_etf_and_another_length(negatives: int) -> None:
    weights, own = random_weights(4, negatives), 2
    vectors = theory.simplex_etf(4)
    found = gradient(theory.single_positive_loss, vectors[own], vectors, weights, own, negatives=negatives)
    closed = theory.closed_form_gradient(weights, own)
    assert cosine_similarity(found, closed, dim=0) == pytest.approx(1, abs=1e-12)
    assert abs(found.norm() - closed.norm()) > 0.01


def test_equation_2_is_the_mean_over_all_draws() -> None:
    weights, vectors = random_weights(3, 5), theory.simplex_etf(3, 4)
    z = normalize(torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64), dim=0)
    expected = 0.0
    for drawn in itertools.product(range(3), repeat=3):
        chance = float(torch.prod(weights[list(drawn)]))
        v = [float(z @ (vectors[1] - vectors[c])) for c in drawn]
        expected += chance * float(torch.log(1 + torch.exp(-torch.tensor(v, dtype=torch.float64)).sum()))
    found = theory.single_positive_loss(z, vectors, weights, 1, negatives=3)
    assert found == pytest.approx(expected, abs=1e-12)


def test_free_vectors_drift_towards_the_opposite_of_the_dominant_one() -> None:
    balanced = theory.drift(theory.dominant(10, 1), steps=100)
    assert theory.etf_distance(balanced[-1], centre=False) < 1e-9  # the ETF stays where it is
    path = theory.drift(theory.dominant(10, 27), steps=100)
    towards = path[:, 1:] @ -path[:, :1].transpose(1, 2)  # (steps + 1, 9, 1): cosine with -z_max
    assert (towards.diff(dim=0) > -1e-9).all()
    assert towards[0].mean() == pytest.approx(1 / 9)
    assert towards[-1].mean() > 0.5
    assert theory.etf_distance(path[-1], centre=False) > 0.2


@pytest.mark.parametrize("negatives", [1, 4])
def test_they_drift_under_equation_2_as_well(negatives: int) -> None:
    """And further than under Observation 1's loss, which has all items of a class as positives."""
    loss = functools.partial(theory.single_positive_loss, negatives=negatives)
    balanced = theory.drift(theory.dominant(3, 1), steps=50, loss=loss)
    assert theory.etf_distance(balanced[-1], centre=False) < 1e-9
    paths = [theory.drift(theory.dominant(3, 9), steps=50, loss=kind) for kind in (loss, theory.class_loss)]
    equation2, observation1 = (path[:, 1:] @ -path[:, :1].transpose(1, 2) for path in paths)
    assert equation2[0].mean() == pytest.approx(1 / 2)
    assert (equation2.diff(dim=0) > 0).all()
    assert equation2[-1].mean() > observation1[-1].mean() > 0.8


def test_several_vectors_at_once_have_each_its_own_loss() -> None:
    vectors, weights = theory.simplex_etf(4), random_weights(4, 0)
    classes = torch.tensor([2, 0, 3])
    for loss in (theory.class_loss, functools.partial(theory.single_positive_loss, negatives=3)):
        each = torch.stack([loss(vectors[c] + 0.1, vectors, weights, int(c)) for c in classes])
        assert torch.allclose(loss(vectors[classes] + 0.1, vectors, weights, classes), each, rtol=0, atol=1e-12)


# What the policy evicts ---------------------------------------------------------------------------------------


def test_only_a_sharp_score_finds_the_dense_region() -> None:
    crowd = theory.crowded_circle()
    neighbours = (crowd.memory @ crowd.memory.T > 0.97).sum(1)  # within 14 degrees
    assert set(neighbours[crowd.dense].tolist()) == {6}
    assert neighbours[~crowd.dense].max() <= 3
    assert not (theory.evicted(crowd, "linear") & crowd.dense).any()
    sharp = theory.evicted(crowd, "exponential:0.05")
    assert int(sharp.sum()) == len(crowd.newcomers)
    assert crowd.dense[sharp].all()


# Theorem 1 ----------------------------------------------------------------------------------------------------


def test_the_smallest_counterexample_has_two_items() -> None:
    found = theory.smallest_counterexample()
    assert found is not None
    assert (found.pool, found.newcomer, found.after) == ((0, 1), 1, (1, 1))
    assert found.change == pytest.approx(-2 * (1 - 0.25))  # h(-1/2) = 1/4 under the linear score


@pytest.mark.parametrize("score", SCORES)
def test_always_is_safe_exactly_where_the_rule_says(score: str) -> None:
    vectors = theory.simplex_etf(3)
    seen = set()
    for size in range(1, 6):
        for pool in itertools.product(range(3), repeat=size):
            for newcomer in range(3):
                change = theory.diversity_change(vectors[list(pool)], vectors[newcomer], score=score)
                assert (change > -1e-9) == theory.always_is_safe(pool, newcomer), (pool, newcomer)
                seen.add(theory.always_is_safe(pool, newcomer))
    assert seen == {True, False}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("etf", [True, False])
def test_compete_is_always_safe(score: str, etf: bool) -> None:
    assert theory.unsafe_share(etf=etf, admit="compete", score=score, pools=150) == 0


def test_always_is_not() -> None:
    assert 0.02 < theory.unsafe_share(etf=True, pools=300) < 0.25
    assert 0.1 < theory.unsafe_share(etf=False, pools=300) < 0.5


# Theorem 2 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("probability", [0.0, 0.001, 0.3, 0.9, 1.0])
def test_a_threshold_on_probability_is_one_on_cosine(score: str, probability: float) -> None:
    h = scores.get(score)
    at = theory.threshold(score, probability)
    cosines = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    clear = (cosines - at).abs() > 1e-9
    assert torch.equal((h(cosines) >= probability)[clear], (cosines >= at)[clear])
    if 0 < probability < 1:
        assert float(h(torch.tensor(at, dtype=torch.float64))) == pytest.approx(probability, abs=1e-9)


def flat(x: Tensor) -> Tensor:
    return 0.5 + x.sign() * (x.abs() - 0.25).clamp(min=0) / 1.5


def jump(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def closed_jump(x: Tensor) -> Tensor:
    return (x >= 0).to(x.dtype)


def test_a_flat_score_has_a_threshold_but_no_unique_cosine() -> None:
    cosines = torch.linspace(-1, 1, 801, dtype=torch.float64)
    assert theory.threshold(flat, 0.5) == -0.25
    assert theory.separates(flat, 0.5, -0.25, cosines)
    assert not theory.separates(flat, 0.5, 0.25, cosines)
    assert int((flat(cosines) == 0.5).sum()) == 201


def test_a_score_that_jumps_has_a_threshold_only_if_it_takes_the_upper_value() -> None:
    above = theory.threshold(jump, 0.5)
    near = torch.tensor([-above, 0.0, above / 2, above], dtype=torch.float64)
    assert not any(theory.separates(jump, 0.5, x, near) for x in near.tolist() if x != above / 2)
    assert theory.threshold(closed_jump, 0.5) == 0
    assert theory.separates(closed_jump, 0.5, 0.0, near)


def test_a_probability_outside_0_1_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[0, 1\], got 1.5"):
        theory.threshold("linear", 1.5)
