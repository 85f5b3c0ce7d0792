"""An endless stream of batches from a source: shuffled or biased, resident or decoded in workers, resumable.

The order is made on the CPU in blocks (an epoch, or 65,536 independent draws), each from a generator of its own seeded
by (seed, block number). So the same seed gives the same order on every device, the position is two numbers, and
resuming is exact. Each block goes to the device once; after that a batch of a resident source costs a slice and a
gather, without synchronisation.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duel.checks import is_whole
from duel.data.bias import ClassDraw
from duel.data.folder import FolderSource
from duel.data.sources import ArraySource, Source, check_items
from duel.errors import UserError

DRAW_BLOCK = 65_536
# Between frames of one item (dwell > 1): shifts in pixels for a 32-pixel image, larger in proportion; and brightness.
DWELL_SHIFT, DWELL_GAIN = 1.5, 0.1
#: From this side on images are shifted by whole pixels. Of smaller ones that would be none, or far more than is meant.
WHOLE_PIXELS = 16


class Frames(NamedTuple):
    """Which items a run of frames shows, and how each frame differs from the item."""

    ids: Tensor  # int64 (n,)
    shift: Tensor | None  # rows and columns, int64 (n, 2) or of small images float32; None without dwell
    gain: Tensor | None  # float32 (n,)

    def slice(self, start: int, stop: int) -> Frames:
        return self._each(lambda t: t[start:stop])

    def to(self, device: torch.device) -> Frames:
        """On the device; from pinned memory, so that the host does not wait."""
        if device.type == "cuda":
            return self._each(lambda t: t.pin_memory().to(device, non_blocking=True))
        return self._each(lambda t: t.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Frames:
        shift, gain = self.shift, self.gain
        return Frames(
            change(self.ids), None if shift is None else change(shift), None if gain is None else change(gain)
        )

    @staticmethod
    def join(pieces: list[Frames]) -> Frames:
        if len(pieces) == 1:
            return pieces[0]
        ids, shift, gain = zip(*pieces, strict=True)
        return Frames(
            torch.cat(ids), None if shift[0] is None else torch.cat(shift), None if gain[0] is None else torch.cat(gain)
        )


class Order:
    """The endless sequence of frames: block by block, each a function of (seed, block number) alone."""

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        ids: Tensor | None,
        weights: Tensor | None,
        dwell: int = 1,
        dwell_spread: float = 0.0,
    ) -> None:
        self.seed, self.dwell, self.dwell_spread = seed, dwell, dwell_spread
        self.ids = torch.arange(len(source)) if ids is None else ids
        self.shift = DWELL_SHIFT * max(source.shape[1:]) / 32
        self.whole = max(source.shape[1:]) >= WHOLE_PIXELS
        self.draw: ClassDraw | None = None
        if weights is not None:
            labels = source.labels if source.labels is None or ids is None else source.labels[self.ids]
            self.draw = ClassDraw(labels, weights.detach().cpu().double())
        self.length = (DRAW_BLOCK if self.draw else len(self.ids)) * dwell

    def block(self, number: int) -> Frames:
        # Seeds of neighbouring blocks and runs must be unrelated; a hash makes them so.
        digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        if self.draw:
            items = self.ids[self.draw(DRAW_BLOCK, generator)]
        else:
            items = self.ids[torch.randperm(len(self.ids), generator=generator)]
        if self.dwell == 1:
            return Frames(items, None, None)
        n = len(items) * self.dwell
        noise = torch.rand(n, 3, generator=generator).mul_(2).sub_(1)
        lengths = frames_each(len(items), self.dwell, self.dwell_spread, generator)
        noise[lengths.cumsum(0) - lengths] = 0  # the first frame is the item itself
        shift = noise[:, :2] * self.shift
        shift = shift.round().long() if self.whole else shift
        return Frames(items.repeat_interleave(lengths), shift, 1 + DWELL_GAIN * noise[:, 2])

    def batches(
        self, block: int, offset: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Frames, int, int]]:
        """Endless: (frames of a batch, block and offset after it). A batch may run over the end of a block."""
        frames = self.block(block).to(device)
        while True:
            pieces, missing = [], batch_size
            while missing:
                if offset == self.length:
                    block, offset = block + 1, 0
                    frames = self.block(block).to(device)
                take = min(missing, self.length - offset)
                pieces.append(frames.slice(offset, offset + take))
                offset, missing = offset + take, missing - take
            yield Frames.join(pieces), block, offset


def frames_each(items: int, mean: int, spread: float, generator: torch.Generator) -> Tensor:
    """How many frames each of some items is shown for, int64 (items,): at least one, `mean` on average to the frame.

    spread 0: all of them equally many. Else what is beyond the first frame goes with u^-spread, u uniform in (0, 1]: a
    Pareto distribution with the exponent 1 / spread.
    """
    if not spread:
        return torch.full((items,), mean)
    shares = (1 - torch.rand(items, generator=generator, dtype=torch.float64)).pow_(-spread)
    ends = (shares.cumsum(0) * (items * (mean - 1) / shares.sum())).round_().long()
    return ends.diff(prepend=ends.new_zeros(1)).add_(1)


def show(images: Tensor, shift: Tensor | None, gain: Tensor | None) -> Tensor:
    """The frames: images uint8 (b, c, h, w) shifted by (b, 2) pixels, edges repeated, and brightened by gain (b,).

    A shift that is no whole number lies between those beside it.
    """
    if shift is None or gain is None:
        return images
    if shift.is_floating_point():
        below = shift.floor().long()
        down, right = (shift - below).view(-1, 2, 1, 1, 1).unbind(1)
        rows, columns = below.unbind(1)
        upper, lower = (
            _moved(images, at, columns).float().lerp(_moved(images, at, columns + 1).float(), right)
            for at in (rows, rows + 1)
        )
        moved = upper.lerp(lower, down)
    else:
        moved = _moved(images, *shift.unbind(1))
    return (moved * gain.view(-1, 1, 1, 1)).round_().clamp_(0, 255).to(torch.uint8)


def _moved(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """By whole pixels, int64 (b,) each."""
    b, c, h, w = images.shape
    rows = (torch.arange(h, device=images.device) - down.unsqueeze(1)).clamp_(0, h - 1)
    columns = (torch.arange(w, device=images.device) - right.unsqueeze(1)).clamp_(0, w - 1)
    where = (rows.unsqueeze(2) * w + columns.unsqueeze(1)).view(b, 1, h * w).expand(b, c, h * w)
    return images.flatten(2).gather(2, where).view(b, c, h, w)


class _Reader(Dataset[Any]):
    """What a worker does: one list of ids -> (images, ids shown, unreadable files), or a mistake that the user can
    mend, which would come wrapped in the worker's traceback if it were raised there."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, batch: list[int]) -> tuple[Tensor, Tensor, dict[int, str]] | UserError:
        ids = torch.tensor(batch)
        try:
            if isinstance(self.source, FolderSource):
                return self.source.read(ids)
            return self.source.images(ids), ids, {}
        except UserError as error:
            return error


def _quiet_worker(_: int) -> None:
    # Ctrl-C goes to the whole process group; the trainer finishes its step and still needs its batches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _same(item: Any) -> Any:
    return item


def _read_ahead(
    source: Source, batches: Iterator[Tensor], *, device: torch.device, workers: int | None
) -> Iterator[Any]:
    """(images, ids shown, unreadable) for each batch of ids, in order; images in pinned memory for a GPU."""
    if workers is None:
        workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        workers = workers if isinstance(source, FolderSource) else 0
    loader = DataLoader(
        _Reader(source),
        # Each "sample" is a whole batch, sent as plain numbers: a tensor would cost the queue a file descriptor.
        sampler=(ids.tolist() for ids in batches),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_same,
        num_workers=workers,
        worker_init_fn=_quiet_worker,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # unused, but without it the loader advances the global random state
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield item


class Stream:
    """Batches without end: `next()` gives images uint8 (b, c, h, w) and ids int64 (b,), both on `device`.

    ids: only these items (subset mode). weights: class weights (C,): independent draws (draw mode). Without weights
    the stream goes through all items in a new random order each epoch; a batch may hold the end of one and the start
    of the next. dwell: each item is shown as this many consecutive frames, the first as it is, the others shifted by
    up to 5 % of the side (to the next pixel; images of a side below 16 by fractions of one) and brightened or darkened
    by up to 10 %; with a dwell_spread above 0 as so many on average,
    a few items for very long (`frames_each`). workers: decoding processes, where the source is
    not resident (None: one per core, at most 8, for folders; 0 for arrays).
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        device: torch.device | str,
        seed: int,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        dwell: int = 1,
        dwell_spread: float = 0.0,
        workers: int | None = None,
    ) -> None:
        if not (hasattr(source, "__len__") and hasattr(source, "images")):
            raise UserError(
                f"a Stream goes through a duel.data.Source, whose items have numbers, got a {type(source).__name__}; "
                "make one of arrays with duel.data.ArraySource. What never ends is for duel.train(config, frames=…)"
            )
        ids = None if ids is None else check_items(ids, len(source))
        n = len(source) if ids is None else len(ids)
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        if batch_size > n:
            part = "" if ids is None else " (the biased subset)"
            raise UserError(f"batch_size {batch_size} is larger than the data: {source.name} has {n} images{part}")
        if not is_whole(dwell) or dwell < 1:
            raise UserError(f"dwell must be a whole number of frames per item, at least 1, got {dwell}")
        if not 0 <= dwell_spread <= 1:
            raise UserError(f"dwell_spread must lie in [0, 1], got {dwell_spread}")
        self.device = torch.device(device)
        self.resident = isinstance(source, ArraySource) and source.resident
        self.source: Source = source.to(self.device) if isinstance(source, ArraySource) else source
        self.batch_size, self.workers = batch_size, workers
        self.order = Order(source, seed=seed, ids=ids, weights=weights, dwell=dwell, dwell_spread=dwell_spread)
        self._go_to(0, 0)

    def _go_to(self, block: int, offset: int) -> None:
        """Start over from a position; a reader that is ahead of it is dropped."""
        self._position = (block, offset)
        where = self.device if self.resident else torch.device("cpu")
        self._batches = self.order.batches(block, offset, self.batch_size, where)
        self._reader: Iterator[Any] | None = None

    @property
    def epoch(self) -> float:
        """Items gone by, in units of the number of items."""
        block, offset = self._position
        return (block * self.order.length + offset) / (self.order.dwell * len(self.order.ids))

    def next(self, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The next batch; out: (images, ids) to write it into and return, e.g. the inputs of a captured graph."""
        frames, *position = next(self._batches)
        if self.resident:
            images, ids = self.source.images(frames.ids), frames.ids
        else:
            if self._reader is None:
                ahead = self.order.batches(*self._position, self.batch_size, torch.device("cpu"))
                wanted = (frames.ids for frames, _, _ in ahead)
                self._reader = _read_ahead(self.source, wanted, device=self.device, workers=self.workers)
            images, ids, bad = next(self._reader)
            if bad and isinstance(self.source, FolderSource):
                self.source.report(bad)
            images, ids = images.to(self.device, non_blocking=True), ids.to(self.device, non_blocking=True)
            frames = frames.to(self.device) if frames.shift is not None else frames
        self._position = (position[0], position[1])
        images = show(images, frames.shift, frames.gain)
        if out is None:
            return images, ids
        return out[0].copy_(images), out[1].copy_(ids)

    def state_dict(self) -> dict[str, Any]:
        """The position: whole numbers only."""
        return {"seed": self.order.seed, "block": self._position[0], "offset": self._position[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; the stream must be made with the same settings."""
        if not {"block", "offset", "seed"} <= state.keys():
            raise UserError(f"this is no position of a stream: it has {', '.join(map(str, state)) or 'nothing'}")
        block, offset = int(state["block"]), int(state["offset"])
        if not 0 <= offset <= self.order.length or block < 0:
            raise UserError(
                f"this position (block {block}, offset {offset}) is from a stream of other data or settings"
            )
        self.order.seed = int(state["seed"])
        self._go_to(block, offset)


def batches(
    source: Source,
    *,
    batch_size: int,
    device: torch.device | str,
    ids: Tensor | None = None,
    workers: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each item once, in order: (images uint8 (b, c, h, w), ids int64 (b,)) on `device`, the last batch shorter.

    ids are those asked for; a file found unreadable on the way is shown as the next one of its class.
    """
    device = torch.device(device)
    chosen = torch.arange(len(source)) if ids is None else check_items(ids, len(source))
    pieces = torch.split(chosen, batch_size)
    if isinstance(source, ArraySource) and source.resident:
        source = source.to(device)
        for piece in torch.split(chosen.to(device), batch_size):
            yield source.images(piece), piece
        return
    reader = _read_ahead(source, iter(pieces), device=device, workers=workers)
    for piece, (images, _, bad) in zip(pieces, reader, strict=True):
        if bad and isinstance(source, FolderSource):
            source.report(bad)
        yield images.to(device, non_blocking=True), piece.to(device)
