from __future__ import annotations

import json

import pytest

from duel.cli import main


def test_bench_replace_checks_victims_and_writes_json(tmp_path, capsys):
    out = tmp_path / "bench.json"
    command = ["bench", "replace", "--size", "64", "--batch", "16", "--dim", "16", "--repeats", "2", "--device", "cpu"]
    assert main([*command, "--scores", "linear", "gaussian:0.1", "--out", str(out)]) == 0
    assert "64×16×16" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["benchmark"] == "replace"
    assert len(written["rows"]) == 4
    for row in written["rows"]:
        assert row["same_victims"] == 16
        assert row["largest_error_in_n"] < 1e-4
        assert row["update_speedup"] == pytest.approx(row["reference_ms"] / row["update_ms"])
    assert written["versions"]["torch"]


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--scores", "gausian"], "did you mean"), (["--size", "0"], "at least 1"), (["--repeats", "0"], "at least 1")],
)
def test_bench_names_mistakes(option, message, capsys):
    assert main(["bench", "replace", "--device", "cpu", *option]) == 2
    assert message in capsys.readouterr().err
