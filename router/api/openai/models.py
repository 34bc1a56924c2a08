"""`/v1/models`: the one model that is served, by the name it is served as."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from router.api.http import HttpRequest, HttpResponse, json_response
from router.api.openapi import documented
from router.api.parts import Router
from router.base.errors import ModelNotFound

__all__ = ["models", "one_model", "served_name"]


def served_name(router: Router) -> str:
    """What clients call the model. Raises `NoEngines` as long as no engine has answered."""
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
        "max_model_len": model.info.context_length,
    }


@documented(errors=(503,), reply=ModelList)
async def models(router: Router, http: HttpRequest) -> HttpResponse:
    """The models that are served: one."""
    listed: ModelList = {"object": "list", "data": [_card(router)]}
    return json_response(listed)


@documented(errors=(404, 503), reply=ModelCard)
async def one_model(router: Router, http: HttpRequest) -> HttpResponse:
    """A model that is served, by its name."""
    card = _card(router)
    if http.params["id"] != card["id"]:
        raise ModelNotFound(
            f"the model {http.params['id']!r} is not served here, but {card['id']!r} is",
            param="model",
        )
    return json_response(card)
