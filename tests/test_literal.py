"""D-MoCo and D-SimCLR, step for step, against Algorithm 2 written down again in a few lines."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from duel import recipes
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.replacement import replace
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
    """What the next step will see, without using up the stream or the generator."""
    stream, generator = step.stream.state_dict(), step.generator.get_state()
    images, ids = (t.clone() for t in step.stream.next())
    first, second = step.augment.views(images, 2, step.generator)
    step.stream.load_state_dict(stream)
    step.generator.set_state(generator)
    return images, ids, first, second


def literal_replacement(held, ids, newcomers, new_ids):
    """Lines 11-14 of Algorithm 2 with the linear score."""
    held, ids = held.clone(), ids.clone()
    for z, i in zip(newcomers, new_ids, strict=True):
        n = ((1 + (held @ held.T).clamp(-1, 1)) / 2).fill_diagonal_(0).double().sum(1)  # Eq. 5
        j = int(n.argmax())
        held[j], ids[j] = z, i
    return held, ids


def contrast(query, key, negatives, own):
    """Eq. 2: one positive, M as negatives; a slot that holds the anchor's own item does not count."""
    positive = (query * key).sum(1, keepdim=True)
    others = (query @ negatives.T).masked_fill(own, -torch.inf)
    return cross_entropy(torch.cat([positive, others], 1) / TEMPERATURE, torch.zeros(len(query), dtype=torch.long))


def sgd(module, lr):
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= lr * p.grad
                p.grad = None


def test_d_moco():
    step = start("d-moco", key_momentum=0.9, key_batchnorm="batch")
    query, key = twin(step, step.method.encoder), twin(step, step.method.key_encoder)
    held, ids = step.memory.embeddings.clone(), step.memory["id"].clone()
    for _ in range(6):
        lr = step.lr_at(step.done)
        _, new_ids, first, second = views_of(step)
        q = normalize(query(first), dim=1)
        with torch.no_grad():
            k = normalize(key(second), dim=1)
        contrast(q, k, held, new_ids[:, None] == ids[None, :]).backward()
        sgd(query, lr)
        with torch.no_grad():
            for a, b in zip(key.parameters(), query.parameters(), strict=True):
                a.lerp_(b, 1 - 0.9)
        held, ids = literal_replacement(held, ids, k, new_ids)
        step()
        for mine, theirs in zip(query.parameters(), step.method.encoder.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5)
        assert torch.equal(step.memory["id"], ids)
        assert torch.allclose(step.memory.embeddings, held, atol=1e-5)


def test_d_simclr():
    """Raw images (512 in the paper), re-encoded with the updated encoder, which also gives the next negatives."""
    step = start("d-simclr")
    encoder = twin(step, step.method.encoder)
    images, ids = step.memory["image"].clone(), step.memory["id"].clone()

    def encode(raw):
        encoder.eval()
        with torch.no_grad():
            z = normalize(encoder(step.clean(raw)), dim=1)
        encoder.train()
        return z

    held = encode(images)
    for _ in range(6):
        lr, size = step.lr_at(step.done), 8
        raw, new_ids, first, second = views_of(step)
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
        before = ids.clone()
        done = replace(residents, newcomers, score="linear", engine="reference")
        held, ids = literal_replacement(residents, ids, newcomers, new_ids)
        for b, slot in enumerate(done.slots.tolist()):
            images[slot] = raw[b]
        step()
        assert (before != ids).any()
        for mine, theirs in zip(encoder.parameters(), step.method.encoder.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5)
        assert torch.equal(step.memory["id"], ids)
        assert torch.equal(step.memory["image"], images)
        assert torch.allclose(step.memory.embeddings, held, atol=1e-5)


@pytest.mark.parametrize("method", ["d-moco", "d-simclr"])
def test_the_paper_recipe_is_the_literal_setting(method):
    config = recipes.paper(method)
    assert config.memory_policy == "duel"
    assert (config.score, config.admit, config.at_once, config.max_age) == ("linear", "always", False, None)
    assert config.source == "stream"
    assert (config.space, config.memory_view, config.reuse_newcomers) == ("projection", "auto", False)
    assert config.newcomers_from_training == (method == "d-moco")  # the step's keys; images are encoded anew
    assert config.memory_size == {"d-moco": 2048, "d-simclr": 512}[method]
    assert config.refreshed_slots == {"d-moco": 0, "d-simclr": 512}[method]
