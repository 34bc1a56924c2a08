"""`/v1/models`: the one model that is served, by its served name."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from router.api.openapi import api_router, errors
from router.api.parts import Router
from router.api.rest import reply
from router.base import ModelNotFound

__all__ = ["routes", "served_name"]


def served_name(router: Router) -> str:
    """Return what clients call the model. Raises `NoEngines` until an engine has answered."""
    return router.config.served_model_name or router.registry.model.info.name


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


def _card(router: Router) -> ModelCard:
    model = router.registry.model
    return {
        "id": served_name(router),
        "object": "model",
        "created": model.created,
        "owned_by": "microserve",
        "root": model.info.name,
        "parent": None,
        "max_model_len": model.context_length,
    }


def routes(router: Router) -> APIRouter:
    """Return `/v1/models`."""
    api = api_router("OpenAI")

    @api.get("/v1/models", response_model=ModelList, responses=errors(503))
    async def models() -> Response:
        """The models that are served: one."""
        listed: ModelList = {"object": "list", "data": [_card(router)]}
        return reply(listed)

    @api.get("/v1/models/{id:path}", response_model=ModelCard, responses=errors(404, 503))
    async def one_model(id: str) -> Response:
        """A model that is served, by its name."""
        card = _card(router)
        if id != card["id"]:
            raise ModelNotFound(
                f"the model {id!r} is not served here, but {card['id']!r} is", param="model"
            )
        return reply(card)

    return api
