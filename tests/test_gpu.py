"""What only a GPU can show: the fused engine on real hardware, captured graphs, no synchronisation."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from duel import WorkingMemory
from duel.errors import UserError
from duel.likeness import unlike
from duel.picking.command import Pick
from duel.policies import AdaptiveDuel, Dedup, Distinct, Duel, Fifo, MinRed, Oracle, Random, Reservoir
from duel.replacement import fused, replace
from pools import clusters, isotropic, judge, lattice, rounding

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SCORES = ["linear", "quadratic", "gaussian", "gaussian:0.1", "exponential"]


def test_of_a_slow_pan_the_gpu_keeps_the_frames_that_the_cpu_keeps():
    steps = torch.randn(700, 16, generator=torch.Generator().manual_seed(0)) * 0.5
    rows = normalize(steps.cumsum(0) + torch.ones(16), dim=1)
    held, counts = rows[::50].roll(1, 1).contiguous(), torch.arange(14) % 2 == 0
    want = unlike(rows, 0.9, held, counts)
    assert 15 < int(want.sum()) < 350
    given = [tensor.cuda() for tensor in (rows, held, counts)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = unlike(given[0], 0.9, *given[1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.tolist() == want.tolist()


def pool(kind, n, d, seed, dtype):
    if kind == "lattice":
        return lattice(n, d, seed, dtype).cuda()
    return (isotropic(n, d, seed, dtype) if kind == "isotropic" else clusters(n, d, seed)[0].to(dtype)).cuda()


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["isotropic", "clusters", "lattice"])
@pytest.mark.parametrize("engine", ["fused", "dense"])
@pytest.mark.parametrize(("size", "count"), [(1, 3), (1500, 256), (700, 900), (4096, 64), (6000, 64)])
def test_same_victims(engine, kind, score, admit, size, count):
    memory, incoming = (pool(kind, n, 32, seed, torch.float64) for n, seed in ((size, 0), (count, 1)))
    want = replace(memory.cpu(), incoming.cpu(), score=score, admit=admit, engine="dense")
    got = replace(memory, incoming, score=score, admit=admit, engine=engine)
    assert got.slots.tolist() == want.slots.tolist()
    assert (got.duplicates.cpu() - want.duplicates).abs().max() <= rounding(memory, score)


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["isotropic", "clusters"])
def test_narrow_dtypes_err_by_no_more_than_their_rounding(kind, dtype, score, admit):
    memory, incoming = (pool(kind, n, 32, seed, dtype) for n, seed in ((1300, 0), (100, 1)))
    got = replace(memory, incoming, score=score, admit=admit, engine="fused")
    error, drift = judge(memory.cpu(), incoming.cpu(), got, score, admit)
    assert error <= 2 * rounding(memory, score)
    assert drift <= 2 * rounding(memory, score)


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", ["linear", "gaussian:0.1"])
@pytest.mark.parametrize("kind", ["isotropic", "lattice"])
def test_mistakes_are_mended_by_many_programs(monkeypatch, kind, score, admit):
    monkeypatch.setattr(fused, "WHOLE", 1)
    monkeypatch.setattr(fused, "CANDIDATES", 16)
    memory, incoming = (pool(kind, n, 32, seed, torch.float64) for n, seed in ((9000, 0), (128, 1)))
    want = replace(memory.cpu(), incoming.cpu(), score=score, admit=admit, engine="dense")
    got = replace(memory, incoming, score=score, admit=admit, engine="fused")
    assert got.slots.tolist() == want.slots.tolist()
    assert (got.duplicates.cpu() - want.duplicates).abs().max() <= rounding(memory, score)


def test_mending_in_several_places_at_once_comes_to_an_end(monkeypatch):
    """The programs that mend wait for each other, so all of them must find room on the GPU, whoever else mends."""
    monkeypatch.setattr(fused, "WHOLE", 1)
    monkeypatch.setattr(fused, "CANDIDATES", 16)
    memory, incoming = (pool("isotropic", n, 512, seed, torch.float32) for n, seed in ((16384, 0), (128, 1)))
    want = replace(memory, incoming, score="gaussian:0.1", engine="fused").slots.tolist()
    streams, found = [torch.cuda.Stream() for _ in range(fused.SHARING)], []
    for _ in range(5):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(replace(memory, incoming, score="gaussian:0.1", engine="fused").slots)
    torch.cuda.synchronize()
    assert all(slots.tolist() == want for slots in found)


def test_a_newcomer_that_competes_loses_a_tie_with_the_very_last_slot():
    memory = normalize(torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)), dim=1).cuda()
    got = replace(memory, memory[-1:], score="exponential:0.01", admit="compete", engine="fused")
    assert got.slots.tolist() == [4095]


POLICIES = {
    "fifo": Fifo,
    "random": Random,
    "reservoir": Reservoir,
    "dedup": lambda: Dedup(alike=0.5),
    "distinct": Distinct,
    "minred": MinRed,
    "minred by candidates": MinRed,
    "duel": lambda: Duel("gaussian:0.1"),
    "compete": lambda: Duel("exponential", admit="compete"),
    "at_once": lambda: Duel("gaussian:0.1", at_once=True),
    "ageing": lambda: Duel("gaussian:0.1", max_age=5),
    "adaptive": lambda: AdaptiveDuel(every=3),
    "oracle": lambda: Oracle(torch.arange(2000) % 11),
}


def test_minred_chooses_among_many_what_the_processor_chooses():
    rows, incoming = (normalize(torch.randn(n, 64, dtype=torch.float64), dim=1) for n in (3000, 64))
    memories = [WorkingMemory(3000, 64, MinRed(), dtype=torch.float64).to(device) for device in ("cpu", "cuda")]
    slots = []
    for memory in memories:
        memory.update(rows.to(memory.device))
        slots.append(memory.update(incoming.to(memory.device)).tolist())
    assert slots[0] == slots[1]
    assert int(memories[1].policy.in_doubt) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_captured_update_gives_the_eager_result_without_synchronising(name):
    """The same batches eagerly and as graph replays: bit for bit."""
    batches = torch.stack([normalize(torch.randn(64, 32), dim=1) for _ in range(24)]).cuda()
    memories = []
    for captured in (False, True):
        size = {"minred": 300, "minred by candidates": 3000}.get(name, 1500)
        memory = WorkingMemory(size, 32, POLICIES[name](), {"id": ((), torch.int64)}).cuda()
        torch.manual_seed(0)
        start = normalize(torch.randn(memory.size, 32), dim=1).cuda()
        memory.update(start, id=torch.arange(memory.size, device="cuda"))
        batch, ids = batches[0].clone(), torch.zeros(64, dtype=torch.int64, device="cuda")

        def step(memory=memory, batch=batch, ids=ids):
            memory.update(batch, id=ids)
            memory.refresh(memory.stalest(16), batch[:16])

        graph = None
        for i, current in enumerate(batches):
            batch.copy_(current)
            ids.fill_(i)
            if captured and i == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
            if graph is not None:
                graph.replay()
            elif i == 1:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            else:
                step()
            memory.learn()
        memories.append(memory)
    eager, replayed = memories
    assert torch.equal(eager["id"], replayed["id"])
    assert torch.equal(eager.embeddings, replayed.embeddings)
    assert torch.equal(eager.age, replayed.age)
    assert torch.equal(eager.expected_duplicates(), replayed.expected_duplicates())


def test_bad_rows_are_turned_away_on_the_device_and_reported_later():
    memory = WorkingMemory(100, 16, Duel("gaussian")).cuda()
    memory.update(normalize(torch.randn(100, 16), dim=1).cuda())
    before = memory.embeddings.clone()
    bad = torch.stack([torch.full((16,), float("nan")), torch.full((16,), float("inf")), torch.ones(16)]).cuda()
    assert memory.update(bad).tolist() == [-1, -1, -1]
    assert torch.equal(memory.embeddings, before)
    with pytest.raises(UserError, match="3 embeddings"):
        memory.state_dict()


def test_filling_skips_bad_rows():
    memory = WorkingMemory(10, 4, "duel").cuda()
    rows = normalize(torch.randn(6, 4), dim=1).cuda()
    rows[2] = float("nan")
    assert memory.update(rows).tolist() == [0, 1, -1, 2, 3, 4]
    assert len(memory) == 5
    assert torch.isfinite(memory.embeddings).all()


def test_picking_keeps_what_it_keeps_on_a_cpu(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (600, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", images=images.repeat(2, 0))
    kept = {}
    for device in ("cpu", "cuda"):
        out, chosen = tmp_path / f"{device}.csv", tmp_path / f"{device}.npz"
        asked = Pick(
            data=str(tmp_path / "some.npz"), keep=200, image_size=8, out=str(out), images=str(chosen), device=device
        )
        assert asked.run() == 0
        with open(out, newline="") as file:
            kept[device] = {line["picture"] for line in csv.DictReader(file) if line["kept"] == "1"}
        with np.load(chosen) as found:
            assert {str(number) for number in found["picture"]} == kept[device]
            assert np.array_equal(found["images"], images.repeat(2, 0)[found["picture"]])
    assert len(kept["cpu"] & kept["cuda"]) >= 190  # cosines round differently
