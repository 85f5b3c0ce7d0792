"""A training step as one CUDA graph: the launches of hundreds of small kernels become one."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Steps that run eagerly first, so that optimizer state, workspaces and kernels exist before anything is recorded.
WARM_UP = 11


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
        """Warming up where the recording will be made, as torch asks for."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.work()
        torch.cuda.current_stream(self.device).wait_stream(side)

    def _record(self) -> None:
        """Record one step and play it: recording alone computes nothing."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph):
                self.work()
        except RuntimeError as error:
            self.why_not = str(error).splitlines()[0]
            torch.cuda.synchronize(self.device)
            self.work()
            return
        self._graph = graph
        graph.replay()
