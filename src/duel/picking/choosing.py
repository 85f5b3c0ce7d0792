"""A working memory of thumbnails goes through pictures once; what it holds then is what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from ..checkpoint import atomic
from ..contents import write_table
from ..data import FolderSource, LiveStream, Source, load
from ..data.live import StreamEnded, standard_input
from ..data.stream import batches
from ..errors import UserError
from ..inputs import files_of
from ..machine import resolve_device
from ..memory import WorkingMemory
from ..pixels import length, thumbnails
from ..policies import Dedup, Duel, MinRed, Policy, Reservoir

if TYPE_CHECKING:
    from .command import Pick

BATCH = 256
_ELEMENTS = 1 << 24
"""Of a block of cosines."""


class Found(NamedTuple):
    """What was looked at and what is kept."""

    seen: int
    kept: int
    alike_kept: int
    """Of those kept how many are like another."""
    alike_left: int | None
    """Likewise of those left out; None of a stream, which is gone."""
    images: Path | None

    @property
    def left(self) -> int:
        return self.seen - self.kept


class Nearest(NamedTuple):
    """Of each of some vectors the most alike other one that is kept."""

    place: Tensor
    """int64 (n,), among those kept; -1 where there is no other."""
    cosine: Tensor
    """float32 (n,)"""


def nearest(vectors: Tensor, kept: Tensor, own: Tensor) -> Nearest:
    """vectors (n, d) and kept (k, d), unit rows; own int64 (n,): which of those kept a vector is itself, -1 if none."""
    places, cosines = [], []
    for rows, mine in zip(*(t.split(max(1, _ELEMENTS // len(kept))) for t in (vectors, own)), strict=True):
        found = rows.float() @ kept.float().T
        itself = (mine >= 0).nonzero().squeeze(1)
        found[itself, mine[itself]] = -2  # less than any cosine
        best = found.max(1)
        alone = best.values < -1
        places.append(best.indices.masked_fill(alone, -1))
        cosines.append(best.values.masked_fill(alone, -1).clamp_(max=1))
    return Nearest(torch.cat(places), torch.cat(cosines))


def pick_of_set(asked: Pick) -> Found:
    """Of a folder or of arrays: all are offered once, in a random order."""
    source = load(asked.data, root=asked.root, image_size=asked.image_size, labelled=asked.labelled)
    n = len(source)
    if asked.keep >= n:
        raise UserError(f"{asked.data} has {n:,} readable pictures, so there is no choosing {asked.keep:,} of them")
    device = resolve_device(asked.device)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(asked.seed))
    memory = _memory(asked, source.shape, device)
    seen = torch.zeros(n, dtype=torch.bool)
    vectors = torch.empty(n, memory.dim, dtype=torch.float16, device=device)
    with _progress() as bar:
        task = bar.add_task("picking", total=n)
        for images, ids in batches(source, batch_size=BATCH, device=device, ids=order):
            images, ids = _readable(source, images, ids)
            rows = thumbnails(images)
            vectors[ids], seen[ids.cpu()] = rows.half(), True
            memory.update(rows, id=ids, **_image(memory, images))
            bar.advance(task, len(ids))
    shown = seen.nonzero().squeeze(1).to(device)
    if len(memory) < asked.keep:
        raise UserError(f"{asked.data} has {len(shown):,} readable pictures, fewer than the {asked.keep:,} to keep")
    ids = memory["id"]
    own = torch.full((n,), -1, device=device)
    own[ids] = torch.arange(len(ids), device=device)
    found = nearest(vectors[shown], memory.embeddings, own[shown])
    names: Sequence[object] = files_of(source) or range(n)
    held = ids.tolist()
    like = ["" if place < 0 else names[held[place]] for place in found.place.tolist()]
    kept = own[shown] >= 0
    lines = zip([names[i] for i in shown.tolist()], kept.int().tolist(), like, _rounded(found.cosine), strict=True)
    write_table(Path(asked.out), ("picture", "kept", "like", "cosine"), lines)
    alike = found.cosine >= asked.alike
    return Found(
        len(shown), len(ids), int((alike & kept).sum()), int((alike & ~kept).sum()), _written(asked.image_file, memory)
    )


def pick_of_stream(asked: Pick) -> Found:
    """Of frames as they come, until they end or at Ctrl-C; they are gone then, but for those that are kept."""
    device = resolve_device(asked.device)
    frames = LiveStream(standard_input(asked.image_size), batch_size=BATCH, device=device)
    memory: WorkingMemory | None = None
    with _progress() as bar:
        task = bar.add_task("picking", total=None)
        for images, ids in _until_the_end(frames):
            memory = memory or _memory(asked, tuple(images.shape[1:]), device)
            memory.update(thumbnails(images), id=ids, **_image(memory, images))
            bar.advance(task, len(ids))
        seen = int(bar.tasks[0].completed)
    if memory is None or len(memory) < asked.keep:
        raise UserError(f"the stream ended after {seen:,} frames, fewer than the {asked.keep:,} to keep")
    ids, slots = memory["id"].sort()
    found = nearest(memory.embeddings[slots], memory.embeddings[slots], torch.arange(len(ids), device=device))
    like = ["" if place < 0 else int(ids[place]) for place in found.place.tolist()]
    lines = zip(ids.tolist(), [1] * len(ids), like, _rounded(found.cosine), strict=True)
    write_table(Path(asked.out), ("picture", "kept", "like", "cosine"), lines)
    alike = int((found.cosine >= asked.alike).sum())
    return Found(seen, len(ids), alike, None, _written(asked.image_file, memory))


def _until_the_end(frames: LiveStream) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch by batch, the last one shorter; Ctrl-C is an end, too."""
    try:
        for start in count(step=BATCH):
            try:
                yield frames.next()
            except StreamEnded:
                rest = frames.look(BATCH)  # StreamEnded again where there is none
                yield rest.to(frames.device), torch.arange(start, start + len(rest), device=frames.device)
                return
    except (StreamEnded, KeyboardInterrupt):
        return


def _policy(asked: Pick) -> Policy:
    if asked.policy == "duel":  # a copy of what is held once must not take the place of something else
        return Duel(score=asked.score, admit="compete")
    if asked.policy == "dedup":
        return Dedup(alike=asked.alike, seed=asked.seed)
    return MinRed() if asked.policy == "minred" else Reservoir(seed=asked.seed)


def _memory(asked: Pick, shape: tuple[int, ...], device: torch.device) -> WorkingMemory:
    payload: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"id": ((), torch.int64)}
    if asked.image_file is not None:
        payload["image"] = (shape, torch.uint8)
    return WorkingMemory(size=asked.keep, dim=length(shape[0]), policy=_policy(asked), payload=payload).to(device)


def _image(memory: WorkingMemory, images: Tensor) -> dict[str, Any]:
    return {"image": images} if "image" in memory.payload else {}


def _readable(source: Source, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Without those in whose place another was read."""
    if not isinstance(source, FolderSource) or not source.unreadable:
        return images, ids
    good = torch.tensor([i not in source.unreadable for i in ids.tolist()], device=ids.device)
    return images[good], ids[good]


def _rounded(cosines: Tensor) -> list[str]:
    return [f"{cosine:.3f}" for cosine in cosines.tolist()]


def _written(path: Path | None, memory: WorkingMemory) -> Path | None:
    """The kept images, in the order of the lines, with their numbers."""
    if path is not None:
        ids, slots = memory["id"].sort()
        images = memory["image"][slots].permute(0, 2, 3, 1)
        with atomic(path) as partial, partial.open("wb") as file:
            np.savez(file, images=images.cpu().numpy(), picture=ids.cpu().numpy())
    return path


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar where somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
