"""The tensors of a memory: where they live, how rows are written and read, what a saved state must look like.

What comes in and who goes is `duel.memory`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from duel.checks import PayloadSpec, check_spec, check_tensor, is_whole
from duel.errors import UserError
from duel.slots import bits, first_newcomer, last_newcomer, put_newcomers, put_rows


class Evicted(NamedTuple):
    """What left the memory in one update. Row b belongs to newcomer b and means something where `valid[b]`."""

    valid: Tensor
    """bool (B,): newcomer b took the place of an item that was in memory before this update."""
    embeddings: Tensor
    """(B, d)"""
    payload: dict[str, Tensor]


class Storage(nn.Module):
    """K slots: an embedding each, a second vector if `policy_dim` is given, payload, and when it came and was encoded.

    All of it is in `state_dict`. Payload named in `host` stays in host memory wherever the rest is moved.
    """

    _embeddings: Tensor
    _compared: Tensor | None
    _admitted_at: Tensor
    _encoded_at: Tensor
    _clock: Tensor
    _rejected: Tensor
    _draws: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        payload: PayloadSpec | None,
        *,
        policy_dim: int | None,
        dtype: torch.dtype,
        host: str | Iterable[str],
    ) -> None:
        super().__init__()
        for name, value in (("size", size), ("dim", dim), ("policy_dim", policy_dim)):
            if value is not None and (not is_whole(value) or value < 1):
                raise UserError(f"{name} must be a whole number >= 1, got {value!r}")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise UserError(f"dtype must be a floating-point type of 16 bits or more, got {dtype}")
        self.size, self.dim = int(size), int(dim)  # NumPy's would be saved as what torch.load refuses
        self.policy_dim = None if policy_dim is None else int(policy_dim)
        self.payload, self.host = check_spec(payload), frozenset([host] if isinstance(host, str) else host)
        if not self.host <= self.payload.keys():
            raise UserError(f"host must name payload ({sorted(self.payload)}), got {sorted(self.host)}")
        self.register_buffer("_embeddings", torch.zeros(size, dim, dtype=dtype))
        self.register_buffer("_compared", None if policy_dim is None else torch.zeros(size, policy_dim, dtype=dtype))
        for name, (shape, kind) in self.payload.items():
            if not name.isidentifier() or name in ("self", "slots", "embeddings", "policy_embeddings", "evicted"):
                raise UserError(f"payload name {name!r} cannot be used; take another plain name")
            where = "cpu" if name in self.host else None  # not the default device, if that is another
            self.register_buffer(_buffer(name), torch.zeros(size, *shape, dtype=kind, device=where))
        for name in ("_admitted_at", "_encoded_at"):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64))
        for name in ("_clock", "_rejected", "_draws"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self._filled = 0  # on the host, so that no step asks the device whether the memory is full

    @property
    def device(self) -> torch.device:
        """Where the embeddings are."""
        return self._embeddings.device

    def __getitem__(self, name: str) -> Tensor:
        """The payload of the filled slots, where it is kept."""
        if name not in self.payload:
            raise UserError(f"this memory keeps no {name!r}; it keeps {', '.join(self.payload) or 'embeddings only'}")
        return self._stored(name)[: self._filled]

    def fetch(self, name: str, slots: Tensor) -> Tensor:
        """The payload of some slots (n,), on the memory's device wherever it is kept."""
        held = self[name]
        check_tensor(slots, "slots", "int64 (n,)")
        self._check_slots(slots)
        rows = slots.to(held.device)  # waits for the device where the payload is on the host
        if held.device == self.device:
            return held[rows]
        staged = torch.empty(len(rows), *held.shape[1:], dtype=held.dtype, pin_memory=self.device.type == "cuda")
        return torch.index_select(held, 0, rows, out=staged).to(self.device, non_blocking=True)

    def _check_slots(self, slots: Tensor) -> None:
        """That they are filled ones, where looking costs no synchronisation."""
        if slots.device.type != "cpu" or not slots.numel():
            return
        least, most = (int(end) for end in slots.aminmax())
        if least < 0 or most >= self._filled:
            last = self._filled - 1
            filled = f"between 0 and {last}, the filled ones" if self._filled else "none: the memory is empty"
            raise UserError(f"slots must be {filled}; got {least} to {most}")

    def _stored(self, name: str) -> Tensor:
        held: Tensor = getattr(self, _buffer(name))
        return held

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves all but what stays on the host, which is taken out meanwhile: it may be too large for the device.

        Payload keeps the dtype that it was declared with.
        """
        held = {_buffer(name): self._stored(name) for name in self.payload}
        kept = {_buffer(name): held.pop(_buffer(name)) for name in self.host}
        self._buffers.update(dict.fromkeys(kept))
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers.update(kept)
        undo_cast(self, held)
        return self

    # ---------------------------------------------------------------- writing

    def _write(self, slots: Tensor, embeddings: Tensor, compared: Tensor, payload: dict[str, Tensor]) -> None:
        """Newcomers into their slots; where a slot is named twice the later newcomer stays; -1 goes nowhere.

        Every row named for a slot writes the same final value, so the order of the writes does not matter.
        """
        rows = [(self._embeddings, embeddings)]
        if self._compared is not None:
            rows.append((self._compared, compared))
        rows += [(self._stored(name), values) for name, values in payload.items()]
        if slots.device.type == "cpu":  # there it may be read which slots change
            now = self._clock.expand(slots.shape)
            rows += [(self._admitted_at, now), (self._encoded_at, now)]
            put_newcomers(slots, [(target, values.to(target.dtype)) for target, values in rows])
            return
        at = slots.clamp(min=0)
        winner = last_newcomer(slots, self.size)[at]
        wins, winner = winner >= 0, winner.clamp(min=0)
        for target, values in rows:
            self._put(target, at, values.to(target.device)[winner.to(target.device)], wins)
        now = self._clock.expand(at.shape)
        self._put(self._admitted_at, at, now, wins)
        self._put(self._encoded_at, at, now, wins)

    @staticmethod
    def _put(target: Tensor, slots: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """target[slots] = values, only where mask is true; wherever the target is."""
        slots, values = slots.to(target.device), values.to(target.device, target.dtype)
        if target.device.type == "cpu":  # where it may be read which slots change
            which = np.arange(len(slots)) if mask is None else mask.numpy(force=True).nonzero()[0]
            put_rows(target, slots.numpy()[which], values, which)
            return
        target, values = bits(target), bits(values)
        if mask is not None:
            mask = mask.to(target.device).reshape(-1, *[1] * (values.dim() - 1))
            values = torch.where(mask, values, target[slots])
        target.index_copy_(0, slots, values)

    def _empty_evicted(self, count: int) -> Evicted:
        return Evicted(
            torch.zeros(count, dtype=torch.bool, device=self.device),
            torch.zeros(count, self.dim, dtype=self._embeddings.dtype, device=self.device),
            {name: self._stored(name).new_zeros(count, *shape) for name, (shape, _) in self.payload.items()},
        )

    def _note_evicted(self, gone: Evicted, residents: Tensor, slots: Tensor, filling: int, before: int) -> None:
        """Copy what the chosen slots hold now; only the first newcomer to take a slot displaces an earlier resident."""
        at, order = slots.clamp(min=0), torch.arange(slots.shape[0], device=slots.device)
        first = first_newcomer(slots, self.size)
        # items that filled their slot in this same update were not in memory before it
        gone.valid[filling:] = (slots >= 0) & (first[at] == order) & ((at < before) | (before == self.size))
        gone.embeddings[filling:] = residents[at]
        for name, values in gone.payload.items():
            values[filling:] = self._stored(name)[at.to(values.device)]

    # ---------------------------------------------------------------- state

    def _check_state(self, given: dict[str, Any]) -> None:
        mine: dict[str, Tensor | None] = {}
        for where, module in self.named_modules(prefix=""):
            dotted = f"{where}." if where else ""
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    mine[dotted + name] = buffer
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                mine[f"{dotted}_extra_state"] = None
        if mine.keys() != given.keys():
            odd = ", ".join(sorted(mine.keys() ^ given.keys()))
            raise UserError(f"state_dict is of another kind of memory; keys that only one of them has: {odd}")
        for name, buffer in mine.items():
            if buffer is not None and given[name].shape != buffer.shape:
                raise UserError(
                    f"state_dict is of another memory: {name.lstrip('_')} has shape {tuple(given[name].shape)}, "
                    f"this one {tuple(buffer.shape)}"
                )
        extra = given["_extra_state"]
        if not isinstance(extra, dict) or not 0 <= extra.get("filled", -1) <= self.size or "seed" not in extra:
            raise UserError(f"state_dict is damaged: it says {extra!r} of a memory of {self.size} slots")


def held(state: dict[str, Any], payload: str) -> Tensor | None:
    """(filled, …): a payload in a memory's state_dict, without building that memory; None where it has no such."""
    found: Tensor | None = state.get(_buffer(payload))
    return None if found is None else found[: state["_extra_state"]["filled"]]


def undo_cast(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Give buffers that a move has cast the dtype and the values that they had before, wherever they are now."""
    for name, buffer in before.items():
        moved = module._buffers[name]
        if moved is not None and moved.dtype != buffer.dtype:
            module._buffers[name] = buffer.to(moved.device)


def _buffer(payload: str) -> str:
    return f"_payload_{payload}"
