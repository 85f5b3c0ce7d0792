from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from duel import names, policies, recipes, scores
from duel.config import MethodName, TrainConfig
from duel.data import PRESETS
from duel.errors import UserError
from duel.optimizers import LARS, Schedule, build_optimizer, learning_rate
from duel.reproduce import store


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": 0.5}, "bias must be >= 1, got 0.5"),
        ({"bias": float("nan")}, "bias must be >= 1"),
        ({"method": "simcrl"}, "did you mean 'simclr'"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"workers": -1}, "workers must be >= 0, got -1"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"momentum": 1.5}, r"momentum must lie in \[0, 1\]"),
        ({"bias_kind": "weights"}, "needs weights"),
        ({"weights": (1.0, 2.0)}, "no other kind takes them"),
        ({"bias_kind": "weights", "weights": (1.0, -2.0)}, "weights must be >= 0"),
        ({"refresh": 8}, "keeps no memory, so refresh would do nothing"),
        ({"method": "byol", "policy": "duel", "space": "backbone"}, "keeps no memory, so policy, space would"),
        ({"stream_batch": 64}, "stream_batch 64 with batch_size 256: with source stream .* must be equal"),
        ({"source": "memory", "stream_batch": 0}, "stream_batch must be >= 1"),
        ({"dwell_spread": 0.5}, "dwell_spread 0.5 needs a dwell of several frames, got dwell 1"),
        ({"dwell": 4, "dwell_spread": 1.1}, r"dwell_spread must lie in \[0, 1\], got 1.1"),
        ({"method": "moco", "source": "memory", "memory_negatives": True}, "memory_negatives is for simclr"),
        ({"method": "d-simclr", "memory_negatives": True}, "with source 'stream'"),
        ({"method": "moco", "queue": 64}, "queue is for moco and d-moco with source memory, got 'moco' with source"),
        ({"method": "simclr", "source": "memory", "queue": 64}, "queue is for moco"),
        ({"method": "moco", "source": "memory", "queue": -1}, "queue must be >= 0"),
        ({"method": "d-moco", "reuse_newcomers": True}, "the memory holds embeddings, which come from the training"),
        ({"source": "memory", "reuse_newcomers": True}, "batches are drawn from the memory; leave it out"),
        ({"method": "d-simclr", "reuse_newcomers": True, "memory_view": "clean"}, "must be augmented or auto"),
        ({"method": "d-simclr", "fresh_keys": True}, "fresh_keys is for moco and d-moco with source stream"),
        ({"method": "moco", "source": "memory", "fresh_keys": True}, "got 'moco' with source 'memory'"),
        ({"method": "moco", "fresh_keys": True, "memory_view": "clean"}, "encoded after the step anyway"),
        ({"method": "moco", "fresh_keys": True, "refresh": 8, "reuse_newcomers": True}, "reused ones never are"),
        ({"fresh_keys": True}, "keeps no memory, so fresh_keys would do nothing"),
        ({"method": "d-moco", "memory_images": "host"}, "holds embeddings only"),
        ({"method": "d-moco", "space": "backbones"}, "did you mean 'backbone'"),
        ({"source": "memory", "memory_size": 64}, "batch_size 256 exceeds memory_size 64"),
        ({"source": "memory", "memory_size": 64, "refresh": 99}, "batch_size 256 exceeds memory_size 64"),
        ({"batch_size": 1}, "batch_size must be >= 2 with method 'simclr', got 1: .* give it a policy"),
        ({"batch_size": 1, "source": "memory"}, "or give it memory_negatives"),
        ({"policy": "duell"}, "did you mean 'duel'"),
        ({"augment": "standrd"}, "did you mean 'standard'"),
        ({"method": "moco", "key_batchnorm": "bach"}, "did you mean 'batch'"),
        ({"method": "d-moco", "policy": "adaptive", "adaptive_target": 0}, "adaptive_target must be > 0, got 0"),
        ({"method": "d-moco", "adaptive_target": 0.01}, "adaptive_target is for policy adaptive, got policy None"),
        ({"method": "d-moco", "alike": 0.8}, "for policy dedup; got 0.8 with policy None"),
        ({"method": "d-moco", "policy": "dedup", "alike": 1.5}, "a cosine above 0 and at most 1"),
        ({"score": "gausian:1"}, "did you mean 'gaussian'.*exponential:TAU"),
        ({"score": "linear+gaussian:x"}, "must be a number"),
        ({"score": "0*linear+gaussian"}, "weight of 'linear' must lie between"),
        ({"score": "exponential:1e9"}, "tau of the exponential score must lie between"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig(**settings)


def test_one_image_is_enough_where_negatives_come_from_elsewhere() -> None:
    for settings in ({"policy": "fifo"}, {"method": "d-simclr"}, {"method": "moco"}, {"method": "byol"}):
        assert TrainConfig(batch_size=1, **settings).batch_size == 1  # type: ignore[arg-type]


def test_names_are_those_of_what_they_name() -> None:
    assert set(names.POLICIES) == set(policies.POLICIES)
    assert set(get_args(names.AugmentName)) == set(PRESETS)
    assert all(scores.get(name).kind == name for name in names.SCORES)


def test_json_round_trip() -> None:
    config = TrainConfig(bias_kind="weights", weights=(1.0, 3.0), bias_mode="subset", clip=1.0)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    with pytest.raises(UserError, match="leraning"):
        TrainConfig.from_dict({"leraning": 1})


def test_differences_ignore_what_cannot_change_the_result() -> None:
    config = TrainConfig()
    watched = dataclasses.replace(config, out="elsewhere", log_every=7, device="cpu", keep=9)
    assert config.differences(watched) == []
    assert config.differences(dataclasses.replace(config, bias=27.0, lr=0.5)) == [
        "bias: 1.0 -> 27.0",
        "lr: 0.12 -> 0.5",
    ]


def test_what_the_fields_imply() -> None:
    assert TrainConfig(method="d-moco").memory_policy == "duel"
    assert TrainConfig(method="moco").memory_policy == "fifo"
    assert TrainConfig(method="d-moco", policy="fifo").memory_policy == "fifo"
    assert not TrainConfig().has_memory
    assert not TrainConfig(method="moco").memory_holds_images
    assert TrainConfig(method="d-simclr", memory_size=512).refreshed_slots == 512
    assert TrainConfig(source="memory").memory_holds_images
    control = TrainConfig(policy="fifo", memory_size=512)  # SimCLR with a queue of images
    assert control.negatives_from_memory
    assert control.memory_holds_images
    assert (control.memory_policy, control.refreshed_slots) == ("fifo", 512)
    assert not TrainConfig(source="memory", policy="fifo").negatives_from_memory
    assert TrainConfig(source="memory", memory_negatives=True).negatives_from_memory
    assert TrainConfig(source="memory", stream_batch=64).stream_items == 64


def test_how_the_memory_is_encoded() -> None:
    def how(**settings: Any) -> tuple[bool, bool]:
        config = TrainConfig(**settings)
        return config.memory_augmented, config.newcomers_from_training

    assert how(method="d-moco") == (True, True)  # the keys of the step
    assert how(method="d-moco", memory_view="clean") == (False, False)
    assert how(method="d-moco", refresh=64) == (True, True)
    assert how(method="d-moco", refresh=64, memory_view="clean") == (False, False)
    assert how(method="d-moco", fresh_keys=True) == (True, False)
    assert how(method="moco", source="memory") == (True, False)
    assert TrainConfig(method="moco", refresh=64).method_settings == {"key_batchnorm": "running"}
    assert TrainConfig(method="moco", fresh_keys=True).method_settings == {"key_batchnorm": "running"}
    assert TrainConfig(method="moco").method_settings == {}
    assert how(method="d-simclr") == (False, False)
    assert how(method="d-simclr", memory_view="augmented") == (True, False)
    assert how(method="d-simclr", reuse_newcomers=True) == (True, True)
    assert how(source="memory") == (False, False)


def test_names_of_runs() -> None:
    assert TrainConfig(data="some/where/photos/", bias=27).run_dir == "runs/photos-simclr-x27-seed0"


@pytest.mark.parametrize("method", get_args(MethodName))
@pytest.mark.parametrize("name", list(recipes.RECIPES))
def test_every_recipe_serves_every_method(name: str, method: MethodName) -> None:
    for source in ("memory",) if method in ("d-simsiam", "d-byol") else ("stream", "memory"):
        config = recipes.recipe(name, method=method, source=source, batch_size=5000)
        assert (config.recipe, config.method, config.source, config.batch_size) == (name, method, source, 5000)


def test_recipes_by_name() -> None:
    assert recipes.recipe("standard", batch_size=128).lr == pytest.approx(0.06)
    assert recipes.recipe("standard", batch_size=512).lr == pytest.approx(0.24)
    paper = recipes.recipe("paper", method="d-moco")
    assert (paper.backbone, paper.dim, paper.temperature, paper.lr, paper.steps) == ("resnet50", 256, 0.7, 0.05, 40_000)
    with pytest.raises(UserError, match="did you mean 'standard'"):
        recipes.recipe("standart")
    with pytest.raises(UserError, match="unknown method"):
        recipes.recipe("standard", method="swav")
    with pytest.raises(UserError, match="did you mean 'memory'"):
        recipes.recipe("standard", source="memry")


def test_the_standard_memory_depends_on_what_it_is_for() -> None:
    first = recipes.standard("d-simclr", source="memory")
    assert (first.memory_size, first.score, first.refresh) == (32768, "exponential:0.05", 512)
    assert first.space == "backbone"
    moco = recipes.standard("d-moco", source="memory")
    assert (moco.memory_size, moco.refresh, moco.space) == (16384, 256, "projection")
    assert recipes.standard("d-moco", source="memory").queue == 4096
    assert recipes.standard("d-moco", "digits", source="memory").queue == 256
    assert recipes.demo("d-moco", source="memory").queue == 256
    stream = recipes.standard("d-moco", source="stream")
    assert (stream.memory_size, stream.queue) == (4096, 0)
    assert recipes.standard("d-simclr", source="memory").queue == 0
    assert recipes.standard("d-simclr", source="stream").memory_size == recipes.standard("simclr").memory_size == 512


@pytest.mark.parametrize("method", get_args(MethodName))
def test_the_standard_d_forms_draw_their_batches_from_the_memory(method: MethodName) -> None:
    config = recipes.standard(method)
    assert config == recipes.standard(method, source="memory" if method.startswith("d-") else "stream")
    assert recipes.recipe("standard", method=method) == config
    negative_free = method in ("d-simsiam", "d-byol")  # a memory can give them nothing but batches
    for literal in (recipes.paper(method), recipes.demo(method)):
        assert literal.source == ("memory" if negative_free else "stream")
    if negative_free:
        assert config.memory_policy == "duel"
        with pytest.raises(UserError, match="no negatives that a memory could give, only batches"):
            recipes.standard(method, source="stream")


def test_all_forms_of_the_papers_moco_normalise_their_keys_alike() -> None:
    forms = [recipes.paper("moco"), recipes.paper("d-moco"), recipes.paper("d-moco", source="memory")]
    assert {form.method_settings["key_batchnorm"] for form in forms} == {"running"}


def test_a_refresh_is_of_all_slots_at_most() -> None:
    config = dataclasses.replace(recipes.standard("d-simclr", source="memory"), memory_size=400)
    assert config.refresh > config.refreshed_slots == 400
    assert dataclasses.replace(config, refresh=7).refreshed_slots == 7


def test_features_are_kept_only_for_a_policy_that_compares() -> None:
    config = recipes.standard("d-simclr", source="memory")
    assert config.compares_features
    assert not recipes.standard("simclr", source="memory").compares_features  # a FIFO memory
    assert not dataclasses.replace(config, policy="random").compares_features
    assert dataclasses.replace(config, policy="minred").compares_features
    assert not dataclasses.replace(config, space="projection").compares_features


def test_config_and_cli_do_not_import_torch() -> None:
    code = "import sys, duel.cli, duel.recipes; print([m for m in ('torch', 'timm', 'lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_schedule_warms_up_and_ends_at_the_floor() -> None:
    rates = [learning_rate(s, peak=2.0, steps=100, warmup=10, end=0.1) for s in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_warmup_is_in_steps_or_a_share_of_the_training() -> None:
    def rates(warmup: float) -> list[float]:
        schedule = Schedule(peak=1.0, steps=40, warmup=warmup, end=0.0, device=torch.device("cpu"))
        return schedule.table.tolist()

    assert rates(0.1) == rates(4) != rates(0)
    assert rates(0.01) == rates(0)
    with pytest.raises(UserError, match=r"whole steps.*got 1\.5"):
        TrainConfig(warmup=1.5)


def test_writing_the_schedule_moves_every_optimizer() -> None:
    schedule = Schedule(peak=0.5, steps=4, warmup=2, end=0.0, device=torch.device("cpu"))
    for name in ("adam", "adamw", "sgd", "lars"):
        p = torch.nn.Parameter(torch.ones(3, 3))
        optimizer = build_optimizer(name, [{"params": [p], "weight_decay": 0.0}], lr=schedule.lr)
        moves = []
        for step in (0, 1):
            schedule.set(torch.tensor([step]))
            p.grad = torch.ones_like(p)
            before = p.detach().clone()
            optimizer.step()
            moves.append(float((before - p.detach()).abs().mean()))
        assert moves[1] > 1.2 * moves[0] > 0, name
    with pytest.raises(UserError, match="warmup must be shorter"):
        Schedule(peak=0.5, steps=4, warmup=4, end=0.0, device=torch.device("cpu"))


def test_lars_against_its_formula() -> None:
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    b = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    zero = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = LARS([w, b, zero], lr=0.3, momentum=0.8, weight_decay=0.1, trust=0.01)
    expected = [w.detach().clone(), b.detach().clone(), zero.detach().clone()]
    velocity = [torch.zeros_like(e) for e in expected]
    for _ in range(3):
        grads = [torch.randn_like(e) for e in expected]
        for p, g in zip((w, b, zero), grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for i, g in enumerate(grads):
            if expected[i].ndim > 1:
                g = g + 0.1 * expected[i]
                norm = expected[i].norm()
                g = g * (0.01 * norm / g.norm() if norm > 0 else 1.0)
            velocity[i] = 0.8 * velocity[i] + g
            expected[i] = expected[i] - 0.3 * velocity[i]
    for p, e in zip((w, b, zero), expected, strict=True):
        torch.testing.assert_close(p.detach(), e)


def test_recipes_name_the_methods_there_are() -> None:
    with pytest.raises(UserError, match="did you mean 'simclr'"):
        recipes.standard("simclrr", "cifar10")  # type: ignore[arg-type]


def test_a_setting_that_a_saved_config_should_not_have_is_named_with_the_file(tmp_path: Path) -> None:
    values = TrainConfig().as_dict()
    with pytest.raises(
        UserError, match=r"unknown setting\(s\) temprature in a saved config; did you mean temperature\?"
    ):
        TrainConfig.from_dict({**values, "temprature": 1.0})
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": store.SCHEMA, "config": {**values, "qqqq": 1}}))
    with pytest.raises(UserError, match=r"run\.json: unknown setting\(s\) qqqq .* by another version"):
        store.read(path)
