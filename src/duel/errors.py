"""What a user did wrong, said so that the user can mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what was given. The message says what was given, what is accepted and what to do."""


def suggest(what: str, name: object, valid: Iterable[str]) -> str:
    """The message for an unknown name: the nearest valid one, if any is near, and the whole list."""
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {what} {name!r}{hint} valid: {', '.join(names)}"
