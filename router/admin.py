"""The admin API: strategies and generations, engines, receipts."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from typing import Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yarl import URL

from engine.protocol import BadRequest, Timeout, Unauthorized
from router.errors import Forbidden
from router.http import json_response
from router.openai.errors import invalid
from router.openai.messages import load
from router.router import Router

__all__ = ["check_admin", "routes", "same_key"]

B = TypeVar("B", bound=BaseModel)
LOAD_TIMEOUT_S = 10.0


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Activate(_Body):
    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    if_generation: int | None = None


class _Load(_Body):
    name: str
    source: str


class _AddEngine(_Body):
    url: str
    id: str = ""
    role: Literal["any", "prefill", "decode"] | None = None


class _ChangeEngine(_Body):
    role: Literal["any", "prefill", "decode"] | None = None
    draining: bool | None = None


def check_admin(router: Router, http: web.Request, given: str | None) -> None:
    """Let an admin pass: with the key, or without one from this machine itself.

    Raises `Unauthorized` or `Forbidden`. A web page in a browser on this machine is not this
    machine: its calls carry another origin, or (DNS rebinding) another host name.
    """
    if key := router.config.admin_key:
        if not same_key(given, key):
            raise Unauthorized("the admin API needs its key", code="invalid_api_key")
        return
    origin = http.headers.get("Origin")
    here = _is_loopback(http.remote) and _is_loopback(_host(f"http://{http.host}"))
    if not here or (origin is not None and not _is_loopback(_host(origin))):
        raise Forbidden("without --admin-key the admin API answers on loopback only")


def same_key(given: str | None, key: str) -> bool:
    """Compare in constant time."""
    return given is not None and hmac.compare_digest(given.encode(), key.encode())


def routes(router: Router) -> list[web.RouteDef]:
    """The handlers of `/admin/…`, over `router`."""

    async def strategies(http: web.Request) -> web.Response:
        live = [generation.describe() for generation in router.generations.live()]
        return json_response(
            {"active": live[0], "generations": live, "strategies": router.catalog.describe()}
        )

    async def activate(http: web.Request) -> web.Response:
        wanted = await _read(_Activate, http)
        bound = router.catalog[wanted.name].bind(wanted.params)
        generation = router.generations.activate(bound, if_generation=wanted.if_generation)
        return json_response(generation.describe())

    async def load_strategy(http: web.Request) -> web.Response:
        if not router.config.allow_upload:
            raise Forbidden("strategies are loaded from source only with --allow-upload")
        wanted = await _read(_Load, http)
        try:
            # Somebody's module: it may take its time, or all of it.
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = await asyncio.to_thread(
                    router.catalog.load_source, wanted.name, wanted.source
                )
        except TimeoutError:
            raise Timeout(f"loading {wanted.name} took more than {LOAD_TIMEOUT_S:g} s") from None
        return json_response(loaded.describe(), status=201)

    async def rollback(http: web.Request) -> web.Response:
        return json_response(router.generations.rollback().describe())

    async def engines(http: web.Request) -> web.Response:
        return json_response({"engines": [member.describe() for member in router.registry]})

    async def add_engine(http: web.Request) -> web.Response:
        wanted = await _read(_AddEngine, http)
        if not wanted.url.startswith(("http://", "https://")) or not _host(wanted.url):
            raise BadRequest(f"no URL of an engine: {wanted.url!r}", param="url")
        member = router.registry.add(wanted.url, id=wanted.id, role=wanted.role)
        return json_response(member.describe())

    async def change_engine(http: web.Request) -> web.Response:
        member = router.registry[http.match_info["id"]]
        wanted = await _read(_ChangeEngine, http)
        if wanted.role is not None:
            member.role, member.role_pinned = wanted.role, True
        if wanted.draining is not None:
            member.draining = wanted.draining
        return json_response(member.describe())

    async def remove_engine(http: web.Request) -> web.Response:
        member = router.registry[http.match_info["id"]]
        router.registry.remove(member)
        return json_response({"removed": member.id})

    async def receipt(http: web.Request) -> web.Response:
        return json_response(router.receipts[http.match_info["id"]].describe())

    return [
        web.get("/admin/strategies", strategies),
        web.post("/admin/strategies", load_strategy),
        web.put("/admin/strategy", activate),
        web.post("/admin/rollback", rollback),
        web.get("/admin/engines", engines),
        web.post("/admin/engines", add_engine),
        web.patch("/admin/engines/{id}", change_engine),
        web.delete("/admin/engines/{id}", remove_engine),
        web.get("/admin/requests/{id}", receipt),
    ]


async def _read(body: type[B], http: web.Request) -> B:
    try:
        return body.model_validate(load(await http.read()))
    except ValidationError as error:
        raise invalid(error) from None


def _host(url: str) -> str | None:
    try:
        return URL(url).host
    except ValueError:
        return None


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
