"""The command line. It parses and prints; what is done is done elsewhere. No torch until a command runs."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Union, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional

from . import __version__, recipes
from .benchmarks.commands import Benchmark
from .config import TrainConfig
from .config_checks import OF_ANY_MEMORY, check_idle, check_live, check_unread
from .errors import UserError
from .evaluation.settings import EvaluationSettings
from .first_pass import first_pass
from .messages import as_options, plain_warnings
from .names import LIVE, POLICIES
from .picking.command import Pick
from .reproduce.command import WORK

USER_MISTAKE, INTERRUPTED = 2, 130
#: What the extra [train] brings, by the names of the modules.
TRAINING_PACKAGES = ("torchvision", "timm", "lightning", "sklearn", "scipy", "safetensors", "tensorboard", "PIL")
RunDir = Annotated[Positional[str], tyro.conf.arg(metavar="RUN_DIR")]


@dataclass(frozen=True, kw_only=True)
class _Training(TrainConfig):
    """Settings of the run; the defaults shown are those of the recipe."""

    def __post_init__(self) -> None:
        """No checks while parsing: they are made by `run`, where a mistake is reported in our own words."""


# The help says INT|None rather than tyro's {None}|INT, that a yes or no may do without its value, and which recipes and
# policies there are.
_YES_OR_NO = "[{True,False,None}]"
_SHOWN = {"int | None": "INT|None", "float | None": "FLOAT|None", "str | None": "STR|None", "bool | None": _YES_OR_NO}
_METAVARS = {f.name: _SHOWN[str(f.type)] for f in dataclasses.fields(TrainConfig) if str(f.type) in _SHOWN}
_METAVARS |= {"recipe": f"{{{','.join(recipes.RECIPES)}}}", "policy": f"{{{','.join(POLICIES)}}}|None"}
for _name, _hint in get_type_hints(TrainConfig).items():
    if _name in _METAVARS:
        _Training.__annotations__[_name] = Annotated[_hint, tyro.conf.arg(metavar=_METAVARS[_name])]
#: Options of any command that may do so.
_BARE = {f"--{name.replace('_', '-')}" for name, metavar in _METAVARS.items() if metavar == _YES_OR_NO}


@dataclass(frozen=True, kw_only=True)
class _Evaluation(EvaluationSettings):
    """How features are taken and measured."""

    def __post_init__(self) -> None:
        """As above."""


class Command(Protocol):
    """A subcommand: a dataclass whose name in lower case is the command and whose fields are its options."""

    def run(self) -> int:
        """Do it; returns the exit status."""
        ...


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train on scikit-learn's digits with one digit 27 times too frequent, and compare what memories make of it.

    Needs no download and no GPU; about a minute. `duel demo` does all of it.
    """

    out: str = "runs/demo"
    """Directory for the runs; what an earlier demo left there is replaced."""
    steps: int = 200
    """Training steps of each run."""
    bias: float = 27.0
    """How many times too frequent the frequent digit is."""
    seed: int = 0
    """Seed of everything random."""

    def run(self) -> int:
        from .demo import demo

        demo(out=self.out, steps=self.steps, bias=self.bias, seed=self.seed)
        return 0


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an encoder without labels; everything about the run goes to its directory (--out).

    SimCLR as the field trains it, on CIFAR-10:
      duel train --data cifar10 --download --method simclr --recipe standard --out runs/simclr

    The same with one class 27 times too frequent, for 5,000 steps:
      duel train --data cifar10 --method simclr --bias 27 --steps 5000 --out runs/simclr-x27

    Your own pictures, and a working memory that forgets duplicates as the source of the batches:
      duel train --data ~/pictures --image-size 64 --method d-simclr --out runs/mine

    Frames of a video or a camera as they come, from whatever can write them raw (rgb24) to a pipe:
      ffmpeg -i VIDEO -vf scale=64:64 -f rawvideo -pix_fmt rgb24 - |
        duel train --data - --image-size 64 --method d-simclr --memory-size 4096 --stream-batch 32 --steps 5000

    Go on after an interruption, with the settings of the run:
      duel train --out runs/simclr --resume

    --recipe (standard, paper, demo) sets the defaults shown here; any other option overrides it.
    """

    config: OmitArgPrefixes[_Training] = field(default_factory=_Training)
    resume: FlagCreatePairsOff[bool] = False
    """Continue the run in --out from its newest good checkpoint, with the settings it was started with."""
    overwrite: FlagCreatePairsOff[bool] = False
    """Replace the run that --out holds."""

    def run(self) -> int:
        config = TrainConfig(**vars(self.config))  # checked here
        out = Path(config.run_dir)
        found = out.exists()
        try:
            from .data.live import standard_input
            from .runs import MEMORY
            from .signals import END_OF_STREAM
            from .training import train

            frames = standard_input(config.image_size) if config.data == LIVE else None
            result = train(config, frames=frames, resume=self.resume, overwrite=self.overwrite)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(*(stop.args or [self._not_begun(out, new=not found)])) from stop
        if not result.finished and result.stopped_by != END_OF_STREAM:
            return INTERRUPTED
        last = ("loss", "knn", "memory_entropy", "memory_largest")
        shown = ", ".join(f"{name} {result.metrics[name]:.4g}" for name in last if name in result.metrics)
        print(f"{result.steps} steps in {result.seconds:.0f} s" + (f"; {shown}" if shown else ""))
        print(f"run directory: {result.run_dir}")
        if (result.run_dir / MEMORY).exists():
            print(f"what the memory holds: {result.run_dir / MEMORY}")
        print(f"next: duel {'evaluate' if result.labelled else 'export'} {shlex.quote(str(result.run_dir))}")
        return 0

    def _not_begun(self, out: Path, *, new: bool) -> str:
        """What to do after an interruption while torch, data and network are made ready; new: `out` was not there."""
        if self.resume:
            return "nothing was trained since the last checkpoint; the same command goes on from there"
        if new and out.exists() and not self.overwrite:
            return f"nothing was trained yet; start with: duel train --out {out} --resume"
        return "nothing was trained yet; the same command starts again"


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a trained encoder: neighbours, weighted k-NN, linear probe, few shots, geometry.

    duel evaluate runs/simclr

    Prints a table and writes evaluation.json, with the protocol in it, to the run directory; measured on other data
    (--data), evaluation-DATA-….json.
    """

    run_dir: RunDir
    """Directory that `duel train` wrote."""
    data: str | None = None
    """Measure on other data (labelled; a folder's images are brought to the run's size, others must have it); by
    default the data the run was trained on."""
    root: str | None = None
    """Where torchvision keeps its data sets; by default as in training."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    per_class: bool = False
    """Also print the accuracy of each class."""
    settings: OmitArgPrefixes[_Evaluation] = field(default_factory=_Evaluation)

    def run(self) -> int:
        settings = EvaluationSettings(**vars(self.settings))  # checked here
        from rich.console import Console

        from .evaluation import class_table, table
        from .trained import evaluate, evaluation_file

        result = evaluate(
            self.run_dir, data=self.data, root=self.root, device=self.device, settings=settings, progress=True
        )
        console = Console()
        console.print(table(result))
        if self.per_class:
            console.print(class_table(result))
        print(f"written: {evaluation_file(self.run_dir, self.data)}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's backbone as a file that timm (safetensors) or any ONNX runtime loads, checked against the original.

    duel export runs/simclr --format safetensors
    """

    run_dir: RunDir
    """Directory that `duel train` wrote."""
    out: str | None = None
    """File to write, ending in .safetensors or .onnx; by default RUN_DIR/<timm name>.<format>."""
    format: Literal["safetensors", "onnx"] | None = None
    """Kind of file; onnx needs the extra [onnx]. By default what --out ends in, or safetensors."""

    def run(self) -> int:
        from .trained import export

        done = export(self.run_dir, out=self.out, format=self.format)
        print(f"written: {done.path} (features differ from the original's by at most {done.difference:.1e})")
        print(f"load it: {done.load}")
        shape, mean, std = (", ".join(done.metadata[name].split()) for name in ("image_shape", "mean", "std"))
        print(f"give it: images ({shape}), RGB in 0..1, less the mean ({mean}), divided by the std ({std})")
        if prepared := done.metadata.get("images"):
            print(f"its images were {prepared}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure this machine: ratios side by side in one run, as a table and as JSON with hardware and versions.

    `duel bench replace --help` and so on show what each can be told.
    """

    what: Benchmark

    def run(self) -> int:
        return self.what.run()


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """The paper's tables and figures from this code, beside the paper's own numbers: docs/results.md.

    See what would run, and for how long:
      duel reproduce table2 --scale short --dry-run

    Nine minutes of it, two runs at a time on one GPU; the same command goes on from there:
      duel reproduce table2 --scale short --minutes 9 --jobs 2 --root ~/data

    Everything in small on a CPU, to see that the machinery works:
      duel reproduce all --scale smoke

    WHAT: table1 (Top-k), table2 (linear probe), thumbnails, ablation (score functions), resources, framework, rivals,
    controls, tuning, negative-free, subset, longtail, camera, stops; pixels (what the images give without an encoder);
    figure1, figure-mcp, figure3, memory, scores; figures and page (all figures, docs/results.md, from the results
    that are there); all. Finished runs are found again under --out and not repeated.
    """

    what: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="WHAT ...")]
    """What to make; see above. Of several the runs are carried out together, seed by seed."""
    scale: Literal["smoke", "digits", "tiny", "short", "paper"] = "short"
    """smoke: proves the machinery, no more. digits: the demo's runs, seconds each on a CPU. tiny: CIFAR-10 at 16 x 16
    pixels with the demo's network, minutes each on a CPU. short: ResNet-18, 5,000 steps. paper: ResNet-50, 40,000
    steps, its own recipe."""
    seeds: tuple[int, ...] = ()
    """Seeds; by default 2 to 4 (short; framework, rivals and controls 2 to 6, tuning 0 and 1), 0 to 2 (tiny; these
    three 0 to 4), 0 to 4 (digits) or 0."""
    rows: tuple[str, ...] = ()
    """Only these rows, by the names that --dry-run prints; of each seed in this order."""
    biases: tuple[float, ...] = ()
    """Only these biases."""
    steps: int | None = None
    """Another length of training than the scale's; such runs have a section of their own on the page."""
    lr: float | None = None
    """Another learning rate than the recipe's, likewise."""
    minutes: float | None = None
    """Stop after so many minutes; runs under way are saved and continued by the next call. With several jobs, a process
    that has not stopped two minutes later is killed."""
    jobs: int = 1
    """Runs at a time, each in its own process, on the same device: the others go on while one is measured."""
    root: str = "data"
    """Where torchvision keeps its data sets."""
    download: bool = False
    """Download the data set if it is missing."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    compile: Annotated[bool | None, tyro.conf.arg(metavar=_YES_OR_NO)] = None
    """Compile the encoder, in every run or in none. None: on a GPU, for long runs, and with several jobs for shorter
    ones."""
    out: str | None = None
    """Folder of results, one JSON a run; by default results (smoke: runs/smoke/results)."""
    work: str = WORK
    """Folder of runs under way."""
    docs: str | None = None
    """Folder of the page and figures; by default docs (smoke: runs/smoke/docs)."""
    commit: str | None = None
    """Commit to be written into the results where there is no git checkout to ask."""
    dry_run: bool = False
    """Print the plan and do nothing."""

    def run(self) -> int:
        from .reproduce.command import produce

        return produce(**vars(self))


# To add a command, write such a dataclass and list it here.
COMMANDS: tuple[type[Command], ...] = (Demo, Pick, Train, Evaluate, Export, Bench, Reproduce)

_ABOUT = """A working memory, and a policy that decides what it forgets: self-supervised learning on uncurated data.

Start with `duel demo`; `duel train --help` shows every setting with examples, `duel --version` which duel this is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; a user's mistake is printed without a stack trace."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(f"duel {__version__}")
        return 0
    try:
        with plain_warnings():
            return _parse(args).run()
    except UserError as error:
        print(f"duel: error: {as_options(str(error))}", file=sys.stderr)
        return USER_MISTAKE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING_PACKAGES:
            raise
        extra = "pick" if args[:1] == ["pick"] and error.name == "PIL" else "train"
        print(
            f"duel: error: this needs {error.name}, which is missing; pip install 'duel-ssl[{extra}]'", file=sys.stderr
        )
        return USER_MISTAKE
    except KeyboardInterrupt as stop:
        print(": ".join(["duel: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(args: list[str]) -> Command:
    args = _with_values(args) or ["--help"]
    kinds: list[Any] = []
    defaults = _Training()
    for kind in COMMANDS:
        name = kind.__name__.lower()
        # the list of commands has a line for each, a command's own help all of it
        text = inspect.getdoc(kind) or ""
        options: dict[str, Any] = {"description": text if args[:1] == [name] else text.splitlines()[0]}
        if kind is Train and args[:1] == ["train"]:
            defaults = _Training(**vars(first_pass(args[1:])))
            options["default"] = Train(config=defaults)
            all_of_them = defaults.refreshed_slots != defaults.refresh
            hint = tyro.conf.arg(help_behavior_hint=f"(default: {defaults.refresh}{', here all' * all_of_them})")
            _Training.__annotations__["refresh"] = Annotated[int, hint]
        marks = () if kind is Train else (FlagCreatePairsOff,)  # a recipe may set a flag, so train has both forms
        kinds.append(Annotated[kind, tyro.conf.subcommand(name, **options), *marks])  # type: ignore[valid-type]
    union: Any = Union[tuple(kinds)]  # noqa: UP007  # built at run time, which X | Y cannot be
    command: Command = tyro.cli(
        union,
        args=args,
        prog="duel",
        description=_ABOUT,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    if isinstance(command, Train):
        named = [name for name in OF_ANY_MEMORY if getattr(command.config, name) != getattr(defaults, name)]
        config = TrainConfig(**vars(command.config))
        check_idle(config, named)
        check_unread(config, named)
        if config.data == LIVE:  # before torch is loaded and the pipe is looked at
            check_live(config)
    return command


def _with_values(args: list[str]) -> list[str]:
    """The same with True for a yes or no that was given without a value."""
    found = []
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        found.append(arg)
        if arg.replace("_", "-") in _BARE and following.startswith("-"):
            found.append("True")
    return found
