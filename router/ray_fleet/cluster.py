"""A fleet's actors and placement groups, as Ray has them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from router.base import StartFailed
from router.ray_fleet.actors import EngineActor, Record, RouterActor, record_name
from router.ray_fleet.plan import ROUTERS_GROUP, Impossible, Kind, Member, RayFleetSpec

__all__ = ["ANSWER_S", "POLL_S", "RECORD_S", "Actors", "FleetGone", "Say"]

POLL_S = 0.5
ANSWER_S = 3.0
START_S = 60.0  # a node may have to start a process for an actor
RECORD_S = 10.0
SAY_ROOM_S = 5.0  # without room for so long, it is said

Say = Callable[[str], None]


class FleetGone(Impossible):
    """There is no fleet of this name."""


class Actors:
    """The actors and placement groups whose names begin with a fleet's. `ray` is the module."""

    def __init__(self, ray: Any, fleet: str) -> None:
        self.ray = ray
        self.fleet = fleet

    def start_record(self, spec: RayFleetSpec) -> None:
        """Start the actor that has the spec.

        Raises `Impossible` if another command has just done so, and `StartFailed`.
        """
        name = record_name(self.fleet)
        options = {"name": name, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
        try:
            actor = self.ray.remote(Record).options(**options).remote(spec)
        except ValueError:
            raise Impossible(f"another command starts a fleet {self.fleet!r}") from None
        try:
            self.ray.get(actor.restarts.remote(), timeout=START_S)
        except self.ray.exceptions.RayError as error:
            self.kill(name)
            said = str(error).strip().splitlines()[-1:]
            raise StartFailed(
                f"Ray starts no actor: {''.join(said)}; microserve must be installed on all nodes, "
                "in the Python environment that Ray runs in"
            ) from None

    def ask_record(self, method: str, *arguments: Any) -> Any:
        """Return what the record answers. Raises `FleetGone`, or `Impossible` without an answer."""
        try:
            record = self.ray.get_actor(record_name(self.fleet))
        except ValueError:
            raise FleetGone(
                f"there is no fleet {self.fleet!r} on this cluster; `microserve up --on` starts one"
            ) from None
        try:
            return self.ray.get(getattr(record, method).remote(*arguments), timeout=RECORD_S)
        except self.ray.exceptions.RayError as error:
            raise Impossible(f"the record of the fleet does not answer: {error}") from None

    def start(self, spec: RayFleetSpec, member: Member) -> None:
        """Start a member in its place; returns at once."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self.ray.util.get_placement_group(self._group_name(member.place.group))
        needs = spec.resources(member.kind)
        actor: Any = EngineActor if member.kind == "engine" else RouterActor
        self.ray.remote(actor).options(
            name=member.actor_name(self.fleet),
            lifetime="detached",
            max_restarts=-1 if spec.config.respawn else 0,
            max_concurrency=8,
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=member.place.bundle
            ),
        ).remote(spec, member)

    def statuses(self, members: Sequence[Member]) -> list[dict[str, Any] | None]:
        """Ask all at once; `None` for one that does not answer."""
        asked: dict[Any, int] = {}
        for index, member in enumerate(members):
            with suppress(ValueError):
                actor = self.ray.get_actor(member.actor_name(self.fleet))
                asked[actor.status.remote()] = index
        answers: list[dict[str, Any] | None] = [None] * len(members)
        if asked:
            ready, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
            for reference in ready:
                with suppress(self.ray.exceptions.RayError):
                    answers[asked[reference]] = self.ray.get(reference)
        return answers

    def call(self, member: Member, method: str) -> Any:
        """Return what a member answers; `None` if it does not."""
        try:
            actor = self.ray.get_actor(member.actor_name(self.fleet))
            return self.ray.get(getattr(actor, method).remote(), timeout=2 * ANSWER_S)
        except (ValueError, self.ray.exceptions.RayError):
            return None

    def names(self) -> list[str]:
        """Return the names of all actors of this fleet."""
        names = self.ray.util.list_named_actors()
        return [name for name in names if name.startswith(f"{self.fleet}/")]

    def kill(self, name: str) -> None:
        """End an actor and, by the kernel, its child. Ray does not restart it."""
        with suppress(ValueError, self.ray.exceptions.RayError):
            self.ray.kill(self.ray.get_actor(name), no_restart=True)

    def _group_name(self, group: int) -> str:
        return f"{self.fleet}/places/{group}"

    def reserve(self, spec: RayFleetSpec, kind: Kind, group: int, bundles: int) -> None:
        """Ask Ray for places that lie on as many nodes as possible."""
        self.ray.util.placement_group(
            [spec.resources(kind)] * bundles,
            strategy="SPREAD",
            name=self._group_name(group),
            lifetime="detached",
        )

    def wait_for_room(
        self, group: int, say: Say, give_up: float, renew: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until Ray has reserved a group. Raises `StartFailed` at `give_up`.

        Calls `renew` again and again meanwhile.
        """
        said = time.monotonic() + SAY_ROOM_S
        while True:
            places = self.places().get(group)
            if places is not None and places["state"] == "CREATED":
                return
            now = time.monotonic()
            if now > min(said, give_up):
                wanted = Counter(
                    " ".join(f"{count:g} {name}" for name, count in bundle.items() if count)
                    for bundle in (places or {}).get("bundles", {}).values()
                )
                needs = ", ".join(f"{count} × ({what})" for what, count in wanted.items())
                free = self.ray.available_resources()
                has = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
                text = f"the cluster has no room for {needs}; free: {has}"
                if now > give_up:
                    raise StartFailed(f"{text}; `ray status` shows more")
                say(f"{text}; waiting")
                said = give_up + 1
            renew()
            time.sleep(POLL_S)

    def places(self) -> dict[int, dict[str, Any]]:
        """Return Ray's table of this fleet's placement groups, by number."""
        prefix = self._group_name(0).removesuffix("0")
        return {
            int(one["name"].removeprefix(prefix)): one
            for one in self.ray.util.placement_group_table().values()
            if one["name"].startswith(prefix) and one["state"] != "REMOVED"
        }

    def bundles(self, kind: Kind) -> dict[int, int]:
        """Return how many bundles each group for engines, or that of the routers, has."""
        return {
            number: len(group["bundles"])
            for number, group in self.places().items()
            if (number == ROUTERS_GROUP) == (kind == "router")
        }

    def drop_group(self, group: int) -> None:
        """Give the places of a group back to Ray."""
        with suppress(ValueError, self.ray.exceptions.RayError):
            found = self.ray.util.get_placement_group(self._group_name(group))
            self.ray.util.remove_placement_group(found)
