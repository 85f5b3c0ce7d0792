"""A working memory in the place of other libraries' queues: with policy "fifo" it is theirs, with "duel" it forgets."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules.memory_bank import MemoryBankModule
from lightly.models.modules.nn_memory_bank import NNMemoryBankModule
from pytorch_metric_learning import losses, miners
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import duel
from duel.errors import UserError
from duel.integrations.lightly import DuelMemoryBank, DuelNNMemoryBank
from duel.integrations.metric_learning import DuelCrossBatchMemory
from duel.integrations.moco import DuelQueue

K, B, D = 24, 8, 6
SHARP = duel.policies.Duel(score="gaussian:0.1")


def rows(count: int = B, seed: int = 0, dim: int = D) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


CENTRES = normalize(rows(10, dim=32), dim=1)


def stream(steps: int):
    """Batches of which four in five are of one kind, out of ten."""
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        kind = torch.randint(1, 10, (B,), generator=random) * (torch.rand(B, generator=random) < 0.2)
        yield normalize(CENTRES[kind] + 0.05 * torch.randn(B, 32, generator=random), dim=1)


def share_of_the_common(memory: torch.Tensor) -> float:
    return float(((memory @ CENTRES.T).argmax(1) == 0).float().mean())


# ---------------------------------------------------------------- lightly


def pair_of_losses(policy="fifo", **settings):
    theirs, ours = (NTXentLoss(temperature=0.3, memory_bank_size=(K, D)) for _ in range(2))
    ours.memory_bank = DuelMemoryBank((K, D), policy, **settings)
    ours.memory_bank.bank.copy_(theirs.memory_bank.bank)  # both start with the same random rows
    return theirs, ours


def test_a_fifo_bank_gives_lightlys_losses_and_gradients():
    theirs, ours = pair_of_losses()
    for step in range(2 * K // B + 1):
        found = []
        for loss in (theirs, ours):
            query = rows(seed=2 * step).requires_grad_()
            value = loss(query, rows(seed=2 * step + 1))
            value.backward()
            found.append((value.detach(), query.grad))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
        assert torch.allclose(found[0][1], found[1][1], atol=1e-6)
    held = ours.memory_bank(rows())[1]
    assert torch.allclose(held, theirs.memory_bank(rows())[1], atol=1e-6)
    assert held.shape == (D, K)
    assert ours.memory_bank.bank.numel() == 0  # the random rows take no room any more


def test_nothing_is_taken_in_without_a_gradient_and_random_rows_are_never_remembered():
    _, ours = pair_of_losses("duel")
    bank = ours.memory_bank
    ours(rows(), rows(seed=1))
    assert len(bank.memory) == 0
    ours(rows().requires_grad_(), rows(seed=1))
    assert len(bank.memory) == B
    (_, shown), start = bank(rows()), bank.bank
    assert torch.allclose(shown[:, :B].T, normalize(rows(seed=1), dim=1), atol=1e-6)
    assert torch.equal(shown[:, B:].T, start[B:])
    for step in range(K // B):
        bank(rows(seed=step + 2), update=True)
    known = normalize(torch.cat([rows(seed=step + 1) for step in range(K // B + 1)]), dim=1)
    assert ((bank.memory.embeddings @ known.T).max(1).values > 1 - 1e-5).all()


def test_a_duel_bank_is_less_full_of_the_common_kind_than_lightlys():
    theirs, ours = MemoryBankModule((64, 32)), DuelMemoryBank((64, 32), copy.deepcopy(SHARP), feature_dim_first=False)
    for batch in stream(100):
        theirs(batch, update=True)
        ours(batch, update=True)
    _, held = ours(batch)
    assert held.shape == (64, 32)
    assert share_of_the_common(theirs.bank) > 0.6
    assert share_of_the_common(held) < 0.25


def test_a_bank_goes_on_where_it_was_saved():
    _, whole = pair_of_losses(duel.policies.Duel(score="gaussian:0.1"))
    batches = [batch[:, :D] for batch in stream(12)]
    for batch in batches[:6]:
        whole.memory_bank(batch, update=True)
    _, resumed = pair_of_losses(duel.policies.Duel(score="gaussian:0.1"))
    resumed.load_state_dict(whole.state_dict())
    for loss in (whole, resumed):
        for batch in batches[6:]:
            loss.memory_bank(batch, update=True)
    assert torch.equal(whole.memory_bank(batch)[1], resumed.memory_bank(batch)[1])


def test_a_bank_that_is_not_full_has_the_same_negatives_when_loaded():
    saved, fresh, full, older = (pair_of_losses()[1] for _ in range(4))
    for seed in range(K // B):
        full.memory_bank(rows(seed=seed), update=True)
    whole, kept = full.state_dict(), older.memory_bank.bank.clone()
    assert whole["memory_bank.bank"].untyped_storage().nbytes() == 0  # nothing to save of rows that are gone
    saved.memory_bank(rows(), update=True)
    state = saved.state_dict()
    older.load_state_dict({key: value for key, value in state.items() if key != "memory_bank.bank"})
    want = saved.memory_bank(rows())[1]
    for other in (fresh, full):
        other.load_state_dict(state)
        assert torch.equal(other.memory_bank(rows())[1], want)
    assert torch.equal(older.memory_bank(rows())[1], torch.cat([want[:, :B], kept[B:].T], 1))
    fresh.load_state_dict(whole)
    assert torch.equal(fresh.memory_bank(rows())[1].T, whole["memory_bank.memory._embeddings"])
    with pytest.raises(UserError, match="another memory"):
        DuelMemoryBank((K + 1, D), "fifo").load_state_dict(saved.memory_bank.state_dict())


def test_embeddings_of_all_processes_are_taken_in(monkeypatch):
    module = importlib.import_module("duel.integrations.lightly")
    monkeypatch.setattr(module.dist, "world_size", lambda: 2)
    monkeypatch.setattr(module.utils, "concat_all_gather", lambda x: torch.cat([x, -x]))
    bank, alone = DuelMemoryBank((K, D), gather_distributed=True), DuelMemoryBank((K, D))
    for one in (bank, alone):
        one(rows(), update=True)
    unit = normalize(rows(), dim=1)
    assert torch.allclose(bank.memory.embeddings, torch.cat([unit, -unit]), atol=1e-6)
    assert torch.allclose(alone.memory.embeddings, unit, atol=1e-6)


def test_a_bank_of_no_size_is_no_bank():
    for size in (0, (0, 8)):
        given = rows()
        assert DuelMemoryBank(size)(given, update=True) == (given, None)
    with pytest.raises(ValueError, match="does not specify the feature"):
        DuelMemoryBank(8)


def test_neighbours_come_from_the_memory():
    theirs, ours = NNMemoryBankModule((K, D)), DuelNNMemoryBank((K, D), "fifo")
    ours.bank.copy_(theirs.bank)
    for step in range(2 * K // B + 1):
        given = normalize(rows(seed=step), dim=1)
        assert torch.allclose(theirs(given, update=True), ours(given, update=True), atol=1e-6)
    assert isinstance(DuelNNMemoryBank((K, D)).memory.policy, duel.policies.Duel)
    assert isinstance(ours, NNMemoryBankModule)


# ---------------------------------------------------------------- pytorch-metric-learning


@pytest.mark.parametrize(
    ("loss", "miner"),
    [
        (losses.NTXentLoss(), None),
        (losses.ContrastiveLoss(), miners.MultiSimilarityMiner()),
        (losses.TripletMarginLoss(margin=0.5), None),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_fifo_memory_gives_the_losses_of_a_cross_batch_memory(loss, miner, masked):
    theirs = losses.CrossBatchMemory(loss, D, memory_size=K, miner=miner)
    ours = DuelCrossBatchMemory(loss, D, memory_size=K, miner=miner, policy="fifo")
    count = 2 * B if masked else B
    mask = torch.arange(count) % 2 == 0 if masked else None
    for step in range(2 * K // B + 1):
        labels = torch.randint(4, (count,), generator=torch.Generator().manual_seed(step))
        found = []
        for memory in (theirs, ours):
            embeddings = rows(count, step).requires_grad_()
            value = memory(embeddings, labels, enqueue_mask=mask)
            value.backward()
            found.append((value.detach(), embeddings.grad))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
        assert torch.allclose(found[0][1], found[1][1], atol=1e-5)
    assert len(ours.memory) == K
    assert sorted(ours.memory["label"].tolist()) == sorted(theirs.label_memory.tolist())


def test_two_views_stay_positives_though_the_memory_keeps_one_of_them():
    """Views are duplicates: the policy lets the second take the place of the first."""
    memory = DuelCrossBatchMemory(losses.NTXentLoss(0.2), D, memory_size=K, policy=copy.deepcopy(SHARP))
    for step in range(K):
        view = rows(seed=step)
        labels = torch.arange(B) + B * step
        embeddings = torch.cat([view, view + 0.01]).requires_grad_()
        value = memory(embeddings, torch.cat([labels, labels]))
        value.backward()
        assert value > 0
        assert embeddings.grad.abs().sum(1).min() > 0
    assert len(memory.memory["label"].unique()) > len(memory.memory) // 2


def test_embeddings_keep_their_length_and_the_policy_does_not_see_it():
    loss = losses.ContrastiveLoss()
    short, long = (DuelCrossBatchMemory(loss, D, memory_size=K, policy=copy.deepcopy(SHARP)) for _ in range(2))
    for step in range(2 * K // B):
        labels = torch.arange(B)
        short(rows(seed=step), labels)
        long(5 * rows(seed=step).double(), labels)
    assert torch.equal(short.memory["label"], long.memory["label"])
    assert torch.allclose(5 * short.memory["embedding"], long.memory["embedding"], rtol=1e-5)
    assert long.embedding_memory.dtype == torch.float64
    assert torch.equal(long.embedding_memory[:B], 5 * rows(seed=step).double())  # the batch comes first


def test_a_cross_batch_memory_goes_on_where_it_was_saved_and_can_forget():
    def make():
        return DuelCrossBatchMemory(losses.NTXentLoss(), D, memory_size=K, policy=copy.deepcopy(SHARP))

    whole, resumed = make(), make()
    for step in range(5):
        whole(rows(seed=step), torch.arange(B))
    resumed.load_state_dict(whole.state_dict())
    values = [[float(memory(rows(seed=step), torch.arange(B))) for step in range(5, 9)] for memory in (whole, resumed)]
    assert values[0] == values[1]
    whole.reset_queue()
    assert len(whole.memory) == 0
    assert float(whole(rows(seed=5), torch.arange(B))) == float(make()(rows(seed=5), torch.arange(B)))


# ---------------------------------------------------------------- MoCo code


class TinyMoCo(nn.Module):
    """The parts of a MoCo model that concern its queue."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, dim)
        self.register_buffer("queue", normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: torch.Tensor) -> None:
        at = int(self.queue_ptr)
        self.queue[:, at : at + len(keys)] = keys.T
        self.queue_ptr[0] = (at + len(keys)) % self.queue.shape[1]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        query = normalize(self.encoder(images), dim=1)
        logits = torch.cat([(query * query.detach()).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1)
        loss = cross_entropy(logits / 0.2, torch.zeros(len(images), dtype=torch.long))
        self._dequeue_and_enqueue(query.detach())
        return loss


class FifoMoCo(DuelQueue, TinyMoCo):
    policy = "fifo"


class DuelMoCo(DuelQueue, TinyMoCo):
    policy = SHARP


def test_a_fifo_queue_is_mocos():
    torch.manual_seed(0)
    theirs = TinyMoCo(D, K)
    ours = FifoMoCo(D, K)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    for step in range(2 * K // B + 1):
        images = rows(seed=step, dim=4)
        assert torch.allclose(theirs(images), ours(images), atol=1e-6)
        assert torch.allclose(theirs.queue, ours.queue, atol=1e-6)


def test_a_duel_queue_is_what_its_memory_holds():
    model = DuelMoCo(32, 64)
    assert model.duel_memory.policy is not SHARP  # which the next model gets a copy of, too
    start = model.queue.clone()
    for step, batch in enumerate(stream(100)):
        model._dequeue_and_enqueue(batch[: 5 + step % 4])  # batches of any size
        held = len(model.duel_memory)
        assert torch.equal(model.queue[:, :held].T, model.duel_memory.embeddings)
        assert torch.equal(model.queue[:, held:], start[:, held:])
    assert model.duel_memory.full
    assert share_of_the_common(model.queue.T) < 0.25
    again = DuelMoCo(32, 64)
    again.load_state_dict(model.state_dict())
    for one in (model, again):
        one._dequeue_and_enqueue(CENTRES)
    assert torch.equal(model.queue, again.queue)


def test_keys_of_all_processes_are_taken_in_by_rank(monkeypatch):
    def all_gather(found, given):
        for rank, place in enumerate(found):
            place.copy_(given * (-1) ** rank)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    model, keys = DuelMoCo(D, K), normalize(rows(4), dim=1)
    model._dequeue_and_enqueue(keys)
    assert torch.allclose(model.duel_memory.embeddings, torch.cat([keys, -keys, keys]), atol=1e-6)


def test_a_model_without_a_queue_is_refused():
    class Odd(DuelQueue, nn.Linear):
        pass

    with pytest.raises(UserError, match=r"Odd: DuelQueue goes before a model with a buffer queue \(dim, slots\)"):
        Odd(2, 3)


# ---------------------------------------------------------------- where they are


@pytest.mark.parametrize(
    ("name", "library", "install"),
    [("lightly", "lightly", "lightly"), ("metric_learning", "pytorch_metric_learning", "pytorch-metric-learning")],
)
def test_a_missing_library_is_named(name, library, install, monkeypatch):
    for loaded in [part for part in sys.modules if part.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"duel.integrations.{name}")
    with pytest.raises(UserError, match=f"pip install {install}"):
        importlib.import_module(f"duel.integrations.{name}")


def test_they_are_found_by_name():
    assert duel.integrations.lightly.DuelMemoryBank is not None
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = duel.integrations.keras
