"""A mirror between two engine processes; the one that generates dies or is stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import EngineProcess

pytestmark = pytest.mark.processes

PROMPT = [(7 * n) % 250 for n in range(45)]
EVERY = 8
OPTIONS: dict[str, Any] = {"max_tokens": 300, "temperature": 0.8, "seed": 11, "logprobs": 2}


@pytest.fixture
def source() -> Iterator[EngineProcess]:
    process = EngineProcess("--pool-pages", "200", "--api-key", "k")
    process.http.headers["Authorization"] = "Bearer k"
    yield process
    process.kill()


@pytest.fixture(scope="module")
def replica() -> Iterator[EngineProcess]:
    process = EngineProcess("--pool-pages", "200", "--api-key", "k")
    process.http.headers["Authorization"] = "Bearer k"
    yield process
    process.kill()


@pytest.fixture(scope="module")
def whole(replica: EngineProcess) -> list[dict[str, Any]]:
    """Return the events of an undisturbed run."""
    return replica.generate(PROMPT, **OPTIONS)


def joined(events: list[dict[str, Any]]) -> tuple[list[int], str, list[Any]]:
    return (
        [token for event in events for token in event["token_ids"]],
        "".join(event["text"] for event in events),
        [item for event in events for item in event["logprobs"]],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "ending"),
    [
        (1, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.thorough),
        pytest.param(30, signal.SIGKILL, marks=pytest.mark.thorough),
        (30, signal.SIGSTOP),
        (177, signal.SIGKILL),
        pytest.param(177, signal.SIGSTOP, marks=pytest.mark.thorough),
    ],
)
def test_the_replica_continues_the_generation(
    source: EngineProcess,
    replica: EngineProcess,
    whole: list[dict[str, Any]],
    ending: signal.Signals,
    cut: int,
):
    """The mirror gets more room over HTTP meanwhile; each token comes exactly once."""
    got = replica.post("prep_recv", request_id="m", prompt=PROMPT, end=45, reserve=60).json()
    assert got["match_len"] == 32  # cached by the undisturbed run
    seen: list[dict[str, Any]] = []
    landed = 0
    mirror = {"kv_addr": got["kv_addr"], "every": EVERY}
    for event in source.stream(PROMPT, mirror=mirror, **OPTIONS):
        seen.append(event)
        landed = event.get("mirror", {}).get("landed", landed)
        if len(joined(seen)[0]) >= cut and landed:
            source.signal(ending)
            break
    output = joined(seen)[0]
    rest = replica.generate(PROMPT, output=output, lease_id=got["lease_id"], **OPTIONS)
    assert joined(seen + rest) == joined(whole)
    assert rest[-1]["finish_reason"] == whole[-1]["finish_reason"]
    tokens = len(PROMPT) + len(output)
    assert rest[0]["begin"] >= min(landed, tokens - 1)
    if landed > 45:
        assert tokens - rest[0]["begin"] <= 2 * EVERY + 1
    source.kill()
    replica.at_rest()
