"""What is made of finished runs: statistics, verdicts, the page and the figures."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from duel import cli
from duel.errors import UserError
from duel.reproduce import claims, paper, stats, store
from duel.reproduce.evidence import Evidence
from duel.reproduce.figures import draw
from duel.reproduce.page import drawn, page
from duel.reproduce.plan import SCALES, Data, plan_run
from duel.reproduce.rows import ROWS
from duel.reproduce.stats import Summary

REPOSITORY = Path(__file__).parents[1]
SHORT = SCALES["short"]


def record(
    row: str, bias: float, seed: int, probe: float, *, steps: int | None = None, **budget: float
) -> store.Record:
    scale = SHORT if steps is None else SHORT.of_length(steps)
    planned = plan_run(ROWS[row], Data(bias), scale, seed, {})
    values = {
        "row": row, "scale": "short", "commit": "0123456789", "hardware": {"gpu": "G"}, "versions": {"torch": "2"},
        "evaluation": {"probe": probe, "top1_test_to_train": probe - 0.1, "top1_test_to_test": probe - 0.2},
        "metrics": {"step": [1000, 2000], "intra_class_cosine": [0.5, 0.6 + seed], "inter_class_cosine": [None, 0.3]},
        "budget": {"steps": 5000, "images_encoded": 10**6, "gpu_seconds": 50.0, "peak_gpu_memory_mb": 2000} | budget,
    }  # fmt: skip
    return store.Record(Path(), values, planned.config, planned.hash)


# Statistics ---------------------------------------------------------------------------------------------------


def test_mean_and_spread() -> None:
    assert stats.summary([]) is None
    assert stats.summary([3.0]) == Summary(3.0, None, 1)
    found = stats.summary([1.0, 2.0, 4.0])
    assert found is not None
    assert found.std == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert stats.paired_difference({0: 5.0, 1: 7.0, 2: 9.0}, {1: 4.0, 2: 4.0, 3: 0.0}) == Summary(
        4.0, pytest.approx(2**0.5), 2
    )


def test_gap_recovered_is_paired() -> None:
    plain, balanced = {0: 60.0, 1: 62.0, 2: 64.0}, {0: 64.0, 1: 66.0, 2: 68.0}
    half = {seed: value + 2 for seed, value in plain.items()}
    found = stats.gap_recovered(half | {9: 0.0}, plain, balanced)
    assert found == stats.Recovered(pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5), 3)  # spread cancels
    noisy = stats.gap_recovered({0: 60.0, 1: 66.0, 2: 66.0}, plain, balanced)
    assert noisy is not None
    assert noisy.share == pytest.approx(0.5)
    assert noisy.low == pytest.approx(0.0)
    assert noisy.high == pytest.approx(1.0)


def test_no_gap_and_unbounded_gaps_are_not_dressed_up() -> None:
    assert stats.gap_recovered({0: 1.0}, {0: 2.0}, {0: 2.0}) is None
    assert stats.gap_recovered({}, {0: 2.0}, {0: 3.0}) is None
    one = stats.gap_recovered({0: 2.5}, {0: 2.0}, {0: 3.0})
    assert one == stats.Recovered(0.5, None, None, 1)
    sometimes = stats.gap_recovered({0: 2.5, 1: 2.5}, {0: 2.0, 1: 2.0}, {0: 4.0, 1: 1.9})
    assert sometimes is not None
    assert sometimes.low is None


# Verdicts -----------------------------------------------------------------------------------------------------


def test_verdicts_follow_the_evidence() -> None:
    up, down, level = Summary(2.0, 0.5, 4), Summary(-2.0, 0.5, 4), Summary(0.1, 0.5, 4)
    assert claims.weigh({"a": None, "b": None}).verdict == "not yet measured"
    assert claims.weigh({"a": up, "b": up}).verdict == "holds"
    assert claims.weigh({"a": up, "b": level}).verdict == "holds only when a"
    assert claims.weigh({"a": down, "b": level}).verdict == "does not hold"
    assert claims.weigh({"a": level}).verdict == "does not hold: within the spread of the seeds"
    assert claims.weigh({"a": level, "b": up}, at_least_equal=True).verdict == "holds"
    assert claims.weigh({"a": level, "b": down}, at_least_equal=True).verdict == "holds only when a"
    assert claims.weigh({"a": up, "b": None}).verdict == "holds (not yet measured: b)"
    assert claims.weigh({"a": Summary(-3.0, None, 1)}, at_least_equal=True).verdict == "does not hold; one seed only"
    assert "a +2.00 ± 0.50 (4)" in claims.weigh({"a": up}).evidence


def runs() -> list[store.Record]:
    found = []
    for i, seed in enumerate(SHORT.seeds):
        found += [
            record("simclr", 1, seed, 0.72 + 0.01 * i),
            record("simclr", 27, seed, 0.68 + 0.01 * i),
            record("d-simclr-ours", 27, seed, 0.72 + 0.01 * i),
            record("d-simclr-literal", 27, seed, 0.66 + 0.01 * i, gpu_seconds=90.0, peak_gpu_memory_mb=2400),
        ]
    return found


def test_evidence_is_found_by_config_whatever_the_seed() -> None:
    evidence = Evidence(runs(), SHORT)
    assert list(evidence.figures("simclr", Data(27.0), "probe")) == list(SHORT.seeds)
    gap = evidence.gap("d-simclr-ours", Data(27.0), "probe")
    assert gap is not None
    assert (gap.share, gap.n) == (pytest.approx(1.0), 3)
    assert evidence.gap("simclr", Data(27.0), "probe") is None
    assert evidence.runs("d-simclr-ours", Data(27.0, mode="subset")) == []
    judged = {claim.text: claim.judge(evidence).verdict for claim in (*claims.PAPER, *claims.OURS)}
    assert judged["Bias harms: ×27 lowers the linear probe of plain MoCo v2 and SimCLR"].startswith("holds (not yet")
    literal = judged["D-SimCLR (literal) is above SimCLR at every bias, linear probe"]
    assert literal == "does not hold (not yet measured: ×1, ×3, ×9)"
    assert judged["D-SimCLR (ours) recovers 95 % of both gaps at ×27"] == "holds; fewer than 5 seeds"
    assert judged["D-SimCLR costs 1.9 times SimCLR's time and 1.2 times its memory"] == "holds"
    assert judged["D-MoCo costs a quarter more time than MoCo v2 and no memory"] == "not yet measured"


def test_scores_are_compared_early_and_at_the_end() -> None:
    one = record("d-moco-gaussian0.1", 27, SHORT.seeds[0], 0.5)
    one.values["metrics"].update(
        step=[500, 1000, 4900, 5000], memory_entropy=[0.1, 0.3, 0.6, 0.7], knn=[None, 0.4, None, 0.8]
    )
    text = page([one]).split("### ablation")[1].split("###")[0]
    assert "from step 1,000 on" in text
    assert "score gaussian:0.1 | 40.0 (1) | 30.0 (1) | – | 80.0 (1) | 70.0 (1) | – |" in text
    assert "quadratic" not in text.split("a fifth of the way")[1]
    assert "a fifth" not in page([record("simclr", 27, SHORT.seeds[0], 0.5)])


def test_seeds_that_the_settings_were_chosen_on_are_no_evidence() -> None:
    records = [*runs(), record("d-simclr-ours", 27, SHORT.tuned_on[0], 0.99)]
    fresh, tuning = Evidence(records, SHORT), Evidence(records, SHORT, tuning=True)
    assert list(fresh.figures("d-simclr-ours", Data(27.0), "probe")) == list(SHORT.seeds)
    assert list(tuning.figures("d-simclr-ours", Data(27.0), "probe")) == [SHORT.tuned_on[0]]
    assert not tuning.runs("simclr", Data(27.0))
    main, chosen = page(records).split("### tuning")
    assert "99.00" in chosen
    assert "99.00" not in main
    none = dataclasses.replace(SHORT, tuned_on=())
    assert len(Evidence(records, none, tuning=True).runs("d-simclr-ours", Data(27.0))) == len(SHORT.seeds) + 1


# The page -----------------------------------------------------------------------------------------------------


def test_the_page_shows_ours_beside_the_paper_s() -> None:
    text = page([*runs(), record("moco", 27, 2, 0.5, steps=777)])
    assert "| SimCLR | 73.00 ± 1.00 (3); paper 63.34 | not run; paper 61.19 |" in text
    assert "| D-SimCLR, ours | – | – | 100 [100, 100] (3) |" in text
    assert "cut to 777 steps" in text
    assert "Scale `paper`: recipe `paper` on cifar10, 40,000 steps\n\nNot run." in text
    assert "smoke" not in text.split("## Scale", 1)[1]
    assert page(reversed(runs())) == page(runs())


def test_the_paper_s_recipe_is_held_against_the_paper() -> None:
    near, far = record("moco", 9, 0, 0.50), record("moco", 27, 0, 0.60)
    found = []
    for one in (near, far, record("d-moco-ours", 27, 0, 0.61)):
        planned = plan_run(ROWS[one.values["row"]], Data(one.config.bias), SCALES["paper"], 0, {})
        found.append(store.Record(Path(), {**one.values, "scale": "paper"}, planned.config, planned.hash))
    text = page(found)
    assert "Our plain MoCo v2 is within 3 points of the paper's, linear probe | **holds only when ×9** |" in text
    assert "D-MoCo v2 (ours) is above the paper's D-row at ×9 and ×27 | **holds** | ×27 +8.94 |" in text
    assert "Our plain SimCLR is within 3 points of the paper's, linear probe | **not yet measured** | no runs |" in text


def test_the_page_shows_the_figures_that_there_are(tmp_path: Path) -> None:
    assert "![" not in page([])
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "scores.svg").touch()
    assert page([], drawn(tmp_path)).count("(figures/scores.svg)") == 1


def test_the_committed_page_is_what_the_results_give() -> None:
    """If this fails: `duel reproduce page`."""
    committed = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert committed == page(store.load([REPOSITORY / "results"]).values(), drawn(REPOSITORY / "docs"))


def test_committed_results_tell_nothing_about_the_machine() -> None:
    for path in (REPOSITORY / "results" / store.RUNS).glob("*.json"):
        assert not re.search(r'"/|"out"|"root"', path.read_text())


def test_the_paper_s_figures_add_up() -> None:
    assert paper.figure("probe", "d-moco", 9.0) == 62.10
    assert paper.figure("top1", "simsiam", 27.0) == 20.11
    assert paper.figure("probe", "simsiam", 1.0) is None
    assert paper.figure("probe", None, 1.0) is None
    assert [(t, r, b) for t, r, b, *_ in paper.below_plain()] == [("probe", "simclr", 9.0), ("top10", "simclr", 9.0)]


# Figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["figure1", "figure-mcp", "scores", "figure3"])
def test_figures_are_drawn_and_the_same_twice(name: str, tmp_path: Path) -> None:
    found = [record(row, bias, seed, 0.5) for row in ("moco", "d-moco-ours") for bias in (1, 27) for seed in (2, 3)]
    svg, png = draw(name, tmp_path, found)
    again, _ = draw(name, tmp_path / "again", found)
    assert svg == tmp_path / "figures" / f"{name}.svg"
    assert svg.read_bytes() == again.read_bytes()
    assert b"<dc:date>" not in svg.read_bytes()
    assert png.stat().st_size > 5000


def test_figure3_needs_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="duel reproduce figure3 --scale short"):
        draw("figure3", tmp_path, [])
    with pytest.raises(UserError, match="did you mean 'figure3'"):
        draw("figure33", tmp_path, [])


# The command --------------------------------------------------------------------------------------------------


def test_a_small_form_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs, figures and page in one command; twice, the second time without a run."""
    monkeypatch.chdir(tmp_path)
    small = [
        "reproduce",
        "all",
        "--scale",
        "smoke",
        "--rows",
        "moco",
        "d-moco-ours",
        "--biases",
        "27",
        "--device",
        "cpu",
    ]
    assert cli.main(small) == 0
    said = capsys.readouterr().out
    assert said.count('"status": "finished"') == 4  # ×27 drawn and as a subset
    text = Path("runs/smoke/docs/results.md").read_text()
    assert "recipe `demo` on digits, 10 steps" in text
    assert Path("runs/smoke/docs/figures/figure3.svg").exists()
    assert cli.main(["reproduce", "table2", *small[2:]]) == 0
    assert "finished" not in capsys.readouterr().out
    assert Path("runs/smoke/docs/results.md").read_text() == text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tabel2"], "did you mean 'table2'"),
        (["table2", "--rows", "simcrl"], "did you mean 'simclr'"),
        (["table2", "--jobs", "0"], "jobs must be >= 1"),
        (["figure3", "--scale", "short", "--out", "nothing", "--minutes", "1e-9"], "no finished runs for figure3"),
    ],
)
def test_mistakes_are_told(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *args]) == cli.USER_MISTAKE
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_everything_at_smoke_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About two and a half minutes on one busy core."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "all", "--scale", "smoke", "--device", "cpu"]) == 0
    text = Path("runs/smoke/docs/results.md").read_text().split("Scale `smoke`")[1]
    assert "not run" not in text.lower()
    assert "not yet measured" not in re.sub(r"\| [^|]*(costs|recovers)[^\n]*", "", text)
    assert len(store.load([Path("runs/smoke/results")])) == len(list(Path("runs/smoke/results/runs").iterdir()))


def test_a_row_s_label_is_its_own() -> None:
    labels = [row.label for row in ROWS.values()]
    assert len(set(labels)) == len(labels)
    assert all(dataclasses.asdict(row)["label"] for row in ROWS.values())
