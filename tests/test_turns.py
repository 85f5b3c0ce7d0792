"""The turns of a batch: compiled, by NumPy and in plain Python they are the same."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

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


RUNS = {"loops": lambda: turns._by_loops, "compiled": turns.compiled}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("compete", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("count", "slots"), [(1, 1), (1, 9), (9, 1), (12, 30), (40, 13)])
@pytest.mark.parametrize("most", [2, 1 << 24])  # everything ties; sums that float32 cannot hold
def test_every_way_gives_the_same(run, compete, dtype, count, slots, most):
    if run == "compiled" and turns.compiled() is turns.by_numpy:
        pytest.skip("numba is not installed")
    of = {"count": count, "slots": slots, "most": most, "dtype": dtype}
    for seed in range(4):
        want, missing = play(turns.by_numpy, compete, seed=seed, **of)
        got, asked = play(RUNS[run](), compete, seed=seed, **of)
        assert asked == missing
        for name, values in want.items():
            np.testing.assert_array_equal(got[name], values, err_msg=name)
        assert (want["position"] >= (-1 if compete else 0)).all()


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("size", [60, 500, 9000])  # all pairs known; rows fetched; candidates only
@pytest.mark.parametrize("run", ["by_numpy", "compiled"])
def test_the_dense_engine_gives_the_same_with_each(monkeypatch, size, admit, run):
    """Cosines are exact, so that slots and N must be, too."""
    if run == "compiled" and turns.compiled() is turns.by_numpy:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(turns, "_waited", 0.0 if run == "by_numpy" else turns.PATIENCE)
    memory, incoming = lattice(size, 8, 0), lattice(70, 8, 1)
    if size > dense.WHOLE:  # too many for the paper's loop
        memory = clusters(size, 8, 0)[0]
        other = turns._by_loops if run == "by_numpy" else turns.by_numpy
        got = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="dense")
        monkeypatch.setattr(turns, "fastest", lambda: other)
        want = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="dense")
    else:
        got = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="dense")
        want = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="reference")
    assert torch.equal(got.slots, want.slots)
    assert torch.equal(got.duplicates, want.duplicates)


def test_without_numba_numpy_does_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert turns.compiled.__wrapped__() is turns.by_numpy
    off = types.SimpleNamespace(config=types.SimpleNamespace(DISABLE_JIT=True))
    monkeypatch.setitem(sys.modules, "numba", off)
    assert turns.compiled.__wrapped__() is turns.by_numpy


def test_where_nothing_can_be_kept_it_is_compiled_each_time(monkeypatch):
    def njit(function=None, *, cache=False, fastmath=False):
        def compiled(function):
            if cache:
                raise RuntimeError("cannot cache function '_by_loops': no locator available for file '<string>'")
            return "compiled", function

        return compiled if function is None else compiled(function)

    numba = types.SimpleNamespace(config=types.SimpleNamespace(DISABLE_JIT=False), njit=njit)
    monkeypatch.setitem(sys.modules, "numba", numba)
    assert turns.compiled.__wrapped__() == ("compiled", turns._by_loops)


def test_numba_is_loaded_once_that_much_time_was_spent_without(monkeypatch):
    monkeypatch.setattr(turns, "compiled", lambda: turns._by_loops)
    monkeypatch.setattr(turns, "_waited", 0.0)
    assert turns.fastest() is turns.by_numpy
    memory, incoming = lattice(60, 8, 0), lattice(70, 8, 1)
    want = replace(memory, incoming, engine="dense")
    assert 0 < turns._waited < turns.PATIENCE
    turns.at_once()
    assert turns.fastest() is turns._by_loops
    assert torch.equal(replace(memory, incoming, engine="dense").slots, want.slots)
