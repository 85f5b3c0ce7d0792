"""What the memory and the replacement refuse, said so that the caller can mend it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from numbers import Integral

import torch
from torch import Tensor

from duel.errors import UserError

PayloadSpec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def is_whole(value: object) -> bool:
    """Python's whole numbers and NumPy's; not True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a floating-point type has less than single precision, by which unit rows are a per mille off."""
    return dtype.itemsize < 4


class RowsRefused(UserError):
    """Rows that are not finite or not of unit length."""


def unit_tolerance(dtype: torch.dtype) -> float:
    """How far from 1 the length of a normalised row may be: a few roundings of the dtype it is held in."""
    return max(1e-4, 4 * torch.finfo(dtype).eps)


def check_tensor(given: object, name: str, wanted: str) -> None:
    """That it is a tensor at all, and not the list or array that the user has."""
    if not isinstance(given, Tensor):
        raise UserError(f"{name} must be a tensor, {wanted}, got a {type(given).__name__}")


def check_rows(rows: Tensor, name: str, dim: int, device: torch.device) -> None:
    """Shape, device and dtype always; finite and unit length where looking at the values costs no synchronisation."""
    if not isinstance(rows, Tensor):
        raise UserError(f"{name} must be a tensor of shape (n, {dim}), got a {type(rows).__name__}")
    if rows.dim() != 2 or rows.shape[1] != dim:
        raise UserError(f"{name} must have shape (n, {dim}), got {tuple(rows.shape)}")
    if rows.device != device:
        raise UserError(f"{name} is on {rows.device}, the memory on {device}; move one of them with .to()")
    if not rows.is_floating_point():
        raise UserError(f"{name} must be floating point, got {rows.dtype}")
    if rows.device.type == "cpu" and rows.shape[0]:
        tolerance = unit_tolerance(rows.dtype)
        # the least and the greatest tell that all is well, NaN being both; it takes half the calls
        if all(abs(float(length) - 1.0) <= tolerance for length in _lengths(rows).aminmax()):
            return
        good = acceptable_rows(rows)
        if not bool(good.all()):
            at = int(good.logical_not().nonzero()[0])
            length = float(rows[at].double().norm())
            said = f"has length {length:g}" if length == length and length != float("inf") else "is not finite"
            what_to_do = "use torch.nn.functional.normalize"
            if not length or "finite" in said:
                what_to_do = "it has no direction and cannot be compared: look at the encoder"
            raise RowsRefused(f"{name} must hold finite rows of unit length: row {at} {said}; {what_to_do}")


def acceptable_rows(rows: Tensor) -> Tensor:
    """bool (n,): finite and of unit length. NaN compares false."""
    return (_lengths(rows) - 1.0).abs() <= unit_tolerance(rows.dtype)


def _lengths(rows: Tensor) -> Tensor:
    """(n,), in float32 at least."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    length: Tensor = torch.linalg.vector_norm(wide, dim=1)
    return length


def check_spec(given: object) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What each slot is to keep, as a dictionary."""
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"payload must be a dictionary, {{name: (shape, dtype)}}, got {given!r}")
    for name, spec in (given or {}).items():
        fits = isinstance(spec, tuple | list) and len(spec) == 2 and isinstance(spec[1], torch.dtype)
        if not fits or not isinstance(spec[0], tuple | list) or not all(is_whole(n) and n >= 0 for n in spec[0]):
            raise UserError(f"payload {name!r} must be (shape, dtype), for instance ((3,), torch.uint8), got {spec!r}")
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in (given or {}).items()}


def check_payload(
    given: Mapping[str, Tensor],
    wanted: PayloadSpec,
    count: int,
    device: torch.device,
    *,
    anywhere: Container[str] = (),
) -> None:
    """Names, shapes, dtypes and device of what is to be kept with `count` embeddings; `anywhere`: on the host too."""
    if given.keys() != wanted.keys():
        names = ", ".join(sorted(wanted)) or "nothing"
        raise UserError(
            f"this memory keeps {names} with each embedding, got {', '.join(sorted(given)) or 'nothing'}; what is kept "
            "is declared once, as in WorkingMemory(..., payload={'id': ((), torch.int64)}), and given in every update"
        )
    for name, (shape, dtype) in wanted.items():
        values = given[name]
        if not isinstance(values, Tensor):
            raise UserError(f"{name} must be a tensor, {dtype} {(count, *shape)}, got a {type(values).__name__}")
        if values.shape != (count, *shape) or values.dtype != dtype:
            raise UserError(f"{name} must be {dtype} {(count, *shape)}, got {values.dtype} {tuple(values.shape)}")
        if values.device != device and not (name in anywhere and values.device.type == "cpu"):
            raise UserError(f"{name} is on {values.device}, the memory on {device}")
