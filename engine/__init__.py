"""The microserving engine: three sub-request calls over a unified paged KV cache."""
