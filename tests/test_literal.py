"""D-MoCo and D-SimCLR, step for step, against Algorithms 1 and 2 written down again in a few lines."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from duel import policies, recipes
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.step import TrainingStep, build_encoder

TEMPERATURE = 0.7


def start(method, *, refresh=0, **changes):
    config = dataclasses.replace(
        recipes.demo(method),
        refresh=refresh,
        batch_size=8,
        memory_size=24,
        dim=16,
        steps=20,
        bias=27.0,
        score="linear",
        temperature=TEMPERATURE,
        optimizer="sgd",
        lr=0.05,
        momentum=0.0,
        **changes,
    )
    fabric = build_fabric(config)
    step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
    step.fill_memory()
    return step


def twin(step, encoder):
    """An encoder of its own with the same weights and statistics."""
    copy = build_encoder(step.config, tuple(step.images.shape[1:]))
    copy.load_state_dict(encoder.state_dict())
    return copy.train()


def views_of(step):
    """What the next step will see, without using up the stream or the generator; the last view is for fresh keys."""
    stream, generator = step.stream.state_dict(), step.generator.get_state()
    images, ids = (t.clone() for t in step.stream.next())
    first, second = step.augment.views(images, 2, step.generator)
    third = step.augment(images, step.generator)
    step.stream.load_state_dict(stream)
    step.generator.set_state(generator)
    return images, ids, first, second, third


def literal_replacement(held, newcomers, admit):
    """Which slot each newcomer takes, -1 for none: lines 10-13 of Algorithm 2, or with "compete" 10-14 of Algorithm 1,
    with the linear score."""
    held, slots = held.double(), []
    for z in newcomers.double():
        pool = held if admit == "always" else torch.cat([held, z[None]])  # it joins first, as slot K
        n = ((1 + (pool @ pool.T).clamp(-1, 1)) / 2).fill_diagonal_(0).sum(1)  # Eq. 5
        j = int(n.round(decimals=9).argmax())  # the lowest of equals leaves
        slots.append(j if j < len(held) else -1)
        if j < len(held):
            held[j] = z
    return slots


def place(slots, new, old):
    """What the slots hold afterwards."""
    old = old.clone()
    for slot, row in zip(slots, new, strict=True):
        if slot >= 0:
            old[slot] = row
    return old


def check_memory(step, slots, held, ids):
    assert torch.equal(step.memory["id"], ids)
    assert torch.allclose(step.memory.embeddings, held, atol=1e-5)
    # where a newcomer ties with a copy of itself, only this tells which of them left
    assert set((step.memory.age == 0).nonzero()[:, 0].tolist()) == set(slots) - {-1}


def contrast(query, key, negatives, own):
    """Eq. 2: one positive; a negative that is the anchor's own item does not count."""
    positive = (query * key).sum(1, keepdim=True)
    others = (query @ negatives.T).masked_fill(own, -torch.inf)
    return cross_entropy(torch.cat([positive, others], 1) / TEMPERATURE, torch.zeros(len(query), dtype=torch.long))


def sgd(module, lr):
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= lr * p.grad
                p.grad = None


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("in_batch", [False, True], ids=["memory", "batch and memory"])
@pytest.mark.parametrize("fresh", [False, True], ids=["keys of the step", "fresh keys"])
def test_d_moco(fresh, in_batch, admit):
    """As MoCo does it, and as the algorithms print it: negatives {d_b+} ∪ M, replacement with the updated encoder."""
    how = {"fresh_keys": fresh, "in_batch_negatives": in_batch, "key_batchnorm": "running" if fresh else "batch"}
    step = start("d-moco", key_momentum=0.9, admit=admit, **how)
    query, key = twin(step, step.method.encoder), twin(step, step.method.key_encoder).train(not fresh)
    held, ids = step.memory.embeddings.clone(), step.memory["id"].clone()
    taken = []
    for _ in range(6):
        lr = step.lr_at(step.done)
        _, new_ids, first, second, third = views_of(step)
        q = normalize(query(first), dim=1)
        with torch.no_grad():
            k = normalize(key(second), dim=1)
        negatives, whose = (torch.cat([k, held]), torch.cat([new_ids, ids])) if in_batch else (held, ids)
        contrast(q, k, negatives, new_ids[:, None] == whose[None, :]).backward()
        sgd(query, lr)
        with torch.no_grad():
            for a, b in zip(key.parameters(), query.parameters(), strict=True):
                a.lerp_(b, 1 - 0.9)
            if fresh:
                for a, b in zip(key.buffers(), query.buffers(), strict=True):
                    if a.is_floating_point():
                        a.lerp_(b, 1 - 0.9)
                k = normalize(key(third), dim=1)
        slots = literal_replacement(held, k, admit)
        held, ids = place(slots, k, held), place(slots, new_ids, ids)
        taken += slots
        step()
        for mine, theirs in zip(query.parameters(), step.method.encoder.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5)
        check_memory(step, slots, held, ids)
    assert (-1 in taken) == (admit == "compete")
    assert max(taken) >= 0


@pytest.mark.parametrize("admit", ["always", "compete"])
def test_d_simclr(admit):
    """Raw images (512 in the paper), re-encoded with the updated encoder, which also gives the next negatives."""
    step = start("d-simclr", admit=admit)
    encoder = twin(step, step.method.encoder)
    images, ids = step.memory["image"].clone(), step.memory["id"].clone()

    def encode(raw):
        encoder.eval()
        with torch.no_grad():
            z = normalize(encoder(step.clean(raw)), dim=1)
        encoder.train()
        return z

    held, taken = encode(images), []
    for _ in range(6):
        lr, size = step.lr_at(step.done), 8
        raw, new_ids, first, second, _ = views_of(step)
        z = normalize(encoder(torch.cat([first, second])), dim=1)
        logits = (z @ z.T).masked_fill(torch.eye(2 * size, dtype=torch.bool), -torch.inf)
        both = torch.cat([new_ids, new_ids])
        pair = torch.arange(2 * size).roll(size)
        again = (both[:, None] == both[None, :]) & (torch.arange(2 * size)[None, :] != pair[:, None])
        logits = logits.masked_fill(again, -torch.inf)  # an item drawn twice is not its own negative
        memory = (z @ held.T).masked_fill(both[:, None] == ids[None, :], -torch.inf)
        cross_entropy(torch.cat([logits, memory], 1) / TEMPERATURE, pair).backward()
        sgd(encoder, lr)
        residents, newcomers = encode(images), encode(raw)
        slots = literal_replacement(residents, newcomers, admit)
        held, ids, images = place(slots, newcomers, residents), place(slots, new_ids, ids), place(slots, raw, images)
        taken += slots
        step()
        for mine, theirs in zip(encoder.parameters(), step.method.encoder.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5)
        check_memory(step, slots, held, ids)
        assert torch.equal(step.memory["image"], images)
    assert (-1 in taken) == (admit == "compete")
    assert max(taken) >= 0


@pytest.mark.parametrize(("method", "changes"), [("d-moco", {}), ("d-simclr", {}), ("simclr", {"source": "memory"})])
def test_the_policy_learns_once_after_the_replacement_of_each_step(method, changes, monkeypatch):
    """Line 15 of Algorithm 1, UpdatePolicy."""
    done = []

    class Noting(policies.Duel):
        def choose(self, memory, incoming):
            done.append("replacement")
            return super().choose(memory, incoming)

        def learn(self, memory):
            done.append("learn")

    monkeypatch.setitem(policies.POLICIES, "duel", Noting)
    step = start(method, policy="duel", **changes)
    assert done == []
    for _ in range(3):
        step()
    assert done == ["replacement", "learn"] * 3


@pytest.mark.parametrize("method", ["d-moco", "d-simclr"])
def test_the_paper_recipe_is_the_literal_setting(method):
    config = recipes.paper(method)
    assert config.memory_policy == "duel"
    assert (config.score, config.admit, config.at_once, config.max_age) == ("linear", "always", False, None)
    assert config.source == "stream"
    assert (config.space, config.memory_view, config.reuse_newcomers) == ("projection", "auto", False)
    # D-MoCo is MoCo with the policy: its newcomers are the step's keys; images are encoded anew
    assert config.newcomers_from_training == (method == "d-moco")
    assert not config.method_settings.get("in_batch_negatives")
    assert config.memory_size == {"d-moco": 2048, "d-simclr": 512}[method]
    assert config.refreshed_slots == {"d-moco": 0, "d-simclr": 512}[method]
