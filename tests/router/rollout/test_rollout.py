"""Revisions and their changes: who is counted, what is kept, and when a revision is dismissed."""

from __future__ import annotations

import json
import os
import stat
from types import SimpleNamespace
from typing import Any

import pytest

from router import Chunk, strategy
from router.base.errors import Conflict
from router.rollout import audit_log as module
from router.rollout.audit_log import AuditLog
from router.rollout.canary import Canary, CanaryRules
from router.rollout.revisions import Revisions
from router.rollout.rollout import Rollout
from router.telemetry import Metrics, Receipt


@strategy
async def mine(request, cluster):
    yield Chunk()


BOUND = mine.bind({})
ALL = CanaryRules(percent=100.0, max_error_rate=0.5, max_ttft_p99_ms=100.0, min_requests=2)


# Revisions


def test_a_revision_is_live_until_its_last_request_ends():
    revisions = Revisions(BOUND)
    first, again = revisions.enter(), revisions.enter()
    assert (first is again, first.in_flight) == (True, 2)
    second = revisions.activate(BOUND)
    idle = revisions.activate(BOUND)  # nothing runs on the second one
    assert revisions.live() == [idle, first]
    revisions.leave(first)
    assert revisions.live() == [idle, first]
    revisions.leave(first)
    assert revisions.live() == [idle]
    assert (second.in_flight, first.in_flight) == (0, 0)


def test_a_canary_that_ends_finishes_its_requests():
    revisions = Revisions(BOUND)
    with pytest.raises(Conflict, match="no canary"):
        revisions.promote()
    assert revisions.drop() is None
    candidate = revisions.try_out(BOUND, Canary(ALL))
    assert revisions.enter() is candidate
    assert revisions.live() == [revisions.active, candidate]
    with pytest.raises(Conflict, match="generation 2 is a canary"):
        revisions.try_out(BOUND, Canary(ALL))
    assert revisions.drop() is candidate
    assert revisions.live() == [revisions.active, candidate]
    assert revisions.enter() is revisions.active  # no further one
    revisions.leave(candidate)
    assert revisions.live() == [revisions.active]
    revisions.try_out(BOUND, Canary(ALL))
    assert revisions.drop() is not None and len(revisions.live()) == 1  # nothing ran on it


def test_a_promoted_canary_keeps_its_number_and_can_be_rolled_back():
    revisions = Revisions(BOUND)
    first = revisions.enter()
    candidate = revisions.try_out(BOUND, Canary(ALL))
    assert revisions.promote() is candidate is revisions.active
    assert (revisions.canary, revisions.candidate) == (None, None)
    assert revisions.live() == [candidate, first]
    back = revisions.rollback()
    assert (back.number, back.before) == (3, None)


@pytest.mark.parametrize("history", [1, 3])
def test_as_many_rollbacks_are_possible_as_configured(history: int):
    revisions = Revisions(BOUND, history=history)
    for _ in range(10):
        revisions.activate(BOUND)
    for _ in range(history):
        revisions.rollback()
    with pytest.raises(Conflict):
        revisions.rollback()


# Changes


class Catalog(dict):
    """What `Rollout` needs of a catalog."""


@pytest.fixture
def rollout() -> Rollout:
    events: Any = SimpleNamespace(publish=lambda kind, /, **fields: None)
    catalog: Any = Catalog(data_parallel=mine)
    return Rollout(
        catalog, BOUND, metrics=Metrics(), events=events, audit_log=AuditLog(), strikes=3
    )


def done(rollout: Rollout) -> list[str]:
    return [entry["what"] for entry in rollout.audit_log.entries()]


def ended(rollout: Rollout, *, ttft: float | None = 1.0, ms: float = 1.0, error: str = "") -> None:
    """End a request of the canary."""
    receipt = Receipt("x", 2, "mine", {}, 0, 0)  # type: ignore[arg-type]
    receipt.status, receipt.first_token_ms, receipt.ms = "done", ttft, ms
    if error:
        receipt.status, receipt.error = "failed", {"type": error, "message": ""}
    candidate = rollout.revisions.candidate
    rollout.ended(candidate or rollout.revisions.active, receipt)


@pytest.mark.parametrize(
    ("requests", "counted"),
    [
        ({}, (1, 0, 0)),
        ({"error": "internal"}, (1, 1, 0)),
        ({"error": "internal", "ttft": None}, (1, 1, 0)),
        ({"error": "bad_request"}, (0, 0, 0)),
        ({"error": "too_large"}, (0, 0, 0)),
        ({"ttft": 100.0}, (1, 0, 0)),
        ({"ttft": 100.1}, (1, 0, 1)),
        # The client has left before the first token.
        ({"ttft": None, "ms": 100.0}, (0, 0, 0)),
        ({"ttft": None, "ms": 100.1}, (1, 0, 1)),
    ],
)
def test_what_counts_for_a_canary(rollout: Rollout, requests: Any, counted: tuple[int, int, int]):
    rules = CanaryRules(max_error_rate=0.5, max_ttft_p99_ms=100.0, min_requests=200)
    rollout.activate("me", BOUND, rules=rules)
    canary = rollout.revisions.canary
    assert canary is not None
    ended(rollout, **requests)
    assert (canary.ended, canary.failed, canary.slow) == counted
    other = Receipt("x", 1, "mine", {}, 0, 0)  # type: ignore[arg-type]
    other.status, other.first_token_ms = "done", 1.0
    rollout.ended(rollout.revisions.active, other)
    assert canary.ended == counted[0]  # other revisions' requests do not count


def test_a_verdict_is_carried_out_and_noted(rollout: Rollout):
    rollout.activate("me", BOUND, rules=ALL)
    for _ in range(2):
        ended(rollout)
    assert (rollout.revisions.active.number, rollout.revisions.candidate) == (2, None)
    assert rollout.last_canary is not None and rollout.last_canary["decision"] == "promoted"
    rollout.activate("me", BOUND, rules=ALL)
    for _ in range(2):
        ended(rollout, error="internal")
    assert rollout.revisions.active.number == 2
    assert rollout.last_canary["decision"] == "rolled_back"
    assert done(rollout) == ["started", "canary", "promote", "canary", "canary_rolled_back"]
    ended(rollout)  # a request that ends after the verdict


def test_an_activation_that_conflicts_does_not_end_the_canary(rollout: Rollout):
    rollout.activate("me", BOUND, rules=ALL)
    with pytest.raises(Conflict):
        rollout.activate("me", BOUND, if_generation=7)
    assert rollout.revisions.candidate is not None
    assert rollout.rollback("me").number == 1  # ends the canary only
    assert rollout.revisions.candidate is None
    with pytest.raises(Conflict):
        rollout.rollback("me")


def test_a_strategy_that_blocks_the_loop_is_dismissed_at_its_last_strike(rollout: Rollout):
    second = rollout.activate("me", BOUND)
    for _ in range(9):
        second.add_violation("raised", "no reason to dismiss it")
    for _ in range(2):
        second.add_violation("blocked", "line 3")
    assert rollout.revisions.active is second
    second.add_violation("blocked", "line 3")
    assert rollout.revisions.active.number == 3
    second.add_violation("blocked", "by a request that still runs")
    assert rollout.revisions.active.number == 3
    assert done(rollout) == ["started", "activate", "rollback"]
    assert rollout.audit_log.entries()[-1]["why"] == "it held up the event loop 3 times"


def test_the_first_strategy_is_replaced_by_plain_data_parallelism(rollout: Rollout):
    for _ in range(3):
        rollout.revisions.active.add_violation("blocked", "line 3")
    assert rollout.revisions.active.number == 2
    assert done(rollout) == ["started", "fallback"]


def test_a_dismissed_canary_leaves_the_active_revision(rollout: Rollout):
    candidate = rollout.activate("me", BOUND, rules=ALL)
    for _ in range(3):
        candidate.add_violation("blocked", "line 3")
    assert (rollout.revisions.active.number, rollout.revisions.candidate) == (1, None)
    assert done(rollout) == ["started", "canary", "canary_rolled_back"]


# The audit log


def test_the_log_in_memory_is_bounded_and_the_file_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "KEPT", 5)
    file = tmp_path / "audit"
    audit_log = AuditLog(str(file))
    for number in range(module.KEPT + 1):
        audit_log.note("me", "load", number=number)
    kept = audit_log.entries()
    assert (len(kept), kept[0]["number"], kept[-1]["number"]) == (module.KEPT, 1, module.KEPT)
    kept.clear()
    assert len(audit_log.entries()) == module.KEPT
    audit_log.close()
    audit_log.close()
    lines = file.read_text().splitlines()
    assert len(lines) == module.KEPT + 1
    assert json.loads(lines[0])["number"] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    audit_log.note("me", "load")  # after the end, in memory only
    assert len(file.read_text().splitlines()) == module.KEPT + 1


def test_the_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "other").write_text("precious")
    (tmp_path / "audit").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        AuditLog(str(tmp_path / "audit"))
    assert (tmp_path / "other").read_text() == "precious"


def test_a_line_that_cannot_be_written_is_logged(tmp_path, caplog):
    audit_log = AuditLog(str(tmp_path / "audit"))
    assert audit_log._file is not None
    os.close(audit_log._file)
    audit_log._file = os.open("/dev/full", os.O_WRONLY)
    audit_log.note("me", "activate", name="mine")
    assert "cannot be written" in caplog.text and "'name': 'mine'" in caplog.text
    assert audit_log.entries()[-1]["what"] == "activate"
    audit_log.close()
