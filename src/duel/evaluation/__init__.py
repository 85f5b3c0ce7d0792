"""Measuring frozen features: neighbours, linear probe, few shots, geometry; and what a memory holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duel.evaluation.features import FeatureCache, extract, reestimate_batchnorm, reestimated_batchnorm
    from duel.evaluation.geometry import class_cosines, class_means, effective_rank, etf_distance
    from duel.evaluation.knn import Neighbours, nearest, topk, weighted_knn
    from duel.evaluation.probe import linear_probe, nearest_centroid
    from duel.evaluation.protocol import evaluate, online_measures
    from duel.evaluation.report import class_table, save, table
    from duel.evaluation.settings import EvaluationSettings

# Loaded on first use: the settings alone are needed for the command line's help, which must not wait for torch.
_HOME = {
    "features": ("FeatureCache", "extract", "reestimate_batchnorm", "reestimated_batchnorm"),
    "geometry": ("class_cosines", "class_means", "effective_rank", "etf_distance"),
    "knn": ("Neighbours", "nearest", "topk", "weighted_knn"),
    "probe": ("linear_probe", "nearest_centroid"),
    "protocol": ("evaluate", "online_measures"),
    "report": ("class_table", "save", "table"),
    "settings": ("EvaluationSettings",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "EvaluationSettings",
    "FeatureCache",
    "Neighbours",
    "class_cosines",
    "class_means",
    "class_table",
    "effective_rank",
    "etf_distance",
    "evaluate",
    "extract",
    "linear_probe",
    "nearest",
    "nearest_centroid",
    "online_measures",
    "reestimate_batchnorm",
    "reestimated_batchnorm",
    "save",
    "table",
    "topk",
    "weighted_knn",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
