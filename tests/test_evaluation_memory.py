"""What a memory holds, against counting by hand."""

import math

import pytest
import torch

from duel.errors import UserError
from duel.evaluation.memory import class_entropy, collision_rate, largest_share, measure, turnover


def test_entropy_and_share():
    even, one, odd = torch.arange(12) % 4, torch.full((5,), 2), torch.tensor([0, 0, 0, 1])
    assert class_entropy(even, 4) == pytest.approx(1)
    assert class_entropy(one, 4) == 0
    assert class_entropy(odd, 4) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert largest_share(even, 4) == pytest.approx(0.25)
    assert largest_share(odd, 4) == pytest.approx(0.75)


def test_collision_rate_counts_pairs_of_one_class():
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(3, (100,), generator=generator)
    batch, memory = torch.randint(100, (8,), generator=generator), torch.randint(100, (30,), generator=generator)
    memory[:2] = batch[:2]  # two items are in the memory already
    pairs = [(i, j) for i in batch.tolist() for j in memory.tolist()]
    others = [(i, j) for i, j in pairs if i != j]
    assert len(others) < len(pairs)

    def share(among):
        return sum(int(classes[i] == classes[j]) for i, j in among) / len(among)

    assert collision_rate(classes[batch], classes[memory], 3) == pytest.approx(share(pairs))
    found = collision_rate(classes[batch], classes[memory], 3, batch_ids=batch, memory_ids=memory)
    assert found == pytest.approx(share(others))


def test_turnover_counts_changed_and_new_slots():
    assert turnover(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 9, 3, 8])) == pytest.approx(0.5)
    assert turnover(torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])) == pytest.approx(0.5)
    assert turnover(torch.tensor([1]), torch.tensor([1])) == 0


def test_measure_puts_them_together():
    labels = torch.tensor([0, 0, 1, 1, 2])
    ids = torch.tensor([0, 1, 4])
    found = measure(
        ids,
        labels,
        3,
        batch_ids=torch.tensor([2, 4]),
        previous_ids=torch.tensor([0, 3, 4]),
        age=torch.tensor([1, 2, 6]),
    )
    assert {name: pytest.approx(float(value)) for name, value in found.items()} == {
        "class_entropy": float(class_entropy(labels[ids], 3)),
        "largest_share": 2 / 3,
        "collision_rate": 0.0,  # the only same-class pair is an item with its own slot
        "turnover": 1 / 3,
        "mean_age": 3,
        "max_age": 6,
    }
    assert all(value.ndim == 0 for value in found.values())
    assert set(measure(ids, labels, 3)) == {"class_entropy", "largest_share"}


def test_bad_input_is_named():
    ids = torch.arange(3)
    with pytest.raises(UserError, match="memory_ids is empty"):
        measure(ids[:0], ids, 3)
    with pytest.raises(UserError, match="together"):
        collision_rate(ids, ids, 3, batch_ids=ids)
    with pytest.raises(UserError, match="at least the 3 slots of before"):
        turnover(ids, ids[:2])
    with pytest.raises(UserError, match="classes must be >= 2"):
        class_entropy(ids * 0, 1)
