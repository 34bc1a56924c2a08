"""The strategy interface: an async generator function over `(request, cluster)`, and params."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from engine.protocol import BadRequest
from router.request import Chunk, Request

if TYPE_CHECKING:
    from router.cluster import Cluster

__all__ = ["Bound", "Strategy", "strategy"]

Function = Callable[..., AsyncGenerator[Chunk, None]]


class Strategy:
    """A named strategy with typed params. Made by `@strategy`; calling it calls the function."""

    def __init__(self, function: Function) -> None:
        if not inspect.isasyncgenfunction(function):
            raise TypeError(f"{_name(function)}: a strategy is an async function that yields")
        self.name = _name(function)
        self.doc = inspect.getdoc(function) or ""
        self.function: Function = function
        self._params = _params_model(function)

    def __call__(
        self, request: Request, cluster: Cluster, **params: Any
    ) -> AsyncGenerator[Chunk, None]:
        return self.function(request, cluster, **params)

    def bind(self, params: Mapping[str, Any]) -> Bound:
        """This strategy with `params` validated. Raises `BadRequest` naming the first bad one."""
        try:
            model = self._params.model_validate(dict(params))
        except ValidationError as invalid:
            first = invalid.errors(include_url=False, include_input=False)[0]
            param = ".".join(str(part) for part in first["loc"])
            message = f"strategy {self.name}: {param}: {first['msg']}"
            raise BadRequest(message, param=f"params.{param}") from None
        return Bound(self, {name: getattr(model, name) for name in self._params.model_fields})

    def describe(self) -> dict[str, Any]:
        """Name, help and the JSON schema of each param, for the admin API."""
        schema = self._params.model_json_schema().get("properties", {})
        return {"name": self.name, "doc": self.doc, "params": schema}


class Bound:
    """A strategy together with the params it runs with."""

    __slots__ = ("params", "strategy")

    def __init__(self, strategy: Strategy, params: dict[str, Any]) -> None:
        self.strategy = strategy
        self.params = params

    def run(self, request: Request, cluster: Cluster) -> AsyncGenerator[Chunk, None]:
        return self.strategy.function(request, cluster, **self.params)


def strategy(function: Function) -> Strategy:
    """Make a strategy of an async generator function `(request, cluster, *, param=default, …)`.

    The function's name and docstring become the strategy's; keyword-only parameters, which need
    defaults, become its params, validated from their annotations. Raises `TypeError` for a
    function of another shape.
    """
    return Strategy(function)


def _name(function: Function) -> str:
    return getattr(function, "__name__", repr(function))


def _params_model(function: Function) -> type[BaseModel]:
    name = _name(function)
    positional, fields = 0, {}
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional += 1
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            raise TypeError(f"{name}: a strategy takes no *args or **kwargs")
        elif parameter.default is parameter.empty:
            raise TypeError(f"{name}: the param {parameter.name} needs a default")
        else:
            fields[parameter.name] = (hints.get(parameter.name, Any), parameter.default)
    if positional != 2:
        raise TypeError(f"{name}: a strategy takes (request, cluster), then keyword-only params")
    config = ConfigDict(extra="forbid", validate_default=True, arbitrary_types_allowed=False)
    try:
        model: type[BaseModel] = create_model(f"{name}_params", __config__=config, **fields)  # type: ignore[call-overload]
        model()
    except (PydanticUserError, ValidationError) as wrong:
        raise TypeError(f"{name}: {wrong}") from None
    return model
