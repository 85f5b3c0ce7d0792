"""Expected duplicates in whole units, so that sums are exact.

N(j) = Σ_{i≠j} h(z_i · z_j) decides who leaves, and differences in the last bit decide ties. Each h is therefore rounded
to a multiple of 2^-e with K · 2^e < 2^51: all sums of them are then exact in float64, in whatever order. A carried N
never drifts by summation, items with the same cosines tie exactly, and engines that see the same cosines agree bit for
bit. (Products of another shape may round otherwise: of items that are exactly alike engines may choose different ones,
and under `compete` turn away the newcomer that is like them.) e is 30, so that an h is a 32-bit whole number (less only
above two million slots); float32 itself knows a cosine near 1 to 2^-24. Below, "units" are h · 2^e.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from duel.checks import is_narrow
from duel.scores import Score
from duel.slots import highest

#: Elements of h that exist at a time when N is computed from scratch.
CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 28}

#: Above so many slots the linear score is summed by its shortcut: where it takes less time.
SHORTCUT = {"cpu": 256, "cuda": 4096}

#: Up to so many slots on the CPU the h of all pairs of residents are computed together, and used twice where N is
#: counted just before newcomers come.
PAIRS = 256


def exponent(size: int) -> int:
    """e of this module's docstring, for a memory of `size` slots."""
    return min(30, 51 - size.bit_length())


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any input is; float32 otherwise (narrower inputs are widened, which is exact)."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def widened(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows in the dtype that is computed in. Narrow rows are a per mille off unit length and are brought back to it, as
    far as that dtype can tell: in their own they stay as they are."""
    wide = rows.to(dtype)
    off = is_narrow(rows.dtype) and rows.dtype != dtype
    return torch.nn.functional.normalize(wide, dim=-1) if off else wide


def exact_products(device: torch.device) -> AbstractContextManager[object]:
    """IEEE products, without gradients, whatever the caller has set: no autocast, no TF32."""
    if device.type == "cuda":
        return _exact_on_cuda()
    # to switch off what is not on takes as long as a small product
    on = torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)
    return _exact(device.type) if on else nullcontext()


@contextmanager
def _exact(kind: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


@contextmanager
def _exact_on_cuda() -> Iterator[None]:
    with _exact("cuda"):
        matmul = torch.backends.cuda.matmul
        # newer releases have another switch, beside which the older one may not be read
        name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
        before = getattr(matmul, name)
        setattr(matmul, name, exact)
        try:
            yield
        finally:
            setattr(matmul, name, before)


def in_units(n: Tensor, e: int) -> Tensor:
    """N (K,), as it is given and kept, in units: float64."""
    if n.device.type == "cpu":  # NumPy's calls take less time than torch's
        return torch.from_numpy(np.rint(n.detach().double().numpy() * 2.0**e))
    return (n.double() * 2.0**e).round_()


def units(score: Score, rows: Tensor, columns: Tensor, e: int) -> Tensor:
    """h(rows · columns) in units: (n, d), (m, d) -> (n, m), in the dtype of the inputs."""
    return to_units(score, rows @ columns.T, e)


def to_units(score: Score, cosines: Tensor, e: int) -> Tensor:
    """cosines (overwritten) -> whole numbers h · 2^e."""
    return score._evaluate_(cosines.clamp_(-1.0, 1.0), 2.0**e).round_()


def pair_units(score: Score, memory: Tensor, e: int) -> Tensor:
    """h of all pairs of residents in units, 0 for each with itself: (K, d) -> (K, K)."""
    return units(score, memory, memory, e).fill_diagonal_(0.0)


def total_units(score: Score, memory: Tensor, e: int) -> Tensor:
    """N(j) of every slot, in units: (K, d) -> float64 (K,). The diagonal is zeroed before summing."""
    size = memory.shape[0]
    if has_shortcut(score, memory):
        return _total_linear(memory, e)
    chunk = CHUNK_ELEMENTS["cuda" if memory.is_cuda else "cpu"]
    rows = max(512, chunk // size)
    columns = max(rows, chunk // rows)  # so that the first block of a row of blocks covers the diagonal
    total = torch.zeros(size, dtype=torch.float64, device=memory.device)
    for top in range(0, size, rows):
        below = min(top + rows, size)
        for left in range(top, size, columns):
            right = min(left + columns, size)
            h = units(score, memory[top:below], memory[left:right], e)
            if left == top:
                h.diagonal().zero_()
            total[top:below] += h.sum(1, dtype=torch.float64)
            # the matrix is symmetric: a pair right of the diagonal block counts for both
            start = max(left, below)
            if start < right:
                total[start:right] += h[:, start - left :].sum(0, dtype=torch.float64)
    return total


def has_shortcut(score: Score, memory: Tensor) -> bool:
    return score.kind == "linear" and memory.shape[0] > SHORTCUT["cuda" if memory.is_cuda else "cpu"]


def _total_linear(memory: Tensor, e: int) -> Tensor:
    """For the linear score N(j) is affine in z_j · Σ z_i: no K × K products."""
    z = memory.double()
    others = z @ z.sum(0) - z.square().sum(1)
    return others.add_(memory.shape[0] - 1).mul_(0.5 * 2.0**e).round_()


def exchange_units(total: Tensor, memory: Tensor, slots: Tensor, old: Tensor, score: Score, e: int) -> Tensor:
    """N in units after the *distinct* `slots` of `memory` (K, d), which held `old` (n, d), got what they hold now."""
    step = max(1, CHUNK_ELEMENTS["cuda" if memory.is_cuda else "cpu"] // memory.shape[0])
    result, fresh = total.clone(), []
    for first in range(0, slots.shape[0], step):
        part = slots[first : first + step]
        new = memory[part]
        gained = units(score, memory, new, e)  # (K, n): what each slot sees of the new items
        result += gained.sum(1, dtype=torch.float64)
        result -= units(score, memory, old[first : first + step], e).sum(1, dtype=torch.float64)
        anew = gained.T.scatter(1, part[:, None], 0.0)  # a changed slot is summed anew, without itself
        fresh.append(anew.sum(1, dtype=torch.float64))
    return result.index_copy(0, slots, torch.cat(fresh)) if fresh else result


def likeliest(total: Tensor, bound: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` slots that may have to leave in a batch, as `slots.highest` gives them.

    A quarter are those with the highest N now (total), the others those whose N can become highest (bound). The bound
    alone, which knows of gains and not of losses, may miss the top of a memory that a broad score has evened out.
    """
    _, now = highest(total, max(1, count // 4))
    return highest(torch.where(now > 0, torch.inf, bound), count)
