"""An evaluation's result as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from duel.errors import writing

_RATES = {
    "top1_test_to_test": "Top-1, test to test",
    "top1_test_to_train": "Top-1, test to train",
    "top10_test_to_test": "Top-10, test to test",
    "top10_test_to_train": "Top-10, test to train",
    "knn": "weighted k-NN",
    "probe": "linear probe",
    "probe_standardised": "linear probe, standardised",
    "few_shot": "nearest centroid",
}
_FAR = 0.1
"""Between two linear probes: the lower one has not got to where it could."""
_NUMBERS = {
    "intra_class_cosine": "intra-class cosine",
    "inter_class_cosine": "inter-class cosine",
    "etf_distance": "distance to the simplex ETF",
    "effective_rank": "effective rank",
}


def table(result: dict[str, Any], *, title: str = "Evaluation") -> Table:
    """The result of `evaluate` as a rich table; rates in per cent."""
    made = Table(title=title, title_justify="left")
    made.add_column("measure")
    made.add_column("value", justify="right")
    made.add_column("balanced", justify="right")
    made.add_column("BatchNorm as trained", justify="right")
    used = {"knn": f" (k {result['used']['k']})", "few_shot": f" ({result['used']['shots']}-shot)"}
    for name, words in _RATES.items():
        if name in result:
            others = (result["balanced_accuracy"].get(name), result["without_reestimation"].get(name))
            made.add_row(words + used.get(name, ""), *(_percent(value) for value in (result[name], *others)))
    made.add_section()
    for name, words in _NUMBERS.items():
        made.add_row(words, "" if result[name] is None else f"{result[name]:.3f}", "", "")
    notes = []
    if result["probe_diverged"]:
        notes.append("The linear probe diverged: lower probe_lr, or look at the scale of the features.")
    elif not has_fitted(result):
        notes.append(
            "The linear probe has not fitted: it is right about its training images less often than k-NN about test "
            "images. The one on standardised features says more."
        )
    elif result.get("probe_standardised", 0.0) > result["probe"] + _FAR:
        notes.append("The linear probe is far below that on standardised features, which says more.")
    if 2 * result["used"]["k"] > result["images"]["train"]:
        notes.append(f"k-NN: most of the {result['images']['train']} training images vote, which says little.")
    made.caption = " ".join(notes) or None
    return made


def has_fitted(result: Mapping[str, Any]) -> bool:
    """Whether the linear probe learned what can be read off the features: it may not do worse, by more than two points,
    on the images it was trained on (in older results: on test images) than k-NN does on test images."""
    if result.get("probe_diverged"):
        return False
    found, vote = result.get("probe_train", result.get("probe")), result.get("knn")
    return found is None or vote is None or float(found) >= float(vote) - 0.02


def class_table(result: dict[str, Any], *, title: str = "Accuracy by class") -> Table:
    """Per-class accuracy in per cent, one row a class."""
    kinds = result["per_class"]
    made = Table(title=title, title_justify="left")
    made.add_column("class")
    for kind in kinds:
        made.add_column(_RATES[kind], justify="right")
    for name in next(iter(kinds.values())):
        made.add_row(name, *(_percent(rates[name]) for rates in kinds.values()))
    return made


def save(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the result as JSON, whole or not at all."""
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with writing(target, "make room or make its folder writable, then evaluate again"):
        try:
            partial.write_text(text, encoding="utf-8", errors="surrogateescape")  # a class may have a folder's name
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
