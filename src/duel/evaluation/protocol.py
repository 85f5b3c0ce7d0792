"""The whole evaluation of one encoder, in the order and with the choices that the JSON states."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from duel.errors import UserError
from duel.evaluation.clock import Clock
from duel.evaluation.features import (
    Encode,
    FeatureCache,
    balanced_ids,
    batchnorms,
    describe_source,
    extract,
    fingerprint,
    image_batches,
    reestimated_batchnorm,
)
from duel.evaluation.geometry import class_cosines, class_means, effective_rank, etf_distance
from duel.evaluation.knn import Neighbours, nearest, topk_of, weighted_knn_of
from duel.evaluation.probe import ProbeResult, linear_probe, nearest_centroid, standardised
from duel.evaluation.progress import ProgressLike, bars
from duel.evaluation.rates import Rates, check_labels
from duel.evaluation.settings import DEFAULTS, EvaluationSettings
from duel.machine import in_bf16
from duel.modes import evaluating

if TYPE_CHECKING:
    from duel.data.sources import Source

    class HasFeatures(Protocol):
        """An nn.Module with `features`: normalised float images (b, c, h, w) → (b, f), before any projection."""

        def features(self, images: Tensor, /) -> Tensor: ...


_TOP = (1, 10)
HEADLINES = ("top1_test_to_test", "top1_test_to_train", "knn", "probe", "probe_train")
"""What is also reported with the BatchNorm statistics that training left behind."""


def evaluate(
    encoder: HasFeatures,
    train: Source,
    test: Source,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    settings: EvaluationSettings = DEFAULTS,
    cache: str | os.PathLike[str] | None = None,
    progress: ProgressLike = False,
) -> dict[str, Any]:
    """Every measure of the frozen backbone features, as a dict that JSON can hold; all rates are shares, 0 to 1.

    mean, std: per channel in 0..1, as in training. `cache`: a folder for the features, so that a repeated evaluation
    does not encode again. The encoder is left as it was found: modes and BatchNorm statistics.
    """
    module = _as_module(encoder)
    classes, train_labels, test_labels = _checked(train, test)
    on = torch.device(device)
    clock = Clock()
    bf16 = in_bf16(settings.precision, on)
    encode = clean_encode(encoder, mean, std, on, bf16=bf16)
    computed = (on.type, "bf16") if bf16 else (on.type,)
    state = fingerprint(module, tuple(mean), tuple(std), *computed) if cache is not None else ""
    store = FeatureCache(cache) if cache is not None else None
    train_y, test_y = train_labels.to(on), test_labels.to(on)
    train, test = _on_device(train, on), _on_device(test, on)

    with evaluating(module), bars(progress) as shown:
        described = {name: describe_source(source) for name, source in (("train", train), ("test", test)) if store}

        def both(tag: str, *how: Any) -> tuple[Tensor, Tensor]:
            """Train and test features, from the cache where it has them. how: what they depend on besides."""
            found = []
            for split, source in (("train", train), ("test", test)):
                compute = _extraction(encode, source, split, on, settings, shown)
                key = fingerprint(state, described[split], how) if store else ""
                found.append(store.get(f"{split}-{tag}", key, compute, device=on) if store else compute())
            return found[0], found[1]

        layers = len(batchnorms(module))
        used = 0
        before: dict[str, Any] | None = None
        if layers:
            with clock.part("features"):
                features = both("as-trained", "as trained")
            before = _measures(*features, train_y, test_y, classes, settings, shown, clock, full=False)
            del features  # or there would be two sets of them at a time
            ids = balanced_ids(train_labels, settings.batchnorm_images, seed=settings.seed)
            used = len(ids)
            # equal parts, because the average weighs every batch the same
            parts = ids.tensor_split(-(-used // settings.batch_size))
            batches = image_batches(train, parts, device=on, workers=settings.workers)
            context: Any = reestimated_batchnorm(module, batches, forward=encode)
        else:
            context = nullcontext()
        with clock.part("features"), context:
            statistics = (described.get("train"), settings.batchnorm_images, settings.batch_size, settings.seed)
            features = both("reestimated", statistics)
        found = _measures(*features, train_y, test_y, classes, settings, shown, clock, full=True)
    per_class = {name: _by_name(rate, train.classes) for name, rate in found.pop("per_class").items()}
    return {
        **found,
        "per_class": per_class,
        "without_reestimation": before or {name: found[name] for name in HEADLINES},
        "images": {"train": len(train), "test": len(test)},
        "protocol": protocol(settings, train, test, features[0].shape[1], layers, used, bf16),
        **clock.read(),
    }


def _measures(
    train_x: Tensor,
    test_x: Tensor,
    train_y: Tensor,
    test_y: Tensor,
    classes: int,
    settings: EvaluationSettings,
    progress: ProgressLike,
    clock: Clock,
    *,
    full: bool,
) -> dict[str, Any]:
    """The headline measures, or (`full`) all of them, of features (n, f) and labels (n,)."""
    k = min(settings.neighbours, len(train_x))
    top = [size for size in _TOP if size <= len(train_x) and size < len(test_x)]
    with clock.part("knn"):
        in_train = nearest(test_x, train_x, max(k, *top), progress=progress)
        in_test = nearest(test_x, test_x, max(top), exclude_self=True, progress=progress)
        voters = Neighbours(in_train.similarity[:, :k], in_train.rows[:, :k])
        knn = weighted_knn_of(voters, test_y, train_y, temperature=settings.temperature, classes=classes)
        near_test, near_train = topk_of(in_test, test_y, test_y, top), topk_of(in_train, test_y, train_y, top)

    def probed(seen: Tensor, unseen: Tensor) -> ProbeResult:
        return linear_probe(
            seen, train_y, unseen, test_y, epochs=settings.probe_epochs, lr=settings.probe_lr,
            momentum=settings.probe_momentum, weight_decay=settings.probe_weight_decay,
            batch_size=settings.probe_batch_size, seed=settings.seed, classes=classes, progress=progress,
        )  # fmt: skip

    with clock.part("probe"):
        probe = probed(train_x, test_x)
    found: dict[str, Any] = {f"{name}_test_to_test": rate for name, rate in near_test.items()}
    found |= {f"{name}_test_to_train": rate for name, rate in near_train.items()}
    found |= {"knn": knn["accuracy"], "probe": probe["accuracy"], "probe_train": probe["train_accuracy"]}
    if not full:
        return {name: found[name] for name in HEADLINES}
    with clock.part("probe"):
        probe_standardised = probed(*standardised(train_x, test_x))
    fewest = int(torch.bincount(train_y, minlength=classes).min())
    shots = min(settings.shots, fewest)  # 0 where a class has no training image: then there is no such measure
    few = (
        nearest_centroid(
            train_x, train_y, test_x, test_y, shots=shots, repeats=settings.shot_repeats, seed=settings.seed,
            classes=classes,
        )
        if shots
        else None
    )  # fmt: skip
    means = class_means(test_x, test_y)  # of those that have test images
    # NaN where there is no such pair of images, which JSON has no word for
    intra, inter = (None if math.isnan(cosine) else cosine for cosine in class_cosines(test_x, test_y))
    return {
        **found,
        "probe_standardised": probe_standardised["accuracy"],
        "few_shot": few and few["accuracy"],
        "few_shot_std": few and few["std"],
        "balanced_accuracy": {"knn": knn["balanced_accuracy"], "probe": probe["balanced_accuracy"]},
        "per_class": {"knn": knn, "probe": probe},
        "probe_diverged": probe["diverged"],
        "intra_class_cosine": intra,
        "inter_class_cosine": inter,
        "etf_distance": etf_distance(means) if len(means) > 1 else None,
        "effective_rank": effective_rank(test_x),
        "used": {"k": k, "shots": shots},
    }


def protocol(
    settings: EvaluationSettings, train: Source, test: Source, width: int, layers: int, used: int, bf16: bool
) -> dict[str, Any]:
    """What the figures mean, in words and numbers, for the JSON."""
    batchnorm = (
        f"running statistics of {layers} layers re-estimated as the plain average over {used} clean, class-balanced "
        "training images; `without_reestimation` has the statistics that training left"
        if layers
        else "the encoder has no BatchNorm running statistics; `without_reestimation` repeats the same figures"
    )
    return {
        "features": f"backbone output before the projection ({width} numbers), float32"
        f"{', encoded in bf16' * bf16}, clean images, encoder frozen",
        "checkpoint": "the one given, which is the last step of training and not the best one",
        "batchnorm": batchnorm,
        "neighbours": "cosine, exact; of equal cosines the lowest index",
        "top_k": "share of test images with at least one same-class image among the k nearest; from the test set "
        "without the image itself (test_to_test) or from the train set (test_to_train)",
        "knn": "test image classified by its k nearest train images, each with weight exp(cosine / temperature)",
        "probe": "one linear layer on the features as they come, from zero weights, by SGD at a constant learning rate "
        "on all labelled train images; test accuracy after the last epoch",
        "probe_standardised": "the same on features standardised by their mean and deviation over the train images",
        "few_shot": "nearest class mean by cosine of unit features; mean over draws of the train images",
        "balanced_accuracy": "mean over classes of the share of the class's test images",
        "cosines": "mean over all pairs of test images of one class / of two classes",
        "etf_distance": "root mean square of (cosine + 1/(C-1)) over pairs of centred class means, unit test features",
        "effective_rank": "exp of the entropy of the singular values' shares, test features, uncentred",
        "train": {"name": train.name, "images": len(train)},
        "test": {"name": test.name, "images": len(test)},
        "settings": asdict(settings),
    }


def online_measures(
    encoder: HasFeatures,
    train: Source,
    test: Source,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    train_images: int = 10_000,
    test_images: int = 2_000,
    settings: EvaluationSettings = DEFAULTS,
) -> dict[str, float]:
    """To watch learning happen: knn, weighted k-NN accuracy on class-balanced parts of both sets, and of the test
    part the mean intra_class_cosine and inter_class_cosine.

    The encoder as it is: BatchNorm is not re-estimated, modes are put back, global random states are not touched.
    """
    classes, train_labels, test_labels = _checked(train, test)
    on = torch.device(device)
    encode = clean_encode(encoder, mean, std, on, bf16=in_bf16(settings.precision, on))
    sides = []
    with evaluating(_as_module(encoder)):
        for source, labels, count in ((train, train_labels, train_images), (test, test_labels, test_images)):
            ids = balanced_ids(labels, count, seed=settings.seed)
            features = extract(
                encode, source, ids=ids, batch_size=settings.batch_size, device=on, workers=settings.workers
            )
            sides.append((features, labels.cpu()[ids], ids))
    (bank, bank_labels, _), (queries, labels, shown) = sides
    found = nearest(queries, bank, min(settings.neighbours, len(bank)))
    rate = weighted_knn_of(found, labels, bank_labels, temperature=settings.temperature, classes=classes)
    _, where = np.unique(shown.numpy(), return_index=True)  # of a small class an image may be there several times
    once = torch.from_numpy(where).sort().values
    intra, inter = class_cosines(queries[once.to(queries.device)], labels[once])
    return {"knn": rate["accuracy"], "intra_class_cosine": intra, "inter_class_cosine": inter}


def clean_encode(
    encoder: HasFeatures, mean: Sequence[float], std: Sequence[float], device: torch.device, *, bf16: bool
) -> Encode:
    """uint8 images on `device` → backbone features of the clean view, float32, computed in bf16 where that is asked."""
    from duel.data.augment import normalise

    centre, spread = (torch.tensor(values, dtype=torch.float32, device=device) for values in (mean, std))

    def encode(images: Tensor) -> Tensor:
        x = normalise(images, centre, spread)
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            # convolutions on a GPU are faster in this layout, and most encoders were trained in it
            return encoder.features(x.contiguous(memory_format=torch.channels_last)).float()

    return encode


def _extraction(
    encode: Encode, source: Source, split: str, device: torch.device, settings: EvaluationSettings, shown: ProgressLike
) -> Any:
    return lambda: extract(
        encode, source, batch_size=settings.batch_size, device=device, workers=settings.workers, progress=shown,
        description=f"{split} features",
    )  # fmt: skip


def _on_device(source: Source, device: torch.device) -> Source:
    """Images that may live on the device do."""
    from duel.data.sources import ArraySource

    return source.to(device) if isinstance(source, ArraySource) else source


def _as_module(encoder: HasFeatures) -> nn.Module:
    if not isinstance(encoder, nn.Module) or not callable(getattr(encoder, "features", None)):
        raise UserError(f"encoder must be an nn.Module with a method features(images), got {type(encoder).__name__}")
    return encoder


def _checked(train: Source, test: Source) -> tuple[int, Tensor, Tensor]:
    """The number of classes and both sources' labels, if the two can be measured against each other."""
    classes = len(train.classes)
    labels = []
    for role, source in (("train", train), ("test", test)):
        if source.labels is None:
            raise UserError(f"the {role} source {source.name!r} has no labels; evaluation needs labelled images")
        check_labels(role, source.labels.unsqueeze(1), source.labels, len(source.classes))
        labels.append(source.labels)
    if train.classes != test.classes:
        raise UserError(f"train and test must have the same classes, got {train.classes} and {test.classes}")
    if classes < 2 or len(test) < 2:
        raise UserError(f"evaluation needs >= 2 classes and >= 2 test images, got {classes} and {len(test)}")
    return classes, labels[0], labels[1]


def _by_name(rate: Rates, classes: Sequence[str]) -> dict[str, float | None]:
    return dict(zip(classes, rate["per_class"], strict=True))
