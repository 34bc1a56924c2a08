"""The admin API's pins: which prefixes the fleet keeps, how many copies, and where (§3.5)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from engine.protocol import BadRequest
from router.api.admin.access import Body
from router.api.admin.prefix import Prefix, prefix_tokens
from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import Http, reply
from router.pins import Pin

__all__ = ["routes"]

MOST_COPIES = 1024
PREVIEW_TOKENS = 32
Copies = Annotated[int, Field(ge=1, le=MOST_COPIES)]


class PinPrefix(Body):
    """`prefix`: text, or token ids, as `/tokenize` gives them of a conversation. Either `engine`,
    the id of one that shall have a copy, or `copies`, how many there shall be in all; 1 if both are
    left out."""

    prefix: Prefix
    engine: str | None = None
    copies: Copies | None = None


class UnpinPrefix(Body):
    """`prefix`, or `id`, as `GET /admin/pins` tells it. `engine`: only there. `copies`: so many
    fewer. All of them if both are left out."""

    prefix: Prefix | None = None
    id: str | None = None
    engine: str | None = None
    copies: Copies | None = None


def routes(router: Router) -> APIRouter:
    """Return `/admin/pins`, `/admin/pin` and `/admin/unpin`."""
    api = api_router("Engines")
    pins = router.pins

    @api.get("/admin/pins", response_model=dict[str, Any])
    async def list_pins() -> Response:
        """The pinned prefixes: copies wanted, engines that have one, and state."""
        return reply({"pins": [pin.describe() for pin in pins]})

    @api.post(
        "/admin/pin", response_model=dict[str, Any], responses=errors(404, 409, 429, 501, 503)
    )
    async def pin(http: Http, wanted: PinPrefix) -> Response:
        """Keep a prefix on engines, whatever they would evict.

        The copies are made, and made again after the loss of an engine, in the background.
        """
        _check_either(wanted)
        tokens = await prefix_tokens(router, wanted.prefix)
        text = wanted.prefix
        if not isinstance(text, str):
            text = router.registry.model.decode(tokens[:PREVIEW_TOKENS])
        kept = pins.pin(tokens, text, engine=wanted.engine, copies=wanted.copies)
        await _note(http, "pinned", kept)
        return reply(kept.describe())

    @api.post("/admin/unpin", response_model=dict[str, Any], responses=errors(404, 503))
    async def unpin(http: Http, wanted: UnpinPrefix) -> Response:
        """Keep a prefix no longer. It stays cached until it is evicted."""
        _check_either(wanted)
        if (wanted.prefix is None) == (wanted.id is None):
            raise BadRequest("give either prefix or id", param="prefix")
        if wanted.prefix is not None:
            known = pins.find(await prefix_tokens(router, wanted.prefix))
        else:
            known = pins[wanted.id or ""]
        pins.unpin(known, engine=wanted.engine, copies=wanted.copies)
        await _note(http, "unpinned", known)
        return reply(known.describe())

    async def _note(http: Http, what: str, changed: Pin) -> None:
        await router.changes.note(
            http.who, what, id=changed.id, tokens=len(changed.tokens), copies=changed.wanted,
            engines=list(changed.engines),
        )  # fmt: skip

    return api


def _check_either(wanted: PinPrefix | UnpinPrefix) -> None:
    if wanted.engine is not None and wanted.copies is not None:
        raise BadRequest("give either engine or copies", param="copies")
