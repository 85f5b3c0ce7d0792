"""The README's Python runs as it stands there, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duel import cli

README = Path(__file__).parent.parent / "README.md"


def test_the_snippets_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(snippets) == 6
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)
    assert len(names["memory"]) == 512
    assert names["slots"].shape == (64,)
    assert names["blocked"].shape == (64, 512)
    assert names["done"].duplicates.shape == (512,)
    queue = names["queue"]
    queue.update(names["memory"].embeddings)
    assert queue.update(names["embeddings"]).tolist() == list(range(64))
    assert (tmp_path / "runs" / "camera" / "memory.csv").exists()


def test_the_commands_exist_with_the_options_shown(capsys):
    commands = re.findall(r"^duel (\w+)(.*)$", README.read_text(), flags=re.MULTILINE)
    assert {name for name, _ in commands} >= {"train", "evaluate", "export"}
    for name, rest in commands:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        shown = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in shown, (name, option)
