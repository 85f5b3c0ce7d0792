"""The step as a CUDA graph gives what the eager step gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from duel import recipes
from duel.graph import WARM_UP, Graph
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.step import TrainingStep

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = {
    "simclr": {"method": "simclr"},
    "moco": {"method": "moco", "symmetric": True, "key_batchnorm": "running"},
    "d-moco": {"method": "d-moco"},
    "fresh keys": {"method": "d-moco", "fresh_keys": True},
    "d-simclr": {"method": "d-simclr", "refresh": 16},
    "byol": {"method": "byol"},
    "simsiam": {"method": "simsiam"},
    "memory-first": {"method": "simclr", "source": "memory", "policy": "duel"},
    "memory negatives": {"method": "simclr", "source": "memory", "memory_negatives": True, "stream_batch": 48},
    "oracle": {"method": "moco", "policy": "oracle"},
    "oracle first": {"method": "simclr", "source": "memory", "policy": "oracle", "refresh": 32},
    "backbone": {"method": "d-moco", "space": "backbone", "refresh": 64},
    "augmented": {"method": "d-simclr", "memory_view": "augmented", "refresh": 64},
    "reuse": {"method": "d-simclr", "reuse_newcomers": True, "refresh": 64},
    "simclr queue": {"method": "simclr", "policy": "fifo"},
    "moco queue": {"method": "moco", "refresh": 64},
    "key queue": {"method": "d-moco", "source": "memory", "queue": 128, "refresh": 64},
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_graph_and_eager_agree(case, monkeypatch):
    """Losses of 40 steps within 1e-3 and the same ids in memory: what remains is the order of float32 sums."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    losses, memories, counts = [], [], []
    for graph in (False, True):
        settings = {"device": "cuda", "precision": "fp32", "steps": 100, "bias": 27.0, "lr": 1e-3, "graph": graph}
        config = recipes.demo(CASES[case]["method"])
        config = dataclasses.replace(config, **{**settings, **CASES[case]})
        fabric = build_fabric(config)
        step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
        step.fill_memory()
        run = []
        for _ in range(40):
            step()
            run.append(step.read_loss()[0])
        assert (step.graph is not None) == graph
        if step.graph is not None:
            assert step.graph.why_not is None
            assert step.graph._graph is not None
        losses.append(torch.tensor(run))
        counts.append(step.images_encoded)
        memories.append(step.memory["id"].cpu() if step.memory is not None else torch.zeros(1))
    assert torch.allclose(losses[0], losses[1], rtol=1e-3, atol=1e-4), (losses[0] - losses[1]).abs().max()
    assert (memories[0] == memories[1]).float().mean() > 0.9
    assert counts[0] == counts[1]
    assert losses[0][WARM_UP + 2 :].unique().numel() > 20  # replays draw new augmentations


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("source", ["stream", "memory"])
def test_images_on_the_host_give_what_images_on_the_device_give(source, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = []
    for where in ("device", "host"):
        config = dataclasses.replace(
            recipes.demo("d-simclr"), device="cuda", precision="fp32", source=source, bias=27.0, refresh=64,
            memory_images=where, graph=where == "host",
        )  # fmt: skip
        fabric = build_fabric(config)
        step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
        step.fill_memory()
        for _ in range(20):
            step()
        assert step.graph is None
        assert (step.why_eager is None) == (where == "device")
        assert step.memory["image"].device.type == ("cpu" if where == "host" else "cuda")
        found.append((step.read_loss()[0], step.memory["id"].cpu(), step.memory["image"].cpu()))
    assert abs(found[0][0] - found[1][0]) < 1e-3
    same = found[0][1] == found[1][1]
    assert same.float().mean() > 0.9
    assert torch.equal(found[0][2][same], found[1][2][same])


@pytest.mark.gpu
@needs_gpu
def test_what_cannot_be_recorded_goes_on_eagerly():
    device, count = torch.device("cuda"), torch.zeros(1, device="cuda")

    def work():
        count.add_(1)
        count.item()  # a host read cannot be recorded

    graph = Graph(work, device, torch.Generator(device))
    for _ in range(WARM_UP + 5):
        assert not graph()
    assert graph.why_not
    assert count.item() == WARM_UP + 5


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", ["moco", "d-moco"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_memory_updated_beside_the_backward_pass_is_the_same(method, graph, monkeypatch):
    """In float32, where the loss keeps the very numbers of its negatives until the backward pass."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = []
    for beside in (True, False):
        config = dataclasses.replace(recipes.demo(method), device="cuda", precision="fp32", bias=27.0, graph=graph)
        config = dataclasses.replace(config, refresh=0)  # or the update waits for the optimizer
        fabric = build_fabric(config)
        step = TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)
        assert step._side is not None
        if not beside:
            step._side = None
        step.fill_memory()
        for _ in range(40):
            step()
        assert not graph or step.graph._graph is not None
        found.append((step.read_loss()[0], step.memory["id"].cpu()))
    assert abs(found[0][0] - found[1][0]) < 1e-3
    assert (found[0][1] == found[1][1]).float().mean() > 0.9
