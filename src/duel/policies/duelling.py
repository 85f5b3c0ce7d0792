"""The paper's policy, and one that adapts its score."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from duel import scores
from duel.errors import UserError, suggest
from duel.names import WIDE_SCORES
from duel.policies.base import Counting, all_take_part, takes_part
from duel.replacement import Counted, check_engine, check_names, counted, exchange, replace_unchecked
from duel.replacement.units import compute_dtype, exact_products, exponent, widened
from duel.slots import turns

if TYPE_CHECKING:
    from duel.memory import WorkingMemory


class Duel(Counting):
    """The most duplicated item leaves (the paper's naive MCP), newcomers one by one, exactly.

    Args:
        score: h, from cosine to probability of being a duplicate; a name, `"gaussian:0.1"`, a Score or a callable.
        admit: "always" (Algorithm 2) or "compete" (Algorithm 1: the newcomer may itself be the one to go).
        at_once: evict the B most duplicated slots in one go (Appendix A.1). Cheaper, and not the same result: the
            duplicates that newcomers bring among themselves all enter.
        engine: see `duel.replace`.
        max_age: see `Policy`.
    """

    duplicates: Tensor

    def __init__(
        self,
        score: Any = "linear",
        *,
        admit: str = "always",
        at_once: bool = False,
        engine: str = "auto",
        max_age: int | None = None,
    ) -> None:
        super().__init__(max_age=max_age)
        check_names(admit, engine)
        if at_once and admit == "compete":
            raise UserError("at_once evicts as many as arrive, so nothing competes: use admit='always' with it")
        self._score = scores.get(score)
        self.admit, self.at_once, self.engine = admit, at_once, engine

    _known: Counted | None = None
    """What N was counted from, until the memory changes."""
    _known_of = 0
    """The version of the memory's vectors then: others may write to them, too."""

    @property
    def score(self) -> scores.Score:
        return self._score

    def extra_repr(self) -> str:
        age = "" if self.max_age is None else f", max_age={self.max_age}"
        return f"{self._width_repr()}, admit={self.admit!r}{', at_once=True' * self.at_once}{age}"

    def _width_repr(self) -> str:
        return f"score={self.score.name!r}"

    def attach(self, memory: WorkingMemory) -> None:
        super().attach(memory)
        # N of every slot, carried from batch to batch; meaningful once the memory is full
        self.register_buffer("duplicates", torch.zeros(memory.size, dtype=torch.float64))

    def get_extra_state(self) -> dict[str, Any]:
        state = {"counted": self._counted, "score": self._score.name, "exponent": exponent(len(self.duplicates))}
        return state | ({} if self._score.function is None else {"curve": self._score.curve()})

    def state_of(self, saved: Any, *, recast: bool) -> Any:
        return {**saved, "counted": False} if recast and isinstance(saved, dict) else saved

    def check_state(self, state: Any) -> None:
        if not isinstance(state, dict) or not {"counted", "score"} <= state.keys():
            raise UserError("state_dict holds no state of a Duel policy")
        if state["score"] != self._score.name:
            raise UserError(f"state_dict was saved with score {state['score']!r}, this policy has {self._score.name!r}")
        if self._score.function is not None and state.get("curve", mine := self._score.curve()) != mine:
            raise UserError(f"state_dict was saved with another score that was called {self._score.name!r}, too")

    def set_extra_state(self, state: dict[str, Any]) -> None:
        # N in other units, of an older version, is counted anew
        self._counted = state["counted"] and state.get("exponent") == exponent(len(self.duplicates))
        self._known = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._known = None
        return super()._apply(fn, recurse)

    def restart(self) -> None:
        super().restart()
        self._known = None

    def recast(self) -> None:
        super().recast()
        self._known = None

    def ready(self, memory: WorkingMemory) -> None:
        if self.engine == "fused":
            check_engine(self.engine, memory.compared, self.score)

    def filled(self, memory: WorkingMemory) -> None:
        self.carried(memory)

    def carried(self, memory: WorkingMemory) -> Tensor:
        """N of every slot of a full memory; computed the first time it is asked for, kept up to date afterwards."""
        if not self._counted:
            self._count(memory)
        return self.duplicates

    def _count(self, memory: WorkingMemory) -> None:
        duplicates, self._known = counted(memory.compared, self.score)
        self._known_of = _version(memory.compared)
        self.duplicates.copy_(duplicates)
        self._counted = True

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        carried = self.carried(memory)
        if self.at_once:
            return self._choose_at_once(memory, incoming, ~takes_part(incoming))
        skip = None if all_take_part(incoming) else ~takes_part(incoming)
        compared, known = memory.compared, self._known
        if known is not None:
            self._known = None  # the memory is about to change
            known = known if self._known_of == _version(compared) else None
        done = replace_unchecked(compared, incoming, self.score, self.admit, carried, self.engine, skip, known)
        self.duplicates.copy_(done.duplicates)
        return done.slots

    def _choose_at_once(self, memory: WorkingMemory, incoming: Tensor, skip: Tensor) -> Tensor:
        """The slots with the largest N, in that order, ties to the lowest slot. More than K newcomers go in rounds."""
        compared, chosen = memory.compared, []
        for first in range(0, incoming.shape[0], memory.size):
            block, left_out = incoming[first : first + memory.size], skip[first : first + memory.size]
            ranked = torch.sort(self.duplicates, descending=True, stable=True).indices
            slots = ranked[turns(~left_out)]
            old = compared[slots]
            compared = compared.index_copy(0, slots, torch.where(left_out[:, None], old, block.to(compared.dtype)))
            self._exchange(compared, slots, old)
            chosen.append(torch.where(left_out, -1, slots))
        return torch.cat(chosen)

    def refreshed(self, memory: WorkingMemory, slots: Tensor, old: Tensor) -> None:
        if not self._counted:
            return
        if 2 * slots.shape[0] >= memory.size:  # three products of this many columns cost more than counting anew
            self._count(memory)
        else:
            self._exchange(memory.compared, slots, old)

    def _exchange(self, compared: Tensor, slots: Tensor, old: Tensor) -> None:
        self._known = None
        self.duplicates.copy_(exchange(self.duplicates, compared, slots, old, self.score))


def _version(rows: Tensor) -> int:
    """Counts what has been written to them."""
    return 0 if rows.is_inference() else rows._version


class AdaptiveDuel(Duel):
    """Duel with a score whose width follows the spread of the embeddings.

    One width does not fit a whole training: too wide and all items look alike, too sharp and none does. When the memory
    becomes full, and at every `every`-th call of `memory.learn()`, one a training step, the width moves to the rung of
    a fixed ladder (factors of √2) at which the mean item has about `target` expected duplicates: so many items, or,
    below 1, that share of the memory. It is found on the device, and N is then recomputed in chunks; nothing is read on
    the host. docs/decisions.md has the measurement behind the defaults.
    """

    rung: Tensor
    ladder: Tensor

    #: τ of the ladder's rungs, sharpest first.
    WIDTHS = tuple(2.0 ** (-12 + i / 2) for i in range(29))

    def __init__(
        self,
        kind: str = "exponential",
        *,
        target: float = 0.1,
        every: int = 50,
        admit: str = "always",
        engine: str = "auto",
        max_age: int | None = None,
    ) -> None:
        if kind not in WIDE_SCORES:
            raise UserError(suggest("kind of adaptive score", kind, WIDE_SCORES))
        if isinstance(target, str) or not 0 < target < math.inf:
            raise UserError(f"target must be a number of items, or below 1 a share of the memory, got {target!r}")
        if every < 1:
            raise UserError(f"every must be at least 1 step, got {every}")
        super().__init__(scores.exponential(), admit=admit, engine=engine, max_age=max_age)
        self.kind, self.target, self.every = kind, float(target), every
        rungs = [scores.shape_parameters(kind, tau) for tau in self.WIDTHS]
        self.register_buffer("ladder", torch.tensor(rungs, dtype=torch.float64), persistent=False)
        self.register_buffer("rung", torch.zeros((), dtype=torch.int64))
        self._waited = 0
        self._score = scores.Score(f"adaptive {kind}", kind)

    @property
    def score(self) -> scores.Score:
        width, floor, scale = self.ladder.index_select(0, self.rung.reshape(1))[0].unbind()
        return scores.Score(self._score.name, self.kind, width=width, floor=floor, scale=scale)

    @property
    def tau(self) -> float:
        """The current width (reads the device)."""
        return float(self.WIDTHS[int(self.rung)])

    def _width_repr(self) -> str:
        return f"kind={self.kind!r}, target={self.target:g}"

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "waited": self._waited, "target": self.target}

    def check_state(self, state: Any) -> None:
        super().check_state(state)
        if "waited" not in state:
            raise UserError("state_dict holds no state of an AdaptiveDuel policy")
        if (target := state.get("target", self.target)) != self.target:  # which older ones do not have
            raise UserError(f"state_dict was saved with target {target:g}, this policy has {self.target:g}")

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self._waited = state["waited"]

    def restart(self) -> None:
        super().restart()
        self._waited = 0

    def carried(self, memory: WorkingMemory) -> Tensor:
        if not self._counted:
            self.rung.copy_(self._fitting_rung(memory))
        return super().carried(memory)

    def learn(self, memory: WorkingMemory) -> None:
        self._waited += 1
        if self._waited < self.every or not memory.full:
            return
        self._waited = 0
        self.rung.copy_(self._fitting_rung(memory))
        self._count(memory)

    def _share(self, size: int) -> float:
        """The target as a share of the other items; of a memory that is hardly larger than it, half."""
        return self.target if self.target < 1 else min(0.5, self.target / max(1, size - 1))

    def _fitting_rung(self, memory: WorkingMemory) -> Tensor:
        """The rung at which the mean N is nearest to the target, judged on 512 slots against all."""
        compared = widened(memory.compared, compute_dtype(memory.compared))
        sample = compared[:: max(1, memory.size // 512)][:512]
        with exact_products(compared.device):
            cosines = (sample @ compared.T).clamp_(-1.0, 1.0)
        means = []
        for width, floor, scale in (row.unbind() for row in self.ladder):
            h = scores.Score("", self.kind, width=width, floor=floor, scale=scale)(cosines)
            # minus the items' duplicates of themselves, which are exactly 1 each up to rounding
            means.append((h.sum(dtype=torch.float64) / sample.shape[0] - 1.0) / max(1, memory.size - 1))
        distance = (torch.stack(means).clamp(min=1e-12).log() - math.log(self._share(memory.size))).abs()
        return distance.argmin()
