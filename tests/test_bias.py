"""Class weights, fixed subsets and independent draws."""

from __future__ import annotations

import pytest
import torch

from duel.data.bias import ClassDraw, class_weights, item_probabilities, subset_ids
from duel.errors import UserError


@pytest.mark.parametrize(("bias", "share"), [(1, 0.10), (3, 0.25), (9, 0.50), (27, 0.75)])
def test_one_dominant_class_has_the_papers_shares(bias: float, share: float) -> None:
    weights = class_weights(10, kind="dominant", bias=bias, dominant=4)
    assert weights.dtype == torch.float64
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights[4]) == pytest.approx(share)
    assert float(weights.max() / weights.min()) == pytest.approx(bias)
    assert len(set(weights.tolist())) == (1 if bias == 1 else 2)


def test_long_tail_falls_exponentially_to_the_imbalance_ratio() -> None:
    weights = class_weights(10, kind="longtail", bias=100)
    assert float(weights[0] / weights[9]) == pytest.approx(100)
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((9,), 100 ** (-1 / 9), dtype=torch.float64))
    torch.testing.assert_close(class_weights(10, kind="longtail", bias=100, dominant=3), weights.roll(3))
    assert class_weights(1, kind="longtail", bias=100).tolist() == [1.0]


def test_explicit_weights_are_scaled_to_one() -> None:
    assert class_weights(3, kind="weights", weights=(2, 0, 6)).tolist() == [0.25, 0, 0.75]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"bias": 0.5}, "bias must be >= 1 .* got 0.5"),
        ({"bias": float("nan")}, "bias must be >= 1 .* got nan"),
        ({"bias": 0.99, "kind": "longtail"}, "bias must be >= 1"),
        ({"dominant": 10}, r"dominant class must be in 0\.\.9, got 10"),
        ({"kind": "dominnt"}, "did you mean 'dominant'"),
        ({"kind": "weights", "weights": (1.0, 2.0)}, "10 numbers, one per class, got 2"),
        ({"kind": "weights", "weights": (-1.0,) * 10}, "must be >= 0"),
        ({"kind": "weights", "weights": (0.0,) * 10}, "not all 0"),
        ({"classes": 0}, "needs labelled data"),
    ],
)
def test_wrong_weights(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        class_weights(**{"classes": 10, "kind": "dominant", **settings})


def test_subset_is_the_largest_with_these_shares() -> None:
    """CIFAR-10's counts at ×27: all 5,000 of the dominant class, 185 (5,000 / 27) of each other."""
    labels = torch.arange(10).repeat(5000)
    ids = subset_ids(labels, class_weights(10, bias=27, dominant=2), seed=0)
    assert torch.bincount(labels[ids]).tolist() == [185, 185, 5000] + [185] * 7
    assert torch.equal(ids, ids.unique())  # ascending, each once
    assert torch.equal(ids, subset_ids(labels, class_weights(10, bias=27, dominant=2), seed=0))
    assert not torch.equal(ids, subset_ids(labels, class_weights(10, bias=27, dominant=2), seed=1))
    assert len(subset_ids(labels, class_weights(10), seed=0)) == 50_000


def test_subset_of_unequal_classes_and_rare_ones() -> None:
    labels = torch.tensor([0] * 100 + [1] * 10 + [2] * 50)
    balanced = subset_ids(labels, class_weights(3), seed=0)
    assert torch.bincount(labels[balanced]).tolist() == [10, 10, 10]
    tail = subset_ids(labels, class_weights(3, bias=1000), seed=0)
    assert torch.bincount(labels[tail]).tolist() == [100, 1, 1]  # a wanted class never vanishes
    without = subset_ids(labels, class_weights(3, kind="weights", weights=(1, 0, 1)), seed=0)
    assert torch.bincount(labels[without], minlength=3).tolist() == [50, 0, 50]


def test_draws_follow_class_weights_and_are_uniform_inside_a_class() -> None:
    labels = torch.randperm(60, generator=torch.Generator().manual_seed(0)) % 3
    weights = class_weights(3, kind="weights", weights=(0.7, 0.3, 0))
    ids = ClassDraw(labels, weights)(90_000, torch.Generator().manual_seed(1))
    seen = torch.bincount(ids, minlength=60) / 90_000
    expected = item_probabilities(labels, weights)
    assert float(expected.sum()) == pytest.approx(1)
    assert float(seen[labels == 2].sum()) == 0
    # Each of 40 frequencies within 4.5 standard errors of its probability.
    error = (expected * (1 - expected) / 90_000).sqrt()
    assert ((seen - expected).abs() <= 4.5 * error).all()


def test_draws_never_leave_the_classes_with_weight() -> None:
    """Weights that do not sum to 1 exactly, a last class of weight 0, and the largest random number there is."""
    labels = torch.tensor([0, 1, 2, 3])
    draw = ClassDraw(labels, torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float64))
    assert set(draw(5000, torch.Generator().manual_seed(0)).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("use", [lambda y, w: subset_ids(y, w, seed=0), ClassDraw, item_probabilities])
def test_a_wanted_class_without_images_and_data_without_labels(use: object) -> None:
    with pytest.raises(UserError, match="class 1 has no images"):
        use(torch.tensor([0, 0, 2]), class_weights(3))
    with pytest.raises(UserError, match="no labels"):
        use(None, class_weights(3))
    with pytest.raises(UserError, match="weights must be 3 numbers"):
        use(torch.tensor([0, 1, 2]), class_weights(2))
