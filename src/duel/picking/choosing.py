"""A working memory of thumbnails goes through pictures once; what it holds then is what is kept."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .. import likeness
from ..checkpoint import atomic
from ..contents import write_table
from ..data import FolderSource, LiveStream, Source, load
from ..data.files import scan
from ..data.live import StreamEnded, standard_input
from ..data.stream import batches
from ..errors import Notice, UserError, writing
from ..inputs import files_of
from ..machine import resolve_device, total_memory
from ..memory import WorkingMemory
from ..pixels import length, thumbnails
from ..policies import Duel, MinRed, Policy, Reservoir
from ..signals import StopRequest, StopWaiting

if TYPE_CHECKING:
    from .command import Pick

BATCH = 256


class Found(NamedTuple):
    """What was looked at and what is kept."""

    seen: int
    kept: int
    different: int
    """Of those kept, as many of which no two are alike."""
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
    for rows, mine in zip(*(t.split(max(1, likeness.ELEMENTS // len(kept))) for t in (vectors, own)), strict=True):
        found = rows @ kept.T
        itself = (mine >= 0).nonzero().squeeze(1)
        found[itself, mine[itself]] = -2  # less than any cosine
        best = found.max(1)
        alone = best.values < -1
        places.append(best.indices.masked_fill(alone, -1))
        cosines.append(best.values.masked_fill(alone, -1).clamp_(max=1))
    return Nearest(torch.cat(places), torch.cat(cosines))


def pick_of_set(asked: Pick) -> Found:
    """Of a folder or of arrays: all are offered once, in a random order, and no file is read twice."""
    device = resolve_device(asked.device)
    source = _source(asked)
    n = len(source)
    if asked.keep >= n and asked.policy != "dedup":
        raise UserError(f"{asked.data} has {n:,} pictures, so there is no choosing {asked.keep:,} of them")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(asked.seed))
    memory = _memory(asked, source.shape, device, most=n)
    line = torch.full((n,), -1)  # 0 of those that could be read, then their lines in the answer
    vectors = torch.empty(n, memory.dim, device=device)
    with _progress() as bar:
        task = bar.add_task("picking", total=n)
        for images, ids in batches(source, batch_size=BATCH, device=device, ids=order):
            images, ids = _readable(source, images, ids)
            vectors[ids] = rows = thumbnails(images)
            line[ids.cpu()] = 0
            _offer(asked, memory, rows, images, ids)
            bar.advance(task, len(ids))
    shown = (line == 0).nonzero().squeeze(1)
    line[shown] = torch.arange(len(shown))
    held = memory["id"].cpu()
    own = torch.full((n,), -1)
    own[held] = torch.arange(len(held))
    found = nearest(vectors[shown.to(device)], memory.embeddings, own[shown].to(device))
    names: Sequence[object] = files_of(source) or range(n)
    lines = _lines([names[i] for i in shown.tolist()], own[shown] >= 0, [names[i] for i in held.tolist()], found)
    return _write(asked, lines, memory, line[held], found, own[shown] >= 0)


def pick_of_stream(asked: Pick) -> Found:
    """Of frames as they come, until they end or at Ctrl-C; they are gone then, but for those that are kept."""
    device = resolve_device(asked.device)
    memory: WorkingMemory | None = None
    frames: LiveStream | None = None
    try:
        with _progress() as bar, StopRequest(waiting=lambda: frames is not None and frames.waiting) as stop:
            frames = LiveStream(_until(stop, standard_input(asked.image_size)), batch_size=BATCH, device=device)
            task = bar.add_task("picking", total=None)
            for images, ids in _to_the_last(frames):
                memory = memory or _memory(asked, tuple(images.shape[1:]), device)
                _offer(asked, memory, thumbnails(images), images, ids)
                bar.advance(task, len(ids))
            seen = int(bar.tasks[task].completed)
    except KeyboardInterrupt as error:  # the second one
        raise KeyboardInterrupt("at once, so that nothing is written") from error
    if memory is None:
        raise UserError("the stream ended before there was a frame")
    slots = memory["id"].argsort()
    kept, rows = memory["id"][slots].cpu(), memory.embeddings[slots]
    found = nearest(rows, rows, torch.arange(len(rows), device=device))
    lines = _lines(kept.tolist(), kept >= 0, kept.tolist(), found)
    return _write(asked, lines, memory, memory["id"].cpu(), found, kept >= 0)._replace(seen=seen, alike_left=None)


def _source(asked: Pick) -> Source:
    """Of a folder all images below it, which are decoded when they are needed."""
    folder = Path(asked.data).expanduser()
    if folder.is_dir() and not asked.labelled:
        paths, _, _ = scan(folder, None, tell=True, labelled=False)
        return FolderSource(paths, None, name=str(folder), classes=(), image_size=asked.image_size)
    return load(asked.data, root=asked.root, image_size=asked.image_size, labelled=asked.labelled)


def _offer(asked: Pick, memory: WorkingMemory, rows: Tensor, images: Tensor, ids: Tensor) -> None:
    """To the memory, by policy dedup only what is like nothing in it."""
    if asked.policy == "dedup":
        good = likeness.unlike(rows, asked.alike, memory.embeddings)
        rows, images, ids = rows[good], images[good], ids[good]
    image = {"image": images} if "image" in memory.payload else {}
    memory.update(rows, evicted=False, id=ids, **image)


def _until(stop: StopRequest, frames: Iterable[Any]) -> Iterator[Any]:
    """No more frames once a stop is asked for."""
    for frame in frames:
        yield frame
        if stop.requested:
            return


def _to_the_last(frames: LiveStream) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch by batch, the last one shorter, also where Ctrl-C ends the waiting for the next frame."""
    with suppress(StreamEnded, StopWaiting):
        while True:
            yield frames.next()
    images, ids = frames.rest()
    if len(ids):
        yield images, ids


def _lines(names: Sequence[object], kept: Tensor, held: Sequence[object], found: Nearest) -> Iterator[Sequence[object]]:
    """Of the answer. names: of all; held: of what is kept, as `found` numbers it."""
    columns = (kept.int().tolist(), found.place.tolist(), found.cosine.tolist())
    for name, is_kept, place, cosine in zip(names, *columns, strict=True):
        yield name, is_kept, *(("", "") if place < 0 else (held[place], f"{cosine:.3f}"))


def _write(
    asked: Pick,
    lines: Iterable[Sequence[object]],
    memory: WorkingMemory,
    numbers: Tensor,
    found: Nearest,
    kept: Tensor,
) -> Found:
    """numbers: of the pictures in the slots, as they are in the file of images."""
    if len(memory) < asked.keep and asked.policy != "dedup":
        few = f"there were {len(memory):,} pictures, fewer than the {asked.keep:,} to keep"
        warnings.warn(few, Notice, stacklevel=2)
    if (path := asked.image_file) is not None:  # first: of a stream there is nothing else
        order = numbers.argsort()
        images = memory["image"][order.to(memory.device)].permute(0, 2, 3, 1).cpu().numpy()
        with writing(path, "give another file"), atomic(path) as partial, partial.open("wb") as file:
            np.savez(file, images=images, picture=numbers[order].numpy())
    write_table(Path(asked.out), ("picture", "kept", "like", "cosine"), lines)
    alike = (found.cosine >= likeness.least(asked.alike)).cpu()
    return Found(
        seen=len(kept),
        kept=len(memory),
        different=int(likeness.unlike(memory.embeddings, asked.alike).sum()),
        alike_kept=int((alike & kept).sum()),
        alike_left=int((alike & ~kept).sum()),
        images=path,
    )


def _policy(asked: Pick) -> Policy:
    if asked.policy == "duel":  # a copy of what is held once must not take the place of something else
        return Duel(score=asked.score, admit="compete")
    return MinRed() if asked.policy == "minred" else Reservoir(seed=asked.seed)  # dedup: of what `_offer` lets through


def _memory(asked: Pick, shape: tuple[int, ...], device: torch.device, *, most: int | None = None) -> WorkingMemory:
    """most: pictures that there are."""
    payload: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"id": ((), torch.int64)}
    if asked.image_file is not None:
        payload["image"] = (shape, torch.uint8)
    size, dim = min(asked.keep, most or asked.keep), length(shape[0])
    needed, there = size * (4 * dim + math.prod(shape) * ("image" in payload)), total_memory()
    if there is not None and needed > there:
        raise UserError(
            f"keep {asked.keep:,} would take {needed / 2**30:,.0f} GiB, and there are {there / 2**30:,.0f}; take fewer"
        )
    return WorkingMemory(size=size, dim=dim, policy=_policy(asked), payload=payload).to(device)


def _readable(source: Source, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Without those in whose place another was read."""
    bad = source.unreadable if isinstance(source, FolderSource) else frozenset()
    good = torch.tensor([i not in bad for i in ids.tolist()], device=ids.device)
    return (images[good], ids[good]) if bad else (images, ids)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar where somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
