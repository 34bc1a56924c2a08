"""For all tests: hypothesis draws the same examples each time, so that a green run stays green.

With `--hypothesis-profile=fuzz` (`make fuzz`) it draws thousands of others."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell that starts this in the background has it ignored, here and in all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("deterministic")
