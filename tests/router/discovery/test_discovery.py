"""Engines follow EndpointSlices, over an API server that breaks in every way."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
from kube_api import endpoint, slice_of
from waiting import until

from engine.protocol import BadRequest
from router.base import RouterConfig, StartFailed
from router.discovery import api, follower, open_slices
from router.server import serving

pytestmark = pytest.mark.slow  # many waits
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


async def test_ready_pods_are_added_and_terminating_ones_removed(kube, fleet):
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A), endpoint(B, serving=False, ready=False)), "ADDED")
    await until(lambda: fleet.hosts == [A])
    assert fleet.entries[f"http://{A}:8100"].labels == {
        "service": "engines", "pod": f"pod-{A}", "node": "node-1", "zone": "a",
    }  # fmt: skip
    kube.put(slice_of("s", endpoint(A), endpoint(B)))
    await until(lambda: fleet.hosts == [A, B])
    # One that stops serving stays: the router checks its health. One that terminates leaves.
    kube.put(slice_of("s", endpoint(A, serving=False, ready=False), endpoint(B, terminating=True)))
    await until(lambda: fleet.hosts == [A])
    kube.put(slice_of("s"), "DELETED")
    await until(lambda: not fleet.hosts)
    assert len(kube.lists) == len(kube.watches) == 1


async def test_a_rollout_tells_each_engine_once(kube, fleet):
    await until(lambda: kube.watching)
    for _ in range(5):
        kube.put(slice_of("s", endpoint(A), endpoint(B)))
    await until(lambda: fleet.hosts == [A, B])
    kube.put(slice_of("s", endpoint(A), endpoint(B), endpoint(C)))
    await until(lambda: C in fleet.hosts)
    assert sorted(fleet.told) == [f"+http://{host}:8100" for host in (A, B, C)]


async def test_all_pages_of_a_list_are_read(kube, fleet):
    """The fixture's first list is empty; a version that is gone makes the next one."""
    await until(lambda: kube.watching)
    kube.page = 1
    for number, host in enumerate((A, B, C)):
        kube.slices[f"s{number}"] = slice_of(f"s{number}", endpoint(host))
        kube.slices[f"s{number}"]["metadata"]["resourceVersion"] = "11"
    kube.event("ERROR", {"code": 410, "message": "too old resource version"})
    await until(lambda: fleet.hosts == [A, B, C])
    assert [query.get("continue") for query in kube.lists[1:]] == [None, "1", "2"]


async def test_a_broken_watch_resumes_where_it_broke(kube, fleet):
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    kube.event("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
    await until(lambda: fleet.hosts == [A])
    kube.version = 80
    kube.raw(None)
    await until(lambda: len(kube.watches) == 2 and kube.watching)
    assert kube.watches[1]["resourceVersion"] == "77"
    assert kube.watches[1]["allowWatchBookmarks"].lower() == "true"
    kube.put(slice_of("s", endpoint(B)))
    await until(lambda: fleet.hosts == [B])
    assert len(kube.lists) == 1


async def test_a_version_that_is_gone_is_listed_again(kube, fleet, caplog):
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    await until(lambda: fleet.hosts == [A])
    kube.put(slice_of("s", endpoint(B)))
    kube.oldest = kube.version + 1  # the watch that follows is a 410
    kube.raw(None)
    await until(lambda: len(kube.lists) >= 2)
    kube.oldest = 0
    await until(lambda: kube.watching)
    assert fleet.hosts == [B]


@pytest.mark.parametrize(
    "strange",
    [
        b"hello\n",
        b'{"type": "MODIFIED"}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"name": 7}}}\n',
        b'{"type": "ODD", "object": {}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}\n',
        b"\xff\xfe\n",
        b"x" * 3000,
    ],
    ids=lambda raw: repr(raw[:24]),
)
async def test_nonsense_changes_nothing_and_is_told_once(kube, fleet, caplog, monkeypatch, strange):
    monkeypatch.setattr(api, "MOST_LINE", 2000)
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    await until(lambda: fleet.hosts == [A])
    for _ in range(2):
        known = len(kube.watches)
        kube.raw(strange)
        await until(lambda known=known: len(kube.watches) > known and kube.watching)
    assert fleet.hosts == [A] and len(fleet.told) == 1
    kube.put(slice_of("s", endpoint(B)))
    await until(lambda: fleet.hosts == [B] and not fleet.discovery.trouble)
    told = [record for record in caplog.records if "cannot be followed" in record.message]
    assert len(told) == 1


async def test_engines_stay_while_the_server_refuses(kube, fleet, caplog):
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    await until(lambda: fleet.hosts == [A])
    kube.refuse = [(403, "endpointslices is forbidden"), (500, ""), (503, "x" * 10**5)]
    kube.raw(None)
    await until(lambda: not kube.refuse and kube.watching)
    assert fleet.hosts == [A] and len(kube.lists) == 1
    assert "403 endpointslices is forbidden" in caplog.text and "x" * 1000 not in caplog.text


async def test_a_silent_server_is_asked_again(kube, fleet, monkeypatch):
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    await until(lambda: fleet.hosts == [A])
    kube.silent = True
    kube.raw(None)
    await until(lambda: "within 0.5 s" in fleet.discovery.trouble)
    kube.silent = False
    kube.put(slice_of("s", endpoint(B)))
    await until(lambda: fleet.hosts == [B])


async def test_a_long_list_is_refused(kube, fleet, monkeypatch):
    monkeypatch.setattr(api, "MOST_REPLY", 2000)
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    await until(lambda: fleet.hosts == [A])
    kube.slices["t"] = slice_of("t", *(endpoint(f"10.0.1.{n}") for n in range(20)))
    kube.slices["t"]["metadata"]["resourceVersion"] = str(kube.version)
    kube.event("ERROR", {"code": 410, "message": ""})
    await until(lambda: "more than 2000 bytes" in fleet.discovery.trouble)
    assert fleet.hosts == [A]


async def test_a_server_that_ends_each_watch_is_not_asked_in_a_loop(kube, fleet, monkeypatch):
    monkeypatch.setattr(follower, "LONGEST_PAUSE_S", 10.0)
    await until(lambda: kube.watching)
    kube.ends_watches = True
    kube.raw(None)
    await asyncio.sleep(0.4)
    assert 2 <= len(kube.watches) <= 12


async def test_an_engine_that_was_removed_by_hand_stays_away(kube, fleet):
    await until(lambda: kube.watching)
    kube.put(slice_of("s", endpoint(A)))
    await until(lambda: fleet.hosts == [A])
    fleet.remove(next(iter(fleet)))
    kube.put(slice_of("s", endpoint(A), endpoint(B)))
    await until(lambda: fleet.hosts == [B])
    kube.event("ERROR", {"code": 410, "message": ""})
    await until(lambda: len(kube.lists) == 2 and kube.watching)
    assert fleet.hosts == [B]


# In a router


async def test_a_router_serves_by_the_pods_that_it_finds(kube, kubeconfig, route, fake):
    a, b = fake("a"), fake("b")
    here = "127.0.0.1"

    def slices(terminating: bool) -> None:
        for engine in (a, b):
            port = int(engine.url.rpartition(":")[2])
            gone = terminating and engine is a
            one = slice_of(f"of-{engine.url[-4:]}", endpoint(here, terminating=gone), port=port,
                           labels={"app.kubernetes.io/component": "decode"})  # fmt: skip
            kube.put(one)

    async with a.serving(), b.serving():
        slices(terminating=False)
        async with route(discover="k8s://prod/engines") as r:
            registry = r.server.router.registry
            await until(lambda: sum(one.usable for one in registry) == 2)
            assert {one.role for one in registry} == {"decode"}
            status, reply = await r.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
            assert (status, reply["usage"]["completion_tokens"]) == (200, 2)
            slices(terminating=True)
            await until(lambda: [one.id for one in registry] == ["b"])


async def test_a_router_starts_without_the_api_server(monkeypatch, kube, kubeconfig, caplog):
    monkeypatch.setattr("router.assembly.FIRST_LIST_S", 0.1)
    kube.refuse = [(403, "forbidden")] * 3
    caplog.set_level(logging.WARNING)
    async with serving(RouterConfig(port=0, discover="k8s://prod/engines")):
        await until(lambda: "403 forbidden" in caplog.text)


@pytest.mark.parametrize(
    "value",
    ["engines", "k8s://", "k8s://prod", "k8s://prod/", "k8s://Prod/a", "k8s://prod/a,a",
     "k8s://prod/a,,b", "k8s://prod/a/b", "k8s://prod/a?b", "http://prod/a", "k8s://[/a",
     "k8s://prod/" + ",".join(f"s{n}" for n in range(33))],
)  # fmt: skip
async def test_a_malformed_value_is_refused(value):
    with pytest.raises(BadRequest, match="k8s://NAMESPACE/SERVICE"):
        async with open_slices(value):
            pass


async def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    with pytest.raises(BadRequest, match=r"pip install 'microserve\[kubernetes\]'"):
        async with open_slices("k8s://prod/engines"):
            pass


async def test_missing_access_and_namespace_are_named(monkeypatch, tmp_path, kube, kubeconfig):
    with pytest.raises(BadRequest, match="namespace must be named"):
        async with open_slices("k8s:///engines"):
            pass
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(StartFailed, match="no access to Kubernetes"):
        async with open_slices("k8s://prod/engines"):
            pass
