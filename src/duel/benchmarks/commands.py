"""`duel bench …`: what each benchmark can be told. Like all of the command line, no torch until one runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from duel.errors import UserError

FAILED = 1
#: Options of `duel bench step` that say nothing to the demo's rows, whose settings are the demo's.
NOT_OF_THE_DEMO = ("methods", "memory", "residents", "recipe", "batch_size", "data", "image_count", "root")


@dataclass(frozen=True, kw_only=True)
class Replace:
    """The paper's replacement loop against the library's engines and a FIFO queue.

    duel bench replace

    One size only, for a quick look:
      duel bench replace --size 512 --batch 1 64 --dim 64 --scores linear gaussian:0.1

    Ends with status 1 if a row failed or chose other victims than its oracle.
    """

    size: int | None = None
    """Slots of the memory; by default a list of sizes that suits the device."""
    batch: tuple[int, ...] = (256,)
    """Newcomers at a time; each count is measured at each size."""
    dim: int = 256
    """Dimension of the embeddings, with --size."""
    scores: tuple[str, ...] = ()
    """Score functions; by default all of the library's."""
    admit: Literal["always", "compete"] = "always"
    """Algorithm 2 or Algorithm 1 of the paper."""
    repeats: int = 24
    """Timings of which the median is taken."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of the embeddings."""
    out: str | None = None
    """File for the figures; by default runs/bench-replace-<device>.json."""

    def run(self) -> int:
        from duel.machine import resolve_device

        from .replace import SIZES, report

        device = resolve_device(self.device)
        places = SIZES[device.type] if self.size is None else ((self.size, self.dim),)
        written, failed = report(
            device=device,
            out=self.out,
            sizes=[(size, count, dim) for size, dim in places for count in self.batch],
            scores=self.scores,
            admit=self.admit,
            repeats=self.repeats,
            seed=self.seed,
        )
        return _end(written, failed)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Whole training steps: plain methods against their DUEL forms, and what each part of a step takes.

    duel bench step

    On a CPU that is the demo with a FIFO and with a DUEL memory, on one thread as `duel demo` is, unless --backbones
    says otherwise; on a GPU, ResNet-18 and ResNet-50 at batch 256.

    One method only:
      duel bench step --methods moco --backbones resnet18 --memory 4096 --data cifar10

    A long list in several calls, into one file:
      duel bench step --rows "MoCo 2,048" --append --out bench.json
    """

    methods: tuple[str, ...] = ("moco", "simclr", "simsiam", "byol")
    """Methods to measure (not for the demo, nor are --memory, --residents, --recipe, --batch-size, --data,
    --image-count and --root)."""
    rows: tuple[str, ...] = ()
    """Only rows of these names, or with one of these words in theirs, and the plain rows that they are held against."""
    backbones: tuple[str, ...] = ()
    """Any timm names; by default resnet18 and resnet50 on a GPU, and on a CPU the demo instead."""
    memory: tuple[int, ...] = (2048, 65536)
    """Slots of MoCo's memory, one set of rows for each; refresh is measured at the first."""
    residents: int = 512
    """Slots of D-SimCLR's memory."""
    recipe: str = "paper"
    """Recipe that sets everything else: paper, standard or demo."""
    batch_size: int = 256
    """Images per step."""
    data: str = "synthetic"
    """synthetic (made-up images of CIFAR's shape, no download) or any that `duel train` takes."""
    image_count: int = 50_000
    """How many synthetic images."""
    root: str = "data"
    """Where torchvision keeps its data sets."""
    compile: bool | None = None
    """Compile the encoders with torch.compile; None: as a long training would."""
    eager: bool = False
    """On a GPU, do not record the step as a CUDA graph."""
    count: int = 12
    """Windows of which the median is taken; rows that are compared take turns window by window."""
    length: int = 20
    """Steps in a window."""
    warm_up: int = 40
    """Steps before the first window."""
    parts: bool = True
    """Measure the parts of a step too; --no-parts leaves them out."""
    repeats: int = 20
    """Timings of each part of a step."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    out: str | None = None
    """File for the figures; by default runs/bench-step-<device>.json."""
    append: bool = False
    """Keep the rows that the file has; only those of the same name are replaced."""

    def run(self) -> int:
        from duel.demo import one_thread
        from duel.machine import resolve_device

        from .cases import BACKBONES, cases, chosen, demo_cases
        from .step import report

        device, threads = resolve_device(self.device), ExitStack()
        machine = {"compile": self.compile, "graph": not self.eager}
        if device.type == "cpu" and not self.backbones:
            self._check_demo()
            rows = demo_cases(**machine)
            threads.enter_context(one_thread())
        else:
            rows = cases(
                methods=self.methods,
                backbones=self.backbones or BACKBONES,
                memory=self.memory,
                residents=self.residents,
                recipe=self.recipe,
                batch_size=self.batch_size,
                data=self.data,
                root=self.root,
                **machine,
            )
        with threads:
            written, failed = report(
                chosen(rows, self.rows),
                device=device,
                out=self.out,
                append=self.append,
                count=self.count,
                length=self.length,
                warm_up=self.warm_up,
                repeats=self.repeats if self.parts else 0,
                image_count=self.image_count,
            )
        return _end(written, failed)

    def _check_demo(self) -> None:
        """Refuses what was given and would do nothing."""
        given = [f.name for f in fields(self) if f.name in NOT_OF_THE_DEMO and getattr(self, f.name) != f.default]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UserError(
                f"on a CPU the demo is measured, to which {options} would do nothing; leave that out, or say what to "
                "measure with --backbones"
            )


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Our training against lightly's and plain PyTorch's: same data, backbone, batch and machine; end to end and
    compute only.

    Needs lightly: pip install 'duel-ssl[peers]'.

    duel bench peers --root data

    Without lightly:
      duel bench peers --rows "plain PyTorch"
    """

    methods: tuple[str, ...] = ("simclr", "moco")
    """Methods to measure."""
    rows: tuple[str, ...] = ()
    """Only rows of these names, or with one of these words in theirs."""
    backbone: str = "resnet18"
    """Any timm name."""
    batch_size: int = 256
    """Images per step."""
    data: str | None = None
    """Any that `duel train` takes; by default cifar10 where --root has it, else synthetic images of its shape."""
    root: str = "data"
    """Where torchvision keeps its data sets."""
    workers: int | None = None
    """The peer's loading processes; by default one per core."""
    compile: bool | None = None
    """Compile our encoder with torch.compile; None: as a long training would."""
    compile_peer: bool = False
    """Compile the peer's backbone too; lightly's own benchmark does not."""
    count: int = 8
    """Windows of which the median is taken."""
    length: int = 30
    """Steps in a window."""
    warm_up: int = 40
    """Steps before the first window."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    out: str | None = None
    """File for the figures; by default runs/bench-peers-<device>.json."""
    append: bool = False
    """Keep the rows that the file has; only those of the same name are replaced."""

    def run(self) -> int:
        from duel.machine import resolve_device

        from .peers import report

        written, failed = report(
            device=resolve_device(self.device),
            out=self.out,
            methods=self.methods,
            rows=self.rows,
            append=self.append,
            data=self.data,
            workers=self.workers,
            warm_up=self.warm_up,
            count=self.count,
            length=self.length,
            backbone=self.backbone,
            batch_size=self.batch_size,
            root=self.root,
            compile=self.compile,
            compile_peer=self.compile_peer,
        )
        return _end(written, failed)


def _end(written: Path, failed: Sequence[str]) -> int:
    print(f"written: {written}")
    for line in failed:
        print(f"duel: failed: {line}", file=sys.stderr)
    return FAILED if failed else 0


Benchmark = (
    Annotated[Replace, tyro.conf.subcommand("replace")]
    | Annotated[Step, tyro.conf.subcommand("step")]
    | Annotated[Peers, tyro.conf.subcommand("peers")]
)
