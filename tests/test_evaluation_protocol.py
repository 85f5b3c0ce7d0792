"""The whole evaluation on a stand-in source: what it holds, that it is repeatable and leaves no trace."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from duel.errors import UserError
from duel.evaluation import EvaluationSettings, class_cosines, class_table, evaluate, online_measures, save, table
from duel.evaluation.features import balanced_ids
from duel.evaluation.knn import topk, weighted_knn
from duel.evaluation.probe import linear_probe

STATS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "device": "cpu"}
QUICK = EvaluationSettings(batch_size=64, probe_epochs=20, probe_lr=0.05, shot_repeats=5)


class Blobs:
    """A stand-in source: each class is a fixed pattern under noise."""

    shape, skipped = (3, 4, 4), ()

    def __init__(self, n, seed, name="blobs", classes=4):
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.randint(60, 190, (classes, *self.shape), generator=torch.Generator().manual_seed(9))
        self.name, self.labels = name, torch.arange(n) % classes
        self.classes = tuple(f"blob {c}" for c in range(classes))
        noise = 45 * torch.randn(n, *self.shape, generator=generator)
        self.data = (patterns[self.labels] + noise).clamp(0, 255).to(torch.uint8)

    def __len__(self):
        return len(self.data)

    def images(self, ids):
        return self.data[ids.cpu()].to(ids.device)


class Encoder(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(), nn.Flatten()
        )
        self.projection = nn.Linear(72, 2)
        self.encoded = 0

    def features(self, x):
        self.encoded += len(x)
        return self.body(x)


def without_times(found):
    return {name: value for name, value in found.items() if not name.startswith("seconds")}


@pytest.fixture(scope="module")
def sources():
    return Blobs(240, 1), Blobs(90, 2)


@pytest.fixture(scope="module")
def result(sources):
    encoder = Encoder()
    encoder.body[1].running_mean += 3  # statistics of some other data, which re-estimation mends
    return evaluate(encoder, *sources, settings=QUICK, **STATS)


def test_every_measure_is_there_and_json_can_hold_it(result, tmp_path):
    save(result, tmp_path / "evaluation.json")
    read = json.loads((tmp_path / "evaluation.json").read_text())
    assert read == result
    rates = ["knn", "probe", "few_shot", *(f"top{k}_test_to_{where}" for k in (1, 10) for where in ("test", "train"))]
    assert all(0.25 < read[name] <= 1 for name in rates)
    assert set(read["without_reestimation"]) == {
        "top1_test_to_test",
        "top1_test_to_train",
        "knn",
        "probe",
        "probe_train",
    }
    assert read["without_reestimation"]["knn"] < read["knn"]
    assert set(read["per_class"]["probe"]) == {"blob 0", "blob 1", "blob 2", "blob 3"}
    assert set(read["balanced_accuracy"]) == {"knn", "probe"}
    assert -1 <= read["inter_class_cosine"] < read["intra_class_cosine"] <= 1
    assert 1 < read["effective_rank"] < 72
    assert set(read["seconds_by_part"]) == {"features", "knn", "probe", "rest"}
    assert sum(read["seconds_by_part"].values()) == pytest.approx(read["seconds"], abs=0.005)  # each is rounded
    assert read["protocol"]["settings"]["probe_epochs"] == 20
    words = " ".join(str(value) for value in read["protocol"].values())
    for said in (
        "before the projection",
        "re-estimated",
        "last step",
        "test set without the image itself",
        "last epoch",
    ):
        assert said in words


def test_figures_are_those_of_the_parts(sources, result):
    """The same measures put together by hand from features taken with hand-made statistics."""
    encoder, (train, test) = Encoder().eval(), sources
    x = [(source.data.float() / 255 - 0.5) / 0.25 for source in sources]
    convolved = encoder.body[0](x[0])
    # one batch's mean is the mean over all images; its variance, averaged over batches, differs a little
    encoder.body[1].running_mean.copy_(convolved.mean((0, 2, 3)).detach())
    encoder.body[1].running_var.copy_(convolved.var((0, 2, 3)).detach())
    with torch.no_grad():
        train_x, test_x = (encoder.features(part) for part in x)
    y, test_y = train.labels, test.labels
    near = 0.03  # three of ninety images
    assert result["top1_test_to_test"] == pytest.approx(
        topk(test_x, test_x, test_y, test_y, (1,), exclude_self=True)["top1"], abs=near
    )
    assert result["top1_test_to_train"] == pytest.approx(topk(test_x, train_x, test_y, y, (1,))["top1"], abs=near)
    assert result["knn"] == pytest.approx(weighted_knn(test_x, train_x, test_y, y, k=200)["accuracy"], abs=near)
    probe = linear_probe(train_x, y, test_x, test_y, epochs=20, lr=0.05)
    assert result["probe"] == pytest.approx(probe["accuracy"], abs=near)


def test_the_encoder_is_left_as_it_was(sources):
    encoder = Encoder()
    encoder.body[0].eval()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    random = torch.get_rng_state()
    evaluate(encoder, *sources, settings=QUICK, **STATS)
    online_measures(encoder, *sources, settings=QUICK, **STATS)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert encoder.training
    assert encoder.body[1].training
    assert not encoder.body[0].training
    assert torch.equal(random, torch.get_rng_state())


def test_repeated_and_cached_evaluations_agree(sources, tmp_path):
    encoder = Encoder()
    first = evaluate(encoder, *sources, settings=QUICK, cache=tmp_path, **STATS)
    encoded = encoder.encoded
    again = evaluate(encoder, *sources, settings=QUICK, cache=tmp_path, **STATS)
    assert encoder.encoded - encoded <= 240  # BatchNorm's images at most; no features
    assert without_times(first) == without_times(again)
    with torch.no_grad():
        encoder.body[0].weight.mul_(-1)
    other = evaluate(encoder, *sources, settings=QUICK, cache=tmp_path, **STATS)
    assert other["intra_class_cosine"] != first["intra_class_cosine"]


@pytest.mark.parametrize("change", [{"batchnorm_images": 20}, {"batch_size": 16}, {"batchnorm_images": 20, "seed": 1}])
def test_features_by_other_statistics_are_not_taken_from_the_cache(sources, tmp_path, change):
    before = {**change, "seed": 0} if "seed" in change else {}
    for settings in (dataclasses.replace(QUICK, **before), dataclasses.replace(QUICK, **change)):
        cached = evaluate(Encoder(), *sources, settings=settings, cache=tmp_path, **STATS)
        assert without_times(cached) == without_times(evaluate(Encoder(), *sources, settings=settings, **STATS))


@pytest.mark.parametrize("changed", [0, 1])
def test_features_of_other_images_are_not_taken_from_the_cache(sources, tmp_path, changed):
    """Also test features, whose BatchNorm statistics are those of the training images."""
    sources = [copy.deepcopy(source) for source in sources]
    evaluate(Encoder(), *sources, settings=QUICK, cache=tmp_path, **STATS)
    sources[changed].data[1::2] = sources[changed].data[1::2] // 3
    cached = evaluate(Encoder(), *sources, settings=QUICK, cache=tmp_path, **STATS)
    assert without_times(cached) == without_times(evaluate(Encoder(), *sources, settings=QUICK, **STATS))


def test_precision(sources, tmp_path):
    """bf16 keeps 8 bits: rates within 5 of 90 images. auto means fp32 on a CPU. No two share features."""
    plain, half, auto = (
        evaluate(Encoder(), *sources, settings=dataclasses.replace(QUICK, precision=precision), cache=tmp_path, **STATS)
        for precision in ("fp32", "bf16", "auto")
    )
    assert half["intra_class_cosine"] != plain["intra_class_cosine"]
    assert half["intra_class_cosine"] == pytest.approx(plain["intra_class_cosine"], abs=0.01)
    assert half["probe"] == pytest.approx(plain["probe"], abs=0.056)
    assert "float32, encoded in bf16" in half["protocol"]["features"]
    assert "bf16" not in plain["protocol"]["features"]
    del auto["protocol"], plain["protocol"]
    assert without_times(auto) == without_times(plain)
    with pytest.raises(UserError, match="unknown precision 'fp16'"):
        EvaluationSettings(precision="fp16")


def test_an_encoder_without_batchnorm(sources):
    found = evaluate(Encoder(norm=False), *sources, settings=QUICK, **STATS)
    assert found["without_reestimation"] == {name: found[name] for name in found["without_reestimation"]}
    assert "no BatchNorm" in found["protocol"]["batchnorm"]


def test_small_sets_use_the_neighbours_they_have():
    found = evaluate(Encoder(), Blobs(40, 1), Blobs(8, 2), settings=QUICK, **STATS)
    assert found["used"] == {"k": 40, "shots": 5}
    assert "top10_test_to_test" not in found
    json.dumps(found, allow_nan=False)
    assert "most of the 40 training images vote" in str(table(found).caption)
    assert table(found | {"images": {"train": 80, "test": 8}}).caption is None


def test_online_measures_are_those_of_the_encoder_as_it_is(sources):
    encoder = Encoder()
    found = online_measures(encoder, *sources, settings=QUICK, **STATS)
    encoder.eval()
    with torch.no_grad():
        train_x, test_x = (encoder.features((source.data.float() / 255 - 0.5) / 0.25) for source in sources)
    # 88 of the 90 test images would be balanced exactly; two classes have one more
    expected = weighted_knn(test_x, train_x, sources[1].labels, sources[0].labels, k=200)["accuracy"]
    assert found["knn"] == pytest.approx(expected, abs=0.03)
    intra, inter = class_cosines(test_x, sources[1].labels)
    assert found["intra_class_cosine"] == pytest.approx(intra, abs=0.02)
    assert found["inter_class_cosine"] == pytest.approx(inter, abs=0.02)
    assert (
        0.25 < online_measures(encoder, *sources, train_images=40, test_images=20, settings=QUICK, **STATS)["knn"] <= 1
    )


def test_online_cosines_are_of_different_images(sources):
    """Of a class with few images, which are repeated until it has its share, an image is not compared with itself."""
    test = Blobs(90, 2)
    few = torch.cat([torch.arange(0, 88, 4), torch.tensor([1, 2, 3, 5, 6, 7])])  # 22 of one class, 2 of the others
    test.data, test.labels = test.data[few], test.labels[few]
    encoder = Encoder()
    found = online_measures(encoder, sources[0], test, settings=QUICK, **STATS)
    with torch.no_grad():
        x = encoder.eval().features((test.data.float() / 255 - 0.5) / 0.25)
    shown = balanced_ids(test.labels, 2000, seed=QUICK.seed)
    assert len(shown) == 28
    once = shown.unique()
    assert len(once) == 13  # 7 of the one, 2 of each other
    wanted, with_itself = (class_cosines(x[ids], test.labels[ids]) for ids in (once, shown))
    assert found["intra_class_cosine"] == pytest.approx(wanted[0], abs=1e-5)
    assert found["inter_class_cosine"] == pytest.approx(wanted[1], abs=1e-5)
    assert wanted[0] < with_itself[0] - 0.05


def test_tables_show_per_cent(result):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(result), class_table(result))
    text = console.export_text()
    assert f"{100 * result['probe']:.2f} %" in text
    assert f"{100 * result['without_reestimation']['knn']:.2f} %" in text
    assert "BatchNorm as trained" in text
    assert "…" not in text
    assert "k 200" in text
    assert "5-shot" in text
    assert "blob 3" in text


def test_the_standardised_probe_minds_no_offset(sources):
    class Shifted(Encoder):
        def features(self, x):
            return super().features(x) + 300.0

    found = evaluate(Shifted(norm=False), *sources, settings=QUICK, **STATS)
    plain = evaluate(Encoder(norm=False), *sources, settings=QUICK, **STATS)
    assert found["probe"] < plain["probe"] - 0.2
    assert found["probe_standardised"] == pytest.approx(plain["probe_standardised"], abs=0.05)


def test_a_test_set_of_one_class_has_no_geometry_of_classes():
    train, test = Blobs(40, 0), Blobs(8, 1)
    test.labels = torch.zeros(8, dtype=torch.int64)
    found = evaluate(Encoder(), train, test, settings=QUICK, **STATS)
    assert found["etf_distance"] is found["inter_class_cosine"] is None
    assert isinstance(found["intra_class_cosine"], float)


def test_a_probe_that_has_not_fitted_is_said(result):
    def caption(**changes):
        return table(result | changes).caption or ""

    assert "has not fitted" not in caption()
    assert "has not fitted" in caption(probe_train=result["knn"] - 0.03)
    assert "has not fitted" not in caption(probe_train=result["knn"] - 0.01)
    assert "diverged" in caption(probe_train=0.0, probe_diverged=True)
    assert "has not fitted" not in caption(probe_train=0.0, probe_diverged=True)
    far = "far below that on standardised features"
    assert far not in caption(probe=0.5, probe_standardised=0.59)
    assert far in caption(probe=0.5, probe_standardised=0.61)
    assert far not in caption(probe=0.5, probe_standardised=0.61, probe_train=0.0)  # said otherwise


OTHERS = {
    "batchnorm_images": 20, "neighbours": 3, "temperature": 5.0, "probe_epochs": 1, "probe_lr": 1e-4,
    "probe_momentum": 0.0, "probe_weight_decay": 0.5, "probe_batch_size": 7, "shots": 1, "shot_repeats": 2, "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize("setting", OTHERS)
def test_every_setting_does_something(sources, setting):
    """But those of how it is carried out: batches, processes, precision."""
    carried_out = {"batch_size", "workers", "precision"}
    assert {field.name for field in dataclasses.fields(EvaluationSettings)} == set(OTHERS) | carried_out

    def figures(settings):
        found = without_times(evaluate(Encoder(), *sources, settings=settings, **STATS))
        return [value for name, value in found.items() if name not in ("protocol", "used")]

    assert figures(QUICK) == figures(QUICK)
    assert figures(QUICK) != figures(dataclasses.replace(QUICK, **{setting: OTHERS[setting]}))


def test_shares_by_class_are_those_of_the_measure_they_are_named_after(sources):
    found = evaluate(Encoder(), *sources, settings=dataclasses.replace(QUICK, probe_epochs=1), **STATS)
    assert abs(found["knn"] - found["probe"]) > 0.05
    for name in ("knn", "probe"):  # classes are almost as large as each other
        shares = list(found["per_class"][name].values())
        assert sum(shares) / len(shares) == pytest.approx(found[name], abs=0.01)
        assert found["balanced_accuracy"][name] == pytest.approx(found[name], abs=0.01)


def test_progress_can_join_a_display_that_is_shown(sources):
    with Progress(disable=True) as shown:
        task = shown.add_task("training")
        evaluate(Encoder(), *sources, settings=QUICK, progress=shown, **STATS)
        assert shown.task_ids == [task]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda train, test: setattr(train, "labels", None), "train source 'blobs' has no labels"),
        (lambda train, test: setattr(test, "classes", ("a", "b", "c", "d")), "same classes"),
        (lambda train, test: test.labels.fill_(7), "test labels must be >= 0 and < 4"),
    ],
)
def test_sources_that_cannot_be_measured_are_refused(change, words):
    train, test = Blobs(40, 1), Blobs(20, 2)
    change(train, test)
    with pytest.raises(UserError, match=words):
        evaluate(Encoder(), train, test, settings=QUICK, **STATS)


def test_encoder_without_features_is_refused(sources):
    with pytest.raises(UserError, match=r"features\(images\), got Linear"):
        evaluate(nn.Linear(2, 2), *sources, settings=QUICK, **STATS)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 0), ("neighbours", 0), ("temperature", 0.0), ("probe_momentum", 1.0), ("probe_weight_decay", -1.0)],
)
def test_settings_are_checked(field, value):
    with pytest.raises(UserError, match=f"{field} must be .*got {value}"):
        EvaluationSettings(**{field: value})


def test_settings_do_not_import_torch():
    code = "import sys, duel.evaluation.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
