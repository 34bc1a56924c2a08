"""Tells a router which engines there are, by the file of `--engines-file`.

Ray's list of named actors says which engines the fleet has, and each actor says where its engine
is. An engine that does not answer keeps its line, so that the router watches it; it gets another
one when it comes back at another address. One that leaves loses its line: the router then moves its
requests away and forgets it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.ray_fleet.plan import Member, RayFleetSpec, pool_of

__all__ = ["EngineList", "lines_of"]

EVERY_S = 0.5
ANSWER_S = 2.0


def lines_of(spec: RayFleetSpec, urls: Mapping[Member, str]) -> str:
    """Return the text of an engines file."""
    lines = []
    for member, url in urls.items():
        labels = (f"{name}={value}" for name, value in pool_of(spec, member).labels.items())
        lines.append(" ".join((url, f"role={member.role}", *labels)))
    return "".join(f"{line}\n" for line in lines)


class EngineList:
    """Keeps the file up to date, in a thread."""

    def __init__(self, spec: RayFleetSpec, file: Path) -> None:
        self._spec = spec
        self._file = file
        self._urls: dict[Member, str] = {}
        self._written = ""
        self._stopping = threading.Event()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="engine list", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def wait(self, stopping: threading.Event) -> None:
        """Wait until the file has an engine, or `stopping` is set."""
        while not stopping.is_set() and not self._there.wait(0.1):
            pass

    def _follow(self) -> None:
        import ray

        while not self._stopping.wait(EVERY_S):
            try:
                self._urls = self._look(ray)
            except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
                print(f"cannot list the engines: {error}", flush=True)  # Ray's head is away
                continue
            text = lines_of(self._spec, self._urls)
            if text and text != self._written:
                new = self._file.with_suffix(".new")
                new.write_text(text)
                new.replace(self._file)
                self._written = text
                self._there.set()

    def _look(self, ray: Any) -> dict[Member, str]:
        """Return the URLs of all engines that have one and do not leave."""
        asked = {}
        for name in sorted(ray.util.list_named_actors()):
            member = Member.parse(self._spec.name, name)
            if member is not None and member.kind == "engine":
                try:
                    asked[ray.get_actor(name).status.remote()] = member
                except ValueError:  # it has just ended
                    continue
        answered: set[Any] = set()
        if asked:
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
            answered = set(ready)
        urls = {}
        for reference, member in asked.items():
            url, leaving = self._urls.get(member, ""), False
            if reference in answered:
                try:
                    now = ray.get(reference)
                except ray.exceptions.RayError:  # its actor is being restarted
                    pass
                else:
                    url, leaving = now["url"] or url, now["leaving"]
            if url and not leaving:
                urls[member] = url
        return urls
