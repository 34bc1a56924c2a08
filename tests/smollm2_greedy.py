"""What transformers generates with SmolLM2, greedy, in float32: kept in `smollm2_greedy.json`.

Loading transformers' model takes long. One test compares the file with transformers; others compare
engines with the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

NEAR_TIE = 1e-4  # the order of two best logits this close is left open


@dataclass(frozen=True, slots=True)
class Greedy:
    """A prompt and its continuation. `gaps` has, per token, best logit minus second best."""

    text: str
    prompt: list[int]
    tokens: list[int]
    gaps: list[float]

    def check(self, got: list[int], what: str) -> None:
        """Assert that `got` is the continuation, up to a near tie."""
        for place, (token, wanted, gap) in enumerate(zip(got, self.tokens, self.gaps, strict=True)):
            if token != wanted:
                assert gap < NEAR_TIE, f"{what}: token {place} is {token}, not {wanted}"
                return  # what follows another token differs


def continuations() -> list[Greedy]:
    path = Path(__file__).with_suffix(".json")
    return [Greedy(**each) for each in json.loads(path.read_text())]
