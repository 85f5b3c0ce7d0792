"""Every operation against torchvision's, image by image; the distributions; no synchronisation."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from duel.data import operations
from duel.data.augment import PRESETS, Augment, Parameters, Preset, normalise
from duel.errors import UserError

HALF = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25)}


@pytest.fixture
def images() -> Tensor:
    """Random ones, and those where colour conversions go wrong: greys, black, white, ties, few levels."""
    torch.manual_seed(0)
    x = torch.rand(24, 3, 17, 21)
    x[0], x[1], x[2] = 0.3, 0.0, 1.0
    x[3, 0], x[4, 2] = x[3, 1], x[4, 1]
    x[5] = (x[5] > 0.5).float()
    x[6] = (x[6] * 4).round() / 4
    return x


def uniform(n: int, low: float, high: float) -> Tensor:
    return torch.rand(n) * (high - low) + low


def agree(ours: Tensor, theirs: list[Tensor], tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(ours, torch.stack(theirs), atol=tolerance, rtol=0)


def test_hue_is_torchvisions(images: Tensor) -> None:
    shift = uniform(len(images), -0.5, 0.5)
    shift[7:10] = torch.tensor([-0.5, 0.5, 0.0])
    theirs = [F.adjust_hue(x, a) for x, a in zip(images, shift.tolist(), strict=True)]
    agree(operations.adjust_hue(images, shift), theirs)


def test_jitter_in_every_order_is_torchvisions(images: Tensor) -> None:
    """One image per order: its own factors, its own order."""
    orders = list(permutations((operations.BRIGHTNESS, operations.CONTRAST, operations.SATURATION, operations.HUE)))
    factors, hue = uniform(24 * 4, 0.5, 1.5).view(24, 4), uniform(24, -0.3, 0.3)
    factors[:, operations.IDENTITY] = 1
    ours = operations.color_jitter(images, operations.jitter_orders(hue=True), factors, hue)
    names = {1: F.adjust_brightness, 2: F.adjust_contrast, 3: F.adjust_saturation, 4: F.adjust_hue}
    theirs = []
    for i, (x, order) in enumerate(zip(images, orders, strict=True)):
        amounts = [*factors[i].tolist(), float(hue[i])]
        for operation in order:
            x = names[operation](x, amounts[operation])
        theirs.append(x)
    # Hue of a nearly grey pixel magnifies the last bit of what came before it.
    agree(ours, theirs, 5e-5)
    other_order = operations.color_jitter(images, operations.jitter_orders(hue=True).flip(0), factors, hue)
    assert (ours - other_order).abs().max() > 0.01


def test_jitter_without_hue_in_every_order(images: Tensor) -> None:
    factors = uniform(6 * 4, 0.5, 1.5).view(6, 4)
    factors[:, operations.IDENTITY] = 1
    ours = operations.color_jitter(images[8:14], operations.jitter_orders(hue=False), factors, None)
    names = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    theirs = []
    for i, order in enumerate(permutations(range(3))):
        x = images[8 + i]
        for operation in order:
            x = names[operation](x, float(factors[i, operation + 1]))
        theirs.append(x)
    agree(ours, theirs)


@pytest.mark.parametrize("size", [5, 13, 21, 40])
def test_resized_crop_is_torchvisions_with_antialias(images: Tensor, size: int) -> None:
    """Reductions and enlargements, boxes of one pixel and of the whole image, flipped or not."""
    height, width = images.shape[2:]
    boxes = [(0, 0, height, width), (3, 4, 1, 1), (0, 5, height, 2)]
    while len(boxes) < len(images):
        h, w = int(torch.randint(1, height + 1, ())), int(torch.randint(1, width + 1, ()))
        boxes.append((int(torch.randint(0, height - h + 1, ())), int(torch.randint(0, width - w + 1, ())), h, w))
    mirror = torch.rand(len(images)) < 0.5
    theirs = [F.resized_crop(x, *box, [size, size], antialias=True) for x, box in zip(images, boxes, strict=True)]
    theirs = [F.horizontal_flip(x) if m else x for x, m in zip(theirs, mirror.tolist(), strict=True)]
    agree(operations.resized_crop(images, torch.tensor(boxes).float(), size, mirror), theirs)


def test_resized_crop_that_enlarges_needs_no_antialias(images: Tensor) -> None:
    """Crops of CIFAR to CIFAR's size only enlarge: there antialias makes no difference, and both agree."""
    box = (2, 3, 11, 9)
    theirs = [F.resized_crop(x, *box, [17, 17], antialias=False) for x in images]
    agree(operations.resized_crop(images, torch.tensor([box] * len(images)).float(), 17), theirs)


@pytest.mark.parametrize("kernel", [3, 9, 23])
def test_blur_is_torchvisions(images: Tensor, kernel: int) -> None:
    sigma = uniform(len(images), 0.1, 2.0)
    theirs = [F.gaussian_blur(x, [kernel, kernel], [s, s]) for x, s in zip(images, sigma.tolist(), strict=True)]
    agree(operations.gaussian_blur(images, sigma, kernel), theirs)
    assert torch.equal(operations.gaussian_blur(images, torch.full((len(images),), 0.01), kernel), images)


def test_flip_grayscale_solarize_and_normalise_are_torchvisions(images: Tensor) -> None:
    mask = torch.rand(len(images)) < 0.5
    pairs = list(zip(images, mask.tolist(), strict=True))
    agree(operations.hflip(images, mask), [F.horizontal_flip(x) if m else x for x, m in pairs], 0)
    grey = [F.rgb_to_grayscale(x, num_output_channels=3) if m else x for x, m in pairs]
    agree(operations.grayscale(images, mask), grey)
    threshold = uniform(len(images), 0.0, 1.2)
    solar = [F.solarize(x, t) if t <= 1 else x for x, t in zip(images, threshold.tolist(), strict=True)]
    agree(operations.solarize(images, threshold), solar)
    raw = (images * 255).to(torch.uint8)
    agree(normalise(raw, **HALF), [F.normalize(x / 255, HALF["mean"], HALF["std"]) for x in raw])


def raw_images(n: int, side: int = 32) -> Tensor:
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_repeat_with_the_generator_and_differ_without(preset: str) -> None:
    augment, x = Augment(preset, **HALF, image_size=32), raw_images(150)
    one = augment(x, torch.Generator().manual_seed(3))
    assert one.shape == (150, 3, 32, 32)
    assert one.dtype == torch.float32
    assert torch.equal(one, augment(x, torch.Generator().manual_seed(3)))
    if preset == "none":
        torch.testing.assert_close(one, normalise(x, **HALF))
    else:
        assert not torch.equal(one, augment(x, torch.Generator().manual_seed(4)))


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    augment, x = Augment("standard", **HALF, image_size=32), raw_images(50)
    parameters = augment.draw(x, torch.Generator().manual_seed(0))
    whole = augment.apply_parameters(x, parameters)
    monkeypatch.setattr("duel.data.augment.CPU_PIECE", 7 * 3 * 32 * 32)
    torch.testing.assert_close(augment.apply_parameters(x, parameters), whole)


def test_a_view_is_the_torchvision_pipeline_with_its_parameters() -> None:
    """The whole of "standard" plus blur and solarise, rebuilt one image at a time from the drawn parameters."""
    preset = Preset(**{**vars(PRESETS["standard"]), "blur_above": 8, "solarize": 0.4})
    augment, x = Augment(preset, **HALF, image_size=32), raw_images(20)
    p = augment.draw(x, torch.Generator().manual_seed(5))
    rows = augment.orders.tolist()
    orders = list(permutations((1, 2, 3, 4)))
    theirs = []
    for i, image in enumerate(x):
        y = F.resized_crop(image / 255, *p.boxes[i].int().tolist(), [32, 32], antialias=True)
        y = F.horizontal_flip(y) if p.mirror[i] else y
        amounts = [*p.factors[i].tolist(), float(p.hue[i])]
        names = {1: F.adjust_brightness, 2: F.adjust_contrast, 3: F.adjust_saturation, 4: F.adjust_hue}
        for operation in orders[rows.index(p.slots[i].tolist())]:
            y = names[operation](y, amounts[operation])
        y = F.rgb_to_grayscale(y, num_output_channels=3) if p.grey[i] else y
        y = F.gaussian_blur(y, [augment.kernel_size] * 2, [float(p.sigma[i])] * 2) if p.sigma[i] > 0.05 else y
        y = F.solarize(y, float(p.threshold[i])) if p.threshold[i] < 1 else y
        theirs.append(F.normalize(y, HALF["mean"], HALF["std"]))
    ours = augment.apply_parameters(x, p)
    # Solarise jumps at one half: a value within rounding of it may fall on either side.
    far = ((ours - torch.stack(theirs)).abs() > 1e-3).float().mean()
    assert far < 1e-4


def test_boxes_are_distributed_as_random_resized_crops() -> None:
    """Against torchvision's own draws: the same mean and spread of top, left, height and width."""
    augment, n = Augment("standard", **HALF, image_size=32), 20_000
    ours = augment.draw(torch.empty(n, 3, 32, 32, dtype=torch.uint8), torch.Generator().manual_seed(0)).boxes
    torch.manual_seed(0)
    crop, blank = v2.RandomResizedCrop(32, scale=(0.08, 1.0)), torch.empty(3, 32, 32)
    drawn = [crop.make_params([blank]) for _ in range(4000)]
    theirs = torch.tensor([[float(d[k]) for k in ("top", "left", "height", "width")] for d in drawn])
    assert ((ours[:, :2] + ours[:, 2:]) <= 32).all()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 2:] >= 1).all()
    for a, b in zip(ours.t(), theirs.t(), strict=True):
        assert abs(a.mean() - b.mean()) < 4 * b.std() / len(theirs) ** 0.5
        assert abs(a.std() - b.std()) < 0.05 * b.std()
    together = [float(torch.corrcoef(boxes.t())[2, 3]) for boxes in (ours, theirs)]
    assert together[0] == pytest.approx(together[1], abs=0.03)


@pytest.mark.parametrize(("height", "width"), [(12, 96), (12, 97), (301, 20), (300, 21)])
def test_a_box_that_never_fits_is_torchvisions_central_one(height: int, width: int) -> None:
    """A panorama: area 1 and ratio at most 4/3 cannot be had."""
    augment = Augment(Preset(crop_scale=(1.0, 1.0)), **HALF, image_size=16)
    boxes = augment.draw(torch.empty(5, 3, height, width, dtype=torch.uint8)).boxes
    theirs = v2.RandomResizedCrop(16, scale=(1.0, 1.0)).make_params([torch.empty(3, height, width)])
    assert boxes.tolist() == [[float(theirs[k]) for k in ("top", "left", "height", "width")]] * 5


def test_shares_of_the_random_choices() -> None:
    augment, n = Augment("standard", **HALF, image_size=64), 20_000
    p = augment.draw(torch.empty(n, 3, 4, 4, dtype=torch.uint8), torch.Generator().manual_seed(0))
    assert p.mirror.float().mean() == pytest.approx(0.5, abs=0.02)
    assert p.grey.float().mean() == pytest.approx(0.2, abs=0.02)
    assert (p.hue != 0).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (p.factors != 1).any(1).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (p.sigma > 0.05).float().mean() == pytest.approx(0.5, abs=0.02)
    assert p.hue.abs().max() <= 0.1
    assert 0.6 <= p.factors.min() < 0.61
    assert 1.39 < p.factors.max() <= 1.4
    _, counts = p.slots.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 0.8 * n / 24
    drawn = torch.stack([p.mirror.float(), p.grey.float(), *p.factors[:, 1:].t(), p.hue])
    off_diagonal = torch.corrcoef(drawn) - torch.eye(6)
    assert off_diagonal.abs().max() < 0.04  # independent


def test_two_views_differ_and_other_sizes_are_resized() -> None:
    x = raw_images(8, side=24)
    for preset in ("standard", "paper"):
        one, two = Augment(preset, **HALF, image_size=32).views(x)
        assert one.shape == two.shape == (8, 3, 32, 32)
        assert not torch.equal(one, two)
    plain = Augment("none", **HALF, image_size=32)(x)
    resized = F.resize(x / 255, [32, 32], antialias=True)
    torch.testing.assert_close(plain, F.normalize(resized, HALF["mean"], HALF["std"]), atol=1e-5, rtol=0)


def test_autocast_does_not_touch_the_pixels() -> None:
    augment, x = Augment("standard", **HALF, image_size=32), raw_images(8)
    plain = augment(x, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(x, torch.Generator().manual_seed(0)), plain)


def test_paper_and_digits_presets_leave_out_what_they_should() -> None:
    x = raw_images(4)
    paper = Augment("paper", **HALF, image_size=32).draw(x)
    assert paper.boxes is None
    assert paper.sigma is None
    digits = Augment("digits", **HALF, image_size=8).draw(x)
    assert digits.mirror is None
    assert digits.hue is None
    assert digits.grey is None
    assert Augment("standard", **HALF, image_size=32).draw(x).sigma is None


def test_moving_the_module_moves_its_constants() -> None:
    augment = Augment("standard", **HALF, image_size=32).to("meta")
    assert {b.device.type for b in augment.buffers()} == {"meta"}


def test_nothing_is_read_back_to_the_host() -> None:
    """Tensors without data: anything that looks at a value fails, and a stray CPU tensor would not mix with them."""
    for preset in PRESETS:
        for side in (32, 48):
            augment = Augment(preset, **HALF, image_size=side).to("meta")
            x = torch.empty(6, 3, 32, 32, dtype=torch.uint8, device="meta")
            assert augment(x).shape == (6, 3, side, side)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"preset": "standrad"}, "did you mean 'standard'"),
        ({"image_size": 0}, "image_size must be at least 1 pixel, got 0"),
        ({"std": (0.1, 0.0, 0.1)}, "std > 0"),
    ],
)
def test_wrong_settings(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Augment(**{"preset": "paper", "image_size": 8, **HALF, **wrong})


def test_wrong_presets_and_images() -> None:
    with pytest.raises(UserError, match=r"hue must be in 0\.\.0\.5 .* got 0\.7"):
        Preset(hue=0.7)
    with pytest.raises(UserError, match="flip is a probability"):
        Preset(flip=-0.1)
    with pytest.raises(UserError, match="crop_scale"):
        Preset(crop_scale=(0.5, 0.2))
    with pytest.raises(UserError, match="must be uint8"):
        Augment("paper", **HALF, image_size=8)(torch.rand(2, 3, 8, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preset", ["paper", "standard", "digits"])
def test_capture_and_agreement_on_the_gpu(preset: str) -> None:
    """The views come out of a CUDA graph, new ones at each replay, and equal the CPU's for the same parameters."""
    for side in (32, 64):
        augment, x = Augment(preset, **HALF, image_size=side).cuda(), raw_images(64, side).cuda()
        generator, graph = torch.Generator("cuda").manual_seed(0), torch.cuda.CUDAGraph()
        augment(x, generator)
        torch.cuda.synchronize()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            out = augment(x, generator)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert not torch.equal(first, out)
        parameters = augment.draw(x, generator)
        ours = augment.apply_parameters(x, parameters).cpu()
        on_cpu = Parameters(*(None if p is None else p.cpu() for p in parameters))
        far = (augment.cpu().apply_parameters(x.cpu(), on_cpu) - ours).abs() > 1e-3
        assert far.float().mean() < 1e-4
