"""What a fleet on Ray consists of, and which members a change adds and removes.

Ray keeps the truth: its list of named actors. An actor's name says all that must be known of a
member that does not run just now, so a change needs none of them to answer.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.supervisor import FleetConfig, Pool, named_engines, pool_arguments

__all__ = [
    "ROUTERS_GROUP",
    "Change",
    "Impossible",
    "Kind",
    "Member",
    "Place",
    "RayFleetSpec",
    "check_name",
    "choose_change",
    "engine_arguments",
    "first_members",
    "free_places",
    "pool_of",
]

Kind = Literal["engine", "router"]
FLEET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
ACTOR = re.compile(r"([^/]+)/(engine|router)/([^/]+)/(any|prefill|decode)/(\d+)\.(\d+)")
ROUTERS_GROUP = 1  # the placement group of all routers; the others are for engines


class Impossible(Exception):
    """What was asked for cannot be done; the message says what can."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A bundle of the placement group with this number."""

    group: int
    bundle: int


@dataclass(frozen=True, slots=True)
class Member:
    """An engine or a router, and the place that is reserved for it."""

    name: str
    kind: Kind
    role: str
    place: Place

    def actor_name(self, fleet: str) -> str:
        return f"{fleet}/{self.kind}/{self.name}/{self.role}/{self.place.group}.{self.place.bundle}"

    @classmethod
    def parse(cls, fleet: str, actor_name: str) -> Member | None:
        """Return the member of `fleet` that an actor is, if it is one."""
        found = ACTOR.fullmatch(actor_name)
        if found is None or found[1] != fleet:
            return None
        kind: Kind = "engine" if found[2] == "engine" else "router"
        return cls(found[3], kind, found[4], Place(int(found[5]), int(found[6])))


@dataclass(frozen=True)
class RayFleetSpec:
    """What `up` was asked for. It does not change; `scale` changes which members there are.

    `config` has the keys of the engines and of the admin API, and a `host` only if routers listen
    on that instead of the address of their node. `files` has the contents of files that flags of
    the router name, by the flag: they need not exist on the router's node. Keys and the secret are
    in here, not in process arguments.
    """

    name: str
    config: FleetConfig
    secret: str
    routers: int = 1
    num_cpus: float = 1.0  # of an engine
    num_gpus: float = 0.0
    router_cpus: float = 1.0
    files: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)

    def resources(self, kind: Kind) -> dict[str, float]:
        """Return the bundle that one member needs."""
        if kind == "router":
            return {"CPU": self.router_cpus}
        return {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})


def check_name(name: str) -> str:
    """Return `name`. Raises `Impossible` if a fleet cannot have it."""
    if not FLEET_NAME.fullmatch(name):
        raise Impossible(f"{name!r} is no name of a fleet: use letters, digits, '-', '_' and '.'")
    return name


def first_members(spec: RayFleetSpec) -> list[Member]:
    """Return the members that `up` starts: engines in group 0, routers in group 1."""
    engines = [
        Member(name, "engine", pool.role, Place(0, bundle))
        for bundle, (name, pool) in enumerate(named_engines(spec.config.pools))
    ]
    routers = [
        Member(f"router-{number}", "router", "any", Place(ROUTERS_GROUP, number))
        for number in range(spec.routers)
    ]
    return [*engines, *routers]


def pool_of(spec: RayFleetSpec, member: Member) -> Pool:
    """Return the pool whose flags an engine has: by its name, else the first one of its role."""
    pools = spec.config.pools
    by_name = (pool for pool in pools if pool.name and pool.name == _stem(member.name))
    by_role = (pool for pool in pools if pool.role == member.role)
    return next(by_name, None) or next(by_role, pools[0])


def engine_arguments(spec: RayFleetSpec, member: Member) -> tuple[str, ...]:
    """Return the flags of an engine, without those that depend on where it runs.

    It has as many threads as CPUs are reserved for it, unless its pool says otherwise.
    """
    share = {"threads": max(1, int(spec.num_cpus))}
    own = {"role": member.role, "engine_id": member.name}
    return pool_arguments(pool_of(spec, member), share, own)


@dataclass(frozen=True, slots=True)
class Change:
    """What `scale` does. The `add`ed engines have places in groups that exist, or else in group
    `new_group`, which gets `new_bundles` bundles."""

    add: tuple[Member, ...]
    remove: tuple[Member, ...]
    new_group: int
    new_bundles: int


def choose_change(
    members: Sequence[Member],
    bundles: Mapping[int, int],
    wanted: Mapping[str, int],
    down: Iterable[str] = (),
) -> Change:
    """Return how to have `wanted[role]` engines of each role there; other roles stay as they are.

    `bundles` says how many bundles each group of engines has. Engines in `down` (names) are removed
    first, then those of the newest group, so that groups become empty and can be given back. Added
    engines take reserved places that are free before new ones. Raises `Impossible` if no engine
    would be left.
    """
    engines = [one for one in members if one.kind == "engine"]
    there = Counter(one.role for one in engines)
    if sum((there | Counter()).values()) and not sum({**there, **wanted}.values()):
        raise Impossible("a fleet needs an engine; `microserve down` removes all of it")
    down = set(down)
    remove: list[Member] = []
    for role, count in wanted.items():
        of_role = [one for one in engines if one.role == role]
        of_role.sort(key=lambda one: (one.name not in down, -one.place.group, -_number(one.name)))
        remove += of_role[: max(0, len(of_role) - count)]
    stay = [one for one in members if one not in remove]
    free = free_places(bundles, members)
    new_group = max([ROUTERS_GROUP, *bundles, *(one.place.group for one in members)]) + 1
    roles = [
        role
        for role, count in wanted.items()
        for _ in range(count - sum(one.role == role for one in stay if one.kind == "engine"))
    ]
    used = {_number(one.name) for one in engines if _stem(one.name) == "engine"}
    numbers = (number for number in itertools.count() if number not in used)
    new_bundles = max(0, len(roles) - len(free))
    places = [*free, *(Place(new_group, bundle) for bundle in range(new_bundles))]
    add = [
        Member(f"engine-{next(numbers)}", "engine", role, place)
        for role, place in zip(roles, places, strict=False)
    ]
    return Change(tuple(add), tuple(remove), new_group, new_bundles)


def free_places(bundles: Mapping[int, int], members: Iterable[Member]) -> list[Place]:
    """Return the reserved places where no member is, the oldest first."""
    taken = {one.place for one in members}
    every = (Place(group, bundle) for group in sorted(bundles) for bundle in range(bundles[group]))
    return [place for place in every if place not in taken]


def _number(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else 0


def _stem(name: str) -> str:
    return name.rpartition("-")[0]
