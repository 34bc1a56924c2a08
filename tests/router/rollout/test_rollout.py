"""Revisions and their changes: who is counted, what is kept, and when a revision is dismissed."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from dataclasses import asdict
from datetime import UTC, datetime
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


def test_a_condition_on_the_active_number_is_compared_by_value():
    revisions = Revisions(BOUND)
    for number in range(1, 300):
        assert revisions.activate(BOUND, if_generation=int(str(number))).number == number + 1
    for other in (0, 299, 301):
        with pytest.raises(Conflict, match=f"generation 300 is active, not {other}") as conflict:
            revisions.check(other)
        assert conflict.value.param == "if_generation"
        with pytest.raises(Conflict):
            revisions.activate(BOUND, if_generation=other)
        with pytest.raises(Conflict):
            revisions.try_out(BOUND, Canary(ALL), if_generation=other)
    assert (revisions.active.number, revisions.candidate) == (300, None)
    assert revisions.try_out(BOUND, Canary(ALL), if_generation=300).number == 301


def test_revisions_that_still_run_are_listed_from_the_newest_on():
    revisions = Revisions(BOUND)
    older = []
    for _ in range(3):
        older.append(revisions.enter())
        revisions.activate(BOUND)
    candidate = revisions.try_out(BOUND, Canary(ALL))
    assert revisions.live() == [revisions.active, candidate, *reversed(older)]


def test_an_activation_and_a_rollback_end_a_canary():
    revisions = Revisions(BOUND)
    for change in (lambda: revisions.activate(BOUND), revisions.rollback):
        candidate = revisions.try_out(BOUND, Canary(ALL))
        assert revisions.enter() is candidate
        change()
        assert (revisions.canary, revisions.candidate) == (None, None)
        assert candidate in revisions.live() and revisions.active is not candidate
        revisions.leave(candidate)
        assert revisions.live() == [revisions.active]


def test_a_rollback_without_an_earlier_revision_leaves_the_canary():
    revisions = Revisions(BOUND)
    candidate = revisions.try_out(BOUND, Canary(ALL))
    with pytest.raises(Conflict, match="no generation before"):
        revisions.rollback()
    assert revisions.candidate is candidate and revisions.canary is not None


def test_sixty_four_rollbacks_are_possible():
    revisions = Revisions(BOUND)
    for _ in range(70):
        revisions.activate(BOUND)
    for _ in range(64):
        revisions.rollback()
    with pytest.raises(Conflict):
        revisions.rollback()


def test_a_revision_counts_its_violations_and_tells_of_each():
    told: list[tuple[int, str, str]] = []
    revisions = Revisions(
        BOUND, on_violation=lambda revision, *rest: told.append((revision.number, *rest))
    )
    second = revisions.activate(mine.bind({}))
    second.add_violation("raised", "first")
    second.add_violation("blocked", "second")
    second.add_violation("raised", "third")
    assert told == [(2, "raised", "first"), (2, "blocked", "second"), (2, "raised", "third")]
    revisions.enter()
    told_of = second.describe()
    assert 0 <= time.time() - told_of.pop("since") < 60
    assert told_of == {
        "generation": 2, "name": "mine", "params": {}, "source_sha256": mine.source_sha256,
        "in_flight": 1, "offences": {"raised": 2, "blocked": 1},
    }  # fmt: skip
    assert second.label == "strategy mine (generation 2)"
    Revisions(BOUND).active.add_violation("raised", "nobody is told")


def test_two_revisions_are_never_one():
    """Not even those that agree in everything."""
    first, second = Revisions(BOUND).active, Revisions(BOUND).active
    assert first != second and len({first, second}) == 2


# Changes


class Catalog(dict):
    """What `Rollout` needs of a catalog."""


def new_rollout() -> Rollout:
    events: Any = SimpleNamespace(publish=lambda kind, /, **fields: None)
    catalog: Any = Catalog(data_parallel=mine)
    return Rollout(
        catalog, BOUND, metrics=Metrics(), events=events, audit_log=AuditLog(), strikes=3
    )


@pytest.fixture
def rollout() -> Rollout:
    return new_rollout()


@pytest.fixture
def told(rollout: Rollout) -> list[tuple[str, dict[str, Any]]]:
    """The events from now on."""
    told: list[tuple[str, dict[str, Any]]] = []
    events: Any = rollout.events
    events.publish = lambda kind, /, **fields: told.append((kind, fields))
    return told


def counted(rollout: Rollout, name: str, **labels: str) -> float:
    full = f"microserve_router_{name}_total"
    return rollout._metrics.registry.get_sample_value(full, labels) or 0.0


def done(rollout: Rollout) -> list[str]:
    return [entry["what"] for entry in rollout.audit_log.entries()]


def ended(
    rollout: Rollout, *, ttft: float | None = 1.0, ms: float | None = 1.0, error: str = ""
) -> None:
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
        ({"error": "internal", "ttft": 100.1}, (1, 1, 0)),
        ({"error": "bad_request"}, (0, 0, 0)),
        ({"error": "too_large"}, (0, 0, 0)),
        ({"ttft": 100.0}, (1, 0, 0)),
        ({"ttft": 100.1}, (1, 0, 1)),
        # The client has left before the first token.
        ({"ttft": None, "ms": 100.0}, (0, 0, 0)),
        ({"ttft": None, "ms": 50.0}, (0, 0, 0)),
        ({"ttft": None, "ms": 100.1}, (1, 0, 1)),
        ({"ttft": None, "ms": None}, (0, 0, 0)),
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


def test_a_canary_without_a_limit_of_time_counts_who_got_a_token(rollout: Rollout):
    rollout.activate("me", BOUND, rules=CanaryRules(max_error_rate=0.5, min_requests=200))
    canary = rollout.revisions.canary
    assert canary is not None
    ended(rollout, ttft=None, ms=1e9)
    assert (canary.ended, canary.slow) == (0, 0)
    ended(rollout, ttft=1e9)
    assert (canary.ended, canary.slow) == (1, 0)
    failed = Receipt("x", 2, "mine", {}, 0, 0)  # type: ignore[arg-type]
    failed.status = "failed"  # and nothing says why
    rollout.ended(rollout.revisions.candidate, failed)  # type: ignore[arg-type]
    assert (canary.ended, canary.failed) == (2, 1)


@strategy
async def tuned(request, cluster, *, ratio: float = 0.5):
    yield Chunk()


TUNED = tuned.bind({"ratio": 0.25})
SHOWN = {"name": "tuned", "params": {"ratio": 0.25}, "source_sha256": tuned.source_sha256}


def last_entry(rollout: Rollout) -> dict[str, Any]:
    entry = dict(rollout.audit_log.entries()[-1])
    del entry["at"]
    return entry


def test_a_swap_is_noted_and_published(rollout: Rollout, told: list[Any]):
    assert last_entry(rollout)["what"] == "started" and last_entry(rollout)["who"] == "router"
    revision = rollout.activate("ann", TUNED)
    assert rollout.revisions.active is revision
    account = {**SHOWN, "generation": 2}
    assert last_entry(rollout) == {"who": "ann", "what": "activate", **account}
    state = {"in_flight": 0, "offences": {}}
    swap = {"who": "ann", "what": "activate", "why": "", **account, **state}
    assert told == [("swap", {**swap, "since": revision.describe()["since"]})]
    assert rollout.rollback("bob", "too slow").number == 3
    assert last_entry(rollout)["why"] == "too slow"
    kind, fields = told[-1]
    assert (kind, fields["who"], fields["what"], fields["why"], fields["generation"]) == (
        "swap", "bob", "rollback", "too slow", 3,
    )  # fmt: skip
    rollout.activate("ann", TUNED)
    rollout.rollback("bob")
    assert "why" not in last_entry(rollout)


def test_a_canary_is_noted_published_and_counted(rollout: Rollout, told: list[Any]):
    rollout.activate("ann", TUNED, rules=ALL)
    assert last_entry(rollout) == {"who": "ann", "what": "canary", **SHOWN, "generation": 2}
    begun = {"name": "tuned", "generation": 2, "decision": "begun", "why": ""}
    assert told == [("canary", begun)]
    assert rollout.last_canary is None
    assert counted(rollout, "canaries", decision="begun") == 1
    told.clear()
    for _ in range(2):
        ended(rollout)
    why = "0 of 2 requests failed, 0 took over 100 ms to a token"
    assert last_entry(rollout) == {
        "who": "router", "what": "promote", **SHOWN, "generation": 2, "why": why,
    }  # fmt: skip
    account = {**asdict(ALL), "ended": 2, "failed": 0, "slow": 0}
    decided = {"generation": 2, "decision": "promoted", "why": why, **account}
    assert [kind for kind, _ in told] == ["request_ended", "request_ended", "swap", "canary"]
    assert told[2][1]["what"] == "promote" and told[2][1]["why"] == why
    assert told[3][1] == {"name": "tuned", **decided}
    assert rollout.last_canary == decided
    assert counted(rollout, "canaries", decision="promoted") == 1
    assert counted(rollout, "canaries", decision="rolled_back") == 0


@pytest.mark.parametrize(("given", "why"), [("", "ann rolls back"), ("too slow", "too slow")])
def test_a_canary_that_an_admin_ends_is_told(
    rollout: Rollout, told: list[Any], given: str, why: str
):
    rollout.activate("ann", TUNED, rules=ALL)
    ended(rollout, error="internal")
    told.clear()
    assert rollout.rollback("ann", given) is rollout.revisions.active
    account = {**asdict(ALL), "ended": 1, "failed": 1, "slow": 0}
    decided = {"generation": 2, "decision": "rolled_back", "why": why, **account}
    assert told == [("canary", {"name": "tuned", **decided})]
    assert rollout.last_canary == decided
    assert last_entry(rollout)["what"] == "canary_rolled_back" and last_entry(rollout)["why"] == why
    assert counted(rollout, "canaries", decision="rolled_back") == 1


def test_an_activation_says_why_the_canary_ended(rollout: Rollout):
    rollout.activate("ann", TUNED, rules=ALL)
    assert rollout.activate("bob", BOUND, if_generation=1).number == 3
    assert rollout.last_canary is not None
    assert rollout.last_canary["why"] == "bob activates another generation"
    assert done(rollout) == ["started", "canary", "canary_rolled_back", "activate"]


def test_changes_that_the_router_makes_are_warnings(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "router.rollout.rollout")
    rollout = new_rollout()
    rollout.activate("ann", TUNED)
    rollout.activate("ann", BOUND, rules=ALL)
    for _ in range(2):
        ended(rollout)
    rollout.loaded("ann", tuned)
    levels = [(record.levelname, record.getMessage().split()[1]) for record in caplog.records]
    assert levels == [
        ("INFO", "started"), ("INFO", "activate"), ("INFO", "canary"), ("WARNING", "promote"),
        ("INFO", "loaded"),
    ]  # fmt: skip


def test_a_strategy_that_is_loaded_is_noted_and_published(rollout: Rollout, told: list[Any]):
    rollout.loaded("ann", tuned)
    fields = {"name": "tuned", "source_sha256": tuned.source_sha256}
    assert last_entry(rollout) == {"who": "ann", "what": "load", **fields}
    assert told == [("load", {"who": "ann", **fields})]


def test_each_request_is_published(rollout: Rollout, told: list[Any]):
    receipt = Receipt("x", 1, "mine", {}, 0, 7)  # type: ignore[arg-type]
    rollout.begun(rollout.revisions.active, receipt)
    common = {"id": "x", "generation": 1, "strategy": "mine"}
    assert told == [("request_begun", {**common, "prompt_tokens": 7})]
    told.clear()
    receipt.status, receipt.first_token_ms, receipt.ms = "done", 2.0, 3.0
    receipt.completion_tokens = 5
    rollout.ended(rollout.revisions.active, receipt)
    assert told == [
        ("request_ended", {
            **common, "status": "done", "error": None, "ms": 3.0, "first_token_ms": 2.0,
            "completion_tokens": 5,
        }),
    ]  # fmt: skip


def test_a_violation_is_published_counted_and_logged(
    rollout: Rollout, told: list[Any], caplog: pytest.LogCaptureFixture
):
    rollout.revisions.active.add_violation("raised", "KeyError")
    offence = {"generation": 1, "strategy": "mine", "kind": "raised", "message": "KeyError"}
    assert told == [("offence", offence)]
    labels = {"strategy": "mine", "generation": "1", "kind": "raised"}
    assert counted(rollout, "strategy_offences", **labels) == 1
    assert "strategy mine (generation 1): KeyError [raised]" in caplog.text


def test_the_active_revision_is_dismissed_beside_a_canary_too(rollout: Rollout):
    """Not the canary in its stead."""
    second = rollout.activate("ann", TUNED)
    rollout.activate("ann", BOUND, rules=ALL)
    for _ in range(3):
        second.add_violation("blocked", "line 3")
    active = rollout.revisions.active
    assert (active.bound.strategy.name, active.number) == ("mine", 4)
    assert rollout.revisions.candidate is None and rollout.last_canary is not None
    why = "it held up the event loop 3 times"
    assert rollout.last_canary["why"] == f"strategy tuned (generation 2) is dismissed: {why}"
    assert done(rollout)[-2:] == ["canary_rolled_back", "rollback"]


def test_a_dismissed_canary_says_why(rollout: Rollout):
    candidate = rollout.activate("ann", TUNED, rules=ALL)
    for _ in range(3):
        candidate.add_violation("blocked", "line 3")
    assert rollout.last_canary is not None
    assert rollout.last_canary["why"] == "it held up the event loop 3 times"


def test_a_revision_that_only_finishes_its_requests_is_not_dismissed(rollout: Rollout):
    first = rollout.revisions.enter()
    rollout.activate("ann", TUNED)
    candidate = rollout.activate("ann", BOUND, rules=ALL)
    for _ in range(5):
        first.add_violation("blocked", "line 3")
    assert rollout.revisions.active.bound is TUNED and rollout.revisions.candidate is candidate


def test_the_fallback_is_told(rollout: Rollout, told: list[Any]):
    for _ in range(3):
        rollout.revisions.active.add_violation("blocked", "line 3")
    kind, fields = told[-1]
    assert (kind, fields["who"], fields["what"], fields["generation"]) == (
        "swap", "router", "fallback", 2,
    )  # fmt: skip
    assert fields["why"] == last_entry(rollout)["why"] == "it held up the event loop 3 times"


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


def test_the_newest_thousand_entries_are_kept_in_memory():
    audit_log = AuditLog()
    for number in range(1002):
        audit_log.note("me", "load", number=number)
    assert [entry["number"] for entry in audit_log.entries()] == list(range(2, 1002))


def test_an_entry_says_when_who_and_what():
    audit_log = AuditLog()
    before = datetime.now(UTC)
    audit_log.note("me", "load", name="mine")
    (entry,) = audit_log.entries()
    at = datetime.fromisoformat(entry.pop("at"))
    assert entry == {"who": "me", "what": "load", "name": "mine"}
    assert -0.001 <= (at - before).total_seconds() < 60 and at.utcoffset() is not None
    assert at.microsecond % 1000 == 0


def test_two_routers_may_append_to_one_file(tmp_path):
    """And what stood there stays."""
    file = tmp_path / "audit"
    file.write_text('{"number": -1}\n')
    file.chmod(0o644)
    logs = [AuditLog(str(file)) for _ in range(2)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for number in range(4):
        logs[number % 2].note("me", "load", number=number, params={1: "one"})
    for audit_log in logs:
        audit_log.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["number"] for line in lines] == [-1, 0, 1, 2, 3]
    assert lines[1]["params"] == {"1": "one"}


def test_the_file_is_nobody_elses_from_the_beginning(tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr(os, "fchmod", lambda fd, _: modes.append(os.fstat(fd).st_mode))
    before = os.umask(0)
    try:
        audit_log = AuditLog(str(tmp_path / "audit"))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600]
    assert audit_log._file is not None and not os.get_inheritable(audit_log._file)
    audit_log.close()


def test_the_file_is_closed_with_its_log(tmp_path):
    audit_log = AuditLog(str(tmp_path / "audit"))
    fd = audit_log._file
    assert fd is not None and os.fstat(fd)
    audit_log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
