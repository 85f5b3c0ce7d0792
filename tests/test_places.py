"""A run on a folder or a file is used from any directory, and goes on where its data have moved."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from duel import checkpoint, cli, recipes, runs
from duel.config import TrainConfig
from duel.errors import Notice, UserError
from duel.evaluation.settings import EvaluationSettings
from duel.inputs import Inputs
from duel.trained import evaluate, evaluation_file, load_trained
from duel.training import RunResult, train

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK: dict[str, Any] = {"device": "cpu", "settings": EvaluationSettings(probe_epochs=1, shot_repeats=1)}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is done in home/, which has a folder and a file of pictures."""
    for name in ("home", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "home")
    pictures("pictures")
    np.savez("arrays.npz", images=colours(30), labels=np.arange(30) % 2)


def colours(count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return np.repeat(np.repeat(rng.integers(0, 256, (count, 1, 1, 3), dtype=np.uint8), 8, 1), 8, 2)


def pictures(folder: str, seed: int = 0) -> None:
    for i, image in enumerate(colours(30, seed)):
        path = Path(folder, "ab"[i % 2], f"{i:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def small(data: str = "pictures", **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "out": "run", "steps": 4, "batch_size": 8, "memory_size": 16, "dim": 16, "image_size": 8, "checkpoint_every": 2,
    }  # fmt: skip
    return dataclasses.replace(recipes.demo("d-simclr", data), **{**settings, **changes})


def go(config: TrainConfig, **options: Any) -> RunResult:
    return train(config, console=Console(quiet=True), **options)


def weights(run: str) -> Any:
    return checkpoint.load_latest(Path(run) / runs.CHECKPOINTS)[1]["training"]["method"]


@pytest.mark.parametrize("data", ["pictures", "arrays.npz", "./pictures/"])
def test_a_run_is_used_from_anywhere(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go(small(data, out="whole"))
    go(small(data), until=0.0)
    monkeypatch.chdir("../elsewhere")
    result = go(dataclasses.replace(runs.load_config(Path("../home/run")), out="../home/run"), resume=True)
    assert result.finished
    assert runs.load_config(Path("../home/run")).data == data  # what the run is stays as it was
    found, wanted = weights("../home/run"), weights("../home/whole")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert evaluate("../home/run", **QUICK)["images"]["test"] == 6
    for place in (None, f"../home/{data}"):
        assert evaluation_file("../home/run", place) == Path("../home/run", runs.EVALUATION)
    monkeypatch.chdir("../home")
    assert evaluate("run", **QUICK)["images"]["test"] == 6


def test_another_folder_of_that_name_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    go(small())
    monkeypatch.chdir("../elsewhere")
    pictures("pictures", seed=1)
    Path("pictures/a/00.png").unlink()
    assert evaluate("../home/run", **QUICK)["images"] == {"train": 24, "test": 6}
    assert evaluation_file("../home/run", "pictures").name != runs.EVALUATION


def test_a_project_that_was_moved_goes_on_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(small(), until=0.0)
    (tmp_path / "home").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert go(small(), resume=True).finished
    assert evaluate("run", **QUICK)["images"]["test"] == 6


def test_data_that_have_moved_are_named_again(capsys: pytest.CaptureFixture[str]) -> None:
    go(small(), until=0.0)
    home = Path.cwd()
    Path("pictures").rename("photos")
    for command in (["evaluate", "run"], ["train", "--out", "run", "--resume"]):
        assert cli.main(command) == cli.USER_MISTAKE
        said = capsys.readouterr().err
        assert f"run was trained on 'pictures', and there is nothing at '{home / 'pictures'}' now; give its" in said
        assert "--data" in said
    assert cli.main(["train", "--out", "run", "--resume", "--data", "photos"]) == 0
    assert runs.load_config(Path("run")).data == "pictures"
    assert runs.read_meta(Path("run"))[runs.DATA_AT] == str(home / "photos")
    assert evaluate("run", **QUICK)["images"]["test"] == 6
    Path("photos").rename("again")  # a finished run is told, too
    assert cli.main(["train", "--out", "run", "--resume", "--data", "again"]) == 0
    assert evaluate("run", **QUICK)["images"]["test"] == 6


@pytest.mark.parametrize("kind", ["other names", "other pictures", "other arrays", "a data set"])
def test_a_run_does_not_go_on_with_other_images(kind: str) -> None:
    go(small("arrays.npz" if kind == "other arrays" else "pictures"), until=0.0)
    shutil.copytree("pictures", "other names")
    Path("other names/a/00.png").rename("other names/a/zz.png")
    pictures("other pictures", seed=1)
    np.savez("other arrays.npz", images=colours(30, seed=1), labels=np.arange(30) % 2)
    data = {"other arrays": "other arrays.npz", "a data set": "digits"}.get(kind, kind)
    message = "data: pictures -> digits" if kind == "a data set" else f"'{data}' has other images than when run"
    with pytest.raises(UserError, match=message):
        go(small(data), resume=True)


def test_items_are_known_as_before() -> None:
    """Checkpoints have this; one of another form could not be resumed."""
    inputs = Inputs.load(small(), torch.device("cpu"), test=False)
    names = "\0".join(inputs.train.paths.tolist())
    assert names.startswith("pictures/a/")
    assert inputs.fingerprint == hashlib.sha256(f"24\0{names}".encode()).hexdigest()
    for data in (str(Path.cwd() / "pictures"), "./pictures/", "../home/pictures"):
        again = Inputs.load(small(data), torch.device("cpu"), test=False, known_as="pictures")
        assert again.fingerprint == inputs.fingerprint


def test_a_run_on_a_data_set_says_nothing_of_where_it_was_made() -> None:
    go(small("digits", steps=1))
    assert runs.DATA_AT not in runs.read_meta(Path("run"))
    assert str(Path.cwd()) not in Path("run", runs.META).read_text()


def test_images_that_were_trained_on_are_not_measured_on() -> None:
    """Which images are kept for testing depends on all that there are."""
    go(small())
    with pytest.warns(Notice, match="its test part was taken from the same images"):
        assert evaluate("run", **QUICK)["probe"] is not None
    extra = Path("pictures/a/extra.png")
    shutil.copy("pictures/b/01.png", extra)
    with pytest.raises(
        UserError, match=r"'pictures' has no test part of its own.*measure on other labelled images with --data"
    ):
        evaluate("run", **QUICK)
    for same in ("pictures", "./pictures/", "../home/pictures"):  # as the run's own, by another name, too
        with pytest.raises(UserError, match="has no test part of its own"):
            evaluate("run", data=same, **QUICK)
    pictures("others", seed=1)
    Path("others/a/00.png").rename("others/a/one.png")
    with pytest.warns(Notice, match="if run was trained on any of these pictures"):
        assert evaluate("run", data="others", **QUICK)["probe"] is not None
    extra.unlink()
    assert evaluate("run", **QUICK)["probe"] is not None


def test_a_part_for_testing_of_its_own_stays_one(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pictures(f"parted/{part}", seed=len(part))
    go(small("parted"))
    shutil.copy("pictures/a/00.png", "parted/train/a/extra.png")
    assert evaluate("run", **QUICK)["probe"] is not None


@pytest.mark.parametrize("data", ["pictures", "arrays.npz"])
def test_a_run_that_took_no_notice_of_labels_is_measured_elsewhere(data: str) -> None:
    go(small(data, unlabelled=True))
    for own in (None, data, f"./{data}"):
        with pytest.raises(UserError, match=r"trained on all images .*, so that none is left to measure on"):
            evaluate("run", data=own, **QUICK)
    pictures("others", seed=1)
    assert evaluate("run", data="others", **QUICK)["probe"] is not None


def test_such_a_run_has_a_test_part_where_the_folder_has_one() -> None:
    for part in ("train", "test"):
        pictures(f"parted/{part}", seed=len(part))
    go(small("parted", unlabelled=True))
    assert evaluate("run", **QUICK)["images"] == {"train": 30, "test": 30}


def divided(folder: str) -> None:
    for i, path in enumerate(sorted(Path(folder).glob("[ab]/*.png"))):
        to = Path(folder, "test" if i % 5 == 0 else "train", path.parent.name)
        to.mkdir(parents=True, exist_ok=True)
        path.rename(to / path.name)
    for name in "ab":
        Path(folder, name).rmdir()


@pytest.mark.parametrize("unlabelled", [False, True])
def test_a_folder_that_was_divided_after_training_is_not_measured_on(unlabelled: bool) -> None:
    go(small(unlabelled=unlabelled))
    divided("pictures")
    with pytest.raises(UserError, match=r"pictures: \d of 6 images for testing were trained on by run"):
        evaluate("run", **QUICK)


def test_a_folder_that_was_trained_on_as_a_whole_is_not_measured_on_elsewhere() -> None:
    go(small(unlabelled=True))
    shutil.copytree("pictures", "../elsewhere/photos")
    Path("../elsewhere/photos/a/00.png").rename("../elsewhere/photos/a/zz.png")
    for data in ("../elsewhere/photos", "pictures"):
        Path("pictures").rename("moved") if data == "pictures" else None
        with pytest.raises(UserError, match="6 of 6 images for testing were trained on by run"):
            evaluate("run", data="moved" if data == "pictures" else data, **QUICK)


def test_training_images_are_not_measured_on_by_another_name() -> None:
    for part in ("train", "test"):
        pictures(f"parted/{part}", seed=len(part))
    go(small("parted"))
    with pytest.raises(UserError, match="of 6 images for testing were trained on by run"):
        evaluate("run", data="parted/train", **QUICK)


def test_a_few_images_that_are_in_both_parts_are_said() -> None:
    for part in ("train", "test"):
        pictures(f"parted/{part}", seed=len(part))
    shutil.copy("parted/train/a/00.png", "parted/test/a/00.png")
    go(small("parted"))
    with pytest.warns(Notice, match="1 of 30 images for testing was trained on by run, which flatters every figure"):
        evaluate("run", **QUICK)
    Path("run", runs.TRAINED_ON).unlink()  # of an older run: nothing to go by
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        evaluate("run", **QUICK)


def test_arrays_in_another_order_are_not_measured_on() -> None:
    go(small("arrays.npz"))
    order = np.random.default_rng(3).permutation(30)
    np.savez("arrays.npz", images=colours(30)[order], labels=(np.arange(30) % 2)[order])
    with pytest.raises(UserError, match="images for testing were trained on by run"):
        evaluate("run", **QUICK)


def test_arrays_that_have_changed_are_not_measured_on() -> None:
    go(small("arrays.npz"))
    assert evaluate("run", **QUICK)["images"]["test"] == 6
    np.savez("arrays.npz", images=colours(40), labels=np.arange(40) % 2)
    with pytest.raises(UserError, match="has no test part of its own"):
        evaluate("run", **QUICK)


def test_a_class_with_an_odd_name_is_measured() -> None:
    for name in ("a", "b"):
        for i, image in enumerate(colours(12, seed=ord(name))):
            path = os.path.join(b"odd", name.encode() + b"\xff", b"%d.png" % i)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                Image.fromarray(image).save(file, "png")
    go(small("odd"))
    assert evaluate("run", **QUICK)["probe"] is not None
    assert b"a\xff" in Path("run", runs.EVALUATION).read_bytes()


def test_files_are_listed_as_the_run_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another directory, too, so that two lists can be compared."""
    go(small(), until=0.0)
    monkeypatch.chdir("../elsewhere")
    go(small(out="../home/run"), resume=True)
    with Path("../home/run", runs.MEMORY).open() as file:
        listed = [row["file"] for row in csv.DictReader(file)]
    assert len(listed) == 16
    assert all(name.startswith("pictures/") for name in listed)


@pytest.mark.parametrize("to", ["photos", "../elsewhere/pictures"])
def test_files_of_a_folder_that_is_called_otherwise_are_listed_where_they_are(to: str) -> None:
    started = str(Path("pictures").absolute())
    go(small(started), until=0.0)
    Path("pictures").rename(to)
    go(small(to), resume=True)
    with Path("run", runs.MEMORY).open() as file:
        assert all(Path(row["file"]).is_file() for row in csv.DictReader(file))


@pytest.mark.parametrize("change", [{"dim": 24}, {"backbone": "resnet18"}])
def test_weights_of_another_network_are_told_to_be_such(change: dict[str, Any]) -> None:
    """As those of an older version may be, by whose settings another one was built."""
    go(small(), until=0.0)
    config = Path("run", runs.CONFIG)
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UserError, match=r"the weights in run are of another network .* \(run/run.json has its commit"):
        load_trained("run")
    with pytest.raises(UserError, match="of another network"):
        go(dataclasses.replace(small(), **change), resume=True)


def test_other_errors_of_loading_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), runs.same_network(Path("run")):
        raise RuntimeError("out of memory")
