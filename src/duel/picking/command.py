"""What `duel pick` can be told, and what it prints. No torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UserError, check_seed, check_writable
from ..names import LIVE, NAMED_DATA, score_parts
from ..names import THUMBNAIL_SIDE as SIDE

#: The score by which the most of many originals were kept (docs/decisions.md).
SCORE = "exponential:0.035"


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Pick pictures that are unlike each other from a folder or a stream full of duplicates, without any training.

    A thousand of a folder, and for each other file which of them it is most like:
      duel pick --data ~/pictures --keep 1000 --out picked.csv

    Two hundred frames of a video, which are written to frames.npz:
      ffmpeg -i VIDEO -vf scale=64:64 -f rawvideo -pix_fmt rgb24 - |
        duel pick --data - --image-size 64 --keep 200 --out frames.csv

    Every picture is offered once to a working memory of that size, which compares 8 x 8 thumbnails: that tells copies
    which were saved anew, resized, or made lighter or darker, but no crops and mirror images.
    """

    data: str
    """A folder of images (with all subfolders), a .npz or .npy file, a named data set, or
    - for raw RGB frames of image_size that are piped in."""
    keep: int
    """How many to keep; with policy dedup at most so many. Where some of those kept are called alike, fewer will do."""
    out: str = "picked.csv"
    """File for the answer: a line for each picture, whether it is kept, the kept one that it is most like, and the
    cosine of their thumbnails. Of a stream only those kept, by their numbers."""
    images: str | None = None
    """File (.npz) for the kept images themselves, central squares of image_size, as `duel train --data` takes them, and
    their numbers: of frames, or of lines of the answer, from 0. Of a stream by default beside the answer."""
    policy: Literal["duel", "minred", "dedup", "reservoir"] = "duel"
    """Who leaves: who has the most duplicates (duel); who is closest to another (minred). Or a sample is kept, of those
    that are not alike (dedup) or of all (reservoir)."""
    score: str = SCORE
    """Policy duel: from cosine to probability of being a duplicate; sharper ones look at the nearest alone."""
    alike: float = 0.9
    """The cosine from which two are called alike: by policy dedup, and in what is printed."""
    image_size: int = 64
    """Side in pixels to which images are resized before their thumbnails are taken."""
    root: str = "data"
    """Where torchvision keeps its data sets."""
    seed: int = 0
    """Seed of the order in which pictures are offered, and of the samples."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    overwrite: bool = False
    """Replace the files that --out and --images name."""

    def run(self) -> int:
        self._check()
        from .choosing import Found, pick_of_set, pick_of_stream

        found: Found = pick_of_stream(self) if self.data == LIVE else pick_of_set(self)
        print(f"{found.seen:,} pictures, of which {found.kept:,} are kept: {self.out}")
        if found.images is not None:
            print(f"the kept images: {found.images}")
        like = f"like another that is kept (cosine {self.alike:g} or more)"
        kept = f"{found.alike_kept:,} of the {found.kept:,} kept"
        if found.alike_left is None:
            print(f"{kept} are {like}")
        else:
            print(f"{found.alike_left:,} of the {found.left:,} left out are {like}, and {kept}")
        if found.alike_kept:
            print(
                f"no two alike among {found.different:,} of those kept: --keep {found.different} may do, "
                f"if a cosine of {self.alike:g} means alike (--alike)"
            )
        return 0

    def _check(self) -> None:
        for name, least in (("keep", 1), ("image_size", SIDE)):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not 0 < self.alike <= 1:
            raise UserError(f"alike must be a cosine above 0 and at most 1, got {self.alike:g}")
        check_seed(self.seed)
        score_parts(self.score)
        if self.score != SCORE and self.policy != "duel":
            raise UserError(f"policy {self.policy} has no score; leave score out, or take policy duel")
        if Path(self.out).suffix != ".csv":
            raise UserError(f"out must end in .csv, got {self.out!r}")
        if self.images is not None and Path(self.images).suffix != ".npz":
            raise UserError(f"images must end in .npz, got {self.images!r}")
        for path in filter(None, (Path(self.out), self.image_file)):
            if path.is_dir():
                raise UserError(f"{path} is a folder; give a file")
            if path.exists() and not self.overwrite:
                raise UserError(f"{path} is there already; give another name, or replace it with --overwrite")
            check_writable(path.parent, "give another with --out or --images")

    @property
    def image_file(self) -> Path | None:
        """Where the kept images go, if anywhere."""
        if self.images is not None:
            return Path(self.images)
        return Path(self.out).with_suffix(".npz") if self.data == LIVE else None

    @property
    def labelled(self) -> bool:
        """Named sets are taken as they are; the labels of arrays are of no use."""
        return self.data in NAMED_DATA
