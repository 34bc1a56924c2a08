"""A discovery in front of a scripted API server, and the engines that it has applied."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from kube_api import NAMESPACE, SERVICE, KubeApi

from router.discovery import Discovery, api, follower, open_slices
from router.engines import Backend, EngineEntry


class Listed:
    """Stands for a backend in a fleet."""

    def __init__(self, url: str) -> None:
        self.url = self.id = url
        self.source, self.leaving = "discovery", False


class Recorded:
    """A fleet that records what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.entries: dict[str, EngineEntry] = {}
        self._backends: dict[str, Listed] = {}

    def __iter__(self):
        return iter(list(self._backends.values()))

    def add(self, url, *, id="", role=None, labels=None, source="flag") -> Backend:
        assert source == "discovery"
        self.told.append(f"+{url}")
        self.entries[url] = EngineEntry(url, role, labels)
        return self._backends.setdefault(url, Listed(url))

    def remove(self, backend, *, for_good=False) -> int:
        assert not for_good
        self.told.append(f"-{backend.url}")
        del self._backends[backend.url], self.entries[backend.url]
        return 0

    @property
    def hosts(self) -> list[str]:
        """Return the addresses of the engines, sorted."""
        return sorted(url.removeprefix("http://").partition(":")[0] for url in self.entries)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def kube(authority: trustme.CA) -> AsyncIterator[KubeApi]:
    async with KubeApi(authority).serving() as server:
        yield server


@pytest.fixture
def kubeconfig(kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official client's configuration, which leads to `kube`."""
    monkeypatch.setenv("KUBECONFIG", kube.kubeconfig(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and short patience."""
    monkeypatch.setattr(follower, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(follower, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(api, "LIST_S", 0.5)


@pytest.fixture
async def fleet(kubeconfig: None, often: None) -> AsyncIterator[Recorded]:
    """What a running discovery has applied."""
    found = Recorded()
    async with open_slices(f"k8s://{NAMESPACE}/{SERVICE}") as slices:
        discovery = Discovery(slices, found)
        found.discovery = discovery
        task = asyncio.create_task(discovery.run())
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()
