"""First pass over the options of `duel train`: a few of them decide what the defaults of all others are. No torch here,
unless a run is resumed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import recipes
from .config import TrainConfig
from .config_checks import choices
from .errors import UserError, suggest


def first_pass(args: list[str]) -> TrainConfig:
    """The settings by the recipe, or the run to be resumed, that `args` name."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    accepted = choices(TrainConfig)
    for name in ("recipe", "data", "out", "batch_size", *accepted):
        first.add_argument(f"--{name.replace('_', '-')}")
    for flag in ("--resume", "--overwrite", "--help", "-h"):
        first.add_argument(flag, action="store_true", dest=flag.lstrip("-"))
    dashed = []
    for arg in args:
        name, equals, value = arg.partition("=")
        dashed.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    try:
        given, _ = first.parse_known_args(dashed)
    except argparse.ArgumentError:
        return TrainConfig()  # an option without its value: the second pass says so
    for name, words in accepted.items():
        word = getattr(given, name)
        if word is not None and word not in map(str, words):
            raise UserError(suggest(name, word, map(str, words)))
    if given.resume and not given.out and not given.help:
        at = dashed.index("--resume") + 1
        if at < len(dashed) and not dashed[at].startswith("-"):
            raise UserError(
                f"--resume takes no value; the run to go on with is named by --out: --out {args[at]} --resume"
            )
    if given.resume and given.out and not given.help:
        from .runs import load_config  # needs torch, as the training that follows does

        return load_config(Path(given.out))
    named = {"method": given.method, "data": given.data, "source": given.source}
    chosen: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    if given.batch_size is not None and given.batch_size.isdigit() and int(given.batch_size) > 0:
        chosen["batch_size"] = max(2, int(given.batch_size))  # one image is enough for some, which a recipe cannot tell
    return recipes.recipe(given.recipe or "standard", **chosen)
