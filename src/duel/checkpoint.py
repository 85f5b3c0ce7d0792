"""Checkpoints that survive a full disk, a power cut and a stranger's file.

A checkpoint is written beside its final name, flushed to the disk and then renamed, so that a file with a final
name is whole. It is read with ``weights_only=True`` after its checksums have been verified.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .errors import UserError

_NAME = re.compile(r"step-(\d{9})\.pt")


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; the message names the file and what to do."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint: the name must be step-NNNNNNNNN.pt")
    return int(match[1])


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write `state` as the checkpoint of `step` and then delete all but the latest `keep`.

    If writing fails, what was there before is left as it was and no partial file stays behind.
    """
    final = folder / f"step-{step:09d}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(final) as partial, partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch's zip writer reports a short write as a RuntimeError
        kept = checkpoints(folder)
        previous = f"the previous checkpoint {kept[-1]} is untouched" if kept else "there is no earlier checkpoint"
        raise CheckpointError(
            f"could not write {final}: {_reason(error)}; {previous}. Free some disk space, then resume"
        ) from error
    for old in checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return final


def load(path: Path, *, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """The state saved at `path`; raises CheckpointError if it is missing, damaged or not plain data."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not compare checksums
        if damaged is not None:
            raise zipfile.BadZipFile(f"checksum of {damaged} does not match")
        state = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values and was not opened, because that could run code; "
            "use a checkpoint that duel wrote"
        ) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} does not exist") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"checkpoint {path} is damaged or truncated ({_reason(error)})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a training state")
    return state


def load_latest(
    folder: Path, *, map_location: torch.device | str = "cpu"
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The newest checkpoint that can be read, its state, and one message for each newer one that could not.

    (None, {}, []) when there is none at all; CheckpointError when there are some and none can be read.
    """
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, load(path, map_location=map_location), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"no checkpoint in {folder} can be read: " + "; ".join(problems))
    return None, {}, []


@contextlib.contextmanager
def atomic(final: Path) -> Iterator[Path]:
    """A temporary path beside `final` that takes its place when the block succeeds and vanishes when it fails."""
    partial = final.with_name(f".{final.name}.partial")
    try:
        yield partial
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can open a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
