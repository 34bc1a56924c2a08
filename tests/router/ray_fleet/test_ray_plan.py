"""Which members a fleet on Ray has, and which a change adds and removes."""

from __future__ import annotations

import pytest

from router.ray_fleet import Impossible, RayFleetSpec, check_name
from router.ray_fleet.engine_list import lines_of
from router.ray_fleet.plan import (
    Member,
    Place,
    choose_change,
    engine_arguments,
    first_members,
    free_places,
    pool_of,
)
from router.supervisor import FleetConfig, Pool


def spec(*pools: Pool, store: str = "", api_key: str = "", **changes) -> RayFleetSpec:
    config = FleetConfig("mock", pools, (), "", 8000, store=store, api_key=api_key)
    return RayFleetSpec("f", config, "s", **changes)


def engine(number: int, role: str = "any", group: int = 0, bundle: int | None = None) -> Member:
    return Member(
        f"engine-{number}", "engine", role, Place(group, number if bundle is None else bundle)
    )


ROUTER = Member("router-0", "router", "any", Place(1, 0))


def test_an_actors_name_says_all_of_its_member():
    for one in first_members(spec(Pool(2, "prefill"), Pool(1, "decode", "fast"), routers=2)):
        assert Member.parse("f", one.actor_name("f")) == one
        assert Member.parse("other", one.actor_name("f")) is None
    assert Member.parse("f", "f/fleet") is None
    assert Member.parse("f", "f/engine/../../etc/any/0.0") is None


def test_names_of_engines_are_those_of_up():
    names = [one.name for one in first_members(spec(Pool(2, "prefill"), Pool(2, "decode", "fast")))]
    assert names == ["engine-0", "engine-1", "fast-0", "fast-1", "router-0"]


def test_a_role_that_is_not_named_stays():
    members = [engine(0, "prefill"), engine(1, "decode"), engine(2, "decode"), ROUTER]
    change = choose_change(members, {0: 3}, {"decode": 1})
    assert (change.add, change.remove) == ((), (members[2],))


def test_added_engines_take_free_places_first_and_names_that_are_free():
    members = [engine(0), engine(2, bundle=2), ROUTER]
    change = choose_change(members, {0: 3}, {"any": 4})
    assert [(one.name, one.place) for one in change.add] == [
        ("engine-1", Place(0, 1)),
        ("engine-3", Place(2, 0)),
    ]
    assert (change.new_group, change.new_bundles) == (2, 1)


def test_engines_that_are_down_leave_first_then_those_of_the_newest_group():
    members = [engine(0), engine(1), engine(2, group=2, bundle=0), engine(3, group=2, bundle=1)]
    assert choose_change(members, {0: 2, 2: 2}, {"any": 2}).remove == (members[3], members[2])
    change = choose_change(members, {0: 2, 2: 2}, {"any": 2}, down=["engine-0"])
    assert change.remove == (members[0], members[3])


def test_roles_change_by_adding_and_removing():
    members = [engine(0), engine(1), ROUTER]
    change = choose_change(members, {0: 2}, {"any": 0, "prefill": 1, "decode": 1})
    assert [one.role for one in change.add] == ["prefill", "decode"]
    assert len(change.remove) == 2
    assert change.new_bundles == 2  # the old ones serve until the new ones do


def test_the_last_engine_stays():
    with pytest.raises(Impossible, match="down"):
        choose_change([engine(0), ROUTER], {0: 1}, {"any": 0})
    assert choose_change([engine(0)], {0: 1}, {"any": 0, "decode": 1}).remove == (engine(0),)


def test_free_places_are_those_without_a_member():
    assert free_places({0: 2, 3: 1}, [engine(1)]) == [Place(0, 0), Place(3, 0)]


def test_an_engine_has_the_flags_and_labels_of_its_pool():
    fleet = spec(
        Pool(1, "prefill", "big", {"max_batch": 8}, ("--tp", "2"), {"zone": "a"}),
        Pool(1, "decode", flags={"threads": 3}),
        num_cpus=2,
    )
    big, other = first_members(fleet)[:2]
    arguments = engine_arguments(fleet, big)
    assert arguments[arguments.index("--max-batch") + 1] == "8"
    assert arguments[arguments.index("--threads") + 1] == "2"  # the CPUs that Ray reserves
    assert arguments[arguments.index("--role") + 1] == "prefill"
    assert arguments[arguments.index("--engine-id") + 1] == "big-0"
    assert engine_arguments(fleet, other).count("--threads") == 1
    added = Member("engine-9", "engine", "prefill", Place(2, 0))
    assert pool_of(fleet, added).name == "big"
    text = lines_of(fleet, {big: "http://10.0.0.1:1", other: "http://10.0.0.2:2"})
    assert text == "http://10.0.0.1:1 role=prefill zone=a\nhttp://10.0.0.2:2 role=decode\n"


def test_no_key_is_among_the_arguments():
    fleet = spec(Pool(1), store="redis://x:secret@h/0", api_key="client")
    said = " ".join(engine_arguments(fleet, first_members(fleet)[0]))
    assert not any(key in said for key in ("secret", "client"))


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "x" * 64, "ä"])
def test_names_that_would_not_be_parts_of_actor_names(name: str):
    with pytest.raises(Impossible):
        check_name(name)
