"""The policy that knows exact copies by their ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duel import WorkingMemory, policies
from duel.errors import UserError
from duel.hashing import uniform
from duel.policies import Distinct
from pools import isotropic

IDS = {"id": ((), torch.int64)}


def offer(memory: WorkingMemory, ids: torch.Tensor) -> torch.Tensor:
    return memory.update(isotropic(len(ids), 4, 0, torch.float32), id=ids)


def lowest(seen: set[int], size: int, seed: int) -> set[int]:
    """The ids whose own random numbers are the lowest."""
    numbers = torch.tensor(sorted(seen))
    return set(numbers[uniform(seed, numbers).argsort()[:size]].tolist())


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 12),
    batches=st.lists(st.lists(st.integers(-3, 20), max_size=15), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_it_holds_the_ids_with_the_lowest_numbers_of_all_that_came(size, batches, seed):
    """However they were cut into batches and however often each came; copies only where there are too few ids."""
    memory, seen, came = WorkingMemory(size, 4, Distinct(seed=seed), IDS), set(), 0
    for batch in batches:
        full = len(memory) == size
        before = memory["id"].tolist()
        slots = offer(memory, torch.tensor(batch, dtype=torch.int64)).tolist()
        seen |= set(batch)
        came += len(batch)
        held = memory["id"].tolist()
        if full:
            assert lowest(seen, size, seed) <= set(held) <= seen
            for number, slot in zip(batch, slots, strict=True):  # nothing that was held is taken in again
                assert slot == -1 or number not in before
        assert len(held) == min(size, came)


def test_how_often_an_item_comes_does_not_matter():
    """Item 0 is nine tenths of the stream; in 400 memories of 10 over 50 items every item is held 80 times or so."""
    held = torch.zeros(50)
    for seed in range(400):
        draws = torch.randint(0, 50, (600,), generator=torch.Generator().manual_seed(seed))
        draws[torch.rand(600, generator=torch.Generator().manual_seed(seed + 1000)) < 0.9] = 0
        draws[-50:] = torch.arange(50)  # all have come
        memory = WorkingMemory(10, 4, Distinct(seed=seed), IDS)
        for batch in draws.split(60):
            offer(memory, batch)
        assert memory["id"].unique().numel() == 10
        held[memory["id"]] += 1
    assert 40 < held.min() < held.max() < 130  # 80 expected, standard deviation 8


def test_copies_from_the_filling_leave_for_anything_else():
    memory = WorkingMemory(4, 4, Distinct(), IDS)
    offer(memory, torch.tensor([7, 7, 7, 7]))
    assert offer(memory, torch.tensor([7, 1, 1, 2])).tolist() == [-1, 2, -1, 3]
    assert sorted(memory["id"].tolist()) == [1, 2, 7, 7]


def test_a_newcomer_that_takes_no_part_makes_no_other_a_copy():
    memory = WorkingMemory(3, 4, Distinct(), IDS)
    offer(memory, torch.tensor([5, 5, 5]))
    incoming = isotropic(2, 4, 1, torch.float32)
    incoming[0] = 0.0
    memory.arriving.update(id=torch.tensor([9, 9]))
    assert memory.policy.choose(memory, incoming).tolist() == [-1, 2]


def test_it_needs_ids_and_no_age():
    for payload in (None, {"id": ((2,), torch.int64)}, {"id": ((), torch.float32)}):
        with pytest.raises(UserError, match="distinct needs the memory to keep ids"):
            WorkingMemory(4, 4, "distinct", payload)
    assert repr(Distinct(seed=3)) == "Distinct(seed=3)"
    with pytest.raises(UserError, match=r"policy distinct lets items leave for what they are, .*leave max_age 3 out"):
        policies.Distinct(max_age=3)
