"""From images to features: extraction in batches, BatchNorm re-estimation, and a cache beside the run."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from duel.errors import Notice, UserError
from duel.evaluation.numerics import sent
from duel.evaluation.progress import ProgressLike, bars
from duel.evaluation.settings import DEFAULTS

if TYPE_CHECKING:
    from duel.data.sources import Source

Encode = Callable[[Tensor], Tensor]
"""uint8 images (b, c, h, w) → features (b, f)."""


class _Batches(torch.utils.data.Dataset[Tensor]):
    """One element = one batch of images: what a worker process decodes at a time."""

    def __init__(self, source: Source, ids: Sequence[Tensor]) -> None:
        self.source, self.ids = source, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, position: int) -> Tensor:
        return self.source.images(self.ids[position])


def image_batches(source: Source, ids: Sequence[Tensor], *, device: torch.device, workers: int = 0) -> Iterator[Tensor]:
    """The images of each of `ids` (each int64 (b,), on the host) as uint8 (b, c, h, w) on `device`."""
    if getattr(source, "resident", False):  # what is in memory needs no decoding
        for chosen in sent(torch.cat(tuple(ids)), device).split([len(part) for part in ids]):
            yield source.images(chosen)
        return
    # A generator of its own: a DataLoader otherwise draws its workers' seed from the global one, and training that
    # evaluates on the way would no longer be the training that does not.
    loader = torch.utils.data.DataLoader(
        _Batches(source, ids),
        batch_size=None,
        num_workers=min(workers, len(ids)),
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),
    )
    for images in loader:
        yield images.to(device, non_blocking=True)


def extract(
    encode: Encode,
    source: Source,
    *,
    batch_size: int = DEFAULTS.batch_size,
    device: torch.device | str,
    ids: Tensor | None = None,
    workers: int = DEFAULTS.workers,
    progress: ProgressLike = False,
    description: str = "features",
) -> Tensor:
    """Features of every image of `source` (or of `ids` int64 (n,)), in order: float32 (n, f) on `device`."""
    on = torch.device(device)
    chosen = torch.arange(len(source)) if ids is None else ids.cpu()
    if not len(chosen):
        raise UserError(f"source {source.name!r} gives no images to encode: it is empty, or ids is")
    parts = torch.split(chosen, batch_size)
    found: Tensor | None = None
    with torch.no_grad(), bars(progress) as shown:
        batches = image_batches(source, parts, device=on, workers=workers)
        for start, images in enumerate(shown.track(batches, description=description, total=len(parts))):
            features = encode(images)
            if features.ndim != 2 or len(features) != len(images):
                expected = f"({len(images)}, f)"
                raise UserError(f"encode must return features of shape {expected}, got {tuple(features.shape)}")
            if found is None:  # written in place: collecting and concatenating would need twice the memory
                found = torch.empty(len(chosen), features.shape[1], device=on)
            found[start * batch_size :][: len(features)] = features
    assert found is not None  # there was at least one batch
    if not bool(found.isfinite().all()):
        raise UserError(f"the encoder gives NaN or infinite features on {source.name!r}; was its training stable?")
    return found


def balanced_ids(labels: Tensor, count: int, *, seed: int) -> Tensor:
    """min(count, n) ids, shuffled, of classes (n,) in equal parts (to within one image).

    A class with too few images repeats them; on a balanced set with count >= n every image occurs exactly once.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = labels.cpu()
    present = labels.bincount().nonzero().squeeze(1)
    total = min(count, len(labels))
    share, rest = divmod(total, len(present))
    chosen = []
    for position, label in enumerate(present):
        members = (labels == label).nonzero().squeeze(1)
        wanted = share + (position < rest)
        turn = members[torch.randperm(len(members), generator=generator)]
        chosen.append(turn.repeat(-(-wanted // len(members)))[:wanted])
    drawn = torch.cat(chosen)
    return drawn[torch.randperm(len(drawn), generator=generator)]


def batchnorms(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers that keep running statistics."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.running_mean is not None]


def reestimate_batchnorm(module: nn.Module, batches: Iterable[Tensor], *, forward: Encode | None = None) -> int:
    """Replace the running statistics by the plain average over `batches`, given to `forward` (default: module).

    Returns how many layers that concerns. Everything but BatchNorm runs as in evaluation; modes are put back.
    """
    layers = batchnorms(module)
    if not layers:
        return 0
    run = forward or module
    modes = {part: part.training for part in module.modules()}
    momenta = [layer.momentum for layer in layers]
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # cumulative average: every batch weighs the same
        layer.training = True
    try:
        with torch.no_grad():
            for batch in batches:
                run(batch)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for part, mode in modes.items():
            part.training = mode
    if int(layers[0].num_batches_tracked or 0) == 0:
        raise UserError("batches is empty: BatchNorm statistics cannot be re-estimated from no images")
    return len(layers)


@contextmanager
def reestimated_batchnorm(
    module: nn.Module, batches: Iterable[Tensor], *, forward: Encode | None = None
) -> Iterator[int]:
    """`reestimate_batchnorm` inside the block; the statistics of training are put back after it."""
    kept = [{name: buffer.clone() for name, buffer in layer.named_buffers()} for layer in batchnorms(module)]
    try:
        yield reestimate_batchnorm(module, batches, forward=forward)
    finally:
        for layer, buffers in zip(batchnorms(module), kept, strict=True):
            for name, buffer in layer.named_buffers():
                buffer.copy_(buffers[name])


def fingerprint(*parts: Any) -> str:
    """Hex digest of tensors (by content), modules (architecture and state) and anything else (by its repr)."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, nn.Module):
            digest.update(repr(part).encode())
            for name, tensor in part.state_dict().items():
                digest.update(f"{name} {fingerprint(tensor)}".encode())
        elif isinstance(part, Tensor):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def describe_source(source: Source) -> tuple[Any, ...]:
    """What tells one source from another, for `fingerprint`: name, size, labels, and all images that are in memory. Of
    files that are read when they are needed names, sizes and times of change; of anything else 16 images."""
    labels = "unlabelled" if source.labels is None else fingerprint(source.labels)
    return source.name, len(source), source.shape, labels, _content(source)


def _content(source: Source) -> str:
    held, paths = getattr(source, "data", None), getattr(source, "paths", None)
    if isinstance(held, Tensor):
        return fingerprint(*held.split(4096))
    if paths is not None:
        files = ((path, os.stat(path)) for path in map(str, paths))
        return fingerprint([(path, found.st_size, found.st_mtime_ns) for path, found in files])
    return fingerprint(source.images(torch.linspace(0, len(source) - 1, 16).long()))


class FeatureCache:
    """Features kept in a folder, one file for each name; another key under that name replaces it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(self, name: str, key: str, compute: Callable[[], Tensor], *, device: torch.device) -> Tensor:
        """The features (n, f) stored under `name` if their key is `key`; otherwise computed, and stored."""
        path = self.folder / f"{name}.pt"
        if path.is_file():
            try:
                stored = torch.load(path, map_location=device, weights_only=True)
                if stored["key"] == key:
                    features: Tensor = stored["features"]
                    return features
            except Exception as error:  # torn or foreign file: whatever is wrong with it, computing again mends it
                warnings.warn(f"{path} is unreadable and will be written anew ({error})", Notice, stacklevel=2)
        features = compute()
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({"key": key, "features": features.cpu()}, partial)
            partial.replace(path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            warnings.warn(f"features are not cached: {path} could not be written ({error})", Notice, stacklevel=2)
        return features
