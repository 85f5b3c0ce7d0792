"""Each loss against a loop over plain numbers in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from duel.losses import info_nce, negative_cosine, nt_xent, unit


def rows(n: int, d: int = 8, seed: int = 0) -> Tensor:
    return 3 * torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def cosine(a: Tensor, b: Tensor) -> float:
    x, y = a.tolist(), b.tolist()
    dot = sum(p * q for p, q in zip(x, y, strict=True))
    return dot / math.sqrt(sum(p * p for p in x) * sum(q * q for q in y))


def softmax_loss(positive: float, negatives: list[float], temperature: float) -> float:
    return -math.log(math.exp(positive / temperature) / sum(math.exp(c / temperature) for c in [positive, *negatives]))


@pytest.mark.parametrize("temperature", [0.1, 0.7])
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_info_nce_is_the_plain_formula(temperature: float, in_batch: bool, mask: bool) -> None:
    b, n = 5, 7
    q, k, m = rows(b, seed=1), rows(b, seed=2), rows(n, seed=3)
    ids = torch.tensor([4, 1, 4, 2, 3]) if mask else None
    blocked = torch.rand(b, n, generator=torch.Generator().manual_seed(4)) < 0.4 if mask else None
    wanted = 0.0
    for i in range(b):
        negatives = [cosine(q[i], m[j]) for j in range(n) if blocked is None or not blocked[i, j]]
        if in_batch:
            negatives += [cosine(q[i], k[j]) for j in range(b) if j != i and (ids is None or ids[i] != ids[j])]
        wanted += softmax_loss(cosine(q[i], k[i]), negatives, temperature) / b
    got = info_nce(q, k, m, temperature=temperature, blocked=blocked, in_batch=in_batch, ids=ids)
    assert got.shape == ()
    assert float(got) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.1, 0.7])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_nt_xent_is_the_plain_formula(temperature: float, memory: bool, mask: bool) -> None:
    b, n = 4, 6
    z1, z2, m = rows(b, seed=1), rows(b, seed=2), rows(n, seed=3) if memory else None
    ids = torch.tensor([9, 2, 9, 5]) if mask else None
    blocked = torch.rand(b, n, generator=torch.Generator().manual_seed(4)) < 0.4 if mask and memory else None
    views, item = torch.cat([z1, z2]), [*range(b), *range(b)]
    wanted = 0.0
    for i in range(2 * b):
        other = (i + b) % (2 * b)
        negatives = []
        for j in range(2 * b):
            same = ids is not None and bool(ids[item[i]] == ids[item[j]])
            if j not in (i, other) and not same:
                negatives.append(cosine(views[i], views[j]))
        if m is not None:
            negatives += [cosine(views[i], m[j]) for j in range(n) if blocked is None or not blocked[item[i], j]]
        wanted += softmax_loss(cosine(views[i], views[other]), negatives, temperature) / (2 * b)
    got = nt_xent(z1, z2, temperature=temperature, negatives=m, blocked=blocked, ids=ids)
    assert float(got) == pytest.approx(wanted, rel=1e-5)


def test_negative_cosine_is_the_plain_formula() -> None:
    p, z = rows(6, seed=1), rows(6, seed=2)
    assert float(negative_cosine(p, z)) == pytest.approx(-sum(map(cosine, p, z)) / 6, rel=1e-5)
    assert float(negative_cosine(p, 5 * p)) == pytest.approx(-1)


def test_gradient_reaches_only_the_side_that_learns() -> None:
    q, k, m, z1, z2, p, z = (rows(5, seed=s).requires_grad_() for s in range(7))
    (info_nce(q, k, m, temperature=0.2, in_batch=True) + nt_xent(z1, z2, temperature=0.2, negatives=m)).backward()
    negative_cosine(p, z).backward()
    for learns in (q, z1, z2, p):
        assert learns.grad is not None
        assert bool((learns.grad.abs().sum(1) > 0).all())
    for stops in (k, m, z):
        assert stops.grad is None


def test_gradients_by_finite_differences() -> None:
    """The loss computes in float32, so the step is coarse and so is the tolerance."""
    q, k, m = rows(3, 4, seed=1), rows(3, 4, seed=2), rows(5, 4, seed=3)
    blocked = torch.zeros(3, 5, dtype=torch.bool)
    blocked[:, 2] = True
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(info_nce(q, k, m, temperature=0.5, blocked=blocked), q)
    step = 1e-2
    for i in range(3):
        for j in range(4):
            nudge = torch.zeros_like(q)
            nudge[i, j] = step
            up, down = (info_nce(q + s * nudge, k, m, temperature=0.5, blocked=blocked).item() for s in (1, -1))
            assert (up - down) / (2 * step) == pytest.approx(gradient[i, j].item(), abs=2e-3)


def test_a_blocked_negative_has_no_influence_and_all_blocked_is_zero_loss() -> None:
    q, k, m = rows(3, seed=1), rows(3, seed=2), rows(4, seed=3)
    blocked = torch.zeros(3, 4, dtype=torch.bool)
    blocked[:, 1] = True
    changed = m.clone()
    changed[1] = q[0]
    one, two = (info_nce(q, k, x, temperature=0.1, blocked=blocked) for x in (m, changed))
    assert torch.equal(one, two)
    q.requires_grad_()
    none_left = info_nce(q, k, m, temperature=0.1, blocked=torch.ones(3, 4, dtype=torch.bool))
    none_left.backward()  # type: ignore[no-untyped-call]
    assert none_left.item() == pytest.approx(0, abs=1e-6)
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


def test_float32_inside_autocast() -> None:
    q, k, m = rows(64, 128, seed=1), rows(64, 128, seed=2), rows(64, 128, seed=3)

    def losses() -> Tensor:
        return torch.stack(
            [
                info_nce(q, k, m, temperature=0.1, in_batch=True),
                nt_xent(q, k, temperature=0.1, negatives=m),
                negative_cosine(q, k),
            ]
        )

    outside = losses()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = losses()
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    half = info_nce(q.bfloat16(), k.bfloat16(), m, temperature=0.1)
    assert half.dtype == torch.float32


def test_unit_rows_also_of_zeros() -> None:
    assert torch.allclose(unit(rows(5)).norm(dim=1), torch.ones(5))
    assert bool((unit(torch.zeros(2, 3)) == 0).all())


@pytest.mark.parametrize("temperature", [0.05, 0.5])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("memory", [False, True])
def test_the_debiased_loss_is_the_plain_formula(temperature: float, chance: float, memory: bool) -> None:
    """Chuang et al. 2020, row by row; the larger chance makes the estimate hit its lower bound in some rows."""
    b, n = 4, 3
    z1, m = rows(b, seed=1), rows(n, seed=3) if memory else None
    z2 = z1 + 0.5 * rows(b, seed=2)
    ids = torch.tensor([9, 2, 9, 5])
    views, item = torch.cat([z1, z2]), [9, 2, 9, 5, 9, 2, 9, 5]
    wanted, bounded = 0.0, 0
    for i in range(2 * b):
        positive = math.exp(cosine(views[i], views[(i + b) % (2 * b)]) / temperature)
        others = [cosine(views[i], views[j]) for j in range(2 * b) if item[j] != item[i]]
        others += [] if m is None else [cosine(views[i], row) for row in m]
        raw = sum(math.exp(c / temperature) for c in others)
        estimate = (raw - len(others) * chance * positive) / (1 - chance)
        least = len(others) * math.exp(-1 / temperature)
        bounded += estimate < least
        wanted += -math.log(positive / (positive + max(estimate, least))) / (2 * b)
    got = nt_xent(z1, z2, temperature=temperature, negatives=m, ids=ids, debias=chance)
    assert float(got) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert bounded if chance == 0.6 else chance or not bounded
    if chance == 0:
        plain = nt_xent(z1, z2, temperature=temperature, negatives=m, ids=ids)
        assert float(got) == pytest.approx(float(plain), rel=1e-5, abs=1e-5)


def test_the_debiased_loss_has_finite_gradients_and_takes_a_temperature_on_the_device() -> None:
    z = rows(6, seed=5).requires_grad_()
    ids = torch.tensor([1, 1, 2, 3, 4, 5])
    for temperature in (0.05, torch.tensor(0.05)):
        loss = nt_xent(z, z.flip(1), temperature=temperature, ids=ids, debias=0.1)
        (gradient,) = torch.autograd.grad(loss, z)
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0
    for temperature in (0.01, 0.002):  # what is taken off is more than float32 holds
        loss = nt_xent(z, z, temperature=temperature, ids=ids, debias=0.1)
        (gradient,) = torch.autograd.grad(loss, z)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("debias", [None, 0.1])
def test_an_anchor_whose_every_negative_is_blocked_has_a_finite_gradient(debias: float | None) -> None:
    z1, z2, negatives = (torch.randn(n, 8) for n in (1, 1, 3))
    blocked = torch.ones(1, 3, dtype=torch.bool)
    z1.requires_grad_()
    loss = nt_xent(z1, z2, temperature=0.2, negatives=negatives, blocked=blocked, debias=debias)
    loss = loss + info_nce(z1, z2, negatives, temperature=0.2, blocked=blocked, in_batch=True)
    loss.backward()
    assert loss == 0
    assert z1.grad is not None
    assert z1.grad.abs().max() < 1e-6
