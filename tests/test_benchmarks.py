from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from duel import encoders, losses, runs
from duel.benchmarks import floor, images, page, parts, peers, replace, step, timing
from duel.cli import main
from duel.errors import UserError
from duel.machine import build_fabric
from duel.replacement import expected_duplicates, replace_unchecked
from duel.scores import get
from duel.step import TrainingStep

CPU = torch.device("cpu")
REPLACE = ["bench", "replace", "--size", "64", "--dim", "16", "--repeats", "2", "--device", "cpu"]
STEP = ["bench", "step", "--device", "cpu", "--recipe", "demo", "--data", "digits", "--backbones", "convnet"]
QUICK = ["--batch-size", "16", "--count", "2", "--length", "1", "--warm-up", "1", "--repeats", "2"]


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
    peer = {"method": "simclr", "what": "compute only", "ours_ms": 1234.5, "lightly_ms": 34567.8, "speedup": 28.0}
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
        assert row["shares"]["encoder"] == pytest.approx(row["parts_ms"]["encoder"] / row["ms"])
        assert len(row["ms_windows"]) == 2
        if row["plain"] is not None:
            assert row["ratio"] == pytest.approx(row["ms"] / rows[row["plain"]]["ms"])
    literal = rows["D-SimCLR 32, literal, convnet"]
    assert literal["images_encoded"] == 2 * 16 + 32 + 16  # two views, residents, newcomers
    assert literal["parts_ms"]["refresh"] > 0
    assert rows["MoCo 64, convnet"]["parts_ms"]["refresh"] == 0
    assert rows["SimCLR, convnet"]["parts_ms"]["replacement"] == 0


@pytest.mark.parametrize(("option", "message"), [(["--methods", "mocco"], "moco"), (["--count", "0"], "at least 1")])
def test_bench_step_names_mistakes(option, message, tmp_path, capsys):
    assert main([*STEP, *option, "--out", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_step_that_cannot_be_built_does_not_lose_the_others(tmp_path):
    plain, duel = step.demo_cases(batch_size=16)
    broken = dataclasses.replace(plain, name="broken", config=dataclasses.replace(plain.config, data="nowhere.npz"))
    with pytest.raises(UserError):  # a mistake is the user's to mend
        step.benchmark([broken], device=CPU, warm_up=0)
    with pytest.raises(UserError, match="not among the rows"):
        step.benchmark([duel], device=CPU)
    diverging = dataclasses.replace(plain, config=dataclasses.replace(plain.config, lr=1e30))
    rows = step.benchmark([diverging, duel], device=CPU, count=1, length=1, warm_up=2, repeats=1)
    assert ["error" in row for row in rows] == [True, False]
    assert "ratio" not in rows[1]


def test_the_demo_rows_differ_in_who_leaves_only():
    fifo, duel = step.demo_cases()
    assert (fifo.config.memory_policy, duel.config.memory_policy) == ("fifo", "duel")
    differences = duel.config.differences(fifo.config)
    assert [line.split(":")[0] for line in differences] == ["policy"]
    assert duel.plain == fifo.name


@pytest.fixture
def simclr():
    (plain, *_) = step.cases(methods=["simclr"], backbones=["convnet"], recipe="demo", device="cpu", batch_size=16)
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
    (_, literal, *_) = step.cases(
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
    found = {case.name: case.config for case in step.cases(backbones=["resnet18"])}
    images_of = {name: floor.images_of(config) for name, config in found.items()}
    assert images_of["MoCo 2,048, resnet18"] == images_of["D-MoCo 65,536, resnet18"] == (256, 256)
    assert images_of["D-SimCLR 512, literal, resnet18"] == (512, 512 + 256)
    fresh = dataclasses.replace(found["D-MoCo 65,536, resnet18"], fresh_keys=True)
    assert floor.images_of(fresh) == (256, 256 + 256)
    assert images_of["BYOL, resnet18"] == (512, 512)
    plain, literal = (floor.step_floor(found[n]) for n in ("SimCLR, resnet18", "D-SimCLR 512, literal, resnet18"))
    assert literal.operations / plain.operations == pytest.approx(1.5, rel=2e-3)  # 768 of 3 x 512 forwards
    apart = floor.step_floor(found["SimCLR, resnet18"], passes=floor.SEPARATE)
    assert plain.seconds < apart.seconds
    assert plain.seconds > max(plain.operations / floor.H200.flops, plain.bytes / floor.H200.bandwidth)


def test_the_page_is_what_the_results_say():
    path = Path(__file__).parent.parent / "docs" / "performance.md"
    assert page.render(path.read_text(), path.parent.parent) == path.read_text(), "run: make performance"


def test_tables_come_from_the_files(tmp_path):
    row = {
        "name": "SimCLR, resnet18", "plain": None, "settings": {"backbone": "resnet18"}, "ms": 9.25,
        "images_per_s": 27676.0, "peak_gb": 2.5, "shares": {"sampling": 0.01, "augmentation": 0.05, "encoder": 0.9},
    }  # fmt: skip
    peer = {"method": "moco", "what": "end to end", "data": "cifar10", "ours_ms": 10.0, "lightly_ms": 52.5}
    head = {"hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "commit": "0123456789"}
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
    assert "| moco | end to end | cifar10 | 10.00 | 52.50 | 5.25 |" in made
    assert "NVIDIA H200, torch 2.11.0, lightly 1.6.0, commit 0123456." in made
    assert page.render(made, tmp_path) == made


# Peers ----------------------------------------------------------------------------------------------------------


def test_peers_without_lightly_say_what_to_do(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightly", None)
    assert main(["bench", "peers", "--device", "cpu"]) == 2
    assert "pip install 'duel-ssl[peers]'" in capsys.readouterr().err


def test_bench_peers_measures_both(tmp_path, capsys):
    pytest.importorskip("lightly", reason="the extra [peers] is not installed")
    out = tmp_path / "peers.json"
    options = ["--backbone", "convnet", "--data", "digits", "--workers", "0", "--batch-size", "16", "--out", str(out)]
    assert main(["bench", "peers", "--device", "cpu", *options, "--count", "2", "--length", "1", "--warm-up", "1"]) == 0
    assert "compute only" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [(r["method"], r["what"]) for r in written["rows"]] == [
        (method, what) for method in peers.METHODS for what in ("end to end", "compute only")
    ]
    for row in written["rows"]:
        assert row["speedup"] == pytest.approx(row["lightly_ms"] / row["ours_ms"])
    assert written["peers"]["lightly"]
