"""The paper's figures, from the theory and from finished runs. SVG and PNG, readable in print and for the colour-blind.

The same data always give the same SVG: no date, no random ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import scores, theory
from ..errors import UserError, suggest
from ..replacement import expected_duplicates
from . import held
from .command import FIGURES
from .evidence import Evidence
from .grids import GRIDS, Data
from .paper import BIASES
from .plan import SCALES
from .rows import ROWS
from .store import Record

# Okabe and Ito: tells apart for every kind of colour vision; styles differ too, for print without colour.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#777777"
STYLES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (RED, ":"), (PURPLE, (0, (5, 1, 1, 1, 1, 1))), (SKY, (0, (1, 1))))


def draw(name: str, docs: Path, records: Sequence[Record] = (), *, scale: str = "short") -> list[Path]:
    """Draw one of FIGURES into docs/figures as SVG and PNG; figure3 needs the finished runs."""
    if name not in FIGURES:
        raise UserError(suggest("figure", name, FIGURES))
    plt = _pyplot()
    make = {"figure1": _figure1, "figure-mcp": _figure_mcp, "memory": _memory, "scores": _scores}
    with plt.rc_context(_LOOK):
        figure = _figure3(plt, records, scale) if name == "figure3" else make[name](plt)
        written = _save(figure, docs / "figures", name)
        plt.close(figure)
    return written


_LOOK: Mapping[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.hashsalt": "duel", "figure.constrained_layout.use": True, "lines.linewidth": 1.6,
}  # fmt: skip


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("figures need matplotlib: pip install 'duel-ssl[figures]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.svg", folder / f"{name}.png"]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}; give another with --docs") from error
    return paths


def _figure1(plt: Any) -> Any:
    """Where class vectors go under a biased loss, from the simplex ETF: in the plane, and how far."""
    figure, (plane, curve) = plt.subplots(1, 2, figsize=(7.2, 3.2))
    weights = theory.dominant(3, BIASES[-1])
    path = theory.drift(weights, steps=60)
    around = torch.linspace(0, 2 * math.pi, 200)
    plane.plot(around.cos(), around.sin(), color=GREY, linewidth=0.8)
    for c, colour in enumerate((PURPLE, GREEN, GREEN)):
        (x, y), (u, v) = path[0, c].tolist(), path[-1, c].tolist()
        plane.plot([0, x], [0, y], color=colour, linewidth=1, linestyle=":")
        plane.plot(1.04 * path[:, c, 0], 1.04 * path[:, c, 1], color=colour, linewidth=1)
        arrow = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0}
        plane.annotate("", (u, v), (0, 0), arrowprops=arrow)
        name = "$z_{\\max}$" if c == 0 else f"$z_{c}$"
        plane.text(1.16 * u, 1.16 * v, name, color=colour, ha="center", va="center")
    plane.set_title("three classes, one 27 times as frequent;\ndotted: simplex ETF", fontsize=9)
    plane.set_aspect("equal")
    plane.set_axis_off()
    for bias, (colour, style) in zip(BIASES, STYLES, strict=False):
        path = theory.drift(theory.dominant(10, bias), steps=150)
        towards = (path[:, 1:] @ -path[:, :1].transpose(1, 2)).mean((1, 2))
        curve.plot(towards, color=colour, linestyle=style)
        curve.text(len(towards) + 2, float(towards[-1]), f"×{bias:g}", color=colour, va="center")
    curve.set_xlabel("gradient steps from the ETF")
    curve.set_ylabel("cosine of rare classes with $-z_{\\max}$")
    curve.set_title("ten classes", fontsize=9)
    return figure


def _figure_mcp(plt: Any) -> Any:
    """What two scores evict, on the circle, from a memory with a common kind that is spread out and a dense region.

    The linear score takes what is nearest to the memory's mean, dense or not; a sharp one finds the dense region.
    """
    crowd = theory.crowded_circle()
    memory, newcomers = crowd.memory, crowd.newcomers
    figure, panels = plt.subplots(1, 2, figsize=(7.2, 3.4))
    for panel, score in zip(panels, ("linear", "exponential:0.05"), strict=True):
        evicted = theory.evicted(crowd, score)
        duplicates = expected_duplicates(memory, score)
        dots = panel.scatter(*memory.T, c=duplicates, cmap="cividis", s=70, zorder=2)
        panel.scatter(*(1.13 * memory[evicted]).T, marker="x", color=RED, s=45, label="evicted", zorder=3)
        panel.scatter(*newcomers.T, marker="*", color=PURPLE, s=110, label="newcomer", zorder=3)
        panel.set_title(f"score {score}", fontsize=9)
        panel.set_aspect("equal")
        panel.set_axis_off()
        figure.colorbar(dots, ax=panel, shrink=0.7, label="expected duplicates")
    panels[0].legend(loc="center", fontsize=8)
    return figure


def _memory(plt: Any) -> Any:
    """What memories hold of a biased stream: each digit an image in a slot, the frequent one in another colour."""
    from matplotlib.colors import to_rgb

    side = math.isqrt(held.SLOTS)
    figure, panels = plt.subplots(len(held.STREAMS), len(held.POLICIES), figsize=(7.2, 5.2))
    words = {"drawn": "images drawn one by one", "frames": f"each image as {held.STREAMS['frames']} frames"}
    for line, stream in zip(panels, held.STREAMS, strict=True):
        for panel, policy in zip(line, held.POLICIES, strict=True):
            found = held.held(policy, stream)
            ink = torch.nn.functional.pad(found.images / 255, (1, 1, 1, 1)).unsqueeze(-1)  # a margin around each
            tint = torch.tensor([to_rgb(RED if c == held.COMMON else BLUE) for c in found.labels.tolist()])
            slots = 1 - ink * (1 - tint.view(-1, 1, 1, 3))  # (slots, h, w, 3): ink of that colour on white
            rows = [torch.cat(list(row), dim=1) for row in slots.split(side)]
            panel.imshow(torch.cat(rows), interpolation="nearest")
            panel.set_title(f"{policy}\n{found.common} zeros, {found.different} different images", fontsize=9)
            panel.set_xticks([])
            panel.set_yticks([])
        line[0].set_ylabel(words[stream])
    return figure


def _scores(plt: Any) -> Any:
    """h over the cosine: the paper's three, and sharper ones."""
    figure, axes = plt.subplots(figsize=(4.6, 3.2))
    x = torch.linspace(-1, 1, 401, dtype=torch.float64)
    names = ("linear", "quadratic", "gaussian:1", "gaussian:0.1", "exponential:0.05", "gaussian:0.1+gaussian:0.003")
    for name, (colour, style) in zip(names, STYLES, strict=True):
        axes.plot(x, scores.get(name)(x), color=colour, linestyle=style, label=name)
    axes.set_xlabel("cosine of two embeddings")
    axes.set_ylabel("collision probability $h$")
    axes.legend(fontsize=8)
    return figure


def can_be_drawn(name: str, records: Sequence[Record], scale: str) -> bool:
    """Whether there are finished runs for it, where it needs them."""
    if name != "figure3":
        return True
    evidence, grid = _evidence(records, scale), GRIDS[name]
    return any(evidence.runs(row, data) for row in grid.rows for data in grid.data)


def _evidence(records: Sequence[Record], scale: str) -> Evidence:
    return Evidence([record for record in records if record.scale == scale], SCALES[scale])


def _figure3(plt: Any, records: Sequence[Record], scale: str) -> Any:
    """Mean intra- (solid) and inter-class (dotted) cosine of test features over training, a panel for each bias."""
    evidence, grid = _evidence(records, scale), GRIDS["figure3"]
    if not can_be_drawn("figure3", records, scale):
        raise UserError(f"no finished runs for figure3 at scale {scale}; run: duel reproduce figure3 --scale {scale}")
    figure, panels = plt.subplots(1, len(grid.data), figsize=(7.6, 2.8), sharey=True)
    for panel, data in zip(panels, grid.data, strict=True):
        for row, (colour, _) in zip(grid.rows, STYLES, strict=False):
            for metric, style in (("intra_class_cosine", "-"), ("inter_class_cosine", ":")):
                steps, mean = _mean_over_seeds(evidence, row, data, metric)
                label = ROWS[row].label if style == "-" else None
                panel.plot(steps, mean, color=colour, linestyle=style, label=label)
        panel.set_title(f"×{data.bias:g}", fontsize=9)
        panel.set_xlabel("step")
    panels[0].set_ylabel("mean cosine (solid: intra-class,\ndotted: inter-class)")
    figure.legend(*panels[-1].get_legend_handles_labels(), fontsize=8, ncols=len(grid.rows), loc="outside upper center")
    return figure


def _mean_over_seeds(evidence: Evidence, row: str, data: Data, metric: str) -> tuple[list[float], list[float]]:
    """Steps that every seed has, and the mean there."""
    curves = [dict(zip(*record.over_time(metric), strict=True)) for record in evidence.runs(row, data)]
    if not curves:
        return [], []
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [sum(curve[step] for curve in curves) / len(curves) for step in steps]
