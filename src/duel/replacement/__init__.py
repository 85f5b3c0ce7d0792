"""Exact batch replacement, a pure function of tensors: who leaves when newcomers arrive one by one."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from duel import scores
from duel.checks import acceptable_rows, check_rows, check_tensor
from duel.compiling import eagerly
from duel.errors import UserError, suggest
from duel.replacement.dense import replace_dense
from duel.replacement.reference import replace_reference
from duel.replacement.units import (
    PAIRS,
    compute_dtype,
    exact_products,
    exchange_units,
    exponent,
    in_units,
    pair_units,
    total_units,
    widened,
)

Engine = Literal["auto", "reference", "dense", "fused"]
Admit = Literal["always", "compete"]
ENGINES = ("auto", "reference", "dense", "fused")
ADMIT = ("always", "compete")


class Replacement(NamedTuple):
    """What `replace` decided."""

    slots: Tensor
    """int64 (B,): the slot each newcomer took, -1 = turned away. A later newcomer may take an earlier one's slot."""
    duplicates: Tensor
    """float64 (K,): N after the batch, to pass in next time."""


class Counted(NamedTuple):
    """What N of a small memory on the CPU was counted from, in units."""

    pairs: Tensor
    """(K, K): h of all pairs of residents, as `pair_units` gives them."""
    total: Tensor
    """float64 (K,): their sums."""


@eagerly
@torch.no_grad()
def replace(
    memory: Tensor,
    incoming: Tensor,
    *,
    score: Any = "linear",
    admit: Admit = "always",
    duplicates: Tensor | None = None,
    engine: Engine = "auto",
) -> Replacement:
    """Let every newcomer in turn replace the most duplicated item of the memory.

    Args:
        memory: (K, d), unit rows. Not changed.
        incoming: (B, d), unit rows. Their order is part of the definition. On a GPU rows that are not finite or not of
            unit length are turned away (slot -1); on the CPU they are an error.
        score: h, from cosine to probability of being a duplicate; see `duel.scores`.
        admit: "always" (Algorithm 2: every newcomer enters) or "compete" (Algorithm 1: it may itself be the one to go).
        duplicates: N of `memory` under `score`, as the last call returned it; computed when not given.
        engine: "reference" (the paper's loop), "dense" (PyTorch), "fused" (Triton), or "auto", the fastest that runs.
    """
    check_tensor(memory, "memory", "(K, d)")
    if memory.dim() != 2 or memory.shape[0] < 1:
        raise UserError(f"memory must have shape (K, d) with K >= 1, got {tuple(memory.shape)}")
    check_rows(incoming, "incoming", memory.shape[1], memory.device)
    check_rows(memory, "memory", memory.shape[1], memory.device)
    if duplicates is not None:
        check_tensor(duplicates, "duplicates", f"float64 ({memory.shape[0]},)")
        if duplicates.shape != memory.shape[:1] or duplicates.device != memory.device:
            raise UserError(
                f"duplicates must have shape ({memory.shape[0]},) on {memory.device}, "
                f"got {tuple(duplicates.shape)} on {duplicates.device}"
            )
    skip = None
    if incoming.device.type != "cpu":  # looking at values would wait for the device: bad rows are turned away there
        skip = ~acceptable_rows(incoming)
        incoming = torch.where(skip[:, None], 0.0, incoming)
    return replace_unchecked(memory, incoming, scores.get(score), admit, duplicates, engine, skip)


def replace_unchecked(
    memory: Tensor,
    incoming: Tensor,
    score: scores.Score,
    admit: str,
    duplicates: Tensor | None,
    engine: str,
    skip: Tensor | None = None,
    known: Counted | None = None,
) -> Replacement:
    """`replace` without looking at the rows, for callers that already have.

    skip: bool (B,), rows to leave out. known: what `counted` gave of this very memory, if `duplicates` are those.
    """
    run = _engine(engine, admit, memory, score)
    with exact_products(memory.device):
        dtype = compute_dtype(memory, incoming)
        e = exponent(memory.shape[0])
        pairs, total = known or (None, None if duplicates is None else in_units(duplicates, e))
        if incoming.shape[0] == 0:
            total = total_units(score, widened(memory, dtype), e) if total is None else total
            return Replacement(torch.empty(0, dtype=torch.int64, device=memory.device), total * 2.0**-e)
        given = (widened(memory, dtype), widened(incoming, dtype), total, score, admit, e, skip)
        slots, total = run(*given, pairs) if run is replace_dense else run(*given)
        return Replacement(slots, total * 2.0**-e)


def expected_duplicates(memory: Tensor, score: Any = "linear") -> Tensor:
    """N(j) = Σ_{i≠j} h(z_i · z_j) of every row of memory (K, d): float64 (K,). Eq. 5 of the paper."""
    check_tensor(memory, "memory", "(K, d)")
    if memory.dim() != 2 or memory.shape[0] < 1:
        raise UserError(f"memory must have shape (K, d) with K >= 1, got {tuple(memory.shape)}")
    return counted(memory, scores.get(score))[0]


def counted(memory: Tensor, score: scores.Score) -> tuple[Tensor, Counted | None]:
    """N of every row of memory (K, d), and of a small memory on the CPU what it is the sum of."""
    from duel.replacement import fused

    rows, e = widened(memory, compute_dtype(memory)), exponent(memory.shape[0])
    with exact_products(memory.device):
        if memory.device.type == "cpu" and memory.shape[0] <= PAIRS:
            pairs = pair_units(score, rows, e)
            known = Counted(pairs, pairs.sum(1, dtype=torch.float64))
            return known.total * 2.0**-e, known
        total = fused.total_fused if memory.is_cuda and not fused.unavailable(memory, score) else total_units
        return total(score, rows, e) * 2.0**-e, None


def exchange(duplicates: Tensor, memory: Tensor, slots: Tensor, old: Tensor, score: scores.Score) -> Tensor:
    """N of every row of memory (K, d), which was `duplicates` when the *distinct* `slots` held `old` (n, d)."""
    from duel.replacement import fused

    e, dtype = exponent(memory.shape[0]), compute_dtype(memory)
    fast = memory.is_cuda and not fused.unavailable(memory, score)
    run = fused.exchange_fused if fast else exchange_units
    with exact_products(memory.device):
        total = in_units(duplicates, e)
        return run(total, widened(memory, dtype), slots, widened(old, dtype), score, e) * 2.0**-e


def check_names(admit: str, engine: str) -> None:
    if engine not in ENGINES:
        raise UserError(suggest("engine", engine, ENGINES))
    if admit not in ADMIT:
        raise UserError(suggest("admit mode", admit, ADMIT))


def check_engine(engine: str, memory: Tensor, score: scores.Score) -> None:
    """Raise if `engine` was asked for by name and cannot take these tensors."""
    from duel.replacement import fused

    why_not = fused.unavailable(memory, score) if engine == "fused" else None
    if why_not:
        raise UserError(f"engine 'fused' cannot run here: {why_not}; use engine='auto' or 'dense'")


def _engine(engine: str, admit: str, memory: Tensor, score: scores.Score) -> Any:
    check_names(admit, engine)
    if engine == "reference":
        return replace_reference
    if engine == "dense" or (engine == "auto" and not memory.is_cuda):
        return replace_dense
    from duel.replacement import fused

    if engine == "fused":
        check_engine(engine, memory, score)
        return fused.replace_fused
    return replace_dense if fused.unavailable(memory, score) else fused.replace_fused
