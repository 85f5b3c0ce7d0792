"""The file a benchmark leaves: where the figures come from, and a row for each that was taken, written as they come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from duel.errors import UserError
from duel.runs import describe, write_json


class Results:
    """Rows in a JSON file that is rewritten with each of them, so that an interrupted benchmark keeps what it has."""

    def __init__(
        self,
        benchmark: str,
        device: torch.device,
        out: str | None,
        call: Mapping[str, Any],
        *,
        append: bool = False,
        **about: Any,
    ) -> None:
        """call: the arguments of the module's `report`, for the record where the command line was not used.

        append: keep the rows that the file has; every row then says itself where it comes from.
        """
        self.path = Path(out or f"runs/bench-{benchmark}-{device.type}.json")
        self.benchmark, self.append = benchmark, append
        given = ", ".join(f"{name}={value!r}" for name, value in {"device": str(device), "out": out, **call}.items())
        self._origin = describe(device, call=f"duel.benchmarks.{benchmark}.report({given})") | about
        self.rows = self._earlier() if append and self.path.exists() else []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror}; give another --out") from error

    def _earlier(self) -> list[dict[str, Any]]:
        try:
            origin = json.loads(self.path.read_text())
            rows, benchmark = origin.pop("rows"), origin.pop("benchmark")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"cannot append to {self.path}: {error!r}; give another --out") from error
        if benchmark != self.benchmark:
            raise UserError(f"cannot append to {self.path}: it is of duel bench {benchmark}; give another --out")
        return [{**row, **{name: value for name, value in origin.items() if name not in row}} for row in rows]

    def add(self, row: dict[str, Any]) -> None:
        """Write a row; one of the same name makes room for it."""
        row = row | self._origin if self.append else dict(row)
        names = [other.get("name") for other in self.rows]
        if "name" in row and row["name"] in names:
            self.rows[names.index(row["name"])] = row
        else:
            self.rows.append(row)
        write_json(self.path, {"benchmark": self.benchmark, **self._origin, "rows": self.rows})
