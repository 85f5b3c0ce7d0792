from __future__ import annotations

import builtins
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open

from duel.encoders import Encoder, encoder
from duel.errors import UserError
from duel.export import export
from duel.methods import MoCo


def trained(name: str = "convnet", size: int = 8) -> Encoder:
    """With running statistics that are not the initial ones, as after training."""
    net = encoder(name, image_size=size, dim=4)
    with torch.no_grad():
        net(torch.randn(8, *net.image_shape) * 2 + 1)
    return net


@pytest.mark.parametrize("name", ["mnasnet_small", "resnet18"])
def test_the_line_that_is_printed_loads_the_file(name: str, tmp_path: Path) -> None:
    done = export(trained(name, 32), tmp_path / "b.safetensors")
    *imports, line = done.load.split("; ")
    assert imports == ["import duel.encoders, timm" if name == "resnet18" else "import timm"]
    assert eval(line, {"timm": timm})(torch.randn(2, 3, 32, 32)).shape[1] > 100


def test_a_small_stem_loads_by_name_alone(tmp_path: Path) -> None:
    net = trained("resnet18", 16).to(memory_format=torch.channels_last)
    done = export(net, tmp_path / "b.safetensors", metadata={"mean": "0.5"})
    assert done.difference < 1e-5  # the other memory layout may round differently
    *imports, line = done.load.split("; ")
    assert imports == ["import duel.encoders, timm"]
    loaded = eval(line, {"timm": timm})
    assert not loaded.training
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(loaded(images), net.eval().features(images), atol=1e-5)
    with safe_open(done.path, "pt") as file:
        metadata = file.metadata()
    assert metadata["name"] == "resnet18_small"
    assert (metadata["mean"], metadata["image_shape"]) == ("0.5", "3 16 16")
    assert metadata == {"format": "pt", **done.metadata}
    assert json.loads(metadata["arguments"]) == {"num_classes": 0, "in_chans": 3}


def test_format_and_ending_must_agree_and_everybody_may_read_the_file(tmp_path: Path) -> None:
    net = trained("convnet", 8)
    with pytest.raises(UserError, match=r"'onnx' was asked for, but .*ends in \.safetensors"):
        export(net, tmp_path / "b.safetensors", format="onnx")
    done = export(net, tmp_path / "b.bin", format="safetensors")
    (tmp_path / "plain").touch()
    assert done.path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(("name", "size"), [("convnet", 8), ("resnet18", 65), ("vit_tiny_patch16_224", 32)])
def test_the_line_it_prints_loads_it(name: str, size: int, tmp_path: Path) -> None:
    net = trained(name, size)
    done = export(net, tmp_path / "sub" / "b.safetensors")
    statement, _, expression = done.load.rpartition("; ")
    scope: dict[str, Any] = {}
    exec(statement, scope)
    loaded = eval(expression, scope).eval()
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        assert torch.equal(loaded(images), net.eval().features(images))


def test_exporting_changes_nothing_and_knows_split_batchnorm(tmp_path: Path) -> None:
    method = MoCo(trained(), batchnorm_groups=2, in_batch_negatives=True)
    before = {k: v.clone() for k, v in method.encoder.state_dict().items()}
    export(method.encoder, tmp_path / "b.safetensors")
    assert method.encoder.training
    assert all(torch.equal(v, before[k]) for k, v in method.encoder.state_dict().items())


def test_onnx_gives_the_same_features_at_any_batch_size(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    net = trained()
    done = export(net, tmp_path / "b.onnx", metadata={"std": "0.2"})
    assert [p.name for p in tmp_path.iterdir()] == ["b.onnx"]
    session = onnxruntime.InferenceSession(str(done.path))
    assert session.get_modelmeta().custom_metadata_map["std"] == "0.2"
    images = torch.randn(5, 3, 8, 8)
    (got,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(got), net.eval().features(images), atol=1e-5)


@pytest.mark.parametrize("broken", [0.01, float("nan")])
def test_a_file_that_differs_is_refused_and_the_old_one_survives(
    broken: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.safetensors"
    path.write_text("the old one")
    real = timm.create_model

    def corrupted(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        with torch.no_grad():
            model.features[0].weight.add_(broken)
        return model

    net = trained()
    monkeypatch.setattr(timm, "create_model", corrupted)
    with pytest.raises(UserError, match="does not give the original's features"):
        export(net, path)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_where_it_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for inside in ("b.safetensors", "deeper/b.safetensors"):
        with pytest.raises(UserError, match=rf"cannot write .*{inside}: Not a directory; .* another file with --out"):
            export(trained(), tmp_path / "file" / inside)
    for folder in (tmp_path, "."):
        with pytest.raises(UserError, match="it is a directory; give a file"):
            export(trained(), folder, format="safetensors")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"cannot write .*b.safetensors: No space left on device; make room"):
        export(trained(), tmp_path / "b.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"end it in .safetensors or .onnx"):
        export(trained(), tmp_path / "b.bin")
    real = builtins.__import__

    def without_onnx(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "onnx":
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(UserError, match=r"needs onnx; install it with: pip install 'duel-ssl\[onnx\]'"):
        export(trained(), tmp_path / "b.onnx")
