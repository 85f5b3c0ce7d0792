"""What a memory looks like while it is trained with, and what to do when it goes wrong.

Read when a line is logged, never in a step. Class measures need labels and are for measuring only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .evaluation import memory as measures
from .evaluation.geometry import class_cosines
from .memory import WorkingMemory
from .policies import AdaptiveDuel, Duel, MinRed

#: Above so many slots N is shown only where the policy carries it: counting it would take longer than a step.
COUNTED_UP_TO = 16384
#: An unchanged memory is worth a warning after so many steps.
UNCHANGED = 500
#: The median item may have been encoded so many times longer ago than a queue of the same size would keep it.
STALE = 10.0
#: The memory may hold this much more of its largest class than the stream brings.
CONCENTRATED = 0.1

ALWAYS = (
    "memory_turnover",
    "memory_age",
    "memory_age_max",
    "memory_staleness",
    "memory_duplicates",
    "memory_duplicates_max",
)
LABELLED = ("memory_largest", "memory_entropy", "memory_collisions", "memory_intra", "memory_inter")


class Instruments:
    """Looks at one memory from time to time.

    labels: int64 (items,), the class of every id, or None. stream_largest: share of the most frequent class in the
    stream, where it is known. per_update: newcomers offered in one update.
    """

    def __init__(
        self,
        memory: WorkingMemory,
        *,
        labels: Tensor | None,
        classes: int,
        stream_largest: float | None,
        per_update: int,
    ) -> None:
        self.memory, self.classes, self.stream_largest = memory, classes, stream_largest
        self.labels = labels.to(memory.embeddings.device) if labels is not None and classes > 1 else None
        self.queue_age = memory.size / per_update  # updates that an item stays in a queue of this size
        self._warned: set[str] = set()

    @property
    def columns(self) -> list[str]:
        counted = self._counts_duplicates()
        always = [name for name in ALWAYS if counted or "duplicates" not in name]
        doubts = ["memory_in_doubt"] if isinstance(self.memory.policy, MinRed) else []
        return [*(LABELLED if self.labels is not None else ()), *always, *doubts]

    def _counts_duplicates(self) -> bool:
        return isinstance(self.memory.policy, Duel) or self.memory.size <= COUNTED_UP_TO

    @torch.no_grad()
    def read(self, batch_ids: Tensor, updates: int) -> dict[str, float]:
        """All measures. batch_ids (b,): the last anchors; updates: those since the last look. Waits for the device."""
        memory = self.memory
        age, staleness = memory.age, memory.staleness
        found: dict[str, Tensor] = {}
        if self.labels is not None:
            held = measures.measure(memory["id"], self.labels, self.classes, batch_ids=batch_ids)
            found["memory_largest"], found["memory_entropy"] = held["largest_share"], held["class_entropy"]
            found["memory_collisions"] = held["collision_rate"]
            intra, inter = class_cosines(memory.embeddings, self.labels[memory["id"]])
            found["memory_intra"], found["memory_inter"] = torch.as_tensor(intra), torch.as_tensor(inter)
        found["memory_turnover"] = (age < updates).double().mean()
        found["memory_age"], found["memory_age_max"] = age.median(), age.max()
        found["memory_staleness"] = staleness.median()
        if self._counts_duplicates():
            duplicates = memory.expected_duplicates()
            found["memory_duplicates"], found["memory_duplicates_max"] = duplicates.mean(), duplicates.max()
        if isinstance(memory.policy, MinRed):
            found["memory_in_doubt"] = memory.policy.in_doubt
        device = age.device
        values = torch.stack([value.to(device, torch.float64) for value in found.values()]).tolist()
        self._youngest = float(age.min())
        return dict(zip(found, values, strict=True))

    def _advice(self) -> str:
        """Against a memory that concentrates."""
        policy = self.memory.policy
        if not isinstance(policy, Duel) or isinstance(policy, AdaptiveDuel):
            return "try --policy duel with --score exponential:0.05"
        name = policy.score.name
        than = "a sharper --score than " if name.startswith("exponential") else "--score "
        return f"try {than}exponential:0.05 (it is {name}), or a larger --refresh"

    def warnings(self, found: dict[str, float]) -> list[str]:
        """What the user should know and can act on; each kind is said once."""
        said: dict[str, str] = {}
        if self._youngest >= UNCHANGED:
            said["unchanged"] = (
                f"the memory has not changed for {self._youngest:.0f} steps: every newcomer is turned away. "
                "Raise --refresh, use a sharper --score, or --admit always"
            )
        if found["memory_staleness"] > STALE * max(1.0, self.queue_age):
            said["stale"] = (
                f"half of the memory was encoded more than {found['memory_staleness']:.0f} steps ago, by another "
                "network than the present one: raise --refresh or set --max-age"
            )
        largest = found.get("memory_largest")
        if largest is not None and self.stream_largest is not None and largest > self.stream_largest + CONCENTRATED:
            said["concentrated"] = (
                f"the memory holds more of its largest class ({largest:.0%}) than the stream brings "
                f"({self.stream_largest:.0%}): {self._advice()}"
            )
        if isinstance(self.memory.policy, Duel) and found["memory_duplicates_max"] == 0:
            adaptive = isinstance(self.memory.policy, AdaptiveDuel)
            said["distinct"] = (
                "no item of the memory resembles another by the score, so that newcomers only replace each other in "
                f"the first slot: {'raise --adaptive-target' if adaptive else 'use a broader --score'}"
            )
        new = [message for kind, message in said.items() if kind not in self._warned]
        self._warned.update(said)
        return new
