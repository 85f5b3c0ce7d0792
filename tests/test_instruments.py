from __future__ import annotations

import copy
import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import normalize

from duel import WorkingMemory, recipes, runs
from duel.instruments import COUNTED_UP_TO, PATIENCE, Instruments
from duel.policies import AdaptiveDuel, Dedup, Distinct, Duel, Fifo, Random
from duel.reproduce import store
from duel.runlog import RunLog, read_metrics
from duel.training import train
from duel.upkeep import build_policy
from pools import clusters, isotropic

IDS = {"id": ((), torch.int64)}
RESULTS = Path(__file__).parent.parent / "results" / store.RUNS


def watched(policy, *, size=60, updates=5, labels=True, stream_largest=0.75, dwell=1):
    rows, classes = clusters(2000, 8, 0)
    memory = WorkingMemory(size, 8, policy, IDS)
    for step in range(updates):
        part = slice(30 * step, 30 * step + 30)
        memory.update(rows[part].float(), id=torch.arange(2000)[part])
    eye = Instruments(
        memory,
        labels=classes if labels else None,
        classes=10,
        stream_largest=stream_largest,
        per_update=30,
        dwell=dwell,
    )
    return memory, classes, eye


def test_the_measures_are_what_they_say():
    memory, classes, eye = watched(Duel("gaussian:0.1"), updates=20)
    batch = torch.arange(1000, 1020)
    found = eye.read(batch, updates=2)
    assert list(found) == eye.columns
    held = classes[memory["id"]]
    counts = held.bincount(minlength=10).double()
    share = counts / 60
    assert abs(found["memory_largest"] - float(share.max())) < 1e-9
    entropy = -sum(float(p) * float(torch.log(p)) for p in share if p > 0) / float(torch.tensor(10.0).log())
    assert abs(found["memory_entropy"] - entropy) < 1e-6
    same = (classes[batch][:, None] == held[None, :]).double().mean()  # no anchor is in the memory
    assert abs(found["memory_collisions"] - float(same)) < 1e-9
    cosines = memory.embeddings.double() @ memory.embeddings.double().T
    pairs = ~torch.eye(60, dtype=torch.bool)
    alike = held[:, None] == held[None, :]
    assert abs(found["memory_intra"] - float(cosines[alike & pairs].mean())) < 1e-5
    assert abs(found["memory_inter"] - float(cosines[~alike].mean())) < 1e-5
    assert found["memory_distinct"] == len(memory["id"].unique()) / 60
    assert found["memory_turnover"] == float((memory.age < 2).double().mean())
    assert found["memory_age_max"] == float(memory.age.max())
    assert found["memory_age_p10"] <= found["memory_age"] <= found["memory_age_p90"]
    for name, part in (("memory_age_p10", 0.1), ("memory_age_p90", 0.9)):
        assert found[name] == pytest.approx(float(memory.age.double().quantile(part)))
    assert found["memory_staleness"] == float(memory.staleness.median())
    assert abs(found["memory_duplicates"] - float(memory.expected_duplicates().mean())) < 1e-9
    assert abs(found["memory_duplicates_max"] - float(memory.expected_duplicates().max())) < 1e-9


@pytest.mark.parametrize("policy", ["fifo", "minred"])
def test_duplicates_are_counted_by_the_runs_score_where_the_policy_has_none(policy):
    """By the linear one they would be half of the slots, whatever the memory holds."""
    memory, _, _ = watched(policy)
    eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=30, score="exponential:0.05")
    found = eye.read(torch.arange(3), updates=1)
    counted = memory.expected_duplicates("exponential:0.05")
    assert found["memory_duplicates"] == pytest.approx(float(counted.mean()))
    assert found["memory_duplicates_max"] == pytest.approx(float(counted.max()))
    assert found["memory_duplicates"] < 0.9 * float(memory.expected_duplicates().mean())

    class Scored(Fifo):
        score = "gaussian:0.1"

    for own in (watched(policy)[0] for policy in (Duel("gaussian:0.1"), Scored())):
        eye = Instruments(own, labels=None, classes=0, stream_largest=None, per_update=30, score="linear")
        found = eye.read(torch.arange(3), updates=1)
        assert found["memory_duplicates"] == pytest.approx(float(own.expected_duplicates().mean()))


def test_without_labels_only_what_needs_none():
    _, _, eye = watched("fifo", labels=False)
    found = eye.read(torch.arange(3), updates=1)
    assert list(found) == eye.columns
    assert "memory_largest" not in found
    assert "memory_turnover" in found


def test_a_large_queue_is_not_counted():
    memory = WorkingMemory(COUNTED_UP_TO + 1, 2, "fifo", IDS)
    memory.update(isotropic(10, 2, 0), id=torch.arange(10))
    eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=10)
    assert "memory_duplicates" not in eye.read(torch.arange(3), updates=1)


def test_each_warning_comes_once_and_when_it_should():
    memory, _, eye = watched("fifo")
    assert eye.warnings(eye.read(torch.arange(3), updates=1), PATIENCE) == []
    memory._clock += PATIENCE  # as if so many updates had been turned away
    said = eye.warnings(eye.read(torch.arange(3), updates=1), PATIENCE)
    assert any("not changed for 50" in message and "--max-age" in message for message in said)
    assert any("encoded more than" in message and "--refresh" in message for message in said)
    assert eye.warnings(eye.read(torch.arange(3), updates=1), PATIENCE) == []


@pytest.mark.parametrize(
    ("score", "admit"), [("exponential:0.05", "always"), ("linear", "always"), ("linear", "compete")]
)
def test_newcomers_that_only_replace_each_other_leave_a_memory_unchanged(score, admit):
    memory = WorkingMemory(64, 16, Duel(score, admit=admit), IDS)
    memory.update(isotropic(64, 16, 0).float(), id=torch.arange(64))
    eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=16)
    for clock, count in ((PATIENCE - 6, 0), (PATIENCE, 1)):
        memory._clock.fill_(clock)
        for step in range(5):
            alike = isotropic(1, 16, 1) + 0.01 * isotropic(16, 16, 2 + step)
            memory.update(normalize(alike, dim=1).float(), id=torch.arange(16))
        assert admit == "compete" or int(memory.age.min()) == 0
        said = eye.warnings(eye.read(torch.arange(3), updates=1), 1)
        assert len([message for message in said if "replace each other. If" in message]) == count


@pytest.mark.parametrize("policy", [Dedup, Distinct, Random])
def test_no_age_limit_is_asked_for_where_none_can_be_set(policy):
    memory = WorkingMemory(64, 16, policy(), IDS)
    memory.update(isotropic(64, 16, 0).float(), id=torch.arange(64))
    eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=16)
    memory._clock.fill_(PATIENCE + 1)
    said = " ".join(eye.warnings(eye.read(torch.arange(3), updates=1), PATIENCE + 1))
    assert ("have not changed for" in said) == (policy is Random)
    assert "by another network than the present one: raise --refresh" in said
    assert ("--max-age" in said) == (policy is Random)


def test_what_is_said_of_thumbnails_asks_for_no_encoding():
    """Nor is it said that they are stale."""
    sharp, broad = Duel("exponential:0.05"), Duel("gaussian:1")
    changes = {"memory_age_p10": 1e6, "memory_staleness": 1e6, "memory_largest": 0.9, "memory_distinct": 0.1}
    told = {}
    for policy in (sharp, broad):
        for encoded in (True, False):
            _, _, eye = watched(copy.deepcopy(policy), stream_largest=0.5)
            eye.encoded = encoded
            found = eye.read(torch.arange(3), updates=1) | changes | {"memory_duplicates": 59.0}
            told[policy.score.name, encoded] = " / ".join(eye.warnings(found, 10**6))
    for name in ("exponential:0.05", "gaussian:1"):
        assert "raise --refresh" in told[name, True]
        assert "by another network" in told[name, True]
        assert "encoder learns" in told[name, True]
        for word in ("--refresh", "by another network", "encoder", "--lr", "--warmup"):
            assert word not in told[name, False]
        assert "thing new, use a sharper --score or set --max-age" in told[name, False]
        assert "fewer slots (--memory-size) or use a sharper --score" in told[name, False]
    assert "may be no duplicates of each other; try another --space" in told["exponential:0.05", False]
    assert "thumbnails are nearly all alike (mean N 59 of 60" in told["exponential:0.05", False]
    assert "the embeddings are nearly all alike" in told["exponential:0.05", True]


def of_classes(policy, largest, *, stream=0.75, done=PATIENCE, **more):
    """What is said of such a share of the largest class."""
    _, _, eye = watched(policy, stream_largest=stream, **more)
    found = eye.read(torch.arange(3), updates=1) | {"memory_largest": largest}
    return [message for message in eye.warnings(found, done) if "uneven" in message or "than the stream" in message]


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        ("fifo", "try --policy duel with --score exponential:0.05"),
        ("random", "try --policy duel with --score exponential:0.05"),
        ("minred", "so that it has to choose"),
        ("dedup", "so that it has to choose"),
        (Duel("linear"), "so that it has to choose"),
        (Duel("exponential:0.05"), "so that it has to choose, or a broader --score, by which it holds rare ones"),
        (AdaptiveDuel(), "so that it has to choose, or a higher --adaptive-target, by which it holds rare ones"),
    ],
)
def test_a_slot_for_each_item_is_too_many_for_those_that_choose(policy, advice):
    _, _, eye = watched(policy, stream_largest=0.5)
    found = eye.read(torch.arange(3), updates=1) | {"memory_largest": 0.9}
    for items, told in ((60, True), (61, False)):
        eye.items = items
        (message,) = (message for message in eye.warnings(found, 1) if "largest class" in message)
        eye._warned.clear()
        assert ("a slot for each of the stream's 60 items" in message) == (told and "choose" in advice)
        assert not told or message.endswith(advice) or (advice.endswith("rare ones") and advice in message)


def test_a_memory_that_concentrates():
    assert of_classes("fifo", 0.8) == []
    assert of_classes("fifo", 0.85) == []  # of 60 slots that may be chance
    (message,) = of_classes("fifo", 0.9, done=1)
    assert (
        "largest class (90%) than the stream brings (75%): try --policy duel with --score exponential:0.05" in message
    )
    assert of_classes(Duel("linear"), 0.3, stream=0.1) == []
    assert len(of_classes(Duel("linear"), 0.41, stream=0.1)) == 1


def test_a_memory_that_concentrates_on_frames_is_not_judged_before_the_stream_has_brought_items_enough():
    """60 slots, 60 frames at first, 30 a step, 32 of an item."""
    for done, count in ((61, 0), (62, 1)):
        assert len(of_classes(Duel("linear"), 0.9, done=done, dwell=32)) == count


@pytest.mark.parametrize("duplicates", [0.01, 0.3])
def test_a_score_that_does_not_tell_items_that_are_held_more_than_once(duplicates):
    """Half of the slots, that is: a quarter of a duplicate would do. It is not to be sharper, but broader."""
    _, _, eye = watched(Duel("exponential:0.05"), stream_largest=0.75)
    found = eye.read(torch.arange(3), updates=1)
    found |= {"memory_largest": 0.9, "memory_distinct": 0.5, "memory_duplicates": duplicates}
    (message,) = (message for message in eye.warnings(found, 1) if "largest class" in message)
    broader = "held more than once (mean N 0.01); try a broader one, or --policy adaptive --adaptive-target 8"
    assert (broader in message) == (duplicates == 0.01)
    assert ("is sharp enough" in message) == (duplicates == 0.3)


def test_a_memory_that_stays_as_uneven_as_its_stream():
    for policy, advice in (
        ("minred", "--policy duel with --score exponential:0.05"),
        (AdaptiveDuel(), "--policy duel with --score exponential:0.05"),
        (Duel("gaussian:0.1"), "try --score exponential:0.05 (it is gaussian:0.1)"),
        (Duel("exponential:0.05"), "is sharp enough; try --space backbone, a larger --memory-size"),
    ):
        (message,) = of_classes(policy, 0.7)
        assert "as uneven (70% of one class) as the stream (75%)" in message
        assert advice in message
    assert of_classes("fifo", 0.75) == []
    assert of_classes(Duel("linear"), 0.75, done=PATIENCE - 1) == []
    assert of_classes(Duel("linear"), 0.68) == []
    assert of_classes(Duel("linear"), 0.25, stream=0.25) == []


@pytest.mark.parametrize(("score", "count"), [("gaussian:0.1", 1), ("linear", 0)])
def test_embeddings_that_are_all_alike(score, count):
    _, _, eye = watched(Duel(score), labels=False)
    found = eye.read(torch.arange(3), updates=1) | {"memory_duplicates": 31.0}
    assert eye.warnings(found, PATIENCE - 1) == []
    said = eye.warnings(found, PATIENCE)
    assert len([message for message in said if "mean N 31 of 60" in message and "--lr" in message]) == count
    found["memory_duplicates"] = 30.0
    assert watched(Duel(score), labels=False)[2].warnings(found, PATIENCE) == []


def test_a_memory_of_copies():
    found = watched(Duel("linear"), labels=False)[2].read(torch.arange(3), updates=1) | {"memory_distinct": 0.2}

    def said(policy, done=PATIENCE, last=False, **changes):
        warnings = watched(policy, labels=False)[2].warnings(found | changes, done, last=last)
        return [message for message in warnings if "60 slots hold only 12 different items" in message]

    for policy, advice in (
        (Duel("linear"), "(--memory-size), use a sharper --score, or look"),
        (AdaptiveDuel(), "(--memory-size), lower --adaptive-target, or look"),
        ("minred", "(--memory-size), or look"),
    ):
        (message,) = said(policy)
        assert advice in message
    assert said("fifo") == []
    assert said(Duel("linear"), done=PATIENCE - 1) == []
    assert said(Duel("linear"), memory_distinct=0.25) == []
    assert len(said(Duel("linear"), done=3, last=True)) == 1  # no later line would say so
    assert said(Duel("linear"), done=3, last=True, memory_distinct=0.25) == []


def test_the_end_of_a_run_is_judged_once_and_only_by_what_it_had_time_for():
    _, _, eye = watched(Duel("gaussian:0.1"))
    bad = {"memory_distinct": 0.2, "memory_largest": 0.75, "memory_duplicates": 59.0}
    found = eye.read(torch.arange(3), updates=1) | bad
    short, longer = int(eye.turns) - 1, int(eye.turns)
    assert eye.warnings(found, short) == []
    (said,) = eye.warnings(found, short, last=True)
    assert "different items" in said
    (said,) = eye.warnings(found, longer, last=True)
    assert "as uneven (75% of one class) as the stream" in said
    assert eye.warnings(found, longer, last=True) == []


def test_a_short_run_says_that_its_memory_holds_copies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = Instruments.read
    monkeypatch.setattr(Instruments, "read", lambda *args: read(*args) | {"memory_distinct": 0.1})
    config = dataclasses.replace(recipes.demo("d-simclr"), steps=5, log_every=1, batch_size=32, memory_size=64)
    said = io.StringIO()
    train(config, console=Console(file=said, width=400))
    assert said.getvalue().count("warning: the memory's 64 slots hold only 6 different items") == 1


def test_a_stream_that_has_not_brought_more_items_is_no_reason_to_warn_of_copies():
    """1,000 frames have filled the memory, and 100 have come with each step."""
    for dwell, warned in ((1, True), (100, False)):
        memory = WorkingMemory(1000, 8, Duel("exponential:0.05"), IDS)
        eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=100, dwell=dwell)
        found = dict.fromkeys(eye.columns, 1.0) | {"memory_distinct": 0.2}
        assert any("different items" in message for message in eye.warnings(found, 500)) == warned


def items(record):
    """How many the stream of a run on file had: what it brought over how often it brought all of them."""
    config, metrics = record.config, record.values["metrics"]
    return round(metrics["step"][-1] * config.stream_items / metrics["epoch"][-1])


def replayed(path):
    """What would have been said in a run on file. The tenth percentile of the age, which older ones have not, is no
    more than the median, and less than the steps between two lines where more than a tenth changed in between."""
    record = store.read(path)
    config, metrics = record.config, record.values["metrics"]
    policy = build_policy(config, None)
    eye = Instruments(
        WorkingMemory(config.memory_size, 1, policy, IDS, policy_dim=1 if config.compares_features else None),
        labels=torch.arange(10),
        classes=10,
        stream_largest=config.bias / (config.bias + 9),
        per_update=config.stream_items,
        dwell=config.dwell,
        items=items(record),
        negatives=config.memory_negatives,
    )
    said = []
    for line, step in enumerate(metrics["step"]):
        found = {name: values[line] for name, values in metrics.items() if name.startswith("memory_")}
        found.setdefault("memory_age_p10", found["memory_age"] if found["memory_turnover"] <= 0.1 else 0.0)
        found.setdefault("memory_distinct", 1.0)  # which older runs have not
        said += eye.warnings(found, step, last=line == len(metrics["step"]) - 1)
    return said


def test_the_good_runs_on_file_would_have_been_silent_and_the_bad_ones_not():
    ours = {path for path in RESULTS.glob("[!p]*-d-*-ours-x*.json") if "subset" not in path.name}
    sharp = set(RESULTS.glob("digits-*-d-simclr-ours-x27-dwell*.json"))  # no better than a reservoir, and hardly worse
    assert len(ours - sharp) > 10
    assert [path.name for path in ours - sharp if replayed(path)] == []
    told = [message for path in sharp for message in replayed(path)]
    assert told
    assert all("does not tell that some items are held more than once" in message for message in told)
    unmoved = list(RESULTS.glob("digits-*-d-simclr-ours-x27-subset-*.json"))  # no better than without a memory
    assert len(unmoved) >= 5
    for path in unmoved:
        (said,) = replayed(path)
        assert "a slot for each of the stream's 164 items; give it fewer (--memory-size)" in said
        assert said.endswith("or a broader --score, by which it holds rare ones more than once")
    for path in RESULTS.glob("digits-*-d-simclr-ours-small-x27-subset-*.json"):
        (said,) = replayed(path)
        assert "hardly any item has a duplicate (mean N 0.0" in said
    poor = RESULTS / "paper-cifar10-resnet50-d-moco-ours-x27-seed0-92ea5a685f.json"  # 3,000 steps taught it little
    assert any("different items" in message for message in replayed(poor))
    for row, advice in (
        ("d-simclr-tune-gaussian0.1", ["try --score exponential:0.05"]),
        ("d-simclr-tune-adaptive", ["--policy duel"]),
        ("d-simclr-tune-32768-backbone-negatives", ["try a larger --memory-size", "all alike"]),
    ):
        (path,) = RESULTS.glob(f"short-cifar10-resnet18-{row}-x27-*.json")
        said = replayed(path)
        assert len(said) == len(advice)
        assert all(part in message for part, message in zip(advice, said, strict=True))


@pytest.mark.parametrize(("method", "source"), [("d-simclr", "memory"), ("d-moco", "stream")])
def test_csv_and_tensorboard_have_them_all(method, source, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(
        recipes.demo(method, source=source), steps=5, log_every=2, batch_size=32, memory_size=64, tensorboard=True
    )
    train(config, console=Console(file=io.StringIO()))
    lines = read_metrics(Path(config.run_dir))
    assert [line["step"] for line in lines] == [2, 4, 5]
    events = EventAccumulator(str(Path(config.run_dir) / runs.TENSORBOARD)).Reload()
    _, _, eye = watched(Duel())
    for name in eye.columns:
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines
        ]
    ages = events.Histograms("memory_ages")
    assert ages[-1].histogram_value.num == 64
    assert ages[-1].histogram_value.max == lines[-1]["memory_age_max"]


LINE = {
    "loss": 6.6483,
    "lr": 0.0034,
    "steps_per_s": 38.9,
    "knn": 0.1634,
    "memory_largest": 0.741,
    "memory_entropy": 0.49,
    "memory_collisions": 0.563,
    "memory_intra": 0.1597,
    "memory_inter": -0.096,
    "memory_turnover": 0.4127,
    "memory_age": 145.0,
    "memory_age_max": 12698.0,
    "memory_duplicates": 22382.3,
    "memory_duplicates_max": 26690.8,
}


@pytest.mark.parametrize("terminal", [False, True])
def test_the_line_below_the_progress_has_them(terminal, tmp_path):
    said = io.StringIO()
    console = Console(file=said, width=120, force_terminal=terminal, color_system=None)
    with RunLog(tmp_path, columns=list(LINE), steps=5000, label="d-simclr", tensorboard=False, console=console) as log:
        log.log(5000, LINE)
    lines = said.getvalue().splitlines()
    below = "memory: entropy 0.49  largest 74%  collisions 56%  turnover 41%  age 145 (12698)  N 22382 (26691)"
    assert any(line.strip() == f"{below}  cosine 0.16/-0.10" for line in lines)
    assert any("5000/5000" in line and "loss 6.6483  lr 0.0034  steps/s 39  knn 16.3%" in line for line in lines)
    assert max(len(line) for line in lines) <= 120


@pytest.mark.parametrize(("speed", "shown"), [(0.0314, "0.031"), (0.96, "0.96"), (99.7, "100"), (1234.5, "1234")])
def test_a_slow_training_has_a_speed_too(speed, shown, tmp_path):
    said = io.StringIO()
    log = RunLog(tmp_path, columns=["steps_per_s"], steps=1, tensorboard=False, console=Console(file=said, width=120))
    log.log(1, {"steps_per_s": speed})
    assert said.getvalue().endswith(f"steps/s {shown}\n")


def test_the_line_without_labels_and_without_a_memory(tmp_path):
    said = io.StringIO()
    log = RunLog(tmp_path, columns=list(LINE), steps=5, tensorboard=False, console=Console(file=said, width=120))
    log.log(5, {"loss": 1.0, "memory_turnover": 0.5, "memory_age": 3.0, "memory_age_max": 9.0})
    log.log(5, {"loss": 1.0})
    assert said.getvalue().splitlines() == [
        "training: step 5/5  loss 1.0000",
        "  memory: turnover 50%  age 3 (9)",
        "training: step 5/5  loss 1.0000",
    ]


def test_a_score_that_sees_no_duplicates_is_said_to_be_too_sharp():
    for score, count in (("exponential:0.001", 1), ("exponential:0.5", 0)):
        memory = WorkingMemory(8, 16, Duel(score), IDS)
        memory.update(isotropic(8, 16, 0), id=torch.arange(8))
        eye = Instruments(memory, labels=None, classes=0, stream_largest=None, per_update=8)
        said = eye.warnings(eye.read(torch.arange(3), updates=1), 1)
        assert len([message for message in said if "no item of the memory resembles another" in message]) == count


def test_updates_of_minred_that_are_in_doubt_are_shown():
    memory, _, eye = watched("minred")
    memory.policy.in_doubt += 3
    found = eye.read(torch.arange(20), updates=2)
    assert list(found) == eye.columns
    assert found["memory_in_doubt"] == 3
    assert "memory_in_doubt" not in watched(Duel())[2].columns
