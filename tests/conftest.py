"""For all tests: hypothesis draws the same examples each time, so that a green run stays green."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")
