"""WorkingMemory: what is held. Which item leaves is the policy's business (`duel.policies`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from duel import policies
from duel.checks import PayloadSpec, acceptable_rows, check_payload, check_rows, check_tensor, is_narrow
from duel.compiling import eagerly
from duel.errors import UserError, check_seed
from duel.hashing import uniform
from duel.replacement import expected_duplicates
from duel.replacement.units import widened
from duel.slots import turns
from duel.storage import Evicted, Storage

__all__ = ["Evicted", "WorkingMemory"]

#: Sets the draws of `sample` apart from those of a policy with the same seed.
SAMPLING = 0x5A3D


class WorkingMemory(Storage):
    """K slots, each an embedding on the unit sphere plus whatever else is to be kept; a policy decides who leaves.

    Args:
        size: K, the number of slots.
        dim: d, of the embeddings.
        policy: a name ("duel", "fifo", "reservoir", "random", "distinct", "dedup", "minred", "adaptive")
            or a `duel.policies.Policy`.
        payload: what each slot keeps besides its embedding, as {name: (shape, dtype)}; for instance
            {"image": ((3, 32, 32), torch.uint8), "id": ((), torch.int64)}.
        policy_dim: a second vector per slot, of this dimension, for the policy to compare instead of the embedding.
        host: name or names of payload to keep in host memory when the memory is moved to a GPU, so that its size is
            limited by the host's. Results are the same; writing and reading it waits for the device and cannot be
            captured.
        normalize: bring given embeddings to unit length instead of refusing others.
        dtype: of the stored embeddings.
        seed: of `sample`. Memories of one size and seed draw the same slots: give each of several a seed of its own.

    All state is in `state_dict`. On the CPU bad rows are an error at once. On a GPU looking would mean waiting for the
    device, so there bad rows are turned away (slot -1) and counted, and the error comes when the count is next read:
    in `check` or `state_dict`. Once full, `update`, `refresh` and `sample` can be captured in a CUDA graph. Changes are
    not compiled with a caller that is, and only one thread at a time may make them.

    How many slots are filled is known on the host alone. So a memory is no part of a model whose buffers others
    overwrite: DistributedDataParallel unless it has broadcast_buffers=False (each process has a memory of its own), or
    averages of weights.
    """

    arriving: dict[str, Tensor]
    """The payload of the newcomers, rows as in `incoming`, while a policy's `choose` runs; empty otherwise."""

    def __init__(
        self,
        size: int,
        dim: int,
        policy: Any = "duel",
        payload: PayloadSpec | None = None,
        *,
        policy_dim: int | None = None,
        host: str | Iterable[str] = (),
        normalize: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__(size, dim, payload, policy_dim=policy_dim, dtype=dtype, host=host)
        self.normalize, self.seed = normalize, check_seed(seed)
        self.arriving = {}
        self.policy = policies.get(policy)
        self.policy.attach(self)

    # ---------------------------------------------------------------- what is there

    def __len__(self) -> int:
        return self._filled

    def __bool__(self) -> bool:
        return True  # an empty memory is still a memory

    @property
    def full(self) -> bool:
        return self._filled == self.size

    @property
    def embeddings(self) -> Tensor:
        """(filled, d): never an empty slot."""
        return self._embeddings[: self._filled]

    @property
    def compared(self) -> Tensor:
        """The vectors the policy compares: the second ones if there are any, the embeddings otherwise."""
        return (self._embeddings if self._compared is None else self._compared)[: self._filled]

    @property
    def age(self) -> Tensor:
        """int64 (filled,): updates since the item was admitted."""
        return (self._clock - self._admitted_at)[: self._filled]

    @property
    def staleness(self) -> Tensor:
        """int64 (filled,): updates since the item was last encoded."""
        return (self._clock - self._encoded_at)[: self._filled]

    def stalest(self, n: int) -> Tensor:
        """int64 (min(n, filled),): the slots encoded longest ago, the stalest first, ties to the lowest slot."""
        return torch.sort(self.staleness, descending=True, stable=True).indices[: max(0, n)]

    def expected_duplicates(self, score: Any = None) -> Tensor:
        """float64 (filled,): N(j), by the policy's score (linear where it has none) unless another is named.

        AdaptiveDuel fits its width when the memory becomes full; before, its score is the sharpest that it has.
        """
        own = getattr(self.policy, "score", None)
        if score is None and self.full and isinstance(self.policy, policies.Duel):
            return self.policy.carried(self).clone()
        if not self._filled:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        return expected_duplicates(self.compared, score if score is not None else own or "linear")

    def negatives(self, exclude_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """((n, d) embeddings, bool (B, n) | None): True where slot n holds the item `exclude_ids[b]` itself.

        The embeddings are the memory's own and change with it: clone what must outlive the next update, as a loss
        that is differentiated only after it.
        """
        if exclude_ids is None:
            return self.embeddings, None
        check_tensor(exclude_ids, "exclude_ids", "int64 (B,)")
        if exclude_ids.dim() != 1:
            raise UserError(f"exclude_ids must have shape (B,), an id for each anchor, got {tuple(exclude_ids.shape)}")
        return self.embeddings, exclude_ids[:, None] == self["id"][None, :]

    def sample(self, n: int) -> Tensor:
        """int64 (n,): slots drawn without replacement, in random order."""
        if not 0 <= n <= self._filled:
            raise UserError(f"cannot draw {n} different slots from {self._filled} filled ones")
        counters = self._draws * self.size + torch.arange(self._filled, device=self._draws.device)
        self._draws += 1
        return uniform(self.seed + SAMPLING, counters).topk(n).indices

    # ---------------------------------------------------------------- what changes

    @eagerly
    @torch.no_grad()
    def update(
        self, embeddings: Tensor, *, policy_embeddings: Tensor | None = None, evicted: bool = False, **payload: Tensor
    ) -> Any:
        """Offer newcomers (B, d), in order. Returns their slots, int64 (B,), -1 where one was turned away.

        With evicted=True returns (slots, Evicted): what was in memory before and left, copied before that. A newcomer
        that gave way to a later one of the same batch, which has the same slot, is not among them.
        """
        newcomers, compared, accepted = self._examine(embeddings, policy_embeddings)
        check_payload(payload, self.payload, newcomers.shape[0], self.device, anywhere=self.host)
        self.policy.ready(self)
        self._clock.add_(1)
        count, before = newcomers.shape[0], self._filled
        filling = min(count, self.size - before)
        if filling or not count:
            slots = torch.arange(before, before + filling, device=newcomers.device)
        if filling:
            if accepted is not None:  # one host read per batch, only while filling
                keep = accepted.nonzero()[:, 0]
                if keep.numel() < count:
                    return self._fill_with(keep, newcomers, compared, payload, count, evicted)
            self._write(slots, newcomers[:filling], compared[:filling], {k: v[:filling] for k, v in payload.items()})
            self._filled += filling
            if self.full:
                self.policy.filled(self)
        gone = self._empty_evicted(count) if evicted else None
        if filling < count:
            if filling:
                newcomers, compared = newcomers[filling:], compared[filling:]
                accepted = None if accepted is None else accepted[filling:]
                payload = {k: v[filling:] for k, v in payload.items()}
            # making room for age overwrites embeddings before the rest is chosen: keep what must be handed out
            residents = self._embeddings.clone() if gone and self.policy.max_age is not None else self._embeddings
            self.arriving.update(payload)  # a Module takes its time over an attribute that is set
            try:
                chosen = self._choose(compared, accepted)
            finally:
                self.arriving.clear()
            if gone is not None:
                self._note_evicted(gone, residents, chosen, filling, before)
            self._write(chosen, newcomers, compared, payload)
            slots = torch.cat([slots, chosen]) if filling else chosen
        return (slots, gone) if evicted else slots

    @eagerly
    @torch.no_grad()
    def refresh(
        self, slots: Tensor, embeddings: Tensor, *, policy_embeddings: Tensor | None = None, **payload: Tensor
    ) -> None:
        """Give distinct slots (n,) new embeddings (n, d) of the items they hold, and new payload where it is given."""
        check_tensor(slots, "slots", "int64 (n,)")
        check_tensor(embeddings, "embeddings", f"(n, {self.dim})")
        if slots.dim() != 1 or slots.dtype != torch.int64 or slots.shape[0] != embeddings.shape[0]:
            raise UserError(f"slots must be int64 ({embeddings.shape[0]},), got {slots.dtype} {tuple(slots.shape)}")
        self._check_slots(slots)
        if slots.device.type == "cpu" and bool((slots.bincount(minlength=1) > 1).any()):
            raise UserError(
                "slots must differ from each other, got some twice. (Slots that update() returned may: a later "
                "newcomer can take an earlier one's slot. What update() placed is fresh already)"
            )
        known = payload.keys() <= self.payload.keys()
        wanted = {name: spec for name, spec in self.payload.items() if name in payload or not known}
        check_payload(payload, wanted, slots.shape[0], self.device, anywhere=self.host)
        fresh, compared, accepted = self._examine(embeddings, policy_embeddings)
        old = self.compared[slots]
        target = self._embeddings if self._compared is None else self._compared
        if accepted is not None:
            fresh = torch.where(accepted[:, None], fresh, self._embeddings[slots])
            compared = torch.where(accepted[:, None], compared, old)
        self._embeddings.index_copy_(0, slots, fresh)
        if target is not self._embeddings:
            target.index_copy_(0, slots, compared)
        for name, values in payload.items():
            self._put(self._stored(name), slots, values, accepted)
        self._put(self._encoded_at, slots, self._clock.expand(slots.shape), accepted)
        self.policy.refreshed(self, slots, old)

    @eagerly
    @torch.no_grad()
    def compare_by(self, vectors: Tensor) -> None:
        """Give the policy other vectors (filled, policy_dim) of the same items to compare, as when its space changes.

        What is held, its age and its staleness stay as they are.
        """
        if self._compared is None:
            raise UserError("compare_by is for a memory with a second vector per slot: build it with policy_dim")
        vectors = self._normalised(vectors)
        check_rows(vectors, "vectors", self._compared.shape[1], self.device)
        if vectors.shape[0] != self._filled:
            raise UserError(f"vectors must have a row for each of the {self._filled} filled slots, got {len(vectors)}")
        old = self.compared.clone()
        self.compared.copy_(widened(vectors.detach(), self._compared.dtype))
        self.policy.refreshed(self, torch.arange(self._filled, device=self.device), old)

    def learn(self) -> None:
        """Let the policy learn (the paper's UpdatePolicy); once per training step."""
        self.policy.learn(self)

    def reset(self) -> None:
        """Forget everything."""
        for buffer in (self._clock, self._rejected, self._admitted_at, self._encoded_at, self._draws):
            buffer.zero_()
        self._filled = 0
        self.policy.restart()

    # ---------------------------------------------------------------- how

    def _choose(self, incoming: Tensor, accepted: Tensor | None) -> Tensor:
        """The policy's slots, after the items past their age have gone and without the rows that were refused."""
        if accepted is not None:
            incoming = torch.where(accepted[:, None], incoming, 0.0)
        forced = None
        if self.policy.max_age is not None:
            forced = self._make_room(incoming)
            incoming = torch.where((forced >= 0)[:, None], 0.0, incoming)
        slots = self._checked_slots(self.policy.choose(self, incoming), incoming.shape[0])
        if accepted is not None:
            slots = torch.where(accepted, slots, -1)
        return slots if forced is None else torch.where(forced >= 0, forced, slots)

    def _checked_slots(self, slots: Tensor, count: int) -> Tensor:
        """What a policy answered, if it is an answer."""
        policy = type(self.policy)
        if not isinstance(slots, Tensor):
            raise UserError(f"{policy.__name__}.choose must return int64 ({count},), got a {type(slots).__name__}")
        if slots.shape != (count,) or slots.dtype != torch.int64:
            given = f"{slots.dtype} {tuple(slots.shape)}"
            raise UserError(f"{policy.__name__}.choose must return int64 ({count},), got {given}")
        ours = policy.__module__.startswith(policies.__name__)  # tested: no time is spent on looking again
        if not ours and count and slots.device.type == "cpu":
            named = slots.tolist()  # Python's own min and max take less time than a tensor's
            if min(named) < -1 or max(named) >= self.size:
                raise UserError(f"{policy.__name__}.choose must return slots below {self.size}, or -1; got {named}")
        return slots

    def _make_room(self, incoming: Tensor) -> Tensor:
        """int64 (B,): the overdue slot that a newcomer takes, oldest first, or -1; they are exchanged at once."""
        limit = self.policy.max_age or 0
        count = min(incoming.shape[0], self.size)
        oldest = self.policy.oldest_first(self)[:count]
        present = policies.takes_part(incoming[:count])
        distinct = oldest[turns(present)]  # the i-th newcomer that takes part gets the i-th oldest slot
        overdue = present & (self.age[distinct] > limit)
        forced = torch.full((incoming.shape[0],), -1, dtype=torch.int64, device=incoming.device)
        if overdue.device.type == "cpu" and not bool(overdue.any()):
            return forced
        stored = self._embeddings if self._compared is None else self._compared
        old = stored[distinct]
        stored.index_copy_(0, distinct, torch.where(overdue[:, None], incoming[:count].to(stored.dtype), old))
        self._admitted_at.index_copy_(0, distinct, torch.where(overdue, self._clock, self._admitted_at[distinct]))
        self.policy.refreshed(self, distinct, old)
        forced[:count] = torch.where(overdue, distinct, -1)
        return forced

    def _fill_with(
        self, keep: Tensor, embeddings: Tensor, compared: Tensor, payload: dict[str, Tensor], count: int, evicted: bool
    ) -> Any:
        """While filling on a GPU: only the acceptable rows, so that no slot is left empty."""
        self._clock -= 1  # the call below counts this update
        rest = {name: values[keep.to(values.device)] for name, values in payload.items()}
        second = compared[keep] if self._compared is not None else None
        slots = torch.full((count,), -1, dtype=torch.int64, device=embeddings.device)
        taken, gone = self.update(embeddings[keep], policy_embeddings=second, evicted=True, **rest)
        slots[keep] = taken
        if not evicted:
            return slots
        spread = self._empty_evicted(count)
        spread.valid[keep] = gone.valid
        spread.embeddings[keep] = gone.embeddings
        for name, values in gone.payload.items():
            spread.payload[name][keep.to(values.device)] = values
        return slots, spread

    # ---------------------------------------------------------------- what is refused

    def _examine(self, embeddings: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(embeddings, vectors the policy compares, rows acceptable) in storage dtype; the last only off the CPU."""
        if (second is None) != (self._compared is None):
            wanted = "needs" if second is None else "keeps no second vector, so does not take"
            raise UserError(f"this memory (policy_dim={self.policy_dim}) {wanted} policy_embeddings")
        rows = [self._normalised(embeddings)] + ([] if second is None else [self._normalised(second)])
        names = (("embeddings", self.dim), ("policy_embeddings", self.policy_dim or 0))
        accepted: Tensor | None = None
        for vectors, (name, dim) in zip(rows, names, strict=False):
            check_rows(vectors, name, dim, self.device)
        if second is not None and second.shape[0] != embeddings.shape[0]:
            raise UserError(f"policy_embeddings has {second.shape[0]} rows, embeddings {embeddings.shape[0]}")
        if self.device.type != "cpu":
            for vectors in rows:
                good = acceptable_rows(vectors)
                accepted = good if accepted is None else accepted & good
        if accepted is not None:
            self._rejected += (~accepted).sum()
        stored = [widened(v.detach(), self._embeddings.dtype) for v in rows]
        return stored[0], stored[-1], accepted

    def _normalised(self, vectors: Tensor) -> Tensor:
        able = self.normalize and isinstance(vectors, Tensor) and vectors.is_floating_point()
        return torch.nn.functional.normalize(vectors, dim=-1) if able else vectors

    def check(self) -> None:
        """Raise if rows were turned away on the device since the last reset (reads the device)."""
        rejected = int(self._rejected)
        if rejected:
            self._rejected.zero_()
            raise UserError(
                f"{rejected} embeddings were not finite or not of unit length and were turned away; "
                "look for a diverged encoder, or pass normalize=True"
            )

    # ---------------------------------------------------------------- state

    def get_extra_state(self) -> dict[str, int]:
        self.check()
        return {"filled": self._filled, "size": self.size, "dim": self.dim, "seed": self.seed}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._filled, self.seed = state["filled"], state["seed"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Refuses a state of another memory before anything is changed, also where the memory is part of a model."""
        given = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        for name in ("_embeddings", "_compared"):
            mine, rows = self._buffers[name], given.get(name)
            if mine is not None and rows is not None and is_narrow(rows.dtype) and not is_narrow(mine.dtype):
                state_dict[prefix + name] = widened(rows, mine.dtype)
        vectors, extra = given.get("_embeddings" if self._compared is None else "_compared"), "policy._extra_state"
        recast = vectors is not None and vectors.dtype != self.compared.dtype
        state = self.policy.state_of(given.get(extra), recast=recast) if given else None
        if state is not None:
            state_dict[prefix + extra] = given[extra] = state
        if given or not prefix:  # nothing at all: a model that had no memory yet, which strict=False allows
            self._check_state(given)
        if state is not None:
            self.policy.check_state(state)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: rows for name in ("_embeddings", "_compared") if (rows := self._buffers[name]) is not None}
        super()._apply(fn, recurse)
        for name, rows in before.items():
            now = self._buffers[name]
            if now is not None and is_narrow(rows.dtype) and not is_narrow(now.dtype):
                now.copy_(widened(now.to(rows.dtype), now.dtype))
            if now is not None and now.dtype != rows.dtype:
                self.policy.recast()
        return self

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, filled={self._filled}, payload={sorted(self.payload)}"
