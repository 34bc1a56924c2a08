"""Steps of an engine as sums of its kernels, from LLMServingSim's times (see bench/profiles.py).

A folder has `dense.csv` (kernel, tokens), `per_sequence.csv` (kernel, sequences) and
`attention.csv` (length and context of one chunk of a prompt, number and context of decodes), with
times in microseconds. A model with experts also has `moe.csv` (tokens, experts that get one).

What passes between devices is not in these files. It takes the bytes over a link's bandwidth, and
the link's latency for each hop:

- Tensor-parallel over two devices, two sums in each layer: a ring sends half, adds and sends half.
- Data-parallel attention over two devices that divide the experts (`ranks=2`): each gets the
  other's tokens before the experts and gives their sums back after them. Both devices step
  together, so the pair is one engine. A prompt is computed by one of them; each has half of the
  decodes. Prompts of more tokens than a device computes in a step are divided.

Tokens are taken to choose experts uniformly.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.latency import Measured, ModelShape, StepWork

__all__ = ["EXPERTS", "EXPERTS_OF_A_TOKEN", "KernelTimes", "Link"]

# The kernels of a layer beside attention and experts; a model may lack some. A layer has two norms.
LAYER = (
    "layernorm",
    "qkv_proj",
    "qk_norm",
    "rotary_emb",
    "o_proj",
    "layernorm",
    "gate_up_proj",
    "act_fn",
    "down_proj",
)
EXPERTS, EXPERTS_OF_A_TOKEN = 128, 8  # Qwen3-30B-A3B
LONG = range(256, 2049, 256)  # tokens of the second of two devices, when the first has a full step


class Link(NamedTuple):
    """Between two devices: bytes/s in each direction, and seconds of a hop."""

    bandwidth: float
    latency: float


class KernelTimes:
    """The times of a model's kernels on a device, or on two."""

    def __init__(
        self, folder: Path, shape: ModelShape, *, tp: int = 1, ranks: int = 1,
        link: Link | None = None,
    ) -> None:  # fmt: skip
        """`folder` has the times of one of `tp` devices. `tp` and `ranks` are 1 or 2."""
        self._shape, self._tp, self._ranks, self._link = shape, tp, ranks, link
        self._times: dict[str, dict[int, float]] = defaultdict(dict)
        for name, count in (("dense", "tokens"), ("per_sequence", "sequences")):
            for row in _rows(folder / f"{name}.csv"):
                self._times[row["layer"]][int(row[count])] = float(row["time_us"])
        axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        self._attention = {
            tuple(int(row[axis]) for axis in axes): float(row["time_us"])
            for row in _rows(folder / "attention.csv")
        }
        self._layer = [kernel for kernel in LAYER if kernel in self._times]
        self._experts: dict[int, dict[int, float]] = defaultdict(dict)  # by tokens, by experts
        if (folder / "moe.csv").exists():
            for row in _rows(folder / "moe.csv"):
                self._experts[int(row["tokens"])][int(row["activated_experts"])] = float(
                    row["time_us"]
                )

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
        for other in LONG if self._ranks > 1 else ():
            yield self._step(times[-1], lengths[-1], 0, 0, 0, other)

    def _step(
        self, attention_us: float, count: int, start: int, decodes: int, context: int,
        other: int = 0,
    ) -> Measured:  # fmt: skip
        """Return a step, in which a second rank has as many decodes, and `other` prompt tokens."""
        tokens, sequences = count + decodes, decodes + bool(count)
        ranks = self._ranks
        in_layer = attention_us + sum(self._near(kernel, tokens) for kernel in self._layer)
        if self._experts:
            in_layer += self._experts_us(count + other + ranks * decodes)
        in_layer += self._link_us(tokens)
        us = self._shape.layers * in_layer
        us += self._near("embedding", tokens) + self._near("final_layernorm", tokens)
        us += self._near("lm_head", sequences) + self._near("sampler", sequences)
        squares = (start + count) ** 2 - start**2 + (count + other) ** 2 - count**2
        work = StepWork(count + other, squares, ranks * decodes, ranks * decodes * context)
        return Measured(work, us / 1e6)

    def _near(self, kernel: str, count: int) -> float:
        """Return the time of the smallest measured count that is not below `count`."""
        times = self._times[kernel]
        return times[count] if count in times else times[min(n for n in times if n >= count)]

    def _experts_us(self, tokens: int) -> float:
        """Return a layer's experts' time for the tokens of all ranks, which share them evenly."""
        missed = (1 - EXPERTS_OF_A_TOKEN / EXPERTS) ** tokens  # by an expert
        chosen = EXPERTS / self._ranks * (1 - missed)
        counts = sorted(self._experts)
        times = [
            float(np.interp(chosen, sorted(row), [row[n] for n in sorted(row)]))
            for row in (self._experts[count] for count in counts)
        ]
        return float(np.interp(tokens / self._ranks, counts, times))

    def _link_us(self, tokens: int) -> float:
        """Return what a layer sends, for the tokens of the device that has most."""
        if self._link is None:
            return 0.0
        sent_s = tokens * self._shape.hidden * self._shape.element_bytes / self._link.bandwidth
        hops = 2 if self._tp > 1 else 1  # of each of the two transfers
        return 2 * (sent_s + hops * self._link.latency) * 1e6


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(file)
