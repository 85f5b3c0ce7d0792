"""Progress bars that can be switched off, or drawn in a display the caller already shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ProgressLike = bool | Progress
"""True: bars of our own, gone when done. False: none. A rich Progress: our tasks join it (two displays would clash)."""


@contextmanager
def bars(progress: ProgressLike) -> Iterator[Progress]:
    """A Progress to add tasks to, whatever was given; its tasks are removed again at the end."""
    if isinstance(progress, Progress):
        earlier = set(progress.task_ids)
        try:
            yield progress
        finally:
            for task in set(progress.task_ids) - earlier:
                progress.remove_task(task)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not progress) as own:
        yield own
