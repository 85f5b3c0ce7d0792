"""Work on a second CUDA stream, beside what the current one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A second stream of `device`; on other devices than GPUs what is done beside is simply done at once.

    What is made there may be used after `join`, and must not be freed before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __reduce__(self) -> tuple[type[Beside], tuple[torch.device]]:
        return Beside, (self.device,)  # a copy has a stream of its own

    @contextmanager
    def begin(self) -> Iterator[None]:
        """What is inside the block starts when all that has been asked for so far is done."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What follows waits for what was begun."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
