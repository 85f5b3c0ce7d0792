"""Images: where they come from, how they are biased, streamed and augmented. Labels are for measuring only."""

from duel.data.arrays import from_arrays
from duel.data.augment import PRESETS, Augment, Preset, normalise
from duel.data.bias import ClassDraw, class_weights, item_probabilities, subset_ids
from duel.data.folder import FolderSource
from duel.data.live import LiveStream, raw_frames
from duel.data.sources import NAMES, STATS, ArraySource, Source, load, statistics
from duel.data.stream import Stream, batches

__all__ = [
    "NAMES",
    "PRESETS",
    "STATS",
    "ArraySource",
    "Augment",
    "ClassDraw",
    "FolderSource",
    "LiveStream",
    "Preset",
    "Source",
    "Stream",
    "batches",
    "class_weights",
    "from_arrays",
    "item_probabilities",
    "load",
    "normalise",
    "raw_frames",
    "statistics",
    "subset_ids",
]
