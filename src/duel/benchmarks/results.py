"""The file a benchmark leaves: where the figures come from, and a row for each that was taken, written as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from duel.errors import UserError
from duel.runs import describe, write_json


class Results:
    """Rows in a JSON file that is rewritten with each of them, so that an interrupted benchmark keeps what it has."""

    def __init__(self, benchmark: str, device: torch.device, out: str | None = None, **about: Any) -> None:
        self.path = Path(out or f"runs/bench-{benchmark}-{device.type}.json")
        self.rows: list[dict[str, Any]] = []
        self._head = {"benchmark": benchmark, **describe(device), **about}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror}; give another --out") from error

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        write_json(self.path, {**self._head, "rows": self.rows})
