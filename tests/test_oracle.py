"""The control that sees the labels: exactly the stated rule, a balanced memory, nothing read on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duel import WorkingMemory, policies
from duel.errors import UserError
from duel.evaluation.memory import class_entropy
from duel.policies import Oracle, Policy
from pools import isotropic
from test_methods import NoHostReads

IDS = {"id": ((), torch.int64)}


def stated(residents, newcomers, size, classes):
    """The rule in plain Python. residents: (class, admitted) per slot; newcomers: class, or None for one left out."""
    pool = [(c, (0, admitted, slot)) for slot, (c, admitted) in enumerate(residents)]
    pool += [(c, (1, b, 0)) for b, c in enumerate(newcomers) if c is not None]
    counts = [sum(c == k for c, _ in pool) for k in range(classes)]
    level = max(n for n in range(size + 1) if sum(min(c, n) for c in counts) <= size)
    quota = [min(c, level) for c in counts]
    for k in range(classes):
        if counts[k] > quota[k] and sum(quota) < size:
            quota[k] += 1
    kept = set()
    for k in range(classes):
        kept |= set(sorted((when for c, when in pool if c == k), reverse=True)[: quota[k]])
    free = [slot for slot, (_, admitted) in enumerate(residents) if (0, admitted, slot) not in kept]
    return [free.pop(0) if c is not None and (1, b, 0) in kept else -1 for b, c in enumerate(newcomers)]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 24),
    classes=st.integers(1, 6),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
    spoilt=st.booleans(),
)
def test_against_the_rule_in_plain_python(size, classes, counts, seed, spoilt):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(400, generator=generator) ** 3 * classes).long()  # some classes are much rarer than others
    memory = WorkingMemory(size, 4, Oracle(labels, classes=classes), IDS)
    memory.update(isotropic(size, 4, seed), id=torch.randint(400, (size,), generator=generator))
    for step, count in enumerate(counts):
        ids = torch.randint(400, (count,), generator=generator)
        incoming = isotropic(count, 4, seed + step)
        left_out = torch.rand(count, generator=generator) < (0.3 if spoilt else 0.0)
        incoming[left_out] = 0.0  # what the memory shows a policy of a row it refuses
        residents = list(zip(labels[memory["id"]].tolist(), memory._admitted_at.tolist(), strict=True))
        newcomers = [None if out else c for out, c in zip(left_out.tolist(), labels[ids].tolist(), strict=True)]
        memory.arriving = {"id": ids}
        want = stated(residents, newcomers, size, classes)
        assert memory.policy.choose(memory, incoming).tolist() == want
        present = ~left_out
        assert memory.update(incoming[present], id=ids[present]).tolist() == [
            slot for slot, out in zip(want, left_out.tolist(), strict=True) if not out
        ]


@pytest.mark.parametrize("size", [100, 256])
def test_a_biased_stream_leaves_a_balanced_memory(size):
    weights = torch.ones(10)
    weights[0] = 27
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(weights, 4000, replacement=True, generator=generator)
    memory = WorkingMemory(size, 8, Oracle(labels), IDS)
    for start in range(0, 4000, 64):
        ids = torch.arange(start, min(start + 64, 4000))
        memory.update(isotropic(len(ids), 8, start), id=ids)
    held = labels[memory["id"]]
    assert class_entropy(held, 10) > 0.99
    counts = held.bincount(minlength=10)
    assert counts.max() - counts.min() <= 1
    # the most recent of each class: no item outside is newer than one inside
    for c in range(10):
        mine = (labels == c).nonzero()[:, 0]
        assert sorted(memory["id"][held == c].tolist()) == mine[-counts[c] :].tolist()


def test_nothing_is_read_on_the_host():
    labels = torch.arange(300) % 7
    policy = Oracle(labels)
    memory = WorkingMemory(40, 8, policy, IDS)
    memory.update(isotropic(40, 8, 0), id=torch.arange(40))
    memory.arriving = {"id": torch.arange(100, 164)}
    with NoHostReads():
        policy.choose(memory, isotropic(64, 8, 1))


def test_labels_are_needed_and_not_saved():
    with pytest.raises(UserError, match="needs some: train on labelled data"):
        policies.get("oracle")
    with pytest.raises(UserError, match="needs the memory to keep ids"):
        WorkingMemory(4, 8, Oracle(torch.arange(3)))
    with pytest.raises(UserError, match="leave max_age 3 out"):
        Oracle(torch.arange(3), max_age=3)
    with pytest.raises(UserError, match="classes must be at least 3"):
        Oracle(torch.arange(3), classes=2)
    with pytest.raises(UserError, match="labels must be int64"):
        Oracle(torch.ones(3))
    memory = WorkingMemory(4, 8, Oracle(torch.arange(9)), IDS)
    assert not any("label" in key for key in memory.state_dict())
    memory.load_state_dict(copy.deepcopy(memory.state_dict()))


def test_every_item_has_a_label():
    for ids, message in (([0, 1, 5], "got ids from 0 to 5"), ([-1, 0, 1], "got ids from -1 to 1")):
        memory = WorkingMemory(3, 8, Oracle(torch.arange(3)), IDS)
        with pytest.raises(UserError, match=f"labels of the ids 0 to 2, {message}"):
            memory.update(isotropic(3, 8, 0), id=torch.tensor(ids))
        memory = WorkingMemory(3, 8, Oracle(torch.arange(3)), IDS)
        memory.update(isotropic(3, 8, 0), id=torch.arange(3))
        with pytest.raises(UserError, match=message):
            memory.update(isotropic(3, 8, 1), id=torch.tensor(ids))


class Nosy(Policy):
    def choose(self, memory, incoming):
        self.seen = memory.arriving["id"].clone()
        if len(incoming) == 3:
            raise RuntimeError("in the middle")
        return torch.arange(len(incoming))


def test_a_policy_sees_the_newcomers_payload_while_it_chooses_and_only_then():
    memory = WorkingMemory(4, 8, Nosy(), IDS)
    memory.update(isotropic(6, 8, 0), id=torch.arange(6))  # four fill the slots, two are the policy's
    assert memory.policy.seen.tolist() == [4, 5]
    assert memory.arriving == {}
    with pytest.raises(RuntimeError):
        memory.update(isotropic(3, 8, 0), id=torch.arange(3))
    assert memory.arriving == {}
