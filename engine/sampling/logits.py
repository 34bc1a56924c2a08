"""Operations on whole rows of logits: by numpy in host memory, by torch on other devices.

Results are numpy arrays. A row's results have the same bits in any batch. On the host everything
runs on one thread: waking other threads takes as long as the work, and on busy cores they start
late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["DeviceRows", "HostRows", "Rows", "rows_of"]

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Rows(Protocol):
    """Logits, `[count, vocab]` float32."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def select(self, rows: Sequence[int]) -> Rows:
        """Return a copy of some rows, in the given order."""
        ...

    def argmax(self) -> Tokens:
        """Return the token with the largest logit of each row, `[count]`; the first of equals."""
        ...

    def group_maxima(self, groups: int) -> Logits:
        """Return the largest logit of each group, `[count, groups]`.

        Token t is in group t mod `groups`.
        """
        ...

    def largest(self, rows: Sequence[int], width: int) -> Logits:
        """Return the top `width` logits of `rows`, descending, `[len(rows), width]`."""
        ...

    def at(self, rows: Tokens, tokens: Tokens) -> Logits:
        """Return the logits of `tokens` in `rows`, index arrays that broadcast."""
        ...

    def exp_sum(self, row: int, temperature: float, least: float) -> float:
        """Return the sum of exp((logit − largest) / temperature) over logits ≥ `least`."""
        ...


def rows_of(logits: Tensor) -> Rows:
    """Wrap `logits`, `[count, vocab]` float32 on any device."""
    return HostRows(logits.numpy()) if logits.device.type == "cpu" else DeviceRows(logits)


class HostRows:
    """Rows in host memory, processed one by one: large temporaries cost more than the work."""

    def __init__(self, rows: Logits) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        count, vocab = self._rows.shape
        return count, vocab

    def select(self, rows: Sequence[int]) -> HostRows:
        return HostRows(self._rows[list(rows)])

    def argmax(self) -> Tokens:
        tokens: Tokens = self._rows.argmax(-1)
        return tokens

    def group_maxima(self, groups: int) -> Logits:
        count, vocab = self._rows.shape
        full = vocab // groups * groups
        maxima = np.empty((count, groups), dtype=np.float32)
        for row, out in zip(self._rows, maxima, strict=True):
            row[:full].reshape(-1, groups).max(0, initial=-np.inf, out=out)
            np.maximum(out[: vocab - full], row[full:], out=out[: vocab - full])
        return maxima

    def largest(self, rows: Sequence[int], width: int) -> Logits:
        # Numpy's sorting is vectorized and many times as fast as torch's.
        values = np.empty((len(rows), width), dtype=np.float32)
        for row, out in zip(rows, values, strict=True):
            out[:] = np.partition(self._rows[row], -width)[-width:]
        values.sort(axis=-1)
        return values[:, ::-1]

    def at(self, rows: Tokens, tokens: Tokens) -> Logits:
        return self._rows[rows, tokens]

    def exp_sum(self, row: int, temperature: float, least: float) -> float:
        logits = self._rows[row]
        with np.errstate(invalid="ignore"):  # -inf - -inf, in a row without allowed tokens
            scaled = logits - logits.max()
        scaled /= temperature
        np.exp(scaled, out=scaled)
        if least > -np.inf:
            scaled[logits < least] = 0.0
        return float(scaled.sum())


class DeviceRows:
    """Rows on a device, processed together there; each result takes one copy to the host."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        count, vocab = self._rows.shape
        return count, vocab

    def select(self, rows: Sequence[int]) -> DeviceRows:
        return DeviceRows(self._rows[list(rows)])

    def argmax(self) -> Tokens:
        tokens: Tokens = self._rows.argmax(-1).cpu().numpy()
        return tokens

    def group_maxima(self, groups: int) -> Logits:
        count, vocab = self._rows.shape
        full = vocab // groups * groups
        maxima = self._rows.new_full((count, groups), -torch.inf)
        if full:
            maxima = self._rows[:, :full].view(count, -1, groups).amax(1)
        rest = maxima[:, : vocab - full]
        rest.copy_(rest.maximum(self._rows[:, full:]))
        return self._numpy(maxima)

    def largest(self, rows: Sequence[int], width: int) -> Logits:
        return self._numpy(self._rows[list(rows)].topk(width).values)

    def at(self, rows: Tokens, tokens: Tokens) -> Logits:
        device = self._rows.device
        indices = torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
        return self._numpy(self._rows[indices])

    def exp_sum(self, row: int, temperature: float, least: float) -> float:
        logits = self._rows[row]
        scaled = (logits / temperature).masked_fill_(logits < least, -torch.inf)
        return 1.0 / float(scaled.softmax(-1).amax())

    def _numpy(self, values: Tensor) -> Logits:
        array: Logits = values.cpu().numpy()
        return array
