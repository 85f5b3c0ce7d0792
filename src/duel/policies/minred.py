"""Minimum redundancy: the item whose nearest neighbour is closest leaves (max instead of the paper's sum).

Exact, newcomer by newcomer, without comparing all pairs in every update. Carried from update to update is, for every
slot, a cosine that is at least that of its nearest neighbour: newcomers and refreshed items raise it, and when a
neighbour leaves it stays as it was. So who may have to leave are the slots with the highest of these bounds. Their
nearest neighbours are looked up, the batch is simulated on them, and if all others' bounds are below what was evicted,
no other can have been the one. Inside the simulation it is the same once more: the item with the highest bound leaves
if its nearest neighbour is that close, and has its bound lowered otherwise.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from duel.errors import UserError
from duel.policies.base import Counting, takes_part
from duel.replacement.units import CHUNK_ELEMENTS, compute_dtype, exact_products, widened
from duel.slots import highest, put

if TYPE_CHECKING:
    from duel.memory import WorkingMemory

NONE = -2.0  # less than any cosine: an item is not its own neighbour
BLOCK = 512  # newcomers at a time
ROWS = 1024  # residents at a time, when the nearest of all is looked up
WHOLE = {"cpu": 256, "cuda": 2048}  # up to so many slots all are simulated
CANDIDATES = {"cpu": 256, "cuda": 1024}  # above, so many, and at least so many times as many as newcomers:
PER_NEWCOMER = 4


class MinRed(Counting):
    """Evicts, for each newcomer in turn, the item with the closest nearest neighbour; ties to the lowest slot.

    Attributes:
        in_doubt: how often, since the memory was emptied, an item that was not simulated could not be ruled out. Only
            on a GPU, where it is not known in time; on a CPU more of them are simulated then.
    """

    in_doubt: Tensor
    nearest: Tensor

    def __init__(self, *, max_age: int | None = None) -> None:
        super().__init__(max_age=max_age)

    def attach(self, memory: WorkingMemory) -> None:
        super().attach(memory)
        self.register_buffer("in_doubt", torch.zeros((), dtype=torch.int64, device=memory.device))
        # the bounds, meaningful once the memory is full; saved below, since an older version had none
        bounds = torch.zeros(memory.size, dtype=torch.float64, device=memory.device)
        self.register_buffer("nearest", bounds, persistent=False)

    def get_extra_state(self) -> dict[str, Tensor | None]:
        return {"nearest": self.nearest.clone() if self._counted else None}

    def state_of(self, saved: Any, *, recast: bool) -> Any:
        return {"nearest": None} if recast or saved is None else saved

    def check_state(self, state: Any) -> None:
        given = state.get("nearest", ()) if isinstance(state, dict) else ()
        if given is not None and getattr(given, "shape", None) != self.nearest.shape:
            raise UserError("state_dict holds no state of a MinRed policy")

    def set_extra_state(self, state: dict[str, Tensor | None]) -> None:
        given = state["nearest"]
        self._counted = given is not None
        if given is not None:
            self.nearest.copy_(given)

    def _count(self, memory: WorkingMemory) -> None:
        z = _rows(memory)
        slots = torch.arange(memory.size, device=z.device)
        with exact_products(z.device):
            found = [_look(z[part], z, own=part)[0] for part in slots.split(ROWS)]
        self.nearest.copy_(torch.cat(found))
        self._counted = True

    def refreshed(self, memory: WorkingMemory, slots: Tensor, old: Tensor) -> None:
        if not self._counted or not slots.shape[0]:
            return
        if 2 * slots.shape[0] >= memory.size:
            self._count(memory)
            return
        z = _rows(memory)
        with exact_products(z.device):
            theirs, others = _look(z[slots], z, own=slots)
        self.nearest.copy_(torch.maximum(self.nearest, others).index_copy(0, slots, theirs.double()))

    def choose(self, memory: WorkingMemory, incoming: Tensor) -> Tensor:
        self.filled(memory)
        z = _rows(memory, incoming)
        x = widened(incoming, z.dtype)
        skip, chosen = ~takes_part(x), []
        with exact_products(z.device):
            for first in range(0, x.shape[0], BLOCK):
                block = x[first : first + BLOCK]
                chosen.append(self._place(z, block, skip[first : first + BLOCK]))
                if first + BLOCK < x.shape[0]:
                    z = put(z, chosen[-1], block)
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=z.device)

    def _place(self, z: Tensor, x: Tensor, skip: Tensor) -> Tensor:
        """The slots of one block of newcomers; the bounds are brought up to date."""
        kind, size = _kind(z), z.shape[0]
        _, seen = _look(x, z, skip=skip)
        bound = torch.maximum(self.nearest, seen)
        count = size if size <= WHOLE[kind] else min(size, max(CANDIDATES[kind], PER_NEWCOMER * x.shape[0]))
        while True:
            residents, _ = highest(bound, count)
            done = _simulated(z, x, skip, residents)
            others = bound.index_fill(0, residents, NONE)
            slots = torch.where(skip, -1, residents[done.places])
            doubt = _doubtful(done.levels, slots, others) & ~skip
            bound = others.index_copy(0, residents, done.bounds)
            if z.device.type != "cpu":
                self.in_doubt += doubt.any()
                break
            if count == size or not bool(doubt.any()):
                break
            bound.index_copy_(0, residents, torch.maximum(done.before, seen[residents].double()))
            count = min(size, 2 * count)
        self.nearest.copy_(bound)
        return slots


def _doubtful(levels: Tensor, slots: Tensor, others: Tensor) -> Tensor:
    """bool (B,): where one of the others (K,), by its bound, might have been the one to leave; of equals the lowest."""
    top, at = others.amax(), others.argmax()
    return (levels < top) | ((levels == top) & (slots > at))


class _Done(NamedTuple):
    """What a simulation gives."""

    places: Tensor
    """int64 (B,): the place, among the residents that were simulated, that each newcomer took."""
    levels: Tensor
    """float64 (B,): the cosine of the evicted item's nearest neighbour."""
    bounds: Tensor
    """float64 (count,): at least the cosine of the nearest neighbour, of what is in each place after the batch."""
    before: Tensor
    """float64 (count,): of its nearest neighbour before the batch."""


def _simulated(z: Tensor, x: Tensor, skip: Tensor, residents: Tensor) -> _Done:
    """The batch on these residents: all others stay."""
    items = torch.cat([z[residents], x])
    inside = torch.zeros(z.shape[0], dtype=torch.bool, device=z.device).index_fill_(0, residents, True)
    stay, _ = _look(items, z, hidden=inside)
    pairs = items @ items.T
    pairs = torch.maximum(pairs, pairs.T).fill_diagonal_(NONE)  # alike both ways, for a product need not be
    count = residents.shape[0]
    before = torch.maximum(pairs[:count, :count].amax(1), stay[:count])
    turns = _by_triton if _has_triton(z) else _by_torch if z.device.type != "cpu" else _by_numpy
    places, levels, bounds = turns(pairs, stay, before, skip)
    return _Done(places, levels.double(), bounds.double(), before.double())


Turns = tuple[Tensor, Tensor, Tensor]


def _by_numpy(pairs: Tensor, stay: Tensor, before: Tensor, skip: Tensor) -> Turns:
    """On a CPU. pairs (n, n), residents before newcomers; stay (n,): the nearest of those that are not among them.

    `occupant` is the item in each place; a place's bound is its own cosine or, where its neighbour has left, a larger
    one.
    """
    cosines, outside, bounds = pairs.numpy(), stay.numpy(), before.numpy().copy()
    count, new = len(bounds), len(skip)
    occupant, left_out = np.arange(count), skip.numpy()
    places, levels = np.zeros(new, np.int64), np.zeros(new, bounds.dtype)
    for b in range(new):
        if left_out[b]:
            continue
        while True:
            place = int(bounds.argmax())
            item = occupant[place]
            level = max(cosines[item, occupant].max(), outside[item])
            if level >= bounds[place]:
                break
            bounds[place] = level
        row = cosines[count + b, occupant]
        row[place] = NONE
        np.maximum(bounds, row, out=bounds)
        bounds[place] = max(row.max(), outside[count + b])
        occupant[place] = count + b
        places[b], levels[b] = place, level
    return torch.from_numpy(places), torch.from_numpy(levels), torch.from_numpy(bounds)


def _by_torch(pairs: Tensor, stay: Tensor, before: Tensor, skip: Tensor) -> Turns:
    """The same where nothing may be read from the device and there is no Triton: every turn looks at all pairs."""
    count, new = len(before), len(skip)
    occupant, seen = torch.arange(count, device=pairs.device), pairs[:, :count].clone()  # by all items of all places
    places, levels = torch.zeros(new, dtype=torch.int64, device=pairs.device), before.new_zeros(new)
    for b in range(new):
        nearest = torch.maximum(seen.amax(1), stay)[occupant]
        place = nearest.argmax(keepdim=True)
        places[b : b + 1], levels[b : b + 1] = place, nearest[place]
        seen.index_copy_(1, place, torch.where(skip[b], seen[:, place], pairs[:, count + b, None]))
        occupant.index_copy_(0, place, torch.where(skip[b], occupant[place], count + b))
    return places, levels, torch.maximum(seen.amax(1), stay)[occupant]


def _by_triton(pairs: Tensor, stay: Tensor, before: Tensor, skip: Tensor) -> Turns:
    """One kernel."""
    from duel.policies import minred_kernel

    places, levels = torch.zeros_like(skip, dtype=torch.int64), before.new_zeros(len(skip))
    bounds = torch.empty_like(before)
    wide = 1 << max(5, (len(before) - 1).bit_length())
    minred_kernel.turns_kernel[(1,)](
        pairs, stay, before, skip, places, levels, bounds, len(before), len(skip), WIDE=wide,
        num_warps=max(1, min(16, wide // 128)),
    )  # fmt: skip
    return places, levels, bounds


def _has_triton(z: Tensor) -> bool:
    return z.is_cuda and importlib.util.find_spec("triton") is not None


def _look(
    rows: Tensor, z: Tensor, *, own: Tensor | None = None, skip: Tensor | None = None, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(n,): the highest cosine of each row with one of z (K, d); (K,): of each of z with a row. A chunk at a time.

    own (n,): which of z a row itself is. skip (n,), hidden (K,): which rows, and which of z, see nobody.
    """
    theirs, others = rows.new_full((rows.shape[0],), NONE), []
    step = max(1, CHUNK_ELEMENTS[_kind(z)] // max(1, rows.shape[0]))
    for first in range(0, z.shape[0], step):
        cosines = rows @ z[first : first + step].T
        if own is not None:
            here = torch.arange(first, first + cosines.shape[1], device=z.device)
            cosines.masked_fill_(own[:, None] == here, NONE)
        if skip is not None:
            cosines.masked_fill_(skip[:, None], NONE)
        if hidden is not None:
            cosines.masked_fill_(hidden[first : first + step], NONE)
        theirs = torch.maximum(theirs, cosines.amax(1))
        others.append(cosines.amax(0))
    return theirs, torch.cat(others)


def _rows(memory: WorkingMemory, *others: Tensor) -> Tensor:
    return widened(memory.compared, compute_dtype(memory.compared, *others))


def _kind(z: Tensor) -> str:
    return "cpu" if z.device.type == "cpu" else "cuda"
