"""What a `TrainConfig` refuses: values out of range, and settings that contradict each other or would do nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from .errors import UserError, check_seed, suggest
from .names import BLIND_POLICIES, NEGATIVE_FREE, POLICIES, score_parts

if TYPE_CHECKING:
    from .config import TrainConfig

# Settings that say nothing without a memory; given all the same, they are a mistake.
_OF_THE_MEMORY = (
    "policy",
    "refresh",
    "max_age",
    "space",
    "memory_negatives",
    "memory_view",
    "reuse_newcomers",
    "fresh_keys",
    "memory_images",
)
#: Likewise, but a recipe may have set them, for whoever adds a memory or another policy.
OF_ANY_MEMORY = ("memory_size", "score", "admit", "at_once", "space", "refresh", "queue")


def check(config: TrainConfig) -> None:
    """Raise UserError with what was given, what is accepted and what to do."""
    kind: type = type(config)
    for name, accepted in choices(kind).items():
        if getattr(config, name) not in accepted:
            raise UserError(suggest(name, getattr(config, name), map(str, accepted)))
    score_parts(config.score)
    for name in ("batch_size", "dwell", "dim", "memory_size", "log_every", "checkpoint_every", "keep"):
        _at_least(config, name, 1)
    optional = ("steps", "image_size", "hidden", "batchnorm_groups", "predictor_hidden", "max_age", "stream_batch")
    for name in optional:
        if getattr(config, name) is not None:
            _at_least(config, name, 1)
    check_seed(config.seed)
    for name in ("warmup", "refresh", "queue", "knn_every", "weight_decay", "bias_class"):
        _at_least(config, name, 0)
    if config.workers is not None:
        _at_least(config, "workers", 0)
    if config.warmup >= 1 and config.warmup % 1:
        raise UserError(f"warmup must be whole steps, or below 1 a share of the training, got {config.warmup}")
    for name in ("epochs", "lr", "temperature", "temperature_high", "temperature_cycles", "clip"):
        if getattr(config, name) is not None:
            _positive(config, name)
    _at_least(config, "bias", 1)
    if config.dwell_spread and config.dwell == 1:
        raise UserError(f"dwell_spread {config.dwell_spread} needs a dwell of several frames, got dwell 1")
    if config.adaptive_target is not None:
        _positive(config, "adaptive_target")
        if config.policy != "adaptive":
            raise UserError(f"adaptive_target is for policy adaptive, got policy {config.policy!r}; leave it out")
    if config.alike is not None and (not 0 < config.alike <= 1 or config.policy != "dedup"):
        raise UserError(
            f"alike is a cosine above 0 and at most 1, for policy dedup; got {config.alike} with policy "
            f"{config.policy!r}"
        )
    for name in ("momentum", "key_momentum", "lr_end", "dwell_spread"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{name} must lie in [0, 1], got {value}")
    if (config.bias_kind == "weights") != bool(config.weights):
        raise UserError(
            f"bias_kind {config.bias_kind!r} with weights {config.weights}: "
            "bias_kind weights needs weights, one per class, and no other kind takes them"
        )
    if any(w < 0 or not math.isfinite(w) for w in config.weights) or (config.weights and not any(config.weights)):
        raise UserError(f"weights must be >= 0 and not all zero, got {config.weights}")
    _check_memory(config)
    if config.base_method == "simclr" and not config.negatives_from_memory and config.batch_size < 2:
        memory = "memory_negatives" if config.source == "memory" else "a policy and so a memory"
        raise UserError(
            f"batch_size must be >= 2 with method {config.method!r}, got {config.batch_size}: its negatives are the "
            f"other images of the batch, and there would be none; enlarge batch_size or give it {memory}"
        )


def check_idle(config: TrainConfig, given: Sequence[str]) -> None:
    """Refuses settings of the memory that were given to a run without one."""
    if given and not config.has_memory:
        raise UserError(
            f"method {config.method!r} keeps no memory, so {', '.join(given)} would do nothing; leave that out, "
            "use --source memory, a method with a memory (moco, d-moco, d-simclr), or --policy with simclr"
        )


def check_live(config: TrainConfig) -> None:
    """Refuses what cannot be done with images that come once. Not for `check`: a recipe for them has no steps yet."""
    if config.bias_kind == "weights" or config.bias != 1:
        raise UserError(no_labels(config))
    if config.dwell != 1:
        raise UserError(f"dwell {config.dwell} shows an image of a set as several frames; leave it at 1 for a stream")
    if config.memory_policy == "distinct":
        raise UserError(
            "policy distinct knows images by their numbers, and every image of a stream has one of its own; take "
            "reservoir, which is the same there, or one that looks at them: duel, minred, adaptive"
        )
    if not config.steps:
        raise UserError("steps must be given for a stream, which has no epochs")


def no_labels(config: TrainConfig) -> str:
    """That a bias was asked for where there are none."""
    mend = "leave bias at 1" + ", or unlabelled out" * config.unlabelled
    return f"bias {config.bias:g} needs labels, but {without_labels(config)}; {mend}"


def without_labels(config: TrainConfig) -> str:
    """Why there are none."""
    return "unlabelled takes no notice of them" if config.unlabelled else f"{config.data!r} has none"


def unread(policy: str) -> set[str]:
    """Settings that `policy` does not look at."""
    names = set() if policy == "duel" else {"score", "at_once"}
    names |= set() if policy in ("duel", "adaptive") else {"admit"}
    names |= {"space"} if policy in BLIND_POLICIES else set()
    names |= set() if policy == "dedup" else {"alike"}
    return names | (set() if policy == "adaptive" else {"adaptive_target"})


def check_unread(config: TrainConfig, given: Sequence[str]) -> None:
    """Refuses settings that were given to a policy that does not look at them."""
    if config.has_memory and not config.memory_encoded and config.refresh and "refresh" in given:
        raise UserError("space pixels: nothing in the memory is encoded, so refresh would do nothing; leave it out")
    # a policy that compares nothing still has a memory that need not be encoded
    read = set() if config.memory_encoded else {"space"}
    names = [name for name in given if name in unread(config.memory_policy) - read]
    if names:
        readers = [p for p in POLICIES if not unread(p) & set(names)]
        raise UserError(
            f"policy {config.memory_policy!r} does not look at {', '.join(names)}; leave that out, or use policy "
            f"{' or '.join(readers)}"
        )


def _check_memory(config: TrainConfig) -> None:
    """Settings of the memory that contradict each other or would do nothing."""
    if config.method.startswith("d-") and config.base_method in NEGATIVE_FREE and config.source == "stream":
        raise UserError(
            f"method {config.method!r} has no negatives that a memory could give, only batches: use --source memory"
        )
    if config.queue and (config.base_method != "moco" or config.source != "memory"):
        raise UserError(
            f"queue is for moco and d-moco with source memory, got {config.method!r} with source {config.source!r}: "
            "there the memory itself is the queue, or there is none; leave it out"
        )
    defaults = {name: type(config).__dataclass_fields__[name].default for name in _OF_THE_MEMORY}
    check_idle(config, [name for name, value in defaults.items() if getattr(config, name) != value])
    if config.source == "memory" and config.batch_size > config.memory_size:
        raise UserError(
            f"batch_size {config.batch_size} exceeds memory_size {config.memory_size}: with source memory "
            "a batch is drawn from the memory without replacement; enlarge memory_size or shrink batch_size"
        )
    if config.source == "stream" and config.stream_batch not in (None, config.batch_size):
        raise UserError(
            f"stream_batch {config.stream_batch} with batch_size {config.batch_size}: with source stream the stream's "
            "batch is the training batch, so they must be equal; leave stream_batch out or use --source memory"
        )
    if config.memory_negatives and (config.base_method != "simclr" or config.source != "memory"):
        raise UserError(
            f"memory_negatives is for simclr and d-simclr with source memory, got {config.method!r} with source "
            f"{config.source!r}: moco has the memory's slots as negatives unless it has a queue, and so has a "
            "stream-first d-simclr; simsiam and byol have no negatives"
        )
    if config.reuse_newcomers and (config.source == "memory" or not config.memory_holds_images):
        why = "batches are drawn from the memory" if config.source == "memory" else "the memory holds embeddings"
        raise UserError(
            f"reuse_newcomers is for stream-first memories of images, but here {why}"
            f"{', which come from the training pass anyway' if config.source == 'stream' else ''}; leave it out"
        )
    if config.reuse_newcomers and config.memory_view == "clean":
        raise UserError(
            "reuse_newcomers takes augmented views from the training pass, so memory_view must be augmented or "
            "auto, got 'clean': a newcomer would look distinct merely because it was augmented"
        )
    if config.fresh_keys and (config.base_method, config.source) != ("moco", "stream"):
        raise UserError(
            f"fresh_keys is for moco and d-moco with source stream, got {config.method!r} with source "
            f"{config.source!r}, whose newcomers are not the step's keys; leave it out"
        )
    if config.fresh_keys and (config.memory_view == "clean" or config.reuse_newcomers):
        raise UserError(
            "fresh_keys with memory_view clean or reuse_newcomers: clean newcomers are encoded after the step anyway, "
            "reused ones never are; leave one of them out"
        )
    if config.space == "pixels" and (config.source != "memory" or config.negatives_from_memory):
        why = "batches come from the stream" if config.source != "memory" else "the memory's embeddings are negatives"
        hint = {"moco": "give it a queue", "simclr": "do without memory_negatives"}.get(config.base_method, "")
        raise UserError(
            f"space pixels is for a memory that gives batches and no negatives, but with method {config.method!r} and "
            f"source {config.source!r} {why}; {'use --source memory' if config.source != 'memory' else hint}"
        )
    if config.space == "pixels" and config.memory_view == "augmented":
        raise UserError("space pixels compares the images as they come; memory_view augmented would do nothing")
    if config.memory_images == "host" and not config.memory_holds_images:
        raise UserError("memory_images host: this memory holds embeddings only; leave it out, or set refresh")


@functools.cache
def choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The accepted values of every setting that is one of a few words, or such a word or None."""
    found: dict[str, tuple[Any, ...]] = {"policy": (*POLICIES, None)}
    for name, hint in get_type_hints(kind).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Literal:
                found[name] = get_args(part) if part is hint else (*get_args(part), None)
    return found


def _at_least(config: TrainConfig, name: str, least: float) -> None:
    value = getattr(config, name)
    if not (math.isfinite(value) and value >= least):
        raise UserError(f"{name} must be >= {least:g}, got {value}")


def _positive(config: TrainConfig, name: str) -> None:
    value = getattr(config, name)
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} must be > 0, got {value}")
