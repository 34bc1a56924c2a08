"""Pages, their references, the prefix tree and its eviction. Imports no torch."""
