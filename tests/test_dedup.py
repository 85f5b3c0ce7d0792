"""The policy that tells near-copies by a threshold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from duel import WorkingMemory, likeness, policies
from duel.errors import UserError
from duel.likeness import least, unlike
from duel.policies import Dedup
from pools import isotropic

DIM = 16
IDS = {"id": ((), torch.int64)}


def kinds(count: int, copies: int = 1, noise: float = 0.02) -> torch.Tensor:
    """(count, copies, DIM): so many different unit vectors, and near-copies of each, the first being itself."""
    rows = normalize(torch.eye(DIM)[:count], dim=1)
    rest = rows[:, None] + noise * torch.randn(count, copies - 1, DIM, generator=torch.Generator().manual_seed(0))
    return torch.cat([rows[:, None], normalize(rest, dim=2)], 1)


def reference(batches: list[torch.Tensor], size: int, alike: float, numbers) -> list[tuple[int, int]]:
    """The rule written out: (batch, place) of what each slot holds."""
    held: list[tuple[int, int]] = []
    copy: dict[tuple[int, int], bool] = {}

    def row(item):
        return batches[item[0]][item[1]]

    def is_copy(item, others):
        return any(float(row(item) @ row(o)) >= least(alike) for o in others if not copy.get(o, False))

    for b, batch in enumerate(batches):
        full = len(held) == size
        before, rest = list(held), []
        for i in range(len(batch)):
            if len(held) < size:
                held.append((b, i))
            else:
                rest.append((b, i))
        if len(held) == size and not full:
            for k, item in enumerate(held):
                copy[item] = is_copy(item, held[:k])
            before = list(held)
        for k, item in enumerate(rest):
            copy[item] = is_copy(item, [*before, *rest[:k]])
        order, seen = {}, set()
        for k, item in enumerate([*before, *rest]):
            number = int(numbers(row(item)[None]))
            order[item] = (2, 0, k) if number in seen else (int(copy.get(item, False)), number, k)
            seen.add(number)
        stay = set(sorted(order, key=order.__getitem__)[:size])
        free = [k for k, item in enumerate(before) if item not in stay]
        for item in rest:
            if item in stay:
                held[free.pop(0)] = item
    return held


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    batches=st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=14), min_size=1, max_size=7),
    seed=st.integers(0, 99),
    alike=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_it_is_the_rule_written_out(size, batches, seed, alike):
    pool = kinds(10, 4)
    given_rows = [torch.stack([pool[at] for at in batch]) if batch else pool[:0, 0] for batch in batches]
    memory = WorkingMemory(size, DIM, Dedup(alike=alike, seed=seed), IDS)
    for b, rows in enumerate(given_rows):
        memory.update(rows, id=100 * b + torch.arange(len(rows)))
    want = reference(given_rows, size, alike, memory.policy._numbers)
    assert memory["id"].tolist() == [100 * b + i for b, i in want]


def test_what_looks_like_an_item_that_is_held_is_turned_away():
    pool = kinds(8, 3)
    memory = WorkingMemory(4, DIM, "dedup", IDS)
    memory.update(pool[:4, 0], id=torch.arange(4))
    assert memory.update(pool[:4, 1:].flatten(0, 1), id=torch.arange(8)).tolist() == [-1] * 8
    assert memory["id"].tolist() == [0, 1, 2, 3]


def slowly(count: int) -> torch.Tensor:
    """Unit vectors, each at a cosine of .95 from the next and less than .9 from those after that."""
    turned = torch.arange(count) * torch.arccos(torch.tensor(0.95))
    return torch.stack([turned.cos(), turned.sin(), *torch.zeros(DIM - 2, count)], 1)


@pytest.mark.parametrize("when", ["held", "filling", "one update", "several updates"])
def test_what_is_like_only_what_was_turned_away_is_no_copy(when):
    """Of a scene that changes slowly every other frame is held, also where it went through the one between."""
    frames, ids = slowly(9), torch.arange(9)
    memory = WorkingMemory(9 if when == "filling" else 1 if when == "held" else 5, DIM, Dedup(), IDS)
    if when == "held":
        memory.update(frames[:1], id=ids[:1])
        assert not memory.policy.copies.any()
        numbers = torch.cat([memory.policy.numbers, memory.policy._numbers(frames[1:3])])
        found = memory.update(frames[1:3], id=ids[1:3])
        assert found.tolist() == [-1, 0 if numbers[2] < numbers[0] else -1]
    elif when == "filling":
        memory.update(frames, id=ids)
        assert memory.policy.copies.tolist() == [False, True] * 4 + [False]
    else:
        memory.update(frames[[0] * 5], id=ids[[0] * 5])
        for part in [ids[1:]] if when == "one update" else ids[1:].split(1):
            memory.update(frames[part], id=part)
        assert sorted(memory["id"].tolist()) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_on_a_gpu_which_is_not_waited_for_the_same_are_told(count, monkeypatch):
    rows = torch.cat([slowly(count // 2), slowly(count - count // 2)])[
        torch.randperm(count, generator=torch.Generator().manual_seed(0))
    ]
    held, counts = isotropic(5, DIM, 1, torch.float32), torch.tensor([True, False] * 2 + [True])
    want = unlike(rows, 0.9, held, counts)
    monkeypatch.setattr(likeness, "_may_wait", lambda device: False)
    assert unlike(rows, 0.9, held, counts).equal(want)
    kept = list(held[counts])
    for row, good in zip(rows, want, strict=True):
        assert bool(good) == (float((torch.stack(kept) @ row).max()) < least(0.9))
        kept += [row] if good else []


def test_what_is_orthogonal_is_not_alike_by_any_threshold():
    assert unlike(torch.cat([torch.eye(4), torch.zeros(2, 4)]), 1e-9).all()


def test_copies_leave_for_anything_else_and_fill_what_is_left():
    pool = kinds(8, 4)
    memory = WorkingMemory(6, DIM, Dedup(), IDS)
    memory.update(pool[0, [0, 1, 2, 3, 0, 0]], id=torch.tensor([0, 1, 2, 3, 0, 0]))
    # the very same vector leaves first, then near-copies, whichever of them
    assert memory.update(pool[1:3, 0], id=torch.tensor([10, 20])).tolist() == [4, 5]
    slots = memory.update(pool[3:5, 0], id=torch.tensor([30, 40]))
    assert set(slots.tolist()) < {1, 2, 3}
    assert {0, 10, 20, 30, 40} < set(memory["id"].tolist())


def test_how_often_the_very_same_vector_comes_does_not_matter():
    """Item 0 is nine tenths of the stream; in 300 memories of 5 over 15 items every item is held 100 times or so."""
    pool, held = kinds(15)[:, 0], torch.zeros(15)
    for seed in range(300):
        draws = torch.randint(0, 15, (300,), generator=torch.Generator().manual_seed(seed))
        draws[torch.rand(300, generator=torch.Generator().manual_seed(seed + 1000)) < 0.9] = 0
        draws[-15:] = torch.arange(15)  # all have come
        memory = WorkingMemory(5, DIM, Dedup(seed=seed), IDS)
        for batch in draws.split(50):
            memory.update(pool[batch], id=batch)
        assert memory["id"].unique().numel() == 5
        held[memory["id"]] += 1
    assert 65 < held.min() < held.max() < 135  # 100 expected, standard deviation 8


def test_blocks_of_cosines_give_what_one_gives(monkeypatch):
    pool = kinds(12, 6).flatten(0, 1)[torch.randperm(72, generator=torch.Generator().manual_seed(1))]
    found = []
    for part, elements in ((1, 1), (7, 100), (256, 1 << 24)):
        monkeypatch.setattr(likeness, "PART", part)
        monkeypatch.setattr(likeness, "ELEMENTS", elements)
        memory = WorkingMemory(30, DIM, Dedup(), IDS)
        for batch in torch.arange(72).split(9):
            memory.update(pool[batch], id=batch)
        found.append(memory["id"].tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype(dtype):
    pool = kinds(8, 3).to(dtype)
    memory = WorkingMemory(4, DIM, Dedup(), IDS, dtype=dtype, normalize=True)
    memory.update(pool[:4, 0], id=torch.arange(4))
    assert memory.update(pool[:4].flatten(0, 1), id=torch.arange(12)).tolist() == [-1] * 12


def test_numbers_survive_what_embeddings_do_not():
    """A memory that is moved to half precision keeps its items' numbers, and a reset one begins anew."""
    memory = WorkingMemory(4, DIM, Dedup(), IDS)
    memory.update(isotropic(4, DIM, 0, torch.float32), id=torch.arange(4))
    before = memory.policy.numbers.clone()
    assert before.unique().numel() == 4
    assert memory.half().policy.numbers.equal(before)
    memory.reset()
    assert not memory.policy.numbers.any()


def test_a_newcomer_that_takes_no_part_makes_no_other_a_copy():
    memory = WorkingMemory(3, DIM, Dedup())
    memory.update(kinds(1, 3)[0])
    incoming = torch.stack([torch.zeros(DIM), kinds(2)[1, 0]])
    assert memory.policy.choose(memory, incoming).tolist()[0] == -1
    assert memory.policy.choose(memory, incoming[[0, 0]]).tolist() == [-1, -1]


def test_zero_and_minus_zero_are_one_number():
    rows = torch.eye(DIM)[:1]
    policy = WorkingMemory(3, DIM, Dedup()).policy
    assert policy._numbers(rows).equal(policy._numbers(torch.where(rows == 0, -0.0, rows)))
    assert not policy._numbers(rows).equal(policy._numbers(rows.roll(1, 1)))
    assert not policy._numbers(rows).equal(Dedup(seed=1)._numbers(rows))


def test_what_it_takes():
    assert repr(Dedup(seed=3)) == "Dedup(alike=0.9, seed=3)"
    for wrong in (0, -0.1, 1.1, float("nan"), "0.9"):
        with pytest.raises(UserError, match="alike must be a cosine above 0 and at most 1"):
            Dedup(alike=wrong)
    with pytest.raises(UserError, match=r"policy dedup lets items leave for what they are, .*leave max_age 3 out"):
        policies.Dedup(max_age=3)
