"""A run directory: what is in it, who may write to it, and where its result came from.

config.json  the TrainConfig           checkpoints/  step-NNNNNNNNN.pt, the latest few
run.json     versions, commit, data_at  metrics.csv   one line per log interval; tensorboard/ holds the same
subset.npy   ids kept by bias_mode subset            evaluation.json  what `duel evaluate` measured
stream.json  size and statistics of the images that a live stream began with
memory.csv   what the memory held when the newest checkpoint was written
evaluation-DATA-….json  what it measured on other data than the run's own
.in-use      while a process trains here
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import checkpoint
from .checkpoint import atomic
from .compiled import library
from .config import TrainConfig
from .data.sources import NAMES
from .errors import UserError, writing
from .locking import alone
from .names import LIVE

CONFIG, META, METRICS, SUBSET, EVALUATION = "config.json", "run.json", "metrics.csv", "subset.npy", "evaluation.json"
STREAM = "stream.json"
#: Digests of the images that were trained on, where they were in memory and no named data set's.
TRAINED_ON = "trained_on.npy"
#: In run.json, of a run on a folder or a file: its place.
DATA_AT = "data_at"
MEMORY, EVALUATION_OF_OTHERS = "memory.csv", f"evaluation-*-{'[0-9a-f]' * 8}.json"
COMMIT_VARIABLE = "DUEL_COMMIT"
CHECKPOINTS, TENSORBOARD, FEATURES = "checkpoints", "tensorboard", "features"
LOCK = ".in-use"
_OURS = (CONFIG, META, METRICS, SUBSET, STREAM, TRAINED_ON, MEMORY, EVALUATION, CHECKPOINTS, TENSORBOARD, FEATURES)


def check_out(config: TrainConfig, *, resume: bool = False, overwrite: bool = False) -> Path:
    """The directory of this run, if it may be written: never mixes two runs, never touches foreign files.

    Nothing is written yet, so that a run that fails to start (no data, no GPU) leaves no trace.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite were both given: one continues the run, the other deletes it")
    out = Path(config.run_dir)
    if out.exists() and not out.is_dir():
        raise UserError(f"out {out} is a file; give a directory")
    if resume:
        saved = load_config(out)
        moved = is_path(saved.data) and is_path(config.data)  # another path is judged by the images that it leads to
        changed = saved.differences(replace(config, data=saved.data) if moved else config)
        if changed:
            raise UserError(
                f"{out} was started with other settings (there -> now):\n  "
                + "\n  ".join(changed)
                + "\nResume with the settings it was started with, or train in another directory (--out)"
            )
    elif out.is_dir() and any(path.name != LOCK for path in out.iterdir()):
        if not (out / CONFIG).exists():
            raise UserError(f"out {out} holds files that are not a duel run; give an empty or new directory")
        if not overwrite:
            raise UserError(
                f"{out} already holds a run; continue it with --resume, replace it with --overwrite, "
                "or choose another directory with --out"
            )
    return out


def prepare(out: Path, config: TrainConfig, *, overwrite: bool) -> None:
    """Make the directory (emptied of an earlier run if `overwrite`) and write the config into it."""
    values = config.as_dict()
    try:
        json.dumps(values)
    except TypeError as error:
        raise UserError(f"the config cannot be written as JSON: {error}") from error
    with writing(out, "give another with --out"):
        if overwrite:
            _clear(out)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / CONFIG, values)


class RunInUse(UserError):
    """Another process trains in this directory."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Inside, no other process trains in this directory, which is made if need be."""
    with ExitStack() as stack:
        with writing(out, "give another with --out"):
            out.mkdir(parents=True, exist_ok=True)
            mine = stack.enter_context(alone(out / LOCK))
        if not mine:
            raise RunInUse(f"another process is training in {out}; wait for it, or give another directory with --out")
        yield


def load_config(run: Path) -> TrainConfig:
    path = run / CONFIG
    if not path.is_file():
        inside = sorted(str(found.parent) for found in run.glob(f"*/{CONFIG}"))
        if inside:
            raise UserError(f"{run} is not a run directory but holds runs: {', '.join(inside)}; give one of them")
        if not run.exists():
            raise UserError(f"there is no run directory {run}; give the one that `duel train` wrote to (--out)")
        raise UserError(f"{run} is not a run directory: it has no {CONFIG}. `duel train` says at its end which is")
    try:
        values = json.loads(path.read_text())
        return TrainConfig.from_dict(values)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a config ({error}); restore it or start again") from error


def is_path(data: str) -> bool:
    """Whether it is a folder or a file, and not the name of a data set or a stream."""
    return data not in (*NAMES, LIVE)


def place(data: str) -> str | None:
    """Where a folder or a file is, whatever directory one is in; of other data None."""
    return str(Path(data).expanduser().resolve()) if is_path(data) else None


def locate(run: Path, config: TrainConfig) -> str:
    """The data of a run, found from any directory: as its config names them, where that leads to the place they had.

    Another folder of that name in the present directory is not taken for them, unless they are no longer there.
    """
    here = place(config.data)
    if here is None:
        return config.data
    known = str(read_meta(run).get(DATA_AT) or here)  # older runs do not say
    if known != here and os.path.exists(known):
        return known
    if os.path.exists(here):
        return config.data
    raise UserError(
        f"{run} was trained on {config.data!r}, and there is nothing at {known!r} now; give its present path "
        "with --data"
    )


def load_latest(run: Path, *, map_location: Any = "cpu") -> tuple[Path | None, dict[str, Any], list[str]]:
    """`checkpoint.load_latest` of a run; where none can be read, the message says how to start again."""
    try:
        return checkpoint.load_latest(run / CHECKPOINTS, map_location=map_location)
    except checkpoint.CheckpointError as error:
        raise checkpoint.CheckpointError(
            f"{error}. The run cannot be used any more; this deletes it and starts again: {_anew(run)}"
        ) from error


def _anew(run: Path) -> str:
    """The command that trains a run from the beginning, as far as it is on record."""
    first = (read_meta(run).get("attempts") or [{}])[0]
    words = [w for w in shlex.split(first.get("command") or "") if w not in ("--overwrite", "--resume")]
    if words[:2] != ["duel", "train"]:
        return f"duel train --out {shlex.quote(str(run))} --overwrite, with the settings in {run / CONFIG}"
    named = any(word == "--out" or word.startswith("--out=") for word in words)
    return shlex.join([*words, *([] if named else ["--out", str(run)]), "--overwrite"])


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    with writing(path, "make room or give another --out"), atomic(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n")


def read_meta(run: Path) -> dict[str, Any]:
    path = run / META
    meta: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return meta


def describe(device: Any, call: str | None = None) -> dict[str, Any]:
    """Where a result comes from: versions, commit, hardware and command. `device` is a torch.device.

    call: what stands for the command where Python called, not the command line.
    """
    import torch

    loops = "NumPy" if library() is None else "C"
    hardware: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {"gpu": properties.name, "gpu_memory_gb": round(properties.total_memory / 2**30, 1)}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["duel", *sys.argv[1:]]) if _by_command_line() else call,
        "commit": _commit(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, "loops": loops, **_versions()},
        "hardware": hardware,
    }


def _by_command_line() -> bool:
    """Whether this process is `duel …` or `python -m duel …`."""
    program = Path(sys.argv[0])
    return program.stem == "duel" or program == Path(__file__).with_name("__main__.py")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("duel-ssl", "torch", "torchvision", "timm", "lightning", "numpy", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    """Commit of the checkout this package is imported from, with "+" if it has uncommitted changes.

    A copy without git (or outside any checkout) may be told by an environment variable, COMMIT_VARIABLE.
    """
    here = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # an installed copy inside somebody else's repository has none
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get(COMMIT_VARIABLE) or None


def _clear(run: Path) -> None:
    """Delete the files of a run and nothing else."""
    for path in (*(run / name for name in _OURS), *run.glob(EVALUATION_OF_OTHERS)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def same_network(run: Path) -> Iterator[None]:
    """Weights of other shapes than those of the network that the run's settings give now are said to be such."""
    try:
        yield
    except RuntimeError as error:
        if "size mismatch" not in str(error) and "key(s) in state_dict" not in str(error):
            raise
        raise UserError(
            f"the weights in {run} are of another network than its settings give in this version of duel; use the one "
            f"that trained it ({run / META} has its commit)"
        ) from error
