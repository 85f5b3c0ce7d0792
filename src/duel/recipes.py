"""Named settings as functions that return a `TrainConfig`. No torch here: ``duel --help`` reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from .config import MethodName, TrainConfig
from .config_checks import choices as accepted
from .errors import UserError, suggest
from .names import NEGATIVE_FREE

Recipe = Callable[..., TrainConfig]
Source = Literal["stream", "memory"]

# What differs from one method to the next in the standard recipe. Heads and temperatures are those of the
# CIFAR-10 benchmark of lightly, whose k-NN figures the baselines are held against, but for SimCLR's temperature, which
# is 0.5 there (docs/decisions.md).
_STANDARD: dict[str, dict[str, Any]] = {
    "simclr": {"dim": 128, "projection_norm": "all", "temperature": 0.2},
    "moco": {
        "dim": 128,
        "projection_norm": "none",
        "temperature": 0.1,
        "key_momentum": 0.99,
        "symmetric": True,
        "key_batchnorm": "running",
        "warmup": 0.1,  # without it embeddings of some seeds crowd together in the first steps, and stay there long
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


# The memory that the standard recipe recommends; the only place to change it. docs/decisions.md says what is known.
# Stream-first it gives negatives: SimCLR re-encodes all of it in each step, so it is small. Memory-first it is what is
# trained on, so it is large, and kept fresh for the policy's sake; MoCo then has its queue beside it. What SimCLR's
# policy compares best did worse for MoCo.
D_MOCO_REFRESH = 64  # without it D-MoCo was below plain MoCo
_QUEUE = 4096  # MoCo's negatives
_STREAM_FIRST: dict[str, dict[str, Any]] = {
    "simclr": {"memory_size": 512, "score": "gaussian:0.1"},
    "moco": {"memory_size": _QUEUE, "score": "gaussian:0.1"},
    "d-moco": {"memory_size": _QUEUE, "score": "gaussian:0.1", "refresh": D_MOCO_REFRESH},
}
_MEMORY_FIRST: dict[str, Any] = {"memory_size": 16384, "score": "exponential:0.05", "refresh": 256}
_MEMORY_FIRST_SIMCLR: dict[str, Any] = _MEMORY_FIRST | {"memory_size": 32768, "refresh": 512, "space": "backbone"}
_DIGITS_MEMORY = 256  # of 1,297 images to train on


def standard(
    method: MethodName = "simclr", data: str = "cifar10", *, batch_size: int = 256, source: Source | None = None
) -> TrainConfig:
    """What the field uses on small images: SGD with cosine, SimCLR's augmentation, ResNet-18, 200 epochs.

    The learning rate is 0.06 per 128 images of batch; SimSiam's is not scaled, which keeps it from collapsing. Unless
    `source` says otherwise, a d- form draws its batches from the memory, the others from the stream.
    """
    source = source or ("memory" if method.startswith("d-") else "stream")
    base = method.removeprefix("d-")
    if base not in _STANDARD:
        raise UserError(suggest("method", method, get_args(MethodName)))
    settings: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": 0.06 if base == "simsiam" else 0.06 * batch_size / 128,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "epochs": 200.0,
        "backbone": "resnet18",
        "projection": "mlp",
        "augment": "standard",
        **_STANDARD[base],
    }
    if source == "memory":
        settings |= _MEMORY_FIRST_SIMCLR if base == "simclr" else _MEMORY_FIRST
    else:
        settings |= _STREAM_FIRST.get(method, _STREAM_FIRST.get(base, {}))
    if data == "digits":
        settings |= {"augment": "digits", "backbone": "convnet"}
        if source == "memory":
            settings |= {"memory_size": _DIGITS_MEMORY, "refresh": _DIGITS_MEMORY // 2}
    if source == "memory" and base == "moco":
        settings["queue"] = min(_QUEUE, settings["memory_size"])
    return _make("standard", method, data, batch_size, source, settings)


def paper(
    method: MethodName = "d-moco", data: str = "cifar10", *, batch_size: int = 256, source: Source | None = None
) -> TrainConfig:
    """The DUEL paper's: ResNet-50, one linear layer to 256, Adam, cosine from 0.05, temperature 0.7, no crop.

    The memory is Algorithm 2's, literally: linear score, every newcomer admitted, D-MoCo's embeddings as they were,
    D-SimCLR's images all encoded again in each step. D-MoCo is MoCo with the policy added, so two things are not as
    the algorithm prints them: its newcomers are the step's keys (`fresh_keys` encodes them after the step), and the
    memory alone gives its negatives (`in_batch_negatives` adds the batch's). The paper did not try source memory.
    MoCo's keys are normalised by running statistics, which the paper does not say, so that all forms of it differ in
    their memory alone.
    """
    source = source or _literal_source(method)
    settings: dict[str, Any] = {}
    if method.removeprefix("d-") in ("moco", "simclr"):
        settings["temperature"] = 0.7
    if method.removeprefix("d-") == "moco":
        # the paper gives no momentum; MoCo v2's is .999
        settings |= {"memory_size": 2048, "key_momentum": 0.999, "key_batchnorm": "running"}
    if method == "d-simclr":
        settings["memory_size"] = 512
    settings |= {
        "backbone": "resnet50",
        "projection": "linear",
        "dim": 256,
        "optimizer": "adam",
        "lr": 0.05,
        "weight_decay": 0.0,
        "steps": 40_000,
        "augment": "paper",
        "score": "linear",
        "admit": "always",
    }
    return _make("paper", method, data, batch_size, source, settings)


def demo(
    method: MethodName = "simclr", data: str = "digits", *, batch_size: int = 128, source: Source | None = None
) -> TrainConfig:
    """Seconds on a CPU: 8×8 digits, a small convnet, 200 steps; a memory of 256 images where one is used."""
    source = source or _literal_source(method)
    settings: dict[str, Any] = {
        "backbone": "convnet",
        "projection": "linear",
        "dim": 128,
        "optimizer": "adam",
        "lr": 3e-3,
        "weight_decay": 0.0,
        "steps": 200,
        "augment": "digits" if data == "digits" else "standard",
        "memory_size": _DIGITS_MEMORY,
        "score": "gaussian:0.1",
        "device": "cpu",
        "log_every": 10,
        "checkpoint_every": 200,
        "knn_every": 0,
        "tensorboard": False,
    }
    if method.removeprefix("d-") in ("moco", "simclr"):
        settings["temperature"] = 0.3
    if method.removeprefix("d-") == "moco":
        settings["key_batchnorm"] = "running"
    # an embedding from an older encoder looks distinct merely by its age
    if source == "memory":
        settings["refresh"] = settings["memory_size"] // 2
        if method.removeprefix("d-") == "moco":
            settings["queue"] = settings["memory_size"]
    elif method == "d-moco":
        settings["refresh"] = D_MOCO_REFRESH
    return _make("demo", method, data, batch_size, source, settings)


def _literal_source(method: MethodName) -> Source:
    """The paper's: batches come from the stream, but where the memory can give nothing else than batches."""
    return "memory" if method.startswith("d-") and method.removeprefix("d-") in NEGATIVE_FREE else "stream"


def _make(
    name: str, method: MethodName, data: str, batch_size: int, source: Source, settings: dict[str, Any]
) -> TrainConfig:
    if source == "memory":  # a batch is drawn from the memory, so it must fit
        default = TrainConfig.memory_size
        settings["memory_size"] = max(batch_size, settings.get("memory_size", default))
    return TrainConfig(recipe=name, method=method, data=data, batch_size=batch_size, source=source, **settings)


RECIPES: dict[str, Recipe] = {"standard": standard, "paper": paper, "demo": demo}


def recipe(name: str, **choices: Any) -> TrainConfig:
    """The recipe called `name`, for the given method, data, batch_size and source (each optional)."""
    if name not in RECIPES:
        raise UserError(suggest("recipe", name, RECIPES))
    for key, words in accepted(TrainConfig).items():
        if key in choices and choices[key] not in words:
            raise UserError(suggest(key, choices[key], map(str, words)))
    return RECIPES[name](**choices)
