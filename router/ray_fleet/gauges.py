"""Figures of a member as metrics of Ray, which its dashboard and its Prometheus have.

The processes' own `/metrics` have all others.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx

from router.ray_fleet.keeper import Keeper
from router.ray_fleet.plan import Member

__all__ = ["Gauges"]

EVERY_S = 5.0
NAMES = {
    "microserve_up": "whether the process answers",
    "microserve_restarts": "restarts of the process by its actor",
    "microserve_engine_running": "generations that the engine runs",
    "microserve_engine_waiting": "generations that wait on the engine",
    "microserve_engine_free_pages": "free pages of the engine's KV pool",
}


class Gauges:
    """Sets the gauges every few seconds, in a thread."""

    def __init__(self, fleet: str, member: Member, keeper: Keeper, key: str = "") -> None:
        """`key` is that of an engine; without it only what the keeper knows is shown."""
        self._tags = {"fleet": fleet, "member": member.name, "role": member.role}
        self._keeper = keeper
        self._key = key

    def start(self) -> None:
        threading.Thread(target=self._run, name="gauges", daemon=True).start()

    def _run(self) -> None:
        from ray.util.metrics import Gauge

        keys = tuple(self._tags)
        gauges = {
            name: Gauge(name, description=text, tag_keys=keys) for name, text in NAMES.items()
        }
        pause = threading.Event()
        with httpx.Client(
            trust_env=False, timeout=EVERY_S, headers={"Authorization": f"Bearer {self._key}"}
        ) as http:
            while self._keeper.snapshot().state not in ("stopped", "ended"):
                for name, value in self._read(http).items():
                    gauges[name].set(value, tags=self._tags)
                pause.wait(EVERY_S)

    def _read(self, http: httpx.Client) -> dict[str, float]:
        now = self._keeper.snapshot()
        values = {"microserve_up": float(now.state == "ready"), "microserve_restarts": now.restarts}
        if not self._key or now.state != "ready":
            return values
        try:
            state: Any = http.get(f"{now.url}/microserving/state").raise_for_status().json()
            values["microserve_engine_running"] = float(state["running"])
            values["microserve_engine_waiting"] = float(state["waiting"])
            values["microserve_engine_free_pages"] = float(state["pages"]["free"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            values["microserve_up"] = 0.0
        return values
