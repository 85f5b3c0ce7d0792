"""The memory of freed tensors is kept on a CPU: counted in page faults, which do not depend on the machine's speed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from duel.allocator import keep_freed_memory

# 64 MiB a turn; a few turns until malloc's own small change no longer lies between two of them
SCRIPT = """
import resource, torch
from duel import TrainConfig
from duel.machine import build_fabric

def faults(turns):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(turns):
        torch.empty(2**24).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults(10)
build_fabric(TrainConfig(device="cpu"))
faults(30)
print(before, faults(10))
"""


def _faults(**environment: str) -> list[int]:
    chosen = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**chosen, **environment}, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_training_process_keeps_the_memory_of_freed_tensors() -> None:
    before, after = _faults()
    assert before > 100, "nothing to gain here: the test says nothing"
    assert after < before / 10


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_the_environment_says_of_malloc_stays() -> None:
    before, after = _faults(MALLOC_ARENA_MAX="4")
    assert after > before / 2


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def confstr(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "confstr", confstr, raising=False)
    assert not keep_freed_memory()
