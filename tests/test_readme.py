"""The Python of the README and of the pages that it names runs as it stands there, and their commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duel import cli

ROOT = Path(__file__).parent.parent
NAMES = ("README.md", "docs/memory.md", "docs/training.md", "docs/reproduction.md")
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
TEXT = "\n".join(PAGES.values())


def test_the_snippets_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(snippets) == 8
    names: dict = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    assert len(names["memory"]) == 512
    assert names["slots"].shape == (64,)
    assert len(set(names["batch"].tolist())) == 256
    assert names["blocked"].shape == (64, 512)
    assert len(names["seen"]) == 64
    assert names["done"].duplicates.shape == (512,)
    queue = names["queue"]
    queue.update(names["memory"].embeddings)
    assert queue.update(names["embeddings"]).tolist() == list(range(64))
    assert (tmp_path / "runs" / "camera" / "memory.csv").exists()


def test_the_commands_exist_with_the_options_shown(capsys):
    commands = re.findall(r"^ *duel (\w+) (.*)$", TEXT, flags=re.MULTILINE)
    assert {name for name, _ in commands} >= {"train", "evaluate", "export", "reproduce"}
    for name, rest in commands:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        shown = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in shown, (name, option)


def test_links_lead_somewhere():
    found = 0
    for name, page in PAGES.items():
        for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", page):
            assert ((ROOT / name).parent / target).exists(), (name, target)
            found += 1
    assert found > 10
