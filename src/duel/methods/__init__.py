"""Self-supervised methods. A D-method is the same class given another memory or policy, not a copy."""

from __future__ import annotations

import inspect
from typing import Any

from ..encoders import Encoder
from ..errors import UserError, suggest
from .base import Method, StepOutput
from .byol import BYOL
from .moco import MoCo
from .simclr import SimCLR
from .simsiam import SimSiam

__all__ = ["BYOL", "METHODS", "Method", "MoCo", "SimCLR", "SimSiam", "StepOutput", "build", "settings_of"]

METHODS: dict[str, type[Method]] = {"simclr": SimCLR, "moco": MoCo, "simsiam": SimSiam, "byol": BYOL}


def settings_of(name: str) -> dict[str, Any]:
    """The settings that the method `name` takes, with their defaults."""
    if name not in METHODS:
        raise UserError(suggest("method", name, METHODS))
    parameters = inspect.signature(METHODS[name].__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def build(name: str, encoder: Encoder, **settings: Any) -> Method:
    """The method `name` around `encoder`; `settings_of(name)` lists what may be set."""
    known = settings_of(name)
    for setting in settings:
        if setting not in known:
            raise UserError(suggest(f"setting of {name}", setting, known))
    return METHODS[name](encoder, **settings)
