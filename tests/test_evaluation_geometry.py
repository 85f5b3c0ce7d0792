"""Geometry against brute force and against shapes whose measures are known."""

import math

import pytest
import torch

from duel.errors import UserError
from duel.evaluation.geometry import class_cosines, class_means, effective_rank, etf_distance


def simplex(classes: int, d: int) -> torch.Tensor:
    """Unit vectors with inner products -1/(C-1)."""
    points = torch.eye(classes, d, dtype=torch.float64)
    points[:, :classes] -= 1 / classes
    return torch.nn.functional.normalize(points)


def test_class_cosines_are_means_over_pairs():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 7, generator=generator) + 0.5
    labels = torch.randint(4, (60,), generator=generator)
    cosine = torch.nn.functional.cosine_similarity(features[:, None].double(), features[None].double(), dim=-1)
    same = labels[:, None] == labels
    intra, inter = class_cosines(features, labels)
    assert intra == pytest.approx(float(cosine[same & ~torch.eye(60, dtype=torch.bool)].mean()))
    assert inter == pytest.approx(float(cosine[~same].mean()))


def test_class_cosines_across_chunks():
    features = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(1)) + 1
    labels = torch.arange(40_000) % 3
    unit = torch.nn.functional.normalize(features.double())
    sums = torch.stack([unit[labels == c].sum(0) for c in range(3)])
    inter = ((sums.sum(0) ** 2).sum() - (sums**2).sum()) / (40_000**2 - 3 * (40_000 / 3) ** 2)
    assert class_cosines(features, labels)[1] == pytest.approx(float(inter), rel=1e-6)


def test_class_cosines_without_pairs_are_nan():
    intra, inter = class_cosines(torch.eye(3), torch.arange(3))
    assert math.isnan(intra)
    assert inter == pytest.approx(0)
    assert math.isnan(class_cosines(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))[1])


def test_etf_has_distance_zero():
    means = simplex(10, 16)
    assert etf_distance(means) == pytest.approx(0, abs=1e-12)
    assert etf_distance(means, centre=False) == pytest.approx(0, abs=1e-12)
    # an offset common to all classes is taken off by centring, and counts without it
    assert etf_distance(means + 1) == pytest.approx(0, abs=1e-12)
    assert etf_distance(means + 1, centre=False) > 0.5


def test_collapse_and_orthogonal_means_have_their_distances():
    assert etf_distance(torch.ones(4, 3), centre=False) == pytest.approx(1 + 1 / 3)
    assert etf_distance(torch.eye(5), centre=False) == pytest.approx(1 / 4)


def test_class_means_skip_absent_classes():
    found = class_means(torch.tensor([[2.0, 0], [0, 3.0], [0, 1.0]]), torch.tensor([0, 2, 2]))
    assert torch.equal(found, torch.eye(2, dtype=torch.float64))


def test_effective_rank_of_known_spectra():
    q, _ = torch.linalg.qr(torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert effective_rank(q) == pytest.approx(8)
    assert effective_rank(q[:, :3] @ torch.randn(3, 8, dtype=torch.float64)) <= 3 + 1e-6
    assert effective_rank(torch.ones(9, 5)) == pytest.approx(1, abs=1e-5)
    assert effective_rank(torch.zeros(9, 5)) == 0
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert effective_rank(q[:, :3] * share) == pytest.approx(math.exp(-sum(p * math.log(p) for p in share.tolist())))


@pytest.mark.parametrize("shape", [(30, 12), (12, 30)])
def test_effective_rank_is_that_of_the_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(x.double())
    share = singular / singular.sum()
    assert effective_rank(x) == pytest.approx(float((-(share * share.log()).sum()).exp()), rel=1e-6)
    assert effective_rank(x + 100) < 2 < 8 < effective_rank(x + 100, centre=True)


def test_bad_input_is_named():
    with pytest.raises(UserError, match="C >= 2"):
        etf_distance(torch.ones(1, 3))
    with pytest.raises(UserError, match=r"got \(5,\)"):
        effective_rank(torch.ones(5))
