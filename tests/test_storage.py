"""Where a memory keeps things: payload on the host, refreshed payload, another space for the policy, many images."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

import duel
from duel import WorkingMemory, compiled, expected_duplicates
from duel.errors import UserError
from duel.policies import Duel
from duel.slots import last_newcomer, occupied, put_newcomers
from pools import isotropic
from test_memory import PAYLOAD, POLICIES, items, offer


@pytest.mark.parametrize("name", POLICIES)
def test_payload_on_the_host_gives_the_same_memory(name):
    here = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD)
    there = WorkingMemory(20, 8, POLICIES[name](), PAYLOAD, host=("image",))
    for step in range(6):
        batch = items(9, step)
        (slots, gone), (slots_there, gone_there) = (offer(memory, batch, evicted=True) for memory in (here, there))
        assert torch.equal(slots, slots_there)
        assert torch.equal(gone.valid, gone_there.valid)
        for key, value in gone.payload.items():
            assert torch.equal(value, gone_there.payload[key])
        some = here.sample(5)
        assert torch.equal(there.fetch("image", some), here["image"][some])
        assert torch.equal(there.fetch("id", there.sample(5)), here["id"][some])
    assert torch.equal(here["image"], there["image"])


def test_payload_on_the_host_stays_there_when_the_memory_moves():
    memory = WorkingMemory(20, 8, Duel(), PAYLOAD, host=("image",))
    offer(memory, items(9, 0))
    image, keys = memory["image"], list(memory.state_dict())
    memory.bfloat16()
    memory.to("meta")  # a device on which there is room for everything
    assert memory["image"].device.type == "cpu"
    assert memory["image"].data_ptr() == image.data_ptr()
    assert {memory.device.type, memory["id"].device.type, memory.policy.duplicates.device.type} == {"meta"}
    assert list(memory._buffers) == list(WorkingMemory(20, 8, Duel(), PAYLOAD)._buffers)
    assert keys == list(WorkingMemory(20, 8, Duel(), PAYLOAD).state_dict())
    with pytest.raises(UserError, match=r"host must name payload \(\['id', 'image'\]\), got \['picture'\]"):
        WorkingMemory(20, 8, "fifo", PAYLOAD, host=("picture",))


@pytest.mark.parametrize("slots", [[3, -1, 0, 3, 4, 0], [-1, -1], [], [4, 3, 2, 1, 0]])
def test_the_slots_that_change_and_who_is_in_them(slots):
    given = torch.tensor(slots, dtype=torch.int64)
    at, winner = occupied(given, 5)
    last = last_newcomer(given, 5)
    assert at.tolist() == (last >= 0).nonzero()[:, 0].tolist()
    assert winner.tolist() == last[at].tolist()


WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not compiled.library(), reason="nothing was compiled"))]
ROWS = {
    "float32": lambda: torch.arange(18.0).reshape(6, 3),
    "bfloat16": lambda: torch.arange(18.0).reshape(6, 3).bfloat16(),
    "numbers": lambda: torch.arange(6),
    "one number": lambda: torch.tensor(7).expand(6),
    "columns": lambda: torch.arange(36).reshape(2, 3, 6).permute(2, 1, 0),
    "nothing": lambda: torch.zeros(6, 0),
    "conjugate": lambda: torch.complex(torch.arange(6.0), torch.ones(6)).conj(),
    "negative": lambda: torch.complex(torch.arange(6.0), torch.ones(6)).conj().imag,
}


@pytest.mark.parametrize("by_c", WAYS)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("lies", ["plain", "otherwise"])
def test_newcomers_are_put_into_their_slots(monkeypatch, by_c, name, lies):
    if not by_c:
        monkeypatch.setattr(compiled, "library", lambda: None)
    values, slots = ROWS[name](), torch.tensor([3, -1, 0, 3, 4, 0])
    target = torch.zeros(5, *values.shape[1:], dtype=values.dtype)
    if lies == "otherwise":
        target = torch.zeros(*values.shape[1:], 5, dtype=values.dtype).movedim(-1, 0)
        slots = slots.repeat_interleave(2)[::2]
    want, version = target.clone(), target._version
    for slot, row in zip(slots.tolist(), values, strict=True):
        if slot >= 0:
            want[slot] = row
    put_newcomers(slots, [(target, values)])
    assert torch.equal(target, want)
    assert target._version > version
    with pytest.raises(IndexError):
        put_newcomers(slots + 2, [(target, values)])


@pytest.mark.parametrize("by_c", WAYS)
def test_rows_of_the_memory_itself_may_be_offered(monkeypatch, by_c):
    if not by_c:
        monkeypatch.setattr(compiled, "library", lambda: None)
    memory = WorkingMemory(6, 8, "fifo")
    memory.update(isotropic(6, 8, 0).float())
    memory.update(isotropic(1, 8, 1).float())
    held = memory.embeddings.clone()
    memory.update(memory.embeddings[:5])  # into slots 1 to 5: each is read after its neighbour was written
    assert torch.equal(memory.embeddings, held[[0, 0, 1, 2, 3, 4]])


def test_a_memory_made_narrow_takes_the_payload_it_was_declared_with():
    memory = WorkingMemory(4, 8, Duel(), {"feature": ((3,), torch.float32)}).bfloat16()
    for seed in (0, 1):
        memory.update(isotropic(4, 8, seed).float(), feature=torch.full((4, 3), 1.0 + seed))
    assert memory["feature"].dtype == torch.float32
    assert 2.0 in memory["feature"]


def test_payload_keeps_its_values_when_the_memory_is_made_narrow():
    memory = WorkingMemory(2, 8, "fifo", {"far": ((), torch.float64), "near": ((), torch.float64)}, host="near")
    memory.update(
        isotropic(2, 8, 0).float(),
        far=torch.full((2,), 1e300, dtype=torch.float64),
        near=torch.ones(2, dtype=torch.float64),
    )
    assert memory.half()["far"].tolist() == [1e300, 1e300]
    assert memory.embeddings.dtype == torch.float16
    assert memory["near"].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("host", [(), ("depth",)])
def test_payload_of_any_dtype_can_be_replaced_and_refreshed(dtype, host):
    memory = WorkingMemory(8, 16, Duel("gaussian:0.1"), {"depth": ((4,), dtype)}, host=host)
    depth = torch.arange(32).reshape(8, 4).to(dtype)
    memory.update(isotropic(8, 16, 0), depth=depth)
    slots = memory.update(isotropic(3, 16, 1), depth=depth[5:])
    want = depth.float().clone()
    for slot, row in zip(slots.tolist(), depth[5:].float(), strict=True):
        want[slot] = row
    memory.refresh(torch.tensor([6, 1]), isotropic(2, 16, 2), depth=depth[:2])
    want[6], want[1] = depth[0].float(), depth[1].float()
    assert torch.equal(memory["depth"].float(), want)
    want = expected_duplicates(memory.embeddings, "gaussian:0.1")
    assert (memory.expected_duplicates() - want).abs().max() < 1e-6


def test_what_is_declared_wrongly_is_said():
    for payload in (["id"], {"id": torch.int64}, {"id": (3, torch.int64)}, {"id": ((3,), "int64")}):
        with pytest.raises(UserError, match="payload"):
            WorkingMemory(4, 8, "fifo", payload)
    for size in (0, 2.0, True, "4"):
        with pytest.raises(UserError, match="size must be a whole number"):
            WorkingMemory(size, 8)
    saved = io.BytesIO()
    torch.save(WorkingMemory(np.int64(4), np.int64(8)).state_dict(), saved)
    saved.seek(0)
    WorkingMemory(4, 8).load_state_dict(torch.load(saved, weights_only=True))
    empty = WorkingMemory(4, 8, payload={"id": ((), torch.int64)})
    with pytest.raises(UserError, match="the memory is empty"):
        empty.refresh(torch.tensor([0]), isotropic(1, 8, 0))
    with pytest.raises(UserError, match="the memory is empty"):
        empty.fetch("id", torch.tensor([0]))
    empty.update(isotropic(2, 8, 0), id=torch.arange(2))
    for slots in ([0, -1], [2]):
        with pytest.raises(UserError, match="slots must be between 0 and 1, the filled ones"):
            empty.fetch("id", torch.tensor(slots))
    with pytest.raises(UserError, match="row 0 is not finite; it has no direction"):
        WorkingMemory(4, 8, normalize=True).update(torch.full((1, 8), torch.nan))
    with pytest.raises(UserError, match=r"exclude_ids must have shape \(B,\)"):
        empty.negatives(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(UserError, match="has no direction"):
        WorkingMemory(4, 8, normalize=True).update(torch.zeros(1, 8))


def test_a_refresh_can_bring_new_payload():
    memory = WorkingMemory(20, 8, "fifo", {"id": ((), torch.int64), "note": ((2,), torch.float32)})
    memory.update(isotropic(20, 8, 0), id=torch.arange(20), note=torch.zeros(20, 2))
    memory.refresh(torch.tensor([4, 2]), isotropic(2, 8, 1), note=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert memory["note"][torch.tensor([2, 4])].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert memory["note"].sum() == 10
    assert memory["id"].tolist() == list(range(20))
    with pytest.raises(UserError, match="with each embedding"):
        memory.refresh(torch.tensor([4]), isotropic(1, 8, 1), notes=torch.zeros(1, 2))
    with pytest.raises(UserError, match="note must be"):
        memory.refresh(torch.tensor([4]), isotropic(1, 8, 1), note=torch.zeros(1, 3))


def test_the_policy_can_be_given_another_space():
    memory = WorkingMemory(12, 4, Duel("quadratic"), policy_dim=8)
    memory.update(isotropic(12, 4, 0, torch.float32), policy_embeddings=isotropic(12, 8, 0, torch.float32))
    memory.update(isotropic(1, 4, 1, torch.float32), policy_embeddings=isotropic(1, 8, 1, torch.float32))
    held, stale = memory.embeddings.clone(), memory.staleness.tolist()
    vectors = isotropic(12, 8, 5, torch.float32)
    memory.compare_by(vectors)
    assert torch.equal(memory.compared, vectors)
    assert torch.equal(memory.embeddings, held)
    assert memory.staleness.tolist() == stale
    assert (memory.expected_duplicates() - duel.expected_duplicates(vectors, "quadratic")).abs().max() < 1e-6
    with pytest.raises(UserError, match="a row for each of the 12 filled slots, got 3"):
        memory.compare_by(vectors[:3])
    with pytest.raises(UserError, match="unit length"):
        memory.compare_by(vectors * 2)
    with pytest.raises(UserError, match="build it with policy_dim"):
        WorkingMemory(12, 4).compare_by(vectors)


def test_a_hundred_thousand_images():
    """Nothing but the policy's own work grows faster than the memory; the largest tensor beside it: anchors × slots."""
    size, count = 100_000, 64
    memory = WorkingMemory(size, 8, "reservoir", {"image": ((3, 4, 4), torch.uint8), "id": ((), torch.int64)})
    images = torch.randint(0, 256, (size, 3, 4, 4), dtype=torch.uint8)
    memory.update(isotropic(size, 8, 0, torch.float32), id=torch.arange(size), image=images)
    slots = memory.update(
        isotropic(count, 8, 1, torch.float32), id=torch.arange(count) + size, image=images[:count].flip(0)
    )
    for b, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert int(memory["id"][slot]) == size + b
            assert torch.equal(memory["image"][slot], images[count - 1 - b])
    stale = memory.stalest(count)
    memory.refresh(stale, isotropic(count, 8, 2, torch.float32))
    assert (memory.staleness[stale] == 0).all()
    drawn = memory.sample(256)
    assert drawn.unique().numel() == 256
    assert memory.fetch("image", drawn).shape == (256, 3, 4, 4)
    _, own = memory.negatives(exclude_ids=memory["id"][drawn])
    assert torch.equal(own.sum(1), torch.ones(256, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_payload_of_any_dtype_is_kept(dtype):
    memory = WorkingMemory(4, 8, "fifo", {"mark": ((2,), dtype)})
    given = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).to(dtype).repeat(3, 1)
    memory.update(isotropic(6, 8, 0).float(), mark=given)
    assert torch.equal(memory["mark"].to(torch.complex64), given[[4, 5, 2, 3]].to(torch.complex64))


def test_payload_whose_sign_was_put_off_is_kept():
    memory = WorkingMemory(4, 8, "fifo", {"wave": ((), torch.complex64), "phase": ((), torch.float32)})
    wave = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    memory.update(isotropic(4, 8, 0).float(), wave=wave.conj(), phase=wave.conj().imag)
    assert torch.equal(memory["wave"], wave.conj())
    assert torch.equal(memory["phase"], -wave.imag)


@pytest.mark.parametrize("policy", ["fifo", "duel"])
def test_negatives_that_are_overwritten_before_the_backward_pass_are_an_error(policy):
    memory = WorkingMemory(8, 4, policy)
    memory.update(isotropic(8, 4, 0).float())
    weight = torch.ones(2, 4, requires_grad=True)
    loss = (weight @ memory.negatives()[0].T).square().sum()
    memory.update(isotropic(2, 4, 1).float())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_name_of_payload_on_the_host_needs_no_sequence():
    assert WorkingMemory(4, 8, "fifo", PAYLOAD, host="image").host == {"image"}
    with pytest.raises(UserError, match=r"host must name payload \(\['id', 'image'\]\), got \['picture'\]"):
        WorkingMemory(4, 8, "fifo", PAYLOAD, host="picture")
