from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn

from duel import folded
from duel.batchnorm import prepare_views
from duel.encoders import backbone, encoder, mlp, resolve
from duel.errors import UserError
from duel.evaluation.features import reestimate_batchnorm
from duel.stem import StemConv2d


@pytest.mark.parametrize(
    ("name", "size", "features"),
    [("convnet", 8, 128), ("resnet18", 32, 512), ("vit_tiny_patch16_224", 32, 192), ("convnext_atto", 32, 320)],
)
def test_encoders_run_and_learn(name: str, size: int, features: int) -> None:
    net = encoder(name, image_size=size, dim=16)
    images = torch.randn(2, 3, size, size)
    assert net.features(images).shape == (2, features) == (2, net.feature_dim)
    projected = net(images)
    assert projected.shape == (2, 16) == (2, net.dim)
    projected.square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_projection_of_the_paper_is_one_linear_layer_to_256() -> None:
    net = encoder("convnet", image_size=8)
    assert [type(layer) for layer in net.projection.children()] == [nn.Linear]
    assert net.dim == 256


@pytest.mark.parametrize(
    ("norm", "kinds"),
    [
        ("none", [nn.Linear, nn.ReLU, nn.Linear]),
        ("hidden", [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]),
        ("all", [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]),
    ],
)
def test_where_batchnorm_goes(norm: Any, kinds: list[type]) -> None:
    head = mlp(6, 5, 4, norm=norm)
    assert [type(layer) for layer in head] == kinds
    for layer, after in zip(head, [*[*head][1:], None], strict=True):
        if isinstance(layer, nn.Linear):
            assert (layer.bias is None) == isinstance(after, nn.BatchNorm1d)
    assert head(torch.randn(3, 6)).shape == (3, 4)
    assert sum(isinstance(layer, nn.Linear) for layer in mlp(6, 5, 4, layers=3)) == 3


def test_small_stem_keeps_the_resolution_of_the_first_stage() -> None:
    small: Any = backbone("resnet18", image_size=32).eval()
    full: Any = backbone("resnet18", image_size=32, stem="full").eval()
    assert small.conv1.kernel_size == (3, 3)
    assert small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)
    images = torch.randn(1, 3, 32, 32)
    assert small.forward_features(images).shape[2:] == (4, 4)
    assert full.forward_features(images).shape[2:] == (1, 1)
    assert [info["reduction"] for info in small.feature_info] == [1, 1, 2, 4, 8]


@pytest.mark.parametrize(
    ("name", "stem", "size", "wanted", "extra"),
    [
        ("resnet18", "auto", 64, "resnet18_small", {}),
        ("resnet18", "auto", 65, "resnet18", {}),
        ("resnet50", "small", 224, "resnet50_small", {}),
        ("resnet18", "full", 32, "resnet18", {}),
        ("resnet18_small", "small", 32, "resnet18_small", {}),
        ("convnext_atto", "auto", 32, "convnext_atto", {}),
        ("vit_tiny_patch16_224", "auto", 32, "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 4}),
        ("vit_tiny_patch16_224", "auto", 28, "vit_tiny_patch16_224", {"img_size": 28, "patch_size": 4}),
        ("vit_tiny_patch16_224", "auto", 44, "vit_tiny_patch16_224", {"img_size": 44, "patch_size": 4}),
        ("vit_tiny_patch16_224", "auto", 8, "vit_tiny_patch16_224", {"img_size": 8, "patch_size": 1}),
        ("vit_tiny_patch16_224", "full", 32, "vit_tiny_patch16_224", {"img_size": 32}),
        ("vit_tiny_patch16_224", "auto", 224, "vit_tiny_patch16_224", {"img_size": 224}),
        ("convnet", "auto", 8, "duel_convnet", {}),
    ],
)
def test_resolve(name: str, stem: Any, size: int, wanted: str, extra: dict[str, int]) -> None:
    assert resolve(name, stem=stem, image_size=size) == (wanted, {"num_classes": 0, "in_chans": 3, **extra})


@pytest.mark.parametrize("side", [12, 28, 44, 60])
def test_a_vit_sees_the_whole_of_a_small_image(side: int) -> None:
    image = torch.rand(1, 3, side, side, requires_grad=True)
    backbone("vit_tiny_patch16_224", image_size=side).eval()(image)[0, 0].backward()
    assert (image.grad != 0).any(1).all()


@pytest.mark.parametrize("side", range(4, 128))
def test_a_small_vit_has_about_8_x_8_patches_whatever_the_side(side: int) -> None:
    patch = resolve("vit_tiny_patch16_224", stem="small", image_size=side)[1]["patch_size"]
    assert min(side, 6) <= side // patch <= 16
    assert side % patch <= 0.06 * side
    assert side % patch == 0 or not any(side % size == 0 and 6 <= side // size <= 16 for size in range(1, side))


def test_a_vit_takes_images_that_its_patches_do_not_divide() -> None:
    network = backbone("vit_tiny_patch16_224", image_size=59).eval()
    assert network(torch.rand(2, 3, 59, 59)).shape == (2, 192)
    assert network.patch_embed.num_patches == 64


def test_a_network_of_timm_that_is_called_small_is_none_of_ours() -> None:
    with pytest.raises(UserError, match="stem='small' is not known for backbone 'mnasnet_small'"):
        resolve("mnasnet_small", stem="small", image_size=32)


def test_pretrained_weights_keep_the_full_stem() -> None:
    assert resolve("resnet18", image_size=32, pretrained=True)[0] == "resnet18"
    with pytest.raises(UserError, match="no pretrained weights"):
        backbone("resnet18", stem="small", image_size=32, pretrained=True)


def test_variants_are_registered_with_timm() -> None:
    for name in ("resnet18_small", "resnet34_small", "resnet50_small", "duel_convnet"):
        assert timm.is_model(name)
    assert timm.create_model("resnet18_small", num_classes=10)(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    assert timm.create_model("duel_convnet", num_classes=10, in_chans=1)(torch.randn(1, 1, 8, 8)).shape == (1, 10)


def test_the_demo_network_is_small() -> None:
    assert sum(p.numel() for p in backbone("convnet", image_size=8).parameters()) < 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet81"}, r"unknown backbone 'resnet81'; did you mean .*resnet18"),
        ({"name": "convnt"}, r"did you mean .*convnet"),
        ({"name": "qqqqqqqq"}, r"timm.list_models"),
        ({"name": "convnext_atto", "stem": "small"}, r"stem='small' is not known for backbone 'convnext_atto'.*full"),
        ({"stem": "tiny"}, r"stem must be 'auto', 'small' or 'full', got 'tiny'"),
        ({"projection": "cubic"}, r"projection must be 'linear' or 'mlp', got 'cubic'"),
        ({"projection": "mlp", "norm": "layer"}, r"norm must be"),
        ({"projection": "mlp", "layers": 0}, r"layers must be >= 1, got 0"),
        ({"projection": "mlp", "hidden": 0}, r"hidden must be >= 1, got 0"),
        ({"dim": 0}, r"dim must be >= 1, got 0"),
        ({"image_size": 0}, r"image_size must be >= 1 pixel, got 0"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoder(**{"name": "convnet", "image_size": 8, **arguments})


@pytest.mark.parametrize(("pretrained", "advice"), [(True, "Check the network"), (False, "Try another image_size")])
def test_what_timm_refuses_is_reported_with_advice(
    pretrained: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> nn.Module:
        raise OSError("not today")

    monkeypatch.setattr(timm, "create_model", refuse)
    with pytest.raises(UserError, match=rf"timm cannot build backbone 'resnet18'.*not today.*{advice}"):
        encoder("resnet18", stem="full", pretrained=pretrained)


def test_a_stem_as_a_product_is_the_convolution() -> None:
    stem = StemConv2d(3, 4, 3, padding=1, bias=False).double()
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    product = torch.compile(stem.as_product, backend="aot_eager")
    for layout in (torch.contiguous_format, torch.channels_last):
        given = images.contiguous(memory_format=layout)
        (wanted,) = torch.autograd.grad(stem(given).square().sum(), stem.weight)
        (found,) = torch.autograd.grad(product(given).square().sum(), stem.weight)
        assert torch.allclose(product(given), stem(given), atol=1e-12)
        assert torch.allclose(found, wanted, atol=1e-12)
    assert product(images).is_contiguous(memory_format=torch.channels_last)


def _lived_in(name: str) -> nn.Module:
    """A backbone whose BatchNorms are no longer as they begin."""
    network = backbone(name, image_size=16).eval()
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            for values in (part.running_mean, part.weight.data, part.bias.data):
                values.normal_()
            part.running_var.uniform_(0.5, 2)
    return network


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("resnet50", 16)])
def test_folded_blocks_encode_as_plain_ones_do(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "_takes", lambda x: True)
    network = _lived_in(name).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        wanted = network(images)
        assert folded.fold(network) == blocks
        assert torch.allclose(network(images), wanted, rtol=1e-9)
        for parameter in network.parameters():
            parameter.mul_(1.1)
        changed = network(images)
        monkeypatch.setattr(folded, "_takes", lambda x: False)
        assert torch.allclose(changed, network(images), rtol=1e-9)
    assert not torch.allclose(changed, wanted, rtol=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_folded_blocks_compile_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "_takes", lambda x: True)
    network, images = _lived_in(name).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert prepare_views(network)
    with torch.no_grad():
        wanted = network(images)
        folded.fold(network)
        compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(images), wanted, rtol=1e-9)


def test_statistics_of_folded_blocks_are_estimated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "_takes", lambda x: True)
    plain = _lived_in("resnet18")
    network = copy.deepcopy(plain)
    folded.fold(network)
    batches = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    for each in (plain, network):
        reestimate_batchnorm(each, batches)
    for (name, wanted), found in zip(plain.named_buffers(), network.buffers(), strict=True):
        assert torch.equal(found, wanted), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_cudnn_s_fused_convolutions_encode_as_plain_ones_do(name: str) -> None:
    network = _lived_in(name).cuda().to(memory_format=torch.channels_last)
    images = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = network(images)
        with torch.autocast("cuda", torch.bfloat16):
            rounded = network(images)
            assert folded.fold(network)
            found = network(images)
    error = (rounded - wanted).norm()
    assert (found - wanted).norm() < 2 * error
    assert not torch.equal(found, rounded)


def test_a_block_that_is_trained_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    network, calls = backbone("resnet18", image_size=16), []
    folded.fold(network)
    monkeypatch.setattr(folded, "_takes", calls.append)
    images = torch.randn(2, 3, 16, 16)
    network(images).sum().backward()
    with torch.no_grad():
        network(images)
    network.eval()(images).sum().backward()
    assert not calls
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("name", ["resnext50_32x4d", "seresnet18", "resnet50d", "convnet"])
def test_blocks_with_more_in_them_stay_as_they_are(name: str) -> None:
    network = backbone(name, image_size=32)
    kinds = [type(part) for part in network.modules()]
    folded.fold(network)
    changed = [kind.__name__ for kind, part in zip(kinds, network.modules(), strict=True) if kind is not type(part)]
    assert changed == (["Bottleneck"] * 12 if name == "resnet50d" else [])  # of its stages all but the first block
