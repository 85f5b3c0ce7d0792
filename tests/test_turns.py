"""The turns of a batch: compiled and by NumPy they are the same."""

from __future__ import annotations

import importlib.util
import types

import numpy as np
import pytest
import torch

from duel import compiled
from duel.replacement import dense, replace, turns
from pools import clusters, lattice


def case(count: int, slots: int, most: int, seed: int, dtype: type) -> tuple[dict, np.ndarray]:
    """A memory and newcomers with whole h below `most`: the arguments, no row of a resident given; and those rows."""
    random = np.random.default_rng(seed)
    h = random.integers(0, most, (count + slots, count + slots)).astype(dtype)
    h = np.tril(h, -1) + np.tril(h, -1).T
    state = {
        "n": h[:, count:].sum(1, dtype=np.float64) * (np.arange(count + slots) >= count),
        "h": h[:count].copy(),
        "rows": np.empty((0, slots), dtype),
        "at": np.full(slots, -1),
        "occupant": np.arange(count, count + slots),
        "position": np.full(count, -2),
        "evicted": np.full(count, -2),
        "level": np.zeros(count),
    }
    return state, h[count:, count:].copy()


def play(run: turns.Turns, compete: bool, **of: int) -> tuple[dict, list[int]]:
    """All turns of `case`; each missing row is given when it is asked for. Returns also where it was."""
    state, residents = case(**of)
    done, asked = -1, []
    while (done := run(tuple(state.values()), compete, done)) < len(state["h"]):
        asked.append(done)
        values = state["n"][state["occupant"]]
        values += state["h"][done, state["occupant"]] if compete else 0
        gone = state["occupant"][values.argmax()] - len(state["h"])
        assert state["at"][gone] < 0
        state["at"][gone] = len(state["rows"])
        state["rows"] = np.concatenate([state["rows"], residents[gone : gone + 1]])
    return state, asked


built = pytest.mark.skipif(compiled.library() is None, reason="nothing was compiled at installation")


@built
@pytest.mark.parametrize("compete", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("count", "slots"), [(1, 1), (1, 9), (9, 1), (12, 30), (40, 13)])
@pytest.mark.parametrize("most", [2, 1 << 24, 1 << 30])  # all tie; sums and differences that float32 cannot hold
def test_compiled_they_are_those_of_numpy(compete, dtype, count, slots, most):
    of = {"count": count, "slots": slots, "most": most, "dtype": dtype}
    for seed in range(4):
        want, missing = play(turns.by_numpy, compete, seed=seed, **of)
        got, asked = play(turns.by_c, compete, seed=seed, **of)
        assert asked == missing
        for name, values in want.items():
            np.testing.assert_array_equal(got[name], values, err_msg=name)
        assert (want["position"] >= (-1 if compete else 0)).all()


@built
def test_arrays_that_lie_otherwise_are_not_misread():
    of = {"count": 12, "slots": 30, "most": 1 << 24, "dtype": np.float64, "seed": 0}
    want, _ = play(turns.by_numpy, True, **of)
    state, residents = case(**of)
    state |= {"h": np.asfortranarray(state["h"]), "rows": residents.astype(np.float32), "at": np.arange(30)}
    assert turns.by_c(tuple(state.values()), True, -1) == 12
    np.testing.assert_array_equal(state["n"], want["n"])
    with pytest.raises(TypeError, match="contiguous"):  # what is written to cannot be copied first
        turns.by_c(tuple((state | {"n": np.zeros(84)[::2]}).values()), True, -1)


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("size", [60, 500])  # all pairs known; rows fetched
@pytest.mark.parametrize("run", [turns.by_numpy, pytest.param(turns.by_c, marks=built)])
def test_the_dense_engine_is_right_with_each(monkeypatch, size, admit, run):
    """Cosines are exact, so that slots and N must be, too."""
    monkeypatch.setattr(turns, "fastest", lambda: run)
    memory, incoming = lattice(size, 8, 0), lattice(70, 8, 1)
    got = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="dense")
    want = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="reference")
    assert torch.equal(got.slots, want.slots)
    assert torch.equal(got.duplicates, want.duplicates)


@built
@pytest.mark.parametrize("admit", ["always", "compete"])
def test_the_dense_engine_gives_the_same_with_each_in_a_large_memory(monkeypatch, admit):
    memory, incoming = clusters(dense.WHOLE + 1000, 8, 0)[0], lattice(70, 8, 1)
    assert turns.fastest() is turns.by_c
    got = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="dense")
    monkeypatch.setattr(turns, "fastest", lambda: turns.by_numpy)
    want = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="dense")
    assert torch.equal(got.slots, want.slots)
    assert torch.equal(got.duplicates, want.duplicates)


@pytest.mark.parametrize("origin", [None, __file__, torch._C.__file__])  # not built; no library; another one
def test_where_nothing_was_built_numpy_does_it(monkeypatch, origin):
    found = None if origin is None else types.SimpleNamespace(origin=origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert compiled.library.__wrapped__() is None
    monkeypatch.setattr(compiled, "library", compiled.library.__wrapped__)
    assert turns.fastest() is turns.by_numpy
