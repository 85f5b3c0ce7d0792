"""What is made of finished runs: statistics, the page and the figures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from duel import cli
from duel.errors import UserError
from duel.reproduce import paper, stats, store
from duel.reproduce.evidence import Evidence
from duel.reproduce.figures import draw
from duel.reproduce.grids import GRIDS, Data
from duel.reproduce.page import drawn, page, page_of
from duel.reproduce.plan import SCALES, Variation
from duel.reproduce.rows import ROWS
from duel.reproduce.stats import Summary
from records import SHORT, record, runs

REPOSITORY = Path(__file__).parents[1]


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
    # the gap is 4 for each seed, so the interval is that of the gain, over 4
    reach = scipy.stats.t.ppf(0.975, 2) * np.std([0, 4, 2], ddof=1) / 3**0.5 / 4
    assert (noisy.low, noisy.high) == (pytest.approx(0.5 - reach), pytest.approx(0.5 + reach))


def test_the_interval_of_a_gap_covers_it_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        seeds = random.normal(size=4)  # what a seed does to all three figures
        figures = [dict(enumerate(mean + seeds + random.normal(size=4))) for mean in (14.0, 10.0, 18.0)]
        found = stats.gap_recovered(*figures)
        assert found is not None
        covered += found.low is not None and found.high is not None and found.low <= 0.5 <= found.high
    assert covered == pytest.approx(950, abs=25)


def test_no_gap_and_unbounded_gaps_are_not_dressed_up() -> None:
    assert stats.gap_recovered({}, {0: 2.0}, {0: 3.0}) is None
    assert stats.gap_recovered({0: 1.0}, {0: 2.0}, {0: 2.0}) == stats.Recovered(None, None, None, 1)
    one = stats.gap_recovered({0: 3.0}, {0: 2.0}, {0: 4.0})
    assert one == stats.Recovered(0.5, None, None, 1)
    small = stats.gap_recovered({0: 2.5}, {0: 2.0}, {0: 3.9})
    assert small == stats.Recovered(None, None, None, 1)
    seeds = {0: 4.0, 1: 2.0, 2: 1.0}
    chosen = stats.gap_recovered({0: 4.0}, dict.fromkeys(seeds, 2.0), seeds)  # the other seeds tell that there is none
    assert chosen == stats.Recovered(None, None, None, 1)
    plain = dict.fromkeys(range(4), 2.0)
    unclear = stats.gap_recovered(plain, plain, {0: 4.0, 1: 4.0, 2: 4.0, 3: 2.0})  # 1.5 ± 1.0, 3.0 times its error
    assert unclear == stats.Recovered(None, None, None, 4)
    clear = stats.gap_recovered(plain, plain, {0: 4.0, 1: 4.0, 2: 4.0, 3: 2.2})  # 1.55 ± 0.9, 3.4 times; t is 3.18
    assert clear == stats.Recovered(0.0, 0.0, 0.0, 4)


# The page -----------------------------------------------------------------------------------------------------


def test_the_page_shows_ours_beside_the_paper_s() -> None:
    text = page([*runs(), record("moco", 27, 2, 0.5, scale=SHORT.varied(Variation(777)))])
    assert "| SimCLR | 73.00 ± 1.00 (3); paper 63.34 | not run; paper 61.19 |" in text
    assert "| D-SimCLR, ours | – | – | 100 % [100, 100] (3) |" in text
    assert "Scale `short`, 777 steps: recipe" in text
    assert "Scale `paper`: recipe `paper` on cifar10, 40,000 steps\n\nNot run." in text
    assert "smoke" not in text.split("## Scale", 1)[1]
    assert page(reversed(runs())) == page(runs())


def test_the_page_begins_with_a_summary() -> None:
    text = page([*runs(), record("moco", 27, 2, 0.5, scale=SHORT.varied(Variation(777)))])
    top = text.split("## How to read this")[0]
    assert (
        "| SimCLR, `short` | 73.00 ± 1.00 (3) | 69.00 ± 1.00 (3) | 67.00 ± 1.00 (3) | 73.00 ± 1.00 (3) | – | – |" in top
    )
    assert "| SimCLR, the paper's own | 63.34 | 49.02 | 56.60 | – |" in top
    assert "| MoCo v2, `short` |" not in top  # not at the length of the scale
    assert "| claim | theory | `short` | `paper` |" in top  # other lengths have sections, but no column
    assert "| Theorem 1: the naive policy (Algorithm 2) never lowers p_d on the ETF | does not hold |  |  |" in top
    assert "| Bias harms: ×27 lowers the linear probe of plain MoCo v2 and SimCLR |  | holds so far\\* | – |" in top
    assert "the lower end of the interval 80 % |  | holds\\* |  |" in top  # a goal of one length alone
    for title in ("Claims of the paper", "What our form adds", "Our own goals", "Beside the paper's own figures"):
        assert f"| **{title}** |" in top


def test_its_contents_lead_to_every_section() -> None:
    text = page([*runs(), record("moco", 27, 2, 0.5, scale=SHORT.varied(Variation(777, 0.01)))])
    links = re.findall(r"\]\(#(\S+)\), (\d+) run", text)
    assert links == [("short", str(len(runs()))), ("short-steps-777-lr-0.01", "1"), ("paper", "0")]
    sections = re.findall(r'<a id="(\S+)"></a>\n\n## Scale', text)
    assert sections == [anchor for anchor, _ in links]


def test_the_first_table_marks_probes_that_have_not_fitted() -> None:
    unfit = {"probe_train": 0.3, "knn": 0.5}
    top = page([record("moco", 1, 2, 0.31, evaluation=unfit)]).split("## Claim by claim")[0]
    assert "| MoCo v2, `short` | 31.00 (1) † | – |" in top
    assert "†: the probe has not fitted" in top


def test_a_variation_is_not_held_against_the_paper_s_figures() -> None:
    paper_scale = SCALES["paper"]
    slower = [
        record(row, 27, 0, 0.5, scale=paper_scale.varied(Variation(3000, 0.001))) for row in ("moco", "d-moco-literal")
    ]
    cost = {"d-moco-literal": store.Cost(1.01, 1.0)}
    text = page(slower, costs=cost)
    own, varied = (text.split(f"## Scale {name}: ")[1].split("\n## ")[0] for name in ("`paper`", SLOWER))
    assert "costs no more" in own
    assert "costs no more" not in varied
    assert "is above MoCo v2 at every bias" in varied
    assert "of the paper's" not in varied
    assert "2 runs on G" in varied
    other = record("moco", 27, 0, 0.5, scale=paper_scale.varied(Variation(lr=0.01)))
    assert "## Scale `paper`, learning rate 0.01: recipe `paper` on cifar10, 40,000 steps" in page([*slower, other])


SLOWER = "`paper`, 3,000 steps, learning rate 0.001"


def test_every_run_of_a_variation_is_in_some_table() -> None:
    longer = SHORT.varied(Variation(9999))

    def tables(*rows: str) -> list[str]:
        text = page([record(row, 27, 2, 0.5, scale=longer) for row in rows]).split("9,999 steps: recipe")[1]
        return [line.split(":")[0] for line in text.split("## Scale")[0].splitlines() if line.startswith("### ")]

    assert tables("simclr", "moco") == ["### table2", *["### table1"] * 3, "### Gap recovered"]
    literal = [row for row in GRIDS["ablation"].rows if row.endswith(("literal", "gaussian1", "quadratic"))]
    assert tables(*literal) == ["### Claims of the paper", "### ablation"]  # rows of which table2 has some, too
    assert tables("simclr-memory-minred") == ["### rivals"]
    text = page([record("simclr", 27, 2, 0.5, scale=longer)])
    assert "| MoCo v2 |" not in text.split("9,999 steps: recipe")[1].split("## Scale")[0]


def test_thumbnails_have_tables_where_they_have_been_run() -> None:
    assert "### thumbnails" not in page(runs())  # plain rows and ours by features are in table 2
    text = page([*runs(), record("d-simclr-pixels", 9, 2, 0.5, evaluation={"few_shot": 0.3})])
    assert "| D-SimCLR, ours, compared by thumbnails | not run | not run | 50.00 (1) | not run |" in text
    shots = text.split("### thumbnails: nearest centroid, 5 shots")[1]
    assert "| D-SimCLR, ours, compared by thumbnails | not run | not run | 30.00 (1) | not run |" in shots
    assert "### thumbnails" not in page([*runs(), record("d-simclr-pixels", Data(27.0, dwell=32), 2, 0.5)])


def test_a_variation_is_not_judged_by_what_raw_pixels_give_too() -> None:
    scale = SCALES["paper"].varied(Variation(3000, 0.001))
    slower = [record(row, 27, 0, 0.5, scale=scale) for row in ("simclr", "moco", "d-moco-literal")]  # Top-1 0.4 and 0.3

    def judged(**pixels: float) -> str:
        return page(slower, pixels={"cifar10": pixels}).split(f"## Scale {SLOWER}: ")[1]

    table2, table1 = (f"{table}: D-MoCo (literal) is above MoCo v2" for table in ("linear probe", "Table 1, Top-1"))
    low = judged(probe=0.49, top1_test_to_train=0.39, top1_test_to_test=0.29)
    assert table2 in low
    assert table1 in low
    assert "no more than raw pixels" not in low
    half = judged(probe=0.49, top1_test_to_train=0.4, top1_test_to_test=0.3)
    assert table2 in half
    assert table1 not in half
    assert "no claim is judged by Top-1, test to train; Top-1, test to test." in half
    assert "Gap recovered" in half
    nothing = judged(probe=0.5, top1_test_to_train=0.4)
    assert "so that no claim is judged at all." in nothing
    assert "| claim |" not in nothing
    assert "Gap recovered" not in nothing
    slower[0] = record("simclr", 27, 0, 0.6, scale=scale)  # one of three is not most
    assert "no claim is judged at all" in judged(probe=0.5, top1_test_to_train=0.4)
    slower[1] = record("moco", 27, 0, 0.6, scale=scale)
    assert table2 in judged(probe=0.5, top1_test_to_train=0.4)
    slower.append(
        record("simclr", 1, 0, 0.4, scale=scale)
    )  # the plain row on balanced data decides, where there is one
    assert "no claim is judged at all" in judged(probe=0.5, top1_test_to_train=0.4)
    slower.append(record("moco", 1, 1, 0.6, scale=scale))
    slower.append(record("moco", 1, 2, 0.6, scale=scale))
    assert table2 in judged(probe=0.5, top1_test_to_train=0.4)


def test_a_scale_is_not_judged_by_what_raw_pixels_give_either() -> None:
    def judged(**pixels: float) -> str:
        return page(runs(), pixels={"cifar10": pixels}).split("## Scale `short`: ")[1]

    claim = "Table 1, Top-1: D-SimCLR (literal) is above SimCLR"
    assert claim in judged(probe=0.7, top1_test_to_test=0.5)
    assert claim not in judged(probe=0.7, top1_test_to_test=0.6)
    assert "no claim is judged by Top-1, test to test." in judged(probe=0.7, top1_test_to_test=0.6)
    assert "Not yet measured or not judged: " in judged(probe=0.7, top1_test_to_test=0.6)


def test_figures_with_batchnorm_as_training_left_it_have_tables_and_marks() -> None:
    def left(probe: float, vote: float, **more: float) -> dict[str, dict[str, float]]:
        return {"without_reestimation": {"probe": probe, "knn": vote, "top1_test_to_train": 0.3, **more}}

    found = [
        record("simclr", 27, 2, 0.5, evaluation=left(0.45, 0.4)),
        record("d-simclr-literal", 27, 2, 0.5, evaluation=left(0.5, 0.4)),
        record("moco", 27, 2, 0.5, evaluation=left(0.31, 0.34)),  # the vote is three points better: it has not fitted
        record("d-moco-literal", 27, 2, 0.5, evaluation=left(0.31, 0.34, probe_train=0.35)),  # it has
    ]
    text = page(found)
    table = section(text, "table2: linear probe, BatchNorm as training left it")
    assert "| SimCLR | not run | not run | not run | 45.00 (1) |" in table
    assert "| MoCo v2 | not run | not run | not run | 31.00 (1) † |" in table
    assert "| D-MoCo, literal | not run | not run | not run | 31.00 (1) |" in table
    assert "30.00 (1)" in section(text, "table1: Top-1, test to train, BatchNorm as training left it")
    claim = "Table 2, linear probe, BatchNorm as training left it: {} (literal) is above {} at every bias |"
    assert f"| {claim.format('D-SimCLR', 'SimCLR')}  | holds so far" in text
    assert f"| {claim.format('D-MoCo', 'MoCo v2')}  | – |" in text


def test_a_probe_that_has_not_fitted_is_marked_and_not_judged_by() -> None:
    good = {"probe_train": 0.7, "knn": 0.6}
    found = {"simclr": good, "d-simclr-literal": {"probe_train": 0.1, "knn": 0.25}}
    records = [record(row, 27, 2, 0.5, evaluation=evaluation) for row, evaluation in found.items()]
    text = page(records)
    literal = (
        "| D-SimCLR, literal | not run; paper 65.39 | not run; paper 63.69 | not run; paper 60.99 | 50.00 (1) †; paper"
    )
    assert literal in section(text, "table2: linear probe")
    assert "| SimCLR | not run; paper 63.34 | not run; paper 61.19 | not run; paper 61.06 | 50.00 (1); paper" in text
    assert "†: the probe has not fitted." in text
    claim = "Table 2, linear probe: D-SimCLR (literal) is above SimCLR at every bias |"
    assert f"| {claim}  | – |" in text
    assert "Table 1, Top-1: D-SimCLR (literal) is above SimCLR at every bias |  | not clear\\*" in text
    unfit = record("simclr-fifo", 27, 2, 0.5, evaluation={"probe_train": 0.1, "knn": 0.25})
    listed = section(page([records[0], unfit]), "framework and controls")
    assert "| SimCLR with a FIFO memory of 512 | ×27 | 50.00 (1) † |" in listed
    assert "†: the probe has not fitted." in listed
    smoke = record("simclr", 27, 0, 0.5, scale=SCALES["smoke"], evaluation={"probe_train": 0.1, "knn": 0.25})
    assert "†" not in page([smoke])  # whose probe is cut short
    nearly = record("d-simclr-literal", 27, 2, 0.5, evaluation={"probe_train": 0.6, "knn": 0.61})
    assert "†" not in page([records[0], nearly])


def test_a_measure_that_came_later_has_a_table_once_there_is_one() -> None:
    assert "standardised" not in page(runs())
    later = record("moco", 27, 2, 0.5, evaluation={"probe_standardised": 0.55})
    text = section(page([*runs(), later]), "table2: linear probe on standardised features")
    assert "| MoCo v2 | not run | not run | not run | 55.00 (1) |" in text
    assert "| SimCLR | not measured | not run | not run | not measured |" in text
    longer = record("moco", 27, 2, 0.5, scale=SHORT.varied(Variation(9999)))
    assert page([longer, later]).count("table2: linear probe on standardised features") == 1  # not of the longer one


def test_raw_pixels_stand_above_the_rows() -> None:
    raw = {"probe": 0.39, "probe_train": 0.45, "knn": 0.33, "top1_test_to_train": 0.354}
    text = page(runs(), pixels={"cifar10": raw})
    assert "| raw pixels, no encoder | 39.00 | 39.00 | 39.00 | 39.00 | – | – | – |" in section(text, "table2")
    assert "| raw pixels, no encoder | 35.40 |" in section(text, "table1: Top-1, test to train")
    assert "raw pixels" not in section(text, "table1: Top-1, test to test")
    assert "raw pixels" not in page(runs(), pixels={"digits": raw})
    below = "MoCo v2 ×1, ×3, ×9, ×27; SimCLR ×27; SimSiam ×1, ×3, ×9, ×27; D-MoCo ×3, ×27; D-SimCLR ×27"
    assert f"| Top-1, test to train | 35.40 | 12 of 20 | {below} |" in text
    assert "| linear probe | 39.00 | 0 of 16 | – |" in text


def test_failed_runs_are_named() -> None:
    gone = record("moco", 27, 2, 0.5)
    values = {**gone.values, "name": "short-moco", "failed": "diverged at step 7"}
    failed = store.Record(gone.path, values, gone.config, gone.hash)
    assert "since training failed: short-moco (diverged at step 7)." in page(runs(), failures=[failed])
    assert "failed:" not in page(runs())
    assert "since training failed: short-moco" in page([], failures=[failed])
    config = dataclasses.replace(gone.config, lr=7.0)
    alone = store.Record(gone.path, values, config, "0")
    text = page(runs(), failures=[alone]).split("## Scale `short`, learning rate 7: ")[1]
    assert text.split("\n<a id=")[0].endswith("since training failed: short-moco (diverged at step 7).\n")


def test_a_row_of_its_own_length_belongs_to_the_variation_that_gives_it() -> None:
    scale = SHORT.varied(Variation(777, 0.01))
    cut = [record(row, 27, 2, 0.5, scale=scale) for row in ("simclr", "simclr-longer")]
    titles = re.findall(r"^## Scale (`short`.*): ", page(cut), flags=re.MULTILINE)
    assert titles == ["`short`", "`short`, 777 steps, learning rate 0.01"]
    assert "2 runs on G, torch 2, commit 0123456. Measured" in page(cut)


def test_doubtful_choices_of_a_memory_are_told() -> None:
    doubts = [record("simclr-memory-minred", 27, 2, 0.5, metrics={"memory_in_doubt": [0, end]}) for end in (4000, 0)]
    told = "another slot might have been the one to leave: SimCLR, memory-first, MinRed ×27 80 %."
    assert told in section(page([*runs(), doubts[0]]), "rivals")
    assert "another slot" not in page([*runs(), doubts[1]])


def test_costs_by_an_older_definition_are_left_out() -> None:
    old = record("simclr", 27, 3, 0.5)
    budget = {name: value for name, value in old.values["budget"].items() if name != "share"}
    older = store.Record(old.path, {**old.values, "budget": budget}, old.config, old.hash)
    text = section(page([older]), "Resources at ×27")
    assert "| SimCLR | CPU |" not in text
    assert "| SimCLR | – | – | 200 |" in text


def test_only_runs_that_are_shown_are_counted() -> None:
    old = record("d-simclr-ours", 27, 2, 0.5)
    orphan = store.Record(old.path, old.values, dataclasses.replace(old.config, memory_size=1000), "0")
    assert "12 runs on G, torch 2, commit 0123456. Measured" in page(runs())
    assert "12 runs on G, torch 2, commit 0123456; 1 more, of settings that no row has any more," in page(
        [*runs(), orphan]
    )


def test_a_row_of_its_own_length_stands_among_the_others() -> None:
    text = page([*runs(), record("simclr-longer", 27, 2, 0.5)])
    assert text.count("\n## Scale `short`") == 1
    assert "13 runs on G, torch 2, commit 0123456. Measured" in text
    assert "| SimCLR, longer (as many images as ours) | ×27 | 50.00 (1) |" in section(text, "rivals")
    balanced = [record("simclr-longer", 1, 2, 0.8), record("d-simclr-pixels-longer", 27, 2, 0.74)]
    rivals = section(page([*runs(), record("simclr-longer", 27, 2, 0.5), *balanced]), "rivals")
    assert "| SimCLR, longer (as many images as ours) | ×1 | 80.00 (1) |" in rivals
    (ours,) = re.findall(r"^\| D-SimCLR, ours, compared by thumbnails, longer .*$", rivals, flags=re.MULTILINE)
    assert "| 80 % (1) |" in ours  # of 30 points between plain rows as long


def section(text: str, title: str) -> str:
    return text.split(f"### {title}")[1].split("\n###")[0]


def test_controls_stand_beside_the_plain_rows_and_ours() -> None:
    text = section(page([*runs(), record("simclr-fifo", 27, 2, 0.5)]), "framework and controls")
    rows = re.findall(r"^\| ([^|]+) \| (×\d+) \|", text, flags=re.MULTILINE)
    assert rows == [
        ("SimCLR", "×1"), ("SimCLR", "×27"), ("D-SimCLR, ours", "×27"), ("SimCLR with a FIFO memory of 512", "×27"),
    ]  # fmt: skip
    assert "| SimCLR with a FIFO memory of 512 | ×27 | 50.00 (1) |" in text
    only = section(page([record("simclr", 27, 2, 0.5)]), "ablation")
    assert "Not run. `duel reproduce ablation --scale short` runs it." in only


def test_what_was_not_run_is_counted_or_listed() -> None:
    assert re.search(r"Not run: \d+ of \d+ \(`duel reproduce rivals", section(page(runs()), "rivals"))
    scale = SHORT.varied(Variation(777))
    wanted = [(row, data.bias) for data, row in GRIDS["negative-free"].runs()]
    wanted.remove(("byol", 27))
    free = [record(row, bias, 2, 0.5, scale=scale) for row, bias in wanted]
    cut = page(free).split("777 steps:")[1].split("\n## ")[0]
    assert "Not run: BYOL ×27." in section(cut, "negative-free")
    assert "table2" not in cut  # of a length that is not the scale's, only what somebody has run
    assert "not yet measured" not in cut


def test_the_ablation_shows_the_paper_s_figures() -> None:
    found = [record(f"d-{m}", 27, 2, 0.5) for m in ("moco-quadratic", "simclr-gaussian1", "moco-exponential0.05")]
    text = section(page([*found, record("simclr", 1, 2, 0.6)]), "ablation")
    assert "| SimCLR | ×1 | 60.00 (1) | 63.34 |" in text  # to compare with
    assert "D-MoCo, literal but score quadratic | ×27 | 50.00 (1) | 57.32 |" in text
    assert "D-SimCLR, literal but score gaussian:1 | ×27 | 50.00 (1) | failed |" in text
    assert "D-MoCo, literal but score exponential:0.05 | ×27 | 50.00 (1) | – |" in text


def test_scores_are_compared_over_the_first_steps() -> None:
    course = {
        "step": [100, 200, 300, 1000, 4900, 5000],
        "memory_entropy": [0.1, 0.15, 0.2, 0.3, 0.6, 0.7],
        "knn": [None, None, None, 0.4, None, 0.8],
    }
    text = section(page([record("d-moco-gaussian0.1", 27, 2, 0.5, metrics=course)]), "ablation")
    words = "entropy of memory, "
    steps = " | ".join(words + when for when in ("step 100", "step 300", "step 1,000", "end"))
    assert f"| row | k-NN, step 1,000 | k-NN, end | {steps} |" in text
    assert "score gaussian:0.1 | 40.0 (1) | 80.0 (1) | 10.0 (1) | 20.0 (1) | 30.0 (1) | 70.0 (1) |" in text
    assert "quadratic" not in text.split("Early and")[1]
    late = course | {"step": [50 * (i + 1) for i in range(6)]}  # as digits log: nothing at 4 and 12 of 200 steps
    digits = record("d-moco-gaussian0.1", 27, 0, 0.5, scale=SCALES["digits"], metrics=late)
    assert "entropy of memory, step 50 | entropy of memory, end |" in section(page([digits]), "ablation")
    assert "Early and" not in page([record("simclr", 27, 2, 0.5)])


def test_a_memory_with_a_slot_for_every_image_is_told() -> None:
    def on(images: int) -> str:
        data = Data(27.0, mode="subset")
        config = record("d-simclr-ours", data, 2, 0.5).config
        epochs = [step * config.stream_items / images for step in (1000, 2000)]
        return section(page([record("d-simclr-ours", data, 2, 0.5, metrics={"epoch": epochs})]), "subset")

    told = "At least as many slots as images: D-SimCLR, ours ×27 subset (6,665 images)."
    assert told in on(6665)
    assert "as many slots" not in on(40_000)


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


def test_the_page_shows_the_figures_that_there_are(tmp_path: Path) -> None:
    assert "![" not in page([])
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "scores.svg").touch()
    assert page([], drawn(tmp_path)).count("(figures/scores.svg)") == 1


def test_the_committed_page_is_what_the_results_give() -> None:
    """If this fails: `duel reproduce page`."""
    committed = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    results = [REPOSITORY / "results"]
    assert committed == page_of(results, REPOSITORY / "docs")


def test_what_a_step_costs_is_known_before_any_run(tmp_path: Path) -> None:
    rows = [
        {"name": "SimCLR, resnet50", "plain": None, "peak_gb": 7.0},
        {"name": "D-SimCLR 512, literal, resnet50", "plain": "SimCLR, resnet50", "ratio": 1.35, "peak_gb": 7.7,
         "settings": {"score": "linear"}},
        {"name": "D-MoCo 2,048, resnet50", "plain": "MoCo 2,048, resnet50", "error": "no memory"},
    ]  # fmt: skip
    (tmp_path / "bench-step-gpu.json").write_text(json.dumps({"rows": rows}))
    text = page(runs(), costs=store.costs([tmp_path]))
    paper = text.split("Scale `paper`")[1].split("\n## ")[0]
    assert "time × 1.35 (paper × 1.88); memory × 1.10 (paper × 1.22), by the benchmark" in paper
    assert "score linear" in paper
    assert "D-MoCo (literal) costs" not in paper
    assert "× 1.35" not in text.split("Scale `paper`")[0]
    assert "table2" not in paper
    (tmp_path / "bench-step-gpu.json").write_text("{}")
    with pytest.raises(UserError, match="bench-step-gpu"):
        store.costs([tmp_path])


def test_committed_results_tell_nothing_about_the_machine() -> None:
    for path in (REPOSITORY / "results" / store.RUNS).glob("*.json"):
        assert not re.search(r'"/|"out"|"root"', path.read_text())


def test_the_paper_s_figures_add_up() -> None:
    assert paper.figure("probe", "d-moco", 9.0) == 62.10
    assert paper.figure("top1", "simsiam", 27.0) == 20.11
    assert paper.figure("probe", "simsiam", 1.0) is None
    assert paper.figure("probe", None, 1.0) is None
    assert paper.recovered("moco") == pytest.approx(9.89 / 12.08)
    below = [(table, row, bias, other) for table, row, bias, other, *_ in paper.below_previous()]
    own = [("probe", "d-simclr", 9.0, "simclr"), ("top10", "d-simclr", 9.0, "simclr")]
    assert [found for found in below if found[1] == f"d-{found[3]}"] == own
    assert [found for found in below if found[0] == "top1"] == [("top1", "d-moco", b, "simclr") for b in (1.0, 3.0)]


# Figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["figure1", "figure-mcp", "memory", "scores", "figure3"])
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


def test_figures_can_be_drawn_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "figures", "--out", str(tmp_path / "results"), "--docs", str(tmp_path)]) == 0
    assert drawn(tmp_path) == ["figure-mcp", "figure1", "memory", "scores"]  # figure3 has to wait for its runs
    assert "![The score functions](figures/scores.svg)" in (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "figure3" not in capsys.readouterr().out


def test_figure3_of_the_page_is_that_of_its_scale(tmp_path: Path) -> None:
    run = record("moco", 27, 0, 0.5, scale=SCALES["digits"], evaluation={"knn": 0.5})
    store.write(tmp_path / "results", "digits-moco", dict(run.values) | {"config": run.config.identity()})
    assert cli.main(["reproduce", "figures", "--scale", "digits", *_here(tmp_path)]) == 0
    assert "figure3" not in drawn(tmp_path)
    assert cli.main(["reproduce", "pixels", "--scale", "digits", "--dry-run", *_here(tmp_path)]) == 0
    assert not (tmp_path / "results" / "pixels-digits.json").exists()
    assert cli.main(["reproduce", "pixels", "--scale", "smoke", *_here(tmp_path)]) == 0
    assert "| raw pixels, no encoder |" in (tmp_path / "results.md").read_text(encoding="utf-8")


def _here(folder: Path) -> list[str]:
    return ["--out", str(folder / "results"), "--docs", str(folder)]


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
    assert said.count('"status": "finished"') == 8  # ×27 drawn, as a subset, as frames and by a camera that stops
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
        (["figure3", "--scale", "smoke", "--out", "nothing", "--minutes", "1e-9"], "no finished runs for figure3"),
    ],
)
def test_mistakes_are_told(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *args]) == cli.USER_MISTAKE
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)  # half of it on two idle cores
def test_everything_at_smoke_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About two and a half minutes on one busy core."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "all", "--scale", "smoke", "--device", "cpu"]) == 0
    text = Path("runs/smoke/docs/results.md").read_text().split("Scale `smoke`")[1]
    assert "not run" not in text.lower()
    assert "not yet measured" not in re.sub(r"\| [^|]*(costs|recover)[^\n]*", "", text)
    assert len(store.load([Path("runs/smoke/results")])) == len(list(Path("runs/smoke/results/runs").iterdir()))


def test_a_row_s_label_is_its_own() -> None:
    labels = [row.label for row in ROWS.values()]
    assert len(set(labels)) == len(labels)
    assert all(dataclasses.asdict(row)["label"] for row in ROWS.values())


def test_a_scale_that_is_run_in_part_shows_what_has_been_run() -> None:
    tiny = SCALES["tiny"]
    found = page([record("simclr", Data(27.0, dwell=32), 0, 0.5, scale=tiny)])
    section = found.split("## Scale `tiny`")[1].split("\n## ")[0]
    assert "on cifar10-16px, 1,500 steps" in section
    assert "### camera" in section
    assert "### negative-free" not in section
    assert "MoCo" not in section.split("### camera")[1]
    assert "## Scale `tiny`" not in page([])
