"""The memory's side of a training step: filling it, drawing from it, re-encoding it, offering it the stream's items.

Residents and newcomers are always encoded alike, or a newcomer would look distinct merely by the view it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import policies
from .config import TrainConfig
from .config_checks import without_labels
from .data.live import LiveStream
from .data.stream import Stream
from .errors import UserError
from .inputs import Inputs
from .memory import WorkingMemory
from .methods import StepOutput
from .methods.base import Encoded
from .pixels import length as thumbnail_length

#: Payload that keeps the backbone features, so that they can be centred anew without being encoded again.
FEATURE = "feature"


class Upkeep:
    """Keeps one memory as the config says. Between two calls of `recentre` nothing here waits for the device, unless
    the images are on the host.

    encode: uint8 images (b, c, h, w) -> unit embeddings (b, d) and backbone features (b, f), float32, in the view that
    the config names; or what stands for both where the memory is not encoded.
    """

    def __init__(self, config: TrainConfig, memory: WorkingMemory, encode: Callable[[Tensor], Encoded]) -> None:
        self.config, self.memory, self.encode = config, memory, encode
        self.centre: Tensor | None = None
        if memory.policy_dim is not None:
            self.centre = torch.zeros(memory.policy_dim, device=memory.device)
        # a full turn: every slot refreshed once, or, without refresh, as many newcomers as there are slots
        self.refreshed = min(config.refreshed_slots, memory.size)  # slots, per step
        self.recentre_every = -(-memory.size // (self.refreshed or config.stream_items))

    def filling(self, stream: Stream | LiveStream) -> Iterator[int]:
        """Fill every slot with a real item before the first step: random vectors would never look like duplicates.

        Yields how many there are, batch by batch; where it was left off, a next call goes on.
        """
        memory = self.memory
        while not memory.full:
            images, ids = stream.next()
            room, before = memory.size - len(memory), len(memory)
            images, ids = images[:room], ids[:room]
            encoded = self.encode(images)
            if self.centre is not None and len(ids) == room:
                self.recentre(encoded.features)  # before the memory is full and the policy counts
            self._offer(encoded, images, ids)
            if len(memory) == before:
                memory.check()  # a GPU turns bad rows away, and there may be no others
            yield len(memory)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Images uint8 (count, c, h, w) and ids int64 (count,) of different slots."""
        slots = self.memory.sample(count)
        return self.memory.fetch("image", slots), self.memory.fetch("id", slots)

    def update(self, images: Tensor, ids: Tensor, trained: StepOutput) -> None:
        """Re-encode some residents and offer the stream's items; after the optimizer's step (Algorithm 2), if anything
        is encoded here.

        trained: what the training pass gave, for where these very items were its batch.
        """
        count, reuse = self.refreshed, self.config.newcomers_from_training
        newcomers = Encoded(trained.embeddings, trained.features.float())
        if count:
            slots = self.memory.stalest(count)
            held = self.memory.fetch("image", slots)
            # one pass over residents and newcomers: BatchNorm's running statistics mix nothing
            encoded = self.encode(held if reuse else torch.cat([held, images]))
            fresh = Encoded(*(part[:count] for part in encoded))
            self.memory.refresh(slots, fresh.projections, **self._vectors(fresh))
            if not reuse:
                newcomers = Encoded(*(part[count:] for part in encoded))
        elif not reuse:
            newcomers = self.encode(images)
        self._offer(newcomers, images, ids)

    def after_step(self, done: int) -> None:
        """What the host decides, so no part of a recorded step. done: steps finished so far."""
        self.memory.learn()
        if self.centre is not None and done % self.recentre_every == 0:
            self.recentre()

    @torch.no_grad()
    def recentre(self, arriving: Tensor | None = None) -> None:
        """Move the centre to the mean feature of what is held (and of what is about to be), and compare by it."""
        if self.centre is None:
            return
        held = self.memory[FEATURE]
        self.centre.copy_((held if arriving is None else torch.cat([held, arriving])).mean(0))
        self.memory.compare_by(self._direction(held))

    def _offer(self, encoded: Encoded, images: Tensor, ids: Tensor) -> None:
        payload: dict[str, Any] = {"image": images} if self.config.memory_holds_images else {}
        self.memory.update(encoded.projections, id=ids, **payload, **self._vectors(encoded))

    def _vectors(self, encoded: Encoded) -> dict[str, Any]:
        """What is kept besides the embedding where the policy compares backbone features."""
        if self.centre is None:
            return {}
        return {"policy_embeddings": self._direction(encoded.features), FEATURE: encoded.features}

    def _direction(self, features: Tensor) -> Tensor:
        """Unit vectors from the centre to features (n, f); the first axis for a feature that is the centre."""
        assert self.centre is not None
        away = features - self.centre
        length = torch.linalg.vector_norm(away, dim=1, keepdim=True)
        axis = torch.zeros_like(away)
        axis[:, 0].fill_(1.0)
        return torch.where(length == 0, axis, away / length)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory.state_dict(), "centre": self.centre}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory.load_state_dict(state["memory"])
        if self.centre is not None:
            self.centre.copy_(state["centre"])


class Snapshot:
    """A memory's negatives as they were when asked for: what the backward pass needs stays when the memory changes."""

    def __init__(self, memory: WorkingMemory) -> None:
        self.memory = memory

    def negatives(self, *, exclude_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        embeddings, blocked = self.memory.negatives(exclude_ids=exclude_ids)
        return embeddings.clone(), blocked


def build_memory(config: TrainConfig, inputs: Inputs, feature_dim: int, device: torch.device) -> WorkingMemory | None:
    """The memory that the config asks for. Labels go no further than to the oracle."""
    if not config.has_memory:
        return None
    payload: dict[str, Any] = {"id": ((), torch.int64)}
    if config.memory_holds_images:
        payload["image"] = (inputs.train.shape, torch.uint8)
    policy_dim = None
    if config.compares_features:
        policy_dim = feature_dim
        payload[FEATURE] = ((feature_dim,), torch.float32)
    memory = WorkingMemory(
        slots_for(config, inputs),
        config.dim if config.memory_encoded else thumbnail_length(inputs.train.shape[0]),
        build_policy(config, inputs),
        payload,
        policy_dim=policy_dim,
        host=("image",) if config.memory_images == "host" else (),
        seed=config.seed,
    )
    return memory.to(device)


def slots_for(config: TrainConfig, inputs: Inputs) -> int:
    """Slots of the memory: one that is trained on has no more than there are images, unless their frames differ."""
    few = config.source == "memory" and config.dwell == 1
    return min(config.memory_size, inputs.items) if few else config.memory_size


def build_queue(config: TrainConfig, inputs: Inputs, device: torch.device) -> WorkingMemory | None:
    """MoCo's own queue of keys, where the config asks for one beside the memory; no longer than there are images."""
    if not config.queue:
        return None
    size = min(config.queue, inputs.items)
    return WorkingMemory(size, config.dim, policies.Fifo(), {"id": ((), torch.int64)}).to(device)


def build_policy(config: TrainConfig, inputs: Inputs) -> policies.Policy:
    name, max_age = config.memory_policy, config.max_age
    if name not in policies.POLICIES:
        return policies.get(name)  # says which there are
    given: dict[str, Any] = {"max_age": max_age}
    if name == "duel":
        given |= {"score": config.score, "admit": config.admit, "at_once": config.at_once}
    elif name == "adaptive":
        given |= {"admit": config.admit}
        if config.adaptive_target is not None:
            given["target"] = config.adaptive_target
    elif name in ("random", "reservoir", "distinct", "dedup"):
        given |= {"seed": config.seed}
        if config.alike is not None:
            given["alike"] = config.alike
    elif name == "oracle":
        if inputs.train.labels is None:
            raise UserError(f"policy oracle sees the labels, but {without_labels(config)}; take another policy")
        given |= {"labels": inputs.train.labels, "classes": len(inputs.train.classes)}
    return policies.POLICIES[name](**given)
