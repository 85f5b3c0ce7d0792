"""`duel reproduce WHAT`: the runs that WHAT needs, its figure, and the page. No torch until it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError, suggest
from .grids import GRIDS
from .plan import SCALES

FIGURES = ("figure1", "figure-mcp", "figure3", "memory", "scores")
DRAWINGS = "figures"
WORK = "runs/reproduce"
WHAT = ("all", *(name for name in GRIDS if name not in FIGURES), "pixels", *FIGURES, DRAWINGS, "page")


def defaults(scale: str) -> tuple[str, str]:
    """Folders of results and of documents: a smoke test leaves those of the project alone."""
    return ("runs/smoke/results", "runs/smoke/docs") if scale == "smoke" else ("results", "docs")


def produce(
    what: Sequence[str],
    *,
    scale: str = "short",
    seeds: Sequence[int] = (),
    rows: Sequence[str] = (),
    biases: Sequence[float] = (),
    steps: int | None = None,
    lr: float | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    root: str = "data",
    download: bool = False,
    device: str = "auto",
    compile: bool | None = None,
    out: str | None = None,
    work: str = WORK,
    docs: str | None = None,
    commit: str | None = None,
    dry_run: bool = False,
) -> int:
    """Returns the exit status: 0 done, 1 something failed or is left to do, 130 interrupted."""
    if not what:
        raise UserError(f"say WHAT to make: {', '.join(WHAT)}")
    for name in what:
        if name not in WHAT:
            raise UserError(suggest("WHAT", name, WHAT))
    if scale not in SCALES:
        raise UserError(suggest("scale", scale, SCALES))
    results, documents = (given or default for given, default in zip((out, docs), defaults(scale), strict=True))
    status = 0
    grids = tuple(name for name in what if name == "all" or name in GRIDS)
    if grids:
        from .runner import reproduce

        done = reproduce(
            grids,
            scale=scale,
            seeds=seeds or None,
            rows=rows,
            biases=biases,
            steps=steps,
            lr=lr,
            minutes=minutes,
            jobs=jobs,
            root=root,
            download=download,
            device=device,
            machine={"compile": compile},
            out=results,
            work=work,
            commit=commit,
            finished_in=(results,),
            dry_run=dry_run,
        )
        status = 130 if done.interrupted else 0 if done.complete else 1
    pixels = bool({"pixels", "all"} & set(what))
    if dry_run and pixels:
        print(f"raw pixels of {SCALES[scale].images}: seconds on a GPU, minutes on a CPU, once")
    if dry_run or status == 130:
        return 0 if dry_run else status
    if pixels:
        from .pixels import measure_pixels

        path = measure_pixels(scale, Path(results), root=os.path.expanduser(root), download=download, device=device)
        print(f"raw pixels: {path}")
    figures = FIGURES if {"all", DRAWINGS} & set(what) else tuple(name for name in FIGURES if name in what)
    for path in _documents(
        figures, bool(grids) or bool({"page", "pixels", DRAWINGS} & set(what)), results, documents, scale
    ):
        print(f"written: {path}")
    return status


def _shown(figure: str, scale: str) -> bool:
    """Whether the page in these documents shows it, of this scale: figure3 is that of `short` there."""
    return figure != "figure3" or scale in ("short", "smoke")


def _documents(figures: Sequence[str], page: bool, results: str, documents: str, scale: str) -> list[Path]:
    from . import store
    from .page import write_page

    written = []
    if figures:
        from .figures import can_be_drawn, draw

        records = list(store.load([Path(results)]).values())
        for name in figures:
            if len(figures) > 1 and not (can_be_drawn(name, records, scale) and _shown(name, scale)):
                continue  # all are asked for, and this one has to wait for its runs
            written += draw(name, Path(documents), records, scale=scale)
    return [*written, write_page([Path(results)], Path(documents))] if page else written
