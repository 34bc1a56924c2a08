"""Infinite-LLM, Table 1: how large the KV of a long context is."""

from __future__ import annotations

from bench.figures.claims import Answer, Claim, Part, by_places
from engine.latency import ModelShape

__all__ = ["table_1"]

# From the model's published configuration.
LLAMA2_13B = ModelShape(40, 5120, 40, 40, 128, 13824, 3, 2 * 32000, 4096)
TABLE_1 = {10_000: 8.19, 100_000: 81.9, 500_000: 409.6, 1_000_000: 819.2}  # tokens: GB
MISC_GB = 26


def table_1() -> Part:
    """KV and weights of LLaMA2-13B in 16-bit floats."""
    kv = {tokens: tokens * LLAMA2_13B.kv_bytes_per_token / 1e9 for tokens in TABLE_1}
    weights = LLAMA2_13B.weight_bytes / 1e9
    digits = [abs(kv[tokens] - shown) < 0.005 * shown for tokens, shown in TABLE_1.items()]
    claims = [
        Claim("Table 1", "LLaMA2-13B: KV of 8.19 / 81.9 / 409.6 / 819.2 GB for 10k / 100k / 500k / "
              "1000k tokens",
              {"ours": Answer(" / ".join(f"{value:.4g}" for value in kv.values()) + " GB",
                              by_places(digits))},
              f"{LLAMA2_13B.kv_bytes_per_token:,} bytes per token, from the published shape."),
        Claim("Table 1", "all else takes 26 GB",
              {"ours": Answer(f"{weights:.1f} GB", by_places([round(weights) == MISC_GB]))},
              "The weights."),
        Claim("Figures 7, 9, 11, 12", "contexts 2–19× as long; costs of live migration, of "
              "attention over several instances, and of fetching KV",
              {"ours": Answer("–", "not simulated")},
              "Figure 7's largest batches need up to 32 instances; the others are times of GPUs."),
    ]  # fmt: skip
    return Part({"kv_gb": kv, "weights_gb": weights}, claims)
