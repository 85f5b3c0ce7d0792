"""The trained backbone as a file that others can load, checked against the original before it is kept.

safetensors: loads with `timm.create_model(name, checkpoint_path=...)`. ONNX: loads wherever ONNX runs.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .encoders import OURS, Encoder
from .errors import UserError, writing

Format = Literal["safetensors", "onnx"]

# Another runtime orders its sums differently; relative to the largest feature.
_TOLERANCE: dict[str, float] = {"safetensors": 1e-6, "onnx": 1e-3}


class Exported(NamedTuple):
    """What was written, and how to load it."""

    path: Path
    difference: float  # largest deviation from the original's features, relative to the largest feature
    load: str  # Python that loads it
    metadata: Mapping[str, str]  # the text kept in the file


def export(
    encoder: Encoder,
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Exported:
    """Writes the backbone (without the projection) to `path`, replacing what was there only after the check.

    Args:
        encoder: on any device, in any mode; left as it is.
        path: ends in .safetensors or .onnx, unless `format` says which.
        metadata: text kept in the file, such as the normalisation (mean, std) that the images need.

    Returns:
        An `Exported`; raises `UserError` if the file does not give the original's features.
    """
    path = Path(path)
    kind = format or path.suffix.removeprefix(".")
    if kind not in _TOLERANCE:
        raise UserError(f"cannot tell the format of {str(path)!r}; end it in .safetensors or .onnx, or give format")
    if path.suffix.removeprefix(".") in _TOLERANCE.keys() - {kind}:
        raise UserError(
            f"format {kind!r} was asked for, but {str(path)!r} ends in {path.suffix}; leave one of them out"
        )
    if os.path.isdir(path):
        raise UserError(f"cannot write {path}: it is a directory; give a file with --out")
    backbone = copy.deepcopy(encoder.backbone).cpu().float().eval()
    # Two images: a batch of one would be baked into an ONNX file. The check uses three, to see that none was.
    images = torch.randn(2, *encoder.image_shape, generator=torch.Generator().manual_seed(0))
    texts = {
        "name": encoder.timm_name,
        "arguments": json.dumps(encoder.timm_arguments),
        "image_shape": " ".join(map(str, encoder.image_shape)),
        **(metadata or {}),
    }
    partial = path.with_name(f".{path.stem}.partial.{kind}")
    write: Callable[..., Callable[[Tensor], Tensor]] = _write_safetensors if kind == "safetensors" else _write_onnx
    with writing(path, "make room or give another file with --out"):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            reloaded = write(backbone, encoder, images, texts, partial)
            difference = _difference(backbone, reloaded, torch.cat([images, images.flip(3)[:1]]))
            if not difference <= _TOLERANCE[kind]:
                raise UserError(
                    f"the exported {kind} file does not give the original's features: relative difference "
                    f"{difference:.1e}, accepted {_TOLERANCE[kind]:.0e}. {path} was not written."
                )
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return Exported(path, difference, _load_line(encoder, path, kind), texts)


def _write_safetensors(
    backbone: nn.Module, encoder: Encoder, images: Tensor, texts: dict[str, str], path: Path
) -> Callable[[Tensor], Tensor]:
    import timm
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in backbone.state_dict().items()}
    path.write_bytes(save(tensors, metadata={"format": "pt", **texts}))  # save_file's can be read by its owner only
    model: nn.Module = timm.create_model(encoder.timm_name, checkpoint_path=str(path), **encoder.timm_arguments)
    return model.eval()


def _write_onnx(
    backbone: nn.Module, encoder: Encoder, images: Tensor, texts: dict[str, str], path: Path
) -> Callable[[Tensor], Tensor]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError as error:
        raise UserError(f"ONNX export needs {error.name}; install it with: pip install 'duel-ssl[onnx]'") from error
    torch.onnx.export(
        backbone,
        (images,),
        str(path),
        input_names=["images"],
        output_names=["features"],
        dynamo=True,
        external_data=False,  # one file
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    model = onnx.load(path)
    onnx.helper.set_model_props(model, texts)
    onnx.save(model, path)
    session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])


@torch.no_grad()
def _difference(original: Callable[[Tensor], Tensor], copy: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Largest absolute difference of the features of `images`, divided by the largest feature."""
    wanted, got = original(images), copy(images)
    return float((wanted - got).abs().max() / wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny))


def _load_line(encoder: Encoder, path: Path, kind: str) -> str:
    if kind == "onnx":
        return f"onnxruntime.InferenceSession({str(path)!r})"
    ours = encoder.timm_name in OURS
    defaults = {"in_chans": 3, **({"num_classes": 0} if ours else {})}
    given = {k: v for k, v in encoder.timm_arguments.items() if k not in defaults or defaults[k] != v}
    arguments = "".join(f", {k}={v!r}" for k, v in given.items())
    first = "import duel.encoders, timm; " if ours else "import timm; "
    return f"{first}timm.create_model({encoder.timm_name!r}, checkpoint_path={str(path)!r}{arguments}).eval()"
