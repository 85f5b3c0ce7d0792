"""What each setting of the memory does to a training step, on digits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from duel import expected_duplicates, recipes
from duel.errors import UserError
from duel.evaluation.memory import class_entropy
from duel.inputs import Inputs
from duel.losses import unit
from duel.machine import build_fabric
from duel.modes import evaluating
from duel.policies import AdaptiveDuel
from duel.replacement import replace
from duel.step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore")


def start(method="simclr", *, fill=True, **changes):
    settings = {"batch_size": 8, "memory_size": 24, "dim": 16, "steps": 20, "bias": 27.0, "refresh": 0, **changes}
    config = dataclasses.replace(recipes.demo(method), **settings)
    fabric = build_fabric(config)
    step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
    if fill:
        step.fill_memory()
    return step


@pytest.mark.parametrize("where", ["memory", "queue"])
def test_filling_ends_where_all_rows_are_turned_away(where, monkeypatch):
    """As on a GPU, which does not refuse them at once."""
    step = start("moco", fill=False, source="memory", queue=24)
    if where == "queue":
        step.upkeep.filling = lambda stream, fill=step.upkeep.filling: list(fill(stream))
        list(step.upkeep.filling(step.stream))
    broken = getattr(step, where)

    def turned_away(embeddings, second):
        broken._rejected += len(embeddings)
        return embeddings, embeddings, torch.zeros(len(embeddings), dtype=torch.bool)

    monkeypatch.setattr(broken, "_examine", turned_away)
    with pytest.raises(UserError, match="8 embeddings were not finite"):
        step.fill_memory()


def test_a_batch_fits_into_the_memory_that_the_images_leave(tmp_path):
    np.savez(tmp_path / "few.npz", images=np.zeros((40, 8, 8, 3), np.uint8))
    wanted = r"batch_size 64 is larger than the memory .* it has 40 slots, one for each image of .*few.npz; lower"
    with pytest.raises(UserError, match=wanted):
        start(source="memory", data=str(tmp_path / "few.npz"), bias=1.0, batch_size=64, memory_size=128, stream_batch=8)


def spy(step):
    """The outputs of the training passes to come."""
    seen, forward = [], step._forward
    step._forward = lambda *views: seen.append(forward(*views)) or seen[-1]
    return seen


def fresh(step, slots):
    """Clean embeddings of what the slots hold, by the present encoder."""
    with torch.no_grad():
        return step.method.embed(step.clean(step.memory["image"][slots]))


# How much of the stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("offered", [3, 20])
def test_the_stream_is_looked_at_independently_of_the_batch(offered):
    step = start("d-simclr", source="memory", stream_batch=offered, refresh=5)
    before = step.images_encoded
    position = step.stream.state_dict()
    step.stream.load_state_dict(position)
    ahead = [step.stream.next()[1] for _ in range(4)]
    step.stream.load_state_dict(position)
    for ids in ahead:
        step()
        assert torch.equal(step.ids, ids)
        assert step.anchor_ids.shape == (8,)
    assert all(ids.shape == (offered,) for ids in ahead)
    assert int((step.memory.age < 1).sum()) <= offered
    assert step.images_encoded - before == 4 * (2 * 8 + 5 + offered)


def test_lengths_count_what_the_stream_brings():
    config = dataclasses.replace(recipes.demo(source="memory"), steps=None, epochs=2.0, stream_batch=64)
    inputs = Inputs.load(config, torch.device("cpu"), test=False)
    assert inputs.steps(config) == round(2 * inputs.items / 64)
    assert inputs.stream(config, torch.device("cpu")).batch_size == 64
    step = start("d-simclr", source="memory", stream_batch=4)
    assert Inputs.load(step.config, step.device, test=False).instruments(step.config, step.memory).queue_age == 24 / 4
    step = start("d-simclr", source="memory", policy="minred", score="exponential:0.3")  # which has no score itself
    assert (
        Inputs.load(step.config, step.device, test=False).instruments(step.config, step.memory).score
        == "exponential:0.3"
    )


# What the loss sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_memory_first_simclr_has_the_other_slots_as_negatives_if_asked(asked):
    step = start(source="memory", memory_negatives=asked, policy="reservoir", refresh=4)
    assert (step.method.memory is step.memory) == asked
    for _ in range(2):
        held = set(step.memory["id"].tolist())
        step()
        assert set(step.anchor_ids.tolist()) <= held  # so that every anchor has a slot to be masked
    assert step.read_loss()[1] is None


def test_the_loss_of_memory_negatives_written_out():
    step = start(source="memory", memory_negatives=True, temperature=0.5, policy="fifo")
    z = normalize(torch.randn(16, 16), dim=1)
    ids = step.memory["id"][torch.tensor([3, 5, 5, 9, 11, 13, 17, 23])]  # drawn twice: one item, two slots
    held, own = step.memory.embeddings, ids[:, None] == step.memory["id"][None, :]
    logits = (z @ z.T).masked_fill(torch.cat([ids, ids])[:, None] == torch.cat([ids, ids])[None, :], -torch.inf)
    positive = (z * z.roll(8, 0)).sum(1, keepdim=True)
    slots = (z @ held.T).masked_fill(own.repeat(2, 1), -torch.inf)
    want = cross_entropy(torch.cat([positive, logits, slots], 1) / 0.5, torch.zeros(16, dtype=torch.long))

    class Fixed(torch.nn.Module):
        def features(self, images):
            return z

        projection = torch.nn.Identity()

    step.method.encoder = Fixed()
    got = step.method(torch.zeros(8, 1, 8, 8), torch.zeros(8, 1, 8, 8), ids).loss
    assert torch.allclose(got, want, atol=1e-6)


def test_memory_first_moco_may_have_a_queue_of_its_own():
    step = start("d-moco", source="memory", queue=16, refresh=24)
    assert step.method.memory is step.queue
    assert step.queue.full
    assert set(step.queue["id"].tolist()) <= set(step.memory["id"].tolist())
    outputs = spy(step)
    for turn in range(3):
        before = step.queue.embeddings.clone()
        step()
        rows = slice(8, 16) if turn % 2 else slice(0, 8)  # the oldest half leaves
        assert torch.equal(step.queue["id"][rows], step.anchor_ids)
        assert torch.equal(step.queue.embeddings[rows], outputs[-1].embeddings)
        rest = slice(0, 8) if turn % 2 else slice(8, 16)
        assert torch.equal(step.queue.embeddings[rest], before[rest])
    # nobody's negatives, so the memory is encoded clean
    torch.testing.assert_close(step.memory.embeddings, fresh(step, torch.arange(24)), atol=2e-3, rtol=0)


# Who leaves ------------------------------------------------------------------------------------------------


def test_the_adaptive_policy_gets_its_target():
    assert start("d-moco", policy="adaptive", adaptive_target=0.02).memory.policy.target == 0.02
    assert start("d-moco", policy="adaptive").memory.policy.target == AdaptiveDuel().target


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("moco", {}),
        ("simclr", {}),
        ("d-moco", {"refresh": 8}),
        ("simclr", {"source": "memory"}),
        ("byol", {"source": "memory"}),
    ],
)
def test_an_oracle_keeps_the_memory_balanced(method, changes):
    step = start(method, policy="oracle", memory_size=40, batch_size=32, **changes)
    labels = Inputs.load(step.config, step.device, test=False).train.labels
    assert class_entropy(labels[step.memory["id"]], 10) < 0.7
    for _ in range(14):
        step()
    assert class_entropy(labels[step.memory["id"]], 10) > 0.99


def test_an_oracle_needs_labels(tmp_path):
    np.savez(tmp_path / "plain.npz", images=np.zeros((40, 8, 8, 1), dtype=np.uint8))
    with pytest.raises(UserError, match=r"sees the labels, but .*plain\.npz.* has none"):
        start("moco", policy="oracle", data=str(tmp_path / "plain.npz"), bias=1.0)


def test_simclr_with_a_queue_of_images_is_d_simclr_with_another_policy():
    queue = start("simclr", policy="fifo")
    assert queue.method.memory is queue.memory
    for _ in range(4):
        arrived = queue.memory["id"].clone()
        queue()
        slots = (arrived != queue.memory["id"]).nonzero()[:, 0]
        assert set(queue.ids.tolist()) <= set(queue.memory["id"].tolist())
        assert len(slots) <= 8
    torch.testing.assert_close(queue.memory.embeddings, fresh(queue, torch.arange(24)))
    duel, twin = start("d-simclr"), start("simclr", policy="duel")
    for _ in range(3):
        duel()
        twin()
    assert torch.equal(duel.memory["id"], twin.memory["id"])
    assert duel.read_loss() == twin.read_loss()


def test_a_queue_of_moco_with_refresh():
    step = start("moco", policy="fifo", refresh=16, memory_size=48, memory_view="clean")
    for _ in range(4):
        stale = step.memory.stalest(16)
        step()
        kept = stale[step.memory.age[stale] > 0]  # refreshed, and not replaced by the newcomers
        assert (step.memory.staleness[kept] == 1).all()  # before the newcomers were offered
        torch.testing.assert_close(step.memory.embeddings[kept], fresh(step, kept))
    assert step.memory.staleness.max() <= 3


@pytest.mark.parametrize("source", ["stream", "memory"])
def test_what_moco_remembers_looks_like_its_keys(source):
    """Augmented views, running statistics on both sides, and stream-first the keys themselves."""
    step = start("moco", policy="fifo", refresh=16, memory_size=48, source=source)
    assert step.method.running
    outputs = spy(step)
    state = step.generator.get_state()
    before = step.images_encoded
    step()
    assert step.images_encoded - before == 2 * 8 + 16 + (8 if source == "memory" else 0)  # query, key, residents
    assert not torch.equal(state, step.generator.get_state())
    new = step.memory.age == 0
    keys = (step.memory.embeddings[new] @ outputs[0].embeddings.T).max(1).values > 1 - 1e-6
    assert bool(keys.all()) == (source == "stream")


# By which view ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["d-moco", "d-simclr"])
def test_both_sides_are_encoded_by_the_view_that_is_asked_for(method):
    for view, drawn in (("clean", False), ("augmented", True)):
        step = start(method, memory_view=view)
        state = step.generator.get_state()
        images, _ = step.stream.next()
        found = step.encode(images).projections
        assert torch.equal(state, step.generator.get_state()) != drawn
        clean = step.method.embed(step.clean(images))
        assert torch.allclose(found, clean, atol=1e-6) != drawn
        outputs = spy(step)
        step()
        newcomers = (step.memory["id"][:, None] == step.ids).any(1) & (step.memory.age == 0)
        if method == "d-simclr":
            now = fresh(step, torch.arange(24))
            assert torch.allclose(step.memory.embeddings, now, atol=1e-6) != drawn
        else:  # embeddings only: augmented means those of the step
            rows = step.memory.embeddings[newcomers]
            same = (rows @ outputs[0].embeddings.T).max(1).values > 1 - 1e-6
            assert bool(same.all()) == drawn


def test_newcomers_of_the_training_pass_are_not_encoded_again():
    counts = {}
    for reuse in (False, True):
        step = start("d-simclr", reuse_newcomers=reuse, memory_view="augmented")
        outputs, before = spy(step), step.images_encoded
        step()
        counts[reuse] = step.images_encoded - before
        placed = step.memory.age == 0
        same = (step.memory.embeddings[placed] @ outputs[0].embeddings.T).max(1).values > 1 - 1e-6
        assert bool(same.all()) == reuse
    assert counts == {False: 16 + 24 + 8, True: 16 + 24}


# In which space --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("d-simclr", {}),
        ("d-moco", {}),
        ("d-moco", {"refresh": 6, "memory_view": "clean"}),
        ("d-simclr", {"source": "memory", "refresh": 6}),
    ],
)
def test_the_policy_compares_centred_backbone_features(method, changes):
    step = start(method, space="backbone", score="gaussian:0.1", **changes)
    memory, upkeep = step.memory, step.upkeep
    period = {24: 1, 6: 4, 0: 3}[step.config.refreshed_slots]  # 24 slots: refreshed, or else 8 newcomers a step
    assert upkeep.recentre_every == period
    assert torch.allclose(upkeep.centre, memory["feature"].mean(0), atol=1e-6)
    for _ in range(2 * period):
        centre = upkeep.centre.clone()
        step()
        frozen = step.done % period != 0
        assert torch.equal(upkeep.centre, centre) == frozen
        if not frozen:
            assert torch.allclose(upkeep.centre, memory["feature"].mean(0), atol=1e-6)
        torch.testing.assert_close(memory.compared, normalize(memory["feature"] - upkeep.centre, dim=1))
        counted = expected_duplicates(memory.compared, "gaussian:0.1")  # what is carried is what these vectors say
        assert (memory.expected_duplicates() - counted).abs().max() < 1e-4
    if step.config.memory_holds_images:
        new = (memory.age == 0).nonzero()[:, 0]  # encoded in the last step
        assert len(new)
        encoder = step.method.memory_encoder
        with torch.no_grad(), evaluating(encoder):
            features = encoder.features(step.clean(memory["image"][new]))
            torch.testing.assert_close(memory["feature"][new], features)
            torch.testing.assert_close(memory.embeddings[new], unit(encoder.projection(features)))


def test_victims_in_backbone_space_are_those_of_replace():
    step = start("d-simclr", space="backbone", score="linear")
    offered = []
    update = step.memory.update
    step.memory.update = lambda *a, **k: offered.append((step.memory.compared.clone(), k)) or update(*a, **k)
    ids = step.memory["id"].clone()
    step()
    held, given = offered[0]
    slots = replace(held, given["policy_embeddings"], score="linear", engine="reference").slots
    for b, slot in enumerate(slots.tolist()):
        ids[slot] = step.ids[b]
    assert torch.equal(step.memory["id"], ids)


def test_a_memory_of_one_item_has_a_centre_too():
    step = start("d-moco", space="backbone", memory_size=1, batch_size=2)
    assert step.memory.compared.tolist()[0][0] == 1.0
    step()


# Where the images are --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"source": "memory", "refresh": 8}])
def test_images_on_the_host_change_nothing(changes):
    here, there = (start("d-simclr", memory_images=where, **changes) for where in ("device", "host"))
    assert there.memory.host == {"image"}
    for _ in range(4):
        here()
        there()
    assert here.read_loss() == there.read_loss()
    mine, theirs = (step.memory.state_dict() for step in (here, there))
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
    assert there.why_eager is None  # nothing to mention on a CPU
