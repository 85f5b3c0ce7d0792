"""What a memory looks like while it is trained with, and what to do when it goes wrong.

Read when a line is logged, never in a step. Class measures need labels and are for measuring only. docs/decisions.md
has what the limits below would have said in the runs on file.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import scores
from .evaluation import memory as measures
from .evaluation.geometry import class_cosines
from .memory import WorkingMemory
from .policies import AdaptiveDuel, Dedup, Duel, MinRed, Oracle
from .policies.simple import Ageless

#: Above so many slots N is shown only where the policy carries it: counting it over all pairs takes a fifth of a second
#: on a CPU with so many.
COUNTED_UP_TO = 8192
#: Steps after which an unchanged memory is worth a warning, and before which its classes are not judged, unless the run
#: ends.
PATIENCE = 500
#: The same in turns: how often a queue of the same size would have been exchanged. Also the limit of staleness.
TURNS = 10.0
#: The largest class may take this share of what the stream leaves to all others.
CONCENTRATED = 1 / 3
#: and be so many standard deviations above the stream's: a small memory may be that uneven by chance.
CHANCE = 2.5
#: A policy should even out a class that has so much more of the stream than an even share
UNEVEN = 0.2
#: and has to go so far on the way there.
EVENED = 0.1
#: Embeddings are all alike if the mean item has this share of the memory as duplicates,
ALIKE = 0.5
#: provided that the score of two at right angles is no more than this.
RIGHT_ANGLE = 0.1
#: Less than this share of the slots with an item of their own is worth a warning.
COPIES = 0.25
#: A score knows items that are held more than once if the mean item has this share of such slots as duplicates.
BLIND = 0.5
#: A target that did well where such a score did not.
FEW = 8
#: Mean N below which a score says little of most items.
HARDLY = 0.25
#: The score that evened out the classes of CIFAR-10.
SHARP = scores.exponential(0.05)

ALWAYS = (
    "memory_distinct",
    "memory_turnover",
    "memory_age",
    "memory_age_p10",
    "memory_age_p90",
    "memory_age_max",
    "memory_staleness",
    "memory_duplicates",
    "memory_duplicates_max",
)
LABELLED = ("memory_largest", "memory_entropy", "memory_collisions", "memory_intra", "memory_inter")


class Instruments:
    """Looks at one memory from time to time.

    labels: int64 (items,), the class of every id, or None. stream_largest: share of the most frequent class in the
    stream, where it is known. per_update: newcomers offered in one update, and so in one step. dwell: how many of them
    in a row are the same item. encoded: by an encoder that is being trained; thumbnails never go stale. score: by
    which N is counted where the policy has none of its own. items: how many the stream has, if it has an end.
    negatives: the whole memory is among them although batches are drawn from it.
    """

    def __init__(
        self,
        memory: WorkingMemory,
        *,
        labels: Tensor | None,
        classes: int,
        stream_largest: float | None,
        per_update: int,
        dwell: int = 1,
        encoded: bool = True,
        score: str | None = None,
        items: float = math.inf,
        negatives: bool = False,
    ) -> None:
        self.encoded, self.score, self.items, self.negatives = encoded, score, items, negatives
        self.memory, self.classes, self.stream_largest = memory, classes, stream_largest
        self.labels = labels.to(memory.embeddings.device) if labels is not None and classes > 1 else None
        self.per_update, self.dwell = per_update, dwell
        self.queue_age = memory.size / per_update  # updates that an item stays in a queue of this size
        self.turns = TURNS * max(1.0, self.queue_age)
        self.patience = max(self.turns, PATIENCE)
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
        found["memory_distinct"] = measures.distinct(memory["id"])
        found["memory_turnover"] = (age < updates).double().mean()
        found["memory_age"], found["memory_age_max"] = age.median(), age.max()
        tenths = torch.tensor([0.1, 0.9], dtype=torch.float64, device=age.device)
        found["memory_age_p10"], found["memory_age_p90"] = age.double().quantile(tenths).unbind()
        found["memory_staleness"] = staleness.median()
        if self._counts_duplicates():
            duplicates = memory.expected_duplicates(None if hasattr(memory.policy, "score") else self.score)
            found["memory_duplicates"], found["memory_duplicates_max"] = duplicates.mean(), duplicates.max()
        if isinstance(memory.policy, MinRed):
            found["memory_in_doubt"] = memory.policy.in_doubt
        values = torch.stack([found[name].to(age.device, torch.float64) for name in self.columns]).tolist()
        return dict(zip(self.columns, values, strict=True))

    def warnings(self, found: dict[str, float], done: int, *, last: bool = False) -> list[str]:
        """What the user should know and can act on, by what was `found` after `done` steps; each kind is said once.

        last: no more steps will follow, so that what a longer run might still mend is judged now. Whether embeddings
        are alike is not: after a few steps they may be, and more steps would be the remedy.
        """
        distinct = self._distinct(found)
        judged = done >= self.patience
        # enough for a policy to have done its work, and different items enough for it to choose from
        exchanged = (judged or (last and done >= self.turns)) and self._brought(done) >= self.memory.size
        said = {
            "distinct": distinct,
            "unchanged": "" if distinct else self._unchanged(found),
            "stale": self._stale(found),
            "concentrated": self._concentrated(found, done, exchanged),
            "alike": self._alike(found) if judged else "",
            "copies": self._copies(found, done) if judged or last else "",
        }
        new = {kind: message for kind, message in said.items() if message and kind not in self._warned}
        self._warned.update(new)
        return list(new.values())

    def _distinct(self, found: dict[str, float]) -> str:
        policy = self.memory.policy
        if not isinstance(policy, Duel) or found["memory_duplicates_max"] > 0:
            return ""
        return (
            "no item of the memory resembles another by the score, so that newcomers only replace each other in the "
            f"first slot: {'raise --adaptive-target' if isinstance(policy, AdaptiveDuel) else 'use a broader --score'}"
        )

    def _sharper(self) -> str:
        """What to do for a sharper score; nothing where the policy has none."""
        policy = self.memory.policy
        if not isinstance(policy, Duel):
            return ""
        return "lower --adaptive-target" if isinstance(policy, AdaptiveDuel) else "use a sharper --score"

    def _unchanged(self, found: dict[str, float]) -> str:
        if found["memory_age_p10"] < self.patience or self._ageless:
            return ""  # a sample of different items comes to rest, the more slowly it changes the longer it is
        sharper, refresh = self._sharper(), "raise --refresh, " * self.encoded
        advice = f"{refresh}{sharper} or set --max-age" if sharper else "set --max-age"
        return (
            f"nine tenths of the memory have not changed for {found['memory_age_p10']:.0f} steps: newcomers are turned "
            f"away or replace each other. If the stream does bring anything new, {advice}"
        )

    def _stale(self, found: dict[str, float]) -> str:
        if found["memory_staleness"] <= self.turns or not self.encoded:
            return ""
        return (
            f"half of the memory was encoded more than {found['memory_staleness']:.0f} steps ago, by another "
            f"network than the present one: raise --refresh{' or set --max-age' * (not self._ageless)}"
        )

    @property
    def _ageless(self) -> bool:
        return isinstance(self.memory.policy, Ageless | Oracle)

    def _concentrated(self, found: dict[str, float], done: int, judged: bool) -> str:
        largest, stream = found.get("memory_largest"), self.stream_largest
        if largest is None or stream is None or self._brought(done) < self.memory.size:
            return ""
        excess = stream - 1 / self.classes
        judged = judged and excess >= UNEVEN
        chance = CHANCE * math.sqrt(stream * (1 - stream) / self.memory.size)
        if largest > stream + max(CONCENTRATED * (1 - stream), chance):
            what = f"the memory holds more of its largest class ({largest:.0%}) than the stream brings ({stream:.0%})"
        elif judged and isinstance(self.memory.policy, Duel | MinRed) and largest > stream - EVENED * excess:
            what = f"the memory is as uneven ({largest:.0%} of one class) as the stream ({stream:.0%})"
        else:
            return ""
        return f"{what}: {self._against_concentration(found)}"

    def _against_concentration(self, found: dict[str, float]) -> str:
        policy, n = self.memory.policy, found.get("memory_duplicates", 0.0)
        score = policy.score if isinstance(policy, Duel) and not isinstance(policy, AdaptiveDuel) else None
        if self.items <= self.memory.size and isinstance(policy, Duel | MinRed | Dedup):
            sharp = score is not None and _height(score, 0.5) <= _height(SHARP, 0.5)
            broader = "a higher --adaptive-target" if isinstance(policy, AdaptiveDuel) else "a broader --score" * sharp
            more = f", or {broader}, by which it holds rare ones more than once" * bool(broader)
            return (
                f"it has a slot for each of the stream's {self.items} items; give it fewer (--memory-size), so that it "
                f"has to choose{more}"
            )
        if score is None:
            return f"try --policy duel with --score {SHARP.name}"
        if _height(score, 0.5) > _height(SHARP, 0.5):
            return f"try --score {SHARP.name} (it is {score.name})"
        if not self.encoded:
            return "by their thumbnails its images may be no duplicates of each other; try another --space"
        if n < BLIND * (1 - found["memory_distinct"]):
            return (
                f"its --score ({score.name}) does not tell that some items are held more than once (mean N {n:.2g}); "
                f"try a broader one, or --policy adaptive --adaptive-target {FEW}"
            )
        if n < HARDLY:
            return (
                f"by its --score ({score.name}) hardly any item has a duplicate (mean N {n:.2g}); try a larger "
                "--memory-size or a broader --score"
            )
        space = "--space backbone, " if self.memory.policy_dim is None else ""
        without = ", or do without --memory-negatives" * self.negatives
        return f"its --score ({score.name}) is sharp enough; try {space}a larger --memory-size or --refresh{without}"

    def _brought(self, done: int) -> float:
        """Different items that the stream can have brought."""
        return (self.memory.size + done * self.per_update) / self.dwell

    def _copies(self, found: dict[str, float], done: int) -> str:
        distinct, size, brought = found["memory_distinct"], self.memory.size, self._brought(done)
        if not isinstance(self.memory.policy, Duel | MinRed) or distinct * size >= COPIES * min(size, brought):
            return ""
        sharper, learning = self._sharper(), ", or look whether the encoder learns at all" * self.encoded
        comma = (", " if self.encoded else " or ") * bool(sharper)
        return (
            f"the memory's {size} slots hold only {distinct * size:.0f} different items, some of them often: those "
            "that look unlike all others come again and again. Give it fewer slots (--memory-size)"
            f"{comma}{sharper}{learning}"
        )

    def _alike(self, found: dict[str, float]) -> str:
        policy = self.memory.policy
        if not isinstance(policy, Duel) or isinstance(policy, AdaptiveDuel):
            return ""
        if found["memory_duplicates"] <= ALIKE * self.memory.size or _height(policy.score, 0.0) > RIGHT_ANGLE:
            return ""
        by = f"(mean N {found['memory_duplicates']:.0f} of {self.memory.size} by --score {policy.score.name})"
        if not self.encoded:
            return f"the images' thumbnails are nearly all alike {by}: use a sharper --score, or another --space"
        return (
            f"the embeddings are nearly all alike {by}, which no policy can mend: try a lower --lr or a longer "
            "--warmup (SimCLR: and no --memory-negatives)"
        )


def _height(score: scores.Score, cosine: float) -> float:
    return float(score(torch.tensor([cosine])))
