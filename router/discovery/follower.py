"""Keeps the router's engines equal to what EndpointSlices say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Protocol

from router.base import Pauses
from router.discovery.api import (
    MOST_SLICES,
    BadSlices,
    SliceApi,
    SlicesLost,
    VersionGone,
)
from router.discovery.slices import EndpointSlice, engines_of
from router.engines import Backend, EngineEntry, Role, Source

__all__ = ["Discovery", "Fleet"]

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
SHORT_S = 1.0  # a server that ends each watch sooner is asked less and less often
QUIET_S = 0.02  # a rollout comes as many events; they are applied together


class Fleet(Protocol):
    """The part of a registry that this changes."""

    def __iter__(self) -> Iterator[Backend]: ...
    def add(
        self,
        url: str,
        *,
        id: str = "",
        role: Role | None = None,
        labels: Mapping[str, str] | None = None,
        source: Source = "flag",
    ) -> Backend: ...
    def remove(self, backend: Backend, *, for_good: bool = False) -> int: ...


class Discovery:
    """Adds engines as they begin to serve, and drains and removes those that terminate.

    While the API server is lost, or answers wrongly, the engines stay as they are; the router's own
    health checks go on. An engine that an administrator has removed comes back only as a new pod.
    """

    def __init__(self, api: SliceApi, fleet: Fleet) -> None:
        self._api = api
        self._fleet = fleet
        self._slices: dict[str, EndpointSlice] = {}  # by name
        self._wanted: dict[str, EngineEntry] = {}  # by URL, as applied
        self._changed = asyncio.Event()
        self.listed = asyncio.Event()  # set once a first list was applied
        self.trouble = ""  # why the slices cannot be followed; empty: they are

    async def run(self) -> None:
        """Follow the slices until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._apply_changes())
            await self._follow()

    async def _follow(self) -> None:
        pauses, clock = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S), asyncio.get_running_loop().time
        version = ""
        while True:
            begun = clock()
            try:
                if not version:
                    self._slices, version = await self._api.list()
                    self._apply()
                    self.listed.set()
                async with aclosing(self._api.watch(version)) as changes:
                    async for kind, one, now in changes:
                        self._note(kind, one)
                        version = now or version
                        pauses.reset()
                        self._fine()
                self._fine()
                if clock() - begun >= SHORT_S:
                    pauses.reset()
                    continue
            except VersionGone:
                version = ""
            except BadSlices as error:
                version = ""
                self._troubled(error.message)
            except SlicesLost as error:  # the watch resumes where it broke off
                self._troubled(error.message)
            except Exception as error:
                log.exception("an EndpointSlice cannot be followed")
                version = ""
                self._troubled(f"{type(error).__name__}: {error}")
            await asyncio.sleep(pauses.next())

    def _note(self, kind: str, one: EndpointSlice | None) -> None:
        if one is None:
            return
        if kind == "DELETED":
            self._slices.pop(one.metadata.name, None)
        else:
            self._slices[one.metadata.name] = one
            if len(self._slices) > MOST_SLICES:
                raise BadSlices(f"there are more than {MOST_SLICES} EndpointSlices")
        self._changed.set()

    async def _apply_changes(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(QUIET_S)
            self._apply()

    def _apply(self) -> None:
        """Add what is new, change what is another, and remove what is gone."""
        self._changed.clear()
        wanted = engines_of(self._slices.values(), self._wanted)
        for url, entry in wanted.items():
            if self._wanted.get(url) != entry:
                self._fleet.add(url, role=entry.role, labels=entry.labels, source="discovery")
        for backend in list(self._fleet):
            ours = backend.source == "discovery" and not backend.leaving
            if ours and backend.url not in wanted:
                moved = self._fleet.remove(backend)
                log.info("engine %s leaves; %d requests move", backend.id, moved)
        self._wanted = wanted

    def _fine(self) -> None:
        if self.trouble:
            log.warning("EndpointSlices are followed again")
        self.trouble = ""

    def _troubled(self, reason: str) -> None:
        if reason != self.trouble:
            log.warning("EndpointSlices cannot be followed, so the engines stay: %s", reason)
        self.trouble = reason
