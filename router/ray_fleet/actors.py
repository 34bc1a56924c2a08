"""The actors of a fleet: one per engine and per router, and one that keeps what they share.

Each actor's process has the engine or router as its child, which the kernel kills with it. When Ray
restarts an actor, on this node or another, it makes the object again, and with it a new child.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from router.base import child_environment, module_command
from router.ray_fleet.engine_list import EngineList
from router.ray_fleet.gauges import Gauges
from router.ray_fleet.keeper import Keeper
from router.ray_fleet.plan import Member, RayFleetSpec, engine_arguments
from router.supervisor import GRACE_S

__all__ = ["CLAIM_S", "EngineActor", "Record", "RouterActor", "record_name"]

CLAIM_S = 30.0  # a command that changes the fleet renews its claim more often than that
ADMIN_S = 5.0


def record_name(fleet: str) -> str:
    """Return the name of the actor that keeps what the members of a fleet share."""
    return f"{fleet}/fleet"


class Record:
    """What `up` was asked for, how often members were restarted, and who changes the fleet."""

    def __init__(self, spec: RayFleetSpec) -> None:
        self._spec = spec
        self._restarts = Counter[str]()
        self._claim: tuple[str, str, float] | None = None

    def spec(self) -> RayFleetSpec:
        return self._spec

    def restarted(self, name: str) -> None:
        self._restarts[name] += 1

    def restarts(self) -> dict[str, int]:
        return dict(self._restarts)

    def claim(self, holder: str, what: str) -> str:
        """Let `holder` change the fleet for `CLAIM_S`. Returns what another one does just now."""
        if self._claim and self._claim[0] != holder and time.monotonic() < self._claim[2]:
            return self._claim[1]
        self._claim = (holder, what, time.monotonic() + CLAIM_S)
        return ""

    def unclaim(self, holder: str) -> None:
        if self._claim and self._claim[0] == holder:
            self._claim = None


class EngineActor:
    """Runs one engine."""

    def __init__(self, spec: RayFleetSpec, member: Member) -> None:
        self._member = member
        node, config = _Node(spec, member), spec.config
        argv = module_command(
            "engine", config.model, *engine_arguments(spec, member),
            "--memory-share", f"{node.share(spec):.6f}",
            "--host", node.ip, "--port", "0", "--parent-pid", str(os.getpid()),
        )  # fmt: skip
        env = child_environment()
        env["MICROSERVE_SECRET"] = spec.secret
        env["MICROSERVE_ENGINE_API_KEY"] = config.engine_api_key
        self._leaving = False
        self._keeper = Keeper(
            member.name,
            argv,
            env,
            host=node.ip,
            say=_say,
            grace_s=GRACE_S,
            respawn=config.respawn,
            restarted=node.note_restart,
        )
        self._keeper.start()
        self._node = node
        Gauges(spec.name, member, self._keeper, config.engine_api_key).start()

    def __repr__(self) -> str:
        return self._member.name

    def status(self) -> dict[str, Any]:
        return self._node.describe(self._keeper) | {"leaving": self._leaving}

    def leave(self) -> None:
        """Have the routers move its requests away and forget it."""
        self._leaving = True

    def stop(self) -> None:
        """End the engine; returns when it is gone."""
        self._keeper.stop()


class RouterActor:
    """Runs one router, and follows the engines of the fleet for it."""

    def __init__(self, spec: RayFleetSpec, member: Member) -> None:
        self._member = member
        self._node = node = _Node(spec, member)
        config = spec.config
        self._folder = _new_folder(node.actor_id)
        self._key = config.admin_key
        self._list = EngineList(spec, self._folder / "engines")
        host = config.host or node.ip
        argv = module_command(
            "router", "router", *_with_files(config.router_args, spec.files, self._folder),
            "--engines-file", str(self._folder / "engines"),
            "--host", host, "--port", str(config.port), "--parent-pid", str(os.getpid()),
        )  # fmt: skip
        self._keeper = Keeper(
            member.name,
            argv,
            config.router_environment(),
            host=host,
            say=_say,
            grace_s=GRACE_S + config.shutdown_s,
            respawn=config.respawn,
            health_deadline_s=config.health_deadline_s,
            restarted=node.note_restart,
            before=self._list.wait,
        )
        self._list.start()
        self._keeper.start()
        Gauges(spec.name, member, self._keeper).start()

    def __repr__(self) -> str:
        return self._member.name

    def status(self) -> dict[str, Any]:
        return self._node.describe(self._keeper)

    def engines(self) -> list[dict[str, Any]] | None:
        """Return what the router says of its engines; `None` while it does not answer."""
        url = self._keeper.snapshot().url
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            with httpx.Client(verify=False, trust_env=False, timeout=ADMIN_S) as http:  # noqa: S501  this machine
                reply = http.get(f"{url}/admin/engines", headers=headers)
                return list(reply.raise_for_status().json()["engines"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError):
            return None

    def stop(self) -> None:
        """End the router; returns when it is gone."""
        self._list.stop()
        self._keeper.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Node:
    """Where an actor runs, and its way to the record."""

    def __init__(self, spec: RayFleetSpec, member: Member) -> None:
        import ray

        self._ray, self._spec, self._member = ray, spec, member
        context = ray.get_runtime_context()
        self.id = context.get_node_id()
        self.actor_id = context.get_actor_id()
        self.ip = ray.util.get_node_ip_address()
        if context.was_current_actor_reconstructed:
            self.note_restart()

    def note_restart(self) -> None:
        """Count a restart, without waiting. The count is for people, so a lost one does no harm."""
        with suppress(ValueError, self._ray.exceptions.RayError):
            record = self._ray.get_actor(record_name(self._spec.name))
            record.restarted.remote(self._member.name)

    def share(self, spec: RayFleetSpec) -> float:
        """Return the share of this node's memory for an engine: as of its CPUs or GPUs."""
        wanted = spec.resources("engine")
        for node in self._ray.nodes():
            if node["NodeID"] == self.id:
                total = node["Resources"]
                shares = [count / total[name] for name, count in wanted.items() if total.get(name)]
                return float(min(1.0, max([0.01, *shares])))
        return 1.0

    def describe(self, keeper: Keeper) -> dict[str, Any]:
        now = keeper.snapshot()
        return {
            "state": now.state,
            "url": now.url,
            "pid": now.pid,
            "failed_starts": now.failed_starts,
            "problem": now.problem,
            "node": self.id,
            "ip": self.ip,
            "actor_pid": os.getpid(),
        }


def _new_folder(actor_id: str) -> Path:
    """Return a temporary folder that only this user can read.

    An actor that was killed has left its own, with files of keys. It is removed: the actor has the
    same id when Ray restarts it.
    """
    prefix = f"microserve-{actor_id}-"
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix))


def _with_files(
    arguments: tuple[str, ...], files: Mapping[str, tuple[str, bytes]], folder: Path
) -> list[str]:
    """Write `files` into `folder` and return the arguments with their paths there."""
    changed = list(arguments)
    for flag, (name, content) in files.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        changed[changed.index(flag) + 1] = str(path)
    return changed


def _say(line: str) -> None:
    """Print to the actor's log, where `ray logs` and the dashboard show it."""
    print(line, flush=True)
