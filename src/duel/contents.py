"""memory.csv: which items a memory holds, and how duplicated each is."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .checkpoint import atomic
from .data.sources import Source
from .errors import writing
from .memory import WorkingMemory
from .policies import Duel

COLUMNS = ("slot", "id", "file", "class", "age", "staleness", "held", "duplicates")


def write(path: Path, memory: WorkingMemory, source: Source, files: Sequence[str] = ()) -> None:
    """A line for each filled slot, the most duplicated first; `source` is what the memory's ids number, `files` where
    its items are.

    file and class are empty where there is none. held: the number of slots that this item is in. duplicates, the
    expected number N, is the policy's own: empty where it carries none or the memory is not full yet, and then lines
    are in the order of the slots.
    """
    write_table(path, COLUMNS, zip(*_columns(memory, source, files), strict=True))


def write_table(path: Path, heads: Sequence[str], lines: Iterable[Iterable[object]]) -> None:
    """As CSV, whole or not at all. A file's name in it need not be valid text."""
    with (
        writing(path, "give another file"),
        atomic(path) as partial,
        partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows(lines)


@torch.no_grad()
def _columns(memory: WorkingMemory, source: Source, files: Sequence[str]) -> list[list[object]]:
    order = torch.arange(len(memory), device=memory.device)
    nothing: list[object] = [""] * len(memory)
    duplicates = nothing
    if memory.full and isinstance(memory.policy, Duel):
        ranked = torch.sort(memory.policy.carried(memory), descending=True, stable=True)
        order, duplicates = ranked.indices, [f"{n:.6g}" for n in ranked.values.tolist()]

    ids = memory["id"][order].cpu()
    return [
        order.tolist(),
        ids.tolist(),
        [files[i] for i in ids.tolist()] if files else nothing,
        nothing if source.labels is None else [source.classes[i] for i in source.labels[ids].tolist()],
        memory.age[order].tolist(),
        memory.staleness[order].tolist(),
        _held(ids),
        duplicates,
    ]


def _held(ids: torch.Tensor) -> list[object]:
    """How often each of these ids (n,) is among them."""
    _, which, counts = ids.unique(return_inverse=True, return_counts=True)
    held: list[object] = counts[which].tolist()
    return held
