from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from duel import WorkingMemory, checkpoint, encoder, recipes, runs, train
from duel.config import TrainConfig
from duel.errors import UserError
from duel.methods import Method, build
from duel.methods.temperature import Temperature


def test_it_is_constant_unless_told_otherwise() -> None:
    constant = Temperature(0.2)
    constant.advance(0.3)
    assert constant.value == 0.2
    assert not constant.state_dict()


@pytest.mark.parametrize("progress", [0.0, 0.03, 0.1, 0.2, 0.77, 1.0])
def test_it_swings_between_its_ends(progress: float) -> None:
    wanted = (1.0 - 0.1) * (1 + math.cos(2 * math.pi * progress / 0.2)) / 2 + 0.1  # a period is a fifth of training
    for given in (progress, torch.tensor(progress, dtype=torch.float64)):
        swinging = Temperature(0.1, 1.0, cycles=5.0)
        assert float(swinging.value) == pytest.approx(1.0)
        swinging.advance(given)
        assert float(swinging.value) == pytest.approx(wanted, abs=1e-6)
        assert isinstance(swinging.value, torch.Tensor)


@pytest.mark.parametrize(("low", "high", "cycles"), [(0.0, None, 5.0), (0.5, 0.4, 5.0), (0.1, 1.0, 0.0)])
def test_impossible_ones_are_refused(low: float, high: float | None, cycles: float) -> None:
    with pytest.raises(UserError, match="temperature"):
        Temperature(low, high, cycles)


@pytest.mark.parametrize("method", ["simclr", "moco"])
def test_it_moves_with_training_and_is_saved(method: str, tmp_path: Path) -> None:
    base = recipes.demo(method, batch_size=16)  # type: ignore[arg-type]
    config = dataclasses.replace(
        base, steps=4, memory_size=32, temperature=0.1, temperature_high=0.9, temperature_cycles=1.0, out=str(tmp_path)
    )
    assert train(config).finished
    _, state, _ = checkpoint.load_latest(tmp_path / runs.CHECKPOINTS)
    # after the last of four steps, the value of step 3 (of 0..3)
    wanted = 0.1 + 0.8 * (1 + math.cos(2 * math.pi * 3 / 4)) / 2
    assert float(state["training"]["method"]["temperature.now"]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("name", ["simclr", "moco"])
def test_the_loss_is_taken_at_the_temperature_of_the_moment(name: str) -> None:
    def loss_of(method: Method) -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            return float(method.eval()(torch.rand(6, 3, 8, 8), torch.rand(6, 3, 8, 8)).loss)

    def make(**settings: float) -> Method:
        torch.manual_seed(1)
        memory = WorkingMemory(12, 16, "fifo", {"id": ((), torch.int64)})
        memory.update(torch.nn.functional.normalize(torch.randn(12, 16), dim=1), id=torch.arange(12))
        return build(name, encoder("convnet", dim=16, image_size=8), memory=memory, **settings)

    swinging = make(temperature=0.1, temperature_high=1.0, temperature_cycles=5.0)
    assert loss_of(swinging) == pytest.approx(loss_of(make(temperature=1.0)), abs=1e-6)
    swinging.temperature.advance(0.1)  # half of one of five cycles
    assert loss_of(swinging) == pytest.approx(loss_of(make(temperature=0.1)), abs=1e-5)
    assert loss_of(make(temperature=0.1)) != pytest.approx(loss_of(make(temperature=1.0)), abs=0.1)


def test_settings_reach_the_method_and_mistakes_are_told() -> None:
    assert TrainConfig(debias=0.1).method_settings["debias"] == 0.1
    with pytest.raises(UserError, match="temperature_high must be > 0"):
        TrainConfig(temperature_high=-1.0)


def test_the_debiased_loss_trains(tmp_path: Path) -> None:
    config = dataclasses.replace(recipes.demo(batch_size=32), steps=30, debias=0.1, out=str(tmp_path))
    from duel.runlog import read_metrics

    assert train(config).finished
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    assert losses[-1] < losses[0]
    with pytest.raises(UserError, match=r"debias must lie in \[0, 1\)"):
        train(dataclasses.replace(config, debias=1.0, out=str(tmp_path / "x")))
