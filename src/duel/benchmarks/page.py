"""The tables of docs/performance.md, made from the floor's formulas and from results/*.json; nothing is typed by hand.

`python -m duel.benchmarks.page docs/performance.md` rewrites what stands between `<!-- KIND FILE -->` and
`<!-- end -->`; KIND is floor, step or peers, FILE a benchmark's JSON, relative to the repository.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duel.benchmarks import cases, floor, peers, step
from duel.config import TrainConfig

MARKED = re.compile(r"<!-- (floor|step|peers) ?(\S*) -->\n.*?<!-- end -->", flags=re.DOTALL)


def render(text: str, root: Path) -> str:
    """The page with its tables made anew; root: the folder that the names of files are relative to."""

    def fill(found: re.Match[str]) -> str:
        kind, name = found.groups()
        if kind == "floor":
            made = floor_tables()
        elif not (root / name).is_file():
            made = f"Not measured yet: `duel bench {kind} --out {name}`."
        else:
            written = json.loads((root / name).read_text())
            made = step_table(written) if kind == "step" else peers_table(written)
        return f"{found.group(0).splitlines()[0]}\n{made}\n<!-- end -->"

    return MARKED.sub(fill, text)


def floor_tables() -> str:
    """Per 256 images trained on, and per step of each method."""
    first = []
    for name in cases.BACKBONES:
        share, found = floor.share_of_passes(name), floor.layers(name)
        billions = sum(layer.operations for layer in found) / 1e9
        first.append([name, f"{billions:.2f}", *(f"{share[key]:.2f}" for key in ("convolutions", "separate", "fused"))])
    second = []
    for case in cases.cases(memory=(2048,)):
        least, apart = floor.step_floor(case.config), floor.step_floor(case.config, passes=floor.SEPARATE)
        counts = (f"{n:,}" for n in floor.images_of(case.config))
        figures = (f"{least.operations / 1e12:.2f}", f"{least.bytes / 1e9:.1f}")
        times = (f"{least.seconds * 1e3:.1f}", f"{apart.seconds * 1e3:.1f}")
        second.append([case.name, *counts, *figures, *times])
    passes = ("", "10⁹ operations per image", "convolutions, ms", "+ separate passes, ms", "+ fused passes, ms")
    images = ("images trained on", "forward only", "encoded only")
    steps = ("", *images, "10¹² operations", "GB moved", "floor, ms", "separate passes, ms")
    gpu = floor.H200
    rates = f"{gpu.name}: {gpu.flops / 1e12:.0f} × 10¹² operations, {gpu.bandwidth / 1e12:.1f} × 10¹² bytes per second."
    return f"{rates}\n\n{_markdown(passes, first)}\n\n{_markdown(steps, second)}"


def step_table(written: dict[str, Any]) -> str:
    """The rows of `duel bench step`; those of the GPU whose floor is known, with it."""
    lines = []
    for row in _with_origin(written):
        if "error" in row:
            lines.append([row["name"], row["error"], *[""] * len(step.COLUMNS)])
            continue
        known = floor.H200.name in str(row["hardware"].get("gpu"))
        least = f"{floor.step_floor(TrainConfig(**row['settings'])).seconds * 1e3:.1f}" if known else "–"
        ms, *rest = step.cells(row)
        lines.append([row["name"], ms, least, *rest])
    ms, *titles = step.COLUMNS
    return _measured(written, ("", ms, "floor", *(f"{t} %" if t in step.PARTS else t for t in titles)), lines)


def peers_table(written: dict[str, Any]) -> str:
    lines = [[row["name"], row["data"], *peers.cells(row)] for row in written["rows"]]
    return _measured(written, ("", "data", "ours, ms", "theirs, ms", "theirs / ours"), lines)


def _measured(written: dict[str, Any], titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The table under a line that says where its rows come from; where not all from the same, with a column for it."""
    origins = ["" if "error" in row else _origin(row) for row in _with_origin(written)]
    different = [origin for origin in dict.fromkeys(origins) if origin]
    if len(different) < 2:
        return f"{''.join(different)}.\n\n{_markdown(titles, lines)}"
    numbers = {origin: str(number) for number, origin in enumerate(different, start=1)}
    said = "; ".join(f"({number}) {origin}" for origin, number in numbers.items())
    marked = [[*line, numbers.get(origin, "")] for line, origin in zip(lines, origins, strict=True)]
    return f"Not all rows come from the same: {said}.\n\n{_markdown((*titles, 'from'), marked)}"


def _with_origin(written: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, each with what the head of the file says of all that do not say it themselves."""
    return [{**written, **row} for row in written["rows"]]


def _origin(row: dict[str, Any]) -> str:
    hardware = row["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cpus']} CPU cores, {hardware['threads']} threads"
    versions = {"torch": row["versions"]["torch"], **row.get("peers", {})}
    how = ["compiled"] * row.get("compiled", False) + ([row["mode"]] if "mode" in row else [])
    day, commit = str(row["started"])[:10], str(row["commit"])[:7]
    return ", ".join(
        [machine, *(f"{name} {version}" for name, version in versions.items()), *how, day, f"commit {commit}"]
    )


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["docs/performance.md"]:
        page = Path(name)
        page.write_text(render(page.read_text(), page.resolve().parent.parent))
