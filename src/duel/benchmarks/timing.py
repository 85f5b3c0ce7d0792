"""Time a call: median over repeats, on a GPU as replays of a captured graph; or several calls that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from duel.graph import CAPTURE_ERRORS


def milliseconds(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    graph: bool = True,
    generator: torch.Generator | None = None,
) -> float:
    """Median time of one call, after warming up. On a GPU with graph=True the call is captured once and replayed.

    generator: one that the call draws from; torch's own needs no mention.
    """
    if device.type != "cuda":
        call()
        return statistics.median(_elapsed(call, device) for _ in range(repeats))
    run = capture(call, generator) if graph else call
    run()
    return statistics.median(_elapsed(run, device) for _ in range(repeats))


def windows(
    calls: Sequence[Callable[[], object]], device: torch.device, *, count: int, length: int
) -> list[list[float]]:
    """For each call its milliseconds in `count` windows of `length` calls, each window's mean.

    The calls take turns window by window, so that what else the machine does falls on all of them alike.
    """

    def window(call: Callable[[], object]) -> None:
        for _ in range(length):
            call()

    times: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, into in zip(calls, times, strict=True):
            into.append(_elapsed(partial(window, call), device) / length)
    return times


def _elapsed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until the work of `call` is done: by the device's clock on a GPU, by the wall's elsewhere."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def capture(call: Callable[[], object], generator: torch.Generator | None = None) -> Callable[[], None]:
    """The call as a CUDA graph, after three warm-up calls on a side stream; generator: as above."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode=CAPTURE_ERRORS):
        call()
    return graph.replay  # type: ignore[no-any-return]


@contextmanager
def compiled_anew() -> Iterator[None]:
    """What was compiled before does not count towards torch's limit; going on uncompiled beyond it is an error."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_cache_limit_hit=True):
        yield
