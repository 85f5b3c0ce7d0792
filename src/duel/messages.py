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


_SETTINGS = "|".join(
    field.name for kind in (TrainConfig, EvaluationSettings) for field in dataclasses.fields(kind) if "_" in field.name
)
# Quoted words and whatever has a slash are passed over, so that values and paths stay as they are.
_WORDS = re.compile(
    r"""(?P<kept>(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\S*[/\\]\S*)|"""
    rf"(?<![\w.-])(?P<name>{_SETTINGS})(?!\w|-|\.\w)"
)


def as_options(message: str) -> str:
    """The message with settings as they are written on the command line: batch_size becomes --batch-size."""
    return _WORDS.sub(lambda m: m["kept"] or f"--{m['name'].replace('_', '-')}", message)
