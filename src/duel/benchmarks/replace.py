"""Replacement: the paper's loop against the library's engines and a FIFO queue, over sizes and scores.

Every row also says whether the fast engine chose the victims that the slow one did, in the same run. For memories where
the literal loop would take hours the oracle is the same exact algorithm without pruning, in float64, and with N counted
anew in float64 as long as that takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from duel.benchmarks.results import Results
from duel.benchmarks.tables import table
from duel.benchmarks.timing import milliseconds
from duel.errors import UserError
from duel.memory import WorkingMemory
from duel.policies import Duel
from duel.replacement import expected_duplicates, replace_unchecked
from duel.replacement.units import exponent
from duel.scores import get
from duel.slots import put

if TYPE_CHECKING:
    from rich.table import Table

#: The literal loop is run, and timed, up to so many slots.
LITERAL = 4096
#: Beyond, N is counted anew in float64, pair by pair, up to so many slots: seconds. Above, both sides share one N.
RECOUNT = {"cpu": 16384, "cuda": 65536}
#: Pairs at a time in that count.
PAIRS = 1 << 25
#: Slots and dimension.
SIZES = {"cpu": ((2048, 256), (16384, 128)), "cuda": ((2048, 256), (65536, 128), (1 << 20, 128))}
#: Newcomers at a time.
BATCH = 256
#: Different batches of newcomers: no item comes twice.
BATCHES = 40
#: Above so many slots counting N once takes seconds: fewer scores, and the last kind of data only.
LARGE, LARGE_SCORES = 1 << 18, ("linear", "gaussian:0.1")
SCORES = ("linear", "quadratic", "gaussian", "gaussian:0.1", "exponential")
DATA = ("isotropic", "clusters")


def pool(data: str, n: int, dim: int, device: torch.device, seed: int) -> Tensor:
    """n unit rows: isotropic, or ten clusters of which one is 27 times as frequent as each other."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(n, dim, generator=generator, device=device)
    if data == "clusters":
        centres = normalize(torch.randn(10, dim, generator=generator, device=device), dim=1)
        weights = torch.ones(10, device=device)
        weights[0] = 27
        labels = torch.multinomial(weights, n, replacement=True, generator=generator)
        rows = centres[labels] + 0.5 * rows / dim**0.5
    return normalize(rows, dim=1)


def benchmark(
    *,
    device: torch.device,
    sizes: Sequence[tuple[int, int, int]] | None = None,
    scores: Sequence[str] = SCORES,
    data: Sequence[str] = DATA,
    admit: str = "always",
    repeats: int = 24,
    seed: int = 0,
    each: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row per size, score and data; `each` is called with it as soon as it is there."""
    rows = []
    names = [get(score).name for score in scores]
    for size, count, dim in sizes or [(size, BATCH, dim) for size, dim in SIZES[device.type]]:
        for kind in data if size <= LARGE else data[-1:]:
            memory = pool(kind, size + BATCHES * count, dim, device, seed)
            incoming, memory = memory[size:].reshape(BATCHES, count, dim), memory[:size]
            fifo = _update_time(memory, incoming, "fifo", repeats)
            for score in names if size <= LARGE else LARGE_SCORES:
                row = {"size": size, "batch": count, "dim": dim, "data": kind, "score": score, "admit": admit}
                try:
                    row |= _row(memory, incoming, score, admit, repeats) | {"fifo_update_ms": fifo}
                except Exception as error:  # one configuration must not lose the others
                    row |= {"error": f"{type(error).__name__}: {error}"}
                rows.append(row)
                each(row)
    return rows


def _row(memory: Tensor, incoming: Tensor, score: str, admit: str, repeats: int) -> dict[str, Any]:
    device, size, h = memory.device, memory.shape[0], get(score)
    carried = expected_duplicates(memory, h)
    row: dict[str, Any] = {}

    def engine(name: str, duplicates: Tensor | None = None) -> Any:
        return lambda: replace_unchecked(memory, incoming[0], h, admit, duplicates, name)

    if size <= LITERAL:
        want = engine("reference")()
        row["reference_ms"] = milliseconds(engine("reference"), device, repeats=1, graph=False)
    else:
        recounted = row["n_recounted"] = size <= RECOUNT[device.type]
        known = recount(memory, h) if recounted else carried
        want = replace_unchecked(memory.double(), incoming[0].double(), h, admit, known, "dense")
    got = engine("auto", carried)()
    same = row["same_victims"] = int((got.slots == want.slots).long().cumprod(0).sum())
    if same < want.slots.shape[0] and size <= RECOUNT[device.type]:
        row |= _difference(memory, incoming[0], h, admit, got.slots[: same + 1], int(want.slots[same]))
    row["largest_error_in_n"] = float((got.duplicates - want.duplicates).abs().max())
    if size <= LARGE:
        row["scratch_ms"] = milliseconds(engine("auto"), device, repeats=repeats)
    if device.type == "cuda" and size <= LARGE:
        row["dense_scratch_ms"] = milliseconds(engine("dense"), device, repeats=3)
    row["carried_ms"] = milliseconds(engine("auto", carried), device, repeats=repeats)
    row["update_ms"] = _update_time(memory, incoming, Duel(score, admit=admit), repeats)
    if "reference_ms" in row:
        row["update_speedup"] = row["reference_ms"] / row["update_ms"]
        row["scratch_speedup"] = row["reference_ms"] / row["scratch_ms"]
    return row


def _difference(
    memory: Tensor, incoming: Tensor, score: Any, admit: str, slots: Tensor, other: int
) -> dict[str, float]:
    """What to think of it that newcomers took `slots`, the last of which is not the oracle's, `other` (-1: none).

    lead: by how much N of the other was larger, counted in float64. rounding: how much float32 and whole units alone
    can make of that, from the errors of N that they lead to.
    """
    at, newcomers = slots.shape[0] - 1, incoming.double()
    before = put(memory.double(), slots[:at], newcomers[:at]) if at else memory.double()
    n = exact = recount(before, score)
    if admit == "compete":
        seen = score((before @ newcomers[at]).clamp_(-1, 1))
        n = torch.cat([n + seen, seen.sum()[None]])  # the newcomer's own comes last
    error = (recount(before, score, torch.float32, 2.0 ** -exponent(len(memory))) - exact).abs().max()
    return {"lead": float(n[other] - n[int(slots[at])]), "rounding": 4 * float(error)}


@torch.no_grad()
def recount(memory: Tensor, score: Any, dtype: torch.dtype = torch.float64, unit: float | None = None) -> Tensor:
    """N of every row of memory (K, d), float64 (K,), straight from its definition: it shares no shortcut.

    dtype: of the products and of h, which is rounded to multiples of `unit`.
    """
    rows, h = memory.to(dtype), get(score)
    counts = []
    step = max(1, PAIRS // len(rows))
    for first in range(0, len(rows), step):
        similar = h((rows[first : first + step] @ rows.T).clamp_(-1, 1))
        similar.diagonal(first).zero_()  # an item is no duplicate of itself
        if unit is not None:
            similar = similar.div_(unit).round_().mul_(unit)
        counts.append(similar.sum(1, dtype=torch.float64))
    return torch.cat(counts)


def _update_time(memory: Tensor, incoming: Tensor, policy: Any, repeats: int) -> float:
    """`WorkingMemory.update` with carried N, a new batch each time, after a few: what a training step pays."""
    held = WorkingMemory(memory.shape[0], memory.shape[1], policy).to(memory.device)
    held.update(memory)
    for batch in incoming[-8:]:  # the first counts N
        held.update(batch)
    turn = torch.zeros(1, dtype=torch.int64, device=memory.device)  # on the device, so that replays move on too

    def step() -> None:
        held.update(incoming.index_select(0, turn)[0])
        turn.add_(1).remainder_(incoming.shape[0])

    return milliseconds(step, memory.device, repeats=repeats)


def report(
    *,
    device: torch.device,
    out: str | None,
    sizes: Any = None,
    scores: Sequence[str] = (),
    repeats: int,
    **settings: Any,
) -> tuple[Path, list[str]]:
    """What `duel bench replace` does: a progress line per row, a table per size, and the figures as JSON.

    Returns the file and a line for every row that failed or whose victims are not the oracle's.
    """
    from rich.console import Console
    from rich.progress import Progress

    if repeats < 1:
        raise UserError(f"repeats must be at least 1, got {repeats}")
    for size in sizes or ():
        if min(size) < 1:
            raise UserError(f"size, batch and dim must be at least 1, got {size}")
    names = [get(score).name for score in scores or SCORES]  # a mistake is told before anything is written
    threads = torch.get_num_threads() if device.type == "cpu" else None
    call = {"sizes": sizes, "scores": names, "repeats": repeats, **settings}
    results = Results("replace", device, out, call, threads=threads, repeats=repeats)
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replacement", total=None)

        def each(row: dict[str, Any]) -> None:
            progress.update(task, description=f"{row['size']:,} slots, {row['data']}, {row['score']}")
            results.add(row)

        benchmark(device=device, sizes=sizes, scores=names, repeats=repeats, each=each, **settings)
    for made in tables(results.rows):
        console.print(made, "")
    return results.path, failures(results.rows)


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every row that stopped with an error or chose another victim than its oracle, whose N was not the same
    but for rounding."""
    lines = []
    for row in rows:
        where = f"{row['size']}×{row['batch']}×{row['dim']}, {row['data']}, {row['score']}"
        if "error" in row:
            lines.append(f"{where}: {row['error']}")
        elif row["same_victims"] < row["batch"] and not row.get("lead", math.inf) <= row.get("rounding", 0.0):
            lead = f"N of the first is {row['lead']:.1e} less" if "lead" in row else "N was not counted anew"
            lines.append(
                f"{where}: other victims than the oracle's from newcomer {row['same_victims']} of {row['batch']} on; "
                f"{lead}, largest error in N {row['largest_error_in_n']:.1e}"
            )
    return lines


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """One table per size, in milliseconds; a dash where a figure was not taken."""
    columns = {
        "loop": "reference_ms", "scratch": "scratch_ms", "carried": "carried_ms", "update": "update_ms",
        "FIFO": "fifo_update_ms", "ratio": "update_speedup", "same": "same_victims",
    }  # fmt: skip
    made: dict[tuple[int, int, int], Table] = {}
    for row in rows:
        size, batch, dim = place = row["size"], row["batch"], row["dim"]
        if place not in made:
            title = f"{size:,} slots, batch {batch:,}, dim {dim:,}: ms per batch"
            made[place] = table(title, ("data", "score"), tuple(columns))
        figures = ["failed"] if "error" in row else [_shown(row.get(key)) for key in columns.values()]
        made[place].add_row(row["data"], row["score"], *figures)
    if made:
        last = made[place]
        last.caption = (
            "loop: the paper's; scratch, carried: replace() without and with N of the last batch; update, FIFO: "
            "WorkingMemory.update; ratio: loop / update; same: victims equal to the oracle's, up to the first whose N "
            "is another by rounding alone"
        )
    return list(made.values())


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
