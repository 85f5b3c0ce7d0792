"""What the page begins with: the answer in one table, for readers who want no other."""

from __future__ import annotations

from collections.abc import Mapping

from .evidence import BALANCED, WORST, Evidence
from .paper import figure
from .rows import ROWS, longer
from .tables import NONE, UNFIT, UNFITTED, markdown, measured

MEASURE = "probe"
WORDS = """Linear probe at ×27 (one class 27 times as frequent as any other, images drawn with replacement), per cent,
mean ± standard deviation (seeds). *Literal* is the paper's form, *ours* what this package recommends, *by thumbnails*
ours with nothing encoded for the memory. *As many images*: trained until it has encoded as many images as ours."""
HEADS = (
    *("", "plain, balanced data", "plain", "D-, literal", "D-, ours", "D-, ours by thumbnails"),
    *("as many images: plain, balanced data", "as many images: plain", "as many images: ours by thumbnails"),
)


def at_a_glance(found: Mapping[str, Evidence]) -> str:
    """found: the evidence of each scale, by title. A line for each method and scale of which something has been run,
    and the paper's own."""
    lines = []
    for base in ("simclr", "moco"):
        literal, ours, thumbnails = (f"d-{base}-{form}" for form in ("literal", "ours", "pixels"))
        columns = [
            *((base, BALANCED), (base, WORST), (literal, WORST), (ours, WORST), (thumbnails, WORST)),
            *((longer(base), BALANCED), (longer(base), WORST), (longer(thumbnails), WORST)),
        ]
        for title, evidence in found.items():
            cells = [
                measured(evidence, row, data, MEASURE) if evidence.runs(row, data) else NONE for row, data in columns
            ]
            if any(cell != NONE for cell in cells):
                lines.append((f"{ROWS[base].label}, {title}", *cells))
        theirs = [figure(MEASURE, ROWS[row].paper, data.bias) for row, data in columns]
        own = (NONE if value is None else f"{value:.2f}" for value in theirs)
        lines.append((f"{ROWS[base].label}, the paper's own", *own))
    table = markdown(HEADS, lines)
    return "\n\n".join([WORDS, table, *([UNFIT] if UNFITTED in table else [])])
