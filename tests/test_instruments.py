from __future__ import annotations

import torch

from duel import WorkingMemory
from duel.instruments import COUNTED_UP_TO, UNCHANGED, Instruments
from duel.policies import Duel
from pools import clusters, isotropic

IDS = {"id": ((), torch.int64)}


def watched(policy, *, size=60, updates=5, labels=True, stream_largest=0.75):
    rows, classes = clusters(2000, 8, 0)
    memory = WorkingMemory(size, 8, policy, IDS)
    for step in range(updates):
        part = slice(30 * step, 30 * step + 30)
        memory.update(rows[part].float(), id=torch.arange(2000)[part])
    eye = Instruments(
        memory,
        labels=classes if labels else None,
        classes=10,
        stream_largest=stream_largest,
        per_update=30,
    )
    return memory, classes, eye


def test_the_measures_are_what_they_say():
    memory, classes, eye = watched(Duel("gaussian:0.1"))
    batch = torch.arange(200, 220)
    found = eye.read(batch, updates=2)
    assert list(found) == eye.columns
    held = classes[memory["id"]]
    counts = held.bincount(minlength=10).double()
    share = counts / 60
    assert abs(found["memory_largest"] - float(share.max())) < 1e-9
    entropy = -sum(float(p) * float(torch.log(p)) for p in share if p > 0) / float(torch.tensor(10.0).log())
    assert abs(found["memory_entropy"] - entropy) < 1e-6
    same = (classes[batch][:, None] == held[None, :]).double().mean()  # no anchor is in the memory
    assert abs(found["memory_collisions"] - float(same)) < 1e-9
    cosines = memory.embeddings.double() @ memory.embeddings.double().T
    pairs = ~torch.eye(60, dtype=torch.bool)
    alike = held[:, None] == held[None, :]
    assert abs(found["memory_intra"] - float(cosines[alike & pairs].mean())) < 1e-5
    assert abs(found["memory_inter"] - float(cosines[~alike].mean())) < 1e-5
    assert found["memory_turnover"] == float((memory.age < 2).double().mean())
    assert found["memory_age_max"] == float(memory.age.max())
    assert found["memory_staleness"] == float(memory.staleness.median())
    assert abs(found["memory_duplicates"] - float(memory.expected_duplicates().mean())) < 1e-9
    assert abs(found["memory_duplicates_max"] - float(memory.expected_duplicates().max())) < 1e-9


def test_without_labels_only_what_needs_none():
    _, _, eye = watched("fifo", labels=False)
    found = eye.read(torch.arange(3), updates=1)
    assert list(found) == eye.columns
    assert "memory_largest" not in found
    assert "memory_turnover" in found


def test_a_large_queue_is_not_counted():
    memory = WorkingMemory(COUNTED_UP_TO + 1, 2, "fifo", IDS)
    memory.update(isotropic(10, 2, 0), id=torch.arange(10))
    eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=10)
    assert "memory_duplicates" not in eye.read(torch.arange(3), updates=1)


def test_each_warning_comes_once_and_when_it_should():
    memory, _, eye = watched("fifo")
    assert eye.warnings(eye.read(torch.arange(3), updates=1)) == []
    memory._clock += UNCHANGED  # as if so many updates had been turned away
    said = eye.warnings(eye.read(torch.arange(3), updates=1))
    assert any("has not changed for 50" in message and "--refresh" in message for message in said)
    assert any("encoded more than" in message and "--max-age" in message for message in said)
    assert eye.warnings(eye.read(torch.arange(3), updates=1)) == []
    _, _, eye = watched("fifo", stream_largest=0.2)
    (message,) = eye.warnings(eye.read(torch.arange(3), updates=1))
    assert "than the stream brings (20%)" in message
    assert "--policy duel" in message
    for score, advice in (
        ("gaussian:0.1", "try --score exponential:0.05"),
        ("exponential:0.05", "sharper --score than"),
    ):
        _, _, eye = watched(Duel(score), stream_largest=-0.1)
        assert any(advice in message for message in eye.warnings(eye.read(torch.arange(3), updates=1)))


def test_a_score_that_sees_no_duplicates_is_said_to_be_too_sharp():
    for score, count in (("exponential:0.001", 1), ("exponential:0.5", 0)):
        memory = WorkingMemory(8, 16, Duel(score), IDS)
        memory.update(isotropic(8, 16, 0), id=torch.arange(8))
        eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=8)
        said = eye.warnings(eye.read(torch.arange(3), updates=1))
        assert len([message for message in said if "no item of the memory resembles another" in message]) == count


def test_updates_of_minred_that_are_in_doubt_are_shown():
    memory, _, eye = watched("minred")
    memory.policy.in_doubt += 3
    found = eye.read(torch.arange(20), updates=2)
    assert list(found) == eye.columns
    assert found["memory_in_doubt"] == 3
    assert "memory_in_doubt" not in watched(Duel())[2].columns
