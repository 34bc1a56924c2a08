"""What is compared: what runs now, the grid of parameters, and roles."""

from __future__ import annotations

import pytest

from engine.protocol import BadRequest
from router.advice.candidates import GRID, MOST, ROLELESS, Asked, Candidate, candidates, splits
from router.base import NotFound
from router.rollout import Catalog

PAIR = {"a": "any", "b": "any"}


def test_all_strategies_are_tried_and_what_runs_now_is_first():
    catalog = Catalog()
    current = catalog["balanced"].bind({"ratio": 0.7})
    found = candidates(catalog, current, PAIR, None)
    assert found[0] == Candidate("balanced", current.shown, PAIR, own={"ratio": 0.7})
    assert {one.name for one in found} == {one["name"] for one in catalog.describe()}
    assert set(GRID) <= {one.name for one in found} and len(found) <= MOST
    assert len({(one.name, str(one.params), str(one.roles)) for one in found}) == len(found)
    for one in found:
        catalog[one.name].bind(one.params)
        assert one.changes_roles == (one.roles != PAIR)
        if one.name in ROLELESS:
            assert one.roles == PAIR
    tried = [one.roles for one in found if one.name == "prefill_decode"]
    assert tried == [PAIR, {"a": "prefill", "b": "decode"}]


def test_what_runs_now_is_not_tried_twice():
    catalog = Catalog()
    found = candidates(catalog, catalog["data_parallel"].bind({}), PAIR, None)
    assert [one.name for one in found].count("data_parallel") == 1


def test_only_what_is_asked_for_is_tried():
    catalog = Catalog()
    current = catalog["data_parallel"].bind({})
    found = candidates(catalog, current, PAIR, [Asked("cache_aware", {"load_weight": 2})])
    assert [one.title for one in found] == ["data_parallel", "cache_aware:load_weight=2.0"]
    assert candidates(catalog, current, PAIR, []) == found[:1]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ([Asked("nobody", {})], NotFound),
        ([Asked("balanced", {"ratio": 7})], BadRequest),
        ([Asked("balanced", {"size": 1})], BadRequest),
        ([Asked("balanced", {"ratio": n / 100}) for n in range(40)], BadRequest),
    ],
)
def test_what_cannot_be_tried_is_refused(asked, error):
    catalog = Catalog()
    with pytest.raises(error):
        candidates(catalog, catalog["data_parallel"].bind({}), PAIR, asked)


def test_roles_are_those_of_now_none_and_divisions():
    assert splits({"a": "any"}) == [{"a": "any"}]
    three = {"a": "decode", "b": "any", "c": "prefill"}
    found = splits(three)
    assert found[:2] == [three, dict.fromkeys(three, "any")]
    # Engines keep the roles that they have where that is possible.
    assert {"a": "decode", "b": "decode", "c": "prefill"} in found
    assert {"a": "decode", "b": "prefill", "c": "prefill"} in found
    assert len(found) == 4
    many = {f"e{n}": "any" for n in range(16)}
    sizes = [list(split.values()).count("prefill") for split in splits(many)]
    assert sizes == [0, 1, 4, 8, 12, 15]


def test_titles_say_roles_where_they_change():
    split = {"a": "prefill", "b": "decode"}
    assert Candidate("prefill_decode", {}, split, True).title == "prefill_decode (1P1D)"
    own = {"k": 1}
    assert Candidate("x", {"k": 1, "l": 2}, PAIR, True, own).title == "x:k=1 (any roles)"
    assert Candidate("x", {"l": 2}, split).title == "x"
