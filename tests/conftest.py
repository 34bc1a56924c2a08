"""For all tests: hypothesis draws the same examples each time, so that a green run stays green.

With `--hypothesis-profile=fuzz` (`make fuzz`) it draws thousands of others."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("deterministic")
