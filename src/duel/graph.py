"""A training step as one CUDA graph: the launches of hundreds of small kernels become one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

#: Steps that run eagerly first, so that optimizer state, workspaces and kernels exist before anything is recorded.
WARM_UP = 11

#: What spoils a recording: only what its own thread does, not another one that reads and pins the next images.
CAPTURE_ERRORS = "thread_local"

#: Recordings that failed. They live on, since the pinned memory of torch 2.11 goes on asking whether it is theirs.
_FAILED: list[torch.cuda.CUDAGraph] = []


class Graph:
    """Calls `work` eagerly for the first steps, then records it once and replays the recording.

    `work` must be free of host reads and of shapes that depend on data. Where recording fails, all goes on eagerly and
    `why_not` says why.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, generator: torch.Generator) -> None:
        self.work, self.device, self.generator = work, device, generator
        self.why_not: str | None = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side = torch.cuda.Stream(device)  # one for all steps: the memory that a stream has freed is kept for it

    def __call__(self) -> bool:
        """Do one step; True if it was a replay, so that nothing on the host ran."""
        if self._graph is not None:
            self._graph.replay()
            return True
        self._calls += 1
        if self._calls <= WARM_UP or self.why_not is not None:
            self._on_side_stream() if self.why_not is None else self.work()
            return False
        self._record()
        return False

    def _on_side_stream(self) -> None:
        """Warming up beside the default stream, as torch asks for."""
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            self.work()
        torch.cuda.current_stream(self.device).wait_stream(self._side)

    def _record(self) -> None:
        """Record one step and play it: recording alone computes nothing."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        graph.register_generator_state(self.generator)
        # torch 2.11 stays on the stream of a recording that failed, so we come back from it ourselves
        here = torch.cuda.stream(torch.cuda.current_stream(self.device))
        # cuBLAS keeps room for each stream; that of the warm-up is not the recording's and may be freed
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with here, torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE_ERRORS):
                self._attempt()
        except RuntimeError as error:
            self.why_not = self.why_not or _first_line(error)
        else:
            self._graph = graph
            graph.replay()
            return
        self._forget(graph, pool)  # only now, when the error no longer holds on to what was computed
        self.work()

    def _attempt(self) -> None:
        """The work; why it fails is noted here, since the end of the recording then fails too, with less to say."""
        try:
            self.work()
        except RuntimeError as error:
            self.why_not = _first_line(error)
            raise

    def _forget(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Clear up after a recording that failed. torch 2.11 goes on as if it were still being made, and so refuses to
        draw random numbers and to empty its cache; later versions do most of this themselves."""
        torch.cuda.synchronize(self.device)
        device = torch.cuda.current_device()
        graph.reset()
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        for generator in (self.generator, torch.cuda.default_generators[device]):
            generator.graphsafe_set_state(generator.clone_state())  # the same numbers, and nothing being recorded
        _FAILED.append(graph)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
