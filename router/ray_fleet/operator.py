"""Creates, shows, scales and removes a fleet on Ray, from a command of the command line.

The commands keep no state of their own. Each reads from Ray which members there are, so that one
which is interrupted can be given again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from router.base import StartFailed
from router.ray_fleet.actors import CLAIM_S
from router.ray_fleet.cluster import ANSWER_S, POLL_S, RECORD_S, Actors, Say
from router.ray_fleet.plan import (
    ROUTERS_GROUP,
    Impossible,
    Kind,
    Member,
    RayFleetSpec,
    choose_change,
    first_members,
    free_places,
)
from router.supervisor import GRACE_S

__all__ = ["Line", "RayFleet"]


@dataclass(frozen=True, slots=True)
class Line:
    """A member as `status` shows it."""

    member: Member
    state: str
    url: str = ""
    node: str = ""
    restarts: int = 0
    pid: int = 0
    problem: str = ""
    failed_starts: int = 0


class RayFleet:
    """One fleet. `ray` is the module, connected."""

    def __init__(self, ray: Any, name: str) -> None:
        self._ray = ray
        self._actors = Actors(ray, name)
        self.name = name
        self._holder = self._what = ""  # of the claim to change the fleet

    def create(self, spec: RayFleetSpec, say: Say, wait_s: float) -> None:
        """Start the fleet and wait until all of it is ready, for `wait_s` at most.

        Raises `Impossible` if there is one, and `StartFailed`, after which nothing of it is left.
        """
        if self.exists():
            raise Impossible(
                f"there is a fleet {self.name!r} already; `microserve status` shows it, "
                "`microserve down` ends it, and --fleet NAME starts another one"
            )
        try:
            self._actors.start_record(spec)
            members = first_members(spec)
            groups: tuple[tuple[Kind, int], ...] = (("engine", 0), ("router", ROUTERS_GROUP))
            for kind, group in groups:
                some = [one for one in members if one.kind == kind]
                self._actors.reserve(spec, kind, group, len(some))
            give_up = time.monotonic() + wait_s
            for _, group in groups:
                self._actors.wait_for_room(group, say, give_up, self._renew)
            for member in members:
                self._actors.start(spec, member)
            self._wait_until_ready(members, say, give_up)
        except Impossible:  # another command was faster
            raise
        except BaseException:
            self.down(lambda _: None)
            raise

    def exists(self) -> bool:
        """Whether any actor of it is there."""
        return bool(self._actors.names())

    def spec(self) -> RayFleetSpec:
        """Return what `up` was asked for. Raises `FleetGone`."""
        spec: RayFleetSpec = self._actors.ask_record("spec")
        return spec

    def members(self) -> list[Member]:
        """Return engines, then routers, each in the order of their numbers."""
        found = [Member.parse(self.name, name) for name in self._actors.names()]
        members = [one for one in found if one is not None]
        return sorted(members, key=lambda one: (one.kind, len(one.name), one.name))

    def lines(self) -> list[Line]:
        """Return how all members are. Takes `ANSWER_S` if one of them does not answer."""
        members = self.members()
        try:
            restarts: Mapping[str, int] = self._actors.ask_record("restarts")
        except Impossible:
            restarts = {}
        nodes = {node["NodeID"]: node["Alive"] for node in self._ray.nodes()}
        placed = self._actors.places()
        found = []
        for member, status in zip(members, self._actors.statuses(members), strict=True):
            count = restarts.get(member.name, 0)
            if status is None:
                group = placed.get(member.place.group, {})
                node = group.get("bundles_to_node_id", {}).get(member.place.bundle, "")
                lost = group.get("state") in ("PENDING", "RESCHEDULING") or not nodes.get(node)
                state = "waits for a node" if lost else "no answer"
                found.append(Line(member, state, restarts=count))
                continue
            state = "leaving" if status.get("leaving") else status["state"]
            node = f"{status['node'][:8]} {status['ip']}"
            found.append(
                Line(member, state, status["url"], node, count, status["pid"], status["problem"],
                     status["failed_starts"])
            )  # fmt: skip
        return found

    def unused_places(self) -> int:
        """Return how many reserved places have no engine."""
        return len(free_places(self._actors.bundles("engine"), self.members()))

    def scale(self, wanted: Mapping[str, int], say: Say, wait_s: float) -> None:
        """Have `wanted[role]` engines of each role there. Added engines come before others leave.

        Engines that leave are drained first: their requests go on elsewhere. Raises `Impossible`,
        `FleetGone`, and `StartFailed` if those to add do not start, which are then removed.
        """
        spec = self.spec()
        with self._claimed("scale"):
            lines = self.lines()
            members = [line.member for line in lines]
            down = [line.member.name for line in lines if line.state != "ready"]
            change = choose_change(members, self._actors.bundles("engine"), wanted, down)
            self._add(spec, change.add, change.new_group, change.new_bundles, say, wait_s)
            for member in change.remove:
                self._remove(member, say, wait_s)
            self._give_back(say)
            if not change.add and not change.remove:
                say("nothing to change")

    def down(self, say: Say) -> None:
        """Remove all of it: routers first, which end their requests, then engines and places."""
        members = self.members()
        try:
            shutdown_s = self.spec().config.shutdown_s
        except Impossible:
            shutdown_s = 2.0
        kinds: tuple[Kind, ...] = ("router", "engine")
        for kind in kinds:
            some = [one for one in members if one.kind == kind]
            self._end(some, GRACE_S + shutdown_s)
            for member in some:
                say(f"{member.name} stopped")
        for name in self._actors.names():
            self._actors.kill(name)
        for group in self._actors.places():
            self._actors.drop_group(group)
        give_up = time.monotonic() + RECORD_S
        while self._actors.names() and time.monotonic() < give_up:
            time.sleep(0.1)

    def _wait_until_ready(self, members: Sequence[Member], say: Say, give_up: float) -> None:
        """Raises `StartFailed` when one fails to start, or at `give_up`."""
        waiting = list(members)
        while waiting:
            lines = {line.member: line for line in self.lines()}
            for member in list(waiting):
                line = lines.get(member)
                if line is None:
                    raise StartFailed(f"{member.name} was removed while it started")
                if line.failed_starts:
                    raise StartFailed(line.problem)
                if line.state == "ready":
                    say(f"{member.name} ready {line.url} (node {line.node})")
                    waiting.remove(member)
            if waiting and time.monotonic() > give_up:
                names = ", ".join(one.name for one in waiting)
                raise StartFailed(f"not ready in time: {names}; `ray logs actor` shows why")
            if waiting:
                self._renew()
                time.sleep(POLL_S)

    def _add(
        self, spec: RayFleetSpec, members: Sequence[Member], group: int, bundles: int, say: Say,
        wait_s: float,
    ) -> None:  # fmt: skip
        give_up = time.monotonic() + wait_s
        try:
            if bundles:
                self._actors.reserve(spec, "engine", group, bundles)
                self._actors.wait_for_room(group, say, give_up)
            for member in members:
                self._actors.start(spec, member)
            self._wait_until_ready(members, say, give_up)
        except BaseException:
            self._end(members, GRACE_S)
            if bundles:
                self._actors.drop_group(group)
            raise

    def _remove(self, member: Member, say: Say, wait_s: float) -> None:
        """Drain an engine at all routers, and end it."""
        line = next((one for one in self.lines() if one.member == member), None)
        if line is not None and line.url:
            say(f"{member.name} leaves: its requests go on elsewhere")
            give_up = time.monotonic() + wait_s
            while True:
                self._actors.call(member, "leave")
                self._renew()
                if self._forgotten(line.url):
                    break
                if time.monotonic() > give_up:
                    say(f"{member.name} still has requests after {wait_s:g} s, which end now")
                    break
                time.sleep(POLL_S)
        self._end([member], GRACE_S)
        say(f"{member.name} removed")

    def _forgotten(self, url: str) -> bool:
        """Whether every router says that it does not use the engine at `url`, or no longer."""
        for router in self.members():
            if router.kind == "router":
                engines = self._actors.call(router, "engines")
                if engines is None or any(engine["url"] == url for engine in engines):
                    return False
        return True

    def _end(self, members: Iterable[Member], within_s: float) -> None:
        """End the processes in order, then the actors; those that do not answer at once."""
        asked = []
        names = set(self._actors.names())
        for member in members:
            if member.actor_name(self.name) in names:
                with suppress(ValueError):
                    actor = self._ray.get_actor(member.actor_name(self.name))
                    asked.append((actor.stop.remote(), member))
        if asked:
            self._ray.wait([one for one, _ in asked], num_returns=len(asked), timeout=within_s)
        for _, member in asked:
            self._actors.kill(member.actor_name(self.name))
        give_up = time.monotonic() + ANSWER_S
        ended = {member.actor_name(self.name) for _, member in asked}
        while ended & set(self._actors.names()) and time.monotonic() < give_up:
            time.sleep(0.1)

    @contextmanager
    def _claimed(self, what: str) -> Iterator[None]:
        """Let no other command change the fleet meanwhile. Raises `Impossible` if one does."""
        self._holder, self._what = secrets.token_hex(8), what
        if other := self._actors.ask_record("claim", self._holder, what):
            raise Impossible(
                f"another `microserve {other}` changes this fleet; if that has died, try again in "
                f"{CLAIM_S:g} s"
            )
        try:
            yield
        finally:
            with suppress(Impossible):
                self._actors.ask_record("unclaim", self._holder)

    def _renew(self) -> None:
        """Renew the claim, if this command has one."""
        if not self._holder:
            return
        with suppress(Impossible):
            self._actors.ask_record("claim", self._holder, self._what)

    def _give_back(self, say: Say) -> None:
        """Return to Ray the groups where no engine is left."""
        taken = {one.place.group for one in self.members()}
        for group in self._actors.bundles("engine"):
            if group not in taken:
                self._actors.drop_group(group)
        if unused := self.unused_places():
            say(f"{unused} reserved places stay for the next engines; `down` gives them back")
