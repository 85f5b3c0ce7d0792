"""Extraction, BatchNorm re-estimation and the cache."""

import os
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

from duel.data import ArraySource
from duel.data.folder import FolderSource
from duel.errors import UserError
from duel.evaluation.features import (
    FeatureCache,
    balanced_ids,
    describe_source,
    extract,
    fingerprint,
    reestimate_batchnorm,
    reestimated_batchnorm,
)
from duel.evaluation.protocol import clean_encode

CPU = torch.device("cpu")


class Shapes:
    """A stand-in source: noise whose mean brightness grows with the class."""

    name, shape, skipped = "shapes", (3, 4, 4), ()

    def __init__(self, n=60, classes=3, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(n) % classes
        self.classes = tuple(f"class {c}" for c in range(classes))
        noise = torch.randint(0, 60, (n, *self.shape), generator=generator)
        self.data = (noise + 60 * self.labels.view(-1, 1, 1, 1)).to(torch.uint8)

    def __len__(self):
        return len(self.data)

    def images(self, ids):
        return self.data[ids.cpu()].to(ids.device)


def flat(images):
    return images.flatten(1).float()


@pytest.mark.parametrize("resident", [None, True, False])
@pytest.mark.parametrize("batch_size", [7, 60, 1000])
def test_features_come_in_order(batch_size, resident):
    source = Shapes()
    if resident is not None:
        source = ArraySource(source.data, resident=resident, name="shapes")
    assert torch.equal(extract(flat, source, batch_size=batch_size, device="cpu"), flat(source.data))


def test_features_of_some_images_only():
    source, ids = Shapes(), torch.tensor([5, 3, 59])
    assert torch.equal(extract(flat, source, ids=ids, batch_size=2, device="cpu"), flat(source.data[ids]))


@pytest.mark.slow
def test_worker_processes_give_the_same_and_leave_the_random_state_alone():
    source = Shapes()
    before = torch.get_rng_state()
    found = extract(flat, source, batch_size=16, device="cpu", workers=2)
    assert torch.equal(found, flat(source.data))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bf16", [False, True])
def test_features_of_images_on_the_device_are_taken_without_waiting(bf16):
    device, source = torch.device("cuda"), ArraySource(Shapes(600).data, name="shapes").to("cuda")
    left = 6
    clean = clean_encode(SimpleNamespace(features=flat), (0.5,) * 3, (0.25,) * 3, device, bf16=bf16)

    def encode(images):
        nonlocal left
        left -= 1
        torch.cuda.set_sync_debug_mode("error" if left else "default")  # after the last, whether all is finite is read
        return clean(images)

    try:
        found = extract(encode, source, batch_size=100, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert left == 0
    torch.testing.assert_close(found, flat((source.data / 255 - 0.5) / 0.25))


def test_features_that_cannot_be_measured_are_refused():
    with pytest.raises(UserError, match="NaN or infinite features on 'shapes'"):
        extract(lambda images: flat(images) / 0, Shapes(), device="cpu")
    with pytest.raises(UserError, match=r"\(60, f\), got \(60, 3, 4, 4\)"):
        extract(lambda images: images.float(), Shapes(), device="cpu")
    with pytest.raises(UserError, match="no images"):
        extract(flat, Shapes(), device="cpu", ids=torch.arange(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(20, 2)
    )


def test_reestimation_is_the_plain_average_over_batches():
    net, images = network(), Shapes().data.float()
    net.train()
    for _ in range(3):
        net(100 * torch.randn(8, 3, 4, 4))  # what training left behind
    net[3].eval()  # a mode of its own, to be found again
    batches = images.split(20)
    assert reestimate_batchnorm(net, batches) == 1
    inside = [net[0](batch).transpose(0, 1).flatten(1) for batch in batches]
    torch.testing.assert_close(net[1].running_mean, torch.stack([x.mean(1) for x in inside]).mean(0))
    torch.testing.assert_close(net[1].running_var, torch.stack([x.var(1) for x in inside]).mean(0))
    assert net.training
    assert not net[3].training
    assert net[1].momentum == 0.1


def test_reestimation_for_a_while_restores_everything():
    net, images = network().eval(), Shapes().data.float()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    plain = net(images)
    with reestimated_batchnorm(net, images.split(20)) as layers:
        assert layers == 1
        assert not torch.allclose(net(images), plain)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(ZeroDivisionError), reestimated_batchnorm(net, images.split(20)):
        raise ZeroDivisionError
    assert torch.equal(net(images), plain)


def test_no_batchnorm_and_no_images():
    assert reestimate_batchnorm(nn.Linear(2, 2), []) == 0
    assert reestimate_batchnorm(nn.BatchNorm1d(2, track_running_stats=False), []) == 0
    with pytest.raises(UserError, match="batches is empty"):
        reestimate_batchnorm(network(), [])


def test_balanced_ids():
    labels = torch.tensor([0] * 50 + [1] * 5 + [3] * 20)
    ids = balanced_ids(labels, 30, seed=0)
    assert torch.equal(labels[ids].bincount(), torch.tensor([10, 10, 0, 10]))
    assert len(ids[labels[ids] == 0].unique()) == 10
    assert torch.equal(ids[labels[ids] == 1].unique(return_counts=True)[1], torch.full((5,), 2))
    assert not torch.equal(labels[ids], labels[ids].sort()[0])  # mixed, as batches must be
    assert torch.equal(ids, balanced_ids(labels, 30, seed=0))
    assert not torch.equal(ids, balanced_ids(labels, 30, seed=1))
    even = torch.arange(12) % 4
    assert torch.equal(balanced_ids(even, 100, seed=0).sort()[0], torch.arange(12))


def test_fingerprints_tell_states_apart():
    net = network()
    first = fingerprint(net)
    assert first == fingerprint(network())
    net[1].running_mean[0] += 1e-3
    assert first != fingerprint(net)
    assert fingerprint(torch.ones(2, dtype=torch.bfloat16)) != fingerprint(torch.ones(2))
    assert fingerprint(describe_source(Shapes())) == fingerprint(describe_source(Shapes()))
    assert fingerprint(describe_source(Shapes())) != fingerprint(describe_source(Shapes(seed=1)))


def test_a_folder_is_told_by_its_files(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(40)]
    for path in paths:
        Image.new("RGB", (4, 4)).save(path)
    source = FolderSource(paths, None, name="folder", classes=(), image_size=4)
    first = fingerprint(describe_source(source))
    assert first == fingerprint(describe_source(source))
    Image.new("RGB", (4, 4), "red").save(paths[7])
    os.utime(paths[7], ns=(1, 1))
    assert first != fingerprint(describe_source(source))


def test_one_image_of_many_is_told():
    before, after = Shapes(), Shapes()
    assert len(after) > 32
    after.data = after.data.clone()
    after.data[5] += 1
    assert fingerprint(describe_source(before)) != fingerprint(describe_source(after))


def test_cache_computes_once_for_each_key(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return torch.full((2, 3), float(len(calls)))

    cache = FeatureCache(tmp_path / "features")
    for key, expected in (("a", 1), ("a", 1), ("b", 2), ("b", 2), ("a", 3)):
        assert torch.equal(cache.get("test", key, compute, device=CPU), torch.full((2, 3), float(expected)))
    assert [path.name for path in (tmp_path / "features").iterdir()] == ["test.pt"]


def test_a_torn_cache_file_is_written_anew(tmp_path):
    cache = FeatureCache(tmp_path)
    cache.get("test", "a", lambda: torch.ones(100, 3), device=CPU)
    path = tmp_path / "test.pt"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.warns(UserWarning, match=r"test\.pt is unreadable"):
        assert torch.equal(cache.get("test", "a", lambda: torch.zeros(1, 1), device=CPU), torch.zeros(1, 1))
    assert torch.equal(cache.get("test", "a", lambda: torch.ones(9, 9), device=CPU), torch.zeros(1, 1))


def test_a_cache_that_cannot_be_written_does_not_stop_the_evaluation(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="not cached"):
        found = FeatureCache(tmp_path / "file" / "features").get("test", "a", lambda: torch.ones(2, 2), device=CPU)
    assert torch.equal(found, torch.ones(2, 2))
