"""Neighbours against scikit-learn and brute force; Top-k and the weighted vote against plain computations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from duel.errors import UserError
from duel.evaluation.knn import nearest, topk, weighted_knn
from duel.evaluation.numerics import exact_matmul


def clusters(n: int, classes: int = 5, d: int = 16, seed: int = 0, spread: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (n,), generator=generator)
    return centres[labels] + spread * torch.randn(n, d, generator=generator), labels


def brute(queries, bank, k, exclude_self=False):
    """Sorted lists in Python: by cosine, then by row."""
    unit = [torch.nn.functional.normalize(x, dim=1) for x in (queries, bank)]
    cosine = (unit[0] @ unit[1].T).tolist()
    found = []
    for i, row in enumerate(cosine):
        order = sorted((-value, j) for j, value in enumerate(row) if not (exclude_self and i == j))
        found.append([j for _, j in order[:k]])
    return torch.tensor(found)


@pytest.mark.parametrize("chunks", [(None, None), (7, 11), (64, 5), (1, 300)])
def test_neighbours_are_sklearns(chunks):
    queries, bank = clusters(90, seed=1)[0].double(), clusters(300, seed=2)[0].double()
    found = nearest(queries, bank, 20, query_chunk=chunks[0], bank_chunk=chunks[1])
    distance, rows = NearestNeighbors(metric="cosine", algorithm="brute").fit(bank).kneighbors(queries, 20)
    assert torch.equal(found.rows, torch.from_numpy(rows))
    torch.testing.assert_close(found.similarity, 1 - torch.from_numpy(distance))


@pytest.mark.parametrize("chunks", [(None, None), (7, 11), (50, 13), (13, 50)])
def test_excluding_self_is_sklearns_own_exclusion(chunks):
    points = clusters(200, seed=3)[0].double()
    found = nearest(points, points, 10, exclude_self=True, query_chunk=chunks[0], bank_chunk=chunks[1])
    rows = NearestNeighbors(metric="cosine", algorithm="brute").fit(points).kneighbors(n_neighbors=10)[1]
    assert torch.equal(found.rows, torch.from_numpy(rows))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 15), st.integers(1, 15), st.booleans())
def test_ties_go_to_the_lowest_row(seed, k, query_chunk, bank_chunk, exclude_self):
    # Signed unit vectors: cosines are exactly -1, 0 or 1, so nearly everything is tied, inside the k and at its edge.
    generator = torch.Generator().manual_seed(seed)
    bank = torch.eye(3)[torch.randint(3, (24,), generator=generator)]
    bank *= torch.randint(2, (24, 1), generator=generator) * 2 - 1
    queries = bank if exclude_self else bank[torch.randperm(24, generator=generator)[:9]]
    found = nearest(queries, bank, k, exclude_self=exclude_self, query_chunk=query_chunk, bank_chunk=bank_chunk)
    assert torch.equal(found.rows, brute(queries, bank, k, exclude_self))


def test_a_collapsed_encoder_has_neighbours_in_order_of_row():
    found = nearest(torch.ones(3, 4), torch.ones(100, 4), 30, bank_chunk=17)
    assert torch.equal(found.rows, torch.arange(30).expand(3, 30))


def test_never_the_whole_matrix(monkeypatch):
    largest = 0
    multiply = torch.Tensor.__matmul__

    def watched(a, b):
        nonlocal largest
        product = multiply(a, b)
        largest = max(largest, product.numel())
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    nearest(torch.randn(1000, 4), torch.randn(30_000, 4), 3)
    assert 0 < largest <= 2**22 < 1000 * 30_000


def test_topk_is_a_share_of_images_with_a_same_class_neighbour():
    points, labels = clusters(150, spread=2.5)
    found = topk(points, points, labels, labels, (1, 3, 10), exclude_self=True)
    rows = brute(points, points, 10, exclude_self=True)
    for k in (1, 3, 10):
        hits = [any(labels[j] == labels[i] for j in rows[i, :k]) for i in range(150)]
        assert found[f"top{k}"] == pytest.approx(sum(hits) / 150)
    assert found["top1"] < found["top3"] < found["top10"] <= 1


def test_weighted_vote_is_wu_et_als():
    bank, bank_labels = clusters(400, seed=1, spread=3.0)
    queries, labels = clusters(120, seed=2, spread=3.0)
    found = weighted_knn(queries, bank, labels, bank_labels, k=50, temperature=0.1)
    votes = torch.zeros(120, 5, dtype=torch.float64)
    cosine = torch.nn.functional.normalize(queries.double()) @ torch.nn.functional.normalize(bank.double()).T
    for i, rows in enumerate(brute(queries, bank, 50)):
        for j in rows.tolist():
            votes[i, bank_labels[j]] += math.exp(float(cosine[i, j]) / 0.1)
    right = votes.argmax(1) == labels
    assert found["accuracy"] == pytest.approx(float(right.double().mean()))
    assert found["per_class"] == pytest.approx([float(right[labels == c].double().mean()) for c in range(5)])
    assert found["balanced_accuracy"] == pytest.approx(sum(found["per_class"]) / 5)
    assert 0.3 < found["accuracy"] < 0.95  # neither trivial nor chance


def test_a_very_low_temperature_is_the_nearest_neighbour():
    """Where exp(cosine / temperature) by itself has long overflowed."""
    bank, bank_labels = clusters(400, seed=1, spread=3.0)
    queries, labels = clusters(120, seed=2, spread=3.0)
    found = weighted_knn(queries, bank, labels, bank_labels, k=50, temperature=1e-5)
    assert found["accuracy"] == pytest.approx(topk(queries, bank, labels, bank_labels, (1,))["top1"])


def test_weighted_vote_is_sklearns_with_the_same_weights():
    bank, bank_labels = clusters(400, seed=1, spread=3.0)
    queries, labels = clusters(120, seed=2, spread=3.0)
    model = KNeighborsClassifier(
        50, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.1)
    ).fit(bank.double().numpy(), bank_labels.numpy())
    assert weighted_knn(queries.double(), bank.double(), labels, bank_labels, k=50)["accuracy"] == pytest.approx(
        model.score(queries.double().numpy(), labels.numpy())
    )


def test_a_class_without_test_images_is_left_out_of_the_balance():
    bank, bank_labels = clusters(100, seed=1, spread=0.1)
    keep = bank_labels != 4
    found = weighted_knn(bank[keep], bank, bank_labels[keep], bank_labels, k=5, classes=5)
    assert found["per_class"][4] is None
    assert found["balanced_accuracy"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 6}, "k must lie between 1 and 5"),
        ({"k": 0}, "got 0"),
        ({"k": 5, "exclude_self": True}, "between 1 and 4"),
        ({"k": 1, "queries": torch.ones(5, 4)}, r"\(5, 4\) and \(5, 3\)"),
        ({"k": 1, "queries": torch.ones(2, 3), "exclude_self": True}, "same rows, got 2 and 5"),
        ({"k": 1, "queries": torch.ones(0, 3)}, "q, n >= 1"),
    ],
)
def test_bad_input_is_named(arguments, words):
    given = {"queries": torch.ones(5, 3), "bank": torch.ones(5, 3), **arguments}
    with pytest.raises(UserError, match=words):
        nearest(**given)


def test_bad_labels_are_named():
    x = torch.ones(5, 3)
    with pytest.raises(UserError, match=r"query labels must have shape \(5,\), got \(4,\)"):
        topk(x, x, torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), (1,))
    with pytest.raises(UserError, match="bank labels must be >= 0"):
        topk(x, x, torch.zeros(5, dtype=torch.int64), torch.full((5,), -1), (1,))


def test_precision_of_training_is_overridden_and_put_back():
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16), exact_matmul(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
