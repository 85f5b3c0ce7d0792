from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import duel
from duel import WorkingMemory
from duel.checks import acceptable_rows
from duel.errors import UserError
from duel.policies import AdaptiveDuel, Dedup, Distinct, Duel, Fifo, MinRed, Policy, Random, Reservoir
from duel.replacement import replace
from pools import clusters, isotropic

PAYLOAD = {"image": ((3, 2, 2), torch.uint8), "id": ((), torch.int64)}
POLICIES = {
    "fifo": Fifo,
    "random": Random,
    "reservoir": Reservoir,
    "dedup": lambda: Dedup(alike=0.5),
    "distinct": Distinct,
    "minred": MinRed,
    "duel": lambda: Duel("gaussian:0.1"),
    "linear": Duel,
    "compete": lambda: Duel("exponential", admit="compete"),
    "at_once": lambda: Duel("gaussian:0.1", at_once=True),
    "ageing": lambda: Duel("gaussian:0.1", max_age=3),
    "ageing_fifo": lambda: Fifo(max_age=2),
    "adaptive": lambda: AdaptiveDuel(every=3),
}


def items(n: int, seed: int, d: int = 8) -> dict[str, torch.Tensor]:
    """Embeddings with a payload that names them: image and id follow from the embedding's number."""
    ids = torch.arange(n) + 1000 * seed
    images = (ids % 256).to(torch.uint8)[:, None, None, None].expand(n, 3, 2, 2)
    return {"embeddings": isotropic(n, d, seed, torch.float32), "id": ids, "image": images}


def offer(memory: WorkingMemory, batch: dict[str, torch.Tensor], **kwargs):
    return memory.update(batch["embeddings"], id=batch["id"], image=batch["image"], **kwargs)


@settings(max_examples=6, deadline=None)
@given(size=st.integers(1, 30), counts=st.lists(st.integers(0, 50), min_size=1, max_size=6), seed=st.integers(0, 999))
@pytest.mark.parametrize("name", POLICIES)
def test_against_a_list_of_items(name, size, counts, seed):
    """Whatever the policy answers, slots hold exactly what a plain list would after the same writes in order."""
    memory = WorkingMemory(size, 8, POLICIES[name](), PAYLOAD)
    slots_of: list = [None] * size
    filled = 0
    for step, count in enumerate(counts):
        batch = items(count, seed + step)
        before = list(slots_of)
        slots, gone = offer(memory, batch, evicted=True)
        for b, slot in enumerate(slots.tolist()):
            if filled < size:
                assert slot == filled  # fills empty slots in order
                filled += 1
            if slot >= 0:
                slots_of[slot] = (int(batch["id"][b]), batch["embeddings"][b], step)
        assert len(memory) == filled == len(memory.embeddings)
        for slot in range(filled):
            number, embedding, _ = slots_of[slot]
            assert memory["id"][slot] == number
            assert memory["image"][slot, 0, 0, 0] == number % 256
            assert torch.equal(memory.embeddings[slot], embedding)
        assert memory.age.tolist() == [step - s[2] for s in slots_of[:filled]]
        # what is said to have left was there before and was that newcomer's slot; no item leaves twice
        left = gone.payload["id"][gone.valid].tolist()
        residents = [s[0] for s in before if s is not None]
        stayed = [s[0] for s in slots_of if s is not None]
        assert sorted(left) == sorted(set(residents) - set(stayed))
        for b in gone.valid.nonzero()[:, 0].tolist():
            number, embedding, _ = before[int(slots[b])]
            assert gone.payload["id"][b] == number
            assert torch.equal(gone.embeddings[b], embedding)
        memory.learn()


@pytest.mark.parametrize("admit", ["always", "compete"])
def test_a_duel_memory_does_what_replace_says(admit):
    memory = WorkingMemory(40, 8, Duel("quadratic", admit=admit))
    memory.update(isotropic(40, 8, 0, torch.float32))
    held = memory.embeddings.clone()
    for step in range(4):
        incoming = isotropic(25, 8, step + 1, torch.float32)
        want = replace(held, incoming, score="quadratic", admit=admit, engine="reference")
        assert memory.update(incoming).tolist() == want.slots.tolist()
        for slot, item in zip(want.slots.tolist(), incoming, strict=True):
            if slot >= 0:
                held[slot] = item
        assert (memory.expected_duplicates() - want.duplicates).abs().max() < 1e-4


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("name", POLICIES)
def test_save_load_continue_equals_never_having_stopped(name):
    straight = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD, seed=5)
    resumed = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD, seed=5)

    def go(memory, steps):
        for step in steps:
            offer(memory, items(9, step))
            memory.refresh(memory.stalest(4), items(4, 50 + step)["embeddings"])
            memory.learn()
            memory.sample(3)

    for cut in (1, 5):  # while filling, and when full
        straight.reset()
        go(straight, range(10))
        resumed.reset()
        go(resumed, range(cut))
        file = io.BytesIO()
        torch.save(resumed.state_dict(), file)
        file.seek(0)
        fresh = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        go(fresh, range(cut, 10))
        for key, value in straight.state_dict().items():
            other = fresh.state_dict()[key]
            assert same(value, other), key
        assert torch.equal(straight.sample(5), fresh.sample(5))


def test_refresh_keeps_the_count_right_and_the_item_in_place():
    for name in ("duel", "linear", "compete"):
        memory = WorkingMemory(30, 8, POLICIES[name](), PAYLOAD)
        for step in range(4):
            offer(memory, items(20, step))
            slots = memory.stalest(7)
            ids = memory["id"].clone()
            memory.refresh(slots, isotropic(7, 8, 90 + step, torch.float32))
            assert torch.equal(memory["id"], ids)
            assert memory.staleness[slots].tolist() == [0] * 7
            want = duel.expected_duplicates(memory.embeddings, memory.policy.score)
            assert (memory.expected_duplicates() - want).abs().max() < 1e-5


def test_age_counts_from_admission_and_staleness_from_encoding():
    memory = WorkingMemory(4, 8, "fifo")
    memory.update(isotropic(4, 8, 0))
    memory.update(isotropic(1, 8, 1))
    memory.refresh(torch.tensor([2]), isotropic(1, 8, 2))
    assert memory.age.tolist() == [0, 1, 1, 1]
    assert memory.staleness.tolist() == [0, 1, 0, 1]
    assert memory.stalest(2).tolist() == [1, 3]


def test_items_past_their_age_leave_first_the_oldest_before_the_others():
    memory = WorkingMemory(6, 8, Duel("gaussian:0.1", max_age=2), {"id": ((), torch.int64)})
    for step in range(3):
        memory.update(isotropic(2, 8, step), id=torch.full((2,), step))
    memory.update(isotropic(1, 8, 3), id=torch.tensor([3]))  # ids 0 are now 3 updates old
    assert memory["id"].tolist().count(0) == 1
    memory.update(isotropic(1, 8, 4), id=torch.tensor([4]))
    assert memory["id"].tolist().count(0) == 0
    assert (memory.age <= 3).all()


def test_ageing_leaves_the_rest_to_the_policy():
    """Two items are overdue; of five newcomers two take their places and three duel, exactly as `replace` says."""
    memory = WorkingMemory(10, 8, Duel("quadratic", max_age=2))
    memory.update(isotropic(2, 8, 0))
    memory.update(isotropic(8, 8, 1))
    memory.update(isotropic(1, 8, 2)[:0])
    held, incoming = memory.embeddings.clone(), isotropic(5, 8, 3, torch.float32)
    slots = memory.update(incoming)
    assert slots[:2].tolist() == [0, 1]
    held[:2] = incoming[:2]
    assert slots[2:].tolist() == replace(held, incoming[2:], score="quadratic", engine="reference").slots.tolist()


def test_a_second_vector_for_the_policy():
    memory = WorkingMemory(30, 4, Duel("quadratic"), policy_dim=8)
    vectors, embeddings = isotropic(30, 8, 0, torch.float32), isotropic(30, 4, 0, torch.float32)
    memory.update(embeddings, policy_embeddings=vectors)
    incoming = isotropic(10, 8, 1, torch.float32)
    want = replace(vectors, incoming, score="quadratic", engine="reference")
    got = memory.update(isotropic(10, 4, 1, torch.float32), policy_embeddings=incoming)
    assert got.tolist() == want.slots.tolist()
    assert memory.embeddings.shape == (30, 4)
    with pytest.raises(UserError, match="needs policy_embeddings"):
        memory.update(embeddings)


def test_sampling_is_without_replacement_and_uniform():
    memory = WorkingMemory(12, 8, "fifo", seed=3)
    memory.update(isotropic(12, 8, 0))
    counts = torch.zeros(12)
    for _ in range(600):
        drawn = memory.sample(4)
        assert drawn.unique().numel() == 4
        counts[drawn] += 1
    assert counts.sum() == 2400
    assert (counts - 200).abs().max() < 5 * (200 * (1 - 1 / 3)) ** 0.5  # five standard deviations
    with pytest.raises(UserError, match="13 different slots from 12"):
        memory.sample(13)


def test_negatives_mask_the_anchors_own_item():
    memory = WorkingMemory(5, 8, "fifo", {"id": ((), torch.int64)})
    memory.update(isotropic(3, 8, 0), id=torch.tensor([7, 8, 9]))
    rows, blocked = memory.negatives(exclude_ids=torch.tensor([9, 1]))
    assert rows.shape == (3, 8)
    assert blocked.tolist() == [[False, False, True], [False, False, False]]
    assert memory.negatives()[1] is None


def test_never_an_empty_slot():
    memory = WorkingMemory(5, 8)
    assert memory.embeddings.shape == (0, 8)
    assert memory.expected_duplicates().shape == (0,)
    assert memory.stalest(3).shape == (0,)
    memory.update(isotropic(2, 8, 0))
    assert memory.embeddings.shape == (2, 8)
    assert not memory.full
    memory.reset()
    assert len(memory) == 0


@pytest.mark.parametrize("context", ["no_grad", "inference", "autocast", "grad"])
def test_works_in_every_mode_and_holds_no_gradient(context):
    modes = {
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "grad": torch.enable_grad(),
    }
    memory = WorkingMemory(20, 8, Duel("gaussian:0.1"))
    with modes[context]:
        for step in range(3):
            memory.update(isotropic(15, 8, step, torch.float32).requires_grad_(context == "grad"))
    memory.update(isotropic(15, 8, 9, torch.float32))  # and outside afterwards
    assert not memory.embeddings.requires_grad
    plain = WorkingMemory(20, 8, Duel("gaussian:0.1"))
    for step in (0, 1, 2, 9):
        plain.update(isotropic(15, 8, step, torch.float32))
    assert torch.equal(memory.embeddings, plain.embeddings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_are_stored_as_they_are_given(dtype):
    rows = isotropic(5000, 16, 0, dtype)
    memory = WorkingMemory(5000, 16, "fifo", dtype=dtype)
    memory.update(rows)
    assert torch.equal(memory.embeddings, rows)
    memory.refresh(torch.arange(5000), memory.embeddings.clone())
    assert torch.equal(memory.embeddings, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy_dim", [None, 16])
def test_rows_made_wide_again_have_unit_length(dtype, policy_dim):
    rows = isotropic(8, 16, 0).float()
    twice = torch.cat([rows, rows])
    second = {} if policy_dim is None else {"policy_embeddings": twice}
    make = partial(WorkingMemory, 16, 16, policy_dim=policy_dim)
    narrow = make(policy=Duel("exponential:0.003"), dtype=dtype)
    narrow.update(twice, **second)
    loaded = make(policy=Duel("exponential:0.003"))
    loaded.load_state_dict(narrow.state_dict())
    for memory in (loaded, narrow.float()):
        assert memory.embeddings.dtype == torch.float32
        for held in (memory.embeddings, memory.compared):
            assert (held.norm(dim=1) - 1).abs().max() < 1e-6
        assert (memory.expected_duplicates() - 1).abs().max() < 1e-3  # every item is held twice
        duel.replace(memory.embeddings, rows[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    memory = WorkingMemory(20, 16, Duel("gaussian"), dtype=dtype)
    for step in range(3):
        memory.update(isotropic(15, 16, step, torch.float32).to(dtype))
    assert memory.embeddings.dtype == dtype
    assert (memory.expected_duplicates() - duel.expected_duplicates(memory.embeddings, "gaussian")).abs().max() < 1e-4


def test_moves_and_copies():
    memory = WorkingMemory(6, 8, Duel())
    memory.update(isotropic(9, 8, 0, torch.float32))
    twin = copy.deepcopy(memory).to("cpu")
    assert (
        twin.update(isotropic(3, 8, 1, torch.float32)).tolist()
        == memory.update(isotropic(3, 8, 1, torch.float32)).tolist()
    )


def test_normalises_only_when_asked():
    rows = torch.randn(5, 8) * 3
    with pytest.raises(UserError, match="unit length"):
        WorkingMemory(5, 8).update(rows)
    memory = WorkingMemory(5, 8, normalize=True)
    memory.update(rows)
    assert torch.allclose(memory.embeddings, normalize(rows, dim=1))


good = isotropic(3, 8, 0, torch.float32)
BAD = {
    "rank": ({"embeddings": good[0]}, r"embeddings must have shape \(n, 8\)"),
    "dim": ({"embeddings": torch.ones(3, 7)}, r"got \(3, 7\)"),
    "nan": ({"embeddings": torch.where(torch.arange(3)[:, None] == 1, float("nan"), good)}, "row 1 is not finite"),
    "inf": ({"embeddings": torch.where(torch.arange(3)[:, None] == 2, float("inf"), good)}, "row 2 is not finite"),
    "length": ({"embeddings": good * 1.01}, "row 0 has length 1.01"),
    "missing": ({"id": None}, r"keeps id, image with each embedding"),
    "extra": ({"label": torch.zeros(3)}, "got .*label"),
    "shape": ({"image": torch.zeros(3, 3, 4, 4, dtype=torch.uint8)}, "image must be"),
    "dtype": ({"id": torch.zeros(3)}, "id must be torch.int64"),
    "list": ({"id": [1, 2, 3]}, r"id must be a tensor, torch.int64 \(3,\), got a list"),
    "array": (
        {"image": torch.zeros(3, 3, 2, 2, dtype=torch.uint8).numpy()},
        "image must be a tensor, .* got a ndarray",
    ),
    "lists": ({"embeddings": good.tolist()}, r"embeddings must be a tensor of shape \(n, 8\), got a list"),
    "device": ({"embeddings": good.to("meta")}, "is on meta, the memory on cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_leaves_the_memory_unchanged(case):
    change, message = BAD[case]
    memory = WorkingMemory(10, 8, Duel(), PAYLOAD)
    for step in range(2):
        offer(memory, items(9, step))
    before = copy.deepcopy(memory.state_dict())
    batch = {**items(3, 3), "embeddings": good, **change}
    batch = {k: v for k, v in batch.items() if v is not None}
    with pytest.raises(UserError, match=message):
        memory.update(batch.pop("embeddings"), **batch)
    for key, value in memory.state_dict().items():
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key]


def test_bad_construction_and_refresh():
    for kwargs, message in [
        ({"size": 0}, "size must be"),
        ({"dim": 0}, "dim must be"),
        ({"size": 2.5}, "size must be"),
        ({"policy": "fivo"}, "did you mean 'fifo'"),
        ({"policy": 3}, "policy must be a name"),
        ({"policy_dim": -1}, "policy_dim must be"),
        ({"dtype": torch.int64}, "floating-point"),
        ({"dtype": torch.float8_e4m3fn}, "16 bits or more"),
        ({"payload": {"evicted": ((), torch.int64)}}, "cannot be used"),
    ]:
        with pytest.raises(UserError, match=message):
            WorkingMemory(**{"size": 4, "dim": 8, **kwargs})
    memory = WorkingMemory(4, 8)
    memory.update(isotropic(3, 8, 0))
    for slots, message in [([0, 0], "differ"), ([0, 3], "between 0 and 2"), ([-1, 0], "between"), ([0], "int64")]:
        with pytest.raises(UserError, match=message):
            memory.refresh(torch.tensor(slots), isotropic(2, 8, 1))
    with pytest.raises(UserError, match="keeps no 'label'"):
        memory["label"]
    memory = WorkingMemory(4, 8, payload={"id": [[], torch.int64], "image": ((2,), torch.uint8)})
    assert memory.payload["id"] == ((), torch.int64)
    memory.update(isotropic(3, 8, 0), id=torch.arange(3), image=torch.zeros(3, 2, dtype=torch.uint8))
    with pytest.raises(UserError, match="keeps id, image with each embedding, got img"):
        memory.refresh(torch.arange(2), isotropic(2, 8, 1), img=torch.zeros(2, 2, dtype=torch.uint8))


def test_payload_for_the_host_is_there_whatever_the_default_device():
    with torch.device("meta"):
        memory = WorkingMemory(4, 8, payload={"image": ((2,), torch.uint8)}, host="image")
    assert (memory._stored("image").device.type, memory.device.type) == ("cpu", "meta")


def test_compare_by_normalises_as_update_does():
    memory = WorkingMemory(3, 8, "minred", policy_dim=4, normalize=True)
    memory.update(isotropic(3, 8, 0), policy_embeddings=isotropic(3, 4, 0))
    memory.compare_by(2 * isotropic(3, 4, 1))
    torch.testing.assert_close(memory.compared.double(), isotropic(3, 4, 1))


def test_what_is_no_tensor_is_named():
    memory = WorkingMemory(4, 8, "fifo", {"id": ((), torch.int64)}, policy_dim=3, normalize=True)
    given = {"policy_embeddings": isotropic(3, 3, 0), "id": torch.arange(3)}
    memory.update(isotropic(3, 8, 0), **given)
    rows, slots = isotropic(2, 8, 1), torch.arange(2)
    for call, message in [
        (lambda: memory.update(good.tolist(), **given), r"embeddings must be a tensor of shape \(n, 8\), got a list"),
        (lambda: memory.update(good.long(), **given), "embeddings must be floating point, got torch.int64"),
        (
            lambda: memory.update(good, **{**given, "policy_embeddings": [[1.0, 0.0, 0.0]] * 3}),
            r"policy_embeddings must be a tensor of shape \(n, 3\), got a list",
        ),
        (lambda: memory.refresh([0, 1], rows), r"slots must be a tensor, int64 \(n,\), got a list"),
        (lambda: memory.refresh(slots, rows.tolist()), r"embeddings must be a tensor, \(n, 8\), got a list"),
        (lambda: memory.fetch("id", [1]), r"slots must be a tensor, int64 \(n,\), got a list"),
        (lambda: memory.negatives(exclude_ids=[1]), r"exclude_ids must be a tensor, int64 \(B,\), got a list"),
        (lambda: memory.compare_by(rows.tolist()), r"vectors must be a tensor of shape \(n, 3\), got a list"),
        (lambda: replace(rows.tolist(), rows), r"memory must be a tensor, \(K, d\), got a list"),
        (lambda: replace(rows, rows, duplicates=[0, 0]), r"duplicates must be a tensor, float64 \(2,\), got a list"),
        (lambda: duel.expected_duplicates(rows.tolist()), r"memory must be a tensor, \(K, d\), got a list"),
        (lambda: duel.policies.Oracle([0, 1]), r"labels must be a tensor, int64 \(items,\), got a list"),
    ]:
        with pytest.raises(UserError, match=message):
            call()
    assert memory["id"].tolist() == [0, 1, 2]


def test_a_state_of_another_memory_is_refused_whole():
    memory = WorkingMemory(4, 8, Duel())
    memory.update(isotropic(4, 8, 0))
    before = memory.embeddings.clone()
    for other, message in [
        (WorkingMemory(5, 8, Duel()), "another memory"),
        (WorkingMemory(4, 6, Duel()), "another memory"),
        (WorkingMemory(4, 8, "fifo"), "another kind"),
        (WorkingMemory(4, 8, Duel("gaussian")), "score"),
    ]:
        with pytest.raises(UserError, match=message):
            memory.load_state_dict(other.state_dict())
        assert torch.equal(memory.embeddings, before)


def test_a_duel_memory_evens_out_clusters():
    """What it is for: ×27 in, nearly even out; a queue keeps the bias."""
    shares = {}
    for name, policy in {"fifo": "fifo", "duel": Duel("gaussian:0.1")}.items():
        memory = WorkingMemory(200, 16, policy, {"id": ((), torch.int64)})
        rows, labels = clusters(4000, 16, 0, spread=0.3)
        for start in range(0, 4000, 100):
            memory.update(rows[start : start + 100].float(), id=torch.arange(start, start + 100))
        shares[name] = labels[memory["id"]].bincount(minlength=10).double().div(200)
    assert shares["fifo"].max() > 0.6
    assert shares["duel"].max() < 0.2
    assert shares["duel"].min() > 0.05


def examine_as_on_a_gpu(self, embeddings, second):
    """Bad rows are turned away and counted instead of refused."""
    accepted = acceptable_rows(embeddings)
    self._rejected += (~accepted).sum()
    return embeddings, embeddings, accepted


@pytest.mark.parametrize("name", POLICIES)
def test_rows_turned_away_leave_no_trace(name, monkeypatch):
    """What a GPU does with bad rows, on the CPU: the memory ends as if they had not been in the batch."""
    clean = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD)
    for step in range(6):
        offer(clean, items(9, step))
    monkeypatch.setattr(WorkingMemory, "_examine", examine_as_on_a_gpu)
    dirty = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD)
    for step in range(6):
        batch = items(9, step)
        order = torch.tensor([0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8])
        mixed = {key: value[order].clone() for key, value in batch.items()}
        mixed["embeddings"][3] = float("nan")
        mixed["embeddings"][7] = 2.0
        slots = offer(dirty, mixed)
        assert slots[[3, 7]].tolist() == [-1, -1]
    assert torch.equal(dirty["id"], clean["id"])
    assert torch.equal(dirty.embeddings, clean.embeddings)
    assert torch.equal(dirty.age, clean.age)
    with pytest.raises(UserError, match="12 embeddings were not finite"):
        dirty.state_dict()


@pytest.mark.parametrize("name", POLICIES)
def test_a_reset_memory_is_a_new_one(name):
    used, new = (WorkingMemory(12, 8, POLICIES[name](), PAYLOAD) for _ in range(2))
    for step in range(5):
        offer(used, items(9, step))
        used.learn()
    used.reset()
    for memory in (used, new):
        for step in range(10, 16):
            offer(memory, items(9, step))
            memory.learn()
    assert torch.equal(used["id"], new["id"])
    assert torch.equal(used.expected_duplicates(), new.expected_duplicates())


def test_an_engine_that_cannot_run_changes_nothing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    memory = WorkingMemory(10, 8, Duel(engine="fused", max_age=1), PAYLOAD)
    before = copy.deepcopy(memory.state_dict())
    with pytest.raises(UserError, match="not on a CUDA device"):
        offer(memory, items(9, 0))
    for key, value in memory.state_dict().items():
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key]


class Broken(Policy):
    answer = torch.tensor([99])

    def choose(self, memory, incoming):
        return self.answer

    def refreshed(self, memory, slots, old):  # three arguments, as documented
        self.told = slots


@pytest.mark.parametrize("slot", [-2, 4])
def test_a_slot_that_there_is_not_is_named(slot):
    class Wrong(duel.policies.Policy):
        def choose(self, memory, incoming):
            return torch.full((len(incoming),), slot)

    memory = WorkingMemory(4, 8, Wrong())
    memory.update(isotropic(4, 8, 0))
    with pytest.raises(UserError, match=rf"Wrong.choose must return slots below 4, or -1; got \[{slot}\]"):
        memory.update(isotropic(1, 8, 1))


def test_a_policy_that_answers_nonsense_is_named():
    memory = WorkingMemory(4, 8, Broken())
    memory.update(isotropic(4, 8, 0))
    memory.refresh(torch.tensor([1]), isotropic(1, 8, 1))
    assert memory.policy.told.tolist() == [1]
    with pytest.raises(UserError, match=r"Broken.choose must return slots below 4"):
        memory.update(isotropic(1, 8, 2))
    with pytest.raises(UserError, match=r"must return int64 \(2,\)"):
        memory.update(isotropic(2, 8, 2))


def test_a_wrong_state_is_refused_inside_a_model_too():
    model = torch.nn.ModuleDict({"memory": WorkingMemory(4, 8, Duel())})
    model["memory"].update(isotropic(4, 8, 0))
    before = model["memory"].embeddings.clone()
    other = torch.nn.ModuleDict({"memory": WorkingMemory(4, 8, Duel("gaussian"))})
    damaged = copy.deepcopy(model.state_dict())
    damaged["memory._extra_state"]["filled"] = 99
    for state, message in ((other.state_dict(), "score"), (damaged, "damaged")):
        with pytest.raises(UserError, match=message):
            model.load_state_dict(state)
        assert torch.equal(model["memory"].embeddings, before)
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_narrowing_the_memory_does_not_narrow_the_count():
    memory = WorkingMemory(10, 8, AdaptiveDuel()).bfloat16()
    assert memory._embeddings.dtype == torch.bfloat16
    assert memory.policy.duplicates.dtype == torch.float64
    memory.update(isotropic(25, 8, 0, torch.bfloat16))
    assert memory.full


def test_narrow_embeddings_are_stored_at_unit_length():
    memory = WorkingMemory(10, 8, Duel())
    memory.update(isotropic(10, 8, 0, torch.bfloat16))
    assert (memory.embeddings.norm(dim=1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("policy_dim", [None, 8])
def test_rounded_vectors_are_counted_anew(policy_dim):
    def make(dtype=torch.float32):
        return WorkingMemory(30, 8, Duel("exponential:0.01"), policy_dim=policy_dim, dtype=dtype)

    def right(memory):
        return torch.equal(memory.expected_duplicates(), duel.expected_duplicates(memory.compared, "exponential:0.01"))

    memory, rows = make(), clusters(40, 8, 0)[0].float()
    memory.update(rows, **({} if policy_dim is None else {"policy_embeddings": rows}))
    state = copy.deepcopy(memory.state_dict())
    assert memory.to("cpu", torch.float32).policy._counted
    same, narrow = make(), torch.nn.ModuleDict({"memory": make(torch.bfloat16)})
    state["policy.duplicates"] += 1  # N as it was saved, where the dtype is the same
    same.load_state_dict(state)
    assert torch.equal(same.expected_duplicates(), state["policy.duplicates"])
    narrow.load_state_dict({f"memory.{key}": value for key, value in state.items()})
    assert right(narrow["memory"])
    assert state["policy._extra_state"]["counted"]  # which is the caller's
    memory.bfloat16().float()
    assert right(memory)


def test_draws_follow_the_seed_and_come_in_random_order():
    drawn = []
    for seed in (0, 0, 1):
        memory = WorkingMemory(40, 8, seed=seed)
        memory.update(isotropic(40, 8, 0))
        drawn.append(memory.sample(30).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != sorted(drawn[0])
    assert drawn[0] != sorted(drawn[0], reverse=True)


def test_expected_duplicates_by_another_score_than_the_policy_s():
    memory = WorkingMemory(12, 8, Duel("linear"))
    memory.update(isotropic(12, 8, 0))
    wanted = duel.expected_duplicates(memory.embeddings, "gaussian:0.1")
    assert torch.equal(memory.expected_duplicates("gaussian:0.1"), wanted)
    assert not torch.allclose(memory.expected_duplicates(), wanted)


def test_a_refused_row_is_not_refreshed(monkeypatch):
    """As on a GPU; the others are, and the item stays as it was."""
    monkeypatch.setattr(WorkingMemory, "_examine", examine_as_on_a_gpu)
    memory = WorkingMemory(6, 8, Duel("gaussian:0.1"))
    memory.update(isotropic(6, 8, 0))
    before, fresh = memory.embeddings.clone(), isotropic(3, 8, 1).float()
    fresh[1] = float("nan")
    memory.refresh(torch.tensor([4, 2, 0]), fresh)
    assert torch.equal(memory.embeddings[[4, 0]], fresh[[0, 2]])
    assert torch.equal(memory.embeddings[[1, 2, 3, 5]], before[[1, 2, 3, 5]])
    wanted = duel.expected_duplicates(memory.embeddings, "gaussian:0.1")
    torch.testing.assert_close(memory.expected_duplicates(), wanted, atol=1e-6, rtol=0)


def test_what_left_is_told_where_a_batch_with_refused_rows_fills_the_memory(monkeypatch):
    """As on a GPU: six fill the memory, of which the seventh to be accepted replaces one that was there before."""
    monkeypatch.setattr(WorkingMemory, "_examine", examine_as_on_a_gpu)
    memory = WorkingMemory(4, 8, "fifo", {"id": ((), torch.int64)})
    memory.update(isotropic(2, 8, 0).float(), id=torch.arange(2))
    held, rows = memory.embeddings.clone(), isotropic(5, 8, 1).float()
    rows[[0, 3]] = float("nan")
    slots, gone = memory.update(rows, id=torch.arange(10, 15), evicted=True)
    assert slots.tolist() == [-1, 2, 3, -1, 0]
    assert gone.valid.tolist() == [False] * 4 + [True]
    assert torch.equal(gone.embeddings[4], held[0])
    assert gone.payload["id"][4] == 0
    assert memory["id"].tolist() == [14, 1, 11, 12]


def test_an_age_limit_in_a_memory_with_a_second_vector():
    memory = WorkingMemory(3, 8, Duel("gaussian:0.1", max_age=1), policy_dim=4)
    for step in range(4):
        second = isotropic(3, 4, step).float()
        memory.update(isotropic(3, 8, step).float(), policy_embeddings=second)
    assert torch.equal(memory.compared.sort(0).values, second.sort(0).values)
    wanted = duel.expected_duplicates(memory.compared, "gaussian:0.1")
    torch.testing.assert_close(memory.expected_duplicates(), wanted, atol=1e-6, rtol=0)
