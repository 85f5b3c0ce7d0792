"""What a finished (or interrupted) run is good for: measuring it and exporting its encoder."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import runs
from .allocator import keep_freed_memory
from .config import TrainConfig
from .data.digests import digests
from .data.folder import PREPARED
from .data.sources import NAMES, Source
from .encoders import Encoder
from .errors import Notice, UserError
from .evaluation.settings import EvaluationSettings
from .inputs import files_of, items_of, load_split
from .machine import resolve_device
from .names import LIVE
from .step import build_encoder
from .storage import held

if TYPE_CHECKING:
    from .evaluation.progress import ProgressLike
    from .export import Exported

# Share of the images for testing that may have been trained on, as pictures that are in two places are.
FEW = 0.1
# Where there are no labels to measure with, the labelled data that belongs to it.
_MEASURED_ON = {"stl10-unlabeled": "stl10"}


@dataclass(frozen=True)
class Trained:
    """An encoder as its run left it, and what one needs to use it."""

    config: TrainConfig
    encoder: Encoder
    """On the CPU, in evaluation mode."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Normalisation per channel, in 0..1."""
    step: int
    path: Path
    """The checkpoint it comes from."""
    memory_ids: Tensor | None
    """The items the memory held at that step, int64 (n,), slot by slot; None without a memory."""
    memory_images: Tensor | None
    """Their images, uint8 (n, c, h, w), likewise; None where the memory keeps none."""
    items: str | None
    """`items_of` what it was trained on; None of older runs."""
    problems: list[str]
    """One message for each newer checkpoint that could not be read."""


def load_trained(run: str | os.PathLike[str]) -> Trained:
    """The encoder of the newest good checkpoint in a run directory."""
    out = Path(run)
    config = runs.load_config(out)
    path, state, problems = runs.load_latest(out)
    if path is None:
        raise UserError(f"{out} has no checkpoint yet; train it first: duel train --out {out} --resume")
    channels, height, width = state["image_shape"]
    encoder = build_encoder(dataclasses.replace(config, pretrained=False), (channels, height, width))
    prefix = "encoder."
    weights = state["training"]["method"]
    with runs.same_network(out):
        encoder.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    memory = state["training"]["memory"]
    return Trained(
        config=config,
        encoder=encoder.eval(),
        mean=tuple(state["mean"]),
        std=tuple(state["std"]),
        step=int(state["training"]["step"]),
        path=path,
        memory_ids=None if memory is None else held(memory, "id"),
        memory_images=None if memory is None else held(memory, "image"),
        items=state.get("items"),
        problems=problems,
    )


def evaluate(
    run: str | os.PathLike[str],
    *,
    data: str | None = None,
    device: str = "auto",
    settings: EvaluationSettings | None = None,
    root: str | None = None,
    cache: bool = True,
    progress: ProgressLike = False,
) -> dict[str, Any]:
    """Measure a run's encoder on balanced, clean data and write the result to the run directory (`evaluation_file`).

    data: where to measure, by default what it was trained on. cache: keep the features in the run directory.
    """
    from . import evaluation

    trained = load_trained(run)
    if (data or trained.config.data) == LIVE:
        raise UserError(f"data must be given: {run} was trained on a stream, which is gone; name labelled data")
    where = data or _MEASURED_ON.get(trained.config.data) or runs.locate(Path(run), trained.config)
    shape = trained.encoder.image_shape
    of_any_size = where not in NAMES and Path(where).expanduser().is_dir()  # files, brought to one when they are read
    size = shape[-1] if of_any_size else trained.config.image_size
    own = data is None or evaluation_file(run, data).name == runs.EVALUATION
    config = dataclasses.replace(
        trained.config,
        data=where,
        root=root or trained.config.root,
        image_size=size,
        unlabelled=False,
    )
    sources = [load_split(config, split) for split in ("train", "test")]
    if getattr(sources[0], "kept_apart", 0):  # which ones depends on all that there are
        if own and trained.config.unlabelled:
            raise UserError(
                f"{run} was trained on all images of {where!r} (unlabelled), so that none is left to measure on; name "
                "other labelled images with --data"
            )
        same = trained.items == items_of(sources[0], trained.config.data)
        known = trained.items is not None or bool(files_of(sources[0]))  # arrays have always been divided like this
        if own and known and not same:
            raise UserError(
                f"{where!r} has no test part of its own, and those of its images that would be kept for testing now "
                f"may have been trained on: they are not the ones that were kept when {run} was trained, because files "
                "have come, gone or moved, or because an older version kept others. Put the files back, or measure on "
                "other labelled images with --data"
            )
        unknown = (
            "" if same else f"; and if {run} was trained on any of these pictures, some of them are in its test part"
        )
        warnings.warn(
            f"{where}: its test part was taken from the same images, so that pictures cut, resized or saved anew "
            f"may be in both parts and flatter every figure{unknown}",
            Notice,
            stacklevel=2,
        )
    _refuse_trained_on(run, where, sources[1])
    for source in sources:
        if tuple(source.shape) != tuple(shape):
            raise UserError(
                f"{where!r} has images of shape {tuple(source.shape)}, the run was trained on {tuple(shape)}; "
                "measure on data of the same size"
            )
    on = resolve_device(device)
    if on.type == "cpu":
        keep_freed_memory()
    result = evaluation.evaluate(
        trained.encoder.to(on),
        *sources,
        mean=trained.mean,
        std=trained.std,
        device=on,
        settings=settings or EvaluationSettings(),
        cache=Path(run) / runs.FEATURES if cache else None,
        progress=progress,
    )
    result["run"] = {"step": trained.step, "checkpoint": trained.path.name, "config": trained.config.as_dict()}
    result["origin"] = runs.describe(on)
    evaluation.save(result, evaluation_file(run, data))
    return result


def _refuse_trained_on(run: str | os.PathLike[str], where: str, test: Source) -> None:
    """Says how many images for testing are such as the run was trained on, to the last bit, and refuses many."""
    path = Path(run) / runs.TRAINED_ON
    held = digests(test) if path.exists() else None
    if held is None:
        return
    again = int(torch.isin(held, torch.from_numpy(np.load(path, allow_pickle=False))).sum())
    found = (
        f"{where}: {again:,} of {len(held):,} images for testing {'was' if again == 1 else 'were'} trained on by {run}"
    )
    if again > FEW * len(held):
        raise UserError(f"{found}; measure on other labelled images with --data")
    if again:
        warnings.warn(f"{found}, which flatters every figure", Notice, stacklevel=3)


def evaluation_file(run: str | os.PathLike[str], data: str | None = None) -> Path:
    """Where `evaluate` writes: evaluation.json, or for other data than the run's own a file named after them."""
    own = runs.read_meta(Path(run)).get(runs.DATA_AT) or runs.load_config(Path(run)).data
    if not data or _place(data) in map(_place, (own, _MEASURED_ON.get(own, own))):
        return Path(run) / runs.EVALUATION
    name = re.sub(r"[^\w.]+", "-", data)[-50:].strip("-.") or "data"  # names of files may not be long
    return Path(run) / f"evaluation-{name}-{sha256(os.fsencode(_place(data))).hexdigest()[:8]}.json"


def _place(data: str) -> str:
    """The same for two spellings of a path; of a data set's name, itself."""
    return runs.place(data) or data


def _of_files(config: TrainConfig) -> bool:
    """Whether the run was on a folder of images, which may be gone by now."""
    return runs.is_path(config.data) and Path(config.data).suffix not in (".npz", ".npy")


def export(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    format: Literal["safetensors", "onnx"] | None = None,
) -> Exported:
    """Write a run's backbone as one file, by default RUN/<timm name>.safetensors, and check it against the original.

    format: what `out` ends in, if none is given.
    """
    from . import export as files

    trained = load_trained(run)
    path = Path(out) if out else Path(run) / f"{trained.encoder.timm_name}.{format or 'safetensors'}"
    facts = {
        "mean": " ".join(f"{v:.6g}" for v in trained.mean),
        "std": " ".join(f"{v:.6g}" for v in trained.std),
        "method": trained.config.method,
        "data": trained.config.data_name,
        "step": str(trained.step),
        **({"images": f"{PREPARED} {trained.encoder.image_shape[-1]}"} if _of_files(trained.config) else {}),
    }
    return files.export(trained.encoder, path, format=format, metadata=facts)
