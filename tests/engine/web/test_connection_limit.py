"""How many connections a server has, by flag and by the limit of open files."""

from __future__ import annotations

import logging
import resource

import pytest

from engine.protocol import BadRequest, Overloaded
from engine.web import ConnectionLimit, check_place, most_connections
from engine.web.connection_limit import DEFAULT, RESERVE, SPARE


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "most", "raised"),
    [
        (1024, 2**20, 0, DEFAULT, DEFAULT + RESERVE),
        (2**20, 2**20, 0, DEFAULT, 2**20),  # the soft limit is never lowered
        (1024, 20_000, 0, 20_000 - RESERVE, 20_000),  # room for 10,000 streams
        (1024, 4096, 0, 2048, 4096),
        (256, 256, 0, 128, 256),
        (1024, 2**20, 50_000, 50_000, 50_000 + RESERVE),
        (1024, 2**20, 10, 10, RESERVE + 10),
        (256, 256, 128, 128, 256),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 0, DEFAULT, None),
        (1024, resource.RLIM_INFINITY, 0, DEFAULT, DEFAULT + RESERVE),
    ],
)
def test_the_default_leaves_files_for_other_things(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, most: int, raised: int
):
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    assert most_connections(wanted) == most
    assert limits[1:] == ([(raised, hard)] if raised else [])


def test_more_connections_than_files_are_a_mistake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: None)
    with pytest.raises(BadRequest, match="513: of 1024 open files") as error:
        most_connections(513)
    assert error.value.param == "max_connections"


def test_places_are_given_back(caplog: pytest.LogCaptureFixture):
    refused: list[None] = []
    limit = ConnectionLimit(2, lambda: refused.append(None))
    places = [limit.enter() for _ in range(2 + SPARE + 1)]
    assert places == ["served"] * 2 + ["spare"] * SPARE + ["none"]
    assert (limit.served, len(refused)) == (2, SPARE + 1)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # not one for each
    limit.leave("none")
    assert limit.enter() == "none"
    limit.leave("spare")
    limit.leave("served")
    assert [limit.enter() for _ in range(3)] == ["served", "spare", "none"]


class Connection:
    closes = False

    def shutdown(self) -> None:
        self.closes = True


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_connections_beyond_the_limit_serve_one_probe(path: str):
    for crowded in (False, True):
        state = {"connection": Connection(), **({"crowded": True} if crowded else {})}
        scope = {"type": "http", "path": path, "state": state}
        if crowded and path == "/version":
            with pytest.raises(Overloaded):
                check_place(scope)
        else:
            check_place(scope)
        assert state["connection"].closes is crowded
    check_place({"type": "http", "path": path})
