"""Nearest neighbours by cosine, exact and in chunks, and the two measures made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duel.errors import UserError
from duel.evaluation.numerics import exact_matmul, unit_rows
from duel.evaluation.progress import ProgressLike, bars
from duel.evaluation.rates import Rates, check_labels, rates
from duel.evaluation.settings import DEFAULTS


class Neighbours(NamedTuple):
    similarity: Tensor
    """(q, k) cosines, largest first."""
    rows: Tensor
    """(q, k) int64, rows of the bank; equal cosines in order of row."""


def nearest(
    queries: Tensor,
    bank: Tensor,
    k: int,
    *,
    exclude_self: bool = False,
    device: torch.device | str | None = None,
    query_chunk: int | None = None,
    bank_chunk: int | None = None,
    progress: ProgressLike = False,
) -> Neighbours:
    """The k rows of `bank` (n, d) with the largest cosine to each row of `queries` (q, d), on `device`.

    Exact (every cosine is computed); of equal cosines the lowest row comes first, inside the k and at its edge. At
    most query_chunk × bank_chunk cosines exist at a time. float64 features are compared in float64, all others in
    float32, whose rounding (4e-7) may swap neighbours closer than that. With `exclude_self`, queries and bank are the
    same rows and row i is no neighbour of query i. Features may stay on the host: chunks travel to `device` (default:
    where `queries` is).
    """
    _check(queries, bank, k, exclude_self)
    on = torch.device(device) if device is not None else queries.device
    # 2^28 float32 cosines are 1 GiB: large enough to keep a GPU busy. A CPU works best from its cache.
    height = query_chunk or (4096 if on.type == "cuda" else 512)
    width = bank_chunk or (2**28 if on.type == "cuda" else 2**22) // height
    similarities, rows = [], []
    with exact_matmul(on), bars(progress) as shown, torch.no_grad():
        starts = range(0, len(queries), height)
        for start in shown.track(starts, description="neighbours", total=len(starts)):
            query = unit_rows(queries[start : start + height].to(on))
            best = Neighbours(query.new_empty(len(query), 0), torch.empty(len(query), 0, dtype=torch.int64, device=on))
            for first in range(0, len(bank), width):
                cosine = query @ unit_rows(bank[first : first + width].to(on)).T
                offset = start - first  # where the diagonal of the whole matrix enters this block, if it does
                if exclude_self and -len(query) < offset < cosine.shape[1]:
                    cosine.diagonal(offset).fill_(-torch.inf)
                near = _largest(cosine, min(k, cosine.shape[1]))
                best = _merge(best, Neighbours(near.similarity, near.rows + first), k)
            similarities.append(best.similarity)
            rows.append(best.rows)
    return Neighbours(torch.cat(similarities), torch.cat(rows))


def _largest(values: Tensor, k: int) -> Neighbours:
    """The k largest of each row, by value, then by column. `topk` alone leaves open which of equal values it takes."""
    value, column = values.topk(k, dim=1)
    edge = value[:, -1:]
    unresolved = (values == edge).sum(1) > (value == edge).sum(1)  # more equal values than places at the edge
    rows = unresolved.nonzero().squeeze(1)
    if len(rows):
        ordered, order = values[rows].sort(dim=1, descending=True, stable=True)
        value[rows], column[rows] = ordered[:, :k], order[:, :k]
    column, order = column.sort(dim=1)
    value, by_value = value.gather(1, order).sort(dim=1, descending=True, stable=True)
    return Neighbours(value, column.gather(1, by_value))


def _merge(best: Neighbours, new: Neighbours, k: int) -> Neighbours:
    """The k best of two ordered lists per row. `best` comes from lower bank rows, so a stable sort keeps the order."""
    similarity, order = torch.cat((best.similarity, new.similarity), 1).sort(dim=1, descending=True, stable=True)
    rows = torch.cat((best.rows, new.rows), 1).gather(1, order[:, :k])
    return Neighbours(similarity[:, :k], rows)


def topk(
    queries: Tensor,
    bank: Tensor,
    query_labels: Tensor,
    bank_labels: Tensor,
    k: Sequence[int] = (1, 10),
    *,
    exclude_self: bool = False,
    progress: ProgressLike = False,
) -> dict[str, float]:
    """{"top1": …, "top10": …}: share of queries with at least one same-class row among the k nearest, 0 to 1."""
    check_labels("query", queries, query_labels)
    check_labels("bank", bank, bank_labels)
    found = nearest(queries, bank, max(k), exclude_self=exclude_self, progress=progress)
    return topk_of(found, query_labels, bank_labels, k)


def topk_of(
    found: Neighbours, query_labels: Tensor, bank_labels: Tensor, k: Sequence[int] = (1, 10)
) -> dict[str, float]:
    """`topk` for neighbours that are at hand (at least max(k) of them)."""
    if not k or min(k) < 1 or max(k) > found.rows.shape[1]:
        raise UserError(f"k must lie between 1 and the {found.rows.shape[1]} neighbours given, got {tuple(k)}")
    on = found.rows.device
    same = bank_labels.to(on)[found.rows] == query_labels.to(on).unsqueeze(1)  # (q, k)
    return {f"top{size}": float(same[:, :size].any(1).double().mean()) for size in k}


def weighted_knn(
    queries: Tensor,
    bank: Tensor,
    query_labels: Tensor,
    bank_labels: Tensor,
    *,
    k: int = DEFAULTS.neighbours,
    temperature: float = DEFAULTS.temperature,
    classes: int | None = None,
    exclude_self: bool = False,
    progress: ProgressLike = False,
) -> Rates:
    """The weighted k-NN classifier of Wu et al. (2018): the k nearest vote with weight exp(cosine / temperature)."""
    classes = classes or int(torch.max(query_labels.max().cpu(), bank_labels.max().cpu())) + 1
    check_labels("query", queries, query_labels, classes)
    check_labels("bank", bank, bank_labels, classes)
    found = nearest(queries, bank, k, exclude_self=exclude_self, progress=progress)
    return weighted_knn_of(found, query_labels, bank_labels, temperature=temperature, classes=classes)


def weighted_knn_of(
    found: Neighbours, query_labels: Tensor, bank_labels: Tensor, *, temperature: float, classes: int
) -> Rates:
    """`weighted_knn` for neighbours that are at hand; all of them vote."""
    on = found.rows.device
    labels = query_labels.to(on)
    # float64, because sums made by atomics come in any order: rounding must not decide between classes
    closest = found.similarity[:, :1]  # relative to it, for no weight to overflow
    weight = ((found.similarity - closest).double() / temperature).exp()
    votes = torch.zeros(len(labels), classes, dtype=weight.dtype, device=on)
    votes.scatter_add_(1, bank_labels.to(on)[found.rows], weight)
    return rates(votes.argmax(1) == labels, labels, classes)


def _check(queries: Tensor, bank: Tensor, k: int, exclude_self: bool) -> None:
    if queries.ndim != 2 or bank.ndim != 2 or queries.shape[1] != bank.shape[1] or not len(queries) or not len(bank):
        given = f"{tuple(queries.shape)} and {tuple(bank.shape)}"
        raise UserError(f"queries and bank must have shapes (q, d) and (n, d) with q, n >= 1, got {given}")
    if exclude_self and len(queries) != len(bank):
        raise UserError(
            f"exclude_self needs queries and bank to be the same rows, got {len(queries)} and {len(bank)} of them"
        )
    available = len(bank) - exclude_self
    if not 1 <= k <= available:
        raise UserError(f"k must lie between 1 and {available} (the bank's rows that may be neighbours), got {k}")
