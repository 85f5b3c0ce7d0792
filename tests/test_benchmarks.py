from __future__ import annotations

import dataclasses
import io
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from duel import encoders, losses, recipes, runs, stem
from duel.benchmarks import cases, floor, images, page, parts, peer_models, peers, replace, results, step, timing
from duel.cli import main
from duel.errors import UserError
from duel.machine import build_fabric
from duel.replacement import expected_duplicates, replace_unchecked
from duel.scores import get
from duel.step import COMPILED_FORMS, TrainingStep

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
REPLACE = ["bench", "replace", "--size", "64", "--dim", "16", "--repeats", "2", "--device", "cpu"]
STEP = ["bench", "step", "--device", "cpu", "--recipe", "demo", "--data", "digits", "--backbones", "convnet"]
QUICK = ["--batch-size", "16", "--count", "2", "--length", "1", "--warm-up", "1", "--repeats", "2"]


@pytest.fixture(autouse=True)
def short_schedule(monkeypatch):
    monkeypatch.setattr(cases, "STEPS", 100)  # a table of learning rates for each step takes its time


# Replacement ----------------------------------------------------------------------------------------------------


def test_bench_replace_checks_victims_and_writes_json(tmp_path, capsys):
    out = tmp_path / "bench.json"
    scores = ["linear", "gaussian:0.1", "0.1*gaussian:0.1+0.9*gaussian:0.003"]
    assert main([*REPLACE, "--batch", "1", "16", "--scores", *scores, "--out", str(out)]) == 0
    assert "64 slots, batch 16, dim 16: ms per batch" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["benchmark"] == "replace"
    assert len(written["rows"]) == 12
    assert {row["score"] for row in written["rows"]} == set(scores)
    for row in written["rows"]:
        assert row["same_victims"] == row["batch"]
        assert row["largest_error_in_n"] < 1e-4
        assert row["update_speedup"] == pytest.approx(row["reference_ms"] / row["update_ms"])
    assert {row["batch"] for row in written["rows"]} == {1, 16}
    assert written["versions"]["torch"]


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--scores", "gausian"], "did you mean"), (["--size", "0"], "at least 1"), (["--repeats", "0"], "at least 1")],
)
def test_bench_names_mistakes(option, message, capsys):
    assert main(["bench", "replace", "--device", "cpu", *option]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_benchmark_keeps_its_rows(tmp_path, monkeypatch):
    out, whole, calls = tmp_path / "bench.json", replace._row, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(replace, "_row", interrupted)
    assert main([*REPLACE, "--batch", "4", "--scores", "linear", "gaussian:0.1", "--out", str(out)]) == 130
    assert [row["score"] for row in json.loads(out.read_text())["rows"]] == ["linear"]


def test_called_from_python_the_call_is_on_record(tmp_path, monkeypatch):
    settings = {"device": CPU, "sizes": [(32, 4, 8)], "scores": ["gaussian"], "repeats": 1}
    assert {row["score"] for row in replace.benchmark(**settings)} == {"gaussian:1"}
    path, failed = replace.report(**settings, out=str(tmp_path / "x.json"), seed=3)
    assert not failed
    command = json.loads(path.read_text())["command"]
    assert command.startswith("duel.benchmarks.replace.report(device='cpu', ")
    assert "sizes=[(32, 4, 8)], scores=['gaussian:1'], repeats=1, seed=3)" in command
    monkeypatch.setattr(sys, "argv", ["/bin/duel", "bench", "replace", "--out", "my file"])
    assert runs.describe(CPU, call="other")["command"] == "duel bench replace --out 'my file'"


def test_whether_the_loops_were_compiled_is_on_record(monkeypatch):
    for library, word in ((object(), "C"), (None, "NumPy")):
        monkeypatch.setattr(runs, "library", lambda library=library: library)
        assert runs.describe(CPU)["versions"]["loops"] == word


def at_80(*shown) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(*shown)
    return console.file.getvalue()


def test_tables_fit_80_columns_without_shortening_a_figure():
    slow = {
        "size": 1 << 20, "batch": 1024, "dim": 256, "data": "isotropic", "score": "exponential:0.05",
        "reference_ms": 123456.7, "scratch_ms": 54321.4, "carried_ms": 9876.5, "update_ms": 8765.4,
        "fifo_update_ms": 0.1234, "update_speedup": 12345.6, "same_victims": 1023,
    }  # fmt: skip
    mixed = {**slow, "size": 64, "data": "clusters", "score": "gaussian:0.1+exponential:0.001"}
    text = at_80(*replace.tables([slow, mixed, {**slow, "error": "x" * 200}]))
    for figure in ("123,457", "54,321", "9,876", "8,765", "0.123", "12,346", "1,023"):
        assert text.count(figure) == 2, figure
    assert "1,048,576 slots, batch 1,024, dim 256: ms per batch" in text
    assert "failed" in text
    step_row = {"name": "D-SimCLR 512, refresh 64, reuse, resnet50", "ms": 12345.67, "images_per_s": 123456.0}
    step_row |= {"peak_gb": 123.45, "ratio": 12.345, "shares": dict.fromkeys(("loss", "encoder", "refresh"), 0.999)}
    step_text = at_80(step.table([step_row, {"name": "large", "error": "x" * 200}]))
    for figure in ("12345.67", "123,456", "123.45", "12.345"):
        assert figure in step_text
    assert step_text.count("99.9") == 3
    name = "asymmetric MoCo with batch statistics, plain PyTorch, compute only"
    peer = {"name": name, "ours_ms": 1234.5, "theirs_ms": 34567.8, "speedup": 28.0}
    peers_text = at_80(peers.table([peer]))
    assert all(figure in peers_text for figure in ("1234.50", "34567.80", "28.00"))
    assert "…" not in text + step_text + peers_text


@pytest.mark.parametrize("wrong", ["victims", "error"])
def test_a_row_that_is_not_right_ends_with_status_one(wrong, tmp_path, monkeypatch, capsys):
    def row(*args):
        if wrong == "error":
            raise RuntimeError("no such kernel")
        return {"same_victims": 3, "largest_error_in_n": 0.25}

    monkeypatch.setattr(replace, "_row", row)
    assert main([*REPLACE, "--batch", "4", "--scores", "linear", "--out", str(tmp_path / "x.json")]) == 1
    told = capsys.readouterr().err
    assert "64×4×16, isotropic, linear" in told
    assert ("no such kernel" if wrong == "error" else "from newcomer 3 of 4 on") in told


@pytest.mark.parametrize("score", ["linear", "gaussian:0.1"])
def test_the_recount_is_the_definition(score, monkeypatch):
    monkeypatch.setattr(replace, "PAIRS", 7 * 50)  # seven rows at a time
    memory = replace.pool("clusters", 50, 8, CPU, 0)
    assert torch.allclose(replace.recount(memory, score), expected_duplicates(memory.double(), score), atol=1e-6)


def test_a_wrong_count_of_n_is_noticed(monkeypatch):
    """Above the sizes of the literal loop the oracle counts N itself."""
    monkeypatch.setattr(replace, "LITERAL", 8)
    settings = {"device": CPU, "sizes": [(64, 8, 16)], "scores": ["linear"], "data": ["clusters"], "repeats": 1}
    (right,) = replace.benchmark(**settings)
    assert right["n_recounted"]
    assert right["same_victims"] == 8
    monkeypatch.setattr(replace, "expected_duplicates", lambda *args: expected_duplicates(*args).flip(0))
    (wrong,) = replace.benchmark(**settings)
    assert wrong["same_victims"] < 8
    assert replace.failures([right]) == []
    assert wrong["lead"] > wrong["rounding"]
    assert len(replace.failures([right, wrong])) == 1


@pytest.mark.parametrize("admit", ["always", "compete"])
def test_a_first_difference_is_weighed_in_float64(admit):
    memory, incoming = replace.pool("clusters", 48, 8, CPU, 0).split([40, 8])
    score, at = get("gaussian:0.1"), 5
    done = replace_unchecked(memory.double(), incoming[:at].double(), score, admit, None, "reference")
    after = memory.double()
    for slot, item in zip(done.slots.tolist(), incoming.double(), strict=False):
        if slot >= 0:
            after[slot] = item
    n = replace.recount(after, score)
    own = score(after @ incoming[at].double())
    if admit == "compete":
        n = n + own
    took = torch.cat([done.slots, torch.tensor([3])])
    found = replace._difference(memory, incoming, score, admit, took, 7)
    assert found["lead"] == pytest.approx(float(n[7] - n[3]), abs=1e-6)
    assert 0 < found["rounding"] < 1e-3
    if admit == "compete":
        found = replace._difference(memory, incoming, score, admit, took, -1)
        assert found["lead"] == pytest.approx(float(own.sum() - n[3]), abs=1e-6)
    row = {"size": 40, "batch": 8, "dim": 8, "data": "clusters", "score": "x", "same_victims": 5}
    row |= {"largest_error_in_n": 1.0, "rounding": 1e-6}
    assert replace.failures([row | {"lead": 1e-7}]) == []
    assert len(replace.failures([row | {"lead": 1e-5}, row | {"lead": float("nan")}, row])) == 3


# Steps ----------------------------------------------------------------------------------------------------------


def test_windows_take_turns():
    seen = []
    times = timing.windows([lambda: seen.append("a"), lambda: seen.append("b")], CPU, count=2, length=2)
    assert "".join(seen) == "aabbaabb"
    assert [len(t) for t in times] == [2, 2]


def test_calls_inside_others_are_timed_and_left_as_they_were(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(parts.time, "perf_counter", lambda: next(clock) / 1e3)

    class Work:
        def whole(self, times):
            return [self.part() for _ in range(times)]

        def part(self):
            return "done"

    work = Work()
    with parts.timed_calls([("whole", work, "whole"), ("part", work, "part")]) as spent:
        assert work.whole(times=2) == ["done", "done"]
    assert spent == pytest.approx({"part": 2.0, "whole": 5.0})  # a tick a look at the clock
    assert work.whole(1) == ["done"]
    assert next(clock) == 6
    assert not vars(work)


def test_bench_step_holds_rows_against_their_plain_one(tmp_path, capsys):
    out = tmp_path / "step.json"
    options = ["--methods", "moco", "simclr", "--memory", "64", "32", "--residents", "32", "--out", str(out)]
    assert main([*STEP, *QUICK, *options]) == 0
    assert "D-SimCLR" in capsys.readouterr().out
    written = json.loads(out.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    assert written["hardware"]["device"] == "cpu"
    assert {"MoCo 64, convnet", "D-MoCo 64, refresh 64, convnet", "D-MoCo 32, convnet", "SimCLR, convnet"} <= set(rows)
    assert "D-MoCo 32, refresh 32, convnet" not in rows  # refresh is measured at the first size
    for row in rows.values():
        assert row["images_per_s"] == pytest.approx(16e3 / row["ms"])
        assert row["mode"] == "eager"
        assert set(row["parts_ms"]) == {name for names in step.PARTS.values() for name in names}
        # of the steps they were measured in; the loss is not
        assert sum(row["shares"].values()) == pytest.approx(1) or row["shares"]["encoder"] == 0
        assert row["shares"]["encoder"] / row["shares"]["loss"] == pytest.approx(
            row["parts_ms"]["encoder"] / row["parts_ms"]["loss"]
        )
        assert len(row["ms_windows"]) == 2
        if row["plain"] is not None:
            assert row["plain"] in rows
            assert row["ratio"] == pytest.approx(row["ms"] / row["plain_ms"])
    first = rows["D-SimCLR, source memory 256, refresh 128, convnet"]  # as many slots as the recipe has for digits
    assert first["settings"]["space"] == "backbone"
    assert first["images_encoded"] == 2 * 16 + 128 + 16
    assert first["window_steps"] == 2  # every other step the centre moves
    literal = rows["D-SimCLR 32, literal, convnet"]
    assert literal["images_encoded"] == 2 * 16 + 32 + 16  # two views, residents, newcomers
    assert literal["parts_ms"]["refresh"] > 0
    assert rows["MoCo 64, convnet"]["parts_ms"]["refresh"] == 0
    assert rows["SimCLR, convnet"]["parts_ms"]["replacement"] == 0


@pytest.mark.parametrize(("option", "message"), [(["--methods", "mocco"], "moco"), (["--count", "0"], "at least 1")])
def test_bench_step_names_mistakes(option, message, tmp_path, capsys):
    assert main([*STEP, *option, "--out", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "shown"),
    [(["--methods", "mocco"], "--methods"), (["--batch-size", "8", "--root", "x"], "--batch-size, --root")],
)
def test_the_demo_refuses_what_it_would_not_look_at(option, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, "report", lambda rows, **settings: (tmp_path, []))
    assert main(["bench", "step", "--device", "cpu", "--no-parts", "--rows", "duel"]) == 0
    assert main(["bench", "step", "--device", "cpu", *option]) == 2
    assert (
        f"to which {shown} would do nothing; leave that out, or say what to measure with --backbones"
        in capsys.readouterr().err
    )


def test_rows_of_several_calls_go_into_one_file(tmp_path, capsys):
    out = tmp_path / "step.json"
    simclr = [*STEP, *QUICK, "--methods", "simclr", "--residents", "32", "--out", str(out)]
    assert main([*simclr, "--no-parts", "--rows", "literal"]) == 0
    before = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in before] == ["SimCLR, convnet", "D-SimCLR 32, literal, convnet"]  # with its plain row
    assert not any({"parts_ms", "started"} & set(row) for row in before)
    capsys.readouterr()
    assert main([*simclr, "--rows", "refresh 32, reuse", "--append"]) == 0
    assert "literal" in capsys.readouterr().out
    plain, literal, reuse = json.loads(out.read_text())["rows"]
    assert literal["ms"] == before[1]["ms"]
    assert plain["ms"] != before[0]["ms"]
    assert [row["repeats"] for row in (plain, literal, reuse)] == [2, 0, 2]
    assert "parts_ms" in plain
    assert all({"started", "commit", "hardware", "versions"} <= set(row) for row in (plain, literal, reuse))
    assert main([*simclr, "--rows", "litteral"]) == 2
    assert "SimCLR, convnet; D-SimCLR 32, literal, convnet; " in capsys.readouterr().err


def test_appended_rows_keep_where_they_come_from(tmp_path, monkeypatch):
    path = str(tmp_path / "x.json")

    def write(benchmark, commit, names, append):
        monkeypatch.setattr(results, "describe", lambda *args, **kwargs: {"commit": commit})
        made = results.Results(benchmark, CPU, path, {}, append=append, length=len(names))
        for name in names:
            made.add({"name": name, "ms": 1.0})
        return json.loads(Path(path).read_text())

    def commits(written):
        return [(row["name"], row["commit"], row["length"]) for row in written["rows"]]

    write("step", "one", ["a", "b"], False)
    assert commits(write("step", "two", ["b"], True)) == [("a", "one", 2), ("b", "two", 1)]
    third = write("step", "three", ["c", "c"], True)
    assert commits(third) == [("a", "one", 2), ("b", "two", 1), ("c", "three", 2)]
    with pytest.raises(UserError, match="duel bench step"):
        write("peers", "four", ["d"], True)
    assert write("step", "five", ["e"], False) == {
        "benchmark": "step", "commit": "five", "length": 1, "rows": [{"name": "e", "ms": 1.0}],
    }  # fmt: skip
    Path(path).write_text("[]")
    with pytest.raises(UserError, match="cannot append"):
        write("step", "six", ["f"], True)


def test_an_interrupted_step_benchmark_keeps_what_is_measured(tmp_path, monkeypatch):
    out = tmp_path / "step.json"

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "_shares", interrupted)
    options = ["--methods", "simclr", "--residents", "32", "--rows", "literal", "--out", str(out)]
    assert main([*STEP, *QUICK, *options]) == 130
    plain, literal = json.loads(out.read_text())["rows"]
    assert literal["ratio"] == pytest.approx(literal["ms"] / literal["plain_ms"])
    assert plain["ms"] > 0


def test_parts_that_cannot_be_measured_do_not_lose_the_step(monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("no such part")

    monkeypatch.setattr(step, "parts", broken)
    (row,) = step.benchmark(cases.demo_cases(batch_size=16)[:1], device=CPU, count=1, length=1, warm_up=0)
    assert row["parts_error"] == "ValueError: no such part"
    assert row["ms"] > 0


@pytest.fixture
def compilations(monkeypatch):
    """Calls of compiled code; a backend that compiles nothing stands in for inductor."""
    ran = []

    def backend(graph, inputs):
        def run(*args):
            ran.append(1)
            return graph.forward(*args)

        return run

    def compile(module, **settings):
        module._compiled_call_impl = torch.compile(module._call_impl, backend=backend, **settings)

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield ran
    torch.compiler.reset()


def few_forms(monkeypatch, count):
    """torch may compile so many forms of a backbone, and we ask for no more."""
    monkeypatch.setattr("duel.step.COMPILED_FORMS", count)
    torch._dynamo.config.recompile_limit = count


COMPILED = {"backbones": ["convnet"], "recipe": "demo", "data": "digits", "compile": True, "batch_size": 8}
ONCE = {"device": CPU, "count": 1, "length": 1, "warm_up": 1, "repeats": 0}


def test_earlier_rows_leave_room_to_compile(compilations, monkeypatch):
    few_forms(monkeypatch, 3)  # the first two rows use them up
    rows = cases.chosen(
        cases.cases(methods=["simclr", "simsiam"], residents=16, **COMPILED), ["literal", "SimSiam, conv"]
    )
    calls = []
    done = step.benchmark(rows, begins=lambda _: calls.append(len(compilations)), **ONCE)
    assert not [row for row in done if "error" in row or not row["compiled"]]
    calls.append(len(compilations))
    assert all(after > before for before, after in itertools.pairwise(calls))
    assert len(calls) == 4


def test_a_row_that_would_go_on_uncompiled_fails(compilations, monkeypatch):
    few_forms(monkeypatch, 1)
    plain, literal = step.benchmark(cases.cases(methods=["simclr"], residents=16, **COMPILED)[:2], **ONCE)
    assert "ms" in plain
    assert "recompile_limit" in literal["error"]


def test_a_compiled_step_may_have_many_forms(compilations):
    config = cases.cases(methods=["simclr"], device="cpu", **COMPILED)[0].config
    torch._dynamo.config.recompile_limit = 8  # until the end of the test, as `compilations` sees to
    TrainingStep(config, images.load(config, CPU), fabric=build_fabric(config))
    assert torch._dynamo.config.recompile_limit == COMPILED_FORMS


def test_a_step_that_cannot_be_built_does_not_lose_the_others(tmp_path):
    plain, duel = cases.demo_cases(batch_size=16)
    broken = dataclasses.replace(plain, name="broken", config=dataclasses.replace(plain.config, data="nowhere.npz"))
    with pytest.raises(UserError):  # a mistake is the user's to mend
        step.benchmark([broken], device=CPU, warm_up=0)
    with pytest.raises(UserError, match="not among the rows"):
        step.benchmark([duel], device=CPU)
    diverging = dataclasses.replace(plain, config=dataclasses.replace(plain.config, lr=1e30))
    rows = step.benchmark([diverging, duel], device=CPU, count=1, length=1, warm_up=2, repeats=1)
    assert ["error" in row for row in rows] == [True, False]
    assert "ratio" not in rows[1]


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_row_differs_from_its_plain_one_by_its_memory_alone(recipe):
    rows = {case.name: case for case in cases.cases(recipe=recipe)}
    assert len(rows) == 36
    memory = {"method", "policy", "source", "memory_size", "score", "refresh", "space", "reuse_newcomers", "queue"}
    for case in rows.values():
        if case.plain is None:
            continue
        plain = rows[case.plain].config
        assert {line.split(":")[0] for line in case.config.differences(plain)} <= memory
        assert case.config.method_settings == plain.method_settings  # key_batchnorm among them
        if plain.base_method == "moco":
            assert (case.config.queue or case.config.memory_size) == plain.memory_size
    assert sum(case.config.source == "memory" and case.config.memory_policy == "duel" for case in rows.values()) == 12


def test_the_demo_rows_differ_in_who_leaves_only():
    fifo, duel = cases.demo_cases()
    assert (fifo.config.memory_policy, duel.config.memory_policy) == ("fifo", "duel")
    differences = duel.config.differences(fifo.config)
    assert [line.split(":")[0] for line in differences] == ["policy"]
    assert duel.plain == fifo.name


@pytest.fixture
def simclr():
    (plain, *_) = cases.cases(methods=["simclr"], backbones=["convnet"], recipe="demo", device="cpu", batch_size=16)
    config = plain.config
    return TrainingStep(config, images.load(config, CPU), fabric=build_fabric(config))


def test_the_loss_is_measured_without_the_encoder(simclr):
    encoded = simclr.images_encoded
    with parts.encoders_that_answer_at_once(simclr) as (dummy, given):
        loss = simclr.method(dummy, dummy, simclr.ids + torch.arange(16)).loss
        loss.backward()
    want = losses.nt_xent(*given.detach().chunk(2), temperature=0.3)
    assert loss.item() == pytest.approx(want.item())
    assert given.grad.abs().sum() > 0
    assert all(p.grad is None for p in simclr.method.encoder.parameters())
    simclr.method.encoder(parts.views(simclr, simclr.images)[0])  # the real one again
    assert simclr.images_encoded > encoded


def test_newcomers_come_one_batch_after_the_other():
    (_, literal, *_) = cases.cases(
        methods=["simclr"], backbones=["convnet"], recipe="demo", device="cpu", batch_size=16, residents=32
    )
    made = TrainingStep(literal.config, images.load(literal.config, CPU), fabric=build_fabric(literal.config))
    made.fill_memory()
    newcomers = parts.Newcomers(made, made.upkeep, 3)
    for turn in range(4):
        newcomers.replace()
        assert torch.equal(made.images, newcomers.images[turn % 3])
        assert newcomers.ids[turn % 3, -1] in made.memory["id"]  # the last one is there; others may have gone again


def test_synthetic_images_are_told_apart():
    source = images.synthetic(64, 16, seed=1)
    assert source.data.shape == (64, 3, 16, 16)
    assert torch.equal(source.data, images.synthetic(64, 16, seed=1).data)
    means = source.data.float().mean(dim=(2, 3))
    assert means.std(dim=0).min() > 10  # of 255; pure noise has about 5


# The floor and the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_operations_are_those_that_torch_counts(name):
    with torch.device("meta"):
        model, batch = encoders.backbone(name, image_size=32), torch.zeros(4, 3, 32, 32)
    found = floor.layers(name)
    with FlopCounterMode(display=False) as forward:
        features = model(batch)
    with FlopCounterMode(display=False) as backward:
        features.sum().backward()
    total = forward.get_total_flops() + backward.get_total_flops()
    assert floor.cost(found, 4, floor.H200, floor.INFERENCE, backward=False).operations == forward.get_total_flops()
    assert floor.cost(found, 4, floor.H200, floor.FUSED, backward=True).operations == total


def test_the_floor_of_a_step():
    found = {case.name: case.config for case in cases.cases(backbones=["resnet18"])}
    images_of = {name: floor.images_of(config) for name, config in found.items()}
    assert images_of["MoCo 2,048, resnet18"] == images_of["D-MoCo 65,536, resnet18"] == (256, 0, 256)
    assert images_of["D-MoCo 2,048, refresh 64, resnet18"] == (256, 0, 256 + 64)
    assert images_of["D-MoCo, source memory 16,384, refresh 256, resnet18"] == (256, 0, 256 + 256 + 256)
    assert images_of["D-MoCo, source memory 16,384, pixels, resnet18"] == (256, 0, 256)
    assert images_of["D-SimCLR, source memory 32,768, pixels, resnet18"] == images_of["SimCLR, resnet18"]
    assert images_of["D-SimCLR 512, literal, resnet18"] == (512, 0, 512 + 256)
    assert images_of["D-SimCLR, source memory 32,768, refresh 512, resnet18"] == (512, 0, 512 + 256)
    fresh = dataclasses.replace(found["D-MoCo 65,536, resnet18"], fresh_keys=True)
    assert floor.images_of(fresh) == (256, 0, 256 + 256)
    assert images_of["BYOL, resnet18"] == (512, 512, 0)
    assert images_of["D-BYOL, source memory 16,384, refresh 256, resnet18"] == (512, 512, 256 + 256)
    assert images_of["SimSiam, resnet18"] == (512, 0, 0)

    def operations(name):
        return floor.step_floor(found[f"{name}, resnet18"]).operations

    # what docs/performance.md says of them: 768, 320 and 64 of 3 x 512 forwards, and 64 of 4 x 256
    assert operations("D-SimCLR 512, literal") / operations("SimCLR") == pytest.approx(1.5, rel=2e-3)
    assert operations("D-SimCLR 512, refresh 64") / operations("SimCLR") == pytest.approx(1.208, rel=2e-3)
    assert operations("D-SimCLR 512, refresh 64, reuse") / operations("SimCLR") == pytest.approx(1.042, rel=2e-3)
    assert operations("D-MoCo 2,048, refresh 64") / operations("MoCo 2,048") == pytest.approx(1.0625, rel=2e-3)
    plain = floor.step_floor(found["SimCLR, resnet18"])
    apart = floor.step_floor(found["SimCLR, resnet18"], passes=floor.SEPARATE)
    assert plain.seconds < apart.seconds
    assert plain.seconds > max(plain.operations / floor.H200.flops, plain.bytes / floor.H200.bandwidth)


def test_keys_with_the_statistics_of_their_batch_are_not_folded():
    (running, *_) = (case.config for case in cases.cases(methods=["moco"], backbones=["resnet18"]))
    batch = dataclasses.replace(running, key_batchnorm="batch")
    assert floor.images_of(batch) == (256, 256, 0)
    least, more = floor.step_floor(running), floor.step_floor(batch)
    assert least.operations == more.operations
    norms = sum(layer.outputs for layer in floor.layers("resnet18") if layer.kind == "norm")
    assert more.bytes - least.bytes == 256 * norms * 3 * floor.BYTES  # two reads and a write


def test_the_page_is_what_the_results_say():
    path = Path(__file__).parent.parent / "docs" / "performance.md"
    assert page.render(path.read_text(), path.parent.parent) == path.read_text(), "run: make performance"


def test_tables_come_from_the_files(tmp_path):
    row = {
        "name": "SimCLR, resnet18", "plain": None, "settings": {"backbone": "resnet18"}, "ms": 9.25,
        "images_per_s": 27676.0, "peak_gb": 2.5, "shares": {"sampling": 0.01, "augmentation": 0.05, "encoder": 0.9},
    }  # fmt: skip
    peer = {"name": "MoCo, lightly, end to end", "data": "cifar10", "ours_ms": 10.0, "theirs_ms": 52.5}
    head = {"hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "commit": "0123456789"}
    head |= {"started": "2026-11-15T10:07:56+00:00"}
    (tmp_path / "step.json").write_text(json.dumps({**head, "rows": [row, {"name": "large", "error": "no memory"}]}))
    (tmp_path / "peers.json").write_text(
        json.dumps({**head, "peers": {"lightly": "1.6.0"}, "rows": [{**peer, "speedup": 5.25}]})
    )
    text = "# Page\n\n<!-- step step.json -->\nold\n<!-- end -->\nkept\n<!-- peers peers.json -->\n<!-- end -->\n"
    made = page.render(text, tmp_path)
    assert "| SimCLR, resnet18 | 9.25 | 3.0 | 27,676 | 2.50 | – | 6.0 | 90.0 |" in made
    assert "| large | no memory |" in made
    assert "old" not in made
    assert "kept" in made
    assert "| MoCo, lightly, end to end | cifar10 | 10.00 | 52.50 | 5.25 |" in made
    assert "NVIDIA H200, torch 2.11.0, lightly 1.6.0, 2026-11-15, commit 0123456." in made
    assert page.render(made, tmp_path) == made


def test_the_page_tells_rows_of_different_origin_apart():
    origin = {"hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "started": "2026-11-15T10:07:56"}
    row = {"settings": {}, "ms": 9.0, "images_per_s": 1.0, "compiled": True, "mode": "graph", **origin}
    rows = [{**row, "name": "a", "commit": "1111111"}, {**row, "name": "b", "commit": "1111111", "compiled": False}]
    rows += [{**row, "name": "c", "commit": "2222222", "started": "2026-11-15T11:00:00"}, {"name": "d", "error": "x"}]
    rows += [{**row, "name": "e", "commit": "1111111", "started": "2026-11-15T11:00:00"}]
    made = page.step_table({"rows": rows, **origin, "commit": "2222222"}).splitlines()
    assert made[0] == (
        "Not all rows come from the same: (1) NVIDIA H200, torch 2.11.0, compiled, graph, 2026-11-15, commit 1111111; "
        "(2) NVIDIA H200, torch 2.11.0, graph, 2026-11-15, commit 1111111; "
        "(3) NVIDIA H200, torch 2.11.0, compiled, graph, 2026-11-15, commit 2222222."
    )
    assert [line.split(" | ")[-1] for line in made[4:]] == ["1 |", "2 |", "3 |", " |", "1 |"]


# Peers ----------------------------------------------------------------------------------------------------------


PEERS = ["bench", "peers", "--backbone", "convnet", "--data", "digits", "--workers", "0", "--batch-size", "16"]
PEERS += ["--count", "2", "--length", "1", "--warm-up", "1", "--compile", "False"]


@pytest.fixture
def small_queue(monkeypatch):
    standard = recipes.RECIPES["standard"]
    monkeypatch.setattr(recipes, "standard", lambda method: dataclasses.replace(standard(method), memory_size=64))


@pytest.mark.usefixtures("small_queue")
def test_peers_without_lightly_say_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightly", None)
    assert main(["bench", "peers", "--device", "cpu"]) == 2
    assert "pip install 'duel-ssl[peers]'" in capsys.readouterr().err
    out = tmp_path / "peers.json"
    assert main([*PEERS, "--device", "cpu", "--rows", "plain PyTorch", "--out", str(out)]) == 0
    assert {row["peer"] for row in json.loads(out.read_text())["rows"]} == {"plain PyTorch"}


@pytest.mark.usefixtures("small_queue")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_bench_peers_measures_both(device, tmp_path, capsys):
    pytest.importorskip("lightly", reason="the extra [peers] is not installed")
    out = tmp_path / "peers.json"
    assert main([*PEERS, "--device", device, "--out", str(out)]) == 0
    assert "compute only" in capsys.readouterr().out
    written = json.loads(out.read_text())
    names = [case.name for case in peers.comparisons()]
    assert [r["name"] for r in written["rows"]] == [f"{n}, {w}" for n in names for w in ("end to end", "compute only")]
    for row in written["rows"]:
        assert row["speedup"] == pytest.approx(row["theirs_ms"] / row["ours_ms"])
        assert row["mode"] == ("graph" if device == "cuda" else "eager")
    assert written["peers"]["lightly"]


def test_moco_is_held_against_its_like():
    found = {case.name: (case.config.key_batchnorm, case.config.symmetric) for case in peers.comparisons(["moco"])}
    assert found == {
        "MoCo, lightly": ("running", True),
        "MoCo, lightly, one BatchNorm group": ("running", True),
        "MoCo with batch statistics, lightly, one BatchNorm group": ("batch", True),
        "asymmetric MoCo with batch statistics, plain PyTorch": ("batch", False),
    }
    with pytest.raises(UserError, match="simclr"):
        peers.comparisons(["simlcr"])


def test_a_comparison_that_fails_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    def compare(case, **settings):
        if "lightly" in case.name:
            yield {"name": f"{case.name}, end to end", "ours_ms": 1.0, "theirs_ms": 2.0, "speedup": 2.0}
        raise RuntimeError(f"no memory for {case.name}")

    monkeypatch.setattr(peers, "compare", compare)
    monkeypatch.setattr(peers, "lightly", lambda: None)
    out = tmp_path / "peers.json"
    assert main([*PEERS, "--device", "cpu", "--methods", "moco", "--out", str(out)]) == 1
    assert len(json.loads(out.read_text())["rows"]) == 3
    assert capsys.readouterr().err.count("RuntimeError: no memory for") == 4


def test_a_whole_name_means_that_row_alone():
    known = peers.comparisons()
    assert [case.name for case in cases.chosen(known, ["MoCo, lightly"])] == ["MoCo, lightly"]
    assert {case.name for case in cases.chosen(known, ["one BatchNorm group"])} == {
        f"{name}, lightly, one BatchNorm group" for name in ("MoCo", "MoCo with batch statistics")
    }


def test_lightly_s_moco_normalises_an_eighth_of_the_batch_at_a_time():
    pytest.importorskip("lightly", reason="the extra [peers] is not installed")
    names = ["MoCo, lightly", "SimCLR, lightly", "MoCo, lightly, one BatchNorm group"]
    for case in cases.chosen(peers.comparisons(backbone="convnet", batch_size=16, memory_size=8), names):
        peer = peer_models.PEERS[case.peer](case.config, (3, 8, 8))
        norms = [m for m in peer.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        split = [m for m in norms if hasattr(m, "num_splits")]
        if case.name != "MoCo, lightly":
            assert norms
            assert not split
            assert peer.channels_last
            continue
        assert split == norms
        assert {m.num_splits for m in norms} == {8}
        assert not peer.channels_last
        peer(torch.rand(16, 3, 8, 8), torch.rand(16, 3, 8, 8)).backward()
        trained = [m for m in peer.backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        assert len(norms) == 2 * len(trained) > 0
        assert all(m.weight.grad is not None for m in trained)


def test_lightly_s_groups_do_not_meet_our_channels_last_stem(monkeypatch):
    pytest.importorskip("lightly", reason="the extra [peers] is not installed")
    monkeypatch.setattr(stem.StemConv2d, "forward", stem.StemConv2d.as_product)  # as on a GPU
    (case,) = cases.chosen(peers.comparisons(batch_size=16, memory_size=8), ["MoCo, lightly"])
    peer = peer_models.PEERS[case.peer](case.config, (3, 8, 8))
    ours = stem.StemConv2d(3, 4, 3, stride=2, padding=1, bias=False)
    plain = peer._plain(ours)
    assert type(plain) is torch.nn.Conv2d
    image = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(plain(image), ours(image))
    assert plain.weight is ours.weight
    peer(torch.rand(16, 3, 8, 8), torch.rand(16, 3, 8, 8)).backward()
    assert all(p.grad is not None for p in peer.backbone.parameters())


def test_plain_pytorch_is_moco_with_a_queue():
    (case,) = cases.chosen(peers.comparisons(backbone="convnet", batch_size=4, memory_size=6), ["plain PyTorch"])
    torch.manual_seed(0)
    peer = peer_models.PEERS[case.peer](case.config, (3, 8, 8))
    first, second, queue = torch.rand(4, 3, 8, 8), torch.rand(4, 3, 8, 8), peer.queue.clone()
    with torch.no_grad():
        for parameter in peer.slow.parameters():
            parameter.zero_()
    loss = peer(first, second)
    loss.backward()
    fast = [*peer.backbone.parameters(), *peer.head.parameters()]
    assert all(torch.allclose(slow, 0.01 * p) for slow, p in zip(peer.slow.parameters(), fast, strict=True))
    with torch.no_grad():
        query, key = peer.head(peer.backbone(first)), peer.slow(second)
    keys = torch.nn.functional.normalize(key, dim=1)
    assert loss.item() == pytest.approx(losses.info_nce(query, key, queue, temperature=0.1).item(), rel=1e-5)
    assert torch.allclose(peer.queue, torch.cat([keys, queue[4:]]), atol=1e-6)
    peer._enqueue(first.new_ones(4, case.config.dim))  # over the end of the queue
    assert peer.queue[:, 0].eq(1).tolist() == [True, True, False, False, True, True]


def test_plain_pytorch_sees_two_views():
    image = Image.fromarray(torch.randint(256, (8, 8, 3), dtype=torch.uint8).numpy())
    (case,) = cases.chosen(peers.comparisons(backbone="convnet"), ["plain PyTorch"])
    one, two = peer_models.PlainPeer(case.config, (3, 8, 8)).transform(8)(image)
    assert one.shape == two.shape == (3, 8, 8)
    assert not torch.equal(one, two)


# On a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("method", ["moco", "simclr"])
def test_rows_are_recorded_and_their_memory_is_their_own(method):
    plain, duel, *_ = cases.cases(
        methods=[method], backbones=["convnet"], recipe="demo", data="digits", memory=[64], residents=64,
        batch_size=32, compile=False,
    )  # fmt: skip
    again = dataclasses.replace(duel, name="again")
    rows = step.benchmark([plain, duel, again], device=torch.device("cuda"), count=2, length=4, repeats=2)
    for row in rows:
        assert row["mode"] == "graph"
        assert "parts_error" not in row
        assert row["ms"] > 0
        assert row["peak_gb"] > 0
    assert rows[2]["peak_gb"] == pytest.approx(rows[1]["peak_gb"], rel=0.01)
