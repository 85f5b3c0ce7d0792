from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import duel
from duel import scores
from duel.errors import UserError
from pools import isotropic

ALL = [
    "linear",
    "quadratic",
    "gaussian",
    "gaussian:0.1",
    "exponential",
    "exponential:0.5",
    "gaussian:0.001",
    "linear+gaussian:0.01",
    "0.1*gaussian:0.1+0.9*gaussian:0.003",
    "0.7*linear+0.2*quadratic+0.1*exponential:0.01",
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", FLOATS)
def test_ends_range_and_monotone_in_every_dtype(name, dtype):
    x = torch.linspace(-1, 1, 513).to(dtype)
    h = scores.get(name)(x)
    assert h.dtype == dtype
    assert h[0] == 0
    assert h[-1] == 1
    assert (h.diff() >= 0).all()


@pytest.mark.parametrize("name", ALL)
def test_tolerates_cosines_a_rounding_outside(name):
    h = scores.get(name)(torch.tensor([-1 - 1e-6, 1 + 1e-6]))
    assert h.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("x", [-0.9, -0.2, 0.0, 0.37, 0.99])
def test_formulas(x):
    at = torch.tensor([x], dtype=torch.float64)
    g, g0 = math.exp(-((x - 1) ** 2) / 0.3), math.exp(-4 / 0.3)
    e, e0 = math.exp((x - 1) / 0.3), math.exp(-2 / 0.3)
    assert scores.linear(at).item() == pytest.approx((1 + x) / 2, abs=1e-15)
    assert scores.quadratic(at).item() == pytest.approx(((1 + x) / 2) ** 2, abs=1e-15)
    assert scores.gaussian(0.3)(at).item() == pytest.approx((g - g0) / (1 - g0), abs=1e-14)
    assert scores.exponential(0.3)(at).item() == pytest.approx((e - e0) / (1 - e0), abs=1e-14)


def test_does_not_change_its_argument():
    x = torch.linspace(-1, 1, 5)
    before = x.clone()
    for name in ALL:
        scores.get(name)(x)
    assert torch.equal(x, before)


def test_by_name_object_and_callable():
    assert scores.get("gaussian:0.1") == scores.gaussian(0.1)
    assert scores.get("gaussian") == scores.gaussian(1.0)
    assert scores.get(scores.gaussian) == scores.gaussian(1.0)
    assert scores.get("exponential") == scores.exponential(0.05)
    cubic = scores.get(lambda x: ((1 + x) / 2) ** 3)
    assert cubic(torch.zeros(1)).item() == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gausian", "did you mean 'gaussian'"),
        ("linear:2", "no width"),
        ("gaussian:wide", "must be a number"),
        ("gaussian:-1", "between 1e-5 and 100"),
        ("0.1*gaussian:0.1", "nothing to weigh it against; write 'gaussian:0.1'"),
        ("much*linear+gaussian", r"the part before '\*' must be a number"),
        ("0.1*0.2*linear+gaussian", r"the part before '\*' must be a number"),
        ("gaussian+0*linear", "weight of 'linear' must lie between 1e-5 and 1e5, got 0"),
        ("-1*linear+2*gaussian", "weight of 'linear' must lie between"),
        ("nan*linear+gaussian", "weight of 'linear' must lie between"),
        ("0.1*gausian+linear", "did you mean 'gaussian'"),
        (3, "must be a name"),
        (lambda x: x, "leaves"),
        (lambda x: (1 - x) / 2, "not monotone"),
        (lambda x: (1 + x) / 4, "must map -1 to 0 and 1 to 1"),
        (lambda x: torch.full_like(x, float("nan")), "leaves"),
        (lambda x: x.sum(), "shape"),
    ],
)
def test_bad_scores_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        scores.get(given)


def test_a_mix_is_the_mean_of_its_parts():
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    mixed = scores.get("gaussian:0.1+exponential:0.01")
    assert torch.allclose(mixed(x), (scores.gaussian(0.1)(x) + scores.exponential(0.01)(x)) / 2)
    assert mixed == scores.mix("gaussian:0.1", scores.exponential(0.01))
    assert mixed != scores.gaussian(0.1)
    with pytest.raises(UserError, match="did you mean 'gaussian'"):
        scores.get("gausian+linear")


def test_a_memory_with_a_mix_is_saved_whole(tmp_path):
    memory = duel.WorkingMemory(64, 8, duel.policies.Duel("0.1*gaussian:0.1+0.9*gaussian:0.003"))
    memory.update(isotropic(80, 8, 0).float())
    torch.save(memory, tmp_path / "memory.pt")
    loaded = torch.load(tmp_path / "memory.pt", weights_only=False)
    assert loaded.policy.score == memory.policy.score
    batch = isotropic(20, 8, 1).float()
    assert loaded.update(batch).tolist() == memory.update(batch).tolist()
    assert torch.equal(loaded.expected_duplicates(), memory.expected_duplicates())


def test_the_weights_of_a_mix_are_shares_of_their_sum():
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    broad, sharp, line = scores.gaussian(0.1), scores.gaussian(0.003), scores.linear
    assert torch.allclose(scores.get("0.1*gaussian:0.1+0.9*gaussian:0.003")(x), 0.1 * broad(x) + 0.9 * sharp(x))
    want = (2 * broad(x) + 5 * sharp(x) + line(x)) / 8
    assert torch.allclose(scores.get("2*gaussian:0.1+5*gaussian:0.003+linear")(x), want)
    assert torch.allclose(scores.mix(broad, sharp, line, weights=(2, 5, 1))(x), want)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("0.1*gaussian:0.1+0.9*gaussian", "0.1*gaussian:0.1+0.9*gaussian:1"),
        ("2*linear+gaussian:0.1", "2*linear+1*gaussian:0.1"),
        ("0.3333333333333333*linear+1e5*exponential", "0.3333333333333333*linear+100000*exponential:0.05"),
        ("0.5*linear+0.5*quadratic", "linear+quadratic"),
    ],
)
def test_the_name_of_a_mix_is_read_as_that_mix(given, name):
    mixed = scores.get(given)
    assert mixed.name == repr(mixed) == name
    again = scores.get(name)
    assert again == mixed
    assert again.name == name
    x = torch.linspace(-1, 1, 101)
    assert torch.equal(again(x), mixed(x))


def test_a_width_of_numpy_is_the_same_width():
    width = np.geomspace(0.01, 1, 7)[1]
    assert scores.gaussian(width) == scores.gaussian(float(width)) == scores.get(scores.gaussian(width).name)
    weights = np.array([0.1, 0.9])
    assert scores.mix("linear", "gaussian", weights=weights).name == "0.1*linear+0.9*gaussian:1"


def test_a_mix_needs_single_scores_and_a_weight_for_each():
    for parts, weights, message in [
        ((), (), "at least one score"),
        (("linear", "gaussian"), (1.0,), "as many weights, got 2 and 1"),
        (("linear", "gaussian"), (1.0, -1.0), "weight of 'gaussian:1'"),
        (("linear+gaussian", "quadratic"), (), r"got the mix 'linear\+gaussian:1'"),
    ]:
        with pytest.raises(UserError, match=message):
            scores.mix(*parts, weights=weights)
