"""Many routers over one virtual fleet, as the bench of them counts their calls."""

from __future__ import annotations

import pytest

from bench.simulated_routers import measure
from router.base import RouterConfig
from router.engines.load import Load

pytestmark = pytest.mark.slow


def test_one_router_takes_nothing_for_the_work_of_others(monkeypatch: pytest.MonkeyPatch):
    """What it counts as its own is at least what engines report, cached prompts included."""
    heard: list[tuple[int, int]] = []
    hear = Load.hear

    def noted(self: Load, tokens: int | None, streams: int) -> None:
        hear(self, tokens, streams)
        heard.append((tokens or 0, self.others))

    monkeypatch.setattr(Load, "hear", noted)
    assert measure(1, 4, 15.0)["hit_rate"] > 0.5
    assert sum(tokens > 0 for tokens, _ in heard) > 3
    assert not any(others for _, others in heard)


def test_each_router_polls_each_engine_and_follows_its_feed():
    one, three = (measure(routers, 4, 10.0) for routers in (1, 3))
    assert one["sent"] == three["sent"] > 20
    for row in (one, three):  # each request has reached an engine once
        arrived = row["requests"] * row["virtual_s"] * row["engines"]
        assert arrived == pytest.approx(row["sent"], rel=0.01)
        polls = row["routers"] / RouterConfig().health_interval_s
        assert row["polls"] == pytest.approx(polls, rel=0.1)
        assert 0 < row["hit_rate"] < 1 and 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    assert three["changes"] > 2 * one["changes"]
    assert measure(3, 4, 10.0) == three  # nothing depends on the machine
