"""Every engine against the paper's loop, on random and on hostile inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import duel
from duel import scores
from duel.errors import UserError
from duel.replacement import dense, expected_duplicates, fused, kernels, replace, replace_unchecked
from duel.replacement.units import exact_products, exchange_units, exponent, likeliest, total_units
from duel.slots import highest, put
from pools import clusters, isotropic, judge, lattice, rounding

SCORES = ["linear", "quadratic", "gaussian", "gaussian:0.1", "exponential", "0.1*gaussian:0.1+0.9*gaussian:0.003"]
FAST = ["dense", "fused"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tests; tests/test_gpu.py has the GPU's")


def hostile(kind: str, n: int, d: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    if kind == "lattice":
        return lattice(n, d, seed, dtype)
    rows = isotropic(n, d, seed, dtype) if kind == "isotropic" else clusters(n, d, seed)[0].to(dtype)
    if kind == "copies" and n:
        rows = rows[torch.randint(0, max(1, n // 4), (n,), generator=torch.Generator().manual_seed(seed))]
        rows = rows * (torch.arange(n) % 3 != 0).to(dtype).mul(2).sub(1)[:, None]  # and antipodes of some
    return rows


pool_strategy = st.tuples(
    st.integers(1, 24),  # K
    st.integers(0, 30),  # B, also larger than K
    st.sampled_from([8, 12]),  # d
    st.integers(0, 10**6),  # seed
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pool=pool_strategy, score=st.sampled_from(SCORES), admit=st.sampled_from(["always", "compete"]))
@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_exact_duplicates_are_settled_alike(engine, dtype, pool, score, admit):
    """Exact cosines: the engines must agree on every slot, and on N to the last bit.

    Triton's exp may round differently from PyTorch's, so for the fused engine N may differ by that rounding; ties are
    between sums of the same values and must still be ties.
    """
    size, count, d, seed = pool
    memory, incoming = lattice(size, d, seed, dtype), lattice(count, d, seed + 1, dtype)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    got = replace(memory, incoming, score=score, admit=admit, engine=engine)
    assert got.slots.tolist() == want.slots.tolist()
    if engine == "dense" or score in ("linear", "quadratic"):
        assert torch.equal(got.duplicates, want.duplicates)
    else:
        assert (got.duplicates - want.duplicates).abs().max() <= rounding(memory, score)


@settings(max_examples=10, deadline=None)
@given(
    pool=pool_strategy,
    score=st.sampled_from(SCORES),
    admit=st.sampled_from(["always", "compete"]),
    kind=st.sampled_from(["isotropic", "clusters"]),
)
@pytest.mark.parametrize("engine", FAST)
def test_same_victims_in_float64(engine, pool, score, admit, kind):
    """No two N are equal here, so the victims must be the reference's."""
    size, count, d, seed = pool
    memory, incoming = hostile(kind, size, d, seed, torch.float64), hostile(kind, count, d, seed + 1, torch.float64)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    got = replace(memory, incoming, score=score, admit=admit, engine=engine)
    error, drift = judge(memory, incoming, got, score, admit)
    if error == 0:
        assert drift <= rounding(memory, score)
    assert got.slots.tolist() == want.slots.tolist() or error <= rounding(memory, score)


@settings(max_examples=10, deadline=None)
@given(
    pool=pool_strategy,
    score=st.sampled_from(SCORES),
    admit=st.sampled_from(["always", "compete"]),
    kind=st.sampled_from(["isotropic", "clusters", "copies"]),
)
@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_err_by_no_more_than_their_rounding(engine, dtype, pool, score, admit, kind):
    """Each victim's true N, replayed in float64, is the maximum up to the rounding of float32 cosines; so is N."""
    size, count, d, seed = pool
    memory, incoming = hostile(kind, size, d, seed, dtype), hostile(kind, count, d, seed + 1, dtype)
    got = replace(memory, incoming, score=score, admit=admit, engine=engine)
    error, drift = judge(memory, incoming, got, score, admit)
    assert error <= 2 * rounding(memory, score)
    assert drift <= 2 * rounding(memory, score)


def overlooked_by(monkeypatch):
    """How many slots the dense engine finds in each round that it should have simulated as well."""
    found, original = [], dense.Batch._overlooked

    def overlooked(batch):
        slots = original(batch)
        assert not set(slots.tolist()) & set(batch.candidates.tolist())
        found.append(slots.numel())
        return slots

    monkeypatch.setattr(dense.Batch, "_overlooked", overlooked)
    return found


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["isotropic", "clusters", "lattice"])
def test_pruned_simulation_is_exact_on_larger_memories(monkeypatch, kind, score, admit):
    """Far fewer candidates than slots, so that verification and second rounds have work to do."""
    memory, incoming = hostile(kind, 300, 16, 3, torch.float64), hostile(kind, 64, 16, 4, torch.float64)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    monkeypatch.setattr(dense, "WHOLE", 1)
    monkeypatch.setattr(dense, "width", lambda newcomers: 8)
    monkeypatch.setattr(dense, "COLUMNS", 100)
    found = overlooked_by(monkeypatch)
    got = replace(memory, incoming, score=score, admit=admit, engine="dense")
    assert got.slots.tolist() == want.slots.tolist()
    assert (got.duplicates - want.duplicates).abs().max() <= rounding(memory, score)
    assert found[0] > 0  # eight candidates are too few: it must have noticed
    assert found[-1] == 0


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", ["linear", "gaussian:0.1"])
@pytest.mark.parametrize(("kind", "candidates"), [("isotropic", 4), ("clusters", 48), ("lattice", 16), ("lattice", 64)])
def test_fused_verifies_and_mends(monkeypatch, kind, candidates, score, admit):
    """With few candidates the simulation is wrong and the literal kernel takes over; with enough it is not."""
    monkeypatch.setattr(fused, "WHOLE", 1)
    monkeypatch.setattr(fused, "CANDIDATES", candidates)
    simulations: list[fused._Simulation] = []
    original = fused._Simulation

    def simulation(*args):
        simulations.append(original(*args))
        return simulations[-1]

    monkeypatch.setattr(fused, "_Simulation", simulation)
    memory, incoming = hostile(kind, 90, 16, 3, torch.float64), hostile(kind, 12, 16, 4, torch.float64)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    got = replace(memory, incoming, score=score, admit=admit, engine="fused")
    assert got.slots.tolist() == want.slots.tolist()
    assert (got.duplicates - want.duplicates).abs().max() <= rounding(memory, score)
    first_wrong = int(simulations[0].first_wrong)
    if candidates == 4:
        assert first_wrong < 12  # so few cannot have sufficed


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("engine", FAST)
def test_items_that_are_all_alike_are_no_mistakes(monkeypatch, engine, admit):
    """A collapsed encoder gives them: every slot ties, and the lowest leaves, which must be among the candidates."""
    item = isotropic(1, 16, 0)
    memory, incoming = item.expand(90, 16).contiguous(), item.expand(12, 16).contiguous()
    want = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine="reference")
    literal = fused._Launch._go_on

    def nothing_to_mend(launch, seen, lost, total, inside, simulation):
        assert int(simulation.first_wrong) == 12
        literal(launch, seen, lost, total, inside, simulation)

    for module in (dense, fused):
        monkeypatch.setattr(module, "WHOLE", 1)
    monkeypatch.setattr(fused, "CANDIDATES", 16)
    monkeypatch.setattr(dense, "width", lambda newcomers: 16)
    found = overlooked_by(monkeypatch)
    monkeypatch.setattr(fused._Launch, "_go_on", nothing_to_mend)
    got = replace(memory, incoming, score="gaussian:0.1", admit=admit, engine=engine)
    assert got.slots.tolist() == want.slots.tolist()
    assert found == ([0] if engine == "dense" else [])


def test_candidates_are_the_most_duplicated_now_and_those_that_may_become_so():
    total, bound = torch.tensor([5.0, 1, 4, 4, 0, 0]), torch.tensor([6.0, 9, 6, 8, 7, 9])
    assert highest(total, 2)[0].tolist() == [0, 2]  # of equals the first
    places, inside = likeliest(total.double(), bound.double(), 4)
    assert places.tolist() == [0, 1, 3, 5]  # slot 0 for its N, the others for their bounds
    assert inside.tolist() == [1, 1, 0, 1, 0, 1]
    assert (((found := highest(torch.tensor([1.0, torch.nan, 2.0]), 2)[0]) >= 0) & (found < 3)).all()  # never outside


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("form", ["dense", "dense by candidates", "fused"])
def test_batches_larger_than_a_block(monkeypatch, form, admit):
    engine = form.split()[0]
    monkeypatch.setattr({"dense": dense, "fused": fused}[engine], "BLOCK", 7)
    if "candidates" in form:
        monkeypatch.setattr(dense, "WHOLE", 1)
        monkeypatch.setattr(dense, "width", lambda newcomers: 8)
    memory, incoming = isotropic(20, 8, 0), isotropic(45, 8, 1)
    want = replace(memory, incoming, score="quadratic", admit=admit, engine="reference")
    got = replace(memory, incoming, score="quadratic", admit=admit, engine=engine)
    assert got.slots.tolist() == want.slots.tolist()
    assert (got.duplicates - want.duplicates).abs().max() <= rounding(memory, "quadratic")


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", SCORES)
def test_column_by_column_is_exact(score, admit):
    """What `dense` does on a GPU, run on the CPU."""
    memory, incoming = clusters(60, 8, 0)[0], clusters(30, 8, 1)[0]
    h, e = scores.get(score), exponent(60)
    skip = torch.zeros(30, dtype=torch.bool)
    skip[3] = True
    got, total = dense._column_by_column(memory, incoming, total_units(h, memory, e), h, admit, e, skip)
    want = replace_unchecked(memory, incoming, h, admit, None, "reference", skip)
    assert got.tolist() == want.slots.tolist()
    assert (total * 2.0**-e - want.duplicates).abs().max() <= rounding(memory, score)


@pytest.mark.parametrize("engine", ["reference", "dense", "fused"])
@pytest.mark.parametrize("admit", ["always", "compete"])
def test_skipped_rows_change_nothing(engine, admit):
    memory, incoming = isotropic(15, 8, 0), isotropic(9, 8, 1)
    skip = torch.tensor([True, False, False, True, False, False, True, False, True])
    got = replace_unchecked(memory, incoming, scores.get("gaussian"), admit, None, engine, skip)
    want = replace(memory, incoming[~skip], score="gaussian", admit=admit, engine="reference")
    assert got.slots[skip].tolist() == [-1] * 4
    assert got.slots[~skip].tolist() == want.slots.tolist()
    assert (got.duplicates - want.duplicates).abs().max() < 1e-9


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("size", [16, pytest.param(fused.WHOLE, marks=pytest.mark.slow)])
def test_a_newcomer_that_competes_loses_a_tie_with_the_very_last_slot(engine, size):
    """The last place that a key has room for must be nobody's but a newcomer's."""
    memory = isotropic(size, 16, 0)
    got = replace(memory, memory[-1:], score="exponential:0.01", admit="compete", engine=engine)
    assert got.slots.tolist() == [size - 1]


def test_keys_have_room_for_all_places_and_one_more():
    assert fused.WHOLE < 2**kernels.PLACE_BITS_OF_ALL
    assert fused.CANDIDATES < 2**kernels.PLACE_BITS
    # N stays below size · 2^e, and keys below 2^63
    assert (fused.WHOLE + fused.BLOCK).bit_length() + exponent(fused.WHOLE) + kernels.PLACE_BITS_OF_ALL < 63


@pytest.mark.parametrize("engine", ["dense", "fused"])
def test_carried_duplicates_give_the_same_as_fresh_ones(engine):
    memory = clusters(50, 8, 0)[0]
    carried = None
    for step in range(5):
        incoming = clusters(20, 8, step + 1)[0]
        fresh = replace(memory, incoming, score="gaussian:0.1", engine=engine)
        done = replace(memory, incoming, score="gaussian:0.1", duplicates=carried, engine=engine)
        assert done.slots.tolist() == fresh.slots.tolist()
        memory = put(memory, done.slots, incoming)
        carried = done.duplicates
        assert (carried - expected_duplicates(memory, "gaussian:0.1")).abs().max() < 1e-9


def test_the_papers_counter_example():
    """M = {A, B}, newcomer B: N ties at the newcomer's expense, and the lowest slot leaves (method.md, Theorem 1)."""
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    done = replace(torch.stack([a, b]), b[None], score="linear")
    assert done.slots.tolist() == [0]
    assert done.duplicates.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("score", SCORES)
def test_compete_never_lowers_diversity(score):
    h = scores.get(score)
    for seed in range(30):
        memory, incoming = isotropic(12, 6, seed), isotropic(8, 6, seed + 100)
        done = replace(memory, incoming, score=score, admit="compete", engine="reference")
        after = put(memory, done.slots, incoming)
        assert (1 - h(after @ after.T)).sum() >= (1 - h(memory @ memory.T)).sum() - 1e-9


def test_a_callable_works_in_every_engine():
    memory, incoming = isotropic(30, 8, 0), isotropic(12, 8, 1)
    slots = [
        replace(memory, incoming, score=lambda x: ((1 + x) / 2) ** 4, engine=engine).slots.tolist()
        for engine in ("reference", "dense", "fused")
    ]
    assert slots[0] == slots[1] == slots[2]


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("kind", ["clusters", "lattice"])
def test_a_weighted_mix_works_in_every_engine(kind, admit):
    score = "0.1*gaussian:0.1+0.9*gaussian:0.003"
    memory, incoming = hostile(kind, 60, 16, 3, torch.float64), hostile(kind, 24, 16, 4, torch.float64)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    assert judge(memory, incoming, want, score, admit)[0] <= rounding(memory, score)
    for engine in FAST:
        got = replace(memory, incoming, score=score, admit=admit, engine=engine)
        assert got.slots.tolist() == want.slots.tolist()
        assert (got.duplicates - want.duplicates).abs().max() <= rounding(memory, score)


def test_an_empty_batch_returns_the_count_alone():
    memory = isotropic(5, 4, 0)
    done = replace(memory, memory[:0], score="linear")
    assert done.slots.shape == (0,)
    assert torch.allclose(done.duplicates, expected_duplicates(memory))


def test_inputs_are_not_changed():
    memory, incoming = isotropic(30, 8, 0), isotropic(12, 8, 1)
    copies = memory.clone(), incoming.clone()
    for engine in ("reference", "dense", "fused"):
        n = expected_duplicates(memory)
        before = n.clone()
        duel.replace(memory, incoming, duplicates=n, engine=engine)
        assert torch.equal(n, before)
    assert torch.equal(memory, copies[0])
    assert torch.equal(incoming, copies[1])


def test_autocast_does_not_narrow_the_products():
    memory, incoming = isotropic(64, 32, 0, torch.float32), isotropic(32, 32, 1, torch.float32)
    want = replace(memory, incoming, score="gaussian:0.1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = replace(memory, incoming, score="gaussian:0.1")
    assert torch.equal(got.duplicates, want.duplicates)


def test_small_values_of_a_sharp_score_survive():
    """Ten nearly orthogonal items: N is around 1e-6 and must still rank them."""
    memory = isotropic(10, 64, 0)
    n = expected_duplicates(memory, "exponential:0.06")
    exact = scores.get("exponential:0.06")(memory @ memory.T).fill_diagonal_(0).sum(1)
    assert 1e-7 < exact.max() < 1e-4
    assert n.argsort().tolist() == exact.argsort().tolist()
    assert (n - exact).abs().max() <= 9 * 2.0**-31  # nine values, each half a unit off at most


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("size", "count"), [(70, 9), (33, 33), (20, 0), (90, 40)])
def test_exchanged_items_are_counted_alike_by_triton(score, size, count, monkeypatch):
    """N after some slots have got other items, carried; the same units as PyTorch's, and as counting anew."""
    monkeypatch.setattr(fused, "BLOCK", 16)  # more than one piece
    before, fresh = hostile("clusters", size, 8, 0, torch.float64), hostile("lattice", count, 8, 1, torch.float64)
    slots = torch.randperm(size, generator=torch.Generator().manual_seed(2))[:count]
    after, e, h = before.index_copy(0, slots, fresh), exponent(size), scores.get(score)
    total = total_units(h, before, e)
    want = exchange_units(total, after, slots, before[slots], h, e)
    got = fused.exchange_fused(total, after, slots, before[slots], h, e)
    assert (got - want).abs().max() <= 2 * size  # exp may round otherwise
    strided = torch.stack([slots, slots], 1)[:, 0]
    assert fused.exchange_fused(total, after, strided, before[slots], h, e).equal(got)
    assert (got - total_units(h, after, e)).abs().max() <= 2 * size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": torch.zeros(0, 4)}, "K >= 1"),
        ({"memory": torch.zeros(4)}, r"\(K, d\)"),
        ({"incoming": torch.ones(2, 3)}, r"incoming must have shape \(n, 4\)"),
        ({"incoming": torch.ones(2, 4)}, "row 0 has length 2"),
        ({"incoming": torch.full((1, 4), float("nan"))}, "not finite"),
        ({"memory": torch.full((3, 4), float("inf"))}, "memory must hold finite"),
        ({"incoming": torch.ones(2, 4, dtype=torch.int64)}, "floating point"),
        ({"score": "lineal"}, "did you mean 'linear'"),
        ({"engine": "fussed"}, "did you mean 'fused'"),
        ({"admit": "allways"}, "did you mean 'always'"),
        ({"duplicates": torch.zeros(3)}, "duplicates must have shape"),
    ],
)
def test_bad_input_is_named(arguments, message):
    good = {"memory": torch.eye(4), "incoming": torch.eye(4)[:2]}
    with pytest.raises(UserError, match=message):
        replace(**{**good, **arguments})


def test_a_missing_gpu_or_triton_is_an_error_only_when_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UserError, match="not on a CUDA device"):
        replace(torch.eye(4), torch.eye(4)[:2], engine="fused")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        replace(torch.eye(4), torch.eye(4)[:2], engine="fused")
    replace(torch.eye(4), torch.eye(4)[:2], engine="auto")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 700),
    count=st.integers(0, 300),
    seed=st.integers(0, 10**6),
    score=st.sampled_from(SCORES),
    admit=st.sampled_from(["always", "compete"]),
    kind=st.sampled_from(["isotropic", "clusters", "lattice"]),
)
def test_dense_at_length(size, count, seed, score, admit, kind):
    memory, incoming = hostile(kind, size, 16, seed, torch.float64), hostile(kind, count, 16, seed + 1, torch.float64)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    got = replace(memory, incoming, score=score, admit=admit, engine="dense")
    if got.slots.tolist() != want.slots.tolist():
        assert judge(memory, incoming, got, score, admit)[0] <= rounding(memory, score)


@pytest.mark.parametrize("admit", ["always", "compete"])
@pytest.mark.parametrize("score", ["linear", "gaussian:0.1"])
@pytest.mark.parametrize(("size", "distinct"), [(300, 3), (200, 1)])
def test_a_collapsed_memory_ties_everywhere(size, distinct, score, admit):
    """Far more slots tie than rows of h are fetched at a time."""
    memory, incoming = lattice(distinct, 8, 0)[torch.arange(size) % distinct], lattice(70, 8, 1)
    want = replace(memory, incoming, score=score, admit=admit, engine="reference")
    got = replace(memory, incoming, score=score, admit=admit, engine="dense")
    assert got.slots.tolist() == want.slots.tolist()
    assert torch.equal(got.duplicates, want.duplicates)


def test_narrow_copies_are_counted_as_unit_vectors():
    """bfloat16 rows are a per mille off unit length: their copies' cosines must not exceed 1 in any path."""
    rows = isotropic(12, 16, 0, torch.bfloat16)
    memory, incoming = rows[torch.arange(400) % 12], isotropic(20, 16, 1, torch.bfloat16)
    n = expected_duplicates(memory, "linear")
    wide = torch.nn.functional.normalize(memory.float(), dim=1).double()
    exact = ((1 + (wide @ wide.T)) / 2).fill_diagonal_(0).sum(1)
    assert (n - exact).abs().max() <= rounding(memory, "linear")
    got = replace(memory, incoming, score="linear", engine="dense")
    assert judge(memory, incoming, got, "linear", "always")[0] <= 2 * rounding(memory, "linear")


def test_the_users_matmul_precision_is_left_as_it_was():
    matmul = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    before = getattr(matmul, name)
    values = ("ieee", "tf32") if name == "fp32_precision" else (False, True)
    try:
        for value in values:
            setattr(matmul, name, value)
            with exact_products(torch.device("cuda")):
                assert getattr(matmul, name) == values[0]
            assert getattr(matmul, name) == value
    finally:
        setattr(matmul, name, before)


@pytest.mark.filterwarnings("error")
def test_embeddings_that_require_a_gradient_are_taken_as_they_are():
    memory, incoming = (isotropic(count, 8, 0).requires_grad_() for count in (6, 3))
    done = duel.replace(memory, incoming)
    assert not done.duplicates.requires_grad
    assert torch.equal(done.slots, duel.replace(memory.detach(), incoming.detach()).slots)


def test_pairs_are_counted_a_block_at_a_time(monkeypatch):
    """Blocks beside the diagonal count for both sides; slots that changed are exchanged a few at a time."""
    memory, score, e = isotropic(1400, 8, 0), scores.get("gaussian:0.1"), exponent(1400)
    monkeypatch.setattr("duel.replacement.units.CHUNK_ELEMENTS", {"cpu": 512 * 600})
    h = score(memory @ memory.T).fill_diagonal_(0.0)
    total = total_units(score, memory, e)
    assert (total * 2.0**-e - h.sum(1)).abs().max() < 1e-4
    slots, fresh = torch.arange(3, 1400, 100), isotropic(14, 8, 1)
    after = memory.index_copy(0, slots, fresh)
    monkeypatch.setattr("duel.replacement.units.CHUNK_ELEMENTS", {"cpu": 1400 * 4})
    exchanged = exchange_units(total, after, slots, memory[slots], score, e)
    assert torch.equal(exchanged, total_units(score, after, e))
