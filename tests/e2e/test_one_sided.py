"""The receiver takes no part in a put: its process may be stopped while the KV arrives."""

from __future__ import annotations

import os
import random
import signal

import psutil
import pytest
from e2e_deployment import Deployment


@pytest.mark.slow
def test_put_into_a_stopped_process(tiny: Deployment) -> None:
    """SIGSTOP after prep_recv; remote_send completes; SIGCONT; the right tokens come out."""
    sender, receiver, oracle = tiny.engines
    prompt = [random.Random(11).randrange(500) for _ in range(1000)]
    wanted = oracle.generate(prompt, greedy=20, request_id="one-sided-oracle")
    lease = receiver.call("prep_recv", request_id="one-sided", prompt=prompt, end=999)
    assert lease["match_len"] == 0
    os.kill(receiver.pid, signal.SIGSTOP)
    try:
        sent = sender.call(
            "remote_send",
            request_id="one-sided",
            prompt=prompt,
            begin=0,
            end=999,
            kv_addr=lease["kv_addr"],
        )
        assert psutil.Process(receiver.pid).status() == psutil.STATUS_STOPPED
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    assert sent["sent_tokens"] == sent["computed_tokens"] == 999
    layers, kv_heads, head_dim, float32 = 2, 2, 32, 4
    assert sent["bytes"] == 999 * layers * 2 * kv_heads * head_dim * float32
    got = receiver.generate(
        prompt, greedy=20, request_id="one-sided", begin=999, lease_id=lease["lease_id"]
    )
    assert got == wanted
    for engine in tiny.engines:
        engine.check_at_rest()
