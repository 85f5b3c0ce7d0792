"""One training step: sample → augment → forward → backward → optimizer → momentum copy → memory (which, where it waits
for none of these, is updated beside the backward pass).

A step takes nothing and returns nothing. The stream fills preallocated tensors; everything after that (`compute`) reads
and writes tensors that live on the device and never waits for them, so that it can be run eagerly, captured as one CUDA
graph, or run on several devices. The loss is summed on the device and read by `read_loss`, which does wait.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import folded
from .config import TrainConfig
from .data.augment import Augment
from .encoders import Encoder, encoder
from .errors import UserError
from .graph import Graph
from .inputs import Inputs
from .machine import quietly
from .methods import Method, StepOutput, build, settings_of
from .methods.base import Encoded, NegativeSource
from .optimizers import Schedule, build_optimizer
from .pixels import thumbnails
from .streams import Beside
from .upkeep import Snapshot, Upkeep, build_memory, build_queue, slots_for

if TYPE_CHECKING:
    from lightning.fabric import Fabric


#: From so many steps on, what compiling saves on a GPU is more than the half minute that it takes.
WORTH_COMPILING = 15_000
#: Forms of a backbone (sizes, modes, copies) that torch may compile in one process. Beyond its own limit, 8, it goes on
#: uncompiled.
COMPILED_FORMS = 64
#: What the compiler is asked for on a GPU: small kernels share a launch, 1 × 1 convolutions are matrix products.
COMPILER_OPTIONS = {"combo_kernels": True, "conv_1x1_as_mm": True}


def worth_compiling(steps: int, device: torch.device, *, at_once: int = 1) -> bool:
    """Whether to compile where nobody has said; it takes a C compiler. at_once: trainings that share the device, for
    which it pays sooner: they compile at the same time, or while others train."""
    long = steps * at_once >= WORTH_COMPILING
    return device.type == "cuda" and long and any(map(shutil.which, ("cc", "gcc", "clang")))


class TrainingStep:
    """Everything that changes during training, and the one step that changes it.

    Attributes:
        steps: length of the whole training.
        done: finished steps.
        images_encoded: views that went through an encoder, momentum copies included.
        compiled: whether the encoder is.
        why_eager: why the step is not recorded as a CUDA graph although it was to be, if so.
    """

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        *,
        fabric: Fabric,
    ) -> None:
        if (config.stream_batch or 0) > inputs.items:
            raise UserError(
                f"stream_batch {config.stream_batch} is larger than the data: {inputs.train.name} has "
                f"{inputs.items} images; lower stream_batch"
            )
        if config.source == "memory" and config.batch_size > (slots := slots_for(config, inputs)):
            raise UserError(
                f"batch_size {config.batch_size} is larger than the memory that batches are drawn from: it has {slots} "
                f"slots, one for each image of {inputs.train.name}; lower batch_size"
            )
        self.config, self.fabric = config, fabric
        device = self.device = fabric.device
        self.stream, self.steps = inputs.stream(config, device), inputs.steps(config)
        image_shape, (mean, std) = inputs.train.shape, inputs.stats
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format

        torch.manual_seed(config.seed)  # weights, and what a backbone draws itself (dropout)
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.augment = Augment(config.augment, mean=mean, std=std, image_size=image_shape[-1]).to(device)
        self.clean = Augment("none", mean=mean, std=std, image_size=image_shape[-1]).to(device)
        encoder = build_encoder(config, image_shape)
        self.memory = build_memory(config, inputs, encoder.feature_dim, device)
        encode = self.encode if config.memory_encoded else _look_at
        self.upkeep = None if self.memory is None else Upkeep(config, self.memory, encode)
        # Where the newcomers' embeddings come from the training pass, or from no encoder, and nothing is encoded anew,
        # the memory's update waits for nothing else: it runs beside the backward pass, on a stream of its own.
        at_hand = config.newcomers_from_training or not config.memory_encoded
        early = self.memory is not None and at_hand and not config.refreshed_slots and config.memory_images != "host"
        self._side = Beside(device) if early and device.type == "cuda" else None
        self.queue = build_queue(config, inputs, device)
        self.method = build_method(config, encoder, self._negatives())
        self.method.to(device).to(memory_format=self.layout)
        self.schedule = Schedule(
            peak=config.lr, steps=self.steps, warmup=config.warmup, end=config.lr_end, device=device
        )
        self.optimizer = build_optimizer(
            config.optimizer,
            self.method.parameter_groups(config.weight_decay, decay_norm_and_bias=config.decay_norm_and_bias),
            lr=self.schedule.lr,
            momentum=config.momentum,
        )
        self.images_encoded = 0
        self.compiled = compiled = worth_compiling(self.steps, device) if config.compile is None else config.compile
        how: dict[str, Any] = {"dynamic": False}  # batches come in two or three sizes
        if compiled:
            limits = torch._dynamo.config  # recompile_limit, by the name that torch 2.6 knows too
            limits.cache_size_limit = max(limits.cache_size_limit, COMPILED_FORMS)
        if compiled and device.type == "cuda":
            self.augment.compile_operations()
            how["options"] = COMPILER_OPTIONS
            # advice for float32, which the recipes do not train in, and the replacement must have exact
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        for part in self.method.modules():
            if isinstance(part, Encoder):
                # every pass ends there; the backbone may be compiled, which a count on the host would disturb
                part.projection.register_forward_hook(self._count_images)
                if compiled:
                    part.take_views_at_once()
                    if folded.available(device):
                        folded.fold(part.backbone)
                    part.backbone.compile(**how)
        with quietly():
            self._forward, self._optimizer = fabric.setup(self.method, self.optimizer)

        self.images = torch.zeros(config.stream_items, *image_shape, dtype=torch.uint8, device=device)
        self.ids = torch.zeros(config.stream_items, dtype=torch.int64, device=device)
        # of the last batch trained on: the stream's, or drawn from the memory
        self.anchor_ids = torch.zeros(config.batch_size, dtype=torch.int64, device=device)
        self.done = 0  # finished steps, as the host counts them
        self._count = torch.zeros(1, dtype=torch.int64, device=device)  # the same on the device
        self._loss_sum = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
        self._loss_steps = 0
        self._bad_step = torch.full((1,), -1, dtype=torch.int64, device=device)  # first step with a non-finite loss
        record, on_host = config.graph and device.type == "cuda", config.memory_images == "host"
        self.graph = Graph(self.compute, device, self.generator) if record and not on_host else None
        self._why_eager = "the memory's images are on the host (memory_images host)" if record and on_host else None
        self._encoded_per_step = 0

    @property
    def why_eager(self) -> str | None:
        return self._why_eager if self.graph is None else self.graph.why_not

    def __call__(self) -> None:
        self.stream.next(out=(self.images, self.ids))
        if self.graph is None:
            self.compute()
        else:
            before = self.images_encoded
            self.graph()
            # each step encodes as many, but what counts them runs twice where recording fails and never in a replay
            self._encoded_per_step = self._encoded_per_step or self.images_encoded - before
            self.images_encoded = before + self._encoded_per_step
        self._loss_steps += 1
        self.done += 1
        if self.upkeep is not None:
            self.upkeep.after_step(self.done)

    def compute(self) -> None:
        """The step proper, from the batch that the stream has put into `images` and `ids`."""
        images, ids = self._sample()
        self.anchor_ids.copy_(ids)
        with torch.no_grad():
            views = self.augment.views(images, 2, self.generator)
            first, second = (view.contiguous(memory_format=self.layout) for view in views)
        self._optimizer.zero_grad(set_to_none=True)
        output: StepOutput = self._forward(first, second, ids)
        if self._side is not None:
            with self._side.begin():
                self._update_memory(output)
        self.fabric.backward(output.loss)
        if self.config.clip is not None:
            # error_if_nonfinite would read the norm on the host
            self.fabric.clip_gradients(
                self._forward, self._optimizer, max_norm=self.config.clip, error_if_nonfinite=False
            )
        self.schedule.set(self._count)
        self._optimizer.step()
        self.method.after_step(self._count[0] / self.steps)
        self._record(output.loss.detach())  # on a CPU before the memory, which refuses what a diverged encoder gives
        if self._side is None:
            self._update_memory(output)
        else:
            self._side.join()
        if self.queue is not None:
            self.queue.update(output.embeddings, id=ids)

    def _update_memory(self, output: StepOutput) -> None:
        if self.upkeep is not None:
            self.upkeep.update(self.images, self.ids, output)

    def _sample(self) -> tuple[Tensor, Tensor]:
        """Images uint8 (b, c, h, w) and ids int64 (b,) to train on: the stream's, or drawn from the memory."""
        if self.upkeep is not None and self.config.source == "memory":
            return self.upkeep.draw(self.config.batch_size)
        return self.images, self.ids

    def _negatives(self) -> NegativeSource | None:
        """Where the method's negatives come from, if not from the batch."""
        if self.queue is not None or self.memory is None or not self.config.negatives_from_memory:
            return self.queue
        # the memory may change before the backward pass
        return self.memory if self._side is None else Snapshot(self.memory)

    def encode(self, images: Tensor) -> Encoded:
        """Unit embeddings (b, d) and features (b, f), float32, of uint8 images (b, c, h, w) for the memory."""
        return self._encode(images, augmented=self.config.memory_augmented)

    @torch.no_grad()
    def _encode(self, images: Tensor, *, augmented: bool) -> Encoded:
        view = self.augment(images, self.generator) if augmented else self.clean(images)
        with self.fabric.autocast():
            found = self.method.embed_with_features(view.contiguous(memory_format=self.layout))
        return Encoded(*(part.float() for part in found))

    @torch.no_grad()
    def _record(self, loss: Tensor) -> None:
        self._loss_sum += loss
        bad = ~torch.isfinite(loss) & (self._bad_step < 0)
        self._bad_step.copy_(torch.where(bad, self._count, self._bad_step))
        self._count += 1

    def _count_images(self, module: object, args: tuple[Tensor, ...], output: object) -> None:
        self.images_encoded += len(args[0])

    def fill_memory(self) -> None:
        """Fill the memory from the stream, and the queue from the memory."""
        for _ in self.filling():
            pass

    def filling(self) -> Iterator[str]:
        """The same, saying after each batch how far it is."""
        if self.upkeep is None:
            return
        for count in self.upkeep.filling(self.stream):
            yield f"filling the memory: {count:,} of {self.upkeep.memory.size:,}"
        while self.queue is not None and not self.queue.full:
            before = len(self.queue)
            images, ids = self.upkeep.draw(min(self.queue.size - before, self.config.batch_size))
            self.queue.update(self._encode(images, augmented=True).projections, id=ids)
            if len(self.queue) == before:
                self.queue.check()
            yield f"filling the queue: {len(self.queue):,} of {self.queue.size:,} (--queue)"

    def read_loss(self) -> tuple[float, int | None]:
        """Mean loss since the last call, and the first step (from 0) whose loss was not finite, or None. Waits."""
        mean = float(self._loss_sum) / self._loss_steps if self._loss_steps else math.nan
        bad = self.bad_step()
        self._loss_sum.zero_()
        self._loss_steps = 0
        return mean, bad

    def bad_step(self) -> int | None:
        """The first step (from 0) whose loss was not finite, or None. Waits for the device."""
        bad = int(self._bad_step)
        return None if bad < 0 else bad

    def is_finite(self) -> bool:
        """Whether no loss, parameter or buffer has become NaN or infinite. Waits for the device."""
        tensors = [t for t in self.method.state_dict().values() if t.is_floating_point()]
        whole = torch.stack([torch.isfinite(t).all() for t in tensors]).all()
        return bool(whole) and self.bad_step() is None

    def lr_at(self, step: int) -> float:
        return float(self.schedule.table[min(step, self.steps - 1)])

    # What is saved: all that the next step depends on ----------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "step": self.done,
            "images_encoded": self.images_encoded,
            "method": self.method.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **({"memory": None} if self.upkeep is None else self.upkeep.state_dict()),
            "queue": None if self.queue is None else self.queue.state_dict(),
            "stream": self.stream.state_dict(),
            "generator": self.generator.get_state(),
            "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if cuda else None},
            "loss": {"sum": self._loss_sum.clone(), "steps": self._loss_steps},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.method.load_state_dict(state["method"])
        groups = self.optimizer.param_groups
        # a copy of the rate would be out of the schedule's reach; what can be captured is a matter of the device
        own: list[dict[str, Any]] = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, kept in zip(self.optimizer.param_groups, own, strict=True):
            group.update(kept)
        if self.upkeep is not None:
            self.upkeep.load_state_dict(state)
        if self.queue is not None:
            self.queue.load_state_dict(state["queue"])
        self.stream.load_state_dict(state["stream"])
        self.generator.set_state(state["generator"].cpu())
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self.device.type == "cuda" and state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self.device)
        self.done, self.images_encoded = int(state["step"]), int(state["images_encoded"])
        self._count.fill_(self.done)
        self._loss_sum.copy_(state["loss"]["sum"])
        self._loss_steps = int(state["loss"]["steps"])
        self._bad_step.fill_(-1)


def _look_at(images: Tensor) -> Encoded:
    """Thumbnails (b, d) of uint8 images (b, c, h, w), for a memory that no encoder is asked for."""
    small = thumbnails(images)
    return Encoded(small, small)


def build_encoder(config: TrainConfig, image_shape: tuple[int, int, int]) -> Encoder:
    return encoder(
        config.backbone,
        stem=config.stem,
        projection=config.projection,
        dim=config.dim,
        hidden=config.hidden,
        norm=config.projection_norm,
        image_size=image_shape[-1],
        in_chans=image_shape[0],
        pretrained=config.pretrained,
    )


def build_method(config: TrainConfig, encoder: Encoder, negatives: NegativeSource | None) -> Method:
    """The method with the settings given."""
    name, given = config.base_method, config.method_settings
    unknown = [setting for setting in given if setting not in settings_of(name)]
    if unknown:
        setting = {"momentum": "key_momentum"}.get(unknown[0], unknown[0])
        raise UserError(f"{setting} was given, but {name} has no such setting; leave it out")
    return build(name, encoder, memory=negatives, **given)
