"""Steps of an engine as sums of its kernels, from LLMServingSim's times (see bench/profiles.py).

A folder has `dense.csv` (kernel, tokens), `per_sequence.csv` (kernel, sequences) and
`attention.csv` (length and context of one chunk of a prompt, number and context of decodes), with
times in microseconds.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.latency import Measured, StepWork

__all__ = ["KernelTimes"]

# The kernels of a layer beside attention. A layer has two norms.
LAYER = (
    "layernorm",
    "qkv_proj",
    "rotary_emb",
    "o_proj",
    "layernorm",
    "gate_up_proj",
    "act_fn",
    "down_proj",
)


class KernelTimes:
    """The times of a model's kernels on a device."""

    def __init__(self, folder: Path, layers: int) -> None:
        self._layers = layers
        self._times: dict[str, dict[int, float]] = defaultdict(dict)
        for name, count in (("dense", "tokens"), ("per_sequence", "sequences")):
            for row in _rows(folder / f"{name}.csv"):
                self._times[row["layer"]][int(row[count])] = float(row["time_us"])
        axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        self._attention = {
            tuple(int(row[axis]) for axis in axes): float(row["time_us"])
            for row in _rows(folder / "attention.csv")
        }

    def measured_steps(self) -> Iterator[Measured]:
        """Yield each step whose attention was measured, if its other kernels were, too."""
        most_tokens, most = max(self._times["o_proj"]), max(self._times["lm_head"])
        for (count, start, decodes, context), us in self._attention.items():
            if count + decodes <= most_tokens and decodes + bool(count) <= most:
                yield self._step(us, count, start, decodes, context)

    def whole_prompts(self) -> Iterator[Measured]:
        """Yield prompts of all lengths of the dense kernels; attention is interpolated."""
        known = {key[0]: us for key, us in self._attention.items() if not (key[1] or key[2])}
        lengths = [0, *sorted(known)]
        times = [0.0, *(known[length] for length in lengths[1:])]
        for count in self._times["o_proj"]:
            yield self._step(float(np.interp(count, lengths, times)), count, 0, 0, 0)

    def _step(
        self, attention_us: float, count: int, start: int, decodes: int, context: int
    ) -> Measured:
        tokens, sequences = count + decodes, decodes + bool(count)
        in_layer = attention_us + sum(self._near(kernel, tokens) for kernel in LAYER)
        us = self._layers * in_layer
        us += self._near("embedding", tokens) + self._near("final_layernorm", tokens)
        us += self._near("lm_head", sequences) + self._near("sampler", sequences)
        squares = (start + count) ** 2 - start**2
        return Measured(StepWork(count, squares, decodes, decodes * context), us / 1e6)

    def _near(self, kernel: str, count: int) -> float:
        """Return the time of the smallest measured count that is not below `count`."""
        times = self._times[kernel]
        return times[count] if count in times else times[min(n for n in times if n >= count)]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(file)
