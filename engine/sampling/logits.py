"""What is asked of whole rows of logits: in the host's memory by numpy, elsewhere by torch.

Answers are numpy's. A row's bits are those that it has alone. On the host no work is shared among
threads: waking them takes as long as the work, and where cores are busy they come late.
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

    def some(self, rows: Sequence[int]) -> Rows: ...

    def likeliest(self) -> Tokens:
        """`[count]`: the first of a row's largest."""
        ...

    def group_maxima(self, groups: int) -> Logits:
        """The largest of each group, `[count, groups]`. Token t is in group t mod `groups`."""
        ...

    def largest(self, rows: Sequence[int], width: int) -> Logits:
        """The largest of some rows, downwards: `[len(rows), width]`."""
        ...

    def at(self, rows: Tokens, tokens: Tokens) -> Logits:
        """Some logits; the shapes are broadcast."""
        ...

    def total(self, row: int, temperature: float, least: float) -> float:
        """The sum of exp((logit − largest) / temperature) over logits from `least` on."""
        ...


def rows_of(logits: Tensor) -> Rows:
    """`logits` is `[count, vocab]` float32, on any device."""
    return HostRows(logits.numpy()) if logits.device.type == "cpu" else DeviceRows(logits)


class HostRows:
    """Row by row: to touch fresh memory for all of them costs more than the work."""

    def __init__(self, rows: Logits) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        count, vocab = self._rows.shape
        return count, vocab

    def some(self, rows: Sequence[int]) -> HostRows:
        return HostRows(self._rows[list(rows)])

    def likeliest(self) -> Tokens:
        tokens: Tokens = self._rows.argmax(-1)
        return tokens

    def group_maxima(self, groups: int) -> Logits:
        count, vocab = self._rows.shape
        full = vocab // groups * groups
        maxima = np.empty((count, groups), dtype=np.float32)
        for row, most in zip(self._rows, maxima, strict=True):
            row[:full].reshape(-1, groups).max(0, initial=-np.inf, out=most)
            np.maximum(most[: vocab - full], row[full:], out=most[: vocab - full])
        return maxima

    def largest(self, rows: Sequence[int], width: int) -> Logits:
        # Numpy's sorting is vectorised, and many times as fast as torch's.
        values = np.empty((len(rows), width), dtype=np.float32)
        for row, some in zip(rows, values, strict=True):
            some[:] = np.partition(self._rows[row], -width)[-width:]
        values.sort(axis=-1)
        return values[:, ::-1]

    def at(self, rows: Tokens, tokens: Tokens) -> Logits:
        return self._rows[rows, tokens]

    def total(self, row: int, temperature: float, least: float) -> float:
        logits = self._rows[row]
        with np.errstate(invalid="ignore"):  # of a row in which nothing is left
            scaled = logits - logits.max()
        scaled /= temperature
        np.exp(scaled, out=scaled)
        if least > -np.inf:
            scaled[logits < least] = 0.0
        return float(scaled.sum())


class DeviceRows:
    """All rows at once, where they are; each answer is one copy to the host."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        count, vocab = self._rows.shape
        return count, vocab

    def some(self, rows: Sequence[int]) -> DeviceRows:
        return DeviceRows(self._rows[list(rows)])

    def likeliest(self) -> Tokens:
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
        where = torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
        return self._numpy(self._rows[where])

    def total(self, row: int, temperature: float, least: float) -> float:
        logits = self._rows[row]
        scaled = (logits / temperature).masked_fill_(logits < least, -torch.inf)
        return 1.0 / float(scaled.softmax(-1).amax())

    def _numpy(self, values: Tensor) -> Logits:
        array: Logits = values.cpu().numpy()
        return array
