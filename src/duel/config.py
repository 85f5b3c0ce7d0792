"""What a training run is, as one flat dataclass; every field is documented here and checked by `config_checks`.

Importing this module must stay cheap (no torch): ``duel --help`` is built from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .config_checks import check
from .errors import UserError
from .names import BLIND_POLICIES, LIVE, AugmentName, MethodName, OptimizerName

__all__ = ["MethodName", "OptimizerName", "TrainConfig"]

# How a run is carried out and watched; changing it on resume leaves the result what it would have been.
_FREE = {"free": True}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. The defaults are for SimCLR on CIFAR-10; `duel.recipes` has whole settings by name."""

    # What to train, on what, for how long ------------------------------------------------------------------
    method: MethodName = "simclr"
    """Learning method. The d- forms keep a working memory that forgets duplicates (policy duel); in the standard recipe
    they draw their batches from it."""
    data: str = "cifar10"
    """digits, cifar10, cifar100, stl10, stl10-unlabeled, a folder of images, or a .npz / .npy file; or - for images
    that come once: raw RGB frames of image_size piped in, or in Python `duel.train(config, frames=…)`."""
    recipe: str = "standard"
    """What set the other defaults: standard (the field's, for small images), paper (the DUEL paper's) or demo."""
    out: str | None = field(default=None, metadata=_FREE)
    """Run directory; by default runs/<data>[-memory]-<method>-x<bias>-seed<seed>."""
    seed: int = 0
    """Seed of the weights, the stream, the augmentation and the policy."""
    epochs: float = 200.0
    """Length of training in passes of the stream over the training images; ignored when steps is given."""
    steps: int | None = None
    """Length of training in steps (batches); a stream (data -) has no other."""
    batch_size: int = 256
    """Images per step; each is seen in two augmented views."""
    source: Literal["stream", "memory"] = "stream"
    """stream: batches come from the stream. memory: the stream only feeds the memory, batches are drawn from it."""
    stream_batch: int | None = None
    """Stream items offered to the memory per step with source memory, whatever the batch size; None: batch_size. Each
    step takes as many frames of a camera or a video."""

    # Data --------------------------------------------------------------------------------------------------
    root: str = field(default="data", metadata=_FREE)
    """Where torchvision keeps its data sets."""
    download: bool = field(default=False, metadata=_FREE)
    """Download the data set if it is missing."""
    image_size: int | None = None
    """Side in pixels to which images are resized; None keeps the data set's own (of a folder, the median
    short side of its training images, at most 224). Frames that are piped in (data -) must have it."""
    unlabelled: bool = False
    """Take no notice of labels: the subfolders of a folder are no classes (nor are the labels of a .npz), so that no
    images are kept for testing, and nothing is measured that needs labels."""
    residency: Literal["auto", "device", "stream"] = field(default="auto", metadata=_FREE)
    """device: all images live on the device as uint8. stream: decoded by workers as needed. auto: by size."""
    workers: int | None = field(default=None, metadata=_FREE)
    """Decoding processes for streamed data; None: one per free core."""
    bias: float = 1.0
    """How many times more frequent the most frequent class is than the rarest (>= 1)."""
    bias_kind: Literal["dominant", "longtail", "weights"] = "dominant"
    """dominant: one frequent class. longtail: exponential decay from the first class to the last. weights: yours."""
    bias_class: int = 0
    """Which class is the frequent one (dominant)."""
    bias_mode: Literal["draw", "subset"] = "draw"
    """draw: every item i.i.d., rare classes keep bringing new images. subset: a fixed seeded subset."""
    weights: tuple[float, ...] = ()
    """Class weights for bias_kind weights; scaled to sum to 1."""
    dwell: int = 1
    """Show every drawn item as this many consecutive, nearly identical frames."""
    dwell_spread: float = 0.0
    """0: every item for as long. Up to 1: for dwell frames on average, most for fewer and a few for very many, as a
    camera that stands still now and then (lengths have a heavy tail, Pareto's with the exponent 1 / dwell_spread)."""
    augment: AugmentName = "standard"
    """Augmentation: standard (SimCLR's), paper (no crop), digits (no mirror, no hue), none."""

    # Encoder -----------------------------------------------------------------------------------------------
    backbone: str = "resnet18"
    """Any timm name, or convnet: a small one, for small images or a CPU."""
    stem: Literal["auto", "small", "full"] = "auto"
    """small: 3x3 stride 1 and no max-pool (ResNets on small images). auto: small up to 64 pixels."""
    pretrained: bool = False
    """Start from timm's pretrained weights."""
    projection: Literal["linear", "mlp"] = "mlp"
    """Head between the backbone and the loss."""
    dim: int = 128
    """Dimension of the embedding."""
    hidden: int | None = None
    """Width of the mlp projection; None: the backbone's feature dimension."""
    projection_norm: Literal["none", "hidden", "all"] = "all"
    """BatchNorm in the mlp projection: none (MoCo v2), hidden (BYOL), all (SimCLR, SimSiam)."""

    # Method (None: the method's own default) ---------------------------------------------------------------
    temperature: float | None = None
    """Temperature of the contrastive loss (simclr, moco)."""
    temperature_high: float | None = None
    """Let the temperature swing from this value to the temperature and back (Kukleva et al. 2023); None: constant."""
    temperature_cycles: float | None = None
    """How many times it does so in the whole training."""
    debias: float | None = None
    """Chance that a negative is of the anchor's class, which the debiased loss corrects for (simclr; Chuang 2020)."""
    key_momentum: float | None = None
    """Momentum of the key / target encoder (moco, byol)."""
    momentum_schedule: bool | None = None
    """Let that momentum rise to 1 along a cosine (byol)."""
    symmetric: bool | None = None
    """Both views are query once (moco, simsiam, byol)."""
    in_batch_negatives: bool | None = None
    """The other keys of the batch are negatives too (moco)."""
    batchnorm_groups: int | None = None
    """Groups of the batch that BatchNorm normalises separately (moco)."""
    key_batchnorm: Literal["batch", "running"] | None = None
    """Statistics that normalise the keys: of their batch, or running ones (moco). None: the recipe's; running where the
    memory is encoded anew, which is done with running ones."""
    predictor_hidden: int | None = None
    """Width of the predictor (simsiam, byol)."""

    # Working memory ----------------------------------------------------------------------------------------
    memory_size: int = 4096
    """Slots of the working memory (moco, d-simclr, simclr with a policy, and every method with source memory, then no
    more than there are images, unless dwell makes different frames of each)."""
    policy: str | None = None
    """Who leaves. None: duel for the d- methods, else fifo. simclr given a policy gets a memory of images as further
    negatives, as d-simclr has. distinct knows an image that comes again by its number in the data, and nothing of how
    images look (equal files with two names are two). dedup turns away what looks like an item that is held, as far as
    there are others. oracle is a control for measuring only: it sees the labels and keeps the classes in memory
    balanced."""
    score: str = "gaussian:0.1"
    """Collision score of the duel policy: linear, quadratic, gaussian:TAU (TAU 1 unless given), exponential:TAU (0.05),
    or a mix A+B, weighted 0.1*A+0.9*B."""
    adaptive_target: float | None = None
    """Policy adaptive: about how many expected duplicates the mean item is to have (the score's width moves in steps of
    a factor √2): so many, or, below 1, that share of the memory. None: the policy's own, 0.1, which suits clusters;
    what a contrastive loss spreads wants less, such as 8."""
    alike: float | None = None
    """Policy dedup: two items are copies if their cosine is so much or more. None: the policy's own, 0.9, which suits
    thumbnails (space pixels)."""
    admit: Literal["always", "compete"] = "always"
    """always: every newcomer takes a slot. compete: a newcomer may be the duplicate and be turned away."""
    at_once: bool = False
    """The duel policy evicts the most duplicated slots of a whole batch in one go: cheaper, not the same result."""
    space: Literal["projection", "backbone", "pixels"] = "projection"
    """What the policy compares: projection (the embedding, the paper's), or backbone: the backbone's feature less a
    centre, at unit length. The centre is the mean feature of the memory, taken when it has just been filled and again
    whenever all slots have had their turn to be refreshed (without refresh: to be replaced), frozen in between. pixels:
    a thumbnail of the image, which tells copies and frames of one scene, costs no encoding and needs no refresh; for
    memories that give batches only (source memory; moco with a queue)."""
    max_age: int | None = None
    """Items older than this many steps leave first, one for each newcomer; None: age does not matter."""
    refresh: int = 0
    """Slots re-encoded after each step, stalest first; memory_size or more re-encodes all. 0: none, but all of them for
    a stream-first simclr memory, whose slots are images."""
    memory_negatives: bool = False
    """With source memory, simclr's negatives are the other slots too, not the batch alone (an anchor's own masked)."""
    queue: int = 0
    """moco with source memory: its negatives are the keys of the last so many images trained on, in a FIFO queue of
    their own, as in plain MoCo; the memory gives the batches only. 0: the memory's embeddings are the negatives."""
    memory_view: Literal["auto", "clean", "augmented"] = "auto"
    """View by which residents and newcomers are encoded, always alike: clean, or a random augmentation. auto: augmented
    where they are moco's negatives, which must look like its keys (stream-first the newcomers are the keys), otherwise
    clean."""
    reuse_newcomers: bool = False
    """simclr's memories of images, source stream: take the newcomers' embeddings from the training pass (older encoder,
    augmented view; residents are then augmented too) instead of encoding them again. Cheaper, not the literal form."""
    fresh_keys: bool = False
    """moco, source stream: encode the newcomers after the step with the updated key encoder, in another view, as
    Algorithm 2 prints it, instead of taking the step's keys as MoCo does."""
    memory_images: Literal["auto", "device", "host"] = field(default="auto", metadata=_FREE)
    """Where a memory keeps its images: device (auto), or host: limited by the host's memory, embeddings stay on the
    device; the step then waits for the host and is not recorded as a CUDA graph."""

    # Optimization ------------------------------------------------------------------------------------------
    optimizer: OptimizerName = "sgd"
    """Optimizer. lars leaves biases and norm weights unscaled and undecayed."""
    lr: float = 0.12
    """Peak learning rate (the recipes scale it with the batch size)."""
    momentum: float = 0.9
    """Momentum of sgd and lars."""
    weight_decay: float = 5e-4
    """Weight decay."""
    decay_norm_and_bias: bool = True
    """Decay biases and norm weights too (MoCo and SimSiam do, SimCLR and BYOL do not; lars never does)."""
    warmup: float = 0.0
    """Steps of linear warm-up before the cosine; below 1, the share of the training that it takes."""
    lr_end: float = 0.0
    """Learning rate at the end of the cosine, as a share of the peak."""
    clip: float | None = None
    """Largest gradient norm; None: no clipping."""

    # Machine -----------------------------------------------------------------------------------------------
    device: str = field(default="auto", metadata=_FREE)
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 (mixed) on a GPU, fp32 on the CPU."""
    compile: bool | None = field(default=None, metadata=_FREE)
    """Compile the encoder, and on a GPU the augmentation: half a minute to start, then faster. None: on a GPU, for long
    runs."""
    graph: bool = field(default=True, metadata=_FREE)
    """On a GPU, record the step as one CUDA graph and replay it; eager where that fails, or on a CPU."""

    # Watching and saving -----------------------------------------------------------------------------------
    log_every: int = field(default=50, metadata=_FREE)
    """Steps between lines of metrics.csv, the only time the loss is read from the device. Where the output is no
    terminal, lines are printed 10 s apart at least."""
    checkpoint_every: int = field(default=1000, metadata=_FREE)
    """Steps between checkpoints; one is always written at the end."""
    keep: int = field(default=2, metadata=_FREE)
    """How many of the latest checkpoints to keep."""
    knn_every: int = field(default=1000, metadata=_FREE)
    """Steps between quick k-NN measurements on part of the images, as many of each class (labelled data only); 0:
    never."""
    tensorboard: bool = field(default=True, metadata=_FREE)
    """Write TensorBoard files to the run directory, beside metrics.csv."""
    wandb: str | None = field(default=None, metadata=_FREE)
    """Also log to this Weights & Biases project (needs wandb)."""

    def __post_init__(self) -> None:
        for name in ("data", "root", "out"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        check(self)

    # What the fields imply ---------------------------------------------------------------------------------
    @property
    def base_method(self) -> str:
        """The method class: a d- form is the same class with another memory or policy."""
        return self.method.removeprefix("d-")

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings given for the method, by the names that `duel.methods.build` takes."""
        names = {name: name for name in _METHOD_SETTINGS} | {"key_momentum": "momentum"}
        given = {to: getattr(self, name) for name, to in names.items() if getattr(self, name) is not None}
        if self.base_method == "moco" and (self.memory_holds_images or self.fresh_keys):
            given.setdefault("key_batchnorm", "running")
        return given

    @property
    def has_memory(self) -> bool:
        return self.source == "memory" or self.negatives_from_memory

    @property
    def stream_items(self) -> int:
        """Items taken from the stream per step."""
        return self.stream_batch or self.batch_size

    @property
    def negatives_from_memory(self) -> bool:
        """Whether the loss takes negatives from the memory; memory-first SimCLR does only if asked to."""
        if self.base_method != "simclr":
            return self.base_method == "moco" and not self.queue
        return self.memory_negatives if self.source == "memory" else self._simclr_memory

    @property
    def _simclr_memory(self) -> bool:
        """A stream-first SimCLR with a memory of images."""
        return self.source == "stream" and (
            self.method == "d-simclr" or (self.method == "simclr" and self.policy is not None)
        )

    @property
    def memory_policy(self) -> str:
        return self.policy or ("duel" if self.method.startswith("d-") else "fifo")

    @property
    def refreshed_slots(self) -> int:
        """Slots re-encoded per step. A stream-first SimCLR memory is re-encoded whole, as in the paper."""
        if not self.memory_encoded:
            return 0
        return self.memory_size if self._simclr_memory and not self.refresh else min(self.refresh, self.memory_size)

    @property
    def memory_encoded(self) -> bool:
        """Whether residents and newcomers pass an encoder at all."""
        return self.has_memory and self.space != "pixels"

    @property
    def compares_features(self) -> bool:
        """Whether the policy compares backbone features."""
        return self.space == "backbone" and self.memory_policy not in BLIND_POLICIES

    @property
    def memory_holds_images(self) -> bool:
        """Whether slots keep their image, to be drawn as a training batch or to be encoded again."""
        return self.has_memory and (self.source == "memory" or self.refreshed_slots > 0)

    @property
    def memory_augmented(self) -> bool:
        """Whether residents and newcomers are encoded by an augmented view."""
        if self.memory_view != "auto":
            return self.memory_view == "augmented"
        return (self.base_method == "moco" and not self.queue) or self.reuse_newcomers

    @property
    def newcomers_from_training(self) -> bool:
        """Whether the newcomers' embeddings are those of the training pass; moco's are its keys."""
        keys = self.base_method == "moco" and not self.fresh_keys
        return self.source == "stream" and self.memory_augmented and (self.reuse_newcomers or keys)

    @property
    def data_name(self) -> str:
        """The data in a word."""
        return "stream" if self.data == LIVE else self.data.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]

    @property
    def run_dir(self) -> str:
        if self.out:
            return self.out
        first = "memory-" if self.source == "memory" else ""
        return f"runs/{self.data_name}-{first}{self.method}-x{self.bias:g}-seed{self.seed}"

    # To and from JSON --------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
            hint = f"did you mean {', '.join(near)}?" if near else "was it saved by another version of this package?"
            raise UserError(f"unknown setting(s) {', '.join(unknown)} in a saved config; {hint}")
        restored: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**restored)

    def identity(self) -> dict[str, Any]:
        """The settings that decide the result; how a run is carried out and watched is left out."""
        values = self.as_dict()
        return {f.name: values[f.name] for f in dataclasses.fields(self) if not f.metadata.get("free")}

    def differences(self, other: TrainConfig) -> list[str]:
        """One line per setting that would change what `self` computes, as it is and as `other` has it."""
        theirs = other.identity()
        return [f"{k}: {mine} -> {theirs[k]}" for k, mine in self.identity().items() if mine != theirs[k]]


_METHOD_SETTINGS = (
    "temperature",
    "temperature_high",
    "temperature_cycles",
    "debias",
    "key_momentum",
    "momentum_schedule",
    "symmetric",
    "in_batch_negatives",
    "batchnorm_groups",
    "key_batchnorm",
    "predictor_hidden",
)
