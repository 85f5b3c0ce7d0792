"""Tables for 80 columns: words may be folded, a figure is never shortened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, words: Sequence[str], figures: Sequence[str], *, caption: str | None = None) -> Table:
    """An empty table with columns of words on the left and of figures on the right, by their headings."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
    )
    for heading in words:
        made.add_column(heading, overflow="fold")
    for heading in figures:
        made.add_column(heading, justify="right", no_wrap=True)  # where room is short, only what may wrap gets less
    return made
