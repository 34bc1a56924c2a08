"""What the routers of a store agree on, and how one truth becomes the next."""

from __future__ import annotations

import pytest

from engine.protocol import BadRequest
from router.agreement.truth import HISTORY, LOST_NUMBERS, MOST_LISTED, Activation, Listed, Truth
from router.base import Conflict
from router.rollout.canary import CanaryRules

RULES = CanaryRules(percent=10.0, min_requests=3)


def of(name: str, digest: str = "") -> Activation:
    source = Listed(digest, "f.py") if digest else None
    return Activation(0, name, {"ratio": 0.5}, digest, source)


def first() -> Truth:
    return Truth.first(Activation(1, "a", {}, ""))


def test_a_truth_is_what_it_was_before_it_was_stored():
    truth = first().activate("me", of("b", "d1")).try_out("me", of("c", "d2"), RULES)
    truth = truth.listing("me", {"b": Listed("d1", "f.py"), "e": Listed("d3", "")})
    assert Truth.decode(truth.encode()) == truth
    assert truth.digests == {"d1", "d2", "d3"}
    assert len({truth.id, truth.rollback("me").id, truth.rollback("me").id}) == 3


def test_numbers_only_grow():
    truth = first().activate("me", of("b")).activate("me", of("c"))
    assert [truth.active.number, *(one.number for one in truth.before)] == [3, 2, 1]
    truth = truth.rollback("me")
    assert (truth.active.number, truth.active.name) == (4, "b")
    assert [one.name for one in truth.before] == ["a"]
    truth = truth.restored().activate("me", of("d"))
    assert truth.active.number == 5 + LOST_NUMBERS


def test_a_condition_names_the_active_number():
    truth = first()
    truth.check(None)
    truth.check(1)
    with pytest.raises(Conflict, match="generation 1 is active, not 2"):
        truth.check(2)


def test_a_canary_is_promoted_once_or_ends_once():
    truth = first().try_out("me", of("b"), RULES)
    assert truth.trial is not None and truth.trial.activation.number == 2
    with pytest.raises(Conflict, match="generation 2 is a canary"):
        truth.try_out("me", of("c"), RULES)
    with pytest.raises(Conflict, match="no canary"):
        truth.promote(3, "", {})
    assert truth.promote(2, "", {}, "me").edit.who == "me"
    promoted = truth.promote(2, "good", {"ended": 3})
    assert (promoted.active.number, promoted.trial, promoted.last) == (2, None, 2)
    assert promoted.last_trial == {
        "generation": 2, "decision": "promoted", "why": "good", "ended": 3,
    }  # fmt: skip
    rejected = truth.reject(2, "bad", {})
    assert (rejected.active.number, rejected.trial, rejected.last) == (1, None, 2)
    for ended in (promoted, rejected):
        with pytest.raises(Conflict):
            ended.promote(2, "", {})
        with pytest.raises(Conflict):
            ended.reject(2, "", {})
    assert rejected.activate("me", of("c")).active.number == 3  # not 2 again


def test_rollbacks_and_activations_end_a_canary():
    truth = first().activate("me", of("b")).try_out("me", of("c"), RULES)
    back = truth.rollback("me")
    assert (back.active.number, back.trial, back.edit.what) == (2, None, "canary_rolled_back")
    over = truth.activate("me", of("d"))
    assert (over.active.number, over.trial) == (4, None)
    assert over.last_trial is not None and over.last_trial["generation"] == 3
    with pytest.raises(Conflict, match="no generation before"):
        first().rollback("me")


def test_what_is_kept_has_a_bound():
    truth = first()
    for number in range(HISTORY + 10):
        truth = truth.activate("me", of("b", f"d{number}"))
    assert len(truth.before) == HISTORY
    assert len(truth.digests) == HISTORY + 1
    truth = truth.listing("me", {f"s{i}": Listed("d", "") for i in range(MOST_LISTED)})
    with pytest.raises(BadRequest, match="loaded"):
        truth.listing("me", {"one more": Listed("d", "")})
