"""What the library says, as the command line prints it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from .config import TrainConfig
from .errors import Notice
from .evaluation.settings import EvaluationSettings


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Our own warnings as a line for people, without the place in the source; all others as they are."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, Notice):
            print(f"warning: {message}", file=sys.stderr)
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


_SETTINGS = {field.name for kind in (TrainConfig, EvaluationSettings) for field in dataclasses.fields(kind)}
_ANY = "|".join(sorted(_SETTINGS))
_UNMISTAKABLE = "|".join(sorted(name for name in _SETTINGS if "_" in name))
# Quoted words and whatever has a slash are passed over, so that values and paths stay as they are. A setting that is a
# plain word too, such as score, is meant where a message begins with it or lists it.
_WORDS = re.compile(
    r"""(?P<kept>(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\S*[/\\]\S*)|"""
    rf"(?P<subject>\A(?:{_ANY}))(?= must | is for | was given)|"
    rf"(?:(?<=, so )|(?<= look at ))(?P<listed>(?:{_ANY})(?:, (?:{_ANY}))*)(?= would|;)|"
    rf"(?<![\w.-])(?P<name>{_UNMISTAKABLE})(?!\w|-|\.\w)"
)


def as_options(message: str) -> str:
    """The message with settings as they are written on the command line: batch_size becomes --batch-size."""
    return _WORDS.sub(_as_option, message)


def _as_option(found: re.Match[str]) -> str:
    names = found["subject"] or found["listed"] or found["name"]
    return found["kept"] or ", ".join(f"--{name.replace('_', '-')}" for name in names.split(", "))
