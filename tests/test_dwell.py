"""A stream that dwells on what it sees, as a robot's does: what a memory of the same size holds of it."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from duel import WorkingMemory
from duel.data import Stream, class_weights, load
from duel.policies import Duel, Fifo, Policy, Reservoir


def held(policy: Policy, *, size: int = 128, updates: int = 60) -> tuple[int, float]:
    """Distinct images and class entropy / log 10 of a memory of digits: ×27 zeros, eight near-identical frames each."""
    source = load("digits")
    mean = source.images(torch.arange(len(source))).float().mean(0).flatten()
    weights = class_weights(10, kind="dominant", bias=27.0, dominant=0)
    stream = Stream(source, batch_size=64, device=torch.device("cpu"), seed=0, weights=weights, dwell=8)
    memory = WorkingMemory(size, mean.numel(), policy, {"id": ((), torch.int64)})
    for _ in range(updates):
        images, ids = stream.next()
        memory.update(normalize(images.flatten(1).float() - mean, dim=1), id=ids)
    share = source.labels[memory["id"]].bincount(minlength=10).double() / size
    entropy = float(torch.special.entr(share).sum() / torch.tensor(10.0, dtype=torch.float64).log())
    return memory["id"].unique().numel(), entropy


def test_a_duel_memory_holds_more_distinct_items_and_evens_the_classes_out():
    fifo, reservoir = held(Fifo()), held(Reservoir())
    sharp, broad = held(Duel("exponential:0.05")), held(Duel("gaussian:0.1"))
    mixed = held(Duel("exponential:0.2+exponential:0.01"))
    weighted = held(Duel("0.1*gaussian:0.1+0.9*gaussian:0.003"))
    most = max(fifo[0], reservoir[0])
    assert min(broad[0], mixed[0], weighted[0]) > most
    assert sharp[0] > 1.1 * most
    assert min(sharp[1], broad[1], mixed[1], weighted[1]) > 0.9 > max(fifo[1], reservoir[1])
    # the trade-off: a broad score evens out the classes better and tells near-duplicates apart worse
    sharper = held(Duel("exponential:0.02"))
    assert sharper[0] > sharp[0] > broad[0]
    assert sharper[1] < min(sharp[1], broad[1])
