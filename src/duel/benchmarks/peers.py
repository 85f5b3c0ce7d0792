"""Against lightly and plain PyTorch: the same data, backbone, batch and machine, in the same run.

Both get bf16, channels-last where the peer takes it, pinned memory and a loading process per core. End to end, the two
sides run one after the other: processes that load ahead would otherwise work during the other's turn.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from duel import recipes
from duel.benchmarks import images, parts, tables
from duel.benchmarks.cases import Case, chosen
from duel.benchmarks.peer_models import PEERS, lightly
from duel.benchmarks.results import Results
from duel.benchmarks.step import first_line, is_compiled, mode
from duel.benchmarks.timing import capture, compiled_anew, windows
from duel.config import MethodName, TrainConfig
from duel.errors import UserError, suggest
from duel.graph import WARM_UP
from duel.inputs import Inputs
from duel.machine import build_fabric
from duel.step import TrainingStep

METHODS = ("simclr", "moco")
#: Batches that a DataLoader's process prepares ahead (torch's default).
AHEAD = 2
#: Settings of ours that stand in a row.
ABOUT = ("method", "backbone", "batch_size", "data", "symmetric", "key_batchnorm")


class Pictures(Dataset[Any]):
    """uint8 arrays (n, h, w, 3), given out as torchvision's CIFAR10 gives its own: a PIL image each, transformed."""

    def __init__(self, arrays: np.ndarray[Any, Any], transform: Any) -> None:
        self.arrays, self.transform = arrays, transform

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return self.transform(Image.fromarray(self.arrays[index]))


class PeerRun:
    """The peer's training: `compute` on a batch that is there, `end_to_end` with its loader."""

    def __init__(
        self, name: str, config: TrainConfig, inputs: Inputs, device: torch.device, *, workers: int, compiled: bool
    ) -> None:
        """name: one of `PEERS`."""
        torch.manual_seed(config.seed)
        self.device, self.cuda = device, device.type == "cuda"
        peer = PEERS[name](config, inputs.train.shape)
        self.layout = torch.channels_last if self.cuda and peer.channels_last else torch.contiguous_format
        side = inputs.train.shape[-1]
        everything = torch.arange(len(inputs.train))
        arrays = inputs.train.images(everything).permute(0, 2, 3, 1).contiguous().numpy()
        self.loader = DataLoader(
            Pictures(arrays, peer.transform(side)),
            batch_size=config.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.cuda,
        )
        self.model = peer.to(device).to(memory_format=self.layout)  # type: ignore[call-overload]
        if compiled:
            self.model.backbone.compile(dynamic=False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(
            trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self._batches = self._forever()
        self.batch = next(self._batches)

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for first, second in self.loader:
                yield self._put(first), self._put(second)

    def _put(self, view: Tensor) -> Tensor:
        return view.to(self.device, non_blocking=True).contiguous(memory_format=self.layout)

    def compute(self) -> None:
        first, second = self.batch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.cuda):
            loss = self.model(first, second)
        loss.backward()
        self.optimizer.step()

    def end_to_end(self) -> None:
        self.batch = next(self._batches)
        self.compute()

    def close(self) -> None:
        """End the loading processes."""
        self._batches.close()  # type: ignore[attr-defined]
        self.loader._iterator = None


def our_compute(step: TrainingStep) -> Callable[[], object]:
    """Our step from views that are there to the updated memory: what is left without sampling and augmentation."""
    first, second = parts.views(step, step.images)

    def compute() -> None:
        parts.remember(step, parts.train(step, first, second))

    return capture(compute, step.generator) if step.graph is not None and step.graph.why_not is None else compute


@dataclass(frozen=True)
class Comparison(Case):
    """Our config, and the peer it is held against."""

    peer: str = "lightly"


def comparisons(methods: Sequence[str] = METHODS, **settings: Any) -> list[Comparison]:
    """What is measured, by the recipe `standard`; settings: fields of TrainConfig on top of it.

    Ours normalises MoCo's keys by running statistics and so takes both views in one pass; lightly does it by those of
    an eighth of the batch, and rows that say so by those of the batch.
    """
    batch = {"key_batchnorm": "batch"}
    known: list[tuple[MethodName, str, str, dict[str, Any]]] = [
        ("simclr", "SimCLR", "lightly", {}),
        ("moco", "MoCo", "lightly", {}),
        ("moco", "MoCo", "lightly, one BatchNorm group", {}),
        ("moco", "MoCo with batch statistics", "lightly, one BatchNorm group", batch),
        ("moco", "asymmetric MoCo with batch statistics", "plain PyTorch", batch | {"symmetric": False}),
    ]
    for unknown in set(methods) - set(METHODS):
        raise UserError(suggest("method", unknown, METHODS))
    return [
        Comparison(f"{name}, {peer}", dataclasses.replace(recipes.standard(method), **own, **settings), peer=peer)
        for method, name, peer, own in known
        if method in methods
    ]


def compare(
    case: Comparison,
    *,
    device: torch.device,
    workers: int,
    warm_up: int,
    count: int,
    length: int,
    compile_peer: bool = False,
) -> Iterator[dict[str, Any]]:
    """Two rows: end to end and compute only, ours and the peer's, in milliseconds per step."""
    config = case.config
    inputs = images.load(config, torch.device("cpu"))
    peer = PeerRun(case.peer, config, inputs, device, workers=workers, compiled=compile_peer)
    for _ in range(warm_up + 3 * AHEAD * workers):  # until what was loaded ahead is used up
        peer.end_to_end()
    (theirs,) = windows([peer.end_to_end], device, count=count, length=length)
    peer.close()

    step = TrainingStep(config, images.load(config, device), fabric=build_fabric(config))
    step.fill_memory()
    for _ in range(max(warm_up, WARM_UP + 2) if step.graph is not None else warm_up):
        step()
    about = {name: getattr(config, name) for name in ABOUT} | {"peer": case.peer}
    about |= {"compiled": is_compiled(step), "mode": mode(step), "peer_compiled": compile_peer}

    def row(what: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
        return {"name": f"{case.name}, {what}", **about, **_figures(ours, theirs, config.batch_size)}

    (ours,) = windows([step], device, count=count, length=length)
    yield row("end to end", ours, theirs)
    ours, theirs = windows([our_compute(step), peer.compute], device, count=count, length=length)
    yield row("compute only", ours, theirs)


def _figures(ours: list[float], theirs: list[float], batch: int) -> dict[str, Any]:
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "ours_ms": mine,
        "theirs_ms": other,
        "speedup": other / mine,
        "ours_images_per_s": batch / mine * 1e3,
        "theirs_images_per_s": batch / other * 1e3,
        "ours_windows": [round(t, 4) for t in ours],
        "theirs_windows": [round(t, 4) for t in theirs],
    }


def report(
    *,
    device: torch.device,
    out: str | None,
    methods: Sequence[str] = METHODS,
    rows: Sequence[str] = (),
    append: bool = False,
    data: str | None = None,
    workers: int | None = None,
    warm_up: int,
    count: int,
    length: int,
    compile_peer: bool = False,
    **settings: Any,
) -> tuple[Path, list[str]]:
    """What `duel bench peers` does: a table and the figures as JSON; returns the file and what failed.

    rows, append: as for `duel bench step`. data None: CIFAR-10 if it is there, else made up. settings: fields of
    TrainConfig, on top of the recipe `standard`.
    """
    from rich.console import Console

    cases = chosen(comparisons(methods, device=str(device), **settings), rows)
    if any(case.peer.startswith("lightly") for case in cases):
        lightly()  # missing is to be told before anything is loaded
    if min(count, length) < 1:
        raise UserError(f"count and length must be at least 1, got {count} and {length}")
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    how = {"workers": workers, "warm_up": warm_up, "count": count, "length": length}
    call = {"methods": methods, "rows": rows, "append": append, "data": data, "compile_peer": compile_peer}
    results = Results("peers", device, out, call | how | settings, append=append, peers=_versions(), **how)
    console, failed = Console(), []
    for case in cases:
        config = dataclasses.replace(case.config, data=data or _available(case.config))
        case = dataclasses.replace(case, config=config)
        with console.status(f"{case.name}: {config.data}, {workers} loading processes"), compiled_anew():
            try:
                for row in compare(case, device=device, compile_peer=compile_peer, **how):
                    results.add(row)
            except UserError:
                raise
            except Exception as error:  # one comparison must not lose the others
                failed.append(f"{case.name}: {first_line(error)}")
    console.print(table(results.rows))
    return results.path, failed


def _versions() -> dict[str, str]:
    try:
        return {"lightly": importlib.metadata.version("lightly")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _available(config: TrainConfig) -> str:
    try:
        images.load(config, torch.device("cpu"))
    except UserError:
        return images.SYNTHETIC
    return config.data


def table(rows: Sequence[dict[str, Any]]) -> Any:
    shown = tables.table("A training step, ms", ("",), ("ours", "theirs", "theirs / ours"))
    for row in rows:
        shown.add_row(row["name"], *cells(row))
    return shown


def cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['ours_ms']:.2f}", f"{row['theirs_ms']:.2f}", f"{row['speedup']:.2f}"]
