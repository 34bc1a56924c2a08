"""The unified paged KV cache: one pool per engine, written by its peers with one-sided puts."""
