"""The strategy interface: an async generator function of `(request, cluster)` and parameters."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from importlib.abc import InspectLoader
from typing import Any

from pydantic_core import to_jsonable_python

from engine.protocol import BadRequest
from router.base import Chunk, Request
from router.strategy.call import StrategyCall
from router.strategy.cluster import Cluster
from router.strategy.params import Params

__all__ = ["Bound", "Strategy", "strategy"]

Function = Callable[..., AsyncGenerator[Chunk, None]]


class Strategy:
    """A named strategy with typed parameters. Made by `@strategy`.

    `source` is that of its module, and `source_sha256` distinguishes versions; both are empty if
    the source is not available.
    """

    def __init__(self, function: Function) -> None:
        name = getattr(function, "__name__", repr(function))
        if not inspect.isasyncgenfunction(function):
            raise TypeError(f"{name}: a strategy is an async function that yields")
        self.name = name
        # Half of a surrogate pair can be in a literal, but in no JSON.
        self.doc = (inspect.getdoc(function) or "").encode("utf-8", "replace").decode()
        self.function: Function = function
        self.source = _source(function.__module__)
        self.source_sha256 = _digest(self.source)
        self._params = Params(function)

    def __call__(self, request: Request, cluster: Cluster, **params: Any) -> StrategyCall:
        """Call it from another strategy, with what that one was called with.

        Its chunks, calls to engines and errors are as if its body stood there. Raises `ValueError`
        for the first invalid one of `params`, and `RecursionError` if too many strategies call each
        other.
        """
        try:
            checked = self._params.validate(params)
        except BadRequest as wrong:  # of the caller's code; the client has done nothing wrong
            raise ValueError(f"strategy {self.name}: {wrong.message}") from None
        return self.run(request, cluster, checked)

    def run(self, request: Request, caller: Cluster, params: dict[str, Any]) -> StrategyCall:
        """Call it with valid `params`; `caller` is the cluster of whoever calls."""
        cluster = caller._inside(self)
        return StrategyCall(self.name, self.function(request, cluster, **params), cluster, caller)

    def bind(self, params: Mapping[str, Any]) -> Bound:
        """Return this strategy with `params`. Raises `BadRequest`, naming the first invalid one."""
        try:
            return Bound(self, self._params.validate(params))
        except BadRequest as wrong:
            message = f"strategy {self.name}: {wrong.message}"
            raise BadRequest(message, param=wrong.param) from None

    def describe(self) -> dict[str, Any]:
        """Return name, help and the JSON schema of each parameter, for the admin API."""
        return {
            "name": self.name,
            "doc": self.doc,
            "params": self._params.describe(),
            "source_sha256": self.source_sha256,
        }


class Bound:
    """A strategy together with its parameters."""

    __slots__ = ("params", "strategy")

    def __init__(self, strategy: Strategy, params: dict[str, Any]) -> None:
        self.strategy = strategy
        self.params = params

    @property
    def shown(self) -> dict[str, Any]:
        """The parameters as JSON values."""
        return {name: to_jsonable_python(value) for name, value in self.params.items()}

    def run(self, request: Request, cluster: Cluster) -> StrategyCall:
        return self.strategy.run(request, cluster, self.params)


def strategy(function: Function) -> Strategy:
    """Make a strategy from an async generator function `(request, cluster, *, param=default, …)`.

    The function's name and docstring become the strategy's. Its keyword-only parameters, which need
    defaults, become the strategy's parameters, validated by their annotations. Raises `TypeError`
    for a function of another shape.
    """
    return Strategy(function)


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest() if source else ""


def _source(name: str) -> str:
    module = sys.modules.get(name)
    loader = getattr(module, "__loader__", None)
    source = None
    with suppress(ImportError, OSError, TypeError):  # no Python module, or no file
        if isinstance(loader, InspectLoader):
            source = loader.get_source(name)
        elif module is not None:
            source = inspect.getsource(module)
    return source or ""
