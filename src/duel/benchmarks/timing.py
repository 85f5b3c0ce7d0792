"""Time a call: median over repeats, on a GPU as replays of a captured graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(call: Callable[[], object], device: torch.device, *, repeats: int, graph: bool = True) -> float:
    """Median time of one call, after warming up. On a GPU with graph=True the call is captured once and replayed."""
    if device.type != "cuda":
        call()
        return statistics.median(_wall(call) for _ in range(repeats)) * 1e3
    run = capture(call) if graph else call
    run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _wall(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph, after three warm-up calls on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay  # type: ignore[no-any-return]
