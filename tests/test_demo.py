from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from duel.demo import configs, demo
from duel.errors import UserError


def test_the_demo_runs_twice_and_says_where(tmp_path: Path) -> None:
    said = io.StringIO()
    out = tmp_path / "demo"
    rows = demo(out=str(out), steps=2, console=Console(file=said, width=120))
    again = demo(out=str(out), steps=2, console=Console(file=said, width=120))
    assert rows == again
    assert [row.name for row in rows] == ["balanced stream", "×27, FIFO memory", "×27, DUEL memory"]
    assert rows[0].stream < 0.15
    assert rows[1].stream > 0.7
    assert rows[1].memory > 0.6
    assert f"run directory: {out}" in said.getvalue()
    assert "5-shot" in said.getvalue()
    saved = json.loads((out / "demo.json").read_text())
    assert [row["few_shot"] for row in saved["rows"]] == [row.few_shot for row in rows]
    assert saved["bias_mode"] == "draw"


def test_the_runs_differ_in_bias_and_policy_only(tmp_path: Path) -> None:
    balanced, fifo, duel = configs(out=tmp_path, steps=3, bias=27.0, seed=5).values()
    assert balanced.differences(fifo) == ["bias: 1.0 -> 27.0"]
    assert fifo.differences(duel) == ["policy: fifo -> duel"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="something else than an earlier demo"):
        demo(out=str(tmp_path), steps=2)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.slow
def test_the_demo_shows_the_effect(tmp_path: Path) -> None:
    balanced, fifo, duel = demo(out=str(tmp_path / "demo"), console=Console(file=io.StringIO()))
    assert fifo.memory > 0.6
    assert duel.memory < 0.3
    assert fifo.few_shot < duel.few_shot
    assert fifo.few_shot < balanced.few_shot
