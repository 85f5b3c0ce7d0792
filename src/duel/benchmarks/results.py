"""The file a benchmark leaves: where the figures come from, and a row for each that was taken, written as they come."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from duel.errors import UserError
from duel.runs import describe, write_json


class Results:
    """Rows in a JSON file that is rewritten with each of them, so that an interrupted benchmark keeps what it has."""

    def __init__(
        self, benchmark: str, device: torch.device, out: str | None, call: Mapping[str, Any], **about: Any
    ) -> None:
        """call: the arguments of the module's `report`, for the record where the command line was not used."""
        self.path = Path(out or f"runs/bench-{benchmark}-{device.type}.json")
        self.rows: list[dict[str, Any]] = []
        given = ", ".join(f"{name}={value!r}" for name, value in {"device": str(device), "out": out, **call}.items())
        self._head = {
            "benchmark": benchmark,
            **describe(device, call=f"duel.benchmarks.{benchmark}.report({given})"),
            **about,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror}; give another --out") from error

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        write_json(self.path, {**self._head, "rows": self.rows})
