"""What a user did wrong, said so that the user can mend it."""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator
from numbers import Integral
from pathlib import Path


class UserError(ValueError):
    """A mistake in what was given. The message says what was given, what is accepted and what to do."""


class Notice(UserWarning):
    """Something a user should know although the work goes on. The command line prints it as one `warning: …`."""


@contextlib.contextmanager
def writing(path: os.PathLike[str], advice: str) -> Iterator[None]:
    """What the system says when `path` cannot be written becomes a UserError, with what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def check_writable(folder: Path, advice: str) -> None:
    """Make a folder, and a file in it that does not stay."""
    with writing(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def check_seed(seed: object) -> int:
    """What every generator takes, as Python's own number: NumPy's would be saved as what torch.load refuses."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise UserError(f"seed must be a whole number >= 0 and below 2^63, got {seed!r}")
    return int(seed)


def suggest(what: str, name: object, valid: Iterable[str], *, shown: Iterable[str] | None = None) -> str:
    """The message for an unknown name: the nearest valid one, if any is near, and the whole list (as in `shown`)."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {what} {name!r}{hint} valid: {', '.join(names if shown is None else shown)}"
