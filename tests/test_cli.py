from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from duel import cli, loop, recipes, runs, training
from duel.config import TrainConfig
from duel.messages import as_options

TINY = ["--recipe=demo", "--data=digits", "--steps=4", "--batch-size=16", "--dim=16"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parsed(*args: str) -> TrainConfig:
    command = cli._parse(["train", *args])
    assert isinstance(command, cli.Train)
    return TrainConfig(**vars(command.config))


def test_help_is_quick_and_lists_every_command() -> None:
    code = "import sys; from duel.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    for name in ("demo", "train", "evaluate", "export"):
        assert f"• {name}" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "tyro" in imported
    assert not imported & {"torch", "timm", "lightning", "torchvision", "sklearn", "numpy"}


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([])
    assert done.value.code == 0
    assert "• train" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"duel {importlib.metadata.version('duel-ssl')}\n"


def test_help_of_train_has_examples_and_recipe_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["train", "--recipe", "paper", "--method", "d-moco", "--help"])
    assert not done.value.code
    text = capsys.readouterr().out
    assert "duel train --out runs/simclr --resume" in text
    assert "resnet50" in text


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--method", "d-simclr", "--recipe", "paper"], "0, here all"),
        (["--method", "d-moco", "--recipe", "paper"], "0"),
        (["--method", "d-simclr"], "512"),
    ],
)
def test_help_says_how_many_slots_are_refreshed(
    args: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", *args, "--help"])
    words = capsys.readouterr().out.replace("│", " ").split()
    about = words[words.index("--refresh") : words.index("--memory-negatives,")]
    assert " ".join(about).endswith(f"(default: {shown})")


def test_a_yes_or_no_needs_no_value() -> None:
    assert parsed("--method", "moco", "--in-batch-negatives", "--symmetric", "False").in_batch_negatives is True
    assert parsed("--method=moco", "--in_batch_negatives").in_batch_negatives is True
    config = parsed("--method", "moco", "--in-batch-negatives=False", "--symmetric", "None", "--compile")
    assert (config.in_batch_negatives, config.symmetric, config.compile) == (False, None, True)
    command = cli._parse(["reproduce", "table2", "--compile"])
    assert isinstance(command, cli.Reproduce)
    assert command.compile is True


def test_a_recipe_sets_the_defaults_and_options_override_it() -> None:
    config = parsed("--recipe", "paper", "--method", "d-moco", "--lr", "0.01")
    assert (config.backbone, config.temperature, config.lr, config.score) == ("resnet50", 0.7, 0.01, "linear")
    assert (
        parsed("--method", "d-moco", "--score", "0.1*linear+0.9*gaussian:0.01").score == "0.1*linear+0.9*gaussian:0.01"
    )
    blind = parsed("--method", "simclr", "--source", "memory", "--policy", "reservoir", "--space", "pixels")
    assert not blind.memory_encoded  # which is all that it asks of a space
    assert parsed("--batch-size", "512").lr == pytest.approx(0.24)
    assert parsed("--batch_size=512").lr == pytest.approx(0.24)
    literal = "--data cifar10 --method simclr --recipe standard --bias 27 --steps 5000 --out runs/x"
    config = parsed(*literal.split())
    assert (config.data, config.method, config.bias, config.steps, config.run_dir) == (
        "cifar10", "simclr", 27.0, 5000, "runs/x"
    )  # fmt: skip
    assert parsed("--bias-kind", "weights", "--weights", "1", "2.5").weights == (1.0, 2.5)
    first = parsed("--method", "d-simclr", "--source", "memory", "--data", "cifar10", "--bias", "27")
    assert first == dataclasses.replace(recipes.standard("d-simclr", source="memory"), bias=27.0)
    assert first == parsed("--method", "d-simclr", "--bias", "27")
    assert first.memory_size > parsed("--method", "d-simclr", "--source", "stream").memory_size
    queue = parsed("--method", "simclr", "--policy", "fifo", "--memory-size", "512")
    assert (queue.negatives_from_memory, queue.refreshed_slots) == (True, 512)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--bias", "0.5"], "error: --bias must be >= 1, got 0.5"),
        (["train", "--recipe", "papr"], "did you mean 'paper'"),
        (["train", "--method", "simcrl"], "did you mean 'simclr'"),
        (["train", "--out", "nowhere", "--resume"], "there is no run directory nowhere"),
        (["train", "--resume", "runs/x"], "the run to go on with is named by --out: --out runs/x --resume"),
        (["evaluate", "nowhere"], "there is no run directory nowhere"),
        (["export", "nowhere"], "there is no run directory nowhere"),
        (["train", "--data", "cifar11"], "did you mean 'cifar10'"),
        (["train", "--data", "cifar10"], "--download"),
        (["evaluate", "nowhere", "--shots", "0"], "error: --shots must be >= 1"),
        (["evaluate", "nowhere", "--probe-epochs", "0"], "error: --probe-epochs must be >= 1"),
        (["train", "--batch-size", "0"], "error: --batch-size must be >= 1, got 0"),
        (["train", "--policy", "fiffo"], "did you mean 'fifo'"),
        (["train", "--optimizer=sdg"], "did you mean 'sgd'"),
        (["train", "--augment", "non"], "did you mean 'none'"),
        (
            ["train", "--method", "simclr", "--memory-size", "64", "--score", "quadratic"],
            "so --memory-size, --score would",
        ),
        (
            ["train", "--method", "moco", "--score", "linear", "--admit", "compete"],
            "policy 'fifo' does not look at --score, --admit; leave that out, or use policy duel\n",
        ),
        (["train", "--method", "d-moco", "--policy", "adaptive", "--at-once"], "does not look at --at-once"),
        (
            ["train", "--method", "d-moco", "--policy", "fifo", "--space", "backbone"],
            "does not look at --space; leave that out, or use policy duel or dedup or minred or adaptive",
        ),
        (["train", "--space", "pixels", "--method", "d-simclr", "--refresh", "9"], "so --refresh would do nothing"),
        (["train", "--method", "d-byol", "--source", "stream"], "use --source memory"),
        (["train", "--method", "simclr", "--queue", "8"], "error: --queue is for moco"),
        (["train", "--seed", str(2**63)], "error: --seed must be a whole number >= 0 and below 2^63"),
        (["evaluate", "nowhere", "--seed", "-5"], "error: --seed must be a whole number >= 0"),
        (["evaluate", "nowhere", "--probe-lr", "inf"], "error: --probe-lr must be > 0 and finite, got inf"),
        (["reproduce", "table2", "--scale", "smoke", "--minutes", "nan"], "must be >= 1 and minutes > 0"),
    ],
)
def test_mistakes_are_told_without_a_stack_trace(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == cli.USER_MISTAKE
    error = capsys.readouterr().err
    assert error.startswith("duel: error: ")
    assert message in error
    assert "Traceback" not in error


def test_names_are_checked_before_torch_is_loaded() -> None:
    code = "import sys; from duel.cli import main; main(['train', *sys.argv[1:]]); print('torch' in sys.modules)"
    for args in (["--score", "0.1*linear+gausian"], ["--policy", "lru"], ["--augment", "digit"], ["--recipe", "papr"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
        assert "unknown" in done.stderr
        assert done.stdout.strip() == "False", args


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("batch_size 8 exceeds memory_size 4.", "--batch-size 8 exceeds --memory-size 4."),
        ("the stream's batch is not the item's stream_batch", "the stream's batch is not the item's --stream-batch"),
        ("nothing at 'batch_size' or \"batch_size\"", "nothing at 'batch_size' or \"batch_size\""),
        ("runs/batch_size is there, batch_size.npz too", "runs/batch_size is there, batch_size.npz too"),
        ("lower --refresh, my_batch_size, batch_sizes", "lower --refresh, my_batch_size, batch_sizes"),
        ("keeps no memory, so score, lr would do nothing", "keeps no memory, so --score, --lr would do nothing"),
        ("temperature was given, but byol has no", "--temperature was given, but byol has no"),
        ("data 'x' needs it; the bias must be; data, so lr", "data 'x' needs it; the bias must be; data, so lr"),
        ("biases must be, seeds is for", "biases must be, seeds is for"),
        ("take another policy; a score would do", "take another policy; a score would do"),
    ],
)
def test_settings_are_told_as_options(said: str, shown: str) -> None:
    assert as_options(said) == shown


def test_flags_have_both_forms_whatever_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert not parsed("--no-graph").graph
    assert parsed("--graph").graph
    assert parsed("--recipe", "demo", "--tensorboard").tensorboard
    assert not parsed("--recipe", "demo", "--no-tensorboard").tensorboard
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    for shown in (
        "--graph, --no-graph", "--recipe {standard,paper,demo}", "--augment {standard,paper,digits,none}",
        "--policy {duel,fifo,reservoir,random,distinct,dedup,minred,adaptive,", "oracle}|None",
        "--steps INT|None", "--resume ",
    ):  # fmt: skip
        assert shown in text, shown
    assert parsed("--recipe", "demo", "--steps", "None").steps is None


def test_a_folder_of_runs_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fifo", "duel"):
        Path("demo", name).mkdir(parents=True)
        Path("demo", name, runs.CONFIG).write_text("{}")
    for command in ("evaluate", "export"):
        assert cli.main([command, "demo"]) == cli.USER_MISTAKE
        assert "demo is not a run directory but holds runs: demo/duel, demo/fifo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("duel train --recipe demo --out 'my run'", "duel train --recipe demo --out 'my run' --overwrite"),
        ("duel train --recipe demo --overwrite", "duel train --recipe demo --out 'my run' --overwrite"),
        (None, "duel train --out 'my run' --overwrite, with the settings in my run/config.json"),
    ],
)
def test_where_no_checkpoint_can_be_read_the_way_out_is_told(
    command: str | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path("my run")
    runs.prepare(run, recipes.demo(), overwrite=False)
    runs.write_json(run / runs.META, {"attempts": [{"command": command}]})
    (run / runs.CHECKPOINTS).mkdir()
    (run / runs.CHECKPOINTS / "step-000000001.pt").write_bytes(b"half")
    for args in (["evaluate", str(run)], ["train", "--out", str(run), "--resume"]):
        assert cli.main(args) == cli.USER_MISTAKE
        assert f"this deletes it and starts again: {shown}\n" in capsys.readouterr().err


def test_unreadable_images_are_told_as_a_warning(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    for name in ("a", "b"):
        Path("pictures", name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (8, 8), (20 * i, 0, 9)).save(f"pictures/{name}/{i}.png")
        Path("pictures", name, "x.png").write_bytes(b"no image")
    for how in ("device", "stream"):
        args = ["--data=pictures", "--image-size=8", f"--residency={how}", "--workers=0", "--out", how, *TINY]
        assert cli.main(["train", *(a for a in args if a != "--data=digits")]) == 0
        told = capsys.readouterr().err
        assert "warning: pictures: " in told
        assert "unreadable file" in told
        assert "UserWarning" not in told
        assert "Notice" not in told
        assert "np.str_" not in told


def test_an_interruption_before_the_first_step_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training.Inputs, "load", interrupted)
        assert cli.main(["train", *TINY, "--out", "run"]) == cli.INTERRUPTED
        assert "interrupted: nothing was trained yet; the same command starts again" in capsys.readouterr().err
        runs.prepare(Path("run"), parsed(*TINY, "--out", "run"), overwrite=False)
        assert cli.main(["train", "--out", "run", "--resume"]) == cli.INTERRUPTED
        assert "the same command goes on" in capsys.readouterr().err
        assert cli.main(["train", *TINY, "--out", "run", "--overwrite"]) == cli.INTERRUPTED
        assert "the same command starts again" in capsys.readouterr().err
    monkeypatch.setattr(loop.RunLog, "__enter__", interrupted)
    assert cli.main(["train", *TINY, "--out", "new"]) == cli.INTERRUPTED
    assert "start with: duel train --out new --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--bais", "27"],
        ["train", "--steps", "many"],
        ["trian"],
        ["evaluate"],
        ["train", "--steps"],
        ["train", "--symmetric", "yes"],
    ],
)
def test_unknown_options_are_refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(args)
    assert done.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_train_evaluate_export_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *TINY, "--out", "run"]) == 0
    shown = capsys.readouterr().out
    assert "next: duel evaluate run" in shown
    assert "memory" not in shown
    assert cli.main(["train", *TINY, "--out", "run"]) == cli.USER_MISTAKE
    assert "already holds a run" in capsys.readouterr().err
    assert cli.main(["train", "--out", "run", "--resume", "--bias", "9"]) == cli.USER_MISTAKE
    assert "bias: 1.0 -> 9.0" in capsys.readouterr().err
    assert cli.main(["train", "--out", "run", "--resume", "--log-every", "3"]) == 0
    assert "run is finished (4 steps): nothing to be done\n" in capsys.readouterr().err
    assert cli.main(["train", *TINY, "--out", "run", "--overwrite", "--bias", "9", "--policy", "fifo"]) == 0
    assert runs.load_config(Path("run")).bias == 9.0
    shown = capsys.readouterr().out
    assert re.search(r"loss \S+, memory_entropy 0\.\d+, memory_largest 0\.\d+\n", shown)
    assert "what the memory holds: run/memory.csv\n" in shown
    assert (
        cli.main(["evaluate", "run", "--device", "cpu", "--probe-epochs", "2", "--precision", "auto", "--per-class"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "linear probe" in shown
    assert "run/evaluation.json" in shown
    settings = json.loads(Path("run/evaluation.json").read_text())["protocol"]["settings"]
    assert (settings["probe_epochs"], settings["precision"]) == (2, "auto")
    assert cli.main(["export", "run", "--out", "backbone.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "timm.create_model('duel_convnet'" in shown
    assert "images (3, 8, 8), RGB in 0..1, less the mean (0.3061, 0.3061, 0.3061), divided by the std (0.376," in shown
    assert Path("backbone.safetensors").exists()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(training, "train", lambda *args, **kwargs: missing("timm.models"))
    assert cli.main(["train", *TINY]) == 2
    told = capsys.readouterr().err
    assert "timm" in told
    assert "pip install 'duel-ssl[train]'" in told
    monkeypatch.setattr(training, "train", lambda *args, **kwargs: missing("duel.no_such_part"))
    with pytest.raises(ModuleNotFoundError):  # a mistake of ours
        cli.main(["train", *TINY])


def test_what_comes_next_depends_on_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pictures").mkdir()
    for i in range(20):
        Image.new("RGB", (8, 8), (12 * i, 40, 90)).save(tmp_path / "pictures" / f"{i}.png")
    small = [argument for argument in TINY if "data" not in argument]
    assert cli.main(["train", *small, "--data=pictures", "--image-size=8", "--out=plain"]) == 0
    assert "next: duel export plain" in capsys.readouterr().out
    assert cli.main(["train", *TINY, "--out=digits"]) == 0
    assert "next: duel evaluate digits" in capsys.readouterr().out
    for run, told in (("plain", True), ("digits", False)):
        assert cli.main(["export", run]) == 0
        square = "transparent parts white, central square, resized (bilinear, antialiased) to a side of 8\n"
        assert (f"its images were upright (EXIF rotation applied), RGB, {square}" in capsys.readouterr().out) == told
    with safe_open("plain/duel_convnet.safetensors", "pt") as file:
        assert file.metadata()["images"].endswith(square.strip())
    for kind in "ab":  # labels, and nothing to measure on
        (tmp_path / "all" / "train" / kind).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (12 * i, 40, 90)).save(tmp_path / "all" / "train" / kind / f"{i}.png")
    for every in (0, 1):
        args = ["--data=all", "--image-size=8", f"--knn-every={every}", f"--out=all-{every}"]
        assert cli.main(["train", *small, *args]) == 0
        said = capsys.readouterr()
        assert f"next: duel export all-{every}" in said.out
        assert said.err.count("warning: all: no k-NN while training, as it has no test part\n") == every
    assert cli.main(["evaluate", "all-0", "--device=cpu"]) == cli.USER_MISTAKE
    assert "'all' has train/ but none of test/" in capsys.readouterr().err
