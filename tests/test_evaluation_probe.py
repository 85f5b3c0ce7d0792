"""The probe against autograd with torch.optim.SGD, and against scikit-learn's logistic regression."""

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from duel.errors import UserError
from duel.evaluation import probe as module
from duel.evaluation.probe import fit, linear_probe, nearest_centroid, standardised

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


def digits():
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float() / 16, y[order].long()
    return x[:1297], y[:1297], x[1297:], y[1297:]


def by_autograd(x, y, classes, *, epochs, lr, momentum, weight_decay, batch_size, seed):
    """The textbook loop: nn.Linear, cross-entropy, torch.optim.SGD."""
    layer = nn.Linear(x.shape[1], classes, device=x.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for ids in torch.randperm(len(x), generator=generator).to(x.device).split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(x[ids]), y[ids]).backward()
            optimizer.step()
    return layer


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("block_steps", [256, 3])  # one block an epoch, and several with a shorter last one
def test_weights_are_those_of_autograd_and_torch_sgd(device, block_steps, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_STEPS", block_steps)
    x, y, _, _ = (part.to(device) for part in digits())
    choice = {"epochs": 7, "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "batch_size": 100, "seed": 3}
    inputs = module._with_one(x)
    with torch.no_grad():
        weights = fit(inputs, y, 10, **choice)
    layer = by_autograd(x, y, 10, **choice)
    torch.testing.assert_close(weights[:, :64], layer.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights[:, 64], layer.bias.detach(), rtol=1e-4, atol=1e-5)
    assert not weights[:, 65:].any()
    assert weights.abs().max() > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_graph_is_the_eager_loop(monkeypatch):
    x, y, test_x, test_y = (part.cuda() for part in digits())
    captured = linear_probe(x, y, test_x, test_y, epochs=20)
    monkeypatch.setattr(module, "_captured", lambda run, state: run)
    assert linear_probe(x, y, test_x, test_y, epochs=20) == captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_no_epoch(monkeypatch):
    """As an eager loop: making a graph waits, replaying one does not."""
    monkeypatch.setattr(module, "_captured", lambda run, state: run)
    x, y, _, _ = (part.cuda() for part in digits())
    inputs = module._with_one(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            fit(inputs, y, 10, epochs=3, lr=0.1, momentum=0.9, weight_decay=0.0, batch_size=100, seed=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_probe_reaches_the_optimum_of_logistic_regression():
    """Tolerance: 0.002 on every predicted probability."""
    x, y, test_x, _ = digits()
    decay = 1e-2
    inputs, test_inputs = module._with_one(x), module._with_one(test_x)
    with torch.no_grad():
        weights = fit(inputs, y, 10, epochs=400, lr=0.3, momentum=0.9, weight_decay=decay, batch_size=len(x), seed=0)
    # scikit-learn minimises C × the sum of the losses + |w|²/2, we the mean loss + decay × |w|²/2; the column of ones
    # instead of an intercept makes both decay the bias
    model = LogisticRegression(C=1 / (len(x) * decay), tol=1e-6, max_iter=2000, fit_intercept=False).fit(inputs, y)
    ours = torch.softmax(test_inputs @ weights.T, dim=1)
    assert (ours - torch.from_numpy(model.predict_proba(test_inputs))).abs().max() < 2e-3


def test_probe_is_as_accurate_as_logistic_regression():
    """Tolerance: one point of accuracy (5 of 500 images), for SGD on batches of 256."""
    x, y, test_x, test_y = digits()
    found = linear_probe(x, y, test_x, test_y, lr=0.1)
    expected = LogisticRegression(C=1.0, max_iter=2000).fit(x, y).score(test_x, test_y)
    assert found["accuracy"] == pytest.approx(expected, abs=0.01)
    assert not found["diverged"]
    assert found["train_accuracy"] > found["accuracy"]


def test_standardised_features_are_fitted_where_a_common_offset_spoils_the_probe():
    x, y, test_x, test_y = digits()
    offset = 100 * torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0))
    spoilt = linear_probe(x + offset, y, test_x + offset, test_y)
    seen, unseen = standardised(x + offset, test_x + offset)
    mended = linear_probe(seen, y, unseen, test_y)
    assert not spoilt["diverged"]
    assert spoilt["train_accuracy"] < 0.9 < mended["accuracy"]
    seen, unseen = standardised(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[4.0, 6.0]]))
    assert seen.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert unseen.tolist() == [[2.0, 1.0]]  # a feature that never varied is left as it is


def test_same_seed_same_result_and_the_seed_matters():
    x, y, _, _ = digits()
    inputs = module._with_one(x)
    choice = {"epochs": 2, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "batch_size": 64}
    with torch.no_grad():
        runs = [fit(inputs, y, 10, seed=seed, **choice) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_global_random_state_is_left_alone():
    x, y, test_x, test_y = digits()
    before = torch.get_rng_state()
    linear_probe(x, y, test_x, test_y, epochs=1)
    nearest_centroid(x, y, test_x, test_y)
    assert torch.equal(before, torch.get_rng_state())


def test_divergence_is_said():
    x, y, test_x, test_y = digits()
    assert linear_probe(x * 1e20, y, test_x, test_y, epochs=3, lr=1e20)["diverged"]


def test_per_class_rates_of_the_probe():
    x, y, test_x, test_y = digits()
    found = linear_probe(x, y, test_x, test_y, epochs=5, lr=0.1)
    weight = [float((test_y == c).double().mean()) for c in range(10)]
    assert sum(w * r for w, r in zip(weight, found["per_class"], strict=True)) == pytest.approx(found["accuracy"])
    assert found["balanced_accuracy"] == pytest.approx(sum(found["per_class"]) / 10)


def test_nearest_centroid_with_all_images_is_sklearns():
    # As many shots as images, so the draw is the whole class; among unit means the nearest is the most aligned.
    x, y, test_x, test_y = digits()
    keep = torch.cat([(y == c).nonzero()[:100, 0] for c in range(10)])
    unit, test_unit = nn.functional.normalize(x[keep]), nn.functional.normalize(test_x)
    means = torch.stack([unit[y[keep] == c].mean(0) for c in range(10)])
    model = KNeighborsClassifier(1, metric="cosine", algorithm="brute").fit(means, range(10))
    found = nearest_centroid(x[keep], y[keep], test_x, test_y, shots=100, repeats=2)
    assert found["accuracy"] == pytest.approx(model.score(test_unit, test_y))
    assert found["std"] < 1e-3


def test_five_shots_are_seeded_fewer_and_worse():
    x, y, test_x, test_y = digits()
    five = nearest_centroid(x, y, test_x, test_y)
    assert five == nearest_centroid(x, y, test_x, test_y)
    assert five != nearest_centroid(x, y, test_x, test_y, seed=1)
    assert 0.6 < five["accuracy"] < nearest_centroid(x, y, test_x, test_y, shots=50)["accuracy"]
    assert five["std"] > 0


def test_bad_input_is_named():
    x, y, test_x, test_y = digits()
    with pytest.raises(UserError, match=r"shots must be <= .* training images of class .*, got 1000"):
        nearest_centroid(x, y, test_x, test_y, shots=1000)
    with pytest.raises(UserError, match="test labels must be >= 0 and < 5"):
        linear_probe(x[y < 5], y[y < 5], test_x, test_y, classes=5)
