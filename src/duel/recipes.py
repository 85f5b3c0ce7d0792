"""Named settings as functions that return a `TrainConfig`. No torch here: ``duel --help`` reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .config import MethodName, TrainConfig
from .errors import UserError, suggest

Recipe = Callable[..., TrainConfig]

# What differs from one method to the next in the standard recipe. Heads and temperatures are those of the
# CIFAR-10 benchmark of lightly, whose k-NN figures the baselines are held against.
_STANDARD: dict[str, dict[str, Any]] = {
    "simclr": {"dim": 128, "projection_norm": "all", "temperature": 0.5},
    "moco": {
        "dim": 128,
        "projection_norm": "none",
        "temperature": 0.1,
        "key_momentum": 0.99,
        "symmetric": True,
        "key_batchnorm": "running",
        "memory_size": 4096,
    },
    "simsiam": {"dim": 2048, "hidden": 2048, "projection_norm": "all", "predictor_hidden": 512},
    "byol": {
        "dim": 256,
        "hidden": 1024,
        "projection_norm": "hidden",
        "predictor_hidden": 1024,
        "key_momentum": 0.99,
        "momentum_schedule": False,
    },
}


def standard(method: MethodName = "simclr", data: str = "cifar10", *, batch_size: int = 256) -> TrainConfig:
    """What the field uses on small images: SGD with cosine, SimCLR's augmentation, ResNet-18, 200 epochs.

    The learning rate is 0.06 per 128 images of batch; SimSiam's is not scaled, which keeps it from collapsing.
    """
    settings: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": 0.06 if method == "simsiam" else 0.06 * batch_size / 128,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "epochs": 200.0,
        "backbone": "resnet18",
        "projection": "mlp",
        "augment": "standard",
        "score": "gaussian:0.1",
        **_STANDARD[method.removeprefix("d-")],
    }
    if method == "d-simclr":
        settings["memory_size"] = 512
    if data == "digits":
        settings |= {"augment": "digits", "backbone": "convnet"}
    return TrainConfig(recipe="standard", method=method, data=data, batch_size=batch_size, **settings)


def paper(method: MethodName = "d-moco", data: str = "cifar10", *, batch_size: int = 256) -> TrainConfig:
    """The DUEL paper's: ResNet-50, one linear layer to 256, Adam, cosine from 0.05, temperature 0.7, no crop."""
    settings: dict[str, Any] = {}
    if method.removeprefix("d-") in ("moco", "simclr"):
        settings["temperature"] = 0.7
    if method.removeprefix("d-") == "moco":
        settings |= {"memory_size": 2048, "key_momentum": 0.999}  # the paper gives no momentum; MoCo v2's is .999
    if method == "d-simclr":
        settings["memory_size"] = 512
    return TrainConfig(
        recipe="paper",
        method=method,
        data=data,
        batch_size=batch_size,
        backbone="resnet50",
        projection="linear",
        dim=256,
        optimizer="adam",
        lr=0.05,
        weight_decay=0.0,
        steps=40_000,
        augment="paper",
        score="linear",
        **settings,
    )


def demo(method: MethodName = "simclr", data: str = "digits", *, batch_size: int = 128) -> TrainConfig:
    """Seconds on a CPU: 8×8 digits, a small convnet, 200 steps; a memory of 256 images where one is used."""
    settings: dict[str, Any] = {"temperature": 0.3} if method.removeprefix("d-") in ("moco", "simclr") else {}
    return TrainConfig(
        recipe="demo",
        method=method,
        data=data,
        batch_size=batch_size,
        backbone="convnet",
        projection="linear",
        dim=128,
        optimizer="adam",
        lr=3e-3,
        weight_decay=0.0,
        steps=200,
        augment="digits" if data == "digits" else "standard",
        memory_size=256,
        score="gaussian:0.1",
        device="cpu",
        log_every=10,
        checkpoint_every=200,
        knn_every=0,
        tensorboard=False,
        **settings,
    )


RECIPES: dict[str, Recipe] = {"standard": standard, "paper": paper, "demo": demo}


def recipe(name: str, **choices: Any) -> TrainConfig:
    """The recipe called `name`, for the given method, data and batch_size (each optional)."""
    if name not in RECIPES:
        raise UserError(suggest("recipe", name, RECIPES))
    method = choices.get("method")
    if method is not None:
        TrainConfig(method=method)  # an unknown method is reported as such, before the recipe looks it up
    return RECIPES[name](**choices)
