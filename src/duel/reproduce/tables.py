"""The tables of the page, as Markdown, each from the evidence of one scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..evaluation.report import has_fitted
from .evidence import BALANCED, MEASURES, WORST, Evidence
from .grids import DRAWN, GRIDS, Data
from .paper import BIASES, RESOURCES, TABLES, figure, score_figure
from .paper import SCORES as PAPER_SCORES
from .rows import ROWS
from .stats import Summary, summary
from .verdicts import share

NOT_RUN, NOT_MEASURED = "not run", "not measured"
NONE = "–"
_PAPER_TABLE = {"probe": "probe", "top1_test_to_test": "top1", "top10_test_to_test": "top10"}
_NEIGHBOURS = {"top1_test_to_train": "top1", "top10_test_to_train": "top10"}
"""The paper does not say where its neighbours come from."""
UNFITTED = " †"
UNFIT = (
    "†: the probe has not fitted. It is right about its own training images less often than k-NN about test images and "
    "says little of the features; no claim is judged by it."
)
_FEW = 4


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def by_bias(evidence: Evidence, grid: str, measure: str) -> str:
    """A row a method, a column a bias, the paper's figure beside, and the budget."""
    heads = ["row", *(words(data) for data in DRAWN), "steps", "images encoded", "GPU-s"]
    lines = _pixels(evidence, measure)
    for name in evidence.rows(grid):
        cells = []
        for data in DRAWN:
            table = _PAPER_TABLE.get(measure)
            theirs = figure(table, ROWS[name].paper, data.bias) if table else None
            known = "" if theirs is None or evidence.scale.images != "cifar10" else f"; paper {theirs:.2f}"
            cells.append(measured(evidence, name, data, measure) + known)
        lines.append((ROWS[name].label, *cells, *_budget(evidence, name, DRAWN)))
    table = markdown(heads, lines)
    return f"{table}\n\n{UNFIT}" if any(UNFITTED in cell for line in lines for cell in line) else table


def _pixels(evidence: Evidence, measure: str) -> list[tuple[str, ...]]:
    """A line for what the images give without an encoder, where that has been measured. No bias reaches it."""
    if evidence.pixels is None or measure not in evidence.pixels:
        return []
    unfit = UNFITTED * (measure == "probe" and not has_fitted(evidence.pixels))
    cells = [f"{100 * evidence.pixels[measure]:.2f}{unfit}"] * len(DRAWN)
    return [("raw pixels, no encoder", *cells, NONE, NONE, NONE)]


def below_pixels(pixels: Mapping[str, Any]) -> str:
    """Which of the paper's own figures are not above what raw images give."""
    lines = []
    for measure, table in (_PAPER_TABLE | _NEIGHBOURS).items():
        if measure in pixels:
            floor, figures = 100 * pixels[measure], TABLES[table]
            below = {
                label: [f"×{bias:g}" for bias, value in zip(BIASES, figures[row], strict=True) if value <= floor]
                for row, label in paper_labels(figures).items()
            }
            count, of = sum(map(len, below.values())), len(BIASES) * len(figures)
            which = "; ".join(f"{label} {', '.join(at)}" for label, at in below.items() if at)
            lines.append((MEASURES[measure], f"{floor:.2f}", f"{count} of {of}", which or NONE))
    return markdown(("measure", "raw pixels", "not above", "which"), lines)


def paper_labels(rows: Iterable[str]) -> dict[str, str]:
    """Row of the paper's tables -> what it is called."""
    return {row: ROWS[f"{row}-literal" if row.startswith("d-") else row].label.split(",")[0] for row in rows}


def gaps(evidence: Evidence) -> str:
    biased = [data for data in DRAWN if data != BALANCED]
    heads = ["row", *(f"{what} {words(data)}" for what in ("probe", "Top-1") for data in biased)]
    lines = []
    for name in evidence.rows("table2"):
        if ROWS[name].plain != name:
            cells = [
                _gap(evidence, name, data, measure) for measure in ("probe", "top1_test_to_train") for data in biased
            ]
            lines.append((ROWS[name].label, *cells))
    return markdown(heads, lines)


def resources(evidence: Evidence) -> str:
    heads = ("row", "GPU-s per 1,000 steps", "peak GPU memory (MB)", "images encoded per step", "paper: h", "paper: MB")
    lines = []
    for name in evidence.rows("resources"):
        wanted = ("gpu_seconds", "peak_gpu_memory_mb", "images_encoded", "steps")
        seconds, memory, images, steps = (evidence.budget(name, WORST, what) for what in wanted)
        paper = RESOURCES.get(ROWS[name].paper or "")
        lines.append(
            (
                ROWS[name].label,
                NOT_RUN if steps is None else NONE if seconds is None else f"{1000 * seconds / steps:.1f}",
                NONE if memory is None else f"{memory:,.0f}",
                NONE if images is None or steps is None else f"{images / steps:.0f}",
                NONE if paper is None else f"{paper[0]:.1f}",
                NONE if paper is None else f"{paper[1]:,}",
            )
        )
    return markdown(heads, lines)


def listing(evidence: Evidence, grids: Sequence[str], scale: str) -> str:
    """A line for each row and kind of data that has been run, plain rows and balanced data first."""
    beside = ("paper: probe, CIFAR-10",) if "ablation" in grids else ()
    heads = ("row", "data", "probe", *beside, "Top-1, test to train", "5-shot", "gap: probe", "gap: Top-1",
             "entropy of memory", "steps", "images encoded", "GPU-s")  # fmt: skip
    wanted = {(row, data) for grid in grids for row in GRIDS[grid].rows for data in GRIDS[grid].data}
    if not any(evidence.runs(*pair) for pair in wanted):
        commands = " and ".join(f"`duel reproduce {grid} --scale {scale}`" for grid in grids)
        return f"Not run. {commands} run{'s' * (len(grids) == 1)} it."
    pairs: dict[str, tuple[str, Data]] = {}
    for pair in _pairs(grids):
        pairs.setdefault(evidence.hash(*pair), pair)  # a small scale cuts some settings to the same
    run = [pair for pair in pairs.values() if evidence.runs(*pair)]
    lines = []
    for name, data in run:
        entropy = summary(list(evidence.last(name, data, "memory_entropy").values()))
        rates = [measured(evidence, name, data, m) for m in ("probe", "top1_test_to_train", "few_shot")]
        if beside:
            rates.insert(1, _paper_probe(name, data))
        lines.append(
            (
                ROWS[name].label,
                words(data),
                *rates,
                *(_gap(evidence, name, data, m) for m in ("probe", "top1_test_to_train")),
                NONE if entropy is None else f"{entropy.mean:.3f}",
                *_budget(evidence, name, (data,)),
            )
        )
    asked = [pair for pair in pairs.values() if pair in wanted]
    missing = [pair for pair in asked if pair not in run]
    notes = (
        UNFIT if any(UNFITTED in line[2] for line in lines) else "",
        _not_run(missing, len(asked), grids, scale),
        _slot_each(evidence, run),
        _in_doubt(evidence, run),
    )
    return "\n\n".join([markdown(heads, lines), *(note for note in notes if note)])


def _pairs(grids: Sequence[str]) -> list[tuple[str, Data]]:
    """By kind of data, then method: the plain rows that gaps are measured from, also where only others are asked for,
    then the others."""
    asked = [ROWS[row] for grid in grids for row in GRIDS[grid].rows]
    plains = {row.plain: [row.plain] for row in asked}
    for row in asked:
        if row.baseline not in plains[row.plain]:
            plains[row.plain].append(row.baseline)
    kinds = dict.fromkeys([BALANCED, *(data for grid in grids for data in GRIDS[grid].data)])
    found = []
    for data in kinds:
        for plain, baselines in plains.items():
            rows = [row for grid in grids if data in GRIDS[grid].data for row in GRIDS[grid].rows]
            found += [(row, data) for row in dict.fromkeys([*baselines, *rows]) if ROWS[row].plain == plain]
    return found


def _paper_probe(name: str, data: Data) -> str:
    row = ROWS[name]
    if row.method in PAPER_SCORES:
        return score_figure(row.method, row.settings["score"])
    theirs = figure("probe", row.paper, data.bias)
    return NONE if theirs is None else f"{theirs:.2f}"


def _not_run(missing: Sequence[tuple[str, Data]], of: int, grids: Sequence[str], scale: str) -> str:
    if len(missing) > _FEW:
        commands = ", ".join(f"`duel reproduce {grid} --scale {scale} --dry-run`" for grid in grids)
        return f"Not run: {len(missing)} of {of} ({commands})."
    return "Not run: " + "; ".join(f"{ROWS[row].label} {words(data)}" for row, data in missing) + "." if missing else ""


def _in_doubt(evidence: Evidence, run: Sequence[tuple[str, Data]]) -> str:
    """Which of these rows had a memory whose choices were not proved to be its policy's."""
    found = []
    for name, data in run:
        ends = evidence.last(name, data, "memory_in_doubt")
        steps = evidence.budget(name, data, "steps")
        if steps and any(ends.values()):
            share = 100 * sum(ends.values()) / len(ends) / steps
            found.append(f"{ROWS[name].label} {words(data)} {share:.0f} %")
    return f"Updates in which another slot might have been the one to leave: {'; '.join(found)}." if found else ""


def _slot_each(evidence: Evidence, run: Sequence[tuple[str, Data]]) -> str:
    """Which of these rows had a memory with a slot for each image."""
    found = []
    for name, data in run:
        config, images = evidence.runs(name, data)[0].config, evidence.images(name, data)
        if config.source == "memory" and images is not None and config.memory_size >= images:
            found.append(f"{ROWS[name].label} {words(data)} ({images:,} images)")
    return f"At least as many slots as images: {'; '.join(found)}." if found else ""


def course(evidence: Evidence, grid: str) -> str:
    """Whether scores differ when training has just begun, as the paper suspects; a column for what was logged."""
    rows = [row for row, data in _pairs((grid,)) if data == WORST]
    metrics = {"knn": "k-NN", "memory_entropy": "entropy of memory", "memory_largest": "its largest class"}
    columns = []
    for metric, word in metrics.items():
        for step in evidence.early_steps(rows, WORST):
            cells = [_hundredths(evidence.logged(row, WORST, metric, step)) for row in rows]
            columns.append((f"{word}, step {step:,}", *cells))
        columns.append((f"{word}, end", *(_hundredths(evidence.last(row, WORST, metric)) for row in rows)))
    kept = [column for column in columns if any(cell != NONE for cell in column[1:])]
    heads, *lines = zip(("row", *(ROWS[row].label for row in rows)), *kept, strict=True)
    return "Early and at the end, in per cent:\n\n" + markdown(
        heads, [line for line in lines if any(cell != NONE for cell in line[1:])]
    )


def _hundredths(values: dict[int, float]) -> str:
    return f"{100 * sum(values.values()) / len(values):.1f} ({len(values)})" if values else NONE


def _budget(evidence: Evidence, row: str, data: Sequence[Data]) -> tuple[str, str, str]:
    """Means over the kinds of data that have been run; they cost the same."""
    cells = []
    for what in ("steps", "images_encoded", "gpu_seconds"):
        values = [value for kind in data if (value := evidence.budget(row, kind, what)) is not None]
        cells.append(f"{sum(values) / len(values):,.0f}" if values else NONE)
    return cells[0], cells[1], cells[2]


def words(data: Data) -> str:
    tail = {"longtail": "long tail "}.get(data.kind, "×") + f"{data.bias:g}"
    frames = f" {data.dwell} frames{' on average' * bool(data.spread)}" if data.dwell > 1 else ""
    return tail + (" subset" if data.mode == "subset" else "") + frames


def measured(evidence: Evidence, row: str, data: Data, measure: str) -> str:
    found = evidence.summary(row, data, measure)
    if found is None:
        return NOT_MEASURED if evidence.runs(row, data) else NOT_RUN
    return _mean(found) + UNFITTED * (not evidence.fitted(row, data, measure))


def _mean(found: Summary) -> str:
    return f"{found.mean:.2f}" + (f" ± {found.std:.2f}" if found.std is not None else "") + f" ({found.n})"


def _gap(evidence: Evidence, row: str, data: Data, measure: str) -> str:
    """Share of the gap; – where there is nothing to compare."""
    found = evidence.gap(row, data, measure)
    return NONE if found is None else share(found)
