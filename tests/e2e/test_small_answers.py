"""An engine sends its answers and events at once, without waiting for TCP acknowledgements."""

from __future__ import annotations

import time

from e2e_faults import Alone

DELAYED_ACK_S = 0.04  # Linux's minimum


def test_calls_on_one_connection_do_not_wait_for_acknowledgements(alone: Alone) -> None:
    took = []
    for _ in range(20):
        began = time.monotonic()
        alone.engine.state()
        took.append(time.monotonic() - began)
    assert (
        min(took[1:]) < DELAYED_ACK_S / 2
    )  # the minimum does not depend on how busy the machine is
