"""The unified paged KV cache: one pool per engine, written into by its peers with one-sided puts."""
