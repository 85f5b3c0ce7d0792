"""Every setting that decides the result of a run does something: with another value something else is trained."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from duel import recipes
from duel import step as step_module
from duel.config import TrainConfig
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.policies import AdaptiveDuel, Duel
from duel.step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: dict[str, Any] = {"batch_size": 8, "memory_size": 24, "dim": 16, "steps": 4, "bias": 27.0, "refresh": 0}
SOURCE = {"source": "memory"}
MLP = {"projection": "mlp"}
DUEL = {"method": "d-simclr", **SOURCE}
D_MOCO = {"method": "d-moco"}
#: setting -> (what it is looked at in, besides SMALL; another value of it)
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "method": ({}, "byol"),
    "seed": ({}, 1),
    "epochs": ({"steps": None, "epochs": 0.01}, 0.02),
    "steps": ({}, 5),
    "batch_size": ({}, 9),
    "source": ({"method": "d-simclr"}, "memory"),
    "stream_batch": (DUEL, 5),
    "image_size": ({}, 6),
    "bias": ({}, 3.0),
    "bias_kind": ({}, "longtail"),
    "bias_class": ({}, 4),
    "bias_mode": ({}, "subset"),
    "weights": ({"bias_kind": "weights", "bias": 1.0, "weights": (1.0,) * 10}, (9.0,) + (1.0,) * 9),
    "dwell": ({}, 2),
    "dwell_spread": ({"dwell": 3}, 0.9),
    "augment": ({}, "paper"),
    "backbone": ({}, "resnet18"),
    "stem": ({"backbone": "resnet18"}, "full"),
    "projection": ({}, "mlp"),
    "dim": ({}, 12),
    "hidden": (MLP, 20),
    "projection_norm": ({**MLP, "projection_norm": "none"}, "all"),
    "temperature": ({}, 0.1),
    "temperature_high": ({}, 1.0),
    "temperature_cycles": ({"temperature_high": 1.0, "temperature_cycles": 1.0}, 2.0),
    "debias": ({}, 0.1),
    "key_momentum": ({"method": "moco"}, 0.5),
    "momentum_schedule": ({"method": "byol", "key_momentum": 0.9, "momentum_schedule": False}, True),
    "symmetric": ({"method": "moco", "symmetric": False}, True),
    "in_batch_negatives": ({"method": "moco"}, True),
    "batchnorm_groups": ({"method": "moco", "key_batchnorm": "batch"}, 2),
    "key_batchnorm": ({"method": "moco", "key_batchnorm": "batch"}, "running"),
    "predictor_hidden": ({"method": "simsiam"}, 12),
    "memory_size": (DUEL, 20),
    "policy": (DUEL, "fifo"),
    "score": (DUEL, "exponential:0.01"),
    "alike": ({**DUEL, "policy": "dedup", "space": "pixels"}, 0.5),
    "adaptive_target": ({**DUEL, "policy": "adaptive", "adaptive_target": 1.0}, 12.0),
    "admit": (DUEL, "compete"),
    "at_once": (DUEL, True),
    "space": (DUEL, "backbone"),
    "max_age": ({**DUEL, "steps": 8}, 2),
    "refresh": (DUEL, 12),
    "memory_negatives": (DUEL, True),
    "queue": ({**D_MOCO, **SOURCE, "queue": 16}, 0),
    "memory_view": (DUEL, "augmented"),
    "reuse_newcomers": ({"method": "d-simclr", "memory_view": "augmented"}, True),
    "fresh_keys": (D_MOCO, True),
    "optimizer": ({}, "sgd"),
    "lr": ({}, 0.1),
    "momentum": ({"optimizer": "sgd"}, 0.1),
    "weight_decay": ({}, 0.5),
    "decay_norm_and_bias": ({"weight_decay": 0.5}, False),
    "warmup": ({}, 3.0),
    "lr_end": ({}, 0.5),
    "clip": ({"optimizer": "sgd"}, 1e-3),
    "precision": ({}, "bf16"),
}
#: Looked at in tests of their own, or no more than a name.
ELSEWHERE = {"data", "recipe", "pretrained", "unlabelled"}


def config_of(changes: dict[str, Any]) -> TrainConfig:
    given = {**SMALL, **changes}
    return dataclasses.replace(recipes.demo(given.pop("method", "simclr")), **given)


def start(config: TrainConfig) -> TrainingStep:
    fabric = build_fabric(config)
    return TrainingStep(config, Inputs.load(config, fabric.device, test=False), fabric=fabric)


@functools.cache
def trained(config: TrainConfig) -> dict[str, Any]:
    """What a run of a few steps leaves: weights, the memory and what it holds, the rates of all steps."""
    step = start(config)
    step.fill_memory()
    for _ in range(step.steps):
        step()
    # a temperature that swings is in the state, and would differ though no loss was taken at it
    weights = {name: value for name, value in step.method.state_dict().items() if "temperature" not in name}
    found = {f"weight {name}": value for name, value in weights.items()}
    if step.memory is not None:
        found |= {"ids": step.memory["id"], "embeddings": step.memory.embeddings}
    return found | {"rates": step.schedule.table}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_all_settings_are_looked_at() -> None:
    assert set(CASES) | ELSEWHERE == set(TrainConfig().identity())


@pytest.mark.parametrize("setting", CASES)
def test_another_value_gives_another_result(setting: str) -> None:
    changes, value = CASES[setting]
    config = config_of(changes)
    assert getattr(config, setting) != value
    other = config_of({**changes, setting: value})
    assert same(trained(config), trained(dataclasses.replace(config, log_every=7)))  # the same result in itself
    assert not same(trained(config), trained(other))


def test_everything_that_is_drawn_follows_the_seed() -> None:
    """One by one: what follows it would hide what does not."""
    zero, one = (
        start(config_of({**DUEL, "policy": "reservoir", "bias_mode": "subset", "seed": seed})) for seed in (0, 1)
    )
    assert not torch.equal(zero.generator.get_state(), one.generator.get_state())  # views
    assert not torch.equal(zero.stream.order.ids, one.stream.order.ids)  # the subset
    assert (zero.stream.order.seed, one.stream.order.seed) == (0, 1)
    assert (zero.memory.policy.seed, one.memory.policy.seed) == (0, 1)
    assert (zero.memory.seed, one.memory.seed) == (0, 1)
    weights = [step.method.encoder.backbone.features[0].weight for step in (zero, one)]
    assert not torch.equal(*weights)


def test_a_policy_gets_its_own_settings() -> None:
    policy = start(config_of({**DUEL, "max_age": 7, "at_once": True, "score": "quadratic"})).memory.policy
    assert isinstance(policy, Duel)
    assert (policy.max_age, policy.at_once, policy.score.name) == (7, True, "quadratic")
    policy = start(config_of({**DUEL, "policy": "adaptive", "admit": "compete", "max_age": 7})).memory.policy
    assert isinstance(policy, AdaptiveDuel)
    assert (policy.max_age, policy.admit) == (7, "compete")


def test_pretrained_weights_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def encoder(name: str, **settings: Any) -> Any:
        asked.append(settings["pretrained"])
        return build(name, **{**settings, "pretrained": False})

    build = step_module.encoder
    monkeypatch.setattr(step_module, "encoder", encoder)
    for pretrained in (True, False):
        start(config_of({"pretrained": pretrained}))
    assert asked == [True, False]


@pytest.mark.parametrize(("residency", "resident"), [("device", True), ("stream", False)])
def test_where_images_are_read_and_by_how_many(residency: str, resident: bool) -> None:
    config = config_of({"residency": residency, "workers": 1})
    inputs = Inputs.load(config, torch.device("cpu"), test=False)
    stream = inputs.stream(config, torch.device("cpu"))
    assert (stream.resident, stream.workers) == (resident, 1)


def test_a_queue_is_filled_with_views_like_its_keys() -> None:
    step = start(config_of({**D_MOCO, **SOURCE, "queue": 16}))
    seen = []
    encode = step._encode
    step._encode = lambda images, *, augmented: seen.append(augmented) or encode(images, augmented=augmented)  # type: ignore[func-returns-value, method-assign]
    step.fill_memory()
    assert seen[-2:] == [True, True]


def test_finite_means_weights_too() -> None:
    step = start(config_of({}))
    assert step.is_finite()
    with torch.no_grad():
        step.method.encoder.backbone.features[0].weight[0] = float("nan")
    assert not step.is_finite()
