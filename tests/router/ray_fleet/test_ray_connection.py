"""Connecting to a Ray whose server for clients dies at times, without Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from router.ray_fleet import Impossible, connect, connection

OUTSIDE = "ray://192.0.2.1:10001"
# What Ray 2.60 says, with the middle of the traceback left out.
DIED = """Initialization failure from server:
Traceback (most recent call last):
RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.
"""
ZOMBIE = """Initialization failure from server:
Traceback (most recent call last):
psutil.ZombieProcess: PID still exists but it's a zombie (pid=17130)
"""
OTHER = """Initialization failure from server:
Traceback (most recent call last):
RuntimeError: Version mismatch
"""


class FakeRay(SimpleNamespace):
    """A module whose `init` fails with each of these messages, and then connects."""

    def __init__(self, *failures: str, took_s: float = 1.0) -> None:
        super().__init__()
        self.failures, self.took_s = list(failures), took_s
        self.now, self.inits = 0.0, 0

    def init(self, *, address: str, **_: object) -> None:
        self.inits += 1
        self.now += self.took_s
        if self.failures:
            raise ConnectionAbortedError(self.failures.pop(0))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay], FakeRay]:
    def use(ray: FakeRay) -> FakeRay:
        monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
        monkeypatch.setattr(connection, "find_spec", lambda _: True)
        monkeypatch.setattr(connection, "monotonic", lambda: ray.now)
        monkeypatch.setattr(connection, "_reach", lambda _: None)
        return ray

    return use


@pytest.mark.parametrize("said", [DIED, ZOMBIE])
def test_a_server_that_died_in_its_fork_is_asked_for_again(use, said: str):
    ray = use(FakeRay(*[said] * (connection.ATTEMPTS - 1)))
    assert connect(OUTSIDE) is ray
    assert ray.inits == connection.ATTEMPTS


def test_only_so_often(use):
    ray = use(FakeRay(*[DIED] * 99))
    with pytest.raises(Impossible, match="Starting Ray client server failed"):
        connect(OUTSIDE)
    assert ray.inits == connection.ATTEMPTS


def test_only_for_so_long(use):
    ray = use(FakeRay(*[DIED] * 99, took_s=connection.RETRY_S * 0.6))
    with pytest.raises(Impossible, match="Starting Ray client server failed"):
        connect(OUTSIDE)
    assert ray.inits == 2


@pytest.mark.parametrize(("address", "said"), [(OUTSIDE, OTHER), ("auto", DIED)])
def test_nothing_else_is_tried_again(use, address: str, said: str):
    ray = use(FakeRay(said))
    with pytest.raises(Impossible):
        connect(address)
    assert ray.inits == 1
