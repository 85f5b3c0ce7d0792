from __future__ import annotations

import csv
import dataclasses
import io
import os
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from duel import WorkingMemory, contents, recipes, runs
from duel.data import ArraySource
from duel.errors import Notice, UserError
from duel.inputs import Inputs
from duel.policies import AdaptiveDuel, Duel
from duel.trained import load_trained
from duel.training import train
from pools import clusters

IDS = {"id": ((), torch.int64)}


def listed(path):
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def memory_of(policy, *, size=40, updates=8):
    rows, classes = clusters(200, 8, 0)
    memory = WorkingMemory(size, 8, policy, IDS)
    for step in range(updates):
        ids = torch.arange(200)[20 * step : 20 * step + 20]
        memory.update(rows[ids].float(), id=ids)
    memory.refresh(torch.arange(5), memory.embeddings[:5].clone())
    return memory, classes


def source_of(labels=None):
    return ArraySource(torch.zeros(200, 3, 2, 2, dtype=torch.uint8), labels)


@pytest.mark.parametrize("policy", [Duel("gaussian:0.1"), AdaptiveDuel()])
def test_the_most_duplicated_items_come_first(policy, tmp_path):
    memory, classes = memory_of(policy)
    names = [f"{i}.png" for i in range(200)]
    contents.write(tmp_path / runs.MEMORY, memory, source_of(classes), names)
    rows = listed(tmp_path / runs.MEMORY)
    assert sorted(int(row["slot"]) for row in rows) == list(range(40))
    counts = memory.expected_duplicates()
    assert len(counts.unique()) > 20
    for row in rows:
        slot, item = int(row["slot"]), int(row["id"])
        assert item == int(memory["id"][slot])
        assert row["file"] == f"{item}.png"
        assert row["class"] == str(int(classes[item]))
        assert int(row["age"]) == int(memory.age[slot])
        assert int(row["staleness"]) == int(memory.staleness[slot])
        assert float(row["duplicates"]) == pytest.approx(float(counts[slot]), rel=1e-5)
    shown = [float(row["duplicates"]) for row in rows]
    assert shown == sorted(shown, reverse=True)


def test_an_item_in_several_slots_says_so(tmp_path):
    memory = WorkingMemory(4, 8, "fifo", IDS)
    memory.update(clusters(4, 8, 0)[0].float(), id=torch.tensor([7, 3, 7, 9]))
    contents.write(tmp_path / runs.MEMORY, memory, source_of())
    assert [(row["id"], row["held"]) for row in listed(tmp_path / runs.MEMORY)] == [
        ("7", "2"), ("3", "1"), ("7", "2"), ("9", "1"),
    ]  # fmt: skip


@pytest.mark.parametrize(("policy", "updates"), [("fifo", 8), ("minred", 8), (Duel(), 1)])
def test_what_is_not_known_is_left_empty(policy, updates, tmp_path):
    memory, _ = memory_of(policy, updates=updates)
    contents.write(tmp_path / runs.MEMORY, memory, source_of())
    rows = listed(tmp_path / runs.MEMORY)
    assert [int(row["slot"]) for row in rows] == list(range(len(memory)))
    assert {(row["file"], row["class"], row["duplicates"]) for row in rows} == {("", "", "")}


def test_a_name_that_is_no_text_is_written_as_it_is(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    memory, _ = memory_of("fifo")
    contents.write(tmp_path / runs.MEMORY, memory, source_of(), [name] * 200)
    assert listed(tmp_path / runs.MEMORY)[0]["file"] == name
    assert b"caf\xe9.png" in (tmp_path / runs.MEMORY).read_bytes()


@pytest.mark.parametrize("residency", ["device", "stream"])
def test_a_run_on_a_folder_names_the_files_it_holds(residency, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        Path("pictures", name).mkdir(parents=True)
        for i in range(30):
            Image.new("RGB", (8, 8), (8 * i, 100 * (name == "cat"), 9)).save(f"pictures/{name}/{i}.png")
    for i in (1, 2):  # one of them, at least, is trained on
        Path(f"pictures/cat/{i}.png").write_bytes(b"no image" * i)  # later ones get other ids where it is left out
    config = recipes.demo("d-simclr", source="memory")
    config = dataclasses.replace(
        config, data="pictures", image_size=8, residency=residency, workers=0, out="run", steps=4, batch_size=8,
        memory_size=16, checkpoint_every=2,
    )  # fmt: skip
    saved = []
    write = contents.write
    monkeypatch.setattr(contents, "write", lambda *args: (saved.append(args), write(*args)))
    with pytest.warns(UserWarning, match="unreadable file"):
        train(config, console=Console(file=io.StringIO()))
    assert len(saved) == 2
    rows = listed(Path("run", runs.MEMORY))
    ids = load_trained("run").memory_ids
    assert [int(row["id"]) for row in rows] == [int(ids[int(row["slot"])]) for row in rows]
    source = saved[-1][2]
    for row in rows:
        path = Path(row["file"])
        assert path.parts[:2] == ("pictures", row["class"])
        red = int(source.images(torch.tensor([int(row["id"])]))[0, 0].float().mean().round())
        assert path.stem == str(round(red / 8))
    plain = dataclasses.replace(recipes.demo(), out="run", steps=1, batch_size=8)
    train(plain, overwrite=True, console=Console(quiet=True))
    assert not Path("run", runs.MEMORY).exists()


def test_a_list_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(contents, "write", full)
    said = io.StringIO()
    config = dataclasses.replace(recipes.demo("d-simclr"), out="run", steps=2, batch_size=8, memory_size=16)
    assert train(config, console=Console(file=said, width=200)).finished
    assert f"warning: cannot write {Path('run', runs.MEMORY)} (No space left on device)" in said.getvalue()


@pytest.mark.parametrize("change", ["fewer", "renamed"])
def test_a_run_is_not_resumed_on_other_files(change, tmp_path, monkeypatch):
    """The stream and the memory know items by number: a name less, and every number means another file."""
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    for i in range(30):
        Image.new("RGB", (8, 8), (8 * i, 0, 9)).save(f"pictures/{i:02}.png")
    config = dataclasses.replace(
        recipes.demo("d-simclr"), data="pictures", image_size=8, out="run", steps=4, batch_size=8, memory_size=16,
        checkpoint_every=2,
    )  # fmt: skip
    train(config, console=Console(quiet=True), until=0.0)
    if change == "fewer":
        Path("pictures/00.png").unlink()
    else:
        Path("pictures/00.png").rename("pictures/99.png")
    with pytest.raises(UserError, match=r"'pictures' has other images than when run.*put the files back"):
        train(config, console=Console(quiet=True), resume=True)
    if change == "renamed":
        Path("pictures/99.png").rename("pictures/00.png")
        assert train(config, console=Console(quiet=True), resume=True).finished


def test_images_that_are_kept_apart_are_said(tmp_path):
    for kind in ("März 2024", "b"):
        (tmp_path / "in" / kind).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (8, 8), (i, len(kind), 0)).save(tmp_path / "in" / kind / f"{i}.png")
    config = dataclasses.replace(recipes.demo("simclr", str(tmp_path / "in")), image_size=8, batch_size=4)
    with pytest.warns(Notice, match=r"its 2 subfolders are taken for classes, and 2 of 10 images kept for testing"):
        assert Inputs.load(config, torch.device("cpu"), test=False).items == 8
    os.rename(tmp_path / "in", tmp_path / "train")
    config = dataclasses.replace(config, data=str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        assert Inputs.load(config, torch.device("cpu"), test=False).items == 10
