"""An API server with EndpointSlices only. It lists in pages, watches, and misbehaves on order.

It speaks as kube-apiserver does: resource versions, bookmarks, `Status` objects, and 410 for
versions that it has forgotten.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

NAMESPACE, SERVICE = "prod", "engines"


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    """Return an endpoint of a slice; without conditions it is ready."""
    ready = {"ready": True, "serving": True, "terminating": False}
    return {
        "addresses": [address],
        "conditions": {**ready, **conditions},
        "targetRef": {"kind": "Pod", "name": f"pod-{address}", "uid": f"uid-{address}"},
        "nodeName": "node-1",
        "zone": "a",
    }


def slice_of(name: str, *endpoints: dict[str, Any], port: int = 8100, **fields: Any) -> Any:
    """Return an EndpointSlice as the API server shows it."""
    labels = {"kubernetes.io/service-name": SERVICE, **fields.pop("labels", {})}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        **fields,
    }


class KubeApi:
    """The server. `lists` and `watches` are the queries that it got."""

    def __init__(self, ca: trustme.CA) -> None:
        """`ca`: issues its certificate."""
        self.ca = ca
        self.url = ""
        self.slices: dict[str, Any] = {}
        self.version = 10
        self.oldest = 0  # a watch from an earlier version is a 410
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.refuse: list[tuple[int, str]] = []  # of the next requests, one each
        self.page = 0  # slices of a page; 0: as many as asked for
        self.silent = False  # requests are not answered
        self.ends_watches = False  # at once
        self._open: set[asyncio.Queue[bytes | None]] = set()

    @property
    def watching(self) -> int:
        return len(self._open)

    def put(self, one: Any, kind: str = "MODIFIED") -> None:
        """Change a slice, and tell the watches."""
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.slices[one["metadata"]["name"]] = one
        if kind == "DELETED":
            del self.slices[one["metadata"]["name"]]
        self.event(kind, one)

    def event(self, kind: str, one: Any) -> None:
        self.raw(json.dumps({"type": kind, "object": one}).encode() + b"\n")

    def raw(self, data: bytes | None) -> None:
        """Send bytes to all watches; None breaks their connections."""
        for queue in self._open:
            queue.put_nowait(data)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[KubeApi]:
        app = web.Application()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
        app.router.add_get(path, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.ca.issue_cert("127.0.0.1").configure_cert(tls)
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.raw(None)
            await runner.cleanup()

    def kubeconfig(self, file: Path) -> str:
        """Write a kubeconfig that leads here; return its path."""
        trusted = {
            "certificate-authority-data": base64.b64encode(self.ca.cert_pem.bytes()).decode()
        }
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url, **trusted}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }  # fmt: skip
        file.write_text(json.dumps(config))
        return str(file)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        (self.watches if query.get("watch") else self.lists).append(query)
        if self.silent:
            await asyncio.sleep(30)
        if self.refuse:
            code, message = self.refuse.pop(0)
            return web.json_response(
                {"kind": "Status", "code": code, "message": message}, status=code
            )
        if query["labelSelector"] != f"kubernetes.io/service-name in ({SERVICE})":
            return web.json_response({"code": 400, "message": "another selector"}, status=400)
        if query.get("watch"):
            return await self._watch(request, int(query["resourceVersion"]))
        return self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        size, begin = self.page or int(query["limit"]), int(query.get("continue", 0))
        names = sorted(self.slices)
        metadata = {"resourceVersion": str(self.version)}
        if begin + size < len(names):
            metadata["continue"] = str(begin + size)
        items = [self.slices[name] for name in names[begin : begin + size]]
        return web.json_response({"metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, since: int) -> web.StreamResponse:
        if since < self.oldest:
            return web.json_response({"code": 410, "message": "too old"}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for one in self.slices.values():
            if int(one["metadata"]["resourceVersion"]) > since:
                queue.put_nowait(json.dumps({"type": "MODIFIED", "object": one}).encode() + b"\n")
        if self.ends_watches:
            return response
        self._open.add(queue)
        try:
            while (data := await queue.get()) is not None:
                await response.write(data)
            if request.transport is not None:
                request.transport.abort()  # in the middle of a chunked body
            return response
        finally:
            self._open.discard(queue)
