from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import duel
from duel import WorkingMemory
from duel.errors import UserError
from duel.hashing import uniform
from duel.policies import AdaptiveDuel, Duel, Fifo, MinRed, Policy, Random, Reservoir, minred
from duel.replacement import dense
from duel.replacement.units import exponent, in_units, pair_units
from pools import clusters, isotropic


class Newest(Policy):
    """The README's policy: a FIFO queue of one's own."""

    def attach(self, memory):
        super().attach(memory)
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    def choose(self, memory, incoming):
        slots = (self.cursor + torch.arange(len(incoming), device=incoming.device)) % memory.size
        self.cursor += len(incoming)
        return slots


def test_a_row_of_zeros_is_left_out_and_one_that_begins_with_zero_is_not():
    memory = WorkingMemory(4, 4, Duel(engine="dense"))
    memory.update(isotropic(4, 4, 0).float())
    incoming = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    slots = memory.policy.choose(memory, incoming)
    assert (slots == -1).tolist() == [False, True, False]


def test_a_policy_of_ones_own():
    own, ours = WorkingMemory(10, 8, Newest()), WorkingMemory(10, 8, "fifo")
    for step, count in enumerate([4, 9, 25, 1, 3]):
        batch = isotropic(count, 8, step)
        assert own.update(batch).tolist() == ours.update(batch).tolist()
    resumed = WorkingMemory(10, 8, Newest())
    resumed.load_state_dict(own.state_dict())
    assert resumed.update(isotropic(3, 8, 9)).tolist() == own.update(isotropic(3, 8, 9)).tolist()


def test_a_queue_with_an_age_limit_is_still_a_queue():
    """The README's words of max_age on Fifo: whatever leaves is the oldest, also where the queue has gone round."""
    limited, plain = (WorkingMemory(5, 2, Fifo(max_age=age), {"id": ((), torch.int64)}) for age in (2, None))
    first, vector, counts = 0, torch.tensor([[1.0, 0.0]]), (1, 1, 3, 2, 0, 0, 1, 2, 0, 0, 0, 3, 4, 1, 0, 2, 7)
    for count in counts:
        ids = torch.arange(first, first + count)
        slots = [memory.update(vector.expand(count, 2), id=ids).tolist() for memory in (limited, plain)]
        assert slots[0] == slots[1]
        assert limited["id"].tolist() == plain["id"].tolist()
        first += count


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_with_an_age_limit_that_a_batch_fills_and_goes_round(seed):
    counts = torch.randint(0, 14, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    limited, plain = (WorkingMemory(8, 2, Fifo(max_age=age), {"id": ((), torch.int64)}) for age in (1, None))
    first, vector = 0, torch.tensor([[1.0, 0.0]])
    for count in (4, 0, 0, 0, 12) if not seed else counts:
        for memory in (limited, plain):
            memory.update(vector.expand(count, 2), id=torch.arange(first, first + count))
        assert sorted(limited["id"].tolist()) == sorted(plain["id"].tolist())
        first += count


@pytest.mark.parametrize("policy", [Duel, AdaptiveDuel, MinRed])
def test_an_age_limit_that_nobody_has_reached_changes_nothing(policy, monkeypatch):
    limited, plain = (WorkingMemory(16, 8, policy(max_age=age)) for age in (1000, None))
    monkeypatch.setattr(limited.policy, "refreshed", lambda *given: pytest.fail("nothing was exchanged"))
    for step in range(6):
        batch = isotropic(12, 8, step)
        assert torch.equal(limited.update(batch), plain.update(batch))
    assert torch.equal(limited.embeddings, plain.embeddings)


@pytest.mark.parametrize("name", ["duel", "minred", "adaptive", "fifo"])
def test_to_refresh_nothing_changes_nothing(name):
    memory = WorkingMemory(6, 8, name)
    memory.update(isotropic(9, 8, 0))
    before = memory.embeddings.clone()
    memory.refresh(torch.empty(0, dtype=torch.int64), torch.empty(0, 8, dtype=torch.float64))
    assert torch.equal(memory.embeddings, before)


def test_numbers_of_numpy_are_saved_as_what_torch_reads(tmp_path):
    made = [
        WorkingMemory(4, 8, Random(seed=np.int64(3)), seed=np.int64(5)),
        WorkingMemory(4, 8, AdaptiveDuel(target=np.float64(2.0))),
        WorkingMemory(4, 8, Duel(duel.scores.gaussian(np.float64(0.3)))),
    ]
    for memory in made:
        memory.update(isotropic(6, 8, 0))
        torch.save(memory.state_dict(), tmp_path / "memory.pt")
        memory.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
        assert memory.sample(4).shape == (4,)
    with pytest.raises(UserError, match=r"seed must be a whole number .*, got 1\.5"):
        WorkingMemory(4, 8, seed=1.5)
    with pytest.raises(UserError, match=r"seed must be a whole number .*, got 1\.5"):
        Random(seed=1.5)


@pytest.mark.parametrize(
    "make",
    [Duel, partial(Duel, at_once=True), partial(Duel, admit="compete"), AdaptiveDuel, MinRed, Random, Reservoir, Fifo],
)
def test_nobody_stays_longer_than_the_limit_where_newcomers_are_enough(make):
    memory = WorkingMemory(12, 8, make(max_age=2))
    for step in range(30):
        memory.update(isotropic(12, 8, step))
        assert int(memory.age.max()) <= 2


def test_an_age_limit_is_shown():
    assert [repr(Policy(max_age=age)) for age in (3, None)] == ["Policy(max_age=3)", "Policy()"]


def test_a_caller_that_is_compiled_does_not_compile_the_memory():
    class Watching(Newest):
        def choose(self, memory, incoming):
            self.compiled = torch.compiler.is_compiling()
            return super().choose(memory, incoming)

    memory = WorkingMemory(4, 8, Watching())
    memory.update(isotropic(4, 8, 0).float())
    step = torch.compile(lambda rows: memory.update(rows * 1.0) + 1, backend="eager")
    assert step(isotropic(2, 8, 1).float()).tolist() == [1, 2]
    assert not memory.policy.compiled
    assert torch.equal(memory.embeddings[:2], isotropic(2, 8, 1).float())


def test_pairs_are_not_used_after_others_have_written_to_the_memory():
    """As DistributedDataParallel does at every forward pass."""
    one, other = (WorkingMemory(64, 16, Duel("gaussian:0.1")) for _ in range(2))
    for memory, seed in ((one, 0), (other, 2)):
        memory.update(isotropic(32, 16, seed))
        memory.update(isotropic(32, 16, seed + 1))
    for mine, theirs in zip(other.buffers(), one.buffers(), strict=True):
        mine.copy_(theirs)
    assert other.policy._known is not None
    batch = isotropic(32, 16, 9)
    assert torch.equal(one.update(batch), other.update(batch))
    assert torch.equal(other.policy.duplicates, one.policy.duplicates)


def test_another_function_of_the_same_name_is_another_score():
    def memory(power, **weights):
        score = duel.scores.get(lambda x: ((1 + x) / 2) ** power)
        return WorkingMemory(32, 16, Duel(duel.scores.mix(score, "linear") if weights else score))

    for mixed in ({}, {"mixed": True}):
        saved = memory(2, **mixed)
        saved.update(isotropic(40, 16, 0))
        memory(2, **mixed).load_state_dict(saved.state_dict())
        with pytest.raises(UserError, match="saved with another score that was called"):
            memory(8, **mixed).load_state_dict(saved.state_dict())
        older = saved.state_dict()
        del older["policy._extra_state"]["curve"]
        memory(8, **mixed).load_state_dict(older)


def test_expected_duplicates_saved_in_other_units_are_counted_anew():
    memory = WorkingMemory(30, 8, Duel("exponential:0.1"))
    memory.update(clusters(40, 8, 0)[0].float())
    state = memory.state_dict()
    (extra,) = [value for key, value in state.items() if key.endswith("_extra_state") and "exponent" in value]
    want = memory.policy.duplicates.clone()
    for saved, counted in ((extra["exponent"], True), (extra["exponent"] + 10, False)):
        extra["exponent"] = saved
        other = WorkingMemory(30, 8, Duel("exponential:0.1"))
        other.load_state_dict(state)
        assert other.policy._counted == counted
        assert torch.equal(other.expected_duplicates(), want)


@pytest.mark.parametrize(
    "make", [partial(Duel, "gaussian:0.1"), partial(Duel, "gaussian:0.1", max_age=1), partial(AdaptiveDuel, every=1)]
)
def test_pairs_that_are_kept_are_those_of_the_memory_as_it_is(make):
    policy, kept = make(), []
    memory = WorkingMemory(20, 8, policy)
    rows = isotropic(64, 8, 0).float()
    for change in (
        lambda: memory.update(rows[:20]),
        lambda: memory.update(rows[20:30]),
        lambda: memory.refresh(torch.arange(20), rows[30:50]),
        lambda: memory.refresh(torch.arange(3), rows[50:53]),
        lambda: memory.refresh(torch.arange(20), rows[20:40]),
        lambda: memory.update(rows[53:54]),
        memory.learn,
        lambda: memory.refresh(torch.arange(20), rows[30:50]),
        lambda: memory.load_state_dict({**memory.state_dict(), "_embeddings": rows[:20]}),
    ):
        change()
        if policy._known is not None:
            kept.append(change)
            pairs, total = policy._known
            assert torch.equal(pairs, pair_units(policy.score, memory.compared, exponent(20)))
            assert torch.equal(total, in_units(policy.duplicates, exponent(20)))
    assert len(kept) >= 4
    for forget in (memory.double, memory.reset):
        memory.refresh(torch.arange(len(memory)), rows[30:50].to(memory.embeddings.dtype))
        memory.expected_duplicates()  # in another dtype they are counted only now
        assert policy._known is not None
        forget()
        assert policy._known is None


def test_to_go_on_from_a_save_before_newcomers_come_is_never_to_have_stopped(monkeypatch):
    """N was counted from pairs of residents that a saved memory does not have; other products may round differently."""
    monkeypatch.delattr(dense.Batch, "_fetch")
    batches = [normalize(torch.randn(128, 32, generator=torch.Generator().manual_seed(i)), dim=1) for i in range(4)]
    memory = WorkingMemory(256, 32, Duel("gaussian:0.1"))
    memory.update(torch.cat(batches[:2]))
    memory.refresh(torch.arange(128), batches[2])
    resumed = WorkingMemory(256, 32, Duel("gaussian:0.1"))
    resumed.load_state_dict(memory.state_dict())
    assert memory.policy._known is not None
    assert resumed.policy._known is None
    assert memory.update(batches[3]).tolist() == resumed.update(batches[3]).tolist()
    assert torch.equal(memory.policy.duplicates, resumed.policy.duplicates)


def test_fifo_is_a_queue():
    memory = WorkingMemory(5, 8, "fifo", {"id": ((), torch.int64)})
    number = 0
    for count in (3, 4, 12, 2):
        memory.update(isotropic(count, 8, count), id=torch.arange(number, number + count))
        number += count
        assert sorted(memory["id"].tolist()) == list(range(max(0, number - 5), number))


def test_a_policy_belongs_to_one_memory():
    for policy in (Duel(), Fifo(), AdaptiveDuel()):
        WorkingMemory(4, 8, policy)
        with pytest.raises(UserError, match="policy of its own"):
            WorkingMemory(4, 8, policy)


def test_reservoir_holds_a_uniform_sample_of_all_seen():
    """500 reservoirs of 10 over 100 items: every item is held 50 times, give or take."""
    held = torch.zeros(100)
    rows = isotropic(100, 4, 0)
    for seed in range(500):
        memory = WorkingMemory(10, 4, Reservoir(seed=seed), {"id": ((), torch.int64)})
        for start in range(0, 100, 25):
            memory.update(rows[start : start + 25], id=torch.arange(start, start + 25))
        held[memory["id"]] += 1
    deviation = (50 * 0.9) ** 0.5
    assert (held - 50).abs().max() < 4.5 * deviation
    assert abs(float(held[:10].mean()) - 50) < 3 * deviation / 10**0.5  # the first ones are no better off
    assert 0.7 < float(held.std()) / deviation < 1.3


def test_random_uses_every_slot_alike():
    memory = WorkingMemory(8, 4, Random(seed=1))
    memory.update(isotropic(8, 4, 0))
    slots = torch.cat([memory.update(isotropic(100, 4, s)) for s in range(40)])
    counts = slots.bincount(minlength=8)
    assert (counts - 500).abs().max() < 5 * (500 * 7 / 8) ** 0.5


@pytest.mark.parametrize("policy", [Random, Reservoir])
def test_the_seed_of_draws_is_saved_with_the_memory(policy):
    seeded, resumed, older = (WorkingMemory(10, 8, policy(seed=seed)) for seed in (1, 0, 1))
    seeded.update(isotropic(25, 8, 0))
    state = seeded.state_dict()
    resumed.load_state_dict(state)
    without = {key: value for key, value in state.items() if key != "policy._extra_state"}  # as it was once saved
    torch.nn.ModuleList([older]).load_state_dict({f"0.{key}": value for key, value in without.items()})
    batch = isotropic(40, 8, 1)
    slots = seeded.update(batch).tolist()
    assert slots == resumed.update(batch).tolist() == older.update(batch).tolist()
    with pytest.raises(UserError, match=f"no state of a {policy.__name__} policy"):
        resumed.load_state_dict({**state, "policy._extra_state": {}})
    torch.nn.ModuleList([older]).load_state_dict({}, strict=False)


def test_hashed_draws_are_uniform_and_differ_between_seeds():
    a, b = (uniform(seed, torch.arange(100_000)) for seed in (0, 1))
    for draw in (a, b):
        assert draw.min() >= 0
        assert draw.max() < 1
        assert abs(float(draw.mean()) - 0.5) < 5 / (12 * 100_000) ** 0.5
        assert (draw.mul(20).long().bincount() - 5000).abs().max() < 5 * 5000**0.5
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([a[:-1], a[1:]]))[0, 1])) < 0.02


def slow_minred(memory, incoming):
    """Newcomer by newcomer, all pairs compared each time; a row of zeros takes no part. Also the memory after that."""
    memory, slots = memory.clone(), []
    for item in incoming:
        if not item.any():
            slots.append(-1)
            continue
        cosines = (memory[:, None] * memory).sum(2)  # alike both ways, as a product need not be
        cosines.fill_diagonal_(-2)
        slots.append(int(cosines.max(1).values.argmax()))
        memory[slots[-1]] = item
    return slots, memory


def is_bound(policy, rows):
    nearest = (rows @ rows.T).fill_diagonal_(-2).amax(1)
    return bool((policy.nearest >= nearest - 1e-12).all())


@pytest.fixture
def looked_at(monkeypatch):
    """How many residents each simulation of MinRed had."""
    sizes, simulated = [], minred._simulated
    monkeypatch.setattr(
        minred,
        "_simulated",
        lambda z, x, skip, residents: (sizes.append(len(residents)), simulated(z, x, skip, residents))[1],
    )
    return sizes


@pytest.mark.parametrize("pool", [isotropic, lambda *args: clusters(*args)[0]], ids=["isotropic", "clusters"])
@pytest.mark.parametrize("turns", ["_by_numpy", "_by_torch", "_by_triton"])
@pytest.mark.parametrize("candidates", [2, 12, 60])
def test_minred_evicts_the_closest_nearest_neighbour(pool, turns, candidates, monkeypatch, looked_at):
    """Batch after batch, with some turned away and some encoded anew in between; also the forms that a GPU has."""
    monkeypatch.setattr(minred, "_by_numpy", getattr(minred, turns))
    monkeypatch.setattr(minred, "WHOLE", {"cpu": 1})
    monkeypatch.setattr(minred, "CANDIDATES", {"cpu": candidates})
    monkeypatch.setattr(minred, "PER_NEWCOMER", 0)
    rows = pool(60, 8, 0)
    memory = WorkingMemory(60, 8, MinRed(), dtype=torch.float64)
    memory.update(rows)
    for step in range(5):
        incoming = pool(12, 8, step + 100)
        incoming[step] = 0
        want, rows = slow_minred(rows, incoming)
        got = memory.policy.choose(memory, incoming)  # `update` refuses a row of zeros
        assert got.tolist() == want
        memory._write(got, incoming, incoming, {})
        assert is_bound(memory.policy, rows)
        slots = torch.randperm(60, generator=torch.Generator().manual_seed(step))[: 40 if step == 3 else 7]
        rows[slots] = pool(len(slots), 8, step + 200)
        memory.refresh(slots, rows[slots])
        assert is_bound(memory.policy, rows)
    assert int(memory.policy.in_doubt) == 0
    assert looked_at[0] == candidates
    assert (max(looked_at) > candidates) == (candidates < 60)  # where they were too few, more were looked at


@pytest.mark.parametrize("turns", ["_by_numpy", "_by_torch", "_by_triton"])
@pytest.mark.parametrize("candidates", range(1, 7))
def test_of_equals_minred_takes_the_lowest_slot(turns, candidates, monkeypatch):
    axes = torch.eye(8, dtype=torch.float64)
    monkeypatch.setattr(minred, "_by_numpy", getattr(minred, turns))
    monkeypatch.setattr(minred, "WHOLE", {"cpu": 1})
    monkeypatch.setattr(minred, "CANDIDATES", {"cpu": candidates})
    monkeypatch.setattr(minred, "PER_NEWCOMER", 0)
    for held, new in (
        ([0, 1, 1, 2, 0, 3], [3, 2]),
        ([0, 1, 1, 2, 2, 4], [0, 5]),
        ([0] * 6, [0, 1, 0, 2]),
        ([3], [3, 4]),
    ):
        memory = WorkingMemory(len(held), 8, MinRed(), dtype=torch.float64)
        memory.update(axes[held])
        assert memory.update(axes[new]).tolist() == slow_minred(axes[held], axes[new])[0]


def test_on_a_device_minred_says_when_others_could_not_be_ruled_out(monkeypatch):
    """There it looks once, and counts; which slots are then chosen is for the candidates alone."""
    rows, incoming = clusters(100, 16, 0)[0], clusters(24, 16, 1)[0]
    memory = WorkingMemory(100, 16, MinRed(), dtype=torch.float64)
    memory.update(rows)
    bounds = memory.policy.nearest.clone()
    monkeypatch.setattr(minred, "WHOLE", {"cpu": 1})
    monkeypatch.setattr(minred, "PER_NEWCOMER", 0)
    doubts = []
    for count in (2, 60, 100):
        residents = bounds.topk(count).indices.sort().values
        skip = torch.zeros(24, dtype=torch.bool)
        done = minred._simulated(rows, incoming, skip, residents)
        others = torch.maximum(bounds, (incoming @ rows.T).amax(0)).index_fill(0, residents, minred.NONE)
        slots = residents[done.places]
        doubts.append(bool(minred._doubtful(done.levels, slots, others).any()))
        assert doubts[-1] or slots.tolist() == slow_minred(rows, incoming)[0]
    assert doubts == [True, False, False]


def test_of_equals_the_lowest_slot_is_in_no_doubt():
    others = torch.tensor([minred.NONE, 0.5, minred.NONE, 0.2], dtype=torch.float64)
    levels, slots = torch.tensor([0.6, 0.5, 0.5, 0.4]).double(), torch.tensor([2, 0, 2, 0])
    assert minred._doubtful(levels, slots, others).tolist() == [False, False, True, True]


def test_minred_takes_large_batches_in_blocks(monkeypatch, looked_at):
    monkeypatch.setattr(minred, "BLOCK", 16)
    rows, incoming = clusters(100, 16, 0)[0], clusters(40, 16, 1)[0]
    memory = WorkingMemory(100, 16, MinRed(), dtype=torch.float64)
    memory.update(rows)
    assert memory.update(incoming).tolist() == slow_minred(rows, incoming)[0]
    assert len(looked_at) == 3
    assert memory.update(incoming[:0]).tolist() == []
    memory.policy.in_doubt += 2
    assert int(memory.state_dict()["policy.in_doubt"]) == 2
    memory.reset()
    assert int(memory.policy.in_doubt) == 0


def test_minred_goes_on_from_what_it_had_saved(looked_at):
    """With the same bounds, so that the same products are computed; from a file of an older version it counts anew."""
    batches = [clusters(300, 16, seed)[0].float() for seed in range(3)]
    memory, resumed, older, wider = (WorkingMemory(300, 16, MinRed()) for _ in range(4))
    memory.update(batches[0])
    memory.update(batches[1][:50])
    state = memory.state_dict()
    resumed.load_state_dict(state)
    assert torch.equal(resumed.policy.nearest, memory.policy.nearest)
    older.load_state_dict({key: value for key, value in state.items() if key != "policy._extra_state"})
    wider.double().load_state_dict(state)
    assert wider.policy.nearest.dtype == torch.float64
    for other in (older, wider):
        assert not other.policy._counted
    want = memory.update(batches[2][:50]).tolist()
    assert resumed.update(batches[2][:50]).tolist() == older.update(batches[2][:50]).tolist() == want
    assert wider.update(batches[2][:50].double()).tolist() == want
    for broken in ({}, {"nearest": torch.zeros(3)}, None):
        with pytest.raises(UserError, match="no state of a MinRed policy"):
            memory.policy.check_state(broken)


def test_the_bounds_of_minred_are_never_narrowed():
    memory = WorkingMemory(50, 16, MinRed())
    memory.update(clusters(50, 16, 0)[0].float())
    memory.bfloat16()
    assert memory.policy.nearest.dtype == torch.float64
    assert not memory.policy._counted  # the vectors are others now
    memory.update(clusters(5, 16, 1)[0].bfloat16())
    memory.float()
    assert not memory.policy._counted


def test_at_once_takes_the_most_duplicated_slots_and_keeps_count():
    memory = WorkingMemory(20, 8, Duel("quadratic", at_once=True), dtype=torch.float64)
    memory.update(isotropic(20, 8, 0))
    n = duel.expected_duplicates(memory.embeddings, "quadratic")
    slots = memory.update(isotropic(6, 8, 1))
    assert slots.tolist() == n.argsort(descending=True)[:6].tolist()
    assert (memory.expected_duplicates() - duel.expected_duplicates(memory.embeddings, "quadratic")).abs().max() < 1e-9
    assert memory.update(isotropic(50, 8, 2)).shape == (50,)  # more than it has slots
    assert (memory.expected_duplicates() - duel.expected_duplicates(memory.embeddings, "quadratic")).abs().max() < 1e-9


def test_bad_settings_are_named():
    for make, message in [
        (lambda: Duel(admit="never"), "unknown admit mode"),
        (lambda: Duel(engine="cuda"), "unknown engine"),
        (lambda: Duel("gausian"), "did you mean 'gaussian'"),
        (lambda: Duel(at_once=True, admit="compete"), "nothing competes"),
        (lambda: Fifo(max_age=0), "max_age must be a whole number of updates, at least 1"),
        (lambda: Fifo(max_age=2.5), "got 2.5"),
        (lambda: AdaptiveDuel(target=0), "target must be"),
        (lambda: AdaptiveDuel(target="8"), "target must be"),
        (lambda: AdaptiveDuel(target=float("inf")), "target must be"),
        (lambda: AdaptiveDuel("linear"), "unknown kind"),
        (lambda: AdaptiveDuel(every=0), "every must be"),
    ]:
        with pytest.raises(UserError, match=message):
            make()


def evenness(policy, spread, *, size=256, updates=40, seed=0):
    """Entropy of the clusters in memory over its maximum, after a ×27 stream."""
    memory = WorkingMemory(size, 32, policy, {"id": ((), torch.int64)})
    rows, labels = clusters(size + 64 * updates, 32, seed, spread=spread)
    for first in range(0, rows.shape[0], 64):
        batch = rows[first : first + 64].float()
        memory.update(batch, id=torch.arange(first, first + len(batch)))
        memory.learn()
    share = labels[memory["id"]].bincount(minlength=10).double() / size
    return float(-(share * share.clamp(min=1e-12).log()).sum() / torch.tensor(10.0).log())


SPREADS = (0.1, 0.3, 1.0)  # ten times apart


def test_the_adaptive_width_beats_linear_and_every_fixed_one_across_spreads():
    adaptive = sum(evenness(AdaptiveDuel(every=5), s) for s in SPREADS) / len(SPREADS)
    fixed = {
        score: sum(evenness(Duel(score), s) for s in SPREADS) / len(SPREADS)
        for score in ("linear", "exponential:0.05", "exponential:0.1", "exponential:0.2", "exponential:0.4")
    }
    assert adaptive > max(fixed.values()), (adaptive, fixed)


@pytest.mark.parametrize("size", [64, 300, 1200])
def test_the_mean_item_has_as_many_duplicates_as_the_target_says(size):
    """A rung is a factor of √2 in width; so many items whatever the size, or a share of it."""
    for target, want in ((3.0, 3.0), (1.0, 1.0), (0.05, 0.05 * (size - 1))):
        memory = WorkingMemory(size, 32, AdaptiveDuel(target=target))
        memory.update(clusters(size, 32, 0)[0].float())
        assert want / 2 < float(memory.expected_duplicates().mean()) < 2 * want


def test_a_memory_that_is_hardly_larger_than_the_target_still_tells_items_apart():
    memory = WorkingMemory(5, 32, AdaptiveDuel(target=4.0))
    memory.update(isotropic(5, 32, 0).float())
    assert 1 < float(memory.expected_duplicates().mean()) < 3
    assert WorkingMemory(1, 32, AdaptiveDuel(target=4.0)).update(isotropic(3, 32, 0).float()).tolist() == [0, 0, 0]


def test_an_adaptive_policy_is_told_by_its_target_and_kind():
    def memory(*args, **settings):
        made = WorkingMemory(32, 32, AdaptiveDuel(*args, **settings))
        made.update(isotropic(32, 32, 0).float())
        return made

    assert repr(AdaptiveDuel(target=8)) == "AdaptiveDuel(kind='exponential', target=8, admit='always')"
    assert "kind='gaussian', target=0.1, admit='always', max_age=3" in repr(AdaptiveDuel("gaussian", max_age=3))
    state = memory(target=8).state_dict()
    memory(target=8.0).load_state_dict(state)
    with pytest.raises(UserError, match="saved with target 8, this policy has 4"):
        memory(target=4).load_state_dict(state)
    with pytest.raises(UserError, match="saved with score 'adaptive exponential', this policy has 'adaptive gaussian'"):
        memory("gaussian", target=8).load_state_dict(state)
    (key,) = (name for name in state if name.endswith("_extra_state") and "target" in state[name])
    del state[key]["target"]  # as older ones are
    memory(target=4).load_state_dict(state)


def test_the_adaptive_width_follows_the_spread():
    taus = []
    for spread in SPREADS:
        memory = WorkingMemory(256, 32, AdaptiveDuel(every=1))
        memory.update(clusters(256, 32, 0, spread=spread)[0].float())
        memory.learn()
        taus.append(memory.policy.tau)
    assert taus[0] < taus[1] < taus[2]


def test_importing_duel_is_light():
    """The memory needs torch and NumPy, and nothing else is loaded with it."""
    code = (
        "import sys, numpy, torch; before = {name.split('.')[0] for name in sys.modules};"
        "import duel; duel.WorkingMemory(4, 8), duel.replace, duel.policies, duel.scores;"
        "now = {name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names);"
        "print(sorted(now - {'duel'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_policy_says_what_it_is():
    assert repr(Duel("gaussian:0.1", max_age=5)) == "Duel(score='gaussian:0.1', admit='always', max_age=5)"
    assert "at_once=True" in repr(Duel(at_once=True))


def test_an_adaptive_policy_waits_as_long_as_it_is_told():
    memory = WorkingMemory(64, 8, AdaptiveDuel(every=3))
    memory.update(isotropic(64, 8, 0))
    spread, tight = memory.policy.tau, clusters(64, 8, 0)[0]
    memory.refresh(torch.arange(64), tight)
    widths = []
    for _ in range(3):
        memory.learn()
        widths.append(memory.policy.tau)
    assert widths[:2] == [spread, spread]
    assert widths[2] != spread


def test_a_reservoir_of_one_keeps_each_of_two_items_as_often():
    kept = 0
    for seed in range(400):
        memory = WorkingMemory(1, 2, Reservoir(seed=seed), {"id": ((), torch.int64)})
        memory.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), id=torch.arange(2))
        kept += int(memory["id"])
    assert 150 < kept < 250


def test_minred_looks_a_chunk_at_a_time(monkeypatch):
    whole, parts = (WorkingMemory(60, 8, MinRed(), dtype=torch.float64) for _ in range(2))
    for memory, elements in ((whole, 10**6), (parts, 40)):
        monkeypatch.setitem(minred.CHUNK_ELEMENTS, "cpu", elements)
        monkeypatch.setattr(minred, "WHOLE", {"cpu": 1})
        monkeypatch.setattr(minred, "CANDIDATES", {"cpu": 8})
        monkeypatch.setattr(minred, "PER_NEWCOMER", 0)
        memory.slots = []
        for step in range(4):
            memory.slots.append(memory.update(isotropic(60 if not step else 9, 8, step)).tolist())
            if step:
                memory.refresh(torch.tensor([5, 41]), isotropic(2, 8, 50 + step))
    assert parts.slots == whole.slots
    assert torch.allclose(parts.policy.nearest, whole.policy.nearest)
